//! The verbs of control, one by one.

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::Errno;
use super::{CqEntry, GIDS_ALL_PORTS, GIDS_MAX, HwDevice, OBJECTS_MAX, Object, QpEntry, SrqEntry, abi, convert, ffi};
use crate::raw::Region;
use crate::types::{Gid, Lkey, PathMtu, Qpn, Rkey};
use crate::verbs::{
    AccessFlags, AddressVector, AhAttr, AhHandle, AsyncEvent, Attr, CqHandle, DeviceAttr, GidEntry, GidType,
    MemoryRegion, ModifyError, MrHandle, Notify, PdHandle, PortAttr, PostListError, QpAttr, QpHandle, QpInfo, QpInit,
    QpState, QpType, QueueSnapshot, RecvWr, SendWr, SourcePort, SrqHandle, SrqInfo, SrqInit, Verbs, VerbsError,
    WorkCompletion, check_transition,
};

const fn full(what: &'static str) -> VerbsError {
    VerbsError::LimitReached { what, limit: OBJECTS_MAX }
}

/// Whether `value` lies within what the device offers.
const fn within(field: &'static str, value: u32, min: u32, max: u32) -> Result<(), VerbsError> {
    if min <= value && value <= max {
        return Ok(());
    }
    Err(VerbsError::InvalidCapability { field, value: value as u64, min: min as u64, max: max as u64 })
}

impl HwDevice {
    fn pd(&self, pd: PdHandle) -> Result<&Arc<ffi::Pd>, VerbsError> {
        self.pds.get(pd).ok_or(VerbsError::InvalidHandle)
    }

    fn cq(&self, cq: CqHandle) -> Result<&CqEntry, VerbsError> {
        self.cqs.get(cq).ok_or(VerbsError::InvalidHandle)
    }

    fn qp(&self, qp: QpHandle) -> Result<&QpEntry, VerbsError> {
        self.qps.get(qp).ok_or(VerbsError::InvalidHandle)
    }

    fn qp_mut(&mut self, qp: QpHandle) -> Result<&mut QpEntry, VerbsError> {
        self.qps.get_mut(qp).ok_or(VerbsError::InvalidHandle)
    }

    fn check_sizes(&self, init: &QpInit) -> Result<(), VerbsError> {
        let (caps, attr) = (&init.caps, &self.attr);
        within("max_send_wr", caps.max_send_wr, 1, attr.max_qp_wr)?;
        within("max_recv_wr", caps.max_recv_wr, 0, attr.max_qp_wr)?;
        within("max_send_sge", caps.max_send_sge, 0, attr.max_sge)?;
        within("max_recv_sge", caps.max_recv_sge, 0, attr.max_sge)
    }

    /// Checks what the device would refuse without saying why.
    fn check_values(&self, attr: &QpAttr) -> Result<(), ModifyError> {
        let range = |ok: bool, attr| if ok { Ok(()) } else { Err(ModifyError::OutOfRange { attr }) };
        let gids = if attr.av.is_some() || attr.alt_path.is_some() { self.query_gids() } else { Vec::new() };
        range(attr.port.is_none_or(|p| p == 1), Attr::Port)?;
        range(attr.pkey_index.is_none_or(|i| usize::from(i) < self.attr.pkeys.len()), Attr::PKeyIndex)?;
        range(attr.path_mtu.is_none_or(|m| m <= self.query_port().active_mtu), Attr::PathMtu)?;
        range(attr.max_rd_atomic.is_none_or(|n| n <= self.attr.max_rd_atomic), Attr::MaxRdAtomic)?;
        range(attr.max_dest_rd_atomic.is_none_or(|n| n <= self.attr.max_rd_atomic), Attr::MaxDestRdAtomic)?;
        range(attr.av.is_none_or(|av| reaches(&av, &gids)), Attr::Av)?;
        range(attr.alt_path.is_none_or(|alt| reaches(&alt.av, &gids)), Attr::AltPath)
    }
}

