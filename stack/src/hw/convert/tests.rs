//! Every arm of every conversion, against the numbers of the verbs.

use super::*;
use crate::table::Slab;
use crate::types::Lkey;
use crate::verbs::{
    FailureKind, FastRegister, FlushPlacement, FlushScope, InitAttr, MwBind, Payload, QpTransition, Remote, RtrAttr,
    RtsAttr, SendFlags, Sge, UdDestination, kind,
};

fn gid(last: u8) -> Gid {
    Gid::from(core::net::Ipv4Addr::new(10, 77, 0, last))
}

fn av() -> AddressVector {
    AddressVector { traffic_class: 0x68, flow_label: 0xABCDE, service_level: 3, ..AddressVector::new(gid(2), 1) }
}

/// Every attribute at once, each with a value of its own.
fn everything() -> QpAttr {
    QpAttr {
        state: Some(QpState::Rts),
        cur_state: Some(QpState::Rtr),
        sqd_async_notify: Some(true),
        access: Some(AccessFlags::ALL),
        pkey_index: Some(5),
        port: Some(1),
        qkey: Some(QKey::new(0x1111_1111)),
        av: Some(av()),
        path_mtu: Some(PathMtu::B1024),
        timeout: AckTimeout::new(14),
        retry_count: RetryCount::new(6),
        rnr_retry: RnrRetry::new(7),
        rq_psn: Psn::new(0x12_3456),
        max_rd_atomic: Some(16),
        alt_path: AckTimeout::new(15)
            .map(|t| AltPath { pkey_index: 2, ..AltPath::new(AddressVector::new(gid(3), 1), t) }),
        path_mig_state: Some(PathMigState::Rearm),
        min_rnr_timer: RnrTimer::new(12),
        sq_psn: Psn::new(0x65_4321),
        max_dest_rd_atomic: Some(8),
        dest_qpn: Qpn::new(0x36),
    }
}

#[test]
fn attributes_stand_in_the_fields_of_their_names() {
    let (a, mask) = qp_attr(&everything(), 2).unwrap();
    // All bits of ibv_qp_attr_mask but 19, the capabilities.
    assert_eq!(mask, 0x1F_FFFF & !(1 << 19));
    assert_eq!((a.qp_state, a.cur_qp_state, a.path_mtu, a.path_mig_state), (3, 2, 3, 1));
    assert_eq!((a.qkey, a.rq_psn, a.sq_psn, a.dest_qp_num), (0x1111_1111, 0x12_3456, 0x65_4321, 0x36));
    assert_eq!((a.qp_access_flags, a.pkey_index, a.en_sqd_async_notify), (15, 5, 1));
    assert_eq!((a.max_rd_atomic, a.max_dest_rd_atomic, a.min_rnr_timer), (16, 8, 12));
    // Our port 1 is the one that was opened.
    assert_eq!((a.port_num, a.timeout, a.retry_cnt, a.rnr_retry), (2, 14, 6, 7));
    assert_eq!((a.alt_port_num, a.alt_timeout, a.alt_pkey_index), (2, 15, 2));
    let path = &a.ah_attr;
    assert_eq!(path.grh.dgid.0, gid(2).to_bytes());
    assert_eq!((path.grh.flow_label, path.grh.sgid_index, path.grh.hop_limit), (0xABCDE, 1, 64));
    assert_eq!((path.grh.traffic_class, path.sl, path.is_global, path.port_num), (0x68, 3, 1, 2));
    assert_eq!(a.alt_ah_attr.grh.dgid.0, gid(3).to_bytes());
}

#[test]
fn attributes_come_back() {
    let (a, mask) = qp_attr(&everything(), 2).unwrap();
    assert_eq!(qp_attr_from(&a, mask), everything());
    assert_eq!(qp_attr_from(&a, 0), QpAttr::default());
    for attr in Attr::ALL {
        let one = qp_attr_from(&a, 1 << attr as u8);
        assert_eq!(one.present().bits(), 1 << attr as u8, "{attr:?}");
        assert_eq!(one.state, None);
    }
}

