//! Reading packets for the reference: offsets of IBTA Vol 1 chapter 9, and none of the code under test.

use std::net::IpAddr;

use uroce::wire::Flow;
use uroce_fixtures::reference_icrc;

/// A PSN; the distance is signed, modulo 2^24.
pub(super) type Psn = u32;

/// Where `a` stands from `b` on.
pub(super) fn distance(a: Psn, b: Psn) -> i32 {
    let d = i64::from(a) - i64::from(b);
    let wrapped = (d + (1 << 23)).rem_euclid(1 << 24) - (1 << 23);
    i32::try_from(wrapped).unwrap()
}

pub(super) fn plus(psn: Psn, n: u32) -> Psn {
    (psn + n) % (1 << 24)
}

/// A READ request's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reth {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    pub(super) length: u32,
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// SEND or WRITE: it begins a message, ends it, takes a receive, is a WRITE.
    Data {
        begins: bool,
        ends: bool,
        takes_receive: bool,
        write: bool,
    },
    Read(Reth),
    Atomic,
    AtomicWrite,
    Flush,
    /// READ data; also the answer to an ATOMIC WRITE and a FLUSH.
    ReadData,
    AtomicResult,
    Ack,
    RnrNak(u8),
    SequenceNak,
    OtherNak,
}

impl Kind {
    pub(super) const fn is_request(self) -> bool {
        matches!(self, Self::Data { .. } | Self::Read(_) | Self::Atomic | Self::AtomicWrite | Self::Flush)
    }
}

/// A packet of a connected QP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) qpn: u32,
    pub(super) psn: Psn,
    pub(super) ack_req: bool,
    /// A positive answer that says how many receives there are.
    pub(super) has_credits: bool,
    pub(super) kind: Kind,
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    Malformed,
    Unsupported,
}

fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Bytes behind the BTH that an opcode has, and whether a payload may follow. `None`: the opcode is no one's.
fn layout(opcode: u8) -> Option<(usize, bool)> {
    let low = opcode & 0x1F;
    let rc = match low {
        0x00..=0x02 | 0x04 | 0x07 | 0x08 | 0x0E => (0, true),
        0x03 | 0x05 | 0x09 | 0x16 | 0x17 => (4, true),
        0x06 | 0x0A => (16, true),
        0x0B => (20, true),
        0x0C => (16, false),
        0x0D | 0x0F | 0x10 => (4, true),
        0x11 => (4, false),
        0x12 => (12, false),
        0x13 | 0x14 => (28, false),
        _ => (usize::MAX, false),
    };
    match opcode >> 5 {
        0 if rc.0 != usize::MAX => Some(rc),
        0 if low == 0x1C => Some((20, false)),
        0 if low == 0x1D => Some((16, true)),
        1 if low <= 0x0B => Some(rc),
        3 if low == 0x04 => Some((8, true)),
        3 if low == 0x05 => Some((12, true)),
        4 if low == 0x01 => Some((16, false)),
        _ => None,
    }
}

/// Operations that exist and are not served: RD with its RESYNC, and XRC.
fn is_refused(opcode: u8) -> bool {
    let low = opcode & 0x1F;
    match opcode >> 5 {
        2 => low <= 0x15,
        5 => low <= 0x14 || matches!(low, 0x16 | 0x17 | 0x1C | 0x1D),
        _ => false,
    }
}

/// Reads a packet, or says why it is none.
pub(super) fn read(bytes: &[u8]) -> Result<Head, Bad> {
    if bytes.len() < 12 || bytes[1] & 0x0F != 0 {
        return Err(Bad::Malformed);
    }
    let opcode = bytes[0];
    if is_refused(opcode) {
        return Err(Bad::Unsupported);
    }
    let (more, has_payload) = layout(opcode).ok_or(Bad::Malformed)?;
    let pad = usize::from(bytes[1] >> 4 & 3);
    let inner = bytes.len().checked_sub(12 + more + 4).ok_or(Bad::Malformed)?;
    if inner % 4 != 0 || inner < pad || !has_payload && inner != pad {
        return Err(Bad::Malformed);
    }
    let ext = &bytes[12..12 + more];
    let kind = match opcode & 0x1F {
        low @ (0x00..=0x05 | 0x16 | 0x17) => Kind::Data {
            begins: matches!(low, 0x00 | 0x04 | 0x05 | 0x17),
            ends: !matches!(low, 0x00 | 0x01),
            takes_receive: true,
            write: false,
        },
        low @ 0x06..=0x0B => Kind::Data {
            begins: matches!(low, 0x06 | 0x0A | 0x0B),
            ends: !matches!(low, 0x06 | 0x07),
            takes_receive: matches!(low, 0x09 | 0x0B),
            write: true,
        },
        0x0C => Kind::Read(Reth {
            addr: be(&ext[..8]),
            rkey: u32::try_from(be(&ext[8..12])).unwrap(),
            length: u32::try_from(be(&ext[12..])).unwrap(),
        }),
        0x0D..=0x10 => Kind::ReadData,
        0x11 => match ext[0] >> 5 {
            0 => Kind::Ack,
            1 => Kind::RnrNak(ext[0] & 0x1F),
            3 if ext[0] & 0x1F == 0 => Kind::SequenceNak,
            _ => Kind::OtherNak,
        },
        0x12 => Kind::AtomicResult,
        0x1C => Kind::Flush,
        0x1D => Kind::AtomicWrite,
        _ => Kind::Atomic,
    };
    let number = |at: usize| u32::try_from(be(&bytes[at..at + 3])).unwrap();
    // Syndrome 000ccccc; ccccc of all ones says that credits are not used.
    let has_aeth = matches!(opcode, 0x0D | 0x0F..=0x12);
    let has_credits = has_aeth && ext[0] < 0x1F;
    Ok(Head { qpn: number(5), psn: number(9), ack_req: bytes[8] & 0x80 != 0, has_credits, kind })
}

/// Whether the ICRC of a packet is right, computed bit by bit over rebuilt outer headers.
pub(super) fn is_intact(flow: &Flow, id: u16, bytes: &[u8]) -> bool {
    let udp_len = u16::try_from(8 + bytes.len()).unwrap();
    let mut packet = Vec::new();
    match (flow.src, flow.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            packet.extend([0x45, 0]);
            packet.extend((20 + udp_len).to_be_bytes());
            packet.extend(id.to_be_bytes());
            // Do not fragment; 64 hops; UDP; a checksum that does not matter.
            packet.extend([0x40, 0, 64, 17, 0, 0]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(udp_len.to_be_bytes());
            packet.extend([17, 64]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
        _ => return false,
    }
    packet.extend(flow.src_port.to_be_bytes());
    packet.extend(4791u16.to_be_bytes());
    packet.extend(udp_len.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(bytes);
    bytes.ends_with(&reference_icrc(&packet))
}
