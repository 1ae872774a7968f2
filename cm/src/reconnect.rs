//! When to try again to connect.
//!
//! Owns the schedule: exponential backoff with jitter, from a seed, so that a thousand clients of a server that comes
//! back do not come back at once. Never connects.

use uroce::rng::Rng;
use uroce::time::Duration;

/// How attempts follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconnectPolicy {
    /// After the first failure.
    pub initial: Duration,
    /// Each wait is this many percent of the one before, 100 (constant) to 1000.
    pub factor_percent: u32,
    /// No wait is longer than this, unless `initial` is.
    pub cap: Duration,
    /// Up to this many percent are taken off each wait at random, 0 to 100.
    pub jitter_percent: u32,
    /// Failures in a row after which it is given up; 0: never.
    pub max_tries: u32,
}

impl Default for ReconnectPolicy {
    /// 100 ms, doubling up to 30 s, up to half of it taken off, for ever.
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(100),
            factor_percent: 200,
            cap: Duration::from_secs(30),
            jitter_percent: 50,
            max_tries: 0,
        }
    }
}

impl ReconnectPolicy {
    /// The wait after failure number `n` (from 1), without jitter.
    #[must_use]
    pub fn wait(&self, n: u32) -> Duration {
        let cap = self.cap.max(self.initial);
        let factor = self.factor_percent.clamp(100, 1000);
        let mut wait = self.initial;
        for _ in 1..n {
            let next = wait.saturating_mul(factor) / 100;
            if next >= cap {
                return cap;
            }
            if next == wait {
                break;
            }
            wait = next;
        }
        wait.min(cap)
    }
}

/// A [`ReconnectPolicy`] at work.
#[derive(Clone, Debug)]
pub struct Backoff {
    policy: ReconnectPolicy,
    rng: Rng,
    failures: u32,
}

impl Backoff {
    /// No failure yet. `rng` gives the jitter.
    #[must_use]
    pub const fn new(policy: ReconnectPolicy, rng: Rng) -> Self {
        Self { policy, rng, failures: 0 }
    }

    /// An attempt failed: how long to wait before the next; `None` when it is given up.
    pub fn failed(&mut self) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1);
        if self.policy.max_tries > 0 && self.failures >= self.policy.max_tries {
            return None;
        }
        Some(self.jittered(self.failures))
    }

    /// How long a connection that was lost without being used is not made anew after one before it: as after a first
    /// failure. It counts as none.
    pub fn pause(&mut self) -> Duration {
        self.jittered(1)
    }

    fn jittered(&mut self, n: u32) -> Duration {
        let wait = self.policy.wait(n);
        let most = u64::try_from((wait * self.policy.jitter_percent.min(100) / 100).as_nanos()).unwrap_or(0);
        wait.saturating_sub(Duration::from_nanos(self.rng.within(0..=most)))
    }

    /// An attempt succeeded.
    pub const fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Failures in a row.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(v: u64) -> Duration {
        Duration::from_millis(v)
    }

    #[test]
    fn waits_double_up_to_the_cap() {
        let policy = ReconnectPolicy { cap: ms(1000), ..ReconnectPolicy::default() };
        let waits: Vec<_> = (1..=6).map(|n| policy.wait(n)).collect();
        assert_eq!(waits, [ms(100), ms(200), ms(400), ms(800), ms(1000), ms(1000)]);
        assert_eq!(policy.wait(u32::MAX), ms(1000));
        let constant = ReconnectPolicy { factor_percent: 100, ..policy };
        assert_eq!(constant.wait(u32::MAX), ms(100));
        let still = ReconnectPolicy { initial: Duration::ZERO, ..policy };
        assert_eq!(still.wait(u32::MAX), Duration::ZERO);
    }

    #[test]
    fn jitter_spreads_and_a_seed_repeats_it() {
        let policy = ReconnectPolicy { factor_percent: 100, ..ReconnectPolicy::default() };
        let draw = |seed| {
            let mut backoff = Backoff::new(policy, Rng::from_u64(seed));
            (0..50).map(|_| backoff.failed().unwrap()).collect::<Vec<_>>()
        };
        let waits = draw(1);
        assert!(waits.iter().all(|w| *w >= ms(50) && *w <= ms(100)));
        assert!(waits.iter().min().unwrap() < &ms(60) && waits.iter().max().unwrap() > &ms(90));
        assert_eq!(waits, draw(1));
        assert_ne!(waits, draw(2));
    }

    #[test]
    fn it_is_given_up_after_so_many_tries_and_a_success_forgives() {
        let policy = ReconnectPolicy { max_tries: 3, ..ReconnectPolicy::default() };
        let mut backoff = Backoff::new(policy, Rng::from_u64(1));
        assert!(backoff.failed().is_some() && backoff.failed().is_some());
        backoff.succeeded();
        assert!(backoff.failed().is_some() && backoff.failed().is_some());
        assert_eq!((backoff.failed(), backoff.failures()), (None, 3));
    }
}
