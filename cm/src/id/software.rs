//! The front in software: an agent and QP1.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::collections::{BTreeMap, HashMap, VecDeque};

use uroce::rng::Rng;
use uroce::table::{NumberHash, Slab};
use uroce::time::Instant;
use uroce::types::{Gid, PathMtu, Qpn};
use uroce::verbs::{AccessFlags, AsyncEvent, InitAttr, QpHandle, QpTransition, QpType, Verbs};

use super::RdmaCm;
use super::address;
use super::datagram::ready_datagram_qp;
use super::types::{ConnParam, EventKind, IdError, IdEvent, IdHandle, IdOptions, ReadyQp, STATUS_NO_DEVICE, kind};
use crate::agent::{AcceptParams, AddressFilter, Agent, CmError, Config, ConnectParams, Failover};
use crate::comm::{CommId, CommState, ConnectionTerms, ListenerId, Path, SidrId};
use crate::gsi::{Gsi, GsiConfig, GsiError};
use crate::policy::Policy;
use crate::wire::{IpHeader, PortSpace, RejReason, ServiceId, TransportService};

/// User data of a REQ: 92 bytes less the IP header.
const CONNECT_DATA_MAX: usize = 92 - IpHeader::LEN;
/// Ports given to ids that name none, as on Linux.
const EPHEMERAL: core::ops::RangeInclusive<u64> = 32_768..=60_999;

/// Passive QPs looked at in one poll for data before the RTU.
const AWAITING_PER_POLL: usize = 16;

/// How the front behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmConfig {
    /// The agent.
    pub agent: Config,
    /// QP1.
    pub gsi: GsiConfig,
    /// Ids at most.
    pub ids: usize,
}

impl Default for CmConfig {
    fn default() -> Self {
        Self { agent: Config::default(), gsi: GsiConfig::default(), ids: 65_536 }
    }
}

/// Where an id stands. What the agent knows is not kept twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Made, perhaps bound.
    Idle,
    /// Its addresses are known.
    AddrResolved,
    /// Its path is known.
    RouteResolved,
    /// A listener.
    Listening(ListenerId),
    /// A connection that lives, or waits.
    Comm(CommId),
    /// A datagram service that is asked for, by us or by a peer.
    Sidr(SidrId),
    /// A datagram service that is resolved: nothing more will be heard of it.
    Datagram,
    /// A connection that is over.
    Over,
}

pub(super) struct Id {
    pub(super) space: PortSpace,
    pub(super) stage: Stage,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    /// Our entry of the GID table.
    pub(super) gid: Option<(u8, Gid)>,
    pub(super) path: Option<Path>,
    pub(super) qp: Option<QpHandle>,
    pub(super) ready: Option<ReadyQp>,
    pub(super) options: IdOptions,
    /// DISCONNECTED was told.
    pub(super) disconnected: bool,
    /// Multicast groups, with the QP that receives them.
    pub(super) groups: Vec<(Gid, Option<QpHandle>)>,
}

impl Id {
    pub(super) fn new(space: PortSpace, options: IdOptions) -> Self {
        Self {
            space,
            stage: Stage::Idle,
            local: None,
            peer: None,
            gid: None,
            path: None,
            qp: None,
            ready: None,
            options,
            disconnected: false,
            groups: Vec::new(),
        }
    }

    pub(super) fn comm(&self, call: &'static str) -> Result<CommId, IdError> {
        match self.stage {
            Stage::Comm(comm) => Ok(comm),
            _ => Err(IdError::WrongState(call)),
        }
    }
}

/// The front over QP1 of a device.
pub struct Cm {
    pub(super) agent: Agent,
    gsi: Gsi,
    rng: Rng,
    active_mtu: PathMtu,
    pub(super) ids: Slab<kind::Id, Id>,
    /// Never walked: its order is that of hashes.
    pub(super) by_comm: HashMap<CommId, IdHandle, NumberHash>,
    pub(super) by_listener: BTreeMap<ListenerId, IdHandle>,
    pub(super) by_sidr: BTreeMap<SidrId, IdHandle>,
    /// Never walked.
    by_qp: HashMap<QpHandle, IdHandle, NumberHash>,
    pub(super) events: VecDeque<IdEvent>,
    /// Accepted ids with an attached QP whose RTU has not come; at most one entry an id.
    awaiting: VecDeque<IdHandle>,
    limit: usize,
}

