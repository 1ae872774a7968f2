//! Content that can be checked: every message has bytes of its own.
//!
//! Owns the generator. Two messages differ in every word, so a packet that lands in the wrong place is seen.

/// Odd constants without a pattern of their own (from the golden ratio and the square root of two).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD: u64 = 0x6a09_e667_f3bc_c909;

/// Fills `out` with the content of message `number` of stream `stream`.
pub(super) fn fill(stream: u32, number: u64, out: &mut [u8]) {
    let mut words = words(stream, number);
    for chunk in out.chunks_mut(8) {
        let word = words.next().unwrap_or_default().to_le_bytes();
        for (to, from) in chunk.iter_mut().zip(word) {
            *to = from;
        }
    }
}

/// The offset of the first byte of `bytes` that is not the content of message `number` of `stream`.
pub(super) fn first_wrong(stream: u32, number: u64, bytes: &[u8]) -> Option<usize> {
    let mut words = words(stream, number);
    bytes.chunks(8).enumerate().find_map(|(i, chunk)| {
        let word = words.next().unwrap_or_default().to_le_bytes();
        let wrong = chunk.iter().zip(word).position(|(have, want)| *have != want)?;
        Some(i * 8 + wrong)
    })
}

fn words(stream: u32, number: u64) -> impl Iterator<Item = u64> {
    let first = number.wrapping_mul(STEP) ^ u64::from(stream).wrapping_mul(STEP.rotate_left(32));
    (0..).map(move |i: u64| {
        let mixed = first.wrapping_add(i.wrapping_mul(SPREAD));
        mixed ^ mixed >> 29
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_its_own_and_a_flipped_bit_is_found() {
        for len in [0, 1, 7, 8, 9, 4096] {
            let mut bytes = vec![0; len];
            fill(3, 77, &mut bytes);
            assert_eq!(first_wrong(3, 77, &bytes), None);
            if len > 0 {
                let at = len - 1;
                bytes[at] ^= 1;
                assert_eq!(first_wrong(3, 77, &bytes), Some(at));
                bytes[at] ^= 1;
                assert!(first_wrong(3, 78, &bytes).is_some());
                assert!(first_wrong(4, 77, &bytes).is_some());
            }
        }
    }

    #[test]
    fn no_word_of_a_message_is_repeated() {
        let mut all: Vec<u64> = words(1, 5).take(10_000).chain(words(1, 6).take(10_000)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 20_000);
    }
}
