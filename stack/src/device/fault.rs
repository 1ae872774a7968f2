//! A device that harms chosen packets: "the 3rd RTU", "every READ response middle".
//!
//! Owns the rules, their small textual grammar and their counts. Deterministic: no randomness, equal traffic is treated
//! equally. Knows the transport's packets by name; what a datagram carries (a CM message) is told by a matcher from
//! outside.
//!
//! # Grammar
//!
//! `ACTION:PACKET[:MODIFIER]…`
//!
//! | part | values |
//! |---|---|
//! | action | `drop`, `dup`, `corrupt` (one bit in the middle), `truncate` (to half) or `truncate=BYTES`, `delay=TIME` (`10us`, `5ms`, `1s`) |
//! | packet | a name of [`PacketKind`], or one that the caller's resolver knows |
//! | which | `N` (the Nth, from 1), `N-M`, `every` (the default), `every=K` (each Kth) |
//! | direction | `in` or `out`, seen from the endpoint; both by default |
//!
//! `drop:ack:3` loses the third ACK, `drop:read-resp-middle:every` all of these, `dup:write-only:every=10:out` doubles
//! each tenth WRITE Only that we send.

use core::fmt;

use super::Device;
use super::intercept::{Direction, Intercepted, Judge, Verdict};
use crate::time::{Duration, Instant};
use crate::wire::{Body, Flow, Packet, Place, RequestOp, Response, ResponseOp, Syndrome};

/// Rules that one injector holds at most.
pub const RULES_MAX: usize = 64;

/// Packets with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketKind {
    /// Any packet, also one that cannot be parsed.
    Any,
    /// A request of a connected service.
    Request,
    /// A SEND packet; `None`: at any place of its message.
    Send(Option<Place>),
    /// A WRITE packet.
    Write(Option<Place>),
    /// A READ request.
    ReadRequest,
    /// A compare and swap or fetch and add request.
    Atomic,
    /// A compare and swap request.
    CompareSwap,
    /// A fetch and add request.
    FetchAdd,
    /// A response of any kind.
    Response,
    /// A READ response.
    ReadResponse(Option<Place>),
    /// A positive acknowledgement.
    Ack,
    /// A negative acknowledgement, RNR aside.
    Nak,
    /// Receiver not ready.
    RnrNak,
    /// The result of an atomic.
    AtomicAck,
    /// A datagram.
    Datagram,
    /// A datagram to QP 1.
    Gsi,
    /// Congestion notification.
    Cnp,
}

impl PacketKind {
    /// All names of the grammar.
    pub const NAMES: [(&'static str, Self); 29] = [
        ("any", Self::Any),
        ("request", Self::Request),
        ("send", Self::Send(None)),
        ("send-first", Self::Send(Some(Place::First))),
        ("send-middle", Self::Send(Some(Place::Middle))),
        ("send-last", Self::Send(Some(Place::Last))),
        ("send-only", Self::Send(Some(Place::Only))),
        ("write", Self::Write(None)),
        ("write-first", Self::Write(Some(Place::First))),
        ("write-middle", Self::Write(Some(Place::Middle))),
        ("write-last", Self::Write(Some(Place::Last))),
        ("write-only", Self::Write(Some(Place::Only))),
        ("read-req", Self::ReadRequest),
        ("atomic", Self::Atomic),
        ("cmp-swap", Self::CompareSwap),
        ("fetch-add", Self::FetchAdd),
        ("response", Self::Response),
        ("read-resp", Self::ReadResponse(None)),
        ("read-resp-first", Self::ReadResponse(Some(Place::First))),
        ("read-resp-middle", Self::ReadResponse(Some(Place::Middle))),
        ("read-resp-last", Self::ReadResponse(Some(Place::Last))),
        ("read-resp-only", Self::ReadResponse(Some(Place::Only))),
        ("ack", Self::Ack),
        ("nak", Self::Nak),
        ("rnr", Self::RnrNak),
        ("atomic-ack", Self::AtomicAck),
        ("ud", Self::Datagram),
        ("gsi", Self::Gsi),
        ("cnp", Self::Cnp),
    ];

    /// The kind with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == name).map(|(_, kind)| *kind)
    }

