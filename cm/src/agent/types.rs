//! What goes into the agent and comes out of it.

use core::net::IpAddr;

use uroce::time::Duration;
use uroce::types::{Gid, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry};

use crate::comm::{CommId, ConnectionTerms, ListenerId, Path, SidrId};
use crate::retry::RetryPolicy;
use crate::wire::{
    AprStatus, Ari, CaGuid, CmTimeout, IpHeader, MAD_LEN, MadKind, PrivateData, PrivateDataTooLong, RejInfo, RejReason,
    RejectedMessage, ServiceId, SidrStatus, TransportService,
};

/// Between whom a MAD travels: QP1 of `local` and QP1 of `remote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MadAddress {
    /// Our GID.
    pub local: Gid,
    /// The peer's GID.
    pub remote: Gid,
}

/// A MAD to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingMad {
    /// From where to where.
    pub to: MadAddress,
    /// Its bytes.
    pub bytes: [u8; MAD_LEN],
}

/// What happens to a REQ when nobody has room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overflow {
    /// The peer knows at once: REJ 3 (no resources) when a table of ours is full, REJ 28 when the listener's backlog is,
    /// as Linux answers; "rejected" to a SIDR_REQ.
    #[default]
    Reject,
    /// Nothing: the peer tries again.
    Drop,
}

/// Greatest sizes of the agent's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Communications of every kind, TIMEWAIT apart.
    pub comms: usize,
    /// Passive communications that are not established: 2,048 by default, which fit 2 MiB with the events that tell of them.
    pub half_open: usize,
    /// Records of TIMEWAIT; beyond, the oldest is forgotten. 65,536 by default, which fit 4 MiB.
    pub timewait: usize,
    /// Listeners.
    pub listeners: usize,
    /// REQs of one listener that its consumer has not answered, whatever backlog it asked for.
    pub backlog: usize,
    /// Service resolutions: so many of ours, and so many of peers (answers that are kept included).
    pub services: usize,
    /// MADs that wait to be sent; beyond, they are dropped and their timers send them again.
    pub outgoing: usize,
    /// Events that wait for the consumer; beyond, no REQ is accepted.
    pub events: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            comms: 65_536,
            half_open: 2048,
            timewait: 65_536,
            listeners: 4096,
            backlog: 65_536,
            services: 4096,
            outgoing: 8192,
            events: 16_384,
        }
    }
}

/// How an agent behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Our adapter's GUID; random when absent. It must differ between all agents of a network.
    pub ca_guid: Option<CaGuid>,
    /// When messages are repeated. The REQ tells the peer how patient this is.
    pub retry: RetryPolicy,
    /// How soon we promise to answer; the peer repeats its REP no sooner.
    pub response_timeout: CmTimeout,
    /// How much time an MRA of ours asks for.
    pub service_timeout: CmTimeout,
    /// How long a peer's MRAs can stretch one message in all.
    pub mra_cap: Duration,
    /// How many MRAs for one message are heard.
    pub mra_max: u8,
    /// How long the consumer may take to answer a REQ, REP, LAP or SIDR_REQ. Then it is refused for it.
    pub consumer_cap: Duration,
    /// How long TIMEWAIT lasts at most, whatever ACK timeout a peer names.
    pub timewait_cap: Duration,
    /// A DREQ that the consumer does not answer by `disconnect` is answered after this.
    pub drep_delay: Duration,
    /// Greatest path MTU accepted.
    pub max_mtu: PathMtu,
    /// Most READs and atomics served a connection, 0 to 255.
    pub max_responder_resources: u8,
    /// Coded ACK delay that our REP states.
    pub ack_delay: u8,
    /// What happens to a REQ when a backlog or table is full.
    pub overflow: Overflow,
    /// Sizes.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ca_guid: None,
            retry: RetryPolicy::default(),
            response_timeout: CmTimeout::DEFAULT_RESPONSE,
            service_timeout: CmTimeout::DEFAULT_SERVICE,
            mra_cap: Duration::from_secs(120),
            mra_max: 8,
            consumer_cap: Duration::from_secs(120),
            timewait_cap: Duration::from_secs(20),
            drep_delay: Duration::from_secs(1),
            max_mtu: PathMtu::B4096,
            max_responder_resources: 128,
            ack_delay: 15,
            overflow: Overflow::default(),
            limits: Limits::default(),
        }
    }
}

/// Which destination addresses a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressFilter {
    /// All, also services without IP addresses.
    Any,
    /// All of IPv4.
    AnyV4,
    /// All of IPv6.
    AnyV6,
    /// One: what came to it and names it.
    Only(IpAddr),
}

