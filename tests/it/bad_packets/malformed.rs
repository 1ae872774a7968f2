//! What no state is needed to refuse: lengths, pad, version, opcode, ICRC; and what must be ignored.

use uroce::counters::DropReason;

use super::shot::{self, Shot, header_len, name};
use super::{Case, Situation, Verdict};

const MTU: usize = 256;

pub(super) fn cases() -> Vec<Case> {
    let mut all = grid();
    all.extend(pads());
    all.extend(versions());
    all.extend(ignored_bits());
    all.extend(wrong_icrc());
    all.extend(no_payload_allowed());
    all
}

fn served(opcode: u8) -> bool {
    shot::RC_REQUESTS.contains(&opcode)
        || shot::RC_RESPONSES.contains(&opcode)
        || shot::UC.contains(&opcode)
        || shot::UD.contains(&opcode)
        || opcode == 0x81
}

/// Opcodes that the table of IBTA Vol 1 9.2 and its annexes name and this endpoint does not serve: RD, XRC.
fn refused(opcode: u8) -> bool {
    matches!(opcode, 0x40..=0x55 | 0xA0..=0xB4 | 0xB6 | 0xB7 | 0xBC | 0xBD)
}

/// All 256 opcodes in each class of length, at an idle RC responder (IBTA Vol 1 9.2, 9.6.1, 9.7.4.1).
fn grid() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in 0..=255u8 {
        let headers = header_len(opcode);
        let cut = |class: &str, total: usize| {
            let shot = Shot { total: Some(total), payload: 0, ..Shot::new(opcode) };
            (format!("{class}, {total} bytes"), shot)
        };
        let with = |class: &str, payload: usize| (class.to_owned(), Shot::payload(opcode, payload));
        let classes = [
            cut("nothing", 0),
            cut("shorter than a BTH", 11),
            cut("BTH without ICRC", 12),
            cut("part of an ICRC", 15),
            cut("headers or ICRC cut", headers + 3),
            with("headers exactly", 0),
            with("one byte", 1),
            with("path MTU", MTU),
            with("path MTU and 4", MTU + 4),
            cut("128 in all", 128),
        ];
        for (class, mut shot) in classes {
            if class.starts_with("128") {
                shot.payload = 128 - headers - 4;
                shot.total = None;
            }
            let verdict = grid_verdict(opcode, &shot);
            all.push(Case::rc(format!("{}: {class}", name(opcode)), Situation::Idle, shot, verdict));
        }
    }
    all
}

fn grid_verdict(opcode: u8, shot: &Shot) -> Verdict {
    let malformed = Verdict::Drop(DropReason::Malformed);
    // Without a whole BTH there is no opcode to speak of.
    if shot.total.is_some_and(|len| len < 12) {
        return malformed;
    }
    if refused(opcode) {
        return Verdict::Drop(DropReason::Unsupported);
    }
    // An opcode that means nothing, or an end before the ICRC.
    if !served(opcode) || shot.total.is_some() {
        return malformed;
    }
    // These have no payload at all.
    if matches!(opcode, 0x0C | 0x11..=0x14 | 0x1C | 0x81) && shot.payload > 0 {
        return malformed;
    }
    match opcode {
        0x81 => Verdict::Silent,
        // The opcode's class is not that of the QP: dropped (9.6.1).
        0x20.. => Verdict::Drop(DropReason::WrongTransport),
        0x0D..=0x12 => Verdict::Drop(DropReason::GhostAck),
        0x0C => Verdict::Answer(0x10, 0),
        0x13 | 0x14 => Verdict::Answer(0x12, 0),
        // READ data of no length says that it is done; ATOMIC WRITE is of 8 bytes (annex A19).
        0x1C => Verdict::Answer(0x10, 0),
        0x1D if shot.payload == 8 => Verdict::Answer(0x10, 0),
        0x1D => Verdict::INVALID,
        // Middle and Last begin nothing (9.7.4.1).
        0x01..=0x03 | 0x07..=0x09 | 0x16 => Verdict::INVALID,
        // First is exactly the path MTU, Only at most (9.7.4.1).
        0x00 | 0x06 if shot.payload != MTU => Verdict::INVALID,
        _ if shot.payload > MTU => Verdict::INVALID,
        // The key that a SEND with invalidate names can be invalidated.
        _ => Verdict::Answer(0x11, 0),
    }
}

