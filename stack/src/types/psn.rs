//! The 24-bit packet sequence number and its modular order.

use core::fmt;

/// A packet sequence number: 24 bits, modular.
///
/// There is no `Ord`: whether a PSN lies before another depends on a third, the origin of the comparison
/// (IBTA Vol 1 9.7.2). Use [`Psn::distance_from`] or [`Psn::classify`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

/// Where a received PSN lies relative to the one that is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PsnClass {
    /// The PSN expected next.
    Expected,
    /// One of the 2^23 PSNs before the expected one: a repeat.
    Duplicate,
    /// One of the PSNs after it: something was lost.
    Ahead,
}

impl Psn {
    /// Bits of a PSN.
    pub const MASK: u32 = 0x00FF_FFFF;
    /// PSN 0.
    pub const ZERO: Self = Self(0);

    /// The PSN `v`, or `None` when it does not fit 24 bits.
    #[must_use]
    pub const fn new(v: u32) -> Option<Self> {
        if v <= Self::MASK { Some(Self(v)) } else { None }
    }

    /// The low 24 bits of a wire word.
    #[must_use]
    pub const fn from_wire(bits: u32) -> Self {
        Self(bits & Self::MASK)
    }

    /// The value, 0 to 2^24 - 1.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The PSN after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        self.plus(1)
    }

    /// The PSN `packets` later.
    #[must_use]
    pub const fn plus(self, packets: u32) -> Self {
        Self(self.0.wrapping_add(packets) & Self::MASK)
    }

    /// The PSN `packets` earlier.
    #[must_use]
    pub const fn minus(self, packets: u32) -> Self {
        Self(self.0.wrapping_sub(packets) & Self::MASK)
    }

    /// The signed distance from `origin` to `self`: -2^23 to 2^23 - 1.
    #[must_use]
    #[allow(clippy::cast_possible_wrap)] // The sign of the 24-bit difference is what is wanted.
    pub const fn distance_from(self, origin: Self) -> i32 {
        ((self.0.wrapping_sub(origin.0) << 8) as i32) >> 8
    }

    /// Where `self` lies when `expected` is awaited.
    #[must_use]
    pub const fn classify(self, expected: Self) -> PsnClass {
        match self.distance_from(expected) {
            0 => PsnClass::Expected,
            d if d < 0 => PsnClass::Duplicate,
            _ => PsnClass::Ahead,
        }
    }

    /// Whether `self` lies in the `count` PSNs that begin with `first`.
    #[must_use]
    pub const fn is_within(self, first: Self, count: u32) -> bool {
        (self.0.wrapping_sub(first.0) & Self::MASK) < count
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_at_24_bits() {
        let last = Psn::new(0xFF_FFFF).unwrap();
        assert_eq!(last.next(), Psn::ZERO);
        assert_eq!(Psn::ZERO.minus(1), last);
        assert_eq!(Psn::ZERO.distance_from(last), 1);
        assert_eq!(last.distance_from(Psn::ZERO), -1);
        assert!(Psn::new(0x100_0000).is_none());
    }

    #[test]
    fn half_the_circle_is_duplicate_half_is_ahead() {
        let expected = Psn::from_wire(5);
        assert_eq!(expected.classify(expected), PsnClass::Expected);
        assert_eq!(expected.plus(0x7F_FFFF).classify(expected), PsnClass::Ahead);
        assert_eq!(expected.plus(0x80_0000).classify(expected), PsnClass::Duplicate);
        assert_eq!(expected.minus(1).classify(expected), PsnClass::Duplicate);
    }

    #[test]
    fn range_membership_wraps() {
        let first = Psn::from_wire(0xFF_FFFE);
        assert!(Psn::from_wire(1).is_within(first, 4));
        assert!(!Psn::from_wire(2).is_within(first, 4));
        assert!(!Psn::from_wire(0xFF_FFFD).is_within(first, 4));
    }
}
