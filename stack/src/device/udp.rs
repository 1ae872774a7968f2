//! The UDP socket device: RoCEv2 without any privilege.
//!
//! Owns one socket bound to one local address and port 4791, and a bounded set of further sockets that only send, one
//! for each other source port. The system makes the IP and UDP headers, so the device keeps what the ICRC needs fixed:
//! it never connects a socket and forbids fragmentation, which gives DF and identification 0 on every packet. The
//! identification of received packets is hidden. Never knows a QP.
//!
//! A burst of several segments is one datagram for the system, which cuts it up as late as it can (`UDP_SEGMENT`): at
//! best in the card, or never, when the receiver is on this machine. The segments carry the identifications 0, 1, 2 …
//! from the beginning with every burst. Where the way to a peer cannot do that, the device cuts bursts up itself from then on, and offers
//! rooms for one segment. Bursts are received as the system has put them together (`UDP_GRO`).
//!
//! Buffers are used from the first on in each call, and a call moves a few superframes at most: what was used last, and
//! is still in the cache, is used again first.

use core::net::{IpAddr, SocketAddr, SocketAddrV6};
use core::ops::Range;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};

use socket2::{Domain, Protocol, Socket, Type};

use super::ethernet::join_v4;
use super::sys::poll::{AnyReadable, Watch, wait};
use super::sys::udp::{
    BATCH, DATAGRAM_MAX, Meta, RecvBatch, SUPERFRAME_MAX, SendBatch, Target, can_segment, prepare, raise_buffers,
    receive_superframes,
};
use super::sys::{interfaces, set_int};
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, GROUPS_MAX, IcrcMode, RxSink, TxSource};
use crate::burst::{IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::types::PathMtu;
use crate::wire::{DONT_FRAGMENT, Flow, IpFields, icrc};

/// Source ports beside 4791 that one device sends from; packets that want yet another are lost.
pub const SOURCE_PORTS_MAX: usize = 64;
/// Socket buffer asked for, each way; the system caps it at `rmem_max` and `wmem_max`.
const SOCKET_BUFFER: usize = 8 << 20;
/// Receive buffer of a socket that only sends: what strays there is dropped soon.
const NO_BUFFER: i32 = 0;
/// How soon datagrams that the system did not take are offered again. The wait for a writable socket is usually
/// shorter; this is for a device whose queue is full while the socket has room.
const RETRY_AFTER: Duration = Duration::from_micros(200);
/// DSCP and ECN of a socket; a datagram with others carries a control message.
const CLASS: u8 = 0;
/// TTL or hop limit of a socket; a datagram with another carries a control message.
const HOPS: u8 = 64;
/// Errors in a row that a receive or a send passes over: the system reports what befell an earlier datagram, and the
/// call after it does the work.
const ERRORS_PASSED: usize = 8;
/// Segments of a burst at most, which every Linux that segments can do.
pub const SEGMENTS_MAX: usize = 64;
/// Bytes that one system call moves at least before another is made: a few superframes, which stay in a second-level
/// cache with what is done to them.
const CALL_BYTES: usize = 128 << 10;
/// Superframes that one system call moves at least.
const CALL_BURSTS: usize = 2;
/// A path MTU is at least 256 with 80 bytes of headers.
const MTU_MIN: usize = 256 + PathMtu::HEADER_ALLOWANCE;

/// How a [`UdpDevice`] shall be.
#[derive(Clone, Copy, Debug)]
pub struct UdpOptions {
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
    /// Source ports beside 4791 to spread flows over (ECMP), 0 to [`SOURCE_PORTS_MAX`].
    pub source_ports: usize,
    /// Segments of a burst, 1 to [`SEGMENTS_MAX`]. With 1 every packet is a datagram of its own, on receive too, and
    /// IPv4 packets go out without a UDP checksum.
    pub segments_max: usize,
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self { icrc: IcrcMode::default(), source_ports: 0, segments_max: SEGMENTS_MAX }
    }
}

struct PortSocket {
    port: u16,
    socket: Socket,
}

/// A UDP socket as a device.
pub struct UdpDevice {
    capabilities: DeviceCapabilities,
    address: IpAddr,
    /// Interface of a link-local address, 0 otherwise.
    scope: u32,
    /// The first is the one on 4791, which alone receives.
    sockets: Vec<PortSocket>,
    /// Sockets of multicast groups, each bound to its group; they only receive.
    groups: Vec<(IpAddr, Socket)>,
    /// Everything that receives.
    receivers: AnyReadable,
    /// Which receiver is asked first: none starves behind a flood on another.
    turn: usize,
    /// Ports of the sockets that the options asked for.
    ports: Vec<u16>,
    rx: RecvBatch,
    /// How many datagrams the next receive asks for.
    rx_want: usize,
    tx: SendBatch,
    queue: TxQueue,
    /// Whether bursts of several segments were offered at all; constant.
    superframes: bool,
    /// Set once the system would not cut up a burst that it then took in pieces.
    unsegmented: bool,
    /// Bursts that the device itself cut up.
    cut_up: u64,
    losses: DeviceLosses,
}

