//! Network namespaces: `setns(2)`.
#![allow(unsafe_code)] // This directory is where system calls are.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// Moves the calling thread, and no other, into the network namespace at `path` (e.g. `/run/netns/lab`, or
/// `/proc/1/ns/net`). Devices that the thread opens from then on are of that namespace and stay in it.
///
/// # Errors
/// The system's answer; `PermissionDenied` without `cap_sys_admin`.
pub fn enter_netns(path: &Path) -> io::Result<()> {
    let namespace = File::open(path)?;
    // SAFETY: no pointers; the descriptor is open.
    let rc = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
