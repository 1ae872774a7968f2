//! Automatic path migration (IBTA Vol 1 17.2.8): arming, who may ask, and that nothing is lost by it.

use std::sync::{Arc, Mutex};

use uroce::counters::DropReason;
use uroce::device::impair::ImpairModel;
use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid};
use uroce::verbs::{
    AltPath, AsyncEvent, Attr, ModifyError, Operation, PathMigState, QpAttr, QpOptions, QpState, QpType, SourceCheck,
    Verbs, VerbsError, WcStatus,
};

use crate::duo::{Duo, REGION, Setup};

use PathMigState::{Armed, Migrated, Rearm};

const A: usize = 0;
const B: usize = 1;

/// Both armed: each asked for REARM, and a WRITE and its ACK told the other.
fn armed(setup: &Setup) -> Duo {
    let mut duo = Duo::new(setup);
    duo.rearm(A);
    duo.rearm(B);
    exchange(&mut duo);
    exchange(&mut duo);
    assert_eq!((duo.mig(A), duo.mig(B)), (Armed, Armed));
    duo
}

/// A WRITE each way: so that a UC responder, too, is heard.
fn exchange(duo: &mut Duo) {
    for side in [A, B] {
        let there = duo.remote(1 - side, 0);
        duo.post(side, Operation::Write(there), 0, 8);
        duo.settle();
        assert_eq!(duo.completions(side)[0].status, WcStatus::Success);
    }
}

fn migrate() -> QpAttr {
    QpAttr { path_mig_state: Some(Migrated), ..QpAttr::to_state(QpState::Rts) }
}

/// Notes the MigReq bit and network of every packet: (sender, network, bit).
fn record(duo: &mut Duo) -> Arc<Mutex<Vec<(usize, usize, bool)>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, first) = (Arc::clone(&seen), duo.ends[A].node);
    let second = [duo.ends[A].ips[1], duo.ends[B].ips[1]];
    duo.listen_to(move |passing, packet| {
        let (from, net) = (usize::from(passing.from != first), usize::from(second.contains(&passing.flow.dst)));
        log.lock().unwrap().push((from, net, packet.mig_req));
        None
    });
    seen
}

#[test]
fn a_qp_that_nobody_prepared_is_migrated_and_says_so() {
    let mut duo = Duo::new(&Setup::default());
    let seen = record(&mut duo);
    exchange(&mut duo);
    assert_eq!((duo.mig(A), duo.mig(B)), (Migrated, Migrated));
    assert!(seen.lock().unwrap().iter().all(|(_, net, bit)| *net == 0 && *bit));
}

#[test]
fn both_are_armed_once_both_asked_and_not_before() {
    let mut duo = Duo::new(&Setup::default());
    let seen = record(&mut duo);
    duo.rearm(A);
    exchange(&mut duo);
    assert_eq!((duo.mig(A), duo.mig(B)), (Rearm, Migrated), "B says that it is migrated");
    assert!(seen.lock().unwrap().iter().all(|(from, _, bit)| *bit == (*from == B)));
    duo.rearm(B);
    exchange(&mut duo);
    assert_eq!((duo.mig(A), duo.mig(B)), (Armed, Armed));
    seen.lock().unwrap().clear();
    exchange(&mut duo);
    assert!(seen.lock().unwrap().iter().all(|(_, net, bit)| *net == 0 && !*bit), "armed, and on the primary path");
    assert_eq!((duo.events(A), duo.events(B)), (vec![], vec![]));
}

