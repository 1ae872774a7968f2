//! The RC responder: requests in, answers out.
//!
//! Owns the expected PSN, the MSN and the answers. `on_request` reads like the specification: each check is a step, its
//! refusal the NAK. Never sends by itself. Sources: IBTA Vol 1 9.7.3 to 9.7.5, paraphrased.

use super::Ident;
use super::answers::{Answer, Answers, MAX_ANSWERS, ReadAnswer};
use super::assembly::{Assembly, Flush, Refusal};
use super::credits::code_for;
use super::cx::Cx;
use super::emit::{BurstWriter, EmitError};
use super::path::Path;
use super::rnr::RnrPace;
use super::runs::{is_read_inside, write_read_run};
use crate::burst::{TxBurst, TxRoom};
use crate::counters::DropReason;
use crate::mem::FlushRange;
use crate::srq::RecvConsumer;
use crate::types::{Msn, Psn, PsnClass, RnrTimer};
use crate::verbs::{AccessFlags, MAX_READ_BYTES, Sge, WcStatus};
use crate::wire::{
    Aeth, AtomicEth, Body, Feth, IcrcStarts, NakCode, Packet, Request, RequestOp, Response, ResponseOp, Reth, Syndrome,
};

/// The header bits of a request that the responder looks at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestBits {
    pub(crate) psn: Psn,
    pub(crate) ack_req: bool,
    pub(crate) solicited: bool,
}

/// A request that was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Accepted {
    /// Executed, and yet the QP goes to ERR once the answers are out.
    pub(crate) then_fail: bool,
}

/// The receive side of an RC QP.
#[derive(Debug)]
pub(crate) struct Responder {
    pub(crate) assembly: Assembly,
    answers: Answers,
    icrcs: IcrcStarts,
    pub(super) expected: Psn,
    msn: Msn,
    /// A NAK for the expected PSN is out: packets behind it are dropped in silence.
    pub(super) nak_sent: bool,
    /// The last executed SEND or WRITE packet: the only PSN that a plain ACK may name. Never that of a READ or atomic,
    /// which some requesters would take for its success.
    pub(super) ack_psn: Option<Psn>,
    pub(super) rnr: RnrPace,
    /// Advertise credits.
    pub(super) credits: bool,
    /// Bytes of READs that may wait for their answers.
    pub(super) max_read_bytes: u64,
}

impl Responder {
    pub(crate) fn new(assembly: Assembly, answers: Answers) -> Self {
        Self {
            icrcs: IcrcStarts::default(),
            assembly,
            answers,
            expected: Psn::ZERO,
            msn: Msn::default(),
            nak_sent: false,
            ack_psn: None,
            rnr: RnrPace::new(RnrTimer::DEFAULT),
            credits: false,
            max_read_bytes: MAX_READ_BYTES,
        }
    }

    /// Its receive queue, where it has one of its own, with room for elements, and its answers.
    pub(super) fn into_parts(self) -> ((Option<RecvConsumer>, Vec<Sge>), Answers) {
        (self.assembly.rq.into_parts(), self.answers)
    }

    pub(crate) fn start(&mut self, expected: Psn, depth: u8) {
        self.expected = expected;
        self.answers.set_depth(depth);
    }

    /// The RNR timer that is advertised: `least`, or as long as `most` while the receive queue stays empty.
    pub(super) fn set_rnr(&mut self, least: RnrTimer, most: Option<RnrTimer>) {
        self.rnr.set(least, most);
    }

    pub(crate) fn set_depth(&mut self, depth: u8) {
        self.answers.set_depth(depth);
    }

    pub(crate) fn reset(&mut self) {
        self.assembly.abandon();
        self.assembly.rq.discard();
        self.answers.clear();
        self.rnr.reset();
        (self.expected, self.msn, self.nak_sent, self.ack_psn) = (Psn::ZERO, Msn::default(), false, None);
    }

    /// Nothing more is said.
    pub(crate) fn silence(&mut self) {
        self.answers.clear();
    }

    pub(crate) fn expected(&self) -> Psn {
        self.expected
    }

