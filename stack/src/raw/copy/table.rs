//! The loops with tables: sixteen bytes at a time, on any processor.
//!
//! The remainder of sixteen bytes is the sum of those that each byte would leave alone at its place, and these stand in
//! tables, one a place. A function with `COPY` also stores each piece that it loaded, from the same register.
#![allow(unsafe_code)] // Loads and stores through raw pointers: the memory may be registered.

/// The polynomial of CRC-32, lowest power first.
const POLYNOMIAL: u32 = 0xEDB8_8320;
/// Bytes of a round.
const ROUND: usize = 16;

/// `TABLES[n][byte]`: the remainder that a byte leaves when `n` more bytes follow it.
static TABLES: [[u32; 256]; ROUND] = {
    let mut tables = [[0; 256]; ROUND];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = (value >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(value & 1));
            bit += 1;
        }
        tables[0][byte] = value;
        byte += 1;
    }
    let mut place = 1;
    while place < ROUND {
        let mut byte = 0;
        while byte < 256 {
            let nearer = tables[place - 1][byte];
            tables[place][byte] = (nearer >> 8) ^ tables[0][(nearer & 0xFF) as usize];
            byte += 1;
        }
        place += 1;
    }
    tables
};

/// What the eight bytes of `word` leave when `after` more bytes, 0 or 8, follow them.
#[inline]
fn remainder(word: u64, after: usize) -> u32 {
    let mut sum = 0;
    for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
        sum ^= TABLES[after + 7 - i][usize::from(byte)];
    }
    sum
}

/// The register after a word, lowest byte first.
#[inline]
pub(super) fn after_word(register: u32, word: u64) -> u32 {
    remainder(word ^ u64::from(register), 0)
}

/// The CRC of `len` bytes at `from`, after `crc`; with `COPY` they are copied to `to`.
///
/// # Safety
/// `from..from + len` is readable; with `COPY`, `to..to + len` is writable and does not overlap it.
pub(super) unsafe fn run<const COPY: bool>(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    let mut register = !crc;
    let mut at = 0;
    while len - at >= ROUND {
        // SAFETY: sixteen bytes are left at both ends.
        let words = unsafe { from.add(at).cast::<[u64; 2]>().read_unaligned() };
        if COPY {
            // SAFETY: as above.
            unsafe { to.add(at).cast::<[u64; 2]>().write_unaligned(words) };
        }
        let [first, second] = words.map(u64::from_le);
        register = remainder(first ^ u64::from(register), 8) ^ remainder(second, 0);
        at += ROUND;
    }
    while at < len {
        // SAFETY: a byte is left at both ends.
        let byte = unsafe { from.add(at).read() };
        if COPY {
            // SAFETY: as above.
            unsafe { to.add(at).write(byte) };
        }
        register = (register >> 8) ^ TABLES[0][usize::from(register.to_le_bytes()[0] ^ byte)];
        at += 1;
    }
    !register
}
