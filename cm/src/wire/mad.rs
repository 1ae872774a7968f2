//! The management datagram: its 24-byte header and the choice of message (IBTA Vol 1 13.4.2 and 12.6).

use super::bytes::{BODY_LEN, Body};
use super::fields::{CommunicationId, TransactionId};
use super::{Apr, Drep, Dreq, Lap, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq};

/// Bytes of every MAD.
pub const MAD_LEN: usize = 256;

const HEADER_LEN: usize = MAD_LEN - BODY_LEN;
const BASE_VERSION: u8 = 1;
/// Management class of connection management.
const CLASS: u8 = 0x07;
pub(crate) const CLASS_VERSION: u8 = 2;
/// Method Send: the only one of the class.
const METHOD_SEND: u8 = 0x03;

/// Why bytes are no connection management MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// Not 256 bytes.
    #[error("a MAD of {0} bytes instead of 256")]
    Length(usize),
    /// Another base version than 1.
    #[error("MAD base version {0} is not 1")]
    BaseVersion(u8),
    /// Another management class than 7.
    #[error("management class {0:#04x} is not connection management")]
    Class(u8),
    /// Another class version than 2.
    #[error("class version {0} is not 2")]
    ClassVersion(u8),
    /// Another method than Send.
    #[error("method {0:#04x} is not Send")]
    Method(u8),
    /// An attribute that is none of the eleven messages.
    #[error("attribute {0:#06x} is no message of connection management")]
    Attribute(u16),
}

macro_rules! messages {
    ($($kind:ident = $id:literal, $name:literal, $doc:literal;)*) => {
        /// Kind of a message; the number is its attribute id.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum MadKind {
            $(#[doc = $doc] $kind = $id,)*
        }

        impl MadKind {
            /// All eleven, by attribute id.
            pub const ALL: [Self; 11] = [$(Self::$kind),*];

            /// The kind with this attribute id.
            #[must_use]
            pub const fn from_attribute(id: u16) -> Option<Self> {
                match id {
                    $($id => Some(Self::$kind),)*
                    _ => None,
                }
            }

            /// The name that the specification gives it, such as `REQ`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }

        /// A message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(clippy::large_enum_variant)] // A MAD has one size; the values live on the stack.
        pub enum Message {
            $(#[doc = $doc] $kind($kind),)*
        }

        impl Message {
            /// Its kind.
            #[must_use]
            pub const fn kind(&self) -> MadKind {
                match self {
                    $(Self::$kind(_) => MadKind::$kind,)*
                }
            }

            fn parse(kind: MadKind, body: &Body) -> Self {
                match kind {
                    $(MadKind::$kind => Self::$kind($kind::parse(body)),)*
                }
            }

            fn emit(&self, body: &mut Body) {
                match self {
                    $(Self::$kind(m) => m.emit(body),)*
                }
            }
        }

        $(
            impl From<$kind> for Message {
                fn from(m: $kind) -> Self {
                    Self::$kind(m)
                }
            }
        )*
    };
}

messages! {
    Req = 0x0010, "REQ", "Asks for a connection.";
    Mra = 0x0011, "MRA", "Asks for time.";
    Rej = 0x0012, "REJ", "Refuses.";
    Rep = 0x0013, "REP", "Accepts.";
    Rtu = 0x0014, "RTU", "Ready to use.";
    Dreq = 0x0015, "DREQ", "Ends a connection.";
    Drep = 0x0016, "DREP", "Answers a DREQ.";
    SidrReq = 0x0017, "SIDR_REQ", "Asks for a datagram QP.";
    SidrRep = 0x0018, "SIDR_REP", "Answers a SIDR_REQ.";
    Lap = 0x0019, "LAP", "Offers an alternate path.";
    Apr = 0x001A, "APR", "Answers a LAP.";
}

impl MadKind {
    /// The attribute id.
    #[must_use]
    pub const fn attribute(self) -> u16 {
        self as u16
    }

    /// Position in [`MadKind::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        (self as u16 - Self::Req as u16) as usize
    }
}

impl core::fmt::Display for MadKind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

impl Message {
    /// The sender's communication id; SIDR messages have none.
    #[must_use]
    pub const fn local_comm_id(&self) -> Option<CommunicationId> {
        match self {
            Self::Req(m) => Some(m.local_comm_id),
            Self::Mra(m) => Some(m.local_comm_id),
            Self::Rej(m) => Some(m.local_comm_id),
            Self::Rep(m) => Some(m.local_comm_id),
            Self::Rtu(m) => Some(m.local_comm_id),
            Self::Dreq(m) => Some(m.local_comm_id),
            Self::Drep(m) => Some(m.local_comm_id),
            Self::Lap(m) => Some(m.local_comm_id),
            Self::Apr(m) => Some(m.local_comm_id),
            Self::SidrReq(_) | Self::SidrRep(_) => None,
        }
    }

    /// The receiver's communication id; REQ and SIDR messages have none.
    #[must_use]
    pub const fn remote_comm_id(&self) -> Option<CommunicationId> {
        match self {
            Self::Mra(m) => Some(m.remote_comm_id),
            Self::Rej(m) => Some(m.remote_comm_id),
            Self::Rep(m) => Some(m.remote_comm_id),
            Self::Rtu(m) => Some(m.remote_comm_id),
            Self::Dreq(m) => Some(m.remote_comm_id),
            Self::Drep(m) => Some(m.remote_comm_id),
            Self::Lap(m) => Some(m.remote_comm_id),
            Self::Apr(m) => Some(m.remote_comm_id),
            Self::Req(_) | Self::SidrReq(_) | Self::SidrRep(_) => None,
        }
    }
}

/// What the header says beyond the kind of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadHeader {
    /// Status; 0.
    pub status: u16,
    /// Class specific; 0.
    pub class_specific: u16,
    /// Of the exchange.
    pub transaction_id: TransactionId,
    /// The half word behind the attribute id.
    pub reserved: u16,
    /// 0, or a vendor's attribute for enhanced connection establishment.
    pub attribute_modifier: u32,
}

