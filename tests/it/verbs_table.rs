//! The verbs in every state: what is allowed, and which attribute a refusal names.

use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::types::{AckTimeout, Gid, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AltPath, Attr, InitAttr, ModifyError, Operation, PathMigState, Payload, PostError,
    QpAttr, QpCapabilities, QpHandle, QpInit, QpState, QpTransition, QpType, RecvWr, RtrAttr, RtsAttr, SendFlags,
    SendWr, Sge, SourcePort, Verbs, VerbsError, transition_rule,
};

fn endpoint() -> Endpoint {
    Endpoint::new(EndpointConfig::new(vec!["10.0.0.1".parse().unwrap()], PathMtu::B4096), [3; 32])
}

fn qp(e: &mut Endpoint, qp_type: QpType) -> QpHandle {
    let pd = e.alloc_pd().unwrap();
    let cq = e.create_cq(64).unwrap();
    let caps = QpCapabilities::default();
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
    e.create_qp(init).unwrap()
}

fn av() -> AddressVector {
    AddressVector::new(Gid::from(std::net::Ipv4Addr::new(10, 0, 0, 2)), 0)
}

/// A valid value for one attribute.
fn set(attr: &mut QpAttr, which: Attr, from: QpState) {
    match which {
        Attr::CurState => attr.cur_state = Some(from),
        Attr::SqdAsyncNotify => attr.sqd_async_notify = Some(true),
        Attr::AccessFlags => attr.access = Some(AccessFlags::ALL),
        Attr::PKeyIndex => attr.pkey_index = Some(0),
        Attr::Port => attr.port = Some(1),
        Attr::QKey => attr.qkey = Some(QKey::new(7)),
        Attr::Av => attr.av = Some(av()),
        Attr::PathMtu => attr.path_mtu = Some(PathMtu::B1024),
        Attr::Timeout => attr.timeout = Some(AckTimeout::DEFAULT),
        Attr::RetryCount => attr.retry_count = Some(RetryCount::MAX),
        Attr::RnrRetry => attr.rnr_retry = Some(RnrRetry::FOREVER),
        Attr::RqPsn => attr.rq_psn = Some(Psn::ZERO),
        Attr::MaxRdAtomic => attr.max_rd_atomic = Some(4),
        Attr::MinRnrTimer => attr.min_rnr_timer = Some(RnrTimer::DEFAULT),
        Attr::SqPsn => attr.sq_psn = Some(Psn::ZERO),
        Attr::MaxDestRdAtomic => attr.max_dest_rd_atomic = Some(4),
        Attr::DestQpn => attr.dest_qpn = Qpn::new(99),
        Attr::AltPath => attr.alt_path = Some(AltPath::new(av(), AckTimeout::DEFAULT)),
        Attr::PathMigState => attr.path_mig_state = Some(PathMigState::Migrated),
    }
}

/// Brings a fresh QP of type `t` to `state`.
fn at(e: &mut Endpoint, t: QpType, state: QpState) -> QpHandle {
    let q = qp(e, t);
    let path = [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd];
    let wanted: &[QpState] = match state {
        QpState::Reset => &[],
        QpState::Init => &path[..1],
        QpState::Rtr => &path[..2],
        QpState::Rts => &path[..3],
        QpState::Sqd => &path[..4],
        QpState::Err | QpState::Sqe => &[QpState::Init, QpState::Err],
    };
    let mut from = QpState::Reset;
    for to in wanted {
        let mut attr = QpAttr::to_state(*to);
        let rule = transition_rule(t, from, *to).unwrap();
        for a in Attr::ALL.into_iter().filter(|a| rule.required.has(*a)) {
            set(&mut attr, a, from);
        }
        e.modify_qp(q, attr).unwrap();
        from = *to;
    }
    assert_eq!(e.query_qp(q).unwrap().state, if state == QpState::Sqe { QpState::Err } else { state });
    q
}

const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];
const REACHABLE: [QpState; 6] = [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Err];

