//! Requests at an RC responder: PSN, sequence, length, receive WQE (IBTA Vol 1 9.7.1 to 9.7.5).

use uroce::counters::DropReason;
use uroce::verbs::WcStatus;

use super::shot::{Key, Psn, RC_REQUESTS, Shot, name};
use super::{Case, Situation, Verdict};

pub(super) fn cases() -> Vec<Case> {
    let mut all = ahead();
    all.extend(inside_a_message());
    all.extend(duplicates());
    all.extend(repeated_reads());
    all.extend(repeated_atomics());
    all.extend(repeated_flushes());
    all.extend(sequence());
    all.extend(send_lengths());
    all.extend(write_lengths());
    all.extend(receives());
    all
}

/// A gap draws one NAK with the expected PSN (9.7.3, 9.7.5.2); until that packet comes, silence. The PSN is looked
/// at before anything else of the request, so even what else is wrong with it does not matter.
fn ahead() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in RC_REQUESTS {
        for by in [1, 2, 128, 0x7F_FFFF] {
            let shot = Shot { psn: Psn::Awaited(by), ..Shot::new(opcode) };
            let text = format!("{} ahead by {by}", name(opcode));
            all.push(Case::rc(text, Situation::Idle, shot, Verdict::SequenceNak));
        }
        let shot = Shot { psn: Psn::Awaited(1), key: Key::Raw(0), ..Shot::new(opcode) };
        let text = format!("{} ahead with no key", name(opcode));
        all.push(Case::rc(text, Situation::Idle, shot, Verdict::SequenceNak));
        for (text, rnr) in [("a NAK", false), ("an RNR NAK", true)] {
            let shot = Shot { psn: Psn::Awaited(2), ..Shot::new(opcode) };
            let verdict = Verdict::Drop(DropReason::AheadOfSequence);
            all.push(Case::rc(format!("{} behind {text}", name(opcode)), Situation::NakOut(rnr), shot, verdict));
        }
    }
    all
}

/// A SEND or WRITE packet that was executed is acknowledged again with the PSN of the last executed one, and not
/// executed (9.7.5.1); where none was executed there is nothing to acknowledge.
fn duplicates() -> Vec<Case> {
    let mut all = Vec::new();
    let data = RC_REQUESTS.into_iter().filter(|o| !matches!(o, 0x0C | 0x13 | 0x14 | 0x1C | 0x1D));
    for opcode in data {
        for back in [1, 2, 1000, 0x7F_FFFF] {
            let shot = Shot { psn: Psn::Awaited(-back), ..Shot::new(opcode) };
            let text = format!("{} {back} behind a WRITE", name(opcode));
            all.push(Case::rc(text, Situation::After(0x0A), shot, Verdict::Answer(0x11, back - 1)));
        }
        // After a WRITE (100) and a READ (101): the ACK names the WRITE, never the READ.
        let shot = Shot { psn: Psn::First(0), ..Shot::new(opcode) };
        let text = format!("{} again after a READ", name(opcode));
        all.push(Case::rc(text, Situation::After(0x0C), shot, Verdict::Answer(0x11, 0)));
        let shot = Shot { psn: Psn::Awaited(-1), ..Shot::new(opcode) };
        let verdict = Verdict::Drop(DropReason::ForgottenDuplicate);
        all.push(Case::rc(format!("{} before the first", name(opcode)), Situation::Idle, shot, verdict));
        // Nothing else of a repeat is looked at: not its key, not its length.
        let shot = Shot { psn: Psn::Awaited(-1), key: Key::Raw(0), length: Some(77), ..Shot::new(opcode) };
        let text = format!("{} again with no key", name(opcode));
        all.push(Case::rc(text, Situation::After(0x0A), shot, Verdict::Answer(0x11, 0)));
    }
    all
}

