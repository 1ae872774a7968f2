//! Superframes on their way out: the socket for them, and what becomes of those that the system refuses.
//!
//! Owns the socket with the virtio header, the interface's limits and the counters. A single packet never goes through this
//! socket: the header costs it time. Never decides what is sent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use super::SOCKET_BUFFER;
use crate::device::ethernet::IP_MAX;
use crate::device::ethernet::vnet::{SEGMENTS_LIMIT, VNET_HEADER, write_segment};
use crate::device::netlink::{Netlink, SegmentationLimits};
use crate::device::sys::packet::PacketSocket;
use crate::device::sys::udp::raise_buffers;

/// Bytes of an Ethernet header with a VLAN tag.
const ETHERNET_MAX: usize = 18;

/// What became of the superframes of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SuperframeCounters {
    /// The system took them as they were.
    pub sent: u64,
    /// The system refused them; their segments left as frames.
    pub taken_apart: u64,
    /// Why it refused the first one, as an error number of the system; from then on the device sends frames alone.
    pub refused: Option<i32>,
}

/// See the module.
pub(super) struct Superframes {
    /// Absent where the configuration or the interface wants none.
    socket: Option<PacketSocket>,
    segments: usize,
    bytes: usize,
    /// Frames that a refused superframe was taken apart to.
    apart: VecDeque<Vec<u8>>,
    counters: SuperframeCounters,
}

impl Superframes {
    /// For interface `index`, with at most `segments` segments.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn open(index: u32, segments: usize) -> io::Result<Self> {
        let SegmentationLimits { bytes, segments: most } = Netlink::open()?.segmentation(index)?;
        let segments = segments.min(SEGMENTS_LIMIT).min(most).max(1);
        let bytes = bytes.saturating_sub(1 + ETHERNET_MAX).min(IP_MAX);
        let socket = if segments > 1 { Some(PacketSocket::sender(index, true)?) } else { None };
        if let Some(socket) = &socket {
            raise_buffers(socket.as_fd(), SOCKET_BUFFER);
        }
        Ok(Self { socket, segments, bytes, apart: VecDeque::new(), counters: SuperframeCounters::default() })
    }

    /// Segments, and bytes of an IP packet, at most.
    pub(super) const fn limits(&self) -> (usize, usize) {
        (self.segments, self.bytes)
    }

    pub(super) const fn counters(&self) -> SuperframeCounters {
        self.counters
    }

    /// The socket that takes superframes.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(PacketSocket::as_fd)
    }

    /// Sends one that is in no batch, behind its header.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn send(&mut self, framed: &[u8]) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        socket.send(framed)?;
        self.sent(1);
        Ok(())
    }

    /// Counts superframes that the system took.
    pub(super) const fn sent(&mut self, superframes: usize) {
        self.counters.sent += superframes as u64;
    }

    /// Makes frames of one that the system refused; it is behind its header.
    pub(super) fn take_apart(&mut self, why: &io::Error, framed: &[u8]) {
        self.counters.taken_apart += 1;
        self.counters.refused = self.counters.refused.or(why.raw_os_error());
        let Some((header, frame)) = framed.split_first_chunk() else { return };
        for index in 0..SEGMENTS_LIMIT {
            let mut out = Vec::new();
            if write_segment(header, frame, index, &mut out).is_none() {
                break;
            }
            self.apart.push_back(out);
        }
    }

    /// Whether frames of those taken apart wait.
    pub(super) fn has_apart(&self) -> bool {
        !self.apart.is_empty()
    }

    /// The next frame of those taken apart, without a header.
    pub(super) fn apart(&self) -> Option<&[u8]> {
        self.apart.front().and_then(|framed| framed.get(VNET_HEADER..))
    }

    /// It was dealt with.
    pub(super) fn apart_done(&mut self) {
        self.apart.pop_front();
    }
}

/// Whether an error at sending a superframe says that the system, or the driver, takes none of them.
pub(super) fn is_refusal(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EMSGSIZE | libc::EPROTONOSUPPORT | libc::EIO)
    )
}
