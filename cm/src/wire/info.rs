//! Additional information: what the bytes beside a refusal mean (IBTA Vol 1 12.6.7.2, 12.8.2, 12.11.2).

use uroce::types::{Gid, PKey, PathMtu, QKey, Qpn};

use super::fields::{Ari, CaGuid};
use super::rej::RejReason;

/// What a REJ adds to its reason. For most reasons it is what the sender would have accepted in place of what it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejInfo {
    /// Nothing.
    None,
    /// Reason 4: the adapter of the side that gave up, which with its communication id names the communication.
    CaGuid(CaGuid),
    /// Reasons 12 and 18: a GID.
    Gid(Gid),
    /// Reasons 13 and 19: a LID.
    Lid(u16),
    /// Reasons 14 and 20: a service level, 4 bits.
    ServiceLevel(u8),
    /// Reasons 15 and 21: a traffic class.
    TrafficClass(u8),
    /// Reasons 16 and 22: a hop limit.
    HopLimit(u8),
    /// Reasons 17 and 23: a packet rate code, 6 bits.
    PacketRate(u8),
    /// Reason 24: whose connection manager to ask.
    CmRedirect(Redirect),
    /// Reason 25: which port to use.
    PortRedirect {
        /// Its GID.
        gid: Gid,
        /// Its LID; on RoCE without meaning.
        lid: u16,
    },
    /// Reason 26: the greatest path MTU.
    Mtu(PathMtu),
    /// Reason 27: READs and atomics that can be served.
    ResponderResources(u8),
    /// Reason 29: an RNR retry count, 3 bits.
    RnrRetry(u8),
    /// Reason 31: the highest class version known.
    ClassVersion(u8),
    /// Reasons 32 and 33: a flow label, 20 bits.
    FlowLabel(u32),
    /// Anything else: of a reason that gives it no meaning, or too short for its reason. See the bytes.
    Opaque,
}

/// Whose connection manager to ask in place of this one: the part of a ClassPortInfo that says so (IBTA Vol 1 13.4.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// Its GID.
    pub gid: Gid,
    /// DSCP and ECN of the way there.
    pub traffic_class: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// 20 bits.
    pub flow_label: u32,
    /// Its LID; on RoCE without meaning.
    pub lid: u16,
    /// Partition.
    pub pkey: PKey,
    /// Its QP.
    pub qpn: Qpn,
    /// Key of that QP.
    pub qkey: QKey,
}

impl Redirect {
    /// Reads it from the additional information of a REJ (reason 24), APR (status 4) or SIDR_REP (status 4).
    #[must_use]
    pub fn parse(info: &Ari) -> Option<Self> {
        let bytes = info.as_bytes().get(8..40)?;
        let (gid, rest) = bytes.split_first_chunk::<16>()?;
        let &[tc, slfl, fl_mid, fl_low, lid_high, lid_low, p_high, p_low, _, qp @ .., k0, k1, k2, k3] =
            rest.first_chunk::<16>()?;
        let [q0, q1, q2] = qp;
        Some(Self {
            gid: Gid::from_bytes(*gid),
            traffic_class: tc,
            service_level: slfl >> 4,
            flow_label: u32::from_be_bytes([0, slfl & 0x0f, fl_mid, fl_low]),
            lid: u16::from_be_bytes([lid_high, lid_low]),
            pkey: PKey::new(u16::from_be_bytes([p_high, p_low])),
            qpn: Qpn::from_wire(u32::from_be_bytes([0, q0, q1, q2])),
            qkey: QKey::new(u32::from_be_bytes([k0, k1, k2, k3])),
        })
    }