impl MadHeader {
    /// The header of a message of this transaction.
    #[must_use]
    pub const fn new(transaction_id: TransactionId) -> Self {
        Self { status: 0, class_specific: 0, transaction_id, reserved: 0, attribute_modifier: 0 }
    }
}

/// A connection management MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// Its header.
    pub header: MadHeader,
    /// Its message.
    pub message: Message,
}

impl Mad {
    /// A message of this transaction.
    #[must_use]
    pub fn new(transaction_id: TransactionId, message: impl Into<Message>) -> Self {
        Self { header: MadHeader::new(transaction_id), message: message.into() }
    }

    /// Reads a MAD.
    ///
    /// # Errors
    /// [`MadError`]: the first header field that does not fit. The body is not judged.
    pub fn parse(bytes: &[u8]) -> Result<Self, MadError> {
        let Ok(mad) = <&[u8; MAD_LEN]>::try_from(bytes) else { return Err(MadError::Length(bytes.len())) };
        let kind = Self::kind(mad)?;
        let Some((h, body)) = mad.split_first_chunk::<HEADER_LEN>() else { return Err(MadError::Length(mad.len())) };
        let Some(body) = body.first_chunk() else { return Err(MadError::Length(mad.len())) };
        let header = MadHeader {
            status: u16::from_be_bytes([h[4], h[5]]),
            class_specific: u16::from_be_bytes([h[6], h[7]]),
            transaction_id: TransactionId::new(u64::from_be_bytes([
                h[8], h[9], h[10], h[11], h[12], h[13], h[14], h[15],
            ])),
            reserved: u16::from_be_bytes([h[18], h[19]]),
            attribute_modifier: u32::from_be_bytes([h[20], h[21], h[22], h[23]]),
        };
        Ok(Self { header, message: Message::parse(kind, body) })
    }

    /// Of a MAD of another class version: kind, transaction and first word, which is all that a refusal needs. In a REQ the
    /// word is the sender's communication id, in a SIDR_REQ the request id. `None` when anything else is wrong too.
    pub(crate) fn parse_other_version(bytes: &[u8]) -> Option<(MadKind, TransactionId, u32)> {
        let mut mad = *<&[u8; MAD_LEN]>::try_from(bytes).ok()?;
        mad[2] = CLASS_VERSION;
        let kind = Self::kind(&mad).ok()?;
        let [_, _, _, _, _, _, _, _, t0, t1, t2, t3, t4, t5, t6, t7, ..] = mad;
        let [.., w0, w1, w2, w3] = *mad.first_chunk::<{ HEADER_LEN + 4 }>()?;
        let transaction = TransactionId::new(u64::from_be_bytes([t0, t1, t2, t3, t4, t5, t6, t7]));
        Some((kind, transaction, u32::from_be_bytes([w0, w1, w2, w3])))
    }

    /// The kind of message alone, with the checks of [`Mad::parse`].
    ///
    /// # Errors
    /// As [`Mad::parse`].
    pub fn kind(mad: &[u8; MAD_LEN]) -> Result<MadKind, MadError> {
        let [base, class, version, method, ..] = *mad;
        if base != BASE_VERSION {
            return Err(MadError::BaseVersion(base));
        }
        if class != CLASS {
            return Err(MadError::Class(class));
        }
        if version != CLASS_VERSION {
            return Err(MadError::ClassVersion(version));
        }
        if method != METHOD_SEND {
            return Err(MadError::Method(method));
        }
        let attribute = u16::from_be_bytes([mad[16], mad[17]]);
        MadKind::from_attribute(attribute).ok_or(MadError::Attribute(attribute))
    }

    /// The 256 bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut out = [0; MAD_LEN];
        let (h, kind) = (&self.header, self.message.kind());
        if let Some((header, body)) = out.split_first_chunk_mut::<HEADER_LEN>()
            && let Some(body) = body.first_chunk_mut()
        {
            header[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
            header[4..6].copy_from_slice(&h.status.to_be_bytes());
            header[6..8].copy_from_slice(&h.class_specific.to_be_bytes());
            header[8..16].copy_from_slice(&h.transaction_id.get().to_be_bytes());
            header[16..18].copy_from_slice(&kind.attribute().to_be_bytes());
            header[18..20].copy_from_slice(&h.reserved.to_be_bytes());
            header[20..].copy_from_slice(&h.attribute_modifier.to_be_bytes());
            self.message.emit(body);
        }
        out
    }
}
