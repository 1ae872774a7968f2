//! The policy of a connection manager: who may connect, how often, and what is written down.
//!
//! Owns rules ([`RuleSet`]), rates, the bounds of the agent's tables ([`TableLimits`]) and the audit log. Sans-IO: `now`
//! is an argument, hashes are keyed from a seed, and a sink that the caller made does the writing. It decides before any
//! state of a peer exists; [`Agent::set_policy`](crate::Agent::set_policy) puts it there.
//!
//! RoCEv2 has no authentication: a source address can be forged by whoever is on the network. The policy keeps honest
//! neighbours apart and bounds what a flood costs; it is no proof of identity.

mod audit;
mod parse;
mod rate;
mod rules;

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, Qpn};

pub use audit::{AuditEvent, AuditRecord, AuditSink, Callback, JsonLines};
pub use parse::PolicyError;
pub use rate::{Bucket, Rate, SERVED_FOR, SOURCES_RANGE};
pub use rules::{
    Action, DEFAULT_RULE, GidPrefix, MATCHES_MAX, MatchError, NAME_MAX, RULES_MAX, Rule, RuleSet, ServiceRange,
};

use crate::wire::{CommunicationId, MadKind, RejReason, ServiceId};
use audit::AuditLog;
use rate::Sources;

/// Memory of one half-open communication at most, everything that belongs to it: its state, its keys, its timer, the
/// message that is repeated and the event that tells of it.
pub const HALF_OPEN_BYTES: usize = 1280;
/// Memory of one TIMEWAIT record at most, with its keys and its timer.
pub const TIMEWAIT_BYTES: usize = 144;
/// A half-open communication is not given up for a new one before this age: a round trip has to fit.
pub const EVICT_AFTER: Duration = Duration::from_millis(100);

/// Bounds of the agent's tables. Each table holds as many records as fit both its number and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLimits {
    /// Passive communications that are not established. Beyond, the oldest gives way.
    pub half_open: u32,
    /// Bytes of these, [`HALF_OPEN_BYTES`] each.
    pub half_open_bytes: u32,
    /// TIMEWAIT records. Beyond, the oldest is forgotten.
    pub timewait: u32,
    /// Bytes of these, [`TIMEWAIT_BYTES`] each.
    pub timewait_bytes: u32,
    /// Requests of one listener that its program has not answered.
    pub backlog: u32,
}

impl Default for TableLimits {
    fn default() -> Self {
        Self { half_open: 4096, half_open_bytes: 2 << 20, timewait: 65_536, timewait_bytes: 4 << 20, backlog: 1024 }
    }
}

impl TableLimits {
    /// Half-open communications that fit.
    #[must_use]
    pub fn half_open_records(&self) -> usize {
        (self.half_open as usize).min(self.half_open_bytes as usize / HALF_OPEN_BYTES).max(1)
    }

    /// TIMEWAIT records that fit.
    #[must_use]
    pub fn timewait_records(&self) -> usize {
        (self.timewait as usize).min(self.timewait_bytes as usize / TIMEWAIT_BYTES).max(1)
    }
}

/// What a policy is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyConfig {
    /// Who may ask for what.
    pub rules: RuleSet,
    /// REQs, SIDR_REQs and LAPs of one source.
    pub source: Rate,
    /// Those of all sources. A fifth is kept for sources that were not served in the last ten seconds.
    pub total: Rate,
    /// Bad MADs, and refusals by a rule, of one source.
    pub bad_source: Rate,
    /// Those of all sources.
    pub bad_total: Rate,
    /// Sources remembered, 64 to 1,048,576; 40 bytes each.
    pub sources: u32,
    /// Bounds of the tables.
    pub limits: TableLimits,
    /// Records of the audit log.
    pub audit: Rate,
}

