//! From a [`Packet`] to bytes.
//!
//! Owns the choice of the opcode and the writing of BTH and extended headers. Never copies payload (it goes from a
//! region straight into the frame) and never computes the ICRC.

use super::aeth::Aeth;
use super::opcode::{Opcode, Operation, Support};
use super::packet::{
    AtomicEth, Body, Datagram, Packet, Place, RequestOp, ResponseOp, Reth, SendTail, Service, WritePart,
};
use super::parse::ICRC_LEN;
use crate::types::{PKey, Psn, Qpn};

/// Bytes from BTH to ICRC of a packet with `header_len` bytes of headers: payload, pad and ICRC added.
#[must_use]
pub const fn segment_len(header_len: usize, payload_len: usize) -> usize {
    header_len + payload_len.next_multiple_of(4) + ICRC_LEN
}

impl<'a> Packet<'a> {
    /// A packet with the flags that are usual: M set (hardware sends it, and some refuses 0), all else clear.
    #[must_use]
    pub const fn new(dest_qp: Qpn, pkey: PKey, psn: Psn, body: Body<'a>) -> Self {
        Self {
            dest_qp,
            pkey,
            psn,
            solicited: false,
            mig_req: true,
            ack_req: false,
            fecn: false,
            becn: false,
            reserved: (0, 0),
            body,
        }
    }

    /// The congestion notification packet for the QP `dest_qp` (IBTA annex A17): BECN set, M clear, PSN 0.
    #[must_use]
    pub const fn cnp(dest_qp: Qpn) -> Packet<'static> {
        let mut packet = Packet::new(dest_qp, PKey::DEFAULT, Psn::from_wire(0), Body::Cnp);
        packet.mig_req = false;
        packet.becn = true;
        packet
    }

    /// The opcode of the body. A body that the table does not have (a READ over UC, an immediate before the last
    /// packet) yields the nearest value; [`Packet::write_headers`] refuses to write such a body.
    #[must_use]
    pub fn opcode(&self) -> u8 {
        let (class, op) = match &self.body {
            Body::Request(request) => match request.service {
                Service::Rc => (0x00, request_operation(&request.op)),
                Service::Uc => (0x20, request_operation(&request.op)),
            },
            Body::Response(response) => (0x00, response_operation(&response.op)),
            Body::Datagram(Datagram { imm: None, .. }) => (0x60, Operation::SendOnly),
            Body::Datagram(Datagram { imm: Some(_), .. }) => (0x60, Operation::SendOnlyImm),
            Body::Cnp => return Opcode::CNP.get(),
        };
        class | op as u8
    }

    /// Bytes of BTH and extended headers.
    #[must_use]
    pub fn header_len(&self) -> usize {
        Opcode::new(self.opcode()).header_len()
    }

    /// Payload without pad; empty where the opcode has none.
    #[must_use]
    pub const fn payload(&self) -> &'a [u8] {
        match &self.body {
            Body::Request(request) => request.payload,
            Body::Response(response) => response.payload,
            Body::Datagram(datagram) => datagram.payload,
            Body::Cnp => &[],
        }
    }

    /// Writes BTH and extended headers for a payload of `payload_len` bytes to the front of `out`; returns their length.
    /// The payload in `self` is not looked at: the caller puts the bytes after the headers, and [`super::seal`] ends
    /// the packet.
    ///
    /// `None` if `out` is too short, if the opcode has no payload and `payload_len` is not 0, or if the body is none that the wire has (a READ over UC, an immediate before the last packet).
    #[must_use]
    pub fn write_headers(&self, payload_len: usize, out: &mut [u8]) -> Option<usize> {
        let opcode = Opcode::new(self.opcode());
        if opcode.support() != Support::Served || !opcode.payload().frames(payload_len) || !self.is_consistent() {
            return None;
        }
        let header_len = opcode.header_len();
        let mut w = Writer { rest: out.get_mut(..header_len)? };
        let (front, back) = self.bth(opcode, payload_len);
        // Two stores, which a reader of the header finds as they are before they have reached the cache.
        w.put(front.to_be_bytes())?;
        w.put(back.to_be_bytes())?;
        match &self.body {
            Body::Request(request) => match &request.op {
                RequestOp::Send(_, SendTail::None) => {}
                RequestOp::Send(_, SendTail::Imm(imm)) => w.put(imm.get().to_be_bytes())?,
                RequestOp::Send(_, SendTail::Invalidate(rkey)) => w.put(rkey.get().to_be_bytes())?,
                RequestOp::Write(part) => w.write_part(part)?,
                RequestOp::Read(reth) => w.reth(reth)?,
                RequestOp::CompareSwap(eth) | RequestOp::FetchAdd(eth) => w.atomic_eth(eth)?,
                RequestOp::Flush(feth, reth) => {
                    w.put([0, 0, 0, (feth.scope & 3) << 4 | (feth.placement & 0xF)])?;
                    w.reth(reth)?;
                }
                RequestOp::AtomicWrite(reth) => w.reth(reth)?,
            },
            Body::Response(response) => w.response(&response.op)?,
            Body::Datagram(datagram) => {
                w.put(datagram.qkey.get().to_be_bytes())?;
                w.put(datagram.src_qp.get().to_be_bytes())?;
                if let Some(imm) = datagram.imm {
                    w.put(imm.get().to_be_bytes())?;
                }
            }
            Body::Cnp => w.put([0; 16])?,
        }
        debug_assert!(w.rest.is_empty(), "the table and the writer disagree on {opcode}");
        Some(header_len)
    }

    /// Whether tail and place of a SEND fit each other.
    const fn is_consistent(&self) -> bool {
        match &self.body {
            Body::Request(request) => match &request.op {
                RequestOp::Send(place, SendTail::Imm(_) | SendTail::Invalidate(_)) => place.ends(),
                _ => true,
            },
            _ => true,
        }
    }

    /// The BTH: its first eight bytes and its last four, the first byte of each in the highest place.
    fn bth(&self, opcode: Opcode, payload_len: usize) -> (u64, u32) {
        let bit = |set: bool, at: u8| u8::from(set) << at;
        #[allow(clippy::cast_possible_truncation)] // Two bits.
        let pad = (payload_len.wrapping_neg() & 3) as u8;
        let flags = bit(self.solicited, 7) | bit(self.mig_req, 6) | pad << 4;
        let marks = bit(self.fecn, 7) | bit(self.becn, 6) | self.reserved.0 & 0x3F;
        let ack = bit(self.ack_req, 7) | self.reserved.1 & 0x7F;
        let pkey = u64::from(self.pkey.get()) << 32;
        let kind = u64::from(opcode.get()) << 56 | u64::from(flags) << 48;
        let to = u64::from(marks) << 24 | u64::from(self.dest_qp.get() & 0xFF_FFFF);
        (kind | pkey | to, u32::from(ack) << 24 | self.psn.get() & 0xFF_FFFF)
    }
}

