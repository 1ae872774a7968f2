//! The completer: what the answers to our requests mean.
//!
//! Owns the path from a response packet to completions, retries and failures. Works on the requester's window and never
//! sends by itself. Sources: IBTA Vol 1 9.7.5.1 to 9.7.6, paraphrased; the trap numbers are those of real peers.

use super::Ident;
use super::credits::NOT_USED;
use super::cx::Cx;
use super::requester::{Requester, SendFailure};
use super::send_queue::Wqe;
use crate::counters::DropReason;
use crate::types::{Psn, RnrTimer};
use crate::verbs::{FailureKind, Operation, WcData, WcStatus, WorkCompletion};
use crate::wire::{Aeth, NakCode, Response, ResponseOp, Syndrome};

/// What becomes of a response that does not simply advance the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseError {
    /// It is dropped and counted.
    Drop(DropReason),
    /// The oldest work request failed for good.
    Fail(SendFailure),
}

impl From<SendFailure> for ResponseError {
    fn from(f: SendFailure) -> Self {
        Self::Fail(f)
    }
}

impl Requester {
    /// Acts on the response at `psn`.
    pub(crate) fn on_response(
        &mut self,
        psn: Psn,
        response: &Response<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<(), ResponseError> {
        // Before the window: a ghost of something long acknowledged. Beyond it: an answer to nothing.
        if psn.distance_from(self.una) < 0 || psn.distance_from(self.sent_end) >= 0 {
            if psn.next() == self.una && self.take_grant(&response.op) {
                // An answer given again to say that there are receives now.
                return Ok(());
            }
            return Err(ResponseError::Drop(DropReason::GhostAck));
        }
        let done = self.act_on(psn, response, id, cx);
        if done.is_ok() {
            self.take_grant(&response.op);
        }
        done
    }

    /// Takes the credits of a positive answer; says whether it carries any.
    fn take_grant(&mut self, op: &ResponseOp) -> bool {
        match op.aeth() {
            Some(Aeth { syndrome: Syndrome::Ack { credits }, .. }) => {
                self.credits.grant(credits);
                credits != NOT_USED
            }
            _ => false,
        }
    }

    fn act_on(&mut self, psn: Psn, response: &Response<'_>, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        match response.op {
            ResponseOp::Acknowledge(aeth) => match aeth.syndrome {
                Syndrome::Ack { .. } => self.on_ack(psn, id, cx),
                Syndrome::RnrNak(timer) => self.on_rnr(psn, timer, id, cx),
                Syndrome::Nak(NakCode::PsnSequenceError) => self.on_sequence_nak(psn, id, cx),
                Syndrome::Nak(code) => self.on_fatal_nak(psn, code, id, cx),
                Syndrome::Reserved(_) => Err(ResponseError::Drop(DropReason::UnexpectedResponse)),
            },
            ResponseOp::AtomicAcknowledge(_, original) => self.on_atomic(psn, original, id, cx),
            ResponseOp::ReadFirst(_) | ResponseOp::ReadMiddle => {
                self.on_read_data(psn, response.payload, false, id, cx)
            }
            ResponseOp::ReadLast(_) | ResponseOp::ReadOnly(_) => self.on_read_data(psn, response.payload, true, id, cx),
        }
    }

    /// Acknowledges everything before `end`, up to the first READ or atomic that still waits for its answer. Returns
    /// whether `end` was reached.
    fn acknowledge(&mut self, end: Psn, id: &Ident, cx: &mut Cx<'_>) -> bool {
        let before = self.una;
        let mut reached = true;
        while end.distance_from(self.una) > 0 {
            let Some(wqe) = self.queue.window().front() else { break };
            if wqe.head.operation.awaits_response() {
                reached = false;
                break;
            }
            let wqe_end = wqe.end();
            if end.distance_from(wqe_end) < 0 {
                self.una = end;
            } else {
                self.una = wqe_end;
                self.complete_head(0, id, cx);
            }
        }
        if self.una != before {
            self.complete_executed(id, cx);
            self.progressed(cx.now);
        }
        reached
    }

    /// The oldest work request succeeded.
    fn complete_head(&mut self, byte_len: u32, id: &Ident, cx: &mut Cx<'_>) {
        let Some(wqe) = self.queue.pop() else { return };
        self.popped(&wqe);
        if wqe.head.flags.signaled || id.signal_all {
            cx.complete(id.send_cq, send_completion(id, &wqe, WcStatus::Success, 0, byte_len));
        }
    }

    /// Local operations that were carried out complete as soon as everything before them has.
    pub(super) fn complete_executed(&mut self, id: &Ident, cx: &mut Cx<'_>) {
        while self.queue.window().front().is_some_and(|wqe| wqe.executed) {
            self.complete_head(0, id, cx);
        }
    }

