//! REQs: what is checked, who listens, who is refused.

use uroce::types::{AckTimeout, Gid, PKey, PathMtu, Qpn, RetryCount, RnrRetry};

use super::gate::Outcome;
use super::receive::{Arrived, Refused};
use super::tables::Owner;
use super::{AddressFilter, Agent, CmEvent, ConnectRequest, MadAddress, Overflow};
use crate::comm::{Comm, CommId, Incoming, ListenerId, Path, Patience, Role, State};
use crate::wire::{
    Ari, CaGuid, CommunicationId, IpHeader, PathRecord, PrivateData, Rej, RejInfo, RejReason, RejectedMessage, Req,
    ServiceId, TransportService,
};

/// The hop limit that RoCEv2 puts in.
const HOP_LIMIT: u8 = 64;

/// Why a request has no listener.
pub(super) enum NoListener {
    /// Nobody listens on the service, or not for this address.
    Nobody,
    /// The IP header of rdma_cm is missing or wrong.
    BadHeader,
}

impl Agent {
    pub(super) fn on_req(&mut self, cx: &Arrived<'_>, req: &Req) {
        if let Some(handle) = self.tables.by_remote_id((cx.from.remote, req.ca_guid), req.local_comm_id) {
            let same = self.tables.comms.get(handle).is_some_and(|c| {
                // Between equals, the REQ of the side that became passive may come last of all.
                let crossed = c.role == Role::Active;
                (crossed || c.transaction == cx.transaction()) && c.remote_qpn == Some(req.local_qpn)
            });
            if same {
                self.on_duplicate(cx, handle, Incoming::Req);
                return;
            }
        }
        if self.meet(cx, req) {
            return;
        }
        let result = self
            .check_req(cx.from, req)
            .and_then(|()| self.check_stale(cx, (req.ca_guid, req.local_qpn)))
            .and_then(|()| self.listener_for(cx.from, req));
        match result {
            Ok((listener, ip)) => self.take_req(cx, (req, listener, ip)),
            Err(refused) => self.refuse_req(cx, req, &refused),
        }
    }

    pub(super) fn refuse_req(&mut self, cx: &Arrived<'_>, req: &Req, refused: &Refused) {
        self.note(cx, Outcome::Refused(refused.reason));
        self.send_rej_of_req(cx, req, refused);
    }

    /// A REJ from nobody: no communication was made.
    pub(super) fn send_rej_of_req(&mut self, cx: &Arrived<'_>, req: &Req, refused: &Refused) {
        let rej = Rej {
            local_comm_id: CommunicationId::NONE,
            remote_comm_id: req.local_comm_id,
            message: RejectedMessage::Req,
            reason: refused.reason,
            ari: refused.ari,
            private_data: PrivateData::EMPTY,
        };
        self.send(cx.from, cx.transaction(), rej);
    }

