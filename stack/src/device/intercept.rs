//! The mechanism under the wrappers that harm packets: [`Intercepted`] asks a [`Judge`] about each packet.
//!
//! Owns splitting bursts into packets, holding delayed ones and damaging others. Never decides what happens to a
//! packet: `impair` (by rate) and `fault` (by rule) do.

use core::net::IpAddr;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::os::fd::RawFd;

use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, RxSink, TxSource};
use crate::burst::{Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::wire::{self, Flow, IpFields};

/// Packets that one direction may hold back at a time; more are lost, and counted.
pub const HELD_MAX: usize = 4096;
/// Bits that one verdict may flip.
pub const FLIPS_MAX: usize = 3;

/// Which way a packet goes, seen from the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From the endpoint to the network.
    Out,
    /// From the network to the endpoint.
    In,
}

/// What happens to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Extra time until it goes on; `None`: it is dropped.
    pub deliver: Option<Duration>,
    /// Extra time until a second, undamaged copy goes on.
    pub copy: Option<Duration>,
    /// Bits to flip, counted from the first bit of the BTH.
    pub flips: [Option<u32>; FLIPS_MAX],
    /// Bytes to keep, BTH on.
    pub keep: Option<usize>,
}

impl Verdict {
    /// Nothing happens to the packet.
    pub const PASS: Self = Self { deliver: Some(Duration::ZERO), copy: None, flips: [None; FLIPS_MAX], keep: None };
    /// The packet is lost.
    pub const DROP: Self = Self { deliver: None, ..Self::PASS };

    /// Flips and cuts `packet` (BTH to ICRC) in place; returns the bytes that are left.
    #[must_use]
    pub fn damage(&self, packet: &mut [u8]) -> usize {
        for bit in self.flips.into_iter().flatten() {
            if let Some(byte) = usize::try_from(bit / 8).ok().and_then(|i| packet.get_mut(i)) {
                *byte ^= 1 << (bit % 8);
            }
        }
        self.keep.unwrap_or(packet.len()).min(packet.len())
    }
}

/// Decides about packets.
pub trait Judge: Send {
    /// The verdict on `packet`, BTH to ICRC.
    fn judge(&mut self, now: Instant, direction: Direction, flow: &Flow, packet: &[u8]) -> Verdict;
}

/// A packet that waits. Ordered so that the earliest (and of equals the first held) is the greatest.
#[derive(Debug)]
struct Held {
    due: Instant,
    sequence: u64,
    flow: Flow,
    ids: RxIds,
    bytes: Vec<u8>,
}

impl PartialEq for Held {
    fn eq(&self, o: &Self) -> bool {
        self.cmp(o) == Ordering::Equal
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, o: &Self) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

impl Ord for Held {
    fn cmp(&self, o: &Self) -> Ordering {
        (o.due, o.sequence).cmp(&(self.due, self.sequence))
    }
}

/// The packets that wait in one direction.
#[derive(Debug, Default)]
struct Waiting {
    heap: BinaryHeap<Held>,
    spare: Vec<Vec<u8>>,
    sequence: u64,
    overflow: u64,
}

impl Waiting {
    fn hold(&mut self, due: Instant, flow: Flow, ids: RxIds, header: &[u8], packet: &[u8]) {
        if self.heap.len() >= HELD_MAX {
            self.overflow += 1;
            return;
        }
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(packet);
        self.sequence += 1;
        self.heap.push(Held { due, sequence: self.sequence, flow, ids, bytes });
    }

    fn next_due(&self) -> Option<Instant> {
        self.heap.peek().map(|h| h.due)
    }

    fn take_due(&mut self, now: Instant) -> Option<Held> {
        if self.next_due()? > now {
            return None;
        }
        self.heap.pop()
    }