/// Every edge of 7 x 7 states and 3 transports: exactly the required attributes pass; each one left out is named; each
/// one that is neither required nor optional is named; optional ones pass.
#[test]
fn every_transition_takes_exactly_what_the_table_says() {
    for t in TYPES {
        for from in REACHABLE {
            for to in QpState::ALL {
                let mut e = endpoint();
                let q = at(&mut e, t, from);
                let Some(rule) = transition_rule(t, from, to) else {
                    let refused = e.modify_qp(q, QpAttr::to_state(to)).unwrap_err();
                    assert_eq!(refused, VerbsError::Modify(ModifyError::NoTransition { from, to }));
                    continue;
                };
                let mut full = QpAttr::to_state(to);
                for a in Attr::ALL.into_iter().filter(|a| rule.required.has(*a)) {
                    set(&mut full, a, from);
                }
                for a in Attr::ALL {
                    let mut attr = QpAttr::to_state(to);
                    for b in Attr::ALL.into_iter().filter(|b| rule.required.has(*b) && *b != a) {
                        set(&mut attr, b, from);
                    }
                    if rule.required.has(a) {
                        let refused = e.modify_qp(q, attr).unwrap_err();
                        assert_eq!(refused, VerbsError::Modify(ModifyError::Missing { attr: a, from, to }));
                    } else if !rule.optional.has(a) {
                        set(&mut attr, a, from);
                        let refused = e.modify_qp(q, attr).unwrap_err();
                        assert_eq!(refused, VerbsError::Modify(ModifyError::NotAllowed { attr: a, from, to }));
                    }
                    assert_eq!(e.query_qp(q).unwrap().state, from, "a refused modify changes nothing");
                }
                for a in Attr::ALL.into_iter().filter(|a| rule.optional.has(*a)) {
                    set(&mut full, a, from);
                }
                e.modify_qp(q, full).unwrap_or_else(|x| panic!("{t:?} {from:?} {to:?}: {x}"));
                assert_eq!(e.query_qp(q).unwrap().state, to);
            }
        }
    }
}

