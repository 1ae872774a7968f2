//! The connection manager's agent, sans-IO.
//!
//! Owns all communications of one adapter: it takes MADs and commands, and gives MADs and events. It never knows how MADs
//! travel, never touches a QP, and reads no clock: `now` is an argument, and one seed gives one run.
//!
//! The file for each side: `commands` (what the consumer says), `receive` (what the peer says: the way in; `request`,
//! `reply` and `ending` by message), `lap` (alternate paths), `peer` (connections between equals), `sidr` (service
//! resolution), each both sides; `timers` (what time says), `tables` and `timewait` (who is found by what), `gate` (who is
//! asked before anything else), `policing` (what the policy says).

mod commands;
mod ending;
mod gate;
mod lap;
mod peer;
mod policing;
mod receive;
mod reply;
mod request;
mod sidr;
mod tables;
mod timers;
mod timewait;
mod types;

use std::collections::VecDeque;

use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::Qpn;

pub use gate::{Admission, Arrival, Gate, Notice, Outcome};
pub use policing::REFUSED_BY_POLICY;
pub use types::{
    AcceptParams, AddressFilter, CmCounters, CmError, CmEvent, Config, ConnectParams, ConnectRequest, DisconnectCause,
    Failover, Limits, MadAddress, OutgoingMad, Overflow, PathAnswer, PathOffer, Rejection, Reply, ResolveParams,
    ServiceAnswer, ServiceReply, ServiceRequest,
};

use crate::comm::{Comm, CommId, CommState};
use crate::retry::{Retransmission, RetryPolicy};
use crate::wire::{
    Ari, CaGuid, CommunicationId, MAD_LEN, Mad, MadKind, Message, PrivateData, Rej, RejReason, RejectedMessage,
    TransactionId,
};
use policing::Policing;
use sidr::Exchanges;
use tables::Tables;

/// Communication and transaction id of the next communication, in place of random ones: for replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Our id.
    pub comm_id: CommunicationId,
    /// Of our REQ; ignored on the passive side.
    pub transaction: TransactionId,
}

/// Most presets that wait.
const PRESETS_MAX: usize = 64;

/// The agent.
pub struct Agent {
    config: Config,
    guid: CaGuid,
    rng: Rng,
    tables: Tables,
    sidr: Exchanges,
    gate: Option<Box<dyn Gate>>,
    policing: Option<Policing>,
    outgoing: VecDeque<OutgoingMad>,
    events: VecDeque<CmEvent>,
    counters: CmCounters,
    presets: VecDeque<Preset>,
}

impl Agent {
    /// An agent without communications. `rng` gives its GUID, ids, PSNs and jitter.
    #[must_use]
    pub fn new(config: Config, mut rng: Rng) -> Self {
        // Locally administered: bit 1 of the first byte set, group bit clear.
        let random = (rng.next_u64() & !(3 << 56)) | (2 << 56);
        Self {
            config,
            guid: config.ca_guid.unwrap_or(CaGuid::new(random)),
            tables: Tables::new(config.limits, &mut rng),
            sidr: Exchanges::new(config.limits.services, &mut rng),
            gate: None,
            policing: None,
            rng,
            outgoing: VecDeque::new(),
            events: VecDeque::new(),
            counters: CmCounters::default(),
            presets: VecDeque::new(),
        }
    }

    /// Sets who is asked before a MAD makes any state, in place of whoever was.
    pub fn set_gate(&mut self, gate: Box<dyn Gate>) {
        self.gate = Some(gate);
    }

    /// Our adapter's GUID.
    #[must_use]
    pub const fn ca_guid(&self) -> CaGuid {
        self.guid
    }

    /// How it behaves.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// What it counted.
    #[must_use]
    pub const fn counters(&self) -> &CmCounters {
        &self.counters
    }

    /// Communications alive, TIMEWAIT apart.
    #[must_use]
    pub fn communications(&self) -> usize {
        self.tables.comms.len()
    }

    /// Passive communications that are not established.
    #[must_use]
    pub const fn half_open(&self) -> usize {
        self.tables.half_open()
    }

    /// Connections in TIMEWAIT.
    #[must_use]
    pub fn in_timewait(&self) -> usize {
        self.tables.timewait.len()
    }

    /// Whether a connection of our QP `qpn` is in TIMEWAIT: no other can be made with it until then.
    #[must_use]
    pub fn is_qp_waiting(&self, qpn: Qpn) -> bool {
        self.tables.timewait.has_local(qpn)
    }

