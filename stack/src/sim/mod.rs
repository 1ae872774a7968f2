//! The simulator: many endpoints, one seed, virtual time.
//!
//! Owns the [`World`]: endpoints as nodes, links between them that lose, delay and damage packets, and the order of
//! events. The same seed and the same calls give the same packets at the same times, bit for bit, in every build. Never
//! reads a clock or sleeps: a minute of retransmission timers takes as long as its packets take to compute.

mod trace;

use core::net::IpAddr;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::path::{Path, PathBuf};

use pcap_file::PcapError;

pub use self::trace::{RECORD_MAX, Recorded};
use self::trace::{Recorder, TraceHash};
use crate::burst::{IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::device::impair::{ImpairModel, ImpairStats};
use crate::device::{Direction, Verdict};
use crate::endpoint::{Endpoint, EndpointConfig};
use crate::mem::IovaPolicy;
use crate::rng::Rng;
use crate::time::{Duration, Instant};
use crate::wire::{Flow, IpFields};

/// Sent packets that a node keeps for [`World::take_sent`]; the oldest go first.
pub const SENT_MAX: usize = 65_536;
/// Events without any progress of time after which [`World::run_until_idle`] gives up.
pub const STUCK_EVENTS: u32 = 1_000_000;
/// Bytes of the room that an endpoint writes into: the longest IP packet.
const ROOM: usize = 65_535;
/// Segments a burst, unless set otherwise.
const SEGMENTS: usize = 8;
/// IPv4 flags of every packet: do not fragment.
const DF: u16 = 0x4000;

/// Names an endpoint of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(usize);

/// A packet that an endpoint sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentPacket {
    /// When.
    pub at: Instant,
    /// Addresses.
    pub flow: Flow,
    /// IPv4 identification that its ICRC covers.
    pub id: u16,
    /// BTH to ICRC.
    pub bytes: Vec<u8>,
}

/// A packet on its way out of its sender, as a hook sees it.
#[derive(Clone, Copy, Debug)]
pub struct PassingPacket<'a> {
    /// When.
    pub at: Instant,
    /// Who sent it.
    pub from: NodeId,
    /// Addresses.
    pub flow: &'a Flow,
    /// BTH to ICRC.
    pub bytes: &'a [u8],
}

/// Decides about a packet before its link does; `None` leaves it to the link.
pub type PacketHook = Box<dyn FnMut(&PassingPacket<'_>) -> Option<Verdict> + Send>;

/// What happens at an endpoint, in the order in which it happens there.
#[derive(Clone, Copy, Debug)]
pub enum TapEvent<'a> {
    /// It sent a packet.
    Sent {
        /// Addresses.
        flow: &'a Flow,
        /// BTH to ICRC.
        bytes: &'a [u8],
    },
    /// A packet arrived, perhaps damaged.
    Arrived {
        /// Addresses.
        flow: &'a Flow,
        /// IPv4 identification.
        id: u16,
        /// BTH to ICRC.
        bytes: &'a [u8],
    },
    /// It was told that a timer is due.
    Timeout,
}

/// Sees all events of all endpoints: when, where, what.
pub type Tap = Box<dyn FnMut(Instant, NodeId, TapEvent<'_>) + Send>;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Nothing is under way and no timer runs.
    Idle,
    /// The time given is over.
    TimeOver,
    /// Events went on without time going on.
    Stuck,
}

/// One direction between two nodes.
#[derive(Clone, Copy, Debug)]
struct Link {
    model: ImpairModel,
    bits_per_second: Option<u64>,
    busy_until: Instant,
}

impl Link {
    const fn new(model: ImpairModel) -> Self {
        Self { model, bits_per_second: None, busy_until: Instant::ZERO }
    }

    /// When a packet of `len` bytes, sent now, has left the sender.
    fn serialise(&mut self, now: Instant, len: usize) -> Instant {
        let Some(rate) = self.bits_per_second else { return now };
        self.busy_until = self.busy_until.max(now) + time_on_wire(len, rate);
        self.busy_until
    }
}

