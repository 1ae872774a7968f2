//! Service resolution: a question, an answer, and what a link does to both.

use uroce::rng::Rng;
use uroce::types::{PKey, QKey};
use uroce_cm::agent::{
    AddressFilter, Admission, Arrival, Gate, Limits, MadAddress, Notice, Outcome, Overflow, ResolveParams,
    ServiceAnswer,
};
use uroce_cm::wire::{
    IpHeader, Mad, MadKind, Message, PortSpace, PrivateData, RejReason, ServiceId, SidrRep, SidrReq, SidrStatus,
    TransactionId,
};
use uroce_cm::{Agent, CmEvent, Config, RetryPolicy};
use uroce_fixtures::{Direction, by_name};

use crate::pair::{A, B, Fault, Pair, SERVICE, at, exact, gid, ms, qpn, service_answer};

fn question(request_id: u32) -> SidrReq {
    let pkey = PKey::DEFAULT;
    SidrReq { request_id, pkey, reserved: 0, service_id: SERVICE, private_data: PrivateData::EMPTY }
}

fn from() -> MadAddress {
    MadAddress { local: gid(B), remote: gid(A) }
}

fn feed(agent: &mut Agent, message: impl Into<Message>) {
    agent.handle_mad(at(0), from(), &Mad::new(TransactionId::new(5), message).emit());
}

fn answer(agent: &mut Agent) -> Option<SidrRep> {
    let mad = Mad::parse(&agent.poll_mad()?.bytes).unwrap();
    assert_eq!(mad.header.transaction_id, TransactionId::new(5));
    let Message::SidrRep(rep) = mad.message else { panic!("{mad:?}") };
    Some(rep)
}

#[test]
fn a_question_gets_its_answer_and_leaves_nothing() {
    let mut pair = Pair::new();
    pair.listen(B);
    let sidr = pair.resolve(A);
    pair.run_until(at(5));
    assert_eq!((pair.ladder(A), pair.ladder(B)), (vec!["SIDR_REQ"], vec!["SIDR_REP"]));
    let CmEvent::ServiceReply(reply) = &pair.events[A][0].1 else { panic!("{:?}", pair.told(A)) };
    assert_eq!(
        (reply.sidr, reply.status, reply.qpn, reply.qkey),
        (sidr, SidrStatus::Success, qpn(0x77), QKey::RDMA_UDP)
    );
    assert_eq!(&reply.private_data.as_bytes()[..5], b"here\0");
    let CmEvent::ServiceRequest(request) = &pair.events[B][0].1 else { panic!("{:?}", pair.told(B)) };
    assert_eq!((request.from, request.ip, &request.user_data()[..3]), (from(), None, &b"who"[..]));
    pair.run_until(at(20_000));
    assert_eq!([A, B].map(|side| pair.agents[side].service_exchanges()), [0, 0]);
    assert_eq!([A, B].map(|side| pair.agents[side].poll_timeout()), [None, None]);
}

#[test]
fn what_is_lost_is_asked_again_and_answered_from_memory() {
    for lost in [(A, MadKind::SidrReq), (B, MadKind::SidrRep)] {
        let mut pair = Pair::new();
        pair.listen(B);
        pair.fault(lost.0, lost.1, 1, Fault::Drop);
        pair.resolve(A);
        pair.run_until(at(1000));
        assert_eq!(pair.sent_of(A, MadKind::SidrReq), [at(0), at(250)]);
        assert_eq!(
            (pair.told(A), pair.told(B)),
            (vec!["ServiceReply"], vec!["ServiceRequest"]),
            "the consumer hears once"
        );
    }
}

#[test]
fn repeats_while_the_consumer_thinks_and_after_it_answered() {
    let mut agent = Agent::new(exact(), Rng::from_u64(3));
    agent.listen(SERVICE, AddressFilter::Any, 8).unwrap();
    feed(&mut agent, question(7));
    feed(&mut agent, question(7));
    let Some(CmEvent::ServiceRequest(request)) = agent.poll_event() else { panic!() };
    assert_eq!((answer(&mut agent), agent.poll_event()), (None, None));
    agent.answer_service(at(0), request.sidr, &service_answer()).unwrap();
    let first = answer(&mut agent).unwrap();
    assert!(agent.answer_service(at(0), request.sidr, &service_answer()).is_err(), "answered is answered");
    feed(&mut agent, question(7));
    assert_eq!((answer(&mut agent), agent.poll_event()), (Some(first), None));
    // Another peer's question with the same number is another question.
    let other = MadAddress { remote: gid(9), ..from() };
    agent.handle_mad(at(0), other, &Mad::new(TransactionId::new(5), question(7)).emit());
    assert!(matches!(agent.poll_event(), Some(CmEvent::ServiceRequest(r)) if r.from == other));
}