#[test]
fn a_program_moves_one_side_and_the_other_follows() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        for ipv6 in [false, true] {
            let mut duo = armed(&Setup { qp_type, ipv6, ..Setup::default() });
            let second = [duo.ends[A].ips[1], duo.ends[B].ips[1]];
            duo.modify(A, migrate());
            let qp = duo.ends[A].qp;
            assert_eq!((duo.mig(A), duo.events(A)), (Migrated, vec![AsyncEvent::PathMigrated(qp)]));
            assert_eq!(duo.peer_of(A), second[B]);
            let seen = record(&mut duo);
            exchange(&mut duo);
            let qp = duo.ends[B].qp;
            assert_eq!((duo.mig(B), duo.events(B)), (Migrated, vec![AsyncEvent::PathMigrated(qp)]));
            assert_eq!(duo.peer_of(B), second[A]);
            assert!(seen.lock().unwrap().iter().all(|(_, net, bit)| *net == 1 && *bit));
            // What a program sees: the timeout is that of the path in use, and the path that was left is the other one.
            if qp_type == QpType::Rc {
                let attr = duo.attr(A);
                assert_eq!(attr.timeout, AckTimeout::new(9));
                let alt = attr.alt_path.unwrap();
                assert_eq!((alt.av.dgid.ip(), Some(alt.timeout)), (duo.ends[B].ips[0], AckTimeout::new(8)));
            }
        }
    }
}

/// 100 rounds of verified data, the path in use cut in the middle of each; every time both sides change over, and arm
/// again.
#[test]
fn a_path_that_dies_under_load_costs_nothing_but_time() {
    let mut duo = armed(&Setup::default());
    let mut rng = Rng::from_u64(11);
    let half = REGION / 2;
    for round in 0..100 {
        let net = round % 2;
        let mut bytes = vec![0; half];
        rng.fill(&mut bytes);
        duo.ends[A].region.write(0, &bytes).unwrap();
        let there = duo.remote(B, 0);
        for (operation, at) in [(Operation::Write(there), 0), (Operation::Read(there), half)] {
            duo.post(A, operation, at, half);
        }
        // Somewhere in the message.
        let events = rng.within(1..=300);
        for _ in 0..events {
            duo.world.step();
        }
        duo.cut(net, true);
        duo.settle();
        let statuses: Vec<_> = duo.completions(A).iter().map(|c| c.status).collect();
        assert_eq!(statuses, [WcStatus::Success; 2], "round {round}");
        assert_eq!(duo.ends[B].region.to_vec()[..half], bytes);
        assert_eq!(duo.ends[A].region.to_vec()[half..], bytes);
        if events < 100 {
            // Cut early enough that it was felt.
            assert_eq!((duo.mig(A), duo.mig(B)), (Migrated, Migrated), "round {round}");
        }
        if duo.mig(A) != Migrated {
            duo.modify(A, migrate());
            exchange(&mut duo);
        }
        duo.cut(net, false);
        // The old path is the alternate now: asking again is enough.
        let rearm = QpAttr { path_mig_state: Some(Rearm), ..QpAttr::to_state(QpState::Rts) };
        duo.modify(A, rearm);
        duo.modify(B, rearm);
        exchange(&mut duo);
        exchange(&mut duo);
        assert_eq!((duo.mig(A), duo.mig(B)), (Armed, Armed), "round {round}");
        for side in [A, B] {
            let qp = duo.ends[side].qp;
            assert_eq!(duo.events(side), [AsyncEvent::PathMigrated(qp)], "round {round}");
        }
    }
    assert_eq!(duo.count(A, "retry_exceeded_err"), 0);
}

