//! Exact frames, in the order they cross the wire.

use core::net::IpAddr;

use proptest::prelude::*;

use super::*;

const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
const OTHER: MacAddr = MacAddr([2, 0, 0, 0, 0, 3]);

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

fn neighbors(answers: bool) -> Neighbors {
    let addresses = vec![ip("10.0.0.1"), ip("fe80::1"), ip("fd00::1")];
    Neighbors::new(NeighborConfig { mac: US, addresses, answers, mtu: 1500 })
}

/// Bytes of a hexadecimal text; blanks separate fields.
fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0))).sum()
}

/// Fills in the ICMPv6 checksum (RFC 4443 2.3) of a frame that has zero there.
fn icmp6(text: &str) -> Vec<u8> {
    let mut frame = hex(text);
    let body = frame.len() - 54;
    let mut total = sum(&frame[22..54]) + u32::try_from(body).unwrap() + 58 + sum(&frame[54..]);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    frame[56..58].copy_from_slice(&(!(total as u16)).to_be_bytes());
    frame
}

const ASK_2: &str =
    "ffffffffffff 020000000001 0806  0001 0800 06 04 0001  020000000001 0a000001  000000000000 0a000002";
const REPLY_2: &str =
    "020000000001 020000000002 0806  0001 0800 06 04 0002  020000000002 0a000002  020000000001 0a000001";
const ASK_US: &str =
    "ffffffffffff 020000000002 0806  0001 0800 06 04 0001  020000000002 0a000002  000000000000 0a000001";
const WE_REPLY: &str =
    "020000000002 020000000001 0806  0001 0800 06 04 0002  020000000001 0a000001  020000000002 0a000002";

#[test]
fn arp_resolves() {
    let mut n = neighbors(false);
    // we:   who has 10.0.0.2?
    assert_eq!(n.resolve(at(0), ip("10.0.0.2"), ip("10.0.0.1")), Resolution::Pending);
    assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
    assert_eq!(n.poll_frame(), None);
    // A second packet does not ask again.
    assert_eq!(n.resolve(at(1), ip("10.0.0.2"), ip("10.0.0.1")), Resolution::Pending);
    assert_eq!(n.poll_frame(), None);
    // peer: 10.0.0.2 is at 02:..:02
    let before = n.generation();
    n.handle_frame(at(2), &hex(REPLY_2));
    assert!(n.generation() > before);
    assert_eq!(n.resolve(at(3), ip("10.0.0.2"), ip("10.0.0.1")), Resolution::Known(PEER));
    assert_eq!(n.poll_timeout(), None);
}

#[test]
fn three_questions_then_unreachable_then_again() {
    let mut n = neighbors(false);
    let hop = ip("10.0.0.2");
    n.resolve(at(0), hop, ip("10.0.0.1"));
    for second in 1..3 {
        assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
        assert_eq!(n.poll_timeout(), Some(at(second * 1000)));
        n.handle_timeout(at(second * 1000 - 1));
        assert_eq!(n.poll_frame(), None, "not due");
        n.handle_timeout(at(second * 1000));
    }
    assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
    n.handle_timeout(at(3000));
    assert_eq!(n.poll_frame(), None);
    assert_eq!(n.peek(hop), Some(Resolution::Unreachable));
    assert_eq!(n.poll_timeout(), None);
    assert_eq!(n.counters(), NeighborCounters { solicits: 3, failures: 1, ..NeighborCounters::default() });
    // Left alone for a while, then asked anew.
    assert_eq!(n.resolve(at(5999), hop, ip("10.0.0.1")), Resolution::Unreachable);
    assert_eq!(n.resolve(at(6000), hop, ip("10.0.0.1")), Resolution::Pending);
    assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
}

