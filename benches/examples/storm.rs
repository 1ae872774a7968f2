//! How much of the throughput of an established connection is left while strangers send REQs, or packets to its QP.
//!
//! `storm [SECONDS]`: a connection writes 64 KiB messages between two engines over the in-process switch, in one thread;
//! beside it a storm of REQs from 100,000 sources comes in at the rate of each row, every one parsed, checked and judged,
//! under the usual policy and without one. A second table has WRITEs of 64 bytes to the connection's own QP from addresses
//! that are not its peer's. Prints GiB a second of processor time, and the share of what it is without a storm. Linux
//! only.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use uroce::burst::{RxBurst, RxIds};
use uroce::device::Device;
use uroce::device::loopback::Switch;
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::rng::Rng;
use uroce::types::Qpn;
use uroce::verbs::{
    AccessFlags, CqHandle, MemoryRegion, Operation, Payload, QpCapabilities, QpHandle, QpInit, QpType, Remote,
    SendFlags, SendWr, Sge, Verbs, WcStatus, WorkCompletion,
};
use uroce::wire::{Flow, IpFields, seal};
use uroce_cm::agent::ConnectParams;
use uroce_cm::comm::Path;
use uroce_cm::wire::{
    CaGuid, CommunicationId, IpHeader, Mad, Message, PortSpace, PrivateData, Req, ServiceId, TransactionId,
    TransportService,
};
use uroce_cm::{Agent, Cm, CmConfig, Config, ConnParam, EventKind, Policy, PolicyConfig, RdmaCm};

const SOURCES: u32 = 100_000;
const ADDRESSES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))];
const PORT: u16 = 7174;
const LENGTH: u32 = 65_536;
const IDS: IpFields = IpFields { id: 0, flags_fragment: 0x4000 };

struct Side {
    engine: Engine<Box<dyn Device>>,
    cm: Cm,
    qp: QpHandle,
    cq: CqHandle,
    mr: MemoryRegion,
    established: bool,
}

impl Side {
    fn new(switch: &Switch, address: IpAddr, seed: u64) -> Self {
        let mut engine = Engine::open(Box::new(switch.port(&[address])) as Box<dyn Device>).expect("a port");
        let verbs = engine.endpoint_mut();
        let cm = Cm::new(verbs, CmConfig::default(), Rng::from_u64(seed)).expect("QP1");
        let (pd, cq) = (verbs.alloc_pd().expect("a PD"), verbs.create_cq(256).expect("a CQ"));
        let region = Region::alloc(LENGTH as usize).expect("memory");
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).expect("an MR");
        let caps = QpCapabilities::default();
        let (qp_type, srq, qpn) = (QpType::Rc, None, None);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn };
        let qp = verbs.create_qp(init).expect("a QP");
        Self { engine, cm, qp, cq, mr, established: false }
    }

    /// A round of everything. A server accepts the first request with its QP, and leaves the others to their fate.
    fn work(&mut self) {
        self.engine.poll().expect("the switch");
        let (now, verbs) = (self.engine.now(), self.engine.endpoint_mut());
        self.cm.poll(now, verbs).expect("QP1");
        while let Some(event) = self.cm.poll_event() {
            match event.kind {
                EventKind::AddrResolved => self.cm.resolve_route(verbs, event.id).expect("a route"),
                EventKind::RouteResolved => {
                    self.cm.attach_qp(verbs, event.id, self.qp).expect("a QP in RESET");
                    self.cm.connect(now, verbs, event.id, &ConnParam::default()).expect("a request");
                }
                EventKind::ConnectRequest if !self.established => {
                    self.established = true;
                    self.cm.attach_qp(verbs, event.id, self.qp).expect("a QP in RESET");
                    self.cm.accept(now, verbs, event.id, &ConnParam::default()).expect("a fresh request");
                }
                EventKind::ConnectRequest => {
                    self.cm.reject(now, event.id, b"").expect("a fresh request");
                    self.cm.destroy_id(now, verbs, event.id).expect("a live id");
                }
                EventKind::Established => self.established = true,
                _ => {}
            }
        }
    }

    fn write(&mut self, remote: Remote) {
        let sges = [Sge { addr: self.mr.iova, length: LENGTH, lkey: self.mr.lkey }];
        let wr = SendWr {
            wr_id: 1,
            operation: Operation::Write(remote),
            payload: Payload::Sges(&sges),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        self.engine.endpoint_mut().post_send(self.qp, &[wr]).expect("room");
    }
}

