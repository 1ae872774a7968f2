//! Where frames come from: pcap and pcapng files, or an interface.
//!
//! Owns file formats and clocks of captures. Never looks into a frame.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use pcap_file::{DataLink, PcapError};
use pnet::datalink::{self, Channel, DataLinkReceiver};
use uroce::device::DeviceError;

use crate::exit::Failure;

/// How long a live capture sleeps before it looks whether it shall end.
const LIVE_POLL: Duration = Duration::from_millis(100);
/// Longest frame of an interface: 64 KiB, which receive offload may build.
const LIVE_FRAME_MAX: usize = 65_536;

/// What the bytes of a frame begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// An Ethernet header.
    Ethernet,
    /// An IP header.
    RawIp,
}

impl Link {
    fn of(datalink: DataLink) -> Option<Self> {
        match datalink {
            DataLink::ETHERNET => Some(Self::Ethernet),
            // 12 is what old BSDs call raw IP; IPV4 and IPV6 are raw IP of one version.
            DataLink::RAW | DataLink::IPV4 | DataLink::IPV6 | DataLink::Unknown(12) => Some(Self::RawIp),
            _ => None,
        }
    }

    /// The number of the link type in a capture file.
    pub(super) const fn datalink(self) -> DataLink {
        match self {
            Self::Ethernet => DataLink::ETHERNET,
            Self::RawIp => DataLink::RAW,
        }
    }
}

/// One captured frame.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// When, since 1970.
    pub at: Duration,
    /// What `bytes` begins with.
    pub link: Link,
    /// Its bytes, as far as they were captured.
    pub bytes: Vec<u8>,
    /// Its length on the wire.
    pub wire_len: u32,
    /// Comments that stand at the frame in a pcapng file.
    pub comments: Vec<String>,
}

/// A sequence of frames.
pub(super) trait Source {
    /// The next frame, or `None` at the end.
    fn next(&mut self) -> Result<Option<Frame>, Failure>;
}

/// Opens a capture file if there is one of this name, else the interface.
pub(super) fn open(target: &str, stop: &Arc<AtomicBool>) -> Result<Box<dyn Source>, Failure> {
    match File::open(target) {
        Ok(file) => open_file(file, target),
        Err(error) if error.kind() == ErrorKind::NotFound && !looks_like_a_file(target) => {
            Ok(Box::new(Live::open(target, stop)?))
        }
        Err(error) => Err(Failure::Environment(format!("cannot read {target}: {error}"))),
    }
}

/// Whether a name that does not exist was meant as a file.
fn looks_like_a_file(target: &str) -> bool {
    target.contains('/') || Path::new(target).extension().is_some_and(|e| e == "pcap" || e == "pcapng" || e == "cap")
}

fn open_file(mut file: File, name: &str) -> Result<Box<dyn Source>, Failure> {
    /// First word of every pcapng file, in both byte orders.
    const PCAPNG: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
    let mut magic = [0; 4];
    let cannot = |what: &str| Failure::Failed(format!("{name} is no pcap or pcapng file: {what}"));
    file.read_exact(&mut magic).map_err(|_| cannot("it is too short"))?;
    file.seek(SeekFrom::Start(0))?;
    let file = BufReader::new(file);
    if magic == PCAPNG {
        let reader = PcapNgReader::new(file).map_err(|e| cannot(&e.to_string()))?;
        return Ok(Box::new(PcapNg { reader, interfaces: Vec::new(), name: name.into(), frames: 0 }));
    }
    let reader = PcapReader::new(file).map_err(|e| cannot(&e.to_string()))?;
    let datalink = reader.header().datalink;
    let link = Link::of(datalink).ok_or_else(|| unknown_link(name, datalink))?;
    Ok(Box::new(Pcap { reader, link, name: name.into(), frames: 0 }))
}

fn unknown_link(name: &str, datalink: DataLink) -> Failure {
    Failure::Failed(format!("{name} holds frames of link type {datalink:?}; Ethernet and raw IP can be read"))
}

fn damaged(name: &str, frames: u64, error: &PcapError) -> Failure {
    Failure::Failed(format!("{name} is damaged after frame {frames}: {error}"))
}

struct Pcap {
    reader: PcapReader<BufReader<File>>,
    link: Link,
    name: String,
    frames: u64,
}

impl Source for Pcap {
    fn next(&mut self) -> Result<Option<Frame>, Failure> {
        let Some(packet) = self.reader.next_packet() else { return Ok(None) };
        let packet = packet.map_err(|e| damaged(&self.name, self.frames, &e))?;
        self.frames += 1;
        Ok(Some(Frame {
            at: packet.timestamp,
            link: self.link,
            bytes: packet.data.into_owned(),
            wire_len: packet.orig_len,
            comments: Vec::new(),
        }))
    }
}

/// An interface of a pcapng section.
#[derive(Clone, Copy)]
struct Interface {
    datalink: DataLink,
    /// Units of its time stamps in a second.
    units: u64,
}

struct PcapNg {
    reader: PcapNgReader<BufReader<File>>,
    interfaces: Vec<Interface>,
    name: String,
    frames: u64,
}

