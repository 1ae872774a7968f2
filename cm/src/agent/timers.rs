//! What time says.

use uroce::time::{Duration, Instant};

use super::tables::Timer;
use super::{Agent, CmEvent, DisconnectCause, address_of};
use crate::comm::{CommId, Patience, State};
use crate::retry::Due;
use crate::wire::{MadKind, Mra, MraedMessage, PrivateData, RejReason, RejectedMessage};

/// Timers handled in one call, so that many at once do not hold up the data path; the rest are due at once.
const TIMERS_PER_CALL: usize = 256;
/// An MRA is not sent sooner than this: a consumer that answers at once needs none.
const MRA_LEAST: Duration = Duration::from_millis(1);

impl Agent {
    /// Handles the timers that are due, at most 256 of them.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(policy) = self.policy_mut() {
            policy.handle_timeout(now);
        }
        for _ in 0..TIMERS_PER_CALL {
            if let Some(id) = self.sidr.due_by(now) {
                self.on_service_due(now, id);
                continue;
            }
            match self.tables.due_by(now) {
                None => return,
                Some(Timer::TimeWait) => {
                    if let Some(comm) = self.tables.timewait.exit() {
                        self.emit(CmEvent::TimewaitExit { comm });
                    }
                }
                Some(Timer::Comm(handle)) => self.on_due(now, handle),
            }
        }
    }

    fn on_due(&mut self, now: Instant, handle: CommId) {
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let to = address_of(comm);
        match &mut comm.state {
            State::ReqSent(retry) | State::RepSent(retry) | State::DreqSent(retry) => {
                match retry.on_due(now, &mut self.rng) {
                    Due::Resend(next) => {
                        let (kind, bytes) = (retry.kind, *retry.bytes);
                        self.counters.retransmitted += 1;
                        self.send_bytes(to, kind, bytes);
                        self.tables.set_due(handle, Some(next));
                    }
                    Due::GiveUp { tries, elapsed } => {
                        let kind = retry.kind;
                        self.give_up(now, handle, kind, (tries, elapsed));
                    }
                }
            }
            State::DreqRcvd { transaction } => {
                let (transaction, ids) = (*transaction, (comm.local_id, comm.remote_id));
                self.send_drep(to, transaction, ids, PrivateData::EMPTY);
                self.emit(CmEvent::Disconnected { comm: handle, cause: DisconnectCause::Agreed });
                self.enter_timewait(now, handle);
            }
            State::ReqRcvd(patience) | State::RepRcvd(patience) => {
                if now >= patience.deadline {
                    self.refuse_for_consumer(handle);
                } else {
                    self.send_mra(now, handle);
                }
            }
            State::Established { .. } => self.on_lap_due(now, handle),
        }
    }

    /// When a consumer that thinks needs an MRA: halfway through the time that the peer waits.
    pub(super) fn mra_due(&self, now: Instant, peer_waits: Duration, patience: &Patience) -> Instant {
        (now + (peer_waits / 2).max(MRA_LEAST)).min(patience.deadline)
    }

    /// When the next one is due: well before the time that the last asked for is over.
    pub(super) fn mra_again(&self, now: Instant) -> Instant {
        now + (self.config.service_timeout.duration() * 3 / 4).max(MRA_LEAST)
    }

    /// The consumer still thinks: asks the peer for time.
    pub(super) fn send_mra(&mut self, now: Instant, handle: CommId) {
        let again = self.mra_again(now);
        let Some(comm) = self.tables.comms.get_mut(handle) else { return };
        let (patience, message) = match &mut comm.state {
            State::ReqRcvd(patience) => (patience, MraedMessage::Req),
            State::RepRcvd(patience) => (patience, MraedMessage::Rep),
            _ => return,
        };
        patience.mra_sent = true;
        let due = again.min(patience.deadline);
        let mra = Mra {
            local_comm_id: comm.local_id,
            remote_comm_id: comm.remote_id,
            message,
            service_timeout: self.config.service_timeout,
            private_data: PrivateData::EMPTY,
        };
        let (to, transaction) = (address_of(comm), comm.transaction);
        self.send(to, transaction, mra);
        self.tables.set_due(handle, Some(due));
    }

    /// The consumer's time is over: the peer hears that nobody answers, and so does the consumer.
    fn refuse_for_consumer(&mut self, handle: CommId) {
        let Some(comm) = self.tables.comms.get(handle) else { return };
        let message = if comm.state.is_pending() { RejectedMessage::Req } else { RejectedMessage::Rep };
        let (rej, to, transaction) = (self.gave_up(comm, message), address_of(comm), comm.transaction);
        self.send(to, transaction, rej);
        self.reject_locally(handle, message, RejReason::Timeout, rej.ari);
        self.tables.remove(handle);
    }

    /// Nobody answered.
    pub(super) fn give_up(&mut self, now: Instant, handle: CommId, kind: MadKind, spent: (u32, Duration)) {
        let (tries, elapsed) = spent;
        if kind == MadKind::Dreq {
            let cause = DisconnectCause::NoAnswer { tries, elapsed };
            self.emit(CmEvent::Disconnected { comm: handle, cause });
            self.enter_timewait(now, handle);
            return;
        }
        self.emit(CmEvent::Unreachable { comm: handle, message: kind, tries, elapsed });
        let Some(comm) = self.tables.remove(handle) else { return };
        let refused = if kind == MadKind::Rep { RejectedMessage::Rep } else { RejectedMessage::Other };
        let rej = self.gave_up(&comm, refused);
        self.send(address_of(&comm), comm.transaction, rej);
    }
}
