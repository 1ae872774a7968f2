//! `uroce stat`: counters of running endpoints, as `rdma statistic`, or in Prometheus's text.
//!
//! Owns the rows of ports and QPs. Changes nothing.

mod prometheus;

use core::net::SocketAddr;

use clap::Args;
use uroce::counters::{CounterRow, Counters};
use uroce::inspect::Snapshot;

use crate::exit::Failure;
use crate::observe::rows::{self, Of, Query, Row, RowArgs, Value};
use crate::observe::{cm_of, snapshots};
use crate::report::{Output, remark};

/// Flags of `uroce stat`.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    rows: RowArgs,
    /// With `prometheus`: serve the text on this address over HTTP until interrupted, instead of printing it once
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// As `rdma statistic`: show [link DEV/PORT] for the port, show qp [lqpn N] for QPs; or `prometheus`
    #[arg(value_name = "WORDS")]
    words: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &StatArgs, out: &mut Output) -> Result<(), Failure> {
    let query = Query::parse(&args.words, &["qp", "prometheus"])?;
    if query.object == Some("prometheus") {
        return match args.listen {
            Some(address) => prometheus::serve(address, out),
            None => out.line(prometheus::text(&snapshots())?.trim_end()),
        };
    }
    if args.listen.is_some() {
        return Err(Failure::Usage("--listen goes with `uroce stat prometheus`".into()));
    }
    let found = snapshots();
    if found.is_empty() && !(out.is_json() || args.rows.j) {
        remark("no endpoint of this user runs");
    }
    let all = found.iter().enumerate();
    let (all, keys): (Vec<Row>, &[&str]) = if query.object == Some("qp") {
        (all.flat_map(|(index, s)| qps(index, s)).collect(), &["lqpn", "rqpn", "type", "state", "pid", "comm"])
    } else {
        (all.map(|(index, s)| port(index, s)).collect(), &["pid", "comm"])
    };
    rows::print(&query.choose(all, keys)?, &args.rows, out)
}

/// Counters under all their names: ours first, then what mlx5 calls them. Drop reasons are details, unless there were
/// any.
fn counted(mut row: Row, counters: &[(String, u64)]) -> Row {
    let value = |name: &str| counters.iter().find(|(n, _)| n == name).map_or(0, |(_, v)| *v);
    let is_drop = |r: &&CounterRow| r.name.starts_with("drop_");
    for r in Counters::TABLE.iter().filter(|r| !is_drop(r)) {
        row = row.number(r.name, value(r.name));
    }
    for r in Counters::TABLE {
        if let Some(alias) = r.mlx5.filter(|alias| *alias != r.name) {
            row = row.number(alias, value(r.name));
        }
    }
    for r in Counters::TABLE.iter().filter(is_drop) {
        row = match value(r.name) {
            0 => row.detail(r.name, Some(Value::Number(0))),
            n => row.number(r.name, n),
        };
    }
    row
}

fn port(index: usize, s: &Snapshot) -> Row {
    let mut row = counted(Row::new(index, s, Of::Link), &s.device.counters).process(s);
    for (name, n) in [("device_lost_transmit", s.lost_transmit), ("device_lost_receive", s.lost_receive)] {
        row = row.detail(name, Some(Value::Number(n)));
    }
    for (name, n) in cm_of(s).counters {
        row = row.detail(&name, Some(Value::Number(n)));
    }
    row
}

fn qps(index: usize, s: &Snapshot) -> Vec<Row> {
    let row = |qp: &uroce::endpoint::QpReport| {
        let row = Row::new(index, s, Of::Link).number("lqpn", qp.lqpn);
        let row = row.maybe("rqpn", qp.rqpn.map(|n| Value::Number(n.into())));
        let row = row.text("type", qp.kind.clone()).text("state", qp.state.clone()).process(s);
        counted(row, &qp.counters)
    };
    s.qps.iter().map(row).collect()
}
