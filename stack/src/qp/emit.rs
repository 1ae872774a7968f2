//! Writing packets into a device's room: one, or a superframe of equal ones.
//!
//! Owns the order (headers, payload and its CRC in one pass, ICRC last, over the bytes as they were written; the outer
//! headers once, when all segments are there) and the rule which packets share a burst: those of one flow, all of one length but the last,
//! which may be shorter. Which packet comes next is the caller's business.

use crate::burst::{Medium, TxBurst, TxRoom};
use crate::mem::Stretch;
use crate::wire::{self, DONT_FRAGMENT, Flow, IcrcStarts, Packet, RunHeader, RunWriter};

/// Bytes of an IP packet at most, and so of a burst, which crosses the network stack as one.
const IP_MAX: usize = 65_535;

/// Why a packet was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmitError<E> {
    /// The room is too small for it: the path MTU exceeds what the device offered.
    NoRoom,
    /// The payload could not be copied.
    Payload(E),
}

/// A burst that is being written.
pub(crate) struct BurstWriter<'r, 'b> {
    room: &'r mut TxRoom<'b>,
    flow: &'r Flow,
    /// Bytes of the IP and UDP header in the room.
    outer_len: usize,
    /// Bytes from BTH on that the burst may have.
    limit: usize,
    /// Bytes of each segment; 0 before the first.
    segment: usize,
    segments: usize,
    /// Bytes of all segments.
    len: usize,
}

impl<'r, 'b> BurstWriter<'r, 'b> {
    /// An empty burst of `flow`.
    #[inline]
    pub(crate) fn new(room: &'r mut TxRoom<'b>, flow: &'r Flow) -> Self {
        let header_len = flow.header_len();
        let outer_len = match room.medium {
            Medium::Ip => header_len,
            Medium::Udp => 0,
        };
        let room_for = room.buf.len().saturating_sub(room.headroom + outer_len);
        // Addresses of two families have no header in common: nothing fits.
        let room_for = if flow.src.is_ipv4() == flow.dst.is_ipv4() { room_for } else { 0 };
        Self { outer_len, limit: room_for.min(IP_MAX - header_len), segment: 0, segments: 0, len: 0, room, flow }
    }

