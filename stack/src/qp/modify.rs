//! Modifying a QP: the state table applied.
//!
//! Owns the check of a modify against the table and the device's limits, and what each transition does. A refused
//! modify changes nothing.

use super::answers::MAX_RD_ATOMIC;
use super::cx::Cx;
use super::migrate::Migration;
use super::notify::Notifier;
use super::path::{Path, PathEnds, flow_for};
use super::requester::SendAttr;
use super::window::Window;
use super::{Qp, Receiver, Sender};
use crate::time::Duration;
use crate::types::{AckTimeout, Gid, PKey, PathMtu, Psn, QKey, Qpn, RetryCount, RnrRetry, RnrTimer};
use crate::verbs::{
    AccessFlags, AddressVector, AltPath, Attr, ErrorDetail, FailureKind, ModifyError, PathMigState, QpAttr, QpState,
    QpType, SourcePort, WcStatus, check_transition,
};

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
    pub alt_path: Option<AltPath>,
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
        self.alt_path = a.alt_path.or(self.alt_path);
    }

    /// As a query gives them.
    #[must_use]
    pub fn to_attr(self, state: QpState, path_mig_state: PathMigState) -> QpAttr {
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
            alt_path: self.alt_path,
            path_mig_state: Some(path_mig_state),
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
        check_values(attr, self.id.qp_type, limits, cx.pkeys)?;
        self.check_migration(attr, from, to)?;
        self.fields.apply(attr);
        self.take_paths(attr, limits, cx);
        self.enter(from, to, attr, cx);
        Ok(())
    }

    /// The state machine of IBTA Vol 1 17.2.8: a program asks for REARM with an alternate path loaded, and for MIGRATED
    /// while armed and in RTS. ARMED is for the QP itself to reach.
    fn check_migration(&self, attr: &QpAttr, from: QpState, to: QpState) -> Result<(), ModifyError> {
        let allowed = match attr.path_mig_state {
            None => true,
            Some(PathMigState::Armed) => false,
            Some(PathMigState::Rearm) => attr.alt_path.is_some() || self.migration.alternate.is_some(),
            Some(PathMigState::Migrated) => match self.migration.state {
                PathMigState::Migrated => true,
                PathMigState::Armed => (from, to) == (QpState::Rts, QpState::Rts),
                PathMigState::Rearm => false,
            },
        };
        if allowed { Ok(()) } else { Err(ModifyError::OutOfRange { attr: Attr::PathMigState }) }
    }

    /// Makes the paths that a modify describes. Its values were checked.
    fn take_paths(&mut self, attr: &QpAttr, limits: &ModifyLimits<'_>, cx: &mut Cx<'_>) {
        let f = self.fields;
        let mut make = |av: &AddressVector, pkey_index: u16| {
            let ends = PathEnds {
                qpn: self.id.qpn,
                dest_qpn: f.dest_qpn.unwrap_or_default(),
                pkey: pkey_at(cx.pkeys, pkey_index)?,
                mtu: f.path_mtu.unwrap_or(PathMtu::B256),
            };
            Path::new(av, &ends, limits.gids, cx.source_ports, cx.rng)
        };
        let pkey_index = f.pkey_index.unwrap_or(0);
        let primary = attr.av.and_then(|av| make(&av, pkey_index));
        let alternate = attr.alt_path.and_then(|alt| make(&alt.av, alt.pkey_index));
        self.path = primary.or(self.path);
        if let Some(path) = alternate {
            self.migration.alternate = Some(Box::new(path));
        }
        self.pkey = pkey_at(cx.pkeys, pkey_index).unwrap_or(self.pkey);
        if let (Some(path), Some(_)) = (&mut self.path, attr.pkey_index) {
            path.pkey = self.pkey;
        }
        self.refresh_mig_req();
    }

    /// What the transition does.
    fn enter(&mut self, from: QpState, to: QpState, attr: &QpAttr, cx: &mut Cx<'_>) {
        if to == QpState::Err {
            let (kind, status) = (FailureKind::Flushed, WcStatus::WorkRequestFlushed);
            let psn = self.info().queues.unacked_psn;
            self.enter_error(
                ErrorDetail { kind, status, psn, tries: 0, elapsed: Duration::ZERO, request: None },
                None,
                false,
                cx,
            );
            return;
        }
        if to == QpState::Reset {
            self.reset();
            // Bound for the peer that was; the next one has no claim to them.
            cx.mrs.release_qp(self.id.handle);
        }
        match (from, to) {
            // Another thread may have posted while the QP was being reset.
            (QpState::Reset, QpState::Init) => self.discard_posted(),
            (QpState::Init, QpState::Rtr) => self.start_receiving(),
            (QpState::Rtr, QpState::Rts) => self.start_sending(),
            _ => {}
        }
        self.refresh();
        match attr.path_mig_state {
            Some(PathMigState::Rearm) => self.set_migration(PathMigState::Rearm),
            Some(PathMigState::Migrated) if self.migration.state == PathMigState::Armed => self.migrate(cx),
            _ => {}
        }
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
        self.migration = Migration::default();
        self.notifier = Notifier::default();
        self.pkey = PKey::DEFAULT;
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
            Sender::Datagram(d) => d.discard(),
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
                r.start(psn, f.max_dest_rd_atomic.unwrap_or(0));
            }
            Receiver::Uc(r) => r.start(psn),
            Receiver::Ud(_) => {}
        }
    }

    fn start_sending(&mut self) {
        let psn = self.fields.sq_psn.unwrap_or_default();
        let attr = self.send_attr();
        let window = Window::new(self.options.max_in_flight, self.id.mtu);
        match &mut self.sender {
            Sender::Connected(r) => r.start(psn, attr, window),
            Sender::Datagram(d) => d.start(psn),
        }
    }

    pub(super) fn send_attr(&self) -> SendAttr {
        let f = &self.fields;
        SendAttr {
            timeout: f.timeout.unwrap_or(AckTimeout::NEVER),
            retry_count: f.retry_count.unwrap_or(RetryCount::MAX),
            rnr_retry: f.rnr_retry.unwrap_or(RnrRetry::FOREVER),
            max_rd_atomic: f.max_rd_atomic.unwrap_or(0),
            max_rnr_wait: self.options.max_rnr_wait,
        }
    }

    /// Hands changed attributes to both sides.
    pub(super) fn refresh(&mut self) {
        let (f, o) = (self.fields, self.options);
        let attr = self.send_attr();
        if let Sender::Connected(r) = &mut self.sender {
            r.attr = attr;
        }
        let access = f.access.unwrap_or_default();
        match &mut self.receiver {
            Receiver::Rc(r) => {
                r.assembly.access = access;
                r.set_rnr(f.min_rnr_timer.unwrap_or(RnrTimer::DEFAULT), o.rnr_timer_max);
                r.credits = o.credits && self.id.srq.is_none();
                r.max_read_bytes = o.max_read_bytes;
                r.set_depth(f.max_dest_rd_atomic.unwrap_or(0));
            }
            Receiver::Uc(r) => r.assembly.access = access,
            Receiver::Ud(_) => {}
        }
    }
}

