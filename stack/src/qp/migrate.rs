//! Automatic path migration (IBTA Vol 1 17.2.8, paraphrased).
//!
//! Owns the migration state of a connected QP and its alternate path: what a packet's MigReq bit does to it, and what
//! migrating does to the QP. A stranger's packet never moves it: only one along the alternate path makes an armed QP
//! migrate, and only one in sequence along the path in use arms it. After a migration the two paths have changed places:
//! what was still under way on the old one is heard, and arming again makes it the alternate.

use super::cx::Cx;
use super::{Path, Qp, Sender};
use crate::counters::DropReason;
use crate::types::PKey;
use crate::verbs::{AsyncEvent, PathMigState, SourceCheck, SourcePortCheck};
use crate::wire::{Body, Flow, Packet};

/// Migration state of a QP.
#[derive(Debug, Default)]
pub(crate) struct Migration {
    pub(super) state: PathMigState,
    /// The other path. Loaded by a program, or left by a migration.
    pub(super) alternate: Option<Box<Path>>,
    /// A migration along a wrong path was refused and told since the QP was armed: the peer may ask often.
    refused: bool,
}

/// Along which of its paths a packet came.
#[derive(Clone, Copy, Debug)]
struct Came {
    primary: bool,
    alternate: bool,
    mig_req: bool,
    /// It is in sequence: no ghost of earlier times.
    fresh: bool,
}

/// What a packet does to the migration state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing: the packet is looked at.
    Stay,
    /// REARM to ARMED.
    Arm,
    /// Takes the alternate path.
    Migrate,
    /// It asks for a migration that cannot be.
    Refuse,
    /// It came along no path.
    Stranger,
}

/// The state machine.
const fn step(state: PathMigState, came: Came) -> Step {
    let ours = came.primary || came.alternate;
    match state {
        PathMigState::Armed if came.mig_req && came.alternate => Step::Migrate,
        PathMigState::Armed if came.mig_req => Step::Refuse,
        // One that came along the other path may be left over from before that path was left.
        PathMigState::Rearm if came.primary && came.fresh && !came.mig_req => Step::Arm,
        PathMigState::Migrated | PathMigState::Rearm | PathMigState::Armed if ours => Step::Stay,
        PathMigState::Migrated | PathMigState::Rearm | PathMigState::Armed => Step::Stranger,
    }
}

impl Qp {
    /// Whether a packet of a connected QP came along a path of it; follows its MigReq bit.
    #[inline]
    pub(super) fn check_path(&mut self, packet: &Packet<'_>, flow: &Flow, cx: &mut Cx<'_>) -> Result<(), DropReason> {
        let Some(path) = &self.path else { return Err(DropReason::WrongTransport) };
        let primary = path.admits(flow, self.options.source_check);
        if primary && self.migration.state == PathMigState::Migrated {
            path.check(flow, packet.pkey, &self.options)?;
            if self.options.source_port_check == SourcePortCheck::First {
                self.pin(packet, flow);
            }
            return Ok(());
        }
        self.check_either_path(packet, flow, primary, cx)
    }

    /// Whether [`Self::check_path`] finds nothing to refuse, to change or to remember of such a packet: it came along the path
    /// in use, no migration is prepared, and its source port needs not be noted.
    pub(super) fn is_on_path(&self, pkey: PKey, flow: &Flow) -> bool {
        self.path.as_ref().is_some_and(|path| {
            self.migration.state == PathMigState::Migrated
                && path.admits(flow, self.options.source_check)
                && path.check(flow, pkey, &self.options).is_ok()
                && (self.options.source_port_check != SourcePortCheck::First || path.pinned.is_some())
        })
    }

