//! The requester: which request packet goes next, and when it goes again.
//!
//! Owns the send side of a connected QP: PSNs, the window of unacknowledged packets, the outstanding READs, the ACK and
//! RNR timers. What the answers mean is the completer's business (`completer.rs`), which works on the same state.
//! Sources: IBTA Vol 1 9.7.5 and 9.7.6, paraphrased.

use std::collections::VecDeque;

use super::Ident;
use super::credits::Credits;
use super::cx::Cx;
use super::emit::{BurstWriter, EmitError};
use super::path::Path;
use super::progress::{Behind, Progress, Waiting};
use super::send_queue::{SendQueue, Wqe};
use super::window::Window;
use crate::time::{Duration, Instant};
use crate::types::{AckTimeout, Psn, RetryCount, RnrRetry};
use crate::verbs::{FailureKind, Operation, WcStatus};
use crate::wire::{
    AtomicEth, Body, Feth, IcrcStarts, Packet, Place, Request, RequestOp, Reth, SendTail, Service, WritePart,
};

/// Packets that ask again after an RNR NAK, before anything is acknowledged. A peer that still has no receive drops all
/// but the first, so a whole window would be work for nothing, at the cost of the QPs beside this one. Two, not one: the
/// second's ACK covers a lost one of the first, and some responders tell by a NAK that the first was lost.
const RNR_PROBE: u32 = 2;

/// Attributes of the send side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendAttr {
    pub(crate) timeout: AckTimeout,
    pub(crate) retry_count: RetryCount,
    pub(crate) rnr_retry: RnrRetry,
    pub(crate) max_rd_atomic: u8,
    /// How long RNR NAKs may keep a request waiting.
    pub(crate) max_rnr_wait: Option<Duration>,
}

/// A work request failed for good: it completes with this status, and the QP goes to ERR (or SQE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendFailure {
    pub(crate) status: WcStatus,
    pub(crate) kind: FailureKind,
    pub(crate) psn: Psn,
}

/// The send side of a connected QP.
#[derive(Debug)]
pub(crate) struct Requester {
    pub(crate) queue: SendQueue,
    pub(super) icrcs: IcrcStarts,
    pub(super) service: Service,
    pub(super) attr: SendAttr,
    /// First PSN of the next work request.
    next_psn: Psn,
    /// Oldest PSN that is not acknowledged; the oldest work request in flight contains it.
    pub(super) una: Psn,
    /// Work request being sent, and its next PSN.
    pub(super) cursor: usize,
    pub(super) cursor_psn: Psn,
    /// One beyond the highest PSN ever sent.
    pub(super) sent_end: Psn,
    /// Outstanding requests that get an answer of their own, READs above all: one beyond the PSNs that each reserved.
    reads: VecDeque<Psn>,
    pub(super) since_ack_req: u32,
    pub(super) retries_used: u8,
    pub(super) rnr_used: u32,
    ack_deadline: Option<Instant>,
    pub(super) rnr_deadline: Option<Instant>,
    /// Went back and saw no progress since: further hints at the same loss change nothing.
    pub(super) recovering: bool,
    /// Refused for want of a receive, and saw no progress since: only [`RNR_PROBE`] packets ask again.
    pub(super) probing: bool,
    /// When the oldest unacknowledged PSN began to wait.
    pub(super) waiting_since: Instant,
    /// When the first RNR NAK since the last progress came.
    pub(super) rnr_since: Option<Instant>,
    pub(super) credits: Credits,
    pub(super) window: Window,
    draining: bool,
}

/// The next request packet.
struct Plan {
    op: RequestOp,
    /// Payload: where it begins in the message, and bytes.
    offset: u64,
    len: usize,
    /// PSNs it reserves.
    psns: u32,
    ends: bool,
    /// One beyond the last PSN of its work request.
    wqe_end: Psn,
}

impl Plan {
    /// Bytes that it puts on the wire, or asks for.
    fn bytes(&self) -> u64 {
        match &self.op {
            RequestOp::Read(reth) => reth.length.into(),
            _ => self.len as u64,
        }
    }
}

