//! The pool's decisions, without any device.

use super::*;

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

fn secs(v: u64) -> Duration {
    Duration::from_secs(v)
}

fn pool(config: PoolConfig) -> ConnectionPool {
    ConnectionPool::new(config, Rng::from_u64(1))
}

fn config() -> PoolConfig {
    let reconnect = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::default() };
    PoolConfig { min_warm: 2, max: 4, reconnect, probe_after: None, ..PoolConfig::default() }
}

fn actions(pool: &mut ConnectionPool, now: Instant) -> Vec<PoolAction> {
    std::iter::from_fn(|| pool.poll_action(now)).collect()
}

/// Carries out everything at once, with success.
fn settle(pool: &mut ConnectionPool, now: Instant) -> usize {
    let mut made = 0;
    while let Some(action) = pool.poll_action(now) {
        match action {
            PoolAction::Connect(key) => {
                made += 1;
                pool.connected(now, key);
            }
            PoolAction::Probe(key) => pool.probed(now, key),
            PoolAction::Close(_) => {}
        }
    }
    made
}

#[test]
fn the_warm_minimum_is_ready_and_refilled() {
    let mut pool = pool(config());
    assert_eq!(pool.poll_timeout(), Some(Instant::ZERO));
    assert_eq!(settle(&mut pool, at(0)), 2);
    assert_eq!(pool.stats(), PoolStats { idle: 2, connected: 2, ..PoolStats::default() });
    let a = pool.checkout().unwrap();
    // One is lent: another is made ready at once.
    assert_eq!(settle(&mut pool, at(1)), 1);
    let (b, c) = (pool.checkout().unwrap(), pool.checkout().unwrap());
    assert_eq!(settle(&mut pool, at(2)), 1, "the maximum is four");
    assert!(pool.checkout().is_some() && pool.checkout().is_none());
    assert_eq!(actions(&mut pool, at(3)), []);
    for key in [a, b, c] {
        assert!(pool.checkin(at(4), key));
    }
    assert!(!pool.checkin(at(4), a), "it was given back already");
    assert_eq!(pool.stats().idle, 3);
}

#[test]
fn the_last_used_is_lent_first() {
    let mut pool = pool(config());
    settle(&mut pool, at(0));
    let (a, b) = (pool.checkout().unwrap(), pool.checkout().unwrap());
    pool.checkin(at(1), b);
    pool.checkin(at(2), a);
    assert_eq!((pool.checkout(), pool.checkout()), (Some(a), Some(b)));
}

#[test]
fn without_a_warm_minimum_a_checkout_makes_one() {
    let mut pool = pool(PoolConfig { min_warm: 0, ..config() });
    assert_eq!((actions(&mut pool, at(0)), pool.poll_timeout()), (vec![], None));
    assert_eq!((pool.checkout(), pool.checkout()), (None, None));
    assert_eq!(settle(&mut pool, at(1)), 1, "one, however often it was asked for");
    assert!(pool.checkout().is_some());
}

#[test]
fn what_nobody_uses_is_closed_but_for_the_minimum() {
    let mut pool = pool(config());
    settle(&mut pool, at(0));
    let keys: Vec<_> = (0..4)
        .map(|_| {
            settle(&mut pool, at(0));
            pool.checkout().unwrap()
        })
        .collect();
    for (i, key) in (1..).zip(&keys) {
        pool.checkin(at(i * 1000), *key);
    }
    assert_eq!(pool.poll_timeout(), Some(at(61_000)));
    assert_eq!(actions(&mut pool, at(60_999)), []);
    assert_eq!(actions(&mut pool, at(61_000)), [PoolAction::Close(keys[0])]);
    assert_eq!(actions(&mut pool, at(1_000_000)), [PoolAction::Close(keys[1])]);
    assert_eq!((pool.stats().idle, pool.stats().idle_closed, pool.poll_timeout()), (2, 2, None));
}

#[test]
fn attempts_wait_longer_and_longer_and_begin_anew_after_success() {
    let mut pool = pool(PoolConfig { min_warm: 1, ..config() });
    let mut now = at(0);
    for wait in [100, 200, 400, 800] {
        let [PoolAction::Connect(key)] = actions(&mut pool, now)[..] else { panic!() };
        pool.failed(now, key);
        assert_eq!(actions(&mut pool, now), [PoolAction::Close(key)]);
        assert_eq!(pool.poll_timeout(), Some(now + Duration::from_millis(wait)));
        now = now + Duration::from_millis(wait);
    }
    assert_eq!(settle(&mut pool, now), 1);
    let key = pool.checkout().unwrap();
    pool.failed(now, key);
    // The connection failed, not an attempt: it is made anew at once.
    assert_eq!(actions(&mut pool, now).len(), 2);
    assert_eq!((pool.stats().connect_failures, pool.stats().lent), (4, 0));
}

