//! The host: many threads share one engine.
//!
//! Owns nothing but the arrangement. Whoever waits drives: a thread that polls an empty CQ runs a round itself, one
//! thread at a time, and nobody waits for that lock but control verbs. Posting and polling work on the callers' halves
//! of the rings. A program that computes, or sleeps in its own `poll(2)`, drives nothing: it has a progress thread
//! ([`Host::spawn_progress`]).

mod halves;
mod progress;
mod shared;
mod sleepers;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError};

use halves::Cache;
use progress::Progress;
use shared::{CqHalf, Drive, Driver, Shared};

pub use progress::PROGRESS_TAKEOVER;
pub use shared::HostEngine;

use crate::cq::poll_ring;
use crate::device::sys::poll::EventFd;
use crate::device::{Device, DeviceError};
use crate::endpoint::bind_request;
use crate::engine::{Engine, Idle, Patience, PollPolicy};
use crate::lock::Mutex;
use crate::qp::post_recv_to;
use crate::raw::Region;
use crate::srq::RecvProducer;
use crate::time::{Duration, Instant};
use crate::types::{Gid, Qpn, Rkey};
use crate::verbs::{
    AccessFlags, AhAttr, AhHandle, AsyncEvent, CqHandle, DeviceAttr, GidEntry, MemoryRegion, MemoryWindow, MrHandle,
    MwBind, MwHandle, MwType, Notify, PdHandle, PortAttr, PostError, PostListError, QpAttr, QpHandle, QpInfo, QpInit,
    QpOptions, RecvWr, SendFlags, SendWr, SrqHandle, SrqInfo, SrqInit, Verbs, VerbsError, WaitVerbs, WorkCompletion,
    kind,
};

/// An engine that threads share through [`Handle`]s. It lives as long as any of them; the progress thread ends with the
/// host.
pub struct Host {
    shared: Arc<Shared>,
    progress: Option<Progress>,
    policy: PollPolicy,
}

impl Host {
    /// Shares `engine`.
    #[must_use]
    pub fn new<D: Device + 'static>(engine: Engine<D>) -> Self {
        let (device, endpoint, clock) = engine.into_parts();
        let engine = Engine::with_clock(Box::new(device) as Box<dyn Device>, endpoint, clock);
        Self { shared: Arc::new(Shared::new(engine)), progress: None, policy: PollPolicy::default() }
    }

    /// A handle for one thread.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(Arc::clone(&self.shared), self.policy)
    }

    /// What the waits of handles made from now on do while nothing is due ([`Handle::set_poll_policy`]).
    pub fn set_poll_policy(&mut self, policy: PollPolicy) {
        self.policy = policy;
    }

    /// Starts the progress thread, if it does not run: it drives when nobody has for [`PROGRESS_TAKEOVER`], or at once
    /// when a CQ is armed.
    ///
    /// # Errors
    /// [`DeviceError::Io`]: no thread or descriptor is left.
    pub fn spawn_progress(&mut self) -> Result<(), DeviceError> {
        if self.progress.is_none() {
            self.progress = Some(Progress::spawn(Arc::clone(&self.shared), None)?);
        }
        Ok(())
    }

    /// Starts the progress thread as [`Host::spawn_progress`] does, bound to one processor.
    ///
    /// # Errors
    /// [`DeviceError::Io`]; [`DeviceError::Pin`]: the processor cannot be had, and no thread was started.
    pub fn spawn_progress_on(&mut self, cpu: usize) -> Result<(), DeviceError> {
        if self.progress.is_none() {
            self.progress = Some(Progress::spawn(Arc::clone(&self.shared), Some(cpu))?);
        }
        Ok(())
    }

    /// Why the device failed, once; every wait gives [`VerbsError::DeviceGone`] from then on.
    #[must_use]
    pub fn take_error(&self) -> Option<DeviceError> {
        self.shared.take_error()
    }
}