/// PadCnt 1 to 3 with nothing to pad, and packets that end off the boundary (9.2: payload and pad fill words).
fn pads() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in (0..=255u8).filter(|o| served(*o)) {
        for pad in 1..=3u8 {
            let flags = Some(0x40 | pad << 4);
            let shot = Shot { flags, ..Shot::payload(opcode, 0) };
            let verdict = Verdict::Drop(DropReason::Malformed);
            all.push(Case::rc(format!("{}: pad {pad} of nothing", name(opcode)), Situation::Idle, shot, verdict));
        }
    }
    for opcode in [0x04, 0x05, 0x0A, 0x0B] {
        for short in 1..=3usize {
            let headers = header_len(opcode);
            let shot = Shot { total: Some(headers + 8 - short), flags: Some(0x40), ..Shot::payload(opcode, 4) };
            let verdict = Verdict::Drop(DropReason::Malformed);
            let text = format!("{}: {short} bytes short of a word", name(opcode));
            all.push(Case::rc(text, Situation::Idle, shot, verdict));
        }
    }
    all
}

/// TVer other than 0 is dropped (9.6.1).
fn versions() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x04, 0x0A, 0x0C, 0x11, 0x24, 0x64, 0x81] {
        for version in 1..=15u8 {
            let shot = Shot { flags: Some(0x40 | version), ..Shot::payload(opcode, shot::natural_payload(opcode)) };
            let verdict = Verdict::Drop(DropReason::Malformed);
            all.push(Case::rc(format!("{}: TVer {version}", name(opcode)), Situation::Idle, shot, verdict));
        }
    }
    all
}

/// Reserved bits and congestion marks are ignored on receive (9.2), M and SE are no business of the
/// transport, and the pad's content is nobody's.
fn ignored_bits() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x04, 0x0A] {
        let answer = Verdict::Answer(0x11, 0);
        let mut add = |text: String, shot| {
            all.push(Case::rc(format!("{}: {text}", name(opcode)), Situation::Idle, shot, answer));
        };
        for bit in 0..8 {
            add(format!("bit {bit} of byte 4"), Shot { marks: 1 << bit, ..Shot::new(opcode) });
        }
        for bit in 0..7 {
            add(format!("bit {bit} of byte 8"), Shot { ack: 0x80 | 1 << bit, ..Shot::new(opcode) });
        }
        add("all reserved bits".into(), Shot { marks: 0xFF, ack: 0xFF, ..Shot::new(opcode) });
        add("M 0".into(), Shot { flags: Some(0), ..Shot::new(opcode) });
        add("SE 1".into(), Shot { flags: Some(0xC0), ..Shot::new(opcode) });
    }
    all
}

/// A wrong ICRC is the end of any packet, whatever it says (9.6.1, annex A17); BTH byte 4 is not covered.
fn wrong_icrc() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in (0..=255u8).filter(|o| served(*o)) {
        for (at, mask, where_) in [(-1, 0x01, "last byte"), (-4, 0x80, "first byte"), (9, 0x01, "of a flipped PSN")] {
            let shot = Shot { flip: Some((at, mask)), ..Shot::new(opcode) };
            let verdict = Verdict::Drop(DropReason::IcrcError);
            all.push(Case::rc(format!("{}: ICRC {where_}", name(opcode)), Situation::Idle, shot, verdict));
        }
    }
    for (at, what) in [(2, "P_Key"), (7, "QPN"), (8, "reserved byte 8"), (12, "VA"), (23, "rkey"), (28, "payload")] {
        let shot = Shot { flip: Some((at, 0x04)), ..Shot::new(0x0A) };
        let verdict = Verdict::Drop(DropReason::IcrcError);
        all.push(Case::rc(format!("{}: a bit of {what} flipped", name(0x0A)), Situation::Idle, shot, verdict));
    }
    for bit in 0..8 {
        let shot = Shot { flip: Some((4, 1 << bit)), ..Shot::new(0x0A) };
        let text = format!("{}: bit {bit} of byte 4 flipped on the way", name(0x0A));
        all.push(Case::rc(text, Situation::Idle, shot, Verdict::Answer(0x11, 0)));
    }
    all
}

/// READ requests, atomics, ACKs and CNPs have no payload (9.2).
fn no_payload_allowed() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x0C, 0x11, 0x12, 0x13, 0x14, 0x1C, 0x81] {
        for payload in [2, 3, 4, 8, 64] {
            let shot = Shot::payload(opcode, payload);
            let verdict = Verdict::Drop(DropReason::Malformed);
            let text = format!("{}: {payload} bytes of payload", name(opcode));
            all.push(Case::rc(text, Situation::Idle, shot, verdict));
        }
    }
    all
}
