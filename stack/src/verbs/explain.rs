//! Why a work request failed, in words that a person can act on.
//!
//! Owns the sentences. Never decides anything: it reads a completion and what its QP remembers.

use core::fmt;

use super::attr::QpInfo;
use super::wc::{ErrorDetail, FailureKind, WcOpcode, WcStatus, WorkCompletion};
use super::wr::{Operation, Remote};
use crate::time::Duration;

/// What a request wanted: a send work request of ours, or a request of the peer that was refused here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    /// The operation.
    pub opcode: WcOpcode,
    /// The memory at the other side of the request's sender, where the operation names any.
    pub remote: Option<Remote>,
    /// Bytes of the message.
    pub length: u32,
}

impl RequestFacts {
    /// Of a send work request.
    #[must_use]
    pub const fn of(opcode: WcOpcode, operation: &Operation, length: u32) -> Self {
        let remote = match operation {
            Operation::Write(at) | Operation::WriteImm(at, _) | Operation::Read(at) | Operation::AtomicWrite(at) => {
                Some(*at)
            }
            Operation::CompareSwap { remote, .. }
            | Operation::FetchAdd { remote, .. }
            | Operation::Flush { remote, .. } => Some(*remote),
            _ => None,
        };
        Self { opcode, remote, length }
    }

    /// The right that the memory's owner must have given.
    const fn right(self) -> &'static str {
        match self.opcode {
            WcOpcode::RdmaRead => "remote read",
            WcOpcode::CompareSwap | WcOpcode::FetchAdd => "remote atomic access",
            WcOpcode::Flush => "remote flush",
            _ => "remote write",
        }
    }
}

impl fmt::Display for RequestFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", name(self.opcode), self.length)?;
        match self.remote {
            Some(Remote { addr, rkey }) => write!(f, " at {addr:#x} with rkey {rkey}"),
            None => Ok(()),
        }
    }
}

const fn name(opcode: WcOpcode) -> &'static str {
    match opcode {
        WcOpcode::Send => "a SEND",
        WcOpcode::RdmaWrite | WcOpcode::RecvRdmaWithImm => "a WRITE",
        WcOpcode::RdmaRead => "a READ",
        WcOpcode::CompareSwap => "a compare and swap",
        WcOpcode::FetchAdd => "a fetch and add",
        WcOpcode::BindMw => "a bind",
        WcOpcode::LocalInvalidate => "a local invalidation",
        WcOpcode::Flush => "a FLUSH",
        WcOpcode::AtomicWrite => "an ATOMIC WRITE",
        WcOpcode::FastRegister => "a fast registration",
        WcOpcode::Recv => "a receive",
    }
}

impl FailureKind {
    /// All kinds, by number.
    pub const ALL: [Self; 18] = [
        Self::NoAnswer,
        Self::LostTooOften,
        Self::ReceiverNotReady,
        Self::NakInvalidRequest,
        Self::NakRemoteAccess,
        Self::NakRemoteOperation,
        Self::BadResponse,
        Self::LocalElement,
        Self::RefusedPeer,
        Self::CqOverrun,
        Self::Flushed,
        Self::ReceiveTooSmall,
        Self::InvalidateFailed,
        Self::Unsendable,
        Self::BindRefused,
        Self::LocalInvalidateRefused,
        Self::FastRegisterRefused,
        Self::ReceiverNotReadyTooLong,
    ];

    /// The kind that a completion's `vendor_err` names; other devices have numbers of their own.
    #[must_use]
    pub fn from_vendor_err(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// The kind that a status stands for when nothing finer is known; `None` for those that may be several.
    const fn from_status(status: WcStatus) -> Option<Self> {
        match status {
            WcStatus::LocalLength => Some(Self::ReceiveTooSmall),
            WcStatus::LocalProtection => Some(Self::LocalElement),
            WcStatus::WorkRequestFlushed => Some(Self::Flushed),
            WcStatus::MwBind => Some(Self::BindRefused),
            WcStatus::BadResponse => Some(Self::BadResponse),
            WcStatus::LocalAccess => Some(Self::RefusedPeer),
            WcStatus::RemoteInvalidRequest => Some(Self::NakInvalidRequest),
            WcStatus::RemoteAccess => Some(Self::NakRemoteAccess),
            WcStatus::RemoteOperation => Some(Self::NakRemoteOperation),
            WcStatus::RetryExceeded => Some(Self::NoAnswer),
            WcStatus::RnrRetryExceeded => Some(Self::ReceiverNotReady),
            WcStatus::Success | WcStatus::LocalQpOperation | WcStatus::General => None,
        }
    }
}

impl WorkCompletion {
    /// Why it failed and what to do about it; of a success that it is one. `qp` is what [`super::Verbs::query_qp`] says of
    /// its QP: without it PSN, tries and times are missing.
    #[must_use]
    pub fn explain<'a>(&self, qp: Option<&'a QpInfo>) -> Explanation<'a> {
        let kind = FailureKind::from_vendor_err(self.vendor_err).or(FailureKind::from_status(self.status));
        Explanation { status: self.status, kind, qp, detail: qp.and_then(|info| info.last_error) }
    }
}

