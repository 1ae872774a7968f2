//! One random exchange between two endpoints, and the model that it is checked against.
//!
//! Each party of a connection owns four memories: a source that its SENDs and WRITEs read, a target that the peer
//! writes, reads and does atomics on, a landing for what its READs and atomics bring, and an inbox for what the peer
//! SENDs. The model applies the work requests one after the other, in the order in which they were posted, to plain byte
//! vectors. A WRITE or atomic that overlaps an earlier READ is fenced: without it the order of the two is open.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use uroce::counters::Counters;
use uroce::device::Verdict;
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::rng::Rng;
use uroce::sim::{NodeId, Tap, World};
use uroce::time::Duration;
use uroce::types::{Gid, PathMtu, Qpn, Rkey};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, FailureKind, FastRegister, FlushPlacement, InitAttr, MemoryRegion,
    MemoryWindow, MwBind, MwType, Operation, Payload, PdHandle, PostError, QpAttr, QpCapabilities, QpHandle, QpInit,
    QpState, QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendWr, Sge, Verbs, WcData, WcOpcode, WcStatus,
    WorkCompletion,
};

use crate::sim_plan::{INLINE, Kind, Plan, Receive, SGES, Scenario, Work, gather, scatter, word};

/// What a run came to. Equal for equal seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Over every packet.
    pub(crate) trace_hash: u64,
    /// Packets that links saw.
    pub(crate) packets: u64,
    /// Work requests completed, receives included.
    pub(crate) completed: u64,
    /// Payload bytes asked for.
    pub(crate) bytes: u64,
    /// A connection failed, as its retry limits allow.
    pub(crate) retries_exhausted: bool,
}

/// Virtual time after which a run counts as hung.
const HUNG: Duration = Duration::from_secs(3600);
/// Receives that a party may have posted.
const RECEIVES: u32 = 64;

/// Rights of a target, and of the QP.
const TARGET: AccessFlags = match AccessFlags::from_bits(0x11F) {
    Some(flags) => flags,
    None => panic!("local write, the rights of a peer, windows, FLUSH"),
};
/// Rights of a window over it.
const WINDOW: AccessFlags = match AccessFlags::from_bits(0x10E) {
    Some(flags) => flags,
    None => panic!("the rights of a peer"),
};

/// A registered region and what it held at first.
struct Memory {
    region: Region,
    mr: MemoryRegion,
    first: Vec<u8>,
}

impl Memory {
    fn new(world: &mut World, node: NodeId, pd: PdHandle, rng: &mut Rng, len: usize, access: AccessFlags) -> Self {
        let region = Region::alloc(len).unwrap();
        let mut first = vec![0; len];
        rng.fill(&mut first);
        region.write(0, &first).unwrap();
        let mr = world.endpoint(node).register(pd, &region, access, None).unwrap();
        Self { region, mr, first }
    }

    fn sge(&self, range: &Range<usize>) -> Sge {
        let length = u32::try_from(range.len()).unwrap();
        Sge { addr: self.mr.iova + range.start as u64, length, lkey: self.mr.lkey }
    }

    fn sges(&self, pieces: &[Range<usize>]) -> Vec<Sge> {
        pieces.iter().map(|piece| self.sge(piece)).collect()
    }

    fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.mr.iova + offset as u64, rkey: self.mr.rkey }
    }
}

/// One end of a connection.
struct Party {
    node: NodeId,
    pd: PdHandle,
    qp: QpHandle,
    qpn: Qpn,
    send_cq: CqHandle,
    recv_cq: CqHandle,
    source: Memory,
    target: Memory,
    landing: Memory,
    inbox: Memory,
    /// A window of type 1, moved over its own target.
    window: MemoryWindow,
    /// A registration that comes and goes.
    fast: MemoryRegion,
    /// What it asks of the peer.
    works: Vec<Work>,
    posted: usize,
    /// Work requests known to be done: completed, or before a completed one.
    done: usize,
    /// Completions of work requests after the failure.
    flushed: usize,
    failed: Option<WcStatus>,
    /// For the peer's work.
    receives: Vec<Receive>,
    receives_posted: usize,
    receives_done: usize,
    receives_flushed: usize,
}