/// Lossy links that reorder, paths that die and come back, programs that migrate on a whim: the data arrives whole.
#[test]
fn random_migrations_over_bad_links_lose_nothing() {
    for seed in 0..8 {
        let setup = Setup { retry: 7, timeout: 8, ipv6: seed % 2 == 1, ..Setup::default() };
        let mut duo = Duo::new(&setup);
        let mut rng = Rng::from_u64(seed);
        let (a, b) = (duo.ends[A].node, duo.ends[B].node);
        let jitter = Duration::from_micros(rng.within(0..=60));
        let links = ImpairModel { jitter, ..ImpairModel::lossy(0.03).with_delay(Duration::from_micros(20)) };
        duo.world.set_path(a, b, links);
        let (mut net, half) = (0, REGION / 2);
        for round in 0..12 {
            for side in [A, B] {
                if round == 0 {
                    duo.rearm(side);
                } else {
                    duo.modify(side, QpAttr { path_mig_state: Some(Rearm), ..QpAttr::to_state(QpState::Rts) });
                }
            }
            for _ in 0..100 {
                exchange(&mut duo);
                if (duo.mig(A), duo.mig(B)) == (Armed, Armed) {
                    break;
                }
            }
            assert_eq!((duo.mig(A), duo.mig(B)), (Armed, Armed), "seed {seed} round {round}");
            let mut bytes = vec![0; half];
            rng.fill(&mut bytes);
            duo.ends[A].region.write(0, &bytes).unwrap();
            let there = duo.remote(B, 0);
            duo.post(A, Operation::Write(there), 0, half);
            duo.post(A, Operation::Read(there), half, half);
            for _ in 0..rng.within(0..=400) {
                duo.world.step();
            }
            let mut asked = false;
            for side in [A, B] {
                // One of them, both at once, or neither: then it is the path that goes.
                if rng.chance(0.4) && duo.mig(side) == Armed {
                    duo.modify(side, migrate());
                    asked = true;
                }
            }
            if !asked {
                duo.cut(net, true);
            }
            duo.settle();
            let statuses: Vec<_> = duo.completions(A).iter().map(|c| c.status).collect();
            assert_eq!(statuses, [WcStatus::Success; 2], "seed {seed} round {round}");
            assert_eq!(duo.ends[B].region.to_vec()[..half], bytes);
            assert_eq!(duo.ends[A].region.to_vec()[half..], bytes);
            // What the transfer did not need to move is moved now.
            for side in [A, B] {
                if duo.mig(side) == Armed {
                    duo.modify(side, migrate());
                }
            }
            exchange(&mut duo);
            duo.cut(net, false);
            net = 1 - net;
            for side in [A, B] {
                let (there, qp) = (duo.ends[1 - side].ips[net], duo.ends[side].qp);
                assert_eq!((duo.mig(side), duo.peer_of(side)), (Migrated, there), "seed {seed} round {round}");
                assert_eq!(duo.events(side), [AsyncEvent::PathMigrated(qp)]);
            }
        }
    }
}

#[test]
fn retries_begin_again_on_the_new_path_and_end_there() {
    let mut duo = armed(&Setup { retry: 2, ..Setup::default() });
    let seen = record(&mut duo);
    duo.cut(0, true);
    duo.cut(1, true);
    let there = duo.remote(B, 0);
    duo.post(A, Operation::Write(there), 0, 8);
    let begin = duo.world.now();
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::RetryExceeded);
    assert_eq!(duo.state(A), QpState::Err);
    let nets: Vec<_> = seen.lock().unwrap().iter().map(|(_, net, _)| *net).collect();
    assert_eq!(nets, [0, 0, 0, 1, 1, 1], "the first and two retries, on each path");
    // Three timeouts of the primary path (2^8) and three of the alternate (2^9).
    let timeout = |code| AckTimeout::new(code).unwrap().duration().unwrap();
    assert_eq!(duo.world.now().saturating_since(begin), timeout(8) * 3 + timeout(9) * 3);
    assert_eq!(duo.count(A, "retry_exceeded_err"), 1);
}

#[test]
fn only_an_armed_qp_migrates_when_its_retries_run_out() {
    let mut duo = Duo::new(&Setup { retry: 1, ..Setup::default() });
    duo.rearm(A);
    duo.cut(0, true);
    let there = duo.remote(B, 0);
    duo.post(A, Operation::Write(there), 0, 8);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::RetryExceeded);
    assert_eq!(duo.events(A), []);
}

#[test]
fn asked_along_the_path_in_use_a_qp_refuses_and_tells_once() {
    let mut duo = armed(&Setup { retry: 1, ..Setup::default() });
    let asks = QpOptions { mig_req: Some(true), ..QpOptions::default() };
    let (node, qp) = (duo.ends[A].node, duo.ends[A].qp);
    duo.world.endpoint(node).set_qp_options(qp, asks).unwrap();
    let there = duo.remote(B, 0);
    duo.post(A, Operation::Write(there), 0, 8);
    duo.settle();
    let (node_b, qp_b) = (duo.ends[B].node, duo.ends[B].qp);
    assert_eq!(duo.world.endpoint(node_b).counters().dropped(DropReason::MigrationRefused), 2, "and one retry");
    // Then A, whose retries ran out, took its alternate path, which is B's too.
    let told = [AsyncEvent::PathMigrationFailed(qp_b), AsyncEvent::PathMigrated(qp_b)];
    assert_eq!(duo.events(B), told, "the refusal is told once");
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
    assert_eq!(duo.mig(B), Migrated);
}

