//! Runs: packets inside a message, each with a BTH alone, that differ in nothing but the PSN.
//!
//! Owns what such packets have in common: the header, which is made or read once, and its part of the ICRC, which follows
//! from the first one's because CRC is linear. A READ, a WRITE or a SEND is runs but for its ends. Never looks at a
//! payload, and keeps no state of a connection.

use super::icrc::{IcrcStart, RunIcrc};
use super::opcode::Operation;
use super::packet::Packet;
use super::parse::{BTH, ICRC_LEN};
use crate::raw::copy;
use crate::types::Psn;

/// Where the PSN stands in its last word.
const PSN: u32 = Psn::MASK;

/// What the BTHs of a run share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunHeader {
    /// Opcode, flags, partition key, marks and destination.
    front: [u8; 8],
    /// The word of the PSN, without it.
    back: u32,
}

/// Whether a packet of this first byte stands inside a message: payload and no header but the BTH.
#[inline]
#[must_use]
pub fn is_inside(segment: &[u8]) -> bool {
    const SEND: u8 = Operation::SendMiddle as u8;
    const WRITE: u8 = Operation::WriteMiddle as u8;
    const READ: u8 = Operation::ReadResponseMiddle as u8;
    const UC: u8 = 0x20;
    const UC_SEND: u8 = UC | SEND;
    const UC_WRITE: u8 = UC | WRITE;
    matches!(segment.first(), Some(&(SEND | WRITE | READ | UC_SEND | UC_WRITE)))
}

impl RunHeader {
    /// That of packets like `packet` with `payload_len` bytes. `None` where there can be no run: it has headers
    /// of its own, a pad, or asks for an answer.
    #[must_use]
    pub fn new(packet: &Packet<'_>, payload_len: usize) -> Option<Self> {
        let mut header = [0; BTH];
        if packet.header_len() != BTH || packet.ack_req || !payload_len.is_multiple_of(4) {
            return None;
        }
        packet.write_headers(payload_len, &mut header)?;
        Self::of(&header)
    }

    /// That of a received segment and those like it. `None` where there can be no run.
    #[inline]
    #[must_use]
    pub fn of(segment: &[u8]) -> Option<Self> {
        let (front, rest) = segment.split_first_chunk::<8>()?;
        let back = u32::from_be_bytes(*rest.first_chunk()?) & !PSN;
        let inside = is_inside(front) && back >> 31 == 0;
        inside.then_some(Self { front: *front, back })
    }

    /// The header of the packet at `psn`.
    #[inline]
    fn bytes(&self, psn: Psn) -> [u8; BTH] {
        let mut bytes = [0; BTH];
        bytes[..8].copy_from_slice(&self.front);
        bytes[8..].copy_from_slice(&(self.back | psn.get()).to_be_bytes());
        bytes
    }

    /// Whether `segment` is the run's packet at `psn`.
    #[inline]
    fn is_at(&self, psn: Psn, segment: &[u8]) -> bool {
        let Some((front, rest)) = segment.split_first_chunk::<8>() else { return false };
        let Some(back) = rest.first_chunk::<4>() else { return false };
        u64::from_ne_bytes(*front) == u64::from_ne_bytes(self.front)
            && u32::from_be_bytes(*back) == self.back | psn.get()
    }
}

/// Writes the packets of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunWriter {
    header: RunHeader,
    icrc: RunIcrc,
}

impl RunWriter {
    /// Bytes of a segment with `payload_len` bytes, which have no pad.
    #[must_use]
    pub const fn segment_len(payload_len: usize) -> usize {
        BTH + payload_len + ICRC_LEN
    }

    /// For packets with this header whose ICRC starts with `start`.
    #[must_use]
    pub fn new(header: RunHeader, start: IcrcStart) -> Self {
        Self { header, icrc: RunIcrc::new(start, &header.bytes(Psn::ZERO)) }
    }

    /// Writes the packet at `psn` with IPv4 identification `id` over the whole of `segment`; `fill` writes the payload, and goes
    /// on from a CRC to that of what it has written. False, and nothing that counts is written, if it fails.
    #[inline]
    pub fn write(
        &self,
        psn: Psn,
        id: u16,
        segment: &mut [u8],
        fill: impl FnOnce(&mut [u8], u32) -> Option<u32>,
    ) -> bool {
        let Some((header, rest)) = segment.split_first_chunk_mut::<BTH>() else { return false };
        let Some((payload, last)) = rest.split_last_chunk_mut::<ICRC_LEN>() else { return false };
        *header = self.header.bytes(psn);
        let Some(crc) = fill(payload, self.icrc.at(psn, id)) else { return false };
        *last = crc.to_le_bytes();
        true
    }
}