/// Something that the reader of a trace must know and cannot see on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// A receive was posted.
    ReceivePosted,
    /// The program moved the QP to ERR.
    MovedToErr,
    /// A completion with an error was polled: of a send or a receive, flushed or not.
    Failed { send: bool, flushed: bool },
}

/// Whoever looks on, told what happens beside the wire: at which node, to which QP, what.
pub(crate) type Onlooker = Box<dyn Fn(NodeId, Qpn, Beside)>;

/// One end of a connection after the run, for who looks on.
pub(crate) struct End {
    pub(crate) node: NodeId,
    pub(crate) qpn: Qpn,
    pub(crate) counters: Counters,
}

/// What a run leaves for who looks on: both ends of each connection one after the other, the ports, and how it was set
/// up.
pub(crate) struct Remains {
    pub(crate) ends: Vec<End>,
    pub(crate) ports: Vec<(NodeId, Counters)>,
    pub(crate) scenario: Scenario,
}

/// The whole run.
struct Exchange {
    onlooker: Option<Onlooker>,
    world: World,
    scenario: Scenario,
    rng: Rng,
    /// Two a connection: 2c and 2c + 1 are peers.
    parties: Vec<Party>,
    completed: u64,
}

/// Runs the exchange of `seed`; panics when it and the model differ.
pub(crate) fn run(seed: u64, record: bool) -> Outcome {
    let mut exchange = Exchange::new(seed, record);
    exchange.set_up();
    exchange.run();
    exchange.finish()
}

/// The same, with a tap and an onlooker.
pub(crate) fn run_watched(seed: u64, tap: Tap, onlooker: Onlooker) -> Remains {
    let mut exchange = Exchange::new(seed, false);
    exchange.world.set_tap(tap);
    exchange.onlooker = Some(onlooker);
    exchange.set_up();
    exchange.run();
    exchange.finish();
    exchange.remains()
}

impl Exchange {
    fn new(seed: u64, record: bool) -> Self {
        let mut world = World::new(seed);
        if record {
            world.record(20_000);
        }
        let mut rng = world.fork_rng();
        let scenario = Scenario::draw(&mut rng);
        Self { onlooker: None, world, scenario, rng, parties: Vec::new(), completed: 0 }
    }

    fn remains(mut self) -> Remains {
        let mut ends = Vec::new();
        let mut ports = std::collections::BTreeMap::new();
        for Party { node, qp, qpn, .. } in &self.parties {
            let endpoint = self.world.endpoint(*node);
            let counters = endpoint.qp_counters(*qp).unwrap().clone();
            ends.push(End { node: *node, qpn: *qpn, counters });
            ports.insert(*node, endpoint.counters());
        }
        Remains { ends, ports: ports.into_iter().collect(), scenario: self.scenario }
    }

    fn tell(&self, us: usize, what: Beside) {
        if let Some(onlooker) = &self.onlooker {
            onlooker(self.parties[us].node, self.parties[us].qpn, what);
        }
    }

    fn tell_failed(&self, us: usize, send: bool, status: WcStatus) {
        if status != WcStatus::Success {
            self.tell(us, Beside::Failed { send, flushed: status == WcStatus::WorkRequestFlushed });
        }
    }

    fn set_up(&mut self) {
        let Self { world, scenario, .. } = self;
        let addresses = if scenario.ipv6 { ["fd00::1", "fd00::2"] } else { ["10.0.0.1", "10.0.0.2"] };
        let ips = addresses.map(|a| a.parse().unwrap());
        let qp_options = scenario.options;
        let config = |ip| EndpointConfig { qp_options, ..EndpointConfig::new(vec![ip], PathMtu::B4096) };
        let nodes = ips.map(|ip| world.add_endpoint(config(ip)));
        world.set_link(nodes[0], nodes[1], scenario.links[0]);
        world.set_link(nodes[1], nodes[0], scenario.links[1]);
        world.set_segments_max(scenario.segments);
        for (node, rate) in nodes.into_iter().zip(scenario.rates) {
            world.set_device_rate(node, rate);
        }
        if let Some(limit) = scenario.dead_after {
            let seen = AtomicU64::new(0);
            world.set_hook(Box::new(move |_| (seen.fetch_add(1, Ordering::Relaxed) >= limit).then_some(Verdict::DROP)));
        }
        for _ in 0..self.scenario.connections {
            let plans = [(); 2].map(|()| Plan::draw(&mut self.rng, &self.scenario));
            let first = self.parties.len();
            let [mut a, mut b] = plans;
            let (receives_of_a, receives_of_b) = (b.inbox(), a.inbox());
            let a = self.make_party(nodes[0], a, receives_of_a);
            let b = self.make_party(nodes[1], b, receives_of_b);
            self.parties.extend([a, b]);
            for (us, ip) in [(first, ips[1]), (first + 1, ips[0])] {
                self.connect(us, Gid::from(ip));
                self.settle_plan(us);
                if self.rng.chance(0.3) {
                    self.cover_target(us);
                }
            }
        }
    }

