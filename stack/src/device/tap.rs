//! The TAP device: an endpoint behind an interface of the kernel, as a virtual machine is.
//!
//! Owns the TAP and the one slot of each direction: a frame, or a superframe, is one system call. The endpoint has a MAC
//! and addresses of its own; its peers are the kernel itself, and whoever a bridge or a route connects the interface with.
//! To attach to a TAP that was made for the user needs no privilege. Never knows a QP.

use core::net::IpAddr;
use core::ops::Range;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};

use super::ethernet::vnet::{VNET_HEADER, segment_of};
use super::ethernet::{AddressMode, EthernetPort, Framing, Placed, Setup};
use super::netlink::InterfaceFacts;
use super::sys::packet::FRAME_MAX;
use super::sys::poll::{Watch, wait};
use super::sys::tap::{self, TapError};
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, IcrcMode, RxSink, TxSource};
use crate::neighbor::NeighborCounters;
use crate::raw::Piece;
use crate::time::{Duration, Instant};
use crate::types::MacAddr;
use crate::wire::VlanTag;

/// Segments a superframe: as many as every kernel takes that takes superframes from a TAP at all.
pub const SEGMENTS_MAX: usize = 64;
/// Frames that one receive takes up without handing one on.
const FOREIGN_A_CALL: usize = 64;
/// Errors in a row that a receive passes over.
const ERRORS_PASSED: usize = 8;
/// How soon a frame that the system did not take is offered again.
const RETRY_AFTER: Duration = Duration::from_micros(200);
/// How a [`TapDevice`] shall be.
#[derive(Clone, Debug)]
pub struct TapConfig {
    /// Name of the interface. If there is none, it is made, and taken up.
    pub name: String,
    /// The endpoint's MAC, which is not that of the interface: the kernel's end has one, too.
    pub mac: MacAddr,
    /// The endpoint's addresses, in the order of the GID table; none of them the kernel's.
    pub addresses: Vec<IpAddr>,
    /// The VLAN to be on, by a tag in each frame.
    pub vlan: Option<VlanTag>,
    /// Bytes of an IP packet; `None`: what the interface has (a new one: 1500).
    pub mtu: Option<usize>,
    /// Whether an interface that is made here stays when the device is closed.
    pub persistent: bool,
    /// Segments a superframe, 1 (none are sent) to [`SEGMENTS_MAX`].
    pub segments_max: usize,
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
}

impl TapConfig {
    /// A TAP called `name`, gone with the device if it was not there before.
    #[must_use]
    pub fn new(name: impl Into<String>, mac: MacAddr, addresses: Vec<IpAddr>) -> Self {
        Self {
            name: name.into(),
            mac,
            addresses,
            vlan: None,
            mtu: None,
            persistent: false,
            segments_max: SEGMENTS_MAX,
            icrc: IcrcMode::Check,
        }
    }
}

/// A TAP as a device.
pub struct TapDevice {
    port: EthernetPort,
    tap: tap::Tap,
    rx: Piece,
    tx: Piece,
    /// A frame in `tx` that the system did not take, and when it is offered again.
    waiting: Option<(Range<usize>, Instant)>,
}

impl TapDevice {
    /// Opens the device.
    ///
    /// # Errors
    /// [`DeviceError::NoTun`], [`DeviceError::TunNotPermitted`], [`DeviceError::TapNotPermitted`],
    /// [`DeviceError::TapInUse`], [`DeviceError::NotTap`], [`DeviceError::InterfaceDown`] (one that was there before),
    /// [`DeviceError::NotOurMac`], [`DeviceError::MacTaken`], [`DeviceError::AddressTaken`],
    /// [`DeviceError::NoAddress`], [`DeviceError::MtuTooSmall`], [`DeviceError::Io`].
    pub fn open(config: TapConfig) -> Result<Self, DeviceError> {
        let TapConfig { name, mac, addresses, vlan, mtu, persistent, segments_max, icrc } = config;
        let existed = InterfaceFacts::all()?.into_iter().any(|i| i.name == name);
        let tap = tap::Tap::open(&name).map_err(|e| open_error(&name, e))?;
        let told = |action| {
            let name = name.clone();
            move |source: io::Error| match source.kind() {
                io::ErrorKind::PermissionDenied => DeviceError::TapNotPermitted { name },
                _ => DeviceError::Io { action, source },
            }
        };
        if let Some(mtu) = mtu
            && InterfaceFacts::of(&name)?.mtu != mtu
        {
            tap::set_mtu(&name, mtu).map_err(told("setting the MTU of a TAP"))?;
        }
        if !existed {
            tap::set_up(&name).map_err(told("taking a TAP up"))?;
            if persistent {
                tap.set_persistent(true).map_err(told("keeping a TAP"))?;
            }
        }
        let facts = InterfaceFacts::of(&name)?;
        if facts.mac == Some(mac) {
            return Err(DeviceError::MacTaken { mac, name });
        }
        if let Some(&address) = addresses.iter().find(|a| facts.addresses.iter().any(|own| own.0 == **a)) {
            return Err(DeviceError::AddressTaken { address, name });
        }
        let setup = Setup::of(facts, &AddressMode::Own { mac, addresses }, vlan)?;
        let segments_max = if tap.take_superframes() { segments_max.clamp(1, SEGMENTS_MAX) } else { 1 };
        let port = setup.port("tap", icrc, Framing::Vnet { segments_max })?;
        let (rx, tx) = (Piece::one(VNET_HEADER + FRAME_MAX), Piece::one(port.slot_len()));
        Ok(Self { port, tap, rx, tx, waiting: None })
    }

