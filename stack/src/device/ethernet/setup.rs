//! What an address mode means for the sockets of a raw device.

use core::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::io;
use std::os::fd::AsFd as _;

use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::{AddressMode, EthernetPort, Framing, PortConfig, Routes};
use crate::device::filter::{self, Wanted};
use crate::device::netlink::{InterfaceFacts, Netlink};
use crate::device::sys::packet::PacketSocket;
use crate::device::sys::set_int;
use crate::device::{DeviceError, IcrcMode};
use crate::neighbor::solicited_node;
use crate::types::MacAddr;
use crate::wire::{Flow, VlanTag};

/// A raw device that is being opened.
pub(in crate::device) struct Setup {
    pub(in crate::device) facts: InterfaceFacts,
    mac: MacAddr,
    addresses: Vec<IpAddr>,
    vlan: Option<VlanTag>,
    routes: Routes,
    /// Whether we answer for the addresses.
    answers: bool,
    /// Whether the kernel, too, receives what is sent to the addresses.
    guarded: bool,
}

impl Setup {
    /// # Errors
    /// [`DeviceError::NotEthernet`], [`DeviceError::InterfaceDown`], [`DeviceError::NotOurMac`],
    /// [`DeviceError::NoAddress`], [`DeviceError::Io`].
    pub(in crate::device) fn of(
        facts: InterfaceFacts,
        mode: &AddressMode,
        vlan: Option<VlanTag>,
    ) -> Result<Self, DeviceError> {
        let Some(its_mac) = facts.mac else {
            return Err(DeviceError::NotEthernet { name: facts.name });
        };
        if !facts.up {
            return Err(DeviceError::InterfaceDown { name: facts.name });
        }
        let (mac, addresses) = match mode {
            AddressMode::Shared => (its_mac, facts.gid_order()),
            AddressMode::Own { mac, addresses } => (*mac, addresses.clone()),
        };
        if mac.is_multicast() || mac == MacAddr::default() {
            return Err(DeviceError::NotOurMac { mac });
        }
        if addresses.is_empty() {
            return Err(DeviceError::NoAddress { name: facts.name });
        }
        // In a VLAN of its own the device stands alone: the kernel's routes and neighbours are of the untagged network.
        let guarded = *mode == AddressMode::Shared && vlan.is_none();
        let routes = if guarded {
            let netlink = Netlink::open().map_err(|source| DeviceError::Io { action: "opening netlink", source })?;
            Routes::kernel(netlink, facts.index)
        } else {
            Routes::OnLink
        };
        Ok(Self { facts, mac, addresses, vlan, routes, answers: !guarded, guarded })
    }

    /// The program for the receiving socket.
    pub(in crate::device) fn filter(&self) -> Vec<SockFilter> {
        let vlan = self.vlan.map(|v| v.id);
        filter::program(Wanted { addresses: &self.addresses, vlan, answers: self.answers })
    }

    /// What the system's answer at the opening of a packet socket means.
    pub(in crate::device) fn open_error(&self, source: io::Error) -> DeviceError {
        match source.kind() {
            io::ErrorKind::PermissionDenied => DeviceError::MissingCapability {
                what: format!("a packet socket on {}", self.facts.name),
                capability: "cap_net_raw",
            },
            _ => DeviceError::Io { action: "opening a packet socket", source },
        }
    }

    /// Has the interface hear what is for us.
    ///
    /// # Errors
    /// The system's answer.
    pub(in crate::device) fn listen(&self, socket: &PacketSocket) -> io::Result<()> {
        if self.facts.mac != Some(self.mac) {
            socket.promiscuous(self.facts.index)?;
        }
        if !self.answers {
            return Ok(());
        }
        for address in &self.addresses {
            if let IpAddr::V6(v6) = address
                && let Some(group) = MacAddr::for_multicast(solicited_node(*v6).into())
            {
                socket.join_group(self.facts.index, group)?;
            }
        }
        Ok(())
    }

    /// One UDP socket on port 4791 of each address that is the kernel's too. A port without a socket makes the kernel
    /// answer our peers with ICMP port unreachable; and a socket that cannot be had means that another process does
    /// RoCEv2 there. What arrives is dropped before it is queued.
    ///
    /// # Errors
    /// [`DeviceError::PortInUse`], [`DeviceError::Io`].
    pub(in crate::device) fn guards(&self) -> Result<Vec<Socket>, DeviceError> {
        let addresses = if self.guarded { &self.addresses[..] } else { &[] };
        let open = |&address: &IpAddr| {
            guard(address, self.facts.index).map_err(|source| match source.kind() {
                io::ErrorKind::AddrInUse => DeviceError::PortInUse { address },
                _ => DeviceError::Io { action: "reserving UDP port 4791", source },
            })
        };
        addresses.iter().map(open).collect()
    }

    /// The port; `kind` is the word before the colon of the device's name.
    ///
    /// # Errors
    /// [`DeviceError::MtuTooSmall`].
    pub(in crate::device) fn port(
        self,
        kind: &str,
        icrc: IcrcMode,
        framing: Framing,
    ) -> Result<EthernetPort, DeviceError> {
        let mut port = EthernetPort::new(PortConfig {
            name: format!("{kind}:{}", self.facts.name),
            interface: self.facts.name,
            mtu: self.facts.mtu,
            mac: self.mac,
            addresses: self.addresses,
            vlan: self.vlan,
            icrc,
            answers: self.answers,
            routes: self.routes,
            framing,
        })?;
        if self.answers {
            port.announce();
        }
        Ok(port)
    }
}

fn guard(address: IpAddr, interface: u32) -> io::Result<Socket> {
    let v6 = address.is_ipv6();
    let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    socket.attach_filter(&filter::nothing())?;
    socket.set_recv_buffer_size(1)?;
    // Else the kernel segments each superframe, at several times the cost of all the rest, to drop every segment. It lets
    // interfaces that can join what arrives, too: the packet socket then hears superframes. Linux 5.0.
    let _ = set_int(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
    if v6 {
        socket.set_only_v6(true)?;
        // An address whose uniqueness the kernel is still checking cannot be bound otherwise.
        socket.set_freebind_v6(true)?;
    }
    let address = match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, Flow::PORT, 0, interface).into(),
        ip => SocketAddr::new(ip, Flow::PORT),
    };
    socket.bind(&address.into())?;
    Ok(socket)
}
