//! `uroce cm datagram`: both roles of udaddy.
//!
//! Owns the sequence: each of the client's ids resolves the server's QP (SIDR), the client sends its datagrams to it with
//! its own QPN as immediate data, the server sends as many back. A uroce server returns what came. udaddy returns its
//! whole receive buffer, in which the 40 bytes of the sender's IP header come first.

use core::net::SocketAddr;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use uroce::types::{Gid, Imm, QKey, Qpn};
use uroce::verbs::{AddressVector, QpHandle, QpType, UdDestination, WcData, WorkCompletion};
use uroce_cm::id::{IdOptions, UdPeer};
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, IdHandle};

use super::crowd::{Crowd, News, Stage};
use super::program::{Hall, Lane, Program, Shape, is_send};
use super::{Ends, fits, octet, pattern};
use crate::exit::Failure;
use crate::node::{Handle, Node};
use crate::rdma;
use crate::report::Output;

/// Bytes before a datagram in its receive buffer, which udaddy returns with the rest.
const GRH: usize = 40;
/// How long a server still answers clients that missed its answer.
const LINGER: Duration = Duration::from_millis(200);

/// A range of service ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Space {
    /// RDMA_PS_UDP
    Udp,
    /// RDMA_PS_IB
    Ib,
}

/// Flags of `uroce cm datagram`, with the letters and defaults of udaddy.
#[derive(Args, Debug)]
pub(super) struct DatagramArgs {
    #[command(flatten)]
    ends: Ends,
    /// Port space
    #[arg(short = 'P', long, default_value = "udp")]
    port_space: Space,
    /// Services to resolve, each with a QP of its own; both sides need the same number
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    connections: u32,
    /// Datagrams each way on each; both sides need the same number
    #[arg(short = 'C', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=16_384))]
    messages: u32,
    /// Bytes of a datagram, at most a path MTU; 0 sends none
    #[arg(short = 'S', long, default_value_t = 100)]
    size: u32,
    /// Type of service: DSCP and ECN of all packets
    #[arg(short, long, default_value_t = 0, value_parser = octet)]
    tos: u8,
    /// Port of the service
    #[arg(long, default_value_t = 7174)]
    port: u16,
    /// Server: check that each byte is what a uroce client sends. A client always checks what comes back
    #[arg(short = 'V', long, conflicts_with = "server")]
    validate: bool,
    /// Seconds without any progress after which it fails: datagrams that are lost do not come again
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
}

impl DatagramArgs {
    const fn shape(&self) -> Shape {
        let messages = if self.size == 0 { 0 } else { self.messages };
        Shape { qp_type: QpType::Ud, connections: self.connections, messages, size: self.size }
    }

