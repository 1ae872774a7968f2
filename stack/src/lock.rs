//! The locks of this crate, counted.
//!
//! Owns the two kinds of lock that drivers and devices use and, in builds with debug assertions, how often each thread took
//! one, or tried to: so a test can tell that the data path takes none for a packet. Without debug assertions they are the
//! system's locks and nothing else. Never decides what is locked.

use std::sync::{LockResult, MutexGuard, RwLockReadGuard, RwLockWriteGuard, TryLockResult};

#[cfg(debug_assertions)]
thread_local! {
    static TAKEN: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
}

/// How often the calling thread took a lock of this crate, or tried to. `None` without debug assertions: nobody counts.
#[must_use]
pub fn taken() -> Option<u64> {
    #[cfg(debug_assertions)]
    return Some(TAKEN.get());
    #[cfg(not(debug_assertions))]
    return None;
}

#[inline]
fn note() {
    // A thread that is ending has no counter any more, and nobody who asks for it.
    #[cfg(debug_assertions)]
    let _ = TAKEN.try_with(|taken| taken.set(taken.get() + 1));
}

/// The system's mutex.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Nobody else can hold it, so it is not taken.
    pub(crate) fn get_mut(&mut self) -> LockResult<&mut T> {
        self.0.get_mut()
    }

    #[inline]
    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        note();
        self.0.lock()
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        note();
        self.0.try_lock()
    }
}

/// The system's lock of many readers or one writer.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    #[inline]
    pub(crate) fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        note();
        self.0.read()
    }

    #[inline]
    pub(crate) fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        note();
        self.0.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_attempt_counts_on_the_thread_that_makes_it() {
        let Some(before) = taken() else { return };
        let (mutex, shared) = (Mutex::new(1), RwLock::new(2));
        let held = mutex.lock().unwrap();
        assert!(mutex.try_lock().is_err());
        drop(held);
        assert_eq!(*shared.read().unwrap(), 2);
        *shared.write().unwrap() = 3;
        std::thread::scope(|scope| {
            scope.spawn(|| drop(mutex.lock()));
        });
        assert_eq!(taken(), Some(before + 4));
    }
}
