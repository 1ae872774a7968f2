//! The opcode table: class, operation, extended headers and payload of each of the 256 values.
//!
//! Owns all that an opcode implies; parser, emitter and analysers ask here and nowhere else (IBTA Vol 1 chapter 9;
//! annex A17 for the CNP). Never looks at a packet.

use core::fmt;

/// The first byte of the BTH: any value, whether we serve it or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(u8);

impl Opcode {
    /// Congestion notification packet.
    pub const CNP: Self = Self(0x81);

    /// The opcode with this value.
    #[must_use]
    pub const fn new(value: u8) -> Self {
        Self(value)
    }

    /// The byte.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The transport service, from the upper three bits.
    #[must_use]
    pub const fn class(self) -> Class {
        self.entry().class
    }

    /// What it does, or `None` for a reserved or vendor-specific value.
    #[must_use]
    pub const fn operation(self) -> Option<Operation> {
        self.entry().operation
    }

    /// The extended headers between BTH and payload, in the order of the wire. Empty for an unknown opcode.
    pub fn headers(self) -> impl Iterator<Item = ExtHeader> {
        let set = self.entry().headers;
        ExtHeader::ALL.into_iter().filter(move |&header| set & header.bit() != 0)
    }

    /// Bytes of the BTH and the extended headers.
    #[must_use]
    pub const fn header_len(self) -> usize {
        self.entry().header_len as usize
    }

    /// What its payload may be.
    #[must_use]
    pub const fn payload(self) -> PayloadRule {
        self.entry().payload
    }

    /// Whether this stack serves it, knows but refuses it, or does not know it.
    #[must_use]
    pub const fn support(self) -> Support {
        self.entry().support
    }

    /// Name in capitals, such as `RC_SEND_ONLY`, `UD_SEND_ONLY_IMM` or `CNP`. Every value has one; reserved values of a
    /// class carry their low five bits in hexadecimal.
    #[must_use]
    pub const fn name(self) -> &'static str {
        let low = (self.0 & 0x1F) as usize;
        let known = self.operation().is_some();
        match self.class() {
            Class::Rc => (if known { &RC } else { &RC_RESERVED })[low],
            Class::Uc => (if known { &UC } else { &UC_RESERVED })[low],
            Class::Rd => (if known { &RD } else { &RD_RESERVED })[low],
            Class::Ud => (if known { &UD } else { &UD_RESERVED })[low],
            Class::Xrc => (if known { &XRC } else { &XRC_RESERVED })[low],
            Class::Cnp if known => "CNP",
            Class::Cnp | Class::Reserved => "RESERVED",
            Class::Vendor => "VENDOR",
        }
    }

    #[inline]
    const fn entry(self) -> &'static Entry {
        &TABLE[self.0 as usize]
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opcode({:#04x} {})", self.0, self.name())
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram.
    Rd,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification, one opcode of 32.
    Cnp,
    /// Extended reliable connection.
    Xrc,
    /// 0xC0 to 0xDF.
    Reserved,
    /// Manufacturer specific.
    Vendor,
}

impl Class {
    const fn of(opcode: u8) -> Self {
        match opcode >> 5 {
            0 => Self::Rc,
            1 => Self::Uc,
            2 => Self::Rd,
            3 => Self::Ud,
            4 => Self::Cnp,
            5 => Self::Xrc,
            6 => Self::Reserved,
            _ => Self::Vendor,
        }
    }
}

/// Operation: the low five bits of the connected services and of UD. The discriminants are those bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// First packet of a SEND.
    SendFirst = 0x00,
    /// Middle packet of a SEND.
    SendMiddle = 0x01,
    /// Last packet of a SEND.
    SendLast = 0x02,
    /// Last packet of a SEND, with immediate data.
    SendLastImm = 0x03,
    /// A SEND of one packet.
    SendOnly = 0x04,
    /// A SEND of one packet, with immediate data.
    SendOnlyImm = 0x05,
    /// First packet of an RDMA WRITE.
    WriteFirst = 0x06,
    /// Middle packet of an RDMA WRITE.
    WriteMiddle = 0x07,
    /// Last packet of an RDMA WRITE.
    WriteLast = 0x08,
    /// Last packet of an RDMA WRITE, with immediate data.
    WriteLastImm = 0x09,
    /// An RDMA WRITE of one packet.
    WriteOnly = 0x0A,
    /// An RDMA WRITE of one packet, with immediate data.
    WriteOnlyImm = 0x0B,
    /// RDMA READ request.
    ReadRequest = 0x0C,
    /// First packet of READ data.
    ReadResponseFirst = 0x0D,
    /// Middle packet of READ data.
    ReadResponseMiddle = 0x0E,
    /// Last packet of READ data.
    ReadResponseLast = 0x0F,
    /// READ data of one packet.
    ReadResponseOnly = 0x10,
    /// ACK or NAK.
    Acknowledge = 0x11,
    /// Answer to an atomic.
    AtomicAcknowledge = 0x12,
    /// Compare and swap.
    CompareSwap = 0x13,
    /// Fetch and add.
    FetchAdd = 0x14,
    /// Resynchronisation of an RD channel; RD only.
    Resync = 0x15,
    /// Last packet of a SEND that invalidates a key.
    SendLastInvalidate = 0x16,
    /// A SEND of one packet that invalidates a key.
    SendOnlyInvalidate = 0x17,
    /// FLUSH of remote memory.
    Flush = 0x1C,
    /// ATOMIC WRITE of 8 bytes.
    AtomicWrite = 0x1D,
    /// Congestion notification. Its low five bits are 1; it stands apart because that is SEND middle elsewhere.
    Cnp = 0xFF,
}

