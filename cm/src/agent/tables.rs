//! The agent's tables: communications, listeners, and the keys that find them.
//!
//! Keys that a peer chooses (GUIDs, its ids and QPNs) are in ordered maps, which no choice of keys can slow down; ours
//! are in maps keyed by the seed. Nothing is iterated in hash order.

use std::collections::{BTreeMap, BTreeSet};

use uroce::rng::Rng;
use uroce::table::{NumberMap, Slab};
use uroce::time::Instant;
use uroce::types::{Gid, Qpn};

use super::timewait::TimeWait;
use super::types::{AddressFilter, Limits};
use crate::comm::{Comm, CommId, ListenerId, State, kind};
use crate::wire::{CaGuid, CommunicationId, ServiceId};

/// A peer: its GUID as seen from its address. A GUID alone is what anybody may claim.
pub(super) type Peer = (Gid, CaGuid);

fn peer_of(comm: &Comm) -> Option<Peer> {
    Some((comm.source, comm.remote_guid?))
}

/// A listener.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) service_id: ServiceId,
    pub(super) filter: AddressFilter,
    pub(super) backlog: usize,
    /// REQs that the consumer has not answered.
    pub(super) pending: usize,
}

/// Who has a QP of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Live(CommId),
    TimeWait,
}

/// Whose timer is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Comm(CommId),
    /// The TIMEWAIT that ends first.
    TimeWait,
}

pub(super) struct Tables {
    pub(super) comms: Slab<kind::Comm, Comm>,
    pub(super) listeners: Slab<kind::Listener, Listener>,
    pub(super) timewait: TimeWait,
    by_local_id: NumberMap<CommId>,
    by_local_qpn: NumberMap<CommId>,
    by_remote_id: BTreeMap<(Peer, CommunicationId), CommId>,
    by_remote_qpn: BTreeMap<(Peer, u32), CommId>,
    by_service: BTreeMap<ServiceId, Vec<ListenerId>>,
    /// Our REQs that wait for a peer's own: by service and the peer's address.
    rendezvous: BTreeMap<(ServiceId, Gid), CommId>,
    timers: BTreeSet<(Instant, CommId)>,
    half_open: usize,
}

impl Tables {
    pub(super) fn new(limits: Limits, rng: &mut Rng) -> Self {
        Self {
            comms: Slab::new(limits.comms),
            listeners: Slab::new(limits.listeners),
            timewait: TimeWait::new(limits.timewait, rng),
            by_local_id: NumberMap::new(rng.next_u64()),
            by_local_qpn: NumberMap::new(rng.next_u64()),
            by_remote_id: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            by_service: BTreeMap::new(),
            rendezvous: BTreeMap::new(),
            timers: BTreeSet::new(),
            half_open: 0,
        }
    }

    pub(super) const fn set_limits(&mut self, limits: Limits) {
        self.timewait.set_limit(limits.timewait);
    }

    pub(super) const fn half_open(&self) -> usize {
        self.half_open
    }

    pub(super) fn by_local_id(&self, id: CommunicationId) -> Option<CommId> {
        self.by_local_id.get(id.get()).copied()
    }

    pub(super) fn by_remote_id(&self, peer: Peer, id: CommunicationId) -> Option<CommId> {
        self.by_remote_id.get(&(peer, id)).copied()
    }

    pub(super) fn owner_of_remote_qp(&self, peer: Peer, qpn: Qpn) -> Option<Owner> {
        match self.by_remote_qpn.get(&(peer, qpn.get())) {
            Some(comm) => Some(Owner::Live(*comm)),
            None => self.timewait.has_remote(peer, qpn).then_some(Owner::TimeWait),
        }
    }

    /// Whether our QP `qpn` belongs to another communication than `comm`, or waits.
    pub(super) fn is_local_qp_busy(&self, qpn: Qpn, comm: Option<CommId>) -> bool {
        let other = self.by_local_qpn.get(qpn.get());
        other.is_some_and(|other| Some(*other) != comm) || self.timewait.has_local(qpn)
    }

    /// Stores a communication under its keys; `None` when the table is full.
    pub(super) fn insert(&mut self, comm: Comm) -> Option<CommId> {
        let (local, half_open) = (comm.local_id, comm.state.is_half_open());
        let listener = comm.listener.filter(|_| comm.state.is_pending());
        let meeting = comm.rendezvous.as_ref().map(|r| (r.service_id, comm.source));
        let handle = self.comms.insert(comm)?;
        if let Some(listener) = listener.and_then(|l| self.listeners.get_mut(l)) {
            listener.pending += 1;
        }
        if let Some(key) = meeting {
            self.rendezvous.insert(key, handle);
        }
        self.by_local_id.insert(local.get(), handle);
        self.half_open += usize::from(half_open);
        self.index(handle);
        Some(handle)
    }

    /// Our REQ that waits for one from there, if there is any.
    pub(super) fn rendezvous(&self, service: ServiceId, source: Gid) -> Option<CommId> {
        self.rendezvous.get(&(service, source)).copied()
    }

    /// It is clear by now who is active: a communication between equals becomes one like any other.
    pub(super) fn end_rendezvous(&mut self, handle: CommId) {
        let Some(comm) = self.comms.get_mut(handle) else { return };
        if let Some(meeting) = comm.rendezvous.take() {
            self.rendezvous.remove(&(meeting.service_id, comm.source));
        }
    }