    fn recycle(&mut self, held: Held) {
        self.spare.push(held.bytes);
    }
}

/// A device whose packets a judge may drop, delay, copy or damage.
///
/// On the way out it offers one segment a burst, so that each packet can be treated alone and keeps the identification
/// that its ICRC covers. On the way in, runs of untouched segments stay together; a burst that is taken apart counts
/// as one in the budget.
#[derive(Debug)]
pub struct Intercepted<D, J> {
    inner: D,
    capabilities: DeviceCapabilities,
    pub(super) judge: J,
    outward: Waiting,
    inward: Waiting,
    scratch: Vec<u8>,
}

impl<D: Device, J: Judge> Intercepted<D, J> {
    /// `inner`, with `judge` before it.
    pub(super) fn around(inner: D, judge: J, label: &str) -> Self {
        let mut capabilities = inner.capabilities().clone();
        capabilities.segments_max = 1;
        capabilities.name = format!("{label}({})", capabilities.name);
        let (outward, inward) = (Waiting::default(), Waiting::default());
        Self { inner, capabilities, judge, outward, inward, scratch: Vec::new() }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The device inside. Packets still held are lost.
    #[must_use]
    pub fn into_inner(self) -> D {
        self.inner
    }

    /// Packets held back now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.outward.heap.len() + self.inward.heap.len()
    }
}

/// The state that sending needs, apart from the inner device.
struct Sender<'a, J> {
    now: Instant,
    judge: &'a mut J,
    waiting: &'a mut Waiting,
    budget: usize,
    taken: usize,
    dry: bool,
}

impl<J: Judge> Sender<'_, J> {
    /// Fills one room: with a packet that is due, or the next of the source that survives.
    fn fill(&mut self, room: TxRoom<'_>, source: &mut TxSource<'_>) -> Option<TxBurst> {
        let TxRoom { buf, headroom, ids, medium, .. } = room;
        while let Some(held) = self.waiting.take_due(self.now) {
            let burst = replay(&held, buf.get_mut(headroom..), medium);
            self.waiting.recycle(held);
            match burst {
                Some(burst) => return Some(burst),
                None => self.waiting.overflow += 1,
            }
        }
        while self.taken < self.budget && !self.dry {
            let Some(burst) = source(TxRoom { buf: &mut *buf, headroom, segments_max: 1, ids, medium }) else {
                self.dry = true;
                break;
            };
            self.taken += 1;
            if let Some(bytes) = buf.get_mut(headroom..).and_then(|b| b.get_mut(..burst.len))
                && let Some(burst) = self.treat(burst, bytes, medium)
            {
                return Some(burst);
            }
        }
        None
    }

    /// Applies the verdict on one packet; returns it if it goes out now.
    fn treat(&mut self, mut burst: TxBurst, bytes: &mut [u8], medium: Medium) -> Option<TxBurst> {
        let header = header_len(medium, &burst.flow);
        let (outer, packet) = bytes.split_at_mut_checked(header)?;
        let verdict = self.judge.judge(self.now, Direction::Out, &burst.flow, packet);
        if let Some(delay) = verdict.copy {
            self.waiting.hold(self.now + delay, burst.flow, RxIds::Hidden, outer, packet);
        }
        let delay = verdict.deliver?;
        let kept = verdict.damage(packet);
        if kept < packet.len() {
            rewrite_outer(outer, &burst.flow, kept);
        }
        if delay > Duration::ZERO {
            self.waiting.hold(self.now + delay, burst.flow, RxIds::Hidden, outer, packet.get(..kept)?);
            return None;
        }
        burst.len = header + kept;
        burst.segment = kept;
        Some(burst)
    }
}

/// Bytes of IP and UDP header that the endpoint writes.
fn header_len(medium: Medium, flow: &Flow) -> usize {
    match medium {
        Medium::Ip => flow.header_len(),
        Medium::Udp => 0,
    }
}

/// Makes the IP and UDP header again, for a packet that was cut to `len` bytes. Nothing on a UDP medium.
fn rewrite_outer(written: &mut [u8], flow: &Flow, len: usize) {
    if written.len() == flow.header_len() {
        let id = known_ids(flow, written).map_or(0, |fields| fields.id);
        // The room is exactly what the header needs.
        let _ = wire::write_outer(flow, id, len, written);
    }
}

/// Identification and flags of an IPv4 header that the endpoint wrote.
pub(super) fn known_ids(flow: &Flow, header: &[u8]) -> Option<IpFields> {
    if !flow.dst.is_ipv4() {
        return None;
    }
    let word = |at: usize| Some(u16::from_be_bytes([*header.get(at)?, *header.get(at + 1)?]));
    Some(IpFields { id: word(4)?, flags_fragment: word(6)? })
}

