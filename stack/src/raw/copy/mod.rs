//! Copies and CRC-32, one pass over the bytes.
//!
//! Owns the loops that touch every payload byte: a copy, a CRC, and both at once, each in the widest form that the
//! processor has, or the one that a measurement found fastest, with portable forms for all others. The fused loop loads a byte once: its CRC
//! is that of the bytes written, whatever another thread does to the source meanwhile. Never knows what the bytes are,
//! nor whose.
//!
//! A CRC here is the common CRC-32 as `crc32fast` has it, finished: that of a first part is where its next part starts.
#![allow(unsafe_code)] // Vector loads and stores through raw pointers: the memory may be registered.

mod sparse;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

use core::hint::black_box;
use core::ptr;
use core::sync::atomic::{AtomicU8, Ordering};

/// A set of loops. Every processor has [`Kernel::Table`], [`Kernel::Sparse`] and [`Kernel::Portable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kernel {
    /// The compiler's copy, and tables.
    Table = 1,
    /// The compiler's copy, and shifts of words. For processors that have the instructions of the others in name: an emulator
    /// multiplies without carries bit by bit, and a look at a table is dear to it.
    Sparse,
    /// The compiler's copy, and `crc32fast`.
    Portable,
    /// AVX2, and PCLMULQDQ on 16 bytes at a time.
    Clmul,
    /// AVX2, and VPCLMULQDQ on 32 bytes at a time.
    Wide,
    /// AVX-512, and VPCLMULQDQ on 64 bytes at a time.
    Widest,
}

/// The kernel that is used, or 0 before anyone has asked.
static USED: AtomicU8 = AtomicU8::new(0);
/// The widest that the processor has, or 0 before anyone has asked.
static DETECTED: AtomicU8 = AtomicU8::new(0);
/// Set once [`Kernel::choose`] has measured.
static MEASURED: AtomicU8 = AtomicU8::new(0);

/// Bytes that [`Kernel::choose`] copies at a time.
const TRIAL: usize = 2048;
/// How often, all kernels in turns: of times that others may lengthen the shortest counts, and a processor that has to wake
/// its wide units first, for some ten microseconds, has time to.
const TRIALS: usize = 64;
/// A wider kernel is left for a narrower one that takes less than 4 in 5 of its time: so much is no accident.
const CLEARLY: (u64, u64) = (4, 5);

impl Kernel {
    /// All of them, from the slowest to the fastest.
    pub const ALL: [Self; 6] = [Self::Table, Self::Sparse, Self::Portable, Self::Clmul, Self::Wide, Self::Widest];

    /// Whether this processor has what the kernel needs.
    #[must_use]
    pub fn is_available(self) -> bool {
        self <= Self::detected()
    }

    /// The one that is used: the widest that this processor has, or what [`Self::choose`] found.
    #[inline]
    #[must_use]
    pub fn best() -> Self {
        match Self::from_code(USED.load(Ordering::Relaxed)) {
            Some(kernel) => kernel,
            None => Self::detected(),
        }
    }

    /// Measures the kernels that this processor has, once in the life of the process, and uses the fastest from then on. What
    /// they compute is the same. Takes about a tenth of a millisecond, under an emulator one. `nanoseconds` reads a clock
    /// that only goes forward: drivers have one.
    pub fn choose(nanoseconds: impl Fn() -> u64) {
        if MEASURED.swap(1, Ordering::Relaxed) != 0 {
            return;
        }
        let (from, mut to) = ([0x5A; TRIAL], [0; TRIAL]);
        let mut times = [u64::MAX; Self::ALL.len()];
        for _ in 0..TRIALS {
            for (kernel, best) in Self::ALL.into_iter().zip(&mut times).filter(|(kernel, _)| kernel.is_available()) {
                let begin = nanoseconds();
                black_box(kernel.copy_crc(0, black_box(&from), &mut to));
                *best = (*best).min(nanoseconds().saturating_sub(begin));
            }
        }
        USED.store(Self::fastest(Self::detected(), times) as u8, Ordering::Relaxed);
    }

    /// Of kernels that took `times`, in the order of [`Self::ALL`], the one to use where `widest` is the widest.
    fn fastest(widest: Self, times: [u64; Self::ALL.len()]) -> Self {
        let timed = || Self::ALL.into_iter().zip(times).filter(|(kernel, _)| *kernel <= widest);
        let of_widest = timed().next_back().map_or(0, |(_, time)| time);
        let quickest = timed().min_by_key(|(_, time)| *time);
        quickest
            .filter(|(_, time)| time.saturating_mul(CLEARLY.1) < of_widest.saturating_mul(CLEARLY.0))
            .map_or(widest, |(kernel, _)| kernel)
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => None,
            1 => Some(Self::Table),
            2 => Some(Self::Sparse),
            3 => Some(Self::Portable),
            4 => Some(Self::Clmul),
            5 => Some(Self::Wide),
            _ => Some(Self::Widest),
        }
    }

    /// The widest that this processor has. Asks it once.
    fn detected() -> Self {
        Self::from_code(DETECTED.load(Ordering::Relaxed)).unwrap_or_else(Self::detect)
    }

    #[cold]
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let widest = if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("pclmulqdq")) {
            Self::Portable
        } else if !is_x86_feature_detected!("vpclmulqdq") {
            Self::Clmul
        } else if !is_x86_feature_detected!("avx512f") {
            Self::Wide
        } else {
            Self::Widest
        };
        #[cfg(not(target_arch = "x86_64"))]
        let widest = Self::Portable;
        DETECTED.store(widest as u8, Ordering::Relaxed);
        // One that was measured stays.
        let _ = USED.compare_exchange(0, widest as u8, Ordering::Relaxed, Ordering::Relaxed);
        widest
    }

    /// This kernel, or the best below it that the processor has.
    fn supported(self) -> Self {
        self.min(Self::detected())
    }

    /// [`crc`] by this kernel, or by the best below it that the processor has.
    #[must_use]
    pub fn crc(self, crc: u32, bytes: &[u8]) -> u32 {
        // SAFETY: the slice is readable.
        unsafe { crc_with(self.supported(), crc, bytes.as_ptr(), bytes.len()) }
    }

    /// [`copy_crc`] by this kernel, or by the best below it that the processor has.
    #[must_use]
    pub fn copy_crc(self, crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
        let len = from.len().min(to.len());
        // SAFETY: both slices hold `len` bytes and do not overlap.
        unsafe { copy_crc_with(self.supported(), crc, from.as_ptr(), to.as_mut_ptr(), len) }
    }

    /// [`copy`] by this kernel, or by the best below it that the processor has.
    pub fn copy(self, from: &[u8], to: &mut [u8]) {
        let len = from.len().min(to.len());
        // SAFETY: both slices hold `len` bytes and do not overlap.
        unsafe { copy_with(self.supported(), from.as_ptr(), to.as_mut_ptr(), len) }
    }
}