    /// What happened in resolving and answering.
    #[must_use]
    pub fn neighbor_counters(&self) -> NeighborCounters {
        self.port.neighbor_counters()
    }

    /// Sends what the port itself wants sent.
    fn flush_port(&mut self) -> Result<(), DeviceError> {
        while let Some((frame, burst)) = self.port.next_frame() {
            let sent = self.tap.write(&frame);
            self.port.recycle(frame);
            match sent {
                Ok(()) => {}
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "sending", source: e }),
                // A question is asked again and an answer is asked for again.
                Err(_) => self.port.lose(usize::from(burst)),
            }
        }
        Ok(())
    }

    /// Sends the frame in the slot; says whether the slot is free again.
    fn flush(&mut self, now: Instant) -> Result<bool, DeviceError> {
        let Some((range, _)) = self.waiting.take() else { return Ok(true) };
        match self.tap.write(self.tx.get(range.clone()).unwrap_or_default()) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.raw_os_error() == Some(libc::ENOBUFS) => {
                self.waiting = Some((range, now + RETRY_AFTER));
                Ok(false)
            }
            Err(e) if is_gone(&e) => Err(DeviceError::Io { action: "sending", source: e }),
            // The interface is down, or the frame is one that it does not carry.
            Err(_) => {
                self.port.lose(1);
                Ok(true)
            }
        }
    }
}

impl Device for TapDevice {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        let mut handed = self.port.receive_looped(now, budget, sink);
        let (mut passed, mut foreign) = (0, 0);
        while handed < budget && foreign < FOREIGN_A_CALL {
            let bytes = match self.tap.read(&mut self.rx) {
                Ok(len) => self.rx.get(..len).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if is_gone(&e) => return Err(DeviceError::Io { action: "receiving", source: e }),
                Err(_) if passed < ERRORS_PASSED => {
                    passed += 1;
                    continue;
                }
                Err(_) => break,
            };
            let taken = bytes.split_first_chunk().is_some_and(|(header, frame)| {
                // A tag is in the frame, where it belongs.
                self.port.accept(now, frame, None, segment_of(header), sink)
            });
            if taken { handed += 1 } else { foreign += 1 }
        }
        self.flush_port()?;
        Ok(handed)
    }

    fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        self.port.service(now);
        self.flush_port()?;
        let mut taken = 0;
        while self.flush(now)? && taken < budget {
            let Some(burst) = source(self.port.room(&mut self.tx)) else { break };
            taken += 1;
            if let Placed::Send(range) = self.port.place(now, &burst, &mut self.tx) {
                self.waiting = Some((range, now));
            }
        }
        // Questions that the bursts raised.
        self.flush_port()?;
        Ok(taken)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let retry = self.waiting.as_ref().map(|w| w.1);
        match (retry, self.port.poll_timeout()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// All frames for groups come up; what the endpoint itself sends to the group reaches it, too. No membership is reported:
    /// a bridge that snoops needs to be told by hand.
    fn set_membership(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        self.port.set_membership(group, member);
        Ok(())
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.tap.as_raw_fd())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        if self.port.has_looped() {
            return Ok(());
        }
        let watch = [Watch::Readable(self.tap.as_raw_fd()), Watch::Writable(self.tap.as_raw_fd())];
        let watch = if self.waiting.is_some() { &watch[..] } else { &watch[..1] };
        wait(watch, timeout).map(|_| ()).map_err(|source| DeviceError::Io { action: "waiting", source })
    }

    fn lost(&self) -> DeviceLosses {
        self.port.losses()
    }
}

/// What the system's answer at the opening means.
fn open_error(name: &str, error: TapError) -> DeviceError {
    let name = name.to_owned();
    match error {
        TapError::Open(e) if e.kind() == io::ErrorKind::PermissionDenied => DeviceError::TunNotPermitted,
        TapError::Open(_) => DeviceError::NoTun,
        TapError::Attach(e) => match (e.kind(), e.raw_os_error()) {
            (io::ErrorKind::PermissionDenied, _) => DeviceError::TapNotPermitted { name },
            (_, Some(libc::EBUSY)) => DeviceError::TapInUse { name },
            (_, Some(libc::EINVAL)) => DeviceError::NotTap { name },
            (io::ErrorKind::InvalidInput, _) => DeviceError::NoInterface { name },
            _ => DeviceError::Io { action: "attaching to a TAP", source: e },
        },
    }
}

/// The interface was removed.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EBADFD | libc::EFAULT | libc::ENODEV | libc::ENXIO | libc::EBADF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refuses_names_the_way_out() {
        let say = |e| open_error("tap7", e).to_string();
        let os = io::Error::from_raw_os_error;
        assert!(say(TapError::Open(os(libc::ENOENT))).contains("modprobe tun"));
        assert!(say(TapError::Open(os(libc::EACCES))).contains("chmod 666 /dev/net/tun"));
        assert!(say(TapError::Attach(os(libc::EPERM))).contains("ip tuntap add dev tap7 mode tap"));
        assert!(say(TapError::Attach(os(libc::EBUSY))).contains("in use"));
        assert!(say(TapError::Attach(os(libc::EINVAL))).contains("packet:tap7"));
    }
}