    /// Adds the keys that a communication has by now.
    pub(super) fn index(&mut self, handle: CommId) {
        let Some(comm) = self.comms.get(handle) else { return };
        if let Some(qpn) = comm.local_qpn {
            self.by_local_qpn.insert(qpn.get(), handle);
        }
        let Some(peer) = peer_of(comm) else { return };
        self.by_remote_id.insert((peer, comm.remote_id), handle);
        if let Some(qpn) = comm.remote_qpn {
            self.by_remote_qpn.insert((peer, qpn.get()), handle);
        }
    }

    /// The QP that a communication named is not its own any more.
    pub(super) fn forget_local_qpn(&mut self, handle: CommId) {
        let named = self.comms.get_mut(handle).and_then(|comm| comm.local_qpn.take());
        if let Some(qpn) = named.filter(|qpn| self.by_local_qpn.get(qpn.get()) == Some(&handle)) {
            self.by_local_qpn.remove(qpn.get());
        }
    }

    /// Changes the state, and with it the timer.
    pub(super) fn set_state(&mut self, handle: CommId, state: State, due: Option<Instant>) {
        let Some(comm) = self.comms.get_mut(handle) else { return };
        let was_pending = comm.state.is_pending() && !state.is_pending();
        if let Some(listener) = comm.listener.filter(|_| was_pending).and_then(|l| self.listeners.get_mut(l)) {
            listener.pending = listener.pending.saturating_sub(1);
        }
        self.half_open -= usize::from(comm.state.is_half_open());
        self.half_open += usize::from(state.is_half_open());
        comm.state = state;
        self.set_due(handle, due);
    }

    pub(super) fn set_due(&mut self, handle: CommId, due: Option<Instant>) {
        let Some(comm) = self.comms.get_mut(handle) else { return };
        if let Some(old) = comm.due {
            self.timers.remove(&(old, handle));
        }
        comm.due = due;
        if let Some(at) = due {
            self.timers.insert((at, handle));
        }
    }

    /// Takes a communication out of all tables.
    pub(super) fn remove(&mut self, handle: CommId) -> Option<Comm> {
        self.set_due(handle, None);
        self.end_rendezvous(handle);
        let comm = self.comms.remove(handle)?;
        let pending = comm.state.is_pending();
        if let Some(listener) = comm.listener.filter(|_| pending).and_then(|l| self.listeners.get_mut(l)) {
            listener.pending = listener.pending.saturating_sub(1);
        }
        self.half_open -= usize::from(comm.state.is_half_open());
        self.by_local_id.remove(comm.local_id.get());
        let ours = handle;
        if let Some(qpn) = comm.local_qpn
            && self.by_local_qpn.get(qpn.get()) == Some(&ours)
        {
            self.by_local_qpn.remove(qpn.get());
        }
        if let Some(peer) = peer_of(&comm) {
            if self.by_remote_id.get(&(peer, comm.remote_id)) == Some(&handle) {
                self.by_remote_id.remove(&(peer, comm.remote_id));
            }
            if let Some(qpn) = comm.remote_qpn
                && self.by_remote_qpn.get(&(peer, qpn.get())) == Some(&ours)
            {
                self.by_remote_qpn.remove(&(peer, qpn.get()));
            }
        }
        Some(comm)
    }

    /// Turns a communication into a TIMEWAIT record that lasts until `due`. Returns the communication of an older record
    /// that was forgotten for it.
    pub(super) fn enter_timewait(&mut self, handle: CommId, due: Instant) -> Option<CommId> {
        let comm = self.remove(handle)?;
        self.timewait.enter(handle, peer_of(&comm).zip(comm.remote_qpn), comm.local_qpn, due)
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let comm = self.timers.first().map(|(at, _)| *at);
        let timewait = self.timewait.next_due();
        comm.into_iter().chain(timewait).min()
    }

    /// A timer that is due by `now`. It stays until its owner sets another or goes.
    pub(super) fn due_by(&self, now: Instant) -> Option<Timer> {
        if self.timewait.next_due().is_some_and(|at| at <= now) {
            return Some(Timer::TimeWait);
        }
        self.timers.first().filter(|(at, _)| *at <= now).map(|(_, id)| Timer::Comm(*id))
    }

    /// Counts a request against a listener's backlog; `false` when it is full.
    pub(super) fn take_backlog(&mut self, listener: ListenerId) -> bool {
        let Some(listener) = self.listeners.get_mut(listener).filter(|l| l.pending < l.backlog) else { return false };
        listener.pending += 1;
        true
    }

    /// The request was answered; its listener may be gone.
    pub(super) fn release_backlog(&mut self, listener: ListenerId) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.pending = listener.pending.saturating_sub(1);
        }
    }

    pub(super) fn add_listener(&mut self, listener: Listener) -> Option<ListenerId> {
        let service = listener.service_id;
        let id = self.listeners.insert(listener)?;
        self.by_service.entry(service).or_default().push(id);
        Some(id)
    }

    pub(super) fn remove_listener(&mut self, id: ListenerId) -> Option<Listener> {
        let listener = self.listeners.remove(id)?;
        if let Some(list) = self.by_service.get_mut(&listener.service_id) {
            list.retain(|other| *other != id);
            if list.is_empty() {
                self.by_service.remove(&listener.service_id);
            }
        }
        Some(listener)
    }

    /// The listeners of a service id. Their filters do not overlap, so at most one serves an address.
    pub(super) fn listeners_of(&self, service: ServiceId) -> impl Iterator<Item = (ListenerId, &Listener)> {
        let ids = self.by_service.get(&service).map_or(&[][..], Vec::as_slice);
        ids.iter().filter_map(|id| self.listeners.get(*id).map(|l| (*id, l)))
    }
}
