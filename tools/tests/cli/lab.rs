//! Network namespaces for tests that need addresses, paths and filters of their own.
//!
//! Needs root (`cap_net_admin`, `cap_sys_admin`) and `ip`; without them the tests fail and say so.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::Place;

/// Runs a program that must succeed.
pub(crate) fn must(program: &str, line: &str) {
    let arguments: Vec<&str> = line.split_whitespace().collect();
    let output = Command::new(program).args(&arguments).output();
    let output = output.unwrap_or_else(|e| panic!("these tests need `{program}`: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`{program} {line}` failed (these tests need root and namespaces): {said}");
}

/// A network namespace, gone when dropped.
pub(crate) struct Namespace(String);

impl Namespace {
    /// With loopback up, and addresses that are usable at once.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let namespace = Self(format!("uroce-cli-{}-{n}", std::process::id()));
        must("ip", &format!("netns add {}", namespace.0));
        namespace.ip("link set lo up");
        namespace
    }

    /// `ip` inside it.
    pub(crate) fn ip(&self, line: &str) {
        must("ip", &format!("-n {} {line}", self.0));
    }

    /// For [`Place::run`].
    pub(crate) fn place(&self) -> Place<'_> {
        Place::inside(&self.0)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

/// A namespace whose loopback has two IPv6 addresses: a machine has but one.
pub(crate) struct Loopback(Namespace);

impl Loopback {
    /// Its addresses.
    pub(crate) const V6: [&'static str; 2] = ["fd77::1", "fd77::2"];

    pub(crate) fn new() -> Self {
        let namespace = Namespace::new();
        for address in Self::V6 {
            namespace.ip(&format!("addr add {address}/128 dev lo nodad"));
        }
        Self(namespace)
    }

    /// For [`Place::run`].
    pub(crate) fn place(&self) -> Place<'_> {
        self.0.place()
    }
}