    const fn space(&self) -> PortSpace {
        match self.port_space {
            Space::Udp => PortSpace::Udp,
            Space::Ib => PortSpace::Ib,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &DatagramArgs, out: &mut Output) -> Result<(), Failure> {
    args.shape().check()?;
    let mut node = Node::open(&args.ends.device()?)?;
    let v = node.verbs();
    fits(v, args.shape().messages, args.size)?;
    let server = args.ends.peer(args.port)?;
    let crowd = Crowd::new(v, server, Duration::from_secs(args.patience))?;
    let hall = Hall::new(v, crowd, args.shape())?;
    let is_client = server.is_some();
    let mut test = Test { args, shape: args.shape(), hall, tracks: Vec::new(), by_qp: BTreeMap::new(), is_client };
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
    /// Each way, on all.
    messages: u64,
    size: u32,
    seconds: f64,
    /// Each byte was compared with what it must be.
    checked: bool,
}

fn client(test: &mut Test<'_>, v: &mut Handle, server: SocketAddr, out: &mut Output) -> Result<(), Failure> {
    let begin = Instant::now();
    for _ in 0..test.args.connections {
        let options = IdOptions { tos: test.args.tos, ..IdOptions::default() };
        let number = test.hall.crowd.create(test.args.space(), options)?;
        test.hall.crowd.resolve_addr(v, number, test.args.ends.source())?;
    }
    test.until(v, "services", test.args.connections.into(), |h| h.crowd.count(Stage::Established) as u64)?;
    for number in 0..test.tracks.len() {
        let Some(ud) = test.hall.crowd.get(number).and_then(|m| m.ud) else { continue };
        test.send(v, number, &pattern::message(number, test.shape.size()), ud)?;
    }
    test.until(v, "answers of the server", test.shape.total(), |h| h.received)?;
    // Of a datagram of at most 40 bytes udaddy returns none.
    let checked = test.tracks.iter().all(|t| t.is_right);
    test.report(out, Some(server), begin.elapsed(), checked)
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
    let begin = Instant::now();
    test.until(v, "services", test.args.connections.into(), |h| h.crowd.count(Stage::Established) as u64)?;
    let total = test.shape.total();
    test.until(v, "datagrams of the client", total, |h| h.received)?;
    for number in 0..test.tracks.len() {
        let Some(track) = test.tracks.get(number) else { continue };
        if let (Some(came), Some(ud)) = (track.came.clone(), track.from) {
            test.send(v, number, &came, ud)?;
        }
    }
    test.until(v, "completions of sends", total, |h| h.sent)?;
    let took = begin.elapsed();
    test.hall.crowd.connections.linger(v, LINGER)?;
    test.report(out, None, took, test.args.validate)
}

/// A QP with what came there.
struct Track {
    lane: Lane,
    qpn: Qpn,
    /// The first datagram that came: all others must be the same.
    came: Option<Vec<u8>>,
    /// Server: who sent it.
    from: Option<UdPeer>,
    /// Client: what came is what went.
    is_right: bool,
}

struct Test<'a> {
    args: &'a DatagramArgs,
    shape: Shape,
    hall: Hall,
    tracks: Vec<Track>,
    by_qp: BTreeMap<QpHandle, usize>,
    is_client: bool,
}

impl Test<'_> {
    /// Makes the QP of an id with its receives.
    fn lay(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        let lane = self.hall.lane(v)?;
        self.hall.crowd.attach(v, id, lane.qp)?;
        lane.receive(v)?;
        let qpn = v.query_qp(lane.qp)?.qpn;
        self.by_qp.insert(lane.qp, self.tracks.len());
        self.tracks.push(Track { lane, qpn, came: None, from: None, is_right: true });
        Ok(())
    }

    fn send(&self, v: &mut Handle, number: usize, message: &[u8], to: UdPeer) -> Result<(), Failure> {
        let Some(track) = self.tracks.get(number) else { return Ok(()) };
        let ah = v.create_ah(self.hall.pd, to.av)?;
        let destination = UdDestination { ah, qpn: to.qpn, qkey: to.qkey };
        track.lane.send(v, message, Some((destination, Imm::new(track.qpn.get()))))
    }

    fn on_request(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        if self.tracks.len() as u64 >= u64::from(self.args.connections) {
            let most = self.args.connections;
            return self.hall.crowd.connections.reject(v, id, &format!("this server takes {most} clients"));
        }
        self.lay(v, id)?;
        self.hall.crowd.accept_service(v, id, &ConnParam::default()).map(drop)
    }

    fn on_moved(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let Some(member) = self.hall.crowd.get(number) else { return Ok(()) };
        match member.stage {
            Stage::AddrResolved => self.hall.crowd.resolve_route(v, number),
            Stage::RouteResolved => {
                let id = member.id;
                self.lay(v, id)?;
                self.hall.crowd.connect(v, number, &ConnParam::default())
            }
            _ => Ok(()),
        }
    }

