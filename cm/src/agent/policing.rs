//! The policy's word in the agent: before any state of a peer is made, when a table is full, and for the audit log.
//!
//! Owns nothing but the order in which half-open communications came. What is allowed the policy knows.

use std::collections::VecDeque;

use uroce::time::Instant;

use super::gate::{Admission, Arrival, Notice, Outcome};
use super::receive::Arrived;
use super::{Agent, CmEvent, DisconnectCause, MadAddress, OutgoingMad};
use crate::comm::{CommId, State};
use crate::policy::{Ask, AuditEvent, AuditRecord, Decision, EVICT_AFTER, HALF_OPEN_BYTES, Policy, TIMEWAIT_BYTES};
use crate::wire::{
    Apr, AprStatus, Ari, CommunicationId, Mad, MadKind, Message, PrivateData, Rej, RejReason, RejectedMessage, SidrRep,
    SidrStatus, TransactionId,
};

/// What a peer reads that a rule rejected, in the private data of the REJ.
pub const REFUSED_BY_POLICY: &[u8] = b"refused by policy";
/// Memory of an event that waits, at most: a REQ with its private data.
const EVENT_BYTES: usize = 512;
/// Memory of a service resolution, at most.
const SERVICE_BYTES: usize = 1024;
/// Memory of the agent beside its tables, and of tables that are still small.
const FIXED_BYTES: usize = 64 * 1024;
/// Half-open communications looked at for one that may give way, in one REQ.
const LOOKED_AT: usize = 16;

/// A policy, and the half-open communications by age.
pub(super) struct Policing {
    policy: Policy,
    /// May name communications that are not half-open any more; never more than twice the limit and a few.
    half_open: VecDeque<(Instant, CommId)>,
}

impl Agent {
    /// Sets the policy, and narrows the agent's tables to its limits. To be called before the first listener.
    pub fn set_policy(&mut self, policy: Policy) {
        let bounds = policy.config().limits;
        let limits = &mut self.config.limits;
        limits.half_open = limits.half_open.min(bounds.half_open_records());
        limits.timewait = limits.timewait.min(bounds.timewait_records());
        limits.backlog = limits.backlog.min(bounds.backlog as usize);
        self.tables.set_limits(*limits);
        self.policing = Some(Policing { policy, half_open: VecDeque::new() });
    }

    /// The policy, for its counters.
    #[must_use]
    pub fn policy(&self) -> Option<&Policy> {
        self.policing.as_ref().map(|a| &a.policy)
    }

    /// The policy, for alarms of the device.
    pub fn policy_mut(&mut self) -> Option<&mut Policy> {
        self.policing.as_mut().map(|a| &mut a.policy)
    }

    /// Bytes that the agent holds at most, whatever peers send: its tables full, every queue full, a policy's own table.
    /// What an established connection's program holds is not in it.
    #[must_use]
    pub fn memory_cap(&self) -> usize {
        let limits = &self.config.limits;
        limits.comms * (HALF_OPEN_BYTES + EVENT_BYTES)
            + limits.timewait * (TIMEWAIT_BYTES + EVENT_BYTES / 4)
            + limits.events * EVENT_BYTES
            // A queue that grows doubles its room.
            + limits.outgoing.next_power_of_two() * size_of::<OutgoingMad>()
            + 2 * limits.services * SERVICE_BYTES
            + self.policy().map_or(0, Policy::memory)
            + FIXED_BYTES
    }

    /// What the policy says about an arrival. A request that it refuses is answered here, as far as that is due.
    pub(super) fn police(&mut self, now: Instant, arrival: &Arrival<'_>) -> Admission {
        let from = arrival.from;
        let Ok(mad) = arrival.mad else {
            let bearable = self.policy_mut().is_none_or(|policy| policy.bad_mad(now, from.remote, None));
            return if bearable { Admission::Take } else { Admission::Drop };
        };
        if self.admits(now, from, mad) { Admission::Take } else { Admission::Drop }
    }

