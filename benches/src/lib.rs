//! Two connected endpoints to be measured, and the work they do.
//!
//! Owns the set-up that the benchmarks share: a wire that carries packets between two endpoints in one thread, and a
//! loop that keeps a queue of messages under way. Never measures by itself.

pub mod connections;
pub mod copying;
pub mod party;
pub mod veth;

use std::net::{IpAddr, Ipv4Addr};

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::device::loopback::{LoopbackDevice, Switch};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::time::Instant;
use uroce::types::{Gid, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, QpCapabilities, QpHandle, QpInit,
    QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs, WcStatus, WorkCompletion,
};
use uroce::wire::{DONT_FRAGMENT, Flow, IpFields};

/// Work requests that a queue holds.
const QUEUE: u32 = 256;
/// Rounds without a completion after which something is wrong.
const PATIENCE: usize = 100_000;

/// What carries packets between the two.
pub trait Wire {
    /// The endpoint that posts.
    fn left(&mut self) -> &mut Endpoint;
    /// The other one.
    fn right(&mut self) -> &mut Endpoint;
    /// Carries what is ready to go, both ways.
    fn carry(&mut self);
}

fn address(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
}

/// Bytes that the longest burst takes on a UDP medium.
const BURST_MAX: usize = 65_535;

/// No device at all: a burst of at most `SEGMENTS` packets goes from one endpoint straight into the other, through one
/// buffer.
pub struct Direct<const SEGMENTS: usize = 1> {
    left: Endpoint,
    right: Endpoint,
    buf: Vec<u8>,
}

impl<const SEGMENTS: usize> Default for Direct<SEGMENTS> {
    fn default() -> Self {
        let endpoint = |last| Endpoint::new(EndpointConfig::new(vec![address(last)], PathMtu::B4096), [last; 32]);
        Self { left: endpoint(1), right: endpoint(2), buf: vec![0; BURST_MAX] }
    }
}

/// [`Direct`] with as many packets a burst as devices take.
pub type Superframes = Direct<64>;

fn hand_over(from: &mut Endpoint, to: &mut Endpoint, buf: &mut [u8], segments_max: usize) {
    let ids = RxIds::Known(IpFields { id: 0, flags_fragment: DONT_FRAGMENT });
    loop {
        let room = TxRoom { buf, headroom: 0, segments_max, ids: IdRule::Index, medium: Medium::Udp };
        let Some(burst) = from.poll_transmit(Instant::ZERO, room) else { break };
        let flow = Flow { ..burst.flow };
        let bytes = &buf[..burst.len];
        to.handle_burst(Instant::ZERO, RxBurst { flow, bytes, segment: burst.segment, ids, at: Instant::ZERO });
    }
}

impl<const SEGMENTS: usize> Wire for Direct<SEGMENTS> {
    fn left(&mut self) -> &mut Endpoint {
        &mut self.left
    }

    fn right(&mut self) -> &mut Endpoint {
        &mut self.right
    }

    fn carry(&mut self) {
        hand_over(&mut self.left, &mut self.right, &mut self.buf, SEGMENTS);
        hand_over(&mut self.right, &mut self.left, &mut self.buf, SEGMENTS);
    }
}

/// Two engines over the in-process switch.
pub struct Loopback {
    left: Engine<LoopbackDevice>,
    right: Engine<LoopbackDevice>,
}

impl Default for Loopback {
    fn default() -> Self {
        let switch = Switch::new();
        let engine = |last| Engine::open(switch.port(&[address(last)])).expect("a seed from the system");
        Self { left: engine(1), right: engine(2) }
    }
}

impl Wire for Loopback {
    fn left(&mut self) -> &mut Endpoint {
        self.left.endpoint_mut()
    }

    fn right(&mut self) -> &mut Endpoint {
        self.right.endpoint_mut()
    }

    fn carry(&mut self) {
        self.left.poll().expect("a switch does not break");
        self.right.poll().expect("a switch does not break");
    }
}

/// A QP, its CQ and its memory on one of the endpoints.
struct End {
    gid: Gid,
    qp: QpHandle,
    qpn: Qpn,
    cq: CqHandle,
    mr: MemoryRegion,
}

