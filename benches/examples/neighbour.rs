//! What a hostile QP costs its neighbour on the same endpoints.
//!
//! `neighbour [MESSAGES [BATCHES [CASE]]]`: two endpoints over the in-process switch, driven in turn by one thread. A QP moves
//! MESSAGES (300) WRITEs of 1 MiB, four under way, while another one of the same endpoints: does nothing; does the same
//! (a peer with a right to half); SENDs 64 KiB to a peer that never posts a receive and asks for the shortest RNR wait;
//! WRITEs 1 MiB while a fifth of its packets is lost; registers and deregisters regions, and nothing else; keeps 16 READs
//! of 1 MiB under way. BATCHES (5) batches, the cases one after the other in each. Prints medians of what the neighbour
//! moves, in GiB/s of processor time, its share of what it moves alone, and the share of bytes sent that were its own.
//! Exits with 1 when a case without a right to the link leaves it less than 0.9, or READs leave it less than 0.9 of half.

use std::process::ExitCode;

use uroce::device::Direction;
use uroce::device::fault::{FaultAction, FaultInjector, FaultRule, Which};
use uroce::device::loopback::{LoopbackDevice, Switch};
use uroce::device::{pin_current_thread, thread_cpu_time};
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{AccessFlags, Operation, SendFlags, Verbs};
use uroce_benches::copying::{MESSAGE, rate};
use uroce_benches::party::Party;

/// Messages of the neighbour under way.
const DEPTH: u32 = 4;
/// Bytes of a SEND that nobody receives, and of a region that comes and goes.
const SMALL: usize = 64 << 10;
/// Regions that come and go in each round.
const CHURN: usize = 4;
/// Messages before the measurement.
const WARM_UP: usize = 20;
/// What a neighbour keeps at least.
const BOUND: f64 = 0.9;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Alone,
    Peaceful,
    Rnr,
    Loss,
    Churn,
    Reads,
}

impl Case {
    const ALL: [Self; 6] = [Self::Alone, Self::Peaceful, Self::Rnr, Self::Loss, Self::Churn, Self::Reads];

    fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Peaceful => "peaceful",
            Self::Rnr => "rnr",
            Self::Loss => "loss",
            Self::Churn => "churn",
            Self::Reads => "reads",
        }
    }
}

struct Ends {
    engines: [Engine<FaultInjector<LoopbackDevice>>; 2],
    good: [Party; 2],
    bad: [Party; 2],
    case: Case,
    spare: Region,
    /// Requests of the hostile QP under way.
    pending: u32,
}

