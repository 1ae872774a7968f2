//! The rings under SQ, RQ, SRQ and CQ, each in two halves.
//!
//! Owns bounded single-producer single-consumer queues whose caller's half posts or polls without ever waiting for the
//! engine. Never allocates after creation and never looks at what it carries.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use rtrb::{Consumer, Producer};

/// A plain ring for completions: `capacity` entries.
#[must_use]
pub fn ring<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    rtrb::RingBuffer::new(capacity)
}

/// What a queued work request says of the parts that follow it in the ring.
pub trait WqeHead: Copy {
    /// Scatter/gather elements.
    fn sges(&self) -> usize;
    /// Bytes of inline data.
    fn inline_len(&self) -> usize;
}

/// How large a work queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WqeRingSize {
    /// Work requests outstanding: posted and not yet released.
    pub requests: usize,
    /// Elements of one work request.
    pub sges: usize,
    /// Inline bytes of one work request.
    pub inline: usize,
}

/// The queue has as many outstanding work requests as it was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFull;

/// The caller's half of a work queue.
#[derive(Debug)]
pub struct WqeProducer<H, S> {
    heads: Producer<H>,
    sges: Producer<S>,
    inline: Producer<u8>,
    outstanding: Arc<AtomicUsize>,
    size: WqeRingSize,
}

/// The engine's half of a work queue.
#[derive(Debug)]
pub struct WqeConsumer<H, S> {
    heads: Consumer<H>,
    sges: Consumer<S>,
    inline: Consumer<u8>,
    outstanding: Arc<AtomicUsize>,
    size: WqeRingSize,
}

/// Makes a work queue. Everything it will ever need is allocated here.
#[must_use]
pub fn wqe_ring<H: WqeHead, S: Copy>(size: WqeRingSize) -> (WqeProducer<H, S>, WqeConsumer<H, S>) {
    let (hp, hc) = ring(size.requests);
    let (sp, sc) = ring(size.requests * size.sges);
    let (ip, ic) = ring(size.requests * size.inline);
    let outstanding = Arc::new(AtomicUsize::new(0));
    (
        WqeProducer { heads: hp, sges: sp, inline: ip, outstanding: Arc::clone(&outstanding), size },
        WqeConsumer { heads: hc, sges: sc, inline: ic, outstanding, size },
    )
}

impl<H: WqeHead, S: Copy> WqeProducer<H, S> {
    /// The sizes it was made with.
    #[must_use]
    pub fn size(&self) -> WqeRingSize {
        self.size
    }

    /// Work requests posted and not yet released by the engine.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    /// Queues one work request. `head` must describe `sges` and `inline`, and both must keep to [`Self::size`].
    ///
    /// # Errors
    /// [`RingFull`]; nothing is queued then.
    pub fn push(&mut self, head: H, sges: &[S], inline: &[u8]) -> Result<(), RingFull> {
        debug_assert_eq!((head.sges(), head.inline_len()), (sges.len(), inline.len()));
        if self.outstanding() >= self.size.requests {
            return Err(RingFull);
        }
        // The parts go first: whoever sees the head finds them complete.
        push_all(&mut self.sges, sges)?;
        push_all(&mut self.inline, inline)?;
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        self.heads.push(head).map_err(|_| RingFull)
    }
}

fn push_all<T: Copy>(to: &mut Producer<T>, items: &[T]) -> Result<(), RingFull> {
    if items.is_empty() {
        return Ok(());
    }
    let chunk = to.write_chunk_uninit(items.len()).map_err(|_| RingFull)?;
    chunk.fill_from_iter(items.iter().copied());
    Ok(())
}

impl<H: WqeHead, S: Copy> WqeConsumer<H, S> {
    /// The sizes it was made with.
    #[must_use]
    pub fn size(&self) -> WqeRingSize {
        self.size
    }