#[test]
fn values_that_nobody_knows_are_left_out() {
    let odd = abi::QpAttr {
        qp_state: 9,
        cur_qp_state: 7,
        path_mtu: 6,
        path_mig_state: 3,
        timeout: 32,
        retry_cnt: 8,
        rnr_retry: 8,
        min_rnr_timer: 32,
        alt_timeout: 32,
        ..abi::QpAttr::default()
    };
    let read = qp_attr_from(&odd, abi::QP_ALL);
    assert_eq!((read.state, read.cur_state, read.path_mtu, read.path_mig_state), (None, None, None, None));
    assert_eq!((read.timeout, read.retry_count, read.rnr_retry, read.min_rnr_timer), (None, None, None, None));
    assert_eq!(read.alt_path, None);
}

#[test]
fn masks_are_those_of_the_ibv_programs() {
    let mask = |attr: QpAttr| qp_attr(&attr, 1).unwrap().1;
    // STATE | PKEY_INDEX | PORT | ACCESS_FLAGS
    assert_eq!(mask(InitAttr::connected(AccessFlags::ALL).into()), 1 | 1 << 4 | 1 << 5 | 1 << 3);
    // STATE | PKEY_INDEX | PORT | QKEY
    assert_eq!(mask(InitAttr::datagram(QKey::new(1)).into()), 1 | 1 << 4 | 1 << 5 | 1 << 6);
    let rtr = RtrAttr {
        av: av(),
        path_mtu: PathMtu::B1024,
        dest_qpn: Qpn::from_wire(2),
        rq_psn: Psn::from_wire(3),
        max_dest_rd_atomic: 1,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    // STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN, and for RC MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER
    let uc = 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12;
    assert_eq!(mask(rtr.for_uc()), uc);
    assert_eq!(mask(rtr.into()), uc | 1 << 17 | 1 << 15);
    // STATE | TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC
    let rts = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13;
    assert_eq!(mask(RtsAttr::usual(Psn::from_wire(1)).into()), rts);
    assert_eq!(mask(QpTransition::RtsPsn(Psn::from_wire(1)).into()), 1 | 1 << 16);
    assert_eq!(mask(QpTransition::Sqd { notify: true }.into()), 1 | 1 << 2);
    assert_eq!(mask(QpTransition::Reset.into()), 1);
}

#[test]
fn a_source_port_is_not_hardwares_to_choose() {
    let with_port = AddressVector { udp_source_port: SourcePort::Fixed(50_000), ..av() };
    let primary = QpAttr { av: Some(with_port), ..QpAttr::default() };
    assert_eq!(qp_attr(&primary, 1), Err(ModifyError::Unsupported { attr: Attr::Av }));
    let alternate = QpAttr { alt_path: Some(AltPath::new(with_port, AckTimeout::DEFAULT)), ..QpAttr::default() };
    assert_eq!(qp_attr(&alternate, 1), Err(ModifyError::Unsupported { attr: Attr::AltPath }));
}

#[test]
fn types_states_and_sizes_have_the_numbers_of_the_verbs() {
    // IBV_QPT_RC 2, UC 3, UD 4; SMI and GSI 0 and 1.
    let types = [QpType::Gsi, QpType::Rc, QpType::Uc, QpType::Ud].map(qp_type);
    assert_eq!(types, [1, 2, 3, 4]);
    for number in 0..7 {
        assert_eq!(state(number).map(|s| s as u32), Some(number));
    }
    assert_eq!(state(7), None);
    for (number, wanted) in [PathMigState::Migrated, PathMigState::Rearm, PathMigState::Armed].into_iter().enumerate() {
        assert_eq!(mig_state(u32::try_from(number).unwrap()), Some(wanted));
    }
    let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 2, max_send_sge: 3, max_recv_sge: 4, max_inline: 5 };
    let raw = cap(&caps);
    assert_eq!((raw.max_send_wr, raw.max_recv_wr, raw.max_send_sge, raw.max_recv_sge), (1, 2, 3, 4));
    assert_eq!(raw.max_inline_data, 5);
    assert_eq!(cap_from(&raw), caps);
}

