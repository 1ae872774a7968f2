//! What all handles of a host share, and how the engine is driven.
//!
//! Owns the engine's lock, the doorbells, the callers' halves and the events. One thread drives at a time; the lock is
//! tried, never waited for, except by control verbs. Never sleeps while it holds the lock.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError, TryLockError};

use crossbeam::queue::ArrayQueue;

use super::halves::{Half, Halves};
use super::sleepers::{Reasons, Sleepers};
use crate::device::sys::poll::EventFd;
use crate::device::{Device, DeviceError};
use crate::engine::{Engine, MonotonicClock};
use crate::lock::Mutex;
use crate::qp::Poster;
use crate::ring::Consumer;
use crate::srq::RecvProducer;
use crate::time::{Clock as _, Duration, Instant};
use crate::verbs::{AsyncEvent, CqHandle, QpHandle, SrqHandle, Verbs as _, WorkCompletion, kind};

/// QPs that may have rung and wait for a driver; whoever rings one more waits for the engine's lock instead.
const DOORBELLS: usize = 1024;
/// Events that wait for a program, and beyond these one for each CQ; a program that lets so many wait reads none.
const EVENTS_MAX: usize = 4096;

/// Looks at the device in one call that finds nothing.
const LOOKS_A_CALL: usize = 8;
/// How long who only looks tries not to be in the way.
const LOOK_FOR: Duration = Duration::from_millis(10);
/// How often it tries meanwhile.
const LOOKS: u32 = 100;

/// An engine over any device.
pub type HostEngine = Engine<Box<dyn Device>>;

pub(super) struct QpQueue {
    pub(super) poster: Mutex<Poster>,
    /// Rung and not yet served.
    rung: AtomicBool,
}

pub(super) struct CqQueue {
    ring: Mutex<Consumer<WorkCompletion>>,
    /// The program asked for a notification and has not had it.
    armed: AtomicBool,
    /// Made when a program first asks for it.
    pub(super) descriptor: OnceLock<EventFd>,
}

impl CqQueue {
    pub(super) fn ring(&self) -> MutexGuard<'_, Consumer<WorkCompletion>> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ring().is_empty()
    }
}

pub(super) type QpHalf = Half<kind::Qp, QpQueue>;
pub(super) type CqHalf = Half<kind::Cq, CqQueue>;
pub(super) type SrqHalf = Half<kind::Srq, Mutex<RecvProducer>>;

/// Who drives: the progress thread must tell its own rounds from the program's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Driver {
    /// One that spins for a while, or makes a control call.
    Program,
    /// One that spins: it comes back at once, so an ACK can wait until it has heard what there is to acknowledge.
    Spinner,
    /// One that sleeps at once: an ACK wakes a peer that sleeps too, while this one makes its answer.
    Sleeper,
    /// A thread of the program that posted: it sends, and does not look at what arrived.
    Poster,
    /// A control call, before it changes anything: it sends what a spinner left.
    Settler,
    Progress,
}

impl Driver {
    /// A thread of the program that polls or waits.
    const fn waits(self) -> bool {
        matches!(self, Self::Program | Self::Spinner | Self::Sleeper)
    }
}

/// What came of an attempt to drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drive {
    /// Another thread drives, or waits to make a control call.
    Busy,
    /// It was certain, at this time, that a round would do nothing.
    Idle(Instant),
    /// This many bursts moved.
    Moved(usize),
}

