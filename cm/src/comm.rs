//! One communication: its state and what each message does to it (IBTA Vol 1 12.9).
//!
//! Owns the states and the one table of transitions, [`verdict`]. Pure: it neither sends nor looks anything up; the agent
//! does what the verdict says.

use uroce::table::Handle;
use uroce::time::{Duration, Instant};
use uroce::types::{AckTimeout, Gid, PathMtu, Psn, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{AddressVector, RtrAttr, RtsAttr};

use crate::retry::Retransmission;
use crate::wire::{
    CaGuid, CommunicationId, MAD_LEN, MraedMessage, RejReason, ServiceId, TransactionId, TransportService,
};

/// Tag types of the handles.
pub mod kind {
    /// Communications.
    pub enum Comm {}
    /// Listeners.
    pub enum Listener {}
    /// Exchanges of service resolution.
    pub enum Sidr {}
}

/// Names a communication.
pub type CommId = Handle<kind::Comm>;
/// Names a listener.
pub type ListenerId = Handle<kind::Listener>;
/// Names an exchange of service resolution.
pub type SidrId = Handle<kind::Sidr>;

/// Where a communication stands, with what that state needs.
#[derive(Debug)]
pub(crate) enum State {
    /// REQ is out.
    ReqSent(Retransmission),
    /// A REQ is with the consumer.
    ReqRcvd(Patience),
    /// REP is out.
    RepSent(Retransmission),
    /// A REP is with the consumer.
    RepRcvd(Patience),
    /// Both sides may send.
    Established {
        /// An active side keeps its RTU to send it again.
        rtu: Option<Box<[u8; MAD_LEN]>>,
        /// What the two say about an alternate path.
        lap: Lap,
    },
    /// DREQ is out.
    DreqSent(Retransmission),
    /// A DREQ is with the consumer.
    DreqRcvd { transaction: TransactionId },
}

/// What a consumer that thinks costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// An MRA told the peer to wait.
    pub(crate) mra_sent: bool,
    /// Then the peer is refused.
    pub(crate) deadline: Instant,
}

/// Where an established connection stands with its alternate path.
#[derive(Debug)]
pub(crate) enum Lap {
    /// Nobody asks.
    Idle,
    /// We offered a path.
    Sent { retry: Retransmission, path: Box<Path> },
    /// The peer's offer is with the consumer.
    Rcvd { transaction: TransactionId, path: Box<Path>, patience: Patience },
    /// The peer's offer was answered; the answer is kept to repeat it.
    Answered { transaction: TransactionId, apr: Box<[u8; MAD_LEN]> },
}

/// Who asked for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// We sent the REQ.
    Active,
    /// The peer did.
    Passive,
}

/// The states of the specification. TIMEWAIT has records of its own; IDLE and LISTEN are no communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are those of IBTA Vol 1 12.9.5.
pub enum CommState {
    ReqSent,
    MraReqRcvd,
    ReqRcvd,
    MraReqSent,
    RepSent,
    MraRepRcvd,
    RepRcvd,
    MraRepSent,
    Established,
    DreqSent,
    DreqRcvd,
    TimeWait,
}

impl CommState {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::ReqSent,
        Self::MraReqRcvd,
        Self::ReqRcvd,
        Self::MraReqSent,
        Self::RepSent,
        Self::MraRepRcvd,
        Self::RepRcvd,
        Self::MraRepSent,
        Self::Established,
        Self::DreqSent,
        Self::DreqRcvd,
        Self::TimeWait,
    ];
}

impl State {
    /// The name of the specification.
    pub(crate) const fn name(&self) -> CommState {
        match self {
            Self::ReqSent(r) if r.is_extended() => CommState::MraReqRcvd,
            Self::ReqSent(_) => CommState::ReqSent,
            Self::ReqRcvd(p) if p.mra_sent => CommState::MraReqSent,
            Self::ReqRcvd(_) => CommState::ReqRcvd,
            Self::RepSent(r) if r.is_extended() => CommState::MraRepRcvd,
            Self::RepSent(_) => CommState::RepSent,
            Self::RepRcvd(p) if p.mra_sent => CommState::MraRepSent,
            Self::RepRcvd(_) => CommState::RepRcvd,
            Self::Established { .. } => CommState::Established,
            Self::DreqSent(_) => CommState::DreqSent,
            Self::DreqRcvd { .. } => CommState::DreqRcvd,
        }
    }

