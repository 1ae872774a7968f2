//! Ratios, and whether they hold.
//!
//! Owns the bounds. Divides medians of one run, never figures of different runs.

use crate::devices::Device;
use crate::floor;
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

/// The bound, for the devices that it was set for; others are reported beside them.
fn raw_ethernet(device: Device, bound: Bound) -> Bound {
    if matches!(device, Device::Packet | Device::Own) { bound } else { Bound::Reported }
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
        // Who did not take part is no news; a contestant that failed is.
        if [top, bottom].iter().any(|(id, _)| !self.results.figures.contains_key(*id)) {
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
        let least = match device {
            Device::Udp => Bound::Least(1.0),
            _ => raw_ethernet(device, Bound::Least(1.5)),
        };
        let (close, most) = match device {
            Device::Udp => (Bound::Least(0.8), Bound::Least(0.7)),
            _ => (raw_ethernet(device, Bound::Least(0.8)), raw_ethernet(device, Bound::Least(0.7))),
        };
        self.ratio(point, format!("{title}: WRITE 1 MiB to iperf3 TCP"), least, (&write, "gbits"), ("iperf3", "gbits"));
        let of_raw = format!("{title}: WRITE 1 MiB to the raw superframe rate");
        self.ratio(point, of_raw, most, (&write, "gbits"), (&raw, "gbits"));
        for (operation, id) in [("READ", &read), ("SEND", &send)] {
            let what = format!("{title}: {operation} to WRITE");
            self.ratio(point, what, close, (id, "gbits"), (&write, "gbits"));
        }
        for (who, id) in [("UCX tcp put", "ucx/put_bw"), ("libfabric tcp ping-pong", "libfabric/bw")] {
            let what = format!("{title}: WRITE 1 MiB to {who}");
            self.ratio(point, what, Bound::Reported, (&write, "gbits"), (id, "gbits"));
        }
        let alone = format!("uroce/{name}/write/bw/one-core");
        let than_rxe = raw_ethernet(device, Bound::Least(RXE_ONE_CORE));
        let what = format!("{title}: WRITE 1 MiB, both ends on one core, Gbit/s (native rxe: 7 to 10)");
        self.figure(point, what, than_rxe, (&alone, "gbits"), "Gbit/s");
        let what = format!("{title}: WRITE 1 MiB to iperf3 TCP, both on one core");
        self.ratio(point, what, Bound::Reported, (&alone, "gbits"), ("iperf3/one-core", "gbits"));
    }

    /// The slower of two metrics of `id`.
    fn slower<'m>(&self, id: &str, metrics: [&'m str; 2]) -> Option<&'m str> {
        let [a, b] = metrics.map(|m| self.results.get(id, m));
        Some(if a? < b? { metrics[0] } else { metrics[1] })
    }

    fn in_process(&mut self) {
        let [one, other, one_across, other_across] = floor::METRICS;
        for (how, metrics) in [("one thread", [one, other]), ("two threads", [one_across, other_across])] {
            let Some(slower) = self.slower("floor", metrics) else { continue };
            for operation in ["write", "read", "send"] {
                let bound = if operation == "write" { Bound::Least(0.8) } else { Bound::Reported };
                let upper = operation.to_uppercase();
                let what = format!("in process: {upper} 1 MiB to copy and CRC alone, {how}");
                let id = format!("uroce/loop/{operation}/bw");
                self.ratio("3", what, bound, (&id, "gbits"), ("floor", slower));
            }
        }
    }

    fn latency(&mut self, device: Device) {
        let (name, title) = (device.name(), device.title());
        let raw = format!("raw/{name}/ping");
        let bound = |b: Bound| raw_ethernet(device, b);
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
        let bound = raw_ethernet(device, Bound::Least(0.25));
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
        let spinning = ["tcp/connect/spin/1", "tcp/connect/spin/64"];
        let rate = |id: &str| self.results.get(id, "connections_s").unwrap_or(0.0);
        let best = if rate(spinning[0]) >= rate(spinning[1]) { spinning[0] } else { spinning[1] };
        let ours = [1, 64].map(|n| format!("uroce/{name}/connect/{n}"));
        let bound = raw_ethernet(device, Bound::Least(1.0));
        let metric = "connections_s";
        let what =
            format!("{title}: connections a second, 64 at once, to the better of spinning TCP's (1 and 64 at once)");
        self.ratio("7", what, bound, (&ours[1], metric), (best, metric));
        let what = format!("{title}: connections a second, one by one, to spinning TCP's one by one");
        self.ratio("7", what, Bound::Reported, (&ours[0], metric), (spinning[0], metric));
        let what = format!("{title}: connections a second, one by one, to blocking TCP's one by one");
        self.ratio("7", what, Bound::Reported, (&ours[0], metric), ("tcp/connect/block/1", metric));
    }

    fn connections_here(&mut self) {
        let (metric, what) = ("connections_s", "in process, one core: connections a second of processor time");
        self.figure("7", what.into(), Bound::Least(85_000.0), ("uroce/here/connect", metric), "a second");
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
    judge.connections_here();
    let mut ratios = judge.ratios;
    ratios.sort_by(|a, b| a.point.cmp(&b.point));
    ratios
}

