//! Runs `uroce` and reads what it says.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// `uroce` with these arguments, not yet started.
pub(crate) fn uroce(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uroce"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs `uroce` to its end.
pub(crate) fn run(args: &[&str]) -> Ran {
    Ran::of(&uroce(args).output().unwrap())
}

/// What a run said.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Exit code; -1 when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ran {
    /// Of a finished process.
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout.clone()).unwrap(),
            err: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// Its one JSON document.
    pub(crate) fn json(&self) -> Value {
        let document: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(document["schema"], 1);
        document
    }

    /// Checks the exit code, and that a failure is told in one line that contains `text`.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, text: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains(text), "{self:?}");
        assert_eq!(self.err.trim_end().lines().count(), 1, "one clear line: {self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
    }
}
