//! The calls and events that programs know from rdma_cm, in their order.

use std::net::{IpAddr, SocketAddr};

use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{AckTimeout, PathMtu, RnrTimer};
use uroce::verbs::{QpState, QpType, Verbs};
use uroce_cm::id::{IdError, IdOptions, STATUS_NO_DEVICE, STATUS_TIMED_OUT};
use uroce_cm::wire::{PortSpace, RejReason, TransportService};
use uroce_cm::{Cm, CmConfig, ConnParam, EventKind, IdHandle, RdmaCm};

use crate::net::{A, B, Net, PORT, Side, ip, ip6};

/// Connects with attached QPs; returns both ids and sides.
fn connect(net: &mut Net, address: fn(usize) -> IpAddr, qp_type: QpType) -> [(IdHandle, Side); 2] {
    let listener = net.listen(address(B));
    let client = net.resolved(address(B));
    let (a, b) = (net.side(A, qp_type), net.side(B, qp_type));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        let param = ConnParam { private_data: b"hello", initiator_depth: 3, ..ConnParam::default() };
        cm.connect(now, verbs, client, &param).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    assert_eq!(request.listen_id, Some(listener));
    assert_eq!((request.param.private_data.len(), &request.param.private_data[..5]), (56, &b"hello"[..]));
    net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, b.qp).unwrap();
        let param = ConnParam { private_data: b"welcome", ..ConnParam::default() };
        cm.accept(now, verbs, request.id, &param).unwrap();
    });
    let established = net.wait(A, EventKind::Established);
    assert_eq!((established.param.private_data.len(), &established.param.private_data[..7]), (196, &b"welcome"[..]));
    assert_eq!(net.wait(B, EventKind::Established).id, request.id);
    [(client, a), (request.id, b)]
}

fn exchange(net: &mut Net, a: &Side, b: &Side) {
    net.post_recv(B, b);
    net.send((A, a), (B, b), b"from client");
    net.post_recv(A, a);
    net.send((B, b), (A, a), &[7; 3000]);
}

#[test]
fn rc_over_ipv4_from_resolve_to_timewait_exit() {
    let mut net = Net::new();
    let [(client, a), (server, b)] = connect(&mut net, ip, QpType::Rc);
    exchange(&mut net, &a, &b);
    let peer = net.cms[B].peer_addr(server).unwrap();
    assert_eq!(peer, net.cms[A].local_addr(client).unwrap());
    assert_eq!(net.cms[A].peer_addr(client), Some(SocketAddr::new(ip(B), PORT)));
    net.on(A, |cm, now, verbs| cm.disconnect(now, verbs, client).unwrap());
    assert_eq!(net.wait(B, EventKind::Disconnected).id, server);
    net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, server).unwrap());
    assert_eq!(net.wait(A, EventKind::Disconnected).status, 0);
    for (side, qp) in [(A, a.qp), (B, b.qp)] {
        assert_eq!(net.on(side, |_, _, verbs| verbs.query_qp(qp).unwrap().state), QpState::Err);
        net.wait(side, EventKind::TimewaitExit);
        assert_eq!(net.heard(side), [""; 0], "each event once");
    }
    for (side, id) in [(A, client), (B, server)] {
        net.on(side, |cm, now, verbs| cm.destroy_id(now, verbs, id).unwrap());
        assert_eq!(net.cms[side].agent().communications(), 0);
    }
}

#[test]
fn rc_over_ipv6() {
    let mut net = Net::new();
    let [(_, a), (_, b)] = connect(&mut net, ip6, QpType::Rc);
    exchange(&mut net, &a, &b);
}

#[test]
fn uc_is_connected_too() {
    let mut net = Net::new();
    let [(client, a), (_, b)] = connect(&mut net, ip, QpType::Uc);
    assert_eq!(net.cms[A].ready(client).unwrap().transport, TransportService::Uc);
    exchange(&mut net, &a, &b);
}

#[test]
fn the_attributes_are_those_that_were_agreed() {
    let mut net = Net::new();
    let [(client, a), (server, b)] = connect(&mut net, ip, QpType::Rc);
    let attrs = [(A, a.qp), (B, b.qp)].map(|(side, qp)| net.on(side, |_, _, v| v.query_qp(qp).unwrap()));
    let [at_a, at_b] = attrs.map(|info| info.attr);
    // 3 wanted by the client; 16 offered by it, 16 wanted by the server.
    assert_eq!((at_a.max_rd_atomic, at_b.max_dest_rd_atomic), (Some(3), Some(3)));
    assert_eq!((at_b.max_rd_atomic, at_a.max_dest_rd_atomic), (Some(16), Some(16)));
    assert_eq!((at_a.path_mtu, at_b.path_mtu), (Some(PathMtu::B1024), Some(PathMtu::B1024)));
    assert_eq!((at_a.min_rnr_timer, at_b.min_rnr_timer), (Some(RnrTimer::DEFAULT), Some(RnrTimer::DEFAULT)));
    assert_eq!((at_a.timeout, at_b.timeout), (Some(AckTimeout::DEFAULT), Some(AckTimeout::DEFAULT)));
    assert_eq!((at_a.dest_qpn, at_b.dest_qpn), (Some(attrs[1].qpn), Some(attrs[0].qpn)));
    // The flow label is that of rdma_cm, and the same on both sides: so is the UDP source port.
    let port = u32::from(net.cms[A].local_addr(client).unwrap().port());
    let label = (port * 31 + u32::from(PORT)) & 0xfffff;
    let labels = [at_a, at_b].map(|attr| attr.av.unwrap().flow_label);
    assert_eq!(labels, [label; 2]);
    let _ = server;
}

