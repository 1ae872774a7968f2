//! uroce and the bare device: `uroce perf`, `uroce cm time` and the example `raw`.
//!
//! Owns their command lines and how their JSON is read.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Error;
use crate::devices::Device;
use crate::lab::{End, Job, Lab};
use crate::results::Sample;

/// How long a program may take beyond what it was asked to.
const PATIENCE: Duration = Duration::from_secs(20);

/// A test of `uroce perf`.
#[derive(Clone, Debug)]
pub(crate) struct Perf {
    pub(crate) device: Device,
    /// send, write, read
    pub(crate) operation: &'static str,
    /// bw, lat
    pub(crate) direction: &'static str,
    pub(crate) sizes: Vec<usize>,
    /// spin, adaptive, block
    pub(crate) wait: &'static str,
    /// Both ends on the first processor.
    pub(crate) one_core: bool,
    /// Of each size.
    pub(crate) seconds: f64,
}

impl Perf {
    /// A test of one size, each side spinning on a processor of its own.
    pub(crate) fn new(
        device: Device,
        operation: &'static str,
        direction: &'static str,
        size: usize,
        seconds: f64,
    ) -> Self {
        Self { device, operation, direction, sizes: vec![size], wait: "spin", one_core: false, seconds }
    }

    /// Sends under way, and those that share a completion: few large ones, many small ones.
    fn depth(&self) -> (u32, u32) {
        match self.sizes.iter().max().copied().unwrap_or(0) {
            0..=4096 => (512, 64),
            4097..=262_144 => (64, 16),
            _ => (16, 4),
        }
    }

    fn words(&self, lab: &Lab, client: bool) -> Vec<String> {
        let end = if client { End::B } else { End::A };
        let (depth, moderation) = self.depth();
        let mut words = vec![lab.program("uroce"), "perf".into(), self.operation.into(), self.direction.into()];
        let mut add = |more: &[&str]| words.extend(more.iter().map(ToString::to_string));
        add(&["-d", &self.device.argument(end), "--wait", self.wait, "-t", &depth.to_string()]);
        if client || self.device == Device::Loop {
            let sizes = self.sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            add(&["--sizes", &sizes, "-D", &self.seconds.to_string(), "-Q", &moderation.to_string(), "-l", "16"]);
            add(&["--verify", "--json"]);
        }
        if client && self.device != Device::Loop {
            add(&[self.device.address(End::A)]);
        }
        words
    }

    /// Runs it. One size gives its figures by name; several have the size in front: `4096/gbits`.
    pub(crate) fn run(&self, lab: &Lab) -> Result<Sample, Error> {
        let patience = PATIENCE + Duration::from_secs_f64(self.seconds * self.sizes.len() as f64);
        let (near, far) = if self.one_core { ("0", "0") } else { ("0", "1") };
        let nobody = self.device.is_unprivileged();
        let json = if self.device == Device::Loop {
            let cores = if self.one_core { "0,0" } else { "1,0" };
            let words = self.words(lab, true).into_iter().chain(["--cpu".into(), cores.into()]);
            lab.run(&Job::new(End::B, words).on("0,1"), patience)?.json()?
        } else {
            let server =
                Job::new(End::A, self.words(lab, false)).on(near).unprivileged(nobody).ready_at("Waiting for client");
            let client = Job::new(End::B, self.words(lab, true)).on(far).unprivileged(nobody);
            lab.pair(&server, &client, patience)?.0.json()?
        };
        if json["test_info"]["verified"] != true {
            return Err("the content was not checked".into());
        }
        let mut sample = Sample::new();
        for result in json["results"].as_array().ok_or("no results")? {
            let size = result["MsgSize"].as_u64().ok_or("no size")?;
            let prefix = if self.sizes.len() > 1 { format!("{size}/") } else { String::new() };
            for (name, value) in self.figures(result) {
                sample.insert(format!("{prefix}{name}"), value.ok_or("a figure is missing")?);
            }
        }
        Ok(sample)
    }

    fn figures(&self, result: &Value) -> Vec<(&'static str, Option<f64>)> {
        let number = |name: &str| result[name].as_f64();
        if self.direction == "bw" {
            return vec![("gbits", number("BW_average").map(|b| b * 8.0 / 1e9)), ("messages_s", number("MsgRate"))];
        }
        // perftest halves the round trip of a ping-pong.
        let times = if self.operation == "read" { 1.0 } else { 2.0 };
        let round_trip = |name: &str| number(name).map(|us| us * times);
        vec![
            ("p50_us", round_trip("t_typical")),
            ("p90_us", round_trip("t_90_percentile")),
            ("p99_us", round_trip("t_99_percentile")),
            ("p999_us", round_trip("t_99_9_percentile")),
        ]
    }
}

