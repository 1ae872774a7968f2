//! Asynchronous events.

use super::{CqHandle, QpHandle, SrqHandle};
use crate::types::Gid;

/// Something that happened outside any work request. At most a fixed number wait; older ones are kept, newer ones of
/// the same kind and object are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// A completion arrived on an armed CQ.
    CqNotify(CqHandle),
    /// A CQ overran; its QPs went to ERR.
    CqError(CqHandle),
    /// A QP failed for a reason of its own.
    QpFatal(QpHandle),
    /// A peer's request was invalid.
    QpRequestError(QpHandle),
    /// A peer's request violated an access right.
    QpAccessError(QpHandle),
    /// The first packet arrived on a QP in RTR.
    CommunicationEstablished(QpHandle),
    /// A QP took its alternate path (PATH_MIG): the peer asked for it, its retries ran out, or the program did.
    PathMigrated(QpHandle),
    /// A peer asked an armed QP to migrate along a path that is not its alternate one (PATH_MIG_ERR). The QP did not.
    PathMigrationFailed(QpHandle),
    /// A send queue is drained (SQD).
    SendQueueDrained(QpHandle),
    /// The last receive of a QP on an SRQ, which went to ERR, is consumed.
    LastWqeReached(QpHandle),
    /// Fewer receives than the limit are left.
    SrqLimitReached(SrqHandle),
    /// An SRQ failed.
    SrqError(SrqHandle),
    /// A source sends to many QPs that do not exist or talk to somebody else, or with many wrong keys: it guesses, or has
    /// not noticed that we started anew.
    Probing(Gid),
    /// The device could not join this multicast group: the system refused. Nothing of it will arrive.
    MulticastJoinFailed(Gid),
    /// The port came up.
    PortActive,
    /// The port went down.
    PortError,
    /// The GID table changed.
    GidChange,
    /// The device is gone.
    DeviceFatal,
}
