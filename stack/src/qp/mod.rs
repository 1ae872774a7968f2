//! Queue pairs.
//!
//! Owns the transport of one QP: the state machine, the requester and completer of its send side, the responder of its
//! receive side, and the datagram paths. Everything a QP needs from outside is lent to it in a [`Cx`]. Never reads a
//! clock, never moves a frame.

mod answers;
mod assembly;
mod completer;
mod credits;
mod cx;
mod emit;
mod facts;
mod migrate;
mod modify;
mod notify;
mod path;
mod post;
mod progress;
mod queues;
mod requester;
mod responder;
mod rnr;
mod runs;
mod send_queue;
mod uc;
mod ud;
mod window;

use std::sync::Arc;

pub use answers::{MAX_ANSWERS, MAX_FLUSHES, MAX_RD_ATOMIC};
pub use cx::{Ah, AhTable, Cx};
pub(crate) use modify::pkey_at;
pub use modify::{ModifyLimits, QpFields};
pub(crate) use path::{flow_for, random_port};
pub use post::{MAX_MESSAGE, Poster, QpShared, SendProducer, post_recv_to};
#[cfg(feature = "hw")]
pub(crate) use post::{check_operation, check_sge_count};
pub use progress::{Behind, Progress, Waiting};
pub(crate) use queues::SpareQueues;
pub use queues::{SPARE_BYTES, SPARE_QUEUES};
pub use runs::Landing;
pub use ud::GRH_LEN;
pub use window::{MAX_READ_PSNS, MAX_UNACKED};

use assembly::{Assembly, ReceiveQueue, Refusal};
use completer::ResponseError;
use emit::BurstWriter;
use migrate::Migration;
use notify::Notifier;
use path::Path;
use queues::Queues;
use requester::{Requester, SendFailure};
use responder::{RequestBits, Responder};
use uc::UcReceiver;
use ud::{DatagramFrom, DatagramHeader, DatagramSender};

use crate::burst::{TxBurst, TxRoom};
use crate::counters::DropReason;
use crate::time::{Duration, Instant};
use crate::types::{PKey, PathMtu, Psn, Qpn};
use crate::verbs::{
    AsyncEvent, CqHandle, ErrorDetail, FailureKind, PdHandle, QpCapabilities, QpHandle, QpInfo, QpInit, QpOptions,
    QpState, QpType, QueueSnapshot, SrqHandle, WcData, WcOpcode, WcStatus, WorkCompletion,
};
use crate::wire::{Body, Flow, IpFields, NakCode, Packet, Service};

/// Who a QP is: what never changes, and the path MTU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ident {
    pub(crate) handle: QpHandle,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) pd: PdHandle,
    pub(crate) send_cq: CqHandle,
    pub(crate) recv_cq: CqHandle,
    pub(crate) srq: Option<SrqHandle>,
    pub(crate) signal_all: bool,
    pub(crate) mtu: PathMtu,
}

impl Ident {
    pub(crate) fn mtu_bytes(&self) -> usize {
        self.mtu.bytes()
    }

    /// A completion of this QP, its details still open.
    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, vendor_err: u32) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            opcode: WcOpcode::Send,
            vendor_err,
            byte_len: 0,
            data: WcData::None,
            qp: self.handle,
            qp_num: self.qpn,
            src_qp: Qpn::default(),
            grh: false,
            solicited: false,
        }
    }
}

/// A received packet's surroundings.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Addresses as they stood in the packet.
    pub flow: &'a Flow,
    /// IPv4 fields as far as they are known.
    pub ip: IpFields,
    /// Bytes of the segment, BTH to ICRC.
    pub segment: usize,
    /// It carried the congestion mark.
    pub marked: bool,
}

#[derive(Debug)]
enum Sender {
    Connected(Requester),
    Datagram(DatagramSender),
}

#[derive(Debug)]
enum Receiver {
    Rc(Responder),
    Uc(UcReceiver),
    Ud(ReceiveQueue),
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    id: Ident,
    caps: QpCapabilities,
    state: QpState,
    fields: QpFields,
    path: Option<Path>,
    migration: Migration,
    notifier: Notifier,
    options: QpOptions,
    /// Datagram QPs: their partition key.
    pkey: PKey,
    sender: Sender,
    receiver: Receiver,
    shared: Arc<QpShared>,
    poster: Option<Poster>,
    last_error: Option<ErrorDetail>,
    notify_drained: bool,
    established: bool,
    /// The last burst was of answers: it is a request's turn.
    answered: bool,
    /// The last burst was of requests, and an ACK that waited found no place in it: it is an answer's turn.
    overdue: bool,
    /// Requests went ahead of an ACK.
    held: bool,
}