    /// Checks and executes one request packet.
    pub(crate) fn on_request(
        &mut self,
        bits: RequestBits,
        request: &Request<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        self.check_psn(bits.psn, cx)?;
        self.assembly.check_sequence(&request.op)?;
        self.check_operation(&request.op)?;
        self.assembly.check_receive(&request.op, cx)?;
        self.assembly.check_length(request, id.mtu_bytes())?;
        self.check_access(&request.op, id, cx)?;
        self.execute(bits, request, id, cx)
    }

    fn check_psn(&mut self, psn: Psn, cx: &mut Cx<'_>) -> Result<(), Refusal> {
        match psn.classify(self.expected) {
            PsnClass::Expected => {
                self.nak_sent = false;
                Ok(())
            }
            PsnClass::Duplicate => Err(Refusal::Duplicate),
            PsnClass::Ahead => {
                cx.counters.out_of_seq_request += 1;
                if self.nak_sent {
                    return Err(Refusal::Drop(DropReason::AheadOfSequence));
                }
                Err(Refusal::Nak { code: NakCode::PsnSequenceError, local: None })
            }
        }
    }

    fn check_operation(&self, op: &RequestOp) -> Result<(), Refusal> {
        self.assembly.check_operation(op)?;
        // FLUSH is not counted: some requesters do not count it either, and its answer needs no memory here.
        let counted = op.awaits_response() && !matches!(op, RequestOp::Flush(..));
        // More outstanding than was agreed, or any where none was.
        if counted && self.answers.unanswered() >= self.answers.depth() {
            return Err(Refusal::INVALID);
        }
        // What a few small requests make us send is bounded; one that stands alone is served, however long.
        if let RequestOp::Read(reth) = op {
            let waiting = self.answers.unanswered_bytes();
            if waiting > 0 && waiting.saturating_add(reth.length.into()) > self.max_read_bytes {
                return Err(Refusal::Rnr);
            }
        }
        Ok(())
    }

    /// What a positive answer says of the receives that wait.
    fn ack_syndrome(&self) -> Syndrome {
        if self.credits { Syndrome::Ack { credits: code_for(self.assembly.rq.waiting()) } } else { Syndrome::ACK }
    }

    fn check_access(&self, op: &RequestOp, id: &Ident, cx: &Cx<'_>) -> Result<(), Refusal> {
        let remote = |addr, rkey, len: u32, need| {
            cx.mrs.remote(id.pd, id.handle, rkey, addr, len.into(), need).map(|_| ()).map_err(|_| Refusal::ACCESS)
        };
        match op {
            RequestOp::Send(..) => Ok(()),
            RequestOp::Write(_) => self.assembly.check_write_access(op, id, cx),
            RequestOp::Read(reth) if reth.length == 0 => Ok(()),
            RequestOp::Read(reth) => remote(reth.addr, reth.rkey, reth.length, AccessFlags::REMOTE_READ),
            RequestOp::CompareSwap(eth) | RequestOp::FetchAdd(eth) => {
                remote(eth.addr, eth.rkey, 8, AccessFlags::REMOTE_ATOMIC)?;
                aligned(eth.addr)
            }
            RequestOp::AtomicWrite(reth) => {
                remote(reth.addr, reth.rkey, 8, AccessFlags::REMOTE_WRITE)?;
                aligned(reth.addr)
            }
            RequestOp::Flush(feth, reth) => flush_range(feth, reth, id, cx).map(|_| ()),
        }
    }

    fn execute(
        &mut self,
        bits: RequestBits,
        request: &Request<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        match &request.op {
            RequestOp::Send(..) | RequestOp::Write(_) => self.execute_data(bits, request, id, cx),
            RequestOp::Read(reth) => {
                self.execute_read(bits.psn, reth, id.mtu_bytes());
                cx.counters.rx_read_requests += 1;
                cx.counters.rdma_recvs += 1;
                Ok(Accepted::default())
            }
            RequestOp::CompareSwap(eth) => self.execute_atomic(bits.psn, eth, true, id, cx),
            RequestOp::FetchAdd(eth) => self.execute_atomic(bits.psn, eth, false, id, cx),
            RequestOp::AtomicWrite(reth) => self.execute_atomic_write(bits.psn, reth, request.payload, id, cx),
            RequestOp::Flush(feth, reth) => self.execute_flush(bits.psn, feth, reth, id, cx),
        }
    }

