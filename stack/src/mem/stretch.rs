//! Stretches: checked places for the payloads of several packets.
//!
//! Owns the bounds of a range whose key and rights were looked at once, for as long as the table is not changed: that is
//! within one call, so no key that was taken out of force is ever used again. Never knows what the bytes are.

use super::sges::pieces;
use super::{AccessDenied, MrTable, Span};
use crate::raw::Region;
use crate::types::Rkey;
use crate::verbs::{AccessFlags, PdHandle, QpHandle, Sge};

/// A range of a region.
#[derive(Clone, Copy, Debug)]
pub struct Stretch<'a> {
    region: &'a Region,
    offset: usize,
    len: usize,
}

impl<'a> Stretch<'a> {
    fn new(span: Span<'a>, len: usize) -> Self {
        Self { region: span.region, offset: span.offset, len }
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where in the region `len` bytes from `at` on are.
    #[inline]
    fn place(&self, at: usize, len: usize) -> Option<usize> {
        (at.checked_add(len)? <= self.len).then_some(self.offset + at)
    }

    /// Copies `data` to its byte `at`. `None`, and nothing is copied, where it ends before.
    #[inline]
    #[must_use]
    pub fn write(&self, at: usize, data: &[u8]) -> Option<()> {
        self.region.write(self.place(at, data.len())?, data).ok()
    }

    /// Copies its bytes from `at` on, and goes on from `crc` with the CRC-32 of what was copied. `None` where it ends before.
    #[inline]
    #[must_use]
    pub fn read_crc(&self, at: usize, out: &mut [u8], crc: u32) -> Option<u32> {
        self.region.read_crc(self.place(at, out.len())?, out, crc).ok()
    }
}

impl MrTable {
    /// The place of `len` bytes at `addr` for a peer, as [`MrTable::remote`] finds it.
    ///
    /// # Errors
    /// [`AccessDenied`].
    pub fn remote_stretch(
        &self,
        pd: PdHandle,
        qp: QpHandle,
        rkey: Rkey,
        (addr, len): (u64, u64),
        need: AccessFlags,
    ) -> Result<Stretch<'_>, AccessDenied> {
        let span = self.remote(pd, qp, rkey, addr, len, need)?;
        Ok(Stretch::new(span, usize::try_from(len).map_err(|_| AccessDenied)?))
    }

    /// Of `len` bytes from byte `offset` of the elements' sequence on, those that lie in its first element there. `None`
    /// where there is none, or it may not be used so.
    #[must_use]
    pub fn local_stretch(
        &self,
        pd: PdHandle,
        sges: &[Sge],
        (offset, len): (u64, usize),
        write: bool,
    ) -> Option<Stretch<'_>> {
        let (sge, skip, len) = pieces(sges, offset, len).next()?;
        let span = self.local(pd, sge, skip, len as u64, write).ok()?;
        Some(Stretch::new(span, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::IovaPolicy;
    use crate::raw::copy;
    use crate::rng::Rng;
    use crate::table::Slab;
    use crate::verbs::{MemoryRegion, kind};

    fn table(len: usize) -> (MrTable, PdHandle, Region, MemoryRegion) {
        let mut mrs = MrTable::new(Rng::from_seed([3; 32]), IovaPolicy::Seeded);
        let pd = Slab::<kind::Pd, ()>::new(1).insert(()).unwrap();
        let region = Region::alloc(len).unwrap();
        let mr = mrs.register(pd, &region, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE, None).unwrap();
        (mrs, pd, region, mr)
    }

    #[test]
    fn what_a_peer_reaches_ends_where_it_was_looked_up() {
        let (mrs, pd, region, mr) = table(64);
        let qp = Slab::<kind::Qp, ()>::new(1).insert(()).unwrap();
        let stretch = |addr, len, need| mrs.remote_stretch(pd, qp, mr.rkey, (addr, len), need);
        let s = stretch(mr.iova + 16, 32, AccessFlags::REMOTE_WRITE).unwrap();
        assert_eq!((s.len(), s.is_empty()), (32, false));
        s.write(8, b"abcd").unwrap();
        assert_eq!(region.to_vec()[24..28], *b"abcd");
        s.write(28, b"abcd").unwrap();
        assert_eq!(s.write(29, b"efgh"), None);
        assert_eq!(s.write(usize::MAX, b"efgh"), None);
        assert_eq!(region.to_vec()[44..52], *b"abcd\0\0\0\0");
        assert!(stretch(mr.iova + 33, 32, AccessFlags::REMOTE_WRITE).is_err());
        assert!(stretch(mr.iova, 32, AccessFlags::REMOTE_READ).is_err());
    }

    #[test]
    fn local_ones_end_with_the_element() {
        let (mrs, pd, region, mr) = table(64);
        region.write(0, b"0123456789abcdef").unwrap();
        let sge = |at, length| Sge { addr: mr.iova + at, length, lkey: mr.lkey };
        let sges = [sge(0, 4), sge(0, 0), sge(8, 8), sge(60, 8)];
        let stretch = |offset, len| mrs.local_stretch(pd, &sges, (offset, len), true);
        let lens = [(0, 100), (3, 100), (4, 100), (4, 5), (11, 5)].map(|(at, len)| stretch(at, len).map(|s| s.len()));
        assert_eq!(lens, [Some(4), Some(1), Some(8), Some(5), Some(1)]);
        // The last element is not all inside the region; behind it there is nothing.
        assert_eq!(stretch(12, 8).map(|s| s.len()), None);
        assert_eq!(stretch(12, 4).map(|s| s.len()), Some(4));
        assert_eq!(stretch(20, 1).map(|s| s.len()), None);
        let mut out = [0; 3];
        let s = stretch(4, 8).unwrap();
        assert_eq!(s.read_crc(2, &mut out, 5), Some(copy::crc(5, b"abc")));
        assert_eq!(&out, b"abc");
        assert_eq!(s.read_crc(6, &mut out, 5), None);
    }
}
