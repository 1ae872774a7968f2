//! What a device moves by itself: superframes of one flow from a template, without an endpoint.
//!
//! `raw send|recv|ping|echo --device DEVICE [--peer ADDRESS] [--size BYTES] [--segments N] [--seconds S] [--window BYTES]
//! [--netns PATH] [--apart true]`. A segment is `size` bytes and the 16 of BTH and ICRC. `send` fills bursts of up to `segments` segments
//! within a window that `recv` opens; `ping` sends a burst to `echo` and waits for one back, with
//! `--apart` its segments as frames of one call. `send` and `ping` need the
//! peer; `recv` and `echo` take whoever speaks, and end with him. Each prints one line of JSON. Neither makes nor checks
//! ICRCs, and the receiver touches headers alone.
//!
//! DEVICE: `udp:ADDRESS`, `packet:IFNAME` or `xdp:IFNAME`, the last two with `,mac=MAC,ip=ADDRESS` or without, `xdp:` with
//! `,mode=native`, `,mode=generic` and `,busy=MICROSECONDS`, too, `packet:` with `,receive=calls` and `,receive=ring`.

#![allow(clippy::print_stdout, clippy::print_stderr, clippy::cast_sign_loss)] // A program; its floats are not negative.

use std::env;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use uroce::burst::{Medium, RxBurst, TxBurst, choose_source_port};
use uroce::device::af_packet::{AfPacket, AfPacketConfig, ReceiveBy};
use uroce::device::af_xdp::{AfXdp, AfXdpConfig, XdpMode};
use uroce::device::udp::{UdpDevice, UdpOptions};
use uroce::device::{Device, enter_netns};
use uroce::time::Instant;
use uroce::types::MacAddr;
use uroce::wire::{Flow, write_outer};

/// BTH and ICRC.
const OVERHEAD: usize = 16;
/// Opcodes that no transport has: an endpoint that hears them drops them.
const DATA: u8 = 0xC0;
const CREDIT: u8 = 0xC1;
const END: u8 = 0xC2;
/// Bursts under way, beside the window in bytes.
const WINDOW_BURSTS: u64 = 1024;
/// Without a credit for so long, what is under way is lost.
const PATIENCE: Duration = Duration::from_millis(20);
/// A receiver that has heard something ends when it hears no more.
const IDLE: Duration = Duration::from_secs(2);
/// Bursts a call.
const BUDGET: usize = 64;

type Error = Box<dyn std::error::Error>;

struct Args {
    role: String,
    device: String,
    peer: Option<IpAddr>,
    size: usize,
    segments: usize,
    seconds: f64,
    window: u64,
    /// Segments leave as bursts of their own, handed over at once.
    apart: bool,
}

fn parse<T: FromStr>(text: &str, what: &str) -> Result<T, Error> {
    text.parse().map_err(|_| format!("{what}: `{text}`").into())
}

impl Args {
    fn read() -> Result<Self, Error> {
        let mut words = env::args().skip(1);
        let role = words.next().ok_or("send, recv, ping or echo")?;
        let mut args = Self {
            role,
            device: String::new(),
            peer: None,
            size: 4096,
            segments: 1,
            seconds: 2.0,
            window: 1 << 20,
            apart: false,
        };
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--device" => args.device = value,
                "--peer" => args.peer = Some(parse(&value, &name)?),
                "--size" => args.size = parse(&value, &name)?,
                "--segments" => args.segments = parse::<usize>(&value, &name)?.max(1),
                "--seconds" => args.seconds = parse(&value, &name)?,
                "--window" => args.window = parse(&value, &name)?,
                "--apart" => args.apart = parse(&value, &name)?,
                "--netns" => enter_netns(&PathBuf::from(value))?,
                _ => return Err(format!("no such option: {name}").into()),
            }
        }
        Ok(args)
    }
}

fn mac(text: &str) -> Result<MacAddr, Error> {
    let bytes: Result<Vec<u8>, _> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect();
    Ok(MacAddr(bytes?.try_into().map_err(|_| "a MAC has six bytes")?))
}

