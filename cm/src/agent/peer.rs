//! Connections between equals: both send a REQ for the same service, and the two cross (IBTA Vol 1 12.10.4).
//!
//! Whose adapter has the greater GUID is active, with equal GUIDs whose QPN is greater; the other becomes passive, and
//! answers with a REP in the communication that its own REQ began. Linux had this once and has removed it.

use uroce::types::Psn;

use super::receive::Arrived;
use super::{Agent, CmEvent, address_of};
use crate::comm::{CommId, Patience, Role, State};
use crate::wire::{RejReason, Req};

impl Agent {
    /// Takes a REQ that meets one of ours. Returns whether it was one.
    pub(super) fn meet(&mut self, cx: &Arrived<'_>, req: &Req) -> bool {
        let Some(handle) = self.tables.rendezvous(req.service_id, cx.from.remote) else { return false };
        let Some(comm) = self.tables.comms.get(handle) else { return false };
        let (State::ReqSent(_), Some(local_qpn)) = (&comm.state, comm.local_qpn) else { return false };
        let (ours, theirs) = ((self.guid, local_qpn.get()), (req.ca_guid, req.local_qpn.get()));
        if ours == theirs || comm.transport != req.transport {
            // Our own REQ come back, or a peer that means something else.
            self.out_of_place(cx);
        } else if ours > theirs {
            self.stay_active(cx, handle);
        } else if let Err(refused) = self.check_req(cx.from, req) {
            self.refuse_req(cx, req, &refused);
        } else {
            self.become_passive(cx, handle, req);
        }
        true
    }

    /// The peer will answer our REQ. If that came too early for it, it is sent again now.
    fn stay_active(&mut self, cx: &Arrived<'_>, handle: CommId) {
        self.out_of_place(cx);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        if let (State::ReqSent(retry), Some(meeting)) = (&comm.state, comm.rendezvous.as_mut())
            && core::mem::take(&mut meeting.unheard)
        {
            let (kind, bytes) = (retry.kind, *retry.bytes);
            self.send_bytes(to, kind, bytes);
        }
    }

    fn become_passive(&mut self, cx: &Arrived<'_>, handle: CommId, req: &Req) {
        if !self.has_room() {
            self.counters.overflows += 1;
            return;
        }
        let Some(request) = self.passive(cx, req, None) else { return };
        self.tables.end_rendezvous(handle);
        let patience = Patience { mra_sent: false, deadline: cx.now + self.config.consumer_cap };
        let due = self.mra_due(cx.now, req.remote_response_timeout.duration(), &patience);
        self.tables.set_state(handle, State::ReqRcvd(patience), Some(due));
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        // All but our id and our QP is as if the peer's REQ had come first.
        let (local_id, local_qpn) = (comm.local_id, comm.local_qpn);
        let state = core::mem::replace(&mut comm.state, State::ReqRcvd(patience));
        *comm = crate::comm::Comm { local_id, local_qpn, state, due: comm.due, rq_psn: Psn::ZERO, ..request };
        debug_assert_eq!(comm.role, Role::Passive);
        self.tables.index(handle);
        if let Some(event) = self.request_event(cx, handle, req, None) {
            self.emit(CmEvent::ConnectRequest(Box::new(event)));
        }
    }

    /// A REJ for a REQ between equals: nobody there yet. The peer may come to it before our retries are over.
    pub(super) fn not_there_yet(&mut self, handle: CommId, reason: RejReason) -> bool {
        let Some(comm) = self.tables.comms.get_mut(handle) else { return false };
        match (&comm.state, comm.rendezvous.as_mut()) {
            (State::ReqSent(_), Some(meeting)) if reason == RejReason::InvalidServiceId => {
                meeting.unheard = true;
                true
            }
            _ => false,
        }
    }
}
