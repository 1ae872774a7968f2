//! Bugs that others had, each as a test. The numbers in the comments are upstream commits or CVEs of Linux's rxe and
//! its siblings; what is tested is our code against the same input.

use std::collections::BTreeSet;

use uroce::counters::DropReason;
use uroce::device::udp::UdpDevice;
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::time::Duration;
use uroce::types::{Imm, Lkey, PathMtu, Rkey};
use uroce::verbs::{
    AccessFlags, AddressVector, InitAttr, Operation, Payload, QpAttr, QpCapabilities, QpState, QpTransition, QpType,
    RecvWr, Remote, SendFlags, SendWr, Sge, UdDestination, Verbs, WcStatus,
};
use uroce_fixtures::hostile;
use uroce_tests::pair::{Fate, Options, Pair, QKEY, Side};

/// Addresses a hostile packet to side B of a pair.
fn towards_b(p: &mut Pair) -> (hostile::Flow, hostile::Target) {
    let flow = p.flow_from(Side::A);
    let mut to = hostile::Flow::new(flow.src, flow.dst);
    to.source_port = flow.src_port;
    to.ipv4_id = 0;
    to.dont_fragment = true;
    let info = p.b.endpoint.query_qp(p.b.qp).unwrap();
    let mut target = hostile::Target::new(p.b.qpn.get(), info.queues.rq_psn.get());
    target.r_key = p.b.mr.rkey.get();
    target.va = p.b.mr.iova;
    (to, target)
}

/// B2 1: one packet with opcode 0xff to the multicast QPN read out of bounds and panicked the kernel.
#[test]
fn opcode_ff_to_the_multicast_qpn_is_a_counted_drop() {
    let mut p = Pair::new(&Options::default());
    let (flow, _) = towards_b(&mut p);
    let frame = hostile::rxe_opcode_ff(&flow);
    p.deliver(Side::B, &frame.bytes);
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::Malformed), 1);
}

/// B2 1: every opcode at every length, with a right ICRC: each is dropped and counted, answered, or taken; the
/// endpoint lives on.
#[test]
fn every_opcode_at_every_length_leaves_the_endpoint_alive() {
    let mut p = Pair::new(&Options::default());
    let (flow, target) = towards_b(&mut p);
    let mut fed = 0u64;
    for frame in hostile::opcode_grid(&flow, &target) {
        p.deliver(Side::B, &frame.bytes);
        p.take_sent(Side::B);
        fed += 1;
    }
    let c = p.b.endpoint.counters();
    assert_eq!(fed, 256 * 129);
    assert!(c.dropped(DropReason::Malformed) > fed / 2);
    assert!(c.rcvd_pkts + c.dropped_in_all() >= fed);
}

/// B2 2: pad and ICRC were not checked before the payload's size was computed (7244491dab34).
#[test]
fn short_packets_with_pad_are_dropped() {
    let mut p = Pair::new(&Options::default());
    p.b.recv(1, 0, 4096);
    let (flow, target) = towards_b(&mut p);
    for frame in hostile::short_with_pad(&flow, &target) {
        let before = p.b.endpoint.counters().dropped_in_all();
        p.deliver(Side::B, &frame.bytes);
        assert_eq!(p.b.endpoint.counters().dropped_in_all(), before + 1, "{}", frame.name);
    }
    assert_eq!(p.b.completions(), []);
}

/// B2 3: an ATOMIC WRITE whose payload is not 8 bytes was accepted (d415fce3fcde). It is an invalid request.
#[test]
fn an_atomic_write_that_is_not_8_bytes_long_is_refused() {
    let lengths = hostile::atomic_write_lengths;
    let (flow, target) = towards_b(&mut Pair::new(&Options::default()));
    for i in 0..lengths(&flow, &target).len() {
        let mut p = Pair::new(&Options::default());
        let (flow, target) = towards_b(&mut p);
        let frame = lengths(&flow, &target).into_iter().nth(i).unwrap();
        p.deliver(Side::B, &frame.bytes);
        p.take_sent(Side::B);
        assert_eq!(p.ladder(), ["B NAK(InvalidRequest) 100"], "{}", frame.name);
        assert_eq!(p.b.region.to_vec(), vec![0; 1 << 16], "{}", frame.name);
    }
}

