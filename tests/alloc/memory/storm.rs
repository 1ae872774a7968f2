//! A storm of REQs, a hundred thousand from thousands of sources: what it costs, what goes on, and who gets through.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use uroce::burst::RxIds;
use uroce::endpoint::EndpointConfig;
use uroce::raw::Region;
use uroce::rng::Rng;
use uroce::sim::{NodeId, World};
use uroce::time::{Duration, Instant};
use uroce::types::PathMtu;
use uroce::verbs::{
    AccessFlags, CqHandle, MemoryRegion, Operation, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, SendFlags,
    SendWr, Sge, SrqHandle, SrqInit, Verbs, WcStatus, WorkCompletion,
};
use uroce::verbs::{Payload, Remote};
use uroce::wire::{Flow, IpFields, seal};
use uroce_cm::agent::MadAddress;
use uroce_cm::wire::{Mad, Message, PortSpace};
use uroce_cm::{Agent, Cm, CmConfig, CmEvent, Config, ConnParam, EventKind, IdHandle, Policy, PolicyConfig, RdmaCm};

use super::Meter;
use super::flood::{Server, bytes, connect_params, req, source};

/// Sources of the storm.
const SOURCES: u32 = 20_000;
/// REQs a millisecond.
const PER_MS: u32 = 20;
/// Milliseconds.
const LASTS: u32 = 5_000;
/// When the client that means it begins.
const BEGINS: u32 = 1_000;
/// What the storm may cost.
const ROOM: usize = 8 << 20;

fn ms(v: u32) -> Duration {
    Duration::from_millis(v.into())
}

/// A client beside the storm; when it is connected it stops.
struct Client {
    agent: Agent,
    connected: Option<Instant>,
}

impl Client {
    fn exchange(&mut self, server: &mut Server) {
        let own: IpAddr = Ipv4Addr::new(10, 0, 0, 2).into();
        while let Some(mad) = self.agent.poll_mad() {
            server.takes(own.into(), &mad.bytes);
        }
        server.answer();
        while let Some(mad) = server.agent.poll_mad() {
            if mad.to.remote == own.into() {
                let from = MadAddress { local: mad.to.remote, remote: mad.to.local };
                self.agent.handle_mad(server.now, from, &mad.bytes);
            }
        }
        while let Some(event) = self.agent.poll_event() {
            let CmEvent::Reply(reply) = event else { panic!("{event:?}") };
            self.agent.confirm(reply.comm, b"").unwrap();
            self.connected = Some(server.now);
        }
        self.agent.handle_timeout(server.now);
    }
}

#[test]
fn the_agent_holds_little_and_the_client_gets_through() {
    for seed in 0..3 {
        let mut rng = Rng::from_u64(seed);
        let mut server = Server::new(PolicyConfig::default(), Config::default(), rng.fork());
        let mut client = Client { agent: Agent::new(Config::default(), rng.fork()), connected: None };
        let meter = Meter::start();
        for tick in 0..LASTS {
            server.now = Instant::ZERO + ms(tick);
            for n in tick * PER_MS..(tick + 1) * PER_MS {
                server.arrives(source(n % SOURCES), req(source(n % SOURCES), n));
            }
            if tick == BEGINS {
                let own: IpAddr = Ipv4Addr::new(10, 0, 0, 2).into();
                client.agent.connect(server.now, &connect_params(own.into())).unwrap();
            }
            client.exchange(&mut server);
            server.agent.handle_timeout(server.now);
        }
        let most = meter.most();
        assert!(most <= ROOM, "{most} bytes");
        let connected = client.connected.expect("the client is connected before the storm is over");
        assert!(connected <= Instant::ZERO + ms(BEGINS + 5_000), "{connected:?}");
        let counters = server.agent.policy().unwrap().counters();
        // 5,000 a second and as many at once are let in, no more.
        assert!((25_000..=30_001).contains(&counters.admitted), "{counters:?}");
        assert_eq!(counters.admitted + counters.total_limited + counters.source_limited, 100_001);
        assert!(counters.evicted > 10_000);
    }
}

/// What a program has that makes a QP for every connection.
#[derive(Clone, Copy)]
struct Objects {
    pd: PdHandle,
    cq: CqHandle,
    srq: SrqHandle,
}

