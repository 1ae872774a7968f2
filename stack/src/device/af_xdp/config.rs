//! How an AF_XDP device shall be, how it came to be, and why it could not.
//!
//! Owns the values and the words for the kernel's refusals. Opens nothing.

use core::fmt;
use core::net::IpAddr;
use std::io;

use crate::device::IcrcMode;
use crate::device::ethernet::AddressMode;
use crate::types::MacAddr;
use crate::wire::VlanTag;

/// Receive queues of one device. Frames of further queues take the way through the kernel.
pub const QUEUES_MAX: u32 = 16;

/// Where the filter shall run, and whether frames shall be copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// The fastest that works: native without a copy, native, generic.
    #[default]
    Auto,
    /// In the driver, without a copy if it can that.
    Native,
    /// In the kernel behind the driver, which need know nothing of XDP.
    Generic,
}

/// Which receive queues of the interface the device reads. What arrives in others still reaches it, more slowly, through
/// the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpQueues {
    /// All, at most [`QUEUES_MAX`].
    #[default]
    All,
    /// This one: for an interface that steers flows (`ethtool -N`).
    One(u32),
    /// The first so many, at most [`QUEUES_MAX`].
    First(u32),
}

/// How an [`AfXdp`](super::AfXdp) device shall be.
#[derive(Clone, Debug)]
pub struct AfXdpConfig {
    /// Name of the interface.
    pub interface: String,
    /// Whose addresses.
    pub addresses: AddressMode,
    /// The VLAN to be on, by a tag in each frame. The filter sees only tags that the interface leaves in the frame; with
    /// `rx-vlan-offload` on, frames of the VLAN take the way through the kernel.
    pub vlan: Option<VlanTag>,
    /// Where the filter runs.
    pub mode: XdpMode,
    /// Which queues.
    pub queues: XdpQueues,
    /// Microseconds for which a receive that finds nothing polls the interface itself (`SO_PREFER_BUSY_POLL`): for one who
    /// polls all the time on a core of his own. Needs `cap_net_admin`.
    pub busy_poll: Option<u32>,
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
}

impl AfXdpConfig {
    /// Beside the kernel on `interface`, untagged, all queues, the fastest mode.
    #[must_use]
    pub fn shared(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            addresses: AddressMode::Shared,
            vlan: None,
            mode: XdpMode::Auto,
            queues: XdpQueues::All,
            busy_poll: None,
            icrc: IcrcMode::Check,
        }
    }

    /// The same with a MAC and addresses of its own.
    #[must_use]
    pub fn own(interface: impl Into<String>, mac: MacAddr, addresses: Vec<IpAddr>) -> Self {
        Self { addresses: AddressMode::Own { mac, addresses }, ..Self::shared(interface) }
    }
}

/// A way in which the kernel can run a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpWay {
    /// The filter runs in the driver.
    pub native: bool,
    /// Frames travel without a copy.
    pub zero_copy: bool,
}

impl XdpWay {
    /// The ways that `mode` allows, the fastest first.
    pub(super) fn of(mode: XdpMode) -> &'static [Self] {
        const WAYS: [XdpWay; 3] = [
            XdpWay { native: true, zero_copy: true },
            XdpWay { native: true, zero_copy: false },
            XdpWay { native: false, zero_copy: false },
        ];
        match mode {
            XdpMode::Auto => &WAYS,
            XdpMode::Native => &WAYS[..2],
            XdpMode::Generic => &WAYS[2..],
        }
    }
}

impl fmt::Display for XdpWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.native, self.zero_copy) {
            (true, true) => "native, zero-copy",
            (true, false) => "native, copy",
            (false, _) => "generic, copy",
        })
    }
}

/// What was asked of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum XdpStep {
    /// To take the filter.
    Program,
    /// To run it on the interface.
    Attach,
    /// For a socket.
    Socket,
    /// To take its memory.
    Memory,
    /// For its rings.
    Rings,
    /// To poll when we do.
    BusyPoll,
    /// To give it a queue.
    Bind {
        /// Which one.
        queue: u32,
    },
}

