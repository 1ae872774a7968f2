//! REP: accepts (IBTA Vol 1 12.6.8).

use uroce::types::{Psn, QKey, Qpn};

use super::bytes::{Body, put_u8, put_u24, put_u32, put_u64, u8_at, u24_at, u32_at, u64_at};
use super::fields::{CaGuid, CommunicationId, PrivateData};

/// A reply that accepts a REQ. "Local" is its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The id of the REQ.
    pub remote_comm_id: CommunicationId,
    /// Datagram services only; 0.
    pub local_qkey: QKey,
    /// The sender's QP.
    pub local_qpn: Qpn,
    /// Reliable datagram only, 24 bits.
    pub local_eecn: u32,
    /// Vendor of the enhanced connection establishment options, one byte beside each of QPN, EECN and PSN.
    pub vendor_id: [u8; 3],
    /// The PSN that the *receiver* shall start with.
    pub starting_psn: Psn,
    /// READs and atomics that the sender serves.
    pub responder_resources: u8,
    /// READs and atomics that the sender will have outstanding.
    pub initiator_depth: u8,
    /// Coded delay of the sender's ACKs, 5 bits.
    pub target_ack_delay: u8,
    /// Answer to the alternate path, 2 bits: 0 accepted, 1 not supported, 2 refused.
    pub failover_accepted: u8,
    /// Whether the sender uses end-to-end credits.
    pub flow_control: bool,
    /// RNR retries for the receiver's QP, 3 bits; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Whether the sender's QP has an SRQ.
    pub srq: bool,
    /// The 4 bits beside it.
    pub reserved: u8,
    /// The sender's adapter.
    pub ca_guid: CaGuid,
    /// For the consumer.
    pub private_data: PrivateData<196>,
}

impl Rep {
    pub(super) fn parse(body: &Body) -> Self {
        let (b26, b27) = (u8_at::<26>(body), u8_at::<27>(body));
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            local_qkey: QKey::new(u32_at::<8>(body)),
            local_qpn: Qpn::from_wire(u24_at::<12>(body)),
            local_eecn: u24_at::<16>(body),
            vendor_id: [u8_at::<15>(body), u8_at::<19>(body), u8_at::<23>(body)],
            starting_psn: Psn::from_wire(u24_at::<20>(body)),
            responder_resources: u8_at::<24>(body),
            initiator_depth: u8_at::<25>(body),
            target_ack_delay: b26 >> 3,
            failover_accepted: (b26 >> 1) & 3,
            flow_control: b26 & 1 != 0,
            rnr_retry_count: b27 >> 5,
            srq: b27 & 0x10 != 0,
            reserved: b27 & 0x0f,
            ca_guid: CaGuid::new(u64_at::<28>(body)),
            private_data: PrivateData::parse::<36>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u32::<8>(body, self.local_qkey.get());
        put_u24::<12>(body, self.local_qpn.get());
        put_u24::<16>(body, self.local_eecn);
        let [high, middle, low] = self.vendor_id;
        put_u8::<15>(body, high);
        put_u8::<19>(body, middle);
        put_u8::<23>(body, low);
        put_u24::<20>(body, self.starting_psn.get());
        put_u8::<24>(body, self.responder_resources);
        put_u8::<25>(body, self.initiator_depth);
        let b26 = (self.target_ack_delay << 3) | ((self.failover_accepted & 3) << 1) | u8::from(self.flow_control);
        put_u8::<26>(body, b26);
        put_u8::<27>(body, (self.rnr_retry_count << 5) | (u8::from(self.srq) << 4) | (self.reserved & 0x0f));
        put_u64::<28>(body, self.ca_guid.get());
        self.private_data.emit::<36>(body);
    }
}
