//! What a connection costs in the connection manager: two agents in one process, no device between them.
//!
//! A connection is REQ, REP, RTU, DREQ and DREP, and the end of TIMEWAIT on both sides. The floor is what the MADs alone
//! cost: making and parsing one.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::Ipv4Addr;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, Qpn, RetryCount, RnrRetry};
use uroce_cm::agent::{AcceptParams, AddressFilter, ConnectParams, MadAddress};
use uroce_cm::comm::Path;
use uroce_cm::wire::{Mad, ServiceId, TransportService};
use uroce_cm::{Agent, CmEvent, Config};

const SERVICE: ServiceId = ServiceId::new(0x1000_0000_0000_0042);

fn gid(last: u8) -> Gid {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn connect_params(local_qpn: u32) -> ConnectParams<'static> {
    ConnectParams {
        path: Path::new(gid(1), gid(2)),
        service_id: SERVICE,
        transport: TransportService::Rc,
        local_qpn: Qpn::from_wire(local_qpn),
        starting_psn: None,
        srq: false,
        responder_resources: 16,
        initiator_depth: 16,
        retry_count: RetryCount::MAX,
        rnr_retry: RnrRetry::FOREVER,
        flow_control: true,
        alternate: None,
        peer_to_peer: false,
        private_data: b"",
    }
}

fn accept_params(local_qpn: u32) -> AcceptParams<'static> {
    AcceptParams {
        local_qpn: Qpn::from_wire(local_qpn),
        starting_psn: None,
        srq: false,
        responder_resources: 16,
        initiator_depth: 16,
        rnr_retry: RnrRetry::FOREVER,
        flow_control: true,
        failover: uroce_cm::agent::Failover::Unsupported,
        private_data: b"",
    }
}

struct Pair {
    client: Agent,
    server: Agent,
    now: Instant,
    next_qpn: u32,
    ended: usize,
}

impl Pair {
    fn new() -> Self {
        let mut rng = Rng::from_u64(1);
        let client = Agent::new(Config::default(), rng.fork());
        let mut server = Agent::new(Config::default(), rng.fork());
        server.listen(SERVICE, AddressFilter::Any, 1024).expect("the first listener");
        Self { client, server, now: Instant::ZERO, next_qpn: 0x100, ended: 0 }
    }

    fn qpn(&mut self) -> u32 {
        self.next_qpn = 0x100 + (self.next_qpn + 1) % 0xFF_0000;
        self.next_qpn
    }

    /// Carries MADs and answers events until nothing is left to do. A client that is connected disconnects.
    fn run(&mut self) {
        let mut busy = true;
        while busy {
            busy = false;
            while let Some(mad) = self.client.poll_mad() {
                let from = MadAddress { local: mad.to.remote, remote: mad.to.local };
                self.server.handle_mad(self.now, from, &mad.bytes);
                busy = true;
            }
            while let Some(mad) = self.server.poll_mad() {
                let from = MadAddress { local: mad.to.remote, remote: mad.to.local };
                self.client.handle_mad(self.now, from, &mad.bytes);
                busy = true;
            }
            self.answer();
        }
    }

    fn answer(&mut self) {
        while let Some(event) = self.server.poll_event() {
            match event {
                CmEvent::ConnectRequest(request) => {
                    let params = accept_params(self.qpn());
                    self.server.accept(self.now, request.comm, &params).expect("a fresh request");
                }
                CmEvent::DisconnectRequested { comm, .. } => {
                    self.server.disconnect(self.now, comm, b"").expect("a fresh request");
                }
                _ => {}
            }
        }
        while let Some(event) = self.client.poll_event() {
            match event {
                CmEvent::Reply(reply) => {
                    self.client.confirm(reply.comm, b"").expect("a fresh reply");
                    self.client.disconnect(self.now, reply.comm, b"").expect("an established connection");
                }
                CmEvent::Disconnected { .. } => self.ended += 1,
                _ => {}
            }
        }
    }

    /// `count` connections from REQ to the end of TIMEWAIT.
    fn connections(&mut self, count: usize) {
        let before = self.ended;
        for _ in 0..count {
            let params = connect_params(self.qpn());
            self.client.connect(self.now, &params).expect("room for a connection");
        }
        self.run();
        assert_eq!(self.ended - before, count);
        self.now = self.now + Duration::from_millis(100);
        while self.client.in_timewait() + self.server.in_timewait() > 0 {
            self.client.handle_timeout(self.now);
            self.server.handle_timeout(self.now);
        }
        self.run();
    }
}

fn connections(c: &mut Criterion) {
    let mut group = c.benchmark_group("cm/connections");
    for at_once in [1, 256] {
        group.throughput(Throughput::Elements(at_once as u64));
        let mut pair = Pair::new();
        group.bench_function(format!("{at_once}_at_once"), |b| b.iter(|| pair.connections(at_once)));
    }
    group.finish();
}

fn mads(c: &mut Criterion) {
    let mut client = Agent::new(Config::default(), Rng::from_u64(2));
    client.connect(Instant::ZERO, &connect_params(0x100)).expect("room for a connection");
    let bytes = client.poll_mad().expect("a REQ").bytes;
    let mad = Mad::parse(&bytes).expect("our own REQ");
    let mut group = c.benchmark_group("cm/req");
    group.throughput(Throughput::Elements(1));
    group.bench_function("parse", |b| b.iter(|| Mad::parse(black_box(&bytes))));
    group.bench_function("emit", |b| b.iter(|| black_box(&mad).emit()));
    group.finish();
}

criterion_group!(benches, connections, mads);
criterion_main!(benches);
