//! Work requests.

use super::{AccessFlags, AhHandle, MrHandle, MwHandle};
use crate::ring::WqeHead;
use crate::types::{Imm, Lkey, QKey, Qpn, Rkey};

/// A piece of local memory: `length` bytes at wire address `addr` of the region that `lkey` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address in the region's iova space.
    pub addr: u64,
    /// Bytes, 0 to 2^31.
    pub length: u32,
    /// The region's local key.
    pub lkey: Lkey,
}

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// Address in the remote region's iova space.
    pub addr: u64,
    /// The remote region's key.
    pub rkey: Rkey,
}

/// How far a FLUSH takes the bytes, with the bits of the verbs (`enum ib_placement_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FlushPlacement {
    /// Every thread and device of the peer sees them.
    Global = 1,
    /// They survive the end of the peer's process and machine, as far as its memory does.
    Persistent = 2,
    /// Both.
    Both = 3,
}

/// What a FLUSH covers, with the numbers of the verbs (`enum ib_selectivity_level`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FlushScope {
    /// The range that the work request names.
    Range = 0,
    /// All that the key reaches; address and length say nothing.
    Region = 1,
}

/// A bind of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// The window.
    pub mw: MwHandle,
    /// The key that the window gets: its low 8 bits are the caller's choice, the rest is the window's.
    /// [`super::Verbs::bind_mw`] chooses them itself and looks at none of this.
    pub rkey: Rkey,
    /// The region below; needs [`AccessFlags::MW_BIND`]. `None` only with length 0.
    pub mr: Option<MrHandle>,
    /// The first byte, in the region's iova space.
    pub addr: u64,
    /// Bytes. 0 unbinds a type 1 window.
    pub length: u64,
    /// What a peer may do through the window; [`AccessFlags::ZERO_BASED`] for type 2.
    pub access: AccessFlags,
}

/// A fast registration: gives a region that [`super::Verbs::alloc_fast_mr`] made a key, rights and wire addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastRegister {
    /// The registration; it must be free: new, or invalidated.
    pub mr: MrHandle,
    /// Its key from then on, local and remote: the low 8 bits are the caller's choice, the rest is the region's.
    pub key: Rkey,
    /// First byte of the memory, counted from its beginning.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Wire address of the first byte; not looked at with [`AccessFlags::ZERO_BASED`].
    pub iova: u64,
    /// Rights.
    pub access: AccessFlags,
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// SEND.
    Send,
    /// SEND with immediate.
    SendImm(Imm),
    /// SEND that invalidates a remote key at the receiver.
    SendInvalidate(Rkey),
    /// RDMA WRITE.
    Write(Remote),
    /// RDMA WRITE with immediate; consumes a receive at the peer.
    WriteImm(Remote, Imm),
    /// RDMA READ into the local elements.
    Read(Remote),
    /// Compare and swap of 8 aligned bytes; the value before lands in the local element (8 bytes).
    CompareSwap {
        /// The 8 bytes.
        remote: Remote,
        /// Value that must be there.
        compare: u64,
        /// Value that is put there.
        swap: u64,
    },
    /// Fetch and add of 8 aligned bytes; the value before lands in the local element (8 bytes).
    FetchAdd {
        /// The 8 bytes.
        remote: Remote,
        /// What is added, modulo 2^64.
        add: u64,
    },
    /// ATOMIC WRITE: 8 local bytes appear at 8 aligned remote bytes at once, in the order of memory.
    AtomicWrite(Remote),
    /// FLUSH: completes when what this QP wrote before is where `placement` says. Takes no elements.
    Flush {
        /// Beginning of the range.
        remote: Remote,
        /// Bytes of the range, at most 2^31.
        length: u32,
        /// How far.
        placement: FlushPlacement,
        /// The range, or the whole region.
        scope: FlushScope,
    },
    /// Binds a memory window of type 2. Done here, in the order of the queue. Takes no elements.
    BindMw(MwBind),
    /// Takes a key of our own, of a window of type 2 or a fast registration, away from peers. Done here, once everything
    /// before it is complete. Takes no elements.
    LocalInvalidate(Rkey),
    /// Fast registration (`REG_MR` in Linux). Done here, in the order of the queue. Takes no elements.
    FastRegister(FastRegister),
}

impl Operation {
    /// Whether the responder answers with data: READ and atomics.
    #[must_use]
    pub const fn is_read_or_atomic(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Whether the responder gives an answer of its own, not just an acknowledgement: READ, atomics, ATOMIC WRITE and
    /// FLUSH. These count against `max_rd_atomic`.
    #[must_use]
    pub const fn awaits_response(&self) -> bool {
        self.is_read_or_atomic() || matches!(self, Self::AtomicWrite(_) | Self::Flush { .. })
    }

    /// Whether it is done on this side alone: binds, local invalidation, fast registration.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::BindMw(_) | Self::LocalInvalidate(_) | Self::FastRegister(_))
    }

    /// Whether it is a compare-and-swap or fetch-and-add.
    #[must_use]
    pub const fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }
}

/// Where the bytes of a work request are.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// In registered memory.
    Sges(&'a [Sge]),
    /// Here: copied at post, needs no registration and may be reused at once. Not for READ and atomics.
    Inline(&'a [u8]),
}

/// Modifiers of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SendFlags {
    /// Make a completion also on success (implied by a QP that signals all).
    pub signaled: bool,
    /// Set the solicited event bit.
    pub solicited: bool,
    /// Wait for all earlier READs and atomics.
    pub fence: bool,
}

impl SendFlags {
    /// Only a completion.
    pub const SIGNALED: Self = Self { signaled: true, solicited: false, fence: false };
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDestination {
    /// Path.
    pub ah: AhHandle,
    /// QP there.
    pub qpn: Qpn,
    /// Its queue key; with bit 31 set the sending QP's own key is used instead.
    pub qkey: QKey,
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// Its bytes: at most the QP's `max_send_sge` elements or `max_inline` bytes.
    pub payload: Payload<'a>,
    /// Modifiers.
    pub flags: SendFlags,
    /// For UD QPs only, and needed there.
    pub destination: Option<UdDestination>,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where the message lands: at most the queue's `max_sge` elements.
    pub sges: &'a [Sge],
}

/// A send work request as it stands in the ring, its elements and inline bytes beside it.
#[derive(Clone, Copy, Debug)]
pub struct SendHead {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// Modifiers.
    pub flags: SendFlags,
    /// Destination of a datagram.
    pub destination: Option<UdDestination>,
    /// Elements that follow.
    pub num_sge: u8,
    /// Inline bytes that follow.
    pub inline: u16,
    /// Bytes of the message, summed at post.
    pub length: u32,
}

impl WqeHead for SendHead {
    fn sges(&self) -> usize {
        self.num_sge.into()
    }

    fn inline_len(&self) -> usize {
        self.inline.into()
    }
}

/// A receive work request as it stands in the ring.
#[derive(Clone, Copy, Debug)]
pub struct RecvHead {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Elements that follow.
    pub num_sge: u8,
    /// Room in bytes, summed at post.
    pub length: u32,
}

impl WqeHead for RecvHead {
    fn sges(&self) -> usize {
        self.num_sge.into()
    }

    fn inline_len(&self) -> usize {
        0
    }
}