/// A thread's access to a host: the verbs, and waiting. Clones are for other threads.
pub struct Handle {
    shared: Arc<Shared>,
    qps: Cache<kind::Qp, shared::QpQueue>,
    cqs: Cache<kind::Cq, shared::CqQueue>,
    srqs: Cache<kind::Srq, Mutex<RecvProducer>>,
    /// What this thread sleeps on, made when it first does.
    waker: Option<Arc<EventFd>>,
    patience: Patience,
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared), self.patience.policy())
    }
}

impl Handle {
    fn new(shared: Arc<Shared>, policy: PollPolicy) -> Self {
        let patience = Patience::new(policy);
        Self { shared, qps: Cache::new(), cqs: Cache::new(), srqs: Cache::new(), waker: None, patience }
    }

    /// What this handle's waits, and those of clones made from now on, do while nothing is due.
    pub fn set_poll_policy(&mut self, policy: PollPolicy) {
        self.patience = Patience::new(policy);
    }

    /// The time on the engine's clock.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.shared.now()
    }

    /// Runs one round if no other thread does; returns how many bursts moved.
    pub fn drive(&mut self) -> usize {
        match self.shared.drive(Driver::Program) {
            Drive::Moved(n) => n,
            Drive::Busy | Drive::Idle(_) => 0,
        }
    }

    /// Runs `f` on the engine, which waits for whoever drives: for counters, fault rules and the like.
    pub fn with_engine<R>(&mut self, f: impl FnOnce(&mut HostEngine) -> R) -> R {
        self.shared.control(f)
    }

    /// Lets `f` look at the engine, at a moment when nobody drives it if there is one soon. `f` should take little time,
    /// as nobody drives meanwhile.
    pub fn look<R>(&self, f: impl FnOnce(&HostEngine) -> R) -> R {
        self.shared.look(f)
    }

    /// Waits until `cq` holds a completion (`true`) or `timeout` passes (`None`: for ever). Drives meanwhile; while
    /// nothing is due it does what the [`PollPolicy`] says.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], also when the CQ is destroyed meanwhile; [`VerbsError::DeviceGone`];
    /// [`VerbsError::Unsupported`] when the process has no descriptor left to sleep on.
    pub fn wait_cq(&mut self, cq: CqHandle, timeout: Option<Duration>) -> Result<bool, VerbsError> {
        // Nobody stops a wait from outside.
        static GOES_ON: AtomicBool = AtomicBool::new(false);
        let half = Arc::clone(self.cq(cq)?);
        if !half.queue.is_empty() && !half.is_destroyed() {
            return Ok(true);
        }
        let mut now = self.shared.now();
        let deadline = timeout.map(|t| now + t);
        self.patience.begin(now);
        // The sleep itself finds out whether something waits: no look at the device comes first.
        let mut drives = !(self.patience.sleeps_at_once() && self.shared.is_settled());
        loop {
            if half.is_destroyed() {
                return Err(VerbsError::InvalidHandle);
            }
            if !half.queue.is_empty() {
                self.patience.progress(now);
                return Ok(true);
            }
            if self.shared.has_failed() {
                return Err(VerbsError::DeviceGone);
            }
            let drove = if drives { self.shared.drive(driver_of(&self.patience)) } else { Drive::Busy };
            now = if let Drive::Idle(now) = drove { now } else { self.shared.now() };
            if matches!(drove, Drive::Moved(1..)) {
                self.patience.progress(now);
                continue;
            }
            if deadline.is_some_and(|d| d <= now) {
                return Ok(!half.queue.is_empty());
            }
            drives = true;
            match self.patience.idle(now, self.shared.due()) {
                Idle::Spin => core::hint::spin_loop(),
                Idle::Yield => self.make_way(now),
                Idle::Sleep => {
                    let waker = self.waker()?;
                    self.shared.sleep(&waker, Some(&half), deadline, &GOES_ON).map_err(|_| NO_DESCRIPTOR)?;
                    now = self.shared.now();
                }
            }
        }
    }

    /// Lets other threads have the processor.
    fn make_way(&mut self, now: Instant) {
        std::thread::yield_now();
        self.patience.yielded(now, self.shared.now());
    }

    /// A descriptor that becomes readable when a notification that [`Verbs::req_notify`] asked for arrives on `cq`, for
    /// the program's own `poll(2)`. From then on this CQ's notifications come here and not as
    /// [`AsyncEvent::CqNotify`]. Needs a progress thread: who sleeps elsewhere drives nothing.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::Unsupported`] when no descriptor is left.
    pub fn completion_fd(&mut self, cq: CqHandle) -> Result<OwnedFd, VerbsError> {
        duplicate(&self.cq(cq)?.queue.descriptor)
    }

    /// Takes a notification from the descriptor of `cq`: it is unreadable until the next. Says whether there was one.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn take_notification(&mut self, cq: CqHandle) -> Result<bool, VerbsError> {
        Ok(self.cq(cq)?.queue.descriptor.get().is_some_and(EventFd::clear))
    }

    /// A descriptor that is readable while [`Verbs::poll_event`] has something.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] when no descriptor is left.
    pub fn event_fd(&mut self) -> Result<OwnedFd, VerbsError> {
        let descriptor = duplicate(&self.shared.event_descriptor)?;
        self.shared.announce_waiting();
        Ok(descriptor)
    }

    fn waker(&mut self) -> Result<Arc<EventFd>, VerbsError> {
        if let Some(waker) = &self.waker {
            return Ok(Arc::clone(waker));
        }
        let waker = Arc::new(EventFd::new().map_err(|_| NO_DESCRIPTOR)?);
        self.waker = Some(Arc::clone(&waker));
        Ok(waker)
    }

    fn cq(&mut self, cq: CqHandle) -> Result<&Arc<CqHalf>, VerbsError> {
        self.cqs.get(cq, || self.shared.cq(cq)).ok_or(VerbsError::InvalidHandle)
    }
}