#[test]
fn every_refusal_reaches_who_asked() {
    for code in 1..=7u8 {
        let mut pair = Pair::new();
        pair.listen(B);
        pair.answers[B] = false;
        pair.resolve(A);
        pair.run_until(at(2));
        let CmEvent::ServiceRequest(request) = pair.events[B][0].1.clone() else { panic!() };
        let refusal = ServiceAnswer { info: b"ask elsewhere", ..ServiceAnswer::refusal(SidrStatus::from_code(code)) };
        pair.agents[B].answer_service(pair.now, request.sidr, &refusal).unwrap();
        pair.run_until(at(5));
        let CmEvent::ServiceReply(reply) = &pair.events[A][0].1 else { panic!() };
        assert_eq!((reply.status.code(), reply.info.as_bytes()), (code, &b"ask elsewhere"[..]));
    }
}

#[test]
fn nobody_there_and_nobody_answers() {
    // No listener: status 1 at once.
    let mut pair = Pair::new();
    pair.resolve(A);
    pair.run_until(at(5));
    let CmEvent::ServiceReply(reply) = &pair.events[A][0].1 else { panic!() };
    assert_eq!(reply.status, SidrStatus::Unsupported);
    // Silence: all repeats, then the verdict.
    let policy = RetryPolicy { retries: 2, ..exact().retry };
    let mut pair = Pair::with(1, Config { retry: policy, ..exact() }, exact());
    pair.rates.loss = 1.0;
    let sidr = pair.resolve(A);
    pair.run_until(at(60_000));
    let expected = CmEvent::ServiceUnreachable { sidr, tries: 3, elapsed: ms(1750) };
    assert_eq!(pair.events[A], [(at(1750), expected)]);
    assert_eq!(pair.agents[A].service_exchanges(), 0);
}

#[test]
fn a_consumer_that_never_answers_holds_nothing() {
    let mut pair = Pair::with(1, exact(), Config { consumer_cap: ms(5000), ..exact() });
    pair.listen(B);
    pair.answers[B] = false;
    pair.resolve(A);
    pair.run_until(at(200_000));
    // Each time the consumer's time is over, a repeat is a new question.
    assert!(pair.told(B).contains(&"ServiceExpired"));
    assert_eq!(pair.told(A), ["ServiceUnreachable"]);
    assert_eq!(pair.agents[B].service_exchanges(), 0);
}

#[test]
fn an_abandoned_question_is_not_asked_again_and_an_abandoned_request_is_refused() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    let first = pair.resolve(A);
    pair.agents[A].abandon_service(pair.now, first);
    pair.run_until(at(1000));
    assert_eq!((pair.sent_of(A, MadKind::SidrReq).len(), pair.told(A).len()), (1, 0));
    pair.resolve(A);
    pair.run_for(ms(3));
    let CmEvent::ServiceRequest(request) = pair.events[B][1].1.clone() else { panic!() };
    pair.agents[B].abandon_service(pair.now, request.sidr);
    pair.run_for(ms(3));
    let CmEvent::ServiceReply(reply) = &pair.events[A][0].1 else { panic!() };
    assert_eq!(reply.status, SidrStatus::Rejected);
}

#[test]
fn backlog_and_tables_are_bounded() {
    let limits = Limits { services: 8, ..Limits::default() };
    let mut agent = Agent::new(Config { limits, ..exact() }, Rng::from_u64(3));
    agent.listen(SERVICE, AddressFilter::Any, 4).unwrap();
    let mut pending = Vec::new();
    for n in 0..6 {
        feed(&mut agent, question(n + 1));
        match answer(&mut agent) {
            None => assert!(n < 4),
            Some(rep) => assert!(n >= 4 && rep.status == SidrStatus::Rejected),
        }
        if let Some(CmEvent::ServiceRequest(request)) = agent.poll_event() {
            pending.push(request.sidr);
        }
    }
    assert_eq!((pending.len(), agent.counters().overflows), (4, 2));
    for sidr in pending {
        agent.answer_service(at(0), sidr, &service_answer()).unwrap();
        answer(&mut agent).unwrap();
    }
    // Answers that are remembered give way to new questions: 100 more, none refused, 8 remembered.
    for n in 100..200 {
        feed(&mut agent, question(n));
        let Some(CmEvent::ServiceRequest(request)) = agent.poll_event() else { panic!("{n}") };
        agent.answer_service(at(0), request.sidr, &service_answer()).unwrap();
        assert_eq!(answer(&mut agent).unwrap().status, SidrStatus::Success);
        assert!(agent.service_exchanges() <= 8);
    }
    // Eight that wait leave no room, and the silent policy says nothing.
    let config = Config { limits, overflow: Overflow::Drop, ..exact() };
    let mut agent = Agent::new(config, Rng::from_u64(3));
    agent.listen(SERVICE, AddressFilter::Any, 100).unwrap();
    for n in 0..20 {
        feed(&mut agent, question(n + 1));
    }
    assert_eq!((agent.service_exchanges(), agent.counters().overflows, answer(&mut agent)), (8, 12, None));
}

