//! What copying and checking cost alone: the bounds of a transport that copies once on each side.
//!
//! Owns the two passes over a message, packet by packet, by the project's own loops: a sender's (one pass that copies and
//! computes the CRC, from a region into the frames of a port) and a receiver's (the CRC, then the copy, out of the frames
//! into a region). Each is measured twice: by one thread alone, whose caches hold what it can (`alone`), and by two
//! threads that hand frames over a ring (`across`), where the sender writes lines that the other processor has read, and
//! the receiver reads what the other has just written. No protocol that moves a byte from one processor to another passes
//! the latter, and how far apart two virtual processors are may change while a machine runs: compare within one run.

use std::time::{Duration, Instant};

use uroce::device::{pin_current_thread, thread_cpu_time};
use uroce::raw::{Region, copy};
use uroce::ring::ring;

/// Bytes of a message.
pub const MESSAGE: usize = 1 << 20;
const PACKET: usize = 4096;
/// Packets of a frame: 65,535 bytes hold no more with their headers.
const PACKETS: usize = 15;
const FRAME: usize = 65_535;
/// Bytes of headers before a packet, and after it.
const AROUND: usize = 16;

/// What the two sides of a pipeline took.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// By the clock.
    pub wall: Duration,
    /// Processor time of the sender, without what it spent looking in vain.
    pub sender: Duration,
    /// The same of the receiver.
    pub receiver: Duration,
}

impl Took {
    /// The slower side: by the clock of a machine on which nothing else runs, the pipeline takes no longer than this.
    #[must_use]
    pub fn busier(&self) -> Duration {
        self.sender.max(self.receiver)
    }
}

/// GiB/s of `messages`.
#[must_use]
pub fn rate(messages: usize, time: Duration) -> f64 {
    (messages * MESSAGE) as f64 / time.as_secs_f64() / f64::from(1 << 30)
}

/// Processor time of what did something. The clock of a machine on which others work says little of two threads.
pub struct Busy {
    sum: Duration,
    /// What reading the clock twice takes, which is no part of the work.
    reading: Duration,
}

impl Busy {
    /// Nothing yet.
    ///
    /// # Panics
    /// Where threads have no clock.
    #[must_use]
    pub fn new() -> Self {
        let mut readings: Vec<Duration> = (0..101).map(|_| now()).map(|begin| now() - begin).collect();
        readings.sort_unstable();
        Self { sum: Duration::ZERO, reading: readings[readings.len() / 2] }
    }

    /// Does `f`, and counts the time if it did something; otherwise lets others have the processor.
    ///
    /// # Panics
    /// Where threads have no clock.
    pub fn count<R>(&mut self, did_something: impl FnOnce(&R) -> bool, f: impl FnOnce() -> R) -> R {
        let begin = now();
        let answer = f();
        if did_something(&answer) {
            self.sum += (now() - begin).saturating_sub(self.reading);
        } else {
            // The other side may be among those who wait for this processor.
            std::thread::yield_now();
        }
        answer
    }

    /// So far.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

impl Default for Busy {
    fn default() -> Self {
        Self::new()
    }
}

fn now() -> Duration {
    thread_cpu_time().expect("a clock")
}

/// Fills `frame` with the packets of `region` from `offset` on, as a sender must: each byte once through the processor.
/// Returns how many bytes of payload it holds.
fn fill(region: &Region, offset: usize, frame: &mut [u8]) -> usize {
    let end = MESSAGE.min(offset + PACKETS * PACKET);
    for (at, packet) in (offset..end).step_by(PACKET).zip(frame.chunks_mut(PACKET + AROUND)) {
        let (payload, trailer) = packet.split_at_mut(PACKET);
        let crc = region.read_crc(at, payload, 0).expect("inside");
        trailer[..4].copy_from_slice(&crc.to_le_bytes());
    }
    end - offset
}

/// Takes the packets out of `frame`, as a receiver must: not a byte is placed before its CRC is found right.
fn drain(region: &Region, offset: usize, len: usize, frame: &[u8]) {
    for (at, packet) in (offset..offset + len).step_by(PACKET).zip(frame.chunks(PACKET + AROUND)) {
        let (payload, trailer) = packet.split_at(PACKET);
        assert_eq!(copy::crc(0, payload).to_le_bytes(), trailer[..4]);
        region.write(at, payload).expect("inside");
    }
}

fn frames(count: usize) -> Vec<Box<[u8]>> {
    (0..count).map(|_| vec![0; FRAME].into_boxed_slice()).collect()
}

/// The two sides' work, sender's and receiver's, each by this thread alone: processor time for `messages` through `count`
/// frames in turn.
///
/// # Panics
/// Where there is no memory.
#[must_use]
pub fn alone(messages: usize, count: usize) -> [Duration; 2] {
    let (region, mut frames) = (Region::alloc(MESSAGE).expect("memory"), frames(count));
    let mut pass = |messages: usize, sends: bool| {
        let begin = now();
        for _ in 0..messages {
            for (frame, offset) in (0..frames.len()).cycle().zip((0..MESSAGE).step_by(PACKETS * PACKET)) {
                let len = (MESSAGE - offset).min(PACKETS * PACKET);
                if sends {
                    fill(&region, offset, &mut frames[frame]);
                } else {
                    drain(&region, offset, len, &frames[frame]);
                }
            }
        }
        now() - begin
    };
    // What is received must have been sent; where frames are fewer than a message has, each holds the last of its turn.
    pass(1, true);
    [pass(messages, true), pass(messages, false)]
}

/// Both sides' work as two threads on `cpus` that hand `count` frames over a ring, without a protocol.
///
/// # Panics
/// Where a processor may not be used, or there is no memory.
#[must_use]
pub fn across(messages: usize, count: usize, cpus: [usize; 2]) -> Took {
    let (mut to, mut from) = ring::<(usize, Box<[u8]>)>(count);
    let (mut back, mut free) = ring::<Box<[u8]>>(count);
    for frame in frames(count) {
        back.push(frame).expect("room");
    }
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            pin_current_thread(cpus[1]).expect("a processor");
            let (region, mut busy, mut offset) = (Region::alloc(MESSAGE).expect("memory"), Busy::new(), 0);
            while offset < messages * MESSAGE {
                let take = || {
                    let Ok((len, frame)) = from.pop() else { return 0 };
                    drain(&region, offset % MESSAGE, len, &frame);
                    back.push(frame).expect("room");
                    len
                };
                offset += busy.count(|taken| *taken > 0, take);
            }
            busy.sum()
        });
        // A thread of its own, for whoever calls may have work elsewhere.
        let sender = scope.spawn(move || {
            pin_current_thread(cpus[0]).expect("a processor");
            let (region, mut busy, mut offset) = (Region::alloc(MESSAGE).expect("memory"), Busy::new(), 0);
            let begin = Instant::now();
            while offset < messages * MESSAGE {
                let give = || {
                    let Ok(mut frame) = free.pop() else { return 0 };
                    let len = fill(&region, offset % MESSAGE, &mut frame);
                    to.push((len, frame)).expect("room");
                    len
                };
                offset += busy.count(|given| *given > 0, give);
            }
            (begin, busy.sum())
        });
        let receiver = receiver.join().expect("a batch");
        let (begin, sender) = sender.join().expect("a batch");
        Took { wall: begin.elapsed(), sender, receiver }
    })
}
