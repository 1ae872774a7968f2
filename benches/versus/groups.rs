//! Who is measured beside whom.
//!
//! Owns the contestants of each group, which run in turn, and how long each takes. Never judges.

use std::time::Duration;

use crate::Error;
use crate::devices::Device;
use crate::lab::Lab;
use crate::ours::{self, Perf};
use crate::results::Sample;
use crate::{floor, others};

/// A message of the bandwidth points.
pub(crate) const MIB: usize = 1 << 20;
/// Payload of a packet at the largest path MTU, and how many fit into a superframe.
const PACKET: usize = 4096;
const PACKETS: usize = 15;
/// Segments of a superframe of small packets.
const SMALL_PACKETS: usize = 64;
/// Message sizes of the plots.
pub(crate) const SIZES: [usize; 8] = [8, 64, 512, 4096, 16_384, 65_536, 262_144, MIB];
/// Sizes of the latency plots.
pub(crate) const SMALL_SIZES: [usize; 5] = [8, 64, 512, 4096, 16_384];
/// Connections that are made over the pair in a round.
const CONNECTIONS: usize = 10_000;
/// What simulating as many as the distribution is asked for takes, in seconds.
const SIMULATED: f64 = 7.0;
/// What starting and ending a pair of programs takes.
const START: f64 = 0.7;

/// How much time is spent.
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// For the plots.
    pub(crate) plot_rounds: usize,
    /// Of a bandwidth or rate.
    pub(crate) seconds: f64,
    /// Of the other figures.
    pub(crate) short: f64,
    pub(crate) limit: Duration,
    pub(crate) smoke: bool,
}

impl Effort {
    pub(crate) fn new(quick: bool, smoke: bool, rounds: Option<usize>) -> Self {
        let (usual, plot_rounds, seconds, short, limit) = match (smoke, quick) {
            (true, _) => (1, 1, 0.02, 0.02, 60),
            (_, true) => (3, 1, 0.15, 0.15, 120),
            _ => (5, 3, 0.5, 0.3, 720),
        };
        let rounds = rounds.unwrap_or(usual).max(1);
        Self { rounds, plot_rounds, seconds, short, limit: Duration::from_secs(limit), smoke }
    }
}

type Run = Box<dyn Fn(&Lab) -> Result<Sample, Error>>;

/// One program in one setting.
pub(crate) struct Contestant {
    /// Of its figures, e.g. `uroce/packet/write/bw/1048576`.
    pub(crate) id: String,
    pub(crate) title: String,
    /// What one run takes, in seconds.
    pub(crate) estimate: f64,
    pub(crate) run: Run,
}

/// Contestants that run in turn.
pub(crate) struct Group {
    pub(crate) name: &'static str,
    /// Points that need its figures.
    pub(crate) serves: &'static [&'static str],
    pub(crate) rounds: usize,
    pub(crate) contestants: Vec<Contestant>,
}

impl Group {
    /// Seconds of a round.
    pub(crate) fn estimate(&self) -> f64 {
        self.contestants.iter().map(|c| c.estimate).sum()
    }
}

fn contestant(
    id: impl Into<String>,
    title: impl Into<String>,
    seconds: f64,
    run: impl Fn(&Lab) -> Result<Sample, Error> + 'static,
) -> Contestant {
    Contestant { id: id.into(), title: title.into(), estimate: seconds + START, run: Box::new(run) }
}

fn perf(id: &str, title: &str, perf: Perf) -> Contestant {
    let seconds = perf.seconds * perf.sizes.len() as f64;
    contestant(id, title, seconds, move |lab| perf.run(lab))
}

