//! `uroce demo`: two processes on this machine connect and move verified data by SEND, WRITE, READ and atomics of RC.
//!
//! Owns the flags, the two processes and the table. `client` and `peer` are the two ends.

mod client;
mod pattern;
mod peer;
mod process;
mod script;

use core::net::{IpAddr, SocketAddr};
use core::str::FromStr;
use std::io::Write as _;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use uroce::counters::Counters;
use uroce::host::Handle;
use uroce::verbs::{PdHandle, QpCapabilities, QpHandle, QpInit, QpType, Verbs};
use uroce_cm::ConnParam;
use uroce_cm::id::IdOptions;

use self::client::{Client, Measured};
use self::peer::Peer;
use self::process::Process;
use self::script::STEPS;
use crate::conn::Connections;
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::Node;
use crate::progress::Progress;
use crate::rdma::Poller;
use crate::report::Output;

/// The service that the peer listens on.
const PORT: u16 = 7471;
/// How long a step sends one message at a time, for the latency.
const ALONE: Duration = Duration::from_millis(110);
/// How long it keeps many outstanding, for the rate.
const TOGETHER: Duration = Duration::from_millis(200);

/// Flags of `uroce demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Device of the client: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR or pnet:IFNAME
    #[arg(short, long, default_value = "udp:127.0.0.1")]
    device: DeviceArg,
    /// Device of the peer, which is a process of its own
    #[arg(long, default_value = "udp:127.0.0.2")]
    peer_device: DeviceArg,
    /// Drop this share of the packets in each direction, such as 1%, to show recovery (at most 20%)
    #[arg(long, value_name = "PERCENT", default_value = "0%")]
    loss: Percent,
    /// Chooses which packets are dropped
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Be the peer: prints `ready`, serves one client and ends
    #[arg(long, hide = true)]
    serve: bool,
}

/// A share of packets, 0 % to 20 %.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Percent(f64);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>();
        let percent = number.ok().filter(|p| (0.0..=20.0).contains(p));
        percent.map(Self).ok_or_else(|| "write a percentage from 0% to 20%".into())
    }
}

impl Percent {
    fn share(self) -> f64 {
        self.0 / 100.0
    }
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs, out: &mut Output) -> Result<(), Failure> {
    if args.device == DeviceArg::Loop || args.peer_device == DeviceArg::Loop {
        return Err(Failure::Usage("the demo is two processes; loop has one".into()));
    }
    if args.serve { serve(args) } else { demonstrate(args, out) }
}

fn open(args: &DemoArgs, device: &DeviceArg, seed: u64) -> Result<Node, Failure> {
    if args.loss.0 > 0.0 { Node::open_lossy(device, args.loss.share(), seed) } else { Node::open(device) }
}

/// A QP that both sides make alike, not yet connected.
fn make_qp(v: &mut Handle) -> Result<(PdHandle, QpHandle, Poller), Failure> {
    let pd = v.alloc_pd()?;
    let cq = v.create_cq(512)?;
    let caps = QpCapabilities { max_send_wr: 64, max_recv_wr: 128, ..QpCapabilities::default() };
    let init =
        QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
    let qp = v.create_qp(init)?;
    Ok((pd, qp, Poller::new(cq, qp)))
}

/// The peer's process.
fn serve(args: &DemoArgs) -> Result<(), Failure> {
    let mut node = open(args, &args.peer_device, args.seed.wrapping_add(1))?;
    let v = node.software()?;
    let mut connections = Connections::new(v)?;
    let address = address(v)?;
    connections.listen(v, SocketAddr::new(address, PORT), 1)?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready {address}")?;
    stdout.flush()?;
    let request = connections.next_request(v)?;
    let (pd, qp, poller) = make_qp(v)?;
    connections.attach(v, request.id, qp)?;
    let mut peer = Peer::new(v, pd, qp, poller)?;
    let region = script::region_to_bytes(peer.region.remote(0));
    connections.accept(v, request.id, &ConnParam { private_data: &region, ..ConnParam::default() })?;
    peer.serve(v, |v| connections.is_over(v, request.id))?;
    connections.part(v, request.id)
}

/// The first address of the endpoint.
fn address(v: &Handle) -> Result<IpAddr, Failure> {
    let first = v.query_gids().first().map(|entry| entry.gid.ip());
    first.ok_or_else(|| Failure::Environment("the device has no address".into()))
}

/// The client's process.
fn demonstrate(args: &DemoArgs, out: &mut Output) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut node = open(args, &args.device, args.seed)?;
    let mut process = Process::start(args)?;
    let peer = SocketAddr::new(process.address(), PORT);
    let v = node.software()?;
    let mut connections = Connections::new(v)?;
    let connecting = Instant::now();
    let (pd, qp, poller) = make_qp(v)?;
    let id = connections.prepare(v, None, peer, IdOptions::default(), qp)?;
    let mut client = Client::new(v, pd, qp, poller)?;
    let accepted = connections.connect(v, id, peer, &ConnParam::default())?;
    let connected = connecting.elapsed();
    let remote = script::region_from_bytes(&accepted.private_data);
    client.set_remote(remote.ok_or_else(|| Failure::failed("the peer did not say where its memory is"))?);
    out.line(format_args!(
        "{} -> {}, connected by the connection manager in {:.1} ms, {} % of the packets dropped",
        args.device,
        args.peer_device,
        connected.as_secs_f64() * 1e3,
        args.loss.0
    ))?;
    out.line(ROW_HEAD)?;
    out.flush()?;
    let progress = Progress::new(out, STEPS.len());
    let mut rows = Vec::new();
    for (index, step) in STEPS.iter().enumerate() {
        progress.begin(step.op.name());
        let before = counters(v);
        let measured = client.run(v, index, ALONE, TOGETHER).map_err(|e| process.explain(e))?;
        let row = Row::new(index, &measured, &before, &counters(v));
        progress.suspend(|| out.line(row.text()).and_then(|()| out.flush()))?;
        rows.push(row);
        progress.done();
    }
    drop(progress);
    connections.disconnect(v, id)?;
    process.end()?;
    verdict(args, rows, &counters(v), connected, begin.elapsed(), out)
}

