//! Values that several messages carry.

use core::fmt;

use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid};

use super::bytes::{Body, get, put, put_u8, put_u16, put_u32, u8_at, u16_at, u32_at};

macro_rules! opaque {
    ($(#[$doc:meta])* $name:ident($int:ty), $width:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name($int);

        impl $name {
            /// The identifier with this value.
            #[must_use]
            pub const fn new(v: $int) -> Self {
                Self(v)
            }

            /// The raw value.
            #[must_use]
            pub const fn get(self) -> $int {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#0", $width, "x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{:#0", $width, "x}"), self.0)
            }
        }
    };
}

opaque!(
    /// A communication id: names one communication at the side that drew it. "Local" in a message is the sender's;
    /// 0 means that the sender does not have one.
    CommunicationId(u32), "10"
);
opaque!(
    /// A transaction id: the sender of a REQ, DREQ or LAP chooses it, the answers repeat it.
    TransactionId(u64), "18"
);
opaque!(
    /// The GUID of a channel adapter. Peers key their tables of duplicate and stale connections by it, so it is unique
    /// to an endpoint instance and the same for its life.
    CaGuid(u64), "18"
);

impl CommunicationId {
    /// The id of a side that has none.
    pub const NONE: Self = Self(0);
}

/// A 5-bit coded time: 4.096 us x 2^code (IBTA Vol 1 12.7.25).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CmTimeout(u8);

impl CmTimeout {
    /// 1.07 s, what this side promises to answer within.
    pub const DEFAULT_RESPONSE: Self = Self(18);
    /// 68.7 s, what a consumer may take to decide.
    pub const DEFAULT_SERVICE: Self = Self(24);

    /// The time with this code, 0 to 31.
    #[must_use]
    pub const fn new(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// The low five bits of a wire byte.
    #[must_use]
    pub const fn from_wire(bits: u8) -> Self {
        Self(bits & 31)
    }

    /// The 5-bit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time: 4.096 us (code 0) to 8796 s (code 31).
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_nanos(4096 << self.0)
    }

    /// The longest coded time that is not above `d`: what may be promised when `d` will be waited. Code 0 below 8.192 us.
    #[must_use]
    pub fn at_most(d: Duration) -> Self {
        (0..32).rev().map(Self).find(|t| t.duration() <= d).unwrap_or(Self(0))
    }
}

/// Private data: `N` bytes on the wire, zero padded. `Debug` does not show them, for they may be secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>([u8; N]);

/// Private data longer than the message has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given} bytes of private data, at most {max}")]
pub struct PrivateDataTooLong {
    /// Bytes given.
    pub given: usize,
    /// Room in the message.
    pub max: usize,
}

impl<const N: usize> PrivateData<N> {
    /// No private data.
    pub const EMPTY: Self = Self([0; N]);

    /// `data`, zero padded.
    ///
    /// # Errors
    /// [`PrivateDataTooLong`] above `N` bytes.
    pub fn new(data: &[u8]) -> Result<Self, PrivateDataTooLong> {
        let mut bytes = [0; N];
        match bytes.get_mut(..data.len()) {
            Some(room) => room.copy_from_slice(data),
            None => return Err(PrivateDataTooLong { given: data.len(), max: N }),
        }
        Ok(Self(bytes))
    }

    /// All bytes of the wire.
    #[must_use]
    pub const fn from_wire(bytes: [u8; N]) -> Self {
        Self(bytes)
    }

    /// The whole field. How many of the bytes the peer meant is not on the wire.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; N] {
        &self.0
    }

    pub(super) fn parse<const AT: usize>(body: &Body) -> Self {
        Self(get::<AT, N>(body))
    }

    pub(super) fn emit<const AT: usize>(&self, body: &mut Body) {
        put::<AT, N>(body, self.0);
    }
}

impl<const N: usize> fmt::Debug for PrivateData<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.0.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
        write!(f, "PrivateData({used} of {N} bytes)")
    }
}

