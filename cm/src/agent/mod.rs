//! The connection manager's agent, sans-IO.
//!
//! Owns all communications of one adapter: it takes MADs and commands, and gives MADs and events. It never knows how MADs
//! travel, never touches a QP, and reads no clock: `now` is an argument, and one seed gives one run.
//!
//! The file for each side: `commands` (what the consumer says), `receive` (what the peer says), `timers` (what time says),
//! `tables` (who is found by what).

mod commands;
mod receive;
mod tables;
mod timers;
mod types;

use std::collections::VecDeque;

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::AckTimeout;

pub use types::{
    AcceptParams, AddressFilter, CmCounters, CmError, CmEvent, Config, ConnectParams, ConnectRequest, DisconnectCause,
    Limits, MadAddress, OutgoingMad, Overflow, Rejection, Reply,
};

use crate::comm::{Comm, CommId, CommState, State};
use crate::retry::{Retransmission, RetryPolicy};
use crate::wire::{
    Ari, CaGuid, CommunicationId, MAD_LEN, Mad, MadKind, Message, PrivateData, Rej, RejReason, RejectedMessage,
    TransactionId,
};
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

/// How long a QP waits when its connection names no ACK timeout.
const TIMEWAIT_WITHOUT_ACK_TIMEOUT: Duration = Duration::from_millis(500);

/// The agent.
pub struct Agent {
    config: Config,
    guid: CaGuid,
    rng: Rng,
    tables: Tables,
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
            rng,
            outgoing: VecDeque::new(),
            events: VecDeque::new(),
            counters: CmCounters::default(),
            presets: VecDeque::new(),
        }
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
        self.tables.timewait_len()
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
        self.tables.next_due()
    }

    /// An event that follows from a communication that the consumer knows; their number is bounded by that of
    /// communications, and [`Agent::has_room`] keeps peers from adding to it.
    fn emit(&mut self, event: CmEvent) {
        self.events.push_back(event);
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

    /// Ends a communication; its QP waits as long as packets of the old connection may live.
    fn enter_timewait(&mut self, now: Instant, handle: CommId) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        let wait = timewait_of(comm.path.ack_timeout);
        if let Some(forgotten) = self.tables.enter_timewait(now, handle, wait) {
            self.counters.timewait_evicted += 1;
            self.emit(CmEvent::TimewaitExit { comm: forgotten });
        }
    }

    /// Sends a DREQ on an established connection, for the consumer or because the peer has forgotten it.
    fn start_disconnect(&mut self, now: Instant, handle: CommId, private_data: PrivateData<220>) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        let Some(remote_qpn) = comm.remote_qpn else { return };
        let dreq = crate::wire::Dreq {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            remote_qpn,
            reserved: 0,
            private_data,
        };
        let (to, policy) = (address_of(comm), self.policy_for(comm));
        let transaction = TransactionId::new(self.rng.next_u64());
        let (retry, due) = self.send_retrying(now, to, transaction, dreq, policy);
        self.tables.set_state(handle, State::DreqSent(retry), Some(due));
    }

    /// Answers a DREQ.
    fn send_drep(
        &mut self,
        to: MadAddress,
        transaction: TransactionId,
        ids: (CommunicationId, CommunicationId),
        private_data: PrivateData<224>,
    ) {
        let (local_comm_id, remote_comm_id) = ids;
        self.send(to, transaction, crate::wire::Drep { local_comm_id, remote_comm_id, private_data });
    }
}

/// Where the MADs of a communication go.
const fn address_of(comm: &Comm) -> MadAddress {
    MadAddress { local: comm.path.local, remote: comm.path.remote }
}

/// The local ACK timeout covers twice the packet lifetime and the peer's ACK delay, which is what TIMEWAIT lasts
/// (IBTA Vol 1 12.9.8.4).
fn timewait_of(ack_timeout: AckTimeout) -> Duration {
    ack_timeout.duration().unwrap_or(TIMEWAIT_WITHOUT_ACK_TIMEOUT)
}
