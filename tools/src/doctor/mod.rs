//! `uroce doctor`: what keeps RoCEv2 from working here, or between here and a peer, and how to mend it.
//!
//! Owns the flags, the verdict and what is printed. It changes nothing, and sends a few well-formed packets at most.

mod machine;
mod peer;

use clap::Args;
use serde::Serialize;

use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::report::Output;

/// Flags of `uroce doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// A peer, perhaps with the port of a service: ADDR, NAME, ADDR:PORT or [IPV6]:PORT. Without it this machine is
    /// looked at
    peer: Option<String>,
    /// Device from which the peer is asked: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID],
    /// tap:IFNAME,ip=ADDR or pnet:IFNAME [default: udp: on the address from which the peer is reached]
    #[arg(short, long, requires = "peer")]
    device: Option<DeviceArg>,
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs, out: &mut Output) -> Result<(), Failure> {
    let mut report = Report { out, checks: Vec::new() };
    match &args.peer {
        Some(peer) => peer::look(peer, args.device.as_ref(), &mut report)?,
        None => machine::look(&machine::Roots::default(), &mut report)?,
    }
    report.finish(args.peer.as_deref())
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// It may cost something, or something could not be asked.
    Warn,
    /// It does not work.
    Fail,
    /// This machine lacks something that is needed.
    Lack,
}

impl Level {
    const fn shown(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail | Self::Lack => "fail",
        }
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// What was looked at.
    check: &'static str,
    level: Level,
    /// What was found.
    found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), fix: None }
    }

    fn of(level: Level, check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level, found: found.into(), fix: Some(fix.into()) }
    }
}

/// Prints checks as they are made, and keeps them for the verdict.
pub(crate) struct Report<'a> {
    out: &'a mut Output,
    checks: Vec<Check>,
}

#[derive(Serialize)]
struct Document<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<&'a str>,
    verdict: Level,
    checks: &'a [Check],
}

impl Report<'_> {
    /// One line.
    fn add(&mut self, check: Check) -> Result<(), Failure> {
        let fix = check.fix.as_ref().map_or(String::new(), |fix| format!("; {fix}"));
        self.out.line(format_args!("{:<5} {:<14} {}{fix}", check.level.shown(), check.check, check.found))?;
        self.out.flush()?;
        self.checks.push(check);
        Ok(())
    }

    /// The worst of all checks decides.
    fn finish(self, peer: Option<&str>) -> Result<(), Failure> {
        let verdict = self.checks.iter().map(|c| c.level).max().unwrap_or(Level::Ok);
        self.out.document("doctor", &Document { peer, verdict, checks: &self.checks })?;
        let named = |level| {
            let names = self.checks.iter().filter(|c| c.level == level).map(|c| c.check);
            names.collect::<Vec<_>>().join(", ")
        };
        match verdict {
            Level::Ok | Level::Warn => Ok(()),
            Level::Fail => Err(Failure::Failed(format!("failed: {}", named(Level::Fail)))),
            Level::Lack => Err(Failure::Environment(format!("this machine lacks: {}", named(Level::Lack)))),
        }
    }
}
