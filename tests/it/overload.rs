//! What one QP's trouble may cost the others, and what a busy peer may cost its own QP.

use uroce::counters::DropReason;
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::types::{Gid, PKey, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AsyncEvent, CqHandle, InitAttr, Operation, Payload, PdHandle, QpCapabilities, QpHandle,
    QpInit, QpState, QpTransition, QpType, RecvWr, RtrAttr, RtsAttr, SendFlags, SendWr, Verbs, VerbsError, WcStatus,
};
use uroce::wire::{Body, Packet, Place, Request, RequestOp, SendTail, Service};
use uroce_tests::pair::{Options, Pair, Side};

fn endpoint() -> (Endpoint, PdHandle) {
    let mut e = Endpoint::new(EndpointConfig::new(vec!["10.0.0.1".parse().unwrap()], PathMtu::B1024), [7; 32]);
    let pd = e.alloc_pd().unwrap();
    (e, pd)
}

fn init(pd: PdHandle, send_cq: CqHandle, recv_cq: CqHandle) -> QpInit {
    let caps = QpCapabilities {
        max_send_wr: 2,
        max_recv_wr: 2,
        max_send_sge: 0,
        max_recv_sge: 0,
        ..QpCapabilities::default()
    };
    QpInit { pd, qp_type: QpType::Rc, send_cq, recv_cq, srq: None, caps, signal_all: true, qpn: None }
}

