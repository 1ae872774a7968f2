//! Posting: the caller's half of a QP's queues.
//!
//! Owns the checks that can be made at the call, without the engine: sizes, operation against transport, state. Never
//! looks at keys: those are checked when the work request is executed, as on hardware.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering, fence};

use crate::ring::WqeProducer;
use crate::srq::RecvProducer;
use crate::verbs::{
    Operation, Payload, PostError, PostListError, QpCapabilities, QpState, QpType, RecvHead, RecvWr, SendHead, SendWr,
    Sge,
};

/// The longest message, in bytes.
pub const MAX_MESSAGE: u64 = 1 << 31;

/// The caller's half of a send queue.
pub type SendProducer = WqeProducer<SendHead, Sge>;

/// What both halves of a QP see: written by the engine, read at post.
#[derive(Debug)]
pub struct QpShared {
    state: AtomicU8,
    max_rd_atomic: AtomicU8,
    datagram_mtu: AtomicU16,
}

impl QpShared {
    pub(crate) fn new(datagram_mtu: u16) -> Self {
        Self {
            state: AtomicU8::new(QpState::Reset as u8),
            max_rd_atomic: AtomicU8::new(0),
            datagram_mtu: AtomicU16::new(datagram_mtu),
        }
    }

    /// As it was made.
    pub(super) fn reset(&self) {
        self.publish(QpState::Reset, 0);
    }

    pub(crate) fn publish(&self, state: QpState, max_rd_atomic: u8) {
        self.max_rd_atomic.store(max_rd_atomic, Ordering::Release);
        self.state.store(state as u8, Ordering::Release);
        // Pairs with the fence in `Poster::flushes`: a post either sees ERR, or is seen by the flush that follows.
        fence(Ordering::SeqCst);
    }

    fn state(&self) -> QpState {
        let v = self.state.load(Ordering::Acquire);
        QpState::ALL.into_iter().find(|s| *s as u8 == v).unwrap_or(QpState::Err)
    }
}

/// The caller's half of a QP.
#[derive(Debug)]
pub struct Poster {
    pub(crate) qp_type: QpType,
    pub(crate) caps: QpCapabilities,
    pub(crate) shared: Arc<QpShared>,
    pub(crate) send: SendProducer,
    pub(crate) recv: Option<RecvProducer>,
}

