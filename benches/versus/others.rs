//! What people would use instead: iperf3, TCP by hand, UCX over tcp, libfabric's tcp provider.
//!
//! Owns their command lines and how their output is read.

use std::time::Duration;

use crate::Error;
use crate::lab::{End, Job, Lab};
use crate::ours::percentiles;
use crate::results::Sample;
use crate::tcp;

/// How long a program may take beyond what it was asked to.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 5201;

/// iperf3 TCP with writes of `length` bytes, one stream, each side on its processor.
pub(crate) fn iperf(lab: &Lab, length: usize, seconds: f64, one_core: bool) -> Result<Sample, Error> {
    let far = if one_core { "0" } else { "1" };
    let server =
        Job::new(End::A, ["iperf3", "-s", "-1", "-p", &PORT.to_string(), "--forceflush"]).ready_at("listening");
    // Whole seconds are all that it takes.
    let (length, time) = (length.to_string(), seconds.ceil().max(1.0).to_string());
    let affinity = format!("{far},0");
    let words = ["iperf3", "-c", End::A.address(), "-p", "5201", "-t", &time, "-l", &length, "-A", &affinity, "-J"];
    let json = lab.pair(&server, &Job::new(End::B, words).on(far), PATIENCE)?.0.json()?;
    let bits = json["end"]["sum_received"]["bits_per_second"].as_f64().ok_or("iperf3 says no rate")?;
    Ok(Sample::from([("gbits".into(), bits / 1e9)]))
}

fn tcp_jobs(lab: &Lab, what: &str, spin: bool, more: &[String]) -> (Job, Job) {
    let job = |end: End, client: bool| {
        let words = [lab.program("versus"), "child".into(), "tcp".into(), what.into()];
        let mut words = Vec::from(words);
        words.push(tcp::address(End::A.address(), 5301));
        if client {
            words.push("--client".into());
            words.extend_from_slice(more);
        }
        if spin {
            words.push("--spin".into());
        }
        Job::new(end, words)
    };
    (job(End::A, false).ready_at(tcp::READY), job(End::B, true))
}

/// A TCP ping-pong of 8 bytes.
pub(crate) fn tcp_ping(lab: &Lab, spin: bool, seconds: f64) -> Result<Sample, Error> {
    let (server, client) = tcp_jobs(lab, "ping", spin, &["--seconds".into(), seconds.to_string()]);
    percentiles(&lab.pair(&server, &client, PATIENCE)?.0.json()?["rtt_us"])
}

/// Connections a second that were made, accepted and closed.
pub(crate) fn tcp_connect(lab: &Lab, spin: bool, outstanding: usize, seconds: f64) -> Result<Sample, Error> {
    let more = ["--seconds".into(), seconds.to_string(), "--outstanding".into(), outstanding.to_string()];
    let (server, client) = tcp_jobs(lab, "connect", spin, &more);
    let (client, server) = lab.pair(&server, &client, PATIENCE)?;
    let rate = |json: serde_json::Value| json["rate"].as_f64().ok_or("no rate");
    let made = client.json()?;
    let accepted = rate(server.ok_or("the server did not end")?.json()?)?;
    let mut sample = Sample::from([("connections_s".into(), rate(made.clone())?.min(accepted))]);
    for name in ["p50", "p99", "p999"] {
        sample.insert(format!("{name}_us"), made["us"][name].as_f64().ok_or("no percentile")?);
    }
    Ok(sample)
}

/// A test of ucx_perftest over tcp. What it prints with `-f` is one line of numbers: messages, then times in
/// microseconds (one percentile, average, overall), bandwidths in MB/s and rates in messages a second.
pub(crate) fn ucx(lab: &Lab, test: &str, size: usize, messages: usize) -> Result<Sample, Error> {
    let job = |end: End, words: &[&str]| {
        Job::new(end, words.iter().copied()).with("UCX_TLS", "tcp").with("UCX_NET_DEVICES", end.interface())
    };
    // Its words would else wait in a buffer.
    let server = job(End::A, &["stdbuf", "-oL", "ucx_perftest", "-p", "13400"]).ready_at("Waiting");
    let (size, messages) = (size.to_string(), messages.to_string());
    let words =
        ["ucx_perftest", End::A.address(), "-p", "13400", "-t", test, "-s", &size, "-n", &messages, "-w", "500", "-f"];
    let (client, _) = lab.pair(&server, &job(End::B, &words), PATIENCE)?;
    let numbers = |line: &str| line.split_whitespace().map(str::parse::<f64>).collect::<Result<Vec<_>, _>>().ok();
    let row = client.out.lines().rev().filter_map(numbers).find(|row| row.len() >= 8);
    let row = row.ok_or_else(|| format!("ucx_perftest printed no row: {}{}", client.out, client.err))?;
    if test.ends_with("_lat") {
        // Half a round trip, as perftest.
        return Ok(Sample::from([("p50_us".into(), 2.0 * row[1]), ("average_us".into(), 2.0 * row[3])]));
    }
    Ok(Sample::from([("gbits".into(), row[5] * 1_048_576.0 * 8.0 / 1e9), ("messages_s".into(), row[7])]))
}

/// A ping-pong of fi_pingpong over the tcp provider.
pub(crate) fn libfabric(lab: &Lab, size: usize, round_trips: usize) -> Result<Sample, Error> {
    let (size, round_trips) = (size.to_string(), round_trips.to_string());
    let words = |more: &[&str]| {
        let all = ["fi_pingpong", "-p", "tcp", "-e", "msg", "-I", &round_trips, "-S", &size];
        all.iter().chain(more).map(ToString::to_string).collect::<Vec<_>>()
    };
    let server = Job::new(End::A, words(&[]));
    let (client, _) = lab.pair(&server, &Job::new(End::B, words(&[End::A.address()])), PATIENCE)?;
    // bytes, sent, acknowledged, total, time, MB/s, microseconds a transfer, transfers.
    let row = client.out.lines().last().ok_or("fi_pingpong printed nothing")?;
    let column = |n: usize| row.split_whitespace().nth(n).and_then(|c| c.parse::<f64>().ok());
    let (bandwidth, transfer) = column(5).zip(column(6)).ok_or_else(|| format!("fi_pingpong printed {row}"))?;
    Ok(Sample::from([
        ("gbits".into(), bandwidth * 8.0 / 1e3),
        ("average_us".into(), 2.0 * transfer),
        ("messages_s".into(), 1e6 / transfer),
    ]))
}