fn open(text: &str) -> Result<Box<dyn Device>, Error> {
    let (kind, rest) = text.split_once(':').ok_or("--device udp:ADDRESS, packet:IFNAME or xdp:IFNAME")?;
    let mut parts = rest.split(',');
    let first = parts.next().unwrap_or_default();
    let (mut own, mut addresses) = (None, Vec::new());
    let (mut mode, mut busy_poll, mut receive) = (XdpMode::Auto, None, ReceiveBy::default());
    for part in parts {
        match part.split_once('=') {
            Some(("mac", v)) => own = Some(mac(v)?),
            Some(("mode", "native")) => mode = XdpMode::Native,
            Some(("mode", "generic")) => mode = XdpMode::Generic,
            Some(("receive", "calls")) => receive = ReceiveBy::Calls,
            Some(("receive", "ring")) => receive = ReceiveBy::Ring,
            Some(("busy", v)) => busy_poll = Some(parse(v, "busy")?),
            Some(("ip", v)) => addresses.push(parse(v, "ip")?),
            _ => return Err(format!("no such option of a device: {part}").into()),
        }
    }
    Ok(match kind {
        "udp" => Box::new(UdpDevice::open_with(parse(rest, "--device udp")?, UdpOptions::default())?),
        "packet" => {
            let config = match own {
                Some(mac) => AfPacketConfig::own(first, mac, addresses),
                None => AfPacketConfig::shared(first),
            };
            Box::new(AfPacket::open(AfPacketConfig { receive, ..config })?)
        }
        "xdp" => {
            let config = match own {
                Some(mac) => AfXdpConfig::own(first, mac, addresses),
                None => AfXdpConfig::shared(first),
            };
            Box::new(AfXdp::open(&AfXdpConfig { mode, busy_poll, ..config })?)
        }
        _ => return Err(format!("no such device: {kind}").into()),
    })
}

/// A device with one flow to a peer.
struct Side {
    device: Box<dyn Device>,
    start: std::time::Instant,
    /// One segment.
    template: Vec<u8>,
    segments: usize,
}

impl Side {
    fn new(args: &Args) -> Result<Self, Error> {
        let device = open(&args.device)?;
        // The IP packet of a superframe is no longer than an IP packet can be.
        let most = ((65_535 - 48) / (args.size + OVERHEAD)).max(1);
        let segments = args.segments.min(device.capabilities().segments_max).min(most);
        let template = (0..args.size + OVERHEAD).map(|i| i as u8).collect();
        Ok(Self { device, start: std::time::Instant::now(), template, segments })
    }

    fn now(&self) -> Instant {
        Instant::ZERO + self.start.elapsed()
    }

    fn flow(&self, to: IpAddr) -> Result<Flow, Error> {
        let ours = &self.device.capabilities().addresses;
        let src = *ours.iter().find(|a| a.is_ipv4() == to.is_ipv4()).ok_or("no address of the peer's family")?;
        let src_port = choose_source_port(self.device.source_ports(), 0xC077);
        Ok(Flow { src, dst: to, src_port, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None })
    }

    /// Offers `bursts` bursts of `segments` segments of `kind` that carry `value`; returns how many were taken.
    fn offer(&mut self, flow: &Flow, kind: u8, value: u64, segments: usize, bursts: usize) -> Result<usize, Error> {
        let now = self.now();
        let template = &mut self.template;
        template[0] = kind;
        template[8..16].copy_from_slice(&value.to_be_bytes());
        let segment = if kind == DATA { template.len() } else { OVERHEAD };
        let mut left = bursts;
        let taken = self.device.transmit(now, bursts, &mut |room| {
            left = left.checked_sub(1)?;
            let count = segments.min(room.segments_max);
            let out = &mut room.buf[room.headroom..];
            let header = match room.medium {
                Medium::Ip => write_outer(flow, room.ids.id(0), count * segment, out).expect("room for headers"),
                Medium::Udp => 0,
            };
            for place in out[header..header + count * segment].chunks_exact_mut(segment) {
                place.copy_from_slice(&template[..segment]);
            }
            Some(TxBurst { flow: *flow, len: header + count * segment, segment, segments: count })
        })?;
        Ok(taken)
    }

