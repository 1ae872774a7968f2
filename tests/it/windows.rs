//! Memory windows, fast registration and invalidation between two endpoints: what a peer reaches, when, in which order
//! the work requests take effect and complete, and what a refused one leads to. Expected values come from IBTA Vol 1
//! 10.6 and from what Linux's rxe does.

use uroce::raw::Region;
use uroce::time::Duration;
use uroce::types::Rkey;
use uroce::verbs::{
    AccessFlags, FailureKind, FastRegister, MemoryWindow, MwBind, MwType, Operation, Payload, PostError, QpAttr,
    QpCapabilities, QpState, QpTransition, QpType, Remote, SendFlags, SendWr, Sge, Verbs, VerbsError, WcData, WcOpcode,
    WcStatus, WorkCompletion,
};
use uroce::wire::{Body, Packet};
use uroce_tests::pair::{Fate, Node, Options, Pair, Side};

const BINDABLE: AccessFlags = match AccessFlags::from_bits(0x1F) {
    Some(flags) => flags,
    None => panic!("local write, the rights of a peer, windows"),
};
const WRITE: AccessFlags = AccessFlags::REMOTE_WRITE;
const READ: AccessFlags = AccessFlags::REMOTE_READ;

fn pair(options: Options) -> Pair {
    Pair::new(&Options { access: BINDABLE, ..options })
}

fn statuses(done: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn window(n: &mut Node, mw_type: MwType) -> MemoryWindow {
    n.endpoint.alloc_mw(n.pd, mw_type).unwrap()
}

/// A bind of `length` bytes from `offset` of the node's region on, under low key byte 9.
fn bind(n: &Node, mw: &MemoryWindow, offset: u64, length: u64, access: AccessFlags) -> MwBind {
    let rkey = Rkey::new(mw.rkey.get() & !0xFF | 9);
    MwBind { mw: mw.handle, rkey, mr: Some(n.mr.handle), addr: n.mr.iova + offset, length, access }
}

fn through(bind: &MwBind) -> Remote {
    Remote { addr: bind.addr, rkey: bind.rkey }
}

/// A registration that is free, and the work request that takes all of it.
fn fast(n: &mut Node, region: &Region, access: AccessFlags) -> FastRegister {
    let mr = n.endpoint.alloc_fast_mr(n.pd, region).unwrap();
    let key = Rkey::new(mr.rkey.get() & !0xFF | 3);
    FastRegister { mr: mr.handle, key, offset: 0, length: mr.len, iova: 0x40_0000, access }
}

/// What became of one signaled work request of A.
fn one(p: &mut Pair, operation: Operation, length: u32) -> WcStatus {
    p.a.send(77, operation, 0, length);
    p.settle();
    p.a.completions()[0].status
}

fn is_request(packet: &Packet<'_>) -> bool {
    matches!(packet.body, Body::Request(_))
}

#[test]
fn each_operation_goes_through_a_window_that_allows_it() {
    for mw_type in [MwType::One, MwType::Two] {
        let mut p = pair(Options::default());
        let mw = window(&mut p.b, mw_type);
        let access = WRITE | READ | AccessFlags::REMOTE_ATOMIC;
        let mut b = bind(&p.b, &mw, 4096, 2048, access);
        match mw_type {
            MwType::One => b.rkey = p.b.endpoint.bind_mw(p.b.qp, 1, b, SendFlags::SIGNALED).unwrap(),
            MwType::Two => p.b.send_local(1, Operation::BindMw(b)),
        }
        p.settle();
        let done = p.b.completions();
        assert_eq!((statuses(&done), done[0].opcode), (vec![(1, WcStatus::Success)], WcOpcode::BindMw));
        p.a.region.write(0, b"through the window").unwrap();
        assert_eq!(one(&mut p, Operation::Write(through(&b)), 2048), WcStatus::Success);
        assert_eq!(&p.b.region.to_vec()[4096..4114], b"through the window");
        p.b.region.write(4096, b"and back").unwrap();
        assert_eq!(one(&mut p, Operation::Read(through(&b)), 2048), WcStatus::Success);
        assert_eq!(&p.a.region.to_vec()[..8], b"and back");
        let add = Operation::FetchAdd { remote: through(&b), add: 1 };
        assert_eq!(one(&mut p, add, 8), WcStatus::Success);
        let outside = Remote { addr: b.addr + 2048, rkey: b.rkey };
        assert_eq!(one(&mut p, Operation::Write(outside), 1), WcStatus::RemoteAccess);
    }
}

#[test]
fn a_window_of_type_1_is_moved_and_closed_by_binds() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::One);
    let first = bind(&p.b, &mw, 0, 64, WRITE);
    let key = p.b.endpoint.bind_mw(p.b.qp, 1, first, SendFlags::SIGNALED).unwrap();
    p.settle();
    let here = Remote { addr: first.addr, rkey: key };
    assert_eq!(one(&mut p, Operation::Write(here), 64), WcStatus::Success);
    let second = bind(&p.b, &mw, 1000, 64, WRITE);
    let moved = p.b.endpoint.bind_mw(p.b.qp, 2, second, SendFlags::SIGNALED).unwrap();
    p.settle();
    assert_ne!(moved, key);
    assert_eq!(one(&mut p, Operation::Write(Remote { addr: second.addr, rkey: moved }), 64), WcStatus::Success);
    assert_eq!(p.b.endpoint.deregister(p.b.mr.handle), Err(VerbsError::Busy));
    let closed = MwBind { mr: None, length: 0, ..second };
    let last = p.b.endpoint.bind_mw(p.b.qp, 3, closed, SendFlags::SIGNALED).unwrap();
    p.settle();
    let won = WcStatus::Success;
    assert_eq!(statuses(&p.b.completions()), [(1, won), (2, won), (3, won)]);
    assert_eq!(one(&mut p, Operation::Write(Remote { addr: second.addr, rkey: last }), 64), WcStatus::RemoteAccess);
    p.b.endpoint.deregister(p.b.mr.handle).unwrap();
}

