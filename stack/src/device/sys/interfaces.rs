//! The interfaces of this machine: names, MTUs and addresses.
#![allow(unsafe_code)] // This directory is where system calls are.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use crate::types::MacAddr;

/// An interface.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// Name, e.g. `eth0`.
    pub(crate) name: String,
    /// Number; the scope of link-local addresses.
    pub(crate) index: u32,
    /// Largest IP packet.
    pub(crate) mtu: usize,
    /// Whether it is up.
    pub(crate) up: bool,
    /// Whether it is the loopback.
    pub(crate) loopback: bool,
    /// Link address, where it has one.
    pub(crate) mac: Option<MacAddr>,
    /// Addresses, each with the length of its prefix.
    pub(crate) addresses: Vec<(IpAddr, u8)>,
}

impl Interface {
    /// Whether `address` lies in the network of one of the interface's addresses.
    pub(crate) fn covers(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|&(own, prefix)| match (own, address) {
            (IpAddr::V4(o), IpAddr::V4(a)) => (o.to_bits() ^ a.to_bits()).leading_zeros() >= prefix.into(),
            (IpAddr::V6(o), IpAddr::V6(a)) => (o.to_bits() ^ a.to_bits()).leading_zeros() >= prefix.into(),
            _ => false,
        })
    }
}

/// All interfaces, in the system's order.
///
/// # Errors
/// The system's answer.
pub(crate) fn list() -> io::Result<Vec<Interface>> {
    // Any socket will do to ask for an MTU.
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)?;
    let socket = std::os::fd::AsFd::as_fd(&socket);
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is a valid place for the list's first pointer.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut out = Vec::new();
    let mut next = head;
    // SAFETY: `next` is null or an entry of the list, which lives until `freeifaddrs` below; entries are only read.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        add(&mut out, entry, socket);
    }
    // SAFETY: `head` came from `getifaddrs`, is freed once, and nothing above kept a pointer into the list.
    unsafe { libc::freeifaddrs(head) };
    Ok(out)
}

fn add(out: &mut Vec<Interface>, entry: &libc::ifaddrs, socket: BorrowedFd<'_>) {
    // SAFETY: `ifa_name` is a terminated string that lives as long as the entry.
    let name = unsafe { CStr::from_ptr(entry.ifa_name) };
    let text = name.to_string_lossy();
    let at = if let Some(at) = out.iter().position(|i| i.name == text) {
        at
    } else {
        // SAFETY: `name` is a terminated string.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        let Some(mtu) = mtu(socket, name).filter(|_| index != 0) else {
            return; // It went away while we looked.
        };
        let loopback = entry.ifa_flags & libc::IFF_LOOPBACK.cast_unsigned() != 0;
        let up = entry.ifa_flags & libc::IFF_UP.cast_unsigned() != 0;
        out.push(Interface { name: text.into_owned(), index, mtu, up, loopback, mac: None, addresses: Vec::new() });
        out.len() - 1
    };
    let Some(interface) = out.get_mut(at) else { return };
    // SAFETY: both pointers are null or socket addresses of the family that they name, alive as long as the entry.
    match unsafe { (address(entry.ifa_addr), address(entry.ifa_netmask)) } {
        (Some(Address::Ip(ip)), mask) => {
            let prefix = match mask {
                Some(Address::Ip(IpAddr::V4(m))) => m.to_bits().leading_ones(),
                Some(Address::Ip(IpAddr::V6(m))) => m.to_bits().leading_ones(),
                _ => u32::from(u8::MAX),
            };
            interface.addresses.push((ip, u8::try_from(prefix).unwrap_or(u8::MAX)));
        }
        (Some(Address::Link(mac)), _) => interface.mac = Some(mac),
        (None, _) => {}
    }
}

/// What `ethtool` says of an interface: the value of one of its questions that have a single number for an answer.
///
/// # Errors
/// The system's answer: `Unsupported` and the like when the driver does not say.
pub(crate) fn ethtool(name: &str, question: u32) -> io::Result<u32> {
    // `struct ethtool_value`.
    ask_ethtool::<2>(name, question).map(|[_, data]| data)
}

/// Receive queues that an interface uses.
///
/// # Errors
/// As for [`ethtool`].
pub(crate) fn receive_queues(name: &str) -> io::Result<u32> {
    const CHANNELS: u32 = 0x3c;
    // `struct ethtool_channels`: four maxima, then queues that receive, that send, others, and those that do both.
    let [_, _, _, _, _, receive, _, _, combined] = ask_ethtool(name, CHANNELS)?;
    Ok(receive.saturating_add(combined))
}

/// Name of an interface's driver.
///
/// # Errors
/// As for [`ethtool`].
pub(crate) fn driver(name: &str) -> io::Result<String> {
    const DRIVER: u32 = 3;
    // `struct ethtool_drvinfo`: 196 bytes, of which the name is the first 32.
    let answer: [u32; 49] = ask_ethtool(name, DRIVER)?;
    let bytes = answer.iter().skip(1).take(8).flat_map(|word| word.to_ne_bytes());
    Ok(bytes.take_while(|byte| *byte != 0).map(char::from).collect())
}

/// Asks a question whose answer takes `N` words, the question first.
fn ask_ethtool<const N: usize>(name: &str, question: u32) -> io::Result<[u32; N]> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)?;
    // SAFETY: `ifreq` is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let mut value = [0; N];
    value[0] = question;
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names an interface and a value of the size that its question has; both outlive the call.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// The `ioctl` of ethtool(7).
const SIOCETHTOOL: u32 = 0x8946;

enum Address {
    Ip(IpAddr),
    Link(MacAddr),
}

/// Reads a socket address.
///
/// # Safety
/// `at` is null or points to a socket address that is as long as its family says.
unsafe fn address(at: *const libc::sockaddr) -> Option<Address> {
    // SAFETY: see above; null gives `None`.
    let family = unsafe { at.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: an AF_INET address is a `sockaddr_in`.
            let a = unsafe { at.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Address::Ip(Ipv4Addr::from_bits(u32::from_be(a.sin_addr.s_addr)).into()))
        }
        libc::AF_INET6 => {
            // SAFETY: an AF_INET6 address is a `sockaddr_in6`.
            let a = unsafe { at.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Address::Ip(Ipv6Addr::from(a.sin6_addr.s6_addr).into()))
        }
        libc::AF_PACKET => {
            // SAFETY: an AF_PACKET address is a `sockaddr_ll`.
            let a = unsafe { at.cast::<libc::sockaddr_ll>().read_unaligned() };
            let mac = a.sll_addr.first_chunk::<6>().filter(|_| a.sll_halen == 6)?;
            (*mac != [0; 6]).then_some(Address::Link(MacAddr(*mac)))
        }
        _ => None,
    }
}

fn mtu(socket: BorrowedFd<'_>, name: &CStr) -> Option<usize> {
    // SAFETY: `ifreq` is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    // SAFETY: SIOCGIFMTU takes an `ifreq` with a terminated name and fills in `ifru_mtu`.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) } != 0 {
        return None;
    }
    // SAFETY: the system has just written this member.
    usize::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_there_and_covers_its_network() {
        let all = list().unwrap();
        let lo = all.iter().find(|i| i.loopback).unwrap();
        assert!(lo.addresses.contains(&(Ipv4Addr::LOCALHOST.into(), 8)));
        assert!(lo.covers(Ipv4Addr::new(127, 9, 8, 7).into()));
        assert!(!lo.covers(Ipv4Addr::new(126, 9, 8, 7).into()));
        assert!(lo.index > 0);
        assert!(lo.mtu >= 1500);
        assert_eq!(lo.mac, None);
    }
}
