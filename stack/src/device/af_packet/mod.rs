//! The AF_PACKET device: RoCEv2 on raw Ethernet, frames in batches.
//!
//! Owns a packet socket that receives and two that send, frames and superframes, and, where the addresses are the
//! kernel's, a UDP socket on each that keeps the kernel from refusing our peers. A superframe crosses the kernel as one
//! packet and is segmented by the hardware, by the kernel before it, or, on a veth pair, by nobody: then the receiver
//! gets it whole and hands it on as a burst. A system that refuses superframes is given frames from then on. Packets arrive in a
//! ring that the kernel shares with the device, so that a look that finds none costs no system call. Needs `cap_net_raw`.
//! Never knows a QP.

mod inbox;
mod superframes;

use core::net::IpAddr;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};

use socket2::Socket;

use self::inbox::Inbox;
pub use self::superframes::SuperframeCounters;
use self::superframes::{Superframes, is_refusal};
pub use super::ethernet::AddressMode;
pub use super::ethernet::vnet::SEGMENTS_LIMIT;
use super::ethernet::vnet::segment_of;
use super::ethernet::{EthernetPort, Framing, GroupSockets, HEADROOM, Placed, Setup};
use super::netlink::InterfaceFacts;
use super::sys::packet::{BATCH, PacketSocket, SendBatch};
use super::sys::poll::{Watch, wait};
use super::sys::udp::raise_buffers;
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, IcrcMode, RxSink, TxSource};
use crate::neighbor::NeighborCounters;
use crate::time::{Duration, Instant};
use crate::types::MacAddr;
use crate::wire::VlanTag;

/// Socket buffer asked for, each way.
const SOCKET_BUFFER: usize = 8 << 20;
/// How soon frames that the system did not take are offered again.
const RETRY_AFTER: Duration = Duration::from_micros(200);
/// Errors in a row that a receive or a send passes over.
const ERRORS_PASSED: usize = 8;
/// Segments of a superframe, unless the configuration says otherwise.
pub const SEGMENTS_USUAL: usize = 64;
/// Bytes that are sent, or received, in one system call at about the most: the memory behind them is used again and again,
/// and shall stay in the processor's cache.
const BYTES_A_CALL: usize = 128 << 10;

/// How an [`AfPacket`] device shall be.
#[derive(Clone, Debug)]
pub struct AfPacketConfig {
    /// Name of the interface.
    pub interface: String,
    /// Whose addresses.
    pub mode: AddressMode,
    /// The VLAN to be on, by a tag in each frame; on a VLAN interface of the kernel (`eth0.5`) leave it `None`. With a
    /// tag, the kernel does not answer for its addresses, so the device does.
    pub vlan: Option<VlanTag>,
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
    /// Segments of a superframe that is sent, at most [`SEGMENTS_LIMIT`]; 1 sends frames alone. The interface's own
    /// limits hold too.
    pub segments_max: usize,
    /// How frames are received.
    pub receive: ReceiveBy,
}

/// How an [`AfPacket`] device receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReceiveBy {
    /// By system calls, many frames each.
    Calls,
    /// From a ring in memory that the kernel fills, and by system calls what is longer than a packet of the largest path
    /// MTU. A look that finds nothing costs no system call. Where the system has no such ring, by calls.
    #[default]
    Ring,
}

impl AfPacketConfig {
    /// Beside the kernel on `interface`, untagged.
    #[must_use]
    pub fn shared(interface: impl Into<String>) -> Self {
        let (mode, icrc, segments_max) = (AddressMode::Shared, IcrcMode::Check, SEGMENTS_USUAL);
        Self { interface: interface.into(), mode, vlan: None, icrc, segments_max, receive: ReceiveBy::default() }
    }

    /// With a MAC and addresses of its own on `interface`, untagged.
    #[must_use]
    pub fn own(interface: impl Into<String>, mac: MacAddr, addresses: Vec<IpAddr>) -> Self {
        Self { mode: AddressMode::Own { mac, addresses }, ..Self::shared(interface) }
    }
}

