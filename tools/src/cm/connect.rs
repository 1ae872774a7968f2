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
use uroce::verbs::{
    AccessFlags, CqHandle, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, RecvWr, SendFlags,
    SendWr, WcOpcode, WcStatus, WorkCompletion,
};
use uroce_cm::id::IdOptions;
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, IdHandle};

use super::crowd::{Crowd, News, SLICE, Stage};
use super::{Ends, pattern};
use crate::exit::Failure;
use crate::node::{Handle, Node};
use crate::rdma::{self, Buffer, Poller};
use crate::report::Output;

/// Bytes of all receives and sends together.
const MEMORY_MAX: u64 = 1 << 30;
/// Marks the completions of sends.
const SEND_WR: u64 = 1 << 32;
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
    #[arg(short, long, default_value_t = 0, value_parser = clap_number)]
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

/// A number, decimal or with 0x.
fn clap_number(text: &str) -> Result<u8, String> {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u8::from_str_radix(hex, 16));
    parsed.map_err(|_| "a type of service is 0 to 255, or 0x00 to 0xff".into())
}

impl ConnectArgs {
    /// Messages each way on each connection: none without bytes.
    const fn count(&self) -> u32 {
        if self.size == 0 { 0 } else { self.messages }
    }

    fn size(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    fn total(&self) -> u64 {
        u64::from(self.connections) * u64::from(self.count())
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
    let memory = u64::from(args.connections) * (u64::from(args.count()) + 1) * u64::from(args.size);
    if memory > MEMORY_MAX {
        let most = MEMORY_MAX >> 20;
        return Err(Failure::Usage(format!(
            "{memory} bytes of receives are more than {most} MiB; try a smaller -c, -C or -S"
        )));
    }
    let mut node = Node::open(&args.ends.device()?)?;
    let v = node.verbs();
    let server = args.ends.peer(args.port)?;
    let mut test = Test::new(args, v, server)?;
    let done = match server {
        Some(server) => client(&mut test, v, server, out),
        None => serve(&mut test, v, out),
    };
    if done.is_err() {
        test.crowd.give_up(v);
    }
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
    for _ in 0..test.args.connections {
        let number = test.crowd.create(test.space(), test.args.options())?;
        test.crowd.resolve_addr(v, number, test.args.ends.source())?;
    }
    test.until(v, "connections", test.args.connections.into(), |t| t.crowd.count(Stage::Established) as u64)?;
    let connected = begin.elapsed();
    test.until(v, "messages of the server", test.args.total(), |t| t.received)?;
    test.reply(v)?;
    test.until(v, "disconnects by the server", test.args.connections.into(), |t| t.crowd.count(Stage::Over) as u64)?;
    let data = begin.elapsed().saturating_sub(connected);
    test.crowd.connections.linger(v, LINGER)?;
    test.report(out, Some(server), connected, data, test.args.validate)
}

fn serve(test: &mut Test<'_>, v: &mut Handle, out: &mut Output) -> Result<(), Failure> {
    let address = test.args.ends.listen_on(v, test.args.port);
    let backlog = usize::try_from(test.args.connections).unwrap_or(1);
    test.crowd.connections.listen_in(v, test.space(), address, backlog)?;
    while test.crowd.len() == 0 {
        // However long it takes until somebody comes.
        test.crowd.goes_on();
        test.turn(v, "a client")?;
    }
    let begin = test.begin.unwrap_or_else(Instant::now);
    test.until(v, "connections", test.args.connections.into(), |t| t.crowd.count(Stage::Established) as u64)?;
    let connected = begin.elapsed();
    for number in 0..test.lanes.len() {
        let message = pattern::message(number, test.args.size());
        test.send(v, number, &message)?;
    }
    let total = test.args.total();
    test.until(v, "completions of sends", total, |t| t.sent)?;
    test.until(v, "messages of the client", total, |t| t.received)?;
    let data = begin.elapsed().saturating_sub(connected);
    for number in 0..test.crowd.len() {
        test.crowd.disconnect(v, number)?;
    }
    test.until(v, "disconnects", test.args.connections.into(), |t| t.crowd.count(Stage::Over) as u64)?;
    test.report(out, None, connected, data, true)
}

/// What a connection has besides its id.
struct Lane {
    qp: QpHandle,
    /// A slot for each receive, and behind them what is sent.
    buffer: Buffer,
    /// The first message that came: all others must be the same.
    came: Option<Vec<u8>>,
}

struct Test<'a> {
    args: &'a ConnectArgs,
    crowd: Crowd,
    pd: PdHandle,
    cq: CqHandle,
    poller: Option<Poller>,
    lanes: Vec<Lane>,
    by_qp: BTreeMap<QpHandle, usize>,
    is_client: bool,
    /// When the first request came.
    begin: Option<Instant>,
    sent: u64,
    received: u64,
}

impl<'a> Test<'a> {
    fn new(args: &'a ConnectArgs, v: &mut Handle, server: Option<SocketAddr>) -> Result<Self, Failure> {
        let depth = u32::try_from(args.total().saturating_mul(2)).unwrap_or(u32::MAX).max(1);
        let pd = v.alloc_pd()?;
        let cq = v.create_cq(depth).map_err(|e| Failure::Usage(format!("-c times -C is too much: {e}")))?;
        let crowd = Crowd::new(v, server, Duration::from_secs(args.patience))?;
        let (lanes, by_qp, is_client) = (Vec::new(), BTreeMap::new(), server.is_some());
        Ok(Self { args, crowd, pd, cq, poller: None, lanes, by_qp, is_client, begin: None, sent: 0, received: 0 })
    }

