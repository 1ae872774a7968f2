//! The captures of rdma_rxe, fed to the agent in the place of one of the two nodes.
//!
//! With rxe's ids, GUID and PSNs, and consumers that do what rxe's did, the agent must send the messages that rxe sent:
//! every field of the message, in the same order. Only the transaction id of a DREQ differs (ours is random, rxe derives
//! it from its communication id; both are allowed), and times.

use std::collections::VecDeque;

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{PathMtu, RetryCount, RnrRetry};
use uroce_cm::agent::{AcceptParams, AddressFilter, ConnectParams, MadAddress, Preset};
use uroce_cm::comm::{CommState, Path};
use uroce_cm::wire::{CmTimeout, CommunicationId, Mad, Message, RejReason, Rep, Req};
use uroce_cm::{Agent, CmEvent, CommId, Config, RetryPolicy};
use uroce_fixtures::{Direction, Fixture};

use crate::pair::exact;

/// The CM MADs of a capture and whether our node sent them.
fn mads(fixture: &Fixture, us: Direction) -> Vec<(bool, Mad)> {
    let frames = fixture.frames().unwrap();
    let mads = frames.filter_map(|frame| {
        let packet = frame.udp_payload()?;
        let to_qp1 = packet[0] == 0x64 && packet[5..8] == [0, 0, 1];
        to_qp1.then(|| (frame.direction() == Some(us), Mad::parse(&packet[20..packet.len() - 4]).unwrap()))
    });
    mads.collect()
}

fn addresses(script: &[(bool, Mad)]) -> Option<MadAddress> {
    script.iter().find_map(|(ours, mad)| match mad.message {
        Message::Req(req) if *ours => Some(MadAddress { local: req.primary.local_gid, remote: req.primary.remote_gid }),
        Message::Req(req) => Some(MadAddress { local: req.primary.remote_gid, remote: req.primary.local_gid }),
        _ => None,
    })
}

/// rxe's GUID, patience and limits.
fn config(script: &[(bool, Mad)]) -> Config {
    let mut config = Config {
        retry: RetryPolicy { initial: Duration::from_nanos(4096 << 20), ..exact().retry },
        response_timeout: CmTimeout::new(20).unwrap(),
        max_responder_resources: 255,
        ..exact()
    };
    for (ours, mad) in script {
        match mad.message {
            Message::Req(req) if *ours => config.ca_guid = Some(req.ca_guid),
            Message::Rep(rep) if *ours => {
                config.ca_guid = Some(rep.ca_guid);
                config.ack_delay = rep.target_ack_delay;
            }
            Message::Mra(mra) if *ours => config.service_timeout = mra.service_timeout,
            _ => {}
        }
    }
    config
}

fn params(req: &Req) -> ConnectParams<'_> {
    ConnectParams {
        path: Path {
            flow_label: req.primary.flow_label,
            traffic_class: req.primary.traffic_class,
            hop_limit: req.primary.hop_limit,
            service_level: req.primary.service_level,
            mtu: PathMtu::from_code(req.path_mtu_code).unwrap(),
            ack_timeout: req.primary.local_ack_timeout(),
            ..Path::new(req.primary.local_gid, req.primary.remote_gid)
        },
        service_id: req.service_id,
        transport: req.transport,
        local_qpn: req.local_qpn,
        starting_psn: Some(req.starting_psn),
        srq: req.srq,
        responder_resources: req.responder_resources,
        initiator_depth: req.initiator_depth,
        retry_count: RetryCount::new(req.retry_count).unwrap(),
        rnr_retry: RnrRetry::new(req.rnr_retry_count).unwrap(),
        flow_control: req.flow_control,
        alternate: None,
        peer_to_peer: false,
        private_data: req.private_data.as_bytes(),
    }
}

fn accept(rep: &Rep) -> AcceptParams<'_> {
    AcceptParams {
        local_qpn: rep.local_qpn,
        starting_psn: Some(rep.starting_psn),
        srq: rep.srq,
        responder_resources: rep.responder_resources,
        initiator_depth: rep.initiator_depth,
        rnr_retry: RnrRetry::new(rep.rnr_retry_count).unwrap(),
        flow_control: rep.flow_control,
        failover: uroce_cm::agent::Failover::Unsupported,
        private_data: rep.private_data.as_bytes(),
    }
}

struct Replay {
    agent: Agent,
    now: Instant,
    /// Our id of each communication, and its handle.
    comms: Vec<(CommunicationId, CommId)>,
}

impl Replay {
    fn new(script: &[(bool, Mad)]) -> Self {
        Self { agent: Agent::new(config(script), Rng::from_u64(1)), now: Instant::ZERO, comms: Vec::new() }
    }

    fn comm(&self, id: CommunicationId) -> CommId {
        self.comms.iter().find(|(known, _)| *known == id).unwrap_or_else(|| panic!("no communication {id}")).1
    }

