//! Responses at an RC requester: to nothing, with reserved syndromes, of the wrong kind, length or place (IBTA Vol 1
//! 9.2, 9.7.5.1 and 9.7.6).

use uroce::counters::DropReason;
use uroce::verbs::WcStatus;
use uroce_tests::pair::Side;

use super::shot::{Psn, RC_RESPONSES, Shot, name};
use super::{Case, Situation, Verdict, Waiting};

pub(super) fn cases() -> Vec<Case> {
    let mut all = to_nothing();
    all.extend(outside_the_window());
    all.extend(reserved_syndromes());
    all.extend(credits());
    all.extend(naks());
    all.extend(wrong_kind());
    all.extend(read_lengths());
    all.extend(lost_answers());
    all
}

const GHOST: Verdict = Verdict::Drop(DropReason::GhostAck);

/// Nothing is outstanding: any response is a ghost (9.7.5.1: outside the window of unacknowledged PSNs it is dropped).
fn to_nothing() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in RC_RESPONSES {
        for psn in [-1000, -1, 0, 1, 1000, 0x7F_FFFF, -0x7F_FFFF] {
            let shot = Shot { psn: Psn::First(psn), ..Shot::new(opcode) };
            let text = format!("{} to nothing, PSN {psn:+}", name(opcode));
            all.push(Case { to: Side::A, ..Case::rc(text, Situation::Idle, shot, GHOST) });
        }
    }
    for syndrome in [0x20, 0x3F, 0x60, 0x61, 0x62, 0x63, 0x64, 0x40, 0xFF] {
        let shot = Shot { psn: Psn::First(0), syndrome, ..Shot::new(0x11) };
        let text = format!("syndrome {syndrome:#04x} to nothing");
        all.push(Case { to: Side::A, ..Case::rc(text, Situation::Idle, shot, GHOST) });
    }
    all
}

/// A WRITE of one packet is outstanding; the PSN names another, so even a fatal NAK or an RNR NAK means nothing.
fn outside_the_window() -> Vec<Case> {
    let mut all = Vec::new();
    for syndrome in [0x1F, 0x20, 0x2C, 0x60, 0x61, 0x62, 0x63, 0x64] {
        for psn in [-1, -2, -0x40_0000, 1, 2, 0x40_0000] {
            let shot = Shot { psn: Psn::First(psn), syndrome, ..Shot::new(0x11) };
            all.push(Case::response(format!("syndrome {syndrome:#04x} at PSN {psn:+}"), Waiting::Write, shot, GHOST));
        }
    }
    for opcode in [0x0D, 0x0E, 0x0F, 0x10, 0x12] {
        for psn in [-1, 3] {
            let shot = Shot { psn: Psn::First(psn), ..Shot::new(opcode) };
            all.push(Case::response(format!("{} at PSN {psn:+}", name(opcode)), Waiting::Read, shot, GHOST));
        }
    }
    all
}

/// Reserved syndromes and NAK codes (9.2), and the one that belongs to RD: dropped, and the WRITE goes on.
fn reserved_syndromes() -> Vec<Case> {
    let reserved = (0x40..=0x5F).chain(0x64..=0x7F).chain(0x80..=0xFF);
    let case = |syndrome: u8| {
        let shot = Shot { syndrome, ..Shot::new(0x11) };
        let verdict = Verdict::Drop(DropReason::UnexpectedResponse);
        Case::response(format!("reserved syndrome {syndrome:#04x}"), Waiting::Write, shot, verdict)
    };
    reserved.map(case).collect()
}

/// Every credit code of an ACK is legal (9.2).
fn credits() -> Vec<Case> {
    let case = |syndrome: u8| {
        let shot = Shot { syndrome, ..Shot::new(0x11) };
        Case::response(format!("ACK with credit code {syndrome}"), Waiting::Write, shot, Verdict::Completes)
    };
    (0..=31).map(case).collect()
}