#[test]
fn gid_types() {
    let entry = |gid_type| abi::GidEntry { gid: abi::GidBytes(gid(1).to_bytes()), gid_type, ..Default::default() };
    // IBV_GID_TYPE_IB 0, ROCE_V1 1, ROCE_V2 2.
    assert_eq!(super::gid(&entry(2)), GidEntry { gid: gid(1), gid_type: GidType::RoceV2 });
    assert_eq!(super::gid(&entry(1)).gid_type, GidType::RoceV1);
    assert!(!super::gid(&entry(0)).is_usable());
}

fn wr(operation: Operation) -> SendWr<'static> {
    SendWr { wr_id: 9, operation, payload: Payload::Sges(&[]), flags: SendFlags::default(), destination: None }
}

#[test]
fn operations_become_opcodes_with_their_targets() {
    let (remote, imm) = (Remote { addr: 0x1000, rkey: Rkey::new(0x77) }, Imm::new(0x0102_0304));
    let none = abi::Target::default();
    let rdma = abi::Target::rdma(0x1000, 0x77);
    // By the numbers of enum ibv_wr_opcode; immediate data stand in memory as on the wire.
    let wire = u32::from_ne_bytes([1, 2, 3, 4]);
    let table = [
        (Operation::Send, 2, 0, none),
        (Operation::SendImm(imm), 3, wire, none),
        (Operation::SendInvalidate(Rkey::new(0x88)), 9, 0x88, none),
        (Operation::Write(remote), 0, 0, rdma),
        (Operation::WriteImm(remote, imm), 1, wire, rdma),
        (Operation::Read(remote), 4, 0, rdma),
        (Operation::CompareSwap { remote, compare: 5, swap: 6 }, 5, 0, abi::Target::atomic(0x1000, 5, 6, 0x77)),
        (Operation::FetchAdd { remote, add: 7 }, 6, 0, abi::Target::atomic(0x1000, 7, 0, 0x77)),
    ];
    for (operation, opcode, imm_or_key, target) in table {
        let made = send_wr(&wr(operation), None).unwrap();
        assert_eq!((made.wr_id, made.opcode, made.imm_data, made.wr), (9, opcode, imm_or_key, target));
        assert_eq!((made.send_flags, made.num_sge), (0, 0));
    }
}

#[test]
fn operations_that_are_not_posted_are_named() {
    let remote = Remote::default();
    let (mr, mw) = (Slab::<kind::Mr, ()>::new(1).insert(()).unwrap(), Slab::<kind::Mw, ()>::new(1).insert(()).unwrap());
    let access = AccessFlags::NONE;
    let bind = MwBind { mw, rkey: Rkey::new(1), mr: None, addr: 0, length: 0, access };
    let register = FastRegister { mr, key: Rkey::new(1), offset: 0, length: 0, iova: 0, access };
    let (placement, scope) = (FlushPlacement::Global, FlushScope::Range);
    for (operation, name) in [
        (Operation::AtomicWrite(remote), "ATOMIC WRITE"),
        (Operation::Flush { remote, length: 1, placement, scope }, "FLUSH"),
        (Operation::BindMw(bind), "a memory window"),
        (Operation::LocalInvalidate(Rkey::new(1)), "local invalidation"),
        (Operation::FastRegister(register), "fast registration"),
    ] {
        assert_eq!(send_wr(&wr(operation), None).unwrap_err(), PostError::Unsupported(name));
    }
}

#[test]
fn a_datagram_has_a_destination() {
    let ah = Slab::<kind::Ah, ()>::new(1).insert(()).unwrap();
    let to = UdDestination { ah, qpn: Qpn::from_wire(0x36), qkey: QKey::new(0x1111_1111) };
    let datagram = SendWr { destination: Some(to), ..wr(Operation::Send) };
    let made = send_wr(&datagram, Some(0xA0)).unwrap();
    assert_eq!(made.wr, abi::Target::datagram(0xA0, 0x36, 0x1111_1111));
}

