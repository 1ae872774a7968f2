//! One packet, field by field, and the bytes it makes.
//!
//! Built from the header layouts of IBTA Vol 1 chapter 9, apart from the code under test: only the ICRC function is
//! shared, which its own vectors hold. Anything may be wrong on purpose.

use std::net::IpAddr;

use uroce::wire::{DONT_FRAGMENT, IpFields};

/// What the PSN counts from: of a request the PSN that the responder expects, of a response the oldest that is
/// unacknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Psn {
    /// That many after the awaited one; negative: before it.
    Awaited(i32),
    /// That many after the first of the requester's PSN space.
    First(i32),
}

/// Whose key a RETH or AtomicETH carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// That of the region with all rights.
    Good,
    /// The same with one bit flipped.
    Flipped(u8),
    /// This number.
    Raw(u32),
    /// A region with fewer rights (bits of `AccessFlags`), same address rules.
    Rights(u32),
    /// A region of another protection domain.
    OtherPd,
    /// A region that was deregistered.
    Gone,
    /// A key that its owner's peer invalidated.
    Invalidated,
    /// A fast registration: a peer may invalidate its key.
    Fast,
    /// A window of type 2 with these rights (bits of `AccessFlags`), bound on the QP.
    Window(u32),
    /// A window of type 2 bound on another QP of the domain.
    OtherQp,
    /// A window that is bound to nothing.
    Unbound,
}

/// A packet to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shot {
    pub(super) opcode: u8,
    pub(super) psn: Psn,
    /// SE, M, PadCnt and TVer; `None` computes an honest PadCnt.
    pub(super) flags: Option<u8>,
    pub(super) pkey: u16,
    /// FECN, BECN and six reserved bits.
    pub(super) marks: u8,
    /// Flipped in the QPN.
    pub(super) qpn_xor: u32,
    pub(super) qpn: Option<u32>,
    /// AckReq and seven reserved bits.
    pub(super) ack: u8,
    pub(super) key: Key,
    /// Offset in the region, wrapping.
    pub(super) at: i64,
    /// Used instead of the region's address.
    pub(super) addr: Option<u64>,
    /// Length in the RETH; `None`: that of the payload, of a First one path MTU more.
    pub(super) length: Option<u32>,
    /// Selectivity and placement of a FLUSH, as they stand in the last byte of its header.
    pub(super) feth: u8,
    pub(super) syndrome: u8,
    pub(super) qkey: u32,
    pub(super) payload: usize,
    /// Bytes of the whole segment, ICRC included: cut there, or filled with zeros.
    pub(super) total: Option<usize>,
    /// Flipped in the finished segment: byte counted from the front (negative: from the end) and mask.
    pub(super) flip: Option<(isize, u8)>,
    pub(super) src: Option<IpAddr>,
    pub(super) dst: Option<IpAddr>,
}

/// Bytes of a payload byte.
pub(super) const FILL: u8 = 0xEE;

impl Shot {
    /// An honest packet of this opcode at the awaited PSN, asking for an answer.
    pub(super) fn new(opcode: u8) -> Self {
        Self {
            opcode,
            psn: Psn::Awaited(0),
            flags: None,
            pkey: 0xFFFF,
            marks: 0,
            qpn_xor: 0,
            qpn: None,
            ack: 0x80,
            key: if matches!(opcode, 0x16 | 0x17) { Key::Fast } else { Key::Good },
            at: 0,
            addr: None,
            length: None,
            feth: 1,
            syndrome: 0x1F,
            qkey: 0x1111_1111,
            payload: natural_payload(opcode),
            total: None,
            flip: None,
            src: None,
            dst: None,
        }
    }

    pub(super) fn payload(opcode: u8, payload: usize) -> Self {
        Self { payload, ..Self::new(opcode) }
    }

    /// BTH to the last pad byte, without the ICRC.
    pub(super) fn unsealed(&self, qpn: u32, psn: u32, addr: u64, key: u32) -> Vec<u8> {
        let pad = self.payload.wrapping_neg() & 3;
        let flags = self.flags.unwrap_or(0x40 | u8::try_from(pad).unwrap() << 4);
        let mut out = vec![self.opcode, flags];
        out.extend(self.pkey.to_be_bytes());
        let qpn = self.qpn.unwrap_or(qpn ^ self.qpn_xor) & 0xFF_FFFF;
        out.extend((u32::from(self.marks) << 24 | qpn).to_be_bytes());
        out.extend((u32::from(self.ack) << 24 | psn & 0xFF_FFFF).to_be_bytes());
        for header in headers(self.opcode) {
            match header {
                Header::Reth => {
                    out.extend(addr.to_be_bytes());
                    out.extend(key.to_be_bytes());
                    out.extend(self.length.unwrap_or(self.honest_length()).to_be_bytes());
                }
                Header::Atomic => {
                    out.extend(addr.to_be_bytes());
                    out.extend(key.to_be_bytes());
                    out.extend(1u64.to_be_bytes());
                    out.extend(0u64.to_be_bytes());
                }
                Header::Aeth => out.extend((u32::from(self.syndrome) << 24).to_be_bytes()),
                Header::AtomicAck => out.extend(7u64.to_be_bytes()),
                Header::Feth => out.extend([0, 0, 0, self.feth]),
                Header::Imm => out.extend([0, 0, 0, 9]),
                Header::Ieth => out.extend(key.to_be_bytes()),
                Header::Deth => {
                    out.extend(self.qkey.to_be_bytes());
                    out.extend(17u32.to_be_bytes());
                }
                Header::Cnp => out.extend([0; 16]),
            }
        }
        out.extend(std::iter::repeat_n(FILL, self.payload));
        out.extend(std::iter::repeat_n(0, pad));
        if let Some(total) = self.total {
            out.resize(total.saturating_sub(4), 0);
        }
        out
    }

