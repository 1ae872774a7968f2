//! Many connections at random over a bad link; a seed repeats a run. `UROCE_CM_SEEDS` says how many seeds.

use uroce::rng::Rng;
use uroce_cm::{Config, RetryPolicy};

use super::{assert_alike, assert_nothing_left, let_go};
use crate::pair::{A, B, Consumer, Deed, Pair, Rates, exact, ms};

const SEEDS: u64 = 300;

fn consumer(rng: &mut Rng) -> Consumer {
    const THEN: [&[(u64, Deed)]; 6] = [
        &[],
        &[(0, Deed::Disconnect)],
        &[(300, Deed::Disconnect)],
        &[(5, Deed::OfferPath)],
        &[(5, Deed::OfferPath), (30, Deed::Disconnect)],
        &[(2000, Deed::OfferPath), (9000, Deed::Disconnect)],
    ];
    let pick = usize::try_from(rng.within(0..=5)).unwrap();
    let think = [0, 0, 0, 1, 200, 3000][usize::try_from(rng.within(0..=5)).unwrap()];
    Consumer { think: ms(think), refuses: rng.chance(0.1), then: THEN[pick] }
}

fn config(rng: &mut Rng) -> Config {
    let retry = RetryPolicy { jitter_percent: 10, ..exact().retry };
    let mra_max = u8::try_from(rng.within(0..=8)).unwrap();
    Config { retry, mra_max, ..exact() }
}

/// A quarter of an hour of connections, services and meetings; then the link is good again.
fn run(seed: u64) {
    let what = || format!("seed {seed}: UROCE_CM_SEED={seed} repeats it");
    let mut rng = Rng::from_u64(seed);
    let (a, b) = (config(&mut rng), config(&mut rng));
    let mut pair = Pair::with(seed, a, b);
    pair.consumers = [consumer(&mut rng), consumer(&mut rng)];
    pair.rates = Rates {
        loss: rng.within(0..=30) as f64 / 100.0,
        duplicate: rng.within(0..=30) as f64 / 100.0,
        reorder: rng.within(0..=50) as f64 / 100.0,
    };
    for side in [A, B] {
        if rng.chance(0.9) {
            pair.listen(side);
        }
    }
    let mut met = false;
    for _ in 0..rng.within(1..=24) {
        let side = usize::try_from(rng.within(0..=1)).unwrap();
        match rng.within(0..=9) {
            0..=6 => _ = pair.connect(side),
            7 | 8 => _ = pair.resolve(side),
            _ if !met => {
                met = true;
                pair.meet(A);
                pair.run_for(ms(rng.within(0..=500)));
                pair.meet(B);
            }
            _ => {}
        }
        pair.run_for(ms(rng.within(0..=1000)));
    }
    // Giving up takes longer than this, so nobody has: whatever was said arrives in the end.
    pair.run_for(ms(10_000));
    pair.rates = Rates::default();
    pair.run_for(super::REST);
    assert_alike(&pair, &what);
    let_go(&mut pair);
    assert_nothing_left(&mut pair, &what);
}

#[test]
fn random_links_leave_both_sides_alike() {
    if let Some(seed) = std::env::var("UROCE_CM_SEED").ok().and_then(|s| s.parse().ok()) {
        return run(seed);
    }
    let seeds = std::env::var("UROCE_CM_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(SEEDS);
    for seed in 0..seeds {
        run(seed);
    }
}

#[test]
fn one_seed_gives_one_run() {
    let ladder = |seed: u64| {
        let mut pair = Pair::with(seed, exact(), exact());
        pair.rates = Rates { loss: 0.2, duplicate: 0.2, reorder: 0.2 };
        pair.listen(B);
        for _ in 0..8 {
            pair.connect(A);
            pair.run_for(ms(100));
        }
        pair.run_for(ms(60_000));
        (pair.sent, pair.events)
    };
    assert_eq!(ladder(5), ladder(5));
    assert_ne!(ladder(5).0, ladder(6).0);
}
