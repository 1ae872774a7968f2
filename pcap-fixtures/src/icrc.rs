//! A slow ICRC, written from the rules and not from an implementation: an oracle for a fast one.

/// The reflected form of the polynomial 0x04C11DB7.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// The ICRC that the RoCEv2 packet `ip_packet` must carry, in wire order (IBTA Vol 1 7.8.1 and the RoCEv2 annex).
///
/// `ip_packet` runs from the first byte of the IPv4 or IPv6 header to the last byte of the ICRC, without Ethernet
/// padding; its last four bytes are the ICRC's own place and are not read. IPv4 options are allowed, IPv6 extension
/// headers are not. Nothing is checked: bytes that are not there are not masked and not counted, so that a packet
/// that ends early has an ICRC too.
#[must_use]
pub fn reference_icrc(ip_packet: &[u8]) -> [u8; 4] {
    let covered = &ip_packet[..ip_packet.len().saturating_sub(4)];
    let mut crc = u32::MAX;
    // Eight bytes of ones stand for the local route header, which RoCEv2 does not have.
    for byte in [0xff; 8] {
        crc = step(crc, byte);
    }
    for (at, &byte) in covered.iter().enumerate() {
        crc = step(crc, byte | mask(covered, at));
    }
    (!crc).to_le_bytes()
}

/// One byte of the CRC, bit by bit: no table, so no table can be wrong.
fn step(crc: u32, byte: u8) -> u32 {
    let mut crc = crc ^ u32::from(byte);
    for _ in 0..8 {
        crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    }
    crc
}

/// The bits of byte `at` that a router may change and that therefore count as ones.
fn mask(ip_packet: &[u8], at: usize) -> u8 {
    let first = ip_packet.first().copied().unwrap_or(0);
    let ipv6 = first >> 4 == 6;
    let udp = if ipv6 { 40 } else { usize::from(first & 0x0f) * 4 };
    let bth = udp + 8;
    match at {
        // IPv6: traffic class, flow label, hop limit.
        0 if ipv6 => 0x0f,
        1..=3 | 7 if ipv6 => 0xff,
        // IPv4: type of service, time to live, header checksum.
        1 | 8 | 10 | 11 if !ipv6 => 0xff,
        // UDP checksum; FECN, BECN and the six reserved bits beside them.
        _ if at == udp + 6 || at == udp + 7 || at == bth + 4 => 0xff,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::{V1_IPV4_SEND_ONLY, VECTORS};

    #[test]
    fn crc_has_the_catalogued_check_value() {
        let crc = b"123456789".iter().fold(u32::MAX, |crc, &byte| step(crc, byte));
        assert_eq!(!crc, 0xCBF4_3926);
    }

    #[test]
    fn vectors_carry_their_icrc() {
        for (name, packet) in VECTORS {
            assert_eq!(reference_icrc(packet), packet[packet.len() - 4..], "{name}");
        }
    }

    /// Every bit of V1 either is masked or changes the ICRC.
    #[test]
    fn only_the_masked_bits_are_free() {
        let want = reference_icrc(V1_IPV4_SEND_ONLY);
        let masked = [1, 8, 10, 11, 26, 27, 32];
        for at in 1..V1_IPV4_SEND_ONLY.len() - 4 {
            for bit in 0..8 {
                let mut packet = V1_IPV4_SEND_ONLY.to_vec();
                packet[at] ^= 1 << bit;
                assert_eq!(reference_icrc(&packet) == want, masked.contains(&at), "byte {at} bit {bit}");
            }
        }
    }

    #[test]
    fn packets_that_end_early_have_an_icrc_too() {
        for (_, packet) in VECTORS {
            for len in 0..packet.len() {
                assert_eq!(reference_icrc(&packet[..len]).len(), 4);
            }
        }
    }
}
