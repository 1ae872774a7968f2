//! The calls of the fast path: inline functions of the C header, which go through the context's table.

use core::ffi::c_int;
use core::mem::transmute;
use core::ptr;

use super::object::{Cq, Qp, Srq};
use super::status;
use crate::hw::abi;
use crate::hw::error::Errno;
use crate::verbs::{Payload, RecvWr, Sge};

type PollCq = unsafe extern "C" fn(*mut abi::Cq, c_int, *mut abi::Wc) -> c_int;
type ReqNotify = unsafe extern "C" fn(*mut abi::Cq, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut abi::Qp, *mut abi::SendWr, *mut *mut abi::SendWr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut abi::Qp, *mut abi::RecvWr, *mut *mut abi::RecvWr) -> c_int;
type PostSrqRecv = unsafe extern "C" fn(*mut abi::Srq, *mut abi::RecvWr, *mut *mut abi::RecvWr) -> c_int;

/// An entry of a context's table; a driver may leave one empty.
fn op(table: &[*const abi::Opaque; abi::OPS], index: usize) -> Result<*const abi::Opaque, Errno> {
    table.get(index).copied().filter(|op| !op.is_null()).ok_or(Errno(libc::EOPNOTSUPP))
}

impl Cq {
    /// Takes completions into `out`; returns how many.
    pub(in crate::hw) fn poll(&self, out: &mut [abi::Wc]) -> Result<usize, Errno> {
        // SAFETY: the ABI has a function of this type at this place of the table.
        let poll: PollCq = unsafe { transmute(op(self.table(), abi::OP_POLL_CQ)?) };
        let room = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: a live CQ and an array of at least `room` entries.
        let n = unsafe { poll(self.ptr.as_ptr(), room, out.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| Errno(n.saturating_abs()))
    }

    /// Asks for one event.
    pub(in crate::hw) fn req_notify(&self, solicited_only: bool) -> Result<(), Errno> {
        // SAFETY: the ABI has a function of this type at this place of the table.
        let arm: ReqNotify = unsafe { transmute(op(self.table(), abi::OP_REQ_NOTIFY_CQ)?) };
        // SAFETY: a live CQ.
        status(unsafe { arm(self.ptr.as_ptr(), solicited_only.into()) })
    }
}

/// Room to chain work requests in, used again for each post, so that none allocates once it has grown.
#[derive(Default)]
pub(in crate::hw) struct Chain {
    sends: Vec<abi::SendWr>,
    recvs: Vec<abi::RecvWr>,
    sges: Vec<abi::Sge>,
}

// SAFETY: the pointers in its structures are made and used within one call, and stale between calls.
unsafe impl Send for Chain {}
// SAFETY: as above; a shared reference gives access to nothing.
unsafe impl Sync for Chain {}

/// The first of a list that was not taken, and why.
pub(in crate::hw) type Refused = (usize, Errno);

impl Chain {
    fn push_sends<'a>(&mut self, list: impl Iterator<Item = (abi::SendWr, Payload<'a>)>) {
        self.sends.clear();
        self.sges.clear();
        for (mut wr, payload) in list {
            wr.num_sge = match payload {
                Payload::Sges(sges) => self.push_sges(sges),
                Payload::Inline(bytes) => {
                    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                    self.sges.push(abi::Sge { addr: bytes.as_ptr().expose_provenance() as u64, length, lkey: 0 });
                    1
                }
            };
            self.sends.push(wr);
        }
        // No vector grows any more, so addresses stand.
        let (base, mut sges, mut rest) = (self.sends.as_mut_ptr(), self.sges.as_mut_ptr(), self.sends.len());
        for (index, wr) in self.sends.iter_mut().enumerate() {
            rest -= 1;
            wr.sg_list = sges;
            sges = sges.wrapping_add(usize::try_from(wr.num_sge).unwrap_or(0));
            wr.next = if rest > 0 { base.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
    }

    fn push_recvs(&mut self, list: &[RecvWr<'_>]) {
        self.recvs.clear();
        self.sges.clear();
        for wr in list {
            let num_sge = self.push_sges(wr.sges);
            let (next, sg_list) = (ptr::null_mut(), ptr::null_mut());
            self.recvs.push(abi::RecvWr { wr_id: wr.wr_id, next, sg_list, num_sge });
        }
        let (base, mut sges, mut rest) = (self.recvs.as_mut_ptr(), self.sges.as_mut_ptr(), self.recvs.len());
        for (index, wr) in self.recvs.iter_mut().enumerate() {
            rest -= 1;
            wr.sg_list = sges;
            sges = sges.wrapping_add(usize::try_from(wr.num_sge).unwrap_or(0));
            wr.next = if rest > 0 { base.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
    }

    fn push_sges(&mut self, sges: &[Sge]) -> c_int {
        self.sges.extend(sges.iter().map(|s| abi::Sge { addr: s.addr, length: s.length, lkey: s.lkey.get() }));
        c_int::try_from(sges.len()).unwrap_or(0)
    }
}

/// Where `bad` stands in the list that begins at `base`.
fn index_of<T>(bad: *mut T, base: *mut T) -> usize {
    bad.addr().saturating_sub(base.addr()) / size_of::<T>()
}

impl Qp {
    /// Posts sends, each with its payload. An address handle that one names must be alive.
    pub(in crate::hw) fn post_send<'a>(
        &self,
        chain: &mut Chain,
        list: impl Iterator<Item = (abi::SendWr, Payload<'a>)>,
    ) -> Result<(), Refused> {
        chain.push_sends(list);
        if chain.sends.is_empty() {
            return Ok(());
        }
        let base = chain.sends.as_mut_ptr();
        let mut bad = base;
        let post = op(self.table(), abi::OP_POST_SEND).map_err(|e| (0, e))?;
        // SAFETY: the ABI has a function of this type at this place of the table.
        let post: PostSend = unsafe { transmute(post) };
        // SAFETY: a live QP; the list, its elements and its inline bytes outlive the call. What an element of registered
        // memory names is checked by the device.
        let rc = unsafe { post(self.ptr.as_ptr(), base, &raw mut bad) };
        status(rc).map_err(|e| (index_of(bad, base), e))
    }

    /// Posts receives.
    pub(in crate::hw) fn post_recv(&self, chain: &mut Chain, list: &[RecvWr<'_>]) -> Result<(), Refused> {
        chain.push_recvs(list);
        if chain.recvs.is_empty() {
            return Ok(());
        }
        let base = chain.recvs.as_mut_ptr();
        let mut bad = base;
        let post = op(self.table(), abi::OP_POST_RECV).map_err(|e| (0, e))?;
        // SAFETY: the ABI has a function of this type at this place of the table.
        let post: PostRecv = unsafe { transmute(post) };
        // SAFETY: a live QP; the list and its elements outlive the call.
        let rc = unsafe { post(self.ptr.as_ptr(), base, &raw mut bad) };
        status(rc).map_err(|e| (index_of(bad, base), e))
    }
}

impl Srq {
    /// Posts receives.
    pub(in crate::hw) fn post_recv(&self, chain: &mut Chain, list: &[RecvWr<'_>]) -> Result<(), Refused> {
        chain.push_recvs(list);
        if chain.recvs.is_empty() {
            return Ok(());
        }
        let base = chain.recvs.as_mut_ptr();
        let mut bad = base;
        let post = op(self.table(), abi::OP_POST_SRQ_RECV).map_err(|e| (0, e))?;
        // SAFETY: the ABI has a function of this type at this place of the table.
        let post: PostSrqRecv = unsafe { transmute(post) };
        // SAFETY: a live queue; the list and its elements outlive the call.
        let rc = unsafe { post(self.ptr.as_ptr(), base, &raw mut bad) };
        status(rc).map_err(|e| (index_of(bad, base), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Lkey;

    fn sge(addr: u64) -> Sge {
        Sge { addr, length: 4, lkey: Lkey::new(7) }
    }

    #[test]
    fn sends_are_chained_with_their_elements() {
        let mut chain = Chain::default();
        let (two, one) = ([sge(0x10), sge(0x20)], [sge(0x30)]);
        let bytes = *b"inline";
        let list = [Payload::Sges(&two), Payload::Sges(&[]), Payload::Inline(&bytes), Payload::Sges(&one)];
        let wr = |id| abi::SendWr::new(id, 2, 0, 0, abi::Target::default());
        for _ in 0..2 {
            chain.push_sends(list.iter().enumerate().map(|(i, p)| (wr(i as u64), *p)));
        }
        let counts: Vec<c_int> = chain.sends.iter().map(|w| w.num_sge).collect();
        assert_eq!(counts, [2, 0, 1, 1]);
        let (base, sges) = (chain.sends.as_ptr(), chain.sges.as_ptr());
        let places: Vec<usize> = chain.sends.iter().map(|w| (w.sg_list.addr() - sges.addr()) / 16).collect();
        assert_eq!(places, [0, 2, 2, 3]);
        assert_eq!(chain.sges.iter().map(|s| s.addr).nth(2), Some(bytes.as_ptr().addr() as u64));
        let next: Vec<usize> = chain.sends.iter().map(|w| w.next.addr().saturating_sub(base.addr()) / 128).collect();
        assert_eq!(next, [1, 2, 3, 0]);
        assert!(chain.sends.last().unwrap().next.is_null());
        assert_eq!(index_of(base.wrapping_add(2).cast_mut(), base.cast_mut()), 2);
    }

    #[test]
    fn receives_are_chained_with_their_elements() {
        let mut chain = Chain::default();
        let two = [sge(0x10), sge(0x20)];
        chain.push_recvs(&[RecvWr { wr_id: 1, sges: &two }, RecvWr { wr_id: 2, sges: &two[..1] }]);
        assert_eq!(chain.recvs.iter().map(|w| (w.wr_id, w.num_sge)).collect::<Vec<_>>(), [(1, 2), (2, 1)]);
        assert_eq!(chain.recvs[0].next.addr(), (&raw const chain.recvs[1]).addr());
        assert_eq!(chain.recvs[1].sg_list.addr(), (&raw const chain.sges[2]).addr());
        assert!(chain.recvs[1].next.is_null());
    }

    #[test]
    fn an_empty_entry_of_the_table_is_not_called() {
        assert_eq!(op(&[ptr::null(); abi::OPS], abi::OP_POST_SEND), Err(Errno(libc::EOPNOTSUPP)));
    }
}
