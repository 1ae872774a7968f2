//! UDP sockets in batches: `recvmmsg(2)` and `sendmmsg(2)` with their control messages.
//!
//! Owns the buffers of both directions, allocated once. Never decides where a datagram goes.
#![allow(unsafe_code)] // This directory is where system calls are.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::ops::Range;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use super::{ControlMessages, set_int};
use crate::raw::{PAGE_OFFSET, Piece};

/// Datagrams, or superframes, that one system call moves.
pub(crate) const BATCH: usize = 32;
/// Bytes of the longest datagram that is taken whole: a path MTU of 4096, its headers and its ICRC fit amply.
pub(crate) const DATAGRAM_MAX: usize = 4096 + 256;
/// Bytes of the longest superframe that is sent. With Ethernet, IP and UDP headers it stays below 65,536, beyond which
/// Linux cuts it up before the device (65,494 is the longest over IPv4, 65,474 over IPv6).
pub(crate) const SUPERFRAME_MAX: usize = 65_408;
/// Bytes of the longest superframe that is received: more than a UDP datagram can have.
const RECEIVED_MAX: usize = 1 << 16;
/// A page.
const PAGE: usize = 4096;
/// Room for every control message that is asked for or sent: two `int`s and an IPv6 packet info.
const CONTROL_MAX: usize = 128;

/// Memory of [`BATCH`] datagrams, each at [`PAGE_OFFSET`] of a page. The strides are no powers of two for superframes,
/// so that the slots do not compete for the same lines of a cache.
struct Slots {
    memory: Piece,
    stride: usize,
    room: usize,
}

impl Slots {
    fn new(room: usize) -> Self {
        let stride = (PAGE_OFFSET + room).next_multiple_of(PAGE);
        // Pages of zeroes that the system makes when they are first touched: what only small datagrams use stays small.
        Self { memory: Piece::whole(BATCH * stride), stride, room }
    }

    fn get(&self, i: usize, len: usize) -> Option<&[u8]> {
        let at = PAGE_OFFSET + i * self.stride;
        self.memory.get(at..at + len.min(self.room))
    }

    fn buffer(&mut self, i: usize) -> &mut [u8] {
        let at = PAGE_OFFSET + i * self.stride;
        self.memory.get_mut(at..at + self.room).unwrap_or_default()
    }

    /// Where slot `i` is, for the system: [`Self::room`] bytes for each `i` below [`BATCH`]. All come from one borrow, so
    /// that none ends the life of another.
    fn pointers(&mut self) -> impl Fn(usize) -> *mut u8 + use<> {
        let (base, stride) = (self.memory.as_mut_ptr(), self.stride);
        move |i| base.wrapping_add(PAGE_OFFSET + i * stride)
    }
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_MAX]);

/// What came with a datagram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    /// Bytes received.
    len: usize,
    /// It was longer than its buffer.
    pub(crate) truncated: bool,
    /// Bytes of each segment, of a superframe; the last may be shorter.
    pub(crate) segment: Option<usize>,
    /// Sender.
    pub(crate) source: SocketAddr,
    /// Our address that it was sent to, if the system told.
    pub(crate) destination: Option<IpAddr>,
    /// DSCP and ECN.
    pub(crate) traffic_class: u8,
    /// TTL or hop limit.
    pub(crate) hop_limit: u8,
}

const NO_META: Meta = Meta {
    len: 0,
    truncated: false,
    segment: None,
    source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    destination: None,
    traffic_class: 0,
    hop_limit: 0,
};

/// Datagrams received.
pub(crate) struct RecvBatch {
    slots: Slots,
    names: Box<[libc::sockaddr_storage; BATCH]>,
    controls: Box<[Control; BATCH]>,
    metas: Box<[Meta; BATCH]>,
}

impl RecvBatch {
    /// Buffers for datagrams of up to [`DATAGRAM_MAX`] bytes, or for superframes.
    pub(crate) fn new(superframes: bool) -> Self {
        // SAFETY: `sockaddr_storage` is plain data for which all zeroes is a value.
        let names = Box::new([unsafe { mem::zeroed() }; BATCH]);
        Self {
            slots: Slots::new(if superframes { RECEIVED_MAX } else { DATAGRAM_MAX }),
            names,
            controls: Box::new([Control([0; CONTROL_MAX]); BATCH]),
            metas: Box::new([NO_META; BATCH]),
        }
    }

