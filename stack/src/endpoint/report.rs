//! Reports of what lives in an endpoint, for people and tools that look on.
//!
//! Owns the reports and their making, a page of objects at a time: a page looks at no more than the slots that it is
//! told to, so that whoever holds the endpoint for it holds it shortly. Objects are numbered by their slots, QPs by
//! their numbers. Never changes anything.

use core::net::IpAddr;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Endpoint;
use crate::counters::Counters;
use crate::qp::{Behind, MAX_UNACKED, Progress, Qp, Waiting};
use crate::time::Instant;
use crate::types::{AckTimeout, PathMtu, Qpn, RetryCount, RnrRetry};
use crate::verbs::{FailureKind, PathMigState, QpState, QpType, SrqHandle};

/// A device and its port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name, e.g. `uroce0`.
    pub name: String,
    /// Node GUID.
    pub node_guid: u64,
    /// Addresses; each is a GID.
    pub addresses: Vec<IpAddr>,
    /// Largest path MTU in bytes.
    pub path_mtu: u32,
    /// Whether the port is up.
    pub active: bool,
    /// Objects that live: QPs, CQs, MRs, SRQs, PDs, AHs.
    pub objects: [usize; 6],
    /// Counters of the port by name.
    pub counters: Vec<(String, u64)>,
    /// Nanoseconds since the endpoint was last driven, at the time of the report.
    pub idle_ns: u64,
    /// Whether something is ready to be sent.
    pub wants_transmit: bool,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpReport {
    /// Number.
    pub lqpn: u32,
    /// The peer's, of a connected QP.
    pub rqpn: Option<u32>,
    /// `RC`, `UC`, `UD` or `GSI`.
    pub kind: String,
    /// `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE` or `ERR`.
    pub state: String,
    /// Protection domain.
    pub pdn: u32,
    /// CQ of sends.
    pub send_cqn: u32,
    /// CQ of receives.
    pub recv_cqn: u32,
    /// Shared receive queue.
    pub srqn: Option<u32>,
    /// The peer's address, of a connected QP.
    pub peer: Option<IpAddr>,
    /// Path MTU in bytes, of a connected QP.
    pub path_mtu: Option<u32>,
    /// `MIGRATED`, `REARM` or `ARMED`, of a connected QP.
    pub path_mig: Option<String>,
    /// Next PSN expected, of a connected QP.
    pub rq_psn: Option<u32>,
    /// Next PSN to send.
    pub sq_psn: u32,
    /// Oldest PSN not acknowledged, of a connected QP.
    pub unacked_psn: Option<u32>,
    /// Local ACK timeout code, of an RC QP.
    pub timeout: Option<u8>,
    /// Transport retries allowed, of an RC QP.
    pub retry_count: Option<u8>,
    /// RNR retries allowed, of an RC QP; 7 is for ever.
    pub rnr_retry: Option<u8>,
    /// READs and atomics that may be outstanding, of an RC QP.
    pub max_rd_atomic: Option<u8>,
    /// Sends posted and not completed.
    pub sends: u32,
    /// Of these, begun.
    pub in_flight: usize,
    /// Receives posted and not consumed, in a queue of its own.
    pub receives: u32,
    /// Transport retries used without progress.
    pub retries_used: u8,
    /// RNR retries used without progress.
    pub rnr_retries_used: u32,
    /// What the oldest send waits for, in a word: `nothing`, `ack`, `response`, `rnr`, `turn`.
    pub waiting: String,
    /// The same for people; nothing when it waits for nothing.
    pub reason: Option<String>,
    /// Nanoseconds that the oldest unacknowledged packet waits.
    pub waits_ns: Option<u64>,
    /// Nanoseconds since the last progress, with nothing in flight.
    pub idle_ns: Option<u64>,
    /// Why it failed, if it did.
    pub last_error: Option<String>,
    /// Its counters by name, those at zero left out.
    pub counters: Vec<(String, u64)>,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqReport {
    /// Number.
    pub cqn: u32,
    /// Entries.
    pub cqe: usize,
    /// Completions that wait to be polled.
    pub waiting: usize,
    /// QPs that complete here, counted once for each direction.
    pub users: u32,
    /// It overran.
    pub overrun: bool,
}

/// A memory region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrReport {
    /// Number.
    pub mrn: u32,
    /// Key for peers.
    pub rkey: u32,
    /// Key for local elements.
    pub lkey: u32,
    /// Wire address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub mrlen: u64,
    /// Protection domain.
    pub pdn: u32,
    /// A peer invalidated its key.
    pub invalidated: bool,
}

