//! Captures of rxe replayed against our state machines.
//!
//! For each capture and each of its two nodes, an endpoint takes the node's place: it has the node's QPNs, PSNs, keys
//! and addresses, posts what the node's program posted, and is handed what the other node sent, packet by packet at the
//! captured times. Every packet that it sends is compared with the one that rxe sent there; what may differ is listed in
//! [`rules::Rule`], and how often it does is asserted. Then completions, data and memory are compared with what the
//! capture shows.

mod capture;
mod memory;
mod player;
mod rules;
mod script;

use uroce::types::{PathMtu, Qpn};
use uroce::verbs::{Operation, QpType, WcData, WcOpcode, WcStatus, WorkCompletion};
use uroce::wire::{Body, Packet, ResponseOp};

use capture::{Capture, Node};
use player::{Player, Sent};
use rules::{Rule, Tally};
use script::Posted;

/// Bytes of the IP header area before a received datagram.
const GRH: usize = 40;

/// How a capture is replayed.
#[derive(Clone, Copy, Default)]
struct Case {
    /// Packets were lost or reordered between the nodes.
    lossy: bool,
    /// What the receives of the server hold, where that matters.
    receive_len: Option<u32>,
}

/// Replays `name` in both roles and returns what was compared.
#[allow(clippy::print_stdout)] // What was compared, for whoever runs it with --nocapture.
fn replay(name: &str, case: Case) -> Tally {
    let capture = Capture::load(name);
    let mut total = Tally::default();
    for node in Node::BOTH {
        let mut player = Player::new(&capture, node, case.receive_len);
        player.run();
        let tally = compare(&capture, &player, case);
        let what = format!("{name} as {node:?}");
        check_completions(&mut player, &what);
        player.memory.check(&what);
        println!(
            "{what}: {} requests, {} answers, {} bytes written by the peer, {:?}",
            tally.requests,
            tally.responses,
            player.memory.written_by_peer(),
            tally.rules
        );
        total.requests += tally.requests;
        total.responses += tally.responses;
        for (rule, times) in tally.rules {
            total.used(rule, times);
        }
    }
    let data = capture.seen.len();
    assert_eq!(total.requests + total.responses, data, "{name}: every packet of the capture was compared");
    total
}

/// All packets of the player against those of the node in whose place it is.
fn compare(capture: &Capture, player: &Player<'_>, case: Case) -> Tally {
    let mut tally = Tally::default();
    let mut compared = 0;
    for role in &player.roles {
        let peer = role.link.end(player.node.other()).qpn;
        let to_peer = |s: &&Sent| Some(s.packet().dest_qp) == peer || role.link.qp_type == QpType::Ud;
        let sent: Vec<&Sent> = player.sent.iter().filter(to_peer).collect();
        let captured: Vec<_> = capture.sent_by(&role.link, player.node).collect();
        check_flows(capture, player.node, &sent, captured.first().map(|(at, _)| *at), &mut tally);
        let ours: Vec<Packet<'_>> = sent.iter().map(|s| s.packet()).collect();
        let theirs: Vec<Packet<'_>> = captured.into_iter().map(|(_, p)| p).collect();
        compared += ours.len();
        let result = compare_link(&ours, &theirs, role.link.mtu, case, &mut tally);
        if let Err(difference) = result {
            panic!("{} as {:?}: {difference}", capture.fixture.name, player.node);
        }
    }
    assert_eq!(compared, player.sent.len(), "every packet of ours was compared");
    tally
}

