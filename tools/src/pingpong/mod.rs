//! `uroce pingpong`: both roles of ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong and ibv_srq_pingpong.
//!
//! Owns the flags, the QP set-up and the ball. The peer may be the original program on any RoCEv2 device.

mod check;
mod exchange;
mod srq;

use core::net::IpAddr;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use uroce::types::{AckTimeout, Gid, PathMtu, QKey, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, InitAttr, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpTransition,
    QpType, RecvWr, RtrAttr, RtsAttr, SendFlags, SendWr, UdDestination, WcOpcode, WorkCompletion,
};

use self::exchange::{Dest, Server};
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle, Node};
use crate::rdma::{self, Buffer, Poller};
use crate::report::Output;

/// Bytes before a datagram in its receive buffer.
const GRH: usize = 40;
/// The queue key that the UD program uses.
const UD_QKEY: QKey = QKey::new(0x1111_1111);
/// Longest message of RC and UC.
const SIZE_MAX: u32 = 1 << 31;
/// Bytes a second that a message makes at the least; a long one gets more time than `--patience`.
const PACE: u64 = 1_000_000;
/// Local ACK timeouts for which the last acknowledgement is given again to a peer that lost it.
const LINGER_TIMEOUTS: u32 = 4;
/// And the longest that such a wait takes.
const LINGER_MAX: Duration = Duration::from_secs(2);

/// Which of the four programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagram
    Ud,
    /// Several reliable connections that receive from one shared receive queue
    Srq,
}

/// Flags of `uroce pingpong`, with the letters and defaults of the ibv programs.
#[derive(Args, Clone, Debug)]
pub(crate) struct PingpongArgs {
    /// Transport
    kind: Kind,
    /// The server's host for the TCP exchange; without it this is the server
    host: Option<String>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR, pnet:IFNAME or hw:NAME [default:
    /// client: the address from which HOST is reached; server: udp:127.0.0.1]
    #[arg(short, long, alias = "ib-dev")]
    device: Option<DeviceArg>,
    /// TCP port of the exchange
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    /// Port of the device; there is one
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=1))]
    ib_port: u8,
    /// Bytes of a message [default: 4096; ud: 1024]
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(..=i64::from(SIZE_MAX)))]
    size: Option<u32>,
    /// Path MTU; not of ud
    #[arg(short, long, default_value_t = 1024, value_parser = mtu)]
    mtu: usize,
    /// QPs that share the receive queue, srq alone [default: 16]
    #[arg(short = 'q', long, value_parser = clap::value_parser!(u16).range(1..=i64::from(srq::QPS_MAX)))]
    num_qp: Option<u16>,
    /// Receives that are posted at a time
    #[arg(short, long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    rx_depth: u32,
    /// Messages each way, over all QPs
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Service level
    #[arg(short = 'l', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=15))]
    sl: u8,
    /// Index in the GID table (`uroce devinfo -v` shows it) [default: the first IPv4 one, or else the first]
    #[arg(short, long)]
    gid_idx: Option<u8>,
    /// Sleep until something completes; without it the completion queue is polled
    #[arg(short, long)]
    events: bool,
    /// Check the bytes that came in the end; both sides need it
    #[arg(short, long)]
    chk: bool,
    /// Local ACK timeout of rc: 4.096 us * 2^TIMEOUT, 0 waits for ever
    #[arg(long, default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    timeout: u8,
    /// Seconds without any message after which the game is over: uc and ud do not repeat what is lost
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
}

impl PingpongArgs {
    fn size(&self) -> usize {
        let default = if self.kind == Kind::Ud { 1024 } else { 4096 };
        self.size.map_or(default, |size| usize::try_from(size).unwrap_or(usize::MAX))
    }

    /// What lies before a message in a receive buffer.
    const fn headroom(&self) -> usize {
        match self.kind {
            Kind::Ud => GRH,
            Kind::Rc | Kind::Uc | Kind::Srq => 0,
        }
    }

    const fn is_client(&self) -> bool {
        self.host.is_some()
    }

    fn ack_timeout(&self) -> AckTimeout {
        AckTimeout::new(self.timeout).unwrap_or(AckTimeout::DEFAULT)
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience + self.size() as u64 / PACE)
    }

    /// For how long the peer may ask for the last acknowledgement again. Only RC has any.
    fn linger(&self) -> Duration {
        match (self.kind, self.ack_timeout().duration()) {
            (Kind::Rc | Kind::Srq, Some(timeout)) => LINGER_MAX.min(timeout * LINGER_TIMEOUTS),
            _ => Duration::ZERO,
        }
    }
}

