//! The cache: one state machine an address.
//!
//! A peer can change an entry, never make one: only what we asked for is remembered.

use core::net::IpAddr;
use std::collections::BTreeMap;

use super::{NEIGHBORS_MAX, REACHABLE, RETRY, Resolution, SOLICITS_MAX, UNREACHABLE};
use crate::time::Instant;
use crate::types::MacAddr;

/// What the cache wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Ask who has `hop`: everybody, or the one (`to`) who had it.
    Ask {
        /// Whose MAC is wanted.
        hop: IpAddr,
        /// Who asks.
        source: IpAddr,
        /// `None`: ask everybody.
        to: Option<MacAddr>,
    },
    /// A resolution failed.
    GaveUp,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Asked `asked` times; again, or given up, at `next`.
    Incomplete { asked: u8, next: Instant },
    /// Answered.
    Reachable { mac: MacAddr, until: Instant },
    /// The answer grew old while it was in use: `mac` is still used and asked whether it is still there.
    Probing { mac: MacAddr, asked: u8, next: Instant },
    /// Silent.
    Failed { until: Instant },
}

impl State {
    const fn deadline(&self) -> Option<Instant> {
        match *self {
            Self::Incomplete { next, .. } | Self::Probing { next, .. } => Some(next),
            Self::Reachable { .. } | Self::Failed { .. } => None,
        }
    }

    const fn resolution(&self) -> Resolution {
        match *self {
            Self::Incomplete { .. } => Resolution::Pending,
            Self::Reachable { mac, .. } | Self::Probing { mac, .. } => Resolution::Known(mac),
            Self::Failed { .. } => Resolution::Unreachable,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    state: State,
    source: IpAddr,
    used: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: BTreeMap<IpAddr, Entry>,
    next: Option<Instant>,
    generation: u64,
}

impl Cache {
    pub(super) const fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn peek(&self, hop: IpAddr) -> Option<Resolution> {
        self.entries.get(&hop).map(|e| e.state.resolution())
    }

    pub(super) fn resolve(&mut self, now: Instant, hop: IpAddr, source: IpAddr) -> (Resolution, Option<Action>) {
        if !self.entries.contains_key(&hop) {
            self.make_room();
        }
        let first = State::Incomplete { asked: 1, next: now + RETRY };
        let fresh = Entry { state: State::Failed { until: now }, source, used: now };
        let entry = self.entries.entry(hop).or_insert(fresh);
        entry.used = now;
        entry.source = source;
        let ask = match entry.state {
            State::Reachable { mac, until } if until <= now => {
                entry.state = State::Probing { mac, asked: 1, next: now + RETRY };
                Some(Action::Ask { hop, source, to: Some(mac) })
            }
            State::Failed { until } if until <= now => {
                entry.state = first;
                Some(Action::Ask { hop, source, to: None })
            }
            _ => None,
        };
        let resolution = entry.state.resolution();
        if ask.is_some() {
            self.next = earlier(self.next, entry.state.deadline());
        }
        (resolution, ask)
    }

    pub(super) fn insert(&mut self, now: Instant, hop: IpAddr, mac: MacAddr) {
        if !self.entries.contains_key(&hop) {
            self.make_room();
        }
        let state = State::Reachable { mac, until: now + REACHABLE };
        let old = self.entries.insert(hop, Entry { state, source: hop, used: now });
        if old.is_some_and(|e| e.state.resolution() != state.resolution()) {
            self.generation += 1;
        }
        self.reckon();
    }

    pub(super) fn learn(&mut self, now: Instant, ip: IpAddr, mac: MacAddr, solicited: bool, replaces: bool) {
        let Some(entry) = self.entries.get_mut(&ip) else { return };
        let before = entry.state.resolution();
        let same = before == Resolution::Known(mac);
        // Before an answer anything will do. After it, hearsay refreshes nothing, and only what says so replaces.
        let believe = match before {
            Resolution::Known(_) => (solicited && same) || (replaces && !same),
            Resolution::Pending | Resolution::Unreachable => true,
        };
        if !believe {
            return;
        }
        entry.state = State::Reachable { mac, until: now + REACHABLE };
        if !same {
            self.generation += 1;
        }
        self.reckon();
    }

    /// The next thing that is due, if any: call until `None`.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> Option<Action> {
        if self.next.is_none_or(|next| next > now) {
            return None;
        }
        let due = self.entries.iter_mut().find(|(_, e)| e.state.deadline().is_some_and(|d| d <= now));
        let action = due.map(|(&hop, entry)| {
            let source = entry.source;
            let next = now + RETRY;
            match entry.state {
                State::Incomplete { asked, .. } if asked < SOLICITS_MAX => {
                    entry.state = State::Incomplete { asked: asked + 1, next };
                    Action::Ask { hop, source, to: None }
                }
                State::Probing { mac, asked, .. } if asked < SOLICITS_MAX => {
                    entry.state = State::Probing { mac, asked: asked + 1, next };
                    Action::Ask { hop, source, to: Some(mac) }
                }
                State::Probing { .. } => {
                    // The MAC is gone; the address may have moved to another.
                    entry.state = State::Incomplete { asked: 1, next };
                    self.generation += 1;
                    Action::Ask { hop, source, to: None }
                }
                State::Incomplete { .. } | State::Reachable { .. } | State::Failed { .. } => {
                    entry.state = State::Failed { until: now + UNREACHABLE };
                    self.generation += 1;
                    Action::GaveUp
                }
            }
        });
        self.reckon();
        action
    }

    fn make_room(&mut self) {
        if self.entries.len() < NEIGHBORS_MAX {
            return;
        }
        let oldest = self.entries.iter().min_by_key(|(_, e)| e.used).map(|(&ip, _)| ip);
        if let Some(ip) = oldest {
            self.entries.remove(&ip);
            self.generation += 1;
        }
    }

    fn reckon(&mut self) {
        self.next = self.entries.values().filter_map(|e| e.state.deadline()).min();
    }
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
