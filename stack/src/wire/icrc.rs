//! The invariant CRC (IBTA annex A17).
//!
//! Owns the pseudo headers that it covers and the arithmetic of CRC-32 run backwards. Never reads an outer header from
//! a frame: what the CRC covers is made anew from [`Flow`] and [`IpFields`], so that it is the same for every device.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::flow::{Flow, IpFields};
use super::parse::{BTH, ICRC_LEN};
use crate::raw::copy;
use crate::types::Psn;

/// IPv4 flags and fragment offset with "don't fragment" alone.
pub const DONT_FRAGMENT: u16 = 0x4000;

/// CRC-32 of the eight bytes 0xFF that stand for the masked LRH.
const AFTER_LRH: u32 = 0x2144_DF1C;
/// IPv6 header, UDP header.
const PSEUDO_MAX: usize = 40 + 8;
const IPV4: usize = 20;
const UDP: usize = 8;
/// Where in the BTH the byte stands that is masked: FECN, BECN and six reserved bits.
const MARKS: usize = 4;

/// The ICRC of a segment, as its four bytes stand on the wire.
///
/// `segment_without_icrc` is BTH to the last pad byte. IP and UDP lengths are taken to be those of this segment alone,
/// which is how each segment of a superframe travels.
#[must_use]
pub fn icrc(flow: &Flow, ip: IpFields, segment_without_icrc: &[u8]) -> [u8; 4] {
    IcrcStart::new(flow, ip.flags_fragment, segment_without_icrc.len() + ICRC_LEN).icrc(ip.id, segment_without_icrc)
}

/// Ends a segment: zeroes the pad between `payload_end` and the last four bytes, and writes the ICRC into those.
///
/// `segment` is BTH to ICRC. Does nothing to a segment shorter than four bytes.
pub fn seal(flow: &Flow, ip: IpFields, segment: &mut [u8], payload_end: usize) {
    let Some((covered, last)) = segment.split_last_chunk_mut::<ICRC_LEN>() else { return };
    if let Some(pad) = covered.get_mut(payload_end..) {
        pad.fill(0);
    }
    *last = icrc(flow, ip, covered);
}

/// Ends a segment whose CRC up to the payload's last byte is `crc`: `rest` is pad and ICRC, which are written. Does
/// nothing if it is shorter than four bytes.
#[inline]
pub fn close(crc: u32, rest: &mut [u8]) {
    let Some((pad, last)) = rest.split_last_chunk_mut::<ICRC_LEN>() else { return };
    let crc = if pad.is_empty() {
        crc
    } else {
        pad.fill(0);
        copy::crc(crc, pad)
    };
    *last = crc.to_le_bytes();
}

/// Whether the ICRC at the end of `segment` (BTH to ICRC) is right.
#[must_use]
pub fn check(flow: &Flow, ip: IpFields, segment: &[u8]) -> bool {
    IcrcStart::new(flow, ip.flags_fragment, segment.len()).check(ip.id, segment)
}

/// The identification with which the ICRC of `segment` is right, for a packet from a UDP socket, which hides it: see
/// [`IcrcStart::recover_id`]. "Don't fragment" is taken to be set.
#[must_use]
pub fn recover_id(flow: &Flow, segment: &[u8]) -> Option<u16> {
    IcrcStart::new(flow, DONT_FRAGMENT, segment.len()).recover_id(segment, 0)
}

/// Where the ICRC stands when the masked LRH, IP and UDP headers are through and the BTH comes: for all segments of one
/// length in one flow, whatever their identification.
///
/// Made once for a superframe, it saves each segment the CRC of some forty bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcrcStart {
    /// The CRC for identification 0.
    crc: u32,
    /// Whether there is an identification.
    ipv4: bool,
}

impl IcrcStart {
    /// For segments of `segment_len` bytes, BTH to ICRC. IP and UDP lengths are taken to be those of one segment alone,
    /// which is how each segment of a superframe travels. `flags_fragment` is ignored on IPv6.
    #[must_use]
    pub fn new(flow: &Flow, flags_fragment: u16, segment_len: usize) -> Self {
        let mut pseudo = [0xFF; PSEUDO_MAX];
        let udp_len = segment_len + UDP;
        let (headers, ipv4) = match (flow.src, flow.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => (ipv4(flow, flags_fragment, src, dst, udp_len, &mut pseudo), true),
            (src, dst) => (ipv6(flow, mapped(src), mapped(dst), udp_len, &mut pseudo), false),
        };
        Self { crc: copy::crc(AFTER_LRH, pseudo.get(..headers).unwrap_or_default()), ipv4 }
    }

