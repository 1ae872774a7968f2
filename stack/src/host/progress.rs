//! The progress thread: answers peers while the program does something else.
//!
//! Owns a thread that is off duty while the program drives, and takes over when it has not for
//! [`PROGRESS_TAKEOVER`], or at once when a CQ is armed. On duty it sleeps on the device and the engine's timers. Never
//! competes with a thread of the program that waits.

use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::shared::{Drive, Driver, Shared};
use crate::device::sys::poll::{EventFd, Watch, wait};
use crate::device::{DeviceError, pin_current_thread};
use crate::time::Duration;

/// How long nobody may have driven before the progress thread does; up to five times as long where the program had driven
/// all the while before.
pub const PROGRESS_TAKEOVER: Duration = Duration::from_millis(1);
/// As a power of two: how much longer it leaves a program alone that has driven all the while.
const LONGEST_REST: u32 = 2;

/// A running progress thread; ends with its value.
pub(super) struct Progress {
    waker: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Starts it, bound to processor `cpu` if there is one.
    pub(super) fn spawn(shared: Arc<Shared>, cpu: Option<usize>) -> Result<Self, DeviceError> {
        let error = |source| DeviceError::Io { action: "starting the progress thread", source };
        let waker = Arc::new(EventFd::new().map_err(error)?);
        let waker = Arc::clone(shared.progress.get_or_init(|| waker));
        let stop = Arc::new(AtomicBool::new(false));
        let (bound, outcome) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("uroce-progress".into())
            .spawn({
                let (waker, stop) = (Arc::clone(&waker), Arc::clone(&stop));
                move || {
                    let pinned = cpu.map_or(Ok(()), pin_current_thread);
                    let goes_on = pinned.is_ok();
                    // Whoever started us waits for it.
                    let _ = bound.send(pinned);
                    if goes_on {
                        run(&shared, &waker, &stop);
                    }
                }
            })
            .map_err(error)?;
        let new = Self { waker, stop, thread: Some(thread) };
        // A thread that died without a word is found out by whoever drives.
        outcome.recv().unwrap_or(Ok(()))?;
        Ok(new)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.set();
        if let Some(thread) = self.thread.take() {
            // It panics only if the engine did, which whoever drives next learns.
            let _ = thread.join();
        }
    }
}

pub(super) fn run(shared: &Shared, waker: &Arc<EventFd>, stop: &AtomicBool) {
    shared.attended.store(true, Ordering::SeqCst);
    attend(shared, waker, stop);
    shared.attended.store(false, Ordering::SeqCst);
    // A thread that was told of a message meanwhile relied on this one, and may be holding the lock still.
    if !shared.has_failed() {
        shared.control(|_| ());
    }
}

fn attend(shared: &Shared, waker: &Arc<EventFd>, stop: &AtomicBool) {
    // Rests in a row after which the program had driven.
    let mut busy = 0;
    while !stop.load(Ordering::SeqCst) {
        if shared.has_failed() {
            // There is nothing left to drive.
            return;
        }
        if rest(shared, waker, stop, busy) {
            busy = (busy + 1).min(LONGEST_REST);
            continue;
        }
        let drive = shared.drive(Driver::Progress);
        if drive == Drive::Busy && !shared.has_armed() {
            // The program drives, in a round that takes long.
            off_duty(shared, waker, stop, PROGRESS_TAKEOVER * (1 << busy));
            busy = (busy + 1).min(LONGEST_REST);
            continue;
        }
        busy = 0;
        let slept = match drive {
            Drive::Moved(0) | Drive::Idle(_) => shared.sleep(waker, None, None, stop),
            Drive::Moved(_) => Ok(()),
            Drive::Busy => {
                std::thread::yield_now();
                Ok(())
            }
        };
        if slept.is_err() {
            return;
        }
    }
}

/// Off duty: sleeps out the time in which the program may drive, longer when it has driven through the last `busy` rests: to
/// look after a program that spins takes its processor from it. Says whether it did.
fn rest(shared: &Shared, waker: &EventFd, stop: &AtomicBool, busy: u32) -> bool {
    let left = (shared.driven_at() + PROGRESS_TAKEOVER).saturating_since(shared.now());
    if left.is_zero() || shared.has_armed() {
        return false;
    }
    off_duty(shared, waker, stop, left * (1 << busy));
    true
}

/// Sleeps for `time`, or until a CQ is armed or the thread is stopped.
fn off_duty(shared: &Shared, waker: &EventFd, stop: &AtomicBool, time: Duration) {
    shared.off_duty.store(true, Ordering::SeqCst);
    // Whoever arms a CQ or stops us after this wakes us.
    if !shared.has_armed() && !stop.load(Ordering::SeqCst) {
        // A failure ends the rest early, no more.
        let _ = wait(&[Watch::Readable(waker.as_raw_fd())], Some(time));
    }
    shared.off_duty.store(false, Ordering::SeqCst);
    waker.clear();
}
