//! Requester and responder at work, next to the floor: what copying and checking the same bytes costs.
//!
//! `direct` is two endpoints without a device that hand each other packets, `superframes` the same with bursts of up to 64
//! packets, `loopback` two engines over the in-process switch, all in one thread: the
//! work of both sides adds up. Read the ratios of one run; the absolute figures are those of the machine.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uroce::types::PathMtu;
use uroce_benches::{Direct, Kind, Loopback, Pair, Superframes, Wire};

/// Messages of one measurement of small messages, and how many of them are under way.
const SMALL: (u32, u32) = (512, 128);
/// The same of large messages.
const LARGE: (u32, u32) = (4, 2);
const KIB: u32 = 1024;
const MTUS: [PathMtu; 2] = [PathMtu::B1024, PathMtu::B4096];

fn small<W: Wire + Default>(group: &mut BenchmarkGroup<'_, WallTime>, wire: &str) {
    let (count, depth) = SMALL;
    for kind in [Kind::Send, Kind::Write] {
        let mut pair = Pair::<W>::new(64, PathMtu::B4096);
        group.bench_function(BenchmarkId::new(wire, format!("{kind:?}")), |b| {
            b.iter(|| pair.run(kind, 64, count, depth));
        });
    }
}

fn messages(c: &mut Criterion) {
    let mut group = c.benchmark_group("messages_64B");
    group.throughput(Throughput::Elements(SMALL.0.into()));
    parts(&mut group, 64, SMALL.0);
    floor(&mut group, 64, SMALL.0, 64);
    small::<Direct>(&mut group, "direct");
    small::<Superframes>(&mut group, "superframes");
    small::<Loopback>(&mut group, "loopback");
    group.finish();
}

fn large<W: Wire + Default>(group: &mut BenchmarkGroup<'_, WallTime>, wire: &str, length: u32) {
    let (count, depth) = LARGE;
    for mtu in MTUS {
        for kind in [Kind::Write, Kind::Read, Kind::Send] {
            let mut pair = Pair::<W>::new(length as usize, mtu);
            group.bench_function(BenchmarkId::new(wire, format!("{kind:?}/mtu{}", mtu.bytes())), |b| {
                b.iter(|| pair.run(kind, length, count, depth));
            });
        }
    }
}

/// A copy and a CRC of the whole message.
fn parts(group: &mut BenchmarkGroup<'_, WallTime>, length: usize, count: u32) {
    let (from, mut to) = (vec![0xA5; length], vec![0; length]);
    group.bench_function("memcpy", |b| {
        b.iter(|| (0..count).for_each(|_| black_box(&mut to[..]).copy_from_slice(black_box(&from))));
    });
    group.bench_function("crc32fast", |b| {
        b.iter(|| (0..count).fold(0, |sum, _| sum ^ crc32fast::hash(black_box(&from))));
    });
}

/// What no transport of this kind can be faster than: every byte is copied out of a region into a packet and out of the
/// packet into the other region, and its CRC is made and checked.
fn floor(group: &mut BenchmarkGroup<'_, WallTime>, length: usize, count: u32, packet: usize) {
    let (from, mut to) = (vec![0xA5; length], vec![0; length]);
    let mut between = vec![0; packet];
    group.bench_function(BenchmarkId::new("floor", packet), |b| {
        b.iter(|| {
            for _ in 0..count {
                for (from, to) in from.chunks(packet).zip(to.chunks_mut(packet)) {
                    black_box(&mut between[..]).copy_from_slice(black_box(from));
                    black_box((crc32fast::hash(black_box(&between)), crc32fast::hash(black_box(&between))));
                    black_box(to).copy_from_slice(black_box(&between));
                }
            }
        });
    });
}

fn bytes(c: &mut Criterion) {
    for length in [64 * KIB, 1024 * KIB] {
        let mut group = c.benchmark_group(format!("bytes_{}KiB", length / KIB));
        group.throughput(Throughput::Bytes(u64::from(length) * u64::from(LARGE.0)));
        parts(&mut group, length as usize, LARGE.0);
        for mtu in MTUS {
            floor(&mut group, length as usize, LARGE.0, mtu.bytes());
        }
        large::<Direct>(&mut group, "direct", length);
        large::<Superframes>(&mut group, "superframes", length);
        large::<Loopback>(&mut group, "loopback", length);
        group.finish();
    }
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
}

criterion_group!(name = benches; config = short(); targets = messages, bytes);
criterion_main!(benches);