impl Objects {
    fn new(verbs: &mut dyn Verbs) -> Self {
        let pd = verbs.alloc_pd().unwrap();
        let cq = verbs.create_cq(4096).unwrap();
        let srq = verbs.create_srq(SrqInit { pd, max_wr: 16, max_sge: 1 }).unwrap();
        Self { pd, cq, srq }
    }

    fn qp(&self, verbs: &mut dyn Verbs) -> QpHandle {
        let caps = QpCapabilities { max_send_wr: 4, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
        let Self { pd, cq, srq } = *self;
        let init = QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq,
            recv_cq: cq,
            srq: Some(srq),
            caps,
            signal_all: true,
            qpn: None,
        };
        verbs.create_qp(init).unwrap()
    }
}

/// A server with a connection in use, and a program that accepts whoever asks.
struct Stage {
    world: World,
    nodes: [NodeId; 2],
    cms: [Cm; 2],
    objects: [Objects; 2],
    /// Ids of the server, with their QPs.
    served: Vec<(IdHandle, QpHandle)>,
    /// The client's ids that are established.
    established: Vec<IdHandle>,
}

const ADDRESSES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))];
const PORT: u16 = 7174;

impl Stage {
    fn new() -> Self {
        let mut world = World::new(3);
        let nodes = ADDRESSES.map(|ip| world.add_endpoint(EndpointConfig::new(vec![ip], PathMtu::B1024)));
        let mut cms = nodes.map(|node| {
            let rng = world.fork_rng();
            Cm::new(world.endpoint(node), CmConfig::default(), rng).unwrap()
        });
        // Every request costs this program a QP of some 5 KiB, so it bounds them tighter than the agent would.
        let policy = PolicyConfig::from_toml("[limits]\nhalf_open = 512").unwrap();
        cms[0].set_policy(Policy::new(policy, &mut world.fork_rng()));
        let objects = nodes.map(|node| Objects::new(world.endpoint(node)));
        let listener = cms[0].create_id(PortSpace::Tcp).unwrap();
        cms[0].bind_addr(world.endpoint(nodes[0]), listener, SocketAddr::new(ADDRESSES[0], PORT)).unwrap();
        cms[0].listen(listener, 1024).unwrap();
        Self { world, nodes, cms, objects, served: Vec::new(), established: Vec::new() }
    }

    /// A client of the second node asks for a connection.
    fn connect(&mut self) -> (IdHandle, QpHandle) {
        let verbs = self.world.endpoint(self.nodes[1]);
        let id = self.cms[1].create_id(PortSpace::Tcp).unwrap();
        self.cms[1].resolve_addr(verbs, id, None, SocketAddr::new(ADDRESSES[0], PORT)).unwrap();
        (id, self.objects[1].qp(verbs))
    }

    fn work(&mut self, connecting: Option<(IdHandle, QpHandle)>) {
        let now = self.world.now();
        for side in [0, 1] {
            let verbs = self.world.endpoint(self.nodes[side]);
            self.cms[side].poll(now, verbs).unwrap();
            while let Some(event) = self.cms[side].poll_event() {
                match (event.kind, connecting) {
                    (EventKind::AddrResolved, _) => self.cms[side].resolve_route(verbs, event.id).unwrap(),
                    (EventKind::RouteResolved, Some((id, qp))) => {
                        self.cms[side].attach_qp(verbs, id, qp).unwrap();
                        self.cms[side].connect(now, verbs, id, &ConnParam::default()).unwrap();
                    }
                    (EventKind::ConnectRequest, _) => {
                        let qp = self.objects[side].qp(verbs);
                        self.cms[side].attach_qp(verbs, event.id, qp).unwrap();
                        self.cms[side].accept(now, verbs, event.id, &ConnParam::default()).unwrap();
                        self.served.push((event.id, qp));
                    }
                    (EventKind::Established, _) if side == 1 => self.established.push(event.id),
                    (EventKind::Established, _) => {}
                    (EventKind::Unreachable, _) if side == 0 => {
                        let at = self.served.iter().position(|(id, _)| *id == event.id).unwrap();
                        let (id, qp) = self.served.swap_remove(at);
                        self.cms[side].destroy_id(now, verbs, id).unwrap();
                        verbs.destroy_qp(qp).unwrap();
                    }
                    _ => panic!("side {side}: {event:?}"),
                }
            }
        }
    }
}

