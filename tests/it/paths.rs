//! Paths of a QP: partition keys, source ports, and whose packets it looks at.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use uroce::burst::RxIds;
use uroce::counters::DropReason;
use uroce::sim::SentPacket;
use uroce::types::{PKey, QKey, Qpn};
use uroce::verbs::{
    AddressVector, InitAttr, Operation, Payload, QpAttr, QpOptions, QpState, QpTransition, QpType, SendFlags, SendWr,
    SourceCheck, SourcePort, SourcePortCheck, UdDestination, Verbs, VerbsError, WcStatus,
};
use uroce::wire::{Body, Flow, IpFields, Packet};

use crate::duo::{Duo, Setup, sealed};

const A: usize = 0;
const B: usize = 1;
const IP: IpFields = IpFields { id: 0, flags_fragment: 0x4000 };

fn write(duo: &mut Duo, side: usize) -> WcStatus {
    let there = duo.remote(1 - side, 0);
    duo.post(side, Operation::Write(there), 0, 8);
    duo.settle();
    duo.completions(side)[0].status
}

fn dropped(duo: &mut Duo, side: usize, reason: DropReason) -> u64 {
    let node = duo.ends[side].node;
    duo.world.endpoint(node).counters().dropped(reason)
}

/// Notes the partition key of every packet.
fn keys(duo: &mut Duo) -> Arc<Mutex<BTreeSet<u16>>> {
    let keys = Arc::new(Mutex::new(BTreeSet::new()));
    let log = Arc::clone(&keys);
    duo.listen_to(move |_, packet| {
        log.lock().unwrap().insert(packet.pkey.get());
        None
    });
    keys
}

#[test]
fn packets_carry_the_key_at_their_index_and_two_limited_members_do_not_meet() {
    // (A's key, B's key, whether they may talk).
    let cases = [(0x8007, 0x8007, true), (0x8007, 0x0007, true), (0x0007, 0x8007, true), (0x0007, 0x0007, false)];
    for (a, b, meet) in cases {
        let pkeys = [vec![0xFFFF, a], vec![0xFFFF, 0x8001, b]];
        let mut duo = Duo::new(&Setup { pkeys, pkey_index: [1, 2], retry: 1, ..Setup::default() });
        let keys = keys(&mut duo);
        let status = write(&mut duo, A);
        assert_eq!(status, if meet { WcStatus::Success } else { WcStatus::RetryExceeded }, "{a:04x} {b:04x}");
        assert!(keys.lock().unwrap().iter().all(|k| [a, b].contains(k)));
        // The port says so, as ibv_query_port does.
        let bad = if meet { 0 } else { 2 };
        assert_eq!(dropped(&mut duo, B, DropReason::PKeyMismatch), bad);
        let node = duo.ends[B].node;
        assert_eq!(u64::from(duo.world.endpoint(node).query_port().bad_pkey_cntr), bad);
        assert_eq!(duo.state(B), QpState::Rts);
    }
}

#[test]
fn other_partitions_are_strangers_and_the_table_is_what_was_configured() {
    let pkeys = [vec![0xFFFF, 0x8007], vec![0xFFFF, 0x8007]];
    let mut duo = Duo::new(&Setup { pkeys, pkey_index: [1, 0], retry: 0, ..Setup::default() });
    assert_eq!(write(&mut duo, A), WcStatus::RetryExceeded);
    let node = duo.ends[A].node;
    let table = duo.world.endpoint(node).query_device().pkeys;
    assert_eq!(table, [PKey::DEFAULT, PKey::new(0x8007)]);
    assert_eq!(duo.attr(A).pkey_index, Some(1));
    // A table of 128 entries, its last one used; what is beyond is not there, and 0 names no partition.
    let long: Vec<u16> = (0..200).map(|i| 0x8000 + i).collect();
    let mut duo = Duo::new(&Setup { pkeys: [long.clone(), long], pkey_index: [127, 127], ..Setup::default() });
    assert_eq!(write(&mut duo, A), WcStatus::Success);
    let node = duo.ends[A].node;
    assert_eq!(duo.world.endpoint(node).query_device().pkeys.len(), 128);
    let qp = duo.ends[A].qp;
    duo.modify(A, QpAttr::to_state(QpState::Sqd));
    for (index, good) in [(0, false), (1, true), (127, true), (128, false)] {
        let attr = QpAttr { pkey_index: Some(index), ..QpAttr::to_state(QpState::Sqd) };
        assert_eq!(duo.world.endpoint(node).modify_qp(qp, attr).is_ok(), good, "{index}");
    }
}