    /// Hands each received burst's kind, value, segments and bytes to `f`.
    fn take(&mut self, mut f: impl FnMut(u8, u64, u64, &RxBurst<'_>)) -> Result<usize, Error> {
        let now = self.now();
        Ok(self.device.receive(now, BUDGET, &mut |burst| {
            if let Some(head) = burst.bytes.first_chunk::<16>() {
                let value = u64::from_be_bytes(*head.last_chunk().expect("eight of sixteen"));
                // As an endpoint would, a look at each segment's header.
                let segments = burst.bytes.chunks(burst.segment).filter(|s| s.first() == head.first()).count() as u64;
                f(head[0], value, segments, &burst);
            }
        })?)
    }

    /// Nothing came in a round: lets a peer on the same core run.
    fn idle(&mut self) -> Result<(), Error> {
        // Sends what the device itself wants sent.
        let now = self.now();
        self.device.transmit(now, 1, &mut |_| None)?;
        std::thread::yield_now();
        Ok(())
    }
}

/// Nanoseconds of processor that this thread has had.
fn processor() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0)
}

fn report(side: &Side, args: &Args, packets: u64, lost: u64, elapsed: f64, cpu: f64) {
    let device = side.device.lost();
    println!(
        "{{\"role\":\"{}\",\"device\":\"{}\",\"size\":{},\"segments\":{},\"seconds\":{elapsed:.3},\"gbit_s\":{:.3},\
         \"kpps\":{:.1},\"cpu_ns_per_packet\":{:.0},\"lost\":{lost},\"device_lost\":[{},{}]}}",
        args.role,
        args.device,
        args.size,
        side.segments,
        (packets as f64 * args.size as f64) * 8.0 / elapsed / 1e9,
        packets as f64 / elapsed / 1e3,
        cpu / packets.max(1) as f64,
        device.transmit,
        device.receive,
    );
}

fn send(side: &mut Side, args: &Args) -> Result<(), Error> {
    let flow = side.flow(args.peer.ok_or("--peer")?)?;
    let per_burst = side.segments as u64;
    let window = (args.window / side.template.len() as u64).clamp(per_burst, WINDOW_BURSTS * per_burst);
    let (mut sent, mut credited, mut lost) = (0u64, 0u64, 0u64);
    // Resolution and both caches.
    side.offer(&flow, DATA, 0, side.segments, 1)?;
    let first = side.now();
    while credited == 0 {
        side.take(|kind, value, _, _| credited = if kind == CREDIT { value } else { credited })?;
        side.idle()?;
        if side.now() > first + Duration::from_secs(5) {
            return Err("nobody answers".into());
        }
    }
    sent += credited;
    let (start, cpu, begin) = (side.now(), processor(), sent);
    let (end, mut heard) = (start + Duration::from_secs_f64(args.seconds), start);
    loop {
        let now = side.now();
        if now >= end {
            break;
        }
        let before = credited;
        side.take(|kind, value, _, _| credited = if kind == CREDIT { credited.max(value) } else { credited })?;
        if credited > before {
            heard = now;
        } else if now > heard + PATIENCE {
            // The receiver's count goes on from what it has; ours is moved there.
            lost += (sent - lost).saturating_sub(credited);
            heard = now;
        }
        let under_way = (sent - lost).saturating_sub(credited);
        let bursts = (window.saturating_sub(under_way) / per_burst).min(BUDGET as u64) as usize;
        if bursts > 0 {
            sent += side.offer(&flow, DATA, 0, side.segments, bursts)? as u64 * per_burst;
        } else if credited == before {
            side.idle()?;
        }
    }
    let (elapsed, cpu) = ((side.now() - start).as_secs_f64(), processor() - cpu);
    for _ in 0..3 {
        side.offer(&flow, END, 0, 1, 1)?;
        std::thread::sleep(Duration::from_millis(5));
    }
    report(side, args, sent - begin, lost, elapsed, cpu);
    Ok(())
}