#[test]
fn values_out_of_range_are_named() {
    let mut e = endpoint();
    let q = at(&mut e, QpType::Rc, QpState::Init);
    let good = RtrAttr {
        av: av(),
        path_mtu: PathMtu::B1024,
        dest_qpn: Qpn::new(5).unwrap(),
        rq_psn: Psn::ZERO,
        max_dest_rd_atomic: 128,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    let v6 = Gid::from("fd00::1".parse::<std::net::Ipv6Addr>().unwrap());
    let alt = |av| AltPath::new(av, AckTimeout::DEFAULT);
    let rotating = AddressVector { udp_source_port: SourcePort::Rotating, ..av() };
    let with_alt = |alt_path| QpAttr { alt_path: Some(alt_path), ..good.into() };
    let cases: [(Attr, QpAttr); 11] = [
        (Attr::Av, RtrAttr { av: AddressVector { sgid_index: 1, ..av() }, ..good }.into()),
        (Attr::Av, RtrAttr { av: AddressVector { dgid: v6, ..av() }, ..good }.into()),
        (Attr::Av, RtrAttr { av: AddressVector { flow_label: 1 << 20, ..av() }, ..good }.into()),
        (Attr::MaxDestRdAtomic, RtrAttr { max_dest_rd_atomic: 129, ..good }.into()),
        (Attr::DestQpn, RtrAttr { dest_qpn: Qpn::MULTICAST, ..good }.into()),
        (Attr::PKeyIndex, QpAttr { pkey_index: Some(1), ..good.into() }),
        (Attr::Av, RtrAttr { av: AddressVector { pkey_index: Some(0), ..av() }, ..good }.into()),
        (Attr::AltPath, with_alt(alt(AddressVector { sgid_index: 1, ..av() }))),
        (Attr::AltPath, with_alt(AltPath { port: 2, ..alt(av()) })),
        (Attr::AltPath, with_alt(AltPath { pkey_index: 1, ..alt(av()) })),
        (Attr::AltPath, with_alt(alt(AddressVector { service_level: 16, ..av() }))),
    ];
    for (attr, modify) in cases {
        assert_eq!(e.modify_qp(q, modify), Err(VerbsError::Modify(ModifyError::OutOfRange { attr })));
    }
    let uc = at(&mut e, QpType::Uc, QpState::Init);
    let refused = e.modify_qp(uc, RtrAttr { av: rotating, ..good }.for_uc());
    assert_eq!(refused, Err(VerbsError::Modify(ModifyError::OutOfRange { attr: Attr::Av })), "UC knows no drain");
    e.modify_qp(q, RtrAttr { av: rotating, ..good }.into()).unwrap();
    let wrong = QpAttr { cur_state: Some(QpState::Rts), ..RtsAttr::usual(Psn::ZERO).into() };
    assert!(matches!(
        e.modify_qp(q, wrong),
        Err(VerbsError::Modify(ModifyError::WrongCurrentState { named: QpState::Rts, actual: QpState::Rtr }))
    ));
}

#[test]
fn posting_by_state() {
    for state in REACHABLE {
        let mut e = endpoint();
        let q = at(&mut e, QpType::Rc, state);
        let payload = Payload::Inline(b"x");
        let wr =
            SendWr { wr_id: 0, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination: None };
        let sent = e.post_send(q, &[wr]).map_err(|x| x.error);
        let received = e.post_recv(q, &[RecvWr { wr_id: 0, sges: &[] }]).map_err(|x| x.error);
        let send_ok = matches!(state, QpState::Rts | QpState::Sqd | QpState::Err);
        assert_eq!(sent, if send_ok { Ok(()) } else { Err(PostError::WrongState(state)) });
        let recv_ok = state != QpState::Reset;
        assert_eq!(received, if recv_ok { Ok(()) } else { Err(PostError::WrongState(state)) });
    }
}

#[test]
fn a_list_is_queued_up_to_the_first_bad_one() {
    let mut e = endpoint();
    let q = at(&mut e, QpType::Rc, QpState::Rts);
    let good = SendWr {
        wr_id: 0,
        operation: Operation::Send,
        payload: Payload::Inline(b"x"),
        flags: SendFlags::SIGNALED,
        destination: None,
    };
    let sges = [Sge::default(); 2];
    let bad = SendWr { payload: Payload::Sges(&sges), ..good };
    let refused = e.post_send(q, &[good, good, bad, good]).unwrap_err();
    assert_eq!((refused.index, refused.error), (2, PostError::TooManySges { given: 2, max: 1 }));
    assert_eq!(e.query_qp(q).unwrap().queues.sends_outstanding, 2);
    let many = vec![good; 200];
    let refused = e.post_send(q, &many).unwrap_err();
    assert_eq!((refused.index, refused.error), (126, PostError::QueueFull));
    let long = [0; 65];
    let refused = e.post_send(q, &[SendWr { payload: Payload::Inline(&long), ..good }]).unwrap_err();
    assert_eq!(refused.error, PostError::InlineTooLong { given: 65, max: 64 });
}

#[test]
fn objects_in_use_stay_and_stale_handles_miss() {
    let mut e = endpoint();
    let pd = e.alloc_pd().unwrap();
    let cq = e.create_cq(8).unwrap();
    let region = Region::alloc(64).unwrap();
    let mr = e.register(pd, &region, AccessFlags::ALL, None).unwrap();
    let caps = QpCapabilities::default();
    let init = QpInit {
        pd,
        qp_type: QpType::Rc,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        caps,
        signal_all: false,
        qpn: Qpn::new(500),
    };
    let q = e.create_qp(init).unwrap();
    assert_eq!(e.create_qp(init), Err(VerbsError::Busy), "the number is taken");
    assert_eq!(e.destroy_cq(cq), Err(VerbsError::Busy));
    assert_eq!(e.dealloc_pd(pd), Err(VerbsError::Busy));
    e.destroy_qp(q).unwrap();
    assert_eq!(e.destroy_qp(q), Err(VerbsError::InvalidHandle));
    assert!(matches!(e.query_qp(q), Err(VerbsError::InvalidHandle)));
    assert_eq!(
        e.modify_qp(q, QpTransition::Init(InitAttr::connected(AccessFlags::ALL)).into()),
        Err(VerbsError::InvalidHandle)
    );
    assert_eq!(e.post_send(q, &[]).unwrap_err().error, PostError::InvalidHandle);
    e.destroy_cq(cq).unwrap();
    assert_eq!(e.dealloc_pd(pd), Err(VerbsError::Busy), "a region still uses it");
    e.deregister(mr.handle).unwrap();
    e.dealloc_pd(pd).unwrap();
    assert_eq!(e.object_counts(), [0; 6]);
    let too_many = QpInit { caps: QpCapabilities { max_send_wr: 20_000, ..caps }, ..init };
    let pd = e.alloc_pd().unwrap();
    let cq = e.create_cq(8).unwrap();
    let refused = e.create_qp(QpInit { pd, send_cq: cq, recv_cq: cq, ..too_many });
    assert!(matches!(refused, Err(VerbsError::InvalidCapability { field: "max_send_wr", value: 20_000, .. })));
}