/// Two UD QPs; the address handle of A may name an index.
fn datagram(setup: &Setup, index: Option<u16>) -> (Duo, usize) {
    let mut duo = Duo::new(setup);
    let qkey = QKey::new(0x1111);
    let mut qps = Vec::new();
    for side in [A, B] {
        let (node, pd, cq) = (duo.ends[side].node, duo.ends[side].pd, duo.ends[side].cq);
        let init = uroce::verbs::QpInit {
            pd,
            qp_type: QpType::Ud,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            caps: uroce::verbs::QpCapabilities::default(),
            signal_all: true,
            qpn: None,
        };
        let e = duo.world.endpoint(node);
        let qp = e.create_qp(init).unwrap();
        let init: QpAttr = InitAttr::datagram(qkey).into();
        e.modify_qp(qp, QpAttr { pkey_index: Some(setup.pkey_index[side]), ..init }).unwrap();
        e.modify_qp(qp, QpTransition::RtrUd.into()).unwrap();
        e.modify_qp(qp, QpTransition::RtsPsn(uroce::types::Psn::ZERO).into()).unwrap();
        qps.push((qp, e.query_qp(qp).unwrap().qpn));
    }
    duo.ends[B].qp = qps[1].0;
    duo.recv(B, 0, 100);
    let av = AddressVector { pkey_index: index, ..duo.av(A, 0) };
    let (node, pd) = (duo.ends[A].node, duo.ends[A].pd);
    let e = duo.world.endpoint(node);
    let ah = e.create_ah(pd, av).unwrap();
    let destination = Some(UdDestination { ah, qpn: qps[1].1, qkey });
    let (operation, payload) = (Operation::Send, Payload::Inline(b"datagram"));
    e.post_send(qps[0].0, &[SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination }]).unwrap();
    duo.settle();
    let received = duo.completions(B).len();
    (duo, received)
}

#[test]
fn datagrams_take_the_key_of_their_qp_or_of_their_address_handle() {
    let pkeys = [vec![0xFFFF, 0x8007, 0x0007], vec![0xFFFF, 0x8007, 0x0007]];
    let setup = |pkey_index| Setup { pkeys: pkeys.clone(), pkey_index, ..Setup::default() };
    for (indices, of_handle, arrives) in [
        ([1, 1], None, 1),
        ([0, 1], None, 0),
        ([0, 1], Some(1), 1),
        ([0, 1], Some(2), 1),
        ([1, 1], Some(0), 0),
        ([2, 2], None, 0),
    ] {
        let (mut duo, received) = datagram(&setup(indices), of_handle);
        assert_eq!(received, arrives, "{indices:?} {of_handle:?}");
        assert_eq!(dropped(&mut duo, B, DropReason::PKeyMismatch), 1 - arrives as u64);
    }
    let mut duo = Duo::new(&setup([0, 0]));
    let (node, pd, av) = (duo.ends[A].node, duo.ends[A].pd, duo.av(A, 0));
    let beyond = AddressVector { pkey_index: Some(3), ..av };
    let refused = duo.world.endpoint(node).create_ah(pd, beyond);
    assert_eq!(refused, Err(VerbsError::InvalidPKeyIndex { index: 3, len: 3 }));
    // An entry that names no partition.
    let holes = [vec![0xFFFF, 0, 0x8000], vec![0xFFFF]];
    let mut duo = Duo::new(&Setup { pkeys: holes, ..Setup::default() });
    let (node, pd, av) = (duo.ends[A].node, duo.ends[A].pd, duo.av(A, 0));
    for index in [1, 2] {
        let hole = AddressVector { pkey_index: Some(index), ..av };
        let refused = duo.world.endpoint(node).create_ah(pd, hole);
        assert_eq!(refused, Err(VerbsError::InvalidPKeyIndex { index: index.into(), len: 3 }));
    }
}

