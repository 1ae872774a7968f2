//! `uroce perf`: bandwidth and latency of SEND, WRITE, READ and atomics between two uroce endpoints, with perftest's
//! flags and tables.
//!
//! Owns the order of a test. The other side is `uroce perf`, too: perftest's own exchange is not spoken.

mod args;
mod cm;
mod content;
mod layout;
mod run;
mod side;
mod wire;

use core::net::{IpAddr, SocketAddr};
use std::fs::File;
use std::time::Instant;

use clap::{Args, Subcommand};
use serde::Serialize;
use uroce::types::{AckTimeout, Gid, PathMtu, Qpn};
use uroce::verbs::Remote;
use uroce_cm::id::IdOptions;
use uroce_cm::{ConnParam, IdEvent, IdHandle};

pub(crate) use self::args::PerfArgs;
use self::args::{Bare, Direction, Operation, Wait};
use self::layout::End;
use self::run::CHECKED_MESSAGES;
use self::side::{Heard, Needs, Plan, SLICE, Side};
use self::wire::{Control, Hello};
use crate::conn::Connections;
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle, Node};
use crate::report::Output;
use crate::stats::{Bandwidth, Latencies, Latency, Mark};

/// Contents that are checked after each size, beside that of the messages that were measured.
const CHECKED_CONTENTS: u64 = 4;
/// QPs of one test at most.
const QPS_MAX: u8 = 64;

/// What `uroce perf` measures: messages, or connections.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct PerfCommand {
    #[command(subcommand)]
    connections: Option<ConnectionCommand>,
    #[command(flatten)]
    messages: Option<PerfArgs>,
}

#[derive(Subcommand, Debug)]
enum ConnectionCommand {
    /// Measure connections a second, and how long one takes
    Cm(cm::ConnectionArgs),
}

/// Runs the command.
pub(crate) fn run(command: &PerfCommand, out: &mut Output) -> Result<(), Failure> {
    match (&command.connections, &command.messages) {
        (Some(ConnectionCommand::Cm(args)), _) => cm::run(args, out),
        (None, Some(args)) => run_messages(args, out),
        (None, None) => Err(Failure::Usage("say what to measure: send, write, read or atomic, or cm".into())),
    }
}

fn run_messages(args: &PerfArgs, out: &mut Output) -> Result<(), Failure> {
    args.check()?;
    let device = match (&args.device, &args.host) {
        (Some(device), _) => device.clone(),
        (None, Some(host)) => node::device_towards(host)?,
        (None, None) => DeviceArg::Udp(IpAddr::from([127, 0, 0, 1])),
    };
    if device == DeviceArg::Loop {
        return run_here(args, out);
    }
    args.pin(false)?;
    let mut node = Node::open(&device)?;
    // Who answers at once is told of a message before it is acknowledged, if another thread would see to that. The peer of
    // one who sleeps is better woken by the ACK.
    let attended = match args.wait(args.host.is_some()) {
        Wait::Spin => true,
        Wait::Adaptive => args.direction == Direction::Lat,
        Wait::Block => false,
    };
    if attended {
        node.attend()?;
    }
    let v = node.verbs();
    let mut test = Test::new(args, device, args.host.is_some(), v, out)?;
    let done = match &args.host {
        Some(host) => node::resolve(host).and_then(|host| test.client(v, host)),
        None => test.server(v),
    };
    test.connections.farewell(v, &done);
    done
}

/// Both ends in this process, each with a thread of its own.
fn run_here(args: &PerfArgs, out: &mut Output) -> Result<(), Failure> {
    let (mut near, mut far, there) = Node::pair()?;
    let theirs = args.clone();
    // It listens before the client starts, and ends with the process: the client's verdict is the command's.
    let (listening, ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> Result<(), Failure> {
        theirs.pin(true)?;
        let (v, mut mute) = (far.verbs(), Output::mute());
        let mut test = Test::new(&theirs, DeviceArg::Loop, false, v, &mut mute)?;
        test.listen(v)?;
        // The client waits for this word, so it is there.
        let _ = listening.send(());
        test.serve_one(v)
    });
    ready.recv().map_err(|_| Failure::failed("the other end did not start"))?;
    // Threads are allowed the processors of the thread that made them: not before the other one is there.
    args.pin(false)?;
    let v = near.verbs();
    Test::new(args, DeviceArg::Loop, true, v, out)?.client(v, there)
}