    const fn space(&self) -> PortSpace {
        match self.args.port_space {
            Space::Tcp => PortSpace::Tcp,
            Space::Ib => PortSpace::Ib,
        }
    }

    /// Makes the QP of connection `number` with its receives.
    fn lay(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        let (count, size) = (self.args.count(), self.args.size());
        let caps = QpCapabilities { max_send_wr: count.max(1), max_recv_wr: count.max(1), ..QpCapabilities::default() };
        let (pd, cq, qp_type) = (self.pd, self.cq, QpType::Rc);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = v.create_qp(init)?;
        self.crowd.attach(v, id, qp)?;
        let slots = usize::try_from(count).unwrap_or(0) + 1;
        let buffer = Buffer::new(v, pd, slots.saturating_mul(size).max(1), AccessFlags::LOCAL_WRITE)?;
        for slot in 0..slots - 1 {
            let sge = [buffer.sge(slot * size, size)];
            v.post_recv(qp, &[RecvWr { wr_id: slot as u64, sges: &sge }])?;
        }
        self.poller.get_or_insert_with(|| Poller::new(cq, qp));
        self.by_qp.insert(qp, self.lanes.len());
        self.lanes.push(Lane { qp, buffer, came: None });
        Ok(())
    }

    /// Does what is there to be done, and sleeps a moment if that is nothing.
    fn turn(&mut self, v: &mut Handle, waiting: &str) -> Result<(), Failure> {
        let mut busy = false;
        while let Some(news) = self.crowd.news(v)? {
            busy = true;
            match news {
                News::Request(id) => self.on_request(v, id)?,
                News::Moved(number) => self.on_moved(v, number)?,
            }
        }
        while let Some(wc) = self.poller.as_mut().map(|p| p.poll(v)).transpose()?.flatten() {
            busy = true;
            self.on_completion(v, &wc)?;
        }
        if busy {
            self.crowd.goes_on();
            return Ok(());
        }
        let crowd = &self.crowd;
        crowd.check_patience(|| {
            let (there, all) = (crowd.count(Stage::Established), self.args.connections);
            let (sent, received, total) = (self.sent, self.received, self.args.total());
            format!(
                "waiting for {waiting} ({there} of {all} connections, {sent} sends and {received} receives of {total})"
            )
        })?;
        // Data are waited for once connections stand; connection management is looked at in every turn.
        match &mut self.poller {
            Some(_) if self.crowd.count(Stage::Established) > 0 => v.wait_cq(self.cq, Some(SLICE)).map(drop)?,
            _ => self.crowd.rest(v)?,
        }
        Ok(())
    }

    fn until(&mut self, v: &mut Handle, what: &str, wanted: u64, now: fn(&Self) -> u64) -> Result<(), Failure> {
        while now(self) < wanted {
            self.turn(v, what)?;
        }
        Ok(())
    }

