//! What the peer says.

use uroce::time::Instant;
use uroce::types::{AckTimeout, PKey, Qpn, RetryCount, RnrRetry};

use super::tables::Owner;
use super::{Agent, address_of};
use super::{CmEvent, ConnectRequest, DisconnectCause, MadAddress, Overflow, Rejection, Reply};
use crate::comm::{Comm, CommId, Incoming, ListenerId, Path, State, Verdict, verdict};
use crate::wire::{
    Apr, AprStatus, Ari, CaGuid, CommunicationId, Drep, Dreq, IpHeader, Lap, Mad, Message, Mra, MraedMessage,
    PrivateData, Rej, RejReason, RejectedMessage, Rep, Req, Rtu, ServiceId, SidrRep, SidrReq, SidrStatus,
    TransactionId, TransportService,
};

/// A REQ or REP that is refused without asking the consumer.
struct Refused {
    reason: RejReason,
    ari: Ari,
}

impl From<RejReason> for Refused {
    fn from(reason: RejReason) -> Self {
        Self { reason, ari: Ari::EMPTY }
    }
}

impl Agent {
    /// Takes a MAD that arrived between these two addresses.
    pub fn handle_mad(&mut self, now: Instant, from: MadAddress, mad: &[u8]) {
        let Ok(Mad { header, message }) = Mad::parse(mad) else {
            self.counters.malformed += 1;
            return;
        };
        self.counters.count_received(message.kind());
        let transaction = header.transaction_id;
        match &message {
            Message::Req(m) => self.on_req(now, from, transaction, m),
            Message::Rep(m) => self.on_rep(now, from, transaction, m),
            Message::Rtu(m) => self.on_rtu(from, m),
            Message::Mra(m) => self.on_mra(now, from, m),
            Message::Rej(m) => self.on_rej(now, from, m),
            Message::Dreq(m) => self.on_dreq(now, from, transaction, m),
            Message::Drep(m) => self.on_drep(now, from, m),
            Message::SidrReq(m) => self.on_sidr_req(from, transaction, m),
            Message::Lap(m) => self.on_lap(from, transaction, m),
            // We ask neither question.
            Message::SidrRep(_) | Message::Apr(_) => self.counters.unmatched += 1,
        }
    }

    /// The communication with our id `ours`, if the peer's id and address are right. `theirs` is not compared while we do
    /// not know it.
    fn find(&mut self, from: MadAddress, ours: CommunicationId, theirs: CommunicationId) -> Option<CommId> {
        let found = self.tables.by_local_id(ours).and_then(|h| self.tables.comms.get(h).map(|c| (h, c)));
        let Some((handle, comm)) = found else {
            self.counters.unmatched += 1;
            return None;
        };
        if comm.remote_id != CommunicationId::NONE && comm.remote_id != theirs {
            self.counters.unmatched += 1;
            return None;
        }
        if comm.path.remote != from.remote {
            self.counters.strangers += 1;
            return None;
        }
        Some(handle)
    }

    fn verdict(&self, handle: CommId, incoming: Incoming) -> Verdict {
        self.tables.comms.get(handle).map_or(Verdict::Ignore, |c| verdict(c.state.name(), incoming))
    }

    fn on_req(&mut self, now: Instant, from: MadAddress, transaction: TransactionId, req: &Req) {
        if let Some(handle) = self.tables.by_remote_id(req.ca_guid, req.local_comm_id) {
            let known = self.tables.comms.get(handle).is_some_and(|c| c.path.remote == from.remote);
            if known {
                self.on_duplicate(handle, Incoming::Req);
            } else {
                self.counters.strangers += 1;
            }
            return;
        }
        let result = self
            .check_req(from, req)
            .and_then(|()| self.check_stale(now, from, (req.ca_guid, req.local_qpn)))
            .and_then(|()| self.listener_for(req));
        match result {
            Ok((listener, ip)) => self.admit(from, transaction, (req, listener, ip)),
            Err(refused) => self.refuse_req(from, transaction, req, refused),
        }
    }

