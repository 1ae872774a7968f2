//! How long a thread that waits spins before it sleeps.
//!
//! Owns the decision alone, one value a waiting thread: it is told what happened and when, and says what to do next.
//! Never reads a clock, yields or sleeps itself: `engine` and `host` do.

use crate::time::{Duration, Instant};

/// Longest spin of [`PollPolicy::Adaptive`] unless told otherwise: two or three times what it takes to put a thread to
/// sleep and to wake it.
pub const SPIN_DEFAULT: Duration = Duration::from_micros(50);

/// How often a spinning thread asks whether another thread wants its processor: a yield costs as much as a look at a
/// socket, so it is not made every time.
const YIELD_EVERY: Duration = Duration::from_micros(5);
/// A yield that took longer than this let another thread run.
const SWITCHED: Duration = Duration::from_micros(2);
/// A wait counts as at most this many longest spins: one long pause is forgotten after a few short waits.
const LONGEST_COUNTED: u32 = 4;
/// Weight of the newest wait in the typical one: 1 in this many.
const WEIGHT: u64 = 8;
/// When spinning seems to be in vain, one wait in this many spins all the same: a wait that sleeps is prolonged by its
/// own waking, and would never find out that the peer has become quick.
const TRIAL_EVERY: u32 = 64;

/// What a thread that waits does between two looks at the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// Looks again and again, and never sleeps: the shortest latency, and a processor that is always busy. Makes way for
    /// other threads of its processor. Where a host has a progress thread, a message that arrives alone is acknowledged by
    /// the next call of whoever was told of it, or by that thread some milliseconds later. Where that call posts an answer, the
    /// answer goes ahead, and the ACK waits some 20 us for the peer's next message, so that one ACK stands for several, unless
    /// the peer turns out to wait for it.
    Spin,
    /// Spins for at most `spin`, then sleeps. It spins for less, or not at all, when the latest waits were longer than
    /// that, so that a thread whose peer is slow costs next to nothing. Where a host has a progress thread, a program that has
    /// posted within 20 us of each of the last eight messages it was told of is told of the next one as by `Spin`.
    Adaptive {
        /// Longest spin.
        spin: Duration,
    },
    /// Sleeps at once.
    Block,
}

impl Default for PollPolicy {
    fn default() -> Self {
        Self::Adaptive { spin: SPIN_DEFAULT }
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Look again.
    Spin,
    /// Let other threads have the processor, tell [`Patience::yielded`] how long that took, and look again.
    Yield,
    /// Sleep.
    Sleep,
}

/// What one thread has learned of its waits.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    policy: PollPolicy,
    /// Since when nothing has come.
    since: Instant,
    /// How long the current wait spins, chosen when the one before ended.
    budget: Duration,
    /// How long waits usually are, in nanoseconds.
    typical: u64,
    /// Waits since the last that spun on trial.
    untried: u32,
    slept: bool,
    /// When it last yielded, or something came that ended a wait.
    yielded: Instant,
    /// Something came since the last look that found nothing.
    fresh: bool,
    /// Another thread ran during the last yield.
    crowded: bool,
}

impl Patience {
    /// Whether the policy is to spin for ever.
    pub(crate) const fn spins(&self) -> bool {
        matches!(self.policy, PollPolicy::Spin)
    }

    pub(crate) fn new(policy: PollPolicy) -> Self {
        let mut new = Self {
            policy,
            since: Instant::ZERO,
            budget: Duration::ZERO,
            typical: 0,
            untried: 0,
            slept: false,
            yielded: Instant::ZERO,
            fresh: false,
            crowded: false,
        };
        new.budget = new.next_budget();
        new
    }

    pub(crate) const fn policy(&self) -> PollPolicy {
        self.policy
    }

