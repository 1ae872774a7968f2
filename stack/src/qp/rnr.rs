//! The RNR timer that a responder advertises (capability of ours; the verbs have one fixed value).
//!
//! Owns how long a requester is asked to wait. Where a program allows it, the wait doubles each time that a repeat finds
//! no receive either, and shrinks a little when a first repeat finds one: a receiver that is slow for long is not asked
//! in vain all the time, and one that was slow for a moment is not waited for. Never decides that there is no receive.

use crate::types::{Psn, RnrTimer};

/// See the module.
#[derive(Debug)]
pub(super) struct RnrPace {
    least: RnrTimer,
    most: Option<RnrTimer>,
    now: RnrTimer,
    /// The packet that was refused last, and whether more than once.
    refused: Option<(Psn, bool)>,
}

impl RnrPace {
    pub(super) const fn new(least: RnrTimer) -> Self {
        Self { least, most: None, now: least, refused: None }
    }

    /// Between `least` and `most` from now on; always `least` without one.
    pub(super) fn set(&mut self, least: RnrTimer, most: Option<RnrTimer>) {
        if (self.least, self.most) != (least, most) {
            (self.least, self.most, self.now) = (least, most, least);
        }
    }

    pub(super) fn reset(&mut self) {
        (self.now, self.refused) = (self.least, None);
    }

    /// The packet at `psn` found no receive: how long its sender shall wait.
    pub(super) fn refuse(&mut self, psn: Psn) -> RnrTimer {
        let Some(most) = self.most else { return self.least };
        let again = self.refused.is_some_and(|(refused, _)| refused == psn);
        if again && self.now.duration() < most.duration() {
            // Two codes are a factor of two or a little less.
            let next = self.now.longer().longer();
            self.now = if next.duration() > most.duration() { most } else { next };
        }
        self.refused = Some((psn, again));
        self.now
    }

    /// The packet at `psn` was taken.
    #[inline]
    pub(super) fn took(&mut self, psn: Psn) {
        if self.refused.is_some_and(|(refused, _)| refused == psn)
            && let Some((_, false)) = self.refused.take()
            && self.now.duration() > self.least.duration()
        {
            self.now = self.now.shorter();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timer(code: u8) -> RnrTimer {
        RnrTimer::new(code).unwrap()
    }

    fn psn(n: u32) -> Psn {
        Psn::from_wire(n)
    }

    #[test]
    fn without_a_longest_it_is_always_the_programs() {
        let mut pace = RnrPace::new(timer(12));
        for _ in 0..5 {
            assert_eq!(pace.refuse(psn(1)), timer(12));
        }
    }

    #[test]
    fn it_doubles_while_nothing_is_posted_and_shrinks_when_a_first_repeat_succeeds() {
        let mut pace = RnrPace::new(timer(12));
        pace.set(timer(12), Some(timer(17)));
        let micros = |t: RnrTimer| t.duration().as_micros();
        let waits: Vec<_> = (0..5).map(|_| micros(pace.refuse(psn(1)))).collect();
        assert_eq!(waits, [640, 1280, 2560, 3840, 3840], "up to the longest");
        // It took three repeats: the wait stays long for the next.
        pace.took(psn(1));
        assert_eq!(micros(pace.refuse(psn(2))), 3840);
        pace.took(psn(2));
        let waits: Vec<_> = (3..9)
            .map(|n| {
                let wait = micros(pace.refuse(psn(n)));
                pace.took(psn(n));
                wait
            })
            .collect();
        assert_eq!(waits, [2560, 1920, 1280, 960, 640, 640], "down to the program's");
    }

    #[test]
    fn code_0_is_the_longest() {
        let mut pace = RnrPace::new(timer(31));
        pace.set(timer(31), Some(timer(0)));
        assert_eq!((pace.refuse(psn(1)), pace.refuse(psn(1)), pace.refuse(psn(1))), (timer(31), timer(0), timer(0)));
        pace.took(psn(1));
        pace.refuse(psn(2));
        pace.took(psn(2));
        assert_eq!(pace.refuse(psn(3)), timer(31));
    }
}
