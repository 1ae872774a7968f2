//! Two threads in one process: 1 MiB WRITEs over the in-process switch, beside what copying and checking cost alone.
//!
//! `inproc [MESSAGES [BATCHES [FRAMES [CPUS]]]]`: MESSAGES (400) WRITEs in a batch, four under way; BATCHES (7), FRAMES
//! of a port (its default), CPUS the processors of sender and receiver (`0,1`). In each batch come in turn: the sender's
//! work alone (one pass that copies and computes the CRC, packet by packet, into the frames of a port), the receiver's
//! alone (the CRC, then the copy), both as two threads that hand frames over a ring, and the WRITEs between two
//! endpoints, whose content is verified. Prints medians in GiB/s, by the clock and by the processor time of the busier
//! side, and the ratios of the latter: the clock of a machine on which others work says little of two threads.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uroce::device::loopback::{FRAMES, LoopbackDevice, PortConfig, SEGMENTS, Switch};
use uroce::device::{pin_current_thread, thread_cpu_time};
use uroce::engine::Engine;
use uroce::raw::{Region, copy};
use uroce::ring::ring;
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{Operation, SendFlags};
use uroce_benches::party::Party;

const MESSAGE: usize = 1 << 20;
const PACKET: usize = 4096;
/// Packets of a frame: 65,535 bytes hold no more with their headers.
const PACKETS: usize = if SEGMENTS < 15 { SEGMENTS } else { 15 };
const FRAME: usize = 65_535;
/// Messages under way.
const DEPTH: usize = 4;
/// Bytes of headers before a packet, and after it.
const AROUND: usize = 16;

/// GiB/s of `messages`.
fn rate(messages: usize, time: Duration) -> f64 {
    (messages * MESSAGE) as f64 / time.as_secs_f64() / f64::from(1 << 30)
}

/// What the two sides of a pipeline took.
#[derive(Clone, Copy)]
struct Took {
    /// By the clock.
    wall: Duration,
    /// Processor time of the busier side, without what it spent looking in vain: by the clock of a machine on which
    /// nothing else runs, the pipeline takes no longer than this.
    busy: Duration,
}

/// Processor time of what did something.
#[derive(Default)]
struct Busy(Duration);

impl Busy {
    fn count<R>(&mut self, did_something: impl FnOnce(&R) -> bool, f: impl FnOnce() -> R) -> R {
        let begin = thread_cpu_time().expect("a clock");
        let answer = f();
        if did_something(&answer) {
            self.0 += thread_cpu_time().expect("a clock") - begin;
        } else {
            // Others may run on this machine, the other side among them.
            std::thread::yield_now();
        }
        answer
    }
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

/// One side's work without the other: frames in turn, as they come round.
fn alone(messages: usize, count: usize, sends: bool) -> f64 {
    let (region, mut frames) = (Region::alloc(MESSAGE).expect("memory"), frames(count));
    let mut pass = |messages: usize, sends: bool| {
        let begin = thread_cpu_time().expect("a clock");
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
        rate(messages, thread_cpu_time().expect("a clock") - begin)
    };
    // What is received must have been sent; where frames are fewer than a message has, each holds the last of its turn.
    pass(1, true);
    pass(messages, sends)
}

/// Both, without a protocol: two threads and a ring each way.
fn bare(messages: usize, count: usize, cpus: &[usize]) -> Took {
    let (mut to, mut from) = ring::<(usize, Box<[u8]>)>(count);
    let (mut back, mut free) = ring::<Box<[u8]>>(count);
    for frame in frames(count) {
        back.push(frame).expect("room");
    }
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            pin_current_thread(cpus[1]).expect("a processor");
            let (region, mut busy, mut offset) = (Region::alloc(MESSAGE).expect("memory"), Busy::default(), 0);
            while offset < messages * MESSAGE {
                offset += busy.count(
                    |taken| *taken > 0,
                    || {
                        let Ok((len, frame)) = from.pop() else { return 0 };
                        drain(&region, offset % MESSAGE, len, &frame);
                        back.push(frame).expect("room");
                        len
                    },
                );
            }
            busy.0
        });
        pin_current_thread(cpus[0]).expect("a processor");
        let (region, mut busy, mut offset) = (Region::alloc(MESSAGE).expect("memory"), Busy::default(), 0);
        let begin = Instant::now();
        while offset < messages * MESSAGE {
            offset += busy.count(
                |given| *given > 0,
                || {
                    let Ok(mut frame) = free.pop() else { return 0 };
                    let len = fill(&region, offset % MESSAGE, &mut frame);
                    to.push((len, frame)).expect("room");
                    len
                },
            );
        }
        let other = receiver.join().expect("a batch");
        Took { wall: begin.elapsed(), busy: busy.0.max(other) }
    })
}

