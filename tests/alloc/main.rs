//! No allocation and no lock per packet: a counting allocator and the counted locks of `uroce::lock` watch the data path.
//!
//! A test program of its own, as it replaces the allocator of the whole process. Both counts are a thread's own. Locks are
//! counted in builds with debug assertions, and all that `uroce` takes are: a house rule keeps others out. Locks of the
//! kernel, of the system's allocator and of dependencies are not; the packet's path calls no dependency that has one.
//!
//! Covered, after a warm-up, with SEND, WRITE, READ, atomics, ATOMIC WRITE and FLUSH of 0 to 64 KiB over RC:
//!
//! | what | allocations | locks |
//! |---|---|---|
//! | two endpoints without a device, single packets and superframes of 64, with and without loss | none | none |
//! | binds, fast registrations, invalidations | none | none |
//! | engines over the switch in one thread, and in two | none | none |
//! | engines over UDP sockets (superframes; and single packets) | none | none |
//! | engines over packet sockets on a veth pair (superframes; and single frames), needs root | none | none |
//! | host handles in two threads over the switch | none | at most 3 a call, however many packets it moves |
//!
//! Not covered: AF_XDP, TAP and pnet devices, wrappers of devices, datagrams, connection management.
#![allow(unsafe_code)] // An allocator cannot be written without.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::loopback::Switch;
use uroce::device::udp::{UdpDevice, UdpOptions};
use uroce::device::{Device, enter_netns};
use uroce::engine::Engine;
use uroce::host::{Handle, Host};
use uroce::lock;
use uroce::time::Duration;
use uroce::types::{Gid, MacAddr, PathMtu, Psn, Qpn};
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

