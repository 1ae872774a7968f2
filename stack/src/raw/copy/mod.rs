//! Copies and CRC-32, one pass over the bytes.
//!
//! Owns the loops that touch every payload byte: a copy, a CRC, and both at once, each in the widest form that the
//! processor has, chosen once at run time, with a portable form for all others. The fused loop loads a byte once: its CRC
//! is that of the bytes written, whatever another thread does to the source meanwhile. Never knows what the bytes are,
//! nor whose.
//!
//! A CRC here is the common CRC-32 as `crc32fast` has it, finished: that of a first part is where its next part starts.
#![allow(unsafe_code)] // Vector loads and stores through raw pointers: the memory may be registered.

#[cfg(target_arch = "x86_64")]
mod x86;

use core::ptr;

#[cfg(target_arch = "x86_64")]
use core::sync::atomic::{AtomicU8, Ordering};

/// A set of loops. Every processor has [`Kernel::Portable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kernel {
    /// The compiler's copy, and `crc32fast`.
    Portable = 1,
    /// AVX2, and PCLMULQDQ on 16 bytes at a time.
    Clmul,
    /// AVX2, and VPCLMULQDQ on 32 bytes at a time.
    Wide,
    /// AVX-512, and VPCLMULQDQ on 64 bytes at a time.
    Widest,
}

/// The best kernel, or 0 before anyone has asked.
#[cfg(target_arch = "x86_64")]
static BEST: AtomicU8 = AtomicU8::new(0);

impl Kernel {
    /// All of them, from the slowest to the fastest.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Clmul, Self::Wide, Self::Widest];

    /// Whether this processor has what the kernel needs.
    #[must_use]
    pub fn is_available(self) -> bool {
        self <= Self::best()
    }

    /// The fastest that this processor has. Asks it once.
    #[inline]
    #[must_use]
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        match BEST.load(Ordering::Relaxed) {
            4.. => Self::Widest,
            3 => Self::Wide,
            2 => Self::Clmul,
            1 => Self::Portable,
            0 => Self::detect(),
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::Portable
    }

    #[cfg(target_arch = "x86_64")]
    #[cold]
    fn detect() -> Self {
        let best = if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("pclmulqdq")) {
            Self::Portable
        } else if !is_x86_feature_detected!("vpclmulqdq") {
            Self::Clmul
        } else if !is_x86_feature_detected!("avx512f") {
            Self::Wide
        } else {
            Self::Widest
        };
        BEST.store(best as u8, Ordering::Relaxed);
        best
    }

    /// This kernel, or the best below it that the processor has.
    fn supported(self) -> Self {
        self.min(Self::best())
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
    if kernel != Kernel::Portable {
        // SAFETY: the processor has AVX2 and PCLMULQDQ at the least, and wider ones as the kernel says; nothing is
        // written.
        return unsafe { x86::run::<false>(kernel, crc, from, ptr::null_mut(), len) };
    }
    let _ = kernel;
    // SAFETY: readable and unchanged, as the caller promises.
    portable_crc(crc, unsafe { core::slice::from_raw_parts(from, len) })
}

/// # Safety
/// The processor has the kernel; the rest as for [`copy_crc_raw`].
#[inline]
unsafe fn copy_crc_with(kernel: Kernel, crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if kernel != Kernel::Portable {
        // SAFETY: the processor has the kernel's instructions; the ranges are as the caller promises.
        return unsafe { x86::run::<true>(kernel, crc, from, to, len) };
    }
    let _ = kernel;
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
    if kernel != Kernel::Portable {
        // SAFETY: every other kernel has AVX2; the ranges are as the caller promises.
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
