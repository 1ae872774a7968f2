//! A pool at work: over any connection manager front, on any device.
//!
//! Owns the QPs and CQs of the pool's connections, and the sequence of calls that makes one. Reads no clock and never
//! blocks: the program that drives device and front calls [`PoolDriver::poll`] as well.

use core::net::SocketAddr;
use std::collections::BTreeMap;

use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::Rkey;
use uroce::verbs::{
    CqHandle, Operation, Payload, PdHandle, PostListError, QpCapabilities, QpHandle, QpInit, QpType, Remote, SendFlags,
    SendWr, Verbs, VerbsError, WcStatus, WorkCompletion,
};

use super::{ConnectionPool, PoolAction, PoolConfig, PoolKey, PoolStats};
use crate::id::{ConnParam, EventKind, IdError, IdEvent, IdHandle, IdOptions, RdmaCm};
use crate::wire::PortSpace;

/// Work request id of a health probe: a WRITE of no bytes.
pub const PROBE_WR_ID: u64 = 0x7072_6f62_6500_0000;

/// Actions of one call: a refusal at once that may be tried again at once shall not hold up the program.
const ACTIONS_PER_POLL: usize = 256;

/// What the QPs of a pool are made of. Each has a CQ of its own for sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolQp {
    /// Protection domain.
    pub pd: PdHandle,
    /// Sizes of the queues.
    pub caps: QpCapabilities,
    /// Entries of the CQ: all sends and receives that can be outstanding, and one for the probe.
    pub cq_depth: u32,
}

/// A call of the pool was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The connection manager refused.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A verb was refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A probe could not be posted.
    #[error(transparent)]
    Post(#[from] PostListError),
}

/// A connection that was lent: established, its QP in RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PooledConnection {
    /// To give it back.
    pub key: PoolKey,
    /// Its id in the connection manager.
    pub id: IdHandle,
    /// Its QP.
    pub qp: QpHandle,
    /// Its CQ, empty when it is lent.
    pub cq: CqHandle,
}

/// A pool of connections to one address.
pub struct PoolDriver {
    pool: ConnectionPool,
    qp: PoolQp,
    peer: SocketAddr,
    source: Option<SocketAddr>,
    options: IdOptions,
    conns: BTreeMap<PoolKey, PooledConnection>,
    by_id: BTreeMap<IdHandle, PoolKey>,
    /// The connection whose probe is under way.
    probing: Option<PoolKey>,
    last_error: Option<PoolError>,
}

impl PoolDriver {
    /// A pool of connections to `peer`; nothing is done before the first [`PoolDriver::poll`].
    #[must_use]
    pub fn new(config: PoolConfig, qp: PoolQp, peer: SocketAddr, rng: Rng) -> Self {
        Self {
            pool: ConnectionPool::new(config, rng),
            qp,
            peer,
            source: None,
            options: IdOptions::default(),
            conns: BTreeMap::new(),
            by_id: BTreeMap::new(),
            probing: None,
            last_error: None,
        }
    }

    /// The address to connect from, and the options of each connection.
    #[must_use]
    pub const fn with_options(mut self, source: Option<SocketAddr>, options: IdOptions) -> Self {
        self.source = source;
        self.options = options;
        self
    }

    /// Connections by state.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Whether it was given up to connect; see [`ConnectionPool::gave_up`].
    #[must_use]
    pub const fn gave_up(&self) -> bool {
        self.pool.gave_up()
    }

    /// Why a call was refused last, once. What a peer refuses is in the events.
    pub fn take_error(&mut self) -> Option<PoolError> {
        self.last_error.take()
    }

    /// Lends a connection; `None` when none is ready: one is on its way then, if there may be more.
    pub fn checkout(&mut self) -> Option<PooledConnection> {
        let key = self.pool.checkout()?;
        self.conns.get(&key).copied()
    }

    /// Takes a connection back. All its work must be completed and taken from its CQ. False when it failed meanwhile.
    pub fn checkin(&mut self, now: Instant, key: PoolKey) -> bool {
        self.pool.checkin(now, key)
    }

    /// Takes a connection back that does not work any more: it is closed.
    pub fn discard(&mut self, now: Instant, key: PoolKey) {
        self.pool.failed(now, key);
    }

    /// Works: call it whenever device or front did, and at [`PoolDriver::poll_timeout`].
    pub fn poll(&mut self, now: Instant, cm: &mut dyn RdmaCm, verbs: &mut dyn Verbs) {
        self.look_for_probe(now, verbs);
        for _ in 0..ACTIONS_PER_POLL {
            let Some(action) = self.pool.poll_action(now) else { break };
            let (key, done) = match action {
                PoolAction::Connect(key) => (key, self.begin(now, key, cm, verbs)),
                PoolAction::Probe(key) => (key, self.probe(key, verbs)),
                PoolAction::Close(key) => {
                    self.close(now, key, cm, verbs);
                    continue;
                }
            };
            if let Err(error) = done {
                self.last_error = Some(error);
                self.pool.failed(now, key);
            }
        }
    }

