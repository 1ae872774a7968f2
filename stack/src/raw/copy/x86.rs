//! The loops for x86-64: AVX2 and carry-less multiplication.
//!
//! The CRC folds, as in Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel,
//! 2009): a block of 16 bytes that stands `n` bytes before another one weighs as much as its two halves, each multiplied
//! by a power of x that depends on `n` alone, added to the other block. What is left of all blocks is one, and its
//! remainder is the CRC.
//!
//! A function with `COPY` also stores each block that it loaded, from the same register.
#![allow(unsafe_code)] // Vector loads and stores through raw pointers.
#![allow(clippy::cast_ptr_alignment)] // All loads and stores are the unaligned ones.

use core::arch::x86_64::*;

use super::Kernel;

/// The polynomial of CRC-32, x^32 left out, highest power first.
const POLYNOMIAL: u32 = 0x04C1_1DB7;
/// Shortest input for 32 bytes at a time: below, joining the lanes costs more than they save.
const WIDE_FROM: usize = 256;
/// Shortest input for 64 bytes at a time.
const WIDEST_FROM: usize = 512;
/// Bytes of a cache line.
const LINE: usize = 64;
/// How far ahead of itself a copy asks for the lines that it will write: another processor may have them, as the one that
/// reads what we copied does, and a store that waits for its line holds up every load behind it that needs a store's bytes.
const WRITE_AHEAD: usize = 1024;
/// How far ahead of itself a CRC asks for what it will read: the processor's own prefetching ends with each page.
const READ_AHEAD: usize = 4096;
/// x^n modulo the polynomial, as a reflected factor.
const fn power(n: usize) -> i64 {
    let mut value = 1u32;
    let mut i = 0;
    while i < n {
        let carry = value >> 31 != 0;
        value <<= 1;
        if carry {
            value ^= POLYNOMIAL;
        }
        i += 1;
    }
    (value.reverse_bits() as i64) << 1
}

/// The two factors that move a block `bytes` ahead: of its low and of its high half.
const fn ahead(bytes: usize) -> [i64; 2] {
    [power(bytes * 8 + 32), power(bytes * 8 - 32)]
}

const AHEAD_16: [i64; 2] = ahead(16);
const AHEAD_32: [i64; 2] = ahead(32);
const AHEAD_48: [i64; 2] = ahead(48);
const AHEAD_64: [i64; 2] = ahead(64);
const AHEAD_96: [i64; 2] = ahead(96);
const AHEAD_128: [i64; 2] = ahead(128);
const AHEAD_192: [i64; 2] = ahead(192);
const AHEAD_256: [i64; 2] = ahead(256);
/// From 64 bits to 32.
const LAST_FOLD: i64 = power(64);
/// The polynomial and the quotient x^64 / P, for Barrett's reduction; both reflected.
const BARRETT: [i64; 2] = [0x1_DB71_0641, 0x1_F701_1641];

/// Shuffles: the 16 bytes from `n` on shift a block to the back by `16 - n`, those from `16 + n` on to the front by `n`.
/// 0x80 makes a zero.
static SHIFTS: [u8; 48] = {
    let mut table = [0x80; 48];
    let mut i = 0;
    while i < 16 {
        table[16 + i] = i as u8;
        i += 1;
    }
    table
};

/// Remainders of single bytes, for what is shorter than four.
static BYTES: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut value = i as u32;
        let mut bit = 0;
        while bit < 8 {
            value = (value >> 1) ^ (POLYNOMIAL.reverse_bits() & 0u32.wrapping_sub(value & 1));
            bit += 1;
        }
        table[i] = value;
        i += 1;
    }
    table
};

/// The CRC of `len` bytes at `from`, after `crc`; with `COPY` they are copied to `to`.
///
/// # Safety
/// The processor has what `kernel` needs, which is not [`Kernel::Portable`]. `from..from + len` is readable; with `COPY`
/// `to..to + len` is writable and does not overlap it.
#[inline]
pub(super) unsafe fn run<const COPY: bool>(kernel: Kernel, crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    let at = Cursor { from, to, len };
    // SAFETY: the caller promises the instructions and the ranges; each function gets the lengths that it asks for.
    unsafe {
        match kernel {
            Kernel::Widest if len >= WIDEST_FROM => fold_64::<COPY>(crc, at),
            Kernel::Widest | Kernel::Wide if len >= WIDE_FROM => fold_32::<COPY>(crc, at),
            _ if len >= 16 => fold_16::<COPY>(crc, at),
            _ => short::<COPY>(crc, at),
        }
    }
}

