//! Datagrams: UD and QP1.
//!
//! Owns the single-packet send and receive paths. Never answers and never retries. Source: IBTA Vol 1 9.8.3, paraphrased.

use core::net::IpAddr;

use super::Ident;
use super::assembly::ReceiveQueue;
use super::cx::{Ah, Cx};
use super::emit::{BurstWriter, EmitError};
use super::requester::SendFailure;
use super::send_queue::{SendQueue, Wqe, wc_opcode};
use crate::burst::{TxBurst, TxRoom, choose_source_port};
use crate::counters::DropReason;
use crate::types::{Imm, PKey, PathMtu, Psn, QKey};
use crate::verbs::{FailureKind, Operation, SendHead, UdDestination, WcData, WcOpcode, WcStatus, WorkCompletion};
use crate::wire::{self, Body, Datagram, Flow, IcrcStarts, IpFields, Packet};

/// Bytes before the payload of a received datagram.
pub const GRH_LEN: usize = 40;

/// What a QP writes into the headers of its datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramHeader {
    /// In place of a privileged one of a work request.
    pub(crate) qkey: QKey,
    /// Where the address handle names none.
    pub(crate) pkey: PKey,
    pub(crate) mig_req: bool,
}

/// The send side of a datagram QP.
#[derive(Debug)]
pub(crate) struct DatagramSender {
    pub(crate) queue: SendQueue,
    icrcs: IcrcStarts,
    psn: Psn,
}

impl DatagramSender {
    pub(crate) fn new(queue: SendQueue) -> Self {
        Self { queue, icrcs: IcrcStarts::default(), psn: Psn::ZERO }
    }

    pub(crate) fn start(&mut self, psn: Psn) {
        self.psn = psn;
    }

    pub(crate) fn psn(&self) -> Psn {
        self.psn
    }

    /// Writes the next datagrams, as many as go the same way and fit one burst, and completes them.
    ///
    /// What fails behind datagrams that were written fails again, alone, when it is asked for next.
    pub(crate) fn poll_transmit(
        &mut self,
        id: &Ident,
        with: DatagramHeader,
        cx: &mut Cx<'_>,
        room: &mut TxRoom<'_>,
    ) -> Result<Option<TxBurst>, SendFailure> {
        let Some(first) = self.next() else { return Ok(None) };
        let flow = flow_of(&first, id, cx)?.0;
        let mut burst = BurstWriter::new(room, &flow);
        loop {
            match self.append(id, with, cx, &flow, &mut burst) {
                Ok(true) if burst.is_open() => {}
                Err(failure) if burst.is_empty() => return Err(failure),
                _ => break,
            }
        }
        Ok(burst.finish())
    }

    /// The work request whose turn it is: the only one in the window.
    fn next(&mut self) -> Option<Wqe> {
        if let Some(wqe) = self.queue.window().front() {
            return Some(*wqe);
        }
        // The one packet of a datagram; the size of the path does not matter here.
        self.queue.pull(self.psn, PathMtu::B4096).copied()
    }

    /// Adds the next datagram to a burst of `flow`; false when there is none, or it does not fit.
    fn append(
        &mut self,
        id: &Ident,
        with: DatagramHeader,
        cx: &mut Cx<'_>,
        flow: &Flow,
        burst: &mut BurstWriter<'_, '_>,
    ) -> Result<bool, SendFailure> {
        let Some(wqe) = self.next() else { return Ok(false) };
        let (own, ah, destination) = flow_of(&wqe, id, cx)?;
        if own != *flow {
            return Ok(false);
        }
        let imm = match wqe.head.operation {
            Operation::SendImm(imm) => Some(imm),
            _ => None,
        };
        let qkey = if destination.qkey.is_privileged() && !is_gsi(id) { with.qkey } else { destination.qkey };
        let datagram = Datagram { qkey, src_qp: id.qpn, imm, payload: &[] };
        let packet = Packet {
            solicited: wqe.head.flags.solicited,
            mig_req: with.mig_req,
            ..Packet::new(destination.qpn, ah.pkey.unwrap_or(with.pkey), self.psn, Body::Datagram(datagram))
        };
        let (queue, mrs) = (&self.queue, &*cx.mrs);
        let len = wqe.head.length as usize;
        if !burst.takes(&packet, len) {
            return Ok(false);
        }
        let fail = |status, kind| SendFailure { status, kind, psn: wqe.first };
        match burst.push(&mut self.icrcs, &packet, len, |out, crc| queue.gather(mrs, id.pd, &wqe, 0, out, crc)) {
            Ok(()) => {
                self.psn = self.psn.next();
                cx.counters.rdma_sends += 1;
                self.complete(&wqe, id, cx);
                Ok(true)
            }
            Err(EmitError::Payload(_)) => Err(fail(WcStatus::LocalProtection, FailureKind::LocalElement)),
            Err(EmitError::NoRoom) => {
                cx.counters.send_err += 1;
                Err(fail(WcStatus::LocalQpOperation, FailureKind::Unsendable))
            }
        }
    }

    fn complete(&mut self, wqe: &Wqe, id: &Ident, cx: &mut Cx<'_>) {
        self.queue.pop();
        if wqe.head.flags.signaled || id.signal_all {
            let wc = WorkCompletion { opcode: wqe.opcode(), ..id.completion(wqe.head.wr_id, WcStatus::Success, 0) };
            cx.complete(id.send_cq, wc);
        }
    }