impl Requester {
    pub(crate) fn new(queue: SendQueue, reads: VecDeque<Psn>, service: Service) -> Self {
        Self {
            icrcs: IcrcStarts::default(),
            queue,
            service,
            attr: SendAttr {
                timeout: AckTimeout::NEVER,
                retry_count: RetryCount::MAX,
                rnr_retry: RnrRetry::FOREVER,
                max_rd_atomic: 0,
                max_rnr_wait: None,
            },
            next_psn: Psn::ZERO,
            una: Psn::ZERO,
            cursor: 0,
            cursor_psn: Psn::ZERO,
            sent_end: Psn::ZERO,
            reads,
            since_ack_req: 0,
            retries_used: 0,
            rnr_used: 0,
            ack_deadline: None,
            rnr_deadline: None,
            recovering: false,
            probing: false,
            waiting_since: Instant::ZERO,
            rnr_since: None,
            credits: Credits::default(),
            window: Window::default(),
            draining: false,
        }
    }

    /// Begins with `psn`.
    pub(crate) fn start(&mut self, psn: Psn, attr: SendAttr, window: Window) {
        (self.attr, self.window) = (attr, window);
        (self.next_psn, self.una, self.cursor_psn, self.sent_end) = (psn, psn, psn, psn);
    }

    /// Its queue, and the room for its READs.
    pub(super) fn into_parts(self) -> (SendQueue, VecDeque<Psn>) {
        (self.queue, self.reads)
    }

    /// Forgets everything but the queue.
    pub(crate) fn reset(&mut self) {
        self.start(Psn::ZERO, self.attr, self.window);
        self.cursor = 0;
        self.reads.clear();
        self.since_ack_req = 0;
        (self.retries_used, self.rnr_used, self.rnr_since) = (0, 0, None);
        (self.ack_deadline, self.rnr_deadline) = (None, None);
        (self.recovering, self.probing, self.draining) = (false, false, false);
        self.waiting_since = Instant::ZERO;
        self.credits.reset();
    }

    /// Nothing is in flight and nothing is awaited.
    pub(super) fn stop(&mut self) {
        self.cursor = 0;
        self.credits.went_back();
        self.reads.clear();
        self.probing = false;
        (self.ack_deadline, self.rnr_deadline) = (None, None);
        if self.service == Service::Uc {
            // SQE may be left again: the next message begins where the last packet sent ended.
            (self.next_psn, self.una) = (self.cursor_psn, self.cursor_psn);
        }
    }

    /// Begins no further work requests (SQD), or begins them again.
    pub(crate) fn set_draining(&mut self, on: bool) {
        self.draining = on;
    }

