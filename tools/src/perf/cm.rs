//! `uroce perf cm`: how many connections a second come and go, and how long one takes to come about.
//!
//! Owns the closed loop: a client keeps a number of connections in the making, the server accepts and agrees when they
//! end. A connection is everything that a program does for one: on each side a QP made, moved through its states and
//! destroyed, and five messages of connection management. The last connection of a client says that it was the last.

use core::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use uroce::verbs::{
    AccessFlags, CqHandle, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, RecvWr, SendFlags,
    SendWr, WcStatus, WorkCompletion,
};
use uroce_cm::agent::CmError;
use uroce_cm::id::IdError;
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, EventKind, IdEvent, IdHandle};

use super::args::{Wait, seconds};
use crate::conn::Connections;
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle, Node};
use crate::progress::Progress;
use crate::rdma::Buffer;
use crate::report::Output;
use crate::stats::Latencies;
use crate::stop;

/// Bytes of the message of `--message`.
const MESSAGE: usize = 64;
/// Completions that may wait on one side.
const CQ_DEPTH: u32 = 16_384;
/// Connections that may be ending beside those in the making: an end that got lost is asked for again.
const ENDING_MAX: u64 = 8192;
/// Private data of the connection that says that no more follow.
const LAST: &[u8] = b"uroce perf cm: the last";
/// How long a server still answers a client that missed the end.
const LINGER: Duration = Duration::from_millis(200);
/// Longest sleep between two looks.
const SLICE: Duration = Duration::from_millis(5);

/// Flags of `uroce perf cm`. Without HOST this is the server.
#[derive(Args, Clone, Debug)]
pub(crate) struct ConnectionArgs {
    /// RoCEv2 address of the server; without it this is the server
    host: Option<String>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID][,receive=ring|calls], xdp:IFNAME, tap:IFNAME,ip=ADDR,
    /// pnet:IFNAME, hw:NAME, or loop for both ends in this process
    #[arg(short, long = "device", visible_alias = "ib-dev")]
    device: Option<DeviceArg>,
    /// Port of the service
    #[arg(short, long, default_value_t = 7471)]
    port: u16,
    /// Connections in all
    #[arg(short = 'n', long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    connections: u64,
    /// Go on for this many seconds, however many they are
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "connections", value_parser = seconds)]
    duration: Option<Duration>,
    /// Connections in the making at any time
    #[arg(short = 'q', long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1024))]
    at_once: u64,
    /// Send a message of 64 bytes on each before it ends
    #[arg(long)]
    message: bool,
    /// How to wait for what comes next [default: spin; the server: adaptive]
    #[arg(long)]
    wait: Option<Wait>,
    /// Server: go on with further clients, for ever
    #[arg(long)]
    forever: bool,
}

/// Runs the command.
pub(crate) fn run(args: &ConnectionArgs, out: &mut Output) -> Result<(), Failure> {
    let device = match (&args.device, &args.host) {
        (Some(DeviceArg::Loop), Some(_)) => {
            return Err(Failure::Usage("loop has both ends in this process; leave HOST out".into()));
        }
        (Some(device), _) => device.clone(),
        (None, Some(host)) => node::device_towards(host)?,
        (None, None) => DeviceArg::Udp(IpAddr::from([127, 0, 0, 1])),
    };
    if device == DeviceArg::Loop {
        return run_here(args, out);
    }
    let mut node = Node::open(&device)?;
    let v = node.verbs();
    let mut side = Side::new(args, v)?;
    let done = match &args.host {
        Some(host) => node::resolve(host).and_then(|host| client(&mut side, v, host, out)),
        None => side.listen(v).and_then(|()| serve(&mut side, v, out)),
    };
    side.connections.farewell(v, &done);
    done
}

/// Both ends in this process, each with a thread of its own.
fn run_here(args: &ConnectionArgs, out: &mut Output) -> Result<(), Failure> {
    let (mut near, mut far, there) = Node::pair()?;
    let theirs = ConnectionArgs { host: None, ..args.clone() };
    let (listening, ready) = std::sync::mpsc::channel();
    // It listens before the client starts, and ends with the process: the client's verdict is the command's.
    std::thread::spawn(move || -> Result<(), Failure> {
        let v = far.verbs();
        let mut side = Side::new(&theirs, v)?;
        side.listen(v)?;
        // The client waits for this word, so it is there.
        let _ = listening.send(());
        serve(&mut side, v, &mut Output::mute())
    });
    ready.recv().map_err(|_| Failure::failed("the other end did not start"))?;
    let v = near.verbs();
    client(&mut Side::new(args, v)?, v, there, out)
}

