//! Service ids and the port spaces of rdma_cm (annex A11 of IBTA Vol 1).

use core::fmt;

/// What a REQ or SIDR_REQ asks for: 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(u64);

/// A range of service ids whose low 16 bits are a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortSpace {
    /// Connections: `rdma_create_id` with RDMA_PS_TCP.
    Tcp,
    /// Datagrams: RDMA_PS_UDP.
    Udp,
    /// Either: RDMA_PS_IB.
    Ib,
    /// IP over InfiniBand: RDMA_PS_IPOIB.
    IpOverIb,
}

impl PortSpace {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tcp, Self::Udp, Self::Ib, Self::IpOverIb];

    /// The number that librdmacm's `enum rdma_port_space` has.
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            Self::IpOverIb => 0x0002,
            Self::Tcp => 0x0106,
            Self::Udp => 0x0111,
            Self::Ib => 0x013F,
        }
    }
}

impl ServiceId {
    /// The service id with this value.
    #[must_use]
    pub const fn new(v: u64) -> Self {
        Self(v)
    }

    /// The raw value.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The service id of `port` in `space`.
    #[must_use]
    pub const fn of_port(space: PortSpace, port: u16) -> Self {
        Self(((space.code() as u64) << 16) | port as u64)
    }

    /// Port space and port, if it is one of rdma_cm's. Its private data then begin with an
    /// [`IpHeader`](super::IpHeader).
    #[must_use]
    pub fn port(self) -> Option<(PortSpace, u16)> {
        let space = PortSpace::ALL.into_iter().find(|s| u64::from(s.code()) == self.0 >> 16)?;
        let [.., high, low] = self.0.to_be_bytes();
        Some((space, u16::from_be_bytes([high, low])))
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({:#018x})", self.0)
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rping_listens_on_7174() {
        let id = ServiceId::of_port(PortSpace::Tcp, 7174);
        assert_eq!(id.get(), 0x0000_0000_0106_1C06);
        assert_eq!(id.port(), Some((PortSpace::Tcp, 7174)));
        assert_eq!(ServiceId::of_port(PortSpace::Udp, 7174).get(), 0x0111_1C06);
        assert_eq!(ServiceId::new(0x1000_0000_0106_0001).port(), None);
    }
}
