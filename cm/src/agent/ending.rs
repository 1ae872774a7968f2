//! How a connection ends: DREQ, DREP, TIMEWAIT.

use uroce::time::{Duration, Instant};
use uroce::types::AckTimeout;

use super::receive::Arrived;
use super::{Agent, CmEvent, DisconnectCause, MadAddress, address_of};
use crate::comm::{CommId, Incoming, State, Verdict};
use crate::wire::{CommunicationId, Drep, Dreq, PrivateData, TransactionId};

/// How long a QP waits when its connection names no ACK timeout.
const TIMEWAIT_WITHOUT_ACK_TIMEOUT: Duration = Duration::from_millis(500);

impl Agent {
    pub(super) fn on_dreq(&mut self, cx: &Arrived<'_>, dreq: &Dreq) {
        let (now, from, transaction) = (cx.now, cx.from, cx.transaction());
        let found = self.find(cx, dreq.remote_comm_id, dreq.local_comm_id);
        // Before its REP is here, the peer's connection is as unknown to us as a forgotten one.
        let is_known = |h: &CommId| self.tables.comms.get(*h).is_some_and(|c| c.remote_qpn.is_some());
        let Some(handle) = found.filter(is_known) else {
            // A connection that we have forgotten, or that waits: the peer shall not ask in vain.
            let ids = (dreq.remote_comm_id, dreq.local_comm_id);
            self.send_drep(from, transaction, ids, PrivateData::EMPTY);
            return;
        };
        let Some(comm) = self.tables.comms.get(handle) else { return };
        if comm.local_qpn != Some(dreq.remote_qpn) {
            self.unmatched(cx);
            return;
        }
        let ids = (comm.local_id, comm.remote_id);
        match self.verdict(handle, Incoming::Dreq) {
            Verdict::Disconnect => {
                let due = now + self.config.drep_delay;
                self.tables.set_state(handle, State::DreqRcvd { transaction }, Some(due));
                let private_data = Box::new(dreq.private_data);
                self.emit(CmEvent::DisconnectRequested { comm: handle, private_data });
            }
            Verdict::CrossedDisconnect => {
                self.send_drep(from, transaction, ids, PrivateData::EMPTY);
                self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
                self.enter_timewait(now, handle);
            }
            _ => self.out_of_place(cx),
        }
    }

    pub(super) fn on_drep(&mut self, cx: &Arrived<'_>, drep: &Drep) {
        let Some(handle) = self.find(cx, drep.remote_comm_id, drep.local_comm_id) else { return };
        if self.verdict(handle, Incoming::Drep) == Verdict::Disconnected {
            self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
            self.enter_timewait(cx.now, handle);
        } else {
            self.out_of_place(cx);
        }
    }

    /// Ends a communication; its QP waits as long as packets of the old connection may live.
    pub(super) fn enter_timewait(&mut self, now: Instant, handle: CommId) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        let wait = timewait_of(comm.path.ack_timeout).min(self.config.timewait_cap);
        if let Some(forgotten) = self.tables.enter_timewait(handle, now + wait) {
            self.counters.timewait_evicted += 1;
            self.emit(CmEvent::TimewaitExit { comm: forgotten });
        }
    }

    /// Sends a DREQ on an established connection, for the consumer or because the peer has forgotten it.
    pub(super) fn start_disconnect(&mut self, now: Instant, handle: CommId, private_data: PrivateData<220>) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        let Some(remote_qpn) = comm.remote_qpn else { return };
        let dreq = Dreq {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            remote_qpn,
            reserved: 0,
            private_data,
        };
        let (to, policy) = (address_of(comm), self.policy_for(comm));
        let transaction = TransactionId::new(self.rng.next_u64());
        let (retry, due) = self.send_retrying(now, to, transaction, dreq, policy);
        self.tables.set_state(handle, State::DreqSent(retry), Some(due));
    }

    /// Answers a DREQ.
    pub(super) fn send_drep(
        &mut self,
        to: MadAddress,
        transaction: TransactionId,
        ids: (CommunicationId, CommunicationId),
        private_data: PrivateData<224>,
    ) {
        let (local_comm_id, remote_comm_id) = ids;
        self.send(to, transaction, Drep { local_comm_id, remote_comm_id, private_data });
    }
}

/// The local ACK timeout covers twice the packet lifetime and the peer's ACK delay, which is what TIMEWAIT lasts
/// (IBTA Vol 1 12.9.8.4).
fn timewait_of(ack_timeout: AckTimeout) -> Duration {
    ack_timeout.duration().unwrap_or(TIMEWAIT_WITHOUT_ACK_TIMEOUT)
}
