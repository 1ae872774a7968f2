//! `uroce ping`: both roles of rping.
//!
//! Owns the flags and what is printed. The peer may be rping on any RoCEv2 device.

mod data;
mod session;

use core::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};
use serde::Serialize;
use uroce::types::{RetryCount, RnrRetry};
use uroce::verbs::{PdHandle, QpCapabilities, QpHandle, QpInit, QpType};
use uroce_cm::id::IdOptions;
use uroce_cm::{ConnParam, IdEvent, IdHandle};

use self::session::Session;
use crate::conn::Connections;
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle, Node};
use crate::rdma::Poller;
use crate::report::{Output, remark};
use crate::stats::{Latencies, Latency};
use crate::stop;

/// Entries of the CQ: all sends and receives that can be outstanding.
const CQ_DEPTH: u32 = 32;

/// Flags of `uroce ping`, with the letters and defaults of rping.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("role").required(true).args(["server", "client"]))]
pub(crate) struct PingArgs {
    /// Serve
    #[arg(short, long)]
    server: bool,
    /// Ping a server
    #[arg(short, long, requires = "addr")]
    client: bool,
    /// Client: the server's address. Server: the address to serve on [default: all of the device]
    #[arg(short, long)]
    addr: Option<String>,
    /// Port of the service
    #[arg(short, long, default_value_t = 7174)]
    port: u16,
    /// Pings [default: for ever]
    #[arg(short = 'C', long, value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Bytes of a ping, 26 to 65535
    #[arg(short = 'S', long, default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(i64::from(data::SIZE_MIN)..=i64::from(data::SIZE_MAX)))]
    size: u32,
    /// Show the data of each ping
    #[arg(short, long)]
    verbose: bool,
    /// Check the data of each ping
    #[arg(short = 'V', long)]
    validate: bool,
    /// Show what happens beside the pings
    #[arg(short, long)]
    debug: bool,
    /// Server: serve one client after the other
    #[arg(short = 'P', long, requires = "server")]
    persistent: bool,
    /// Server: seconds of silence after which it asks whether its client lives, with a WRITE of nothing; 0: never
    #[arg(long, default_value_t = 5, requires = "server", value_parser = clap::value_parser!(u64).range(..=86_400))]
    probe: u64,
    /// Client: the address to ping from
    #[arg(short = 'I', long = "source", requires = "client")]
    source: Option<IpAddr>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR, pnet:IFNAME or hw:NAME [default:
    /// server: udp: on its address, or 127.0.0.1; client: the address from which the server is reached]
    #[arg(long)]
    device: Option<DeviceArg>,
}

/// Runs the command.
pub(crate) fn run(args: &PingArgs, out: &mut Output) -> Result<(), Failure> {
    let device = device(args)?;
    debug(args, format_args!("device {device}"));
    let mut node = Node::open(&device)?;
    let v = node.verbs();
    let mut connections = Connections::new(v)?;
    let done = if args.server { serve(args, v, &mut connections, out) } else { ping(args, v, &mut connections, out) };
    connections.farewell(v, &done);
    done
}

fn device(args: &PingArgs) -> Result<DeviceArg, Failure> {
    match (&args.device, &args.addr, args.source) {
        (Some(DeviceArg::Loop), ..) => {
            Err(Failure::Usage("a ping is between two processes; loop has one (try `uroce demo`)".into()))
        }
        (Some(device), ..) => Ok(device.clone()),
        (None, _, Some(source)) => Ok(DeviceArg::Udp(source)),
        (None, Some(host), None) if args.client => node::device_towards(host),
        (None, Some(host), None) => {
            let address = node::resolve(host)?;
            Ok(DeviceArg::Udp(if address.is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { address }))
        }
        (None, None, None) => Ok(DeviceArg::Udp(IpAddr::from([127, 0, 0, 1]))),
    }
}

fn debug(args: &PingArgs, what: impl core::fmt::Display) {
    if args.debug {
        remark(what);
    }
}

/// A QP as rping makes it, not yet connected.
fn make_qp(v: &mut Handle) -> Result<(PdHandle, QpHandle, Poller), Failure> {
    let pd = v.alloc_pd()?;
    let cq = v.create_cq(CQ_DEPTH)?;
    let caps = QpCapabilities { max_send_wr: 16, max_recv_wr: 2, ..QpCapabilities::default() };
    let init =
        QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
    let qp = v.create_qp(init)?;
    Ok((pd, qp, Poller::new(cq, qp)))
}

/// Both sides serve one READ and have one outstanding, as rping.
fn param() -> ConnParam<'static> {
    ConnParam {
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: RetryCount::MAX,
        rnr_retry_count: RnrRetry::FOREVER,
        ..ConnParam::default()
    }
}

