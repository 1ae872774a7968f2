//! Alternate paths: LAP and APR, both sides (IBTA Vol 1 12.8).
//!
//! The side that asked for the connection offers; one offer at a time. What a path does to a QP is the consumer's.

use uroce::time::Instant;
use uroce::types::AckTimeout;

use super::receive::Arrived;
use super::types::{PathAnswer, PathOffer};
use super::{Agent, CmError, CmEvent, address_of};
use crate::comm::{Comm, CommId, Incoming, Lap as LapState, Path, Patience, Role, State, Verdict};
use crate::retry::Due;
use crate::wire::{
    Apr, AprStatus, Ari, CmTimeout, Lap, Mad, MadKind, Mra, MraedMessage, PathRecord, PrivateData, TransactionId,
};

impl Agent {
    /// Offers an alternate path to the peer of an established connection that this side asked for. The path's MTU must be
    /// that of the connection, and is not sent. [`CmEvent::PathAnswered`] or [`CmEvent::PathUnanswered`] follows.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`] (not established, or an offer is under way),
    /// [`CmError::NotActive`], [`CmError::PrivateData`] above 168 bytes.
    pub fn offer_alternate(
        &mut self,
        now: Instant,
        handle: CommId,
        path: &Path,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let private_data = PrivateData::new(private_data)?;
        let comm = self.tables.comms.get(handle).ok_or(CmError::InvalidHandle)?;
        let State::Established { lap: LapState::Idle | LapState::Answered { .. }, .. } = comm.state else {
            return Err(CmError::WrongState(comm.state.name()));
        };
        if comm.role != Role::Active {
            return Err(CmError::NotActive);
        }
        let Some(remote_qpn) = comm.remote_qpn else { return Err(CmError::InvalidHandle) };
        let lap = Lap {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            reserved: 0,
            remote_qpn,
            remote_response_timeout: CmTimeout::at_most(self.policy_for(comm).initial),
            local_lid: PathRecord::ROCE_LID,
            remote_lid: PathRecord::ROCE_LID,
            local_gid: path.local,
            remote_gid: path.remote,
            flow_label: path.flow_label,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            packet_rate: 0,
            service_level: path.service_level,
            subnet_local: false,
            ack_timeout: path.ack_timeout.code(),
            private_data,
        };
        let (to, policy) = (address_of(comm), self.policy_for(comm));
        let transaction = TransactionId::new(self.rng.next_u64());
        let (retry, due) = self.send_retrying(now, to, transaction, lap, policy);
        let path = Box::new(Path { mtu: self.tables.comms.get(handle).map_or(path.mtu, |c| c.path.mtu), ..*path });
        self.set_lap(handle, LapState::Sent { retry, path }, Some(due));
        Ok(())
    }

    /// Answers a [`CmEvent::PathOffered`]. With [`AprStatus::Success`] the QP must have the path loaded by now. A repeated
    /// offer gets the same answer again.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`], [`CmError::WrongState`], [`CmError::PrivateData`] above 148 bytes.
    pub fn answer_alternate(
        &mut self,
        handle: CommId,
        status: AprStatus,
        info: &[u8],
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let private_data = PrivateData::new(private_data)?;
        let comm = self.tables.comms.get_mut(handle).ok_or(CmError::InvalidHandle)?;
        let State::Established { lap: LapState::Rcvd { transaction, path, .. }, .. } = &comm.state else {
            return Err(CmError::WrongState(comm.state.name()));
        };
        let (transaction, path) = (*transaction, *path.clone());
        if status == AprStatus::Success {
            comm.alternate = Some(Box::new(path));
        }
        let apr = Apr {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            status,
            info: Ari::new(info),
            private_data,
        };
        let to = address_of(comm);
        let bytes = Mad::new(transaction, apr).emit();
        self.send_bytes(to, MadKind::Apr, bytes);
        self.set_lap(handle, LapState::Answered { transaction, apr: Box::new(bytes) }, None);
        Ok(())
    }

    /// The QP has moved to its alternate path: so do the messages of the connection. The path is used up.
    ///
    /// # Errors
    /// [`CmError::InvalidHandle`]; [`CmError::WrongState`] when no alternate path was agreed on.
    pub fn migrated(&mut self, handle: CommId) -> Result<Path, CmError> {
        let comm = self.tables.comms.get_mut(handle).ok_or(CmError::InvalidHandle)?;
        let path = comm.alternate.take().ok_or(CmError::WrongState(comm.state.name()))?;
        comm.path = *path;
        Ok(*path)
    }

    pub(super) fn on_lap(&mut self, cx: &Arrived<'_>, lap: &Lap) {
        let Some(handle) = self.find(cx, lap.remote_comm_id, lap.local_comm_id) else {
            self.refuse_lap(cx, lap, AprStatus::InvalidCommId);
            return;
        };
        if self.verdict(handle, Incoming::Lap) != Verdict::Offered {
            self.out_of_place(cx);
            return;
        }
        let Some(comm) = self.tables.comms.get(handle) else { return };
        match &comm.state {
            State::Established { lap: LapState::Answered { transaction, apr }, .. }
                if *transaction == cx.transaction() =>
            {
                let (to, bytes) = (address_of(comm), **apr);
                self.out_of_place(cx);
                self.send_bytes(to, MadKind::Apr, bytes);
            }
            State::Established { lap: LapState::Rcvd { transaction, .. }, .. } => {
                let same = *transaction == cx.transaction();
                self.out_of_place(cx);
                if same {
                    self.send_lap_mra(cx.now, handle);
                }
            }
            _ => match check_lap(comm, lap) {
                Ok(path) => self.take_lap(cx, handle, path, lap),
                Err(status) => self.refuse_lap(cx, lap, status),
            },
        }
    }