    /// Whether `packet` is of this kind.
    #[must_use]
    pub fn matches(self, packet: &Packet<'_>) -> bool {
        match &packet.body {
            _ if self == Self::Any => true,
            Body::Request(request) => self.matches_request(&request.op),
            Body::Response(response) => self.matches_response(response),
            Body::Datagram(_) => {
                self == Self::Datagram || (self == Self::Gsi && packet.dest_qp == crate::types::Qpn::GSI)
            }
            Body::Cnp => self == Self::Cnp,
        }
    }

    fn matches_request(self, op: &RequestOp) -> bool {
        let at = |wanted: Option<Place>| wanted.is_none_or(|place| place == op.place());
        match (self, op) {
            (Self::Request, _) => true,
            (Self::Send(place), RequestOp::Send(..)) => at(place),
            (Self::Write(place), RequestOp::Write(_)) => at(place),
            (Self::ReadRequest, RequestOp::Read(_)) => true,
            (Self::Atomic | Self::CompareSwap, RequestOp::CompareSwap(_)) => true,
            (Self::Atomic | Self::FetchAdd, RequestOp::FetchAdd(_)) => true,
            _ => false,
        }
    }

    fn matches_response(self, response: &Response<'_>) -> bool {
        let read = |place: Place| match self {
            Self::ReadResponse(wanted) => wanted.is_none_or(|w| w == place),
            _ => false,
        };
        if self == Self::Response {
            return true;
        }
        match response.op {
            ResponseOp::ReadFirst(_) => read(Place::First),
            ResponseOp::ReadMiddle => read(Place::Middle),
            ResponseOp::ReadLast(_) => read(Place::Last),
            ResponseOp::ReadOnly(_) => read(Place::Only),
            ResponseOp::AtomicAcknowledge(..) => self == Self::AtomicAck,
            ResponseOp::Acknowledge(aeth) => match aeth.syndrome {
                Syndrome::Ack { .. } => self == Self::Ack,
                Syndrome::RnrNak(_) => self == Self::RnrNak,
                Syndrome::Nak(_) | Syndrome::Reserved(_) => self == Self::Nak,
            },
        }
    }
}

/// Tells packets that `stack` has no name for.
pub type PacketTest = Box<dyn Fn(&Packet<'_>) -> bool + Send>;
/// Makes a [`PacketTest`] for a name that is not one of [`PacketKind::NAMES`].
pub type Resolver<'a> = dyn Fn(&str) -> Option<PacketTest> + 'a;

/// Which packets a rule is about.
pub enum Matcher {
    /// Those of a kind.
    Kind(PacketKind),
    /// Those that pass a test.
    Test(PacketTest),
}

impl Matcher {
    fn matches(&self, packet: Option<&Packet<'_>>) -> bool {
        match (self, packet) {
            (Self::Kind(PacketKind::Any), _) => true,
            (Self::Kind(kind), Some(packet)) => kind.matches(packet),
            (Self::Test(test), Some(packet)) => test(packet),
            (_, None) => false,
        }
    }
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => kind.fmt(f),
            Self::Test(_) => f.write_str("Test"),
        }
    }
}

/// Which of the matching packets are harmed, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// These, both ends included.
    Range(u64, u64),
    /// Each one whose number this divides; at least 1.
    Every(u64),
}

impl Which {
    fn includes(self, number: u64) -> bool {
        match self {
            Self::Range(first, last) => (first..=last).contains(&number),
            Self::Every(step) => number.is_multiple_of(step.max(1)),
        }
    }
}

/// What is done to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It is lost.
    Drop,
    /// It is delivered twice.
    Duplicate,
    /// One bit in its middle is flipped.
    Corrupt,
    /// It is cut to this many bytes, BTH on; `None`: to half.
    Truncate(Option<usize>),
    /// It goes on this much later.
    Delay(Duration),
}