impl AddressFilter {
    /// Whether a REQ for `destination` is for this listener.
    #[must_use]
    pub fn serves(self, destination: Option<IpAddr>) -> bool {
        match (self, destination) {
            (Self::Any, _) => true,
            (Self::AnyV4, Some(ip)) => ip.is_ipv4(),
            (Self::AnyV6, Some(ip)) => ip.is_ipv6(),
            (Self::Only(only), Some(ip)) => only == ip,
            (_, None) => false,
        }
    }

    /// Whether one address could be for both.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) | (_, Self::Any) => true,
            (Self::Only(ip), filter) | (filter, Self::Only(ip)) => filter.serves(Some(ip)),
            (a, b) => a == b,
        }
    }
}

/// What a connection is asked for with.
#[derive(Clone, Copy, Debug)]
pub struct ConnectParams<'a> {
    /// Where it shall run.
    pub path: Path,
    /// Who is asked.
    pub service_id: ServiceId,
    /// `Rc` or `Uc`.
    pub transport: TransportService,
    /// Our QP.
    pub local_qpn: Qpn,
    /// First PSN that we expect; random when absent.
    pub starting_psn: Option<Psn>,
    /// Whether our QP has an SRQ.
    pub srq: bool,
    /// READs and atomics that we can serve.
    pub responder_resources: u8,
    /// READs and atomics that we want to have outstanding.
    pub initiator_depth: u8,
    /// Transport retries of both QPs.
    pub retry_count: RetryCount,
    /// RNR retries of the peer's QP.
    pub rnr_retry: RnrRetry,
    /// End-to-end credits.
    pub flow_control: bool,
    /// Another way that the connection may take; its MTU is that of `path`.
    pub alternate: Option<Path>,
    /// The peer asks for the same service at the same time: there is no listener, and whose GUID is less becomes passive
    /// and gets a [`CmEvent::ConnectRequest`] for this communication.
    pub peer_to_peer: bool,
    /// At most 92 bytes, an [`IpHeader`] included.
    pub private_data: &'a [u8],
}

/// What becomes of the alternate path that a REQ offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Failover {
    /// Taken; also said when none was offered.
    Accepted,
    /// Our QP has no alternate path.
    #[default]
    Unsupported,
    /// This one is refused.
    Refused,
}

impl Failover {
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::Accepted => 0,
            Self::Unsupported => 1,
            Self::Refused => 2,
        }
    }
}

/// What a connection is accepted with.
#[derive(Clone, Copy, Debug)]
pub struct AcceptParams<'a> {
    /// Our QP.
    pub local_qpn: Qpn,
    /// First PSN that we expect; random when absent.
    pub starting_psn: Option<Psn>,
    /// Whether our QP has an SRQ.
    pub srq: bool,
    /// READs and atomics that we can serve; negotiated down to what the peer wants.
    pub responder_resources: u8,
    /// READs and atomics that we want to have outstanding; negotiated down to what the peer can serve.
    pub initiator_depth: u8,
    /// RNR retries of the peer's QP.
    pub rnr_retry: RnrRetry,
    /// End-to-end credits.
    pub flow_control: bool,
    /// What becomes of the REQ's alternate path.
    pub failover: Failover,
    /// At most 196 bytes.
    pub private_data: &'a [u8],
}

/// A REQ for the consumer to decide on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The communication; answer with `accept` or `reject`.
    pub comm: CommId,
    /// Who is asked; `None` when our own REQ met that of an equal.
    pub listener: Option<ListenerId>,
    /// Between whom.
    pub from: MadAddress,
    /// What is asked for.
    pub service_id: ServiceId,
    /// IP addresses and source port, for services of rdma_cm.
    pub ip: Option<IpHeader>,
    /// Reliable or unreliable.
    pub transport: TransportService,
    /// Where it shall run.
    pub path: Path,
    /// Where it may move.
    pub alternate: Option<Path>,
    /// The peer's QP.
    pub remote_qpn: Qpn,
    /// The most that `accept` may serve: the *initiator depth* of the REQ.
    pub responder_resources: u8,
    /// The most that `accept` may want: the *responder resources* of the REQ.
    pub initiator_depth: u8,
    /// Transport retries that the peer asks of our QP.
    pub retry_count: RetryCount,
    /// RNR retries that the peer asks of our QP.
    pub rnr_retry: RnrRetry,
    /// Whether the peer uses end-to-end credits.
    pub flow_control: bool,
    /// Whether the peer's QP has an SRQ.
    pub srq: bool,
    /// All of it; see [`ConnectRequest::user_data`].
    pub private_data: PrivateData<92>,
}

impl ConnectRequest {
    /// The consumer's part of the private data: 56 bytes behind an IP header, else 92.
    #[must_use]
    pub fn user_data(&self) -> &[u8] {
        let skip = if self.ip.is_some() { IpHeader::LEN } else { 0 };
        self.private_data.as_bytes().get(skip..).unwrap_or(&[])
    }
}

