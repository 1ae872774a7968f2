//! What one record costs, and what any input can cost.

use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{Gid, PKey};
use uroce_cm::policy::{HALF_OPEN_BYTES, PolicyConfig, Rate, TIMEWAIT_BYTES, TableLimits};
use uroce_cm::wire::{
    Ari, CmTimeout, Dreq, Mad, Message, Mra, MraedMessage, PrivateData, Rej, RejReason, RejectedMessage, Rep, Rtu,
    SidrReq,
};
use uroce_cm::{Config, agent::Limits};

use super::Meter;
use super::flood::{SERVICE, Server, bytes, req, source};

/// A policy that lets everything through, with tables of any size.
fn open(limits: TableLimits) -> PolicyConfig {
    let rate = Rate { per_second: 10_000_000, burst: 10_000_000 };
    PolicyConfig { source: rate, total: rate, bad_source: rate, bad_total: rate, limits, ..PolicyConfig::default() }
}

#[test]
fn a_half_open_record_is_as_small_as_the_policy_says() {
    let limits = TableLimits { half_open: 5000, half_open_bytes: 1 << 30, ..TableLimits::default() };
    let agent = Limits { half_open: 5000, ..Limits::default() };
    let mut server = Server::new(open(limits), Config { limits: agent, ..Config::default() }, Rng::from_u64(1));
    let meter = Meter::start();
    for n in 0..5000u32 {
        // Tables grow by doubling: just after that a record costs the most.
        if n > 500 && (n - 1).is_power_of_two() {
            let each = meter.now() / server.agent.half_open();
            assert!(each <= HALF_OPEN_BYTES, "{each} bytes each of {n}");
        }
        server.arrives(source(n), req(source(n), n));
        server.answer();
        while server.agent.poll_mad().is_some() {}
    }
    assert_eq!(server.agent.half_open(), 5000);
}

#[test]
fn a_timewait_record_is_as_small_as_the_policy_says() {
    let limits = TableLimits { timewait: 5000, timewait_bytes: 1 << 30, ..TableLimits::default() };
    let mut server = Server::new(open(limits), Config::default(), Rng::from_u64(1));
    let meter = Meter::start();
    for n in 0..5000u32 {
        if n > 500 && (n - 1).is_power_of_two() {
            let each = meter.now() / server.agent.in_timewait();
            assert!(each <= TIMEWAIT_BYTES, "{each} bytes each of {n}");
        }
        let from = source(n);
        let request = req(from, n);
        server.arrives(from, request);
        server.answer();
        let rep = server.sent().into_iter().find_map(|m| if let Message::Rep(rep) = m { Some(rep) } else { None });
        let (local_comm_id, remote_comm_id) = (request.local_comm_id, rep.unwrap().local_comm_id);
        server.arrives(from, Rtu { local_comm_id, remote_comm_id, private_data: PrivateData::EMPTY });
        let remote_qpn = rep.unwrap().local_qpn;
        server.arrives(
            from,
            Dreq { local_comm_id, remote_comm_id, remote_qpn, reserved: 0, private_data: PrivateData::EMPTY },
        );
        server.answer();
        server.sent();
    }
    assert_eq!((server.agent.in_timewait(), server.agent.communications()), (5000, 0));
}

/// One step of a peer that does whatever it likes: a message of a fitting or a foreign exchange, or noise.
fn anything(server: &mut Server, rng: &mut Rng, reps: &[(Gid, Rep)]) -> (Gid, Vec<u8>) {
    let mut pick = |most: u64| u32::try_from(rng.within(0..=most)).unwrap();
    let from = source(pick(300));
    let known = reps.get(pick(reps.len().max(1) as u64 - 1) as usize);
    let (gid, message): (Gid, Message) = match (pick(9), known) {
        (0..=3, _) | (_, None) => (from, req(from, pick(5000)).into()),
        (4, _) => {
            let request_id = pick(100_000);
            let service_id = SERVICE;
            let sidr =
                SidrReq { request_id, pkey: PKey::DEFAULT, reserved: 0, service_id, private_data: PrivateData::EMPTY };
            (from, sidr.into())
        }
        (what, Some((gid, rep))) => (*gid, about(what, rep)),
    };
    let mut bytes = bytes(message).to_vec();
    match pick(9) {
        0 => bytes = (0..pick(300)).map(|_| u8::try_from(pick(255)).unwrap()).collect(),
        1..=3 => {
            for _ in 0..=pick(8) {
                let at = pick(255) as usize;
                bytes[at] = u8::try_from(pick(255)).unwrap();
            }
        }
        _ => {}
    }
    server.now = server.now + Duration::from_micros(u64::from(pick(400)));
    (gid, bytes)
}

/// A message that fits the connection of a REP.
fn about(what: u32, rep: &Rep) -> Message {
    let (local_comm_id, remote_comm_id) = (rep.remote_comm_id, rep.local_comm_id);
    match what {
        5 => Rtu { local_comm_id, remote_comm_id, private_data: PrivateData::EMPTY }.into(),
        6 | 7 => {
            let remote_qpn = rep.local_qpn;
            Dreq { local_comm_id, remote_comm_id, remote_qpn, reserved: 0, private_data: PrivateData::EMPTY }.into()
        }
        8 => Mra {
            local_comm_id,
            remote_comm_id,
            message: MraedMessage::Rep,
            service_timeout: CmTimeout::from_wire(31),
            private_data: PrivateData::EMPTY,
        }
        .into(),
        _ => Rej {
            local_comm_id,
            remote_comm_id,
            message: RejectedMessage::Rep,
            reason: RejReason::StaleConnection,
            ari: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        }
        .into(),
    }
}

#[test]
fn whatever_arrives_the_tables_hold_no_more_than_they_may() {
    let limits = Limits { comms: 1500, events: 500, outgoing: 1000, services: 300, ..Limits::default() };
    let tables = TableLimits { half_open: 400, timewait: 1000, ..TableLimits::default() };
    for (seed, policy) in [
        (1, PolicyConfig { sources: 256, ..open(tables) }),
        (2, PolicyConfig { limits: tables, sources: 256, ..PolicyConfig::default() }),
    ] {
        let mut rng = Rng::from_u64(seed);
        let mut server = Server::new(policy, Config { limits, ..Config::default() }, rng.fork());
        let cap = server.agent.memory_cap();
        let mut reps: Vec<(Gid, Rep)> = Vec::with_capacity(2000);
        let meter = Meter::start();
        for _ in 0..150_000 {
            let (from, bytes) = anything(&mut server, &mut rng, &reps);
            server.takes(from, &bytes);
            // A program that sleeps now and then, on a network that takes nothing now and then.
            if rng.chance(0.01) {
                server.answer();
            }
            if rng.chance(0.01) {
                let sent = std::iter::from_fn(|| server.agent.poll_mad());
                for mad in sent.collect::<Vec<_>>() {
                    if let Message::Rep(rep) = Mad::parse(&mad.bytes).unwrap().message {
                        reps.truncate(1000);
                        reps.insert(0, (mad.to.remote, rep));
                    }
                }
            }
            if rng.chance(0.001) {
                server.now = server.now + Duration::from_millis(rng.within(0..=2000));
            }
            server.agent.handle_timeout(server.now);
        }
        let most = meter.most() + server.agent.policy().unwrap().memory();
        assert!(most <= cap, "{most} bytes of {cap}");
        assert!(most * 4 >= cap, "{most} bytes of {cap}: the bound says nothing");
    }
}