    /// The CRC to go on from over a segment whose front is `bth`, the bytes taken as they stand: what differs between
    /// them and what the ICRC covers, the masked byte, is made good here.
    ///
    /// CRC is linear: a change of one byte changes the CRC by what depends on this change and the number of bytes up to
    /// there. So the identification goes into the CRC after the headers, and the masked byte into the one before the BTH.
    #[inline]
    fn before(self, id: u16, bth: &[u8]) -> u32 {
        let mask = bth.get(MARKS).map_or(0, |marks| entry(&UNMASK, !marks));
        self.with_id(id) ^ mask
    }

    /// The CRC after `headers`, BTH and extended headers: where the payload's begins.
    #[inline(always)] // A call, and its spills, would be a tenth of what a small packet costs.
    #[must_use]
    pub fn after(self, id: u16, headers: &[u8]) -> u32 {
        copy::crc(self.before(id, headers), headers)
    }

    #[inline]
    fn with_id(self, id: u16) -> u32 {
        let [high, low] = id.to_be_bytes();
        if self.ipv4 { self.crc ^ entry(&ID_HIGH, high) ^ entry(&ID_LOW, low) } else { self.crc }
    }

    /// The ICRC of a segment with this identification, as its four bytes stand on the wire.
    ///
    /// `segment_without_icrc` is BTH to the last pad byte.
    #[inline]
    #[must_use]
    pub fn icrc(self, id: u16, segment_without_icrc: &[u8]) -> [u8; 4] {
        self.after(id, segment_without_icrc).to_le_bytes()
    }

    /// Whether the ICRC at the end of `segment` (BTH to ICRC) is right for this identification.
    #[inline]
    #[must_use]
    pub fn check(self, id: u16, segment: &[u8]) -> bool {
        segment.split_last_chunk::<ICRC_LEN>().is_some_and(|(covered, last)| self.icrc(id, covered) == *last)
    }

    /// The identification with which the ICRC of `segment` is right. `None` if there is no such value; on IPv6, which
    /// has no identification, `Some(likely)` if the ICRC is right. Fastest when it is `likely`.
    ///
    /// Any of 65,536 values fits, so a corrupted IPv4 packet passes once in 65,536: what is left is a 16-bit check. A
    /// caller that knows which values its peer uses wins the rest back.
    ///
    /// CRC is linear: the difference of two CRCs depends on the difference of the inputs alone. The difference between
    /// the received CRC and that for `likely`, run backwards over all bytes that follow the identification, is the
    /// difference of the identifications, if and only if its upper 16 bits are zero.
    #[must_use]
    pub fn recover_id(self, segment: &[u8], likely: u16) -> Option<u16> {
        let (covered, last) = segment.split_last_chunk::<ICRC_LEN>()?;
        let difference = u32::from_le_bytes(self.icrc(likely, covered)) ^ u32::from_le_bytes(*last);
        if difference == 0 {
            return Some(likely);
        }
        if !self.ipv4 {
            return None;
        }
        let after_id = ID_HIGH_TO_BTH + covered.len();
        let [first, second, 0, 0] = run_back(difference, after_id)?.to_le_bytes() else { return None };
        Some(likely ^ u16::from_be_bytes([first, second]))
    }
}

/// Where the ICRC stands when a BTH is through and the payload comes: for all packets of one length in one flow whose BTHs
/// differ in nothing but the PSN, whatever their identification.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunIcrc {
    /// The CRC for identification 0 and PSN 0.
    crc: u32,
    ipv4: bool,
}

impl RunIcrc {
    /// Of packets with this BTH, its PSN 0.
    pub(super) fn new(start: IcrcStart, bth: &[u8; BTH]) -> Self {
        Self { crc: u32::from_le_bytes(start.icrc(0, bth)), ipv4: start.ipv4 }
    }

    /// The CRC after the BTH of the packet at `psn` with this identification.
    #[inline]
    pub(super) fn at(self, psn: Psn, id: u16) -> u32 {
        let [_, first, second, third] = psn.get().to_be_bytes();
        let psn = entry(&RUN_PSN[0], first) ^ entry(&RUN_PSN[1], second) ^ entry(&RUN_PSN[2], third);
        let [high, low] = id.to_be_bytes();
        let id = if self.ipv4 { entry(&RUN_ID[0], high) ^ entry(&RUN_ID[1], low) } else { 0 };
        self.crc ^ psn ^ id
    }
}

