//! Runs `uroce` and reads what it says.

use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

/// `uroce` with these arguments, not yet started.
pub(crate) fn uroce(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uroce"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs `uroce` to its end.
pub(crate) fn run(args: &[&str]) -> Ran {
    Ran::of(&uroce(args).output().unwrap())
}

/// What a run said.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Exit code; -1 when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ran {
    /// Of a finished process.
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout.clone()).unwrap(),
            err: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// Its one JSON document.
    pub(crate) fn json(&self) -> Value {
        let document: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(document["schema"], 1);
        document
    }

    /// Checks the exit code, and that a failure is told in one line that contains `text`.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, text: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains(text), "{self:?}");
        assert_eq!(self.err.trim_end().lines().count(), 1, "one clear line: {self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
    }
}

/// Runs `uroce` as a user without rights; `None` when this user may not become another.
pub(crate) fn as_nobody(args: &[&str]) -> Option<Ran> {
    // The binary may lie where others cannot reach it.
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("uroce");
    std::fs::copy(env!("CARGO_BIN_EXE_uroce"), &copy).unwrap();
    let open = |path: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(dir.path());
    open(&copy);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
    let output = command.arg(&copy).args(args).stdin(Stdio::null()).output().ok()?;
    let ran = Ran::of(&output);
    if ran.err.starts_with("setpriv:") { None } else { Some(ran) }
}

/// A `uroce` that serves in the background; killed if the test fails.
pub(crate) struct Server(Option<Child>);

impl Server {
    /// Starts `uroce` and waits until something listens on the TCP port.
    pub(crate) fn listening_on_tcp(args: &[&str], port: &str) -> Self {
        let port: u16 = port.parse().unwrap();
        let wanted = format!(":{port:04X} ");
        let server = Self::start(args);
        server.wait_until(|| {
            // A connection would be taken for the client's, so the list of sockets is asked. 0A is LISTEN.
            let sockets = ["/proc/net/tcp6", "/proc/net/tcp"].map(|f| std::fs::read_to_string(f).unwrap_or_default());
            sockets.iter().flat_map(|s| s.lines()).any(|l| l.contains(&wanted) && l.contains(" 0A "))
        })
    }

    /// Starts `uroce` and waits until it has UDP port 4791 of an IPv4 address.
    pub(crate) fn bound_to_roce(args: &[&str], address: &str) -> Self {
        let octets = address.parse::<std::net::Ipv4Addr>().unwrap().octets();
        // The list of sockets shows addresses as the machine stores them.
        let wanted = format!("{:08X}:12B7 ", u32::from_ne_bytes(octets));
        let server = Self::start(args);
        server.wait_until(|| std::fs::read_to_string("/proc/net/udp").unwrap_or_default().contains(&wanted))
    }

    fn start(args: &[&str]) -> Self {
        let child = uroce(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self(Some(child))
    }

    fn wait_until(mut self, ready: impl Fn() -> bool) -> Self {
        let begin = Instant::now();
        while !ready() {
            let child = self.0.as_mut().unwrap();
            let gone = child.try_wait().unwrap().is_some();
            if gone || begin.elapsed() > Duration::from_secs(20) {
                let _ = child.kill();
                panic!("the server did not begin: {:?}", self.end());
            }
            sleep(Duration::from_millis(5));
        }
        self
    }

    /// Waits for its end; one that waits for a client that will not come is killed, and shows as code -1.
    pub(crate) fn end(mut self) -> Ran {
        let begin = Instant::now();
        let mut child = self.0.take().unwrap();
        while child.try_wait().unwrap().is_none() {
            if begin.elapsed() > Duration::from_secs(60) {
                let _ = child.kill();
            }
            sleep(Duration::from_millis(5));
        }
        Ran::of(&child.wait_with_output().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
