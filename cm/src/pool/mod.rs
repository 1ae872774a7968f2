//! Connections to one peer, kept warm.
//!
//! Owns the decisions ([`ConnectionPool`]): how many connections there are, which is lent, probed, closed. Sans-IO and
//! without any device: `now` is an argument, actions come out and what became of them goes in. [`PoolDriver`] carries the
//! actions out over [`RdmaCm`](crate::RdmaCm) and verbs.

mod driver;

use std::collections::VecDeque;

use uroce::rng::Rng;
use uroce::table::{Handle, Slab};
use uroce::time::{Duration, Instant};

pub use driver::{PROBE_WR_ID, PoolDriver, PoolError, PoolQp, PooledConnection};

use crate::reconnect::{Backoff, ReconnectPolicy};

/// Connections of a pool at most.
pub const POOL_MAX: usize = 4096;

/// Tag types of the pool's handles.
pub mod kind {
    /// Connections of a pool.
    pub enum Pooled {}
}

/// Names a connection of a pool.
pub type PoolKey = Handle<kind::Pooled>;

/// How a pool behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Connections that nobody uses and that are kept ready.
    pub min_warm: usize,
    /// Connections in all, 1 to [`POOL_MAX`].
    pub max: usize,
    /// One that nobody has used for so long is closed, the warm minimum aside.
    pub idle_timeout: Duration,
    /// One that nobody has used for so long is probed, the longest unused first, one at a time; `None`: none is.
    pub probe_after: Option<Duration>,
    /// A probe that has not completed by then has failed.
    pub probe_timeout: Duration,
    /// After failed attempts.
    pub reconnect: ReconnectPolicy,
}

impl Default for PoolConfig {
    /// One warm connection of at most 16, closed after a minute, probed after ten seconds.
    fn default() -> Self {
        Self {
            min_warm: 1,
            max: 16,
            idle_timeout: Duration::from_secs(60),
            probe_after: Some(Duration::from_secs(10)),
            probe_timeout: Duration::from_secs(5),
            reconnect: ReconnectPolicy::default(),
        }
    }
}

/// What is to be done. Each is answered by a call of its name in the past tense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolAction {
    /// Connect; then [`ConnectionPool::connected`] or [`ConnectionPool::failed`].
    Connect(PoolKey),
    /// Send a probe; then [`ConnectionPool::probed`] or [`ConnectionPool::failed`].
    Probe(PoolKey),
    /// Close. The connection is forgotten already.
    Close(PoolKey),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    /// In `idle`. When it was last used, and when it was last known to work.
    Idle {
        since: Instant,
        alive: Instant,
    },
    /// In `idle` no more, and lent to nobody.
    Probing {
        since: Instant,
        begun: Instant,
    },
    Lent,
}

/// Connections by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Ready and unused.
    pub idle: usize,
    /// Lent.
    pub lent: usize,
    /// Being connected.
    pub connecting: usize,
    /// Being probed.
    pub probing: usize,
    /// Made so far.
    pub connected: u64,
    /// Attempts that failed.
    pub connect_failures: u64,
    /// Probes that failed.
    pub probe_failures: u64,
    /// Closed because nobody used them.
    pub idle_closed: u64,
}

/// A pool: decides and counts.
pub struct ConnectionPool {
    config: PoolConfig,
    conns: Slab<kind::Pooled, State>,
    /// Unused connections, the longest unused first.
    idle: VecDeque<PoolKey>,
    /// Connections whose peer or probe failed, to be closed.
    closing: VecDeque<PoolKey>,
    backoff: Backoff,
    /// No attempt before.
    not_before: Instant,
    /// Until then the loss of an unused connection is not the first one.
    calm_at: Instant,
    gave_up: bool,
    /// Somebody found nothing to borrow.
    wanted: bool,
    stats: PoolStats,
}

impl ConnectionPool {
    /// An empty pool. `rng` gives the jitter.
    #[must_use]
    pub fn new(config: PoolConfig, rng: Rng) -> Self {
        let max = config.max.clamp(1, POOL_MAX);
        let config = PoolConfig { max, min_warm: config.min_warm.min(max), ..config };
        Self {
            conns: Slab::new(max),
            idle: VecDeque::new(),
            closing: VecDeque::new(),
            backoff: Backoff::new(config.reconnect, rng),
            not_before: Instant::ZERO,
            calm_at: Instant::ZERO,
            gave_up: false,
            wanted: false,
            stats: PoolStats::default(),
            config,
        }
    }

