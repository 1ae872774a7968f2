//! One AF_XDP socket: the frames of one receive queue, and, if it shall send, slots to send from.
//!
//! Owns the descriptor, the memory of its frames, the four rings, and the knowledge of which chunks are the kernel's.
//! Decides nothing: what a frame is for is its caller's business.
#![allow(unsafe_code)] // This directory is where system calls are.

use core::ops::Range;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use super::config::XdpStep;
use super::ring::{Consumer, Layout, Producer};
use super::umem::{CHUNK, Umem};
use crate::device::sys::set_int;
use crate::raw::Pages;

/// Chunks that wait for frames, a queue: as many frames of up to 3840 bytes.
const RECEIVE_CHUNKS: u32 = 2048;
/// Slots to send from.
const SEND_SLOTS: u32 = 256;
/// Entries of a completion ring that is not used: the kernel wants one.
const UNUSED_RING: u32 = 64;
/// Bytes that the kernel keeps for itself before each received frame.
const KERNEL_HEADROOM: usize = 256;
/// Bytes of a frame that fit into one buffer, either way.
pub(super) const WHOLE_FRAME_MAX: usize = CHUNK - KERNEL_HEADROOM;
/// Room for what a switch appends to a frame.
const TRAILER_MAX: usize = 64;
/// How often, and how long apart, a queue that is taken is asked for again.
const BUSY_TRIES: usize = 50;
const BUSY_PAUSE: std::time::Duration = std::time::Duration::from_millis(4);
/// Frames that one round of busy polling handles.
const BUSY_BUDGET: libc::c_int = 64;

/// How a socket shall be.
#[derive(Clone, Copy, Debug)]
pub(super) struct SocketConfig {
    /// The interface's number.
    pub(super) interface: u32,
    pub(super) queue: u32,
    pub(super) zero_copy: bool,
    /// Bytes of the longest frame.
    pub(super) frame_max: usize,
    /// Whether it shall send, too.
    pub(super) sends: bool,
    /// Microseconds of busy polling.
    pub(super) busy_poll: Option<u32>,
}

impl SocketConfig {
    /// Whether its longest frame needs several buffers.
    pub(super) const fn several_buffers(&self) -> bool {
        self.frame_max > WHOLE_FRAME_MAX
    }
}

/// A frame, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received<'a> {
    Frame(&'a [u8]),
    /// Longer than any that we asked for.
    TooLong,
}

/// What a call to send did.
#[derive(Debug)]
pub(super) enum Kicked {
    /// The kernel has all, or will take it without being called.
    Done,
    /// The kernel has no room now.
    Full,
    /// The socket is none any more.
    Gone(io::Error),
}

/// Slots to send from.
struct Sender {
    ring: Producer<libc::xdp_desc>,
    completed: Consumer<u64>,
    /// Chunks of a slot.
    chunks: usize,
    /// Slots that are ours; the last is the next to use, as it is the one in the cache.
    free: Vec<usize>,
    /// Chunks of each slot that are the kernel's.
    outstanding: Box<[u16]>,
}

/// See the module.
pub(super) struct XdpSocket {
    fd: OwnedFd,
    umem: Umem,
    /// First receive chunk's offset: the slots to send from lie before it.
    receive_from: usize,
    fill: Producer<u64>,
    received: Consumer<libc::xdp_desc>,
    sender: Option<Sender>,
    frame_max: usize,
    busy: bool,
    /// Buffers of a frame of which the end is missing.
    joined: Vec<u8>,
    too_long: bool,
}

fn failed(step: XdpStep) -> impl FnOnce(io::Error) -> (XdpStep, io::Error) {
    move |e| (step, e)
}

