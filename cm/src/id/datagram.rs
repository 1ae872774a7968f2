//! Ids of datagram services: who serves is resolved by SIDR, multicast groups are joined by address. No connection stands
//! behind them.

use core::net::{IpAddr, SocketAddr};

use uroce::time::Instant;
use uroce::types::{Gid, QKey, Qpn};
use uroce::verbs::{AddressVector, InitAttr, QpHandle, QpTransition, QpType, Verbs};

use super::address;
use super::software::{Cm, Id, Stage, full_header};
use super::types::{
    Attempt, ConnParam, EventKind, IdError, IdEvent, IdHandle, PeerParam, STATUS_INVALID, STATUS_TIMED_OUT, UdPeer,
};
use crate::agent::{CmEvent, MadAddress, ResolveParams, ServiceAnswer, ServiceReply, ServiceRequest};
use crate::comm::SidrId;
use crate::wire::{IpHeader, PortSpace, ServiceId, SidrStatus};

/// User data of a SIDR_REQ: 216 bytes less the IP header.
const REQUEST_DATA_MAX: usize = 216 - IpHeader::LEN;
/// Groups that one id joins at most.
const GROUPS_MAX: usize = 64;

/// From RESET to RTS: a datagram QP needs to know nobody.
pub(super) fn ready_datagram_qp(verbs: &mut dyn Verbs, qp: QpHandle) -> Result<(), IdError> {
    for step in [
        QpTransition::Init(InitAttr::datagram(QKey::RDMA_UDP)),
        QpTransition::RtrUd,
        QpTransition::RtsPsn(uroce::types::Psn::ZERO),
    ] {
        verbs.modify_qp(qp, step.into())?;
    }
    Ok(())
}

impl Cm {
    /// Whether an id resolves a service in place of connecting: by its port space, and where that serves both, by its QP.
    pub(super) fn is_datagram(verbs: &dyn Verbs, id: &Id, param: &ConnParam<'_>) -> bool {
        match id.space {
            PortSpace::Udp | PortSpace::IpOverIb => true,
            PortSpace::Tcp => false,
            PortSpace::Ib => match id.qp {
                Some(qp) => verbs.query_qp(qp).is_ok_and(|info| info.qp_type == QpType::Ud),
                None => param.qkey.is_some(),
            },
        }
    }

