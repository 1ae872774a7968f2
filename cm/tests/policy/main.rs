//! The policy at the agent's door: rules, rates, full tables and the audit log.

mod half_open;
#[path = "../agent/pair.rs"]
#[allow(dead_code, reason = "what other tests need of it")]
mod pair;

use std::sync::{Arc, Mutex};

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, PKey, Psn, QKey};
use uroce_cm::agent::{AddressFilter, CmEvent, ConnectParams, MadAddress, REFUSED_BY_POLICY};
use uroce_cm::comm::Path;
use uroce_cm::policy::{AuditEvent, AuditRecord, Callback, PolicyConfig, Rate};
use uroce_cm::wire::{
    CaGuid, CmTimeout, CommunicationId, Dreq, Lap, Mad, Message, PrivateData, RejReason, Rep, Req, ServiceId, SidrReq,
    SidrStatus, TransactionId,
};
use uroce_cm::{Agent, Policy};

use pair::{A, B, Pair, SERVICE, at, connect_params, exact, gid, ms, qpn};

/// What an audit log said.
type Lines = Arc<Mutex<Vec<String>>>;

pub(crate) fn server(config: PolicyConfig) -> Agent {
    let mut agent = Agent::new(exact(), Rng::from_u64(12));
    agent.set_policy(Policy::new(config, &mut Rng::from_u64(13)));
    agent.listen(SERVICE, AddressFilter::Any, usize::MAX).unwrap();
    agent
}