/// Reads the packets of a run, one by one.
#[derive(Clone, Copy, Debug)]
pub struct RunReader {
    header: RunHeader,
    icrc: RunIcrc,
    psn: Psn,
    id: u16,
    /// Where the ICRC of the packet that comes next stands when its payload begins. Known while the packet before is placed,
    /// whose stores may have driven the tables out of the cache.
    crc: u32,
    checks: bool,
}

impl RunReader {
    /// For packets with this header from `psn` on, whose ICRC starts with `start` and whose identifications count up from
    /// `id`. Their ICRC is looked at if it `checks`.
    #[must_use]
    pub fn new(header: RunHeader, start: IcrcStart, psn: Psn, id: u16, checks: bool) -> Self {
        let icrc = RunIcrc::new(start, &header.bytes(Psn::ZERO));
        Self { header, icrc, psn, id, crc: icrc.at(psn, id), checks }
    }

    /// The payload of `segment`, BTH to ICRC without a pad, if it is the run's next packet and its ICRC is right.
    #[inline]
    pub fn take<'s>(&mut self, segment: &'s [u8]) -> Option<&'s [u8]> {
        let (bth, rest) = segment.split_first_chunk::<BTH>()?;
        let (payload, last) = rest.split_last_chunk::<ICRC_LEN>()?;
        let is_next = self.header.is_at(self.psn, bth);
        if !is_next || (self.checks && copy::crc(self.crc, payload).to_le_bytes() != *last) {
            return None;
        }
        (self.psn, self.id) = (self.psn.next(), self.id.wrapping_add(1));
        self.crc = self.icrc.at(self.psn, self.id);
        Some(payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::types::{PKey, Qpn};
    use crate::wire::{Aeth, Place};
    use crate::wire::{
        Body, DONT_FRAGMENT, Flow, Opcode, Request, RequestOp, Response, ResponseOp, SendTail, Service, Support,
        WritePart, write_outer,
    };
    use uroce_fixtures::reference_icrc;

    /// Bodies that can be in a run, with their opcodes.
    fn bodies() -> [(u8, Body<'static>); 5] {
        let request = |service, op| Body::Request(Request { service, op, payload: &[] });
        let send = RequestOp::Send(Place::Middle, SendTail::None);
        let write = RequestOp::Write(WritePart::Middle);
        [
            (0x01, request(Service::Rc, send)),
            (0x07, request(Service::Rc, write)),
            (0x21, request(Service::Uc, send)),
            (0x27, request(Service::Uc, write)),
            (0x0E, Body::Response(Response { op: ResponseOp::ReadMiddle, payload: &[] })),
        ]
    }

    fn flow(rng: &mut Rng, ipv4: bool) -> Flow {
        let mut address = || match ipv4 {
            true => rng.next_u32().to_be_bytes().into(),
            false => (u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())).to_be_bytes().into(),
        };
        let (src, dst) = (address(), address());
        let [src_port, class, label] = [0; 3].map(|_| rng.next_u32());
        let flow_label = if ipv4 { 0 } else { label & 0xF_FFFF };
        let (src_port, traffic_class) = ((src_port >> 16) as u16, (class >> 24) as u8);
        Flow { src, dst, src_port, traffic_class, hop_limit: 64, flow_label, vlan: None }
    }

    #[test]
    fn inside_are_the_middles_that_we_serve() {
        for byte in 0..=u8::MAX {
            let opcode = Opcode::new(byte);
            let middle = matches!(
                opcode.operation(),
                Some(Operation::SendMiddle | Operation::WriteMiddle | Operation::ReadResponseMiddle)
            );
            assert_eq!(is_inside(&[byte, 1, 2]), middle && opcode.support() == Support::Served, "{opcode}");
        }
        assert!(!is_inside(&[]));
    }

    /// A run against the packets one by one, byte for byte, and their ICRC against one that is computed bit by bit over
    /// the whole packet: over both ends of the ranges of PSN and identification, and with random headers.
    #[test]
    fn a_run_is_its_packets_one_by_one() {
        let mut rng = Rng::from_seed([7; 32]);
        for round in 0..400 {
            let (opcode, body) = bodies()[round % 5];
            let flow = flow(&mut rng, round % 2 == 0);
            let first = match round % 3 {
                0 => Psn::ZERO.minus(2),
                1 => Psn::from_wire(rng.next_u32() | 0xFF).minus(2),
                _ => Psn::from_wire(rng.next_u32()),
            };
            let first_id = if round % 4 == 0 { u16::MAX - 1 } else { (rng.next_u32() >> 16) as u16 };
            let len = [4, 64, 256, 1024, 4096][(round / 5) % 5].min(4 * (1 + round * 3));
            let bits = rng.next_u32();
            let packet = Packet {
                solicited: bits & 1 != 0,
                mig_req: bits & 2 != 0,
                fecn: bits & 4 != 0,
                becn: bits & 8 != 0,
                reserved: ((bits >> 8) as u8 & 0x3F, (bits >> 16) as u8 & 0x7F),
                ..Packet::new(Qpn::from_wire(rng.next_u32()), PKey::new((bits >> 4) as u16), Psn::ZERO, body)
            };
            let segment_len = RunWriter::segment_len(len);
            let header = RunHeader::new(&packet, len).unwrap();
            let start = IcrcStart::new(&flow, DONT_FRAGMENT, segment_len);
            let writer = RunWriter::new(header, start);
            let mut reader = RunReader::new(header, start, first, first_id, true);
            for i in 0..5u16 {
                let (psn, id) = (first.plus(i.into()), first_id.wrapping_add(i));
                let payload: Vec<u8> = (0..len).map(|_| rng.next_u32() as u8).collect();
                let mut segment = vec![0xEE; segment_len];
                assert!(writer.write(psn, id, &mut segment, |out, crc| {
                    out.copy_from_slice(&payload);
                    Some(crate::raw::copy::crc(crc, &payload))
                }));
                let mut whole = vec![0; 48];
                let outer = write_outer(&flow, id, segment_len, &mut whole).unwrap();
                whole.truncate(outer);
                whole.resize(outer + segment_len, 0);
                let headers = Packet { psn, ..packet }.write_headers(len, &mut whole[outer..]).unwrap();
                whole[outer + headers..][..len].copy_from_slice(&payload);
                let icrc = reference_icrc(&whole);
                whole[outer + segment_len - 4..].copy_from_slice(&icrc);
                assert_eq!(segment, whole[outer..], "round {round}, packet {i}, opcode {opcode:#04x}");
                assert_eq!(segment[0], opcode);
                assert_eq!(RunHeader::of(&segment), Some(header));
                assert!(header.is_at(psn, &segment) && !header.is_at(psn.next(), &segment));
                // Any other bit, and it is not taken.
                let bit = rng.next_u64() as usize % (segment_len * 8);
                let mut bad = segment.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                let before = reader;
                assert_eq!(reader.take(&bad), None, "round {round}, packet {i}, bit {bit}");
                let mut careless = RunReader { checks: false, ..before };
                assert_eq!(careless.take(&bad).is_some(), bit >= 96, "only the header is looked at");
                assert_eq!(reader.take(&segment), Some(&payload[..]));
            }
        }
    }

    #[test]
    fn any_other_bit_of_the_header_ends_a_run() {
        let (_, body) = bodies()[1];
        let packet = Packet::new(Qpn::from_wire(0x1234), PKey::DEFAULT, Psn::from_wire(0x5678), body);
        let header = RunHeader::new(&packet, 64).unwrap();
        let segment = header.bytes(packet.psn);
        assert!(header.is_at(packet.psn, &segment));
        for bit in 0..96 {
            let mut other = segment;
            other[bit / 8] ^= 0x80 >> (bit % 8);
            assert!(!header.is_at(packet.psn, &other), "bit {bit}");
        }
        assert!(!header.is_at(packet.psn, &segment[..11]));
    }

    #[test]
    fn what_has_more_than_a_bth_or_wants_an_answer_is_in_no_run() {
        let (_, body) = bodies()[1];
        let packet = Packet::new(Qpn::GSI, PKey::DEFAULT, Psn::ZERO, body);
        assert!(RunHeader::new(&packet, 64).is_some());
        assert_eq!(RunHeader::new(&packet, 63), None);
        let asking = Packet { ack_req: true, ..packet };
        assert_eq!(RunHeader::new(&asking, 64), None);
        let mut bytes = [0; 12];
        asking.write_headers(64, &mut bytes).unwrap();
        assert_eq!(RunHeader::of(&bytes), None);
        let last =
            Body::Request(Request { service: Service::Rc, op: RequestOp::Write(WritePart::Last(None)), payload: &[] });
        assert_eq!(RunHeader::new(&Packet { body: last, ..packet }, 64), None);
        let aeth = Aeth { syndrome: crate::wire::Syndrome::ACK, msn: crate::types::Msn::default() };
        let first = Body::Response(Response { op: ResponseOp::ReadFirst(aeth), payload: &[] });
        assert_eq!(RunHeader::new(&Packet { body: first, ..packet }, 64), None);
        assert_eq!(RunHeader::of(&[0x07; 11]), None);
    }

    #[test]
    fn a_payload_that_fails_says_so() {
        let (_, body) = bodies()[0];
        let packet = Packet::new(Qpn::GSI, PKey::DEFAULT, Psn::ZERO, body);
        let start = IcrcStart::new(&flow(&mut Rng::from_seed([1; 32]), true), DONT_FRAGMENT, 80);
        let writer = RunWriter::new(RunHeader::new(&packet, 64).unwrap(), start);
        assert!(!writer.write(Psn::ZERO, 0, &mut [0; 80], |_, _| None));
        assert!(!writer.write(Psn::ZERO, 0, &mut [0; 15], |_, crc| Some(crc)));
    }
}
