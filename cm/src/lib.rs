//! The InfiniBand connection manager: how two queue pairs find each other, agree and part.
//!
//! Owns the messages of connection management and the state of every communication. Never touches a frame or a QP's
//! inside: it speaks to a device through [`uroce::verbs::Verbs`] alone.

pub mod agent;
pub mod comm;
mod retry;
pub mod wire;

pub use agent::{Agent, CmEvent, Config};
pub use comm::{CommId, ListenerId};
pub use retry::RetryPolicy;
