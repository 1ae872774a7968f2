//! The simulator itself: its clock, links, hooks, seams and records.

use std::sync::atomic::{AtomicU32, Ordering};

use uroce::burst::RxIds;
use uroce::device::Verdict;
use uroce::device::fault::PacketKind;
use uroce::device::impair::ImpairModel;
use uroce::endpoint::EndpointConfig;
use uroce::raw::Region;
use uroce::sim::{NodeId, RunEnd, World};
use uroce::time::{Duration, Instant};
use uroce::types::{Gid, PathMtu, Psn, Qpn};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, QpAttr, QpCapabilities, QpHandle,
    QpInit, QpTransition, QpType, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs, WcStatus,
};
use uroce::wire::{Packet, check};
use uroce_tests::pair::blank_completion;

const SIZE: usize = 1 << 16;

/// A node with one RC QP and one region.
struct Station {
    node: NodeId,
    qp: QpHandle,
    qpn: Qpn,
    cq: CqHandle,
    region: Region,
    mr: MemoryRegion,
}

fn station(world: &mut World, ip: &str) -> Station {
    let node = world.add_endpoint(EndpointConfig::new(vec![ip.parse().unwrap()], PathMtu::B4096));
    let endpoint = world.endpoint(node);
    let pd = endpoint.alloc_pd().unwrap();
    let cq = endpoint.create_cq(64).unwrap();
    let caps = QpCapabilities::default();
    let init =
        QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
    let qp = endpoint.create_qp(init).unwrap();
    let qpn = endpoint.query_qp(qp).unwrap().qpn;
    let region = Region::alloc(SIZE).unwrap();
    let mr = endpoint.register(pd, &region, AccessFlags::ALL, None).unwrap();
    Station { node, qp, qpn, cq, region, mr }
}

fn connect(world: &mut World, us: &Station, peer: &Station, peer_ip: &str) {
    let rtr = RtrAttr {
        av: AddressVector::new(Gid::from(peer_ip.parse::<std::net::IpAddr>().unwrap()), 0),
        path_mtu: PathMtu::B1024,
        dest_qpn: peer.qpn,
        rq_psn: Psn::from_wire(7),
        max_dest_rd_atomic: 4,
        min_rnr_timer: uroce::types::RnrTimer::DEFAULT,
    };
    let rts = RtsAttr::usual(Psn::from_wire(7));
    let init = InitAttr::connected(AccessFlags::ALL);
    for transition in [QpTransition::Init(init), QpTransition::Rtr(rtr), QpTransition::Rts(rts)] {
        world.endpoint(us.node).modify_qp(us.qp, QpAttr::from(transition)).unwrap();
    }
}

fn connected(seed: u64) -> (World, Station, Station) {
    let mut world = World::new(seed);
    let (a, b) = (station(&mut world, "10.0.0.1"), station(&mut world, "10.0.0.2"));
    connect(&mut world, &a, &b, "10.0.0.2");
    connect(&mut world, &b, &a, "10.0.0.1");
    (world, a, b)
}

/// Posts a WRITE of `len` bytes from the beginning of one region to that of the other.
fn write(world: &mut World, from: &Station, to: &Station, len: u32) {
    let sges = [Sge { addr: from.mr.iova, length: len, lkey: from.mr.lkey }];
    let remote = Remote { addr: to.mr.iova, rkey: to.mr.rkey };
    let operation = Operation::Write(remote);
    let payload = Payload::Sges(&sges);
    let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
    world.endpoint(from.node).post_send(from.qp, &[wr]).unwrap();
}

fn statuses(world: &mut World, of: &Station) -> Vec<WcStatus> {
    let mut out = [blank_completion(of.qp); 8];
    let count = world.endpoint(of.node).poll_cq(of.cq, &mut out).unwrap();
    out[..count].iter().map(|wc| wc.status).collect()
}

#[test]
fn latency_and_bandwidth_are_what_the_links_say() {
    let (mut world, a, b) = connected(1);
    world.set_path(a.node, b.node, ImpairModel::NONE.with_delay(Duration::from_micros(100)));
    // A packet of 1,000 bytes takes 80 us at 100 Mbit/s: IP and UDP 28, BTH 12, RETH 16, ICRC 4, payload 940.
    world.set_bandwidth(a.node, b.node, Some(100_000_000));
    write(&mut world, &a, &b, 940);
    world.run_until(Instant::from_nanos(279_999));
    assert!(statuses(&mut world, &a).is_empty());
    world.run_until(Instant::from_nanos(280_000));
    assert_eq!(statuses(&mut world, &a), [WcStatus::Success], "80 us out, 100 us there, 100 us back");
    assert_eq!(world.now(), Instant::from_nanos(280_000));
    assert_eq!(world.run_until_idle(Duration::from_secs(1)), RunEnd::Idle);
}

