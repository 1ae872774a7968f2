//! The bytes of `-c`: what the client sends and what either side must find in the end.
//!
//! Owns the pattern. Only the first byte of each page is agreed with the original programs, which look at no other; the
//! rest is what their client sends all the same. Never touches a QP.

use crate::exit::Failure;

/// The least page of any machine. The client marks each, so that a server with larger pages finds its marks too.
const PAGE: usize = 4096;
/// The largest page: a client with such pages marks no other.
const PAGE_MAX: usize = 65_536;
/// What the first byte of a page holds.
const MARK: u8 = 0;
/// What the client's other bytes hold: of rc, uc and ud, and of srq.
pub(super) const FILL: u8 = 0x7b;
pub(super) const FILL_SRQ: u8 = 0;
/// What stands in a buffer before anything arrives: neither of them.
const UNWRITTEN: u8 = 0xa5;

/// The client's message of `size` bytes; the marks are there only with `-c`.
pub(super) fn message(size: usize, fill: u8, marked: bool) -> Vec<u8> {
    let mut bytes = vec![fill; size];
    if marked {
        bytes.iter_mut().step_by(PAGE).for_each(|b| *b = MARK);
    }
    bytes
}

/// A buffer of `size` bytes into which nothing has come yet.
pub(super) fn unwritten(size: usize) -> Vec<u8> {
    vec![UNWRITTEN; size]
}

/// Whether `bytes` are what a client with `-c` sent.
pub(super) fn verify(bytes: &[u8], fill: u8) -> Result<(), Failure> {
    let wrong = bytes.iter().enumerate().find(|(at, byte)| !is_right(*at, **byte, fill));
    let Some((at, byte)) = wrong else { return Ok(()) };
    let hint = if at == 0 && *byte == fill { " (was the client started with -c?)" } else { "" };
    Err(Failure::Failed(format!("invalid data in page {}: byte {at} is {byte:#04x}{hint}", at / PAGE)))
}

fn is_right(at: usize, byte: u8, fill: u8) -> bool {
    if at.is_multiple_of(PAGE_MAX) {
        byte == MARK
    } else if at.is_multiple_of(PAGE) {
        byte == MARK || byte == fill
    } else {
        byte == fill
    }
}

#[cfg(test)]
mod tests {
    use uroce::wire::{Body, Packet};

    use super::*;

    /// The first message of `size` bytes that each side sends in the capture.
    fn captured(name: &str, size: usize) -> [Vec<u8>; 2] {
        let directions = uroce_fixtures::by_name(name).unwrap().split().unwrap();
        [directions.node_1_to_node_2, directions.node_2_to_node_1].map(|frames| {
            let mut bytes = Vec::new();
            for packet in frames.iter().map(|f| Packet::parse(f.udp_payload().unwrap()).unwrap()) {
                if matches!(packet.body, Body::Request(_)) {
                    bytes.extend_from_slice(packet.payload());
                }
            }
            bytes.truncate(size);
            bytes
        })
    }

    #[test]
    fn the_original_sends_the_same_both_ways() {
        // `ibv_rc_pingpong -s 5000 -m 1024 -c`
        let [ping, pong] = captured("rc_pingpong_mtu1024", 5000);
        assert_eq!(ping, message(5000, FILL, true));
        verify(&pong, FILL).unwrap();
        // `ibv_srq_pingpong -s 512`
        let [ping, pong] = captured("srq_pingpong", 512);
        assert_eq!(ping, message(512, FILL_SRQ, false));
        verify(&pong, FILL_SRQ).unwrap();
    }

    #[test]
    fn what_we_send_is_right() {
        for size in [0, 1, 4096, 4097, 200_000] {
            verify(&message(size, FILL, true), FILL).unwrap();
        }
        assert_eq!(message(8193, FILL, true).iter().filter(|b| **b == 0).count(), 3);
    }

    #[test]
    fn a_client_with_large_pages_is_right_too() {
        let mut bytes = message(70_000, FILL, false);
        bytes[0] = MARK;
        assert!(verify(&bytes, FILL).is_err(), "the second page has no mark");
        bytes[PAGE_MAX] = MARK;
        verify(&bytes, FILL).unwrap();
    }

    #[test]
    fn each_wrong_byte_is_found() {
        let complaint = |at: usize, byte: u8| {
            let mut bytes = message(10_000, FILL, true);
            bytes[at] = byte;
            verify(&bytes, FILL).unwrap_err().to_string()
        };
        assert_eq!(complaint(0, 0x7b), "invalid data in page 0: byte 0 is 0x7b (was the client started with -c?)");
        assert_eq!(complaint(4096, 1), "invalid data in page 1: byte 4096 is 0x01");
        assert_eq!(complaint(9_999, 0), "invalid data in page 2: byte 9999 is 0x00");
        assert!(verify(&unwritten(1), FILL).is_err());
    }
}