    /// Receives at most `want` (and [`BATCH`]) waiting datagrams; returns how many. They replace those before.
    ///
    /// # Errors
    /// The system's answer; `WouldBlock` when none waits.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>, want: usize) -> io::Result<usize> {
        let want = want.min(BATCH);
        let (slot, room) = (self.slots.pointers(), self.slots.room);
        // SAFETY: both are plain data (integers and pointers) for which all zeroes is a value.
        let (mut iovs, mut headers): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { mem::zeroed() };
        for (i, (header, iov)) in headers.iter_mut().zip(&mut iovs).enumerate().take(want) {
            (iov.iov_base, iov.iov_len) = (slot(i).cast(), room);
            header.msg_hdr.msg_name = (&raw mut self.names[i]).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_iov = iov;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = (&raw mut self.controls[i]).cast();
            header.msg_hdr.msg_controllen = CONTROL_MAX as _;
        }
        // SAFETY: the headers name buffers of the stated lengths that live as long as `self`, and no reference to any of
        // them is used during the call.
        let got = unsafe { super::receive_many(fd, headers.get_mut(..want).unwrap_or_default()) }?;
        for (i, header) in headers.iter().enumerate().take(got) {
            let mut meta = NO_META;
            meta.len = header.msg_len as usize;
            meta.truncated = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
            // SAFETY: the system has filled in the name and the control messages of the first `got` headers, whose
            // buffers are those set above.
            unsafe {
                read_name(&self.names[i], &mut meta);
                read_controls(ControlMessages::of(&header.msg_hdr), &mut meta);
            }
            self.metas[i] = meta;
        }
        Ok(got)
    }

    /// Datagram `i` of the last [`RecvBatch::receive`].
    pub(crate) fn get(&self, i: usize) -> Option<(&Meta, &[u8])> {
        let meta = self.metas.get(i)?;
        Some((meta, self.slots.get(i, meta.len)?))
    }
}

/// Reads the sender's address.
///
/// # Safety
/// The system wrote an address into `name`, or nothing.
unsafe fn read_name(name: &libc::sockaddr_storage, meta: &mut Meta) {
    let at: *const libc::sockaddr_storage = name;
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a `sockaddr_storage` of this family holds a `sockaddr_in`.
            let a = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from_bits(u32::from_be(a.sin_addr.s_addr));
            meta.source = SocketAddr::new(ip.into(), u16::from_be(a.sin_port));
        }
        libc::AF_INET6 => {
            // SAFETY: a `sockaddr_storage` of this family holds a `sockaddr_in6`.
            let a = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            meta.source = SocketAddr::new(ip.into(), u16::from_be(a.sin6_port));
        }
        _ => {}
    }
}

/// Reads the control messages. One that is shorter than it has to be says nothing.
fn read_controls(messages: ControlMessages<'_>, meta: &mut Meta) {
    for (level, kind, data) in messages {
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                meta.traffic_class = data.first().copied().unwrap_or(meta.traffic_class);
            }
            (libc::IPPROTO_IP, libc::IP_TTL) => meta.hop_limit = low_byte(data).unwrap_or(meta.hop_limit),
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // `in_pktinfo`: the interface, a local address, the destination in the header.
                let octets = data.get(8..12).and_then(|b| <[u8; 4]>::try_from(b).ok());
                meta.destination = octets.map(|b| Ipv4Addr::from(b).into()).or(meta.destination);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                meta.traffic_class = low_byte(data).unwrap_or(meta.traffic_class);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => meta.hop_limit = low_byte(data).unwrap_or(meta.hop_limit),
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // `in6_pktinfo`: the destination, the interface.
                let octets = data.get(..16).and_then(|b| <[u8; 16]>::try_from(b).ok());
                meta.destination = octets.map(|b| Ipv6Addr::from(b).into()).or(meta.destination);
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                let size = data.get(..4).and_then(|b| <[u8; 4]>::try_from(b).ok()).map(libc::c_int::from_ne_bytes);
                meta.segment = size.and_then(|s| usize::try_from(s).ok()).filter(|s| *s > 0);
            }
            _ => {}
        }
    }
}

/// The value of an `int` that is a byte.
fn low_byte(data: &[u8]) -> Option<u8> {
    let value = libc::c_int::from_ne_bytes(data.get(..4)?.try_into().ok()?);
    u8::try_from(value & 0xFF).ok()
}

/// Where a datagram goes and how it is marked.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Receiver.
    pub(crate) to: SocketAddr,
    /// DSCP and ECN, when they differ from the socket's own.
    pub(crate) traffic_class: Option<u8>,
    /// TTL or hop limit, when it differs from the socket's own.
    pub(crate) hop_limit: Option<u8>,
    /// Which bytes of the buffer.
    pub(crate) bytes: Range<usize>,
    /// Bytes of each segment, of a superframe.
    pub(crate) segment: Option<u16>,
}