    fn on_ack(&mut self, psn: Psn, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        if self.acknowledge(psn.next(), id, cx) {
            return Ok(self.fail_poisoned_head()?);
        }
        // A READ or atomic stands before `psn`. An ACK at one of its own PSNs says nothing; one beyond them says that
        // its answer was lost (implied NAK). Neither ever completes it.
        match self.queue.window().front() {
            Some(wqe) if psn.distance_from(wqe.end()) >= 0 => self.implied_nak(cx),
            _ => Err(ResponseError::Drop(DropReason::UnexpectedResponse)),
        }
    }

    /// An answer shows that a READ response or atomic answer at `una` was lost.
    fn implied_nak(&mut self, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        if self.recovering {
            return Ok(());
        }
        cx.counters.implied_nak_seq_err += 1;
        Ok(self.retry(FailureKind::LostTooOften, cx)?)
    }

    fn on_sequence_nak(&mut self, psn: Psn, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        cx.counters.rcvd_seq_err += 1;
        if !self.acknowledge(psn, id, cx) {
            return self.implied_nak(cx);
        }
        // While an RNR timer runs, packets that were in flight behind the refused one draw NAKs from some responders;
        // obeying them would burn the retries in a few round trips.
        if self.rnr_deadline.is_some() || self.recovering {
            return Ok(());
        }
        Ok(self.retry(FailureKind::LostTooOften, cx)?)
    }

    fn on_rnr(&mut self, psn: Psn, timer: RnrTimer, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        cx.counters.rcvd_rnr_err += 1;
        if !self.acknowledge(psn, id, cx) {
            return self.implied_nak(cx);
        }
        if self.rnr_deadline.is_some() {
            return Ok(());
        }
        let since = *self.rnr_since.get_or_insert(cx.now);
        if self.attr.max_rnr_wait.is_some_and(|most| self.rnr_used > 0 && cx.now.saturating_since(since) >= most) {
            cx.counters.retry_rnr_exceeded_err += 1;
            let (status, kind) = (WcStatus::RnrRetryExceeded, FailureKind::ReceiverNotReadyTooLong);
            return Err(SendFailure { status, kind, psn }.into());
        }
        if self.attr.rnr_retry.limit().is_some_and(|limit| self.rnr_used >= limit.into()) {
            cx.counters.retry_rnr_exceeded_err += 1;
            let status = WcStatus::RnrRetryExceeded;
            return Err(SendFailure { status, kind: FailureKind::ReceiverNotReady, psn }.into());
        }
        self.rnr_used = self.rnr_used.saturating_add(1);
        self.probing = true;
        // It answered: whatever was lost before came through, and the peer is not silent.
        self.refill_retries();
        self.recovering = false;
        self.go_back();
        self.rnr_deadline = Some(cx.now + timer.duration());
        Ok(())
    }

    fn on_fatal_nak(&mut self, psn: Psn, code: NakCode, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        if !self.acknowledge(psn, id, cx) {
            let owns = self.queue.window().front().is_some_and(|w| psn.is_within(w.first, w.packets));
            if !owns {
                return self.implied_nak(cx);
            }
        }
        let (status, kind) = match code {
            NakCode::InvalidRequest => (WcStatus::RemoteInvalidRequest, FailureKind::NakInvalidRequest),
            NakCode::RemoteAccessError => (WcStatus::RemoteAccess, FailureKind::NakRemoteAccess),
            NakCode::RemoteOperationalError => (WcStatus::RemoteOperation, FailureKind::NakRemoteOperation),
            NakCode::PsnSequenceError | NakCode::InvalidRdRequest => {
                return Err(ResponseError::Drop(DropReason::UnexpectedResponse));
            }
        };
        match status {
            WcStatus::RemoteAccess => cx.counters.req_remote_access_errors += 1,
            WcStatus::RemoteOperation => cx.counters.req_remote_operational_err += 1,
            _ => cx.counters.req_remote_invalid_request += 1,
        }
        Err(SendFailure { status, kind, psn }.into())
    }

    /// Brings the window to `psn`, where data for the work request that is returned is expected.
    fn awaited(&mut self, psn: Psn, id: &Ident, cx: &mut Cx<'_>) -> Result<Option<Wqe>, ResponseError> {
        let reached = self.acknowledge(psn, id, cx);
        self.fail_poisoned_head()?;
        if !reached {
            self.implied_nak(cx)?;
            return Ok(None);
        }
        Ok(self.queue.window().front().copied())
    }

