//! Every failure says what happened and what to do.

use std::collections::BTreeSet;

use super::*;
use crate::table::Slab;
use crate::types::{AckTimeout, Gid, PathMtu, Psn, Qpn, RetryCount, Rkey, RnrRetry};
use crate::verbs::{AddressVector, QpAttr, QpCapabilities, QpHandle, QpState, QpType, QueueSnapshot, WcData};

const STATUSES: [WcStatus; 13] = [
    WcStatus::LocalLength,
    WcStatus::LocalQpOperation,
    WcStatus::LocalProtection,
    WcStatus::WorkRequestFlushed,
    WcStatus::MwBind,
    WcStatus::BadResponse,
    WcStatus::LocalAccess,
    WcStatus::RemoteInvalidRequest,
    WcStatus::RemoteAccess,
    WcStatus::RemoteOperation,
    WcStatus::RetryExceeded,
    WcStatus::RnrRetryExceeded,
    WcStatus::General,
];

/// What a person is told to do begins with one of these.
const VERBS: [&str; 14] = [
    "check",
    "look",
    "post",
    "make",
    "take",
    "mend",
    "raise",
    "invalidate",
    "if this was not meant, look",
    "the peer must",
    "connect",
    "set",
    "destroy",
    "ask",
];

fn completion(status: WcStatus, vendor_err: u32) -> WorkCompletion {
    let qp: QpHandle = Slab::new(1).insert(()).unwrap();
    WorkCompletion {
        wr_id: 1,
        status,
        opcode: WcOpcode::Send,
        vendor_err,
        byte_len: 0,
        data: WcData::None,
        qp,
        qp_num: Qpn::from_wire(0x11),
        src_qp: Qpn::from_wire(0),
        grh: false,
        solicited: false,
    }
}

fn detail(kind: FailureKind, status: WcStatus, request: Option<RequestFacts>) -> ErrorDetail {
    let elapsed = Duration::from_micros(536_870);
    ErrorDetail { kind, status, psn: Psn::from_wire(0x5b_53cb), tries: 8, elapsed, request }
}

fn info(last_error: Option<ErrorDetail>) -> QpInfo {
    let peer: core::net::IpAddr = "10.77.0.2".parse().unwrap();
    let attr = QpAttr {
        av: Some(AddressVector::new(Gid::from(peer), 0)),
        path_mtu: Some(PathMtu::B1024),
        dest_qpn: Some(Qpn::from_wire(0x36)),
        timeout: AckTimeout::new(14),
        retry_count: Some(RetryCount::MAX),
        rnr_retry: RnrRetry::new(3),
        ..QpAttr::default()
    };
    QpInfo {
        qpn: Qpn::from_wire(0x11),
        qp_type: QpType::Rc,
        state: QpState::Err,
        attr,
        caps: QpCapabilities::default(),
        queues: QueueSnapshot::default(),
        last_error,
    }
}

#[test]
fn every_status_with_every_kind_says_what_happened_and_what_to_do() {
    for status in STATUSES {
        for kind in FailureKind::ALL.map(Some).into_iter().chain([None]) {
            let wc = completion(status, kind.map_or(0, |k| k as u32));
            let known = info(kind.map(|k| detail(k, status, None)));
            let other = info(Some(detail(FailureKind::NoAnswer, WcStatus::RetryExceeded, None)));
            for qp in [None, Some(&known), Some(&other)] {
                let e = wc.explain(qp);
                let (reason, advice) = (e.reason().to_string(), e.advice().to_string());
                assert!(reason.len() > 10, "{status:?} {kind:?}: {reason}");
                assert!(advice.len() > 25, "{status:?} {kind:?}: {advice}");
                assert!(VERBS.iter().any(|v| advice.starts_with(v)), "{status:?} {kind:?}: {advice}");
                assert_eq!(e.to_string(), format!("{reason}: {advice}"));
            }
        }
    }
}

#[test]
fn no_two_kinds_say_the_same() {
    let texts = |qp: fn(FailureKind) -> Option<QpInfo>| {
        let all = FailureKind::ALL.into_iter().map(|kind| {
            let qp = qp(kind);
            completion(WcStatus::General, kind as u32).explain(qp.as_ref()).to_string()
        });
        all.collect::<BTreeSet<_>>().len()
    };
    assert_eq!(texts(|_| None), FailureKind::ALL.len());
    assert_eq!(texts(|kind| Some(info(Some(detail(kind, WcStatus::General, None))))), FailureKind::ALL.len());
}

#[test]
fn a_device_that_tells_no_kind_is_explained_by_its_status() {
    let text = |status| completion(status, 0x89).explain(None).to_string();
    assert!(
        text(WcStatus::RetryExceeded).starts_with("the peer does not answer (transport retry counter exceeded): check")
    );
    assert!(text(WcStatus::RemoteAccess).contains("rkey is registered"));
    assert!(text(WcStatus::LocalQpOperation).contains("check the work request"));
}

#[test]
fn silence_names_psn_tries_time_peer_and_path_mtu() {
    let request = RequestFacts { opcode: WcOpcode::RdmaWrite, remote: None, length: 4096 };
    let qp = info(Some(detail(FailureKind::NoAnswer, WcStatus::RetryExceeded, Some(request))));
    let text = completion(WcStatus::RetryExceeded, FailureKind::NoAnswer as u32).explain(Some(&qp)).to_string();
    for part in [
        "no answer for PSN 0x5b53cb after 8 tries in 536.870 ms",
        "a WRITE of 4096 bytes",
        "retry_cnt 7 and an ACK timeout of 67.108 ms",
        "QP 0x000036 in RTR or RTS at ::ffff:10.77.0.2",
        "`uroce doctor 10.77.0.2`",
        "a path MTU of 1024 does not fit the path",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_refused_access_names_key_range_and_right() {
    let remote = Some(Remote { addr: 0x1000, rkey: Rkey::new(0xabcd) });
    for (opcode, right) in [
        (WcOpcode::RdmaWrite, "allow remote write"),
        (WcOpcode::RdmaRead, "allow remote read"),
        (WcOpcode::FetchAdd, "allow remote atomic access"),
    ] {
        let request = RequestFacts { opcode, remote, length: 256 };
        let (kind, status) = (FailureKind::NakRemoteAccess, WcStatus::RemoteAccess);
        let qp = info(Some(detail(kind, status, Some(request))));
        let text = completion(status, kind as u32).explain(Some(&qp)).to_string();
        for part in ["of 256 bytes at 0x1000 with rkey 0x0000abcd", "0x1000 to 0x1100 lie inside", right] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

#[test]
fn what_was_flushed_names_the_first_failure() {
    let flushed = completion(WcStatus::WorkRequestFlushed, FailureKind::Flushed as u32);
    let qp = info(Some(detail(FailureKind::ReceiverNotReady, WcStatus::RnrRetryExceeded, None)));
    let text = flushed.explain(Some(&qp)).to_string();
    assert!(
        text.starts_with("flushed, because the QP had failed before: the peer had no receive for PSN 0x5b53cb"),
        "{text}"
    );
    assert!(text.contains("mend that first failure (post receives at the peer"), "{text}");
    let qp = info(Some(detail(FailureKind::Flushed, WcStatus::WorkRequestFlushed, None)));
    assert!(flushed.explain(Some(&qp)).to_string().contains("look who disconnected"));
}
