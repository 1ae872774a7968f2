//! Sizes and offsets: ours against the committed table, and against the system's headers where they are installed.

use super::*;
use core::mem::offset_of;
use std::process::Command;

/// A C structure, one of its fields (`-` for the structure itself), the offset or size that the ABI has, and ours.
type Row = (&'static str, &'static str, usize, usize);

#[rustfmt::skip]
fn table() -> Vec<Row> {
    vec![
        ("rdma_event_channel", "-", 4, size_of::<EventChannel>()),
        ("rdma_cm_id", "-", 416, size_of::<Id>()),
        ("rdma_cm_id", "verbs", 0, offset_of!(Id, verbs)),
        ("rdma_cm_id", "channel", 8, offset_of!(Id, channel)),
        ("rdma_cm_id", "context", 16, offset_of!(Id, context)),
        ("rdma_cm_id", "qp", 24, offset_of!(Id, qp)),
        ("rdma_cm_id", "route.addr.src_addr", 32, offset_of!(Id, src_addr)),
        ("rdma_cm_id", "route.addr.dst_addr", 160, offset_of!(Id, dst_addr)),
        ("rdma_cm_id", "route.path_rec", 328, offset_of!(Id, path_rec)),
        ("rdma_cm_id", "ps", 344, offset_of!(Id, ps)),
        ("rdma_cm_id", "event", 352, offset_of!(Id, event)),
        ("rdma_cm_id", "qp_type", 408, offset_of!(Id, qp_type)),
        ("rdma_conn_param", "-", 24, size_of::<ConnParam>()),
        ("rdma_conn_param", "private_data", 0, offset_of!(ConnParam, private_data)),
        ("rdma_conn_param", "private_data_len", 8, offset_of!(ConnParam, private_data_len)),
        ("rdma_conn_param", "responder_resources", 9, offset_of!(ConnParam, responder_resources)),
        ("rdma_conn_param", "initiator_depth", 10, offset_of!(ConnParam, initiator_depth)),
        ("rdma_conn_param", "flow_control", 11, offset_of!(ConnParam, flow_control)),
        ("rdma_conn_param", "retry_count", 12, offset_of!(ConnParam, retry_count)),
        ("rdma_conn_param", "rnr_retry_count", 13, offset_of!(ConnParam, rnr_retry_count)),
        ("rdma_conn_param", "srq", 14, offset_of!(ConnParam, srq)),
        ("rdma_conn_param", "qp_num", 16, offset_of!(ConnParam, qp_num)),
        ("rdma_ud_param", "-", 56, size_of::<UdParam>()),
        ("rdma_ud_param", "ah_attr", 16, offset_of!(UdParam, ah_attr)),
        ("rdma_ud_param", "qp_num", 48, offset_of!(UdParam, qp_num)),
        ("rdma_ud_param", "qkey", 52, offset_of!(UdParam, qkey)),
        ("rdma_cm_event", "-", 80, size_of::<Event>()),
        ("rdma_cm_event", "id", 0, offset_of!(Event, id)),
        ("rdma_cm_event", "listen_id", 8, offset_of!(Event, listen_id)),
        ("rdma_cm_event", "event", 16, offset_of!(Event, event)),
        ("rdma_cm_event", "status", 20, offset_of!(Event, status)),
        ("rdma_cm_event", "param", 24, offset_of!(Event, param)),
    ]
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
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n".to_owned();
    for (structure, field, ..) in rows {
        let what = match *field {
            "-" => format!("sizeof(struct {structure})"),
            field => format!("offsetof(struct {structure}, {field})"),
        };
        text += &format!("printf(\"{structure} {field} %zu\\n\", {what});\n");
    }
    std::fs::write(&source, text + "return 0;\n}\n").ok()?;
    // No compiler or no headers: the committed table has to do.
    let built = Command::new("cc").arg(&source).arg("-o").arg(&program).output().ok()?;
    if !built.status.success() {
        let said = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(said.contains("rdma/rdma_cma.h: No such file"), "{said}");
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
fn addresses_go_and_come_back() {
    for text in ["10.77.0.1:7174", "[fd77::2]:18515", "[fe80::77:ff:fe00:2%3]:1", "0.0.0.0:0", "[::]:7"] {
        let addr: SocketAddr = text.parse().unwrap();
        assert_eq!(Storage::new(addr).addr(), Some(addr), "{text}");
    }
    assert_eq!(Storage([0; 128]).addr(), None);
    // struct sockaddr_in: family in the machine's order, port and address as on the wire.
    let v4 = Storage::new("10.77.0.1:7174".parse().unwrap());
    assert_eq!(v4.0[..8], [2_u16.to_ne_bytes()[0], 2_u16.to_ne_bytes()[1], 0x1c, 0x06, 10, 77, 0, 1]);
}