    fn admits(&mut self, now: Instant, from: MadAddress, mad: &Mad) -> bool {
        let message = &mad.message;
        let stray = message.remote_comm_id().is_some_and(|id| self.tables.by_local_id(id).is_none());
        let Some(policy) = self.policy_mut() else { return true };
        let source = from.remote;
        let ask = match message {
            Message::Req(m) => Ask {
                kind: MadKind::Req,
                source,
                service: Some(m.service_id),
                remote_comm_id: Some(m.local_comm_id),
                qpn: Some(m.local_qpn),
            },
            Message::SidrReq(m) => {
                let service = Some(m.service_id);
                Ask { kind: MadKind::SidrReq, source, service, remote_comm_id: None, qpn: None }
            }
            // What is for nobody costs an answer.
            Message::Rep(_) | Message::Dreq(_) | Message::Lap(_) if stray => {
                return policy.bad_mad(now, source, Some(message.kind()));
            }
            Message::Lap(m) => {
                let remote_comm_id = Some(m.local_comm_id);
                Ask { kind: MadKind::Lap, source, service: None, remote_comm_id, qpn: None }
            }
            _ => {
                policy.handle_timeout(now);
                return true;
            }
        };
        match policy.decide(now, &ask) {
            Decision::Admit => return true,
            Decision::Refuse => self.refuse_by_policy(from, mad.header.transaction_id, message),
            Decision::Forget => {}
        }
        false
    }

    fn refuse_by_policy(&mut self, from: MadAddress, transaction: TransactionId, message: &Message) {
        match message {
            Message::Req(req) => {
                let rej = Rej {
                    local_comm_id: CommunicationId::NONE,
                    remote_comm_id: req.local_comm_id,
                    message: RejectedMessage::Req,
                    reason: RejReason::ConsumerDefined,
                    ari: Ari::EMPTY,
                    private_data: PrivateData::new(REFUSED_BY_POLICY).unwrap_or_default(),
                };
                self.send(from, transaction, rej);
            }
            Message::SidrReq(req) => {
                let rep = SidrRep {
                    request_id: req.request_id,
                    status: SidrStatus::Rejected,
                    qpn: uroce::types::Qpn::default(),
                    service_id: req.service_id,
                    qkey: uroce::types::QKey::default(),
                    info: Ari::EMPTY,
                    private_data: PrivateData::EMPTY,
                };
                self.send(from, transaction, rep);
            }
            Message::Lap(lap) => {
                let apr = Apr {
                    local_comm_id: lap.remote_comm_id,
                    remote_comm_id: lap.local_comm_id,
                    status: AprStatus::Rejected,
                    info: Ari::EMPTY,
                    private_data: PrivateData::EMPTY,
                };
                self.send(from, transaction, apr);
            }
            _ => {}
        }
    }

    /// A passive communication was made.
    pub(super) fn note_half_open(&mut self, handle: CommId) {
        let most = self.config.limits.half_open * 2 + LOOKED_AT;
        let Self { policing: Some(policing), tables, .. } = self else { return };
        if policing.half_open.len() >= most {
            let is_half_open = |c: CommId| tables.comms.get(c).is_some_and(|c| c.state.is_half_open());
            policing.half_open.retain(|(_, comm)| is_half_open(*comm));
        }
        policing.half_open.push_back((policing.policy.now(), handle));
    }

    /// With a policy, the oldest half-open communication gives way when there is no room for a new one: a peer that
    /// means it is through after a round trip. One that the program has not answered stays; the backlog bounds these.
    pub(super) fn make_room(&mut self) {
        if self.tables.half_open() < self.config.limits.half_open {
            return;
        }
        for _ in 0..LOOKED_AT {
            let Some(policing) = &mut self.policing else { return };
            let now = policing.policy.now();
            let Some((since, handle)) = policing.half_open.pop_front() else { return };
            let state = self.tables.comms.get(handle).map(|c| &c.state);
            match state {
                Some(State::RepSent(retry)) if now.saturating_since(since) >= EVICT_AFTER => {
                    let spent = retry.spent(now);
                    self.record_eviction(handle);
                    self.give_up(now, handle, MadKind::Rep, spent);
                    return;
                }
                Some(state) if state.is_half_open() => {
                    let young = now.saturating_since(since) < EVICT_AFTER;
                    if let Some(policing) = &mut self.policing {
                        if young {
                            policing.half_open.push_front((since, handle));
                            return;
                        }
                        policing.half_open.push_back((since, handle));
                    }
                }
                _ => {}
            }
        }
    }

