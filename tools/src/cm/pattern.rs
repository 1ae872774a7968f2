//! The bytes that the servers send, by which a client that is uroce too can tell that they came whole.
//!
//! Owns the pattern: each byte is the one before it and [`STEP`] more, and connection `n` begins with `n`.

/// Odd, so that all 256 values come before one comes again.
const STEP: u8 = 7;

/// The message of connection `number`.
pub(super) fn message(number: usize, size: usize) -> Vec<u8> {
    let first = number.to_le_bytes()[0];
    core::iter::successors(Some(first), |byte| Some(byte.wrapping_add(STEP))).take(size).collect()
}

/// The first byte that does not follow from the one before it.
pub(super) fn first_wrong(bytes: &[u8]) -> Option<usize> {
    bytes.windows(2).position(|pair| pair[1] != pair[0].wrapping_add(STEP)).map(|at| at + 1)
}

/// The first byte that is not the one of `wanted`.
pub(super) fn first_other(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.iter().zip(wanted).position(|(came, wanted)| came != wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_right_and_differ_by_connection() {
        for size in [0, 1, 2, 100, 1000] {
            assert_eq!(first_wrong(&message(300, size)), None);
        }
        assert_eq!(message(2, 3), [2, 9, 16]);
        assert_eq!(message(255, 2), [255, 6]);
    }

    #[test]
    fn a_wrong_byte_is_found() {
        let mut bytes = message(1, 50);
        bytes[20] ^= 1;
        assert_eq!(first_wrong(&bytes), Some(20));
        assert_eq!(first_wrong(&[0, 0]), Some(1));
    }
}
