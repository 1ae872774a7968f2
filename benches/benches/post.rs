//! What a program's calls cost: the rings below the queues, and posting work requests.
//!
//! Nothing is sent: the peer is the QP itself, and nobody drives the endpoint. Read the ratios of one run; the absolute
//! figures are those of the machine.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::ring::{WqeHead, WqeRingSize, ring, wqe_ring};
use uroce::types::{PathMtu, RnrTimer};
use uroce::verbs::{Operation, RecvWr, SendFlags, Sge, Verbs as _, WorkCompletion};
use uroce_benches::party::{Party, QUEUE};

/// A work request with elements and inline bytes, about as large as the real one.
#[derive(Clone, Copy)]
struct Head {
    _of_the_operation: [u64; 8],
    sges: usize,
    inline: usize,
}

impl WqeHead for Head {
    fn sges(&self) -> usize {
        self.sges
    }

    fn inline_len(&self) -> usize {
        self.inline
    }
}

/// An endpoint, and a QP that is connected to itself.
fn connected() -> (Endpoint, Party) {
    let config = EndpointConfig::new(vec!["10.0.0.1".parse().expect("an address")], PathMtu::B4096);
    let mut endpoint = Endpoint::new(config, [7; 32]);
    let party = Party::new(&mut endpoint, 4096);
    party.connect(&mut endpoint, &party.name(), PathMtu::B4096, RnrTimer::DEFAULT);
    (endpoint, party)
}

fn rings(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    let (mut caller, mut engine) = ring(256);
    let (endpoint, party) = connected();
    drop(endpoint);
    let completion = WorkCompletion::blank(party.qp);
    group.bench_function("completion", |b| {
        b.iter(|| caller.push(black_box(completion)).is_ok() && engine.pop().is_ok());
    });
    let sge = Sge { addr: 0, length: 64, lkey: party.mr.lkey };
    for (name, sges, inline) in [("1 element", 1, 0), ("4 elements", 4, 0), ("64 bytes inline", 0, 64)] {
        let (mut caller, mut engine) = wqe_ring(WqeRingSize { requests: 256, sges: 4, inline: 64 });
        let head = Head { _of_the_operation: [1; 8], sges, inline };
        let (elements, bytes) = (vec![sge; sges], vec![0xA5; inline]);
        let (mut into, mut into_bytes) = ([sge; 4], [0; 64]);
        group.bench_function(BenchmarkId::new("work request", name), |b| {
            b.iter(|| {
                let pushed = caller.push(black_box(head), &elements, &bytes).is_ok();
                let popped = engine.pop(&mut into, &mut into_bytes).is_some();
                engine.release(1);
                pushed && popped
            });
        });
    }
    group.finish();
}

fn posts(c: &mut Criterion) {
    let mut group = c.benchmark_group("post");
    group.throughput(Throughput::Elements(QUEUE.into()));
    group.bench_function("WRITE, one a call", |b| {
        b.iter_batched_ref(
            connected,
            |(endpoint, party)| {
                for _ in 0..QUEUE {
                    party.post(endpoint, Operation::Write(party.name().remote), 64, SendFlags::SIGNALED);
                }
            },
            BatchSize::PerIteration,
        );
    });
    group.bench_function("receive, one a call", |b| {
        b.iter_batched_ref(
            connected,
            |(endpoint, party)| (0..QUEUE).for_each(|_| party.receive(endpoint, 64)),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("receives, all in one call", |b| {
        b.iter_batched_ref(
            connected,
            |(endpoint, party)| {
                let sges = [Sge { addr: party.mr.iova, length: 64, lkey: party.mr.lkey }];
                let wrs = [RecvWr { wr_id: 0, sges: &sges }; QUEUE as usize];
                endpoint.post_recv(party.qp, &wrs).expect("room for the receives");
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
}

criterion_group!(name = benches; config = short(); targets = rings, posts);
criterion_main!(benches);