    /// A party that asks what `plan` says and receives what its peer plans to send.
    fn make_party(&mut self, node: NodeId, plan: Plan, (receives, inbox_len): (Vec<Receive>, usize)) -> Party {
        let depth = self.scenario.depth;
        let caps = QpCapabilities {
            max_send_wr: depth,
            max_recv_wr: RECEIVES,
            max_send_sge: SGES,
            max_recv_sge: SGES,
            max_inline: INLINE,
        };
        let endpoint = self.world.endpoint(node);
        let pd = endpoint.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (endpoint.create_cq(depth).unwrap(), endpoint.create_cq(RECEIVES).unwrap());
        let init = QpInit { pd, qp_type: QpType::Rc, send_cq, recv_cq, srq: None, caps, signal_all: false, qpn: None };
        let qp = endpoint.create_qp(init).unwrap();
        let qpn = endpoint.query_qp(qp).unwrap().qpn;
        let window = endpoint.alloc_mw(pd, MwType::One).unwrap();
        let fast = endpoint.alloc_fast_mr(pd, &Region::alloc(64).unwrap()).unwrap();
        let (world, rng) = (&mut self.world, &mut self.rng);
        let mut memory = |len, access| Memory::new(world, node, pd, rng, len, access);
        Party {
            node,
            pd,
            qp,
            qpn,
            send_cq,
            recv_cq,
            source: memory(plan.source_len, AccessFlags::NONE),
            target: memory(plan.target_len, TARGET),
            landing: memory(plan.landing_len, AccessFlags::LOCAL_WRITE),
            inbox: memory(inbox_len, AccessFlags::LOCAL_WRITE),
            window,
            fast,
            works: plan.works,
            posted: 0,
            done: 0,
            flushed: 0,
            failed: None,
            receives,
            receives_posted: 0,
            receives_done: 0,
            receives_flushed: 0,
        }
    }

    fn connect(&mut self, us: usize, peer_gid: Gid) {
        let (ours, theirs) = (us % 2, 1 - us % 2);
        let s = &self.scenario;
        let transitions = [
            QpTransition::Init(InitAttr::connected(TARGET)),
            QpTransition::Rtr(RtrAttr {
                av: AddressVector { udp_source_port: s.source_port, ..AddressVector::new(peer_gid, 0) },
                path_mtu: s.mtu,
                dest_qpn: self.parties[us ^ 1].qpn,
                rq_psn: s.first_psn[theirs],
                max_dest_rd_atomic: s.reads,
                min_rnr_timer: s.rnr_timer,
            }),
            QpTransition::Rts(RtsAttr {
                sq_psn: s.first_psn[ours],
                timeout: s.timeout,
                retry_count: s.retries,
                rnr_retry: s.rnr_retries,
                max_rd_atomic: s.reads,
            }),
        ];
        let Party { node, qp, .. } = self.parties[us];
        for transition in transitions {
            self.world.endpoint(node).modify_qp(qp, QpAttr::from(transition)).unwrap();
        }
    }

    /// From now on the peer reaches the target through a window, not by the region's own key.
    fn cover_target(&mut self, us: usize) {
        let Party { node, pd, qp, ref mut target, .. } = self.parties[us];
        let endpoint = self.world.endpoint(node);
        let mw = endpoint.alloc_mw(pd, MwType::Two).unwrap();
        let access = WINDOW;
        let (addr, length) = (target.mr.iova, target.mr.len);
        let bind = MwBind { mw: mw.handle, rkey: mw.rkey, mr: Some(target.mr.handle), addr, length, access };
        endpoint.memory_mut().bind(pd, qp, &bind).unwrap();
        target.mr.rkey = mw.rkey;
    }

