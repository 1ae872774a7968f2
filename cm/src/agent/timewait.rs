//! TIMEWAIT: what is left of a connection until its last packets are gone.
//!
//! Owns the records, at most as many as its limit, and finds them by our QP and by the peer's. A record is small, for
//! there may be many: the peer's QP is kept as a fingerprint keyed by the seed. Two QPs with one fingerprint (of 2^64)
//! would make one wait for the other, which harms nobody.

use core::hash::Hasher;
use core::num::NonZeroU64;
use std::collections::{BTreeSet, BinaryHeap};

use siphasher::sip::SipHasher13;
use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::Qpn;

use super::tables::Peer;
use crate::comm::CommId;

/// One connection that waits; the greatest ends first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    due: Instant,
    comm: CommId,
    /// Fingerprint of the peer's QP.
    remote: Option<NonZeroU64>,
    local_qpn: Option<Qpn>,
}

impl Ord for Record {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (other.due, other.comm).cmp(&(self.due, self.comm))
    }
}

impl PartialOrd for Record {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// All connections that wait.
pub(super) struct TimeWait {
    records: BinaryHeap<Record>,
    remote: BTreeSet<NonZeroU64>,
    local: BTreeSet<u32>,
    key: [u64; 2],
    limit: usize,
}

impl TimeWait {
    pub(super) fn new(limit: usize, rng: &mut Rng) -> Self {
        Self {
            records: BinaryHeap::new(),
            remote: BTreeSet::new(),
            local: BTreeSet::new(),
            key: [rng.next_u64(), rng.next_u64()],
            limit,
        }
    }

    pub(super) const fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.records.peek().map(|r| r.due)
    }

    /// Whether our QP waits.
    pub(super) fn has_local(&self, qpn: Qpn) -> bool {
        self.local.contains(&qpn.get())
    }

    /// Whether a peer's QP waits.
    pub(super) fn has_remote(&self, peer: Peer, qpn: Qpn) -> bool {
        self.remote.contains(&self.fingerprint(peer, qpn))
    }

    /// Adds a connection. Returns one that was forgotten for it: the one that would have ended first.
    pub(super) fn enter(
        &mut self,
        comm: CommId,
        remote: Option<(Peer, Qpn)>,
        local_qpn: Option<Qpn>,
        due: Instant,
    ) -> Option<CommId> {
        let evicted = if self.records.len() >= self.limit { self.exit() } else { None };
        let remote = remote.map(|(peer, qpn)| self.fingerprint(peer, qpn));
        self.remote.extend(remote);
        self.local.extend(local_qpn.map(Qpn::get));
        self.records.push(Record { due, comm, remote, local_qpn });
        evicted
    }

    /// Ends the wait that ends first; returns the communication that it was.
    pub(super) fn exit(&mut self) -> Option<CommId> {
        let record = self.records.pop()?;
        if let Some(remote) = record.remote {
            self.remote.remove(&remote);
        }
        if let Some(qpn) = record.local_qpn {
            self.local.remove(&qpn.get());
        }
        Some(record.comm)
    }

    fn fingerprint(&self, (gid, guid): Peer, qpn: Qpn) -> NonZeroU64 {
        let [a, b] = self.key;
        let mut hasher = SipHasher13::new_with_keys(a, b);
        hasher.write(&gid.to_bytes());
        hasher.write_u64(guid.get());
        hasher.write_u32(qpn.get());
        NonZeroU64::new(hasher.finish()).unwrap_or(NonZeroU64::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::kind;
    use crate::wire::CaGuid;
    use uroce::table::Slab;
    use uroce::time::Duration;
    use uroce::types::Gid;

    fn comms(n: usize) -> Vec<CommId> {
        let mut slab: Slab<kind::Comm, ()> = Slab::new(n);
        (0..n).map(|_| slab.insert(()).unwrap()).collect()
    }

    fn peer(n: u8) -> Peer {
        (Gid::from(core::net::Ipv4Addr::new(10, 0, 0, n)), CaGuid::new(7))
    }

    #[test]
    fn records_end_in_order_and_are_found_until_then() {
        let mut t = TimeWait::new(3, &mut Rng::from_u64(1));
        let ids = comms(4);
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let qpn = |n| Qpn::from_wire(n);
        for (n, due) in [(0, 30), (1, 10), (2, 20)] {
            let remote = Some((peer(1), qpn(100 + n)));
            assert_eq!(t.enter(ids[n as usize], remote, Some(qpn(n)), at(due)), None);
        }
        assert_eq!((t.len(), t.next_due()), (3, Some(at(10))));
        assert!(t.has_local(qpn(1)) && t.has_remote(peer(1), qpn(101)));
        assert!(!t.has_remote(peer(2), qpn(101)), "the same GUID at another address is another peer");
        // A fourth takes the place of the one that would have ended first.
        assert_eq!(t.enter(ids[3], None, None, at(5)), Some(ids[1]));
        assert!(!t.has_local(qpn(1)) && !t.has_remote(peer(1), qpn(101)));
        let order: Vec<CommId> = std::iter::from_fn(|| t.exit()).collect();
        assert_eq!(order, [ids[3], ids[2], ids[0]]);
        assert_eq!((t.len(), t.remote.len(), t.local.len()), (0, 0, 0));
    }

    #[test]
    fn fingerprints_of_neighbours_differ() {
        let t = TimeWait::new(1, &mut Rng::from_u64(1));
        let all: BTreeSet<_> = (0..100u8)
            .flat_map(|p| (0..1000).map(move |q| (peer(p), Qpn::from_wire(q))))
            .map(|(p, q)| t.fingerprint(p, q))
            .collect();
        assert_eq!(all.len(), 100_000);
    }
}
