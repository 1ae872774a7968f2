//! When a message is sent again, and when its sender gives up.
//!
//! Owns the schedule: exponential backoff with jitter. Jitter only lengthens an interval, so what the REQ promises about
//! our patience stays true. Never sends.

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};

use crate::wire::{MAD_LEN, MadKind, TransactionId};

/// How an unanswered message is repeated. Linux repeats at one interval; this side backs off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// From the first sending to the second.
    pub initial: Duration,
    /// Each interval is this many percent of the one before, 100 (linear) to 1000.
    pub factor_percent: u32,
    /// No interval is longer than this, unless `initial` is.
    pub cap: Duration,
    /// Repeats after the first sending, 0 to 15.
    pub retries: u8,
    /// Up to this many percent are added to each interval at random, 0 to 100.
    pub jitter_percent: u32,
}

impl Default for RetryPolicy {
    /// 250 ms, doubling up to 4 s, 15 repeats, 10 % jitter: gives up after about 50 s.
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(250),
            factor_percent: 200,
            cap: Duration::from_secs(4),
            retries: Self::MAX_RETRIES,
            jitter_percent: 10,
        }
    }
}

impl RetryPolicy {
    /// The REQ has four bits for the number of repeats.
    pub const MAX_RETRIES: u8 = 15;

    /// The longest interval that a peer can ask for, 17.2 s (code 22): one that claims more holds no state for hours.
    pub const PATIENCE_MAX: Duration = Duration::from_nanos(4096 << 22);

    /// The interval after sending number `n` (from 1), without jitter.
    #[must_use]
    pub fn interval(&self, n: u32) -> Duration {
        let cap = self.cap.max(self.initial);
        let factor = self.factor_percent.clamp(100, 1000);
        let mut interval = self.initial;
        // The cap ends the loop early; the number of repeats bounds it anyway.
        for _ in 1..n.min(u32::from(Self::MAX_RETRIES) + 1) {
            interval = (interval * factor / 100).min(cap);
        }
        interval
    }

    /// This policy, but never more impatient than `patience` nor more often than `retries`: what the peer asked for,
    /// up to [`Self::PATIENCE_MAX`].
    #[must_use]
    pub fn within(self, patience: Duration, retries: u8) -> Self {
        Self { initial: self.initial.max(patience.min(Self::PATIENCE_MAX)), retries: self.retries.min(retries), ..self }
    }
}

/// A message that waits for its answer.
#[derive(Clone, Debug)]
pub(crate) struct Retransmission {
    /// What is repeated.
    pub(crate) bytes: Box<[u8; MAD_LEN]>,
    /// Its kind.
    pub(crate) kind: MadKind,
    policy: RetryPolicy,
    first_sent: Instant,
    tries: u32,
    /// MRAs that were granted.
    extensions: u8,
    /// After the first MRA: no MRA extends the wait beyond this.
    mra_limit: Option<Instant>,
}

/// What to do when the time is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Send again, and wait until then.
    Resend(Instant),
    /// The message was sent this often in this time and nobody answered.
    GiveUp { tries: u32, elapsed: Duration },
}

impl Retransmission {
    /// A message that is sent now for the first time; also when it is due.
    pub(crate) fn start(
        now: Instant,
        kind: MadKind,
        bytes: [u8; MAD_LEN],
        policy: RetryPolicy,
        rng: &mut Rng,
    ) -> (Self, Instant) {
        let due = now + jittered(&policy, 1, rng);
        (Self { bytes: Box::new(bytes), kind, policy, first_sent: now, tries: 1, extensions: 0, mra_limit: None }, due)
    }

    /// The wait is over.
    pub(crate) fn on_due(&mut self, now: Instant, rng: &mut Rng) -> Due {
        if self.tries > u32::from(self.policy.retries.min(RetryPolicy::MAX_RETRIES)) {
            return Due::GiveUp { tries: self.tries, elapsed: now.saturating_since(self.first_sent) };
        }
        self.tries += 1;
        Due::Resend(now + jittered(&self.policy, self.tries, rng))
    }

