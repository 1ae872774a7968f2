//! From bytes to a [`Packet`].
//!
//! Owns the checks that need no state: version, opcode, room for the headers, pad and payload against the opcode's
//! rule. Never looks at the pad's content or the ICRC, and knows no path MTU and no message: lengths that only those make
//! wrong are for the responder, which has to answer them with a NAK.

use thiserror::Error;

use super::aeth::{Aeth, Syndrome};
use super::opcode::{Opcode, Operation, Support};
use super::packet::{
    AtomicEth, Body, Datagram, Feth, Packet, Place, Request, RequestOp, Response, ResponseOp, Reth, SendTail, Service,
    WritePart,
};
use crate::types::{Imm, Msn, PKey, Psn, QKey, Qpn, Rkey};

/// The longest message, 2^31 bytes (IBTA Vol 1 chapter 9).
pub const MAX_MESSAGE_LEN: u32 = 1 << 31;

/// Bytes of the BTH.
pub(super) const BTH: usize = 12;

/// Bytes of the ICRC.
pub(super) const ICRC_LEN: usize = 4;

/// Why bytes are no packet that this stack serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum ParseError {
    /// It ends before its headers and the ICRC do.
    #[error("{have} bytes, where headers and ICRC take {need}")]
    TooShort {
        /// Bytes that are there.
        have: usize,
        /// Bytes that must be there at least.
        need: usize,
    },
    /// TVer is not 0.
    #[error("transport version {0}")]
    BadTransportVersion(u8),
    /// A reserved or vendor-specific opcode.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// RD or XRC.
    #[error("{0} is not supported")]
    Unsupported(Opcode),
    /// PadCnt exceeds the payload, leaves it off a 4-byte boundary, or stands where no pad may be.
    #[error("pad count {pad} with {available} bytes of payload and pad")]
    BadPad {
        /// PadCnt.
        pad: u8,
        /// Bytes between headers and ICRC.
        available: usize,
    },
    /// The opcode does not allow a payload of this length.
    #[error("{opcode} with {payload} bytes of payload")]
    BadLength {
        /// The opcode.
        opcode: Opcode,
        /// Payload bytes without pad.
        payload: usize,
    },
}

impl<'a> Packet<'a> {
    /// Parses a segment: BTH, extended headers, payload, pad and ICRC.
    ///
    /// Ignored, as the specification asks: the reserved byte of the DETH, the reserved bits of the FETH, the 16 bytes of
    /// a CNP.
    ///
    /// # Errors
    ///
    /// [`ParseError`] names the first rule that is broken, in the order of the checks: length of the BTH, version, opcode,
    /// length of all headers and the ICRC, pad, payload.
    pub fn parse(segment: &'a [u8]) -> Result<Self, ParseError> {
        let mut r = Reader { rest: segment, len: segment.len() };
        let bth: [u8; BTH] = r.take()?;
        let [opcode, flags, pkey_hi, pkey_lo, marks, qp @ .., ack, psn_hi, psn_mid, psn_lo] = bth;
        if flags & 0x0F != 0 {
            return Err(ParseError::BadTransportVersion(flags & 0x0F));
        }
        let opcode = Opcode::new(opcode);
        let op = match (opcode.support(), opcode.operation()) {
            (Support::Served, Some(op)) => op,
            (Support::Refused, _) => return Err(ParseError::Unsupported(opcode)),
            _ => return Err(ParseError::UnknownOpcode(opcode.get())),
        };
        let payload = payload(segment, opcode, flags >> 4 & 3)?;
        let [qp_hi, qp_mid, qp_lo] = qp;
        Ok(Self {
            dest_qp: Qpn::from_wire(u32::from_be_bytes([0, qp_hi, qp_mid, qp_lo])),
            pkey: PKey::new(u16::from_be_bytes([pkey_hi, pkey_lo])),
            psn: Psn::from_wire(u32::from_be_bytes([0, psn_hi, psn_mid, psn_lo])),
            solicited: flags & 0x80 != 0,
            mig_req: flags & 0x40 != 0,
            ack_req: ack & 0x80 != 0,
            fecn: marks & 0x80 != 0,
            becn: marks & 0x40 != 0,
            reserved: (marks & 0x3F, ack & 0x7F),
            body: body(opcode, op, &mut r, payload)?,
        })
    }
}