    fn record_eviction(&mut self, handle: CommId) {
        let Some(record) = self.record_of(AuditEvent::Evicted, handle) else { return };
        if let Some(policy) = self.policy_mut() {
            policy.evicted(record);
        }
    }

    /// A record of a communication with its ids, peer and service.
    fn record_of(&self, event: AuditEvent, handle: CommId) -> Option<AuditRecord<'static>> {
        let comm = self.tables.comms.get(handle)?;
        let listener = comm.listener.and_then(|l| self.tables.listeners.get(l));
        Some(AuditRecord {
            local_comm_id: Some(comm.local_id),
            remote_comm_id: Some(comm.remote_id).filter(|id| *id != CommunicationId::NONE),
            qpn: comm.remote_qpn,
            source_gid: Some(comm.path.remote),
            service_id: listener.map(|l| l.service_id),
            ..AuditRecord::new(event)
        })
    }

    /// Records what became of a communication.
    pub(super) fn audit_comm(&mut self, event: AuditEvent, handle: CommId, reason: Option<RejReason>) {
        if self.policing.is_none() {
            return;
        }
        let record = self.record_of(event, handle).unwrap_or(AuditRecord::new(event));
        let record = reason.map_or_else(|| record.clone(), |reason| record.clone().with_reason(reason));
        if let Some(policy) = self.policy_mut() {
            policy.audit(&record);
        }
    }

    /// Records an event for the consumer that ends or establishes a communication.
    pub(super) fn audit_event(&mut self, event: &CmEvent) {
        match event {
            CmEvent::Established { comm, .. } => self.audit_comm(AuditEvent::Established, *comm, None),
            CmEvent::Rejected(r) => self.audit_comm(AuditEvent::Refused, r.comm, Some(r.reason)),
            CmEvent::Unreachable { comm, .. } => self.audit_comm(AuditEvent::Unreachable, *comm, None),
            CmEvent::Disconnected { comm, cause } => {
                let reason = match cause {
                    DisconnectCause::Rejected(reason) => Some(*reason),
                    DisconnectCause::Agreed | DisconnectCause::NoAnswer { .. } => None,
                };
                self.audit_comm(AuditEvent::Disconnected, *comm, reason);
            }
            _ => {}
        }
    }

    /// Records what became of a message that was let in and did no good. Repeats are no news, and what is for nobody was
    /// recorded on arrival.
    pub(super) fn audit_outcome(&mut self, cx: &Arrived<'_>, outcome: Outcome) {
        let Some(policy) = self.policy_mut() else { return };
        let (event, reason) = match outcome {
            Outcome::Refused(reason) => (AuditEvent::Refused, Some(reason)),
            Outcome::Overflow(reason) => (AuditEvent::Refused, reason),
            Outcome::RefusedService(_) => (AuditEvent::Refused, None),
            Outcome::Stranger => (AuditEvent::Stray, None),
            Outcome::Unmatched | Outcome::OutOfPlace => return,
        };
        let notice = Notice::of(cx.from, cx.mad, outcome);
        let record = AuditRecord {
            message: Some(notice.kind.name()),
            local_comm_id: notice.receiver_id,
            remote_comm_id: notice.sender_id,
            qpn: notice.qpn,
            source_gid: Some(cx.from.remote),
            service_id: notice.service_id,
            ..AuditRecord::new(event)
        };
        policy.audit(&match reason {
            Some(reason) => record.with_reason(reason),
            None => record,
        });
    }
}
