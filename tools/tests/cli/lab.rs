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

    /// Lets it pass packets on.
    pub(crate) fn forwards(&self) {
        // A copy of a file: no shell and no sysctl is needed.
        let one = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&one, "1").unwrap();
        let from = one.path().display();
        must("ip", &format!("netns exec {} cp {from} /proc/sys/net/ipv4/ip_forward", self.0));
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

/// Two namespaces and a link between them: 10.77.0.1 and fd77::1 in `a`, .2 and ::2 in `b`, both on `v0`.
pub(crate) struct Link {
    pub(crate) a: Namespace,
    pub(crate) b: Namespace,
}

impl Link {
    /// A link that carries RoCEv2 with a path MTU of 1024.
    pub(crate) fn new() -> Self {
        let (a, b) = (Namespace::new(), Namespace::new());
        must("ip", &format!("link add v0 netns {} type veth peer name v0 netns {}", a.0, b.0));
        for (namespace, host) in [(&a, 1), (&b, 2)] {
            namespace.ip(&format!("addr add 10.77.0.{host}/24 dev v0"));
            namespace.ip(&format!("addr add fd77::{host}/64 dev v0 nodad"));
            namespace.ip("link set v0 up");
        }
        Self { a, b }
    }
}

/// A third namespace `c` behind `b`: 10.78.0.3 at the end of a link that carries packets of `mtu` bytes.
pub(crate) struct Path {
    pub(crate) link: Link,
    pub(crate) c: Namespace,
}

impl Path {
    pub(crate) fn new(mtu: usize) -> Self {
        let (link, c) = (Link::new(), Namespace::new());
        must("ip", &format!("link add v1 netns {} type veth peer name v1 netns {}", link.b.0, c.0));
        for (namespace, host) in [(&link.b, 2), (&c, 3)] {
            namespace.ip(&format!("addr add 10.78.0.{host}/24 dev v1"));
            namespace.ip("link set v1 up");
        }
        link.b.ip(&format!("link set v1 mtu {mtu}"));
        link.b.forwards();
        link.a.ip("route add 10.78.0.0/24 via 10.77.0.2");
        c.ip("route add 10.77.0.0/24 via 10.78.0.2");
        Self { link, c }
    }
}