/// A REP for the consumer to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The communication; answer with `confirm` or `reject`.
    pub comm: CommId,
    /// What the QP needs.
    pub terms: ConnectionTerms,
    /// Initiator depth of the REP.
    pub responder_resources: u8,
    /// Responder resources of the REP.
    pub initiator_depth: u8,
    /// Whether the peer uses end-to-end credits.
    pub flow_control: bool,
    /// All of it.
    pub private_data: PrivateData<196>,
}

/// Whom to ask for which datagram service.
#[derive(Clone, Copy, Debug)]
pub struct ResolveParams<'a> {
    /// From where to where.
    pub to: MadAddress,
    /// What is asked for.
    pub service_id: ServiceId,
    /// At most 216 bytes, an [`IpHeader`] included.
    pub private_data: &'a [u8],
}

/// What a [`ServiceRequest`] is answered with.
#[derive(Clone, Copy, Debug)]
pub struct ServiceAnswer<'a> {
    /// Whether the rest is valid.
    pub status: SidrStatus,
    /// The QP that serves.
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
    /// Additional information whose meaning the status gives, at most 72 bytes.
    pub info: &'a [u8],
    /// At most 136 bytes.
    pub private_data: &'a [u8],
}

impl ServiceAnswer<'_> {
    /// No, without a word.
    #[must_use]
    pub fn refusal(status: SidrStatus) -> Self {
        Self { status, qpn: Qpn::default(), qkey: QKey::default(), info: &[], private_data: &[] }
    }
}

/// A SIDR_REQ for the consumer to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceRequest {
    /// The exchange; answer with `answer_service`.
    pub sidr: SidrId,
    /// Who is asked.
    pub listener: ListenerId,
    /// Between whom.
    pub from: MadAddress,
    /// What is asked for.
    pub service_id: ServiceId,
    /// IP addresses and source port, for services of rdma_cm.
    pub ip: Option<IpHeader>,
    /// All of it; see [`ServiceRequest::user_data`].
    pub private_data: PrivateData<216>,
}

impl ServiceRequest {
    /// The consumer's part of the private data: 180 bytes behind an IP header, else 216.
    #[must_use]
    pub fn user_data(&self) -> &[u8] {
        let skip = if self.ip.is_some() { IpHeader::LEN } else { 0 };
        self.private_data.as_bytes().get(skip..).unwrap_or(&[])
    }
}

/// The answer to a question of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceReply {
    /// The exchange, which is over.
    pub sidr: SidrId,
    /// Between whom.
    pub from: MadAddress,
    /// Whether QPN and Q_Key are valid.
    pub status: SidrStatus,
    /// The QP that serves.
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
    /// Additional information whose meaning the status gives.
    pub info: Ari,
    /// All of it.
    pub private_data: PrivateData<136>,
}

/// A refusal, received or (a stale REP) sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The communication, which is over.
    pub comm: CommId,
    /// What was refused.
    pub message: RejectedMessage,
    /// Why.
    pub reason: RejReason,
    /// Additional information.
    pub ari: Ari,
    /// All of it.
    pub private_data: PrivateData<148>,
    /// Whether the QP must wait: a [`CmEvent::TimewaitExit`] follows.
    pub timewait: bool,
}

impl Rejection {
    /// What the additional information says.
    #[must_use]
    pub fn info(&self) -> RejInfo {
        RejInfo::parse(self.reason, &self.ari)
    }
}

/// A peer's offer of an alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathOffer {
    /// The communication; answer with `answer_alternate`.
    pub comm: CommId,
    /// The path, seen from this side.
    pub path: Path,
    /// All of it.
    pub private_data: PrivateData<168>,
}

/// The answer to an offer of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathAnswer {
    /// The communication.
    pub comm: CommId,
    /// The path that was offered.
    pub path: Path,
    /// What became of it.
    pub status: AprStatus,
    /// Additional information whose meaning the status gives.
    pub info: Ari,
    /// All of it.
    pub private_data: PrivateData<148>,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectCause {
    /// Both sides know.
    Agreed,
    /// The peer did not answer our DREQ.
    NoAnswer {
        /// How often it was sent.
        tries: u32,
        /// From the first sending to the verdict.
        elapsed: Duration,
    },
    /// The peer refused it after the fact.
    Rejected(RejReason),
}

