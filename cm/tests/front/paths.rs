//! Alternate paths through the front, and the end of a front.

use std::net::SocketAddr;
use std::time::Duration;

use uroce::endpoint::EndpointConfig;
use uroce::types::{Gid, PathMtu};
use uroce::verbs::{AsyncEvent, PathMigState, QpAttr, QpState, QpType, Verbs};
use uroce_cm::id::{IdError, IdOptions};
use uroce_cm::wire::{AprStatus, MadKind, PortSpace};
use uroce_cm::{ConnParam, EventKind, IdHandle, RdmaCm};

use crate::net::{A, B, Net, Side, ip, ip6};

fn connect(net: &mut Net, options: IdOptions) -> [(IdHandle, Side); 2] {
    let listener = net.listen(ip(B));
    net.on(B, |cm, _, _| cm.set_options(listener, options).unwrap());
    let client = net.resolved(ip(B));
    let (a, b) = (net.side(A, QpType::Rc), net.side(B, QpType::Rc));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, b.qp).unwrap();
        cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap();
    });
    net.wait(A, EventKind::Established);
    net.wait(B, EventKind::Established);
    [(client, a), (request.id, b)]
}

fn exchange(net: &mut Net, a: &Side, b: &Side) {
    net.post_recv(B, b);
    net.send((A, a), (B, b), b"from client");
    net.post_recv(A, a);
    net.send((B, b), (A, a), &[7; 3000]);
}

fn migration(net: &mut Net, side: usize, s: &Side) -> Option<PathMigState> {
    net.on(side, |_, _, verbs| verbs.query_qp(s.qp).unwrap().attr.path_mig_state)
}

#[test]
fn an_alternate_path_is_offered_loaded_armed_and_taken() {
    let mut net = Net::new();
    let [(client, a), (server, b)] = connect(&mut net, IdOptions::default());
    net.on(A, |cm, now, verbs| cm.offer_alternate(now, verbs, client, None, ip6(B)).unwrap());
    assert_eq!(net.wait(A, EventKind::AlternateLoaded).id, client);
    assert_eq!(net.wait(B, EventKind::AlternateLoaded).id, server);
    exchange(&mut net, &a, &b);
    exchange(&mut net, &a, &b);
    assert_eq!([(A, &a), (B, &b)].map(|(side, s)| migration(&mut net, side, s)), [Some(PathMigState::Armed); 2]);
    // The program moves its QP; the peer's follows with the first packet.
    net.on(A, |_, _, verbs| {
        let path_mig_state = Some(PathMigState::Migrated);
        verbs.modify_qp(a.qp, QpAttr { path_mig_state, ..QpAttr::default() }).unwrap();
    });
    exchange(&mut net, &a, &b);
    assert_eq!(net.wait(A, EventKind::PathMigrated).id, client);
    assert_eq!(net.wait(B, EventKind::PathMigrated).id, server);
    let dgid = net.on(B, |_, _, verbs| verbs.query_qp(b.qp).unwrap().attr.av.unwrap().dgid);
    assert_eq!(dgid, Gid::from(ip6(A)));
    // The old network is gone; the connection still ends in order, over the new one.
    net.keep_away(ip(B));
    net.keep_away(ip(A));
    net.on(A, |cm, now, verbs| cm.disconnect(now, verbs, client).unwrap());
    net.wait(B, EventKind::Disconnected);
    net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, server).unwrap());
    assert_eq!(net.wait(A, EventKind::Disconnected).status, 0);
}

#[test]
fn a_failing_path_moves_the_connection_by_itself() {
    let mut net = Net::new();
    let [(client, a), (_, b)] = connect(&mut net, IdOptions::default());
    net.on(A, |cm, now, verbs| cm.offer_alternate(now, verbs, client, None, ip6(B)).unwrap());
    net.wait(A, EventKind::AlternateLoaded);
    net.wait(B, EventKind::AlternateLoaded);
    exchange(&mut net, &a, &b);
    exchange(&mut net, &a, &b);
    net.keep_away(ip(B));
    net.keep_away(ip(A));
    exchange(&mut net, &a, &b);
    net.wait(A, EventKind::PathMigrated);
    net.wait(B, EventKind::PathMigrated);
}