/// What the guest's results allow to be judged.
pub(crate) fn judge_guest(results: &Results) -> Vec<Ratio> {
    let mut judge = Judge { results, ratios: Vec::new() };
    let (write, gbits) = ("uroce/write/bw", "gbits");
    let floor = ["copy_crc_gbits", "crc_copy_gbits"].map(|m| results.get("floor", m));
    let slower = if floor[0] < floor[1] { "copy_crc_gbits" } else { "crc_copy_gbits" };
    let [ours, rxe, bound] =
        [(write, gbits), ("rxe/write/bw", gbits), ("floor", slower)].map(|(i, m)| results.get(i, m));
    // Five times rxe, or 0.7 of what copies and CRCs allow if that is lower.
    let is_floor_lower = bound.zip(rxe).is_some_and(|(bound, rxe)| 0.7 * bound < 5.0 * rxe);
    let (of_rxe, of_floor) =
        if is_floor_lower { (Bound::Reported, Bound::Least(0.7)) } else { (Bound::Least(5.0), Bound::Reported) };
    if ours.is_some() {
        let what = "in the guest: WRITE 1 MiB to rxe's";
        judge.ratio("6", what.into(), of_rxe, (write, gbits), ("rxe/write/bw", gbits));
        let what = "in the guest: WRITE 1 MiB to copy and CRC alone";
        judge.ratio("6", what.into(), of_floor, (write, gbits), ("floor", slower));
    }
    for operation in ["send", "write"] {
        let [ours, theirs] = ["uroce", "rxe"].map(|who| format!("{who}/{operation}/lat"));
        let what = format!("in the guest: 8-byte {} latency to rxe's", operation.to_uppercase());
        judge.ratio("6", what, Bound::Most(0.5), (&ours, "p50_us"), (&theirs, "p50_us"));
    }
    let (ours, theirs) = (("uroce/connect", "connections_s"), ("rxe/connect", "connections_s"));
    judge.ratio("6", "in the guest: connections a second to rxe's".into(), Bound::Least(5.0), ours, theirs);
    judge.ratios
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::results::Figure;

    fn results(figures: &[(&str, &str, &[f64])]) -> Results {
        let mut results = Results::default();
        for (id, metric, samples) in figures {
            let metrics = BTreeMap::from([((*metric).to_owned(), samples.to_vec())]);
            results.figures.insert((*id).to_owned(), Figure { metrics, ..Figure::default() });
        }
        results
    }

    #[test]
    fn medians_are_divided_and_bounds_say_whether_they_hold() {
        let results = results(&[
            ("iperf3", "gbits", &[10.0, 11.0, 99.0]),
            ("uroce/packet/write/bw", "gbits", &[1.0, 22.0, 23.0]),
            ("uroce/packet/read/bw", "gbits", &[11.0]),
        ]);
        let ratios = judge(&results);
        let found = |what: &str| ratios.iter().find(|r| r.what.contains(what)).unwrap();
        let tcp = found("WRITE 1 MiB to iperf3");
        assert_eq!((tcp.measured, tcp.holds), (Some(2.0), Some(true)));
        let read = found("READ to WRITE");
        assert_eq!((read.measured, read.holds), (Some(0.5), Some(false)));
        assert!(ratios.iter().all(|r| !r.what.contains("raw superframe")), "it took no part");
    }

    #[test]
    fn in_the_guest_the_lower_bound_counts() {
        let log = "FIGURE|rxe/write/bw|rxe|gbits|1\nFIGURE|uroce/write/bw|uroce|gbits|3\nnoise\n\
                   FIGURE|floor|copies|copy_crc_gbits|4\nFIGURE|floor|copies|crc_copy_gbits|5\n";
        let results = Results::of_log(log);
        let ratios = judge_guest(&results);
        assert_eq!((ratios[0].measured, ratios[0].holds), (Some(3.0), None), "0.7 x 4 is below 5 x 1");
        assert_eq!((ratios[1].measured, ratios[1].holds), (Some(0.75), Some(true)));
    }

    #[test]
    fn who_failed_is_not_measured() {
        let mut results = results(&[("iperf3", "gbits", &[10.0])]);
        let failed = Figure { failed: Some("it does not start".into()), ..Figure::default() };
        results.figures.insert("uroce/udp/write/bw".into(), failed);
        let ratios = judge(&results);
        assert_eq!(ratios[0].measured, None);
        assert_eq!(ratios[0].holds, None);
    }
}