/// A QP in RTS, its peer a place that never answers.
fn ready(e: &mut Endpoint, pd: PdHandle, send_cq: CqHandle, recv_cq: CqHandle) -> QpHandle {
    let qp = e.create_qp(init(pd, send_cq, recv_cq)).unwrap();
    let rtr = RtrAttr {
        av: AddressVector::new(Gid::from(core::net::Ipv4Addr::new(10, 0, 0, 2)), 0),
        path_mtu: PathMtu::B1024,
        dest_qpn: Qpn::new(99).unwrap(),
        rq_psn: Psn::ZERO,
        max_dest_rd_atomic: 1,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    for step in [
        QpTransition::Init(InitAttr::connected(AccessFlags::ALL)),
        QpTransition::Rtr(rtr),
        QpTransition::Rts(RtsAttr::usual(Psn::ZERO)),
    ] {
        e.modify_qp(qp, step.into()).unwrap();
    }
    qp
}

fn post_both(e: &mut Endpoint, qp: QpHandle) {
    let wr = SendWr {
        wr_id: 1,
        operation: Operation::Send,
        payload: Payload::Sges(&[]),
        flags: SendFlags::SIGNALED,
        destination: None,
    };
    e.post_send(qp, &[wr, wr]).unwrap();
    let wr = RecvWr { wr_id: 2, sges: &[] };
    e.post_recv(qp, &[wr, wr]).unwrap();
}

fn state(e: &Endpoint, qp: QpHandle) -> QpState {
    e.query_qp(qp).unwrap().state
}

/// Each QP of a CQ that overran flushes into it in turn; the stack must not grow with their number.
#[test]
fn a_cq_of_many_qps_that_overruns_ends_them_one_after_the_other() {
    let work = || {
        let (mut e, pd) = endpoint();
        let cq = e.create_cq(1).unwrap();
        let qps: Vec<_> = (0..3000).map(|_| ready(&mut e, pd, cq, cq)).collect();
        for qp in &qps {
            e.post_recv(*qp, &[RecvWr { wr_id: 1, sges: &[] }, RecvWr { wr_id: 2, sges: &[] }]).unwrap();
        }
        e.modify_qp(qps[0], QpTransition::Err.into()).unwrap();
        assert!(qps.iter().all(|qp| state(&e, *qp) == QpState::Err));
        let errors = core::iter::from_fn(|| e.poll_event()).filter(|x| *x == AsyncEvent::CqError(cq)).count();
        assert_eq!(errors, 1);
    };
    std::thread::Builder::new().stack_size(256 * 1024).spawn(work).unwrap().join().unwrap();
}

#[test]
fn two_cqs_that_overrun_at_once_each_end_their_qps() {
    let (mut e, pd) = endpoint();
    let (sends, receives) = (e.create_cq(1).unwrap(), e.create_cq(1).unwrap());
    let both = ready(&mut e, pd, sends, receives);
    let of_sends = ready(&mut e, pd, sends, sends);
    let of_receives = ready(&mut e, pd, receives, receives);
    post_both(&mut e, both);
    e.modify_qp(both, QpTransition::Err.into()).unwrap();
    assert_eq!((state(&e, of_sends), state(&e, of_receives)), (QpState::Err, QpState::Err));
}

/// Nothing that completes into a CQ that overran before would ever be seen.
#[test]
fn a_qp_that_joins_a_cq_after_its_overrun_ends_at_its_first_completion() {
    let (mut e, pd) = endpoint();
    let (failed, good) = (e.create_cq(1).unwrap(), e.create_cq(8).unwrap());
    let first = ready(&mut e, pd, failed, failed);
    post_both(&mut e, first);
    e.modify_qp(first, QpTransition::Err.into()).unwrap();
    let mut p = Pair::new(&Options { cq_depth: 1, ..Options::default() });
    let there = p.b.remote(0);
    for wr_id in 0..2 {
        p.a.send(wr_id, Operation::Write(there), 0, 8);
    }
    p.settle();
    assert_eq!(state(&p.a.endpoint, p.a.qp), QpState::Err, "its CQ has one place");
    // The same on one endpoint: the newcomer's send fails for good at once, and has nowhere to say so.
    let late = ready(&mut e, pd, failed, good);
    post_both(&mut e, late);
    let nowhere = uroce::burst::TxRoom {
        buf: &mut [],
        headroom: 0,
        segments_max: 1,
        ids: uroce::burst::IdRule::Zero,
        medium: uroce::burst::Medium::Udp,
    };
    assert!(e.poll_transmit(uroce::time::Instant::ZERO, nowhere).is_none());
    assert_eq!(state(&e, late), QpState::Err);
}

/// A peer that always has READs outstanding must not keep our own requests from leaving.
#[test]
fn requests_leave_between_the_answers_to_long_reads() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.a.remote(0);
    for wr_id in 0..4 {
        p.b.send(wr_id, Operation::Read(there), 0, 16_384);
    }
    for request in p.take_sent(Side::B) {
        p.deliver(Side::A, &request);
    }
    let there = p.b.remote(32_768);
    p.a.send(9, Operation::Write(there), 0, 256);
    let sent = p.take_sent(Side::A);
    let at = sent.iter().position(|s| matches!(Packet::parse(s).unwrap().body, Body::Request(_))).unwrap();
    assert!(at < 4, "behind {at} of {} packets", sent.len());
    // And the answers keep their share and their order.
    let answers: Vec<u32> = sent
        .iter()
        .map(|s| Packet::parse(s).unwrap())
        .filter(|s| matches!(s.body, Body::Response(_)))
        .map(|s| s.psn.get())
        .collect();
    assert_eq!(answers, (5000..5000 + 4 * 64).collect::<Vec<u32>>());
}

/// The network repeats an old READ after its region went away (deregistered, or invalidated by the peer itself). The
/// peer had its answer, so nothing is wrong with the connection.
#[test]
fn a_repeat_of_an_answered_read_of_a_dead_region_is_dropped() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 3000);
    let request = p.take_sent(Side::A);
    p.deliver(Side::B, &request[0]);
    p.settle();
    assert_eq!(p.a.completions().len(), 1);
    p.b.endpoint.deregister(p.b.mr.handle).unwrap();
    p.deliver(Side::B, &request[0]);
    assert!(p.take_sent(Side::B).is_empty());
    assert_eq!(state(&p.b.endpoint, p.b.qp), QpState::Rts);
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::ForgottenDuplicate), 1);
    assert_eq!(p.b.endpoint.poll_event(), None);
}

