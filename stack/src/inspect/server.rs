//! Serving snapshots on a Unix socket.
//!
//! Owns the thread and the socket. One client at a time, each within [`PATIENCE`], at most one snapshot every
//! [`SNAPSHOT_PAUSE`]: a client can keep other clients waiting, and nothing else.

use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use super::{Snapshot, place};
use crate::device::sys::poll::{EventFd, Watch, wait};
use crate::host::Handle;
use crate::time::Duration;

/// How long a client may take to read its snapshot.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two snapshots at the least.
pub const SNAPSHOT_PAUSE: Duration = Duration::from_millis(10);
/// How long one write may take before the end is looked for.
const SLICE: Duration = Duration::from_millis(100);

/// What a program adds to its snapshots: a name, and a function that makes the value when a client asks.
pub struct Section {
    name: &'static str,
    render: Box<dyn Fn() -> serde_json::Value + Send>,
}

impl Section {
    /// A section. `render` is called on the inspector's thread and must not wait for long.
    pub fn new(name: &'static str, render: impl Fn() -> serde_json::Value + Send + 'static) -> Self {
        Self { name, render: Box::new(render) }
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn render(&self) -> serde_json::Value {
        (self.render)()
    }
}

/// A thread that serves snapshots of an endpoint; ends, and its socket goes, with its value.
pub struct Inspector {
    path: PathBuf,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

struct Stop {
    flag: AtomicBool,
    waker: EventFd,
}

impl Inspector {
    /// Serves the endpoint behind `handle` on a socket in `$XDG_RUNTIME_DIR/uroce`, `/run/uroce` or `/tmp/uroce-UID`, the
    /// first that can be had for this user alone; `UROCE_INSPECT_DIR` names another.
    ///
    /// # Errors
    /// No such directory, socket, descriptor or thread.
    pub fn spawn(handle: Handle, sections: Vec<Section>) -> io::Result<Self> {
        Self::spawn_in(place::candidates(), handle, sections)
    }

    /// As [`Inspector::spawn`], in the first of `dirs` that can be had. Each is made if need be, and must belong to this
    /// user alone.
    ///
    /// # Errors
    /// As [`Inspector::spawn`].
    pub fn spawn_in(dirs: Vec<PathBuf>, handle: Handle, sections: Vec<Section>) -> io::Result<Self> {
        let name = handle.look(|e| e.endpoint().config().name.clone());
        let (listener, path) = place::bind(dirs, &name)?;
        let stop = Arc::new(Stop { flag: AtomicBool::new(false), waker: EventFd::new()? });
        // Made before the thread, so that the socket goes if there is none.
        let mut inspector = Self { path, stop: Arc::clone(&stop), thread: None };
        listener.set_nonblocking(true)?;
        let body = move || run(&listener, &handle, &sections, &stop);
        inspector.thread = Some(std::thread::Builder::new().name("uroce-inspect".into()).spawn(body)?);
        Ok(inspector)
    }

    /// The socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        self.stop.flag.store(true, Ordering::SeqCst);
        self.stop.waker.set();
        // Whoever cleans up may have removed it.
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            // It panics only if the engine did, which whoever drives learns.
            let _ = thread.join();
        }
    }
}

fn run(listener: &UnixListener, handle: &Handle, sections: &[Section], stop: &Stop) {
    let stopped = || stop.flag.load(Ordering::SeqCst);
    while !stopped() {
        let watch = [Watch::Readable(listener.as_raw_fd()), Watch::Readable(stop.waker.as_raw_fd())];
        if wait(&watch, None).is_err() {
            return;
        }
        // A client that is gone already, or a process out of descriptors: others may come.
        if !stopped()
            && let Ok((client, _)) = listener.accept()
        {
            // What fails here concerns that client alone.
            let _ = serve(client, &Snapshot::take(handle, sections), stop);
        }
        let _ = wait(&watch[1..], Some(SNAPSHOT_PAUSE));
    }
}

fn serve(mut client: UnixStream, snapshot: &Snapshot, stop: &Stop) -> io::Result<()> {
    let text = serde_json::to_vec(snapshot)?;
    client.set_nonblocking(false)?;
    client.set_write_timeout(Some(SLICE))?;
    let (begin, mut rest) = (Instant::now(), text.as_slice());
    while !rest.is_empty() && begin.elapsed() < PATIENCE && !stop.flag.load(Ordering::SeqCst) {
        match client.write(rest) {
            Ok(0) => break,
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
