//! An endpoint's place on an Ethernet network, over any raw frame I/O.
//!
//! Owns what the raw devices share: the Ethernet header before each burst, resolution of next hops with the bursts that
//! wait for it, what our own address sends to itself, and what a received frame is for. Frames come and go as bytes: the
//! device around it makes the system calls. Never knows a QP.

mod groups;
mod next_hop;
mod setup;
pub(super) mod vnet;

use core::net::IpAddr;
use core::ops::Range;
use std::collections::VecDeque;

pub(super) use self::groups::{GroupSockets, join_v4};
use self::next_hop::HopCache;
pub(super) use self::next_hop::Routes;
pub(super) use self::setup::Setup;
use self::vnet::{PLAIN, VNET_HEADER};
use super::{DeviceCapabilities, DeviceError, DeviceLosses, IcrcMode, RxSink};
use crate::burst::{IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::neighbor::{NeighborConfig, NeighborCounters, Neighbors, Resolution};
use crate::time::Instant;
use crate::types::{MacAddr, PathMtu};
use crate::wire::{Flow, OuterError, VlanTag, parse_ethernet, parse_ip, write_ethernet};

/// Bytes that a slot has before the IP header: a virtio network header and an Ethernet header with a VLAN tag.
pub(super) const HEADROOM: usize = VNET_HEADER + 18;
/// Bytes of an Ethernet header without a tag.
const UNTAGGED: usize = 14;
/// Bursts that wait for resolution; further ones are lost.
pub(super) const HELD_MAX: usize = 1024;
/// Bursts that wait for one next hop: a long message and what is acknowledged with it. One more pushes out the oldest.
pub(super) const HELD_PER_HOP_MAX: usize = 256;
/// Bursts to our own address that wait to be received; further ones are lost.
pub(super) const LOOPED_MAX: usize = 1024;
/// Bytes of all that waits for resolution, and of all that waits to be received by ourselves; further bursts are lost.
pub(super) const WAITING_BYTES_MAX: usize = 8 << 20;
/// Bytes of memory that is kept for the next burst that has to wait.
const SPARE_BYTES_MAX: usize = 4 << 20;
/// Bytes of the longest IP packet, and so of a superframe.
pub(super) const IP_MAX: usize = 65_535;
const MTU_MIN: usize = 256 + PathMtu::HEADER_ALLOWANCE;
const VLAN_TPID: [u8; 2] = [0x81, 0x00];

/// Whose addresses a raw device uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressMode {
    /// Those that the interface has when the device is opened, beside the kernel, which goes on answering ARP and ping
    /// for them and whose routes and neighbours are used.
    Shared,
    /// A MAC and addresses that nobody else has; the device answers ARP, neighbour solicitation and ping for them. Every
    /// destination is taken to be on the link. This machine's own kernel, on the same interface, cannot be reached: what
    /// is sent leaves it. With the MAC of the interface, a kernel that forwards would forward what is for the addresses.
    Own {
        /// The MAC; that of the interface, or any other unicast one.
        mac: MacAddr,
        /// The addresses, in the order of the GID table.
        addresses: Vec<IpAddr>,
    },
}

/// How frames are handed to the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// As they are.
    Plain,
    /// Behind a virtio network header.
    Vnet {
        /// Segments that a superframe may have; 1: only packets are sent.
        segments_max: usize,
    },
}

/// What the port is made of.
pub(super) struct PortConfig {
    /// Name of the device, for people.
    pub(super) name: String,
    /// Name of the interface.
    pub(super) interface: String,
    pub(super) mtu: usize,
    pub(super) mac: MacAddr,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) vlan: Option<VlanTag>,
    pub(super) icrc: IcrcMode,
    /// Whether we answer for the addresses.
    pub(super) answers: bool,
    pub(super) routes: Routes,
    pub(super) framing: Framing,
}

/// What became of a burst that was put into a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Placed {
    /// These bytes of the slot are a frame to send, its virtio header included where frames have one.
    Send(Range<usize>),
    /// It was kept, or counted as lost: the slot is free.
    Gone,
}

struct Held {
    hop: IpAddr,
    burst: TxBurst,
    /// A slot's bytes, headroom included.
    bytes: Vec<u8>,
}

