//! An 8-byte ping-pong of two threads that wait in each of the ways there are, beside TCP's, over a veth pair.
//!
//! `waits udp|packet [ROUNDS [WAYS [CPUS]]]`: ROUNDS (2000) exchanges in a batch, seven batches of each way in turn. WAYS
//! is a list such as `tcp-block,block` (all of them if not given), CPUS the processors of the two threads (`0,1`). Prints
//! the median over the batches of their median and 99th percentile, the processor time of both threads a round trip, and
//! the ratio to TCP that blocks. Needs root; Linux only.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use uroce::device::{pin_current_thread, thread_cpu_time};
use uroce::engine::{Engine, PollPolicy, SPIN_DEFAULT};
use uroce::host::{Handle, Host};
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{Operation, SendFlags};
use uroce_benches::party::{Came, Name, Party};
use uroce_benches::veth::Veth;

const BATCHES: usize = 7;
const SIZE: u32 = 8;
/// Receives posted ahead.
const AHEAD: u32 = 64;
/// One request in this many is signaled.
const SIGNALED: u32 = 16;
const WAYS: [&str; 5] = ["tcp-block", "tcp-spin", "block", "adaptive", "spin"];

/// What one batch took: each round trip, and processor time of both threads.
struct Batch {
    trips: Vec<Duration>,
    used: Duration,
}

/// One thread's end of every way.
struct End {
    tcp: TcpStream,
    verbs: Handle,
    party: Party,
    unsent: u32,
    count: u32,
}

impl End {
    fn tcp_receive(&mut self, spins: bool) {
        let mut bytes = [0; SIZE as usize];
        let mut got = 0;
        while got < bytes.len() {
            match self.tcp.read(&mut bytes[got..]) {
                Ok(n) => got += n,
                Err(e) if spins && e.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(e) => panic!("TCP: {e}"),
            }
        }
    }

    fn send(&mut self) {
        self.count += 1;
        let signaled = self.count.is_multiple_of(SIGNALED);
        self.unsent += u32::from(signaled);
        let flags = if signaled { SendFlags::SIGNALED } else { SendFlags::default() };
        self.party.post(&mut self.verbs, Operation::Send, SIZE, flags);
    }

    fn receive(&mut self) {
        loop {
            assert!(self.verbs.wait_cq(self.party.cq, Some(Duration::from_secs(10))).expect("a device"), "no answer");
            let Came { sent, received } = self.party.poll(&mut self.verbs);
            self.unsent -= sent;
            if received > 0 {
                self.party.receive(&mut self.verbs, SIZE);
                return;
            }
        }
    }

    /// `rounds` exchanges; the first end speaks first.
    fn batch(&mut self, way: &str, rounds: u32, first: bool) -> Batch {
        let (is_tcp, spins) = (way.starts_with("tcp"), way.ends_with("spin"));
        self.tcp.set_nonblocking(spins).expect("a socket");
        self.verbs.set_poll_policy(match way {
            "block" => PollPolicy::Block,
            "spin" => PollPolicy::Spin,
            _ => PollPolicy::Adaptive { spin: SPIN_DEFAULT },
        });
        let begin = thread_cpu_time().expect("a clock");
        let mut trips = Vec::with_capacity(rounds as usize);
        for _ in 0..rounds {
            let at = Instant::now();
            for turn in [first, !first] {
                match (turn, is_tcp) {
                    (true, true) => self.tcp.write_all(&[0; SIZE as usize]).expect("a connection"),
                    (true, false) => self.send(),
                    (false, true) => self.tcp_receive(spins),
                    (false, false) => self.receive(),
                }
            }
            trips.push(at.elapsed());
        }
        let used = thread_cpu_time().expect("a clock") - begin;
        Batch { trips, used }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let kind = arguments.first().map_or("udp", String::as_str);
    let rounds: u32 = arguments.get(1).and_then(|n| n.parse().ok()).unwrap_or(2000);
    let ways: Vec<&str> = arguments.get(2).map_or(WAYS.to_vec(), |list| list.split(',').collect());
    let cpus: Vec<usize> =
        arguments.get(3).map_or(vec![0, 1], |list| list.split(',').filter_map(|n| n.parse().ok()).collect());
    let veth = Veth::new(9000).expect("namespaces");
    let listener = veth.inside(1, || TcpListener::bind((Veth::address(1), 7)).expect("a port"));
    let client = veth.inside(0, || TcpStream::connect((Veth::address(1), 7)).expect("a connection"));
    let (server, _) = listener.accept().expect("a connection");
    let hosts: Vec<Host> =
        (0..2).map(|side| Host::new(Engine::open(veth.open(side, kind).expect("a device")).expect("a seed"))).collect();
    let mut ends: Vec<End> = hosts
        .iter()
        .zip([client, server])
        .map(|(host, tcp)| {
            tcp.set_nodelay(true).expect("a socket");
            let mut verbs = host.handle();
            let party = Party::new(&mut verbs, 4096);
            End { tcp, verbs, party, unsent: 0, count: 0 }
        })
        .collect();
    let names: Vec<Name> = ends.iter().map(|e| e.party.name()).collect();
    for (end, peer) in ends.iter_mut().zip(names.iter().rev()) {
        end.party.connect(&mut end.verbs, peer, PathMtu::B4096, RnrTimer::DEFAULT);
        for _ in 0..AHEAD {
            end.party.receive(&mut end.verbs, SIZE);
        }
    }
    let barrier = Arc::new(Barrier::new(2));
    let results: Vec<Vec<Batch>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .iter_mut()
            .enumerate()
            .map(|(side, end)| {
                let (barrier, ways, cpus) = (Arc::clone(&barrier), &ways, &cpus);
                scope.spawn(move || {
                    pin_current_thread(cpus[side % cpus.len()]).expect("a processor");
                    let mut batches = Vec::new();
                    // One more, to warm up.
                    for way in (0..=BATCHES).flat_map(|_| ways) {
                        barrier.wait();
                        batches.push(end.batch(way, rounds, side == 0));
                    }
                    batches
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a batch")).collect()
    });
    report(&ways, rounds, &results);
    ExitCode::SUCCESS
}

fn median<T: Copy + Ord>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

#[allow(clippy::print_stdout)] // What it is for.
fn report(ways: &[&str], rounds: u32, results: &[Vec<Batch>]) {
    let of = |way: usize, part: usize| {
        let batches = |side: usize| results[side].iter().skip(way).step_by(ways.len()).skip(1);
        let percentile = |batch: &Batch| {
            let mut trips = batch.trips.clone();
            trips.sort_unstable();
            trips[trips.len() * part / 1000]
        };
        let trip = median(batches(0).map(percentile).collect());
        let used = median(batches(0).zip(batches(1)).map(|(a, b)| (a.used + b.used) / rounds).collect());
        (trip, used)
    };
    let base = of(ways.iter().position(|w| *w == "tcp-block").unwrap_or(0), 500).0;
    println!("{:<10} {:>9} {:>9} {:>14} {:>8}", "way", "p50 us", "p99 us", "processor us", "ratio");
    for (i, way) in ways.iter().enumerate() {
        let ((p50, used), (p99, _)) = (of(i, 500), of(i, 990));
        let micros = |d: Duration| d.as_secs_f64() * 1e6;
        let ratio = p50.as_secs_f64() / base.as_secs_f64();
        println!("{way:<10} {:>9.2} {:>9.2} {:>14.2} {ratio:>8.2}", micros(p50), micros(p99), micros(used));
    }
}