fn counters(v: &mut Handle) -> Counters {
    v.with_engine(|engine| engine.endpoint().counters().clone())
}

const ROW_HEAD: &str =
    "operation               bytes   messages   messages/s   Gbit/s    p50 us    p99 us  retransmitted    checked";

/// A row of the table.
#[derive(Debug, Serialize)]
struct Row {
    operation: &'static str,
    bytes: usize,
    messages: u64,
    messages_per_s: f64,
    gbit_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    retransmitted_packets: u64,
    checked: u64,
    wrong: Option<String>,
}

impl Row {
    fn new(step: usize, m: &Measured, before: &Counters, after: &Counters) -> Self {
        let script::Step { op, size } = STEPS[step];
        #[allow(clippy::cast_precision_loss)] // A rate for people.
        let bits = size as f64 * 8.0;
        Self {
            operation: op.name(),
            bytes: size,
            messages: m.messages,
            messages_per_s: m.per_second,
            gbit_per_s: m.per_second * bits / 1e9,
            p50_us: m.latency.percentile(50.0),
            p99_us: m.latency.percentile(99.0),
            retransmitted_packets: after.retransmitted_pkts - before.retransmitted_pkts,
            checked: m.checked,
            wrong: m.wrong.clone(),
        }
    }

    fn text(&self) -> String {
        let Self { operation, bytes, messages, messages_per_s, gbit_per_s, p50_us, p99_us, .. } = self;
        format!(
            "{operation:<21} {bytes:>7} {messages:>10} {messages_per_s:>12.0} {gbit_per_s:>8.3} {p50_us:>9.1} \
             {p99_us:>9.1} {:>14} {:>10}{}",
            self.retransmitted_packets,
            self.checked,
            if self.wrong.is_some() { "  WRONG" } else { "" }
        )
    }
}

/// The demo as a JSON document.
#[derive(Serialize)]
struct Document<'a> {
    device: String,
    peer_device: String,
    loss_percent: f64,
    seed: u64,
    connect_ms: f64,
    seconds: f64,
    steps: &'a [Row],
    messages: u64,
    checked: u64,
    retransmitted_packets: u64,
    ack_timeouts: u64,
    sequence_naks: u64,
    verdict: &'static str,
}

fn verdict(
    args: &DemoArgs,
    rows: Vec<Row>,
    counters: &Counters,
    connected: Duration,
    took: Duration,
    out: &mut Output,
) -> Result<(), Failure> {
    let messages = rows.iter().map(|r| r.messages).sum();
    let checked = rows.iter().map(|r| r.checked).sum();
    let wrong = rows.iter().find_map(|r| {
        let unchecked = (r.checked == 0).then(|| "nothing was checked".to_owned());
        r.wrong.clone().or(unchecked).map(|w| format!("{} of {} bytes: {w}", r.operation, r.bytes))
    });
    let seconds = took.as_secs_f64();
    if wrong.is_none() {
        out.line(format_args!(
            "PASS: {messages} messages, SEND, WRITE, READ and atomics of RC, {checked} contents verified, in {seconds:.1} s"
        ))?;
        if args.loss.0 > 0.0 {
            out.line(format_args!(
                "      {} packets sent again after {} NAKs for a gap and {} timeouts; nothing was lost or doubled",
                counters.retransmitted_pkts, counters.rcvd_seq_err, counters.local_ack_timeout_err
            ))?;
        }
    }
    out.document(
        "demo",
        &Document {
            device: args.device.to_string(),
            peer_device: args.peer_device.to_string(),
            loss_percent: args.loss.0,
            seed: args.seed,
            connect_ms: connected.as_secs_f64() * 1e3,
            seconds,
            steps: &rows,
            messages,
            checked,
            retransmitted_packets: counters.retransmitted_pkts,
            ack_timeouts: counters.local_ack_timeout_err,
            sequence_naks: counters.rcvd_seq_err,
            verdict: if wrong.is_none() { "pass" } else { "fail" },
        },
    )?;
    wrong.map_or(Ok(()), |what| Err(Failure::Failed(format!("FAIL: {what}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_is_a_percentage() {
        assert_eq!("1%".parse(), Ok(Percent(1.0)));
        assert_eq!("0.5".parse(), Ok(Percent(0.5)));
        assert!("21%".parse::<Percent>().is_err());
        assert!("-1%".parse::<Percent>().is_err());
        assert!("some".parse::<Percent>().is_err());
    }
}
