//! `uroce cm multicast`: both roles of mckey.
//!
//! Owns the sequence: every id joins the group, a sender waits a moment and sends its datagrams there, a receiver waits
//! for as many. On RoCEv2 the group's GID is its IP address: nobody is asked.

use core::net::{IpAddr, SocketAddr};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use uroce::types::{Imm, Qpn};
use uroce::verbs::{QpHandle, QpType, UdDestination, WcData, WorkCompletion};
use uroce_cm::id::IdOptions;
use uroce_cm::wire::PortSpace;

use super::crowd::{Crowd, News, Stage};
use super::program::{Hall, Lane, Program, Shape, is_send};
use super::{fits, pattern};
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{Handle, Node};
use crate::rdma;
use crate::report::Output;

/// Flags of `uroce cm multicast`, with the letters and defaults of mckey.
#[derive(Args, Debug)]
pub(super) struct MulticastArgs {
    /// The group: a multicast address
    #[arg(short = 'm', long, value_parser = group)]
    group: IpAddr,
    /// Send; without it this receives
    #[arg(short, long)]
    sender: bool,
    /// Address to join from [default: the device's of the group's family]
    #[arg(short, long)]
    bind: Option<IpAddr>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR or pnet:IFNAME [default: udp: on
    /// the address of -b]
    #[arg(long)]
    device: Option<DeviceArg>,
    /// Ids that join, each with a QP of its own
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    connections: u32,
    /// Datagrams that each sends, or that each receives
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=16_384))]
    messages: u32,
    /// Bytes of a datagram, at most a path MTU
    #[arg(short = 'S', long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    size: u32,
    /// Receiver: check that each byte is what a uroce sender sends
    #[arg(short = 'V', long, conflicts_with = "sender")]
    validate: bool,
    /// Sender: seconds between joining and sending, so that everybody has joined
    #[arg(long, default_value_t = 3, requires = "sender", value_parser = clap::value_parser!(u64).range(..=3600))]
    settle: u64,
    /// Receiver: seconds without a datagram after the first, after which it fails
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
}

fn group(text: &str) -> Result<IpAddr, String> {
    let ip: Option<IpAddr> = text.parse().ok();
    ip.filter(IpAddr::is_multicast)
        .ok_or_else(|| format!("`{text}` is no multicast address; write for example 239.7.7.7 or ff0e::7:7"))
}

impl MulticastArgs {
    const fn shape(&self) -> Shape {
        Shape { qp_type: QpType::Ud, connections: self.connections, messages: self.messages, size: self.size }
    }

