//! RTU: ready to use (IBTA Vol 1 12.6.9).

use super::bytes::{Body, put_u32, u32_at};
use super::fields::{CommunicationId, PrivateData};

/// The REP arrived and the sender's QP is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rtu {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The receiver's id.
    pub remote_comm_id: CommunicationId,
    /// For the consumer.
    pub private_data: PrivateData<224>,
}

impl Rtu {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            private_data: PrivateData::parse::<8>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        self.private_data.emit::<8>(body);
    }
}
