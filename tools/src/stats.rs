//! From time stamps to latency figures.
//!
//! Owns arithmetic. Never waits and never prints.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::exit::Failure;

/// Longest latency that is told apart: a minute, in nanoseconds.
const LATENCY_MAX: u64 = 60_000_000_000;
/// Decimal digits that latencies keep.
const DIGITS: u8 = 3;

/// How many messages had completed when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// Messages so far.
    pub messages: u64,
    /// Since the first was posted.
    pub at: Duration,
}

/// Figures of a bandwidth test of one message size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Bandwidth {
    /// Bytes a message.
    #[serde(rename = "MsgSize")]
    pub size: u64,
    /// Messages.
    #[serde(rename = "n_iterations")]
    pub iterations: u64,
    /// Bytes a second in the best window; 0 where none was taken.
    #[serde(rename = "BW_peak")]
    pub peak: f64,
    /// Bytes a second over all.
    #[serde(rename = "BW_average")]
    pub average: f64,
    /// Messages a second over all.
    #[serde(rename = "MsgRate")]
    pub messages_per_second: f64,
}

impl Bandwidth {
    /// Of messages of `size` bytes. `window` messages make a peak; 0 takes none.
    pub(crate) fn of(size: u64, marks: &[Mark], window: u64) -> Self {
        let last = marks.last().copied().unwrap_or(Mark { messages: 0, at: Duration::ZERO });
        let iterations = last.messages;
        let messages_per_second = rate(iterations, last.at);
        #[allow(clippy::cast_precision_loss)] // Rates for people.
        let bytes = size as f64;
        let average = messages_per_second * bytes;
        let peak = if window == 0 { 0.0 } else { (best_window(marks, window) * bytes).max(average) };
        Self { size, iterations, peak, average, messages_per_second }
    }
}

#[allow(clippy::cast_precision_loss)] // Rates for people.
fn rate(messages: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { messages as f64 / time.as_secs_f64() }
}

/// Messages a second in the best run of at least `window` messages.
fn best_window(marks: &[Mark], window: u64) -> f64 {
    let mut best: f64 = 0.0;
    let mut end = 0;
    for first in marks {
        while marks.get(end).is_some_and(|m| m.messages < first.messages + window) {
            end += 1;
        }
        let Some(last) = marks.get(end) else { break };
        best = best.max(rate(last.messages - first.messages, last.at.saturating_sub(first.at)));
    }
    best
}

/// Figures of a latency test of one message size, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Latency {
    /// Bytes a message.
    #[serde(rename = "MsgSize")]
    pub size: u64,
    /// Samples.
    #[serde(rename = "n_iterations")]
    pub iterations: u64,
    /// Least.
    #[serde(rename = "t_min")]
    pub min: f64,
    /// Greatest.
    #[serde(rename = "t_max")]
    pub max: f64,
    /// Median.
    #[serde(rename = "t_typical")]
    pub typical: f64,
    /// Mean.
    #[serde(rename = "t_avg")]
    pub average: f64,
    /// Standard deviation.
    #[serde(rename = "t_stdev")]
    pub deviation: f64,
    /// 90 of 100 are not longer.
    #[serde(rename = "t_90_percentile")]
    pub p90: f64,
    /// 99 of 100 are not longer.
    #[serde(rename = "t_99_percentile")]
    pub p99: f64,
    /// 999 of 1000 are not longer.
    #[serde(rename = "t_99_9_percentile")]
    pub p999: f64,
    /// Operations a second.
    #[serde(rename = "tps_average")]
    pub per_second: f64,
}

/// Collects latencies.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    /// None yet.
    pub(crate) fn new() -> Result<Self, Failure> {
        Histogram::new_with_max(LATENCY_MAX, DIGITS).map(Self).map_err(Failure::failed)
    }

    /// Adds one; longer than a minute counts as a minute.
    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(LATENCY_MAX));
    }

    /// Microseconds that `percent` of the samples do not pass.
    pub(crate) fn percentile(&self, percent: f64) -> f64 {
        micros(self.0.value_at_quantile(percent / 100.0))
    }

    /// The figures; every sample divided by `share` (2 for half a round trip).
    pub(crate) fn figures(&self, size: u64, share: f64) -> Latency {
        let average = self.0.mean() / 1e3 / share;
        Latency {
            size,
            iterations: self.0.len(),
            min: micros(self.0.min()) / share,
            max: micros(self.0.max()) / share,
            typical: self.percentile(50.0) / share,
            average,
            deviation: self.0.stdev() / 1e3 / share,
            p90: self.percentile(90.0) / share,
            p99: self.percentile(99.0) / share,
            p999: self.percentile(99.9) / share,
            per_second: if average > 0.0 { 1e6 / average } else { 0.0 },
        }
    }
}

#[allow(clippy::cast_precision_loss)] // Below a minute: 36 bits.
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_bytes_over_time_and_the_peak_is_the_best_window() {
        let mark = |messages, ms| Mark { messages, at: Duration::from_millis(ms) };
        let marks = [mark(1, 10), mark(2, 20), mark(3, 22), mark(4, 24), mark(5, 40)];
        let b = Bandwidth::of(1000, &marks, 2);
        assert_eq!((b.iterations, b.average.round()), (5, 125_000.0));
        assert_eq!(b.peak.round(), 500_000.0, "two messages in 4 ms");
        assert_eq!(b.messages_per_second.round(), 125.0);
        assert_eq!(Bandwidth::of(1000, &marks, 0).peak, 0.0);
        assert_eq!(Bandwidth::of(1000, &[], 2).average, 0.0);
    }

    #[test]
    fn latencies_have_percentiles() {
        let mut l = Latencies::new().unwrap();
        for us in 1..=1000 {
            l.record(Duration::from_micros(us));
        }
        let f = l.figures(8, 2.0);
        assert_eq!((f.size, f.iterations), (8, 1000));
        let near = |a: f64, b: f64| (a - b).abs() <= b * 0.01;
        assert!(near(f.typical, 250.0) && near(f.p99, 495.0) && near(f.p999, 499.5), "{f:?}");
        assert!(near(f.min, 0.5) && near(f.max, 500.0) && near(f.average, 250.25), "{f:?}");
    }
}
