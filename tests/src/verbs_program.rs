//! One program against the verbs, for every back end: an endpoint that speaks to itself.
//!
//! Owns the checks; knows nothing of what is below the trait. `tests/it/verbs_program.rs` runs it over a software
//! endpoint, `src/bin/verbs_on_hw.rs` over an RDMA device. A check panics with what was wrong.

use uroce::raw::Region;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid, Imm, PathMtu, Psn, QKey, RetryCount, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AsyncEvent, Attr, CqHandle, InitAttr, MemoryRegion, ModifyError, Notify, Operation,
    Payload, PdHandle, PostError, QpAttr, QpCapabilities, QpHandle, QpInit, QpState, QpTransition, QpType, RecvWr,
    Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, SrqHandle, SrqInit, UdDestination, VerbsError, WaitVerbs, WcData,
    WcOpcode, WcStatus, WorkCompletion,
};

/// How long anything may take, also in an emulated machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the region.
const ROOM: usize = 64 * 1024;
const QKEY: QKey = QKey::new(0x1234);

/// A check and its name.
pub type Check = (&'static str, fn(&mut dyn WaitVerbs));

/// All checks.
pub const CHECKS: [Check; 15] = [
    ("send", send),
    ("immediate", immediate),
    ("write_and_read", write_and_read),
    ("atomics", atomics),
    ("inline_and_lists", inline_and_lists),
    ("refused_access", refused_access),
    ("posts_that_are_refused", posts_that_are_refused),
    ("modifies_that_are_refused", modifies_that_are_refused),
    ("objects_in_use", objects_in_use),
    ("what_a_query_says", what_a_query_says),
    ("notification", notification),
    ("shared_receives", shared_receives),
    ("datagrams", datagrams),
    ("reset_and_again", reset_and_again),
    ("waiting_in_vain", waiting_in_vain),
];

/// Two connected QPs of one endpoint, with a CQ and a region that both use.
struct Rig<'a> {
    v: &'a mut dyn WaitVerbs,
    pd: PdHandle,
    cq: CqHandle,
    region: Region,
    mr: MemoryRegion,
    gid: Gid,
    gid_index: u8,
    qps: [QpHandle; 2],
}

