//! Two network namespaces joined by a veth pair, for benchmarks of what really crosses a link.
//!
//! Owns the namespaces: made with `ip`, gone when dropped. Needs root. Never moves a frame itself.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::udp::UdpDevice;
use uroce::device::{Device, DeviceError, enter_netns};

/// Name of the interface in each namespace.
pub const INTERFACE: &str = "v0";

/// The two namespaces. Side 0 has address 10.78.0.1, side 1 has 10.78.0.2.
pub struct Veth {
    names: [String; 2],
}

fn ip(line: &str) -> io::Result<()> {
    let output = Command::new("ip").args(line.split_whitespace()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let what = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("`ip {line}` (needs root): {what}")))
}

impl Veth {
    /// A pair with this MTU.
    ///
    /// # Errors
    /// `ip` is missing, or refuses.
    pub fn new(mtu: u32) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("uroce-bench-{}-{n}{side}", std::process::id());
        let veth = Self { names: [name('a'), name('b')] };
        let [a, b] = &veth.names;
        for ns in [a, b] {
            ip(&format!("netns add {ns}"))?;
            ip(&format!("-n {ns} link set lo up"))?;
        }
        ip(&format!("link add {INTERFACE} netns {a} mtu {mtu} type veth peer name {INTERFACE} netns {b} mtu {mtu}"))?;
        for (side, ns) in [a, b].into_iter().enumerate() {
            ip(&format!("-n {ns} addr add {}/24 dev {INTERFACE}", Self::address(side)))?;
            ip(&format!("-n {ns} link set {INTERFACE} up"))?;
        }
        Ok(veth)
    }

    /// The address of a side, 0 or 1.
    #[must_use]
    pub fn address(side: usize) -> IpAddr {
        Ipv4Addr::new(10, 78, 0, if side == 0 { 1 } else { 2 }).into()
    }

    /// Runs `f` on a thread in the namespace of a side. What it opens there stays there.
    ///
    /// # Panics
    /// When `f` does, or the namespace cannot be entered.
    pub fn inside<T: Send>(&self, side: usize, f: impl FnOnce() -> T + Send) -> T {
        let path = PathBuf::from("/run/netns").join(&self.names[side.min(1)]);
        std::thread::scope(|s| {
            let thread = s.spawn(|| {
                enter_netns(&path).expect("entering a network namespace needs root");
                f()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A device of a side: `udp` or `packet`.
    ///
    /// # Errors
    /// [`DeviceError`]; [`DeviceError::Closed`] for another kind.
    pub fn open(&self, side: usize, kind: &str) -> Result<Box<dyn Device>, DeviceError> {
        self.inside(side, || -> Result<Box<dyn Device>, DeviceError> {
            match kind {
                "udp" => Ok(Box::new(UdpDevice::open(Self::address(side))?)),
                "packet" => Ok(Box::new(AfPacket::open(AfPacketConfig::shared(INTERFACE))?)),
                _ => Err(DeviceError::Closed),
            }
        })
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        for ns in &self.names {
            let _ = Command::new("ip").args(["netns", "del", ns]).output();
        }
    }
}
