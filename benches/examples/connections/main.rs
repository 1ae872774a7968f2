//! Connections: how many a second, and how long one takes.
//!
//! ```text
//! connections direct  COUNT AT_ONCE [LOSS]   one thread, no device: packets go from one endpoint into the other
//! connections switch  COUNT AT_ONCE [LOSS]   one thread, two engines over the in-process switch
//! connections sim     COUNT AT_ONCE [LOSS]   the simulator: virtual time, 10 us there and 10 us back
//! connections veth    COUNT ROUNDS           namespaces, uroce and TCP in turns, medians (needs root)
//!
//! connections serve DEVICE spin|block                           what `veth` runs: DEVICE is udp:ADDRESS or
//! connections connect DEVICE SERVER COUNT AT_ONCE spin|block    packet:INTERFACE
//! connections tcp-serve ADDRESS:PORT spin|block
//! connections tcp-connect ADDRESS:PORT COUNT AT_ONCE spin|block
//! ```
//!
//! LOSS is the probability at which a packet is lost, each way. What a connection is: `uroce_benches::connections`.
#![allow(clippy::print_stdout)] // It is a program.

mod local;
mod tcp;
mod veth;
mod wire;

use std::process::ExitCode;

use hdrhistogram::Histogram;

/// Seconds that this thread has had a processor for; other programs may have it meanwhile.
fn processor_time() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|n| n.parse::<f64>().ok());
    nanos.unwrap_or(f64::NAN) / 1e9
}

/// Prints a rate and the distribution of a latency. `processor` is the time of [`processor_time`], where the sides share a
/// thread.
fn report(what: &str, count: u64, failed: u64, seconds: f64, processor: Option<f64>, latency: &Histogram<u64>) {
    #[allow(clippy::cast_precision_loss)] // Figures for people.
    let (rate, us) = (count as f64 / seconds, |q: f64| latency.value_at_quantile(q) as f64 / 1e3);
    println!("{what}: {count} connections in {seconds:.3} s, {rate:.0} a second, {failed} failed");
    if let Some(processor) = processor {
        #[allow(clippy::cast_precision_loss)] // Figures for people.
        let rate = count as f64 / processor;
        println!("  {rate:.0} a second of processor time, {:.2} us each", 1e6 / rate);
    }
    #[allow(clippy::cast_precision_loss)] // Figures for people.
    let max = latency.max() as f64 / 1e3;
    let row = [us(0.5), us(0.9), us(0.99), us(0.999), max];
    let [p50, p90, p99, p999, max] = row;
    println!("  latency in us: p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}");
}

fn usage() -> ExitCode {
    println!("usage: see the head of benches/examples/connections/main.rs");
    ExitCode::from(2)
}

fn run(arguments: &[&str]) -> Option<()> {
    match arguments {
        ["veth", count, rounds] => veth::table(count, rounds.parse().ok()?),
        ["serve", device, mode] => wire::serve(device, *mode == "spin"),
        ["connect", device, server, count, at_once, mode] => {
            let (count, at_once) = (count.parse().ok()?, at_once.parse().ok()?);
            wire::connect(device, server.parse().ok()?, count, at_once, *mode == "spin");
        }
        ["tcp-serve", address, mode] => tcp::serve(address.parse().ok()?, *mode == "spin"),
        ["tcp-connect", address, count, at_once, mode] => {
            let (count, at_once) = (count.parse().ok()?, at_once.parse().ok()?);
            tcp::connect(address.parse().ok()?, count, at_once, *mode == "spin");
        }
        _ => return run_here(arguments),
    }
    Some(())
}

/// Both sides in this thread.
fn run_here(arguments: &[&str]) -> Option<()> {
    let [how @ ("direct" | "switch" | "sim"), count, at_once, loss @ ..] = arguments else { return None };
    let (count, at_once) = (count.parse().ok()?, at_once.parse().ok()?);
    let loss = loss.first().map_or(Some(0.0), |loss| loss.parse().ok())?;
    match *how {
        "direct" => local::direct(count, at_once, loss),
        "switch" => local::switch(count, at_once, loss),
        _ => local::simulated(count, at_once, loss),
    }
    Some(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if run(&arguments).is_some() { ExitCode::SUCCESS } else { usage() }
}
