//! Port spaces, many connections at once, and refusals that explain themselves.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use uroce::types::PathMtu;
use uroce::verbs::QpType;
use uroce_cm::wire::{PortSpace, RejInfo, RejReason, TransportService};
use uroce_cm::{CmConfig, ConnParam, EventKind, IdHandle, RdmaCm};

use crate::net::{A, B, Net, Side, ip, ip6};

fn connect_on(net: &mut Net, space: PortSpace, address: IpAddr, qp_type: QpType) -> [(IdHandle, Side); 2] {
    net.listen_on(space, address);
    let client = net.resolved_on(space, address);
    let (a, b) = (net.side(A, qp_type), net.side(B, qp_type));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, b.qp).unwrap();
        cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap();
    });
    assert_eq!(net.wait(A, EventKind::Established).ud, None);
    net.wait(B, EventKind::Established);
    [(client, a), (request.id, b)]
}

#[test]
fn connections_of_either_transport_in_either_space_and_family() {
    for space in [PortSpace::Tcp, PortSpace::Ib] {
        for address in [ip as fn(usize) -> IpAddr, ip6] {
            for (qp_type, transport) in [(QpType::Rc, TransportService::Rc), (QpType::Uc, TransportService::Uc)] {
                let mut net = Net::new();
                let [(client, a), (server, b)] = connect_on(&mut net, space, address(B), qp_type);
                assert_eq!(net.cms[A].ready(client).unwrap().transport, transport);
                net.post_recv(B, &b);
                net.send((A, &a), (B, &b), b"from client");
                net.post_recv(A, &a);
                net.send((B, &b), (A, &a), &[7; 3000]);
                net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, server).unwrap());
                net.wait(A, EventKind::Disconnected);
            }
        }
    }
}

#[test]
fn a_listener_of_one_space_hears_nothing_of_another() {
    let mut net = Net::new();
    net.listen_on(PortSpace::Ib, ip(B));
    let client = net.resolved_on(PortSpace::Tcp, ip(B));
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    assert_eq!(net.wait(A, EventKind::Rejected).reason(), Some(RejReason::InvalidServiceId));
}

#[test]
fn a_refusal_says_what_would_be_taken() {
    let mut config = CmConfig::default();
    config.agent.max_mtu = PathMtu::B512;
    let mut net = Net::with(config);
    net.listen(ip(B));
    let client = net.resolved(ip(B));
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let event = net.wait(A, EventKind::Rejected);
    assert_eq!((event.reason(), event.info), (Some(RejReason::InvalidMtu), RejInfo::Mtu(PathMtu::B512)));
}

#[test]
fn a_thousand_at_once_connect_part_and_leave_nothing() {
    const AT_ONCE: usize = 1000;
    let mut net = Net::new();
    net.tick = Duration::from_micros(500);
    let listener = net.listen_with(ip(B), AT_ONCE);
    let before = [A, B].map(|side| net.world.endpoint(net.nodes[side]).object_counts()[0]);
    let shared = [A, B].map(|side| net.side(side, QpType::Rc));
    let mut qps = Vec::new();
    for _ in 0..AT_ONCE {
        let client = net.resolved(ip(B));
        let qp = net.another(A, &shared[A]);
        net.on(A, |cm, now, verbs| {
            cm.attach_qp(verbs, client, qp).unwrap();
            cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
        });
        qps.push((A, client, qp));
    }
    let (mut established, mut over) = ([0; 2], BTreeMap::new());
    let end = net.now() + Duration::from_secs(60);
    while over.len() < 2 * AT_ONCE {
        assert!(net.now() < end, "{established:?} established, {} over", over.len());
        net.run_for(Duration::from_millis(1));
        for side in [A, B] {
            for event in std::mem::take(&mut net.events[side]) {
                match event.kind {
                    EventKind::ConnectRequest => {
                        let qp = net.another(B, &shared[B]);
                        net.on(B, |cm, now, verbs| {
                            cm.attach_qp(verbs, event.id, qp).unwrap();
                            cm.accept(now, verbs, event.id, &ConnParam::default()).unwrap();
                        });
                        qps.push((B, event.id, qp));
                    }
                    EventKind::Established => {
                        established[side] += 1;
                        if established == [AT_ONCE; 2] {
                            let all: Vec<IdHandle> = qps.iter().filter(|q| q.0 == A).map(|q| q.1).collect();
                            net.on(A, |cm, now, verbs| {
                                for id in all {
                                    cm.disconnect(now, verbs, id).unwrap();
                                }
                            });
                        }
                    }
                    EventKind::Disconnected if side == B => {
                        net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, event.id).unwrap());
                    }
                    EventKind::Disconnected => {}
                    EventKind::TimewaitExit => _ = over.insert((side, event.id), ()),
                    other => panic!("{}: {}", other.name(), event.status),
                }
            }
        }
    }
    for (side, id, qp) in qps {
        net.on(side, |cm, now, verbs| {
            cm.destroy_id(now, verbs, id).unwrap();
            verbs.destroy_qp(qp).unwrap();
        });
    }
    for side in [A, B] {
        let agent = net.cms[side].agent();
        assert_eq!((agent.communications(), agent.in_timewait(), agent.poll_timeout()), (0, 0, None));
        let qp = shared[side].qp;
        net.on(side, |_, _, verbs| verbs.destroy_qp(qp).unwrap());
        assert_eq!(net.world.endpoint(net.nodes[side]).object_counts()[0], before[side]);
    }
    net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, listener).unwrap());
}
