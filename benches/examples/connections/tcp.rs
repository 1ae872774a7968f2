//! The same with TCP: connect, accept, close on both sides.
//!
//! The client closes first; the server sees the end and closes. Spinning sides use non-blocking sockets and ask again
//! until there is an answer, as a program that spins does.

use std::io::{ErrorKind, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use hdrhistogram::Histogram;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::report;

/// Accepts for ever, and closes what its peer has closed.
pub(super) fn serve(address: SocketAddr, spin: bool) {
    let listener = TcpListener::bind(address).expect("a free port");
    println!("ready");
    if !spin {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            // The end, or the peer's reset, which is an end too.
            let _ = stream.read(&mut [0]);
        }
        return;
    }
    listener.set_nonblocking(true).expect("a socket");
    let mut open: Vec<TcpStream> = Vec::new();
    loop {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).expect("a socket");
            open.push(stream);
        }
        open.retain_mut(|stream| match stream.read(&mut [0]) {
            Err(error) => error.kind() == ErrorKind::WouldBlock,
            Ok(n) => n > 0,
        });
    }
}

/// A connection that is being made.
struct Pending {
    socket: Socket,
    begun: Instant,
}

fn begin(to: &SockAddr) -> Pending {
    let begun = Instant::now();
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), Some(Protocol::TCP)).expect("a socket");
    // In progress, or connected: the next look tells.
    let _ = socket.connect(to);
    Pending { socket, begun }
}

/// Connects `count` times.
pub(super) fn connect(address: SocketAddr, count: u64, at_once: usize, spin: bool) {
    let mut latency = Histogram::<u64>::new_with_max(120_000_000_000, 3).expect("fixed bounds");
    let start = Instant::now();
    let mut note = |begun: Instant| latency.saturating_record(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(0));
    if spin {
        let to = SockAddr::from(address);
        let (mut begun, mut ended) = (0, 0);
        let mut pending: Vec<Pending> = Vec::with_capacity(at_once);
        while ended < count {
            while begun < count && pending.len() < at_once {
                pending.push(begin(&to));
                begun += 1;
            }
            pending.retain(|p| match p.socket.connect(&to) {
                Err(error) if error.raw_os_error() != Some(106) => {
                    assert!(error.kind() != ErrorKind::ConnectionRefused, "{error}");
                    true
                }
                // Connected (106 is EISCONN): dropping it closes it.
                _ => {
                    note(p.begun);
                    ended += 1;
                    false
                }
            });
        }
    } else {
        for _ in 0..count {
            let begun = Instant::now();
            drop(TcpStream::connect(address).expect("a connection"));
            note(begun);
        }
    }
    report("tcp", count, 0, start.elapsed().as_secs_f64(), None, &latency);
}
