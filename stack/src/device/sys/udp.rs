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

/// Datagrams that one system call moves.
pub(crate) const BATCH: usize = 32;
/// Bytes of the longest datagram that is taken whole: a path MTU of 4096, its headers and its ICRC fit amply.
pub(crate) const DATAGRAM_MAX: usize = 4096 + 256;
/// Where a datagram starts in its page. Copies between buffers whose page offsets differ by less than 32 bytes are 20
/// times slower on some processors, and regions usually start at a page.
const PAGE_OFFSET: usize = 1024;
/// Room for every control message that is asked for or sent: two `int`s and an IPv6 packet info.
const CONTROL_MAX: usize = 128;

/// One datagram's memory.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Slot([u8; 8192]);

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_MAX]);

fn slots() -> Box<[Slot]> {
    vec![Slot([0; 8192]); BATCH].into_boxed_slice()
}

/// What came with a datagram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    /// Bytes received.
    len: usize,
    /// It was longer than [`DATAGRAM_MAX`].
    pub(crate) truncated: bool,
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
    source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    destination: None,
    traffic_class: 0,
    hop_limit: 0,
};

/// Datagrams received.
pub(crate) struct RecvBatch {
    slots: Box<[Slot]>,
    names: Box<[libc::sockaddr_storage; BATCH]>,
    controls: Box<[Control; BATCH]>,
    metas: Box<[Meta; BATCH]>,
}

impl RecvBatch {
    pub(crate) fn new() -> Self {
        // SAFETY: `sockaddr_storage` is plain data for which all zeroes is a value.
        let names = Box::new([unsafe { mem::zeroed() }; BATCH]);
        Self {
            slots: slots(),
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
        // SAFETY: both are plain data (integers and pointers) for which all zeroes is a value.
        let (mut iovs, mut headers): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { mem::zeroed() };
        for (i, (header, iov)) in headers.iter_mut().zip(&mut iovs).enumerate().take(want) {
            iov.iov_base = (&raw mut self.slots[i].0[PAGE_OFFSET]).cast();
            iov.iov_len = DATAGRAM_MAX;
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
            meta.len = (header.msg_len as usize).min(DATAGRAM_MAX);
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
        let bytes = self.slots.get(i)?.0.get(PAGE_OFFSET..PAGE_OFFSET + meta.len)?;
        Some((meta, bytes))
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Receiver.
    pub(crate) to: SocketAddr,
    /// DSCP and ECN, when they differ from the socket's own.
    pub(crate) traffic_class: Option<u8>,
    /// TTL or hop limit, when it differs from the socket's own.
    pub(crate) hop_limit: Option<u8>,
    /// Bytes.
    pub(crate) len: usize,
}

/// Datagrams to send.
pub(crate) struct SendBatch {
    slots: Box<[Slot]>,
    names: Box<[(libc::sockaddr_storage, libc::socklen_t); BATCH]>,
    controls: Box<[(Control, usize); BATCH]>,
    lens: Box<[usize; BATCH]>,
}

impl SendBatch {
    pub(crate) fn new() -> Self {
        // SAFETY: `sockaddr_storage` is plain data for which all zeroes is a value.
        let names = Box::new([unsafe { mem::zeroed() }; BATCH]);
        Self {
            slots: slots(),
            names,
            controls: Box::new([(Control([0; CONTROL_MAX]), 0); BATCH]),
            lens: Box::new([0; BATCH]),
        }
    }

    /// Memory of datagram `i`, [`DATAGRAM_MAX`] bytes.
    pub(crate) fn buffer(&mut self, i: usize) -> &mut [u8] {
        &mut self.slots[i].0[PAGE_OFFSET..PAGE_OFFSET + DATAGRAM_MAX]
    }

    /// Addresses datagram `i`, whose bytes are in its buffer.
    pub(crate) fn address(&mut self, i: usize, target: &Target) {
        self.names[i] = sockaddr(target.to);
        self.lens[i] = target.len.min(DATAGRAM_MAX);
        let (control, used) = &mut self.controls[i];
        *used = 0;
        let (level, class, hops) = match target.to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        for (kind, value) in [(class, target.traffic_class), (hops, target.hop_limit)] {
            if let Some(value) = value {
                *used += put_control(control, *used, level, kind, value.into());
            }
        }
    }

    /// Sends datagrams `range` in order; returns how many the system took.
    ///
    /// # Errors
    /// The system's answer to the first of them; none was sent then.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        let (first, count) = (range.start, range.end.min(BATCH).saturating_sub(range.start));
        // SAFETY: both are plain data (integers and pointers) for which all zeroes is a value.
        let (mut iovs, mut headers): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { mem::zeroed() };
        for (i, (header, iov)) in (first..first + count).zip(headers.iter_mut().zip(&mut iovs)) {
            iov.iov_base = (&raw mut self.slots[i].0[PAGE_OFFSET]).cast();
            iov.iov_len = self.lens[i];
            header.msg_hdr.msg_name = (&raw mut self.names[i].0).cast();
            header.msg_hdr.msg_namelen = self.names[i].1;
            header.msg_hdr.msg_iov = iov;
            header.msg_hdr.msg_iovlen = 1;
            if self.controls[i].1 > 0 {
                header.msg_hdr.msg_control = (&raw mut self.controls[i].0).cast();
                header.msg_hdr.msg_controllen = self.controls[i].1 as _;
            }
        }
        // SAFETY: the first `count` headers name buffers of at least the stated lengths (`address` bounds them) that
        // live as long as `self` and that the system only reads.
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

/// Writes a control message with an `int` at offset `at`; returns the room it takes.
fn put_control(control: &mut Control, at: usize, level: i32, kind: i32, value: libc::c_int) -> usize {
    const INT: u32 = size_of::<libc::c_int>() as u32;
    // SAFETY: pure arithmetic.
    let (space, len) = unsafe { (libc::CMSG_SPACE(INT) as usize, libc::CMSG_LEN(INT)) };
    let Some(place) = control.0.get_mut(at..at + space) else { return 0 };
    let header = place.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: `place` is CMSG_SPACE long: a header and an `int`. It is aligned, because the buffer is and every message
    // takes a multiple of the alignment. All bytes are initialised; no reference to them is alive.
    unsafe {
        (*header).cmsg_len = len as _;
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(value);
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
/// every datagram received its destination, marks and hop limit.
///
/// "Probe" is "don't fragment" that does not believe in the path MTU which the kernel has learned: anyone can forge the
/// ICMP message that it learns from, and a packet cannot be made shorter here anyway.
///
/// # Errors
/// The system's answer.
pub(crate) fn prepare(fd: BorrowedFd<'_>, v6: bool, class: u8, hops: u8) -> io::Result<()> {
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
    // not cover it.
    let _ = set_int(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1);
    Ok(())
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
