//! What programs say to the front, and hear from it.

use core::net::{IpAddr, SocketAddr};

use uroce::table::Handle;
use uroce::time::Duration;
use uroce::types::{AckTimeout, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, InitAttr, QpAttr, QpHandle, QpState, QpTransition, RtrAttr, RtsAttr, Verbs, VerbsError,
};

use crate::agent::CmError;
use crate::gsi::GsiError;
use crate::wire::{RejInfo, RejReason, SidrStatus, TransportService};

/// Tag types of the front's handles.
pub mod kind {
    /// Ids.
    pub enum Id {}
}

/// Names an id: a listener, or one side of a connection.
pub type IdHandle = Handle<kind::Id>;

/// Kinds of events, with the numbers of librdmacm; ours begin at 0x100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EventKind {
    /// `resolve_addr` found a source address.
    AddrResolved = 0,
    /// It found none.
    AddrError = 1,
    /// `resolve_route` is done.
    RouteResolved = 2,
    /// The route cannot be.
    RouteError = 3,
    /// A peer wants a connection.
    ConnectRequest = 4,
    /// The peer accepted; the program moves its QP and calls `establish`.
    ConnectResponse = 5,
    /// The connection failed on our side.
    ConnectError = 6,
    /// The peer does not answer.
    Unreachable = 7,
    /// The peer refused; the status is the reason of the REJ.
    Rejected = 8,
    /// The connection can be used.
    Established = 9,
    /// The connection is over.
    Disconnected = 10,
    /// The device is gone.
    DeviceRemoval = 11,
    /// A multicast group was joined.
    MulticastJoin = 12,
    /// It could not be joined.
    MulticastError = 13,
    /// An address moved.
    AddrChange = 14,
    /// The QP may be used again.
    TimewaitExit = 15,
    /// Not of rdma_cm: an alternate path was agreed on and loaded.
    AlternateLoaded = 0x100,
    /// Not of rdma_cm: it was not; the status is that of the APR or a negative error number.
    AlternateError = 0x101,
    /// Not of rdma_cm: the QP runs on its alternate path now.
    PathMigrated = 0x102,
}

impl EventKind {
    /// The number of librdmacm.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The name of librdmacm.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddrResolved => "RDMA_CM_EVENT_ADDR_RESOLVED",
            Self::AddrError => "RDMA_CM_EVENT_ADDR_ERROR",
            Self::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
            Self::RouteError => "RDMA_CM_EVENT_ROUTE_ERROR",
            Self::ConnectRequest => "RDMA_CM_EVENT_CONNECT_REQUEST",
            Self::ConnectResponse => "RDMA_CM_EVENT_CONNECT_RESPONSE",
            Self::ConnectError => "RDMA_CM_EVENT_CONNECT_ERROR",
            Self::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            Self::Rejected => "RDMA_CM_EVENT_REJECTED",
            Self::Established => "RDMA_CM_EVENT_ESTABLISHED",
            Self::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
            Self::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
            Self::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_JOIN",
            Self::MulticastError => "RDMA_CM_EVENT_MULTICAST_ERROR",
            Self::AddrChange => "RDMA_CM_EVENT_ADDR_CHANGE",
            Self::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
            Self::AlternateLoaded => "UROCE_CM_EVENT_ALTERNATE_LOADED",
            Self::AlternateError => "UROCE_CM_EVENT_ALTERNATE_ERROR",
            Self::PathMigrated => "UROCE_CM_EVENT_PATH_MIGRATED",
        }
    }
}

/// Status of [`EventKind::AddrError`]: -ENODEV.
pub const STATUS_NO_DEVICE: i32 = -19;
/// Status of [`EventKind::Unreachable`]: -ETIMEDOUT.
pub const STATUS_TIMED_OUT: i32 = -110;
/// Status of [`EventKind::ConnectError`]: -EINVAL.
pub const STATUS_INVALID: i32 = -22;

