//! The messages of connection management (IBTA Vol 1 12.6 to 12.8 and 12.11).
//!
//! Owns every byte offset of the 256-byte MAD: the header and one file for each of the eleven messages. A message is a
//! typed struct with `parse` and `emit`; parsing accepts every bit pattern of the body, so that the agent can refuse a
//! bad field with the reason for it. Never keeps state.

mod apr;
mod bytes;
mod drep;
mod dreq;
mod fields;
mod info;
mod ip_header;
mod lap;
mod mad;
mod mra;
mod rej;
mod rep;
mod req;
mod rtu;
mod service;
mod sidr_rep;
mod sidr_req;

pub use apr::{Apr, AprStatus};
pub use drep::Drep;
pub use dreq::Dreq;
pub use fields::{
    Ari, CaGuid, CmTimeout, CommunicationId, MraedMessage, PathRecord, PrivateData, PrivateDataTooLong,
    RejectedMessage, TransactionId, TransportService,
};
pub use info::{Redirect, RejInfo};
pub use ip_header::{IpHeader, IpHeaderError};
pub use lap::Lap;
pub(crate) use mad::CLASS_VERSION;
pub use mad::{MAD_LEN, Mad, MadError, MadHeader, MadKind, Message};
pub use mra::Mra;
pub use rej::{Rej, RejReason};
pub use rep::Rep;
pub use req::Req;
pub use rtu::Rtu;
pub use service::{PortSpace, ServiceId};
pub use sidr_rep::{SidrRep, SidrStatus};
pub use sidr_req::SidrReq;
