//! The flags of `uroce perf`: letters, meanings and defaults of perftest.
//!
//! Owns the command line. Never measures.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use uroce::engine::PollPolicy;
use uroce::types::PathMtu;

use crate::device_arg::DeviceArg;
use crate::exit::Failure;

/// Bytes of an atomic.
pub(super) const ATOMIC: u64 = 8;
/// Sizes of `-a`: 2^1 to 2^23, as perftest.
const ALL_SIZES: core::ops::RangeInclusive<u32> = 1..=23;
/// Work requests posted in one call at most.
pub(super) const POST_LIST_MAX: u32 = 64;
/// Send queue of a latency test.
pub(super) const LATENCY_QUEUE: u32 = 64;
/// Largest message.
const SIZE_MAX: u64 = super::side::SIZE_MAX;

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Operation {
    /// SEND
    Send,
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
    /// Fetch and add, or compare and swap
    Atomic,
}

impl Operation {
    /// Whether the answer carries data.
    pub(super) const fn is_one_sided_fetch(self) -> bool {
        matches!(self, Self::Read | Self::Atomic)
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direction {
    /// Bandwidth
    Bw,
    /// Latency
    Lat,
}

/// Which atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(super) enum Atomic {
    /// Fetch and add
    #[value(name = "FETCH_AND_ADD")]
    FetchAndAdd,
    /// Compare and swap
    #[value(name = "CMP_AND_SWAP")]
    CmpAndSwap,
}

impl Atomic {
    /// perftest's name.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::FetchAndAdd => "FETCH_AND_ADD",
            Self::CmpAndSwap => "CMP_AND_SWAP",
        }
    }
}

/// How a side waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Wait {
    /// Polls without a pause
    Spin,
    /// Polls for a little while, then sleeps
    Adaptive,
    /// Sleeps as soon as nothing is there
    Block,
}

/// Unit of bandwidths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// 2^20 bytes a second.
    MiB,
    /// 10^9 bits a second.
    Gbit,
}

impl Unit {
    /// Bytes a second in this unit.
    pub(super) const fn of(self, bytes_per_second: f64) -> f64 {
        match self {
            Self::MiB => bytes_per_second / 1_048_576.0,
            Self::Gbit => bytes_per_second * 8.0 / 1e9,
        }
    }

    /// For messages.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::MiB => "MiB/sec",
            Self::Gbit => "Gb/sec",
        }
    }
}

/// What `--output` prints instead of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Bare {
    /// Average bandwidth
    Bandwidth,
    /// Messages a second, in millions
    MessageRate,
    /// Average latency
    Latency,
}

