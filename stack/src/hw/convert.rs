//! From our vocabulary to the numbers of libibverbs and back.
//!
//! Owns masks, flags, opcodes, statuses and attribute structures. Pure: nothing here calls the library.

use super::abi;
use crate::types::{AckTimeout, Gid, Imm, PathMtu, Psn, QKey, Qpn, RetryCount, Rkey, RnrRetry, RnrTimer};
use crate::verbs::{
    AccessFlags, AddressVector, AltPath, Attr, GidEntry, GidType, ModifyError, Operation, PathMigState, PostError,
    QpAttr, QpCapabilities, QpHandle, QpState, QpType, SendWr, SourcePort, WcData, WcOpcode, WcStatus, WorkCompletion,
};

/// The rights that the verbs of hardware know under the same bits.
const ACCESS: u32 = 0x33F;
/// Send flags.
const FENCE: u32 = 1;
const SIGNALED: u32 = 1 << 1;
const SOLICITED: u32 = 1 << 2;
const INLINE: u32 = 1 << 3;
/// Completion flags.
const WC_GRH: u32 = 1;
const WC_WITH_IMM: u32 = 1 << 1;
const WC_WITH_INV: u32 = 1 << 3;
/// Marks a driver's own error number, so that none is taken for one of [`crate::verbs::FailureKind`].
const FOREIGN: u32 = 1 << 31;
/// Opcodes of send work requests.
const WR_RDMA_WRITE: u32 = 0;
const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
const WR_SEND: u32 = 2;
const WR_SEND_WITH_IMM: u32 = 3;
const WR_RDMA_READ: u32 = 4;
const WR_ATOMIC_CMP_AND_SWP: u32 = 5;
const WR_ATOMIC_FETCH_AND_ADD: u32 = 6;
const WR_SEND_WITH_INV: u32 = 9;

/// The number of a QP type.
pub(super) const fn qp_type(qp_type: QpType) -> u32 {
    match qp_type {
        QpType::Gsi => 1,
        QpType::Rc => 2,
        QpType::Uc => 3,
        QpType::Ud => 4,
    }
}

/// The state with this number.
pub(super) fn state(number: u32) -> Option<QpState> {
    QpState::ALL.into_iter().find(|s| *s as u32 == number)
}

/// Sizes for the library.
pub(super) const fn cap(c: &QpCapabilities) -> abi::QpCap {
    abi::QpCap {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline,
    }
}

/// Sizes from the library.
pub(super) const fn cap_from(c: &abi::QpCap) -> QpCapabilities {
    QpCapabilities {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline: c.max_inline_data,
    }
}

