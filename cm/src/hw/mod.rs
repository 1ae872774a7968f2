//! The front over librdmacm, for RDMA hardware: there QP1 and the messages belong to the kernel.
//!
//! Owns ids and what is attached to them. The kernel keeps the states, timers and addresses of a connection; QPs are moved
//! through [`Verbs`] with what it says they need. `ffi` calls the library, `abi` has its structures, `convert` its numbers.
//! Never blocks: events come by [`RdmaCm::poll`], which [`HwCm::wait`] waits for.

mod abi;
mod convert;
mod ffi;

pub use ffi::CmLibrary;

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use uroce::hw::OpenError;
use uroce::hw::abi as ibv;
use uroce::table::Slab;
use uroce::time::{Duration, Instant};
use uroce::types::{QKey, Qpn};
use uroce::verbs::{AccessFlags, AsyncEvent, InitAttr, QpHandle, QpState, QpTransition, QpType, Verbs, VerbsError};

use self::ffi::{Errno, Event, Who};
use crate::id::{
    ConnParam, EventKind, IdError, IdEvent, IdHandle, IdOptions, PeerParam, RdmaCm, ReadyQp, STATUS_INVALID,
    STATUS_NO_DEVICE, kind,
};
use crate::wire::{PortSpace, TransportService};

/// Ids at most.
const IDS_MAX: usize = 65_536;
/// Events that wait for the program; beyond, the kernel keeps its own.
const EVENTS_MAX: usize = 16_384;
/// How long the kernel may take to resolve an address or a route.
const RESOLVE_MILLIS: i32 = 5000;
/// User data of a REQ: 92 bytes less the IP header. Of a SIDR_REQ: 216 less it.
const CONNECT_DATA_MAX: usize = 56;
const RESOLVE_DATA_MAX: usize = 180;
/// User data of a REP and of a SIDR_REP.
const ACCEPT_DATA_MAX: usize = 196;
const ANSWER_DATA_MAX: usize = 136;
/// User data of a REJ.
const REJECT_DATA_MAX: usize = 148;

struct Entry {
    id: ffi::Id,
    cookie: usize,
    space: PortSpace,
    options: IdOptions,
    qp: Option<QpHandle>,
    ready: Option<ReadyQp>,
    /// READs and atomics that the peer of a request has outstanding, and that it serves.
    offered: Option<(u8, u8)>,
    /// CONNECT_RESPONSE was told, `establish` is due.
    responded: bool,
}

/// rdma_cm over librdmacm, for the device whose verbs are given to each call.
///
/// The kernel's connection manager serves every RDMA device: requests that arrive on another one than the verbs' are
/// refused.
pub struct HwCm {
    channel: Arc<ffi::Channel>,
    ids: Slab<kind::Id, Entry>,
    by_cookie: BTreeMap<usize, IdHandle>,
    by_qp: BTreeMap<QpHandle, IdHandle>,
    events: VecDeque<IdEvent>,
    next_cookie: usize,
}

impl core::fmt::Debug for HwCm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("HwCm").field("ids", &self.ids.len()).finish_non_exhaustive()
    }
}

const fn refused(call: &'static str) -> impl Fn(Errno) -> IdError {
    move |Errno(errno)| {
        IdError::Verbs(match errno {
            libc::EOPNOTSUPP | libc::ENOSYS => VerbsError::Unsupported(call),
            errno => VerbsError::System { call, errno },
        })
    }
}

/// The refusal of an address.
fn refused_address(call: &'static str, addr: SocketAddr) -> impl Fn(Errno) -> IdError {
    move |Errno(errno)| match errno {
        libc::EADDRINUSE => IdError::AddressInUse(addr),
        libc::EADDRNOTAVAIL | libc::ENODEV => IdError::AddressNotAvailable(addr.ip()),
        errno => refused(call)(Errno(errno)),
    }
}

const fn unsupported(what: &'static str) -> IdError {
    IdError::Verbs(VerbsError::Unsupported(what))
}