    /// Completes the datagram in hand with an error, and flushes the rest.
    pub(crate) fn fail(&mut self, failure: &SendFailure, id: &Ident, cx: &mut Cx<'_>) {
        if let Some(wqe) = self.queue.pop() {
            let wc = id.completion(wqe.head.wr_id, failure.status, failure.kind as u32);
            cx.complete(id.send_cq, WorkCompletion { opcode: wqe.opcode(), ..wc });
        }
        self.flush(id, cx);
    }

    /// Forgets everything posted, without completions (RESET).
    pub(crate) fn discard(&mut self) {
        while self.queue.pop().is_some() || self.queue.discard().is_some() {}
    }

    pub(crate) fn flush(&mut self, id: &Ident, cx: &mut Cx<'_>) {
        // One that was taken up and had no place in the last burst.
        while let Some(wqe) = self.queue.pop() {
            complete_flushed(&wqe.head, id, cx);
        }
        while let Some(head) = self.queue.discard() {
            complete_flushed(&head, id, cx);
        }
    }
}

/// The way of a datagram, with its address handle and destination.
fn flow_of(wqe: &Wqe, id: &Ident, cx: &Cx<'_>) -> Result<(Flow, Ah, UdDestination), SendFailure> {
    let (status, kind) = (WcStatus::LocalQpOperation, FailureKind::Unsendable);
    let failure = SendFailure { status, kind, psn: wqe.first };
    let destination = wqe.head.destination.ok_or(failure)?;
    let ah = cx.ahs.get(destination.ah).filter(|ah| ah.pd == id.pd).copied().ok_or(failure)?;
    let formula = || choose_source_port(cx.source_ports, wire::datagram_source_port(id.qpn));
    let src_port = ah.source_port.unwrap_or_else(formula);
    Ok((Flow { src_port, ..ah.flow }, ah, destination))
}

fn complete_flushed(head: &SendHead, id: &Ident, cx: &mut Cx<'_>) {
    let (status, kind) = (WcStatus::WorkRequestFlushed, FailureKind::Flushed as u32);
    let opcode = wc_opcode(&head.operation);
    cx.complete(id.send_cq, WorkCompletion { opcode, ..id.completion(head.wr_id, status, kind) });
}

fn is_gsi(id: &Ident) -> bool {
    id.qp_type == crate::verbs::QpType::Gsi
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramFrom<'a> {
    pub(crate) flow: &'a Flow,
    pub(crate) ip: IpFields,
    /// Bytes of the segment, BTH to ICRC, for the rebuilt IP header.
    pub(crate) segment: usize,
    pub(crate) solicited: bool,
}

/// Takes a datagram into the next receive WQE. One that does not fit leaves the WQE for the next.
pub(crate) fn receive(
    rq: &mut ReceiveQueue,
    from: &DatagramFrom<'_>,
    datagram: &Datagram<'_>,
    id: &Ident,
    cx: &mut Cx<'_>,
) -> Result<(), DropReason> {
    // A datagram is one packet, which no path MTU lets be longer than 4096 bytes, though a jumbo frame could.
    if datagram.payload.len() > PathMtu::B4096.bytes() {
        return Err(DropReason::Refused);
    }
    if !rq.hold(cx) {
        return Err(DropReason::NoReceiveWqe);
    }
    let total = GRH_LEN + datagram.payload.len();
    let room = rq.held().map_or(0, |h| h.length as usize);
    if total > room {
        return Err(DropReason::ReceiveTooSmall);
    }
    let grh = grh_area(from);
    let placed = cx
        .mrs
        .scatter(rq.pd(), rq.sges(), 0, &grh)
        .and_then(|()| cx.mrs.scatter(rq.pd(), rq.sges(), GRH_LEN as u64, datagram.payload));
    let Some(head) = rq.finish() else { return Err(DropReason::NoReceiveWqe) };
    let status = if placed.is_ok() { WcStatus::Success } else { WcStatus::LocalProtection };
    let vendor = if placed.is_ok() { 0 } else { FailureKind::LocalElement as u32 };
    let wc = WorkCompletion {
        opcode: WcOpcode::Recv,
        byte_len: u32::try_from(total).unwrap_or(u32::MAX),
        data: datagram.imm.map_or(WcData::None, |imm: Imm| WcData::Imm(imm)),
        src_qp: datagram.src_qp,
        grh: true,
        solicited: from.solicited,
        ..id.completion(head.wr_id, status, vendor)
    };
    cx.counters.rdma_recvs += 1;
    cx.complete(id.recv_cq, wc);
    Ok(())
}

/// The 40 bytes before the payload: the IPv6 header, or 20 zero bytes and the IPv4 header.
fn grh_area(from: &DatagramFrom<'_>) -> [u8; GRH_LEN] {
    let mut area = [0; GRH_LEN];
    let mut header = [0; 48];
    // The buffer holds the longer of the two headers.
    let len = wire::write_outer(from.flow, from.ip.id, from.segment, &mut header).unwrap_or(0);
    let (to, ip_len) = match from.flow.dst {
        IpAddr::V4(_) => (20, 20),
        IpAddr::V6(_) => (0, 40),
    };
    if let (Some(out), Some(ip)) = (area.get_mut(to..to + ip_len), header.get(..ip_len.min(len))) {
        out.copy_from_slice(ip);
    }
    area
}