/// A slot of the send batch: a burst and the index of the socket that it leaves from.
type Waiting = (usize, TxBurst);

/// Which slots of the send batch wait: all from `next` on.
struct TxQueue {
    /// Slot by slot, at most [`BATCH`].
    slots: Vec<Waiting>,
    next: usize,
    /// The next segment of slot `next`, when that is sent in pieces.
    piece: Option<usize>,
    /// Set while slots wait that the system did not take.
    retry_at: Option<Instant>,
}

impl UdpDevice {
    /// Opens port 4791 of `address`, an address of this machine.
    ///
    /// # Errors
    /// [`DeviceError::NotOurAddress`], [`DeviceError::PortInUse`], [`DeviceError::MissingCapability`],
    /// [`DeviceError::MtuTooSmall`], [`DeviceError::Io`].
    pub fn open(address: IpAddr) -> Result<Self, DeviceError> {
        Self::open_with(address, UdpOptions::default())
    }

    /// Opens port 4791 of `address` with `options`.
    ///
    /// # Errors
    /// As [`UdpDevice::open`].
    pub fn open_with(address: IpAddr, options: UdpOptions) -> Result<Self, DeviceError> {
        let address = address.to_canonical();
        if address.is_unspecified() || address.is_multicast() {
            // The ICRC covers the source address, so it must be one.
            return Err(DeviceError::NotOurAddress { address });
        }
        let carrier = Carrier::of(address)?;
        let Some(path_mtu) = PathMtu::for_interface(carrier.mtu).filter(|_| carrier.mtu >= MTU_MIN) else {
            return Err(DeviceError::MtuTooSmall { name: carrier.name, mtu: carrier.mtu });
        };
        let wanted = options.segments_max.clamp(1, SEGMENTS_MAX);
        let probe = Socket::new(Domain::for_address(SocketAddr::new(address, 0)), Type::DGRAM, Some(Protocol::UDP));
        let superframes = wanted > 1 && can_segment(probe.map_err(|e| open_error(address, e))?.as_fd());
        let mut device = Self {
            capabilities: DeviceCapabilities {
                medium: Medium::Udp,
                mtu: carrier.mtu,
                path_mtu,
                segments_max: if superframes { wanted } else { 1 },
                icrc: options.icrc,
                addresses: vec![address],
                mac: None,
                name: format!("udp:{address}"),
            },
            address,
            scope: carrier.scope,
            sockets: Vec::with_capacity(1 + SOURCE_PORTS_MAX),
            groups: Vec::new(),
            receivers: AnyReadable::new().map_err(|e| open_error(address, e))?,
            turn: 0,
            ports: Vec::with_capacity(SOURCE_PORTS_MAX),
            rx: RecvBatch::new(superframes),
            rx_want: BATCH,
            tx: SendBatch::new(superframes),
            queue: TxQueue { slots: Vec::with_capacity(BATCH), next: 0, piece: None, retry_at: None },
            superframes,
            unsegmented: false,
            cut_up: 0,
            losses: DeviceLosses::default(),
        };
        let socket = device.bind(Flow::PORT).map_err(|e| open_error(address, e))?;
        device.listen(&socket).map_err(|e| open_error(address, e))?;
        device.sockets.push(PortSocket { port: Flow::PORT, socket });
        for _ in 0..options.source_ports.min(SOURCE_PORTS_MAX) {
            device.add_source_port(0).map_err(|e| open_error(address, e))?;
        }
        device.ports = device.sockets.iter().skip(1).map(|s| s.port).collect();
        if device.ports.is_empty() {
            device.ports.push(Flow::PORT);
        }
        Ok(device)
    }

