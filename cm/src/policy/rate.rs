//! How often: token buckets, one of a source and one of all together.
//!
//! Owns the buckets and the bounded table of sources. Pure: time is an argument, and the table's hash is keyed from the
//! seed.

use core::hash::Hasher as _;

use siphasher::sip::SipHasher13;
use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::Gid;

/// Slots that a source may lie in.
const WAYS: usize = 8;
/// Sources remembered at least and at most.
pub const SOURCES_RANGE: core::ops::RangeInclusive<u32> = 64..=1_048_576;
/// How long a source that was served stands behind those that were not, when there is not enough for all.
pub const SERVED_FOR: Duration = Duration::from_secs(10);

/// How many a second, and how many at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// A second, at least 1.
    pub per_second: u32,
    /// At once after a pause, at least 1.
    pub burst: u32,
}

impl Rate {
    fn interval(self) -> Duration {
        Duration::from_nanos(1_000_000_000 / u64::from(self.per_second.max(1)))
    }
}

/// A token bucket of eight bytes: the time at which it will be full again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    full_at: Instant,
}

impl Bucket {
    /// Takes a token, if there is one.
    pub fn take(&mut self, now: Instant, rate: Rate) -> bool {
        let has = self.has(now, rate);
        if has {
            self.full_at = self.full_at.max(now) + rate.interval();
        }
        has
    }

    /// Whether there is a token.
    #[must_use]
    pub fn has(&self, now: Instant, rate: Rate) -> bool {
        let room = rate.interval() * rate.burst.max(1).saturating_sub(1);
        self.full_at.saturating_since(now) <= room
    }

    /// Whether nothing is missing: a new bucket would be the same.
    #[must_use]
    pub fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }

    /// When there is a token again, if it is not now.
    #[must_use]
    pub fn next(&self, rate: Rate) -> Instant {
        let room = rate.interval() * rate.burst.max(1).saturating_sub(1);
        Instant::ZERO + self.full_at.saturating_since(Instant::ZERO).saturating_sub(room)
    }
}

/// What is remembered of a source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    gid: Gid,
    /// Requests.
    pub(super) requests: Bucket,
    /// MADs that are wrong, and answers that refuse.
    pub(super) bad: Bucket,
    /// Until when it stands behind those that were not served.
    pub(super) served_until: Instant,
}

impl Source {
    /// What a slot without a source holds. Nothing arrives from `::`.
    const EMPTY: Self = Self {
        gid: Gid::from_bytes([0; 16]),
        requests: Bucket { full_at: Instant::ZERO },
        bad: Bucket { full_at: Instant::ZERO },
        served_until: Instant::ZERO,
    };

    fn is_idle(&self, now: Instant) -> bool {
        self.requests.is_full(now) && self.bad.is_full(now)
    }

    fn last_seen(&self) -> Instant {
        self.requests.full_at.max(self.bad.full_at)
    }
}

/// The sources seen lately. Of fixed size: a source lies in one of eight slots that the keyed hash of its address names.
///
/// A source gives way to another only when its buckets are full, so that nobody becomes new by flooding the table with
/// other addresses. Who finds no slot shares one set of buckets with all who find none.
pub(super) struct Sources {
    slots: Box<[Source]>,
    crowd: Source,
    key: (u64, u64),
}

impl Sources {
    /// A table of about `count` sources, a power of two.
    pub(super) fn new(count: u32, rng: &mut Rng) -> Self {
        let count = count.clamp(*SOURCES_RANGE.start(), *SOURCES_RANGE.end()).next_power_of_two() as usize;
        Self {
            slots: vec![Source::EMPTY; count].into_boxed_slice(),
            crowd: Source::EMPTY,
            key: (rng.next_u64(), rng.next_u64()),
        }
    }

    /// Bytes of a table of about `count` sources.
    pub(super) const fn bytes(count: u32) -> usize {
        count.next_power_of_two() as usize * size_of::<Source>()
    }

