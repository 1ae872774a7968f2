//! The system calls of the devices and drivers.
//!
//! Owns every `unsafe` call into libc that moves frames, lists interfaces or sleeps. Each file offers safe functions over
//! buffers that it owns; nothing here decides anything or knows what a frame means.

pub(crate) mod affinity;
pub(crate) mod interfaces;
pub(crate) mod netns;
pub(crate) mod packet;
pub(crate) mod poll;
pub(crate) mod ring;
pub(crate) mod tap;
pub(crate) mod udp;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// One call of `recvmmsg(2)` that does not wait; returns how many headers were filled.
///
/// # Errors
/// The system's answer; `WouldBlock` when nothing waits.
///
/// # Safety
/// Each header names buffers of the lengths that it states, which may be written and to which no reference is used during
/// the call.
#[allow(unsafe_code)] // This directory is where system calls are.
pub(crate) unsafe fn receive_many(fd: BorrowedFd<'_>, headers: &mut [libc::mmsghdr]) -> io::Result<usize> {
    let want = libc::c_uint::try_from(headers.len()).unwrap_or(libc::c_uint::MAX);
    let at_once = libc::MSG_DONTWAIT as _;
    // SAFETY: `headers` has at least `want` entries, whose buffers the caller answers for; a null timeout is allowed.
    let rc = unsafe { libc::recvmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), want, at_once, std::ptr::null_mut()) };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error())
}

/// The control messages behind a received header: level, type, data.
pub(crate) struct ControlMessages<'a> {
    header: &'a libc::msghdr,
    next: *const libc::cmsghdr,
}

#[allow(unsafe_code)] // As above.
impl<'a> ControlMessages<'a> {
    /// Those of `header`.
    ///
    /// # Safety
    /// `header` names a control buffer that the system has filled in and that nobody writes to for `'a`.
    pub(crate) unsafe fn of(header: &'a libc::msghdr) -> Self {
        // SAFETY: `header` is as the system left it.
        Self { header, next: unsafe { libc::CMSG_FIRSTHDR(header) } }
    }
}

#[allow(unsafe_code)] // As above.
impl<'a> Iterator for ControlMessages<'a> {
    type Item = (libc::c_int, libc::c_int, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a header inside the buffer.
        let c = unsafe { self.next.as_ref() }?;
        // SAFETY: `c` is inside the buffer, and its data follows it.
        let data = unsafe { libc::CMSG_DATA(self.next) };
        #[allow(clippy::unnecessary_cast)] // 32 bits on musl.
        let len = (c.cmsg_len as usize).saturating_sub(data.addr() - self.next.addr());
        // SAFETY: the system wrote that many bytes behind the header, and they stay as they are for `'a`.
        let data = unsafe { core::slice::from_raw_parts(data, len) };
        // SAFETY: as for CMSG_FIRSTHDR.
        self.next = unsafe { libc::CMSG_NXTHDR(self.header, self.next) };
        Some((c.cmsg_level, c.cmsg_type, data))
    }
}

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
