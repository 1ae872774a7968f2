//! `uroce dump`: shows RoCEv2 packets of a capture file or an interface, and what became of each stream.
//!
//! Owns the command's flags and its loop. Sends nothing.

mod cm;
mod decode;
mod flows;
mod names;
mod outer;
mod save;
mod source;
mod text;

use core::net::IpAddr;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use self::decode::{Content, Decoded};
use self::flows::{FlowCounts, FlowKey, Flows, Remark};
use self::outer::{Envelope, Outer};
use self::save::Saver;
use self::source::Frame;
use crate::exit::Failure;
use crate::report::Output;

/// Flags of `uroce dump`.
#[derive(Args, Debug)]
pub(crate) struct DumpArgs {
    /// A pcap or pcapng file, or an interface to capture from (needs CAP_NET_RAW; end with Ctrl-C)
    #[arg(value_name = "FILE|IFNAME")]
    target: String,
    /// Show all header fields; with --json, one JSON document a packet before the summary
    #[arg(short, long)]
    verbose: bool,
    /// Show the summary alone
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Stop after this many packets
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// Only packets to or (UD) from this QP; decimal or 0x…, may be given again
    #[arg(long, value_name = "QPN", value_parser = qpn)]
    qp: Vec<u32>,
    /// Also print the payload, which is left out otherwise because it is the user's data
    #[arg(long)]
    payload: bool,
    /// Write the packets that are shown to this pcapng file, each with its comment
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
}

fn qpn(text: &str) -> Result<u32, String> {
    let number = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    number.ok().filter(|n| *n <= 0xff_ffff).ok_or_else(|| "a QP number has 24 bits, such as 17 or 0x000011".into())
}

/// Runs the command.
pub(crate) fn run(args: &DumpArgs, out: &mut Output) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut source = source::open(&args.target, &stop)?;
    let saver = args.write.as_deref().map(Saver::create).transpose()?;
    let mut dump = Dump { args, saver, first: None, flows: Flows::default(), totals: Totals::default() };
    let end = loop {
        if args.count.is_some_and(|limit| dump.totals.shown >= limit) {
            break Ok(());
        }
        match source.next() {
            Ok(Some(frame)) => dump.on_frame(&frame, out)?,
            Ok(None) => break Ok(()),
            // A damaged file still has a summary of what could be read.
            Err(error) => break Err(error),
        }
    };
    dump.finish(out)?;
    end
}

/// Counts over the whole capture.
#[derive(Debug, Default, Serialize)]
struct Totals {
    /// Frames read.
    frames: u64,
    /// Packets that passed the filter.
    #[serde(skip)]
    shown: u64,
    /// RoCEv2 packets.
    packets: u64,
    /// RoCEv2 packets with a wrong ICRC.
    icrc_wrong: u64,
    /// Packets to port 4791 that cannot be parsed.
    malformed: u64,
    /// Packets to port 4791 of which the capture holds only the beginning.
    cut: u64,
    /// ICMP errors about RoCEv2 packets.
    icmp_errors: u64,
    /// Frames that have nothing to do with RoCEv2.
    other: u64,
    /// Packets by name.
    opcodes: BTreeMap<String, u64>,
}

struct Dump<'a> {
    args: &'a DumpArgs,
    saver: Option<Saver>,
    first: Option<Duration>,
    flows: Flows,
    totals: Totals,
}

/// What is said of one frame.
struct Line {
    ends: (IpAddr, IpAddr),
    name: String,
    text: String,
    notes: Vec<String>,
    fields: Vec<(&'static str, String)>,
    payload: Vec<u8>,
}

impl Dump<'_> {
    fn on_frame(&mut self, frame: &Frame, out: &mut Output) -> Result<(), Failure> {
        self.totals.frames += 1;
        self.first.get_or_insert(frame.at);
        let line = match outer::read(frame.link, &frame.bytes) {
            Outer::Roce(envelope) => self.on_roce(&envelope),
            Outer::IcmpError(error) => {
                self.totals.icmp_errors += 1;
                let text = format!("{} (about {} -> {})", error.what, error.about.0, error.about.1);
                self.unless_filtered(Line::plain((error.from, error.to), "ICMP_ERROR", text))
            }
            Outer::Broken { ends, why } => {
                self.totals.malformed += 1;
                self.unless_filtered(Line::plain(ends, "MALFORMED", why.into()))
            }
            Outer::Cut { ends } => {
                self.totals.cut += 1;
                self.unless_filtered(Line::plain(ends, "CUT", "the capture holds only its beginning".into()))
            }
            Outer::Other => {
                self.totals.other += 1;
                None
            }
        };
        let Some(line) = line else { return Ok(()) };
        self.totals.shown += 1;
        if let Some(saver) = &mut self.saver {
            saver.write(frame, Some(&line.comment()))?;
        }
        if !self.args.quiet {
            self.print(frame, &line, out)?;
        }
        Ok(())
    }