    fn refuse_req(&mut self, from: MadAddress, transaction: TransactionId, req: &Req, refused: Refused) {
        let rej = Rej {
            local_comm_id: CommunicationId::NONE,
            remote_comm_id: req.local_comm_id,
            message: RejectedMessage::Req,
            reason: refused.reason,
            ari: refused.ari,
            private_data: PrivateData::EMPTY,
        };
        self.send(from, transaction, rej);
    }

    /// The fields of a REQ, each with the reason that the specification has for it.
    fn check_req(&self, from: MadAddress, req: &Req) -> Result<(), Refused> {
        if !matches!(req.transport, TransportService::Rc | TransportService::Uc) {
            return Err(RejReason::InvalidTransport.into());
        }
        if req.local_qpn.get() <= Qpn::GSI.get() || req.local_qpn == Qpn::MULTICAST {
            return Err(RejReason::NoQp.into());
        }
        if !req.pkey.matches(PKey::DEFAULT) {
            return Err(RejReason::Unsupported.into());
        }
        let path = &req.primary;
        if path.local_gid != from.remote || path.remote_gid != from.local {
            // The GIDs that we would have taken.
            return Err(Refused { reason: RejReason::InvalidGid, ari: Ari::new(&from.local.to_bytes()) });
        }
        if path.hop_limit == 0 {
            return Err(RejReason::InvalidHopLimit.into());
        }
        if req.path_mtu().is_none_or(|mtu| mtu > self.config.max_mtu) {
            return Err(Refused { reason: RejReason::InvalidMtu, ari: Ari::new(&[self.config.max_mtu.code()]) });
        }
        Ok(())
    }

    /// A peer that asks with a QP which still belongs to a connection has restarted, or reuses it too soon. The old
    /// connection ends when the word comes from where it does: a GUID and a QPN are no secret.
    fn check_stale(&mut self, now: Instant, from: MadAddress, (guid, qpn): (CaGuid, Qpn)) -> Result<(), Refused> {
        let Some(owner) = self.tables.owner_of_remote_qp(guid, qpn) else { return Ok(()) };
        if let Owner::Live(old) = owner
            && let Some(comm) = self.tables.comms.get(old)
            && matches!(comm.state, State::Established { .. })
            && comm.path.remote == from.remote
        {
            self.start_disconnect(now, old, PrivateData::EMPTY);
        }
        Err(RejReason::StaleConnection.into())
    }

    /// Who listens, with the IP addresses that the services of rdma_cm carry.
    fn listener_for(&self, req: &Req) -> Result<(ListenerId, Option<IpHeader>), Refused> {
        let ip = match req.service_id.port() {
            Some(_) => match IpHeader::parse(req.private_data.as_bytes()) {
                Ok(header) => Some(header),
                Err(_) if self.tables.listeners_of(req.service_id).next().is_none() => None,
                Err(_) => return Err(RejReason::ConsumerDefined.into()),
            },
            None => None,
        };
        let serves = |id: ServiceId| {
            self.tables.listeners_of(id).find(|(_, l)| l.filter.serves(ip.map(|h| h.destination))).map(|(id, _)| id)
        };
        serves(req.service_id).map(|l| (l, ip)).ok_or(RejReason::InvalidServiceId.into())
    }

    /// Takes a REQ in and tells the consumer, if there is room.
    fn admit(
        &mut self,
        from: MadAddress,
        transaction: TransactionId,
        (req, listener, ip): (&Req, ListenerId, Option<IpHeader>),
    ) {
        let backlog_full = self.tables.listeners.get(listener).is_none_or(|l| l.pending >= l.backlog);
        if backlog_full || !self.has_room() {
            self.counters.overflows += 1;
            if self.config.overflow == Overflow::Reject {
                self.refuse_req(from, transaction, req, RejReason::NoResources.into());
            }
            return;
        }
        let Some(comm) = self.passive(from, transaction, req, listener) else { return };
        let (path, retry_count, rnr_retry) = (comm.path, comm.retry_count, comm.rnr_retry);
        let (responder_resources, initiator_depth) = (comm.responder_resources, comm.initiator_depth);
        let Some(handle) = self.tables.insert(comm) else { return };
        self.emit(CmEvent::ConnectRequest(Box::new(ConnectRequest {
            comm: handle,
            listener,
            from,
            service_id: req.service_id,
            ip,
            transport: req.transport,
            path,
            remote_qpn: req.local_qpn,
            responder_resources,
            initiator_depth,
            retry_count,
            rnr_retry,
            flow_control: req.flow_control,
            srq: req.srq,
            private_data: req.private_data,
        })));
    }

