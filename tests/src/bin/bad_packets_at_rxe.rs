//! Sends the corpus of bad packets at Linux's rxe in a guest: `tests/rxe-vm/bad-packets.sh` says how.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program whose result is what it prints")]

#[allow(dead_code, unused_imports, reason = "our own verdicts are judged by the tests")]
#[path = "../../it/bad_packets/mod.rs"]
mod bad_packets;

fn main() -> std::process::ExitCode {
    bad_packets::at_rxe::main()
}
