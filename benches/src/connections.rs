//! Connections as fast as they go: a client that keeps a number of them under way, and the server it connects to.
//!
//! A connection is all that a program does for one: on each side a QP is made, moved to INIT, RTR and RTS, moved to ERR
//! at the end and destroyed; an id is made and destroyed; five MADs cross the wire as real datagrams of QP1 (REQ, REP,
//! RTU, DREQ, DREP), with their retry timers and the TIMEWAIT records of both sides. Each side has one CQ for all its
//! QPs. Owns who stands where; never reads a clock: `now` is an argument, so that it runs in real and in virtual time.

use std::collections::VecDeque;
use std::net::SocketAddr;

use hdrhistogram::Histogram;
use uroce::raw::Region;
use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::verbs::{
    AccessFlags, CqHandle, MemoryRegion, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType,
    RecvWr, SendFlags, SendWr, Sge, Verbs, WcStatus, WorkCompletion,
};
use uroce_cm::agent::CmError;
use uroce_cm::id::IdError;
use uroce_cm::wire::PortSpace;
use uroce_cm::{Cm, CmConfig, ConnParam, EventKind, IdEvent, IdHandle, RdmaCm as _};

/// Port of the server.
pub const PORT: u16 = 7471;
/// Bytes of the message that a connection may carry.
pub const MESSAGE: u32 = 64;
/// Connections that may be ending at any time.
const ENDING_MAX: u64 = 4096;
/// Messages of all connections together that may wait in a CQ.
const CQ_DEPTH: u32 = 8192;
/// Latencies up to this are told apart; longer ones count as this.
const LATENCY_MAX: u64 = 120_000_000_000;

/// What both sides have.
struct Common {
    cm: Cm,
    pd: PdHandle,
    cq: CqHandle,
    mr: MemoryRegion,
    message: bool,
    /// By the slot of the id.
    qps: Vec<Option<Slot>>,
    /// By the slot of the QP: its id.
    ids: Vec<Option<IdHandle>>,
}

#[derive(Clone, Copy)]
struct Slot {
    qp: QpHandle,
    begun: Instant,
}

/// Sets an entry of a table that grows as it must.
fn set<T: Clone>(table: &mut Vec<Option<T>>, index: u32, value: Option<T>) {
    let index = index as usize;
    if index >= table.len() {
        table.resize(index + 1, None);
    }
    table[index] = value;
}

impl Common {
    fn new(verbs: &mut dyn Verbs, config: CmConfig, message: bool, rng: Rng) -> Self {
        let cm = Cm::new(verbs, config, rng).expect("QP1 is free");
        let pd = verbs.alloc_pd().expect("room for a PD");
        let cq = verbs.create_cq(CQ_DEPTH).expect("room for a CQ");
        let region = Region::alloc(MESSAGE as usize).expect("memory");
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).expect("room for an MR");
        Self { cm, pd, cq, mr, message, qps: Vec::new(), ids: Vec::new() }
    }

    fn sge(&self) -> [Sge; 1] {
        [Sge { addr: self.mr.iova, length: MESSAGE, lkey: self.mr.lkey }]
    }

    /// A QP for an id, in INIT. One whose number waits in TIMEWAIT is replaced by another.
    fn attach(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> QpHandle {
        let caps = QpCapabilities { max_send_wr: 16, max_recv_wr: 16, max_inline: 0, ..QpCapabilities::default() };
        let (pd, cq) = (self.pd, self.cq);
        let init =
            QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
        let qp = loop {
            let qp = verbs.create_qp(init).expect("room for a QP");
            match self.cm.attach_qp(verbs, id, qp) {
                Ok(()) => break qp,
                Err(IdError::Cm(CmError::QpBusy(_))) => verbs.destroy_qp(qp).expect("it lives"),
                Err(error) => panic!("{error}"),
            }
        };
        set(&mut self.qps, id.slot(), Some(Slot { qp, begun: now }));
        set(&mut self.ids, qp.slot(), Some(id));
        qp
    }

    fn slot(&self, id: IdHandle) -> Option<Slot> {
        self.qps.get(id.slot() as usize).copied().flatten()
    }

    /// Destroys an id and its QP.
    fn destroy(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) {
        if let Some(slot) = self.slot(id) {
            verbs.destroy_qp(slot.qp).expect("it lives");
            set(&mut self.qps, id.slot(), None);
            set(&mut self.ids, slot.qp.slot(), None);
        }
        self.cm.destroy_id(now, verbs, id).expect("it lives");
    }

    /// The ids of messages that have completed, `out` filled with them.
    fn completed(&self, verbs: &mut dyn Verbs, blank: Option<QpHandle>, out: &mut VecDeque<IdHandle>) {
        let Some(qp) = blank else { return };
        let mut batch = [WorkCompletion::blank(qp); 16];
        loop {
            let n = verbs.poll_cq(self.cq, &mut batch).expect("it lives");
            let ok = batch[..n].iter().filter(|wc| wc.status == WcStatus::Success);
            out.extend(ok.filter_map(|wc| self.ids.get(wc.qp.slot() as usize).copied().flatten()));
            if n < batch.len() {
                return;
            }
        }
    }
}