#[test]
fn an_old_answer_is_used_while_it_is_asked_again() {
    let mut n = neighbors(false);
    let hop = ip("10.0.0.2");
    n.insert(at(0), hop, PEER);
    assert_eq!(n.resolve(at(29_999), hop, ip("10.0.0.1")), Resolution::Known(PEER));
    assert_eq!(n.poll_frame(), None);
    // Asked of the one who had it.
    assert_eq!(n.resolve(at(30_000), hop, ip("10.0.0.1")), Resolution::Known(PEER));
    let unicast = "020000000002 020000000001 0806  0001 0800 06 04 0001  020000000001 0a000001  000000000000 0a000002";
    assert_eq!(n.poll_frame(), Some(hex(unicast)));
    n.handle_frame(at(30_001), &hex(REPLY_2));
    assert_eq!(n.poll_timeout(), None);
    assert_eq!(n.resolve(at(60_000), hop, ip("10.0.0.1")), Resolution::Known(PEER));
    assert_eq!(n.poll_frame(), None);
}

#[test]
fn a_silent_old_neighbour_is_asked_of_everybody_again() {
    let mut n = neighbors(false);
    let hop = ip("10.0.0.2");
    n.insert(at(0), hop, PEER);
    n.resolve(at(30_000), hop, ip("10.0.0.1"));
    for second in 31..33 {
        n.handle_timeout(at(second * 1000));
    }
    assert_eq!(n.peek(hop), Some(Resolution::Known(PEER)));
    while n.poll_frame().is_some() {}
    n.handle_timeout(at(33_000));
    assert_eq!(n.peek(hop), Some(Resolution::Pending));
    assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
}

#[test]
fn ndp_resolves() {
    let mut n = neighbors(false);
    let hop = ip("fd00::2");
    // we: neighbour solicitation to the solicited-node group, from the address that sends.
    assert_eq!(n.resolve(at(0), hop, ip("fd00::1")), Resolution::Pending);
    let ask = "3333ff000002 020000000001 86dd  60000000 0020 3a ff
        fd000000000000000000000000000001 ff0200000000000000000001ff000002
        87 00 0000 00000000 fd000000000000000000000000000002 0101 020000000001";
    assert_eq!(n.poll_frame(), Some(icmp6(ask)));
    // peer: advertisement, solicited and override
    let answer = "020000000001 020000000002 86dd  60000000 0020 3a ff
        fd000000000000000000000000000002 fd000000000000000000000000000001
        88 00 0000 60000000 fd000000000000000000000000000002 0201 020000000002";
    n.handle_frame(at(1), &icmp6(answer));
    assert_eq!(n.peek(hop), Some(Resolution::Known(PEER)));
}

#[test]
fn an_advertisement_from_afar_or_damaged_is_ignored() {
    let hop = ip("fd00::2");
    let answer = "020000000001 020000000002 86dd  60000000 0020 3a HH
        fd000000000000000000000000000002 fd000000000000000000000000000001
        88 00 0000 60000000 fd000000000000000000000000000002 0201 020000000002";
    let mut n = neighbors(false);
    n.resolve(at(0), hop, ip("fd00::1"));
    n.handle_frame(at(1), &icmp6(&answer.replace("HH", "fe")));
    assert_eq!(n.peek(hop), Some(Resolution::Pending), "hop limit below 255: routed");
    let mut damaged = icmp6(&answer.replace("HH", "ff"));
    damaged[85] ^= 1;
    n.handle_frame(at(2), &damaged);
    assert_eq!(n.peek(hop), Some(Resolution::Pending), "checksum");
}

#[test]
fn the_source_of_a_question_is_ours_and_of_the_scope() {
    let mut n = neighbors(false);
    n.resolve(at(0), ip("fe80::2"), ip("10.0.0.1"));
    let ask = n.poll_frame().unwrap();
    assert_eq!(ask[22..38], hex("fe800000000000000000000000000001"));
    n.resolve(at(0), ip("10.0.0.2"), ip("10.9.9.9"));
    assert_eq!(n.poll_frame(), Some(hex(ASK_2)));
}