/// The key that the first window had, after the window was moved: dead.
#[test]
fn the_key_before_a_rebind_is_dead() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::One);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    let old = p.b.endpoint.bind_mw(p.b.qp, 1, b, SendFlags::SIGNALED).unwrap();
    p.b.endpoint.bind_mw(p.b.qp, 2, b, SendFlags::SIGNALED).unwrap();
    p.settle();
    assert_eq!(one(&mut p, Operation::Write(Remote { addr: b.addr, rkey: old }), 64), WcStatus::RemoteAccess);
}

#[test]
fn a_zero_based_window_begins_at_address_0() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 512, 16, WRITE | AccessFlags::ZERO_BASED);
    p.b.send_local(1, Operation::BindMw(b));
    p.a.region.write(0, b"zero").unwrap();
    p.settle();
    assert_eq!(one(&mut p, Operation::Write(Remote { addr: 12, rkey: b.rkey }), 4), WcStatus::Success);
    assert_eq!(&p.b.region.to_vec()[524..528], b"zero");
    assert_eq!(one(&mut p, Operation::Write(Remote { addr: 13, rkey: b.rkey }), 4), WcStatus::RemoteAccess);
}

/// What is posted behind a bind finds it done: the peer may use the key as soon as the SEND that names it arrives.
#[test]
fn a_send_behind_a_bind_leaves_after_it() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    p.a.recv(1, 0, 64);
    p.b.send_local(1, Operation::BindMw(b));
    p.b.send(2, Operation::Send, 0, 4);
    let named = p.take_sent(Side::B);
    p.deliver(Side::A, &named[0]);
    p.a.completions();
    assert_eq!(one(&mut p, Operation::Write(through(&b)), 64), WcStatus::Success);
    let order: Vec<_> = p.b.completions().iter().map(|c| (c.wr_id, c.opcode)).collect();
    assert_eq!(order, [(1, WcOpcode::BindMw), (2, WcOpcode::Send)]);
}