    /// Whether a work request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// Work requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads.slots()
    }

    /// Takes the oldest work request and copies its parts to the beginning of `sges` and `inline`. It stays
    /// outstanding until [`Self::release`]. Parts beyond the given room are dropped.
    pub fn pop(&mut self, sges: &mut [S], inline: &mut [u8]) -> Option<H> {
        let head = self.heads.pop().ok()?;
        pop_all(&mut self.sges, head.sges(), sges);
        pop_all(&mut self.inline, head.inline_len(), inline);
        Some(head)
    }

    /// Forgets all work requests, waiting and taken alike. Nobody may post meanwhile.
    pub fn clear(&mut self) {
        drop_all(&mut self.heads);
        drop_all(&mut self.sges);
        drop_all(&mut self.inline);
        self.outstanding.store(0, Ordering::Release);
    }

    /// Gives back the places of `n` finished work requests.
    pub fn release(&mut self, n: usize) {
        self.outstanding.fetch_sub(n, Ordering::AcqRel);
    }
}

fn drop_all<T>(from: &mut Consumer<T>) {
    let waiting = from.slots();
    if waiting > 0
        && let Ok(chunk) = from.read_chunk(waiting)
    {
        chunk.commit_all();
    }
}

fn pop_all<T: Copy>(from: &mut Consumer<T>, n: usize, out: &mut [T]) {
    if n == 0 {
        return;
    }
    if let Ok(chunk) = from.read_chunk(n) {
        for (to, item) in out.iter_mut().zip(chunk) {
            *to = item;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Head(u8, u8, u8);

    impl WqeHead for Head {
        fn sges(&self) -> usize {
            self.1.into()
        }
        fn inline_len(&self) -> usize {
            self.2.into()
        }
    }

    #[test]
    fn parts_travel_with_their_head_and_places_come_back_on_release() {
        let (mut p, mut c) = wqe_ring::<Head, u32>(WqeRingSize { requests: 2, sges: 3, inline: 4 });
        for round in 0..10u8 {
            p.push(Head(round, 3, 0), &[1, 2, u32::from(round)], &[]).unwrap();
            p.push(Head(round, 1, 4), &[7], b"wxyz").unwrap();
            assert_eq!(p.push(Head(0, 0, 0), &[], &[]), Err(RingFull));
            let (mut s, mut i) = ([0; 3], [0; 4]);
            assert_eq!(c.pop(&mut s, &mut i), Some(Head(round, 3, 0)));
            assert_eq!(s, [1, 2, u32::from(round)]);
            // Taken is not finished: the place is still held.
            assert_eq!(p.push(Head(0, 0, 0), &[], &[]), Err(RingFull));
            assert_eq!(c.pop(&mut s, &mut i), Some(Head(round, 1, 4)));
            assert_eq!((s[0], &i), (7, b"wxyz"));
            assert_eq!(c.pop(&mut s, &mut i), None);
            c.release(2);
        }
    }

    #[test]
    fn a_cleared_queue_is_as_a_new_one() {
        let (mut p, mut c) = wqe_ring::<Head, u32>(WqeRingSize { requests: 2, sges: 2, inline: 4 });
        p.push(Head(0, 2, 4), &[1, 2], b"wxyz").unwrap();
        p.push(Head(1, 1, 0), &[3], &[]).unwrap();
        // One is in flight, one waits.
        let (mut s, mut i) = ([0; 2], [0; 4]);
        c.pop(&mut s, &mut i).unwrap();
        c.clear();
        assert_eq!((p.outstanding(), c.len(), c.is_empty()), (0, 0, true));
        for n in [5, 6] {
            p.push(Head(n, 2, 4), &[7, u32::from(n)], b"abcd").unwrap();
        }
        for n in [5, 6] {
            assert_eq!(c.pop(&mut s, &mut i), Some(Head(n, 2, 4)));
            assert_eq!((s, &i), ([7, u32::from(n)], b"abcd"));
        }
    }
}
