//! One end of a connection, on any verbs, for benchmarks whose two ends live in different threads.
//!
//! Owns a PD, a CQ, a QP and a region. Never drives, waits or measures.

use uroce::raw::Region;
use uroce::types::{Gid, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle, QpCapabilities,
    QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs, WcOpcode,
    WcStatus, WorkCompletion,
};

/// Work requests that a queue holds.
pub const QUEUE: u32 = 256;

/// What a peer must know.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    /// Address.
    pub gid: Gid,
    /// QP.
    pub qpn: Qpn,
    /// Memory.
    pub remote: Remote,
}

/// What completions came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Came {
    /// Of requests.
    pub sent: u32,
    /// Of receives.
    pub received: u32,
}

/// One end.
pub struct Party {
    gid: Gid,
    qpn: Qpn,
    /// Protection domain.
    pub pd: PdHandle,
    /// Queue pair.
    pub qp: QpHandle,
    /// Both its completion queues.
    pub cq: CqHandle,
    /// Its memory.
    pub mr: MemoryRegion,
    /// The same.
    pub region: Region,
}

impl Party {
    /// An end with `memory` bytes.
    ///
    /// # Panics
    /// Where there is no memory.
    #[must_use]
    pub fn new(verbs: &mut dyn Verbs, memory: usize) -> Self {
        let pd = verbs.alloc_pd().expect("room for a PD");
        let cq = verbs.create_cq(2 * QUEUE).expect("room for a CQ");
        Self::with_cq(verbs, memory, pd, cq)
    }

    /// As [`Self::new`], with a CQ that others use too.
    ///
    /// # Panics
    /// Where there is no memory.
    #[must_use]
    pub fn with_cq(verbs: &mut dyn Verbs, memory: usize, pd: PdHandle, cq: CqHandle) -> Self {
        let caps = QpCapabilities { max_send_wr: QUEUE, max_recv_wr: QUEUE, ..QpCapabilities::default() };
        let init =
            QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
        let qp = verbs.create_qp(init).expect("room for a QP");
        let region = Region::alloc(memory).expect("memory");
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).expect("room for an MR");
        let qpn = verbs.query_qp(qp).expect("it lives").qpn;
        Self { gid: verbs.query_gids()[0].gid, qpn, pd, qp, cq, mr, region }
    }

    /// For the peer.
    #[must_use]
    pub fn name(&self) -> Name {
        Name { gid: self.gid, qpn: self.qpn, remote: Remote { addr: self.mr.iova, rkey: self.mr.rkey } }
    }

    /// Connects to `peer`, retrying for ever where it has no receive.
    ///
    /// # Panics
    /// When the states do not follow each other.
    pub fn connect(&self, verbs: &mut dyn Verbs, peer: &Name, path_mtu: PathMtu, rnr: RnrTimer) {
        let rtr = RtrAttr {
            av: AddressVector::new(peer.gid, 0),
            path_mtu,
            dest_qpn: peer.qpn,
            rq_psn: Psn::ZERO,
            max_dest_rd_atomic: 16,
            min_rnr_timer: rnr,
        };
        let rts = RtsAttr { max_rd_atomic: 16, ..RtsAttr::usual(Psn::ZERO) };
        for step in
            [QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Rtr(rtr), QpTransition::Rts(rts)]
        {
            verbs.modify_qp(self.qp, step.into()).expect("a state that may follow");
        }
    }

    fn sge(&self, length: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.iova, length, lkey: self.mr.lkey }]
    }

    /// Posts a request of `length` bytes.
    ///
    /// # Panics
    /// When the queue is full.
    pub fn post(&self, verbs: &mut dyn Verbs, operation: Operation, length: u32, flags: SendFlags) {
        let sges = self.sge(length);
        let wr = SendWr { wr_id: 0, operation, payload: Payload::Sges(&sges), flags, destination: None };
        verbs.post_send(self.qp, &[wr]).expect("room for a request");
    }

    /// Posts a receive of `length` bytes.
    ///
    /// # Panics
    /// When the queue is full.
    pub fn receive(&self, verbs: &mut dyn Verbs, length: u32) {
        verbs.post_recv(self.qp, &[RecvWr { wr_id: 0, sges: &self.sge(length) }]).expect("room for a receive");
    }

    /// Takes what has completed.
    ///
    /// # Panics
    /// When something failed.
    pub fn poll(&self, verbs: &mut dyn Verbs) -> Came {
        let mut out = [WorkCompletion::blank(self.qp); 16];
        let n = verbs.poll_cq(self.cq, &mut out).expect("a CQ that lives");
        let mut came = Came::default();
        for wc in &out[..n] {
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            match wc.opcode {
                WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => came.received += 1,
                _ => came.sent += 1,
            }
        }
        came
    }
}
