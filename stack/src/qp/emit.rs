//! Writing one packet into a device's room.
//!
//! Owns the order: headers, payload, outer headers, ICRC last, over the bytes as they were written.

use crate::burst::{Medium, TxBurst, TxRoom};
use crate::wire::{self, Flow, IpFields, Packet};

/// DF alone, as RoCEv2 sends it.
const DONT_FRAGMENT: u16 = 0x4000;

/// Why a packet was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmitError<E> {
    /// The room is too small for it: the path MTU exceeds what the device offered.
    NoRoom,
    /// The payload could not be copied.
    Payload(E),
}

/// Writes `packet` with `payload_len` bytes that `fill` copies into place. The payload inside `packet` is not used.
#[inline]
pub(crate) fn write_packet<E>(
    room: &mut TxRoom<'_>,
    flow: &Flow,
    packet: &Packet<'_>,
    payload_len: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<TxBurst, EmitError<E>> {
    let header_len = packet.header_len();
    let segment = wire::segment_len(header_len, payload_len);
    let outer_len = match room.medium {
        Medium::Ip => flow.header_len(),
        Medium::Udp => 0,
    };
    let id = room.ids.id(0);
    let frame = room.buf.get_mut(room.headroom..).ok_or(EmitError::NoRoom)?;
    let (outer, rest) = frame.split_at_mut_checked(outer_len).ok_or(EmitError::NoRoom)?;
    let body = rest.get_mut(..segment).ok_or(EmitError::NoRoom)?;
    packet.write_headers(payload_len, body).ok_or(EmitError::NoRoom)?;
    let payload_end = header_len + payload_len;
    fill(body.get_mut(header_len..payload_end).ok_or(EmitError::NoRoom)?).map_err(EmitError::Payload)?;
    if room.medium == Medium::Ip {
        wire::write_outer(flow, id, segment, outer).ok_or(EmitError::NoRoom)?;
    }
    wire::seal(flow, IpFields { id, flags_fragment: DONT_FRAGMENT }, body, payload_end);
    Ok(TxBurst { flow: *flow, len: outer_len + segment, segment, segments: 1 })
}