impl Cm {
    /// Takes QP1 of a device. Its GUID becomes the agent's, unless the configuration names one.
    ///
    /// # Errors
    /// [`GsiError`]; another front may have QP1.
    pub fn new(verbs: &mut dyn Verbs, config: CmConfig, mut rng: Rng) -> Result<Self, GsiError> {
        let gsi = Gsi::new(verbs, config.gsi)?;
        let device = verbs.query_device();
        let mut agent = config.agent;
        agent.ca_guid = agent.ca_guid.or(Some(crate::wire::CaGuid::new(device.node_guid)));
        // Asked once: a port sums the counters of all its QPs when it is asked.
        let active_mtu = verbs.query_port().active_mtu;
        agent.max_mtu = agent.max_mtu.min(active_mtu);
        agent.max_responder_resources = agent.max_responder_resources.min(device.max_rd_atomic);
        agent.ack_delay = device.ack_delay.code();
        // Handles are ours, not a peer's choice: what they are keyed with is no secret.
        let key = NumberHash::new(device.node_guid);
        Ok(Self {
            agent: Agent::new(agent, rng.fork()),
            gsi,
            ids: Slab::new(config.ids),
            by_comm: HashMap::with_hasher(key),
            by_listener: BTreeMap::new(),
            by_sidr: BTreeMap::new(),
            by_qp: HashMap::with_hasher(key),
            rng,
            active_mtu,
            events: VecDeque::new(),
            awaiting: VecDeque::new(),
            limit: config.ids,
        })
    }

    /// The agent, for its counters and states.
    #[must_use]
    pub const fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Sets the policy of the agent; see [`Agent::set_policy`].
    pub fn set_policy(&mut self, policy: Policy) {
        self.agent.set_policy(policy);
    }

    /// QP1, for its counters and its CQ.
    #[must_use]
    pub const fn gsi(&self) -> &Gsi {
        &self.gsi
    }

    /// The state of a connection.
    #[must_use]
    pub fn state(&self, id: IdHandle) -> Option<CommState> {
        match self.ids.get(id)?.stage {
            Stage::Comm(comm) => self.agent.state(comm),
            _ => None,
        }
    }

    /// A packet came on a QP before its RTU, and the program saw it first.
    ///
    /// # Errors
    /// [`IdError::InvalidHandle`], [`IdError::WrongState`].
    pub fn notify_established(&mut self, id: IdHandle) -> Result<(), IdError> {
        let comm = self.get(id)?.comm("notify_established")?;
        Ok(self.agent.establish(comm)?)
    }

    /// Ends everything: connections get a DREQ, requests that wait a refusal, listeners are closed, ids are destroyed and
    /// attached QPs moved to ERR. Then [`RdmaCm::poll`] until [`Cm::is_drained`], or for as long as there is time, and
    /// [`Cm::destroy`].
    pub fn shutdown(&mut self, now: Instant, verbs: &mut dyn Verbs) {
        let ids: Vec<IdHandle> = self.ids.iter().map(|(id, _)| id).collect();
        for id in ids {
            // Each is alive: destroying one destroys no other.
            let _ = self.destroy_id(now, verbs, id);
        }
        self.gsi.send_all(verbs, &mut self.agent);
    }

