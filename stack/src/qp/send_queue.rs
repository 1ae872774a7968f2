//! The engine's half of a send queue: work requests in flight, with their elements and inline bytes.
//!
//! Owns storage only, all of it allocated with the QP. Which packet goes next is the requester's business.

use std::collections::VecDeque;

use crate::mem::{MrTable, SgeError};
use crate::raw::copy;
use crate::ring::WqeConsumer;
use crate::types::{PathMtu, Psn};
use crate::verbs::{FailureKind, Operation, PdHandle, SendHead, Sge, WcOpcode, WcStatus};

/// A send work request in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wqe {
    pub(crate) head: SendHead,
    slot: usize,
    /// Its first PSN.
    pub(crate) first: Psn,
    /// Bytes of all work requests before it, since the QP was made.
    begin: u64,
    /// The PSNs it takes; a local operation takes none.
    pub(crate) packets: u32,
    /// A local operation that was carried out: going back over it does not repeat it.
    pub(crate) executed: bool,
    /// It cannot be sent: it fails as soon as everything before it is done.
    pub(crate) poisoned: Option<(WcStatus, FailureKind)>,
}

impl Wqe {
    /// One beyond its last PSN.
    pub(crate) fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Bytes before `psn`, one of its PSNs or the one beyond, since the QP was made.
    #[inline]
    pub(crate) fn position(&self, psn: Psn, mtu: usize) -> u64 {
        let index = psn.distance_from(self.first).max(0).unsigned_abs();
        self.begin + (u64::from(index) * mtu as u64).min(self.head.length.into())
    }

    pub(crate) fn opcode(&self) -> WcOpcode {
        wc_opcode(&self.head.operation)
    }
}

/// The completion opcode of an operation.
pub(crate) const fn wc_opcode(op: &Operation) -> WcOpcode {
    match op {
        Operation::Send | Operation::SendImm(_) | Operation::SendInvalidate(_) => WcOpcode::Send,
        Operation::Write(_) | Operation::WriteImm(..) => WcOpcode::RdmaWrite,
        Operation::Read(_) => WcOpcode::RdmaRead,
        Operation::CompareSwap { .. } => WcOpcode::CompareSwap,
        Operation::FetchAdd { .. } => WcOpcode::FetchAdd,
        Operation::AtomicWrite(_) => WcOpcode::AtomicWrite,
        Operation::Flush { .. } => WcOpcode::Flush,
        Operation::BindMw(_) => WcOpcode::BindMw,
        Operation::LocalInvalidate(_) => WcOpcode::LocalInvalidate,
        Operation::FastRegister(_) => WcOpcode::FastRegister,
    }
}

/// The send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    ring: WqeConsumer<SendHead, Sge>,
    window: VecDeque<Wqe>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    next_slot: usize,
    /// Bytes of all work requests that were pulled.
    pulled: u64,
}

impl SendQueue {
    pub(crate) fn new(ring: WqeConsumer<SendHead, Sge>) -> Self {
        let size = ring.size();
        Self {
            window: VecDeque::with_capacity(size.requests),
            sges: vec![Sge::default(); size.requests * size.sges],
            inline: vec![0; size.requests * size.inline],
            next_slot: 0,
            pulled: 0,
            ring,
        }
    }

    /// Forgets everything. Nobody may post meanwhile.
    pub(super) fn clear(&mut self) {
        self.window.clear();
        self.ring.clear();
        self.next_slot = 0;
    }

    /// Takes the next posted work request into flight, its PSNs beginning with `first`: the last of the window then.
    pub(crate) fn pull(&mut self, first: Psn, mtu: PathMtu) -> Option<&Wqe> {
        let size = self.ring.size();
        let slot = self.next_slot;
        let sges = self.sges.get_mut(slot * size.sges..(slot + 1) * size.sges)?;
        let inline = self.inline.get_mut(slot * size.inline..(slot + 1) * size.inline)?;
        let head = self.ring.pop(sges, inline)?;
        self.next_slot = (slot + 1) % size.requests;
        let packets = match &head.operation {
            op if op.is_local() => 0,
            op if op.is_atomic() => 1,
            _ => mtu.packets_for(head.length),
        };
        let begin = self.pulled;
        self.pulled += if packets > 0 { u64::from(head.length) } else { 0 };
        let wqe = Wqe { head, slot, first, begin, packets, executed: false, poisoned: None };
        self.window.push_back(wqe);
        self.window.back()
    }

    /// Bytes of all work requests taken into flight, since the QP was made.
    pub(crate) fn pulled(&self) -> u64 {
        self.pulled
    }

    /// Work requests in flight, oldest first.
    pub(crate) fn window(&self) -> &VecDeque<Wqe> {
        &self.window
    }

    /// The work request at `index`, a local operation, was carried out.
    pub(crate) fn mark_executed(&mut self, index: usize) {
        if let Some(wqe) = self.window.get_mut(index) {
            wqe.executed = true;
        }
    }

    pub(crate) fn poison(&mut self, index: usize, status: WcStatus, kind: FailureKind) {
        if let Some(wqe) = self.window.get_mut(index) {
            wqe.poisoned.get_or_insert((status, kind));
        }
    }

    /// The oldest work request is done: its place is free.
    pub(crate) fn pop(&mut self) -> Option<Wqe> {
        let wqe = self.window.pop_front()?;
        self.ring.release(1);
        Some(wqe)
    }

    /// Takes a posted work request that was never begun, and is done with it.
    pub(crate) fn discard(&mut self) -> Option<SendHead> {
        let size = self.ring.size();
        let slot = self.next_slot;
        // A slot of this index is free: `outstanding` never exceeds the number of slots.
        let sges = self.sges.get_mut(slot * size.sges..(slot + 1) * size.sges)?;
        let inline = self.inline.get_mut(slot * size.inline..(slot + 1) * size.inline)?;
        let head = self.ring.pop(sges, inline)?;
        self.ring.release(1);
        Some(head)
    }

    /// Work requests posted and not done.
    pub(crate) fn outstanding(&self) -> usize {
        self.window.len() + self.ring.len()
    }

    pub(crate) fn sges_of(&self, wqe: &Wqe) -> &[Sge] {
        let from = wqe.slot * self.ring.size().sges;
        self.sges.get(from..from + usize::from(wqe.head.num_sge)).unwrap_or(&[])
    }

    /// Copies payload bytes of `wqe` from `offset` on, and goes on from `crc` with the CRC-32 of what was copied.
    pub(crate) fn gather(
        &self,
        mrs: &MrTable,
        pd: PdHandle,
        wqe: &Wqe,
        offset: u64,
        out: &mut [u8],
        crc: u32,
    ) -> Result<u32, SgeError> {
        if wqe.head.inline == 0 {
            return mrs.gather_crc(pd, self.sges_of(wqe), offset, out, crc);
        }
        let from = wqe.slot * self.ring.size().inline + usize::try_from(offset).map_err(|_| SgeError::TooShort)?;
        let bytes = self.inline.get(from..from + out.len()).ok_or(SgeError::TooShort)?;
        Ok(copy::copy_crc(crc, bytes, out))
    }
}