struct Test<'a> {
    args: &'a PerfArgs,
    device: DeviceArg,
    gid_index: u8,
    gid: Gid,
    is_client: bool,
    /// WRITEs of a ping-pong carry immediate data, so that they wake a peer that sleeps.
    announced: bool,
    connections: Connections,
    ids: Vec<IdHandle>,
    out: &'a mut Output,
}

/// Figures of one size.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
enum Figures {
    Bandwidth(Bandwidth),
    Latency(Latency),
}

impl<'a> Test<'a> {
    fn new(
        args: &'a PerfArgs,
        device: DeviceArg,
        is_client: bool,
        v: &mut Handle,
        out: &'a mut Output,
    ) -> Result<Self, Failure> {
        let (gid_index, gid) = node::gid(&v.query_gids(), args.gid_index)?;
        v.set_poll_policy(args.wait(is_client).policy());
        let (announced, connections) = (args.is_announced(), Connections::new(v)?);
        Ok(Self { args, device, gid_index, gid, is_client, announced, connections, ids: Vec::new(), out })
    }

    fn plan(&self, size: u64, seed: u64) -> Plan {
        let args = self.args;
        let is_ping_pong = args.direction == Direction::Lat && !args.operation.is_one_sided_fetch();
        Plan {
            operation: args.operation,
            is_ping_pong,
            announced: self.announced,
            atomic: args.atomic,
            size: usize::try_from(size).unwrap_or(0),
            messages: args.iterations(),
            duration: args.duration,
            depth: args.depth(),
            moderation: args.moderation(),
            inline: usize::try_from(args.inline).unwrap_or(0),
            list: usize::try_from(args.post_list).unwrap_or(1),
            seed,
        }
    }

    fn needs(&self, qps: u8, rx_depth: u32, size_max: u64) -> Needs {
        let (args, queue) = (self.args, self.args.queue());
        let (operation, inline, wait) = (args.operation, args.inline, args.wait(self.is_client));
        Needs { operation, qps, queue, rx_depth, inline, size_max, wait }
    }

    /// perftest's text is for people and their scripts; `--output` wants one number alone.
    fn text(&mut self, text: impl core::fmt::Display) -> Result<(), Failure> {
        if self.args.output.is_some() {
            return Ok(());
        }
        self.out.line(text)?;
        self.out.flush()
    }

    fn client(&mut self, v: &mut Handle, host: IpAddr) -> Result<(), Failure> {
        let args = self.args;
        let server = SocketAddr::new(host, args.port);
        let sizes = args.sizes();
        let largest = sizes.iter().copied().max().unwrap_or(1);
        let qps = u8::try_from(args.qps).unwrap_or(1);
        let mut side = Side::new(v, &self.needs(qps, args.rx_depth, largest))?;
        let ends = self.connect(v, &mut side, server, largest)?;
        self.preamble(v, &ends)?;
        let mut results = Vec::new();
        // Of the contents that are checked, no two are alike.
        let mut seeds = 1..;
        for size in sizes {
            let plan = self.plan(size, if args.verify { seeds.next().unwrap_or(1) } else { 0 });
            let figures = self.measure(v, &mut side, &plan)?;
            if args.verify && args.direction == Direction::Bw {
                for seed in seeds.by_ref().take(CHECKED_CONTENTS as usize) {
                    let few = Plan { seed, messages: CHECKED_MESSAGES, duration: None, ..plan };
                    exchange(v, &mut side, &few, |v, side| side.blast(v, &few))?;
                }
            }
            let row = self.row(&figures);
            side.tell(v, &Control::Stop(row.clone()))?;
            side.expect_ready(v)?;
            self.text(row)?;
            results.push(figures);
        }
        self.text(layout::RULER)?;
        for id in core::mem::take(&mut self.ids) {
            self.connections.disconnect(v, id)?;
        }
        self.results(&results)
    }