/// Flags of `uroce perf`. Without HOST this is the server, which takes sizes and counts from its client.
#[derive(Args, Clone, Debug)]
pub(crate) struct PerfArgs {
    /// What is done
    pub(super) operation: Operation,
    /// What is measured
    pub(super) direction: Direction,
    /// RoCEv2 address of the server; without it this is the server
    pub(super) host: Option<String>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID][,receive=ring|calls], xdp:IFNAME, tap:IFNAME,ip=ADDR,
    /// pnet:IFNAME, hw:NAME, or loop for both ends in this process
    #[arg(short, long = "device", visible_alias = "ib-dev")]
    pub(super) device: Option<DeviceArg>,
    /// Port of the connection manager's service
    #[arg(short, long, default_value_t = 18515)]
    pub(super) port: u16,
    /// Bytes a message [default: bw 65536, lat 2, atomic 8]
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..=SIZE_MAX))]
    size: Option<u64>,
    /// Messages, at least 5 [default: bw 5000, lat 1000]
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u64).range(5..))]
    iters: Option<u64>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: what the device carries]
    #[arg(short, long, value_parser = mtu)]
    pub(super) mtu: Option<u32>,
    /// QPs
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) qps: u32,
    /// Sends outstanding a QP
    #[arg(short, long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16_000))]
    tx_depth: u32,
    /// Receives posted a QP
    #[arg(short, long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub(super) rx_depth: u32,
    /// A completion every this many sends
    #[arg(short = 'Q', long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    cq_mod: u32,
    /// Index in the GID table [default: the first IPv4 one, or else the first]
    #[arg(short = 'x', long)]
    pub(super) gid_index: Option<u8>,
    /// READs and atomics outstanding a QP
    #[arg(short, long, default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=128))]
    outs: u8,
    /// All sizes from 2 to 2^23
    #[arg(short, long, conflicts_with_all = ["size", "duration"])]
    all: bool,
    /// These sizes, one after the other
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with_all = ["size", "all"])]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=SIZE_MAX))]
    sizes: Vec<u64>,
    /// Run for this many seconds a size, at least 0.01
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = seconds)]
    pub(super) duration: Option<Duration>,
    /// Both sides send
    #[arg(short, long)]
    pub(super) bidirectional: bool,
    /// Connection type
    #[arg(short, long, default_value = "RC", value_parser = ["RC"])]
    connection: String,
    /// Work requests posted in one call
    #[arg(short = 'l', long = "post_list", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(POST_LIST_MAX)))]
    pub(super) post_list: u32,
    /// How to wait for completions [default: spin; a bandwidth test's server: adaptive]. A WRITE latency test that does not
    /// spin sends immediate data along: memory alone wakes nobody
    #[arg(long)]
    pub(super) wait: Option<Wait>,
    /// Run on this processor alone; with -d loop a second one is for the other end
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', num_args = 1..=2)]
    pub(super) cpu: Vec<usize>,
    /// Check the content of messages: that of the last one measured, and of further ones after each size
    #[arg(long)]
    pub(super) verify: bool,
    /// Send up to this many bytes inline
    #[arg(short = 'I', long = "inline_size", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=512))]
    pub(super) inline: u32,
    /// Local ACK timeout: 4.096 us x 2^N
    #[arg(short = 'u', long = "qp-timeout", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    pub(super) qp_timeout: u8,
    /// Which atomic
    #[arg(short = 'A', long = "atomic_type", default_value = "FETCH_AND_ADD")]
    pub(super) atomic: Atomic,
    /// Take no peak bandwidth
    #[arg(short = 'N', long = "noPeak")]
    no_peak: bool,
    /// Connect through the connection manager; this is always so
    #[arg(short = 'R', long = "rdma_cm")]
    rdma_cm: bool,
    /// No warning about CPU frequencies; there is none
    #[arg(short = 'F', long = "CPU-freq")]
    cpu_freq: bool,
    /// Bandwidths in Gbit/s
    #[arg(long = "report_gbits")]
    gbits: bool,
    /// Print one bare number
    #[arg(long, value_name = "WHAT")]
    pub(super) output: Option<Bare>,
    /// Exit with code 3 when the average bandwidth is below this (in the unit of the table)
    #[arg(short = 'w', long = "limit_bw", value_name = "BANDWIDTH")]
    pub(super) limit_bw: Option<f64>,
    /// Exit with code 3 when the message rate is below this, in millions a second
    #[arg(short = 'y', long = "limit_msgrate", value_name = "RATE")]
    pub(super) limit_rate: Option<f64>,
    /// Also write the result as JSON to the file of --out_json_file
    #[arg(long = "out_json")]
    pub(super) out_json: bool,
    /// File of --out_json
    #[arg(long = "out_json_file", default_value = "perftest_out.json")]
    pub(super) out_json_file: PathBuf,
}

/// Seconds of a test.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.01..=86_400.0).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write a number of seconds, from 0.01 to 86400".into())
}

fn mtu(text: &str) -> Result<u32, String> {
    let bytes = text.parse::<usize>().ok().and_then(PathMtu::from_bytes);
    let bytes = bytes.and_then(|m| u32::try_from(m.bytes()).ok());
    bytes.ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".into())
}

impl Wait {
    /// As the host takes it.
    pub(super) fn policy(self) -> PollPolicy {
        match self {
            Self::Spin => PollPolicy::Spin,
            Self::Adaptive => PollPolicy::default(),
            Self::Block => PollPolicy::Block,
        }
    }
}

impl PerfArgs {
    /// Message sizes to measure, in order.
    pub(super) fn sizes(&self) -> Vec<u64> {
        if self.operation == Operation::Atomic {
            return vec![ATOMIC];
        }
        if self.all {
            return ALL_SIZES.map(|e| 1 << e).collect();
        }
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let default = if self.direction == Direction::Bw { 65_536 } else { 2 };
        vec![self.size.unwrap_or(default)]
    }