/// A connection of ours.
#[derive(Clone, Copy)]
struct Member {
    id: IdHandle,
    qp: QpHandle,
    begun: Instant,
}

/// What both roles have.
struct Side<'a> {
    args: &'a ConnectionArgs,
    connections: Connections,
    pd: PdHandle,
    cq: CqHandle,
    buffer: Buffer,
    /// By the slot of their id, and by that of their QP.
    by_id: Vec<Option<Member>>,
    by_qp: Vec<Option<IdHandle>>,
    /// How many there are.
    alive: u64,
    wait: Wait,
}

fn set<T: Clone>(table: &mut Vec<Option<T>>, slot: u32, value: Option<T>) {
    let slot = slot as usize;
    if slot >= table.len() {
        table.resize(slot + 1, None);
    }
    table[slot] = value;
}

impl<'a> Side<'a> {
    fn new(args: &'a ConnectionArgs, v: &mut Handle) -> Result<Self, Failure> {
        let mut connections = Connections::new(v)?;
        connections.list_rarely();
        let (pd, cq) = (v.alloc_pd()?, v.create_cq(CQ_DEPTH)?);
        let buffer = Buffer::new(v, pd, MESSAGE, AccessFlags::LOCAL_WRITE)?;
        let wait = args.wait.unwrap_or(if args.host.is_none() { Wait::Adaptive } else { Wait::Spin });
        Ok(Self { args, connections, pd, cq, buffer, by_id: Vec::new(), by_qp: Vec::new(), alive: 0, wait })
    }

    fn listen(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let gids = v.query_gids();
        let any = if gids.iter().any(|entry| entry.gid.ip().is_ipv4()) { "0.0.0.0" } else { "::" };
        let any = any.parse().map_err(Failure::failed)?;
        self.connections.listen(v, SocketAddr::new(any, self.args.port), 4096).map(drop)
    }

    /// Makes a QP for an id. One whose number waits in TIMEWAIT makes room for another.
    fn attach(&mut self, v: &mut Handle, id: IdHandle) -> Result<QpHandle, Failure> {
        let caps = QpCapabilities { max_send_wr: 4, max_recv_wr: 4, max_inline: 0, ..QpCapabilities::default() };
        let (pd, cq, qp_type) = (self.pd, self.cq, QpType::Rc);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = loop {
            let qp = v.create_qp(init)?;
            match self.connections.front().attach_qp(v, id, qp) {
                Ok(()) => break qp,
                Err(IdError::Cm(CmError::QpBusy(_))) => v.destroy_qp(qp)?,
                Err(error) => return Err(error.into()),
            }
        };
        set(&mut self.by_id, id.slot(), Some(Member { id, qp, begun: Instant::now() }));
        set(&mut self.by_qp, qp.slot(), Some(id));
        self.alive += 1;
        Ok(qp)
    }

    fn member(&self, id: IdHandle) -> Option<Member> {
        self.by_id.get(id.slot() as usize).copied().flatten().filter(|m| m.id == id)
    }

    /// Destroys an id and its QP.
    fn destroy(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        if let Some(member) = self.member(id) {
            v.destroy_qp(member.qp)?;
            set(&mut self.by_id, id.slot(), None);
            set(&mut self.by_qp, member.qp.slot(), None);
            self.alive -= 1;
        }
        self.connections.forget(v, id)
    }

    /// The ids whose message has completed.
    fn completed(&self, v: &mut Handle) -> Result<Vec<IdHandle>, Failure> {
        let Some(any) = self.by_id.iter().flatten().next() else { return Ok(Vec::new()) };
        let mut batch = [WorkCompletion::blank(any.qp); 16];
        let mut ids = Vec::new();
        loop {
            let n = v.poll_cq(self.cq, &mut batch)?;
            let done = batch.iter().take(n).filter(|wc| wc.status == WcStatus::Success);
            ids.extend(done.filter_map(|wc| self.by_qp.get(wc.qp.slot() as usize).copied().flatten()));
            if n < batch.len() {
                return Ok(ids);
            }
        }
    }

    /// The next event, without waiting.
    fn event(&mut self, v: &mut Handle) -> Result<Option<IdEvent>, Failure> {
        self.connections.event(v, Some(Duration::ZERO))
    }

    /// Nothing happened: waits, unless this side spins.
    fn rest(&mut self, v: &mut Handle) -> Result<(), Failure> {
        if self.wait == Wait::Spin { Ok(()) } else { self.connections.rest(v, SLICE) }
    }
}

