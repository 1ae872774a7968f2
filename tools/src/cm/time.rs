//! `uroce cm time`: both roles of cmtime.
//!
//! Owns the steps and their times. The client takes all its connections through one step before the next; the server
//! makes a QP for each request, accepts it, and agrees when the client disconnects.

use core::net::SocketAddr;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use uroce::types::{RetryCount, RnrRetry};
use uroce::verbs::{CqHandle, PdHandle, QpCapabilities, QpHandle, QpInit, QpType};
use uroce_cm::id::IdOptions;
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, IdHandle};

use super::Ends;
use super::crowd::{Crowd, News, Stage};
use crate::exit::Failure;
use crate::node::{Handle, Node};
use crate::report::Output;
use crate::stats::Latencies;
use crate::stop;

/// How long a server still answers clients that missed the end.
const LINGER: Duration = Duration::from_millis(200);

/// Flags of `uroce cm time`, with the letters and defaults of cmtime.
#[derive(Args, Debug)]
pub(super) struct TimeArgs {
    #[command(flatten)]
    ends: Ends,
    /// Connections. A server ends after as many
    #[arg(short, long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    connections: u32,
    /// Port of the service
    #[arg(short, long, default_value_t = 7471)]
    port: u16,
    /// Transport retries that a connection is made with
    #[arg(short, long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(..=7))]
    retries: u8,
    /// Milliseconds without any progress after which a step fails; at the least as long as connection management
    /// needs to say that a peer does not answer
    #[arg(short, long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    timeout: u64,
    /// Server: go on with further clients, for ever
    #[arg(long, conflicts_with = "server")]
    forever: bool,
}

/// Least patience: connection management gives up on a silent peer after about 12 s, and says more.
const PATIENCE_MIN: Duration = Duration::from_secs(20);

impl TimeArgs {
    fn patience(&self) -> Duration {
        Duration::from_millis(self.timeout).max(PATIENCE_MIN)
    }

    fn param(&self) -> ConnParam<'static> {
        ConnParam {
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: RetryCount::new(self.retries).unwrap_or(RetryCount::MAX),
            rnr_retry_count: RnrRetry::new(0).unwrap_or(RnrRetry::FOREVER),
            ..ConnParam::default()
        }
    }

    fn count(&self) -> usize {
        usize::try_from(self.connections).unwrap_or(usize::MAX)
    }
}

/// Runs the command.
pub(super) fn run(args: &TimeArgs, out: &mut Output) -> Result<(), Failure> {
    let mut node = Node::open(&args.ends.device()?)?;
    let v = node.verbs();
    let server = args.ends.peer(args.port)?;
    let mut bench = Bench::new(args, v, server)?;
    let done = match server {
        Some(server) => client(&mut bench, v, server, out),
        None => serve(&mut bench, v, out),
    };
    bench.crowd.connections.farewell(v, &done);
    done
}

/// One step of all connections.
struct Timed {
    name: &'static str,
    begins: Vec<Instant>,
    each: Latencies,
    begin: Instant,
    total: Duration,
}

impl Timed {
    fn new(name: &'static str) -> Result<Self, Failure> {
        Ok(Self { name, begins: Vec::new(), each: Latencies::new()?, begin: Instant::now(), total: Duration::ZERO })
    }

    /// A connection begins; they begin in their order.
    fn starts(&mut self) {
        self.begins.push(Instant::now());
    }

    fn ends(&mut self, number: usize) {
        if let Some(begin) = self.begins.get(number) {
            self.each.record(begin.elapsed());
        }
        self.total = self.begin.elapsed();
    }

    fn row(&self) -> Row {
        let figures = self.each.figures(0, 1.0);
        let total_us = self.total.as_secs_f64() * 1e6;
        #[allow(clippy::cast_precision_loss)] // At most 65,000 connections.
        let us_per_conn = if figures.iterations == 0 { 0.0 } else { total_us / figures.iterations as f64 };
        Row {
            step: self.name,
            total_ms: total_us / 1e3,
            max_ms: figures.max / 1e3,
            min_us: figures.min,
            us_per_conn,
            p50_us: figures.typical,
            p99_us: figures.p99,
        }
    }
}

