//! Two endpoints and the wire between them, packet by packet.
//!
//! A test posts work requests, decides the fate of each packet in a closure, and moves the clock itself. Nothing is
//! random but the seeds.

use std::net::IpAddr;

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::mem::IovaPolicy;
use uroce::raw::Region;
use uroce::time::{Duration, Instant};
use uroce::types::{AckTimeout, Gid, PKey, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle, QpCapabilities,
    QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, SrqHandle, Verbs,
    WorkCompletion,
};
use uroce::wire::{self, Body, Flow, IpFields, Packet, Response, ResponseOp};

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Usually the requester.
    A,
    /// Usually the responder.
    B,
}

impl Side {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// What the wire does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It arrives.
    Deliver,
    /// It is lost.
    Drop,
    /// It arrives twice.
    Duplicate,
    /// It arrives behind everything that is under way now.
    Late,
}

/// How the pair is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Transport.
    pub qp_type: QpType,
    /// Path MTU of both.
    pub mtu: PathMtu,
    /// First PSN that A sends.
    pub psn_a: u32,
    /// First PSN that B sends.
    pub psn_b: u32,
    /// Local ACK timeout of both.
    pub timeout: u8,
    /// Transport retries of both.
    pub retry: u8,
    /// RNR retries of both.
    pub rnr_retry: u8,
    /// RNR timer of both.
    pub min_rnr: u8,
    /// READs and atomics outstanding, each way.
    pub rd_atomic: u8,
    /// Access rights of QPs and regions.
    pub access: AccessFlags,
    /// Sizes of the QPs.
    pub caps: QpCapabilities,
    /// Bytes of each side's region.
    pub region: usize,
    /// Entries of each CQ.
    pub cq_depth: u32,
    /// B receives from an SRQ.
    pub srq: bool,
    /// Bytes that each QP may have unacknowledged.
    pub max_in_flight: Option<u64>,
    /// Seed of both endpoints.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            qp_type: QpType::Rc,
            mtu: PathMtu::B1024,
            psn_a: 100,
            psn_b: 5000,
            timeout: 14,
            retry: 7,
            rnr_retry: 7,
            min_rnr: 12,
            rd_atomic: 16,
            access: AccessFlags::ALL,
            caps: QpCapabilities { max_send_sge: 4, max_recv_sge: 4, max_inline: 256, ..QpCapabilities::default() },
            region: 1 << 16,
            cq_depth: 512,
            srq: false,
            max_in_flight: None,
            seed: 1,
        }
    }
}

/// One endpoint with one QP.
pub struct Node {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// Its protection domain.
    pub pd: PdHandle,
    /// Its completion queue, for both directions.
    pub cq: CqHandle,
    /// Its QP.
    pub qp: QpHandle,
    /// The QP's number.
    pub qpn: Qpn,
    /// Its registered memory.
    pub region: Region,
    /// The registration.
    pub mr: MemoryRegion,
    /// Its SRQ, if asked for.
    pub srq: Option<SrqHandle>,
    address: IpAddr,
}

