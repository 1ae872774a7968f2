//! Moves messages and prints nothing: something to count instructions of, where the wall clock is noisy.
//!
//! `valgrind --tool=callgrind transfer WIRE OPERATION BYTES COUNT [DEPTH]`, e.g. `direct write 64 20000`. DEPTH messages are
//! under way at a time: 128 small ones, or two of more than 4 KiB, unless it is given.

use std::process::ExitCode;

use uroce::raw::copy::Kernel;
use uroce::types::PathMtu;
use uroce_benches::{Direct, Kind, Loopback, Pair, Superframes, Wire};

fn run<W: Wire + Default>(kind: Kind, length: u32, count: u32, depth: u32) {
    Pair::<W>::new(length as usize, PathMtu::B4096).run(kind, length, count, depth);
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [wire, kind, length, count, depth @ ..] = &arguments[..] else { return ExitCode::from(2) };
    let kind = match kind.as_str() {
        "send" => Kind::Send,
        "write" => Kind::Write,
        "read" => Kind::Read,
        _ => return ExitCode::from(2),
    };
    let (Ok(length), Ok(count)) = (length.parse(), count.parse()) else { return ExitCode::from(2) };
    let usual = if length > 4096 { 2 } else { 128 };
    let Ok(depth) = depth.first().map_or(Ok(usual), |depth| depth.parse()) else { return ExitCode::from(2) };
    // A clock that stands still: the loops over bytes are the widest there are, as on a processor. By callgrind's own clock
    // tables would be the fastest.
    Kernel::choose(|| 0);
    match wire.as_str() {
        "direct" => run::<Direct>(kind, length, count, depth),
        "superframes" => run::<Superframes>(kind, length, count, depth),
        "loopback" => run::<Loopback>(kind, length, count, depth),
        _ => return ExitCode::from(2),
    }
    ExitCode::SUCCESS
}