/// A line of cmtime's table, with percentiles.
#[derive(Serialize)]
struct Row {
    step: &'static str,
    /// From the first connection's begin to the last one's end.
    total_ms: f64,
    /// Longest that one connection took.
    max_ms: f64,
    min_us: f64,
    us_per_conn: f64,
    p50_us: f64,
    p99_us: f64,
}

/// What a client found.
#[derive(Serialize)]
struct Outcome {
    role: &'static str,
    server: SocketAddr,
    connections: u32,
    /// In the step `connect` alone.
    connects_per_second: f64,
    steps: Vec<Row>,
}

/// What a server did.
#[derive(Serialize)]
struct Served {
    role: &'static str,
    connections: u64,
    /// From the first request to the last connection that was established.
    connects_per_second: f64,
}

fn client(bench: &mut Bench<'_>, v: &mut Handle, server: SocketAddr, out: &mut Output) -> Result<(), Failure> {
    let args = bench.args;
    let (count, source) = (args.count(), args.ends.source());
    let mut steps = Vec::new();
    steps.push(
        bench.each(v, "create id", None, |b, _, _| b.crowd.create(PortSpace::Tcp, IdOptions::default()).map(drop))?,
    );
    steps.push(
        bench.each(v, "resolve addr", Some(Stage::AddrResolved), |b, v, number| {
            b.crowd.resolve_addr(v, number, source)
        })?,
    );
    steps.push(
        bench.each(v, "resolve route", Some(Stage::RouteResolved), |b, v, number| b.crowd.resolve_route(v, number))?,
    );
    steps.push(bench.each(v, "create qp", None, Bench::make_qp)?);
    let connect = bench
        .each(v, "connect", Some(Stage::Established), |b, v, number| b.crowd.connect(v, number, &b.args.param()))?;
    let connects_per_second = f64::from(args.connections) / (connect.total_ms / 1e3);
    steps.push(connect);
    steps.push(bench.each(v, "disconnect", Some(Stage::Over), |b, v, number| b.crowd.disconnect(v, number))?);
    steps.push(bench.each(v, "destroy", None, Bench::destroy)?);
    out.line("step              total ms     max ms     min us  us / conn     p50 us     p99 us")?;
    for row in &steps {
        let Row { step, total_ms, max_ms, min_us, us_per_conn, p50_us, p99_us } = row;
        out.line(format_args!(
            "{step:<13}: {total_ms:>11.2} {max_ms:>10.2} {min_us:>10.2} {us_per_conn:>10.2} {p50_us:>10.2} {p99_us:>10.2}"
        ))?;
    }
    out.line(format_args!("{count} connections to {server}: {connects_per_second:.0} connects/s"))?;
    let outcome = Outcome { role: "client", server, connections: args.connections, connects_per_second, steps };
    out.document("cm time", &outcome)
}

fn serve(bench: &mut Bench<'_>, v: &mut Handle, out: &mut Output) -> Result<(), Failure> {
    let address = bench.args.ends.listen_on(v, bench.args.port);
    bench.crowd.connections.listen(v, address, bench.args.count())?;
    let (mut first, mut last) = (None, Instant::now());
    let (mut established, mut over) = (0u64, 0);
    while bench.args.forever || over < u64::from(bench.args.connections) {
        let news = match bench.crowd.news(v) {
            Ok(Some(news)) => news,
            Ok(None) => {
                bench.crowd.rest(v)?;
                continue;
            }
            // There is no other end.
            Err(Failure::Stopped(_)) if bench.args.forever => break,
            Err(failure) => return Err(failure),
        };
        match news {
            News::Request(id) => {
                first.get_or_insert_with(Instant::now);
                bench.accept(v, id)?;
            }
            News::Moved(number) => match bench.crowd.get(number).map(|m| m.stage) {
                Some(Stage::Established) => {
                    (established, last) = (established + 1, Instant::now());
                }
                Some(Stage::Over) => {
                    bench.destroy(v, number)?;
                    over += 1;
                }
                _ => {}
            },
        }
    }
    if !stop::has_come() {
        bench.crowd.connections.linger(v, LINGER)?;
    }
    let seconds = last.saturating_duration_since(first.unwrap_or(last)).as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let connects_per_second = if seconds > 0.0 { established as f64 / seconds } else { 0.0 };
    out.line(format_args!("{established} connections came and went: {connects_per_second:.0} accepts/s"))?;
    out.document("cm time", &Served { role: "server", connections: established, connects_per_second })
}

