//! Two threads in one process: messages of 1 MiB over the in-process switch, beside what copying and checking cost alone.
//!
//! `inproc [MESSAGES [BATCHES [FRAMES [CPUS]]]]`: MESSAGES (400) of each kind in a batch, four under way; BATCHES (7), FRAMES
//! of a port (its default), CPUS the processors of sender and receiver (`0,1`). In each batch come in turn: the sender's
//! work alone (one pass that copies and computes the CRC, packet by packet, into the frames of a port), the receiver's
//! alone (the CRC, then the copy), both as two threads that hand frames over a ring, and WRITEs, SENDs and READs between two
//! endpoints, whose content is verified. Prints medians in GiB/s, of each side's processor time and by the clock, and the
//! ratios of the former: the clock of a machine on which others work says little of two threads. A READ's sender is who
//! answers it.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uroce::device::loopback::{FRAMES, LoopbackDevice, PortConfig, Switch};
use uroce::device::pin_current_thread;
use uroce::engine::Engine;
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{Operation, Remote, SendFlags};
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

    /// Moves `messages` of `kind` from the first to the second, or has the first read them.
    fn exchange(&mut self, kind: Kind, messages: usize, cpus: [usize; 2], seed: usize) -> Took {
        let bytes: Vec<u8> = (0..MESSAGE).map(|i| ((i * 7 + (i >> 8) + seed) % 251) as u8).collect();
        let ([left, right], [asker, other]) = (&mut self.engines, &self.parties);
        let (from, to) = if kind == Kind::Read { (other, asker) } else { (asker, other) };
        from.region.write(0, &bytes).expect("inside");
        to.region.write(0, &vec![0; MESSAGE]).expect("inside");
        // The data goes from the first processor to the second.
        let [asks, answers] = if kind == Kind::Read { [cpus[1], cpus[0]] } else { cpus };
        let over = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                pin_current_thread(answers).expect("a processor");
                let (mut posted, mut done, mut busy) = (0, 0, Busy::new());
                while !over.load(Ordering::Relaxed) {
                    let work = || {
                        while kind == Kind::Send && posted < messages && posted - done < 2 * DEPTH {
                            other.receive(right.endpoint_mut(), MESSAGE as u32);
                            posted += 1;
                        }
                        let moved = right.poll().expect("a switch");
                        if kind == Kind::Send {
                            done += other.poll(right.endpoint_mut()).received as usize;
                        }
                        moved
                    };
                    busy.count(|moved| *moved > 0, work);
                }
                busy.sum()
            });
            pin_current_thread(asks).expect("a processor");
            let operation = kind.operation(other.name().remote);
            let (mut posted, mut done, mut busy) = (0, 0, Busy::new());
            let begin = Instant::now();
            while done < messages {
                let work = || {
                    while posted < messages && posted - done < DEPTH {
                        asker.post(left.endpoint_mut(), operation, MESSAGE as u32, SendFlags::SIGNALED);
                        posted += 1;
                    }
                    let moved = left.poll().expect("a switch");
                    done += asker.poll(left.endpoint_mut()).sent as usize;
                    moved
                };
                busy.count(|moved| *moved > 0, work);
            }
            let wall = begin.elapsed();
            over.store(true, Ordering::Relaxed);
            let [asking, answering] = [busy.sum(), answering.join().expect("a batch")];
            let (sender, receiver) = if kind == Kind::Read { (answering, asking) } else { (asking, answering) };
            Took { wall, sender, receiver }
        });
        assert!(to.region.to_vec() == bytes, "the bytes arrived");
        took
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Send,
    Read,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Write, Self::Send, Self::Read];

    fn operation(self, there: Remote) -> Operation {
        match self {
            Self::Write => Operation::Write(there),
            Self::Send => Operation::Send,
            Self::Read => Operation::Read(there),
        }
    }
}

/// Does `f` in a thread of its own: a bound thread cannot start another elsewhere.
fn apart<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(f).join().expect("a batch"))
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
    let (mut single, mut ring, mut messaged): (Vec<[Duration; 2]>, Vec<Took>, [Vec<Took>; 3]) = Default::default();
    for seed in 0..=batches {
        let by_itself = apart(|| {
            pin_current_thread(cpus[0]).expect("a processor");
            alone(messages, count)
        });
        let across = across(messages, count, cpus);
        let took = Kind::ALL.map(|kind| apart(|| ends.exchange(kind, messages, cpus, seed)));
        // The first batch warms up.
        if seed > 0 {
            single.push(by_itself);
            ring.push(across);
            messaged.iter_mut().zip(took).for_each(|(all, took)| all.push(took));
        }
    }
    let [send, receive] = [0, 1].map(|i| median(single.iter().map(|t| rate(messages, t[i])).collect()));
    let across = rates(messages, &ring);
    println!("GiB/s                                       sender  receiver  busier    clock   to the slower of");
    println!(
        "copying and checking, one thread alone      {send:6.2}    {receive:6.2}                   one    two threads"
    );
    let line = |[a, b, c, d]: [f64; 4]| format!("{a:6.2}    {b:6.2}  {c:6.2}   {d:6.2}");
    println!("copying and checking, two threads, a ring   {}", line(across));
    for (kind, took) in Kind::ALL.into_iter().zip(messaged) {
        let moved = rates(messages, &took);
        let [one, two] = [moved[2] / send.min(receive), moved[2] / across[2]];
        println!(
            "{:<44}{}   {one:.2}   {two:.2}",
            format!("{} of 1 MiB", format!("{kind:?}").to_uppercase()),
            line(moved)
        );
    }
    ExitCode::SUCCESS
}