    /// Messages of one size, unless a duration rules.
    pub(super) fn iterations(&self) -> u64 {
        self.iters.unwrap_or(if self.direction == Direction::Bw { 5000 } else { 1000 })
    }

    /// Sends outstanding a QP: no more than there are messages, as perftest.
    pub(super) fn depth(&self) -> u32 {
        if self.direction == Direction::Lat {
            return 1;
        }
        if self.duration.is_some() { self.tx_depth } else { self.tx_depth.min(clamp(self.iterations())) }
    }

    /// Work requests that a send queue has room for. A latency test has one message under way and yet completions for few.
    pub(super) fn queue(&self) -> u32 {
        if self.direction == Direction::Lat { LATENCY_QUEUE } else { self.depth() }
    }

    /// Sends that share a completion.
    pub(super) fn moderation(&self) -> u32 {
        self.cq_mod.min(self.depth())
    }

    /// How this side waits: the client of any test and both sides of a ping-pong are in a hurry.
    pub(super) fn wait(&self, is_client: bool) -> Wait {
        let hurries = is_client || (self.direction == Direction::Lat && !self.operation.is_one_sided_fetch());
        self.wait.unwrap_or(if hurries { Wait::Spin } else { Wait::Adaptive })
    }

    /// READs and atomics outstanding a QP.
    pub(super) const fn outstanding_reads(&self) -> u8 {
        self.outs
    }

    /// Messages whose time makes a peak; 0 for none.
    pub(super) fn peak_window(&self) -> u64 {
        let none = self.no_peak || self.duration.is_some();
        if none { 0 } else { self.depth().into() }
    }

    /// Unit of the table.
    pub(super) const fn unit(&self) -> Unit {
        if self.gbits { Unit::Gbit } else { Unit::MiB }
    }

    /// Binds the calling thread, the client's or the server's of `-d loop`, to its processor.
    pub(super) fn pin(&self, is_second: bool) -> Result<(), Failure> {
        let cpu = if is_second { self.cpu.get(1) } else { self.cpu.first() };
        let Some(cpu) = cpu else { return Ok(()) };
        uroce::device::pin_current_thread(*cpu).map_err(|e| Failure::Environment(e.to_string()))
    }

    /// Whether WRITEs of a ping-pong carry immediate data: who sleeps does not look at memory.
    pub(super) fn is_announced(&self) -> bool {
        self.direction == Direction::Lat && self.operation == Operation::Write && self.wait(true) != Wait::Spin
    }

    /// Combinations that the flags allow one by one and that mean nothing together.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let usage = |what: &str| Err(Failure::Usage(what.into()));
        if self.device == Some(DeviceArg::Loop) && self.host.is_some() {
            return usage("loop has both ends in this process; leave HOST out");
        }
        if self.bidirectional && self.direction == Direction::Lat {
            return usage("-b is for bw; a latency test goes both ways by itself");
        }
        if self.bidirectional && self.duration.is_some() {
            return usage("-b counts messages; leave -D out");
        }
        if self.cpu.len() > 1 && self.device != Some(DeviceArg::Loop) {
            return usage("--cpu takes one processor; two are for both ends of -d loop");
        }
        if self.verify && (self.bidirectional || self.operation == Operation::Atomic) {
            return usage("--verify is for send, write and read in one direction");
        }
        if self.operation == Operation::Atomic && !self.sizes.is_empty() {
            return usage("an atomic has 8 bytes; leave --sizes out");
        }
        if self.operation == Operation::Atomic && (self.all || self.size.is_some_and(|s| s != ATOMIC)) {
            return usage("an atomic has 8 bytes; leave -s and -a out");
        }
        if self.direction == Direction::Lat && (self.limit_bw.is_some() || self.limit_rate.is_some()) {
            return usage("--limit_bw and --limit_msgrate are for bw");
        }
        match self.output {
            Some(Bare::Latency) if self.direction == Direction::Bw => usage("--output=latency is for lat"),
            Some(Bare::Bandwidth | Bare::MessageRate) if self.direction == Direction::Lat => {
                usage("--output=bandwidth and message_rate are for bw")
            }
            _ => Ok(()),
        }
    }
}

fn clamp(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
