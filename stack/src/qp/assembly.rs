//! Assembling incoming SEND and WRITE messages, for RC and UC alike.
//!
//! Owns the message in progress and the receive WQE it fills, and the checks of opcode sequence, operation, length and
//! access. Each check is a step of its own that returns a [`Refusal`]; RC turns it into a NAK, UC drops the message.
//! Sources: IBTA Vol 1 9.7.4 and 9.8.2, paraphrased.

use super::Ident;
use super::cx::Cx;
use crate::counters::DropReason;
use crate::srq::RecvConsumer;
use crate::types::{Imm, Rkey};
use crate::verbs::{
    AccessFlags, AsyncEvent, FailureKind, FlushScope, PdHandle, RecvHead, Sge, SrqHandle, WcData, WcOpcode, WcStatus,
    WorkCompletion,
};
use crate::wire::{Feth, MAX_MESSAGE_LEN, NakCode, Place, Request, RequestOp, Reth, SendTail, WritePart};

/// Why a request packet is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Dropped in silence, and counted.
    Drop(DropReason),
    /// Executed before.
    Duplicate,
    /// No receive WQE.
    Rnr,
    /// NAK, and the end of the QP unless it is a sequence error.
    Nak {
        /// On the wire.
        code: NakCode,
        /// Status of the receive WQE that is held, where one is; flushed otherwise.
        local: Option<WcStatus>,
    },
}

impl Refusal {
    pub(crate) const INVALID: Self = Self::Nak { code: NakCode::InvalidRequest, local: None };
    pub(crate) const ACCESS: Self = Self::Nak { code: NakCode::RemoteAccessError, local: None };
    pub(crate) const OPERATIONAL: Self = Self::Nak { code: NakCode::RemoteOperationalError, local: None };
}

/// What a FLUSH asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flush {
    /// The rights that it needs, of the QP and of the key.
    pub(crate) rights: AccessFlags,
    pub(crate) scope: FlushScope,
}

impl Flush {
    /// The meaning of its header; a placement or selectivity that nobody defined is an invalid request.
    pub(crate) fn of(feth: &Feth) -> Result<Self, Refusal> {
        let rights = match feth.placement {
            1 => AccessFlags::FLUSH_GLOBAL,
            2 => AccessFlags::FLUSH_PERSISTENT,
            3 => AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT,
            _ => return Err(Refusal::INVALID),
        };
        let scope = match feth.scope {
            0 => FlushScope::Range,
            1 => FlushScope::Region,
            _ => return Err(Refusal::INVALID),
        };
        Ok(Self { rights, scope })
    }
}

/// The receive side's source of WQEs, and the one that is being filled.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    own: Option<RecvConsumer>,
    srq: Option<SrqHandle>,
    /// Whose regions its elements may name: the QP's domain, or the SRQ's, which may be another.
    pd: PdHandle,
    held: Option<RecvHead>,
    sges: Vec<Sge>,
}

impl ReceiveQueue {
    /// `sges` has room for the elements of a receive.
    pub(crate) fn new(own: Option<RecvConsumer>, srq: Option<SrqHandle>, pd: PdHandle, sges: Vec<Sge>) -> Self {
        Self { own, srq, pd, held: None, sges }
    }

    /// The QP's own queue, and the room for elements.
    pub(super) fn into_parts(self) -> (Option<RecvConsumer>, Vec<Sge>) {
        (self.own, self.sges)
    }

    /// Whether a WQE is held, after taking one if none was.
    pub(crate) fn hold(&mut self, cx: &mut Cx<'_>) -> bool {
        if self.held.is_some() {
            return true;
        }
        if let Some(ring) = &mut self.own {
            self.held = ring.pop(&mut self.sges, &mut []);
        } else if let Some(handle) = self.srq
            && let Some(srq) = cx.srqs.get_mut(handle)
            && let Some((head, limit_passed)) = srq.take(&mut self.sges)
        {
            self.held = Some(head);
            if limit_passed {
                cx.events.push(AsyncEvent::SrqLimitReached(handle));
            }
        }
        cx.counters.out_of_buffer += u64::from(self.held.is_none());
        self.held.is_some()
    }