/// Two connected endpoints.
struct Ends {
    engines: [Engine<LoopbackDevice>; 2],
    parties: [Party; 2],
}

impl Ends {
    fn new(frames: usize) -> Self {
        let switch = Switch::new();
        let mut engines = [1, 2].map(|n| {
            let address = [10, 0, 0, n].into();
            let config = PortConfig { frames, ..PortConfig::new(&[address]) };
            Engine::open(switch.port_with(config)).expect("a seed")
        });
        let parties = [0, 1].map(|i| Party::new(engines[i].endpoint_mut(), MESSAGE));
        for (i, peer) in [(0, 1), (1, 0)] {
            let name = parties[peer].name();
            parties[i].connect(engines[i].endpoint_mut(), &name, PathMtu::B4096, RnrTimer::DEFAULT);
        }
        Self { engines, parties }
    }

    fn write(&mut self, messages: usize, cpus: &[usize], seed: usize) -> Took {
        let bytes: Vec<u8> = (0..MESSAGE).map(|i| ((i * 7 + (i >> 8) + seed) % 251) as u8).collect();
        let [left, right] = &mut self.engines;
        let [from, to] = &self.parties;
        from.region.write(0, &bytes).expect("inside");
        to.region.write(0, &vec![0; MESSAGE]).expect("inside");
        let over = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                pin_current_thread(cpus[1]).expect("a processor");
                let mut busy = Busy::default();
                while !over.load(Ordering::Relaxed) {
                    busy.count(|moved| *moved > 0, || right.poll().expect("a switch"));
                }
                busy.0
            });
            pin_current_thread(cpus[0]).expect("a processor");
            let operation = Operation::Write(to.name().remote);
            let (mut posted, mut done, mut busy) = (0, 0, Busy::default());
            let begin = Instant::now();
            while done < messages {
                let work = || {
                    while posted < messages && posted - done < DEPTH {
                        from.post(left.endpoint_mut(), operation, MESSAGE as u32, SendFlags::SIGNALED);
                        posted += 1;
                    }
                    let moved = left.poll().expect("a switch");
                    done += from.poll(left.endpoint_mut()).sent as usize;
                    moved
                };
                busy.count(|moved| *moved > 0, work);
            }
            let wall = begin.elapsed();
            over.store(true, Ordering::Relaxed);
            Took { wall, busy: busy.0.max(receiver.join().expect("a batch")) }
        });
        assert!(to.region.to_vec() == bytes, "the bytes arrived");
        took
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

#[allow(clippy::print_stdout)] // What it is for.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, usual: usize| arguments.get(i).and_then(|n| n.parse().ok()).unwrap_or(usual);
    let (messages, batches, count) = (number(0, 400).max(1), number(1, 7).max(1), number(2, FRAMES).max(1));
    let cpus: Vec<usize> =
        arguments.get(3).map_or(vec![0, 1], |list| list.split(',').filter_map(|n| n.parse().ok()).collect());
    if cpus.len() != 2 {
        return ExitCode::from(2);
    }
    let mut ends = Ends::new(count);
    let (mut single, mut both): ([Vec<f64>; 2], [Vec<Took>; 2]) = Default::default();
    for seed in 0..=batches {
        // A thread of its own for each: a bound thread cannot start another elsewhere.
        let (ends, cpus) = (&mut ends, &cpus);
        std::thread::scope(|scope| {
            for (figures, sends) in single.iter_mut().zip([true, false]) {
                let thread = scope.spawn(move || {
                    pin_current_thread(cpus[0]).expect("a processor");
                    alone(messages, count, sends)
                });
                figures.push(thread.join().expect("a batch"));
            }
            both[0].push(scope.spawn(|| bare(messages, count, cpus)).join().expect("a batch"));
            both[1].push(scope.spawn(|| ends.write(messages, cpus, seed)).join().expect("a batch"));
        });
    }
    // The first batch warmed up.
    let [send, receive] = single.map(|f| median(f[1..].to_vec()));
    let rates =
        |took: &[Took], of: fn(&Took) -> Duration| median(took[1..].iter().map(|t| rate(messages, of(t))).collect());
    let [bare, write] = both.map(|took| (rates(&took, |t| t.busy), rates(&took, |t| t.wall)));
    let slower = send.min(receive);
    println!("GiB/s                            busier side's processor   clock");
    println!("copy and CRC in one pass, alone  {send:6.2}");
    println!("CRC, then copy, alone            {receive:6.2}");
    println!("both, two threads and a ring     {:6.2}                    {:6.2}", bare.0, bare.1);
    println!("WRITE 1 MiB                      {:6.2}                    {:6.2}", write.0, write.1);
    println!("WRITE over the slower: {:.2}; over the two threads: {:.2}", write.0 / slower, write.0 / bare.0);
    ExitCode::SUCCESS
}