    /// The peer asks for `service` more time. All its requests together are granted no more than `cap.0` of time, and no
    /// more than `cap.1` of them are heard. `None` when that is used up.
    pub(crate) fn extend(&mut self, now: Instant, service: Duration, cap: (Duration, u8)) -> Option<Instant> {
        let limit = *self.mra_limit.get_or_insert(now + cap.0);
        let until = (now + service + self.policy.interval(self.tries)).min(limit);
        let granted = until > now && self.extensions < cap.1;
        self.extensions += u8::from(granted);
        granted.then_some(until)
    }

    /// Of the message.
    pub(crate) fn transaction(&self) -> TransactionId {
        let [_, _, _, _, _, _, _, _, a, b, c, d, e, f, g, h, ..] = *self.bytes;
        TransactionId::new(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// How often it was sent, and since when.
    pub(crate) const fn spent(&self, now: Instant) -> (u32, Duration) {
        (self.tries, now.saturating_since(self.first_sent))
    }

    /// Whether the peer has asked for time.
    pub(crate) const fn is_extended(&self) -> bool {
        self.mra_limit.is_some()
    }
}

fn jittered(policy: &RetryPolicy, n: u32, rng: &mut Rng) -> Duration {
    let interval = policy.interval(n);
    let most = u64::try_from((interval * policy.jitter_percent.min(100) / 100).as_nanos()).unwrap_or(0);
    if most == 0 { interval } else { interval + Duration::from_nanos(rng.within(0..=most)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(v: u64) -> Duration {
        Duration::from_millis(v)
    }

    #[test]
    fn intervals_double_up_to_the_cap() {
        let policy = RetryPolicy { initial: ms(250), cap: ms(1500), ..RetryPolicy::default() };
        let got: Vec<Duration> = (1..=5).map(|n| policy.interval(n)).collect();
        assert_eq!(got, [ms(250), ms(500), ms(1000), ms(1500), ms(1500)]);
        let linear = RetryPolicy { factor_percent: 100, ..policy };
        assert_eq!(linear.interval(9), ms(250));
        // A peer that asks for patience gets it, beyond the cap if need be.
        assert_eq!(policy.within(ms(4295), 3).interval(3), ms(4295));
        assert_eq!(policy.within(ms(1), 3).retries, 3);
    }

    #[test]
    fn jitter_only_lengthens() {
        let policy = RetryPolicy::default();
        let mut rng = Rng::from_u64(3);
        for _ in 0..100 {
            let d = jittered(&policy, 1, &mut rng);
            assert!(d >= ms(250) && d <= ms(275), "{d:?}");
        }
    }

    #[test]
    fn extensions_have_a_common_limit() {
        let policy = RetryPolicy { jitter_percent: 0, ..RetryPolicy::default() };
        let mut rng = Rng::from_u64(3);
        let t0 = Instant::ZERO;
        let (mut r, due) = Retransmission::start(t0, MadKind::Req, [0; MAD_LEN], policy, &mut rng);
        assert_eq!(due, t0 + ms(250));
        let cap = (ms(3000), 8);
        assert_eq!(r.extend(t0, ms(1000), cap), Some(t0 + ms(1250)));
        assert_eq!(r.extend(t0 + ms(1000), ms(60_000), cap), Some(t0 + ms(3000)));
        assert_eq!(r.extend(t0 + ms(3000), ms(60_000), cap), None);
        // Many short ones have a limit too.
        let (mut r, _) = Retransmission::start(t0, MadKind::Req, [0; MAD_LEN], policy, &mut rng);
        let granted = (0..100).filter(|n| r.extend(t0 + ms(*n), ms(1), (ms(60_000), 8)).is_some()).count();
        assert_eq!(granted, 8);
    }
}