impl Poster {
    /// Queues send work requests in order; those before a bad one stay queued.
    ///
    /// # Errors
    /// [`PostListError`].
    pub fn post_send(&mut self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        for (index, wr) in list.iter().enumerate() {
            self.post_one(wr).map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    fn post_one(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let state = self.shared.state();
        if matches!(state, QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(PostError::WrongState(state));
        }
        let head = self.check(wr)?;
        let (sges, inline): (&[Sge], &[u8]) = match wr.payload {
            Payload::Sges(s) => (s, &[]),
            Payload::Inline(b) => (&[], b),
        };
        self.send.push(head, sges, inline).map_err(|_| PostError::QueueFull)
    }

    fn check(&self, wr: &SendWr<'_>) -> Result<SendHead, PostError> {
        check_operation(self.qp_type, wr)?;
        let (num_sge, inline, length) = match wr.payload {
            Payload::Sges([]) if takes_no_payload(&wr.operation) => (0, 0, 0),
            _ if takes_no_payload(&wr.operation) => return Err(PostError::PayloadNotAllowed),
            Payload::Sges(s) => (check_sge_count(s, self.caps.max_send_sge)?, 0, sum(s)),
            Payload::Inline(_) if wr.operation.is_read_or_atomic() => return Err(PostError::InlineNotAllowed),
            Payload::Inline(b) => {
                let max = self.caps.max_inline as usize;
                let given = b.len();
                let inline = u16::try_from(given).ok().filter(|_| given <= max);
                (0, inline.ok_or(PostError::InlineTooLong { given, max })?, given as u64)
            }
        };
        let max = match self.qp_type {
            QpType::Rc | QpType::Uc => MAX_MESSAGE,
            QpType::Ud | QpType::Gsi => self.shared.datagram_mtu.load(Ordering::Relaxed).into(),
        };
        let length = u32::try_from(length)
            .ok()
            .filter(|_| length <= max)
            .ok_or(PostError::MessageTooLong { len: length, max })?;
        if let Operation::Flush { length, .. } = wr.operation
            && u64::from(length) > MAX_MESSAGE
        {
            return Err(PostError::MessageTooLong { len: length.into(), max: MAX_MESSAGE });
        }
        if wr.operation.awaits_response() && self.shared.max_rd_atomic.load(Ordering::Acquire) == 0 {
            return Err(PostError::NoReadDepth);
        }
        if (wr.operation.is_atomic() || matches!(wr.operation, Operation::AtomicWrite(_))) && length != 8 {
            return Err(PostError::AtomicLength(length));
        }
        Ok(SendHead {
            wr_id: wr.wr_id,
            operation: wr.operation,
            flags: wr.flags,
            destination: wr.destination,
            num_sge,
            inline,
            length,
        })
    }

    /// Queues receive work requests in order.
    ///
    /// # Errors
    /// [`PostListError`].
    pub fn post_recv(&mut self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let state = self.shared.state();
        for (index, wr) in list.iter().enumerate() {
            let posted = match &mut self.recv {
                _ if state == QpState::Reset => Err(PostError::WrongState(state)),
                None => Err(PostError::HasSrq),
                Some(ring) => post_recv_to(ring, wr),
            };
            posted.map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    /// Whether what is posted now is flushed: the QP is in ERR.
    #[must_use]
    pub fn flushes(&self) -> bool {
        fence(Ordering::SeqCst);
        self.shared.state() == QpState::Err
    }

    /// Send work requests posted and not completed.
    #[must_use]
    pub fn sends_outstanding(&self) -> usize {
        self.send.outstanding()
    }
}

/// Queues one receive on the caller's half of a receive queue.
///
/// # Errors
/// [`PostError`].
pub fn post_recv_to(ring: &mut RecvProducer, wr: &RecvWr<'_>) -> Result<(), PostError> {
    let max = u32::try_from(ring.size().sges).unwrap_or(u32::MAX);
    let num_sge = check_sge_count(wr.sges, max)?;
    // Room beyond 4 GiB cannot be filled by any message.
    let length = u32::try_from(sum(wr.sges)).unwrap_or(u32::MAX);
    ring.push(RecvHead { wr_id: wr.wr_id, num_sge, length }, wr.sges, &[]).map_err(|_| PostError::QueueFull)
}

fn sum(sges: &[Sge]) -> u64 {
    sges.iter().map(|s| u64::from(s.length)).sum()
}

pub(crate) fn check_sge_count(sges: &[Sge], max: u32) -> Result<u8, PostError> {
    let (given, max) = (sges.len(), max as usize);
    u8::try_from(given).ok().filter(|_| given <= max).ok_or(PostError::TooManySges { given, max })
}

/// Operations that say all in the work request itself.
fn takes_no_payload(op: &Operation) -> bool {
    op.is_local() || matches!(op, Operation::Flush { .. })
}

pub(crate) fn check_operation(qp_type: QpType, wr: &SendWr<'_>) -> Result<(), PostError> {
    let fits = match wr.operation {
        Operation::Send | Operation::SendImm(_) => true,
        Operation::Write(_) | Operation::WriteImm(..) => !qp_type.is_datagram(),
        Operation::SendInvalidate(_) | Operation::Read(_) => qp_type == QpType::Rc,
        Operation::CompareSwap { remote, .. } | Operation::FetchAdd { remote, .. } => {
            if remote.addr % 8 != 0 {
                return Err(PostError::AtomicAlignment);
            }
            qp_type == QpType::Rc
        }
        Operation::AtomicWrite(remote) => {
            if remote.addr % 8 != 0 {
                return Err(PostError::AtomicAlignment);
            }
            qp_type == QpType::Rc
        }
        Operation::Flush { .. } => qp_type == QpType::Rc,
        Operation::BindMw(_) | Operation::LocalInvalidate(_) | Operation::FastRegister(_) => !qp_type.is_datagram(),
    };
    if !fits {
        return Err(PostError::WrongOperation);
    }
    if wr.destination.is_some() != qp_type.is_datagram() {
        return Err(PostError::Destination);
    }
    Ok(())
}
