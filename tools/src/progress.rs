//! A progress bar for people who wait.
//!
//! Owns the bar. There is none when nobody watches standard error, or the output is for a program.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::report::Output;

/// Shows how far a command is.
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    /// A bar of `steps` steps.
    pub(crate) fn new(out: &Output, steps: usize) -> Self {
        if out.is_json() || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::new(steps as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        Self(Some(bar))
    }

    /// A step begins.
    pub(crate) fn begin(&self, what: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(what.to_owned());
        }
    }

    /// Prints with the bar out of the way.
    pub(crate) fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        match &self.0 {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// It is done.
    pub(crate) fn done(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