    fn take_lap(&mut self, cx: &Arrived<'_>, handle: CommId, path: Path, lap: &Lap) {
        if self.events.len() >= self.config.limits.events {
            self.counters.overflows += 1;
            return;
        }
        let deadline = cx.now + self.config.consumer_cap;
        let patience = Patience { mra_sent: false, deadline };
        let due = self.mra_due(cx.now, lap.remote_response_timeout.duration(), &patience);
        let state = LapState::Rcvd { transaction: cx.transaction(), path: Box::new(path), patience };
        self.set_lap(handle, state, Some(due));
        let private_data = lap.private_data;
        self.emit(CmEvent::PathOffered(Box::new(PathOffer { comm: handle, path, private_data })));
    }

    fn refuse_lap(&mut self, cx: &Arrived<'_>, lap: &Lap, status: AprStatus) {
        let apr = Apr {
            local_comm_id: lap.remote_comm_id,
            remote_comm_id: lap.local_comm_id,
            status,
            info: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        };
        self.send(cx.from, cx.transaction(), apr);
    }

    pub(super) fn on_apr(&mut self, cx: &Arrived<'_>, apr: &Apr) {
        let Some(handle) = self.find(cx, apr.remote_comm_id, apr.local_comm_id) else { return };
        let verdict = self.verdict(handle, Incoming::Apr);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let path = match &comm.state {
            State::Established { lap: LapState::Sent { path, retry }, .. }
                if verdict == Verdict::OfferAnswered && retry.transaction() == cx.transaction() =>
            {
                **path
            }
            _ => return self.out_of_place(cx),
        };
        if apr.status == AprStatus::Success {
            comm.alternate = Some(Box::new(path));
        }
        self.set_lap(handle, LapState::Idle, None);
        self.emit(CmEvent::PathAnswered(Box::new(PathAnswer {
            comm: handle,
            path,
            status: apr.status,
            info: apr.info,
            private_data: apr.private_data,
        })));
    }

    /// The timer of an established connection: an offer that was not answered, by the peer or by the consumer.
    pub(super) fn on_lap_due(&mut self, now: Instant, handle: CommId) {
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        let State::Established { lap, .. } = &mut comm.state else { return };
        match lap {
            LapState::Sent { retry, .. } => match retry.on_due(now, &mut self.rng) {
                Due::Resend(next) => {
                    let bytes = *retry.bytes;
                    self.counters.retransmitted += 1;
                    self.send_bytes(to, MadKind::Lap, bytes);
                    self.tables.set_due(handle, Some(next));
                }
                Due::GiveUp { tries, elapsed } => {
                    self.set_lap(handle, LapState::Idle, None);
                    self.emit(CmEvent::PathUnanswered { comm: handle, tries, elapsed });
                }
            },
            LapState::Rcvd { patience, .. } if now >= patience.deadline => {
                // Cannot fail: the offer is there and there are no private data.
                let _ = self.answer_alternate(handle, AprStatus::Rejected, &[], &[]);
            }
            LapState::Rcvd { .. } => self.send_lap_mra(now, handle),
            LapState::Idle | LapState::Answered { .. } => self.tables.set_due(handle, None),
        }
    }

    fn send_lap_mra(&mut self, now: Instant, handle: CommId) {
        let again = self.mra_again(now);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        let State::Established { lap: LapState::Rcvd { transaction, patience, .. }, .. } = &mut comm.state else {
            return;
        };
        patience.mra_sent = true;
        let (transaction, due) = (*transaction, again.min(patience.deadline));
        let mra = Mra {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            message: MraedMessage::Lap,
            service_timeout: self.config.service_timeout,
            private_data: PrivateData::EMPTY,
        };
        self.send(to, transaction, mra);
        self.tables.set_due(handle, Some(due));
    }

    fn set_lap(&mut self, handle: CommId, to: LapState, due: Option<Instant>) {
        if let Some(comm) = self.tables.comms.get_mut(handle)
            && let State::Established { lap, .. } = &mut comm.state
        {
            *lap = to;
        }
        self.tables.set_due(handle, due);
    }
}

/// The path that a LAP offers, seen from this side; or what is wrong with it.
fn check_lap(comm: &Comm, lap: &Lap) -> Result<Path, AprStatus> {
    if comm.role == Role::Active {
        // Only the side that asked for the connection offers.
        return Err(AprStatus::Unsupported);
    }
    if comm.local_qpn != Some(lap.remote_qpn) {
        return Err(AprStatus::InvalidQpn);
    }
    if lap.hop_limit == 0 {
        return Err(AprStatus::InvalidHopLimit);
    }
    if lap.local_gid.is_unspecified() || lap.remote_gid.is_unspecified() {
        return Err(AprStatus::InvalidGid);
    }
    let same_label = lap.flow_label == comm.path.flow_label;
    if (lap.remote_gid, lap.local_gid) == (comm.path.local, comm.path.remote) && same_label {
        return Err(AprStatus::IsCurrent);
    }
    Ok(Path {
        local: lap.remote_gid,
        remote: lap.local_gid,
        flow_label: lap.flow_label,
        traffic_class: lap.traffic_class,
        hop_limit: lap.hop_limit,
        service_level: lap.service_level,
        mtu: comm.path.mtu,
        ack_timeout: match AckTimeout::new(lap.ack_timeout & 31) {
            None | Some(AckTimeout::NEVER) => comm.path.ack_timeout,
            Some(timeout) => timeout,
        },
    })
}