impl HwCm {
    /// Opens an event channel.
    ///
    /// # Errors
    /// [`OpenError::System`]: the kernel has no `rdma_ucm`, or this user may not open its device.
    pub fn new(library: &CmLibrary) -> Result<Self, OpenError> {
        let failed = |Errno(errno)| OpenError::System {
            call: "rdma_create_event_channel",
            name: "/dev/infiniband/rdma_cm".into(),
            errno,
        };
        Ok(Self {
            channel: ffi::Channel::new(library).map_err(failed)?,
            ids: Slab::new(IDS_MAX),
            by_cookie: BTreeMap::new(),
            by_qp: BTreeMap::new(),
            events: VecDeque::new(),
            next_cookie: 1,
        })
    }

    /// Sleeps until [`RdmaCm::poll`] has something to do, a signal comes or `timeout` passes.
    pub fn wait(&self, timeout: Duration) {
        if self.events.is_empty() {
            self.channel.wait(timeout);
        }
    }

    fn get(&self, id: IdHandle) -> Result<&Entry, IdError> {
        self.ids.get(id).ok_or(IdError::InvalidHandle)
    }

    fn get_mut(&mut self, id: IdHandle) -> Result<&mut Entry, IdError> {
        self.ids.get_mut(id).ok_or(IdError::InvalidHandle)
    }

    fn insert(&mut self, id: ffi::Id, cookie: usize, space: PortSpace, options: IdOptions) -> Option<IdHandle> {
        let (qp, ready, offered, responded) = (None, None, None, false);
        let handle = self.ids.insert(Entry { id, cookie, space, options, qp, ready, offered, responded })?;
        self.by_cookie.insert(cookie, handle);
        Some(handle)
    }

    fn cookie(&mut self) -> usize {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        cookie
    }

    fn fail_qp(&self, verbs: &mut dyn Verbs, id: IdHandle) {
        if let Some(qp) = self.ids.get(id).and_then(|entry| entry.qp) {
            // The program may have destroyed its QP, or moved it already.
            let _ = verbs.modify_qp(qp, QpTransition::Err.into());
        }
    }

    /// The QP that a connection is made with: the attached one, or as named.
    fn qpn(verbs: &dyn Verbs, entry: &Entry, param: &ConnParam<'_>) -> Result<Qpn, IdError> {
        if param.starting_psn.is_some() {
            return Err(unsupported("the choice of a starting PSN"));
        }
        match (entry.qp, param.qpn) {
            (Some(qp), None) => Ok(verbs.query_qp(qp)?.qpn),
            (None, Some(qpn)) => Ok(qpn),
            _ => Err(IdError::NoQp),
        }
    }

    /// What the kernel says that the QP needs, within what the program wants and the device can.
    fn ask_ready(verbs: &dyn Verbs, entry: &Entry, limits: (u8, u8)) -> Result<ReadyQp, IdError> {
        let attr = |state: QpState| entry.id.qp_attr(state as u32).map_err(refused("rdma_init_qp_attr"));
        let (rtr, rts) = (attr(QpState::Rtr)?, attr(QpState::Rts)?);
        let made = convert::ready(rtr, rts, TransportService::Rc, entry.options.min_rnr_timer);
        let mut ready = made.ok_or(IdError::WrongState("rdma_init_qp_attr"))?;
        let most = verbs.query_device().max_rd_atomic;
        let rd = &mut ready.rtr.max_dest_rd_atomic;
        *rd = (*rd).min(limits.0).min(most);
        ready.rts.max_rd_atomic = ready.rts.max_rd_atomic.min(limits.1).min(most);
        Ok(ready)
    }

    fn on_event(&mut self, verbs: &mut dyn Verbs, event: Event) {
        let Some(kind) = convert::event_kind(event.number) else { return };
        let Event { who, status, said, private_data, .. } = event;
        let ud = convert::ud_peer(kind, &said);
        let param = convert::peer_param(&said, private_data);
        match who {
            Who::New(id, listener) => self.on_request(verbs, id, listener, param),
            Who::Known(cookie) => {
                let Some(handle) = self.by_cookie.get(&cookie).copied() else { return };
                self.on_known(verbs, handle, IdEvent { status, param, ud, ..IdEvent::new(handle, kind) });
            }
        }
    }

