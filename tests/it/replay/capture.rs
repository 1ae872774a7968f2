//! A capture as a replay needs it: its packets in order, and the connections they belong to.
//!
//! Owns what can be said of both nodes from the capture alone: QPNs, first PSNs, path MTU, attributes that the CM
//! messages state, and which packets a node's firewall dropped behind the capture point. Never runs an endpoint.

use std::collections::BTreeMap;
use std::net::IpAddr;

use uroce::time::Instant;
use uroce::types::{PathMtu, Psn, Qpn};
use uroce::verbs::QpType;
use uroce::wire::{
    Body, Flow, IpFields, Packet, Place, ResponseOp, Service, Syndrome, parse_ethernet, udp_source_port,
};
use uroce_fixtures::{CmMessage, Direction, Fixture};

/// READs and atomics outstanding where no CM message says how many: what perftest takes.
const USUAL_DEPTH: u8 = 16;
/// Linux numbers QPs from here on.
const LOWEST_QPN: u32 = 16;
/// Local ACK timeout codes: of rxe's rdma_cm, and of the programs that set up their QPs themselves.
const CM_TIMEOUT: u8 = 17;
const USUAL_TIMEOUT: u8 = 14;

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Node {
    /// Node 1.
    Client,
    /// Node 2.
    Server,
}

impl Node {
    pub(super) const BOTH: [Self; 2] = [Self::Client, Self::Server];

    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }

    fn numbered(number: u8) -> Self {
        if number == 1 { Self::Client } else { Self::Server }
    }
}

/// A captured packet.
pub(super) struct Seen {
    pub(super) at: Instant,
    /// Who sent it.
    pub(super) from: Node,
    pub(super) flow: Flow,
    pub(super) ip: IpFields,
    /// BTH to ICRC.
    pub(super) segment: Vec<u8>,
    /// The firewall of the receiving node dropped it.
    pub(super) lost: bool,
}

impl Seen {
    pub(super) fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.segment).expect("every captured packet parses")
    }
}

/// One end of a connection, or one UD QP.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    /// `None` where no packet tells.
    pub(super) qpn: Option<Qpn>,
    /// First PSN that it sends.
    pub(super) first_psn: Psn,
    /// READs and atomics: that it may have outstanding, and that it answers at a time.
    pub(super) reads_out: u8,
    pub(super) reads_in: u8,
    pub(super) rnr_retry: u8,
    /// The timer that its RNR NAKs name.
    pub(super) min_rnr: u8,
}

/// Two QPs that talk to each other.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) qp_type: QpType,
    pub(super) ends: [End; 2],
    pub(super) mtu: PathMtu,
    pub(super) retry: u8,
    pub(super) timeout: u8,
    /// 0 where the UDP source port follows from the QPNs.
    pub(super) flow_label: u32,
    port: u16,
}

impl Link {
    pub(super) fn end(&self, node: Node) -> &End {
        &self.ends[node as usize]
    }

    /// Whether `seen` belongs to it.
    pub(super) fn owns(&self, seen: &Seen) -> bool {
        match seen.packet().body {
            Body::Datagram(_) => self.qp_type == QpType::Ud,
            _ => self.port == seen.flow.src_port,
        }
    }
}

/// All that crossed the wire but the MADs.
pub(super) struct Capture {
    pub(super) fixture: &'static Fixture,
    pub(super) seen: Vec<Seen>,
    pub(super) links: Vec<Link>,
    /// By node.
    pub(super) addresses: [IpAddr; 2],
}

impl Capture {
    pub(super) fn load(name: &str) -> Self {
        let fixture = uroce_fixtures::by_name(name).expect("a capture of the index");
        let mut seen = Vec::new();
        let mut origin = None;
        for frame in fixture.frames().expect("frames") {
            let outer = parse_ethernet(&frame.bytes).expect("outer headers");
            let packet = Packet::parse(outer.payload).expect("every captured packet parses");
            if packet.dest_qp == Qpn::GSI {
                continue;
            }
            let origin = *origin.get_or_insert(frame.timestamp);
            let from = match frame.direction().expect("one of the nodes") {
                Direction::Node1ToNode2 => Node::Client,
                Direction::Node2ToNode1 => Node::Server,
            };
            seen.push(Seen {
                // A second after the origin of the clock, so that nothing begins at its very start.
                at: Instant::from_nanos(1_000_000_000) + (frame.timestamp - origin),
                from,
                flow: outer.flow,
                ip: outer.ip,
                segment: outer.payload.to_vec(),
                lost: false,
            });
        }
        lose(fixture, &mut seen);
        let addresses = Node::BOTH.map(|node| address(&seen, node));
        let links = links(fixture, &seen);
        Self { fixture, seen, links, addresses }
    }