/// A bind takes effect though what is before it has no answer yet; it completes behind it all the same.
#[test]
fn a_bind_does_not_wait_for_acknowledgements_and_its_completion_does() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    let there = p.a.remote(0);
    p.b.send(1, Operation::Write(there), 0, 8);
    p.b.send_local(2, Operation::BindMw(b));
    let held = p.take_sent(Side::B);
    assert_eq!(held.len(), 1);
    p.a.send(3, Operation::Write(through(&b)), 0, 64);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(3, WcStatus::Success)]);
    assert_eq!(p.b.completions(), []);
    p.deliver(Side::A, &held[0]);
    p.settle();
    assert_eq!(statuses(&p.b.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn a_fenced_bind_waits_for_reads_and_a_local_invalidation_for_everything() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    let from = p.a.remote(0);
    p.b.send(1, Operation::Read(from), 0, 8);
    let flags = SendFlags { fence: true, ..SendFlags::SIGNALED };
    let (operation, payload) = (Operation::BindMw(b), Payload::Sges(&[]));
    p.b.endpoint.post_send(p.b.qp, &[SendWr { wr_id: 2, operation, payload, flags, destination: None }]).unwrap();
    let read = p.take_sent(Side::B);
    assert!(p.b.endpoint.memory_mut().remote(p.b.pd, p.b.qp, b.rkey, b.addr, 1, WRITE).is_err(), "not bound yet");
    p.deliver(Side::A, &read[0]);
    p.settle();
    assert_eq!(statuses(&p.b.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    // A WRITE that is not acknowledged holds the invalidation back, without any fence.
    p.b.send(3, Operation::Write(from), 0, 8);
    p.b.send_local(4, Operation::LocalInvalidate(b.rkey));
    p.b.send(5, Operation::Write(from), 0, 8);
    let write = p.take_sent(Side::B);
    assert_eq!(write.len(), 1);
    assert!(p.b.endpoint.memory_mut().remote(p.b.pd, p.b.qp, b.rkey, b.addr, 1, WRITE).is_ok(), "still bound");
    p.deliver(Side::A, &write[0]);
    p.settle();
    let done = p.b.completions();
    assert_eq!(statuses(&done), [(3, WcStatus::Success), (4, WcStatus::Success), (5, WcStatus::Success)]);
    assert_eq!(done[1].opcode, WcOpcode::LocalInvalidate);
    assert_eq!(one(&mut p, Operation::Write(through(&b)), 8), WcStatus::RemoteAccess);
}

/// The first packets are lost again and again; a bind between them is done once: a second one would find the window
/// not free, and end the QP.
#[test]
fn packets_are_repeated_and_binds_are_not() {
    let mut p = pair(Options::default());
    let windows: Vec<_> = (0..4).map(|_| window(&mut p.b, MwType::Two)).collect();
    let there = p.a.remote(0);
    for (i, mw) in (0u64..).zip(&windows) {
        p.b.send(2 * i, Operation::Write(there), 0, 3000);
        let b = bind(&p.b, mw, 0, 64, WRITE);
        p.b.send_local(2 * i + 1, Operation::BindMw(b));
    }
    let mut left = 11;
    p.run_for(Duration::from_secs(10), |side, packet| {
        if side == Side::B && is_request(packet) && left > 0 {
            left -= 1;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert!(p.b.endpoint.counters().retransmitted_pkts > 0);
    let want: Vec<_> = (0..8).map(|i| (i, WcStatus::Success)).collect();
    assert_eq!(statuses(&p.b.completions()), want);
}

/// The bytes of a WRITE lie in memory whose key is invalidated behind it; the WRITE is lost, and repeated from there.
#[test]
fn a_repeat_finds_the_key_that_is_invalidated_behind_it() {
    let mut p = pair(Options::default());
    let region = Region::alloc(64).unwrap();
    region.write(0, b"twice from here").unwrap();
    let wr = fast(&mut p.a, &region, BINDABLE);
    let there = p.b.remote(0);
    p.a.send_local(1, Operation::FastRegister(wr));
    let sge = [Sge { addr: wr.iova, length: 15, lkey: uroce::types::Lkey::new(wr.key.get()) }];
    let (payload, flags) = (Payload::Sges(&sge[..]), SendFlags::SIGNALED);
    let write = SendWr { wr_id: 2, operation: Operation::Write(there), payload, flags, destination: None };
    p.a.endpoint.post_send(p.a.qp, &[write]).unwrap();
    p.a.send_local(3, Operation::LocalInvalidate(wr.key));
    let mut first = true;
    p.run_for(Duration::from_secs(1), |_, packet| {
        if is_request(packet) && core::mem::take(&mut first) { Fate::Drop } else { Fate::Deliver }
    });
    let want = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)];
    assert_eq!(statuses(&p.a.completions()), want);
    assert_eq!(&p.b.region.to_vec()[..15], b"twice from here");
}

#[test]
fn a_fast_registration_serves_both_sides_until_a_peer_takes_its_key() {
    let mut p = pair(Options::default());
    let region = Region::alloc(4096).unwrap();
    let wr = fast(&mut p.b, &region, BINDABLE);
    p.b.send_local(1, Operation::FastRegister(wr));
    p.b.recv(2, 0, 64);
    p.settle();
    let done = p.b.completions();
    assert_eq!((statuses(&done), done[0].opcode), (vec![(1, WcStatus::Success)], WcOpcode::FastRegister));
    let there = Remote { addr: wr.iova, rkey: wr.key };
    assert_eq!(one(&mut p, Operation::Write(there), 4096), WcStatus::Success);
    assert_eq!(one(&mut p, Operation::SendInvalidate(wr.key), 8), WcStatus::Success);
    assert_eq!(p.b.completions()[0].data, WcData::Invalidated(wr.key));
    // Free again: registered anew, under another key.
    let again = FastRegister { key: Rkey::new(wr.key.get() ^ 1), ..wr };
    p.b.send_local(3, Operation::FastRegister(again));
    p.settle();
    assert_eq!(one(&mut p, Operation::Write(Remote { rkey: again.key, ..there }), 8), WcStatus::Success);
    assert_eq!(one(&mut p, Operation::Write(there), 8), WcStatus::RemoteAccess);
}

/// One that is refused fails when all before it is done, what is behind it is flushed, and nothing of that was begun.
#[test]
fn a_refused_local_operation_has_its_status_and_its_place() {
    type Make = fn(&mut Pair) -> Operation;
    let refused_bind: Make = |p| {
        let mw = window(&mut p.a, MwType::Two);
        Operation::BindMw(bind(&p.a, &mw, 0, 1 << 20, WRITE))
    };
    let refused_invalidation: Make = |p| Operation::LocalInvalidate(p.a.mr.rkey);
    let refused_registration: Make = |p| {
        let wr = fast(&mut p.a, &Region::alloc(8).unwrap(), BINDABLE);
        Operation::FastRegister(FastRegister { length: 9, ..wr })
    };
    for (make, status, kind, opcode) in [
        (refused_bind, WcStatus::MwBind, FailureKind::BindRefused, WcOpcode::BindMw),
        (
            refused_invalidation,
            WcStatus::LocalQpOperation,
            FailureKind::LocalInvalidateRefused,
            WcOpcode::LocalInvalidate,
        ),
        (refused_registration, WcStatus::LocalQpOperation, FailureKind::FastRegisterRefused, WcOpcode::FastRegister),
    ] {
        let mut p = pair(Options::default());
        let operation = make(&mut p);
        let there = p.b.remote(0);
        p.a.send(1, Operation::Write(there), 0, 8);
        p.a.send_local(2, operation);
        p.a.send(3, Operation::Write(there), 0, 8);
        p.settle();
        let done = p.a.completions();
        assert_eq!(statuses(&done), [(1, WcStatus::Success), (2, status), (3, WcStatus::WorkRequestFlushed)]);
        assert_eq!((done[1].vendor_err, done[1].opcode), (kind as u32, opcode));
        let info = p.a.endpoint.query_qp(p.a.qp).unwrap();
        assert_eq!((info.state, info.last_error.unwrap().kind), (QpState::Err, kind));
        assert_eq!(p.ladder().iter().filter(|l| l.starts_with("A ")).count(), 1, "{:?}", p.ladder());
    }
}

/// The peer READs through a window that goes away while the answer is sent.
#[test]
fn a_window_that_goes_away_under_a_read_is_an_access_error() {
    let mut p = pair(Options { mtu: uroce::types::PathMtu::B256, ..Options::default() });
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 1024, READ);
    p.b.send_local(1, Operation::BindMw(b));
    p.settle();
    p.a.send(2, Operation::Read(through(&b)), 0, 1024);
    let request = p.take_sent(Side::A);
    p.deliver(Side::B, &request[0]);
    p.b.endpoint.dealloc_mw(mw.handle).unwrap();
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(2, WcStatus::RemoteAccess)]);
}

#[test]
fn windows_of_type_2_end_with_their_qp() {
    for reset in [true, false] {
        let mut p = pair(Options::default());
        let mw = window(&mut p.b, MwType::Two);
        let b = bind(&p.b, &mw, 0, 64, WRITE);
        p.b.send_local(1, Operation::BindMw(b));
        p.settle();
        assert_eq!(p.b.endpoint.deregister(p.b.mr.handle), Err(VerbsError::Busy));
        if reset {
            p.b.endpoint.modify_qp(p.b.qp, QpTransition::Reset.into()).unwrap();
        } else {
            p.b.endpoint.destroy_qp(p.b.qp).unwrap();
        }
        p.b.endpoint.deregister(p.b.mr.handle).unwrap();
        assert_eq!(p.b.endpoint.dealloc_pd(p.b.pd), Err(VerbsError::Busy), "the window is left");
        p.b.endpoint.dealloc_mw(mw.handle).unwrap();
    }
}

#[test]
fn a_uc_qp_binds_windows_and_serves_them() {
    let mut p = pair(Options { qp_type: QpType::Uc, ..Options::default() });
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    let there = p.a.remote(0);
    p.b.send(1, Operation::Write(there), 0, 3000);
    p.b.send_local(2, Operation::BindMw(b));
    p.b.send(3, Operation::Write(there), 0, 8);
    p.settle();
    let want = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)];
    assert_eq!(statuses(&p.b.completions()), want);
    p.a.region.write(0, b"unreliable").unwrap();
    p.a.send(4, Operation::Write(through(&b)), 0, 10);
    p.settle();
    assert_eq!(&p.b.region.to_vec()[..10], b"unreliable");
    p.b.send_local(5, Operation::LocalInvalidate(b.rkey));
    p.a.region.write(0, b"forgotten!").unwrap();
    p.settle();
    p.a.send(6, Operation::Write(through(&b)), 0, 10);
    p.settle();
    assert_eq!(statuses(&p.b.completions()), [(5, WcStatus::Success)]);
    assert_eq!(&p.b.region.to_vec()[..10], b"unreliable");
    // A refused one takes UC to SQE, with what is behind it flushed.
    p.b.send_local(7, Operation::LocalInvalidate(b.rkey));
    p.b.send(8, Operation::Write(there), 0, 8);
    p.settle();
    let want = [(7, WcStatus::LocalQpOperation), (8, WcStatus::WorkRequestFlushed)];
    assert_eq!(statuses(&p.b.completions()), want);
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Sqe);
}