/// Datagrams to send.
pub(crate) struct SendBatch {
    slots: Slots,
    names: Box<[(libc::sockaddr_storage, libc::socklen_t); BATCH]>,
    controls: Box<[(Control, usize); BATCH]>,
    /// Where each datagram begins in its slot, and its length.
    spans: Box<[(usize, usize); BATCH]>,
}

impl SendBatch {
    /// Buffers for datagrams of up to [`DATAGRAM_MAX`] bytes, or for superframes of up to [`SUPERFRAME_MAX`].
    pub(crate) fn new(superframes: bool) -> Self {
        // SAFETY: `sockaddr_storage` is plain data for which all zeroes is a value.
        let names = Box::new([unsafe { mem::zeroed() }; BATCH]);
        Self {
            slots: Slots::new(if superframes { SUPERFRAME_MAX } else { DATAGRAM_MAX }),
            names,
            controls: Box::new([(Control([0; CONTROL_MAX]), 0); BATCH]),
            spans: Box::new([(0, 0); BATCH]),
        }
    }

    /// Memory of datagram `i`.
    pub(crate) fn buffer(&mut self, i: usize) -> &mut [u8] {
        self.slots.buffer(i)
    }

    /// Addresses datagram `i`, whose bytes are in its buffer.
    pub(crate) fn address(&mut self, i: usize, target: &Target) {
        self.names[i] = sockaddr(target.to);
        let room = self.slots.room;
        let start = target.bytes.start.min(room);
        self.spans[i] = (start, target.bytes.end.min(room).saturating_sub(start));
        let (control, used) = &mut self.controls[i];
        *used = 0;
        let (level, class, hops) = match target.to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        for (kind, value) in [(class, target.traffic_class), (hops, target.hop_limit)] {
            if let Some(value) = value {
                *used += put_control(control, *used, level, kind, &libc::c_int::from(value).to_ne_bytes());
            }
        }
        if let Some(segment) = target.segment {
            *used += put_control(control, *used, libc::SOL_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
        }
    }

    /// Sends datagrams `range` in order; returns how many the system took.
    ///
    /// # Errors
    /// The system's answer to the first of them; none was sent then.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        let (first, count) = (range.start, range.end.min(BATCH).saturating_sub(range.start));
        let slot = self.slots.pointers();
        // SAFETY: both are plain data (integers and pointers) for which all zeroes is a value.
        let (mut iovs, mut headers): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { mem::zeroed() };
        for (i, (header, iov)) in (first..first + count).zip(headers.iter_mut().zip(&mut iovs)) {
            // `address` keeps them inside the slot.
            let (start, len) = self.spans[i];
            (iov.iov_base, iov.iov_len) = (slot(i).wrapping_add(start).cast(), len);
            header.msg_hdr.msg_name = (&raw mut self.names[i].0).cast();
            header.msg_hdr.msg_namelen = self.names[i].1;
            header.msg_hdr.msg_iov = iov;
            header.msg_hdr.msg_iovlen = 1;
            if self.controls[i].1 > 0 {
                header.msg_hdr.msg_control = (&raw mut self.controls[i].0).cast();
                header.msg_hdr.msg_controllen = self.controls[i].1 as _;
            }
        }
        // SAFETY: the first `count` headers name buffers of the stated lengths that live as long as `self` and that the
        // system only reads.
        let rc = unsafe {
            libc::sendmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                count as libc::c_uint,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error())
    }
}

/// Writes a control message at offset `at`; returns the room it takes.
fn put_control(control: &mut Control, at: usize, level: i32, kind: i32, value: &[u8]) -> usize {
    let bytes = value.len() as libc::c_uint;
    // SAFETY: pure arithmetic.
    let (space, len) = unsafe { (libc::CMSG_SPACE(bytes) as usize, libc::CMSG_LEN(bytes)) };
    let Some(place) = control.0.get_mut(at..at + space) else { return 0 };
    let header = place.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: `place` is CMSG_SPACE long: a header and the value. It is aligned, because the buffer is and every message
    // takes a multiple of the alignment. All bytes are initialised; no reference to them is alive.
    unsafe {
        (*header).cmsg_len = len as _;
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        libc::CMSG_DATA(header).copy_from_nonoverlapping(value.as_ptr(), value.len());
    }
    space
}

fn sockaddr(to: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    let to = socket2::SockAddr::from(to);
    let (len, mut storage) = (to.len(), to.as_storage());
    // SAFETY: the storage is a `sockaddr_storage`, initialised as a whole.
    (*unsafe { storage.view_as() }, len)
}