/// A server that writes down what it does.
fn audited(config: PolicyConfig) -> (Agent, Lines) {
    let lines = Lines::default();
    let sink = Arc::clone(&lines);
    let sink = Callback(move |r: &AuditRecord<'_>| sink.lock().unwrap().push(r.to_json()));
    let mut agent = Agent::new(exact(), Rng::from_u64(12));
    let policy = Policy::new(config, &mut Rng::from_u64(13));
    agent.set_policy(policy.with_audit(Box::new(sink), Duration::from_secs(1_800_000_000)));
    agent.listen(SERVICE, AddressFilter::Any, usize::MAX).unwrap();
    (agent, lines)
}

pub(crate) fn peer(n: u32) -> Gid {
    std::net::Ipv4Addr::from(0x0b00_0000 + n).into()
}

/// Request `n` of a peer, unlike all others.
pub(crate) fn req(from: Gid, n: u32, service_id: ServiceId) -> Req {
    let mut client = Agent::new(exact(), Rng::from_u64(11));
    let params = ConnectParams { path: Path::new(from, gid(B)), service_id, ..connect_params(A) };
    client.connect(at(0), &params).unwrap();
    let Message::Req(good) = Mad::parse(&client.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    Req {
        local_comm_id: CommunicationId::new(n + 1),
        local_qpn: qpn(n % 0xff_0000 + 16),
        ca_guid: CaGuid::new(u64::from(n) << 20 | 1),
        ..good
    }
}

pub(crate) fn feed(agent: &mut Agent, now: Instant, from: Gid, message: impl Into<Message>) {
    let from = MadAddress { local: gid(B), remote: from };
    agent.handle_mad(now, from, &Mad::new(TransactionId::new(5), message).emit());
}

fn answer(agent: &mut Agent) -> Option<Message> {
    agent.poll_mad().map(|mad| Mad::parse(&mad.bytes).unwrap().message)
}

fn dreq(n: u32) -> Dreq {
    Dreq {
        local_comm_id: CommunicationId::new(n),
        remote_comm_id: CommunicationId::new(0xdead),
        remote_qpn: qpn(3),
        reserved: 0,
        private_data: PrivateData::EMPTY,
    }
}

fn rep_for_nobody() -> Rep {
    Rep {
        local_comm_id: CommunicationId::new(9),
        remote_comm_id: CommunicationId::new(0xdead),
        local_qkey: QKey::default(),
        local_qpn: qpn(0x30),
        local_eecn: 0,
        vendor_id: [0; 3],
        starting_psn: Psn::ZERO,
        responder_resources: 4,
        initiator_depth: 4,
        target_ack_delay: 0,
        failover_accepted: 0,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        reserved: 0,
        ca_guid: CaGuid::new(77),
        private_data: PrivateData::EMPTY,
    }
}

fn lap_for_nobody() -> Lap {
    Lap {
        local_comm_id: CommunicationId::new(9),
        remote_comm_id: CommunicationId::new(0xdead),
        reserved: 0,
        remote_qpn: qpn(3),
        remote_response_timeout: CmTimeout::DEFAULT_RESPONSE,
        local_lid: 0xffff,
        remote_lid: 0xffff,
        local_gid: peer(1),
        remote_gid: gid(B),
        flow_label: 7,
        traffic_class: 0,
        hop_limit: 64,
        packet_rate: 0,
        service_level: 0,
        subnet_local: false,
        ack_timeout: 14,
        private_data: PrivateData::EMPTY,
    }
}

const LAB: &str = r#"
    default = "reject"
    [[rule]]
    name = "black sheep"
    action = "drop"
    from = "11.0.0.66"
    [[rule]]
    name = "lab"
    action = "allow"
    from = ["11.0.0.0/24", "fd77::/32"]
    service = ["0x1000000000000042"]
"#;

#[test]
fn rules_decide_before_there_is_state() {
    let (mut agent, lines) = audited(PolicyConfig::from_toml(LAB).unwrap());
    feed(&mut agent, at(1), peer(1), req(peer(1), 1, SERVICE));
    assert!(matches!(agent.poll_event(), Some(CmEvent::ConnectRequest(r)) if r.from.remote == peer(1)));
    assert_eq!(answer(&mut agent), None);

    // Allowed, but not for this service; and from elsewhere.
    for (from, service) in [(peer(1), ServiceId::new(7)), (peer(256), SERVICE)] {
        feed(&mut agent, at(2), from, req(from, 2, service));
        let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!() };
        assert_eq!((rej.reason, rej.remote_comm_id), (RejReason::ConsumerDefined, CommunicationId::new(3)));
        assert!(rej.private_data.as_bytes().starts_with(REFUSED_BY_POLICY));
        assert_eq!(agent.poll_event(), None);
    }
    feed(&mut agent, at(3), peer(66), req(peer(66), 3, SERVICE));
    assert_eq!((answer(&mut agent), agent.poll_event()), (None, None));
    assert_eq!(agent.communications(), 1);

    let counters = agent.policy().unwrap().counters();
    assert_eq!((counters.admitted, counters.rejected, counters.dropped, counters.audit_written), (1, 2, 1, 4));
    let lines = lines.lock().unwrap();
    assert_eq!(
        lines[0],
        "{\"time\":1800000000.001,\"event\":\"admitted\",\"message\":\"REQ\",\"remote_comm_id\":\"0x00000002\",\"qpn\":17,\
         \"source_gid\":\"::ffff:11.0.0.1\",\"service_id\":\"0x1000000000000042\",\"rule\":\"lab\"}"
    );
    for (line, (event, rule)) in
        lines.iter().skip(1).zip([("rejected", "default"), ("rejected", "default"), ("dropped", "black sheep")])
    {
        assert!(line.contains(&format!("\"event\":\"{event}\"")) && line.contains(&format!("\"rule\":\"{rule}\"")));
    }
}

#[test]
fn a_datagram_service_obeys_the_same_rules() {
    let mut agent = server(PolicyConfig::from_toml(LAB).unwrap());
    let sidr = SidrReq {
        request_id: 0x55,
        pkey: PKey::DEFAULT,
        reserved: 0,
        service_id: SERVICE,
        private_data: PrivateData::EMPTY,
    };
    feed(&mut agent, at(0), peer(256), sidr);
    let Some(Message::SidrRep(rep)) = answer(&mut agent) else { panic!() };
    assert_eq!((rep.request_id, rep.status), (0x55, SidrStatus::Rejected));
    feed(&mut agent, at(0), peer(66), sidr);
    assert_eq!(answer(&mut agent), None);
}

#[test]
fn a_source_has_its_burst_and_its_rate_and_does_not_touch_others() {
    let mut agent = server(PolicyConfig::default());
    let ask = |agent: &mut Agent, now, from, first: u32| {
        let before = agent.communications();
        for n in first..first + 500 {
            feed(agent, now, from, req(from, n, SERVICE));
        }
        agent.communications() - before
    };
    assert_eq!(ask(&mut agent, at(0), peer(1), 0), 200);
    assert_eq!(ask(&mut agent, at(0), peer(2), 1000), 200);
    assert_eq!(ask(&mut agent, at(1000), peer(1), 2000), 100);
    assert_eq!(agent.policy().unwrap().counters().source_limited, 300 + 300 + 400);
    assert_eq!(answer(&mut agent), None, "beyond its rate a source is not answered");
}

#[test]
fn in_all_there_is_a_rate_with_a_share_for_those_that_were_not_served() {
    let total = Rate { per_second: 100, burst: 100 };
    let mut agent = server(PolicyConfig { total, ..PolicyConfig::default() });
    let mut admitted = |now, from: u32, n| {
        let before = agent.policy().unwrap().counters().admitted;
        for i in 0..n {
            feed(&mut agent, now, peer(from), req(peer(from), from * 1000 + i, SERVICE));
        }
        agent.policy().unwrap().counters().admitted - before
    };
    // One source takes what is for all, and the first token of the rest.
    assert_eq!(admitted(at(0), 1, 150), 80);
    // The share that is kept is there for others, one each.
    assert_eq!((2..40).map(|from| admitted(at(0), from, 3)).sum::<u64>(), 20);
    // A second later the first has four fifths again.
    assert_eq!(admitted(at(1000), 1, 150), 80);
    // After ten seconds without service it counts as new: one from the share.
    assert_eq!((admitted(at(12_000), 100, 150), admitted(at(12_000), 1, 50)), (80, 1));
}

#[test]
fn messages_for_nobody_are_answered_at_a_rate() {
    let mut agent = server(PolicyConfig::default());
    for n in 0..1000 {
        feed(&mut agent, at(0), peer(1), dreq(n));
    }
    assert_eq!(std::iter::from_fn(|| answer(&mut agent)).count(), 200);
    feed(&mut agent, at(0), peer(2), dreq(1));
    assert!(matches!(answer(&mut agent), Some(Message::Drep(_))));
    let from = MadAddress { local: gid(B), remote: peer(3) };
    for _ in 0..300 {
        agent.handle_mad(at(0), from, &[0xff; 256]);
    }
    let counters = agent.policy().unwrap().counters();
    assert_eq!((counters.bad_mads, counters.bad_limited), (1301, 900));
    // They took nothing from requests.
    feed(&mut agent, at(0), peer(1), req(peer(1), 1, SERVICE));
    assert!(matches!(agent.poll_event(), Some(CmEvent::ConnectRequest(_))));
}

/// Who is dropped does not learn that somebody is here: not by messages either that no rule judges.
#[test]
fn a_source_that_is_dropped_is_not_answered_whatever_it_sends() {
    let (mut agent, lines) = audited(PolicyConfig::from_toml(LAB).unwrap());
    let say_all = |agent: &mut Agent, from| {
        let mut answers = Vec::new();
        let messages: [Message; 3] = [dreq(1).into(), rep_for_nobody().into(), lap_for_nobody().into()];
        for message in messages {
            feed(agent, at(1), from, message);
            answers.extend(answer(agent).map(|m| m.kind().name()));
        }
        let mut of_another_version = Mad::new(TransactionId::new(5), req(from, 1, SERVICE)).emit();
        of_another_version[2] = 3;
        agent.handle_mad(at(1), MadAddress { local: gid(B), remote: from }, &of_another_version);
        answers.extend(answer(agent).map(|m| m.kind().name()));
        answers
    };
    assert_eq!(say_all(&mut agent, peer(1)), ["DREP", "REJ", "APR", "REJ"]);
    // A rejection tells that somebody is here.
    assert_eq!(say_all(&mut agent, peer(256)), ["DREP", "REJ", "APR", "REJ"]);
    assert_eq!(say_all(&mut agent, peer(66)), [""; 0]);
    let lines = lines.lock().unwrap();
    assert_eq!(lines.iter().filter(|l| l.contains("\"event\":\"stray\"")).count(), 9, "{lines:?}");
    assert_eq!(lines.iter().filter(|l| l.contains("\"event\":\"bad_mad\"")).count(), 3, "{lines:?}");

    // With nothing but one service open to a network, a peer of it still gets its DREP; others do not.
    let only =
        "default = \"drop\"\n[[rule]]\nname = \"lab\"\naction = \"allow\"\nfrom = \"11.0.0.0/24\"\nservice = \"tcp:1\"";
    let mut agent = server(PolicyConfig::from_toml(only).unwrap());
    assert_eq!(say_all(&mut agent, peer(1)).len(), 4);
    assert_eq!(say_all(&mut agent, peer(256)).len(), 0);
}

#[test]
fn a_rejection_is_no_amplifier() {
    let mut agent = server(PolicyConfig::from_toml("default = \"reject\"").unwrap());
    for n in 0..1000 {
        feed(&mut agent, at(0), peer(1), req(peer(1), n, SERVICE));
    }
    assert_eq!(std::iter::from_fn(|| answer(&mut agent)).count(), 200);
    assert_eq!(agent.policy().unwrap().counters().rejected, 1000);
}

#[test]
fn a_backlog_is_bounded_whatever_the_listener_asked_for() {
    let mut agent = server(PolicyConfig::from_toml("[limits]\nbacklog = 3").unwrap());
    for n in 0..5 {
        feed(&mut agent, at(0), peer(n), req(peer(n), n, SERVICE));
    }
    assert_eq!((agent.communications(), agent.counters().overflows), (3, 2));
}

#[test]
fn the_log_tells_a_connection_from_end_to_end_and_no_secrets() {
    let mut pair = Pair::new();
    let (agent, lines) = audited(PolicyConfig::default());
    pair.agents[B] = agent;
    let local = pair.fresh_qpn();
    let comm = pair.connect_from(A, local, b"s3cret of the client");
    pair.run_for(ms(20));
    pair.agents[A].disconnect(pair.now, comm, b"s3cret goodbye").unwrap();
    pair.run_for(ms(20));
    let lines = lines.lock().unwrap();
    let events: Vec<&str> = lines.iter().map(|l| l.split('"').nth(5).unwrap()).collect();
    assert_eq!(events, ["admitted", "established", "disconnected"]);
    for line in lines.iter() {
        assert!(!line.contains("s3cret") && !line.contains("115,51"), "{line}");
        assert!(
            line.contains(&format!("\"qpn\":{}", local.get())) && line.contains("\"source_gid\":\"::ffff:10.0.0.1\"")
        );
    }
    let ids = "\"local_comm_id\":\"0x";
    assert!(!lines[0].contains(ids) && lines[1].contains(ids) && lines[1].contains("\"remote_comm_id\":\"0x"));
    assert!(lines[2].contains(ids) && lines[2].contains("\"service_id\":\"0x1000000000000042\""), "{}", lines[2]);
}

#[test]
fn refusals_have_their_reason_in_the_log() {
    let (mut agent, lines) = audited(PolicyConfig::default());
    feed(&mut agent, at(0), peer(1), req(peer(1), 1, ServiceId::new(9)));
    feed(&mut agent, at(0), peer(1), req(peer(1), 2, SERVICE));
    let Some(CmEvent::ConnectRequest(request)) = agent.poll_event() else { panic!() };
    agent.reject(request.comm, RejReason::NoResources, b"", b"not today").unwrap();
    let lines = lines.lock().unwrap();
    assert!(lines[1].contains("\"event\":\"refused\"") && lines[1].contains("\"reason\":8,"), "{}", lines[1]);
    assert!(lines[3].contains("\"event\":\"refused\"") && lines[3].contains("\"reason\":3,"), "{}", lines[3]);
    assert!(lines[3].contains(RejReason::NoResources.describe()) && !lines[3].contains("today"));
}

#[test]
fn a_flood_shows_in_the_log_as_a_number() {
    let (mut agent, lines) = audited(PolicyConfig::from_toml("[audit]\nrate = 10\nburst = 5").unwrap());
    for n in 0..100 {
        feed(&mut agent, at(0), peer(1), dreq(n));
    }
    assert_eq!(lines.lock().unwrap().len(), 5);
    // The agent asks to be called for what it has not said yet.
    assert_eq!(agent.poll_timeout(), Some(at(100)));
    agent.handle_timeout(at(100));
    let last = lines.lock().unwrap().last().cloned().unwrap();
    assert_eq!(last, "{\"time\":1800000000.1,\"event\":\"suppressed\",\"count\":95}");
    assert_eq!(agent.poll_timeout(), None);
}

#[test]
fn an_alarm_of_the_device_is_counted_and_written_down() {
    let (mut agent, lines) = audited(PolicyConfig::default());
    agent.policy_mut().unwrap().probing(peer(9));
    assert_eq!(agent.policy().unwrap().counters().probe_alarms, 1);
    assert!(lines.lock().unwrap()[0].contains("\"event\":\"probing\",\"source_gid\":\"::ffff:11.0.0.9\""));
    assert_eq!(AuditRecord::new(AuditEvent::Probing).qpn, None);
}

#[test]
fn the_example_of_the_book_is_a_policy() {
    let page = include_str!("../../../docs/src/policy.md");
    let text = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let policy = PolicyConfig::from_toml(text).unwrap();
    assert_eq!(
        policy.rules.rules.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(),
        ["black sheep", "storage network"]
    );
    // The figures of its table.
    let usual = PolicyConfig::default();
    assert_eq!((usual.limits.half_open_records(), usual.limits.timewait_records()), (1638, 29_127));
    for line in page.lines().filter(|l| l.starts_with("{\"time\"")) {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(record["event"].is_string());
    }
}

/// The log names the reason that left: 28 for a full backlog, as Linux's.
#[test]
fn a_full_backlog_has_its_reason_in_the_log() {
    let (mut agent, lines) = audited(PolicyConfig::from_toml("[limits]\nbacklog = 1").unwrap());
    feed(&mut agent, at(0), peer(1), req(peer(1), 1, SERVICE));
    feed(&mut agent, at(0), peer(2), req(peer(2), 2, SERVICE));
    let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!() };
    assert_eq!(rej.reason.code(), 28);
    let lines = lines.lock().unwrap();
    let last = lines.last().unwrap();
    assert!(last.contains("\"event\":\"refused\"") && last.contains("\"reason\":28,"), "{last}");
}