#[test]
fn multicast_by_rule() {
    let mut n = neighbors(false);
    let known = |m| Resolution::Known(MacAddr(m));
    assert_eq!(n.resolve(at(0), ip("239.1.2.3"), ip("10.0.0.1")), known([1, 0, 0x5e, 1, 2, 3]));
    assert_eq!(n.resolve(at(0), ip("ff0e::1:2"), ip("fd00::1")), known([0x33, 0x33, 0, 1, 0, 2]));
    assert_eq!(n.resolve(at(0), ip("255.255.255.255"), ip("10.0.0.1")), known([0xff; 6]));
    assert!(!n.has_frames());
}

#[test]
fn we_answer_arp_only_for_our_own() {
    let mut own = neighbors(true);
    own.handle_frame(at(0), &hex(ASK_US));
    assert_eq!(own.poll_frame(), Some(hex(WE_REPLY)));
    own.handle_frame(at(0), &hex(&ASK_US.replace("0a000001", "0a000009")));
    assert_eq!(own.poll_frame(), None, "not ours");
    let mut shared = neighbors(false);
    shared.handle_frame(at(0), &hex(ASK_US));
    assert_eq!(shared.poll_frame(), None, "the kernel's task");
}

#[test]
fn a_peer_cannot_fill_the_cache() {
    let mut n = neighbors(true);
    n.handle_frame(at(0), &hex(ASK_US));
    n.handle_frame(at(0), &hex(REPLY_2));
    assert_eq!(n.peek(ip("10.0.0.2")), None);
}

#[test]
fn the_cache_is_bounded_and_the_oldest_goes() {
    let mut n = neighbors(false);
    for i in 0..NEIGHBORS_MAX + 1 {
        let o = u16::try_from(i).unwrap().to_be_bytes();
        n.insert(at(i as u64), IpAddr::from([10, 1, o[0], o[1]]), PEER);
    }
    assert_eq!(n.peek(ip("10.1.0.0")), None);
    assert_eq!(n.peek(ip("10.1.0.1")), Some(Resolution::Known(PEER)));
    assert_eq!(n.peek(ip("10.1.4.0")), Some(Resolution::Known(PEER)));
}

#[test]
fn a_moved_neighbour_is_followed() {
    let mut n = neighbors(false);
    n.insert(at(0), ip("10.0.0.2"), PEER);
    // other: 10.0.0.2 is at 02:..:03 (gratuitous)
    let announce = "ffffffffffff 020000000003 0806  0001 0800 06 04 0001  020000000003 0a000002  000000000000 0a000002";
    let before = n.generation();
    n.handle_frame(at(1), &hex(announce));
    assert_eq!(n.peek(ip("10.0.0.2")), Some(Resolution::Known(OTHER)));
    assert!(n.generation() > before);
    // A group address is nobody's.
    n.handle_frame(at(2), &hex(&announce.replace("020000000003", "ffffffffffff")));
    assert_eq!(n.peek(ip("10.0.0.2")), Some(Resolution::Known(OTHER)));
}

#[test]
fn an_advertisement_without_override_replaces_nothing() {
    let mut n = neighbors(false);
    n.insert(at(0), ip("fd00::2"), PEER);
    let gossip = "333300000001 020000000003 86dd  60000000 0020 3a ff
        fd000000000000000000000000000002 ff020000000000000000000000000001
        88 00 0000 00000000 fd000000000000000000000000000002 0201 020000000003";
    n.handle_frame(at(1), &icmp6(gossip));
    assert_eq!(n.peek(ip("fd00::2")), Some(Resolution::Known(PEER)));
    n.handle_frame(at(1), &icmp6(&gossip.replace("88 00 0000 00", "88 00 0000 20")));
    assert_eq!(n.peek(ip("fd00::2")), Some(Resolution::Known(OTHER)));
}

