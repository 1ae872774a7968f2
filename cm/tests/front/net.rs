//! Two devices with a front each, in a simulated world.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use uroce::device::Verdict;
use uroce::endpoint::EndpointConfig;
use uroce::raw::Region;
use uroce::sim::{NodeId, World};
use uroce::time::{Duration, Instant};
use uroce::types::PathMtu;
use uroce::verbs::{
    AccessFlags, CqHandle, MemoryRegion, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType,
    RecvWr, SendFlags, SendWr, Sge, UdDestination, Verbs, WcStatus, WorkCompletion,
};
use uroce::wire::Packet;
use uroce_cm::matcher::is_mad;
use uroce_cm::wire::{MadKind, PortSpace};
use uroce_cm::{Cm, CmConfig, EventKind, IdEvent, IdHandle, RdmaCm, UdPeer};

pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;
pub(crate) const PORT: u16 = 7174;
const LEN: usize = 4096;

/// A QP with a CQ and a buffer of 4096 bytes.
#[derive(Clone)]
pub(crate) struct Side {
    pub(crate) qp: QpHandle,
    pd: PdHandle,
    cq: CqHandle,
    region: Region,
    mr: MemoryRegion,
}

pub(crate) struct Net {
    pub(crate) world: World,
    pub(crate) nodes: [NodeId; 2],
    pub(crate) cms: [Cm; 2],
    pub(crate) events: [Vec<IdEvent>; 2],
    /// Whether the fronts hear of data before the RTU.
    pub(crate) async_events: bool,
    /// How often the fronts are polled.
    pub(crate) tick: Duration,
    away: Arc<Mutex<Vec<IpAddr>>>,
}

pub(crate) fn ip(side: usize) -> IpAddr {
    ["10.77.0.1", "10.77.0.2"][side].parse().unwrap()
}

pub(crate) fn ip6(side: usize) -> IpAddr {
    ["fd77::1", "fd77::2"][side].parse().unwrap()
}

impl Net {
    pub(crate) fn new() -> Self {
        Self::with(CmConfig::default())
    }

    pub(crate) fn with(config: CmConfig) -> Self {
        Self::made_of(1, config)
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self::made_of(seed, CmConfig::default())
    }

    fn made_of(seed: u64, config: CmConfig) -> Self {
        let mut world = World::new(seed);
        let addresses = |side| vec![ip(side), ip6(side)];
        let nodes = [A, B].map(|side| world.add_endpoint(EndpointConfig::new(addresses(side), PathMtu::B1024)));
        let cms = nodes.map(|node| {
            let rng = world.fork_rng();
            Cm::new(world.endpoint(node), config, rng).unwrap()
        });
        Self {
            world,
            nodes,
            cms,
            events: Default::default(),
            async_events: true,
            tick: Duration::from_micros(50),
            away: Arc::default(),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.world.now()
    }

    /// The front and the device of a side.
    pub(crate) fn on<R>(&mut self, side: usize, f: impl FnOnce(&mut Cm, Instant, &mut dyn Verbs) -> R) -> R {
        let now = self.world.now();
        f(&mut self.cms[side], now, self.world.endpoint(self.nodes[side]))
    }

    pub(crate) fn run_for(&mut self, d: Duration) {
        let end = self.now() + d;
        self.run_until(end, |_| false);
    }

    /// Runs until `done` or 200 s have passed; returns whether it was done.
    pub(crate) fn run_until(&mut self, end: Instant, mut done: impl FnMut(&Self) -> bool) -> bool {
        loop {
            for side in [A, B] {
                self.poll(side);
            }
            if done(self) {
                return true;
            }
            if self.now() >= end {
                return false;
            }
            let next = self.now() + self.tick;
            self.world.run_until(next);
        }
    }

    fn poll(&mut self, side: usize) {
        let endpoint = self.world.endpoint(self.nodes[side]);
        while let Some(event) = endpoint.poll_event() {
            if self.async_events {
                self.cms[side].on_async_event(endpoint, &event);
            }
        }
        self.on(side, |cm, now, verbs| cm.poll(now, verbs).unwrap());
        while let Some(event) = self.cms[side].poll_event() {
            self.events[side].push(event);
        }
    }

    /// Runs until a side hears of `kind`, for at most 200 s; takes the event.
    pub(crate) fn wait(&mut self, side: usize, kind: EventKind) -> IdEvent {
        let end = self.now() + Duration::from_secs(200);
        let found = self.run_until(end, |net| net.events[side].iter().any(|e| e.kind == kind));
        assert!(found, "{} not heard: {:?}", kind.name(), self.heard(side));
        let at = self.events[side].iter().position(|e| e.kind == kind).unwrap();
        self.events[side].remove(at)
    }

    pub(crate) fn heard(&self, side: usize) -> Vec<&'static str> {
        self.events[side].iter().map(|e| e.kind.name()).collect()
    }

    pub(crate) fn listen(&mut self, addr: IpAddr) -> IdHandle {
        self.listen_on(PortSpace::Tcp, addr)
    }

    pub(crate) fn listen_with(&mut self, addr: IpAddr, backlog: usize) -> IdHandle {
        self.on(B, |cm, _, verbs| {
            let id = cm.create_id(PortSpace::Tcp).unwrap();
            cm.bind_addr(verbs, id, SocketAddr::new(addr, PORT)).unwrap();
            cm.listen(id, backlog).unwrap();
            id
        })
    }

    pub(crate) fn listen_on(&mut self, space: PortSpace, addr: IpAddr) -> IdHandle {
        self.on(B, |cm, _, verbs| {
            let id = cm.create_id(space).unwrap();
            cm.bind_addr(verbs, id, SocketAddr::new(addr, PORT)).unwrap();
            cm.listen(id, 16).unwrap();
            id
        })
    }