    fn socket_address(&self, ip: IpAddr, port: u16) -> SocketAddr {
        match ip {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, port, 0, self.scope).into(),
            _ => SocketAddr::new(ip, port),
        }
    }

    fn socket(&self) -> io::Result<Socket> {
        let v6 = self.address.is_ipv6();
        let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        if v6 {
            socket.set_only_v6(true)?;
        }
        prepare(socket.as_fd(), v6, CLASS, HOPS, self.superframes)?;
        Ok(socket)
    }

    fn bind(&self, port: u16) -> io::Result<Socket> {
        let socket = self.socket()?;
        // Where multicast leaves, and how far it goes: the system has its own defaults.
        match self.address {
            IpAddr::V4(address) => {
                socket.set_multicast_if_v4(&address)?;
                socket.set_multicast_ttl_v4(HOPS.into())?;
            }
            IpAddr::V6(_) => {
                socket.set_multicast_if_v6(self.scope)?;
                socket.set_multicast_hops_v6(HOPS.into())?;
            }
        }
        socket.bind(&self.socket_address(self.address, port).into())?;
        Ok(socket)
    }

    /// A socket that receives what is sent to `group`, and only that. Other processes of this machine may have theirs.
    fn join(&self, group: IpAddr) -> io::Result<Socket> {
        if group.is_ipv4() != self.address.is_ipv4() || !group.is_multicast() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = self.socket()?;
        socket.set_reuse_address(true)?;
        let at = match group {
            IpAddr::V4(group) => {
                socket.set_multicast_all_v4(false)?;
                SocketAddr::new(group.into(), Flow::PORT)
            }
            IpAddr::V6(group) => {
                socket.set_multicast_all_v6(false)?;
                SocketAddrV6::new(group, Flow::PORT, 0, self.scope).into()
            }
        };
        socket.bind(&at.into())?;
        match group {
            IpAddr::V4(group) => join_v4(&socket, group, self.scope)?,
            IpAddr::V6(group) => socket.join_multicast_v6(&group, self.scope)?,
        }
        self.listen(&socket)?;
        Ok(socket)
    }

    /// Receives from `socket` from now on.
    fn listen(&self, socket: &Socket) -> io::Result<()> {
        raise_buffers(socket.as_fd(), SOCKET_BUFFER);
        if self.superframes {
            // A system that does not know how delivers datagrams one by one.
            let _ = receive_superframes(socket.as_fd());
        }
        self.receivers.add(socket.as_fd())
    }

    /// Bursts of several segments that the device itself cut up, because the system would not.
    #[must_use]
    pub const fn cut_up(&self) -> u64 {
        self.cut_up
    }

    /// Receives from one socket; returns how many bursts were taken and how many of them were handed on.
    fn receive_from(
        &mut self,
        receiver: usize,
        now: Instant,
        budget: usize,
        sink: &mut RxSink<'_>,
    ) -> Result<(usize, usize), DeviceError> {
        let (mut handed, mut taken, mut passed) = (0, 0, 0);
        while taken < budget {
            let want = (budget - taken).min(self.rx_want);
            let group = receiver.checked_sub(1).map(|at| self.groups.get(at).map(|g| &g.1));
            let Some(socket) = group.unwrap_or(self.sockets.first().map(|s| &s.socket)) else { break };
            let got = match self.rx.receive(socket.as_fd(), want) {
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if is_fatal(&e) => return Err(DeviceError::Io { action: "receiving", source: e }),
                Err(_) if passed < ERRORS_PASSED => {
                    passed += 1;
                    continue;
                }
                Err(_) => break,
            };
            taken += got;
            let mut total = 0;
            for (meta, bytes) in (0..got).filter_map(|i| self.rx.get(i)) {
                total += bytes.len();
                let segment = meta.segment.unwrap_or(bytes.len()).min(bytes.len());
                let fits = (1..=DATAGRAM_MAX).contains(&segment);
                if let Some(flow) = self.flow_of(meta).filter(|_| fits) {
                    sink(RxBurst { flow, bytes, segment, ids: RxIds::Hidden, at: now });
                    handed += 1;
                } else {
                    self.losses.receive += 1;
                }
            }
            self.rx_want = (CALL_BYTES * got).checked_div(total).unwrap_or(BATCH).clamp(CALL_BURSTS, BATCH);
            if got < want {
                break;
            }
        }
        Ok((taken, handed))
    }

    /// Opens a socket that only sends; port 0 takes any. Returns its index.
    fn add_source_port(&mut self, port: u16) -> io::Result<usize> {
        let socket = self.bind(port)?;
        let port = socket.local_addr()?.as_socket().map_or(port, |a| a.port());
        raise_buffers(socket.as_fd(), SOCKET_BUFFER);
        set_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, NO_BUFFER)?;
        self.sockets.push(PortSocket { port, socket });
        Ok(self.sockets.len() - 1)
    }

    /// The socket that sends from `port`.
    fn socket_for(&mut self, port: u16) -> Option<usize> {
        if let Some(at) = self.sockets.iter().position(|s| s.port == port) {
            return Some(at);
        }
        if self.sockets.len() > SOURCE_PORTS_MAX {
            return None;
        }
        self.add_source_port(port).ok()
    }

    /// Addresses the next slot with what the endpoint wrote into it, or says that it cannot be sent as it is.
    fn queue_burst(&mut self, burst: TxBurst) -> bool {
        let flow = &burst.flow;
        // A packet with another source, or of another length than the ICRC was made for, would be refused by the peer.
        let mine = flow.src == self.address && flow.dst.is_ipv4() == self.address.is_ipv4();
        if !mine || !self.fits(&burst) {
            return false;
        }
        let Some(via) = self.socket_for(flow.src_port) else { return false };
        let segment = (burst.segments > 1).then(|| u16::try_from(burst.segment).ok()).flatten();
        self.tx.address(self.queue.slots.len(), &self.target(flow, 0..burst.len, segment));
        self.queue.slots.push((via, burst));
        true
    }

    /// Whether the lengths of a burst are such that its segments arrive as they were made.
    fn fits(&self, burst: &TxBurst) -> bool {
        if burst.segments == 1 {
            return burst.len <= DATAGRAM_MAX;
        }
        let longest = self.capabilities.mtu.saturating_sub(burst.flow.header_len()).min(DATAGRAM_MAX);
        (2..=self.segments_max()).contains(&burst.segments)
            && (1..=longest).contains(&burst.segment)
            && burst.len.div_ceil(burst.segment) == burst.segments
            && burst.len <= SUPERFRAME_MAX
    }

    /// Segments that a burst may have now.
    const fn segments_max(&self) -> usize {
        if self.unsegmented { 1 } else { self.capabilities.segments_max }
    }

    fn target(&self, flow: &Flow, bytes: Range<usize>, segment: Option<u16>) -> Target {
        Target {
            to: self.socket_address(flow.dst, Flow::PORT),
            traffic_class: (flow.traffic_class != CLASS).then_some(flow.traffic_class),
            hop_limit: (flow.hop_limit != HOPS).then_some(flow.hop_limit),
            bytes,
            segment,
        }
    }

    /// Sends the slots that wait; says whether all are gone. Those that the system does not take now stay.
    fn flush(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let mut passed = 0;
        self.queue.retry_at = None;
        while let Some((via, range)) = self.queue.run(self.unsegmented) {
            if self.unsegmented && self.queue.is_whole() {
                self.begin_pieces();
            }
            let Some(from) = self.sockets.get(via) else { break };
            match self.tx.send(from.socket.as_fd(), range) {
                Ok(sent) => {
                    self.advance(sent);
                    passed = 0;
                }
                Err(e) => match e.kind() {
                    io::ErrorKind::Interrupted if passed < ERRORS_PASSED => passed += 1,
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                        self.queue.retry_at = Some(now + RETRY_AFTER);
                        return Ok(false);
                    }
                    _ if e.raw_os_error() == Some(libc::ENOBUFS) => {
                        self.queue.retry_at = Some(now + RETRY_AFTER);
                        return Ok(false);
                    }
                    _ if is_fatal(&e) => return Err(DeviceError::Io { action: "sending", source: e }),
                    _ if is_about_segments(&e) && self.queue.is_whole() => self.begin_pieces(),
                    // No route, no neighbour, too long, forbidden: this burst cannot be sent, the next may.
                    _ => {
                        self.losses.transmit += 1;
                        self.queue.skip(1);
                    }
                },
            }
        }
        self.queue.slots.clear();
        self.queue.next = 0;
        Ok(true)
    }

    /// Cuts up the first burst that waits. Datagrams sent one by one all have identification 0, so the ICRCs change.
    fn begin_pieces(&mut self) {
        let Some((_, burst)) = self.queue.slots.get(self.queue.next).copied() else { return };
        let bytes = self.tx.buffer(self.queue.next).get_mut(..burst.len).unwrap_or_default();
        for (index, segment) in bytes.chunks_mut(burst.segment.max(1)).enumerate().skip(1) {
            renumber(&burst.flow, IdRule::Index.id(index), segment);
        }
        self.aim(&burst, 0);
    }

    /// Makes one segment of the first burst that waits what is sent next.
    fn aim(&mut self, burst: &TxBurst, index: usize) {
        let at = index * burst.segment;
        let target = self.target(&burst.flow, at..burst.len.min(at + burst.segment), None);
        self.tx.address(self.queue.next, &target);
        self.queue.piece = Some(index);
    }

    /// The system took what was to be sent next: `sent` slots, or one segment.
    fn advance(&mut self, sent: usize) {
        let (Some(piece), Some(&(_, burst))) = (self.queue.piece, self.queue.slots.get(self.queue.next)) else {
            self.queue.skip(sent);
            return;
        };
        if piece == 0 {
            self.cut_up += 1;
            // It was not the datagrams that the system refused, but the work of making them.
            self.unsegmented = true;
        }
        if piece + 1 < burst.segments {
            self.aim(&burst, piece + 1);
        } else {
            self.queue.skip(1);
        }
    }

    /// The flow of a received datagram, if it is one to hand up.
    fn flow_of(&self, meta: &Meta) -> Option<Flow> {
        let src = meta.source.ip();
        (!meta.truncated && src.is_ipv4() == self.address.is_ipv4()).then_some(Flow {
            src,
            dst: meta.destination.unwrap_or(self.address),
            src_port: meta.source.port(),
            traffic_class: meta.traffic_class,
            hop_limit: meta.hop_limit,
            flow_label: 0,
            vlan: None,
        })
    }
}