impl Node {
    /// An element of the node's region.
    #[must_use]
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.mr.iova + offset, length, lkey: self.mr.lkey }
    }

    /// The node's memory as its peer names it.
    #[must_use]
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.mr.iova + offset, rkey: self.mr.rkey }
    }

    /// Posts a signaled send of one element.
    ///
    /// # Panics
    /// When it is refused.
    pub fn send(&mut self, wr_id: u64, operation: Operation, offset: u64, length: u32) {
        let sge = [self.sge(offset, length)];
        let payload = Payload::Sges(&sge);
        let wr = SendWr { wr_id, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        self.endpoint.post_send(self.qp, &[wr]).expect("post_send");
    }

    /// Posts a signaled work request that takes no elements: a bind, an invalidation, a registration, a FLUSH.
    ///
    /// # Panics
    /// When it is refused.
    pub fn send_local(&mut self, wr_id: u64, operation: Operation) {
        let (payload, flags) = (Payload::Sges(&[]), SendFlags::SIGNALED);
        let wr = SendWr { wr_id, operation, payload, flags, destination: None };
        self.endpoint.post_send(self.qp, &[wr]).expect("post_send");
    }

    /// Posts a receive of one element.
    ///
    /// # Panics
    /// When it is refused.
    pub fn recv(&mut self, wr_id: u64, offset: u64, length: u32) {
        let sges = [self.sge(offset, length)];
        let wr = RecvWr { wr_id, sges: &sges };
        match self.srq {
            Some(srq) => self.endpoint.post_srq_recv(srq, &[wr]).expect("post_srq_recv"),
            None => self.endpoint.post_recv(self.qp, &[wr]).expect("post_recv"),
        }
    }

    /// All completions that wait.
    ///
    /// # Panics
    /// Never: the CQ lives as long as the node.
    pub fn completions(&mut self) -> Vec<WorkCompletion> {
        let mut all = Vec::new();
        loop {
            let mut one = [blank_completion(self.qp); 16];
            let n = self.endpoint.poll_cq(self.cq, &mut one).expect("poll_cq");
            all.extend_from_slice(&one[..n]);
            if n == 0 {
                return all;
            }
        }
    }
}

/// A completion to be overwritten.
#[must_use]
pub fn blank_completion(qp: QpHandle) -> WorkCompletion {
    WorkCompletion { wr_id: u64::MAX, ..WorkCompletion::blank(qp) }
}

/// The two, the clock, and what crossed the wire.
pub struct Pair {
    /// Side A.
    pub a: Node,
    /// Side B.
    pub b: Node,
    /// Virtual time.
    pub now: Instant,
    /// Every packet put on the wire: who sent it, opcode, PSN, bytes.
    pub log: Vec<(Side, Vec<u8>)>,
}

/// The Q_Key of datagram pairs.
pub const QKEY: QKey = QKey::new(0x1111_1111);

impl Pair {
    /// A connected pair (or two UD QPs), ready to send both ways.
    ///
    /// # Panics
    /// When a verb refuses.
    #[must_use]
    pub fn new(o: &Options) -> Self {
        let mut a = node("10.0.0.1", o, o.seed, false);
        let mut b = node("10.0.0.2", o, o.seed ^ 0x5555_5555, o.srq);
        connect(&mut a, &b, o, o.psn_b, o.psn_a);
        connect(&mut b, &a, o, o.psn_a, o.psn_b);
        Self { a, b, now: Instant::from_nanos(1_000_000), log: Vec::new() }
    }

    /// The node of a side.
    pub fn node(&mut self, side: Side) -> &mut Node {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    /// Everything that `side` has to send now.
    pub fn take_sent(&mut self, side: Side) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let now = self.now;
        let mut buf = [0u8; 9000];
        let endpoint = &mut self.node(side).endpoint;
        loop {
            let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
            let Some(burst) = endpoint.poll_transmit(now, room) else { break };
            all.push(buf[..burst.len].to_vec());
        }
        self.log.extend(all.iter().map(|p| (side, p.clone())));
        all
    }

    /// Hands a packet to `side`, as if its peer had sent it.
    pub fn deliver(&mut self, side: Side, segment: &[u8]) {
        let (now, flow) = (self.now, self.flow_from(side.other()));
        let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
        let burst = RxBurst { flow, bytes: segment, segment: segment.len().max(1), ids, at: now };
        self.node(side).endpoint.handle_burst(now, burst);
    }