#[test]
fn flags_have_the_bits_of_the_verbs() {
    let flags = |fence, signaled, solicited| SendFlags { signaled, solicited, fence };
    let bits = |flags, payload| send_flags(&SendWr { flags, payload, ..wr(Operation::Send) });
    let sges = [Sge { addr: 0, length: 1, lkey: Lkey::new(0) }];
    assert_eq!(bits(flags(true, false, false), Payload::Sges(&sges)), 1);
    assert_eq!(bits(flags(false, true, false), Payload::Sges(&sges)), 2);
    assert_eq!(bits(flags(false, false, true), Payload::Sges(&sges)), 4);
    assert_eq!(bits(flags(false, false, false), Payload::Inline(b"x")), 8);
    assert_eq!(bits(flags(true, true, true), Payload::Inline(b"x")), 15);
}

#[test]
fn statuses_have_the_numbers_of_the_verbs() {
    let ours = [
        WcStatus::Success,
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
    for known in ours {
        assert_eq!(status(known as u32), known);
    }
    // End-to-end contexts and reliable datagrams: RoCE has none.
    for other in [3, 14, 15, 16, 17, 18, 19, 20, 22, 23, u32::MAX] {
        assert_eq!(status(other), WcStatus::General);
    }
}

#[test]
fn completion_opcodes_have_the_numbers_of_the_verbs() {
    let ours = [
        WcOpcode::Send,
        WcOpcode::RdmaWrite,
        WcOpcode::RdmaRead,
        WcOpcode::CompareSwap,
        WcOpcode::FetchAdd,
        WcOpcode::BindMw,
        WcOpcode::LocalInvalidate,
        WcOpcode::AtomicWrite,
        WcOpcode::Recv,
        WcOpcode::RecvRdmaWithImm,
    ];
    for known in ours {
        assert_eq!(wc_opcode(known as u32), Some(known));
    }
    for other in [7, 10, 130, u32::MAX] {
        assert_eq!(wc_opcode(other), None);
    }
}

#[test]
fn a_completion_is_read_with_what_it_carries() {
    let qp = Slab::<kind::Qp, ()>::new(1).insert(()).unwrap();
    let raw = abi::Wc {
        wr_id: 9,
        opcode: 128,
        byte_len: 44,
        imm_data: u32::from_ne_bytes([1, 2, 3, 4]),
        qp_num: 0x11,
        src_qp: 0x36,
        wc_flags: WC_GRH | WC_WITH_IMM,
        vendor_err: 7,
        ..abi::Wc::default()
    };
    let wc = completion(&raw, qp);
    assert_eq!((wc.wr_id, wc.status, wc.opcode, wc.byte_len), (9, WcStatus::Success, WcOpcode::Recv, 44));
    assert_eq!((wc.data, wc.grh, wc.vendor_err), (WcData::Imm(Imm::new(0x0102_0304)), true, 0x8000_0007));
    assert_eq!((wc.qp, wc.qp_num.get(), wc.src_qp.get()), (qp, 0x11, 0x36));
    let invalidated = abi::Wc { wc_flags: WC_WITH_INV, imm_data: 0x88, ..raw };
    assert_eq!(completion(&invalidated, qp).data, WcData::Invalidated(Rkey::new(0x88)));
    let plain = completion(&abi::Wc { wc_flags: 0, ..raw }, qp);
    assert_eq!((plain.data, plain.grh), (WcData::None, false));
    let failed = completion(&abi::Wc { status: 12, opcode: 0xDEAD, ..raw }, qp);
    assert_eq!((failed.status, failed.data), (WcStatus::RetryExceeded, WcData::None));
    // A driver's number means nothing to us: the status alone explains.
    assert_eq!(FailureKind::from_vendor_err(failed.vendor_err), None);
    assert_eq!(completion(&abi::Wc { vendor_err: 0, ..raw }, qp).vendor_err, 0);
}
