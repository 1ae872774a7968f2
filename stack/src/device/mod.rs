//! Devices: what moves frames.
//!
//! Owns the trait [`Device`] and its kinds. A wrapper (faults, taps) is a `Device` around a `Device`. Never knows a QP.

pub mod af_packet;
pub mod af_xdp;
mod ethernet;
pub mod fault;
mod filter;
pub mod impair;
mod intercept;
pub mod loopback;
pub mod netlink;
pub mod pcap;
#[cfg(feature = "pnet")]
pub mod pnet;
pub mod probe;
pub(crate) mod sys;
pub mod tap;
#[cfg(test)]
pub(crate) mod testing;
pub mod udp;

use core::net::IpAddr;
use std::os::fd::RawFd;

pub use self::intercept::{Direction, FLIPS_MAX, HELD_MAX, Intercepted, Judge, Verdict};
pub use self::sys::affinity::{CpuSet, PinError, allowed_cpus, pin_current_thread, thread_cpu_time};
pub use self::sys::netns::enter_netns;
pub use crate::burst::IcrcMode;
use crate::burst::{Medium, RxBurst, TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::types::{MacAddr, PathMtu};

/// Multicast groups that a device joins at most: each costs a socket.
pub const GROUPS_MAX: usize = 64;

/// What a device can do.
#[derive(Clone, Debug)]
pub struct DeviceCapabilities {
    /// What it sends.
    pub medium: Medium,
    /// Bytes of an IP packet: the interface's MTU.
    pub mtu: usize,
    /// Largest path MTU that fits.
    pub path_mtu: PathMtu,
    /// Segments a transmit burst may have.
    pub segments_max: usize,
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
    /// Addresses that it receives for; they become the GID table, in order.
    pub addresses: Vec<IpAddr>,
    /// Link address, where there is one.
    pub mac: Option<MacAddr>,
    /// For people: e.g. `udp:127.0.0.1`.
    pub name: String,
}

/// Sink of received bursts.
pub type RxSink<'a> = dyn FnMut(RxBurst<'_>) + 'a;
/// Source of bursts to send: fills the room, or has nothing more.
pub type TxSource<'a> = dyn FnMut(TxRoom<'_>) -> Option<TxBurst> + 'a;

/// Moves bursts. All calls return at once; [`Device::wait`] is the only one that sleeps.
pub trait Device: Send {
    /// What it can do; constant for its life.
    fn capabilities(&self) -> &DeviceCapabilities;

    /// Hands at most `budget` received bursts to `sink`; returns how many.
    ///
    /// # Errors
    /// [`DeviceError`]: the device is broken, not the packet.
    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError>;

    /// Lets `source` fill free slots until it returns `None`, the budget is spent or there is no slot; returns how many
    /// bursts were taken. What was taken is sent before the call returns, kept and sent first by the next call, or
    /// counted as lost.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError>;

    /// Whether it is certain, without a system call, that nothing waits to be received and nothing that was taken waits to be
    /// sent: then a look at the device can be left out. `false` where only [`Device::receive`] can tell. Timers are not
    /// meant: [`Device::poll_timeout`] tells of those.
    fn is_idle(&mut self) -> bool {
        false
    }

    /// When the device itself wants to be called again (delayed packets, neighbour resolution), whatever arrives.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// UDP source ports that it can send from; empty: any. The ICRC covers the port, so it must be known before the
    /// bytes are made: a flow takes one of these, by whatever spreads flows.
    fn source_ports(&self) -> &[u16] {
        &[]
    }

    /// Bytes of packets that may wait to be received without loss, if it knows. What a peer has is unknown; as a rule it is
    /// no less, so a window wider than this loses packets whenever the other side is busy for a moment.
    fn receive_room(&self) -> Option<usize> {
        None
    }

    /// Receives for an IP multicast group from now on, or no more. A device that hears every group (the default) has nothing
    /// to do. At most [`GROUPS_MAX`] groups. To join twice is to join once. Call it from the network namespace that the
    /// device was opened in.
    ///
    /// # Errors
    /// [`DeviceError::Membership`]: this group cannot be joined; the device is as good as before.
    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        let _ = (group, member);
        Ok(())
    }

    /// A descriptor that becomes readable when bursts wait, for `poll(2)`; [`Device::arm`] comes before each sleep on it.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    /// To be called before a sleep on the descriptor: from now on it becomes readable when bursts come. Says whether some
    /// wait already, in which case it need not. A socket's descriptor needs no such call; a device in memory, whose peers
    /// would make a system call for each burst otherwise, does.
    fn arm(&mut self) -> bool {
        false
    }

    /// Sleeps until bursts wait or `timeout` passes (`None`: for ever). A device without a descriptor may return early.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError>;

    /// Bursts that were taken and could not be sent, and frames dropped before the endpoint saw them.
    fn lost(&self) -> DeviceLosses {
        DeviceLosses::default()
    }
}

/// A device whose kind is chosen at run time.
impl<D: Device + ?Sized> Device for Box<D> {
    fn capabilities(&self) -> &DeviceCapabilities {
        (**self).capabilities()
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        (**self).receive(now, budget, sink)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        (**self).transmit(now, budget, source)
    }

