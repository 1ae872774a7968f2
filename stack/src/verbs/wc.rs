//! Work completions.

use super::QpHandle;
use super::explain::RequestFacts;
use crate::time::Duration;
use crate::types::{Imm, Psn, Qpn, Rkey};

/// Status of a completion, with the numbers of the verbs (IBTA Vol 1 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcStatus {
    /// It worked.
    Success = 0,
    /// A message longer than its receive.
    LocalLength = 1,
    /// An inconsistency inside the QP.
    LocalQpOperation = 2,
    /// A local element with a bad key, range or access.
    LocalProtection = 4,
    /// Flushed: the QP went to ERR before it was done.
    WorkRequestFlushed = 5,
    /// A memory window could not be bound.
    MwBind = 6,
    /// A response with a wrong opcode or length.
    BadResponse = 7,
    /// A local access violation during an incoming operation.
    LocalAccess = 8,
    /// The peer called the request invalid.
    RemoteInvalidRequest = 9,
    /// The peer refused the access.
    RemoteAccess = 10,
    /// The peer could not complete the operation.
    RemoteOperation = 11,
    /// No answer after all retries.
    RetryExceeded = 12,
    /// The peer had no receive after all RNR retries.
    RnrRetryExceeded = 13,
    /// Anything else.
    General = 21,
}

impl WcStatus {
    /// The text that `ibv_wc_status_str` users know, in our words.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local QP operation error",
            Self::LocalProtection => "local protection error",
            Self::WorkRequestFlushed => "work request flushed",
            Self::MwBind => "memory window bind error",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry counter exceeded",
            Self::RnrRetryExceeded => "RNR retry counter exceeded",
            Self::General => "general error",
        }
    }
}

/// What completed, with the numbers of the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcOpcode {
    /// SEND of any kind.
    Send = 0,
    /// RDMA WRITE of any kind.
    RdmaWrite = 1,
    /// RDMA READ.
    RdmaRead = 2,
    /// Compare and swap.
    CompareSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// Bind of a memory window.
    BindMw = 5,
    /// Local invalidation.
    LocalInvalidate = 6,
    /// FLUSH.
    Flush = 8,
    /// ATOMIC WRITE.
    AtomicWrite = 9,
    /// Fast registration; the number is that of the Linux kernel, as user space has none.
    FastRegister = 10,
    /// A received SEND.
    Recv = 128,
    /// A received WRITE with immediate.
    RecvRdmaWithImm = 129,
}

/// What a received message carried beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WcData {
    /// Nothing.
    #[default]
    None,
    /// Immediate data.
    Imm(Imm),
    /// It invalidated this key of ours.
    Invalidated(Rkey),
}

/// A completion. On an error only `wr_id`, `status`, `qp`, `qp_num` and `vendor_err` are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// From the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// [`FailureKind`] as a number, 0 on success. Of hardware the driver's own number with bit 31 set.
    pub vendor_err: u32,
    /// Bytes received, or read; for UD with the 40 bytes of the GRH area.
    pub byte_len: u32,
    /// Immediate or invalidated key.
    pub data: WcData,
    /// The QP it belongs to.
    pub qp: QpHandle,
    /// Its number.
    pub qp_num: Qpn,
    /// UD: the sender's QPN.
    pub src_qp: Qpn,
    /// UD: the first 40 bytes of the receive hold the sender's IP header.
    pub grh: bool,
    /// A solicited event was asked for.
    pub solicited: bool,
}

impl WorkCompletion {
    /// Room for a completion of `qp`, for a poll to overwrite. It says [`WcStatus::General`], so that one that is read
    /// without having been written is no success.
    #[must_use]
    pub const fn blank(qp: QpHandle) -> Self {
        Self {
            wr_id: 0,
            status: WcStatus::General,
            opcode: WcOpcode::Send,
            vendor_err: 0,
            byte_len: 0,
            data: WcData::None,
            qp,
            qp_num: Qpn::GSI,
            src_qp: Qpn::GSI,
            grh: false,
            solicited: false,
        }
    }
}