/// All groups, in the order of the run.
pub(crate) fn all(lab: &Lab, devices: &[Device], effort: &Effort, notes: &mut Vec<String>) -> Vec<Group> {
    let pair: Vec<Device> = devices.iter().copied().filter(|d| *d != Device::Loop).collect();
    if effort.smoke {
        // Something of everything.
        return vec![
            bandwidth(lab, &pair[..pair.len().min(1)], effort, notes),
            in_process(effort),
            latency(&[], effort),
        ];
    }
    let has_loop = devices.contains(&Device::Loop);
    let mut groups = vec![bandwidth(lab, &pair, effort, notes), one_core(&pair, effort)];
    if has_loop {
        groups.push(in_process(effort));
    }
    groups.extend([latency(&pair, effort), rate(&pair, effort), connections(&pair, effort), idle(&pair, effort)]);
    groups.push(simulated(effort));
    groups.extend([plot_bandwidth(devices, effort), plot_latency(devices, effort)]);
    groups.retain(|group| !group.contestants.is_empty());
    groups
}

/// The write length at which iperf3 is fastest here.
fn best_length(lab: &Lab, effort: &Effort, notes: &mut Vec<String>) -> usize {
    if effort.smoke {
        return MIB;
    }
    let mut best = (0.0, MIB);
    for length in [MIB, 131_072] {
        let rates = [1, 2].map(|_| others::iperf(lab, length, 1.0, false).map_or(0.0, |s| s["gbits"]));
        let rate = rates[0].max(rates[1]);
        notes.push(format!("iperf3 -l {length}: {rate:.2} Gbit/s when the setting was chosen"));
        best = if rate > best.0 { (rate, length) } else { best };
    }
    best.1
}

fn iperf(length: usize, one_core: bool) -> Contestant {
    let (id, title) = if one_core { ("iperf3/one-core", "iperf3 TCP, one core") } else { ("iperf3", "iperf3 TCP") };
    contestant(id, title, 1.2, move |lab| others::iperf(lab, length, 1.0, one_core))
}

fn bandwidth(lab: &Lab, pair: &[Device], effort: &Effort, notes: &mut Vec<String>) -> Group {
    let seconds = effort.seconds;
    let mut contestants = vec![iperf(best_length(lab, effort, notes), false)];
    for device in pair.iter().copied() {
        let (name, title) = (device.name(), device.title());
        for operation in ["write", "read", "send"] {
            contestants.push(perf(
                &format!("uroce/{name}/{operation}/bw"),
                &format!("uroce {title}: {operation} of 1 MiB"),
                Perf::new(device, operation, "bw", MIB, seconds),
            ));
        }
        if !device.has_raw() {
            continue;
        }
        contestants.push(contestant(
            format!("raw/{name}/bw"),
            format!("raw {title}: superframes of {PACKETS} x {PACKET} bytes"),
            seconds,
            move |lab| ours::raw_rate(lab, device, PACKET, PACKETS, seconds),
        ));
    }
    if !effort.smoke {
        contestants.push(contestant("ucx/put_bw", "UCX tcp: put of 1 MiB", 1.0, |lab| {
            others::ucx(lab, "ucp_put_bw", MIB, 1000)
        }));
        contestants.push(contestant("libfabric/bw", "libfabric tcp: ping-pong of 1 MiB", 1.0, |lab| {
            others::libfabric(lab, MIB, 300)
        }));
    }
    Group { name: "bandwidth", serves: &["point1", "point2"], rounds: effort.rounds, contestants }
}

fn one_core(pair: &[Device], effort: &Effort) -> Group {
    let mut contestants = vec![iperf(MIB, true)];
    for device in pair.iter().copied() {
        let test = Perf { one_core: true, ..Perf::new(device, "write", "bw", MIB, effort.seconds) };
        let (name, title) = (device.name(), device.title());
        contestants.push(perf(
            &format!("uroce/{name}/write/bw/one-core"),
            &format!("uroce {title}: write of 1 MiB, one core"),
            test,
        ));
    }
    Group { name: "one core", serves: &["point1"], rounds: effort.rounds, contestants }
}

fn in_process(effort: &Effort) -> Group {
    let seconds = effort.seconds;
    let mut contestants =
        vec![contestant("floor", "copy and CRC in memory", seconds, move |lab| floor::measure(lab, seconds))];
    for operation in ["write", "read", "send"] {
        contestants.push(perf(
            &format!("uroce/loop/{operation}/bw"),
            &format!("uroce in process: {operation} of 1 MiB"),
            Perf::new(Device::Loop, operation, "bw", MIB, seconds),
        ));
    }
    Group { name: "in process", serves: &["point3"], rounds: effort.rounds, contestants }
}

