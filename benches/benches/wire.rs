//! What one packet costs in the wire module, next to the floor: a copy and a plain CRC-32 of the same bytes; and the
//! loops that the stack has for both, next to the compiler's copy and to crc32fast.
//!
//! Read the ratios of one run; the absolute figures are those of the machine.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uroce::raw::copy::{self, Kernel};
use uroce::types::{MacAddr, Msn, PKey, Psn, Qpn, Rkey};
use uroce::wire::{
    Aeth, Body, DONT_FRAGMENT, Flow, IcrcStart, IpFields, Packet, Place, Request, RequestOp, Response, ResponseOp,
    Reth, SendTail, Service, Syndrome, WritePart, check, icrc, parse_ethernet, recover_id, seal, segment_len,
    write_ethernet, write_outer,
};

const FLOW: Flow = Flow {
    src: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    dst: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
    src_port: 0xC123,
    traffic_class: 2,
    hop_limit: 64,
    flow_label: 0,
    vlan: None,
};
const IP: IpFields = IpFields { id: 0x1234, flags_fragment: DONT_FRAGMENT };
const PAYLOADS: [usize; 3] = [64, 1024, 4096];

fn packet(body: Body<'_>) -> Packet<'_> {
    Packet::new(Qpn::from_wire(0x11), PKey::DEFAULT, Psn::from_wire(7), body)
}

fn request(op: RequestOp) -> Packet<'static> {
    packet(Body::Request(Request { service: Service::Rc, op, payload: &[] }))
}

fn kinds() -> [(&'static str, Packet<'static>, usize); 3] {
    let reth = Reth { addr: 0x1000, rkey: Rkey::new(0x55), length: 1024 };
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: Msn::from_wire(1) };
    [
        ("send_only", request(RequestOp::Send(Place::Only, SendTail::None)), 1024),
        ("write_only", request(RequestOp::Write(WritePart::Only(reth, None))), 1024),
        ("ack", packet(Body::Response(Response { op: ResponseOp::Acknowledge(aeth), payload: &[] })), 0),
    ]
}

/// BTH to ICRC, sealed.
fn segment(packet: &Packet<'_>, payload: usize) -> Vec<u8> {
    let mut bytes = vec![0xA5; segment_len(packet.header_len(), payload)];
    let headers = packet.write_headers(payload, &mut bytes).expect("a served packet");
    seal(&FLOW, IP, &mut bytes, headers + payload);
    bytes
}

fn frame(segment: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 42];
    let mac = MacAddr([2, 0, 0, 0, 0, 1]);
    let ethernet = write_ethernet(mac, mac, None, true, &mut bytes).expect("room");
    write_outer(&FLOW, IP.id, segment.len(), &mut bytes[ethernet..]).expect("room");
    bytes.extend(segment);
    bytes
}

fn headers(c: &mut Criterion) {
    let mut group = c.benchmark_group("wire");
    for (name, packet, payload) in kinds() {
        let bytes = segment(&packet, payload);
        let frame = frame(&bytes);
        group.bench_function(BenchmarkId::new("parse", name), |b| {
            b.iter(|| Packet::parse(black_box(&bytes)).is_ok());
        });
        group.bench_function(BenchmarkId::new("parse_ethernet", name), |b| {
            b.iter(|| parse_ethernet(black_box(&frame)).is_ok());
        });
        let mut out = [0; 64];
        group.bench_function(BenchmarkId::new("write_headers", name), |b| {
            b.iter(|| black_box(&packet).write_headers(black_box(payload), black_box(&mut out)));
        });
        group.bench_function(BenchmarkId::new("write_outer", name), |b| {
            b.iter(|| write_outer(black_box(&FLOW), black_box(IP.id), black_box(bytes.len()), black_box(&mut out)));
        });
    }
    group.finish();
}

fn checksums(c: &mut Criterion) {
    let mut group = c.benchmark_group("icrc");
    for payload in PAYLOADS {
        let send = request(RequestOp::Send(Place::Only, SendTail::None));
        let mut bytes = segment(&send, payload);
        let covered = bytes.len() - 4;
        let mut copy = vec![0; bytes.len()];
        group.throughput(Throughput::Bytes(u64::try_from(payload).unwrap_or(0)));
        group.bench_function(BenchmarkId::new("memcpy", payload), |b| {
            b.iter(|| black_box(&mut copy[..]).copy_from_slice(black_box(&bytes)));
        });
        group.bench_function(BenchmarkId::new("crc32fast", payload), |b| {
            b.iter(|| crc32fast::hash(black_box(&bytes[..covered])));
        });
        group.bench_function(BenchmarkId::new("icrc", payload), |b| {
            b.iter(|| icrc(black_box(&FLOW), IP, black_box(&bytes[..covered])));
        });
        group.bench_function(BenchmarkId::new("check", payload), |b| {
            b.iter(|| check(black_box(&FLOW), IP, black_box(&bytes)));
        });
        let start = IcrcStart::new(&FLOW, IP.flags_fragment, bytes.len());
        group.bench_function(BenchmarkId::new("check_from_start", payload), |b| {
            b.iter(|| black_box(start).check(IP.id, black_box(&bytes)));
        });
        group.bench_function(BenchmarkId::new("recover_id", payload), |b| {
            b.iter(|| recover_id(black_box(&FLOW), black_box(&bytes)));
        });
        group.bench_function(BenchmarkId::new("seal", payload), |b| {
            b.iter(|| seal(black_box(&FLOW), IP, black_box(&mut bytes), covered));
        });
    }
    group.finish();
}

/// Copy, CRC and both: the compiler's and `crc32fast`, those of the stack, and each kernel that this processor has.
fn kernels(c: &mut Criterion) {
    let mut group = c.benchmark_group("kernels");
    for len in [64, 256, 1024, 4096, 65_536] {
        let (from, mut to) = (vec![0xA5; len], vec![0; len]);
        group.throughput(Throughput::Bytes(u64::try_from(len).unwrap_or(0)));
        group.bench_function(BenchmarkId::new("copy/compiler", len), |b| {
            b.iter(|| black_box(&mut to[..]).copy_from_slice(black_box(&from)));
        });
        group.bench_function(BenchmarkId::new("copy/ours", len), |b| {
            b.iter(|| copy::copy(black_box(&from), black_box(&mut to)));
        });
        group.bench_function(BenchmarkId::new("crc/crc32fast", len), |b| {
            b.iter(|| crc32fast::hash(black_box(&from)));
        });
        group.bench_function(BenchmarkId::new("crc/ours", len), |b| {
            b.iter(|| copy::crc(0, black_box(&from)));
        });
        group.bench_function(BenchmarkId::new("copy_then_crc/crc32fast", len), |b| {
            b.iter(|| {
                black_box(&mut to[..]).copy_from_slice(black_box(&from));
                crc32fast::hash(black_box(&to))
            });
        });
        for kernel in Kernel::ALL.into_iter().filter(|kernel| kernel.is_available()) {
            group.bench_function(BenchmarkId::new(format!("copy_crc/{kernel:?}"), len), |b| {
                b.iter(|| kernel.copy_crc(0, black_box(&from), black_box(&mut to)));
            });
        }
    }
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
}

criterion_group!(name = benches; config = short(); targets = headers, checksums, kernels);
criterion_main!(benches);