    /// A ClassPortInfo of 72 bytes with this redirection, and else only the versions.
    #[must_use]
    pub fn to_ari(&self) -> Ari {
        let [_, fl_high, fl_mid, fl_low] = self.flow_label.to_be_bytes();
        let slfl = (self.service_level << 4) | (fl_high & 0x0f);
        let bytes = [1, 2, 0, 0, 0, 0, 0, 0]
            .into_iter()
            .chain(self.gid.to_bytes())
            .chain([self.traffic_class, slfl, fl_mid, fl_low])
            .chain(self.lid.to_be_bytes())
            .chain(self.pkey.get().to_be_bytes())
            .chain(self.qpn.get().to_be_bytes())
            .chain(self.qkey.get().to_be_bytes());
        let mut all = [0; Ari::MAX];
        for (to, from) in all.iter_mut().zip(bytes) {
            *to = from;
        }
        Ari::new(&all)
    }
}

impl RejInfo {
    /// What `ari` says beside `reason`.
    #[must_use]
    pub fn parse(reason: RejReason, ari: &Ari) -> Self {
        use RejReason as R;
        let bytes = ari.as_bytes();
        let Some(first) = bytes.first().copied() else { return Self::None };
        let found = match reason {
            R::Timeout => ari.ca_guid().map(Self::CaGuid),
            R::InvalidGid | R::InvalidAltGid => gid_at(bytes).map(Self::Gid),
            R::InvalidLid | R::InvalidAltLid => u16_at(bytes).map(Self::Lid),
            R::InvalidServiceLevel | R::InvalidAltServiceLevel => Some(Self::ServiceLevel(first & 0x0f)),
            R::InvalidTrafficClass | R::InvalidAltTrafficClass => Some(Self::TrafficClass(first)),
            R::InvalidHopLimit | R::InvalidAltHopLimit => Some(Self::HopLimit(first)),
            R::InvalidPacketRate | R::InvalidAltPacketRate => Some(Self::PacketRate(first & 0x3f)),
            R::CmRedirect => Redirect::parse(ari).map(Self::CmRedirect),
            R::PortRedirect => gid_at(bytes).map(|gid| {
                let lid = bytes.get(16..).and_then(u16_at).unwrap_or(0);
                Self::PortRedirect { gid, lid }
            }),
            R::InvalidMtu => PathMtu::from_code(first).map(Self::Mtu),
            R::InsufficientResponderResources => Some(Self::ResponderResources(first)),
            R::InvalidRnrRetry => Some(Self::RnrRetry(first & 7)),
            R::InvalidClassVersion => Some(Self::ClassVersion(first)),
            R::InvalidFlowLabel | R::InvalidAltFlowLabel => bytes
                .first_chunk::<3>()
                .map(|[high, middle, low]| Self::FlowLabel(u32::from_be_bytes([0, high & 0x0f, *middle, *low]))),
            _ => None,
        };
        found.unwrap_or(Self::Opaque)
    }

    /// The bytes that say so.
    #[must_use]
    pub fn to_ari(self) -> Ari {
        match self {
            Self::None | Self::Opaque => Ari::EMPTY,
            Self::CaGuid(guid) => Ari::new(&guid.get().to_be_bytes()),
            Self::Gid(gid) => Ari::new(&gid.to_bytes()),
            Self::Lid(lid) => Ari::new(&lid.to_be_bytes()),
            Self::Mtu(mtu) => Ari::new(&[mtu.code()]),
            Self::ServiceLevel(v)
            | Self::TrafficClass(v)
            | Self::HopLimit(v)
            | Self::PacketRate(v)
            | Self::ResponderResources(v)
            | Self::RnrRetry(v)
            | Self::ClassVersion(v) => Ari::new(&[v]),
            Self::CmRedirect(redirect) => redirect.to_ari(),
            Self::PortRedirect { gid, lid } => {
                let [high, low] = lid.to_be_bytes();
                let mut bytes = [0; 18];
                for (to, from) in bytes.iter_mut().zip(gid.to_bytes().into_iter().chain([high, low])) {
                    *to = from;
                }
                Ari::new(&bytes)
            }
            Self::FlowLabel(label) => {
                let [_, high, middle, low] = label.to_be_bytes();
                Ari::new(&[high & 0x0f, middle, low])
            }
        }
    }
}