/// Writes a held packet as a burst of its own.
fn replay(held: &Held, to: Option<&mut [u8]>, medium: Medium) -> Option<TxBurst> {
    let len = held.bytes.len();
    to?.get_mut(..len)?.copy_from_slice(&held.bytes);
    let segment = len.checked_sub(header_len(medium, &held.flow))?;
    Some(TxBurst { flow: held.flow, len, segment, segments: 1 })
}

impl<D: Device, J: Judge> Device for Intercepted<D, J> {
    fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        let mut given = 0;
        while given < budget
            && let Some(held) = self.inward.take_due(now)
        {
            let (flow, ids, at) = (held.flow, held.ids, held.due);
            sink(RxBurst { flow, bytes: &held.bytes, segment: held.bytes.len(), ids, at });
            self.inward.recycle(held);
            given += 1;
        }
        let Self { inner, judge, inward, scratch, .. } = self;
        let fresh = inner.receive(now, budget - given, &mut |burst| {
            receive_burst(now, &burst, judge, inward, scratch, sink);
        })?;
        Ok(given + fresh)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        let Self { inner, judge, outward: waiting, .. } = self;
        let mut sender = Sender { now, judge, waiting, budget, taken: 0, dry: false };
        inner.transmit(now, budget.saturating_add(HELD_MAX), &mut |room| sender.fill(room, source))?;
        Ok(sender.taken)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        [self.inner.poll_timeout(), self.outward.next_due(), self.inward.next_due()].into_iter().flatten().min()
    }

    fn source_ports(&self) -> &[u16] {
        self.inner.source_ports()
    }

    fn receive_room(&self) -> Option<usize> {
        self.inner.receive_room()
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        self.inner.set_membership(group, member)
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        self.inner.wait(timeout)
    }

    fn lost(&self) -> DeviceLosses {
        let inner = self.inner.lost();
        DeviceLosses { transmit: inner.transmit + self.outward.overflow, receive: inner.receive + self.inward.overflow }
    }
}

/// Judges each packet of a received burst. Untouched neighbours go on as one burst.
fn receive_burst<J: Judge>(
    now: Instant,
    burst: &RxBurst<'_>,
    judge: &mut J,
    waiting: &mut Waiting,
    scratch: &mut Vec<u8>,
    sink: &mut RxSink<'_>,
) {
    let segment = burst.segment.max(1);
    let mut run = 0..0;
    for (index, packet) in burst.bytes.chunks(segment).enumerate() {
        let start = index * segment;
        let verdict = judge.judge(now, Direction::In, &burst.flow, packet);
        if verdict == Verdict::PASS {
            if run.is_empty() {
                run.start = start;
            }
            run.end = start + packet.len();
            continue;
        }
        flush_run(burst, &mut run, segment, sink);
        let ids = ids_at(burst.ids, index);
        if let Some(delay) = verdict.copy {
            waiting.hold(now + delay, burst.flow, ids, &[], packet);
        }
        let Some(delay) = verdict.deliver else { continue };
        scratch.clear();
        scratch.extend_from_slice(packet);
        let kept = verdict.damage(scratch);
        let Some(bytes) = scratch.get(..kept) else { continue };
        if delay > Duration::ZERO {
            waiting.hold(now + delay, burst.flow, ids, &[], bytes);
        } else {
            sink(RxBurst { flow: burst.flow, bytes, segment: kept, ids, at: burst.at });
        }
    }
    flush_run(burst, &mut run, segment, sink);
}

/// Hands on the untouched segments gathered so far.
fn flush_run(burst: &RxBurst<'_>, run: &mut core::ops::Range<usize>, segment: usize, sink: &mut RxSink<'_>) {
    if let Some(bytes) = burst.bytes.get(run.clone())
        && !bytes.is_empty()
    {
        let ids = ids_at(burst.ids, run.start / segment);
        sink(RxBurst { flow: burst.flow, bytes, segment: segment.min(bytes.len()), ids, at: burst.at });
    }
    *run = 0..0;
}

/// The ids of a burst that begins at segment `index` of another.
pub(super) fn ids_at(ids: RxIds, index: usize) -> RxIds {
    match ids {
        RxIds::Known(f) => {
            #[allow(clippy::cast_possible_truncation)] // Ids are modular.
            let id = f.id.wrapping_add(index as u16);
            RxIds::Known(IpFields { id, ..f })
        }
        RxIds::Hidden => RxIds::Hidden,
    }
}
