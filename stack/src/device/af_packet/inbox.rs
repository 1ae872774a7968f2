//! Frames on their way in: the receiving socket, with a ring or without.
//!
//! Owns the order in which frames are taken: that of their arrival, whether they lie in the ring or wait in the socket's
//! queue. Never decides what a frame is for.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use socket2::SockFilter;

use super::{BYTES_A_CALL, ERRORS_PASSED, ReceiveBy, SOCKET_BUFFER, is_gone};
use crate::device::ethernet::EthernetPort;
use crate::device::sys::packet::{BATCH, FRAME_MAX, PacketSocket, RecvBatch};
use crate::device::sys::ring::{RxRing, Slot};
use crate::device::sys::udp::raise_buffers;
use crate::device::{DeviceError, RxSink};
use crate::time::Instant;

/// Looks in a row that found the ring empty, after which the socket is asked for its error: one makes it readable, and only
/// a call takes it away.
const LOOKS_A_CHECK: u32 = 1024;

/// See the module.
pub(super) struct Inbox {
    socket: PacketSocket,
    ring: Option<RxRing>,
    batch: RecvBatch,
    /// Frames of the size of the last ones that a call shall take at once.
    want: usize,
    /// Looks in a row that found the ring empty.
    empty: u32,
    /// Frames that found no room. The system forgets them when it is asked.
    dropped: AtomicU64,
}

impl Inbox {
    /// Hears what `filter` lets through at interface `index`.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn open(index: u32, filter: &[SockFilter], by: ReceiveBy) -> io::Result<Self> {
        let with_ring = match by {
            ReceiveBy::Ring => PacketSocket::ring_receiver(index, filter)?.ok(),
            ReceiveBy::Calls => None,
        };
        let (socket, ring) = match with_ring {
            Some((socket, ring)) => (socket, Some(ring)),
            None => (PacketSocket::receiver(index, filter)?, None),
        };
        raise_buffers(socket.as_fd(), SOCKET_BUFFER);
        Ok(Self { socket, ring, batch: RecvBatch::new(), want: BATCH, empty: 0, dropped: AtomicU64::new(0) })
    }

    pub(super) const fn socket(&self) -> &PacketSocket {
        &self.socket
    }

    pub(super) const fn receives_by(&self) -> ReceiveBy {
        if self.ring.is_some() { ReceiveBy::Ring } else { ReceiveBy::Calls }
    }

    /// Frames that found no room, ever.
    pub(super) fn dropped(&self) -> u64 {
        let new = self.socket.take_drops();
        self.dropped.fetch_add(new, Ordering::Relaxed) + new
    }

    /// Whether a frame lies in the ring.
    pub(super) fn is_ready(&self) -> bool {
        self.ring.as_ref().is_some_and(RxRing::is_ready)
    }

    /// Whether it is certain that no frame waits, and no error of the socket that nobody has taken for long.
    pub(super) fn is_empty(&mut self) -> bool {
        let Some(ring) = &self.ring else { return false };
        if ring.is_ready() || self.empty + 1 >= LOOKS_A_CHECK {
            return false;
        }
        self.empty += 1;
        true
    }

    /// A wait is over: what ended it without a frame must not end the next one.
    pub(super) fn woken(&mut self) {
        self.empty = LOOKS_A_CHECK;
    }

    /// Takes at most `budget` frames to `port`; returns how many `sink` got.
    ///
    /// # Errors
    /// [`DeviceError::Io`]: the interface is gone.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        budget: usize,
        port: &mut EthernetPort,
        sink: &mut RxSink<'_>,
    ) -> Result<usize, DeviceError> {
        // Frames for resolution count too: a flood of them must not keep the caller here.
        let (mut looked, mut handed) = (0, 0);
        while looked < budget {
            let Some(ring) = &mut self.ring else {
                let want = (budget - looked).min(self.want);
                let (got, sunk) = self.call(now, want, port, sink)?;
                (looked, handed) = (looked + got, handed + sunk);
                if got < want {
                    break;
                }
                continue;
            };
            match ring.peek() {
                None => {
                    if looked == 0 {
                        self.found_nothing()?;
                    }
                    break;
                }
                Some(Slot::Frame { bytes, tag, segment }) => {
                    handed += usize::from(port.accept(now, bytes, tag, segment, sink));
                    ring.release(1);
                    looked += 1;
                }
                Some(Slot::Lost) => {
                    port.lose_received();
                    ring.release(1);
                    looked += 1;
                }
                Some(Slot::Queued) => {
                    let want = ring.queued((budget - looked).min(self.want));
                    let (got, sunk) = self.call(now, want, port, sink)?;
                    if got == 0 {
                        port.lose_received();
                    }
                    // A slot without its frame would hold up the others for ever.
                    let slots = got.max(1);
                    if let Some(ring) = &mut self.ring {
                        ring.release(slots);
                    }
                    (looked, handed) = (looked + slots, handed + sunk);
                }
            }
        }
        if looked > 0 {
            self.empty = 0;
        }
        Ok(handed)
    }

    /// Takes at most `want` frames from the socket's queue; returns how many there were and how many `sink` got.
    fn call(
        &mut self,
        now: Instant,
        want: usize,
        port: &mut EthernetPort,
        sink: &mut RxSink<'_>,
    ) -> Result<(usize, usize), DeviceError> {
        let mut passed = 0;
        let got = loop {
            match self.batch.receive(self.socket.as_fd(), want) {
                Ok(got) => break got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok((0, 0)),
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "receiving", source: e }),
                Err(_) if passed < ERRORS_PASSED => passed += 1,
                Err(_) => return Ok((0, 0)),
            }
        };
        let longest = (0..got).filter_map(|i| self.batch.get(i)).map(|(_, frame)| frame.len()).max();
        self.want = (BYTES_A_CALL / longest.unwrap_or(FRAME_MAX).max(1)).clamp(1, BATCH);
        let mut handed = 0;
        for (meta, frame) in (0..got).filter_map(|i| self.batch.get(i)) {
            if meta.truncated {
                port.lose_received();
            } else {
                handed += usize::from(port.accept(now, frame, meta.tag, meta.segment, sink));
            }
        }
        Ok((got, handed))
    }

    /// The ring was empty.
    fn found_nothing(&mut self) -> Result<(), DeviceError> {
        self.empty += 1;
        if self.empty < LOOKS_A_CHECK {
            return Ok(());
        }
        self.empty = 0;
        match self.socket.take_error() {
            Some(source) if is_gone(&source) => Err(DeviceError::Io { action: "receiving", source }),
            _ => Ok(()),
        }
    }
}
