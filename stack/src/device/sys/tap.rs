//! TAP interfaces: `/dev/net/tun`, one frame a `read(2)` or `write(2)`.
//!
//! Owns the calls that attach to an interface, or make one, and say what may be handed over. Never looks into a frame.
#![allow(unsafe_code)] // This directory is where system calls are.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;

use crate::device::ethernet::vnet::VNET_HEADER;

/// Where interfaces are made.
const DEVICE: &str = "/dev/net/tun";

/// An interface whose other end is this process.
#[derive(Debug)]
pub(crate) struct Tap(File);

impl Tap {
    /// Attaches to the TAP called `name`, or makes it; frames have a virtio header of [`VNET_HEADER`] bytes.
    ///
    /// # Errors
    /// The system's answer. Of the open: `NotFound` and the like. Of the attachment: `PermissionDenied`; EBUSY when another
    /// process is attached; EINVAL when the interface is no TAP.
    pub(crate) fn open(name: &str) -> Result<Self, TapError> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let file = file.map_err(TapError::Open)?;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let attached = match attach(file.as_fd(), name, flags) {
            // A TAP that was made for several queues wants to be told so; one is enough for us.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                attach(file.as_fd(), name, flags | libc::IFF_MULTI_QUEUE)
            }
            other => other,
        };
        attached.map_err(TapError::Attach)?;
        let tap = Self(file);
        // Whoever had the interface before may have left another length.
        let length = libc::c_int::try_from(VNET_HEADER).unwrap_or(0);
        // SAFETY: the request takes a pointer to an `int`, which outlives the call.
        answer(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &raw const length) })
            .map_err(TapError::Attach)?;
        Ok(tap)
    }

    /// Lets the system hand over UDP superframes and packets without a checksum; says whether it takes and gives superframes.
    pub(crate) fn take_superframes(&self) -> bool {
        let offload = |what: libc::c_uint| {
            // SAFETY: the request takes a number.
            answer(unsafe { libc::ioctl(self.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(what)) })
                .is_ok()
        };
        if offload(libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6) {
            return true;
        }
        // Linux before 6.2. Without checksums the system computes them for nothing; with a refusal it does so, too.
        offload(libc::TUN_F_CSUM);
        false
    }

    /// Has the interface stay when the process ends, or go.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn set_persistent(&self, stays: bool) -> io::Result<()> {
        // SAFETY: the request takes a number.
        answer(unsafe { libc::ioctl(self.as_raw_fd(), libc::TUNSETPERSIST as _, libc::c_ulong::from(stays)) })
    }

    /// Reads one frame, its virtio header first; returns the bytes. A longer one is cut.
    ///
    /// # Errors
    /// The system's answer; `WouldBlock` when none waits.
    pub(crate) fn read(&self, to: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(to)
    }

    /// Writes one frame, its virtio header first.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn write(&self, frame: &[u8]) -> io::Result<()> {
        (&self.0).write(frame).map(|_| ())
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Which step the system refused.
#[derive(Debug)]
pub(crate) enum TapError {
    /// To open [`DEVICE`].
    Open(io::Error),
    /// To attach.
    Attach(io::Error),
}

/// Takes the interface `name` up.
///
/// # Errors
/// The system's answer.
pub(crate) fn set_up(name: &str) -> io::Result<()> {
    let socket = any_socket()?;
    let mut request = request(name)?;
    // SAFETY: the request names an interface and has room for the answer; it outlives the call.
    answer(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) })?;
    // SAFETY: the system has just written this member.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    // SAFETY: as above.
    answer(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) })
}

/// Sets the MTU of the interface `name`.
///
/// # Errors
/// The system's answer.
pub(crate) fn set_mtu(name: &str, mtu: usize) -> io::Result<()> {
    let socket = any_socket()?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = libc::c_int::try_from(mtu).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the request names an interface and states a number; it outlives the call.
    answer(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU, &raw mut request) })
}

fn attach(fd: BorrowedFd<'_>, name: &str, flags: libc::c_int) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the request takes a pointer to an `ifreq`, which outlives the call.
    answer(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })
}

/// Interfaces are asked and told through any socket.
fn any_socket() -> io::Result<socket2::Socket> {
    socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

fn answer(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
