//! The TCP exchange of the ibv pingpong programs: each side tells the other its LID, QPN, PSN and GID.
//!
//! Owns the format: `LID:QPN:PSN:GID` in hexadecimal with a NUL, 52 bytes, once for each QP; the client says first, the
//! server answers when its QPs can receive, the client ends with `done` and a NUL. Never touches a QP.

use core::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde::Serialize;
use uroce::types::{Gid, Psn, Qpn};

use crate::exit::Failure;

/// Bytes of the message, NUL included.
const MESSAGE_LEN: usize = 52;
/// What ends the exchange.
const DONE: &[u8; 5] = b"done\0";
/// How long the other program may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// One end of a ping-pong: what a QP is to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dest {
    /// Local identifier: 0 on RoCE.
    pub lid: u16,
    /// QP.
    pub qpn: Qpn,
    /// First PSN that this end sends.
    pub psn: Psn,
    /// Address.
    pub gid: Gid,
}

impl Dest {
    /// Where there is no QP: the SRQ program always tells of as many as it could have.
    pub(super) const NONE: Self =
        Self { lid: 0, qpn: Qpn::from_wire(0), psn: Psn::from_wire(0), gid: Gid::from_bytes([0; 16]) };

    fn to_message(self) -> [u8; MESSAGE_LEN] {
        let gid = u128::from_be_bytes(self.gid.to_bytes());
        let text = format!("{:04x}:{:06x}:{:06x}:{gid:032x}\0", self.lid, self.qpn.get(), self.psn.get());
        let mut message = [0; MESSAGE_LEN];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    fn from_message(message: &[u8; MESSAGE_LEN]) -> Option<Self> {
        let text = core::str::from_utf8(message).ok()?;
        let text = text.split('\0').next()?;
        let mut parts = text.split(':');
        let mut number = |digits: usize| {
            let part = parts.next().filter(|p| p.len() == digits && p.bytes().all(|b| b.is_ascii_hexdigit()))?;
            u128::from_str_radix(part, 16).ok()
        };
        let (lid, qpn, psn, gid) = (number(4)?, number(6)?, number(6)?, number(32)?);
        Some(Self {
            lid: u16::try_from(lid).ok()?,
            qpn: Qpn::new(u32::try_from(qpn).ok()?)?,
            psn: Psn::new(u32::try_from(psn).ok()?)?,
            gid: Gid::from_bytes(gid.to_be_bytes()),
        })
    }
}

impl fmt::Display for Dest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LID {:#06x}, QPN {}, PSN {}, GID {}", self.lid, self.qpn, self.psn, self.gid)
    }
}

impl Serialize for Dest {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;
        let mut map = s.serialize_struct("Dest", 3)?;
        map.serialize_field("qpn", &self.qpn.get())?;
        map.serialize_field("psn", &self.psn.get())?;
        map.serialize_field("gid", &self.gid.to_string())?;
        map.end()
    }
}

/// The client's side: tells `mine` to the server and hears as many of the server's.
pub(super) fn as_client(host: &str, port: u16, mine: &[Dest]) -> Result<Vec<Dest>, Failure> {
    let unreachable = |e: std::io::Error| {
        Failure::Failed(format!("no pingpong server answers at {host} port {port}: {e}; start it there first"))
    };
    let addresses = (host, port).to_socket_addrs().map_err(|e| Failure::Failed(format!("{host}: {e}")))?;
    let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
    let mut stream = None;
    for address in addresses {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(s) => {
                stream = Some(s);
                break;
            }
            Err(e) => last = e,
        }
    }
    let Some(mut stream) = stream else { return Err(unreachable(last)) };
    stream.set_read_timeout(Some(PATIENCE))?;
    tell(&mut stream, mine)?;
    let theirs = hear(&mut stream, mine.len())?;
    stream.write_all(DONE)?;
    Ok(theirs)
}

/// A server that waits for one client.
pub(super) struct Server(TcpListener);

impl Server {
    /// Listens on `port` of all addresses, IPv6 and IPv4.
    pub(super) fn listen(port: u16) -> Result<Self, Failure> {
        let bound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|e| match e.kind() {
            // A machine without IPv6.
            ErrorKind::AddrInUse | ErrorKind::PermissionDenied => Err(e),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        });
        bound.map(Self).map_err(|e| match e.kind() {
            ErrorKind::AddrInUse => Failure::Environment(format!(
                "TCP port {port} is in use by another process; give both sides another one with -p"
            )),
            _ => Failure::Environment(format!("cannot listen on TCP port {port}: {e}")),
        })
    }

    /// Waits for a client and hears where its `count` ends are. Answer with [`Client::answer`] once the QPs can receive.
    pub(super) fn accept(self, count: usize) -> Result<(Client, Vec<Dest>), Failure> {
        let (mut stream, _) = self.0.accept()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let theirs = hear(&mut stream, count)?;
        Ok((Client(stream), theirs))
    }
}

/// A client that waits for the answer.
pub(super) struct Client(TcpStream);

impl Client {
    /// Tells `mine` and waits for the client's `done`.
    pub(super) fn answer(mut self, mine: &[Dest]) -> Result<(), Failure> {
        tell(&mut self.0, mine)?;
        let mut done = [0; DONE.len()];
        self.0.read_exact(&mut done).map_err(|e| Failure::Failed(format!("the client went away: {e}")))?;
        if done == *DONE { Ok(()) } else { Err(Failure::failed("the client did not end the exchange with `done`")) }
    }
}

fn tell(stream: &mut TcpStream, mine: &[Dest]) -> Result<(), Failure> {
    let messages: Vec<u8> = mine.iter().flat_map(|dest| dest.to_message()).collect();
    Ok(stream.write_all(&messages)?)
}

fn hear(stream: &mut TcpStream, count: usize) -> Result<Vec<Dest>, Failure> {
    (0..count).map(|_| hear_one(stream)).collect()
}

fn hear_one(stream: &mut TcpStream) -> Result<Dest, Failure> {
    let mut message = [0; MESSAGE_LEN];
    stream
        .read_exact(&mut message)
        .map_err(|e| Failure::Failed(format!("the peer sent no address: {e}; srq is exchanged with srq alone")))?;
    Dest::from_message(&message)
        .ok_or_else(|| Failure::failed("the peer's address is not of the form LID:QPN:PSN:GID; is it a pingpong?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The client of the capture `rc_pingpong_mtu1024`, in the form that libibverbs' programs send.
    const CAPTURED: &[u8; MESSAGE_LEN] = b"0000:000036:5b53cb:00000000000000000000ffff0a4d0001\0";

    #[test]
    fn a_message_is_read_and_written() {
        let dest = Dest::from_message(CAPTURED).unwrap();
        assert_eq!(dest.to_string(), "LID 0x0000, QPN 0x000036, PSN 0x5b53cb, GID ::ffff:10.77.0.1");
        assert_eq!(&dest.to_message(), CAPTURED);
    }

    #[test]
    fn anything_else_is_refused() {
        let mut short = *CAPTURED;
        short[50] = 0;
        assert_eq!(Dest::from_message(&short), None);
        let mut letter = *CAPTURED;
        letter[6] = b'g';
        assert_eq!(Dest::from_message(&letter), None);
        let mut sign = *CAPTURED;
        sign[5] = b'+';
        assert_eq!(Dest::from_message(&sign), None, "from_str_radix takes a sign; the format has none");
        assert_eq!(Dest::from_message(&[0xff; MESSAGE_LEN]), None);
    }
}