impl Default for PolicyConfig {
    /// Everybody may connect: 100 a second and 200 at once of a source, 5,000 a second in all.
    fn default() -> Self {
        let source = Rate { per_second: 100, burst: 200 };
        let total = Rate { per_second: 5000, burst: 5000 };
        Self {
            rules: RuleSet::default(),
            source,
            total,
            bad_source: source,
            bad_total: total,
            sources: 65_536,
            limits: TableLimits::default(),
            audit: source,
        }
    }
}

/// A request that would make state, or cost an answer of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// REQ, SIDR_REQ or LAP.
    pub kind: MadKind,
    /// Who asks.
    pub source: Gid,
    /// For what; a LAP does not say.
    pub service: Option<ServiceId>,
    /// The peer's id.
    pub remote_comm_id: Option<CommunicationId>,
    /// The peer's QP.
    pub qpn: Option<Qpn>,
}

/// What is to be done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It goes on.
    Admit,
    /// It is refused with a word.
    Refuse,
    /// It is forgotten.
    Forget,
}

/// What a policy counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PolicyCounters {
    /// Requests that passed.
    pub admitted: u64,
    /// Requests that a rule rejected, answered or not.
    pub rejected: u64,
    /// Requests that a rule dropped.
    pub dropped: u64,
    /// Requests beyond the rate of their source.
    pub source_limited: u64,
    /// Requests beyond the rate of all.
    pub total_limited: u64,
    /// MADs that cannot be read, or are for nobody.
    pub bad_mads: u64,
    /// Bad MADs and rejections that got no answer and no record because there were too many.
    pub bad_limited: u64,
    /// Half-open communications that gave way to new ones.
    pub evicted: u64,
    /// Alarms of the probe detector.
    pub probe_alarms: u64,
    /// Records written.
    pub audit_written: u64,
    /// Records left out.
    pub audit_suppressed: u64,
}

/// A policy at work.
pub struct Policy {
    config: PolicyConfig,
    sources: Sources,
    /// What every source may take.
    total: Bucket,
    /// What only sources may take that were not served lately.
    reserve: Bucket,
    bad_total: Bucket,
    log: AuditLog,
    counters: PolicyCounters,
    now: Instant,
}

impl Policy {
    /// A policy without an audit log. `rng` keys its hashes.
    #[must_use]
    pub fn new(config: PolicyConfig, rng: &mut Rng) -> Self {
        Self {
            sources: Sources::new(config.sources, rng),
            total: Bucket::default(),
            reserve: Bucket::default(),
            bad_total: Bucket::default(),
            log: AuditLog::new(config.audit),
            counters: PolicyCounters::default(),
            now: Instant::ZERO,
            config,
        }
    }

    /// With an audit log. `epoch` is what the agent's clock called zero, since 1970; zero leaves the agent's own times.
    #[must_use]
    pub fn with_audit(mut self, sink: Box<dyn AuditSink>, epoch: Duration) -> Self {
        self.log.set_sink(sink, epoch);
        self
    }

    /// What it is made of.
    #[must_use]
    pub const fn config(&self) -> &PolicyConfig {
        &self.config
    }

    /// What it counted.
    #[must_use]
    pub const fn counters(&self) -> PolicyCounters {
        PolicyCounters {
            audit_written: self.log.written,
            audit_suppressed: self.log.suppressed_in_all,
            ..self.counters
        }
    }

    /// Bytes that the policy itself takes, whatever peers do.
    #[must_use]
    pub const fn memory(&self) -> usize {
        Sources::bytes(self.config.sources) + size_of::<Self>()
    }

