//! Where the sockets lie: one directory a user, which nobody else may enter.
//!
//! Owns the choice of the directory, the names in it and the removal of those that nobody serves any more.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use socket2::{Domain, SockAddr, Socket, Type};

/// Endpoints of one name that a process may have.
const SAME_NAME: u32 = 64;
/// A socket that refuses and is older is left over, whatever its process's number says: numbers come again.
const SURELY_MADE: Duration = Duration::from_secs(10);

/// The user. `/proc/self` belongs to whom the process acts for.
fn user() -> io::Result<u32> {
    Ok(fs::metadata("/proc/self")?.uid())
}

/// The directories that may hold sockets, the first choice first; `UROCE_INSPECT_DIR` stands for all of them.
pub(super) fn candidates() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os("UROCE_INSPECT_DIR").filter(|dir| !dir.is_empty()) {
        return vec![dir.into()];
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let fallback = user().map(|uid| PathBuf::from(format!("/tmp/uroce-{uid}"))).ok();
    let runtime = runtime.map(|dir| PathBuf::from(dir).join("uroce"));
    [runtime, Some(PathBuf::from("/run/uroce")), fallback].into_iter().flatten().collect()
}

/// Whether `dir` is a directory of ours that nobody else may enter.
pub(super) fn is_private(dir: &Path) -> bool {
    let (Ok(meta), Ok(user)) = (fs::symlink_metadata(dir), user()) else { return false };
    meta.is_dir() && meta.uid() == user && meta.mode() & 0o077 == 0
}

/// The directory to serve in, made if need be.
fn directory(candidates: Vec<PathBuf>) -> io::Result<PathBuf> {
    let mut last = io::ErrorKind::NotFound.into();
    for dir in candidates {
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => last = e,
            // Made by somebody else, it could be a trap.
            _ if !is_private(&dir) => last = io::ErrorKind::PermissionDenied.into(),
            _ => return Ok(dir),
        }
    }
    Err(last)
}

/// A new socket for the endpoint `device` of this process, in the first of `dirs` that can be had.
pub(super) fn bind(dirs: Vec<PathBuf>, device: &str) -> io::Result<(UnixListener, PathBuf)> {
    let dir = directory(dirs)?;
    for path in sockets(&dir) {
        remove_if_left_over(&path);
    }
    let device: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(32).collect();
    let pid = std::process::id();
    for number in 1..=SAME_NAME {
        let name = if number == 1 { format!("{pid}-{device}.sock") } else { format!("{pid}-{device}-{number}.sock") };
        let path = dir.join(name);
        match UnixListener::bind(&path) {
            // The directory keeps others out before and after this.
            Ok(listener) => {
                fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
                return Ok((listener, path));
            }
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// The sockets of a directory, in the order of their names.
pub(super) fn sockets(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let socket = OsString::from("sock");
    let paths = entries.filter_map(|e| Some(e.ok()?.path()));
    let mut all: Vec<_> = paths.filter(|p| p.extension() == Some(socket.as_os_str())).collect();
    all.sort();
    all
}

/// Connects at once or not at all: a process that is stopped takes no clients, and once enough of them wait, the next
/// one's connect would wait for ever.
///
/// # Errors
/// `WouldBlock`: too many wait. `ConnectionRefused`, `NotFound`: nobody serves it.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

/// Removes a socket whose process is gone.
pub(super) fn remove_if_left_over(path: &Path) {
    let refused = connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
    // Between its making and its listening a socket refuses, too.
    if refused && (!process_lives(path) || is_old(path)) {
        // Another process may have removed it meanwhile.
        let _ = fs::remove_file(path);
    }
}

fn process_lives(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let pid = name.split('-').next().and_then(|pid| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
}

fn is_old(path: &Path) -> bool {
    let made = fs::symlink_metadata(path).and_then(|m| m.modified());
    made.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > SURELY_MADE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_of_ours_alone_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let set = |mode| fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        set(0o700);
        assert!(is_private(dir.path()));
        set(0o750);
        assert!(!is_private(dir.path()));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        set(0o700);
        assert!(!is_private(&link), "who made the link could turn it elsewhere");
        assert!(!is_private(&dir.path().join("none")));
    }

    #[test]
    fn what_a_dead_process_left_is_removed_and_what_lives_stays() {
        let dir = tempfile::tempdir().unwrap();
        // No process has this number: it is beyond what the kernel gives.
        let dead = dir.path().join("4194305-uroce0.sock");
        drop(UnixListener::bind(&dead).unwrap());
        let alive = dir.path().join(format!("{}-uroce0.sock", std::process::id()));
        let _listener = UnixListener::bind(&alive).unwrap();
        let starting = dir.path().join(format!("{}-uroce1.sock", std::process::id()));
        drop(UnixListener::bind(&starting).unwrap());
        assert_eq!(sockets(dir.path()).len(), 3);
        for path in sockets(dir.path()) {
            remove_if_left_over(&path);
        }
        assert_eq!(sockets(dir.path()), [alive, starting]);
    }
}