/// Where a loop stands.
#[derive(Clone, Copy)]
struct Cursor {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

impl Cursor {
    /// Loads 16 bytes, stores them with `COPY`, and moves on.
    ///
    /// # Safety
    /// There are 16 bytes left.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn take_16<const COPY: bool>(&mut self) -> __m128i {
        // SAFETY: 16 bytes are left at both ends, so the pointers stay inside or one past them.
        unsafe {
            let block = _mm_loadu_si128(self.from.cast());
            if COPY {
                _mm_storeu_si128(self.to.cast(), block);
            }
            self.advance::<COPY>(16);
            block
        }
    }

    /// As [`Self::take_16`], of 32.
    ///
    /// # Safety
    /// There are 32 bytes left.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn take_32<const COPY: bool>(&mut self) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let block = _mm256_loadu_si256(self.from.cast());
            if COPY {
                _mm256_storeu_si256(self.to.cast(), block);
            }
            self.advance::<COPY>(32);
            block
        }
    }

    /// As [`Self::take_16`], of 64.
    ///
    /// # Safety
    /// There are 64 bytes left.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn take_64<const COPY: bool>(&mut self) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let block = _mm512_loadu_si512(self.from.cast());
            if COPY {
                _mm512_storeu_si512(self.to.cast(), block);
            }
            self.advance::<COPY>(64);
            block
        }
    }

    /// Asks for a line that will be needed soon: the one that a copy writes, or a CRC reads. Where nothing is mapped, or
    /// the processor does not know how, nothing happens.
    #[inline]
    fn ask_ahead<const COPY: bool>(&self, line: usize) {
        if COPY {
            let place = self.to.wrapping_add(WRITE_AHEAD + line * LINE);
            // SAFETY: a hint, which touches neither memory nor registers. The compiler's own prefetch for writing is one
            // for reading where the target may be a processor without this instruction; every one with AVX2 takes it.
            unsafe { core::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, preserves_flags)) };
        } else {
            let place = self.from.wrapping_add(READ_AHEAD + line * LINE);
            // SAFETY: a hint.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
        }
    }

    /// # Safety
    /// There are `by` bytes left.
    #[inline]
    unsafe fn advance<const COPY: bool>(&mut self, by: usize) {
        // SAFETY: inside the ranges, or one past them.
        unsafe {
            self.from = self.from.add(by);
            if COPY {
                self.to = self.to.add(by);
            }
        }
        self.len -= by;
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn factors(pair: [i64; 2]) -> __m128i {
    _mm_set_epi64x(pair[1], pair[0])
}

/// `block`, moved ahead by what `by` says, on top of `onto`.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
fn fold(block: __m128i, by: __m128i, onto: __m128i) -> __m128i {
    let low = _mm_clmulepi64_si128::<0x00>(block, by);
    let high = _mm_clmulepi64_si128::<0x11>(block, by);
    _mm_xor_si128(_mm_xor_si128(low, high), onto)
}

#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold_wide(block: __m256i, by: __m256i, onto: __m256i) -> __m256i {
    let low = _mm256_clmulepi64_epi128::<0x00>(block, by);
    let high = _mm256_clmulepi64_epi128::<0x11>(block, by);
    _mm256_xor_si256(_mm256_xor_si256(low, high), onto)
}

#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold_widest(block: __m512i, by: __m512i, onto: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(block, by);
    let high = _mm512_clmulepi64_epi128::<0x11>(block, by);
    // 0x96 is the exclusive or of three.
    _mm512_ternarylogic_epi64::<0x96>(low, high, onto)
}

/// The CRC so far as it goes into the first block.
#[inline]
#[target_feature(enable = "avx2")]
fn initial(crc: u32) -> __m128i {
    _mm_cvtsi32_si128((!crc).cast_signed())
}