    /// A wait begins, which has nothing to do with the one before.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.since = now;
        self.slept = false;
    }

    /// Something came.
    pub(crate) fn progress(&mut self, now: Instant) {
        if let PollPolicy::Adaptive { spin } = self.policy {
            let longest = nanos(spin).saturating_mul(LONGEST_COUNTED.into());
            let waited = nanos(now.saturating_since(self.since)).min(longest);
            let spun_in_vain = self.typical > nanos(spin);
            self.typical = if spun_in_vain && !self.slept {
                // The trial succeeded: the peer is quick now.
                waited
            } else {
                self.typical - self.typical / WEIGHT + waited / WEIGHT
            };
        }
        self.begin(now);
        self.fresh = true;
        self.budget = self.next_budget();
    }

    /// Whether nothing speaks for a look at the device before the sleep.
    pub(crate) fn sleeps_at_once(&self) -> bool {
        self.policy == PollPolicy::Block
    }

    /// Nothing came. `due` is when the engine wants to be called though nothing arrives.
    pub(crate) fn idle(&mut self, now: Instant, due: Option<Instant>) -> Idle {
        let spun = now.saturating_since(self.since);
        match self.policy {
            PollPolicy::Spin => {}
            PollPolicy::Block => return self.sleep(),
            // A timer that the system would ring later than a spin ends is better met awake.
            PollPolicy::Adaptive { spin }
                if due.is_some_and(|due| due.saturating_since(now) < spin.min(SPIN_DEFAULT)) => {}
            PollPolicy::Adaptive { .. } if spun >= self.budget => return self.sleep(),
            PollPolicy::Adaptive { .. } => {}
        }
        self.spin(now)
    }

    /// Something came, to one who never sleeps.
    pub(crate) const fn found(&mut self) {
        self.fresh = true;
    }

    /// As [`Self::idle`] of one who never sleeps.
    pub(crate) fn spin(&mut self, now: Instant) -> Idle {
        if core::mem::take(&mut self.fresh) {
            // A wait begins: a short one is over before a yield would be.
            self.yielded = now;
        }
        let quiet = !self.crowded && now.saturating_since(self.yielded) < YIELD_EVERY;
        if quiet { Idle::Spin } else { Idle::Yield }
    }

    /// A yield from `begin` to `end`.
    pub(crate) fn yielded(&mut self, begin: Instant, end: Instant) {
        self.yielded = end;
        self.crowded = end.saturating_since(begin) > SWITCHED;
    }

    fn sleep(&mut self) -> Idle {
        self.slept = true;
        Idle::Sleep
    }

    fn next_budget(&mut self) -> Duration {
        let PollPolicy::Adaptive { spin } = self.policy else { return Duration::ZERO };
        if self.typical <= nanos(spin) {
            self.untried = 0;
            // Twice the typical wait meets most of them; short ones get some time to become longer.
            return spin.min(Duration::from_nanos(2 * self.typical) + spin / 4);
        }
        self.untried += 1;
        if self.untried < TRIAL_EVERY {
            return Duration::ZERO;
        }
        self.untried = 0;
        spin
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN: Duration = Duration::from_micros(40);

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    fn adaptive() -> Patience {
        Patience::new(PollPolicy::Adaptive { spin: SPIN })
    }

    /// Waits for `micros`, looking every microsecond, and sleeping when told to; returns the time that it spun.
    fn wait(p: &mut Patience, now: &mut u64, micros: u64) -> u64 {
        let end = *now + micros;
        p.begin(at(*now));
        let mut spun = 0;
        while *now < end {
            match p.idle(at(*now), None) {
                Idle::Sleep => *now = end,
                Idle::Spin => {
                    (*now, spun) = (*now + 1, spun + 1);
                }
                Idle::Yield => {
                    p.yielded(at(*now), at(*now));
                    (*now, spun) = (*now + 1, spun + 1);
                }
            }
        }
        p.progress(at(*now));
        spun
    }

    #[test]
    fn short_waits_are_spun_out() {
        let (mut p, mut now) = (adaptive(), 0);
        let spun: u64 = (0..100).map(|_| wait(&mut p, &mut now, 9)).sum();
        assert_eq!(spun, 900);
    }

    #[test]
    fn long_waits_cost_next_to_nothing() {
        let (mut p, mut now) = (adaptive(), 0);
        for _ in 0..20 {
            wait(&mut p, &mut now, 1000);
        }
        let spun: u64 = (0..640).map(|_| wait(&mut p, &mut now, 1000)).sum();
        // Ten trials of 40 microseconds in 640 ms.
        assert_eq!(spun, 400);
    }

    #[test]
    fn one_long_pause_is_soon_forgotten() {
        let (mut p, mut now) = (adaptive(), 0);
        for _ in 0..20 {
            wait(&mut p, &mut now, 9);
        }
        assert!(wait(&mut p, &mut now, 10_000_000) <= 40, "at most the longest spin");
        let spun: u64 = (0..10).map(|_| wait(&mut p, &mut now, 9)).sum();
        assert_eq!(spun, 90);
    }

    #[test]
    fn a_peer_that_becomes_quick_is_found_out() {
        let (mut p, mut now) = (adaptive(), 0);
        for _ in 0..20 {
            wait(&mut p, &mut now, 1000);
        }
        // Each wait would be 5 when spun out, and takes 60 when slept, for the waking.
        for _ in 0..TRIAL_EVERY {
            let micros = if p.budget.is_zero() { 60 } else { 5 };
            wait(&mut p, &mut now, micros);
        }
        assert_eq!(wait(&mut p, &mut now, 5), 5);
    }

    #[test]
    fn a_timer_that_is_near_is_met_awake() {
        let mut p = adaptive();
        for _ in 0..20 {
            wait(&mut p, &mut 0, 1000);
        }
        assert_eq!(p.idle(at(1000), Some(at(1041))), Idle::Sleep);
        assert_ne!(p.idle(at(1000), Some(at(1039))), Idle::Sleep);
        assert_ne!(p.idle(at(1000), Some(at(900))), Idle::Sleep);
    }

    #[test]
    fn a_processor_that_others_want_is_yielded_every_time() {
        let mut p = Patience::new(PollPolicy::Spin);
        p.begin(at(100));
        assert_eq!(p.idle(at(100), None), Idle::Yield);
        // Nobody else: the next question is 5 microseconds away.
        p.yielded(at(100), at(101));
        assert_eq!((p.idle(at(105), None), p.idle(at(106), None)), (Idle::Spin, Idle::Yield));
        // Another thread ran meanwhile.
        p.yielded(at(106), at(120));
        assert_eq!((p.idle(at(120), None), p.idle(at(121), None)), (Idle::Yield, Idle::Yield));
        p.yielded(at(121), at(122));
        assert_eq!(p.idle(at(122), None), Idle::Spin);
    }

    #[test]
    fn the_other_policies_do_what_they_are_called() {
        let mut p = Patience::new(PollPolicy::Block);
        assert!(p.sleeps_at_once());
        p.begin(at(0));
        assert_eq!(p.idle(at(0), None), Idle::Sleep);
        let mut p = Patience::new(PollPolicy::Spin);
        assert!(!p.sleeps_at_once());
        p.begin(at(0));
        assert_ne!(p.idle(at(1_000_000_000), None), Idle::Sleep);
    }
}