/// What a client found.
#[derive(Serialize)]
struct Outcome {
    role: &'static str,
    server: SocketAddr,
    /// In the making at any time.
    at_once: u64,
    message: bool,
    /// That came about and ended.
    connections: u64,
    failed: u64,
    seconds: f64,
    connections_per_second: f64,
    /// From the making of the QP to ESTABLISHED, in microseconds.
    latency_us: Distribution,
}

#[derive(Serialize)]
struct Distribution {
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

/// A client at work.
struct Client<'a, 'b> {
    side: &'a mut Side<'b>,
    server: SocketAddr,
    begin: Instant,
    begun: u64,
    established: u64,
    ended: u64,
    failed: u64,
    latency: Latencies,
    farewell: bool,
}

fn client(side: &mut Side<'_>, v: &mut Handle, host: IpAddr, out: &mut Output) -> Result<(), Failure> {
    let args = side.args;
    let server = SocketAddr::new(host, args.port);
    let latency = Latencies::new()?;
    let begin = Instant::now();
    let (begun, established, ended, failed) = (0, 0, 0, 0);
    let mut client = Client { side, server, begin, begun, established, ended, failed, latency, farewell: false };
    let seconds = client.measure(v, out)?;
    let figures = client.latency.figures(0, 1.0);
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let connections_per_second = client.ended as f64 / seconds;
    let percentile = |p| client.latency.percentile(p);
    let latency_us = Distribution {
        p50: percentile(50.0),
        p90: percentile(90.0),
        p99: percentile(99.0),
        p99_9: percentile(99.9),
        max: figures.max,
    };
    let (connections, failed) = (client.ended, client.failed);
    let Distribution { p50, p90, p99, p99_9, max } = latency_us;
    out.line(format_args!(
        "{connections} connections to {server} in {seconds:.3} s: {connections_per_second:.0} connections/s, {failed} failed"
    ))?;
    out.line("latency [usec]        p50        p90        p99      p99.9        max")?;
    out.line(format_args!("connect        {p50:>10.1} {p90:>10.1} {p99:>10.1} {p99_9:>10.1} {max:>10.1}"))?;
    let (at_once, message) = (args.at_once, args.message);
    let role = "client";
    out.document(
        "perf cm",
        &Outcome { role, server, at_once, message, connections, failed, seconds, connections_per_second, latency_us },
    )?;
    client.say_farewell(v)
}

impl Client<'_, '_> {
    /// Makes and ends all connections. Returns how many seconds it took.
    fn measure(&mut self, v: &mut Handle, out: &Output) -> Result<f64, Failure> {
        let args = self.side.args;
        let progress = Progress::new(out, 100);
        let mut shown = 0;
        loop {
            let over = args.duration.is_some_and(|d| self.begin.elapsed() >= d);
            let wanted = if args.duration.is_some() { !over } else { self.begun < args.connections };
            if !wanted && self.ended + self.failed == self.begun {
                return Ok(self.begin.elapsed().as_secs_f64());
            }
            while wanted && self.may_begin() && (args.duration.is_some() || self.begun < args.connections) {
                self.begin_one(v)?;
            }
            if !self.turn(v)? {
                self.side.rest(v)?;
            }
            let percent = match args.duration {
                Some(d) => self.begin.elapsed().as_millis() * 100 / d.as_millis().max(1),
                None => u128::from((self.ended + self.failed) * 100 / args.connections),
            };
            while shown < percent.min(100) {
                progress.done();
                shown += 1;
            }
        }
    }

    fn may_begin(&self) -> bool {
        let making = self.begun - self.established - self.failed;
        let ending = self.established - self.ended;
        making < self.side.args.at_once && ending < ENDING_MAX
    }

    fn begin_one(&mut self, v: &mut Handle) -> Result<(), Failure> {
        self.begun += 1;
        let front = self.side.connections.front();
        let id = front.create_id(PortSpace::Tcp)?;
        Ok(front.resolve_addr(v, id, None, self.server)?)
    }

    /// Does what there is to do; says whether there was anything.
    fn turn(&mut self, v: &mut Handle) -> Result<bool, Failure> {
        let mut busy = false;
        while let Some(event) = self.side.event(v)? {
            self.on_event(v, &event)?;
            busy = true;
        }
        if self.side.args.message {
            for id in self.side.completed(v)? {
                // It may have ended meanwhile.
                let _ = self.side.connections.front().disconnect(v.now(), v, id);
                busy = true;
            }
        }
        Ok(busy)
    }