#[test]
fn what_a_program_may_ask_for() {
    let mut duo = Duo::new(&Setup::default());
    let refused = |duo: &mut Duo, attr: QpAttr| {
        let (node, qp) = (duo.ends[A].node, duo.ends[A].qp);
        let wrong = VerbsError::Modify(ModifyError::OutOfRange { attr: Attr::PathMigState });
        assert_eq!(duo.world.endpoint(node).modify_qp(qp, attr), Err(wrong));
    };
    let ask = |state| QpAttr { path_mig_state: Some(state), ..QpAttr::to_state(QpState::Rts) };
    refused(&mut duo, ask(Rearm));
    refused(&mut duo, ask(Armed));
    duo.modify(A, ask(Migrated));
    assert_eq!(duo.events(A), [], "it was");
    duo.rearm(A);
    refused(&mut duo, ask(Armed));
    refused(&mut duo, ask(Migrated));
    duo.rearm(B);
    exchange(&mut duo);
    exchange(&mut duo);
    duo.modify(A, QpAttr::to_state(QpState::Sqd));
    let sqd = QpAttr { path_mig_state: Some(Migrated), ..QpAttr::to_state(QpState::Sqd) };
    refused(&mut duo, sqd);
    duo.modify(A, QpAttr::to_state(QpState::Rts));
    duo.modify(A, ask(Migrated));
    assert_eq!(duo.mig(A), Migrated);
    duo.modify(A, QpAttr::to_state(QpState::Reset));
    assert_eq!((duo.mig(A), duo.attr(A).alt_path), (Migrated, None));
}

/// The same addresses, another UDP source port: what ECMP makes another path of.
#[test]
fn an_alternate_path_may_differ_by_its_flow_label_alone() {
    let mut duo = Duo::new(&Setup { ipv6: true, ..Setup::default() });
    for side in [A, B] {
        let av = uroce::verbs::AddressVector { flow_label: 0x12345, ..duo.av(side, 0) };
        let alt = AltPath::new(av, AckTimeout::new(8).unwrap());
        duo.modify(side, Duo::rearm_attr(alt));
    }
    exchange(&mut duo);
    exchange(&mut duo);
    let ports = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&ports);
    duo.listen_to(move |passing, _| {
        log.lock().unwrap().push(passing.flow.src_port);
        None
    });
    exchange(&mut duo);
    let before = ports.lock().unwrap().drain(..).collect::<Vec<_>>();
    duo.modify(A, migrate());
    exchange(&mut duo);
    let after = ports.lock().unwrap().clone();
    assert_eq!((duo.mig(A), duo.mig(B)), (Migrated, Migrated));
    let wanted = uroce::wire::udp_source_port(0x12345, duo.ends[A].qpn, duo.ends[B].qpn);
    assert!(before.iter().all(|p| *p != wanted));
    assert!(after.iter().all(|p| *p == wanted), "{after:?}");
}

#[test]
fn a_stranger_with_the_bit_set_does_not_move_an_armed_qp() {
    let mut duo = armed(&Setup::default());
    let node = duo.ends[A].node;
    duo.world.keep_sent(node);
    exchange(&mut duo);
    let sent = duo.world.take_sent(node);
    let packet = uroce::wire::Packet::parse(&sent[0].bytes).unwrap();
    let asks = uroce::wire::Packet { mig_req: true, ..packet };
    let flow = uroce::wire::Flow { src: "192.0.2.7".parse().unwrap(), ..sent[0].flow };
    let ip = uroce::wire::IpFields { id: 0, flags_fragment: 0x4000 };
    let bytes = crate::duo::sealed(&asks, &flow, ip);
    let to = duo.ends[B].node;
    for _ in 0..1000 {
        duo.world.inject(to, flow, uroce::burst::RxIds::Known(ip), &bytes);
    }
    assert_eq!(duo.mig(B), Armed);
    assert_eq!(duo.world.endpoint(to).counters().dropped(DropReason::AddressMismatch), 1000);
    let qp = duo.ends[B].qp;
    assert_eq!(duo.events(B), [AsyncEvent::PathMigrationFailed(qp)], "a thousand packets, one event");
    exchange(&mut duo);
}

