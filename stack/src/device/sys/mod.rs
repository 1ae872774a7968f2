//! The system calls of the devices and drivers.
//!
//! Owns every `unsafe` call into libc that moves frames, lists interfaces or sleeps. Each file offers safe functions over
//! buffers that it owns; nothing here decides anything or knows what a frame means.

pub(crate) mod interfaces;
pub(crate) mod netns;
pub(crate) mod packet;
pub(crate) mod poll;
pub(crate) mod udp;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Sets an `int` socket option.
///
/// # Errors
/// The system's answer.
#[allow(unsafe_code)] // This directory is where system calls are.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(0),
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
