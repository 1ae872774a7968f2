//! `uroce pingpong`: both roles of ibv_rc_pingpong, ibv_uc_pingpong and ibv_ud_pingpong.
//!
//! Owns the flags, the QP set-up and the ball. The peer may be the original program on any RoCEv2 device.

mod exchange;

use core::net::IpAddr;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use uroce::host::Handle;
use uroce::types::AckTimeout;
use uroce::types::{PathMtu, QKey, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, Attr, InitAttr, ModifyError, Operation, Payload, QpCapabilities, QpHandle, QpInit,
    QpTransition, QpType, RecvWr, RtrAttr, RtsAttr, SendFlags, SendWr, UdDestination, Verbs, VerbsError, WcOpcode,
};

use self::exchange::{Dest, Server};
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::Node;
use crate::rdma::{self, Buffer, Poller};
use crate::report::Output;

/// Bytes before a datagram in its receive buffer.
const GRH: usize = 40;
/// The queue key that the UD program uses.
const UD_QKEY: QKey = QKey::new(0x1111_1111);
/// What an unwritten buffer holds, as in the original programs.
const FILL: u8 = 0x7b;
/// How long nothing may arrive. UC and UD do not repeat what is lost, so the game can stop for ever.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the loser of the last acknowledgement may ask for it again.
const LINGER: Duration = Duration::from_millis(300);

/// Which of the three programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagram
    Ud,
}

/// Flags of `uroce pingpong`, with the letters and defaults of the ibv programs.
#[derive(Args, Debug)]
pub(crate) struct PingpongArgs {
    /// Transport
    kind: Kind,
    /// The server's host for the TCP exchange; without it this is the server
    host: Option<String>,
    /// Device: udp:ADDR, packet:IFNAME or pnet:IFNAME [default: client: the address from which HOST is reached; server:
    /// udp:127.0.0.1]
    #[arg(short, long)]
    device: Option<DeviceArg>,
    /// TCP port of the exchange
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    /// Port of the device; there is one
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=1))]
    ib_port: u8,
    /// Bytes of a message [default: 4096; ud: 1024]
    #[arg(short, long)]
    size: Option<u32>,
    /// Path MTU, rc and uc
    #[arg(short, long, default_value_t = 1024, value_parser = mtu)]
    mtu: usize,
    /// Receives that are posted at a time
    #[arg(short, long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    rx_depth: u32,
    /// Messages each way
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Service level
    #[arg(short = 'l', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=15))]
    sl: u8,
    /// Index in the GID table (`uroce devinfo -v` shows it)
    #[arg(short, long, default_value_t = 0)]
    gid_idx: u8,
    /// Sleep on completion events; here every wait sleeps when nothing is due
    #[arg(short, long)]
    events: bool,
    /// Check the bytes that came, as the original does
    #[arg(short, long)]
    chk: bool,
}

fn mtu(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().and_then(PathMtu::from_bytes);
    bytes.map(PathMtu::bytes).ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".into())
}

/// Runs the command.
pub(crate) fn run(args: &PingpongArgs, out: &mut Output) -> Result<(), Failure> {
    let mut node = Node::open(&device(args)?)?;
    let gids = node.verbs().query_gids();
    let gid = gids.get(usize::from(args.gid_idx)).ok_or_else(|| {
        Failure::Usage(format!("the device has {} GIDs; index {} is not there", gids.len(), args.gid_idx))
    })?;
    // The server listens before it says that it is there.
    let role = match &args.host {
        Some(host) => Role::Client(host),
        None => Role::Server(Server::listen(args.port)?),
    };
    let v = node.verbs();
    let mut table = Table::lay(v, args)?;
    let mine = Dest { lid: 0, qpn: v.query_qp(table.qp)?.qpn, psn: rdma::random_psn(), gid: gid.gid };
    // The UD program prints this line with a colon before the GID.
    let shown = if args.kind == Kind::Ud { mine.to_string().replace(", GID", ": GID") } else { mine.to_string() };
    out.line(format_args!("  local address:  {shown}"))?;
    out.flush()?;
    let theirs = match role {
        Role::Client(host) => {
            let theirs = exchange::as_client(host, args.port, mine)?;
            table.connect(v, args, mine, theirs)?;
            theirs
        }
        Role::Server(server) => {
            let (client, theirs) = server.accept()?;
            table.connect(v, args, mine, theirs)?;
            client.answer(mine)?;
            theirs
        }
    };
    out.line(format_args!("  remote address: {theirs}"))?;
    let elapsed = table.play(v, args)?;
    if args.chk && args.host.is_none() {
        table.check()?;
    }
    table.poller.linger(v, LINGER)?;
    report(args, out, mine, theirs, elapsed)
}