impl<'a> Rig<'a> {
    fn new(v: &'a mut dyn WaitVerbs, qp_type: QpType, srq: bool) -> (Self, Option<SrqHandle>) {
        let gids = v.query_gids();
        let usable = |v4: bool| gids.iter().position(|g| g.is_usable() && (!v4 || g.gid.ip().is_ipv4()));
        let index = usable(true).or(usable(false)).expect("a GID");
        let pd = v.alloc_pd().unwrap();
        let cq = v.create_cq(64).unwrap();
        let region = Region::alloc(ROOM).unwrap();
        let mr = v.register(pd, &region, AccessFlags::ALL, None).unwrap();
        assert_eq!((mr.iova, mr.len), (region.host_address(), ROOM as u64));
        let srq = srq.then(|| v.create_srq(SrqInit { pd, max_wr: 16, max_sge: 1 }).unwrap());
        let caps = QpCapabilities { max_send_sge: 3, max_recv_sge: 2, max_inline: 64, ..QpCapabilities::default() };
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: false, qpn: None };
        let qps = [v.create_qp(init).unwrap(), v.create_qp(init).unwrap()];
        let (gid, gid_index) = (gids[index].gid, u8::try_from(index).unwrap());
        (Self { v, pd, cq, region, mr, gid, gid_index, qps }, srq)
    }

    fn connected(v: &'a mut dyn WaitVerbs) -> Self {
        let (mut rig, _) = Self::new(v, QpType::Rc, false);
        rig.connect();
        rig
    }

    fn connect(&mut self) {
        let [a, b] = self.qps;
        for (qp, peer) in [(a, b), (b, a)] {
            let rtr = self.rtr(peer);
            let rts = RtsAttr { max_rd_atomic: 4, ..RtsAttr::usual(Psn::from_wire(0x77)) };
            for step in [QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Rtr(rtr)] {
                self.v.modify_qp(qp, step.into()).unwrap();
            }
            self.v.modify_qp(qp, QpTransition::Rts(rts).into()).unwrap();
        }
    }

    fn rtr(&mut self, peer: QpHandle) -> RtrAttr {
        RtrAttr {
            av: AddressVector::new(self.gid, self.gid_index),
            path_mtu: PathMtu::B256,
            dest_qpn: self.v.query_qp(peer).unwrap().qpn,
            rq_psn: Psn::from_wire(0x77),
            max_dest_rd_atomic: 4,
            min_rnr_timer: RnrTimer::DEFAULT,
        }
    }

    fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.mr.iova + offset as u64, length: len, lkey: self.mr.lkey }
    }

    fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.mr.iova + offset as u64, rkey: self.mr.rkey }
    }

    fn recv(&mut self, qp: usize, wr_id: u64, offset: usize, len: u32) {
        let sges = [self.sge(offset, len)];
        self.v.post_recv(self.qps[qp], &[RecvWr { wr_id, sges: &sges }]).unwrap();
    }

    fn post(&mut self, operation: Operation, payload: Payload<'_>) -> Result<(), PostError> {
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        self.v.post_send(self.qps[0], &[wr]).map_err(|e| e.error)
    }

    /// Posts on the first QP and waits for its completion.
    fn run(&mut self, operation: Operation, sges: &[Sge]) -> WorkCompletion {
        self.post(operation, Payload::Sges(sges)).unwrap();
        self.take(|wc| wc.wr_id == 1)
    }

    /// The next completion that `is_it`; others are dropped.
    fn take(&mut self, is_it: impl Fn(&WorkCompletion) -> bool) -> WorkCompletion {
        let deadline = self.v.now() + PATIENCE;
        let mut slot = [WorkCompletion::blank(self.qps[0])];
        while self.v.now() < deadline {
            if self.v.poll_cq(self.cq, &mut slot).unwrap() == 1 {
                if is_it(&slot[0]) {
                    return slot[0];
                }
            } else {
                self.v.wait_cq(self.cq, Some(Duration::from_millis(100))).unwrap();
            }
        }
        panic!("no completion within {PATIENCE:?}");
    }

    fn event(&mut self, is_it: impl Fn(&AsyncEvent) -> bool) {
        let deadline = self.v.now() + PATIENCE;
        while self.v.now() < deadline {
            if self.v.poll_event().as_ref().is_some_and(&is_it) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no event within {PATIENCE:?}");
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.region.write(offset, bytes).unwrap();
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.region.read(offset, &mut out).unwrap();
        out
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i * 7 % 251).unwrap()).collect()
}

fn send(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    rig.write(0, &pattern(1000));
    rig.recv(1, 2, 4096, 2000);
    let sges = [rig.sge(0, 1000)];
    rig.post(Operation::Send, Payload::Sges(&sges)).unwrap();
    let (mut sent, mut received) = (None, None);
    while sent.is_none() || received.is_none() {
        let wc = rig.take(|_| true);
        if wc.wr_id == 1 { sent = Some(wc) } else { received = Some(wc) }
    }
    let (sent, received) = (sent.unwrap(), received.unwrap());
    assert_eq!((sent.status, sent.opcode, sent.qp), (WcStatus::Success, WcOpcode::Send, rig.qps[0]));
    assert_eq!((received.status, received.opcode, received.byte_len), (WcStatus::Success, WcOpcode::Recv, 1000));
    assert_eq!((received.wr_id, received.qp, received.data), (2, rig.qps[1], WcData::None));
    assert_eq!(received.qp_num, rig.v.query_qp(rig.qps[1]).unwrap().qpn);
    assert_eq!(rig.read(4096, 1000), pattern(1000));
}

