//! What the consumer says.

use uroce::time::Instant;
use uroce::types::{PKey, Psn, QKey};

use super::tables::Listener;
use super::{AcceptParams, AddressFilter, CmError, CmEvent, ConnectParams, DisconnectCause, Failover};
use super::{Agent, address_of};
use crate::comm::{Comm, CommId, ConnectionTerms, Lap, ListenerId, Path, Rendezvous, Role, State};
use crate::wire::{
    Ari, CmTimeout, CommunicationId, Mad, PathRecord, PrivateData, Rej, RejReason, RejectedMessage, Rep, Req, Rtu,
    ServiceId, TransportService,
};

impl Agent {
    /// Listens on a service id for the destination addresses of `filter`. At most `backlog` REQs wait for an answer;
    /// what happens to more of them the configuration says.
    ///
    /// # Errors
    /// [`CmError::AddressInUse`], [`CmError::LimitReached`].
    pub fn listen(
        &mut self,
        service_id: ServiceId,
        filter: AddressFilter,
        backlog: usize,
    ) -> Result<ListenerId, CmError> {
        let backlog = backlog.min(self.config.limits.backlog);
        if self.tables.listeners_of(service_id).any(|(_, l)| l.filter.overlaps(filter)) {
            return Err(CmError::AddressInUse(service_id));
        }
        let limit = self.config.limits.listeners;
        self.tables
            .add_listener(Listener { service_id, filter, backlog, pending: 0 })
            .ok_or(CmError::LimitReached { what: "listeners", limit })
    }

    /// Ends a listener. REQs that wait can still be answered.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`].
    pub fn unlisten(&mut self, listener: ListenerId) -> Result<(), CmError> {
        self.tables.remove_listener(listener).map(|_| ()).ok_or(CmError::InvalidHandle)
    }

    /// Asks for a connection. A [`CmEvent::Reply`], [`CmEvent::Rejected`] or [`CmEvent::Unreachable`] follows.
    ///
    /// # Errors
    /// [`CmError::PrivateData`], [`CmError::Transport`], [`CmError::QpBusy`], [`CmError::LimitReached`],
    /// [`CmError::RendezvousTaken`].
    pub fn connect(&mut self, now: Instant, params: &ConnectParams<'_>) -> Result<CommId, CmError> {
        let private_data = PrivateData::new(params.private_data)?;
        if !matches!(params.transport, TransportService::Rc | TransportService::Uc) {
            return Err(CmError::Transport(params.transport));
        }
        if self.tables.is_local_qp_busy(params.local_qpn, None) {
            return Err(CmError::QpBusy(params.local_qpn));
        }
        let limit = self.config.limits.comms;
        if self.tables.comms.len() >= limit {
            return Err(CmError::LimitReached { what: "communications", limit });
        }
        if params.peer_to_peer && self.tables.rendezvous(params.service_id, params.path.remote).is_some() {
            return Err(CmError::RendezvousTaken(params.service_id));
        }
        let ids = self.draw_ids();
        let starting_psn = params.starting_psn.unwrap_or_else(|| Psn::from_wire(self.rng.next_u32()));
        let req = self.req(params, ids.comm_id, starting_psn, private_data);
        let to = super::MadAddress { local: params.path.local, remote: params.path.remote };
        let (retry, due) = self.send_retrying(now, to, ids.transaction, req, self.config.retry);
        let rendezvous = Rendezvous { service_id: params.service_id, unheard: false };
        let comm = Comm {
            source: params.path.remote,
            role: Role::Active,
            listener: None,
            rendezvous: params.peer_to_peer.then(|| Box::new(rendezvous)),
            local_id: ids.comm_id,
            remote_id: CommunicationId::NONE,
            remote_guid: None,
            local_qpn: Some(params.local_qpn),
            remote_qpn: None,
            path: params.path,
            alternate: params.alternate.map(Box::new),
            transaction: ids.transaction,
            transport: params.transport,
            sq_psn: Psn::ZERO,
            rq_psn: starting_psn,
            responder_resources: req.responder_resources,
            initiator_depth: req.initiator_depth,
            retry_count: params.retry_count,
            rnr_retry: params.rnr_retry,
            remote_srq: false,
            peer_response: req.remote_response_timeout.duration(),
            peer_retries: req.max_cm_retries,
            state: State::ReqSent(retry),
            due: None,
        };
        let handle = self.tables.insert(comm).ok_or(CmError::LimitReached { what: "communications", limit })?;
        self.tables.set_due(handle, Some(due));
        Ok(handle)
    }

