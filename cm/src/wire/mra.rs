//! MRA: "I have it, give me time" (IBTA Vol 1 12.6.6).

use super::bytes::{Body, put_u8, put_u32, u8_at, u32_at};
use super::fields::{CmTimeout, CommunicationId, MraedMessage, PrivateData};

/// A message receipt acknowledgement: the sender's consumer needs more time than the response timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The receiver's id.
    pub remote_comm_id: CommunicationId,
    /// What is acknowledged.
    pub message: MraedMessage,
    /// How long the consumer may take.
    pub service_timeout: CmTimeout,
    /// For the consumer.
    pub private_data: PrivateData<222>,
}

impl Mra {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            message: MraedMessage::from_wire(u8_at::<8>(body) >> 6),
            service_timeout: CmTimeout::from_wire(u8_at::<9>(body) >> 3),
            private_data: PrivateData::parse::<10>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u8::<8>(body, self.message.code() << 6);
        put_u8::<9>(body, self.service_timeout.code() << 3);
        self.private_data.emit::<10>(body);
    }
}