#[test]
fn an_offer_may_be_refused() {
    let mut net = Net::new();
    let options = IdOptions { accept_alternate: false, ..IdOptions::default() };
    let [(client, a), (server, b)] = connect(&mut net, options);
    net.on(B, |cm, now, verbs| {
        assert!(matches!(cm.offer_alternate(now, verbs, server, None, ip6(A)), Err(IdError::Cm(_))), "not active");
    });
    net.on(A, |cm, now, verbs| cm.offer_alternate(now, verbs, client, None, ip6(B)).unwrap());
    assert_eq!(net.wait(A, EventKind::AlternateError).status, i32::from(AprStatus::Rejected.code()));
    // An address that the peer does not have.
    let mut net2 = Net::new();
    let [(client, _), _] = connect(&mut net2, IdOptions::default());
    net2.on(A, |cm, now, verbs| cm.offer_alternate(now, verbs, client, None, "10.77.0.99".parse().unwrap()).unwrap());
    assert_eq!(net2.wait(A, EventKind::AlternateError).status, i32::from(AprStatus::InvalidGid.code()));
    exchange(&mut net, &a, &b);
    assert_eq!(migration(&mut net, A, &a), Some(PathMigState::Migrated));
}

#[test]
fn a_front_that_shuts_down_says_goodbye() {
    let mut net = Net::new();
    let [(_, a), (server, b)] = connect(&mut net, IdOptions::default());
    let dreqs = net.drop_first(MadKind::Dreq);
    net.on(A, |cm, now, verbs| {
        cm.shutdown(now, verbs);
        assert!(!cm.is_drained(), "the DREQ is on its way");
    });
    net.tick = Duration::from_millis(1);
    assert_eq!(net.wait(B, EventKind::Disconnected).id, server);
    net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, server).unwrap());
    let end = net.now() + Duration::from_secs(10);
    assert!(net.run_until(end, |net| net.cms[A].is_drained()));
    assert_eq!(*dreqs.lock().unwrap(), 2, "lost once");
    for (side, s) in [(A, &a), (B, &b)] {
        assert_eq!(net.on(side, |_, _, v| v.query_qp(s.qp).unwrap().state), QpState::Err);
    }
    // Nothing but the program's own objects is left.
    let cm = net.cms.into_iter().next().unwrap();
    let endpoint = net.world.endpoint(net.nodes[A]);
    endpoint.destroy_qp(a.qp).unwrap();
    cm.destroy(endpoint).unwrap();
    let counts = net.world.endpoint(net.nodes[A]).object_counts();
    assert_eq!((counts[0], counts[5]), (0, 0), "no QP, no address handle");
}

#[test]
fn an_address_that_moves_or_goes_is_followed_or_told() {
    let mut net = Net::new();
    let bind = |net: &mut Net, address| {
        net.on(A, |cm, _, verbs| {
            let id = cm.create_id(PortSpace::Udp).unwrap();
            cm.bind_addr(verbs, id, SocketAddr::new(address, 9)).unwrap();
            id
        })
    };
    let (v4, v6) = (bind(&mut net, ip(A)), bind(&mut net, ip6(A)));
    // A device of the same kind whose table has the second address alone, in the first place.
    let changed = net.world.add_endpoint(EndpointConfig::new(vec![ip6(A)], PathMtu::B1024));
    let verbs = net.world.endpoint(changed);
    net.cms[A].on_async_event(verbs, &AsyncEvent::GidChange);
    let event = net.cms[A].poll_event().unwrap();
    assert_eq!((event.id, event.kind), (v4, EventKind::AddrChange));
    assert_eq!(net.cms[A].poll_event(), None, "the other one has only moved");
    let group = "ff0e::7:7".parse().unwrap();
    net.cms[A].join_multicast(net.world.endpoint(changed), v6, group, true).unwrap();
    assert_eq!(net.cms[A].poll_event().unwrap().ud.unwrap().av.sgid_index, 0);
    assert_eq!(net.cms[A].gsi().gid_index(Gid::from(ip6(A))), Some(0));
}