/// The side that accepts.
pub struct Server {
    common: Common,
    /// Connections that came and went.
    pub ended: u64,
    any_qp: Option<QpHandle>,
}

impl Server {
    /// Listens on [`PORT`] of `address`, and with `message` posts a receive for each connection.
    ///
    /// # Panics
    /// When the endpoint has no room.
    #[must_use]
    pub fn new(verbs: &mut dyn Verbs, config: CmConfig, address: SocketAddr, message: bool, rng: Rng) -> Self {
        let mut common = Common::new(verbs, config, message, rng);
        let id = common.cm.create_id(PortSpace::Tcp).expect("room for an id");
        common.cm.bind_addr(verbs, id, address).expect("an address of the endpoint");
        common.cm.listen(id, 4096).expect("a free port");
        Self { common, ended: 0, any_qp: None }
    }

    /// Does what there is to do, and all that follows from it: so the MADs of one turn leave together. Returns whether
    /// there was anything.
    ///
    /// # Panics
    /// When QP1 is gone.
    pub fn work(&mut self, now: Instant, verbs: &mut dyn Verbs) -> bool {
        let mut busy = false;
        while self.pass(now, verbs) {
            busy = true;
        }
        busy
    }

    fn pass(&mut self, now: Instant, verbs: &mut dyn Verbs) -> bool {
        let mut busy = self.common.cm.poll(now, verbs).expect("QP1 lives");
        while let Some(event) = self.common.cm.poll_event() {
            self.on_event(now, verbs, &event);
            busy = true;
        }
        if self.common.message {
            self.common.completed(verbs, self.any_qp, &mut VecDeque::new());
        }
        busy
    }

    fn on_event(&mut self, now: Instant, verbs: &mut dyn Verbs, event: &IdEvent) {
        let id = event.id;
        match event.kind {
            EventKind::ConnectRequest => {
                let qp = self.common.attach(now, verbs, id);
                self.any_qp = Some(qp);
                if self.common.message {
                    verbs.post_recv(qp, &[RecvWr { wr_id: 0, sges: &self.common.sge() }]).expect("room for a receive");
                }
                // Refused where the client has lost patience.
                if self.common.cm.accept(now, verbs, id, &ConnParam::default()).is_err() {
                    self.common.destroy(now, verbs, id);
                }
            }
            EventKind::Disconnected => {
                // Agrees; there is nothing to agree to when the peer is silent.
                let _ = self.common.cm.disconnect(now, verbs, id);
                self.common.destroy(now, verbs, id);
                self.ended += 1;
            }
            EventKind::Rejected | EventKind::Unreachable => self.common.destroy(now, verbs, id),
            _ => {}
        }
    }

    /// When [`Server::work`] wants to be called though nothing arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.common.cm.poll_timeout()
    }

    /// Its connection manager.
    #[must_use]
    pub const fn cm(&self) -> &Cm {
        &self.common.cm
    }
}

/// What a client is to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The server.
    pub server: SocketAddr,
    /// Connections in all.
    pub count: u64,
    /// Connections in the making at any time. Those that are ending come on top, as with TCP, where `close` waits for
    /// nobody.
    pub at_once: u64,
    /// Each carries one SEND of [`MESSAGE`] bytes before it ends.
    pub message: bool,
}

/// The side that connects.
pub struct Client {
    common: Common,
    plan: Plan,
    begun: u64,
    established: u64,
    /// Connections that were established and have ended.
    pub ended: u64,
    /// Connections that did not come about.
    pub failed: u64,
    /// From the making of the QP to ESTABLISHED, in nanoseconds.
    pub latency: Histogram<u64>,
    done: VecDeque<IdHandle>,
    any_qp: Option<QpHandle>,
}