impl TxQueue {
    /// The longest run of waiting slots that leave from one socket. Bursts to be sent in pieces stand alone.
    fn run(&self, in_pieces: bool) -> Option<(usize, Range<usize>)> {
        let waiting = self.slots.get(self.next..)?;
        let &(via, first) = waiting.first()?;
        let alone = self.piece.is_some() || (in_pieces && first.segments > 1);
        let joins = |(v, burst): &Waiting| *v == via && !(in_pieces && burst.segments > 1);
        let len = if alone { 1 } else { waiting.iter().take_while(|w| joins(w)).count() };
        Some((via, self.next..self.next + len))
    }

    /// Whether the first burst that waits has several segments and is not in pieces.
    fn is_whole(&self) -> bool {
        self.piece.is_none() && self.slots.get(self.next).is_some_and(|(_, burst)| burst.segments > 1)
    }

    /// The first `count` slots that wait are done with.
    fn skip(&mut self, count: usize) {
        self.next += count;
        self.piece = None;
    }
}

/// Gives the ICRC of a segment that was made for identification `id` the one for 0. The difference is applied: an ICRC
/// that was wrong stays so.
fn renumber(flow: &Flow, id: u16, segment: &mut [u8]) {
    let Some((covered, last)) = segment.split_last_chunk_mut::<4>() else { return };
    let with = |id| icrc(flow, IpFields { id, flags_fragment: DONT_FRAGMENT }, covered);
    for ((byte, old), new) in last.iter_mut().zip(with(id)).zip(with(0)) {
        *byte ^= old ^ new;
    }
}

