//! Who may connect to this endpoint, and the log of who did.
//!
//! Owns the flags `--policy` and `--audit` and the files behind them. What they mean the connection manager knows.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::SystemTime;

use clap::Args;
use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce_cm::policy::JsonLines;
use uroce_cm::{Policy, PolicyConfig};

use crate::exit::Failure;

/// Where `--help` lists the flags that many commands share.
const HEADING: &str = "Commands with a connection manager";

/// Flags that every command with a connection manager takes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct GuardArgs {
    /// Who may connect, and how often: a policy file (the page "Who may connect" of the book has an example)
    #[arg(long, global = true, value_name = "FILE", help_heading = HEADING)]
    policy: Option<PathBuf>,
    /// Append what the connection manager admits, refuses and ends to FILE, a JSON object a line
    #[arg(long, global = true, value_name = "FILE", help_heading = HEADING)]
    audit: Option<PathBuf>,
}

/// The policy of this process, read once, before any device is opened.
static GUARD: OnceLock<(PolicyConfig, Option<PathBuf>)> = OnceLock::new();

impl GuardArgs {
    /// Whether anything is asked for.
    pub(crate) const fn is_empty(&self) -> bool {
        self.policy.is_none() && self.audit.is_none()
    }

    /// Reads the policy, and makes it that of the process.
    pub(crate) fn install(&self) -> Result<(), Failure> {
        if self.is_empty() {
            return Ok(());
        }
        let config = match &self.policy {
            None => PolicyConfig::default(),
            Some(path) => {
                let shown = path.display();
                let text = std::fs::read_to_string(path)
                    .map_err(|e| Failure::Usage(format!("policy {shown} cannot be read: {e}")))?;
                PolicyConfig::from_toml(&text).map_err(|e| Failure::Usage(format!("policy {shown}: {e}")))?
            }
        };
        // A second call would come from a second command line, and there is none.
        let _ = GUARD.set((config, self.audit.clone()));
        Ok(())
    }
}

/// The policy that was asked for, if one was. `now` is the time of the device.
pub(crate) fn policy(rng: &mut Rng, now: Instant) -> Result<Option<Policy>, Failure> {
    let Some((config, audit)) = GUARD.get() else { return Ok(None) };
    let policy = Policy::new(config.clone(), rng);
    let Some(path) = audit else { return Ok(Some(policy)) };
    let open = |path: &PathBuf| -> std::io::Result<File> { OpenOptions::new().append(true).create(true).open(path) };
    let file =
        open(path).map_err(|e| Failure::Environment(format!("audit log {} cannot be opened: {e}", path.display())))?;
    let today = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let began = today.saturating_sub(now.saturating_since(Instant::ZERO));
    Ok(Some(policy.with_audit(Box::new(JsonLines::new(file)), began)))
}

/// On hardware the kernel decides who connects.
#[cfg(feature = "hw")]
pub(crate) fn refuse_on_hardware() -> Result<(), Failure> {
    match GUARD.get() {
        None => Ok(()),
        Some(_) => Err(Failure::Usage(
            "on hardware the kernel makes the connections; leave --policy and --audit out, or take another device"
                .into(),
        )),
    }
}
