//! uroce's devices, as they are named at each end of the pair.
//!
//! Owns the names, and which of them this machine and this build have.

use std::time::Duration;

use crate::lab::{End, Job, Lab, MTU};

/// A device that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// Raw Ethernet beside the kernel, on the interface's own address.
    Packet,
    /// Raw Ethernet with a MAC and an address of its own.
    Own,
    /// The unprivileged socket, as uid nobody.
    Udp,
    /// AF_XDP.
    Xdp,
    /// A TAP on a bridge with a veth pair of its own.
    Tap,
    /// Both ends in one process.
    Loop,
}

impl Device {
    /// All that two processes on a veth pair can use, and the switch in one process.
    pub(crate) const ALL: [Self; 6] = [Self::Packet, Self::Own, Self::Udp, Self::Xdp, Self::Tap, Self::Loop];

    /// For `--devices` and in ids.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Packet => "packet",
            Self::Own => "own",
            Self::Udp => "udp",
            Self::Xdp => "xdp",
            Self::Tap => "tap",
            Self::Loop => "loop",
        }
    }

    /// For people.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Packet => "AF_PACKET",
            Self::Own => "AF_PACKET, own MAC",
            Self::Udp => "UDP socket",
            Self::Xdp => "AF_XDP",
            Self::Tap => "TAP, bridged",
            Self::Loop => "in process",
        }
    }

    /// The `--device` at `end`.
    pub(crate) fn argument(self, end: End) -> String {
        let interface = end.interface();
        match self {
            Self::Packet => format!("packet:{interface}"),
            Self::Own => format!("packet:{interface},mac={},ip={}", end.own().1, end.own().0),
            Self::Udp => format!("udp:{}", end.address()),
            Self::Xdp => format!("xdp:{interface}"),
            Self::Tap => format!("tap:{},ip={},mtu={MTU}", end.tap().0, end.tap().1),
            Self::Loop => "loop".into(),
        }
    }

    /// Where an endpoint on it is reached.
    pub(crate) fn address(self, end: End) -> &'static str {
        match self {
            Self::Own => end.own().0,
            Self::Tap => end.tap().1,
            _ => end.address(),
        }
    }

    /// Whether the example `raw` drives it.
    pub(crate) fn has_raw(self) -> bool {
        matches!(self, Self::Packet | Self::Own | Self::Udp)
    }

    /// Whether it runs as uid nobody.
    pub(crate) fn is_unprivileged(self) -> bool {
        self == Self::Udp
    }
}

/// Those of `wanted` (all when empty) that open here; what does not is noted with the reason.
pub(crate) fn usable(lab: &Lab, wanted: &[String], notes: &mut Vec<String>) -> Vec<Device> {
    let asked = |d: &Device| wanted.is_empty() || wanted.iter().any(|w| w == d.name());
    let mut opens = |device: &Device| {
        if *device == Device::Loop {
            return true;
        }
        let words = [lab.program("uroce"), "devinfo".into(), "-d".into(), device.argument(End::A)];
        let job = Job::new(End::A, words).unprivileged(device.is_unprivileged());
        match lab.run(&job, Duration::from_secs(5)) {
            Ok(_) => true,
            Err(e) => {
                notes.push(format!("{} is left out: {e}", device.title()));
                false
            }
        }
    };
    Device::ALL.into_iter().filter(asked).filter(|d| opens(d)).collect()
}
