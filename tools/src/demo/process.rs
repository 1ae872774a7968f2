//! The peer's process, seen from the client's.
//!
//! Owns its start and its end. It never outlives the demo.

use core::net::IpAddr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::DemoArgs;
use crate::exit::Failure;

/// How long the peer may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to end once its client has parted.
const END: Duration = Duration::from_secs(5);

/// The running peer.
pub(super) struct Process {
    child: Child,
    stderr: Option<ChildStderr>,
    address: IpAddr,
}

impl Process {
    /// Starts this program again as the peer, and waits until it serves.
    pub(super) fn start(args: &DemoArgs) -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let mut child = Command::new(program)
            .args(["demo", "--serve", "--peer-device", &args.peer_device.to_string()])
            .args(["--loss", &args.loss.0.to_string(), "--seed", &args.seed.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let mut process = Self { child, stderr, address: IpAddr::from([0, 0, 0, 0]) };
        // Reading cannot be timed, so it has a thread, which ends with the peer.
        let (tell, hear) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            if let Some(stdout) = stdout {
                let _ = BufReader::new(stdout).read_line(&mut line);
            }
            let _ = tell.send(line);
        });
        let line = hear.recv_timeout(PATIENCE).unwrap_or_default();
        match line.trim().strip_prefix("ready ").and_then(|address| address.parse().ok()) {
            Some(address) => {
                process.address = address;
                Ok(process)
            }
            None => Err(process.explain(Failure::failed("the peer did not begin"))),
        }
    }

    /// Where it serves.
    pub(super) const fn address(&self) -> IpAddr {
        self.address
    }

    /// `failure`, or the peer's own if it has ended with one.
    pub(super) fn explain(&mut self, failure: Failure) -> Failure {
        let Some(code) = self.ended(Duration::from_millis(300)) else { return failure };
        let mut said = String::new();
        if let Some(mut stderr) = self.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        let said = said.lines().last().unwrap_or_default().trim_start_matches("uroce: ").to_owned();
        match code {
            Some(4) => Failure::Environment(said),
            Some(0) => failure,
            _ => Failure::Failed(format!("{failure}; the peer says: {said}")),
        }
    }

    /// Waits for the peer to end well.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        match self.ended(END) {
            Some(Some(0)) => Ok(()),
            Some(_) => Err(self.explain(Failure::failed("the peer failed"))),
            None => Err(Failure::failed("the peer did not end")),
        }
    }

    /// The exit code, once it has ended within `patience`; `None` inside for a signal.
    fn ended(&mut self, patience: Duration) -> Option<Option<i32>> {
        let begin = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status.code());
            }
            if begin.elapsed() >= patience {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
