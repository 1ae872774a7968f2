//! What time says.

use uroce::time::Instant;

use super::tables::Timer;
use super::{Agent, CmEvent, DisconnectCause, address_of};
use crate::comm::{CommId, State};
use crate::retry::Due;
use crate::wire::{MadKind, PrivateData, RejectedMessage};

/// Timers handled in one call, so that many at once do not hold up the data path; the rest are due at once.
const TIMERS_PER_CALL: usize = 256;

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
                Some(Timer::TimeWait(id)) => {
                    if let Some(comm) = self.tables.exit_timewait(id) {
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
            // The consumer's time has no end of ours.
            State::ReqRcvd { .. } | State::RepRcvd { .. } | State::Established { .. } => {
                self.tables.set_due(handle, None);
            }
        }
    }

    /// Nobody answered.
    pub(super) fn give_up(&mut self, now: Instant, handle: CommId, kind: MadKind, spent: (u32, uroce::time::Duration)) {
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