/// The payload without pad, if headers, pad and ICRC fit around it and the opcode allows it.
#[inline]
fn payload(segment: &[u8], opcode: Opcode, pad: u8) -> Result<&[u8], ParseError> {
    let header_len = opcode.header_len();
    let need = header_len + ICRC_LEN;
    let have = segment.len();
    let padded = have.checked_sub(need).ok_or(ParseError::TooShort { have, need })?;
    let bad_pad = ParseError::BadPad { pad, available: padded };
    if !padded.is_multiple_of(4) {
        return Err(bad_pad);
    }
    let len = padded.checked_sub(usize::from(pad)).ok_or(bad_pad)?;
    if !opcode.payload().frames(len) {
        return Err(ParseError::BadLength { opcode, payload: len });
    }
    segment.get(header_len..header_len + len).ok_or(ParseError::TooShort { have, need })
}

#[inline]
fn body<'a>(opcode: Opcode, op: Operation, r: &mut Reader<'_>, payload: &'a [u8]) -> Result<Body<'a>, ParseError> {
    let service = match opcode.get() >> 5 {
        0 => Service::Rc,
        1 => Service::Uc,
        3 => {
            let (qkey, src_qp) = r.deth()?;
            let imm = if op == Operation::SendOnlyImm { Some(r.imm()?) } else { None };
            return Ok(Body::Datagram(Datagram { qkey, src_qp, imm, payload }));
        }
        _ => return Ok(Body::Cnp),
    };
    let request = |op| Ok(Body::Request(Request { service, op, payload }));
    let response = |op| Ok(Body::Response(Response { op, payload }));
    match op {
        Operation::SendFirst => request(RequestOp::Send(Place::First, SendTail::None)),
        Operation::SendMiddle => request(RequestOp::Send(Place::Middle, SendTail::None)),
        Operation::SendLast => request(RequestOp::Send(Place::Last, SendTail::None)),
        Operation::SendLastImm => request(RequestOp::Send(Place::Last, SendTail::Imm(r.imm()?))),
        Operation::SendOnly => request(RequestOp::Send(Place::Only, SendTail::None)),
        Operation::SendOnlyImm => request(RequestOp::Send(Place::Only, SendTail::Imm(r.imm()?))),
        Operation::SendLastInvalidate => request(RequestOp::Send(Place::Last, SendTail::Invalidate(r.rkey()?))),
        Operation::SendOnlyInvalidate => request(RequestOp::Send(Place::Only, SendTail::Invalidate(r.rkey()?))),
        Operation::WriteFirst => request(RequestOp::Write(WritePart::First(r.reth()?))),
        Operation::WriteMiddle => request(RequestOp::Write(WritePart::Middle)),
        Operation::WriteLast => request(RequestOp::Write(WritePart::Last(None))),
        Operation::WriteLastImm => request(RequestOp::Write(WritePart::Last(Some(r.imm()?)))),
        Operation::WriteOnly => request(RequestOp::Write(WritePart::Only(r.reth()?, None))),
        Operation::WriteOnlyImm => {
            let reth = r.reth()?;
            request(RequestOp::Write(WritePart::Only(reth, Some(r.imm()?))))
        }
        Operation::ReadRequest => request(RequestOp::Read(r.reth()?)),
        Operation::CompareSwap => request(RequestOp::CompareSwap(r.atomic_eth()?)),
        Operation::FetchAdd => request(RequestOp::FetchAdd(r.atomic_eth()?)),
        Operation::ReadResponseFirst => response(ResponseOp::ReadFirst(r.aeth()?)),
        Operation::ReadResponseMiddle => response(ResponseOp::ReadMiddle),
        Operation::ReadResponseLast => response(ResponseOp::ReadLast(r.aeth()?)),
        Operation::ReadResponseOnly => response(ResponseOp::ReadOnly(r.aeth()?)),
        Operation::Acknowledge => response(ResponseOp::Acknowledge(r.aeth()?)),
        Operation::AtomicAcknowledge => {
            let aeth = r.aeth()?;
            response(ResponseOp::AtomicAcknowledge(aeth, u64::from_be_bytes(r.take()?)))
        }
        Operation::Cnp => Ok(Body::Cnp),
        Operation::Flush => {
            let feth = r.feth()?;
            request(RequestOp::Flush(feth, r.reth()?))
        }
        Operation::AtomicWrite => request(RequestOp::AtomicWrite(r.reth()?)),
        Operation::Resync => Err(ParseError::Unsupported(opcode)),
    }
}

/// Takes headers from the front. That they fit has been checked; a mistake here is an error all the same, not a panic.
struct Reader<'a> {
    rest: &'a [u8],
    len: usize,
}