    /// Whether, after a shutdown, nothing is left to say: all MADs are out, and no peer's answer is awaited.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        !self.agent.has_mad() && self.gsi.is_idle() && self.agent.communications() == 0
    }

    /// Gives QP1 back. What [`Cm::shutdown`] has not ended by now ends without a word.
    ///
    /// # Errors
    /// [`GsiError`].
    pub fn destroy(self, verbs: &mut dyn Verbs) -> Result<(), GsiError> {
        self.gsi.destroy(verbs)
    }

    /// Entries of the GID table moved or went: what was resolved before follows. ADDR_CHANGE for each id whose address is
    /// gone.
    fn on_gid_change(&mut self, verbs: &mut dyn Verbs) {
        self.gsi.refresh_gids(verbs);
        let gids = verbs.query_gids();
        let bound: Vec<(IdHandle, Gid)> =
            self.ids.iter().filter_map(|(handle, id)| Some((handle, id.gid?.1))).collect();
        for (handle, gid) in bound {
            let found = address::find(&gids, gid.ip());
            match self.ids.get_mut(handle) {
                Some(id) if found.is_some() => id.gid = found,
                Some(_) => self.tell(handle, EventKind::AddrChange, 0),
                None => {}
            }
        }
    }

    pub(super) fn get(&self, id: IdHandle) -> Result<&Id, IdError> {
        self.ids.get(id).ok_or(IdError::InvalidHandle)
    }

    pub(super) fn get_mut(&mut self, id: IdHandle) -> Result<&mut Id, IdError> {
        self.ids.get_mut(id).ok_or(IdError::InvalidHandle)
    }

    pub(super) fn tell(&mut self, id: IdHandle, kind: EventKind, status: i32) {
        self.events.push_back(IdEvent { status, ..IdEvent::new(id, kind) });
    }

    /// A passive QP that has taken a request shows that the peer is ready, though its RTU is lost or late. (A device tells
    /// of it only in RTR, and an accepted QP is in RTS.)
    fn watch_for_data(&mut self, verbs: &dyn Verbs) -> bool {
        let mut busy = false;
        for _ in 0..self.awaiting.len().min(AWAITING_PER_POLL) {
            let Some(handle) = self.awaiting.pop_front() else { break };
            let Some(Id { stage: Stage::Comm(comm), qp: Some(qp), ready: Some(ready), .. }) = self.ids.get(handle)
            else {
                continue;
            };
            if !matches!(self.agent.state(*comm), Some(CommState::RepSent | CommState::MraRepRcvd)) {
                continue;
            }
            let Ok(info) = verbs.query_qp(*qp) else { continue };
            if info.queues.rq_psn == ready.rtr.rq_psn {
                self.awaiting.push_back(handle);
            } else {
                busy |= self.agent.establish(*comm).is_ok();
            }
        }
        busy
    }

    pub(super) fn fail_qp(&self, verbs: &mut dyn Verbs, id: IdHandle) {
        if let Some(qp) = self.ids.get(id).and_then(|i| i.qp) {
            // The program may have destroyed its QP, or moved it already.
            let _ = verbs.modify_qp(qp, QpTransition::Err.into());
        }
    }

    /// 20 random bits that give another UDP source port than `old`.
    pub(super) fn fresh_flow_label(&mut self, old: u32) -> u32 {
        let port = |label: u32| (label & 0x3FFF) ^ ((label & 0xF_C000) >> 14);
        let label = self.rng.next_u32() & 0xF_FFFF;
        // 0 leaves the port to the QPNs.
        if label == 0 || port(label) == port(old) { (old ^ 1).max(2) } else { label }
    }

    fn ephemeral_port(&mut self) -> u16 {
        u16::try_from(self.rng.within(EPHEMERAL)).unwrap_or(u16::MAX)
    }

    /// The QPN and transport that a connection is made with: of the attached QP, or as named.
    fn qp_of(
        &self,
        verbs: &dyn Verbs,
        id: &Id,
        param: &ConnParam<'_>,
    ) -> Result<(Qpn, TransportService, bool), IdError> {
        match (id.qp, param.qpn) {
            (Some(qp), None) => {
                let info = verbs.query_qp(qp)?;
                let transport = if info.qp_type == QpType::Uc { TransportService::Uc } else { TransportService::Rc };
                Ok((info.qpn, transport, param.srq))
            }
            (None, Some(qpn)) => Ok((qpn, param.transport, param.srq)),
            _ => Err(IdError::NoQp),
        }
    }

    /// What the QP needs, from what was agreed.
    pub(super) fn ready_from(id: &Id, terms: &ConnectionTerms) -> ReadyQp {
        let remote = AccessFlags::REMOTE_WRITE;
        let served = terms.max_dest_rd_atomic > 0;
        let access = if served { remote | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC } else { remote };
        let index = id.gid.map_or(0, |(index, _)| index);
        ReadyQp {
            transport: terms.transport,
            access,
            rtr: terms.rtr(index, id.options.min_rnr_timer),
            rts: terms.rts(),
        }
    }

    /// The path of an id on a port of path MTU `active`.
    fn path(active: PathMtu, id: &Id) -> Option<Path> {
        let (_, local) = id.gid?;
        let (from, to) = (id.local?, id.peer?);
        // The flow label that both sides derive their UDP source port from, as Linux does.
        let flow_label = (u32::from(from.port()) * 31 + u32::from(to.port())) & 0xF_FFFF;
        Some(Path {
            flow_label,
            traffic_class: id.options.tos,
            mtu: id.options.path_mtu.map_or(active, |mtu| mtu.min(active)),
            ack_timeout: id.options.ack_timeout,
            ..Path::new(local, Gid::from(to.ip()))
        })
    }
}