fn immediate(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    let imm = Imm::new(0x0102_0304);
    rig.write(0, b"said");
    for (operation, opcode) in [
        (Operation::SendImm(imm), WcOpcode::Recv),
        (Operation::WriteImm(rig.remote(8192), imm), WcOpcode::RecvRdmaWithImm),
    ] {
        rig.recv(1, 2, 4096, 64);
        let sges = [rig.sge(0, 4)];
        rig.post(operation, Payload::Sges(&sges)).unwrap();
        let received = rig.take(|wc| wc.wr_id == 2);
        assert_eq!((received.status, received.opcode), (WcStatus::Success, opcode));
        assert_eq!((received.data, received.byte_len), (WcData::Imm(imm), 4));
    }
    assert_eq!(rig.read(4096, 4), b"said");
    assert_eq!(rig.read(8192, 4), b"said");
}

fn write_and_read(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    rig.write(0, &pattern(5000));
    let (from, to) = ([rig.sge(0, 5000)], [rig.sge(16_384, 5000)]);
    let wrote = rig.run(Operation::Write(rig.remote(8192)), &from);
    assert_eq!((wrote.status, wrote.opcode), (WcStatus::Success, WcOpcode::RdmaWrite));
    let read = rig.run(Operation::Read(rig.remote(8192)), &to);
    assert_eq!((read.status, read.opcode), (WcStatus::Success, WcOpcode::RdmaRead));
    assert_eq!(rig.read(8192, 5000), pattern(5000));
    assert_eq!(rig.read(16_384, 5000), pattern(5000));
}

fn atomics(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    rig.write(4096, &40_u64.to_ne_bytes());
    let (to, remote) = ([rig.sge(0, 8)], rig.remote(4096));
    let word = |rig: &Rig<'_>, at| u64::from_ne_bytes(rig.read(at, 8).try_into().unwrap());
    let added = rig.run(Operation::FetchAdd { remote, add: 2 }, &to);
    assert_eq!((added.status, added.opcode), (WcStatus::Success, WcOpcode::FetchAdd));
    assert_eq!((word(&rig, 0), word(&rig, 4096)), (40, 42));
    let swapped = rig.run(Operation::CompareSwap { remote, compare: 42, swap: 7 }, &to);
    assert_eq!((swapped.status, swapped.opcode), (WcStatus::Success, WcOpcode::CompareSwap));
    assert_eq!((word(&rig, 0), word(&rig, 4096)), (42, 7));
    rig.run(Operation::CompareSwap { remote, compare: 42, swap: 9 }, &to);
    assert_eq!((word(&rig, 0), word(&rig, 4096)), (7, 7), "it was not 42 any more");
}

fn inline_and_lists(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    // Two receives of two elements, and a list of two sends: three elements, then inline bytes that go away at once.
    let halves = [rig.sge(4096, 3), rig.sge(5000, 100)];
    let receives = [RecvWr { wr_id: 2, sges: &halves }, RecvWr { wr_id: 3, sges: &halves[1..] }];
    rig.v.post_recv(rig.qps[1], &receives).unwrap();
    rig.write(0, b"abcdefgh");
    let thirds = [rig.sge(0, 2), rig.sge(4, 1), rig.sge(6, 2)];
    let mut bytes = *b"inline";
    let wr = |wr_id, payload, signaled| SendWr {
        wr_id,
        operation: Operation::Send,
        payload,
        flags: SendFlags { signaled, ..SendFlags::default() },
        destination: None,
    };
    let list = [wr(9, Payload::Sges(&thirds), false), wr(1, Payload::Inline(&bytes), true)];
    rig.v.post_send(rig.qps[0], &list).unwrap();
    bytes.fill(0);
    assert_eq!(bytes, [0; 6]);
    assert_eq!(rig.take(|wc| wc.wr_id == 3).byte_len, 6);
    assert_eq!((rig.read(4096, 3), rig.read(5000, 6)), (b"abe".to_vec(), b"inline".to_vec()));
}

