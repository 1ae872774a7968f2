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
