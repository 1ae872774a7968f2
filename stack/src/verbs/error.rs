//! Errors that go to the caller, at the call.

use super::state::{Attr, QpState};

/// A verb was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// The handle names nothing, or something that was destroyed.
    #[error("the handle names no live object")]
    InvalidHandle,
    /// The object is in use by another.
    #[error("the object is still in use")]
    Busy,
    /// As many objects as the device allows.
    #[error("limit reached: at most {limit} {what}")]
    LimitReached {
        /// Kind of object.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A capability beyond the device's limits.
    #[error("{field} = {value} is not between {min} and {max}")]
    InvalidCapability {
        /// The field.
        field: &'static str,
        /// What was asked for.
        value: u64,
        /// Least value.
        min: u64,
        /// Greatest value.
        max: u64,
    },
    /// Remote write or remote atomic without local write.
    #[error("remote write and remote atomic access need local write access")]
    InvalidAccess,
    /// FLUSH to persistence on memory that does not persist.
    #[error("FLUSH to persistence needs a region over a mapped file")]
    NotPersistent,
    /// The region's addresses would pass 2^64.
    #[error("iova plus length passes the end of the address space")]
    AddressWrap,
    /// The GID index is outside the table.
    #[error("GID index {index} is outside a table of {len}")]
    InvalidGidIndex {
        /// Asked for.
        index: usize,
        /// Entries.
        len: usize,
    },
    /// The P_Key index is outside the table, or its entry names no partition.
    #[error("P_Key index {index} names no partition in a table of {len}")]
    InvalidPKeyIndex {
        /// Asked for.
        index: usize,
        /// Entries.
        len: usize,
    },
    /// The system does not let the device join the group.
    #[error("the system refuses to join this multicast group")]
    JoinRefused,
    /// A multicast call with an address that is not multicast, or a QP that is not UD.
    #[error("not a multicast GID on a UD QP")]
    NotMulticast,
    /// A QP could not be modified.
    #[error(transparent)]
    Modify(#[from] ModifyError),
    /// Hardware or its driver refused, with an error number of the system.
    #[error("{call}: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// Function of the driver's library.
        call: &'static str,
        /// Its answer.
        errno: i32,
    },
    /// Not offered by this device.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// The device is gone.
    #[error("the device is gone")]
    DeviceGone,
}

/// Why a QP was not modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// The state table has no such edge.
    #[error("no transition from {from:?} to {to:?}")]
    NoTransition {
        /// State now.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// `cur_state` is not the QP's state, or not one that may be named.
    #[error("cur_state {named:?} is not the state of the QP, {actual:?}")]
    WrongCurrentState {
        /// Named by the caller.
        named: QpState,
        /// The QP's.
        actual: QpState,
    },
    /// A required attribute is missing.
    #[error("attribute {attr:?} is required from {from:?} to {to:?}")]
    Missing {
        /// The attribute.
        attr: Attr,
        /// State now.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// An attribute that this transition does not take.
    #[error("attribute {attr:?} is not allowed from {from:?} to {to:?}")]
    NotAllowed {
        /// The attribute.
        attr: Attr,
        /// State now.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// An attribute with a value that the device cannot take.
    #[error("attribute {attr:?} has a value out of range")]
    OutOfRange {
        /// The attribute.
        attr: Attr,
    },
    /// Not offered (alternate paths).
    #[error("attribute {attr:?} is not supported")]
    Unsupported {
        /// The attribute.
        attr: Attr,
    },
}

/// Why a work request was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The handle names nothing.
    #[error("the handle names no live object")]
    InvalidHandle,
    /// The QP is not in a state that takes it.
    #[error("the QP is in state {0:?}")]
    WrongState(QpState),
    /// As many outstanding work requests as the queue was made for.
    #[error("the queue is full")]
    QueueFull,
    /// More elements than the queue was made for.
    #[error("{given} elements, at most {max}")]
    TooManySges {
        /// Given.
        given: usize,
        /// Allowed.
        max: usize,
    },
    /// More inline bytes than the queue was made for.
    #[error("{given} inline bytes, at most {max}")]
    InlineTooLong {
        /// Given.
        given: usize,
        /// Allowed.
        max: usize,
    },
    /// Inline data with a READ or atomic.
    #[error("this operation cannot take inline data")]
    InlineNotAllowed,
    /// The message is longer than the transport allows.
    #[error("a message of {len} bytes, at most {max}")]
    MessageTooLong {
        /// Sum of the elements.
        len: u64,
        /// Limit: 2^31, or the path MTU for UD.
        max: u64,
    },
    /// An operation that the QP's transport does not have.
    #[error("the transport of this QP does not have this operation")]
    WrongOperation,
    /// READ, atomic, ATOMIC WRITE or FLUSH on a QP whose `max_rd_atomic` is 0.
    #[error("READ, atomics, ATOMIC WRITE and FLUSH need max_rd_atomic of at least 1")]
    NoReadDepth,
    /// An atomic, and ATOMIC WRITE, needs exactly 8 local bytes.
    #[error("an atomic takes 8 local bytes, given {0}")]
    AtomicLength(u32),
    /// A remote atomic address that is not a multiple of 8.
    #[error("the remote address of an atomic must be a multiple of 8")]
    AtomicAlignment,
    /// A datagram without destination, or a destination on a connected QP.
    #[error("a destination is needed on UD QPs and on no other")]
    Destination,
    /// Elements or inline data on a FLUSH, a bind, an invalidation or a fast registration.
    #[error("this operation takes no payload")]
    PayloadNotAllowed,
    /// A window of type 2 where one of type 1 is needed.
    #[error("bind_mw is for windows of type 1; type 2 is bound by a work request")]
    WindowType,
    /// Not offered by this device.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// Hardware or its driver refused, with an error number of the system.
    #[error("the device refused it: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// Its answer.
        errno: i32,
    },
    /// Receives of a QP with an SRQ are posted to the SRQ.
    #[error("this QP receives from an SRQ")]
    HasSrq,
}

/// The first work request of a list that was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("work request {index}: {error}")]
pub struct PostListError {
    /// Position in the list; those before it are queued.
    pub index: usize,
    /// Why.
    pub error: PostError,
}