/// The start that was asked for last: packets of one flow and one length come in rows, within bursts and beyond.
#[derive(Clone, Copy, Debug, Default)]
pub struct IcrcStarts(Option<Known>);

#[derive(Clone, Copy, Debug)]
struct Known {
    src: IpAddr,
    dst: IpAddr,
    src_port: u16,
    flags_fragment: u16,
    segment_len: usize,
    start: IcrcStart,
}

impl IcrcStarts {
    /// What [`IcrcStart::new`] returns.
    #[inline]
    #[must_use]
    pub fn get(&mut self, flow: &Flow, flags_fragment: u16, segment_len: usize) -> IcrcStart {
        match &self.0 {
            Some(known)
                if known.segment_len == segment_len
                    && (known.src_port, known.flags_fragment) == (flow.src_port, flags_fragment)
                    && (known.src, known.dst) == (flow.src, flow.dst) =>
            {
                known.start
            }
            _ => self.learn(flow, flags_fragment, segment_len),
        }
    }

    #[inline(never)]
    fn learn(&mut self, flow: &Flow, flags_fragment: u16, segment_len: usize) -> IcrcStart {
        let start = IcrcStart::new(flow, flags_fragment, segment_len);
        let Flow { src, dst, src_port, .. } = *flow;
        self.0 = Some(Known { src, dst, src_port, flags_fragment, segment_len, start });
        start
    }
}

/// Whether the packets of a flow are IPv4. Mixed families, which no device makes, count as IPv6 with mapped addresses.
pub(super) const fn is_ipv4(flow: &Flow) -> bool {
    flow.src.is_ipv4() && flow.dst.is_ipv4()
}

/// IPv4 and UDP header, masked: type of service, TTL, header checksum and UDP checksum are ones; identification 0.
/// Returns 28.
#[inline]
fn ipv4(
    flow: &Flow,
    flags_fragment: u16,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    udp_len: usize,
    pseudo: &mut [u8; PSEUDO_MAX],
) -> usize {
    pseudo[0] = 0x45;
    pseudo[2..4].copy_from_slice(&wire_len(udp_len + IPV4));
    pseudo[4..6].fill(0);
    pseudo[6..8].copy_from_slice(&flags_fragment.to_be_bytes());
    pseudo[9] = 17;
    pseudo[12..16].copy_from_slice(&src.octets());
    pseudo[16..20].copy_from_slice(&dst.octets());
    pseudo[20..22].copy_from_slice(&flow.src_port.to_be_bytes());
    pseudo[22..24].copy_from_slice(&Flow::PORT.to_be_bytes());
    pseudo[24..26].copy_from_slice(&wire_len(udp_len));
    28
}

/// IPv6 and UDP header, masked: traffic class, flow label, hop limit and UDP checksum are ones. Returns 48.
#[inline]
fn ipv6(flow: &Flow, src: Ipv6Addr, dst: Ipv6Addr, udp_len: usize, pseudo: &mut [u8; PSEUDO_MAX]) -> usize {
    let udp_len = wire_len(udp_len);
    pseudo[0] = 0x6F;
    pseudo[4..6].copy_from_slice(&udp_len);
    pseudo[6] = 17;
    pseudo[8..24].copy_from_slice(&src.octets());
    pseudo[24..40].copy_from_slice(&dst.octets());
    pseudo[40..42].copy_from_slice(&flow.src_port.to_be_bytes());
    pseudo[42..44].copy_from_slice(&Flow::PORT.to_be_bytes());
    pseudo[44..46].copy_from_slice(&udp_len);
    48
}

/// The address as IPv6.
pub(super) const fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// A length that no datagram can have is cut off; its ICRC is then wrong for any receiver.
fn wire_len(len: usize) -> [u8; 2] {
    u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes()
}

/// The reflected polynomial of CRC-32.
const POLYNOMIAL: u32 = 0xEDB8_8320;
/// x^0 where bit 31 is the lowest power, as in a reflected register.
const ONE: u32 = 1 << 31;

/// `BACK[j][d]` is x to the power -8 * d * 16^j: a register multiplied by it is run back over d * 16^j bytes.
const BACK: [[u32; 16]; 4] = {
    let mut table = [[ONE; 16]; 4];
    let mut step = ONE;
    let mut i = 0;
    while i < 8 {
        step = divide_by_x(step);
        i += 1;
    }
    let mut j = 0;
    while j < 4 {
        let mut d = 1;
        while d < 16 {
            table[j][d] = multiply(table[j][d - 1], step);
            d += 1;
        }
        step = multiply(table[j][15], step);
        j += 1;
    }
    table
};

