//! Wrappers around the device, for every command that opens one: faults by rule, and a record of the packets.
//!
//! Owns the flags `--fault`, `--pcap` and `--segments`, and the comments in the record. Never opens a device.

use core::fmt;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::OnceLock;

use clap::Args;
use uroce::device::Device;
use uroce::device::Direction;
use uroce::device::fault::{FaultInjector, FaultRule, PacketTest};
use uroce::device::pcap::{PcapOptions, PcapTap, TapPacket};
use uroce::types::Psn;
use uroce::wire::{Body, Packet};
use uroce_cm::matcher::{is_mad, named};

use crate::exit::Failure;

/// QPs whose repeats are told apart in a record; further ones go without that comment.
const COMMENTED_QPS: usize = 4096;

/// Where `--help` lists the flags that many commands share.
const HEADING: &str = "Commands with an endpoint";

/// Flags that every command with a device takes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct WrapArgs {
    /// Harm packets by rule: ACTION:PACKET[:WHICH][:in|out], such as drop:ack:3, dup:write-only:every=10, drop:rtu or
    /// delay=5ms:read-resp-middle. ACTION is drop, dup, corrupt, truncate[=BYTES] or delay=TIME; PACKET is any,
    /// request, response, send, write, read-req, atomic, read-resp, ack, nak, rnr, atomic-ack, ud, cnp or a CM message
    /// (req, rep, rtu, …), with -first, -middle, -last or -only behind send, write and read-resp; WHICH is a number, a
    /// range 2-4, every or every=N. May be given many times
    #[arg(long, global = true, value_name = "RULE", value_parser = parse_rule, help_heading = HEADING)]
    fault: Vec<String>,
    /// Record what this endpoint sends and receives in FILE, as pcapng with comments
    #[arg(long, global = true, value_name = "FILE", help_heading = HEADING)]
    pcap: Option<PathBuf>,
    /// Bytes of each packet that --pcap keeps, so that payload stays off the disk
    #[arg(long, global = true, value_name = "BYTES", requires = "pcap", help_heading = HEADING)]
    pcap_snap: Option<u32>,
    /// Packets that leave as one superframe at most; 1 turns superframes off, at udp: those that arrive, too. Without it, what
    /// suits the device
    #[arg(long, global = true, value_name = "PACKETS", env = "UROCE_SEGMENTS", help_heading = HEADING)]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=128))]
    segments: Option<u8>,
}

/// The wrappers of this process: set once, before any device is opened.
static WRAPPERS: OnceLock<WrapArgs> = OnceLock::new();

/// Checks the rule's text and keeps it: the rule itself counts, so each device makes its own.
fn parse_rule(text: &str) -> Result<String, String> {
    FaultRule::parse(text, &message_named).map(|_| text.to_owned()).map_err(|e| e.to_string())
}

/// A test for a message of connection management, by its name: `req`, `rep`, `rtu`, `sidr-req`, …
fn message_named(name: &str) -> Option<PacketTest> {
    let kind = named(name)?;
    Some(Box::new(move |packet| is_mad(packet) == Some(kind)))
}

impl WrapArgs {
    /// Whether anything is to be wrapped.
    pub(crate) const fn is_empty(&self) -> bool {
        self.fault.is_empty() && self.pcap.is_none()
    }

    /// Makes these the wrappers of the process.
    pub(crate) fn install(&self) {
        // A second call would come from a second command line, and there is none.
        let _ = WRAPPERS.set(self.clone());
    }
}

/// Packets of a superframe, where the program's user has a wish.
pub(crate) fn segments_max() -> Option<usize> {
    WRAPPERS.get().and_then(|args| args.segments).map(usize::from)
}

/// Whether wrappers were asked for: a device that cannot be wrapped must refuse them.
#[cfg(feature = "hw")]
pub(crate) fn is_asked_for() -> bool {
    WRAPPERS.get().is_some_and(|args| !args.is_empty())
}

/// Puts the wrappers that were asked for around `device`. The record is next to the wire: a packet that a rule drops
/// on its way out is not in it.
pub(crate) fn wrap(device: Box<dyn Device>) -> Result<Box<dyn Device>, Failure> {
    let Some(args) = WRAPPERS.get() else { return Ok(device) };
    let mut device = device;
    if let Some(path) = &args.pcap {
        let cannot = |e: &dyn fmt::Display| Failure::Environment(format!("cannot write {}: {e}", path.display()));
        let file = File::create(path).map_err(|e| cannot(&e))?;
        let options = PcapOptions { snap: args.pcap_snap, ..PcapOptions::new(&device.capabilities().name) };
        let tap = PcapTap::new(device, BufWriter::new(file), &options).map_err(|e| cannot(&e))?;
        let mut seen = Seen::default();
        device = Box::new(tap.with_comments(Box::new(move |packet| seen.comment(packet))));
    }
    if !args.fault.is_empty() {
        let mut injector = FaultInjector::new(device);
        for text in &args.fault {
            let rule = FaultRule::parse(text, &message_named);
            let added = rule.and_then(|rule| injector.add(rule));
            added.map_err(|e| Failure::Usage(format!("--fault {text}: {e}")))?;
        }
        device = Box::new(injector);
    }
    Ok(device)
}

/// What passed so far, for the comments.
#[derive(Default)]
struct Seen {
    /// One beyond the highest request PSN, by destination QP and direction.
    next: BTreeMap<(u32, bool), Psn>,
}

impl Seen {
    fn comment(&mut self, tapped: &TapPacket<'_>) -> Option<String> {
        let packet = match Packet::parse(tapped.bytes) {
            Ok(packet) => packet,
            Err(error) => return Some(format!("not a packet: {error}")),
        };
        if let Some(kind) = is_mad(&packet) {
            return Some(format!("CM {}", kind.name()));
        }
        if !matches!(packet.body, Body::Request(_)) {
            return None;
        }
        let key = (packet.dest_qp.get(), tapped.direction == Direction::Out);
        let full = self.next.len() >= COMMENTED_QPS;
        match self.next.get_mut(&key) {
            Some(next) if packet.psn.distance_from(*next) < 0 => Some(format!("PSN {} again", packet.psn)),
            Some(next) => {
                *next = packet.psn.next();
                None
            }
            None if full => None,
            None => {
                self.next.insert(key, packet.psn.next());
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_know_packets_and_messages() {
        for good in [
            "drop:ack:3",
            "drop:rtu",
            "delay=5ms:read-resp-middle",
            "dup:write-only:every=10",
            "drop:REQ:2:in",
            "drop:sidr-req",
            "dup:SIDR_REP",
            "drop:lap",
            "delay=1s:apr",
        ] {
            assert!(parse_rule(good).is_ok(), "{good}: {:?}", parse_rule(good));
        }
        for (bad, names) in [("lose:ack", "lose"), ("drop", "ACTION"), ("drop:nonsense", "nonsense")] {
            let error = parse_rule(bad).unwrap_err();
            assert!(error.contains(names), "{error}");
        }
    }
}
