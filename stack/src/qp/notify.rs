//! The notification point of congestion control (IBTA Vol 1 annex A17, paraphrased; its timing is that of DCQCN).
//!
//! Owns when a QP tells its peer that the network marked the peer's packets: at most once in an interval, and only if the
//! program asked for it. Acknowledgements and notifications draw none. Never slows anything down: that is the reaction
//! point's, at the sender.

use super::emit::write_packet;
use super::path::Path;
use crate::burst::{TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::wire::{Body, Flow, Packet, ResponseOp, VlanTag};

/// DSCP 48 without an ECN codepoint: a notification is not to be marked itself.
const TRAFFIC_CLASS: u8 = 48 << 2;
/// In a VLAN.
const PRIORITY: u8 = 6;

/// Whether a notification is owed, and when one left last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Notifier {
    due: bool,
    last: Option<Instant>,
}

impl Notifier {
    /// A packet of the peer's carried the congestion mark.
    #[inline]
    pub(super) fn marked(&mut self, packet: &Packet<'_>, interval: Option<Duration>, now: Instant) {
        let Some(interval) = interval else { return };
        let data = match &packet.body {
            Body::Request(_) => true,
            Body::Response(r) => !matches!(r.op, ResponseOp::Acknowledge(_) | ResponseOp::AtomicAcknowledge(..)),
            Body::Datagram(_) | Body::Cnp => false,
        };
        if data && self.last.is_none_or(|last| now.saturating_since(last) >= interval) {
            (self.due, self.last) = (true, Some(now));
        }
    }

    /// Writes the notification that is owed.
    #[inline]
    pub(super) fn poll_transmit(&mut self, path: &Path, room: &mut TxRoom<'_>) -> Option<TxBurst> {
        if !core::mem::take(&mut self.due) {
            return None;
        }
        let vlan = Some(VlanTag { id: 0, priority: PRIORITY });
        let flow = Flow { traffic_class: TRAFFIC_CLASS, vlan, ..path.flow };
        // A room too small for 60 bytes fits nothing: the next mark tells again.
        write_packet::<()>(room, &flow, &Packet::cnp(path.dest_qpn), 0, |_, crc| Ok(crc)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{PKey, Psn, Qpn};
    use crate::wire::{Place, Request, RequestOp, SendTail, Service};

    fn packet(body: Body<'_>) -> Packet<'_> {
        Packet::new(Qpn::from_wire(5), PKey::DEFAULT, Psn::ZERO, body)
    }

    #[test]
    fn one_in_an_interval_and_none_for_a_notification() {
        let send = packet(Body::Request(Request {
            service: Service::Rc,
            op: RequestOp::Send(Place::Only, SendTail::None),
            payload: &[],
        }));
        let (interval, at) = (Some(Duration::from_micros(50)), |us: u64| Instant::from_nanos(us * 1000));
        let mut n = Notifier::default();
        n.marked(&packet(Body::Cnp), interval, at(0));
        n.marked(&send, None, at(0));
        assert!(!n.due);
        let mut told = Vec::new();
        for us in [0, 10, 49, 50, 60, 99, 101] {
            n.marked(&send, interval, at(us));
            if core::mem::take(&mut n.due) {
                told.push(us);
            }
        }
        assert_eq!(told, [0, 50, 101]);
    }
}