/// As long as the first answer is under way, a region that goes away is the peer's to know, repeat or not.
#[test]
fn a_region_that_goes_away_under_a_repeated_read_is_an_access_error() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 1000);
    let request = p.take_sent(Side::A);
    p.deliver(Side::B, &request[0]);
    p.deliver(Side::B, &request[0]);
    p.b.endpoint.deregister(p.b.mr.handle).unwrap();
    p.settle();
    assert_eq!(p.a.completions()[0].status, WcStatus::RemoteAccess);
}

/// A ghost of an earlier connection between the same QPs is no sign that this one stands; its first packet is.
#[test]
fn only_a_packet_in_sequence_establishes_a_connection() {
    let (mut e, pd) = endpoint();
    let cq = e.create_cq(8).unwrap();
    let init = QpInit { qpn: Qpn::new(500), ..init(pd, cq, cq) };
    let qp = e.create_qp(init).unwrap();
    let rtr = RtrAttr {
        av: AddressVector::new(Gid::from(core::net::Ipv4Addr::new(10, 0, 0, 2)), 0),
        path_mtu: PathMtu::B1024,
        dest_qpn: Qpn::new(99).unwrap(),
        rq_psn: Psn::from_wire(1000),
        max_dest_rd_atomic: 1,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    for step in [QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Rtr(rtr)] {
        e.modify_qp(qp, step.into()).unwrap();
    }
    let flow = uroce::wire::Flow {
        src: "10.0.0.2".parse().unwrap(),
        dst: "10.0.0.1".parse().unwrap(),
        src_port: 50_000,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        vlan: None,
    };
    let ip = uroce::wire::IpFields { id: 0, flags_fragment: 0x4000 };
    for (psn, want) in [(7, None), (5_000_000, None), (1000, Some(AsyncEvent::CommunicationEstablished(qp)))] {
        let op = RequestOp::Send(Place::Only, SendTail::None);
        let body = Body::Request(Request { service: Service::Rc, op, payload: &[] });
        let packet = Packet::new(Qpn::new(500).unwrap(), PKey::DEFAULT, Psn::from_wire(psn), body);
        let header = packet.header_len();
        let mut bytes = vec![0; uroce::wire::segment_len(header, 0)];
        packet.write_headers(0, &mut bytes).unwrap();
        uroce::wire::seal(&flow, ip, &mut bytes, header);
        let now = uroce::time::Instant::ZERO;
        let ids = uroce::burst::RxIds::Known(ip);
        e.handle_burst(now, uroce::burst::RxBurst { flow, bytes: &bytes, segment: bytes.len(), ids, at: now });
        assert_eq!(e.poll_event(), want, "PSN {psn}");
    }
}

/// 0 and 1 are those of the management QPs, the highest is that of multicast.
#[test]
fn reserved_numbers_are_given_to_no_qp() {
    let (mut e, pd) = endpoint();
    let cq = e.create_cq(8).unwrap();
    for qpn in [0, 1, 0xFF_FFFF] {
        let refused = e.create_qp(QpInit { qpn: Qpn::new(qpn), ..init(pd, cq, cq) });
        assert!(matches!(refused, Err(VerbsError::InvalidCapability { field: "qpn", .. })), "{qpn:#x}: {refused:?}");
    }
    assert!(e.create_qp(QpInit { qpn: Qpn::new(2), ..init(pd, cq, cq) }).is_ok());
}

/// A receive of a UC QP whose element is bad must not stand in the way of all that follow.
#[test]
fn a_bad_receive_of_a_uc_qp_completes_with_status_4() {
    let mut p = Pair::new(&Options { qp_type: QpType::Uc, mtu: PathMtu::B256, ..Options::default() });
    let region = Region::alloc(64).unwrap();
    let read_only = p.b.endpoint.register(p.b.pd, &region, AccessFlags::NONE, None).unwrap();
    let sge = [uroce::verbs::Sge { addr: read_only.iova, length: 64, lkey: read_only.lkey }];
    p.b.endpoint.post_recv(p.b.qp, &[RecvWr { wr_id: 1, sges: &sge }]).unwrap();
    p.b.recv(2, 0, 64);
    p.a.send(1, Operation::Send, 0, 8);
    p.a.send(2, Operation::Send, 0, 8);
    p.settle();
    let got: Vec<_> = p.b.completions().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, [(1, WcStatus::LocalProtection), (2, WcStatus::Success)]);
}

