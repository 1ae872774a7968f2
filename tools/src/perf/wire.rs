//! What the two sides of a test say to each other.
//!
//! Owns the private data of the connections and the control messages. Never measures.

use uroce::types::{Imm, Rkey};
use uroce::verbs::Remote;

use super::args::{Direction, Operation, PerfArgs};

const MAGIC: &[u8; 8] = b"urocepf1";

/// Private data of each connection request: what the test is, and where the client's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub operation: Operation,
    pub direction: Direction,
    pub bidirectional: bool,
    pub qps: u8,
    pub rx_depth: u32,
    pub size_max: u64,
    pub memory: Remote,
}

impl Hello {
    /// Of a client with these flags.
    pub(super) fn of(args: &PerfArgs, size_max: u64, memory: Remote) -> Self {
        Self {
            operation: args.operation,
            direction: args.direction,
            bidirectional: args.bidirectional,
            qps: u8::try_from(args.qps).unwrap_or(1),
            rx_depth: args.rx_depth,
            size_max,
            memory,
        }
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([self.operation as u8, self.direction as u8, u8::from(self.bidirectional), self.qps]);
        bytes.extend(self.rx_depth.to_be_bytes());
        bytes.extend(self.size_max.to_be_bytes());
        bytes.extend(memory_to_bytes(self.memory));
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (&[operation, direction, both, qps], rest) = rest.split_first_chunk()?;
        let (rx_depth, rest) = rest.split_first_chunk()?;
        let (size_max, rest) = rest.split_first_chunk()?;
        let operations = [Operation::Send, Operation::Write, Operation::Read, Operation::Atomic];
        Some(Self {
            operation: operations.into_iter().find(|o| *o as u8 == operation)?,
            direction: [Direction::Bw, Direction::Lat].into_iter().find(|d| *d as u8 == direction)?,
            bidirectional: both != 0,
            qps,
            rx_depth: u32::from_be_bytes(*rx_depth),
            size_max: u64::from_be_bytes(*size_max),
            memory: memory_from_bytes(rest)?,
        })
    }
}

/// Private data of an acceptance.
pub(super) fn memory_to_bytes(at: Remote) -> Vec<u8> {
    at.addr.to_be_bytes().into_iter().chain(at.rkey.get().to_be_bytes()).collect()
}

pub(super) fn memory_from_bytes(bytes: &[u8]) -> Option<Remote> {
    let (addr, rest) = bytes.split_first_chunk()?;
    let (rkey, _) = rest.split_first_chunk()?;
    Some(Remote { addr: u64::from_be_bytes(*addr), rkey: Rkey::new(u32::from_be_bytes(*rkey)) })
}

/// A control message: a SEND with this immediate on the first QP. Test messages have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// A size begins: bytes a message and, in a bidirectional test, messages a QP that the server sends.
    Start { size: u64, messages: u64 },
    /// Go on.
    Ready,
    /// The size is over; a row for the other side's table.
    Stop(String),
}

/// Greatest length of a control message.
pub(super) const CONTROL_MAX: usize = 512;

impl Control {
    pub(super) fn to_message(&self) -> (Imm, Vec<u8>) {
        match self {
            Self::Start { size, messages } => {
                (Imm::new(1), size.to_be_bytes().into_iter().chain(messages.to_be_bytes()).collect())
            }
            Self::Ready => (Imm::new(2), Vec::new()),
            Self::Stop(row) => (Imm::new(3), row.bytes().take(CONTROL_MAX).collect()),
        }
    }

    pub(super) fn from_message(imm: Imm, bytes: &[u8]) -> Option<Self> {
        match imm.get() {
            1 => {
                let (size, rest) = bytes.split_first_chunk()?;
                let (messages, _) = rest.split_first_chunk()?;
                Some(Self::Start { size: u64::from_be_bytes(*size), messages: u64::from_be_bytes(*messages) })
            }
            2 => Some(Self::Ready),
            3 => Some(Self::Stop(String::from_utf8_lossy(bytes).into_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let hello = Hello {
            operation: Operation::Read,
            direction: Direction::Lat,
            bidirectional: true,
            qps: 4,
            rx_depth: 512,
            size_max: 1 << 31,
            memory: Remote { addr: 0x7f00_1234_5678, rkey: Rkey::new(9) },
        };
        let bytes = hello.to_bytes();
        assert!(bytes.len() <= 56, "the room beside the IP header");
        assert_eq!(Hello::from_bytes(&bytes), Some(hello));
        assert_eq!(Hello::from_bytes(&bytes[..30]), None);
        assert_eq!(Hello::from_bytes(&[0; 56]), None);
        for control in [Control::Start { size: 64, messages: 9 }, Control::Ready, Control::Stop(" 64 row".into())] {
            let (imm, bytes) = control.to_message();
            assert_eq!(Control::from_message(imm, &bytes), Some(control));
        }
    }
}
