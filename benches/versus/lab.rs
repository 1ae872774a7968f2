//! Two network namespaces with a veth pair between them, and programs that run in them on chosen processors.
//!
//! Owns the namespaces, a folder with the programs, and every process that it starts: all end with the value. Never
//! interprets what a program prints.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::Error;

/// MTU of the pair.
pub(crate) const MTU: usize = 9000;
/// How long a server may take to be ready.
const READY: Duration = Duration::from_secs(10);
/// How long a server that says nothing when it is ready is given.
const GRACE: Duration = Duration::from_millis(250);
/// How long a server may go on when its client has ended.
const AFTERGLOW: Duration = Duration::from_secs(3);

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Signals end the run in order, so that nothing is left behind.
pub(crate) fn watch_signals() -> Result<(), Error> {
    let stop = STOP.get_or_init(Arc::default);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(stop))?;
    }
    Ok(())
}

/// Fails when a signal has come.
pub(crate) fn check_signals() -> Result<(), Error> {
    match STOP.get() {
        Some(stop) if stop.load(Ordering::SeqCst) => Err("stopped by a signal".into()),
        _ => Ok(()),
    }
}

/// One end of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Where servers run.
    A,
    /// Where clients run.
    B,
}

impl End {
    fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }

    /// Its interface.
    pub(crate) fn interface(self) -> String {
        format!("v{}", self.letter())
    }

    /// Its address.
    pub(crate) fn address(self) -> &'static str {
        match self {
            Self::A => "10.98.0.1",
            Self::B => "10.98.0.2",
        }
    }

    /// Its TAP, and the address of an endpoint behind it.
    pub(crate) fn tap(self) -> (&'static str, &'static str) {
        match self {
            Self::A => ("ta", "10.98.1.1"),
            Self::B => ("tb", "10.98.1.2"),
        }
    }

    /// Address and MAC of an endpoint beside the kernel.
    pub(crate) fn own(self) -> (&'static str, &'static str) {
        match self {
            Self::A => ("10.98.0.11", "02:98:00:00:00:11"),
            Self::B => ("10.98.0.12", "02:98:00:00:00:12"),
        }
    }
}

/// A program to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    end: End,
    cores: String,
    nobody: bool,
    words: Vec<String>,
    environment: Vec<(&'static str, String)>,
    ready: Option<&'static str>,
}

impl Job {
    /// `words` in the namespace of `end`, on one processor: servers on the first, clients on the second.
    pub(crate) fn new(end: End, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let core = if end == End::A { "0" } else { "1" };
        let words = words.into_iter().map(Into::into).collect();
        Self { end, cores: core.into(), nobody: false, words, environment: Vec::new(), ready: None }
    }

    /// On these processors.
    pub(crate) fn on(mut self, cores: &str) -> Self {
        self.cores = cores.into();
        self
    }

    /// As uid nobody, without any capability.
    pub(crate) fn unprivileged(mut self, nobody: bool) -> Self {
        self.nobody = nobody;
        self
    }

    /// With a variable.
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Is ready when it prints a line with this.
    pub(crate) fn ready_at(mut self, text: &'static str) -> Self {
        self.ready = Some(text);
        self
    }
}

/// What a program printed.
pub(crate) struct Ran {
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// The JSON in what it printed.
    pub(crate) fn json(&self) -> Result<serde_json::Value, Error> {
        let begin = self.out.find('{').ok_or_else(|| format!("no JSON: {}{}", self.out, self.err))?;
        let mut values = serde_json::Deserializer::from_str(&self.out[begin..]).into_iter();
        values.next().ok_or("no JSON")?.map_err(Into::into)
    }
}