/// Bytes of IPv4 and UDP header from the identification's first byte to the end.
const ID_HIGH_TO_BTH: usize = IPV4 - 4 + UDP;
/// Bytes of the BTH from the PSN's first byte to the end.
const PSN_TO_PAYLOAD: usize = 3;

/// What the identification's bytes change in the CRC at the end of the headers.
static ID_HIGH: [u32; 256] = multiples(forward(ID_HIGH_TO_BTH));
static ID_LOW: [u32; 256] = multiples(forward(ID_HIGH_TO_BTH - 1));
/// The same at the end of the BTH.
static RUN_ID: [[u32; 256]; 2] =
    [multiples(forward(ID_HIGH_TO_BTH + BTH)), multiples(forward(ID_HIGH_TO_BTH - 1 + BTH))];
/// What the PSN's bytes change in the CRC at the end of the BTH.
static RUN_PSN: [[u32; 256]; 3] = [
    multiples(forward(PSN_TO_PAYLOAD)),
    multiples(forward(PSN_TO_PAYLOAD - 1)),
    multiples(forward(PSN_TO_PAYLOAD - 2)),
];
/// What a change in the BTH's masked byte amounts to at the front of the BTH.
static UNMASK: [u32; 256] = multiples(BACK[0][MARKS]);

#[inline]
fn entry(table: &[u32; 256], byte: u8) -> u32 {
    table[usize::from(byte)]
}

/// x to the power 8 * bytes: a register multiplied by it is run forward over as many bytes.
const fn forward(bytes: usize) -> u32 {
    let mut power = ONE;
    let mut bit = 0;
    while bit < bytes * 8 {
        power = (power >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(power & 1));
        bit += 1;
    }
    power
}

/// The product of each byte, as it stands in a register, and `factor`.
const fn multiples(factor: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0u32;
    while byte < 256 {
        table[byte as usize] = multiply(byte, factor);
        byte += 1;
    }
    table
}

/// Runs a CRC difference back over `bytes` equal bytes. `None` beyond 65,535 bytes.
fn run_back(mut register: u32, bytes: usize) -> Option<u32> {
    let bytes = u16::try_from(bytes).ok()?;
    for (j, powers) in BACK.iter().enumerate() {
        let digit = usize::from(bytes >> (4 * j) & 15);
        if digit != 0 {
            register = multiply(register, *powers.get(digit)?);
        }
    }
    Some(register)
}

const fn divide_by_x(a: u32) -> u32 {
    if a & ONE != 0 { (a ^ POLYNOMIAL) << 1 | 1 } else { a << 1 }
}

