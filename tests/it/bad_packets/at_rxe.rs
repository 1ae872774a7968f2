//! The same packets, sent at Linux's rxe: what it does with each, and where that is not our verdict.
//!
//! Owns the connection to `tests/rxe-vm/src/target.c`, which makes the QPs in the guest, the raw device that carries
//! the packets, and the table of differences. What a packet is and what we do with it stands in the corpus.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program whose result is what it prints")]

use core::net::IpAddr;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use uroce::device::Device;
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::types::{Gid, Qpn};
use uroce::verbs::QpType;
use uroce::wire::{DONT_FRAGMENT, Flow, IpFields, Packet};

use super::shot::{Key, Psn, Shot};
use super::{Case, Situation, Verdict, Waiting, corpus};

/// First PSN of both sides.
const START: u32 = 100;
/// The QP that packets come from.
const OUR_QPN: u32 = 17;
const TARGET_PORT: u16 = 18_517;
/// How long an answer may take that is due; that one takes which need not come.
const DUE: Duration = Duration::from_millis(60);
const QUIET: Duration = Duration::from_millis(4);
/// And when what was seen is not our verdict, once more with this.
const PATIENT: Duration = Duration::from_millis(150);
const STATE_ERR: u32 = 6;

type Failure = String;

fn text(e: impl core::fmt::Display) -> Failure {
    e.to_string()
}

/// What was seen: opcode, PSN and syndrome of what came back.
type Answer = (u8, Option<u8>);

/// A connection to the target program.
struct Target {
    lines: BufReader<TcpStream>,
}

impl Target {
    fn ask(&mut self, command: &str) -> Result<String, Failure> {
        let gone = || "the guest is gone".to_owned();
        self.lines.get_mut().write_all(format!("{command}\n").as_bytes()).map_err(|_| gone())?;
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(n) if n > 0 => Ok(line.trim().to_owned()),
            _ => Err(gone()),
        }
    }

    /// The numbers of the answer; `None` where the kernel refuses.
    fn numbers(&mut self, command: &str) -> Result<Option<Vec<u64>>, Failure> {
        let line = self.ask(command)?;
        Ok(line.split_whitespace().map(|w| w.parse().ok()).collect())
    }
}

struct Range {
    device: AfPacket,
    target: Target,
    ours: IpAddr,
    theirs: IpAddr,
    clock: Instant,
}

/// The QP of a case, with what it made.
struct Mark {
    qpn: u32,
    addr: u64,
    rkey: u32,
    /// The key that the case's own packet names, and its address.
    place: (u64, u32),
    expected: u32,
}

