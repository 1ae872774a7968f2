//! What a hostile peer may send: nothing panics, nothing outside a region is written, memory stays bounded.

use bolero::TypeGenerator;
use uroce::types::{PKey, PathMtu, Psn, Qpn, Rkey};
use uroce::verbs::{Operation, QpType, Verbs};
use uroce::wire::{
    Aeth, AtomicEth, Body, Datagram, IpFields, Packet, Place, Request, RequestOp, Response, ResponseOp, Reth, SendTail,
    Service, Syndrome, WritePart,
};
use uroce_tests::pair::{Options, Pair, Side};

/// A packet of any kind, aimed near the QP's PSNs and memory so that it gets past the first checks.
#[derive(Clone, Debug, TypeGenerator)]
struct Shot {
    kind: u8,
    place: u8,
    psn_offset: i8,
    far: bool,
    addr_offset: i16,
    wild_addr: Option<u64>,
    length: u16,
    wild_length: bool,
    rkey_flip: u8,
    payload: u16,
    syndrome: u8,
    bits: u8,
    back_to_a: bool,
}

fn place(v: u8) -> Place {
    [Place::First, Place::Middle, Place::Last, Place::Only][usize::from(v % 4)]
}

fn body<'a>(shot: &Shot, base: u64, rkey: u32, payload: &'a [u8]) -> Body<'a> {
    let addr = shot.wild_addr.unwrap_or_else(|| base.wrapping_add_signed(shot.addr_offset.into()));
    let length = if shot.wild_length { 1 << 31 } else { u32::from(shot.length) };
    // Mostly the right key, now and then one bit off.
    let rkey = Rkey::new(if shot.rkey_flip < 32 { rkey ^ 1 << shot.rkey_flip } else { rkey });
    let reth = Reth { addr, rkey, length };
    let eth = AtomicEth { addr, rkey, swap_add: 1, compare: 0 };
    let aeth = Aeth { syndrome: Syndrome::from_wire(shot.syndrome), msn: Default::default() };
    let service = if shot.bits & 8 == 0 { Service::Rc } else { Service::Uc };
    let request = |op, payload| Body::Request(Request { service, op, payload });
    let response = |op, payload| Body::Response(Response { op, payload });
    let part = match place(shot.place) {
        Place::First => WritePart::First(reth),
        Place::Middle => WritePart::Middle,
        Place::Last => WritePart::Last(None),
        Place::Only => WritePart::Only(reth, None),
    };
    match shot.kind % 12 {
        0 | 1 => request(RequestOp::Send(place(shot.place), SendTail::None), payload),
        2 | 3 => request(RequestOp::Write(part), payload),
        4 => request(RequestOp::Read(reth), &[]),
        5 => request(RequestOp::CompareSwap(eth), &[]),
        6 => request(RequestOp::FetchAdd(eth), &[]),
        7 => response(ResponseOp::Acknowledge(aeth), &[]),
        8 => response(ResponseOp::ReadMiddle, payload),
        9 => response(ResponseOp::ReadOnly(aeth), payload),
        10 => response(ResponseOp::AtomicAcknowledge(aeth, 1), &[]),
        _ => Body::Datagram(Datagram { qkey: Default::default(), src_qp: Qpn::GSI, imm: None, payload }),
    }
}

