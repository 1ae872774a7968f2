//! Numbers that a stranger would have to guess: QPNs, keys, PSNs and communication ids cannot be foretold from those
//! that were seen, and guessing is answered rarely, does nothing, and raises an alarm.

use std::net::Ipv4Addr;
use std::time::Duration;

use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::{AckTimeout, PathMtu, Psn, Qpn, RetryCount, RnrRetry};
use uroce::verbs::{
    AccessFlags, AsyncEvent, InitAttr, QpCapabilities, QpInit, QpState, QpTransition, QpType, RtrAttr, Verbs,
};
use uroce::wire::{IpFields, seal};
use uroce_cm::agent::ConnectParams;
use uroce_cm::comm::Path;
use uroce_cm::wire::{Mad, Message, ServiceId, TransportService};
use uroce_cm::{Agent, Config};
use uroce_tests::pair::{Options, Pair, Side};

const MILLION: usize = 1_000_000;

/// Chi-square of counts that should all be equal.
fn chi_square(counts: &[u32], total: usize) -> f64 {
    let expected = total as f64 / counts.len() as f64;
    counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum()
}

/// What chi-square stays below for a fair source, but for once in more than a million: its mean is the degrees of
/// freedom, its variance twice that.
fn bound(bins: usize) -> f64 {
    let freedom = bins as f64 - 1.0;
    freedom + 5.5 * (2.0 * freedom).sqrt()
}

/// Every byte is even by itself and together with its follower; differences do not repeat; nothing is the one before
/// with a constant added or bits flipped.
fn cannot_be_foretold(name: &str, bits: u32, values: impl Iterator<Item = u32>) {
    let bytes = bits as usize / 8;
    let mut single = vec![vec![0u32; 256]; bytes];
    let mut pairs = vec![vec![0u32; 65_536]; bytes];
    let (mut last, mut step, mut flip) = (0u32, 0u32, 0u32);
    let (mut near, mut repeated, mut total) = (0, 0, 0);
    let mask = if bits == 32 { u32::MAX } else { (1 << bits) - 1 };
    for value in values {
        total += 1;
        for (at, (single, pairs)) in single.iter_mut().zip(&mut pairs).enumerate() {
            let (now, before) = ((value >> (8 * at)) & 255, (last >> (8 * at)) & 255);
            single[now as usize] += 1;
            pairs[(before << 8 | now) as usize] += 1;
        }
        let (new_step, new_flip) = (value.wrapping_sub(last) & mask, value ^ last);
        near += u32::from(new_step <= 16 || new_step >= mask - 16);
        repeated += u32::from(new_step == step || new_flip == flip);
        (last, step, flip) = (value, new_step, new_flip);
    }
    assert_eq!(total, MILLION);
    for (at, (single, pairs)) in single.iter().zip(&pairs).enumerate() {
        assert!(chi_square(single, total) < bound(256), "{name}: byte {at} is uneven");
        assert!(chi_square(pairs, total) < bound(65_536), "{name}: byte {at} depends on the one before");
    }
    // Of 2^24 values 34 are near: two in a million by chance.
    assert!(near <= 20 && repeated <= 10, "{name}: {near} near the one before, {repeated} steps repeated");
}

fn endpoint(seed: u8) -> Endpoint {
    Endpoint::new(EndpointConfig::new(vec!["10.0.0.1".parse().unwrap()], PathMtu::B1024), [seed; 32])
}

#[test]
fn qpns_cannot_be_foretold() {
    let mut e = endpoint(1);
    let (pd, cq) = (e.alloc_pd().unwrap(), e.create_cq(1).unwrap());
    let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let init =
        QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
    let qpns = (0..MILLION).map(|_| {
        let qp = e.create_qp(init).unwrap();
        let qpn = e.query_qp(qp).unwrap().qpn;
        e.destroy_qp(qp).unwrap();
        qpn.get()
    });
    cannot_be_foretold("QPN", 24, qpns);
}

