//! Runs: the packets inside a message that leave, or arrive, together.
//!
//! Owns how far a run goes: as far as packet by packet nothing would be decided otherwise, no answer asked for and no
//! message ended; and the book-keeping, once for all of them. What a run has not, each packet's own way has: `append` and
//! `on_request` and what they call. So a run is refused without a reason. Never looks at an ICRC.

use super::answers::ReadAnswer;
use super::assembly::{Assembly, Message};
use super::cx::Cx;
use super::emit::BurstWriter;
use super::path::Path;
use super::requester::{Requester, data_op};
use super::send_queue::Wqe;
use super::{Ident, Qp, Receiver, Sender};
use crate::mem::{MrTable, Stretch};
use crate::types::Psn;
use crate::verbs::{AccessFlags, Operation, QpState};
use crate::wire::{
    Body, Flow, IcrcStarts, Packet, Place, Request, RequestOp, Response, ResponseOp, Service, WritePart,
};

impl Requester {
    /// Adds a run of the work request at the cursor to the burst, if it stands inside a message: packets that are neither
    /// its first nor its last, and of which none asks for an answer.
    #[inline]
    pub(super) fn append_run(&mut self, id: &Ident, path: &Path, cx: &mut Cx<'_>, burst: &mut BurstWriter<'_, '_>) {
        // Most messages have no inside.
        if burst.takes_runs()
            && let Some(wqe) = self.queue.window().get(self.cursor)
            && wqe.packets > 2
            && self.cursor_psn != wqe.first
        {
            self.append_inside(id, path, cx, burst);
        }
    }

    fn append_inside(&mut self, id: &Ident, path: &Path, cx: &mut Cx<'_>, burst: &mut BurstWriter<'_, '_>) {
        let Some(wqe) = self.queue.window().get(self.cursor) else { return };
        let index = self.cursor_psn.distance_from(wqe.first).unsigned_abs();
        let most = self.most_inside(wqe, index);
        if most == 0 || self.fail_poisoned_head().is_err() {
            return;
        }
        let mtu = path.mtu.bytes();
        let range = (u64::from(index) * mtu as u64, most as usize * mtu);
        let Some(from) = cx.mrs.local_stretch(id.pd, self.queue.sges_of(wqe), range, false) else { return };
        let body = Body::Request(Request { service: self.service, op: data_op(wqe, Place::Middle), payload: &[] });
        let packet = Packet { mig_req: path.mig_req, ..Packet::new(path.dest_qpn, path.pkey, self.cursor_psn, body) };
        let written = burst.push_run(&mut self.icrcs, &packet, mtu, from.len() / mtu, from);
        if written > 0 {
            self.sent_inside(written, cx);
        }
    }

    /// How many packets of `wqe` from its packet `index` on may go, none its last and none asking for an answer.
    fn most_inside(&self, wqe: &Wqe, index: u32) -> u32 {
        let operation = &wqe.head.operation;
        let is_message = !operation.is_local() && !operation.awaits_response();
        let is_eager = !self.probing && !self.credits.is_limited(operation);
        if !is_message || !is_eager || wqe.head.inline > 0 || wqe.poisoned.is_some() {
            return 0;
        }
        let inside = wqe.packets.saturating_sub(1 + index);
        if self.service == Service::Uc {
            return inside;
        }
        let unasked = self.window.ack_every.saturating_sub(1 + self.since_ack_req);
        inside.min(unasked).min(self.window.room_before_last(self.unacked(), self.in_flight()))
    }

    /// Book-keeping after a run was written, as after a packet.
    fn sent_inside(&mut self, packets: u32, cx: &mut Cx<'_>) {
        let first = self.cursor_psn;
        self.cursor_psn = first.plus(packets);
        let again = self.sent_end.distance_from(first).max(0).unsigned_abs().min(packets);
        cx.counters.retransmitted_pkts += u64::from(again);
        if self.cursor_psn.distance_from(self.sent_end) > 0 {
            self.sent_end = self.cursor_psn;
        }
        self.since_ack_req = self.since_ack_req.saturating_add(packets);
        self.wait_for_answer(first, cx.now);
    }
}

/// Where a run that is received puts its payloads.
#[derive(Clone, Copy, Debug)]
pub struct Landing<'a> {
    /// The place of the payloads, one behind the other.
    pub place: Stretch<'a>,
    /// Packets that fit there.
    pub packets: usize,
}

impl<'a> Landing<'a> {
    fn new(place: Stretch<'a>, mtu: usize) -> Option<Self> {
        let packets = place.len().checked_div(mtu)?;
        (packets > 0).then_some(Self { place, packets })
    }
}

impl Qp {
    /// Where `packet`, which stands inside a message, and those go that follow it and differ in nothing but the PSN: all that
    /// is checked of a packet but its ICRC was checked then. `None`: there is something to be done that a run does not.
    /// Nothing changes by the question, for its ICRC may yet turn out wrong.
    #[must_use]
    pub fn landing<'m>(&self, packet: &Packet<'_>, flow: &Flow, mrs: &'m MrTable) -> Option<Landing<'m>> {
        let is_told = self.established || self.state != QpState::Rtr;
        if !self.state.receives() || !is_told || packet.ack_req || !self.is_on_path(packet.pkey, flow) {
            return None;
        }
        let id = &self.id;
        match (&packet.body, &self.receiver) {
            (Body::Request(request), Receiver::Rc(rc))
                if request.service == Service::Rc && rc.expected == packet.psn =>
            {
                rc.assembly.landing(request, id, mrs)
            }
            (Body::Request(request), Receiver::Uc(uc))
                if request.service == Service::Uc && uc.expected() == packet.psn =>
            {
                uc.assembly.landing(request, id, mrs)
            }
            (Body::Response(response), Receiver::Rc(_)) if self.state != QpState::Rtr => match &self.sender {
                Sender::Connected(requester) => requester.landing(packet.psn, response, id, mrs),
                Sender::Datagram(_) => None,
            },
            _ => None,
        }
    }

