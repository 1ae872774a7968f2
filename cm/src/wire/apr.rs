//! APR: answers a LAP (IBTA Vol 1 12.8.2).

use super::bytes::{Body, get, put, put_u8, put_u32, u8_at, u32_at};
use super::fields::{Ari, CommunicationId, PrivateData};

/// The answer to an offered alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apr {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The receiver's id.
    pub remote_comm_id: CommunicationId,
    /// What became of the path.
    pub status: AprStatus,
    /// Additional information whose meaning the status gives.
    pub info: Ari,
    /// For the consumer.
    pub private_data: PrivateData<148>,
}

/// What became of an alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // From `InvalidQpn` on, the field of the LAP that is refused.
pub enum AprStatus {
    /// Loaded.
    Success,
    /// The communication id is not known.
    InvalidCommId,
    /// Alternate paths are not supported.
    Unsupported,
    /// The consumer refuses.
    Rejected,
    /// Ask another port.
    Redirect,
    /// It is the path in use.
    IsCurrent,
    InvalidQpn,
    InvalidLid,
    InvalidGid,
    InvalidFlowLabel,
    InvalidTrafficClass,
    InvalidHopLimit,
    InvalidPacketRate,
    InvalidServiceLevel,
    /// A number that has no name here.
    Unknown(u8),
}

impl AprStatus {
    const NAMED: [Self; 14] = [
        Self::Success,
        Self::InvalidCommId,
        Self::Unsupported,
        Self::Rejected,
        Self::Redirect,
        Self::IsCurrent,
        Self::InvalidQpn,
        Self::InvalidLid,
        Self::InvalidGid,
        Self::InvalidFlowLabel,
        Self::InvalidTrafficClass,
        Self::InvalidHopLimit,
        Self::InvalidPacketRate,
        Self::InvalidServiceLevel,
    ];

    /// The status with this number.
    #[must_use]
    pub fn from_code(code: u8) -> Self {
        Self::NAMED.get(usize::from(code)).copied().unwrap_or(Self::Unknown(code))
    }

    /// The number.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Unknown(code) => code,
            named => (0..).zip(Self::NAMED).find(|(_, s)| *s == named).map_or(u8::MAX, |(code, _)| code),
        }
    }
}

impl Apr {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            status: AprStatus::from_code(u8_at::<9>(body)),
            info: Ari::from_wire(u8_at::<8>(body), get::<12, 72>(body)),
            private_data: PrivateData::parse::<84>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u8::<8>(body, self.info.stated_len());
        put_u8::<9>(body, self.status.code());
        put::<12, 72>(body, *self.info.all());
        self.private_data.emit::<84>(body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_survives() {
        for code in 0..=255u8 {
            assert_eq!(AprStatus::from_code(code).code(), code);
        }
        assert_eq!(AprStatus::from_code(2), AprStatus::Unsupported);
        assert_eq!(AprStatus::from_code(13), AprStatus::InvalidServiceLevel);
    }
}
