//! Connections over a veth pair between two network namespaces: uroce's devices and TCP in turns, in one run.
//!
//! Needs the right to make namespaces. Client and server are processes of this program, each pinned to a processor.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

const SIDES: [&str; 2] = ["cmperf-a", "cmperf-b"];
const SERVER: &str = "10.99.7.2";

/// A way to connect: its name, and what server and client are told.
struct Way {
    name: &'static str,
    server: &'static [&'static str],
    client: &'static [&'static str],
    at_once: &'static str,
    mode: &'static str,
}

const fn way(
    name: &'static str,
    server: &'static [&'static str],
    client: &'static [&'static str],
    at_once: &'static str,
    mode: &'static str,
) -> Way {
    Way { name, server, client, at_once, mode }
}

const TCP: (&[&str], &[&str]) = (&["tcp-serve", "10.99.7.2:7471"], &["tcp-connect", "10.99.7.2:7471"]);
const UDP: (&[&str], &[&str]) = (&["serve", "udp:10.99.7.2"], &["connect", "udp:10.99.7.1", SERVER]);
const PACKET: (&[&str], &[&str]) = (&["serve", "packet:cmperf-b"], &["connect", "packet:cmperf-a", SERVER]);

const WAYS: [Way; 10] = [
    way("TCP, blocking", TCP.0, TCP.1, "1", "block"),
    way("TCP, spinning", TCP.0, TCP.1, "1", "spin"),
    way("TCP, spinning", TCP.0, TCP.1, "64", "spin"),
    way("uroce, UDP socket, blocking", UDP.0, UDP.1, "1", "block"),
    way("uroce, UDP socket, spinning", UDP.0, UDP.1, "1", "spin"),
    way("uroce, UDP socket, spinning", UDP.0, UDP.1, "64", "spin"),
    way("uroce, UDP socket, spinning", UDP.0, UDP.1, "256", "spin"),
    way("uroce, packet socket, spinning", PACKET.0, PACKET.1, "1", "spin"),
    way("uroce, packet socket, spinning", PACKET.0, PACKET.1, "64", "spin"),
    way("uroce, packet socket, spinning", PACKET.0, PACKET.1, "256", "spin"),
];

fn ip(arguments: &str) -> bool {
    let done = Command::new("ip").args(arguments.split_whitespace()).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

fn remove() {
    for side in SIDES {
        ip(&format!("netns del {side}"));
    }
}

fn make() -> bool {
    remove();
    let [a, b] = SIDES;
    let pair = format!("link add {a} netns {a} type veth peer name {b} netns {b}");
    let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&pair);
    made && [(a, "10.99.7.1/24"), (b, "10.99.7.2/24")].into_iter().all(|(side, address)| {
        // Ports of closed connections are free at once: TCP would run out of them, and keeps no TIMEWAIT record.
        let sysctl = "net.ipv4.ip_local_port_range=1024 65535";
        let set = |what: &str| {
            let done = Command::new("ip").args(["netns", "exec", side, "sysctl", "-qw", what]).status();
            done.is_ok_and(|status| status.success())
        };
        ip(&format!("-n {side} addr add {address} dev {side}"))
            && ip(&format!("-n {side} link set {side} mtu 9000 up"))
            && ip(&format!("-n {side} link set lo up"))
            && set(sysctl)
            && set("net.ipv4.tcp_max_tw_buckets=0")
    })
}

/// This program with `arguments` in a namespace, on a processor.
fn spawn(side: &str, processor: &str, arguments: &[&str]) -> Child {
    let program = std::env::current_exe().expect("our own path");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", side, "taskset", "-c", processor]).arg(program).args(arguments);
    command.stdout(Stdio::piped()).spawn().expect("iproute2 and taskset")
}

/// Connections a second, and the median latency in microseconds.
fn run(way: &Way, count: &str) -> Option<(f64, f64)> {
    let mut server = spawn(SIDES[1], "1", &[way.server, &[way.mode]].concat());
    // It says when it listens.
    let listens = server.stdout.take().is_some_and(|out| BufReader::new(out).read_line(&mut String::new()).is_ok());
    let client = listens.then(|| spawn(SIDES[0], "0", &[way.client, &[count, way.at_once, way.mode]].concat()));
    let output = client.map(Child::wait_with_output);
    // It serves for ever.
    let _ = server.kill();
    let _ = server.wait();
    let output = output?.ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let after = |mark: &str, end: char| text.split(mark).nth(1)?.split(end).next()?.trim().parse::<f64>().ok();
    Some((after(" s, ", 'a')?, after("p50 ", ',')?))
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// All ways in turns, `rounds` times, and a table of medians.
pub(super) fn table(count: &str, rounds: usize) {
    if !make() {
        println!("no right to make network namespaces");
        remove();
        return;
    }
    let mut rates = vec![Vec::new(); WAYS.len()];
    let mut latencies = vec![Vec::new(); WAYS.len()];
    for _ in 0..rounds {
        for (index, way) in WAYS.iter().enumerate() {
            if let Some((rate, latency)) = run(way, count) {
                rates[index].push(rate);
                latencies[index].push(latency);
            }
        }
    }
    remove();
    println!("medians of {rounds} runs of {count} connections each");
    println!("| | at once | connections/s | p50 us |\n|---|---|---|---|");
    for (index, way) in WAYS.iter().enumerate() {
        let (rate, latency) = (median(&mut rates[index]), median(&mut latencies[index]));
        println!("| {} | {} | {rate:.0} | {latency:.1} |", way.name, way.at_once);
    }
}