    fn honest_length(&self) -> u32 {
        match self.opcode & 0x1F {
            0x06 => 512,
            0x0C | 0x1C | 0x1D => 8,
            _ => u32::try_from(self.payload).unwrap(),
        }
    }

    /// The segment with its ICRC, and whatever is then flipped.
    pub(super) fn sealed(&self, flow: &uroce::wire::Flow, bytes: Vec<u8>) -> Vec<u8> {
        self.sealed_in(flow, IpFields { id: 0, flags_fragment: DONT_FRAGMENT }, bytes)
    }

    /// The same in an IPv4 packet with these fields.
    pub(super) fn sealed_in(&self, flow: &uroce::wire::Flow, ip: IpFields, mut bytes: Vec<u8>) -> Vec<u8> {
        let icrc = uroce::wire::icrc(flow, ip, &bytes);
        bytes.extend(icrc);
        if let Some(total) = self.total {
            bytes.truncate(total);
        }
        if let Some((at, mask)) = self.flip {
            let at = if at < 0 { bytes.len() - at.unsigned_abs() } else { at.unsigned_abs() };
            bytes[at] ^= mask;
        }
        bytes
    }
}

/// A payload that the opcode may have: path MTU 256 for First and Middle, 4 bytes where any are allowed.
pub(super) fn natural_payload(opcode: u8) -> usize {
    match (opcode >> 5, opcode & 0x1F) {
        (0 | 1, 0x00 | 0x01 | 0x06 | 0x07 | 0x0D | 0x0E) => 256,
        (0 | 1, 0x0C | 0x11..=0x14 | 0x1C) | (4, _) => 0,
        (0, 0x1D) => 8,
        _ => 4,
    }
}

/// An extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Reth,
    Feth,
    Atomic,
    Aeth,
    AtomicAck,
    Imm,
    Ieth,
    Deth,
    Cnp,
}

/// The extended headers of the opcodes that are served (IBTA Vol 1 9.2; annex A17 for the CNP).
pub(super) fn headers(opcode: u8) -> &'static [Header] {
    match opcode {
        0x03 | 0x05 | 0x09 | 0x23 | 0x25 | 0x29 => &[Header::Imm],
        0x06 | 0x0A | 0x0C | 0x1D | 0x26 | 0x2A => &[Header::Reth],
        0x1C => &[Header::Feth, Header::Reth],
        0x0B | 0x2B => &[Header::Reth, Header::Imm],
        0x0D | 0x0F | 0x10 | 0x11 => &[Header::Aeth],
        0x12 => &[Header::Aeth, Header::AtomicAck],
        0x13 | 0x14 => &[Header::Atomic],
        0x16 | 0x17 => &[Header::Ieth],
        0x64 => &[Header::Deth],
        0x65 => &[Header::Deth, Header::Imm],
        0x81 => &[Header::Cnp],
        _ => &[],
    }
}

/// Bytes of BTH and extended headers.
pub(super) fn header_len(opcode: u8) -> usize {
    let len = |h: &Header| match h {
        Header::Reth | Header::Cnp => 16,
        Header::Atomic => 28,
        Header::Aeth | Header::Imm | Header::Ieth | Header::Feth => 4,
        Header::AtomicAck | Header::Deth => 8,
    };
    12 + headers(opcode).iter().map(len).sum::<usize>()
}

/// RC opcodes that ask.
pub(super) const RC_REQUESTS: [u8; 19] =
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x0A, 0x0B, 0x0C, 0x13, 0x14, 0x16, 0x17, 0x1C, 0x1D];
/// RC opcodes that answer.
pub(super) const RC_RESPONSES: [u8; 6] = [0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12];
/// UC opcodes.
pub(super) const UC: [u8; 12] = [0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2A, 0x2B];
/// UD opcodes.
pub(super) const UD: [u8; 2] = [0x64, 0x65];
/// What an idle RC responder takes.
pub(super) const RC_BEGINNINGS: [u8; 11] = [0, 4, 5, 6, 0x0A, 0x0B, 0x0C, 0x13, 0x14, 0x1C, 0x1D];

/// The name for a person.
pub(super) fn name(opcode: u8) -> String {
    format!("{}({opcode:#04x})", uroce::wire::Opcode::new(opcode).name())
}
