//! What moves between an endpoint and a device: bursts.
//!
//! Owns the shapes only. A burst is one packet, or a superframe of equal segments of one flow (the last may be
//! shorter): what a superframe saves is the whole cost of a packet, so nothing here is one packet a call. A segment is
//! BTH to ICRC. Never touches a device or a QP.

use crate::time::Instant;
use crate::wire::{Flow, IpFields};

/// What the endpoint does with the ICRC of received packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcMode {
    /// Drop a packet whose ICRC is wrong.
    #[default]
    Check,
    /// Do not look (the medium cannot corrupt).
    Ignore,
    /// Count a wrong one, and go on.
    Count,
}

/// What the device sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The endpoint writes IP and UDP headers before the first BTH; the device puts the Ethernet header before them.
    Ip,
    /// The endpoint writes from the BTH on; a UDP socket makes the rest.
    Udp,
}

/// Which IPv4 identification each segment will carry. The ICRC covers it, so it must be known before the bytes are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdRule {
    /// 0 on every segment, DF set.
    Zero,
    /// 0, 1, 2 … by segment, DF set (UDP segmentation).
    Index,
    /// The endpoint writes this id into the IP header; segment i carries id + i, DF set.
    From(u16),
}

impl IdRule {
    /// The id of segment `index`.
    #[must_use]
    pub const fn id(self, index: usize) -> u16 {
        #[allow(clippy::cast_possible_truncation)] // Ids are modular.
        let i = index as u16;
        match self {
            Self::Zero => 0,
            Self::Index => i,
            Self::From(first) => first.wrapping_add(i),
        }
    }
}

/// The UDP source port of a flow whose formula gives `wanted`, on a device that can send from `ports` (empty: any).
#[must_use]
pub fn choose_source_port(ports: &[u16], wanted: u16) -> u16 {
    let at = usize::from(wanted).checked_rem(ports.len());
    at.and_then(|at| ports.get(at)).copied().unwrap_or(wanted)
}

/// A free slot of a device.
#[derive(Debug)]
pub struct TxRoom<'a> {
    /// Where the bytes go: `buf[headroom..]`.
    pub buf: &'a mut [u8],
    /// Bytes at the beginning that belong to the device (its Ethernet header).
    pub headroom: usize,
    /// Segments that one burst may have, at least 1.
    pub segments_max: usize,
    /// Ids.
    pub ids: IdRule,
    /// What to write.
    pub medium: Medium,
}

/// A burst that was written into a [`TxRoom`]: sent as it is, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxBurst {
    /// Addresses, port, marks.
    pub flow: Flow,
    /// Bytes written from `headroom` on: IP and UDP header (medium [`Medium::Ip`]) and all segments.
    pub len: usize,
    /// Bytes of each segment, BTH to ICRC; the last may be shorter.
    pub segment: usize,
    /// Segments, at least 1.
    pub segments: usize,
}

/// What is known of the IPv4 fields of a received burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxIds {
    /// Segment i came with `id + i` (IPv6: ignored).
    Known(IpFields),
    /// A UDP socket does not tell; DF is taken to be set.
    Hidden,
}

/// A received burst, headers before the BTH taken off.
#[derive(Clone, Copy, Debug)]
pub struct RxBurst<'a> {
    /// Addresses as they stood in the packet: `src` is the peer.
    pub flow: Flow,
    /// All segments.
    pub bytes: &'a [u8],
    /// Bytes of each segment; the last may be shorter.
    pub segment: usize,
    /// Ids.
    pub ids: RxIds,
    /// When it arrived.
    pub at: Instant,
}

impl RxBurst<'_> {
    /// Whether the congestion mark (CE) is set.
    #[must_use]
    pub const fn congestion_experienced(&self) -> bool {
        self.flow.traffic_class & 3 == 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_takes_a_port_that_the_device_has() {
        assert_eq!(choose_source_port(&[], 50208), 50208);
        assert_eq!(choose_source_port(&[4791], 50208), 4791);
        assert_eq!(choose_source_port(&[7, 8, 9], 50208), 7);
        assert_eq!(choose_source_port(&[7, 8, 9], 50209), 8);
    }
}
