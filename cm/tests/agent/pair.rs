//! Two agents, a link that loses, doubles and delays what the test says, and virtual time.

use std::collections::BTreeMap;

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, QKey, Qpn, RetryCount, RnrRetry};
use uroce_cm::agent::{
    AcceptParams, AddressFilter, ConnectParams, Failover, MadAddress, OutgoingMad, ResolveParams, ServiceAnswer,
};
use uroce_cm::comm::{ConnectionTerms, Path, SidrId};
use uroce_cm::wire::{AprStatus, Mad, MadKind, PortSpace, RejReason, ServiceId, SidrStatus, TransportService};
use uroce_cm::{Agent, CmEvent, CommId, Config, RetryPolicy};

pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;
pub(crate) const SERVICE: ServiceId = ServiceId::new(0x1000_0000_0000_0042);
/// One way.
pub(crate) const DELAY: Duration = Duration::from_millis(1);

pub(crate) fn ms(v: u64) -> Duration {
    Duration::from_millis(v)
}

pub(crate) fn at(v: u64) -> Instant {
    Instant::ZERO + ms(v)
}

pub(crate) fn gid(side: usize) -> Gid {
    Gid::from(std::net::Ipv4Addr::new(10, 0, 0, u8::try_from(side).unwrap() + 1))
}

pub(crate) fn qpn(v: u32) -> Qpn {
    Qpn::new(v).unwrap()
}

/// Without jitter, so that every time in a test is exact.
pub(crate) fn exact() -> Config {
    Config { retry: RetryPolicy { jitter_percent: 0, ..RetryPolicy::default() }, ..Config::default() }
}

/// What the link does with the `nth` MAD of a kind that a side sends (from 1).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Drop,
    Duplicate,
    Delay(Duration),
    /// It arrives, and a copy of it that much later.
    Echo(Duration),
}

/// What a consumer does by itself once it is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    Disconnect,
    OfferPath,
}

/// How a consumer behaves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Consumer {
    /// How long it thinks before each answer.
    pub(crate) think: Duration,
    /// It refuses what it is asked: a REQ, a REP, a path, a service.
    pub(crate) refuses: bool,
    /// What it does how long after it is established.
    pub(crate) then: &'static [(u64, Deed)],
}

/// What a consumer has yet to do.
#[derive(Clone, Debug)]
enum Plan {
    Answer(CmEvent),
    Do(CommId, Deed),
}

/// Rates of a hostile link.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    pub(crate) loss: f64,
    pub(crate) duplicate: f64,
    pub(crate) reorder: f64,
}