impl Device for UdpDevice {
    fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        // What is dropped counts too: a flood of it must not keep the engine from its timers and from sending.
        let receivers = 1 + self.groups.len();
        let (mut handed, mut taken) = (0, 0);
        for _ in 0..receivers {
            self.turn = (self.turn + 1) % receivers;
            let (more, good) = self.receive_from(self.turn, now, budget - taken, sink)?;
            taken += more;
            handed += good;
            if taken >= budget {
                break;
            }
        }
        Ok(handed)
    }

    fn receive_room(&self) -> Option<usize> {
        let buffer = self.sockets.first()?.socket.recv_buffer_size().ok()?;
        // The system charges more than the bytes of a packet: a seventh more for superframes, twice as much for packets
        // alone.
        Some(if self.superframes { buffer / 2 } else { buffer / 8 * 3 })
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        let at = self.groups.iter().position(|(ip, _)| *ip == group);
        match (at, member) {
            (Some(at), false) => drop(self.groups.swap_remove(at)),
            (None, true) => {
                let fail = |source| DeviceError::Membership { group, source };
                if self.groups.len() >= GROUPS_MAX {
                    return Err(fail(io::ErrorKind::QuotaExceeded.into()));
                }
                let socket = self.join(group).map_err(fail)?;
                self.groups.push((group, socket));
            }
            _ => {}
        }
        Ok(())
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        let mut taken = 0;
        while self.flush(now)? && taken < budget {
            let (mut drained, mut bytes) = (false, 0);
            while taken < budget && self.queue.slots.len() < BATCH && bytes < CALL_BYTES {
                let segments_max = self.segments_max();
                let room = TxRoom {
                    buf: self.tx.buffer(self.queue.slots.len()),
                    headroom: 0,
                    segments_max,
                    ids: if segments_max > 1 { IdRule::Index } else { IdRule::Zero },
                    medium: Medium::Udp,
                };
                let Some(burst) = source(room) else {
                    drained = true;
                    break;
                };
                taken += 1;
                bytes += burst.len;
                if !self.queue_burst(burst) {
                    self.losses.transmit += 1;
                }
            }
            if drained {
                self.flush(now)?;
                break;
            }
        }
        Ok(taken)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.queue.retry_at
    }

    fn source_ports(&self) -> &[u16] {
        &self.ports
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.receivers.as_raw_fd())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        let first = self.receivers.as_raw_fd();
        let stuck = self.queue.run(self.unsegmented).and_then(|(via, _)| self.sockets.get(via));
        let writable = stuck.map_or(Watch::Readable(first), |s| Watch::Writable(s.socket.as_raw_fd()));
        wait(&[Watch::Readable(first), writable], timeout)
            .map(|_| ())
            .map_err(|source| DeviceError::Io { action: "waiting", source })
    }

    fn lost(&self) -> DeviceLosses {
        self.losses
    }
}

/// Whether the socket itself is unusable, rather than one datagram.
fn is_fatal(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT))
}

/// Whether the system may mean the segmentation of a burst: it has none for this socket or on this way (`EINVAL`), or the
/// interface does not make checksums (`EIO`, before Linux 6.11). Other faults of a datagram come as `EINVAL` too.
fn is_about_segments(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EIO))
}

fn open_error(address: IpAddr, source: io::Error) -> DeviceError {
    match source.raw_os_error() {
        Some(libc::EADDRINUSE) => DeviceError::PortInUse { address },
        Some(libc::EADDRNOTAVAIL) => DeviceError::NotOurAddress { address },
        Some(libc::EPERM | libc::EACCES) => DeviceError::MissingCapability {
            what: format!("UDP port {} of {address}", Flow::PORT),
            // The one that the system asks for when a port below `ip_unprivileged_port_start` is bound.
            capability: "cap_net_bind_service",
        },
        _ => DeviceError::Io { action: "opening a UDP socket", source },
    }
}

