//! Peers that begin and never finish: nothing they do lasts, and who means it gets through.

use uroce::time::Instant;
use uroce::types::Gid;
use uroce_cm::Agent;
use uroce_cm::agent::{AcceptParams, CmEvent};
use uroce_cm::policy::{PolicyConfig, Rate};
use uroce_cm::wire::{
    CmTimeout, CommunicationId, Mad, MadKind, Message, Mra, MraedMessage, PrivateData, Rep, Req, Rtu,
};

use crate::pair::{SERVICE, accept_params, at, qpn};
use crate::{feed, peer, req, server};

/// A server that accepts at once; its QPs are numbers.
struct Server {
    agent: Agent,
    next_qpn: u32,
    established: usize,
    unreachable: usize,
}

impl Server {
    fn new(config: PolicyConfig) -> Self {
        Self { agent: server(config), next_qpn: 0x10_0000, established: 0, unreachable: 0 }
    }

    /// Answers events; returns the REPs that go out, with whom they go to.
    fn run(&mut self, now: Instant) -> Vec<(Gid, Rep)> {
        while let Some(event) = self.agent.poll_event() {
            match event {
                CmEvent::ConnectRequest(request) => {
                    self.next_qpn += 1;
                    let params = AcceptParams { local_qpn: qpn(self.next_qpn), ..accept_params() };
                    self.agent.accept(now, request.comm, &params).unwrap();
                }
                CmEvent::Established { .. } => self.established += 1,
                CmEvent::Unreachable { message, .. } => {
                    assert_eq!(message, MadKind::Rep);
                    self.unreachable += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        let mut reps = Vec::new();
        while let Some(mad) = self.agent.poll_mad() {
            if let Message::Rep(rep) = Mad::parse(&mad.bytes).unwrap().message {
                reps.push((mad.to.remote, rep));
            }
        }
        reps
    }

    /// Lets timers run up to `end`.
    fn run_until(&mut self, end: Instant) {
        while let Some(due) = self.agent.poll_timeout().filter(|due| *due <= end) {
            self.agent.handle_timeout(due);
            self.run(due);
        }
    }
}

fn unlimited() -> PolicyConfig {
    let rate = Rate { per_second: 10_000_000, burst: 10_000_000 };
    PolicyConfig { source: rate, total: rate, ..PolicyConfig::default() }
}

fn rtu(rep: &Rep) -> Rtu {
    Rtu { local_comm_id: rep.remote_comm_id, remote_comm_id: rep.local_comm_id, private_data: PrivateData::EMPTY }
}

#[test]
fn the_oldest_gives_way_and_the_newcomer_is_served() {
    let mut server = Server::new(PolicyConfig::from_toml("[limits]\nhalf_open = 10").unwrap());
    for n in 0..10u32 {
        feed(&mut server.agent, at(0), peer(n), req(peer(n), n, SERVICE));
        assert_eq!(server.run(at(0)).len(), 1);
    }
    // Too young to be given up.
    feed(&mut server.agent, at(99), peer(50), req(peer(50), 50, SERVICE));
    assert!(server.run(at(99)).is_empty());
    assert_eq!((server.agent.half_open(), server.agent.counters().overflows), (10, 1));
    // Peer 3 goes on; it is not the one to give way.
    let again = req(peer(3), 3, SERVICE);
    feed(&mut server.agent, at(100), peer(3), again);
    let (_, rep) = server.run(at(100)).remove(0);
    feed(&mut server.agent, at(100), peer(3), rtu(&rep));
    server.run(at(100));
    for n in 50..60 {
        feed(&mut server.agent, at(101), peer(n), req(peer(n), n, SERVICE));
        assert_eq!(server.run(at(101)).len(), 1, "{n}");
    }
    assert_eq!((server.agent.half_open(), server.established, server.unreachable), (10, 1, 9));
    assert_eq!(server.agent.policy().unwrap().counters().evicted, 9);
    assert_eq!(server.agent.communications(), 11);
}

#[test]
fn requests_that_the_program_has_not_answered_do_not_give_way() {
    let mut agent = server(PolicyConfig::from_toml("[limits]\nhalf_open = 10").unwrap());
    for n in 0..20u32 {
        feed(&mut agent, at(u64::from(n) * 200), peer(n), req(peer(n), n, SERVICE));
    }
    assert_eq!((agent.half_open(), agent.counters().overflows), (10, 10));
}

#[test]
fn ten_thousand_peers_that_never_confirm_are_reaped() {
    let mut server = Server::new(unlimited());
    let most = server.agent.config().limits.half_open;
    for n in 0..10_000u32 {
        // As patient as a REQ can be: 15 retries, 2.4 hours to answer.
        let slow =
            Req { local_response_timeout: CmTimeout::new(31).unwrap(), max_cm_retries: 15, ..req(peer(n), n, SERVICE) };
        let now = at(u64::from(n) / 5);
        feed(&mut server.agent, now, peer(n), slow);
        server.run(now);
        assert!(server.agent.half_open() <= most);
    }
    assert_eq!(server.agent.half_open(), most);
    // All gone after sixteen sendings, the longest wait 17.2 s and a tenth more.
    server.run_until(at(2_000 + 16 * 19_000));
    assert_eq!((server.agent.half_open(), server.agent.communications()), (0, 0));
    let turned_away = usize::try_from(server.agent.counters().overflows).unwrap();
    assert_eq!((server.established, server.unreachable + turned_away), (0, 10_000));
    assert_eq!(server.agent.poll_timeout(), None);
}

#[test]
fn ten_thousand_peers_that_ask_for_time_for_ever_are_reaped() {
    let mut server = Server::new(unlimited());
    let mut live = Vec::new();
    for n in 0..10_000u32 {
        let now = at(u64::from(n) / 5);
        feed(&mut server.agent, now, peer(n), req(peer(n), n, SERVICE));
        live.extend(server.run(now));
    }
    let cap = server.agent.config().mra_cap;
    // Every second each of them asks for two hours more, for ever.
    let begin = at(2_000);
    for second in 0..cap.as_secs() + 10 {
        let now = begin + uroce::time::Duration::from_secs(second);
        for (from, rep) in &live {
            let mra = Mra {
                local_comm_id: rep.remote_comm_id,
                remote_comm_id: rep.local_comm_id,
                message: MraedMessage::Rep,
                service_timeout: CmTimeout::new(31).unwrap(),
                private_data: PrivateData::EMPTY,
            };
            feed(&mut server.agent, now, *from, mra);
        }
        server.run_until(now);
        server.run(now);
        if second == 1 {
            assert!(server.agent.half_open() > 0);
            live.retain(|(_, rep)| rep.local_comm_id != CommunicationId::NONE);
        }
        // Those that are gone need not be asked again.
        if second == 30 {
            live.truncate(2 * server.agent.config().limits.half_open);
        }
    }
    // What is left repeats its REP as it would have without any MRA.
    server.run_until(begin + cap + uroce::time::Duration::from_secs(60));
    assert_eq!((server.agent.half_open(), server.agent.communications(), server.established), (0, 0, 0));
}