impl Operation {
    const BY_CODE: [Option<Self>; 32] = {
        use Operation::{
            Acknowledge, AtomicAcknowledge, AtomicWrite, CompareSwap, FetchAdd, Flush, ReadRequest, ReadResponseFirst,
            ReadResponseLast, ReadResponseMiddle, ReadResponseOnly, Resync, SendFirst, SendLast, SendLastImm,
            SendLastInvalidate, SendMiddle, SendOnly, SendOnlyImm, SendOnlyInvalidate, WriteFirst, WriteLast,
            WriteLastImm, WriteMiddle, WriteOnly, WriteOnlyImm,
        };
        let all = [
            SendFirst,
            SendMiddle,
            SendLast,
            SendLastImm,
            SendOnly,
            SendOnlyImm,
            WriteFirst,
            WriteMiddle,
            WriteLast,
            WriteLastImm,
            WriteOnly,
            WriteOnlyImm,
            ReadRequest,
            ReadResponseFirst,
            ReadResponseMiddle,
            ReadResponseLast,
            ReadResponseOnly,
            Acknowledge,
            AtomicAcknowledge,
            CompareSwap,
            FetchAdd,
            Resync,
            SendLastInvalidate,
            SendOnlyInvalidate,
            Flush,
            AtomicWrite,
        ];
        let mut table = [None; 32];
        let mut i = 0;
        while i < all.len() {
            table[all[i] as usize] = Some(all[i]);
            i += 1;
        }
        table
    };

    /// The operation of an opcode, if its class has it.
    const fn of(opcode: u8) -> Option<Self> {
        let low = opcode & 0x1F;
        let has = match Class::of(opcode) {
            Class::Rc | Class::Xrc => low != Self::Resync as u8,
            Class::Uc => low <= Self::WriteOnlyImm as u8,
            Class::Rd => low <= Self::Resync as u8,
            Class::Ud => low == Self::SendOnly as u8 || low == Self::SendOnlyImm as u8,
            Class::Cnp if opcode == Opcode::CNP.0 => return Some(Self::Cnp),
            Class::Cnp | Class::Reserved | Class::Vendor => false,
        };
        if has { Self::BY_CODE[low as usize] } else { None }
    }

