//! Datagram services and multicast groups through the front, with data.

use std::net::{IpAddr, SocketAddr};

use uroce::types::{Gid, QKey, Qpn};
use uroce::verbs::{QpState, QpType};
use uroce_cm::id::{IdError, STATUS_TIMED_OUT};
use uroce_cm::wire::{PortSpace, SidrStatus};
use uroce_cm::{ConnParam, EventKind, IdHandle, RdmaCm, RetryPolicy};

use crate::net::{A, B, Net, PORT, Side, ip, ip6};

/// What udaddy does: returns the client's id and both QPs, with what the client was told.
fn udaddy(net: &mut Net, space: PortSpace, address: fn(usize) -> IpAddr) -> (IdHandle, [Side; 2], uroce_cm::UdPeer) {
    let listener = net.listen_on(space, address(B));
    let client = net.resolved_on(space, address(B));
    let (a, b) = (net.side(A, QpType::Ud), net.side(B, QpType::Ud));
    net.on(A, |cm, now, verbs| {
        cm.attach_qp(verbs, client, a.qp).unwrap();
        assert_eq!(verbs.query_qp(a.qp).unwrap().state, QpState::Rts);
        cm.connect(now, verbs, client, &ConnParam { private_data: b"hello", ..ConnParam::default() }).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    assert_eq!((request.listen_id, request.ud), (Some(listener), None));
    assert_eq!((request.param.private_data.len(), &request.param.private_data[..5]), (180, &b"hello"[..]));
    assert_eq!(net.cms[B].peer_addr(request.id), net.cms[A].local_addr(client));
    net.on(B, |cm, now, verbs| {
        cm.attach_qp(verbs, request.id, b.qp).unwrap();
        let param = ConnParam { private_data: b"welcome", ..ConnParam::default() };
        assert_eq!(cm.accept(now, verbs, request.id, &param).unwrap(), None);
    });
    let event = net.wait(A, EventKind::Established);
    assert_eq!((event.param.private_data.len(), &event.param.private_data[..7]), (136, &b"welcome"[..]));
    let ud = event.ud.unwrap();
    let qpn = net.on(B, |_, _, verbs| verbs.query_qp(b.qp).unwrap().qpn);
    assert_eq!((ud.qpn, ud.qkey, ud.av.dgid), (qpn, QKey::RDMA_UDP, Gid::from(address(B))));
    (client, [a, b], ud)
}

#[test]
fn udaddy_over_both_families_and_port_spaces() {
    for (space, address) in [(PortSpace::Udp, ip as fn(usize) -> IpAddr), (PortSpace::Udp, ip6), (PortSpace::Ib, ip)] {
        let mut net = Net::new();
        let (client, [a, b], ud) = udaddy(&mut net, space, address);
        net.post_recv(B, &b);
        net.datagram((A, &a), (B, &b), ud, b"to the server");
        // There is no connection to end, and none is left.
        net.on(A, |cm, now, verbs| {
            assert_eq!(cm.disconnect(now, verbs, client), Err(IdError::WrongState("disconnect")));
            cm.destroy_id(now, verbs, client).unwrap();
        });
        assert_eq!((net.heard(A), net.heard(B)), (vec![], vec![]));
        assert_eq!([A, B].map(|side| net.cms[side].agent().communications()), [0, 0]);
    }
}

#[test]
fn refusals_are_unreachable_with_the_status_of_the_answer() {
    let mut net = Net::new();
    let listener = net.listen_on(PortSpace::Udp, ip(B));
    let param = ConnParam { qpn: Qpn::new(0x99), ..ConnParam::default() };
    let client = net.resolved_on(PortSpace::Udp, ip(B));
    net.on(A, |cm, now, verbs| cm.connect(now, verbs, client, &param).unwrap());
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, _| cm.reject(now, request.id, b"no").unwrap());
    let event = net.wait(A, EventKind::Unreachable);
    assert_eq!((event.status, event.sidr_status()), (2, Some(SidrStatus::Rejected)));
    assert_eq!(&event.param.private_data[..3], b"no\0");

    net.on(B, |cm, now, verbs| cm.destroy_id(now, verbs, listener).unwrap());
    let client = net.resolved_on(PortSpace::Udp, ip(B));
    net.on(A, |cm, now, verbs| cm.connect(now, verbs, client, &param).unwrap());
    assert_eq!(net.wait(A, EventKind::Unreachable).sidr_status(), Some(SidrStatus::Unsupported));
}

#[test]
fn silence_is_unreachable_with_tries_and_time() {
    let mut config = uroce_cm::CmConfig::default();
    config.agent.retry = RetryPolicy { retries: 2, jitter_percent: 0, ..RetryPolicy::default() };
    let mut net = Net::with(config);
    let client = net.resolved_on(PortSpace::Udp, "10.77.0.100".parse().unwrap());
    let param = ConnParam { qpn: Qpn::new(0x99), ..ConnParam::default() };
    net.on(A, |cm, now, verbs| cm.connect(now, verbs, client, &param).unwrap());
    let event = net.wait(A, EventKind::Unreachable);
    assert_eq!((event.status, event.sidr_status()), (STATUS_TIMED_OUT, None));
    assert_eq!(event.attempt.unwrap().tries, 3);
}

#[test]
fn a_program_that_names_its_own_datagram_qp() {
    let mut net = Net::new();
    net.listen_on(PortSpace::Udp, ip(B));
    let client = net.resolved_on(PortSpace::Udp, ip(B));
    net.on(A, |cm, now, verbs| {
        let long = ConnParam { private_data: &[0; 181], ..ConnParam::default() };
        assert_eq!(cm.connect(now, verbs, client, &long), Err(IdError::PrivateData { given: 181, max: 180 }));
        cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        assert_eq!(cm.accept(now, verbs, request.id, &ConnParam::default()), Err(IdError::NoQp));
        let param = ConnParam { qpn: Qpn::new(0x4321), qkey: Some(QKey::new(0x1111)), ..ConnParam::default() };
        cm.accept(now, verbs, request.id, &param).unwrap();
        assert!(cm.accept(now, verbs, request.id, &param).is_err(), "once");
    });
    let ud = net.wait(A, EventKind::Established).ud.unwrap();
    assert_eq!((ud.qpn.get(), ud.qkey), (0x4321, QKey::new(0x1111)));
}

/// What mckey does: the receiver and the sender join, and what one sends the other receives.
#[test]
fn mckey_over_both_families() {
    for (group, address) in [("239.7.7.7", ip as fn(usize) -> IpAddr), ("ff0e::7:7", ip6)] {
        let mut net = Net::new();
        let group: IpAddr = group.parse().unwrap();
        let sides = [A, B].map(|side| net.side(side, QpType::Ud));
        let mut ids = Vec::new();
        for side in [A, B] {
            let id = net.on(side, |cm, _, verbs| {
                let id = cm.create_id(PortSpace::Udp).unwrap();
                cm.resolve_addr(verbs, id, Some(SocketAddr::new(address(side), 0)), SocketAddr::new(group, 0)).unwrap();
                id
            });
            assert_eq!(net.wait(side, EventKind::AddrResolved).id, id);
            net.on(side, |cm, _, verbs| {
                cm.attach_qp(verbs, id, sides[side].qp).unwrap();
                // The sender does not hear itself.
                cm.join_multicast(verbs, id, group, side == A).unwrap();
            });
            let event = net.wait(side, EventKind::MulticastJoin);
            let ud = event.ud.unwrap();
            assert_eq!((event.status, ud.qpn, ud.qkey), (0, Qpn::MULTICAST, QKey::RDMA_UDP));
            // On RoCEv2 the group's GID is its address: ::ffff:239.7.7.7.
            assert_eq!((ud.av.dgid, ud.av.hop_limit), (Gid::from(group), 64));
            ids.push((id, ud));
        }
        let [a, b] = &sides;
        net.post_recv(B, b);
        net.datagram((A, a), (B, b), ids[0].1, b"to all of you");
        net.on(B, |cm, now, verbs| {
            let id = ids[1].0;
            assert_eq!(cm.join_multicast(verbs, id, group, false), Err(IdError::WrongState("join_multicast")));
            cm.leave_multicast(verbs, id, group).unwrap();
            assert_eq!(cm.leave_multicast(verbs, id, group), Err(IdError::NotMulticast(group)));
            // The membership is gone from the device too.
            assert!(verbs.detach_multicast(b.qp, Gid::from(group)).is_err());
            cm.join_multicast(verbs, id, group, false).unwrap();
            cm.destroy_id(now, verbs, id).unwrap();
            assert!(verbs.detach_multicast(b.qp, Gid::from(group)).is_err());
        });
    }
}

#[test]
fn what_cannot_be_joined() {
    let mut net = Net::new();
    net.on(A, |cm, _, verbs| {
        let group: IpAddr = "239.7.7.7".parse().unwrap();
        let id = cm.create_id(PortSpace::Udp).unwrap();
        assert_eq!(cm.join_multicast(verbs, id, group, false), Err(IdError::WrongState("join_multicast")));
        cm.bind_addr(verbs, id, SocketAddr::new(ip(A), PORT)).unwrap();
        assert_eq!(cm.join_multicast(verbs, id, ip(B), false), Err(IdError::NotMulticast(ip(B))));
        let id = cm.create_id(PortSpace::Tcp).unwrap();
        cm.bind_addr(verbs, id, SocketAddr::new(ip(A), PORT)).unwrap();
        assert_eq!(cm.join_multicast(verbs, id, group, false), Err(IdError::NotMulticast(group)));
    });
}