/// Why a work request failed, finer than its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FailureKind {
    /// No answer at all to the request, after all tries.
    NoAnswer = 1,
    /// NAK sequence errors or implied NAKs used up the retries.
    LostTooOften = 2,
    /// The peer kept saying "receiver not ready".
    ReceiverNotReady = 3,
    /// The peer sent a NAK: invalid request.
    NakInvalidRequest = 4,
    /// The peer sent a NAK: remote access error.
    NakRemoteAccess = 5,
    /// The peer sent a NAK: remote operational error.
    NakRemoteOperation = 6,
    /// A response that does not fit the request.
    BadResponse = 7,
    /// A local element is not usable: key, range, access or protection domain.
    LocalElement = 8,
    /// A request of the peer was refused, and took the QP down.
    RefusedPeer = 9,
    /// A CQ of the QP overran.
    CqOverrun = 10,
    /// The program moved the QP to ERR, or another work request failed first.
    Flushed = 11,
    /// The message does not fit the receive that was posted.
    ReceiveTooSmall = 12,
    /// A key that the peer asked to invalidate could not be.
    InvalidateFailed = 13,
    /// The message is longer than the path allows, or the path has no address.
    Unsendable = 14,
    /// A memory window could not be bound as asked: key, region, rights, range or state.
    BindRefused = 15,
    /// A key that this side asked to invalidate is not one that can be.
    LocalInvalidateRefused = 16,
    /// A fast registration is not free, or its key, range or rights are wrong.
    FastRegisterRefused = 17,
    /// The peer kept saying "receiver not ready" for longer than [`super::QpOptions::max_rnr_wait`].
    ReceiverNotReadyTooLong = 18,
}

/// The first failure of a QP, kept for people who ask why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorDetail {
    /// Kind.
    pub kind: FailureKind,
    /// Status that the work request got.
    pub status: WcStatus,
    /// PSN of the request concerned.
    pub psn: Psn,
    /// How often it was sent.
    pub tries: u32,
    /// From the first try to the verdict.
    pub elapsed: Duration,
    /// What the request wanted, where that is known.
    pub request: Option<RequestFacts>,
}

impl core::fmt::Display for ErrorDetail {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { kind, status, psn, tries, elapsed, request: _ } = self;
        let ms = elapsed.as_micros();
        let (whole, part) = (ms / 1000, ms % 1000);
        match kind {
            FailureKind::NoAnswer => write!(f, "no answer for PSN {psn} after {tries} tries in {whole}.{part:03} ms")?,
            FailureKind::LostTooOften => write!(f, "PSN {psn} was lost {tries} times in {whole}.{part:03} ms")?,
            FailureKind::ReceiverNotReady => {
                write!(f, "the peer had no receive for PSN {psn} after {tries} tries in {whole}.{part:03} ms")?;
            }
            FailureKind::ReceiverNotReadyTooLong => {
                write!(f, "the peer had no receive for PSN {psn} for {whole}.{part:03} ms, longer than allowed")?;
            }
            FailureKind::NakInvalidRequest => write!(f, "the peer calls PSN {psn} an invalid request")?,
            FailureKind::NakRemoteAccess => write!(f, "the peer refuses the access of PSN {psn}")?,
            FailureKind::NakRemoteOperation => write!(f, "the peer failed to execute PSN {psn}")?,
            FailureKind::BadResponse => write!(f, "the response at PSN {psn} does not fit its request")?,
            FailureKind::LocalElement => write!(f, "a local element at PSN {psn} has a bad key, range or access")?,
            FailureKind::RefusedPeer => write!(f, "the peer's request at PSN {psn} was refused")?,
            FailureKind::CqOverrun => write!(f, "a completion queue overran")?,
            FailureKind::Flushed => write!(f, "the QP was moved to ERR")?,
            FailureKind::ReceiveTooSmall => write!(f, "the message at PSN {psn} does not fit its receive")?,
            FailureKind::InvalidateFailed => write!(f, "the key named at PSN {psn} cannot be invalidated")?,
            FailureKind::Unsendable => write!(f, "the message cannot be sent on this path")?,
            FailureKind::BindRefused => write!(f, "a memory window cannot be bound as asked")?,
            FailureKind::LocalInvalidateRefused => write!(f, "a key that was to be invalidated here cannot be")?,
            FailureKind::FastRegisterRefused => write!(f, "a fast registration was refused")?,
        }
        write!(f, " ({})", status.describe())
    }
}
