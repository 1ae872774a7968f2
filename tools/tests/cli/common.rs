//! Runs `uroce` and reads what it says.

use std::net::{IpAddr, TcpListener};
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

/// Where the two ends of a test run: on this machine's loopback, or inside a namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a>(Option<&'a str>);

impl<'a> Place<'a> {
    /// This machine.
    pub(crate) const HERE: Place<'static> = Place(None);

    /// A network namespace.
    pub(crate) const fn inside(namespace: &'a str) -> Self {
        Self(Some(namespace))
    }

    fn uroce(self, args: &[&str]) -> Command {
        let Some(namespace) = self.0 else { return uroce(args) };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_uroce")]).args(args).stdin(Stdio::null());
        command
    }

    /// Runs `uroce` there to its end.
    pub(crate) fn run(self, args: &[&str]) -> Ran {
        Ran::of(&self.uroce(args).output().unwrap())
    }
}

/// A TCP port that is free now.
pub(crate) fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
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

    /// Checks that the command line was refused with `text` in the reason.
    #[track_caller]
    pub(crate) fn fails_with_usage(&self, text: &str) {
        assert_eq!(self.code, 2, "{self:?}");
        assert!(self.err.contains(text), "{self:?}");
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
        Self::at(Place::HERE, args).listens_on_tcp(port)
    }

    /// Starts `uroce` and waits until it has UDP port 4791 of an address.
    pub(crate) fn bound_to_roce(args: &[&str], address: &str) -> Self {
        Self::at(Place::HERE, args).has_roce(address)
    }

    /// Starts `uroce` and waits for nothing.
    pub(crate) fn at(place: Place<'_>, args: &[&str]) -> Self {
        Self::of(place.uroce(args))
    }

    /// Starts a command and waits for nothing.
    pub(crate) fn of(mut command: Command) -> Self {
        Self(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Sends it a signal, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.pid())]).status().unwrap();
        assert!(sent.success(), "{name}");
    }

    /// Waits until something listens on the TCP port, where the server is.
    pub(crate) fn listens_on_tcp(self, port: &str) -> Self {
        let port: u16 = port.parse().unwrap();
        let wanted = format!(":{port:04X} ");
        let sockets = ["tcp6", "tcp"].map(|table| self.sockets(table));
        self.wait_until(|| {
            // A connection would be taken for the client's, so the list of sockets is asked. 0A is LISTEN.
            let sockets = sockets.iter().map(|f| std::fs::read_to_string(f).unwrap_or_default());
            sockets.collect::<String>().lines().any(|l| l.contains(&wanted) && l.contains(" 0A "))
        })
    }

    /// Waits until UDP port 4791 of an address is taken, where the server is.
    pub(crate) fn has_roce(self, address: &str) -> Self {
        // The list of sockets shows addresses as the machine stores them, in words of four bytes.
        let (table, octets) = match address.parse().unwrap() {
            IpAddr::V4(ip) => ("udp", ip.octets().to_vec()),
            IpAddr::V6(ip) => ("udp6", ip.octets().to_vec()),
        };
        let words = octets.chunks_exact(4).map(|w| u32::from_ne_bytes(w.try_into().unwrap()));
        let wanted = words.map(|w| format!("{w:08X}")).collect::<String>() + ":12B7 ";
        let sockets = self.sockets(table);
        self.wait_until(|| std::fs::read_to_string(&sockets).unwrap_or_default().contains(&wanted))
    }

    /// A list of sockets of the server's network namespace.
    fn sockets(&self, table: &str) -> String {
        format!("/proc/{}/net/{table}", self.0.as_ref().unwrap().id())
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