/// The partition key at `index`: one that names a partition, as 0 does not.
pub(crate) fn pkey_at(pkeys: &[PKey], index: u16) -> Option<PKey> {
    pkeys.get(usize::from(index)).copied().filter(|key| key.get() & 0x7FFF != 0)
}

fn check_values(attr: &QpAttr, qp_type: QpType, limits: &ModifyLimits<'_>, pkeys: &[PKey]) -> Result<(), ModifyError> {
    let range = |ok: bool, attr| if ok { Ok(()) } else { Err(ModifyError::OutOfRange { attr }) };
    let depth = |v: Option<u8>| v.is_none_or(|v| usize::from(v) <= MAX_RD_ATOMIC);
    let pkey = |index: u16| pkey_at(pkeys, index).is_some();
    let av = |av: &AddressVector| {
        av.service_level < 16
            && av.flow_label < 1 << 20
            && av.pkey_index.is_none()
            && (av.udp_source_port != SourcePort::Rotating || qp_type == QpType::Rc)
            && flow_for(av, limits.gids).is_some()
    };
    range(attr.port.is_none_or(|p| p == 1), Attr::Port)?;
    range(attr.pkey_index.is_none_or(pkey), Attr::PKeyIndex)?;
    range(attr.path_mtu.is_none_or(|m| m <= limits.path_mtu), Attr::PathMtu)?;
    range(depth(attr.max_rd_atomic), Attr::MaxRdAtomic)?;
    range(depth(attr.max_dest_rd_atomic), Attr::MaxDestRdAtomic)?;
    range(attr.dest_qpn.is_none_or(|q| q != Qpn::MULTICAST), Attr::DestQpn)?;
    range(attr.av.is_none_or(|a| av(&a)), Attr::Av)?;
    range(attr.alt_path.is_none_or(|alt| alt.port == 1 && pkey(alt.pkey_index) && av(&alt.av)), Attr::AltPath)
}
