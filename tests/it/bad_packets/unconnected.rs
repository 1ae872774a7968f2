//! UC and UD: nothing is ever answered (IBTA Vol 1 9.8.2, 9.8.3). A bad packet costs its message and nothing more.

use uroce::counters::DropReason;
use uroce::verbs::QpType;

use super::shot::{Key, Psn, Shot, UC, name};
use super::{Case, Situation, Verdict};

pub(super) fn cases() -> Vec<Case> {
    let mut all = sequence();
    all.extend(lengths());
    all.extend(access());
    all.extend(receives());
    all.extend(datagrams());
    all
}

fn uc(text: String, situation: Situation, shot: Shot, verdict: Verdict) -> Case {
    Case::of(QpType::Uc, text, situation, shot, verdict)
}

/// Middle and Last need the message they belong to, at the PSN that follows (9.8.2); First and Only begin anew at any
/// PSN.
fn sequence() -> Vec<Case> {
    let lost = Verdict::Drop(DropReason::UcSequence);
    let begins = |o: u8| !matches!(o & 0x1F, 1 | 2 | 3 | 7 | 8 | 9);
    let mut all = Vec::new();
    for opcode in UC {
        if begins(opcode) {
            for psn in [-1, 1, 1000, 0x7F_FFFF, -0x7F_FFFF] {
                let shot = Shot { psn: Psn::Awaited(psn), ..Shot::new(opcode) };
                all.push(uc(format!("{}: PSN {psn:+}", name(opcode)), Situation::Idle, shot, Verdict::Lands));
            }
            let text = format!("{} inside a SEND", name(opcode));
            all.push(uc(text, Situation::InSend, Shot::new(opcode), Verdict::Lands));
            continue;
        }
        all.push(uc(format!("{} begins", name(opcode)), Situation::Idle, Shot::new(opcode), lost));
        let (own, other) = (Situation::InSend, Situation::InWrite(512, false));
        let (own, other) = if opcode & 0x1F < 6 { (own, other) } else { (other, own) };
        all.push(uc(format!("{} in another kind", name(opcode)), other, Shot::new(opcode), lost));
        for psn in [-1, 1, 1000] {
            let shot = Shot { psn: Psn::Awaited(psn), ..Shot::new(opcode) };
            all.push(uc(format!("{}: PSN {psn:+}", name(opcode)), own, shot, lost));
        }
    }
    all
}

/// The rules of lengths are those of RC (9.8.2), without the NAK.
fn lengths() -> Vec<Case> {
    let refused = Verdict::Drop(DropReason::Refused);
    let mut all = Vec::new();
    let mut add = |opcode: u8, payload: usize, length: Option<u32>, situation, verdict| {
        let text = format!("{} of {payload} bytes, RETH {length:?}, {situation:?}", name(opcode));
        all.push(uc(text, situation, Shot { length, ..Shot::payload(opcode, payload) }, verdict));
    };
    for payload in [0, 4, 255, 260, 512] {
        add(0x20, payload, None, Situation::Idle, refused);
        add(0x21, payload, None, Situation::InSend, refused);
        add(0x26, payload, None, Situation::Idle, refused);
        add(0x27, payload, None, Situation::InWrite(1024, false), refused);
    }
    for opcode in [0x24, 0x25, 0x2A, 0x2B] {
        for payload in [257, 260, 512] {
            add(opcode, payload, None, Situation::Idle, refused);
        }
    }
    for opcode in [0x22, 0x23] {
        for payload in [0, 257, 260] {
            add(opcode, payload, None, Situation::InSend, refused);
        }
    }
    for opcode in [0x28, 0x29] {
        for payload in [0, 1, 255, 257] {
            add(opcode, payload, None, Situation::InWrite(512, false), refused);
        }
    }
    for opcode in [0x2A, 0x2B] {
        for length in [0, 3, 5, u32::MAX] {
            add(opcode, 4, Some(length), Situation::Idle, refused);
        }
    }
    for (opcode, payload) in [(0x21, 256), (0x22, 45), (0x23, 45)] {
        add(opcode, payload, None, Situation::SmallReceive, Verdict::Drop(DropReason::ReceiveTooSmall));
    }
    all
}