/// What the client found.
#[derive(Serialize)]
struct Pinged {
    server: SocketAddr,
    size: u32,
    count: u32,
    validated: bool,
    /// Round trips in microseconds.
    latency: Latency,
}

fn ping(args: &PingArgs, v: &mut Handle, connections: &mut Connections, out: &mut Output) -> Result<(), Failure> {
    let host = args.addr.as_deref().unwrap_or_default();
    let server = SocketAddr::new(node::resolve(host)?, args.port);
    let (pd, qp, poller) = make_qp(v)?;
    let id = connections.prepare(v, args.source, server, IdOptions::default(), qp)?;
    let mut session = Session::new(v, pd, qp, poller, args.size)?;
    connections.connect(v, id, server, &param())?;
    debug(args, format_args!("connected to {server}"));
    let mut latencies = Latencies::new()?;
    let mut count = 0;
    while args.count.is_none_or(|limit| count < limit) {
        let begin = Instant::now();
        let came = match session.ping(v, count, &mut |v| connections.is_over(v, id)) {
            // There is no other end.
            Err(Failure::Stopped(_)) if args.count.is_none() => break,
            came => came?,
        };
        latencies.record(begin.elapsed());
        if args.verbose {
            out.line(format_args!("ping data: {}", data::shown(&came)))?;
            out.flush()?;
        }
        if args.validate && came != session.wanted(count) {
            return Err(Failure::Failed(format!("data mismatch in ping {count}")));
        }
        count += 1;
    }
    if !stop::has_come() {
        connections.disconnect(v, id)?;
    }
    debug(args, "client DISCONNECT EVENT...");
    let latency = latencies.figures(args.size.into(), 1.0);
    out.document("ping", &Pinged { server, size: args.size, count, validated: args.validate, latency })
}

/// What the server did.
#[derive(Serialize)]
struct Served {
    clients: u32,
    pings: u64,
}

fn serve(args: &PingArgs, v: &mut Handle, connections: &mut Connections, out: &mut Output) -> Result<(), Failure> {
    let own = node::gid(&v.query_gids(), None).map_or(IpAddr::from([0, 0, 0, 0]), |(_, gid)| gid.ip());
    let any = if own.is_ipv4() { IpAddr::from([0, 0, 0, 0]) } else { IpAddr::from([0u16; 8]) };
    let address = args.addr.as_deref().map(node::resolve).transpose()?.unwrap_or(any);
    connections.listen(v, SocketAddr::new(address, args.port), 10)?;
    debug(args, format_args!("listening on {own} port {}", args.port));
    let mut served = Served { clients: 0, pings: 0 };
    loop {
        let ended = match connections.next_request(v) {
            Ok(request) => serve_one(args, v, connections, &request, &mut served, out),
            Err(Failure::Stopped(by)) => Err(Failure::Stopped(by)),
            Err(failure) => return Err(failure),
        };
        match ended {
            // There is no other end.
            Err(Failure::Stopped(_)) if args.persistent => return out.document("ping", &served),
            Err(failure) if args.persistent && !matches!(failure, Failure::OutputClosed) => remark(failure),
            Err(failure) => return Err(failure),
            Ok(()) => {}
        }
        if !args.persistent {
            return out.document("ping", &served);
        }
    }
}

/// Serves one client to its end, and leaves nothing of it behind.
fn serve_one(
    args: &PingArgs,
    v: &mut Handle,
    connections: &mut Connections,
    request: &IdEvent,
    served: &mut Served,
    out: &mut Output,
) -> Result<(), Failure> {
    let id: IdHandle = request.id;
    let (pd, qp, poller) = make_qp(v)?;
    connections.attach(v, id, qp)?;
    let mut session = Session::new(v, pd, qp, poller, args.size)?;
    session.probe_after(Some(Duration::from_secs(args.probe)).filter(|after| !after.is_zero()));
    let answered = answer(args, v, connections, id, &mut session, served, out);
    connections.forget(v, id)?;
    session.close(v, pd)?;
    answered
}

fn answer(
    args: &PingArgs,
    v: &mut Handle,
    connections: &mut Connections,
    id: IdHandle,
    session: &mut Session,
    served: &mut Served,
    out: &mut Output,
) -> Result<(), Failure> {
    connections.accept(v, id, &param())?;
    debug(args, format_args!("connected to {}", connections.peer(id)));
    served.clients += 1;
    while let Some(text) = session.pong(v, &mut |v| connections.is_over(v, id))? {
        served.pings += 1;
        if args.verbose {
            out.line(format_args!("server ping data: {}", data::shown(&text)))?;
            out.flush()?;
        }
    }
    remark("server DISCONNECT EVENT...");
    connections.part(v, id)
}