#[test]
fn we_answer_a_neighbour_solicitation() {
    let mut n = neighbors(true);
    let ask = "3333ff000001 020000000002 86dd  60000000 0020 3a ff
        fd000000000000000000000000000002 ff0200000000000000000001ff000001
        87 00 0000 00000000 fd000000000000000000000000000001 0101 020000000002";
    n.handle_frame(at(0), &icmp6(ask));
    let answer = "020000000002 020000000001 86dd  60000000 0020 3a ff
        fd000000000000000000000000000001 fd000000000000000000000000000002
        88 00 0000 60000000 fd000000000000000000000000000001 0201 020000000001";
    assert_eq!(n.poll_frame(), Some(icmp6(answer)));
}

#[test]
fn we_defend_our_addresses_in_duplicate_detection() {
    let mut n = neighbors(true);
    // other: is 10.0.0.1 free? (RFC 5227 probe: no sender address)
    let probe = "ffffffffffff 020000000003 0806  0001 0800 06 04 0001  020000000003 00000000  000000000000 0a000001";
    n.handle_frame(at(0), &hex(probe));
    let defend = "020000000003 020000000001 0806  0001 0800 06 04 0002  020000000001 0a000001  020000000003 00000000";
    assert_eq!(n.poll_frame(), Some(hex(defend)));
    // other: is fd00::1 free? (RFC 4862: from the unspecified address). The answer goes to all nodes, not solicited.
    let probe = "3333ff000001 020000000003 86dd  60000000 0018 3a ff
        00000000000000000000000000000000 ff0200000000000000000001ff000001
        87 00 0000 00000000 fd000000000000000000000000000001";
    n.handle_frame(at(0), &icmp6(probe));
    let defend = "333300000001 020000000001 86dd  60000000 0020 3a ff
        fd000000000000000000000000000001 ff020000000000000000000000000001
        88 00 0000 20000000 fd000000000000000000000000000001 0201 020000000001";
    assert_eq!(n.poll_frame(), Some(icmp6(defend)));
    // Not to the solicited-node group: not lawful.
    n.handle_frame(
        at(0),
        &icmp6(&probe.replace("ff0200000000000000000001ff000001", "fd000000000000000000000000000001")),
    );
    assert_eq!(n.poll_frame(), None);
}

#[test]
fn a_claim_to_our_address_is_counted_and_not_answered() {
    let mut n = neighbors(true);
    let claim = "ffffffffffff 020000000003 0806  0001 0800 06 04 0001  020000000003 0a000001  000000000000 0a000001";
    n.handle_frame(at(0), &hex(claim));
    assert_eq!(n.poll_frame(), None);
    assert_eq!(n.counters().conflicts, 1);
}

/// ping: type 8, identifier 0x1234, sequence 7, data "abcd"; checksums worked out by hand.
const PING: &str = "020000000001 020000000002 0800  4500 0020 0000 4000 40 01 26db 0a000002 0a000001
    0800 20fe 1234 0007 61626364";
const PONG: &str = "020000000002 020000000001 0800  4500 0020 0000 4000 40 01 26db 0a000001 0a000002
    0000 28fe 1234 0007 61626364";

#[test]
fn we_answer_ping() {
    // The constants are sound: an Internet checksum over a whole header is 0xffff.
    for text in [PING, PONG] {
        let f = hex(text);
        let fold = |s: u32| (s & 0xffff) + (s >> 16);
        assert_eq!(fold(fold(sum(&f[14..34]))), 0xffff, "{text}");
        assert_eq!(fold(fold(sum(&f[34..]))), 0xffff, "{text}");
    }
    let mut n = neighbors(true);
    n.handle_frame(at(0), &hex(PING));
    assert_eq!(n.poll_frame(), Some(hex(PONG)));
    assert_eq!(n.counters().echoes, 1);
    // Not for us, or for the kernel.
    let mut foreign = hex(PING);
    foreign[5] = 9;
    n.handle_frame(at(0), &foreign);
    assert_eq!(n.poll_frame(), None);
    let mut shared = neighbors(false);
    shared.handle_frame(at(0), &hex(PING));
    assert_eq!(shared.poll_frame(), None);
}