/// Something for the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEvent {
    /// A REQ for a listener.
    ConnectRequest(Box<ConnectRequest>),
    /// A REP to our REQ.
    Reply(Box<Reply>),
    /// The passive side is established.
    Established {
        /// The communication.
        comm: CommId,
        /// Of the RTU; empty when data came before it.
        private_data: Box<PrivateData<224>>,
    },
    /// The connection was refused.
    Rejected(Box<Rejection>),
    /// Nobody answered; the communication is over.
    Unreachable {
        /// The communication.
        comm: CommId,
        /// What was not answered: REQ or REP.
        message: MadKind,
        /// How often it was sent.
        tries: u32,
        /// From the first sending to the verdict.
        elapsed: Duration,
    },
    /// The peer disconnects. Answer with `disconnect`; it is answered for you after a while.
    DisconnectRequested {
        /// The communication.
        comm: CommId,
        /// All of it.
        private_data: Box<PrivateData<220>>,
    },
    /// The connection is over; its QP must wait for [`CmEvent::TimewaitExit`].
    Disconnected {
        /// The communication.
        comm: CommId,
        /// How it ended.
        cause: DisconnectCause,
    },
    /// The QP may be used again.
    TimewaitExit {
        /// The communication.
        comm: CommId,
    },
    /// A peer offers an alternate path.
    PathOffered(Box<PathOffer>),
    /// A peer answers our offer. On success both sides load the path.
    PathAnswered(Box<PathAnswer>),
    /// Nobody answered our offer of an alternate path; the connection goes on without.
    PathUnanswered {
        /// The communication.
        comm: CommId,
        /// How often it was sent.
        tries: u32,
        /// From the first sending to the verdict.
        elapsed: Duration,
    },
    /// A peer asks which datagram QP serves.
    ServiceRequest(Box<ServiceRequest>),
    /// The consumer took too long for a [`CmEvent::ServiceRequest`].
    ServiceExpired {
        /// The exchange, which is over.
        sidr: SidrId,
    },
    /// The answer to a question of ours, good or bad.
    ServiceReply(Box<ServiceReply>),
    /// Nobody answered our question.
    ServiceUnreachable {
        /// The exchange, which is over.
        sidr: SidrId,
        /// How often it was sent.
        tries: u32,
        /// From the first sending to the verdict.
        elapsed: Duration,
    },
}

/// A command was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CmError {
    /// The handle names nothing, or something that is over.
    #[error("the handle names no live communication or listener")]
    InvalidHandle,
    /// The communication is in a state that does not allow it.
    #[error("not possible in state {0:?}")]
    WrongState(crate::comm::CommState),
    /// As many as the agent holds.
    #[error("limit reached: at most {limit} {what}")]
    LimitReached {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// Another listener has this service id and address.
    #[error("address in use: another listener has {0}")]
    AddressInUse(ServiceId),
    /// The QP is in use by another communication, or in TIMEWAIT.
    #[error("QP {0} is in use by another communication or in TIMEWAIT")]
    QpBusy(Qpn),
    /// Only the side that sent the REQ offers alternate paths.
    #[error("only the side that asked for the connection offers alternate paths")]
    NotActive,
    /// Another communication already meets this peer for this service.
    #[error("already waiting for this peer with {0}")]
    RendezvousTaken(ServiceId),
    /// Only RC and UC connect.
    #[error("transport {0:?} cannot be connected")]
    Transport(TransportService),
    /// Too much private data.
    #[error(transparent)]
    PrivateData(#[from] PrivateDataTooLong),
}

/// What the agent counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CmCounters {
    sent: [u64; 11],
    received: [u64; 11],
    /// Bytes that are no MAD of this class.
    pub malformed: u64,
    /// Messages that came again.
    pub duplicates: u64,
    /// Messages for no communication that we know.
    pub unmatched: u64,
    /// Messages for a communication of ours that came from another address.
    pub strangers: u64,
    /// Messages sent again after a timeout.
    pub retransmitted: u64,
    /// REQs and SIDR_REQs that found a backlog or table full.
    pub overflows: u64,
    /// Messages that the gate did not let in.
    pub not_admitted: u64,
    /// MADs dropped because too many waited to be sent.
    pub outgoing_dropped: u64,
    /// TIMEWAIT records forgotten early.
    pub timewait_evicted: u64,
}

impl CmCounters {
    /// Messages of this kind sent, repeats included.
    #[must_use]
    pub fn sent(&self, kind: MadKind) -> u64 {
        self.sent.get(kind.index()).copied().unwrap_or(0)
    }

    /// Messages of this kind received, duplicates included.
    #[must_use]
    pub fn received(&self, kind: MadKind) -> u64 {
        self.received.get(kind.index()).copied().unwrap_or(0)
    }

    pub(super) fn count_sent(&mut self, kind: MadKind) {
        if let Some(n) = self.sent.get_mut(kind.index()) {
            *n += 1;
        }
    }

    pub(super) fn count_received(&mut self, kind: MadKind) {
        if let Some(n) = self.received.get_mut(kind.index()) {
            *n += 1;
        }
    }
}
