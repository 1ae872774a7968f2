//! REPs and RTUs.

use uroce::types::{Qpn, RnrRetry};

use super::gate::Outcome;
use super::receive::{Arrived, Refused};
use super::{Agent, CmEvent, Reply};
use crate::comm::{CommId, Incoming, Lap, Patience, State, Verdict};
use crate::wire::{PrivateData, Rej, RejInfo, RejReason, RejectedMessage, Rep, Rtu, TransportService};

impl Agent {
    pub(super) fn on_rep(&mut self, cx: &Arrived<'_>, rep: &Rep) {
        let Some(handle) = self.find(cx, rep.remote_comm_id, rep.local_comm_id) else {
            if self.tables.by_local_id(rep.remote_comm_id).is_none() {
                self.refuse_rep(cx, rep, &RejReason::InvalidCommId.into());
            }
            return;
        };
        if self.verdict(handle, Incoming::Rep) != Verdict::Answered {
            self.on_duplicate(cx, handle, Incoming::Rep);
            return;
        }
        let checked = self.check_rep(handle, rep).and_then(|()| self.check_stale(cx, (rep.ca_guid, rep.local_qpn)));
        if let Err(refused) = checked {
            let (reason, ari) = (refused.reason, refused.ari);
            self.refuse_rep(cx, rep, &refused);
            self.reject_locally(handle, RejectedMessage::Rep, reason, ari);
            self.tables.remove(handle);
            return;
        }
        self.take_rep(cx, handle, rep);
    }

    fn refuse_rep(&mut self, cx: &Arrived<'_>, rep: &Rep, refused: &Refused) {
        self.note(cx, Outcome::Refused(refused.reason));
        let rej = Rej {
            local_comm_id: rep.remote_comm_id,
            remote_comm_id: rep.local_comm_id,
            message: RejectedMessage::Rep,
            reason: refused.reason,
            ari: refused.ari,
            private_data: PrivateData::EMPTY,
        };
        self.send(cx.from, cx.transaction(), rej);
    }

    fn check_rep(&self, handle: CommId, rep: &Rep) -> Result<(), Refused> {
        let Some(comm) = self.tables.comms.get(handle) else { return Err(RejReason::InvalidCommId.into()) };
        if rep.local_qpn.get() <= Qpn::GSI.get() || rep.local_qpn == Qpn::MULTICAST {
            return Err(RejReason::NoQp.into());
        }
        // A peer that wants more than our REQ offered is served as far as we can: some programs put their own figure
        // into the REP, and Linux takes it.
        let most = self.config.max_responder_resources;
        if comm.transport == TransportService::Rc && rep.initiator_depth > most.max(comm.responder_resources) {
            return Err(Refused::new(RejReason::InsufficientResponderResources, RejInfo::ResponderResources(most)));
        }
        Ok(())
    }

    /// The REP answers our REQ.
    fn take_rep(&mut self, cx: &Arrived<'_>, handle: CommId, rep: &Rep) {
        self.tables.end_rendezvous(handle);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        comm.remote_id = rep.local_comm_id;
        comm.remote_guid = Some(rep.ca_guid);
        comm.remote_qpn = Some(rep.local_qpn);
        comm.sq_psn = rep.starting_psn;
        comm.initiator_depth = comm.initiator_depth.min(rep.responder_resources);
        comm.responder_resources = comm.responder_resources.max(rep.initiator_depth);
        comm.remote_srq = rep.srq;
        // The REP says how long the peer wants to be asked for receives.
        comm.rnr_retry = RnrRetry::new(rep.rnr_retry_count).unwrap_or(comm.rnr_retry);
        // The alternate path that we offered, unless the peer cannot or will not have it.
        comm.alternate = comm.alternate.take().filter(|_| rep.failover_accepted == 0);
        let terms = comm.terms();
        let patience = Patience { mra_sent: false, deadline: cx.now + self.config.consumer_cap };
        let due = self.mra_due(cx.now, self.config.response_timeout.duration(), &patience);
        self.tables.set_state(handle, State::RepRcvd(patience), Some(due));
        self.tables.index(handle);
        if let Some(terms) = terms {
            self.emit(CmEvent::Reply(Box::new(Reply {
                comm: handle,
                terms,
                responder_resources: rep.initiator_depth,
                initiator_depth: rep.responder_resources,
                flow_control: rep.flow_control,
                private_data: rep.private_data,
            })));
        }
    }

    pub(super) fn on_rtu(&mut self, cx: &Arrived<'_>, rtu: &Rtu) {
        let Some(handle) = self.find(cx, rtu.remote_comm_id, rtu.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Rtu) == Verdict::Establish {
            self.tables.set_state(handle, State::Established { rtu: None, lap: Lap::Idle }, None);
            self.emit(CmEvent::Established { comm: handle, private_data: Box::new(rtu.private_data) });
        } else {
            self.out_of_place(cx);
        }
    }
}