fn request_operation(op: &RequestOp) -> Operation {
    match op {
        RequestOp::Send(place, tail) => match (place, tail) {
            (Place::First, _) => Operation::SendFirst,
            (Place::Middle, _) => Operation::SendMiddle,
            (Place::Last, SendTail::None) => Operation::SendLast,
            (Place::Last, SendTail::Imm(_)) => Operation::SendLastImm,
            (Place::Last, SendTail::Invalidate(_)) => Operation::SendLastInvalidate,
            (Place::Only, SendTail::None) => Operation::SendOnly,
            (Place::Only, SendTail::Imm(_)) => Operation::SendOnlyImm,
            (Place::Only, SendTail::Invalidate(_)) => Operation::SendOnlyInvalidate,
        },
        RequestOp::Write(part) => match part {
            WritePart::First(_) => Operation::WriteFirst,
            WritePart::Middle => Operation::WriteMiddle,
            WritePart::Last(None) => Operation::WriteLast,
            WritePart::Last(Some(_)) => Operation::WriteLastImm,
            WritePart::Only(_, None) => Operation::WriteOnly,
            WritePart::Only(_, Some(_)) => Operation::WriteOnlyImm,
        },
        RequestOp::Read(_) => Operation::ReadRequest,
        RequestOp::CompareSwap(_) => Operation::CompareSwap,
        RequestOp::FetchAdd(_) => Operation::FetchAdd,
        RequestOp::Flush(..) => Operation::Flush,
        RequestOp::AtomicWrite(_) => Operation::AtomicWrite,
    }
}

fn response_operation(op: &ResponseOp) -> Operation {
    match op {
        ResponseOp::ReadFirst(_) => Operation::ReadResponseFirst,
        ResponseOp::ReadMiddle => Operation::ReadResponseMiddle,
        ResponseOp::ReadLast(_) => Operation::ReadResponseLast,
        ResponseOp::ReadOnly(_) => Operation::ReadResponseOnly,
        ResponseOp::Acknowledge(_) => Operation::Acknowledge,
        ResponseOp::AtomicAcknowledge(..) => Operation::AtomicAcknowledge,
    }
}

/// Fills a slice from the front. `None` where it does not fit, which the length taken from the table rules out.
struct Writer<'a> {
    rest: &'a mut [u8],
}

impl Writer<'_> {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) -> Option<()> {
        let (chunk, rest) = core::mem::take(&mut self.rest).split_first_chunk_mut::<N>()?;
        *chunk = bytes;
        self.rest = rest;
        Some(())
    }

    fn write_part(&mut self, part: &WritePart) -> Option<()> {
        if let WritePart::First(reth) | WritePart::Only(reth, _) = part {
            self.reth(reth)?;
        }
        match part.imm() {
            Some(imm) => self.put(imm.get().to_be_bytes()),
            None => Some(()),
        }
    }

    fn reth(&mut self, reth: &Reth) -> Option<()> {
        self.put(reth.addr.to_be_bytes())?;
        self.put(reth.rkey.get().to_be_bytes())?;
        self.put(reth.length.to_be_bytes())
    }

    fn atomic_eth(&mut self, eth: &AtomicEth) -> Option<()> {
        self.put(eth.addr.to_be_bytes())?;
        self.put(eth.rkey.get().to_be_bytes())?;
        self.put(eth.swap_add.to_be_bytes())?;
        self.put(eth.compare.to_be_bytes())
    }

    fn aeth(&mut self, aeth: &Aeth) -> Option<()> {
        let [_, hi, mid, lo] = aeth.msn.get().to_be_bytes();
        self.put([aeth.syndrome.to_wire(), hi, mid, lo])
    }

    fn response(&mut self, op: &ResponseOp) -> Option<()> {
        match op {
            ResponseOp::ReadMiddle => Some(()),
            ResponseOp::ReadFirst(aeth) | ResponseOp::ReadLast(aeth) => self.aeth(aeth),
            ResponseOp::ReadOnly(aeth) | ResponseOp::Acknowledge(aeth) => self.aeth(aeth),
            ResponseOp::AtomicAcknowledge(aeth, original) => {
                self.aeth(aeth)?;
                self.put(original.to_be_bytes())
            }
        }
    }
}