/// A REQ that a good client would send.
fn good_req() -> Req {
    let mut client = Agent::new(Config::default(), Rng::from_u64(1));
    let params = ConnectParams {
        path: Path::new(ADDRESSES[1].into(), ADDRESSES[0].into()),
        service_id: ServiceId::of_port(PortSpace::Tcp, PORT),
        transport: TransportService::Rc,
        local_qpn: Qpn::from_wire(0x99),
        starting_psn: None,
        srq: false,
        responder_resources: 4,
        initiator_depth: 4,
        retry_count: uroce::types::RetryCount::MAX,
        rnr_retry: uroce::types::RnrRetry::FOREVER,
        flow_control: true,
        private_data: b"",
        alternate: None,
        peer_to_peer: false,
    };
    client.connect(uroce::time::Instant::ZERO, &params).expect("room");
    match Mad::parse(&client.poll_mad().expect("a REQ").bytes).expect("our own").message {
        Message::Req(req) => req,
        _ => unreachable!("a client begins with a REQ"),
    }
}

/// REQ `n` of the storm, as a datagram to QP1.
fn storm(good: &Req, n: u32) -> (Flow, Vec<u8>) {
    let source = IpAddr::from(Ipv4Addr::from(0x0b00_0000 + n % SOURCES));
    let header = IpHeader { source_port: 4000, source, destination: ADDRESSES[0] }.emit().expect("one family");
    let mut primary = good.primary;
    primary.local_gid = source.into();
    let req = Req {
        local_comm_id: CommunicationId::new(n | 1 << 31),
        local_qpn: Qpn::from_wire(n % 0xff_0000 + 16),
        ca_guid: CaGuid::new(u64::from(n) << 20 | 1),
        primary,
        private_data: PrivateData::new(&header).expect("36 bytes"),
        ..*good
    };
    // BTH: UD SEND Only to QP 1. DETH: Q_Key of QP1, from QP 1.
    let mut packet = vec![0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0x80, 0x01, 0, 0, 0, 0, 0, 1];
    packet.extend(Mad::new(TransactionId::new(n.into()), req).emit());
    let end = packet.len();
    packet.extend([0; 4]);
    sealed(source, packet, end)
}

fn sealed(src: IpAddr, mut packet: Vec<u8>, end: usize) -> (Flow, Vec<u8>) {
    let (src_port, traffic_class, hop_limit, flow_label, vlan) = (0xc000, 0, 64, 0, None);
    let flow = Flow { src, dst: ADDRESSES[0], src_port, traffic_class, hop_limit, flow_label, vlan };
    seal(&flow, IDS, &mut packet, end);
    (flow, packet)
}

/// Packet `n` of a stranger who has guessed the number of a live QP: an RC WRITE Only of 64 bytes.
fn stranger(qpn: Qpn, n: u32) -> (Flow, Vec<u8>) {
    let [_, q @ ..] = qpn.get().to_be_bytes();
    let [_, psn @ ..] = n.to_be_bytes();
    let mut packet = vec![0x0A, 0x40, 0xff, 0xff, 0, q[0], q[1], q[2], 0x80, psn[0], psn[1], psn[2]];
    // RETH: an address, a key, the length.
    packet.extend(0x1000u64.to_be_bytes());
    packet.extend([0, 0, 1, 0, 0, 0, 0, 64]);
    let end = packet.len() + 64;
    packet.resize(end + 4, 0x55);
    sealed(Ipv4Addr::from(0x0b00_0000 + n % SOURCES).into(), packet, end)
}

/// What this thread has had of the processor: other work of the machine does not count.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux says what a thread had");
    Duration::from_nanos(text.split(' ').next().and_then(|n| n.parse().ok()).expect("a number"))
}

/// What comes in beside the connection.
#[derive(Clone, Copy)]
enum Storm {
    /// REQs to QP1.
    Requests,
    /// Packets to the connection's QP.
    Strangers,
}