/// A packet socket as a device.
pub struct AfPacket {
    port: EthernetPort,
    inbox: Inbox,
    tx_socket: PacketSocket,
    superframes: Superframes,
    tx: SendBatch,
    /// Slots of `tx` that wait: `next..filled`.
    next: usize,
    filled: usize,
    /// Set while slots wait that the system did not take.
    retry_at: Option<Instant>,
    groups: GroupSockets,
    /// Hold the kernel's port 4791; never read.
    _guards: Vec<Socket>,
}

impl AfPacket {
    /// Opens the device.
    ///
    /// # Errors
    /// [`DeviceError::NoInterface`], [`DeviceError::NotEthernet`], [`DeviceError::InterfaceDown`],
    /// [`DeviceError::NotOurMac`], [`DeviceError::MissingCapability`], [`DeviceError::NoAddress`],
    /// [`DeviceError::MtuTooSmall`], [`DeviceError::PortInUse`] (another process has port
    /// 4791 of a shared address), [`DeviceError::Io`].
    pub fn open(config: AfPacketConfig) -> Result<Self, DeviceError> {
        let facts = InterfaceFacts::of(&config.interface)?;
        let setup = Setup::of(facts, &config.mode, config.vlan)?;
        let index = setup.facts.index;
        let open_error = |source| setup.open_error(source);
        let inbox = Inbox::open(index, &setup.filter(), config.receive).map_err(open_error)?;
        let tx_socket = PacketSocket::sender(index, false).map_err(open_error)?;
        let superframes = Superframes::open(index, config.segments_max).map_err(open_error)?;
        raise_buffers(tx_socket.as_fd(), SOCKET_BUFFER);
        setup.listen(inbox.socket()).map_err(open_error)?;
        let guards = setup.guards()?;
        let (segments_max, bytes) = superframes.limits();
        let port = setup.port("packet", config.icrc, Framing::Vnet { segments_max })?;
        let burst_max = bytes.max(port.capabilities().mtu);
        Ok(Self {
            tx: SendBatch::new(port.slot_len().min(HEADROOM + burst_max)),
            port,
            inbox,
            tx_socket,
            superframes,
            next: 0,
            filled: 0,
            retry_at: None,
            groups: GroupSockets::new(index),
            _guards: guards,
        })
    }

    /// How it receives: as the configuration wants, or by calls.
    #[must_use]
    pub const fn receives_by(&self) -> ReceiveBy {
        self.inbox.receives_by()
    }

    /// What happened in resolving and answering.
    #[must_use]
    pub fn neighbor_counters(&self) -> NeighborCounters {
        self.port.neighbor_counters()
    }

    /// What became of superframes.
    #[must_use]
    pub const fn superframe_counters(&self) -> SuperframeCounters {
        self.superframes.counters()
    }