/// B2 4: CVE-2016-8636, sums of address and length that wrap.
#[test]
fn ranges_that_wrap_touch_nothing() {
    let (flow, target) = towards_b(&mut Pair::new(&Options::default()));
    let names: Vec<_> = hostile::wrapping_ranges(&flow, &target).into_iter().map(|f| f.name).collect();
    assert!(names.len() >= 6);
    for i in 0..names.len() {
        let mut p = Pair::new(&Options::default());
        p.b.region.write(0, &[0xC5; 1 << 16]).unwrap();
        let (flow, target) = towards_b(&mut p);
        let frame = hostile::wrapping_ranges(&flow, &target).into_iter().nth(i).unwrap();
        p.deliver(Side::B, &frame.bytes);
        p.take_sent(Side::B);
        assert_eq!(p.b.region.to_vec(), vec![0xC5; 1 << 16], "{}", frame.name);
        let read_data = p.ladder().iter().any(|l| l.contains("READ_RESP") || l.contains("ATOMIC_ACK"));
        assert!(!read_data, "{}: {:?}", frame.name, p.ladder());
    }
}

/// B2 5: the number of elements was used before it was checked (126c757e4cd4).
#[test]
fn more_elements_than_the_queue_has_are_refused_at_post() {
    let mut p = Pair::new(&Options::default());
    let sges = vec![p.a.sge(0, 1); 300];
    for n in [5, 32, 33, 255, 256, 300] {
        let payload = Payload::Sges(&sges[..n]);
        let wr =
            SendWr { wr_id: 0, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination: None };
        assert!(p.a.endpoint.post_send(p.a.qp, &[wr]).is_err());
        assert!(p.a.endpoint.post_recv(p.a.qp, &[RecvWr { wr_id: 0, sges: &sges[..n] }]).is_err());
    }
    assert_eq!(p.take_sent(Side::A).len(), 0);
}

/// B2 8: the responder used freed resources after a modify of max_dest_rd_atomic (a37da605b395, de3295337921). Here
/// the depth shrinks in SQD while READs and atomics are being answered and repeated.
#[test]
fn shrinking_the_read_depth_under_traffic_is_safe() {
    for depth in [0, 1, 2, 16] {
        let mut p = Pair::new(&Options::default());
        let there = p.b.remote(0);
        for i in 0..8 {
            p.a.send(i, Operation::Read(there), 0, 4000);
        }
        let sent = p.take_sent(Side::A);
        for segment in &sent {
            p.deliver(Side::B, segment);
        }
        p.b.endpoint.modify_qp(p.b.qp, QpTransition::Sqd { notify: false }.into()).unwrap();
        let shrink = QpAttr { max_dest_rd_atomic: Some(depth), ..QpAttr::to_state(QpState::Sqd) };
        p.b.endpoint.modify_qp(p.b.qp, shrink).unwrap();
        for segment in &sent {
            p.deliver(Side::B, segment);
        }
        p.settle();
        assert!(p.a.completions().iter().all(|c| c.status == WcStatus::Success));
    }
}

/// B2 8: a modify in every state, with packets of every kind under way.
#[test]
fn err_and_reset_at_every_packet_of_an_exchange() {
    for stop_at in 0..60 {
        for to in [QpTransition::Err, QpTransition::Reset] {
            for side in [Side::A, Side::B] {
                let mut p = busy_pair();
                let mut n = 0;
                let mut stopped = false;
                while !stopped {
                    stopped = step(&mut p, &mut n, stop_at);
                }
                let qp = p.node(side).qp;
                p.node(side).endpoint.modify_qp(qp, to.into()).unwrap();
                p.run_for(Duration::from_secs(30), |_, _| Fate::Deliver);
                // Each work request ended exactly once, or not at all where its QP was reset.
                let ids: Vec<u64> = p.a.completions().iter().map(|c| c.wr_id).collect();
                let unique: BTreeSet<u64> = ids.iter().copied().collect();
                assert_eq!(ids.len(), unique.len(), "{ids:?}");
                if !(side == Side::A && to == QpTransition::Reset) {
                    assert_eq!(unique.len(), 5, "{side:?} {to:?} at {stop_at}: {ids:?}");
                }
            }
        }
    }
}