/// Neither a gap nor a repeat tears the message in progress: it goes on where it was (9.7.3, 9.7.5.1).
fn inside_a_message() -> Vec<Case> {
    let mut all = Vec::new();
    for (text, situation) in [("SEND", Situation::InSend), ("WRITE", Situation::InWrite(512, false))] {
        for opcode in RC_REQUESTS {
            let shot = Shot { psn: Psn::Awaited(1), ..Shot::new(opcode) };
            let name = name(opcode);
            all.push(Case::rc(format!("{name} ahead inside a {text}"), situation, shot, Verdict::SequenceNak));
            let shot = Shot { psn: Psn::Awaited(-1), ..shot };
            let verdict = match opcode {
                0x0C | 0x13 | 0x14 | 0x1D => Verdict::Drop(DropReason::ForgottenDuplicate),
                0x1C => Verdict::Answer(0x10, 0),
                _ => Verdict::Answer(0x11, 0),
            };
            all.push(Case::rc(format!("{name} repeated inside a {text}"), situation, shot, verdict));
        }
    }
    all
}

/// A repeated READ is executed again when it asks for a part, to the end, of one that is remembered (9.7.5.1): PSN,
/// key, address and length must fit; all else is dropped. The READ is of 600 bytes at PSNs +1 to +3 behind a WRITE.
fn repeated_reads() -> Vec<Case> {
    let forgotten = Verdict::Drop(DropReason::ForgottenDuplicate);
    let read = |psn, at, length| Shot { psn: Psn::First(psn), at, length: Some(length), ..Shot::new(0x0C) };
    let mut all = Vec::new();
    let mut add = |text: &str, shot, verdict| {
        all.push(Case::rc(format!("READ again: {text}"), Situation::AfterLongRead, shot, verdict));
    };
    add("all of it", read(1, 0, 600), Verdict::Answer(0x0D, 0));
    add("from its second packet", read(2, 256, 344), Verdict::Answer(0x0D, 0));
    add("its last packet", read(3, 512, 88), Verdict::Answer(0x10, 0));
    add("its first bytes", read(1, 0, 100), Verdict::Answer(0x10, 0));
    add("one byte more", read(1, 0, 601), forgotten);
    add("the last packet and one byte", read(3, 512, 89), forgotten);
    add("all of it at its second PSN", read(2, 0, 600), forgotten);
    add("the second packet's bytes at the first PSN", read(1, 256, 344), forgotten);
    add("at the PSN before", read(0, 0, 600), forgotten);
    add("at PSN 0 of old", read(-1000, 0, 600), forgotten);
    add("one byte off", read(1, 1, 599), forgotten);
    add("2^31 bytes", read(1, 0, 1 << 31), forgotten);
    add("2^32 - 1 bytes", read(1, 0, u32::MAX), forgotten);
    add("address 0", Shot { addr: Some(0), ..read(1, 0, 600) }, forgotten);
    add("address 2^64 - 1", Shot { addr: Some(u64::MAX), ..read(1, 0, 600) }, forgotten);
    for bit in [0, 7, 8, 31] {
        let shot = Shot { key: Key::Flipped(bit), ..read(1, 0, 600) };
        add(&format!("bit {bit} of the key"), shot, forgotten);
    }
    add("with key 0", Shot { key: Key::Raw(0), ..read(1, 0, 600) }, forgotten);
    for opcode in [0x13, 0x14] {
        let shot = Shot { psn: Psn::First(1), ..Shot::new(opcode) };
        add(&format!("as {}", name(opcode)), shot, forgotten);
    }
    for (text, psn) in [("pushed out of the memory", 0), ("before any", -1)] {
        let shot = read(psn, 0, 8);
        all.push(Case::rc(format!("READ again: {text}"), Situation::Forgotten(0x0C), shot, forgotten));
    }
    all.push(Case::rc("READ before the first".into(), Situation::Idle, read(-1, 0, 8), forgotten));
    all
}

