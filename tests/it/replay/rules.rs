//! Our packets against the captured ones, and the list of differences that are allowed.
//!
//! Owns the comparison. Packets are compared whole, ICRC aside: a field that differs must be named by a [`Rule`], and
//! every use of a rule is counted. Never runs an endpoint.

use std::collections::BTreeMap;

use uroce::types::PathMtu;
use uroce::wire::{Aeth, Body, NakCode, Opcode, Packet, RequestOp, ResponseOp, Reth, Syndrome};

/// A difference that rxe's side would accept, and why it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// M bit: we send 1 (the path is in its migrated state), as hardware does and some hardware asks for. rxe sends 0
    /// and looks at neither.
    Migrated,
    /// IPv6 flow label: we send that of the path, rxe 0. The ICRC does not cover it, and nobody compares it.
    FlowLabel,
    /// A SEND longer than its receive: NAK invalid request, as the specification has it; rxe says operational error.
    TooLong,
    /// The answer to a READ that asks for the rest begins with First or Only, as the specification has it; rxe goes on
    /// with Middle or Last. rxe takes both at the first PSN of the repeat.
    ReadBegins,
    /// Requests after a loss: how soon and how far one goes back is the requester's choice, so what goes out again
    /// differs in number. Each packet that does is one that rxe sent too, or a READ for the rest of the same data.
    Recovery,
}

/// What was compared, and how often each rule was needed.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) requests: usize,
    pub(super) responses: usize,
    pub(super) rules: BTreeMap<Rule, usize>,
}

impl Tally {
    pub(super) fn used(&mut self, rule: Rule, times: usize) {
        if times > 0 {
            *self.rules.entry(rule).or_default() += times;
        }
    }
}

/// Whether the two are one packet but for the M bit.
fn alike(ours: &Packet<'_>, theirs: &Packet<'_>) -> bool {
    Packet { mig_req: theirs.mig_req, ..*ours } == *theirs
}

/// Requests, in order and each once: what is sent when nothing is lost.
pub(super) fn requests(ours: &[Packet<'_>], theirs: &[Packet<'_>], tally: &mut Tally) -> Result<(), String> {
    for i in 0..ours.len().max(theirs.len()) {
        match (ours.get(i), theirs.get(i)) {
            (Some(o), Some(t)) if alike(o, t) => {}
            (o, t) => return Err(format!("request {i}: {}", difference(o, t))),
        }
    }
    tally.requests += theirs.len();
    Ok(())
}

/// Requests where packets were lost: every one of ours is one of theirs, and none of theirs is missing; how often each
/// goes is [`Rule::Recovery`].
pub(super) fn requests_after_loss(
    ours: &[Packet<'_>],
    theirs: &[Packet<'_>],
    mtu: PathMtu,
    tally: &mut Tally,
) -> Result<(), String> {
    let (sent, captured) = (by_psn(ours), by_psn(theirs));
    let fits = |o: &Packet<'_>, t: &Packet<'_>| alike(o, t) || same_rest(o, t, mtu);
    let mut times = 0;
    for (psn, list) in &sent {
        for o in list {
            if !theirs.iter().any(|t| fits(o, t)) {
                return Err(format!("rxe never sent {}", show(o)));
            }
        }
        times += list.len().abs_diff(captured.get(psn).map_or(0, Vec::len));
    }
    for (psn, list) in &captured {
        for t in list {
            if !ours.iter().any(|o| fits(o, t)) {
                return Err(format!("we never sent {}", show(t)));
            }
        }
        times += if sent.contains_key(psn) { 0 } else { list.len() };
    }
    tally.requests += theirs.len();
    tally.used(Rule::Recovery, times);
    Ok(())
}

fn by_psn<'a>(packets: &[Packet<'a>]) -> BTreeMap<u32, Vec<Packet<'a>>> {
    let mut all = BTreeMap::<u32, Vec<_>>::new();
    for packet in packets {
        all.entry(packet.psn.get()).or_default().push(*packet);
    }
    all
}

