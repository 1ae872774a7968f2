//! Service resolution: which datagram QP serves (IBTA Vol 1 12.11), both sides.
//!
//! Owns the exchanges of SIDR_REQ and SIDR_REP: the questions that we asked, and those that peers asked, with the answers
//! given a while ago so that a repeated question gets the same one. An exchange leaves no connection behind.

use std::collections::{BTreeMap, BTreeSet};

use uroce::rng::Rng;
use uroce::table::{NumberMap, Slab};
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, PKey, Qpn};

use super::gate::Outcome;
use super::receive::Arrived;
use super::request::NoListener;
use super::types::{ResolveParams, ServiceAnswer, ServiceReply, ServiceRequest};
use super::{Agent, CmError, CmEvent, MadAddress, Overflow};
use crate::comm::{ListenerId, SidrId, kind};
use crate::retry::{Due, Retransmission};
use crate::wire::{Ari, MAD_LEN, Mad, MadKind, PrivateData, ServiceId, SidrRep, SidrReq, SidrStatus, TransactionId};

/// How long an answer is kept for repeats of its question: longer than two of Linux's intervals.
const ANSWER_KEPT: Duration = Duration::from_secs(10);

/// One question.
enum Exchange {
    /// We asked.
    Asked { to: MadAddress, request_id: u32, service_id: ServiceId, retry: Box<Retransmission> },
    /// The consumer has it.
    Pending {
        peer: (Gid, u32),
        from: MadAddress,
        transaction: TransactionId,
        service_id: ServiceId,
        listener: ListenerId,
    },
    /// It was answered.
    Answered { peer: (Gid, u32), bytes: Box<[u8; MAD_LEN]> },
}

struct Entry {
    exchange: Exchange,
    due: Instant,
}

/// All exchanges.
pub(super) struct Exchanges {
    entries: Slab<kind::Sidr, Entry>,
    by_request_id: NumberMap<SidrId>,
    by_peer: BTreeMap<(Gid, u32), SidrId>,
    timers: BTreeSet<(Instant, SidrId)>,
    /// The answered ones, by when they are forgotten.
    answered: BTreeSet<(Instant, SidrId)>,
    limit: usize,
    asked: usize,
}

