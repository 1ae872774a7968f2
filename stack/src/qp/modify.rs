//! Modifying a QP: the state table applied.
//!
//! Owns the check of a modify against the table and the device's limits, and what each transition does. A refused
//! modify changes nothing.

use core::net::IpAddr;

use super::answers::MAX_RD_ATOMIC;
use super::cx::Cx;
use super::requester::SendAttr;
use super::{Path, Qp, Receiver, Sender};
use crate::burst::choose_source_port;
use crate::time::Duration;
use crate::types::{AckTimeout, Gid, PKey, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use crate::verbs::{
    AccessFlags, AddressVector, Attr, ErrorDetail, FailureKind, ModifyError, PathMigState, QpAttr, QpState, WcStatus,
    check_transition,
};
use crate::wire::{self, Flow};

/// What the device allows.
#[derive(Clone, Copy, Debug)]
pub struct ModifyLimits<'a> {
    /// The GID table.
    pub gids: &'a [Gid],
    /// The largest path MTU.
    pub path_mtu: PathMtu,
}

/// Attributes that were set so far.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // The attribute of the same name in `QpAttr`.
pub struct QpFields {
    pub access: Option<AccessFlags>,
    pub pkey_index: Option<u16>,
    pub port: Option<u8>,
    pub qkey: Option<QKey>,
    pub av: Option<AddressVector>,
    pub path_mtu: Option<PathMtu>,
    pub timeout: Option<AckTimeout>,
    pub retry_count: Option<RetryCount>,
    pub rnr_retry: Option<RnrRetry>,
    pub rq_psn: Option<Psn>,
    pub max_rd_atomic: Option<u8>,
    pub min_rnr_timer: Option<RnrTimer>,
    pub sq_psn: Option<Psn>,
    pub max_dest_rd_atomic: Option<u8>,
    pub dest_qpn: Option<Qpn>,
}

impl QpFields {
    fn apply(&mut self, a: &QpAttr) {
        self.access = a.access.or(self.access);
        self.pkey_index = a.pkey_index.or(self.pkey_index);
        self.port = a.port.or(self.port);
        self.qkey = a.qkey.or(self.qkey);
        self.av = a.av.or(self.av);
        self.path_mtu = a.path_mtu.or(self.path_mtu);
        self.timeout = a.timeout.or(self.timeout);
        self.retry_count = a.retry_count.or(self.retry_count);
        self.rnr_retry = a.rnr_retry.or(self.rnr_retry);
        self.rq_psn = a.rq_psn.or(self.rq_psn);
        self.max_rd_atomic = a.max_rd_atomic.or(self.max_rd_atomic);
        self.min_rnr_timer = a.min_rnr_timer.or(self.min_rnr_timer);
        self.sq_psn = a.sq_psn.or(self.sq_psn);
        self.max_dest_rd_atomic = a.max_dest_rd_atomic.or(self.max_dest_rd_atomic);
        self.dest_qpn = a.dest_qpn.or(self.dest_qpn);
    }

    /// As a query gives them.
    #[must_use]
    pub fn to_attr(self, state: QpState) -> QpAttr {
        QpAttr {
            state: Some(state),
            access: self.access,
            pkey_index: self.pkey_index,
            port: self.port,
            qkey: self.qkey,
            av: self.av,
            path_mtu: self.path_mtu,
            timeout: self.timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            rq_psn: self.rq_psn,
            max_rd_atomic: self.max_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            sq_psn: self.sq_psn,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            dest_qpn: self.dest_qpn,
            path_mig_state: Some(PathMigState::Migrated),
            ..QpAttr::default()
        }
    }
}

impl Qp {
    /// Applies a modify.
    ///
    /// # Errors
    /// [`ModifyError`]; nothing changed then.
    pub fn modify(&mut self, attr: &QpAttr, limits: &ModifyLimits<'_>, cx: &mut Cx<'_>) -> Result<(), ModifyError> {
        let from = self.state;
        let to = check_transition(self.id.qp_type, from, attr)?;
        check_values(attr, limits)?;
        let mut fields = self.fields;
        fields.apply(attr);
        let path = match fields.av {
            Some(av) if attr.av.is_some() => Some(self.path_for(&fields, &av, limits, cx.source_ports)?),
            _ => self.path,
        };
        self.fields = fields;
        self.path = path;
        self.enter(from, to, attr, cx);
        Ok(())
    }

    fn path_for(
        &self,
        fields: &QpFields,
        av: &AddressVector,
        limits: &ModifyLimits<'_>,
        ports: &[u16],
    ) -> Result<Path, ModifyError> {
        let flow = flow_for(av, limits.gids).ok_or(ModifyError::OutOfRange { attr: Attr::Av })?;
        let dest_qpn = fields.dest_qpn.unwrap_or_default();
        let formula = || choose_source_port(ports, wire::udp_source_port(av.flow_label, self.id.qpn, dest_qpn));
        let src_port = av.udp_source_port.unwrap_or_else(formula);
        let mtu = fields.path_mtu.unwrap_or(PathMtu::B256);
        Ok(Path { flow: Flow { src_port, ..flow }, dest_qpn, pkey: PKey::DEFAULT, mtu })
    }