    /// Fills in what the plan could not know: keys to invalidate, and values that compare equal half of the time.
    fn settle_plan(&mut self, us: usize) {
        let mut works = core::mem::take(&mut self.parties[us].works);
        let (source, mut landing) = (self.parties[us].source.first.clone(), self.parties[us].landing.first.clone());
        let peer = &self.parties[us ^ 1];
        let mut target = peer.target.first.clone();
        for work in &mut works {
            match &mut work.kind {
                Kind::Send(WcData::Invalidated(rkey)) => {
                    let endpoint = self.world.endpoint(peer.node);
                    *rkey = key_to_take_away(endpoint, peer.pd, peer.qp, self.rng.chance(0.5));
                }
                Kind::CompareSwap { compare, .. } => {
                    let now = word(&target[work.place..work.place + 8]);
                    *compare = if self.rng.chance(0.5) { now } else { self.rng.next_u64() };
                }
                _ => {}
            }
            work.apply(&source, &mut target, &mut landing);
        }
        self.parties[us].works = works;
    }

    fn run(&mut self) {
        while !self.is_over() {
            for us in 0..self.parties.len() {
                self.post_sends(us);
                if self.rng.chance(0.1) {
                    self.post_receive(us);
                }
            }
            if !self.world.step() {
                // Nothing is under way: only receives, or errors to come, can bring it on.
                let before = self.progress();
                for us in 0..self.parties.len() {
                    self.post_receive(us);
                    self.poll(us);
                }
                assert!(self.progress() > before, "hung: nothing is under way and work is left");
            }
            for us in 0..self.parties.len() {
                self.poll(us);
            }
            assert!(self.world.now().as_nanos() < HUNG.as_nanos() as u64, "hung for an hour of virtual time");
        }
    }

    /// A number that grows with everything that happens.
    fn progress(&self) -> usize {
        self.parties.iter().map(|p| p.receives_posted + p.done + p.flushed + p.receives_done + p.receives_flushed).sum()
    }

    fn is_over(&self) -> bool {
        (0..self.parties.len()).all(|us| {
            let (p, peer) = (&self.parties[us], &self.parties[us ^ 1]);
            let sent = match p.failed {
                None => p.done == p.works.len(),
                // The failed one itself is neither done nor flushed.
                Some(_) => p.done + 1 + p.flushed == p.posted,
            };
            let broken = p.failed.is_some() || peer.failed.is_some();
            sent && (broken || p.receives_done == p.receives.len())
        })
    }

    fn post_sends(&mut self, us: usize) {
        while self.parties[us].failed.is_none() && self.parties[us].posted < self.parties[us].works.len() {
            let peer = &self.parties[us ^ 1];
            let p = &self.parties[us];
            let work = &p.works[p.posted];
            let remote = peer.target.remote(work.place);
            let (operation, local) = match work.kind {
                Kind::Send(WcData::None) => (Operation::Send, &p.source),
                Kind::Send(WcData::Imm(imm)) => (Operation::SendImm(imm), &p.source),
                Kind::Send(WcData::Invalidated(rkey)) => (Operation::SendInvalidate(rkey), &p.source),
                Kind::Write => (Operation::Write(remote), &p.source),
                Kind::WriteImm(imm) => (Operation::WriteImm(remote, imm), &p.source),
                Kind::Read => (Operation::Read(remote), &p.landing),
                Kind::CompareSwap { compare, swap } => (Operation::CompareSwap { remote, compare, swap }, &p.landing),
                Kind::FetchAdd { add } => (Operation::FetchAdd { remote, add }, &p.landing),
                Kind::AtomicWrite => (Operation::AtomicWrite(remote), &p.source),
                Kind::Flush(scope) => {
                    let (remote, placement) = (peer.target.remote(0), FlushPlacement::Global);
                    (Operation::Flush { remote, length: 100, placement, scope }, &p.source)
                }
                Kind::Bind => (p.bind(p.posted), &p.source),
                Kind::Toggle(turn) => (p.toggle(turn), &p.source),
            };
            // Asked for at every step while the queue is full, so the bytes are only gathered where they are wanted.
            let inline = if work.inline { gather(&local.first, &work.pieces) } else { Vec::new() };
            let sges = local.sges(&work.pieces);
            let payload = if work.inline { Payload::Inline(&inline) } else { Payload::Sges(&sges) };
            let wr = SendWr { wr_id: p.posted as u64, operation, payload, flags: work.flags, destination: None };
            match self.world.endpoint(p.node).post_send(p.qp, &[wr]) {
                Ok(()) => self.parties[us].posted += 1,
                Err(e) if e.error == PostError::QueueFull => return,
                Err(e) => panic!("post of {work:?}: {e}"),
            }
        }
    }

