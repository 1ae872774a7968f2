//! Connections whose messages are lost on the wire, data included.

use std::time::Duration;

use uroce::verbs::QpType;
use uroce_cm::wire::{MadKind, PortSpace};
use uroce_cm::{ConnParam, EventKind, RdmaCm};

use crate::net::{A, B, Net, Side, ip, ip6};

#[test]
fn each_message_lost_once_and_data_still_flow() {
    for kind in [MadKind::Req, MadKind::Rep, MadKind::Rtu, MadKind::Dreq, MadKind::Drep] {
        let mut net = Net::new();
        let seen = net.drop_first(kind);
        net.listen(ip(B));
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
        net.post_recv(B, &b);
        net.wait(A, EventKind::Established);
        net.send((A, &a), (B, &b), b"data before or after the RTU");
        net.wait(B, EventKind::Established);
        net.on(A, |cm, now, verbs| cm.disconnect(now, verbs, client).unwrap());
        net.wait(B, EventKind::Disconnected);
        net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, request.id).unwrap());
        net.wait(A, EventKind::Disconnected);
        net.wait(A, EventKind::TimewaitExit);
        net.wait(B, EventKind::TimewaitExit);
        let times = *seen.lock().unwrap();
        // Data make up for an RTU: it need not come again.
        assert_eq!(times, if kind == MadKind::Rtu { 1 } else { 2 }, "{kind}");
    }
}

/// An accepted connection whose first RTU is lost, with a receive posted.
fn without_rtu(net: &mut Net) -> (Side, Side) {
    net.listen(ip(B));
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
    net.post_recv(B, &b);
    net.wait(A, EventKind::Established);
    net.run_for(Duration::from_millis(10));
    assert_eq!(net.heard(B), [""; 0]);
    (a, b)
}

#[test]
fn data_establish_a_connection_for_a_program_that_hears_no_async_events() {
    let mut net = Net::new();
    net.async_events = false;
    let seen = net.drop_first(MadKind::Rtu);
    let (a, b) = without_rtu(&mut net);
    net.send((A, &a), (B, &b), b"data");
    assert_eq!(net.wait(B, EventKind::Established).param.private_data, [0; 224]);
    assert_eq!(*seen.lock().unwrap(), 1);
}

#[test]
fn without_data_the_second_rtu_establishes() {
    let mut net = Net::new();
    let seen = net.drop_first(MadKind::Rtu);
    without_rtu(&mut net);
    net.wait(B, EventKind::Established);
    assert_eq!(*seen.lock().unwrap(), 2);
}

#[test]
fn a_lost_question_or_answer_about_a_service_comes_again() {
    for kind in [MadKind::SidrReq, MadKind::SidrRep] {
        let mut net = Net::new();
        let seen = net.drop_first(kind);
        net.listen_on(PortSpace::Udp, ip(B));
        let client = net.resolved_on(PortSpace::Udp, ip(B));
        let (a, b) = (net.side(A, QpType::Ud), net.side(B, QpType::Ud));
        net.on(A, |cm, now, verbs| {
            cm.attach_qp(verbs, client, a.qp).unwrap();
            cm.connect(now, verbs, client, &ConnParam::default()).unwrap();
        });
        let request = net.wait(B, EventKind::ConnectRequest);
        net.on(B, |cm, now, verbs| {
            cm.attach_qp(verbs, request.id, b.qp).unwrap();
            cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap();
        });
        let ud = net.wait(A, EventKind::Established).ud.unwrap();
        net.post_recv(B, &b);
        net.datagram((A, &a), (B, &b), ud, b"data");
        assert_eq!((*seen.lock().unwrap(), net.heard(B)), (2, vec![]), "{kind}: asked once");
    }
}

#[test]
fn a_lost_offer_or_answer_about_a_path_comes_again() {
    for kind in [MadKind::Lap, MadKind::Apr] {
        let mut net = Net::new();
        let seen = net.drop_first(kind);
        net.listen(ip(B));
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
        net.on(A, |cm, now, verbs| cm.offer_alternate(now, verbs, client, None, ip6(B)).unwrap());
        net.wait(A, EventKind::AlternateLoaded);
        net.wait(B, EventKind::AlternateLoaded);
        assert_eq!(*seen.lock().unwrap(), 2, "{kind}");
        assert!(!net.heard(B).contains(&EventKind::AlternateLoaded.name()), "{kind}: loaded once");
    }
}
