//! What the bytes of a message are when `--verify` looks at them.
//!
//! Owns a pattern in which every word depends on its place and on a seed: a packet that is missing, doubled or put
//! elsewhere shows, as does what an earlier message left. Never sends.

use crate::exit::Failure;
use crate::rdma::Buffer;

/// Bytes that are made or compared at once.
const CHUNK: usize = 4096;
/// Bytes of a word.
const WORD: usize = 8;

/// The word at place `index`: splitmix64.
fn word(seed: u64, index: u64) -> [u8; WORD] {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

/// Calls `with` for each chunk of `len` bytes of the pattern, with where it begins.
fn chunks(len: usize, seed: u64, mut with: impl FnMut(usize, &[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut chunk = [0; CHUNK];
    let mut at = 0;
    while at < len {
        let n = CHUNK.min(len - at);
        for (index, bytes) in (at / WORD..).zip(chunk[..n].chunks_mut(WORD)) {
            bytes.copy_from_slice(&word(seed, index as u64)[..bytes.len()]);
        }
        with(at, &chunk[..n])?;
        at += n;
    }
    Ok(())
}

/// Writes the pattern of `seed` to `len` bytes from `offset`; seed 0 is all zeroes.
pub(super) fn fill(buffer: &Buffer, offset: usize, len: usize, seed: u64) -> Result<(), Failure> {
    if seed == 0 {
        return buffer.write(offset, &vec![0; len]);
    }
    chunks(len, seed, |at, bytes| buffer.write(offset + at, bytes))
}

/// Where `len` bytes from `offset` first differ from the pattern of `seed`.
pub(super) fn difference(buffer: &Buffer, offset: usize, len: usize, seed: u64) -> Result<Option<u64>, Failure> {
    let mut found = None;
    chunks(len, seed, |at, bytes| {
        if found.is_none() {
            let there = buffer.read(offset + at, bytes.len())?;
            found = there.iter().zip(bytes).position(|(a, b)| a != b).map(|i| (at + i) as u64);
        }
        Ok(())
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use uroce::endpoint::{Endpoint, EndpointConfig};
    use uroce::types::PathMtu;
    use uroce::verbs::{AccessFlags, Verbs};

    use super::*;

    #[test]
    fn a_byte_that_differs_is_found_wherever_it_is() {
        let config = EndpointConfig::new(vec![IpAddr::from([127, 0, 0, 1])], PathMtu::B1024);
        let mut v = Endpoint::new(config, [1; 32]);
        let pd = v.alloc_pd().unwrap();
        let buffer = Buffer::new(&mut v, pd, 3 * CHUNK, AccessFlags::LOCAL_WRITE).unwrap();
        let len = 2 * CHUNK + 5;
        fill(&buffer, 3, len, 9).unwrap();
        assert_eq!(difference(&buffer, 3, len, 9).unwrap(), None);
        assert!(difference(&buffer, 3, len, 10).unwrap().is_some(), "another seed is another content");
        for at in [0, CHUNK - 1, CHUNK, len - 1] {
            let was = buffer.byte(3 + at).unwrap();
            buffer.write(3 + at, &[!was]).unwrap();
            assert_eq!(difference(&buffer, 3, len, 9).unwrap(), Some(at as u64));
            buffer.write(3 + at, &[was]).unwrap();
        }
        fill(&buffer, 3, len, 0).unwrap();
        assert_eq!(buffer.read(3, len).unwrap(), vec![0; len]);
    }

    #[test]
    fn packets_in_the_wrong_place_have_another_content() {
        let mut seen = std::collections::HashSet::new();
        assert!((0..100_000).all(|index| seen.insert(word(1, index))));
    }
}