    /// The passive side of a REQ whose fields were checked.
    fn passive(
        &mut self,
        from: MadAddress,
        transaction: TransactionId,
        req: &Req,
        listener: ListenerId,
    ) -> Option<Comm> {
        let path = Path {
            local: from.local,
            remote: from.remote,
            flow_label: req.primary.flow_label,
            traffic_class: req.primary.traffic_class,
            hop_limit: req.primary.hop_limit,
            service_level: req.primary.service_level,
            mtu: req.path_mtu()?,
            ack_timeout: match req.primary.local_ack_timeout() {
                // "Never" would leave our QP waiting for a peer that is gone.
                AckTimeout::NEVER => AckTimeout::DEFAULT,
                timeout => timeout,
            },
        };
        Some(Comm {
            listener: Some(listener),
            local_id: self.draw_ids().comm_id,
            remote_id: req.local_comm_id,
            remote_guid: Some(req.ca_guid),
            local_qpn: None,
            remote_qpn: Some(req.local_qpn),
            path,
            transaction,
            transport: req.transport,
            sq_psn: req.starting_psn,
            rq_psn: req.starting_psn,
            responder_resources: req.initiator_depth.min(self.config.max_responder_resources),
            initiator_depth: req.responder_resources,
            retry_count: RetryCount::new(req.retry_count)?,
            rnr_retry: RnrRetry::new(req.rnr_retry_count)?,
            remote_srq: req.srq,
            peer_response: req.local_response_timeout.duration(),
            peer_retries: req.max_cm_retries,
            state: State::ReqRcvd { mra_sent: false },
            due: None,
        })
    }

    /// A message that came before: ask for time, or answer again.
    fn on_duplicate(&mut self, handle: CommId, incoming: Incoming) {
        self.counters.duplicates += 1;
        let verdict = self.verdict(handle, incoming);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        match (verdict, &mut comm.state) {
            (Verdict::SendMra, State::ReqRcvd { mra_sent } | State::RepRcvd { mra_sent }) => {
                *mra_sent = true;
                let message = if incoming == Incoming::Req { MraedMessage::Req } else { MraedMessage::Rep };
                let mra = Mra {
                    local_comm_id: comm.local_id,
                    remote_comm_id: comm.remote_id,
                    message,
                    service_timeout: self.config.service_timeout,
                    private_data: PrivateData::EMPTY,
                };
                let transaction = comm.transaction;
                self.send(to, transaction, mra);
            }
            (Verdict::Repeat, State::RepSent(retry)) => {
                let (kind, bytes) = (retry.kind, *retry.bytes);
                self.send_bytes(to, kind, bytes);
            }
            (Verdict::RepeatRtu, State::Established { rtu: Some(rtu) }) => {
                let bytes = **rtu;
                self.send_bytes(to, crate::wire::MadKind::Rtu, bytes);
            }
            _ => {}
        }
    }

    fn on_rep(&mut self, now: Instant, from: MadAddress, transaction: TransactionId, rep: &Rep) {
        let Some(handle) = self.find(from, rep.remote_comm_id, rep.local_comm_id) else {
            if self.tables.by_local_id(rep.remote_comm_id).is_none() {
                self.refuse_rep(from, transaction, rep, RejReason::InvalidCommId.into());
            }
            return;
        };
        if self.verdict(handle, Incoming::Rep) != Verdict::Answered {
            self.on_duplicate(handle, Incoming::Rep);
            return;
        }
        let checked =
            self.check_rep(handle, rep).and_then(|()| self.check_stale(now, from, (rep.ca_guid, rep.local_qpn)));
        if let Err(refused) = checked {
            let (reason, ari) = (refused.reason, refused.ari);
            self.refuse_rep(from, transaction, rep, refused);
            self.tables.remove(handle);
            self.emit(CmEvent::Rejected(Box::new(Rejection {
                comm: handle,
                message: RejectedMessage::Rep,
                reason,
                ari,
                private_data: PrivateData::EMPTY,
                timewait: false,
            })));
            return;
        }
        self.take_rep(handle, rep);
    }

