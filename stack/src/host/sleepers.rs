//! The threads that sleep until something happens, and which one of them watches the device.
//!
//! Owns the list of sleepers and the watcher's seat. All sleepers but one sleep on a descriptor of their own; the
//! watcher sleeps on the device's as well, so one thread wakes for a packet, not all. Whoever drove wakes those whose
//! CQ has become filled. Never drives.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, MutexGuard, PoisonError};

use super::shared::CqHalf;
use crate::device::sys::poll::{EventFd, Watch, wait_which};
use crate::lock::Mutex;
use crate::time::{Duration, Instant};

/// Longest sleep of a watcher whose device has no descriptor.
const BLIND_SLEEP: Duration = Duration::from_millis(1);

struct Sleeper {
    waker: Arc<EventFd>,
    /// What a program's thread waits for; the progress thread waits for no CQ.
    cq: Option<Arc<CqHalf>>,
    /// It was woken, and has not left yet.
    woken: bool,
}

impl Sleeper {
    fn wake(&mut self) {
        if !core::mem::replace(&mut self.woken, true) {
            self.waker.set();
        }
    }
}

#[derive(Default)]
struct Bed {
    sleepers: Vec<Sleeper>,
    watcher: Option<RawFd>,
}

/// The sleepers of a host.
pub(super) struct Sleepers {
    bed: Mutex<Bed>,
    /// How many there are, so that a driver usually need not lock.
    count: AtomicUsize,
    /// Until when the watcher sleeps, in nanoseconds; 0 when there is none.
    watch_until: AtomicU64,
}

/// Why a sleeper should not sleep at all.
pub(super) struct Reasons<'a> {
    /// When the engine is due, in nanoseconds, kept by whoever drives.
    pub(super) due: &'a AtomicU64,
    /// Prepares the device; says whether something waits there.
    pub(super) arm: &'a dyn Fn() -> bool,
    /// Anything that happened before the sleeper was listed, or while the device was prepared.
    pub(super) awake: &'a dyn Fn() -> bool,
    /// Reads the clock.
    pub(super) now: &'a dyn Fn() -> Instant,
}

impl Sleepers {
    pub(super) fn new() -> Self {
        Self { bed: Mutex::default(), count: AtomicUsize::new(0), watch_until: AtomicU64::new(0) }
    }

    fn bed(&self) -> MutexGuard<'_, Bed> {
        self.bed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until `until`, until somebody wakes `waker`, or, in the watcher's seat, until the device has something or
    /// the engine is due.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn sleep(
        &self,
        waker: &Arc<EventFd>,
        cq: Option<&Arc<CqHalf>>,
        device: Option<RawFd>,
        until: Option<Instant>,
        reasons: &Reasons<'_>,
    ) -> std::io::Result<()> {
        let watching = self.enter(waker, cq);
        // What happened before this fence is seen below; whoever does something after it sees us in the list.
        fence(Ordering::SeqCst);
        let mut until = until.map_or(u64::MAX, Instant::as_nanos);
        if watching {
            until = until.min(reasons.due.load(Ordering::SeqCst));
            self.watch(waker, until);
        }
        let mut result = Ok(false);
        let left = Instant::from_nanos(until).saturating_since((reasons.now)());
        let waits_already = watching && (reasons.arm)();
        if !left.is_zero() && !waits_already && !(reasons.awake)() {
            let mut timeout = (until != u64::MAX).then_some(left);
            let mine = Watch::Readable(waker.as_raw_fd());
            let mut both = [mine, mine];
            match device {
                Some(fd) if watching => both[1] = Watch::Readable(fd),
                None if watching => timeout = Some(timeout.map_or(BLIND_SLEEP, |t| t.min(BLIND_SLEEP))),
                _ => {}
            }
            result = wait_which(&both, timeout).map(|[mine, ..]| mine);
        }
        self.leave(waker);
        // Who is woken after the wait ended finds its waker set the next time, sleeps not at all, and clears it then.
        if result? {
            waker.clear();
        }
        Ok(())
    }

    /// Lists a sleeper; says whether it has the watcher's seat. A program's thread takes it from the progress thread.
    fn enter(&self, waker: &Arc<EventFd>, cq: Option<&Arc<CqHalf>>) -> bool {
        let mut bed = self.bed();
        let own = waker.as_raw_fd();
        let watcher = bed.watcher;
        let progress = watcher.and_then(|fd| bed.find(fd)).filter(|s| s.cq.is_none() && cq.is_some());
        let steals = progress.is_some();
        if let Some(progress) = progress {
            progress.wake();
        }
        bed.sleepers.push(Sleeper { waker: Arc::clone(waker), cq: cq.cloned(), woken: false });
        let watching = bed.watcher.is_none() || steals;
        if watching {
            bed.watcher = Some(own);
            self.watch_until.store(u64::MAX, Ordering::SeqCst);
        }
        self.count.store(bed.sleepers.len(), Ordering::SeqCst);
        watching
    }

    /// Notes until when the watcher sleeps. Who was robbed of the seat since it sat down has nothing to say: it is awake soon,
    /// and the other one sleeps as long as it said.
    fn watch(&self, waker: &Arc<EventFd>, until: u64) {
        if self.bed().watcher == Some(waker.as_raw_fd()) {
            self.watch_until.store(until.max(1), Ordering::SeqCst);
        }
    }

    /// Takes a sleeper off the list. Who leaves the watcher's seat free wakes another to take it.
    fn leave(&self, waker: &Arc<EventFd>) {
        let mut bed = self.bed();
        let own = waker.as_raw_fd();
        bed.sleepers.retain(|s| s.waker.as_raw_fd() != own);
        self.count.store(bed.sleepers.len(), Ordering::SeqCst);
        if bed.watcher.is_some_and(|watcher| watcher != own) {
            return;
        }
        // Free, perhaps since another left: the sleeper that it woke for the seat may be this one, on its way out.
        bed.watcher = None;
        self.watch_until.store(0, Ordering::SeqCst);
        // It finds the seat free when it goes back to sleep.
        let next = bed.sleepers.iter().position(|s| s.cq.is_some()).unwrap_or(0);
        if let Some(next) = bed.sleepers.get_mut(next) {
            next.wake();
        }
    }

    /// To be called after each round: wakes those whose CQ is filled, and the watcher when the engine is due earlier
    /// than it would wake.
    pub(super) fn after_round(&self, due: u64) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let early = due < self.watch_until.load(Ordering::SeqCst);
        let mut bed = self.bed();
        let watcher = bed.watcher;
        for sleeper in &mut bed.sleepers {
            let watches = watcher == Some(sleeper.waker.as_raw_fd());
            if (early && watches) || sleeper.cq.as_ref().is_some_and(|cq| !cq.queue.is_empty() || cq.is_destroyed()) {
                sleeper.wake();
            }
        }
    }

    /// Wakes every sleeper.
    pub(super) fn wake_all(&self) {
        for sleeper in &mut self.bed().sleepers {
            sleeper.wake();
        }
    }
}

