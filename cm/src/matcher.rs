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
