//! The gate: who is asked before a MAD makes any state, and who hears what became of it.
//!
//! Owns the trait that a policy implements. Decides nothing itself: without a gate everything is let in.

use uroce::time::Instant;
use uroce::types::Qpn;

use super::MadAddress;
use crate::wire::{CommunicationId, Mad, MadError, MadKind, Message, RejReason, ServiceId, SidrStatus};

/// A MAD as it arrived. Nothing has been looked up for it yet.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Between whom it travelled.
    pub from: MadAddress,
    /// What it is, or why it is none.
    pub mad: Result<&'a Mad, MadError>,
}

impl Arrival<'_> {
    /// The kind of message; `None` when it is malformed.
    #[must_use]
    pub fn kind(&self) -> Option<MadKind> {
        self.mad.ok().map(|mad| mad.message.kind())
    }

    /// The service that a REQ or SIDR_REQ asks for.
    #[must_use]
    pub fn service_id(&self) -> Option<ServiceId> {
        service_id_of(&self.mad.ok()?.message)
    }
}

/// What the gate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is handled.
    Take,
    /// It is dropped, and counted as refused by the gate.
    Drop,
    /// A REQ gets a REJ with this reason, a SIDR_REQ a SIDR_REP "rejected"; any other message is dropped.
    Refuse(RejReason),
}

/// What became of a MAD that did no good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The agent refused it with a REJ.
    Refused(RejReason),
    /// The agent refused a SIDR_REQ.
    RefusedService(SidrStatus),
    /// A table or backlog had no room; the reason of the REJ that said so, if one did.
    Overflow(Option<RejReason>),
    /// It names no communication of ours, or not as it is: wrong ids, wrong QPN.
    Unmatched,
    /// It names a communication with somebody else.
    Stranger,
    /// It does not fit the state of its communication, and came from its peer: repeats and crossings.
    OutOfPlace,
}

/// Tells a gate what became of a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Between whom it travelled.
    pub from: MadAddress,
    /// What it is.
    pub kind: MadKind,
    /// The sender's communication id, if the message has one.
    pub sender_id: Option<CommunicationId>,
    /// Ours as the sender has it, if the message has one.
    pub receiver_id: Option<CommunicationId>,
    /// The QP that the message names: the sender's in REQ and REP, ours in DREQ and LAP.
    pub qpn: Option<Qpn>,
    /// The service that is asked for.
    pub service_id: Option<ServiceId>,
    /// What became of it.
    pub outcome: Outcome,
}

impl Notice {
    pub(super) fn of(from: MadAddress, mad: &Mad, outcome: Outcome) -> Self {
        let message = &mad.message;
        let qpn = match message {
            Message::Req(m) => Some(m.local_qpn),
            Message::Rep(m) => Some(m.local_qpn),
            Message::Dreq(m) => Some(m.remote_qpn),
            Message::Lap(m) => Some(m.remote_qpn),
            _ => None,
        };
        Self {
            from,
            kind: message.kind(),
            sender_id: message.local_comm_id(),
            receiver_id: message.remote_comm_id(),
            qpn,
            service_id: service_id_of(message),
            outcome,
        }
    }
}

/// A policy. It sees every MAD before anything is made for it, and hears of those that the agent could not use.
/// It runs on the thread of the agent: it answers at once and holds no more than it bounds itself.
pub trait Gate: Send {
    /// Whether the agent shall handle what arrived.
    fn admit(&mut self, now: Instant, arrival: &Arrival<'_>) -> Admission;

    /// What became of a MAD that was let in and did no good.
    fn notice(&mut self, now: Instant, notice: &Notice) {
        let _ = (now, notice);
    }
}

const fn service_id_of(message: &Message) -> Option<ServiceId> {
    match message {
        Message::Req(m) => Some(m.service_id),
        Message::SidrReq(m) => Some(m.service_id),
        _ => None,
    }
}
