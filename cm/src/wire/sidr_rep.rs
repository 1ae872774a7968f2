//! SIDR_REP: says which datagram QP serves (IBTA Vol 1 12.11.2).

use uroce::types::{QKey, Qpn};

use super::bytes::{Body, get, put, put_u8, put_u24, put_u32, put_u64, u8_at, u24_at, u32_at, u64_at};
use super::fields::{Ari, PrivateData};
use super::service::ServiceId;

/// The answer to a SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// Of the request.
    pub request_id: u32,
    /// Whether the rest is valid.
    pub status: SidrStatus,
    /// The QP that serves.
    pub qpn: Qpn,
    /// Of the request.
    pub service_id: ServiceId,
    /// The QP's key.
    pub qkey: QKey,
    /// Additional information whose meaning the status gives.
    pub info: Ari,
    /// For the consumer.
    pub private_data: PrivateData<136>,
}

/// Outcome of a SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SidrStatus {
    /// QPN and Q_Key are valid.
    Success,
    /// The service id is not known.
    Unsupported,
    /// The consumer refuses.
    Rejected,
    /// There is no QP.
    NoQp,
    /// Ask another port.
    Redirect,
    /// The class version is not known.
    UnsupportedVersion,
    /// A number that has no name here.
    Unknown(u8),
}

impl SidrStatus {
    /// The status with this number.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::Unsupported,
            2 => Self::Rejected,
            3 => Self::NoQp,
            4 => Self::Redirect,
            5 => Self::UnsupportedVersion,
            other => Self::Unknown(other),
        }
    }

    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Unsupported => 1,
            Self::Rejected => 2,
            Self::NoQp => 3,
            Self::Redirect => 4,
            Self::UnsupportedVersion => 5,
            Self::Unknown(code) => code,
        }
    }
}

impl SidrRep {
    /// A refusal without a word, to request 0 of service 0.
    #[must_use]
    pub fn refusal(status: SidrStatus) -> Self {
        Self {
            request_id: 0,
            status,
            qpn: Qpn::default(),
            service_id: ServiceId::new(0),
            qkey: QKey::default(),
            info: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        }
    }

    pub(super) fn parse(body: &Body) -> Self {
        Self {
            request_id: u32_at::<0>(body),
            status: SidrStatus::from_code(u8_at::<4>(body)),
            qpn: Qpn::from_wire(u24_at::<8>(body)),
            service_id: ServiceId::new(u64_at::<12>(body)),
            qkey: QKey::new(u32_at::<20>(body)),
            info: Ari::from_wire(u8_at::<5>(body), get::<24, 72>(body)),
            private_data: PrivateData::parse::<96>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.request_id);
        put_u8::<4>(body, self.status.code());
        put_u8::<5>(body, self.info.stated_len());
        put_u24::<8>(body, self.qpn.get());
        put_u64::<12>(body, self.service_id.get());
        put_u32::<20>(body, self.qkey.get());
        put::<24, 72>(body, *self.info.all());
        self.private_data.emit::<96>(body);
    }
}