    /// The protection domain of its elements.
    pub(crate) fn pd(&self) -> PdHandle {
        self.pd
    }

    pub(crate) fn held(&self) -> Option<&RecvHead> {
        self.held.as_ref()
    }

    pub(crate) fn sges(&self) -> &[Sge] {
        let n = self.held.map_or(0, |h| usize::from(h.num_sge));
        self.sges.get(..n).unwrap_or(&[])
    }

    /// The held WQE is done.
    pub(crate) fn finish(&mut self) -> Option<RecvHead> {
        let head = self.held.take()?;
        if let Some(ring) = &mut self.own {
            ring.release(1);
        }
        Some(head)
    }

    /// Receives that wait in the QP's own queue.
    pub(crate) fn waiting(&self) -> usize {
        self.own.as_ref().map_or(0, RecvConsumer::len) + usize::from(self.held.is_some())
    }

    /// Completes the held WQE, if there is one, with an error.
    pub(crate) fn fail_held(&mut self, status: WcStatus, kind: FailureKind, id: &Ident, cx: &mut Cx<'_>) {
        if let Some(head) = self.finish() {
            cx.complete(id.recv_cq, receive_error(id, head.wr_id, status, kind));
        }
    }

    /// Completes the held WQE with `local`, and every other one as flushed.
    pub(crate) fn flush(&mut self, local: Option<(WcStatus, FailureKind)>, id: &Ident, cx: &mut Cx<'_>) {
        let (status, kind) = local.unwrap_or((WcStatus::WorkRequestFlushed, FailureKind::Flushed));
        self.fail_held(status, kind, id, cx);
        while let Some(head) = self.own.as_mut().and_then(|ring| ring.pop(&mut self.sges, &mut [])) {
            if let Some(ring) = &mut self.own {
                ring.release(1);
            }
            let (status, kind) = (WcStatus::WorkRequestFlushed, FailureKind::Flushed);
            cx.complete(id.recv_cq, receive_error(id, head.wr_id, status, kind));
        }
    }

    /// Forgets the held WQE and everything posted, without completions (RESET).
    pub(crate) fn discard(&mut self) {
        self.finish();
        if let Some(ring) = &mut self.own {
            while ring.pop(&mut self.sges, &mut []).is_some() {
                ring.release(1);
            }
        }
    }
}

fn receive_error(id: &Ident, wr_id: u64, status: WcStatus, kind: FailureKind) -> WorkCompletion {
    WorkCompletion { opcode: WcOpcode::Recv, ..id.completion(wr_id, status, kind as u32) }
}

/// The message in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    None,
    Send { received: u64 },
    Write { reth: Reth, done: u64 },
}

/// What executing a data packet led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Executed {
    /// The message is complete.
    pub(crate) message_done: bool,
    /// The key that it named could not be invalidated: the QP goes to ERR behind the ACK.
    pub(crate) invalidate_failed: bool,
}

/// Incoming messages of a connected QP.
#[derive(Debug)]
pub(crate) struct Assembly {
    pub(crate) rq: ReceiveQueue,
    pub(super) message: Message,
    pub(crate) access: AccessFlags,
}

impl Assembly {
    pub(crate) fn new(rq: ReceiveQueue) -> Self {
        Self { rq, message: Message::None, access: AccessFlags::NONE }
    }

    /// Forgets the message in progress. A receive WQE that it held is used again from its start.
    pub(crate) fn abandon(&mut self) {
        self.message = Message::None;
    }