fn busy_pair() -> Pair {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, retry: 2, rnr_retry: 1, ..Options::default() });
    let there = p.b.remote(0);
    p.b.recv(100, 8000, 2000);
    p.a.send(1, Operation::Write(there), 0, 2000);
    p.a.send(2, Operation::Read(there), 4000, 2000);
    p.a.send(3, Operation::FetchAdd { remote: there, add: 1 }, 4000, 8);
    p.a.send(4, Operation::Send, 0, 2000);
    p.a.send(5, Operation::Write(there), 0, 2000);
    p
}

/// Carries packets until `limit` were carried or nothing moves.
fn step(p: &mut Pair, n: &mut usize, limit: usize) -> bool {
    let mut moved = false;
    for side in [Side::A, Side::B] {
        for segment in p.take_sent(side) {
            if *n >= limit {
                return true;
            }
            *n += 1;
            moved = true;
            p.deliver(side.other(), &segment);
        }
    }
    !moved
}

/// B2 9: CVE-2026-45910, timers that ran on after the QP was destroyed (87bf64692143).
#[test]
fn destroying_a_qp_with_any_timer_running_is_the_end_of_it() {
    for rnr in [false, true] {
        let mut p = Pair::new(&Options::default());
        let there = p.b.remote(0);
        p.a.send(1, if rnr { Operation::Send } else { Operation::Write(there) }, 0, 8);
        p.run(|_, _| if rnr { Fate::Deliver } else { Fate::Drop });
        assert!(p.a.endpoint.poll_timeout().is_some());
        p.a.endpoint.destroy_qp(p.a.qp).unwrap();
        // A new QP may take the slot; the old timers must not reach it.
        let (pd, cq) = (p.a.pd, p.a.cq);
        let caps = QpCapabilities::default();
        let init = uroce::verbs::QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            caps,
            signal_all: false,
            qpn: None,
        };
        let fresh = p.a.endpoint.create_qp(init).unwrap();
        for _ in 0..20 {
            p.next_timer();
            p.take_sent(Side::A);
        }
        assert_eq!(p.a.endpoint.query_qp(fresh).unwrap().state, QpState::Reset);
        assert_eq!(p.a.completions(), []);
        assert_eq!(p.a.endpoint.poll_timeout(), None);
    }
}