    /// Whether a responder sends it.
    const fn is_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseMiddle
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Acknowledge
                | Self::AtomicAcknowledge
        )
    }

    /// The headers that the operation brings by itself, whatever the service.
    const fn headers(self) -> u16 {
        match self {
            Self::SendFirst | Self::SendMiddle | Self::SendLast | Self::SendOnly => 0,
            Self::WriteMiddle | Self::WriteLast | Self::ReadResponseMiddle | Self::Resync => 0,
            Self::SendLastImm | Self::SendOnlyImm | Self::WriteLastImm => ExtHeader::ImmDt.bit(),
            Self::WriteFirst | Self::WriteOnly | Self::ReadRequest | Self::AtomicWrite => ExtHeader::Reth.bit(),
            Self::WriteOnlyImm => ExtHeader::Reth.bit() | ExtHeader::ImmDt.bit(),
            Self::ReadResponseFirst | Self::ReadResponseLast | Self::ReadResponseOnly | Self::Acknowledge => {
                ExtHeader::Aeth.bit()
            }
            Self::AtomicAcknowledge => ExtHeader::Aeth.bit() | ExtHeader::AtomicAckEth.bit(),
            Self::CompareSwap | Self::FetchAdd => ExtHeader::AtomicEth.bit(),
            Self::SendLastInvalidate | Self::SendOnlyInvalidate => ExtHeader::Ieth.bit(),
            Self::Flush => ExtHeader::Feth.bit() | ExtHeader::Reth.bit(),
            Self::Cnp => ExtHeader::CnpReserved.bit(),
        }
    }

    /// What the payload may be.
    const fn payload(self) -> PayloadRule {
        match self {
            Self::SendFirst | Self::SendMiddle | Self::WriteFirst | Self::WriteMiddle => PayloadRule::PathMtu,
            Self::ReadResponseFirst | Self::ReadResponseMiddle => PayloadRule::PathMtu,
            Self::SendLast | Self::SendLastImm | Self::SendLastInvalidate => PayloadRule::AtLeastOne,
            Self::WriteLast | Self::WriteLastImm | Self::ReadResponseLast => PayloadRule::AtLeastOne,
            Self::SendOnly | Self::SendOnlyImm | Self::SendOnlyInvalidate => PayloadRule::Any,
            Self::WriteOnly | Self::WriteOnlyImm | Self::ReadResponseOnly => PayloadRule::Any,
            Self::AtomicWrite => PayloadRule::Eight,
            Self::ReadRequest | Self::Acknowledge | Self::AtomicAcknowledge | Self::CompareSwap | Self::FetchAdd => {
                PayloadRule::None
            }
            Self::Resync | Self::Flush | Self::Cnp => PayloadRule::None,
        }
    }
}

/// An extended transport header. The order is that of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExtHeader {
    /// Reliable datagram, 4 bytes.
    Rdeth,
    /// Datagram, 8 bytes.
    Deth,
    /// XRC, 4 bytes.
    XrcEth,
    /// FLUSH, 4 bytes.
    Feth,
    /// RDMA, 16 bytes.
    Reth,
    /// Atomic, 28 bytes.
    AtomicEth,
    /// ACK, 4 bytes.
    Aeth,
    /// Result of an atomic, 8 bytes.
    AtomicAckEth,
    /// Immediate data, 4 bytes.
    ImmDt,
    /// Key to invalidate, 4 bytes.
    Ieth,
    /// The reserved bytes of a CNP, 16.
    CnpReserved,
}

impl ExtHeader {
    const ALL: [Self; 11] = [
        Self::Rdeth,
        Self::Deth,
        Self::XrcEth,
        Self::Feth,
        Self::Reth,
        Self::AtomicEth,
        Self::Aeth,
        Self::AtomicAckEth,
        Self::ImmDt,
        Self::Ieth,
        Self::CnpReserved,
    ];

    const fn bit(self) -> u16 {
        1 << self as u8
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn wire_len(self) -> usize {
        match self {
            Self::Rdeth | Self::XrcEth | Self::Feth | Self::Aeth | Self::ImmDt | Self::Ieth => 4,
            Self::Deth | Self::AtomicAckEth => 8,
            Self::Reth | Self::CnpReserved => 16,
            Self::AtomicEth => 28,
        }
    }
}

/// What the payload of an opcode may be, as far as it can be told without the path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PayloadRule {
    /// There is none.
    None,
    /// Any length from 0 up to the path MTU.
    Any,
    /// 1 byte up to the path MTU.
    AtLeastOne,
    /// Exactly the path MTU, therefore a multiple of 4 and not empty.
    PathMtu,
    /// 8 bytes: any other length is whole on the wire, and an invalid request.
    Eight,
}

impl PayloadRule {
    /// Whether a packet with a payload of `len` bytes (without pad) can be taken apart. What is wrong only in a message
    /// or for a path MTU (an empty Last, a First that is no path MTU) is whole on the wire: the responder answers it with
    /// a NAK, the requester with a bad-response completion.
    #[must_use]
    pub const fn frames(self, len: usize) -> bool {
        match self {
            Self::None => len == 0,
            Self::Any | Self::AtLeastOne | Self::PathMtu | Self::Eight => true,
        }
    }
}

/// What this stack does with an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Support {
    /// Parsed and served.
    Served,
    /// Known by name and refused: RD, XRC.
    Refused,
    /// Reserved or vendor specific.
    Unknown,
}