    /// The packets that `node` sent on `link`, with their places in the capture.
    pub(super) fn sent_by<'a>(&'a self, link: &'a Link, node: Node) -> impl Iterator<Item = (usize, Packet<'a>)> {
        let theirs = move |s: &&(usize, &Seen)| s.1.from == node && link.owns(s.1);
        self.seen.iter().enumerate().filter(move |s| theirs(&s)).map(|(at, s)| (at, s.packet()))
    }
}

/// Marks what the receiving node's firewall dropped: "numgen inc mod M N" drops packet N of every M that reach the rule,
/// which "@th,64,8 OP" before it narrows to one opcode. MADs never reach it.
fn lose(fixture: &Fixture, seen: &mut [Seen]) {
    let Some(setup) = &fixture.setup else { return };
    let words: Vec<&str> = setup.command.split_whitespace().collect();
    let Some(at) = words.iter().position(|w| *w == "numgen") else { return };
    let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).expect("numgen inc mod M N");
    let (modulus, index) = (number(at + 3), number(at + 4));
    let narrowed = words.get(at - 1).and_then(|w| u8::from_str_radix(w.strip_prefix("0x")?, 16).ok());
    let opcode = narrowed.filter(|_| words[at - 2] == "@th,64,8");
    let receiver = Node::numbered(setup.node);
    let reach = seen.iter_mut().filter(|s| s.from != receiver && opcode.is_none_or(|op| s.segment[0] == op));
    for (i, packet) in reach.enumerate() {
        packet.lost = i % modulus == index;
    }
}

fn address(seen: &[Seen], node: Node) -> IpAddr {
    let own = seen.iter().find(|s| s.from == node).map(|s| s.flow.src);
    let named = || seen.iter().map(|s| s.flow.dst).find(|ip| !ip.is_multicast());
    // The receiver of a multicast says nothing and is named by nothing; any address will do.
    own.or_else(named).unwrap_or_else(|| "10.77.0.2".parse().expect("an address"))
}

/// Packets of one connection have one UDP source port in both directions; all datagrams of a capture are of one pair.
fn links(fixture: &Fixture, seen: &[Seen]) -> Vec<Link> {
    let mut ports: BTreeMap<u16, Link> = BTreeMap::new();
    for s in seen {
        let packet = s.packet();
        let (qp_type, port) = match &packet.body {
            Body::Request(r) if r.service == Service::Uc => (QpType::Uc, s.flow.src_port),
            Body::Datagram(_) => (QpType::Ud, 0),
            _ => (QpType::Rc, s.flow.src_port),
        };
        let link = ports.entry(port).or_insert_with(|| new_link(qp_type, port));
        let mut note = |node: Node, qpn: Qpn| {
            if qpn != Qpn::MULTICAST {
                let known = link.ends[node as usize].qpn.get_or_insert(qpn);
                assert_eq!(*known, qpn, "two connections share UDP source port {port}");
            }
        };
        note(s.from.other(), packet.dest_qp);
        if let Body::Datagram(d) = &packet.body {
            note(s.from, d.src_qp);
        }
    }
    let mut links: Vec<Link> = ports.into_values().collect();
    for link in &mut links {
        let of = link.clone();
        let own = || seen.iter().filter(|s| of.owns(s));
        link.mtu = own().find_map(|s| full_payload(&s.packet())).unwrap_or(PathMtu::B4096);
        let firsts = Node::BOTH.map(|node| first_psn(own().filter(|s| s.from == node)));
        let timers = Node::BOTH.map(|node| own().filter(|s| s.from == node).find_map(rnr_timer));
        for (end, (first, timer)) in link.ends.iter_mut().zip(firsts.into_iter().zip(timers)) {
            end.first_psn = first.unwrap_or_default();
            end.min_rnr = timer.unwrap_or(end.min_rnr);
        }
        apply_cm(fixture, link);
        guess_qpn(link);
    }
    links
}