    fn device(&self) -> Result<DeviceArg, Failure> {
        match (&self.device, self.bind) {
            (Some(DeviceArg::Loop), _) => Err(Failure::Usage("a group is of several processes; loop has one".into())),
            (Some(device), _) => Ok(device.clone()),
            (None, Some(bind)) => Ok(DeviceArg::Udp(bind)),
            (None, None) => {
                Err(Failure::Usage("say which device joins: --device udp:ADDR or packet:IFNAME, or -b ADDR".into()))
            }
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &MulticastArgs, out: &mut Output) -> Result<(), Failure> {
    args.shape().check()?;
    let mut node = Node::open(&args.device()?)?;
    let v = node.verbs();
    fits(v, args.messages, args.size)?;
    let to = SocketAddr::new(args.group, 0);
    let crowd = Crowd::new(v, Some(to), Duration::from_secs(args.patience))?;
    let hall = Hall::new(v, crowd, args.shape())?;
    let mut test = Test { args, hall, tracks: Vec::new(), by_qp: BTreeMap::new() };
    for _ in 0..args.connections {
        let number = test.hall.crowd.create(PortSpace::Udp, IdOptions::default())?;
        test.hall.crowd.resolve_addr(v, number, args.bind.map(|ip| SocketAddr::new(ip, 0)))?;
    }
    test.until(v, "memberships", args.connections.into(), |h| h.crowd.count(Stage::Established) as u64)?;
    out.line(format_args!("joined {}", args.group))?;
    out.flush()?;
    let took = if args.sender { send(&mut test, v)? } else { receive(&mut test, v)? };
    test.report(out, took)
}

fn send(test: &mut Test<'_>, v: &mut Handle) -> Result<Duration, Failure> {
    test.hall.crowd.connections.linger(v, Duration::from_secs(test.args.settle))?;
    let begin = Instant::now();
    for (number, track) in test.tracks.iter().enumerate() {
        let Some(ud) = test.hall.crowd.get(number).and_then(|m| m.ud) else { continue };
        let ah = v.create_ah(test.hall.pd, ud.av)?;
        let destination = UdDestination { ah, qpn: ud.qpn, qkey: ud.qkey };
        let message = pattern::message(number, test.args.shape().size());
        track.lane.send(v, &message, Some((destination, Imm::new(track.qpn.get()))))?;
    }
    test.until(v, "completions of sends", test.args.shape().total(), |h| h.sent)?;
    Ok(begin.elapsed())
}

fn receive(test: &mut Test<'_>, v: &mut Handle) -> Result<Duration, Failure> {
    while test.hall.received == 0 && test.args.messages > 0 {
        // However long it takes until somebody sends.
        test.hall.crowd.goes_on();
        test.turn(v, "a datagram")?;
    }
    let begin = Instant::now();
    test.until(v, "datagrams", test.args.shape().total(), |h| h.received)?;
    Ok(begin.elapsed())
}

/// What both roles report.
#[derive(Serialize)]
struct Outcome {
    role: &'static str,
    group: IpAddr,
    connections: u32,
    messages: u64,
    size: u32,
    seconds: f64,
    /// Each byte was compared with what it must be.
    checked: bool,
}

/// A member's QP.
struct Track {
    lane: Lane,
    qpn: Qpn,
}

struct Test<'a> {
    args: &'a MulticastArgs,
    hall: Hall,
    tracks: Vec<Track>,
    by_qp: BTreeMap<QpHandle, usize>,
}

impl Test<'_> {
    fn report(&self, out: &mut Output, took: Duration) -> Result<(), Failure> {
        let MulticastArgs { group, connections, size, validate, .. } = *self.args;
        let (messages, seconds) = (self.args.shape().total(), took.as_secs_f64());
        let (role, how) = match (self.args.sender, validate) {
            (true, _) => ("sender", ""),
            (false, true) => ("receiver", ", checked"),
            (false, false) => ("receiver", ", not checked"),
        };
        let did = if self.args.sender { "sent to" } else { "received from" };
        out.line(format_args!("{messages} datagrams of {size} bytes {did} {group} in {:.2} ms{how}", seconds * 1e3))?;
        let outcome = Outcome { role, group, connections, messages, size, seconds, checked: validate };
        out.document("cm multicast", &outcome)
    }
}

impl Program for Test<'_> {
    fn hall(&mut self) -> &mut Hall {
        &mut self.hall
    }

    fn on_news(&mut self, v: &mut Handle, news: News) -> Result<(), Failure> {
        let News::Moved(number) = news else { return Ok(()) };
        let Some(member) = self.hall.crowd.get(number).filter(|m| m.stage == Stage::AddrResolved) else {
            return Ok(());
        };
        let id = member.id;
        let lane = self.hall.lane(v)?;
        self.hall.crowd.attach(v, id, lane.qp)?;
        if !self.args.sender {
            lane.receive(v)?;
        }
        let qpn = v.query_qp(lane.qp)?.qpn;
        self.by_qp.insert(lane.qp, self.tracks.len());
        self.tracks.push(Track { lane, qpn });
        self.hall.crowd.join(v, number, self.args.group, self.args.sender)
    }

    fn on_completion(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<(), Failure> {
        let wc = rdma::succeeded(v, wc, if is_send(wc) { "the SEND" } else { "a receive" })?;
        if is_send(&wc) {
            self.hall.sent += 1;
            return Ok(());
        }
        self.hall.received += 1;
        let Some(track) = self.by_qp.get(&wc.qp).and_then(|number| self.tracks.get(*number)) else { return Ok(()) };
        let bytes = track.lane.came(&wc)?;
        // Both programs say in the immediate data which QP sends.
        if wc.data != WcData::Imm(Imm::new(wc.src_qp.get())) {
            let from = wc.src_qp;
            return Err(Failure::Failed(format!("a datagram of QP {from} does not say so; is it an mckey?")));
        }
        let wrong = self.args.validate.then(|| pattern::first_wrong(&bytes)).flatten();
        wrong.map_or(Ok(()), |at| Err(Failure::Failed(format!("datagram {}: byte {at} is wrong", wc.wr_id))))
    }
}
