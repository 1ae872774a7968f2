//! Goodput of one connection under loss, in the simulator, beside what go-back-N can give.
//!
//! `goodput [PACKETS]`: WRITEs of 1 MiB, four posted at any time, over a link of 10 Gbit/s and 5 us each way that loses
//! packets at random in both directions. Prints, for each rate of loss and path MTU, the goodput (bytes of messages that
//! completed, over virtual time), the share of the goodput without loss that this is, the share that theory gives, and
//! the ratio of the two.
//!
//! Theory. A packet takes t on the wire. With probability p it is lost, and is then sent again together with the W packets
//! that went out before the sender knew: those of a round trip, and one that shows the gap. When the NAK is lost, or the
//! lost packet is lost again, nothing is heard before the ACK timer T runs out, for a responder sends one NAK for a gap
//! (IBTA Vol 1 9.7.5). So a packet that arrives costs, in units of t,
//!
//! `1 + p/(1-p) * (W + q * T/t)`, with `q = 1 - (1-p)^2`,
//!
//! and the efficiency is the reciprocal.
#![allow(clippy::print_stdout)] // It is a program.

use std::net::{IpAddr, Ipv4Addr};

use uroce::device::impair::ImpairModel;
use uroce::endpoint::EndpointConfig;
use uroce::raw::Region;
use uroce::sim::{NodeId, World};
use uroce::time::Duration;
use uroce::types::{AckTimeout, PathMtu, Psn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, QpCapabilities, QpHandle, QpInit,
    QpTransition, QpType, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs, WcStatus, WorkCompletion,
};

const BITS_PER_SECOND: u64 = 10_000_000_000;
const DELAY: Duration = Duration::from_micros(5);
/// Code 8: 1.05 ms.
const TIMEOUT: u8 = 8;
const MESSAGE: u32 = 1 << 20;
const DEPTH: u32 = 4;
/// IPv4, UDP, BTH and ICRC; the RETH of a message's first packet apart.
const HEADERS: u32 = 20 + 8 + 12 + 4;
/// IPv4, UDP, BTH, AETH, ICRC: the NAK.
const NAK: u32 = HEADERS + 4;

struct End {
    node: NodeId,
    qp: QpHandle,
    cq: CqHandle,
    mr: MemoryRegion,
}

fn end(world: &mut World, last: u8) -> End {
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
    let node = world.add_endpoint(EndpointConfig::new(vec![address], PathMtu::B4096));
    let verbs = world.endpoint(node);
    let pd = verbs.alloc_pd().expect("room for a PD");
    let cq = verbs.create_cq(64).expect("room for a CQ");
    let region = Region::alloc(MESSAGE as usize).expect("memory");
    let mr = verbs.register(pd, &region, AccessFlags::ALL, None).expect("room for an MR");
    let (qp_type, srq, caps) = (QpType::Rc, None, QpCapabilities::default());
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn: None };
    End { node, qp: verbs.create_qp(init).expect("room for a QP"), cq, mr }
}