    fn on_request(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        if self.lanes.len() as u64 >= u64::from(self.args.connections) {
            let most = self.args.connections;
            return self.crowd.connections.reject(v, id, &format!("this server takes {most} connections"));
        }
        self.begin.get_or_insert_with(Instant::now);
        self.lay(v, id)?;
        self.crowd.accept(v, id, &self.args.param()).map(drop)
    }

    /// A client's connection takes its next step.
    fn on_moved(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let Some(member) = self.crowd.get(number) else { return Ok(()) };
        match member.stage {
            Stage::AddrResolved => self.crowd.resolve_route(v, number),
            Stage::RouteResolved => {
                let id = member.id;
                // Lanes have the numbers of their connections as long as routes come in order.
                self.lay(v, id)?;
                self.crowd.connect(v, number, &self.args.param())
            }
            Stage::Over if self.received < self.args.total() => {
                let (came, total) = (self.received, self.args.total());
                Err(Failure::Failed(format!("the peer disconnected after {came} of {total} messages")))
            }
            _ => Ok(()),
        }
    }

    fn on_completion(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<(), Failure> {
        let is_send = wc.wr_id >= SEND_WR;
        if wc.status == WcStatus::WorkRequestFlushed && self.crowd.count(Stage::Over) > 0 {
            return Ok(());
        }
        let wc = rdma::succeeded(v, wc, if is_send { "the SEND" } else { "a receive" })?;
        if is_send {
            self.sent += 1;
            return Ok(());
        }
        debug_assert_eq!(wc.opcode, WcOpcode::Recv);
        self.received += 1;
        let (size, came) = (self.args.size(), usize::try_from(wc.byte_len).unwrap_or(usize::MAX));
        if came != size {
            return Err(Failure::Failed(format!(
                "the peer sends {came} bytes, not {size}; give both sides the same -S"
            )));
        }
        let Some(number) = self.by_qp.get(&wc.qp).copied() else { return Ok(()) };
        let Some(lane) = self.lanes.get_mut(number) else { return Ok(()) };
        let at = usize::try_from(wc.wr_id).unwrap_or(0) * size;
        let bytes = lane.buffer.read(at, size)?;
        let wanted = if self.is_client { lane.came.clone() } else { Some(pattern::message(number, size)) };
        let wrong = wanted.and_then(|wanted| bytes.iter().zip(&wanted).position(|(came, wanted)| came != wanted));
        let wrong = wrong.or_else(|| self.args.validate.then(|| pattern::first_wrong(&bytes)).flatten());
        if let Some(at) = wrong {
            let slot = wc.wr_id;
            return Err(Failure::Failed(format!("connection {number}, message {slot}: byte {at} is wrong")));
        }
        lane.came.get_or_insert(bytes);
        Ok(())
    }

    /// A client's answers: what came.
    fn reply(&mut self, v: &mut Handle) -> Result<(), Failure> {
        for number in 0..self.lanes.len() {
            let came = self.lanes.get(number).and_then(|lane| lane.came.clone());
            if let Some(came) = came {
                self.send(v, number, &came)?;
            }
        }
        Ok(())
    }

    /// Sends as many copies of `message` as wanted.
    fn send(&mut self, v: &mut Handle, number: usize, message: &[u8]) -> Result<(), Failure> {
        let Some(lane) = self.lanes.get(number) else { return Ok(()) };
        let (count, size) = (self.args.count(), self.args.size());
        let at = usize::try_from(count).unwrap_or(0) * size;
        lane.buffer.write(at, message)?;
        let sge = [lane.buffer.sge(at, size)];
        for wr_id in 0..u64::from(count) {
            let wr = SendWr {
                wr_id: SEND_WR + wr_id,
                operation: Operation::Send,
                payload: Payload::Sges(&sge),
                flags: SendFlags::SIGNALED,
                destination: None,
            };
            v.post_send(lane.qp, &[wr])?;
        }
        Ok(())
    }

    fn report(
        &self,
        out: &mut Output,
        server: Option<SocketAddr>,
        connected: Duration,
        data: Duration,
        checked: bool,
    ) -> Result<(), Failure> {
        let (connections, messages, size) = (self.args.connections, self.args.total(), self.args.size);
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
