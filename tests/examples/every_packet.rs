//! Writes packets of every kind that an endpoint sends, for another decoder to read: `every_packet DIRECTORY`.
//!
//! `opcodes.pcapng`: every opcode that is served, with payloads of 0 to 9 bytes and of a whole path MTU, over IPv4 and
//! IPv6. `cm.pcapng`: the connection managers' messages of the captures and one of each kind made here, through our
//! encoder.

use std::fs::File;
use std::io::BufWriter;
use std::net::IpAddr;
use std::path::Path;

use uroce::burst::RxIds;
use uroce::device::Direction;
use uroce::device::pcap::{PcapOptions, PcapWriter, TapPacket};
use uroce::time::Instant;
use uroce::types::{Gid, PKey, Psn, QKey, Qpn};
use uroce::wire::{
    Body, DONT_FRAGMENT, Datagram, ExtHeader, Flow, IpFields, Opcode, Packet, PayloadRule, Support,
    datagram_source_port, seal, segment_len,
};
use uroce_cm::wire::{
    Apr, AprStatus, Ari, CmTimeout, CommunicationId, Lap, Mad, MadHeader, MadKind, Message, Mra, MraedMessage,
    PrivateData, ServiceId, SidrRep, SidrReq, SidrStatus, TransactionId,
};

type Failure = Box<dyn std::error::Error>;

/// BTH bytes before the extended headers.
const BTH: usize = 12;

struct Writer {
    pcap: PcapWriter<BufWriter<File>>,
    count: u64,
}

impl Writer {
    fn create(path: &Path) -> Result<Self, Failure> {
        let file = BufWriter::new(File::create(path)?);
        Ok(Self { pcap: PcapWriter::new(file, &PcapOptions::new("uroce0"))?, count: 0 })
    }

    /// `packet` from BTH on, without its ICRC, which goes behind it.
    fn write(&mut self, flow: Flow, packet: &[u8]) -> Result<(), Failure> {
        let ids = IpFields { id: 0, flags_fragment: DONT_FRAGMENT };
        let mut bytes = packet.to_vec();
        bytes.resize(segment_len(packet.len(), 0), 0);
        seal(&flow, ids, &mut bytes, packet.len());
        let at = Instant::from_nanos(self.count * 1000);
        let tap = TapPacket { at, direction: Direction::Out, flow, ids: RxIds::Known(ids), bytes: &bytes };
        self.pcap.write(&tap, None)?;
        self.count += 1;
        Ok(())
    }
}

fn flows(src_port: u16) -> [Flow; 2] {
    [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")].map(|(src, dst)| Flow {
        src: src.parse::<IpAddr>().expect("an address"),
        dst: dst.parse::<IpAddr>().expect("an address"),
        src_port,
        traffic_class: 2,
        hop_limit: 64,
        flow_label: 0,
        vlan: None,
    })
}

/// The headers of `opcode` with a value in each field, and `len` bytes of payload: BTH to pad.
fn packet_of(opcode: Opcode, len: usize) -> Vec<u8> {
    let pad = len.wrapping_neg() % 4;
    // M and the A bit as a requester sets them.
    let first = 0x40 | u8::try_from(pad).expect("0 to 3") << 4;
    let mut out = vec![opcode.get(), first, 0xFF, 0xFF, 0, 0, 0, 0x11, 0x80, 0, 0x12, 0x34];
    for header in opcode.headers() {
        match header {
            ExtHeader::Reth => {
                out.extend(0x1000u64.to_be_bytes());
                out.extend([0, 0, 0, 0x55]);
                out.extend(u32::try_from(len).expect("short").to_be_bytes());
            }
            // An ACK without credits, MSN 1.
            ExtHeader::Aeth => out.extend([0x1F, 0, 0, 1]),
            ExtHeader::Deth => out.extend([0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0x12]),
            ExtHeader::CnpReserved => out.extend([0; 16]),
            other => out.resize(out.len() + other.wire_len(), 1),
        }
    }
    assert_eq!(out.len(), opcode.header_len().max(BTH));
    out.extend((0..len).map(|i| u8::try_from(i % 251).expect("below 251")));
    out.resize(out.len() + pad, 0);
    out
}

/// Payload lengths that a sender gives an opcode.
fn lengths(rule: PayloadRule) -> Vec<usize> {
    match rule {
        PayloadRule::None => vec![0],
        PayloadRule::Eight => vec![8],
        PayloadRule::PathMtu => vec![256, 1024, 4096],
        PayloadRule::AtLeastOne => (1..10).chain([256, 4096]).collect(),
        PayloadRule::Any => (0..10).chain([256, 4096]).collect(),
    }
}

