//! What the two sides of a test say to each other.
//!
//! Owns the private data of the connections and the control messages. Never measures.

use uroce::types::{Imm, Rkey};
use uroce::verbs::Remote;

use super::args::{Direction, Operation, PerfArgs};

const MAGIC: &[u8; 8] = b"urocepf2";

/// Private data of each connection request: what the test is, and where the client's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub operation: Operation,
    pub direction: Direction,
    pub bidirectional: bool,
    /// WRITEs of a ping-pong carry immediate data.
    pub announced: bool,
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
            announced: args.is_announced(),
            qps: u8::try_from(args.qps).unwrap_or(1),
            rx_depth: args.rx_depth,
            size_max,
            memory,
        }
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let (both, announced) = (u8::from(self.bidirectional), u8::from(self.announced));
        bytes.extend([self.operation as u8, self.direction as u8, both, announced, self.qps]);
        bytes.extend(self.rx_depth.to_be_bytes());
        bytes.extend(self.size_max.to_be_bytes());
        bytes.extend(memory_to_bytes(self.memory));
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (&[operation, direction, both, announced, qps], rest) = rest.split_first_chunk()?;
        let (rx_depth, rest) = rest.split_first_chunk()?;
        let (size_max, rest) = rest.split_first_chunk()?;
        let operations = [Operation::Send, Operation::Write, Operation::Read, Operation::Atomic];
        Some(Self {
            operation: operations.into_iter().find(|o| *o as u8 == operation)?,
            direction: [Direction::Bw, Direction::Lat].into_iter().find(|d| *d as u8 == direction)?,
            bidirectional: both != 0,
            announced: announced != 0,
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
    /// A size begins: bytes a message; in a bidirectional test, messages a QP that the server sends; the seed of the
    /// content, 0 for none that is checked.
    Start { size: u64, messages: u64, seed: u64 },
    /// Go on.
    Ready,
    /// The size is over; a row for the other side's table.
    Stop(String),
    /// What arrived differs from what was sent, at this byte.
    Differs(u64),
}

/// Greatest length of a control message.
pub(super) const CONTROL_MAX: usize = 512;

impl Control {
    pub(super) fn to_message(&self) -> (Imm, Vec<u8>) {
        match self {
            Self::Start { size, messages, seed } => {
                (Imm::new(1), [size, messages, seed].into_iter().flat_map(|n| n.to_be_bytes()).collect())
            }
            Self::Ready => (Imm::new(2), Vec::new()),
            Self::Stop(row) => (Imm::new(3), row.bytes().take(CONTROL_MAX).collect()),
            Self::Differs(at) => (Imm::new(4), at.to_be_bytes().to_vec()),
        }
    }

    pub(super) fn from_message(imm: Imm, bytes: &[u8]) -> Option<Self> {
        match imm.get() {
            1 => {
                let (size, rest) = bytes.split_first_chunk()?;
                let (messages, rest) = rest.split_first_chunk()?;
                let (seed, _) = rest.split_first_chunk()?;
                let [size, messages, seed] = [size, messages, seed].map(|n| u64::from_be_bytes(*n));
                Some(Self::Start { size, messages, seed })
            }
            2 => Some(Self::Ready),
            3 => Some(Self::Stop(String::from_utf8_lossy(bytes).into_owned())),
            4 => Some(Self::Differs(u64::from_be_bytes(*bytes.first_chunk()?))),
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
            announced: true,
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
        for control in [
            Control::Start { size: 64, messages: 9, seed: 7 },
            Control::Ready,
            Control::Stop(" 64 row".into()),
            Control::Differs(4095),
        ] {
            let (imm, bytes) = control.to_message();
            assert_eq!(Control::from_message(imm, &bytes), Some(control));
        }
    }
}