impl Ends {
    fn new(case: Case) -> Self {
        let switch = Switch::new();
        let mut engines = [1, 2].map(|n| {
            let port = switch.port(&[[10, 0, 0, n].into()]);
            Engine::open(FaultInjector::new(port)).expect("a seed")
        });
        let [good, bad] = [0, 1].map(|_| {
            let parties = [0, 1].map(|i| Party::new(engines[i].endpoint_mut(), MESSAGE));
            for (i, peer) in [(0, 1), (1, 0)] {
                let (name, shortest) = (parties[peer].name(), RnrTimer::new(1).expect("a code"));
                parties[i].connect(engines[i].endpoint_mut(), &name, PathMtu::B4096, shortest);
            }
            parties
        });
        if case == Case::Loss {
            let victim = bad[1].name().qpn;
            let test = Box::new(move |packet: &uroce::wire::Packet<'_>| packet.dest_qp == victim);
            let rule = FaultRule::on(FaultAction::Drop, test, Which::Every(5)).only(Direction::Out);
            engines[0].device_mut().add(rule).expect("room for a rule");
        }
        let spare = Region::alloc(SMALL).expect("memory");
        Self { engines, good, bad, case, spare, pending: 0 }
    }

    /// What the other one does in a round.
    fn harm(&mut self) {
        let verbs = self.engines[0].endpoint_mut();
        let [from, to] = &self.bad;
        let (operation, length, depth) = match self.case {
            Case::Alone => return,
            Case::Churn => {
                for _ in 0..CHURN {
                    let mr = verbs.register(from.pd, &self.spare, AccessFlags::ALL, None).expect("room for an MR");
                    verbs.deregister(mr.handle).expect("it lives");
                }
                return;
            }
            Case::Rnr => (Operation::Send, SMALL, DEPTH),
            Case::Peaceful | Case::Loss => (Operation::Write(to.name().remote), MESSAGE, DEPTH),
            Case::Reads => (Operation::Read(to.name().remote), MESSAGE, 16),
        };
        self.pending -= from.poll(verbs).sent;
        while self.pending < depth {
            from.post(verbs, operation, u32::try_from(length).expect("short"), SendFlags::SIGNALED);
            self.pending += 1;
        }
    }

    /// The neighbour moves so many messages.
    fn write(&mut self, messages: usize) {
        let (mut posted, mut done) = (0, 0);
        let operation = Operation::Write(self.good[1].name().remote);
        while done < messages {
            self.harm();
            let verbs = self.engines[0].endpoint_mut();
            while posted < messages && posted - done < DEPTH as usize {
                self.good[0].post(verbs, operation, MESSAGE as u32, SendFlags::SIGNALED);
                posted += 1;
            }
            for engine in &mut self.engines {
                engine.poll().expect("a switch");
            }
            done += self.good[0].poll(self.engines[0].endpoint_mut()).sent as usize;
        }
    }

    /// Bytes that both QPs sent, both ways: the neighbour's, and the other's.
    fn sent(&self) -> [f64; 2] {
        [&self.good, &self.bad].map(|parties| {
            let of = |i: usize| self.engines[i].endpoint().qp_counters(parties[i].qp).map_or(0, |c| c.sent_bytes);
            (of(0) + of(1)) as f64
        })
    }
}

/// GiB/s of the neighbour, and its share of all bytes.
fn measure(case: Case, messages: usize) -> [f64; 2] {
    let mut ends = Ends::new(case);
    ends.write(WARM_UP);
    let (begin, before) = (thread_cpu_time().expect("a clock"), ends.sent());
    ends.write(messages);
    let (took, after) = (thread_cpu_time().expect("a clock") - begin, ends.sent());
    let [own, other] = [0, 1].map(|i| after[i] - before[i]);
    [rate(messages, took), own / (own + other)]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

#[allow(clippy::print_stdout)] // What it is for.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, usual: usize| arguments.get(i).and_then(|n| n.parse().ok()).unwrap_or(usual).max(1);
    let (messages, batches) = (number(0, 300), number(1, 5));
    // Where a processor may be chosen; it is no loss where not.
    let _ = pin_current_thread(0);
    let wanted = |case: &Case| case == &Case::Alone || arguments.get(2).is_none_or(|name| name == case.name());
    let cases: Vec<Case> = Case::ALL.into_iter().filter(wanted).collect();
    let mut figures = vec![Vec::new(); cases.len()];
    for _ in 0..batches {
        for (of_case, case) in figures.iter_mut().zip(&cases) {
            of_case.push(measure(*case, messages));
        }
    }
    let alone: Vec<f64> = figures[0].iter().map(|f| f[0]).collect();
    let mut is_fair = true;
    println!("the other QP     GiB/s   to alone   bytes sent");
    for (case, of_case) in cases.iter().zip(&figures) {
        let speed = median(of_case.iter().map(|f| f[0]).collect());
        // Within a batch, so that a machine that slows down between batches changes nothing.
        let kept = median(of_case.iter().zip(&alone).map(|(f, alone)| f[0] / alone).collect());
        let share = median(of_case.iter().map(|f| f[1]).collect());
        println!("{:<14} {speed:7.2}   {kept:8.2}   {share:10.2}", case.name());
        is_fair &= match case {
            Case::Alone | Case::Peaceful => true,
            Case::Rnr | Case::Loss | Case::Churn => kept >= BOUND,
            Case::Reads => kept >= BOUND / 2.0,
        };
    }
    if is_fair { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
