//! Writes frames to a pcapng file, with what we found out about each as its comment.
//!
//! Owns the output file. Never decides which frames go there.

use std::borrow::Cow;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};

use super::source::{Frame, Link};
use crate::exit::Failure;

/// Nanoseconds, as a code of `if_tsresol`.
const NANOSECONDS: u8 = 9;

/// A pcapng file that is being written. It has one interface for each link type that came.
pub(super) struct Saver {
    writer: PcapNgWriter<BufWriter<File>>,
    interfaces: Vec<Link>,
}

impl Saver {
    /// Creates `path`, or truncates it.
    pub(super) fn create(path: &Path) -> Result<Self, Failure> {
        let cannot = |e: String| Failure::Environment(format!("cannot write {}: {e}", path.display()));
        let file = File::create(path).map_err(|e| cannot(e.to_string()))?;
        let writer = PcapNgWriter::new(BufWriter::new(file)).map_err(|e| cannot(e.to_string()))?;
        Ok(Self { writer, interfaces: Vec::new() })
    }

    /// Appends `frame` with its own comments and `comment`.
    pub(super) fn write(&mut self, frame: &Frame, comment: Option<&str>) -> Result<(), Failure> {
        let interface_id = self.interface(frame.link)?;
        let comments = frame.comments.iter().map(String::as_str).chain(comment);
        let block = EnhancedPacketBlock {
            interface_id,
            timestamp: frame.at,
            original_len: frame.wire_len,
            data: Cow::Borrowed(&frame.bytes),
            options: comments.map(|c| EnhancedPacketOption::Comment(Cow::Borrowed(c))).collect(),
        };
        self.writer.write_pcapng_block(block).map_err(Failure::failed)?;
        Ok(())
    }

    /// Writes what is buffered.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let mut buffer = self.writer.into_inner();
        Ok(std::io::Write::flush(&mut buffer)?)
    }

    fn interface(&mut self, link: Link) -> Result<u32, Failure> {
        let at = match self.interfaces.iter().position(|have| *have == link) {
            Some(at) => at,
            None => {
                let mut description = InterfaceDescriptionBlock::new(link.datalink(), 0);
                description.options = vec![InterfaceDescriptionOption::IfTsResol(NANOSECONDS)];
                self.writer.write_pcapng_block(description).map_err(Failure::failed)?;
                self.interfaces.push(link);
                self.interfaces.len() - 1
            }
        };
        Ok(u32::try_from(at).unwrap_or(0))
    }
}
