//! Which figures the page plots.
//!
//! Owns the choice of lines: few enough in each plot that they can be told apart, and a device in the same colour in all
//! plots of a kind. Never draws.

use crate::devices::Device;
use crate::groups::{SIZES, SMALL_SIZES};
use crate::plot::{Line, Plot};
use crate::results::Results;

const OPERATIONS: [&str; 3] = ["write", "send", "read"];

/// Every plot, below its heading.
pub(crate) fn all(results: &Results) -> [(&'static str, Vec<Plot>); 3] {
    let round_trips = [("p50_us", "median"), ("p99_us", "99th percentile")];
    let round_trips = round_trips.iter().flat_map(|of| OPERATIONS.map(|operation| round_trip(results, operation, *of)));
    let ways = ["spin", "block"].iter().flat_map(|way| ["write", "send"].map(|op| percentiles(results, op, way)));
    [
        ("Bandwidth by size", OPERATIONS.map(|operation| bandwidth(results, operation)).into()),
        ("Round trips by size, both sides spinning", round_trips.collect()),
        ("Round trips of 8 bytes, percentiles", ways.collect()),
    ]
}

/// Value of each size that was measured.
fn by_size(results: &Results, id: &str, metric: &str, sizes: &[usize]) -> Vec<(usize, f64)> {
    let value = |(place, size): (usize, &usize)| results.get(id, &format!("{size}/{metric}")).map(|v| (place, v));
    sizes.iter().enumerate().filter_map(value).collect()
}

/// Of another program that was run once for each size.
fn by_run(results: &Results, id: &str, metric: &str, sizes: &[usize]) -> Vec<(usize, f64)> {
    let value = |size: &usize| results.get(&format!("{id}/{size}"), metric);
    sizes.iter().enumerate().filter_map(|(place, size)| value(size).map(|v| (place, v))).collect()
}

fn labels(sizes: &[usize]) -> Vec<String> {
    let label = |size: &usize| match *size {
        s if s >= 1 << 20 => format!("{} MiB", s >> 20),
        s if s >= 1024 => format!("{} KiB", s >> 10),
        s => s.to_string(),
    };
    sizes.iter().map(label).collect()
}

/// A line for each device.
fn devices(points: impl Fn(&str) -> Vec<(usize, f64)>) -> Vec<Line> {
    Device::ALL.iter().map(|d| Line { name: d.title().to_owned(), points: points(d.name()) }).collect()
}

fn bandwidth(results: &Results, operation: &str) -> Plot {
    let of = |device: &str| by_size(results, &format!("plot/uroce/{device}/{operation}/bw"), "gbits", &SIZES);
    let mut lines = devices(of);
    lines.push(Line { name: "UCX tcp, put".into(), points: by_run(results, "plot/ucx/bw", "gbits", &SIZES) });
    if let Some(rate) = results.get("iperf3", "gbits") {
        let last = SIZES.len() - 1;
        lines.push(Line { name: "iperf3 TCP (large writes)".into(), points: vec![(last - 1, rate), (last, rate)] });
    }
    Plot {
        title: operation.to_uppercase(),
        x: "bytes a message".into(),
        y: "Gbit/s".into(),
        labels: labels(&SIZES),
        lines,
        logarithmic: true,
    }
}

fn round_trip(results: &Results, operation: &str, (metric, name): (&str, &str)) -> Plot {
    let of = |device: &str| by_size(results, &format!("plot/uroce/{device}/{operation}/lat"), metric, &SMALL_SIZES);
    let mut lines = devices(of);
    let points = by_run(results, "plot/ucx/lat", metric, &SMALL_SIZES);
    lines.push(Line { name: "UCX tcp, tagged".into(), points });
    Plot {
        title: format!("{}, {name}", operation.to_uppercase()),
        x: "bytes a message".into(),
        y: "us".into(),
        labels: labels(&SMALL_SIZES),
        lines,
        logarithmic: true,
    }
}

fn percentiles(results: &Results, operation: &str, way: &str) -> Plot {
    const METRICS: [&str; 4] = ["p50_us", "p90_us", "p99_us", "p999_us"];
    let of = |id: &str| {
        METRICS.iter().enumerate().filter_map(|(place, m)| results.get(id, m).map(|v| (place, v))).collect::<Vec<_>>()
    };
    let mut lines = devices(|device| of(&format!("uroce/{device}/{operation}/lat/{way}")));
    lines.push(Line { name: "TCP".into(), points: of(&format!("tcp/ping/{way}")) });
    if way == "spin" {
        lines.push(Line { name: "bare AF_PACKET".into(), points: of("raw/packet/ping") });
    }
    let manner = if way == "spin" { "spinning" } else { "blocking" };
    Plot {
        title: format!("{}, {manner}", operation.to_uppercase()),
        x: "percentile".into(),
        y: "us".into(),
        labels: ["50", "90", "99", "99.9"].map(Into::into).into(),
        lines,
        logarithmic: true,
    }
}
