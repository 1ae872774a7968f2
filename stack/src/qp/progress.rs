//! What a QP waits for: for people who ask why nothing moves.
//!
//! Owns the vocabulary only; the requester fills it in. Never influences what is sent.

use crate::time::Instant;

/// What the oldest work request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waiting {
    /// Nothing is posted, or everything is done.
    Nothing,
    /// An ACK of packets that were sent.
    Ack,
    /// The data of a READ, or the result of an atomic.
    Response,
    /// The peer had no receive posted: the time that its RNR NAK asked for is not over.
    RnrTimer,
    /// Its turn: it is posted, nothing is in flight, and nobody took it to the device yet.
    Turn,
}

/// Why the next work request does not follow those in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Behind {
    /// It is fenced behind a READ or atomic.
    Fence,
    /// As many READs and atomics are outstanding as the peer allows.
    ReadDepth,
    /// As many packets are unacknowledged as may be.
    Window,
    /// The peer advertises credits, and has no receive for it that is not promised to an earlier one.
    Credits,
    /// The QP is in SQD: nothing new is begun.
    Drain,
}

/// How far a send queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What the oldest work request waits for.
    pub waiting: Waiting,
    /// What keeps the next one back.
    pub behind: Option<Behind>,
    /// Since when the oldest unacknowledged packet waits; with nothing in flight, when the last one was acknowledged.
    /// `None` before the first.
    pub since: Option<Instant>,
    /// Work requests begun and not done.
    pub in_flight: usize,
    /// Transport retries used without progress.
    pub retries_used: u8,
    /// RNR retries used without progress.
    pub rnr_retries_used: u32,
}

impl Progress {
    /// Datagrams are done once they are sent.
    pub(super) const fn of_datagrams(posted: usize) -> Self {
        let waiting = if posted > 0 { Waiting::Turn } else { Waiting::Nothing };
        Self { waiting, behind: None, since: None, in_flight: 0, retries_used: 0, rnr_retries_used: 0 }
    }
}
