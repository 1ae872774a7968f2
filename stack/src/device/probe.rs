//! Asking a path: does anything answer, is the port open, do packets of this size fit.
//!
//! Owns sockets of the kernel's, beside any device, for people who ask why nothing arrives. What ICMP says is a hint: anyone
//! can forge it. Never on a fast path.

use core::net::{IpAddr, SocketAddr};
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::AsFd as _;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::sys::set_int;
use crate::time::Duration;

/// Bytes of an IPv4 and of an IPv6 header without options.
const IP_HEADER: [usize; 2] = [20, 40];
/// Bytes of the header of an ICMP echo.
const ECHO_HEADER: usize = 8;
/// What the payload of an echo begins with, so that answers of others are told apart.
const MARK: &[u8; 8] = b"uroceask";
/// Answers to others that are skipped while one waits.
const STRANGERS_MAX: usize = 64;

/// What a path said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeAnswer {
    /// The peer answered, after this long.
    Answered(Duration),
    /// The packet does not fit: the interface's MTU or a router's word.
    TooBig,
    /// ICMP port unreachable: the peer is there, and nobody has the port.
    PortClosed,
    /// Nobody at the address, as a router or the neighbour table says.
    NoHost,
    /// No route, or a filter that says so.
    NoRoute,
    /// Nothing came in time.
    Silent,
}

impl ProbeAnswer {
    /// What an error of a socket says of the path; others are errors of this machine.
    fn of(error: io::Error) -> io::Result<Self> {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(Self::Silent),
            ErrorKind::ConnectionRefused => Ok(Self::PortClosed),
            ErrorKind::HostUnreachable => Ok(Self::NoHost),
            // A filter that rejects says "administratively prohibited".
            ErrorKind::NetworkUnreachable | ErrorKind::PermissionDenied => Ok(Self::NoRoute),
            _ if error.raw_os_error() == Some(libc::EMSGSIZE) => Ok(Self::TooBig),
            _ => Err(error),
        }
    }
}

/// ICMP echo with "don't fragment".
pub struct EchoProbe {
    socket: Socket,
    v6: bool,
    /// The system hands out whole IPv4 packets.
    raw: bool,
    ident: u16,
    sequence: u16,
}

impl EchoProbe {
    /// Asks `peer`, from `from` if that is an address of the kernel's.
    ///
    /// # Errors
    /// `PermissionDenied` when the process may neither open ping sockets (`net.ipv4.ping_group_range`) nor raw ones
    /// (`cap_net_raw`); else the system's answer.
    pub fn open(from: Option<IpAddr>, peer: IpAddr) -> io::Result<Self> {
        let v6 = peer.is_ipv6();
        let (domain, protocol) = if v6 { (Domain::IPV6, Protocol::ICMPV6) } else { (Domain::IPV4, Protocol::ICMPV4) };
        let (socket, raw) = match Socket::new(domain, Type::DGRAM, Some(protocol)) {
            Ok(socket) => (socket, false),
            Err(_) => (Socket::new(domain, Type::RAW, Some(protocol))?, true),
        };
        prepare(&socket, v6)?;
        if let Some(from) = from {
            // Where the address is a device's own, the kernel's will do.
            let _ = socket.bind(&SockAddr::from(SocketAddr::new(from, 0)));
        }
        socket.connect(&SockAddr::from(SocketAddr::new(peer, 0)))?;
        // A ping socket puts its own number there.
        let ident = u16::try_from(std::process::id() & 0xFFFF).unwrap_or(0);
        Ok(Self { socket, v6, raw, ident, sequence: 0 })
    }

    /// Sends one echo in an IP packet of `packet_len` bytes (at least 36, IPv6 56), and waits for its answer.
    ///
    /// # Errors
    /// The system's answer, when it says nothing of the path.
    pub fn ask(&mut self, packet_len: usize, patience: Duration) -> io::Result<ProbeAnswer> {
        self.sequence = self.sequence.wrapping_add(1);
        let header = IP_HEADER[usize::from(self.v6)] + ECHO_HEADER;
        let payload = packet_len.saturating_sub(header).max(MARK.len());
        let message = self.message(payload);
        let begin = std::time::Instant::now();
        if let Err(error) = self.socket.send(&message) {
            return ProbeAnswer::of(error);
        }
        let mut buffer = vec![0; packet_len + 128];
        for _ in 0..STRANGERS_MAX {
            let left = patience.saturating_sub(begin.elapsed());
            if left.is_zero() {
                break;
            }
            self.socket.set_read_timeout(Some(left))?;
            match (&self.socket).read(&mut buffer) {
                Ok(len) if self.is_answer(buffer.get(..len).unwrap_or_default()) => {
                    return Ok(ProbeAnswer::Answered(begin.elapsed()));
                }
                Ok(_) => {}
                Err(error) => return ProbeAnswer::of(error),
            }
        }
        Ok(ProbeAnswer::Silent)
    }

