//! A ring of received frames that a packet socket shares with the kernel (`packet(7)`, `TPACKET_V2`).
//!
//! Owns the mapped memory, and who may touch a slot: its status word says so, it is read before the slot and written after
//! it. Whether a frame waits is one look at memory, and the frame is read where the kernel put it. What is longer than a slot
//! waits, whole, in the socket's queue, and its slot says that it is its turn. Never looks into a frame.
#![allow(unsafe_code)] // Memory that the kernel reads and writes.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::io;
use std::os::fd::AsRawFd as _;

use super::packet::PacketSocket;
use super::set_int;
use crate::device::ethernet::vnet::{VNET_HEADER, segment_of};

/// Bytes of a slot: room for a packet of the largest path MTU, the kernel's header and [`RESERVE`]. No power of two, so that
/// the slots' first bytes do not fall into the same few sets of the processor's caches.
const SLOT: usize = 4608;
/// Bytes that the kernel leaves free before a frame. With them, neither its copy into a slot nor ours out of it is between
/// places of a page that differ by less than 32 bytes, which is slow on some processors: a slot begins at a multiple of 512,
/// what is copied from and to usually a little behind one.
const RESERVE: libc::c_int = 256;
/// Slots of one piece of the kernel's memory.
const SLOTS_PER_BLOCK: usize = 14;
/// Bytes of such a piece.
const BLOCK: usize = 64 << 10;
/// Such pieces.
const BLOCKS: usize = 37;
const SLOTS: usize = BLOCKS * SLOTS_PER_BLOCK;
const LEN: usize = BLOCKS * BLOCK;

const _: () = assert!(SLOTS_PER_BLOCK * SLOT <= BLOCK && SLOT.is_multiple_of(libc::TPACKET_ALIGNMENT));

/// What stands in the next slot.
pub(crate) enum Slot<'a> {
    /// A frame.
    Frame {
        bytes: &'a [u8],
        /// VLAN tag control information that the system took out of it.
        tag: Option<u16>,
        /// UDP payload bytes of each segment, when it is a superframe.
        segment: Option<u16>,
    },
    /// The next frame of the socket's queue is next.
    Queued,
    /// One that was too long, and for which the queue had no room.
    Lost,
}

/// See the module.
pub(crate) struct RxRing {
    start: NonNull<u8>,
    /// The slot that is looked at next.
    next: usize,
}

// SAFETY: the map is the value's own, whichever thread has it; the kernel's side is reached through the status words.
unsafe impl Send for RxRing {}

impl RxRing {
    /// A ring for what `socket` receives from now on: not yet bound, its frames behind virtio headers.
    ///
    /// # Errors
    /// The system's answer: it knows no such ring, or has no memory for it. The socket is of no use then.
    pub(crate) fn new(socket: &PacketSocket) -> io::Result<Self> {
        let request = libc::tpacket_req {
            tp_block_size: BLOCK as libc::c_uint,
            tp_block_nr: BLOCKS as libc::c_uint,
            tp_frame_size: SLOT as libc::c_uint,
            tp_frame_nr: SLOTS as libc::c_uint,
        };
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        for (name, value) in
            [(libc::PACKET_VERSION, version), (libc::PACKET_RESERVE, RESERVE), (libc::PACKET_COPY_THRESH, 1)]
        {
            set_int(socket.as_fd(), libc::SOL_PACKET, name, value)?;
        }
        // SAFETY: the pointer and the length describe `request`, which outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_RX_RING,
                (&raw const request).cast(),
                size_of_val(&request) as libc::socklen_t,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: no address is asked for, so nothing that exists is replaced.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), LEN, access, kind, socket.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, next: 0 })
    }

    fn slot(&self, index: usize) -> NonNull<u8> {
        let at = index / SLOTS_PER_BLOCK % BLOCKS * BLOCK + index % SLOTS_PER_BLOCK * SLOT;
        // SAFETY: the slot begins, and ends, inside the map, whatever the index: see the assertion above.
        unsafe { self.start.add(at) }
    }

    /// The status word of a slot.
    fn status(&self, index: usize) -> &AtomicU32 {
        // SAFETY: the word is the first of a slot, which is aligned to 512 and inside the map; nobody reaches it but through
        // atomics, here and, in effect, in the kernel.
        unsafe { AtomicU32::from_ptr(self.slot(index).as_ptr().cast()) }
    }

    /// Whether a slot is filled. One look at memory.
    pub(crate) fn is_ready(&self) -> bool {
        self.status(self.next).load(Ordering::Acquire) != libc::TP_STATUS_KERNEL
    }

    /// How many of the next slots, `most` at most, say that the socket's queue is next.
    pub(crate) fn queued(&self, most: usize) -> usize {
        let status = |ahead| self.status((self.next + ahead) % SLOTS).load(Ordering::Acquire);
        (0..most.min(SLOTS)).take_while(|&ahead| status(ahead) & libc::TP_STATUS_COPY != 0).count()
    }

    /// What stands in the next slot, if it is filled. The slot is ours until [`Self::release`].
    pub(crate) fn peek(&self) -> Option<Slot<'_>> {
        let status = self.status(self.next).load(Ordering::Acquire);
        if status == libc::TP_STATUS_KERNEL {
            return None;
        }
        if status & libc::TP_STATUS_COPY != 0 {
            return Some(Slot::Queued);
        }
        let slot = self.slot(self.next);
        // SAFETY: a slot begins with this header, plain numbers, and is aligned for it. The kernel wrote all of it before the
        // status that was read, and leaves it alone until it is given the slot back.
        let header = unsafe { slot.cast::<libc::tpacket2_hdr>().read() };
        let (from, len) = (usize::from(header.tp_mac), header.tp_snaplen as usize);
        if header.tp_snaplen < header.tp_len || from < VNET_HEADER || from + len > SLOT {
            return Some(Slot::Lost);
        }
        // SAFETY: the bytes are inside the slot, which is ours: `release` wants `self` for itself.
        let framed = unsafe { core::slice::from_raw_parts(slot.add(from - VNET_HEADER).as_ptr(), VNET_HEADER + len) };
        let (vnet, bytes) = framed.split_first_chunk()?;
        let tag = (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(header.tp_vlan_tci);
        Some(Slot::Frame { bytes, tag, segment: segment_of(vnet) })
    }

    /// Gives the next `slots` back to the kernel; they were filled.
    pub(crate) fn release(&mut self, slots: usize) {
        for _ in 0..slots {
            self.status(self.next).store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = (self.next + 1) % SLOTS;
        }
    }
}

impl Drop for RxRing {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, unmapped once; what pointed into it has borrowed `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), LEN) };
    }
}