/// Bytes of the base transport header.
pub(super) const BTH_LEN: usize = 12;

#[derive(Clone, Copy)]
struct Entry {
    class: Class,
    operation: Option<Operation>,
    headers: u16,
    header_len: u8,
    payload: PayloadRule,
    support: Support,
}

impl Entry {
    const fn of(opcode: u8) -> Self {
        let class = Class::of(opcode);
        let operation = Operation::of(opcode);
        let Some(op) = operation else {
            #[allow(clippy::cast_possible_truncation)] // 12.
            let header_len = BTH_LEN as u8;
            let payload = PayloadRule::Any;
            return Self { class, operation, headers: 0, header_len, payload, support: Support::Unknown };
        };
        let service = match class {
            Class::Ud => ExtHeader::Deth.bit(),
            Class::Rd if op.is_response() => ExtHeader::Rdeth.bit(),
            Class::Rd => ExtHeader::Rdeth.bit() | ExtHeader::Deth.bit(),
            Class::Xrc if !op.is_response() => ExtHeader::XrcEth.bit(),
            _ => 0,
        };
        let headers = service | op.headers();
        let support = match (class, op) {
            (Class::Rd | Class::Xrc, _) => Support::Refused,
            _ => Support::Served,
        };
        Self { class, operation, headers, header_len: header_len(headers), payload: op.payload(), support }
    }
}

const fn header_len(headers: u16) -> u8 {
    let mut len = BTH_LEN;
    let mut i = 0;
    while i < ExtHeader::ALL.len() {
        if headers & ExtHeader::ALL[i].bit() != 0 {
            len += ExtHeader::ALL[i].wire_len();
        }
        i += 1;
    }
    #[allow(clippy::cast_possible_truncation)] // At most 12 + 12 + 28.
    let short = len as u8;
    short
}

static TABLE: [Entry; 256] = {
    let mut table = [Entry::of(0); 256];
    let mut opcode = 0u8;
    loop {
        table[opcode as usize] = Entry::of(opcode);
        if opcode == u8::MAX {
            break table;
        }
        opcode += 1;
    }
};

macro_rules! each {
    ($class:literal, $($name:literal,)*) => { [$(concat!($class, "_", $name)),*] };
}

/// The names of a class by low five bits; which of them the class has is for [`Operation::of`].
#[rustfmt::skip]
macro_rules! names {
    ($class:literal) => {
        each!($class,
            "SEND_FIRST", "SEND_MIDDLE", "SEND_LAST", "SEND_LAST_IMM", "SEND_ONLY", "SEND_ONLY_IMM",
            "WRITE_FIRST", "WRITE_MIDDLE", "WRITE_LAST", "WRITE_LAST_IMM", "WRITE_ONLY", "WRITE_ONLY_IMM",
            "READ_REQUEST", "READ_RESP_FIRST", "READ_RESP_MIDDLE", "READ_RESP_LAST", "READ_RESP_ONLY", "ACK",
            "ATOMIC_ACK", "CMP_SWAP", "FETCH_ADD", "RESYNC", "SEND_LAST_INV", "SEND_ONLY_INV", "OP_18",
            "OP_19", "OP_1A", "OP_1B", "FLUSH", "ATOMIC_WRITE", "OP_1E", "OP_1F",
        )
    };
}

/// The names of what a class does not have.
#[rustfmt::skip]
macro_rules! reserved {
    ($class:literal) => {
        each!($class,
            "RESERVED_00", "RESERVED_01", "RESERVED_02", "RESERVED_03", "RESERVED_04", "RESERVED_05",
            "RESERVED_06", "RESERVED_07", "RESERVED_08", "RESERVED_09", "RESERVED_0A", "RESERVED_0B",
            "RESERVED_0C", "RESERVED_0D", "RESERVED_0E", "RESERVED_0F", "RESERVED_10", "RESERVED_11",
            "RESERVED_12", "RESERVED_13", "RESERVED_14", "RESERVED_15", "RESERVED_16", "RESERVED_17",
            "RESERVED_18", "RESERVED_19", "RESERVED_1A", "RESERVED_1B", "RESERVED_1C", "RESERVED_1D",
            "RESERVED_1E", "RESERVED_1F",
        )
    };
}