/// Local operations without a completion give their places back, and without any packet.
#[test]
fn unsignaled_local_operations_free_the_queue() {
    let mut p =
        pair(Options { caps: QpCapabilities { max_send_wr: 4, ..Options::default().caps }, ..Options::default() });
    let mw = window(&mut p.b, MwType::One);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    for _ in 0..1000 {
        p.b.endpoint.bind_mw(p.b.qp, 1, b, SendFlags::default()).unwrap();
        assert!(p.take_sent(Side::B).is_empty());
    }
    assert_eq!(p.b.completions(), []);
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().queues.sends_outstanding, 0);
}

/// SQD begins no local operation either, and ERR flushes it under its own opcode.
#[test]
fn local_operations_wait_in_sqd_and_are_flushed_in_err() {
    let mut p = pair(Options::default());
    let mw = window(&mut p.b, MwType::Two);
    let b = bind(&p.b, &mw, 0, 64, WRITE);
    let to = |p: &mut Pair, t: QpTransition| p.b.endpoint.modify_qp(p.b.qp, QpAttr::from(t)).unwrap();
    to(&mut p, QpTransition::Sqd { notify: false });
    p.b.send_local(1, Operation::BindMw(b));
    p.settle();
    assert_eq!(p.b.completions(), []);
    to(&mut p, QpTransition::Resume);
    p.settle();
    assert_eq!(statuses(&p.b.completions()), [(1, WcStatus::Success)]);
    to(&mut p, QpTransition::Err);
    p.b.send_local(2, Operation::LocalInvalidate(b.rkey));
    p.settle();
    let done = p.b.completions();
    assert_eq!(statuses(&done), [(2, WcStatus::WorkRequestFlushed)]);
    assert_eq!(done[0].opcode, WcOpcode::LocalInvalidate);
}