    /// Connections by state.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        PoolStats { idle: self.idle.len(), ..self.stats }
    }

    /// Whether it was given up to connect: [`ReconnectPolicy::max_tries`] failures in a row. The next
    /// [`ConnectionPool::checkout`] begins anew.
    #[must_use]
    pub const fn gave_up(&self) -> bool {
        self.gave_up
    }

    /// Lends the connection that was used last, so that those that are not needed stay unused. `None` when there is
    /// none: one more is connected then, if there may be more, and it is worth asking again when that is done.
    pub fn checkout(&mut self) -> Option<PoolKey> {
        let Some(key) = self.idle.pop_back() else {
            self.wanted = true;
            if core::mem::take(&mut self.gave_up) {
                self.backoff.succeeded();
            }
            return None;
        };
        self.set(key, State::Lent);
        self.stats.lent += 1;
        Some(key)
    }

    /// Takes a connection back. False when it is not lent: it failed meanwhile.
    pub fn checkin(&mut self, now: Instant, key: PoolKey) -> bool {
        if self.conns.get(key) != Some(&State::Lent) {
            return false;
        }
        self.stats.lent -= 1;
        self.set(key, State::Idle { since: now, alive: now });
        self.idle.push_back(key);
        true
    }

    /// An action succeeded: the connection is established.
    pub fn connected(&mut self, now: Instant, key: PoolKey) {
        if self.conns.get(key) != Some(&State::Connecting) {
            return;
        }
        self.stats.connecting -= 1;
        self.stats.connected += 1;
        self.backoff.succeeded();
        self.wanted = false;
        self.set(key, State::Idle { since: now, alive: now });
        self.idle.push_back(key);
    }

    /// A probe was answered.
    pub fn probed(&mut self, now: Instant, key: PoolKey) {
        let Some(State::Probing { since, .. }) = self.conns.get(key).copied() else { return };
        self.stats.probing -= 1;
        self.set(key, State::Idle { since, alive: now });
        // By when it was used last: probing does not make it look used.
        let at = self.idle.partition_point(|other| match self.conns.get(*other) {
            Some(State::Idle { since: theirs, .. }) => *theirs <= since,
            _ => false,
        });
        self.idle.insert(at, key);
    }

    /// A connection, an attempt or a probe failed, or the borrower found it broken. It is forgotten, and closed with the
    /// next actions.
    pub fn failed(&mut self, now: Instant, key: PoolKey) {
        let Some(state) = self.conns.remove(key) else { return };
        match state {
            State::Connecting => {
                self.stats.connecting -= 1;
                self.stats.connect_failures += 1;
                match self.backoff.failed() {
                    Some(wait) => self.not_before = self.not_before.max(now + wait),
                    None => {
                        self.gave_up = true;
                        self.wanted = false;
                    }
                }
            }
            State::Idle { .. } => {
                self.idle.retain(|other| *other != key);
                self.lost_unused(now);
            }
            State::Probing { .. } => {
                self.stats.probing -= 1;
                self.stats.probe_failures += 1;
                self.lost_unused(now);
            }
            State::Lent => self.stats.lent -= 1,
        }
        self.closing.push_back(key);
    }

    /// The next thing to do now.
    pub fn poll_action(&mut self, now: Instant) -> Option<PoolAction> {
        self.fail_late_probe(now);
        if let Some(key) = self.closing.pop_front() {
            return Some(PoolAction::Close(key));
        }
        if self.must_connect() && now >= self.not_before {
            let key = self.conns.insert(State::Connecting)?;
            self.stats.connecting += 1;
            return Some(PoolAction::Connect(key));
        }
        let key = *self.idle.front()?;
        let Some(State::Idle { since, .. }) = self.conns.get(key).copied() else { return None };
        if self.may_close_idle() && now >= since + self.config.idle_timeout {
            self.idle.pop_front();
            self.conns.remove(key);
            self.stats.idle_closed += 1;
            return Some(PoolAction::Close(key));
        }
        let key = self.due_for_probe().filter(|(due, _)| now >= *due)?.1;
        self.idle.retain(|other| *other != key);
        let Some(State::Idle { since, .. }) = self.conns.get(key).copied() else { return None };
        self.set(key, State::Probing { since, begun: now });
        self.stats.probing += 1;
        Some(PoolAction::Probe(key))
    }

    /// When [`ConnectionPool::poll_action`] has something to do, if nothing else happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let close_now = (!self.closing.is_empty()).then_some(Instant::ZERO);
        let connect = self.must_connect().then_some(self.not_before);
        let idle = match self.idle.front().and_then(|key| self.conns.get(*key)) {
            Some(State::Idle { since, .. }) if self.may_close_idle() => Some(*since + self.config.idle_timeout),
            _ => None,
        };
        let probe = self.due_for_probe().map(|(due, _)| due);
        let late = self.probe_under_way().map(|(_, begun)| begun + self.config.probe_timeout);
        [close_now, connect, idle, probe, late].into_iter().flatten().min()
    }

    /// One loss is made good at once. When they follow each other, the peer may accept and part for ever.
    fn lost_unused(&mut self, now: Instant) {
        self.not_before = self.not_before.max(self.calm_at);
        self.calm_at = self.calm_at.max(now + self.backoff.pause());
    }

    fn set(&mut self, key: PoolKey, state: State) {
        if let Some(conn) = self.conns.get_mut(key) {
            *conn = state;
        }
    }

    /// Whether another connection is due: below the warm minimum, or somebody found none.
    fn must_connect(&self) -> bool {
        let coming = self.stats.connecting;
        let unused = self.idle.len() + self.stats.probing + coming;
        !self.gave_up
            && self.conns.len() < self.config.max
            && (unused < self.config.min_warm || self.wanted && coming == 0)
    }

    fn may_close_idle(&self) -> bool {
        self.idle.len() + self.stats.probing > self.config.min_warm
    }

    /// The unused connection to be probed next, the longest unused of those that were not probed since, and when.
    fn due_for_probe(&self) -> Option<(Instant, PoolKey)> {
        let after = self.config.probe_after.filter(|_| self.stats.probing == 0)?;
        let alive = |key: &PoolKey| match self.conns.get(*key) {
            Some(State::Idle { alive, .. }) => Some((*alive + after, *key)),
            _ => None,
        };
        // Of equals the first, which was used least lately.
        self.idle.iter().filter_map(alive).min_by_key(|(due, _)| *due)
    }

    fn probe_under_way(&self) -> Option<(PoolKey, Instant)> {
        if self.stats.probing == 0 {
            return None;
        }
        self.conns.iter().find_map(|(key, state)| match state {
            State::Probing { begun, .. } => Some((key, *begun)),
            _ => None,
        })
    }

    fn fail_late_probe(&mut self, now: Instant) {
        if let Some((key, begun)) = self.probe_under_way()
            && now >= begun + self.config.probe_timeout
        {
            self.failed(now, key);
        }
    }
}

#[cfg(test)]
mod tests;