pub(crate) struct Pair {
    pub(crate) agents: [Agent; 2],
    pub(crate) now: Instant,
    /// What each side sent, and when, lost or not.
    pub(crate) sent: [Vec<(Instant, Mad)>; 2],
    /// What each side's consumer was told, and when.
    pub(crate) events: [Vec<(Instant, CmEvent)>; 2],
    /// Terms of each communication that a consumer accepted or got a REP for.
    pub(crate) terms: [Vec<(CommId, ConnectionTerms)>; 2],
    /// Whether the consumers answer REQ, REP and DREQ at once.
    pub(crate) answers: [bool; 2],
    pub(crate) consumers: [Consumer; 2],
    pub(crate) rates: Rates,
    faults: Vec<(usize, MadKind, usize, Fault)>,
    flying: BTreeMap<(Instant, u64), (usize, OutgoingMad)>,
    plans: BTreeMap<(Instant, u64), (usize, Plan)>,
    /// Communications between equals, with their QPs.
    meetings: Vec<(usize, CommId, Qpn)>,
    count: u64,
    rng: Rng,
    pub(crate) next_qpn: u32,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(1, exact(), exact())
    }

    pub(crate) fn with(seed: u64, a: Config, b: Config) -> Self {
        let mut rng = Rng::from_u64(seed);
        Self {
            agents: [Agent::new(a, rng.fork()), Agent::new(b, rng.fork())],
            now: Instant::ZERO,
            sent: Default::default(),
            events: Default::default(),
            terms: Default::default(),
            answers: [true; 2],
            consumers: [Consumer::default(); 2],
            rates: Rates::default(),
            faults: Vec::new(),
            flying: BTreeMap::new(),
            plans: BTreeMap::new(),
            meetings: Vec::new(),
            count: 0,
            rng,
            next_qpn: 0x100,
        }
    }

    pub(crate) fn fault(&mut self, side: usize, kind: MadKind, nth: usize, fault: Fault) {
        self.faults.push((side, kind, nth, fault));
    }

    pub(crate) fn listen(&mut self, side: usize) {
        self.agents[side].listen(SERVICE, AddressFilter::Any, 128).unwrap();
    }

    pub(crate) fn fresh_qpn(&mut self) -> Qpn {
        self.next_qpn += 1;
        qpn(self.next_qpn)
    }

    pub(crate) fn connect(&mut self, side: usize) -> CommId {
        let local = self.fresh_qpn();
        self.connect_from(side, local, b"")
    }

    pub(crate) fn connect_from(&mut self, side: usize, local_qpn: Qpn, private_data: &[u8]) -> CommId {
        let params = ConnectParams { local_qpn, private_data, ..connect_params(side) };
        self.agents[side].connect(self.now, &params).unwrap()
    }

    pub(crate) fn accept(&mut self, side: usize, comm: CommId) {
        assert!(self.try_accept(side, comm));
    }

    /// With the QP that our own REQ named, if there was one.
    fn try_accept(&mut self, side: usize, comm: CommId) -> bool {
        let own = self.meetings.iter().find(|(s, c, _)| (*s, *c) == (side, comm)).map(|m| m.2);
        let local_qpn = own.unwrap_or_else(|| self.fresh_qpn());
        let params = AcceptParams { local_qpn, ..accept_params() };
        match self.agents[side].accept(self.now, comm, &params) {
            Ok(terms) => self.terms[side].push((comm, terms)),
            Err(_) => return false,
        }
        true
    }

    /// Asks an equal, who asks too.
    pub(crate) fn meet(&mut self, side: usize) -> CommId {
        let local_qpn = self.fresh_qpn();
        let params = ConnectParams { peer_to_peer: true, local_qpn, ..connect_params(side) };
        let comm = self.agents[side].connect(self.now, &params).unwrap();
        self.meetings.push((side, comm, local_qpn));
        comm
    }

    /// Asks the other side for its datagram service.
    pub(crate) fn resolve(&mut self, side: usize) -> SidrId {
        let to = MadAddress { local: gid(side), remote: gid(1 - side) };
        let params = ResolveParams { to, service_id: SERVICE, private_data: b"who" };
        self.agents[side].resolve_service(self.now, &params).unwrap()
    }

    /// Delivers, fires timers and lets consumers answer until `end`.
    pub(crate) fn run_until(&mut self, end: Instant) {
        loop {
            self.pump();
            let next = self.flying.first_key_value().map(|((at, _), _)| *at);
            let planned = self.plans.first_key_value().map(|((at, _), _)| *at);
            let timers = self.agents.iter().filter_map(Agent::poll_timeout);
            let Some(next) = timers.chain(next).chain(planned).min().filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            while let Some(entry) = self.flying.first_entry().filter(|e| e.key().0 <= self.now) {
                let (from, mad) = entry.remove();
                let address = MadAddress { local: mad.to.remote, remote: mad.to.local };
                self.agents[1 - from].handle_mad(self.now, address, &mad.bytes);
            }
            while let Some(entry) = self.plans.first_entry().filter(|e| e.key().0 <= self.now) {
                let (side, plan) = entry.remove();
                match plan {
                    Plan::Answer(event) => self.answer(side, &event),
                    Plan::Do(comm, deed) => self.perform(side, comm, deed),
                }
            }
            for agent in &mut self.agents {
                agent.handle_timeout(self.now);
            }
        }
        self.now = self.now.max(end);
    }

    pub(crate) fn run_for(&mut self, d: Duration) {
        self.run_until(self.now + d);
    }

    fn pump(&mut self) {
        for side in [A, B] {
            while let Some(event) = self.agents[side].poll_event() {
                self.on_event(side, &event);
                self.events[side].push((self.now, event));
            }
        }
        for side in [A, B] {
            while let Some(mad) = self.agents[side].poll_mad() {
                self.transmit(side, mad);
            }
        }
    }

    fn on_event(&mut self, side: usize, event: &CmEvent) {
        if let CmEvent::Reply(reply) = event {
            self.terms[side].push((reply.comm, reply.terms));
        }
        if !self.answers[side] {
            return;
        }
        if let CmEvent::Established { comm, .. } = event {
            self.plan_deeds(side, *comm);
        }
        let think = self.consumers[side].think;
        if think == Duration::ZERO {
            self.answer(side, event);
        } else {
            self.plan(think, side, Plan::Answer(event.clone()));
        }
    }

    fn plan(&mut self, after: Duration, side: usize, plan: Plan) {
        self.count += 1;
        self.plans.insert((self.now + after, self.count), (side, plan));
    }

    fn plan_deeds(&mut self, side: usize, comm: CommId) {
        for (after, deed) in self.consumers[side].then {
            self.plan(ms(*after), side, Plan::Do(comm, *deed));
        }
    }

    /// A consumer that thought for a while may find that what it was asked is over: then it is refused, and that is fine.
    fn answer(&mut self, side: usize, event: &CmEvent) {
        let (now, late) = (self.now, self.consumers[side].think > Duration::ZERO);
        let refuses = self.consumers[side].refuses;
        let done = match event {
            CmEvent::ConnectRequest(req) if refuses => self.refuse(side, req.comm),
            CmEvent::Reply(reply) if refuses => self.refuse(side, reply.comm),
            CmEvent::ConnectRequest(req) => self.try_accept(side, req.comm),
            CmEvent::Reply(reply) => self.agents[side].confirm(reply.comm, b"").is_ok(),
            CmEvent::DisconnectRequested { comm, .. } => self.agents[side].disconnect(now, *comm, b"").is_ok(),
            CmEvent::PathOffered(offer) => {
                let status = if refuses { AprStatus::Rejected } else { AprStatus::Success };
                self.agents[side].answer_alternate(offer.comm, status, b"", b"").is_ok()
            }
            CmEvent::ServiceRequest(req) => {
                let refusal = ServiceAnswer::refusal(SidrStatus::Rejected);
                let answer = if refuses { refusal } else { service_answer() };
                self.agents[side].answer_service(now, req.sidr, &answer).is_ok()
            }
            _ => true,
        };
        // A consumer that parts by itself has answered that with its own wish.
        let parting = matches!(event, CmEvent::DisconnectRequested { .. } | CmEvent::PathOffered(_));
        assert!(done || late || parting, "an answer at once is in time: {event:?}");
        if let CmEvent::Reply(reply) = event
            && done
            && !refuses
        {
            self.plan_deeds(side, reply.comm);
        }
    }

    fn refuse(&mut self, side: usize, comm: CommId) -> bool {
        self.agents[side].reject(comm, RejReason::ConsumerDefined, b"", b"no").is_ok()
    }

    fn perform(&mut self, side: usize, comm: CommId, deed: Deed) {
        // The peer may have been faster, whatever it is.
        match deed {
            Deed::Disconnect => {
                let _ = self.agents[side].disconnect(self.now, comm, b"");
            }
            Deed::OfferPath => {
                let path = Path { flow_label: 0x777, ..Path::new(gid(side), gid(1 - side)) };
                let _ = self.agents[side].offer_alternate(self.now, comm, &path, b"");
            }
        }
    }

    fn transmit(&mut self, side: usize, mad: OutgoingMad) {
        let parsed = Mad::parse(&mad.bytes).unwrap();
        let kind = parsed.message.kind();
        self.sent[side].push((self.now, parsed));
        let nth = self.sent_of(side, kind).len();
        let fault = self.faults.iter().find(|(s, k, n, _)| (*s, *k, *n) == (side, kind, nth)).map(|f| f.3);
        let mut delay = DELAY;
        let mut copies = 1;
        match fault {
            Some(Fault::Drop) => return,
            Some(Fault::Duplicate) => copies = 2,
            Some(Fault::Delay(d)) => delay = d,
            Some(Fault::Echo(d)) => {
                self.count += 1;
                self.flying.insert((self.now + delay + d, self.count), (side, mad.clone()));
            }
            None => {}
        }
        if self.rng.chance(self.rates.loss) {
            return;
        }
        copies += usize::from(self.rng.chance(self.rates.duplicate));
        for _ in 0..copies {
            let late = if self.rng.chance(self.rates.reorder) { ms(self.rng.within(1..=400)) } else { Duration::ZERO };
            self.count += 1;
            self.flying.insert((self.now + delay + late, self.count), (side, mad.clone()));
        }
    }

    /// When a side sent MADs of a kind.
    pub(crate) fn sent_of(&self, side: usize, kind: MadKind) -> Vec<Instant> {
        self.sent[side].iter().filter(|(_, m)| m.message.kind() == kind).map(|(at, _)| *at).collect()
    }

    /// Names of the messages of a side, in order.
    pub(crate) fn ladder(&self, side: usize) -> Vec<&'static str> {
        self.sent[side].iter().map(|(_, m)| m.message.kind().name()).collect()
    }

    pub(crate) fn told(&self, side: usize) -> Vec<&'static str> {
        self.events[side].iter().map(|(_, e)| name(e)).collect()
    }

    /// The one communication of each side.
    pub(crate) fn comms(&self) -> (CommId, CommId) {
        (self.terms[A][0].0, self.terms[B][0].0)
    }
}