fn recv(side: &mut Side, args: &Args) -> Result<(), Error> {
    let (mut got, mut bursts, mut told, mut from, mut ended) = (0u64, 0u64, 0u64, None, false);
    let (mut first, mut last, mut cpu) = (None, side.now(), 0.0);
    // Soon enough that the sender never waits for it.
    let step = (args.window / 8 / side.template.len() as u64).clamp(1, WINDOW_BURSTS / 8 * side.segments as u64);
    while !ended {
        side.take(|kind, _, segments, burst| match kind {
            DATA => {
                got += segments;
                bursts += 1;
                from = Some(burst.flow.src);
            }
            END => ended = true,
            _ => {}
        })?;
        let now = side.now();
        if let (Some(peer), true) = (from, got - told >= step || (told == 0 && got > 0)) {
            if first.is_none() {
                (first, cpu) = (Some((now, got)), processor());
            }
            let flow = side.flow(peer)?;
            side.offer(&flow, CREDIT, got, 1, 1)?;
            (told, last) = (got, now);
        } else if got > told && now > last + Duration::from_millis(1) {
            told = got - step.min(got);
            last = now;
        } else {
            side.idle()?;
            if first.is_some() && now > last + IDLE {
                break;
            }
        }
    }
    let (start, base) = first.ok_or("nothing came")?;
    report(side, args, got - base, 0, (last - start).as_secs_f64().max(1e-9), processor() - cpu);
    eprintln!("segments a received burst: {:.1}", got as f64 / bursts.max(1) as f64);
    Ok(())
}

fn ping(side: &mut Side, args: &Args) -> Result<(), Error> {
    let flow = side.flow(args.peer.ok_or("--peer")?)?;
    let (start, mut times, mut lost, mut value) = (side.now(), Vec::with_capacity(1 << 20), 0, 0u64);
    // A tenth of the time is for warming up.
    let (warm, end) =
        (start + Duration::from_secs_f64(args.seconds / 10.0), start + Duration::from_secs_f64(args.seconds));
    while side.now() < end {
        value += 1;
        let (asked, mut back) = (side.now(), 0);
        let (segments, bursts) = if args.apart { (1, side.segments) } else { (side.segments, 1) };
        side.offer(&flow, DATA, value, segments, bursts)?;
        while back < side.segments as u64 {
            side.take(|kind, v, segments, _| back += if kind == DATA && v == value { segments } else { 0 })?;
            if side.now() > asked + Duration::from_millis(100) {
                lost += 1;
                side.idle()?;
                break;
            }
        }
        let now = side.now();
        if back > 0 && now > warm {
            times.push((now - asked).as_nanos() as f64 / 1e3);
        }
    }
    side.offer(&flow, END, 0, 1, 1)?;
    times.sort_unstable_by(f64::total_cmp);
    let at = |p: f64| times.get((times.len() as f64 * p) as usize).copied().unwrap_or(f64::NAN);
    println!(
        "{{\"role\":\"ping\",\"device\":\"{}\",\"size\":{},\"segments\":{},\"round_trips\":{},\"lost\":{lost},\
         \"rtt_us\":{{\"p50\":{:.2},\"p90\":{:.2},\"p99\":{:.2},\"p999\":{:.2}}}}}",
        args.device,
        args.size,
        side.segments,
        times.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999),
    );
    Ok(())
}

fn echo(side: &mut Side, args: &Args) -> Result<(), Error> {
    let (mut got, mut value, mut from, mut ended) = (0, 0, None, false);
    let mut heard = side.now();
    while !ended && (from.is_none() || side.now() < heard + IDLE) {
        side.take(|kind, v, segments, burst| match kind {
            DATA => {
                got = if v == value { got + segments } else { segments };
                (value, from) = (v, Some(burst.flow.src));
            }
            END => ended = true,
            _ => {}
        })?;
        if let (Some(peer), true) = (from, got >= side.segments as u64) {
            let flow = side.flow(peer)?;
            let (segments, bursts) = if args.apart { (1, side.segments) } else { (side.segments, 1) };
            side.offer(&flow, DATA, value, segments, bursts)?;
            (got, heard) = (0, side.now());
        }
    }
    Ok(())
}

fn run() -> Result<(), Error> {
    let args = Args::read()?;
    let mut side = Side::new(&args)?;
    match args.role.as_str() {
        "send" => send(&mut side, &args),
        "recv" => recv(&mut side, &args),
        "ping" => ping(&mut side, &args),
        "echo" => echo(&mut side, &args),
        other => Err(format!("no such role: {other}").into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("raw: {e}");
            ExitCode::FAILURE
        }
    }
}
