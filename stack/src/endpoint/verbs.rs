//! The verbs over the endpoint's tables.

use super::turn::Turn;
use super::{
    Endpoint, FIRST_QPN, MAX_AHS, MAX_CQE, MAX_CQS, MAX_INLINE, MAX_MULTICAST, MAX_PDS, MAX_SGE, MAX_SRQS, MAX_WR,
    QpSlot,
};
use crate::counters::{Counters, DropReason};
use crate::cq::Cq;
use crate::mem::{MAX_MRS, MAX_MWS};
use crate::qp::{Ah, MAX_MESSAGE, MAX_RD_ATOMIC, ModifyLimits, Qp, flow_for, pkey_at, post_recv_to, random_port};
use crate::raw::Region;
use crate::srq::Srq;
use crate::types::{AckTimeout, Gid, PathMtu, Qpn, Rkey};
use crate::verbs::{
    AccessFlags, AhAttr, AhHandle, AsyncEvent, CqHandle, DeviceAttr, GidEntry, GidType, MemoryRegion, MemoryWindow,
    MrHandle, MwBind, MwHandle, MwType, Notify, Operation, Payload, PdHandle, PortAttr, PostError, PostListError,
    QpAttr, QpCapabilities, QpHandle, QpInfo, QpInit, QpOptions, QpType, RecvWr, SendFlags, SendWr, SourcePort,
    SrqHandle, SrqInfo, SrqInit, Verbs, VerbsError, WorkCompletion,
};

fn limit(what: &'static str, limit: usize) -> VerbsError {
    VerbsError::LimitReached { what, limit }
}

fn within(field: &'static str, value: u32, min: u32, max: u32) -> Result<(), VerbsError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let (value, min, max) = (value.into(), min.into(), max.into());
    Err(VerbsError::InvalidCapability { field, value, min, max })
}

fn check_caps(caps: &QpCapabilities) -> Result<(), VerbsError> {
    within("max_send_wr", caps.max_send_wr, 1, MAX_WR)?;
    within("max_recv_wr", caps.max_recv_wr, 0, MAX_WR)?;
    within("max_send_sge", caps.max_send_sge, 0, MAX_SGE)?;
    within("max_recv_sge", caps.max_recv_sge, 0, MAX_SGE)?;
    within("max_inline", caps.max_inline, 0, MAX_INLINE)
}

fn list_error(error: PostError) -> PostListError {
    PostListError { index: 0, error }
}

/// The work request behind [`Verbs::bind_mw`].
pub(crate) fn bind_request(wr_id: u64, bind: MwBind, rkey: Rkey, flags: SendFlags) -> SendWr<'static> {
    let operation = Operation::BindMw(MwBind { rkey, ..bind });
    SendWr { wr_id, operation, payload: Payload::Sges(&[]), flags, destination: None }
}

impl Endpoint {
    fn check_pd(&self, pd: PdHandle) -> Result<(), VerbsError> {
        self.pds.get(pd).copied().ok_or(VerbsError::InvalidHandle)
    }

    /// The number of a new QP: the one asked for, 1 for QP1, else a random one that is free.
    fn choose_qpn(&mut self, init: &QpInit) -> Result<Qpn, VerbsError> {
        let wanted = match init.qp_type {
            QpType::Gsi => Some(Qpn::GSI),
            _ => init.qpn,
        };
        if let Some(qpn) = wanted {
            if init.qp_type != QpType::Gsi {
                within("qpn", qpn.get(), Qpn::GSI.get() + 1, Qpn::MULTICAST.get() - 1)?;
            }
            return if self.by_qpn.contains(qpn.get()) { Err(VerbsError::Busy) } else { Ok(qpn) };
        }
        // At most 2^16 of 2^24 numbers are taken, so this ends at once.
        loop {
            let qpn = Qpn::from_wire(self.rng.next_u32());
            if qpn.get() >= FIRST_QPN && qpn != Qpn::MULTICAST && !self.by_qpn.contains(qpn.get()) {
                return Ok(qpn);
            }
        }
    }