fn refused_access(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    rig.recv(0, 5, 0, 64);
    // A key that the peer does not have.
    let closed = rig.v.register(rig.pd, &rig.region, AccessFlags::LOCAL_WRITE, None).unwrap();
    let (sges, remote) = ([rig.sge(0, 8)], Remote { addr: closed.iova, rkey: closed.rkey });
    assert_eq!(rig.run(Operation::Write(remote), &sges).status, WcStatus::RemoteAccess);
    assert_eq!(rig.v.query_qp(rig.qps[0]).unwrap().state, QpState::Err);
    assert_eq!(rig.take(|wc| wc.wr_id == 5).status, WcStatus::WorkRequestFlushed);
    assert_eq!(rig.run(Operation::Send, &sges).status, WcStatus::WorkRequestFlushed, "posted in ERR");
}

fn posts_that_are_refused(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    let one = rig.sge(0, 8);
    let remote = rig.remote(8);
    let refusal = |rig: &mut Rig<'_>, operation, payload: Payload<'_>| rig.post(operation, payload).unwrap_err();
    // A device may give more than was asked for.
    let max = rig.v.query_qp(rig.qps[0]).unwrap().caps.max_send_sge as usize;
    let many = vec![one; max + 1];
    let too_many = PostError::TooManySges { given: max + 1, max };
    assert_eq!(refusal(&mut rig, Operation::Send, Payload::Sges(&many)), too_many);
    let most = rig.v.query_qp(rig.qps[0]).unwrap().caps.max_inline as usize;
    let long = vec![0; most + 1];
    let too_long = PostError::InlineTooLong { given: most + 1, max: most };
    assert_eq!(refusal(&mut rig, Operation::Send, Payload::Inline(&long)), too_long);
    assert_eq!(refusal(&mut rig, Operation::Read(remote), Payload::Inline(b"x")), PostError::InlineNotAllowed);
    let seven = [rig.sge(0, 7)];
    let add = Operation::FetchAdd { remote, add: 1 };
    assert_eq!(refusal(&mut rig, add, Payload::Sges(&seven)), PostError::AtomicLength(7));
    let crooked = Operation::FetchAdd { remote: rig.remote(9), add: 1 };
    assert_eq!(refusal(&mut rig, crooked, Payload::Sges(&[one])), PostError::AtomicAlignment);
    // Those before the bad one are queued.
    let sges = [one];
    let good = SendWr {
        wr_id: 1,
        operation: Operation::Write(remote),
        payload: Payload::Sges(&sges),
        flags: SendFlags::SIGNALED,
        destination: None,
    };
    let bad = SendWr { operation: crooked, ..good };
    let refused = rig.v.post_send(rig.qps[0], &[good, bad, good]).unwrap_err();
    assert_eq!((refused.index, refused.error), (1, PostError::AtomicAlignment));
    assert_eq!(rig.take(|_| true).status, WcStatus::Success);
    assert!(!rig.v.wait_cq(rig.cq, Some(Duration::from_millis(200))).unwrap(), "the third is not queued");
}