    fn execute_data(
        &mut self,
        bits: RequestBits,
        request: &Request<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        let done = self.assembly.execute(request, bits.solicited, id, cx)?;
        self.expected = bits.psn.next();
        self.rnr.took(bits.psn);
        self.ack_psn = Some(bits.psn);
        if done.message_done {
            self.msn = self.msn.next();
            cx.counters.rdma_recvs += 1;
        }
        if (bits.ack_req || done.invalidate_failed) && self.answers.ack(bits.psn, self.msn) {
            cx.counters.ack_deferred += 1;
        }
        Ok(Accepted { then_fail: done.invalidate_failed })
    }

    fn execute_read(&mut self, psn: Psn, reth: &Reth, mtu: usize) {
        let mtu = u32::try_from(mtu).unwrap_or(u32::MAX);
        let packets = if reth.length == 0 { 1 } else { reth.length.div_ceil(mtu) };
        self.msn = self.msn.next();
        self.expected = psn.plus(packets);
        self.rnr.took(psn);
        self.answers.read(ReadAnswer {
            first: psn,
            next: psn,
            packets,
            addr: reth.addr,
            rkey: reth.rkey,
            length: reth.length,
            msn: self.msn,
        });
    }

    fn execute_atomic(
        &mut self,
        psn: Psn,
        eth: &AtomicEth,
        compare: bool,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        let need = AccessFlags::REMOTE_ATOMIC;
        let span = cx.mrs.remote(id.pd, id.handle, eth.rkey, eth.addr, 8, need).map_err(|_| Refusal::ACCESS)?;
        let before = if compare { span.compare_swap(eth.compare, eth.swap_add) } else { span.fetch_add(eth.swap_add) };
        // Aligned on the wire and yet not in this process: a region registered at an odd wire address.
        let before = before.ok_or(Refusal::OPERATIONAL)?;
        cx.counters.rx_atomic_requests += 1;
        self.advance(psn, cx);
        self.answers.atomic(psn, self.msn, before);
        Ok(Accepted::default())
    }

    fn execute_atomic_write(
        &mut self,
        psn: Psn,
        reth: &Reth,
        payload: &[u8],
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        let bytes = <[u8; 8]>::try_from(payload).map_err(|_| Refusal::INVALID)?;
        let need = AccessFlags::REMOTE_WRITE;
        let span = cx.mrs.remote(id.pd, id.handle, reth.rkey, reth.addr, 8, need).map_err(|_| Refusal::ACCESS)?;
        // Aligned on the wire and yet not in this process: a region registered at an odd wire address.
        span.write_atomic(bytes).ok_or(Refusal::OPERATIONAL)?;
        cx.counters.rx_atomic_requests += 1;
        self.advance(psn, cx);
        self.answers.placed(psn, self.msn);
        Ok(Accepted::default())
    }