/// The source port of every request that A sends, and of every answer that B sends.
fn ports_of_messages(setup: &Setup, messages: usize, together: usize) -> (Vec<u16>, BTreeSet<u16>) {
    let mut duo = Duo::new(setup);
    let seen = Arc::new(Mutex::new((Vec::new(), BTreeSet::new())));
    let log = Arc::clone(&seen);
    duo.listen_to(move |passing, packet| {
        let mut log = log.lock().unwrap();
        match packet.body {
            Body::Request(_) => log.0.push(passing.flow.src_port),
            _ => drop(log.1.insert(passing.flow.src_port)),
        }
        None
    });
    for _ in 0..messages / together {
        for _ in 0..together {
            let there = duo.remote(B, 0);
            duo.post(A, Operation::Write(there), 0, 3000);
        }
        duo.settle();
    }
    assert!(duo.completions(A).iter().all(|c| c.status == WcStatus::Success));
    let log = seen.lock().unwrap();
    (log.0.clone(), log.1.clone())
}

#[test]
fn a_rotating_port_changes_only_when_nothing_is_in_flight() {
    let rotating = |av| AddressVector { udp_source_port: SourcePort::Rotating, ..av };
    let setup = Setup { av: rotating, ..Setup::default() };
    // One message at a time: its three packets leave from one port, and messages from many.
    let (ports, answers) = ports_of_messages(&setup, 50, 1);
    assert!(ports.chunks(3).all(|m| m[0] == m[1] && m[1] == m[2]));
    assert!(ports.iter().collect::<BTreeSet<_>>().len() > 40, "of 16384 ports");
    assert!(ports.iter().all(|p| *p >= 0xC000));
    assert_eq!(answers.len(), 1, "answers keep theirs");
    // Ten at a time: nothing changes while one of them is under way.
    let (ports, _) = ports_of_messages(&setup, 50, 10);
    assert!(ports.chunks(30).all(|m| m.iter().all(|p| *p == m[0])));
    assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), 5);
}

#[test]
fn other_policies_keep_their_port() {
    let formula = ports_of_messages(&Setup::default(), 10, 1);
    let duo = Duo::new(&Setup::default());
    assert_eq!(formula.0[0], uroce::wire::udp_source_port(0, duo.ends[A].qpn, duo.ends[B].qpn));
    let fixed = |av| AddressVector { udp_source_port: SourcePort::Fixed(50_001), ..av };
    let fixed = ports_of_messages(&Setup { av: fixed, ..Setup::default() }, 10, 1);
    assert_eq!((fixed.0[0], fixed.1.first()), (50_001, Some(&50_001)));
    let random = |av| AddressVector { udp_source_port: SourcePort::Random, ..av };
    let random = ports_of_messages(&Setup { av: random, ..Setup::default() }, 10, 1);
    assert_ne!(random.0[0], formula.0[0]);
    for (ports, answers) in [formula, fixed, random] {
        assert!(ports.iter().all(|p| *p == ports[0]));
        assert_eq!(answers.len(), 1);
    }
}

/// The first packet that A has to send, which does not arrive.
fn intercepted(duo: &mut Duo) -> SentPacket {
    let node = duo.ends[A].node;
    duo.world.keep_sent(node);
    duo.cut(0, true);
    let there = duo.remote(B, 0);
    duo.post(A, Operation::Write(there), 0, 8);
    let sent = duo.world.take_sent(node).remove(0);
    duo.cut(0, false);
    sent
}

/// A million packets that are right in every field, from addresses that are not the peer's: the QP does not move.
#[test]
fn a_million_packets_of_strangers_change_nothing() {
    let mut duo = Duo::new(&Setup::default());
    let real = intercepted(&mut duo);
    let packet = Packet::parse(&real.bytes).unwrap();
    let before = duo.ends[B].region.to_vec();
    let to = duo.ends[B].node;
    let spoofed: Vec<_> = (0..1000u32)
        .map(|i| {
            let src = std::net::Ipv4Addr::from_bits(0x0A01_0000 + i).into();
            let flow = Flow { src, ..real.flow };
            (flow, sealed(&packet, &flow, IP))
        })
        .collect();
    let now = duo.world.now();
    let endpoint = duo.world.endpoint(to);
    for _ in 0..1000 {
        for (flow, bytes) in &spoofed {
            let ids = RxIds::Known(IP);
            let burst = uroce::burst::RxBurst { flow: *flow, bytes, segment: bytes.len(), ids, at: now };
            endpoint.handle_burst(now, burst);
        }
    }
    assert_eq!(dropped(&mut duo, B, DropReason::AddressMismatch), 1_000_000);
    assert_eq!(duo.ends[B].region.to_vec(), before);
    assert_eq!((duo.events(B), duo.completions(B)), (vec![], vec![]));
    // The real one comes again, is executed and acknowledged.
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
    assert_eq!(duo.state(B), QpState::Rts);
}