    /// Whether everything begun is done.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.window().is_empty()
    }

    /// Next PSN to send and oldest unacknowledged one.
    pub(crate) fn psns(&self) -> (Psn, Psn) {
        (self.cursor_psn, self.una)
    }

    /// What it waits for.
    pub(super) fn progress(&self) -> Progress {
        let window = self.queue.window();
        let all_begun = self.cursor == window.len();
        let unsent = self.queue.outstanding() > self.cursor;
        let behind = match window.get(self.cursor) {
            Some(wqe) if !self.has_credit(wqe) => Some(Behind::Credits),
            Some(wqe) if !self.may_begin(wqe) => {
                let full = self.reads.len() >= self.attr.max_rd_atomic.into();
                Some(if full && wqe.head.operation.awaits_response() { Behind::ReadDepth } else { Behind::Fence })
            }
            _ if all_begun && unsent && self.draining => Some(Behind::Drain),
            _ if unsent && self.is_window_full() => Some(Behind::Window),
            _ => None,
        };
        let reads = window.front().is_some_and(|w| w.head.operation.awaits_response());
        let waiting = match (self.rnr_deadline.is_some(), self.cursor_psn != self.una) {
            (true, _) => Waiting::RnrTimer,
            (false, true) if reads => Waiting::Response,
            (false, true) => Waiting::Ack,
            (false, false) if unsent => Waiting::Turn,
            (false, false) => Waiting::Nothing,
        };
        Progress {
            waiting,
            behind,
            since: Some(self.waiting_since).filter(|at| *at != Instant::ZERO),
            in_flight: window.len(),
            retries_used: self.retries_used,
            rnr_retries_used: self.rnr_used,
        }
    }

    /// When it wants to be called though nothing arrives.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match (self.ack_deadline, self.rnr_deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Adds the next request packets to an empty burst, as many as may go and fit.
    ///
    /// What fails behind packets that were written fails again, alone, when it is asked for next.
    pub(crate) fn poll_transmit(
        &mut self,
        id: &Ident,
        path: &Path,
        cx: &mut Cx<'_>,
        burst: &mut BurstWriter<'_, '_>,
    ) -> Result<(), SendFailure> {
        if self.rnr_deadline.is_some_and(|t| cx.now < t) {
            return Ok(());
        }
        self.rnr_deadline = None;
        self.append_run(id, path, cx, burst);
        loop {
            match self.append(id, path, cx, burst) {
                Ok(true) if burst.is_open() => {}
                Err(failure) if burst.is_empty() => return Err(failure),
                _ => return Ok(()),
            }
        }
    }

    /// Adds the next request packet to the burst; false when none may go, or it does not fit.
    fn append(
        &mut self,
        id: &Ident,
        path: &Path,
        cx: &mut Cx<'_>,
        burst: &mut BurstWriter<'_, '_>,
    ) -> Result<bool, SendFailure> {
        let Some(plan) = self.plan(id, path, cx)? else { return Ok(false) };
        let Some(wqe) = self.queue.window().get(self.cursor) else { return Ok(false) };
        let (packet, ack_req) = self.packet(&plan, wqe, path);
        if !burst.takes(&packet, plan.len) {
            return Ok(false);
        }
        let (queue, mrs) = (&self.queue, &*cx.mrs);
        match burst
            .push(&mut self.icrcs, &packet, plan.len, |out, crc| queue.gather(mrs, id.pd, wqe, plan.offset, out, crc))
        {
            Ok(()) => {
                self.sent(&plan, ack_req, cx);
                if !plan.ends {
                    self.append_run(id, path, cx, burst);
                }
                Ok(true)
            }
            Err(EmitError::Payload(_)) => {
                self.queue.poison(self.cursor, WcStatus::LocalProtection, FailureKind::LocalElement);
                self.fail_poisoned_head().map(|()| false)
            }
            Err(EmitError::NoRoom) => {
                cx.counters.send_err += 1;
                self.queue.poison(self.cursor, WcStatus::LocalQpOperation, FailureKind::Unsendable);
                self.fail_poisoned_head().map(|()| false)
            }
        }
    }

    /// The packet of a plan, and whether it asks for an answer.
    fn packet(&self, plan: &Plan, wqe: &Wqe, path: &Path) -> (Packet<'static>, bool) {
        let psn = self.cursor_psn;
        let ack_req = self.service == Service::Rc
            && (plan.ends
                || self.probing
                || self.credits.is_limited(&wqe.head.operation)
                || self.since_ack_req + 1 >= self.window.ack_every
                || !self.admits_after(plan.psns, plan.bytes()));
        let body = Body::Request(Request { service: self.service, op: plan.op, payload: &[] });
        let packet = Packet {
            mig_req: path.mig_req,
            solicited: plan.ends && wqe.head.flags.solicited && takes_solicited(&plan.op),
            ack_req,
            ..Packet::new(path.dest_qpn, path.pkey, psn, body)
        };
        (packet, ack_req)
    }

    /// A poisoned work request fails once it is the oldest.
    pub(super) fn fail_poisoned_head(&self) -> Result<(), SendFailure> {
        match self.queue.window().front() {
            Some(Wqe { poisoned: Some((status, kind)), .. }) => {
                Err(SendFailure { status: *status, kind: *kind, psn: self.una })
            }
            _ => Ok(()),
        }
    }

    /// Decides what goes next; `None` when nothing may.
    fn plan(&mut self, id: &Ident, path: &Path, cx: &mut Cx<'_>) -> Result<Option<Plan>, SendFailure> {
        // Each round but the last passes a local operation.
        let wqe = loop {
            if self.cursor == self.queue.window().len() && !self.begin_next(id, path, cx) {
                return Ok(None);
            }
            self.fail_poisoned_head()?;
            match self.queue.window().get(self.cursor) {
                Some(wqe) if wqe.poisoned.is_none() && self.may_begin(wqe) => {
                    if !wqe.head.operation.is_local() {
                        break wqe;
                    }
                }
                _ => return Ok(None),
            }
            self.pass_local(id, cx)?;
        };
        let plan = self.packet_of(wqe, path.mtu.bytes());
        if self.service == Service::Rc && !self.admits(plan.psns, plan.bytes()) {
            return Ok(None);
        }
        Ok(Some(plan))
    }

    /// PSNs sent and not acknowledged.
    pub(super) fn unacked(&self) -> u32 {
        self.cursor_psn.distance_from(self.una).unsigned_abs()
    }

    /// Bytes sent, or asked for, and not acknowledged.
    pub(super) fn in_flight(&self) -> u64 {
        let mtu = self.window.mtu;
        let window = self.queue.window();
        let sent = window.get(self.cursor).map_or(self.queue.pulled(), |wqe| wqe.position(self.cursor_psn, mtu));
        sent - window.front().map_or(sent, |wqe| wqe.position(self.una, mtu)).min(sent)
    }

    /// Whether the window has room for what is planned. With nothing in flight there always is.
    fn admits(&self, psns: u32, bytes: u64) -> bool {
        let unacked = self.unacked();
        let fits = || self.window.admits(unacked, (psns, bytes), || self.in_flight());
        unacked == 0 || ((!self.probing || unacked + psns <= RNR_PROBE) && fits())
    }

    /// Whether it has room for one more packet behind what is planned: else an answer must be asked for now.
    fn admits_after(&self, psns: u32, bytes: u64) -> bool {
        let (after, next) = (self.unacked() + psns, (1, self.window.mtu as u64));
        self.window.admits(after, next, || self.in_flight() + bytes)
    }

    fn is_window_full(&self) -> bool {
        let mtu = self.window.mtu;
        match self.queue.window().get(self.cursor) {
            Some(wqe) => {
                let plan = self.packet_of(wqe, mtu);
                !self.admits(plan.psns, plan.bytes())
            }
            None => !self.admits(1, mtu as u64),
        }
    }

    /// Takes the next posted work request into flight; false when none may be.
    fn begin_next(&mut self, id: &Ident, path: &Path, cx: &mut Cx<'_>) -> bool {
        if self.draining {
            return false;
        }
        let Some(wqe) = self.queue.pull(self.next_psn, path.mtu) else { return false };
        self.next_psn = wqe.end();
        let operation = &wqe.head.operation;
        let (local, awaits_response, wqe_packets) = (operation.is_local(), operation.awaits_response(), wqe.packets);
        if local {
            return true;
        }
        let lands = operation.is_read_or_atomic();
        let sges = self.queue.window().back().map_or(&[][..], |wqe| self.queue.sges_of(wqe));
        // What is gathered into one packet is checked as it is gathered, before a byte of it leaves.
        let at_once = wqe_packets == 1 && !lands;
        if !at_once && cx.mrs.check_sges(id.pd, sges, lands).is_err() {
            self.queue.poison(self.cursor, WcStatus::LocalProtection, FailureKind::LocalElement);
        }
        // Posted while READs were allowed, and the depth was taken away since (SQD): it could never go.
        if awaits_response && self.attr.max_rd_atomic == 0 {
            self.queue.poison(self.cursor, WcStatus::LocalQpOperation, FailureKind::Unsendable);
        }
        true
    }

    /// Goes past the local operation at the cursor, carrying it out unless that was done. One that is refused fails once
    /// everything before it is done; nothing behind it begins.
    fn pass_local(&mut self, id: &Ident, cx: &mut Cx<'_>) -> Result<(), SendFailure> {
        let Some(wqe) = self.queue.window().get(self.cursor) else { return Ok(()) };
        if !wqe.executed {
            if let Err((status, kind)) = carry_out(&wqe.head.operation, id, cx) {
                self.queue.poison(self.cursor, status, kind);
                return self.fail_poisoned_head();
            }
            self.queue.mark_executed(self.cursor);
        }
        self.pass_cursor();
        self.complete_executed(id, cx);
        Ok(())
    }

    /// Fence and READ depth. A local invalidation waits until everything before it is complete (IBTA Vol 1 10.6.5.1): a
    /// repeat of what was sent before might still need the key.
    fn may_begin(&self, wqe: &Wqe) -> bool {
        let fenced = wqe.head.flags.fence && self.cursor_psn == wqe.first && !self.reads.is_empty();
        let full = wqe.head.operation.awaits_response() && self.reads.len() >= self.attr.max_rd_atomic.into();
        let early = matches!(wqe.head.operation, Operation::LocalInvalidate(_)) && self.cursor > 0;
        !fenced && !full && !early && self.has_credit(wqe)
    }

    /// Whether the peer has a receive for the message at the cursor, or it may ask whether it has.
    fn has_credit(&self, wqe: &Wqe) -> bool {
        let (first, idle) = (self.cursor_psn == wqe.first, self.cursor_psn == self.una);
        let heard = self.una.distance_from(wqe.first) > 0;
        self.credits.allows(&wqe.head.operation, first, idle, heard)
    }

    /// The packet of `wqe` that begins at the cursor's PSN.
    fn packet_of(&self, wqe: &Wqe, mtu: usize) -> Plan {
        let index = self.cursor_psn.distance_from(wqe.first).unsigned_abs();
        let offset = u64::from(index) * mtu as u64;
        let left = u64::from(wqe.head.length).saturating_sub(offset);
        let plan = |op, len, psns, ends| Plan { op, offset, len, psns, ends, wqe_end: wqe.end() };
        match wqe.head.operation {
            Operation::CompareSwap { remote, compare, swap } => {
                let eth = AtomicEth { addr: remote.addr, rkey: remote.rkey, swap_add: swap, compare };
                plan(RequestOp::CompareSwap(eth), 0, 1, true)
            }
            Operation::FetchAdd { remote, add } => {
                let eth = AtomicEth { addr: remote.addr, rkey: remote.rkey, swap_add: add, compare: 0 };
                plan(RequestOp::FetchAdd(eth), 0, 1, true)
            }
            Operation::Read(remote) => {
                // Its end is always on the same grid, so that a repeat asks for the rest of what was asked for.
                let most = self.window.read_psns;
                let psns = (most - index % most).min(wqe.packets - index);
                let length = u32::try_from(left.min(u64::from(psns) * mtu as u64)).unwrap_or(u32::MAX);
                let reth = Reth { addr: remote.addr.wrapping_add(offset), rkey: remote.rkey, length };
                plan(RequestOp::Read(reth), 0, psns, true)
            }
            Operation::AtomicWrite(remote) => {
                let reth = Reth { addr: remote.addr, rkey: remote.rkey, length: 8 };
                plan(RequestOp::AtomicWrite(reth), 8, 1, true)
            }
            Operation::Flush { remote, length, placement, scope } => {
                let feth = Feth { placement: placement as u8, scope: scope as u8 };
                let reth = Reth { addr: remote.addr, rkey: remote.rkey, length };
                plan(RequestOp::Flush(feth, reth), 0, 1, true)
            }
            // The rest are messages: local operations never come here.
            _ => {
                let len = usize::try_from(left).unwrap_or(usize::MAX).min(mtu);
                let place = match (index == 0, index + 1 == wqe.packets) {
                    (true, true) => Place::Only,
                    (true, false) => Place::First,
                    (false, true) => Place::Last,
                    (false, false) => Place::Middle,
                };
                plan(data_op(wqe, place), len, 1, place.ends())
            }
        }
    }

    /// Book-keeping after a packet was written.
    fn sent(&mut self, plan: &Plan, ack_req: bool, cx: &mut Cx<'_>) {
        let first = self.cursor_psn;
        self.cursor_psn = first.plus(plan.psns);
        if first.distance_from(self.sent_end) < 0 {
            cx.counters.retransmitted_pkts += 1;
        } else if plan.offset == 0 {
            cx.counters.rdma_sends += 1;
        }
        if self.cursor_psn.distance_from(self.sent_end) > 0 {
            self.sent_end = self.cursor_psn;
        }
        if plan.op.awaits_response() {
            self.reads.push_back(self.cursor_psn);
        }
        if self.cursor_psn == plan.wqe_end {
            self.pass_cursor();
        }
        // UC never asks, so this must not pass the end of its range.
        self.since_ack_req = if ack_req { 0 } else { self.since_ack_req.saturating_add(1) };
        self.wait_for_answer(first, cx.now);
    }

    /// Packets from `first` on have left: they wait to be acknowledged.
    pub(super) fn wait_for_answer(&mut self, first: Psn, now: Instant) {
        if self.service == Service::Rc {
            if first == self.una && self.retries_used == 0 && self.rnr_used == 0 {
                self.waiting_since = now;
            }
            if self.ack_deadline.is_none() {
                self.ack_deadline = self.attr.timeout.duration().map(|d| now + d);
            }
        }
    }

    /// Everything of the work request at the cursor was sent.
    fn pass_cursor(&mut self) {
        if let Some(wqe) = self.queue.window().get(self.cursor) {
            self.credits.passed(&wqe.head.operation);
        }
        self.cursor += 1;
    }

    /// Something was acknowledged: `una` moved. Budgets are whole again.
    pub(super) fn progressed(&mut self, now: Instant) {
        (self.retries_used, self.rnr_used) = (0, 0);
        (self.recovering, self.probing) = (false, false);
        (self.waiting_since, self.rnr_deadline, self.rnr_since) = (now, None, None);
        while self.reads.front().is_some_and(|end| end.distance_from(self.una) <= 0) {
            self.reads.pop_front();
        }
        if self.cursor_psn.distance_from(self.una) < 0 {
            // An answer to an earlier transmission made the repeat needless.
            self.cursor = 0;
            self.cursor_psn = self.una;
            self.credits.went_back();
        }
        let waiting = self.cursor_psn != self.una;
        self.ack_deadline = self.attr.timeout.duration().filter(|_| waiting).map(|d| now + d);
    }

    /// The oldest work request left the window.
    pub(super) fn popped(&mut self, wqe: &Wqe) {
        self.credits.finished(&wqe.head.operation, self.cursor > 0);
        self.cursor = self.cursor.saturating_sub(1);
    }

    /// Sends again from the oldest unacknowledged PSN.
    pub(super) fn go_back(&mut self) {
        self.cursor = 0;
        self.credits.went_back();
        self.cursor_psn = self.una;
        self.since_ack_req = 0;
        self.ack_deadline = None;
        self.reads.clear();
    }

    /// One transport retry: goes back, or fails when none is left.
    pub(super) fn retry(&mut self, kind: FailureKind, cx: &mut Cx<'_>) -> Result<(), SendFailure> {
        if self.retries_used >= self.attr.retry_count.get() {
            return Err(SendFailure { status: WcStatus::RetryExceeded, kind, psn: self.una });
        }
        self.retries_used += 1;
        cx.counters.completer_retry_err += 1;
        self.recovering = true;
        self.go_back();
        Ok(())
    }

    /// Whether `psn` is one of a request that was sent and not acknowledged.
    pub(super) fn awaits(&self, psn: Psn) -> bool {
        psn.distance_from(self.una) >= 0 && psn.distance_from(self.sent_end) < 0
    }

    /// The budget of transport retries is whole again.
    pub(super) fn refill_retries(&mut self) {
        self.retries_used = 0;
    }

    /// Sends again, along a new path, what the old one lost too often.
    pub(super) fn go_back_on_new_path(&mut self) {
        self.recovering = true;
        self.go_back();
    }

    /// Acts on timers that have run out.
    pub(crate) fn handle_timeout(&mut self, cx: &mut Cx<'_>) -> Result<(), SendFailure> {
        if self.rnr_deadline.is_some_and(|t| t <= cx.now) {
            self.rnr_deadline = None;
        }
        if self.ack_deadline.is_some_and(|t| t <= cx.now) {
            self.ack_deadline = None;
            cx.counters.local_ack_timeout_err += 1;
            return self.retry(FailureKind::NoAnswer, cx);
        }
        Ok(())
    }
}