struct Bench<'a> {
    args: &'a TimeArgs,
    crowd: Crowd,
    pd: PdHandle,
    cq: CqHandle,
    /// By the number of the connection.
    qps: BTreeMap<usize, QpHandle>,
}

impl<'a> Bench<'a> {
    fn new(args: &'a TimeArgs, v: &mut Handle, server: Option<SocketAddr>) -> Result<Self, Failure> {
        let crowd = Crowd::new(v, server, args.patience())?;
        // Nothing is posted: the queue stays empty.
        Ok(Self { args, crowd, pd: v.alloc_pd()?, cq: v.create_cq(1)?, qps: BTreeMap::new() })
    }

    /// Takes all connections through one step: `act` begins it, and reaching `stage` ends it, or `act`'s return.
    fn each(
        &mut self,
        v: &mut Handle,
        name: &'static str,
        stage: Option<Stage>,
        act: impl Fn(&mut Self, &mut Handle, usize) -> Result<(), Failure>,
    ) -> Result<Row, Failure> {
        let mut timed = Timed::new(name)?;
        let count = self.args.count();
        self.crowd.goes_on();
        let mut done = 0;
        for number in 0..count {
            timed.starts();
            act(self, v, number)?;
            if stage.is_none() {
                timed.ends(number);
            } else {
                done += self.moved(v, &mut timed, stage)?;
            }
        }
        while stage.is_some() && done < count {
            let moved = self.moved(v, &mut timed, stage)?;
            done += moved;
            if moved == 0 {
                self.crowd.check_patience(|| format!("{done} of {count} connections are through `{name}`"))?;
                self.crowd.rest(v)?;
            }
        }
        Ok(timed.row())
    }

    /// How many have reached `stage` now.
    fn moved(&mut self, v: &mut Handle, timed: &mut Timed, stage: Option<Stage>) -> Result<usize, Failure> {
        let mut moved = 0;
        while let Some(news) = self.crowd.news(v)? {
            let News::Moved(number) = news else { continue };
            let now = self.crowd.get(number).map(|m| m.stage);
            if now == stage {
                timed.ends(number);
                moved += 1;
            } else if now == Some(Stage::Over) {
                return Err(Failure::Failed(format!("the server ended connection {}", number + 1)));
            }
        }
        Ok(moved)
    }

    fn new_qp(&self, v: &mut Handle) -> Result<QpHandle, Failure> {
        let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 1, max_inline: 0, ..QpCapabilities::default() };
        let (pd, cq, qp_type) = (self.pd, self.cq, QpType::Rc);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        Ok(v.create_qp(init)?)
    }

    fn make_qp(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let qp = self.new_qp(v)?;
        let id = self.crowd.get(number).map(|m| m.id);
        self.crowd.attach(v, id.ok_or_else(|| Failure::failed("no id"))?, qp)?;
        self.qps.insert(number, qp);
        Ok(())
    }

    fn accept(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        let qp = self.new_qp(v)?;
        self.crowd.attach(v, id, qp)?;
        let number = self.crowd.accept(v, id, &self.args.param())?;
        self.qps.insert(number, qp);
        Ok(())
    }

    fn destroy(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        if let Some(qp) = self.qps.remove(&number) {
            v.destroy_qp(qp)?;
        }
        self.crowd.forget(v, number)
    }
}