/// The interface that carries an address.
struct Carrier {
    name: String,
    mtu: usize,
    scope: u32,
}

impl Carrier {
    /// MTU taken when no interface names the address, though it can be bound (`ip_nonlocal_bind`, a local route).
    const USUAL_MTU: usize = 1500;

    fn of(address: IpAddr) -> Result<Self, DeviceError> {
        let all = interfaces::list().map_err(|source| DeviceError::Io { action: "listing the interfaces", source })?;
        let named = all.iter().find(|i| i.addresses.iter().any(|&(a, _)| a == address));
        // All of 127/8 is ours, though the loopback names one address.
        let found = named.or_else(|| all.iter().find(|i| i.loopback && i.covers(address)));
        Ok(found.map_or_else(
            || Self { name: address.to_string(), mtu: Self::USUAL_MTU, scope: 0 },
            |i| Self { name: i.name.clone(), mtu: i.mtu, scope: i.index },
        ))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A device on `::1`. There is one such address, and another test may hold it for a moment.
    pub(crate) fn open_ipv6(options: UdpOptions) -> UdpDevice {
        let attempt = |_| match UdpDevice::open_with(core::net::Ipv6Addr::LOCALHOST.into(), options) {
            Err(DeviceError::PortInUse { .. }) => {
                std::thread::sleep(Duration::from_millis(50));
                None
            }
            other => Some(other),
        };
        (0..200).find_map(attempt).unwrap().unwrap()
    }
}

#[cfg(test)]
mod superframes;
#[cfg(test)]
mod tests {
    use core::net::{Ipv4Addr, Ipv6Addr};
    use std::net::UdpSocket;

    use super::testing::open_ipv6;
    use super::*;
    use crate::device::testing::loopback_address as address;

    const T0: Instant = Instant::ZERO;
    const SECOND: Option<Duration> = Some(Duration::from_secs(1));

    fn device() -> UdpDevice {
        UdpDevice::open(address()).unwrap()
    }

    fn flow(from: &UdpDevice, dst: IpAddr) -> Flow {
        Flow {
            src: from.address,
            dst,
            src_port: Flow::PORT,
            traffic_class: 0,
            hop_limit: HOPS,
            flow_label: 0,
            vlan: None,
        }
    }

    fn send(device: &mut UdpDevice, flow: Flow, packets: &[&[u8]]) -> usize {
        let mut packets = packets.iter();
        let taken = device.transmit(T0, usize::MAX, &mut |room| {
            let packet = packets.next()?;
            assert_eq!((room.headroom, room.segments_max, room.ids), (0, SEGMENTS_MAX, IdRule::Index));
            room.buf[..packet.len()].copy_from_slice(packet);
            Some(TxBurst { flow, len: packet.len(), segment: packet.len(), segments: 1 })
        });
        taken.unwrap()
    }

    fn receive(device: &mut UdpDevice, want: usize) -> Vec<(Flow, Vec<u8>)> {
        let mut got = Vec::new();
        for _ in 0..100 {
            device.wait(SECOND).unwrap();
            device
                .receive(T0, want - got.len(), &mut |b| {
                    assert_eq!((b.segment, b.ids), (b.bytes.len(), RxIds::Hidden));
                    got.push((b.flow, b.bytes.to_vec()));
                })
                .unwrap();
            if got.len() == want {
                break;
            }
        }
        got
    }

    #[test]
    fn datagrams_arrive_whole_in_order_with_their_addresses_and_marks() {
        let (mut a, mut b) = (device(), device());
        assert_eq!(a.capabilities().path_mtu, PathMtu::B4096);
        // Expedited forwarding, congestion experienced.
        let f = Flow { traffic_class: 0xBB, hop_limit: 7, ..flow(&a, b.address) };
        let long = vec![0x5A; 4096 + 60];
        assert_eq!(send(&mut a, f, &[b"one", &long, b"three"]), 3);
        let got = receive(&mut b, 3);
        assert_eq!(got, [(f, b"one".to_vec()), (f, long), (f, b"three".to_vec())]);
        // The next datagram has the socket's own marks again.
        let plain = flow(&a, b.address);
        send(&mut a, plain, &[b"four"]);
        assert_eq!(receive(&mut b, 1), [(plain, b"four".to_vec())]);
        assert_eq!((a.lost(), b.lost()), (DeviceLosses::default(), DeviceLosses::default()));
    }

