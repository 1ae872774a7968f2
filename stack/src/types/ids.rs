//! Queue pair numbers, keys and the other opaque identifiers.

use core::fmt;

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident($int:ty), $width:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name($int);

        impl $name {
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

hex_id!(
    /// A queue pair number, 24 bits. 0 is the subnet manager's (never on RoCE), 1 the general services QP.
    Qpn(u32), "8"
);
hex_id!(
    /// A message sequence number, 24 bits, modular: the count of request messages a responder has completed.
    Msn(u32), "8"
);
hex_id!(
    /// A local key: names a memory region to its own side. 24-bit random tag and 8-bit key.
    Lkey(u32), "10"
);
hex_id!(
    /// A remote key: names a memory region to a peer. 24-bit random tag and 8-bit key.
    Rkey(u32), "10"
);
hex_id!(
    /// A partition key, 16 bits; bit 15 marks a full member.
    PKey(u16), "6"
);
hex_id!(
    /// A queue key, 32 bits, checked on datagrams.
    QKey(u32), "10"
);
hex_id!(
    /// Immediate data: the four bytes as they stand on the wire, read big-endian.
    Imm(u32), "10"
);

impl Qpn {
    /// The general services QP, which carries connection management.
    pub const GSI: Self = Self(1);
    /// The destination of multicast datagrams.
    pub const MULTICAST: Self = Self(0xFF_FFFF);

    /// The QPN `v`, or `None` when it does not fit 24 bits.
    #[must_use]
    pub const fn new(v: u32) -> Option<Self> {
        if v <= 0xFF_FFFF { Some(Self(v)) } else { None }
    }

    /// The low 24 bits of a wire word.
    #[must_use]
    pub const fn from_wire(bits: u32) -> Self {
        Self(bits & 0xFF_FFFF)
    }
}

impl Msn {
    /// The low 24 bits of a wire word.
    #[must_use]
    pub const fn from_wire(bits: u32) -> Self {
        Self(bits & 0xFF_FFFF)
    }

    /// The MSN after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1) & 0xFF_FFFF)
    }
}

impl Lkey {
    /// The key with this value.
    #[must_use]
    pub const fn new(v: u32) -> Self {
        Self(v)
    }
}

impl Rkey {
    /// The key with this value.
    #[must_use]
    pub const fn new(v: u32) -> Self {
        Self(v)
    }
}

impl Imm {
    /// The immediate with this value.
    #[must_use]
    pub const fn new(v: u32) -> Self {
        Self(v)
    }
}

impl PKey {
    /// The default partition, full membership.
    pub const DEFAULT: Self = Self(0xFFFF);

    /// The key with this value.
    #[must_use]
    pub const fn new(v: u16) -> Self {
        Self(v)
    }

    /// Whether a packet with key `self` may reach a QP with key `other`: same partition, and at least one of the two a
    /// full member (IBTA Vol 1 10.9.3).
    #[must_use]
    pub const fn matches(self, other: Self) -> bool {
        (self.0 & 0x7FFF) == (other.0 & 0x7FFF) && ((self.0 | other.0) & 0x8000) != 0
    }
}

impl QKey {
    /// The well-known key of QP1.
    pub const GSI: Self = Self(0x8001_0000);
    /// The key that rdma_cm gives to UD QPs.
    pub const RDMA_UDP: Self = Self(0x0123_4567);

    /// The key with this value.
    #[must_use]
    pub const fn new(v: u32) -> Self {
        Self(v)
    }

    /// Whether bit 31 asks for the QP's own key in place of the work request's.
    #[must_use]
    pub const fn is_privileged(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limited_members_do_not_talk_to_each_other() {
        let full = PKey::new(0x8001);
        let limited = PKey::new(0x0001);
        assert!(full.matches(limited));
        assert!(limited.matches(full));
        assert!(full.matches(full));
        assert!(!limited.matches(limited));
        assert!(!full.matches(PKey::DEFAULT));
    }
}