    /// Posts the next receive, if the scenario lets the party have it.
    fn post_receive(&mut self, us: usize) {
        let p = &self.parties[us];
        let limit = self.scenario.starve_after.unwrap_or(usize::MAX).min(p.receives.len());
        if p.receives_posted >= limit {
            return;
        }
        let sges = p.inbox.sges(&p.receives[p.receives_posted].pieces);
        let wr = RecvWr { wr_id: p.receives_posted as u64, sges: &sges };
        match self.world.endpoint(p.node).post_recv(p.qp, &[wr]) {
            Ok(()) => {
                self.parties[us].receives_posted += 1;
                self.tell(us, Beside::ReceivePosted);
            }
            Err(e) => assert_eq!(e.error, PostError::QueueFull, "post of a receive"),
        }
    }

    fn poll(&mut self, us: usize) {
        let Party { node, qp, qpn, send_cq, recv_cq, .. } = self.parties[us];
        let blank = WorkCompletion { wr_id: u64::MAX, ..WorkCompletion::blank(qp) };
        let mut out = [blank; 8];
        let count = self.world.endpoint(node).poll_cq(send_cq, &mut out).unwrap();
        for wc in &out[..count] {
            assert_eq!((wc.qp, wc.qp_num), (qp, qpn));
            self.completed += 1;
            self.tell_failed(us, true, wc.status);
            self.parties[us].check_send(wc);
            if wc.status != WcStatus::Success && wc.status != WcStatus::WorkRequestFlushed {
                self.check_failure(us, wc.status);
            }
        }
        let count = self.world.endpoint(node).poll_cq(recv_cq, &mut out).unwrap();
        for wc in &out[..count] {
            assert_eq!((wc.qp, wc.qp_num), (qp, qpn));
            self.completed += 1;
            self.tell_failed(us, false, wc.status);
            self.check_receive(us, wc);
        }
    }

    /// A failure must be one that the retry limits allow, with the tries and the time that they say.
    fn check_failure(&mut self, us: usize, status: WcStatus) {
        let Party { node, qp, .. } = self.parties[us];
        let s = &self.scenario;
        let info = self.world.endpoint(node).query_qp(qp).unwrap();
        assert_eq!(info.state, QpState::Err);
        let detail = info.last_error.expect("a failed QP says why");
        assert_eq!(detail.status, status);
        match status {
            WcStatus::RnrRetryExceeded => {
                assert!(s.starve_after.is_some(), "receives were on their way: {detail}");
                assert_eq!(detail.kind, FailureKind::ReceiverNotReady);
                let limit = u32::from(s.rnr_retries.limit().expect("not for ever"));
                assert!(detail.tries > limit, "{detail}");
                assert!(detail.elapsed >= s.rnr_timer.duration() * limit, "{detail}");
            }
            WcStatus::RetryExceeded => {
                let peer_failed = self.parties[us ^ 1].failed.is_some();
                let gone = s.dead_after.is_some() || peer_failed;
                assert!(gone || !s.is_lossless(), "nothing was lost: {detail}");
                let limit = s.retries.get();
                assert_eq!(info.queues.retries_used, limit, "{detail}");
                let timeout = s.timeout.duration().expect("a timeout is set");
                // Each try is one to four timeouts long; between them there may have been waits for a receive.
                let tries = u32::from(limit) + 1;
                let waits = detail.tries.checked_sub(tries).expect("each retry is a try");
                let longest = timeout * 4 * tries + (s.longest_rnr() + timeout) * waits;
                assert!(detail.elapsed <= longest, "{detail}, timeout {timeout:?}");
                if detail.kind == FailureKind::NoAnswer && s.is_lossless() {
                    assert!(detail.elapsed >= timeout * tries, "{detail}, timeout {timeout:?}");
                }
            }
            other => panic!("{other:?}: {detail}"),
        }
    }

