//! Counters of an endpoint, of its port and of each QP, under the names that Linux's rxe gives them.
//!
//! Owns plain integers (one writer, no atomics, no lock, 8 bytes each and nothing else) and the one table that says of
//! each what makes it tick: [`Counters::TABLE`]. The page `docs/src/counters.md` and the tests are held against that
//! table. Never decides anything.
//!
//! A QP counts into its own [`Counters`]; what the port shows is the sum over its QPs, those that are gone, and what
//! belonged to none. Packets and bytes are the exception: the port counts them itself, since a multicast packet is one
//! packet however many QPs take it.

mod table;

pub use table::{ABSENT, Counters, DropReason};

/// What a counter is, and the test that proves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterRow {
    /// Our name.
    pub name: &'static str,
    /// The name under Linux's rxe (`rdma statistic show`), where it has one for exactly this.
    pub rxe: Option<&'static str>,
    /// The name under mlx5 hardware, where it has one for exactly this.
    pub mlx5: Option<&'static str>,
    /// Who counts it.
    pub scope: Scope,
    /// What makes it tick, once each time.
    pub trigger: &'static str,
    /// The test that makes it tick and looks at every other counter as well: module and function below `tests/it`.
    pub test: &'static str,
}

/// Whose counter it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Of the port alone: what it counts belongs to no QP.
    Port,
    /// Of each QP; the port has the sum.
    Qp,
    /// Of each QP and, independently, of the port.
    Both,
}

impl Scope {
    /// A word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Port => "port",
            Self::Qp => "QP",
            Self::Both => "QP and port",
        }
    }
}

/// A name that dashboards look for and that this endpoint does not count, because it does not do what it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsentCounter {
    /// The name, under mlx5 hardware.
    pub name: &'static str,
    /// Why.
    pub why: &'static str,
}

impl Counters {
    /// Counts a dropped packet.
    #[inline]
    pub fn count_drop(&mut self, reason: DropReason) {
        if let Some(n) = self.drops.get_mut(reason as usize) {
            *n += 1;
        }
    }

    /// Packets dropped for `reason`.
    #[must_use]
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as usize).copied().unwrap_or(0)
    }

    /// Packets dropped for any reason.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        self.drops.iter().sum()
    }

    /// Adds what a QP counted to what its port counted. Packets and bytes stay: the port counts these itself.
    pub fn add_qp(&mut self, qp: &Self) {
        let own = self.clone();
        self.add(qp);
        self.sent_pkts = own.sent_pkts;
        self.sent_bytes = own.sent_bytes;
        self.rcvd_pkts = own.rcvd_pkts;
        self.rcvd_bytes = own.rcvd_bytes;
        self.np_ecn_marked_roce_packets = own.np_ecn_marked_roce_packets;
    }

    /// Every counter with its row.
    pub fn rows(&self) -> impl Iterator<Item = (&'static CounterRow, u64)> {
        Self::TABLE.iter().zip(self.values())
    }

    /// The value under any of a counter's names.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<u64> {
        self.rows().find(|(r, _)| r.name == name || r.rxe == Some(name) || r.mlx5 == Some(name)).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_counts_in_its_own_place() {
        let mut c = Counters::default();
        for (i, r) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(r as usize, i);
            c.count_drop(r);
            assert_eq!(c.dropped(r), 1);
            assert_eq!(c.named(r.name()), Some(1));
        }
        assert_eq!(c.dropped_in_all(), DropReason::ALL.len() as u64);
    }

    #[test]
    fn no_name_stands_for_two_counters() {
        let mut seen = std::collections::BTreeMap::new();
        for row in Counters::TABLE {
            for name in [Some(row.name), row.rxe, row.mlx5].into_iter().flatten() {
                let other = *seen.entry(name).or_insert(row.name);
                assert_eq!(other, row.name, "{name}");
            }
        }
        for absent in ABSENT {
            assert!(!seen.contains_key(absent.name), "{}", absent.name);
        }
    }

    #[test]
    fn a_port_counts_packets_itself_and_sums_the_rest() {
        let qp = Counters { sent_pkts: 3, rcvd_bytes: 5, duplicate_request: 7, ..Counters::default() };
        let mut port = Counters { sent_pkts: 4, rcvd_bytes: 6, duplicate_request: 1, ..Counters::default() };
        port.add_qp(&qp);
        assert_eq!((port.sent_pkts, port.rcvd_bytes, port.duplicate_request), (4, 6, 8));
    }

    #[test]
    fn a_qp_pays_eight_bytes_a_counter() {
        assert_eq!(size_of::<Counters>(), 8 * Counters::TABLE.len());
    }
}
