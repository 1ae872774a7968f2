//! Attributes: of devices, regions, queues and QPs.

use core::ops::BitOr;

use super::state::{Attr, AttrSet, QpState};
use super::wc::ErrorDetail;
use super::{CqHandle, MrHandle, MwHandle, PdHandle, SrqHandle, VerbsError};
use crate::types::{
    AckTimeout, Gid, Lkey, MacAddr, PKey, PathMtu, Psn, QKey, Qpn, RetryCount, Rkey, RnrRetry, RnrTimer,
};

/// Access rights of a region or QP, with the bit values of the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub struct AccessFlags(u32);

impl AccessFlags {
    /// Local read only.
    pub const NONE: Self = Self(0);
    /// Local write: receives, READ and atomic results may land here.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer may WRITE.
    pub const REMOTE_WRITE: Self = Self(2);
    /// The peer may READ.
    pub const REMOTE_READ: Self = Self(4);
    /// The peer may do atomics.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// Memory windows may be bound to the region.
    pub const MW_BIND: Self = Self(1 << 4);
    /// Wire addresses count from the first byte: it has address 0.
    pub const ZERO_BASED: Self = Self(1 << 5);
    /// The peer may FLUSH for global visibility.
    pub const FLUSH_GLOBAL: Self = Self(1 << 8);
    /// The peer may FLUSH to persistence. Only for regions over memory that persists: a mapped file.
    pub const FLUSH_PERSISTENT: Self = Self(1 << 9);
    /// READ, WRITE and atomics of a peer, and local write.
    pub const ALL: Self = Self(15);
    /// Every flag that is known here.
    const KNOWN: u32 = 0x33F;

    /// Whether all rights of `other` are held.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Flags from bits; unknown bits are refused.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::KNOWN == 0 { Some(Self(bits)) } else { None }
    }

    /// The rights that `self` and `other` share.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for AccessFlags {
    type Output = Self;

    fn bitor(self, o: Self) -> Self {
        Self(self.0 | o.0)
    }
}

/// A registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Handle, for deregistration.
    pub handle: MrHandle,
    /// Key for local elements.
    pub lkey: Lkey,
    /// Key for peers.
    pub rkey: Rkey,
    /// Wire address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
}

/// Which rules a memory window follows (IBTA Vol 1 10.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MwType {
    /// Type 1: belongs to a protection domain, any QP of which may be used with it. Bound by
    /// [`super::Verbs::bind_mw`], which also unbinds it (length 0).
    One = 1,
    /// Type 2B: belongs to the QP it was bound on by a work request, until its key is invalidated.
    Two = 2,
}

/// A memory window: a key for peers that can be put on a part of a region, and taken away, on the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryWindow {
    /// Handle, for binding and deallocation.
    pub handle: MwHandle,
    /// Its key as it was allocated: no peer can use it before a bind, which changes the low 8 bits.
    pub rkey: Rkey,
    /// Its type.
    pub mw_type: MwType,
}

/// Transport service of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The general services QP: UD with number 1. One a device.
    Gsi,
}

impl QpType {
    /// The type with this number of `enum ibv_qp_type`.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`]: the extended reliable connection (9 and 10) by name, and every other number.
    pub const fn from_verbs(number: u32) -> Result<Self, VerbsError> {
        match number {
            1 => Ok(Self::Gsi),
            2 => Ok(Self::Rc),
            3 => Ok(Self::Uc),
            4 => Ok(Self::Ud),
            9 | 10 => Err(VerbsError::Unsupported("XRC, the extended reliable connection,")),
            _ => Err(VerbsError::Unsupported("this type of QP")),
        }
    }

    /// Whether it sends datagrams.
    #[must_use]
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Ud | Self::Gsi)
    }
}

/// Sizes of a QP's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCapabilities {
    /// Send work requests outstanding, 1 to 16384.
    pub max_send_wr: u32,
    /// Receive work requests outstanding, 0 to 16384.
    pub max_recv_wr: u32,
    /// Elements a send, 0 to 32.
    pub max_send_sge: u32,
    /// Elements a receive, 0 to 32.
    pub max_recv_sge: u32,
    /// Inline bytes a send, 0 to 512.
    pub max_inline: u32,
}

