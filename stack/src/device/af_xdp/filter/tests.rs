//! The program, run by the kernel on frames of all kinds (`BPF_PROG_TEST_RUN`).

use super::*;
use crate::device::af_xdp::bpf::{Program, SocketMap};

/// What the program says of a frame that it takes: the map has no socket, and this is no answer of its own.
const TAKEN: i32 = 3;
const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn ours() -> Vec<IpAddr> {
    ["10.0.0.1", "10.0.0.3", "fe80::1", "fd00::1"].map(|a| a.parse().unwrap()).to_vec()
}

fn wanted(addresses: &[IpAddr]) -> Wanted<'_> {
    Wanted { mac: MacAddr(OUR_MAC), addresses, vlan: None, mtu: 1500, superframes: false, on_miss: TAKEN }
}

/// Loads the program and says of each frame whether it is taken.
fn judge(wanted: Wanted<'_>) -> impl Fn(&[u8]) -> bool {
    let needs =
        "this test loads a BPF program into the kernel: run it as root (cap_bpf, cap_net_admin), on Linux 6.6 or later";
    let map = SocketMap::new(1).expect(needs);
    let code = program(wanted, map.as_raw_fd()).unwrap();
    let program = Program::load(&code).expect(needs);
    move |frame| {
        let _ = &map;
        match program.test_run(frame).expect(needs) {
            PASS => false,
            TAKEN => true,
            other => panic!("action {other}"),
        }
    }
}

/// An Ethernet frame: the ethertype (behind the tag, if there is one) and what follows.
fn ethernet(tag: Option<u16>, kind: u16, rest: &[u8]) -> Vec<u8> {
    let mut frame = [&OUR_MAC[..], &[2, 0, 0, 0, 0, 2]].concat();
    if let Some(tci) = tag {
        frame.extend(VLAN.to_be_bytes());
        frame.extend(tci.to_be_bytes());
    }
    frame.extend(kind.to_be_bytes());
    frame.extend(rest);
    frame
}

/// UDP with a payload of 16 bytes.
fn udp(port: u16, checksum: u16) -> Vec<u8> {
    let [mut datagram, port, sum] = [vec![0xc0, 0x77], port.to_be_bytes().to_vec(), checksum.to_be_bytes().to_vec()];
    datagram.extend(port);
    datagram.extend(24u16.to_be_bytes());
    datagram.extend(sum);
    datagram.extend([0; 16]);
    datagram
}

/// Fields of an IPv4 header that matter.
#[derive(Clone, Copy)]
struct V4 {
    words: u8,
    len: u16,
    fragment: u16,
    protocol: u8,
    dst: [u8; 4],
}

const V4_US: V4 = V4 { words: 5, len: 44, fragment: 0x4000, protocol: 17, dst: [10, 0, 0, 1] };

fn v4(header: V4, rest: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x40 | header.words, 0];
    packet.extend(header.len.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(header.fragment.to_be_bytes());
    packet.extend([64, header.protocol, 0, 0, 10, 0, 0, 9]);
    packet.extend(header.dst);
    packet.resize(usize::from(header.words) * 4, 1);
    packet.extend(rest);
    packet
}

fn v6(len: u16, next: u8, dst: &str, rest: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(len.to_be_bytes());
    packet.extend([next, 64]);
    packet.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
    packet.extend(dst.parse::<core::net::Ipv6Addr>().unwrap().octets());
    packet.extend(rest);
    packet
}

fn plain_v4(header: V4) -> Vec<u8> {
    ethernet(None, IPV4, &v4(header, &udp(4791, 0)))
}

fn plain_v6(dst: &str) -> Vec<u8> {
    ethernet(None, IPV6, &v6(24, 17, dst, &udp(4791, 0)))
}

#[test]
fn rocev2_to_us_is_taken() {
    let addresses = ours();
    let taken = judge(wanted(&addresses));
    assert!(taken(&plain_v4(V4_US)));
    assert!(taken(&plain_v4(V4 { dst: [10, 0, 0, 3], ..V4_US })));
    assert!(taken(&plain_v4(V4 { fragment: 0, ..V4_US })), "fragmentation allowed, not done");
    assert!(taken(&plain_v6("fd00::1")));
    assert!(taken(&plain_v6("fe80::1")));
    // With a checksum, too: nothing here makes superframes.
    assert!(taken(&ethernet(None, IPV4, &v4(V4_US, &udp(4791, 0x1234)))));
    assert!(taken(&ethernet(None, IPV6, &v6(24, 17, "fd00::1", &udp(4791, 0x1234)))));
}