    fn check_receive(&mut self, us: usize, wc: &WorkCompletion) {
        let peer_works = &self.parties[us ^ 1].works;
        let p = &self.parties[us];
        let number = p.receives_done + p.receives_flushed;
        assert_eq!(wc.wr_id, number as u64, "receives complete once and in order");
        if wc.status == WcStatus::WorkRequestFlushed {
            self.parties[us].receives_flushed += 1;
            return;
        }
        assert_eq!((wc.status, p.receives_flushed), (WcStatus::Success, 0));
        let work = &peer_works[p.receives[number].work];
        let (opcode, data) = match work.kind {
            Kind::Send(data) => (WcOpcode::Recv, data),
            Kind::WriteImm(imm) => (WcOpcode::RecvRdmaWithImm, WcData::Imm(imm)),
            other => panic!("{other:?} takes no receive"),
        };
        assert_eq!((wc.opcode, wc.data), (opcode, data));
        assert_eq!(wc.byte_len as usize, work.len);
        assert_eq!(wc.solicited, work.flags.solicited);
        self.parties[us].receives_done += 1;
    }

    /// Nothing may come any more; then memory and counts are compared with the model.
    fn finish(&mut self) -> Outcome {
        let broken = self.parties.iter().any(|p| p.failed.is_some());
        if broken {
            for us in 0..self.parties.len() {
                let Party { node, qp, .. } = self.parties[us];
                if self.parties[us].failed.is_some() || self.parties[us ^ 1].failed.is_some() {
                    self.world.endpoint(node).modify_qp(qp, QpAttr::to_state(QpState::Err)).unwrap();
                    self.tell(us, Beside::MovedToErr);
                }
            }
        }
        let end = self.world.run_until_idle(HUNG);
        assert_eq!(end, uroce::sim::RunEnd::Idle, "timers run for ever");
        for us in 0..self.parties.len() {
            let before = (self.parties[us].done, self.parties[us].flushed);
            for _ in 0..=RECEIVES / 8 {
                self.poll(us);
            }
            let p = &self.parties[us];
            assert_eq!((p.done, p.flushed), before, "a completion too many");
            assert_eq!(p.receives_done + p.receives_flushed, p.receives_posted, "a receive that never completed");
            self.check_memory(us);
        }
        let bytes = self.parties.iter().flat_map(|p| &p.works).map(|w| w.len as u64).sum();
        Outcome {
            trace_hash: self.world.trace_hash(),
            packets: self.world.link_stats().packets,
            completed: self.completed,
            bytes,
            retries_exhausted: broken,
        }
    }

    /// What `us` asked for is in the peer's memory and its own, and nothing else is.
    fn check_memory(&self, us: usize) {
        let (p, peer) = (&self.parties[us], &self.parties[us ^ 1]);
        let (mut target, mut landing) = (peer.target.first.clone(), p.landing.first.clone());
        for work in &p.works[..p.done] {
            work.apply(&p.source.first, &mut target, &mut landing);
        }
        assert!(p.source.region.to_vec() == p.source.first, "a source was written");
        let (mut got_target, mut got_landing) = (peer.target.region.to_vec(), p.landing.region.to_vec());
        // What a failed connection left half done may be either way.
        for work in &p.works[p.done..p.posted] {
            let changed = work.changes();
            got_target[changed.clone()].copy_from_slice(&target[changed]);
            if work.kind.lands() {
                for piece in &work.pieces {
                    got_landing[piece.clone()].copy_from_slice(&landing[piece.clone()]);
                }
            }
        }
        same("target", &got_target, &target);
        same("landing", &got_landing, &landing);

        let mut inbox = peer.inbox.first.clone();
        let mut got_inbox = peer.inbox.region.to_vec();
        for (number, receive) in peer.receives.iter().enumerate() {
            let work = &p.works[receive.work];
            if number < peer.receives_done && matches!(work.kind, Kind::Send(_)) {
                scatter(&mut inbox, &receive.pieces, &gather(&p.source.first, &work.pieces));
            } else if number == peer.receives_done && p.failed.is_some() | peer.failed.is_some() {
                for piece in &receive.pieces {
                    got_inbox[piece.clone()].copy_from_slice(&inbox[piece.clone()]);
                }
            }
        }
        same("inbox", &got_inbox, &inbox);
        let needed = p.works[..p.done].iter().filter(|w| w.kind.takes_receive()).count();
        assert!(peer.receives_done >= needed, "a SEND completed that the peer has not received");
    }
}

