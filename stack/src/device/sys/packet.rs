//! Packet sockets in batches: `recvmmsg(2)` and `sendmmsg(2)` on whole Ethernet frames.
//!
//! Owns the frame buffers of both directions, allocated once. Never looks into a frame.
#![allow(unsafe_code)] // This directory is where system calls are.

use core::ops::Range;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, RawFd};

use socket2::{Domain, SockFilter, Socket, Type};

use super::ring::RxRing;
use super::{ControlMessages, set_int};
use crate::device::ethernet::vnet::{VNET_HEADER, segment_of};
use crate::raw::Piece;
use crate::types::MacAddr;

/// Frames that one system call moves.
pub(crate) const BATCH: usize = 32;
/// Bytes of the longest frame that is taken whole: a superframe of 65,535 bytes with its Ethernet header.
pub(crate) const FRAME_MAX: usize = 65_535 + 18;
/// The system's constants, in the width that its structures want.
const EVERY_PROTOCOL: u16 = libc::ETH_P_ALL as u16;
const PROMISCUOUS: u16 = libc::PACKET_MR_PROMISC as u16;
const GROUP: u16 = libc::PACKET_MR_MULTICAST as u16;
const CONTROL_MAX: usize = 64;

/// A packet socket of one interface.
pub(crate) struct PacketSocket(Socket);

impl PacketSocket {
    /// A socket that receives what `filter` lets through of the frames that arrive at interface `index`, with their VLAN
    /// tags and segment sizes.
    ///
    /// # Errors
    /// The system's answer; `PermissionDenied` without `cap_net_raw`.
    pub(crate) fn receiver(index: u32, filter: &[SockFilter]) -> io::Result<Self> {
        let socket = Self::deaf(filter)?;
        socket.bind(index, EVERY_PROTOCOL)?;
        Ok(socket)
    }

    /// The same with a ring, in which the frames arrive.
    ///
    /// # Errors
    /// The system's answer; what it says to the ring alone, apart: a socket without one may still do.
    pub(crate) fn ring_receiver(index: u32, filter: &[SockFilter]) -> io::Result<Result<(Self, RxRing), io::Error>> {
        let socket = Self::deaf(filter)?;
        let ring = match RxRing::new(&socket) {
            Ok(ring) => ring,
            Err(e) => return Ok(Err(e)),
        };
        socket.bind(index, EVERY_PROTOCOL)?;
        Ok(Ok((socket, ring)))
    }

    /// A receiver that hears nothing yet.
    fn deaf(filter: &[SockFilter]) -> io::Result<Self> {
        let socket = Self::filtered(filter)?;
        set_int(socket.as_fd(), libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
        socket.frame_headers()?;
        Ok(socket)
    }

    /// A socket that has the filter and hears nothing yet: for one who binds it.
    ///
    /// # Errors
    /// As [`Self::receiver`].
    pub(crate) fn filtered(filter: &[SockFilter]) -> io::Result<Self> {
        // Protocol 0 hears nothing, so nothing gets in before the filter.
        let socket = Self(Socket::new(Domain::PACKET, Type::RAW, None)?);
        socket.0.set_nonblocking(true)?;
        socket.0.attach_filter(filter)?;
        // Linux 4.20; the filter drops them too, this is sooner.
        let _ = set_int(socket.0.as_fd(), libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1);
        Ok(socket)
    }

    /// A socket that only sends, from interface `index`: frames, or superframes behind their virtio headers.
    ///
    /// # Errors
    /// As [`Self::receiver`].
    pub(crate) fn sender(index: u32, superframes: bool) -> io::Result<Self> {
        let socket = Self(Socket::new(Domain::PACKET, Type::RAW, None)?);
        socket.0.set_nonblocking(true)?;
        if superframes {
            socket.frame_headers()?;
        }
        socket.bind(index, 0)?;
        Ok(socket)
    }

    /// From now on each frame, either way, is behind a virtio header.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn frame_headers(&self) -> io::Result<()> {
        set_int(self.as_fd(), libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)
    }