/// NAKs that mean what they say (9.7.5.2): fatal ones end the QP with their own status, a sequence error is obeyed, and
/// an RNR NAK waits, whatever its timer code.
fn naks() -> Vec<Case> {
    let fatal =
        [(0x61, WcStatus::RemoteInvalidRequest), (0x62, WcStatus::RemoteAccess), (0x63, WcStatus::RemoteOperation)];
    let mut all = Vec::new();
    for waiting in [Waiting::Write, Waiting::Read, Waiting::Atomic] {
        for (syndrome, status) in fatal {
            let shot = Shot { syndrome, ..Shot::new(0x11) };
            all.push(Case::response(
                format!("NAK {syndrome:#x} to {waiting:?}"),
                waiting,
                shot,
                Verdict::Fails(status),
            ));
        }
        let again = match waiting {
            Waiting::Write => 0x0A,
            Waiting::Read => 0x0C,
            Waiting::Atomic | Waiting::ReadWrite => 0x14,
        };
        let shot = Shot { syndrome: 0x60, ..Shot::new(0x11) };
        all.push(Case::response(format!("NAK 0x60 to {waiting:?}"), waiting, shot, Verdict::Resends(again)));
    }
    for code in 0..32u8 {
        let shot = Shot { syndrome: 0x20 | code, ..Shot::new(0x11) };
        all.push(Case::response(format!("RNR NAK with timer code {code}"), Waiting::Write, shot, Verdict::Silent));
    }
    all
}

/// An answer of a kind that the request does not have is a bad response (9.7.6; WC 7). A plain ACK never answers a READ
/// or an atomic: inside their PSNs it says nothing.
fn wrong_kind() -> Vec<Case> {
    let bad = Verdict::Fails(WcStatus::BadResponse);
    let mut all = Vec::new();
    let mut add = |waiting, opcode, verdict| {
        let text = format!("{} to {waiting:?}", name(opcode));
        all.push(Case::response(text, waiting, Shot::new(opcode), verdict));
    };
    for opcode in [0x0D, 0x0E, 0x0F, 0x10, 0x12] {
        add(Waiting::Write, opcode, bad);
    }
    for opcode in [0x0D, 0x0E, 0x0F, 0x10] {
        add(Waiting::Atomic, opcode, bad);
    }
    add(Waiting::Read, 0x12, bad);
    for (waiting, psns) in [(Waiting::Read, 3), (Waiting::Atomic, 1)] {
        for psn in 0..psns {
            let shot = Shot { psn: Psn::First(psn), ..Shot::new(0x11) };
            let verdict = Verdict::Drop(DropReason::UnexpectedResponse);
            all.push(Case::response(format!("ACK inside {waiting:?}, PSN {psn:+}"), waiting, shot, verdict));
        }
    }
    all
}

/// A READ of 600 bytes at path MTU 256 is answered by 256, 256 and 88 (9.7.5.1, 9.7.6): anything else at its first PSN is
/// a bad response.
fn read_lengths() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x0D, 0x0E] {
        for payload in [0, 1, 4, 88, 252, 255, 257, 260, 512, 600, 4096] {
            let text = format!("{} of {payload} bytes", name(opcode));
            let verdict = Verdict::Fails(WcStatus::BadResponse);
            all.push(Case::response(text, Waiting::Read, Shot::payload(opcode, payload), verdict));
        }
    }
    for opcode in [0x0F, 0x10] {
        for payload in [0, 1, 88, 255, 256, 257, 600] {
            let text = format!("{} of {payload} bytes at the first PSN", name(opcode));
            let verdict = Verdict::Fails(WcStatus::BadResponse);
            all.push(Case::response(text, Waiting::Read, Shot::payload(opcode, payload), verdict));
        }
    }
    // Right in length, and in the form that other responders give a repeated answer: Middle for First.
    for opcode in [0x0D, 0x0E] {
        let text = format!("{} of 256 bytes", name(opcode));
        all.push(Case::response(text, Waiting::Read, Shot::payload(opcode, 256), Verdict::Silent));
    }
    all
}

/// Data, or an ACK, from beyond a READ whose answer is missing says that the answer was lost: the READ is sent again
/// (9.7.5.1, implied NAK).
fn lost_answers() -> Vec<Case> {
    let mut all = Vec::new();
    for (opcode, psn, payload) in [(0x0E, 1, 256), (0x0F, 2, 88), (0x0D, 1, 256), (0x10, 2, 88)] {
        let shot = Shot { psn: Psn::First(psn), ..Shot::payload(opcode, payload) };
        let text = format!("{} at PSN {psn:+} before the first", name(opcode));
        all.push(Case::response(text, Waiting::Read, shot, Verdict::Resends(0x0C)));
    }
    for syndrome in [0x1F, 0x60, 0x2C, 0x61, 0x62, 0x63] {
        let shot = Shot { psn: Psn::First(1), syndrome, ..Shot::new(0x11) };
        let text = format!("syndrome {syndrome:#04x} to the WRITE behind a READ");
        all.push(Case::response(text, Waiting::ReadWrite, shot, Verdict::Resends(0x0C)));
    }
    all
}