fn modifies_that_are_refused(v: &mut dyn WaitVerbs) {
    let (rig, _) = Rig::new(v, QpType::Rc, false);
    let qp = rig.qps[0];
    let (from, to) = (QpState::Reset, QpState::Rts);
    let sends = |rig: &mut Rig<'_>| rig.post(Operation::Send, Payload::Sges(&[])).unwrap_err();
    let refusal = |rig: &mut Rig<'_>, attr: QpAttr| rig.v.modify_qp(qp, attr).unwrap_err();
    let mut rig = rig;
    assert_eq!(sends(&mut rig), PostError::WrongState(QpState::Reset));
    assert_eq!(refusal(&mut rig, QpAttr::to_state(to)), ModifyError::NoTransition { from, to }.into());
    let init: QpAttr = InitAttr::connected(AccessFlags::NONE).into();
    let to = QpState::Init;
    let missing = ModifyError::Missing { attr: Attr::AccessFlags, from, to };
    assert_eq!(refusal(&mut rig, QpAttr { access: None, ..init }), missing.into());
    let surplus = ModifyError::NotAllowed { attr: Attr::QKey, from, to };
    assert_eq!(refusal(&mut rig, QpAttr { qkey: Some(QKEY), ..init }), surplus.into());
    let range = |attr| VerbsError::Modify(ModifyError::OutOfRange { attr });
    assert_eq!(refusal(&mut rig, QpAttr { port: Some(2), ..init }), range(Attr::Port));
    assert_eq!(refusal(&mut rig, QpAttr { pkey_index: Some(999), ..init }), range(Attr::PKeyIndex));
    rig.v.modify_qp(qp, init).unwrap();
    let rtr: QpAttr = rig.rtr(rig.qps[1]).into();
    let av = rtr.av.map(|av| AddressVector { sgid_index: 255, ..av });
    assert_eq!(refusal(&mut rig, QpAttr { av, ..rtr }), range(Attr::Av));
    assert_eq!(refusal(&mut rig, QpAttr { max_dest_rd_atomic: Some(255), ..rtr }), range(Attr::MaxDestRdAtomic));
    assert_eq!(rig.v.query_qp(qp).unwrap().state, QpState::Init, "nothing changed");
    assert_eq!(sends(&mut rig), PostError::WrongState(QpState::Init));
}

fn objects_in_use(v: &mut dyn WaitVerbs) {
    let (rig, srq) = Rig::new(v, QpType::Rc, true);
    let (srq, [a, b]) = (srq.unwrap(), rig.qps);
    assert_eq!(rig.v.dealloc_pd(rig.pd), Err(VerbsError::Busy));
    assert_eq!(rig.v.destroy_cq(rig.cq), Err(VerbsError::Busy));
    assert_eq!(rig.v.destroy_srq(srq), Err(VerbsError::Busy));
    let receive = [RecvWr { wr_id: 1, sges: &[] }];
    assert_eq!(rig.v.post_recv(a, &receive).unwrap_err().error, PostError::WrongState(QpState::Reset));
    rig.v.modify_qp(a, InitAttr::connected(AccessFlags::NONE).into()).unwrap();
    assert_eq!(rig.v.post_recv(a, &receive).unwrap_err().error, PostError::HasSrq);
    let qpn = rig.v.query_qp(a).unwrap().qpn;
    assert_eq!(rig.v.find_qp(qpn), Some(a));
    for qp in [a, b] {
        rig.v.destroy_qp(qp).unwrap();
        assert_eq!(rig.v.destroy_qp(qp), Err(VerbsError::InvalidHandle));
    }
    assert_eq!(rig.v.find_qp(qpn), None);
    assert_eq!(rig.v.dealloc_pd(rig.pd), Err(VerbsError::Busy), "region and SRQ");
    rig.v.destroy_srq(srq).unwrap();
    rig.v.deregister(rig.mr.handle).unwrap();
    rig.v.destroy_cq(rig.cq).unwrap();
    rig.v.dealloc_pd(rig.pd).unwrap();
    assert_eq!(rig.v.deregister(rig.mr.handle), Err(VerbsError::InvalidHandle));
    assert_eq!(rig.v.poll_cq(rig.cq, &mut [WorkCompletion::blank(a)]), Err(VerbsError::InvalidHandle));
    assert_eq!(rig.v.wait_cq(rig.cq, None), Err(VerbsError::InvalidHandle));
    let write_only = AccessFlags::REMOTE_WRITE;
    let pd = rig.v.alloc_pd().unwrap();
    assert_eq!(rig.v.register(pd, &rig.region, write_only, None), Err(VerbsError::InvalidAccess));
    assert_eq!(rig.v.register(pd, &rig.region, AccessFlags::NONE, Some(u64::MAX)), Err(VerbsError::AddressWrap));
}