/// Bytes a second of processor time that a connection moves beside `per_second` packets of a storm.
fn measure(storm_of: Storm, policy: bool, per_second: u32, lasts: Duration) -> f64 {
    let switch = Switch::new();
    let mut server = Side::new(&switch, ADDRESSES[0], 1);
    let mut client = Side::new(&switch, ADDRESSES[1], 2);
    if policy {
        server.cm.set_policy(Policy::new(PolicyConfig::default(), &mut Rng::from_u64(3)));
    }
    let peer = SocketAddr::new(ADDRESSES[0], PORT);
    let listener = server.cm.create_id(PortSpace::Tcp).expect("an id");
    server.cm.bind_addr(server.engine.endpoint_mut(), listener, peer).expect("our address");
    server.cm.listen(listener, 1024).expect("a free port");
    let id = client.cm.create_id(PortSpace::Tcp).expect("an id");
    client.cm.resolve_addr(client.engine.endpoint_mut(), id, None, peer).expect("a source");
    while !client.established {
        server.work();
        client.work();
    }
    let remote = Remote { addr: server.mr.iova, rkey: server.mr.rkey };
    for _ in 0..4 {
        client.write(remote);
    }
    let good = good_req();
    // Made beforehand: the flooder's work is not the server's.
    let live = server.engine.endpoint_mut().query_qp(server.qp).expect("our QP").qpn;
    let packet = |n| match storm_of {
        Storm::Requests => storm(&good, n),
        Storm::Strangers => stranger(live, n),
    };
    let packets: Vec<_> = (0..50_000).map(packet).collect();
    let (mut sent, mut moved) = (0usize, 0u64);
    let mut out = [WorkCompletion::blank(client.qp); 16];
    let (begin, mut spent, mut round) = (cpu_time(), Duration::ZERO, 0u32);
    while spent < lasts {
        round = round.wrapping_add(1);
        if round.is_multiple_of(16) {
            spent = cpu_time().saturating_sub(begin);
        }
        let due = spent.as_micros() * u128::from(per_second) / 1_000_000;
        let due = usize::try_from(due).unwrap_or(usize::MAX);
        let now = server.engine.now();
        // What a device hands over in one round at most.
        for _ in 0..due.saturating_sub(sent).min(64) {
            let (flow, packet) = &packets[sent % packets.len()];
            let burst = RxBurst { flow: *flow, bytes: packet, segment: packet.len(), ids: RxIds::Known(IDS), at: now };
            server.engine.endpoint_mut().handle_burst(now, burst);
            sent += 1;
        }
        server.work();
        client.work();
        let n = client.engine.endpoint_mut().poll_cq(client.cq, &mut out).expect("our CQ");
        for completion in &out[..n] {
            assert_eq!(completion.status, WcStatus::Success);
            moved += u64::from(LENGTH);
            client.write(remote);
        }
    }
    moved as f64 / spent.as_secs_f64()
}

// The figures go to the shell.
#[allow(clippy::print_stdout)]
fn main() -> ExitCode {
    let Ok(seconds) = std::env::args().nth(1).map_or(Ok(2.0), |s| s.parse::<f64>()) else {
        return ExitCode::from(2);
    };
    let lasts = Duration::from_secs_f64(seconds);
    println!("REQs/s      with the usual policy      without a policy");
    let calm = [true, false].map(|policy| measure(Storm::Requests, policy, 0, lasts));
    for per_second in [0, 5_000, 20_000, 100_000] {
        let row = [true, false].map(|policy| measure(Storm::Requests, policy, per_second, lasts));
        let [with, without] = [0, 1].map(|i| (row[i] / f64::from(1 << 30), 100.0 * row[i] / calm[i]));
        println!(
            "{per_second:>7}   {:>8.2} GiB/s ({:>3.0} %)   {:>8.2} GiB/s ({:>3.0} %)",
            with.0, with.1, without.0, without.1
        );
    }
    println!("packets/s of strangers");
    for per_second in [0, 10_000, 100_000, 500_000] {
        let rate = measure(Storm::Strangers, true, per_second, lasts);
        let (gib, share) = (rate / f64::from(1 << 30), 100.0 * rate / calm[0]);
        println!("{per_second:>7}   {gib:>8.2} GiB/s ({share:>3.0} %)");
    }
    ExitCode::SUCCESS
}