impl Default for QpCapabilities {
    fn default() -> Self {
        Self { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 1, max_recv_sge: 1, max_inline: 64 }
    }
}

/// What a QP is made of.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Transport.
    pub qp_type: QpType,
    /// Completions of the send queue.
    pub send_cq: CqHandle,
    /// Completions of the receive queue.
    pub recv_cq: CqHandle,
    /// Receive from here instead of an own queue.
    pub srq: Option<SrqHandle>,
    /// Sizes.
    pub caps: QpCapabilities,
    /// Every send makes a completion.
    pub signal_all: bool,
    /// A wanted number, for tests and replays; random otherwise.
    pub qpn: Option<Qpn>,
}

/// What an SRQ is made of.
#[derive(Clone, Copy, Debug)]
pub struct SrqInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Receives outstanding.
    pub max_wr: u32,
    /// Elements a receive, 1 to 32.
    pub max_sge: u32,
}

/// Fill of an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInfo {
    /// Receives it can hold.
    pub max_wr: u32,
    /// Receives that wait.
    pub available: u32,
    /// Armed limit, 0 when not armed.
    pub limit: u32,
}

/// The UDP source port of a path. Switches spread flows by it (ECMP), so it decides which way packets take; peers answer to
/// 4791 whatever it is. A device that can send from certain ports only (a UDP socket) maps what is wished onto those.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub enum SourcePort {
    /// What Linux computes: 0xC000 and 14 bits of the flow label, or of both QPNs where that is 0, so that both directions
    /// of a connection have one port. Datagrams: of the sending QPN, as rxe does.
    #[default]
    Formula,
    /// This one, for requests and answers.
    Fixed(u16),
    /// A random one from 0xC000 to 0xFFFF, drawn when the path or address handle is made and kept for its life. Two
    /// connections between the same pair of hosts then usually take different ways.
    Random,
    /// A random one as long as anything is in flight; another for the first request after all before it were
    /// acknowledged. So no packet overtakes another by it, and a connection that pauses between messages sees many ways.
    /// Answers to the peer's requests keep the first one. RC only: no other QP knows when nothing is in flight.
    Rotating,
}

impl From<u16> for SourcePort {
    fn from(port: u16) -> Self {
        Self::Fixed(port)
    }
}

impl From<Option<u16>> for SourcePort {
    fn from(port: Option<u16>) -> Self {
        port.map_or(Self::Formula, Self::Fixed)
    }
}

/// The path of a connected QP or address handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// Destination.
    pub dgid: Gid,
    /// Our entry in the GID table.
    pub sgid_index: u8,
    /// DSCP and ECN bits of the IP header.
    pub traffic_class: u8,
    /// 20 bits; chooses the UDP source port.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Service level; its low three bits become the VLAN priority.
    pub service_level: u8,
    /// UDP source port.
    pub udp_source_port: SourcePort,
    /// Address handles: position of the datagrams' partition key in the P_Key table; `None` takes that of the sending QP.
    /// The path of a connected QP has none of its own: there [`QpAttr::pkey_index`] says it.
    pub pkey_index: Option<u16>,
}

impl AddressVector {
    /// The plain path to `dgid` from GID table entry `sgid_index`.
    #[must_use]
    pub const fn new(dgid: Gid, sgid_index: u8) -> Self {
        Self {
            dgid,
            sgid_index,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            service_level: 0,
            udp_source_port: SourcePort::Formula,
            pkey_index: None,
        }
    }
}

/// What an address handle is made of.
pub type AhAttr = AddressVector;

/// State of automatic path migration, with the numbers of the verbs (IBTA Vol 1 17.2.8).
///
/// A connection begins in MIGRATED. A program loads an alternate path and asks for REARM on both sides; each side then
/// becomes ARMED by itself with the first packet that shows that its peer is at least in REARM. An armed QP migrates: it
/// takes its alternate path, raises [`super::AsyncEvent::PathMigrated`], and is in MIGRATED again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum PathMigState {
    /// On its path for good: nothing is armed. Packets carry MigReq 1.
    #[default]
    Migrated = 0,
    /// Asks the peer to arm too. Packets carry MigReq 0.
    Rearm = 1,
    /// Ready to migrate. Packets carry MigReq 0. No modify may ask for this state: it is reached from REARM.
    Armed = 2,
}

