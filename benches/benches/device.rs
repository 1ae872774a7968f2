//! What a device costs: bursts sent through one port and received from another of the same thread, without an endpoint.
//!
//! `loopback` is the in-process switch, `udp` two sockets on the loopback interface. Nobody makes or checks an ICRC, and the
//! bytes are those of a template. Read the ratios of one run; the absolute figures are those of the machine. `raw` (an
//! example) measures Ethernet devices, between two processes.

// criterion's macros make undocumented items.
#![allow(missing_docs)]

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uroce::burst::{Medium, TxBurst};
use uroce::device::Device;
use uroce::device::loopback::Switch;
use uroce::device::udp::UdpDevice;
use uroce::time::Instant;
use uroce::wire::Flow;

/// Payload of a packet, and packets of a burst.
const KINDS: [(usize, usize); 4] = [(64, 1), (64, 16), (4096, 1), (4096, 15)];
/// BTH and ICRC.
const OVERHEAD: usize = 16;
/// IPv4 and UDP, where the endpoint writes them.
const HEADERS: usize = 28;
/// Bursts under way: few enough for an ordinary user's socket buffer.
const WINDOW: usize = 4;
/// Looks without an arrival after which something is wrong.
const PATIENCE: usize = 1_000_000;

fn address(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 0, 91, last))
}

/// Sends `WINDOW` bursts of `segments` packets and waits until all of their bytes have arrived.
fn window(from: &mut dyn Device, to: &mut dyn Device, template: &[u8], segments: usize) {
    let segment = template.len() / segments;
    let flow = Flow {
        src: address(1),
        dst: address(2),
        src_port: Flow::PORT,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        vlan: None,
    };
    let (mut left, mut got, mut looks) = (WINDOW, 0, 0);
    while got < WINDOW * template.len() {
        from.transmit(Instant::ZERO, left, &mut |room| {
            // The switch takes the headers off and looks at the flow alone, so nobody writes them.
            let headers = if room.medium == Medium::Ip { HEADERS } else { 0 };
            room.buf.get_mut(room.headroom + headers..)?.get_mut(..template.len())?.copy_from_slice(template);
            Some(TxBurst { flow, len: headers + template.len(), segment, segments })
        })
        .map(|taken| left -= taken)
        .expect("a device that works");
        to.receive(Instant::ZERO, WINDOW, &mut |burst| got += burst.bytes.len()).expect("a device that works");
        looks += 1;
        assert!(looks < PATIENCE, "{got} bytes of {}", WINDOW * template.len());
    }
}

fn kinds(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, from: &mut dyn Device, to: &mut dyn Device) {
    for (payload, segments) in KINDS {
        let template = vec![0xC0; (payload + OVERHEAD) * segments];
        group.throughput(Throughput::Elements((WINDOW * segments) as u64));
        group.bench_function(BenchmarkId::new(name, format!("{payload}x{segments}")), |b| {
            b.iter(|| window(from, to, &template, segments));
        });
    }
}

fn devices(c: &mut Criterion) {
    let mut group = c.benchmark_group("device");
    let switch = Switch::new();
    let (mut from, mut to) = (switch.port(&[address(1)]), switch.port(&[address(2)]));
    kinds(&mut group, "loopback", &mut from, &mut to);
    let open = |last| UdpDevice::open(address(last)).expect("nobody else on these addresses");
    let (mut from, mut to) = (open(1), open(2));
    kinds(&mut group, "udp", &mut from, &mut to);
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
}

criterion_group!(name = benches; config = short(); targets = devices);
criterion_main!(benches);
