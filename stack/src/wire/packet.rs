//! The parsed packet: its body says who consumes it.

use super::aeth::Aeth;
use crate::types::{Imm, PKey, Psn, QKey, Qpn, Rkey};

/// A well-formed RoCEv2 packet from BTH to the last payload byte. Its headers are exactly those of its opcode, its
/// lengths fit, its payload has no pad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Destination QP.
    pub dest_qp: Qpn,
    /// Partition.
    pub pkey: PKey,
    /// Sequence number.
    pub psn: Psn,
    /// SE bit.
    pub solicited: bool,
    /// M bit: the path is the migrated one. We send 1.
    pub mig_req: bool,
    /// A bit: the requester wants an answer.
    pub ack_req: bool,
    /// Forward congestion mark.
    pub fecn: bool,
    /// Backward congestion mark.
    pub becn: bool,
    /// Reserved bits, kept so that a packet can be made again byte for byte: the 6 of byte 4 and the 7 of byte 8.
    pub reserved: (u8, u8),
    /// What it is.
    pub body: Body<'a>,
}

/// Who consumes the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// For a connected responder.
    Request(Request<'a>),
    /// For a connected requester.
    Response(Response<'a>),
    /// For a UD QP.
    Datagram(Datagram<'a>),
    /// Congestion notification.
    Cnp,
}

/// Connected service of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable.
    Rc,
    /// Unreliable.
    Uc,
}

/// Place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// More follow; the payload is exactly the path MTU.
    First,
    /// In between; the payload is exactly the path MTU.
    Middle,
    /// The end; 1 byte up to the path MTU.
    Last,
    /// The whole message; 0 bytes up to the path MTU.
    Only,
}

impl Place {
    /// Whether a message begins here.
    #[must_use]
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends here.
    #[must_use]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// RDMA extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Remote address.
    pub addr: u64,
    /// Remote key.
    pub rkey: Rkey,
    /// Bytes of the whole message, at most 2^31: the responder refuses more.
    pub length: u32,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// Remote address.
    pub addr: u64,
    /// Remote key.
    pub rkey: Rkey,
    /// Swapped in, or added.
    pub swap_add: u64,
    /// Compared; 0 for fetch and add.
    pub compare: u64,
}

/// FLUSH extended transport header, as it came: what its two fields may be, the responder checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Feth {
    /// Placement type, 4 bits: 1 is global visibility, 2 persistence.
    pub placement: u8,
    /// Selectivity level, 2 bits: 0 is the range, 1 the whole region.
    pub scope: u8,
}

/// What the last packet of a SEND carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum SendTail {
    /// Nothing (also First and Middle).
    #[default]
    None,
    /// Immediate data.
    Imm(Imm),
    /// A key to invalidate (RC only).
    Invalidate(Rkey),
}

/// Place of a WRITE packet, with the header that only its beginning has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WritePart {
    /// Begins a longer message.
    First(Reth),
    /// In between.
    Middle,
    /// Ends it, perhaps with immediate data.
    Last(Option<Imm>),
    /// The whole message.
    Only(Reth, Option<Imm>),
}

impl WritePart {
    /// The place alone.
    #[must_use]
    pub const fn place(&self) -> Place {
        match self {
            Self::First(_) => Place::First,
            Self::Middle => Place::Middle,
            Self::Last(_) => Place::Last,
            Self::Only(..) => Place::Only,
        }
    }

    /// The immediate, if this packet carries one.
    #[must_use]
    pub const fn imm(&self) -> Option<Imm> {
        match self {
            Self::Last(imm) | Self::Only(_, imm) => *imm,
            Self::First(_) | Self::Middle => None,
        }
    }
}

/// A packet of a connected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Reliable or not.
    pub service: Service,
    /// Operation and place.
    pub op: RequestOp,
    /// Payload without pad; empty for READ, FLUSH and the atomics that answer with a value.
    pub payload: &'a [u8],
}

/// Operation of a request packet with its extended headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOp {
    /// SEND.
    Send(Place, SendTail),
    /// RDMA WRITE.
    Write(WritePart),
    /// RDMA READ request (RC only).
    Read(Reth),
    /// Compare and swap (RC only).
    CompareSwap(AtomicEth),
    /// Fetch and add (RC only).
    FetchAdd(AtomicEth),
    /// FLUSH (RC only).
    Flush(Feth, Reth),
    /// ATOMIC WRITE (RC only).
    AtomicWrite(Reth),
}

impl RequestOp {
    /// The place; all but SEND and WRITE are one packet.
    #[must_use]
    pub const fn place(&self) -> Place {
        match self {
            Self::Send(place, _) => *place,
            Self::Write(part) => part.place(),
            _ => Place::Only,
        }
    }

    /// Whether the responder gives an answer of its own, not just an acknowledgement.
    #[must_use]
    pub const fn awaits_response(&self) -> bool {
        !matches!(self, Self::Send(..) | Self::Write(_))
    }

    /// Bytes of the message as its RETH announces them, where the packet has one.
    #[must_use]
    pub const fn announced(&self) -> Option<u32> {
        match self {
            Self::Read(reth) | Self::Write(WritePart::First(reth) | WritePart::Only(reth, _)) => Some(reth.length),
            Self::Flush(_, reth) | Self::AtomicWrite(reth) => Some(reth.length),
            _ => None,
        }
    }
}

/// A packet of an RC response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response<'a> {
    /// Kind and headers.
    pub op: ResponseOp,
    /// READ data without pad; empty otherwise.
    pub payload: &'a [u8],
}

/// Kind of a response with its extended headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseOp {
    /// Begins READ data.
    ReadFirst(Aeth),
    /// In between; it has no AETH.
    ReadMiddle,
    /// Ends READ data.
    ReadLast(Aeth),
    /// All READ data.
    ReadOnly(Aeth),
    /// ACK or NAK.
    Acknowledge(Aeth),
    /// Result of an atomic: the value before.
    AtomicAcknowledge(Aeth, u64),
}

impl ResponseOp {
    /// The AETH, which all but the middle of READ data have.
    #[must_use]
    pub const fn aeth(&self) -> Option<Aeth> {
        match self {
            Self::ReadFirst(aeth)
            | Self::ReadLast(aeth)
            | Self::ReadOnly(aeth)
            | Self::Acknowledge(aeth)
            | Self::AtomicAcknowledge(aeth, _) => Some(*aeth),
            Self::ReadMiddle => None,
        }
    }
}

/// A UD packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Queue key.
    pub qkey: QKey,
    /// Sender's QP.
    pub src_qp: Qpn,
    /// Immediate data.
    pub imm: Option<Imm>,
    /// Payload without pad.
    pub payload: &'a [u8],
}