#[test]
fn both_directions_use_the_source_port_of_the_flow_label() {
    let mut net = Net::new();
    let [(client, a), (_, b)] = connect(&mut net, ip, QpType::Rc);
    net.world.keep_sent(net.nodes[A]);
    net.world.keep_sent(net.nodes[B]);
    exchange(&mut net, &a, &b);
    let port = u32::from(net.cms[A].local_addr(client).unwrap().port());
    let label = (port * 31 + u32::from(PORT)) & 0xfffff;
    let udp = u16::try_from(((label & 0x3fff) ^ ((label & 0xfc000) >> 14)) | 0xc000).unwrap();
    for side in [A, B] {
        let sent = net.world.take_sent(net.nodes[side]);
        assert!(!sent.is_empty());
        assert!(sent.iter().all(|p| p.flow.src_port == udp), "{udp}: {:?}", sent[0].flow);
    }
}

#[test]
fn a_program_that_moves_its_own_qp() {
    let mut net = Net::new();
    net.listen(ip(B));
    let client = net.resolved(ip(B));
    let (a, b) = (net.side(A, QpType::Rc), net.side(B, QpType::Rc));
    net.on(A, |cm, now, verbs| {
        let qpn = verbs.query_qp(a.qp).unwrap().qpn;
        assert_eq!(cm.connect(now, verbs, client, &ConnParam::default()), Err(IdError::NoQp));
        cm.connect(now, verbs, client, &ConnParam { qpn: Some(qpn), ..ConnParam::default() }).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        let qpn = verbs.query_qp(b.qp).unwrap().qpn;
        let ready =
            cm.accept(now, verbs, request.id, &ConnParam { qpn: Some(qpn), ..ConnParam::default() }).unwrap().unwrap();
        ready.apply(verbs, b.qp).unwrap();
    });
    assert_eq!(net.wait(A, EventKind::ConnectResponse).id, client);
    net.on(A, |cm, _, verbs| {
        cm.ready(client).unwrap().apply(verbs, a.qp).unwrap();
        cm.establish(client).unwrap();
    });
    net.wait(B, EventKind::Established);
    exchange(&mut net, &a, &b);
}

#[test]
fn refusals_carry_status_and_data() {
    let mut net = Net::new();
    let listener = net.listen(ip(B));
    let client = net.resolved(ip(B));
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, _| cm.reject(now, request.id, b"no thanks").unwrap());
    let event = net.wait(A, EventKind::Rejected);
    assert_eq!((event.status, event.reason()), (28, Some(RejReason::ConsumerDefined)));
    assert_eq!((event.param.private_data.len(), &event.param.private_data[..9]), (148, &b"no thanks"[..]));
    assert_eq!(net.on(A, |_, _, v| v.query_qp(a.qp).unwrap().state), QpState::Err);

    net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, listener).unwrap());
    let client = net.resolved(ip(B));
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    assert_eq!(net.wait(A, EventKind::Rejected).status, 8);
}

#[test]
fn a_silent_peer_gives_tries_and_time() {
    let mut net = Net::new();
    net.tick = Duration::from_millis(5);
    // An address of our own network that nobody has.
    let client = net.resolved("10.77.0.100".parse().unwrap());
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let event = net.wait(A, EventKind::Unreachable);
    assert_eq!(event.status, STATUS_TIMED_OUT);
    let attempt = event.attempt.unwrap();
    assert_eq!(attempt.tries, 16);
    // 0.25 + 0.5 + 1 + 2 + 12 x 4 s, and at most 10 % more.
    let least = Duration::from_millis(51_750);
    assert!(attempt.elapsed >= least && attempt.elapsed <= least * 11 / 10 + net.tick, "{:?}", attempt.elapsed);
}

