//! Ratios, and whether they hold.
//!
//! Owns the bounds. Divides medians of one run, never figures of different runs.

use crate::devices::Device;
use crate::results::{Ratio, Results, digits};

/// What native rxe reaches with both sides on one core, in Gbit/s: the better end of what was measured elsewhere.
const RXE_ONE_CORE: f64 = 10.0;

/// A figure by its contestant and metric.
type Of<'a> = (&'a str, &'a str);

struct Judge<'a> {
    results: &'a Results,
    ratios: Vec<Ratio>,
}

/// At least or at most.
#[derive(Clone, Copy)]
enum Bound {
    Least(f64),
    Most(f64),
    Reported,
}

impl Bound {
    fn text(self) -> String {
        match self {
            Self::Least(x) => format!(">= {x}"),
            Self::Most(x) => format!("<= {x}"),
            Self::Reported => String::new(),
        }
    }

    fn holds(self, value: f64) -> Option<bool> {
        match self {
            Self::Least(x) => Some(value >= x),
            Self::Most(x) => Some(value <= x),
            Self::Reported => None,
        }
    }
}

impl Judge<'_> {
    fn push(&mut self, point: &str, what: String, bound: Bound, measured: Option<f64>, from: String) {
        let bound_text = bound.text();
        // What is only reported and was not measured is no news.
        if measured.is_none() && bound_text.is_empty() {
            return;
        }
        let holds = measured.and_then(|m| bound.holds(m));
        self.ratios.push(Ratio { point: point.into(), what, bound: bound_text, measured, holds, from });
    }

    /// Is about a quotient, if either figure was wanted.
    fn ratio(&mut self, point: &str, what: String, bound: Bound, top: Of<'_>, bottom: Of<'_>) {
        let figures = [top, bottom].map(|(id, metric)| self.results.get(id, metric));
        // A device that this machine has not is no news; a contestant that failed is.
        if !self.results.figures.contains_key(top.0) {
            return;
        }
        let (measured, from) = match figures {
            [Some(a), Some(b)] if b > 0.0 => (Some(a / b), format!("{} / {}", digits(a), digits(b))),
            _ => (None, "not measured".into()),
        };
        self.push(point, what, bound, measured, from);
    }

    /// Is about a figure itself.
    fn figure(&mut self, point: &str, what: String, bound: Bound, of: Of<'_>, unit: &str) {
        if let Some(value) = self.results.get(of.0, of.1) {
            self.push(point, what, bound, Some(value), format!("{} {unit}", digits(value)));
        }
    }

    fn bandwidth(&mut self, device: Device) {
        let (name, title) = (device.name(), device.title());
        let point = if device == Device::Udp { "2" } else { "1" };
        let [write, read, send] = ["write", "read", "send"].map(|o| format!("uroce/{name}/{o}/bw"));
        let raw = format!("raw/{name}/bw");
        let least = Bound::Least(if device == Device::Udp { 1.0 } else { 1.5 });
        self.ratio(point, format!("{title}: WRITE 1 MiB to iperf3 TCP"), least, (&write, "gbits"), ("iperf3", "gbits"));
        let of_raw = format!("{title}: WRITE 1 MiB to the raw superframe rate");
        self.ratio(point, of_raw, Bound::Least(0.7), (&write, "gbits"), (&raw, "gbits"));
        for (operation, id) in [("READ", &read), ("SEND", &send)] {
            let what = format!("{title}: {operation} to WRITE");
            self.ratio(point, what, Bound::Least(0.8), (id, "gbits"), (&write, "gbits"));
        }
        for (who, id) in [("UCX tcp put", "ucx/put_bw"), ("libfabric tcp ping-pong", "libfabric/bw")] {
            let what = format!("{title}: WRITE 1 MiB to {who}");
            self.ratio(point, what, Bound::Reported, (&write, "gbits"), (id, "gbits"));
        }
        let alone = format!("uroce/{name}/write/bw/one-core");
        let than_rxe = if device == Device::Udp { Bound::Reported } else { Bound::Least(RXE_ONE_CORE) };
        let what = format!("{title}: WRITE 1 MiB, both ends on one core, Gbit/s (native rxe: 7 to 10)");
        self.figure(point, what, than_rxe, (&alone, "gbits"), "Gbit/s");
        let what = format!("{title}: WRITE 1 MiB to iperf3 TCP, both on one core");
        self.ratio(point, what, Bound::Reported, (&alone, "gbits"), ("iperf3/one-core", "gbits"));
    }

    fn in_process(&mut self) {
        let floor = ["copy_crc_gbits", "crc_copy_gbits"].map(|m| self.results.get("floor", m));
        let [Some(sender), Some(receiver)] = floor else { return };
        let slower = if sender < receiver { "copy_crc_gbits" } else { "crc_copy_gbits" };
        for (operation, bound) in [("write", Bound::Least(0.8)), ("read", Bound::Reported), ("send", Bound::Reported)] {
            let what = format!("in process: {} 1 MiB to copy and CRC alone", operation.to_uppercase());
            let id = format!("uroce/loop/{operation}/bw");
            self.ratio("3", what, bound, (&id, "gbits"), ("floor", slower));
        }
    }

    fn latency(&mut self, device: Device) {
        let (name, title) = (device.name(), device.title());
        let raw = format!("raw/{name}/ping");
        let bound = |b: Bound| if device == Device::Udp { Bound::Reported } else { b };
        for operation in ["send", "write"] {
            let upper = operation.to_uppercase();
            let spin = format!("uroce/{name}/{operation}/lat/spin");
            let block = format!("uroce/{name}/{operation}/lat/block");
            let what = format!("{title}: 8-byte {upper} to a spinning TCP ping-pong, p50");
            self.ratio("4", what, bound(Bound::Most(0.85)), (&spin, "p50_us"), ("tcp/ping/spin", "p50_us"));
            let what = format!("{title}: 8-byte {upper} to the raw round trip, p50");
            self.ratio("4", what, bound(Bound::Most(1.5)), (&spin, "p50_us"), (&raw, "p50_us"));
            let what = format!("{title}: 8-byte {upper} to the raw round trip, p99");
            self.ratio("4", what, bound(Bound::Most(3.0)), (&spin, "p99_us"), (&raw, "p99_us"));
            let what = format!("{title}: 8-byte {upper}, blocking, to a blocking TCP ping-pong, p50");
            self.ratio("4", what, bound(Bound::Most(0.8)), (&block, "p50_us"), ("tcp/ping/block", "p50_us"));
        }
        let send = format!("uroce/{name}/send/lat/spin");
        for (who, id) in [("UCX tcp tag_lat", "ucx/tag_lat"), ("libfabric tcp", "libfabric/lat")] {
            let what = format!("{title}: 8-byte SEND to {who}, average");
            let metric = if id.starts_with("ucx") { "p50_us" } else { "average_us" };
            self.ratio("4", what, Bound::Reported, (&send, "p50_us"), (id, metric));
        }
    }

    fn rate(&mut self, device: Device) {
        let (name, title) = (device.name(), device.title());
        let write = format!("uroce/{name}/write/rate");
        let raw = format!("raw/{name}/rate");
        let bound = if device == Device::Udp { Bound::Reported } else { Bound::Least(0.25) };
        let what = format!("{title}: 64-byte WRITEs a second to raw packets a second");
        self.ratio("5", what, bound, (&write, "messages_s"), (&raw, "packets_s"));
        for (who, id) in [
            ("UCX tcp puts", "ucx/put_rate"),
            ("UCX tcp tagged sends", "ucx/tag_rate"),
            ("libfabric tcp transfers (ping-pong)", "libfabric/rate"),
        ] {
            let what = format!("{title}: 64-byte WRITEs a second to {who}");
            self.ratio("5", what, Bound::Reported, (&write, "messages_s"), (id, "messages_s"));
        }
    }

    fn connections(&mut self, device: Device) {
        let (name, title) = (device.name(), device.title());
        let ours = format!("uroce/{name}/connect");
        for (way, bound) in [("spin/1", Bound::Least(1.0)), ("spin/16", Bound::Reported), ("block/1", Bound::Reported)]
        {
            let bound = if device == Device::Udp { Bound::Reported } else { bound };
            let theirs = format!("tcp/connect/{way}");
            let what = format!("{title}: connections a second to TCP connect, accept, close ({way} under way)");
            self.ratio("7", what, bound, (&ours, "connections_s"), (&theirs, "connections_s"));
        }
    }
}

/// Everything that the results allow to be judged.
pub(crate) fn judge(results: &Results) -> Vec<Ratio> {
    let mut judge = Judge { results, ratios: Vec::new() };
    for device in Device::ALL.into_iter().filter(|d| *d != Device::Loop) {
        judge.bandwidth(device);
        judge.latency(device);
        judge.rate(device);
        judge.connections(device);
        let idle = format!("uroce/{}/idle", device.name());
        let what = format!("{}: percent of a core that an idle endpoint takes", device.title());
        judge.figure("9", what, Bound::Most(1.0), (&idle, "percent"), "%");
    }
    judge.in_process();
    let mut ratios = judge.ratios;
    ratios.sort_by(|a, b| a.point.cmp(&b.point));
    ratios
}
