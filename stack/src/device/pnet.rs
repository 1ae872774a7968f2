//! The raw-frame device over `pnet::datalink`: whole Ethernet frames, one a call.
//!
//! Owns a pnet channel. It shares the interface's addresses with the kernel, as
//! [`af_packet`](super::af_packet) does, and is slower: it is there for where pnet is what works, and to compare with.
//! The socket has virtio headers, so a superframe that arrives is a burst; single packets are all that is sent. Never used
//! on the fast path; never knows a QP.

use core::net::IpAddr;
use core::ops::Range;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};

use pnet::datalink::{self, Channel, Config, DataLinkReceiver, DataLinkSender};
use socket2::Socket;

use super::ethernet::vnet::{VNET_HEADER, segment_of};
use super::ethernet::{AddressMode, EthernetPort, Framing, GroupSockets, Placed, Setup};
use super::netlink::InterfaceFacts;
use super::sys::packet::{FRAME_MAX, PacketSocket};
use super::sys::poll::{Watch, wait};
use super::sys::udp::raise_buffers;
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, IcrcMode, RxSink, TxSource};
use crate::time::{Duration, Instant};
use crate::types::MacAddr;

/// Socket buffer asked for, each way: the system's usual one holds less than a window of packets.
const SOCKET_BUFFER: usize = 8 << 20;
/// How soon a frame that the system did not take is offered again.
const RETRY_AFTER: Duration = Duration::from_micros(200);
/// Errors in a row that a receive passes over.
const ERRORS_PASSED: usize = 8;
/// Frames that one receive takes up without handing one on: what the filter let through for resolution.
const FRAMES_A_CALL: usize = 64;

/// A pnet channel as a device.
pub struct PnetDevice {
    port: EthernetPort,
    rx: Box<dyn DataLinkReceiver>,
    tx: Box<dyn DataLinkSender>,
    /// The channel's; open as long as the channel.
    descriptor: RawFd,
    slot: Box<[u8]>,
    /// A frame in `slot` that the system did not take, and when it is offered again.
    waiting: Option<(Range<usize>, Instant)>,
    groups: GroupSockets,
    /// Hold the kernel's port 4791; never read.
    _guards: Vec<Socket>,
}

impl PnetDevice {
    /// Opens the device on `interface`, whose addresses it shares with the kernel.
    ///
    /// # Errors
    /// As [`AfPacket::open`](super::af_packet::AfPacket::open).
    pub fn open(interface: &str) -> Result<Self, DeviceError> {
        let found = datalink::interfaces().into_iter().find(|i| i.name == interface);
        let found = found.ok_or_else(|| DeviceError::NoInterface { name: interface.to_owned() })?;
        let mac = found.mac.map(|m| MacAddr(m.octets())).filter(|m| *m != MacAddr::default());
        let facts = InterfaceFacts {
            index: found.index,
            up: found.is_up(),
            // pnet does not tell it.
            mtu: InterfaceFacts::of(interface)?.mtu,
            mac,
            addresses: found.ips.iter().map(|net| (net.ip(), net.prefix())).collect(),
            name: interface.to_owned(),
        };
        let setup = Setup::of(facts, &AddressMode::Shared, None)?;
        let open_error = |source| setup.open_error(source);
        // pnet binds the socket, which has our filter by then.
        let socket = PacketSocket::filtered(&setup.filter()).map_err(open_error)?;
        socket.frame_headers().map_err(open_error)?;
        raise_buffers(socket.as_fd(), SOCKET_BUFFER);
        let descriptor = socket.as_raw_fd();
        let config = Config {
            read_buffer_size: VNET_HEADER + FRAME_MAX,
            // Both ask once and never sleep.
            read_timeout: Some(Duration::ZERO),
            write_timeout: Some(Duration::ZERO),
            promiscuous: false,
            socket_fd: Some(socket.into_raw_fd()),
            ..Config::default()
        };
        let (tx, rx) = match datalink::channel(&found, config).map_err(open_error)? {
            Channel::Ethernet(tx, rx) => (tx, rx),
            _ => return Err(DeviceError::NotEthernet { name: interface.to_owned() }),
        };
        let groups = GroupSockets::new(setup.facts.index);
        let guards = setup.guards()?;
        let port = setup.port("pnet", IcrcMode::Check, Framing::Vnet { segments_max: 1 })?;
        let slot = vec![0; port.slot_len()].into_boxed_slice();
        Ok(Self { port, rx, tx, descriptor, slot, waiting: None, groups, _guards: guards })
    }

    /// Sends what the port itself wants sent.
    fn flush_port(&mut self) {
        while let Some((frame, burst)) = self.port.next_frame() {
            let sent = self.tx.send_to(&frame, None);
            self.port.recycle(frame);
            if !matches!(sent, Some(Ok(()))) {
                self.port.lose(usize::from(burst));
            }
        }
    }

    /// Sends the frame in the slot; says whether the slot is free again.
    fn flush(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let Some((range, _)) = self.waiting.take() else { return Ok(true) };
        let frame = self.slot.get(range.clone()).unwrap_or(&[]);
        match self.tx.send_to(frame, None) {
            Some(Ok(())) => Ok(true),
            Some(Err(e)) if is_empty(&e) || e.raw_os_error() == Some(libc::ENOBUFS) => {
                self.waiting = Some((range, now + RETRY_AFTER));
                Ok(false)
            }
            Some(Err(e)) if is_gone(&e) => Err(DeviceError::Io { action: "sending", source: e }),
            Some(Err(_)) | None => {
                self.port.lose(1);
                Ok(true)
            }
        }
    }
}

impl Device for PnetDevice {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        let mut handed = self.port.receive_looped(now, budget, sink);
        let (mut passed, mut foreign) = (0, 0);
        while handed < budget && foreign < FRAMES_A_CALL {
            match self.rx.next() {
                Ok(framed) => {
                    let taken = framed
                        .split_first_chunk()
                        .is_some_and(|(header, frame)| self.port.accept(now, frame, None, segment_of(header), sink));
                    if taken { handed += 1 } else { foreign += 1 }
                }
                Err(e) if is_empty(&e) => break,
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "receiving", source: e }),
                Err(_) if passed < ERRORS_PASSED => passed += 1,
                Err(_) => break,
            }
        }
        self.flush_port();
        Ok(handed)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        self.flush_port();
        let mut taken = 0;
        while self.flush(now)? && taken < budget {
            let Some(burst) = source(self.port.room(&mut self.slot)) else { break };
            taken += 1;
            if let Placed::Send(range) = self.port.place(now, &burst, &mut self.slot) {
                self.waiting = Some((range, now));
            }
        }
        self.flush_port();
        Ok(taken)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let retry = self.waiting.as_ref().map(|w| w.1);
        match (retry, self.port.poll_timeout()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        self.groups.set(group, member)?;
        self.port.set_membership(group, member);
        Ok(())
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.descriptor)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        if self.port.has_looped() {
            return Ok(());
        }
        let watch = [Watch::Readable(self.descriptor), Watch::Writable(self.descriptor)];
        let watch = if self.waiting.is_some() { &watch[..] } else { &watch[..1] };
        wait(watch, timeout).map(|_| ()).map_err(|source| DeviceError::Io { action: "waiting", source })
    }

    fn lost(&self) -> DeviceLosses {
        self.port.losses()
    }
}

/// Nothing to read, or no room to write, now.
fn is_empty(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// The interface was removed, or the socket is none.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO | libc::EBADF))
}
