//! No allocation per packet: a counting allocator watches the data path.
//!
//! A test program of its own, as it replaces the allocator of the whole process, and counts on one thread only.
#![allow(unsafe_code)] // An allocator cannot be written without.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::device::Device;
use uroce::device::loopback::Switch;
use uroce::device::udp::UdpDevice;
use uroce::engine::Engine;
use uroce::time::Duration;
use uroce::types::{Gid, PathMtu, Psn};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, FastRegister, FlushPlacement, FlushScope, InitAttr, MemoryRegion, MwBind,
    MwType, Operation, Payload, QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr,
    RtsAttr, SendFlags, SendWr, Sge, Verbs, WcStatus,
};
use uroce::wire::IpFields;
use uroce_tests::pair::{Options, Pair, Side, blank_completion};

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Counting;

fn note() {
    // A thread that is ending has no counter any more, and nothing to count.
    let _ = COUNTED.try_with(|c| c.set(c.get().map(|n| n + 1)));
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of the heap.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations that this thread makes while `f` runs.
fn allocations(f: impl FnOnce()) -> u64 {
    COUNTED.with(|c| c.set(Some(0)));
    f();
    COUNTED.with(Cell::take).unwrap_or(0)
}

/// The operations of a round, and their sizes.
const ROUND: [(u8, u32); 11] =
    [(0, 64), (1, 64), (2, 64), (3, 8), (4, 8), (5, 8), (6, 0), (0, 65_536), (1, 65_536), (2, 65_536), (0, 0)];

/// The usual rights, windows and FLUSH.
const ACCESS: AccessFlags = match AccessFlags::from_bits(0x11F) {
    Some(flags) => flags,
    None => panic!("all of them are known"),
};

fn operation(kind: u8, remote: Remote) -> Operation {
    match kind {
        0 => Operation::Send,
        1 => Operation::Write(remote),
        2 => Operation::Read(remote),
        3 => Operation::FetchAdd { remote, add: 1 },
        5 => Operation::AtomicWrite(remote),
        6 => {
            let (placement, scope) = (FlushPlacement::Global, FlushScope::Range);
            Operation::Flush { remote, length: 64, placement, scope }
        }
        _ => Operation::CompareSwap { remote, compare: 0, swap: 1 },
    }
}

/// One side: a QP on an endpoint reached through `Verbs`.
#[derive(Clone, Copy)]
struct End {
    qp: QpHandle,
    cq: CqHandle,
    mr: MemoryRegion,
}

impl End {
    fn post(&self, verbs: &mut dyn Verbs, kind: u8, length: u32, peer: &End) {
        let sges = [Sge { addr: self.mr.iova, length, lkey: self.mr.lkey }];
        let remote = Remote { addr: peer.mr.iova, rkey: peer.mr.rkey };
        let payload = Payload::Sges(if kind == 6 { &[] } else { &sges });
        let operation = operation(kind, remote);
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        verbs.post_send(self.qp, &[wr]).unwrap();
    }

    fn receive(&self, verbs: &mut dyn Verbs) {
        let sges = [Sge { addr: self.mr.iova, length: 65_536, lkey: self.mr.lkey }];
        verbs.post_recv(self.qp, &[RecvWr { wr_id: 2, sges: &sges }]).unwrap();
    }

    fn poll(&self, verbs: &mut dyn Verbs) -> usize {
        let mut out = [blank_completion(self.qp); 8];
        let n = verbs.poll_cq(self.cq, &mut out).unwrap();
        assert!(out[..n].iter().all(|c| c.status == WcStatus::Success), "{:?}", &out[..n]);
        n
    }
}

/// Moves everything between the two endpoints of a pair through stack buffers; every `lose`-th packet is lost.
fn shuttle(p: &mut Pair, lose: usize, count: &mut usize) {
    let mut buf = [0u8; 4200];
    loop {
        let mut moved = false;
        for side in [Side::A, Side::B] {
            let (now, flow) = (p.now, p.flow_from(side));
            loop {
                let room =
                    TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
                let Some(burst) = p.node(side).endpoint.poll_transmit(now, room) else { break };
                moved = true;
                *count += 1;
                if lose > 0 && count.is_multiple_of(lose) {
                    continue;
                }
                let bytes = &buf[..burst.len];
                let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
                let rx = RxBurst { flow, bytes, segment: bytes.len(), ids, at: now };
                p.node(side.other()).endpoint.handle_burst(now, rx);
            }
        }
        if !moved {
            return;
        }
    }
}

fn pair_round(p: &mut Pair, lose: usize, count: &mut usize) {
    let a = End { qp: p.a.qp, cq: p.a.cq, mr: p.a.mr };
    let b = End { qp: p.b.qp, cq: p.b.cq, mr: p.b.mr };
    for (kind, length) in ROUND {
        if kind == 0 {
            b.receive(&mut p.b.endpoint);
        }
        a.post(&mut p.a.endpoint, kind, length, &b);
        let mut done = 0;
        while done == 0 {
            shuttle(p, lose, count);
            done = a.poll(&mut p.a.endpoint);
            if done == 0 {
                assert!(p.next_timer());
            }
        }
        b.poll(&mut p.b.endpoint);
    }
}

#[test]
fn two_endpoints_allocate_nothing_per_packet() {
    for lose in [0, 100] {
        let options = Options { mtu: PathMtu::B1024, region: 65_536, access: ACCESS, ..Options::default() };
        let mut p = Pair::new(&options);
        let mut packets = 0;
        for _ in 0..20 {
            pair_round(&mut p, lose, &mut packets);
        }
        packets = 0;
        let made = allocations(|| {
            for _ in 0..200 {
                pair_round(&mut p, lose, &mut packets);
            }
        });
        assert!(packets > 30_000, "{packets}");
        assert_eq!(made, 0, "{made} allocations for {packets} packets, every {lose}-th of them lost");
    }
}

/// A window that moves, one that is bound and invalidated, and a registration that comes and goes.
#[test]
fn binds_invalidations_and_registrations_allocate_nothing() {
    let mut p = Pair::new(&Options { access: ACCESS, ..Options::default() });
    let (pd, qp, mr) = (p.a.pd, p.a.qp, p.a.mr);
    let e = &mut p.a.endpoint;
    let (one, two) = (e.alloc_mw(pd, MwType::One).unwrap(), e.alloc_mw(pd, MwType::Two).unwrap());
    let fast = e.alloc_fast_mr(pd, &uroce::raw::Region::alloc(64).unwrap()).unwrap();
    let access = AccessFlags::REMOTE_READ;
    let bind = MwBind { mw: two.handle, rkey: two.rkey, mr: Some(mr.handle), addr: mr.iova, length: 64, access };
    let register = FastRegister { mr: fast.handle, key: fast.rkey, offset: 0, length: 64, iova: 0, access };
    let operations = [
        Operation::BindMw(bind),
        Operation::FastRegister(register),
        Operation::LocalInvalidate(two.rkey),
        Operation::LocalInvalidate(fast.rkey),
    ];
    let mut round = || {
        e.bind_mw(qp, 1, MwBind { mw: one.handle, ..bind }, SendFlags::SIGNALED).unwrap();
        let (payload, flags) = (Payload::Sges(&[]), SendFlags::SIGNALED);
        let wrs = operations.map(|operation| SendWr { wr_id: 2, operation, payload, flags, destination: None });
        e.post_send(qp, &wrs).unwrap();
        let mut buf = [0u8; 64];
        let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
        assert!(e.poll_transmit(p.now, room).is_none());
        let mut out = [blank_completion(qp); 8];
        let n = e.poll_cq(p.a.cq, &mut out).unwrap();
        assert!(n == 5 && out[..n].iter().all(|c| c.status == WcStatus::Success), "{:?}", &out[..n]);
    };
    round();
    assert_eq!(allocations(|| (0..1000).for_each(|_| round())), 0);
}

fn end(verbs: &mut dyn Verbs) -> End {
    let pd = verbs.alloc_pd().unwrap();
    let cq = verbs.create_cq(256).unwrap();
    let region = uroce::raw::Region::alloc(65_536).unwrap();
    let mr = verbs.register(pd, &region, ACCESS, None).unwrap();
    let caps = QpCapabilities::default();
    let init =
        QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
    End { qp: verbs.create_qp(init).unwrap(), cq, mr }
}

fn join(verbs: &mut dyn Verbs, end: &End, peer: (Gid, uroce::types::Qpn)) {
    let rtr = RtrAttr {
        av: AddressVector::new(peer.0, 0),
        path_mtu: PathMtu::B1024,
        dest_qpn: peer.1,
        rq_psn: Psn::ZERO,
        max_dest_rd_atomic: 16,
        min_rnr_timer: uroce::types::RnrTimer::DEFAULT,
    };
    for step in [
        QpTransition::Init(InitAttr::connected(ACCESS)),
        QpTransition::Rtr(rtr),
        QpTransition::Rts(RtsAttr::usual(Psn::ZERO)),
    ] {
        verbs.modify_qp(end.qp, step.into()).unwrap();
    }
}

fn engines_allocate_nothing<D: Device>(first: D, second: D, rounds: usize) {
    let (mut left, mut right) = (Engine::open(first).unwrap(), Engine::open(second).unwrap());
    let (a, b) = (end(left.endpoint_mut()), end(right.endpoint_mut()));
    let name =
        |e: &Engine<D>, end: &End| (e.endpoint().query_gids()[0].gid, e.endpoint().query_qp(end.qp).unwrap().qpn);
    let (left_name, right_name) = (name(&left, &a), name(&right, &b));
    join(left.endpoint_mut(), &a, right_name);
    join(right.endpoint_mut(), &b, left_name);
    let mut round = || {
        for (kind, length) in ROUND {
            if kind == 0 {
                b.receive(right.endpoint_mut());
            }
            a.post(left.endpoint_mut(), kind, length, &b);
            let give_up = left.now() + Duration::from_secs(10);
            while a.poll(left.endpoint_mut()) == 0 {
                left.poll().unwrap();
                right.poll().unwrap();
                assert!(left.now() < give_up, "no completion of {kind} with {length} bytes");
            }
            b.poll(right.endpoint_mut());
        }
    };
    for _ in 0..20 {
        round();
    }
    let made = allocations(|| (0..rounds).for_each(|_| round()));
    assert_eq!(made, 0);
}

#[test]
fn engines_over_the_switch_allocate_nothing_per_packet() {
    let switch = Switch::new();
    let port = |a: &str| switch.port(&[a.parse().unwrap()]);
    engines_allocate_nothing(port("10.0.0.1"), port("10.0.0.2"), 100);
}

#[test]
fn engines_over_udp_sockets_allocate_nothing_per_packet() {
    let open = |a: &str| UdpDevice::open(a.parse().unwrap()).unwrap();
    engines_allocate_nothing(open("127.44.0.1"), open("127.44.0.2"), 100);
}
