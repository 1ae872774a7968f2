//! What was measured, as it is kept in results.json.
//!
//! Owns the shape of the file and medians. Never runs anything.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::groups::Contestant;

/// Metrics of one round.
pub(crate) type Sample = BTreeMap<String, f64>;

/// Everything of a run.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Results {
    /// Of this file.
    pub(crate) schema: u32,
    pub(crate) machine: BTreeMap<String, String>,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) notes: Vec<String>,
    pub(crate) figures: BTreeMap<String, Figure>,
    pub(crate) ratios: Vec<Ratio>,
}

/// A contestant's figures.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Figure {
    pub(crate) title: String,
    /// One of each round.
    pub(crate) metrics: BTreeMap<String, Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
}

/// One comparison.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Ratio {
    /// E.g. `1`.
    pub(crate) point: String,
    pub(crate) what: String,
    /// E.g. `>= 1.5`; empty where only the figure is reported.
    pub(crate) bound: String,
    pub(crate) measured: Option<f64>,
    pub(crate) holds: Option<bool>,
    /// What was divided by what.
    pub(crate) from: String,
}

impl Results {
    pub(crate) fn new(machine: BTreeMap<String, String>, rounds: usize) -> Self {
        Self { schema: 1, machine, rounds, ..Self::default() }
    }

    pub(crate) fn read(out: &Path) -> Result<Self, Error> {
        Ok(serde_json::from_str(&std::fs::read_to_string(out.join("versus/results.json"))?)?)
    }

    pub(crate) fn write(&self, file: &Path) -> Result<(), Error> {
        Ok(std::fs::write(file, serde_json::to_string_pretty(self)? + "\n")?)
    }

    /// Of the lines that guest-measure.sh prints; others are passed over.
    pub(crate) fn of_log(log: &str) -> Self {
        let mut results = Self::new(BTreeMap::new(), 0);
        for line in log.lines() {
            match line.trim_end().split('|').collect::<Vec<_>>()[..] {
                ["FIGURE", id, title, metric, value] => {
                    let Ok(value) = value.parse() else { continue };
                    let figure = results.figures.entry(id.into()).or_default();
                    figure.title = title.into();
                    figure.metrics.entry(metric.into()).or_default().push(value);
                }
                ["MACHINE", name, value] => {
                    results.machine.insert(name.into(), value.into());
                }
                ["NOTE", note] => results.notes.push(note.into()),
                _ => {}
            }
        }
        let samples = results.figures.values().flat_map(|f| f.metrics.values().map(Vec::len));
        results.rounds = samples.max().unwrap_or(0);
        results
    }

    /// Whether a contestant is out.
    pub(crate) fn has_failed(&self, id: &str) -> bool {
        self.figures.get(id).is_some_and(|f| f.failed.is_some())
    }

    pub(crate) fn add(&mut self, contestant: &Contestant, measured: Result<Sample, Error>) {
        let figure = self.figures.entry(contestant.id.clone()).or_default();
        figure.title.clone_from(&contestant.title);
        match measured {
            Ok(sample) => {
                for (name, value) in sample {
                    figure.metrics.entry(name).or_default().push((value * 1e4).round() / 1e4);
                }
            }
            Err(e) => figure.failed = Some(e.to_string()),
        }
    }

    /// The median of a metric.
    pub(crate) fn get(&self, id: &str, metric: &str) -> Option<f64> {
        self.figures.get(id).and_then(|f| f.metrics.get(metric)).and_then(|samples| median(samples))
    }
}

/// The middle one.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// A sample for the progress line.
pub(crate) fn brief(sample: &Sample) -> String {
    let shown = sample.iter().take(4).map(|(name, value)| format!("{name} {}", digits(*value)));
    shown.collect::<Vec<_>>().join(", ")
}

/// Three digits that mean something.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => format!("{:.2} M", value / 1e6),
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
