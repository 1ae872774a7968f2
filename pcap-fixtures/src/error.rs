//! Why a fixture could not be read.

use std::path::PathBuf;

/// Why a fixture could not be read: every variant is a fault of the tree or of the caller, never of a peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FixtureError {
    /// No capture of the index has this name.
    #[error("no capture is called {0:?}")]
    Unknown(String),
    /// The capture file could not be opened or mapped.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The capture file is not a pcap file, or ends in the middle of a record.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What the pcap reader said.
        source: pcap_file::PcapError,
    },
    /// The capture does not hold Ethernet frames.
    #[error("{}: not a capture of Ethernet frames", path.display())]
    NotEthernet {
        /// The file.
        path: PathBuf,
    },
    /// A frame was cut when it was captured.
    #[error("{}: frame {index} was not captured whole", path.display())]
    Cut {
        /// The file.
        path: PathBuf,
        /// Which frame, from 0.
        index: usize,
    },
    /// A frame comes from neither node, so it has no direction.
    #[error("{name}: frame {index} comes from neither node")]
    Stranger {
        /// The capture.
        name: String,
        /// Which frame, from 0.
        index: usize,
    },
}