    /// What rxe's consumer did before rxe sent `mad`.
    fn act(&mut self, mad: &Mad) {
        let now = self.now;
        match &mad.message {
            Message::Req(req) if self.comms.iter().any(|(id, _)| *id == req.local_comm_id) => self.let_time_pass(),
            Message::Req(req) => {
                let ids = Preset { comm_id: req.local_comm_id, transaction: mad.header.transaction_id };
                self.agent.preset(ids);
                let comm = self.agent.connect(now, &params(req)).unwrap();
                self.comms.push((req.local_comm_id, comm));
            }
            Message::Rep(rep) => match self.agent.accept(now, self.comm(rep.local_comm_id), &accept(rep)) {
                Ok(_) => {}
                Err(_) => self.let_time_pass(),
            },
            Message::Rtu(rtu) => {
                let comm = self.comm(rtu.local_comm_id);
                self.agent.confirm(comm, rtu.private_data.as_bytes()).unwrap();
            }
            Message::Rej(rej) if rej.reason == RejReason::ConsumerDefined => {
                let comm = self.comm(rej.local_comm_id);
                self.agent.reject(comm, rej.reason, rej.ari.as_bytes(), rej.private_data.as_bytes()).unwrap();
            }
            Message::Rej(rej) if rej.reason == RejReason::Timeout => {
                self.agent.abandon(now, self.comm(rej.local_comm_id));
            }
            Message::Dreq(dreq) => {
                let comm = self.comm(dreq.local_comm_id);
                // After a stale REQ the agent has begun by itself.
                let _ = self.agent.disconnect(now, comm, dreq.private_data.as_bytes());
            }
            Message::Drep(drep) => {
                let comm = self.comm(drep.local_comm_id);
                // Where both disconnect at once the agent has answered by itself.
                let _ = self.agent.disconnect(now, comm, &[]);
            }
            _ => {}
        }
    }

    /// rxe repeated a message: so do we when our timer is due.
    fn let_time_pass(&mut self) {
        self.now = self.agent.poll_timeout().unwrap();
        self.agent.handle_timeout(self.now);
    }
}

/// Replays a capture in the place of `us`; returns how many messages were compared.
fn replay(name: &str, us: Direction) -> usize {
    let fixture = uroce_fixtures::by_name(name).unwrap();
    let script = mads(fixture, us);
    let address = addresses(&script).unwrap();
    let mut it = Replay::new(&script);
    listen(&mut it.agent, &script);
    let mut compared = 0;
    let mut early = VecDeque::new();
    for (ours, mad) in &script {
        it.now = it.now + Duration::from_micros(10);
        if *ours {
            it.act(mad);
        } else {
            if let Message::Req(req) = &mad.message {
                preset_answer(&mut it, &script, req.local_comm_id);
            }
            it.agent.handle_mad(it.now, address, &mad.emit());
        }
        while let Some(event) = it.agent.poll_event() {
            if let (CmEvent::ConnectRequest(req), Message::Req(m)) = (&event, &mad.message) {
                let id = our_id_for(&script, m.local_comm_id).unwrap();
                it.comms.push((id, req.comm));
            }
        }
        while let Some(sent) = it.agent.poll_mad() {
            assert_eq!(sent.to, address, "{name}");
            early.push_back(Mad::parse(&sent.bytes).unwrap());
        }
        if *ours {
            let sent = take(&mut early, mad).unwrap_or_else(|| panic!("{name}: nothing instead of {mad:?}"));
            assert_eq!(sent.message, mad.message, "{name}");
            if !matches!(mad.message, Message::Dreq(_)) {
                assert_eq!(sent.header, mad.header, "{name}: {}", mad.message.kind());
            }
            compared += 1;
        }
    }
    assert!(early.is_empty(), "{name}: rxe did not send {early:?}");
    compared
}

/// What we sent in the place of `mad`. A stale REQ is refused and ends another connection: rxe says the one first, we the
/// other.
fn take(sent: &mut VecDeque<Mad>, mad: &Mad) -> Option<Mad> {
    match mad.message {
        Message::Rej(rej) if rej.reason == RejReason::StaleConnection => {
            sent.remove(sent.iter().position(|s| matches!(s.message, Message::Rej(_)))?)
        }
        _ => sent.pop_front(),
    }
}

/// The id that our node gave to the communication which the peer calls `theirs`.
fn our_id_for(script: &[(bool, Mad)], theirs: CommunicationId) -> Option<CommunicationId> {
    script.iter().filter(|(ours, _)| *ours).find_map(|(_, mad)| {
        let answers = mad.message.remote_comm_id() == Some(theirs);
        mad.message.local_comm_id().filter(|id| answers && *id != CommunicationId::NONE)
    })
}

fn preset_answer(it: &mut Replay, script: &[(bool, Mad)], theirs: CommunicationId) {
    if let Some(comm_id) = our_id_for(script, theirs) {
        it.agent.preset(Preset { comm_id, transaction: Default::default() });
    }
}