fn latency(pair: &[Device], effort: &Effort) -> Group {
    let seconds = effort.short;
    let mut contestants = Vec::new();
    for (spin, way) in [(true, "spin"), (false, "block")] {
        contestants.push(contestant(format!("tcp/ping/{way}"), format!("TCP ping-pong, {way}"), seconds, move |lab| {
            others::tcp_ping(lab, spin, seconds)
        }));
    }
    for device in pair.iter().copied() {
        let (name, title) = (device.name(), device.title());
        if device.has_raw() {
            contestants.push(contestant(
                format!("raw/{name}/ping"),
                format!("raw {title}: round trip"),
                seconds,
                move |lab| ours::raw_ping(lab, device, 8, seconds),
            ));
        }
        for operation in ["send", "write"] {
            for wait in ["spin", "block"] {
                contestants.push(perf(
                    &format!("uroce/{name}/{operation}/lat/{wait}"),
                    &format!("uroce {title}: {operation} ping-pong, {wait}"),
                    Perf { wait, ..Perf::new(device, operation, "lat", 8, seconds) },
                ));
            }
        }
    }
    if !effort.smoke {
        contestants.push(contestant("ucx/tag_lat", "UCX tcp: tag ping-pong of 8 bytes", 1.0, |lab| {
            others::ucx(lab, "tag_lat", 8, 10_000)
        }));
        contestants.push(contestant("libfabric/lat", "libfabric tcp: ping-pong of 8 bytes", 1.0, |lab| {
            others::libfabric(lab, 8, 5000)
        }));
    }
    Group { name: "latency", serves: &["point4"], rounds: effort.rounds, contestants }
}

fn rate(pair: &[Device], effort: &Effort) -> Group {
    let seconds = effort.seconds;
    let mut contestants = Vec::new();
    for device in pair.iter().copied() {
        let (name, title) = (device.name(), device.title());
        contestants.push(perf(
            &format!("uroce/{name}/write/rate"),
            &format!("uroce {title}: writes of 64 bytes, one QP"),
            Perf::new(device, "write", "bw", 64, seconds),
        ));
        if !device.has_raw() {
            continue;
        }
        contestants.push(contestant(
            format!("raw/{name}/rate"),
            format!("raw {title}: superframes of {SMALL_PACKETS} x 64 bytes"),
            seconds,
            move |lab| ours::raw_rate(lab, device, 64, SMALL_PACKETS, seconds),
        ));
    }
    if !effort.smoke {
        contestants.push(contestant("ucx/put_rate", "UCX tcp: puts of 64 bytes", 1.0, |lab| {
            others::ucx(lab, "ucp_put_bw", 64, 100_000)
        }));
        contestants.push(contestant("ucx/tag_rate", "UCX tcp: tagged sends of 64 bytes", 1.0, |lab| {
            others::ucx(lab, "tag_bw", 64, 100_000)
        }));
        contestants.push(contestant("libfabric/rate", "libfabric tcp: ping-pong of 64 bytes", 1.0, |lab| {
            others::libfabric(lab, 64, 5000)
        }));
    }
    Group { name: "rate", serves: &["point5"], rounds: effort.rounds, contestants }
}

fn connections(pair: &[Device], effort: &Effort) -> Group {
    let seconds = effort.short;
    let mut contestants = Vec::new();
    for (spin, way, at_once) in [(true, "spin", 1), (true, "spin", 64), (false, "block", 1)] {
        contestants.push(contestant(
            format!("tcp/connect/{way}/{at_once}"),
            format!("TCP connect, accept, close: {way}, {at_once} at once"),
            seconds + 0.5,
            move |lab| others::tcp_connect(lab, spin, at_once, seconds),
        ));
    }
    // What makes connections knows these two.
    for device in pair.iter().copied().filter(|d| matches!(d, Device::Packet | Device::Udp)) {
        for at_once in [1, 64] {
            contestants.push(contestant(
                format!("uroce/{}/connect/{at_once}", device.name()),
                format!("uroce {}: connections, {at_once} at once", device.title()),
                1.0,
                move |lab| ours::connections(lab, device, CONNECTIONS, at_once),
            ));
        }
    }
    contestants.push(contestant("uroce/here/connect", "uroce in process, one core: 100,000 connections", 1.5, |lab| {
        ours::connections_here(lab, "direct", 100_000, 1, "0")
    }));
    Group { name: "connections", serves: &["point7"], rounds: effort.rounds, contestants }
}

