//! Which hidden IPv4 identifications a peer may use.
//!
//! A UDP socket does not deliver the IPv4 identification, which the ICRC covers; it is recovered from the ICRC itself.
//! Any id would then pass, and with it one corrupted datagram in 65,536. Three kinds of peers are known: those that send
//! 0 always; those whose system numbers the segments of each burst from 0; and those that count. So a small id is always
//! accepted, and else one a little ahead of the peer's last, which wins most of the lost bits back. Owns a fixed number
//! of peers.
//!
//! A count may be shared by all whom the peer sends to, and Linux leaps ahead after a pause by up to its length, so the
//! longer nothing came, the further ahead an id may be.

use core::net::IpAddr;
use std::hash::BuildHasher as _;

use crate::table::NumberHash;
use crate::time::Instant;

/// Peers remembered; a power of two.
const PEERS: usize = 1024;
/// Ids of the segments of a burst: an IP packet has at most 128 (Linux's bound).
const SEGMENT_IDS: u16 = 128;
/// How far ahead of the last id the next may be.
const WINDOW: u16 = 4096;
/// How much further for each microsecond since the last: packets that a peer can send at most.
const IDS_A_MICRO: u128 = 16;
/// How far behind the last id the next may be: packets are reordered.
const BEHIND: u16 = WINDOW / 4;

#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: IpAddr,
    last: u16,
    at: Instant,
    misses: u8,
}

/// The table.
#[derive(Debug)]
pub(super) struct PeerIds {
    peers: Box<[Option<Peer>]>,
    hash: NumberHash,
}

/// Consecutive ids outside the window after which the peer's numbering is taken to have moved.
const MAX_MISSES: u8 = 2;

impl PeerIds {
    pub(super) fn new(key: u64) -> Self {
        Self { peers: vec![None; PEERS].into_boxed_slice(), hash: NumberHash::new(key) }
    }

