//! Keys, ranges, rights and alignment (IBTA Vol 1 9.7.4.1 and 10.6): what a peer may not touch. NAK
//! remote access error, or invalid request where the QP itself forbids the operation or an address is not aligned.

use super::shot::{Key, Shot, name};
use super::{Case, Situation, Verdict};

pub(super) fn cases() -> Vec<Case> {
    let mut all = keys();
    all.extend(ranges());
    all.extend(rights_of_the_region());
    all.extend(rights_of_the_qp());
    all.extend(alignment());
    all.extend(depth());
    all.extend(invalidation());
    all.extend(windows());
    all.extend(flushes());
    all
}

/// A remote operation of 4 or 8 bytes.
const REMOTE: [u8; 8] = [0x06, 0x0A, 0x0B, 0x0C, 0x13, 0x14, 0x1C, 0x1D];

fn keys() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in REMOTE {
        let bits = if opcode == 0x0A || opcode == 0x0C { 0..32 } else { 7..9 };
        let mut add = |text: String, key| {
            let shot = Shot { key, ..Shot::new(opcode) };
            all.push(Case::rc(format!("{}: {text}", name(opcode)), Situation::Idle, shot, Verdict::ACCESS));
        };
        for bit in bits {
            add(format!("bit {bit} of the rkey"), Key::Flipped(bit));
        }
        for raw in [0, 1, u32::MAX] {
            add(format!("rkey {raw:#x}"), Key::Raw(raw));
        }
        add("a key of another domain".into(), Key::OtherPd);
        add("a key that is gone".into(), Key::Gone);
        add("a key that was invalidated".into(), Key::Invalidated);
        add("a window of another QP".into(), Key::OtherQp);
        add("a window bound to nothing".into(), Key::Unbound);
    }
    all
}

/// [VA, VA + length) inside the region, computed without wrap (10.6; CVE-2016-8636 in another stack).
fn ranges() -> Vec<Case> {
    let size = i64::try_from(super::world::REGION).unwrap();
    let mut all = Vec::new();
    let mut add = |opcode: u8, text: &str, shot: Shot| {
        all.push(Case::rc(format!("{}: {text}", name(opcode)), Situation::Idle, shot, Verdict::ACCESS));
    };
    for opcode in REMOTE {
        let shot = Shot::new(opcode);
        add(opcode, "8 bytes before the region", Shot { at: -8, ..shot });
        add(opcode, "right behind the region", Shot { at: size, ..shot });
        add(opcode, "far behind the region", Shot { at: size * 1000, ..shot });
        add(opcode, "address 0", Shot { addr: Some(0), ..shot });
        add(opcode, "the last aligned address", Shot { addr: Some(u64::MAX - 7), ..shot });
        add(opcode, "the top half of the addresses", Shot { addr: Some(1 << 63), ..shot });
    }
    for opcode in [0x06, 0x0A, 0x0B, 0x0C] {
        let shot = Shot::new(opcode);
        add(opcode, "one byte before the region", Shot { at: -1, ..shot });
        add(opcode, "one byte too far", Shot { at: size - 3, ..shot });
        add(opcode, "the last address", Shot { addr: Some(u64::MAX), ..shot });
        add(opcode, "the end wraps to 2", Shot { addr: Some(u64::MAX - 1), ..shot });
    }
    for opcode in [0x06, 0x0C] {
        for length in [super::world::REGION as u32 + 1, 1 << 20, 1 << 31] {
            let shot = Shot { length: Some(length), ..Shot::new(opcode) };
            add(opcode, &format!("{length} bytes of a smaller region"), shot);
        }
        let shot = Shot { length: Some(1 << 31), addr: Some(u64::MAX - (1 << 31) + 1), ..Shot::new(opcode) };
        add(opcode, "the end is 2^64", shot);
        let shot = Shot { length: Some(1 << 31), at: 8 - (1 << 31), ..Shot::new(opcode) };
        add(opcode, "begins 2 GiB before the region and ends in it", shot);
    }
    all
}

