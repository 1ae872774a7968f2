//! Sizes and offsets: ours against the committed table, and against the system's headers where they are installed.

use super::*;
use core::mem::offset_of;
use std::process::Command;

/// A C structure, one of its fields (`-` for the structure itself), the offset or size that the ABI has, and ours.
type Row = (&'static str, &'static str, usize, usize);

macro_rules! rows {
    ($($c:literal $rust:ident $size:literal { $($field:literal $($ours:ident).+ $at:literal),* $(,)? })*) => {
        vec![$(($c, "-", $size, size_of::<$rust>()), $(($c, $field, $at, offset_of!($rust, $($ours).+))),*),*]
    };
}

#[rustfmt::skip]
#[allow(clippy::too_many_lines)] // A table.
fn table() -> Vec<Row> {
    let mut all = rows! {
        "ibv_device" Device 664 { "node_type" node_type 16, "transport_type" transport_type 20, "name" name 24,
            "dev_name" dev_name 88 }
        "ibv_context" Context 328 { "device" device 0, "ops" ops 8, "cmd_fd" cmd_fd 264, "async_fd" async_fd 268,
            "num_comp_vectors" num_comp_vectors 272, "abi_compat" abi_compat 320 }
        "ibv_device_attr" DeviceAttr 232 { "fw_ver" fw_ver 0, "node_guid" node_guid 64,
            "sys_image_guid" sys_image_guid 72, "max_mr_size" max_mr_size 80, "vendor_id" vendor_id 96,
            "hw_ver" hw_ver 104, "max_qp" max_qp 108, "max_qp_wr" max_qp_wr 112,
            "device_cap_flags" device_cap_flags 116, "max_sge" max_sge 120, "max_cq" max_cq 128, "max_cqe" max_cqe 132,
            "max_mr" max_mr 136, "max_pd" max_pd 140, "max_qp_rd_atom" max_qp_rd_atom 144,
            "max_res_rd_atom" max_res_rd_atom 152, "max_qp_init_rd_atom" max_qp_init_rd_atom 156,
            "atomic_cap" atomic_cap 164, "max_mw" max_mw 176, "max_mcast_grp" max_mcast_grp 188, "max_ah" max_ah 200,
            "max_srq" max_srq 212, "max_srq_wr" max_srq_wr 216, "max_srq_sge" max_srq_sge 220,
            "max_pkeys" max_pkeys 224, "local_ca_ack_delay" local_ca_ack_delay 226,
            "phys_port_cnt" phys_port_cnt 227 }
        "ibv_port_attr" PortAttr 52 { "state" state 0, "max_mtu" max_mtu 4, "active_mtu" active_mtu 8,
            "gid_tbl_len" gid_tbl_len 12, "max_msg_sz" max_msg_sz 20, "pkey_tbl_len" pkey_tbl_len 32,
            "link_layer" link_layer 46 }
        "ibv_gid_entry" GidEntry 32 { "gid" gid 0, "gid_index" gid_index 16, "port_num" port_num 20,
            "gid_type" gid_type 24, "ndev_ifindex" ndev_ifindex 28 }
        "ibv_mr" Mr 48 { "context" context 0, "pd" pd 8, "addr" addr 16, "length" length 24, "handle" handle 32,
            "lkey" lkey 36, "rkey" rkey 40 }
        "ibv_comp_channel" CompChannel 16 { "context" context 0, "fd" fd 8 }
        "ibv_qp_cap" QpCap 20 { "max_send_wr" max_send_wr 0, "max_recv_wr" max_recv_wr 4,
            "max_send_sge" max_send_sge 8, "max_recv_sge" max_recv_sge 12, "max_inline_data" max_inline_data 16 }
        "ibv_qp_init_attr" QpInitAttr 64 { "qp_context" qp_context 0, "send_cq" send_cq 8, "recv_cq" recv_cq 16,
            "srq" srq 24, "cap" cap 32, "qp_type" qp_type 52, "sq_sig_all" sq_sig_all 56 }
        "ibv_global_route" GlobalRoute 24 { "dgid" dgid 0, "flow_label" flow_label 16, "sgid_index" sgid_index 20,
            "hop_limit" hop_limit 21, "traffic_class" traffic_class 22 }
        "ibv_ah_attr" AhAttr 32 { "grh" grh 0, "dlid" dlid 24, "sl" sl 26, "src_path_bits" src_path_bits 27,
            "static_rate" static_rate 28, "is_global" is_global 29, "port_num" port_num 30 }
        "ibv_qp_attr" QpAttr 144 { "qp_state" qp_state 0, "cur_qp_state" cur_qp_state 4, "path_mtu" path_mtu 8,
            "path_mig_state" path_mig_state 12, "qkey" qkey 16, "rq_psn" rq_psn 20, "sq_psn" sq_psn 24,
            "dest_qp_num" dest_qp_num 28, "qp_access_flags" qp_access_flags 32, "cap" cap 36, "ah_attr" ah_attr 56,
            "alt_ah_attr" alt_ah_attr 88, "pkey_index" pkey_index 120, "alt_pkey_index" alt_pkey_index 122,
            "en_sqd_async_notify" en_sqd_async_notify 124, "sq_draining" sq_draining 125,
            "max_rd_atomic" max_rd_atomic 126, "max_dest_rd_atomic" max_dest_rd_atomic 127,
            "min_rnr_timer" min_rnr_timer 128, "port_num" port_num 129, "timeout" timeout 130,
            "retry_cnt" retry_cnt 131, "rnr_retry" rnr_retry 132, "alt_port_num" alt_port_num 133,
            "alt_timeout" alt_timeout 134, "rate_limit" rate_limit 136 }
        "ibv_srq_attr" SrqAttr 12 { "max_wr" max_wr 0, "max_sge" max_sge 4, "srq_limit" srq_limit 8 }
        "ibv_srq_init_attr" SrqInitAttr 24 { "srq_context" srq_context 0, "attr" attr 8 }
        "ibv_sge" Sge 16 { "addr" addr 0, "length" length 8, "lkey" lkey 12 }
        "ibv_send_wr" SendWr 128 { "wr_id" wr_id 0, "next" next 8, "sg_list" sg_list 16, "num_sge" num_sge 24,
            "opcode" opcode 28, "send_flags" send_flags 32, "imm_data" imm_data 36, "wr" wr 40,
            "qp_type" xrc 72, "bind_mw" bind_or_tso 80 }
        "ibv_recv_wr" RecvWr 32 { "wr_id" wr_id 0, "next" next 8, "sg_list" sg_list 16, "num_sge" num_sge 24 }
        "ibv_wc" Wc 48 { "wr_id" wr_id 0, "status" status 8, "opcode" opcode 12, "vendor_err" vendor_err 16,
            "byte_len" byte_len 20, "imm_data" imm_data 24, "qp_num" qp_num 28, "src_qp" src_qp 32,
            "wc_flags" wc_flags 36, "pkey_index" pkey_index 40, "slid" slid 42, "sl" sl 44,
            "dlid_path_bits" dlid_path_bits 45 }
        "ibv_async_event" AsyncEvent 16 { "element" element 0, "event_type" event_type 8 }
    };
    let op = |index: usize| offset_of!(Context, ops) + 8 * index;
    all.extend([
        ("ibv_context", "ops.poll_cq", 96, op(OP_POLL_CQ)),
        ("ibv_context", "ops.req_notify_cq", 104, op(OP_REQ_NOTIFY_CQ)),
        ("ibv_context", "ops.post_srq_recv", 168, op(OP_POST_SRQ_RECV)),
        ("ibv_context", "ops.post_send", 208, op(OP_POST_SEND)),
        ("ibv_context", "ops.post_recv", 216, op(OP_POST_RECV)),
    ]);
    let wr = |offset: usize| offset_of!(SendWr, wr) + offset;
    all.extend([
        ("ibv_send_wr", "wr.rdma.remote_addr", 40, wr(0)),
        ("ibv_send_wr", "wr.rdma.rkey", 48, wr(8)),
        ("ibv_send_wr", "wr.atomic.remote_addr", 40, wr(0)),
        ("ibv_send_wr", "wr.atomic.compare_add", 48, wr(8)),
        ("ibv_send_wr", "wr.atomic.swap", 56, wr(16)),
        ("ibv_send_wr", "wr.atomic.rkey", 64, wr(24)),
        ("ibv_send_wr", "wr.ud.ah", 40, wr(0)),
        ("ibv_send_wr", "wr.ud.remote_qpn", 48, wr(8)),
        ("ibv_send_wr", "wr.ud.remote_qkey", 52, wr(12)),
    ]);
    // Of these only the head is ours.
    all.extend(heads());
    all
}