const fn driver_of(patience: &Patience) -> Driver {
    match patience.policy() {
        PollPolicy::Spin => Driver::Spinner,
        PollPolicy::Adaptive { .. } => Driver::Program,
        PollPolicy::Block => Driver::Sleeper,
    }
}

const UNKNOWN: PostListError = PostListError { index: 0, error: PostError::InvalidHandle };
const NO_DESCRIPTOR: VerbsError = VerbsError::Unsupported("waiting without a free file descriptor");

fn duplicate(descriptor: &OnceLock<EventFd>) -> Result<OwnedFd, VerbsError> {
    let made = match descriptor.get() {
        Some(made) => made,
        None => {
            let new = EventFd::new().map_err(|_| NO_DESCRIPTOR)?;
            descriptor.get_or_init(|| new)
        }
    };
    made.duplicate().map_err(|_| NO_DESCRIPTOR)
}

impl Verbs for Handle {
    fn query_device(&self) -> DeviceAttr {
        self.shared.inspect(|e| e.endpoint().query_device())
    }

    fn query_port(&self) -> PortAttr {
        self.shared.inspect(|e| e.endpoint().query_port())
    }

    fn query_gids(&self) -> Vec<GidEntry> {
        self.shared.inspect(|e| e.endpoint().query_gids())
    }