impl FaultAction {
    fn verdict(self, len: usize) -> Verdict {
        match self {
            Self::Drop => Verdict::DROP,
            Self::Duplicate => Verdict { copy: Some(Duration::ZERO), ..Verdict::PASS },
            Self::Corrupt => {
                Verdict { flips: [u32::try_from(len.saturating_mul(4)).ok(), None, None], ..Verdict::PASS }
            }
            Self::Truncate(keep) => Verdict { keep: Some(keep.unwrap_or(len / 2)), ..Verdict::PASS },
            Self::Delay(time) => Verdict { deliver: Some(time), ..Verdict::PASS },
        }
    }
}

/// One rule and what it met so far.
#[derive(Debug)]
pub struct FaultRule {
    /// For people: the text it was parsed from.
    pub label: String,
    /// What it is about.
    pub matcher: Matcher,
    /// Only packets that go this way.
    pub direction: Option<Direction>,
    /// Which of them.
    pub which: Which,
    /// What is done.
    pub action: FaultAction,
    /// Packets that matched.
    pub matched: u64,
    /// Packets that were harmed.
    pub harmed: u64,
}

impl FaultRule {
    /// A rule on a named kind, in both directions.
    #[must_use]
    pub fn new(action: FaultAction, kind: PacketKind, which: Which) -> Self {
        Self::with_matcher(action, Matcher::Kind(kind), which)
    }

    /// A rule on packets that pass a test, in both directions.
    #[must_use]
    pub fn on(action: FaultAction, test: PacketTest, which: Which) -> Self {
        Self::with_matcher(action, Matcher::Test(test), which)
    }

    fn with_matcher(action: FaultAction, matcher: Matcher, which: Which) -> Self {
        Self { label: String::new(), matcher, direction: None, which, action, matched: 0, harmed: 0 }
    }

    /// The same rule for one direction.
    #[must_use]
    pub fn only(self, direction: Direction) -> Self {
        Self { direction: Some(direction), ..self }
    }

    /// Reads a rule from text; see the grammar of the module. `resolve` knows further packet names.
    ///
    /// # Errors
    /// [`RuleError`] names the part that is wrong.
    pub fn parse(text: &str, resolve: &Resolver<'_>) -> Result<Self, RuleError> {
        let mut parts = text.split(':').map(str::trim);
        let action = parse_action(parts.next().unwrap_or_default())?;
        let name = parts.next().filter(|n| !n.is_empty()).ok_or(RuleError::NoPacket)?;
        let matcher = match PacketKind::from_name(name) {
            Some(kind) => Matcher::Kind(kind),
            None => Matcher::Test(resolve(name).ok_or_else(|| RuleError::UnknownPacket { name: name.to_owned() })?),
        };
        let mut rule = Self::with_matcher(action, matcher, Which::Every(1));
        text.clone_into(&mut rule.label);
        for part in parts {
            match part {
                "in" | "rx" => rule.direction = Some(Direction::In),
                "out" | "tx" => rule.direction = Some(Direction::Out),
                _ => rule.which = parse_which(part)?,
            }
        }
        Ok(rule)
    }

    /// Counts the packet; whether it is to be harmed.
    fn fires(&mut self, direction: Direction, packet: Option<&Packet<'_>>) -> bool {
        if self.direction.is_some_and(|d| d != direction) || !self.matcher.matches(packet) {
            return false;
        }
        self.matched += 1;
        self.which.includes(self.matched)
    }
}

/// A rule's text is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// The action is not one.
    #[error("`{action}` is not an action; use drop, dup, corrupt, truncate[=BYTES] or delay=TIME")]
    UnknownAction {
        /// As given.
        action: String,
    },
    /// There is no packet name.
    #[error("a rule is ACTION:PACKET[:WHICH][:in|out], e.g. drop:ack:3")]
    NoPacket,
    /// The packet name is not one.
    #[error("`{name}` names no packet; e.g. ack, nak, rnr, read-req, read-resp-middle, write-only, send-last, any")]
    UnknownPacket {
        /// As given.
        name: String,
    },
    /// The modifier is not one.
    #[error("`{part}` is not N, N-M, every, every=K, in or out (numbers from 1)")]
    BadWhich {
        /// As given.
        part: String,
    },
    /// A length that is not a number.
    #[error("`{length}` is not a number of bytes")]
    BadLength {
        /// As given.
        length: String,
    },
    /// A time without or with a wrong unit.
    #[error("`{time}` is not a time; e.g. 100us, 5ms, 1s")]
    BadTime {
        /// As given.
        time: String,
    },
    /// More rules than an injector holds.
    #[error("at most {RULES_MAX} rules")]
    TooMany,
}