impl Client {
    /// A client that has not begun.
    ///
    /// # Panics
    /// When the endpoint has no room.
    #[must_use]
    pub fn new(verbs: &mut dyn Verbs, config: CmConfig, plan: Plan, rng: Rng) -> Self {
        let latency = Histogram::new_with_max(LATENCY_MAX, 3).expect("fixed bounds");
        Self {
            common: Common::new(verbs, config, plan.message, rng),
            plan,
            begun: 0,
            established: 0,
            ended: 0,
            failed: 0,
            latency,
            done: VecDeque::new(),
            any_qp: None,
        }
    }

    /// Whether all connections have come and gone.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.ended + self.failed >= self.plan.count
    }

    /// Does what there is to do, begins connections, and does all that follows from it: so the MADs of one turn leave
    /// together. Returns whether there was anything.
    ///
    /// # Panics
    /// When QP1 is gone.
    pub fn work(&mut self, now: Instant, verbs: &mut dyn Verbs) -> bool {
        let mut busy = false;
        while self.pass(now, verbs) {
            busy = true;
        }
        busy
    }

    fn pass(&mut self, now: Instant, verbs: &mut dyn Verbs) -> bool {
        let mut busy = false;
        while self.begun < self.plan.count && self.may_begin() {
            self.begin(verbs);
            busy = true;
        }
        busy |= self.common.cm.poll(now, verbs).expect("QP1 lives");
        while let Some(event) = self.common.cm.poll_event() {
            self.on_event(now, verbs, &event);
            busy = true;
        }
        if self.plan.message {
            self.common.completed(verbs, self.any_qp, &mut self.done);
            while let Some(id) = self.done.pop_front() {
                self.common.cm.disconnect(now, verbs, id).expect("it is established");
                busy = true;
            }
        }
        busy
    }

    fn may_begin(&self) -> bool {
        let (making, ending) = (self.begun - self.established - self.failed, self.established - self.ended);
        making < self.plan.at_once && ending < ENDING_MAX
    }

    fn begin(&mut self, verbs: &mut dyn Verbs) {
        self.begun += 1;
        let id = self.common.cm.create_id(PortSpace::Tcp).expect("room for an id");
        self.common.cm.resolve_addr(verbs, id, None, self.plan.server).expect("a fresh id");
    }

    fn on_event(&mut self, now: Instant, verbs: &mut dyn Verbs, event: &IdEvent) {
        let id = event.id;
        match event.kind {
            EventKind::AddrResolved => self.common.cm.resolve_route(verbs, id).expect("an id with an address"),
            EventKind::RouteResolved => self.connect(now, verbs, id),
            EventKind::Established => {
                let Some(slot) = self.common.slot(id) else { return };
                self.established += 1;
                self.latency.saturating_record(nanos(now.saturating_since(slot.begun)));
                if self.plan.message {
                    self.send(verbs, slot.qp);
                } else {
                    self.common.cm.disconnect(now, verbs, id).expect("it is established");
                }
            }
            EventKind::Disconnected => {
                self.common.destroy(now, verbs, id);
                self.ended += 1;
            }
            EventKind::Rejected | EventKind::Unreachable | EventKind::AddrError | EventKind::ConnectError => {
                self.common.destroy(now, verbs, id);
                self.failed += 1;
            }
            _ => {}
        }
    }

    /// Makes a QP and asks for the connection.
    fn connect(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) {
        let qp = self.common.attach(now, verbs, id);
        self.any_qp = Some(qp);
        self.common.cm.connect(now, verbs, id, &ConnParam::default()).expect("a resolved id");
    }

    fn send(&self, verbs: &mut dyn Verbs, qp: QpHandle) {
        let sges = self.common.sge();
        let wr = SendWr {
            wr_id: 0,
            operation: Operation::Send,
            payload: Payload::Sges(&sges),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        verbs.post_send(qp, &[wr]).expect("a QP in RTS");
    }

    /// When [`Client::work`] wants to be called though nothing arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.common.cm.poll_timeout()
    }

    /// Its connection manager.
    #[must_use]
    pub const fn cm(&self) -> &Cm {
        &self.common.cm
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}
