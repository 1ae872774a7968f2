//! The AF_XDP device: RoCEv2 on raw Ethernet, past the kernel's network stack.
//!
//! A filter in the driver, or right behind it, takes UDP 4791 of the endpoint's addresses out of what the interface
//! receives and puts it into memory that is shared with the kernel. All else goes to the kernel as ever, and a packet socket
//! beside ours hears of it what an endpoint needs: ARP, neighbour discovery and ping, multicast, superframes, packets
//! with options or in fragments (to be counted), and what arrives in a queue that has no socket. So nothing is lost that
//! the filter does not know; it is only slower.
//!
//! Owns the link of the filter, which ends with the device, the sockets, the packet socket, and, where the addresses are the
//! kernel's, the UDP sockets that hold its port 4791. Sends one frame a burst. Needs `cap_net_raw`, `cap_net_admin` and
//! `cap_bpf`. Never knows a QP.

mod asm;
mod bpf;
mod config;
mod filter;
mod open;
mod ring;
mod socket;
mod umem;

use core::net::IpAddr;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};

use socket2::Socket;

pub use self::config::{AfXdpConfig, QUEUES_MAX, XdpAttempt, XdpAttempts, XdpMode, XdpQueues, XdpStep, XdpWay};
use self::filter::{PASS, Wanted};
use self::open::{Attached, Place, attach, missing};
use self::socket::{Kicked, Received, XdpSocket};
pub use super::ethernet::AddressMode;
use super::ethernet::{EthernetPort, Framing, GroupSockets, Placed, Setup};
use super::netlink::InterfaceFacts;
use super::sys::packet::{BATCH, PacketSocket, RecvBatch};
use super::sys::poll::{AnyReadable, Watch, wait};
use super::sys::udp::raise_buffers;
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, RxSink, TxSource};
use crate::neighbor::NeighborCounters;
use crate::raw::Pages;
use crate::time::{Duration, Instant};

/// Buffer of the packet socket: only what the filter leaves comes here.
const SIDE_BUFFER: usize = 1 << 20;
/// How soon frames that the kernel did not take are offered again.
const RETRY_AFTER: Duration = Duration::from_micros(200);
/// How long the packet socket may wait while the others are busy.
const SIDE_EVERY: Duration = Duration::from_micros(100);
/// Errors in a row that a receive passes over.
const ERRORS_PASSED: usize = 8;
/// Frames of one queue before the next has its turn.
const TURN: usize = 64;
/// Frames between two calls to send.
const FRAMES_A_KICK: usize = 32;

/// Which way received frames took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpCounters {
    /// Frames that the filter handed to us.
    pub direct: u64,
    /// Frames that came through the kernel: ARP and the like, multicast, superframes, queues without a socket.
    pub through_kernel: u64,
}

/// AF_XDP sockets as a device.
pub struct AfXdp {
    port: EthernetPort,
    attached: Attached,
    /// The socket whose turn to be read it is.
    turn: usize,
    side: PacketSocket,
    side_batch: RecvBatch,
    side_due: Instant,
    /// All descriptors that frames arrive on.
    readable: AnyReadable,
    /// Set while frames wait that the kernel did not take, or that there was no slot for.
    retry_at: Option<Instant>,
    counters: XdpCounters,
    groups: GroupSockets,
    /// Hold the kernel's port 4791; never read.
    _guards: Vec<Socket>,
}

