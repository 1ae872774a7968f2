//! Moves messages and prints nothing: something to count instructions of, where the wall clock is noisy.
//!
//! `valgrind --tool=callgrind transfer WIRE OPERATION BYTES COUNT`, e.g. `direct write 64 20000`.

use std::process::ExitCode;

use uroce::types::PathMtu;
use uroce_benches::{Direct, Kind, Loopback, Pair, Superframes, Wire};

fn run<W: Wire + Default>(kind: Kind, length: u32, count: u32) {
    let depth = if length > 4096 { 2 } else { 128 };
    Pair::<W>::new(length as usize, PathMtu::B4096).run(kind, length, count, depth);
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [wire, kind, length, count] = &arguments[..] else { return ExitCode::from(2) };
    let kind = match kind.as_str() {
        "send" => Kind::Send,
        "write" => Kind::Write,
        "read" => Kind::Read,
        _ => return ExitCode::from(2),
    };
    let (Ok(length), Ok(count)) = (length.parse(), count.parse()) else { return ExitCode::from(2) };
    match wire.as_str() {
        "direct" => run::<Direct>(kind, length, count),
        "superframes" => run::<Superframes>(kind, length, count),
        "loopback" => run::<Loopback>(kind, length, count),
        _ => return ExitCode::from(2),
    }
    ExitCode::SUCCESS
}
