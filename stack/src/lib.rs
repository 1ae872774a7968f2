//! A software RoCEv2 endpoint: the InfiniBand transport over UDP 4791, in user space.
//!
//! The crate owns everything between a frame and a completion: the wire format, memory regions, queue pairs and the
//! devices that move frames. It knows nothing of connection management (crate `uroce-cm`).
//!
//! Modules stand in groups. A module uses only modules of a strictly earlier group; a test holds that rule.

// 0 values
pub mod counters;
pub mod lock;
pub mod raw;
pub mod ring;
pub mod rng;
pub mod table;
pub mod time;
pub mod types;

// 1 vocabulary
pub mod verbs;
pub mod wire;

// 2 resources
pub mod burst;
pub mod cq;
pub mod mem;
pub mod neighbor;
pub mod srq;

// 3 protocol
pub mod qp;

// 4 edges
pub mod device;
pub mod endpoint;

// 5 drivers
pub mod engine;
#[cfg(feature = "hw")]
pub mod hw;
pub mod sim;

// 6 drivers over a driver
pub mod host;

// 7 windows into a driver
pub mod inspect;