    fn on_event(&mut self, v: &mut Handle, event: &IdEvent) -> Result<(), Failure> {
        let id = event.id;
        match event.kind {
            EventKind::AddrResolved => self.side.connections.front().resolve_route(v, id)?,
            EventKind::RouteResolved => {
                self.side.attach(v, id)?;
                let private_data = if self.farewell { LAST } else { &[] };
                let param = ConnParam { private_data, ..ConnParam::default() };
                self.side.connections.front().connect(v.now(), v, id, &param)?;
            }
            EventKind::Established => {
                let Some(member) = self.side.member(id) else { return Ok(()) };
                self.established += 1;
                if !self.farewell {
                    self.latency.record(member.begun.elapsed());
                }
                if self.side.args.message && !self.farewell {
                    self.send(v, member.qp)?;
                } else {
                    self.side.connections.front().disconnect(v.now(), v, id)?;
                }
            }
            EventKind::Disconnected => {
                self.side.destroy(v, id)?;
                self.ended += 1;
            }
            EventKind::TimewaitExit | EventKind::AddrChange => {}
            _ if self.established == 0 || event.kind == EventKind::AddrError => {
                return Err(self.side.connections.explain(self.server, event));
            }
            _ => {
                self.side.destroy(v, id)?;
                self.failed += 1;
            }
        }
        Ok(())
    }

    fn send(&self, v: &mut Handle, qp: QpHandle) -> Result<(), Failure> {
        let wr = SendWr {
            wr_id: 0,
            operation: Operation::Send,
            payload: Payload::Sges(&[self.side.buffer.sge(0, MESSAGE)]),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        Ok(v.post_send(qp, &[wr])?)
    }

    /// One more connection, which says that it is the last.
    fn say_farewell(&mut self, v: &mut Handle) -> Result<(), Failure> {
        self.farewell = true;
        let over = self.ended + self.failed + 1;
        self.begin_one(v)?;
        while self.ended + self.failed < over {
            if !self.turn(v)? {
                self.side.connections.rest(v, SLICE)?;
            }
        }
        Ok(())
    }
}

/// What a server did.
#[derive(Serialize)]
struct Served {
    role: &'static str,
    /// That came and went.
    connections: u64,
    /// From the first request to the last end.
    accepts_per_second: f64,
}

fn serve(side: &mut Side<'_>, v: &mut Handle, out: &mut Output) -> Result<(), Failure> {
    let (mut first, mut last) = (None, Instant::now());
    let (mut ended, mut over) = (0u64, false);
    while side.args.forever || !over || side.alive > 0 {
        let mut busy = false;
        // A signal is the only end of a server that goes on for ever.
        let next = match side.event(v) {
            Err(Failure::Stopped(_)) if side.args.forever => break,
            next => next?,
        };
        if let Some(event) = next {
            busy = true;
            match event.kind {
                EventKind::ConnectRequest => {
                    first.get_or_insert_with(Instant::now);
                    over |= event.param.private_data.starts_with(LAST);
                    accept(side, v, event.id)?;
                }
                EventKind::Disconnected => {
                    // Agrees, where there is anybody to agree with.
                    let _ = side.connections.front().disconnect(v.now(), v, event.id);
                    side.destroy(v, event.id)?;
                    (ended, last) = (ended + 1, Instant::now());
                }
                EventKind::Rejected | EventKind::Unreachable | EventKind::ConnectError => side.destroy(v, event.id)?,
                _ => {}
            }
        }
        side.completed(v)?;
        if !busy {
            side.rest(v)?;
        }
    }
    if !stop::has_come() {
        side.connections.linger(v, LINGER)?;
    }
    let seconds = last.saturating_duration_since(first.unwrap_or(last)).as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let accepts_per_second = if seconds > 0.0 { ended as f64 / seconds } else { 0.0 };
    out.line(format_args!("{ended} connections came and went: {accepts_per_second:.0} accepts/s"))?;
    out.document("perf cm", &Served { role: "server", connections: ended, accepts_per_second })
}

fn accept(side: &mut Side<'_>, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
    let qp = side.attach(v, id)?;
    v.post_recv(qp, &[RecvWr { wr_id: 0, sges: &[side.buffer.sge(0, MESSAGE)] }])?;
    match side.connections.front().accept(v.now(), v, id, &ConnParam::default()) {
        Ok(_) => Ok(()),
        // The client has lost patience meanwhile.
        Err(_) => side.destroy(v, id),
    }
}