#[test]
fn forged_answers_resolve_nothing() {
    let mut pair = Pair::new();
    pair.resolve(A);
    let Message::SidrReq(req) = Mad::parse(&pair.agents[A].poll_mad().unwrap().bytes).unwrap().message else {
        panic!()
    };
    let good = SidrRep {
        request_id: req.request_id,
        status: SidrStatus::Success,
        qpn: qpn(0x20),
        service_id: SERVICE,
        qkey: QKey::RDMA_UDP,
        info: uroce_cm::wire::Ari::EMPTY,
        private_data: PrivateData::EMPTY,
    };
    let right = MadAddress { local: gid(A), remote: gid(B) };
    let cases = [
        (MadAddress { remote: gid(9), ..right }, good),
        (right, SidrRep { request_id: req.request_id ^ 1, ..good }),
        (right, SidrRep { service_id: ServiceId::new(1), ..good }),
        (right, SidrRep { qpn: qpn(1), ..good }),
    ];
    for (from, rep) in cases {
        pair.agents[A].handle_mad(at(1), from, &Mad::new(TransactionId::new(5), rep).emit());
        assert_eq!((pair.agents[A].poll_event(), pair.agents[A].service_exchanges()), (None, 1));
    }
    pair.agents[A].handle_mad(at(1), right, &Mad::new(TransactionId::new(5), good).emit());
    assert!(matches!(pair.agents[A].poll_event(), Some(CmEvent::ServiceReply(_))));
}

#[test]
fn a_service_of_rdma_cm_needs_its_header_and_its_address() {
    let service_id = ServiceId::of_port(PortSpace::Udp, 7174);
    let header = |destination: &str| {
        let header =
            IpHeader { source_port: 5, source: "10.0.0.1".parse().unwrap(), destination: destination.parse().unwrap() };
        PrivateData::new(&header.emit().unwrap()).unwrap()
    };
    let ask = |private_data| {
        let mut agent = Agent::new(exact(), Rng::from_u64(3));
        agent.listen(service_id, AddressFilter::Only("10.0.0.2".parse().unwrap()), 4).unwrap();
        feed(&mut agent, SidrReq { service_id, private_data, ..question(1) });
        answer(&mut agent).map(|rep| rep.status)
    };
    assert_eq!(ask(header("10.0.0.2")), None, "the consumer is asked");
    assert_eq!(ask(header("10.0.0.3")), Some(SidrStatus::Unsupported));
    assert_eq!(ask(PrivateData::EMPTY), Some(SidrStatus::Rejected));
    // It names the right address, but came to another.
    let mut agent = Agent::new(exact(), Rng::from_u64(3));
    agent.listen(service_id, AddressFilter::Only("10.0.0.2".parse().unwrap()), 4).unwrap();
    let question = SidrReq { service_id, private_data: header("10.0.0.2"), ..question(1) };
    let from = MadAddress { local: gid(8), remote: gid(A) };
    agent.handle_mad(at(0), from, &Mad::new(TransactionId::new(5), question).emit());
    assert_eq!(answer(&mut agent).map(|rep| rep.status), Some(SidrStatus::Unsupported));
}

