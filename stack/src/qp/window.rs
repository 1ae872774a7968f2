//! How much of a send queue may be unacknowledged.
//!
//! Owns the limits of one QP, in packets and in bytes, and what follows from them: how long a READ request may be, and
//! after how many packets an answer is asked for. Fixed when the QP begins to send: the ends of READ requests lie on a grid
//! that a repeat must find again. Congestion control, which moves, will stand beside it.

use crate::types::PathMtu;

/// PSNs that may be unacknowledged. Far below 2^23, where modular order ends.
pub const MAX_UNACKED: u32 = 256;
/// PSNs that one READ request asks for: a longer READ goes out as consecutive requests, so that its answers never
/// exceed what a receiver's buffers take, and two of them keep the pipe full.
pub const MAX_READ_PSNS: u32 = MAX_UNACKED / 2;
/// Packets after which an answer is asked for at the latest.
const ACK_EVERY: u32 = 32;

/// The limits of one QP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Bytes of a PSN at most.
    pub(crate) mtu: usize,
    /// PSNs.
    packets: u32,
    /// Bytes of payload, also of that which READs ask for. One packet, or one READ request, goes whatever it says.
    bytes: u64,
    /// PSNs of one READ request.
    pub(crate) read_psns: u32,
    /// Packets after which an answer is asked for.
    pub(crate) ack_every: u32,
}

impl Window {
    /// Of packets of `mtu`, and at most `bytes`.
    pub(crate) fn new(bytes: Option<u64>, mtu: PathMtu) -> Self {
        let bytes = bytes.unwrap_or(u64::MAX);
        // Whole packets; a limit of less than four asks for an answer to each.
        let whole = u32::try_from(bytes / mtu.bytes() as u64).unwrap_or(u32::MAX).min(MAX_UNACKED);
        Self {
            mtu: mtu.bytes(),
            packets: MAX_UNACKED,
            bytes,
            read_psns: (whole / 2).clamp(1, MAX_READ_PSNS),
            ack_every: (whole / 4).clamp(1, ACK_EVERY),
        }
    }

    /// Whether `psns` more with `len` bytes may go behind `unacked` PSNs. `in_flight` tells the bytes of those, and is asked
    /// only when they could be too many.
    #[inline]
    pub(crate) fn admits(&self, unacked: u32, (psns, len): (u32, u64), in_flight: impl Fn() -> u64) -> bool {
        let packets = unacked + psns;
        let most = u64::from(packets) * self.mtu as u64;
        packets <= self.packets && (most <= self.bytes || in_flight() + len <= self.bytes)
    }

    /// How many packets of a path MTU may go behind `unacked` PSNs with `in_flight` bytes so that one more may follow them:
    /// none of them must ask for an answer.
    #[inline]
    pub(crate) fn room_before_last(&self, unacked: u32, in_flight: u64) -> u32 {
        let packets = self.packets.saturating_sub(unacked);
        let bytes = self.bytes.saturating_sub(in_flight) / self.mtu.max(1) as u64;
        packets.min(u32::try_from(bytes).unwrap_or(u32::MAX)).saturating_sub(1)
    }
}

impl Default for Window {
    fn default() -> Self {
        Self::new(None, PathMtu::B4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_limit_packets_count() {
        let w = Window::new(None, PathMtu::B4096);
        assert_eq!((w.read_psns, w.ack_every), (128, 32));
        assert!(w.admits(255, (1, 4096), || unreachable!("not asked")));
        assert!(!w.admits(256, (1, 0), || 0));
    }

    #[test]
    fn bytes_count_where_packets_would_be_too_many_of_the_largest() {
        // What a socket takes without privilege: 52 packets of 4096 bytes, or as many small ones as packets allow.
        let w = Window::new(Some(212_992), PathMtu::B4096);
        assert_eq!((w.read_psns, w.ack_every), (26, 13));
        assert!(w.admits(51, (1, 4096), || unreachable!("not asked")));
        assert!(!w.admits(52, (1, 4096), || 52 * 4096));
        assert!(w.admits(52, (1, 64), || 52 * 64));
        assert!(w.admits(200, (1, 64), || 200 * 64));
    }

    #[test]
    fn the_room_before_the_last_packet_is_what_packet_by_packet_admission_leaves() {
        for bytes in [None, Some(212_992), Some(100), Some(4096), Some(8192), Some(1 << 20), Some(1_000_000)] {
            let w = Window::new(bytes, PathMtu::B4096);
            for unacked in (0..260).step_by(3) {
                for spare in [0, 1, 64, 4095] {
                    // Of the packets in flight, where there are any, one may be short.
                    let spare = if unacked > 0 { spare } else { 0 };
                    let in_flight = |n: u32| u64::from(n) * 4096 - spare;
                    // One more of a path MTU must be admitted behind each of these.
                    let one_by_one = (0..).take_while(|n| {
                        let after = unacked + n + 1;
                        w.admits(after, (1, 4096), || in_flight(after))
                    });
                    let room = w.room_before_last(unacked, in_flight(unacked));
                    assert_eq!(room as usize, one_by_one.count(), "{bytes:?} {unacked} {spare}");
                }
            }
        }
    }

    #[test]
    fn a_limit_below_a_packet_still_lets_one_go_at_a_time() {
        let w = Window::new(Some(100), PathMtu::B4096);
        assert_eq!((w.read_psns, w.ack_every), (1, 1));
    }
}
