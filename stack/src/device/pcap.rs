//! Writes what passes a device, or anything else that looks like a packet, as pcapng.
//!
//! Owns the file format: raw IP packets (link type 101), nanoseconds, a direction flag and a comment a packet. A write
//! error ends the record, never the traffic. Never changes a packet.

use core::net::IpAddr;
use std::borrow::Cow;
use std::io::Write;
use std::os::fd::RawFd;
use std::time::SystemTime;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::{DataLink, PcapError};

use super::intercept::{Direction, ids_at, known_ids};
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, RxSink, TxSource};
use crate::burst::{IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::wire::{self, DONT_FRAGMENT, Flow, IpFields};

/// Longest IP and UDP header.
const OUTER_MAX: usize = 48;
/// Nanoseconds, as the exponent that `if_tsresol` takes.
const NANOSECONDS: u8 = 9;

/// A packet as a record or a hook sees it.
#[derive(Clone, Copy, Debug)]
pub struct TapPacket<'a> {
    /// When it passed.
    pub at: Instant,
    /// Which way.
    pub direction: Direction,
    /// Its addresses.
    pub flow: Flow,
    /// Its IPv4 identification, where known.
    pub ids: RxIds,
    /// BTH to ICRC.
    pub bytes: &'a [u8],
}

/// How a record is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcapOptions {
    /// Name of the interface in the file.
    pub interface: String,
    /// Bytes of each IP packet that are kept; `None`: all. Cuts payload that must not be on disk.
    pub snap: Option<u32>,
    /// Unix time of [`Instant::ZERO`]; `None`: a tap takes it from the system's clock at its first packet.
    pub epoch: Option<Duration>,
}

impl PcapOptions {
    /// Whole packets of `interface`.
    #[must_use]
    pub fn new(interface: &str) -> Self {
        Self { interface: interface.to_owned(), snap: None, epoch: None }
    }
}

/// Writes packets to a pcapng stream.
pub struct PcapWriter<W: Write> {
    writer: PcapNgWriter<W>,
    snap: usize,
    epoch: Duration,
    frame: Vec<u8>,
}

impl<W: Write> core::fmt::Debug for PcapWriter<W> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PcapWriter").field("snap", &self.snap).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl<W: Write> PcapWriter<W> {
    /// Begins a file on `to`. Wrap it in a `BufWriter` if it is a file.
    ///
    /// # Errors
    /// [`PcapError`]: the stream took no bytes.
    pub fn new(to: W, options: &PcapOptions) -> Result<Self, PcapError> {
        let mut writer = PcapNgWriter::new(to)?;
        let snaplen = options.snap.unwrap_or(0);
        writer.write_pcapng_block(InterfaceDescriptionBlock {
            linktype: DataLink::RAW,
            snaplen,
            options: vec![
                InterfaceDescriptionOption::IfName(Cow::Borrowed(&options.interface)),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ],
        })?;
        let snap = match options.snap {
            Some(bytes) => usize::try_from(bytes).unwrap_or(usize::MAX),
            None => usize::MAX,
        };
        Ok(Self { writer, snap, epoch: options.epoch.unwrap_or_default(), frame: Vec::new() })
    }

    /// Writes one packet. Its IP and UDP header are made from its flow.
    ///
    /// # Errors
    /// [`PcapError`].
    pub fn write(&mut self, packet: &TapPacket<'_>, comment: Option<&str>) -> Result<(), PcapError> {
        let id = match packet.ids {
            RxIds::Known(fields) => fields.id,
            RxIds::Hidden => 0,
        };
        let mut outer = [0; OUTER_MAX];
        let outer_len = wire::write_outer(&packet.flow, id, packet.bytes.len(), &mut outer).unwrap_or(0);
        self.frame.clear();
        self.frame.extend_from_slice(outer.get(..outer_len).unwrap_or(&[]));
        self.frame.extend_from_slice(packet.bytes);
        let original_len = u32::try_from(self.frame.len()).unwrap_or(u32::MAX);
        self.frame.truncate(self.snap);
        let flags = match packet.direction {
            Direction::In => 1,
            Direction::Out => 2,
        };
        let mut options = vec![EnhancedPacketOption::Flags(flags)];
        if let Some(text) = comment {
            options.push(EnhancedPacketOption::Comment(Cow::Borrowed(text)));
        }
        self.writer.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            timestamp: self.epoch + Duration::from_nanos(packet.at.as_nanos()),
            original_len,
            data: Cow::Borrowed(&self.frame),
            options,
        })?;
        Ok(())
    }

    /// Flushes the stream.
    ///
    /// # Errors
    /// [`PcapError::IoError`].
    pub fn flush(&mut self) -> Result<(), PcapError> {
        self.writer.get_mut().flush().map_err(PcapError::IoError)
    }

    /// The stream.
    #[must_use]
    pub fn into_inner(self) -> W {
        self.writer.into_inner()
    }
}