fn what_a_query_says(v: &mut dyn WaitVerbs) {
    let rig = Rig::connected(v);
    let info = rig.v.query_qp(rig.qps[0]).unwrap();
    let peer = rig.v.query_qp(rig.qps[1]).unwrap();
    assert_eq!((info.state, info.qp_type), (QpState::Rts, QpType::Rc));
    let a = info.attr;
    assert_eq!((a.dest_qpn, a.path_mtu), (Some(peer.qpn), Some(PathMtu::B256)));
    assert_eq!((a.rq_psn, a.sq_psn), (Psn::new(0x77), Psn::new(0x77)));
    assert_eq!((a.retry_count, a.timeout), (Some(RetryCount::MAX), Some(AckTimeout::DEFAULT)));
    assert_eq!((a.max_rd_atomic, a.max_dest_rd_atomic), (Some(4), Some(4)));
    assert_eq!(a.min_rnr_timer, Some(RnrTimer::DEFAULT));
    let av = a.av.unwrap();
    assert_eq!((av.dgid, av.sgid_index, av.hop_limit), (rig.gid, rig.gid_index, 64));
    let device = rig.v.query_device();
    assert!(device.max_qp > 0 && device.max_cqe >= 64 && device.max_sge >= 3 && device.max_rd_atomic >= 4);
    assert!(rig.v.query_port().active && !device.pkeys.is_empty());
    let closer = QpAttr { state: Some(QpState::Rts), min_rnr_timer: RnrTimer::new(3), ..QpAttr::default() };
    rig.v.modify_qp(rig.qps[0], closer).unwrap();
    assert_eq!(rig.v.query_qp(rig.qps[0]).unwrap().attr.min_rnr_timer, RnrTimer::new(3));
}

fn notification(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    let (cq, sges) = (rig.cq, [rig.sge(0, 8)]);
    rig.v.req_notify(cq, Notify::Any).unwrap();
    rig.run(Operation::Write(rig.remote(4096)), &sges);
    rig.event(|e| *e == AsyncEvent::CqNotify(cq));
    // Once: what was not asked for again is not told.
    rig.run(Operation::Write(rig.remote(4096)), &sges);
    std::thread::sleep(Duration::from_millis(50));
    while let Some(event) = rig.v.poll_event() {
        assert_ne!(event, AsyncEvent::CqNotify(cq));
    }
}

fn shared_receives(v: &mut dyn WaitVerbs) {
    let (mut rig, srq) = Rig::new(v, QpType::Rc, true);
    let srq = srq.unwrap();
    rig.connect();
    for wr_id in 2..6 {
        let sges = [rig.sge(4096 * usize::try_from(wr_id).unwrap(), 64)];
        rig.v.post_srq_recv(srq, &[RecvWr { wr_id, sges: &sges }]).unwrap();
    }
    rig.v.arm_srq(srq, 3).unwrap();
    let info = rig.v.query_srq(srq).unwrap();
    assert!(info.max_wr >= 16 && info.limit == 3, "{info:?}");
    rig.write(0, b"shared");
    let sges = [rig.sge(0, 6)];
    // Four, then three, then two are left: the second is below the limit.
    for wr_id in 2..4 {
        rig.post(Operation::Send, Payload::Sges(&sges)).unwrap();
        let received = rig.take(|wc| wc.opcode == WcOpcode::Recv);
        assert_eq!((received.status, received.wr_id, received.qp), (WcStatus::Success, wr_id, rig.qps[1]));
        assert_eq!(rig.read(4096 * usize::try_from(wr_id).unwrap(), 6), b"shared");
    }
    rig.event(|e| *e == AsyncEvent::SrqLimitReached(srq));
    assert_eq!(rig.v.query_srq(srq).unwrap().limit, 0, "disarmed");
}