/// Carries out a local operation.
fn carry_out(operation: &Operation, id: &Ident, cx: &mut Cx<'_>) -> Result<(), (WcStatus, FailureKind)> {
    let refused = |status, kind| move |_| (status, kind);
    match operation {
        Operation::BindMw(bind) => {
            cx.mrs.bind(id.pd, id.handle, bind).map_err(refused(WcStatus::MwBind, FailureKind::BindRefused))
        }
        Operation::LocalInvalidate(rkey) => cx
            .mrs
            .invalidate(id.pd, id.handle, *rkey)
            .map_err(|_| (WcStatus::LocalQpOperation, FailureKind::LocalInvalidateRefused)),
        Operation::FastRegister(wr) => cx
            .mrs
            .fast_register(id.pd, wr)
            .map_err(refused(WcStatus::LocalQpOperation, FailureKind::FastRegisterRefused)),
        _ => Ok(()),
    }
}

/// Operations that may raise a solicited event.
fn takes_solicited(op: &RequestOp) -> bool {
    match op {
        RequestOp::Send(..) => true,
        RequestOp::Write(part) => part.imm().is_some(),
        _ => false,
    }
}

/// The SEND or WRITE packet at `place`.
pub(super) fn data_op(wqe: &Wqe, place: Place) -> RequestOp {
    let tail = |tail| RequestOp::Send(place, if place.ends() { tail } else { SendTail::None });
    let (remote, imm) = match wqe.head.operation {
        Operation::SendImm(imm) => return tail(SendTail::Imm(imm)),
        Operation::SendInvalidate(rkey) => return tail(SendTail::Invalidate(rkey)),
        Operation::Write(remote) => (remote, None),
        Operation::WriteImm(remote, imm) => (remote, Some(imm)),
        _ => return tail(SendTail::None),
    };
    let reth = Reth { addr: remote.addr, rkey: remote.rkey, length: wqe.head.length };
    RequestOp::Write(match place {
        Place::First => WritePart::First(reth),
        Place::Middle => WritePart::Middle,
        Place::Last => WritePart::Last(imm),
        Place::Only => WritePart::Only(reth, imm),
    })
}
