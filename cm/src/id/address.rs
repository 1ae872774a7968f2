//! Which of a device's addresses a connection starts from.

use core::net::{IpAddr, Ipv6Addr};

use uroce::types::Gid;
use uroce::verbs::GidEntry;

/// The entry of the GID table that reaches `destination`: `wanted`, if it is there and of the same family; else the one
/// of the same family and scope with the longest common prefix, the first of equals.
pub(super) fn choose_source(gids: &[GidEntry], destination: IpAddr, wanted: Option<IpAddr>) -> Option<(u8, Gid)> {
    let mut best: Option<(u32, u8, Gid)> = None;
    for (index, entry) in (0u8..=u8::MAX).zip(gids) {
        let ip = entry.gid.ip();
        let fits = match (ip, destination) {
            _ if !entry.is_usable() => false,
            (IpAddr::V4(_), IpAddr::V4(_)) => true,
            (IpAddr::V6(a), IpAddr::V6(b)) => is_link_local(a) == (is_link_local(b) || is_link_local_group(b)),
            _ => false,
        };
        let allowed = wanted.is_none_or(|w| w == ip);
        let prefix = common_prefix(entry.gid, destination);
        if fits && allowed && best.is_none_or(|(longest, ..)| prefix > longest) {
            best = Some((prefix, index, entry.gid));
        }
    }
    best.map(|(_, index, gid)| (index, gid))
}

/// The entry with this address.
pub(super) fn find(gids: &[GidEntry], ip: IpAddr) -> Option<(u8, Gid)> {
    (0u8..=u8::MAX).zip(gids).find(|(_, e)| e.is_usable() && e.gid.ip() == ip).map(|(i, e)| (i, e.gid))
}

const fn is_link_local(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xffc0 == 0xfe80
}

/// ff02::/16, ff12::/16 and so on.
const fn is_link_local_group(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xff0f == 0xff02
}

fn common_prefix(gid: Gid, ip: IpAddr) -> u32 {
    (u128::from_be_bytes(gid.to_bytes()) ^ u128::from_be_bytes(Gid::from(ip).to_bytes())).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use uroce::verbs::GidType;

    #[test]
    fn entries_that_roce_v2_cannot_use_are_passed_over() {
        let v1 = GidEntry { gid: Gid::from(IpAddr::from([10, 77, 0, 1])), gid_type: GidType::RoceV1 };
        let empty = GidEntry { gid: Gid::default(), gid_type: GidType::RoceV2 };
        let gids = [empty, v1, GidEntry { gid_type: GidType::RoceV2, ..v1 }];
        assert_eq!(choose_source(&gids, IpAddr::from([10, 77, 0, 2]), None).map(|(i, _)| i), Some(2));
        assert_eq!(choose_source(&gids, "2001:db8::1".parse().unwrap(), None), None);
        assert_eq!(find(&gids, v1.gid.ip()).map(|(i, _)| i), Some(2));
        assert_eq!(find(&gids, empty.gid.ip()), None);
    }

    #[test]
    fn family_scope_and_prefix_decide() {
        let ips = ["fe80::77:ff:fe00:1", "10.77.0.1", "fd77::1", "10.78.0.1"];
        let gids: Vec<GidEntry> = ips
            .iter()
            .map(|ip| GidEntry { gid: ip.parse::<IpAddr>().unwrap().into(), gid_type: GidType::RoceV2 })
            .collect();
        let index = |dst: &str, wanted: Option<&str>| {
            let wanted = wanted.map(|w| w.parse().unwrap());
            choose_source(&gids, dst.parse().unwrap(), wanted).map(|(i, _)| i)
        };
        assert_eq!(index("10.77.0.2", None), Some(1));
        assert_eq!(index("10.78.9.9", None), Some(3));
        assert_eq!(index("fe80::1", None), Some(0));
        assert_eq!((index("ff02::1:2", None), index("ff0e::1:2", None)), (Some(0), Some(2)));
        assert_eq!(index("239.7.7.7", None), Some(1));
        assert_eq!(index("fd77::2", None), Some(2));
        assert_eq!(index("10.77.0.2", Some("10.78.0.1")), Some(3));
        assert_eq!(index("10.77.0.2", Some("10.79.0.1")), None);
        assert_eq!(index("10.77.0.2", Some("fd77::1")), None);
    }
}