fn mtu(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().and_then(PathMtu::from_bytes);
    bytes.map(PathMtu::bytes).ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".into())
}

/// Runs the command.
pub(crate) fn run(args: &PingpongArgs, out: &mut Output) -> Result<(), Failure> {
    if args.num_qp.is_some() && args.kind != Kind::Srq {
        return Err(Failure::Usage("only srq has several QPs; leave -q out".into()));
    }
    let mut node = Node::open(&device(args)?)?;
    let (index, gid) = node::gid(&node.verbs().query_gids(), args.gid_idx)?;
    // From here on it is settled.
    let args = &PingpongArgs { gid_idx: Some(index), ..args.clone() };
    // The server listens before it says that it is there.
    let role = match &args.host {
        Some(host) => Role::Client(host),
        None => Role::Server(Server::listen(args.port)?),
    };
    let v = node.verbs();
    fits(args, v.query_port().active_mtu)?;
    if args.kind == Kind::Srq {
        return srq::run(args, v, gid, role, out);
    }
    let mut table = Table::lay(v, args)?;
    let mine = Dest { lid: 0, qpn: v.query_qp(table.qp)?.qpn, psn: rdma::random_psn(), gid };
    // The UD program prints this line with a colon before the GID.
    let shown = if args.kind == Kind::Ud { mine.to_string().replace(", GID", ": GID") } else { mine.to_string() };
    out.line(format_args!("  local address:  {shown}"))?;
    out.flush()?;
    let theirs = meet(args, role, &[mine], |theirs| table.connect(v, args, mine, only(theirs)?))?;
    let theirs = only(&theirs)?;
    out.line(format_args!("  remote address: {theirs}"))?;
    let elapsed = table.play(v, args)?;
    table.poller.linger(v, args.linger())?;
    let verdict = if args.chk { table.check() } else { Ok(()) };
    report(args, out, &Ends { local: mine, remote: theirs }, elapsed, args.chk && verdict.is_ok())?;
    verdict
}

/// The exchange, in either role. `connect` is called with what the peer told; a server's QPs can receive before the
/// client knows of them.
fn meet(
    args: &PingpongArgs,
    role: Role<'_>,
    mine: &[Dest],
    connect: impl FnOnce(&[Dest]) -> Result<(), Failure>,
) -> Result<Vec<Dest>, Failure> {
    match role {
        Role::Client(host) => {
            let theirs = exchange::as_client(host, args.port, mine)?;
            connect(&theirs)?;
            Ok(theirs)
        }
        Role::Server(server) => {
            let (client, theirs) = server.accept(mine.len())?;
            connect(&theirs)?;
            client.answer(mine)?;
            Ok(theirs)
        }
    }
}

fn only(dests: &[Dest]) -> Result<Dest, Failure> {
    dests.first().copied().ok_or_else(|| Failure::failed("the peer named no QP"))
}

/// A path MTU or a datagram that the device does not carry is the user's to change.
fn fits(args: &PingpongArgs, active: PathMtu) -> Result<(), Failure> {
    let (what, bytes, flag) = match args.kind {
        Kind::Rc | Kind::Uc | Kind::Srq => ("a path MTU", args.mtu, "-m"),
        Kind::Ud => ("a datagram", args.size(), "-s"),
    };
    if bytes <= active.bytes() {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "this device carries at most {}, not {what} of {bytes}; try a smaller {flag}",
        active.bytes()
    )))
}

/// The device that was asked for, or the one from which the server is reached.
fn device(args: &PingpongArgs) -> Result<DeviceArg, Failure> {
    match (&args.device, &args.host) {
        (Some(DeviceArg::Loop), _) => {
            Err(Failure::Usage("a ping-pong is between two processes; loop has one (try `uroce demo`)".into()))
        }
        (Some(device), _) => Ok(device.clone()),
        (None, Some(host)) => node::device_towards(host),
        (None, None) => Ok(DeviceArg::Udp(IpAddr::from([127, 0, 0, 1]))),
    }
}

enum Role<'a> {
    Client(&'a str),
    Server(Server),
}

/// The QP with its buffer and what it takes to send.
struct Table {
    size: usize,
    headroom: usize,
    /// Where the message that is sent stands. A server returns what it received, a client has it apart, so that its
    /// check finds what came and not what it sent.
    outgoing: usize,
    qp: QpHandle,
    poller: Poller,
    buffer: Buffer,
    destination: Option<UdDestination>,
    pd: PdHandle,
}