    /// Whether `id` is plausible for `addr`. Numbers that keep coming from elsewhere are believed in the end: a peer
    /// may have restarted, or share its counter with much other traffic.
    pub(super) fn accept(&mut self, now: Instant, addr: IpAddr, id: u16) -> bool {
        if id < SEGMENT_IDS {
            // Says nothing about a count.
            return true;
        }
        let slot = usize::try_from(self.hash.hash_one(addr)).unwrap_or(0) % PEERS;
        let Some(entry) = self.peers.get_mut(slot) else { return false };
        match entry {
            Some(peer) if peer.addr == addr => {
                let ahead = id.wrapping_sub(peer.last);
                let grown = now.saturating_since(peer.at).as_micros().saturating_mul(IDS_A_MICRO);
                let window = WINDOW.saturating_add(u16::try_from(grown).unwrap_or(u16::MAX));
                let behind = ahead > u16::MAX - BEHIND;
                if ahead >= window && !behind && peer.misses < MAX_MISSES {
                    peer.misses += 1;
                    return false;
                }
                if !behind {
                    (peer.last, peer.at) = (id, now);
                }
                peer.misses = 0;
                true
            }
            _ => {
                *entry = Some(Peer { addr, last: id, at: now, misses: 0 });
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::burst::{RxBurst, RxIds};
    use crate::counters::DropReason;
    use crate::endpoint::{Endpoint, EndpointConfig};
    use crate::time::Duration;
    use crate::types::PathMtu;
    use crate::wire::{DONT_FRAGMENT, Flow, IpFields, seal};

    const T0: Instant = Instant::ZERO;

    fn peer() -> IpAddr {
        "10.0.0.1".parse().unwrap()
    }

    #[test]
    fn rising_ids_pass_and_a_stray_one_does_not() {
        let a = peer();
        let mut t = PeerIds::new(1);
        assert!(t.accept(T0, a, 1000));
        assert!(t.accept(T0, a, 1001));
        assert!(t.accept(T0, a, 1900));
        assert!(t.accept(T0, a, 1899), "reordered");
        assert!(!t.accept(T0, a, 30_000));
        assert!(t.accept(T0, a, 1901));
        assert!(t.accept(T0, a, 0));
    }

    #[test]
    fn a_counter_that_moved_is_followed() {
        let a = peer();
        let mut t = PeerIds::new(1);
        assert!(t.accept(T0, a, 200));
        assert!(!t.accept(T0, a, 40_000));
        assert!(!t.accept(T0, a, 40_001));
        assert!(t.accept(T0, a, 40_002));
        assert!(t.accept(T0, a, 40_003));
    }

    #[test]
    fn wraps() {
        let a = peer();
        let mut t = PeerIds::new(1);
        assert!(t.accept(T0, a, 65_535));
        assert!(t.accept(T0, a, 1));
        assert!(t.accept(T0, a, 300));
        assert!(!t.accept(T0, a, 30_000));
    }

    #[test]
    fn numbers_of_segments_pass_and_do_not_disturb_a_count() {
        let a = peer();
        let mut t = PeerIds::new(1);
        assert!(t.accept(T0, a, 40_000));
        assert!((0..SEGMENT_IDS).all(|id| t.accept(T0, a, id)));
        assert!(t.accept(T0, a, 40_001));
        assert!(!t.accept(T0, a, 5000));
    }

    #[test]
    fn after_a_pause_a_count_may_be_further_ahead() {
        let a = peer();
        let at = |micros| T0 + Duration::from_micros(micros);
        let mut t = PeerIds::new(1);
        assert!(t.accept(at(0), a, 1000));
        assert!(!t.accept(at(10), a, 1000 + WINDOW + 160));
        assert!(t.accept(at(10), a, 1000 + WINDOW + 159));
        // The window is narrow again.
        assert!(!t.accept(at(10), a, 20_000));
        assert!(t.accept(at(10_000_000), a, 60_000));
    }

    /// Segments of one superframe, each made for the id that `id` gives it.
    fn superframe(flow: &Flow, ids: &[u16]) -> Vec<u8> {
        let segments = ids.iter().flat_map(|&id| {
            // SEND Only to a QP that does not exist.
            let mut segment = [0; 12 + 4 + 4];
            (segment[0], segment[2], segment[3], segment[7]) = (4, 0xFF, 0xFF, 99);
            seal(flow, IpFields { id, flags_fragment: DONT_FRAGMENT }, &mut segment, 16);
            segment
        });
        segments.collect()
    }

    /// How many segments of superframes with these ids an endpoint refuses.
    fn refused(superframes: &[&[u16]], spoil: Option<usize>) -> u64 {
        let local: IpAddr = "10.0.0.2".parse().unwrap();
        let config = EndpointConfig::new(vec![local], PathMtu::B1024);
        let mut endpoint = Endpoint::new(config, [7; 32]);
        let (src, dst) = (peer(), local);
        let flow = Flow { src, dst, src_port: 4791, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None };
        for ids in superframes {
            let mut bytes = superframe(&flow, ids);
            if let Some(byte) = spoil.and_then(|at| bytes.get_mut(at)) {
                *byte ^= 1;
            }
            endpoint.handle_burst(T0, RxBurst { flow, bytes: &bytes, segment: 20, ids: RxIds::Hidden, at: T0 });
        }
        let counters = endpoint.counters();
        let wrong = counters.dropped(DropReason::IcrcError);
        let total: usize = superframes.iter().map(|ids| ids.len()).sum();
        assert_eq!(counters.dropped(DropReason::UnknownQp) + wrong, total as u64);
        wrong
    }

    #[test]
    fn superframes_of_every_kind_of_peer_pass() {
        let from = |first: u16, n: u16| (0..n).map(|i| first.wrapping_add(i)).collect::<Vec<_>>();
        // The system numbers segments; a burst may also come in parts, put together anew anywhere on the way.
        assert_eq!(refused(&[&from(0, 64), &from(0, 64), &from(5, 59), &[62, 63, 0, 1]], None), 0);
        // The peer counts, across the wrap, and its next burst was for somebody else.
        assert_eq!(refused(&[&from(65_500, 64), &from(28, 64), &from(400, 64)], None), 0);
        // The peer's id never changes.
        assert_eq!(refused(&[&[0; 64], &[0; 3]], None), 0);
        assert_eq!(refused(&[&[777; 64], &[777; 64]], None), 0);
    }

    #[test]
    fn one_spoilt_segment_of_a_superframe_is_refused_alone() {
        // Payload of the third segment.
        assert_eq!(refused(&[&[0, 1, 2, 3]], Some(2 * 20 + 13)), 1);
        assert_eq!(refused(&[&[9000, 9001, 9002, 9003]], Some(2 * 20 + 13)), 1);
    }
}