/// The private data of a request: IP header and the program's.
pub(super) fn full_header(local: SocketAddr, destination: IpAddr, data: &[u8]) -> Result<Vec<u8>, IdError> {
    let header = IpHeader { source_port: local.port(), source: local.ip(), destination };
    // Both addresses are of one family: `resolve_addr` chose the source for the destination.
    let Ok(header) = header.emit() else { return Err(IdError::WrongState("connect")) };
    Ok([&header[..], data].concat())
}

impl RdmaCm for Cm {
    fn create_id(&mut self, space: PortSpace) -> Result<IdHandle, IdError> {
        let limit = self.limit;
        self.ids.insert(Id::new(space, IdOptions::default())).ok_or(IdError::LimitReached(limit))
    }

    fn destroy_id(&mut self, now: Instant, verbs: &mut dyn Verbs, handle: IdHandle) -> Result<(), IdError> {
        self.get(handle)?;
        let Some(id) = self.ids.remove(handle) else { return Err(IdError::InvalidHandle) };
        if let Some(qp) = id.qp {
            self.by_qp.remove(&qp);
        }
        match id.stage {
            Stage::Listening(listener) => {
                self.by_listener.remove(&listener);
                // It lives as long as the id does.
                let _ = self.agent.unlisten(listener);
            }
            Stage::Comm(comm) => {
                self.by_comm.remove(&comm);
                if let Some(qp) = id.qp.filter(|_| self.agent.state(comm).is_some()) {
                    let _ = verbs.modify_qp(qp, QpTransition::Err.into());
                }
                self.agent.abandon(now, comm);
            }
            Stage::Sidr(sidr) => {
                self.by_sidr.remove(&sidr);
                self.agent.abandon_service(now, sidr);
            }
            _ => {}
        }
        for group in id.groups {
            Self::detach(verbs, group);
        }
        Ok(())
    }

    fn set_options(&mut self, id: IdHandle, options: IdOptions) -> Result<(), IdError> {
        self.get_mut(id)?.options = options;
        Ok(())
    }

    fn bind_addr(&mut self, verbs: &mut dyn Verbs, handle: IdHandle, addr: SocketAddr) -> Result<(), IdError> {
        let port = if addr.port() == 0 { self.ephemeral_port() } else { addr.port() };
        let id = self.get_mut(handle)?;
        if id.stage != Stage::Idle || id.local.is_some() {
            return Err(IdError::WrongState("bind_addr"));
        }
        if !addr.ip().is_unspecified() {
            let found = address::find(&verbs.query_gids(), addr.ip());
            id.gid = Some(found.ok_or(IdError::AddressNotAvailable(addr.ip()))?);
        }
        id.local = Some(SocketAddr::new(addr.ip(), port));
        Ok(())
    }