/// The device that was asked for, or the one from which the server is reached.
fn device(args: &PingpongArgs) -> Result<DeviceArg, Failure> {
    match (&args.device, &args.host) {
        (Some(DeviceArg::Loop), _) => {
            Err(Failure::Usage("a ping-pong is between two processes; loop has one (try `uroce demo`)".into()))
        }
        (Some(device), _) => Ok(device.clone()),
        (None, Some(host)) => crate::node::device_towards(host),
        (None, None) => Ok(DeviceArg::Udp(IpAddr::from([127, 0, 0, 1]))),
    }
}

enum Role<'a> {
    Client(&'a str),
    Server(Server),
}

/// The QP with its buffer and what it takes to send.
struct Table {
    kind: Kind,
    size: usize,
    qp: QpHandle,
    poller: Poller,
    buffer: Buffer,
    destination: Option<UdDestination>,
    pd: uroce::verbs::PdHandle,
}

impl Table {
    fn lay(v: &mut Handle, args: &PingpongArgs) -> Result<Self, Failure> {
        let size = args.size.unwrap_or(if args.kind == Kind::Ud { 1024 } else { 4096 });
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let headroom = if args.kind == Kind::Ud { GRH } else { 0 };
        let pd = v.alloc_pd()?;
        let buffer = Buffer::new(v, pd, size.saturating_add(headroom), AccessFlags::LOCAL_WRITE)?;
        // The client's bytes travel, so with -c it is the client that clears them.
        let fill = if args.chk && args.host.is_some() { 0 } else { FILL };
        buffer.write(0, &vec![fill; size + headroom])?;
        let cq = v.create_cq(args.rx_depth + 1)?;
        let qp_type = match args.kind {
            Kind::Rc => QpType::Rc,
            Kind::Uc => QpType::Uc,
            Kind::Ud => QpType::Ud,
        };
        let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: args.rx_depth, ..QpCapabilities::default() };
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = v.create_qp(init)?;
        let attr = match args.kind {
            Kind::Ud => InitAttr::datagram(UD_QKEY),
            Kind::Rc | Kind::Uc => InitAttr::connected(AccessFlags::NONE),
        };
        v.modify_qp(qp, QpTransition::Init(attr).into())?;
        let poller = Poller::new(cq, qp);
        let mut table = Self { kind: args.kind, size, qp, poller, buffer, destination: None, pd };
        table.post_receives(v, args.rx_depth)?;
        Ok(table)
    }

    fn connect(&mut self, v: &mut Handle, args: &PingpongArgs, mine: Dest, theirs: Dest) -> Result<(), Failure> {
        let mut av = AddressVector::new(theirs.gid, args.gid_idx);
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
            timeout: AckTimeout::DEFAULT,
            retry_count: RetryCount::MAX,
            rnr_retry: RnrRetry::FOREVER,
            max_rd_atomic: 1,
        };
        match self.kind {
            Kind::Rc => {
                v.modify_qp(self.qp, QpTransition::Rtr(rtr).into()).map_err(|e| self.explain(e, args))?;
                v.modify_qp(self.qp, QpTransition::Rts(rts).into())?;
            }
            Kind::Uc => {
                v.modify_qp(self.qp, QpTransition::RtrUc(rtr).into()).map_err(|e| self.explain(e, args))?;
                v.modify_qp(self.qp, QpTransition::RtsPsn(mine.psn).into())?;
            }
            Kind::Ud => {
                v.modify_qp(self.qp, QpTransition::RtrUd.into())?;
                v.modify_qp(self.qp, QpTransition::RtsPsn(mine.psn).into())?;
                let ah = v.create_ah(self.pd, av)?;
                self.destination = Some(UdDestination { ah, qpn: theirs.qpn, qkey: UD_QKEY });
            }
        }
        Ok(())
    }

    /// A path MTU that the device does not carry is the user's to change.
    fn explain(&self, error: VerbsError, args: &PingpongArgs) -> Failure {
        match error {
            VerbsError::Modify(ModifyError::OutOfRange { attr: Attr::PathMtu }) => {
                Failure::Usage(format!("this device does not carry a path MTU of {}; try a smaller -m", args.mtu))
            }
            other => other.into(),
        }
    }

    fn post_receives(&mut self, v: &mut Handle, count: u32) -> Result<(), Failure> {
        let headroom = if self.kind == Kind::Ud { GRH } else { 0 };
        let sge = [self.buffer.sge(0, self.size + headroom)];
        for wr_id in 0..u64::from(count) {
            v.post_recv(self.qp, &[RecvWr { wr_id, sges: &sge }])?;
        }
        Ok(())
    }

    fn send(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let headroom = if self.kind == Kind::Ud { GRH } else { 0 };
        let sge = [self.buffer.sge(headroom, self.size)];
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
        if args.host.is_some() {
            self.send(v)?;
            awaits_send = true;
        }
        while sent < args.iters || received < args.iters {
            let Some(wc) = self.poller.wait(v, PATIENCE)? else {
                return Err(Failure::Failed(format!(
                    "nothing came for {} s, after {received} of {} messages; {}",
                    PATIENCE.as_secs(),
                    args.iters,
                    if self.kind == Kind::Rc {
                        "the peer has stopped"
                    } else {
                        "one was lost, or the peer has stopped"
                    },
                )));
            };
            let what = if wc.opcode == WcOpcode::Recv { "a receive" } else { "the SEND" };
            let wc = rdma::succeeded(v, &wc, what)?;
            if wc.opcode == WcOpcode::Recv {
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

    /// The client's bytes are zeros and came back and forth; what stands here must be they.
    fn check(&self) -> Result<(), Failure> {
        let headroom = if self.kind == Kind::Ud { GRH } else { 0 };
        let bytes = self.buffer.read(headroom, self.size)?;
        match bytes.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(at) => Err(Failure::Failed(format!("wrong data at byte {at} (was the client started with -c?)"))),
        }
    }
}

#[derive(Serialize)]
struct Played {
    kind: Kind,
    role: &'static str,
    local: Dest,
    remote: Dest,
    size: u64,
    iters: u32,
    bytes: u64,
    seconds: f64,
    mbit_per_s: f64,
    usec_per_iter: f64,
    checked: bool,
}

fn report(args: &PingpongArgs, out: &mut Output, local: Dest, remote: Dest, took: Duration) -> Result<(), Failure> {
    let size = u64::from(args.size.unwrap_or(if args.kind == Kind::Ud { 1024 } else { 4096 }));
    let bytes = size * u64::from(args.iters) * 2;
    let seconds = took.as_secs_f64();
    let usec = seconds * 1e6;
    #[allow(clippy::cast_precision_loss)] // A rate for people.
    let mbit_per_s = bytes as f64 * 8.0 / usec;
    let usec_per_iter = usec / f64::from(args.iters);
    out.line(format_args!("{bytes} bytes in {seconds:.2} seconds = {mbit_per_s:.2} Mbit/sec"))?;
    out.line(format_args!("{} iters in {seconds:.2} seconds = {usec_per_iter:.2} usec/iter", args.iters))?;
    let role = if args.host.is_some() { "client" } else { "server" };
    let checked = args.chk && args.host.is_none();
    let result = Played {
        kind: args.kind,
        role,
        local,
        remote,
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