/// What the peer said in a REQ, REP or other message.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PeerParam {
    /// All private data of the message, zero padded (how much the peer meant is not on the wire).
    pub private_data: Vec<u8>,
    /// The most that we may serve.
    pub responder_resources: u8,
    /// The most that we may have outstanding.
    pub initiator_depth: u8,
    /// End-to-end credits.
    pub flow_control: bool,
    /// Transport retries asked of us.
    pub retry_count: u8,
    /// RNR retries asked of us; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Whether the peer's QP has an SRQ.
    pub srq: bool,
    /// The peer's QP.
    pub qp_num: Qpn,
}

/// Where datagrams go: all that a send needs, once an address handle is made of `av`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdPeer {
    /// The peer's QP, or [`Qpn::MULTICAST`].
    pub qpn: Qpn,
    /// Its key.
    pub qkey: QKey,
    /// The way there.
    pub av: AddressVector,
}

/// How hard a peer was tried that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Sendings of the message.
    pub tries: u32,
    /// From the first to the verdict.
    pub elapsed: Duration,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdEvent {
    /// Whom it concerns; of [`EventKind::ConnectRequest`] a new id.
    pub id: IdHandle,
    /// The listener of a [`EventKind::ConnectRequest`].
    pub listen_id: Option<IdHandle>,
    /// What happened.
    pub kind: EventKind,
    /// 0, a negative error number, the reason of a REJ, or (of [`EventKind::Unreachable`]) the status of a SIDR_REP.
    pub status: i32,
    /// What the peer said.
    pub param: PeerParam,
    /// Of [`EventKind::Unreachable`], and of [`EventKind::Disconnected`] when the peer did not answer.
    pub attempt: Option<Attempt>,
    /// Of [`EventKind::Established`] when a datagram service was resolved, and of [`EventKind::MulticastJoin`].
    pub ud: Option<UdPeer>,
    /// Of [`EventKind::Rejected`]: what the peer would have taken, or where to ask in its place.
    pub info: RejInfo,
}

impl IdEvent {
    /// An event of status 0 with nothing to say.
    pub(crate) fn new(id: IdHandle, kind: EventKind) -> Self {
        Self {
            id,
            listen_id: None,
            kind,
            status: 0,
            param: PeerParam::default(),
            attempt: None,
            ud: None,
            info: RejInfo::None,
        }
    }

    /// What the SIDR_REP said of an [`EventKind::Unreachable`] datagram service; `None` when nobody answered.
    #[must_use]
    pub fn sidr_status(&self) -> Option<SidrStatus> {
        let code = u8::try_from(self.status).ok().filter(|code| *code != 0)?;
        (self.kind == EventKind::Unreachable).then(|| SidrStatus::from_code(code))
    }

    /// The reason of a [`EventKind::Rejected`].
    #[must_use]
    pub fn reason(&self) -> Option<RejReason> {
        let code = u16::try_from(self.status).ok()?;
        (self.kind == EventKind::Rejected).then(|| RejReason::from_code(code))
    }
}

/// What a connection is made with. The defaults are 16 READs and atomics each way, 7 retries and RNR retries for ever.
#[derive(Clone, Debug)]
pub struct ConnParam<'a> {
    /// The QP, when none is attached to the id.
    pub qpn: Option<Qpn>,
    /// Transport of `qpn`; ignored with an attached QP, and by datagram services.
    pub transport: TransportService,
    /// READs and atomics that we serve.
    pub responder_resources: u8,
    /// READs and atomics that we want to have outstanding.
    pub initiator_depth: u8,
    /// Transport retries.
    pub retry_count: RetryCount,
    /// RNR retries.
    pub rnr_retry_count: RnrRetry,
    /// End-to-end credits.
    pub flow_control: bool,
    /// Whether the QP has an SRQ.
    pub srq: bool,
    /// Of a datagram service: Q_Key of `qpn`, [`QKey::RDMA_UDP`] when absent. In port space IB without an attached QP it
    /// says that the service is one of datagrams.
    pub qkey: Option<QKey>,
    /// At most 56 bytes with `connect` and 196 with `accept`; of a datagram service 180 and 136.
    pub private_data: &'a [u8],
    /// First PSN that we expect; random when absent.
    pub starting_psn: Option<Psn>,
}