    fn message(&self, payload: usize) -> Vec<u8> {
        let kind = if self.v6 { 128 } else { 8 };
        let mut message = vec![kind, 0, 0, 0];
        message.extend(self.ident.to_be_bytes());
        message.extend(self.sequence.to_be_bytes());
        message.extend(MARK);
        message.resize(ECHO_HEADER + payload, 0x5A);
        if !self.v6 {
            // Of ICMPv6 the kernel fills it in; of a ping socket's too, but a raw one's not.
            let sum = checksum(&message);
            message.splice(2..4, sum.to_be_bytes());
        }
        message
    }

    /// Whether `bytes` answer the last echo.
    fn is_answer(&self, bytes: &[u8]) -> bool {
        let header = match bytes.first() {
            Some(first) if self.raw && !self.v6 => usize::from(first & 15) * 4,
            _ => 0,
        };
        let kind = if self.v6 { 129 } else { 0 };
        let Some(message) = bytes.get(header..) else { return false };
        message.first() == Some(&kind)
            && message.get(6..8) == Some(&self.sequence.to_be_bytes())
            && message.get(ECHO_HEADER..ECHO_HEADER + MARK.len()) == Some(MARK)
    }
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).fold(0u32, |sum, pair| {
        let high = u32::from(pair.first().copied().unwrap_or(0)) << 8;
        sum + high + u32::from(pair.get(1).copied().unwrap_or(0))
    });
    let folded = (sum & 0xFFFF) + (sum >> 16);
    let folded = (folded & 0xFFFF) + (folded >> 16);
    !u16::try_from(folded & 0xFFFF).unwrap_or(0)
}

/// UDP datagrams with "don't fragment", and what ICMP says of them. Answers of a RoCEv2 peer do not come here: they go to
/// port 4791.
pub struct UdpProbe {
    socket: Socket,
    peer: SocketAddr,
}

impl UdpProbe {
    /// Sends to `peer` from a free port of `from`.
    ///
    /// # Errors
    /// The system's answer: `AddrNotAvailable` when `from` is not an address of the kernel's.
    pub fn open(from: IpAddr, peer: SocketAddr) -> io::Result<Self> {
        let v6 = peer.is_ipv6();
        let socket = Socket::new(Domain::for_address(peer), Type::DGRAM, Some(Protocol::UDP))?;
        prepare(&socket, v6)?;
        socket.bind(&SockAddr::from(SocketAddr::new(from, 0)))?;
        Ok(Self { socket, peer })
    }

    /// The port that it sends from: the ICRC covers it.
    ///
    /// # Errors
    /// The system's answer.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.socket.local_addr()?.as_socket().map_or(0, |a| a.port()))
    }

    /// Sends `datagram` and waits for an ICMP error. [`ProbeAnswer::Silent`] is good news: nobody complains.
    ///
    /// # Errors
    /// The system's answer, when it says nothing of the path.
    pub fn send(&mut self, datagram: &[u8], patience: Duration) -> io::Result<ProbeAnswer> {
        // The socket is not connected: then the kernel leaves the IPv4 identification 0, as the ICRC has it.
        if let Err(error) = self.socket.send_to(datagram, &SockAddr::from(self.peer)) {
            return ProbeAnswer::of(error);
        }
        self.socket.set_read_timeout(Some(patience))?;
        match (&self.socket).read(&mut [0; 64]) {
            // Somebody's datagram: no complaint.
            Ok(_stray) => Ok(ProbeAnswer::Silent),
            Err(error) => ProbeAnswer::of(error),
        }
    }
}

/// "Don't fragment" on everything, whatever the kernel believes of the path, and ICMP errors of all kinds.
fn prepare(socket: &Socket, v6: bool) -> io::Result<()> {
    let fd = socket.as_fd();
    if v6 {
        set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
        return set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1);
    }
    set_int(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
    set_int(fd, libc::IPPROTO_IP, libc::IP_RECVERR, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(2);

    #[test]
    fn a_checksum_is_the_complement_of_the_sum() {
        // The example of RFC 1071, section 3: 0x2ddf0, folded 0xddf2.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[0xff]), 0x00ff);
    }

    #[test]
    fn a_closed_port_answers_and_an_open_one_is_silent() {
        for ip in ["127.77.90.1", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            let open = std::net::UdpSocket::bind((ip, 0)).unwrap();
            let mut probe = UdpProbe::open(ip, open.local_addr().unwrap()).unwrap();
            let brief = Duration::from_millis(50);
            assert_eq!(probe.send(&[0; 1000], brief).unwrap(), ProbeAnswer::Silent);
            let peer = open.local_addr().unwrap();
            drop(open);
            let mut probe = UdpProbe::open(ip, peer).unwrap();
            assert_eq!(probe.send(&[0; 1000], PATIENCE).unwrap(), ProbeAnswer::PortClosed);
        }
    }

    #[test]
    fn loopback_echoes_what_fits() {
        for ip in ["127.77.90.2", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            let mut probe = match EchoProbe::open(None, ip) {
                Ok(probe) => probe,
                // Neither a ping group nor cap_net_raw: there is nothing to see.
                Err(error) => return assert_eq!(error.kind(), ErrorKind::PermissionDenied),
            };
            for len in [84, 1500, 4200] {
                let answer = probe.ask(len, PATIENCE).unwrap();
                assert!(matches!(answer, ProbeAnswer::Answered(_)), "{ip} {len}: {answer:?}");
            }
        }
    }
}
