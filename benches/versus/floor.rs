//! What copies and CRCs of this machine allow, in memory alone.
//!
//! Owns how point 3's bounds come into the results; the loops are [`uroce_benches::copying`]'s: what a sender must do with
//! each segment (copy it, with its CRC in one pass), and a receiver (CRC it, then copy it), by one thread alone and by
//! two threads that hand the frames over.

use std::time::{Duration, Instant};

use clap::Args;
use uroce::raw::copy::Kernel;
use uroce_benches::copying;

use crate::Error;
use crate::lab::{End, Job, Lab};
use crate::results::Sample;

/// Frames of a port.
const FRAMES: usize = uroce::device::loopback::FRAMES;
/// Messages before the clock is looked at.
const BATCH: usize = 50;
/// What is measured: alone, then as two threads.
pub(crate) const METRICS: [&str; 4] =
    ["copy_crc_gbits", "crc_copy_gbits", "copy_crc_across_gbits", "crc_copy_across_gbits"];

/// Flags of the child.
#[derive(Args)]
pub(crate) struct FloorArgs {
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
}

pub(crate) fn run(args: &FloorArgs) -> Result<(), Error> {
    let time = Duration::from_secs_f64(args.seconds / 2.0);
    let began = Instant::now();
    Kernel::choose(|| u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let hot = gbits(time, || copying::alone(BATCH, FRAMES));
    let mut figures = hot.to_vec();
    // Two threads need two processors.
    if let [first, .., last] = uroce::device::allowed_cpus()?.iter().collect::<Vec<_>>()[..] {
        let pair = || {
            let took = copying::across(BATCH, FRAMES, [first, last]);
            [took.sender, took.receiver]
        };
        figures.extend(gbits(time, pair));
    }
    let mut json: serde_json::Map<_, _> =
        METRICS.into_iter().zip(figures).map(|(name, gbits)| (name.to_owned(), gbits.into())).collect();
    json.insert("kernel".into(), format!("{:?}", Kernel::best()).into());
    println!("{}", serde_json::Value::from(json));
    Ok(())
}

/// Gbit/s of payload of both sides, where `batch` says what a batch takes each.
fn gbits(time: Duration, batch: impl Fn() -> [Duration; 2]) -> [f64; 2] {
    batch();
    let (begin, mut messages, mut sums) = (Instant::now(), 0, [Duration::ZERO; 2]);
    while messages == 0 || begin.elapsed() < time {
        let took = batch();
        sums = [sums[0] + took[0], sums[1] + took[1]];
        messages += BATCH;
    }
    sums.map(|sum| (messages * copying::MESSAGE) as f64 * 8.0 / sum.as_secs_f64() / 1e9)
}

/// Runs the loops in a process of their own, on the first two processors.
pub(crate) fn measure(lab: &Lab, seconds: f64) -> Result<Sample, Error> {
    let words = [lab.program("versus"), "child".into(), "floor".into(), "--seconds".into(), seconds.to_string()];
    let json = lab.run(&Job::new(End::A, words).on("0,1"), Duration::from_secs(20))?.json()?;
    let figure = |name: &str| Some((name.to_owned(), json[name].as_f64()?));
    Ok(METRICS.into_iter().filter_map(figure).collect())
}
