//! The fast path: posting and polling.

use super::error::Errno;
use super::{HwDevice, QpEntry, abi, convert};
use crate::qp::{MAX_MESSAGE, check_operation, check_sge_count};
use crate::table::{NumberMap, Slab};
use crate::verbs::{
    CqHandle, Payload, PostError, PostListError, QpHandle, QpState, RecvWr, SendWr, SrqHandle, VerbsError,
    WorkCompletion, kind,
};

/// Completions taken from the library at once.
const BATCH: usize = 16;

const UNKNOWN: PostListError = PostListError { index: 0, error: PostError::InvalidHandle };

/// The library's verdict on a list, of which everything before `refused` was checked by us.
fn verdict(posted: Result<(), (usize, Errno)>, refused: Option<PostListError>) -> Result<(), PostListError> {
    match (posted, refused) {
        (Err((index, errno)), _) => Err(PostListError { index, error: errno.of_post() }),
        (Ok(()), Some(refused)) => Err(refused),
        (Ok(()), None) => Ok(()),
    }
}

/// What can be told at the call without the device, which knows only one error number for all of it.
fn check(entry: &QpEntry, wr: &SendWr<'_>) -> Result<(), PostError> {
    if matches!(entry.state, QpState::Reset | QpState::Init | QpState::Rtr) {
        return Err(PostError::WrongState(entry.state));
    }
    check_operation(entry.qp_type, wr)?;
    let length = match wr.payload {
        Payload::Sges(sges) => {
            check_sge_count(sges, entry.caps.max_send_sge)?;
            sges.iter().map(|s| u64::from(s.length)).sum()
        }
        Payload::Inline(_) if wr.operation.is_read_or_atomic() => return Err(PostError::InlineNotAllowed),
        Payload::Inline(bytes) => {
            let (given, max) = (bytes.len(), entry.caps.max_inline as usize);
            if given > max {
                return Err(PostError::InlineTooLong { given, max });
            }
            given as u64
        }
    };
    if length > MAX_MESSAGE {
        return Err(PostError::MessageTooLong { len: length, max: MAX_MESSAGE });
    }
    if wr.operation.is_atomic() && length != 8 {
        return Err(PostError::AtomicLength(u32::try_from(length).unwrap_or(u32::MAX)));
    }
    Ok(())
}

/// The first receive with too many elements.
fn first_bad_receive(list: &[RecvWr<'_>], max_sge: u32) -> Option<PostListError> {
    let bad = list.iter().enumerate().find_map(|(i, wr)| check_sge_count(wr.sges, max_sge).err().map(|e| (i, e)));
    bad.map(|(index, error)| PostListError { index, error })
}

impl HwDevice {
    pub(super) fn send(&mut self, qp: QpHandle, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let Self { qps, ahs, chain, .. } = self;
        let entry = qps.get(qp).ok_or(UNKNOWN)?;
        let mut refused = None;
        let good = list.iter().enumerate().map_while(|(index, wr)| {
            let made = check(entry, wr).and_then(|()| {
                let ah = wr.destination.map(|to| ahs.get(to.ah).ok_or(PostError::InvalidHandle)).transpose()?;
                convert::send_wr(wr, ah.map(super::ffi::Ah::address))
            });
            match made {
                Ok(converted) => Some((converted, wr.payload)),
                Err(error) => {
                    refused = Some(PostListError { index, error });
                    None
                }
            }
        });
        let posted = entry.qp.post_send(chain, good);
        verdict(posted, refused)
    }

    pub(super) fn receive(&mut self, qp: QpHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let Self { qps, chain, .. } = self;
        let entry = qps.get(qp).ok_or(UNKNOWN)?;
        if entry.state == QpState::Reset && !list.is_empty() {
            return Err(PostListError { index: 0, error: PostError::WrongState(entry.state) });
        }
        if entry.has_srq && !list.is_empty() {
            return Err(PostListError { index: 0, error: PostError::HasSrq });
        }
        let refused = first_bad_receive(list, entry.caps.max_recv_sge);
        let good = list.get(..refused.map_or(list.len(), |r| r.index)).unwrap_or_default();
        verdict(entry.qp.post_recv(chain, good), refused)
    }

    pub(super) fn receive_shared(&mut self, srq: SrqHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let Self { srqs, chain, .. } = self;
        let entry = srqs.get(srq).ok_or(UNKNOWN)?;
        let refused = first_bad_receive(list, entry.max_sge);
        let good = list.get(..refused.map_or(list.len(), |r| r.index)).unwrap_or_default();
        verdict(entry.srq.post_recv(chain, good), refused)
    }

    /// Takes completions: those that a wait found, then the queue's.
    pub(super) fn take(&mut self, cq: CqHandle, out: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        let Self { cqs, by_qpn, qps, .. } = self;
        let entry = cqs.get_mut(cq).ok_or(VerbsError::InvalidHandle)?;
        let mut n = 0;
        for slot in &mut *out {
            let Some(wc) = entry.found.pop_front() else { break };
            *slot = wc;
            n += 1;
        }
        while n < out.len() {
            let mut raw = [abi::Wc::default(); BATCH];
            let room = raw.get_mut(..(out.len() - n).min(BATCH)).unwrap_or_default();
            let wanted = room.len();
            let came = entry.cq.poll(room).map_err(|e| e.of("ibv_poll_cq"))?;
            for wc in raw.iter().take(came).filter_map(|wc| of_live_qp(wc, by_qpn, qps)) {
                if let Some(slot) = out.get_mut(n) {
                    *slot = wc;
                    n += 1;
                }
            }
            if came < wanted {
                break;
            }
        }
        Ok(n)
    }

    /// Whether the CQ holds a completion: one that is found is kept for the next poll.
    pub(super) fn look(&mut self, cq: CqHandle) -> Result<bool, VerbsError> {
        let Self { cqs, by_qpn, qps, .. } = self;
        let entry = cqs.get_mut(cq).ok_or(VerbsError::InvalidHandle)?;
        while entry.found.is_empty() {
            let mut raw = [abi::Wc::default(); BATCH];
            let came = entry.cq.poll(&mut raw).map_err(|e| e.of("ibv_poll_cq"))?;
            entry.found.extend(raw.iter().take(came).filter_map(|wc| of_live_qp(wc, by_qpn, qps)));
            if came == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The completion, unless its QP is destroyed: that completes nothing any more.
fn of_live_qp(wc: &abi::Wc, by_qpn: &NumberMap<QpHandle>, qps: &Slab<kind::Qp, QpEntry>) -> Option<WorkCompletion> {
    let qp = *by_qpn.get(wc.qp_num)?;
    qps.get(qp).map(|_| convert::completion(wc, qp))
}