/// # Safety
/// As [`run`], and there are 16 bytes at the least.
#[target_feature(enable = "avx2,pclmulqdq")]
unsafe fn fold_16<const COPY: bool>(crc: u32, mut at: Cursor) -> u32 {
    // SAFETY: each take is behind a comparison with what is left.
    unsafe {
        let mut last = at.take_16::<COPY>();
        let mut x = _mm_xor_si128(last, initial(crc));
        if at.len >= 48 {
            let mut lanes = [x, at.take_16::<COPY>(), at.take_16::<COPY>(), at.take_16::<COPY>()];
            last = lanes[3];
            let by = factors(AHEAD_64);
            while at.len >= 64 {
                at.ask_ahead::<COPY>(0);
                for lane in &mut lanes {
                    last = at.take_16::<COPY>();
                    *lane = fold(*lane, by, last);
                }
            }
            let [a, b, c, d] = lanes;
            let ab = fold(a, factors(AHEAD_48), fold(b, factors(AHEAD_32), d));
            x = fold(c, factors(AHEAD_16), ab);
        }
        finish::<COPY>(x, last, at)
    }
}

/// # Safety
/// As [`run`], and there are 128 bytes at the least.
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
unsafe fn fold_32<const COPY: bool>(crc: u32, mut at: Cursor) -> u32 {
    // SAFETY: each take is behind a comparison with what is left.
    unsafe {
        let first = at.take_32::<COPY>();
        let first = _mm256_xor_si256(first, _mm256_zextsi128_si256(initial(crc)));
        let mut lanes = [first, at.take_32::<COPY>(), at.take_32::<COPY>(), at.take_32::<COPY>()];
        let mut last = lanes[3];
        let by = _mm256_broadcastsi128_si256(factors(AHEAD_128));
        while at.len >= 128 {
            for line in 0..2 {
                at.ask_ahead::<COPY>(line);
            }
            for lane in &mut lanes {
                last = at.take_32::<COPY>();
                *lane = fold_wide(*lane, by, last);
            }
        }
        let x = join_32(lanes);
        finish::<COPY>(x, _mm256_extracti128_si256::<1>(last), at)
    }
}

/// Four lanes of 32 bytes into 16.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn join_32([a, b, c, d]: [__m256i; 4]) -> __m128i {
    let by = |pair| _mm256_broadcastsi128_si256(factors(pair));
    let ab = fold_wide(a, by(AHEAD_96), fold_wide(b, by(AHEAD_64), d));
    let all = fold_wide(c, by(AHEAD_32), ab);
    fold(_mm256_castsi256_si128(all), factors(AHEAD_16), _mm256_extracti128_si256::<1>(all))
}

/// # Safety
/// As [`run`], and there are 256 bytes at the least.
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq,avx512f")]
unsafe fn fold_64<const COPY: bool>(crc: u32, mut at: Cursor) -> u32 {
    // SAFETY: each take is behind a comparison with what is left.
    unsafe {
        let first = at.take_64::<COPY>();
        let first = _mm512_xor_si512(first, _mm512_zextsi128_si512(initial(crc)));
        let mut lanes = [first, at.take_64::<COPY>(), at.take_64::<COPY>(), at.take_64::<COPY>()];
        let mut last = lanes[3];
        let by = _mm512_broadcast_i32x4(factors(AHEAD_256));
        while at.len >= 256 {
            for line in 0..4 {
                at.ask_ahead::<COPY>(line);
            }
            for lane in &mut lanes {
                last = at.take_64::<COPY>();
                *lane = fold_widest(*lane, by, last);
            }
        }
        let by = _mm512_broadcast_i32x4(factors(AHEAD_64));
        let [a, b, c, d] = lanes;
        let far = _mm512_broadcast_i32x4(factors(AHEAD_192));
        let middle = _mm512_broadcast_i32x4(factors(AHEAD_128));
        let mut all = fold_widest(c, by, fold_widest(a, far, fold_widest(b, middle, d)));
        while at.len >= 64 {
            last = at.take_64::<COPY>();
            all = fold_widest(all, by, last);
        }
        let low = _mm512_castsi512_si256(all);
        let both = fold_wide(low, _mm256_broadcastsi128_si256(factors(AHEAD_32)), _mm512_extracti64x4_epi64::<1>(all));
        let x = fold(_mm256_castsi256_si128(both), factors(AHEAD_16), _mm256_extracti128_si256::<1>(both));
        finish::<COPY>(x, _mm512_extracti32x4_epi32::<3>(last), at)
    }
}