#[rustfmt::skip]
fn heads() -> Vec<Row> {
    let all = rows! {
        "ibv_cq" Cq 32 { "context" context 0, "channel" channel 8, "cq_context" cq_context 16, "handle" handle 24,
            "cqe" cqe 28 }
        "ibv_srq" Srq 32 { "context" context 0, "srq_context" srq_context 8, "pd" pd 16, "handle" handle 24 }
        "ibv_qp" Qp 64 { "context" context 0, "qp_context" qp_context 8, "pd" pd 16, "send_cq" send_cq 24,
            "recv_cq" recv_cq 32, "srq" srq 40, "handle" handle 48, "qp_num" qp_num 52, "state" state 56,
            "qp_type" qp_type 60 }
    };
    all.into_iter().filter(|(_, field, ..)| *field != "-").collect()
}

#[test]
fn our_layout_is_the_abis() {
    for (structure, field, abi, ours) in table() {
        assert_eq!(ours, abi, "{structure} {field}");
    }
}

/// Compiles a program that prints each line of the table, with the system's numbers.
fn from_headers(rows: &[Row]) -> Option<String> {
    let dir = tempfile::tempdir().ok()?;
    let (source, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
    let mut text =
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n".to_owned();
    for (structure, field, ..) in rows {
        let what = match *field {
            "-" => format!("sizeof(struct {structure})"),
            "element" => format!("offsetof(struct {structure}, element.qp)"),
            field => format!("offsetof(struct {structure}, {field})"),
        };
        text += &format!("printf(\"{structure} {field} %zu\\n\", {what});\n");
    }
    std::fs::write(&source, text + "return 0;\n}\n").ok()?;
    // No compiler or no headers: the committed table has to do.
    let built = Command::new("cc").arg(&source).arg("-o").arg(&program).output().ok()?;
    if !built.status.success() {
        let said = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(said.contains("infiniband/verbs.h: No such file"), "{said}");
        return None;
    }
    String::from_utf8(Command::new(&program).output().ok()?.stdout).ok()
}

#[test]
fn the_systems_headers_agree() {
    let rows = table();
    let Some(said) = from_headers(&rows) else { return };
    let ours: String = rows.iter().map(|(s, f, _, ours)| format!("{s} {f} {ours}\n")).collect();
    assert_eq!(said, ours);
}

#[test]
fn a_target_has_the_fields_of_its_union() {
    // On a little-endian machine the first of two 32-bit fields is the low half.
    if cfg!(target_endian = "little") {
        assert_eq!(Target::rdma(1, 2).0, [1, 2, 0, 0]);
        assert_eq!(Target::atomic(1, 2, 3, 4).0, [1, 2, 3, 4]);
        assert_eq!(Target::datagram(1, 2, 3).0, [1, 3 << 32 | 2, 0, 0]);
    }
}
