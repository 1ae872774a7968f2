//! What a failed request wanted, for the people who ask why it failed.
//!
//! Owns the reading of work requests and packets. Decides nothing.

use super::send_queue::SendQueue;
use crate::types::Psn;
use crate::verbs::{Remote, RequestFacts, WcOpcode};
use crate::wire::{Body, Packet, RequestOp, WritePart};

/// Of the send work request that `psn` belongs to, or of the oldest.
pub(super) fn of_send(queue: &SendQueue, psn: Psn) -> Option<RequestFacts> {
    let window = queue.window();
    let holds =
        |first: Psn, packets: u32| u32::try_from(psn.distance_from(first)).is_ok_and(|distance| distance < packets);
    let wqe = window.iter().find(|w| holds(w.first, w.packets)).or_else(|| window.front())?;
    Some(RequestFacts::of(wqe.opcode(), &wqe.head.operation, wqe.head.length))
}

/// Of the peer's request in `packet`, if it names memory.
pub(super) fn of_peer(packet: &Packet<'_>) -> Option<RequestFacts> {
    let Body::Request(request) = &packet.body else { return None };
    let (opcode, addr, rkey, length) = match &request.op {
        RequestOp::Write(WritePart::First(reth) | WritePart::Only(reth, _)) => {
            (WcOpcode::RdmaWrite, reth.addr, reth.rkey, reth.length)
        }
        RequestOp::Read(reth) => (WcOpcode::RdmaRead, reth.addr, reth.rkey, reth.length),
        RequestOp::Flush(_, reth) => (WcOpcode::Flush, reth.addr, reth.rkey, reth.length),
        RequestOp::AtomicWrite(reth) => (WcOpcode::AtomicWrite, reth.addr, reth.rkey, reth.length),
        RequestOp::CompareSwap(eth) => (WcOpcode::CompareSwap, eth.addr, eth.rkey, 8),
        RequestOp::FetchAdd(eth) => (WcOpcode::FetchAdd, eth.addr, eth.rkey, 8),
        RequestOp::Send(..) | RequestOp::Write(_) => return None,
    };
    Some(RequestFacts { opcode, remote: Some(Remote { addr, rkey }), length })
}
