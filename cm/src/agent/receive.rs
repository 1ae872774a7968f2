//! What the peer says: the way in, and the messages that fit several states.

use uroce::time::Instant;

use super::gate::{Admission, Arrival, Notice, Outcome};
use super::{Agent, CmEvent, DisconnectCause, MadAddress, Rejection, address_of};
use crate::comm::{CommId, Incoming, Lap, State, Verdict, verdict};
use crate::wire::{
    Ari, CLASS_VERSION, CommunicationId, Mad, MadError, MadKind, Message, Mra, PrivateData, Rej, RejInfo, RejReason,
    RejectedMessage, SidrRep, SidrStatus, TransactionId,
};

/// A MAD that was let in.
#[derive(Clone, Copy)]
pub(super) struct Arrived<'a> {
    pub(super) now: Instant,
    pub(super) from: MadAddress,
    pub(super) mad: &'a Mad,
}

impl Arrived<'_> {
    pub(super) const fn transaction(&self) -> TransactionId {
        self.mad.header.transaction_id
    }
}

/// A REQ or REP that is refused without asking the consumer.
pub(super) struct Refused {
    pub(super) reason: RejReason,
    pub(super) ari: Ari,
}

impl Refused {
    pub(super) fn new(reason: RejReason, info: RejInfo) -> Self {
        Self { reason, ari: info.to_ari() }
    }
}

impl From<RejReason> for Refused {
    fn from(reason: RejReason) -> Self {
        Self { reason, ari: Ari::EMPTY }
    }
}