/// A way that did not work.
#[derive(Debug)]
pub struct XdpAttempt {
    /// The way.
    pub way: XdpWay,
    /// Where it ended.
    pub step: XdpStep,
    /// The system's answer.
    pub source: io::Error,
}

impl XdpAttempt {
    /// What is lacking, where the answer says it.
    fn lacking(&self) -> Option<&'static str> {
        let code = self.source.raw_os_error()?;
        Some(match (self.step, code) {
            (XdpStep::Program, libc::ENOSYS | libc::EINVAL) => "the kernel has no BPF, or one older than 6.6",
            (XdpStep::Attach, libc::EBUSY | libc::EEXIST) => {
                "another XDP program is on the interface; end its owner, or `ip link set dev IFNAME xdp off`"
            }
            (XdpStep::Attach, libc::EOPNOTSUPP) if self.way.native => "the driver has no XDP",
            (XdpStep::Attach, libc::EINVAL | libc::ERANGE | libc::EMSGSIZE | libc::E2BIG) if self.way.native => {
                "the driver cannot run XDP as the interface is set up: a smaller MTU, fewer queues or offloads may help; \
                 the kernel's log says which"
            }
            (XdpStep::Socket, libc::EAFNOSUPPORT) => "the kernel has no AF_XDP (CONFIG_XDP_SOCKETS)",
            (XdpStep::Memory, libc::ENOBUFS | libc::ENOMEM) => {
                "the limit of locked memory is too small; `ulimit -l unlimited`, or `setcap cap_ipc_lock+ep` the program"
            }
            (XdpStep::Bind { .. }, libc::EBUSY) => "another AF_XDP socket has this queue",
            (XdpStep::Bind { .. }, libc::EOPNOTSUPP) if self.way.zero_copy => "the driver has no zero-copy",
            (XdpStep::Bind { .. }, libc::EOPNOTSUPP | libc::EINVAL) => {
                "there is no such queue, or, at a large MTU, no frames in several buffers (Linux 6.6)"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for XdpAttempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.way)?;
        match self.step {
            XdpStep::Program => f.write_str("loading the filter")?,
            XdpStep::Attach => f.write_str("attaching the filter")?,
            XdpStep::Socket => f.write_str("opening a socket")?,
            XdpStep::Memory => f.write_str("registering memory")?,
            XdpStep::Rings => f.write_str("mapping the rings")?,
            XdpStep::BusyPoll => f.write_str("setting up busy polling")?,
            XdpStep::Bind { queue } => write!(f, "binding queue {queue}")?,
        }
        write!(f, ": {}", self.source)?;
        self.lacking().map_or(Ok(()), |lacking| write!(f, " ({lacking})"))
    }
}

/// All ways that were tried.
#[derive(Debug)]
pub struct XdpAttempts(pub Vec<XdpAttempt>);

impl fmt::Display for XdpAttempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, attempt) in self.0.iter().enumerate() {
            write!(f, "{}{attempt}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_named_for_each_way() {
        let attempt = |way, step, code| XdpAttempt { way, step, source: io::Error::from_raw_os_error(code) };
        let [zero_copy, native, generic] = XdpWay::of(XdpMode::Auto) else { panic!("three ways") };
        let tried = XdpAttempts(vec![
            attempt(*zero_copy, XdpStep::Bind { queue: 3 }, libc::EOPNOTSUPP),
            attempt(*native, XdpStep::Attach, libc::EOPNOTSUPP),
            attempt(*generic, XdpStep::Attach, libc::EBUSY),
        ])
        .to_string();
        let lines: Vec<&str> = tried.split("; ").collect();
        assert!(lines[0].starts_with("native, zero-copy: binding queue 3: "), "{tried}");
        assert!(lines[0].ends_with("(the driver has no zero-copy)"), "{tried}");
        assert!(lines[1].starts_with("native, copy: ") && lines[1].ends_with("(the driver has no XDP)"), "{tried}");
        assert!(lines[2].starts_with("generic, copy: ") && tried.contains("xdp off"), "{tried}");
    }
}
