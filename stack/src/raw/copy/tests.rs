//! The kernels against crc32fast, each path for itself. Never timed.

use super::*;

/// Bytes of no pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_F491u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..len).map(|_| next()).collect()
}

/// `crc32fast` over `bytes`, after a CRC.
fn expected(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::ALL.into_iter().filter(|kernel| kernel.is_available())
}

/// All three loops of a kernel on one length, at one alignment each of source and destination; nothing beside the
/// destination changes.
fn agrees(kernel: Kernel, source: &[u8], from: usize, to: usize, len: usize) {
    let bytes = &source[from..from + len];
    let start = 0x1234_5678u32.wrapping_mul(u32::try_from(len + 1).unwrap());
    let crc = expected(start, bytes);
    let context = (kernel, from, to, len);
    assert_eq!(kernel.crc(start, bytes), crc, "crc {context:?}");
    for fused in [true, false] {
        let mut room = vec![0xEE; to + len + 64];
        let out = &mut room[to..to + len];
        if fused {
            assert_eq!(kernel.copy_crc(start, bytes, out), crc, "copy_crc {context:?}");
        } else {
            kernel.copy(bytes, out);
        }
        assert_eq!(&room[to..to + len], bytes, "{fused} {context:?}");
        assert!(room[..to].iter().chain(&room[to + len..]).all(|b| *b == 0xEE), "beside it: {fused} {context:?}");
    }
}

#[test]
fn the_check_value_of_crc_32() {
    for kernel in kernels() {
        assert_eq!(kernel.crc(0, b"123456789"), 0xCBF4_3926, "{kernel:?}");
        assert_eq!(kernel.crc(0, b""), 0);
    }
    assert_eq!(crc(0, b"123456789"), 0xCBF4_3926);
}

#[test]
fn a_kernel_that_is_clearly_faster_is_preferred() {
    let fastest = Kernel::fastest;
    assert_eq!(fastest(Kernel::Widest, [1300, 700, 110, 240, 120, 60]), Kernel::Widest);
    assert_eq!(fastest(Kernel::Widest, [1300, 700, 50, 240, 120, 60]), Kernel::Widest, "by an accident");
    // An emulator: PCLMULQDQ is a loop there, in crc32fast too.
    assert_eq!(fastest(Kernel::Clmul, [6000, 3400, 10400, 8700, u64::MAX, u64::MAX]), Kernel::Sparse);
    // A clock that stands still says nothing, and one that goes by large steps next to nothing.
    assert_eq!(fastest(Kernel::Clmul, [0, 0, 0, 0, u64::MAX, u64::MAX]), Kernel::Clmul);
    // What the processor lacks has no time.
    assert_eq!(fastest(Kernel::Portable, [1300, 700, 110, 0, 0, 0]), Kernel::Portable);
}

#[test]
fn a_choice_is_made_once_and_is_one_that_the_processor_has() {
    use core::cell::Cell;

    let clock = Cell::new(0);
    let looks = || {
        clock.set(clock.get() + 1);
        clock.get()
    };
    Kernel::choose(looks);
    assert!(Kernel::best().is_available());
    let after = clock.get();
    Kernel::choose(looks);
    assert_eq!(clock.get(), after, "not measured again");
}

#[test]
fn every_short_length_at_some_alignments() {
    let source = noise(700);
    for kernel in kernels() {
        for len in 0..=600 {
            agrees(kernel, &source, len % 33, (len * 7) % 35, len);
        }
    }
}

#[test]
fn every_alignment_at_some_lengths() {
    let source = noise(4096 + 128);
    for kernel in kernels() {
        for len in [3, 15, 31, 64, 92, 255, 256, 1027, 4096] {
            for shift in 0..64 {
                agrees(kernel, &source, shift, 0, len);
                agrees(kernel, &source, 5, shift, len);
            }
        }
    }
}

#[test]
fn long_lengths() {
    let source = noise(65_536 + 64);
    for kernel in kernels() {
        for len in (600..2200).step_by(37).chain([4095, 4096, 4097, 9000, 16_383, 32_768, 65_535, 65_536]) {
            agrees(kernel, &source, 1, 2, len);
        }
    }
}

#[test]
fn a_crc_in_parts_is_that_of_the_whole() {
    let bytes = noise(3000);
    let whole = expected(0, &bytes);
    for cut in [0, 1, 12, 28, 92, 300, 2999, 3000] {
        assert_eq!(crc(crc(0, &bytes[..cut]), &bytes[cut..]), whole, "{cut}");
        let mut out = vec![0; 3000];
        let (head, body) = out.split_at_mut(cut);
        let first = copy_crc(0, &bytes[..cut], head);
        assert_eq!(copy_crc(first, &bytes[cut..], body), whole, "{cut}");
        assert_eq!(out, bytes);
    }
}

#[test]
fn the_shorter_side_bounds_a_copy() {
    let mut out = [0; 4];
    copy(b"abcdefgh", &mut out);
    assert_eq!(&out, b"abcd");
    let mut out = [9; 6];
    assert_eq!(copy_crc(0, b"abcd", &mut out), expected(0, b"abcd"));
    assert_eq!(&out, b"abcd\x09\x09");
}

/// A writer changes the source all the time: the CRC must be that of what arrived, not of what is there.
#[test]
fn the_crc_is_that_of_the_bytes_written() {
    use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

    const LEN: usize = 1024 + 61;
    let source: Vec<AtomicU8> = (0..LEN).map(|_| AtomicU8::new(0)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u8;
            while !stop.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                source.iter().for_each(|byte| byte.store(value, Ordering::Relaxed));
            }
        });
        for kernel in kernels() {
            for len in [11, 15, 61, 92, 301, LEN].into_iter().cycle().take(3000) {
                let mut out = vec![0; len];
                let from = source.as_ptr().cast::<u8>();
                // SAFETY: `len` bytes are there; another thread changes them, which the function allows for.
                let crc = unsafe { copy_crc_with(kernel, 7, from, out.as_mut_ptr(), len) };
                assert_eq!(crc, expected(7, &out), "{kernel:?} {len}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
