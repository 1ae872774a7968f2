//! Alternate paths through the front: offered and answered by LAP and APR, loaded into the attached QP.
//!
//! rdma_cm has no calls for them, and Linux ignores a LAP on RoCE: they work between two endpoints of this kind.

use core::net::IpAddr;

use uroce::time::Instant;
use uroce::types::Gid;
use uroce::verbs::{AltPath, PathMigState, QpAttr, QpHandle, Verbs, VerbsError};

use super::address;
use super::software::Cm;
use super::types::{Attempt, EventKind, IdError, IdEvent, IdHandle, STATUS_INVALID, STATUS_TIMED_OUT};
use crate::agent::{CmEvent, PathAnswer, PathOffer};
use crate::comm::Path;
use crate::wire::AprStatus;

impl Cm {
    /// Offers the peer another way for an established connection with an attached QP: from `source`, or the best of our
    /// addresses, to `destination`, which may be the addresses in use (another flow label makes it another way through the
    /// network). ALTERNATE_LOADED follows on both sides once both QPs have it, or ALTERNATE_ERROR here. Only the side that
    /// called `connect` offers.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::NoQp`], [`IdError::AddressNotAvailable`], [`IdError::Cm`].
    pub fn offer_alternate(
        &mut self,
        now: Instant,
        verbs: &dyn Verbs,
        handle: IdHandle,
        source: Option<IpAddr>,
        destination: IpAddr,
    ) -> Result<(), IdError> {
        let id = self.get(handle)?;
        let comm = id.comm("offer_alternate")?;
        let Some(path) = id.path else { return Err(IdError::WrongState("offer_alternate")) };
        id.qp.ok_or(IdError::NoQp)?;
        let chosen = address::choose_source(&verbs.query_gids(), destination, source);
        let (_, local) = chosen.ok_or(IdError::AddressNotAvailable(source.unwrap_or(destination)))?;
        let flow_label = self.fresh_flow_label(path.flow_label);
        let path = Path { local, remote: Gid::from(destination), flow_label, ..path };
        Ok(self.agent.offer_alternate(now, comm, &path, &[])?)
    }

    /// What the agent says of alternate paths.
    pub(super) fn on_path_event(&mut self, verbs: &mut dyn Verbs, event: &CmEvent) {
        match event {
            CmEvent::PathOffered(offer) => self.on_path_offer(verbs, offer),
            CmEvent::PathAnswered(answer) => self.on_path_answer(verbs, answer),
            CmEvent::PathUnanswered { comm, tries, elapsed } => {
                let attempt = Some(Attempt { tries: *tries, elapsed: *elapsed });
                if let Some(id) = self.by_comm.get(comm).copied() {
                    let status = STATUS_TIMED_OUT;
                    self.events.push_back(IdEvent { status, attempt, ..IdEvent::new(id, EventKind::AlternateError) });
                }
            }
            _ => {}
        }
    }

    fn on_path_offer(&mut self, verbs: &mut dyn Verbs, offer: &PathOffer) {
        let handle = self.by_comm.get(&offer.comm).copied();
        let id = handle.and_then(|handle| self.ids.get(handle));
        let found = address::find(&verbs.query_gids(), offer.path.local.ip());
        let (status, info) = match (id, found) {
            (None, _) => (AprStatus::InvalidCommId, None),
            (Some(id), _) if !id.options.accept_alternate => (AprStatus::Rejected, None),
            // What we would have taken: the address in use.
            (Some(id), None) => (AprStatus::InvalidGid, id.gid.map(|(_, gid)| gid.to_bytes())),
            (Some(id), Some((index, _))) => match id.qp.map(|qp| load(verbs, qp, &offer.path, index)) {
                Some(Ok(())) => (AprStatus::Success, None),
                Some(Err(_)) | None => (AprStatus::Unsupported, None),
            },
        };
        let info = info.as_ref().map_or(&[][..], |gid| gid.as_slice());
        // The event is fresh: the offer still waits for an answer, or the connection has gone by itself.
        let answered = self.agent.answer_alternate(offer.comm, status, info, &[]).is_ok();
        if let (Some(handle), AprStatus::Success, true) = (handle, status, answered) {
            self.tell(handle, EventKind::AlternateLoaded, 0);
        }
    }

    fn on_path_answer(&mut self, verbs: &mut dyn Verbs, answer: &PathAnswer) {
        let Some(handle) = self.by_comm.get(&answer.comm).copied() else { return };
        if answer.status != AprStatus::Success {
            self.tell(handle, EventKind::AlternateError, answer.status.code().into());
            return;
        }
        let qp = self.ids.get(handle).and_then(|id| id.qp);
        let found = address::find(&verbs.query_gids(), answer.path.local.ip());
        let loaded = qp.zip(found).is_some_and(|(qp, (index, _))| load(verbs, qp, &answer.path, index).is_ok());
        let (kind, status) =
            if loaded { (EventKind::AlternateLoaded, 0) } else { (EventKind::AlternateError, STATUS_INVALID) };
        self.tell(handle, kind, status);
    }

    /// A QP has taken its alternate path: the connection's messages take it too.
    pub(super) fn on_migrated(&mut self, verbs: &dyn Verbs, handle: IdHandle) {
        let Ok(comm) = self.get(handle).and_then(|id| id.comm("migrated")) else { return };
        // A program that armed its QP by itself has a path that we do not know of.
        if let Ok(path) = self.agent.migrated(comm) {
            let gid = address::find(&verbs.query_gids(), path.local.ip());
            if let Ok(id) = self.get_mut(handle) {
                id.path = Some(path);
                id.gid = gid.or(id.gid);
            }
        }
        self.tell(handle, EventKind::PathMigrated, 0);
    }
}

/// Loads an alternate path into a QP and asks its peer to arm.
fn load(verbs: &mut dyn Verbs, qp: QpHandle, path: &Path, sgid_index: u8) -> Result<(), VerbsError> {
    let alt_path = Some(AltPath::new(path.address_vector(sgid_index), path.ack_timeout));
    let path_mig_state = Some(PathMigState::Rearm);
    verbs.modify_qp(qp, QpAttr { alt_path, path_mig_state, ..QpAttr::default() })
}