impl Reader<'_> {
    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        match self.rest.split_first_chunk::<N>() {
            Some((chunk, rest)) => {
                self.rest = rest;
                Ok(*chunk)
            }
            None => {
                let need = self.len - self.rest.len() + N + ICRC_LEN;
                Err(ParseError::TooShort { have: self.len, need })
            }
        }
    }

    fn u32(&mut self) -> Result<u32, ParseError> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, ParseError> {
        self.take().map(u64::from_be_bytes)
    }

    fn imm(&mut self) -> Result<Imm, ParseError> {
        self.u32().map(Imm::new)
    }

    fn rkey(&mut self) -> Result<Rkey, ParseError> {
        self.u32().map(Rkey::new)
    }

    fn reth(&mut self) -> Result<Reth, ParseError> {
        Ok(Reth { addr: self.u64()?, rkey: self.rkey()?, length: self.u32()? })
    }

    fn feth(&mut self) -> Result<Feth, ParseError> {
        let [_, _, _, bits] = self.take()?;
        Ok(Feth { placement: bits & 0xF, scope: bits >> 4 & 3 })
    }

    fn atomic_eth(&mut self) -> Result<AtomicEth, ParseError> {
        Ok(AtomicEth { addr: self.u64()?, rkey: self.rkey()?, swap_add: self.u64()?, compare: self.u64()? })
    }

    fn aeth(&mut self) -> Result<Aeth, ParseError> {
        let [syndrome, msn @ ..] = self.take::<4>()?;
        let [hi, mid, lo] = msn;
        Ok(Aeth { syndrome: Syndrome::from_wire(syndrome), msn: Msn::from_wire(u32::from_be_bytes([0, hi, mid, lo])) })
    }

    fn deth(&mut self) -> Result<(QKey, Qpn), ParseError> {
        Ok((QKey::new(self.u32()?), Qpn::from_wire(self.u32()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{icrc, outer, segment_len};
    use uroce_fixtures::vectors::{V1_IPV4_SEND_ONLY, V2_IPV4_ACK, V3_IPV6_WRITE_ONLY, V4_IPV4_CNP, VECTORS};

    /// A segment of zeros with these first bytes.
    fn segment(opcode: u8, pad: u8, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (to, from) in bytes.iter_mut().zip([opcode, pad << 4]) {
            *to = from;
        }
        bytes
    }

    fn vector(packet: &[u8]) -> Packet<'_> {
        Packet::parse(outer::parse_ip(packet).unwrap().payload).unwrap()
    }

    #[test]
    fn vectors_say_what_they_say() {
        let v1 = vector(V1_IPV4_SEND_ONLY);
        assert_eq!((v1.dest_qp.get(), v1.psn.get(), v1.pkey), (0x11, 0xFF_FFFE, PKey::DEFAULT));
        assert!(v1.mig_req && v1.ack_req && !v1.solicited && !v1.fecn && !v1.becn);
        let op = RequestOp::Send(Place::Only, SendTail::None);
        assert_eq!(v1.body, Body::Request(Request { service: Service::Rc, op, payload: b"abc" }));

        let v2 = vector(V2_IPV4_ACK);
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: Msn::from_wire(1) };
        assert_eq!(v2.body, Body::Response(Response { op: ResponseOp::Acknowledge(aeth), payload: &[] }));

        let v3 = vector(V3_IPV6_WRITE_ONLY);
        let reth = Reth { addr: 0x1000, rkey: Rkey::new(0x55), length: 4 };
        let op = RequestOp::Write(WritePart::Only(reth, None));
        let payload = &[0xDE, 0xAD, 0xBE, 0xEF];
        assert_eq!(v3.body, Body::Request(Request { service: Service::Rc, op, payload }));

        let v4 = vector(V4_IPV4_CNP);
        assert_eq!(v4, Packet::cnp(Qpn::new(0xD2).unwrap()));
    }

    #[test]
    fn vectors_are_made_again() {
        for (name, packet) in VECTORS {
            let outer = outer::parse_ip(packet).unwrap();
            let parsed = Packet::parse(outer.payload).unwrap();
            assert_eq!(emitted(&parsed, &outer.flow, outer.ip), outer.payload, "{name}");
        }
    }

    /// Headers, payload, pad and ICRC of a packet.
    fn emitted(packet: &Packet<'_>, flow: &super::super::Flow, ip: super::super::IpFields) -> Vec<u8> {
        let payload = packet.payload();
        let mut bytes = vec![0xEE; segment_len(packet.header_len(), payload.len())];
        let headers = packet.write_headers(payload.len(), &mut bytes).unwrap();
        assert_eq!(headers, packet.header_len());
        bytes[headers..headers + payload.len()].copy_from_slice(payload);
        icrc::seal(flow, ip, &mut bytes, headers + payload.len());
        bytes
    }

    #[test]
    fn each_refusal_has_its_name() {
        let of = |opcode, pad, len| Packet::parse(&segment(opcode, pad, len)).unwrap_err();
        assert_eq!(of(0x04, 0, 11), ParseError::TooShort { have: 11, need: 16 });
        assert_eq!(of(0x04, 0, 15), ParseError::TooShort { have: 15, need: 16 });
        assert_eq!(of(0x0A, 0, 31), ParseError::TooShort { have: 31, need: 32 });
        assert_eq!(of(0x15, 0, 64), ParseError::UnknownOpcode(0x15));
        assert_eq!(of(0xFF, 0, 40), ParseError::UnknownOpcode(0xFF));
        for refused in [0x44, 0xA4, 0xBC, 0xBD] {
            assert_eq!(of(refused, 0, 64), ParseError::Unsupported(Opcode::new(refused)));
        }
        // A pad without payload, one that is longer than the payload, and lengths that are no multiple of 4.
        assert_eq!(of(0x04, 1, 16), ParseError::BadPad { pad: 1, available: 0 });
        assert_eq!(of(0x04, 0, 17), ParseError::BadPad { pad: 0, available: 1 });
        // READ requests, ACKs and atomics have no payload.
        assert_eq!(of(0x0C, 0, 36), ParseError::BadLength { opcode: Opcode::new(0x0C), payload: 4 });
        assert_eq!(of(0x11, 3, 24), ParseError::BadLength { opcode: Opcode::new(0x11), payload: 1 });
        assert_eq!(of(0x81, 0, 28), ParseError::TooShort { have: 28, need: 32 });
        assert_eq!(of(0x81, 0, 36), ParseError::BadLength { opcode: Opcode::CNP, payload: 4 });
        let mut version = segment(0x04, 0, 16);
        version[1] = 0x03;
        assert_eq!(Packet::parse(&version), Err(ParseError::BadTransportVersion(3)));
    }

    #[test]
    fn what_only_the_responder_can_refuse_is_parsed() {
        // A First with a pad, an empty Middle, an empty Last: no path MTU and no message has them.
        for (opcode, pad, len) in [(0x00, 1, 16 + 256), (0x01, 0, 16), (0x02, 0, 16), (0x0D, 1, 24)] {
            assert!(Packet::parse(&segment(opcode, pad, len)).is_ok(), "{opcode:#04x}");
        }
        let mut long = segment(0x0C, 0, 32);
        long[24..28].copy_from_slice(&u32::MAX.to_be_bytes());
        let reth = Reth { addr: 0, rkey: Rkey::new(0), length: u32::MAX };
        let request = Request { service: Service::Rc, op: RequestOp::Read(reth), payload: &[] };
        assert_eq!(Packet::parse(&long).map(|p| p.body), Ok(Body::Request(request)));
    }

    #[test]
    fn a_body_that_the_wire_has_not_is_not_written() {
        let mut out = [0; 64];
        let mut write = |service, op, payload: usize| {
            let body = Body::Request(Request { service, op, payload: &[] });
            Packet::new(Qpn::GSI, PKey::DEFAULT, Psn::from_wire(0), body).write_headers(payload, &mut out)
        };
        let reth = Reth { addr: 0, rkey: Rkey::new(0), length: 0 };
        assert_eq!(write(Service::Rc, RequestOp::Read(reth), 0), Some(28));
        assert_eq!(write(Service::Rc, RequestOp::Read(reth), 4), None);
        assert_eq!(write(Service::Uc, RequestOp::Read(reth), 0), None);
        let imm = SendTail::Imm(Imm::new(7));
        assert_eq!(write(Service::Uc, RequestOp::Send(Place::Last, imm), 5), Some(16));
        assert_eq!(write(Service::Uc, RequestOp::Send(Place::Middle, imm), 256), None);
        let invalidate = SendTail::Invalidate(Rkey::new(1));
        assert_eq!(write(Service::Rc, RequestOp::Send(Place::Only, invalidate), 0), Some(16));
        assert_eq!(write(Service::Uc, RequestOp::Send(Place::Only, invalidate), 0), None);
        assert_eq!(Packet::cnp(Qpn::GSI).write_headers(0, &mut [0; 27]), None);
    }
}
