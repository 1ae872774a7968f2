//! What a command prints: text for people, or one JSON document.
//!
//! Owns standard output and the version of the JSON schema. Never decides what is worth printing.

use std::fmt;
use std::io::{self, BufWriter, IsTerminal, Write};

use serde::Serialize;

use crate::exit::Failure;
use crate::pages;

/// Version of every JSON document. A field may be added under the same number; one that goes or changes its meaning
/// raises it.
pub(crate) const SCHEMA: u32 = 1;

/// What every JSON document begins with.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: u32,
    command: &'static str,
    /// With `--hugepages`: which pages came.
    #[serde(skip_serializing_if = "Option::is_none")]
    hugepages: Option<pages::Report>,
    #[serde(flatten)]
    body: &'a T,
}

impl<'a, T> Document<'a, T> {
    fn new(command: &'static str, body: &'a T) -> Self {
        Self { schema: SCHEMA, command, hugepages: pages::report(), body }
    }
}

/// Standard output, as text or as JSON.
pub(crate) struct Output {
    json: bool,
    mute: bool,
    to: BufWriter<io::Stdout>,
}

impl Output {
    /// Text, or JSON when the user asked for `--json`.
    pub(crate) fn new(json: bool) -> Self {
        Self { json, mute: false, to: BufWriter::new(io::stdout()) }
    }

    /// Prints nothing: for the other end of a test that lies in this process, too.
    pub(crate) fn mute() -> Self {
        Self { mute: true, ..Self::new(false) }
    }

    /// Whether the user wants JSON: then [`Output::line`] prints nothing.
    pub(crate) const fn is_json(&self) -> bool {
        self.json
    }

    /// A line of text, unless the output is JSON.
    pub(crate) fn line(&mut self, text: impl fmt::Display) -> Result<(), Failure> {
        if !self.json && !self.mute {
            writeln!(self.to, "{text}")?;
        }
        Ok(())
    }

    /// The JSON document of `command`, unless the output is text.
    pub(crate) fn document(&mut self, command: &'static str, body: &impl Serialize) -> Result<(), Failure> {
        if self.json {
            serde_json::to_writer_pretty(&mut self.to, &Document::new(command, body))?;
            writeln!(self.to)?;
        }
        self.flush()
    }

    /// JSON in the shape of another program, which scripts know: no schema number, and one line unless `pretty`.
    pub(crate) fn plain_json(&mut self, value: &impl Serialize, pretty: bool) -> Result<(), Failure> {
        if pretty {
            serde_json::to_writer_pretty(&mut self.to, value)?;
        } else {
            serde_json::to_writer(&mut self.to, value)?;
        }
        writeln!(self.to)?;
        self.flush()
    }

    /// A JSON document on one line, for commands that have many to tell before their last one.
    pub(crate) fn record(&mut self, command: &'static str, body: &impl Serialize) -> Result<(), Failure> {
        if self.json {
            serde_json::to_writer(&mut self.to, &Document::new(command, body))?;
            writeln!(self.to)?;
        }
        Ok(())
    }

    /// Shows what was printed so far.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        Ok(self.to.flush()?)
    }

    /// Whether a person watches.
    pub(crate) fn is_terminal(&self) -> bool {
        self.to.get_ref().is_terminal()
    }
}

/// The one line on standard error that ends a command that did not succeed.
#[allow(clippy::print_stderr)] // The one place that writes there.
pub(crate) fn complain(failure: &Failure) {
    if !matches!(failure, Failure::OutputClosed) {
        eprintln!("uroce: {failure}");
    }
}

/// A remark on standard error that changes nothing.
#[allow(clippy::print_stderr)]
pub(crate) fn remark(text: impl fmt::Display) {
    eprintln!("{text}");
}