    /// What is known of `gid`; for a new one, a slot whose source has been quiet the longest.
    pub(super) fn of(&mut self, now: Instant, gid: Gid) -> &mut Source {
        let start = self.set_of(gid);
        let Self { slots, crowd, .. } = self;
        let Some(set) = slots.get_mut(start..start + WAYS) else { return crowd };
        let found = set.iter().position(|s| s.gid == gid);
        let place = found.or_else(|| {
            let idle = set.iter().enumerate().filter(|(_, s)| s.is_idle(now));
            idle.min_by_key(|(_, s)| s.last_seen()).map(|(at, _)| at)
        });
        match place.and_then(|at| set.get_mut(at)) {
            Some(source) => {
                if source.gid != gid {
                    *source = Source { gid, ..Source::EMPTY };
                }
                source
            }
            None => crowd,
        }
    }

    /// The first of the eight slots of an address.
    fn set_of(&self, gid: Gid) -> usize {
        let mut hasher = SipHasher13::new_with_keys(self.key.0, self.key.1);
        hasher.write(&gid.to_bytes());
        let sets = (self.slots.len() / WAYS).max(1);
        usize::try_from(hasher.finish()).unwrap_or(0) % sets * WAYS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 100, burst: 200 };

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    fn gid(n: u32) -> Gid {
        std::net::Ipv4Addr::from(0x0a00_0000 + n).into()
    }

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut bucket = Bucket::default();
        assert_eq!((0..500).filter(|_| bucket.take(at(0), RATE)).count(), 200);
        assert_eq!(bucket.next(RATE), at(10));
        assert!(!bucket.take(at(9), RATE));
        assert_eq!((0..500).filter(|_| bucket.take(at(1000), RATE)).count(), 100);
        assert!(!bucket.is_full(at(2999)));
        assert!(bucket.is_full(at(3000)));
        assert_eq!((0..500).filter(|_| bucket.take(at(60_000), RATE)).count(), 200, "no more than the burst is saved");
        let mut single = Bucket::default();
        let one = Rate { per_second: 1, burst: 1 };
        assert_eq!(
            (single.take(at(0), one), single.take(at(999), one), single.take(at(1000), one)),
            (true, false, true)
        );
    }

    #[test]
    fn a_source_does_not_become_new_by_flooding_the_table() {
        let mut sources = Sources::new(64, &mut Rng::from_u64(1));
        while sources.of(at(0), gid(1)).requests.take(at(0), RATE) {}
        // A hundred times as many others as there are slots, each of which has used something.
        for n in 2..6400 {
            sources.of(at(0), gid(n)).requests.take(at(0), RATE);
        }
        assert!(!sources.of(at(0), gid(1)).requests.take(at(0), RATE));
        // A token a hundredth of a second later, as for everybody.
        assert!(sources.of(at(10), gid(1)).requests.take(at(10), RATE));
        assert!(!sources.of(at(10), gid(1)).requests.take(at(10), RATE));
    }

    #[test]
    fn who_finds_no_slot_shares_with_the_others() {
        let mut sources = Sources::new(64, &mut Rng::from_u64(1));
        let taken = (0..10_000).filter(|n| sources.of(at(0), gid(*n)).requests.take(at(0), RATE)).count();
        assert!((64 + 150..=64 + 200).contains(&taken), "{taken}: 64 slots, and the burst of those without");
    }

    #[test]
    fn quiet_sources_give_way_the_longest_quiet_first() {
        let mut sources = Sources::new(64, &mut Rng::from_u64(3));
        for n in 0..64 {
            sources.of(at(u64::from(n)), gid(n)).served_until = at(1_000_000);
            sources.of(at(u64::from(n)), gid(n)).requests.take(at(u64::from(n)), RATE);
        }
        sources.of(at(10_000), gid(1000)).requests.take(at(10_000), RATE);
        let kept = sources.slots.iter().filter(|s| s.served_until == at(1_000_000)).count();
        assert_eq!(sources.of(at(10_000), gid(1000)).served_until, Instant::ZERO);
        assert!(kept >= 40, "{kept}");
    }

    #[test]
    fn the_hash_depends_on_the_seed() {
        let sets = |seed| {
            let sources = Sources::new(65_536, &mut Rng::from_u64(seed));
            (0..64).map(|n| sources.set_of(gid(n))).collect::<Vec<_>>()
        };
        assert_eq!(sets(1), sets(1));
        assert_ne!(sets(1), sets(2));
    }
}