    /// Server: the way back to whoever sent this, by the immediate data.
    fn sender(&self, v: &Handle, number: usize, wc: &WorkCompletion) -> Result<UdPeer, Failure> {
        let WcData::Imm(imm) = wc.data else {
            return Err(Failure::failed("a datagram without immediate data; is it a udaddy?"));
        };
        let qpn = Qpn::new(imm.get()).filter(|qpn| *qpn == wc.src_qp).ok_or_else(|| {
            Failure::Failed(format!("a datagram of QP {} names QP {:#x} as its sender", wc.src_qp, imm.get()))
        })?;
        let id = self.hall.crowd.get(number).map(|m| m.id).ok_or_else(|| Failure::failed("no such client"))?;
        let peer = self.hall.crowd.connections.peer(id).ip();
        let index = self.hall.crowd.connections.gid_index(v, id);
        let mut av = AddressVector::new(Gid::from(peer), index);
        av.traffic_class = self.args.tos;
        Ok(UdPeer { qpn, qkey: QKey::RDMA_UDP, av })
    }

    fn report(
        &self,
        out: &mut Output,
        server: Option<SocketAddr>,
        took: Duration,
        checked: bool,
    ) -> Result<(), Failure> {
        let (connections, messages, size) = (self.args.connections, self.shape.total(), self.args.size);
        let (role, with) = match server {
            Some(server) => ("client", format!("to {server}")),
            None => ("server", format!("on port {}", self.args.port)),
        };
        let seconds = took.as_secs_f64();
        let how = if checked { "checked" } else { "not checked" };
        out.line(format_args!(
            "{connections} services {with}, {messages} datagrams of {size} bytes each way in {:.2} ms, {how}",
            seconds * 1e3
        ))?;
        let outcome = Outcome { role, server, connections, messages, size, seconds, checked };
        out.document("cm datagram", &outcome)
    }
}

/// What a client may get back for `sent`: the same, or what udaddy makes of it. `None`: neither; `Some(false)`: too short
/// to tell.
fn judge(came: &[u8], sent: &[u8]) -> Option<bool> {
    if came == sent {
        return Some(true);
    }
    match came.get(GRH..) {
        Some(rest) if !rest.is_empty() => sent.starts_with(rest).then_some(true),
        _ => Some(false),
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
        let wc = rdma::succeeded(v, wc, if is_send(wc) { "the SEND" } else { "a receive" })?;
        if is_send(&wc) {
            self.hall.sent += 1;
            return Ok(());
        }
        self.hall.received += 1;
        let Some(number) = self.by_qp.get(&wc.qp).copied() else { return Ok(()) };
        let from = if self.is_client { None } else { Some(self.sender(v, number, &wc)?) };
        let (size, args) = (self.shape.size(), self.args);
        let Some(track) = self.tracks.get_mut(number) else { return Ok(()) };
        let bytes = track.lane.came(&wc)?;
        let other = track.came.as_ref().and_then(|first| pattern::first_other(&bytes, first));
        let wrong = other.or_else(|| args.validate.then(|| pattern::first_wrong(&bytes)).flatten());
        if let Some(at) = wrong {
            let message = wc.wr_id;
            return Err(Failure::Failed(format!("service {number}, datagram {message}: byte {at} is wrong")));
        }
        if self.is_client {
            let right = judge(&bytes, &pattern::message(number, size))
                .ok_or_else(|| Failure::Failed(format!("service {number}: what came back is not what was sent")))?;
            track.is_right &= right;
        }
        track.from = track.from.or(from);
        track.came.get_or_insert(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_both_kinds_are_told_from_wrong_ones() {
        let sent = pattern::message(0, 100);
        assert_eq!(judge(&sent, &sent), Some(true));
        // What udaddy returned in the capture: 40 bytes of header, then as much of the message as fits.
        let udaddys = [&[0x45; GRH], &sent[..60]].concat();
        assert_eq!(judge(&udaddys, &sent), Some(true));
        let mut wrong = udaddys;
        wrong[99] ^= 1;
        assert_eq!(judge(&wrong, &sent), None);
        assert_eq!(judge(&[0x45; GRH], &pattern::message(0, GRH)), Some(false));
    }
}
