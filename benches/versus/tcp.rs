//! TCP by itself: a ping-pong and a loop of connect, accept and close, both blocking and spinning.
//!
//! Owns two small programs a kind, server and client. Each prints one line of JSON.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use socket2::{Domain, SockRef, Socket, Type};

use crate::Error;

/// Printed by a server that can be connected to.
pub(crate) const READY: &str = "ready";
/// A server without work for so long ends.
const IDLE: Duration = Duration::from_millis(400);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    Ping,
    Connect,
}

/// Flags of the child.
#[derive(Args)]
pub(crate) struct TcpArgs {
    #[arg(value_enum)]
    what: What,
    /// Where the server listens
    address: SocketAddr,
    /// Be the client
    #[arg(long)]
    client: bool,
    /// Never sleep
    #[arg(long)]
    spin: bool,
    #[arg(long, default_value_t = 8)]
    size: usize,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Connections under way
    #[arg(long, default_value_t = 1)]
    outstanding: usize,
}

pub(crate) fn run(args: &TcpArgs) -> Result<(), Error> {
    match (args.what, args.client) {
        (What::Ping, false) => echo(args),
        (What::Ping, true) => ping(args),
        (What::Connect, false) => accept(args),
        (What::Connect, true) => connect(args),
    }
}

fn listener(args: &TcpArgs) -> Result<TcpListener, Error> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&args.address.into())?;
    socket.listen(BACKLOG)?;
    println!("{READY}");
    Ok(socket.into())
}

/// Tries until it need not wait, or waits in the kernel where the socket blocks.
fn again<T>(mut f: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match f() {
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => std::hint::spin_loop(),
            done => return done,
        }
    }
}

fn receive(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut got = 0;
    while got < buffer.len() {
        match again(|| stream.read(&mut buffer[got..]))? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => got += n,
        }
    }
    Ok(())
}

fn send(stream: &mut TcpStream, buffer: &[u8]) -> io::Result<()> {
    let mut sent = 0;
    while sent < buffer.len() {
        sent += again(|| stream.write(&buffer[sent..]))?;
    }
    Ok(())
}

fn echo(args: &TcpArgs) -> Result<(), Error> {
    let (mut stream, _) = listener(args)?.accept()?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(args.spin)?;
    let mut buffer = vec![0; args.size];
    while receive(&mut stream, &mut buffer).is_ok() {
        send(&mut stream, &buffer)?;
    }
    Ok(())
}

fn ping(args: &TcpArgs) -> Result<(), Error> {
    let mut stream = TcpStream::connect(args.address)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(args.spin)?;
    let (mut buffer, mut number) = (vec![0; args.size], 0u64);
    let mut times = Histogram::<u64>::new_with_max(60_000_000_000, 3)?;
    let begin = Instant::now();
    let (warm, end) = (begin + Duration::from_secs_f64(args.seconds / 10.0), Duration::from_secs_f64(args.seconds));
    loop {
        let start = Instant::now();
        if start - begin >= end {
            break;
        }
        number += 1;
        let stamp = number.to_be_bytes();
        let n = stamp.len().min(buffer.len());
        buffer[..n].copy_from_slice(&stamp[..n]);
        send(&mut stream, &buffer)?;
        receive(&mut stream, &mut buffer)?;
        if start >= warm {
            times.saturating_record(u64::try_from(start.elapsed().as_nanos())?);
        }
        if buffer[..n] != stamp[..n] {
            return Err("another message came back".into());
        }
    }
    let at = |quantile: f64| times.value_at_quantile(quantile) as f64 / 1e3;
    println!(
        "{}",
        serde_json::json!({ "round_trips": times.len(),
            "rtt_us": { "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999) } })
    );
    Ok(())
}

/// Accepts and closes. Counts from the first to the last.
fn accept(args: &TcpArgs) -> Result<(), Error> {
    let listener = listener(args)?;
    listener.set_nonblocking(args.spin)?;
    if !args.spin {
        // An end that comes by itself, without a poll before each accept.
        SockRef::from(&listener).set_read_timeout(Some(IDLE))?;
    }
    let (mut first, mut last, mut count) = (None, Instant::now(), 0u64);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                drop(stream);
                last = Instant::now();
                first.get_or_insert(last);
                count += 1;
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if first.is_some() && last.elapsed() > IDLE {
                    break;
                }
                std::hint::spin_loop();
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    let seconds = first.map_or(0.0, |first| (last - first).as_secs_f64());
    let rate = if seconds > 0.0 { (count - 1) as f64 / seconds } else { 0.0 };
    println!("{}", serde_json::json!({ "connections": count, "rate": rate }));
    Ok(())
}

/// Connects and closes, with `outstanding` handshakes under way. Closing with a reset is the quicker way, and keeps the
/// ports free.
fn connect(args: &TcpArgs) -> Result<(), Error> {
    let begin = Instant::now();
    let end = Duration::from_secs_f64(args.seconds);
    let (mut count, mut waits) = (0u64, Histogram::<u64>::new_with_max(60_000_000_000, 3)?);
    let mut under_way: Vec<(Socket, Instant)> = Vec::new();
    let open = || -> Result<(Socket, Instant), Error> {
        let start = Instant::now();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_linger(Some(Duration::ZERO))?;
        socket.set_nonblocking(args.spin)?;
        match socket.connect(&args.address.into()) {
            Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e.into()),
            _ => Ok((socket, start)),
        }
    };
    while begin.elapsed() < end || !under_way.is_empty() {
        while under_way.len() < args.outstanding.max(1) && begin.elapsed() < end {
            under_way.push(open()?);
        }
        let mut index = 0;
        while index < under_way.len() {
            // A second connect says how the first one went.
            let done = !args.spin
                || match under_way[index].0.connect(&args.address.into()) {
                    Ok(()) => true,
                    Err(e) if e.raw_os_error() == Some(libc::EISCONN) => true,
                    Err(e) if e.raw_os_error() == Some(libc::EALREADY) => false,
                    Err(e) => return Err(e.into()),
                };
            if done {
                let (socket, start) = under_way.swap_remove(index);
                drop(socket);
                waits.saturating_record(u64::try_from(start.elapsed().as_nanos())?);
                count += 1;
            } else {
                index += 1;
            }
        }
    }
    let at = |quantile: f64| waits.value_at_quantile(quantile) as f64 / 1e3;
    let rate = count as f64 / begin.elapsed().as_secs_f64();
    println!(
        "{}",
        serde_json::json!({ "connections": count, "rate": rate, "us": { "p50": at(0.5), "p99": at(0.99), "p999": at(0.999) } })
    );
    Ok(())
}

/// Somewhere to listen.
pub(crate) fn address(host: &str, port: u16) -> String {
    SocketAddr::new(host.parse().unwrap_or(Ipv4Addr::LOCALHOST.into()), port).to_string()
}