impl AfXdp {
    /// Opens the device: the packet socket first, then the filter and its sockets.
    ///
    /// # Errors
    /// [`DeviceError::NoInterface`], [`DeviceError::NotEthernet`], [`DeviceError::InterfaceDown`],
    /// [`DeviceError::NotOurMac`], [`DeviceError::MissingCapability`], [`DeviceError::NoAddress`],
    /// [`DeviceError::MtuTooSmall`], [`DeviceError::PortInUse`] (another process has port 4791 of a shared address),
    /// [`DeviceError::NoXdp`] (with what was tried, and what each lacks), [`DeviceError::Io`].
    pub fn open(config: &AfXdpConfig) -> Result<Self, DeviceError> {
        let facts = InterfaceFacts::of(&config.interface)?;
        let setup = Setup::of(facts, &config.addresses, config.vlan)?;
        let (index, mtu) = (setup.facts.index, setup.facts.mtu);
        let side = PacketSocket::receiver(index, &setup.filter()).map_err(|e| side_error(&config.interface, e))?;
        raise_buffers(side.as_fd(), SIDE_BUFFER);
        setup.listen(&side).map_err(|e| side_error(&config.interface, e))?;
        let guards = setup.guards()?;
        let mut port = setup.port("xdp", config.icrc, Framing::Plain)?;
        let DeviceCapabilities { addresses, mac, .. } = port.capabilities();
        let vlan = config.vlan.map(|v| v.id);
        let wanted = Wanted { mac: mac.unwrap_or_default(), addresses, vlan, mtu, superframes: false, on_miss: PASS };
        let attached = attach(config, &Place { interface: index, wanted, frame_max: port.slot_len() })?;
        port.describe(&format!(" ({})", attached.way));
        let readable = (|| {
            let any = AnyReadable::new()?;
            any.add(side.as_fd())?;
            attached.sockets.iter().try_for_each(|s| any.add(s.as_fd()))?;
            Ok(any)
        })();
        Ok(Self {
            port,
            attached,
            turn: 0,
            side,
            side_batch: RecvBatch::new(),
            side_due: Instant::ZERO,
            readable: readable.map_err(|source| DeviceError::Io { action: "watching sockets", source })?,
            retry_at: None,
            counters: XdpCounters::default(),
            groups: GroupSockets::new(index),
            _guards: guards,
        })
    }

    /// The way in which the kernel runs the device.
    #[must_use]
    pub const fn way(&self) -> XdpWay {
        self.attached.way
    }

    /// Faster ways that did not work, and why.
    #[must_use]
    pub fn refused(&self) -> &[XdpAttempt] {
        &self.attached.refused
    }

    /// Receive queues that have a socket.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.attached.sockets.len()
    }

    /// What the frames lie on: huge pages, where enough were reserved.
    #[must_use]
    pub fn pages(&self) -> Pages {
        let huge = self.attached.sockets.iter().all(|s| s.pages() == Pages::Huge);
        if huge { Pages::Huge } else { Pages::Normal }
    }

    /// Which way received frames took.
    #[must_use]
    pub const fn counters(&self) -> XdpCounters {
        self.counters
    }

    /// What happened in resolving and answering.
    #[must_use]
    pub fn neighbor_counters(&self) -> NeighborCounters {
        self.port.neighbor_counters()
    }

    /// Reads the sockets in turn; returns frames looked at and bursts handed on.
    fn receive_queues(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> (usize, usize) {
        let Self { port, attached: Attached { sockets, .. }, turn, .. } = self;
        let (mut looked, mut handed, mut silent) = (0, 0, 0);
        while looked < budget && silent < sockets.len() {
            let at = *turn % sockets.len();
            let got = sockets.get_mut(at).map_or(0, |socket| {
                socket.receive((budget - looked).min(TURN), &mut |frame| match frame {
                    Received::Frame(frame) => handed += usize::from(port.accept(now, frame, None, None, sink)),
                    Received::TooLong => port.lose_received(),
                })
            });
            *turn = turn.wrapping_add(1);
            silent = if got == 0 { silent + 1 } else { 0 };
            looked += got;
        }
        (looked, handed)
    }

    /// Reads what the filter left to the kernel; returns frames handed on.
    fn receive_side(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        let (mut looked, mut handed, mut passed) = (0, 0, 0);
        while looked < budget {
            let want = (budget - looked).min(BATCH);
            let got = match self.side_batch.receive(self.side.as_fd(), want) {
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if is_gone(&e) || self.attached.sockets.iter().any(XdpSocket::is_gone) => {
                    return Err(DeviceError::Io { action: "receiving", source: e });
                }
                Err(_) if passed < ERRORS_PASSED => {
                    passed += 1;
                    continue;
                }
                Err(_) => break,
            };
            looked += got;
            self.counters.through_kernel += got as u64;
            for (meta, frame) in (0..got).filter_map(|i| self.side_batch.get(i)) {
                if meta.truncated {
                    self.port.lose_received();
                } else {
                    handed += usize::from(self.port.accept(now, frame, meta.tag, meta.segment, sink));
                }
            }
            if got < want {
                break;
            }
        }
        Ok(handed)
    }

    /// Puts what the port itself wants sent into slots; the rest waits in the port.
    fn take_from_port(&mut self) {
        let Some(socket) = self.attached.sockets.first_mut() else { return };
        while let Some(slot) = socket.slot() {
            let Some((frame, burst)) = self.port.next_frame() else { return };
            match slot.get_mut(..frame.len()) {
                Some(to) => {
                    to.copy_from_slice(&frame);
                    socket.push(0..frame.len());
                }
                None => self.port.lose(usize::from(burst)),
            }
            self.port.recycle(frame);
        }
    }

    /// Lets `source` fill slots; returns how many bursts were taken and whether the source has no more.
    fn fill(&mut self, now: Instant, want: usize, source: &mut TxSource<'_>) -> (usize, bool) {
        let Some(socket) = self.attached.sockets.first_mut() else { return (0, true) };
        let mut taken = 0;
        while taken < want
            && let Some(slot) = socket.slot()
        {
            let Some(burst) = source(self.port.room(slot)) else { return (taken, true) };
            taken += 1;
            if let Placed::Send(range) = self.port.place(now, &burst, slot) {
                socket.push(range);
            }
        }
        (taken, false)
    }

    /// Has the kernel send; says whether it took everything.
    fn kick(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let Some(socket) = self.attached.sockets.first_mut() else { return Ok(true) };
        let mut lost = 0;
        let kicked = socket.kick(&mut lost);
        self.port.lose(lost);
        match kicked {
            Kicked::Done => {
                self.retry_at = None;
                Ok(true)
            }
            Kicked::Full => {
                self.retry_at = Some(now + RETRY_AFTER);
                Ok(false)
            }
            Kicked::Gone(source) => Err(DeviceError::Io { action: "sending", source }),
        }
    }
}