impl End {
    fn new(endpoint: &mut Endpoint, memory: usize) -> Self {
        let pd = endpoint.alloc_pd().expect("room for a PD");
        let cq = endpoint.create_cq(2 * QUEUE).expect("room for a CQ");
        let caps = QpCapabilities { max_send_wr: QUEUE, max_recv_wr: QUEUE, ..QpCapabilities::default() };
        let init =
            QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
        let qp = endpoint.create_qp(init).expect("room for a QP");
        let qpn = endpoint.query_qp(qp).expect("it lives").qpn;
        let region = Region::alloc(memory).expect("memory");
        let mr = endpoint.register(pd, &region, AccessFlags::ALL, None).expect("room for an MR");
        Self { gid: endpoint.query_gids()[0].gid, qp, qpn, cq, mr }
    }

    fn connect(&self, endpoint: &mut Endpoint, peer: &Self, path_mtu: PathMtu) {
        let rtr = RtrAttr {
            av: AddressVector::new(peer.gid, 0),
            path_mtu,
            dest_qpn: peer.qpn,
            rq_psn: Psn::ZERO,
            max_dest_rd_atomic: 16,
            min_rnr_timer: RnrTimer::DEFAULT,
        };
        let rts = RtsAttr { max_rd_atomic: 16, ..RtsAttr::usual(Psn::ZERO) };
        for step in
            [QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Rtr(rtr), QpTransition::Rts(rts)]
        {
            endpoint.modify_qp(self.qp, step.into()).expect("a state that may follow");
        }
    }

    fn sge(&self, length: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.iova, length, lkey: self.mr.lkey }]
    }

    fn blank(&self) -> WorkCompletion {
        WorkCompletion::blank(self.qp)
    }

    /// Takes what has completed, and says how many.
    fn poll(&self, endpoint: &mut Endpoint) -> u32 {
        let mut out = [self.blank(); 16];
        let n = endpoint.poll_cq(self.cq, &mut out).expect("a CQ that lives");
        assert!(out[..n].iter().all(|wc| wc.status == WcStatus::Success), "{:?}", &out[..n]);
        u32::try_from(n).expect("16 at most")
    }

    fn receive(&self, endpoint: &mut Endpoint, length: u32) {
        endpoint.post_recv(self.qp, &[RecvWr { wr_id: 0, sges: &self.sge(length) }]).expect("room for a receive");
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SEND into a posted receive.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
}

/// Two connected QPs.
pub struct Pair<W> {
    wire: W,
    left: End,
    right: End,
}

impl<W: Wire + Default> Pair<W> {
    /// A pair whose messages are at most `memory` bytes.
    ///
    /// # Panics
    /// Where there is no memory.
    #[must_use]
    pub fn new(memory: usize, path_mtu: PathMtu) -> Self {
        let mut wire = W::default();
        let (left, right) = (End::new(wire.left(), memory), End::new(wire.right(), memory));
        left.connect(wire.left(), &right, path_mtu);
        right.connect(wire.right(), &left, path_mtu);
        Self { wire, left, right }
    }

    /// Moves `count` messages of `length` bytes, `depth` of them under way, each signaled and its completion taken.
    ///
    /// # Panics
    /// When one fails, or `depth` exceeds the queues.
    pub fn run(&mut self, kind: Kind, length: u32, count: u32, depth: u32) {
        let Self { wire, left, right } = self;
        let remote = Remote { addr: right.mr.iova, rkey: right.mr.rkey };
        let operation = match kind {
            Kind::Send => Operation::Send,
            Kind::Write => Operation::Write(remote),
            Kind::Read => Operation::Read(remote),
        };
        let sges = left.sge(length);
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        let (mut posted, mut sent, mut received, mut idle) = (0, 0, 0, 0);
        let receives = if kind == Kind::Send { count } else { 0 };
        while sent < count || received < receives {
            while posted < count && posted - sent.min(received.max(count - receives)) < depth {
                if receives > 0 {
                    right.receive(wire.right(), length);
                }
                wire.left().post_send(left.qp, &[wr]).expect("room for a send");
                posted += 1;
            }
            wire.carry();
            let (of_left, of_right) = (left.poll(wire.left()), right.poll(wire.right()));
            sent += of_left;
            received += of_right;
            idle = if of_left + of_right > 0 { 0 } else { idle + 1 };
            assert!(idle < PATIENCE, "{kind:?} of {length} bytes does not complete");
        }
    }
}