fn gid_at(bytes: &[u8]) -> Option<Gid> {
    bytes.first_chunk::<16>().map(|gid| Gid::from_bytes(*gid))
}

fn u16_at(bytes: &[u8]) -> Option<u16> {
    bytes.first_chunk::<2>().map(|b| u16::from_be_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid() -> Gid {
        Gid::from(core::net::Ipv4Addr::new(10, 77, 0, 9))
    }

    fn redirect() -> Redirect {
        Redirect {
            gid: gid(),
            traffic_class: 0x6a,
            service_level: 5,
            flow_label: 0xA_BCDE,
            lid: 0xFFFF,
            pkey: PKey::DEFAULT,
            qpn: Qpn::GSI,
            qkey: QKey::GSI,
        }
    }

    #[test]
    fn every_reason_with_a_meaning_says_it_and_is_understood() {
        use RejReason as R;
        let cases = [
            (R::Timeout, RejInfo::CaGuid(CaGuid::new(0x0203_0405_0607_0809))),
            (R::InvalidGid, RejInfo::Gid(gid())),
            (R::InvalidAltGid, RejInfo::Gid(gid())),
            (R::InvalidLid, RejInfo::Lid(0x1234)),
            (R::InvalidServiceLevel, RejInfo::ServiceLevel(9)),
            (R::InvalidTrafficClass, RejInfo::TrafficClass(0x6a)),
            (R::InvalidAltHopLimit, RejInfo::HopLimit(64)),
            (R::InvalidPacketRate, RejInfo::PacketRate(3)),
            (R::CmRedirect, RejInfo::CmRedirect(redirect())),
            (R::PortRedirect, RejInfo::PortRedirect { gid: gid(), lid: 7 }),
            (R::InvalidMtu, RejInfo::Mtu(PathMtu::B2048)),
            (R::InsufficientResponderResources, RejInfo::ResponderResources(4)),
            (R::InvalidRnrRetry, RejInfo::RnrRetry(7)),
            (R::InvalidClassVersion, RejInfo::ClassVersion(2)),
            (R::InvalidFlowLabel, RejInfo::FlowLabel(0xA_BCDE)),
        ];
        for (reason, info) in cases {
            assert_eq!(RejInfo::parse(reason, &info.to_ari()), info, "{reason}");
        }
    }

    #[test]
    fn a_redirection_stands_where_class_port_info_has_it() {
        let ari = redirect().to_ari();
        let bytes = ari.as_bytes();
        assert_eq!((bytes.len(), &bytes[..2]), (72, &[1, 2][..]));
        assert_eq!(bytes[8..24], gid().to_bytes());
        // Traffic class, SL and flow label; LID and P_Key; QP; Q_Key.
        assert_eq!(bytes[24..40], [0x6a, 0x5a, 0xbc, 0xde, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0x80, 1, 0, 0]);
    }

    #[test]
    fn what_is_too_short_or_has_no_meaning_stays_bytes() {
        assert_eq!(RejInfo::parse(RejReason::Timeout, &Ari::EMPTY), RejInfo::None);
        assert_eq!(RejInfo::parse(RejReason::Timeout, &Ari::new(&[0; 7])), RejInfo::Opaque);
        assert_eq!(RejInfo::parse(RejReason::InvalidGid, &Ari::new(&[0; 15])), RejInfo::Opaque);
        assert_eq!(RejInfo::parse(RejReason::CmRedirect, &Ari::new(&[0; 39])), RejInfo::Opaque);
        assert_eq!(RejInfo::parse(RejReason::InvalidMtu, &Ari::new(&[9])), RejInfo::Opaque);
        assert_eq!(RejInfo::parse(RejReason::ConsumerDefined, &Ari::new(b"text")), RejInfo::Opaque);
    }
}