impl Exchanges {
    pub(super) fn new(limit: usize, rng: &mut Rng) -> Self {
        Self {
            entries: Slab::new(limit.saturating_mul(2)),
            by_request_id: NumberMap::new(rng.next_u64()),
            by_peer: BTreeMap::new(),
            timers: BTreeSet::new(),
            answered: BTreeSet::new(),
            limit,
            asked: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub(super) fn due_by(&self, now: Instant) -> Option<SidrId> {
        self.timers.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    /// Room for a question of ours.
    const fn can_ask(&self) -> bool {
        self.asked < self.limit
    }

    /// Room for a question of a peer; the oldest answer goes for it.
    fn can_serve(&mut self) -> bool {
        if self.entries.len() - self.asked < self.limit {
            return true;
        }
        let oldest = self.answered.first().map(|(_, id)| *id);
        oldest.is_some_and(|id| self.remove(id).is_some())
    }

    fn insert(&mut self, exchange: Exchange, due: Instant) -> Option<SidrId> {
        let (asked, peer) = (exchange.asked_id(), exchange.peer());
        let id = self.entries.insert(Entry { exchange, due })?;
        self.timers.insert((due, id));
        if let Some(request_id) = asked {
            self.by_request_id.insert(request_id, id);
            self.asked += 1;
        }
        if let Some(peer) = peer {
            self.by_peer.insert(peer, id);
        }
        Some(id)
    }

    fn set_due(&mut self, id: SidrId, due: Instant) {
        if let Some(entry) = self.entries.get_mut(id) {
            self.timers.remove(&(entry.due, id));
            entry.due = due;
            self.timers.insert((due, id));
        }
    }

    /// The answer to a pending question is out.
    fn set_answered(&mut self, id: SidrId, peer: (Gid, u32), bytes: [u8; MAD_LEN], due: Instant) {
        self.set_due(id, due);
        if let Some(entry) = self.entries.get_mut(id) {
            entry.exchange = Exchange::Answered { peer, bytes: Box::new(bytes) };
            self.answered.insert((due, id));
        }
    }

    fn remove(&mut self, id: SidrId) -> Option<Exchange> {
        let entry = self.entries.remove(id)?;
        self.timers.remove(&(entry.due, id));
        self.answered.remove(&(entry.due, id));
        if let Some(request_id) = entry.exchange.asked_id() {
            self.by_request_id.remove(request_id);
            self.asked -= 1;
        }
        if let Some(peer) = entry.exchange.peer()
            && self.by_peer.get(&peer) == Some(&id)
        {
            self.by_peer.remove(&peer);
        }
        Some(entry.exchange)
    }
}

impl Exchange {
    const fn asked_id(&self) -> Option<u32> {
        match self {
            Self::Asked { request_id, .. } => Some(*request_id),
            _ => None,
        }
    }

    const fn peer(&self) -> Option<(Gid, u32)> {
        match self {
            Self::Asked { .. } => None,
            Self::Pending { peer, .. } | Self::Answered { peer, .. } => Some(*peer),
        }
    }
}

impl Agent {
    /// Asks which datagram QP serves. A [`CmEvent::ServiceReply`] or [`CmEvent::ServiceUnreachable`] follows, and ends the
    /// exchange.
    ///
    /// # Errors
    /// [`CmError::PrivateData`] above 216 bytes, [`CmError::LimitReached`].
    pub fn resolve_service(&mut self, now: Instant, params: &ResolveParams<'_>) -> Result<SidrId, CmError> {
        let private_data = PrivateData::new(params.private_data)?;
        let full = CmError::LimitReached { what: "service resolutions", limit: self.config.limits.services };
        if !self.sidr.can_ask() {
            return Err(full);
        }
        let request_id = loop {
            // At most a few thousand of 2^32 ids are taken: the loop ends at once.
            let id = self.rng.next_u32();
            if id != 0 && !self.sidr.by_request_id.contains(id) {
                break id;
            }
        };
        let (to, service_id) = (params.to, params.service_id);
        let req = SidrReq { request_id, pkey: PKey::DEFAULT, reserved: 0, service_id, private_data };
        let transaction = TransactionId::new(self.rng.next_u64());
        let (retry, due) = self.send_retrying(now, to, transaction, req, self.config.retry);
        let asked = Exchange::Asked { to, request_id, service_id, retry: Box::new(retry) };
        self.sidr.insert(asked, due).ok_or(full)
    }

    /// Answers a [`CmEvent::ServiceRequest`].
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`] when it was answered, or its peer has given up; [`CmError::PrivateData`] above 136 bytes.
    pub fn answer_service(&mut self, now: Instant, id: SidrId, answer: &ServiceAnswer<'_>) -> Result<(), CmError> {
        let private_data = PrivateData::new(answer.private_data)?;
        let Some(Entry { exchange: Exchange::Pending { peer, from, transaction, service_id, listener }, .. }) =
            self.sidr.entries.get(id)
        else {
            return Err(CmError::InvalidHandle);
        };
        let (peer, from, transaction, service_id, listener) = (*peer, *from, *transaction, *service_id, *listener);
        let rep = SidrRep {
            request_id: peer.1,
            status: answer.status,
            qpn: answer.qpn,
            service_id,
            qkey: answer.qkey,
            info: Ari::new(answer.info),
            private_data,
        };
        let bytes = Mad::new(transaction, rep).emit();
        self.send_bytes(from, MadKind::SidrRep, bytes);
        self.tables.release_backlog(listener);
        self.sidr.set_answered(id, peer, bytes, now + ANSWER_KEPT);
        Ok(())
    }

    /// Drops a question: one of ours is not asked again, one of a peer is refused.
    pub fn abandon_service(&mut self, now: Instant, id: SidrId) {
        match self.sidr.entries.get(id).map(|e| &e.exchange) {
            Some(Exchange::Asked { .. }) => {
                self.sidr.remove(id);
            }
            Some(Exchange::Pending { .. }) => {
                // Cannot fail: it is pending and there are no private data.
                let _ = self.answer_service(now, id, &ServiceAnswer::refusal(SidrStatus::Rejected));
            }
            Some(Exchange::Answered { .. }) | None => {}
        }
    }

    /// Exchanges of service resolution that are remembered.
    #[must_use]
    pub fn service_exchanges(&self) -> usize {
        self.sidr.len()
    }

    pub(super) fn on_sidr_req(&mut self, cx: &Arrived<'_>, req: &SidrReq) {
        let peer = (cx.from.remote, req.request_id);
        let known = self.sidr.by_peer.get(&peer).copied();
        match known.and_then(|id| self.sidr.entries.get(id)).map(|e| &e.exchange) {
            Some(Exchange::Answered { bytes, .. }) => {
                let bytes = **bytes;
                self.out_of_place(cx);
                self.send_bytes(cx.from, MadKind::SidrRep, bytes);
            }
            // The consumer is at it.
            Some(_) => self.out_of_place(cx),
            None => self.on_new_service_request(cx, req),
        }
    }

    fn on_new_service_request(&mut self, cx: &Arrived<'_>, req: &SidrReq) {
        if !req.pkey.matches(PKey::DEFAULT) {
            self.refuse_service(cx, req, SidrStatus::Rejected);
            return;
        }
        let (listener, ip) = match self.find_listener(cx.from.local, req.service_id, req.private_data.as_bytes()) {
            Ok(found) => found,
            Err(NoListener::Nobody) => return self.refuse_service(cx, req, SidrStatus::Unsupported),
            Err(NoListener::BadHeader) => return self.refuse_service(cx, req, SidrStatus::Rejected),
        };
        let room = self.events.len() < self.config.limits.events && self.sidr.can_serve();
        if !room || !self.tables.take_backlog(listener) {
            self.counters.overflows += 1;
            self.note(cx, Outcome::Overflow(None));
            if self.config.overflow == Overflow::Reject {
                self.send_sidr_refusal(cx, req, SidrStatus::Rejected);
            }
            return;
        }
        let pending = Exchange::Pending {
            peer: (cx.from.remote, req.request_id),
            from: cx.from,
            transaction: cx.transaction(),
            service_id: req.service_id,
            listener,
        };
        let Some(id) = self.sidr.insert(pending, cx.now + self.config.consumer_cap) else { return };
        self.emit(CmEvent::ServiceRequest(Box::new(ServiceRequest {
            sidr: id,
            listener,
            from: cx.from,
            service_id: req.service_id,
            ip,
            private_data: req.private_data,
        })));
    }

    pub(super) fn refuse_service(&mut self, cx: &Arrived<'_>, req: &SidrReq, status: SidrStatus) {
        self.note(cx, Outcome::RefusedService(status));
        self.send_sidr_refusal(cx, req, status);
    }

    pub(super) fn send_sidr_refusal(&mut self, cx: &Arrived<'_>, req: &SidrReq, status: SidrStatus) {
        let (request_id, service_id) = (req.request_id, req.service_id);
        let rep = SidrRep { request_id, service_id, ..SidrRep::refusal(status) };
        self.send(cx.from, cx.transaction(), rep);
    }

    pub(super) fn on_sidr_rep(&mut self, cx: &Arrived<'_>, rep: &SidrRep) {
        let id = self.sidr.by_request_id.get(rep.request_id).copied();
        let asked = id.and_then(|id| self.sidr.entries.get(id).map(|e| (id, &e.exchange)));
        let Some((id, Exchange::Asked { to, service_id, .. })) = asked else {
            self.unmatched(cx);
            return;
        };
        if to.remote != cx.from.remote {
            self.stranger(cx);
            return;
        }
        if rep.status == SidrStatus::Success && (*service_id != rep.service_id || rep.qpn.get() <= Qpn::GSI.get()) {
            self.unmatched(cx);
            return;
        }
        self.sidr.remove(id);
        self.emit(CmEvent::ServiceReply(Box::new(ServiceReply {
            sidr: id,
            from: cx.from,
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            info: rep.info,
            private_data: rep.private_data,
        })));
    }

    pub(super) fn on_service_due(&mut self, now: Instant, id: SidrId) {
        let Some(entry) = self.sidr.entries.get_mut(id) else { return };
        match &mut entry.exchange {
            Exchange::Asked { to, retry, .. } => {
                let to = *to;
                match retry.on_due(now, &mut self.rng) {
                    Due::Resend(next) => {
                        let (kind, bytes) = (retry.kind, *retry.bytes);
                        self.counters.retransmitted += 1;
                        self.send_bytes(to, kind, bytes);
                        self.sidr.set_due(id, next);
                    }
                    Due::GiveUp { tries, elapsed } => {
                        self.sidr.remove(id);
                        self.emit(CmEvent::ServiceUnreachable { sidr: id, tries, elapsed });
                    }
                }
            }
            Exchange::Pending { listener, .. } => {
                let listener = *listener;
                self.tables.release_backlog(listener);
                self.sidr.remove(id);
                self.emit(CmEvent::ServiceExpired { sidr: id });
            }
            Exchange::Answered { .. } => {
                self.sidr.remove(id);
            }
        }
    }
}