impl Default for ConnParam<'_> {
    fn default() -> Self {
        Self {
            qpn: None,
            transport: TransportService::Rc,
            responder_resources: 16,
            initiator_depth: 16,
            retry_count: RetryCount::MAX,
            rnr_retry_count: RnrRetry::FOREVER,
            flow_control: true,
            srq: false,
            qkey: None,
            private_data: &[],
            starting_psn: None,
        }
    }
}

/// Options of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdOptions {
    /// DSCP and ECN of the connection (RDMA_OPTION_ID_TOS).
    pub tos: u8,
    /// Local ACK timeout of both QPs (RDMA_OPTION_ID_ACK_TIMEOUT).
    pub ack_timeout: AckTimeout,
    /// Least wait that our RNR NAKs ask for. librdmacm programs 0, which is the longest: 655 ms.
    pub min_rnr_timer: RnrTimer,
    /// Greatest path MTU; the port's active one when absent.
    pub path_mtu: Option<PathMtu>,
    /// Whether a peer's offer of an alternate path is taken, if its address is ours and the QP can load it.
    pub accept_alternate: bool,
}

impl Default for IdOptions {
    fn default() -> Self {
        Self {
            tos: 0,
            ack_timeout: AckTimeout::DEFAULT,
            min_rnr_timer: RnrTimer::DEFAULT,
            path_mtu: None,
            accept_alternate: true,
        }
    }
}

/// All that a program's QP needs to be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyQp {
    /// `Rc` or `Uc`.
    pub transport: TransportService,
    /// What the peer may do: write, and read and atomics when we serve any.
    pub access: AccessFlags,
    /// From INIT to RTR.
    pub rtr: RtrAttr,
    /// From RTR to RTS.
    pub rts: RtsAttr,
}

impl ReadyQp {
    /// From RESET to INIT.
    #[must_use]
    pub fn init_attr(&self) -> QpAttr {
        InitAttr::connected(self.access).into()
    }

    /// From INIT to RTR.
    #[must_use]
    pub fn rtr_attr(&self) -> QpAttr {
        let attr = if self.transport == TransportService::Uc { self.rtr.for_uc() } else { self.rtr.into() };
        QpAttr { access: Some(self.access), ..attr }
    }

    /// From RTR to RTS.
    #[must_use]
    pub fn rts_attr(&self) -> QpAttr {
        if self.transport == TransportService::Uc {
            QpTransition::RtsPsn(self.rts.sq_psn).into()
        } else {
            self.rts.into()
        }
    }

    /// Moves a QP in RESET or INIT to RTS.
    ///
    /// # Errors
    /// [`VerbsError`]: the QP is in another state, or an attribute is beyond the device.
    pub fn apply(&self, verbs: &mut dyn Verbs, qp: QpHandle) -> Result<(), VerbsError> {
        if verbs.query_qp(qp)?.state == QpState::Reset {
            verbs.modify_qp(qp, self.init_attr())?;
        }
        verbs.modify_qp(qp, self.rtr_attr())?;
        verbs.modify_qp(qp, self.rts_attr())
    }
}

/// A call was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The handle names nothing, or something that was destroyed.
    #[error("the handle names no live id")]
    InvalidHandle,
    /// The call does not fit what was done with the id before.
    #[error("{0} is not possible with this id now")]
    WrongState(&'static str),
    /// As many ids as the front holds.
    #[error("limit reached: at most {0} ids")]
    LimitReached(usize),
    /// The address is not one of the device's.
    #[error("{0} is not an address of this device")]
    AddressNotAvailable(IpAddr),
    /// Not a multicast group, or not one of this id; ids of port space TCP join none.
    #[error("{0} is no multicast group of this id")]
    NotMulticast(IpAddr),
    /// Another id listens there.
    #[error("address in use: {0}")]
    AddressInUse(SocketAddr),
    /// No QP is attached and none was named, or both.
    #[error("a QP must be attached, or its number given, and not both")]
    NoQp,
    /// Too much private data.
    #[error("{given} bytes of private data, at most {max}")]
    PrivateData {
        /// Given.
        given: usize,
        /// Room beside the IP header.
        max: usize,
    },
    /// The agent refused.
    #[error(transparent)]
    Cm(#[from] CmError),
    /// A verb on the attached QP was refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// QP1 is gone.
    #[error(transparent)]
    Gsi(#[from] GsiError),
}