/// An alternate path (IBTA Vol 1 17.2.8): everything that differs from the primary one. Path MTU and QPN are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AltPath {
    /// Addresses and marks. Its GIDs may be those of the primary path: then another flow label, source port or traffic
    /// class makes it another path.
    pub av: AddressVector,
    /// Position of its partition key in the P_Key table.
    pub pkey_index: u16,
    /// Port it leaves from; there is one, 1.
    pub port: u8,
    /// Local ACK timeout once it is in use.
    pub timeout: AckTimeout,
}

impl AltPath {
    /// The path of `av` in the default partition, with this timeout.
    #[must_use]
    pub const fn new(av: AddressVector, timeout: AckTimeout) -> Self {
        Self { av, pkey_index: 0, port: 1, timeout }
    }
}

/// Attributes of a modify: the target state and any of the fields. The state table says which must and may be there.
///
/// Most callers build it from [`InitAttr`], [`RtrAttr`], [`RtsAttr`] or another arm of [`QpTransition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs)] // Each field is the attribute of its name in IBTA Vol 1 11.2.5.3.
pub struct QpAttr {
    pub state: Option<QpState>,
    pub cur_state: Option<QpState>,
    pub sqd_async_notify: Option<bool>,
    pub access: Option<AccessFlags>,
    pub pkey_index: Option<u16>,
    pub port: Option<u8>,
    pub qkey: Option<QKey>,
    pub av: Option<AddressVector>,
    pub path_mtu: Option<PathMtu>,
    pub timeout: Option<AckTimeout>,
    pub retry_count: Option<RetryCount>,
    pub rnr_retry: Option<RnrRetry>,
    pub rq_psn: Option<Psn>,
    pub max_rd_atomic: Option<u8>,
    pub alt_path: Option<AltPath>,
    pub min_rnr_timer: Option<RnrTimer>,
    pub sq_psn: Option<Psn>,
    pub max_dest_rd_atomic: Option<u8>,
    pub dest_qpn: Option<Qpn>,
    pub path_mig_state: Option<PathMigState>,
}

impl QpAttr {
    /// Only a target state.
    #[must_use]
    pub fn to_state(state: QpState) -> Self {
        Self { state: Some(state), ..Self::default() }
    }

    /// The attributes that are present, the state aside.
    #[must_use]
    pub fn present(&self) -> AttrSet {
        let mut set = AttrSet::EMPTY;
        let mut mark = |there: bool, attr| {
            if there {
                set = set.with(attr);
            }
        };
        mark(self.cur_state.is_some(), Attr::CurState);
        mark(self.sqd_async_notify.is_some(), Attr::SqdAsyncNotify);
        mark(self.access.is_some(), Attr::AccessFlags);
        mark(self.pkey_index.is_some(), Attr::PKeyIndex);
        mark(self.port.is_some(), Attr::Port);
        mark(self.qkey.is_some(), Attr::QKey);
        mark(self.av.is_some(), Attr::Av);
        mark(self.path_mtu.is_some(), Attr::PathMtu);
        mark(self.timeout.is_some(), Attr::Timeout);
        mark(self.retry_count.is_some(), Attr::RetryCount);
        mark(self.rnr_retry.is_some(), Attr::RnrRetry);
        mark(self.rq_psn.is_some(), Attr::RqPsn);
        mark(self.max_rd_atomic.is_some(), Attr::MaxRdAtomic);
        mark(self.alt_path.is_some(), Attr::AltPath);
        mark(self.min_rnr_timer.is_some(), Attr::MinRnrTimer);
        mark(self.sq_psn.is_some(), Attr::SqPsn);
        mark(self.max_dest_rd_atomic.is_some(), Attr::MaxDestRdAtomic);
        mark(self.dest_qpn.is_some(), Attr::DestQpn);
        mark(self.path_mig_state.is_some(), Attr::PathMigState);
        set
    }
}