/// Whether the path begins at a GID of the destination's family.
fn reaches(av: &AddressVector, gids: &[GidEntry]) -> bool {
    let from = gids.get(usize::from(av.sgid_index)).filter(|entry| entry.is_usable());
    from.is_some_and(|from| from.gid.ip().is_ipv4() == av.dgid.ip().is_ipv4())
        && !av.dgid.is_unspecified()
        && av.service_level < 16
        && av.flow_label < 1 << 20
}

/// The table of one port: entries that are not there are empty, so that the position is the device's index.
fn gid_table(entries: &[abi::GidEntry], port: u8) -> Vec<GidEntry> {
    let mut table = Vec::new();
    let empty = GidEntry { gid: Gid::default(), gid_type: GidType::RoceV2 };
    for entry in entries.iter().filter(|e| e.port_num == u32::from(port)) {
        let Some(index) = usize::try_from(entry.gid_index).ok().filter(|i| *i < GIDS_MAX) else { continue };
        if table.len() <= index {
            table.resize(index + 1, empty);
        }
        if let Some(slot) = table.get_mut(index) {
            *slot = convert::gid(entry);
        }
    }
    table
}

impl Verbs for HwDevice {
    fn query_device(&self) -> DeviceAttr {
        self.attr.clone()
    }

    fn query_port(&self) -> PortAttr {
        let port = self.context.query_port(self.port).unwrap_or_default();
        let mtu = |code: u32| u8::try_from(code).ok().and_then(PathMtu::from_code).unwrap_or(PathMtu::B256);
        PortAttr {
            active: port.state == abi::PORT_ACTIVE,
            max_mtu: mtu(port.max_mtu),
            active_mtu: mtu(port.active_mtu),
            mac: self.find_interface().and_then(|i| i.mac),
            bad_pkey_cntr: port.bad_pkey_cntr,
            qkey_viol_cntr: port.qkey_viol_cntr,
        }
    }

    fn query_gids(&self) -> Vec<GidEntry> {
        gid_table(&self.context.query_gids(GIDS_ALL_PORTS).unwrap_or_default(), self.port)
    }

    fn alloc_pd(&mut self) -> Result<PdHandle, VerbsError> {
        let pd = ffi::Pd::new(&self.context).map_err(|e| e.of("ibv_alloc_pd"))?;
        self.pds.insert(Arc::new(pd)).ok_or(full("protection domains"))
    }

    fn dealloc_pd(&mut self, pd: PdHandle) -> Result<(), VerbsError> {
        if Arc::strong_count(self.pd(pd)?) > 1 {
            return Err(VerbsError::Busy);
        }
        self.pds.remove(pd);
        Ok(())
    }

    /// Keeps a clone of `region` until the registration has ended, so that its memory is never freed before.
    fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError> {
        let remote_change = access.intersection(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC);
        if remote_change.bits() != 0 && !access.contains(AccessFlags::LOCAL_WRITE) {
            return Err(VerbsError::InvalidAccess);
        }
        let len = region.len() as u64;
        let zero_based = access.contains(AccessFlags::ZERO_BASED);
        let first = if zero_based { 0 } else { iova.unwrap_or_else(|| region.host_address()) };
        first.checked_add(len).ok_or(VerbsError::AddressWrap)?;
        let bits = core::ffi::c_int::try_from(access.bits()).unwrap_or(0);
        let other = iova.filter(|iova| !zero_based && *iova != region.host_address());
        let mr = ffi::Mr::new(self.pd(pd)?, region, bits, other).map_err(|e| e.of("ibv_reg_mr"))?;
        let (lkey, rkey) = mr.keys();
        let handle = self.mrs.insert(mr).ok_or(full("memory regions"))?;
        Ok(MemoryRegion { handle, lkey: Lkey::new(lkey), rkey: Rkey::new(rkey), iova: first, len })
    }