    fn execute_flush(
        &mut self,
        psn: Psn,
        feth: &Feth,
        reth: &Reth,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<Accepted, Refusal> {
        // One that could not be answered is not begun: the requester's timer repeats it.
        if !self.answers.takes_flush() {
            return Err(Refusal::Drop(DropReason::Refused));
        }
        flush_range(feth, reth, id, cx)?.flush().map_err(|_| Refusal::OPERATIONAL)?;
        cx.counters.rx_flush_requests += 1;
        self.advance(psn, cx);
        self.answers.flushed(psn, self.msn);
        Ok(Accepted::default())
    }

    /// A request of one packet with an answer of its own was executed.
    fn advance(&mut self, psn: Psn, cx: &mut Cx<'_>) {
        self.msn = self.msn.next();
        self.expected = psn.next();
        cx.counters.rdma_recvs += 1;
    }

    /// Says what a refusal has to say. Returns whether the QP fails by it.
    pub(crate) fn refuse(
        &mut self,
        refusal: Refusal,
        bits: RequestBits,
        request: &Request<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> bool {
        match refusal {
            Refusal::Drop(reason) => cx.counters.count_drop(reason),
            Refusal::Duplicate => self.on_duplicate(bits.psn, request, id, cx),
            Refusal::Rnr => {
                cx.counters.send_rnr_err += 1;
                self.nak_sent = true;
                let timer = self.rnr.refuse(self.expected);
                self.answers.nak(self.expected, Syndrome::RnrNak(timer), self.msn);
            }
            Refusal::Nak { code, local } => {
                cx.counters.resp_local_length_error += u64::from(local == Some(WcStatus::LocalLength));
                // Until the expected packet arrives, one NAK is enough.
                self.nak_sent = true;
                self.answers.nak(self.expected, Syndrome::Nak(code), self.msn);
                match code {
                    NakCode::PsnSequenceError => {
                        cx.counters.sent_seq_err += 1;
                        return false;
                    }
                    NakCode::InvalidRequest | NakCode::InvalidRdRequest => cx.counters.sent_invalid_err += 1,
                    NakCode::RemoteAccessError => cx.counters.sent_access_err += 1,
                    NakCode::RemoteOperationalError => cx.counters.sent_operational_err += 1,
                }
                return true;
            }
        }
        false
    }

    /// A repeat: never executed again, answered from memory.
    fn on_duplicate(&mut self, psn: Psn, request: &Request<'_>, id: &Ident, cx: &mut Cx<'_>) {
        cx.counters.duplicate_request += 1;
        let remembered = match &request.op {
            RequestOp::Send(..) | RequestOp::Write(_) => self.ack_psn.is_some_and(|last| {
                self.answers.ack(last, self.msn);
                true
            }),
            RequestOp::Read(reth) => {
                let (mtu, most) = (id.mtu_bytes(), self.max_read_bytes);
                self.answers.repeat_read(psn, reth.addr, reth.rkey, reth.length, mtu, most)
            }
            RequestOp::CompareSwap(_) | RequestOp::FetchAdd(_) => self.answers.repeat_atomic(psn),
            RequestOp::AtomicWrite(_) => self.answers.repeat_placed(psn),
            RequestOp::Flush(..) => self.answers.repeat_flush(psn, self.msn),
        };
        if !remembered {
            cx.counters.count_drop(DropReason::ForgottenDuplicate);
        }
    }

    /// Whether an answer waits.
    pub(crate) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Writes the next answer packets, as many as fit one burst. The flag says that the QP fails: a region of an announced
    /// READ is gone.
    pub(crate) fn poll_transmit(
        &mut self,
        id: &Ident,
        path: &Path,
        cx: &mut Cx<'_>,
        room: &mut TxRoom<'_>,
    ) -> (Option<TxBurst>, bool) {
        let mut failed = false;
        let mut burst = BurstWriter::new(room, &path.flow);
        // Each failure drops the front, or puts a NAK in place of everything; where not even that has room, an end is made.
        let mut failures = 0;
        while (burst.is_empty() || burst.is_open()) && failures < MAX_ANSWERS + 2 {
            // Also one that stood behind READ data of this very burst.
            self.extend_ack();
            let Some(answer) = self.answers.front() else { break };
            if let Answer::Read(read) = &answer
                && burst.takes_runs()
                && is_read_inside(read)
                && let packets @ 1.. = write_read_run(read, id, path, cx, (&mut burst, &mut self.icrcs))
            {
                self.answers.sent(packets);
                continue;
            }
            match write_answer(&answer, self.ack_syndrome(), id, path, cx, (&mut burst, &mut self.icrcs)) {
                Ok(true) => self.answers.sent(1),
                Ok(false) => break,
                // The peer had its answer, or it would still stand in the queue: that the region is gone by now, perhaps
                // by the peer's own wish, is no violation.
                Err(_) if self.answers.front_is_repeat() => {
                    failures += 1;
                    self.answers.drop_front();
                    cx.counters.count_drop(DropReason::ForgottenDuplicate);
                }
                Err(psn) => {
                    failures += 1;
                    failed = true;
                    cx.counters.sent_access_err += 1;
                    self.answers.abort(psn, Syndrome::Nak(NakCode::RemoteAccessError), self.msn);
                }
            }
        }
        (burst.finish(), failed)
    }

    fn extend_ack(&mut self) {
        if let Some(psn) = self.ack_psn {
            self.answers.extend_ack(psn, self.msn);
        }
    }

    /// Whether an ACK waits, and nothing else.
    pub(crate) fn has_ack_alone(&self) -> bool {
        self.answers.is_ack_alone()
    }

    /// Adds an ACK that waits alone to a burst of requests, if it fits.
    pub(crate) fn append_ack(&mut self, id: &Ident, path: &Path, cx: &mut Cx<'_>, burst: &mut BurstWriter<'_, '_>) {
        if !self.answers.is_ack_alone() || !burst.is_open() {
            return;
        }
        self.extend_ack();
        if let Some(answer) = self.answers.front()
            && write_answer(&answer, self.ack_syndrome(), id, path, cx, (burst, &mut self.icrcs)) == Ok(true)
        {
            self.answers.sent(1);
        }
    }
}

/// Atomics work on aligned addresses.
const fn aligned(addr: u64) -> Result<(), Refusal> {
    if addr.is_multiple_of(8) { Ok(()) } else { Err(Refusal::INVALID) }
}

/// What a FLUSH covers, if the peer may.
fn flush_range<'a>(feth: &Feth, reth: &Reth, id: &Ident, cx: &'a Cx<'_>) -> Result<FlushRange<'a>, Refusal> {
    let Flush { rights, scope } = Flush::of(feth)?;
    cx.mrs.flush_range(id.pd, id.handle, reth.rkey, reth.addr, reth.length, scope, rights).map_err(|_| Refusal::ACCESS)
}

/// Adds one packet of `answer` to the burst; false when it does not fit. Fails with its PSN when its data cannot be read
/// any more.
fn write_answer(
    answer: &Answer,
    ack: Syndrome,
    id: &Ident,
    path: &Path,
    cx: &mut Cx<'_>,
    (burst, icrcs): (&mut BurstWriter<'_, '_>, &mut IcrcStarts),
) -> Result<bool, Psn> {
    let (psn, op, data) = match answer {
        Answer::Acknowledge(psn, aeth) => {
            let syndrome = if matches!(aeth.syndrome, Syndrome::Ack { .. }) { ack } else { aeth.syndrome };
            (*psn, ResponseOp::Acknowledge(Aeth { syndrome, msn: aeth.msn }), None)
        }
        Answer::Atomic(psn, msn, original) => {
            (*psn, ResponseOp::AtomicAcknowledge(Aeth { syndrome: ack, msn: *msn }, *original), None)
        }
        Answer::Placed(psn, msn) | Answer::Flushed(psn, msn) => {
            (*psn, ResponseOp::ReadOnly(Aeth { syndrome: ack, msn: *msn }), None)
        }
        Answer::Read(read) => {
            let (op, offset, len) = read_packet(read, ack, id.mtu_bytes());
            (read.next, op, Some((read, offset, len)))
        }
    };
    let len = data.map_or(0, |(_, _, len)| len);
    let body = Body::Response(Response { op, payload: &[] });
    let packet = Packet { mig_req: path.mig_req, ..Packet::new(path.dest_qpn, path.pkey, psn, body) };
    if !burst.takes(&packet, len) {
        return Ok(false);
    }
    let mrs = &*cx.mrs;
    let written = burst.push(icrcs, &packet, len, |out, crc| match data {
        Some((read, offset, len)) if len > 0 => mrs
            .remote(id.pd, id.handle, read.rkey, read.addr.wrapping_add(offset), len as u64, AccessFlags::REMOTE_READ)
            .and_then(|span| span.read_crc(out, crc)),
        _ => Ok(crc),
    });
    written.map(|()| true).map_err(|e| {
        cx.counters.send_err += u64::from(matches!(e, EmitError::NoRoom));
        psn
    })
}

/// The packet of a READ answer that comes next: its kind, where its data begins, and its bytes.
fn read_packet(read: &ReadAnswer, ack: Syndrome, mtu: usize) -> (ResponseOp, u64, usize) {
    let index = read.next.distance_from(read.first).unsigned_abs();
    let offset = u64::from(index) * mtu as u64;
    let left = u64::from(read.length).saturating_sub(offset);
    let len = usize::try_from(left).unwrap_or(usize::MAX).min(mtu);
    let aeth = Aeth { syndrome: ack, msn: read.msn };
    let op = match (index == 0, index + 1 == read.packets) {
        (true, true) => ResponseOp::ReadOnly(aeth),
        (true, false) => ResponseOp::ReadFirst(aeth),
        (false, true) => ResponseOp::ReadLast(aeth),
        (false, false) => ResponseOp::ReadMiddle,
    };
    (op, offset, len)
}