    fn measure(&self, v: &mut Handle, side: &mut Side, plan: &Plan) -> Result<Figures, Failure> {
        let (args, size) = (self.args, plan.size as u64);
        match args.direction {
            Direction::Lat => exchange(v, side, plan, |v, side| self.latency(v, side, plan)),
            Direction::Bw if args.bidirectional => {
                let mut begin = Instant::now();
                let marks = exchange(v, side, plan, |v, side| {
                    begin = Instant::now();
                    side.blast(v, plan)
                })?;
                // The server answered once its own messages were through as well.
                let messages = 2 * marks.last().map_or(0, |m| m.messages);
                let both = [Mark { messages, at: begin.elapsed() }];
                Ok(Figures::Bandwidth(Bandwidth::of(size, &both, args.peak_window())))
            }
            Direction::Bw => {
                let marks = exchange(v, side, plan, |v, side| side.blast(v, plan))?;
                Ok(Figures::Bandwidth(Bandwidth::of(size, &marks, args.peak_window())))
            }
        }
    }

    fn connect(
        &mut self,
        v: &mut Handle,
        side: &mut Side,
        server: SocketAddr,
        largest: u64,
    ) -> Result<Vec<(End, End)>, Failure> {
        let args = self.args;
        let mut options = IdOptions::default();
        options.path_mtu = args.mtu.and_then(|m| PathMtu::from_bytes(usize::try_from(m).ok()?));
        options.ack_timeout = AckTimeout::new(args.qp_timeout).unwrap_or(options.ack_timeout);
        let hello = Hello::of(args, largest, side.memory()).to_bytes();
        let param = self.param(&hello);
        let mut ends = Vec::new();
        for index in 0..side.qps.len() {
            let qp = side.qps[index];
            let id = self.connections.prepare(v, Some(self.gid.ip()), server, options, qp)?;
            side.post_receives(v, index)?;
            let accepted = self.connections.connect(v, id, server, &param)?;
            let memory = wire::memory_from_bytes(&accepted.private_data);
            side.peers[index] = memory.ok_or_else(|| Failure::failed("the server did not say where its memory is"))?;
            self.ids.push(id);
            ends.push(self.ends(v, side, index, accepted.qp_num, Gid::from(server.ip()))?);
        }
        Ok(ends)
    }