#[test]
fn bad_addresses_and_wrong_order_are_named() {
    let mut net = Net::new();
    let foreign: SocketAddr = "192.0.2.1:7174".parse().unwrap();
    let v4 = |port| SocketAddr::new(ip(B), port);
    net.listen(ip(B));
    net.on(B, |cm, now, verbs| {
        let id = cm.create_id(PortSpace::Tcp).unwrap();
        assert_eq!(cm.bind_addr(verbs, id, foreign), Err(IdError::AddressNotAvailable(foreign.ip())));
        assert_eq!(cm.connect(now, verbs, id, &ConnParam::default()), Err(IdError::WrongState("connect")));
        assert_eq!(cm.resolve_route(verbs, id), Err(IdError::WrongState("resolve_route")));
        assert_eq!(cm.disconnect(now, verbs, id), Err(IdError::WrongState("disconnect")));
        cm.bind_addr(verbs, id, v4(PORT)).unwrap();
        assert_eq!(cm.listen(id, 1), Err(IdError::AddressInUse(v4(PORT))));
        let any = cm.create_id(PortSpace::Tcp).unwrap();
        cm.bind_addr(verbs, any, "0.0.0.0:0".parse().unwrap()).unwrap();
        cm.listen(any, 1).unwrap();
        assert_ne!(cm.local_addr(any).unwrap().port(), 0);
        cm.destroy_id(now, verbs, any).unwrap();
        assert_eq!(cm.listen(any, 1), Err(IdError::InvalidHandle));
        // A source that is not ours is an event, as in rdma_cm.
        let id = cm.create_id(PortSpace::Tcp).unwrap();
        cm.resolve_addr(verbs, id, Some(foreign), v4(1)).unwrap();
    });
    assert_eq!(net.wait(B, EventKind::AddrError).status, STATUS_NO_DEVICE);
    let client = net.resolved(ip(B));
    let a = net.side(A, QpType::Rc);
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        let long = ConnParam { private_data: &[0; 57], ..ConnParam::default() };
        assert_eq!(cm.connect(now, verbs, client, &long), Err(IdError::PrivateData { given: 57, max: 56 }));
        let ok = ConnParam { private_data: &[0; 56], ..ConnParam::default() };
        cm.connect(now, verbs, client, &ok).unwrap();
    });
}

#[test]
fn options_reach_the_connection() {
    let mut net = Net::new();
    net.listen(ip(B));
    let id = net.on(A, |cm, _, verbs| {
        let id = cm.create_id(PortSpace::Tcp).unwrap();
        let options = IdOptions {
            tos: 106,
            ack_timeout: AckTimeout::new(17).unwrap(),
            path_mtu: Some(PathMtu::B256),
            ..IdOptions::default()
        };
        cm.set_options(id, options).unwrap();
        cm.resolve_addr(verbs, id, None, SocketAddr::new(ip(B), PORT)).unwrap();
        cm.resolve_route(verbs, id).unwrap();
        id
    });
    let (a, b) = (net.side(A, QpType::Rc), net.side(B, QpType::Rc));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, id, a.qp).unwrap();
        cm.connect(now, verbs, id, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    let ready = net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, b.qp).unwrap();
        cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap().unwrap()
    });
    assert_eq!((ready.rtr.path_mtu, ready.rts.timeout.code()), (PathMtu::B256, 17));
    assert_eq!(ready.rtr.av.traffic_class, 106);
    net.wait(A, EventKind::Established);
    exchange(&mut net, &a, &b);
}

#[test]
fn a_second_front_finds_qp1_taken() {
    let mut net = Net::new();
    let second = net.on(A, |_, _, verbs| Cm::new(verbs, CmConfig::default(), Rng::from_u64(9)).err());
    assert!(second.is_some());
    // Asking left nothing behind: the next PD and CQ are those that a first attempt took.
    let taken = |verbs: &mut dyn Verbs| {
        let (pd, cq) = (verbs.alloc_pd().unwrap(), verbs.create_cq(1).unwrap());
        verbs.dealloc_pd(pd).unwrap();
        verbs.destroy_cq(cq).unwrap();
        (pd.slot(), cq.slot())
    };
    let before = net.on(A, |_, _, verbs| taken(verbs));
    assert!(net.on(A, |_, _, verbs| Cm::new(verbs, CmConfig::default(), Rng::from_u64(9)).is_err()));
    assert_eq!(net.on(A, |_, _, verbs| taken(verbs)), before);
}

#[test]
fn many_connections_leave_nothing_behind() {
    let mut net = Net::new();
    let listener = net.listen(ip(B));
    let before = [A, B].map(|side| net.world.endpoint(net.nodes[side]).object_counts());
    for _ in 0..50 {
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
        net.on(A, |cm, now, verbs| cm.destroy_id(now, verbs, client).unwrap());
        net.wait(B, EventKind::Disconnected);
        net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, request.id).unwrap());
        net.on(A, |_, _, v| v.destroy_qp(a.qp).unwrap());
        net.on(B, |_, _, v| v.destroy_qp(b.qp).unwrap());
    }
    net.tick = Duration::from_millis(1);
    net.run_for(Duration::from_secs(1));
    for side in [A, B] {
        let agent = net.cms[side].agent();
        assert_eq!((agent.communications(), agent.in_timewait(), agent.poll_timeout()), (0, 0, None));
        // QPs: only QP1 is left. One address handle a peer.
        let after = net.world.endpoint(net.nodes[side]).object_counts();
        assert_eq!((after[0], after[5]), (before[side][0], 1));
    }
    net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, listener).unwrap());
}