/// Rights of a region (bits: local write 1, remote write 2, remote read 4, atomic 8).
fn rights_of_the_region() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in REMOTE {
        let need = right(opcode);
        for rights in [0, 1, 3, 5, 9, 7, 11, 13, 4].into_iter().filter(|r| r & need == 0) {
            let shot = Shot { key: Key::Rights(rights), ..Shot::new(opcode) };
            let text = format!("{}: a region with rights {rights:#x}", name(opcode));
            all.push(Case::rc(text, Situation::Idle, shot, Verdict::ACCESS));
        }
    }
    all
}

fn right(opcode: u8) -> u32 {
    match opcode {
        0x0C => 4,
        0x13 | 0x14 => 8,
        0x1C => 0x100,
        _ => 2,
    }
}

/// An operation that the QP does not allow is an invalid request (9.7.4.1), whatever the region says.
fn rights_of_the_qp() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in REMOTE {
        let need = right(opcode);
        for rights in [0, 1, 3, 5, 9, 7, 11, 13].into_iter().filter(|r| r & need == 0) {
            let text = format!("{}: a QP with rights {rights:#x}", name(opcode));
            all.push(Case::rc(text, Situation::Rights(rights), Shot::new(opcode), Verdict::INVALID));
        }
    }
    all
}

/// Atomics take aligned addresses; a wrong one is an invalid request (9.4, 9.7.4.1). Key and range come first.
fn alignment() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x13, 0x14, 0x1D] {
        for at in [1, 2, 3, 4, 5, 6, 7, 63, 1028] {
            let shot = Shot { at, ..Shot::new(opcode) };
            all.push(Case::rc(format!("{}: address + {at}", name(opcode)), Situation::Idle, shot, Verdict::INVALID));
        }
        let shot = Shot { at: 4, key: Key::Raw(0), ..Shot::new(opcode) };
        all.push(Case::rc(format!("{}: no key, not aligned", name(opcode)), Situation::Idle, shot, Verdict::ACCESS));
        let at = i64::try_from(super::world::REGION).unwrap() - 4;
        let shot = Shot { at, ..Shot::new(opcode) };
        let text = format!("{}: not aligned, half outside", name(opcode));
        all.push(Case::rc(text, Situation::Idle, shot, Verdict::ACCESS));
    }
    all
}

/// More READs and atomics than `max_dest_rd_atomic` (9.7.4.1: too many outstanding is an invalid request). A READ that
/// waits is answered before the NAK.
fn depth() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x0C, 0x13, 0x14, 0x1D] {
        for (text, situation) in [("where none was agreed", Situation::NoDepth), ("one too many", Situation::DepthUsed)]
        {
            all.push(Case::rc(format!("{} {text}", name(opcode)), situation, Shot::new(opcode), Verdict::INVALID));
        }
        let shot = Shot { key: Key::Raw(0), ..Shot::new(opcode) };
        let text = format!("{} with no key where none was agreed", name(opcode));
        all.push(Case::rc(text, Situation::NoDepth, shot, Verdict::INVALID));
    }
    // FLUSH does not count.
    let text = format!("{} where no READs were agreed", name(0x1C));
    all.push(Case::rc(text, Situation::NoDepth, Shot::new(0x1C), Verdict::Answer(0x10, 0)));
    let shot = Shot { length: Some(0), ..Shot::new(0x0C) };
    all.push(Case::rc("empty READ where none was agreed".into(), Situation::NoDepth, shot, Verdict::INVALID));
    all
}

/// SEND with invalidate of a key that cannot be invalidated (9.4; protocol notes: no NAK code exists, the SEND is
/// acknowledged and the QP fails).
fn invalidation() -> Vec<Case> {
    let keys = [
        ("an unknown key", Key::Flipped(9)),
        ("key 0", Key::Raw(0)),
        ("another domain's key", Key::OtherPd),
        ("a key that is gone", Key::Gone),
        ("a key that was invalidated", Key::Invalidated),
        ("a key that no peer could use", Key::Rights(1)),
        ("the key of an ordinary region", Key::Good),
        ("a window of another QP", Key::OtherQp),
        ("a window bound to nothing", Key::Unbound),
    ];
    let case = |(text, key)| {
        let shot = Shot { key, ..Shot::new(0x17) };
        Case::rc(format!("SEND that invalidates {text}"), Situation::Idle, shot, Verdict::AckThenErr)
    };
    keys.into_iter().map(case).collect()
}

