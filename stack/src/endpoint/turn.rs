//! How long a QP may send while others wait.
//!
//! Owns the account of one QP: a round robin by what bursts cost, not by their number. Never knows who waits.

/// What a QP may send in a turn, in bytes: about one superframe.
pub const TURN_BYTES: usize = 64 << 10;
/// What a burst costs beside its bytes, in bytes: handing a burst over takes a device about as long as it takes to fill
/// so many bytes of one. A QP of small packets sends a handful of them in its turn, and one of superframes sends one.
pub const BURST_BYTES: usize = 8 << 10;

/// What a QP has sent of its turn.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn(usize);

impl Turn {
    /// Notes a burst of `len` bytes; says whether the turn ends with it. What it went beyond is taken off the next turn,
    /// which has at least one burst all the same.
    pub(super) fn ends_after(&mut self, len: usize) -> bool {
        self.0 += BURST_BYTES + len;
        let ends = self.0 >= TURN_BYTES;
        if ends {
            self.0 = (self.0 - TURN_BYTES).min(TURN_BYTES - 1);
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bursts in each of the first `turns` turns of a QP whose bursts have `len` bytes.
    fn bursts(len: usize, turns: usize) -> Vec<usize> {
        let mut turn = Turn::default();
        let count =
            |turn: &mut Turn| 1 + core::iter::repeat_with(|| turn.ends_after(len)).take_while(|ends| !ends).count();
        (0..turns).map(|_| count(&mut turn)).collect()
    }

    #[test]
    fn a_superframe_is_a_turn_and_so_are_a_few_small_packets() {
        assert_eq!(bursts(15 * 4124, 50), [1; 50]);
        assert_eq!(bursts(0, 3), [8; 3]);
        let small: usize = bursts(80, 100).iter().sum();
        assert_eq!(small, 100 * TURN_BYTES / (BURST_BYTES + 80) + 1);
    }

    #[test]
    fn what_a_turn_went_beyond_is_taken_off_the_next() {
        // Two of 38 KiB are 12 too much; the third turn has 36 KiB less than a whole one, and the fourth ends with one.
        assert_eq!(bursts(30 << 10, 5), [2, 2, 2, 1, 2]);
    }
}