impl Agent {
    /// Takes a MAD that arrived between these two addresses.
    pub fn handle_mad(&mut self, now: Instant, from: MadAddress, mad: &[u8]) {
        let parsed = Mad::parse(mad);
        let arrival = Arrival { from, mad: parsed.as_ref().map_err(|e| *e) };
        let admission = match self.gate.as_mut().map_or(Admission::Take, |gate| gate.admit(now, &arrival)) {
            Admission::Take => self.police(now, &arrival),
            refused => refused,
        };
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(error) => {
                self.counters.malformed += 1;
                if matches!(error, MadError::ClassVersion(_)) && admission == Admission::Take {
                    self.refuse_version(from, mad);
                }
                return;
            }
        };
        self.counters.count_received(parsed.message.kind());
        let cx = Arrived { now, from, mad: &parsed };
        match admission {
            Admission::Take => self.dispatch(&cx),
            Admission::Drop => self.counters.not_admitted += 1,
            Admission::Refuse(reason) => {
                self.counters.not_admitted += 1;
                match &parsed.message {
                    Message::Req(req) => self.send_rej_of_req(&cx, req, &reason.into()),
                    Message::SidrReq(req) => self.send_sidr_refusal(&cx, req, SidrStatus::Rejected),
                    _ => {}
                }
            }
        }
    }

    /// A REQ or SIDR_REQ of another class version: the sender hears which one we speak.
    fn refuse_version(&mut self, from: MadAddress, mad: &[u8]) {
        match Mad::parse_other_version(mad) {
            Some((MadKind::Req, transaction, id)) => {
                let rej = Rej {
                    local_comm_id: CommunicationId::NONE,
                    remote_comm_id: CommunicationId::new(id),
                    message: RejectedMessage::Req,
                    reason: RejReason::InvalidClassVersion,
                    ari: RejInfo::ClassVersion(CLASS_VERSION).to_ari(),
                    private_data: PrivateData::EMPTY,
                };
                self.send(from, transaction, rej);
            }
            Some((MadKind::SidrReq, transaction, request_id)) => {
                let rep = SidrRep { request_id, ..SidrRep::refusal(SidrStatus::UnsupportedVersion) };
                self.send(from, transaction, rep);
            }
            _ => {}
        }
    }

    fn dispatch(&mut self, cx: &Arrived<'_>) {
        match &cx.mad.message {
            Message::Req(m) => self.on_req(cx, m),
            Message::Rep(m) => self.on_rep(cx, m),
            Message::Rtu(m) => self.on_rtu(cx, m),
            Message::Mra(m) => self.on_mra(cx, m),
            Message::Rej(m) => self.on_rej(cx, m),
            Message::Dreq(m) => self.on_dreq(cx, m),
            Message::Drep(m) => self.on_drep(cx, m),
            Message::SidrReq(m) => self.on_sidr_req(cx, m),
            Message::SidrRep(m) => self.on_sidr_rep(cx, m),
            Message::Lap(m) => self.on_lap(cx, m),
            Message::Apr(m) => self.on_apr(cx, m),
        }
    }

    /// Tells the gate what became of a MAD.
    pub(super) fn note(&mut self, cx: &Arrived<'_>, outcome: Outcome) {
        self.audit_outcome(cx, outcome);
        if let Some(gate) = self.gate.as_mut() {
            gate.notice(cx.now, &Notice::of(cx.from, cx.mad, outcome));
        }
    }

    pub(super) fn unmatched(&mut self, cx: &Arrived<'_>) {
        self.counters.unmatched += 1;
        self.note(cx, Outcome::Unmatched);
    }

    pub(super) fn stranger(&mut self, cx: &Arrived<'_>) {
        self.counters.strangers += 1;
        self.note(cx, Outcome::Stranger);
    }

    pub(super) fn out_of_place(&mut self, cx: &Arrived<'_>) {
        self.counters.duplicates += 1;
        self.note(cx, Outcome::OutOfPlace);
    }

    /// The communication with our id `ours`, if the peer's id and address are right. `theirs` is not compared while we do
    /// not know it.
    pub(super) fn find(&mut self, cx: &Arrived<'_>, ours: CommunicationId, theirs: CommunicationId) -> Option<CommId> {
        let found = self.tables.by_local_id(ours).and_then(|h| self.tables.comms.get(h).map(|c| (h, c)));
        let Some((handle, comm)) = found else {
            self.unmatched(cx);
            return None;
        };
        if comm.remote_id != CommunicationId::NONE && comm.remote_id != theirs {
            self.unmatched(cx);
            return None;
        }
        if !comm.is_from(cx.from.remote) {
            self.stranger(cx);
            return None;
        }
        Some(handle)
    }

    pub(super) fn verdict(&self, handle: CommId, incoming: Incoming) -> Verdict {
        self.tables.comms.get(handle).map_or(Verdict::Ignore, |c| verdict(c.state.name(), incoming))
    }

    /// A message that came before: ask for time, or answer again.
    pub(super) fn on_duplicate(&mut self, cx: &Arrived<'_>, handle: CommId, incoming: Incoming) {
        self.out_of_place(cx);
        let verdict = self.verdict(handle, incoming);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        match (verdict, &mut comm.state) {
            (Verdict::SendMra, _) => self.send_mra(cx.now, handle),
            (Verdict::Repeat, State::RepSent(retry)) => {
                let (kind, bytes) = (retry.kind, *retry.bytes);
                self.send_bytes(to, kind, bytes);
            }
            (Verdict::RepeatRtu, State::Established { rtu: Some(rtu), .. }) => {
                let bytes = **rtu;
                self.send_bytes(to, MadKind::Rtu, bytes);
            }
            _ => {}
        }
    }

    fn on_mra(&mut self, cx: &Arrived<'_>, mra: &Mra) {
        let Some(handle) = self.find(cx, mra.remote_comm_id, mra.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Mra(mra.message)) != Verdict::Extend {
            return;
        }
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let cap = (self.config.mra_cap, self.config.mra_max);
        if let State::ReqSent(retry) | State::RepSent(retry) | State::Established { lap: Lap::Sent { retry, .. }, .. } =
            &mut comm.state
            && let Some(due) = retry.extend(cx.now, mra.service_timeout.duration(), cap)
        {
            self.tables.set_due(handle, Some(due));
        }
    }

    fn on_rej(&mut self, cx: &Arrived<'_>, rej: &Rej) {
        let Some(handle) = self.find_rejected(cx, rej) else { return };
        if self.not_there_yet(handle, rej.reason) {
            return;
        }
        // A refusal of our REQ that comes late must not end what came of a later one between equals.
        let asked = self.tables.comms.get(handle).is_some_and(|c| matches!(c.state, State::ReqSent(_)));
        if rej.message == RejectedMessage::Req && !asked {
            return self.out_of_place(cx);
        }
        let timewait = match self.verdict(handle, Incoming::Rej(rej.reason)) {
            Verdict::End => false,
            Verdict::TimeWait => true,
            _ => return,
        };
        let connected = self
            .tables
            .comms
            .get(handle)
            .is_some_and(|c| matches!(c.state, State::Established { .. } | State::DreqSent(_)));
        if connected {
            self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Rejected(rej.reason) });
        } else {
            self.emit(CmEvent::Rejected(Box::new(Rejection {
                comm: handle,
                message: rej.message,
                reason: rej.reason,
                ari: rej.ari,
                private_data: rej.private_data,
                timewait,
            })));
        }
        if timewait {
            self.enter_timewait(cx.now, handle);
        } else {
            self.tables.remove(handle);
        }
    }

    /// The sender of a REJ may not know our id (it gave up on its REQ), or have none of its own (it has no listener).
    /// Once both sides have told their ids a REJ names both, as one id alone can be guessed.
    fn find_rejected(&mut self, cx: &Arrived<'_>, rej: &Rej) -> Option<CommId> {
        let unaware = rej.remote_comm_id == CommunicationId::NONE;
        let handle = if unaware {
            let guid = rej.ari.ca_guid().filter(|_| rej.reason == RejReason::Timeout);
            guid.and_then(|guid| self.tables.by_remote_id((cx.from.remote, guid), rej.local_comm_id))
        } else {
            self.tables.by_local_id(rej.remote_comm_id)
        };
        let Some((handle, comm)) = handle.and_then(|h| self.tables.comms.get(h).map(|c| (h, c))) else {
            self.unmatched(cx);
            return None;
        };
        let knows_peer = comm.remote_id != CommunicationId::NONE;
        if knows_peer && comm.remote_id != rej.local_comm_id || unaware && !comm.state.is_half_open() {
            self.unmatched(cx);
            return None;
        }
        if !comm.is_from(cx.from.remote) {
            self.stranger(cx);
            return None;
        }
        Some(handle)
    }
}