impl Table {
    fn lay(v: &mut Handle, args: &PingpongArgs) -> Result<Self, Failure> {
        let (size, headroom) = (args.size(), args.headroom());
        let incoming = headroom.saturating_add(size);
        let (outgoing, len) =
            if args.is_client() { (incoming, incoming.saturating_add(size)) } else { (headroom, incoming) };
        let pd = v.alloc_pd()?;
        let buffer = Buffer::new(v, pd, len, AccessFlags::LOCAL_WRITE)?;
        buffer.write(0, &check::unwritten(incoming))?;
        if args.is_client() {
            buffer.write(outgoing, &check::message(size, check::FILL, args.chk))?;
        }
        let cq = v.create_cq(args.rx_depth + 1)?;
        let qp_type = match args.kind {
            Kind::Rc | Kind::Srq => QpType::Rc,
            Kind::Uc => QpType::Uc,
            Kind::Ud => QpType::Ud,
        };
        let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: args.rx_depth, ..QpCapabilities::default() };
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = v.create_qp(init)?;
        let attr = match args.kind {
            Kind::Ud => InitAttr::datagram(UD_QKEY),
            Kind::Rc | Kind::Uc | Kind::Srq => InitAttr::connected(AccessFlags::NONE),
        };
        v.modify_qp(qp, QpTransition::Init(attr).into())?;
        let poller = Poller::new(cq, qp);
        let table = Self { size, headroom, outgoing, qp, poller, buffer, destination: None, pd };
        table.post_receives(v, args.rx_depth)?;
        Ok(table)
    }

    fn connect(&mut self, v: &mut Handle, args: &PingpongArgs, mine: Dest, theirs: Dest) -> Result<(), Failure> {
        let (rtr, rts) = transitions(args, mine, theirs)?;
        match args.kind {
            Kind::Rc | Kind::Srq => {
                v.modify_qp(self.qp, QpTransition::Rtr(rtr).into())?;
                v.modify_qp(self.qp, QpTransition::Rts(rts).into())?;
            }
            Kind::Uc => {
                v.modify_qp(self.qp, QpTransition::RtrUc(rtr).into())?;
                v.modify_qp(self.qp, QpTransition::RtsPsn(mine.psn).into())?;
            }
            Kind::Ud => {
                v.modify_qp(self.qp, QpTransition::RtrUd.into())?;
                v.modify_qp(self.qp, QpTransition::RtsPsn(mine.psn).into())?;
                let ah = v.create_ah(self.pd, rtr.av)?;
                self.destination = Some(UdDestination { ah, qpn: theirs.qpn, qkey: UD_QKEY });
            }
        }
        Ok(())
    }

    fn post_receives(&self, v: &mut Handle, count: u32) -> Result<(), Failure> {
        let sge = [self.buffer.sge(0, self.headroom + self.size)];
        for wr_id in 0..u64::from(count) {
            v.post_recv(self.qp, &[RecvWr { wr_id, sges: &sge }])?;
        }
        Ok(())
    }

    fn send(&self, v: &mut Handle) -> Result<(), Failure> {
        let sge = [self.buffer.sge(self.outgoing, self.size)];
        let wr = SendWr {
            wr_id: 0,
            operation: Operation::Send,
            payload: Payload::Sges(&sge),
            flags: SendFlags::SIGNALED,
            destination: self.destination,
        };
        Ok(v.post_send(self.qp, &[wr])?)
    }

    /// The game: whoever has both got the ball and seen its own arrive throws again.
    fn play(&mut self, v: &mut Handle, args: &PingpongArgs) -> Result<Duration, Failure> {
        let begin = Instant::now();
        let (mut sent, mut received) = (0, 0);
        let mut posted = args.rx_depth;
        let (mut awaits_send, mut awaits_receive) = (false, true);
        if args.is_client() {
            self.send(v)?;
            awaits_send = true;
        }
        while sent < args.iters || received < args.iters {
            let Some(wc) = next_completion(v, &mut self.poller, args)? else { return Err(silence(args, received)) };
            if wc.opcode == WcOpcode::Recv {
                has_size(&wc, self.headroom, self.size)?;
                received += 1;
                posted -= 1;
                if posted <= 1 {
                    self.post_receives(v, args.rx_depth - posted)?;
                    posted = args.rx_depth;
                }
                awaits_receive = false;
            } else {
                sent += 1;
                awaits_send = false;
            }
            if sent < args.iters && !awaits_send && !awaits_receive {
                self.send(v)?;
                (awaits_send, awaits_receive) = (true, true);
            }
        }
        Ok(begin.elapsed())
    }

    /// Looks at what came last: the client's bytes, at either side.
    fn check(&self) -> Result<(), Failure> {
        check::verify(&self.buffer.read(self.headroom, self.size)?, check::FILL)
    }
}