    fn deregister(&mut self, mr: MrHandle) -> Result<(), VerbsError> {
        self.mrs.remove(mr).map(drop).ok_or(VerbsError::InvalidHandle)
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqHandle, VerbsError> {
        within("depth", depth, 1, self.attr.max_cqe)?;
        let cookie = self.cookie();
        let depth = core::ffi::c_int::try_from(depth).unwrap_or(core::ffi::c_int::MAX);
        let cq = ffi::Cq::new(&self.channel, depth, cookie).map_err(|e| e.of("ibv_create_cq"))?;
        let entry = CqEntry { cq: Arc::new(cq), cookie, found: VecDeque::new(), armed: false };
        let handle = self.cqs.insert(entry).ok_or(full("completion queues"))?;
        self.by_cookie.insert(cookie, Object::Cq(handle));
        Ok(handle)
    }

    fn destroy_cq(&mut self, cq: CqHandle) -> Result<(), VerbsError> {
        if Arc::strong_count(&self.cq(cq)?.cq) > 1 {
            return Err(VerbsError::Busy);
        }
        if let Some(entry) = self.cqs.remove(cq) {
            self.by_cookie.remove(&entry.cookie);
        }
        Ok(())
    }

    /// An empty CQ yields to other threads.
    fn poll_cq(&mut self, cq: CqHandle, out: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        let n = self.take(cq, out)?;
        if n == 0 && !out.is_empty() {
            if self.gone {
                return Err(VerbsError::DeviceGone);
            }
            std::thread::yield_now();
        }
        Ok(n)
    }

    fn req_notify(&mut self, cq: CqHandle, what: Notify) -> Result<(), VerbsError> {
        let entry = self.cqs.get_mut(cq).ok_or(VerbsError::InvalidHandle)?;
        entry.cq.req_notify(what == Notify::Solicited).map_err(|e| e.of("ibv_req_notify_cq"))?;
        entry.armed = true;
        Ok(())
    }

    fn create_srq(&mut self, init: SrqInit) -> Result<SrqHandle, VerbsError> {
        within("max_wr", init.max_wr, 1, u32::MAX)?;
        within("max_sge", init.max_sge, 1, self.attr.max_sge)?;
        let cookie = self.cookie();
        let attr = abi::SrqAttr { max_wr: init.max_wr, max_sge: init.max_sge, srq_limit: 0 };
        let srq = ffi::Srq::new(self.pd(init.pd)?, attr, cookie).map_err(|e| e.of("ibv_create_srq"))?;
        let entry = SrqEntry { srq: Arc::new(srq), cookie, max_sge: init.max_sge };
        let handle = self.srqs.insert(entry).ok_or(full("shared receive queues"))?;
        self.by_cookie.insert(cookie, Object::Srq(handle));
        Ok(handle)
    }

    fn arm_srq(&mut self, srq: SrqHandle, limit: u32) -> Result<(), VerbsError> {
        let entry = self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?;
        entry.srq.set_limit(limit).map_err(|e| e.of("ibv_modify_srq"))
    }

    /// Hardware does not say how many receives wait: `available` is 0.
    fn query_srq(&self, srq: SrqHandle) -> Result<SrqInfo, VerbsError> {
        let entry = self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?;
        let attr = entry.srq.query().map_err(|e| e.of("ibv_query_srq"))?;
        Ok(SrqInfo { max_wr: attr.max_wr, available: 0, limit: attr.srq_limit })
    }

    fn destroy_srq(&mut self, srq: SrqHandle) -> Result<(), VerbsError> {
        let entry = self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?;
        if Arc::strong_count(&entry.srq) > 1 {
            return Err(VerbsError::Busy);
        }
        let cookie = entry.cookie;
        self.srqs.remove(srq);
        self.by_cookie.remove(&cookie);
        Ok(())
    }

    /// The device chooses the number, and QP1 is the kernel's.
    fn create_qp(&mut self, init: QpInit) -> Result<QpHandle, VerbsError> {
        if init.qp_type == QpType::Gsi {
            return Err(VerbsError::Unsupported("QP1, which belongs to the kernel,"));
        }
        if init.qpn.is_some() {
            return Err(VerbsError::Unsupported("the choice of a QP number"));
        }
        self.check_sizes(&init)?;
        let srq = match init.srq {
            Some(srq) => Some(Arc::clone(&self.srqs.get(srq).ok_or(VerbsError::InvalidHandle)?.srq)),
            None => None,
        };
        let parts = ffi::QpParts {
            pd: Arc::clone(self.pd(init.pd)?),
            send_cq: Arc::clone(&self.cq(init.send_cq)?.cq),
            recv_cq: Arc::clone(&self.cq(init.recv_cq)?.cq),
            srq,
        };
        let cookie = self.cookie();
        let (qp_type, cap) = (convert::qp_type(init.qp_type), convert::cap(&init.caps));
        let made = ffi::Qp::new(parts, qp_type, cap, init.signal_all, cookie);
        let (qp, cap) = made.map_err(|e| e.of("ibv_create_qp"))?;
        let number = qp.number();
        let (qp_type, caps, has_srq) = (init.qp_type, convert::cap_from(&cap), init.srq.is_some());
        let entry = QpEntry { qp, cookie, qp_type, caps, has_srq, state: QpState::Reset, groups: Vec::new() };
        let handle = self.qps.insert(entry).ok_or(full("queue pairs"))?;
        self.by_cookie.insert(cookie, Object::Qp(handle));
        self.by_qpn.insert(number, handle);
        Ok(handle)
    }

    /// Attributes are checked against the state table and the device's limits here, so that a refusal names one: the
    /// device itself gives the same error number for all.
    fn modify_qp(&mut self, qp: QpHandle, attr: QpAttr) -> Result<(), VerbsError> {
        let entry = self.qp(qp)?;
        let now = entry.qp.query(abi::QP_STATE).map_err(|e| e.of("ibv_query_qp"))?;
        let from = convert::state(now.qp_state).unwrap_or(QpState::Err);
        let to = check_transition(entry.qp_type, from, &attr)?;
        self.check_values(&attr)?;
        // The library wants the target state in every modify.
        let attr = QpAttr { state: Some(to), ..attr };
        let (raw, mask) = convert::qp_attr(&attr, self.port)?;
        entry.qp.modify(raw, mask).map_err(|e| e.of("ibv_modify_qp"))?;
        self.qp_mut(qp)?.state = to;
        Ok(())
    }

    /// Of the queues hardware tells only the two PSNs, and of a failure nothing.
    fn query_qp(&self, qp: QpHandle) -> Result<QpInfo, VerbsError> {
        let entry = self.qp(qp)?;
        let raw = entry.qp.query(abi::QP_ALL).map_err(|e| e.of("ibv_query_qp"))?;
        let mut attr = convert::qp_attr_from(&raw, abi::QP_ALL);
        let state = convert::state(raw.qp_state).unwrap_or(QpState::Err);
        (attr.state, attr.cur_state, attr.sqd_async_notify) = (Some(state), None, None);
        let (sq_psn, rq_psn) = (attr.sq_psn.unwrap_or_default(), attr.rq_psn.unwrap_or_default());
        Ok(QpInfo {
            qpn: Qpn::from_wire(entry.qp.number()),
            qp_type: entry.qp_type,
            state,
            attr,
            caps: entry.caps,
            queues: QueueSnapshot { sq_psn, rq_psn, ..QueueSnapshot::default() },
            last_error: None,
        })
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), VerbsError> {
        let entry = self.qps.remove(qp).ok_or(VerbsError::InvalidHandle)?;
        self.by_cookie.remove(&entry.cookie);
        self.by_qpn.remove(entry.qp.number());
        Ok(())
    }

    fn find_qp(&self, qpn: Qpn) -> Option<QpHandle> {
        self.by_qpn.get(qpn.get()).copied()
    }

    fn attach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        let entry = self.qp_mut(qp)?;
        if entry.qp_type != QpType::Ud || !gid.ip().is_multicast() {
            return Err(VerbsError::NotMulticast);
        }
        let group = abi::GidBytes(gid.to_bytes());
        entry.qp.join(group).map_err(|e| e.of("ibv_attach_mcast"))?;
        entry.groups.push(group);
        Ok(())
    }