impl Device for AfXdp {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        let mut handed = self.port.receive_looped(now, budget, sink);
        // Frames that are not for us count too: a flood of them must not keep the caller here.
        let (looked, more) = self.receive_queues(now, budget.saturating_sub(handed), sink);
        handed += more;
        self.counters.direct += looked as u64;
        if looked == 0 || now >= self.side_due {
            self.side_due = now + SIDE_EVERY;
            handed += self.receive_side(now, budget.saturating_sub(handed), sink)?;
        }
        self.take_from_port();
        self.kick(now)?;
        Ok(handed)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        self.take_from_port();
        let mut taken = 0;
        while self.kick(now)? && taken < budget {
            let (more, drained) = self.fill(now, (budget - taken).min(FRAMES_A_KICK), source);
            taken += more;
            if drained {
                break;
            }
            if more == 0 {
                // No slot is free: the kernel sends what it has, and gives them back later.
                self.retry_at = Some(now + RETRY_AFTER);
                return Ok(taken);
            }
        }
        // What was placed last, and questions that the bursts raised.
        self.take_from_port();
        self.kick(now)?;
        Ok(taken)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        match (self.retry_at, self.port.poll_timeout()) {
            // The port's own frames have no slot either, so its haste is of no use.
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
        Some(self.readable.as_raw_fd())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        // Whatever wakes us, the packet socket may be it.
        self.side_due = Instant::ZERO;
        if self.port.has_looped() || self.attached.sockets.iter().any(|s| !s.is_empty()) {
            return Ok(());
        }
        let watch = [Watch::Readable(self.readable.as_raw_fd())];
        wait(&watch, timeout).map(|_| ()).map_err(|source| DeviceError::Io { action: "waiting", source })
    }

    fn lost(&self) -> DeviceLosses {
        let mut losses = self.port.losses();
        for (received, sent) in self.attached.sockets.iter().map(XdpSocket::dropped) {
            losses.receive = losses.receive.saturating_add(received);
            losses.transmit = losses.transmit.saturating_add(sent);
        }
        losses
    }
}

/// What the system's answer at the opening of the packet socket means.
fn side_error(interface: &str, source: io::Error) -> DeviceError {
    match source.kind() {
        io::ErrorKind::PermissionDenied => missing(interface),
        _ => DeviceError::Io { action: "opening a packet socket", source },
    }
}

/// The interface was removed, or the socket is none.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO | libc::EBADF))
}
