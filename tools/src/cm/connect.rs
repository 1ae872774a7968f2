//! `uroce cm connect`: both roles of ucmatose.
//!
//! Owns the sequence: all connections are made, the server sends its messages on each, the client sends as many back,
//! the server disconnects. A client sends back what it received, as ucmatose does, whose receives and sends have one
//! buffer: so a server can check its peer's bytes, whichever it is.

use core::net::SocketAddr;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use uroce::types::{RetryCount, RnrRetry};
use uroce::verbs::{QpHandle, QpType, WcStatus, WorkCompletion};
use uroce_cm::id::IdOptions;
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, IdHandle};

use super::crowd::{Crowd, News, Stage};
use super::program::{Hall, Lane, Program, Shape, is_send};
use super::{Ends, octet, pattern};
use crate::exit::Failure;
use crate::node::{Handle, Node};
use crate::rdma;
use crate::report::Output;

/// How long the end of a connection is told again should the peer have missed it.
const LINGER: Duration = Duration::from_millis(200);

/// A range of service ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Space {
    /// RDMA_PS_TCP
    Tcp,
    /// RDMA_PS_IB
    Ib,
}

/// Flags of `uroce cm connect`, with the letters and defaults of ucmatose.
#[derive(Args, Debug)]
pub(super) struct ConnectArgs {
    #[command(flatten)]
    ends: Ends,
    /// Port space
    #[arg(short = 'P', long, default_value = "tcp")]
    port_space: Space,
    /// Connections; both sides need the same number
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    connections: u32,
    /// Messages each way on each connection; both sides need the same number
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=16_384))]
    messages: u32,
    /// Bytes of a message; 0 sends none
    #[arg(short = 'S', long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=1 << 30))]
    size: u32,
    /// Type of service: DSCP and ECN of all packets
    #[arg(short, long, default_value_t = 0, value_parser = octet)]
    tos: u8,
    /// Port of the service
    #[arg(short, long, default_value_t = 7471)]
    port: u16,
    /// Client: check that each byte is what a uroce server sends. A server always checks what comes back
    #[arg(short = 'V', long, requires = "server")]
    validate: bool,
    /// Seconds without any progress after which it fails
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
}

impl ConnectArgs {
    const fn shape(&self) -> Shape {
        // No bytes, no messages.
        let messages = if self.size == 0 { 0 } else { self.messages };
        Shape { qp_type: QpType::Rc, connections: self.connections, messages, size: self.size }
    }

    const fn space(&self) -> PortSpace {
        match self.port_space {
            Space::Tcp => PortSpace::Tcp,
            Space::Ib => PortSpace::Ib,
        }
    }

    fn options(&self) -> IdOptions {
        IdOptions { tos: self.tos, ..IdOptions::default() }
    }

    fn param(&self) -> ConnParam<'static> {
        ConnParam {
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: RetryCount::new(5).unwrap_or(RetryCount::MAX),
            // ucmatose leaves its client's at 0: receives are there before the connection is.
            rnr_retry_count: if self.ends.server.is_some() {
                RnrRetry::new(0).unwrap_or(RnrRetry::FOREVER)
            } else {
                RnrRetry::FOREVER
            },
            ..ConnParam::default()
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &ConnectArgs, out: &mut Output) -> Result<(), Failure> {
    args.shape().check()?;
    let mut node = Node::open(&args.ends.device()?)?;
    let v = node.verbs();
    let server = args.ends.peer(args.port)?;
    let mut test = Test::new(args, v, server)?;
    let done = match server {
        Some(server) => client(&mut test, v, server, out),
        None => serve(&mut test, v, out),
    };
    test.hall.crowd.connections.farewell(v, &done);
    done
}

/// What both roles report.
#[derive(Serialize)]
struct Outcome {
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<SocketAddr>,
    connections: u32,
    /// Each way, on all connections.
    messages: u64,
    size: u32,
    /// Until the last connection was there.
    connect_seconds: f64,
    /// From the first message to the last.
    data_seconds: f64,
    /// Each byte was compared with what it must be.
    checked: bool,
}

fn client(test: &mut Test<'_>, v: &mut Handle, server: SocketAddr, out: &mut Output) -> Result<(), Failure> {
    let begin = Instant::now();
    let (all, total) = (test.args.connections.into(), test.shape.total());
    for _ in 0..test.args.connections {
        let number = test.hall.crowd.create(test.args.space(), test.args.options())?;
        test.hall.crowd.resolve_addr(v, number, test.args.ends.source())?;
    }
    test.until(v, "connections", all, established)?;
    let connected = begin.elapsed();
    test.until(v, "messages of the server", total, |h| h.received)?;
    for lane in &test.lanes {
        if let Some(came) = &lane.came {
            lane.lane.send(v, came, None)?;
        }
    }
    test.until(v, "disconnects by the server", all, over)?;
    let data = begin.elapsed().saturating_sub(connected);
    test.hall.crowd.connections.linger(v, LINGER)?;
    test.report(out, Some(server), connected, data, test.args.validate)
}

fn serve(test: &mut Test<'_>, v: &mut Handle, out: &mut Output) -> Result<(), Failure> {
    let address = test.args.ends.listen_on(v, test.args.port);
    let backlog = usize::try_from(test.args.connections).unwrap_or(1);
    test.hall.crowd.connections.listen_in(v, test.args.space(), address, backlog)?;
    while test.hall.crowd.len() == 0 {
        // However long it takes until somebody comes.
        test.hall.crowd.goes_on();
        test.turn(v, "a client")?;
    }
    let begin = test.begin.unwrap_or_else(Instant::now);
    let (all, total) = (test.args.connections.into(), test.shape.total());
    test.until(v, "connections", all, established)?;
    let connected = begin.elapsed();
    for (number, lane) in test.lanes.iter().enumerate() {
        lane.lane.send(v, &pattern::message(number, test.shape.size()), None)?;
    }
    test.until(v, "completions of sends", total, |h| h.sent)?;
    test.until(v, "messages of the client", total, |h| h.received)?;
    let data = begin.elapsed().saturating_sub(connected);
    for number in 0..test.hall.crowd.len() {
        test.hall.crowd.disconnect(v, number)?;
    }
    test.until(v, "disconnects", all, over)?;
    test.report(out, None, connected, data, true)
}

fn established(hall: &Hall) -> u64 {
    hall.crowd.count(Stage::Established) as u64
}

fn over(hall: &Hall) -> u64 {
    hall.crowd.count(Stage::Over) as u64
}

/// A connection's QP.
struct Track {
    lane: Lane,
    /// The first message that came: all others must be the same.
    came: Option<Vec<u8>>,
}

struct Test<'a> {
    args: &'a ConnectArgs,
    shape: Shape,
    hall: Hall,
    lanes: Vec<Track>,
    by_qp: BTreeMap<QpHandle, usize>,
    is_client: bool,
    /// When the first request came.
    begin: Option<Instant>,
}

