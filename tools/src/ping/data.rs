//! What rping says: the advertisement of a buffer, and the text of a ping.
//!
//! Owns both formats. Never touches a QP.

use uroce::types::Rkey;
use uroce::verbs::Remote;

/// Bytes of an advertisement.
pub(super) const INFO_LEN: usize = 16;
/// Least size of a ping: room for the text before the letters.
pub(super) const SIZE_MIN: u32 = 26;
/// Greatest size of a ping.
pub(super) const SIZE_MAX: u32 = 65_535;
/// The first letter and the last one; after the last comes the first again.
const LETTERS: core::ops::RangeInclusive<u8> = b'A'..=b'z';

/// A buffer that the peer may READ from or WRITE to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Info {
    /// Where.
    pub at: Remote,
    /// Bytes.
    pub len: u32,
}

impl Info {
    /// Address, key and length, big-endian.
    pub(super) fn to_bytes(self) -> [u8; INFO_LEN] {
        let mut bytes = [0; INFO_LEN];
        let fields = self.at.addr.to_be_bytes().into_iter();
        let fields = fields.chain(self.at.rkey.get().to_be_bytes()).chain(self.len.to_be_bytes());
        for (to, from) in bytes.iter_mut().zip(fields) {
            *to = from;
        }
        bytes
    }

    /// Reads an advertisement.
    pub(super) fn from_bytes(bytes: [u8; INFO_LEN]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Self {
            at: Remote {
                addr: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
                rkey: Rkey::new(u32::from_be_bytes([i, j, k, l])),
            },
            len: u32::from_be_bytes([m, n, o, p]),
        }
    }
}

/// The bytes of ping `number`: `rdma-ping-N: `, letters from one that moves on by one a ping, and a NUL.
pub(super) fn text(number: u32, size: usize) -> Vec<u8> {
    let first = usize::try_from(number).unwrap_or(0) % LETTERS.len();
    let head = format!("rdma-ping-{number}: ");
    let mut bytes: Vec<u8> = head.bytes().chain(LETTERS.cycle().skip(first)).take(size).collect();
    if let Some(last) = bytes.last_mut() {
        *last = 0;
    }
    bytes
}

/// The text up to its NUL, for people.
pub(super) fn shown(bytes: &[u8]) -> String {
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_read_as_rping_prints_them() {
        // From what rping printed beside the capture rping_v4.
        let lines = [
            "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr",
            "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs",
            "rdma-ping-2: CDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrst",
        ];
        for (number, line) in (0..).zip(lines) {
            let bytes = text(number, 64);
            assert_eq!((bytes.len(), shown(&bytes).as_str()), (64, line));
        }
    }

    #[test]
    fn letters_go_round() {
        let bytes = text(57, 40);
        assert_eq!(&bytes[..17], b"rdma-ping-57: zAB");
        assert_eq!(&text(58, 40)[..17], b"rdma-ping-58: ABC");
    }

    #[test]
    fn an_advertisement_is_big_endian() {
        let info = Info { at: Remote { addr: 0x5591_5d8e_6710, rkey: Rkey::new(0x2c5d) }, len: 64 };
        let bytes = info.to_bytes();
        assert_eq!(bytes, [0, 0, 0x55, 0x91, 0x5d, 0x8e, 0x67, 0x10, 0, 0, 0x2c, 0x5d, 0, 0, 0, 64]);
        assert_eq!(Info::from_bytes(bytes), info);
    }
}
