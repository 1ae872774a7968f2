//! What a node's program did, read off the packets that its QP sent and the answers that it got.
//!
//! Owns the way from captured request packets back to work requests, and each one's fate. Never runs an endpoint.

use std::collections::BTreeMap;

use uroce::types::{Psn, QKey, Qpn};
use uroce::verbs::{FlushPlacement, FlushScope, Operation, Remote, WcStatus};
use uroce::wire::{Body, NakCode, Packet, RequestOp, ResponseOp, SendTail, Syndrome, WritePart};

use super::capture::{Capture, Link, Node};

/// A work request that the capture shows.
#[derive(Clone, Debug)]
pub(super) struct Posted {
    /// The place in the capture of the first packet that needs it posted.
    pub(super) at: usize,
    pub(super) first: Psn,
    pub(super) packets: u32,
    pub(super) operation: Operation,
    /// Bytes sent.
    pub(super) payload: Vec<u8>,
    /// Bytes that are asked for: READs and atomics.
    pub(super) wanted: u32,
    /// Bytes that come back: READ data, or the 8 of an atomic as a program reads them.
    pub(super) answer: Vec<u8>,
    /// Datagrams: where to.
    pub(super) destination: Option<(Qpn, QKey)>,
    /// How it ended.
    pub(super) status: WcStatus,
}

impl Posted {
    /// Whether it takes a receive of the peer.
    pub(super) fn takes_receive(&self) -> bool {
        matches!(
            self.operation,
            Operation::Send | Operation::SendImm(_) | Operation::SendInvalidate(_) | Operation::WriteImm(..)
        )
    }
}