/// Says what is remarkable about a packet, e.g. "retransmission 2 of PSN 17".
pub type CommentHook = Box<dyn FnMut(&TapPacket<'_>) -> Option<String> + Send>;

/// The record of a tap, while it lasts.
struct Record<W: Write> {
    /// `None` once a write has failed.
    writer: Option<PcapWriter<W>>,
    epoch_known: bool,
    comment: Option<CommentHook>,
    error: Option<PcapError>,
    packets: u64,
}

impl<W: Write> Record<W> {
    fn add(&mut self, packet: &TapPacket<'_>) {
        let Some(writer) = self.writer.as_mut() else { return };
        if !self.epoch_known {
            self.epoch_known = true;
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            writer.epoch = now.saturating_sub(Duration::from_nanos(packet.at.as_nanos()));
        }
        let comment = self.comment.as_mut().and_then(|hook| hook(packet));
        match writer.write(packet, comment.as_deref()) {
            Ok(()) => self.packets += 1,
            Err(error) => {
                self.error = Some(error);
                self.writer = None;
            }
        }
    }

    /// Adds each segment of `bytes` with the id it has on the wire.
    fn add_segments(&mut self, first: TapPacket<'_>, segment: usize, id_of: impl Fn(usize) -> RxIds) {
        for (index, bytes) in first.bytes.chunks(segment.max(1)).enumerate() {
            self.add(&TapPacket { ids: id_of(index), bytes, ..first });
        }
    }
}

/// A device whose packets are recorded, each way, as they leave or enter the endpoint.
pub struct PcapTap<D, W: Write> {
    inner: D,
    capabilities: DeviceCapabilities,
    record: Record<W>,
}

impl<D: Device, W: Write> PcapTap<D, W> {
    /// Records what passes `inner` on `to`.
    ///
    /// # Errors
    /// [`PcapError`]: the stream took no bytes.
    pub fn new(inner: D, to: W, options: &PcapOptions) -> Result<Self, PcapError> {
        let writer = Some(PcapWriter::new(to, options)?);
        let capabilities = inner.capabilities().clone();
        let epoch_known = options.epoch.is_some();
        Ok(Self { inner, capabilities, record: Record { writer, epoch_known, comment: None, error: None, packets: 0 } })
    }

    /// Sets the hook that comments packets.
    #[must_use]
    pub fn with_comments(mut self, hook: CommentHook) -> Self {
        self.record.comment = Some(hook);
        self
    }

    /// Packets written.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.record.packets
    }

    /// The error that ended the record, given out once.
    pub fn take_error(&mut self) -> Option<PcapError> {
        self.record.error.take()
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Ends the record; the device and, unless a write failed, the stream.
    #[must_use]
    pub fn into_parts(self) -> (D, Option<W>) {
        (self.inner, self.record.writer.map(PcapWriter::into_inner))
    }
}

impl<D: Device, W: Write + Send> Device for PcapTap<D, W> {
    fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        let Self { inner, record, .. } = self;
        inner.receive(now, budget, &mut |burst| {
            let RxBurst { flow, bytes, segment, ids, at } = burst;
            let first = TapPacket { at, direction: Direction::In, flow, ids, bytes };
            record.add_segments(first, segment, |index| ids_at(ids, index));
            sink(burst);
        })
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        let Self { inner, record, .. } = self;
        inner.transmit(now, budget, &mut |room| {
            let TxRoom { buf, headroom, segments_max, ids, medium } = room;
            let burst = source(TxRoom { buf: &mut *buf, headroom, segments_max, ids, medium })?;
            if let Some((flow, bytes, ids)) = sent(&burst, buf.get(headroom..), ids, medium) {
                let first = TapPacket { at: now, direction: Direction::Out, flow, ids: RxIds::Hidden, bytes };
                record.add_segments(first, burst.segment, |index| {
                    RxIds::Known(IpFields { id: ids.id(index), flags_fragment: DONT_FRAGMENT })
                });
            }
            Some(burst)
        })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.inner.poll_timeout()
    }

    fn source_ports(&self) -> &[u16] {
        self.inner.source_ports()
    }

    fn receive_room(&self) -> Option<usize> {
        self.inner.receive_room()
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        self.inner.set_membership(group, member)
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        self.inner.wait(timeout)
    }

    fn lost(&self) -> DeviceLosses {
        self.inner.lost()
    }
}