/// A path, on `port` of the hardware.
pub(super) fn address(av: &AddressVector, port: u8) -> abi::AhAttr {
    abi::AhAttr {
        grh: abi::GlobalRoute {
            dgid: abi::GidBytes(av.dgid.to_bytes()),
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        sl: av.service_level,
        // RoCE has no other kind.
        is_global: 1,
        port_num: port,
        ..abi::AhAttr::default()
    }
}

/// A path from the library.
#[must_use]
pub fn address_from(a: &abi::AhAttr) -> AddressVector {
    AddressVector {
        dgid: Gid::from_bytes(a.grh.dgid.0),
        sgid_index: a.grh.sgid_index,
        traffic_class: a.grh.traffic_class,
        flow_label: a.grh.flow_label,
        hop_limit: a.grh.hop_limit,
        service_level: a.sl,
        udp_source_port: SourcePort::Formula,
        pkey_index: None,
    }
}

/// The state of path migration with this number.
fn mig_state(number: u32) -> Option<PathMigState> {
    [PathMigState::Migrated, PathMigState::Rearm, PathMigState::Armed].into_iter().find(|s| *s as u32 == number)
}

/// A modify for the library: the structure, and the mask of what it carries. Our one port is `port` there.
///
/// # Errors
/// [`ModifyError::Unsupported`]: hardware derives the UDP source port itself.
pub(super) fn qp_attr(a: &QpAttr, port: u8) -> Result<(abi::QpAttr, u32), ModifyError> {
    if a.av.is_some_and(|av| av.udp_source_port != SourcePort::Formula) {
        return Err(ModifyError::Unsupported { attr: Attr::Av });
    }
    if a.alt_path.is_some_and(|alt| alt.av.udp_source_port != SourcePort::Formula) {
        return Err(ModifyError::Unsupported { attr: Attr::AltPath });
    }
    let path = |av: Option<AddressVector>| av.map_or_else(abi::AhAttr::default, |av| address(&av, port));
    let number = |s: Option<QpState>| s.map_or(0, |s| s as u32);
    let out = abi::QpAttr {
        qp_state: number(a.state),
        cur_qp_state: number(a.cur_state),
        path_mtu: a.path_mtu.map_or(0, |m| m.code().into()),
        qkey: a.qkey.map_or(0, QKey::get),
        rq_psn: a.rq_psn.map_or(0, Psn::get),
        sq_psn: a.sq_psn.map_or(0, Psn::get),
        dest_qp_num: a.dest_qpn.map_or(0, Qpn::get),
        qp_access_flags: a.access.map_or(0, |f| f.bits() & ACCESS),
        ah_attr: path(a.av),
        path_mig_state: a.path_mig_state.map_or(0, |s| s as u32),
        alt_ah_attr: path(a.alt_path.map(|alt| alt.av)),
        alt_pkey_index: a.alt_path.map_or(0, |alt| alt.pkey_index),
        alt_port_num: a.alt_path.map_or(0, |_| port),
        alt_timeout: a.alt_path.map_or(0, |alt| alt.timeout.code()),
        pkey_index: a.pkey_index.unwrap_or(0),
        en_sqd_async_notify: a.sqd_async_notify.map_or(0, u8::from),
        max_rd_atomic: a.max_rd_atomic.unwrap_or(0),
        max_dest_rd_atomic: a.max_dest_rd_atomic.unwrap_or(0),
        min_rnr_timer: a.min_rnr_timer.map_or(0, RnrTimer::code),
        port_num: if a.port.is_some() { port } else { 0 },
        timeout: a.timeout.map_or(0, AckTimeout::code),
        retry_cnt: a.retry_count.map_or(0, RetryCount::get),
        rnr_retry: a.rnr_retry.map_or(0, RnrRetry::code),
        ..abi::QpAttr::default()
    };
    let state = if a.state.is_some() { abi::QP_STATE } else { 0 };
    Ok((out, a.present().bits() | state))
}

/// The attributes of `mask` in the library's structure. Those with a value that we do not know are left out.
#[must_use]
pub fn qp_attr_from(a: &abi::QpAttr, mask: u32) -> QpAttr {
    let has = |attr: Attr| mask & 1 << attr as u8 != 0;
    let low = |v: u32| u8::try_from(v & 0xFF).unwrap_or(0);
    QpAttr {
        state: state(a.qp_state).filter(|_| mask & abi::QP_STATE != 0),
        cur_state: state(a.cur_qp_state).filter(|_| has(Attr::CurState)),
        sqd_async_notify: has(Attr::SqdAsyncNotify).then_some(a.en_sqd_async_notify != 0),
        access: AccessFlags::from_bits(a.qp_access_flags & ACCESS).filter(|_| has(Attr::AccessFlags)),
        pkey_index: has(Attr::PKeyIndex).then_some(a.pkey_index),
        // One port is all that is seen of the device.
        port: has(Attr::Port).then_some(1),
        qkey: has(Attr::QKey).then_some(QKey::new(a.qkey)),
        av: has(Attr::Av).then(|| address_from(&a.ah_attr)),
        path_mtu: PathMtu::from_code(low(a.path_mtu)).filter(|_| has(Attr::PathMtu)),
        timeout: AckTimeout::new(a.timeout).filter(|_| has(Attr::Timeout)),
        retry_count: RetryCount::new(a.retry_cnt).filter(|_| has(Attr::RetryCount)),
        rnr_retry: RnrRetry::new(a.rnr_retry).filter(|_| has(Attr::RnrRetry)),
        rq_psn: has(Attr::RqPsn).then(|| Psn::from_wire(a.rq_psn)),
        max_rd_atomic: has(Attr::MaxRdAtomic).then_some(a.max_rd_atomic),
        alt_path: AckTimeout::new(a.alt_timeout).filter(|_| has(Attr::AltPath)).map(|timeout| AltPath {
            av: address_from(&a.alt_ah_attr),
            pkey_index: a.alt_pkey_index,
            port: 1,
            timeout,
        }),
        path_mig_state: mig_state(a.path_mig_state).filter(|_| has(Attr::PathMigState)),
        min_rnr_timer: RnrTimer::new(a.min_rnr_timer).filter(|_| has(Attr::MinRnrTimer)),
        sq_psn: has(Attr::SqPsn).then(|| Psn::from_wire(a.sq_psn)),
        max_dest_rd_atomic: has(Attr::MaxDestRdAtomic).then_some(a.max_dest_rd_atomic),
        dest_qpn: has(Attr::DestQpn).then(|| Qpn::from_wire(a.dest_qp_num)),
    }
}

/// An entry of the GID table.
pub(super) fn gid(e: &abi::GidEntry) -> GidEntry {
    let gid_type = if e.gid_type == abi::GID_TYPE_ROCE_V2 { GidType::RoceV2 } else { GidType::RoceV1 };
    GidEntry { gid: Gid::from_bytes(e.gid.0), gid_type }
}

/// A work request without its elements; `ah` is the address of its address handle.
///
/// # Errors
/// [`PostError::Unsupported`]: an operation that this back end does not post.
pub(super) fn send_wr(wr: &SendWr<'_>, ah: Option<u64>) -> Result<abi::SendWr, PostError> {
    let mut target = abi::Target::default();
    if let (Some(ah), Some(to)) = (ah, wr.destination) {
        target = abi::Target::datagram(ah, to.qpn.get(), to.qkey.get());
    }
    let mut imm_or_key = 0;
    let opcode = match wr.operation {
        Operation::Send => WR_SEND,
        Operation::SendImm(imm) => {
            imm_or_key = imm.get().to_be();
            WR_SEND_WITH_IMM
        }
        Operation::SendInvalidate(key) => {
            imm_or_key = key.get();
            WR_SEND_WITH_INV
        }
        Operation::Write(to) => {
            target = abi::Target::rdma(to.addr, to.rkey.get());
            WR_RDMA_WRITE
        }
        Operation::WriteImm(to, imm) => {
            target = abi::Target::rdma(to.addr, to.rkey.get());
            imm_or_key = imm.get().to_be();
            WR_RDMA_WRITE_WITH_IMM
        }
        Operation::Read(from) => {
            target = abi::Target::rdma(from.addr, from.rkey.get());
            WR_RDMA_READ
        }
        Operation::CompareSwap { remote, compare, swap } => {
            target = abi::Target::atomic(remote.addr, compare, swap, remote.rkey.get());
            WR_ATOMIC_CMP_AND_SWP
        }
        Operation::FetchAdd { remote, add } => {
            target = abi::Target::atomic(remote.addr, add, 0, remote.rkey.get());
            WR_ATOMIC_FETCH_AND_ADD
        }
        Operation::AtomicWrite(_) => return Err(PostError::Unsupported("ATOMIC WRITE")),
        Operation::Flush { .. } => return Err(PostError::Unsupported("FLUSH")),
        Operation::BindMw(_) => return Err(PostError::Unsupported("a memory window")),
        Operation::LocalInvalidate(_) => return Err(PostError::Unsupported("local invalidation")),
        Operation::FastRegister(_) => return Err(PostError::Unsupported("fast registration")),
    };
    Ok(abi::SendWr::new(wr.wr_id, opcode, send_flags(wr), imm_or_key, target))
}

fn send_flags(wr: &SendWr<'_>) -> u32 {
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    flag(wr.flags.fence, FENCE)
        | flag(wr.flags.signaled, SIGNALED)
        | flag(wr.flags.solicited, SOLICITED)
        | flag(matches!(wr.payload, crate::verbs::Payload::Inline(_)), INLINE)
}

/// The status with this number; those of transports that RoCE does not have are [`WcStatus::General`].
pub(super) const fn status(number: u32) -> WcStatus {
    match number {
        0 => WcStatus::Success,
        1 => WcStatus::LocalLength,
        2 => WcStatus::LocalQpOperation,
        4 => WcStatus::LocalProtection,
        5 => WcStatus::WorkRequestFlushed,
        6 => WcStatus::MwBind,
        7 => WcStatus::BadResponse,
        8 => WcStatus::LocalAccess,
        9 => WcStatus::RemoteInvalidRequest,
        10 => WcStatus::RemoteAccess,
        11 => WcStatus::RemoteOperation,
        12 => WcStatus::RetryExceeded,
        13 => WcStatus::RnrRetryExceeded,
        _ => WcStatus::General,
    }
}

/// The opcode with this number.
pub(super) const fn wc_opcode(number: u32) -> Option<WcOpcode> {
    match number {
        0 => Some(WcOpcode::Send),
        1 => Some(WcOpcode::RdmaWrite),
        2 => Some(WcOpcode::RdmaRead),
        3 => Some(WcOpcode::CompareSwap),
        4 => Some(WcOpcode::FetchAdd),
        5 => Some(WcOpcode::BindMw),
        6 => Some(WcOpcode::LocalInvalidate),
        9 => Some(WcOpcode::AtomicWrite),
        128 => Some(WcOpcode::Recv),
        129 => Some(WcOpcode::RecvRdmaWithImm),
        _ => None,
    }
}

/// A completion of `qp`. An opcode that we post nothing of cannot succeed, and on errors it means nothing.
pub(super) fn completion(wc: &abi::Wc, qp: QpHandle) -> WorkCompletion {
    let data = if wc.wc_flags & WC_WITH_IMM != 0 {
        WcData::Imm(Imm::new(u32::from_be(wc.imm_data)))
    } else if wc.wc_flags & WC_WITH_INV != 0 {
        WcData::Invalidated(Rkey::new(wc.imm_data))
    } else {
        WcData::None
    };
    let status = status(wc.status);
    WorkCompletion {
        wr_id: wc.wr_id,
        status,
        opcode: wc_opcode(wc.opcode).unwrap_or(WcOpcode::Send),
        vendor_err: if wc.vendor_err == 0 { 0 } else { wc.vendor_err | FOREIGN },
        byte_len: wc.byte_len,
        data: if status == WcStatus::Success { data } else { WcData::None },
        qp,
        qp_num: Qpn::from_wire(wc.qp_num),
        src_qp: Qpn::from_wire(wc.src_qp),
        grh: wc.wc_flags & WC_GRH != 0,
        // Hardware uses the bit to wake the program, and does not pass it on.
        solicited: false,
    }
}

#[cfg(test)]
mod tests;
