//! Connections of real endpoints over links that lose, double, reorder and harm, data included: a seed repeats a run.

use std::collections::BTreeMap;
use std::time::Duration;

use uroce::device::impair::ImpairModel;
use uroce::rng::Rng;
use uroce::verbs::{QpHandle, QpState, QpType};
use uroce_cm::{ConnParam, EventKind, IdHandle, RdmaCm};

use crate::net::{A, B, Net, ip};

const SEEDS: u64 = 32;
const CONNECTIONS: usize = 12;

/// What became of an id: its QP, and whether its end was told.
#[derive(Default)]
struct Ids {
    qps: BTreeMap<(usize, IdHandle), QpHandle>,
    established: [usize; 2],
    exits: usize,
}

fn run(seed: u64) {
    let mut rng = Rng::from_u64(seed);
    let mut net = Net::seeded(seed);
    net.tick = Duration::from_millis(2);
    let [a, b] = net.nodes;
    let model = ImpairModel {
        drop: rng.within(0..=20) as f64 / 100.0,
        duplicate: rng.within(0..=20) as f64 / 100.0,
        reorder: rng.within(0..=20) as f64 / 100.0,
        corrupt: rng.within(0..=5) as f64 / 100.0,
        truncate: rng.within(0..=5) as f64 / 100.0,
        delay: Duration::from_millis(1),
        jitter: Duration::from_micros(500),
        reorder_by: Duration::from_millis(rng.within(1..=300)),
    };
    net.world.set_link(a, b, model);
    let before = [A, B].map(|side| net.world.endpoint(net.nodes[side]).object_counts()[0]);
    let shared = [A, B].map(|side| net.side(side, QpType::Rc));
    net.listen(ip(B));
    let mut ids = Ids::default();
    for _ in 0..CONNECTIONS {
        let client = net.resolved(ip(B));
        let qp = net.another(A, &shared[A]);
        net.on(A, |cm, now, verbs| {
            cm.attach_qp(verbs, client, qp).unwrap();
            cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
        });
        ids.qps.insert((A, client), qp);
        settle(&mut net, &mut ids, &shared, rng.within(0..=1000));
    }
    // The bad link lasts long enough for most, then it is good.
    settle(&mut net, &mut ids, &shared, 5000);
    net.world.set_link(a, b, ImpairModel::NONE);
    settle(&mut net, &mut ids, &shared, 60_000);
    assert_eq!(ids.established, [CONNECTIONS; 2], "seed {seed}");
    let clients: Vec<IdHandle> = ids.qps.keys().filter(|(side, _)| *side == A).map(|(_, id)| *id).collect();
    net.world.set_link(a, b, model);
    for client in clients {
        net.on(A, |cm, now, verbs| cm.disconnect(now, verbs, client).unwrap());
        settle(&mut net, &mut ids, &shared, rng.within(0..=200));
    }
    settle(&mut net, &mut ids, &shared, 60_000);
    // An accepted id whose peer came back too late has an end too; each is told once.
    assert_eq!(ids.exits, ids.qps.len(), "seed {seed}");
    for ((side, id), qp) in ids.qps {
        net.on(side, |cm, now, verbs| {
            assert_eq!(verbs.query_qp(qp).unwrap().state, QpState::Err, "seed {seed}");
            cm.destroy_id(now, verbs, id).unwrap();
            verbs.destroy_qp(qp).unwrap();
        });
    }
    for side in [A, B] {
        let agent = net.cms[side].agent();
        assert_eq!((agent.communications(), agent.in_timewait(), agent.poll_timeout()), (0, 0, None), "seed {seed}");
        let qp = shared[side].qp;
        net.on(side, |_, _, verbs| verbs.destroy_qp(qp).unwrap());
        assert_eq!(net.world.endpoint(net.nodes[side]).object_counts()[0], before[side], "seed {seed}");
    }
}

/// Lets time pass, with programs that accept what they are asked and agree to part.
fn settle(net: &mut Net, ids: &mut Ids, shared: &[crate::net::Side; 2], ms: u64) {
    let end = net.now() + Duration::from_millis(ms);
    while net.now() < end {
        let step = (net.now() + Duration::from_millis(20)).min(end);
        net.run_until(step, |_| false);
        for side in [A, B] {
            for event in std::mem::take(&mut net.events[side]) {
                match event.kind {
                    EventKind::ConnectRequest => {
                        let qp = net.another(side, &shared[side]);
                        net.on(side, |cm, now, verbs| {
                            cm.attach_qp(verbs, event.id, qp).unwrap();
                            cm.accept(now, verbs, event.id, &ConnParam::default()).unwrap();
                        });
                        ids.qps.insert((side, event.id), qp);
                    }
                    EventKind::Established => ids.established[side] += 1,
                    EventKind::Disconnected if side == B => {
                        net.on(side, |cm, now, verbs| cm.disconnect(now, verbs, event.id).unwrap());
                    }
                    EventKind::TimewaitExit => ids.exits += 1,
                    EventKind::Disconnected => {}
                    // A copy of a REQ that came when all was over: accepted, and refused by its sender.
                    EventKind::Rejected if side == B => ids.exits += 1,
                    other => panic!("{} on {side}: {}", other.name(), event.status),
                }
            }
        }
    }
}

#[test]
fn connections_over_bad_links_come_about_and_end_on_both_sides() {
    for seed in 0..SEEDS {
        run(seed);
    }
}