    /// Lets frames to any MAC up, until the socket closes.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn promiscuous(&self, index: u32) -> io::Result<()> {
        self.join(index, PROMISCUOUS, None)
    }

    /// Lets frames to a group MAC up, until the socket closes.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn join_group(&self, index: u32, group: MacAddr) -> io::Result<()> {
        self.join(index, GROUP, Some(group))
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.0.send_with_flags(frame, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).map(|_| ())
    }

    /// The error that the system keeps for the next call, which is then gone. While there is one, the socket is readable.
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        self.0.take_error().ok().flatten()
    }

    /// Frames that passed the filter and found no room, since the last call.
    pub(crate) fn take_drops(&self) -> u64 {
        let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut len = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: the pointers and the length describe `stats` and `len`, which outlive the call.
        let rc = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &raw mut len,
            )
        };
        if rc == 0 { stats.tp_drops.into() } else { 0 }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Gives the descriptor away; who takes it closes it.
    #[cfg(feature = "pnet")]
    pub(crate) fn into_raw_fd(self) -> RawFd {
        use std::os::fd::IntoRawFd as _;
        self.0.into_raw_fd()
    }

    fn bind(&self, index: u32, protocol: u16) -> io::Result<()> {
        // SAFETY: `sockaddr_ll` is plain data for which all zeroes is a value.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as libc::sa_family_t;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = index.cast_signed();
        // SAFETY: the pointer and the length describe `address`, which outlives the call.
        let rc = unsafe {
            libc::bind(
                self.0.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn join(&self, index: u32, kind: u16, group: Option<MacAddr>) -> io::Result<()> {
        // SAFETY: `packet_mreq` is plain data for which all zeroes is a value.
        let mut request: libc::packet_mreq = unsafe { mem::zeroed() };
        request.mr_ifindex = index.cast_signed();
        request.mr_type = kind;
        if let Some(MacAddr(group)) = group {
            request.mr_alen = 6;
            request.mr_address[..6].copy_from_slice(&group);
        }
        // SAFETY: the pointer and the length describe `request`, which outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                size_of::<libc::packet_mreq>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What came with a frame.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meta {
    len: usize,
    /// It was longer than [`FRAME_MAX`], or the socket's own data did not fit.
    pub(crate) truncated: bool,
    /// VLAN tag control information that the system took out of the frame.
    pub(crate) tag: Option<u16>,
    /// UDP payload bytes of each segment, when the frame is a superframe.
    pub(crate) segment: Option<u16>,
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_MAX]);

/// Frames received.
pub(crate) struct RecvBatch {
    slots: Vec<Piece>,
    vnet: Box<[[u8; VNET_HEADER]; BATCH]>,
    controls: Box<[Control; BATCH]>,
    metas: [Meta; BATCH],
}

impl RecvBatch {
    pub(crate) fn new() -> Self {
        Self {
            slots: Piece::many(BATCH, FRAME_MAX),
            vnet: Box::new([[0; VNET_HEADER]; BATCH]),
            controls: Box::new([Control([0; CONTROL_MAX]); BATCH]),
            metas: [Meta::default(); BATCH],
        }
    }

    /// Receives at most `want` (and [`BATCH`]) waiting frames from a [`PacketSocket::receiver`]; returns how many. They
    /// replace those before.
    ///
    /// # Errors
    /// The system's answer; `WouldBlock` when none waits.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>, want: usize) -> io::Result<usize> {
        let want = want.min(BATCH);
        // SAFETY: both are plain data (integers and pointers) for which all zeroes is a value.
        let (mut iovs, mut headers): ([[libc::iovec; 2]; BATCH], [libc::mmsghdr; BATCH]) = unsafe { mem::zeroed() };
        for (i, (header, pair)) in headers.iter_mut().zip(&mut iovs).enumerate().take(want) {
            let [vnet, frame] = pair;
            vnet.iov_base = (&raw mut self.vnet[i]).cast();
            vnet.iov_len = VNET_HEADER;
            frame.iov_base = self.slots[i].as_mut_ptr().cast();
            frame.iov_len = FRAME_MAX;
            header.msg_hdr.msg_iov = pair.as_mut_ptr();
            header.msg_hdr.msg_iovlen = 2;
            header.msg_hdr.msg_control = (&raw mut self.controls[i]).cast();
            header.msg_hdr.msg_controllen = CONTROL_MAX as _;
        }
        // SAFETY: the headers name buffers of the stated lengths that live as long as `self` (the iovecs: as this call), and
        // no reference to any of them is used during the call.
        let got = unsafe { super::receive_many(fd, headers.get_mut(..want).unwrap_or_default()) }?;
        for (i, header) in headers.iter().enumerate().take(got) {
            let len = (header.msg_len as usize).saturating_sub(VNET_HEADER).min(FRAME_MAX);
            let truncated = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
            // SAFETY: the system has filled in the control messages of the first `got` headers.
            let tag = tag(unsafe { ControlMessages::of(&header.msg_hdr) });
            self.metas[i] = Meta { len, truncated, tag, segment: segment_of(&self.vnet[i]) };
        }
        Ok(got)
    }

    /// Frame `i` of the last [`Self::receive`].
    pub(crate) fn get(&self, i: usize) -> Option<(Meta, &[u8])> {
        let meta = *self.metas.get(i)?;
        Some((meta, self.slots.get(i)?.get(..meta.len)?))
    }
}

/// The VLAN tag among the control messages: `tpacket_auxdata` has its status first and the tag at byte 16.
fn tag(mut messages: ControlMessages<'_>) -> Option<u16> {
    let (_, _, aux) = messages.find(|m| (m.0, m.1) == (libc::SOL_PACKET, libc::PACKET_AUXDATA))?;
    let status = u32::from_ne_bytes(aux.get(..4)?.try_into().ok()?);
    let tag = u16::from_ne_bytes(aux.get(16..18)?.try_into().ok()?);
    (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(tag)
}

/// Frames to send, each behind its virtio header.
pub(crate) struct SendBatch {
    slots: Vec<Piece>,
    ranges: [(usize, usize); BATCH],
    superframes: [bool; BATCH],
}

impl SendBatch {
    /// Buffers of `len` bytes.
    pub(crate) fn new(len: usize) -> Self {
        Self { slots: Piece::many(BATCH, len), ranges: [(0, 0); BATCH], superframes: [false; BATCH] }
    }

    /// Memory of frame `i`.
    pub(crate) fn buffer(&mut self, i: usize) -> &mut [u8] {
        &mut self.slots[i]
    }

    /// Says which bytes of its buffer are frame `i`, its header included.
    pub(crate) fn set(&mut self, i: usize, range: Range<usize>) {
        let end = range.end.min(self.slots[i].len());
        self.ranges[i] = (range.start.min(end), end);
        let header = self.get(i).first_chunk().and_then(segment_of);
        self.superframes[i] = header.is_some();
    }

    /// Frame `i`, its header included.
    pub(crate) fn get(&self, i: usize) -> &[u8] {
        let (from, to) = self.ranges[i];
        &self.slots[i][from..to]
    }

    /// How many of the frames `range`, from the first on, are all frames or all superframes; and whether the latter.
    pub(crate) fn alike(&self, range: Range<usize>) -> (usize, bool) {
        let mut kinds = self.superframes[range].iter();
        let Some(&first) = kinds.next() else { return (0, false) };
        (1 + kinds.take_while(|&&kind| kind == first).count(), first)
    }

    /// Sends frames `range`, which are alike, in order through a [`PacketSocket::sender`] of their kind; returns how many the
    /// system took.
    ///
    /// # Errors
    /// The system's answer to the first of them; none was sent then.
    pub(crate) fn send(&self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        let range = range.start..range.end.min(BATCH);
        if range.len() == 1 {
            return self.send_one(fd, range.start).map(|()| 1);
        }
        // Only what is used is written: zeroing all of it would take longer than the call's own work on a frame.
        let mut iovs = [const { MaybeUninit::<libc::iovec>::uninit() }; BATCH];
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH];
        let mut count = 0;
        for (i, (header, iov)) in range.zip(headers.iter_mut().zip(&mut iovs)) {
            let frame = self.on_the_wire(i);
            let base = frame.as_ptr().cast_mut().cast();
            // SAFETY: plain data (integers and pointers) for which all zeroes is a value.
            let header = header.write(unsafe { mem::zeroed() });
            header.msg_hdr.msg_iov = iov.write(libc::iovec { iov_base: base, iov_len: frame.len() });
            header.msg_hdr.msg_iovlen = 1;
            count += 1;
        }
        // SAFETY: the first `count` headers are written and name buffers of the stated lengths that live as long as `self`
        // (the iovecs: as this call) and that the system only reads.
        let rc = unsafe {
            libc::sendmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr().cast(),
                count,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error())
    }

    /// Sends frame `i`: the call for one takes less than that for many does with one.
    fn send_one(&self, fd: BorrowedFd<'_>, i: usize) -> io::Result<()> {
        let frame = self.on_the_wire(i);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the pointer and the length are those of `frame`, which the system only reads.
        let rc = unsafe { libc::send(fd.as_raw_fd(), frame.as_ptr().cast(), frame.len(), flags) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// What the socket is given of frame `i`: a superframe with its header, a frame without.
    fn on_the_wire(&self, i: usize) -> &[u8] {
        let framed = self.get(i);
        if self.superframes[i] { framed } else { framed.get(VNET_HEADER..).unwrap_or_default() }
    }
}
