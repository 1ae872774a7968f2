//! Captures in `captures/odd`: each shows a fault of Linux's rxe and is evidence, not an example. They are not in the
//! index, whose captures are right in every byte. What is seen there is stated in docs/src/interop.md.

use uroce_fixtures::reference_icrc;

const ETHERNET: usize = 14;
const IPV4_AND_UDP: usize = 28;
const BTH: usize = 12;
const UROCE: [u8; 6] = [0x02, 0x77, 0, 0, 0, 0x64];

/// The Ethernet frames of a classic pcap file.
fn frames(name: &str) -> Vec<Vec<u8>> {
    let path = format!("{}/captures/odd/{name}.pcap", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[24..];
    let mut out = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let (frame, after) = rest[16..].split_at(len);
        if frame[12..14] == [8, 0] && frame[36..38] == 4791_u16.to_be_bytes() {
            out.push(frame.to_vec());
        }
        rest = after;
    }
    out
}

fn bth(frame: &[u8]) -> &[u8] {
    &frame[ETHERNET + IPV4_AND_UDP..]
}

fn psn(frame: &[u8]) -> u32 {
    u32::from_be_bytes(bth(frame)[8..12].try_into().unwrap()) & 0xFF_FFFF
}

/// `icrc` carried on over `bytes`: the CRC-32 of Ethernet, bit by bit.
fn carried_on(icrc: [u8; 4], bytes: &[u8]) -> [u8; 4] {
    let mut crc = !u32::from_le_bytes(icrc);
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 };
        }
    }
    (!crc).to_le_bytes()
}

#[test]
fn rxe_computes_the_icrc_of_a_flush_over_its_headers_twice() {
    let (mut flushes, mut others) = (0, 0);
    for frame in frames("rxe_flush") {
        let (packet, icrc) = frame[ETHERNET..].split_last_chunk::<4>().unwrap();
        let right = reference_icrc(&frame[ETHERNET..]);
        if bth(&frame)[0] == 0x1C {
            flushes += 1;
            assert_ne!(*icrc, right);
            assert_eq!(*icrc, carried_on(right, &packet[IPV4_AND_UDP..]));
        } else {
            others += 1;
            assert_eq!(*icrc, right);
        }
    }
    assert_eq!(flushes, 3);
    assert!(others > 3);
}

#[test]
fn rxe_stops_inside_a_message_that_was_acknowledged() {
    let all = frames("rxe_stall");
    let theirs = |frame: &&Vec<u8>| frame[6..12] != UROCE;
    // The last message of rxe's: it was sent to its end once.
    let end = all.iter().filter(theirs).rfind(|f| bth(f)[0] == 0x02).map(|f| psn(f)).unwrap();
    let last = all.iter().rfind(theirs).unwrap();
    assert_eq!(bth(last)[0], 0x01, "a SEND middle is the last that rxe ever sends");
    assert!(psn(last) < end, "of the same message");
    let from_last_middle = all.iter().filter(|f| f[6..12] == UROCE && bth(f)[0] == 0x11 && psn(f) == end).count();
    assert!(from_last_middle >= 2, "the whole message was acknowledged, and again");
    assert!(all.iter().all(|f| {
        let (packet, icrc) = f[ETHERNET..].split_last_chunk::<4>().unwrap();
        packet.len() > IPV4_AND_UDP + BTH && *icrc == reference_icrc(&f[ETHERNET..])
    }));
}