    fn alloc_pd(&mut self) -> Result<PdHandle, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().alloc_pd())
    }

    fn dealloc_pd(&mut self, pd: PdHandle) -> Result<(), VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().dealloc_pd(pd))
    }

    fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().register(pd, region, access, iova))
    }

    fn deregister(&mut self, mr: MrHandle) -> Result<(), VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().deregister(mr))
    }

    fn alloc_fast_mr(&mut self, pd: PdHandle, region: &Region) -> Result<MemoryRegion, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().alloc_fast_mr(pd, region))
    }

    fn alloc_mw(&mut self, pd: PdHandle, mw_type: MwType) -> Result<MemoryWindow, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().alloc_mw(pd, mw_type))
    }

    fn dealloc_mw(&mut self, mw: MwHandle) -> Result<(), VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().dealloc_mw(mw))
    }

    fn bind_mw(&mut self, qp: QpHandle, wr_id: u64, bind: MwBind, flags: SendFlags) -> Result<Rkey, PostError> {
        let rkey = self.shared.inspect(|e| e.endpoint_mut().memory_mut().next_window_key(bind.mw))?;
        self.post_send(qp, &[bind_request(wr_id, bind, rkey, flags)]).map_err(|e| e.error)?;
        Ok(rkey)
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqHandle, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().create_cq(depth))
    }

    fn destroy_cq(&mut self, cq: CqHandle) -> Result<(), VerbsError> {
        let shared = &self.shared;
        shared.control(|e| {
            e.endpoint_mut().destroy_cq(cq)?;
            if let Some(half) = shared.cqs.remove(cq) {
                shared.disarm(&half);
            }
            Ok(())
        })
    }

    /// An empty CQ runs a round first; when that moved nothing, other threads that want the processor get it.
    /// [`VerbsError::DeviceGone`] when it is empty and the device has failed: nothing will ever come, and a program that
    /// only polls would not learn it.
    fn poll_cq(&mut self, cq: CqHandle, out: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        let Self { shared, cqs, .. } = self;
        let half = cqs.get(cq, || shared.cq(cq)).ok_or(VerbsError::InvalidHandle)?;
        let n = poll_ring(&mut half.queue.ring(), out);
        if n > 0 || out.is_empty() {
            self.patience.found();
            return Ok(n);
        }
        let drove = shared.drive(driver_of(&self.patience));
        // A timer may have completed something though nothing moved.
        let n = if matches!(drove, Drive::Idle(_)) { 0 } else { poll_ring(&mut half.queue.ring(), out) };
        if n == 0 && !self.patience.spins() && shared.owes_an_ack() {
            // The program is not told of what came, so it has no answer, and may not come back soon.
            shared.drive(Driver::Program);
        }
        if n == 0 && shared.has_failed() {
            return Err(VerbsError::DeviceGone);
        }
        if n > 0 || matches!(drove, Drive::Moved(1..)) {
            self.patience.found();
        } else {
            let now = if let Drive::Idle(now) = drove { now } else { shared.now() };
            if self.patience.spin(now) == Idle::Yield {
                self.make_way(now);
            }
        }
        Ok(n)
    }

    fn req_notify(&mut self, cq: CqHandle, what: Notify) -> Result<(), VerbsError> {
        let Self { shared, cqs, .. } = self;
        let half = cqs.get(cq, || shared.cq(cq)).ok_or(VerbsError::InvalidHandle)?;
        shared.inspect(|e| {
            e.endpoint_mut().req_notify(cq, what)?;
            // Under the lock, so that no notification comes between.
            shared.arm(half);
            Ok(())
        })
    }

    fn create_srq(&mut self, init: SrqInit) -> Result<SrqHandle, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().create_srq(init))
    }

    fn arm_srq(&mut self, srq: SrqHandle, limit: u32) -> Result<(), VerbsError> {
        self.shared.control(|e| e.endpoint_mut().arm_srq(srq, limit))
    }

    fn query_srq(&self, srq: SrqHandle) -> Result<SrqInfo, VerbsError> {
        self.shared.inspect(|e| e.endpoint().query_srq(srq))
    }

    fn destroy_srq(&mut self, srq: SrqHandle) -> Result<(), VerbsError> {
        let shared = &self.shared;
        shared.inspect(|e| {
            e.endpoint_mut().destroy_srq(srq)?;
            shared.srqs.remove(srq);
            Ok(())
        })
    }

    fn create_qp(&mut self, init: QpInit) -> Result<QpHandle, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().create_qp(init))
    }

    fn modify_qp(&mut self, qp: QpHandle, attr: QpAttr) -> Result<(), VerbsError> {
        self.shared.control(|e| e.endpoint_mut().modify_qp(qp, attr))
    }

    fn modify_many(&mut self, list: &[(QpHandle, QpAttr)]) -> Vec<Result<(), VerbsError>> {
        self.shared.control(|e| e.endpoint_mut().modify_many(list))
    }

    fn query_qp(&self, qp: QpHandle) -> Result<QpInfo, VerbsError> {
        self.shared.inspect(|e| e.endpoint().query_qp(qp))
    }

    fn set_qp_options(&mut self, qp: QpHandle, options: QpOptions) -> Result<(), VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().set_qp_options(qp, options))
    }

    fn qp_options(&self, qp: QpHandle) -> Result<QpOptions, VerbsError> {
        self.shared.inspect(|e| e.endpoint().qp_options(qp))
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), VerbsError> {
        let shared = &self.shared;
        shared.control(|e| {
            e.endpoint_mut().destroy_qp(qp)?;
            shared.qps.remove(qp);
            Ok(())
        })
    }

    fn find_qp(&self, qpn: Qpn) -> Option<QpHandle> {
        self.shared.inspect(|e| e.endpoint().find_qp(qpn))
    }

    fn attach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        self.shared.control(|e| {
            e.endpoint_mut().attach_multicast(qp, gid)?;
            // At once, so that a refusal is an answer and not an event. One of another group is an event all the same.
            while let Err((group, _)) = e.apply_memberships() {
                if group == gid {
                    let _ = e.endpoint_mut().detach_multicast(qp, gid);
                    return Err(VerbsError::JoinRefused);
                }
                e.endpoint_mut().membership_failed(group);
            }
            Ok(())
        })
    }

    fn detach_multicast(&mut self, qp: QpHandle, gid: Gid) -> Result<(), VerbsError> {
        self.shared.control(|e| e.endpoint_mut().detach_multicast(qp, gid))
    }

    /// Rings, and sends if nobody else drives: the first packets are out when it returns. What arrived meanwhile is for
    /// whoever polls or waits.
    fn post_send(&mut self, qp: QpHandle, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let Self { shared, qps, .. } = self;
        let half = qps.get(qp, || shared.qp(qp)).ok_or(UNKNOWN)?;
        let posted = half.queue.poster.lock().unwrap_or_else(PoisonError::into_inner).post_send(list);
        // Those before a bad one are queued.
        if posted.map_or_else(|e| e.index, |()| list.len()) > 0 {
            shared.post(half);
        }
        posted
    }

    /// Rings only a QP in ERR, which flushes what is posted: a receive waits for a peer.
    fn post_recv(&mut self, qp: QpHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let Self { shared, qps, .. } = self;
        let half = qps.get(qp, || shared.qp(qp)).ok_or(UNKNOWN)?;
        let mut poster = half.queue.poster.lock().unwrap_or_else(PoisonError::into_inner);
        let posted = poster.post_recv(list);
        let flushes = poster.flushes();
        drop(poster);
        if flushes {
            shared.ring(half);
            shared.drive(Driver::Program);
        }
        posted
    }

    fn post_srq_recv(&mut self, srq: SrqHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let half = self.srqs.get(srq, || self.shared.srq(srq));
        let mut ring = half.ok_or(UNKNOWN)?.queue.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, wr) in list.iter().enumerate() {
            post_recv_to(&mut ring, wr).map_err(|error| PostListError { index, error })?;
        }
        Ok(())
    }

    fn create_ah(&mut self, pd: PdHandle, attr: AhAttr) -> Result<AhHandle, VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().create_ah(pd, attr))
    }

    fn destroy_ah(&mut self, ah: AhHandle) -> Result<(), VerbsError> {
        self.shared.inspect(|e| e.endpoint_mut().destroy_ah(ah))
    }

    /// No event: runs a round first.
    fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.shared.next_event().or_else(|| {
            self.shared.drive(Driver::Program);
            self.shared.next_event()
        })
    }
}

impl WaitVerbs for Handle {
    fn now(&self) -> Instant {
        Self::now(self)
    }

    fn wait_cq(&mut self, cq: CqHandle, timeout: Option<Duration>) -> Result<bool, VerbsError> {
        Self::wait_cq(self, cq, timeout)
    }
}