#[test]
fn keys_cannot_be_foretold() {
    let mut e = endpoint(2);
    let pd = e.alloc_pd().unwrap();
    let region = Region::alloc(64).unwrap();
    let keys = (0..MILLION).map(|_| {
        let mr = e.register(pd, &region, AccessFlags::ALL, None).unwrap();
        e.deregister(mr.handle).unwrap();
        mr.rkey.get()
    });
    cannot_be_foretold("rkey", 32, keys);
}

/// What a million REQs say that their sender drew.
fn reqs(seed: u64, what: impl Fn(&uroce_cm::wire::Req) -> u32) -> impl Iterator<Item = u32> {
    let mut agent = Agent::new(Config::default(), Rng::from_u64(seed));
    let params = ConnectParams {
        path: Path::new(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into()),
        service_id: ServiceId::new(1),
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
    };
    (0..MILLION).map(move |_| {
        let comm = agent.connect(Instant::ZERO, &params).unwrap();
        let Message::Req(req) = Mad::parse(&agent.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
        agent.abandon(Instant::ZERO, comm);
        while agent.poll_mad().is_some() {}
        what(&req)
    })
}

#[test]
fn starting_psns_cannot_be_foretold() {
    cannot_be_foretold("PSN", 24, reqs(3, |req| req.starting_psn.get()));
}

#[test]
fn communication_ids_cannot_be_foretold() {
    cannot_be_foretold("communication id", 32, reqs(4, |req| req.local_comm_id.get()));
}

#[test]
fn the_test_knows_what_can_be_foretold() {
    let fails = |values: Box<dyn Iterator<Item = u32> + std::panic::UnwindSafe>| {
        std::panic::catch_unwind(|| cannot_be_foretold("bad", 32, values)).is_err()
    };
    assert!(fails(Box::new(0..1_000_000)));
    assert!(fails(Box::new((0..1_000_000u32).map(|n| n.wrapping_mul(0x9E37_79B9)))));
    // A linear congruential generator, whose low byte repeats.
    assert!(fails(Box::new(
        std::iter::successors(Some(1u32), |s| Some(s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)))
            .take(MILLION)
    )));
}

/// A WRITE of 16 bytes as the peer would send it, but for its key.
fn write_with_key(p: &mut Pair, psn: Psn, key: u32) -> Vec<u8> {
    let (qpn, addr) = (p.b.qpn.get(), p.b.mr.iova);
    let mut packet = vec![0x0A, 0x00, 0xff, 0xff];
    packet.extend(qpn.to_be_bytes());
    packet.extend((1 << 31 | psn.get()).to_be_bytes());
    packet.extend(addr.to_be_bytes());
    packet.extend(key.to_be_bytes());
    packet.extend(16u32.to_be_bytes());
    packet.extend([0xEE; 16]);
    let end = packet.len();
    packet.extend([0; 4]);
    seal(&p.flow_from(Side::A), IpFields { id: 0, flags_fragment: 0x4000 }, &mut packet, end);
    packet
}

/// The QP of B as it was before it failed, as if its peer had connected again.
fn connect_again(p: &mut Pair, psn: Psn) {
    let attr = p.b.endpoint.query_qp(p.b.qp).unwrap().attr;
    let rtr = RtrAttr {
        av: attr.av.unwrap(),
        path_mtu: PathMtu::B1024,
        dest_qpn: p.a.qpn,
        rq_psn: psn,
        max_dest_rd_atomic: 1,
        min_rnr_timer: uroce::types::RnrTimer::DEFAULT,
    };
    for step in [
        QpTransition::Reset,
        QpTransition::Init(InitAttr::connected(AccessFlags::ALL)),
        QpTransition::Rtr(rtr),
        QpTransition::Rts(uroce::verbs::RtsAttr { timeout: AckTimeout::DEFAULT, ..uroce::verbs::RtsAttr::usual(psn) }),
    ] {
        p.b.endpoint.modify_qp(p.b.qp, step.into()).unwrap();
    }
}