    fn param<'b>(&self, private_data: &'b [u8]) -> ConnParam<'b> {
        let outs = self.args.outstanding_reads();
        ConnParam { responder_resources: outs, initiator_depth: outs, private_data, ..ConnParam::default() }
    }

    fn ends(&self, v: &Handle, side: &Side, index: usize, peer: Qpn, gid: Gid) -> Result<(End, End), Failure> {
        let info = v.query_qp(side.qps[index])?;
        let shown = |memory: Remote| (self.args.operation != Operation::Send).then_some(memory);
        let local = End {
            qpn: info.qpn,
            psn: info.attr.sq_psn.unwrap_or_default(),
            gid: self.gid,
            memory: shown(side.memory()),
        };
        let remote =
            End { qpn: peer, psn: info.attr.rq_psn.unwrap_or_default(), gid, memory: shown(side.peers[index]) };
        Ok((local, remote))
    }

    fn preamble(&mut self, v: &Handle, ends: &[(End, End)]) -> Result<(), Failure> {
        let mtu = self.args.mtu.map_or(v.query_port().active_mtu.bytes(), |m| usize::try_from(m).unwrap_or(0));
        let device = self.device.to_string();
        self.text(layout::preamble(self.args, &device, self.gid_index, mtu))?;
        for (local, remote) in ends {
            self.text(layout::address("local", local))?;
            self.text(layout::address("remote", remote))?;
        }
        self.text(layout::RULER)?;
        self.text(layout::header(self.args.direction, self.args.unit(), self.args.duration.is_some()))
    }

    fn latency(&self, v: &mut Handle, side: &mut Side, plan: &Plan) -> Result<Figures, Failure> {
        let mut latencies = Latencies::new()?;
        side.bounce(v, plan, |round_trip| latencies.record(round_trip))?;
        // SEND and WRITE go there and back; READ and atomics are one operation.
        let share = if self.args.operation.is_one_sided_fetch() { 1.0 } else { 2.0 };
        Ok(Figures::Latency(latencies.figures(plan.size as u64, share)))
    }

    fn row(&self, figures: &Figures) -> String {
        match figures {
            Figures::Bandwidth(b) => layout::bandwidth_row(b, self.args.unit()),
            Figures::Latency(l) if self.args.duration.is_some() => layout::timed_latency_row(l),
            Figures::Latency(l) => layout::latency_row(l),
        }
    }

    /// The bare number, the JSON documents and the limits.
    fn results(&mut self, results: &[Figures]) -> Result<(), Failure> {
        let args = self.args;
        let document = Document { test_info: Info::new(args, &self.device), results };
        self.out.document("perf", &document)?;
        if args.out_json {
            let path = args.out_json_file.display();
            let cannot = |e: std::io::Error| Failure::Environment(format!("cannot write {path}: {e}"));
            let file = File::create(&args.out_json_file).map_err(cannot)?;
            serde_json::to_writer_pretty(file, &document)?;
        }
        for figures in results {
            match (args.output, figures) {
                (Some(Bare::Bandwidth), Figures::Bandwidth(b)) => {
                    self.out.line(format_args!("{:.2}", args.unit().of(b.average)))?;
                }
                (Some(Bare::MessageRate), Figures::Bandwidth(b)) => {
                    self.out.line(format_args!("{:.6}", b.messages_per_second / 1e6))?;
                }
                (Some(Bare::Latency), Figures::Latency(l)) => self.out.line(format_args!("{:.2}", l.average))?,
                _ => {}
            }
        }
        results.iter().try_for_each(|figures| check_limits(args, figures))
    }

    fn server(&mut self, v: &mut Handle) -> Result<(), Failure> {
        const STARS: &str = "************************************";
        self.listen(v)?;
        self.text(format_args!("\n{STARS}\n* Waiting for client to connect... *\n{STARS}"))?;
        self.serve_one(v)
    }

    fn listen(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let address = SocketAddr::new(self.gid.ip(), self.args.port);
        self.connections.listen(v, address, usize::from(QPS_MAX))?;
        Ok(())
    }

    /// Serves one client, from its request to its leave.
    fn serve_one(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let (hello, first) = self.welcome(v)?;
        self.announced = hello.announced;
        let qps = hello.qps.clamp(1, QPS_MAX);
        let receives = hello.rx_depth.clamp(1, 16_384);
        let mut side = Side::new(v, &self.needs(qps, receives, hello.size_max))?;
        let mut ends = Vec::new();
        let mut request = first;
        for index in 0..side.qps.len() {
            if index > 0 {
                request = self.welcome(v)?.1;
            }
            let theirs = Hello::from_bytes(&request.param.private_data).map_or(hello.memory, |h| h.memory);
            let qp = side.qps[index];
            self.connections.attach(v, request.id, qp)?;
            side.post_receives(v, index)?;
            side.peers[index] = theirs;
            let memory = wire::memory_to_bytes(side.memory());
            let param = self.param(&memory);
            self.connections.accept(v, request.id, &param)?;
            self.ids.push(request.id);
            let gid = Gid::from(self.connections.peer(request.id).ip());
            ends.push(self.ends(v, &side, index, request.param.qp_num, gid)?);
        }
        self.preamble(v, &ends)?;
        let rows = self.serve(v, &mut side, &hello)?;
        self.text(layout::RULER)?;
        for id in core::mem::take(&mut self.ids) {
            self.connections.part(v, id)?;
        }
        self.out.document("perf", &Served { role: "server", rows: &rows })
    }

    /// The next request of a client that wants this test; others are refused with the reason.
    fn welcome(&mut self, v: &mut Handle) -> Result<(Hello, IdEvent), Failure> {
        loop {
            let request = self.connections.next_request(v)?;
            let args = self.args;
            let why = match Hello::from_bytes(&request.param.private_data) {
                None => "this is a uroce perf server; its client is uroce perf",
                Some(hello) if (hello.operation, hello.direction) != (args.operation, args.direction) => {
                    "the server runs another test; start both with the same operation"
                }
                Some(hello) if hello.size_max > side::SIZE_MAX => "messages of that size are not measured",
                Some(hello) => return Ok((hello, request)),
            };
            self.connections.reject(v, request.id, why)?;
        }
    }

    /// Does what the client asks for until it disconnects. Returns the rows that it told.
    fn serve(&mut self, v: &mut Handle, side: &mut Side, hello: &Hello) -> Result<Vec<String>, Failure> {
        let mut rows = Vec::new();
        let mut looked = Instant::now();
        // Of the messages that are under way.
        let mut plan = None;
        loop {
            let mut control = match side.next(v)? {
                Heard::Control(control) => Some(control),
                Heard::Over => return Ok(rows),
                Heard::Nothing if looked.elapsed() >= SLICE => {
                    if self.over(v)? {
                        return Ok(rows);
                    }
                    looked = Instant::now();
                    None
                }
                _ => None,
            };
            if let Some(Control::Start { size, messages, seed }) = control {
                if size == 0 || size > hello.size_max {
                    return Err(Failure::Failed(format!("the client wants {size} bytes, and announced less")));
                }
                let started = Plan { messages, duration: None, ..self.plan(size, seed) };
                side.lay_out(&started)?;
                side.tell(v, &Control::Ready)?;
                control = None;
                if started.is_ping_pong {
                    side.watch_awake(&started);
                    control = Some(side.echo(v, &started)?);
                } else if hello.bidirectional {
                    side.blast(v, &started)?;
                }
                plan = Some(started);
            }
            if let Some(Control::Stop(row)) = control {
                // What a READ brought is at the client.
                let sent = plan.take().filter(|plan| plan.operation != Operation::Read);
                let answer = match sent.map(|plan| side.difference(&plan)).transpose()?.flatten() {
                    Some(at) => Control::Differs(at),
                    None => Control::Ready,
                };
                side.tell(v, &answer)?;
                if !row.is_empty() {
                    self.text(&row)?;
                    rows.push(row);
                }
            }
        }
    }

    fn over(&mut self, v: &mut Handle) -> Result<bool, Failure> {
        match self.ids.first().copied() {
            Some(id) => self.connections.is_over(v, id),
            None => Ok(true),
        }
    }
}