    /// What the transition does.
    fn enter(&mut self, from: QpState, to: QpState, attr: &QpAttr, cx: &mut Cx<'_>) {
        if to == QpState::Err {
            let (kind, status) = (FailureKind::Flushed, WcStatus::WorkRequestFlushed);
            let psn = self.info().queues.unacked_psn;
            self.enter_error(ErrorDetail { kind, status, psn, tries: 0, elapsed: Duration::ZERO }, None, false, cx);
            return;
        }
        if to == QpState::Reset {
            self.reset();
        }
        match (from, to) {
            // Another thread may have posted while the QP was being reset.
            (QpState::Reset, QpState::Init) => self.discard_posted(),
            (QpState::Init, QpState::Rtr) => self.start_receiving(),
            (QpState::Rtr, QpState::Rts) => self.start_sending(),
            _ => {}
        }
        self.refresh();
        if let Sender::Connected(r) = &mut self.sender {
            r.set_draining(to == QpState::Sqd);
        }
        if to == QpState::Sqd && from == QpState::Rts {
            self.notify_drained = attr.sqd_async_notify.unwrap_or(false);
        }
        self.set_state(to);
        self.check_drained(cx);
    }

    fn reset(&mut self) {
        self.fields = QpFields::default();
        self.path = None;
        self.last_error = None;
        self.established = false;
        self.notify_drained = false;
        self.discard_posted();
        if let Sender::Connected(r) = &mut self.sender {
            r.reset();
        }
    }

    /// Forgets everything posted, without completions.
    fn discard_posted(&mut self) {
        match &mut self.sender {
            Sender::Connected(r) => {
                while r.queue.pop().is_some() {}
                while r.queue.discard().is_some() {}
            }
            Sender::Datagram(d) => while d.queue.discard().is_some() {},
        }
        match &mut self.receiver {
            Receiver::Rc(r) => r.reset(),
            Receiver::Uc(r) => r.reset(),
            Receiver::Ud(rq) => rq.discard(),
        }
    }

    fn start_receiving(&mut self) {
        let f = self.fields;
        self.id.mtu = f.path_mtu.unwrap_or(PathMtu::B4096);
        let psn = f.rq_psn.unwrap_or_default();
        match &mut self.receiver {
            Receiver::Rc(r) => {
                let timer = f.min_rnr_timer.unwrap_or(RnrTimer::DEFAULT);
                r.start(psn, f.max_dest_rd_atomic.unwrap_or(0), timer);
            }
            Receiver::Uc(r) => r.start(psn),
            Receiver::Ud(_) => {}
        }
    }

    fn start_sending(&mut self) {
        let psn = self.fields.sq_psn.unwrap_or_default();
        let attr = self.send_attr();
        match &mut self.sender {
            Sender::Connected(r) => r.start(psn, attr),
            Sender::Datagram(d) => d.start(psn),
        }
    }

    fn send_attr(&self) -> SendAttr {
        let f = &self.fields;
        SendAttr {
            timeout: f.timeout.unwrap_or(AckTimeout::NEVER),
            retry_count: f.retry_count.unwrap_or(RetryCount::MAX),
            rnr_retry: f.rnr_retry.unwrap_or(RnrRetry::FOREVER),
            max_rd_atomic: f.max_rd_atomic.unwrap_or(0),
        }
    }

    /// Hands changed attributes to both sides.
    fn refresh(&mut self) {
        let f = self.fields;
        let attr = self.send_attr();
        if let Sender::Connected(r) = &mut self.sender {
            r.attr = attr;
        }
        let access = f.access.unwrap_or_default();
        match &mut self.receiver {
            Receiver::Rc(r) => {
                r.assembly.access = access;
                r.set_min_rnr(f.min_rnr_timer.unwrap_or(RnrTimer::DEFAULT));
                r.set_depth(f.max_dest_rd_atomic.unwrap_or(0));
            }
            Receiver::Uc(r) => r.assembly.access = access,
            Receiver::Ud(_) => {}
        }
    }
}

/// The flow of an address vector, its source port 0. `None` when its GID index or families are wrong.
#[must_use]
pub(crate) fn flow_for(av: &AddressVector, gids: &[Gid]) -> Option<Flow> {
    let src = gids.get(usize::from(av.sgid_index))?.ip();
    let dst = av.dgid.ip();
    if src.is_ipv4() != dst.is_ipv4() || av.dgid.is_unspecified() {
        return None;
    }
    let flow_label = match dst {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) => av.flow_label,
    };
    Some(Flow {
        src,
        dst,
        src_port: 0,
        traffic_class: av.traffic_class,
        hop_limit: av.hop_limit,
        flow_label,
        vlan: None,
    })
}

fn check_values(attr: &QpAttr, limits: &ModifyLimits<'_>) -> Result<(), ModifyError> {
    let range = |ok: bool, attr| if ok { Ok(()) } else { Err(ModifyError::OutOfRange { attr }) };
    let depth = |v: Option<u8>| v.is_none_or(|v| usize::from(v) <= MAX_RD_ATOMIC);
    if attr.alt_path.is_some() {
        return Err(ModifyError::Unsupported { attr: Attr::AltPath });
    }
    if attr.path_mig_state.is_some_and(|s| s != PathMigState::Migrated) {
        return Err(ModifyError::Unsupported { attr: Attr::PathMigState });
    }
    range(attr.port.is_none_or(|p| p == 1), Attr::Port)?;
    range(attr.pkey_index.is_none_or(|i| i == 0), Attr::PKeyIndex)?;
    range(attr.path_mtu.is_none_or(|m| m <= limits.path_mtu), Attr::PathMtu)?;
    range(depth(attr.max_rd_atomic), Attr::MaxRdAtomic)?;
    range(depth(attr.max_dest_rd_atomic), Attr::MaxDestRdAtomic)?;
    range(attr.dest_qpn.is_none_or(|q| q != Qpn::MULTICAST), Attr::DestQpn)?;
    let av_ok = attr
        .av
        .is_none_or(|av| av.service_level < 16 && av.flow_label < 1 << 20 && flow_for(&av, limits.gids).is_some());
    range(av_ok, Attr::Av)
}