/// A device by itself: superframes of `segments` segments of `size` bytes, as many as it takes.
pub(crate) fn raw_rate(lab: &Lab, device: Device, size: usize, segments: usize, seconds: f64) -> Result<Sample, Error> {
    let (near, far) = raw_jobs(lab, device, ["recv", "send"], size, segments, seconds);
    let (sent, received) = lab.pair(&near, &far, PATIENCE)?;
    // What arrived counts.
    let json = received.ok_or("the receiver did not end")?.json().or_else(|_| sent.json())?;
    let figure = |name: &str| json[name].as_f64().ok_or_else(|| format!("raw says no {name}"));
    Ok(Sample::from([("gbits".into(), figure("gbit_s")?), ("packets_s".into(), figure("kpps")? * 1e3)]))
}

/// The device's own round trip.
pub(crate) fn raw_ping(lab: &Lab, device: Device, size: usize, seconds: f64) -> Result<Sample, Error> {
    let (near, far) = raw_jobs(lab, device, ["echo", "ping"], size, 1, seconds);
    let json = lab.pair(&near, &far, PATIENCE)?.0.json()?;
    percentiles(&json["rtt_us"])
}

fn raw_jobs(lab: &Lab, device: Device, roles: [&str; 2], size: usize, segments: usize, seconds: f64) -> (Job, Job) {
    let job = |end: End, role: &str| {
        let mut words = vec![lab.program("raw"), role.to_owned()];
        let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
        add("--device", device.argument(end));
        add("--size", size.to_string());
        add("--segments", segments.to_string());
        add("--seconds", seconds.to_string());
        if end == End::B {
            add("--peer", device.address(End::A).to_owned());
        }
        Job::new(end, words).unprivileged(device.is_unprivileged())
    };
    (job(End::A, roles[0]), job(End::B, roles[1]))
}

/// Percentiles as our small programs print them.
pub(crate) fn percentiles(json: &Value) -> Result<Sample, Error> {
    let mut sample = Sample::new();
    for name in ["p50", "p90", "p99", "p999"] {
        let value = json[name].as_f64().filter(|v| *v > 0.0);
        sample.insert(format!("{name}_us"), value.ok_or("nothing came back in time")?);
    }
    Ok(sample)
}

/// Connections a second over the pair, `at_once` of them under way, as the example `connections` makes them.
pub(crate) fn connections(lab: &Lab, device: Device, count: usize, at_once: usize) -> Result<Sample, Error> {
    let job = |end: End, words: &[String]| {
        let all = [lab.program("connections")].into_iter().chain(words.iter().cloned());
        Job::new(end, all).unprivileged(device.is_unprivileged())
    };
    let server = job(End::A, &["serve".into(), device.argument(End::A), "spin".into()]);
    let to = ["connect".into(), device.argument(End::B), device.address(End::A).to_owned()];
    let how = [count.to_string(), at_once.to_string(), "spin".into()];
    let ran = lab.pair(&server, &job(End::B, &[to, how].concat()), PATIENCE)?.0;
    connection_report(&ran.out)
}

/// Connections in one process, on one core, with packets lost at `loss`: `direct` for how many a second, `sim` for how
/// long each takes in virtual time.
pub(crate) fn connections_here(
    lab: &Lab,
    mode: &str,
    count: usize,
    at_once: usize,
    loss: &str,
) -> Result<Sample, Error> {
    let words = [lab.program("connections"), mode.into(), count.to_string(), at_once.to_string(), loss.into()];
    connection_report(&lab.run(&Job::new(End::A, words), PATIENCE * 2)?.out)
}

/// The figures in what `connections` prints for people.
fn connection_report(text: &str) -> Result<Sample, Error> {
    let before = |mark: &str| {
        let (front, _) = text.split_once(mark)?;
        front.rsplit([' ', '\n']).next()?.parse::<f64>().ok()
    };
    let after = |mark: &str| {
        let (_, rest) = text.split_once(mark)?;
        rest.split([',', '\n']).next()?.trim().parse::<f64>().ok()
    };
    let rate = before(" a second of processor time").or_else(|| before(" a second,"));
    let mut sample = Sample::from([("connections_s".into(), rate.ok_or_else(|| format!("no rate in {text}"))?)]);
    for (name, mark) in [("p50_us", "p50 "), ("p99_us", "p99 "), ("p999_us", "p99.9 ")] {
        sample.insert(name.into(), after(mark).ok_or_else(|| format!("no {mark}in {text}"))?);
    }
    Ok(sample)
}

/// Percent of a processor that an endpoint takes which waits for a client.
pub(crate) fn idle(lab: &Lab, device: Device, seconds: f64) -> Result<Sample, Error> {
    let words =
        [lab.program("uroce"), "perf".into(), "write".into(), "bw".into(), "-d".into(), device.argument(End::A)];
    let running = lab.start(&Job::new(End::A, words).unprivileged(device.is_unprivileged()))?;
    std::thread::sleep(Duration::from_millis(500));
    let (before, begin) = (processor_seconds(running.pid())?, Instant::now());
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let used = processor_seconds(running.pid())? - before;
    Ok(Sample::from([("percent".into(), 100.0 * used / begin.elapsed().as_secs_f64())]))
}

/// Processor time of all threads of a process.
fn processor_seconds(pid: u32) -> Result<f64, Error> {
    let mut nanos = 0.0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanos += text.split(' ').next().ok_or("no time")?.parse::<f64>()?;
    }
    Ok(nanos / 1e9)
}
