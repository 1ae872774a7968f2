//! Whether a packet reaches its QP at all: number, class, state, partition, addresses (IBTA Vol 1 9.6.1 and annex
//! A17). What does not is dropped in silence, and no QP is the worse for it.

use std::net::IpAddr;

use uroce::counters::DropReason;
use uroce::verbs::{QpState, QpType};
use uroce_tests::pair::Side;

use super::shot::{RC_BEGINNINGS, RC_REQUESTS, RC_RESPONSES, Shot, UC, UD, name};
use super::{Case, Situation, Verdict, Waiting};

pub(super) fn cases() -> Vec<Case> {
    let mut all = qp_numbers();
    all.extend(classes());
    all.extend(states());
    all.extend(partitions());
    all.extend(addresses());
    all.extend(congestion());
    all
}

/// A number that no QP has: 0 (no SMI on RoCE), 1 without a GSI QP, the multicast number without a group, and each
/// single bit wrong.
fn qp_numbers() -> Vec<Case> {
    let unknown = Verdict::Drop(DropReason::UnknownQp);
    let mut all = Vec::new();
    for bit in 0..24 {
        let shot = Shot { qpn_xor: 1 << bit, ..Shot::new(0x0A) };
        all.push(Case::rc(format!("WRITE to a QPN with bit {bit} wrong"), Situation::Idle, shot, unknown));
    }
    for qpn in [0, 1, 0xFF_FFFF] {
        for opcode in [0x04, 0x0A, 0x0C, 0x14, 0x11, 0x24, 0x64, 0x81] {
            let shot = Shot { qpn: Some(qpn), ..Shot::new(opcode) };
            all.push(Case::rc(format!("{} to QPN {qpn:#x}", name(opcode)), Situation::Idle, shot, unknown));
        }
    }
    all
}

/// The opcode's class has to be that of the QP (9.6.1).
fn classes() -> Vec<Case> {
    let rc = || RC_REQUESTS.into_iter().chain(RC_RESPONSES);
    let wrong = Verdict::Drop(DropReason::WrongTransport);
    let mut all = Vec::new();
    for opcode in rc().chain(UD) {
        let shot = Shot::new(opcode);
        all.push(Case::of(QpType::Uc, format!("{} at a UC QP", name(opcode)), Situation::Idle, shot, wrong));
    }
    for opcode in rc().chain(UC) {
        let shot = Shot::new(opcode);
        all.push(Case::of(QpType::Ud, format!("{} at a UD QP", name(opcode)), Situation::Idle, shot, wrong));
    }
    for opcode in UC.into_iter().chain(UD) {
        let shot = Shot::new(opcode);
        all.push(Case::rc(format!("{} at an RC QP", name(opcode)), Situation::Idle, shot, wrong));
    }
    all
}

/// RESET and INIT take nothing, and ERR takes nothing more (10.3.1). A responder in RTR has sent no request, so nothing
/// answers it.
fn states() -> Vec<Case> {
    let mut all = Vec::new();
    for state in [QpState::Reset, QpState::Init, QpState::Err] {
        for opcode in RC_BEGINNINGS.into_iter().chain([0x11, 0x10, 0x81]) {
            let (text, situation) = (format!("{} in {state:?}", name(opcode)), Situation::InState(state));
            all.push(Case::rc(text, situation, Shot::new(opcode), Verdict::Drop(DropReason::QpState)));
        }
    }
    for opcode in RC_RESPONSES {
        let (text, situation) = (format!("{} in RTR", name(opcode)), Situation::InState(QpState::Rtr));
        all.push(Case::rc(text, situation, Shot::new(opcode), Verdict::Drop(DropReason::UnexpectedResponse)));
    }
    all
}

/// The low 15 bits must be equal and one side at least a full member, which we are (9.6.1, 10.9).
fn partitions() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x04, 0x0A, 0x0C, 0x13] {
        for pkey in [0x0000, 0x8000, 0x7FFE, 0xFFFE, 0x0001, 0x8001, 0x1234, 0xBFFF, 0x3FFF] {
            let shot = Shot { pkey, ..Shot::new(opcode) };
            let verdict = Verdict::Drop(DropReason::PKeyMismatch);
            all.push(Case::rc(format!("{} in partition {pkey:#06x}", name(opcode)), Situation::Idle, shot, verdict));
        }
    }
    for (opcode, answer) in [(0x04, 0x11), (0x0A, 0x11), (0x0C, 0x10), (0x13, 0x12)] {
        let shot = Shot { pkey: 0x7FFF, ..Shot::new(opcode) };
        let text = format!("{} from a limited member", name(opcode));
        all.push(Case::rc(text, Situation::Idle, shot, Verdict::Answer(answer, 0)));
    }
    for pkey in [0x0000, 0x8000, 0xFFFE] {
        let shot = Shot { pkey, ..Shot::new(0x11) };
        let verdict = Verdict::Drop(DropReason::PKeyMismatch);
        all.push(Case::response(format!("ACK in partition {pkey:#06x}"), Waiting::Write, shot, verdict));
    }
    all
}

