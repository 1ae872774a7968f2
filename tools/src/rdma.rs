//! Short-hands over the verbs: buffers, waiting for completions, and failures in words.
//!
//! Owns no protocol. Every call goes through the trait `Verbs`, and polling an empty CQ is what drives the endpoint.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use uroce::raw::{Region, RegionError};
use uroce::types::{Psn, Qpn};
use uroce::verbs::{
    AccessFlags, CqHandle, MemoryRegion, PdHandle, PostListError, QpHandle, Remote, Sge, Verbs, VerbsError, WcData,
    WcOpcode, WcStatus, WorkCompletion,
};

use crate::exit::Failure;
use crate::node::Handle;
use crate::stop;

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        Self::failed(error)
    }
}

impl From<PostListError> for Failure {
    fn from(error: PostListError) -> Self {
        Self::failed(error)
    }
}

impl From<RegionError> for Failure {
    fn from(error: RegionError) -> Self {
        Self::failed(error)
    }
}

/// Registered memory of this process.
pub(crate) struct Buffer {
    region: Region,
    mr: MemoryRegion,
}

impl Buffer {
    /// `len` zeroed bytes, registered with `access` in `pd`.
    pub(crate) fn new(v: &mut dyn Verbs, pd: PdHandle, len: usize, access: AccessFlags) -> Result<Self, Failure> {
        let region = Region::alloc(len)?;
        let mr = v.register(pd, &region, access, None)?;
        Ok(Self { region, mr })
    }

    /// `len` bytes from `offset` as an element of a work request.
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        let length = u32::try_from(len).unwrap_or(u32::MAX);
        Sge { addr: self.mr.iova.wrapping_add(offset as u64), length, lkey: self.mr.lkey }
    }

    /// The place `offset` as a peer names it.
    pub(crate) fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.mr.iova.wrapping_add(offset as u64), rkey: self.mr.rkey }
    }

    /// Ends the registration.
    pub(crate) fn free(self, v: &mut dyn Verbs) -> Result<(), Failure> {
        Ok(v.deregister(self.mr.handle)?)
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.region.write(offset, bytes)?)
    }

    /// The byte at `offset`, without a detour over the heap.
    pub(crate) fn byte(&self, offset: usize) -> Result<u8, Failure> {
        let mut out = [0];
        self.region.read(offset, &mut out)?;
        Ok(out[0])
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Result<Vec<u8>, Failure> {
        let mut out = vec![0; len];
        self.region.read(offset, &mut out)?;
        Ok(out)
    }
}

/// A random starting PSN. Secrecy is not needed, only that two runs differ.
pub(crate) fn random_psn() -> Psn {
    let random = RandomState::new().build_hasher().finish();
    Psn::from_wire(u32::try_from(random & u64::from(Psn::MASK)).unwrap_or(0))
}

/// Longest sleep between two looks at whether a signal has come.
const SLICE: Duration = Duration::from_millis(50);
/// Completions that a poll takes at once.
const BATCH: usize = 16;

/// Takes completions of one CQ one by one.
pub(crate) struct Poller {
    cq: CqHandle,
    slots: [WorkCompletion; BATCH],
    next: usize,
    ready: usize,
}

impl Poller {
    /// Of `cq`; `qp` is any of the QPs that complete there.
    pub(crate) fn new(cq: CqHandle, qp: QpHandle) -> Self {
        let blank = WorkCompletion {
            wr_id: 0,
            status: WcStatus::Success,
            opcode: WcOpcode::Send,
            vendor_err: 0,
            byte_len: 0,
            data: WcData::None,
            qp,
            qp_num: Qpn::from_wire(0),
            src_qp: Qpn::from_wire(0),
            grh: false,
            solicited: false,
        };
        Self { cq, slots: [blank; BATCH], next: 0, ready: 0 }
    }

    /// The CQ.
    pub(crate) const fn cq(&self) -> CqHandle {
        self.cq
    }

    /// The next completion that is there now, successful or not. Polling an empty CQ drives the endpoint.
    pub(crate) fn poll(&mut self, v: &mut dyn Verbs) -> Result<Option<WorkCompletion>, Failure> {
        if self.next == self.ready {
            self.next = 0;
            self.ready = v.poll_cq(self.cq, &mut self.slots)?;
        }
        let wc = self.slots[..self.ready].get(self.next).copied();
        self.next += usize::from(wc.is_some());
        Ok(wc)
    }

    /// The next completion; `None` when none comes within `patience`. Sleeps when nothing is due.
    pub(crate) fn wait(&mut self, v: &mut Handle, patience: Duration) -> Result<Option<WorkCompletion>, Failure> {
        let begin = Instant::now();
        loop {
            if let Some(wc) = self.poll(v)? {
                return Ok(Some(wc));
            }
            stop::check()?;
            let Some(left) = patience.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            v.wait_cq(self.cq, Some(left.min(SLICE)))?;
        }
    }

    /// Keeps the endpoint answering its peer for a while: the peer may miss our last acknowledgement.
    pub(crate) fn linger(&mut self, v: &mut Handle, time: Duration) -> Result<(), Failure> {
        let begin = Instant::now();
        while let Some(left) = time.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
            self.wait(v, left)?;
        }
        Ok(())
    }
}

/// `wc` itself if it succeeded, else what went wrong, with how often and how long it was tried, and what to do.
pub(crate) fn succeeded(v: &dyn Verbs, wc: &WorkCompletion, what: &str) -> Result<WorkCompletion, Failure> {
    if wc.status == WcStatus::Success {
        return Ok(*wc);
    }
    let qp = v.query_qp(wc.qp).ok();
    let number = wc.status as u8;
    Err(Failure::Failed(format!("{what} failed with status {number}: {}", wc.explain(qp.as_ref()))))
}