    fn on_request(&mut self, verbs: &dyn Verbs, id: ffi::Id, listener: usize, param: PeerParam) {
        let listen_id = self.by_cookie.get(&listener).copied();
        let inherited = listen_id.and_then(|l| self.ids.get(l)).map(|l| (l.space, l.options));
        let here = id.device().is_some_and(|name| name == verbs.query_device().name);
        let cookie = self.cookie();
        id.set_cookie(cookie);
        // A listener that is gone, or another device: dropping the id refuses.
        let Some((space, options)) = inherited.filter(|_| here) else { return };
        let Some(handle) = self.insert(id, cookie, space, options) else { return };
        if let Some(entry) = self.ids.get_mut(handle) {
            entry.offered = Some((param.responder_resources, param.initiator_depth));
        }
        self.events.push_back(IdEvent { listen_id, param, ..IdEvent::new(handle, EventKind::ConnectRequest) });
    }

    fn on_known(&mut self, verbs: &mut dyn Verbs, handle: IdHandle, mut event: IdEvent) {
        match event.kind {
            EventKind::AddrResolved => {
                let here = self.ids.get(handle).and_then(|entry| entry.id.device());
                if here.is_none_or(|name| name != verbs.query_device().name) {
                    (event.kind, event.status) = (EventKind::AddrError, STATUS_NO_DEVICE);
                }
            }
            EventKind::ConnectResponse => self.on_response(verbs, handle, &mut event),
            EventKind::Rejected | EventKind::Unreachable | EventKind::ConnectError => self.fail_qp(verbs, handle),
            _ => {}
        }
        self.events.push_back(event);
    }

    /// The peer accepted: an attached QP is moved, and the peer told.
    fn on_response(&mut self, verbs: &mut dyn Verbs, handle: IdHandle, event: &mut IdEvent) {
        let Some(entry) = self.ids.get_mut(handle) else { return };
        let ready = match Self::ask_ready(verbs, entry, (u8::MAX, u8::MAX)) {
            Ok(ready) => ready,
            Err(_) => {
                (event.kind, event.status) = (EventKind::ConnectError, STATUS_INVALID);
                return;
            }
        };
        entry.ready = Some(ready);
        entry.responded = true;
        let Some(qp) = entry.qp else { return };
        if ready.apply(verbs, qp).is_ok() && entry.id.establish().is_ok() {
            event.kind = EventKind::Established;
        } else {
            let _ = entry.id.reject(&[]);
            (event.kind, event.status) = (EventKind::ConnectError, STATUS_INVALID);
        }
        entry.responded = false;
    }
}

fn data(private_data: &[u8], max: usize) -> Result<(), IdError> {
    let given = private_data.len();
    if given <= max { Ok(()) } else { Err(IdError::PrivateData { given, max }) }
}

impl RdmaCm for HwCm {
    fn create_id(&mut self, space: PortSpace) -> Result<IdHandle, IdError> {
        let cookie = self.cookie();
        let id = ffi::Id::new(&self.channel, space.code(), cookie).map_err(refused("rdma_create_id"))?;
        self.insert(id, cookie, space, IdOptions::default()).ok_or(IdError::LimitReached(IDS_MAX))
    }