/// Source and destination address are those of the connection (annex A17: the IP header stands for the GRH).
fn addresses() -> Vec<Case> {
    let ip = |s: &str| -> Option<IpAddr> { Some(s.parse().unwrap()) };
    let pairs = [
        ("a stranger", ip("10.0.0.3"), None),
        ("the far end of the subnet", ip("10.255.255.254"), None),
        ("loopback", ip("127.0.0.1"), None),
        ("nowhere", ip("0.0.0.0"), None),
        ("everywhere", ip("255.255.255.255"), None),
        ("ourselves", ip("10.0.0.2"), None),
        ("the peer, to another address", None, ip("10.0.0.9")),
        ("the peer, to all", None, ip("255.255.255.255")),
        ("us, to the peer", ip("10.0.0.2"), ip("10.0.0.1")),
        ("IPv6", ip("2001:db8::1"), ip("2001:db8::2")),
    ];
    let mut all = Vec::new();
    for (who, src, dst) in pairs {
        // Nobody sends from these, whatever QP it is for.
        let reason = match who {
            "nowhere" | "everywhere" => DropReason::SourceAddress,
            _ => DropReason::AddressMismatch,
        };
        for opcode in [0x04, 0x0A, 0x0C, 0x14, 0x07] {
            let shot = Shot { src, dst, ..Shot::new(opcode) };
            let verdict = Verdict::Drop(reason);
            all.push(Case::rc(format!("{} from {who}", name(opcode)), Situation::Idle, shot, verdict));
        }
        let shot = Shot { src, dst, syndrome: 0x62, ..Shot::new(0x11) };
        // For a packet to A, the roles of the two addresses change.
        if who != "ourselves" && who != "us, to the peer" {
            let verdict = Verdict::Drop(reason);
            all.push(Case::response(format!("fatal NAK from {who}"), Waiting::Write, shot, verdict));
        }
        let shot = Shot { src, dst, ..Shot::new(0x2A) };
        let verdict = Verdict::Drop(reason);
        all.push(Case::of(QpType::Uc, format!("UC WRITE from {who}"), Situation::Idle, shot, verdict));
    }
    all
}

/// Congestion notifications (annex A17): PSN, marks and reserved bytes mean nothing; it is never answered.
fn congestion() -> Vec<Case> {
    let ignored = Verdict::Silent;
    let cnp = Shot { ack: 0, marks: 0x40, flags: Some(0), ..Shot::new(0x81) };
    let mut all = Vec::new();
    let mut add = |text: &str, shot: Shot, verdict| {
        all.push(Case::rc(format!("CNP {text}"), Situation::Idle, shot, verdict));
        all.push(Case { to: Side::A, ..Case::response(format!("CNP {text}, to A"), Waiting::Write, shot, verdict) });
    };
    add("as it should be", cnp, ignored);
    add("without BECN", Shot { marks: 0, ..cnp }, ignored);
    add("with FECN", Shot { marks: 0xC0, ..cnp }, ignored);
    add("with SE and M", Shot { flags: Some(0xC0), ..cnp }, ignored);
    add("that asks for an ACK", Shot { ack: 0x80, ..cnp }, ignored);
    add("with a PSN ahead", Shot { psn: super::shot::Psn::Awaited(1000), ..cnp }, ignored);
    add("of another partition", Shot { pkey: 0x1234, ..cnp }, Verdict::Drop(DropReason::PKeyMismatch));
    add("to nobody", Shot { qpn: Some(3), ..cnp }, Verdict::Drop(DropReason::UnknownQp));
    add("of TVer 1", Shot { flags: Some(1), ..cnp }, Verdict::Drop(DropReason::Malformed));
    add("with 4 bytes more", Shot { payload: 4, ..cnp }, Verdict::Drop(DropReason::Malformed));
    add("without its reserve", Shot { total: Some(16), ..cnp }, Verdict::Drop(DropReason::Malformed));
    add("with 12 of 16 reserved", Shot { total: Some(28), ..cnp }, Verdict::Drop(DropReason::Malformed));
    for low in (0..32u8).filter(|low| *low != 1) {
        let opcode = 0x80 | low;
        let shot = Shot { opcode, total: Some(32), ..cnp };
        add(&format!("of opcode {opcode:#x}"), shot, Verdict::Drop(DropReason::Malformed));
    }
    all.push(Case::of(QpType::Uc, "CNP to a UC QP".into(), Situation::Idle, cnp, ignored));
    all
}
