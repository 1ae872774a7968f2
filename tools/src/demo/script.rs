//! What both processes of the demo agree on: the operations, the memory of the peer, and control messages.
//!
//! Owns these formats. Never touches a QP.

use serde::Serialize;
use uroce::types::{Imm, Rkey};
use uroce::verbs::Remote;

/// Where WRITEs land in the peer's region.
pub(super) const WRITE_AREA: usize = 0;
/// What READs fetch from, filled with message 0 of stream [`READ_STREAM`].
pub(super) const READ_AREA: usize = AREA;
/// The word that atomics work on.
pub(super) const ATOMIC_WORD: usize = 2 * AREA;
/// Bytes of the two areas.
pub(super) const AREA: usize = 1 << 20;
/// Bytes of the peer's region.
pub(super) const REGION: usize = 2 * AREA + 4096;
/// Stream of the read area's content.
pub(super) const READ_STREAM: u32 = 0xffff;
/// Greatest message of a SEND.
pub(super) const SEND_MAX: usize = 64 << 10;
/// Receives that the peer keeps posted.
pub(super) const RECEIVES: usize = 64;
/// Greatest number of messages outstanding. Less than half of [`RECEIVES`] so that the peer is seldom not ready.
pub(super) const DEPTH: usize = 16;
/// Regions that the peer registers at once for SENDs with invalidate.
pub(super) const KEYS: usize = 16;

/// An operation of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Op {
    Send,
    SendImm,
    SendInvalidate,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Op {
    /// For the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::SendImm => "SEND with immediate",
            Self::SendInvalidate => "SEND with invalidate",
            Self::Write => "WRITE",
            Self::WriteImm => "WRITE with immediate",
            Self::Read => "READ",
            Self::CompareSwap => "compare and swap",
            Self::FetchAdd => "fetch and add",
        }
    }

    /// Whether the peer takes part with a receive.
    pub(super) const fn takes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::SendInvalidate | Self::WriteImm)
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub op: Op,
    pub size: usize,
}

/// Every RC operation, small and large.
pub(super) const STEPS: [Step; 14] = [
    Step { op: Op::Send, size: 64 },
    Step { op: Op::Send, size: 64 << 10 },
    Step { op: Op::SendImm, size: 64 },
    Step { op: Op::SendInvalidate, size: 64 },
    Step { op: Op::Write, size: 64 },
    Step { op: Op::Write, size: 64 << 10 },
    Step { op: Op::Write, size: 1 << 20 },
    Step { op: Op::WriteImm, size: 64 },
    Step { op: Op::WriteImm, size: 4096 },
    Step { op: Op::Read, size: 64 },
    Step { op: Op::Read, size: 64 << 10 },
    Step { op: Op::Read, size: 1 << 20 },
    Step { op: Op::CompareSwap, size: 8 },
    Step { op: Op::FetchAdd, size: 8 },
];

/// Places for WRITEs of `size` bytes, used in turn.
pub(super) const fn slots(size: usize) -> usize {
    let fit = AREA / size;
    if fit > 4 * RECEIVES { 4 * RECEIVES } else { fit }
}

/// A message from the client to the peer that is no test message. It has a first immediate byte that no test has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// A step begins: its index in [`STEPS`]. The peer answers [`Reply::Ready`].
    Begin { step: u8 },
    /// Register [`KEYS`] fresh regions and answer with their keys.
    Keys,
    /// The step is over after `count` messages: check what can be checked and answer [`Reply::Verdict`].
    End { count: u64 },
}

/// Bytes of a control message.
pub(super) const CONTROL_LEN: usize = 8;
const CONTROL: u32 = 0xc0de_0000;

impl Control {
    /// The immediate and payload.
    pub(super) fn to_message(self) -> (Imm, [u8; CONTROL_LEN]) {
        let (code, value) = match self {
            Self::Begin { step } => (1, u64::from(step)),
            Self::Keys => (2, 0),
            Self::End { count } => (3, count),
        };
        (Imm::new(CONTROL | code), value.to_be_bytes())
    }