    /// Delivers to A a response of B at `psn`, made by hand.
    pub fn forge(&mut self, psn: u32, op: ResponseOp, payload: &[u8]) {
        let response = Response { op, payload };
        let psn = Psn::new(psn).expect("24 bits");
        let packet = Packet::new(self.a.qpn, PKey::DEFAULT, psn, Body::Response(response));
        let header = packet.header_len();
        let mut bytes = vec![0; wire::segment_len(header, payload.len())];
        packet.write_headers(payload.len(), &mut bytes).expect("room");
        bytes[header..header + payload.len()].copy_from_slice(payload);
        let flow = self.flow_from(Side::B);
        wire::seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, header + payload.len());
        self.deliver(Side::A, &bytes);
    }

    /// The flow of what `side` sends to its peer.
    pub fn flow_from(&mut self, side: Side) -> Flow {
        let (src, dst) = (self.node(side).address, self.node(side.other()).address);
        let src_port = self.port_of(side);
        Flow { src, dst, src_port, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None }
    }

    fn port_of(&mut self, side: Side) -> u16 {
        let (local, remote) = (self.node(side).qpn, self.node(side.other()).qpn);
        let node = self.node(side);
        match node.endpoint.query_qp(node.qp).map(|i| i.qp_type) {
            Ok(QpType::Ud) => wire::datagram_source_port(local),
            _ => wire::udp_source_port(0, local, remote),
        }
    }

    /// Carries packets until both sides are silent, the clock standing still. `fate` decides over each.
    pub fn run(&mut self, mut fate: impl FnMut(Side, &Packet<'_>) -> Fate) {
        for _ in 0..10_000 {
            let mut quiet = true;
            for side in [Side::A, Side::B] {
                let sent = self.take_sent(side);
                quiet &= sent.is_empty();
                self.carry(side, &sent, &mut fate);
            }
            if quiet {
                return;
            }
        }
    }

    fn carry(&mut self, side: Side, sent: &[Vec<u8>], fate: &mut impl FnMut(Side, &Packet<'_>) -> Fate) {
        let mut late = Vec::new();
        for segment in sent {
            let packet = Packet::parse(segment).expect("we send only what parses");
            match fate(side, &packet) {
                Fate::Deliver => self.deliver(side.other(), segment),
                Fate::Drop => {}
                Fate::Duplicate => {
                    self.deliver(side.other(), segment);
                    self.deliver(side.other(), segment);
                }
                Fate::Late => late.push(segment.clone()),
            }
        }
        for segment in late {
            self.deliver(side.other(), &segment);
        }
    }

    /// Carries packets on a perfect wire.
    pub fn settle(&mut self) {
        self.run(|_, _| Fate::Deliver);
    }

    /// Carries packets until both sides are silent, on a perfect wire and without a record: for much data.
    pub fn stream(&mut self) {
        self.stream_copies(|_, _| 1);
    }

    /// As [`Pair::stream`], but `copies` says how often each packet arrives: 0 loses it.
    pub fn stream_copies(&mut self, mut copies: impl FnMut(Side, &[u8]) -> usize) {
        let mut buf = [0u8; 4400];
        let mut quiet = false;
        while !quiet {
            quiet = true;
            for side in [Side::A, Side::B] {
                let (now, flow) = (self.now, self.flow_from(side));
                for _ in 0..64 {
                    let room =
                        TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
                    let Some(burst) = self.node(side).endpoint.poll_transmit(now, room) else { break };
                    quiet = false;
                    let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
                    let bytes = &buf[..burst.len];
                    for _ in 0..copies(side, bytes) {
                        let arrived = RxBurst { flow, bytes, segment: bytes.len(), ids, at: now };
                        self.node(side.other()).endpoint.handle_burst(now, arrived);
                    }
                }
            }
        }
    }

    /// Moves the clock to the next timer of either side and lets it act. False when there is none.
    pub fn next_timer(&mut self) -> bool {
        let due = [self.a.endpoint.poll_timeout(), self.b.endpoint.poll_timeout()].into_iter().flatten().min();
        let Some(at) = due else { return false };
        self.now = self.now.max(at);
        let now = self.now;
        self.a.endpoint.handle_timeout(now);
        self.b.endpoint.handle_timeout(now);
        true
    }

    /// Lets time pass, timers act and packets flow, until nothing is left to do or `limit` has passed.
    pub fn run_for(&mut self, limit: Duration, mut fate: impl FnMut(Side, &Packet<'_>) -> Fate) {
        let end = self.now + limit;
        self.run(&mut fate);
        while [self.a.endpoint.poll_timeout(), self.b.endpoint.poll_timeout()].into_iter().flatten().any(|t| t <= end)
            && self.next_timer()
        {
            self.run(&mut fate);
        }
    }

    /// What crossed the wire so far, one line a packet, as `A RC_SEND_ONLY 100`.
    #[must_use]
    pub fn ladder(&self) -> Vec<String> {
        self.log
            .iter()
            .map(|(side, segment)| {
                let packet = Packet::parse(segment).expect("we send only what parses");
                format!("{side:?} {} {}", describe(&packet), packet.psn.get())
            })
            .collect()
    }
}

fn describe(packet: &Packet<'_>) -> String {
    use uroce::wire::{Body, ResponseOp, Syndrome};
    if let Body::Response(r) = &packet.body
        && let ResponseOp::Acknowledge(aeth) = r.op
    {
        return match aeth.syndrome {
            Syndrome::Ack { .. } => "ACK".to_owned(),
            Syndrome::RnrNak(_) => "RNR".to_owned(),
            Syndrome::Nak(code) => format!("NAK({code:?})"),
            Syndrome::Reserved(v) => format!("RESERVED({v:#x})"),
        };
    }
    uroce::wire::Opcode::new(packet.opcode()).name().to_owned()
}

fn node(address: &str, o: &Options, seed: u64, with_srq: bool) -> Node {
    let address: IpAddr = address.parse().expect("an address");
    let mut config = EndpointConfig::new(vec![address], PathMtu::B4096);
    config.iova = IovaPolicy::Seeded;
    config.qp_options.max_in_flight = o.max_in_flight;
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let mut endpoint = Endpoint::new(config, bytes);
    let pd = endpoint.alloc_pd().expect("pd");
    let cq = endpoint.create_cq(o.cq_depth).expect("cq");
    let region = Region::alloc(o.region).expect("region");
    let mr = endpoint.register(pd, &region, o.access, None).expect("register");
    let srq = with_srq.then(|| {
        endpoint
            .create_srq(uroce::verbs::SrqInit { pd, max_wr: o.caps.max_recv_wr, max_sge: o.caps.max_recv_sge })
            .expect("srq")
    });
    let init =
        QpInit { pd, qp_type: o.qp_type, send_cq: cq, recv_cq: cq, srq, caps: o.caps, signal_all: false, qpn: None };
    let qp = endpoint.create_qp(init).expect("qp");
    let qpn = endpoint.query_qp(qp).expect("query").qpn;
    Node { endpoint, pd, cq, qp, qpn, region, mr, srq, address }
}

fn connect(node: &mut Node, peer: &Node, o: &Options, rq_psn: u32, sq_psn: u32) {
    let psn = |v| Psn::new(v).expect("24 bits");
    let rtr = RtrAttr {
        av: AddressVector::new(Gid::from(peer.address), 0),
        path_mtu: o.mtu,
        dest_qpn: peer.qpn,
        rq_psn: psn(rq_psn),
        max_dest_rd_atomic: o.rd_atomic,
        min_rnr_timer: RnrTimer::new(o.min_rnr).expect("5 bits"),
    };
    let rts = RtsAttr {
        sq_psn: psn(sq_psn),
        timeout: AckTimeout::new(o.timeout).expect("5 bits"),
        retry_count: RetryCount::new(o.retry).expect("3 bits"),
        rnr_retry: RnrRetry::new(o.rnr_retry).expect("3 bits"),
        max_rd_atomic: o.rd_atomic,
    };
    let steps = match o.qp_type {
        QpType::Rc => {
            [QpTransition::Init(InitAttr::connected(o.access)), QpTransition::Rtr(rtr), QpTransition::Rts(rts)]
        }
        QpType::Uc => [
            QpTransition::Init(InitAttr::connected(o.access)),
            QpTransition::RtrUc(rtr),
            QpTransition::RtsPsn(psn(sq_psn)),
        ],
        QpType::Ud | QpType::Gsi => {
            [QpTransition::Init(InitAttr::datagram(QKEY)), QpTransition::RtrUd, QpTransition::RtsPsn(psn(sq_psn))]
        }
    };
    for step in steps {
        node.endpoint.modify_qp(node.qp, step.into()).expect("modify");
    }
}
