//! A flood of REQs against a server, and a client that means it.

use core::net::{IpAddr, Ipv4Addr};

use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::{Gid, Qpn, RetryCount, RnrRetry};
use uroce_cm::agent::{AcceptParams, AddressFilter, ConnectParams, Failover, MadAddress};
use uroce_cm::comm::Path;
use uroce_cm::wire::{CaGuid, CommunicationId, MAD_LEN, Mad, Message, Req, ServiceId, TransactionId, TransportService};
use uroce_cm::{Agent, CmEvent, Config, Policy, PolicyConfig};

pub(super) const SERVICE: ServiceId = ServiceId::new(0x1000_0000_0000_0042);

pub(super) fn server_gid() -> Gid {
    Ipv4Addr::new(10, 0, 0, 1).into()
}

/// Source `n` of a flood.
pub(super) fn source(n: u32) -> Gid {
    IpAddr::V4(Ipv4Addr::from(0x0b00_0000 + n)).into()
}

pub(super) fn connect_params(from: Gid) -> ConnectParams<'static> {
    ConnectParams {
        path: Path::new(from, server_gid()),
        service_id: SERVICE,
        transport: TransportService::Rc,
        local_qpn: Qpn::from_wire(0x99),
        starting_psn: None,
        srq: false,
        responder_resources: 4,
        initiator_depth: 4,
        retry_count: RetryCount::MAX,
        rnr_retry: RnrRetry::FOREVER,
        flow_control: true,
        private_data: b"",
        alternate: None,
        peer_to_peer: false,
    }
}

thread_local! {
    static GOOD: Req = {
        let mut client = Agent::new(Config::default(), Rng::from_u64(11));
        client.connect(Instant::ZERO, &connect_params(source(0))).unwrap();
        let Message::Req(req) = Mad::parse(&client.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
        req
    };
}

/// Request `n`, from `from`, unlike all others.
pub(super) fn req(from: Gid, n: u32) -> Req {
    let good = GOOD.with(|r| *r);
    let mut primary = good.primary;
    primary.local_gid = from;
    Req {
        local_comm_id: CommunicationId::new(n + 1),
        local_qpn: Qpn::from_wire(n % 0xff_0000 + 16),
        ca_guid: CaGuid::new(u64::from(n) << 20 | 1),
        primary,
        ..good
    }
}

pub(super) fn bytes(message: impl Into<Message>) -> [u8; MAD_LEN] {
    Mad::new(TransactionId::new(5), message).emit()
}

/// A server that accepts whatever its policy lets through. Its QPs are numbers.
pub(super) struct Server {
    pub(super) agent: Agent,
    pub(super) now: Instant,
    next_qpn: u32,
}

impl Server {
    pub(super) fn new(policy: PolicyConfig, config: Config, mut rng: Rng) -> Self {
        let mut agent = Agent::new(config, rng.fork());
        agent.set_policy(Policy::new(policy, &mut rng));
        agent.listen(SERVICE, AddressFilter::Any, 1024).unwrap();
        Self { agent, now: Instant::ZERO, next_qpn: 0x100 }
    }

    pub(super) fn arrives(&mut self, from: Gid, message: impl Into<Message>) {
        self.takes(from, &bytes(message));
    }

    pub(super) fn takes(&mut self, from: Gid, mad: &[u8]) {
        let address = MadAddress { local: server_gid(), remote: from };
        self.agent.handle_mad(self.now, address, mad);
    }

    /// Accepts what waits.
    pub(super) fn answer(&mut self) {
        while let Some(event) = self.agent.poll_event() {
            match event {
                CmEvent::ConnectRequest(request) => {
                    self.next_qpn = self.next_qpn % 0xff_0000 + 1;
                    let params = AcceptParams {
                        local_qpn: Qpn::from_wire(self.next_qpn + 0x100),
                        starting_psn: None,
                        srq: false,
                        responder_resources: 4,
                        initiator_depth: 4,
                        rnr_retry: RnrRetry::FOREVER,
                        flow_control: true,
                        private_data: b"",
                        failover: Failover::Unsupported,
                    };
                    // A QPN may come round while its last user still waits.
                    let _ = self.agent.accept(self.now, request.comm, &params);
                }
                CmEvent::DisconnectRequested { comm, .. } => {
                    let _ = self.agent.disconnect(self.now, comm, b"");
                }
                _ => {}
            }
        }
    }

    /// What it sends.
    pub(super) fn sent(&mut self) -> Vec<Message> {
        std::iter::from_fn(|| self.agent.poll_mad()).map(|mad| Mad::parse(&mad.bytes).unwrap().message).collect()
    }
}