    fn req(
        &self,
        params: &ConnectParams<'_>,
        local_comm_id: CommunicationId,
        starting_psn: Psn,
        private_data: PrivateData<92>,
    ) -> Req {
        let (path, retry) = (&params.path, &self.config.retry);
        // Only RC has READs and atomics.
        let depth = |v: u8| if params.transport == TransportService::Rc { v } else { 0 };
        Req {
            local_comm_id,
            vendor_id: 0,
            service_id: params.service_id,
            ca_guid: self.guid,
            local_qkey: QKey::default(),
            local_qpn: params.local_qpn,
            responder_resources: depth(params.responder_resources).min(self.config.max_responder_resources),
            local_eecn: 0,
            initiator_depth: depth(params.initiator_depth),
            remote_eecn: 0,
            // What we really wait before we ask again: the peer may take that long.
            remote_response_timeout: CmTimeout::at_most(retry.initial),
            transport: params.transport,
            flow_control: params.flow_control,
            starting_psn,
            local_response_timeout: self.config.response_timeout,
            retry_count: params.retry_count.get(),
            pkey: PKey::DEFAULT,
            path_mtu_code: path.mtu.code(),
            rdc_exists: false,
            rnr_retry_count: params.rnr_retry.code(),
            max_cm_retries: retry.retries.min(crate::retry::RetryPolicy::MAX_RETRIES),
            srq: params.srq,
            extended_transport: 0,
            primary: record(path),
            alternate: params.alternate.as_ref().map(record).unwrap_or_default(),
            private_data,
        }
    }

    /// Accepts a REQ. Returns what the QP needs: it must be in RTR before the next MAD is sent, for the peer's first
    /// packet may come before its RTU. [`CmEvent::Established`] or [`CmEvent::Unreachable`] follows.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`], [`CmError::QpBusy`], [`CmError::PrivateData`].
    pub fn accept(
        &mut self,
        now: Instant,
        handle: CommId,
        params: &AcceptParams<'_>,
    ) -> Result<ConnectionTerms, CmError> {
        let private_data = PrivateData::new(params.private_data)?;
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        if !matches!(comm.state, State::ReqRcvd(_)) {
            return Err(CmError::WrongState(comm.state.name()));
        }
        if self.tables.is_local_qp_busy(params.local_qpn, Some(handle)) {
            return Err(CmError::QpBusy(params.local_qpn));
        }
        let starting_psn = params.starting_psn.unwrap_or_else(|| Psn::from_wire(self.rng.next_u32()));
        // Between equals, our REQ may have named another QP.
        self.tables.forget_local_qpn(handle);
        let comm = self.tables.comms.get_mut(handle).ok_or(CmError::InvalidHandle)?;
        // Since the REQ, the two depths hold what it leaves us at most.
        comm.responder_resources =
            comm.responder_resources.min(params.responder_resources).min(self.config.max_responder_resources);
        comm.initiator_depth = comm.initiator_depth.min(params.initiator_depth);
        comm.local_qpn = Some(params.local_qpn);
        comm.rq_psn = starting_psn;
        // Nothing is said of a path that was not offered.
        let failover = comm.alternate.is_some().then_some(params.failover);
        comm.alternate = comm.alternate.take().filter(|_| failover == Some(Failover::Accepted));
        let terms = comm.terms().ok_or(CmError::InvalidHandle)?;
        let rep = Rep {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            local_qkey: QKey::default(),
            local_qpn: params.local_qpn,
            local_eecn: 0,
            vendor_id: [0; 3],
            starting_psn,
            responder_resources: comm.responder_resources,
            initiator_depth: comm.initiator_depth,
            target_ack_delay: self.config.ack_delay & 31,
            failover_accepted: failover.map_or(0, Failover::code),
            flow_control: params.flow_control,
            rnr_retry_count: params.rnr_retry.code(),
            srq: params.srq,
            reserved: 0,
            ca_guid: self.guid,
            private_data,
        };
        let (to, transaction) = (address_of(comm), comm.transaction);
        let policy = self.config.retry.within(comm.peer_response, comm.peer_retries);
        let (retry, due) = self.send_retrying(now, to, transaction, rep, policy);
        self.tables.set_state(handle, State::RepSent(retry), Some(due));
        self.tables.index(handle);
        Ok(terms)
    }