/// A shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqReport {
    /// Number.
    pub srqn: u32,
    /// Protection domain.
    pub pdn: u32,
    /// Receives it can hold.
    pub size: u32,
    /// Receives that wait.
    pub available: u32,
    /// Limit that is armed; 0: none.
    pub limit: u32,
    /// QPs that receive from it.
    pub users: u32,
}

/// Some objects of one kind.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// Those that live.
    pub items: Vec<T>,
    /// The slot from which the next page goes on; `None`: there are no more.
    pub next: Option<u32>,
}

/// The objects in the slots from `from` on, `count` slots at most.
fn page<T>(slots: usize, from: u32, count: u32, one: impl FnMut(u32) -> Option<T>) -> Page<T> {
    let slots = u32::try_from(slots).unwrap_or(u32::MAX);
    let range: Range<u32> = from..from.saturating_add(count).min(slots);
    let next = Some(range.end).filter(|end| *end < slots);
    Page { items: range.filter_map(one).collect(), next }
}

impl Endpoint {
    /// The device. `now` is the time on the clock that drives it.
    #[must_use]
    pub fn report_device(&self, now: Instant) -> DeviceReport {
        DeviceReport {
            name: self.config.name.clone(),
            node_guid: self.node_guid,
            addresses: self.config.addresses.clone(),
            path_mtu: bytes(self.config.path_mtu),
            active: self.link_is_up,
            objects: self.object_counts(),
            counters: named(&self.counters(), true),
            idle_ns: nanos(now, self.now),
            wants_transmit: self.wants_transmit(),
        }
    }

    /// QPs, at most `count` of them.
    #[must_use]
    pub fn report_qps(&self, now: Instant, from: u32, count: u32) -> Page<QpReport> {
        page(self.qps.slots(), from, count, |slot| {
            let slot = self.qps.get(self.qps.handle_at(slot)?)?;
            Some(report_qp(now, &slot.qp, &slot.counters))
        })
    }

    /// CQs, at most `count` of them.
    #[must_use]
    pub fn report_cqs(&self, from: u32, count: u32) -> Page<CqReport> {
        page(self.cqs.slots(), from, count, |cqn| {
            let cq = self.cqs.get(self.cqs.handle_at(cqn)?)?;
            let (cqe, waiting) = cq.fill();
            Some(CqReport { cqn, cqe, waiting, users: cq.users(), overrun: cq.has_failed() })
        })
    }

    /// Memory regions, at most `count` of them.
    #[must_use]
    pub fn report_mrs(&self, from: u32, count: u32) -> Page<MrReport> {
        page(self.mrs.slots(), from, count, |mrn| {
            let (mr, pd, valid) = self.mrs.at(mrn)?;
            let (rkey, lkey, pdn) = (mr.rkey.get(), mr.lkey.get(), pd.slot());
            Some(MrReport { mrn, rkey, lkey, iova: mr.iova, mrlen: mr.len, pdn, invalidated: !valid })
        })
    }

    /// Shared receive queues, at most `count` of them.
    #[must_use]
    pub fn report_srqs(&self, from: u32, count: u32) -> Page<SrqReport> {
        page(self.srqs.slots(), from, count, |srqn| {
            let srq = self.srqs.get(self.srqs.handle_at(srqn)?)?;
            let info = srq.info();
            let (pdn, users) = (srq.pd().slot(), srq.users());
            Some(SrqReport { srqn, pdn, size: info.max_wr, available: info.available, limit: info.limit, users })
        })
    }

    /// Numbers of protection domains, at most `count` of them.
    #[must_use]
    pub fn report_pds(&self, from: u32, count: u32) -> Page<u32> {
        page(self.pds.slots(), from, count, |pdn| self.pds.handle_at(pdn).map(|_| pdn))
    }
}

fn bytes(mtu: PathMtu) -> u32 {
    u32::try_from(mtu.bytes()).unwrap_or(u32::MAX)
}

fn nanos(now: Instant, then: Instant) -> u64 {
    u64::try_from(now.saturating_since(then).as_nanos()).unwrap_or(u64::MAX)
}

fn named(counters: &Counters, zeros: bool) -> Vec<(String, u64)> {
    counters.rows().filter(|(_, n)| zeros || *n > 0).map(|(row, n)| (row.name.to_owned(), n)).collect()
}

const fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Err => "ERR",
    }
}

const fn type_name(kind: QpType) -> &'static str {
    match kind {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::Gsi => "GSI",
    }
}

const fn mig_name(state: PathMigState) -> &'static str {
    match state {
        PathMigState::Migrated => "MIGRATED",
        PathMigState::Rearm => "REARM",
        PathMigState::Armed => "ARMED",
    }
}

