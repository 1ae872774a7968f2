//! Path MTU and the coded timers and retry counts of an RC connection.

use core::time::Duration;

/// Path MTU: the payload bytes of one packet (IBTA Vol 1 9.4.3), independent of the interface's MTU except that it must fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 bytes, code 1.
    B256 = 1,
    /// 512 bytes, code 2.
    B512 = 2,
    /// 1024 bytes, code 3.
    B1024 = 3,
    /// 2048 bytes, code 4.
    B2048 = 4,
    /// 4096 bytes, code 5.
    B4096 = 5,
}

impl PathMtu {
    /// All, ascending.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];
    /// What IP, UDP and every transport header may take beside the payload; Linux's rxe allows the same 80 bytes.
    pub const HEADER_ALLOWANCE: usize = 80;

    /// Payload bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        128 << (self as u8)
    }

    /// The wire code, 1 to 5.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The MTU with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::B256),
            2 => Some(Self::B512),
            3 => Some(Self::B1024),
            4 => Some(Self::B2048),
            5 => Some(Self::B4096),
            _ => None,
        }
    }

    /// The MTU of exactly `bytes` payload bytes.
    #[must_use]
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.bytes() == bytes)
    }

    /// The largest path MTU that an interface with `netdev_mtu` carries: not above `netdev_mtu - 80`. `None` below 336.
    #[must_use]
    pub fn for_interface(netdev_mtu: usize) -> Option<Self> {
        let room = netdev_mtu.checked_sub(Self::HEADER_ALLOWANCE)?;
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= room)
    }

    /// How many packets carry `len` payload bytes; a zero-length message takes one.
    #[must_use]
    pub const fn packets_for(self, len: u32) -> u32 {
        if len == 0 { 1 } else { len.div_ceil(self.bytes() as u32) }
    }
}

/// Local ACK timeout: 5 bits, 4.096 us x 2^t; 0 means never (IBTA Vol 1 9.7.6.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// Wait for ever.
    pub const NEVER: Self = Self(0);
    /// 67 ms, what perftest and most applications take.
    pub const DEFAULT: Self = Self(14);

    /// The timeout with this code, 0 to 31.
    #[must_use]
    pub const fn new(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// The 5-bit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time, or `None` for "never".
    #[must_use]
    pub const fn duration(self) -> Option<Duration> {
        if self.0 == 0 { None } else { Some(Duration::from_nanos(4096 << self.0)) }
    }
}

/// RNR NAK timer: a 5-bit code for the least time a requester waits (IBTA Vol 1 table 45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RnrTimer(u8);

/// Microseconds by code.
const RNR_MICROS: [u32; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120, 7680, 10_240,
    15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

impl RnrTimer {
    /// 0.64 ms, what perftest takes. Code 0, which rdma_cm programs, is 655 ms: the longest.
    pub const DEFAULT: Self = Self(12);

    /// The timer with this code, 0 to 31.
    #[must_use]
    pub const fn new(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// The low five bits of a syndrome.
    #[must_use]
    pub const fn from_wire(bits: u8) -> Self {
        Self(bits & 31)
    }

    /// The 5-bit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_micros(RNR_MICROS[self.0 as usize] as u64)
    }

    /// The next longer timer; the longest, code 0, itself.
    #[must_use]
    pub const fn longer(self) -> Self {
        match self.0 {
            0 | 31 => Self(0),
            code => Self(code + 1),
        }
    }

    /// The next shorter timer; the shortest, code 1, itself.
    #[must_use]
    pub const fn shorter(self) -> Self {
        match self.0 {
            0 => Self(31),
            1 => Self(1),
            code => Self(code - 1),
        }
    }
}

/// Transport retries: 0 to 7, a plain count (7 is not infinite).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RetryCount(u8);

impl RetryCount {
    /// Seven.
    pub const MAX: Self = Self(7);

    /// The count, when it fits three bits.
    #[must_use]
    pub const fn new(v: u8) -> Option<Self> {
        if v < 8 { Some(Self(v)) } else { None }
    }

    /// The count.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// RNR retries: 0 to 6 count, 7 means for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RnrRetry(u8);

impl RnrRetry {
    /// Never give up.
    pub const FOREVER: Self = Self(7);

    /// The count, when it fits three bits.
    #[must_use]
    pub const fn new(v: u8) -> Option<Self> {
        if v < 8 { Some(Self(v)) } else { None }
    }

    /// The three-bit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The limit, or `None` for "for ever".
    #[must_use]
    pub const fn limit(self) -> Option<u8> {
        if self.0 == 7 { None } else { Some(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_and_interfaces() {
        for m in PathMtu::ALL {
            assert_eq!(PathMtu::from_code(m.code()), Some(m));
            assert_eq!(PathMtu::from_bytes(m.bytes()), Some(m));
        }
        assert_eq!(PathMtu::for_interface(1500), Some(PathMtu::B1024));
        assert_eq!(PathMtu::for_interface(2200), Some(PathMtu::B2048));
        assert_eq!(PathMtu::for_interface(4200), Some(PathMtu::B4096));
        assert_eq!(PathMtu::for_interface(300), None);
        assert_eq!(PathMtu::B1024.packets_for(0), 1);
        assert_eq!(PathMtu::B1024.packets_for(3000), 3);
    }

    #[test]
    fn timer_codes() {
        assert_eq!(AckTimeout::new(14).unwrap().duration(), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(AckTimeout::NEVER.duration(), None);
        assert_eq!(AckTimeout::new(31).unwrap().duration().unwrap().as_secs(), 8796);
        assert_eq!(RnrTimer::new(0).unwrap().duration(), Duration::from_micros(655_360));
        assert_eq!(RnrTimer::new(12).unwrap().duration(), Duration::from_micros(640));
        assert_eq!(RnrTimer::new(25).unwrap().duration(), Duration::from_micros(61_440));
        assert_eq!(RnrRetry::FOREVER.limit(), None);
        assert!(RetryCount::new(8).is_none());
    }
}