    /// Decides about a request, before anything is kept of it.
    pub fn decide(&mut self, now: Instant, ask: &Ask) -> Decision {
        self.now = now;
        let (action, rule) = match ask.kind {
            // Its connection passed the rules.
            MadKind::Lap => (Action::Allow, None),
            _ => self.config.rules.decide(ask.source, ask.service),
        };
        let event = match action {
            Action::Drop => AuditEvent::Dropped,
            Action::Reject => AuditEvent::Rejected,
            Action::Allow => self.take(now, ask.source),
        };
        let decision = match event {
            AuditEvent::Admitted => Decision::Admit,
            AuditEvent::Rejected if self.take_bad(now, ask.source) => Decision::Refuse,
            _ => Decision::Forget,
        };
        *match event {
            AuditEvent::Admitted => &mut self.counters.admitted,
            AuditEvent::Rejected => &mut self.counters.rejected,
            AuditEvent::Dropped => &mut self.counters.dropped,
            AuditEvent::SourceLimited => &mut self.counters.source_limited,
            _ => &mut self.counters.total_limited,
        } += 1;
        let record = AuditRecord {
            message: Some(ask.kind.name()),
            remote_comm_id: ask.remote_comm_id,
            qpn: ask.qpn,
            source_gid: Some(ask.source),
            service_id: ask.service,
            rule: (ask.kind != MadKind::Lap).then(|| self.config.rules.name(rule)),
            ..AuditRecord::new(event)
        };
        self.log.write(now, &record);
        decision
    }

    /// Takes the tokens of a request that the rules allow.
    fn take(&mut self, now: Instant, gid: Gid) -> AuditEvent {
        let source = self.sources.of(now, gid);
        if !source.requests.take(now, self.config.source) {
            return AuditEvent::SourceLimited;
        }
        let (common, kept) = shares(self.config.total);
        let served = source.served_until > now;
        if self.total.take(now, common) || !served && self.reserve.take(now, kept) {
            source.served_until = now + SERVED_FOR;
            AuditEvent::Admitted
        } else {
            AuditEvent::TotalLimited
        }
    }

    /// A MAD that cannot be read (no kind), or a message for no communication that we know. Returns whether it may be
    /// answered: within the rates, and not to a source that the rules hide us from.
    pub fn bad_mad(&mut self, now: Instant, source: Gid, kind: Option<MadKind>) -> bool {
        self.now = now;
        self.counters.bad_mads += 1;
        let within = self.take_bad(now, source);
        if within {
            let event = if kind.is_none() { AuditEvent::BadMad } else { AuditEvent::Stray };
            let record =
                AuditRecord { message: kind.map(MadKind::name), source_gid: Some(source), ..AuditRecord::new(event) };
            self.log.write(now, &record);
        }
        within && !self.config.rules.hides_from(source)
    }

    fn take_bad(&mut self, now: Instant, gid: Gid) -> bool {
        let source = self.sources.of(now, gid);
        let within = source.bad.take(now, self.config.bad_source) && self.bad_total.take(now, self.config.bad_total);
        self.counters.bad_limited += u64::from(!within);
        within
    }

    /// The device reports that a source sends to queue pairs that do not exist, or with wrong keys.
    pub fn probing(&mut self, source: Gid) {
        self.counters.probe_alarms += 1;
        self.audit(&AuditRecord { source_gid: Some(source), ..AuditRecord::new(AuditEvent::Probing) });
    }

    /// Writes a record at the time that the policy was last told.
    pub(crate) fn audit(&mut self, record: &AuditRecord<'_>) {
        self.log.write(self.now, record);
    }

    /// Counts and records a half-open communication that gave way.
    pub(crate) fn evicted(&mut self, record: AuditRecord<'_>) {
        self.counters.evicted += 1;
        self.audit(&record.with_reason(RejReason::Timeout));
    }

    /// The time that it was last told.
    pub(crate) const fn now(&self) -> Instant {
        self.now
    }

    /// Tells the time: says how many records were left out, if it is time for that.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = now;
        self.log.tell_suppressed(now);
    }

    /// When [`Policy::handle_timeout`] wants to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.log.due()
    }
}

/// The total rate in two: four fifths for all, one fifth for sources that were not served lately.
fn shares(total: Rate) -> (Rate, Rate) {
    let kept = |v: u32| (v / 5).max(1);
    let left = |v: u32| v.saturating_sub(v / 5).max(1);
    (
        Rate { per_second: left(total.per_second), burst: left(total.burst) },
        Rate { per_second: kept(total.per_second), burst: kept(total.burst) },
    )
}