impl Bed {
    fn find(&mut self, fd: RawFd) -> Option<&mut Sleeper> {
        self.sleepers.iter_mut().find(|s| s.waker.as_raw_fd() == fd)
    }
}

#[cfg(test)]
mod tests {
    use super::super::halves::Halves;
    use super::super::shared::CqQueue;
    use super::*;
    use crate::ring::{Producer, ring};
    use crate::table::Slab;
    use crate::types::Qpn;
    use crate::verbs::{WcData, WcOpcode, WcStatus, WorkCompletion, kind};

    const NEVER: u64 = u64::MAX;

    fn cq() -> (Arc<CqHalf>, Producer<WorkCompletion>) {
        let (engine, caller) = ring(1);
        let mut slab: Slab<kind::Cq, ()> = Slab::new(1);
        let half = Halves::new().insert(slab.insert(()).unwrap(), CqQueue::new(caller));
        (half, engine)
    }

    fn fill(engine: &mut Producer<WorkCompletion>) {
        let mut slab: Slab<kind::Qp, ()> = Slab::new(1);
        let wc = WorkCompletion {
            wr_id: 1,
            status: WcStatus::Success,
            opcode: WcOpcode::Send,
            vendor_err: 0,
            byte_len: 0,
            data: WcData::None,
            qp: slab.insert(()).unwrap(),
            qp_num: Qpn::from_wire(2),
            src_qp: Qpn::from_wire(0),
            grh: false,
            solicited: false,
        };
        engine.push(wc).unwrap();
    }

