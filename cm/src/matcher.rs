//! Which packets carry which message: for fault rules such as "the 3rd RTU", and for people who read captures.

use uroce::types::{QKey, Qpn};
use uroce::wire::{Body, Packet};

use crate::wire::{MAD_LEN, Mad, MadKind};

/// The kind of message that a packet carries: a datagram from QP1 to QP1 with the key of QP1 and a MAD of connection
/// management.
#[must_use]
pub fn is_mad(packet: &Packet<'_>) -> Option<MadKind> {
    let Body::Datagram(datagram) = &packet.body else { return None };
    if packet.dest_qp != Qpn::GSI || datagram.qkey != QKey::GSI {
        return None;
    }
    let mad: &[u8; MAD_LEN] = datagram.payload.try_into().ok()?;
    Mad::kind(mad).ok()
}

/// The kind of message that people call so: its name in any case, with `-` or `_` (`req`, `sidr-req`, `SIDR_REP`).
#[must_use]
pub fn named(name: &str) -> Option<MadKind> {
    let same = |a: char, b: char| a.eq_ignore_ascii_case(&b) || (a == '_' && b == '-');
    MadKind::ALL.into_iter().find(|kind| {
        let own = kind.name();
        own.len() == name.len() && own.chars().zip(name.chars()).all(|(a, b)| same(a, b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_eleven_have_names() {
        for (name, kind) in [("req", MadKind::Req), ("Sidr-Req", MadKind::SidrReq), ("SIDR_REP", MadKind::SidrRep)] {
            assert_eq!(named(name), Some(kind));
        }
        for kind in MadKind::ALL {
            assert_eq!(named(&kind.name().to_lowercase().replace('_', "-")), Some(kind));
        }
        for none in ["", "re", "reqs", "sidr", "sidr req", "ack"] {
            assert_eq!(named(none), None);
        }
    }
}