/// Takes what is left, block by block, then the bytes after the last whole block, and reduces. `last` is what was loaded
/// last, as it was.
///
/// # Safety
/// As [`run`], and at least 16 bytes have been taken.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
unsafe fn finish<const COPY: bool>(mut x: __m128i, mut last: __m128i, mut at: Cursor) -> u32 {
    // SAFETY: each take is behind a comparison with what is left.
    unsafe {
        while at.len >= 16 {
            last = at.take_16::<COPY>();
            x = fold(x, factors(AHEAD_16), last);
        }
        if at.len > 0 {
            x = tail::<COPY>(x, last, at);
        }
    }
    reduce(x)
}

/// Takes the last 1 to 15 bytes: what was folded so far and these are as many bytes more than a block, so the front of
/// the former is moved ahead by a block, and the rest shifted to make room for the latter.
///
/// # Safety
/// As [`run`]; 1 to 15 bytes are left, and at least 16 have been taken. `last` holds these 16 as they were loaded.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
unsafe fn tail<const COPY: bool>(x: __m128i, last: __m128i, at: Cursor) -> __m128i {
    // SAFETY: the loads start at 0 to 16 of 48 and at 16 to 32; the 16 bytes that end with the range are inside it.
    unsafe {
        let to_back = _mm_loadu_si128(SHIFTS.as_ptr().add(at.len).cast());
        let to_front = _mm_loadu_si128(SHIFTS.as_ptr().add(16 + at.len).cast());
        // Its first bytes were loaded before, and may have changed: only the new ones count. In `to_front` exactly
        // their places have the highest bit, which both zeroes them in a shuffle and selects them in a blend.
        let end = _mm_loadu_si128(at.from.add(at.len).sub(16).cast());
        if COPY {
            let written = _mm_blendv_epi8(_mm_shuffle_epi8(last, to_front), end, to_front);
            _mm_storeu_si128(at.to.add(at.len).sub(16).cast(), written);
        }
        let back = _mm_blendv_epi8(_mm_shuffle_epi8(x, to_front), end, to_front);
        fold(_mm_shuffle_epi8(x, to_back), factors(AHEAD_16), back)
    }
}

/// The CRC of a message that is one block.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
fn reduce(x: __m128i) -> u32 {
    let low_32 = _mm_set_epi32(0, 0, 0, !0);
    let x = _mm_xor_si128(_mm_clmulepi64_si128::<0x10>(x, factors(AHEAD_16)), _mm_srli_si128::<8>(x));
    let x = _mm_xor_si128(
        _mm_clmulepi64_si128::<0x00>(_mm_and_si128(x, low_32), factors([LAST_FOLD, 0])),
        _mm_srli_si128::<4>(x),
    );
    let barrett = factors(BARRETT);
    let quotient = _mm_clmulepi64_si128::<0x10>(_mm_and_si128(x, low_32), barrett);
    let product = _mm_clmulepi64_si128::<0x00>(_mm_and_si128(quotient, low_32), barrett);
    !_mm_extract_epi32::<1>(_mm_xor_si128(x, product)).cast_unsigned()
}

