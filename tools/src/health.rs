//! `uroce health`: whether running endpoints are well, for probes.
//!
//! Owns the checks and their limits. Changes nothing.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use uroce::inspect::{InspectError, Snapshot};

use crate::exit::Failure;
use crate::observe::{cm_of, look};
use crate::report::Output;

/// Packets sent below which a rate of repeats says nothing.
const RATE_NEEDS: u64 = 100;

/// Flags of `uroce health`.
#[derive(Args, Debug)]
pub(crate) struct HealthArgs {
    /// A QP whose oldest packet is unacknowledged for longer is stuck
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    stuck_after: f64,
    /// QPs that may be stuck
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_stuck: usize,
    /// Connections that may wait for an answer to their request, ours and peers'
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_pending: usize,
    /// Packets sent again, of all sent
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = percent)]
    max_retry: f64,
    /// Look twice, this far apart, and judge the repeats between; 0 judges all since the endpoint began
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    interval: f64,
    /// Only this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    if (0.0..=86_400.0).contains(&value) { Ok(value) } else { Err("from 0 to 86400 seconds".to_owned()) }
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.trim_end_matches('%').parse().map_err(|_| format!("`{text}` is no percentage"))?;
    if (0.0..=100.0).contains(&value) { Ok(value) } else { Err("from 0 to 100 percent".to_owned()) }
}

/// Something that is not well.
#[derive(Debug, Serialize)]
struct Reason {
    pid: u32,
    ifname: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lqpn: Option<u32>,
    check: &'static str,
    text: String,
}

#[derive(Serialize)]
struct Document<'a> {
    healthy: bool,
    endpoints: usize,
    reasons: &'a [Reason],
}

/// Runs the command.
pub(crate) fn run(args: &HealthArgs, out: &mut Output) -> Result<(), Failure> {
    let wanted = |pid| args.pid.is_none_or(|wanted| wanted == pid);
    let mut before = Vec::new();
    if args.interval > 0.0 {
        before = look().0;
        std::thread::sleep(Duration::from_secs_f64(args.interval));
    }
    let (mut found, silent) = look();
    found.retain(|s| wanted(s.pid));
    let silent: Vec<Reason> = silent.iter().filter_map(|(path, error)| no_answer(path, error)).collect();
    let silent: Vec<Reason> = silent.into_iter().filter(|reason| wanted(reason.pid)).collect();
    if found.is_empty() && silent.is_empty() {
        return Err(Failure::Environment(
            "no endpoint of this user runs (a command with --no-inspect is not seen)".into(),
        ));
    }
    let judged = found.iter().flat_map(|s| judge(s, earlier(s, &before), args));
    let reasons: Vec<Reason> = judged.chain(silent).collect();
    for Reason { pid, ifname, text, .. } in &reasons {
        out.line(format_args!("{ifname} pid {pid}: {text}"))?;
    }
    let (healthy, endpoints) = (reasons.is_empty(), found.len());
    out.document("health", &Document { healthy, endpoints, reasons: &reasons })?;
    match reasons.len() {
        0 => out.line(format_args!("healthy: {endpoints} endpoint{}", if endpoints == 1 { "" } else { "s" })),
        1 => Err(Failure::failed("unhealthy: 1 reason")),
        n => Err(Failure::failed(format!("unhealthy: {n} reasons"))),
    }
}

/// A process that serves its endpoint and does not answer, as one that is stopped.
fn no_answer(path: &Path, error: &InspectError) -> Option<Reason> {
    let name = path.file_stem()?.to_str()?;
    let (pid, device) = name.split_once('-')?;
    let text = format!("no snapshot can be had: {error}");
    Some(Reason { pid: pid.parse().ok()?, ifname: device.to_owned(), lqpn: None, check: "answer", text })
}

fn earlier<'a>(s: &Snapshot, before: &'a [Snapshot]) -> Option<&'a Snapshot> {
    before.iter().find(|b| (b.pid, b.device.node_guid) == (s.pid, s.device.node_guid))
}

fn judge(s: &Snapshot, before: Option<&Snapshot>, args: &HealthArgs) -> Vec<Reason> {
    let reason = |lqpn, check, text| Reason { pid: s.pid, ifname: s.device.name.clone(), lqpn, check, text };
    let mut all = Vec::new();
    if !s.device.active {
        all.push(reason(None, "link", "the device failed: the link is down".to_owned()));
    }
    let limit_ns = args.stuck_after * 1e9;
    #[allow(clippy::cast_precision_loss)] // A time for people.
    let long = |ns: u64| ns as f64 > limit_ns;
    let waits = s.device.wants_transmit || s.qps.iter().any(|qp| qp.waiting != "nothing");
    if waits && long(s.device.idle_ns) {
        let ms = s.device.idle_ns / 1_000_000;
        all.push(reason(None, "driven", format!("nobody drives the engine for {ms} ms, and there is something to do")));
    }
    let stuck: Vec<_> = s.qps.iter().filter(|qp| qp.waits_ns.is_some_and(long)).collect();
    if stuck.len() > args.max_stuck {
        all.extend(stuck.iter().map(|qp| {
            let why = qp.reason.as_deref().unwrap_or("no progress");
            reason(Some(qp.lqpn), "stuck", format!("qp {} is stuck: {why}", qp.lqpn))
        }));
    }
    for qp in s.qps.iter().filter(|qp| qp.state == "ERR" || qp.state == "SQE") {
        if let Some(error) = &qp.last_error {
            all.push(reason(Some(qp.lqpn), "failed", format!("qp {} is in {}: {error}", qp.lqpn, qp.state)));
        }
    }
    let pending = cm_of(s).ids.iter().filter(|id| id.pending).count();
    if pending > args.max_pending {
        let text = format!("{pending} connections wait for an answer to their request, {} may", args.max_pending);
        all.push(reason(None, "pending", text));
    }
    all.extend(repeats(s, before, args).map(|text| reason(None, "retry", text)));
    all
}

/// What to say about too many repeats.
fn repeats(s: &Snapshot, before: Option<&Snapshot>, args: &HealthArgs) -> Option<String> {
    let of = |s: &Snapshot, name: &str| s.device.counters.iter().find(|(n, _)| n == name).map_or(0, |(_, v)| *v);
    let since = |name| of(s, name).saturating_sub(before.map_or(0, |b| of(b, name)));
    let (sent, again) = (since("sent_pkts"), since("retransmitted_pkts"));
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let rate = again as f64 * 100.0 / sent.max(1) as f64;
    (sent >= RATE_NEEDS && rate > args.max_retry)
        .then(|| format!("{rate:.1} % of {sent} packets were sent again, {} % may be", args.max_retry))
}