fn opcodes(to: &mut Writer) -> Result<(), Failure> {
    for opcode in (0..=255).map(Opcode::new).filter(|o| o.support() == Support::Served) {
        for len in lengths(opcode.payload()) {
            let bytes = packet_of(opcode, len);
            for flow in flows(0xC123) {
                to.write(flow, &bytes)?;
            }
        }
    }
    // Every RNR timer and every NAK code.
    let acknowledge = packet_of(Opcode::new(0x11), 0);
    for syndrome in (0x20..0x40).chain(0x60..0x65) {
        let mut bytes = acknowledge.clone();
        bytes.splice(BTH..=BTH, [syndrome]);
        for flow in flows(0xC123) {
            to.write(flow, &bytes)?;
        }
    }
    Ok(())
}

/// Messages that no capture holds.
fn made_here() -> Vec<Message> {
    let (local, remote) = (CommunicationId::new(0x11), CommunicationId::new(0x22));
    let gid = |ip: [u8; 4]| Gid::from(std::net::Ipv4Addr::from(ip));
    let timeout = CmTimeout::from_wire(20);
    let lap = Lap {
        local_comm_id: local,
        remote_comm_id: remote,
        reserved: 0,
        remote_qpn: Qpn::from_wire(0x33),
        remote_response_timeout: timeout,
        local_lid: 0xFFFF,
        remote_lid: 0xFFFF,
        local_gid: gid([192, 0, 2, 1]),
        remote_gid: gid([192, 0, 2, 2]),
        flow_label: 0,
        traffic_class: 0,
        hop_limit: 64,
        packet_rate: 0,
        service_level: 0,
        subnet_local: false,
        ack_timeout: 17,
        private_data: PrivateData::EMPTY,
    };
    let apr = |status| Apr {
        local_comm_id: local,
        remote_comm_id: remote,
        status,
        info: Ari::EMPTY,
        private_data: PrivateData::EMPTY,
    };
    let service_id = ServiceId::new(0x0000_0000_0111_1B58);
    let request =
        SidrReq { request_id: 7, pkey: PKey::DEFAULT, reserved: 0, service_id, private_data: PrivateData::EMPTY };
    let reply = |status| SidrRep {
        request_id: 7,
        status,
        qpn: Qpn::from_wire(0x44),
        service_id,
        qkey: QKey::new(0x0123_4567),
        info: Ari::EMPTY,
        private_data: PrivateData::EMPTY,
    };
    let mra = Mra {
        local_comm_id: local,
        remote_comm_id: remote,
        message: MraedMessage::Req,
        service_timeout: timeout,
        private_data: PrivateData::EMPTY,
    };
    vec![
        mra.into(),
        lap.into(),
        apr(AprStatus::Success).into(),
        apr(AprStatus::Rejected).into(),
        request.into(),
        reply(SidrStatus::from_code(0)).into(),
        reply(SidrStatus::from_code(1)).into(),
    ]
}

fn datagram(mad: &[u8], bytes: &mut Vec<u8>) {
    let body = Body::Datagram(Datagram { qkey: QKey::new(0x8001_0000), src_qp: Qpn::GSI, imm: None, payload: mad });
    let packet = Packet::new(Qpn::GSI, PKey::DEFAULT, Psn::from_wire(1), body);
    bytes.resize(packet.header_len(), 0);
    packet.write_headers(mad.len(), bytes).expect("room for the headers");
    bytes.extend_from_slice(mad);
}

fn messages(to: &mut Writer) -> Result<(), Failure> {
    let mut mads: Vec<Mad> =
        made_here().into_iter().map(|message| Mad { header: MadHeader::new(TransactionId::new(9)), message }).collect();
    for fixture in uroce_fixtures::all() {
        for frame in fixture.frames()? {
            let Some(udp) = frame.udp_payload().filter(|p| p.first() == Some(&0x64) && p.get(5..8) == Some(&[0, 0, 1]))
            else {
                continue;
            };
            mads.push(Mad::parse(udp.get(20..udp.len() - 4).unwrap_or(&[]))?);
        }
    }
    for kind in MadKind::ALL {
        assert!(mads.iter().any(|m| m.message.kind() == kind), "no {kind}");
    }
    for mad in mads {
        let mut bytes = Vec::new();
        datagram(&mad.emit(), &mut bytes);
        for flow in flows(datagram_source_port(Qpn::GSI)) {
            to.write(flow, &bytes)?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let directory = std::env::args_os().nth(1).ok_or("usage: every_packet DIRECTORY")?;
    let directory = Path::new(&directory);
    let mut writer = Writer::create(&directory.join("opcodes.pcapng"))?;
    opcodes(&mut writer)?;
    writer.pcap.flush()?;
    let mut writer = Writer::create(&directory.join("cm.pcapng"))?;
    messages(&mut writer)?;
    writer.pcap.flush()?;
    Ok(())
}
