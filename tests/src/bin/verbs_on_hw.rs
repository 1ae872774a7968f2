//! One program against the verbs, over an RDMA device: `verbs_on_hw NAME [CHECK…]`. Prints `ok CHECK` or `FAIL CHECK`, and at
//! the end `N passed, N failed`.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for the shell.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use uroce::hw::{HwDevice, Library, OpenError};
use uroce_tests::verbs_program::CHECKS;

fn open(name: &str) -> Result<HwDevice, OpenError> {
    HwDevice::open(&Library::load()?, name, 1)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(name) = args.next() else {
        eprintln!("usage: verbs_on_hw NAME [CHECK…]");
        return ExitCode::from(2);
    };
    let wanted: Vec<String> = args.collect();
    let (mut passed, mut failed) = (0, 0);
    for (check, run) in CHECKS.into_iter().filter(|(c, _)| wanted.is_empty() || wanted.iter().any(|w| w == c)) {
        let mut device = match open(&name) {
            Ok(device) => device,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(4);
            }
        };
        // The message of a panic goes to standard error by itself.
        if catch_unwind(AssertUnwindSafe(|| run(&mut device))).is_ok() {
            println!("ok {check}");
            passed += 1;
        } else {
            println!("FAIL {check}");
            failed += 1;
        }
    }
    println!("{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}