/// A process whose output is being read; it ends with the value.
pub(crate) struct Running {
    child: Child,
    name: String,
    out: Arc<Mutex<String>>,
    readers: Vec<std::thread::JoinHandle<String>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn wait_ready(&mut self, text: Option<&str>) -> Result<(), Error> {
        let begin = Instant::now();
        let Some(text) = text else {
            std::thread::sleep(GRACE);
            return Ok(());
        };
        while !self.out.lock().unwrap_or_else(PoisonError::into_inner).contains(text) {
            if self.child.try_wait()?.is_some() || begin.elapsed() > READY {
                let ran = self.finish(Duration::ZERO).err().map_or_else(String::new, |e| e.to_string());
                return Err(format!("{} did not start: {ran}", self.name).into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Waits for its end and takes what it printed; kills it when the time is up.
    fn finish(&mut self, patience: Duration) -> Result<Ran, Error> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(1);
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break Some(status);
            }
            if begin.elapsed() >= patience || check_signals().is_err() {
                self.child.kill()?;
                self.child.wait()?;
                break None;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        };
        let err = self.readers.pop().and_then(|r| r.join().ok()).unwrap_or_default();
        let out = self.readers.pop().and_then(|r| r.join().ok()).unwrap_or_default();
        match status {
            Some(status) if status.success() => Ok(Ran { out, err }),
            Some(status) => Err(format!("{} ended with {status}: {}{}", self.name, tail(&out), tail(&err)).into()),
            None => Err(format!("{} took more than {patience:?}: {}{}", self.name, tail(&out), tail(&err)).into()),
        }
    }
}

fn tail(text: &str) -> String {
    let from = text.char_indices().rev().nth(400).map_or(0, |(i, _)| i);
    text[from..].trim().replace('\n', " | ")
}

/// The two namespaces.
pub(crate) struct Lab {
    tag: String,
    folder: PathBuf,
    itself: PathBuf,
}

impl Drop for Lab {
    fn drop(&mut self) {
        for end in [End::A, End::B] {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(end)]).output();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Lab {
    /// Makes them.
    pub(crate) fn new() -> Result<Self, Error> {
        let itself = std::env::current_exe()?;
        let tag = format!("versus{}", std::process::id());
        let folder = std::env::temp_dir().join(&tag);
        fs::create_dir_all(&folder)?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
        let lab = Self { tag, folder, itself };
        lab.take_programs()?;
        let [a, b] = [End::A, End::B].map(|end| lab.namespace(end));
        for namespace in [&a, &b] {
            ip(&["netns", "add", namespace])?;
        }
        let mtu = MTU.to_string();
        ip(&["link", "add", "va", "netns", &a, "type", "veth", "peer", "name", "vb", "netns", &b])?;
        for (end, namespace) in [(End::A, &a), (End::B, &b)] {
            let (interface, address) = (end.interface(), format!("{}/24", end.address()));
            ip(&["-n", namespace, "addr", "add", &address, "dev", &interface])?;
            ip(&["-n", namespace, "link", "set", &interface, "mtu", &mtu, "up"])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
            // TAPs meet over a second pair: a bridge's port carries no addresses.
            let (bridge, far) = (format!("br{}", end.letter()), format!("w{}", end.letter()));
            if end == End::A {
                ip(&["link", "add", "wa", "netns", &a, "type", "veth", "peer", "name", "wb", "netns", &b])?;
            }
            ip(&["-n", namespace, "link", "add", &bridge, "type", "bridge", "mcast_snooping", "0"])?;
            ip(&["-n", namespace, "tuntap", "add", end.tap().0, "mode", "tap", "vnet_hdr"])?;
            for port in [far.as_str(), end.tap().0] {
                ip(&["-n", namespace, "link", "set", port, "mtu", &mtu, "master", &bridge, "up"])?;
            }
            ip(&["-n", namespace, "link", "set", &bridge, "mtu", &mtu, "up"])?;
            // The connection loop needs ports.
            lab.run(&Job::new(end, ["sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=1024 65000"]), GRACE * 8)?;
        }
        Ok(lab)
    }

    /// Copies uroce and the raw program where everyone may run them.
    fn take_programs(&self) -> Result<(), Error> {
        let examples = self.itself.parent().ok_or("no folder")?;
        let built = examples.parent().ok_or("no folder")?;
        for (from, name) in [
            (built.join("uroce"), "uroce"),
            (examples.join("raw"), "raw"),
            (examples.join("connections"), "connections"),
            (self.itself.clone(), "versus"),
        ] {
            let to = self.folder.join(name);
            fs::copy(&from, &to).map_err(|e| format!("{}: {e}; run.sh builds it", from.display()))?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// The path of one of our own programs.
    pub(crate) fn program(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn namespace(&self, end: End) -> String {
        format!("{}{}", self.tag, end.letter())
    }

    /// Starts a program and waits until it is ready.
    pub(crate) fn start(&self, job: &Job) -> Result<Running, Error> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(job.end), "taskset", "-c", &job.cores]);
        if job.nobody {
            command.args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
        }
        command.args(&job.words).envs(job.environment.iter().map(|(k, v)| (*k, v.as_str())));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let out = Arc::new(Mutex::new(String::new()));
        let (stdout, stderr) = (child.stdout.take().ok_or("no output")?, child.stderr.take().ok_or("no output")?);
        let readers = vec![
            std::thread::spawn({
                let seen = Arc::clone(&out);
                move || collect(stdout, Some(&seen))
            }),
            std::thread::spawn(move || collect(stderr, None)),
        ];
        let name = job.words.iter().map(|w| Path::new(w).file_name().map_or(w.clone(), |n| n.to_string_lossy().into()));
        let name = name.collect::<Vec<_>>().join(" ");
        Ok(Running { child, name, out, readers })
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, job: &Job, patience: Duration) -> Result<Ran, Error> {
        self.start(job)?.finish(patience)
    }

    /// Runs a client beside its server. Returns what both printed; a server that does not end by itself printed nothing.
    pub(crate) fn pair(&self, server: &Job, client: &Job, patience: Duration) -> Result<(Ran, Option<Ran>), Error> {
        let mut serving = self.start(server)?;
        serving.wait_ready(server.ready)?;
        let ran = self.run(client, patience);
        match ran {
            Ok(ran) => Ok((ran, serving.finish(AFTERGLOW).ok())),
            Err(e) => {
                let server = serving.finish(Duration::from_millis(200)).err();
                Err(server.map_or_else(|| e.to_string(), |s| format!("{e}; its server: {s}")).into())
            }
        }
    }
}

fn collect(from: impl Read, seen: Option<&Mutex<String>>) -> String {
    let mut all = String::new();
    let mut lines = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match lines.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return all,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&line);
        all.push_str(&line);
        if let Some(seen) = seen {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push_str(&line);
        }
    }
}

fn ip(words: &[&str]) -> Result<(), Error> {
    let ran = Command::new("ip").args(words).output()?;
    if ran.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", words.join(" "), String::from_utf8_lossy(&ran.stderr).trim()).into())
}