/// The next completion, a success; `None` when patience is at its end.
fn next_completion(
    v: &mut Handle,
    poller: &mut Poller,
    args: &PingpongArgs,
) -> Result<Option<WorkCompletion>, Failure> {
    let next = if args.events {
        poller.wait(v, args.patience())?
    } else {
        let begin = Instant::now();
        loop {
            let polled = poller.poll(v)?;
            if polled.is_some() || begin.elapsed() >= args.patience() {
                break polled;
            }
        }
    };
    let Some(wc) = next else { return Ok(None) };
    let what = if wc.opcode == WcOpcode::Recv { "a receive" } else { "the SEND" };
    rdma::succeeded(v, &wc, what).map(Some)
}

fn has_size(wc: &WorkCompletion, headroom: usize, size: usize) -> Result<(), Failure> {
    let came = usize::try_from(wc.byte_len).unwrap_or(usize::MAX).saturating_sub(headroom);
    if came == size {
        return Ok(());
    }
    Err(Failure::Failed(format!("the peer sends {came} bytes, not {size}; give both sides the same -s")))
}

/// What connects `mine` to `theirs`, with the values of the ibv programs.
fn transitions(args: &PingpongArgs, mine: Dest, theirs: Dest) -> Result<(RtrAttr, RtsAttr), Failure> {
    reachable(mine.gid, theirs.gid)?;
    let mut av = AddressVector::new(theirs.gid, args.gid_idx.unwrap_or(0));
    av.service_level = args.sl;
    let rtr = RtrAttr {
        av,
        path_mtu: PathMtu::from_bytes(args.mtu).unwrap_or(PathMtu::B1024),
        dest_qpn: theirs.qpn,
        rq_psn: theirs.psn,
        max_dest_rd_atomic: 1,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    let rts = RtsAttr {
        sq_psn: mine.psn,
        timeout: args.ack_timeout(),
        retry_count: RetryCount::MAX,
        rnr_retry: RnrRetry::FOREVER,
        max_rd_atomic: 1,
    };
    Ok((rtr, rts))
}

/// Whether packets can go from our GID to the peer's.
fn reachable(ours: Gid, theirs: Gid) -> Result<(), Failure> {
    if theirs.is_unspecified() {
        return Err(Failure::failed("the peer gave no GID, which RoCE cannot do without; start it with -g"));
    }
    let is_v4 = |gid: Gid| gid.ip().is_ipv4();
    if is_v4(ours) == is_v4(theirs) {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "the GIDs {ours} and {theirs} are one of IPv4 and one of IPv6; choose two of a kind with -g"
    )))
}

fn silence(args: &PingpongArgs, received: u32) -> Failure {
    let why = match args.kind {
        Kind::Rc | Kind::Srq => "the peer has stopped",
        Kind::Uc | Kind::Ud => "one was lost, or the peer has stopped",
    };
    let seconds = args.patience().as_secs();
    Failure::Failed(format!("nothing came for {seconds} s, after {received} of {} messages; {why}", args.iters))
}

/// Who played: one QP a side, or several.
#[derive(Serialize)]
struct Ends<D> {
    local: D,
    remote: D,
}

#[derive(Serialize)]
struct Played<'a, D> {
    kind: Kind,
    role: &'static str,
    #[serde(flatten)]
    ends: &'a Ends<D>,
    size: u64,
    iters: u32,
    bytes: u64,
    seconds: f64,
    mbit_per_s: f64,
    usec_per_iter: f64,
    /// The bytes were looked at and are right.
    checked: bool,
}

fn report<D: Serialize>(
    args: &PingpongArgs,
    out: &mut Output,
    ends: &Ends<D>,
    took: Duration,
    checked: bool,
) -> Result<(), Failure> {
    let size = args.size() as u64;
    let bytes = size * u64::from(args.iters) * 2;
    let seconds = took.as_secs_f64();
    let usec = seconds * 1e6;
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let mbit_per_s = bytes as f64 * 8.0 / usec;
    let usec_per_iter = usec / f64::from(args.iters);
    out.line(format_args!("{bytes} bytes in {seconds:.2} seconds = {mbit_per_s:.2} Mbit/sec"))?;
    out.line(format_args!("{} iters in {seconds:.2} seconds = {usec_per_iter:.2} usec/iter", args.iters))?;
    let role = if args.is_client() { "client" } else { "server" };
    let result = Played {
        kind: args.kind,
        role,
        ends,
        size,
        iters: args.iters,
        bytes,
        seconds,
        mbit_per_s,
        usec_per_iter,
        checked,
    };
    out.document("pingpong", &result)
}