fn compare_link(
    ours: &[Packet<'_>],
    theirs: &[Packet<'_>],
    mtu: PathMtu,
    case: Case,
    tally: &mut Tally,
) -> Result<(), String> {
    let is_answer = |p: &&Packet<'_>| matches!(p.body, Body::Response(_));
    let (our_answers, our_requests): (Vec<Packet<'_>>, Vec<Packet<'_>>) = ours.iter().partition(is_answer);
    let (answers, requests): (Vec<Packet<'_>>, Vec<Packet<'_>>) = theirs.iter().partition(is_answer);
    tally.used(Rule::Migrated, ours.iter().filter(|p| p.mig_req).count());
    if ours.iter().any(|p| !p.mig_req) || theirs.iter().any(|p| p.mig_req) {
        return Err("M bit: ours is 1, theirs 0".to_owned());
    }
    rules::responses(&our_answers, &answers, tally)?;
    if case.lossy {
        rules::requests_after_loss(&our_requests, &requests, mtu, tally)
    } else {
        rules::requests(&our_requests, &requests, tally)
    }
}

/// Addresses, UDP source port and marks of all packets of a link.
fn check_flows(capture: &Capture, node: Node, sent: &[&Sent], first: Option<usize>, tally: &mut Tally) {
    let Some(first) = first else { return };
    let captured = capture.seen[first].flow;
    for s in sent {
        // The VLAN is the device's, and there is none here.
        let ours = uroce::wire::Flow { flow_label: captured.flow_label, vlan: captured.vlan, ..s.flow };
        assert_eq!(ours, captured, "{} as {node:?}", capture.fixture.name);
        tally.used(Rule::FlowLabel, usize::from(s.flow.flow_label != captured.flow_label));
    }
}

fn check_completions(player: &mut Player<'_>, what: &str) {
    let all = player.completions();
    let mut received = vec![Vec::new(); player.roles.len()];
    let mut sent = vec![Vec::new(); player.roles.len()];
    for wc in all {
        let of = if player::is_receive(&wc) { &mut received } else { &mut sent };
        of[player.role_of(&wc)].push(wc);
    }
    for (role, (sent, received)) in sent.iter().zip(&received).enumerate() {
        check_sends(player, role, sent, what);
        check_receives(player, role, received, what);
    }
}

/// Each work request completed once, in order, with the fate that the capture shows, and brought the data back.
fn check_sends(player: &Player<'_>, role: usize, sent: &[WorkCompletion], what: &str) {
    let ours = &player.roles[role].ours;
    let found: Vec<_> = sent.iter().map(|wc| (player::index(wc), wc.status)).collect();
    let expected: Vec<_> = ours.iter().enumerate().map(|(i, one)| (i, one.status)).collect();
    assert_eq!(found, expected, "{what}: completions of sends");
    for (index, one) in ours.iter().enumerate().filter(|(_, one)| one.status == WcStatus::Success) {
        assert_eq!(player.answer(role, index, one.answer.len()), one.answer, "{what}: what {:?} got", one.operation);
        assert_eq!(one.answer.len(), one.wanted as usize, "{what}: the capture holds the answer");
    }
}

/// Each message that came took one receive, in order, with its bytes, immediate and key.
fn check_receives(player: &Player<'_>, role: usize, received: &[WorkCompletion], what: &str) {
    let link = &player.roles[role].link;
    let came: Vec<&Posted> = player.roles[role].theirs.iter().filter(|p| p.takes_receive()).collect();
    let mut completions = received.iter().filter(|wc| wc.status != WcStatus::WorkRequestFlushed);
    for one in came {
        let status = match one.status {
            WcStatus::Success => WcStatus::Success,
            // The receive that was too short has a status of its own; one that was never posted has none.
            WcStatus::RemoteOperation => WcStatus::LocalLength,
            _ => continue,
        };
        let wc = completions.next().unwrap_or_else(|| panic!("{what}: no completion for {one:?}"));
        assert_eq!(wc.status, status, "{what}: {one:?}");
        if status != WcStatus::Success {
            continue;
        }
        let (opcode, data) = match one.operation {
            Operation::SendImm(imm) => (WcOpcode::Recv, WcData::Imm(imm)),
            Operation::SendInvalidate(rkey) => (WcOpcode::Recv, WcData::Invalidated(rkey)),
            Operation::WriteImm(_, imm) => (WcOpcode::RecvRdmaWithImm, WcData::Imm(imm)),
            _ => (WcOpcode::Recv, WcData::None),
        };
        assert_eq!((wc.opcode, wc.data), (opcode, data), "{what}: {one:?}");
        if opcode == WcOpcode::RecvRdmaWithImm {
            assert_eq!(wc.byte_len as usize, one.payload.len(), "{what}");
        } else if link.qp_type == QpType::Ud {
            check_datagram(player, role, wc, one, what);
        } else {
            assert_eq!(player.receive(wc), one.payload, "{what}: the bytes of {:?}", one.operation);
        }
    }
    assert_eq!(completions.next(), None, "{what}: a receive that no message took");
}

/// The sender's IP header stands before a datagram, and its QPN in the completion.
fn check_datagram(player: &Player<'_>, role: usize, wc: &WorkCompletion, one: &Posted, what: &str) {
    let bytes = player.receive(wc);
    let (grh, payload) = bytes.split_at(GRH);
    assert_eq!(payload, one.payload, "{what}");
    let peer = player.node.other();
    assert_eq!(Some(wc.src_qp), player.roles[role].link.end(peer).qpn, "{what}");
    let source = match player.capture.addresses[peer as usize] {
        std::net::IpAddr::V4(ip) => (ip.octets().to_vec(), &grh[32..36]),
        std::net::IpAddr::V6(ip) => (ip.octets().to_vec(), &grh[8..24]),
    };
    assert_eq!(source.0, source.1, "{what}: the source address before the payload");
}

/// Replays captures in which nothing was lost: the M bit is the only difference.
fn same(names: &[&str]) {
    for name in names {
        assert_eq!(differences(&replay(name, Case::default())), [], "{name}");
    }
}

/// What was needed besides the M bit, which differs in every packet.
fn differences(tally: &Tally) -> Vec<(Rule, usize)> {
    tally.rules.iter().map(|(rule, times)| (*rule, *times)).filter(|(rule, _)| *rule != Rule::Migrated).collect()
}

/// Packets that the receiving node's firewall dropped.
fn lost(name: &str) -> usize {
    Capture::load(name).seen.iter().filter(|s| s.lost).count()
}

const RDMA_CM: [&str; 7] = ["rping_v4", "rping_big", "ucmatose", "rdma_client", "rstream", "vlan", "cm_mra"];
const RDMA_CM_V6: [&str; 3] = ["rping_v6_ula", "rping_v6_ll", "rlab_basic_cm6"];
const RLAB: [&str; 6] =
    ["rlab_basic_cm", "loss_cm_rep", "rlab_psnwrap_1024", "rlab_mtu256", "rlab_mtu4096_v6", "rlab_mw_inv"];
const REFUSED: [&str; 5] =
    ["nak_badrkey_write", "nak_badrkey_read", "nak_badrkey_atomic", "nak_write_oob", "atomic_write"];
const TOO_LONG: &str = "nak_send_toolong";
const NOT_READY: [&str; 2] = ["rnr_then_ok", "rnr_exhausted"];
const PINGPONG: [&str; 7] = [
    "rc_pingpong_mtu256",
    "rc_pingpong_mtu1024",
    "rc_pingpong_mtu4096",
    "rc_pingpong_v6ll",
    "rc_pingpong_v6ula",
    "uc_pingpong",
    "srq_pingpong",
];
const DATAGRAM: [&str; 5] = ["ud_pingpong", "ud_pingpong_v6", "udaddy", "ib_send_bw_ud", "mckey_mcast"];
const PERFTEST: [&str; 11] = [
    "ib_write_bw_1024",
    "ib_write_bw_4096",
    "ib_read_bw",
    "ib_send_bw",
    "ib_send_bw_uc",
    "ib_send_bw_cm",
    "ib_write_bw_cm",
    "ib_write_lat",
    "ib_send_lat",
    "ib_atomic_fadd",
    "ib_atomic_cas",
];
/// Recovered by timeouts alone, so that nothing is left to choice.
const LOST_ANSWERS: [&str; 2] = ["loss_ack", "loss_atomic_ack"];
const LOST_READ_DATA: &str = "loss_read_resp";
/// Recovered by NAKs.
const LOST_REQUESTS: [&str; 2] = ["loss_data", "netem_dup_reorder"];

#[test]
fn programs_that_connect_by_rdma_cm() {
    same(&RDMA_CM);
}

#[test]
fn connections_over_ipv6() {
    for name in RDMA_CM_V6 {
        let tally = replay(name, Case::default());
        // One in every packet: rdma_cm chose a flow label for the path.
        let packets = tally.requests + tally.responses;
        assert_eq!(differences(&tally), [(Rule::FlowLabel, packets)], "{name}");
    }
}

#[test]
fn every_operation_at_every_mtu_and_across_the_psn_wrap() {
    same(&RLAB);
}

#[test]
fn bad_keys_and_bounds_are_refused_alike() {
    same(&REFUSED);
}

#[test]
fn a_send_that_is_too_long_is_refused_with_another_code() {
    // The server of this capture receives into 16 bytes.
    let tally = replay(TOO_LONG, Case { receive_len: Some(16), ..Case::default() });
    assert_eq!(differences(&tally), [(Rule::TooLong, 1)]);
}

#[test]
fn a_receiver_that_is_not_ready() {
    same(&NOT_READY);
}

#[test]
fn pingpongs_over_rc_uc_and_an_srq() {
    same(&PINGPONG);
}

#[test]
fn datagrams_and_multicast() {
    same(&DATAGRAM);
}

#[test]
fn perftest() {
    same(&PERFTEST);
}

#[test]
fn lost_acks_and_lost_atomic_answers() {
    same(&LOST_ANSWERS);
    assert_eq!(LOST_ANSWERS.map(lost), [13, 2]);
}

#[test]
fn lost_read_data() {
    let tally = replay(LOST_READ_DATA, Case { lossy: true, ..Case::default() });
    // 72 packets of READ Response Middle, every sixth of them lost.
    assert_eq!(lost(LOST_READ_DATA), 12);
    let used = |rule| tally.rules.get(&rule).copied().unwrap_or(0);
    // The capture holds six READs for the rest.
    assert_eq!(used(Rule::ReadBegins), 6);
    assert_recovery(&tally, LOST_READ_DATA);
    assert_eq!(differences(&tally).len(), 2);
}

#[test]
fn lost_and_reordered_requests() {
    for name in LOST_REQUESTS {
        let tally = replay(name, Case { lossy: true, ..Case::default() });
        assert_recovery(&tally, name);
        // The answers do not differ: neither their number nor their PSNs, MSNs and syndromes.
        assert_eq!(differences(&tally).len(), 1, "{name}");
    }
    // Every ninth of 561 packets, and none by a firewall.
    assert_eq!(LOST_REQUESTS.map(lost), [62, 0]);
}

/// A requester that goes back differently must not go back much more: a quarter more packets than rxe sent, or less.
fn assert_recovery(tally: &Tally, name: &str) {
    let used = tally.rules.get(&Rule::Recovery).copied().unwrap_or(0);
    assert!(used > 0 && used <= tally.requests / 4, "{name}: {used} repeats more or less than rxe made");
}

/// Every capture that holds more than MADs is replayed.
#[test]
fn no_capture_is_left_out() {
    let lists: [&[&str]; 12] = [
        &RDMA_CM,
        &RDMA_CM_V6,
        &RLAB,
        &REFUSED,
        &[TOO_LONG],
        &NOT_READY,
        &PINGPONG,
        &DATAGRAM,
        &PERFTEST,
        &LOST_ANSWERS,
        &[LOST_READ_DATA],
        &LOST_REQUESTS,
    ];
    let mut replayed: Vec<&str> = lists.concat();
    let with_data = uroce_fixtures::all().iter().filter(|f| f.opcode_counts.keys().any(|k| !k.starts_with("CM_")));
    let mut captured: Vec<&str> = with_data.map(|f| f.name.as_str()).collect();
    replayed.sort_unstable();
    captured.sort_unstable();
    assert_eq!(replayed, captured);
}

/// The comparison sees a difference in any field, a packet too many and one too few.
#[test]
fn a_difference_that_no_rule_names_fails() {
    let capture = Capture::load("rlab_basic_cm");
    let link = &capture.links[0];
    let captured: Vec<Packet<'_>> = capture.sent_by(link, Node::Server).map(|(_, p)| p).collect();
    let ours: Vec<Packet<'_>> = captured.iter().map(|p| Packet { mig_req: true, ..*p }).collect();
    let verdict = |changed: &[Packet<'_>]| {
        compare_link(changed, &captured, link.mtu, Case::default(), &mut Tally::default()).and(compare_link(
            changed,
            &captured,
            link.mtu,
            Case { lossy: true, ..Case::default() },
            &mut Tally::default(),
        ))
    };
    assert_eq!(verdict(&ours), Ok(()));
    for at in 0..ours.len() {
        let mut fewer = ours.clone();
        fewer.remove(at);
        assert!(verdict(&fewer).is_err(), "packet {at} missing");
        for change in CHANGES {
            let mut changed = ours.clone();
            change(&mut changed[at]);
            assert!(verdict(&changed).is_err(), "packet {at} changed to {:?}", changed[at]);
        }
    }
}

/// One field each.
const CHANGES: [fn(&mut Packet<'_>); 6] = [
    |p| p.psn = p.psn.next(),
    |p| p.ack_req = !p.ack_req,
    |p| p.solicited = !p.solicited,
    |p| p.mig_req = false,
    |p| p.dest_qp = Qpn::GSI,
    |p| match &mut p.body {
        Body::Response(r) => {
            if let ResponseOp::Acknowledge(aeth)
            | ResponseOp::ReadFirst(aeth)
            | ResponseOp::AtomicAcknowledge(aeth, _) = &mut r.op
            {
                aeth.msn = aeth.msn.next();
            } else {
                r.op = ResponseOp::ReadMiddle;
                r.payload = b"other";
            }
        }
        Body::Request(r) => r.payload = b"other",
        Body::Datagram(_) | Body::Cnp => {}
    },
];
