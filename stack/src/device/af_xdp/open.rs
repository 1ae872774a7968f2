//! From a configuration to a filter on the interface and a socket on each queue.
//!
//! Owns the ladder of ways. Each is tried from the filter to the last socket; what failed is kept, to be told.

use std::io;
use std::os::fd::BorrowedFd;

use super::bpf::{Link, Program, SocketMap};
use super::config::{AfXdpConfig, QUEUES_MAX, XdpAttempt, XdpAttempts, XdpQueues, XdpStep, XdpWay};
use super::filter::{self, Wanted};
use super::socket::{SocketConfig, XdpSocket};
use crate::device::DeviceError;
use crate::device::sys::interfaces;

/// Queues that an interface can have: the map has a place for each.
const QUEUE_NUMBERS: u32 = 4096;

/// What the device needs besides its configuration.
pub(super) struct Place<'a> {
    /// The interface's number.
    pub(super) interface: u32,
    /// What the filter takes.
    pub(super) wanted: Wanted<'a>,
    /// Bytes of the longest frame.
    pub(super) frame_max: usize,
}

/// A way that worked.
pub(super) struct Attached {
    pub(super) way: XdpWay,
    /// Goes first when dropped, so that no frame is taken for nobody.
    pub(super) _link: Link,
    /// One a queue; the first sends, too.
    pub(super) sockets: Vec<XdpSocket>,
    /// Ways before it that did not.
    pub(super) refused: Vec<XdpAttempt>,
}

/// Tries the ways that the configuration allows.
///
/// # Errors
/// [`DeviceError::MissingCapability`], [`DeviceError::NoXdp`].
pub(super) fn attach(config: &AfXdpConfig, place: &Place<'_>) -> Result<Attached, DeviceError> {
    let mut refused = Vec::new();
    for &way in XdpWay::of(config.mode) {
        match one_way(config, place, way) {
            Ok((link, sockets)) => return Ok(Attached { way, _link: link, sockets, refused }),
            // (The checker of programs says EACCES, which has the same kind.)
            Err((_, e)) if e.raw_os_error() == Some(libc::EPERM) => return Err(missing(&config.interface)),
            Err((step, source)) => refused.push(XdpAttempt { way, step, source }),
        }
    }
    Err(DeviceError::NoXdp { interface: config.interface.clone(), tried: XdpAttempts(refused) })
}

/// The process may not.
pub(super) fn missing(interface: &str) -> DeviceError {
    DeviceError::MissingCapability {
        what: format!("an AF_XDP socket on {interface}"),
        capability: "cap_net_raw,cap_net_admin,cap_bpf",
    }
}

type Failed = (XdpStep, io::Error);

fn one_way(config: &AfXdpConfig, place: &Place<'_>, way: XdpWay) -> Result<(Link, Vec<XdpSocket>), Failed> {
    let queues = match config.queues {
        XdpQueues::All => 0..interfaces::receive_queues(&config.interface).unwrap_or(1).clamp(1, QUEUES_MAX),
        XdpQueues::One(queue) => queue..queue.saturating_add(1),
        XdpQueues::First(count) => 0..count.clamp(1, QUEUES_MAX),
    };
    // A driver with XDP makes no superframes and has none made for it; the kernel behind a driver, and a TAP, do.
    let superframes = !way.native || interfaces::driver(&config.interface).is_ok_and(|name| name == "tun");
    let program = |e| (XdpStep::Program, e);
    if queues.end > QUEUE_NUMBERS {
        return Err((XdpStep::Bind { queue: queues.start }, io::Error::from_raw_os_error(libc::EINVAL)));
    }
    let map = SocketMap::new(queues.end).map_err(program)?;
    let code = filter::program(Wanted { superframes, ..place.wanted }, map.as_raw_fd());
    let code = code.ok_or_else(|| program(io::ErrorKind::InvalidInput.into()))?;
    let link = Program::load(&code).map_err(program)?.attach(place.interface, way.native);
    let link = link.map_err(|e| (XdpStep::Attach, e))?;
    let mut sockets = Vec::new();
    for queue in queues {
        let socket = XdpSocket::open(&SocketConfig {
            interface: place.interface,
            queue,
            zero_copy: way.zero_copy,
            frame_max: place.frame_max,
            sends: sockets.is_empty(),
            busy_poll: config.busy_poll,
        })?;
        let give = |fd: BorrowedFd<'_>| map.insert(queue, fd).map_err(|e| (XdpStep::Bind { queue }, e));
        give(socket.as_fd())?;
        sockets.push(socket);
    }
    Ok((link, sockets))
}
