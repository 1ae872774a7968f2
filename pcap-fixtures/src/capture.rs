//! The frames of a capture file and which way they went.
//!
//! Owns reading a pcap file whole. It knows Ethernet, and of IP and UDP only where they end.

use std::path::Path;
use std::time::Duration;

use pcap_file::DataLink;
use pcap_file::pcap::PcapReader;

use crate::error::FixtureError;
use crate::map;

/// The MAC address of node 1, the client.
pub const NODE_1_MAC: [u8; 6] = [0x02, 0x77, 0, 0, 0, 1];
/// The MAC address of node 2, the server.
pub const NODE_2_MAC: [u8; 6] = [0x02, 0x77, 0, 0, 0, 2];

const ETHERNET_LEN: usize = 14;
const UDP_LEN: usize = 8;

/// One Ethernet frame of a capture, whole, without its check sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its place in the capture, from 0.
    pub index: usize,
    /// When it was captured, since the Unix epoch, to the microsecond.
    pub timestamp: Duration,
    /// The frame from the destination MAC address on.
    pub bytes: Vec<u8>,
}

impl Frame {
    /// Which way the frame went, or `None` if it comes from neither node.
    #[must_use]
    pub fn direction(&self) -> Option<Direction> {
        let source = self.bytes.get(6..12)?;
        if source == NODE_1_MAC {
            Some(Direction::Node1ToNode2)
        } else if source == NODE_2_MAC {
            Some(Direction::Node2ToNode1)
        } else {
            None
        }
    }

    /// The frame from the IP header to the end that the header states, which is the ICRC: what
    /// [`reference_icrc`](crate::reference_icrc) takes. `None` if this is no IP packet. One 802.1Q tag may stand before it.
    #[must_use]
    pub fn ip_packet(&self) -> Option<&[u8]> {
        let tag = if self.bytes.get(12..ETHERNET_LEN)? == [0x81, 0x00] { 4 } else { 0 };
        let ip = self.bytes.get(ETHERNET_LEN + tag..)?;
        let len = match self.bytes.get(12 + tag..ETHERNET_LEN + tag)? {
            [0x08, 0x00] => usize::from(be16(ip, 2)?),
            [0x86, 0xdd] => 40 + usize::from(be16(ip, 4)?),
            _ => return None,
        };
        ip.get(..len)
    }

    /// The UDP payload, from the BTH to the ICRC. `None` if this is no UDP packet.
    #[must_use]
    pub fn udp_payload(&self) -> Option<&[u8]> {
        let ip = self.ip_packet()?;
        let first = *ip.first()?;
        let (header_len, protocol) =
            if first >> 4 == 6 { (40, *ip.get(6)?) } else { (usize::from(first & 0x0f) * 4, *ip.get(9)?) };
        if protocol != 17 {
            return None;
        }
        let udp_len = usize::from(be16(ip, header_len + 4)?);
        ip.get(header_len + UDP_LEN..header_len + udp_len)
    }
}

/// Which way a frame went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    Node1ToNode2,
    /// From the server to the client.
    Node2ToNode1,
}

impl Direction {
    /// The other way.
    #[must_use]
    pub fn reverse(self) -> Self {
        match self {
            Self::Node1ToNode2 => Self::Node2ToNode1,
            Self::Node2ToNode1 => Self::Node1ToNode2,
        }
    }
}

/// The two directions of a capture, each in capture order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directions {
    /// What the client sent.
    pub node_1_to_node_2: Vec<Frame>,
    /// What the server sent.
    pub node_2_to_node_1: Vec<Frame>,
}

impl Directions {
    /// The frames that went this way.
    #[must_use]
    pub fn get(&self, direction: Direction) -> &[Frame] {
        match direction {
            Direction::Node1ToNode2 => &self.node_1_to_node_2,
            Direction::Node2ToNode1 => &self.node_2_to_node_1,
        }
    }

    /// Sorts `frames` by direction.
    pub(crate) fn of(frames: Frames, name: &str) -> Result<Self, FixtureError> {
        let mut both = Self::default();
        for frame in frames {
            match frame.direction() {
                Some(Direction::Node1ToNode2) => both.node_1_to_node_2.push(frame),
                Some(Direction::Node2ToNode1) => both.node_2_to_node_1.push(frame),
                None => {
                    return Err(FixtureError::Stranger { name: name.into(), index: frame.index });
                }
            }
        }
        Ok(both)
    }
}

/// The frames of a capture, in capture order. The file has been read and checked to its end.
#[derive(Clone, Debug)]
pub struct Frames(std::vec::IntoIter<Frame>);

impl Frames {
    /// Reads all frames of the pcap file at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, FixtureError> {
        let format = |source| FixtureError::Format { path: path.into(), source };
        let map = map::map(path).map_err(|source| FixtureError::Open { path: path.into(), source })?;
        let mut reader = PcapReader::new(&map[..]).map_err(format)?;
        if reader.header().datalink != DataLink::ETHERNET {
            return Err(FixtureError::NotEthernet { path: path.into() });
        }
        let mut frames = Vec::new();
        while let Some(packet) = reader.next_packet() {
            let packet = packet.map_err(format)?;
            let index = frames.len();
            if usize::try_from(packet.orig_len) != Ok(packet.data.len()) {
                return Err(FixtureError::Cut { path: path.into(), index });
            }
            frames.push(Frame { index, timestamp: packet.timestamp, bytes: packet.data.into_owned() });
        }
        Ok(Self(frames.into_iter()))
    }

    /// The frames not yet taken.
    #[must_use]
    pub fn as_slice(&self) -> &[Frame] {
        self.0.as_slice()
    }
}

impl Iterator for Frames {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Frames {}

/// Two bytes at `at`, most significant first.
fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}