/// See the module.
pub(super) struct EthernetPort {
    capabilities: DeviceCapabilities,
    mac: MacAddr,
    vlan: Option<VlanTag>,
    neighbors: Neighbors,
    /// The neighbours' generation that `hops` and `held` have seen.
    generation: u64,
    routes: Routes,
    hops: HopCache,
    held: VecDeque<Held>,
    held_bytes: usize,
    ready: VecDeque<Vec<u8>>,
    /// IP packets with the bytes of a segment.
    looped: VecDeque<(Vec<u8>, usize)>,
    looped_bytes: usize,
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    losses: DeviceLosses,
    next_id: u16,
    vnet: bool,
    /// Segments that a burst may have now; what the capabilities say is what it began with.
    segments_max: usize,
    /// Multicast groups that our own packets shall reach too.
    groups: Vec<IpAddr>,
}

impl EthernetPort {
    /// # Errors
    /// [`DeviceError::MtuTooSmall`].
    pub(super) fn new(config: PortConfig) -> Result<Self, DeviceError> {
        let PortConfig { name, interface, mtu, mac, addresses, vlan, icrc, answers, routes, framing } = config;
        let Some(path_mtu) = PathMtu::for_interface(mtu).filter(|_| mtu >= MTU_MIN) else {
            return Err(DeviceError::MtuTooSmall { name: interface, mtu });
        };
        let neighbors = Neighbors::new(NeighborConfig { mac, addresses: addresses.clone(), answers, mtu });
        let capabilities = DeviceCapabilities {
            medium: Medium::Ip,
            mtu,
            path_mtu,
            segments_max: match framing {
                Framing::Plain => 1,
                Framing::Vnet { segments_max } => segments_max.max(1),
            },
            icrc,
            addresses,
            mac: Some(mac),
            name,
        };
        Ok(Self {
            segments_max: capabilities.segments_max,
            capabilities,
            mac,
            vlan,
            generation: neighbors.generation(),
            neighbors,
            routes,
            hops: HopCache::default(),
            held: VecDeque::with_capacity(HELD_MAX),
            held_bytes: 0,
            ready: VecDeque::with_capacity(HELD_MAX),
            looped: VecDeque::new(),
            looped_bytes: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            losses: DeviceLosses::default(),
            next_id: 1,
            vnet: framing != Framing::Plain,
            groups: Vec::new(),
        })
    }

    pub(super) const fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    pub(super) const fn losses(&self) -> DeviceLosses {
        self.losses
    }

    pub(super) const fn neighbor_counters(&self) -> NeighborCounters {
        self.neighbors.counters()
    }

    /// Counts bursts that were placed and then not sent.
    pub(super) fn lose(&mut self, bursts: usize) {
        self.losses.transmit += bursts as u64;
    }

    /// Counts a frame for us that cannot be read.
    pub(super) fn lose_received(&mut self) {
        self.losses.receive += 1;
    }

    /// Tells the network of our addresses.
    pub(super) fn announce(&mut self) {
        self.neighbors.announce();
    }

    /// Adds to the device's name, for people, how it works.
    pub(super) fn describe(&mut self, how: &str) {
        self.capabilities.name.push_str(how);
    }

    /// Bytes that a slot must have.
    pub(super) const fn slot_len(&self) -> usize {
        HEADROOM + if self.capabilities.segments_max > 1 { IP_MAX } else { self.capabilities.mtu }
    }

    /// The system takes no superframes: from now on no burst has more than one segment.
    pub(super) const fn refuse_superframes(&mut self) {
        self.segments_max = 1;
    }