    /// A client id whose route is resolved.
    pub(crate) fn resolved(&mut self, destination: IpAddr) -> IdHandle {
        self.resolved_on(PortSpace::Tcp, destination)
    }

    pub(crate) fn resolved_on(&mut self, space: PortSpace, destination: IpAddr) -> IdHandle {
        let id = self.on(A, |cm, _, verbs| {
            let id = cm.create_id(space).unwrap();
            cm.resolve_addr(verbs, id, None, SocketAddr::new(destination, PORT)).unwrap();
            id
        });
        assert_eq!(self.wait(A, EventKind::AddrResolved).id, id);
        self.on(A, |cm, _, verbs| cm.resolve_route(verbs, id).unwrap());
        assert_eq!(self.wait(A, EventKind::RouteResolved).id, id);
        id
    }

    pub(crate) fn side(&mut self, side: usize, qp_type: QpType) -> Side {
        let verbs = self.world.endpoint(self.nodes[side]);
        let pd = verbs.alloc_pd().unwrap();
        let region = Region::alloc(LEN).unwrap();
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).unwrap();
        let cq = verbs.create_cq(64).unwrap();
        let init = QpInit {
            pd,
            qp_type,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            caps: QpCapabilities::default(),
            signal_all: true,
            qpn: None,
        };
        Side { qp: verbs.create_qp(init).unwrap(), pd, cq, region, mr }
    }

    /// An RC QP in the domain and with the CQ of another.
    pub(crate) fn another(&mut self, side: usize, of: &Side) -> QpHandle {
        let verbs = self.world.endpoint(self.nodes[side]);
        let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 1, ..QpCapabilities::default() };
        let (pd, cq) = (of.pd, of.cq);
        let qp_type = QpType::Rc;
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        verbs.create_qp(init).unwrap()
    }

    pub(crate) fn post_recv(&mut self, side: usize, s: &Side) {
        let sge = Sge { addr: s.mr.iova, length: 4096, lkey: s.mr.lkey };
        let verbs = self.world.endpoint(self.nodes[side]);
        verbs.post_recv(s.qp, &[RecvWr { wr_id: 1, sges: &[sge] }]).unwrap();
    }

    /// Sends `data` from one side and runs until both have completed; `to` has a receive posted.
    pub(crate) fn send(&mut self, from: (usize, &Side), to: (usize, &Side), data: &[u8]) {
        let (side, s) = from;
        s.region.write(0, data).unwrap();
        let sge = Sge { addr: s.mr.iova, length: u32::try_from(data.len()).unwrap(), lkey: s.mr.lkey };
        let wr = SendWr {
            wr_id: 2,
            operation: Operation::Send,
            payload: Payload::Sges(&[sge]),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        let verbs = self.world.endpoint(self.nodes[side]);
        verbs.post_send(s.qp, &[wr]).unwrap();
        self.complete(side, s);
        self.complete(to.0, to.1);
        let mut got = vec![0; data.len()];
        to.1.region.read(0, &mut got).unwrap();
        assert_eq!(got, data);
    }

    /// Sends `data` as a datagram and runs until both have completed; `to` has a receive posted.
    pub(crate) fn datagram(&mut self, from: (usize, &Side), to: (usize, &Side), peer: UdPeer, data: &[u8]) {
        let (side, s) = from;
        s.region.write(0, data).unwrap();
        let sge = Sge { addr: s.mr.iova, length: u32::try_from(data.len()).unwrap(), lkey: s.mr.lkey };
        let verbs = self.world.endpoint(self.nodes[side]);
        let ah = verbs.create_ah(s.pd, peer.av).unwrap();
        let wr = SendWr {
            wr_id: 2,
            operation: Operation::Send,
            payload: Payload::Sges(&[sge]),
            flags: SendFlags::SIGNALED,
            destination: Some(UdDestination { ah, qpn: peer.qpn, qkey: peer.qkey }),
        };
        verbs.post_send(s.qp, &[wr]).unwrap();
        self.complete(side, s);
        self.complete(to.0, to.1);
        let mut got = vec![0; data.len()];
        // Behind the 40 bytes of the IP header.
        to.1.region.read(40, &mut got).unwrap();
        assert_eq!(got, data);
    }

    fn complete(&mut self, side: usize, s: &Side) {
        for _ in 0..2_000_000 {
            for each in [A, B] {
                self.poll(each);
            }
            let mut out = [WorkCompletion::blank(s.qp)];
            let verbs = self.world.endpoint(self.nodes[side]);
            if verbs.poll_cq(s.cq, &mut out).unwrap() == 1 {
                assert_eq!(out[0].status, WcStatus::Success);
                return;
            }
            let next = self.now() + self.tick;
            self.world.run_until(next);
        }
        panic!("no completion");
    }

    /// Drops the first message of a kind, and counts all of it.
    pub(crate) fn drop_first(&mut self, kind: MadKind) -> Arc<Mutex<u32>> {
        let seen = Arc::new(Mutex::new(0));
        let count = Arc::clone(&seen);
        self.world.set_hook(Box::new(move |packet| {
            let packet = Packet::parse(packet.bytes).ok()?;
            if is_mad(&packet) != Some(kind) {
                return None;
            }
            let mut count = count.lock().unwrap();
            *count += 1;
            (*count == 1).then_some(Verdict::DROP)
        }));
        seen
    }

    /// From now on nothing reaches this address; may be called for several.
    pub(crate) fn keep_away(&mut self, address: IpAddr) {
        self.away.lock().unwrap().push(address);
        let away = Arc::clone(&self.away);
        self.world
            .set_hook(Box::new(move |packet| away.lock().unwrap().contains(&packet.flow.dst).then_some(Verdict::DROP)));
    }
}