pub(crate) fn name(event: &CmEvent) -> &'static str {
    match event {
        CmEvent::ConnectRequest(_) => "ConnectRequest",
        CmEvent::Reply(_) => "Reply",
        CmEvent::Established { .. } => "Established",
        CmEvent::Rejected(_) => "Rejected",
        CmEvent::Unreachable { .. } => "Unreachable",
        CmEvent::DisconnectRequested { .. } => "DisconnectRequested",
        CmEvent::Disconnected { .. } => "Disconnected",
        CmEvent::TimewaitExit { .. } => "TimewaitExit",
        CmEvent::PathOffered(_) => "PathOffered",
        CmEvent::PathAnswered(_) => "PathAnswered",
        CmEvent::PathUnanswered { .. } => "PathUnanswered",
        CmEvent::ServiceRequest(_) => "ServiceRequest",
        CmEvent::ServiceExpired { .. } => "ServiceExpired",
        CmEvent::ServiceReply(_) => "ServiceReply",
        CmEvent::ServiceUnreachable { .. } => "ServiceUnreachable",
    }
}

pub(crate) fn connect_params(side: usize) -> ConnectParams<'static> {
    ConnectParams {
        path: Path::new(gid(side), gid(1 - side)),
        service_id: SERVICE,
        transport: TransportService::Rc,
        local_qpn: qpn(0x99),
        starting_psn: None,
        srq: false,
        responder_resources: 4,
        initiator_depth: 4,
        retry_count: RetryCount::MAX,
        rnr_retry: RnrRetry::FOREVER,
        flow_control: true,
        alternate: None,
        peer_to_peer: false,
        private_data: b"",
    }
}

pub(crate) fn accept_params() -> AcceptParams<'static> {
    AcceptParams {
        local_qpn: qpn(0x98),
        starting_psn: None,
        srq: false,
        responder_resources: 4,
        initiator_depth: 4,
        rnr_retry: RnrRetry::FOREVER,
        flow_control: true,
        failover: Failover::Unsupported,
        private_data: b"",
    }
}

pub(crate) fn service_answer() -> ServiceAnswer<'static> {
    ServiceAnswer {
        status: SidrStatus::Success,
        qpn: qpn(0x77),
        qkey: QKey::RDMA_UDP,
        info: b"",
        private_data: b"here",
    }
}

/// A service id of rdma_cm.
pub(crate) fn tcp(port: u16) -> ServiceId {
    ServiceId::of_port(PortSpace::Tcp, port)
}