impl<const N: usize> Default for PrivateData<N> {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Additional information of a refusal: up to 72 bytes whose meaning the reason gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ari {
    len: u8,
    bytes: [u8; Self::MAX],
}

impl Ari {
    /// Bytes of the field.
    pub const MAX: usize = 72;
    /// None.
    pub const EMPTY: Self = Self { len: 0, bytes: [0; Self::MAX] };

    /// `info`, cut at 72 bytes.
    #[must_use]
    pub fn new(info: &[u8]) -> Self {
        let mut ari = Self::EMPTY;
        for (to, from) in ari.bytes.iter_mut().zip(info) {
            *to = *from;
            ari.len += 1;
        }
        ari
    }

    /// The field as it stands on the wire: the 7-bit length and all 72 bytes.
    #[must_use]
    pub const fn from_wire(len: u8, bytes: [u8; Self::MAX]) -> Self {
        Self { len: len & 0x7f, bytes }
    }

    /// The length as stated, 0 to 127.
    #[must_use]
    pub const fn stated_len(&self) -> u8 {
        self.len
    }

    /// All 72 bytes.
    #[must_use]
    pub const fn all(&self) -> &[u8; Self::MAX] {
        &self.bytes
    }

    /// The bytes that the stated length covers.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or(&self.bytes)
    }

    /// The CA GUID of a side that gave up (reason 4).
    #[must_use]
    pub fn ca_guid(&self) -> Option<CaGuid> {
        Some(CaGuid(u64::from_be_bytes(self.as_bytes().get(..8)?.try_into().ok()?)))
    }
}

impl Default for Ari {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Which message a REJ refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are the messages.
pub enum RejectedMessage {
    Req,
    Rep,
    /// None in particular: a timeout.
    Other,
    /// A value that the specification reserves (3).
    Reserved,
}

impl RejectedMessage {
    pub(super) const fn from_wire(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Req,
            1 => Self::Rep,
            2 => Self::Other,
            _ => Self::Reserved,
        }
    }

    /// The two bits.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::Rep => 1,
            Self::Other => 2,
            Self::Reserved => 3,
        }
    }
}

/// Which message an MRA acknowledges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are the messages.
pub enum MraedMessage {
    Req,
    Rep,
    Lap,
    /// A value that the specification reserves (3).
    Reserved,
}

impl MraedMessage {
    pub(super) const fn from_wire(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Req,
            1 => Self::Rep,
            2 => Self::Lap,
            _ => Self::Reserved,
        }
    }

    /// The two bits.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::Rep => 1,
            Self::Lap => 2,
            Self::Reserved => 3,
        }
    }
}

/// Transport service of a REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportService {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram, which RoCE does not have.
    Rd,
    /// See the extended transport type: 1 is XRC.
    Extended,
}

impl TransportService {
    pub(super) const fn from_wire(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Rc,
            1 => Self::Uc,
            2 => Self::Rd,
            _ => Self::Extended,
        }
    }

    /// The two bits.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Rc => 0,
            Self::Uc => 1,
            Self::Rd => 2,
            Self::Extended => 3,
        }
    }
}

/// A path of a REQ: primary or alternate (44 bytes). An alternate path of zeros means that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PathRecord {
    /// LID of the sender's port, 0xFFFF on RoCE.
    pub local_lid: u16,
    /// LID of the receiver's port, 0xFFFF on RoCE.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: Gid,
    /// GID of the receiver's port.
    pub remote_gid: Gid,
    /// 20 bits.
    pub flow_label: u32,
    /// The 6 bits between flow label and rate.
    pub reserved: u8,
    /// Packet rate code, 6 bits.
    pub packet_rate: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether both ports are in one subnet. RoCE says no.
    pub subnet_local: bool,
    /// The low 3 bits beside it and of the next byte.
    pub reserved_tail: (u8, u8),
    /// Local ACK timeout of the sender, which the receiver takes for its QP too.
    pub ack_timeout: u8,
}

impl PathRecord {
    /// LID that RoCE puts in.
    pub const ROCE_LID: u16 = 0xFFFF;

    /// The local ACK timeout as a QP takes it.
    #[must_use]
    pub fn local_ack_timeout(&self) -> AckTimeout {
        AckTimeout::new(self.ack_timeout & 31).unwrap_or(AckTimeout::DEFAULT)
    }

