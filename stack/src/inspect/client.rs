//! Fetching snapshots of processes on this machine.
//!
//! Owns the limits under which another process's answer is read.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{SCHEMA, Snapshot, place};
use crate::time::Duration;

/// Bytes of a snapshot that are read at most.
pub const SNAPSHOT_MAX: usize = 64 << 20;
/// How long a process may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one read may take.
const SLICE: Duration = Duration::from_secs(2);

/// Why a process's snapshot could not be had.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// Nobody serves the socket any more.
    #[error("its process is gone")]
    Gone,
    /// It is stopped, or hangs.
    #[error("its process does not answer")]
    Silent,
    /// The socket cannot be used.
    #[error("reading it: {0}")]
    Io(#[from] io::Error),
    /// It says too much, or for too long.
    #[error("its answer is too long, or takes too long")]
    TooMuch,
    /// What it says is no snapshot.
    #[error("its answer is no snapshot: {0}")]
    Malformed(#[from] serde_json::Error),
    /// It is of another version.
    #[error("its snapshot has version {0}, this program reads version {SCHEMA}")]
    Version(u32),
}

/// The sockets of this user's endpoints. Those that dead processes left are removed.
#[must_use]
pub fn find() -> Vec<PathBuf> {
    find_in(&place::candidates())
}

/// As [`find`], in these directories.
#[must_use]
pub fn find_in(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for dir in dirs.iter().filter(|dir| place::is_private(dir)) {
        for path in place::sockets(dir) {
            place::remove_if_left_over(&path);
        }
        all.extend(place::sockets(dir));
    }
    all.dedup();
    all
}

/// The snapshot that the process behind `path` makes now.
///
/// # Errors
/// [`InspectError`].
pub fn read(path: &Path) -> Result<Snapshot, InspectError> {
    let mut stream = place::connect(path).map_err(|e| match e.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => InspectError::Gone,
        io::ErrorKind::WouldBlock => InspectError::Silent,
        _ => e.into(),
    })?;
    stream.set_read_timeout(Some(SLICE))?;
    let (begin, mut text, mut buffer) = (Instant::now(), Vec::new(), vec![0; 1 << 16]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => text.extend_from_slice(buffer.get(..n).unwrap_or_default()),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(InspectError::Silent);
            }
            Err(e) => return Err(e.into()),
        }
        if text.len() > SNAPSHOT_MAX || begin.elapsed() > PATIENCE {
            return Err(InspectError::TooMuch);
        }
    }
    if text.is_empty() {
        // It went while we waited for our turn.
        return Err(InspectError::Gone);
    }
    #[derive(serde::Deserialize)]
    struct Version {
        schema: u32,
    }
    let Version { schema } = serde_json::from_slice(&text)?;
    if schema != SCHEMA {
        return Err(InspectError::Version(schema));
    }
    Ok(serde_json::from_slice(&text)?)
}