    /// Whether another segment may follow.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        // A last segment that was shorter leaves a remainder.
        self.segments < self.room.segments_max && self.segment * self.segments == self.len
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.segments == 0
    }

    /// Whether `packet` with `payload_len` bytes can be the next segment. The first always can; that there is room for it
    /// is found when it is written.
    #[inline]
    pub(crate) fn takes(&self, packet: &Packet<'_>, payload_len: usize) -> bool {
        if self.segments == 0 {
            return true;
        }
        let len = wire::segment_len(packet.header_len(), payload_len);
        self.is_open() && len <= self.segment && self.len + len <= self.limit
    }

    /// Writes `packet` with `payload_len` bytes that `fill` copies into place, going on from a CRC to that of what it has
    /// written. The payload inside `packet` is not used. A packet that fails leaves the burst as it was. Only for one
    /// that the burst [takes](Self::takes). `starts` is any; best the one that the flow's last packet came with.
    #[inline]
    pub(crate) fn push<E>(
        &mut self,
        starts: &mut IcrcStarts,
        packet: &Packet<'_>,
        payload_len: usize,
        fill: impl FnOnce(&mut [u8], u32) -> Result<u32, E>,
    ) -> Result<(), EmitError<E>> {
        let begin = self.room.headroom + self.outer_len + self.len;
        let room = self.room.buf.get_mut(begin..).ok_or(EmitError::NoRoom)?;
        let header_len = packet.write_headers(payload_len, room).ok_or(EmitError::NoRoom)?;
        let segment = wire::segment_len(header_len, payload_len);
        if self.len + segment > self.limit {
            return Err(EmitError::NoRoom);
        }
        let body = room.get_mut(..segment).ok_or(EmitError::NoRoom)?;
        let (headers, rest) = body.split_at_mut_checked(header_len).ok_or(EmitError::NoRoom)?;
        let (payload, rest) = rest.split_at_mut_checked(payload_len).ok_or(EmitError::NoRoom)?;
        let start = starts.get(self.flow, DONT_FRAGMENT, segment);
        let crc = start.after(self.room.ids.id(self.segments), headers);
        wire::close(fill(payload, crc).map_err(EmitError::Payload)?, rest);
        if self.segments == 0 {
            self.segment = segment;
        }
        self.segments += 1;
        self.len += segment;
        Ok(())
    }

    /// Whether two segments or more may follow: for fewer a run saves nothing.
    #[inline]
    pub(crate) fn takes_runs(&self) -> bool {
        self.segments + 2 <= self.room.segments_max && self.is_open()
    }

    /// How many segments of `len` bytes, the length of all but the last, have room.
    #[inline]
    fn room_for(&self, len: usize) -> usize {
        if !self.is_open() || (self.segments > 0 && len != self.segment) {
            return 0;
        }
        let bytes = self.limit.saturating_sub(self.len);
        bytes.checked_div(len).map_or(0, |fit| fit.min(self.room.segments_max - self.segments))
    }

    /// Writes a run: `packet` and those that follow it, which differ in nothing but the PSN, `most` at the most and as many
    /// as have room. Their payload is what `from` has, in order. Returns how many were written: none where there can be no
    /// run. `starts` as for [`push`](Self::push).
    pub(crate) fn push_run(
        &mut self,
        starts: &mut IcrcStarts,
        packet: &Packet<'_>,
        payload_len: usize,
        most: usize,
        from: Stretch<'_>,
    ) -> u32 {
        let segment = RunWriter::segment_len(payload_len);
        let most = most.min(self.room_for(segment));
        let begin = self.room.headroom + self.outer_len + self.len;
        let Some(room) = self.room.buf.get_mut(begin..).filter(|_| most > 0) else { return 0 };
        let Some(header) = RunHeader::new(packet, payload_len) else { return 0 };
        let writer = RunWriter::new(header, starts.get(self.flow, DONT_FRAGMENT, segment));
        let mut written = 0;
        for (index, bytes) in room.chunks_exact_mut(segment).take(most).enumerate() {
            let (psn, id) = (packet.psn.plus(written), self.room.ids.id(self.segments + index));
            if !writer.write(psn, id, bytes, |out, crc| from.read_crc(index * payload_len, out, crc)) {
                break;
            }
            written += 1;
        }
        if written > 0 {
            self.segment = segment;
            self.segments += written as usize;
            self.len += segment * written as usize;
        }
        written
    }

    /// The burst, its outer headers written; `None` when nothing was pushed.
    #[inline]
    pub(crate) fn finish(self) -> Option<TxBurst> {
        if self.segments == 0 {
            return None;
        }
        if self.room.medium == Medium::Ip {
            let begin = self.room.headroom;
            let outer = self.room.buf.get_mut(begin..begin + self.outer_len)?;
            wire::write_outer(self.flow, self.room.ids.id(0), self.len, outer)?;
        }
        let Self { outer_len, segment, segments, len, .. } = self;
        Some(TxBurst { flow: *self.flow, len: outer_len + len, segment, segments })
    }
}

/// Writes a burst of one packet.
#[inline]
pub(crate) fn write_packet<E>(
    room: &mut TxRoom<'_>,
    flow: &Flow,
    packet: &Packet<'_>,
    payload_len: usize,
    fill: impl FnOnce(&mut [u8], u32) -> Result<u32, E>,
) -> Result<TxBurst, EmitError<E>> {
    let mut burst = BurstWriter::new(room, flow);
    burst.push(&mut IcrcStarts::default(), packet, payload_len, fill)?;
    burst.finish().ok_or(EmitError::NoRoom)
}