    /// Checks what a QP is made of. Returns the elements of a receive of its SRQ and the SRQ's domain.
    fn check_qp_init(&self, init: &QpInit) -> Result<Option<(usize, PdHandle)>, VerbsError> {
        self.check_pd(init.pd)?;
        check_caps(&init.caps)?;
        for cq in [init.send_cq, init.recv_cq] {
            self.cqs.get(cq).ok_or(VerbsError::InvalidHandle)?;
        }
        match init.srq {
            None => Ok(None),
            Some(_) if init.qp_type == QpType::Gsi => Err(VerbsError::Unsupported("an SRQ on QP1")),
            Some(srq) => {
                let srq = self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?;
                Ok(Some((srq.max_sge(), srq.pd())))
            }
        }
    }
}

impl Verbs for Endpoint {
    fn query_device(&self) -> DeviceAttr {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        DeviceAttr {
            name: self.config.name.clone(),
            node_guid: self.node_guid,
            max_qp: count(self.config.max_qp),
            max_qp_wr: MAX_WR,
            max_sge: MAX_SGE,
            max_cq: count(MAX_CQS),
            max_cqe: MAX_CQE,
            max_mr: count(MAX_MRS),
            max_mw: count(MAX_MWS),
            max_pd: count(MAX_PDS),
            max_srq: count(MAX_SRQS),
            max_ah: count(MAX_AHS),
            max_rd_atomic: u8::try_from(MAX_RD_ATOMIC).unwrap_or(u8::MAX),
            max_msg_size: u32::try_from(MAX_MESSAGE).unwrap_or(u32::MAX),
            max_inline: MAX_INLINE,
            pkeys: self.config.pkeys.clone(),
            // 134 ms, as Linux's rxe says of itself: a software endpoint shares its processor.
            ack_delay: AckTimeout::new(15).unwrap_or(AckTimeout::DEFAULT),
        }
    }

    fn query_port(&self) -> PortAttr {
        let counters = self.counters();
        let violations = |reason| u32::try_from(counters.dropped(reason)).unwrap_or(u32::MAX);
        PortAttr {
            active: self.link_is_up,
            max_mtu: PathMtu::B4096,
            active_mtu: self.config.path_mtu,
            mac: self.config.mac,
            bad_pkey_cntr: violations(DropReason::PKeyMismatch),
            qkey_viol_cntr: violations(DropReason::QKeyMismatch),
        }
    }

    fn query_gids(&self) -> Vec<GidEntry> {
        self.gids.iter().map(|gid| GidEntry { gid: *gid, gid_type: GidType::RoceV2 }).collect()
    }

    fn alloc_pd(&mut self) -> Result<PdHandle, VerbsError> {
        self.pds.insert(()).ok_or(limit("protection domains", MAX_PDS))
    }

    fn dealloc_pd(&mut self, pd: PdHandle) -> Result<(), VerbsError> {
        self.check_pd(pd)?;
        let used = self.mrs.uses_pd(pd)
            || self.qps.iter().any(|(_, s)| s.qp.pd() == pd)
            || self.srqs.iter().any(|(_, s)| s.pd() == pd)
            || self.ahs.iter().any(|(_, a)| a.pd == pd);
        if used {
            return Err(VerbsError::Busy);
        }
        self.pds.remove(pd);
        Ok(())
    }

    fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError> {
        self.check_pd(pd)?;
        self.mrs.register(pd, region, access, iova)
    }

    fn deregister(&mut self, mr: MrHandle) -> Result<(), VerbsError> {
        self.mrs.deregister(mr)
    }

    fn alloc_fast_mr(&mut self, pd: PdHandle, region: &Region) -> Result<MemoryRegion, VerbsError> {
        self.check_pd(pd)?;
        self.mrs.alloc_fast(pd, region)
    }

    fn alloc_mw(&mut self, pd: PdHandle, mw_type: MwType) -> Result<MemoryWindow, VerbsError> {
        self.check_pd(pd)?;
        self.mrs.alloc_window(pd, mw_type)
    }

    fn dealloc_mw(&mut self, mw: MwHandle) -> Result<(), VerbsError> {
        self.mrs.dealloc_window(mw)
    }