fn connect(world: &mut World, own: &End, peer: &End, path_mtu: PathMtu) {
    let verbs = world.endpoint(peer.node);
    let (dgid, dest_qpn) = (verbs.query_gids()[0].gid, verbs.query_qp(peer.qp).expect("it lives").qpn);
    let rtr = RtrAttr {
        av: AddressVector::new(dgid, 0),
        path_mtu,
        dest_qpn,
        rq_psn: Psn::ZERO,
        max_dest_rd_atomic: 16,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    let timeout = AckTimeout::new(TIMEOUT).expect("a code");
    let rts = RtsAttr { timeout, ..RtsAttr::usual(Psn::ZERO) };
    let init = QpTransition::Init(InitAttr::connected(AccessFlags::ALL));
    for step in [init, QpTransition::Rtr(rtr), QpTransition::Rts(rts)] {
        world.endpoint(own.node).modify_qp(own.qp, step.into()).expect("a state that may follow");
    }
}

/// Moves `messages` messages in bursts of `segments` packets at most. Returns bytes of payload a second, and timeouts.
fn run(loss: f64, path_mtu: PathMtu, messages: u32, segments: usize) -> (f64, u64) {
    let mut world = World::new(7);
    world.set_segments_max(segments);
    let (a, b) = (end(&mut world, 1), end(&mut world, 2));
    world.set_path(a.node, b.node, ImpairModel::lossy(loss).with_delay(DELAY));
    for (from, to) in [(a.node, b.node), (b.node, a.node)] {
        world.set_bandwidth(from, to, Some(BITS_PER_SECOND));
        world.set_device_rate(from, Some(BITS_PER_SECOND));
    }
    connect(&mut world, &a, &b, path_mtu);
    connect(&mut world, &b, &a, path_mtu);
    let sges = [Sge { addr: a.mr.iova, length: MESSAGE, lkey: a.mr.lkey }];
    let operation = Operation::Write(Remote { addr: b.mr.iova, rkey: b.mr.rkey });
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 0, operation, payload: Payload::Sges(&sges), flags, destination: None };
    let (mut posted, mut done) = (0, 0);
    let begin = world.now();
    while done < messages {
        let verbs = world.endpoint(a.node);
        let mut out = [WorkCompletion::blank(a.qp); 8];
        let n = verbs.poll_cq(a.cq, &mut out).expect("it lives");
        assert!(out[..n].iter().all(|wc| wc.status == WcStatus::Success), "{:?}", &out[..n]);
        done += u32::try_from(n).expect("8 at most");
        while posted < messages && posted - done < DEPTH {
            verbs.post_send(a.qp, &[wr]).expect("room for a send");
            posted += 1;
        }
        assert!(world.step() || done >= messages, "nothing happens any more");
    }
    let seconds = world.now().saturating_since(begin).as_secs_f64();
    let timeouts = world.endpoint(a.node).counters().local_ack_timeout_err;
    (f64::from(messages) * f64::from(MESSAGE) / seconds, timeouts)
}

/// Packets of a round trip and one, `W`, and the time of a packet in seconds.
fn window(path_mtu: u32) -> (f64, f64) {
    let time = |bytes: u32| f64::from(bytes) * 8.0 / 1e10;
    let packet = time(path_mtu + HEADERS);
    // The packet behind the lost one arrives whole, and its NAK comes back.
    let round_trip = 2.0 * DELAY.as_secs_f64() + packet + time(NAK);
    (1.0 + round_trip / packet, packet)
}

/// The efficiency of go-back-N.
fn theory(p: f64, path_mtu: u32) -> f64 {
    let (window, packet) = window(path_mtu);
    let timeout = AckTimeout::new(TIMEOUT).and_then(AckTimeout::duration).map_or(0.0, |t| t.as_secs_f64());
    let q = 1.0 - (1.0 - p).powi(2);
    1.0 / (1.0 + p / (1.0 - p) * (window + q * timeout / packet))
}

fn main() {
    let packets: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(400_000);
    println!("10 Gbit/s, 5 us each way, ACK timeout 1.05 ms, WRITE 1 MiB, {packets} packets a row");
    println!("| path MTU | burst | W | loss | Gbit/s | of lossless | theory | ratio | timeouts |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (mtu, path_mtu, segments) in [(1024, PathMtu::B1024, 1), (1024, PathMtu::B1024, 8), (4096, PathMtu::B4096, 1)] {
        let messages = (packets / (MESSAGE / mtu)).max(8);
        let (lossless, _) = run(0.0, path_mtu, messages, segments);
        let (window, _) = window(mtu);
        for percent in [0.0, 0.01, 0.1, 1.0, 5.0] {
            let (goodput, timeouts) = run(percent / 100.0, path_mtu, messages, segments);
            let (share, theory) = (goodput / lossless, theory(percent / 100.0, mtu));
            let (gbit, ratio) = (goodput * 8.0 / 1e9, share / theory);
            print!("| {mtu} | {segments} | {window:.1} | {percent} % | {gbit:.2} | {share:.3} | {theory:.3} ");
            println!("| {ratio:.2} | {timeouts} |");
        }
    }
}
