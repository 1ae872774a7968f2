//! `uroce cm`: counterparts of the programs that come with librdmacm.
//!
//! Owns the flags that they share, and which device each runs on. Each program has a file of its own.

mod connect;
mod crowd;
mod pattern;
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
    /// Time each step of making and ending connections, as cmtime
    Time(time::TimeArgs),
}

/// Runs the command.
pub(crate) fn run(args: &CmArgs, out: &mut Output) -> Result<(), Failure> {
    match &args.program {
        Program::Connect(args) => connect::run(args, out),
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
    /// Device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID] or pnet:IFNAME [default: udp: on the address of -b;
    /// else client: on the address from which the server is reached; server: udp:127.0.0.1]
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
        let own = v.query_gids().first().map_or(IpAddr::from([0, 0, 0, 0]), |entry| entry.gid.ip());
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