/// Allocations, and locks, that this thread makes while `f` runs. Of locks it knows nothing without debug assertions.
fn allocations_and_locks(f: impl FnOnce()) -> (u64, u64) {
    let before = lock::taken().unwrap_or(0);
    let made = allocations(f);
    (made, lock::taken().unwrap_or(0) - before)
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

/// How the endpoints of a pair are joined, and what passed.
#[derive(Clone, Copy, Default)]
struct Wire {
    /// Every so many bursts one is lost; 0: none.
    lose: usize,
    segments_max: usize,
    bursts: usize,
    packets: usize,
    /// Segments of the largest burst.
    largest: usize,
}

/// Moves everything between the two endpoints of a pair through stack buffers.
fn shuttle(p: &mut Pair, wire: &mut Wire) {
    let mut buf = [0u8; 65_408];
    loop {
        let mut moved = false;
        for side in [Side::A, Side::B] {
            let (now, flow) = (p.now, p.flow_from(side));
            loop {
                let (segments_max, ids) = (wire.segments_max, IdRule::Index);
                let room = TxRoom { buf: &mut buf, headroom: 0, segments_max, ids, medium: Medium::Udp };
                let Some(burst) = p.node(side).endpoint.poll_transmit(now, room) else { break };
                moved = true;
                wire.bursts += 1;
                wire.packets += burst.segments;
                wire.largest = wire.largest.max(burst.segments);
                if wire.lose > 0 && wire.bursts.is_multiple_of(wire.lose) {
                    continue;
                }
                let bytes = &buf[..burst.len];
                let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
                let rx = RxBurst { flow, bytes, segment: burst.segment, ids, at: now };
                p.node(side.other()).endpoint.handle_burst(now, rx);
            }
        }
        if !moved {
            return;
        }
    }
}

fn pair_round(p: &mut Pair, wire: &mut Wire) {
    let a = End { qp: p.a.qp, cq: p.a.cq, mr: p.a.mr };
    let b = End { qp: p.b.qp, cq: p.b.cq, mr: p.b.mr };
    for (kind, length) in ROUND {
        if kind == 0 {
            b.receive(&mut p.b.endpoint);
        }
        a.post(&mut p.a.endpoint, kind, length, &b);
        let mut done = 0;
        while done == 0 {
            shuttle(p, wire);
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
    for (mtu, segments_max) in [(PathMtu::B1024, 1), (PathMtu::B256, 64)] {
        for lose in [0, 100] {
            let options = Options { mtu, region: 65_536, access: ACCESS, ..Options::default() };
            let mut p = Pair::new(&options);
            let mut wire = Wire { lose, segments_max, ..Wire::default() };
            for _ in 0..20 {
                pair_round(&mut p, &mut wire);
            }
            wire = Wire { lose, segments_max, ..Wire::default() };
            let made = allocations_and_locks(|| {
                for _ in 0..200 {
                    pair_round(&mut p, &mut wire);
                }
            });
            let Wire { packets, largest, .. } = wire;
            assert!(packets > 30_000 && largest == segments_max, "{packets} packets, {largest} in a burst");
            assert_eq!(made, (0, 0), "allocations and locks for {packets} packets, {lose}");
        }
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
    assert_eq!(allocations_and_locks(|| (0..1000).for_each(|_| round())), (0, 0));
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

fn join(verbs: &mut dyn Verbs, end: &End, peer: (Gid, Qpn)) {
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

/// Returns the device of the side that asked.
fn engines_allocate_nothing<D: Device>(first: D, second: D, rounds: usize) -> D {
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
    assert_eq!(allocations_and_locks(|| (0..rounds).for_each(|_| round())), (0, 0));
    left.into_parts().0
}

#[test]
fn engines_over_the_switch_allocate_nothing_per_packet() {
    let switch = Switch::new();
    let port = |a: &str| switch.port(&[a.parse().unwrap()]);
    engines_allocate_nothing(port("10.0.0.1"), port("10.0.0.2"), 100);
}

#[test]
fn engines_over_udp_sockets_allocate_nothing_per_packet() {
    let usual = UdpOptions::default();
    for (third, options) in [(0, usual), (1, UdpOptions { segments_max: 1, ..usual })] {
        let open = |fourth| {
            let address = core::net::IpAddr::from([127, 44, third, fourth]);
            UdpDevice::open_with(address, options).unwrap()
        };
        let device = engines_allocate_nothing(open(1), open(2), 100);
        assert_eq!(device.capabilities().segments_max > 1, options.segments_max > 1);
    }
}

/// A network namespace with both ends of a veth pair, for the calling thread.
struct Veth(String);

impl Veth {
    fn new() -> Self {
        let name = format!("uroce-alloc-{}", std::process::id());
        let veth = Self(name.clone());
        ip(&format!("netns add {name}"));
        ip(&format!("-n {name} link add v0 mtu 2200 type veth peer name v1 mtu 2200"));
        for end in ["v0", "v1"] {
            ip(&format!("-n {name} link set {end} up"));
        }
        enter_netns(std::path::Path::new(&format!("/run/netns/{name}"))).unwrap();
        veth
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).status().expect("iproute2 is needed");
    assert!(done.success(), "ip {arguments}: it takes root");
}

#[test]
fn engines_over_packet_sockets_allocate_nothing_per_packet() {
    let _veth = Veth::new();
    for segments_max in [64, 1] {
        let open = |end: u8| {
            let (mac, address) = (MacAddr([2, 0, 0, 0, 0, end]), core::net::IpAddr::from([10, 9, 0, end]));
            let config = AfPacketConfig::own(format!("v{end}"), mac, vec![address]);
            AfPacket::open(AfPacketConfig { segments_max, ..config }).unwrap()
        };
        let device = engines_allocate_nothing(open(0), open(1), 100);
        assert_eq!(device.superframe_counters().sent > 0, segments_max > 1);
    }
}

/// Two ports, and the sides of a connection between them.
fn on_the_switch<V>(open: impl Fn(Engine<uroce::device::loopback::LoopbackDevice>) -> V) -> [V; 2] {
    let switch = Switch::new();
    [1, 2].map(|n| open(Engine::open(switch.port(&[core::net::IpAddr::from([10, 0, 0, n])])).unwrap()))
}

fn connect(left: &mut dyn Verbs, right: &mut dyn Verbs) -> (End, End) {
    let (a, b) = (end(left), end(right));
    let name = |v: &dyn Verbs, end: &End| (v.query_gids()[0].gid, v.query_qp(end.qp).unwrap().qpn);
    let (left_name, right_name) = (name(left, &a), name(right, &b));
    join(left, &a, right_name);
    join(right, &b, left_name);
    (0..16).for_each(|_| b.receive(right));
    (a, b)
}

#[test]
fn engines_in_two_threads_allocate_nothing_per_packet() {
    let [mut left, mut right] = on_the_switch(|engine| engine);
    let (a, b) = connect(left.endpoint_mut(), right.endpoint_mut());
    let (warm, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let serve = |right: &mut Engine<_>, until: &AtomicBool| {
        while !until.load(Ordering::Acquire) {
            if right.poll().unwrap() == 0 {
                std::thread::yield_now();
            }
            (0..b.poll(right.endpoint_mut())).for_each(|_| b.receive(right.endpoint_mut()));
        }
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            serve(&mut right, &warm);
            allocations_and_locks(|| serve(&mut right, &over))
        });
        let mut round = || {
            for (kind, length) in ROUND {
                a.post(left.endpoint_mut(), kind, length, &b);
                while a.poll(left.endpoint_mut()) == 0 {
                    if left.poll().unwrap() == 0 {
                        std::thread::yield_now();
                    }
                }
            }
        };
        (0..20).for_each(|_| round());
        warm.store(true, Ordering::Release);
        let made = allocations_and_locks(|| (0..100).for_each(|_| round()));
        over.store(true, Ordering::Release);
        assert_eq!((made, server.join().unwrap()), ((0, 0), (0, 0)));
    });
}

/// Each call of a handle takes locks that do not depend on the packets it moves: the ring's, and the engine's, tried.
#[test]
fn a_call_of_a_handle_takes_three_locks_at_most_and_allocates_nothing() {
    const LOCKS_A_CALL: u64 = 3;
    let hosts = on_the_switch(Host::new);
    let [mut left, mut right] = [0, 1].map(|n: usize| hosts[n].handle());
    let (a, b) = connect(&mut left, &mut right);
    let (warm, over) = (AtomicBool::new(false), AtomicBool::new(false));
    // Calls made.
    let serve = |right: &mut Handle, until: &AtomicBool| {
        let mut calls = 0;
        while !until.load(Ordering::Acquire) {
            let came = b.poll(right);
            (0..came).for_each(|_| b.receive(right));
            calls += 1 + came as u64;
        }
        calls
    };
    let round = |left: &mut Handle| {
        let mut calls = 0;
        for (kind, length) in ROUND {
            a.post(left, kind, length, &b);
            calls += 1;
            while a.poll(left) == 0 {
                calls += 1;
            }
            calls += 1;
        }
        calls
    };
    let within = |(made, locks): (u64, u64), calls: u64| {
        assert_eq!(made, 0, "allocations in {calls} calls");
        assert!(locks <= LOCKS_A_CALL * calls, "{locks} locks in {calls} calls");
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            serve(&mut right, &warm);
            let mut calls = 0;
            (allocations_and_locks(|| calls = serve(&mut right, &over)), calls)
        });
        (0..20).for_each(|_| {
            round(&mut left);
        });
        warm.store(true, Ordering::Release);
        let mut calls = 0;
        let made = allocations_and_locks(|| calls = (0..100).map(|_| round(&mut left)).sum());
        over.store(true, Ordering::Release);
        within(made, calls);
        let (made, calls) = server.join().unwrap();
        within(made, calls);
    });
    assert!(!cfg!(debug_assertions) || lock::taken() > Some(0), "locks are counted");
}
