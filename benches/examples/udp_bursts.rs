//! What superframes save on UDP sockets: processor time of one thread that owns both ends of a flow.
//!
//! `udp_bursts [ADDRESS ADDRESS [NETNS NETNS]]` (the loopback otherwise). Sends a window of bursts and receives it, over and
//! over; kinds of bursts take turns. Prints nanoseconds a packet for sending and receiving together, medians of the rounds,
//! and what that is in Gbit/s. Neither makes nor checks ICRCs. A loaded machine disturbs it little: time that others had is
//! not counted.

#![allow(clippy::print_stdout)] // A program.

use std::error::Error;
use std::fs::read_to_string;
use std::net::IpAddr;
use std::path::Path;

use uroce::burst::TxBurst;
use uroce::device::udp::{UdpDevice, UdpOptions};
use uroce::device::{Device as _, enter_netns};
use uroce::time::Instant;
use uroce::wire::Flow;

/// Payload and segments of each kind; one segment is measured with and without the options of superframes.
const KINDS: [(usize, usize, bool); 9] = [
    (4096, 1, false),
    (4096, 1, true),
    (4096, 15, true),
    (1024, 1, false),
    (1024, 1, true),
    (1024, 62, true),
    (64, 1, false),
    (64, 1, true),
    (64, 64, true),
];
/// BTH and ICRC.
const OVERHEAD: usize = 16;
/// Bytes under way, and packets.
const WINDOW: usize = 512 << 10;
const WINDOW_PACKETS: usize = 256;
const ROUNDS: usize = 5;
/// Bursts of a round: long beside the tick by which the system counts.
const BURSTS: usize = 1 << 13;

/// Nanoseconds of processor that this thread has had.
fn processor() -> f64 {
    let text = read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0)
}

struct Ends {
    from: UdpDevice,
    to: UdpDevice,
    flow: Flow,
}

impl Ends {
    fn open(x: IpAddr, y: IpAddr, spaces: &[String], superframes: bool) -> Result<Self, Box<dyn Error>> {
        let options = UdpOptions { segments_max: if superframes { 64 } else { 1 }, ..UdpOptions::default() };
        let open = |at, space: Option<&String>| {
            space.map_or(Ok(()), |s| enter_netns(Path::new(s)))?;
            UdpDevice::open_with(at, options).map_err(Box::<dyn Error>::from)
        };
        let (from, to) = (open(x, spaces.first())?, open(y, spaces.get(1))?);
        let flow =
            Flow { src: x, dst: y, src_port: Flow::PORT, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None };
        Ok(Self { from, to, flow })
    }

    /// Moves `packets` packets; returns how many arrived.
    fn round(&mut self, size: usize, segments: usize, packets: usize) -> Result<usize, Box<dyn Error>> {
        let (now, flow, segment) = (Instant::ZERO, self.flow, size + OVERHEAD);
        let template = vec![0xC0; segment];
        let bursts = (WINDOW / segment).min(WINDOW_PACKETS.max(segments)).div_ceil(segments);
        let (mut sent, mut got) = (0, 0);
        while sent < packets {
            sent += segments
                * self.from.transmit(now, bursts, &mut |room| {
                    for place in room.buf.get_mut(..segment * segments)?.chunks_exact_mut(segment) {
                        place.copy_from_slice(&template);
                    }
                    Some(TxBurst { flow, len: segment * segments, segment, segments })
                })?;
            while self.to.receive(now, bursts, &mut |burst| {
                got += burst.bytes.chunks(burst.segment).filter(|s| s.first() == Some(&0xC0)).count();
            })? > 0
            {}
        }
        Ok(got)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let at = |i: usize, usual: &str| words.get(i).map_or(usual, String::as_str).parse::<IpAddr>();
    let (x, y) = (at(0, "127.0.90.1")?, at(1, "127.0.90.2")?);
    let mut times = vec![Vec::new(); KINDS.len()];
    for _ in 0..ROUNDS {
        for (&(size, segments, superframes), times) in KINDS.iter().zip(&mut times) {
            let mut ends = Ends::open(x, y, words.get(2..).unwrap_or_default(), superframes)?;
            ends.round(size, segments, 4096)?;
            let start = processor();
            let got = ends.round(size, segments, BURSTS * segments)?;
            times.push((processor() - start) / got.max(1) as f64);
        }
    }
    for ((size, segments, superframes), mut times) in KINDS.into_iter().zip(times) {
        times.sort_unstable_by(f64::total_cmp);
        let median = times[ROUNDS / 2];
        let how = if superframes { "on" } else { "off" };
        let rate = size as f64 * 8.0 / median;
        println!(
            "{size:5} bytes x {segments:2}, superframes {how:3}: {median:7.0} ns a packet, {rate:6.2} Gbit/s of one thread"
        );
    }
    Ok(())
}