/// Sets what an unprivileged RoCEv2 socket needs: don't fragment (which also makes the IPv4 identification 0), and on
/// every datagram received its destination, marks and hop limit. `superframes` says whether it shall send such.
///
/// "Probe" is "don't fragment" that does not believe in the path MTU which the kernel has learned: anyone can forge the
/// ICMP message that it learns from, and a packet cannot be made shorter here anyway.
///
/// # Errors
/// The system's answer.
pub(crate) fn prepare(fd: BorrowedFd<'_>, v6: bool, class: u8, hops: u8, superframes: bool) -> io::Result<()> {
    use libc::{IPPROTO_IP, IPPROTO_IPV6};
    if v6 {
        set_int(fd, IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
        set_int(fd, IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        set_int(fd, IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        set_int(fd, IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1)?;
        // Linux's rxe, and whoever writes its own headers, sends checksum 0 over IPv6 too, which the system drops otherwise.
        set_int(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
        set_int(fd, IPPROTO_IPV6, libc::IPV6_TCLASS, class.into())?;
        return set_int(fd, IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, hops.into());
    }
    set_int(fd, IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
    set_int(fd, IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    set_int(fd, IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    set_int(fd, IPPROTO_IP, libc::IP_RECVTTL, 1)?;
    set_int(fd, IPPROTO_IP, libc::IP_TOS, class.into())?;
    set_int(fd, IPPROTO_IP, libc::IP_TTL, hops.into())?;
    // RoCEv2 leaves the UDP checksum to the ICRC. Where the system refuses, the checksum is filled in: the ICRC does
    // not cover it. Superframes are not cut up, nor put together again, without a checksum.
    if !superframes {
        let _ = set_int(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1);
    }
    Ok(())
}

/// Whether the system cuts superframes into datagrams (Linux 4.18). One that does not ignores the control message.
pub(crate) fn can_segment(fd: BorrowedFd<'_>) -> bool {
    set_int(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

/// Has datagrams of one flow delivered as superframes (Linux 5.0).
///
/// # Errors
/// The system's answer: it does not know how.
pub(crate) fn receive_superframes(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_int(fd, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Raises the socket buffers to `bytes`, or as near as the process may.
pub(crate) fn raise_buffers(fd: BorrowedFd<'_>, bytes: usize) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        if set_int(fd, libc::SOL_SOCKET, force, bytes).is_err() {
            let _ = set_int(fd, libc::SOL_SOCKET, plain, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a receive makes of one control message.
    fn read(level: i32, kind: i32, value: &[u8]) -> Meta {
        let mut control = Control([0; CONTROL_MAX]);
        let used = put_control(&mut control, 0, level, kind, value);
        assert!(used > 0);
        // SAFETY: plain data for which all zeroes is a value.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = used as _;
        let mut meta = Meta { len: 100, ..NO_META };
        // SAFETY: the control buffer holds one message and outlives the call.
        read_controls(unsafe { ControlMessages::of(&header) }, &mut meta);
        meta
    }

    #[test]
    fn odd_sizes_of_segments_say_nothing() {
        let size = |bytes: &[u8]| read(libc::SOL_UDP, libc::UDP_GRO, bytes).segment;
        assert_eq!(size(&1040i32.to_ne_bytes()), Some(1040));
        assert_eq!(size(&0i32.to_ne_bytes()), None);
        assert_eq!(size(&(-4i32).to_ne_bytes()), None);
        assert_eq!(size(&1040u16.to_ne_bytes()), None);
        assert_eq!(size(&[]), None);
        // Of another protocol.
        assert_eq!(read(libc::IPPROTO_IP, libc::UDP_GRO, &1040i32.to_ne_bytes()).segment, None);
    }

    #[test]
    fn slots_start_where_they_shall_and_do_not_meet() {
        for room in [DATAGRAM_MAX, SUPERFRAME_MAX, RECEIVED_MAX] {
            let mut slots = Slots::new(room);
            for i in 0..BATCH {
                let buffer = slots.buffer(i);
                assert_eq!((buffer.len(), buffer.as_ptr().addr() % PAGE), (room, PAGE_OFFSET));
                assert!(buffer.iter().all(|b| *b == 0));
                buffer.fill(1);
                let at = buffer.as_mut_ptr();
                assert_eq!(slots.pointers()(i), at);
                assert_eq!(slots.get(i, usize::MAX).map(<[u8]>::len), Some(room));
            }
        }
    }
}