    /// Middle and Last only inside a message of their kind; First and Only not inside one.
    pub(crate) fn check_sequence(&self, op: &RequestOp) -> Result<(), Refusal> {
        let continues = !op.place().begins();
        let fits = match (&self.message, op) {
            (Message::None, _) => !continues,
            (Message::Send { .. }, RequestOp::Send(..)) | (Message::Write { .. }, RequestOp::Write(_)) => continues,
            _ => false,
        };
        if fits { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// Whether the QP allows the operation to its peer.
    pub(crate) fn check_operation(&self, op: &RequestOp) -> Result<(), Refusal> {
        let need = match op {
            RequestOp::Send(..) => AccessFlags::NONE,
            RequestOp::Write(_) => AccessFlags::REMOTE_WRITE,
            RequestOp::Read(_) => AccessFlags::REMOTE_READ,
            RequestOp::CompareSwap(_) | RequestOp::FetchAdd(_) => AccessFlags::REMOTE_ATOMIC,
            RequestOp::AtomicWrite(_) => AccessFlags::REMOTE_WRITE,
            RequestOp::Flush(feth, _) => Flush::of(feth)?.rights,
        };
        if self.access.contains(need) { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// A SEND needs a receive WQE at its first packet, a WRITE at the one that carries the immediate.
    pub(crate) fn check_receive(&mut self, op: &RequestOp, cx: &mut Cx<'_>) -> Result<(), Refusal> {
        let needed = match op {
            RequestOp::Send(..) => true,
            RequestOp::Write(part) => part.imm().is_some(),
            _ => false,
        };
        if !needed || self.rq.hold(cx) { Ok(()) } else { Err(Refusal::Rnr) }
    }

    /// Payload against path MTU, RETH length and room of the receive WQE.
    pub(crate) fn check_length(&self, request: &Request<'_>, mtu: usize) -> Result<(), Refusal> {
        let len = request.payload.len();
        let fits_place = match request.op.place() {
            Place::First | Place::Middle => len == mtu,
            Place::Last => len >= 1 && len <= mtu,
            Place::Only => len <= mtu,
        };
        if !fits_place {
            return Err(Refusal::INVALID);
        }
        if request.op.announced().is_some_and(|length| length > MAX_MESSAGE_LEN) {
            return Err(Refusal::INVALID);
        }
        let len = len as u64;
        match (&request.op, &self.message) {
            (RequestOp::Send(place, _), message) => {
                let received = match message {
                    Message::Send { received } if !place.begins() => *received,
                    _ => 0,
                };
                let room = self.rq.held().map_or(0, |h| u64::from(h.length));
                if received + len > room {
                    let local = Some(WcStatus::LocalLength);
                    return Err(Refusal::Nak { code: NakCode::InvalidRequest, local });
                }
                Ok(())
            }
            (RequestOp::Write(WritePart::First(reth)), _) if len < u64::from(reth.length) => Ok(()),
            (RequestOp::Write(WritePart::Only(reth, _)), _) if len == u64::from(reth.length) => Ok(()),
            (RequestOp::Write(WritePart::Middle), Message::Write { reth, done })
                if done + len < u64::from(reth.length) =>
            {
                Ok(())
            }
            (RequestOp::Write(WritePart::Last(_)), Message::Write { reth, done })
                if done + len == u64::from(reth.length) =>
            {
                Ok(())
            }
            (RequestOp::AtomicWrite(reth), _) if len == 8 && reth.length == 8 => Ok(()),
            (RequestOp::Write(_) | RequestOp::AtomicWrite(_), _) => Err(Refusal::INVALID),
            _ => Ok(()),
        }
    }

    /// Key and range of a WRITE, all of it, at its first packet. Zero length needs neither.
    #[inline]
    pub(crate) fn check_write_access(&self, op: &RequestOp, id: &Ident, cx: &Cx<'_>) -> Result<(), Refusal> {
        let RequestOp::Write(WritePart::First(reth) | WritePart::Only(reth, _)) = op else { return Ok(()) };
        if reth.length == 0 {
            return Ok(());
        }
        cx.mrs
            .remote(id.pd, id.handle, reth.rkey, reth.addr, reth.length.into(), AccessFlags::REMOTE_WRITE)
            .map(|_| ())
            .map_err(|_| Refusal::ACCESS)
    }

    /// Executes a checked SEND or WRITE packet.
    pub(crate) fn execute(
        &mut self,
        request: &Request<'_>,
        solicited: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Executed, Refusal> {
        match &request.op {
            RequestOp::Send(place, tail) => self.execute_send(*place, *tail, request.payload, solicited, id, cx),
            RequestOp::Write(part) => self.execute_write(part, request.payload, solicited, id, cx),
            _ => Err(Refusal::INVALID),
        }
    }

    fn execute_send(
        &mut self,
        place: Place,
        tail: SendTail,
        payload: &[u8],
        solicited: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Executed, Refusal> {
        let received = match self.message {
            Message::Send { received } if !place.begins() => received,
            _ => 0,
        };
        if cx.mrs.scatter(self.rq.pd(), self.rq.sges(), received, payload).is_err() {
            let local = Some(WcStatus::LocalProtection);
            return Err(Refusal::Nak { code: NakCode::RemoteOperationalError, local });
        }
        let received = received + payload.len() as u64;
        if !place.ends() {
            self.message = Message::Send { received };
            return Ok(Executed::default());
        }
        self.message = Message::None;
        let (data, invalidate_failed) = match tail {
            SendTail::None => (WcData::None, false),
            SendTail::Imm(imm) => (WcData::Imm(imm), false),
            SendTail::Invalidate(rkey) => self.invalidate(rkey, id, cx),
        };
        let status = if invalidate_failed { WcStatus::RemoteInvalidRequest } else { WcStatus::Success };
        self.finish(WcOpcode::Recv, status, received, data, solicited, id, cx)?;
        Ok(Executed { message_done: true, invalidate_failed })
    }

    fn invalidate(&self, rkey: Rkey, id: &Ident, cx: &mut Cx<'_>) -> (WcData, bool) {
        match cx.mrs.invalidate(id.pd, id.handle, rkey) {
            Ok(()) => (WcData::Invalidated(rkey), false),
            Err(_) => (WcData::None, true),
        }
    }

    fn execute_write(
        &mut self,
        part: &WritePart,
        payload: &[u8],
        solicited: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Executed, Refusal> {
        let (reth, done) = match (part, self.message) {
            (WritePart::First(reth) | WritePart::Only(reth, _), _) => (*reth, 0),
            (_, Message::Write { reth, done }) => (reth, done),
            _ => return Err(Refusal::INVALID),
        };
        let len = payload.len() as u64;
        if len > 0 {
            // Looked up anew for each packet: the region may be gone since the first.
            let at = reth.addr.wrapping_add(done);
            let span = cx.mrs.remote(id.pd, id.handle, reth.rkey, at, len, AccessFlags::REMOTE_WRITE);
            span.and_then(|s| s.write(payload)).map_err(|_| Refusal::ACCESS)?;
        }
        if !part.place().ends() {
            self.message = Message::Write { reth, done: done + len };
            return Ok(Executed::default());
        }
        self.message = Message::None;
        cx.counters.rx_write_requests += 1;
        if let Some(imm) = part.imm() {
            self.finish_write_imm(imm, reth.length, solicited, id, cx)?;
        }
        Ok(Executed { message_done: true, invalidate_failed: false })
    }

    fn finish_write_imm(
        &mut self,
        imm: Imm,
        length: u32,
        solicited: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<(), Refusal> {
        let opcode = WcOpcode::RecvRdmaWithImm;
        self.finish(opcode, WcStatus::Success, length.into(), WcData::Imm(imm), solicited, id, cx)
    }

    /// Completes the held receive WQE.
    #[allow(clippy::too_many_arguments)] // They are the fields of the completion.
    fn finish(
        &mut self,
        opcode: WcOpcode,
        status: WcStatus,
        byte_len: u64,
        data: WcData,
        solicited: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<(), Refusal> {
        let Some(head) = self.rq.finish() else { return Err(Refusal::OPERATIONAL) };
        // The one error of a message that was received.
        let vendor_err = if status == WcStatus::Success { 0 } else { FailureKind::InvalidateFailed as u32 };
        let wc = WorkCompletion {
            opcode,
            byte_len: u32::try_from(byte_len).unwrap_or(u32::MAX),
            data,
            solicited,
            ..id.completion(head.wr_id, status, vendor_err)
        };
        // A completion that found no room must not be acknowledged.
        if cx.complete(id.recv_cq, wc) { Ok(()) } else { Err(Refusal::OPERATIONAL) }
    }
}