    fn bind_mw(&mut self, qp: QpHandle, wr_id: u64, bind: MwBind, flags: SendFlags) -> Result<Rkey, PostError> {
        let rkey = self.mrs.next_window_key(bind.mw)?;
        self.post_send(qp, &[bind_request(wr_id, bind, rkey, flags)]).map_err(|e| e.error)?;
        Ok(rkey)
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqHandle, VerbsError> {
        within("depth", depth, 1, MAX_CQE)?;
        self.cqs.insert(Cq::new(depth as usize)).ok_or(limit("completion queues", MAX_CQS))
    }

    fn destroy_cq(&mut self, cq: CqHandle) -> Result<(), VerbsError> {
        let users = self.cqs.get(cq).ok_or(VerbsError::InvalidHandle)?.users();
        if users > 0 {
            return Err(VerbsError::Busy);
        }
        self.cqs.remove(cq);
        Ok(())
    }

    fn poll_cq(&mut self, cq: CqHandle, out: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        Ok(self.cqs.get_mut(cq).ok_or(VerbsError::InvalidHandle)?.poll(out))
    }

    fn req_notify(&mut self, cq: CqHandle, what: Notify) -> Result<(), VerbsError> {
        self.cqs.get_mut(cq).ok_or(VerbsError::InvalidHandle)?.arm(what);
        Ok(())
    }

    fn create_srq(&mut self, init: SrqInit) -> Result<SrqHandle, VerbsError> {
        self.check_pd(init.pd)?;
        within("max_wr", init.max_wr, 1, MAX_WR)?;
        within("max_sge", init.max_sge, 1, MAX_SGE)?;
        self.srqs.insert(Srq::new(&init)).ok_or(limit("shared receive queues", MAX_SRQS))
    }

    fn arm_srq(&mut self, srq: SrqHandle, limit: u32) -> Result<(), VerbsError> {
        let srq = self.srqs.get_mut(srq).ok_or(VerbsError::InvalidHandle)?;
        within("limit", limit, 0, srq.info().max_wr)?;
        srq.arm(limit);
        Ok(())
    }

    fn query_srq(&self, srq: SrqHandle) -> Result<SrqInfo, VerbsError> {
        Ok(self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?.info())
    }

    fn destroy_srq(&mut self, srq: SrqHandle) -> Result<(), VerbsError> {
        if self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?.users() > 0 {
            return Err(VerbsError::Busy);
        }
        self.srqs.remove(srq);
        Ok(())
    }

    fn create_qp(&mut self, init: QpInit) -> Result<QpHandle, VerbsError> {
        let srq = self.check_qp_init(&init)?;
        let qpn = self.choose_qpn(&init)?;
        let options = self.config.qp_options;
        let datagram_mtu = u16::try_from(self.config.path_mtu.bytes()).unwrap_or(u16::MAX);
        let spare = &mut self.spare;
        let make = |handle| {
            let qp = Qp::new(handle, qpn, &init, srq, datagram_mtu, options, spare);
            QpSlot { qp, counters: Counters::default(), queued: false, turn: Turn::default() }
        };
        let handle = self.qps.insert_with(make).ok_or(limit("queue pairs", self.config.max_qp))?;
        self.by_qpn.insert(qpn.get(), handle);
        for cq in [init.send_cq, init.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.attach();
            }
        }
        if let Some(srq) = init.srq.and_then(|srq| self.srqs.get_mut(srq)) {
            srq.attach();
        }
        Ok(handle)
    }

    fn modify_qp(&mut self, qp: QpHandle, attr: QpAttr) -> Result<(), VerbsError> {
        let gids = core::mem::take(&mut self.gids);
        let limits = ModifyLimits { gids: &gids, path_mtu: self.config.path_mtu };
        let result = self.with_qp(qp, |qp, cx| qp.modify(&attr, &limits, cx));
        self.gids = gids;
        result.ok_or(VerbsError::InvalidHandle)??;
        self.wake(qp);
        Ok(())
    }

    fn query_qp(&self, qp: QpHandle) -> Result<QpInfo, VerbsError> {
        Ok(self.qps.get(qp).ok_or(VerbsError::InvalidHandle)?.qp.info())
    }

    fn set_qp_options(&mut self, qp: QpHandle, options: QpOptions) -> Result<(), VerbsError> {
        self.qps.get_mut(qp).ok_or(VerbsError::InvalidHandle)?.qp.set_options(options);
        Ok(())
    }

