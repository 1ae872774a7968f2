//! A hundred thousand connections with their QPs, through the front: device, ids and records are as before.

use uroce::time::Duration;
use uroce::verbs::QpType;
use uroce_cm::{ConnParam, EventKind, RdmaCm as _};

use crate::memory::held;
use crate::net::{A, B, Net, Side, ip};

const CYCLES: u32 = 100_000;

/// Connects a QP of each side, ends the connection and destroys the ids and the QPs.
fn cycle(net: &mut Net, [a, b]: [&Side; 2]) {
    let client = net.resolved(ip(B));
    let (qa, qb) = (net.another(A, a), net.another(B, b));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, qa).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, qb).unwrap();
        cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap();
    });
    net.wait(A, EventKind::Established);
    net.wait(B, EventKind::Established);
    net.on(A, |cm, now, verbs| cm.destroy_id(now, verbs, client).unwrap());
    net.wait(B, EventKind::Disconnected);
    net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, request.id).unwrap());
    net.on(A, |_, _, v| v.destroy_qp(qa).unwrap());
    net.on(B, |_, _, v| v.destroy_qp(qb).unwrap());
    net.events.iter_mut().for_each(Vec::clear);
}

#[test]
fn a_hundred_thousand_connections_with_qps_leave_nothing() {
    let mut net = Net::new();
    net.listen(ip(B));
    let (a, b) = (net.side(A, QpType::Rc), net.side(B, QpType::Rc));
    // TIMEWAIT has its usual number of records after as long as it lasts.
    for _ in 0..5000 {
        cycle(&mut net, [&a, &b]);
    }
    let before = (held(), [A, B].map(|side| net.world.endpoint(net.nodes[side]).object_counts()));
    for _ in 0..CYCLES {
        cycle(&mut net, [&a, &b]);
    }
    let after = (held(), [A, B].map(|side| net.world.endpoint(net.nodes[side]).object_counts()));
    assert_eq!(after.1, before.1, "PDs, regions, CQs, SRQs, QPs and address handles of both sides");
    assert!(after.0 - before.0 < 64 << 10, "{} bytes more than before", after.0 - before.0);
    net.tick = Duration::from_millis(1);
    net.run_for(Duration::from_secs(2));
    for side in [A, B] {
        let agent = net.cms[side].agent();
        assert_eq!((agent.communications(), agent.in_timewait(), agent.poll_timeout()), (0, 0, None));
    }
}
