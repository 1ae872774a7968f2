//! The wire: opcodes, headers, packets and the invariant CRC.
//!
//! Owns every byte offset of RoCEv2. Behind this module no code looks at bytes: a received packet is a [`Packet`] whose
//! body says which state machine it is for, and what is sent is built from the same values. Never keeps state.

mod aeth;
mod flow;
mod packet;

pub use aeth::{Aeth, NakCode, Syndrome};
pub use flow::{Flow, IpFields, VlanTag};
pub use packet::{
    AtomicEth, Body, Datagram, Packet, Place, Request, RequestOp, Response, ResponseOp, Reth, SendTail, Service,
    WritePart,
};