pub(super) struct Shared {
    engine: Mutex<HostEngine>,
    /// Threads that wait for the lock: drivers make way.
    control: AtomicUsize,
    doorbells: ArrayQueue<Arc<QpHalf>>,
    pub(super) qps: Halves<kind::Qp, QpQueue>,
    pub(super) cqs: Halves<kind::Cq, CqQueue>,
    pub(super) srqs: Halves<kind::Srq, Mutex<RecvProducer>>,
    events: Mutex<VecDeque<AsyncEvent>>,
    /// Made when a program first asks for it.
    pub(super) event_descriptor: OnceLock<EventFd>,
    pub(super) sleepers: Sleepers,
    /// CQs that a program armed.
    armed: AtomicUsize,
    /// When the engine is due, in nanoseconds; `u64::MAX` is never.
    due: AtomicU64,
    /// When a thread of the program last drove, in nanoseconds.
    driven: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<DeviceError>>,
    /// Wakes the progress thread when it is off duty.
    pub(super) progress: OnceLock<Arc<EventFd>>,
    pub(super) off_duty: AtomicBool,
    /// The progress thread runs.
    pub(super) attended: AtomicBool,
    clock: MonotonicClock,
    device: Option<RawFd>,
}

impl Drop for Shared {
    /// What was left to the next round goes out: a program may end with the last message that it is told of.
    fn drop(&mut self) {
        let engine = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner);
        if engine.owes() {
            let _ = engine.settle();
        }
    }
}

impl Shared {
    pub(super) fn new(engine: HostEngine) -> Self {
        Self {
            clock: *engine.clock(),
            device: engine.device().descriptor(),
            engine: Mutex::new(engine),
            control: AtomicUsize::new(0),
            doorbells: ArrayQueue::new(DOORBELLS),
            qps: Halves::new(),
            cqs: Halves::new(),
            srqs: Halves::new(),
            events: Mutex::default(),
            event_descriptor: OnceLock::new(),
            sleepers: Sleepers::new(),
            armed: AtomicUsize::new(0),
            due: AtomicU64::new(0),
            driven: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            progress: OnceLock::new(),
            off_duty: AtomicBool::new(false),
            attended: AtomicBool::new(false),
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(super) fn driven_at(&self) -> Instant {
        Instant::from_nanos(self.driven.load(Ordering::Relaxed))
    }

    /// When the engine is due.
    pub(super) fn due(&self) -> Option<Instant> {
        Some(self.due.load(Ordering::SeqCst)).filter(|due| *due != u64::MAX).map(Instant::from_nanos)
    }

    /// Whether only a packet or a timer makes work, and a sleeper learns of both.
    pub(super) fn is_settled(&self) -> bool {
        self.device.is_some() && self.doorbells.is_empty() && self.due().is_none_or(|due| due > self.now())
    }

    /// Whether the next round is to acknowledge a message alone that the last one did not.
    pub(super) fn owes_an_ack(&self) -> bool {
        self.due() == Some(Instant::ZERO)
    }

    pub(super) fn has_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst) > 0
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn take_error(&self) -> Option<DeviceError> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs `f` on the engine, and then a round, so that what `f` made ready goes out.
    pub(super) fn control<R>(&self, f: impl FnOnce(&mut HostEngine) -> R) -> R {
        let mut engine = self.lock();
        if engine.owes() {
            // Before `f` ends a QP that has something to say.
            self.round(&mut engine, Driver::Settler);
        }
        let answer = f(&mut engine);
        self.round(&mut engine, Driver::Program);
        drop(engine);
        self.sleepers.after_round(self.due.load(Ordering::SeqCst));
        self.serve_doorbells();
        answer
    }

    /// Runs `f` on the engine, and nothing else.
    pub(super) fn inspect<R>(&self, f: impl FnOnce(&mut HostEngine) -> R) -> R {
        let mut engine = self.lock();
        let answer = f(&mut engine);
        drop(engine);
        self.serve_doorbells();
        answer
    }

    /// Lets `f` look at the engine. Tries the lock for [`LOOK_FOR`] first: who only looks makes nobody wait as long as
    /// there is another moment. Then waits, as a control verb does.
    pub(super) fn look<R>(&self, f: impl FnOnce(&HostEngine) -> R) -> R {
        let pause = LOOK_FOR / LOOKS;
        for _ in 0..LOOKS {
            let engine = match self.engine.try_lock() {
                Ok(engine) => engine,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(pause);
                    continue;
                }
            };
            let answer = f(&engine);
            drop(engine);
            self.serve_doorbells();
            return answer;
        }
        self.inspect(|engine| f(engine))
    }

