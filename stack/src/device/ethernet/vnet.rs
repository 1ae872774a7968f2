//! The virtio network header, which stands before a frame where the system takes or gives superframes.
//!
//! Owns its layout, what a superframe's own headers must say, and how one is taken apart where the system does not do it.
//! Makes no system call.

use crate::burst::IdRule;
use crate::wire::{parse_ethernet, write_outer};

/// Bytes of the header (linux/virtio_net.h): flags, type of segmentation, length of the frame's headers, bytes of a segment,
/// where a checksum begins and where it goes. The fields are in the byte order of the machine.
pub(in crate::device) const VNET_HEADER: usize = 10;
/// The header of a frame that is one packet.
pub(in crate::device) const PLAIN: [u8; VNET_HEADER] = [0; VNET_HEADER];

/// Segments that the system makes of one superframe at most: 64 until Linux 6.9, then 128.
pub const SEGMENTS_LIMIT: usize = 128;

const NEEDS_CHECKSUM: u8 = 1;
const UDP_SEGMENTS: u8 = 5;
const ECN: u8 = 0x80;
/// Bytes of a UDP header, and where its checksum is.
const UDP: usize = 8;
const CHECKSUM: usize = 6;
const IPV4: usize = 20;
const IPV6: usize = 40;
const PROTOCOL_UDP: u32 = 17;

/// UDP payload bytes of each segment, when the frame behind `header` is a superframe.
pub(in crate::device) fn segment_of(header: &[u8; VNET_HEADER]) -> Option<u16> {
    let size = u16::from_ne_bytes([header[4], header[5]]);
    (header[1] & !ECN == UDP_SEGMENTS && size > 0).then_some(size)
}

/// Makes `frame` a superframe of segments with `segment` bytes of UDP payload and returns its header. `ip` is where the IP
/// header begins. Its lengths are already those of the whole; its UDP checksum becomes the sum of the pseudo header, which
/// the system completes for every segment. `None` when it is no UDP frame.
pub(in crate::device) fn superframe(frame: &mut [u8], ip: usize, segment: usize) -> Option<[u8; VNET_HEADER]> {
    let (addresses, udp) = match frame.get(ip)? >> 4 {
        4 => (ip + 12..ip + 20, ip + IPV4),
        _ => (ip + 8..ip + 40, ip + IPV6),
    };
    let length = frame.get(udp + 4..udp + CHECKSUM)?.first_chunk::<2>()?;
    let words = frame.get(addresses)?.as_chunks::<2>().0.iter().chain([length]);
    let sum = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>() + PROTOCOL_UDP;
    let sum = (sum & 0xFFFF) + (sum >> 16);
    let sum = u16::try_from((sum & 0xFFFF) + (sum >> 16)).ok()?;
    frame.get_mut(udp + CHECKSUM..udp + UDP)?.copy_from_slice(&sum.to_be_bytes());
    let mut header = [0; VNET_HEADER];
    header[0] = NEEDS_CHECKSUM;
    header[1] = UDP_SEGMENTS;
    for (at, value) in [(2, udp + UDP), (4, segment), (6, udp), (8, CHECKSUM)] {
        header.get_mut(at..at + 2)?.copy_from_slice(&u16::try_from(value).ok()?.to_ne_bytes());
    }
    Some(header)
}