static RC: [&str; 32] = names!("RC");
static UC: [&str; 32] = names!("UC");
static RD: [&str; 32] = names!("RD");
static UD: [&str; 32] = names!("UD");
static XRC: [&str; 32] = names!("XRC");
static RC_RESERVED: [&str; 32] = reserved!("RC");
static UC_RESERVED: [&str; 32] = reserved!("UC");
static RD_RESERVED: [&str; 32] = reserved!("RD");
static UD_RESERVED: [&str; 32] = reserved!("UD");
static XRC_RESERVED: [&str; 32] = reserved!("XRC");

#[cfg(test)]
mod tests {
    use super::*;

    fn names_of(support: Support) -> Vec<(u8, &'static str)> {
        (0..=255).map(Opcode::new).filter(|o| o.support() == support).map(|o| (o.get(), o.name())).collect()
    }

    #[test]
    fn served_are_rc_uc_ud_and_cnp() {
        let served: Vec<u8> = names_of(Support::Served).into_iter().map(|(value, _)| value).collect();
        let expected: Vec<u8> =
            (0x00..=0x14).chain([0x16, 0x17, 0x1C, 0x1D]).chain(0x20..=0x2B).chain([0x64, 0x65, 0x81]).collect();
        assert_eq!(served, expected);
    }

    #[test]
    fn refused_are_known_by_name() {
        let refused: Vec<u8> = names_of(Support::Refused).into_iter().map(|(value, _)| value).collect();
        let xrc = (0xA0..=0xB4).chain([0xB6, 0xB7, 0xBC, 0xBD]);
        let expected: Vec<u8> = (0x40..=0x55).chain(xrc).collect();
        assert_eq!(refused, expected);
        assert_eq!(Opcode::new(0x1C).name(), "RC_FLUSH");
        assert_eq!(Opcode::new(0x1D).name(), "RC_ATOMIC_WRITE");
        assert_eq!(Opcode::new(0xA4).name(), "XRC_SEND_ONLY");
        assert_eq!(Opcode::new(0x55).name(), "RD_RESYNC");
    }

    #[test]
    fn names_are_those_of_the_captures() {
        for (value, name) in [
            (0x00, "RC_SEND_FIRST"),
            (0x04, "RC_SEND_ONLY"),
            (0x05, "RC_SEND_ONLY_IMM"),
            (0x0B, "RC_WRITE_ONLY_IMM"),
            (0x0C, "RC_READ_REQUEST"),
            (0x0E, "RC_READ_RESP_MIDDLE"),
            (0x11, "RC_ACK"),
            (0x12, "RC_ATOMIC_ACK"),
            (0x13, "RC_CMP_SWAP"),
            (0x14, "RC_FETCH_ADD"),
            (0x15, "RC_RESERVED_15"),
            (0x17, "RC_SEND_ONLY_INV"),
            (0x2C, "UC_RESERVED_0C"),
            (0x22, "UC_SEND_LAST"),
            (0x64, "UD_SEND_ONLY"),
            (0x65, "UD_SEND_ONLY_IMM"),
            (0x81, "CNP"),
            (0x80, "RESERVED"),
            (0xC1, "RESERVED"),
            (0xFF, "VENDOR"),
        ] {
            assert_eq!(Opcode::new(value).name(), name);
        }
        let mut known: Vec<_> = names_of(Support::Served);
        known.extend(names_of(Support::Refused));
        let count = known.len();
        known.sort_by_key(|&(_, name)| name);
        known.dedup_by_key(|&mut (_, name)| name);
        assert_eq!(known.len(), count, "two opcodes share a name");
    }

    #[test]
    fn header_lengths_are_those_of_the_specification() {
        for (value, len) in [
            (0x04, 12),
            (0x05, 16),
            (0x06, 28),
            (0x0B, 32),
            (0x0C, 28),
            (0x0D, 16),
            (0x0E, 12),
            (0x11, 16),
            (0x12, 24),
            (0x13, 40),
            (0x17, 16),
            (0x1C, 32),
            (0x64, 20),
            (0x65, 24),
            (0x81, 28),
            (0xAA, 32),
            (0xB1, 16),
            (0x51, 20),
            (0x44, 24),
        ] {
            assert_eq!(Opcode::new(value).header_len(), len, "{}", Opcode::new(value));
        }
        let xrc: Vec<_> = Opcode::new(0xAB).headers().collect();
        assert_eq!(xrc, [ExtHeader::XrcEth, ExtHeader::Reth, ExtHeader::ImmDt]);
    }
}
