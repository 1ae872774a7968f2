//! `uroce cm`: counterparts of the programs that come with librdmacm.
//!
//! Owns the flags that they share, and which device each runs on. Each program has a file of its own.

mod connect;
mod crowd;
mod datagram;
mod multicast;
mod pattern;
mod program;
mod time;

use core::net::{IpAddr, SocketAddr};

use clap::{Args, Subcommand};

use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle};
use crate::report::Output;

/// Flags of `uroce cm`.
#[derive(Args, Debug)]
pub(crate) struct CmArgs {
    #[command(subcommand)]
    program: Program,
}

#[derive(Subcommand, Debug)]
enum Program {
    /// Make connections, exchange messages on each and disconnect, as ucmatose
    Connect(connect::ConnectArgs),
    /// Resolve datagram services and exchange datagrams, as udaddy
    Datagram(datagram::DatagramArgs),
    /// Join a multicast group, and send to it or receive from it, as mckey
    Multicast(multicast::MulticastArgs),
    /// Time each step of making and ending connections, as cmtime
    Time(time::TimeArgs),
}

/// Runs the command.
pub(crate) fn run(args: &CmArgs, out: &mut Output) -> Result<(), Failure> {
    match &args.program {
        Program::Connect(args) => connect::run(args, out),
        Program::Datagram(args) => datagram::run(args, out),
        Program::Multicast(args) => multicast::run(args, out),
        Program::Time(args) => time::run(args, out),
    }
}

/// Where both ends are: the flags that all programs have.
#[derive(Args, Debug)]
struct Ends {
    /// The server's address; without it this is the server
    #[arg(short, long)]
    server: Option<String>,
    /// Address to serve on, or to connect from [default: server: all of the device; client: whichever reaches the server]
    #[arg(short, long)]
    bind: Option<IpAddr>,
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR, pnet:IFNAME or hw:NAME [default: udp:
    /// on the address of -b; else client: on the address from which the server is reached; server: udp:127.0.0.1]
    #[arg(long)]
    device: Option<DeviceArg>,
}

impl Ends {
    fn device(&self) -> Result<DeviceArg, Failure> {
        match (&self.device, self.bind, &self.server) {
            (Some(DeviceArg::Loop), ..) => {
                Err(Failure::Usage("a connection is between two processes; loop has one (try `uroce demo`)".into()))
            }
            (Some(device), ..) => Ok(device.clone()),
            (None, Some(bind), _) if !bind.is_unspecified() => Ok(DeviceArg::Udp(bind)),
            (None, _, Some(server)) => node::device_towards(server),
            (None, _, None) => Ok(DeviceArg::Udp(IpAddr::from([127, 0, 0, 1]))),
        }
    }

    /// The address that a server listens on: as said, else all of the family of the device's first address.
    fn listen_on(&self, v: &Handle, port: u16) -> SocketAddr {
        let own = node::gid(&v.query_gids(), None).map_or(IpAddr::from([0, 0, 0, 0]), |(_, gid)| gid.ip());
        let any = if own.is_ipv4() { IpAddr::from([0, 0, 0, 0]) } else { IpAddr::from([0u16; 8]) };
        SocketAddr::new(self.bind.unwrap_or(any), port)
    }

    /// The server's address and port, for a client.
    fn peer(&self, port: u16) -> Result<Option<SocketAddr>, Failure> {
        let server = self.server.as_deref().map(node::resolve).transpose()?;
        Ok(server.map(|ip| SocketAddr::new(ip, port)))
    }

    /// The address that a client binds to.
    fn source(&self) -> Option<SocketAddr> {
        self.bind.map(|ip| SocketAddr::new(ip, 0))
    }
}

/// A number of 8 bits, decimal or with 0x.
fn octet(text: &str) -> Result<u8, String> {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u8::from_str_radix(hex, 16));
    parsed.map_err(|_| "write 0 to 255, or 0x00 to 0xff".into())
}

/// Datagrams do not go beyond a packet.
fn fits(v: &Handle, messages: u32, size: u32) -> Result<(), Failure> {
    let most = v.query_port().active_mtu.bytes();
    if messages == 0 || usize::try_from(size).is_ok_and(|size| size <= most) {
        return Ok(());
    }
    Err(Failure::Usage(format!("this device carries at most {most}, not a datagram of {size}; try a smaller -S")))
}
