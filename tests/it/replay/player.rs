//! One endpoint in the place of a captured node.
//!
//! Owns the endpoint, its QPs under the captured numbers, and the run: at the captured times it is handed what the peer
//! sent and posts what the node's program posted. What it sends is kept for the comparison; nothing hears it.

use std::net::IpAddr;

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::mem::IovaPolicy;
use uroce::raw::Region;
use uroce::time::Instant;
use uroce::types::{AckTimeout, Gid, PathMtu, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AhHandle, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle,
    QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, RtrAttr, RtsAttr, SendFlags, SendWr, Sge,
    SrqHandle, SrqInit, UdDestination, Verbs, WcStatus, WorkCompletion,
};
use uroce::wire::{Body, Flow, Packet, parse_ip};
use uroce_fixtures::reference_icrc;
use uroce_tests::pair::blank_completion;

use super::capture::{Capture, Link, Node, Seen};
use super::memory::Memory;
use super::script::{self, Posted};

/// Bytes of a receive: more than any captured message, and the 40 that stand before a datagram.
const RECEIVE: u32 = 8192;
/// Room for what a work request sends, or for what comes back.
const MESSAGE: u32 = 32_768;
/// Work requests of a QP at most.
const DEPTH: u32 = 256;
/// Set in the id of a receive.
const RECEIVES: u64 = 1 << 32;

/// A packet that the endpoint sent.
pub(super) struct Sent {
    pub(super) flow: Flow,
    /// BTH to ICRC.
    pub(super) segment: Vec<u8>,
}

impl Sent {
    /// From the IP header on. The ICRC must be the one that the slow reference computes.
    fn new(packet: &[u8]) -> Self {
        let outer = parse_ip(packet).expect("outer headers");
        let (_, icrc) = packet.split_last_chunk().expect("an ICRC");
        assert_eq!(reference_icrc(packet), *icrc);
        Self { flow: outer.flow, segment: outer.payload.to_vec() }
    }

    pub(super) fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.segment).expect("we send only what parses")
    }
}

/// One QP, what its program does, and what its peer's does.
pub(super) struct Role {
    pub(super) link: Link,
    qp: QpHandle,
    ah: Option<AhHandle>,
    /// Our work requests.
    pub(super) ours: Vec<Posted>,
    /// The peer's, which we answer.
    pub(super) theirs: Vec<Posted>,
    sends: Buffers,
    answers: Buffers,
    receives: Buffers,
    received: usize,
    /// Receives that wait for the RNR NAKs to be over: behind which packet, and how many.
    late: Option<(usize, usize)>,
}

/// Equal pieces of one region.
struct Buffers {
    region: Region,
    mr: MemoryRegion,
    each: u32,
}

impl Buffers {
    fn new(ep: &mut Endpoint, pd: PdHandle, each: u32, count: usize) -> Self {
        let region = Region::alloc(each as usize * count.max(1)).expect("a region");
        let mr = ep.register(pd, &region, AccessFlags::LOCAL_WRITE, None).expect("register");
        Self { region, mr, each }
    }

    fn sge(&self, index: usize, length: u32) -> Sge {
        Sge { addr: self.mr.iova + u64::from(self.each) * index as u64, length, lkey: self.mr.lkey }
    }

    fn write(&self, index: usize, data: &[u8]) {
        self.region.write(self.each as usize * index, data).expect("within the region");
    }

    fn read(&self, index: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.region.read(self.each as usize * index, &mut out).expect("within the region");
        out
    }
}

/// The endpoint and what came of the run.
pub(super) struct Player<'a> {
    pub(super) capture: &'a Capture,
    pub(super) node: Node,
    ep: Endpoint,
    cq: CqHandle,
    srq: Option<SrqHandle>,
    pub(super) roles: Vec<Role>,
    pub(super) memory: Memory,
    pub(super) sent: Vec<Sent>,
    receive_len: u32,
}

impl<'a> Player<'a> {
    /// An endpoint in the place of `node`. `receive_len` is what its receives hold, where that matters.
    pub(super) fn new(capture: &'a Capture, node: Node, receive_len: Option<u32>) -> Self {
        let address = capture.addresses[node as usize];
        let mut config = EndpointConfig::new(vec![address], PathMtu::B4096);
        config.iova = IovaPolicy::Seeded;
        let mut ep = Endpoint::new(config, [7; 32]);
        let pd = ep.alloc_pd().expect("pd");
        let cq = ep.create_cq(4096).expect("cq");
        let theirs: Vec<_> = capture.links.iter().map(|l| script::posted(capture, l, node.other())).collect();
        let memory = Memory::register(capture, node, &theirs, &mut ep, pd);
        let shares = capture.fixture.has_tag("srq");
        let srq = shares.then(|| ep.create_srq(SrqInit { pd, max_wr: DEPTH, max_sge: 1 }).expect("srq"));
        let receive_len = receive_len.unwrap_or(RECEIVE);
        let mut player = Self { capture, node, ep, cq, srq, roles: Vec::new(), memory, sent: Vec::new(), receive_len };
        for (link, theirs) in capture.links.iter().zip(theirs) {
            player.add(link, theirs, pd);
        }
        player
    }