    /// A slot, of [`Self::slot_len`] or less, as the endpoint shall fill it.
    pub(super) const fn room<'a>(&self, slot: &'a mut [u8]) -> TxRoom<'a> {
        TxRoom {
            buf: slot,
            headroom: HEADROOM,
            segments_max: self.segments_max,
            ids: IdRule::From(self.next_id),
            medium: Medium::Ip,
        }
    }

    /// Puts the Ethernet header before what the endpoint wrote into `slot`.
    pub(super) fn place(&mut self, now: Instant, burst: &TxBurst, slot: &mut [u8]) -> Placed {
        #[allow(clippy::cast_possible_truncation)] // Ids are modular.
        let ids = burst.segments as u16;
        self.next_id = self.next_id.wrapping_add(ids);
        let flow = &burst.flow;
        let ours = &self.capabilities.addresses;
        // What another would refuse: a foreign source, or a packet that the interface cannot carry.
        if !self.fits(burst) || !ours.contains(&flow.src) {
            self.losses.transmit += 1;
            return Placed::Gone;
        }
        if ours.contains(&flow.dst) {
            self.loop_back(burst, slot);
            return Placed::Gone;
        }
        if self.groups.contains(&flow.dst) {
            // A group reaches its members here, too; the interface does not hand us what we send.
            self.loop_back(burst, slot);
        }
        let mac = match self.hops.get(now, flow.dst) {
            Some(mac) => mac,
            None => match self.resolve(now, flow) {
                (_, Resolution::Known(mac)) => mac,
                (hop, Resolution::Pending) => {
                    self.hold(hop, burst, slot);
                    return Placed::Gone;
                }
                (_, Resolution::Unreachable) => {
                    self.losses.transmit += 1;
                    return Placed::Gone;
                }
            },
        };
        match self.frame(mac, burst, slot) {
            Some(range) => Placed::Send(range),
            None => {
                self.losses.transmit += 1;
                Placed::Gone
            }
        }
    }

    /// Hands a received frame to whom it is for; says whether `sink` got it. `tag` and `segment` are what the system took
    /// out of it.
    pub(super) fn accept(
        &mut self,
        now: Instant,
        frame: &[u8],
        tag: Option<u16>,
        segment: Option<u16>,
        sink: &mut RxSink<'_>,
    ) -> bool {
        let Some(to) = frame.first_chunk::<6>().map(|m| MacAddr(*m)) else { return false };
        if to != self.mac && !to.is_multicast() {
            return false;
        }
        // A tag with VLAN 0 states a priority alone.
        let id = |tag: Option<VlanTag>| tag.map_or(0, |t| t.id);
        let tag = tag.or_else(|| inner_tag(frame)).map(|tci| VlanTag { id: tci & 0xfff, priority: (tci >> 13) as u8 });
        if id(tag) != id(self.vlan) {
            return false;
        }
        match parse_ethernet(frame) {
            Ok(parsed) => {
                if !self.is_ours(parsed.flow.dst) {
                    return false;
                }
                let bytes = parsed.payload;
                // What is longer than the interface carries is a superframe; without the size of its segments it is lost.
                let segment = segment.map_or(bytes.len(), usize::from).min(bytes.len());
                if bytes.is_empty() || segment > self.capabilities.mtu {
                    self.losses.receive += 1;
                    return false;
                }
                let flow = Flow { vlan: parsed.flow.vlan.or(tag), ..parsed.flow };
                sink(RxBurst { flow, bytes, segment, ids: RxIds::Known(parsed.ip), at: now });
                return true;
            }
            Err(OuterError::NotIp(_) | OuterError::NotUdp(_) | OuterError::NotRoce(_)) => self.resolve_from(now, frame),
            // Options and fragments are found before the protocol is.
            Err(_) if !is_udp(frame) => self.resolve_from(now, frame),
            Err(_) => self.losses.receive += 1,
        }
        false
    }

    /// Takes up a frame for resolution, or a ping.
    fn resolve_from(&mut self, now: Instant, frame: &[u8]) {
        match frame.split_at_checked(12) {
            // A TAP leaves the tag in the frame.
            Some((macs, rest)) if rest.starts_with(&VLAN_TPID) => {
                let untagged = [macs, rest.get(4..).unwrap_or_default()].concat();
                self.neighbors.handle_frame(now, &untagged);
            }
            _ => self.neighbors.handle_frame(now, frame),
        }
        self.release();
    }

    /// Hands at most `budget` bursts that we sent to ourselves to `sink`; returns how many.
    pub(super) fn receive_looped(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> usize {
        let mut handed = 0;
        while handed < budget
            && let Some((packet, segment)) = self.looped.pop_front()
        {
            self.looped_bytes = self.looped_bytes.saturating_sub(packet.len());
            match parse_ip(&packet) {
                Ok(parsed) => {
                    let bytes = parsed.payload;
                    let ids = RxIds::Known(parsed.ip);
                    sink(RxBurst { flow: parsed.flow, bytes, segment: segment.min(bytes.len()), ids, at: now });
                    handed += 1;
                }
                Err(_) => self.losses.receive += 1,
            }
            self.recycle(packet);
        }
        handed
    }

    /// Does what is due: call before frames are received or sent.
    pub(super) fn service(&mut self, now: Instant) {
        if self.neighbors.poll_timeout().is_some_and(|due| due <= now) {
            self.neighbors.handle_timeout(now);
            self.release();
        }
    }

    /// The next frame that the port itself wants sent: questions, answers, and bursts that waited. Says whether it is a
    /// burst (then its loss counts).
    pub(super) fn next_frame(&mut self) -> Option<(Vec<u8>, bool)> {
        if let Some(frame) = self.ready.pop_front() {
            return Some((frame, true));
        }
        let mut frame = self.neighbors.poll_frame()?;
        if let Some(tag) = self.vlan {
            let tci = (u16::from(tag.priority & 7) << 13 | (tag.id & 0xfff)).to_be_bytes();
            frame.splice(12..12, VLAN_TPID.into_iter().chain(tci));
        }
        if self.vnet {
            frame.splice(0..0, PLAIN);
        }
        Some((frame, false))
    }

    /// Takes back what [`Self::next_frame`] gave and the system had no room for: a burst is the next again, while a question
    /// is asked again and an answer is asked for again.
    pub(super) fn put_back(&mut self, frame: Vec<u8>, burst: bool) {
        if burst {
            self.ready.push_front(frame);
        } else {
            self.recycle(frame);
        }
    }

    /// Packets to `group` reach us, or do no more, when we send them.
    pub(super) fn set_membership(&mut self, group: IpAddr, member: bool) {
        self.groups.retain(|g| *g != group);
        if member {
            self.groups.push(group);
        }
    }

    /// Takes a sent frame's memory back.
    pub(super) fn recycle(&mut self, mut bytes: Vec<u8>) {
        if self.spare.len() < HELD_MAX && self.spare_bytes + bytes.capacity() <= SPARE_BYTES_MAX {
            bytes.clear();
            self.spare_bytes += bytes.capacity();
            self.spare.push(bytes);
        }
    }

    /// Whether bursts to ourselves wait.
    pub(super) fn has_looped(&self) -> bool {
        !self.looped.is_empty()
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let now = Some(Instant::ZERO)
            .filter(|_| !self.looped.is_empty() || !self.ready.is_empty() || self.neighbors.has_frames());
        now.or_else(|| self.neighbors.poll_timeout())
    }

    /// Whether the interface can carry every packet of it.
    fn fits(&self, burst: &TxBurst) -> bool {
        let DeviceCapabilities { mtu, segments_max, .. } = self.capabilities;
        let header = burst.flow.header_len();
        match burst.segments {
            1 => burst.len <= mtu,
            n => {
                let segments = burst.len.saturating_sub(header).div_ceil(burst.segment.max(1));
                n <= segments_max && segments == n && header + burst.segment <= mtu && burst.len <= IP_MAX
            }
        }
    }

    fn is_ours(&self, ip: IpAddr) -> bool {
        self.capabilities.addresses.contains(&ip) || ip.is_multicast()
    }

    /// The slow path of [`Self::place`]: at most once a second for a destination that is known.
    fn resolve(&mut self, now: Instant, flow: &Flow) -> (IpAddr, Resolution) {
        if flow.dst.is_multicast() {
            return (flow.dst, self.neighbors.resolve(now, flow.dst, flow.src));
        }
        let Some(hop) = self.routes.next_hop(now, flow.dst) else {
            return (flow.dst, Resolution::Unreachable);
        };
        if self.neighbors.peek(hop).is_none()
            && let Some(mac) = self.routes.known_neighbor(hop)
        {
            self.neighbors.insert(now, hop, mac);
        }
        let resolution = self.neighbors.resolve(now, hop, flow.src);
        self.release();
        if let Resolution::Known(mac) = resolution {
            self.hops.put(now, flow.dst, mac);
        }
        (hop, resolution)
    }

    fn frame(&self, mac: MacAddr, burst: &TxBurst, slot: &mut [u8]) -> Option<Range<usize>> {
        let vlan = tag_of(burst.flow.vlan, self.vlan);
        let start = if vlan.is_some() { VNET_HEADER } else { HEADROOM - UNTAGGED };
        write_ethernet(mac, self.mac, vlan, burst.flow.dst.is_ipv4(), slot.get_mut(start..HEADROOM)?)?;
        let frame = start..HEADROOM + burst.len;
        if !self.vnet {
            return Some(frame);
        }
        let header = match burst.segments {
            1 => PLAIN,
            _ => vnet::superframe(slot.get_mut(frame.clone())?, HEADROOM - start, burst.segment)?,
        };
        slot.get_mut(..start)?.last_chunk_mut().map(|to| *to = header)?;
        Some(start - VNET_HEADER..frame.end)
    }

    /// Keeps a burst until its next hop is known. Of too many for one hop the oldest goes: the peer sees a gap before
    /// those that reach it and asks again at once, while a lost end is missed only by a timeout.
    fn hold(&mut self, hop: IpAddr, burst: &TxBurst, slot: &[u8]) {
        let Some(bytes) = slot.get(..HEADROOM + burst.len) else { return };
        let same = self.held.iter().filter(|h| h.hop == hop).count();
        if same >= HELD_PER_HOP_MAX
            && let Some(oldest) = self.held.iter().position(|h| h.hop == hop)
            && let Some(oldest) = self.held.remove(oldest)
        {
            self.losses.transmit += 1;
            self.held_bytes = self.held_bytes.saturating_sub(oldest.bytes.len());
            self.recycle(oldest.bytes);
        }
        if self.held.len() >= HELD_MAX || self.held_bytes + bytes.len() > WAITING_BYTES_MAX {
            self.losses.transmit += 1;
            return;
        }
        let bytes = self.copy(bytes);
        self.held_bytes += bytes.len();
        self.held.push_back(Held { hop, burst: *burst, bytes });
    }

    fn loop_back(&mut self, burst: &TxBurst, slot: &[u8]) {
        let Some(bytes) = slot.get(HEADROOM..HEADROOM + burst.len) else { return };
        if self.looped.len() >= LOOPED_MAX || self.looped_bytes + bytes.len() > WAITING_BYTES_MAX {
            self.losses.transmit += 1;
            return;
        }
        let bytes = self.copy(bytes);
        self.looped_bytes += bytes.len();
        self.looped.push_back((bytes, burst.segment));
    }

    fn copy(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut copy = self.spare.pop().unwrap_or_default();
        self.spare_bytes = self.spare_bytes.saturating_sub(copy.capacity());
        copy.extend_from_slice(bytes);
        copy
    }

    /// After news of the neighbours: forgets what may be wrong and decides on the bursts that waited, in their order.
    fn release(&mut self) {
        if self.generation == self.neighbors.generation() {
            return;
        }
        self.generation = self.neighbors.generation();
        self.hops.clear();
        for _ in 0..self.held.len() {
            let Some(mut held) = self.held.pop_front() else { break };
            self.held_bytes = self.held_bytes.saturating_sub(held.bytes.len());
            match self.neighbors.peek(held.hop) {
                Some(Resolution::Pending) => {
                    self.held_bytes += held.bytes.len();
                    self.held.push_back(held);
                }
                Some(Resolution::Known(mac)) => match self.frame(mac, &held.burst, &mut held.bytes) {
                    Some(range) => {
                        held.bytes.drain(..range.start);
                        self.ready.push_back(held.bytes);
                    }
                    None => self.losses.transmit += 1,
                },
                Some(Resolution::Unreachable) | None => {
                    self.losses.transmit += 1;
                    self.recycle(held.bytes);
                }
            }
        }
    }
}

/// The tag to send: a flow that states a priority alone has it in the device's VLAN; outside of one, it has no tag, which
/// not every switch lets through.
fn tag_of(flow: Option<VlanTag>, device: Option<VlanTag>) -> Option<VlanTag> {
    match (flow, device) {
        (None, own) => own,
        (Some(VlanTag { id: 0, priority }), own) => own.map(|VlanTag { id, .. }| VlanTag { id, priority }),
        (tag, _) => tag,
    }
}

/// The tag of a frame that still has it.
fn inner_tag(frame: &[u8]) -> Option<u16> {
    match frame.get(12..16) {
        Some(&[0x81, 0x00, high, low]) => Some(u16::from_be_bytes([high, low])),
        _ => None,
    }
}

/// Whether an IP frame says that it carries UDP.
fn is_udp(frame: &[u8]) -> bool {
    let network = UNTAGGED + if inner_tag(frame).is_some() { 4 } else { 0 };
    let protocol = match frame.get(network - 2..network) {
        Some([0x08, 0x00]) => frame.get(network + 9),
        _ => frame.get(network + 6),
    };
    protocol == Some(&17)
}

#[cfg(test)]
mod tests;
