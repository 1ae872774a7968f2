//! uroce beside what people would use instead, on one veth pair in one run.
//!
//! `versus [--quick | --smoke] [--only point1,point4] [--out DIR]` makes two network namespaces and removes them, runs
//! every program in turn, round after round, and writes medians, ratios and plots below DIR. Linux, as root; `run.sh`
//! builds and installs what it needs. Owns the command line and the order of the run.

#![allow(clippy::print_stdout, clippy::print_stderr)] // A program.
#![allow(missing_docs)] // Of a program, not of a library.

mod devices;
mod floor;
mod groups;
mod judge;
mod lab;
mod machine;
mod others;
mod ours;
mod page;
mod plot;
mod plots;
mod results;
mod tcp;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};

use self::groups::{Effort, Group};
use self::lab::Lab;
use self::results::Results;

type Error = Box<dyn std::error::Error>;

/// uroce beside TCP, UCX, libfabric and the bare device, on one veth pair.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Args)]
struct RunArgs {
    /// At most two minutes: fewer rounds, shorter each
    #[arg(long)]
    quick: bool,
    /// A few seconds: one short round of a little of everything, to see that this program works
    #[arg(long)]
    smoke: bool,
    /// Only what these points need: point1, point2, point3, point4, point5, point7, point9, plots
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these devices: packet, own, udp, xdp, tap, loop
    #[arg(long, value_delimiter = ',')]
    devices: Vec<String>,
    /// Rounds [default: 5]
    #[arg(long)]
    rounds: Option<usize>,
    /// Folder that gets versus/results.json, versus/versus.html and src/versus.md
    #[arg(long, default_value = "docs")]
    out: PathBuf,
    /// A guest's results (guest.sh) that the page shows, too
    #[arg(long)]
    guest: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Make table and page again from results.json and guest.json
    Report,
    /// Make guest.json of what guest-measure.sh printed
    Guest {
        /// File
        log: PathBuf,
    },
    /// Programs that the run starts itself
    #[command(subcommand, hide = true)]
    Child(Child),
}

#[derive(Subcommand)]
enum Child {
    /// Serve or measure a TCP ping-pong or connection loop
    Tcp(tcp::TcpArgs),
    /// Measure copies and CRCs in memory
    Floor(floor::FloorArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(Command::Child(Child::Tcp(args))) => tcp::run(args),
        Some(Command::Child(Child::Floor(args))) => floor::run(args),
        Some(Command::Report) => Results::read(&cli.run.out).and_then(|results| write(&cli.run, &results)),
        Some(Command::Guest { log }) => guest(&cli.run, log),
        None => measure(&cli.run),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("versus: {e}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &RunArgs) -> Result<(), Error> {
    let effort = Effort::new(args.quick, args.smoke, args.rounds);
    lab::watch_signals()?;
    let lab = Lab::new()?;
    let mut results = Results::new(machine::describe(&lab), effort.rounds);
    let devices = devices::usable(&lab, &args.devices, &mut results.notes);
    let mut wanted = groups::all(&lab, &devices, &effort, &mut results.notes);
    if !args.only.is_empty() {
        wanted.retain(|group| group.serves.iter().any(|point| args.only.iter().any(|o| o == point)));
    }
    if wanted.is_empty() {
        return Err(format!("nothing to measure for {:?}", args.only).into());
    }
    let begin = Instant::now();
    let estimate: f64 = wanted.iter().map(|g| g.estimate() * g.rounds as f64).sum();
    eprintln!("about {:.0} s, at most {} s", estimate, effort.limit.as_secs());
    for (index, group) in wanted.iter().enumerate() {
        // What is left of the time, shared by the groups' needs.
        let rest: f64 = wanted[index..].iter().map(|g| g.estimate() * g.rounds as f64).sum();
        let left = effort.limit.saturating_sub(begin.elapsed());
        let share = left.mul_f64((group.estimate() * group.rounds as f64 / rest).min(1.0));
        run_group(&lab, group, share, &mut results)?;
    }
    results.seconds = begin.elapsed().as_secs_f64();
    results.ratios = judge::judge(&results);
    drop(lab);
    write(args, &results)?;
    // Others may be missing; uroce may not fail.
    let failed = |(id, figure): (&String, &results::Figure)| figure.failed.as_ref().map(|why| format!("{id}: {why}"));
    let ours = results.figures.iter().filter(|(id, _)| id.contains("uroce/") || id.starts_with("raw/"));
    let ours: Vec<String> = ours.filter_map(failed).collect();
    if ours.is_empty() { Ok(()) } else { Err(ours.join("; ").into()) }
}

/// Runs every contestant once a round, so that a change of the machine meets all alike.
fn run_group(lab: &Lab, group: &Group, share: Duration, results: &mut Results) -> Result<(), Error> {
    let begin = Instant::now();
    for round in 1..=group.rounds {
        if round > 1 && begin.elapsed().mul_f64(round as f64 / (round - 1) as f64) > share {
            results.notes.push(format!(
                "{}: {} rounds of {} fitted into the time",
                group.name,
                round - 1,
                group.rounds
            ));
            break;
        }
        for contestant in &group.contestants {
            lab::check_signals()?;
            if results.has_failed(&contestant.id) {
                continue;
            }
            let measured = (contestant.run)(lab);
            // A second chance: a machine that was busy elsewhere is not the contestant's fault.
            let measured = if measured.is_err() { (contestant.run)(lab) } else { measured };
            let shown = match &measured {
                Ok(sample) => results::brief(sample),
                Err(e) => format!("failed: {e}"),
            };
            eprintln!("{} {round}/{}: {}: {shown}", group.name, group.rounds, contestant.title);
            results.add(contestant, measured);
        }
    }
    Ok(())
}

/// Judges what was measured in the guest.
fn guest(args: &RunArgs, log: &std::path::Path) -> Result<(), Error> {
    let mut results = Results::of_log(&std::fs::read_to_string(log)?);
    results.ratios = judge::judge_guest(&results);
    std::fs::create_dir_all(args.out.join("versus"))?;
    results.write(&args.out.join("versus/guest.json"))?;
    println!("{}", page::verdict(&page::Whole { results: &results, guest: None }));
    Ok(())
}

fn write(args: &RunArgs, results: &Results) -> Result<(), Error> {
    let guest = args.guest.clone().unwrap_or_else(|| args.out.join("versus/guest.json"));
    let guest = std::fs::read_to_string(guest).ok().and_then(|text| serde_json::from_str(&text).ok());
    let whole = page::Whole { results, guest: guest.as_ref() };
    let (json, text) = (args.out.join("versus"), args.out.join("src"));
    std::fs::create_dir_all(&json)?;
    std::fs::create_dir_all(&text)?;
    results.write(&json.join("results.json"))?;
    let markdown = page::markdown(&whole);
    std::fs::write(json.join("versus.html"), page::html(&whole))?;
    std::fs::write(text.join("versus.md"), &markdown)?;
    println!("{}", page::verdict(&whole));
    Ok(())
}
