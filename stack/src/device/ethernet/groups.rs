//! Multicast groups of a raw device.
//!
//! Owns one UDP socket a group that joined it and receives nothing: so the kernel lets the group's MAC through to the
//! interface, reports the membership (IGMP, MLD) where a switch must know it, and answers the switch's questions. On a VLAN
//! by tag the kernel reports on the untagged network; there the group's MAC is all that the socket does.

use core::net::{IpAddr, Ipv4Addr};
use std::io;

use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};

use crate::device::{DeviceError, GROUPS_MAX, filter};

/// Groups joined on an interface.
pub(in crate::device) struct GroupSockets {
    interface: u32,
    joined: Vec<(IpAddr, Socket)>,
}

impl GroupSockets {
    pub(in crate::device) const fn new(interface: u32) -> Self {
        Self { interface, joined: Vec::new() }
    }

    /// Joins or leaves.
    ///
    /// # Errors
    /// [`DeviceError::Membership`].
    pub(in crate::device) fn set(&mut self, group: IpAddr, member: bool) -> Result<(), DeviceError> {
        let at = self.joined.iter().position(|(ip, _)| *ip == group);
        match (at, member) {
            (Some(at), false) => drop(self.joined.swap_remove(at)),
            (None, true) => {
                let fail = |source| DeviceError::Membership { group, source };
                if self.joined.len() >= GROUPS_MAX {
                    return Err(fail(io::ErrorKind::QuotaExceeded.into()));
                }
                self.joined.push((group, join(group, self.interface).map_err(fail)?));
            }
            _ => {}
        }
        Ok(())
    }
}

fn join(group: IpAddr, interface: u32) -> io::Result<Socket> {
    let domain = if group.is_ipv6() { Domain::IPV6 } else { Domain::IPV4 };
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    // Nobody reads it, and it is bound to no port of ours.
    socket.attach_filter(&filter::nothing())?;
    match group {
        IpAddr::V4(group) => join_v4(&socket, group, interface)?,
        IpAddr::V6(group) => socket.join_multicast_v6(&group, interface)?,
    }
    Ok(socket)
}

/// As [`join`], for IPv4.
pub(in crate::device) fn join_v4(socket: &Socket, group: Ipv4Addr, interface: u32) -> io::Result<()> {
    socket.join_multicast_v4_n(&group, &InterfaceIndexOrAddress::Index(interface))
}