/// What the client does of one size: announces it, lets `run` move the messages, and has both sides look at what came.
fn exchange<T>(
    v: &mut Handle,
    side: &mut Side,
    plan: &Plan,
    run: impl FnOnce(&mut Handle, &mut Side) -> Result<T, Failure>,
) -> Result<T, Failure> {
    side.lay_out(plan)?;
    side.tell(v, &Control::Start { size: plan.size as u64, messages: plan.messages, seed: plan.seed })?;
    side.expect_ready(v)?;
    let done = run(v, side)?;
    side.tell(v, &Control::Stop(String::new()))?;
    side.expect_ready(v)?;
    // A ping-pong and a READ bring something here, too.
    let brings = plan.is_ping_pong || plan.operation == Operation::Read;
    match side.difference(plan)?.filter(|_| brings) {
        Some(at) => Err(side::differs(at)),
        None => Ok(done),
    }
}

fn check_limits(args: &PerfArgs, figures: &Figures) -> Result<(), Failure> {
    let Figures::Bandwidth(b) = figures else { return Ok(()) };
    let (average, unit) = (args.unit().of(b.average), args.unit().name());
    if let Some(limit) = args.limit_bw.filter(|limit| average < *limit) {
        let size = b.size;
        return Err(Failure::Limit(format!("{size} bytes: {average:.2} {unit} is below the limit of {limit} {unit}")));
    }
    let rate = b.messages_per_second / 1e6;
    if let Some(limit) = args.limit_rate.filter(|limit| rate < *limit) {
        return Err(Failure::Limit(format!("{} bytes: {rate:.6} Mpps is below the limit of {limit} Mpps", b.size)));
    }
    Ok(())
}

/// perftest's JSON, bandwidths in bytes a second and latencies in microseconds.
#[derive(Serialize)]
struct Document<'a> {
    test_info: Info,
    results: &'a [Figures],
}

#[derive(Serialize)]
struct Info {
    test: String,
    #[serde(rename = "Device")]
    device: String,
    #[serde(rename = "Number_of_qps")]
    qps: u32,
    #[serde(rename = "Transport_type")]
    transport: &'static str,
    #[serde(rename = "Connection_type")]
    connection: &'static str,
    #[serde(rename = "TX_depth")]
    depth: u32,
    bidirectional: bool,
    wait: Wait,
    verified: bool,
}

impl Info {
    fn new(args: &PerfArgs, device: &DeviceArg) -> Self {
        Self {
            test: layout::title(args),
            device: device.to_string(),
            qps: args.qps,
            transport: "IB",
            connection: "RC",
            depth: args.depth(),
            bidirectional: args.bidirectional,
            wait: args.wait(true),
            verified: args.verify,
        }
    }
}

#[derive(Serialize)]
struct Served<'a> {
    role: &'static str,
    rows: &'a [String],
}