/// On an error the vendor number says which failure it was.
#[test]
fn a_key_that_cannot_be_invalidated_is_named_in_the_completion() {
    let mut p = Pair::new(&Options::default());
    p.b.recv(1, 0, 64);
    p.a.send(1, Operation::SendInvalidate(uroce::types::Rkey::new(5)), 0, 8);
    p.settle();
    let got = p.b.completions()[0];
    let want = (WcStatus::RemoteInvalidRequest, uroce::verbs::FailureKind::InvalidateFailed as u32);
    assert_eq!((got.status, got.vendor_err), want);
}

/// The receives of an SRQ name regions of the SRQ's protection domain, which need not be the QP's.
#[test]
fn receives_of_an_srq_are_checked_against_its_own_domain() {
    let mut p = Pair::new(&Options::default());
    let n = &mut p.b;
    let other = n.endpoint.alloc_pd().unwrap();
    let region = uroce::raw::Region::alloc(64).unwrap();
    let mr = n.endpoint.register(other, &region, uroce::verbs::AccessFlags::LOCAL_WRITE, None).unwrap();
    let srq = n.endpoint.create_srq(uroce::verbs::SrqInit { pd: other, max_wr: 4, max_sge: 1 }).unwrap();
    let sges = [uroce::verbs::Sge { addr: mr.iova, length: 64, lkey: mr.lkey }];
    n.endpoint.post_srq_recv(srq, &[uroce::verbs::RecvWr { wr_id: 9, sges: &sges }]).unwrap();
    // A QP of the node's own domain on that SRQ, in the place of the pair's.
    let info = n.endpoint.query_qp(n.qp).unwrap();
    n.endpoint.destroy_qp(n.qp).unwrap();
    let init = uroce::verbs::QpInit {
        pd: n.pd,
        qp_type: uroce::verbs::QpType::Rc,
        send_cq: n.cq,
        recv_cq: n.cq,
        srq: Some(srq),
        caps: info.caps,
        signal_all: false,
        qpn: Some(n.qpn),
    };
    n.qp = n.endpoint.create_qp(init).unwrap();
    let init = uroce::verbs::InitAttr::connected(info.attr.access.unwrap());
    n.endpoint.modify_qp(n.qp, init.into()).unwrap();
    let rtr = uroce::verbs::RtrAttr {
        av: info.attr.av.unwrap(),
        path_mtu: info.attr.path_mtu.unwrap(),
        dest_qpn: info.attr.dest_qpn.unwrap(),
        rq_psn: info.attr.rq_psn.unwrap(),
        max_dest_rd_atomic: 4,
        min_rnr_timer: info.attr.min_rnr_timer.unwrap(),
    };
    n.endpoint.modify_qp(n.qp, rtr.into()).unwrap();
    p.a.region.write(0, b"over the border!").unwrap();
    p.a.send(1, Operation::Send, 0, 16);
    p.settle();
    assert_eq!(p.a.completions()[0].status, WcStatus::Success);
    assert_eq!(region.to_vec()[..16], *b"over the border!");
}

#[test]
fn a_read_whose_depth_was_taken_away_fails_and_holds_nothing_up() {
    use uroce::verbs::{QpAttr, QpTransition};
    let mut p = Pair::new(&Options::default());
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Sqd { notify: false }.into()).unwrap();
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 8);
    let none = QpAttr { max_rd_atomic: Some(0), ..QpAttr::to_state(QpState::Sqd) };
    p.a.endpoint.modify_qp(p.a.qp, none).unwrap();
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Resume.into()).unwrap();
    p.settle();
    assert_eq!(p.a.completions().iter().map(|c| c.status).collect::<Vec<_>>(), [WcStatus::LocalQpOperation]);
}