fn parse_action(text: &str) -> Result<FaultAction, RuleError> {
    match text.split_once('=') {
        None => match text {
            "drop" => Ok(FaultAction::Drop),
            "dup" | "duplicate" => Ok(FaultAction::Duplicate),
            "corrupt" => Ok(FaultAction::Corrupt),
            "truncate" => Ok(FaultAction::Truncate(None)),
            _ => Err(RuleError::UnknownAction { action: text.to_owned() }),
        },
        Some(("truncate", length)) => {
            let keep = length.parse().map_err(|_| RuleError::BadLength { length: length.to_owned() })?;
            Ok(FaultAction::Truncate(Some(keep)))
        }
        Some(("delay", time)) => Ok(FaultAction::Delay(parse_time(time)?)),
        Some(_) => Err(RuleError::UnknownAction { action: text.to_owned() }),
    }
}

fn parse_which(part: &str) -> Result<Which, RuleError> {
    let bad = || RuleError::BadWhich { part: part.to_owned() };
    let number = |text: &str| text.parse::<u64>().ok().filter(|n| *n > 0).ok_or_else(bad);
    if part == "every" {
        return Ok(Which::Every(1));
    }
    if let Some(step) = part.strip_prefix("every=") {
        return Ok(Which::Every(number(step)?));
    }
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(bad());
    }
    Ok(Which::Range(first, last))
}

fn parse_time(text: &str) -> Result<Duration, RuleError> {
    let bad = || RuleError::BadTime { time: text.to_owned() };
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let scale: u64 = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(bad()),
    };
    number.checked_mul(scale).map(Duration::from_nanos).ok_or_else(bad)
}

/// The judge of a [`FaultInjector`].
#[derive(Debug, Default)]
pub struct Rules(Vec<FaultRule>);

impl Judge for Rules {
    fn judge(&mut self, _now: Instant, direction: Direction, _flow: &Flow, bytes: &[u8]) -> Verdict {
        if self.0.is_empty() {
            return Verdict::PASS;
        }
        self.verdict(direction, Packet::parse(bytes).ok().as_ref(), bytes.len())
    }
}

impl Rules {
    /// Every rule counts the packet; the first that fires decides.
    fn verdict(&mut self, direction: Direction, packet: Option<&Packet<'_>>, len: usize) -> Verdict {
        let mut verdict = None;
        for rule in &mut self.0 {
            if rule.fires(direction, packet) && verdict.is_none() {
                rule.harmed += 1;
                verdict = Some(rule.action.verdict(len));
            }
        }
        verdict.unwrap_or(Verdict::PASS)
    }
}

/// A device whose packets are harmed by rules. A packet is counted by every rule that matches it; the first that fires
/// decides.
pub type FaultInjector<D> = Intercepted<D, Rules>;

impl<D: Device> FaultInjector<D> {
    /// `inner` without rules yet.
    pub fn new(inner: D) -> Self {
        Self::around(inner, Rules::default(), "fault")
    }

    /// Adds a rule after those there are.
    ///
    /// # Errors
    /// [`RuleError::TooMany`].
    pub fn add(&mut self, rule: FaultRule) -> Result<(), RuleError> {
        if self.judge.0.len() >= RULES_MAX {
            return Err(RuleError::TooMany);
        }
        self.judge.0.push(rule);
        Ok(())
    }

    /// Removes all rules.
    pub fn clear(&mut self) {
        self.judge.0.clear();
    }

    /// The rules with their counts.
    #[must_use]
    pub fn rules(&self) -> &[FaultRule] {
        &self.judge.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, at, flow, send};
    use super::*;
    use crate::burst::Medium;
    use crate::types::{Msn, PKey, Psn, Qpn, Rkey, RnrTimer};
    use crate::wire::{self, Aeth, IpFields, NakCode, Request, Reth, SendTail, Service};

