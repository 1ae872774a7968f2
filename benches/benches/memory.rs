//! What a memory region costs: the look-up of a key, and moving bytes in and out.
//!
//! Read the ratios of one run; the absolute figures are those of the machine.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::raw::Region;
use uroce::types::PathMtu;
use uroce::verbs::{AccessFlags, MemoryRegion, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, Sge, Verbs};

const PAGE: usize = 4096;
/// Regions registered beside the one that is looked up.
const OTHERS: usize = 1000;
/// Elements of a scattered payload.
const ELEMENTS: usize = 8;

/// An endpoint with many regions, and one of them.
fn registered() -> (Endpoint, PdHandle, MemoryRegion) {
    let config = EndpointConfig::new(vec!["10.0.0.1".parse().expect("an address")], PathMtu::B4096);
    let mut endpoint = Endpoint::new(config, [7; 32]);
    let pd = endpoint.alloc_pd().expect("room for a PD");
    let mut register = |len| {
        let region = Region::alloc(len).expect("memory");
        endpoint.register(pd, &region, AccessFlags::ALL, None).expect("room for an MR")
    };
    for _ in 0..OTHERS / 2 {
        register(64);
    }
    let mr = register(PAGE);
    for _ in 0..OTHERS / 2 {
        register(64);
    }
    (endpoint, pd, mr)
}

/// A QP, for its handle.
fn queue_pair(endpoint: &mut Endpoint, pd: PdHandle) -> QpHandle {
    let cq = endpoint.create_cq(1).expect("room for a CQ");
    let (qp_type, caps) = (QpType::Rc, QpCapabilities::default());
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
    endpoint.create_qp(init).expect("room for a QP")
}

fn table(c: &mut Criterion) {
    let (mut endpoint, pd, mr) = registered();
    let qp = queue_pair(&mut endpoint, pd);
    let mrs = &*endpoint.memory_mut();
    let mut group = c.benchmark_group("mr");
    group.bench_function("look_up", |b| {
        b.iter(|| mrs.remote(pd, qp, black_box(mr.rkey), black_box(mr.iova), 64, AccessFlags::REMOTE_WRITE).is_ok());
    });
    group.throughput(Throughput::Bytes(PAGE as u64));
    let piece = PAGE / ELEMENTS;
    let whole = [Sge { addr: mr.iova, length: PAGE as u32, lkey: mr.lkey }];
    let parts: Vec<Sge> = (0..ELEMENTS)
        .map(|i| Sge { addr: mr.iova + (i * piece) as u64, length: piece as u32, lkey: mr.lkey })
        .collect();
    let mut bytes = vec![0; PAGE];
    for (name, sges) in [("1", &whole[..]), ("8", &parts[..])] {
        group.bench_function(BenchmarkId::new("gather", name), |b| {
            b.iter(|| mrs.gather(pd, black_box(sges), 0, black_box(&mut bytes)).is_ok());
        });
        group.bench_function(BenchmarkId::new("scatter", name), |b| {
            b.iter(|| mrs.scatter(pd, black_box(sges), 0, black_box(&bytes)).is_ok());
        });
    }
    group.finish();
}

fn region(c: &mut Criterion) {
    let region = Region::alloc(PAGE).expect("memory");
    let (from, mut to) = (vec![0xA5; PAGE], vec![0; PAGE]);
    let mut group = c.benchmark_group("region");
    group.throughput(Throughput::Bytes(PAGE as u64));
    group.bench_function("memcpy", |b| {
        b.iter(|| black_box(&mut to[..]).copy_from_slice(black_box(&from)));
    });
    group.bench_function("write", |b| b.iter(|| region.write(0, black_box(&from)).is_ok()));
    group.bench_function("read", |b| b.iter(|| region.read(0, black_box(&mut to)).is_ok()));
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
}

criterion_group!(name = benches; config = short(); targets = table, region);
criterion_main!(benches);