#[test]
fn everything_else_goes_to_the_kernel() {
    let addresses = ours();
    let taken = judge(wanted(&addresses));
    let passed = |what: &str, frame: Vec<u8>| assert!(!taken(&frame), "{what}");
    passed("another address", plain_v4(V4 { dst: [10, 0, 0, 2], ..V4_US }));
    passed("a multicast address", plain_v4(V4 { dst: [239, 0, 0, 1], ..V4_US }));
    passed("options", plain_v4(V4 { words: 6, len: 48, ..V4_US }));
    passed("a first fragment", plain_v4(V4 { fragment: 0x2000, ..V4_US }));
    passed("a later fragment", plain_v4(V4 { fragment: 1, ..V4_US }));
    passed("the last fragment", plain_v4(V4 { fragment: 0x1fff, ..V4_US }));
    passed("TCP", plain_v4(V4 { protocol: 6, ..V4_US }));
    passed("ping", plain_v4(V4 { protocol: 1, ..V4_US }));
    passed("another port", ethernet(None, IPV4, &v4(V4_US, &udp(53, 0))));
    passed("another IPv6 address", plain_v6("fd00::2"));
    passed("an IPv6 address that is ours in its first words", plain_v6("fe80::2"));
    passed("an IPv6 group", plain_v6("ff0e::1"));
    passed("another IPv6 port", ethernet(None, IPV6, &v6(24, 17, "fd00::1", &udp(53, 0))));
    passed("an extension header", ethernet(None, IPV6, &v6(24, 0, "fd00::1", &udp(4791, 0))));
    passed("a fragment header", ethernet(None, IPV6, &v6(24, 44, "fd00::1", &udp(4791, 0))));
    passed("neighbour discovery", ethernet(None, IPV6, &v6(24, 58, "fd00::1", &udp(4791, 0))));
    passed("ARP", ethernet(None, 0x0806, &[0; 28]));
    passed("a kind of its own", ethernet(None, 0x88b5, &[0; 60]));
    passed("IPv4 that says IPv6", ethernet(None, IPV6, &v4(V4_US, &udp(4791, 0))));
    passed("IPv6 that says IPv4", ethernet(None, IPV4, &v6(24, 17, "fd00::1", &udp(4791, 0))));
    for other in [[2, 0, 0, 0, 0, 9], [2, 9, 0, 0, 0, 1], [0xff; 6]] {
        let mut frame = plain_v4(V4_US);
        frame[..6].copy_from_slice(&other);
        passed("another MAC", frame);
    }
}

#[test]
fn a_frame_that_ends_too_soon_goes_to_the_kernel() {
    let addresses = ours();
    let taken = judge(wanted(&addresses));
    let tagged = judge(Wanted { vlan: Some(7), ..wanted(&addresses) });
    let v4_tagged = ethernet(Some(7), IPV4, &v4(V4_US, &udp(4791, 0)));
    let v6_tagged = ethernet(Some(7), IPV6, &v6(24, 17, "fd00::1", &udp(4791, 0)));
    // The kernel runs no program on less than an Ethernet header.
    for (judge, frame, headers) in [
        (&taken as &dyn Fn(&[u8]) -> bool, plain_v4(V4_US), 42),
        (&taken, plain_v6("fd00::1"), 62),
        (&tagged, v4_tagged, 46),
        (&tagged, v6_tagged, 66),
    ] {
        for len in 14..frame.len() {
            assert_eq!(judge(&frame[..len]), len >= headers, "{len} bytes");
        }
    }
}

#[test]
fn one_tag_states_the_vlan() {
    let addresses = ours();
    let v4 = |tag| ethernet(tag, IPV4, &v4(V4_US, &udp(4791, 0)));
    let v6 = |tag| ethernet(tag, IPV6, &v6(24, 17, "fd00::1", &udp(4791, 0)));
    let untagged = judge(wanted(&addresses));
    let seven = judge(Wanted { vlan: Some(7), ..wanted(&addresses) });
    for frame in [v4, v6] as [fn(Option<u16>) -> Vec<u8>; 2] {
        assert!(untagged(&frame(None)));
        assert!(untagged(&frame(Some(0xe000))), "a priority alone");
        assert!(!untagged(&frame(Some(7))));
        assert!(seven(&frame(Some(7))));
        assert!(seven(&frame(Some(0xf007))), "priority and drop eligible");
        assert!(!seven(&frame(Some(8))));
        assert!(!seven(&frame(Some(0x107))));
        assert!(!seven(&frame(Some(0xe000))));
        assert!(!seven(&frame(None)));
        let twice = ethernet(Some(7), VLAN, &frame(None)[10..]);
        assert!(!seven(&twice) && !untagged(&twice), "two tags");
    }
    let mut other = ethernet(Some(7), IPV4, &[0; 60]);
    other[14..16].copy_from_slice(&7u16.to_be_bytes());
    assert!(!seven(&other));
}

#[test]
fn superframes_go_to_the_kernel_which_knows_their_segments() {
    let addresses = ours();
    let taken = judge(wanted(&addresses));
    let longest = |len| plain_v4(V4 { len, ..V4_US });
    assert!(taken(&longest(1500)));
    assert!(!taken(&longest(1501)));
    let longest = |len| ethernet(None, IPV6, &v6(len, 17, "fd00::1", &udp(4791, 0)));
    assert!(taken(&longest(1460)));
    assert!(!taken(&longest(1461)));
    // Where there may be short ones, the checksum tells.
    let wary = judge(Wanted { superframes: true, ..wanted(&addresses) });
    assert!(wary(&plain_v4(V4_US)));
    assert!(wary(&plain_v6("fd00::1")));
    assert!(!wary(&ethernet(None, IPV4, &v4(V4_US, &udp(4791, 1)))));
    assert!(!wary(&ethernet(None, IPV6, &v6(24, 17, "fd00::1", &udp(4791, 0x100)))));
}

#[test]
fn many_addresses_are_told_apart() {
    for count in [ADDRESSES_MAX, ADDRESSES_MAX + 1] {
        let many: Vec<IpAddr> =
            (0..count as u128).map(|i| core::net::Ipv6Addr::from_bits(0xfd << 120 | i).into()).collect();
        let taken = judge(wanted(&many));
        assert!(taken(&plain_v6(&many[ADDRESSES_MAX - 1].to_string())));
        assert!(!taken(&plain_v6(&core::net::Ipv6Addr::from_bits(0xfd << 120 | ADDRESSES_MAX as u128).to_string())));
    }
}