    /// The fields of a REQ, each with the reason that the specification has for it.
    pub(super) fn check_req(&self, from: MadAddress, req: &Req) -> Result<(), Refused> {
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
            return Err(Refused::new(RejReason::InvalidGid, RejInfo::Gid(from.local)));
        }
        if path.hop_limit == 0 {
            return Err(Refused::new(RejReason::InvalidHopLimit, RejInfo::HopLimit(HOP_LIMIT)));
        }
        let alternate = &req.alternate;
        if alternate.is_present() && (alternate.local_gid.is_unspecified() || alternate.remote_gid.is_unspecified()) {
            return Err(RejReason::InvalidAltGid.into());
        }
        if alternate.is_present() && alternate.hop_limit == 0 {
            return Err(Refused::new(RejReason::InvalidAltHopLimit, RejInfo::HopLimit(HOP_LIMIT)));
        }
        if req.path_mtu().is_none_or(|mtu| mtu > self.config.max_mtu) {
            return Err(Refused::new(RejReason::InvalidMtu, RejInfo::Mtu(self.config.max_mtu)));
        }
        Ok(())
    }

    /// A peer that asks or answers with a QP which still belongs to a connection has restarted, or reuses it too soon.
    /// The old connection ends, so that the next attempt succeeds. It is found by the address too: a GUID and a QPN are
    /// no secret, and naming somebody else's harms nobody.
    pub(super) fn check_stale(&mut self, cx: &Arrived<'_>, (guid, qpn): (CaGuid, Qpn)) -> Result<(), Refused> {
        let Some(owner) = self.tables.owner_of_remote_qp((cx.from.remote, guid), qpn) else { return Ok(()) };
        if let Owner::Live(old) = owner
            && let Some(comm) = self.tables.comms.get(old)
        {
            match comm.state {
                State::Established { .. } | State::RepSent(_) => {
                    self.start_disconnect(cx.now, old, PrivateData::EMPTY);
                }
                // Our QP is not part of it yet: the old request is over, and the new one takes its place.
                State::ReqRcvd(_) => {
                    self.reject_locally(old, RejectedMessage::Req, RejReason::StaleConnection, Ari::EMPTY);
                    self.tables.remove(old);
                    return Ok(());
                }
                _ => {}
            }
        }
        Err(RejReason::StaleConnection.into())
    }

    /// Who listens for a REQ, with the IP addresses that the services of rdma_cm carry.
    fn listener_for(&self, from: MadAddress, req: &Req) -> Result<(ListenerId, Option<IpHeader>), Refused> {
        match self.find_listener(from.local, req.service_id, req.private_data.as_bytes()) {
            Ok(found) => Ok(found),
            // As Linux does with a header that it cannot read.
            Err(NoListener::BadHeader) => Err(RejReason::ConsumerDefined.into()),
            Err(NoListener::Nobody) => Err(RejReason::InvalidServiceId.into()),
        }
    }

    /// Who listens on a service for what came to our address `to`. The private data of rdma_cm's services begin with an IP
    /// header; a listener of one address is not reached through another by naming it there.
    pub(super) fn find_listener(
        &self,
        to: Gid,
        service_id: ServiceId,
        private_data: &[u8],
    ) -> Result<(ListenerId, Option<IpHeader>), NoListener> {
        let mut listeners = self.tables.listeners_of(service_id).peekable();
        listeners.peek().ok_or(NoListener::Nobody)?;
        let ip = match service_id.port() {
            Some(_) => Some(IpHeader::parse(private_data).map_err(|_| NoListener::BadHeader)?),
            None => None,
        };
        let destination = ip.map(|header| header.destination);
        let reached = |filter| !matches!(filter, AddressFilter::Only(ip) if ip != to.ip());
        listeners
            .find(|(_, l)| l.filter.serves(destination) && reached(l.filter))
            .map(|(id, _)| (id, ip))
            .ok_or(NoListener::Nobody)
    }

    /// Takes a REQ in and tells the consumer, if there is room.
    fn take_req(&mut self, cx: &Arrived<'_>, (req, listener, ip): (&Req, ListenerId, Option<IpHeader>)) {
        if self.tables.listeners.get(listener).is_some_and(|l| l.pending < l.backlog) {
            self.make_room();
        }
        let full = if !self.has_room() {
            Some(RejReason::NoResources)
        } else if self.tables.listeners.get(listener).is_none_or(|l| l.pending >= l.backlog) {
            // As Linux does, whose listener drops the request that it cannot queue.
            Some(RejReason::ConsumerDefined)
        } else {
            None
        };
        if let Some(reason) = full {
            self.counters.overflows += 1;
            let told = self.config.overflow == Overflow::Reject;
            self.note(cx, Outcome::Overflow(told.then_some(reason)));
            if told {
                self.send_rej_of_req(cx, req, &reason.into());
            }
            return;
        }
        let Some(comm) = self.passive(cx, req, Some(listener)) else { return };
        let State::ReqRcvd(patience) = comm.state else { return };
        let due = self.mra_due(cx.now, req.remote_response_timeout.duration(), &patience);
        let Some(handle) = self.tables.insert(comm) else { return };
        self.note_half_open(handle);
        self.tables.set_due(handle, Some(due));
        if let Some(event) = self.request_event(cx, handle, req, ip) {
            self.emit(CmEvent::ConnectRequest(Box::new(event)));
        }
    }

    /// What the consumer is told of a REQ that made this communication.
    pub(super) fn request_event(
        &self,
        cx: &Arrived<'_>,
        handle: CommId,
        req: &Req,
        ip: Option<IpHeader>,
    ) -> Option<ConnectRequest> {
        let comm = self.tables.comms.get(handle)?;
        Some(ConnectRequest {
            comm: handle,
            listener: comm.listener,
            from: cx.from,
            service_id: req.service_id,
            ip,
            transport: req.transport,
            path: comm.path,
            alternate: comm.alternate.as_deref().copied(),
            remote_qpn: req.local_qpn,
            responder_resources: comm.responder_resources,
            initiator_depth: comm.initiator_depth,
            retry_count: comm.retry_count,
            rnr_retry: comm.rnr_retry,
            flow_control: req.flow_control,
            srq: req.srq,
            private_data: req.private_data,
        })
    }

    /// The passive side of a REQ whose fields were checked.
    pub(super) fn passive(&mut self, cx: &Arrived<'_>, req: &Req, listener: Option<ListenerId>) -> Option<Comm> {
        let mtu = req.path_mtu()?;
        let path = path_of(&req.primary, mtu);
        let alternate = req.alternate.is_present().then(|| Box::new(path_of(&req.alternate, mtu)));
        let deadline = cx.now + self.config.consumer_cap;
        Some(Comm {
            source: cx.from.remote,
            role: Role::Passive,
            listener,
            rendezvous: None,
            local_id: self.draw_ids().comm_id,
            remote_id: req.local_comm_id,
            remote_guid: Some(req.ca_guid),
            local_qpn: None,
            remote_qpn: Some(req.local_qpn),
            path,
            alternate,
            transaction: cx.transaction(),
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
            state: State::ReqRcvd(Patience { mra_sent: false, deadline }),
            due: None,
        })
    }
}

/// A path of a REQ, seen from its receiver.
fn path_of(record: &PathRecord, mtu: PathMtu) -> Path {
    Path {
        local: record.remote_gid,
        remote: record.local_gid,
        flow_label: record.flow_label,
        traffic_class: record.traffic_class,
        hop_limit: record.hop_limit,
        service_level: record.service_level,
        mtu,
        ack_timeout: match record.local_ack_timeout() {
            // "Never" would leave our QP waiting for a peer that is gone.
            AckTimeout::NEVER => AckTimeout::DEFAULT,
            timeout => timeout,
        },
    }
}