/// Seals a shot and hands it over as if the right peer had sent it.
fn fire(p: &mut Pair, shot: &Shot) {
    let target = if shot.back_to_a { Side::A } else { Side::B };
    let (base, rkey, qpn) = {
        let n = p.node(target);
        (n.mr.iova, n.mr.rkey.get(), n.qpn)
    };
    let info = {
        let n = p.node(target);
        n.endpoint.query_qp(n.qp).unwrap()
    };
    let origin = if shot.kind % 12 >= 7 { info.queues.unacked_psn } else { info.queues.rq_psn };
    let psn = if shot.far {
        Psn::from_wire(u32::from(shot.length) << 9)
    } else if shot.psn_offset >= 0 {
        origin.plus(shot.psn_offset.unsigned_abs().into())
    } else {
        origin.minus(shot.psn_offset.unsigned_abs().into())
    };
    let payload = vec![0xEE; usize::from(shot.payload % 1100)];
    let packet = Packet {
        ack_req: shot.bits & 1 != 0,
        solicited: shot.bits & 2 != 0,
        ..Packet::new(qpn, PKey::DEFAULT, psn, body(shot, base, rkey, &payload))
    };
    let payload_len = match &packet.body {
        Body::Request(r) => r.payload.len(),
        Body::Response(r) => r.payload.len(),
        Body::Datagram(d) => d.payload.len(),
        Body::Cnp => 0,
    };
    let header = packet.header_len();
    let mut bytes = vec![0; uroce::wire::segment_len(header, payload_len)];
    if packet.write_headers(payload_len, &mut bytes).is_none() {
        return;
    }
    bytes[header..header + payload_len].copy_from_slice(&payload[..payload_len]);
    let flow = p.flow_from(target.other());
    uroce::wire::seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, header + payload_len);
    p.deliver(target, &bytes);
}

/// A pair whose regions are the middle of larger blocks: the bytes around them are canaries.
fn armed(qp_type: QpType) -> (Pair, [uroce::raw::Region; 2]) {
    let mut p = Pair::new(&Options { qp_type, mtu: PathMtu::B256, region: 4096, rd_atomic: 4, ..Options::default() });
    let outside = [canary(&mut p, Side::A), canary(&mut p, Side::B)];
    for i in 0..8 {
        p.a.recv(i, 0, 600);
        p.b.recv(i, 0, 600);
    }
    if qp_type == QpType::Rc {
        let (there, at) = (p.b.remote(0), p.b.remote(8));
        p.a.send(1, Operation::Write(there), 0, 600);
        p.a.send(2, Operation::Read(there), 1024, 900);
        p.a.send(3, Operation::FetchAdd { remote: at, add: 1 }, 2048, 8);
        p.a.send(4, Operation::Send, 0, 300);
    }
    (p, outside)
}

/// A second region of the same protection domain that grants a peer nothing: nothing may ever write to it.
fn canary(p: &mut Pair, side: Side) -> uroce::raw::Region {
    let n = p.node(side);
    let region = uroce::raw::Region::alloc(4096).unwrap();
    region.write(0, &[0xC5; 4096]).unwrap();
    let (pd, at) = (n.pd, n.mr.iova.wrapping_add(4096));
    n.endpoint.register(pd, &region, uroce::verbs::AccessFlags::LOCAL_WRITE, Some(at)).unwrap();
    region
}

#[test]
fn a_qp_fed_arbitrary_packets_neither_panics_nor_writes_outside_its_region() {
    bolero::check!().with_type::<(u8, Vec<Shot>)>().for_each(|(kind, shots)| {
        let qp_type = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][usize::from(kind % 4)];
        let (mut p, outside) = armed(qp_type);
        for shot in shots.iter().take(64) {
            fire(&mut p, shot);
            p.take_sent(Side::A);
            p.take_sent(Side::B);
        }
        p.next_timer();
        p.take_sent(Side::A);
        for region in &outside {
            assert!(region.to_vec().iter().all(|b| *b == 0xC5));
        }
    });
}

#[test]
fn an_endpoint_fed_arbitrary_bytes_counts_every_one_of_them() {
    bolero::check!().with_type::<Vec<u8>>().for_each(|bytes| {
        let mut p = Pair::new(&Options::default());
        let before = p.b.endpoint.counters().dropped_in_all();
        p.deliver(Side::B, bytes);
        let after = p.b.endpoint.counters();
        assert!(after.dropped_in_all() > before || after.rcvd_pkts > 0);
    });
}
