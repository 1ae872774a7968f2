//! `uroce res`: what lives in running endpoints, as `rdma resource`.
//!
//! Owns the rows of each kind of object. Changes nothing.

use clap::Args;
use uroce::endpoint::QpReport;
use uroce::inspect::Snapshot;

use crate::exit::Failure;
use crate::observe::rows::{self, Of, Query, Row, RowArgs, Value};
use crate::observe::{cm_of, snapshots};
use crate::report::{Output, remark};

const OBJECTS: [&str; 7] = ["qp", "cq", "mr", "pd", "srq", "cm_id", "ctx"];

/// Flags of `uroce res`.
#[derive(Args, Debug)]
pub(crate) struct ResArgs {
    #[command(flatten)]
    rows: RowArgs,
    /// As `rdma resource`: show [qp|cq|mr|pd|srq|cm_id|ctx] [link DEV/PORT] [KEY VALUE]…, such as `show qp state RTS`,
    /// `show qp lqpn 17-99 pid 4711` or `show cm_id`. Without a kind, how many there are of each
    #[arg(value_name = "WORDS")]
    words: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &ResArgs, out: &mut Output) -> Result<(), Failure> {
    let query = Query::parse(&args.words, &OBJECTS)?;
    let found = snapshots();
    if found.is_empty() && !(out.is_json() || args.rows.j) {
        remark("no endpoint of this user runs");
    }
    for snapshot in found.iter().filter(|s| s.truncated) {
        remark(format_args!("process {} has more objects than are listed", snapshot.pid));
    }
    let Some(object) = query.object else { return summary(&found, &query, args, out) };
    let each = |make: fn(usize, &Snapshot) -> Vec<Row>| {
        found.iter().enumerate().flat_map(|(index, s)| make(index, s)).collect::<Vec<_>>()
    };
    let (all, keys): (_, &[&str]) = match object {
        "qp" => (each(qps), &QP_KEYS),
        "cq" => (each(cqs), &["cqn", "cqe", "users", "pid", "comm", "ctxn"]),
        "mr" => (each(mrs), &["mrn", "mrlen", "pdn", "pid", "comm", "rkey", "lkey"]),
        "pd" => (each(pds), &["pdn", "users", "pid", "comm", "ctxn"]),
        "srq" => (each(srqs), &["srqn", "type", "lqpn", "pdn", "pid", "comm"]),
        "cm_id" => (each(cm_ids), &["lqpn", "qp-type", "state", "ps", "pid", "comm", "cm-idn", "src-addr", "dst-addr"]),
        _ => (each(contexts), &["ctxn", "pid", "comm"]),
    };
    rows::print(&query.choose(all, keys)?, &args.rows, out)
}

const QP_KEYS: [&str; 15] = [
    "lqpn",
    "pdn",
    "rqpn",
    "type",
    "state",
    "rq-psn",
    "sq-psn",
    "path-mig-state",
    "pid",
    "comm",
    "waiting",
    "peer",
    "send-cqn",
    "recv-cqn",
    "srqn",
];

/// How many there are of each kind.
fn summary(found: &[Snapshot], query: &Query<'_>, args: &ResArgs, out: &mut Output) -> Result<(), Failure> {
    if query.has_filters() {
        return Err(Failure::Usage(format!("a filter needs a kind of object: one of {}", OBJECTS.join(", "))));
    }
    let counts = |index: usize, s: &Snapshot| {
        let [qp, cq, mr, srq, pd, _] = s.device.objects.map(|n| n as u64);
        let row = Row::new(index, s, Of::Device).number("pd", pd).number("cq", cq).number("qp", qp);
        let cm_ids = cm_of(s).count as u64;
        row.number("cm_id", cm_ids).number("mr", mr).number("ctx", 1u64).number("srq", srq).process(s)
    };
    let all = found.iter().enumerate().map(|(index, s)| counts(index, s)).collect();
    let chosen = query.choose(all, &[])?;
    if out.is_json() || args.rows.j {
        return rows::print(&chosen, &args.rows, out);
    }
    chosen.iter().try_for_each(|row| out.line(row.summary()))
}

fn qps(index: usize, s: &Snapshot) -> Vec<Row> {
    s.qps.iter().map(|qp| details_of(base_of(index, s, qp), qp)).collect()
}

fn base_of(index: usize, s: &Snapshot, qp: &QpReport) -> Row {
    let some = |n: Option<u32>| n.map(|n| Value::Number(n.into()));
    Row::new(index, s, Of::Link)
        .number("lqpn", qp.lqpn)
        .number("pdn", qp.pdn)
        .maybe("rqpn", some(qp.rqpn))
        .text("type", qp.kind.clone())
        .text("state", qp.state.clone())
        .maybe("rq-psn", some(qp.rq_psn))
        .number("sq-psn", qp.sq_psn)
        .maybe("path-mig-state", qp.path_mig.clone().map(Value::Text))
        .process(s)
}

