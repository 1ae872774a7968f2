//! Work requests.

use super::AhHandle;
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
}

impl Operation {
    /// Whether the responder answers with data: READ and atomics.
    #[must_use]
    pub const fn is_read_or_atomic(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
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