    fn add(&mut self, link: &Link, theirs: Vec<Posted>, pd: PdHandle) {
        let ours = script::posted(self.capture, link, self.node);
        let caps = QpCapabilities { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..QpCapabilities::default() };
        let (cq, qpn, srq) = (self.cq, link.end(self.node).qpn, self.srq);
        let init = QpInit { pd, qp_type: link.qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn };
        let qp = self.ep.create_qp(init).expect("the captured QPN is free");
        let peer = self.capture.addresses[self.node.other() as usize];
        for step in steps(link, self.node, peer, datagram_key(&ours, &theirs)) {
            self.ep.modify_qp(qp, step.into()).expect("modify");
        }
        let ah = ours.iter().any(|p| p.destination.is_some()).then(|| {
            let to = self.capture.seen.iter().find(|s| s.from == self.node).expect("a datagram").flow.dst;
            self.ep.create_ah(pd, AddressVector::new(Gid::from(to), 0)).expect("ah")
        });
        let group = self.capture.seen.first().map(|s| s.flow.dst).filter(core::net::IpAddr::is_multicast);
        if let Some(group) = group.filter(|_| !theirs.is_empty()) {
            self.ep.attach_multicast(qp, Gid::from(group)).expect("attach");
        }
        let wanted = theirs.iter().filter(|p| p.takes_receive()).count();
        let (late, early) = match script::late_receive(self.capture, link, self.node) {
            None => (None, wanted),
            Some((at, psn)) => {
                let waited = |p: &&Posted| p.takes_receive() && p.first.distance_from(psn) < 0;
                let early = theirs.iter().filter(waited).count();
                let came = theirs.iter().filter(|p| p.takes_receive() && p.status == WcStatus::Success).count();
                (Some((at, came - early)), early)
            }
        };
        let sends = Buffers::new(&mut self.ep, pd, MESSAGE, ours.len());
        let answers = Buffers::new(&mut self.ep, pd, MESSAGE, ours.len());
        let receives = Buffers::new(&mut self.ep, pd, RECEIVE, wanted);
        let link = link.clone();
        self.roles.push(Role { link, qp, ah, ours, theirs, sends, answers, receives, received: 0, late });
        self.post_receives(self.roles.len() - 1, early);
    }

    fn post_receives(&mut self, role: usize, count: usize) {
        let r = &mut self.roles[role];
        for index in r.received..r.received + count {
            let sges = [r.receives.sge(index, self.receive_len)];
            let wr_id = RECEIVES | ((role as u64) << 16) | index as u64;
            let wr = RecvWr { wr_id, sges: &sges };
            match self.srq {
                Some(srq) => self.ep.post_srq_recv(srq, &[wr]).expect("post_srq_recv"),
                None => self.ep.post_recv(r.qp, &[wr]).expect("post_recv"),
            }
        }
        r.received += count;
    }

    /// Plays the capture from its first packet to its last.
    pub(super) fn run(&mut self) {
        for (at, seen) in self.capture.seen.iter().enumerate() {
            self.pass_time(seen.at);
            for role in 0..self.roles.len() {
                self.post_sends(role, at);
            }
            self.pump(seen.at);
            if seen.from != self.node && !seen.lost {
                self.prepare(at, seen);
                self.hand_over(seen);
            }
            for role in 0..self.roles.len() {
                if let Some((_, count)) = self.roles[role].late.filter(|(behind, _)| *behind == at) {
                    self.post_receives(role, count);
                }
            }
        }
    }

    fn post_sends(&mut self, role: usize, at: usize) {
        let r = &self.roles[role];
        for (index, one) in r.ours.iter().enumerate().filter(|(_, one)| one.at == at) {
            r.sends.write(index, &one.payload);
            let len = u32::try_from(one.payload.len()).expect("a short message");
            let flush = matches!(one.operation, Operation::Flush { .. });
            let sges = if one.operation.is_read_or_atomic() {
                [r.answers.sge(index, one.wanted)]
            } else {
                [r.sends.sge(index, len)]
            };
            let destination = one.destination.map(|(qpn, qkey)| {
                let ah = r.ah.expect("an address handle");
                UdDestination { ah, qpn, qkey }
            });
            let wr_id = ((role as u64) << 16) | index as u64;
            let (operation, payload) = (one.operation, Payload::Sges(if flush { &[] } else { &sges }));
            let wr = SendWr { wr_id, operation, payload, flags: SendFlags::SIGNALED, destination };
            self.ep.post_send(r.qp, &[wr]).expect("post_send");
        }
    }