/// The work requests that `node` posted on `link`, in order.
pub(super) fn posted(capture: &Capture, link: &Link, node: Node) -> Vec<Posted> {
    let first = link.end(node).first_psn;
    let mut packets: BTreeMap<u32, (usize, Packet<'_>)> = BTreeMap::new();
    for (at, packet) in capture.sent_by(link, node).filter(|(_, p)| !matches!(p.body, Body::Response(_))) {
        packets.entry(packet.psn.distance_from(first).unsigned_abs()).or_insert((at, packet));
    }
    let answers = answers(capture, link, node);
    let mut all = Vec::new();
    let mut offset = 0;
    while let Some(one) = message(&packets, offset, link, first, &answers) {
        offset += one.packets;
        all.push(one);
    }
    assert_eq!(packets.range(offset..).count(), 0, "{}: a gap at PSN {offset}", capture.fixture.name);
    // Posted in PSN order: a later one that is seen earlier, where the wire reorders, was posted behind all before it.
    for i in (1..all.len()).rev() {
        all[i - 1].at = all[i - 1].at.min(all[i].at);
    }
    fates(&mut all, capture, link, node);
    all
}

/// The data that came back, by PSN. Repeats carry the same.
fn answers(capture: &Capture, link: &Link, node: Node) -> BTreeMap<u32, Vec<u8>> {
    let mut all = BTreeMap::new();
    for (_, packet) in capture.sent_by(link, node.other()) {
        let Body::Response(response) = &packet.body else { continue };
        let data = match response.op {
            ResponseOp::Acknowledge(_) => continue,
            ResponseOp::AtomicAcknowledge(_, original) => original.to_ne_bytes().to_vec(),
            _ => response.payload.to_vec(),
        };
        all.entry(packet.psn.get()).or_insert(data);
    }
    all
}

/// The message whose first packet is `offset` PSNs behind `first`.
fn message(
    packets: &BTreeMap<u32, (usize, Packet<'_>)>,
    offset: u32,
    link: &Link,
    first: Psn,
    answers: &BTreeMap<u32, Vec<u8>>,
) -> Option<Posted> {
    let (mut at, mut payload, mut beginning) = (usize::MAX, Vec::new(), None);
    for count in 1.. {
        let (seen, packet) = packets.get(&(offset + count - 1))?;
        at = at.min(*seen);
        payload.extend_from_slice(packet.payload());
        let (operation, ends, destination) = operation(packet, &mut beginning);
        if !ends {
            continue;
        }
        let (wanted, psns) = match packet.body {
            Body::Request(r) => match r.op {
                RequestOp::Read(reth) => (reth.length, link.mtu.packets_for(reth.length)),
                RequestOp::CompareSwap(_) | RequestOp::FetchAdd(_) => (8, 1),
                _ => (0, count),
            },
            _ => (0, count),
        };
        let first = first.plus(offset);
        let answer = (0..psns).filter_map(|i| answers.get(&first.plus(i).get())).flatten().copied().collect();
        let status = WcStatus::Success;
        return Some(Posted { at, first, packets: psns, operation, payload, wanted, answer, destination, status });
    }
    None
}

/// What the packet says of its work request, whether it is its last, and where a datagram goes. `beginning` keeps the
/// place of a WRITE, which its first packet names and its last does not.
fn operation(packet: &Packet<'_>, beginning: &mut Option<Remote>) -> (Operation, bool, Option<(Qpn, QKey)>) {
    let request = match &packet.body {
        Body::Request(request) => request,
        Body::Datagram(d) => {
            let operation = d.imm.map_or(Operation::Send, Operation::SendImm);
            return (operation, true, Some((packet.dest_qp, d.qkey)));
        }
        other => panic!("no request: {other:?}"),
    };
    let ends = request.op.place().ends();
    let operation = match request.op {
        RequestOp::Send(_, SendTail::None) => Operation::Send,
        RequestOp::Send(_, SendTail::Imm(imm)) => Operation::SendImm(imm),
        RequestOp::Send(_, SendTail::Invalidate(rkey)) => Operation::SendInvalidate(rkey),
        RequestOp::Write(part) => {
            if let WritePart::First(reth) | WritePart::Only(reth, _) = part {
                *beginning = Some(Remote { addr: reth.addr, rkey: reth.rkey });
            }
            let remote = beginning.expect("a WRITE begins with its RETH");
            part.imm().map_or(Operation::Write(remote), |imm| Operation::WriteImm(remote, imm))
        }
        RequestOp::Read(reth) => Operation::Read(Remote { addr: reth.addr, rkey: reth.rkey }),
        RequestOp::CompareSwap(eth) => Operation::CompareSwap {
            remote: Remote { addr: eth.addr, rkey: eth.rkey },
            compare: eth.compare,
            swap: eth.swap_add,
        },
        RequestOp::FetchAdd(eth) => {
            Operation::FetchAdd { remote: Remote { addr: eth.addr, rkey: eth.rkey }, add: eth.swap_add }
        }
        RequestOp::AtomicWrite(reth) => Operation::AtomicWrite(Remote { addr: reth.addr, rkey: reth.rkey }),
        RequestOp::Flush(feth, reth) => Operation::Flush {
            remote: Remote { addr: reth.addr, rkey: reth.rkey },
            length: reth.length,
            placement: match feth.placement {
                1 => FlushPlacement::Global,
                2 => FlushPlacement::Persistent,
                _ => FlushPlacement::Both,
            },
            scope: if feth.scope == 1 { FlushScope::Region } else { FlushScope::Range },
        },
    };
    (operation, ends, None)
}

/// A NAK that ends the QP, or an RNR NAK that nothing follows, fails the work request that it names; those behind it
/// are flushed.
fn fates(all: &mut [Posted], capture: &Capture, link: &Link, node: Node) {
    let Some((psn, status)) = verdict(capture, link, node) else { return };
    let mut failed = false;
    for one in all {
        if psn.is_within(one.first, one.packets) {
            one.status = status;
            failed = true;
        } else if failed {
            one.status = WcStatus::WorkRequestFlushed;
        }
    }
}

/// The last answer that `node` got, if it is one that fails a work request.
fn verdict(capture: &Capture, link: &Link, node: Node) -> Option<(Psn, WcStatus)> {
    let (_, last) = capture.sent_by(link, node.other()).filter(|(_, p)| matches!(p.body, Body::Response(_))).last()?;
    let Body::Response(response) = last.body else { return None };
    let ResponseOp::Acknowledge(aeth) = response.op else { return None };
    let status = match aeth.syndrome {
        Syndrome::RnrNak(_) => WcStatus::RnrRetryExceeded,
        Syndrome::Nak(NakCode::InvalidRequest) => WcStatus::RemoteInvalidRequest,
        Syndrome::Nak(NakCode::RemoteAccessError) => WcStatus::RemoteAccess,
        Syndrome::Nak(NakCode::RemoteOperationalError) => WcStatus::RemoteOperation,
        _ => return None,
    };
    Some((last.psn, status))
}

/// The place in the capture behind which the receive was posted that a peer had to wait for: its last RNR NAK. The PSN
/// is that of the message which waited.
pub(super) fn late_receive(capture: &Capture, link: &Link, node: Node) -> Option<(usize, Psn)> {
    let rnr = |p: &Packet<'_>| match p.body {
        Body::Response(r) => match r.op {
            ResponseOp::Acknowledge(aeth) => matches!(aeth.syndrome, Syndrome::RnrNak(_)),
            _ => false,
        },
        _ => false,
    };
    capture.sent_by(link, node).filter(|(_, p)| rnr(p)).last().map(|(at, p)| (at, p.psn))
}