    /// Lines without a QP are shown when no QP is asked for.
    fn unless_filtered(&self, line: Line) -> Option<Line> {
        self.args.qp.is_empty().then_some(line)
    }

    fn on_roce(&mut self, envelope: &Envelope<'_>) -> Option<Line> {
        let ends = (envelope.flow.src, envelope.flow.dst);
        let decoded = match decode::decode(envelope) {
            Ok(decoded) => decoded,
            Err(error) => {
                self.totals.malformed += 1;
                return self.unless_filtered(Line::plain(ends, "MALFORMED", error.to_string()));
            }
        };
        let packet = &decoded.packet;
        if !self.args.qp.is_empty() && !decode::qps(packet).any(|qp| self.args.qp.contains(&qp)) {
            return None;
        }
        self.totals.packets += 1;
        *self.totals.opcodes.entry(decoded.name.clone()).or_default() += 1;
        let key = FlowKey { src: ends.0, dst: ends.1, qp: packet.dest_qp.get() };
        let remark = if decoded.icrc_right {
            let marked = envelope.flow.traffic_class & 3 == 3;
            self.flows.on_packet(key, envelope.bytes.len(), marked, packet)
        } else {
            self.totals.icrc_wrong += 1;
            self.flows.on_wrong_icrc(key, envelope.bytes.len());
            None
        };
        Some(Line::of(envelope, &decoded, remark, self.args))
    }

    fn print(&self, frame: &Frame, line: &Line, out: &mut Output) -> Result<(), Failure> {
        let at = frame.at.saturating_sub(self.first.unwrap_or_default());
        if out.is_json() {
            return if self.args.verbose { out.record("dump", &PacketJson::new(self, frame, line)) } else { Ok(()) };
        }
        let number = self.totals.frames;
        let mut notes = String::new();
        for note in &line.notes {
            notes.push_str("  [");
            notes.push_str(note);
            notes.push(']');
        }
        let (src, dst) = line.ends;
        let seconds = at.as_secs_f64();
        out.line(format_args!("{number:>6} {seconds:>12.6} {src} > {dst}  {} {}{notes}", line.name, line.text))?;
        if self.args.verbose {
            for (name, value) in &line.fields {
                out.line(format_args!("         {name:<22} {value}"))?;
            }
        }
        for hex in text::hex_lines(&line.payload) {
            out.line(format_args!("         {hex}"))?;
        }
        if out.is_terminal() { out.flush() } else { Ok(()) }
    }

    fn finish(self, out: &mut Output) -> Result<(), Failure> {
        if let Some(saver) = self.saver {
            saver.finish()?;
        }
        let t = &self.totals;
        out.line(format_args!(
            "{} frames: {} RoCEv2 packets ({} with a wrong ICRC), {} malformed, {} ICMP errors about them, {} other",
            t.frames, t.packets, t.icrc_wrong, t.malformed, t.icmp_errors, t.other
        ))?;
        if t.cut > 0 {
            out.line(format_args!("{} packets not judged: the capture holds only their beginning", t.cut))?;
        }
        for (name, count) in &t.opcodes {
            out.line(format_args!("  {count:>8}  {name}"))?;
        }
        for (key, counts) in self.flows.counts() {
            out.line(stream_line(key, counts))?;
        }
        if self.flows.overflow() > 0 {
            out.line(format_args!("  {} packets of further streams", self.flows.overflow()))?;
        }
        out.document("dump", &Summary::new(self.args, &self.totals, &self.flows))
    }
}

/// One stream in the summary: what went wrong is named only where something did.
fn stream_line(key: &FlowKey, c: &FlowCounts) -> String {
    let FlowKey { src, dst, qp } = key;
    let mut line =
        format!("{src} > {dst} qp {qp:#08x}: {} packets, {} bytes, {} requests", c.packets, c.bytes, c.requests);
    let rare = [
        (c.acks, "ACKs"),
        (c.retransmissions, "retransmissions"),
        (c.late, "out of order"),
        (c.gaps, "gaps"),
        (c.nak_sequence, "sequence NAKs"),
        (c.nak_fatal, "fatal NAKs"),
        (c.rnr, "RNR NAKs"),
        (c.cnps, "CNPs"),
        (c.marked, "congestion marks"),
        (c.icrc_wrong, "wrong ICRCs"),
    ];
    for (count, what) in rare {
        if count > 0 {
            line.push_str(&format!(", {count} {what}"));
        }
    }
    line
}

impl Line {
    fn plain(ends: (IpAddr, IpAddr), name: &str, text: String) -> Self {
        Self { ends, name: name.into(), text, notes: Vec::new(), fields: Vec::new(), payload: Vec::new() }
    }