#[test]
fn a_hook_loses_the_packet_it_chooses() {
    let (mut world, a, b) = connected(2);
    let mut content = vec![0; SIZE];
    uroce::rng::Rng::from_u64(3).fill(&mut content);
    a.region.write(0, &content).unwrap();
    let seen = AtomicU32::new(0);
    world.set_hook(Box::new(move |passing| {
        let packet = Packet::parse(passing.bytes).unwrap();
        let middle = PacketKind::from_name("write-middle").unwrap().matches(&packet);
        (middle && seen.fetch_add(1, Ordering::Relaxed) == 4).then_some(Verdict::DROP)
    }));
    world.record(1000);
    write(&mut world, &a, &b, 1 << 16);
    assert_eq!(world.run_until_idle(Duration::from_secs(10)), RunEnd::Idle);
    assert_eq!(statuses(&mut world, &a), [WcStatus::Success]);
    assert!(b.region.to_vec() == content);
    assert_eq!(world.recorded().filter(|p| p.verdict == Verdict::DROP).count(), 1);
    assert_eq!(world.link_stats().dropped, 1);
    assert_eq!(world.endpoint(a.node).counters().rcvd_seq_err, 1, "one loss, one NAK");
}

#[test]
fn a_dead_peer_costs_the_time_of_the_formula() {
    let (mut world, a, b) = connected(3);
    world.set_path(a.node, b.node, ImpairModel::lossy(1.0));
    write(&mut world, &a, &b, 1);
    assert_eq!(world.run_until_idle(Duration::from_millis(100)), RunEnd::TimeOver);
    assert_eq!(world.run_until_idle(Duration::from_secs(10)), RunEnd::Idle);
    assert_eq!(statuses(&mut world, &a), [WcStatus::RetryExceeded]);
    // 8 timeouts of 67 ms.
    assert_eq!(world.now(), Instant::from_nanos(8 * 67_108_864));
}

#[test]
fn packets_go_in_and_out_by_hand() {
    let (mut world, a, b) = connected(4);
    world.keep_sent(a.node);
    world.keep_sent(b.node);
    // Nothing that A sends reaches B by itself.
    world.set_link(a.node, b.node, ImpairModel::lossy(1.0));
    a.region.write(0, b"by hand").unwrap();
    write(&mut world, &a, &b, 7);
    let sent = world.take_sent(a.node);
    assert_eq!(sent.len(), 1);
    let ids = uroce::wire::IpFields { id: sent[0].id, flags_fragment: 0x4000 };
    assert!(check(&sent[0].flow, ids, &sent[0].bytes), "the id that was reported is the one in the ICRC");
    world.inject(b.node, sent[0].flow, RxIds::Known(ids), &sent[0].bytes);
    let answers = world.take_sent(b.node);
    assert_eq!(answers.len(), 1);
    let answer = Packet::parse(&answers[0].bytes).unwrap();
    assert!(PacketKind::Ack.matches(&answer));
    assert_eq!(answer.psn, Psn::from_wire(7));
    assert!(world.step(), "the ACK is under way");
    assert_eq!(statuses(&mut world, &a), [WcStatus::Success]);
    assert_eq!(b.region.to_vec()[..7], *b"by hand");
    assert!(world.take_sent(a.node).is_empty());
}

#[test]
fn the_record_is_a_capture() {
    let (mut world, a, b) = connected(5);
    world.record(30);
    world.set_link(a.node, b.node, ImpairModel { duplicate: 1.0, ..ImpairModel::NONE });
    write(&mut world, &a, &b, 20_000);
    world.run_until_idle(Duration::from_secs(1));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.pcapng");
    world.write_pcapng(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    // 20 packets, and an ACK to each copy: the oldest are gone.
    assert_eq!(world.recorded().count(), 30);
    let comment = b"a copy arrives";
    assert!(bytes.windows(comment.len()).any(|w| w == comment));
    for packet in world.recorded() {
        assert!(bytes.windows(packet.bytes.len()).any(|w| w == packet.bytes), "each packet stands there whole");
    }
}

#[test]
fn wire_addresses_and_traces_come_from_the_seed() {
    let hash = |seed| {
        let (mut world, a, b) = connected(seed);
        world.set_path(a.node, b.node, ImpairModel::lossy(0.2).with_delay(Duration::from_micros(3)));
        write(&mut world, &a, &b, 1 << 15);
        assert_eq!(world.run_until_idle(Duration::from_secs(60)), RunEnd::Idle);
        assert_eq!(statuses(&mut world, &a), [WcStatus::Success]);
        (world.trace_hash(), a.mr.iova)
    };
    assert_eq!(hash(6), hash(6));
    let (six, seven) = (hash(6), hash(7));
    assert!(six.0 != seven.0 && six.1 != seven.1);
}
