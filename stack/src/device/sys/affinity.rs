//! Which processors a thread may run on: `sched_getaffinity(2)` and `sched_setaffinity(2)`; and what it has used of them:
//! `clock_gettime(2)`.
#![allow(unsafe_code)] // This directory is where system calls are.

use core::fmt;
use std::{io, mem};

use crate::time::Duration;

/// Processors by number.
#[derive(Clone)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// Processors that a set can name: 0 to this, exclusive.
    pub const MAX: usize = libc::CPU_SETSIZE as usize;

    fn empty() -> Self {
        // SAFETY: `cpu_set_t` is plain data for which all zeroes is a value: the empty set.
        Self(unsafe { mem::zeroed() })
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: usize) -> bool {
        // SAFETY: the number is inside the set.
        cpu < Self::MAX && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    /// All of them, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..Self::MAX).filter(|&cpu| self.contains(cpu))
    }
}

impl PartialEq for CpuSet {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for CpuSet {}

/// As the kernel writes it: `0-3,8`.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts = self.iter().filter(|&cpu| cpu == 0 || !self.contains(cpu - 1));
        for (i, first) in starts.enumerate() {
            let last = (first..Self::MAX).take_while(|&cpu| self.contains(cpu)).last().unwrap_or(first);
            let comma = if i > 0 { "," } else { "" };
            match last {
                last if last == first => write!(f, "{comma}{first}")?,
                last => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

/// A thread was not bound to a processor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The processor does not exist, or another may not be left for it (a container's or a service's limit).
    #[error(
        "CPU {cpu} is not among those that this thread may use: {allowed}; see `taskset -p` and the cgroup's cpuset"
    )]
    NotAllowed {
        /// Asked for.
        cpu: usize,
        /// What the thread may use.
        allowed: Box<CpuSet>,
    },
    /// Anything else that the system says.
    #[error("binding a thread to CPU {cpu}: {source}")]
    Io {
        /// Asked for.
        cpu: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// The processors that the calling thread may run on.
///
/// # Errors
/// The system's answer: it has more processors than [`CpuSet::MAX`].
pub fn allowed_cpus() -> io::Result<CpuSet> {
    let mut set = CpuSet::empty();
    // SAFETY: the pointer and the length describe `set`, which outlives the call; 0 is the calling thread.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set.0) };
    if rc == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

/// Binds the calling thread, and threads that it starts from now on, to one processor. It must be one of
/// [`allowed_cpus`]: a thread that was bound before may go nowhere else.
///
/// # Errors
/// [`PinError`].
pub fn pin_current_thread(cpu: usize) -> Result<(), PinError> {
    let allowed = allowed_cpus().map_err(|source| PinError::Io { cpu, source })?;
    if !allowed.contains(cpu) {
        return Err(PinError::NotAllowed { cpu, allowed: Box::new(allowed) });
    }
    let mut set = CpuSet::empty();
    // SAFETY: the number is inside the set: it is one that the system named.
    unsafe { libc::CPU_SET(cpu, &mut set.0) };
    // SAFETY: the pointer and the length describe `set`, which outlives the call; 0 is the calling thread.
    let rc = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set.0) };
    if rc == 0 { Ok(()) } else { Err(PinError::Io { cpu, source: io::Error::last_os_error() }) }
}

/// Processor time that the calling thread has used, in user and system mode.
///
/// # Errors
/// The system's answer.
pub fn thread_cpu_time() -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let [seconds, nanos] = [time.tv_sec, time.tv_nsec].map(|n| u64::try_from(n).unwrap_or(0));
    Ok(Duration::from_secs(seconds) + Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::empty();
        for &cpu in cpus {
            // SAFETY: the tests name small numbers.
            unsafe { libc::CPU_SET(cpu, &mut set.0) };
        }
        set
    }

    #[test]
    fn sets_read_as_the_kernel_writes_them() {
        for (cpus, text) in
            [(&[][..], ""), (&[0], "0"), (&[3, 4, 5, 8], "3-5,8"), (&[0, 2, 1022, 1023], "0,2,1022-1023")]
        {
            assert_eq!(set(cpus).to_string(), text);
            assert_eq!(set(cpus).iter().collect::<Vec<_>>(), cpus);
        }
        assert!(!set(&[1]).contains(usize::MAX));
    }

    #[test]
    fn a_pinned_thread_may_go_nowhere_else() {
        std::thread::spawn(|| {
            let before = allowed_cpus().unwrap();
            let cpu = before.iter().last().unwrap();
            pin_current_thread(cpu).unwrap();
            assert_eq!(allowed_cpus().unwrap(), set(&[cpu]));
            let error = pin_current_thread(cpu + 1).unwrap_err();
            assert!(matches!(&error, PinError::NotAllowed { allowed, .. } if **allowed == set(&[cpu])));
            assert!(
                error
                    .to_string()
                    .contains(&format!("CPU {} is not among those that this thread may use: {cpu};", cpu + 1))
            );
            assert!(matches!(pin_current_thread(usize::MAX), Err(PinError::NotAllowed { .. })));
        })
        .join()
        .unwrap();
        // Others stay where they were.
        assert_ne!(allowed_cpus().unwrap(), set(&[]));
    }

    #[test]
    fn processor_time_passes_with_work_and_not_with_sleep() {
        let begin = thread_cpu_time().unwrap();
        let spent = || thread_cpu_time().unwrap() - begin;
        while spent() < Duration::from_millis(5) {
            core::hint::spin_loop();
        }
        let before = spent();
        std::thread::sleep(Duration::from_millis(100));
        assert!(spent() - before < Duration::from_millis(50));
    }
}
