//! Exit codes, and which error becomes which.
//!
//! Owns the mapping from errors to the process's answer. Never prints.

use std::io;
use std::process::ExitCode;

use uroce::device::DeviceError;

use crate::ports;

/// Why a command did not do its job. The variant is the exit code, the text is for people.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The job was tried and did not succeed: a transport error, a wrong byte, a peer that refuses. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// The command line asks for something that cannot be. Exit code 2, as clap's own errors.
    #[error("{0}")]
    Usage(String),
    /// A limit that the user set was missed. Exit code 3.
    #[error("{0}")]
    Limit(String),
    /// The machine lacks something: a capability, an address, a free port. Exit code 4; the text names the fix.
    #[error("{0}")]
    Environment(String),
    /// A signal came before the job was done; peers are told first. Exit code 1.
    #[error("ended by {0} before it was done")]
    Stopped(&'static str),
    /// Whoever read our output went away. Exit code 0: `uroce dump … | head` is no failure.
    #[error("the reader of the output is gone")]
    OutputClosed,
}

impl Failure {
    /// A failure of the job itself.
    pub(crate) fn failed(what: impl ToString) -> Self {
        Self::Failed(what.to_string())
    }

    /// The number for the shell.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::OutputClosed => 0,
            Self::Failed(_) | Self::Stopped(_) => 1,
            Self::Usage(_) => 2,
            Self::Limit(_) => 3,
            Self::Environment(_) => 4,
        }
    }
}

impl From<&Failure> for ExitCode {
    fn from(failure: &Failure) -> Self {
        Self::from(failure.code())
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Closed => Self::Failed(error.to_string()),
            DeviceError::PortInUse { address } => {
                let holder = ports::holder(address).map_or(String::new(), |h| format!("; it is {}", h.who));
                Self::Environment(format!("{error}{holder}"))
            }
            // Everything else says that a device cannot be opened here, with the fix in its text.
            other => Self::Environment(other.to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::OutputClosed } else { Self::Failed(error.to_string()) }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        io::Error::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_opened_is_the_environments_fault() {
        let error = DeviceError::NoInterface { name: "nope0".into() };
        let failure = Failure::from(error);
        assert_eq!(failure.code(), 4);
        assert!(failure.to_string().contains("nope0"), "{failure}");
        assert_eq!(Failure::from(DeviceError::Closed).code(), 1);
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).code(), 0);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::NotFound)).code(), 1);
    }
}
