//! REJ: refuses, with a reason (IBTA Vol 1 12.6.7).

use core::fmt;

use super::bytes::{Body, get, put, put_u8, put_u16, put_u32, u8_at, u16_at, u32_at};
use super::fields::{Ari, CommunicationId, PrivateData, RejectedMessage};

/// A refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// The sender's id, 0 when it has none.
    pub local_comm_id: CommunicationId,
    /// The receiver's id, 0 when the sender does not know it.
    pub remote_comm_id: CommunicationId,
    /// What is refused.
    pub message: RejectedMessage,
    /// Why.
    pub reason: RejReason,
    /// Additional information whose meaning the reason gives.
    pub ari: Ari,
    /// For the consumer.
    pub private_data: PrivateData<148>,
}

impl Rej {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            message: RejectedMessage::from_wire(u8_at::<8>(body) >> 6),
            reason: RejReason::from_code(u16_at::<10>(body)),
            ari: Ari::from_wire(u8_at::<9>(body) >> 1, get::<12, 72>(body)),
            private_data: PrivateData::parse::<84>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u8::<8>(body, self.message.code() << 6);
        put_u8::<9>(body, self.ari.stated_len() << 1);
        put_u16::<10>(body, self.reason.code());
        put::<12, 72>(body, *self.ari.all());
        self.private_data.emit::<84>(body);
    }
}

macro_rules! reasons {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        /// Why a connection is refused (IBTA Vol 1 12.6.7.2).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RejReason {
            $(#[doc = $text] $name,)*
            /// A number that has no name here.
            Unknown(u16),
        }

        impl RejReason {
            /// Every reason with a name, by number.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The reason with this number.
            #[must_use]
            pub const fn from_code(code: u16) -> Self {
                match code {
                    $($code => Self::$name,)*
                    other => Self::Unknown(other),
                }
            }

            /// The number.
            #[must_use]
            pub const fn code(self) -> u16 {
                match self {
                    $(Self::$name => $code,)*
                    Self::Unknown(code) => code,
                }
            }

            /// What it means, in a few words.
            #[must_use]
            pub const fn describe(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Unknown(_) => "a reason that is not defined",
                }
            }
        }
    };
}

reasons! {
    NoQp = 1, "no QP available";
    NoEec = 2, "no end-to-end context available";
    NoResources = 3, "no resources";
    Timeout = 4, "gave up after all retries";
    Unsupported = 5, "unsupported request";
    InvalidCommId = 6, "invalid communication id";
    InvalidCommInstance = 7, "invalid communication instance";
    InvalidServiceId = 8, "nobody listens on the service id";
    InvalidTransport = 9, "invalid transport service type";
    StaleConnection = 10, "the QP is still part of an older connection";
    RdcDoesNotExist = 11, "the reliable datagram channel does not exist";
    InvalidGid = 12, "primary path GID refused";
    InvalidLid = 13, "primary path LID refused";
    InvalidServiceLevel = 14, "primary path service level refused";
    InvalidTrafficClass = 15, "primary path traffic class refused";
    InvalidHopLimit = 16, "primary path hop limit refused";
    InvalidPacketRate = 17, "primary path packet rate refused";
    InvalidAltGid = 18, "alternate path GID refused";
    InvalidAltLid = 19, "alternate path LID refused";
    InvalidAltServiceLevel = 20, "alternate path service level refused";
    InvalidAltTrafficClass = 21, "alternate path traffic class refused";
    InvalidAltHopLimit = 22, "alternate path hop limit refused";
    InvalidAltPacketRate = 23, "alternate path packet rate refused";
    CmRedirect = 24, "ask another port's connection manager";
    PortRedirect = 25, "use another port";
    InvalidMtu = 26, "path MTU refused";
    InsufficientResponderResources = 27, "not enough responder resources";
    ConsumerDefined = 28, "refused by the application";
    InvalidRnrRetry = 29, "RNR retry count refused";
    DuplicateLocalCommId = 30, "the communication id is in use";
    InvalidClassVersion = 31, "unsupported class version";
    InvalidFlowLabel = 32, "primary path flow label refused";
    InvalidAltFlowLabel = 33, "alternate path flow label refused";
    VendorOptionNotSupported = 35, "vendor option not supported";
}

impl fmt::Display for RejReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.code(), self.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives() {
        for code in 0..=400u16 {
            assert_eq!(RejReason::from_code(code).code(), code);
        }
        assert_eq!(RejReason::ALL.len(), 34);
        assert_eq!(RejReason::ConsumerDefined.to_string(), "28 (refused by the application)");
        assert_eq!(RejReason::from_code(34), RejReason::Unknown(34));
    }
}