    /// Takes a congestion notification: a hint to whoever sends, and no packet of the connection. Its MigReq bit says
    /// nothing, and its partition key may be the default one, which is what hardware puts there.
    pub(super) fn handle_notification(&self, pkey: PKey, flow: &Flow, cx: &mut Cx<'_>) -> Result<(), DropReason> {
        let Some(path) = &self.path else { return Err(DropReason::WrongTransport) };
        let alternate = self.migration.alternate.as_deref();
        let mut came = core::iter::once(path).chain(alternate).filter(|p| p.admits(flow, self.options.source_check));
        let Some(first) = came.next() else { return Err(DropReason::AddressMismatch) };
        if pkey != PKey::DEFAULT && !core::iter::once(first).chain(came).any(|p| pkey.matches(p.pkey)) {
            return Err(DropReason::PKeyMismatch);
        }
        cx.counters.rp_cnp_ignored += 1;
        Ok(())
    }

    /// The rarer cases: a migration is prepared, or the packet did not come along the path in use.
    fn check_either_path(
        &mut self,
        packet: &Packet<'_>,
        flow: &Flow,
        primary: bool,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        let options = self.options;
        let check = |path: &Path| path.check(flow, packet.pkey, &options);
        let other = self.migration.alternate.as_deref();
        // A lax check of sources lets both paths admit the same: then a packet came along the other one only if it has the
        // very addresses of that one.
        let told_apart = |p: &Path| !primary || p.admits(flow, SourceCheck::Strict);
        let alternate =
            other.is_some_and(|p| p.admits(flow, options.source_check) && told_apart(p) && check(p).is_ok());
        let fit = self.path.as_ref().filter(|_| primary).map(check);
        if let (Some(Err(reason)), false) = (fit, alternate) {
            return Err(reason);
        }
        let primary = fit == Some(Ok(()));
        let came = Came { primary, alternate, mig_req: packet.mig_req, fresh: self.is_fresh(packet) };
        match step(self.migration.state, came) {
            Step::Stay => {}
            Step::Arm => self.set_migration(PathMigState::Armed),
            Step::Migrate => self.migrate(cx),
            Step::Refuse => {
                if !core::mem::replace(&mut self.migration.refused, true) {
                    cx.events.push(AsyncEvent::PathMigrationFailed(self.id.handle));
                }
                return Err(if primary { DropReason::MigrationRefused } else { DropReason::AddressMismatch });
            }
            Step::Stranger => return Err(DropReason::AddressMismatch),
        }
        if options.source_port_check == SourcePortCheck::First && primary {
            self.pin(packet, flow);
        }
        Ok(())
    }

    /// A packet in sequence tells the port that the peer sends from.
    fn pin(&mut self, packet: &Packet<'_>, flow: &Flow) {
        let fresh = self.is_fresh(packet);
        if let Some(path) = &mut self.path
            && path.pinned.is_none()
            && fresh
        {
            path.pinned = Some(flow.src_port);
        }
    }

    /// Whether it is the request that comes next, or answers something that is in flight.
    fn is_fresh(&self, packet: &Packet<'_>) -> bool {
        match (&packet.body, &self.sender) {
            (Body::Request(_), _) => self.expected_psn() == Some(packet.psn),
            (Body::Response(_), Sender::Connected(requester)) => requester.awaits(packet.psn),
            _ => false,
        }
    }

    /// Takes the alternate path: IBTA calls it a migration, whoever asked for it. The path that is left becomes the
    /// alternate. Retries are whole again; what is in flight goes again only when it is missed.
    pub(super) fn migrate(&mut self, cx: &mut Cx<'_>) {
        let (Some(path), Some(alternate)) = (&mut self.path, &mut self.migration.alternate) else { return };
        core::mem::swap(path, alternate);
        let f = &mut self.fields;
        if let Some(alt) = &mut f.alt_path {
            if let Some(av) = &mut f.av {
                core::mem::swap(av, &mut alt.av);
            }
            if let Some(index) = &mut f.pkey_index {
                core::mem::swap(index, &mut alt.pkey_index);
            }
            if let Some(timeout) = &mut f.timeout {
                core::mem::swap(timeout, &mut alt.timeout);
            }
        }
        self.set_migration(PathMigState::Migrated);
        let attr = self.send_attr();
        if let Sender::Connected(requester) = &mut self.sender {
            requester.attr = attr;
            requester.refill_retries();
        }
        cx.events.push(AsyncEvent::PathMigrated(self.id.handle));
    }