impl XdpSocket {
    /// Opens and binds a socket.
    ///
    /// # Errors
    /// The step that failed, and the system's answer.
    pub(super) fn open(config: &SocketConfig) -> Result<Self, (XdpStep, io::Error)> {
        let fd = socket().map_err(failed(XdpStep::Socket))?;
        let chunks = config.frame_max.div_ceil(CHUNK);
        let slots = if config.sends { SEND_SLOTS as usize } else { 0 };
        let receive_from = slots * chunks * CHUNK;
        let umem = Umem::new(slots * chunks + RECEIVE_CHUNKS as usize).map_err(failed(XdpStep::Memory))?;
        register(fd.as_fd(), &umem).map_err(failed(XdpStep::Memory))?;
        let sent = (SEND_SLOTS * u32::try_from(chunks).unwrap_or(1)).next_power_of_two();
        let rings = Rings::open(fd.as_fd(), config.sends.then_some(sent)).map_err(failed(XdpStep::Rings))?;
        let Rings { mut fill, received, completed, send } = rings;
        for chunk in 0..RECEIVE_CHUNKS as usize {
            fill.push((receive_from + chunk * CHUNK) as u64);
        }
        fill.publish();
        if let Some(time) = config.busy_poll {
            busy_poll(fd.as_fd(), time).map_err(failed(XdpStep::BusyPoll))?;
        }
        bind_patiently(fd.as_fd(), config).map_err(failed(XdpStep::Bind { queue: config.queue }))?;
        let sender = send.map(|ring| Sender {
            ring,
            completed,
            chunks,
            free: (0..slots).rev().collect(),
            outstanding: vec![0; slots].into(),
        });
        let (frame_max, busy) = (config.frame_max, config.busy_poll.is_some());
        let joined = Vec::with_capacity(frame_max + TRAILER_MAX);
        Ok(Self { fd, umem, receive_from, fill, received, sender, frame_max, busy, joined, too_long: false })
    }

    /// Hands at most `want` received frames to `each`; returns how many.
    pub(super) fn receive(&mut self, want: usize, each: &mut dyn FnMut(Received<'_>)) -> usize {
        if self.busy {
            // What it finds is in the ring.
            let _ = self.call_receive();
        }
        let (mut frames, mut buffers) = (0, false);
        while frames < want
            && let Some(desc) = self.received.pop()
        {
            buffers = true;
            let at = usize::try_from(desc.addr).unwrap_or(usize::MAX);
            // SAFETY: the kernel put this buffer into the receive ring, and has it again only from `fill.publish` below on.
            let bytes = unsafe { self.umem.get(at, desc.len as usize) }.unwrap_or_default();
            let more = desc.options & libc::XDP_PKT_CONTD != 0;
            if more || self.too_long || !self.joined.is_empty() {
                if self.joined.len() + bytes.len() > self.frame_max + TRAILER_MAX {
                    self.too_long = true;
                } else {
                    self.joined.extend_from_slice(bytes);
                }
                if !more {
                    each(if self.too_long { Received::TooLong } else { Received::Frame(&self.joined) });
                    self.joined.clear();
                    self.too_long = false;
                    frames += 1;
                }
            } else {
                each(Received::Frame(bytes));
                frames += 1;
            }
            let chunk = at / CHUNK * CHUNK;
            if chunk >= self.receive_from {
                // There are as many entries as chunks.
                self.fill.push(chunk as u64);
            }
        }
        if buffers {
            self.received.release();
            self.fill.publish();
        }
        if self.fill.needs_wakeup() {
            let _ = self.call_receive();
        }
        frames
    }

    /// Whether a frame waits.
    pub(super) fn is_empty(&self) -> bool {
        self.received.is_empty()
    }

    /// The memory of the slot that [`Self::push`] takes next; `None`: all are the kernel's.
    pub(super) fn slot(&mut self) -> Option<&mut [u8]> {
        let sender = self.sender.as_mut()?;
        if sender.free.is_empty() {
            sender.reap();
        }
        let slot = *sender.free.last()?;
        // SAFETY: a slot is in `free` when the kernel has given back all its chunks, and leaves it before it gets them.
        unsafe { self.umem.get_mut(slot * sender.chunks * CHUNK, self.frame_max) }
    }

    /// Makes bytes `range` of the slot that [`Self::slot`] gave a frame to send at the next [`Self::kick`].
    pub(super) fn push(&mut self, range: Range<usize>) {
        let Some(sender) = &mut self.sender else { return };
        let Some(slot) = sender.free.pop() else { return };
        let base = slot * sender.chunks * CHUNK;
        let (mut at, end) = (base + range.start, base + range.end.min(sender.chunks * CHUNK));
        while at < end {
            let to = end.min((at / CHUNK + 1) * CHUNK);
            let options = if to < end { libc::XDP_PKT_CONTD } else { 0 };
            let len = u32::try_from(to - at).unwrap_or(0);
            // There are as many entries as chunks.
            sender.ring.push(libc::xdp_desc { addr: at as u64, len, options });
            if let Some(outstanding) = sender.outstanding.get_mut(slot) {
                *outstanding += 1;
            }
            at = to;
        }
    }

    /// Has the kernel send what was pushed. `lost` counts frames that it took and dropped.
    pub(super) fn kick(&mut self, lost: &mut usize) -> Kicked {
        let Some(sender) = &mut self.sender else { return Kicked::Done };
        sender.ring.publish();
        let mut waiting = sender.ring.waiting();
        while waiting > 0 && sender.ring.needs_wakeup() {
            let rc = send_none(self.fd.as_fd());
            let left = sender.ring.waiting();
            let moved = left != waiting;
            waiting = left;
            sender.reap();
            match rc {
                Ok(()) if moved => {}
                Ok(()) => return Kicked::Full,
                Err(e) => match e.raw_os_error() {
                    // In copy mode: the interface had no room for one frame, which is gone.
                    Some(libc::EBUSY) if moved => *lost += 1,
                    // The kernel sends a few frames a call.
                    Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) if moved => {}
                    Some(libc::ENXIO | libc::EBADF | libc::ENODEV) => return Kicked::Gone(e),
                    // No room; or the interface is down, and the frames stay until it is up.
                    _ => return Kicked::Full,
                },
            }
        }
        Kicked::Done
    }