#[test]
fn we_answer_ping6() {
    let mut n = neighbors(true);
    let ping = "020000000001 020000000002 86dd  60000000 000c 3a 40
        fd000000000000000000000000000002 fd000000000000000000000000000001
        80 00 0000 1234 0007 61626364";
    n.handle_frame(at(0), &icmp6(ping));
    let pong = "020000000002 020000000001 86dd  60000000 000c 3a 40
        fd000000000000000000000000000001 fd000000000000000000000000000002
        81 00 0000 1234 0007 61626364";
    assert_eq!(n.poll_frame(), Some(icmp6(pong)));
}

#[test]
fn answers_are_limited() {
    let mut n = neighbors(true);
    let mut sent = 0;
    for _ in 0..ANSWERS_PER_SECOND + 10 {
        n.handle_frame(at(0), &hex(ASK_US));
        sent += u32::from(n.poll_frame().is_some());
    }
    assert_eq!(sent, ANSWERS_PER_SECOND);
    assert_eq!(n.counters().suppressed, 10);
    // Half a second earns half.
    for _ in 0..ANSWERS_PER_SECOND {
        n.handle_frame(at(500), &hex(ASK_US));
        sent += u32::from(n.poll_frame().is_some());
    }
    assert_eq!(sent, ANSWERS_PER_SECOND * 3 / 2);
    // Nobody takes frames: the queue stays bounded.
    for _ in 0..2 * FRAMES_MAX {
        n.handle_frame(at(5000), &hex(PING));
    }
    assert_eq!(std::iter::from_fn(|| n.poll_frame()).count(), FRAMES_MAX);
}

#[test]
fn announcements() {
    let mut n = neighbors(true);
    n.announce();
    let arp = "ffffffffffff 020000000001 0806  0001 0800 06 04 0001  020000000001 0a000001  000000000000 0a000001";
    assert_eq!(n.poll_frame(), Some(hex(arp)));
    let advert = "333300000001 020000000001 86dd  60000000 0020 3a ff
        fe800000000000000000000000000001 ff020000000000000000000000000001
        88 00 0000 20000000 fe800000000000000000000000000001 0201 020000000001";
    assert_eq!(n.poll_frame(), Some(icmp6(advert)));
    assert!(n.poll_frame().is_some());
    assert!(n.poll_frame().is_none());
}

proptest! {
    /// Every seed frame, cut and damaged anywhere, is survived; nothing is learnt that was not asked for.
    #[test]
    fn no_frame_breaks_it(which in 0usize..6, cut in 0usize..100, damage in prop::collection::vec((0usize..100, any::<u8>()), 0..6)) {
        let solicit = "3333ff000001 020000000002 86dd  60000000 0020 3a ff
            fd000000000000000000000000000002 ff0200000000000000000001ff000001
            87 00 0000 00000000 fd000000000000000000000000000001 0101 020000000002";
        let mut frame = [hex(ASK_US), hex(REPLY_2), hex(PING), icmp6(solicit), icmp6(solicit), hex(PONG)][which].clone();
        for (i, v) in damage {
            if let Some(b) = frame.get_mut(i) {
                *b = v;
            }
        }
        if which == 4 {
            // Mend the checksum, so that the options are reached.
            frame[56..58].fill(0);
            let text: String = frame.iter().map(|b| format!("{b:02x}")).collect();
            frame = icmp6(&text);
        }
        frame.truncate(frame.len().saturating_sub(cut));
        let mut n = neighbors(true);
        n.handle_frame(at(0), &frame);
        prop_assert!(n.peek(ip("10.0.0.2")).is_none() && n.peek(ip("fd00::2")).is_none());
        prop_assert!(std::iter::from_fn(|| n.poll_frame()).count() <= 1);
    }
}