    /// Who rang while we held the lock relies on us.
    fn serve_doorbells(&self) {
        if !self.doorbells.is_empty() {
            self.drive(Driver::Program);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HostEngine> {
        self.control.fetch_add(1, Ordering::SeqCst);
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.control.fetch_sub(1, Ordering::SeqCst);
        engine
    }

    /// Drives a round, if nobody else does. Goes on while QPs ring: whoever rang while the lock was held went away and
    /// relies on this.
    pub(super) fn drive(&self, by: Driver) -> Drive {
        let mut moved = None;
        loop {
            // A thread that waits for the lock serves the doorbells itself.
            if self.has_failed() || self.control.load(Ordering::SeqCst) > 0 {
                break;
            }
            let mut engine = match self.engine.try_lock() {
                Ok(engine) => engine,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) => break,
            };
            if moved.is_none()
                && let Some(now) = self.idle_at(&mut engine, by)
            {
                drop(engine);
                fence(Ordering::SeqCst);
                if self.doorbells.is_empty() {
                    return Drive::Idle(now);
                }
                continue;
            }
            moved = Some(moved.unwrap_or(0) + self.round(&mut engine, by));
            drop(engine);
            self.sleepers.after_round(self.due.load(Ordering::SeqCst));
            if self.doorbells.is_empty() {
                break;
            }
        }
        moved.map_or(Drive::Busy, Drive::Moved)
    }

    /// The time, where it is certain that a round would do nothing now: a look is cheap then.
    fn idle_at(&self, engine: &mut HostEngine, by: Driver) -> Option<Instant> {
        if !by.waits() || !self.doorbells.is_empty() {
            return None;
        }
        // What arrives is seen the sooner the less is done between two looks.
        if (0..LOOKS_A_CALL).any(|_| !engine.is_idle()) {
            return None;
        }
        let now = self.now();
        if self.due().is_some_and(|due| due <= now) {
            return None;
        }
        self.driven.store(now.as_nanos(), Ordering::Relaxed);
        Some(now)
    }

    /// Tells the engine that `qp` has new work, and sends it if nobody else drives.
    pub(super) fn post(&self, qp: &Arc<QpHalf>) {
        if !self.has_failed()
            && self.control.load(Ordering::SeqCst) == 0
            && let Ok(mut engine) = self.engine.try_lock()
        {
            // Nobody needs to be told by a doorbell.
            engine.endpoint_mut().ring_doorbell(qp.handle);
            self.round(&mut engine, Driver::Poster);
            drop(engine);
            self.sleepers.after_round(self.due.load(Ordering::SeqCst));
            if self.doorbells.is_empty() {
                return;
            }
        } else {
            self.ring(qp);
        }
        self.drive(Driver::Poster);
    }

    fn round(&self, engine: &mut HostEngine, by: Driver) -> usize {
        let mut rang = false;
        for _ in 0..DOORBELLS {
            if self.doorbells.is_empty() {
                break;
            }
            let Some(qp) = self.doorbells.pop() else { break };
            rang = true;
            // Before the ring is read: who posts later rings again.
            qp.queue.rung.store(false, Ordering::SeqCst);
            engine.endpoint_mut().ring_doorbell(qp.handle);
        }
        let round = match by {
            Driver::Poster => engine.push(),
            Driver::Settler => engine.settle(),
            // What others posted waits for nobody. Without a progress thread a thread that does not come back after all
            // would leave a message unacknowledged for ever.
            Driver::Spinner if !rang && self.attended.load(Ordering::Relaxed) => engine.round_for_spinner(),
            Driver::Program if !rang && self.attended.load(Ordering::Relaxed) => engine.round_for_program(),
            Driver::Spinner | Driver::Program | Driver::Sleeper | Driver::Progress => engine.round(),
        };
        let (moved, due) = match round {
            Ok(round) => {
                if by.waits() {
                    self.driven.store(round.at.as_nanos(), Ordering::Relaxed);
                }
                let due = if round.cut_short() { Some(round.at) } else { engine.poll_timeout() };
                (round.moved(), due.map_or(u64::MAX, Instant::as_nanos))
            }
            Err(e) => {
                engine.endpoint_mut().link_down();
                self.fail(e);
                (0, u64::MAX)
            }
        };
        // Only who has the lock writes it.
        if self.due.load(Ordering::Relaxed) != due {
            self.due.store(due, Ordering::SeqCst);
        }
        while let Some(event) = engine.endpoint_mut().poll_event() {
            self.announce(event);
        }
        moved
    }

    fn fail(&self, error: DeviceError) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        if !self.failed.swap(true, Ordering::AcqRel) {
            self.queue_event(AsyncEvent::DeviceFatal);
        }
        self.sleepers.wake_all();
    }