impl Range {
    fn now(&self) -> uroce::time::Instant {
        uroce::time::Instant::from_nanos(u64::try_from(self.clock.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn flow(&self, shot: &Shot) -> Flow {
        let ours = |given: Option<IpAddr>, usual| given.map_or(usual, |_| "10.77.0.55".parse().unwrap_or(usual));
        Flow {
            // The corpus has addresses of its own network: each that is not the usual one becomes a stranger's.
            src: ours(shot.src, self.ours),
            dst: self.theirs,
            src_port: 50_000,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            vlan: None,
        }
    }

    /// False where the device does not carry it.
    fn send(&mut self, shot: &Shot, mark: &Mark, place: (u64, u32), psn: u32) -> Result<bool, Failure> {
        let flow = self.flow(shot);
        let addr = shot.addr.unwrap_or(place.0.wrapping_add_signed(shot.at));
        let unsealed = shot.unsealed(mark.qpn, psn, addr, place.1);
        let deadline = Instant::now() + DUE;
        let mut sent = false;
        while !sent {
            let now = self.now();
            self.device
                .transmit(now, 1, &mut |room| {
                    let room = (!sent).then_some(room)?;
                    let ip = IpFields { id: room.ids.id(0), flags_fragment: DONT_FRAGMENT };
                    let bytes = shot.sealed_in(&flow, ip, unsealed.clone());
                    let out = room.buf.get_mut(room.headroom..)?;
                    let headers = uroce::wire::write_outer(&flow, ip.id, bytes.len(), out)?;
                    let len = headers + bytes.len();
                    out.get_mut(headers..len)?.copy_from_slice(&bytes);
                    sent = true;
                    Some(uroce::burst::TxBurst { flow, len, segment: bytes.len().max(1), segments: 1 })
                })
                .map_err(text)?;
            if Instant::now() > deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What comes within `time`; returns at the first answer unless all are wanted.
    fn answers(&mut self, time: Duration, all: bool) -> Result<Vec<Answer>, Failure> {
        let mut seen = Vec::new();
        let deadline = Instant::now() + time;
        loop {
            let now = self.now();
            self.device
                .receive(now, 16, &mut |burst| {
                    if let Ok(packet) = Packet::parse(burst.bytes)
                        && packet.dest_qp == Qpn::from_wire(OUR_QPN)
                    {
                        let syndrome = (packet.opcode() == 0x11).then(|| burst.bytes[12]);
                        seen.push((packet.opcode(), syndrome));
                    }
                })
                .map_err(text)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || (!all && !seen.is_empty()) {
                return Ok(seen);
            }
            self.device.wait(Some(left.min(Duration::from_millis(1)))).map_err(text)?;
        }
    }

    /// One case: `None` where it cannot be set up on Linux.
    fn shoot(&mut self, case: &Case, patience: Duration) -> Result<Option<String>, Failure> {
        let Some(mark) = self.set_up(case)? else { return Ok(None) };
        self.target.ask("fill")?;
        self.answers(Duration::ZERO, true)?;
        let psn = match case.shot.psn {
            Psn::Awaited(offset) => mark.expected.wrapping_add_signed(offset),
            Psn::First(offset) => START.wrapping_add_signed(offset),
        } & 0xFF_FFFF;
        if !self.send(&case.shot, &mark, mark.place, psn)? {
            return Ok(None);
        }
        let due = !matches!(case.verdict, Verdict::Drop(_) | Verdict::Silent | Verdict::Lands);
        let first = if due { DUE.max(patience) } else { patience };
        let mut seen = self.answers(first, false)?;
        let look = self.look()?;
        seen.extend(self.answers(QUIET, true)?);
        // The state changes behind the answer.
        let look = if look.0 == STATE_ERR || seen.is_empty() { look } else { self.look()?.and(look) };
        Ok(Some(describe(case, &seen, &look)))
    }

    fn look(&mut self) -> Result<Look, Failure> {
        let numbers = self.target.numbers("look")?.ok_or("the target cannot look")?;
        let (state, written) = (numbers.first().copied().unwrap_or(0), numbers.get(1) == Some(&1));
        Ok(Look(u32::try_from(state).unwrap_or(0), written, numbers.into_iter().skip(2).collect()))
    }

    fn set_up(&mut self, case: &Case) -> Result<Option<Mark>, Failure> {
        // A frame for another address is the IP stack's, not rxe's.
        if case.shot.dst.is_some() {
            return Ok(None);
        }
        let Some(command) = new_command(case, self.ours) else { return Ok(None) };
        let Some(made) = self.target.numbers(&command)? else { return Ok(None) };
        let [qpn, addr, rkey] = made[..] else { return Ok(None) };
        let number = |n: u64| u32::try_from(n).unwrap_or(0);
        let (qpn, rkey) = (number(qpn), number(rkey));
        let mut mark = Mark { qpn, addr, rkey, place: (addr, rkey), expected: START };
        let Some(place) = self.place(case.shot.key, &mark)? else { return Ok(None) };
        mark.place = place;
        if let Situation::Wait(waiting) = case.situation {
            for what in waits(waiting) {
                self.target.ask(&format!("post {what} {addr} {rkey}"))?;
            }
            self.answers(DUE, false)?;
            self.answers(QUIET, true)?;
            return Ok(Some(mark));
        }
        for (shot, psns) in preparation(case) {
            let psn = match shot.psn {
                Psn::Awaited(offset) | Psn::First(offset) => mark.expected.wrapping_add_signed(offset),
            };
            let Some(place) = self.place(shot.key, &mark)? else { return Ok(None) };
            self.send(&shot, &mark, place, psn & 0xFF_FFFF)?;
            self.answers(if case.qp == QpType::Rc { DUE } else { QUIET }, false)?;
            mark.expected += psns;
        }
        Ok(Some(mark))
    }

    fn place(&mut self, key: Key, mark: &Mark) -> Result<Option<(u64, u32)>, Failure> {
        let command = match key {
            Key::Good => return Ok(Some((mark.addr, mark.rkey))),
            Key::Flipped(bit) => return Ok(Some((mark.addr, mark.rkey ^ 1 << bit))),
            Key::Raw(raw) => return Ok(Some((mark.addr, raw))),
            Key::Rights(bits) => format!("key rights {}", bits & 0xF),
            Key::OtherPd => "key pd".into(),
            Key::Gone => "key gone".into(),
            // Only the kernel registers fast; what a peer may invalidate is a window.
            Key::Fast => "key window 14".into(),
            Key::Window(bits) => format!("key window {}", bits & 0xE),
            Key::Unbound => "key unbound".into(),
            Key::Invalidated | Key::OtherQp => return Ok(None),
        };
        let made = self.target.numbers(&command)?;
        Ok(made.and_then(|n| Some((*n.first()?, u32::try_from(*n.get(1)?).ok()?))))
    }
}

/// State, whether memory was written, statuses of completions.
struct Look(u32, bool, Vec<u64>);

impl Look {
    /// This, with what was seen before.
    fn and(self, before: Self) -> Self {
        Self(self.0, self.1 || before.1, before.2.into_iter().chain(self.2).collect())
    }
}

const fn waits(waiting: Waiting) -> &'static [&'static str] {
    match waiting {
        Waiting::Write => &["write"],
        Waiting::Read => &["read"],
        Waiting::Atomic => &["atomic"],
        Waiting::ReadWrite => &["read", "write"],
    }
}

fn new_command(case: &Case, ours: IpAddr) -> Option<String> {
    let qp = match case.qp {
        QpType::Rc => "rc",
        QpType::Uc => "uc",
        QpType::Ud => "ud",
        QpType::Gsi => return None,
    };
    let depth = match case.situation {
        Situation::NoDepth => 0,
        Situation::Forgotten(_) => 1,
        // An answer that waits cannot be had on demand.
        Situation::DepthUsed => return None,
        _ => 16,
    };
    let (receives, bytes) = match case.situation {
        Situation::NoReceive | Situation::InWrite(_, true) | Situation::NakOut(true) => (0, 0),
        Situation::SmallReceive => (1, 300),
        Situation::BadReceive => (1, -4096),
        _ => (2, 6000),
    };
    let rights = if let Situation::Rights(bits) = case.situation { bits & 0xF } else { 0xF };
    let state = match case.situation {
        Situation::InState(uroce::verbs::QpState::Reset) => "reset",
        Situation::InState(uroce::verbs::QpState::Init) => "init",
        Situation::InState(uroce::verbs::QpState::Rtr) => "rtr",
        Situation::InState(uroce::verbs::QpState::Err) => "err",
        _ => "rts",
    };
    let gid = core::net::Ipv6Addr::from(Gid::from(ours).to_bytes());
    Some(format!("new {qp} {depth} {rights} {receives} {bytes} {state} {START} {OUR_QPN} {gid}"))
}

/// The packets that bring the QP into the situation, with the PSNs that each takes.
fn preparation(case: &Case) -> Vec<(Shot, u32)> {
    let class = if case.qp == QpType::Uc { 0x20 } else { 0 };
    let one = |opcode| (Shot::new(opcode), 1);
    match case.situation {
        Situation::InSend => vec![one(class)],
        Situation::SmallReceive if case.qp != QpType::Ud => vec![one(class)],
        Situation::InWrite(length, _) => vec![(Shot { length: Some(length), ..Shot::new(class | 6) }, 1)],
        Situation::NakOut(false) => vec![(Shot { psn: Psn::Awaited(5), ..Shot::new(0x0A) }, 0)],
        Situation::NakOut(true) => vec![(Shot::new(0x04), 0)],
        Situation::After(0x0C) => vec![one(0x0A), one(0x0C)],
        Situation::After(opcode) => vec![one(opcode)],
        Situation::AfterLongRead => vec![one(0x0A), (Shot { length: Some(600), ..Shot::new(0x0C) }, 3)],
        Situation::Forgotten(opcode) => vec![one(opcode), one(0x0C)],
        _ => Vec::new(),
    }
}

/// Our verdict in the words that are used for rxe.
fn ours(verdict: Verdict) -> String {
    match verdict {
        Verdict::Drop(_) | Verdict::Silent => "silence".into(),
        Verdict::Nak(syndrome, _) => format!("NAK {syndrome:#04x}, ERR"),
        Verdict::SequenceNak => "NAK 0x60".into(),
        Verdict::Rnr => "RNR NAK".into(),
        Verdict::Answer(opcode, _) => answer(opcode, None),
        Verdict::AckThenErr => "ACK, ERR".into(),
        Verdict::Fails(status) => format!("the send fails ({})", status as u8),
        Verdict::Completes => "the send completes".into(),
        Verdict::Resends(_) => "sent again".into(),
        Verdict::Lands => "lands".into(),
    }
}

fn answer(opcode: u8, syndrome: Option<u8>) -> String {
    match (opcode, syndrome.map(|s| s >> 5)) {
        (0x11, None | Some(0)) => "ACK".into(),
        (0x11, Some(1)) => "RNR NAK".into(),
        (0x11, Some(_)) => format!("NAK {:#04x}", syndrome.unwrap_or(0)),
        (0x0D..=0x10, _) => "READ response".into(),
        (0x12, _) => "atomic response".into(),
        _ => format!("opcode {opcode:#04x}"),
    }
}

fn describe(case: &Case, seen: &[Answer], look: &Look) -> String {
    let Look(state, written, statuses) = look;
    let died = *state == STATE_ERR && !matches!(case.situation, Situation::InState(_));
    if let Situation::Wait(_) = case.situation {
        return match (statuses.first(), seen.first()) {
            (Some(0), _) => "the send completes".into(),
            (Some(status), _) => format!("the send fails ({status})"),
            (None, Some((0x11, _))) => "an ACK".into(),
            (None, Some(_)) => "sent again".into(),
            (None, None) if died => "silence, ERR".into(),
            (None, None) => "silence".into(),
        };
    }
    // READs that were executed before are answered before.
    let told = seen.iter().find(|a| a.1.is_some_and(|s| s >> 5 != 0)).or(seen.first());
    let said = match told {
        Some((opcode, syndrome)) => answer(*opcode, *syndrome),
        None if case.qp != QpType::Rc && (*written || statuses.first() == Some(&0)) => "lands".into(),
        None => "silence".into(),
    };
    if died { format!("{said}, ERR") } else { said }
}

/// `NAME TAB OURS TAB RXE'S` lines.
fn append(path: &str, name: &str, ours: &str, theirs: &str) -> Result<(), Failure> {
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(text)?;
    writeln!(file, "{name}\t{ours}\t{theirs}").map_err(text)
}

/// Goes on behind the cases that `results` has. 3: the guest went away under a case, which is noted.
fn run(interface: &str, our_ip: &str, their_ip: &str, results: &str) -> Result<u8, Failure> {
    let done = std::fs::read_to_string(results).map_or(0, |t| t.lines().count());
    let stream = TcpStream::connect((their_ip, TARGET_PORT)).map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(text)?;
    let mut range = Range {
        device: AfPacket::open(AfPacketConfig::shared(interface)).map_err(text)?,
        target: Target { lines: BufReader::new(stream) },
        ours: our_ip.parse().map_err(text)?,
        theirs: their_ip.parse().map_err(text)?,
        clock: Instant::now(),
    };
    for case in corpus().iter().skip(done) {
        let ours = ours(case.verdict);
        let theirs = match range.shoot(case, QUIET) {
            Ok(Some(seen)) if seen != ours => range.shoot(case, PATIENT),
            other => other,
        };
        match theirs {
            Ok(seen) => append(results, &case.name, &ours, &seen.unwrap_or("not possible".into()))?,
            Err(why) => {
                append(results, &case.name, &ours, &why)?;
                return Ok(3);
            }
        }
    }
    Ok(0)
}

/// The page of the book.
fn report(results: &str, kernel: &str) -> Result<String, Failure> {
    let all = std::fs::read_to_string(results).map_err(text)?;
    let rows: Vec<[&str; 3]> = all.lines().filter_map(|l| l.split('\t').collect::<Vec<_>>().try_into().ok()).collect();
    let sent: Vec<_> = rows.iter().filter(|r| r[2] != "not possible").collect();
    let same = sent.iter().filter(|r| r[1] == r[2]).count();
    let mut differences: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for row in sent.iter().filter(|r| r[1] != r[2]) {
        differences.entry((row[1], row[2])).or_default().push(row[0]);
    }
    let mut out = String::new();
    let _ = writeln!(out, "{}", PAGE.replace("KERNEL", kernel));
    let (n, missing) = (sent.len(), rows.len() - sent.len());
    let _ = writeln!(
        out,
        "Of {} packets {n} could be sent at rxe; {same} have our verdict, {} another.",
        rows.len(),
        n - same
    );
    let _ = writeln!(
        out,
        "{missing} need what no program on Linux can set up: fast registration, an answer that waits, a FLUSH right, a\nframe beyond the link's MTU.\n"
    );
    let _ = writeln!(out, "| ours | rxe's | packets | which |\n|---|---|---|---|");
    let mut groups: Vec<_> = differences.into_iter().collect();
    groups.sort_by_key(|(_, names)| core::cmp::Reverse(names.len()));
    for ((ours, theirs), names) in groups {
        let examples: Vec<_> = names.iter().step_by(names.len().div_ceil(4)).copied().collect();
        let more = if names.len() > examples.len() { "; …" } else { "" };
        let _ = writeln!(
            out,
            "| {ours} | {theirs} | {} | {}{more} |",
            names.len(),
            examples.join("; ").replace('|', "\\|")
        );
    }
    Ok(out)
}

const PAGE: &str = "\
# Bad packets: rxe's answers and ours

Written by `tests/rxe-vm/bad-packets.sh`, which sends the corpus of `tests/it/bad_packets` from a raw socket at QPs of
Linux's rxe (kernel KERNEL) in the same situations. \"Silence\" is no answer and no change of the QP; \"ERR\" says that
the QP went there; \"lands\" that a packet without an answer wrote memory or completed a receive. Our verdicts are those
of the specification, and `cargo test --workspace` holds us to them. rxe drops every FLUSH for its ICRC ([Real peers](interop.md)).
";

pub(crate) fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["run", interface, ours, theirs, results] => run(interface, ours, theirs, results),
        ["report", results, kernel] => report(results, kernel).map(|page| {
            print!("{page}");
            0
        }),
        _ => Err("usage: bad_packets_at_rxe run INTERFACE OUR-IP THEIR-IP RESULTS | report RESULTS KERNEL".into()),
    };
    outcome.map_or_else(
        |why| {
            eprintln!("bad_packets_at_rxe: {why}");
            ExitCode::from(2)
        },
        ExitCode::from,
    )
}
