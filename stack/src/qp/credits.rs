//! End-to-end credits (IBTA Vol 1 9.7.7.2, paraphrased): how many receives the peer has for us, and we for it.
//!
//! Owns the codes of the AETH and the requester's account: messages that take a receive (SEND, WRITE with immediate) in the
//! order of the send queue, and up to which of them the peer promised receives. The count is of such messages alone, not
//! of all as an MSN is, since no other takes a receive. Never holds a message back for good: the first one beyond the
//! promise goes all the same, with an answer asked for, and while nothing is in flight any message is the first.

use crate::verbs::Operation;

/// The code that says: credits are not used.
pub(super) const NOT_USED: u8 = 31;

/// Receives by code.
const RECEIVES: [u32; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
];

/// The code for `receives` waiting: the largest that promises no more.
pub(super) fn code_for(receives: usize) -> u8 {
    let beyond = RECEIVES.partition_point(|n| *n as usize <= receives);
    u8::try_from(beyond.saturating_sub(1)).unwrap_or(0)
}

/// Whether an operation takes a receive of the peer.
const fn takes_receive(op: &Operation) -> bool {
    matches!(op, Operation::Send | Operation::SendImm(_) | Operation::SendInvalidate(_) | Operation::WriteImm(..))
}

/// The requester's account. All counts are modular.
#[derive(Debug, Default)]
pub(super) struct Credits {
    /// Messages with a receive that are done.
    done: u32,
    /// Such messages between the oldest one in flight and the one being sent.
    begun: u32,
    /// Up to which such message, counted from 1, the peer promised receives. `None`: it promises nothing, and is sent
    /// everything.
    limit: Option<u32>,
}

impl Credits {
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// The message being sent was sent to its end.
    pub(super) fn passed(&mut self, op: &Operation) {
        self.begun = self.begun.wrapping_add(u32::from(takes_receive(op)));
    }

    /// Sending begins again with the oldest message in flight.
    pub(super) fn went_back(&mut self) {
        self.begun = 0;
    }

    /// The oldest message in flight is done. `behind`: sending was beyond it.
    pub(super) fn finished(&mut self, op: &Operation, behind: bool) {
        if takes_receive(op) {
            self.done = self.done.wrapping_add(1);
            self.begun = self.begun.saturating_sub(u32::from(behind));
        }
    }

    /// The peer acknowledged all that is done, with this credit code.
    pub(super) fn grant(&mut self, code: u8) {
        let Some(receives) = RECEIVES.get(usize::from(code)) else {
            self.limit = None;
            return;
        };
        let promised = self.done.wrapping_add(*receives);
        // A promise is not taken back: an older answer that comes late says less.
        let more = self.limit.is_none_or(|limit| promised.wrapping_sub(limit).cast_signed() > 0);
        if more {
            self.limit = Some(promised);
        }
    }

    /// How far beyond the promise the message being sent is; 0: it is covered.
    fn beyond(&self, op: &Operation) -> u32 {
        let Some(limit) = self.limit.filter(|_| takes_receive(op)) else { return 0 };
        let ordinal = self.done.wrapping_add(self.begun).wrapping_add(1);
        u32::try_from(ordinal.wrapping_sub(limit).cast_signed()).unwrap_or(0)
    }

    /// Whether the message being sent is not covered: then its first packet asks for an answer.
    pub(super) fn is_limited(&self, op: &Operation) -> bool {
        self.beyond(op) > 0
    }

    /// Whether its next packet may go. `first`: it is the message's first one; `idle`: nothing is in flight; `heard`: the
    /// peer acknowledged a part of this message, so it has a receive.
    #[inline]
    pub(super) fn allows(&self, op: &Operation, first: bool, idle: bool, heard: bool) -> bool {
        match self.beyond(op) {
            0 => true,
            1 if first => true,
            _ => idle || heard,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Rkey;
    use crate::verbs::Remote;

    const SEND: Operation = Operation::Send;
    const WRITE: Operation = Operation::Write(Remote { addr: 0, rkey: Rkey::new(0) });

    #[test]
    fn codes_promise_no_more_than_there_is() {
        for (receives, code) in [(0, 0), (1, 1), (4, 4), (5, 4), (6, 5), (7, 5), (8, 6), (1000, 19), (1024, 20)] {
            assert_eq!(code_for(receives), code, "{receives}");
        }
        assert_eq!((code_for(32768), code_for(usize::MAX)), (30, 30));
        for receives in 0..40_000 {
            assert!(RECEIVES[usize::from(code_for(receives))] as usize <= receives);
        }
    }

    #[test]
    fn without_a_promise_everything_goes() {
        let mut c = Credits::default();
        for _ in 0..100 {
            assert!(c.allows(&SEND, true, false, false) && !c.is_limited(&SEND));
            c.passed(&SEND);
        }
        c.grant(0);
        assert!(!c.allows(&SEND, true, false, false));
        c.grant(NOT_USED);
        assert!(c.allows(&SEND, true, false, false), "the peer uses no credits after all");
    }

    #[test]
    fn the_first_beyond_the_promise_goes_and_waits_after_its_first_packet() {
        let mut c = Credits::default();
        c.grant(2);
        for _ in 0..2 {
            assert!(c.allows(&SEND, true, false, false) && !c.is_limited(&SEND));
            c.passed(&SEND);
        }
        assert!(c.is_limited(&SEND) && c.allows(&SEND, true, false, false));
        assert!(!c.allows(&SEND, false, false, false), "its second packet");
        assert!(c.allows(&SEND, false, false, true), "once its first was acknowledged");
        // What takes no receive goes in any case.
        assert!(c.allows(&WRITE, true, false, false) && !c.is_limited(&WRITE));
        c.passed(&SEND);
        assert!(!c.allows(&SEND, true, false, false), "two beyond");
        assert!(c.allows(&SEND, true, true, false), "but with nothing in flight, any");
        // The three are done, and the peer has one more receive.
        for _ in 0..3 {
            c.finished(&SEND, true);
        }
        c.grant(1);
        assert!(c.allows(&SEND, false, false, false) && !c.is_limited(&SEND));
        c.passed(&SEND);
        assert!(c.is_limited(&SEND));
        c.went_back();
        assert!(!c.is_limited(&SEND));
        // One that comes late takes nothing back.
        c.grant(0);
        assert!(!c.is_limited(&SEND));
    }
}