/// The segments of a burst about to leave, and the ids they will have.
fn sent<'a>(burst: &TxBurst, room: Option<&'a [u8]>, ids: IdRule, medium: Medium) -> Option<(Flow, &'a [u8], IdRule)> {
    let written = room?.get(..burst.len)?;
    match medium {
        Medium::Udp => Some((burst.flow, written, ids)),
        Medium::Ip => {
            let (header, segments) = written.split_at_checked(burst.flow.header_len())?;
            // A wrapper may replay a packet with an id of its own: what stands in the header is what goes out.
            let ids = match (ids, known_ids(&burst.flow, header)) {
                (IdRule::From(_), Some(written)) => IdRule::From(written.id),
                (rule, _) => rule,
            };
            Some((burst.flow, segments, ids))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::super::testing::{Bench, at, fill, flow, receive, send};
    use super::*;

    const A: &str = "10.0.0.1";
    const B: &str = "10.0.0.2";

    /// Timestamp in nanoseconds, original length, data, flags and comment.
    type Row = (u128, u32, Vec<u8>, u32, Option<String>);

    fn read(file: &[u8]) -> Vec<Row> {
        let mut reader = PcapNgReader::new(file).unwrap();
        let mut rows = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(p) = block.unwrap() {
                let (mut flags, mut comment) = (0, None);
                for option in &p.options {
                    match option {
                        EnhancedPacketOption::Flags(f) => flags = *f,
                        EnhancedPacketOption::Comment(c) => comment = Some(c.to_string()),
                        _ => {}
                    }
                }
                rows.push((p.timestamp.as_nanos(), p.original_len, p.data.to_vec(), flags, comment));
            }
        }
        rows
    }

    fn options(epoch: u64) -> PcapOptions {
        PcapOptions { epoch: Some(Duration::from_secs(epoch)), ..PcapOptions::new("test0") }
    }

    fn tap(medium: Medium) -> PcapTap<Bench, Vec<u8>> {
        PcapTap::new(Bench::new(medium), Vec::new(), &options(1)).unwrap()
    }

    fn ids(rows: &[Row]) -> Vec<u16> {
        rows.iter().map(|r| u16::from_be_bytes([r.2[4], r.2[5]])).collect()
    }

    #[test]
    fn both_directions_with_flags_and_nanoseconds() {
        let mut d = tap(Medium::Udp);
        send(&mut d, Instant::from_nanos(7), flow(A, B), &[b"ping"]);
        let (mut bench, file) = d.into_parts();
        let mut file = file.unwrap();
        bench.incoming.push_back((flow(B, A), 4, b"pong".to_vec(), 77));
        let mut d = PcapTap::new(bench, Vec::new(), &options(1)).unwrap();
        receive(&mut d, Instant::from_nanos(9));
        let second = d.into_parts().1.unwrap();
        let rows = [read(&file), read(&second)].concat();
        assert_eq!((rows[0].0, rows[0].3), (1_000_000_007, 2), "outbound");
        assert_eq!((rows[1].0, rows[1].3), (1_000_000_009, 1), "inbound");
        assert_eq!(rows[0].2[28..], *b"ping");
        assert_eq!(rows[1].2[28..], *b"pong");
        assert_eq!(ids(&rows), [0, 77]);
        // Link type 101 (raw IP) stands in the interface block, right after the section header.
        let section_len = usize::try_from(u32::from_ne_bytes(file[4..8].try_into().unwrap())).unwrap();
        let interface = file.split_off(section_len);
        assert_eq!(interface[8..10], 101u16.to_ne_bytes());
    }

    #[test]
    fn superframes_are_split_with_the_ids_of_the_wire() {
        for (medium, expected) in [(Medium::Udp, [0, 1, 2]), (Medium::Ip, [100, 101, 102])] {
            let mut d = tap(medium);
            let mut once = true;
            d.transmit(at(0), 4, &mut |room| {
                core::mem::take(&mut once).then(|| fill(room, flow(A, B), 4, b"aaaabbbbcc"))
            })
            .unwrap();
            let rows = read(&d.into_parts().1.unwrap());
            assert_eq!(ids(&rows), expected);
            let payloads: Vec<_> = rows.iter().map(|r| r.2[28..].to_vec()).collect();
            assert_eq!(payloads, [&b"aaaa"[..], b"bbbb", b"cc"]);
            assert_eq!(rows[2].2[2..4], 30u16.to_be_bytes(), "total length of the short last one");
        }
    }

    #[test]
    fn comments_and_snap_length() {
        let snap = PcapOptions { snap: Some(40), ..options(0) };
        let mut count = 0;
        let mut d = PcapTap::new(Bench::new(Medium::Udp), Vec::new(), &snap).unwrap().with_comments(Box::new(
            move |p: &TapPacket<'_>| {
                count += 1;
                (count == 2).then(|| format!("second, {} bytes", p.bytes.len()))
            },
        ));
        send(&mut d, at(0), flow(A, B), &[&[1; 100], &[2; 60]]);
        let rows = read(&d.into_parts().1.unwrap());
        assert_eq!((rows[0].1, rows[0].2.len(), rows[0].4.clone()), (128, 40, None));
        assert_eq!((rows[1].1, rows[1].2.len()), (88, 40));
        assert_eq!(rows[1].4.as_deref(), Some("second, 60 bytes"));
    }

    /// Takes `left` bytes, then is full.
    struct Full {
        left: usize,
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.left < bytes.len() {
                return Err(io::Error::other("disk full"));
            }
            self.left -= bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_write_error_ends_the_record_not_the_traffic() {
        let mut d = PcapTap::new(Bench::new(Medium::Udp), Full { left: 200 }, &options(0)).unwrap();
        for _ in 0..5 {
            assert_eq!(send(&mut d, at(0), flow(A, B), &[&[0; 40]]), 1);
        }
        assert_eq!(d.inner().sent.len(), 5);
        assert!(d.packets() < 5);
        assert!(matches!(d.take_error(), Some(PcapError::IoError(_))));
        assert!(d.take_error().is_none());
    }

    #[test]
    fn an_unknown_epoch_is_taken_from_the_clock() {
        let mut d = PcapTap::new(Bench::new(Medium::Udp), Vec::new(), &PcapOptions::new("t")).unwrap();
        send(&mut d, at(0), flow(A, B), &[b"x"]);
        let rows = read(&d.into_parts().1.unwrap());
        let year_2020 = 1_577_836_800_000_000_000;
        assert!(rows[0].0 > year_2020);
    }
}
