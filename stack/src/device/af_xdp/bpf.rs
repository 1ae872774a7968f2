//! bpf(2): a map of sockets, a program, and its link to an interface.
//!
//! Owns the descriptors and the shapes that the system call reads. The system knows more commands and fields than stand
//! here: it takes what is not given as zero.
#![allow(unsafe_code)] // This directory is where system calls are.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use super::asm::Insn;

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE: libc::c_int = 2;
const PROGRAM_LOAD: libc::c_int = 5;
#[cfg(test)]
const PROGRAM_TEST_RUN: libc::c_int = 10;
const LINK_CREATE: libc::c_int = 28;
const MAP_OF_XDP_SOCKETS: u32 = 17;
const PROGRAM_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// The program can do with frames in several buffers: what a driver asks for before it runs at a large MTU.
const HAS_FRAGMENTS: u32 = 1 << 5;
const IN_KERNEL: u32 = 1 << 1;
const IN_DRIVER: u32 = 1 << 2;
/// The program calls nothing that is for GPL programs alone.
const LICENSE: &core::ffi::CStr = c"MIT";

/// Calls bpf(2); returns what it returned.
///
/// # Safety
/// `attributes` is what `command` reads; pointers in it name memory of the lengths that stand beside them.
unsafe fn bpf<A>(command: libc::c_int, attributes: &mut A) -> io::Result<RawFd> {
    // SAFETY: the pointer and the size describe `attributes`, which the system reads and, for one command, writes; the
    // caller answers for what is in it.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<A>()) };
    match RawFd::try_from(rc) {
        Ok(rc) if rc >= 0 => Ok(rc),
        _ => Err(io::Error::last_os_error()),
    }
}

/// As [`bpf`], for a command that makes a descriptor.
///
/// # Safety
/// As for [`bpf`], and `command` makes a descriptor.
unsafe fn make<A>(command: libc::c_int, attributes: &mut A) -> io::Result<OwnedFd> {
    // SAFETY: the caller answers for it.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// From receive queue to the socket that reads it.
#[derive(Debug)]
pub(super) struct SocketMap(OwnedFd);

impl SocketMap {
    /// An empty one for queues `0..queues`.
    ///
    /// # Errors
    /// The system's answer; `PermissionDenied` without `cap_bpf` and `cap_net_admin`.
    pub(super) fn new(queues: u32) -> io::Result<Self> {
        #[repr(C)]
        struct Create {
            kind: u32,
            key: u32,
            value: u32,
            entries: u32,
            flags: u32,
        }
        let mut create = Create { kind: MAP_OF_XDP_SOCKETS, key: 4, value: 4, entries: queues, flags: 0 };
        // SAFETY: no pointers; the command makes a descriptor.
        unsafe { make(MAP_CREATE, &mut create) }.map(Self)
    }

    /// Gives `queue` to `socket`, until either closes.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        #[repr(C)]
        struct Update {
            map: u32,
            _pad: u32,
            key: u64,
            value: u64,
            flags: u64,
        }
        let value = socket.as_raw_fd().cast_unsigned();
        let mut update = Update {
            map: self.0.as_raw_fd().cast_unsigned(),
            _pad: 0,
            key: address(&raw const queue),
            value: address(&raw const value),
            flags: 0,
        };
        // SAFETY: key and value point to four bytes each, as this map has them, that outlive the call.
        unsafe { bpf(MAP_UPDATE, &mut update) }.map(|_| ())
    }

    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A program that the system has checked and taken.
#[derive(Debug)]
pub(super) struct Program(OwnedFd);

impl Program {
    /// # Errors
    /// The system's answer; `PermissionDenied` without `cap_bpf` and `cap_net_admin`.
    pub(super) fn load(code: &[Insn]) -> io::Result<Self> {
        #[repr(C)]
        struct Load {
            kind: u32,
            count: u32,
            code: u64,
            license: u64,
            log: [u32; 4],
            kernel: u32,
            flags: u32,
            name: [u8; 16],
            interface: u32,
            attach: u32,
        }
        let mut load = Load {
            kind: PROGRAM_XDP,
            count: u32::try_from(code.len()).unwrap_or(u32::MAX),
            code: address(code.as_ptr()),
            license: address(LICENSE.as_ptr()),
            log: [0; 4],
            kernel: 0,
            flags: HAS_FRAGMENTS,
            name: *b"uroce_filter\0\0\0\0",
            interface: 0,
            attach: ATTACH_XDP,
        };
        // SAFETY: `code` and the terminated license outlive the call; the command makes a descriptor.
        unsafe { make(PROGRAM_LOAD, &mut load) }.map(Self)
    }

    /// Runs the program on everything that interface `index` receives, in the driver (`native`) or behind it, as long as
    /// the link lives.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn attach(&self, index: u32, native: bool) -> io::Result<Link> {
        #[repr(C)]
        struct Create {
            program: u32,
            interface: u32,
            attach: u32,
            flags: u32,
        }
        let flags = if native { IN_DRIVER } else { IN_KERNEL };
        let program = self.0.as_raw_fd().cast_unsigned();
        let mut create = Create { program, interface: index, attach: ATTACH_XDP, flags };
        // SAFETY: no pointers; the command makes a descriptor.
        unsafe { make(LINK_CREATE, &mut create) }.map(Link)
    }

    /// What the program does with `frame`, without sending it anywhere.
    #[cfg(test)]
    pub(super) fn test_run(&self, frame: &[u8]) -> io::Result<i32> {
        #[repr(C)]
        #[derive(Default)]
        struct Test {
            program: u32,
            result: u32,
            len: u32,
            out_len: u32,
            data: u64,
            out: u64,
            repeat: u32,
            duration: u32,
            contexts: [u32; 2],
            context: [u64; 2],
            flags: u32,
            cpu: u32,
        }
        let mut test = Test {
            program: self.0.as_raw_fd().cast_unsigned(),
            len: u32::try_from(frame.len()).unwrap(),
            data: address(frame.as_ptr()),
            repeat: 1,
            ..Test::default()
        };
        // SAFETY: `frame` has the stated length and outlives the call; nothing is written behind a pointer.
        unsafe { bpf(PROGRAM_TEST_RUN, &mut test) }?;
        Ok(test.result.cast_signed())
    }
}

/// Keeps a program attached; the system detaches it when the descriptor closes, however the process ends.
#[derive(Debug)]
pub(super) struct Link(#[allow(dead_code)] OwnedFd); // Never read: it is there to be closed.

/// A pointer as the system reads it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}