    fn listen(&mut self, handle: IdHandle, backlog: usize) -> Result<(), IdError> {
        let port = self.ephemeral_port();
        let id = self.get(handle)?;
        if id.stage != Stage::Idle {
            return Err(IdError::WrongState("listen"));
        }
        let local = id.local.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port));
        let filter = match local.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => AddressFilter::AnyV4,
            // As with sockets, [::] serves both families.
            IpAddr::V6(ip) if ip.is_unspecified() => AddressFilter::Any,
            ip => AddressFilter::Only(ip),
        };
        let service = ServiceId::of_port(id.space, local.port());
        let listener = self.agent.listen(service, filter, backlog).map_err(|e| match e {
            CmError::AddressInUse(_) => IdError::AddressInUse(local),
            other => other.into(),
        })?;
        self.by_listener.insert(listener, handle);
        let id = self.get_mut(handle)?;
        id.local = Some(local);
        id.stage = Stage::Listening(listener);
        Ok(())
    }

    fn resolve_addr(
        &mut self,
        verbs: &mut dyn Verbs,
        handle: IdHandle,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<(), IdError> {
        let free_port = self.ephemeral_port();
        let id = self.get_mut(handle)?;
        if id.stage != Stage::Idle {
            return Err(IdError::WrongState("resolve_addr"));
        }
        let source = source.or(id.local);
        let wanted = source.map(|s| s.ip()).filter(|ip| !ip.is_unspecified());
        let port = source.map(|s| s.port()).filter(|port| *port != 0).unwrap_or(free_port);
        let Some((index, gid)) = address::choose_source(&verbs.query_gids(), destination.ip(), wanted) else {
            self.tell(handle, EventKind::AddrError, STATUS_NO_DEVICE);
            return Ok(());
        };
        id.gid = Some((index, gid));
        id.local = Some(SocketAddr::new(gid.ip(), port));
        id.peer = Some(destination);
        id.stage = Stage::AddrResolved;
        self.tell(handle, EventKind::AddrResolved, 0);
        Ok(())
    }

    fn resolve_route(&mut self, _verbs: &mut dyn Verbs, handle: IdHandle) -> Result<(), IdError> {
        let active = self.active_mtu;
        let id = self.get_mut(handle)?;
        if id.stage != Stage::AddrResolved {
            return Err(IdError::WrongState("resolve_route"));
        }
        let Some(path) = Self::path(active, id) else { return Err(IdError::WrongState("resolve_route")) };
        id.path = Some(path);
        id.stage = Stage::RouteResolved;
        self.tell(handle, EventKind::RouteResolved, 0);
        Ok(())
    }

    fn attach_qp(&mut self, verbs: &mut dyn Verbs, handle: IdHandle, qp: QpHandle) -> Result<(), IdError> {
        let id = self.get(handle)?;
        if id.qp.is_some() || id.ready.is_some() || matches!(id.stage, Stage::Listening(_) | Stage::Over) {
            return Err(IdError::WrongState("attach_qp"));
        }
        let info = verbs.query_qp(qp)?;
        if info.qp_type == QpType::Ud {
            ready_datagram_qp(verbs, qp)?;
        } else {
            // A connection could not be made with it: said here, where another QP can still take its place.
            if self.agent.is_qp_waiting(info.qpn) {
                return Err(CmError::QpBusy(info.qpn).into());
            }
            verbs.modify_qp(qp, InitAttr::connected(AccessFlags::REMOTE_WRITE).into())?;
        }
        self.get_mut(handle)?.qp = Some(qp);
        self.by_qp.insert(qp, handle);
        Ok(())
    }

    fn connect(
        &mut self,
        now: Instant,
        verbs: &mut dyn Verbs,
        handle: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<(), IdError> {
        let id = self.get(handle)?;
        if Self::is_datagram(verbs, id, param) {
            return self.resolve_service(now, handle, param);
        }
        let (Stage::RouteResolved, Some(path)) = (id.stage, id.path) else {
            return Err(IdError::WrongState("connect"));
        };
        let (Some(local), Some(peer)) = (id.local, id.peer) else { return Err(IdError::WrongState("connect")) };
        let given = param.private_data.len();
        if given > CONNECT_DATA_MAX {
            return Err(IdError::PrivateData { given, max: CONNECT_DATA_MAX });
        }
        let (local_qpn, transport, srq) = self.qp_of(verbs, id, param)?;
        let private_data = full_header(local, peer.ip(), param.private_data)?;
        let comm = self.agent.connect(
            now,
            &ConnectParams {
                path,
                service_id: ServiceId::of_port(id.space, peer.port()),
                transport,
                local_qpn,
                starting_psn: param.starting_psn,
                srq,
                responder_resources: param.responder_resources,
                initiator_depth: param.initiator_depth,
                retry_count: param.retry_count,
                rnr_retry: param.rnr_retry_count,
                flow_control: param.flow_control,
                alternate: None,
                peer_to_peer: false,
                private_data: &private_data,
            },
        )?;
        self.by_comm.insert(comm, handle);
        self.get_mut(handle)?.stage = Stage::Comm(comm);
        Ok(())
    }

    fn accept(
        &mut self,
        now: Instant,
        verbs: &mut dyn Verbs,
        handle: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<Option<ReadyQp>, IdError> {
        let id = self.get(handle)?;
        if let Stage::Sidr(sidr) = id.stage {
            self.accept_service(now, verbs, handle, sidr, param)?;
            return Ok(None);
        }
        let comm = id.comm("accept")?;
        let (local_qpn, _, srq) = self.qp_of(verbs, id, param)?;
        let terms = self.agent.accept(
            now,
            comm,
            &AcceptParams {
                local_qpn,
                starting_psn: param.starting_psn,
                srq,
                responder_resources: param.responder_resources,
                initiator_depth: param.initiator_depth,
                rnr_retry: param.rnr_retry_count,
                flow_control: param.flow_control,
                failover: Failover::Unsupported,
                private_data: param.private_data,
            },
        )?;
        let id = self.get_mut(handle)?;
        let ready = Self::ready_from(id, &terms);
        id.ready = Some(ready);
        // The REP leaves with the next poll: the QP is in RTR before the peer can send.
        if let Some(qp) = id.qp
            && let Err(error) = ready.apply(verbs, qp)
        {
            id.stage = Stage::Over;
            self.by_comm.remove(&comm);
            self.agent.abandon(now, comm);
            return Err(error.into());
        }
        if self.get(handle)?.qp.is_some() {
            self.awaiting.push_back(handle);
        }
        Ok(Some(ready))
    }

    fn ready(&self, id: IdHandle) -> Option<ReadyQp> {
        self.ids.get(id)?.ready
    }

    fn establish(&mut self, handle: IdHandle) -> Result<(), IdError> {
        let comm = self.get(handle)?.comm("establish")?;
        Ok(self.agent.confirm(comm, &[])?)
    }

    fn reject(&mut self, now: Instant, handle: IdHandle, private_data: &[u8]) -> Result<(), IdError> {
        if let Stage::Sidr(sidr) = self.get(handle)?.stage {
            return self.reject_service(now, sidr, private_data);
        }
        let comm = self.get(handle)?.comm("reject")?;
        self.agent.reject(comm, RejReason::ConsumerDefined, &[], private_data)?;
        self.by_comm.remove(&comm);
        self.get_mut(handle)?.stage = Stage::Over;
        Ok(())
    }

    fn disconnect(&mut self, now: Instant, verbs: &mut dyn Verbs, handle: IdHandle) -> Result<(), IdError> {
        let comm = self.get(handle)?.comm("disconnect")?;
        match self.agent.state(comm) {
            // The peer was faster; or its DREQ was answered already.
            None | Some(CommState::DreqSent) => {}
            Some(_) => self.agent.disconnect(now, comm, &[])?,
        }
        self.fail_qp(verbs, handle);
        Ok(())
    }

    fn join_multicast(
        &mut self,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        group: IpAddr,
        send_only: bool,
    ) -> Result<(), IdError> {
        self.join(verbs, id, group, send_only)
    }

    fn leave_multicast(&mut self, verbs: &mut dyn Verbs, id: IdHandle, group: IpAddr) -> Result<(), IdError> {
        self.leave(verbs, id, group)
    }

    fn on_async_event(&mut self, verbs: &mut dyn Verbs, event: &AsyncEvent) {
        match event {
            AsyncEvent::CommunicationEstablished(qp) => {
                if let Some(id) = self.by_qp.get(qp).copied() {
                    // In any other state than REP_SENT it means nothing.
                    let _ = self.notify_established(id);
                }
            }
            AsyncEvent::PathMigrated(qp) => {
                if let Some(id) = self.by_qp.get(qp).copied() {
                    self.on_migrated(verbs, id);
                }
            }
            AsyncEvent::GidChange => self.on_gid_change(verbs),
            AsyncEvent::Probing(source) => {
                if let Some(policy) = self.agent.policy_mut() {
                    policy.probing(*source);
                }
            }
            _ => {}
        }
    }

    fn poll_event(&mut self) -> Option<IdEvent> {
        self.events.pop_front()
    }

    fn poll(&mut self, now: Instant, verbs: &mut dyn Verbs) -> Result<bool, IdError> {
        let mut busy = self.gsi.poll(now, verbs, &mut self.agent)?;
        busy |= self.watch_for_data(verbs);
        self.agent.handle_timeout(now);
        busy |= self.translate_events(now, verbs);
        busy |= self.gsi.send_all(verbs, &mut self.agent);
        Ok(busy)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.agent.poll_timeout()
    }

    fn local_addr(&self, id: IdHandle) -> Option<SocketAddr> {
        self.ids.get(id)?.local
    }

    fn peer_addr(&self, id: IdHandle) -> Option<SocketAddr> {
        self.ids.get(id)?.peer
    }
}