    #[test]
    fn a_burst_longer_than_a_batch_passes_and_budgets_hold() {
        let (mut a, mut b) = (device(), device());
        let packets: Vec<[u8; 2]> = (0..100u16).map(u16::to_be_bytes).collect();
        let slices: Vec<&[u8]> = packets.iter().map(<[u8; 2]>::as_slice).collect();
        let f = flow(&a, b.address);
        assert_eq!(send(&mut a, f, &slices), 100);
        let mut first = 0;
        assert_eq!(b.receive(T0, 5, &mut |_| first += 1).unwrap(), 5);
        assert_eq!(first, 5);
        let rest: Vec<_> = receive(&mut b, 95).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(rest, packets[5..]);
        assert_eq!(b.receive(T0, 1, &mut |_| ()).unwrap(), 0);
        let mut offered = 0;
        let taken = a.transmit(T0, 40, &mut |_| {
            offered += 1;
            Some(TxBurst { flow: f, len: 1, segment: 1, segments: 1 })
        });
        assert_eq!((taken.unwrap(), offered), (40, 40));
        assert_eq!(receive(&mut b, 40).len(), 40);
    }

    #[test]
    fn ipv6_carries_marks_too() {
        let mut d = open_ipv6(UdpOptions::default());
        let address = d.address;
        let f = Flow { traffic_class: 2, hop_limit: 3, ..flow(&d, address) };
        send(&mut d, f, &[b"six"]);
        assert_eq!(receive(&mut d, 1), [(f, b"six".to_vec())]);
    }

    #[test]
    fn source_ports_give_entropy_and_answers_still_come_to_4791() {
        let mut a = UdpDevice::open_with(address(), UdpOptions { source_ports: 2, ..UdpOptions::default() }).unwrap();
        let mut b = device();
        assert_eq!(b.source_ports(), [Flow::PORT]);
        let ports = a.source_ports().to_vec();
        assert_eq!(ports.len(), 2);
        assert!(!ports.contains(&Flow::PORT) && ports[0] != ports[1]);
        for &src_port in &ports {
            let f = Flow { src_port, ..flow(&a, b.address) };
            send(&mut a, f, &[b"x"]);
            assert_eq!(receive(&mut b, 1), [(f, b"x".to_vec())]);
        }
        // A port that nobody announced is opened when it is first wanted, up to the limit.
        let free = UdpSocket::bind((a.address, 0)).unwrap().local_addr().unwrap().port();
        let f = Flow { src_port: free, ..flow(&a, b.address) };
        send(&mut a, f, &[b"y"]);
        assert_eq!(receive(&mut b, 1), [(f, b"y".to_vec())]);
        let opened = a.sockets.len();
        send(&mut a, f, &[b"z"]);
        assert_eq!(a.sockets.len(), opened);
    }

    #[test]
    fn a_group_is_heard_by_its_members_and_only_while_they_are() {
        let (mut a, mut b, mut c) = (device(), device(), device());
        let group: IpAddr = Ipv4Addr::new(239, 7, 9, 1).into();
        let f = flow(&a, group);
        for member in [&mut b, &mut c] {
            member.set_membership(group, true).unwrap();
            member.set_membership(group, true).unwrap();
        }
        send(&mut a, f, &[b"all"]);
        // The wait ends for it, too.
        assert_eq!(receive(&mut b, 1), [(f, b"all".to_vec())]);
        assert_eq!(receive(&mut c, 1), [(f, b"all".to_vec())]);
        assert_eq!(a.receive(T0, 1, &mut |_| ()).unwrap(), 0, "no member");
        // What is sent to a member itself still arrives, and only once.
        let to_b = flow(&a, b.address);
        send(&mut a, to_b, &[b"one"]);
        assert_eq!(receive(&mut b, 1), [(to_b, b"one".to_vec())]);
        assert_eq!(c.receive(T0, 1, &mut |_| ()).unwrap(), 0);
        b.set_membership(group, false).unwrap();
        send(&mut a, f, &[b"rest"]);
        assert_eq!(receive(&mut c, 1).len(), 1);
        assert_eq!(b.receive(T0, 1, &mut |_| ()).unwrap(), 0);
    }

    #[test]
    fn groups_that_cannot_be_joined_say_why() {
        let mut d = device();
        for no in [IpAddr::from(Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 1)), Ipv4Addr::new(10, 0, 0, 1).into()] {
            assert!(matches!(d.set_membership(no, true), Err(DeviceError::Membership { group, .. }) if group == no));
            d.set_membership(no, false).unwrap();
        }
        for i in 0..GROUPS_MAX {
            let group = Ipv4Addr::new(239, 7, 8, u8::try_from(i).unwrap());
            d.set_membership(group.into(), true).unwrap();
        }
        let one_more = d.set_membership(Ipv4Addr::new(239, 7, 10, 1).into(), true);
        assert!(matches!(one_more, Err(DeviceError::Membership { .. })));
        d.set_membership(Ipv4Addr::new(239, 7, 8, 0).into(), false).unwrap();
        d.set_membership(Ipv4Addr::new(239, 7, 10, 1).into(), true).unwrap();
    }

