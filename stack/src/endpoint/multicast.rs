//! Multicast memberships of an endpoint's UD QPs.
//!
//! Owns which QP is attached to which group, and what the device has not been told of yet. Never joins anything itself: a
//! driver takes the changes to the device.

use std::collections::VecDeque;

use super::MAX_MULTICAST;
use crate::types::Gid;
use crate::verbs::QpHandle;

/// A change of what the device shall receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MembershipChange {
    /// The group.
    pub group: Gid,
    /// Joined, or left.
    pub member: bool,
}

/// Memberships. At most [`MAX_MULTICAST`], so the list is walked.
#[derive(Debug, Default)]
pub(super) struct Groups {
    members: Vec<(Gid, QpHandle)>,
    /// At most one for each group: a change that undoes one that nobody took yet only removes that one.
    changes: VecDeque<MembershipChange>,
}

impl Groups {
    /// Whether the QP is attached to the group.
    pub(super) fn contains(&self, group: Gid, qp: QpHandle) -> bool {
        self.members.contains(&(group, qp))
    }

    /// Whether the device has not been told of a change yet.
    pub(super) fn has_change(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.members.len() >= MAX_MULTICAST
    }

    /// The member at `index` of the list, if it is one of `group`; the end of the list is an error.
    pub(super) fn member(&self, index: usize) -> Option<(Gid, QpHandle)> {
        self.members.get(index).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn attach(&mut self, group: Gid, qp: QpHandle) {
        if !self.has(group) {
            self.change(group, true);
        }
        self.members.push((group, qp));
    }

    /// Says whether it was attached.
    pub(super) fn detach(&mut self, group: Gid, qp: QpHandle) -> bool {
        let Some(at) = self.members.iter().position(|m| *m == (group, qp)) else { return false };
        self.members.remove(at);
        if !self.has(group) {
            self.change(group, false);
        }
        true
    }

    /// Detaches it from every group.
    pub(super) fn forget(&mut self, qp: QpHandle) {
        while let Some((group, _)) = self.members.iter().find(|(_, member)| *member == qp).copied() {
            self.detach(group, qp);
        }
    }

    /// The oldest change that was not taken.
    pub(super) fn poll_change(&mut self) -> Option<MembershipChange> {
        self.changes.pop_front()
    }

    fn has(&self, group: Gid) -> bool {
        self.members.iter().any(|(of, _)| *of == group)
    }

    fn change(&mut self, group: Gid, member: bool) {
        match self.changes.iter().position(|c| c.group == group) {
            Some(at) => drop(self.changes.remove(at)),
            None => self.changes.push_back(MembershipChange { group, member }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Slab;
    use crate::verbs::kind;

    fn group(n: u8) -> Gid {
        Gid::from(std::net::Ipv4Addr::new(239, 0, 0, n))
    }

    #[test]
    fn the_device_hears_of_the_first_member_and_of_the_last() {
        let mut qps: Slab<kind::Qp, ()> = Slab::new(2);
        let (a, b) = (qps.insert(()).unwrap(), qps.insert(()).unwrap());
        let mut groups = Groups::default();
        let joined = |group| Some(MembershipChange { group, member: true });
        let left = |group| Some(MembershipChange { group, member: false });
        groups.attach(group(1), a);
        assert_eq!(groups.poll_change(), joined(group(1)));
        groups.attach(group(1), b);
        assert_eq!(groups.poll_change(), None);
        assert!(groups.detach(group(1), a));
        assert!(!groups.detach(group(1), a));
        assert_eq!(groups.poll_change(), None);
        groups.attach(group(2), b);
        groups.forget(b);
        assert_eq!((groups.poll_change(), groups.poll_change()), (left(group(1)), None), "2 came and went unseen");
        assert_eq!(groups.len(), 0);
    }

    #[test]
    fn changes_that_nobody_takes_do_not_pile_up() {
        let mut qps: Slab<kind::Qp, ()> = Slab::new(1);
        let a = qps.insert(()).unwrap();
        let mut groups = Groups::default();
        for _ in 0..10_000 {
            groups.attach(group(1), a);
            groups.forget(a);
        }
        assert_eq!(groups.changes.len(), 0);
    }
}