/// Listens where rxe's node did: on what it answered with anything but reason 8.
fn listen(agent: &mut Agent, script: &[(bool, Mad)]) {
    for (ours, mad) in script {
        if let Message::Req(req) = mad.message
            && !ours
            && our_id_for(script, req.local_comm_id).is_some()
        {
            // A second REQ for the same service finds it taken.
            let _ = agent.listen(req.service_id, AddressFilter::Any, 128);
        }
    }
}

#[test]
fn in_the_place_of_the_server() {
    assert_eq!(replay("rping_v4", Direction::Node2ToNode1), 2);
    assert_eq!(replay("rping_v6_ula", Direction::Node2ToNode1), 2);
    assert_eq!(replay("rlab_basic_cm", Direction::Node2ToNode1), 2);
    assert_eq!(replay("rlab_basic_cm6", Direction::Node2ToNode1), 2);
    assert_eq!(replay("rdma_client", Direction::Node2ToNode1), 2);
    assert_eq!(replay("ucmatose", Direction::Node2ToNode1), 4);
    assert_eq!(replay("cmtime_10", Direction::Node2ToNode1), 20);
    assert_eq!(replay("cm_rej_user", Direction::Node2ToNode1), 1);
    assert_eq!(replay("cm_rej_noport", Direction::Node2ToNode1), 1);
    // MRA to the second REQ, and REP once the program accepts.
    assert_eq!(replay("cm_mra", Direction::Node2ToNode1), 3);
    // REP; to the REQ that uses the QP again, REJ 10, and DREQ on the connection that stood.
    assert_eq!(replay("cm_rej_stale", Direction::Node2ToNode1), 3);
}

#[test]
fn in_the_place_of_the_client() {
    assert_eq!(replay("rping_v4", Direction::Node1ToNode2), 3);
    assert_eq!(replay("rping_v6_ll", Direction::Node1ToNode2), 3);
    assert_eq!(replay("rlab_basic_cm", Direction::Node1ToNode2), 3);
    assert_eq!(replay("cm_rej_user", Direction::Node1ToNode2), 1);
    assert_eq!(replay("cm_rej_noport", Direction::Node1ToNode2), 1);
    // REQ three times, then the end of the program: REJ 4.
    assert_eq!(replay("cm_req_noanswer", Direction::Node1ToNode2), 4);
    // REQ twice; the MRA keeps the third one back.
    assert_eq!(replay("cm_mra", Direction::Node1ToNode2), 4);
}

#[test]
fn a_rep_that_is_lost_comes_again() {
    assert_eq!(replay("loss_cm_rep", Direction::Node2ToNode1), 3);
}

/// rxe's MRA asks for code 24: 4.096 µs times 2 to the 24th, 68.7 s.
#[test]
fn an_mra_of_rxe_buys_its_program_time() {
    let script = mads(uroce_fixtures::by_name("cm_mra").unwrap(), Direction::Node1ToNode2);
    let address = addresses(&script).unwrap();
    let [(true, req), (true, again), (false, mra), (false, rep), ..] = &script[..] else { panic!("{script:?}") };
    let mut it = Replay::new(&script);
    it.act(req);
    it.act(again);
    let comm = it.comm(req.message.local_comm_id().unwrap());
    it.agent.handle_mad(it.now, address, &mra.emit());
    assert_eq!(it.agent.state(comm), Some(CommState::MraReqRcvd));
    assert!(it.agent.poll_timeout().unwrap() >= it.now + Duration::from_nanos(4096 << 24));
    while it.agent.poll_mad().is_some() {}

    it.now = it.now + Duration::from_secs(60);
    it.agent.handle_timeout(it.now);
    assert!(it.agent.poll_mad().is_none(), "the third REQ waits");
    it.agent.handle_mad(it.now, address, &rep.emit());
    assert!(matches!(it.agent.poll_event(), Some(CmEvent::Reply(reply)) if reply.comm == comm));
}

/// A client that has lost its memory but not its QPN. It cannot have asked with a QP that it knows to be taken.
#[test]
fn a_restarted_client_hears_that_its_qp_is_stale() {
    let script = mads(uroce_fixtures::by_name("cm_rej_stale").unwrap(), Direction::Node1ToNode2);
    let address = addresses(&script).unwrap();
    let [.., (true, req), (false, rej), (false, dreq), (true, drep)] = &script[..] else { panic!("{script:?}") };
    let mut it = Replay::new(&script);
    it.act(req);
    let comm = it.comm(req.message.local_comm_id().unwrap());
    assert_eq!(Mad::parse(&it.agent.poll_mad().unwrap().bytes), Ok(*req));

    it.agent.handle_mad(it.now, address, &rej.emit());
    let Some(CmEvent::Rejected(rejection)) = it.agent.poll_event() else { panic!("no refusal") };
    assert_eq!((rejection.comm, rejection.reason), (comm, RejReason::StaleConnection));
    assert!(rejection.timewait, "the QP waits");

    // What it has forgotten it ends all the same, with rxe's words.
    it.agent.handle_mad(it.now, address, &dreq.emit());
    assert_eq!(Mad::parse(&it.agent.poll_mad().unwrap().bytes), Ok(*drep));
    assert!(it.agent.poll_mad().is_none());
}