    /// Whether a REQ is with the consumer.
    pub(crate) const fn is_pending(&self) -> bool {
        matches!(self, Self::ReqRcvd(_))
    }

    /// Whether a passive side is not established yet.
    pub(crate) const fn is_half_open(&self) -> bool {
        matches!(self, Self::ReqRcvd(_) | Self::RepSent(_))
    }
}

/// Something that arrived for a known communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A REQ with the peer's GUID and id: the same one again.
    Req,
    /// A REP.
    Rep,
    /// An RTU.
    Rtu,
    /// A data packet on the QP.
    Data,
    /// An MRA for this message.
    Mra(MraedMessage),
    /// A REJ with this reason.
    Rej(RejReason),
    /// A DREQ.
    Dreq,
    /// A DREP.
    Drep,
    /// A LAP.
    Lap,
    /// An APR.
    Apr,
}

/// What the agent does about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Ignore,
    /// The consumer still thinks: ask for time.
    SendMra,
    /// Send the pending message again now.
    Repeat,
    /// Send the RTU again.
    RepeatRtu,
    /// The REP answers our REQ: hand it to the consumer.
    Answered,
    /// The connection is established.
    Establish,
    /// Wait longer.
    Extend,
    /// It is over; the QP may be used again at once.
    End,
    /// It is over; the QP must wait.
    TimeWait,
    /// The peer disconnects: tell the consumer, who answers.
    Disconnect,
    /// Both sides disconnect at once: answer, then wait.
    CrossedDisconnect,
    /// The peer answered our DREQ.
    Disconnected,
    /// Answer a repeated DREQ.
    RepeatDrep,
    /// The peer offers an alternate path.
    Offered,
    /// The peer answers our offer.
    OfferAnswered,
}

/// The table: what `incoming` does in `state` (IBTA Vol 1 12.9.6 to 12.9.8).
#[must_use]
pub fn verdict(state: CommState, incoming: Incoming) -> Verdict {
    use CommState as S;
    use Incoming as I;
    match (incoming, state) {
        (I::Req, S::ReqRcvd | S::MraReqSent) | (I::Rep, S::RepRcvd | S::MraRepSent) => Verdict::SendMra,
        (I::Req, S::RepSent) => Verdict::Repeat,
        (I::Rep, S::ReqSent | S::MraReqRcvd) => Verdict::Answered,
        (I::Rep, S::Established) => Verdict::RepeatRtu,
        (I::Rtu | I::Data, S::RepSent | S::MraRepRcvd) => Verdict::Establish,
        (I::Mra(MraedMessage::Req), S::ReqSent | S::MraReqRcvd)
        | (I::Mra(MraedMessage::Rep), S::RepSent | S::MraRepRcvd)
        | (I::Mra(MraedMessage::Lap), S::Established) => Verdict::Extend,
        (I::Rej(RejReason::StaleConnection), S::ReqSent | S::MraReqRcvd | S::RepSent | S::MraRepRcvd)
        | (I::Rej(_), S::RepRcvd | S::MraRepSent | S::Established | S::DreqSent) => Verdict::TimeWait,
        (I::Rej(_), S::ReqSent | S::MraReqRcvd | S::ReqRcvd | S::MraReqSent | S::RepSent | S::MraRepRcvd) => {
            Verdict::End
        }
        (I::Dreq, S::RepSent | S::MraRepRcvd | S::RepRcvd | S::MraRepSent | S::Established) => Verdict::Disconnect,
        (I::Dreq, S::DreqSent) => Verdict::CrossedDisconnect,
        (I::Dreq, S::TimeWait) => Verdict::RepeatDrep,
        (I::Drep, S::DreqSent) => Verdict::Disconnected,
        (I::Lap, S::Established) => Verdict::Offered,
        (I::Apr, S::Established) => Verdict::OfferAnswered,
        _ => Verdict::Ignore,
    }
}