#[test]
fn after_so_many_failures_it_waits_to_be_asked() {
    let reconnect = ReconnectPolicy { max_tries: 2, ..config().reconnect };
    let mut pool = pool(PoolConfig { min_warm: 1, reconnect, ..config() });
    for now in [at(0), at(100)] {
        let Some(PoolAction::Connect(key)) = pool.poll_action(now) else { panic!() };
        pool.failed(now, key);
        assert_eq!(pool.poll_action(now), Some(PoolAction::Close(key)));
    }
    assert!(pool.gave_up());
    assert_eq!((pool.poll_timeout(), actions(&mut pool, at(1_000_000))), (None, vec![]));
    assert_eq!(pool.checkout(), None);
    assert!(!pool.gave_up());
    assert_eq!(settle(&mut pool, at(1_000_000)), 1);
}

#[test]
fn probes_go_to_the_longest_unused_one_at_a_time() {
    let mut pool = pool(PoolConfig { probe_after: Some(secs(10)), ..config() });
    settle(&mut pool, at(0));
    let (a, b) = (pool.checkout().unwrap(), pool.checkout().unwrap());
    settle(&mut pool, at(0));
    pool.checkin(at(1000), a);
    pool.checkin(at(2000), b);
    // Those two that were made meanwhile have been unused since 0.
    let mut first = Vec::new();
    let now = at(10_000);
    for _ in 0..2 {
        let probes = actions(&mut pool, now);
        let [PoolAction::Probe(key)] = probes[..] else { panic!("{probes:?}") };
        assert!(key != a && key != b);
        assert_eq!(pool.poll_timeout(), Some(at(15_000)), "the probe's own time, and the idle ones wait for it");
        pool.probed(now, key);
        first.push(key);
    }
    assert_ne!(first[0], first[1]);
    assert_eq!(pool.poll_timeout(), Some(at(11_000)));
    assert_eq!(actions(&mut pool, at(11_000)), [PoolAction::Probe(a)]);
    pool.probed(at(11_000), a);
    assert_eq!(actions(&mut pool, at(12_000)), [PoolAction::Probe(b)]);
    pool.probed(at(12_000), b);
    // Probing does not make a connection look used: the first two are closed after a minute.
    assert_eq!(pool.checkout(), Some(b));
    pool.checkin(at(12_000), b);
    let closed = (12..=61).flat_map(|s| {
        let mut closed = Vec::new();
        while let Some(action) = pool.poll_action(at(s * 1000)) {
            match action {
                PoolAction::Close(key) => closed.push(key),
                PoolAction::Probe(key) => pool.probed(at(s * 1000), key),
                PoolAction::Connect(_) => panic!(),
            }
        }
        closed
    });
    let mut closed: Vec<_> = closed.collect();
    closed.sort();
    first.sort();
    assert_eq!(closed, first);
}

#[test]
fn a_probe_that_fails_or_hangs_costs_the_connection_and_another_is_made() {
    let mut pool = pool(PoolConfig { probe_after: Some(secs(10)), min_warm: 1, ..config() });
    settle(&mut pool, at(0));
    let Some(PoolAction::Probe(key)) = pool.poll_action(at(10_000)) else { panic!() };
    assert_eq!(pool.checkout(), None, "while it is probed nobody gets it");
    pool.connected(at(10_000), key);
    assert_eq!(pool.stats().probing, 1, "an answer to another question");
    assert_eq!(pool.poll_timeout(), Some(Instant::ZERO), "somebody wants one");
    let Some(PoolAction::Connect(second)) = pool.poll_action(at(10_000)) else { panic!() };
    pool.connected(at(10_001), second);
    assert_eq!(pool.poll_action(at(14_999)), None);
    assert_eq!(pool.poll_action(at(15_000)), Some(PoolAction::Close(key)));
    pool.probed(at(15_000), key);
    let stats = pool.stats();
    assert_eq!((stats.idle, stats.probing, stats.probe_failures), (1, 0, 1));
}

/// A server that accepts and parts at once, for ever: nobody used the connections, so that is no reason to hurry.
#[test]
fn connections_that_do_not_last_are_not_made_anew_without_end() {
    let mut pool = pool(PoolConfig { min_warm: 1, ..config() });
    for ms in 0..1000 {
        match pool.poll_action(at(ms)) {
            Some(PoolAction::Connect(key)) => {
                pool.connected(at(ms), key);
                pool.failed(at(ms), key);
            }
            Some(PoolAction::Close(_)) | None => {}
            Some(PoolAction::Probe(_)) => panic!("none is that old"),
        }
    }
    // The first is replaced at once; after that two in the 100 ms that the first failure of an attempt would cost.
    let made = pool.stats().connected;
    assert!((10..=21).contains(&made), "{made}");
    assert_eq!(pool.stats().connect_failures, 0);
    // One that was lent is replaced at once, however often its borrower breaks it.
    let mut made = 0;
    for ms in 2000..2100 {
        made += settle(&mut pool, at(ms));
        let key = pool.checkout().unwrap();
        pool.failed(at(ms), key);
    }
    assert_eq!(made, 100);
}