    /// The first `packets` of a run that begins with `packet` are in their place.
    pub fn landed(&mut self, packet: &Packet<'_>, packets: u32, cx: &mut Cx<'_>) {
        let bytes = u64::from(packets) * self.id.mtu_bytes() as u64;
        match (&packet.body, &mut self.receiver, &mut self.sender) {
            (Body::Request(_), Receiver::Rc(rc), _) => {
                let last = packet.psn.plus(packets.saturating_sub(1));
                rc.assembly.advance(bytes);
                rc.expected = last.next();
                (rc.nak_sent, rc.ack_psn) = (false, Some(last));
                rc.rnr.took(packet.psn);
            }
            (Body::Request(_), Receiver::Uc(uc), _) => {
                uc.assembly.advance(bytes);
                uc.start(packet.psn.plus(packets));
            }
            (_, _, Sender::Connected(requester)) => {
                requester.una = packet.psn.plus(packets);
                requester.progressed(cx.now);
            }
            _ => {}
        }
    }
}

impl Assembly {
    fn landing<'m>(&self, request: &Request<'_>, id: &Ident, mrs: &'m MrTable) -> Option<Landing<'m>> {
        let mtu = id.mtu_bytes();
        if request.payload.len() != mtu || self.check_operation(&request.op).is_err() {
            return None;
        }
        let whole = |bytes: u64| bytes - bytes % mtu as u64;
        let place = match (&request.op, self.message) {
            (RequestOp::Write(WritePart::Middle), Message::Write { reth, done }) => {
                // The last byte is for the packet that ends the message.
                let len = whole(u64::from(reth.length).checked_sub(done + 1)?);
                let range = (reth.addr.wrapping_add(done), len);
                mrs.remote_stretch(id.pd, id.handle, reth.rkey, range, AccessFlags::REMOTE_WRITE).ok()?
            }
            (RequestOp::Send(Place::Middle, _), Message::Send { received }) => {
                let room = u64::from(self.rq.held()?.length).checked_sub(received)?;
                let range = (received, usize::try_from(whole(room)).ok()?);
                mrs.local_stretch(self.rq.pd(), self.rq.sges(), range, true)?
            }
            _ => return None,
        };
        Landing::new(place, mtu)
    }

    /// Packets of `bytes` bytes inside the message in progress were placed.
    fn advance(&mut self, bytes: u64) {
        match &mut self.message {
            Message::Send { received } => *received += bytes,
            Message::Write { done, .. } => *done += bytes,
            Message::None => {}
        }
    }
}

impl Requester {
    fn landing<'m>(&self, psn: Psn, response: &Response<'_>, id: &Ident, mrs: &'m MrTable) -> Option<Landing<'m>> {
        let mtu = id.mtu_bytes();
        let wqe = self.queue.window().front()?;
        let is_next = psn == self.una && matches!(wqe.head.operation, Operation::Read(_));
        if !is_next || response.op != ResponseOp::ReadMiddle || response.payload.len() != mtu {
            return None;
        }
        self.fail_poisoned_head().ok()?;
        let index = psn.distance_from(wqe.first).unsigned_abs();
        // The packet that ends the answer to a request, and it ends at the latest with the work request, is none of a run.
        let in_request = self.window.read_psns - 1 - index % self.window.read_psns;
        let in_flight = self.sent_end.distance_from(psn).max(0).unsigned_abs();
        let most = wqe.packets.saturating_sub(1 + index).min(in_request).min(in_flight);
        let range = (u64::from(index) * mtu as u64, most as usize * mtu);
        Landing::new(mrs.local_stretch(id.pd, self.queue.sges_of(wqe), range, true)?, mtu)
    }
}

/// Whether READ data has come to where a run may begin: at neither of the answer's ends.
#[inline]
pub(super) fn is_read_inside(read: &ReadAnswer) -> bool {
    read.packets > 2 && read.next != read.first && read.next.next() != read.first.plus(read.packets)
}

/// Adds a run of READ data to the burst. Returns how many packets it has.
pub(super) fn write_read_run(
    read: &ReadAnswer,
    id: &Ident,
    path: &Path,
    cx: &Cx<'_>,
    (burst, icrcs): (&mut BurstWriter<'_, '_>, &mut IcrcStarts),
) -> u32 {
    let index = read.next.distance_from(read.first).unsigned_abs();
    let inside = read.packets.saturating_sub(1 + index);
    let mtu = id.mtu_bytes();
    let (offset, len) = (u64::from(index) * mtu as u64, u64::from(inside) * mtu as u64);
    let range = (read.addr.wrapping_add(offset), len);
    let from = cx.mrs.remote_stretch(id.pd, id.handle, read.rkey, range, AccessFlags::REMOTE_READ);
    let Ok(from) = from else { return 0 };
    let body = Body::Response(Response { op: ResponseOp::ReadMiddle, payload: &[] });
    let packet = Packet { mig_req: path.mig_req, ..Packet::new(path.dest_qpn, path.pkey, read.next, body) };
    burst.push_run(icrcs, &packet, mtu, inside as usize, from)
}
