//! The loops without tables: shifts of words, on any processor.
//!
//! The polynomial of CRC-32 divides 1 + x^a + x^b + x^c + x^d for no smaller d than 300. So what a word weighs can be added
//! to four places behind it, 145 to 300 bits further on, and the word forgotten: no table is looked at, and five words of
//! what is still to be added are all that is remembered (S. Russell, "Chorba: A novel CRC32 implementation", 2024). The
//! last of the bytes, and short inputs, go by the tables. A function with `COPY` also stores each word that it loaded, from
//! the same register.
#![allow(unsafe_code)] // Loads and stores through raw pointers: the memory may be registered.

use super::table;

/// Words that a word reaches behind itself.
const REACH: usize = 5;
/// Bytes of a round: after so many words each sum has its old place.
const ROUND: usize = REACH * size_of::<u64>();
/// Shortest input for this loop: below, the tables that its end goes by cost as much as it saves.
const SPARSE_FROM: usize = 4 * ROUND;

/// The CRC of `len` bytes at `from`, after `crc`; with `COPY` they are copied to `to`.
///
/// # Safety
/// `from..from + len` is readable; with `COPY`, `to..to + len` is writable and does not overlap it.
pub(super) unsafe fn run<const COPY: bool>(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    if len < SPARSE_FROM {
        // SAFETY: as the caller promises.
        return unsafe { table::run::<COPY>(crc, from, to, len) };
    }
    let mut at = 0;
    let mut take = || {
        // SAFETY: the loops below ask for a word only where one is left at both ends.
        let word = unsafe { from.add(at).cast::<u64>().read_unaligned() };
        if COPY {
            // SAFETY: as above.
            unsafe { to.add(at).cast::<u64>().write_unaligned(word) };
        }
        at += size_of::<u64>();
        u64::from_le(word)
    };
    // What is to be added to the words from here on.
    let mut sums = [u64::from(!crc), 0, 0, 0, 0];
    // The last sums need words to be added to.
    for _ in 0..len / ROUND - 1 {
        let [mut a, mut b, mut c, mut d, mut e] = sums;
        a = add(take() ^ a, &mut c, &mut d, &mut e);
        b = add(take() ^ b, &mut d, &mut e, &mut a);
        c = add(take() ^ c, &mut e, &mut a, &mut b);
        d = add(take() ^ d, &mut a, &mut b, &mut c);
        e = add(take() ^ e, &mut b, &mut c, &mut d);
        sums = [a, b, c, d, e];
    }
    let register = sums.into_iter().fold(0, |register, sum| table::after_word(register, take() ^ sum));
    // SAFETY: what is left, as the caller promises.
    unsafe { table::run::<COPY>(!register, from.add(at), to.wrapping_add(at), len - at) }
}

/// Adds what `word` weighs to the words two, three and four behind it; returns what there is to be added to the fifth.
/// The lowest bit of a word is its highest power: 145, 183, 211 and 300 bits further on.
#[inline(always)]
fn add(word: u64, second: &mut u64, third: &mut u64, fourth: &mut u64) -> u64 {
    *second ^= (word << 17) ^ (word << 55);
    *third ^= (word >> 47) ^ (word >> 9) ^ (word << 19);
    *fourth ^= (word >> 45) ^ (word << 44);
    word >> 20
}

#[cfg(test)]
mod tests {
    /// What the loop rests on, by division: 1 = x^-145 + x^-183 + x^-211 + x^-300.
    #[test]
    fn a_sparse_multiple_of_the_polynomial() {
        const WHOLE: u64 = 0x1_04C1_1DB7;
        let power = |n: u32| {
            (0..n).fold(1u64, |value, _| {
                let value = value << 1;
                if value >> 32 == 0 { value } else { value ^ WHOLE }
            })
        };
        let terms = [300, 300 - 145, 300 - 183, 300 - 211, 0].map(power);
        assert_eq!(terms.into_iter().fold(0, |sum, term| sum ^ term), 0);
    }
}
