//! What happened, for people and their tools: one JSON object a line.
//!
//! Owns the record, its limit and the sinks. No record has room for private data, memory keys or payload, so none can
//! show them. Writes nothing by itself: a sink does, and the caller made it.

use std::io;

use serde::{Serialize, Serializer};
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, Qpn};

use super::rate::{Bucket, Rate};
use crate::wire::{CommunicationId, RejReason, ServiceId};

/// Least time from one count of records left out to the next, so that they leave room for records.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// What a record tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditEvent {
    /// A request passed the policy.
    Admitted,
    /// A rule rejected it: the peer was told, as far as the rates allow.
    Rejected,
    /// A rule dropped it: the peer was not told.
    Dropped,
    /// Its source asks too often.
    SourceLimited,
    /// All sources together ask too often.
    TotalLimited,
    /// A MAD that cannot be read.
    BadMad,
    /// A message for no communication that we know: late, repeated or forged.
    Stray,
    /// A half-open communication gave way to a new one.
    Evicted,
    /// A connection is established.
    Established,
    /// A request or reply was refused, by us or by the peer: see the reason.
    Refused,
    /// A peer did not answer.
    Unreachable,
    /// A connection is over.
    Disconnected,
    /// A source sends to queue pairs that do not exist, or with wrong keys.
    Probing,
    /// Records were left out: see the count.
    Suppressed,
}

/// A record. What does not apply is left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditRecord<'a> {
    /// Seconds, since 1970 when the policy knows when its clock began, else since that beginning.
    #[serde(serialize_with = "seconds")]
    pub time: Duration,
    /// What happened.
    pub event: AuditEvent,
    /// The message that it happened to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<&'static str>,
    /// Our communication id.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shown")]
    pub local_comm_id: Option<CommunicationId>,
    /// The peer's communication id.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shown")]
    pub remote_comm_id: Option<CommunicationId>,
    /// The peer's QP.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "number")]
    pub qpn: Option<Qpn>,
    /// The number of the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<u16>,
    /// What the reason says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason_name: Option<&'static str>,
    /// Who sent it.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shown")]
    pub source_gid: Option<Gid>,
    /// What was asked for.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shown")]
    pub service_id: Option<ServiceId>,
    /// The rule that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<&'a str>,
    /// How many records were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl<'a> AuditRecord<'a> {
    /// A record that tells only what happened; its time is set by the log.
    #[must_use]
    pub const fn new(event: AuditEvent) -> Self {
        Self {
            time: Duration::ZERO,
            event,
            message: None,
            local_comm_id: None,
            remote_comm_id: None,
            qpn: None,
            reason: None,
            reason_name: None,
            source_gid: None,
            service_id: None,
            rule: None,
            count: None,
        }
    }

    /// With the reason of a refusal.
    #[must_use]
    pub fn with_reason(self, reason: RejReason) -> Self {
        Self { reason: Some(reason.code()), reason_name: Some(reason.describe()), ..self }
    }

    /// The record as a line of JSON, without the line's end.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Every field is a number or a string: serde_json has no reason to fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Microseconds are what an `f64` of today's date still tells apart.
#[allow(clippy::cast_precision_loss)]
fn seconds<S: Serializer>(time: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(time.as_micros() as f64 / 1e6)
}

fn shown<T: core::fmt::Display, S: Serializer>(value: &Option<T>, s: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => s.collect_str(value),
        None => s.serialize_none(),
    }
}

fn number<S: Serializer>(qpn: &Option<Qpn>, s: S) -> Result<S::Ok, S::Error> {
    match qpn {
        Some(qpn) => s.serialize_u32(qpn.get()),
        None => s.serialize_none(),
    }
}

/// Where records go.
pub trait AuditSink: Send {
    /// Takes a record. It must not block for long: the connection manager waits.
    fn record(&mut self, record: &AuditRecord<'_>);
}

/// A sink that writes lines: to a file, to a `Vec<u8>`. A line that cannot be written is counted and lost.
#[derive(Debug, Default)]
pub struct JsonLines<W> {
    writer: W,
    failed: u64,
}

impl<W: io::Write> JsonLines<W> {
    /// Writes to `writer`, each line at once.
    pub const fn new(writer: W) -> Self {
        Self { writer, failed: 0 }
    }

    /// Lines that could not be written.
    pub const fn failed(&self) -> u64 {
        self.failed
    }

    /// What it wrote to.
    pub fn into_inner(self) -> W {
        self.writer
    }
}

impl<W: io::Write + Send> AuditSink for JsonLines<W> {
    fn record(&mut self, record: &AuditRecord<'_>) {
        let mut line = record.to_json();
        line.push('\n');
        if self.writer.write_all(line.as_bytes()).and_then(|()| self.writer.flush()).is_err() {
            self.failed += 1;
        }
    }
}

/// A sink that calls a function.
#[derive(Debug)]
pub struct Callback<F>(pub F);

impl<F: FnMut(&AuditRecord<'_>) + Send> AuditSink for Callback<F> {
    fn record(&mut self, record: &AuditRecord<'_>) {
        (self.0)(record);
    }
}

/// A sink and its limit: what a peer does to fill the log shows as a number.
pub(super) struct AuditLog {
    sink: Option<Box<dyn AuditSink>>,
    rate: Rate,
    bucket: Bucket,
    /// When the clock of the agent began, since 1970.
    epoch: Duration,
    suppressed: u64,
    /// No count is written before.
    count_after: Instant,
    pub(super) written: u64,
    pub(super) suppressed_in_all: u64,
}

impl AuditLog {
    pub(super) fn new(rate: Rate) -> Self {
        Self {
            sink: None,
            rate,
            bucket: Bucket::default(),
            epoch: Duration::ZERO,
            suppressed: 0,
            count_after: Instant::ZERO,
            written: 0,
            suppressed_in_all: 0,
        }
    }