/// RESET to INIT, connected QPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitAttr {
    /// What the peer may do on this QP.
    pub access: AccessFlags,
    /// Q_Key, datagram QPs only.
    pub qkey: Option<QKey>,
}

impl InitAttr {
    /// A connected QP with these access rights.
    #[must_use]
    pub const fn connected(access: AccessFlags) -> Self {
        Self { access, qkey: None }
    }

    /// A datagram QP with this key.
    #[must_use]
    pub const fn datagram(qkey: QKey) -> Self {
        Self { access: AccessFlags::NONE, qkey: Some(qkey) }
    }
}

/// INIT to RTR of an RC QP. For UC the last two fields are left out by [`RtrAttr::for_uc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtrAttr {
    /// Path to the peer.
    pub av: AddressVector,
    /// Payload bytes a packet; both sides must have the same.
    pub path_mtu: PathMtu,
    /// The peer's QP.
    pub dest_qpn: Qpn,
    /// First PSN expected.
    pub rq_psn: Psn,
    /// READs and atomics the peer may have outstanding here, 0 to 128.
    pub max_dest_rd_atomic: u8,
    /// Least wait that our RNR NAKs ask for.
    pub min_rnr_timer: RnrTimer,
}

impl RtrAttr {
    /// The attributes that a UC QP takes.
    #[must_use]
    pub fn for_uc(self) -> QpAttr {
        QpAttr { max_dest_rd_atomic: None, min_rnr_timer: None, ..self.into() }
    }
}

/// RTR to RTS of an RC QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtsAttr {
    /// First PSN sent.
    pub sq_psn: Psn,
    /// Local ACK timeout.
    pub timeout: AckTimeout,
    /// Transport retries.
    pub retry_count: RetryCount,
    /// RNR retries.
    pub rnr_retry: RnrRetry,
    /// READs and atomics we may have outstanding, 0 to 128.
    pub max_rd_atomic: u8,
}

impl RtsAttr {
    /// What perftest and most applications take: 67 ms, 7 retries, RNR for ever, 16 outstanding READs.
    #[must_use]
    pub const fn usual(sq_psn: Psn) -> Self {
        Self {
            sq_psn,
            timeout: AckTimeout::DEFAULT,
            retry_count: RetryCount::MAX,
            rnr_retry: RnrRetry::FOREVER,
            max_rd_atomic: 16,
        }
    }
}

/// The common transitions, each with exactly what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpTransition {
    /// RESET to INIT.
    Init(InitAttr),
    /// INIT to RTR, RC.
    Rtr(RtrAttr),
    /// INIT to RTR, UC.
    RtrUc(RtrAttr),
    /// INIT to RTR, UD.
    RtrUd,
    /// RTR to RTS, RC.
    Rts(RtsAttr),
    /// RTR to RTS, UC and UD.
    RtsPsn(Psn),
    /// RTS to SQD.
    Sqd {
        /// Raise [`super::AsyncEvent::SendQueueDrained`].
        notify: bool,
    },
    /// SQD or SQE back to RTS.
    Resume,
    /// To ERR.
    Err,
    /// To RESET.
    Reset,
}

impl From<InitAttr> for QpAttr {
    fn from(a: InitAttr) -> Self {
        Self {
            pkey_index: Some(0),
            port: Some(1),
            access: if a.qkey.is_some() { None } else { Some(a.access) },
            qkey: a.qkey,
            ..Self::to_state(QpState::Init)
        }
    }
}

impl From<RtrAttr> for QpAttr {
    fn from(a: RtrAttr) -> Self {
        Self {
            av: Some(a.av),
            path_mtu: Some(a.path_mtu),
            dest_qpn: Some(a.dest_qpn),
            rq_psn: Some(a.rq_psn),
            max_dest_rd_atomic: Some(a.max_dest_rd_atomic),
            min_rnr_timer: Some(a.min_rnr_timer),
            ..Self::to_state(QpState::Rtr)
        }
    }
}