/// A window gives the rights it was bound with and reaches what it was bound to, for each operation (10.6.7.2).
fn windows() -> Vec<Case> {
    let size = i64::try_from(super::world::REGION).unwrap();
    let mut all = Vec::new();
    for opcode in REMOTE {
        let mut add = |text: &str, shot, verdict| {
            all.push(Case::rc(format!("{} through {text}", name(opcode)), Situation::Idle, shot, verdict));
        };
        let need = right(opcode);
        let shot = Shot { key: Key::Window(need), ..Shot::new(opcode) };
        let answer = match opcode {
            0x0C | 0x1C | 0x1D => 0x10,
            0x13 | 0x14 => 0x12,
            _ => 0x11,
        };
        if opcode != 0x06 {
            add("a window that allows it", shot, Verdict::Answer(answer, 0));
        }
        add("a window that does not allow it", Shot { key: Key::Window(0x10E & !need), ..shot }, Verdict::ACCESS);
        add("a window, before it", Shot { at: -8, ..shot }, Verdict::ACCESS);
        add("a window, behind it", Shot { at: size, ..shot }, Verdict::ACCESS);
    }
    let shot = Shot { key: Key::Window(2), ..Shot::new(0x17) };
    let text = "SEND that invalidates a window of this QP".to_owned();
    all.push(Case::rc(text, Situation::Idle, shot, Verdict::Answer(0x11, 0)));
    all
}

/// Placement and selectivity that nobody defined are an invalid request; so is a placement that the QP does not allow,
/// and one that the region does not allow is an access error (annex A19).
fn flushes() -> Vec<Case> {
    let mut all = Vec::new();
    let mut add = |text: String, situation, feth, shot: Shot, verdict| {
        let shot = Shot { feth, ..shot };
        all.push(Case::rc(format!("{}: {text}", name(0x1C)), situation, shot, verdict));
    };
    let shot = Shot::new(0x1C);
    for placement in [0].into_iter().chain(4..16) {
        add(format!("placement {placement}"), Situation::Idle, placement, shot, Verdict::INVALID);
    }
    for scope in [2, 3] {
        add(format!("selectivity {scope}"), Situation::Idle, scope << 4 | 1, shot, Verdict::INVALID);
    }
    add("to persistence, which the QP does not allow".into(), Situation::Idle, 2, shot, Verdict::INVALID);
    add("both, of which the QP allows one".into(), Situation::Idle, 3, shot, Verdict::INVALID);
    let persistent = Situation::Rights(0x300);
    add("to persistence, which the region does not allow".into(), persistent, 2, shot, Verdict::ACCESS);
    add("both, of which the region allows one".into(), persistent, 3, shot, Verdict::ACCESS);
    let long = Shot { length: Some((1 << 31) + 1), ..shot };
    add("longer than a message".into(), Situation::Idle, 1, long, Verdict::INVALID);
    // A range of no length names a key all the same; the whole region is named by its key alone.
    let empty = Shot { length: Some(0), ..shot };
    add("of no length".into(), Situation::Idle, 1, empty, Verdict::Answer(0x10, 0));
    add("of no length, no key".into(), Situation::Idle, 1, Shot { key: Key::Raw(0), ..empty }, Verdict::ACCESS);
    let anywhere = Shot { addr: Some(u64::MAX), length: Some(1 << 31), ..shot };
    add(
        "of the region, address and length of nothing".into(),
        Situation::Idle,
        0x11,
        anywhere,
        Verdict::Answer(0x10, 0),
    );
    add("of the region, no key".into(), Situation::Idle, 0x11, Shot { key: Key::Raw(0), ..anywhere }, Verdict::ACCESS);
    for bits in [0x40, 0x80, 0xC0] {
        add(format!("reserved bits {bits:#x}"), Situation::Idle, bits | 1, shot, Verdict::Answer(0x10, 0));
    }
    all
}