    /// Runs `body` while as many threads sleep as there are CQs, the first one in the watcher's seat (no CQ: the
    /// progress thread). Each goes back to sleep until its CQ is filled or `stop` is written.
    fn while_asleep(cqs: &[Option<&Arc<CqHalf>>], body: impl FnOnce(&Sleepers, &EventFd, &AtomicU64, &[AtomicUsize])) {
        let (sleepers, device, due) = (Sleepers::new(), EventFd::new().unwrap(), AtomicU64::new(NEVER));
        let woken: Vec<AtomicUsize> = cqs.iter().map(|_| AtomicUsize::new(0)).collect();
        let stop = AtomicUsize::new(0);
        let asleep = |n: usize| {
            while sleepers.count.load(Ordering::SeqCst) < n {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for (i, (cq, woken)) in cqs.iter().zip(&woken).enumerate() {
                let (sleepers, device, due, stop) = (&sleepers, device.as_raw_fd(), &due, &stop);
                scope.spawn(move || {
                    let waker = Arc::new(EventFd::new().unwrap());
                    let done = || stop.load(Ordering::SeqCst) > 0 || cq.is_some_and(|c| !c.queue.is_empty());
                    let reasons = Reasons { due, arm: &|| false, awake: &done, now: &|| Instant::ZERO };
                    while !done() {
                        sleepers.sleep(&waker, *cq, Some(device), None, &reasons).unwrap();
                        woken.fetch_add(1, Ordering::SeqCst);
                    }
                });
                asleep(i + 1);
            }
            body(&sleepers, &device, &due, &woken);
            stop.store(1, Ordering::SeqCst);
            sleepers.wake_all();
        });
        assert_eq!(sleepers.count.load(Ordering::SeqCst), 0);
        assert_eq!(sleepers.bed().watcher, None);
        assert_eq!(sleepers.watch_until.load(Ordering::SeqCst), 0);
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_filled_cq_wakes_its_sleeper_and_the_seat_is_handed_on() {
        let ((a, mut fill_a), (b, mut fill_b), (c, _keep)) = (cq(), cq(), cq());
        while_asleep(&[Some(&a), Some(&b), Some(&c)], |sleepers, _, _, woken| {
            let seat = || sleepers.bed().watcher;
            let first = seat().unwrap();
            // b's completion is none of the watcher's business, nor of c's.
            fill(&mut fill_b);
            sleepers.after_round(NEVER);
            until(|| sleepers.count.load(Ordering::SeqCst) == 2);
            assert_eq!(seat(), Some(first));
            assert_eq!((woken[0].load(Ordering::SeqCst), woken[2].load(Ordering::SeqCst)), (0, 0));
            // The watcher leaves; c is woken to take its seat.
            fill(&mut fill_a);
            sleepers.after_round(NEVER);
            until(|| sleepers.count.load(Ordering::SeqCst) == 1 && seat().is_some_and(|s| s != first));
        });
    }

    #[test]
    fn a_seat_that_is_handed_to_a_sleeper_on_its_way_out_is_handed_on() {
        let (sleepers, (a, _keep)) = (Sleepers::new(), cq());
        let wakers: Vec<_> = (0..3).map(|_| Arc::new(EventFd::new().unwrap())).collect();
        for waker in &wakers {
            sleepers.enter(waker, Some(&a));
        }
        // One round woke the watcher and the second; the watcher is first to leave, and finds the second in the list.
        sleepers.leave(&wakers[0]);
        assert!(wakers[1].clear());
        // The second has what it waited for and will not sleep again: the third must watch.
        sleepers.leave(&wakers[1]);
        assert!(wakers[2].clear(), "nobody watches the device");
        // While somebody watches, nobody is woken for it.
        sleepers.leave(&wakers[2]);
        assert!(sleepers.enter(&wakers[2], Some(&a)));
        sleepers.enter(&wakers[0], Some(&a));
        sleepers.leave(&wakers[0]);
        assert!(!wakers[2].clear());
        sleepers.leave(&wakers[2]);
    }

    #[test]
    fn the_device_wakes_the_watcher() {
        let ((a, _keep), (b, _keep_too)) = (cq(), cq());
        while_asleep(&[Some(&a), Some(&b)], |_, device, _, woken| {
            device.set();
            until(|| woken[0].load(Ordering::SeqCst) > 0);
            device.clear();
        });
    }

    #[test]
    fn an_earlier_timer_wakes_the_watcher_and_a_later_one_does_not() {
        let (a, _keep) = cq();
        while_asleep(&[Some(&a)], |sleepers, _, due, woken| {
            let at = |nanos: u64| {
                due.store(nanos, Ordering::SeqCst);
                sleepers.after_round(nanos);
            };
            until(|| sleepers.watch_until.load(Ordering::SeqCst) == NEVER);
            at(2_000_000_000_000);
            until(|| sleepers.watch_until.load(Ordering::SeqCst) == 2_000_000_000_000);
            let woken_once = woken[0].load(Ordering::SeqCst);
            at(3_000_000_000_000);
            assert_eq!(woken[0].load(Ordering::SeqCst), woken_once);
            assert_eq!(sleepers.watch_until.load(Ordering::SeqCst), 2_000_000_000_000);
        });
    }

    #[test]
    fn a_thread_of_the_program_takes_the_seat_from_the_progress_thread() {
        let (a, _keep) = cq();
        while_asleep(&[None, Some(&a)], |sleepers, _, _, woken| {
            until(|| woken[0].load(Ordering::SeqCst) == 1);
            until(|| sleepers.count.load(Ordering::SeqCst) == 2);
            let mut bed = sleepers.bed();
            let fd = bed.watcher.unwrap();
            let watcher = bed.find(fd).unwrap();
            assert!(watcher.cq.is_some());
        });
    }

    #[test]
    fn who_was_robbed_of_the_seat_does_not_say_how_long_the_watcher_sleeps() {
        let (a, _keep) = cq();
        let sleepers = Sleepers::new();
        let [progress, program] = [(); 2].map(|()| Arc::new(EventFd::new().unwrap()));
        assert!(sleepers.enter(&progress, None) && sleepers.enter(&program, Some(&a)));
        // The progress thread saw a timer at 5 and was slow to say so. The timer is gone, and the program sleeps for ever.
        sleepers.watch(&program, NEVER);
        sleepers.watch(&progress, 5);
        // Somebody posts, and drives on: an ACK is due at 7.
        sleepers.after_round(7);
        assert!(program.clear(), "the watcher was not told of the timer");
    }
}
