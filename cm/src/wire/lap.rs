//! LAP: offers an alternate path (IBTA Vol 1 12.8.1).

use uroce::types::{Gid, Qpn};

use super::bytes::{Body, get, put, put_u8, put_u16, put_u24, put_u32, u8_at, u16_at, u24_at, u32_at};
use super::fields::{CmTimeout, CommunicationId, PrivateData};

/// A request to load an alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lap {
    /// The sender's id.
    pub local_comm_id: CommunicationId,
    /// The receiver's id.
    pub remote_comm_id: CommunicationId,
    /// The word behind the ids.
    pub reserved: u32,
    /// The receiver's QP.
    pub remote_qpn: Qpn,
    /// How soon the receiver shall answer.
    pub remote_response_timeout: CmTimeout,
    /// LID of the sender's port.
    pub local_lid: u16,
    /// LID of the receiver's port.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: Gid,
    /// GID of the receiver's port.
    pub remote_gid: Gid,
    /// 20 bits.
    pub flow_label: u32,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Packet rate code, 6 bits.
    pub packet_rate: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether both ports are in one subnet.
    pub subnet_local: bool,
    /// Local ACK timeout of the sender, 5 bits.
    pub ack_timeout: u8,
    /// For the consumer.
    pub private_data: PrivateData<168>,
}

impl Lap {
    pub(super) fn parse(body: &Body) -> Self {
        let sl = u8_at::<62>(body);
        Self {
            local_comm_id: CommunicationId::new(u32_at::<0>(body)),
            remote_comm_id: CommunicationId::new(u32_at::<4>(body)),
            reserved: u32_at::<8>(body),
            remote_qpn: Qpn::from_wire(u24_at::<12>(body)),
            remote_response_timeout: CmTimeout::from_wire(u8_at::<15>(body) >> 3),
            local_lid: u16_at::<20>(body),
            remote_lid: u16_at::<22>(body),
            local_gid: Gid::from_bytes(get::<24, 16>(body)),
            remote_gid: Gid::from_bytes(get::<40, 16>(body)),
            flow_label: u24_at::<56>(body) >> 4,
            traffic_class: u8_at::<59>(body),
            hop_limit: u8_at::<60>(body),
            packet_rate: u8_at::<61>(body) & 0x3f,
            service_level: sl >> 4,
            subnet_local: sl & 8 != 0,
            ack_timeout: u8_at::<63>(body) >> 3,
            private_data: PrivateData::parse::<64>(body),
        }
    }

    pub(super) fn emit(&self, body: &mut Body) {
        put_u32::<0>(body, self.local_comm_id.get());
        put_u32::<4>(body, self.remote_comm_id.get());
        put_u32::<8>(body, self.reserved);
        put_u24::<12>(body, self.remote_qpn.get());
        put_u8::<15>(body, self.remote_response_timeout.code() << 3);
        put_u16::<20>(body, self.local_lid);
        put_u16::<22>(body, self.remote_lid);
        put::<24, 16>(body, self.local_gid.to_bytes());
        put::<40, 16>(body, self.remote_gid.to_bytes());
        put_u24::<56>(body, self.flow_label << 4);
        put_u8::<59>(body, self.traffic_class);
        put_u8::<60>(body, self.hop_limit);
        put_u8::<61>(body, self.packet_rate & 0x3f);
        put_u8::<62>(body, (self.service_level << 4) | (u8::from(self.subnet_local) << 3));
        put_u8::<63>(body, self.ack_timeout << 3);
        self.private_data.emit::<64>(body);
    }
}