    fn of(envelope: &Envelope<'_>, decoded: &Decoded<'_>, remark: Option<Remark>, args: &DumpArgs) -> Self {
        let flow = &envelope.flow;
        let mut notes = Vec::new();
        if !decoded.icrc_right {
            notes.push("ICRC wrong".into());
        }
        notes.extend(remark.map(|r| match r {
            Remark::Retransmission => "retransmission".to_owned(),
            Remark::Late => "out of order".to_owned(),
            Remark::Gap(missing) => format!("gap: {missing} missing"),
        }));
        if envelope.extra > 0 {
            notes.push(format!("{} bytes of IP options", envelope.extra));
        }
        if flow.traffic_class & 3 == 3 {
            notes.push("congestion mark".into());
        }
        notes.extend(flow.vlan.map(|tag| format!("VLAN {} priority {}", tag.id, tag.priority)));
        let mut text = text::one_line(&decoded.packet);
        let mut fields = Vec::new();
        if args.verbose {
            fields = envelope_fields(envelope, decoded.icrc_right);
            fields.extend(text::fields(&decoded.packet));
        }
        match &decoded.content {
            Content::Cm(message) => {
                text.push_str("  ");
                text.push_str(&cm::one_line(message));
                if args.verbose {
                    fields.extend(cm::fields(message));
                }
            }
            Content::NoCm(why) => notes.push(why.clone()),
            Content::Data => {}
        }
        let payload = text::payload(&decoded.packet.body).filter(|_| args.payload).unwrap_or_default().to_vec();
        Self { ends: (flow.src, flow.dst), name: decoded.name.clone(), text, notes, fields, payload }
    }

    /// For the pcapng file: the name, and what an analyser of single packets cannot know.
    fn comment(&self) -> String {
        let mut text = self.name.clone();
        for note in &self.notes {
            text.push_str("; ");
            text.push_str(note);
        }
        text
    }
}

fn envelope_fields(envelope: &Envelope<'_>, icrc_right: bool) -> Vec<(&'static str, String)> {
    let flow = &envelope.flow;
    let mut all = Vec::new();
    if let Some((src, dst)) = envelope.macs {
        all.push(("eth", format!("{src} > {dst}")));
    }
    all.push(("traffic_class", format!("{:#04x}", flow.traffic_class)));
    all.push(("hop_limit", flow.hop_limit.to_string()));
    if flow.dst.is_ipv4() {
        all.push(("ip_id", format!("{:#06x}", envelope.ids.id)));
        all.push(("ip_flags", format!("{:#06x}", envelope.ids.flags_fragment)));
    } else {
        all.push(("flow_label", format!("{:#07x}", flow.flow_label)));
    }
    all.push(("udp_src_port", flow.src_port.to_string()));
    all.push(("udp_checksum", format!("{:#06x}", envelope.udp_checksum)));
    all.push(("icrc", if icrc_right { "right" } else { "wrong" }.into()));
    all
}

/// A packet as a JSON document.
#[derive(Serialize)]
struct PacketJson<'a> {
    packet: PacketBody<'a>,
}

#[derive(Serialize)]
struct PacketBody<'a> {
    frame: u64,
    /// Seconds since 1970 and nanoseconds.
    time: (u64, u32),
    src: IpAddr,
    dst: IpAddr,
    name: &'a str,
    notes: &'a [String],
    fields: BTreeMap<&'static str, &'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<String>,
}

impl<'a> PacketJson<'a> {
    fn new(dump: &Dump<'_>, frame: &Frame, line: &'a Line) -> Self {
        let payload = (!line.payload.is_empty()).then(|| line.payload.iter().map(|b| format!("{b:02x}")).collect());
        Self {
            packet: PacketBody {
                frame: dump.totals.frames,
                time: (frame.at.as_secs(), frame.at.subsec_nanos()),
                src: line.ends.0,
                dst: line.ends.1,
                name: &line.name,
                notes: &line.notes,
                fields: line.fields.iter().map(|(k, v)| (*k, v.as_str())).collect(),
                payload,
            },
        }
    }
}

/// The summary as a JSON document.
#[derive(Serialize)]
struct Summary<'a> {
    source: &'a str,
    #[serde(flatten)]
    totals: &'a Totals,
    streams: Vec<Stream<'a>>,
    packets_of_further_streams: u64,
}

#[derive(Serialize)]
struct Stream<'a> {
    #[serde(flatten)]
    key: &'a FlowKey,
    troubled: bool,
    #[serde(flatten)]
    counts: &'a FlowCounts,
}

impl<'a> Summary<'a> {
    fn new(args: &'a DumpArgs, totals: &'a Totals, flows: &'a Flows) -> Self {
        let streams = flows.counts().map(|(key, counts)| Stream { key, troubled: counts.is_troubled(), counts });
        Self { source: &args.target, totals, streams: streams.collect(), packets_of_further_streams: flows.overflow() }
    }
}