/// A MAD as a datagram from anywhere to the server's QP1.
fn datagram(from: IpAddr, mad: &[u8]) -> (Flow, Vec<u8>) {
    // BTH: UD SEND Only, default partition, QP 1, PSN 0. DETH: Q_Key of QP1, from QP 1.
    let mut packet = vec![0x64, 0x00, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0x80, 0x01, 0, 0, 0, 0, 0, 1];
    packet.extend(mad);
    let end = packet.len();
    packet.extend([0; 4]);
    let flow = Flow {
        src: from,
        dst: ADDRESSES[0],
        src_port: 0xc000,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        vlan: None,
    };
    seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut packet, end);
    (flow, packet)
}

/// A connection that writes 1 KiB whenever the last has completed.
struct Traffic {
    qp: QpHandle,
    mr: MemoryRegion,
    remote: Remote,
    completed: u64,
}

impl Traffic {
    fn write(&self, verbs: &mut dyn Verbs) {
        let sges = [Sge { addr: self.mr.iova, length: 1024, lkey: self.mr.lkey }];
        let wr = SendWr {
            wr_id: 1,
            operation: Operation::Write(self.remote),
            payload: Payload::Sges(&sges),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        verbs.post_send(self.qp, &[wr]).unwrap();
    }

    fn go_on(&mut self, verbs: &mut dyn Verbs, cq: CqHandle) {
        let mut out = [WorkCompletion::blank(self.qp); 8];
        let n = verbs.poll_cq(cq, &mut out).unwrap();
        for completion in &out[..n] {
            assert_eq!((completion.status, completion.qp), (WcStatus::Success, self.qp));
            self.completed += 1;
            self.write(verbs);
        }
    }
}

#[test]
fn an_endpoint_holds_little_serves_its_connections_and_makes_new_ones() {
    let mut s = Stage::new();
    let first = s.connect();
    while s.established.is_empty() {
        s.work(Some(first));
        let next = s.world.now() + Duration::from_micros(10);
        s.world.run_until(next);
    }
    let region = Region::alloc(4096).unwrap();
    let [server, client] = [0, 1].map(|side| {
        let pd = s.objects[side].pd;
        s.world.endpoint(s.nodes[side]).register(pd, &region, AccessFlags::ALL, None).unwrap()
    });
    let remote = Remote { addr: server.iova, rkey: server.rkey };
    let mut traffic = Traffic { qp: first.1, mr: client, remote, completed: 0 };
    traffic.write(s.world.endpoint(s.nodes[1]));
    let begin = s.world.now();
    let (mut second, mut done) = (None, None);
    let meter = Meter::start();
    for tick in 0..LASTS {
        for n in tick * PER_MS..(tick + 1) * PER_MS {
            let from = source(n % SOURCES);
            let (flow, packet) = datagram(from.ip(), &bytes(tcp_req(n)));
            s.world.inject(s.nodes[0], flow, RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 }), &packet);
        }
        if tick == BEGINS {
            second = Some(s.connect());
        }
        s.work(second);
        if done.is_none() && s.established.len() == 2 {
            done = Some(s.world.now());
        }
        traffic.go_on(s.world.endpoint(s.nodes[1]), s.objects[1].cq);
        s.world.run_until(begin + ms(tick + 1));
    }
    let most = meter.most();
    assert!(most <= ROOM, "{most} bytes for {} QPs", s.served.len());
    assert!(done.expect("connected before the storm is over") <= begin + ms(BEGINS + 5_000));
    // One WRITE a tick, in the storm as without it.
    assert!(traffic.completed >= u64::from(LASTS) - 10, "{}", traffic.completed);
}

/// REQ `n`, for the listener of rdma_cm.
fn tcp_req(n: u32) -> Message {
    use uroce_cm::wire::{IpHeader, PrivateData, Req, ServiceId};
    let from = source(n % SOURCES);
    let IpAddr::V4(_) = from.ip() else { panic!() };
    let header = IpHeader { source_port: 4000, source: from.ip(), destination: ADDRESSES[0] }.emit().unwrap();
    let private_data = PrivateData::new(&header).unwrap();
    Req { service_id: ServiceId::of_port(PortSpace::Tcp, PORT), private_data, ..req(from, n) }.into()
}

#[test]
fn the_storm_is_made_of_good_requests() {
    let Message::Req(sent) = tcp_req(7) else { panic!() };
    assert_eq!(Mad::parse(&bytes(sent)).unwrap().message, Message::Req(sent));
}
