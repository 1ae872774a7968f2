//! What copies and CRCs of this machine allow, in memory alone.
//!
//! Owns the two loops that point 3 is measured by: what a sender must do with each segment (copy it, with its CRC in one
//! pass), and a receiver (CRC it, then copy it out of the cache).

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::Args;

use crate::Error;
use crate::lab::{End, Job, Lab};
use crate::results::Sample;

/// Payload of a segment.
const SEGMENT: usize = 4096;
/// Header bytes before the payload and the ICRC behind it.
const AROUND: usize = 16;
/// Slots of a packet pool.
const SLOTS: usize = 64;
/// Bytes of the message.
const MESSAGE: usize = 1 << 20;

/// Flags of the child.
#[derive(Args)]
pub(crate) struct FloorArgs {
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
}

pub(crate) fn run(args: &FloorArgs) -> Result<(), Error> {
    let time = Duration::from_secs_f64(args.seconds / 2.0);
    println!(
        "{}",
        serde_json::json!({ "copy_crc_gbits": gbits(time, sender), "crc_copy_gbits": gbits(time, receiver) })
    );
    Ok(())
}

/// Gbit/s of payload that `pass` over a message and a pool of slots moves.
fn gbits(time: Duration, pass: fn(&mut [u8], &mut [u8]) -> u32) -> f64 {
    let mut message: Vec<u8> = (0..MESSAGE).map(|i| (i * 7 + i / SEGMENT) as u8).collect();
    let mut pool = vec![1u8; SLOTS * (SEGMENT + AROUND)];
    black_box(pass(&mut message, &mut pool));
    let (begin, mut bytes) = (Instant::now(), 0);
    while begin.elapsed() < time {
        black_box(pass(&mut message, &mut pool));
        bytes += MESSAGE;
    }
    bytes as f64 * 8.0 / begin.elapsed().as_secs_f64() / 1e9
}

fn sender(message: &mut [u8], pool: &mut [u8]) -> u32 {
    let mut sum = 0;
    let slots = (0..SLOTS).cycle().map(|slot| slot * (SEGMENT + AROUND) + 12);
    for (segment, at) in message.chunks_exact(SEGMENT).zip(slots) {
        let place = &mut pool[at..at + SEGMENT];
        place.copy_from_slice(segment);
        sum ^= crc(place);
    }
    sum
}

fn receiver(message: &mut [u8], pool: &mut [u8]) -> u32 {
    let mut sum = 0;
    let slots = (0..SLOTS).cycle().map(|slot| slot * (SEGMENT + AROUND) + 12);
    for (place, at) in message.chunks_exact_mut(SEGMENT).zip(slots) {
        let segment = &pool[at..at + SEGMENT];
        sum ^= crc(segment);
        place.copy_from_slice(segment);
    }
    sum
}

fn crc(bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(bytes);
    hasher.finalize()
}

/// Runs the loops in a process of their own, on the first processor.
pub(crate) fn measure(lab: &Lab, seconds: f64) -> Result<Sample, Error> {
    let words = [lab.program("versus"), "child".into(), "floor".into(), "--seconds".into(), seconds.to_string()];
    let json = lab.run(&Job::new(End::A, words), Duration::from_secs(20))?.json()?;
    let figure = |name: &str| json[name].as_f64().ok_or_else(|| format!("no {name}"));
    let names = ["copy_crc_gbits", "crc_copy_gbits"];
    names.into_iter().map(|name| Ok((name.to_owned(), figure(name)?))).collect()
}
