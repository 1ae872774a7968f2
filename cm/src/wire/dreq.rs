//! DREQ: ends a connection (IBTA Vol 1 12.6.10).

use uroce::types::Qpn;

use super::bytes::{Body, put_u8, put_u24, put_u32, u8_at, u24_at, u32_at};
use super::fields::{CommunicationId, PrivateData};

/// A request to disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The receiver's id.
    pub remote_comm_id: CommunicationId,
    /// The *receiver's* QP, which shows that the sender knows the connection.
    pub remote_qpn: Qpn,
    /// The byte beside it.
    pub reserved: u8,
    /// For the consumer.
    pub private_data: PrivateData<220>,
}

impl Dreq {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            remote_qpn: Qpn::from_wire(u24_at::<8>(body)),
            reserved: u8_at::<11>(body),
            private_data: PrivateData::parse::<12>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u24::<8>(body, self.remote_qpn.get());
        put_u8::<11>(body, self.reserved);
        self.private_data.emit::<12>(body);
    }
}
