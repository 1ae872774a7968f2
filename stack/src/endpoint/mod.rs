//! The endpoint: one RoCEv2 device, sans-IO.
//!
//! Owns all objects of a device (PDs, MRs, CQs, SRQs, QPs, address handles) and the demultiplexing of packets to QPs.
//! Inputs are `handle_*`, outputs `poll_*`, commands the [`Verbs`](crate::verbs::Verbs). Never reads a clock, draws no
//! random number but from its seed, and never touches a device: a driver carries bursts between the two.

mod config;
mod multicast;
mod peer_ids;
mod probes;
mod report;
mod runs;
mod timers;
mod turn;
mod verbs;

use core::net::{IpAddr, Ipv4Addr};
use std::collections::VecDeque;

pub use config::EndpointConfig;
pub use multicast::MembershipChange;
pub use probes::{PROBE_SOURCES, PROBE_WINDOW, ProbeSource};
pub use report::{CqReport, DeviceReport, MrReport, Page, QpReport, SrqReport};
pub use turn::{BURST_BYTES, TURN_BYTES};
pub(crate) use verbs::bind_request;

use crate::burst::{IcrcMode, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::counters::{Counters, DropReason};
use crate::cq::{CqTable, EventQueue};
use crate::mem::MrTable;
use crate::qp::{AhTable, Arrival, Cx, Poster, Qp, SpareQueues};
use crate::ring::Consumer;
use crate::rng::Rng;
use crate::srq::{RecvProducer, SrqTable};
use crate::table::{NumberMap, Slab};
use crate::time::Instant;
use crate::types::{Gid, PKey, Qpn};
use crate::verbs::kind;
use crate::verbs::{AsyncEvent, CqHandle, QpHandle, QpState, SrqHandle, WorkCompletion};
use crate::wire::{Body, DONT_FRAGMENT, Flow, IcrcStarts, IpFields, Packet, ParseError, is_inside};
use multicast::Groups;
use peer_ids::PeerIds;
use probes::{Probe, Probes};
use timers::Timers;
use turn::Turn;

/// Multicast memberships of an endpoint at most.
pub const MAX_MULTICAST: usize = 1024;
/// Entries of the P_Key table at most.
pub const MAX_PKEYS: usize = 128;
/// PDs at most.
pub const MAX_PDS: usize = 32_768;
/// CQs at most.
pub const MAX_CQS: usize = 65_536;
/// Entries of a CQ at most.
pub const MAX_CQE: u32 = 1 << 20;
/// SRQs at most.
pub const MAX_SRQS: usize = 960;
/// Address handles at most.
pub const MAX_AHS: usize = 65_536;
/// Work requests of a queue at most.
pub const MAX_WR: u32 = 16_384;
/// Elements of a work request at most.
pub const MAX_SGE: u32 = 32;
/// Inline bytes of a send at most.
pub const MAX_INLINE: u32 = 512;
/// QPNs below this are reserved, as on Linux.
const FIRST_QPN: u32 = 17;

struct QpSlot {
    qp: Qp,
    /// What the QP counted.
    counters: Counters,
    /// Stands in the ring of QPs that may have something to send.
    queued: bool,
    turn: Turn,
}

/// A RoCEv2 endpoint.
pub struct Endpoint {
    config: EndpointConfig,
    gids: Vec<Gid>,
    node_guid: u64,
    now: Instant,
    rng: Rng,
    pds: Slab<kind::Pd, ()>,
    mrs: MrTable,
    cqs: CqTable,
    srqs: SrqTable,
    ahs: AhTable,
    qps: Slab<kind::Qp, QpSlot>,
    by_qpn: NumberMap<QpHandle>,
    /// Of QPs that are gone, for the next ones.
    spare: SpareQueues,
    multicast: Groups,
    active: VecDeque<QpHandle>,
    timers: Timers,
    events: EventQueue,
    /// Packets and bytes, what belonged to no QP, and what QPs that are gone counted.
    counters: Counters,
    peer_ids: PeerIds,
    icrcs: IcrcStarts,
    probes: Probes,
    link_is_up: bool,
    /// Requests that QPs were given.
    requests: u64,
    /// CQs that overran in the call that is being made; empty between calls.
    overruns: Vec<CqHandle>,
}

impl Endpoint {
    /// An endpoint with no objects. Everything random (QPNs, keys, hashes) comes from `seed`.
    #[must_use]
    pub fn new(mut config: EndpointConfig, seed: [u8; 32]) -> Self {
        config.pkeys.truncate(MAX_PKEYS);
        if config.pkeys.is_empty() {
            config.pkeys.push(PKey::DEFAULT);
        }
        let mut rng = Rng::from_seed(seed);
        let gids = config.addresses.iter().map(|ip| Gid::from(*ip)).collect();
        let mrs = MrTable::new(rng.fork(), config.iova);
        // Locally administered, and one for each endpoint ever made: peers key their connection tables by it.
        let node_guid = rng.next_u64() & !(1 << 56) | 1 << 57;
        Self {
            gids,
            node_guid,
            now: Instant::ZERO,
            pds: Slab::new(MAX_PDS),
            mrs,
            cqs: Slab::new(MAX_CQS),
            srqs: Slab::new(MAX_SRQS),
            ahs: Slab::new(MAX_AHS),
            qps: Slab::new(config.max_qp),
            by_qpn: NumberMap::new(rng.next_u64()),
            spare: SpareQueues::default(),
            multicast: Groups::default(),
            active: VecDeque::new(),
            timers: Timers::default(),
            events: EventQueue::default(),
            counters: Counters::default(),
            peer_ids: PeerIds::new(rng.next_u64()),
            icrcs: IcrcStarts::default(),
            probes: Probes::new(rng.next_u64()),
            link_is_up: true,
            requests: 0,
            overruns: Vec::new(),
            config,
            rng,
        }
    }

    /// What it was made of.
    #[must_use]
    pub fn config(&self) -> &EndpointConfig {
        &self.config
    }

    /// Packets that one transmit burst may have from now on, at least 1 (superframes off); fewer where the device says so.
    pub fn set_segments_max(&mut self, segments: usize) {
        self.config.segments_max = segments;
    }

    /// Counters of the port: the sum over its QPs, those that are gone, and what belonged to none.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut sum = self.counters.clone();
        for (_, slot) in self.qps.iter() {
            sum.add_qp(&slot.counters);
        }
        sum
    }

    /// Sources that lately sent to QPs that do not exist or talk to somebody else, or with wrong keys; the busiest first, at
    /// most [`PROBE_SOURCES`].
    #[must_use]
    pub fn probing_sources(&self) -> Vec<ProbeSource> {
        self.probes.busiest()
    }

    /// Counters of one QP, from its creation on.
    #[must_use]
    pub fn qp_counters(&self, qp: QpHandle) -> Option<&Counters> {
        self.qps.get(qp).map(|slot| &slot.counters)
    }

    /// Tells that the device failed: the port is down for good.
    pub fn link_down(&mut self) {
        if core::mem::replace(&mut self.link_is_up, false) {
            self.counters.link_downed += 1;
            self.events.push(AsyncEvent::PortError);
        }
    }

    /// How many request packets QPs were given, ever.
    pub(crate) const fn requests_heard(&self) -> u64 {
        self.requests
    }

    /// The last time it was told.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Objects that live: QPs, CQs, MRs, SRQs, PDs, AHs.
    #[must_use]
    pub fn object_counts(&self) -> [usize; 6] {
        [self.qps.len(), self.cqs.len(), self.mrs.len(), self.srqs.len(), self.pds.len(), self.ahs.len()]
    }

    /// The memory regions, for tests and replays that choose keys.
    pub fn memory_mut(&mut self) -> &mut MrTable {
        &mut self.mrs
    }

    /// Takes a received burst: splits it, and handles each packet or counts why it was dropped.
    pub fn handle_burst(&mut self, now: Instant, burst: RxBurst<'_>) {
        self.now = now;
        if burst.segment == 0 || burst.bytes.is_empty() {
            self.counters.count_drop(DropReason::Malformed);
            return;
        }
        for (index, segment) in burst.bytes.chunks(burst.segment).enumerate() {
            if is_inside(segment) && segment.len() < burst.bytes.len() {
                return self.handle_with_runs(&burst, index);
            }
            self.handle_segment(&burst, index, segment);
        }
    }

    fn handle_segment(&mut self, burst: &RxBurst<'_>, index: usize, segment: &[u8]) {
        // Parsed before the ICRC is looked at: only a packet whose opcode is known has a place for one.
        let packet = match Packet::parse(segment) {
            Ok(packet) => packet,
            Err(error) => {
                self.counters.count_drop(drop_reason(error));
                return;
            }
        };
        let Some(ip) = self.check_icrc(burst, index, segment) else {
            self.counters.count_drop(DropReason::IcrcError);
            return;
        };
        self.counters.rcvd_pkts += 1;
        self.counters.rcvd_bytes += segment.len() as u64;
        let marked = burst.congestion_experienced();
        self.counters.np_ecn_marked_roce_packets += u64::from(marked);
        let Flow { src, dst, .. } = burst.flow;
        if is_nobody(src) {
            self.counters.count_drop(DropReason::SourceAddress);
            return;
        }
        let arrival = Arrival { flow: &burst.flow, ip, segment: segment.len(), marked };
        if packet.dest_qp == Qpn::MULTICAST {
            self.handle_multicast(&packet, &arrival);
        } else if dst.is_multicast() {
            // A group has no QPs but those attached to it: no stranger opens a connection with all of us at once.
            self.counters.count_drop(DropReason::UnknownQp);
        } else if let Some(handle) = self.by_qpn.get(packet.dest_qp.get()).copied() {
            self.deliver(handle, &packet, &arrival);
        } else {
            self.counters.count_drop(DropReason::UnknownQp);
            self.note_probe(arrival.flow.src, Probe::Number(packet.dest_qp));
        }
    }

    fn note_probe(&mut self, source: IpAddr, probe: Probe) {
        if self.probes.note(self.now, source, probe) {
            self.counters.probe_alarms += 1;
            self.events.push(AsyncEvent::Probing(Gid::from(source)));
        }
    }

    /// The IPv4 fields of a segment whose ICRC is right, or need not be.
    fn check_icrc(&mut self, burst: &RxBurst<'_>, index: usize, segment: &[u8]) -> Option<IpFields> {
        let step = u16::try_from(index).unwrap_or(u16::MAX);
        let known = match burst.ids {
            RxIds::Known(ip) => IpFields { id: ip.id.wrapping_add(step), ..ip },
            RxIds::Hidden => IpFields { id: 0, flags_fragment: DONT_FRAGMENT },
        };
        if self.config.icrc == IcrcMode::Ignore {
            return Some(known);
        }
        let start = self.icrcs.get(&burst.flow, known.flags_fragment, segment.len());
        let found = match burst.ids {
            // A merged burst may come from packets that each had the same id: some senders leave it constant.
            RxIds::Known(first) => {
                let fits = |id| start.check(id, segment);
                (fits(known.id) || (index > 0 && fits(first.id))).then_some(known)
            }
            RxIds::Hidden => start
                .recover_id(segment, step)
                .filter(|id| *id == step || self.peer_ids.accept(self.now, burst.flow.src, *id))
                .map(|id| IpFields { id, ..known }),
        };
        match self.config.icrc {
            IcrcMode::Count if found.is_none() => {
                self.counters.count_drop(DropReason::IcrcError);
                Some(known)
            }
            _ => found,
        }
    }

    fn handle_multicast(&mut self, packet: &Packet<'_>, arrival: &Arrival<'_>) {
        let group = Gid::from(arrival.flow.dst);
        let mut delivered = false;
        // The list is short and bounded; a member that appears is a QP of ours.
        for i in 0..self.multicast.len() {
            if let Some((gid, qp)) = self.multicast.member(i)
                && gid == group
            {
                delivered = true;
                self.deliver(qp, packet, arrival);
            }
        }
        if !delivered {
            self.counters.count_drop(DropReason::UnknownQp);
        }
    }

    fn deliver(&mut self, handle: QpHandle, packet: &Packet<'_>, arrival: &Arrival<'_>) {
        self.requests = self.requests.wrapping_add(matches!(packet.body, Body::Request(_)).into());
        let probe = self.with_qp(handle, |qp, cx| {
            let refused = cx.counters.sent_access_err;
            cx.counters.rcvd_pkts += 1;
            cx.counters.rcvd_bytes += arrival.segment as u64;
            cx.counters.np_ecn_marked_roce_packets += u64::from(arrival.marked);
            if let Err(reason) = qp.handle_packet(packet, arrival, cx) {
                cx.counters.count_drop(reason);
                return (reason == DropReason::AddressMismatch).then_some(Probe::Number(packet.dest_qp));
            }
            (cx.counters.sent_access_err != refused).then_some(Probe::Key)
        });
        if let Some(probe) = probe.flatten() {
            self.note_probe(arrival.flow.src, probe);
        }
        self.wake(handle);
    }

    /// Lends everything else to one QP, and afterwards follows up: timers, and CQs that overran.
    fn with_qp<R>(&mut self, handle: QpHandle, f: impl FnOnce(&mut Qp, &mut Cx<'_>) -> R) -> Option<R> {
        let result = self.lend(handle, f);
        // What these QPs flush may make their other CQs overrun; each does so once.
        while let Some(cq) = self.overruns.pop() {
            self.fail_users_of(cq);
        }
        result
    }

    fn lend<R>(&mut self, handle: QpHandle, f: impl FnOnce(&mut Qp, &mut Cx<'_>) -> R) -> Option<R> {
        let slot = self.qps.get_mut(handle)?;
        let mut cx = Cx {
            now: self.now,
            mrs: &mut self.mrs,
            cqs: &mut self.cqs,
            srqs: &mut self.srqs,
            ahs: &self.ahs,
            source_ports: &self.config.source_ports,
            pkeys: &self.config.pkeys,
            rng: &mut self.rng,
            events: &mut self.events,
            counters: &mut slot.counters,
            overruns: &mut self.overruns,
            lost: false,
        };
        let result = f(&mut slot.qp, &mut cx);
        if cx.lost {
            slot.qp.cq_overran(&mut cx);
        }
        if let Some(deadline) = slot.qp.deadline() {
            self.timers.arm(handle, deadline);
        }
        Some(result)
    }

    /// All QPs of a CQ that overran go to ERR. Happens once a CQ, so the walk is affordable.
    fn fail_users_of(&mut self, cq: CqHandle) {
        let users: Vec<QpHandle> = self
            .qps
            .iter()
            .filter(|(_, s)| {
                let (send, recv) = s.qp.cqs();
                (send == cq || recv == cq) && !matches!(s.qp.state(), QpState::Reset | QpState::Err)
            })
            .map(|(h, _)| h)
            .collect();
        for handle in users {
            self.lend(handle, Qp::cq_overran);
            self.wake(handle);
        }
    }

    /// The QP may have something to send.
    fn wake(&mut self, handle: QpHandle) {
        if let Some(slot) = self.qps.get_mut(handle)
            && !slot.queued
        {
            slot.queued = true;
            self.active.push_back(handle);
        }
    }

    /// Tells that work requests were posted to a QP through a half that was given away.
    pub fn ring_doorbell(&mut self, qp: QpHandle) {
        self.wake(qp);
    }

    /// Acts on timers that have run out.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = now;
        while let Some(handle) = self.timers.pop_due(now) {
            if self.qps.get(handle).is_some() {
                self.with_qp(handle, Qp::handle_timeout);
                self.wake(handle);
            }
        }
    }

    /// When [`Self::handle_timeout`] wants to be called, though nothing arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Entries in the heap of timers: at most one a QP, for checks of leaks.
    #[must_use]
    pub fn pending_timers(&self) -> usize {
        self.timers.len()
    }

    /// Writes the next burst into `room`: packets of one QP. QPs take turns of [`TURN_BYTES`], so that each gets as much of
    /// the device as the others, whatever the length of its packets.
    pub fn poll_transmit(&mut self, now: Instant, mut room: TxRoom<'_>) -> Option<TxBurst> {
        self.now = now;
        room.segments_max = room.segments_max.min(self.config.segments_max).max(1);
        while let Some(handle) = self.active.pop_front() {
            if let Some(burst) = self.with_qp(handle, |qp, cx| qp.poll_transmit(cx, &mut room)).flatten() {
                self.sent(handle, &burst, room.medium);
                return Some(burst);
            }
            if let Some(slot) = self.qps.get_mut(handle) {
                slot.queued = false;
            }
        }
        None
    }

    /// As [`Self::poll_transmit`], but of a QP that has requests to send an ACK that waits alone is held: for a driver whose
    /// program posts the answer to what it was just told of. It goes out with the next call of [`Self::poll_transmit`].
    pub fn poll_posted(&mut self, now: Instant, mut room: TxRoom<'_>) -> Option<TxBurst> {
        self.now = now;
        room.segments_max = room.segments_max.min(self.config.segments_max).max(1);
        for _ in 0..self.active.len() {
            let handle = self.active.pop_front()?;
            if let Some(burst) = self.with_qp(handle, |qp, cx| qp.poll_posted(cx, &mut room)).flatten() {
                self.sent(handle, &burst, room.medium);
                return Some(burst);
            }
            if let Some(slot) = self.qps.get_mut(handle) {
                slot.queued = slot.qp.holds_ack();
                if slot.queued {
                    self.active.push_back(handle);
                }
            }
        }
        None
    }

    /// A QP wrote `burst`: whose turn it is next, and what is counted.
    fn sent(&mut self, handle: QpHandle, burst: &TxBurst, medium: Medium) {
        let mut slot = self.qps.get_mut(handle);
        if slot.as_mut().is_none_or(|slot| slot.turn.ends_after(burst.len)) {
            self.active.push_back(handle);
        } else {
            self.active.push_front(handle);
        }
        // From BTH to ICRC: on Ethernet the outer headers are in the burst, once.
        let outer = if medium == Medium::Ip { burst.flow.header_len() } else { 0 };
        for counters in [Some(&mut self.counters), slot.map(|s| &mut s.counters)].into_iter().flatten() {
            counters.sent_pkts += burst.segments as u64;
            counters.sent_bytes += burst.len.saturating_sub(outer) as u64;
        }
    }

    /// The next multicast group that the device shall join or leave. At most one waits for each group, so a driver whose
    /// device hears every group need not ask.
    pub fn poll_membership(&mut self) -> Option<MembershipChange> {
        self.multicast.poll_change()
    }

    /// Tells that the device could not join `group`: [`AsyncEvent::MulticastJoinFailed`] says so to the program.
    pub fn membership_failed(&mut self, group: Gid) {
        self.events.push(AsyncEvent::MulticastJoinFailed(group));
    }

    /// Whether a call would find nothing to do, but for a timer and what arrives.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && self.has_no_news()
    }

    /// Whether no event waits, and the device need not be told of a group.
    pub(crate) fn has_no_news(&self) -> bool {
        self.events.is_empty() && !self.multicast.has_change()
    }

    /// Whether a QP may have something to send.
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        !self.active.is_empty()
    }

    /// The caller's half of a QP's queues; from then on [`Self::ring_doorbell`] tells of posts.
    pub fn take_poster(&mut self, qp: QpHandle) -> Option<Poster> {
        self.qps.get_mut(qp)?.qp.take_poster()
    }

    /// The caller's half of a CQ.
    pub fn take_cq_caller(&mut self, cq: CqHandle) -> Option<Consumer<WorkCompletion>> {
        self.cqs.get_mut(cq)?.take_caller()
    }

    /// The caller's half of an SRQ.
    pub fn take_srq_caller(&mut self, srq: SrqHandle) -> Option<RecvProducer> {
        self.srqs.get_mut(srq)?.take_caller()
    }
}

/// Whether nobody sends from there, and whatever answered would answer to many.
fn is_nobody(source: IpAddr) -> bool {
    source.is_multicast() || source.is_unspecified() || source == IpAddr::V4(Ipv4Addr::BROADCAST)
}

fn drop_reason(error: ParseError) -> DropReason {
    match error {
        ParseError::Unsupported(_) => DropReason::Unsupported,
        _ => DropReason::Malformed,
    }
}
