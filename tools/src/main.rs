//! The `uroce` command: a RoCEv2 endpoint for the shell.
//!
//! Owns the command line. Each subcommand has a file of its own.

mod cm;
mod conn;
mod demo;
mod device_arg;
mod devinfo;
mod doctor;
mod dump;
mod exit;
mod guard;
mod hardware;
mod health;
mod node;
mod observe;
mod pages;
mod perf;
mod ping;
mod pingpong;
mod ports;
mod progress;
mod rdma;
mod report;
mod res;
mod stat;
mod stats;
mod stop;
mod why;
mod wrap;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::exit::Failure;
use crate::report::Output;

/// RDMA over Converged Ethernet (RoCEv2) without RDMA hardware: a RoCEv2 endpoint in user space.
///
/// Exit codes: 0 it worked, 1 it did not, 2 wrong usage, 3 a limit that you set was missed, 4 this machine lacks
/// something that is needed (the message says what, and how to get it).
#[derive(Parser)]
#[command(name = "uroce", version)]
struct Cli {
    /// Print JSON instead of text: one document, with a `schema` number
    #[arg(long, global = true)]
    json: bool,
    /// Put packet pools, and memory regions of 1 MiB or more, on huge pages, if the system has enough
    #[arg(long, global = true)]
    hugepages: bool,
    #[command(flatten)]
    wrap: wrap::WrapArgs,
    #[command(flatten)]
    guard: guard::GuardArgs,
    #[command(flatten)]
    inspect: observe::InspectArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make connections, time them and send datagrams, as the programs that come with librdmacm
    Cm(cm::CmArgs),
    /// Connect two processes of this machine and move verified data with every operation
    Demo(demo::DemoArgs),
    /// Say what keeps RoCEv2 from working on this machine, or between it and a peer, and how to mend it
    Doctor(doctor::DoctorArgs),
    /// Show RoCEv2 packets of a capture file or an interface, and what became of each stream
    Dump(dump::DumpArgs),
    /// Show a device's attributes and GID table, as ibv_devinfo
    Devinfo(devinfo::DevinfoArgs),
    /// Say whether running endpoints are well: exit code 0, or 1 with the reasons, or 4 when none runs
    Health(health::HealthArgs),
    /// Measure bandwidth or latency between two uroce endpoints, as perftest
    Perf(Box<perf::PerfCommand>),
    /// Ping an rping server, or serve rping clients, over RDMA
    Ping(ping::PingArgs),
    /// Exchange messages with ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong or ibv_srq_pingpong, or with itself
    Pingpong(pingpong::PingpongArgs),
    /// Show what lives in running endpoints, as rdma resource
    Res(res::ResArgs),
    /// Show the counters of running endpoints, as rdma statistic, or for Prometheus
    Stat(stat::StatArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.wrap.install();
    cli.inspect.install();
    if cli.hugepages {
        pages::install();
    }
    let mut out = Output::new(cli.json);
    let result = run(&cli, &mut out).and_then(|()| out.flush());
    pages::remark_if_refused();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // What was printed before the failure belongs before the complaint.
            let _ = out.flush();
            report::complain(&failure);
            ExitCode::from(&failure)
        }
    }
}

fn run(cli: &Cli, out: &mut Output) -> Result<(), Failure> {
    let has_cm = matches!(&cli.command, Command::Cm(_) | Command::Demo(_) | Command::Perf(_) | Command::Ping(_));
    if !has_cm && !cli.guard.is_empty() {
        return Err(Failure::Usage(
            "only cm, demo, perf and ping have a connection manager; leave --policy and --audit out".into(),
        ));
    }
    cli.guard.install()?;
    match &cli.command {
        // It only watches: a flag that would do nothing is a mistake.
        Command::Dump(_) if !cli.wrap.is_empty() => Err(Failure::Usage(
            "dump has no endpoint of its own; leave --fault and --pcap out (-w writes pcapng)".into(),
        )),
        Command::Cm(args) => cm::run(args, out),
        Command::Demo(args) => demo::run(args, out),
        Command::Doctor(args) => doctor::run(args, out),
        Command::Dump(args) => dump::run(args, out),
        Command::Devinfo(args) => devinfo::run(args, out),
        Command::Health(args) => health::run(args, out),
        Command::Perf(args) => perf::run(args, out),
        Command::Ping(args) => ping::run(args, out),
        Command::Pingpong(args) => pingpong::run(args, out),
        Command::Res(args) => res::run(args, out),
        Command::Stat(args) => stat::run(args, out),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn no_flag_stands_for_two_things() {
        super::Cli::command().debug_assert();
    }
}