/// Where a connection runs, seen from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Our GID.
    pub local: Gid,
    /// The peer's GID.
    pub remote: Gid,
    /// 20 bits; both sides derive the UDP source port from it.
    pub flow_label: u32,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Payload bytes a packet.
    pub mtu: PathMtu,
    /// Local ACK timeout of both QPs; also how long TIMEWAIT lasts.
    pub ack_timeout: AckTimeout,
}

impl Path {
    /// The plain path between two GIDs: MTU 1024, hop limit 64, ACK timeout 67 ms.
    #[must_use]
    pub const fn new(local: Gid, remote: Gid) -> Self {
        Self {
            local,
            remote,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 64,
            service_level: 0,
            mtu: PathMtu::B1024,
            ack_timeout: AckTimeout::DEFAULT,
        }
    }

    /// The address vector of a QP on this path.
    #[must_use]
    pub const fn address_vector(&self, sgid_index: u8) -> AddressVector {
        let mut av = AddressVector::new(self.remote, sgid_index);
        av.flow_label = self.flow_label;
        av.traffic_class = self.traffic_class;
        av.hop_limit = self.hop_limit;
        av.service_level = self.service_level;
        av
    }
}

/// What both sides agreed, seen from this side: all that the QP needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionTerms {
    /// Reliable or unreliable.
    pub transport: TransportService,
    /// Where it runs.
    pub path: Path,
    /// Our QP.
    pub local_qpn: Qpn,
    /// The peer's QP.
    pub remote_qpn: Qpn,
    /// First PSN that we expect: the one *we* put into our REQ or REP.
    pub rq_psn: Psn,
    /// First PSN that we send: the one that the peer put into its message.
    pub sq_psn: Psn,
    /// READs and atomics that the peer may have outstanding here.
    pub max_dest_rd_atomic: u8,
    /// READs and atomics that we may have outstanding.
    pub max_rd_atomic: u8,
    /// Transport retries of our QP.
    pub retry_count: RetryCount,
    /// RNR retries of our QP.
    pub rnr_retry: RnrRetry,
    /// Whether the peer's QP has an SRQ.
    pub remote_srq: bool,
    /// The other way that REQ and REP agreed on.
    pub alternate: Option<Path>,
}

impl ConnectionTerms {
    /// What takes the QP from INIT to RTR. `sgid_index` is the place of `path.local` in the device's GID table.
    #[must_use]
    pub const fn rtr(&self, sgid_index: u8, min_rnr_timer: RnrTimer) -> RtrAttr {
        RtrAttr {
            av: self.path.address_vector(sgid_index),
            path_mtu: self.path.mtu,
            dest_qpn: self.remote_qpn,
            rq_psn: self.rq_psn,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            min_rnr_timer,
        }
    }

    /// What takes the QP from RTR to RTS.
    #[must_use]
    pub const fn rts(&self) -> RtsAttr {
        RtsAttr {
            sq_psn: self.sq_psn,
            timeout: self.path.ack_timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            max_rd_atomic: self.max_rd_atomic,
        }
    }
}

/// What a connection between equals needs until it is clear who is active.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    pub(crate) service_id: ServiceId,
    /// The peer was not there yet when our REQ arrived.
    pub(crate) unheard: bool,
}

/// One communication.
#[derive(Debug)]
pub(crate) struct Comm {
    /// Where the peer's first message came from, or where ours went: with its GUID the key of the tables.
    pub(crate) source: Gid,
    pub(crate) role: Role,
    /// Who was asked, on the passive side.
    pub(crate) listener: Option<ListenerId>,
    /// Both sides ask for this service: whose REQ crosses ours is the one that we ask.
    pub(crate) rendezvous: Option<Box<Rendezvous>>,
    pub(crate) local_id: CommunicationId,
    /// NONE until the peer's first message.
    pub(crate) remote_id: CommunicationId,
    pub(crate) remote_guid: Option<CaGuid>,
    pub(crate) local_qpn: Option<Qpn>,
    pub(crate) remote_qpn: Option<Qpn>,
    pub(crate) path: Path,
    /// Offered or agreed in REQ and REP.
    pub(crate) alternate: Option<Box<Path>>,
    /// Of the REQ.
    pub(crate) transaction: TransactionId,
    pub(crate) transport: TransportService,
    /// Starting PSN of the other side's message; what we send with.
    pub(crate) sq_psn: Psn,
    /// Starting PSN of our message.
    pub(crate) rq_psn: Psn,
    /// Ours: what we offered or, on a passive side, what the REQ leaves us.
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: RetryCount,
    pub(crate) rnr_retry: RnrRetry,
    pub(crate) remote_srq: bool,
    /// How soon the peer answers, and how often it wants to be asked.
    pub(crate) peer_response: Duration,
    pub(crate) peer_retries: u8,
    pub(crate) state: State,
    /// When the timer of the state is due.
    pub(crate) due: Option<Instant>,
}