    /// Sends what the port itself wants sent; says whether all is gone.
    fn flush_port(&mut self, now: Instant) -> Result<bool, DeviceError> {
        while self.flush_apart(now)? {
            let Some((framed, burst)) = self.port.next_frame() else { return Ok(true) };
            let Some((header, frame)) = framed.split_first_chunk() else { continue };
            let large = segment_of(header).is_some();
            let sent = if large { self.superframes.send(&framed) } else { self.tx_socket.send(frame) };
            match sent {
                Ok(()) => {}
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "sending", source: e }),
                Err(e) if is_full(&e) => {
                    self.retry_at = Some(now + RETRY_AFTER);
                    self.port.put_back(framed, burst);
                    break;
                }
                Err(e) if large && is_refusal(&e) => {
                    self.superframes.take_apart(&e, &framed);
                    self.port.refuse_superframes();
                }
                // A question is asked again and an answer is asked for again.
                Err(_) => self.port.lose(usize::from(burst)),
            }
            self.port.recycle(framed);
        }
        Ok(false)
    }

    /// Sends the frames that a refused superframe was taken apart to; says whether all are gone.
    fn flush_apart(&mut self, now: Instant) -> Result<bool, DeviceError> {
        while let Some(frame) = self.superframes.apart() {
            match self.tx_socket.send(frame) {
                Err(e) if is_full(&e) => {
                    self.retry_at = Some(now + RETRY_AFTER);
                    return Ok(false);
                }
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "sending", source: e }),
                Err(_) => self.port.lose(1),
                Ok(()) => {}
            }
            self.superframes.apart_done();
        }
        Ok(true)
    }

    /// Sends the slots that wait; says whether all are gone. Those that the system does not take now stay.
    fn flush(&mut self, now: Instant) -> Result<bool, DeviceError> {
        self.retry_at = None;
        let mut passed = 0;
        while self.flush_apart(now)? {
            if self.next >= self.filled {
                (self.next, self.filled) = (0, 0);
                return Ok(true);
            }
            let (count, large) = self.tx.alike(self.next..self.filled);
            let socket = self.superframes.as_fd().filter(|_| large).unwrap_or(self.tx_socket.as_fd());
            match self.tx.send(socket, self.next..self.next + count) {
                Ok(sent) => {
                    self.next += sent;
                    self.superframes.sent(if large { sent } else { 0 });
                    passed = 0;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted && passed < ERRORS_PASSED => passed += 1,
                Err(e) if is_full(&e) => {
                    self.retry_at = Some(now + RETRY_AFTER);
                    break;
                }
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "sending", source: e }),
                Err(e) if large && is_refusal(&e) => {
                    self.superframes.take_apart(&e, self.tx.get(self.next));
                    self.port.refuse_superframes();
                    self.next += 1;
                }
                // Interface down, frame too long for it: this one cannot be sent, the next may.
                Err(_) => {
                    self.port.lose(1);
                    self.next += 1;
                }
            }
        }
        Ok(false)
    }

    /// Lets `source` fill free slots; returns how many bursts were taken and whether the source has no more.
    fn fill(&mut self, now: Instant, want: usize, source: &mut TxSource<'_>) -> (usize, bool) {
        let (mut taken, mut bytes) = (0, 0);
        while taken < want && self.filled < BATCH && bytes < BYTES_A_CALL {
            let slot = self.tx.buffer(self.filled);
            let Some(burst) = source(self.port.room(slot)) else { return (taken, true) };
            taken += 1;
            if let Placed::Send(range) = self.port.place(now, &burst, self.tx.buffer(self.filled)) {
                bytes += range.len();
                self.tx.set(self.filled, range);
                self.filled += 1;
            }
        }
        (taken, false)
    }
}

impl Device for AfPacket {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        let mut handed = self.port.receive_looped(now, budget, sink);
        handed += self.inbox.receive(now, budget.saturating_sub(handed), &mut self.port, sink)?;
        self.flush_port(now)?;
        Ok(handed)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        if !self.flush_port(now)? {
            return Ok(0);
        }
        let mut taken = 0;
        while self.flush(now)? && taken < budget {
            let (more, drained) = self.fill(now, budget - taken, source);
            taken += more;
            if drained {
                self.flush(now)?;
                break;
            }
        }
        // Questions that the bursts raised.
        self.flush_port(now)?;
        Ok(taken)
    }

    fn is_idle(&mut self) -> bool {
        self.inbox.is_empty()
            && self.next >= self.filled
            && !self.superframes.has_apart()
            && self.port.poll_timeout() != Some(Instant::ZERO)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        match (self.retry_at, self.port.poll_timeout()) {
            // The port's own frames find no room either, so its haste is of no use.
            (Some(retry), _) if !self.port.has_looped() => Some(retry),
            (_, due) => due,
        }
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        self.groups.set(group, member)?;
        self.port.set_membership(group, member);
        Ok(())
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.inbox.socket().as_raw_fd())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        if self.port.has_looped() || self.inbox.is_ready() {
            return Ok(());
        }
        // Frames that found no room are offered again after a time that `poll_timeout` bounds this sleep by; that one of the
        // two sending sockets is writable does not say that the other is.
        let readable = Watch::Readable(self.inbox.socket().as_raw_fd());
        wait(&[readable], timeout).map_err(|source| DeviceError::Io { action: "waiting", source })?;
        self.inbox.woken();
        Ok(())
    }

    fn lost(&self) -> DeviceLosses {
        let losses = self.port.losses();
        DeviceLosses { receive: losses.receive + self.inbox.dropped(), ..losses }
    }
}

/// The system has no room now.
fn is_full(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::WouldBlock || e.raw_os_error() == Some(libc::ENOBUFS)
}

/// The interface was removed, or the socket is none.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO | libc::EBADF))
}