    fn is_idle(&mut self) -> bool {
        (**self).is_idle()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        (**self).poll_timeout()
    }

    fn source_ports(&self) -> &[u16] {
        (**self).source_ports()
    }

    fn receive_room(&self) -> Option<usize> {
        (**self).receive_room()
    }

    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        (**self).set_membership(group, member)
    }

    fn descriptor(&self) -> Option<RawFd> {
        (**self).descriptor()
    }

    fn arm(&mut self) -> bool {
        (**self).arm()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        (**self).wait(timeout)
    }

    fn lost(&self) -> DeviceLosses {
        (**self).lost()
    }
}

/// What a device lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLosses {
    /// Bursts taken and not sent (no buffer, no neighbour).
    pub transmit: u64,
    /// Frames that were for us and were not RoCEv2 as it must be (fragment, options, bad length), or that the system had no
    /// room for, where it says so.
    pub receive: u64,
}

/// A device is broken or cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No interface has this name.
    #[error("no interface {name}; `ip link` lists them")]
    NoInterface {
        /// Asked for.
        name: String,
    },
    /// The address is not one of this machine.
    #[error("{address} is not an address of this machine; `ip addr` lists them")]
    NotOurAddress {
        /// Asked for.
        address: IpAddr,
    },
    /// UDP 4791 is taken on this address.
    #[error(
        "UDP port 4791 of {address} is in use by another process; give each process its own address, e.g. 127.0.0.2"
    )]
    PortInUse {
        /// Asked for.
        address: IpAddr,
    },
    /// The interface is down.
    #[error("interface {name} is down; `ip link set {name} up`")]
    InterfaceDown {
        /// Interface.
        name: String,
    },
    /// The interface carries no Ethernet frames (loopback, tunnel).
    #[error("interface {name} is not Ethernet; use a udp: device")]
    NotEthernet {
        /// Interface.
        name: String,
    },
    /// An endpoint cannot have this MAC.
    #[error("{mac} is not a unicast MAC; take one such as 02:00:00:00:00:01")]
    NotOurMac {
        /// Asked for.
        mac: MacAddr,
    },
    /// The process lacks a capability.
    #[error(
        "opening {what} needs {capability}; run as root, or `setcap {capability}+ep` the program, or use a udp: device"
    )]
    MissingCapability {
        /// What was opened.
        what: String,
        /// E.g. `cap_net_raw`.
        capability: &'static str,
    },
    /// The interface carries no address to use.
    #[error("interface {name} has no usable address; `ip addr add` one")]
    NoAddress {
        /// Interface.
        name: String,
    },
    /// The interface's MTU is too small for the smallest path MTU.
    #[error("interface {name} has MTU {mtu}, at least 336 is needed")]
    MtuTooSmall {
        /// Interface.
        name: String,
        /// Its MTU.
        mtu: usize,
    },
    /// The system has no TUN/TAP driver.
    #[error("there is no usable /dev/net/tun; `modprobe tun`, or give the container that device")]
    NoTun,
    /// Only root may open the TUN/TAP driver.
    #[error(
        "/dev/net/tun may not be opened; `chmod 666 /dev/net/tun`, as most systems have it (each interface says who may \
         attach), or run as root"
    )]
    TunNotPermitted,
    /// The user may not make this TAP, or not attach to it.
    #[error(
        "TAP {name} needs cap_net_admin; run as root, or `setcap cap_net_admin+ep` the program, or let root make it for \
         your user: `ip tuntap add dev {name} mode tap user USER && ip link set {name} up`"
    )]
    TapNotPermitted {
        /// The interface.
        name: String,
    },
    /// Another process is attached to the TAP.
    #[error("TAP {name} is in use by another process; give each endpoint a TAP of its own")]
    TapInUse {
        /// The interface.
        name: String,
    },
    /// The interface is something else.
    #[error("interface {name} is no TAP; take another name, or `packet:{name}`")]
    NotTap {
        /// The interface.
        name: String,
    },
    /// The kernel's end of a TAP has this MAC.
    #[error("{mac} is the kernel's own on {name}; an endpoint behind a TAP needs one of its own")]
    MacTaken {
        /// Asked for.
        mac: MacAddr,
        /// The interface.
        name: String,
    },
    /// The kernel's end of a TAP has this address.
    #[error("{address} is the kernel's own on {name}; an endpoint behind a TAP needs one of its own")]
    AddressTaken {
        /// Asked for.
        address: IpAddr,
        /// The interface.
        name: String,
    },
    /// The kernel or the driver has no AF_XDP as it was asked for.
    #[error("AF_XDP does not work on {interface}: {tried}; a packet: device needs none of this")]
    NoXdp {
        /// Interface.
        interface: String,
        /// What was tried, and where each attempt ended.
        tried: af_xdp::XdpAttempts,
    },
    /// A multicast group cannot be joined.
    #[error("joining multicast group {group}: {source}")]
    Membership {
        /// The group.
        group: IpAddr,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A thread that moves frames was not bound to its processor.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Anything else the system says.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The other end is gone.
    #[error("the device is closed")]
    Closed,
}
