//! From a destination to the MAC of its next hop.

use core::net::IpAddr;
use std::collections::BTreeMap;

use crate::device::netlink::Netlink;
use crate::time::{Duration, Instant};
use crate::types::MacAddr;

/// Destinations that the fast path knows; two that fall on one place push each other out.
const PLACES: usize = 256;
/// After this time a destination is resolved again (which costs a look-up, not a question to the network).
const FRESH: Duration = Duration::from_secs(1);
/// Routes that are remembered; when there are more, all are asked for again.
const ROUTES_MAX: usize = 1024;
/// How long a route is believed.
const ROUTE_FRESH: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
struct Place {
    destination: IpAddr,
    mac: MacAddr,
    until: Instant,
}

/// The fast path: no allocation, one compare.
#[derive(Debug)]
pub(super) struct HopCache(Box<[Option<Place>; PLACES]>);

impl Default for HopCache {
    fn default() -> Self {
        Self(Box::new([None; PLACES]))
    }
}

impl HopCache {
    pub(super) fn get(&self, now: Instant, destination: IpAddr) -> Option<MacAddr> {
        let place = self.0[place(destination)]?;
        (place.destination == destination && now < place.until).then_some(place.mac)
    }

    pub(super) fn put(&mut self, now: Instant, destination: IpAddr, mac: MacAddr) {
        self.0[place(destination)] = Some(Place { destination, mac, until: now + FRESH });
    }

    pub(super) fn clear(&mut self) {
        self.0.fill(None);
    }
}

/// Peers differ in their last bytes.
fn place(ip: IpAddr) -> usize {
    let (low, high) = match ip {
        IpAddr::V4(v4) => (v4.octets()[3], v4.octets()[2]),
        IpAddr::V6(v6) => (v6.octets()[15], v6.octets()[14]),
    };
    usize::from(low ^ high.rotate_left(3)) % PLACES
}

/// Who knows the way.
pub(in crate::device) enum Routes {
    /// Everybody is on the link.
    OnLink,
    /// The kernel.
    Kernel {
        /// How to ask it.
        netlink: Netlink,
        /// Our interface.
        interface: u32,
        /// Answers.
        known: BTreeMap<IpAddr, (IpAddr, Instant)>,
    },
}

impl Routes {
    /// Asks the kernel for ways out of `interface`.
    pub(in crate::device) const fn kernel(netlink: Netlink, interface: u32) -> Self {
        Self::Kernel { netlink, interface, known: BTreeMap::new() }
    }

    /// The address to resolve for `destination`; `None`: there is no way.
    pub(super) fn next_hop(&mut self, now: Instant, destination: IpAddr) -> Option<IpAddr> {
        let Self::Kernel { netlink, interface, known } = self else { return Some(destination) };
        if let Some((hop, until)) = known.get(&destination)
            && now < *until
        {
            return Some(*hop);
        }
        let route = netlink.route(destination, *interface).ok()?;
        let hop = route.gateway.unwrap_or(destination);
        if known.len() >= ROUTES_MAX {
            known.clear();
        }
        known.insert(destination, (hop, now + ROUTE_FRESH));
        Some(hop)
    }

    /// What the kernel's neighbour table says of `hop`.
    pub(super) fn known_neighbor(&mut self, hop: IpAddr) -> Option<MacAddr> {
        match self {
            Self::OnLink => None,
            Self::Kernel { netlink, interface, .. } => netlink.neighbor(hop, *interface).ok().flatten(),
        }
    }
}