/// A million guesses at 10,000 a second, by one who has everything but the key: connection, address, PSN. Each wrong key
/// costs the connection, and the policy of the connection manager gives a source a hundred new ones a second.
#[test]
fn a_million_wrong_keys_do_nothing_and_are_hardly_answered() {
    const PER_SECOND: usize = 10_000;
    const CONNECTIONS_PER_SECOND: usize = 100;
    let mut p = Pair::new(&Options { mtu: PathMtu::B1024, ..Options::default() });
    let right = p.b.mr.rkey.get();
    let before: Vec<u8> = (0..p.b.region.len()).map(|i| (i * 7 + 1) as u8).collect();
    p.b.region.write(0, &before).unwrap();
    let psn = Psn::new(100).unwrap();
    let mut rng = Rng::from_u64(5);
    let (mut answers, mut alarms) = (0, 0);
    for n in 0..MILLION {
        if n % (PER_SECOND / CONNECTIONS_PER_SECOND) == 0 {
            connect_again(&mut p, psn);
        }
        let guess = std::iter::from_fn(|| Some(rng.next_u32())).find(|key| *key != right).unwrap();
        let packet = write_with_key(&mut p, psn, guess);
        p.deliver(Side::B, &packet);
        answers += p.take_sent(Side::B).len();
        p.now = p.now + Duration::from_micros(1_000_000 / PER_SECOND as u64);
        while let Some(event) = p.b.endpoint.poll_event() {
            alarms += usize::from(matches!(event, AsyncEvent::Probing(_)));
        }
    }
    let seconds = MILLION / PER_SECOND;
    assert_eq!(answers, seconds * CONNECTIONS_PER_SECOND, "one a connection");
    let counters = p.b.endpoint.counters();
    assert_eq!((counters.rx_write_requests, counters.sent_access_err), (0, answers as u64));
    let mut after = vec![0; before.len()];
    p.b.region.read(0, &mut after).unwrap();
    assert!(after == before, "a wrong key changed memory");
    // Once in ten seconds.
    assert_eq!(counters.probe_alarms, alarms as u64);
    assert!((seconds / 11..=seconds / 10 + 1).contains(&alarms), "{alarms}");
    // The right key would have done it: the packets were good.
    connect_again(&mut p, psn);
    let packet = write_with_key(&mut p, psn, right);
    p.deliver(Side::B, &packet);
    assert_eq!(p.b.endpoint.counters().rx_write_requests, 1);
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Rts);
}

/// Blind guesses of QPN and PSN from the right address.
#[test]
fn guesses_of_qpn_and_psn_are_dropped_without_a_word() {
    let mut p = Pair::new(&Options::default());
    let (own, mut rng) = (p.b.qpn.get(), Rng::from_u64(6));
    let psn = Psn::new(100).unwrap();
    for _ in 0..10_000 {
        let mut packet = write_with_key(&mut p, psn, 1);
        let qpn = std::iter::from_fn(|| Some(Qpn::from_wire(rng.next_u32()).get())).find(|n| *n != own).unwrap();
        packet[4..8].copy_from_slice(&qpn.to_be_bytes());
        let end = packet.len() - 4;
        seal(&p.flow_from(Side::A), IpFields { id: 0, flags_fragment: 0x4000 }, &mut packet, end);
        p.deliver(Side::B, &packet);
        assert!(p.take_sent(Side::B).is_empty());
    }
    assert_eq!(p.b.endpoint.counters().probe_alarms, 1);
    // PSNs on the right QP: at most one NAK for the gap, and no end of the connection but by the one PSN that is right.
    let mut answers = 0;
    for _ in 0..10_000 {
        let guess = std::iter::from_fn(|| Some(Psn::from_wire(rng.next_u32()))).find(|x| *x != psn).unwrap();
        let packet = write_with_key(&mut p, guess, 1);
        p.deliver(Side::B, &packet);
        answers += p.take_sent(Side::B).len();
    }
    assert!(answers <= 2, "{answers}");
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Rts);
}