    /// The state of a live communication.
    #[must_use]
    pub fn state(&self, comm: CommId) -> Option<CommState> {
        self.tables.comms.get(comm).map(|c| c.state.name())
    }

    /// Sets the ids of the next communication, in place of random ones. At most 64 wait.
    pub fn preset(&mut self, preset: Preset) {
        if self.presets.len() < PRESETS_MAX {
            self.presets.push_back(preset);
        }
    }

    /// The next MAD to send.
    pub fn poll_mad(&mut self) -> Option<OutgoingMad> {
        self.outgoing.pop_front()
    }

    /// Whether a MAD waits to be sent.
    #[must_use]
    pub fn has_mad(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// When [`Agent::handle_timeout`] wants to be called. It may lie in the past: then at once.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let policy = self.policy().and_then(crate::policy::Policy::poll_timeout);
        self.tables.next_due().into_iter().chain(self.sidr.next_due()).chain(policy).min()
    }

    /// An event that follows from a communication that the consumer knows; their number is bounded by that of
    /// communications, and [`Agent::has_room`] keeps peers from adding to it.
    fn emit(&mut self, event: CmEvent) {
        self.audit_event(&event);
        self.events.push_back(event);
    }

    /// The communication is over, and its peer was told why.
    fn reject_locally(&mut self, comm: CommId, message: RejectedMessage, reason: RejReason, ari: Ari) {
        let private_data = PrivateData::EMPTY;
        let rejection = Rejection { comm, message, reason, ari, private_data, timewait: false };
        self.emit(CmEvent::Rejected(Box::new(rejection)));
    }

    /// Whether a peer may begin another communication.
    fn has_room(&self) -> bool {
        let limits = &self.config.limits;
        self.tables.half_open() < limits.half_open
            && self.tables.comms.len() < limits.comms
            && self.events.len() < limits.events
    }

    fn send_bytes(&mut self, to: MadAddress, kind: MadKind, bytes: [u8; MAD_LEN]) {
        if self.outgoing.len() >= self.config.limits.outgoing {
            self.counters.outgoing_dropped += 1;
            return;
        }
        self.counters.count_sent(kind);
        self.outgoing.push_back(OutgoingMad { to, bytes });
    }

    fn send(&mut self, to: MadAddress, transaction: TransactionId, message: impl Into<Message>) {
        let mad = Mad::new(transaction, message);
        self.send_bytes(to, mad.message.kind(), mad.emit());
    }

    /// Sends a message that is repeated until it is answered; returns what the state keeps, and when it is due.
    fn send_retrying(
        &mut self,
        now: Instant,
        to: MadAddress,
        transaction: TransactionId,
        message: impl Into<Message>,
        policy: RetryPolicy,
    ) -> (Retransmission, Instant) {
        let mad = Mad::new(transaction, message);
        let (kind, bytes) = (mad.message.kind(), mad.emit());
        self.send_bytes(to, kind, bytes);
        Retransmission::start(now, kind, bytes, policy, &mut self.rng)
    }

    /// A communication id that no live communication of ours has, and the transaction that goes with it.
    fn draw_ids(&mut self) -> Preset {
        if let Some(preset) = self.presets.pop_front() {
            return preset;
        }
        let transaction = TransactionId::new(self.rng.next_u64());
        loop {
            // At most 2^16 of 2^32 ids are taken: the loop ends at once.
            let comm_id = CommunicationId::new(self.rng.next_u32());
            if comm_id != CommunicationId::NONE && self.tables.by_local_id(comm_id).is_none() {
                return Preset { comm_id, transaction };
            }
        }
    }

    /// The policy for a message to a peer whose wishes are known.
    fn policy_for(&self, comm: &Comm) -> RetryPolicy {
        self.config.retry.within(comm.peer_response, comm.peer_retries)
    }

    /// The REJ that tells a peer that we gave up: it finds the communication by our GUID and id.
    fn gave_up(&self, comm: &Comm, message: RejectedMessage) -> Rej {
        Rej {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            message,
            reason: RejReason::Timeout,
            ari: Ari::new(&self.guid.get().to_be_bytes()),
            private_data: PrivateData::EMPTY,
        }
    }
}

/// Where the MADs of a communication go.
const fn address_of(comm: &Comm) -> MadAddress {
    MadAddress { local: comm.path.local, remote: comm.path.remote }
}
