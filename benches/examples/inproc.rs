//! Two threads in one process: 1 MiB WRITEs over the in-process switch, beside what copying and checking cost alone.
//!
//! `inproc [MESSAGES [BATCHES [FRAMES [CPUS]]]]`: MESSAGES (400) WRITEs in a batch, four under way; BATCHES (7), FRAMES
//! of a port (its default), CPUS the processors of sender and receiver (`0,1`). In each batch come in turn: the sender's
//! work alone (one pass that copies and computes the CRC, packet by packet, into the frames of a port), the receiver's
//! alone (the CRC, then the copy), both as two threads that hand frames over a ring, and the WRITEs between two
//! endpoints, whose content is verified. Prints medians in GiB/s, of each side's processor time and by the clock, and the
//! ratios of the former: the clock of a machine on which others work says little of two threads.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uroce::device::loopback::{FRAMES, LoopbackDevice, PortConfig, Switch};
use uroce::device::pin_current_thread;
use uroce::engine::Engine;
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{Operation, SendFlags};
use uroce_benches::copying::{Busy, MESSAGE, Took, across, alone, rate};
use uroce_benches::party::Party;

/// Messages under way.
const DEPTH: usize = 4;

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

    fn write(&mut self, messages: usize, cpus: [usize; 2], seed: usize) -> Took {
        let bytes: Vec<u8> = (0..MESSAGE).map(|i| ((i * 7 + (i >> 8) + seed) % 251) as u8).collect();
        let [left, right] = &mut self.engines;
        let [from, to] = &self.parties;
        from.region.write(0, &bytes).expect("inside");
        to.region.write(0, &vec![0; MESSAGE]).expect("inside");
        let over = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                pin_current_thread(cpus[1]).expect("a processor");
                let mut busy = Busy::new();
                while !over.load(Ordering::Relaxed) {
                    busy.count(|moved| *moved > 0, || right.poll().expect("a switch"));
                }
                busy.sum()
            });
            pin_current_thread(cpus[0]).expect("a processor");
            let operation = Operation::Write(to.name().remote);
            let (mut posted, mut done, mut busy) = (0, 0, Busy::new());
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
            Took { wall, sender: busy.sum(), receiver: receiver.join().expect("a batch") }
        });
        assert!(to.region.to_vec() == bytes, "the bytes arrived");
        took
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Medians of a pipeline in GiB/s: sender, receiver, the busier of the two, by the clock.
fn rates(messages: usize, took: &[Took]) -> [f64; 4] {
    let of: [fn(&Took) -> Duration; 4] = [|t| t.sender, |t| t.receiver, Took::busier, |t| t.wall];
    of.map(|of| median(took.iter().map(|t| rate(messages, of(t))).collect()))
}

#[allow(clippy::print_stdout)] // What it is for.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, usual: usize| arguments.get(i).and_then(|n| n.parse().ok()).unwrap_or(usual);
    let (messages, batches, count) = (number(0, 400).max(1), number(1, 7).max(1), number(2, FRAMES).max(1));
    let list = arguments.get(3).map_or("0,1", String::as_str);
    let cpus: Vec<usize> = list.split(',').filter_map(|n| n.parse().ok()).collect();
    let Ok(cpus) = <[usize; 2]>::try_from(cpus) else { return ExitCode::from(2) };
    let mut ends = Ends::new(count);
    let (mut single, mut both): (Vec<[Duration; 2]>, [Vec<Took>; 2]) = Default::default();
    for seed in 0..=batches {
        // A thread of its own for each: a bound thread cannot start another elsewhere.
        let ends = &mut ends;
        std::thread::scope(|scope| {
            let by_itself = move || {
                pin_current_thread(cpus[0]).expect("a processor");
                alone(messages, count)
            };
            let alone = scope.spawn(by_itself).join().expect("a batch");
            let across = across(messages, count, cpus);
            let write = scope.spawn(|| ends.write(messages, cpus, seed)).join().expect("a batch");
            // The first batch warms up.
            if seed > 0 {
                single.push(alone);
                both[0].push(across);
                both[1].push(write);
            }
        });
    }
    let [send, receive] = [0, 1].map(|i| median(single.iter().map(|t| rate(messages, t[i])).collect()));
    let [across, write] = both.map(|took| rates(messages, &took));
    println!("GiB/s                                       sender  receiver  busier    clock");
    println!("copying and checking, one thread alone      {send:6.2}    {receive:6.2}");
    let line = |[a, b, c, d]: [f64; 4]| format!("{a:6.2}    {b:6.2}  {c:6.2}   {d:6.2}");
    println!("copying and checking, two threads, a ring   {}", line(across));
    println!("WRITE 1 MiB                                 {}", line(write));
    println!(
        "WRITE to the slower: {:.2} of one thread's, {:.2} of the two's",
        write[2] / send.min(receive),
        write[2] / across[2]
    );
    ExitCode::SUCCESS
}