const fn waiting_name(waiting: Waiting) -> &'static str {
    match waiting {
        Waiting::Nothing => "nothing",
        Waiting::Ack => "ack",
        Waiting::Response => "response",
        Waiting::RnrTimer => "rnr",
        Waiting::Turn => "turn",
    }
}

fn report_qp(now: Instant, qp: &Qp, counters: &Counters) -> QpReport {
    let (info, progress) = (qp.info(), qp.progress());
    let connected = matches!(info.qp_type, QpType::Rc | QpType::Uc);
    let waits = !matches!(progress.waiting, Waiting::Nothing | Waiting::Turn);
    let since = progress.since.map(|at| nanos(now, at));
    let (send_cq, recv_cq) = qp.cqs();
    let attr = info.attr;
    QpReport {
        lqpn: info.qpn.get(),
        rqpn: attr.dest_qpn.map(Qpn::get),
        kind: type_name(info.qp_type).to_owned(),
        state: state_name(info.state).to_owned(),
        pdn: qp.pd().slot(),
        send_cqn: send_cq.slot(),
        recv_cqn: recv_cq.slot(),
        srqn: qp.srq().map(SrqHandle::slot),
        peer: attr.av.map(|av| av.dgid.ip()),
        path_mtu: attr.path_mtu.map(bytes),
        path_mig: attr.path_mig_state.filter(|_| connected).map(|m| mig_name(m).to_owned()),
        rq_psn: connected.then(|| info.queues.rq_psn.get()),
        sq_psn: info.queues.sq_psn.get(),
        unacked_psn: connected.then(|| info.queues.unacked_psn.get()),
        timeout: attr.timeout.map(AckTimeout::code),
        retry_count: attr.retry_count.map(RetryCount::get),
        rnr_retry: attr.rnr_retry.map(RnrRetry::code),
        max_rd_atomic: attr.max_rd_atomic,
        sends: info.queues.sends_outstanding,
        in_flight: progress.in_flight,
        receives: info.queues.receives_posted,
        retries_used: progress.retries_used,
        rnr_retries_used: progress.rnr_retries_used,
        waiting: waiting_name(progress.waiting).to_owned(),
        reason: reason(qp, &progress, since.unwrap_or(0)),
        waits_ns: since.filter(|_| waits),
        idle_ns: since.filter(|_| !waits),
        // A program that moves its QP to ERR flushes it: that is no failure.
        last_error: info.last_error.filter(|e| e.kind != FailureKind::Flushed).map(|e| e.to_string()),
        counters: named(counters, false),
    }
}

/// What it waits for, and what keeps the next work request back, in words.
fn reason(qp: &Qp, progress: &Progress, waits_ns: u64) -> Option<String> {
    let (info, ms) = (qp.info(), waits_ns / 1_000_000);
    let psn = info.queues.unacked_psn.get();
    let mut text = match progress.waiting {
        Waiting::Nothing => return None,
        Waiting::Turn if progress.behind == Some(Behind::Drain) => {
            return Some("in SQD: nothing is begun until the QP is in RTS again".to_owned());
        }
        Waiting::Turn => {
            return Some("posted and not sent: nobody drives the engine, or the device takes nothing".to_owned());
        }
        Waiting::Ack => format!("no ACK of PSN {psn} for {ms} ms"),
        Waiting::Response => format!("no response to the READ or atomic at PSN {psn} for {ms} ms"),
        Waiting::RnrTimer => {
            format!("no receive posted at the peer for {ms} ms: {} RNR NAKs for PSN {psn}", progress.rnr_retries_used)
        }
    };
    if progress.retries_used > 0 {
        let allowed = info.attr.retry_count.map_or(0, RetryCount::get);
        text.push_str(&format!(", retry {} of {allowed}", progress.retries_used));
    }
    if progress.rnr_retries_used > 0 && progress.waiting != Waiting::RnrTimer {
        text.push_str(&format!(", {} RNR NAKs", progress.rnr_retries_used));
    }
    match progress.behind {
        Some(Behind::Fence) => text.push_str("; the next waits at a fence"),
        Some(Behind::ReadDepth) => text.push_str("; the next waits for a place among the outstanding READs"),
        Some(Behind::Window) => text.push_str(&format!("; the window of {MAX_UNACKED} packets is full")),
        Some(Behind::Credits) => text.push_str("; the next waits for the peer to post receives (end-to-end credits)"),
        Some(Behind::Drain) => text.push_str("; in SQD"),
        None => {}
    }
    Some(text)
}