/// How long `len` bytes take.
fn time_on_wire(len: usize, bits_per_second: u64) -> Duration {
    let bits = u128::try_from(len).unwrap_or(0) * 8;
    Duration::from_nanos(u64::try_from(bits * 1_000_000_000 / u128::from(bits_per_second.max(1))).unwrap_or(u64::MAX))
}

/// A packet under way. Ordered so that the earliest, and of equals the first sent, is the greatest.
#[derive(Debug)]
struct Flying {
    at: Instant,
    sequence: u64,
    to: NodeId,
    flow: Flow,
    id: u16,
    bytes: Vec<u8>,
}

impl PartialEq for Flying {
    fn eq(&self, o: &Self) -> bool {
        self.cmp(o) == Ordering::Equal
    }
}

impl Eq for Flying {}

impl PartialOrd for Flying {
    fn partial_cmp(&self, o: &Self) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

impl Ord for Flying {
    fn cmp(&self, o: &Self) -> Ordering {
        (o.at, o.sequence).cmp(&(self.at, self.sequence))
    }
}

/// An endpoint and what the world knows of it.
struct Node {
    endpoint: Endpoint,
    addresses: Vec<IpAddr>,
    next_id: u16,
    /// The endpoint may have something to send.
    touched: bool,
    /// What its device sends; `None`: everything at once.
    bits_per_second: Option<u64>,
    /// When the device takes the next burst.
    free_at: Instant,
    keeps_sent: bool,
    sent: VecDeque<SentPacket>,
}

/// Endpoints, links and virtual time.
pub struct World {
    seed: u64,
    now: Instant,
    rng: Rng,
    nodes: Vec<Node>,
    usual: ImpairModel,
    links: BTreeMap<(NodeId, NodeId), Link>,
    flying: BinaryHeap<Flying>,
    spare: Vec<Vec<u8>>,
    sequence: u64,
    segments_max: usize,
    hash: TraceHash,
    recorder: Recorder,
    stats: ImpairStats,
    hook: Option<PacketHook>,
    tap: Option<Tap>,
    room: Box<[u8]>,
}

impl World {
    /// An empty world at time zero. Links take a microsecond and harm nothing.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            now: Instant::ZERO,
            rng: Rng::from_u64(seed),
            nodes: Vec::new(),
            usual: ImpairModel::NONE.with_delay(Duration::from_micros(1)),
            links: BTreeMap::new(),
            flying: BinaryHeap::new(),
            spare: Vec::new(),
            sequence: 0,
            segments_max: SEGMENTS,
            hash: TraceHash::new(),
            recorder: Recorder::default(),
            stats: ImpairStats::default(),
            hook: None,
            tap: None,
            room: vec![0; ROOM].into_boxed_slice(),
        }
    }

    /// The seed.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// The virtual time.
    #[must_use]
    pub const fn now(&self) -> Instant {
        self.now
    }

    /// A generator of its own stream for whoever drives the world: what a test draws does not move what links draw.
    #[must_use]
    pub fn fork_rng(&mut self) -> Rng {
        self.rng.fork()
    }

    /// Adds an endpoint, seeded by the world. It receives for the addresses of its configuration. Wire addresses of its
    /// regions come from the seed whatever the configuration says: host addresses differ from run to run.
    pub fn add_endpoint(&mut self, config: EndpointConfig) -> NodeId {
        let config = EndpointConfig { iova: IovaPolicy::Seeded, ..config };
        let addresses = config.addresses.clone();
        let mut seed = [0; 32];
        self.rng.fill(&mut seed);
        let endpoint = Endpoint::new(config, seed);
        let sent = VecDeque::new();
        self.nodes.push(Node {
            endpoint,
            addresses,
            next_id: 0,
            touched: true,
            bits_per_second: None,
            free_at: Instant::ZERO,
            keeps_sent: false,
            sent,
        });
        NodeId(self.nodes.len() - 1)
    }

    /// The endpoint of a node, to post and poll on. What it has to send leaves at the next step.
    ///
    /// # Panics
    /// If the node is of another world.
    pub fn endpoint(&mut self, id: NodeId) -> &mut Endpoint {
        let node = &mut self.nodes[id.0];
        node.touched = true;
        &mut node.endpoint
    }

    /// How packets from `a` to `b` are treated from now on.
    pub fn set_link(&mut self, a: NodeId, b: NodeId, model: ImpairModel) {
        self.link(a, b).model = model;
    }

    /// How packets between `a` and `b` are treated, both ways.
    pub fn set_path(&mut self, a: NodeId, b: NodeId, model: ImpairModel) {
        self.set_link(a, b, model);
        self.set_link(b, a, model);
    }

    /// How many bits a second go from `a` to `b`; `None`: any number.
    pub fn set_bandwidth(&mut self, a: NodeId, b: NodeId, bits_per_second: Option<u64>) {
        self.link(a, b).bits_per_second = bits_per_second;
    }

    /// How many bits a second the device of `node` sends; `None`: any number. Unlike a slow link, which queues what it
    /// is given, a slow device takes no further burst until the last one has left: the endpoint feels it.
    pub fn set_device_rate(&mut self, node: NodeId, bits_per_second: Option<u64>) {
        self.nodes[node.0].bits_per_second = bits_per_second;
    }

    /// Segments that endpoints may put into a burst, at least 1. Links treat each segment alone.
    pub fn set_segments_max(&mut self, segments: usize) {
        self.segments_max = segments.max(1);
    }

    /// Sets the hook that sees every packet before its link.
    pub fn set_hook(&mut self, hook: PacketHook) {
        self.hook = Some(hook);
    }

    /// Removes the hook.
    pub fn clear_hook(&mut self) {
        self.hook = None;
    }

    /// Sets the tap that sees what every endpoint sends, receives and is told. It changes nothing.
    pub fn set_tap(&mut self, tap: Tap) {
        self.tap = Some(tap);
    }

    /// Keeps the last `packets` packets of the run. If a test panics they are written to a file, and the file and the
    /// seed are printed.
    pub fn record(&mut self, packets: usize) {
        self.recorder.keep(packets);
    }

    /// The packets recorded, oldest first.
    pub fn recorded(&self) -> impl Iterator<Item = &Recorded> {
        self.recorder.packets()
    }

    /// Writes the packets recorded.
    ///
    /// # Errors
    /// [`PcapError`]: the file could not be made or written.
    pub fn write_pcapng(&self, path: &Path) -> Result<(), PcapError> {
        let file = std::fs::File::create(path).map_err(PcapError::IoError)?;
        self.recorder.write(std::io::BufWriter::new(file)).map(drop)
    }

    /// A hash over (direction, time, node, bytes) of every packet sent and delivered so far.
    #[must_use]
    pub const fn trace_hash(&self) -> u64 {
        self.hash.value()
    }

    /// What the links did so far.
    #[must_use]
    pub const fn link_stats(&self) -> ImpairStats {
        self.stats
    }

    /// From now on keeps what `node` sends for [`World::take_sent`].
    pub fn keep_sent(&mut self, node: NodeId) {
        self.nodes[node.0].keeps_sent = true;
    }

    /// What `node` has sent since the last call. What it has to send now is sent first.
    pub fn take_sent(&mut self, node: NodeId) -> Vec<SentPacket> {
        self.flush();
        self.nodes[node.0].sent.drain(..).collect()
    }

    /// Hands `node` a packet that came from outside the world: hand-made, or captured. `bytes` is BTH to ICRC.
    pub fn inject(&mut self, node: NodeId, flow: Flow, ids: RxIds, bytes: &[u8]) {
        self.flush();
        self.deliver(node, RxBurst { flow, bytes, segment: bytes.len(), ids, at: self.now });
    }

    /// The next event: a packet arrives or a timer fires. False when there is none.
    pub fn step(&mut self) -> bool {
        self.step_until(None)
    }

    /// When the next event is; `None` when there is none. What endpoints have to send now is sent first.
    pub fn next_event(&mut self) -> Option<Instant> {
        self.flush();
        let timer = self.next_timer().map(|(at, _)| at);
        let packet = self.flying.peek().map(|f| f.at);
        [packet, timer, self.next_free()].into_iter().flatten().min()
    }

    /// Runs all events up to and including `deadline`; then it is `deadline`.
    pub fn run_until(&mut self, deadline: Instant) {
        while self.step_until(Some(deadline)) {}
        self.now = self.now.max(deadline);
    }

    /// Runs until nothing is left to happen, at most `limit` of virtual time.
    pub fn run_until_idle(&mut self, limit: Duration) -> RunEnd {
        let deadline = self.now + limit;
        let (mut still, mut last) = (0, self.now);
        while self.step_until(Some(deadline)) {
            still = if self.now == last { still + 1 } else { 0 };
            last = self.now;
            if still >= STUCK_EVENTS {
                return RunEnd::Stuck;
            }
        }
        if self.flying.is_empty() && self.next_timer().is_none() { RunEnd::Idle } else { RunEnd::TimeOver }
    }

    fn link(&mut self, a: NodeId, b: NodeId) -> &mut Link {
        let usual = self.usual;
        self.links.entry((a, b)).or_insert_with(|| Link::new(usual))
    }

    /// The node whose timer is next, the first of equals.
    fn next_timer(&self) -> Option<(Instant, NodeId)> {
        let timers = self.nodes.iter().enumerate();
        timers.filter_map(|(i, node)| Some((node.endpoint.poll_timeout()?, NodeId(i)))).min()
    }

    /// When a busy device that has something to send is free again.
    fn next_free(&self) -> Option<Instant> {
        let busy = self.nodes.iter().filter(|n| n.touched && n.free_at > self.now);
        busy.map(|n| n.free_at).min()
    }

    /// The next event that is not after `deadline`. Of events at one time, packets come before timers, and timers
    /// before devices that are free again.
    fn step_until(&mut self, deadline: Option<Instant>) -> bool {
        self.flush();
        let timer = self.next_timer();
        let packet = self.flying.peek().map(|f| f.at);
        let Some(at) = [packet, timer.map(|t| t.0), self.next_free()].into_iter().flatten().min() else {
            return false;
        };
        if deadline.is_some_and(|d| at > d) {
            return false;
        }
        self.now = self.now.max(at);
        if packet == Some(at) {
            if let Some(flying) = self.flying.pop() {
                let ids = RxIds::Known(IpFields { id: flying.id, flags_fragment: DF });
                let (flow, bytes) = (flying.flow, &flying.bytes);
                self.deliver(flying.to, RxBurst { flow, bytes, segment: bytes.len(), ids, at: self.now });
                self.spare.push(flying.bytes);
            }
        } else if let Some((when, NodeId(index))) = timer
            && when == at
        {
            if let Some(tap) = &mut self.tap {
                tap(self.now, NodeId(index), TapEvent::Timeout);
            }
            let node = &mut self.nodes[index];
            node.endpoint.handle_timeout(self.now);
            node.touched = true;
        }
        true
    }

    fn deliver(&mut self, to: NodeId, burst: RxBurst<'_>) {
        self.hash.event(Direction::In, self.now, to.0, burst.bytes);
        if let Some(tap) = &mut self.tap {
            let id = match burst.ids {
                RxIds::Known(ip) => ip.id,
                RxIds::Hidden => 0,
            };
            tap(self.now, to, TapEvent::Arrived { flow: &burst.flow, id, bytes: burst.bytes });
        }
        let node = &mut self.nodes[to.0];
        node.endpoint.handle_burst(self.now, burst);
        node.touched = true;
    }

    /// Lets every touched endpoint send what it has.
    fn flush(&mut self) {
        for index in 0..self.nodes.len() {
            if self.nodes[index].touched && self.nodes[index].free_at <= self.now {
                self.nodes[index].touched = false;
                let mut room = core::mem::take(&mut self.room);
                self.drain(NodeId(index), &mut room);
                self.room = room;
            }
        }
    }

    fn drain(&mut self, from: NodeId, room: &mut [u8]) {
        loop {
            let node = &mut self.nodes[from.0];
            let first = node.next_id;
            let offer = TxRoom {
                buf: room,
                headroom: 0,
                segments_max: self.segments_max,
                ids: IdRule::From(first),
                medium: Medium::Ip,
            };
            let Some(burst) = node.endpoint.poll_transmit(self.now, offer) else { return };
            let TxBurst { flow, len, segment, segments } = burst;
            let bytes = &room[flow.header_len()..len];
            debug_assert_eq!(bytes.len().div_ceil(segment), segments, "a burst is as many segments as it says");
            for (index, packet) in bytes.chunks(segment).enumerate() {
                self.send(from, flow, IdRule::From(first).id(index), packet);
            }
            let node = &mut self.nodes[from.0];
            node.next_id = IdRule::From(first).id(segments);
            if let Some(rate) = node.bits_per_second {
                // Each segment leaves with headers of its own.
                let sent = len + (segments - 1) * flow.header_len();
                node.free_at = self.now + time_on_wire(sent, rate);
                node.touched = true;
                return;
            }
        }
    }

    /// Puts one packet on its links.
    fn send(&mut self, from: NodeId, flow: Flow, id: u16, bytes: &[u8]) {
        self.hash.event(Direction::Out, self.now, from.0, bytes);
        if let Some(tap) = &mut self.tap {
            tap(self.now, from, TapEvent::Sent { flow: &flow, bytes });
        }
        let node = &mut self.nodes[from.0];
        if node.keeps_sent {
            if node.sent.len() >= SENT_MAX {
                node.sent.pop_front();
            }
            node.sent.push_back(SentPacket { at: self.now, flow, id, bytes: bytes.to_vec() });
        }
        if is_multicast(flow.dst) {
            for to in (0..self.nodes.len()).map(NodeId).filter(|to| *to != from) {
                self.carry(from, to, flow, id, bytes);
            }
        } else if let Some(to) = self.nodes.iter().position(|n| n.addresses.contains(&flow.dst)) {
            self.carry(from, NodeId(to), flow, id, bytes);
        } else {
            self.recorder.add(self.now, flow, id, bytes, Verdict::DROP);
        }
    }

    /// Takes one packet over the link from `from` to `to`.
    fn carry(&mut self, from: NodeId, to: NodeId, flow: Flow, id: u16, bytes: &[u8]) {
        let passing = PassingPacket { at: self.now, from, flow: &flow, bytes };
        let chosen = self.hook.as_mut().and_then(|hook| hook(&passing));
        let now = self.now;
        let link = *self.link(from, to);
        let verdict = chosen.unwrap_or_else(|| link.model.decide(&mut self.rng, bytes.len()));
        self.stats.count(&verdict);
        self.recorder.add(now, flow, id, bytes, verdict);
        let left = self.link(from, to).serialise(now, flow.header_len() + bytes.len());
        // A hook says what happens to a packet, not how long the path is.
        let path = if chosen.is_some() { link.model.delay } else { Duration::ZERO };
        if let Some(delay) = verdict.deliver {
            let mut buffer = self.buffer(bytes);
            let kept = verdict.damage(&mut buffer);
            buffer.truncate(kept);
            self.launch(left + path + delay, to, flow, id, buffer);
        }
        if let Some(delay) = verdict.copy {
            let buffer = self.buffer(bytes);
            self.launch(left + path + delay, to, flow, id, buffer);
        }
    }

    fn buffer(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(bytes);
        buffer
    }

    fn launch(&mut self, at: Instant, to: NodeId, flow: Flow, id: u16, bytes: Vec<u8>) {
        self.sequence += 1;
        self.flying.push(Flying { at, sequence: self.sequence, to, flow, id, bytes });
    }

    /// Where the record of a failed run goes.
    fn failure_path(&self) -> PathBuf {
        std::env::temp_dir().join(format!("uroce-sim-{:016x}.pcapng", self.seed))
    }
}

impl Drop for World {
    #[allow(clippy::print_stderr)] // The one place that speaks: a failing test must leave its seed.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let seed = self.seed;
        eprintln!("simulation failed at {:?} with seed {seed}", self.now);
        if self.recorder.is_on() {
            let path = self.failure_path();
            match self.write_pcapng(&path) {
                Ok(()) => eprintln!("its last packets: {}", path.display()),
                Err(error) => eprintln!("its packets could not be written: {error}"),
            }
        }
    }
}

fn is_multicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_multicast(),
        IpAddr::V6(a) => a.is_multicast(),
    }
}