impl Source for PcapNg {
    fn next(&mut self) -> Result<Option<Frame>, Failure> {
        loop {
            let Some(block) = self.reader.next_block() else { return Ok(None) };
            let block = block.map_err(|e| damaged(&self.name, self.frames, &e))?;
            let (id, ticks, wire_len, bytes, comments) = match block {
                Block::SectionHeader(_) => {
                    self.interfaces.clear();
                    continue;
                }
                Block::InterfaceDescription(description) => {
                    let units = units_per_second(&description.options);
                    self.interfaces.push(Interface { datalink: description.linktype, units });
                    continue;
                }
                Block::EnhancedPacket(p) => {
                    let comments = p.options.iter().filter_map(comment).collect();
                    // The reader takes every time stamp for nanoseconds; only the interface knows its unit.
                    let ticks = u64::try_from(p.timestamp.as_nanos()).unwrap_or(u64::MAX);
                    (p.interface_id, ticks, p.original_len, p.data.into_owned(), comments)
                }
                Block::SimplePacket(p) => (0, 0, p.original_len, p.data.into_owned(), Vec::new()),
                _ => continue,
            };
            let interface = usize::try_from(id).ok().and_then(|i| self.interfaces.get(i)).ok_or_else(|| {
                Failure::Failed(format!(
                    "{}: frame {} names interface {id}, which is not there",
                    self.name, self.frames
                ))
            })?;
            let link = Link::of(interface.datalink).ok_or_else(|| unknown_link(&self.name, interface.datalink))?;
            self.frames += 1;
            return Ok(Some(Frame { at: duration(ticks, interface.units), link, bytes, wire_len, comments }));
        }
    }
}

fn comment(option: &pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption<'_>) -> Option<String> {
    use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption as Opt;
    if let Opt::Comment(text) = option { Some(text.to_string()) } else { None }
}

/// Time stamp units in a second: 10^n, or 2^n when the top bit of `if_tsresol` is set; microseconds without the option.
fn units_per_second(options: &[InterfaceDescriptionOption<'_>]) -> u64 {
    let code = options.iter().find_map(|o| match o {
        InterfaceDescriptionOption::IfTsResol(code) => Some(*code),
        _ => None,
    });
    let units = code.map_or(Some(1_000_000), |code| {
        let exponent = u32::from(code & 0x7f);
        if code & 0x80 == 0 { 10u64.checked_pow(exponent) } else { 2u64.checked_pow(exponent) }
    });
    units.unwrap_or(u64::MAX)
}

fn duration(ticks: u64, units: u64) -> Duration {
    let rest = u128::from(ticks % units) * 1_000_000_000 / u128::from(units);
    Duration::new(ticks / units, u32::try_from(rest).unwrap_or(0))
}

/// Frames of an interface, in both directions.
struct Live {
    receiver: Box<dyn DataLinkReceiver>,
    stop: Arc<AtomicBool>,
}

impl Live {
    fn open(name: &str, stop: &Arc<AtomicBool>) -> Result<Self, Failure> {
        let interface = datalink::interfaces().into_iter().find(|i| i.name == name);
        let interface = interface.ok_or_else(|| {
            Failure::Environment(format!("{name} is neither a file nor an interface; `ip link` lists the interfaces"))
        })?;
        let config = datalink::Config {
            read_timeout: Some(LIVE_POLL),
            read_buffer_size: LIVE_FRAME_MAX,
            ..datalink::Config::default()
        };
        match datalink::channel(&interface, config) {
            Ok(Channel::Ethernet(_, receiver)) => Ok(Self { receiver, stop: Arc::clone(stop) }),
            Ok(_) => Err(Failure::Environment(format!("{name} does not carry Ethernet frames"))),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(DeviceError::MissingCapability {
                what: format!("interface {name} for capture"),
                capability: "cap_net_raw",
            }
            .into()),
            Err(source) => Err(DeviceError::Io { action: "opening the interface for capture", source }.into()),
        }
    }
}

impl Source for Live {
    fn next(&mut self) -> Result<Option<Frame>, Failure> {
        while !self.stop.load(Ordering::Relaxed) {
            match self.receiver.next() {
                Ok(bytes) => {
                    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    let wire_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                    let bytes = bytes.to_vec();
                    return Ok(Some(Frame { at, link: Link::Ethernet, bytes, wire_len, comments: Vec::new() }));
                }
                Err(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(source) => return Err(DeviceError::Io { action: "capturing", source }.into()),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_have_the_unit_of_their_interface() {
        let resolution = |code| units_per_second(&[InterfaceDescriptionOption::IfTsResol(code)]);
        assert_eq!(units_per_second(&[]), 1_000_000);
        assert_eq!(resolution(9), 1_000_000_000);
        assert_eq!(resolution(0x80 | 10), 1024);
        assert_eq!(duration(1_500_000, 1_000_000), Duration::from_millis(1500));
        assert_eq!(duration(1536, 1024), Duration::from_millis(1500));
        // A unit that no clock has must not divide by zero or overflow.
        assert_eq!(duration(u64::MAX, resolution(0x7f)), Duration::new(1, 0));
    }
}