    fn detach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        let entry = self.qp_mut(qp)?;
        let group = abi::GidBytes(gid.to_bytes());
        let at = entry.groups.iter().position(|g| *g == group).ok_or(VerbsError::NotMulticast)?;
        entry.qp.leave(group).map_err(|e| e.of("ibv_detach_mcast"))?;
        entry.groups.swap_remove(at);
        Ok(())
    }

    fn post_send(&mut self, qp: QpHandle, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        self.send(qp, list)
    }

    fn post_recv(&mut self, qp: QpHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        self.receive(qp, list)
    }

    fn post_srq_recv(&mut self, srq: SrqHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        self.receive_shared(srq, list)
    }

    fn create_ah(&mut self, pd: PdHandle, attr: AhAttr) -> Result<AhHandle, VerbsError> {
        let (gids, index) = (self.query_gids(), usize::from(attr.sgid_index));
        if !gids.get(index).is_some_and(GidEntry::is_usable) {
            return Err(VerbsError::InvalidGidIndex { index, len: gids.len() });
        }
        if attr.udp_source_port != SourcePort::Formula {
            return Err(VerbsError::Unsupported("the choice of a UDP source port"));
        }
        if attr.pkey_index.is_some() {
            return Err(VerbsError::Unsupported("a partition key by address handle"));
        }
        let made = ffi::Ah::new(self.pd(pd)?, convert::address(&attr, self.port));
        let ah = made.map_err(|e: Errno| e.of("ibv_create_ah"))?;
        self.ahs.insert(ah).ok_or(full("address handles"))
    }

    fn destroy_ah(&mut self, ah: AhHandle) -> Result<(), VerbsError> {
        self.ahs.remove(ah).map(drop).ok_or(VerbsError::InvalidHandle)
    }

    fn poll_event(&mut self) -> Option<AsyncEvent> {
        if self.events.is_empty() {
            self.read_events();
        }
        self.events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, port: u32, gid_type: u32, last: u8) -> abi::GidEntry {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 77, 0, last]);
        abi::GidEntry { gid: abi::GidBytes(gid), gid_index: index, port_num: port, gid_type, ndev_ifindex: 2 }
    }

    #[test]
    fn the_position_of_a_gid_is_the_devices_index() {
        // Entry 1 is empty, 2 is RoCE v1, and port 2 has a table of its own.
        let entries = [entry(0, 1, 2, 1), entry(3, 1, 2, 3), entry(2, 1, 1, 3), entry(1, 2, 2, 9)];
        let table = gid_table(&entries, 1);
        assert_eq!(table.len(), 4);
        let usable: Vec<bool> = table.iter().map(GidEntry::is_usable).collect();
        assert_eq!(usable, [true, false, false, true]);
        assert_eq!(table[3].gid.to_string(), "::ffff:10.77.0.3");
        assert!(table[1].gid.is_unspecified());
        assert_eq!(gid_table(&entries, 2).len(), 2);
        assert!(gid_table(&[entry(u32::MAX, 1, 2, 1)], 1).is_empty(), "beyond what an address vector can name");
    }

    #[test]
    fn a_path_begins_at_a_usable_gid_of_the_same_family() {
        let table = gid_table(&[entry(0, 1, 1, 1), entry(1, 1, 2, 1)], 1);
        let to = |ip: &str, index| AddressVector::new(ip.parse::<core::net::IpAddr>().unwrap().into(), index);
        assert!(reaches(&to("10.77.0.2", 1), &table));
        assert!(!reaches(&to("10.77.0.2", 0), &table), "RoCE v1");
        assert!(!reaches(&to("10.77.0.2", 2), &table), "no entry");
        assert!(!reaches(&to("fd77::2", 1), &table), "another family");
        assert!(!reaches(&AddressVector { service_level: 16, ..to("10.77.0.2", 1) }, &table));
        assert!(!reaches(&AddressVector { flow_label: 1 << 20, ..to("10.77.0.2", 1) }, &table));
    }

    #[test]
    fn sizes_beyond_the_device_are_named() {
        assert_eq!(within("depth", 1, 1, 8), Ok(()));
        let refused = VerbsError::InvalidCapability { field: "depth", value: 9, min: 1, max: 8 };
        assert_eq!(within("depth", 9, 1, 8), Err(refused));
        assert!(within("max_sge", 0, 1, 8).is_err());
    }
}