impl Qp {
    /// A QP in RESET. `srq` is what a receive of its SRQ may have, and the SRQ's protection domain, where it has one. Its
    /// queues are made, or taken from `spare`.
    #[must_use]
    pub(crate) fn new(
        handle: QpHandle,
        qpn: Qpn,
        init: &QpInit,
        srq: Option<(usize, PdHandle)>,
        datagram_mtu: u16,
        options: QpOptions,
        spare: &mut SpareQueues,
    ) -> Self {
        let caps = init.caps;
        let kept = if init.qp_type == QpType::Rc && srq.is_none() { spare.take(&caps) } else { None };
        let queues = kept.unwrap_or_else(|| Queues::new(caps, srq.map(|(sges, _)| sges), datagram_mtu));
        let Queues { send: queue, send_caller, recv, recv_sges, reads, answers, shared, .. } = queues;
        let (recv_caller, recv_engine) = recv.unzip();
        let recv_pd = srq.map_or(init.pd, |(_, pd)| pd);
        let rq = ReceiveQueue::new(recv_engine, init.srq, recv_pd, recv_sges);
        let (sender, receiver) = match init.qp_type {
            QpType::Rc => (
                Sender::Connected(Requester::new(queue, reads, Service::Rc)),
                Receiver::Rc(Responder::new(Assembly::new(rq), answers)),
            ),
            QpType::Uc => (
                Sender::Connected(Requester::new(queue, reads, Service::Uc)),
                Receiver::Uc(UcReceiver::new(Assembly::new(rq))),
            ),
            QpType::Ud | QpType::Gsi => (Sender::Datagram(DatagramSender::new(queue)), Receiver::Ud(rq)),
        };
        let poster =
            Poster { qp_type: init.qp_type, caps, shared: Arc::clone(&shared), send: send_caller, recv: recv_caller };
        Self {
            id: Ident {
                handle,
                qpn,
                qp_type: init.qp_type,
                pd: init.pd,
                send_cq: init.send_cq,
                recv_cq: init.recv_cq,
                srq: init.srq,
                signal_all: init.signal_all,
                mtu: PathMtu::B4096,
            },
            caps,
            state: QpState::Reset,
            fields: QpFields::default(),
            path: None,
            migration: Migration::default(),
            notifier: Notifier::default(),
            options,
            pkey: PKey::DEFAULT,
            sender,
            receiver,
            shared,
            poster: Some(poster),
            last_error: None,
            notify_drained: false,
            established: false,
            answered: false,
            overdue: false,
            held: false,
        }
    }

    /// Takes it apart, for the next QP of its sizes. Not where the caller's half was given away: its owner may still
    /// hold it.
    pub(crate) fn retire(self, spare: &mut SpareQueues) {
        if let (Some(poster), Sender::Connected(r), Receiver::Rc(receiver)) = (self.poster, self.sender, self.receiver)
        {
            let (queue, reads) = r.into_parts();
            let (rq, answers) = receiver.into_parts();
            spare.keep(Queues::gather(poster, queue, rq, reads, answers));
        }
    }