    fn announce(&self, event: AsyncEvent) {
        let AsyncEvent::CqNotify(cq) = event else {
            self.queue_event(event);
            return;
        };
        let Some(half) = self.cqs.get(cq) else { return };
        self.disarm(&half);
        match half.queue.descriptor.get() {
            Some(descriptor) => descriptor.set(),
            None => self.queue_event(event),
        }
    }

    fn queue_event(&self, event: AsyncEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // A CQ is disarmed by its notification, so losing that would put a program to sleep for ever; each CQ has one.
        let has_room =
            events.len() < EVENTS_MAX || (matches!(event, AsyncEvent::CqNotify(_)) && !events.contains(&event));
        if has_room && events.back() != Some(&event) {
            events.push_back(event);
        }
        drop(events);
        if let Some(descriptor) = self.event_descriptor.get() {
            descriptor.set();
        }
    }

    /// Makes the descriptor of the events tell of those that came before it was made.
    pub(super) fn announce_waiting(&self) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(descriptor) = self.event_descriptor.get().filter(|_| !events.is_empty()) {
            descriptor.set();
        }
    }

    /// The oldest event. The descriptor stays readable while others wait.
    pub(super) fn next_event(&self) -> Option<AsyncEvent> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let event = events.pop_front();
        if let Some(descriptor) = self.event_descriptor.get().filter(|_| events.is_empty()) {
            descriptor.clear();
        }
        event
    }

    /// Notes that the program armed `cq`; the progress thread goes on duty at once.
    pub(super) fn arm(&self, cq: &CqHalf) {
        if !cq.queue.armed.swap(true, Ordering::SeqCst) {
            self.armed.fetch_add(1, Ordering::SeqCst);
        }
        if self.off_duty.load(Ordering::SeqCst)
            && let Some(progress) = self.progress.get()
        {
            progress.set();
        }
    }

    pub(super) fn disarm(&self, cq: &CqHalf) {
        if cq.queue.armed.swap(false, Ordering::SeqCst) {
            self.armed.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Tells the engine that `qp` has new work. Never waits for it, but for a full queue of doorbells.
    pub(super) fn ring(&self, qp: &Arc<QpHalf>) {
        if qp.queue.rung.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.doorbells.push(Arc::clone(qp)).is_err() {
            qp.queue.rung.store(false, Ordering::SeqCst);
            self.control(|engine| engine.endpoint_mut().ring_doorbell(qp.handle));
        }
    }

    /// Sleeps as [`Sleepers::sleep`] says.
    pub(super) fn sleep(
        &self,
        waker: &Arc<EventFd>,
        cq: Option<&Arc<CqHalf>>,
        until: Option<Instant>,
        stop: &AtomicBool,
    ) -> std::io::Result<()> {
        let awake = || {
            cq.is_some_and(|cq| !cq.queue.is_empty() || cq.is_destroyed())
                || !self.doorbells.is_empty()
                || self.has_failed()
                || stop.load(Ordering::SeqCst)
        };
        let reasons = Reasons { due: &self.due, arm: &|| self.arm_device(), awake: &awake, now: &|| self.now() };
        self.sleepers.sleep(waker, cq, self.device, until, &reasons)
    }

    /// Prepares the device for a sleep on its descriptor; says whether something waits already.
    fn arm_device(&self) -> bool {
        match self.engine.try_lock() {
            Ok(mut engine) => engine.device_mut().arm(),
            Err(TryLockError::Poisoned(e)) => e.into_inner().device_mut().arm(),
            Err(TryLockError::WouldBlock) => {
                // Another thread drives: there is no sleep until it has done.
                std::thread::yield_now();
                true
            }
        }
    }

    /// The caller's half of a CQ; taken from the endpoint the first time, whoever made it.
    pub(super) fn cq(&self, cq: CqHandle) -> Option<Arc<CqHalf>> {
        self.cqs.get(cq).or_else(|| {
            self.inspect(|engine| {
                // Another thread may have been here first.
                self.cqs.get(cq).or_else(|| {
                    let ring = engine.endpoint_mut().take_cq_caller(cq)?;
                    Some(self.cqs.insert(cq, CqQueue::new(ring)))
                })
            })
        })
    }

    /// The caller's half of a QP, as [`Self::cq`].
    pub(super) fn qp(&self, qp: QpHandle) -> Option<Arc<QpHalf>> {
        self.qps.get(qp).or_else(|| {
            self.inspect(|engine| {
                self.qps.get(qp).or_else(|| {
                    let poster = engine.endpoint_mut().take_poster(qp)?;
                    Some(self.qps.insert(qp, QpQueue::new(poster)))
                })
            })
        })
    }

    /// The caller's half of an SRQ, as [`Self::cq`].
    pub(super) fn srq(&self, srq: SrqHandle) -> Option<Arc<SrqHalf>> {
        self.srqs.get(srq).or_else(|| {
            self.inspect(|engine| {
                self.srqs.get(srq).or_else(|| {
                    let ring = engine.endpoint_mut().take_srq_caller(srq)?;
                    Some(self.srqs.insert(srq, Mutex::new(ring)))
                })
            })
        })
    }
}

impl CqQueue {
    pub(super) fn new(ring: Consumer<WorkCompletion>) -> Self {
        Self { ring: Mutex::new(ring), armed: AtomicBool::new(false), descriptor: OnceLock::new() }
    }
}

impl QpQueue {
    pub(super) fn new(poster: Poster) -> Self {
        Self { poster: Mutex::new(poster), rung: AtomicBool::new(false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Side, engine};
    use crate::host::Host;
    use crate::types::Gid;

    /// Strangers raise alarms that the program has not read yet: what its CQ has to say is told all the same, once.
    #[test]
    fn a_flood_of_other_events_does_not_swallow_a_completion() {
        let host = Host::new(engine());
        let mut verbs = host.handle();
        let side = Side::new(&mut verbs, 64);
        let alarm = |n: usize| AsyncEvent::Probing(Gid::from_bytes((n as u128).to_be_bytes()));
        for n in 0..2 * EVENTS_MAX {
            verbs.shared.queue_event(alarm(n));
        }
        for n in 0..2 {
            verbs.shared.queue_event(AsyncEvent::CqNotify(side.cq));
            verbs.shared.queue_event(alarm(n));
        }
        let events: Vec<_> = core::iter::from_fn(|| verbs.shared.next_event()).collect();
        assert_eq!(events.len(), EVENTS_MAX + 1, "and the rest has its limit");
        assert_eq!(events.last(), Some(&AsyncEvent::CqNotify(side.cq)));
    }
}