impl Comm {
    /// Whether the peer sends from there: from where the connection runs, or may run.
    pub(crate) fn is_from(&self, remote: Gid) -> bool {
        self.path.remote == remote
            || self.source == remote
            || self.alternate.as_ref().is_some_and(|p| p.remote == remote)
    }

    /// The terms, once the peer's QP is known.
    pub(crate) fn terms(&self) -> Option<ConnectionTerms> {
        let connected = self.transport == TransportService::Rc;
        Some(ConnectionTerms {
            transport: self.transport,
            path: self.path,
            local_qpn: self.local_qpn?,
            remote_qpn: self.remote_qpn?,
            rq_psn: self.rq_psn,
            sq_psn: self.sq_psn,
            max_dest_rd_atomic: if connected { self.responder_resources } else { 0 },
            max_rd_atomic: if connected { self.initiator_depth } else { 0 },
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            remote_srq: self.remote_srq,
            alternate: self.alternate.as_deref().copied(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn where_is(incoming: Incoming, v: Verdict) -> Vec<CommState> {
        CommState::ALL.into_iter().filter(|s| verdict(*s, incoming) == v).collect()
    }

    #[test]
    fn the_table_by_message() {
        use CommState as S;
        assert_eq!(where_is(Incoming::Req, Verdict::SendMra), [S::ReqRcvd, S::MraReqSent]);
        assert_eq!(where_is(Incoming::Req, Verdict::Repeat), [S::RepSent]);
        assert_eq!(where_is(Incoming::Rep, Verdict::Answered), [S::ReqSent, S::MraReqRcvd]);
        assert_eq!(where_is(Incoming::Rep, Verdict::RepeatRtu), [S::Established]);
        assert_eq!(where_is(Incoming::Rep, Verdict::SendMra), [S::RepRcvd, S::MraRepSent]);
        assert_eq!(where_is(Incoming::Rtu, Verdict::Establish), [S::RepSent, S::MraRepRcvd]);
        assert_eq!(where_is(Incoming::Data, Verdict::Establish), [S::RepSent, S::MraRepRcvd]);
        assert_eq!(where_is(Incoming::Mra(MraedMessage::Req), Verdict::Extend), [S::ReqSent, S::MraReqRcvd]);
        assert_eq!(where_is(Incoming::Mra(MraedMessage::Rep), Verdict::Extend), [S::RepSent, S::MraRepRcvd]);
        assert_eq!(where_is(Incoming::Mra(MraedMessage::Lap), Verdict::Extend), [S::Established]);
        assert_eq!(where_is(Incoming::Lap, Verdict::Offered), [S::Established]);
        assert_eq!(where_is(Incoming::Apr, Verdict::OfferAnswered), [S::Established]);
        assert_eq!(where_is(Incoming::Dreq, Verdict::CrossedDisconnect), [S::DreqSent]);
        assert_eq!(where_is(Incoming::Dreq, Verdict::RepeatDrep), [S::TimeWait]);
        assert_eq!(where_is(Incoming::Drep, Verdict::Disconnected), [S::DreqSent]);
    }

    #[test]
    fn a_stale_refusal_keeps_the_qp_waiting() {
        let stale = Incoming::Rej(RejReason::StaleConnection);
        let consumer = Incoming::Rej(RejReason::ConsumerDefined);
        assert_eq!(verdict(CommState::ReqSent, stale), Verdict::TimeWait);
        assert_eq!(verdict(CommState::ReqSent, consumer), Verdict::End);
        assert_eq!(verdict(CommState::Established, consumer), Verdict::TimeWait);
        assert_eq!(verdict(CommState::TimeWait, consumer), Verdict::Ignore);
    }
}
