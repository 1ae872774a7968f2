//! Which hidden IPv4 identifications a peer may use.
//!
//! A UDP socket does not deliver the IPv4 identification, which the ICRC covers; it is recovered from the ICRC itself.
//! Any id would then pass, and with it one corrupted datagram in 65,536. This table remembers each peer's last id and
//! accepts only 0, or an id a little ahead of it, which wins most of the lost bits back. Owns a fixed number of peers.

use core::net::IpAddr;
use std::hash::BuildHasher as _;

use crate::table::NumberHash;

/// Peers remembered; a power of two.
const PEERS: usize = 1024;
/// How far ahead of the last id the next may be.
const WINDOW: u16 = 4096;

#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: IpAddr,
    last: u16,
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
    pub(super) fn accept(&mut self, addr: IpAddr, id: u16) -> bool {
        if id == 0 {
            return true;
        }
        let slot = usize::try_from(self.hash.hash_one(addr)).unwrap_or(0) % PEERS;
        let Some(entry) = self.peers.get_mut(slot) else { return false };
        match entry {
            Some(peer) if peer.addr == addr => {
                let ahead = id.wrapping_sub(peer.last);
                // A little behind is a reordered packet.
                let near = !(WINDOW..=u16::MAX - WINDOW / 4).contains(&ahead);
                if !near && peer.misses < MAX_MISSES {
                    peer.misses += 1;
                    return false;
                }
                if !near || ahead < WINDOW {
                    peer.last = id;
                }
                peer.misses = 0;
                true
            }
            _ => {
                *entry = Some(Peer { addr, last: id, misses: 0 });
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rising_ids_pass_and_a_stray_one_does_not() {
        let a: IpAddr = "10.0.0.1".parse().unwrap();
        let mut t = PeerIds::new(1);
        assert!(t.accept(a, 100));
        assert!(t.accept(a, 101));
        assert!(t.accept(a, 900));
        assert!(t.accept(a, 899), "reordered");
        assert!(!t.accept(a, 30_000));
        assert!(t.accept(a, 901));
        assert!(t.accept(a, 0));
    }

    #[test]
    fn a_counter_that_moved_is_followed() {
        let a: IpAddr = "10.0.0.1".parse().unwrap();
        let mut t = PeerIds::new(1);
        assert!(t.accept(a, 100));
        assert!(!t.accept(a, 40_000));
        assert!(!t.accept(a, 40_001));
        assert!(t.accept(a, 40_002));
        assert!(t.accept(a, 40_003));
    }

    #[test]
    fn wraps() {
        let a: IpAddr = "10.0.0.1".parse().unwrap();
        let mut t = PeerIds::new(1);
        assert!(t.accept(a, 65_535));
        assert!(t.accept(a, 1));
    }
}