/// Whether both are READs for the same data, one for less of it: from another packet on, up to the same end.
fn same_rest(ours: &Packet<'_>, theirs: &Packet<'_>, mtu: PathMtu) -> bool {
    let (Some(o), Some(t)) = (read(ours), read(theirs)) else { return false };
    let packets = i64::from(ours.psn.distance_from(theirs.psn));
    let skipped = packets * i64::try_from(mtu.bytes()).expect("a path MTU");
    o.rkey == t.rkey
        && i128::from(o.addr) == i128::from(t.addr) + i128::from(skipped)
        && i64::from(o.length) == i64::from(t.length) - skipped
}

fn read(packet: &Packet<'_>) -> Option<Reth> {
    match packet.body {
        Body::Request(r) => match r.op {
            RequestOp::Read(reth) => Some(reth),
            _ => None,
        },
        _ => None,
    }
}

/// Answers, in order.
pub(super) fn responses(ours: &[Packet<'_>], theirs: &[Packet<'_>], tally: &mut Tally) -> Result<(), String> {
    for i in 0..ours.len().max(theirs.len()) {
        match (ours.get(i), theirs.get(i)) {
            (Some(o), Some(t)) if alike(o, t) => {}
            (Some(o), Some(t)) if begins_read(o, t) => tally.used(Rule::ReadBegins, 1),
            (Some(o), Some(t)) if too_long(o, t) => tally.used(Rule::TooLong, 1),
            (o, t) => return Err(format!("answer {i}: {}", difference(o, t))),
        }
    }
    tally.responses += theirs.len();
    Ok(())
}

/// [`Rule::ReadBegins`]: the same data at the same PSN, First for Middle or Only for Last.
fn begins_read(ours: &Packet<'_>, theirs: &Packet<'_>) -> bool {
    let (Body::Response(o), Body::Response(t)) = (ours.body, theirs.body) else { return false };
    let kinds = match (o.op, t.op) {
        (ResponseOp::ReadFirst(Aeth { syndrome: Syndrome::Ack { .. }, .. }), ResponseOp::ReadMiddle) => true,
        (ResponseOp::ReadOnly(a), ResponseOp::ReadLast(b)) => a == b,
        _ => false,
    };
    kinds && o.payload == t.payload && same_header(ours, theirs)
}

/// [`Rule::TooLong`].
fn too_long(ours: &Packet<'_>, theirs: &Packet<'_>) -> bool {
    let nak = |p: &Packet<'_>, code| match p.body {
        Body::Response(r) => match r.op {
            ResponseOp::Acknowledge(aeth) => (aeth.syndrome == Syndrome::Nak(code)).then_some(aeth.msn),
            _ => None,
        },
        _ => None,
    };
    let (o, t) = (nak(ours, NakCode::InvalidRequest), nak(theirs, NakCode::RemoteOperationalError));
    o.is_some() && o == t && same_header(ours, theirs)
}

/// All of the BTH but opcode and M bit.
fn same_header(ours: &Packet<'_>, theirs: &Packet<'_>) -> bool {
    alike(&Packet { body: theirs.body, ..*ours }, theirs)
}

fn difference(ours: Option<&Packet<'_>>, theirs: Option<&Packet<'_>>) -> String {
    let side = |p: Option<&Packet<'_>>| p.map_or("nothing".to_owned(), show);
    format!("we send {}, rxe {}", side(ours), side(theirs))
}

/// A packet in one line, its payload by its length.
fn show(packet: &Packet<'_>) -> String {
    let op = match &packet.body {
        Body::Request(r) => format!("{:?}", r.op),
        Body::Response(r) => format!("{:?}", r.op),
        Body::Datagram(d) => format!("{:?} to {:?}", d.imm, d.qkey),
        Body::Cnp => String::new(),
    };
    let (name, psn, len) = (Opcode::new(packet.opcode()).name(), packet.psn, packet.payload().len());
    format!("{name} PSN {psn:?} A {} with {len} bytes {op}", u8::from(packet.ack_req))
}