/// Virtual time: once is enough.
fn simulated(effort: &Effort) -> Group {
    let count = if effort.rounds < 5 { 10_000 } else { 100_000 };
    let mut contestants = Vec::new();
    for (loss, title) in [("0", "no loss"), ("0.01", "1 % lost each way")] {
        contestants.push(contestant(
            format!("uroce/sim/connect/{loss}"),
            format!("uroce simulated, 10 us each way, 64 at once: {count} connections, {title}"),
            SIMULATED,
            move |lab| ours::connections_here(lab, "sim", count, 64, loss),
        ));
    }
    Group { name: "connections, simulated", serves: &["point7"], rounds: 1, contestants }
}

fn idle(pair: &[Device], effort: &Effort) -> Group {
    let seconds = if effort.smoke { 0.1 } else { 1.0 };
    let contestants = pair.iter().copied().map(|device| {
        contestant(
            format!("uroce/{}/idle", device.name()),
            format!("uroce {}: an endpoint that waits", device.title()),
            seconds,
            move |lab| ours::idle(lab, device, seconds),
        )
    });
    Group { name: "idle", serves: &["point9"], rounds: effort.rounds.min(3), contestants: contestants.collect() }
}

fn plot_bandwidth(devices: &[Device], effort: &Effort) -> Group {
    let sizes = if effort.smoke { vec![64, 4096] } else { SIZES.to_vec() };
    let seconds = effort.short / 2.0;
    let mut contestants = Vec::new();
    for device in devices.iter().copied() {
        for operation in ["write", "read", "send"] {
            let (name, title) = (device.name(), device.title());
            contestants.push(perf(
                &format!("plot/uroce/{name}/{operation}/bw"),
                &format!("uroce {title}: {operation} by size"),
                Perf { sizes: sizes.clone(), ..Perf::new(device, operation, "bw", 0, seconds) },
            ));
        }
    }
    if !effort.smoke {
        for size in SIZES {
            let messages = (400_000_000 / size).clamp(200, 50_000);
            contestants.push(contestant(
                format!("plot/ucx/bw/{size}"),
                format!("UCX tcp: puts of {size}"),
                0.6,
                move |lab| others::ucx(lab, "ucp_put_bw", size, messages),
            ));
        }
    }
    Group { name: "bandwidth by size", serves: &["plots"], rounds: effort.plot_rounds, contestants }
}

fn plot_latency(devices: &[Device], effort: &Effort) -> Group {
    let sizes = if effort.smoke { vec![8, 64] } else { SMALL_SIZES.to_vec() };
    let seconds = effort.short / 2.0;
    let mut contestants = Vec::new();
    for device in devices.iter().copied() {
        for operation in ["write", "send", "read"] {
            let (name, title) = (device.name(), device.title());
            contestants.push(perf(
                &format!("plot/uroce/{name}/{operation}/lat"),
                &format!("uroce {title}: {operation} latency by size"),
                Perf { sizes: sizes.clone(), ..Perf::new(device, operation, "lat", 0, seconds) },
            ));
        }
    }
    if !effort.smoke {
        for size in SMALL_SIZES {
            contestants.push(contestant(
                format!("plot/ucx/lat/{size}"),
                format!("UCX tcp: tag_lat of {size}"),
                0.6,
                move |lab| others::ucx(lab, "tag_lat", size, 3000),
            ));
        }
    }
    Group { name: "latency by size", serves: &["plots"], rounds: effort.plot_rounds, contestants }
}
