//! Sleeping: `ppoll(2)` and `eventfd(2)`.
#![allow(unsafe_code)] // This directory is where system calls are.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use crate::time::Duration;

/// Descriptors that one [`wait`] may watch.
pub(crate) const WATCH_MAX: usize = 4;

/// What to watch a descriptor for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Watch {
    /// Until it can be read.
    Readable(RawFd),
    /// Until it can be written.
    Writable(RawFd),
}

/// Sleeps until one of the first [`WATCH_MAX`] of `watch` is ready, a signal arrives or `timeout` passes (`None`: for
/// ever); returns how many are ready. A signal counts as none ready.
///
/// # Errors
/// The system's answer.
pub(crate) fn wait(watch: &[Watch], timeout: Option<Duration>) -> io::Result<usize> {
    wait_which(watch, timeout).map(|ready| ready.iter().filter(|ready| **ready).count())
}

/// As [`wait`]; says which are ready.
///
/// # Errors
/// The system's answer.
pub(crate) fn wait_which(watch: &[Watch], timeout: Option<Duration>) -> io::Result<[bool; WATCH_MAX]> {
    let mut fds = [libc::pollfd { fd: -1, events: 0, revents: 0 }; WATCH_MAX];
    for (slot, w) in fds.iter_mut().zip(watch) {
        (slot.fd, slot.events) = match *w {
            Watch::Readable(fd) => (fd, libc::POLLIN),
            Watch::Writable(fd) => (fd, libc::POLLOUT),
        };
    }
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `fds` is an array of as many entries as are named (those with fd -1 are skipped by the system), `spec` is
    // null or points to a value that outlives the call, and a null signal mask is allowed.
    let rc = unsafe { libc::ppoll(fds.as_mut_ptr(), WATCH_MAX as libc::nfds_t, spec, std::ptr::null()) };
    if rc >= 0 {
        return Ok(fds.map(|fd| fd.revents != 0));
    }
    match io::Error::last_os_error() {
        e if e.kind() == io::ErrorKind::Interrupted => Ok([false; WATCH_MAX]),
        e => Err(e),
    }
}

/// Many descriptors as one: readable while one of them is (`epoll(7)`). One that is closed falls out of it.
#[derive(Debug)]
pub(crate) struct AnyReadable(OwnedFd);

impl AnyReadable {
    /// Of none.
    ///
    /// # Errors
    /// The system's answer (too many descriptors).
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds one.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
        // SAFETY: `event` outlives the call, and both descriptors are open.
        let rc = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsRawFd for AnyReadable {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A counter in the system that a thread can sleep on: readable from [`EventFd::set`] until [`EventFd::clear`].
#[derive(Debug)]
pub(crate) struct EventFd(File);

impl EventFd {
    /// A cleared one.
    ///
    /// # Errors
    /// The system's answer (too many descriptors).
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Another descriptor of the same counter, for somebody else to own.
    ///
    /// # Errors
    /// The system's answer (too many descriptors).
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// Makes it readable.
    pub(crate) fn set(&self) {
        // The one failure there is, a counter at its maximum, means that it is readable already.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Makes it unreadable; says whether it was readable.
    pub(crate) fn clear(&self) -> bool {
        (&self.0).read(&mut [0; 8]).is_ok()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_is_enough() {
        let (a, b, all) = (EventFd::new().unwrap(), EventFd::new().unwrap(), AnyReadable::new().unwrap());
        let readable = || wait(&[Watch::Readable(all.as_raw_fd())], Some(Duration::ZERO)).unwrap() == 1;
        for e in [&a, &b] {
            all.add(e.0.as_fd()).unwrap();
        }
        assert!(!readable());
        b.set();
        assert!(readable());
        drop(b);
        assert!(!readable());
        a.set();
        assert!(readable());
    }

    #[test]
    fn an_eventfd_is_readable_between_set_and_clear() {
        let e = EventFd::new().unwrap();
        let none = Some(Duration::ZERO);
        assert_eq!(wait(&[Watch::Readable(e.as_raw_fd())], none).unwrap(), 0);
        e.set();
        e.set();
        assert_eq!(wait(&[Watch::Readable(e.as_raw_fd()), Watch::Writable(e.as_raw_fd())], None).unwrap(), 2);
        assert!(e.clear());
        assert!(!e.clear());
        assert_eq!(wait(&[Watch::Readable(e.as_raw_fd())], Some(Duration::from_nanos(1))).unwrap(), 0);
    }
}