    fn qp_options(&self, qp: QpHandle) -> Result<QpOptions, VerbsError> {
        Ok(self.qps.get(qp).ok_or(VerbsError::InvalidHandle)?.qp.options())
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), VerbsError> {
        let slot = self.qps.remove(qp).ok_or(VerbsError::InvalidHandle)?;
        self.counters.add_qp(&slot.counters);
        self.by_qpn.remove(slot.qp.qpn().get());
        self.mrs.release_qp(qp);
        self.multicast.forget(qp);
        let (send, recv) = slot.qp.cqs();
        for cq in [send, recv] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.detach();
            }
        }
        if let Some(srq) = slot.qp.srq().and_then(|srq| self.srqs.get_mut(srq)) {
            srq.detach();
        }
        slot.qp.retire(&mut self.spare);
        Ok(())
    }

    fn find_qp(&self, qpn: Qpn) -> Option<QpHandle> {
        self.by_qpn.get(qpn.get()).copied()
    }

    fn attach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        let slot = self.qps.get(qp).ok_or(VerbsError::InvalidHandle)?;
        if slot.qp.qp_type() != QpType::Ud || !gid.ip().is_multicast() {
            return Err(VerbsError::NotMulticast);
        }
        if self.multicast.contains(gid, qp) {
            return Ok(());
        }
        if self.multicast.is_full() {
            return Err(limit("multicast memberships", MAX_MULTICAST));
        }
        self.multicast.attach(gid, qp);
        Ok(())
    }

    fn detach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        if self.multicast.detach(gid, qp) { Ok(()) } else { Err(VerbsError::NotMulticast) }
    }

    fn post_send(&mut self, qp: QpHandle, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let slot = self.qps.get_mut(qp).ok_or(list_error(PostError::InvalidHandle))?;
        let poster = slot.qp.poster_mut().ok_or(list_error(PostError::InvalidHandle))?;
        let result = poster.post_send(list);
        self.wake(qp);
        result
    }

    fn post_recv(&mut self, qp: QpHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let slot = self.qps.get_mut(qp).ok_or(list_error(PostError::InvalidHandle))?;
        let poster = slot.qp.poster_mut().ok_or(list_error(PostError::InvalidHandle))?;
        let result = poster.post_recv(list);
        // A QP in ERR flushes what is posted.
        self.wake(qp);
        result
    }

    fn post_srq_recv(&mut self, srq: SrqHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let srq = self.srqs.get_mut(srq).ok_or(list_error(PostError::InvalidHandle))?;
        let ring = srq.caller_mut().ok_or(list_error(PostError::InvalidHandle))?;
        for (index, wr) in list.iter().enumerate() {
            post_recv_to(ring, wr).map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    fn create_ah(&mut self, pd: PdHandle, attr: AhAttr) -> Result<AhHandle, VerbsError> {
        self.check_pd(pd)?;
        let invalid = VerbsError::InvalidGidIndex { index: attr.sgid_index.into(), len: self.gids.len() };
        let flow = flow_for(&attr, &self.gids).ok_or(invalid)?;
        let pkey = match attr.pkey_index {
            None => None,
            Some(index) => Some(
                pkey_at(&self.config.pkeys, index)
                    .ok_or(VerbsError::InvalidPKeyIndex { index: index.into(), len: self.config.pkeys.len() })?,
            ),
        };
        let source_port = match attr.udp_source_port {
            SourcePort::Formula => None,
            SourcePort::Fixed(port) => Some(port),
            SourcePort::Random => Some(random_port(&self.config.source_ports, &mut self.rng)),
            SourcePort::Rotating => return Err(VerbsError::Unsupported("a rotating source port of datagrams")),
        };
        let ah = Ah { pd, flow, source_port, pkey };
        self.ahs.insert(ah).ok_or(limit("address handles", MAX_AHS))
    }

    fn destroy_ah(&mut self, ah: AhHandle) -> Result<(), VerbsError> {
        self.ahs.remove(ah).map(|_| ()).ok_or(VerbsError::InvalidHandle)
    }

    fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop()
    }
}
