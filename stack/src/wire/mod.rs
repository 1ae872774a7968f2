//! The wire: opcodes, headers, packets and the invariant CRC.
//!
//! Owns every byte offset of RoCEv2. Behind this module no code looks at bytes: a received packet is a [`Packet`] whose
//! body says which state machine it is for, and what is sent is built from the same values. Never keeps state.

mod aeth;
mod emit;
mod flow;
mod icrc;
mod opcode;
mod outer;
mod packet;
mod parse;
mod run;

pub use aeth::{Aeth, NakCode, Syndrome};
pub use emit::segment_len;
pub use flow::{Flow, IpFields, VlanTag};
pub use icrc::{DONT_FRAGMENT, IcrcStart, IcrcStarts, check, close, icrc, recover_id, seal};
pub use opcode::{Class, ExtHeader, Opcode, Operation, PayloadRule, Support};
pub use outer::{
    Outer, OuterError, OuterIp, datagram_source_port, parse_ethernet, parse_ip, udp_source_port, write_ethernet,
    write_outer,
};
pub use packet::{
    AtomicEth, Body, Datagram, Feth, Packet, Place, Request, RequestOp, Response, ResponseOp, Reth, SendTail, Service,
    WritePart,
};
pub use parse::{MAX_MESSAGE_LEN, ParseError};
pub use run::{RunHeader, RunReader, RunWriter, is_inside};

#[cfg(test)]
mod tests;