/// B2 13: the length check of the UD responder (f67ac0061c76): payload plus the 40 bytes, at every size of receive.
#[test]
fn ud_receives_of_every_size_around_the_grh() {
    for room in [0, 1, 39, 40, 41, 43, 44, 45, 100] {
        let mut p = Pair::new(&Options { qp_type: QpType::Ud, ..Options::default() });
        p.b.region.write(0, &[0xC5; 200]).unwrap();
        p.b.recv(1, 0, room);
        let av = AddressVector::new("::ffff:10.0.0.2".parse::<std::net::IpAddr>().unwrap().into(), 0);
        let ah = p.a.endpoint.create_ah(p.a.pd, av).unwrap();
        let destination = Some(UdDestination { ah, qpn: p.b.qpn, qkey: QKEY });
        let payload = Payload::Inline(b"four");
        let wr = SendWr { wr_id: 1, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
        p.settle();
        let got = p.b.completions();
        assert_eq!(got.len(), usize::from(room >= 44), "receive of {room}");
        let bytes = p.b.region.to_vec();
        let written = if room >= 44 { 44 } else { 0 };
        assert_eq!(bytes[written..200], vec![0xC5; 200 - written]);
    }
}

/// B2 14: inline data was copied wrongly with many elements (03fa18a992d5). Ours is one slice of every length; the
/// elements of a gathered send are 0 to 32.
#[test]
fn inline_of_every_length_and_elements_of_every_number() {
    let caps = QpCapabilities { max_send_sge: 32, max_recv_sge: 32, max_inline: 512, ..QpCapabilities::default() };
    let mut p = Pair::new(&Options { caps, mtu: PathMtu::B256, ..Options::default() });
    let bytes: Vec<u8> = (0..512u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    p.a.region.write(0, &bytes).unwrap();
    for len in 0..=512usize {
        p.b.recv(1, 0, 600);
        let payload = Payload::Inline(&bytes[..len]);
        let wr =
            SendWr { wr_id: 0, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
        p.settle();
        assert_eq!((p.a.completions().len(), p.b.completions()[0].byte_len as usize), (1, len));
        assert_eq!(p.b.region.to_vec()[..len], bytes[..len]);
    }
    for n in 0..=32u32 {
        // Element i has i bytes, some therefore none, taken from scattered places.
        let sges: Vec<Sge> = (0..n).map(|i| p.a.sge(u64::from(i) * 7, i)).collect();
        let want: Vec<u8> = (0..n as usize).flat_map(|i| bytes[i * 7..i * 7 + i].to_vec()).collect();
        p.b.recv(1, 0, 600);
        let payload = Payload::Sges(&sges);
        let wr =
            SendWr { wr_id: 0, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
        p.settle();
        assert_eq!((p.a.completions().len(), p.b.completions()[0].byte_len as usize), (1, want.len()));
        assert_eq!(p.b.region.to_vec()[..want.len()], want[..]);
    }
}

/// B2 16: zero-length READ failed on some (686d348476ee, rdma-core 1268): every opcode of length 0 with a live key, a
/// dead one and none, between others that have bytes.
#[test]
fn zero_length_of_each_opcode_between_others() {
    for rkey in [0, 0xFFFF_FFFF] {
        let mut p = Pair::new(&Options::default());
        let good = p.b.remote(0);
        let dead = Remote { addr: 0, rkey: Rkey::new(rkey) };
        for i in 0..3 {
            p.b.recv(i, 0, 0);
        }
        let all = [
            (Operation::Write(good), 100),
            (Operation::Read(dead), 0),
            (Operation::Read(good), 100),
            (Operation::Write(dead), 0),
            (Operation::Send, 0),
            (Operation::SendImm(Imm::new(1)), 0),
            (Operation::WriteImm(dead, Imm::new(2)), 0),
            (Operation::Write(good), 100),
        ];
        for (i, (operation, len)) in all.into_iter().enumerate() {
            p.a.send(i as u64, operation, 0, len);
        }
        p.settle();
        let done: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(done, (0..8).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    }
}

/// B2 17: a wrong lkey drew no completion (abe31d25facd): each bad element, in each operation, has its status.
#[test]
fn every_bad_local_key_has_its_status() {
    let make = |which: usize| {
        let mut p = Pair::new(&Options::default());
        let other = p.a.endpoint.alloc_pd().unwrap();
        let foreign_region = Region::alloc(64).unwrap();
        let foreign = p.a.endpoint.register(other, &foreign_region, AccessFlags::ALL, None).unwrap();
        let pd = p.a.pd;
        let read_only = p.a.endpoint.register(pd, &foreign_region, AccessFlags::NONE, None).unwrap();
        let good = p.a.sge(0, 8);
        let sge = match which {
            0 => Sge { lkey: Lkey::new(0), ..good },
            1 => Sge { lkey: Lkey::new(good.lkey.get() ^ 1), ..good },
            2 => Sge { addr: good.addr.wrapping_sub(1), ..good },
            3 => Sge { addr: good.addr + (1 << 16) - 7, ..good },
            4 => Sge { addr: u64::MAX - 3, ..good },
            5 => Sge { addr: foreign.iova, length: 8, lkey: foreign.lkey },
            _ => Sge { addr: read_only.iova, length: 8, lkey: read_only.lkey },
        };
        (p, sge)
    };
    for which in 0..7 {
        for kind in 0..5 {
            let (mut p, sge) = make(which);
            let there = p.b.remote(0);
            p.b.recv(1, 0, 100);
            let operation = match kind {
                0 => Operation::Send,
                1 => Operation::Write(there),
                2 => Operation::Read(there),
                3 => Operation::FetchAdd { remote: there, add: 1 },
                _ => Operation::CompareSwap { remote: there, compare: 0, swap: 1 },
            };
            let payload = Payload::Sges(&[sge]);
            let wr = SendWr { wr_id: 5, operation, payload, flags: SendFlags::SIGNALED, destination: None };
            p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
            p.settle();
            // Reading from a region without local write is fine; landing in it is not.
            let fine = which == 6 && kind < 2;
            let want = if fine { WcStatus::Success } else { WcStatus::LocalProtection };
            let done = p.a.completions();
            assert_eq!((done.len(), done[0].status), (1, want), "element {which} operation {kind}");
        }
    }
}

/// B2 18: half-made objects (6a8086a42dfb): a creation that fails leaves nothing behind.
#[test]
fn a_refused_creation_leaves_nothing() {
    let mut p = Pair::new(&Options::default());
    let before = p.a.endpoint.object_counts();
    let caps = QpCapabilities::default();
    let good = uroce::verbs::QpInit {
        pd: p.a.pd,
        qp_type: QpType::Rc,
        send_cq: p.a.cq,
        recv_cq: p.a.cq,
        srq: None,
        caps,
        signal_all: false,
        qpn: None,
    };
    for bad in [
        uroce::verbs::QpInit { caps: QpCapabilities { max_send_wr: 0, ..caps }, ..good },
        uroce::verbs::QpInit { caps: QpCapabilities { max_send_sge: 33, ..caps }, ..good },
        uroce::verbs::QpInit { caps: QpCapabilities { max_inline: 513, ..caps }, ..good },
        uroce::verbs::QpInit { qpn: Some(p.a.qpn), ..good },
    ] {
        assert!(p.a.endpoint.create_qp(bad).is_err());
    }
    assert_eq!(p.a.endpoint.object_counts(), before);
    p.a.endpoint.destroy_qp(p.a.qp).unwrap();
    p.a.endpoint.destroy_cq(p.a.cq).unwrap();
    assert_eq!(p.a.endpoint.object_counts(), [0, 0, 1, 0, 1, 0]);
}

/// B2 19: a socket leaked with each failed start.
#[test]
fn starting_and_stopping_leaks_no_descriptor() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let start = |address: &str| UdpDevice::open(address.parse().unwrap());
    let run = || {
        let device = start("127.46.0.1").unwrap();
        assert!(start("127.46.0.1").is_err(), "the port is taken");
        assert!(start("192.0.2.1").is_err(), "not an address of ours");
        let mut engine = Engine::open(device).unwrap();
        engine.poll().unwrap();
    };
    run();
    let before = open();
    for _ in 0..500 {
        run();
    }
    // Other tests of this process open and close descriptors meanwhile; a leak would be a thousand.
    assert!(open() < before + 200);
}

/// A QP that flips through its states with traffic under way takes no stale packet afterwards.
#[test]
fn rapid_state_flips_take_no_stale_packet() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 3000);
    let stale = p.take_sent(Side::A);
    for _ in 0..500 {
        for step in [QpTransition::Reset, QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Err]
        {
            p.b.endpoint.modify_qp(p.b.qp, step.into()).unwrap();
            for segment in &stale {
                p.deliver(Side::B, segment);
            }
        }
    }
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::QpState), 500 * 3 * stale.len() as u64);
    assert_eq!(p.b.region.to_vec(), vec![0; 1 << 16]);
}
