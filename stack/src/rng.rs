//! Random numbers as a value.
//!
//! Owns the one generator of an endpoint: ChaCha, so that QPNs, PSNs and keys cannot be guessed from others that were
//! seen. Never draws from the system by itself: a driver passes a seed, the simulator a chosen one, and the same seed
//! gives the same run bit for bit.

use core::ops::RangeInclusive;

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;

/// A seeded, cryptographically strong generator.
#[derive(Clone, Debug)]
pub struct Rng(ChaCha12Rng);

impl Rng {
    /// The generator with this 256-bit seed.
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Self {
        Self(ChaCha12Rng::from_seed(seed))
    }

    /// The generator with this short seed, for tests and the simulator.
    #[must_use]
    pub fn from_u64(seed: u64) -> Self {
        Self(ChaCha12Rng::seed_from_u64(seed))
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Fills `out`.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.0.fill_bytes(out);
    }

    /// A number in `range`, uniform up to a bias of 2^-32.
    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = (*range.start(), *range.end());
        let span = u128::from(high.saturating_sub(low)) + 1;
        let offset = (u128::from(self.next_u64()) * span) >> 64;
        low + u64::try_from(offset).unwrap_or(0)
    }

    /// True with probability `p` (0.0 to 1.0).
    pub fn chance(&mut self, p: f64) -> bool {
        // 53 bits are what an f64 holds exactly.
        #[allow(clippy::cast_precision_loss)]
        let unit = (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        unit < p
    }

    /// A generator of its own stream, derived from this one.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        let mut seed = [0; 32];
        self.fill(&mut seed);
        Self::from_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers() {
        let (mut a, mut b) = (Rng::from_u64(7), Rng::from_u64(7));
        for _ in 0..100 {
            assert_eq!(a.next_u64(), b.next_u64());
            assert_eq!(a.within(3..=9), b.within(3..=9));
        }
    }

    #[test]
    fn within_stays_within() {
        let mut r = Rng::from_u64(1);
        let mut seen = [false; 4];
        for _ in 0..200 {
            let v = r.within(5..=8);
            assert!((5..=8).contains(&v));
            seen[usize::try_from(v - 5).unwrap()] = true;
        }
        assert_eq!(seen, [true; 4]);
        assert_eq!(r.within(9..=9), 9);
        assert!(!r.chance(0.0));
        assert!(r.chance(1.0));
    }
}