    /// Sends the RTU, once the QP of an active side is in RTS.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`], [`CmError::PrivateData`] above 224 bytes.
    pub fn confirm(&mut self, handle: CommId, private_data: &[u8]) -> Result<(), CmError> {
        let private_data = PrivateData::new(private_data)?;
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        if !matches!(comm.state, State::RepRcvd(_)) {
            return Err(CmError::WrongState(comm.state.name()));
        }
        let rtu = Rtu { local_comm_id: comm.local_id, remote_comm_id: comm.remote_id, private_data };
        let (to, mad) = (address_of(comm), Mad::new(comm.transaction, rtu));
        let bytes = mad.emit();
        self.send_bytes(to, mad.message.kind(), bytes);
        self.tables.set_state(handle, State::Established { rtu: Some(Box::new(bytes)), lap: Lap::Idle }, None);
        self.audit_comm(crate::policy::AuditEvent::Established, handle, None);
        Ok(())
    }

    /// A data packet came before the RTU: the connection is established. Does nothing in any other state.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`].
    pub fn establish(&mut self, handle: CommId) -> Result<(), CmError> {
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        if matches!(comm.state, State::RepSent(_)) {
            self.tables.set_state(handle, State::Established { rtu: None, lap: Lap::Idle }, None);
            self.emit(CmEvent::Established { comm: handle, private_data: Box::default() });
        }
        Ok(())
    }

    /// Refuses a REQ or REP. The communication is over.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`], [`CmError::PrivateData`] above 148 bytes.
    pub fn reject(
        &mut self,
        handle: CommId,
        reason: RejReason,
        ari: &[u8],
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let private_data = PrivateData::new(private_data)?;
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        let message = match comm.state {
            State::ReqRcvd(_) => RejectedMessage::Req,
            State::RepRcvd(_) => RejectedMessage::Rep,
            _ => return Err(CmError::WrongState(comm.state.name())),
        };
        let rej = Rej {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            message,
            reason,
            ari: Ari::new(ari),
            private_data,
        };
        let (to, transaction) = (address_of(comm), comm.transaction);
        self.audit_comm(crate::policy::AuditEvent::Refused, handle, Some(reason));
        self.send(to, transaction, rej);
        self.tables.remove(handle);
        Ok(())
    }

    /// Ends a connection, or agrees to its end. [`CmEvent::Disconnected`] follows when it was established;
    /// [`CmEvent::TimewaitExit`] when its QP may be used again.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`], [`CmError::PrivateData`] above 220 bytes.
    pub fn disconnect(&mut self, now: Instant, handle: CommId, private_data: &[u8]) -> Result<(), CmError> {
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        match comm.state {
            State::Established { .. } | State::RepSent(_) => {
                let private_data = PrivateData::new(private_data)?;
                self.start_disconnect(now, handle, private_data);
                Ok(())
            }
            State::DreqRcvd { transaction } => {
                let drep = PrivateData::new(private_data)?;
                let (to, ids) = (address_of(comm), (comm.local_id, comm.remote_id));
                self.send_drep(to, transaction, ids, drep);
                self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
                self.enter_timewait(now, handle);
                Ok(())
            }
            _ => Err(CmError::WrongState(comm.state.name())),
        }
    }

    /// Drops a communication in any state, telling the peer what that state calls for. No event follows, except
    /// [`CmEvent::Disconnected`] and [`CmEvent::TimewaitExit`] of one that was connected.
    pub fn abandon(&mut self, now: Instant, handle: CommId) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        match comm.state {
            State::Established { .. } | State::RepSent(_) | State::DreqRcvd { .. } => {
                // Cannot fail: the state is right and there are no private data.
                let _ = self.disconnect(now, handle, &[]);
            }
            State::DreqSent(_) => {}
            State::ReqRcvd(_) | State::RepRcvd(_) => {
                let _ = self.reject(handle, RejReason::ConsumerDefined, &[], &[]);
            }
            State::ReqSent(_) => {
                let rej = self.gave_up(comm, RejectedMessage::Other);
                let (to, transaction) = (address_of(comm), comm.transaction);
                self.send(to, transaction, rej);
                self.tables.remove(handle);
            }
        }
    }
}

/// A path as REQ and LAP have it.
fn record(path: &Path) -> PathRecord {
    PathRecord {
        local_lid: PathRecord::ROCE_LID,
        remote_lid: PathRecord::ROCE_LID,
        local_gid: path.local,
        remote_gid: path.remote,
        flow_label: path.flow_label,
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        service_level: path.service_level,
        ack_timeout: path.ack_timeout.code(),
        ..PathRecord::default()
    }
}