fn details_of(row: Row, qp: &QpReport) -> Row {
    let number = |n: u64| Some(Value::Number(n));
    let small = |n: Option<u8>| n.map(|n| Value::Number(n.into()));
    let some = |n: Option<u32>| n.map(|n| Value::Number(n.into()));
    let us = |ns: Option<u64>| ns.map(|ns| Value::Number(ns / 1000));
    let text = |t: &Option<String>| t.clone().map(Value::Text);
    row.detail("peer", qp.peer.map(|ip| Value::Text(ip.to_string())))
        .detail("path-mtu", some(qp.path_mtu))
        .detail("send-cqn", number(qp.send_cqn.into()))
        .detail("recv-cqn", number(qp.recv_cqn.into()))
        .detail("srqn", some(qp.srqn))
        .detail("sends", number(qp.sends.into()))
        .detail("in-flight", number(qp.in_flight as u64))
        .detail("receives", number(qp.receives.into()))
        .detail("unacked-psn", some(qp.unacked_psn))
        .detail("timeout", small(qp.timeout))
        .detail("retries-used", number(qp.retries_used.into()))
        .detail("retry-cnt", small(qp.retry_count))
        .detail("rnr-retries-used", number(qp.rnr_retries_used.into()))
        .detail("rnr-retry", small(qp.rnr_retry))
        .detail("max-rd-atomic", small(qp.max_rd_atomic))
        .detail("waiting", Some(Value::Text(qp.waiting.clone())))
        .detail("oldest-unacked-us", us(qp.waits_ns))
        .detail("last-progress-us", us(qp.idle_ns))
        .detail("reason", text(&qp.reason))
        .detail("last-error", text(&qp.last_error))
}

fn cqs(index: usize, s: &Snapshot) -> Vec<Row> {
    let row = |cq: &uroce::endpoint::CqReport| {
        let row = Row::new(index, s, Of::Device).number("cqn", cq.cqn).number("cqe", cq.cqe as u64);
        let row = row.number("users", cq.users).number("ctxn", 0u64).process(s);
        let overrun = cq.overrun.then(|| Value::Text("yes".into()));
        row.detail("waiting", Some(Value::Number(cq.waiting as u64))).detail("overrun", overrun)
    };
    s.cqs.iter().map(row).collect()
}

fn mrs(index: usize, s: &Snapshot) -> Vec<Row> {
    let row = |mr: &uroce::endpoint::MrReport| {
        let row = Row::new(index, s, Of::Device).number("mrlen", mr.mrlen).process(s);
        let row = row.number("mrn", mr.mrn).number("pdn", mr.pdn);
        // Who has the key can write: it is shown to those who ask.
        let key = |k: u32| Some(Value::Hex(k.into()));
        let row = row.detail("rkey", key(mr.rkey)).detail("lkey", key(mr.lkey));
        let invalidated = mr.invalidated.then(|| Value::Text("yes".into()));
        row.detail("iova", Some(Value::Hex(mr.iova))).detail("invalidated", invalidated)
    };
    s.mrs.iter().map(row).collect()
}

fn pds(index: usize, s: &Snapshot) -> Vec<Row> {
    let users = |pdn: u32| {
        let qps = s.qps.iter().filter(|qp| qp.pdn == pdn).count();
        let mrs = s.mrs.iter().filter(|mr| mr.pdn == pdn).count();
        (qps + mrs + s.srqs.iter().filter(|srq| srq.pdn == pdn).count()) as u64
    };
    let row = |pdn: &u32| Row::new(index, s, Of::Device).number("pdn", *pdn).number("users", users(*pdn));
    s.pds.iter().map(|pdn| row(pdn).number("ctxn", 0u64).process(s)).collect()
}

fn srqs(index: usize, s: &Snapshot) -> Vec<Row> {
    let row = |srq: &uroce::endpoint::SrqReport| {
        let qps: Vec<u64> = s.qps.iter().filter(|q| q.srqn == Some(srq.srqn)).map(|q| q.lqpn.into()).collect();
        let row = Row::new(index, s, Of::Device).number("srqn", srq.srqn).text("type", "BASIC");
        let row = row.maybe("lqpn", Some(qps).filter(|q| !q.is_empty()).map(Value::List));
        let row = row.number("pdn", srq.pdn).process(s);
        let number = |n: u32| Some(Value::Number(n.into()));
        row.detail("size", number(srq.size))
            .detail("available", number(srq.available))
            .detail("limit", number(srq.limit))
    };
    s.srqs.iter().map(row).collect()
}

fn cm_ids(index: usize, s: &Snapshot) -> Vec<Row> {
    let row = |id: &crate::observe::CmIdRow| {
        let text = |t: &Option<String>| t.clone().map(Value::Text);
        Row::new(index, s, Of::Link)
            .maybe("lqpn", id.lqpn.map(|n| Value::Number(n.into())))
            .text("qp-type", id.qp_type.clone())
            .text("state", id.state.clone())
            .text("ps", id.ps.clone())
            .process(s)
            .number("cm-idn", id.number)
            .maybe("src-addr", text(&id.src))
            .maybe("dst-addr", text(&id.dst))
            .detail("pending", id.pending.then(|| Value::Text("yes".into())))
    };
    cm_of(s).ids.iter().map(row).collect()
}

fn contexts(index: usize, s: &Snapshot) -> Vec<Row> {
    vec![Row::new(index, s, Of::Device).number("ctxn", 0u64).process(s)]
}
