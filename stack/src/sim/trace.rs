//! What a world remembers of its packets: a hash of all, and the last few whole.
//!
//! Owns the trace hash, which is the same for the same seed on every build and machine, and the bounded record that a
//! failing run leaves as pcapng. Never influences a run.

use std::collections::VecDeque;
use std::io::Write;

use pcap_file::PcapError;

use crate::burst::RxIds;
use crate::device::pcap::{PcapOptions, PcapWriter, TapPacket};
use crate::device::{Direction, Verdict};
use crate::time::{Duration, Instant};
use crate::wire::{Flow, IpFields};

/// Packets that a record keeps at most.
pub const RECORD_MAX: usize = 65_536;

/// FNV-1a over the words of each event; packet bytes enter as their CRC-32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceHash(u64);

impl TraceHash {
    pub(super) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn word(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// Adds one event: which, when, at which node, with which packet.
    pub(super) fn event(&mut self, direction: Direction, at: Instant, node: usize, packet: &[u8]) {
        let kind = match direction {
            Direction::Out => 0,
            Direction::In => 1 << 63,
        };
        self.word(kind | at.as_nanos());
        self.word(u64::try_from(node).unwrap_or(u64::MAX) << 32 | u64::from(crc32fast::hash(packet)));
        self.word(u64::try_from(packet.len()).unwrap_or(u64::MAX));
    }

    pub(super) const fn value(self) -> u64 {
        self.0
    }
}

/// A packet as it left its sender, and what became of it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// When it was sent.
    pub at: Instant,
    /// Addresses.
    pub flow: Flow,
    /// IPv4 identification.
    pub id: u16,
    /// BTH to ICRC.
    pub bytes: Vec<u8>,
    /// What the link did to it.
    pub verdict: Verdict,
}

impl Recorded {
    fn comment(&self) -> Option<String> {
        let Verdict { deliver, copy, flips, keep } = self.verdict;
        let mut notes = Vec::new();
        let flipped = flips.iter().flatten().count();
        if deliver.is_none() {
            notes.push("lost".to_owned());
        } else {
            if flipped > 0 {
                notes.push(format!("arrives with {flipped} bits flipped"));
            }
            if let Some(keep) = keep {
                notes.push(format!("arrives cut to {keep} bytes"));
            }
        }
        if copy.is_some() {
            notes.push("a copy arrives".to_owned());
        }
        (!notes.is_empty()).then(|| notes.join(", "))
    }
}

/// The last packets of a run.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    limit: usize,
    packets: VecDeque<Recorded>,
}

impl Recorder {
    pub(super) fn keep(&mut self, packets: usize) {
        self.limit = packets.min(RECORD_MAX);
    }

    pub(super) const fn is_on(&self) -> bool {
        self.limit > 0
    }

    pub(super) fn add(&mut self, at: Instant, flow: Flow, id: u16, bytes: &[u8], verdict: Verdict) {
        if self.limit == 0 {
            return;
        }
        // The oldest makes room, and its buffer serves again.
        let mut buffer = match self.packets.len() {
            len if len >= self.limit => self.packets.pop_front().map(|p| p.bytes).unwrap_or_default(),
            _ => Vec::new(),
        };
        buffer.clear();
        buffer.extend_from_slice(bytes);
        self.packets.push_back(Recorded { at, flow, id, bytes: buffer, verdict });
    }

    pub(super) fn packets(&self) -> impl Iterator<Item = &Recorded> {
        self.packets.iter()
    }

    /// Writes the record, times since the beginning of the run.
    pub(super) fn write<W: Write>(&self, to: W) -> Result<W, PcapError> {
        let options = PcapOptions { epoch: Some(Duration::ZERO), ..PcapOptions::new("sim") };
        let mut writer = PcapWriter::new(to, &options)?;
        for packet in &self.packets {
            let ids = RxIds::Known(IpFields { id: packet.id, flags_fragment: 0x4000 });
            let (at, flow, bytes) = (packet.at, packet.flow, packet.bytes.as_slice());
            let view = TapPacket { at, direction: Direction::Out, flow, ids, bytes };
            writer.write(&view, packet.comment().as_deref())?;
        }
        writer.flush()?;
        Ok(writer.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow() -> Flow {
        let (src, dst) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        Flow { src, dst, src_port: 0xC000, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None }
    }

    #[test]
    fn the_hash_tells_every_part_of_an_event() {
        let of = |direction, at, node, packet: &[u8]| {
            let mut hash = TraceHash::new();
            hash.event(direction, Instant::from_nanos(at), node, packet);
            hash.value()
        };
        let base = of(Direction::Out, 5, 1, b"ab");
        assert_eq!(base, of(Direction::Out, 5, 1, b"ab"));
        for other in [
            of(Direction::In, 5, 1, b"ab"),
            of(Direction::Out, 6, 1, b"ab"),
            of(Direction::Out, 5, 2, b"ab"),
            of(Direction::Out, 5, 1, b"ac"),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_record_keeps_the_last_and_says_what_happened() {
        let mut recorder = Recorder::default();
        recorder.add(Instant::ZERO, flow(), 0, b"off", Verdict::PASS);
        recorder.keep(2);
        for (i, verdict) in [Verdict::PASS, Verdict::DROP, Verdict::PASS].into_iter().enumerate() {
            recorder.add(Instant::ZERO, flow(), 0, &[u8::try_from(i).unwrap()], verdict);
        }
        let kept: Vec<_> = recorder.packets().map(|p| (p.bytes.clone(), p.comment())).collect();
        assert_eq!(kept, [(vec![1], Some("lost".to_owned())), (vec![2], None)]);
        let file = recorder.write(Vec::new()).unwrap();
        assert!(file.len() > 100);
    }
}