/// The CRC of `bytes` after bytes whose CRC is `crc`; 0 is that of none.
#[inline]
#[must_use]
pub fn crc(crc: u32, bytes: &[u8]) -> u32 {
    // SAFETY: the slice is readable.
    unsafe { crc_with(Kernel::best(), crc, bytes.as_ptr(), bytes.len()) }
}

/// Copies the front of `from` to the front of `to`, as much as both hold, and goes on with the CRC of these bytes.
#[inline]
#[must_use]
pub fn copy_crc(crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
    let len = from.len().min(to.len());
    // SAFETY: both slices hold `len` bytes and do not overlap.
    unsafe { copy_crc_raw(crc, from.as_ptr(), to.as_mut_ptr(), len) }
}

/// Copies the front of `from` to the front of `to`, as much as both hold.
#[inline]
pub fn copy(from: &[u8], to: &mut [u8]) {
    let len = from.len().min(to.len());
    // SAFETY: both slices hold `len` bytes and do not overlap.
    unsafe { copy_raw(from.as_ptr(), to.as_mut_ptr(), len) }
}

/// [`copy_crc`] for memory that others may be changing: the CRC is that of the bytes as they are in `to` afterwards.
///
/// # Safety
/// `from..from + len` is readable, `to..to + len` is writable and nobody else's; they do not overlap.
#[inline]
pub(crate) unsafe fn copy_crc_raw(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    // SAFETY: as the caller promises; the kernel is one that the processor has.
    unsafe { copy_crc_with(Kernel::best(), crc, from, to, len) }
}

/// [`copy`] for memory that others may be changing. Bytes are placed in ascending order, some of them twice.
///
/// # Safety
/// `from..from + len` is readable and `to..to + len` is writable; they do not overlap.
#[inline]
pub(crate) unsafe fn copy_raw(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises; the kernel is one that the processor has.
    unsafe { copy_with(Kernel::best(), from, to, len) }
}

/// # Safety
/// The processor has the kernel; `from..from + len` is readable and does not change.
#[inline]
unsafe fn crc_with(kernel: Kernel, crc: u32, from: *const u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if kernel >= Kernel::Clmul {
        // SAFETY: the processor has AVX2 and PCLMULQDQ at the least, and wider ones as the kernel says; nothing is
        // written.
        return unsafe { x86::run::<false>(kernel, crc, from, ptr::null_mut(), len) };
    }
    if kernel == Kernel::Table {
        // SAFETY: as the caller promises; nothing is written.
        return unsafe { table::run::<false>(crc, from, ptr::null_mut(), len) };
    }
    if kernel == Kernel::Sparse {
        // SAFETY: as above.
        return unsafe { sparse::run::<false>(crc, from, ptr::null_mut(), len) };
    }
    // SAFETY: readable and unchanged, as the caller promises.
    portable_crc(crc, unsafe { core::slice::from_raw_parts(from, len) })
}

/// # Safety
/// The processor has the kernel; the rest as for [`copy_crc_raw`].
#[inline]
unsafe fn copy_crc_with(kernel: Kernel, crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if kernel >= Kernel::Clmul {
        // SAFETY: the processor has the kernel's instructions; the ranges are as the caller promises.
        return unsafe { x86::run::<true>(kernel, crc, from, to, len) };
    }
    if kernel == Kernel::Table {
        // SAFETY: as the caller promises.
        return unsafe { table::run::<true>(crc, from, to, len) };
    }
    if kernel == Kernel::Sparse {
        // SAFETY: as the caller promises.
        return unsafe { sparse::run::<true>(crc, from, to, len) };
    }
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
    // SAFETY: `to` is ours alone, and has just been written.
    portable_crc(crc, unsafe { core::slice::from_raw_parts(to, len) })
}

/// # Safety
/// The processor has the kernel; the rest as for [`copy_raw`].
#[inline]
unsafe fn copy_with(kernel: Kernel, from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if kernel >= Kernel::Clmul {
        // SAFETY: the kernels from this one on have AVX2; the ranges are as the caller promises.
        return unsafe { x86::copy(from, to, len) };
    }
    let _ = kernel;
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}

fn portable_crc(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

#[cfg(test)]
mod tests;