/// What a key does not allow is dropped (9.8.2).
fn access() -> Vec<Case> {
    let size = i64::try_from(super::world::REGION).unwrap();
    let refused = Verdict::Drop(DropReason::Refused);
    let mut all = Vec::new();
    for opcode in [0x26, 0x2A, 0x2B] {
        let good = Shot::new(opcode);
        let mut add = |text: &str, shot| {
            all.push(uc(format!("{}: {text}", name(opcode)), Situation::Idle, shot, refused));
        };
        for bit in [0, 7, 8, 20, 31] {
            add(&format!("bit {bit} of the key"), Shot { key: Key::Flipped(bit), ..good });
        }
        add("key 0", Shot { key: Key::Raw(0), ..good });
        add("another domain", Shot { key: Key::OtherPd, ..good });
        add("gone", Shot { key: Key::Gone, ..good });
        add("no right", Shot { key: Key::Rights(5), ..good });
        add("one byte before", Shot { at: -1, ..good });
        add("one byte too far", Shot { at: size - 3, ..good });
        add("wraps", Shot { addr: Some(u64::MAX - 1), ..good });
        all.push(uc(format!("{}: a QP without the right", name(opcode)), Situation::Rights(5), good, refused));
    }
    all
}

fn receives() -> Vec<Case> {
    let none = Verdict::Drop(DropReason::NoReceiveWqe);
    [0x20, 0x24, 0x25, 0x2B]
        .map(|o| uc(format!("{} without a receive", name(o)), Situation::NoReceive, Shot::new(o), none))
        .into()
}

/// Q_Key and path MTU (9.8.3), room for payload and 40 bytes (11.4); the PSN of a datagram means nothing.
fn datagrams() -> Vec<Case> {
    let mut all = Vec::new();
    for opcode in [0x64, 0x65] {
        let mut add = |text: String, situation, shot, verdict| {
            all.push(Case::of(QpType::Ud, format!("{}: {text}", name(opcode)), situation, shot, verdict));
        };
        for bit in 0..32 {
            let shot = Shot { qkey: 0x1111_1111 ^ 1 << bit, ..Shot::new(opcode) };
            add(format!("bit {bit} of the Q_Key"), Situation::Idle, shot, Verdict::Drop(DropReason::QKeyMismatch));
        }
        for qkey in [0, u32::MAX, 0x8001_0000] {
            let shot = Shot { qkey, ..Shot::new(opcode) };
            add(format!("Q_Key {qkey:#x}"), Situation::Idle, shot, Verdict::Drop(DropReason::QKeyMismatch));
        }
        let none = Verdict::Drop(DropReason::NoReceiveWqe);
        add("no receive".into(), Situation::NoReceive, Shot::new(opcode), none);
        for payload in [261, 300, 1024, 4096] {
            let small = Verdict::Drop(DropReason::ReceiveTooSmall);
            add(format!("{payload} bytes"), Situation::SmallReceive, Shot::payload(opcode, payload), small);
        }
        for psn in [-1, 1, 0x7F_FFFF] {
            let shot = Shot { psn: Psn::Awaited(psn), ..Shot::new(opcode) };
            add(format!("PSN {psn:+}"), Situation::Idle, shot, Verdict::Lands);
        }
        for payload in [0, 1, 255, 260] {
            add(format!("{payload} bytes"), Situation::SmallReceive, Shot::payload(opcode, payload), Verdict::Lands);
        }
        for payload in [4097, 4100, 5000] {
            let long = Verdict::Drop(DropReason::Refused);
            add(
                format!("{payload} bytes, more than any path MTU"),
                Situation::Idle,
                Shot::payload(opcode, payload),
                long,
            );
        }
        add("4096 bytes, the longest path MTU".into(), Situation::Idle, Shot::payload(opcode, 4096), Verdict::Lands);
        let src = Some("192.0.2.77".parse().unwrap());
        add("from anybody".into(), Situation::Idle, Shot { src, ..Shot::new(opcode) }, Verdict::Lands);
        let shot = Shot { pkey: 0x8000, ..Shot::new(opcode) };
        add("another partition".into(), Situation::Idle, shot, Verdict::Drop(DropReason::PKeyMismatch));
    }
    all
}