fn datagrams(v: &mut dyn WaitVerbs) {
    let (mut rig, _) = Rig::new(v, QpType::Ud, false);
    for qp in rig.qps {
        let steps = [
            QpTransition::Init(InitAttr::datagram(QKEY)),
            QpTransition::RtrUd,
            QpTransition::RtsPsn(Psn::from_wire(3)),
        ];
        for step in steps {
            rig.v.modify_qp(qp, step.into()).unwrap();
        }
    }
    let av = AddressVector::new(rig.gid, rig.gid_index);
    assert!(rig.v.create_ah(rig.pd, AddressVector { sgid_index: 255, ..av }).is_err());
    let ah = rig.v.create_ah(rig.pd, av).unwrap();
    let [here, there] = rig.qps.map(|qp| rig.v.query_qp(qp).unwrap().qpn);
    rig.recv(1, 2, 4096, 200);
    rig.write(0, b"datagram");
    let sges = [rig.sge(0, 8)];
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::SendImm(Imm::new(9)),
        payload: Payload::Sges(&sges),
        flags: SendFlags::SIGNALED,
        destination: Some(UdDestination { ah, qpn: there, qkey: QKEY }),
    };
    rig.v.post_send(rig.qps[0], &[wr]).unwrap();
    let received = rig.take(|wc| wc.wr_id == 2);
    assert_eq!((received.status, received.opcode, received.byte_len), (WcStatus::Success, WcOpcode::Recv, 48));
    assert_eq!((received.src_qp, received.grh, received.data), (here, true, WcData::Imm(Imm::new(9))));
    assert_eq!(rig.read(4096 + 40, 8), b"datagram");
    let refusal = |rig: &mut Rig<'_>, wr| rig.v.post_send(rig.qps[0], &[wr]).unwrap_err().error;
    assert_eq!(refusal(&mut rig, SendWr { destination: None, ..wr }), PostError::Destination);
    let read = SendWr { operation: Operation::Read(rig.remote(0)), ..wr };
    assert_eq!(refusal(&mut rig, read), PostError::WrongOperation);
    let group = Gid::from("239.1.2.3".parse::<core::net::Ipv4Addr>().unwrap());
    assert_eq!(rig.v.attach_multicast(rig.qps[0], rig.gid), Err(VerbsError::NotMulticast));
    rig.v.attach_multicast(rig.qps[0], group).unwrap();
    rig.v.detach_multicast(rig.qps[0], group).unwrap();
    rig.v.attach_multicast(rig.qps[1], group).unwrap();
    // In a group, and all the same destroyed.
    rig.v.destroy_qp(rig.qps[1]).unwrap();
    rig.v.destroy_ah(ah).unwrap();
    assert_eq!(rig.v.destroy_ah(ah), Err(VerbsError::InvalidHandle));
}

fn reset_and_again(v: &mut dyn WaitVerbs) {
    let mut rig = Rig::connected(v);
    let sges = [rig.sge(0, 8)];
    for qp in rig.qps {
        rig.v.modify_qp(qp, QpTransition::Err.into()).unwrap();
    }
    assert_eq!(rig.run(Operation::Write(rig.remote(4096)), &sges).status, WcStatus::WorkRequestFlushed);
    for qp in rig.qps {
        rig.v.modify_qp(qp, QpTransition::Reset.into()).unwrap();
        assert_eq!(rig.v.query_qp(qp).unwrap().state, QpState::Reset);
    }
    rig.connect();
    rig.write(0, b"anew....");
    assert_eq!(rig.run(Operation::Write(rig.remote(4096)), &sges).status, WcStatus::Success);
    assert_eq!(rig.read(4096, 8), b"anew....");
}

fn waiting_in_vain(v: &mut dyn WaitVerbs) {
    let rig = Rig::connected(v);
    let begin = rig.v.now();
    assert!(!rig.v.wait_cq(rig.cq, Some(Duration::from_millis(30))).unwrap());
    let waited = rig.v.now().saturating_since(begin);
    assert!(waited >= Duration::from_millis(30), "{waited:?}");
    assert!(!rig.v.wait_cq(rig.cq, Some(Duration::ZERO)).unwrap());
}
