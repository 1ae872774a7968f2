//! The structures that cross into libibverbs, as 64-bit Linux lays them out.
//!
//! Owns our own definitions, made from the sizes and offsets of the public ABI, and the numbers of its enumerations. A
//! test compares both with the system's headers where these are installed. Never calls anything.
#![allow(missing_docs)] // Each field has the name that the C structure gives it.

use core::ffi::{c_int, c_void};

/// What a pointer to an object that only the library knows points at.
pub type Opaque = c_void;

/// `struct ibv_device`.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    ops: [usize; 2],
    pub node_type: u32,
    pub transport_type: u32,
    pub name: [u8; 64],
    pub dev_name: [u8; 64],
    paths: [[u8; 256]; 2],
}

/// Entries of the table of calls in a context.
pub const OPS: usize = 32;
/// `poll_cq` in that table.
pub const OP_POLL_CQ: usize = 11;
/// `req_notify_cq`.
pub const OP_REQ_NOTIFY_CQ: usize = 12;
/// `post_srq_recv`.
pub const OP_POST_SRQ_RECV: usize = 20;
/// `post_send`.
pub const OP_POST_SEND: usize = 25;
/// `post_recv`.
pub const OP_POST_RECV: usize = 26;

/// `struct ibv_context`.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    pub device: *mut Device,
    pub ops: [*const Opaque; OPS],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    mutex: [u64; 5],
    pub abi_compat: *mut Opaque,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub struct DeviceAttr {
    /// Text, padded with zeros.
    pub fw_ver: [u64; 8],
    /// Big-endian.
    pub node_guid: u64,
    /// Big-endian.
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// State of a port that carries packets.
pub const PORT_ACTIVE: u32 = 4;
/// Link layer of a port that speaks RoCE.
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// A GID. The C union makes it 8-aligned.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidBytes(pub [u8; 16]);

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidEntry {
    pub gid: GidBytes,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// Type of a GID that RoCEv2 can use.
pub const GID_TYPE_ROCE_V2: u32 = 2;

/// `struct ibv_pd`, of which nothing is read.
#[repr(C)]
#[derive(Debug)]
pub struct Pd([u8; 0]);

/// `struct ibv_ah`, of which nothing is read.
#[repr(C)]
#[derive(Debug)]
pub struct Ah([u8; 0]);

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut Opaque,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
#[derive(Debug)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    refcnt: c_int,
}

/// The head of `struct ibv_cq`, which goes on.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut Opaque,
    pub handle: u32,
    pub cqe: c_int,
}

/// The head of `struct ibv_srq`, which goes on.
#[repr(C)]
#[derive(Debug)]
pub struct Srq {
    pub context: *mut Context,
    pub srq_context: *mut Opaque,
    pub pd: *mut Pd,
    pub handle: u32,
}

/// The head of `struct ibv_qp`, which goes on.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut Opaque,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut Opaque,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalRoute {
    pub dgid: GidBytes,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// Bit of the state in the mask of a modify or query; the others are those of [`crate::verbs::Attr`].
pub const QP_STATE: u32 = 1;
/// Every attribute that a query gives.
pub const QP_ALL: u32 = 0x1F_FFFF;

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// Bit of the limit in the mask of a modify.
pub const SRQ_LIMIT: c_int = 2;

/// `struct ibv_srq_init_attr`.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct SrqInitAttr {
    pub srq_context: *mut Opaque,
    pub attr: SrqAttr,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// What a send work request says beside its elements: the C union, word by word.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target(pub [u64; 4]);

/// Two 32-bit fields that follow each other, as one word.
const fn pair(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

impl Target {
    /// Of READ and WRITE.
    #[must_use]
    pub const fn rdma(addr: u64, rkey: u32) -> Self {
        Self([addr, pair(rkey, 0), 0, 0])
    }

    /// Of an atomic: what is compared, or added, and what is put there.
    #[must_use]
    pub const fn atomic(addr: u64, compare_add: u64, swap: u64, rkey: u32) -> Self {
        Self([addr, compare_add, swap, pair(rkey, 0)])
    }

    /// Of a datagram: the address of its address handle, QPN and key.
    #[must_use]
    pub const fn datagram(ah: u64, qpn: u32, qkey: u32) -> Self {
        Self([ah, pair(qpn, qkey), 0, 0])
    }
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    /// Immediate data, big-endian, or the key to invalidate.
    pub imm_data: u32,
    pub wr: Target,
    xrc: u64,
    bind_or_tso: [u64; 6],
}

impl SendWr {
    /// One without elements and successor.
    #[must_use]
    pub const fn new(wr_id: u64, opcode: u32, send_flags: u32, imm_data: u32, wr: Target) -> Self {
        let (next, sg_list) = (core::ptr::null_mut(), core::ptr::null_mut());
        Self { wr_id, next, sg_list, num_sge: 0, opcode, send_flags, imm_data, wr, xrc: 0, bind_or_tso: [0; 6] }
    }
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Immediate data, big-endian, or the key that was invalidated.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_async_event`. The element is an object of the kind that the type says, or a port number.
#[repr(C)]
#[derive(Debug)]
pub struct AsyncEvent {
    pub element: *mut Opaque,
    pub event_type: u32,
}

pub const EVENT_CQ_ERR: u32 = 0;
pub const EVENT_QP_FATAL: u32 = 1;
pub const EVENT_QP_REQ_ERR: u32 = 2;
pub const EVENT_QP_ACCESS_ERR: u32 = 3;
pub const EVENT_COMM_EST: u32 = 4;
pub const EVENT_SQ_DRAINED: u32 = 5;
pub const EVENT_PATH_MIG: u32 = 6;
pub const EVENT_PATH_MIG_ERR: u32 = 7;
pub const EVENT_DEVICE_FATAL: u32 = 8;
pub const EVENT_PORT_ACTIVE: u32 = 9;
pub const EVENT_PORT_ERR: u32 = 10;
pub const EVENT_SRQ_ERR: u32 = 14;
pub const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
pub const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
pub const EVENT_GID_CHANGE: u32 = 18;

/// What the element of an asynchronous event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Cq,
    Srq,
    Qp,
    /// A port, or the whole device; or a kind of object that we make none of.
    Device,
}

/// The subject of events of this type.
#[must_use]
pub const fn subject(event_type: u32) -> Subject {
    match event_type {
        EVENT_CQ_ERR => Subject::Cq,
        EVENT_SRQ_ERR | EVENT_SRQ_LIMIT_REACHED => Subject::Srq,
        EVENT_QP_FATAL..=EVENT_PATH_MIG_ERR | EVENT_QP_LAST_WQE_REACHED => Subject::Qp,
        _ => Subject::Device,
    }
}

#[cfg(test)]
mod tests;