    /// Number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.id.qpn
    }

    /// Transport.
    #[must_use]
    pub fn qp_type(&self) -> QpType {
        self.id.qp_type
    }

    /// State.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Protection domain.
    #[must_use]
    pub fn pd(&self) -> PdHandle {
        self.id.pd
    }

    /// Completion queues: of sends, of receives.
    #[must_use]
    pub fn cqs(&self) -> (CqHandle, CqHandle) {
        (self.id.send_cq, self.id.recv_cq)
    }

    /// Shared receive queue.
    #[must_use]
    pub fn srq(&self) -> Option<SrqHandle> {
        self.id.srq
    }

    /// The caller's half, if it was not given away.
    pub fn poster_mut(&mut self) -> Option<&mut Poster> {
        self.poster.as_mut()
    }

    /// Gives the caller's half away, to be posted to without the engine.
    pub fn take_poster(&mut self) -> Option<Poster> {
        self.poster.take()
    }

    /// When it wants to be called though nothing arrives.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.sender {
            Sender::Connected(r) => r.deadline(),
            Sender::Datagram(_) => None,
        }
    }

    /// Its options.
    #[must_use]
    pub fn options(&self) -> QpOptions {
        self.options
    }

    /// Sets its options, from the next packet on.
    pub fn set_options(&mut self, options: QpOptions) {
        self.options = options;
        self.refresh();
        self.refresh_mig_req();
    }

    /// State, attributes and progress.
    #[must_use]
    pub fn info(&self) -> QpInfo {
        let mut queues = QueueSnapshot::default();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        match &self.sender {
            Sender::Connected(r) => {
                (queues.sq_psn, queues.unacked_psn) = r.psns();
                queues.sends_outstanding = count(r.queue.outstanding());
                queues.retries_used = r.retries_used;
            }
            Sender::Datagram(d) => {
                (queues.sq_psn, queues.unacked_psn) = (d.psn(), d.psn());
                queues.sends_outstanding = count(d.queue.outstanding());
            }
        }
        let rq = match &self.receiver {
            Receiver::Rc(r) => {
                queues.rq_psn = r.expected();
                &r.assembly.rq
            }
            Receiver::Uc(r) => {
                queues.rq_psn = r.expected();
                &r.assembly.rq
            }
            Receiver::Ud(rq) => rq,
        };
        queues.receives_posted = count(rq.waiting());
        QpInfo {
            qpn: self.id.qpn,
            qp_type: self.id.qp_type,
            state: self.state,
            attr: self.fields.to_attr(self.state, self.migration.state),
            caps: self.caps,
            queues,
            last_error: self.last_error,
        }
    }

    /// What the send side waits for.
    #[must_use]
    pub fn progress(&self) -> Progress {
        match &self.sender {
            Sender::Connected(r) => r.progress(),
            Sender::Datagram(d) => Progress::of_datagrams(d.queue.outstanding()),
        }
    }

    /// Takes a packet whose BTH names this QP. Returns why it was dropped, if it was.
    ///
    /// # Errors
    /// [`DropReason`].
    pub fn handle_packet(
        &mut self,
        packet: &Packet<'_>,
        arrival: &Arrival<'_>,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        if !self.state.receives() {
            return Err(DropReason::QpState);
        }
        match &packet.body {
            Body::Datagram(datagram) => {
                self.check_datagram_pkey(packet.pkey, cx)?;
                let Receiver::Ud(rq) = &mut self.receiver else { return Err(DropReason::WrongTransport) };
                if self.fields.qkey != Some(datagram.qkey) {
                    return Err(DropReason::QKeyMismatch);
                }
                let from = DatagramFrom {
                    flow: arrival.flow,
                    ip: arrival.ip,
                    segment: arrival.segment,
                    solicited: packet.solicited,
                };
                ud::receive(rq, &from, datagram, &self.id, cx)
            }
            Body::Request(_) | Body::Response(_) | Body::Cnp => self.handle_connected(packet, arrival, cx),
        }
    }

    fn handle_connected(
        &mut self,
        packet: &Packet<'_>,
        arrival: &Arrival<'_>,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        if matches!(packet.body, Body::Cnp) {
            return self.handle_notification(packet.pkey, arrival.flow, cx);
        }
        self.check_path(packet, arrival.flow, cx)?;
        if arrival.marked {
            self.notifier.marked(packet, self.options.cnp_interval, cx.now);
        }
        match &packet.body {
            Body::Request(request) => {
                let fits = match request.service {
                    Service::Rc => self.id.qp_type == QpType::Rc,
                    Service::Uc => self.id.qp_type == QpType::Uc,
                };
                if !fits {
                    return Err(DropReason::WrongTransport);
                }
                self.note_established(packet.psn, cx);
                self.handle_request(packet, request, cx)
            }
            Body::Response(response) => {
                if self.id.qp_type != QpType::Rc {
                    return Err(DropReason::WrongTransport);
                }
                if matches!(self.state, QpState::Rtr) {
                    return Err(DropReason::UnexpectedResponse);
                }
                self.handle_response(packet, response, cx)
            }
            Body::Datagram(_) | Body::Cnp => Err(DropReason::WrongTransport),
        }
    }

    /// The PSN of the request that comes next.
    fn expected_psn(&self) -> Option<Psn> {
        match &self.receiver {
            Receiver::Rc(r) => Some(r.expected()),
            Receiver::Uc(r) => Some(r.expected()),
            Receiver::Ud(_) => None,
        }
    }

    /// Only a packet in sequence shows that the peer is connected: a ghost of an earlier connection does not.
    fn note_established(&mut self, psn: Psn, cx: &mut Cx<'_>) {
        if !self.established && self.state == QpState::Rtr && self.expected_psn() == Some(psn) {
            self.established = true;
            cx.events.push(AsyncEvent::CommunicationEstablished(self.id.handle));
        }
    }

    fn handle_request(
        &mut self,
        packet: &Packet<'_>,
        request: &crate::wire::Request<'_>,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        let bits = RequestBits { psn: packet.psn, ack_req: packet.ack_req, solicited: packet.solicited };
        match &mut self.receiver {
            Receiver::Uc(uc) => uc.on_request(bits, request, &self.id, cx),
            Receiver::Rc(rc) => {
                match rc.on_request(bits, request, &self.id, cx) {
                    Ok(accepted) if accepted.then_fail => {
                        let told = (None, WcStatus::RemoteInvalidRequest);
                        self.fail_receive(FailureKind::InvalidateFailed, told, packet, cx);
                    }
                    Ok(_) => {}
                    Err(refusal) => {
                        if rc.refuse(refusal, bits, request, &self.id, cx) {
                            self.refused(refusal, packet, cx);
                        }
                    }
                }
                Ok(())
            }
            Receiver::Ud(_) => Err(DropReason::WrongTransport),
        }
    }

    /// A NAK that ends the QP is queued: ERR, with the receive WQE in hand completing under its own status.
    fn refused(&mut self, refusal: Refusal, packet: &Packet<'_>, cx: &mut Cx<'_>) {
        let Refusal::Nak { code, local } = refusal else { return };
        let event = match code {
            NakCode::RemoteAccessError => AsyncEvent::QpAccessError(self.id.handle),
            NakCode::RemoteOperationalError => AsyncEvent::QpFatal(self.id.handle),
            _ => AsyncEvent::QpRequestError(self.id.handle),
        };
        cx.events.push(event);
        let kind = match local {
            Some(WcStatus::LocalLength) => FailureKind::ReceiveTooSmall,
            Some(_) => FailureKind::LocalElement,
            None => FailureKind::RefusedPeer,
        };
        let status = match code {
            NakCode::RemoteAccessError => WcStatus::LocalAccess,
            NakCode::RemoteOperationalError => WcStatus::LocalQpOperation,
            _ => WcStatus::RemoteInvalidRequest,
        };
        self.fail_receive(kind, (local, status), packet, cx);
    }

    /// `local` is the status of the receive WQE in hand, where the refusal has one for it; the other tells people what it
    /// was without one.
    fn fail_receive(
        &mut self,
        kind: FailureKind,
        (local, told): (Option<WcStatus>, WcStatus),
        packet: &Packet<'_>,
        cx: &mut Cx<'_>,
    ) {
        let (status, request) = (local.unwrap_or(told), facts::of_peer(packet));
        let detail = ErrorDetail { kind, status, psn: packet.psn, tries: 0, elapsed: Duration::ZERO, request };
        self.enter_error(detail, local.map(|s| (s, kind)), true, cx);
    }

    fn handle_response(
        &mut self,
        packet: &Packet<'_>,
        response: &crate::wire::Response<'_>,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        let Sender::Connected(requester) = &mut self.sender else { return Err(DropReason::WrongTransport) };
        match requester.on_response(packet.psn, response, &self.id, cx) {
            Ok(()) => {
                self.check_drained(cx);
                Ok(())
            }
            Err(ResponseError::Drop(reason)) => Err(reason),
            Err(ResponseError::Fail(failure)) => {
                self.fail_send(&failure, cx);
                Ok(())
            }
        }
    }

    /// Acts on timers that have run out.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if let Sender::Connected(requester) = &mut self.sender
            && matches!(self.state, QpState::Rts | QpState::Sqd)
            && let Err(failure) = requester.handle_timeout(cx)
        {
            self.fail_send(&failure, cx);
        }
    }

    /// Writes the next burst: answers first, as a peer waits for them; then they take turns with requests, which a
    /// peer that always has READs outstanding would keep back for ever. An ACK alone rides behind requests where bursts have
    /// room for it: of all packets it is the shortest, and one packet of a burst costs next to nothing.
    pub fn poll_transmit(&mut self, cx: &mut Cx<'_>, room: &mut TxRoom<'_>) -> Option<TxBurst> {
        self.held = false;
        if let Some(path) = &self.path
            && let Some(burst) = self.notifier.poll_transmit(path, room)
        {
            cx.counters.np_cnp_sent += 1;
            return Some(burst);
        }
        let overdue = core::mem::take(&mut self.overdue);
        if (core::mem::take(&mut self.answered) || (room.segments_max > 1 && !overdue && self.has_ack_alone()))
            && let Some(burst) = self.poll_requests(cx, room, true)
        {
            self.overdue = self.has_ack_alone();
            return Some(burst);
        }
        if let (Receiver::Rc(responder), Some(path)) = (&mut self.receiver, &self.path)
            && responder.has_answers()
        {
            let psn = responder.expected();
            let (burst, failed) = responder.poll_transmit(&self.id, path, cx, room);
            if failed {
                cx.events.push(AsyncEvent::QpAccessError(self.id.handle));
                let (kind, status) = (FailureKind::RefusedPeer, WcStatus::LocalAccess);
                self.enter_error(
                    ErrorDetail { kind, status, psn, tries: 0, elapsed: Duration::ZERO, request: None },
                    None,
                    true,
                    cx,
                );
            }
            self.answered = burst.is_some();
            return burst;
        }
        self.poll_requests(cx, room, true)
    }

    /// As [`Self::poll_transmit`], but where there are requests, an ACK that waits alone is held: until the next call of the
    /// other.
    pub fn poll_posted(&mut self, cx: &mut Cx<'_>, room: &mut TxRoom<'_>) -> Option<TxBurst> {
        if self.has_ack_alone() {
            let burst = self.poll_requests(cx, room, false);
            self.held |= burst.is_some();
            if self.held {
                return burst;
            }
        }
        self.poll_transmit(cx, room)
    }

    /// Whether an ACK is held.
    pub fn holds_ack(&self) -> bool {
        self.held && self.has_ack_alone()
    }

    fn has_ack_alone(&self) -> bool {
        matches!(&self.receiver, Receiver::Rc(responder) if responder.has_ack_alone())
    }

    /// The next burst of requests; `with_ack`: one that waits alone rides behind them.
    fn poll_requests(&mut self, cx: &mut Cx<'_>, room: &mut TxRoom<'_>, with_ack: bool) -> Option<TxBurst> {
        match self.state {
            QpState::Rts | QpState::Sqd => {}
            QpState::Err => {
                self.flush(None, cx);
                return None;
            }
            QpState::Sqe => {
                self.flush_sends(cx);
                return None;
            }
            QpState::Reset | QpState::Init | QpState::Rtr => return None,
        }
        let result = match (&mut self.sender, &mut self.path) {
            (Sender::Connected(requester), Some(path)) => {
                path.rotate(requester, cx.source_ports, cx.rng);
                let mut burst = BurstWriter::new(room, &path.request_flow);
                let result = requester.poll_transmit(&self.id, path, cx, &mut burst);
                if requester.service == Service::Uc {
                    requester.complete_sent(&self.id, cx);
                }
                if let Receiver::Rc(responder) = &mut self.receiver
                    && with_ack
                    && !burst.is_empty()
                    && path.flow == path.request_flow
                {
                    responder.append_ack(&self.id, path, cx, &mut burst);
                }
                result.map(|()| burst.finish())
            }
            (Sender::Connected(_), None) => return None,
            (Sender::Datagram(_), _) if self.state == QpState::Sqd => return None,
            (Sender::Datagram(sender), _) => {
                let (qkey, mig_req) = (self.fields.qkey.unwrap_or_default(), self.options.mig_req.unwrap_or(true));
                let with = DatagramHeader { qkey, pkey: self.pkey, mig_req };
                sender.poll_transmit(&self.id, with, cx, room)
            }
        };
        self.check_drained(cx);
        match result {
            Ok(burst) => burst,
            Err(failure) => {
                self.fail_send(&failure, cx);
                None
            }
        }
    }

    /// SQD: everything begun is done.
    fn check_drained(&mut self, cx: &mut Cx<'_>) {
        let drained = match &self.sender {
            Sender::Connected(r) => r.is_drained(),
            Sender::Datagram(_) => true,
        };
        if self.state == QpState::Sqd && self.notify_drained && drained {
            self.notify_drained = false;
            cx.events.push(AsyncEvent::SendQueueDrained(self.id.handle));
        }
    }

    /// The oldest send failed: RC goes to ERR, UC and UD to SQE.
    fn fail_send(&mut self, failure: &SendFailure, cx: &mut Cx<'_>) {
        if failure.status == WcStatus::RetryExceeded {
            if self.migrate_instead(cx) {
                return;
            }
            cx.counters.retry_exceeded_err += 1;
        }
        let (tries, since, queue) = match &self.sender {
            Sender::Connected(r) => {
                (r.rnr_used.saturating_add(u32::from(r.retries_used) + 1), r.waiting_since, &r.queue)
            }
            Sender::Datagram(d) => (1, cx.now, &d.queue),
        };
        let detail = ErrorDetail {
            kind: failure.kind,
            status: failure.status,
            psn: failure.psn,
            tries,
            elapsed: cx.now.saturating_since(since),
            request: facts::of_send(queue, failure.psn),
        };
        match &mut self.sender {
            Sender::Connected(r) => r.fail(failure, &self.id, cx),
            Sender::Datagram(d) => d.fail(failure, &self.id, cx),
        }
        if self.id.qp_type == QpType::Rc {
            self.enter_error(detail, None, false, cx);
        } else {
            self.last_error.get_or_insert(detail);
            self.set_state(QpState::Sqe);
        }
    }

    /// Goes to ERR: everything posted is flushed. `speak` keeps the answers that are queued, a NAK among them.
    pub(crate) fn enter_error(
        &mut self,
        detail: ErrorDetail,
        held: Option<(WcStatus, FailureKind)>,
        speak: bool,
        cx: &mut Cx<'_>,
    ) {
        if self.state == QpState::Err {
            return;
        }
        self.last_error.get_or_insert(detail);
        self.set_state(QpState::Err);
        if let Receiver::Rc(responder) = &mut self.receiver
            && !speak
        {
            responder.silence();
        }
        self.flush(held, cx);
        if self.id.srq.is_some() {
            // Nothing of the SRQ is held any more: the program may destroy the QP.
            cx.events.push(AsyncEvent::LastWqeReached(self.id.handle));
        }
    }

    /// A CQ of this QP overran.
    pub fn cq_overran(&mut self, cx: &mut Cx<'_>) {
        if matches!(self.state, QpState::Reset | QpState::Err) {
            return;
        }
        cx.events.push(AsyncEvent::QpFatal(self.id.handle));
        let (kind, status) = (FailureKind::CqOverrun, WcStatus::General);
        let psn = self.info().queues.unacked_psn;
        self.enter_error(
            ErrorDetail { kind, status, psn, tries: 0, elapsed: Duration::ZERO, request: None },
            None,
            true,
            cx,
        );
    }

    fn set_state(&mut self, state: QpState) {
        self.state = state;
        self.shared.publish(state, self.fields.max_rd_atomic.unwrap_or(0));
    }

    fn flush_sends(&mut self, cx: &mut Cx<'_>) {
        match &mut self.sender {
            Sender::Connected(r) => r.flush(&self.id, cx),
            Sender::Datagram(d) => d.flush(&self.id, cx),
        }
    }

    fn flush(&mut self, held: Option<(WcStatus, FailureKind)>, cx: &mut Cx<'_>) {
        self.flush_sends(cx);
        let (assembly, rq) = match &mut self.receiver {
            Receiver::Rc(r) => (Some(&mut r.assembly), None),
            Receiver::Uc(r) => (Some(&mut r.assembly), None),
            Receiver::Ud(rq) => (None, Some(rq)),
        };
        if let Some(a) = assembly {
            a.abandon();
            a.rq.flush(held, &self.id, cx);
        }
        if let Some(rq) = rq {
            rq.flush(held, &self.id, cx);
        }
    }
}