    /// Asks who serves: ESTABLISHED with QPN, Q_Key and address vector follows, or UNREACHABLE.
    pub(super) fn resolve_service(
        &mut self,
        now: Instant,
        handle: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<(), IdError> {
        let id = self.get(handle)?;
        let (Stage::RouteResolved, Some(path), Some(local), Some(peer)) = (id.stage, id.path, id.local, id.peer) else {
            return Err(IdError::WrongState("connect"));
        };
        let given = param.private_data.len();
        if given > REQUEST_DATA_MAX {
            return Err(IdError::PrivateData { given, max: REQUEST_DATA_MAX });
        }
        let private_data = full_header(local, peer.ip(), param.private_data)?;
        let sidr = self.agent.resolve_service(
            now,
            &ResolveParams {
                to: MadAddress { local: path.local, remote: path.remote },
                service_id: ServiceId::of_port(id.space, peer.port()),
                private_data: &private_data,
            },
        )?;
        self.by_sidr.insert(sidr, handle);
        self.get_mut(handle)?.stage = Stage::Sidr(sidr);
        Ok(())
    }

    /// Tells the peer which QP serves.
    pub(super) fn accept_service(
        &mut self,
        now: Instant,
        verbs: &dyn Verbs,
        handle: IdHandle,
        sidr: SidrId,
        param: &ConnParam<'_>,
    ) -> Result<(), IdError> {
        let id = self.get(handle)?;
        let (qpn, qkey) = match (id.qp, param.qpn) {
            (Some(qp), None) => {
                let info = verbs.query_qp(qp)?;
                (info.qpn, info.attr.qkey.unwrap_or(QKey::RDMA_UDP))
            }
            (None, Some(qpn)) => (qpn, param.qkey.unwrap_or(QKey::RDMA_UDP)),
            _ => return Err(IdError::NoQp),
        };
        let answer =
            ServiceAnswer { status: SidrStatus::Success, qpn, qkey, info: &[], private_data: param.private_data };
        self.agent.answer_service(now, sidr, &answer)?;
        self.end_service(sidr, Stage::Datagram);
        Ok(())
    }

    pub(super) fn reject_service(&mut self, now: Instant, sidr: SidrId, private_data: &[u8]) -> Result<(), IdError> {
        let answer = ServiceAnswer { private_data, ..ServiceAnswer::refusal(SidrStatus::Rejected) };
        self.agent.answer_service(now, sidr, &answer)?;
        self.end_service(sidr, Stage::Over);
        Ok(())
    }

    /// What the agent says of an exchange.
    pub(super) fn on_service_event(&mut self, now: Instant, verbs: &dyn Verbs, event: &CmEvent) {
        match event {
            CmEvent::ServiceRequest(request) => self.on_service_request(now, verbs, request),
            CmEvent::ServiceReply(reply) => self.on_service_reply(reply),
            CmEvent::ServiceUnreachable { sidr, tries, elapsed } => {
                let attempt = Some(Attempt { tries: *tries, elapsed: *elapsed });
                self.fail_service(*sidr, STATUS_TIMED_OUT, Vec::new(), attempt);
            }
            CmEvent::ServiceExpired { sidr } => self.fail_service(*sidr, STATUS_TIMED_OUT, Vec::new(), None),
            _ => {}
        }
    }

    fn on_service_request(&mut self, now: Instant, verbs: &dyn Verbs, request: &ServiceRequest) {
        let listener = self.by_listener.get(&request.listener).and_then(|id| self.ids.get(*id).map(|l| (*id, l)));
        let Some((listen_id, listener)) = listener else {
            // The listener was destroyed meanwhile. The event is fresh, so this cannot fail.
            let _ = self.agent.answer_service(now, request.sidr, &ServiceAnswer::refusal(SidrStatus::Unsupported));
            return;
        };
        let mut id = Id::new(listener.space, listener.options);
        let port = listener.local.map_or(0, |l| l.port());
        let (ours, theirs) = (request.from.local.ip(), request.from.remote.ip());
        id.local = Some(SocketAddr::new(request.ip.map_or(ours, |h| h.destination), port));
        let source_port = request.ip.map_or(0, |h| h.source_port);
        id.peer = Some(SocketAddr::new(request.ip.map_or(theirs, |h| h.source), source_port));
        id.gid = address::find(&verbs.query_gids(), ours);
        id.stage = Stage::Sidr(request.sidr);
        let Some(handle) = self.ids.insert(id) else {
            let _ = self.agent.answer_service(now, request.sidr, &ServiceAnswer::refusal(SidrStatus::NoQp));
            return;
        };
        self.by_sidr.insert(request.sidr, handle);
        let param = PeerParam { private_data: request.user_data().to_vec(), ..PeerParam::default() };
        let listen_id = Some(listen_id);
        self.events.push_back(IdEvent { listen_id, param, ..IdEvent::new(handle, EventKind::ConnectRequest) });
    }

    fn on_service_reply(&mut self, reply: &ServiceReply) {
        let data = reply.private_data.as_bytes().to_vec();
        if reply.status != SidrStatus::Success {
            self.fail_service(reply.sidr, reply.status.code().into(), data, None);
            return;
        }
        let Some(handle) = self.end_service(reply.sidr, Stage::Datagram) else { return };
        let Some(id) = self.ids.get(handle) else { return };
        let (Some(path), Some((index, _))) = (id.path, id.gid) else { return };
        let ud = Some(UdPeer { qpn: reply.qpn, qkey: reply.qkey, av: path.address_vector(index) });
        let param = PeerParam { private_data: data, qp_num: reply.qpn, ..PeerParam::default() };
        self.events.push_back(IdEvent { ud, param, ..IdEvent::new(handle, EventKind::Established) });
    }

    /// UNREACHABLE, with the status of the SIDR_REP if there was one: what rdma_cm tells.
    fn fail_service(&mut self, sidr: SidrId, status: i32, private_data: Vec<u8>, attempt: Option<Attempt>) {
        let Some(handle) = self.end_service(sidr, Stage::Over) else { return };
        let param = PeerParam { private_data, ..PeerParam::default() };
        self.events.push_back(IdEvent { status, param, attempt, ..IdEvent::new(handle, EventKind::Unreachable) });
    }

    fn end_service(&mut self, sidr: SidrId, stage: Stage) -> Option<IdHandle> {
        let handle = self.by_sidr.remove(&sidr)?;
        if let Some(id) = self.ids.get_mut(handle) {
            id.stage = stage;
        }
        Some(handle)
    }

    pub(super) fn join(
        &mut self,
        verbs: &mut dyn Verbs,
        handle: IdHandle,
        group: IpAddr,
        send_only: bool,
    ) -> Result<(), IdError> {
        let id = self.get(handle)?;
        let Some((index, _)) = id.gid else { return Err(IdError::WrongState("join_multicast")) };
        if id.space == PortSpace::Tcp || !group.is_multicast() {
            return Err(IdError::NotMulticast(group));
        }
        // On RoCEv2 a group's GID is its IP address: there is no subnet administrator to ask.
        let mgid = Gid::from(group);
        if id.groups.len() >= GROUPS_MAX || id.groups.iter().any(|(gid, _)| *gid == mgid) {
            return Err(IdError::WrongState("join_multicast"));
        }
        let (tos, member) = (id.options.tos, id.qp.filter(|_| !send_only));
        if let Some(qp) = member
            && verbs.attach_multicast(qp, mgid).is_err()
        {
            self.tell(handle, EventKind::MulticastError, STATUS_INVALID);
            return Ok(());
        }
        self.get_mut(handle)?.groups.push((mgid, member));
        let av = AddressVector { traffic_class: tos, ..AddressVector::new(mgid, index) };
        let ud = Some(UdPeer { qpn: Qpn::MULTICAST, qkey: QKey::RDMA_UDP, av });
        let param = PeerParam { qp_num: Qpn::MULTICAST, ..PeerParam::default() };
        self.events.push_back(IdEvent { ud, param, ..IdEvent::new(handle, EventKind::MulticastJoin) });
        Ok(())
    }

    pub(super) fn leave(&mut self, verbs: &mut dyn Verbs, handle: IdHandle, group: IpAddr) -> Result<(), IdError> {
        let mgid = Gid::from(group);
        let groups = &mut self.get_mut(handle)?.groups;
        let at = groups.iter().position(|(gid, _)| *gid == mgid).ok_or(IdError::NotMulticast(group))?;
        let left = groups.swap_remove(at);
        Self::detach(verbs, left);
        Ok(())
    }

    pub(super) fn detach(verbs: &mut dyn Verbs, (mgid, member): (Gid, Option<QpHandle>)) {
        if let Some(qp) = member {
            // The program may have destroyed its QP, and with it the membership.
            let _ = verbs.detach_multicast(qp, mgid);
        }
    }
}