/// A failure, to be shown: what happened, and after a colon what to do.
#[derive(Clone, Copy, Debug)]
pub struct Explanation<'a> {
    status: WcStatus,
    kind: Option<FailureKind>,
    qp: Option<&'a QpInfo>,
    /// The first failure of the QP, which need not be this completion's.
    detail: Option<ErrorDetail>,
}

impl Explanation<'_> {
    /// What happened.
    #[must_use]
    pub const fn reason(&self) -> Reason<'_> {
        Reason(self)
    }

    /// What to do.
    #[must_use]
    pub const fn advice(&self) -> Advice<'_> {
        Advice(self)
    }

    /// What is known of this failure beyond its kind.
    fn own_detail(&self) -> Option<ErrorDetail> {
        self.detail.filter(|d| Some(d.kind) == self.kind)
    }

    fn request(&self) -> Option<RequestFacts> {
        self.own_detail().and_then(|d| d.request)
    }
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason(), self.advice())
    }
}

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Reason<'a>(&'a Explanation<'a>);

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = self.0;
        if e.status == WcStatus::Success {
            return f.write_str("it succeeded");
        }
        match (e.kind, e.detail) {
            (Some(FailureKind::Flushed), Some(first)) if first.kind != FailureKind::Flushed => {
                write!(f, "flushed, because the QP had failed before: {first}")?;
            }
            (Some(FailureKind::Flushed), _) => {
                f.write_str("flushed, because the program or its peer ended the QP")?;
            }
            (Some(_), Some(detail)) if e.own_detail().is_some() => write!(f, "{detail}")?,
            (Some(kind), _) => write!(f, "{} ({})", short(kind), e.status.describe())?,
            (None, _) => f.write_str(e.status.describe())?,
        }
        if let Some(request) = e.request() {
            write!(f, ", {request}")?;
        }
        match e.kind {
            Some(FailureKind::NoAnswer) => timers(e, f),
            Some(FailureKind::ReceiverNotReady) => rnr_timers(e, f),
            _ => Ok(()),
        }
    }
}

/// A kind in a few words, for a failure of which nothing more is known.
const fn short(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::NoAnswer => "the peer does not answer",
        FailureKind::LostTooOften => "packets were lost too often",
        FailureKind::ReceiverNotReady => "the peer has no receive",
        FailureKind::ReceiverNotReadyTooLong => "the peer has had no receive for longer than allowed",
        FailureKind::NakInvalidRequest => "the peer calls the request invalid",
        FailureKind::NakRemoteAccess => "the peer refuses the access",
        FailureKind::NakRemoteOperation => "the peer failed to execute the request",
        FailureKind::BadResponse => "the response does not fit its request",
        FailureKind::LocalElement => "a local element has a bad key, range or access",
        FailureKind::RefusedPeer => "a request of the peer was refused here",
        FailureKind::CqOverrun => "a completion queue overran",
        FailureKind::Flushed => "flushed",
        FailureKind::ReceiveTooSmall => "the message does not fit its receive",
        FailureKind::InvalidateFailed => "the key that the peer named cannot be invalidated",
        FailureKind::Unsendable => "the message cannot be sent on this path",
        FailureKind::BindRefused => "a memory window cannot be bound as asked",
        FailureKind::LocalInvalidateRefused => "the key cannot be invalidated",
        FailureKind::FastRegisterRefused => "the fast registration was refused",
    }
}

/// The local ACK timeout and the retries that ran out.
fn timers(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Some(attr) = e.qp.map(|qp| &qp.attr) else { return Ok(()) };
    if let (Some(timeout), Some(retries)) = (attr.timeout, attr.retry_count) {
        write!(f, ", with retry_cnt {}", retries.get())?;
        if let Some(time) = timeout.duration() {
            write!(f, " and an ACK timeout of {}", Millis(time))?;
        }
    }
    Ok(())
}

fn rnr_timers(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match e.qp.and_then(|qp| qp.attr.rnr_retry) {
        Some(retries) => write!(f, ", with rnr_retry {}", retries.code()),
        None => Ok(()),
    }
}

/// A time in milliseconds with as many digits as it needs.
struct Millis(Duration);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        write!(f, "{}.{:03} ms", us / 1000, us % 1000)
    }
}

/// What to do.
#[derive(Clone, Copy, Debug)]
pub struct Advice<'a>(&'a Explanation<'a>);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = self.0;
        match (e.status, e.kind) {
            (WcStatus::Success, _) => f.write_str("nothing to do"),
            (_, Some(FailureKind::NoAnswer)) => no_answer(e, f),
            (_, Some(FailureKind::NakRemoteAccess)) => remote_access(e, f),
            (_, Some(FailureKind::RefusedPeer)) => refused_peer(e, f),
            (_, Some(FailureKind::Flushed)) => flushed(e, f),
            (_, Some(kind)) => f.write_str(advice(kind)),
            (WcStatus::LocalQpOperation, None) => f.write_str(
                "check the work request: its opcode, flags, inline size and elements must be ones that the QP was made for",
            ),
            (_, None) => f.write_str("look into the device's log, then destroy the QP and connect again"),
        }
    }
}

