//! SIGINT and SIGTERM, for commands that have peers to part from.
//!
//! Owns the flag that the first signal raises. The second ends the process at once. Never ends anything itself.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::exit::Failure;

/// What a shell says of a process that a signal has ended, less the signal's number.
const BY_SIGNAL: i32 = 128;

/// The signal that came, or 0. Empty until somebody wants to know.
static ASKED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// From here on the first signal is for [`check`] to find.
pub(crate) fn install() -> Result<(), Failure> {
    if ASKED.get().is_some() {
        return Ok(());
    }
    let asked = ASKED.get_or_init(Arc::default);
    let again = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds that none has come before.
        signal_hook::flag::register_conditional_shutdown(signal, BY_SIGNAL + signal, Arc::clone(&again))?;
        signal_hook::flag::register(signal, Arc::clone(&again))?;
        let number = usize::try_from(signal).unwrap_or(0);
        signal_hook::flag::register_usize(signal, Arc::clone(asked), number)?;
    }
    Ok(())
}

/// [`Failure::Stopped`] once a signal has come.
pub(crate) fn check() -> Result<(), Failure> {
    match ASKED.get().map_or(0, |asked| asked.load(Ordering::Relaxed)) {
        0 => Ok(()),
        signal if i32::try_from(signal) == Ok(SIGINT) => Err(Failure::Stopped("SIGINT")),
        _ => Err(Failure::Stopped("SIGTERM")),
    }
}

/// Whether a signal has come.
pub(crate) fn has_come() -> bool {
    check().is_err()
}