/// Writes segment `index` of the superframe behind `header` to `out`, as a frame of its own behind a header of its own:
/// with its own lengths and, over IPv4, identification id + `index`. `None`: there is no such segment.
pub(in crate::device) fn write_segment(
    header: &[u8; VNET_HEADER],
    frame: &[u8],
    index: usize,
    out: &mut Vec<u8>,
) -> Option<()> {
    let parsed = parse_ethernet(frame).ok()?;
    let payload = parsed.payload.chunks(usize::from(segment_of(header)?)).nth(index)?;
    let udp = usize::from(u16::from_ne_bytes([header[6], header[7]]));
    let ip = VNET_HEADER + (udp + UDP).checked_sub(parsed.flow.header_len())?;
    out.clear();
    out.extend_from_slice(&PLAIN);
    out.extend_from_slice(frame.get(..ip - VNET_HEADER)?);
    out.resize(ip + parsed.flow.header_len(), 0);
    let id = IdRule::From(parsed.ip.id).id(index);
    write_outer(&parsed.flow, id, payload.len(), out.get_mut(ip..)?)?;
    out.extend_from_slice(payload);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::flow;
    use crate::types::MacAddr;
    use crate::wire::{Flow, VlanTag, write_ethernet};

    #[test]
    fn a_superframe_says_what_its_segments_are() {
        // The sums of the pseudo headers, by hand: addresses, protocol 17, UDP length 308.
        let v4: u16 = 0x0A00 + 1 + 0x0A00 + 2 + 17 + 308;
        let v6: u16 = 0xFA01 + 1 + 2 + 17 + 308; // 0xFD00 twice is 0x1FA00
        for (src, dst, ip_len, sum) in [("10.0.0.1", "10.0.0.2", 20, v4), ("fd00::1", "fd00::2", 40, v6)] {
            let mut frame = vec![0; 14 + 48 + 300];
            write_outer(&flow(src, dst), 7, 300, &mut frame[14..]).unwrap();
            let header = superframe(&mut frame, 14, 128).unwrap();
            let udp = 14 + ip_len;
            assert_eq!(frame[udp + 6..udp + 8], sum.to_be_bytes(), "{src}");
            let fields: Vec<u16> = header[2..].chunks(2).map(|f| u16::from_ne_bytes([f[0], f[1]])).collect();
            assert_eq!((header[0], header[1]), (1, 5));
            assert_eq!(fields, [udp as u16 + 8, 128, udp as u16, 6]);
            assert_eq!(segment_of(&header), Some(128));
        }
    }

    #[test]
    fn a_superframe_that_is_taken_apart_gives_the_frames_that_it_stands_for() {
        let tag = VlanTag { id: 7, priority: 3 };
        for (vlan, src, dst) in [
            (None, "10.0.0.1", "10.0.0.2"),
            (None, "fd00::1", "fd00::2"),
            (Some(tag), "10.0.0.1", "10.0.0.2"),
            (Some(tag), "fd00::1", "fd00::2"),
        ] {
            let payload: Vec<u8> = (0..1000u32).map(|i| (i / 300) as u8).collect();
            let f = Flow { vlan, ..flow(src, dst) };
            let mut frame = vec![0; 18 + 48];
            let (to, from) = (MacAddr([2; 6]), MacAddr([4; 6]));
            let ethernet = write_ethernet(to, from, vlan, f.dst.is_ipv4(), &mut frame).unwrap();
            let outer = write_outer(&f, 0xFFFE, payload.len(), &mut frame[ethernet..]).unwrap();
            frame.truncate(ethernet + outer);
            frame.extend(&payload);
            let header = superframe(&mut frame, ethernet, 300).unwrap();
            let mut out = Vec::new();
            for (index, bytes) in payload.chunks(300).enumerate() {
                write_segment(&header, &frame, index, &mut out).unwrap();
                assert_eq!(out[..VNET_HEADER], PLAIN);
                let parsed = parse_ethernet(&out[VNET_HEADER..]).unwrap();
                assert_eq!((parsed.dst_mac, parsed.src_mac, parsed.payload), (to, from, bytes));
                assert_eq!(parsed.flow, f);
                let id = [0xFFFE, 0xFFFF, 0, 1][index];
                assert_eq!(parsed.ip.id, if f.dst.is_ipv4() { id } else { 0 });
            }
            assert_eq!(write_segment(&header, &frame, 4, &mut out), None);
            assert_eq!(write_segment(&PLAIN, &frame, 0, &mut out), None);
        }
    }

    #[test]
    fn a_plain_frame_has_no_segments_and_a_short_one_is_none() {
        assert_eq!(segment_of(&PLAIN), None);
        assert_eq!(segment_of(&[0, 1, 0, 0, 0, 1, 0, 0, 0, 0]), None, "TCP");
        assert_eq!(segment_of(&[1, 0x85, 0, 0, 1, 1, 0, 0, 0, 0]), Some(0x101), "UDP with marks");
        assert_eq!(superframe(&mut [0x45; 30], 14, 128), None);
    }
}