    fn refuse_rep(&mut self, from: MadAddress, transaction: TransactionId, rep: &Rep, refused: Refused) {
        let rej = Rej {
            local_comm_id: rep.remote_comm_id,
            remote_comm_id: rep.local_comm_id,
            message: RejectedMessage::Rep,
            reason: refused.reason,
            ari: refused.ari,
            private_data: PrivateData::EMPTY,
        };
        self.send(from, transaction, rej);
    }

    fn check_rep(&self, handle: CommId, rep: &Rep) -> Result<(), Refused> {
        let Some(comm) = self.tables.comms.get(handle) else { return Err(RejReason::InvalidCommId.into()) };
        if rep.local_qpn.get() <= Qpn::GSI.get() || rep.local_qpn == Qpn::MULTICAST {
            return Err(RejReason::NoQp.into());
        }
        // A peer that wants more than our REQ offered is served as far as we can: some programs put their own figure
        // into the REP, and Linux takes it.
        let most = self.config.max_responder_resources;
        if comm.transport == TransportService::Rc && rep.initiator_depth > most.max(comm.responder_resources) {
            return Err(Refused { reason: RejReason::InsufficientResponderResources, ari: Ari::new(&[most]) });
        }
        Ok(())
    }

    /// The REP answers our REQ.
    fn take_rep(&mut self, handle: CommId, rep: &Rep) {
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        comm.remote_id = rep.local_comm_id;
        comm.remote_guid = Some(rep.ca_guid);
        comm.remote_qpn = Some(rep.local_qpn);
        comm.sq_psn = rep.starting_psn;
        comm.initiator_depth = comm.initiator_depth.min(rep.responder_resources);
        comm.responder_resources = comm.responder_resources.max(rep.initiator_depth);
        comm.remote_srq = rep.srq;
        // The REP says how long the peer wants to be asked for receives.
        comm.rnr_retry = RnrRetry::new(rep.rnr_retry_count).unwrap_or(comm.rnr_retry);
        let terms = comm.terms();
        self.tables.set_state(handle, State::RepRcvd { mra_sent: false }, None);
        self.tables.index(handle);
        if let Some(terms) = terms {
            self.emit(CmEvent::Reply(Box::new(Reply {
                comm: handle,
                terms,
                responder_resources: rep.initiator_depth,
                initiator_depth: rep.responder_resources,
                flow_control: rep.flow_control,
                private_data: rep.private_data,
            })));
        }
    }

    fn on_rtu(&mut self, from: MadAddress, rtu: &Rtu) {
        let Some(handle) = self.find(from, rtu.remote_comm_id, rtu.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Rtu) == Verdict::Establish {
            self.tables.set_state(handle, State::Established { rtu: None }, None);
            self.emit(CmEvent::Established { comm: handle, private_data: Box::new(rtu.private_data) });
        } else {
            self.counters.duplicates += 1;
        }
    }

    fn on_mra(&mut self, now: Instant, from: MadAddress, mra: &Mra) {
        let Some(handle) = self.find(from, mra.remote_comm_id, mra.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Mra(mra.message)) != Verdict::Extend {
            return;
        }
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        if let State::ReqSent(retry) | State::RepSent(retry) = &mut comm.state
            && let Some(due) = retry.extend(now, mra.service_timeout.duration(), self.config.mra_cap)
        {
            self.tables.set_due(handle, Some(due));
        }
    }

