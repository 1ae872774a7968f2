//! The corpus of bad packets: each has a name, the QP that it is fed to, and the verdict that the protocol gives.
//!
//! Packets are listed by rule, one function a rule, in `malformed`, `delivery`, `requests`, `access`, `responses` and
//! `unconnected`; a verdict is computed there from the rule that is cited and never from what the stack did. Here is
//! the runner: it sets up the QP, feeds the packet, holds the outcome against the verdict, and sees that the QP still
//! works wherever the verdict is not the end of it. Every ICRC is right unless the ICRC is the point.

mod access;
#[allow(dead_code, reason = "the program bad_packets_at_rxe runs it")]
pub(crate) mod at_rxe;
mod delivery;
mod malformed;
mod requests;
mod responses;
mod shot;
mod unconnected;
mod world;

use std::collections::{BTreeMap, BTreeSet};

use shot::Shot;
use uroce::counters::DropReason;
use uroce::verbs::{QpType, WcStatus};
use uroce_tests::pair::Side;
use world::World;

/// What a packet leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Counted under this reason and nothing else: no answer, no completion, no byte written, no state changed.
    Drop(DropReason),
    /// NAK with this syndrome at the expected PSN; the QP is in ERR, and so is the receive WQE in hand.
    Nak(u8, WcStatus),
    /// NAK with syndrome 0x60 at the expected PSN; the QP lives.
    SequenceNak,
    /// RNR NAK at the expected PSN; the QP lives.
    Rnr,
    /// Legal, or harmless: answered with this opcode at the PSN that lies so far from the packet's own, without a NAK.
    Answer(u8, i32),
    /// An ACK, and then ERR: the one violation for which no NAK code exists.
    AckThenErr,
    /// The oldest send completes with this status, and the QP is in ERR.
    Fails(WcStatus),
    /// Legal: the oldest send completes with success.
    Completes,
    /// Taken without an answer and without a drop; the QP lives, and what waited is done in the end.
    Silent,
    /// The requester sends this opcode again.
    Resends(u8),
    /// Legal datagram or UC packet: it lands without an answer.
    Lands,
}

impl Verdict {
    const INVALID: Self = Self::Nak(0x61, WcStatus::WorkRequestFlushed);
    const ACCESS: Self = Self::Nak(0x62, WcStatus::WorkRequestFlushed);

    fn kind(self) -> String {
        match self {
            Self::Drop(reason) => format!("drop: {}", reason.name()),
            Self::Nak(syndrome, _) => format!("NAK {syndrome:#x} and ERR"),
            Self::SequenceNak => "NAK 0x60".into(),
            Self::Rnr => "RNR NAK".into(),
            Self::Answer(..) => "answered".into(),
            Self::AckThenErr => "ACK and ERR".into(),
            Self::Fails(status) => format!("send fails: {status:?}"),
            Self::Completes => "send completes".into(),
            Self::Silent => "no effect".into(),
            Self::Resends(_) => "sent again".into(),
            Self::Lands => "lands".into(),
        }
    }
}

/// What the QP went through before the packet comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Situation {
    /// Receives are posted, nothing was exchanged.
    Idle,
    /// Nothing was exchanged and no receive is posted.
    NoReceive,
    /// The posted receive has 300 bytes, of which a connected QP has got 256 by the First of a SEND.
    SmallReceive,
    /// The posted receive names a key that does not exist.
    BadReceive,
    /// The First of a SEND was taken.
    InSend,
    /// The First of a WRITE was taken; the RETH announces so many bytes. No receive is posted when the flag is set.
    InWrite(u32, bool),
    /// A NAK for a gap (false) or an RNR NAK (true) is out.
    NakOut(bool),
    /// One honest packet of this opcode was executed and answered; a READ behind a WRITE.
    After(u8),
    /// A READ of 600 bytes was executed and answered, behind a WRITE.
    AfterLongRead,
    /// `max_dest_rd_atomic` 1; one READ, or atomic, and then another READ were executed.
    Forgotten(u8),
    /// `max_dest_rd_atomic` is 0.
    NoDepth,
    /// `max_dest_rd_atomic` is 1, and one READ waits for its answer to be sent.
    DepthUsed,
    /// Access rights of the QP, bits of `AccessFlags`.
    Rights(u32),
    /// The requester waits for the answer to this; the responder has executed it, and its answer was lost.
    Wait(Waiting),
    /// The QP is in this state.
    InState(uroce::verbs::QpState),
}

/// What a requester waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// A WRITE of 8 bytes.
    Write,
    /// A READ of 600 bytes.
    Read,
    /// A fetch and add.
    Atomic,
    /// A READ of 8 bytes and then a WRITE.
    ReadWrite,
}

/// A named packet.
#[derive(Clone, Debug)]
struct Case {
    name: String,
    qp: QpType,
    situation: Situation,
    to: Side,
    shot: Shot,
    verdict: Verdict,
}

impl Case {
    /// To the responder of an RC QP.
    fn rc(name: String, situation: Situation, shot: Shot, verdict: Verdict) -> Self {
        Self { name, qp: QpType::Rc, situation, to: Side::B, shot, verdict }
    }

    /// To an RC requester that waits.
    fn response(name: String, waiting: Waiting, shot: Shot, verdict: Verdict) -> Self {
        Self { name, qp: QpType::Rc, situation: Situation::Wait(waiting), to: Side::A, shot, verdict }
    }

    fn of(qp: QpType, name: String, situation: Situation, shot: Shot, verdict: Verdict) -> Self {
        Self { name, qp, situation, to: Side::B, shot, verdict }
    }
}

/// Where the PSNs begin: anywhere, before and behind the wrap, and where the sign of a 24-bit number turns.
const FIRST_PSNS: [u32; 4] = [100, 0xFF_FFFF, 0, 0x7F_FFFF];

fn corpus() -> Vec<Case> {
    let mut all = malformed::cases();
    all.extend(delivery::cases());
    all.extend(requests::cases());
    all.extend(access::cases());
    all.extend(responses::cases());
    all.extend(unconnected::cases());
    all
}

#[test]
fn every_bad_packet_meets_its_verdict() {
    let all = corpus();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in &all {
        *counts.entry(case.verdict.kind()).or_default() += 1;
        for start in FIRST_PSNS {
            let mut world = World::new(case.qp, case.situation, start);
            if let Err(what) = world.judge(case) {
                wrong.push(format!("{} from PSN {start:#x}: expected {:?}, {what}", case.name, case.verdict));
            }
        }
    }
    println!("{} packets", all.len());
    for (kind, n) in counts {
        println!("{n:6} {kind}");
    }
    let (n, of) = (wrong.len(), all.len() * FIRST_PSNS.len());
    assert!(wrong.is_empty(), "{n} of {of} differ:\n{}", wrong.join("\n"));
}

#[test]
fn the_corpus_is_large_and_its_names_are_unique() {
    let all = corpus();
    let bad = all.iter().filter(|c| !matches!(c.verdict, Verdict::Answer(..) | Verdict::Completes | Verdict::Lands));
    assert!(bad.count() >= 500);
    let names: BTreeSet<_> = all.iter().map(|c| &c.name).collect();
    let twice: Vec<_> =
        all.iter().map(|c| &c.name).filter(|n| all.iter().filter(|c| c.name == **n).count() > 1).collect();
    assert_eq!(names.len(), all.len(), "{twice:?}");
}