impl<'a> Test<'a> {
    fn new(args: &'a ConnectArgs, v: &mut Handle, server: Option<SocketAddr>) -> Result<Self, Failure> {
        let shape = args.shape();
        let crowd = Crowd::new(v, server, Duration::from_secs(args.patience))?;
        let hall = Hall::new(v, crowd, shape)?;
        let (lanes, by_qp, is_client) = (Vec::new(), BTreeMap::new(), server.is_some());
        Ok(Self { args, shape, hall, lanes, by_qp, is_client, begin: None })
    }

    /// Makes the QP of a connection with its receives.
    fn lay(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        let lane = self.hall.lane(v)?;
        self.hall.crowd.attach(v, id, lane.qp)?;
        lane.receive(v)?;
        self.by_qp.insert(lane.qp, self.lanes.len());
        self.lanes.push(Track { lane, came: None });
        Ok(())
    }

    fn on_request(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        if self.lanes.len() as u64 >= u64::from(self.args.connections) {
            let most = self.args.connections;
            return self.hall.crowd.connections.reject(v, id, &format!("this server takes {most} connections"));
        }
        self.begin.get_or_insert_with(Instant::now);
        self.lay(v, id)?;
        self.hall.crowd.accept(v, id, &self.args.param()).map(drop)
    }

    /// A client's connection takes its next step.
    fn on_moved(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let Some(member) = self.hall.crowd.get(number) else { return Ok(()) };
        match member.stage {
            Stage::AddrResolved => self.hall.crowd.resolve_route(v, number),
            Stage::RouteResolved => {
                let id = member.id;
                self.lay(v, id)?;
                self.hall.crowd.connect(v, number, &self.args.param())
            }
            Stage::Over if self.hall.received < self.shape.total() => {
                let (came, total) = (self.hall.received, self.shape.total());
                Err(Failure::Failed(format!("the peer disconnected after {came} of {total} messages")))
            }
            _ => Ok(()),
        }
    }

    fn report(
        &self,
        out: &mut Output,
        server: Option<SocketAddr>,
        connected: Duration,
        data: Duration,
        checked: bool,
    ) -> Result<(), Failure> {
        let (connections, messages, size) = (self.args.connections, self.shape.total(), self.args.size);
        let (role, with) = match server {
            Some(server) => ("client", format!("to {server}")),
            None => ("server", format!("on port {}", self.args.port)),
        };
        let (connect_seconds, data_seconds) = (connected.as_secs_f64(), data.as_secs_f64());
        let how = if checked { "checked" } else { "not checked" };
        out.line(format_args!("{connections} connections {with} in {:.2} ms", connect_seconds * 1e3))?;
        out.line(format_args!("{messages} messages of {size} bytes each way in {:.2} ms, {how}", data_seconds * 1e3))?;
        let outcome = Outcome { role, server, connections, messages, size, connect_seconds, data_seconds, checked };
        out.document("cm connect", &outcome)
    }
}

impl Program for Test<'_> {
    fn hall(&mut self) -> &mut Hall {
        &mut self.hall
    }

    fn on_news(&mut self, v: &mut Handle, news: News) -> Result<(), Failure> {
        match news {
            News::Request(id) => self.on_request(v, id),
            News::Moved(number) => self.on_moved(v, number),
        }
    }

    fn on_completion(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<(), Failure> {
        if wc.status == WcStatus::WorkRequestFlushed && over(&self.hall) > 0 {
            return Ok(());
        }
        let wc = rdma::succeeded(v, wc, if is_send(wc) { "the SEND" } else { "a receive" })?;
        if is_send(&wc) {
            self.hall.sent += 1;
            return Ok(());
        }
        self.hall.received += 1;
        let Some(number) = self.by_qp.get(&wc.qp).copied() else { return Ok(()) };
        let Some(track) = self.lanes.get_mut(number) else { return Ok(()) };
        let bytes = track.lane.came(&wc)?;
        let wanted =
            if self.is_client { track.came.clone() } else { Some(pattern::message(number, self.shape.size())) };
        let wrong = wanted.and_then(|wanted| pattern::first_other(&bytes, &wanted));
        let wrong = wrong.or_else(|| self.args.validate.then(|| pattern::first_wrong(&bytes)).flatten());
        if let Some(at) = wrong {
            let message = wc.wr_id;
            return Err(Failure::Failed(format!("connection {number}, message {message}: byte {at} is wrong")));
        }
        track.came.get_or_insert(bytes);
        Ok(())
    }
}