#[test]
fn the_source_check_is_as_strict_as_asked_for() {
    let subnet = SourceCheck::Subnet { ipv4: 24, ipv6: 64 };
    // (check, source, whether it is heard).
    let cases = [
        (SourceCheck::Strict, "10.0.0.1", true),
        (SourceCheck::Strict, "10.0.0.77", false),
        (subnet, "10.0.0.77", true),
        (subnet, "10.0.7.1", false),
        (SourceCheck::Off, "192.0.2.1", true),
    ];
    for (source_check, src, heard) in cases {
        let options = QpOptions { source_check, ..QpOptions::default() };
        let mut duo = Duo::new(&Setup { options: [QpOptions::default(), options], ..Setup::default() });
        let real = intercepted(&mut duo);
        let packet = Packet::parse(&real.bytes).unwrap();
        let flow = Flow { src: src.parse().unwrap(), ..real.flow };
        let to = duo.ends[B].node;
        duo.world.inject(to, flow, RxIds::Known(IP), &sealed(&packet, &flow, IP));
        assert_eq!(dropped(&mut duo, B, DropReason::AddressMismatch), u64::from(!heard), "{source_check:?} {src}");
        duo.settle();
        assert_eq!(duo.completions(A)[0].status, WcStatus::Success, "the answer goes to the peer's GID in any case");
    }
}

#[test]
fn a_qp_that_learned_its_peers_port_hears_no_other() {
    let first = QpOptions { source_port_check: SourcePortCheck::First, ..QpOptions::default() };
    let mut duo = Duo::new(&Setup { options: [QpOptions::default(), first], ..Setup::default() });
    let real = intercepted(&mut duo);
    let packet = Packet::parse(&real.bytes).unwrap();
    let to = duo.ends[B].node;
    let flow = Flow { src_port: real.flow.src_port ^ 1, ..real.flow };
    // Out of sequence from another port: heard, as nothing is learned yet, and nothing is learned from it.
    let ghost = Packet { psn: packet.psn.plus(1000), ..packet };
    duo.world.inject(to, flow, RxIds::Known(IP), &sealed(&ghost, &flow, IP));
    assert_eq!(dropped(&mut duo, B, DropReason::SourcePortMismatch), 0);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
    let next = Packet { psn: packet.psn.plus(1), ..packet };
    duo.world.inject(to, flow, RxIds::Known(IP), &sealed(&next, &flow, IP));
    assert_eq!(dropped(&mut duo, B, DropReason::SourcePortMismatch), 1);
    assert_eq!(write(&mut duo, A), WcStatus::Success);
    assert_eq!(duo.count(B, "rx_write_requests"), 2);
}

#[test]
fn options_are_per_qp_and_survive_a_reset() {
    let usual = QpOptions { credits: true, ..QpOptions::default() };
    let mut duo = Duo::new(&Setup { options: [usual, QpOptions::default()], ..Setup::default() });
    let (node, qp) = (duo.ends[A].node, duo.ends[A].qp);
    let e = duo.world.endpoint(node);
    assert_eq!(e.qp_options(qp), Ok(usual), "what the endpoint gives to new QPs");
    let own = QpOptions { source_check: SourceCheck::Off, ..QpOptions::default() };
    e.set_qp_options(qp, own).unwrap();
    e.modify_qp(qp, QpTransition::Reset.into()).unwrap();
    assert_eq!(e.qp_options(qp), Ok(own));
    e.destroy_qp(qp).unwrap();
    assert_eq!(e.set_qp_options(qp, own), Err(VerbsError::InvalidHandle));
    assert_eq!(e.find_qp(Qpn::GSI), None);
}
