//! Who tries out numbers: sources whose packets go to queue pairs that do not exist, or carry wrong keys.
//!
//! Owns a table of fixed size of the busiest such sources. Works only on packets that are dropped or refused, allocates
//! nothing, and never decides what becomes of a packet.

use core::hash::BuildHasher as _;
use core::net::IpAddr;

use crate::table::NumberHash;
use crate::time::{Duration, Instant};
use crate::types::{Gid, Qpn};

/// Sources watched at once.
pub const PROBE_SOURCES: usize = 64;
/// A source is judged by what it did within this time; an alarm comes once in it.
pub const PROBE_WINDOW: Duration = Duration::from_secs(10);
/// Numbers hit of [`MARKS`] at which a source is reported: about 44 different ones. A peer that sends for a while to one
/// QP that is gone hits one.
const ALARM_MARKS: u32 = 32;
/// Bits that the numbers tried are spread over.
const MARKS: u64 = 64;
/// Wrong keys at which a source is reported. Each costs its sender a QP.
const ALARM_KEYS: u32 = 8;
/// Slots that a source may lie in.
const WAYS: usize = 4;

/// What a packet tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    /// A QP that does not exist, or that talks to somebody else.
    Number(Qpn),
    /// A key, or a right that it does not give.
    Key,
}

/// A source that tries out numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeSource {
    /// Its address.
    pub source: Gid,
    /// Since when.
    pub since: Instant,
    /// Packets to QPs that do not exist or talk to somebody else.
    pub strays: u32,
    /// Packets with wrong keys.
    pub keys: u32,
    /// Whether an alarm was given.
    pub alarmed: bool,
    /// A bit for every 64th of the numbers tried.
    marks: u64,
}

impl ProbeSource {
    const fn new(source: Gid, since: Instant) -> Self {
        Self { source, since, strays: 0, keys: 0, alarmed: false, marks: 0 }
    }

    const fn packets(&self) -> u32 {
        self.strays.saturating_add(self.keys)
    }

    fn is_over(&self, now: Instant) -> bool {
        now.saturating_since(self.since) > PROBE_WINDOW
    }
}

/// The table. A source that is new takes the place of one whose time is over, or of the least busy.
pub(super) struct Probes {
    slots: Box<[ProbeSource]>,
    hash: NumberHash,
}

impl Probes {
    pub(super) fn new(key: u64) -> Self {
        let nobody = ProbeSource::new(Gid::from_bytes([0; 16]), Instant::ZERO);
        Self { slots: vec![nobody; PROBE_SOURCES].into_boxed_slice(), hash: NumberHash::new(key) }
    }

    /// Notes what a packet of `source` tried. True when that makes it worth an alarm.
    pub(super) fn note(&mut self, now: Instant, source: IpAddr, probe: Probe) -> bool {
        let gid = Gid::from(source);
        let set = usize::try_from(self.hash.hash_one(gid.to_bytes())).unwrap_or(0) % (PROBE_SOURCES / WAYS) * WAYS;
        let mark = match probe {
            Probe::Number(qpn) => 1 << (self.hash.hash_one(qpn.get()) % MARKS),
            Probe::Key => 0,
        };
        let Some(slots) = self.slots.get_mut(set..set + WAYS) else { return false };
        let known = slots.iter().position(|s| s.source == gid && !s.is_over(now));
        let place = known.or_else(|| {
            // Nobody and those whose time is over come first, then the least busy.
            let rank = |s: &ProbeSource| if s.is_over(now) { 0 } else { s.packets() };
            slots.iter().enumerate().min_by_key(|(_, s)| rank(s)).map(|(at, _)| at)
        });
        let Some(slot) = place.and_then(|at| slots.get_mut(at)) else { return false };
        if known.is_none() {
            *slot = ProbeSource::new(gid, now);
        }
        match probe {
            Probe::Number(_) => slot.strays = slot.strays.saturating_add(1),
            Probe::Key => slot.keys = slot.keys.saturating_add(1),
        }
        slot.marks |= mark;
        let alarm = !slot.alarmed && (slot.marks.count_ones() >= ALARM_MARKS || slot.keys >= ALARM_KEYS);
        slot.alarmed |= alarm;
        alarm
    }

    /// The sources watched, the busiest first.
    pub(super) fn busiest(&self) -> Vec<ProbeSource> {
        let mut busy: Vec<ProbeSource> = self.slots.iter().filter(|s| s.packets() > 0).copied().collect();
        busy.sort_by_key(|s| (core::cmp::Reverse(s.packets()), s.source));
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        core::net::Ipv4Addr::from(0x0a00_0000 + n).into()
    }

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    fn number(n: u32) -> Probe {
        Probe::Number(Qpn::from_wire(n))
    }

    #[test]
    fn one_number_over_and_over_is_no_probe() {
        let mut probes = Probes::new(7);
        assert!((0..100_000).all(|_| !probes.note(at(0), ip(1), number(99))));
        assert_eq!(probes.busiest()[0].strays, 100_000);
    }

    #[test]
    fn many_numbers_are_reported_once_in_a_window() {
        let mut probes = Probes::new(7);
        let alarms = |probes: &mut Probes, ms| (0..1000).filter(|n| probes.note(at(ms), ip(1), number(*n))).count();
        assert_eq!(alarms(&mut probes, 0), 1);
        assert_eq!(alarms(&mut probes, 9_999), 0);
        assert_eq!(alarms(&mut probes, 10_001), 1);
        // A few numbers a window, for ever, are none.
        let mut slow = Probes::new(7);
        assert!((0..1000).all(|n| !slow.note(at(u64::from(n) * 1000), ip(2), number(n))));
    }

    #[test]
    fn wrong_keys_are_reported() {
        let mut probes = Probes::new(7);
        let first = (1..=20).find(|_| probes.note(at(0), ip(1), Probe::Key));
        assert_eq!(first, Some(8));
    }

    #[test]
    fn a_crowd_of_others_does_not_hide_a_busy_source() {
        let mut probes = Probes::new(7);
        let mut alarms = Vec::new();
        for n in 0..10_000 {
            if probes.note(at(1), ip(0xff_ffff), number(n)) {
                alarms.push(0xff_ffff);
            }
            // Each of these is heard once: nobody is accused for what another did.
            if probes.note(at(1), ip(n), number(n)) {
                alarms.push(n);
            }
        }
        assert_eq!(alarms, [0xff_ffff]);
        assert!(probes.busiest().len() <= PROBE_SOURCES);
        assert_eq!(probes.busiest()[0].source, Gid::from(ip(0xff_ffff)));
    }
}