/// Product of two polynomials modulo the CRC's.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= b & 0u32.wrapping_sub(a >> bit & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::outer::parse_ip;
    use uroce_fixtures::{reference_icrc, vectors::VECTORS};

    #[test]
    fn vectors_of_other_implementations() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            let (covered, expected) = outer.payload.split_last_chunk::<4>().unwrap();
            assert_eq!(icrc(&outer.flow, outer.ip, covered), *expected, "{name}");
            assert!(check(&outer.flow, outer.ip, outer.payload), "{name}");
            assert_eq!(recover_id(&outer.flow, outer.payload), Some(outer.ip.id), "{name}");
        }
    }

    #[test]
    fn seal_makes_the_vectors() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            let pad = usize::from(outer.payload[1] >> 4 & 3);
            let payload_end = outer.payload.len() - 4 - pad;
            let mut segment = outer.payload.to_vec();
            segment[payload_end..].fill(0xEE);
            seal(&outer.flow, outer.ip, &mut segment, payload_end);
            assert_eq!(segment, outer.payload, "{name}");
            segment[payload_end..].fill(0xEE);
            let (front, rest) = segment.split_at_mut(payload_end);
            let (headers, payload) = front.split_at(12);
            let start = IcrcStart::new(&outer.flow, outer.ip.flags_fragment, outer.payload.len());
            close(copy::crc(start.after(outer.ip.id, headers), payload), rest);
            assert_eq!(segment, outer.payload, "{name}, in parts");
        }
    }

    #[test]
    fn a_short_segment_is_wrong_and_harmless() {
        let outer = parse_ip(VECTORS[0].1).unwrap();
        for len in 0..16 {
            let mut segment = vec![0; len];
            assert!(!check(&outer.flow, outer.ip, &segment));
            seal(&outer.flow, outer.ip, &mut segment, 99);
            assert_eq!(check(&outer.flow, outer.ip, &segment), len >= 4);
        }
    }

    #[test]
    fn every_id_is_recovered_and_a_flipped_bit_is_not() {
        let outer = parse_ip(VECTORS[0].1).unwrap();
        let mut segment = outer.payload.to_vec();
        for id in 0..=u16::MAX {
            let end = segment.len() - 4;
            seal(&outer.flow, IpFields { id, flags_fragment: DONT_FRAGMENT }, &mut segment, end);
            assert_eq!(recover_id(&outer.flow, &segment), Some(id));
        }
        for bit in 0..segment.len() * 8 {
            let mut bad = segment.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let marks = (32..40).contains(&bit);
            assert_eq!(recover_id(&outer.flow, &bad).is_some(), marks, "bit {bit}");
        }
    }

    #[test]
    fn one_start_serves_all_ids_and_all_marks() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            let (covered, _) = outer.payload.split_last_chunk::<4>().unwrap();
            let start = IcrcStart::new(&outer.flow, outer.ip.flags_fragment, outer.payload.len());
            for id in (0..=u16::MAX).step_by(257).chain([1, 2, 255, 256, u16::MAX]) {
                let mut whole = vec![0; 48];
                let headers =
                    crate::wire::write_outer(&outer.flow, id, outer.payload.len(), &mut whole).expect("48 bytes");
                whole.truncate(headers);
                whole.extend(outer.payload);
                let mut segment = covered.to_vec();
                // What is masked may be anything.
                segment[4] = id.to_le_bytes()[0];
                if outer.ip.flags_fragment == DONT_FRAGMENT {
                    assert_eq!(start.icrc(id, &segment), reference_icrc(&whole), "{name} {id}");
                }
                assert_eq!(start.icrc(id, &segment), icrc(&outer.flow, IpFields { id, ..outer.ip }, covered));
            }
        }
    }

    #[test]
    fn a_start_that_is_known_is_for_what_is_asked() {
        let mut starts = IcrcStarts::default();
        for (name, packet) in VECTORS.iter().chain(&VECTORS) {
            let Flow { src, dst, .. } = parse_ip(packet).unwrap().flow;
            let flow = parse_ip(packet).unwrap().flow;
            let turned = Flow { src: dst, dst: src, ..flow };
            let moved = Flow { src_port: !flow.src_port, ..flow };
            for (flow, flags, len) in
                [(flow, 0, 64), (flow, 0, 64), (flow, 0, 68), (flow, 1, 68), (turned, 1, 68), (moved, 1, 68)]
            {
                assert_eq!(starts.get(&flow, flags, len), IcrcStart::new(&flow, flags, len), "{name}");
            }
        }
    }

    #[test]
    fn a_wrong_guess_does_not_change_the_id() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            let start = IcrcStart::new(&outer.flow, outer.ip.flags_fragment, outer.payload.len());
            for likely in [0, 1, outer.ip.id, 0x1234, u16::MAX] {
                let found = if outer.flow.src.is_ipv4() { outer.ip.id } else { likely };
                assert_eq!(start.recover_id(outer.payload, likely), Some(found), "{name} {likely}");
            }
        }
    }

    #[test]
    fn run_back_undoes_zero_bytes() {
        let register = 0x1234_5678;
        for bytes in [0usize, 1, 15, 16, 17, 255, 256, 4096, 4120, 65_535] {
            let mut forward = register;
            for _ in 0..bytes * 8 {
                forward = (forward >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(forward & 1));
            }
            assert_eq!(run_back(forward, bytes), Some(register), "{bytes}");
        }
        assert_eq!(run_back(register, 65_536), None);
    }

    #[test]
    fn the_slow_reference_agrees_on_every_length() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            for payload in 0..300usize {
                let mut segment = outer.payload[..12].to_vec();
                segment.extend((0..payload).map(|i| (i * 7) as u8));
                segment.extend([0; 4]);
                let mut whole = vec![0; 48];
                let headers = crate::wire::write_outer(&outer.flow, outer.ip.id, segment.len(), &mut whole).unwrap();
                whole.truncate(headers);
                whole.extend(&segment);
                let covered = &segment[..segment.len() - 4];
                assert_eq!(icrc(&outer.flow, outer.ip, covered), reference_icrc(&whole), "{name} {payload}");
            }
        }
    }
}
