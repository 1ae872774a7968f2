//! The outer addresses of a packet.

use core::net::IpAddr;

/// 802.1Q tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VlanTag {
    /// VLAN, 1 to 4094; 0 for a tag that only states a priority.
    pub id: u16,
    /// Priority, 0 to 7.
    pub priority: u8,
}

/// Addresses, ports and marks that all packets of a burst share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source address; the same family as `dst`.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port. The destination port is 4791 in both directions.
    pub src_port: u16,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv6 flow label, 20 bits (0 on IPv4).
    pub flow_label: u32,
    /// VLAN, on Ethernet.
    pub vlan: Option<VlanTag>,
}

impl Flow {
    /// The UDP port of RoCEv2.
    pub const PORT: u16 = 4791;

    /// Bytes of IP and UDP header before the BTH: 28 or 48.
    #[must_use]
    pub const fn header_len(&self) -> usize {
        if self.dst.is_ipv4() { 28 } else { 48 }
    }
}

/// Fields of a received IPv4 header that the ICRC covers and nothing else in [`Flow`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpFields {
    /// Identification.
    pub id: u16,
    /// Flags and fragment offset as they stand (0x4000 is DF alone).
    pub flags_fragment: u16,
}