const fn advice(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::LostTooOften => {
            "look for what drops packets on the way (switch counters, receive rings, a policer), and raise retry_cnt if some \
             loss is normal there"
        }
        FailureKind::ReceiverNotReady => {
            "post receives at the peer before sending and more of them, raise its min_rnr_timer, or set rnr_retry to 7, \
             which waits for ever"
        }
        FailureKind::ReceiverNotReadyTooLong => {
            "post receives at the peer before sending and more of them, or raise max_rnr_wait of our QP's options"
        }
        FailureKind::NakInvalidRequest => {
            "check that the message fits the peer's receive, that the peer's QP allows the operation, that its \
             max_dest_rd_atomic is at least our max_rd_atomic, and that both sides have the same path MTU"
        }
        FailureKind::NakRemoteOperation => {
            "look at the peer: its own receive has a bad key or range (its completion says so), or its device failed"
        }
        FailureKind::BadResponse => {
            "make sure that both ends belong to the same connection (one was restarted or reused a QP number), then connect \
             again; `--pcap` shows the response"
        }
        FailureKind::LocalElement => {
            "check the element's lkey (registered, in the QP's protection domain), that address and length lie inside that \
             region, and that it allows local write where receives, READs and atomics land"
        }
        FailureKind::CqOverrun => {
            "make the completion queue as deep as all work requests that can complete there, or poll it more often; its QPs \
             must be connected again"
        }
        FailureKind::ReceiveTooSmall => "post receives as long as the longest message, or send shorter ones",
        FailureKind::InvalidateFailed => {
            "the peer must name a key of a bound type 2 window or of a fast registration that belongs to this QP, and only \
             once"
        }
        FailureKind::Unsendable => {
            "take a shorter message or a larger path MTU, and check that the address handle or path names an address of \
             this device's family"
        }
        FailureKind::BindRefused => {
            "check that the region allows binding and is in the QP's protection domain, that the range lies inside it, that \
             the rights asked for are among its rights, and that a type 2 window is free"
        }
        FailureKind::LocalInvalidateRefused => {
            "invalidate only a bound type 2 window or a fast registration that is valid, once, on a QP of its protection \
             domain"
        }
        FailureKind::FastRegisterRefused => {
            "invalidate the fast registration before it is used again, and check its key, page list, length and rights"
        }
        // These say more: see above.
        FailureKind::NoAnswer | FailureKind::NakRemoteAccess | FailureKind::RefusedPeer | FailureKind::Flushed => "",
    }
}

fn no_answer(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("check that the peer still runs")?;
    let attr = e.qp.map(|qp| &qp.attr);
    if let Some(qpn) = attr.and_then(|a| a.dest_qpn) {
        write!(f, " and has QP {qpn} in RTR or RTS")?;
    }
    if let Some(av) = attr.and_then(|a| a.av) {
        write!(f, " at {}, and ask the path with `uroce doctor {}`", av.dgid, av.dgid.ip())?;
    }
    if let (Some(mtu), Some(request)) = (attr.and_then(|a| a.path_mtu), e.request())
        && mtu.bytes() > 256
        && usize::try_from(request.length).is_ok_and(|len| len > 256)
    {
        write!(f, "; if short messages arrive, a path MTU of {} does not fit the path", mtu.bytes())?;
    }
    f.write_str("; raise the ACK timeout or retry_cnt if the path is only slow")
}

fn remote_access(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match e.request() {
        Some(RequestFacts { remote: Some(Remote { addr, rkey }), length, .. }) => write!(
            f,
            "check at the peer that rkey {rkey} is registered, and in its QP's protection domain, that {addr:#x} to \
             {:#x} lie inside that region, and that both the region and the QP allow {}",
            addr.saturating_add(length.into()),
            e.request().map_or("", RequestFacts::right)
        ),
        _ => f.write_str(
            "check at the peer that the rkey is registered, and in its QP's protection domain, that the range lies inside \
             that region, and that both the region and the QP allow the operation",
        ),
    }
}

fn refused_peer(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match (e.status, e.request()) {
        (WcStatus::LocalAccess, Some(request)) if request.remote.is_some() => write!(
            f,
            "check here that the key which the peer used is registered in this QP's protection domain, that its range lies \
             inside the region, and that the region and the QP allow {}",
            request.right()
        ),
        (WcStatus::LocalAccess, _) => f.write_str(
            "check here that the peer's key is registered in this QP's protection domain and allows what it wants, as must \
             the QP",
        ),
        _ => f.write_str(
            "look at the peer's completion, which has the same failure from its side, and check what it may send: operation, \
             length, depth of READs",
        ),
    }
}

fn flushed(e: &Explanation<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match e.detail {
        Some(first) if first.kind != FailureKind::Flushed => {
            let first = Explanation { status: first.status, kind: Some(first.kind), ..*e };
            write!(f, "mend that first failure ({}), and connect again", first.advice())
        }
        _ => f.write_str(
            "if this was not meant, look who disconnected, and connect again; what was flushed may be posted again",
        ),
    }
}

#[cfg(test)]
mod tests;