    fn packet(body: Body<'_>) -> Packet<'_> {
        Packet {
            dest_qp: Qpn::from_wire(0x20),
            pkey: PKey::DEFAULT,
            psn: Psn::from_wire(7),
            solicited: false,
            mig_req: true,
            ack_req: false,
            fecn: false,
            becn: false,
            reserved: (0, 0),
            body,
        }
    }

    fn acknowledge(syndrome: Syndrome) -> Packet<'static> {
        let aeth = Aeth { syndrome, msn: Msn::from_wire(1) };
        packet(Body::Response(Response { op: ResponseOp::Acknowledge(aeth), payload: &[] }))
    }

    fn request(op: RequestOp) -> Packet<'static> {
        packet(Body::Request(Request { service: Service::Rc, op, payload: &[] }))
    }

    fn parse(text: &str) -> FaultRule {
        FaultRule::parse(text, &|_| None).unwrap()
    }

    /// The verdicts on `count` equal packets.
    fn verdicts(rule: FaultRule, packet: &Packet<'_>, count: usize) -> Vec<Verdict> {
        let mut rules = Rules(vec![rule]);
        (0..count).map(|_| rules.verdict(Direction::Out, Some(packet), 100)).collect()
    }

    #[test]
    fn the_third_ack_is_lost() {
        let ack = acknowledge(Syndrome::ACK);
        let pass = Verdict::PASS;
        assert_eq!(verdicts(parse("drop:ack:3"), &ack, 4), [pass, pass, Verdict::DROP, pass]);
        assert_eq!(verdicts(parse("drop:ack:2-3"), &ack, 4), [pass, Verdict::DROP, Verdict::DROP, pass]);
        assert_eq!(verdicts(parse("drop:ack:every=2"), &ack, 4), [pass, Verdict::DROP, pass, Verdict::DROP]);
        assert_eq!(verdicts(parse("drop:ack"), &ack, 2), [Verdict::DROP; 2]);
        assert_eq!(verdicts(parse("drop:nak"), &ack, 2), [pass; 2]);
    }

    /// The bytes of `packet` as they travel.
    fn bytes_of(packet: &Packet<'_>, flow: &Flow) -> Vec<u8> {
        let end = packet.header_len();
        let mut bytes = vec![0; wire::segment_len(end, 0)];
        packet.write_headers(0, &mut bytes).unwrap();
        wire::seal(flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, end);
        bytes
    }

    #[test]
    fn a_device_loses_what_its_rules_say() {
        let flow = flow("10.0.0.1", "10.0.0.2");
        let (ack, cnp) = (bytes_of(&acknowledge(Syndrome::ACK), &flow), bytes_of(&packet(Body::Cnp), &flow));
        let mut device = FaultInjector::new(Bench::new(Medium::Udp));
        device.add(parse("drop:ack:2:out")).unwrap();
        device.add(parse("dup:cnp")).unwrap();
        assert_eq!(send(&mut device, at(0), flow, &[&ack, &cnp, &ack, &ack, b"not a packet"]), 5);
        assert_eq!(send(&mut device, at(1), flow, &[]), 0);
        let mut sent: Vec<_> = device.inner().sent.iter().map(|(_, bytes)| bytes.as_slice()).collect();
        sent.sort_unstable();
        let mut expected = [&ack[..], &ack, &cnp, &cnp, b"not a packet"];
        expected.sort_unstable();
        assert_eq!(sent, expected);
        assert_eq!(device.rules().iter().map(|r| (r.matched, r.harmed)).collect::<Vec<_>>(), [(3, 1), (1, 1)]);
        device.clear();
        for _ in 0..RULES_MAX {
            device.add(parse("drop:any")).unwrap();
        }
        assert_eq!(device.add(parse("drop:any")), Err(RuleError::TooMany));
    }

    #[test]
    fn each_action_has_its_verdict() {
        let ack = acknowledge(Syndrome::ACK);
        let one = |text: &str| verdicts(parse(text), &ack, 1)[0];
        assert_eq!(one("dup:any").copy, Some(Duration::ZERO));
        assert_eq!(one("delay=5ms:ack").deliver, Some(Duration::from_millis(5)));
        assert_eq!(one("truncate=7:ack").keep, Some(7));
        assert_eq!(one("truncate:ack").keep, Some(50));
        let mut bytes = [0; 100];
        assert_eq!(one("corrupt:response").damage(&mut bytes), 100);
        assert_eq!(bytes.iter().map(|b| b.count_ones()).sum::<u32>(), 1);
        assert_eq!(bytes[50], 1);
    }

    #[test]
    fn syndromes_and_places_are_told_apart() {
        let reth = Reth { addr: 0, rkey: Rkey::new(1), length: 0 };
        let rnr = acknowledge(Syndrome::RnrNak(RnrTimer::DEFAULT));
        let nak = acknowledge(Syndrome::Nak(NakCode::PsnSequenceError));
        let send = request(RequestOp::Send(Place::Middle, SendTail::None));
        let middle = packet(Body::Response(Response { op: ResponseOp::ReadMiddle, payload: &[] }));
        let cases: [(&str, &[&Packet<'_>]); 8] = [
            ("rnr", &[&rnr]),
            ("nak", &[&nak]),
            ("response", &[&rnr, &nak, &middle]),
            ("send", &[&send]),
            ("send-middle", &[&send]),
            ("send-last", &[]),
            ("read-resp-middle", &[&middle]),
            ("request", &[&send]),
        ];
        for (name, expected) in cases {
            let kind = PacketKind::from_name(name).unwrap();
            for p in [&rnr, &nak, &send, &middle] {
                assert_eq!(kind.matches(p), expected.contains(&p), "{name} on {p:?}");
            }
        }
        assert!(PacketKind::ReadRequest.matches(&request(RequestOp::Read(reth))));
    }

    #[test]
    fn direction_and_outside_names() {
        let resolve = |name: &str| -> Option<PacketTest> {
            (name == "rtu").then(|| Box::new(|p: &Packet<'_>| p.psn == Psn::from_wire(7)) as PacketTest)
        };
        let rule = FaultRule::parse("drop:rtu:1:in", &resolve).unwrap();
        let mut rules = Rules(vec![rule]);
        let ack = acknowledge(Syndrome::ACK);
        assert_eq!(rules.verdict(Direction::Out, Some(&ack), 100), Verdict::PASS);
        assert_eq!(rules.verdict(Direction::In, Some(&ack), 100), Verdict::DROP);
        assert_eq!(rules.verdict(Direction::In, None, 100), Verdict::PASS, "not parsed, so nothing to test");
        assert_eq!((rules.0[0].matched, rules.0[0].harmed, rules.0[0].label.as_str()), (1, 1, "drop:rtu:1:in"));
    }

    #[test]
    fn every_rule_counts_and_the_first_decides() {
        let mut rules = Rules(vec![parse("drop:ack:2"), parse("dup:response:every"), parse("corrupt:any:2")]);
        let ack = acknowledge(Syndrome::ACK);
        assert!(rules.verdict(Direction::Out, Some(&ack), 9).copy.is_some());
        assert_eq!(rules.verdict(Direction::Out, Some(&ack), 9), Verdict::DROP);
        assert_eq!(rules.0.iter().map(|r| (r.matched, r.harmed)).collect::<Vec<_>>(), [(2, 1), (2, 1), (2, 0)]);
    }

    #[test]
    fn bad_text_names_the_bad_part() {
        let error = |text: &str| FaultRule::parse(text, &|_| None).unwrap_err().to_string();
        for (text, names) in [
            ("lose:ack", "`lose`"),
            ("drop", "ACTION:PACKET"),
            ("drop:", "ACTION:PACKET"),
            ("drop:rtu", "`rtu`"),
            ("drop:ack:0", "`0`"),
            ("drop:ack:third", "`third`"),
            ("drop:ack:5-2", "`5-2`"),
            ("drop:ack:every=x", "`every=x`"),
            ("delay=5:ack", "`5`"),
            ("delay=5min:ack", "`5min`"),
            ("truncate=x:ack", "`x`"),
            ("", "``"),
        ] {
            assert!(error(text).contains(names), "{text}: {}", error(text));
        }
    }

    #[test]
    fn every_name_is_its_own() {
        for (name, kind) in PacketKind::NAMES {
            assert_eq!(PacketKind::from_name(name), Some(kind));
        }
    }
}
