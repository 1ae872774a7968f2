//! Ending a connection without losing what was posted.
//!
//! Owns one ending: wait until all sends are done, then disconnect; at a deadline disconnect all the same. Sans-IO: the
//! caller drives device and connection manager, and keeps polling its CQ meanwhile.

use uroce::time::Instant;
use uroce::verbs::{QpHandle, QpState, Verbs};

use crate::id::{IdError, IdHandle, RdmaCm};

/// How a drain ended. The connection is being disconnected in each case: `RDMA_CM_EVENT_DISCONNECTED` follows, if the
/// peer has not parted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainEnd {
    /// Every send had completed.
    Drained,
    /// The time was over: this many sends were flushed.
    DeadlinePassed {
        /// Sends that complete with a flush error.
        flushed: u32,
    },
    /// The QP had failed, or the peer parted: its sends were flushed before.
    Failed,
}

/// A drain under way, made by [`drain_and_disconnect`].
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    id: IdHandle,
    qp: QpHandle,
    deadline: Instant,
    end: Option<DrainEnd>,
}

/// Begins to drain the QP of a connection: post nothing more to it, and call [`Drain::poll`].
#[must_use]
pub const fn drain_and_disconnect(id: IdHandle, qp: QpHandle, deadline: Instant) -> Drain {
    Drain { id, qp, deadline, end: None }
}

impl Drain {
    /// Looks whether the sends are done or the time is over, and disconnects then. Call it whenever completions came, and
    /// at [`Drain::poll_timeout`]. Gives the end once it is there, and again when asked again.
    ///
    /// # Errors
    /// [`IdError`]: the id or the QP is gone, or the id is of no connection.
    pub fn poll(
        &mut self,
        now: Instant,
        cm: &mut dyn RdmaCm,
        verbs: &mut dyn Verbs,
    ) -> Result<Option<DrainEnd>, IdError> {
        if self.end.is_some() {
            return Ok(self.end);
        }
        let info = verbs.query_qp(self.qp)?;
        let outstanding = info.queues.sends_outstanding;
        let end = if info.state == QpState::Err {
            DrainEnd::Failed
        } else if outstanding == 0 {
            DrainEnd::Drained
        } else if now >= self.deadline {
            DrainEnd::DeadlinePassed { flushed: outstanding }
        } else {
            return Ok(None);
        };
        // It moves the QP to ERR: what is outstanding is flushed.
        match cm.disconnect(now, verbs, self.id) {
            // The peer parted first, and TIMEWAIT is over too.
            Err(IdError::WrongState(_)) if end == DrainEnd::Failed => {}
            done => done?,
        }
        self.end = Some(end);
        Ok(self.end)
    }

    /// The deadline, until the end is there.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.end.is_none().then_some(self.deadline)
    }
}
