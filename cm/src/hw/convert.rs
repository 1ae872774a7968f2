//! From librdmacm's numbers to the front's vocabulary.
//!
//! Owns events, what the peer said, and what a QP needs. Pure.

use uroce::hw::abi as ibv;
use uroce::hw::{address_from, qp_attr_from};
use uroce::types::{AckTimeout, PathMtu, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{AccessFlags, RtrAttr, RtsAttr};

use super::abi;
use super::ffi::Said;
use crate::id::{EventKind, PeerParam, ReadyQp, UdPeer};
use crate::wire::TransportService;

/// The kind with librdmacm's number.
pub(super) fn event_kind(number: u32) -> Option<EventKind> {
    const ALL: [EventKind; 16] = [
        EventKind::AddrResolved,
        EventKind::AddrError,
        EventKind::RouteResolved,
        EventKind::RouteError,
        EventKind::ConnectRequest,
        EventKind::ConnectResponse,
        EventKind::ConnectError,
        EventKind::Unreachable,
        EventKind::Rejected,
        EventKind::Established,
        EventKind::Disconnected,
        EventKind::DeviceRemoval,
        EventKind::MulticastJoin,
        EventKind::MulticastError,
        EventKind::AddrChange,
        EventKind::TimewaitExit,
    ];
    ALL.into_iter().find(|kind| kind.code() == number)
}

/// What the peer said, with its private data.
pub(super) fn peer_param(said: &Said, private_data: Vec<u8>) -> PeerParam {
    match said {
        Said::Connection(c) => PeerParam {
            private_data,
            responder_resources: c.responder_resources,
            initiator_depth: c.initiator_depth,
            flow_control: c.flow_control != 0,
            retry_count: c.retry_count,
            rnr_retry_count: c.rnr_retry_count,
            srq: c.srq != 0,
            qp_num: Qpn::from_wire(c.qp_num),
        },
        Said::Datagram(u) => PeerParam { private_data, qp_num: Qpn::from_wire(u.qp_num), ..PeerParam::default() },
    }
}

/// Where datagrams go, when a datagram service was resolved.
pub(super) fn ud_peer(kind: EventKind, said: &Said) -> Option<UdPeer> {
    match said {
        Said::Datagram(u) if kind == EventKind::Established => {
            Some(UdPeer { qpn: Qpn::from_wire(u.qp_num), qkey: QKey::new(u.qkey), av: address_from(&u.ah_attr) })
        }
        _ => None,
    }
}

/// What a QP needs, from what librdmacm says of the two transitions.
pub(super) fn ready(
    rtr: (ibv::QpAttr, u32),
    rts: (ibv::QpAttr, u32),
    transport: TransportService,
    min_rnr_timer: RnrTimer,
) -> Option<ReadyQp> {
    let (to_rtr, to_rts) = (qp_attr_from(&rtr.0, rtr.1), qp_attr_from(&rts.0, rts.1));
    let max_dest_rd_atomic = to_rtr.max_dest_rd_atomic.unwrap_or(0);
    Some(ReadyQp {
        transport,
        access: access(max_dest_rd_atomic),
        rtr: RtrAttr {
            av: to_rtr.av?,
            path_mtu: to_rtr.path_mtu.unwrap_or(PathMtu::B1024),
            dest_qpn: to_rtr.dest_qpn?,
            rq_psn: to_rtr.rq_psn?,
            max_dest_rd_atomic,
            min_rnr_timer,
        },
        rts: RtsAttr {
            sq_psn: to_rts.sq_psn?,
            timeout: to_rts.timeout.unwrap_or(AckTimeout::DEFAULT),
            retry_count: to_rts.retry_count.unwrap_or(RetryCount::MAX),
            rnr_retry: to_rts.rnr_retry.unwrap_or(RnrRetry::FOREVER),
            max_rd_atomic: to_rts.max_rd_atomic.unwrap_or(0),
        },
    })
}

/// What a peer may do: WRITE, and READ and atomics when we serve any.
const fn access(served: u8) -> AccessFlags {
    let bits = if served > 0 { 0b1110 } else { 0b0010 };
    match AccessFlags::from_bits(bits) {
        Some(access) => access,
        None => AccessFlags::REMOTE_WRITE,
    }
}

/// Nothing said.
pub(super) const fn conn_param(qp_num: Qpn) -> abi::ConnParam {
    abi::ConnParam {
        private_data: core::ptr::null(),
        private_data_len: 0,
        responder_resources: 0,
        initiator_depth: 0,
        flow_control: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: 0,
        qp_num: qp_num.get(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uroce::types::Psn;

    #[test]
    fn events_have_librdmacms_numbers() {
        for number in 0..16 {
            assert_eq!(event_kind(number).map(EventKind::code), Some(number));
        }
        assert_eq!(event_kind(16), None);
    }

    #[test]
    fn what_the_peer_said_of_a_connection() {
        let said = abi::ConnParam {
            responder_resources: 4,
            initiator_depth: 8,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: 1,
            ..conn_param(Qpn::from_wire(0x36))
        };
        let wanted = PeerParam {
            private_data: b"hi".to_vec(),
            responder_resources: 4,
            initiator_depth: 8,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: true,
            qp_num: Qpn::from_wire(0x36),
        };
        assert_eq!(peer_param(&Said::Connection(said), b"hi".to_vec()), wanted);
        assert_eq!(ud_peer(EventKind::Established, &Said::Connection(said)), None);
    }

    #[test]
    fn what_the_peer_said_of_a_datagram_service() {
        let mut ah_attr = ibv::AhAttr::default();
        ah_attr.grh.sgid_index = 1;
        ah_attr.grh.dgid.0[15] = 2;
        let said = Said::Datagram(abi::UdParam {
            private_data: core::ptr::null(),
            private_data_len: 0,
            ah_attr,
            qp_num: 0x36,
            qkey: 0x0123_4567,
        });
        assert_eq!(peer_param(&said, Vec::new()).qp_num, Qpn::from_wire(0x36));
        let peer = ud_peer(EventKind::Established, &said).unwrap();
        assert_eq!((peer.qpn.get(), peer.qkey, peer.av.sgid_index), (0x36, QKey::RDMA_UDP, 1));
        assert_eq!(peer.av.dgid.to_bytes()[15], 2);
        assert_eq!(ud_peer(EventKind::ConnectRequest, &said), None);
    }

    #[test]
    fn a_qp_gets_what_librdmacm_says() {
        let mut rtr =
            ibv::QpAttr { path_mtu: 3, dest_qp_num: 0x36, rq_psn: 5, max_dest_rd_atomic: 4, ..Default::default() };
        rtr.ah_attr.grh.sgid_index = 1;
        // AV, PATH_MTU, RQ_PSN, MAX_DEST_RD_ATOMIC, DEST_QPN.
        let rtr = (rtr, 1 << 7 | 1 << 8 | 1 << 12 | 1 << 17 | 1 << 20);
        let rts =
            ibv::QpAttr { sq_psn: 6, timeout: 15, retry_cnt: 7, rnr_retry: 3, max_rd_atomic: 2, ..Default::default() };
        // TIMEOUT, RETRY_CNT, RNR_RETRY, MAX_QP_RD_ATOMIC, SQ_PSN.
        let rts = (rts, 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16);
        let ready = super::ready(rtr, rts, TransportService::Rc, RnrTimer::DEFAULT).unwrap();
        let remote = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        assert_eq!((ready.access, ready.rtr.av.sgid_index, ready.rtr.path_mtu), (remote, 1, PathMtu::B1024));
        assert_eq!(
            (ready.rtr.dest_qpn.get(), ready.rtr.rq_psn, ready.rtr.max_dest_rd_atomic),
            (0x36, Psn::from_wire(5), 4)
        );
        assert_eq!((ready.rtr.min_rnr_timer, ready.rts.sq_psn), (RnrTimer::DEFAULT, Psn::from_wire(6)));
        assert_eq!((ready.rts.timeout.code(), ready.rts.retry_count.get()), (15, 7));
        assert_eq!((ready.rts.rnr_retry.code(), ready.rts.max_rd_atomic), (3, 2));
        // Without an address or PSN there is nothing to connect.
        assert_eq!(super::ready((rtr.0, 0), rts, TransportService::Rc, RnrTimer::DEFAULT), None);
        let serves_nothing = (ibv::QpAttr { max_dest_rd_atomic: 0, ..rtr.0 }, rtr.1);
        let ready = super::ready(serves_nothing, rts, TransportService::Rc, RnrTimer::DEFAULT).unwrap();
        assert_eq!(ready.access, AccessFlags::REMOTE_WRITE);
    }
}