    /// When [`PoolDriver::poll`] wants to be called though nothing happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.pool.poll_timeout()
    }

    /// Takes an event of the front. False when it is of another id: then it is the program's.
    pub fn on_event(&mut self, now: Instant, cm: &mut dyn RdmaCm, verbs: &mut dyn Verbs, event: &IdEvent) -> bool {
        let Some(key) = self.by_id.get(&event.id).copied() else { return false };
        let done = match event.kind {
            EventKind::AddrResolved => cm.resolve_route(verbs, event.id).map_err(PoolError::from),
            EventKind::RouteResolved => self.connect(now, key, cm, verbs),
            EventKind::Established => {
                self.pool.connected(now, key);
                Ok(())
            }
            EventKind::TimewaitExit | EventKind::AddrChange => Ok(()),
            _ => {
                self.pool.failed(now, key);
                Ok(())
            }
        };
        if let Err(error) = done {
            self.last_error = Some(error);
            self.pool.failed(now, key);
        }
        self.poll(now, cm, verbs);
        true
    }

    /// Closes all connections, lent ones too.
    pub fn close_all(&mut self, now: Instant, cm: &mut dyn RdmaCm, verbs: &mut dyn Verbs) {
        let keys: Vec<PoolKey> = self.conns.keys().copied().collect();
        for key in keys {
            self.pool.failed(now, key);
            self.close(now, key, cm, verbs);
        }
    }

    fn begin(
        &mut self,
        now: Instant,
        key: PoolKey,
        cm: &mut dyn RdmaCm,
        verbs: &mut dyn Verbs,
    ) -> Result<(), PoolError> {
        let id = cm.create_id(PortSpace::Tcp)?;
        let made = self.make_qp(verbs);
        let Ok((qp, cq)) = made else {
            // Made just now, and bound to nothing.
            let _ = cm.destroy_id(now, verbs, id);
            return made.map(|_| ()).map_err(PoolError::from);
        };
        self.conns.insert(key, PooledConnection { key, id, qp, cq });
        self.by_id.insert(id, key);
        cm.set_options(id, self.options)?;
        Ok(cm.resolve_addr(verbs, id, self.source, self.peer)?)
    }

    fn make_qp(&self, verbs: &mut dyn Verbs) -> Result<(QpHandle, CqHandle), VerbsError> {
        let PoolQp { pd, caps, cq_depth } = self.qp;
        let cq = verbs.create_cq(cq_depth)?;
        let init =
            QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
        match verbs.create_qp(init) {
            Ok(qp) => Ok((qp, cq)),
            Err(error) => {
                // Nothing uses it.
                let _ = verbs.destroy_cq(cq);
                Err(error)
            }
        }
    }

    fn connect(
        &mut self,
        now: Instant,
        key: PoolKey,
        cm: &mut dyn RdmaCm,
        verbs: &mut dyn Verbs,
    ) -> Result<(), PoolError> {
        let Some(conn) = self.conns.get(&key) else { return Ok(()) };
        cm.attach_qp(verbs, conn.id, conn.qp)?;
        Ok(cm.connect(now, verbs, conn.id, &ConnParam::default())?)
    }

    /// A WRITE of no bytes touches no memory and needs no key, but the peer's QP answers it.
    fn probe(&mut self, key: PoolKey, verbs: &mut dyn Verbs) -> Result<(), PoolError> {
        let Some(conn) = self.conns.get(&key) else { return Ok(()) };
        let wr = SendWr {
            wr_id: PROBE_WR_ID,
            operation: Operation::Write(Remote { addr: 0, rkey: Rkey::new(0) }),
            payload: Payload::Sges(&[]),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        verbs.post_send(conn.qp, &[wr])?;
        self.probing = Some(key);
        Ok(())
    }

    /// Whether the probe has completed. An unused connection has no other sends.
    fn look_for_probe(&mut self, now: Instant, verbs: &mut dyn Verbs) {
        let Some(conn) = self.probing.and_then(|key| self.conns.get(&key)) else { return };
        let mut completion = [WorkCompletion::blank(conn.qp)];
        let key = conn.key;
        loop {
            let ok = match verbs.poll_cq(conn.cq, &mut completion) {
                Ok(0) => return,
                Ok(_) => completion.iter().all(|c| c.status == WcStatus::Success),
                Err(_) => false,
            };
            let is_probe = completion.iter().any(|c| c.wr_id == PROBE_WR_ID);
            if !ok {
                self.probing = None;
                self.pool.failed(now, key);
                return;
            }
            if is_probe {
                self.probing = None;
                self.pool.probed(now, key);
                return;
            }
        }
    }

    fn close(&mut self, now: Instant, key: PoolKey, cm: &mut dyn RdmaCm, verbs: &mut dyn Verbs) {
        let Some(conn) = self.conns.remove(&key) else { return };
        self.by_id.remove(&conn.id);
        if self.probing == Some(key) {
            self.probing = None;
        }
        // They are this pool's, and in no other's hands: nothing can be refused but what is gone with the device.
        let _ = cm.destroy_id(now, verbs, conn.id);
        let _ = verbs.destroy_qp(conn.qp);
        let _ = verbs.destroy_cq(conn.cq);
    }
}