    fn on_read_data(
        &mut self,
        psn: Psn,
        payload: &[u8],
        last: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<(), ResponseError> {
        let Some(wqe) = self.awaited(psn, id, cx)? else { return Ok(()) };
        let bad = SendFailure { status: WcStatus::BadResponse, kind: FailureKind::BadResponse, psn };
        match wqe.head.operation {
            Operation::Read(_) => {}
            // Their answer is READ data of no length.
            Operation::AtomicWrite(_) | Operation::Flush { .. } if last && payload.is_empty() => {
                return self.answered(&wqe, 0, id, cx);
            }
            _ => return Err(bad.into()),
        }
        let index = psn.distance_from(wqe.first).unsigned_abs();
        let mtu = id.mtu_bytes();
        let offset = u64::from(index) * mtu as u64;
        let left = u64::from(wqe.head.length).saturating_sub(offset);
        let expected_len = usize::try_from(left).unwrap_or(usize::MAX).min(mtu);
        // The answer ends where the request for it ended. Whether it says First or Middle, Last or Only, is not looked
        // at: some responders go on with Middle after a partial repeat.
        let ends_request = index + 1 == wqe.packets || (index + 1).is_multiple_of(self.window.read_psns);
        if payload.len() != expected_len || last != ends_request {
            return Err(bad.into());
        }
        if cx.mrs.scatter(id.pd, self.queue.sges_of(&wqe), offset, payload).is_err() {
            let (status, kind) = (WcStatus::LocalProtection, FailureKind::LocalElement);
            return Err(SendFailure { status, kind, psn }.into());
        }
        self.una = psn.next();
        if self.una == wqe.end() {
            self.complete_head(wqe.head.length, id, cx);
            self.complete_executed(id, cx);
        }
        self.progressed(cx.now);
        Ok(self.fail_poisoned_head()?)
    }

    fn on_atomic(&mut self, psn: Psn, original: u64, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        let Some(wqe) = self.awaited(psn, id, cx)? else { return Ok(()) };
        if !wqe.head.operation.is_atomic() {
            let (status, kind) = (WcStatus::BadResponse, FailureKind::BadResponse);
            return Err(SendFailure { status, kind, psn }.into());
        }
        // The wire is big-endian; programs read the value in their own order.
        if cx.mrs.scatter(id.pd, self.queue.sges_of(&wqe), 0, &original.to_ne_bytes()).is_err() {
            let (status, kind) = (WcStatus::LocalProtection, FailureKind::LocalElement);
            return Err(SendFailure { status, kind, psn }.into());
        }
        self.answered(&wqe, 8, id, cx)
    }

    /// The oldest work request, of one packet, has its answer.
    fn answered(&mut self, wqe: &Wqe, byte_len: u32, id: &Ident, cx: &mut Cx<'_>) -> Result<(), ResponseError> {
        self.una = wqe.end();
        self.complete_head(byte_len, id, cx);
        self.complete_executed(id, cx);
        self.progressed(cx.now);
        Ok(self.fail_poisoned_head()?)
    }

    /// UC: a work request is done once its last packet was handed to the device, and a local operation between two of
    /// them once those before it are.
    pub(crate) fn complete_sent(&mut self, id: &Ident, cx: &mut Cx<'_>) {
        let sent =
            |w: &Wqe, cursor: Psn| w.executed || (!w.head.operation.is_local() && cursor.distance_from(w.end()) >= 0);
        while self.queue.window().front().is_some_and(|w| sent(w, self.cursor_psn)) {
            self.complete_head(0, id, cx);
        }
        self.una = self.cursor_psn;
    }

    /// Completes the oldest work request with an error; everything else is flushed.
    pub(crate) fn fail(&mut self, failure: &SendFailure, id: &Ident, cx: &mut Cx<'_>) {
        if let Some(wqe) = self.queue.pop() {
            self.popped(&wqe);
            cx.complete(id.send_cq, send_completion(id, &wqe, failure.status, failure.kind as u32, 0));
        }
        self.flush(id, cx);
    }

    /// Completes every posted work request as flushed.
    pub(crate) fn flush(&mut self, id: &Ident, cx: &mut Cx<'_>) {
        let (status, kind) = (WcStatus::WorkRequestFlushed, FailureKind::Flushed as u32);
        while let Some(wqe) = self.queue.pop() {
            cx.complete(id.send_cq, send_completion(id, &wqe, status, kind, 0));
        }
        while let Some(head) = self.queue.discard() {
            let wc = WorkCompletion {
                opcode: super::send_queue::wc_opcode(&head.operation),
                ..id.completion(head.wr_id, status, kind)
            };
            cx.complete(id.send_cq, wc);
        }
        self.stop();
    }
}

fn send_completion(id: &Ident, wqe: &Wqe, status: WcStatus, vendor_err: u32, byte_len: u32) -> WorkCompletion {
    WorkCompletion {
        opcode: wqe.opcode(),
        byte_len,
        data: WcData::None,
        ..id.completion(wqe.head.wr_id, status, vendor_err)
    }
}