    pub(super) fn set_sink(&mut self, sink: Box<dyn AuditSink>, epoch: Duration) {
        self.sink = Some(sink);
        self.epoch = epoch;
    }

    /// Writes a record, or counts it when there are too many.
    pub(super) fn write(&mut self, now: Instant, record: &AuditRecord<'_>) {
        if self.sink.is_none() {
            return;
        }
        self.tell_suppressed(now);
        if self.bucket.take(now, self.rate) {
            self.put(now, record);
        } else {
            self.suppressed += 1;
            self.suppressed_in_all += 1;
        }
    }

    /// Says how many records were left out, once there is room for that and it was not said just now.
    pub(super) fn tell_suppressed(&mut self, now: Instant) {
        if self.suppressed > 0 && now >= self.count_after && self.bucket.take(now, self.rate) {
            let record = AuditRecord { count: Some(self.suppressed), ..AuditRecord::new(AuditEvent::Suppressed) };
            self.suppressed = 0;
            self.count_after = now + COUNT_EVERY;
            self.put(now, &record);
        }
    }

    /// When [`AuditLog::tell_suppressed`] has something to say.
    pub(super) fn due(&self) -> Option<Instant> {
        (self.suppressed > 0).then(|| self.bucket.next(self.rate).max(self.count_after))
    }

    fn put(&mut self, now: Instant, record: &AuditRecord<'_>) {
        self.written += 1;
        let time = self.epoch + now.saturating_since(Instant::ZERO);
        if let Some(sink) = &mut self.sink {
            sink.record(&AuditRecord { time, ..record.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::PortSpace;

    #[test]
    fn a_record_is_one_line_of_json() {
        let record = AuditRecord {
            time: Duration::from_micros(1_764_446_888_123_456),
            message: Some("REQ"),
            local_comm_id: Some(CommunicationId::new(0x1234_5678)),
            qpn: Qpn::new(0x11),
            source_gid: Some(std::net::Ipv4Addr::new(10, 0, 0, 1).into()),
            service_id: Some(ServiceId::of_port(PortSpace::Tcp, 7174)),
            rule: Some("the \"lab\"\n"),
            ..AuditRecord::new(AuditEvent::Rejected)
        };
        assert_eq!(
            record.with_reason(RejReason::ConsumerDefined).to_json(),
            format!(
                "{{\"time\":1764446888.123456,\"event\":\"rejected\",\"message\":\"REQ\",\
                 \"local_comm_id\":\"0x12345678\",\"qpn\":17,\"reason\":28,\"reason_name\":\"{}\",\
                 \"source_gid\":\"::ffff:10.0.0.1\",\"service_id\":\"0x0000000001061c06\",\
                 \"rule\":\"the \\\"lab\\\"\\n\"}}",
                RejReason::ConsumerDefined.describe()
            )
        );
    }

    #[test]
    fn a_flood_of_records_becomes_a_number() {
        let mut sink = JsonLines::new(Vec::new());
        let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = std::sync::Arc::clone(&lines);
        let mut log = AuditLog::new(Rate { per_second: 10, burst: 3 });
        log.set_sink(
            Box::new(Callback(move |r: &AuditRecord<'_>| seen.lock().unwrap().push((r.event, r.count)))),
            Duration::ZERO,
        );
        let t0 = Instant::ZERO;
        for _ in 0..100 {
            log.write(t0, &AuditRecord::new(AuditEvent::BadMad));
        }
        assert_eq!(lines.lock().unwrap().len(), 3);
        assert_eq!(log.due(), Some(t0 + Duration::from_millis(100)));
        log.tell_suppressed(t0 + Duration::from_millis(99));
        assert_eq!(lines.lock().unwrap().len(), 3);
        log.tell_suppressed(t0 + Duration::from_millis(100));
        assert_eq!(lines.lock().unwrap().last(), Some(&(AuditEvent::Suppressed, Some(97))));
        assert_eq!((log.written, log.suppressed_in_all, log.due()), (4, 97, None));
        sink.record(&AuditRecord::new(AuditEvent::BadMad));
        assert_eq!(sink.failed(), 0);
        assert_eq!(sink.into_inner(), b"{\"time\":0.0,\"event\":\"bad_mad\"}\n");
    }

    #[test]
    fn a_flood_leaves_room_for_what_it_is_made_of() {
        let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = std::sync::Arc::clone(&lines);
        let mut log = AuditLog::new(Rate { per_second: 10, burst: 3 });
        log.set_sink(
            Box::new(Callback(move |r: &AuditRecord<'_>| seen.lock().unwrap().push((r.event, r.count)))),
            Duration::ZERO,
        );
        // Five seconds of a thousand records a second, and its timer.
        for ms in 0..5000 {
            let now = Instant::ZERO + Duration::from_millis(ms);
            log.tell_suppressed(now);
            log.write(now, &AuditRecord::new(AuditEvent::Stray));
        }
        let lines = lines.lock().unwrap();
        let told = lines.iter().filter(|(event, _)| *event == AuditEvent::Stray).count();
        assert_eq!(lines.len(), 3 + 49, "the burst, and ten a second");
        assert_eq!(lines.len() - told, 5, "a count a second");
        let counted: u64 = lines.iter().filter_map(|(_, count)| *count).sum();
        assert_eq!(told as u64 + counted + log.suppressed, 5000, "each is told or counted");
    }
}