    /// Reads a control message; `None` for a test message.
    pub(super) fn from_message(imm: Imm, payload: [u8; CONTROL_LEN]) -> Option<Self> {
        let value = u64::from_be_bytes(payload);
        match imm.get().checked_sub(CONTROL)? {
            1 => u8::try_from(value).ok().map(|step| Self::Begin { step }),
            2 => Some(Self::Keys),
            3 => Some(Self::End { count: value }),
            _ => None,
        }
    }
}

/// The immediate of test message `number`: never that of a control message.
pub(super) fn test_imm(number: u64) -> Imm {
    Imm::new(u32::try_from(number & 0x7fff_ffff).unwrap_or(0))
}

/// What the peer answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Go on.
    Ready,
    /// Keys that SENDs may invalidate.
    Keys(Vec<Rkey>),
    /// How many messages the peer checked, and the first thing that was wrong.
    Verdict { checked: u64, wrong: Option<String> },
}

/// Greatest length of a reply.
pub(super) const REPLY_MAX: usize = 256;

impl Reply {
    /// The payload.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Ready => vec![1],
            Self::Keys(keys) => core::iter::once(2).chain(keys.iter().flat_map(|k| k.get().to_be_bytes())).collect(),
            Self::Verdict { checked, wrong } => {
                let text = wrong.as_deref().unwrap_or_default().bytes();
                core::iter::once(3).chain(checked.to_be_bytes()).chain(text).take(REPLY_MAX).collect()
            }
        }
    }

    /// Reads a reply.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => Some(Self::Ready),
            2 => {
                let words = rest.chunks_exact(4).filter_map(|w| w.try_into().ok());
                Some(Self::Keys(words.map(|w| Rkey::new(u32::from_be_bytes(w))).collect()))
            }
            3 => {
                let (checked, text) = rest.split_first_chunk::<8>()?;
                let wrong = (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned());
                Some(Self::Verdict { checked: u64::from_be_bytes(*checked), wrong })
            }
            _ => None,
        }
    }
}

/// Where the peer's region is: private data of its acceptance.
pub(super) fn region_to_bytes(at: Remote) -> [u8; 12] {
    let mut bytes = [0; 12];
    let fields = at.addr.to_be_bytes().into_iter().chain(at.rkey.get().to_be_bytes());
    for (to, from) in bytes.iter_mut().zip(fields) {
        *to = from;
    }
    bytes
}

/// Reads it; what follows are the zeros that fill the message.
pub(super) fn region_from_bytes(bytes: &[u8]) -> Option<Remote> {
    let (addr, rest) = bytes.split_first_chunk::<8>()?;
    let (rkey, _) = rest.split_first_chunk::<4>()?;
    Some(Remote { addr: u64::from_be_bytes(*addr), rkey: Rkey::new(u32::from_be_bytes(*rkey)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive() {
        for control in [Control::Begin { step: 13 }, Control::Keys, Control::End { count: 1 << 40 }] {
            let (imm, payload) = control.to_message();
            assert_eq!(Control::from_message(imm, payload), Some(control));
        }
        assert_eq!(Control::from_message(test_imm(u64::MAX), [0; 8]), None);
        let keys = Reply::Keys(vec![Rkey::new(7), Rkey::new(0xffff_ff01)]);
        let wrong = Reply::Verdict { checked: 9, wrong: Some("byte 3".into()) };
        for reply in [Reply::Ready, keys, wrong, Reply::Verdict { checked: 0, wrong: None }] {
            assert_eq!(Reply::from_bytes(&reply.to_bytes()), Some(reply));
        }
        let at = Remote { addr: 0x1234_5678_9abc, rkey: Rkey::new(42) };
        assert_eq!(region_from_bytes(&region_to_bytes(at)), Some(at));
        assert_eq!(region_from_bytes(&[0; 11]), None);
    }

    #[test]
    fn every_write_has_a_place_that_is_not_used_again_before_it_was_checked() {
        for step in STEPS {
            match step.op {
                // A receive that is not yet posted again holds the client back.
                Op::WriteImm => assert!(slots(step.size) >= RECEIVES + DEPTH, "{step:?}"),
                Op::Write => assert!(slots(step.size) >= 1),
                _ => assert!(step.size <= AREA),
            }
            if matches!(step.op, Op::Send | Op::SendImm | Op::SendInvalidate) {
                assert!(step.size <= SEND_MAX && step.size >= CONTROL_LEN);
            }
        }
    }
}