/// A repeated atomic is answered from memory and never executed again; one that is forgotten is dropped (9.7.5.1).
fn repeated_atomics() -> Vec<Case> {
    let forgotten = Verdict::Drop(DropReason::ForgottenDuplicate);
    let mut all = Vec::new();
    for (opcode, answer) in [(0x13, 0x12), (0x14, 0x12), (0x1D, 0x10)] {
        let again = Shot { psn: Psn::First(0), ..Shot::new(opcode) };
        let mut add = |text: &str, situation, shot, verdict| {
            all.push(Case::rc(format!("{} again: {text}", name(opcode)), situation, shot, verdict));
        };
        add("the same", Situation::After(opcode), again, Verdict::Answer(answer, 0));
        add("with no key", Situation::After(opcode), Shot { key: Key::Raw(0), ..again }, Verdict::Answer(answer, 0));
        add("not aligned", Situation::After(opcode), Shot { at: 3, ..again }, Verdict::Answer(answer, 0));
        add("one PSN before", Situation::After(opcode), Shot { psn: Psn::First(-1), ..again }, forgotten);
        add("pushed out of the memory", Situation::Forgotten(opcode), again, forgotten);
        add("never executed", Situation::Idle, Shot { psn: Psn::First(-1), ..again }, forgotten);
        let read = Shot { psn: Psn::First(0), ..Shot::new(0x0C) };
        add("as a READ", Situation::After(opcode), read, forgotten);
    }
    all
}

/// A FLUSH that comes again was done: it is answered, whatever was between (annex A19), and nothing of it is looked at.
fn repeated_flushes() -> Vec<Case> {
    let again = Shot { psn: Psn::First(0), ..Shot::new(0x1C) };
    let bad = Shot { key: Key::Raw(0), feth: 0, at: -1, ..again };
    let mut all = Vec::new();
    for (text, situation, shot) in [
        ("the same", Situation::After(0x1C), again),
        ("with no key and no placement", Situation::After(0x1C), bad),
        ("behind others", Situation::Forgotten(0x1C), again),
    ] {
        all.push(Case::rc(format!("{} again: {text}", name(0x1C)), situation, shot, Verdict::Answer(0x10, 0)));
    }
    all
}

/// Middle and Last go on with a message of their kind, everything else begins one (9.7.4.1).
fn sequence() -> Vec<Case> {
    let begins = |o: u8| !matches!(o, 1 | 2 | 3 | 7 | 8 | 9 | 0x16);
    let mut all = Vec::new();
    for opcode in RC_REQUESTS {
        let shot = Shot::new(opcode);
        if !begins(opcode) {
            all.push(Case::rc(format!("{} begins", name(opcode)), Situation::Idle, shot, Verdict::INVALID));
            let text = format!("{} behind a whole WRITE", name(opcode));
            all.push(Case::rc(text, Situation::After(0x0A), shot, Verdict::INVALID));
            let text = format!("{} behind a READ", name(opcode));
            all.push(Case::rc(text, Situation::After(0x0C), shot, Verdict::INVALID));
        }
        if begins(opcode) || matches!(opcode, 7..=9) {
            let text = format!("{} inside a SEND", name(opcode));
            all.push(Case::rc(text, Situation::InSend, shot, Verdict::INVALID));
        }
        if begins(opcode) || matches!(opcode, 1..=3 | 0x16) {
            let text = format!("{} inside a WRITE", name(opcode));
            all.push(Case::rc(text, Situation::InWrite(512, false), shot, Verdict::INVALID));
        }
    }
    all
}

