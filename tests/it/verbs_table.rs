//! The verbs in every state: what is allowed, and which attribute a refusal names.

use uroce::burst::{IdRule, Medium, TxRoom};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::time::Instant;
use uroce::types::{AckTimeout, Gid, Imm, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AltPath, Attr, FastRegister, FlushPlacement, FlushScope, InitAttr, ModifyError, MwBind,
    MwType, Operation, PathMigState, Payload, PostError, QpAttr, QpCapabilities, QpHandle, QpInit, QpState,
    QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, SourcePort, UdDestination, Verbs,
    VerbsError, transition_rule,
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

/// One work request of each operation, as it must be posted: name, operation, whether it takes 8 bytes.
fn operations(e: &mut Endpoint) -> Vec<(&'static str, Operation, bool)> {
    let pd = e.alloc_pd().unwrap();
    let region = Region::alloc(64).unwrap();
    let fast = e.alloc_fast_mr(pd, &region).unwrap();
    let mr = e.register(pd, &region, AccessFlags::ALL | AccessFlags::MW_BIND, None).unwrap();
    let mw = e.alloc_mw(pd, MwType::Two).unwrap();
    let remote = Remote { addr: 64, rkey: mr.rkey };
    let access = AccessFlags::REMOTE_READ;
    let bind = MwBind { mw: mw.handle, rkey: mw.rkey, mr: Some(mr.handle), addr: mr.iova, length: 8, access };
    let register = FastRegister { mr: fast.handle, key: fast.rkey, offset: 0, length: 8, iova: 0, access };
    let (placement, scope) = (FlushPlacement::Global, FlushScope::Range);
    vec![
        ("SEND", Operation::Send, true),
        ("SEND with immediate", Operation::SendImm(Imm::new(1)), true),
        ("SEND with invalidate", Operation::SendInvalidate(mw.rkey), true),
        ("WRITE", Operation::Write(remote), true),
        ("WRITE with immediate", Operation::WriteImm(remote, Imm::new(1)), true),
        ("READ", Operation::Read(remote), true),
        ("compare and swap", Operation::CompareSwap { remote, compare: 0, swap: 1 }, true),
        ("fetch and add", Operation::FetchAdd { remote, add: 1 }, true),
        ("ATOMIC WRITE", Operation::AtomicWrite(remote), true),
        ("FLUSH", Operation::Flush { remote, length: 8, placement, scope }, false),
        ("bind", Operation::BindMw(bind), false),
        ("local invalidation", Operation::LocalInvalidate(mw.rkey), false),
        ("fast registration", Operation::FastRegister(register), false),
    ]
}

/// IBTA Vol 1 table 11-2 of what each service has; binds, invalidations and registrations are for connected ones.
fn has(t: QpType, name: &str) -> bool {
    match name {
        "SEND" | "SEND with immediate" => true,
        "WRITE" | "WRITE with immediate" | "bind" | "local invalidation" | "fast registration" => t != QpType::Ud,
        _ => t == QpType::Rc,
    }
}

/// Each operation on each transport in each state: the state is looked at first, then whether the transport has it.
/// What is posted in ERR is flushed, once.
#[test]
fn every_operation_in_every_state_of_every_transport() {
    for t in TYPES {
        for state in REACHABLE {
            let mut e = endpoint();
            for (name, operation, eight) in operations(&mut e) {
                let q = at(&mut e, t, state);
                let sges = [Sge { length: 8, ..Sge::default() }];
                let payload = Payload::Sges(if eight { &sges } else { &[] });
                let pd = e.alloc_pd().unwrap();
                let destination = (t == QpType::Ud).then(|| UdDestination {
                    ah: e.create_ah(pd, av()).unwrap(),
                    qpn: Qpn::new(99).unwrap(),
                    qkey: QKey::new(7),
                });
                let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination };
                let posted = e.post_send(q, &[wr]).map_err(|x| x.error);
                let expected = match state {
                    QpState::Reset | QpState::Init | QpState::Rtr => Err(PostError::WrongState(state)),
                    _ if !has(t, name) => Err(PostError::WrongOperation),
                    // It came here without ever having had a depth.
                    QpState::Err if operation.awaits_response() => Err(PostError::NoReadDepth),
                    _ => Ok(()),
                };
                assert_eq!(posted, expected, "{name} on {t:?} in {state:?}");
                if state == QpState::Err && posted.is_ok() {
                    let mut buf = [0; 5000];
                    let medium = Medium::Udp;
                    let ids = IdRule::Zero;
                    let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids, medium };
                    assert!(e.poll_transmit(Instant::ZERO, room).is_none());
                    assert_eq!(e.query_qp(q).unwrap().queues.sends_outstanding, 0, "{name} on {t:?} is flushed");
                }
            }
        }
    }
}

/// The verbs of memory know no QP state; a bind of a type 1 window goes through the QP's.
#[test]
fn windows_are_bound_in_the_states_that_send() {
    for t in TYPES {
        for state in REACHABLE {
            let mut e = endpoint();
            let q = at(&mut e, t, state);
            let pd = e.alloc_pd().unwrap();
            let mw = e.alloc_mw(pd, MwType::One).unwrap();
            let access = AccessFlags::NONE;
            let bind = MwBind { mw: mw.handle, rkey: mw.rkey, mr: None, addr: 0, length: 0, access };
            let bound = e.bind_mw(q, 1, bind, SendFlags::SIGNALED);
            match state {
                QpState::Reset | QpState::Init | QpState::Rtr => assert_eq!(bound, Err(PostError::WrongState(state))),
                // A bind has no destination, which a datagram needs; that it is a bind is found first.
                _ if t == QpType::Ud => assert_eq!(bound, Err(PostError::WrongOperation)),
                _ => assert_eq!(bound.map(|key| key.get() >> 8), Ok(mw.rkey.get() >> 8)),
            }
            e.dealloc_mw(mw.handle).unwrap();
            assert_eq!(e.bind_mw(q, 1, bind, SendFlags::SIGNALED), Err(PostError::InvalidHandle));
        }
    }
}

/// The numbers of `enum ibv_qp_type`; XRC is refused by name.
#[test]
fn xrc_is_refused_by_name() {
    for (number, t) in [(1, QpType::Gsi), (2, QpType::Rc), (3, QpType::Uc), (4, QpType::Ud)] {
        assert_eq!(QpType::from_verbs(number), Ok(t));
    }
    for number in [9, 10] {
        let text = QpType::from_verbs(number).unwrap_err().to_string();
        assert_eq!(text, "XRC, the extended reliable connection, is not supported by this device");
    }
    for number in [0, 5, 8, 11, 255, u32::MAX] {
        assert!(matches!(QpType::from_verbs(number), Err(VerbsError::Unsupported(_))));
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