#[test]
fn posting_refuses_what_cannot_be_at_the_call() {
    let mut p = pair(Options { rd_atomic: 0, ..Options::default() });
    let (one, two) = (window(&mut p.a, MwType::One), window(&mut p.a, MwType::Two));
    let b = bind(&p.a, &two, 0, 64, WRITE);
    let sge = [p.a.sge(0, 8)];
    let post = |p: &mut Pair, operation, payload: Payload<'_>| {
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).map_err(|e| e.error)
    };
    let flush = |length| Operation::Flush {
        remote: Remote::default(),
        length,
        placement: uroce::verbs::FlushPlacement::Global,
        scope: uroce::verbs::FlushScope::Range,
    };
    let register = FastRegister { mr: p.a.mr.handle, key: p.a.mr.rkey, offset: 0, length: 8, iova: 0, access: WRITE };
    for operation in
        [Operation::BindMw(b), Operation::LocalInvalidate(b.rkey), Operation::FastRegister(register), flush(8)]
    {
        assert_eq!(post(&mut p, operation, Payload::Sges(&sge)), Err(PostError::PayloadNotAllowed));
        assert_eq!(post(&mut p, operation, Payload::Inline(b"x")), Err(PostError::PayloadNotAllowed));
    }
    let none = Payload::Sges(&[]);
    assert_eq!(post(&mut p, flush(8), none), Err(PostError::NoReadDepth));
    let too_long = PostError::MessageTooLong { len: (1 << 31) + 1, max: 1 << 31 };
    assert_eq!(post(&mut p, flush((1 << 31) + 1), none), Err(too_long));
    let at = |addr| Operation::AtomicWrite(Remote { addr, rkey: Rkey::new(1) });
    assert_eq!(post(&mut p, at(8), Payload::Sges(&sge)), Err(PostError::NoReadDepth));
    assert_eq!(post(&mut p, at(12), Payload::Sges(&sge)), Err(PostError::AtomicAlignment));
    let signaled = SendFlags::SIGNALED;
    assert_eq!(p.a.endpoint.bind_mw(p.a.qp, 1, b, signaled), Err(PostError::WindowType));
    p.a.endpoint.dealloc_mw(one.handle).unwrap();
    let dead = MwBind { mw: one.handle, ..b };
    assert_eq!(p.a.endpoint.bind_mw(p.a.qp, 1, dead, signaled), Err(PostError::InvalidHandle));
    assert_eq!(p.a.endpoint.query_qp(p.a.qp).unwrap().queues.sends_outstanding, 0);
    let mut deep = pair(Options::default());
    assert_eq!(post(&mut deep, at(8), Payload::Inline(b"seven b")), Err(PostError::AtomicLength(7)));
}
