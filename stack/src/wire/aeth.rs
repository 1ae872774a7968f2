//! AETH: the syndrome and message sequence number of a response (IBTA Vol 1 9.2.8).

use crate::types::{Msn, RnrTimer};

/// Why a request was refused for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum NakCode {
    /// A gap: the PSN of the packet is the one expected.
    PsnSequenceError = 0,
    /// An opcode, length or operation that cannot be.
    InvalidRequest = 1,
    /// A key, range or right that does not hold.
    RemoteAccessError = 2,
    /// The responder failed by itself.
    RemoteOperationalError = 3,
    /// Reliable datagram only.
    InvalidRdRequest = 4,
}

impl NakCode {
    /// The code of the low five syndrome bits.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::PsnSequenceError),
            1 => Some(Self::InvalidRequest),
            2 => Some(Self::RemoteAccessError),
            3 => Some(Self::RemoteOperationalError),
            4 => Some(Self::InvalidRdRequest),
            _ => None,
        }
    }
}

/// The eight bits of the syndrome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// Positive, with a credit code; 31 means that credits are not used.
    Ack {
        /// 5-bit credit code.
        credits: u8,
    },
    /// Receiver not ready: wait at least this long.
    RnrNak(RnrTimer),
    /// Negative.
    Nak(NakCode),
    /// A value that the specification reserves.
    Reserved(u8),
}

impl Syndrome {
    /// A plain ACK without credits.
    pub const ACK: Self = Self::Ack { credits: 31 };

    /// Decodes the byte.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Self {
        let low = byte & 31;
        match byte >> 5 {
            0 => Self::Ack { credits: low },
            1 => Self::RnrNak(RnrTimer::from_wire(low)),
            3 => match NakCode::from_code(low) {
                Some(code) => Self::Nak(code),
                None => Self::Reserved(byte),
            },
            _ => Self::Reserved(byte),
        }
    }

    /// The byte.
    #[must_use]
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::Ack { credits } => credits & 31,
            Self::RnrNak(t) => 0x20 | t.code(),
            Self::Nak(code) => 0x60 | code as u8,
            Self::Reserved(byte) => byte,
        }
    }
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// Positive or negative.
    pub syndrome: Syndrome,
    /// Messages completed.
    pub msn: Msn,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_survives() {
        for byte in 0..=255u8 {
            assert_eq!(Syndrome::from_wire(byte).to_wire(), byte);
        }
        assert_eq!(Syndrome::from_wire(0x1f), Syndrome::ACK);
        assert_eq!(Syndrome::from_wire(0x60), Syndrome::Nak(NakCode::PsnSequenceError));
        assert_eq!(Syndrome::from_wire(0x63), Syndrome::Nak(NakCode::RemoteOperationalError));
        assert_eq!(Syndrome::from_wire(0x65), Syndrome::Reserved(0x65));
        assert_eq!(Syndrome::from_wire(0x40), Syndrome::Reserved(0x40));
    }
}
