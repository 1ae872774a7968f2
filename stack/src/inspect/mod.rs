//! Looking at an endpoint from outside its process, while it runs.
//!
//! Owns the [`Snapshot`] and how it travels: an [`Inspector`] serves it on a Unix socket of its own thread, [`read()`]
//! fetches it, [`find`] lists the sockets of this machine. A snapshot is taken a few objects at a time between rounds of
//! the engine, so that serving it does not stop the data path. Never changes an endpoint, and never tells what memory
//! holds.
//!
//! The protocol: whoever connects is sent one JSON document and the end of the stream. What the client sends is not
//! read. Who does not read in time is hung up on.

mod client;
mod collect;
mod place;
mod server;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use client::{InspectError, SNAPSHOT_MAX, find, find_in, read};
pub use server::{Inspector, PATIENCE, SNAPSHOT_PAUSE, Section};

use crate::endpoint::{CqReport, DeviceReport, MrReport, QpReport, SrqReport};

/// Version of the snapshot. A field may be added under the same number; one that goes or changes its meaning raises it.
pub const SCHEMA: u32 = 1;
/// Objects of one kind that a snapshot lists at most; [`Snapshot::truncated`] says that there are more.
pub const OBJECTS_MAX: usize = 16_384;

/// A process's endpoint at one moment, as far as it can be taken at one moment: objects are listed a few at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Process.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Device and port.
    pub device: DeviceReport,
    /// Packets that the device took and could not send.
    pub lost_transmit: u64,
    /// Packets that arrived and found no room in the device.
    pub lost_receive: u64,
    /// Queue pairs.
    pub qps: Vec<QpReport>,
    /// Completion queues.
    pub cqs: Vec<CqReport>,
    /// Memory regions.
    pub mrs: Vec<MrReport>,
    /// Shared receive queues.
    pub srqs: Vec<SrqReport>,
    /// Numbers of protection domains.
    pub pds: Vec<u32>,
    /// There are more objects of a kind than [`OBJECTS_MAX`].
    pub truncated: bool,
    /// What others add, such as the connection manager's ids.
    pub sections: BTreeMap<String, serde_json::Value>,
}