/// First and Middle are the path MTU (256), Last 1 to it, Only 0 to it (9.7.4.1); a SEND fits its receive.
fn send_lengths() -> Vec<Case> {
    let mut all = Vec::new();
    let mut add = |opcode, payload: usize, situation, verdict| {
        let text = format!("{} of {payload} bytes, {situation:?}", name(opcode));
        all.push(Case::rc(text, situation, Shot::payload(opcode, payload), verdict));
    };
    for payload in [0, 1, 4, 128, 252, 253, 255, 257, 260, 512, 1024, 4096] {
        add(0x00, payload, Situation::Idle, Verdict::INVALID);
        add(0x01, payload, Situation::InSend, Verdict::INVALID);
    }
    for payload in [257, 258, 260, 512, 1024, 4096] {
        for opcode in [0x04, 0x05, 0x17] {
            add(opcode, payload, Situation::Idle, Verdict::INVALID);
        }
    }
    for payload in [0, 257, 260, 512, 4096] {
        for opcode in [0x02, 0x03, 0x16] {
            add(opcode, payload, Situation::InSend, Verdict::INVALID);
        }
    }
    // 256 bytes are in, 300 fit: the receive fails with a local length error, the peer is told of an invalid request.
    let too_long = Verdict::Nak(0x61, WcStatus::LocalLength);
    for (opcode, payload) in [(0x01, 256), (0x02, 45), (0x02, 256), (0x03, 45), (0x16, 45)] {
        add(opcode, payload, Situation::SmallReceive, too_long);
    }
    all
}

/// The packets of a WRITE add up to its RETH's length, which is at most 2^31 (9.7.4.1).
fn write_lengths() -> Vec<Case> {
    let mut all = Vec::new();
    let mut add = |opcode: u8, payload: usize, length: u32, situation| {
        let text = format!("{} of {payload} bytes, RETH {length}, {situation:?}", name(opcode));
        let shot = Shot { length: Some(length), ..Shot::payload(opcode, payload) };
        all.push(Case::rc(text, situation, shot, Verdict::INVALID));
    };
    for opcode in [0x0A, 0x0B] {
        for (payload, length) in [(0, 1), (0, 4), (4, 0), (4, 3), (4, 5), (4, 8), (256, 255), (256, 257), (1, 2)] {
            add(opcode, payload, length, Situation::Idle);
        }
        for payload in [257, 260, 512, 4096] {
            add(opcode, payload, u32::try_from(payload).unwrap(), Situation::Idle);
        }
        add(opcode, 4, (1 << 31) + 1, Situation::Idle);
        add(opcode, 4, u32::MAX, Situation::Idle);
    }
    // A First whose message ends with it, or is longer than a message can be; then those that are no path MTU.
    for length in [0, 1, 255, 256, (1 << 31) + 1, u32::MAX] {
        add(0x06, 256, length, Situation::Idle);
    }
    for payload in [0, 1, 4, 252, 255, 257, 260, 512] {
        add(0x06, payload, 1024, Situation::Idle);
        add(0x07, payload, 0, Situation::InWrite(1024, false));
    }
    // The message has 1 byte to 256 bytes left.
    for (total, payload) in [(257, 256), (511, 256), (512, 256)] {
        add(0x07, payload, 0, Situation::InWrite(total, false));
    }
    for opcode in [0x08, 0x09] {
        for (total, payload) in
            [(512, 0), (512, 1), (512, 255), (300, 43), (300, 45), (300, 256), (1024, 256), (513, 257)]
        {
            add(opcode, payload, 0, Situation::InWrite(total, false));
        }
    }
    for length in [(1 << 31) + 1, u32::MAX] {
        add(0x0C, 0, length, Situation::Idle);
    }
    all
}

/// No receive WQE is an RNR NAK: for a SEND at its first packet, for a WRITE with immediate at its last (9.7.5.2). One
/// that names memory it may not is our own fault: NAK remote operational error (9.7.4.1).
fn receives() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x00, 0x04, 0x05, 0x17, 0x0B] {
        let text = format!("{} without a receive", name(opcode));
        all.push(Case::rc(text, Situation::NoReceive, Shot::new(opcode), Verdict::Rnr));
    }
    let shot = Shot::payload(0x09, 44);
    let text = format!("{} without a receive", name(0x09));
    all.push(Case::rc(text, Situation::InWrite(300, true), shot, Verdict::Rnr));
    let operational = Verdict::Nak(0x63, WcStatus::LocalProtection);
    for opcode in [0x00, 0x04, 0x05, 0x17] {
        let text = format!("{} into a receive with a bad key", name(opcode));
        all.push(Case::rc(text, Situation::BadReceive, Shot::new(opcode), operational));
    }
    all
}