    /// Migrates in place of failing, if the QP is armed: everything unacknowledged goes again, along the other path.
    pub(super) fn migrate_instead(&mut self, cx: &mut Cx<'_>) -> bool {
        if self.migration.state != PathMigState::Armed || self.migration.alternate.is_none() {
            return false;
        }
        self.migrate(cx);
        if let Sender::Connected(requester) = &mut self.sender {
            requester.go_back_on_new_path();
        }
        true
    }

    /// Enters `state`; packets say so from now on.
    pub(super) fn set_migration(&mut self, state: PathMigState) {
        self.migration.state = state;
        self.migration.refused = false;
        self.refresh_mig_req();
    }

    /// MigReq as the state, or the program, wants it.
    pub(super) fn refresh_mig_req(&mut self) {
        let bit = self.options.mig_req.unwrap_or(self.migration.state == PathMigState::Migrated);
        for path in self.path.iter_mut().chain(self.migration.alternate.as_deref_mut()) {
            path.mig_req = bit;
        }
    }

    /// A datagram's partition key: that of the QP; QP1 is in every partition of the table (IBTA Vol 1 10.9.3).
    pub(super) fn check_datagram_pkey(&self, pkey: PKey, cx: &Cx<'_>) -> Result<(), DropReason> {
        let member = match self.id.qp_type {
            crate::verbs::QpType::Gsi => cx.pkeys.iter().any(|own| pkey.matches(*own)),
            _ => pkey.matches(self.pkey),
        };
        if member { Ok(()) } else { Err(DropReason::PKeyMismatch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(primary: bool, alternate: bool, mig_req: bool) -> Came {
        Came { primary, alternate, mig_req, fresh: true }
    }

    #[test]
    fn migrated_follows_nobody() {
        use PathMigState::Migrated;
        for mig_req in [false, true] {
            assert_eq!(step(Migrated, came(true, false, mig_req)), Step::Stay);
            assert_eq!(step(Migrated, came(false, true, mig_req)), Step::Stay, "left over on the old path");
            assert_eq!(step(Migrated, came(false, false, mig_req)), Step::Stranger);
        }
    }

    #[test]
    fn rearm_becomes_armed_with_a_fresh_packet_without_the_bit_on_the_path_in_use() {
        use PathMigState::Rearm;
        assert_eq!(step(Rearm, came(true, false, false)), Step::Arm);
        assert_eq!(step(Rearm, came(true, false, true)), Step::Stay, "the peer is still in MIGRATED");
        assert_eq!(step(Rearm, Came { fresh: false, ..came(true, false, false) }), Step::Stay, "a ghost");
        assert_eq!(step(Rearm, came(false, true, false)), Step::Stay);
        assert_eq!(step(Rearm, came(false, false, false)), Step::Stranger);
    }

    #[test]
    fn armed_migrates_along_the_alternate_path_only() {
        use PathMigState::Armed;
        assert_eq!(step(Armed, came(true, false, false)), Step::Stay);
        assert_eq!(step(Armed, came(false, true, false)), Step::Stay);
        assert_eq!(step(Armed, came(false, true, true)), Step::Migrate);
        assert_eq!(step(Armed, came(true, true, true)), Step::Migrate, "both paths have the same addresses");
        // The repeat of a request whose acknowledgement was lost may be the first packet along the new path.
        assert_eq!(step(Armed, Came { fresh: false, ..came(false, true, true) }), Step::Migrate);
        assert_eq!(step(Armed, came(true, false, true)), Step::Refuse);
        assert_eq!(step(Armed, came(false, false, true)), Step::Refuse);
        assert_eq!(step(Armed, came(false, false, false)), Step::Stranger);
    }
}
