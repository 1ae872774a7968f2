//! `uroce demo`: the main job.

use crate::common::{as_nobody, run};

/// The operations of RC that the demonstration shows: FLUSH and ATOMIC WRITE are not among them.
const OPERATIONS: [&str; 8] = [
    "SEND",
    "SEND with immediate",
    "SEND with invalidate",
    "WRITE",
    "WRITE with immediate",
    "READ",
    "compare and swap",
    "fetch and add",
];

#[test]
fn every_operation_is_verified() {
    let ran = run(&["demo", "-d", "udp:127.77.30.1", "--peer-device", "udp:127.77.30.2", "--json"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
    let document = ran.json();
    assert_eq!(document["verdict"], "pass");
    let steps = document["steps"].as_array().unwrap();
    for operation in OPERATIONS {
        assert!(steps.iter().any(|s| s["operation"] == operation), "{operation}");
    }
    for step in steps {
        assert!(step["messages"].as_u64() > Some(0) && step["checked"].as_u64() > Some(0), "{step}");
        assert!(step["p50_us"].as_f64() <= step["p99_us"].as_f64() && step["p50_us"].as_f64() > Some(0.0), "{step}");
        assert!(step["wrong"].is_null(), "{step}");
    }
}

#[test]
fn a_lossy_path_recovers() {
    let ran = run(&["demo", "-d", "udp:127.77.31.1", "--peer-device", "udp:127.77.31.2", "--loss", "1%", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let document = ran.json();
    assert_eq!((&document["verdict"], &document["loss_percent"]), (&"pass".into(), &1.0.into()));
    assert!(document["retransmitted_packets"].as_u64() > Some(0), "{document}");
}

#[test]
fn it_needs_no_privilege_and_ends_with_a_verdict() {
    let args = ["demo", "-d", "udp:127.77.32.1", "--peer-device", "udp:127.77.32.2"];
    let ran = as_nobody(&args).unwrap_or_else(|| run(&args));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.lines().last().unwrap().starts_with("PASS: "), "{ran:?}");
}

#[test]
fn over_ipv6() {
    // ::1 is the only address of IPv6 loopback, so each side has a family of its own and they cannot meet: the message
    // must say so.
    let ran = run(&["demo", "-d", "udp:127.77.33.1", "--peer-device", "udp:::1"]);
    ran.fails(1, "cannot be reached from this device");
}

#[test]
fn what_it_lacks_is_told() {
    let busy = std::net::UdpSocket::bind("127.77.34.2:4791").unwrap();
    let demo = |device: &str, peer: &str| run(&["demo", "-d", device, "--peer-device", peer]);
    demo("udp:127.77.34.1", "udp:127.77.34.2").fails(4, "UDP port 4791 of 127.77.34.2 is in use");
    demo("udp:127.77.34.2", "udp:127.77.34.1").fails(4, "UDP port 4791 of 127.77.34.2 is in use");
    drop(busy);
    demo("udp:198.51.100.7", "udp:127.77.34.1").fails(4, "is not an address of this machine");
    assert_eq!(run(&["demo", "--loss", "50%"]).code, 2);
    demo("loop", "loop").fails(2, "two processes");
}
