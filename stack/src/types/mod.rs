//! Typed numbers of the InfiniBand architecture.
//!
//! Owns the value types that every layer speaks: packet sequence numbers, queue pair numbers, keys, GIDs and the coded
//! timers. Never does arithmetic that belongs to a protocol step.

mod gid;
mod ids;
mod path;
mod psn;

pub use gid::{Gid, MacAddr};
pub use ids::{Imm, Lkey, Msn, PKey, QKey, Qpn, Rkey};
pub use path::{AckTimeout, PathMtu, RetryCount, RnrRetry, RnrTimer};
pub use psn::{Psn, PsnClass};