    /// The peer's work request that begins with this packet meets the memory it was meant for.
    fn prepare(&mut self, at: usize, seen: &Seen) {
        if matches!(seen.packet().body, Body::Response(_)) {
            return;
        }
        let psn = seen.packet().psn;
        for role in self.roles.iter().filter(|r| r.link.owns(seen)) {
            let begun = role.theirs.iter().filter(|p| p.first == psn && p.status == WcStatus::Success);
            // A repeat finds what the first left.
            for one in begun.filter(|p| p.at == at) {
                self.memory.prepare(one);
            }
        }
    }

    fn hand_over(&mut self, seen: &Seen) {
        let (bytes, segment) = (seen.segment.as_slice(), seen.segment.len());
        let ids = RxIds::Known(seen.ip);
        self.ep.handle_burst(seen.at, RxBurst { flow: seen.flow, bytes, segment, ids, at: seen.at });
        self.pump(seen.at);
    }

    /// Timers that run out before `now` act.
    fn pass_time(&mut self, now: Instant) {
        while let Some(due) = self.ep.poll_timeout().filter(|t| *t <= now) {
            self.ep.handle_timeout(due);
            self.pump(due);
        }
    }

    fn pump(&mut self, now: Instant) {
        let mut buf = [0; 8192];
        loop {
            let ids = IdRule::From(u16::try_from(self.sent.len()).expect("few packets"));
            let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids, medium: Medium::Ip };
            let Some(burst) = self.ep.poll_transmit(now, room) else { return };
            self.sent.push(Sent::new(&buf[..burst.len]));
        }
    }

    /// All completions.
    pub(super) fn completions(&mut self) -> Vec<WorkCompletion> {
        let mut all = Vec::new();
        loop {
            let mut some = [blank_completion(self.roles[0].qp); 16];
            let n = self.ep.poll_cq(self.cq, &mut some).expect("poll_cq");
            if n == 0 {
                return all;
            }
            all.extend_from_slice(&some[..n]);
        }
    }

    /// The role whose QP it is.
    pub(super) fn role_of(&self, wc: &WorkCompletion) -> usize {
        self.roles.iter().position(|r| r.qp == wc.qp).expect("a QP of ours")
    }

    /// What came back for work request `index`.
    pub(super) fn answer(&self, role: usize, index: usize, len: usize) -> Vec<u8> {
        self.roles[role].answers.read(index, len)
    }

    /// The bytes of a receive: its buffer is named by its id, as receives of an SRQ go to any QP.
    pub(super) fn receive(&self, wc: &WorkCompletion) -> Vec<u8> {
        let (role, index) = (usize_of(wc.wr_id >> 16 & 0xFFFF), usize_of(wc.wr_id & 0xFFFF));
        self.roles[role].receives.read(index, wc.byte_len as usize)
    }
}

/// Whether it completes a receive, by its id: after an error nothing else is valid.
pub(super) fn is_receive(wc: &WorkCompletion) -> bool {
    wc.wr_id & RECEIVES != 0
}

/// Which work request it completes.
pub(super) fn index(wc: &WorkCompletion) -> usize {
    usize_of(wc.wr_id & 0xFFFF)
}

fn usize_of(v: u64) -> usize {
    usize::try_from(v).expect("a small number")
}

fn datagram_key(ours: &[Posted], theirs: &[Posted]) -> QKey {
    ours.iter().chain(theirs).find_map(|p| p.destination).map(|(_, qkey)| qkey).unwrap_or_default()
}

fn steps(link: &Link, node: Node, peer: IpAddr, qkey: QKey) -> [QpTransition; 3] {
    let (own, other) = (link.end(node), link.end(node.other()));
    let rtr = RtrAttr {
        av: AddressVector { flow_label: link.flow_label, ..AddressVector::new(Gid::from(peer), 0) },
        path_mtu: link.mtu,
        // Where the peer is never named it is never spoken to: the receiving side of UC.
        dest_qpn: other.qpn.unwrap_or(Qpn::new(2).expect("24 bits")),
        rq_psn: other.first_psn,
        max_dest_rd_atomic: own.reads_in,
        min_rnr_timer: RnrTimer::new(own.min_rnr).expect("5 bits"),
    };
    let rts = RtsAttr {
        sq_psn: own.first_psn,
        timeout: AckTimeout::new(link.timeout).expect("5 bits"),
        retry_count: RetryCount::new(link.retry).expect("3 bits"),
        rnr_retry: RnrRetry::new(own.rnr_retry).expect("3 bits"),
        max_rd_atomic: own.reads_out,
    };
    let init = InitAttr::connected(super::memory::REMOTE);
    match link.qp_type {
        QpType::Rc => [QpTransition::Init(init), QpTransition::Rtr(rtr), QpTransition::Rts(rts)],
        QpType::Uc => [QpTransition::Init(init), QpTransition::RtrUc(rtr), QpTransition::RtsPsn(own.first_psn)],
        QpType::Ud | QpType::Gsi => {
            let init = InitAttr::datagram(qkey);
            [QpTransition::Init(init), QpTransition::RtrUd, QpTransition::RtsPsn(own.first_psn)]
        }
    }
}
