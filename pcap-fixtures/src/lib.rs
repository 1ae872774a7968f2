//! Captures of Linux's soft-RoCE (`rdma_rxe`) and hand-made packets, for the tests of a RoCEv2 implementation.
//!
//! * [`all`] and [`by_name`] give the captures of `captures/`, each a [`Fixture`]: what it shows, how it was made, how
//!   many packets of which opcode it holds, and its [`Frame`]s.
//! * [`vectors`] holds four packets whose ICRC other implementations agree on.
//! * [`hostile`] makes packets that a correct endpoint must survive.
//! * [`reference_icrc`] is a slow ICRC that shares nothing with the one it is meant to check.
//!
//! This crate depends on no other crate of the workspace, so what it says about a packet is a second opinion.
//! It never parses beyond the IP and UDP headers: what a packet means is for the tests to find out.
//!
//! ```
//! let fixture = uroce_fixtures::by_name("rping_v4")?;
//! assert_eq!(fixture.opcode_counts["RC_READ_REQUEST"], 3);
//! for frame in fixture.frames()? {
//!     assert!(frame.direction().is_some());
//! }
//! # Ok::<(), uroce_fixtures::FixtureError>(())
//! ```

mod capture;
mod error;
mod fixture;
pub mod hostile;
mod icrc;
mod map;
pub mod vectors;

pub use capture::{Direction, Directions, Frame, Frames, NODE_1_MAC, NODE_2_MAC};
pub use error::FixtureError;
pub use fixture::{CmFact, CmMessage, FirstPsn, Fixture, Setup, all, by_name, with_tag};
pub use icrc::reference_icrc;