/// Less than a block. Leading zeros do not change a remainder, so the bytes stand at the end of a block.
///
/// # Safety
/// As [`run`], and there are 15 bytes at the most.
#[target_feature(enable = "avx2,pclmulqdq")]
unsafe fn short<const COPY: bool>(crc: u32, at: Cursor) -> u32 {
    if at.len < 4 {
        // SAFETY: as the caller promises.
        return unsafe { shortest::<COPY>(crc, at) };
    }
    // SAFETY: two loads of half the bytes or more cover them all, and stay inside. Where they overlap, the second one
    // is what is written last, and what counts.
    let bytes = unsafe {
        if at.len == 12 {
            // A BTH. Each load is of what one store wrote, so that neither waits until the store has reached the cache.
            let (low, high) = (at.from.cast::<u64>().read_unaligned(), at.from.add(8).cast::<u32>().read_unaligned());
            if COPY {
                at.to.cast::<u64>().write_unaligned(low);
                at.to.add(8).cast::<u32>().write_unaligned(high);
            }
            u128::from(low) | u128::from(high) << 64
        } else if at.len >= 8 {
            let (low, high) = (at.from.cast::<u64>().read_unaligned(), at.from.add(at.len - 8).cast::<u64>());
            let high = high.read_unaligned();
            if COPY {
                at.to.cast::<u64>().write_unaligned(low);
                at.to.add(at.len - 8).cast::<u64>().write_unaligned(high);
            }
            let before = (at.len - 8) * 8;
            u128::from(low) & !(u128::MAX << before) | u128::from(high) << before
        } else {
            let (low, high) = (at.from.cast::<u32>().read_unaligned(), at.from.add(at.len - 4).cast::<u32>());
            let high = high.read_unaligned();
            if COPY {
                at.to.cast::<u32>().write_unaligned(low);
                at.to.add(at.len - 4).cast::<u32>().write_unaligned(high);
            }
            let before = (at.len - 4) * 8;
            u128::from(low) & !(u128::MAX << before) | u128::from(high) << before
        }
    };
    let block = (bytes ^ u128::from(!crc)) << ((16 - at.len) * 8);
    #[allow(clippy::cast_possible_truncation)] // The two halves.
    let (low, high) = ((block as u64).cast_signed(), ((block >> 64) as u64).cast_signed());
    reduce(_mm_set_epi64x(high, low))
}

/// # Safety
/// As [`run`].
#[cold]
unsafe fn shortest<const COPY: bool>(crc: u32, at: Cursor) -> u32 {
    let mut register = !crc;
    for i in 0..at.len {
        // SAFETY: inside the ranges.
        let byte = unsafe { at.from.add(i).read() };
        if COPY {
            // SAFETY: as above.
            unsafe { at.to.add(i).write(byte) };
        }
        register = (register >> 8) ^ BYTES[usize::from(register.to_le_bytes()[0] ^ byte)];
    }
    !register
}

/// Copies in ascending order; the end of the last part may be written twice.
///
/// # Safety
/// The processor has AVX2. `from..from + len` is readable, `to..to + len` is writable; they do not overlap.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len < 32 {
        // SAFETY: as the caller promises.
        return unsafe { copy_short(from, to, len) };
    }
    // SAFETY: each take is behind a comparison with what is left; the last 32 bytes are inside, as there are 32.
    unsafe {
        let mut at = Cursor { from, to, len };
        while at.len >= 128 {
            let block = |i: usize| _mm256_loadu_si256(at.from.cast::<__m256i>().add(i));
            let blocks = [block(0), block(1), block(2), block(3)];
            for (i, block) in blocks.into_iter().enumerate() {
                _mm256_storeu_si256(at.to.cast::<__m256i>().add(i), block);
            }
            at.advance::<true>(128);
        }
        while at.len >= 32 {
            at.take_32::<true>();
        }
        if at.len > 0 {
            let end = _mm256_loadu_si256(from.add(len - 32).cast());
            _mm256_storeu_si256(to.add(len - 32).cast(), end);
        }
    }
}

/// # Safety
/// As [`copy`], and there are 31 bytes at the most.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn copy_short(from: *const u8, to: *mut u8, len: usize) {
    /// Two pieces that cover between one and two of them.
    ///
    /// # Safety
    /// As `copy`, and `len` is between the size of `T` and twice that.
    #[inline]
    unsafe fn two<T>(from: *const u8, to: *mut u8, len: usize) {
        let end = len - size_of::<T>();
        // SAFETY: both pieces are inside.
        unsafe {
            let (low, high) = (from.cast::<T>().read_unaligned(), from.add(end).cast::<T>().read_unaligned());
            to.cast::<T>().write_unaligned(low);
            to.add(end).cast::<T>().write_unaligned(high);
        }
    }
    // SAFETY: each piece is for a length in its range.
    unsafe {
        match len {
            0 => {}
            1 => to.write(from.read()),
            2..4 => two::<u16>(from, to, len),
            4..8 => two::<u32>(from, to, len),
            8..16 => two::<u64>(from, to, len),
            _ => two::<__m128i>(from, to, len),
        }
    }
}
