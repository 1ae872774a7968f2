//! REQ: asks for a connection (IBTA Vol 1 12.6.5).

use uroce::types::{PKey, PathMtu, Psn, QKey, Qpn};

use super::bytes::{Body, put_u8, put_u16, put_u24, put_u32, put_u64, u8_at, u16_at, u24_at, u32_at, u64_at};
use super::fields::{
    CaGuid, CmTimeout, CommunicationId, PathRecord, PrivateData, TransportService, emit_alternate, emit_primary,
    parse_alternate, parse_primary,
};
use super::service::ServiceId;

/// A connection request. "Local" is the sender, "remote" the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// The sender's id for the communication.
    pub local_comm_id: CommunicationId,
    /// Vendor of the enhanced connection establishment options, 24 bits; 0 without.
    pub vendor_id: u32,
    /// What is asked for.
    pub service_id: ServiceId,
    /// The sender's adapter.
    pub ca_guid: CaGuid,
    /// Datagram services only; 0.
    pub local_qkey: QKey,
    /// The sender's QP.
    pub local_qpn: Qpn,
    /// READs and atomics that the sender can serve.
    pub responder_resources: u8,
    /// Reliable datagram only, 24 bits.
    pub local_eecn: u32,
    /// READs and atomics that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// Reliable datagram only, 24 bits.
    pub remote_eecn: u32,
    /// How soon the receiver shall answer this message.
    pub remote_response_timeout: CmTimeout,
    /// Transport service.
    pub transport: TransportService,
    /// Whether the sender uses end-to-end credits.
    pub flow_control: bool,
    /// The PSN that the *receiver* shall start with.
    pub starting_psn: Psn,
    /// How soon the sender will answer.
    pub local_response_timeout: CmTimeout,
    /// Transport retries for the receiver's QP, 3 bits.
    pub retry_count: u8,
    /// Partition.
    pub pkey: PKey,
    /// Path MTU code, 4 bits; 1 to 5 are valid.
    pub path_mtu_code: u8,
    /// Reliable datagram only.
    pub rdc_exists: bool,
    /// RNR retries for the receiver's QP, 3 bits; 7 is for ever.
    pub rnr_retry_count: u8,
    /// How often either side repeats a message, 4 bits.
    pub max_cm_retries: u8,
    /// Whether the sender's QP has an SRQ.
    pub srq: bool,
    /// Extended transport type, 3 bits.
    pub extended_transport: u8,
    /// Where the connection runs.
    pub primary: PathRecord,
    /// Where it may move; all zero without.
    pub alternate: PathRecord,
    /// For the consumer; rdma_cm services begin it with an [`IpHeader`](super::IpHeader).
    pub private_data: PrivateData<92>,
}

impl Req {
    /// The path MTU, if the code names one.
    #[must_use]
    pub const fn path_mtu(&self) -> Option<PathMtu> {
        PathMtu::from_code(self.path_mtu_code)
    }

    pub(super) fn parse(body: &Body) -> Self {
        let (b43, b47, b50, b51) = (u8_at::<43>(body), u8_at::<47>(body), u8_at::<50>(body), u8_at::<51>(body));
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            vendor_id: u24_at::<5>(body),
            service_id: ServiceId::new(u64_at::<8>(body)),
            ca_guid: CaGuid::new(u64_at::<16>(body)),
            local_qkey: QKey::new(u32_at::<28>(body)),
            local_qpn: Qpn::from_wire(u24_at::<32>(body)),
            responder_resources: u8_at::<35>(body),
            local_eecn: u24_at::<36>(body),
            initiator_depth: u8_at::<39>(body),
            remote_eecn: u24_at::<40>(body),
            remote_response_timeout: CmTimeout::from_wire(b43 >> 3),
            transport: TransportService::from_wire(b43 >> 1),
            flow_control: b43 & 1 != 0,
            starting_psn: Psn::from_wire(u24_at::<44>(body)),
            local_response_timeout: CmTimeout::from_wire(b47 >> 3),
            retry_count: b47 & 7,
            pkey: PKey::new(u16_at::<48>(body)),
            path_mtu_code: b50 >> 4,
            rdc_exists: b50 & 8 != 0,
            rnr_retry_count: b50 & 7,
            max_cm_retries: b51 >> 4,
            srq: b51 & 8 != 0,
            extended_transport: b51 & 7,
            primary: parse_primary(body),
            alternate: parse_alternate(body),
            private_data: PrivateData::parse::<140>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u24::<5>(body, self.vendor_id);
        put_u64::<8>(body, self.service_id.get());
        put_u64::<16>(body, self.ca_guid.get());
        put_u32::<28>(body, self.local_qkey.get());
        put_u24::<32>(body, self.local_qpn.get());
        put_u8::<35>(body, self.responder_resources);
        put_u24::<36>(body, self.local_eecn);
        put_u8::<39>(body, self.initiator_depth);
        put_u24::<40>(body, self.remote_eecn);
        let b43 =
            (self.remote_response_timeout.code() << 3) | (self.transport.code() << 1) | u8::from(self.flow_control);
        put_u8::<43>(body, b43);
        put_u24::<44>(body, self.starting_psn.get());
        put_u8::<47>(body, (self.local_response_timeout.code() << 3) | (self.retry_count & 7));
        put_u16::<48>(body, self.pkey.get());
        let b50 = (self.path_mtu_code << 4) | (u8::from(self.rdc_exists) << 3) | (self.rnr_retry_count & 7);
        put_u8::<50>(body, b50);
        let b51 = (self.max_cm_retries << 4) | (u8::from(self.srq) << 3) | (self.extended_transport & 7);
        put_u8::<51>(body, b51);
        emit_primary(&self.primary, body);
        emit_alternate(&self.alternate, body);
        self.private_data.emit::<140>(body);
    }
}