    fn on_rej(&mut self, now: Instant, from: MadAddress, rej: &Rej) {
        let Some(handle) = self.find_rejected(from, rej) else { return };
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
            self.enter_timewait(now, handle);
        } else {
            self.tables.remove(handle);
        }
    }

    /// The sender of a REJ may not know our id (it gave up on its REQ), or have none of its own (it has no listener).
    fn find_rejected(&mut self, from: MadAddress, rej: &Rej) -> Option<CommId> {
        let handle = if rej.remote_comm_id == CommunicationId::NONE {
            let guid = rej.ari.ca_guid().filter(|_| rej.reason == RejReason::Timeout);
            guid.and_then(|guid| self.tables.by_remote_id(guid, rej.local_comm_id))
        } else {
            self.tables.by_local_id(rej.remote_comm_id)
        };
        let Some((handle, comm)) = handle.and_then(|h| self.tables.comms.get(h).map(|c| (h, c))) else {
            self.counters.unmatched += 1;
            return None;
        };
        let knows_peer = comm.remote_id != CommunicationId::NONE && rej.local_comm_id != CommunicationId::NONE;
        if knows_peer && comm.remote_id != rej.local_comm_id {
            self.counters.unmatched += 1;
            return None;
        }
        if comm.path.remote != from.remote {
            self.counters.strangers += 1;
            return None;
        }
        Some(handle)
    }

    fn on_dreq(&mut self, now: Instant, from: MadAddress, transaction: TransactionId, dreq: &Dreq) {
        let found = self.find(from, dreq.remote_comm_id, dreq.local_comm_id);
        // Before its REP is here, the peer's connection is as unknown to us as a forgotten one.
        let is_known = |h: &CommId| self.tables.comms.get(*h).is_some_and(|c| c.remote_id != CommunicationId::NONE);
        let Some(handle) = found.filter(is_known) else {
            // A connection that we have forgotten, or that waits: the peer shall not ask in vain.
            let ids = (dreq.remote_comm_id, dreq.local_comm_id);
            self.send_drep(from, transaction, ids, PrivateData::EMPTY);
            return;
        };
        let Some(comm) = self.tables.comms.get(handle) else { return };
        if comm.local_qpn != Some(dreq.remote_qpn) {
            self.counters.unmatched += 1;
            return;
        }
        let ids = (comm.local_id, comm.remote_id);
        match self.verdict(handle, Incoming::Dreq) {
            Verdict::Disconnect => {
                let due = now + self.config.drep_delay;
                self.tables.set_state(handle, State::DreqRcvd { transaction }, Some(due));
                let private_data = Box::new(dreq.private_data);
                self.emit(CmEvent::DisconnectRequested { comm: handle, private_data });
            }
            Verdict::CrossedDisconnect => {
                self.send_drep(from, transaction, ids, PrivateData::EMPTY);
                self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
                self.enter_timewait(now, handle);
            }
            _ => self.counters.duplicates += 1,
        }
    }

    fn on_drep(&mut self, now: Instant, from: MadAddress, drep: &Drep) {
        let Some(handle) = self.find(from, drep.remote_comm_id, drep.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Drep) == Verdict::Disconnected {
            self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
            self.enter_timewait(now, handle);
        } else {
            self.counters.duplicates += 1;
        }
    }

    /// Datagram services are not offered yet: every service id is unsupported.
    fn on_sidr_req(&mut self, from: MadAddress, transaction: TransactionId, req: &SidrReq) {
        let rep = SidrRep {
            request_id: req.request_id,
            status: SidrStatus::Unsupported,
            qpn: Qpn::default(),
            service_id: req.service_id,
            qkey: uroce::types::QKey::default(),
            info: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        };
        self.send(from, transaction, rep);
    }

    /// Alternate paths are not offered yet.
    fn on_lap(&mut self, from: MadAddress, transaction: TransactionId, lap: &Lap) {
        let known = self.find(from, lap.remote_comm_id, lap.local_comm_id).is_some();
        let apr = Apr {
            local_comm_id: lap.remote_comm_id,
            remote_comm_id: lap.local_comm_id,
            status: if known { AprStatus::Unsupported } else { AprStatus::InvalidCommId },
            info: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        };
        self.send(from, transaction, apr);
    }
}