impl Party {
    /// Moves the window somewhere else.
    fn bind(&self, number: usize) -> Operation {
        let rkey = Rkey::new(u32::try_from(number).unwrap());
        let (mr, addr) = (Some(self.target.mr.handle), self.target.mr.iova + number as u64);
        Operation::BindMw(MwBind { mw: self.window.handle, rkey, mr, addr, length: 64, access: WINDOW })
    }

    fn toggle(&self, turn: u8) -> Operation {
        let key = Rkey::new(self.fast.rkey.get() & !0xFF | u32::from(turn & !1));
        if turn % 2 == 1 {
            return Operation::LocalInvalidate(key);
        }
        let access = AccessFlags::LOCAL_WRITE;
        Operation::FastRegister(FastRegister { mr: self.fast.handle, key, offset: 0, length: 64, iova: 0, access })
    }

    /// Completions come in order: success up to a failure, and then flushes.
    fn check_send(&mut self, wc: &WorkCompletion) {
        let number = usize::try_from(wc.wr_id).unwrap();
        assert!(number < self.posted, "completion of what was never posted: {wc:?}");
        let next = self.done + usize::from(self.failed.is_some()) + self.flushed;
        assert!(number >= next, "work request {number} completed twice, or late: {wc:?}");
        let skipped = &self.works[next..number];
        assert!(skipped.iter().all(|w| !w.flags.signaled), "a signaled work request made no completion");
        let work = &self.works[number];
        match wc.status {
            WcStatus::Success => {
                assert!(self.failed.is_none(), "success after a failure");
                assert!(work.flags.signaled, "an unsignaled success made a completion");
                assert_eq!(wc.opcode, work.kind.opcode());
                if matches!(work.kind, Kind::Read) {
                    assert_eq!(wc.byte_len as usize, work.len);
                }
                self.done = number + 1;
            }
            WcStatus::WorkRequestFlushed => {
                assert!(self.failed.is_some(), "a flush before any failure");
                assert!(skipped.is_empty(), "every work request behind a failure is flushed");
                self.flushed += 1;
            }
            status => {
                assert!(self.failed.is_none(), "a second failure: {wc:?}");
                self.done = number;
                self.failed = Some(status);
            }
        }
    }
}

/// Equal, or says where they differ first.
fn same(what: &str, got: &[u8], expected: &[u8]) {
    if let Some(at) = got.iter().zip(expected).position(|(g, e)| g != e) {
        let wrong = got.iter().zip(expected).filter(|(g, e)| g != e).count();
        panic!("{what} differs from the model at byte {at}, {wrong} bytes in all");
    }
    assert_eq!(got.len(), expected.len());
}

/// A key that a peer of `qp` can take away once: of a fast registration, or of a window that is bound on the QP.
fn key_to_take_away(endpoint: &mut Endpoint, pd: PdHandle, qp: QpHandle, window: bool) -> Rkey {
    let region = Region::alloc(64).unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::MW_BIND;
    let mr = endpoint.alloc_fast_mr(pd, &region).unwrap();
    let fast = FastRegister { mr: mr.handle, key: mr.rkey, offset: 0, length: 64, iova: 0x1000, access };
    endpoint.memory_mut().fast_register(pd, &fast).unwrap();
    if !window {
        return mr.rkey;
    }
    let mw = endpoint.alloc_mw(pd, MwType::Two).unwrap();
    let access = AccessFlags::REMOTE_WRITE;
    let bind = MwBind { mw: mw.handle, rkey: mw.rkey, mr: Some(mr.handle), addr: 0x1000, length: 64, access };
    endpoint.memory_mut().bind(pd, qp, &bind).unwrap();
    mw.rkey
}