/// The sender of a one-way connection is named by no packet, but its UDP source port follows from both QPNs.
fn guess_qpn(link: &mut Link) {
    if link.qp_type != QpType::Uc {
        return;
    }
    let [a, b] = link.ends.each_mut().map(|end| &mut end.qpn);
    let (unknown, known) = if a.is_none() { (a, b) } else { (b, a) };
    if let (None, Some(peer)) = (&unknown, *known) {
        let fits = |qpn: &Qpn| udp_source_port(0, *qpn, peer) == link.port;
        *unknown = (LOWEST_QPN..=Qpn::MULTICAST.get()).map(Qpn::from_wire).find(fits);
    }
}

fn new_link(qp_type: QpType, port: u16) -> Link {
    let end = End {
        qpn: None,
        first_psn: Psn::ZERO,
        reads_out: USUAL_DEPTH,
        reads_in: USUAL_DEPTH,
        rnr_retry: 7,
        min_rnr: 12,
    };
    Link { qp_type, ends: [end; 2], mtu: PathMtu::B4096, retry: 7, timeout: USUAL_TIMEOUT, flow_label: 0, port }
}

/// The path MTU, if the packet is one that fills it.
fn full_payload(packet: &Packet<'_>) -> Option<PathMtu> {
    let full = match &packet.body {
        Body::Request(r) => matches!(r.op.place(), Place::First | Place::Middle),
        Body::Response(r) => matches!(r.op, ResponseOp::ReadFirst(_) | ResponseOp::ReadMiddle),
        Body::Datagram(_) | Body::Cnp => false,
    };
    if full { PathMtu::from_bytes(packet.payload().len()) } else { None }
}

/// The lowest PSN of the requests: not that of the first where the wire reorders.
fn first_psn<'a>(sent: impl Iterator<Item = &'a Seen>) -> Option<Psn> {
    let requests = sent.map(|s| s.packet()).filter(|p| !matches!(p.body, Body::Response(_)));
    requests.map(|p| p.psn).reduce(|a, b| if b.distance_from(a) < 0 { b } else { a })
}

fn rnr_timer(seen: &Seen) -> Option<u8> {
    match seen.packet().body {
        Body::Response(r) => match r.op {
            ResponseOp::Acknowledge(aeth) => match aeth.syndrome {
                Syndrome::RnrNak(timer) => Some(timer.code()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// What REQ and REP say. "Starting PSN" is the one that the sender of the message expects first, and the RNR retries
/// are those that it wants its peer to do.
fn apply_cm(fixture: &Fixture, link: &mut Link) {
    for fact in &fixture.cm {
        let node = Node::numbered(fact.node);
        let (own, peer) = (node as usize, node.other() as usize);
        let about = |qpn: u32| link.ends[own].qpn.is_some_and(|q| q.get() == qpn);
        match &fact.message {
            CmMessage::Req {
                qpn,
                starting_psn,
                responder_resources,
                initiator_depth,
                retry_count,
                rnr_retry_count,
                path_mtu,
                service_id,
                source_port,
                ..
            } if about(*qpn) => {
                link.ends[peer].first_psn = Psn::from_wire(*starting_psn);
                link.ends[peer].rnr_retry = *rnr_retry_count;
                (link.ends[own].reads_in, link.ends[own].reads_out) = (*responder_resources, *initiator_depth);
                (link.retry, link.timeout) = (*retry_count, CM_TIMEOUT);
                link.mtu = PathMtu::from_bytes(usize::from(*path_mtu)).expect("a path MTU");
                // The port that was connected to is the low half of the service id.
                let port = u32::try_from(*service_id & 0xFFFF).expect("16 bits");
                link.flow_label = (u32::from(*source_port) * 31 + port) & 0xF_FFFF;
            }
            CmMessage::Rep { qpn, starting_psn, responder_resources, initiator_depth, rnr_retry_count, .. }
                if about(*qpn) =>
            {
                link.ends[peer].first_psn = Psn::from_wire(*starting_psn);
                link.ends[peer].rnr_retry = *rnr_retry_count;
                (link.ends[own].reads_in, link.ends[own].reads_out) = (*responder_resources, *initiator_depth);
            }
            _ => {}
        }
    }
}