impl From<RtsAttr> for QpAttr {
    fn from(a: RtsAttr) -> Self {
        Self {
            sq_psn: Some(a.sq_psn),
            timeout: Some(a.timeout),
            retry_count: Some(a.retry_count),
            rnr_retry: Some(a.rnr_retry),
            max_rd_atomic: Some(a.max_rd_atomic),
            ..Self::to_state(QpState::Rts)
        }
    }
}

impl From<QpTransition> for QpAttr {
    fn from(t: QpTransition) -> Self {
        match t {
            QpTransition::Init(a) => a.into(),
            QpTransition::Rtr(a) => a.into(),
            QpTransition::RtrUc(a) => a.for_uc(),
            QpTransition::RtrUd => Self::to_state(QpState::Rtr),
            QpTransition::Rts(a) => a.into(),
            QpTransition::RtsPsn(psn) => Self { sq_psn: Some(psn), ..Self::to_state(QpState::Rts) },
            QpTransition::Sqd { notify } => Self { sqd_async_notify: Some(notify), ..Self::to_state(QpState::Sqd) },
            QpTransition::Resume => Self::to_state(QpState::Rts),
            QpTransition::Err => Self::to_state(QpState::Err),
            QpTransition::Reset => Self::to_state(QpState::Reset),
        }
    }
}

/// Progress of a QP's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct QueueSnapshot {
    /// Sends posted and not completed.
    pub sends_outstanding: u32,
    /// Receives posted and not consumed (own queue).
    pub receives_posted: u32,
    /// Next PSN to send.
    pub sq_psn: Psn,
    /// Oldest PSN not acknowledged.
    pub unacked_psn: Psn,
    /// Next PSN expected.
    pub rq_psn: Psn,
    /// Retries used of the current budget.
    pub retries_used: u8,
}

/// What a query of a QP returns.
#[derive(Clone, Copy, Debug)]
pub struct QpInfo {
    /// Number.
    pub qpn: Qpn,
    /// Transport.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Attributes set so far; `state` is the current one.
    pub attr: QpAttr,
    /// Sizes.
    pub caps: QpCapabilities,
    /// Progress.
    pub queues: QueueSnapshot,
    /// Why it failed, if it did.
    pub last_error: Option<ErrorDetail>,
}

/// How a GID reaches the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// RoCE v2: IP and UDP.
    RoceV2,
    /// RoCE v1, a frame of its own below IP: hardware lists such entries beside the others. uroce does not speak it.
    RoceV1,
}

/// An entry of the GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// Its type.
    pub gid_type: GidType,
}

impl GidEntry {
    /// Whether RoCE v2 can use it. Hardware's tables also have empty entries, and entries of other types.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.gid_type == GidType::RoceV2 && !self.gid.is_unspecified()
    }
}

/// Limits and identity of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Name, e.g. `uroce0`.
    pub name: String,
    /// Unique for the life of the endpoint.
    pub node_guid: u64,
    /// QPs.
    pub max_qp: u32,
    /// Work requests a queue.
    pub max_qp_wr: u32,
    /// Elements a work request.
    pub max_sge: u32,
    /// CQs.
    pub max_cq: u32,
    /// Entries a CQ.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// SRQs.
    pub max_srq: u32,
    /// Address handles.
    pub max_ah: u32,
    /// READs and atomics outstanding a QP, each way.
    pub max_rd_atomic: u8,
    /// Bytes a message.
    pub max_msg_size: u32,
    /// Inline bytes a send.
    pub max_inline: u32,
    /// Partition table.
    pub pkeys: Vec<PKey>,
    /// Local CA ACK delay code.
    pub ack_delay: AckTimeout,
}

/// The port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// Whether it is up.
    pub active: bool,
    /// Largest path MTU of the device.
    pub max_mtu: PathMtu,
    /// Largest path MTU that the interface carries now.
    pub active_mtu: PathMtu,
    /// Link layer address, where there is one.
    pub mac: Option<MacAddr>,
    /// Packets dropped for their partition key (`bad_pkey_cntr`).
    pub bad_pkey_cntr: u32,
    /// Datagrams dropped for their queue key (`qkey_viol_cntr`).
    pub qkey_viol_cntr: u32,
}