    /// The kernel disconnects or refuses what is still open.
    fn destroy_id(&mut self, _: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError> {
        self.fail_qp(verbs, id);
        let entry = self.ids.remove(id).ok_or(IdError::InvalidHandle)?;
        self.by_cookie.remove(&entry.cookie);
        if let Some(qp) = entry.qp {
            self.by_qp.remove(&qp);
        }
        Ok(())
    }

    /// The path MTU is the kernel's to choose: only the port's own can be asked for, when a connection is made.
    fn set_options(&mut self, id: IdHandle, options: IdOptions) -> Result<(), IdError> {
        let entry = self.get_mut(id)?;
        let failed = refused("rdma_set_option");
        if options.tos != entry.options.tos {
            entry.id.set_option(abi::OPTION_TOS, options.tos).map_err(&failed)?;
        }
        if entry.space == PortSpace::Tcp {
            entry.id.set_option(abi::OPTION_ACK_TIMEOUT, options.ack_timeout.code()).map_err(&failed)?;
        }
        entry.options = options;
        Ok(())
    }

    fn bind_addr(&mut self, verbs: &mut dyn Verbs, id: IdHandle, addr: SocketAddr) -> Result<(), IdError> {
        let entry = self.get(id)?;
        entry.id.bind(addr).map_err(refused_address("rdma_bind_addr", addr))?;
        // An address of another device; any address belongs to none.
        match entry.id.device() {
            Some(name) if name != verbs.query_device().name => Err(IdError::AddressNotAvailable(addr.ip())),
            _ => Ok(()),
        }
    }

    fn listen(&mut self, id: IdHandle, backlog: usize) -> Result<(), IdError> {
        let entry = self.get(id)?;
        let addr = entry.id.local().unwrap_or(SocketAddr::new(IpAddr::from([0, 0, 0, 0]), 0));
        entry.id.listen(backlog).map_err(refused_address("rdma_listen", addr))
    }

    fn resolve_addr(
        &mut self,
        _: &mut dyn Verbs,
        id: IdHandle,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<(), IdError> {
        let failed = refused_address("rdma_resolve_addr", source.unwrap_or(destination));
        self.get(id)?.id.resolve_addr(source, destination, RESOLVE_MILLIS).map_err(failed)
    }

    fn resolve_route(&mut self, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError> {
        let entry = self.get(id)?;
        if entry.options.path_mtu.is_some_and(|mtu| mtu < verbs.query_port().active_mtu) {
            return Err(unsupported("a smaller path MTU than the port's"));
        }
        entry.id.resolve_route(RESOLVE_MILLIS).map_err(refused("rdma_resolve_route"))
    }

    fn attach_qp(&mut self, verbs: &mut dyn Verbs, id: IdHandle, qp: QpHandle) -> Result<(), IdError> {
        if self.get(id)?.qp.is_some() {
            return Err(IdError::WrongState("attach_qp"));
        }
        match verbs.query_qp(qp)?.qp_type {
            QpType::Rc => verbs.modify_qp(qp, InitAttr::connected(AccessFlags::REMOTE_WRITE).into())?,
            QpType::Ud => {
                verbs.modify_qp(qp, InitAttr::datagram(QKey::RDMA_UDP).into())?;
                verbs.modify_qp(qp, QpTransition::RtrUd.into())?;
                verbs.modify_qp(qp, QpTransition::RtsPsn(uroce::types::Psn::default()).into())?;
            }
            QpType::Uc | QpType::Gsi => return Err(unsupported("an unreliable connection over librdmacm")),
        }
        self.get_mut(id)?.qp = Some(qp);
        self.by_qp.insert(qp, id);
        Ok(())
    }

    fn connect(
        &mut self,
        _: Instant,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<(), IdError> {
        let entry = self.get(id)?;
        let max = if entry.space == PortSpace::Udp { RESOLVE_DATA_MAX } else { CONNECT_DATA_MAX };
        data(param.private_data, max)?;
        let most = verbs.query_device().max_rd_atomic;
        let raw = abi::ConnParam {
            responder_resources: param.responder_resources.min(most),
            initiator_depth: param.initiator_depth.min(most),
            flow_control: param.flow_control.into(),
            retry_count: param.retry_count.get(),
            rnr_retry_count: param.rnr_retry_count.code(),
            srq: param.srq.into(),
            ..convert::conn_param(Self::qpn(verbs, entry, param)?)
        };
        entry.id.connect(raw, param.private_data).map_err(refused("rdma_connect"))
    }

    fn accept(
        &mut self,
        _: Instant,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<Option<ReadyQp>, IdError> {
        let entry = self.get_mut(id)?;
        let max = if entry.space == PortSpace::Udp { ANSWER_DATA_MAX } else { ACCEPT_DATA_MAX };
        data(param.private_data, max)?;
        let Some((theirs, served)) = entry.offered else { return Err(IdError::WrongState("accept")) };
        let qpn = Self::qpn(verbs, entry, param)?;
        let mut raw = abi::ConnParam {
            flow_control: param.flow_control.into(),
            rnr_retry_count: param.rnr_retry_count.code(),
            srq: param.srq.into(),
            ..convert::conn_param(qpn)
        };
        let ready = if entry.space == PortSpace::Udp {
            None
        } else {
            let limits = (param.responder_resources.min(theirs), param.initiator_depth.min(served));
            let ready = Self::ask_ready(verbs, entry, limits)?;
            (raw.responder_resources, raw.initiator_depth) = (ready.rtr.max_dest_rd_atomic, ready.rts.max_rd_atomic);
            // In RTR before the peer can send.
            if let Some(qp) = entry.qp {
                ready.apply(verbs, qp)?;
            }
            Some(ready)
        };
        entry.ready = ready;
        entry.id.accept(raw, param.private_data).map_err(refused("rdma_accept"))?;
        Ok(ready)
    }

    fn ready(&self, id: IdHandle) -> Option<ReadyQp> {
        self.ids.get(id)?.ready
    }

    fn establish(&mut self, id: IdHandle) -> Result<(), IdError> {
        let entry = self.get_mut(id)?;
        if !core::mem::take(&mut entry.responded) {
            return Err(IdError::WrongState("establish"));
        }
        entry.id.establish().map_err(refused("rdma_establish"))
    }

    fn reject(&mut self, _: Instant, id: IdHandle, private_data: &[u8]) -> Result<(), IdError> {
        data(private_data, REJECT_DATA_MAX)?;
        self.get(id)?.id.reject(private_data).map_err(refused("rdma_reject"))
    }

    fn disconnect(&mut self, _: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError> {
        match self.get(id)?.id.disconnect() {
            // The peer was faster; or its DREQ was answered already.
            Ok(()) | Err(Errno(libc::EINVAL | libc::ENOTCONN)) => {}
            Err(errno) => return Err(refused("rdma_disconnect")(errno)),
        }
        self.fail_qp(verbs, id);
        Ok(())
    }

    fn join_multicast(&mut self, _: &mut dyn Verbs, _: IdHandle, _: IpAddr, _: bool) -> Result<(), IdError> {
        Err(unsupported("a multicast group over librdmacm"))
    }

    fn leave_multicast(&mut self, _: &mut dyn Verbs, _: IdHandle, group: IpAddr) -> Result<(), IdError> {
        Err(IdError::NotMulticast(group))
    }

    fn on_async_event(&mut self, _: &mut dyn Verbs, event: &AsyncEvent) {
        if let AsyncEvent::CommunicationEstablished(qp) = event
            && let Some(entry) = self.by_qp.get(qp).and_then(|id| self.ids.get(*id))
        {
            // In any other state than that of a request that was accepted it means nothing.
            let _ = entry.id.notify(ibv::EVENT_COMM_EST);
        }
    }

    fn poll_event(&mut self) -> Option<IdEvent> {
        self.events.pop_front()
    }

    fn poll(&mut self, _: Instant, verbs: &mut dyn Verbs) -> Result<bool, IdError> {
        let mut busy = false;
        while self.events.len() < EVENTS_MAX
            && let Some(event) = self.channel.next_event()
        {
            busy = true;
            self.on_event(verbs, event);
        }
        Ok(busy)
    }

    /// The kernel has the timers.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn local_addr(&self, id: IdHandle) -> Option<SocketAddr> {
        self.ids.get(id)?.id.local()
    }

    fn peer_addr(&self, id: IdHandle) -> Option<SocketAddr> {
        self.ids.get(id)?.id.peer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_another_is_named() {
        let said = |file| CmLibrary::load_from(file).unwrap_err().to_string();
        let absent = said("librdmacm-of-nowhere.so.1");
        assert!(
            absent.starts_with("librdmacm-of-nowhere.so.1 is not installed; apt-get install librdmacm1 "),
            "{absent}"
        );
        let other = said("libc.so.6");
        assert!(other.starts_with("libc.so.6 has no function rdma_create_event_channel; "), "{other}");
    }

    #[test]
    fn refusals_are_told_by_their_error_number() {
        let addr: SocketAddr = "10.77.0.9:7174".parse().unwrap();
        let of = |errno| refused_address("rdma_bind_addr", addr)(Errno(errno));
        assert_eq!(of(libc::EADDRINUSE), IdError::AddressInUse(addr));
        assert_eq!(of(libc::EADDRNOTAVAIL), IdError::AddressNotAvailable(addr.ip()));
        assert_eq!(of(libc::ENODEV), IdError::AddressNotAvailable(addr.ip()));
        let other = VerbsError::System { call: "rdma_bind_addr", errno: libc::EINVAL };
        assert_eq!(of(libc::EINVAL), IdError::Verbs(other));
        assert_eq!(refused("rdma_notify")(Errno(libc::ENOSYS)), unsupported("rdma_notify"));
    }

    #[test]
    fn private_data_have_the_room_of_their_message() {
        assert_eq!(data(&[0; 56], CONNECT_DATA_MAX), Ok(()));
        assert_eq!(data(&[0; 57], CONNECT_DATA_MAX), Err(IdError::PrivateData { given: 57, max: 56 }));
    }
}