/// rxe's udaddy, from either side: our messages are its messages.
#[test]
fn udaddy_of_rxe_is_understood_and_spoken() {
    let fixture = by_name("udaddy").unwrap();
    let mads: Vec<Mad> = fixture
        .frames()
        .unwrap()
        .filter_map(|frame| {
            let packet = frame.udp_payload()?;
            (packet[0] == 0x64 && packet[5..8] == [0, 0, 1]).then(|| Mad::parse(&packet[20..276]).unwrap())
        })
        .collect();
    assert!(fixture.frames().unwrap().any(|frame| frame.direction() == Some(Direction::Node1ToNode2)));
    let (Message::SidrReq(req), Message::SidrRep(rep)) = (mads[0].message, mads[1].message) else { panic!() };
    let node = |n: u8| uroce::types::Gid::from(std::net::Ipv4Addr::new(10, 77, 0, n));
    // As the server.
    let mut server = Agent::new(exact(), Rng::from_u64(3));
    server.listen(req.service_id, AddressFilter::Only("10.77.0.2".parse().unwrap()), 4).unwrap();
    server.handle_mad(at(0), MadAddress { local: node(2), remote: node(1) }, &mads[0].emit());
    let Some(CmEvent::ServiceRequest(request)) = server.poll_event() else { panic!() };
    assert_eq!(request.ip.unwrap().source, std::net::IpAddr::from([10, 77, 0, 1]));
    let answer = ServiceAnswer { qpn: rep.qpn, qkey: rep.qkey, private_data: b"", ..service_answer() };
    server.answer_service(at(0), request.sidr, &answer).unwrap();
    assert_eq!(Mad::parse(&server.poll_mad().unwrap().bytes).unwrap(), mads[1]);
    // As the client: the same question, the numbers of the exchange aside.
    let mut client = Agent::new(exact(), Rng::from_u64(3));
    let to = MadAddress { local: node(1), remote: node(2) };
    let params = ResolveParams { to, service_id: req.service_id, private_data: req.private_data.as_bytes() };
    client.resolve_service(at(0), &params).unwrap();
    let Message::SidrReq(asked) = Mad::parse(&client.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    assert_eq!(SidrReq { request_id: req.request_id, ..asked }, req);
    let answer = Mad::new(TransactionId::new(5), SidrRep { request_id: asked.request_id, ..rep });
    client.handle_mad(at(1), to, &answer.emit());
    let Some(CmEvent::ServiceReply(reply)) = client.poll_event() else { panic!() };
    assert_eq!((reply.qpn, reply.qkey), (rep.qpn, QKey::RDMA_UDP));
}

/// A gate that lets in what comes from A's address, and writes down what it hears.
struct OnlyA(std::sync::mpsc::Sender<Notice>);

impl Gate for OnlyA {
    fn admit(&mut self, _: uroce::time::Instant, arrival: &Arrival<'_>) -> Admission {
        match arrival.kind() {
            _ if arrival.from.remote == gid(A) => Admission::Take,
            Some(MadKind::Req | MadKind::SidrReq) => Admission::Refuse(RejReason::ConsumerDefined),
            _ => Admission::Drop,
        }
    }

    fn notice(&mut self, _: uroce::time::Instant, notice: &Notice) {
        self.0.send(*notice).unwrap();
    }
}

#[test]
fn the_gate_is_asked_before_anything_is_made() {
    let (tx, rx) = std::sync::mpsc::channel();
    let mut agent = Agent::new(exact(), Rng::from_u64(3));
    agent.set_gate(Box::new(OnlyA(tx)));
    agent.listen(SERVICE, AddressFilter::Any, 4).unwrap();
    let stranger = MadAddress { remote: gid(9), ..from() };
    agent.handle_mad(at(0), stranger, &Mad::new(TransactionId::new(5), question(1)).emit());
    assert_eq!(answer(&mut agent).unwrap().status, SidrStatus::Rejected);
    let rep = SidrRep {
        request_id: 1,
        status: SidrStatus::Success,
        qpn: qpn(2),
        service_id: SERVICE,
        qkey: QKey::default(),
        info: uroce_cm::wire::Ari::EMPTY,
        private_data: PrivateData::EMPTY,
    };
    agent.handle_mad(at(0), stranger, &Mad::new(TransactionId::new(5), rep).emit());
    assert_eq!((agent.poll_mad(), agent.counters().not_admitted, agent.service_exchanges()), (None, 2, 0));
    // A friend is let in; what does no good is told.
    feed(&mut agent, question(1));
    assert_eq!(agent.service_exchanges(), 1);
    feed(&mut agent, SidrReq { service_id: ServiceId::new(99), ..question(2) });
    feed(&mut agent, rep);
    let heard: Vec<Notice> = rx.try_iter().collect();
    let outcomes: Vec<Outcome> = heard.iter().map(|n| n.outcome).collect();
    assert_eq!(outcomes, [Outcome::RefusedService(SidrStatus::Unsupported), Outcome::Unmatched]);
    assert_eq!((heard[0].service_id, heard[0].kind), (Some(ServiceId::new(99)), MadKind::SidrReq));
}