/// A packet of A's, with MigReq and what `change` does to it, between these addresses to B.
fn inject(duo: &mut Duo, src: &str, dst: std::net::IpAddr, change: impl FnOnce(&mut uroce::wire::Packet<'_>)) {
    let node = duo.ends[A].node;
    duo.world.keep_sent(node);
    exchange(duo);
    let sent = duo.world.take_sent(node);
    let mut packet = uroce::wire::Packet::parse(&sent[0].bytes).unwrap();
    packet.mig_req = true;
    change(&mut packet);
    let flow = uroce::wire::Flow { src: src.parse().unwrap(), dst, ..sent[0].flow };
    let ip = uroce::wire::IpFields { id: 0, flags_fragment: 0x4000 };
    let bytes = crate::duo::sealed(&packet, &flow, ip);
    duo.world.inject(duo.ends[B].node, flow, uroce::burst::RxIds::Known(ip), &bytes);
}

/// The sources that a lax check lets through are on no path: the path in use admits them just as the other does.
#[test]
fn a_lax_source_check_does_not_make_every_packet_one_of_the_alternate_path() {
    let subnet = SourceCheck::Subnet { ipv4: 8, ipv6: 64 };
    for source_check in [subnet, SourceCheck::Off] {
        for src in ["10.0.0.77", "10.0.0.1"] {
            let mut duo = Duo::new(&Setup::default());
            // B's two paths lead to two addresses of A's, from the same one of its own.
            for side in [A, B] {
                let mut av = duo.av(side, 0);
                if side == B {
                    av.dgid = Gid::from("10.0.0.9".parse::<std::net::IpAddr>().unwrap());
                }
                duo.modify(side, Duo::rearm_attr(AltPath::new(av, AckTimeout::new(8).unwrap())));
            }
            exchange(&mut duo);
            exchange(&mut duo);
            let (node, qp, to) = (duo.ends[B].node, duo.ends[B].qp, duo.ends[B].ips[0]);
            let lax = QpOptions { source_check, ..QpOptions::default() };
            duo.world.endpoint(node).set_qp_options(qp, lax).unwrap();
            assert_eq!(duo.mig(B), Armed);
            inject(&mut duo, src, to, |_| ());
            assert_eq!((duo.mig(B), duo.peer_of(B)), (Armed, duo.ends[A].ips[0]), "{source_check:?} {src}");
            inject(&mut duo, "10.0.0.9", to, |_| ());
            assert_eq!(duo.mig(B), Migrated, "the other path's own addresses");
        }
    }
}

#[test]
fn a_congestion_notification_moves_no_qp_and_needs_no_partition() {
    let pkeys = [vec![0xFFFF, 0x8007], vec![0xFFFF, 0x8007]];
    let mut duo = Duo::new(&Setup { pkeys, pkey_index: [1, 1], ..Setup::default() });
    for side in [A, B] {
        let alt = AltPath { pkey_index: 1, ..AltPath::new(duo.av(side, 1), AckTimeout::new(8).unwrap()) };
        duo.modify(side, Duo::rearm_attr(alt));
    }
    exchange(&mut duo);
    exchange(&mut duo);
    assert_eq!(duo.mig(B), Armed);
    let cnp = |packet: &mut uroce::wire::Packet<'_>| {
        packet.body = uroce::wire::Body::Cnp;
        packet.pkey = uroce::types::PKey::DEFAULT;
    };
    for net in [0, 1] {
        let (from, to) = (duo.ends[A].ips[net].to_string(), duo.ends[B].ips[net]);
        inject(&mut duo, &from, to, cnp);
    }
    assert_eq!((duo.mig(B), duo.events(B), duo.count(B, "rp_cnp_ignored")), (Armed, vec![], 2));
    let to = duo.ends[B].ips[0];
    inject(&mut duo, "192.0.2.7", to, cnp);
    assert_eq!((duo.count(B, "rp_cnp_ignored"), duo.count(B, "drop_address_mismatch")), (2, 1));
}