    /// Frames that the kernel dropped: received ones for which there was no room, and ones to send that it did not like.
    pub(super) fn dropped(&self) -> (u64, u64) {
        statistics(self.fd.as_fd())
            .map_or((0, 0), |s| (s.rx_dropped.saturating_add(s.rx_ring_full), s.tx_invalid_descs))
    }

    pub(super) const fn pages(&self) -> Pages {
        self.umem.pages()
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether the interface was removed. One that is down is still there.
    pub(super) fn is_gone(&self) -> bool {
        self.call_receive().is_err_and(|e| e.raw_os_error() == Some(libc::ENXIO))
    }

    /// Has the kernel look at the fill ring, or poll the queue.
    fn call_receive(&self) -> io::Result<()> {
        // SAFETY: no bytes are asked for, so nothing is written.
        let rc = unsafe { libc::recv(self.fd.as_raw_fd(), core::ptr::null_mut(), 0, libc::MSG_DONTWAIT) };
        if rc >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Sender {
    /// Takes back what the kernel is done with.
    fn reap(&mut self) {
        let mut any = false;
        while let Some(address) = self.completed.pop() {
            any = true;
            let slot = usize::try_from(address).unwrap_or(usize::MAX) / (self.chunks * CHUNK);
            if let Some(outstanding) = self.outstanding.get_mut(slot)
                && *outstanding > 0
            {
                *outstanding -= 1;
                if *outstanding == 0 {
                    self.free.push(slot);
                }
            }
        }
        if any {
            self.completed.release();
        }
    }
}

/// The rings of a socket.
struct Rings {
    fill: Producer<u64>,
    received: Consumer<libc::xdp_desc>,
    completed: Consumer<u64>,
    send: Option<Producer<libc::xdp_desc>>,
}

impl Rings {
    /// `sent`: entries of the ring to send, if there shall be one.
    fn open(fd: BorrowedFd<'_>, sent: Option<u32>) -> io::Result<Self> {
        let completed = sent.unwrap_or(UNUSED_RING);
        for (option, size) in [
            (libc::XDP_UMEM_FILL_RING, RECEIVE_CHUNKS),
            (libc::XDP_UMEM_COMPLETION_RING, completed),
            (libc::XDP_RX_RING, RECEIVE_CHUNKS),
        ] {
            set_size(fd, option, size)?;
        }
        if let Some(size) = sent {
            set_size(fd, libc::XDP_TX_RING, size)?;
        }
        // SAFETY: `xdp_mmap_offsets` is plain data for which all zeroes is a value.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { core::mem::zeroed() };
        // SAFETY: `xdp_mmap_offsets` is what this option writes.
        unsafe { get_option(fd, libc::XDP_MMAP_OFFSETS, &mut offsets) }?;
        let (fill_at, completed_at) = (libc::XDP_UMEM_PGOFF_FILL_RING, libc::XDP_UMEM_PGOFF_COMPLETION_RING);
        Ok(Self {
            fill: Producer::new(fd, place(fill_at)?, layout(&offsets.fr, RECEIVE_CHUNKS))?,
            completed: Consumer::new(fd, place(completed_at)?, layout(&offsets.cr, completed))?,
            received: Consumer::new(fd, libc::XDP_PGOFF_RX_RING, layout(&offsets.rx, RECEIVE_CHUNKS))?,
            send: match sent {
                None => None,
                Some(size) => Some(Producer::new(fd, libc::XDP_PGOFF_TX_RING, layout(&offsets.tx, size))?),
            },
        })
    }
}

fn layout(at: &libc::xdp_ring_offset, size: u32) -> Layout {
    let offset = |v| usize::try_from(v).unwrap_or(usize::MAX);
    let (producer, consumer) = (offset(at.producer), offset(at.consumer));
    Layout { producer, consumer, flags: offset(at.flags), entries: offset(at.desc), size }
}

/// The place of a ring, which a system with offsets of 32 bits cannot name.
fn place(at: libc::c_ulonglong) -> io::Result<libc::off_t> {
    libc::off_t::try_from(at).map_err(|_| io::ErrorKind::Unsupported.into())
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn register(fd: BorrowedFd<'_>, umem: &Umem) -> io::Result<()> {
    let registration =
        libc::xdp_umem_reg_v1 { addr: umem.address(), len: umem.len() as u64, chunk_size: CHUNK as u32, headroom: 0 };
    // SAFETY: the option reads such a structure (the first version of it will do); the memory that it names stays where it
    // is as long as the socket, and is only touched as the rings allow.
    unsafe { set_option(fd, libc::XDP_UMEM_REG, &registration) }
}

fn set_size(fd: BorrowedFd<'_>, option: libc::c_int, size: u32) -> io::Result<()> {
    // SAFETY: these options read one number.
    unsafe { set_option(fd, option, &size) }
}

fn bind(fd: BorrowedFd<'_>, config: &SocketConfig) -> io::Result<()> {
    let copy = if config.zero_copy { libc::XDP_ZEROCOPY } else { libc::XDP_COPY };
    let several = if config.several_buffers() { libc::XDP_USE_SG } else { 0 };
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_USE_NEED_WAKEUP | copy | several,
        sxdp_ifindex: config.interface,
        sxdp_queue_id: config.queue,
        sxdp_shared_umem_fd: 0,
    };
    let len = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The kernel frees a queue a little after its last socket was closed: as when a device is opened again.
fn bind_patiently(fd: BorrowedFd<'_>, config: &SocketConfig) -> io::Result<()> {
    for _ in 0..BUSY_TRIES {
        match bind(fd, config) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => std::thread::sleep(BUSY_PAUSE),
            other => return other,
        }
    }
    bind(fd, config)
}

/// The kernel polls the queue when we ask, for at most `time` microseconds, and leaves it alone otherwise.
fn busy_poll(fd: BorrowedFd<'_>, time: u32) -> io::Result<()> {
    let time = libc::c_int::try_from(time).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, 1)?;
    set_int(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, time)?;
    set_int(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, BUSY_BUDGET)
}

/// Calls the kernel to look at the ring to send.
fn send_none(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no bytes are given, so nothing is read.
    let rc = unsafe { libc::send(fd.as_raw_fd(), core::ptr::null(), 0, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if rc >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn statistics(fd: BorrowedFd<'_>) -> io::Result<libc::xdp_statistics> {
    // SAFETY: `xdp_statistics` is plain data for which all zeroes is a value.
    let mut statistics: libc::xdp_statistics = unsafe { core::mem::zeroed() };
    // SAFETY: `xdp_statistics` is what this option writes.
    unsafe { get_option(fd, libc::XDP_STATISTICS, &mut statistics) }?;
    Ok(statistics)
}

/// Sets a socket option of AF_XDP.
///
/// # Safety
/// `T` is what `option` reads.
unsafe fn set_option<T>(fd: BorrowedFd<'_>, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, (&raw const *value).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads a socket option of AF_XDP. An older kernel leaves what it does not know as it was.
///
/// # Safety
/// `T` is what `option` writes.
unsafe fn get_option<T>(fd: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    let rc = unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, (&raw mut *value).cast(), &raw mut len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