    /// Whether anything but zero stands there.
    #[must_use]
    pub fn is_present(&self) -> bool {
        *self != Self::default()
    }
}

/// The offsets of a path are those of the primary one plus a constant, and constants cannot be added to const generics
/// on this compiler: the two instances are spelt out.
macro_rules! path_at {
    ($parse:ident, $emit:ident, $at:literal) => {
        pub(super) fn $parse(body: &Body) -> PathRecord {
            let word = u32_at::<{ $at + 36 }>(body);
            let [.., low] = word.to_be_bytes();
            let (sl, ack) = (u8_at::<{ $at + 42 }>(body), u8_at::<{ $at + 43 }>(body));
            PathRecord {
                local_lid: u16_at::<{ $at }>(body),
                remote_lid: u16_at::<{ $at + 2 }>(body),
                local_gid: Gid::from_bytes(get::<{ $at + 4 }, 16>(body)),
                remote_gid: Gid::from_bytes(get::<{ $at + 20 }, 16>(body)),
                flow_label: word >> 12,
                reserved: (word >> 6).to_be_bytes()[3] & 0x3f,
                packet_rate: low & 0x3f,
                traffic_class: u8_at::<{ $at + 40 }>(body),
                hop_limit: u8_at::<{ $at + 41 }>(body),
                service_level: sl >> 4,
                subnet_local: sl & 8 != 0,
                reserved_tail: (sl & 7, ack & 7),
                ack_timeout: ack >> 3,
            }
        }

        pub(super) fn $emit(path: &PathRecord, body: &mut Body) {
            put_u16::<{ $at }>(body, path.local_lid);
            put_u16::<{ $at + 2 }>(body, path.remote_lid);
            put::<{ $at + 4 }, 16>(body, path.local_gid.to_bytes());
            put::<{ $at + 20 }, 16>(body, path.remote_gid.to_bytes());
            let word =
                (path.flow_label << 12) | (u32::from(path.reserved & 0x3f) << 6) | u32::from(path.packet_rate & 0x3f);
            put_u32::<{ $at + 36 }>(body, word);
            put_u8::<{ $at + 40 }>(body, path.traffic_class);
            put_u8::<{ $at + 41 }>(body, path.hop_limit);
            let (sl, ack) = path.reserved_tail;
            put_u8::<{ $at + 42 }>(body, (path.service_level << 4) | (u8::from(path.subnet_local) << 3) | (sl & 7));
            put_u8::<{ $at + 43 }>(body, (path.ack_timeout << 3) | (ack & 7));
        }
    };
}

path_at!(parse_primary, emit_primary, 52);
path_at!(parse_alternate, emit_alternate, 96);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coded_times() {
        assert_eq!(CmTimeout::new(20).unwrap().duration(), Duration::from_nanos(4_294_967_296));
        assert_eq!(CmTimeout::at_most(Duration::from_millis(250)).code(), 15);
        assert_eq!(CmTimeout::at_most(Duration::from_secs(100_000)).code(), 31);
        assert_eq!(CmTimeout::at_most(Duration::ZERO).code(), 0);
        assert!(CmTimeout::new(32).is_none());
    }

    #[test]
    fn private_data_has_a_limit_and_stays_out_of_logs() {
        assert_eq!(PrivateData::<4>::new(&[1; 5]), Err(PrivateDataTooLong { given: 5, max: 4 }));
        let data = PrivateData::<4>::new(b"abc").unwrap();
        assert_eq!(data.as_bytes(), b"abc\0");
        assert_eq!(format!("{data:?}"), "PrivateData(3 of 4 bytes)");
    }

    #[test]
    fn ari_length_beyond_the_field_is_kept_but_not_followed() {
        let ari = Ari::from_wire(127, [7; 72]);
        assert_eq!((ari.stated_len(), ari.as_bytes().len()), (127, 72));
        assert_eq!(Ari::new(&[0; 7]).ca_guid(), None);
        assert_eq!(Ari::new(&5u64.to_be_bytes()).ca_guid(), Some(CaGuid::new(5)));
    }
}
