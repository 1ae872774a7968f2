//! SIDR_REQ: asks which datagram QP serves (IBTA Vol 1 12.11.1).

use uroce::types::PKey;

use super::bytes::{Body, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use super::fields::PrivateData;
use super::service::ServiceId;

/// A request to resolve a service id into a UD QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// Names the exchange.
    pub request_id: u32,
    /// Partition.
    pub pkey: PKey,
    /// The half word beside it.
    pub reserved: u16,
    /// What is asked for.
    pub service_id: ServiceId,
    /// For the consumer; rdma_cm services begin it with an [`IpHeader`](super::IpHeader).
    pub private_data: PrivateData<216>,
}

impl SidrReq {
    pub(super) fn parse(body: &Body) -> Self {
        Self {
            request_id: u32_at::<0>(body),
            pkey: PKey::new(u16_at::<4>(body)),
            reserved: u16_at::<6>(body),
            service_id: ServiceId::new(u64_at::<8>(body)),
            private_data: PrivateData::parse::<16>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.request_id);
        put_u16::<4>(body, self.pkey.get());
        put_u16::<6>(body, self.reserved);
        put_u64::<8>(body, self.service_id.get());
        self.private_data.emit::<16>(body);
    }
}
