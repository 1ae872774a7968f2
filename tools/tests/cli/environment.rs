//! What this machine lacks is one clear line, with the fix, and exit code 4.

use std::net::UdpSocket;

use crate::common::{as_nobody, run};

#[test]
fn an_unknown_interface() {
    for device in ["packet:nosuchif0", "xdp:nosuchif0", "pnet:nosuchif0"] {
        run(&["devinfo", "-d", device]).fails(4, "no interface nosuchif0; `ip link` lists them");
    }
}

#[test]
fn an_address_that_is_not_ours() {
    run(&["devinfo", "-d", "udp:198.51.100.7"]).fails(4, "198.51.100.7 is not an address of this machine");
}

#[test]
fn a_busy_port_4791() {
    let _holder = UdpSocket::bind("127.77.20.1:4791").unwrap();
    let ran = run(&["devinfo", "-d", "udp:127.77.20.1"]);
    ran.fails(4, "UDP port 4791 of 127.77.20.1 is in use by another process");
    // This test holds it.
    assert!(ran.err.contains(&format!("; it is process {} (", std::process::id())), "{ran:?}");
}

#[test]
fn a_missing_capability() {
    // Whoever runs the tests may have the capability; nobody has not.
    let Some(dump) = as_nobody(&["dump", "lo"]) else { return };
    dump.fails(4, "opening interface lo for capture needs cap_net_raw");
    let Some(name) = ethernet_interface() else { return };
    as_nobody(&["devinfo", "-d", &format!("packet:{name}")]).unwrap().fails(4, "cap_net_raw");
    as_nobody(&["devinfo", "-d", &format!("xdp:{name}")]).unwrap().fails(4, "cap_net_raw,cap_net_admin,cap_bpf");
}

/// An Ethernet interface of this machine that a device could use, if it has one.
fn ethernet_interface() -> Option<String> {
    let usable = |i: &pnet::datalink::NetworkInterface| i.is_up() && !i.is_loopback() && !i.ips.is_empty();
    let found = pnet::datalink::interfaces().into_iter().find(|i| usable(i) && i.mac.is_some_and(|m| !m.is_zero()));
    found.map(|i| i.name)
}

#[test]
fn a_udp_device_needs_no_privilege() {
    let Some(ran) = as_nobody(&["devinfo", "-d", "udp:127.77.21.1"]) else { return };
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn wrong_devices_are_wrong_usage() {
    for device in ["eth0", "udp:localhost", "udp:0.0.0.0", "packet:"] {
        let ran = run(&["devinfo", "-d", device]);
        assert_eq!(ran.code, 2, "{ran:?}");
    }
}

#[test]
fn devinfo_has_the_layout_of_ibv_devinfo() {
    let ran = run(&["devinfo", "-d", "udp:127.77.22.1", "-v"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    for line in [
        "hca_id:\turoce0",
        "\ttransport:\t\t\tInfiniBand (0)",
        "\tphys_port_cnt:\t\t\t1",
        "\t\tport:\t1",
        "\t\t\tstate:\t\t\tPORT_ACTIVE (4)",
        "\t\t\tmax_mtu:\t\t4096 (5)",
        "\t\t\tlink_layer:\t\tEthernet",
        "\t\t\tGID[  0]:\t\t::ffff:127.77.22.1, RoCE v2, lo",
    ] {
        assert!(ran.out.lines().any(|l| l == line), "{line}: {}", ran.out);
    }
    let document = run(&["devinfo", "-d", "udp:127.77.22.2", "--json"]).json();
    assert_eq!(document["devices"][0]["gids"][0]["gid"], "::ffff:127.77.22.2");
    assert_eq!(document["devices"][0]["netdev"], "lo");
    let list = run(&["devinfo", "-l"]);
    assert!(list.out.contains(" found:") && list.out.contains("\tudp:127.0.0.1"), "{list:?}");
}