    #[test]
    fn the_number_of_source_ports_is_bounded() {
        let mut a =
            UdpDevice::open_with(address(), UdpOptions { source_ports: 1000, ..UdpOptions::default() }).unwrap();
        assert_eq!(a.source_ports().len(), SOURCE_PORTS_MAX);
        let free = UdpSocket::bind((a.address, 0)).unwrap().local_addr().unwrap().port();
        let f = Flow { src_port: free, ..flow(&a, a.address) };
        assert_eq!(send(&mut a, f, &[b"x"]), 1);
        assert_eq!(a.lost().transmit, 1);
        assert_eq!(a.sockets.len(), 1 + SOURCE_PORTS_MAX);
    }

    #[test]
    fn what_cannot_be_sent_as_it_is_counts_as_lost_and_the_rest_goes() {
        let (mut a, mut b) = (device(), device());
        let good = flow(&a, b.address);
        let bad = [
            Flow { src: b.address, ..good },
            Flow { src: Ipv6Addr::LOCALHOST.into(), dst: Ipv6Addr::LOCALHOST.into(), ..good },
            // A broadcast needs a permission that the socket does not have.
            Flow { dst: Ipv4Addr::BROADCAST.into(), ..good },
        ];
        let mut flows = bad.into_iter().chain([good]);
        let taken = a.transmit(T0, 10, &mut |room| {
            room.buf[0] = 9;
            flows.next().map(|flow| TxBurst { flow, len: 1, segment: 1, segments: 1 })
        });
        assert_eq!(taken.unwrap(), 4);
        assert_eq!(a.lost().transmit, 3);
        assert_eq!(receive(&mut b, 1), [(good, vec![9])]);
    }

    #[test]
    fn a_peer_that_is_not_there_breaks_nothing() {
        let (mut a, mut b) = (device(), device());
        let nobody = flow(&a, address());
        for _ in 0..10 {
            // Each draws an ICMP port unreachable.
            assert_eq!(send(&mut a, nobody, &[b"?"]), 1);
            assert_eq!(a.receive(T0, 1, &mut |_| ()).unwrap(), 0);
        }
        let somebody = flow(&a, b.address);
        send(&mut a, somebody, &[b"!"]);
        assert_eq!(receive(&mut b, 1).len(), 1);
        assert_eq!(a.lost(), DeviceLosses::default());
    }

    #[test]
    fn a_full_socket_keeps_what_it_was_given() {
        let (mut a, mut b) = (device(), device());
        let f = flow(&a, b.address);
        // A slot that the system refused for now, as after EAGAIN.
        a.tx.buffer(0)[..4].copy_from_slice(b"kept");
        assert!(a.queue_burst(TxBurst { flow: f, len: 4, segment: 4, segments: 1 }));
        a.queue.retry_at = Some(T0 + RETRY_AFTER);
        assert_eq!(a.poll_timeout(), Some(T0 + RETRY_AFTER));
        // The socket is writable, so the wait ends at once.
        a.wait(None).unwrap();
        assert_eq!(send(&mut a, f, &[b"next"]), 1);
        assert_eq!(a.poll_timeout(), None);
        assert_eq!(receive(&mut b, 2), [(f, b"kept".to_vec()), (f, b"next".to_vec())]);
    }

    #[test]
    fn datagrams_too_long_or_empty_are_dropped_and_counted() {
        let mut b = device();
        let raw = UdpSocket::bind((address(), 0)).unwrap();
        let to = SocketAddr::new(b.address, Flow::PORT);
        raw.send_to(&vec![0; DATAGRAM_MAX + 1], to).unwrap();
        raw.send_to(&[], to).unwrap();
        raw.send_to(b"good", to).unwrap();
        assert_eq!(receive(&mut b, 1)[0].1, b"good");
        assert_eq!(b.lost().receive, 2);
    }

    #[test]
    fn a_flood_of_useless_datagrams_does_not_keep_a_receive_busy() {
        let mut b = device();
        let raw = UdpSocket::bind((address(), 0)).unwrap();
        for _ in 0..4 * BATCH {
            raw.send_to(&[], SocketAddr::new(b.address, Flow::PORT)).unwrap();
        }
        assert_eq!(b.receive(T0, BATCH, &mut |_| ()).unwrap(), 0);
        assert_eq!(b.lost().receive, BATCH as u64);
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let a = device();
        assert!(matches!(UdpDevice::open(a.address), Err(DeviceError::PortInUse { address }) if address == a.address));
        // TEST-NET-3 is nobody's.
        let foreign: IpAddr = Ipv4Addr::new(203, 0, 113, 9).into();
        for address in [foreign, Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(224, 0, 0, 9).into()] {
            assert!(matches!(UdpDevice::open(address), Err(DeviceError::NotOurAddress { .. })));
        }
        let denied = open_error(foreign, io::Error::from_raw_os_error(libc::EACCES));
        assert!(matches!(denied, DeviceError::MissingCapability { .. }));
    }

    #[test]
    fn a_wait_ends_at_its_timeout() {
        let mut a = device();
        a.wait(Some(Duration::from_nanos(1))).unwrap();
        assert_eq!(a.receive(T0, 1, &mut |_| ()).unwrap(), 0);
    }
}
