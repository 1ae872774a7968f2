//! Who may ask for what: rules by source prefix and service id, the first that fits decides.
//!
//! Owns the rules, the prefixes and ranges that they are made of, and how these are written. Pure: it counts nothing and
//! keeps no state.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

use uroce::types::Gid;

use crate::wire::{PortSpace, ServiceId};

/// Rules of a set at most.
pub const RULES_MAX: usize = 1024;
/// Prefixes, and service ranges, of a rule at most.
pub const MATCHES_MAX: usize = 256;
/// Characters of a rule's name at most.
pub const NAME_MAX: usize = 64;
/// Bits that an IPv4 prefix has more as a GID (`::ffff:a.b.c.d`).
const V4_BITS: u8 = 96;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// It goes on to the listener, as far as the rates allow.
    Allow,
    /// It is refused with a word: the peer knows at once.
    Reject,
    /// It is forgotten: the peer does not learn that somebody is here.
    Drop,
}

impl Action {
    /// The word of the grammar.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Reject => "reject",
            Self::Drop => "drop",
        }
    }
}

impl FromStr for Action {
    type Err = MatchError;

    fn from_str(word: &str) -> Result<Self, MatchError> {
        [Self::Allow, Self::Reject, Self::Drop].into_iter().find(|a| a.name() == word).ok_or_else(|| MatchError {
            problem: format!("`{word}` is no action"),
            fix: "write \"allow\", \"reject\" or \"drop\"".to_owned(),
        })
    }
}

/// A word of a rule that cannot be read: what is wrong, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; {fix}")]
pub struct MatchError {
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub fix: String,
}

/// All GIDs that begin with the same bits. `10.0.0.0/8` is the prefix of 104 bits of its mapped form.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GidPrefix {
    bits: u128,
    len: u8,
}

impl GidPrefix {
    /// The prefix of `len` bits of `ip`; `None` when `len` is beyond the address or bits are set beyond `len`.
    #[must_use]
    pub fn new(ip: IpAddr, len: u8) -> Option<Self> {
        let (most, more) = if ip.is_ipv4() { (32, V4_BITS) } else { (128, 0) };
        let bits = u128::from_be_bytes(Gid::from(ip).to_bytes());
        let prefix = Self { bits, len: if len <= most { len + more } else { return None } };
        (bits & !prefix.mask() == 0).then_some(prefix)
    }

    /// Whether `gid` begins with it.
    #[must_use]
    pub fn contains(self, gid: Gid) -> bool {
        u128::from_be_bytes(gid.to_bytes()) & self.mask() == self.bits
    }

    const fn mask(self) -> u128 {
        if self.len == 0 { 0 } else { u128::MAX << (128 - self.len) }
    }
}

impl fmt::Display for GidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Gid::from_bytes(self.bits.to_be_bytes()).ip() {
            IpAddr::V4(ip) if self.len >= V4_BITS => write!(f, "{ip}/{}", self.len - V4_BITS),
            IpAddr::V4(ip) => write!(f, "{}/{}", ip.to_ipv6_mapped(), self.len),
            IpAddr::V6(ip) => write!(f, "{ip}/{}", self.len),
        }
    }
}

impl fmt::Debug for GidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GidPrefix({self})")
    }
}

impl FromStr for GidPrefix {
    type Err = MatchError;

    fn from_str(text: &str) -> Result<Self, MatchError> {
        let (address, len) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let ip: IpAddr = address.parse().map_err(|_| MatchError {
            problem: format!("`{address}` is no IP address"),
            fix: "write an address or a prefix, like \"10.0.0.0/8\", \"10.1.2.3\" or \"fd00::/8\"".to_owned(),
        })?;
        let most: u8 = if ip.is_ipv4() { 32 } else { 128 };
        let len = match len.map(str::parse) {
            None => most,
            Some(Ok(len)) if len <= most => len,
            Some(_) => {
                return Err(MatchError {
                    problem: format!("`{text}` has no prefix length that fits"),
                    fix: format!("write a length from 0 to {most} behind the slash"),
                });
            }
        };
        Self::new(ip, len).ok_or_else(|| {
            let shown = masked(ip, len);
            MatchError {
                problem: format!("`{text}` has bits set beyond its {len} bits"),
                fix: format!("write \"{shown}/{len}\" for the network, or \"{ip}\" for the one address"),
            }
        })
    }
}

/// `ip` with all bits behind the first `len` clear.
fn masked(ip: IpAddr, len: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() & u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0)).into()),
        IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() & u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0)).into()),
    }
}

/// Service ids from one to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceRange {
    first: u64,
    last: u64,
}

impl ServiceRange {
    /// From `first` to `last`; `None` when they stand the wrong way round.
    #[must_use]
    pub const fn new(first: ServiceId, last: ServiceId) -> Option<Self> {
        let (first, last) = (first.get(), last.get());
        if first <= last { Some(Self { first, last }) } else { None }
    }

    /// The ports from `first` to `last` of a port space.
    #[must_use]
    pub const fn ports(space: PortSpace, first: u16, last: u16) -> Option<Self> {
        Self::new(ServiceId::of_port(space, first), ServiceId::of_port(space, last))
    }

    /// Whether `service` is one of them.
    #[must_use]
    pub const fn contains(self, service: ServiceId) -> bool {
        self.first <= service.get() && service.get() <= self.last
    }
}

const SERVICE_FORMS: &str = "write a port (\"tcp:7174\"), ports (\"udp:7000-7999\"), a whole space (\"ib:*\", of tcp, udp, ib, ipoib), a service \
     id (\"0x1000000000000042\") or a range of them (\"0x10-0x1f\")";

impl FromStr for ServiceRange {
    type Err = MatchError;

    fn from_str(text: &str) -> Result<Self, MatchError> {
        let bad = |problem: String| MatchError { problem, fix: SERVICE_FORMS.to_owned() };
        let (space, range) = text.split_once(':').map_or((None, text), |(space, ports)| (Some(space), ports));
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = match space {
            None => (id(low), id(high)),
            Some(space) => {
                let space = space_of(space).ok_or_else(|| bad(format!("`{space}` is no port space")))?;
                let port = |word: &str| word.parse().ok().map(|port| ServiceId::of_port(space, port));
                if range == "*" { (port("0"), port("65535")) } else { (port(low), port(high)) }
            }
        };
        let (Some(first), Some(last)) = (first, last) else {
            return Err(bad(format!("`{text}` names no service")));
        };
        Self::new(first, last).ok_or_else(|| MatchError {
            problem: format!("`{text}` ends before it begins"),
            fix: "write the lower number first".to_owned(),
        })
    }
}

fn id(word: &str) -> Option<ServiceId> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok().map(ServiceId::new)
}

fn space_of(name: &str) -> Option<PortSpace> {
    Some(match name {
        "tcp" => PortSpace::Tcp,
        "udp" => PortSpace::Udp,
        "ib" => PortSpace::Ib,
        "ipoib" => PortSpace::IpOverIb,
        _ => return None,
    })
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// How the audit log calls it; at most [`NAME_MAX`] characters.
    pub name: String,
    /// What becomes of a request that fits.
    pub action: Action,
    /// Sources that fit; empty: all.
    pub from: Vec<GidPrefix>,
    /// Services that fit; empty: all.
    pub service: Vec<ServiceRange>,
}

impl Rule {
    /// A request that names no service fits only a rule that asks for none.
    fn fits(&self, source: Gid, service: Option<ServiceId>) -> bool {
        (self.from.is_empty() || self.from.iter().any(|prefix| prefix.contains(source)))
            && (self.service.is_empty() || service.is_some_and(|id| self.service.iter().any(|r| r.contains(id))))
    }
}

/// Name of the verdict that no rule gave.
pub const DEFAULT_RULE: &str = "default";

/// Rules in their order, and what becomes of a request that fits none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet {
    /// The rules; at most [`RULES_MAX`], each with at most [`MATCHES_MAX`] prefixes and ranges.
    pub rules: Vec<Rule>,
    /// For all others.
    pub default: Action,
}

impl Default for RuleSet {
    /// Everybody may ask for everything.
    fn default() -> Self {
        Self { rules: Vec::new(), default: Action::Allow }
    }
}

impl RuleSet {
    /// The first rule that fits decides. Returns its action, and its position unless it is the default.
    #[must_use]
    pub fn decide(&self, source: Gid, service: Option<ServiceId>) -> (Action, Option<usize>) {
        let found = self.rules.iter().position(|rule| rule.fits(source, service));
        let action = found.and_then(|at| self.rules.get(at)).map_or(self.default, |rule| rule.action);
        (action, found)
    }

    /// Whether nothing that a source may ask for is answered: only `drop` fits it, whatever the service.
    #[must_use]
    pub fn hides_from(&self, source: Gid) -> bool {
        let fitting =
            self.rules.iter().filter(|rule| rule.from.is_empty() || rule.from.iter().any(|p| p.contains(source)));
        for rule in fitting {
            if rule.action != Action::Drop {
                return false;
            }
            if rule.service.is_empty() {
                return true;
            }
        }
        self.default == Action::Drop
    }

    /// The name of the rule at a position that [`RuleSet::decide`] gave.
    #[must_use]
    pub fn name(&self, at: Option<usize>) -> &str {
        at.and_then(|at| self.rules.get(at)).map_or(DEFAULT_RULE, |rule| &rule.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(ip: &str) -> Gid {
        Gid::from(ip.parse::<IpAddr>().unwrap())
    }

    fn prefix(text: &str) -> GidPrefix {
        text.parse().unwrap()
    }

    #[test]
    fn prefixes_of_both_families() {
        for (text, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.2", "11.0.0.0"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.2"),
            ("0.0.0.0/0", "255.1.1.1", "2001::1"),
            ("fd77::/32", "fd77:0:1::1", "fd77:1::1"),
            ("::/0", "10.1.1.1", ""),
            ("128.0.0.0/1", "128.0.0.1", "127.255.255.255"),
        ] {
            assert!(prefix(text).contains(gid(inside)), "{text} {inside}");
            assert!(outside.is_empty() || !prefix(text).contains(gid(outside)), "{text} {outside}");
        }
        assert_eq!(prefix("10.0.0.0/8").to_string(), "10.0.0.0/8");
        assert_eq!(prefix("fd77::/32").to_string(), "fd77::/32");
        assert_eq!(prefix("10.1.2.3").to_string(), "10.1.2.3/32");
    }

    #[test]
    fn a_bad_prefix_says_what_to_write() {
        let said = |text: &str| text.parse::<GidPrefix>().unwrap_err().to_string();
        assert_eq!(
            said("10.1.0.7/16"),
            "`10.1.0.7/16` has bits set beyond its 16 bits; write \"10.1.0.0/16\" for the network, or \"10.1.0.7\" \
             for the one address"
        );
        assert_eq!(
            said("10.0.0.0/33"),
            "`10.0.0.0/33` has no prefix length that fits; write a length from 0 to 32 behind the slash"
        );
        assert!(said("host").starts_with("`host` is no IP address; write an address or a prefix"));
        assert!(said("10.0.0.0/").contains("0 to 32"));
        assert!(said("1.2.3.4/0").contains("\"0.0.0.0/0\""));
        assert!(said("fd00::1/0").contains("\"::/0\""));
    }

    #[test]
    fn services_by_port_and_by_number() {
        let range = |text: &str| text.parse::<ServiceRange>().unwrap();
        let tcp = |port| ServiceId::of_port(PortSpace::Tcp, port);
        assert!(range("tcp:7174").contains(tcp(7174)) && !range("tcp:7174").contains(tcp(7175)));
        assert!(range("tcp:7000-7999").contains(tcp(7999)) && !range("tcp:7000-7999").contains(tcp(8000)));
        assert!(range("tcp:*").contains(tcp(0)) && range("tcp:*").contains(tcp(65_535)));
        assert!(!range("udp:*").contains(tcp(1)));
        assert!(range("0x1000000000000042").contains(ServiceId::new(0x1000_0000_0000_0042)));
        assert!(
            range("0x10-0x1f").contains(ServiceId::new(0x1f)) && !range("0x10-0x1f").contains(ServiceId::new(0x20))
        );
        for bad in ["tcp:", "tcp:70000", "sctp:1", "7174", "tcp:9-8", "0x", "", "tcp:1-2-3", "0xfffffffffffffffff"] {
            assert!(bad.parse::<ServiceRange>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rule = |name: &str, action, from: &[&str], service: &[&str]| Rule {
            name: name.to_owned(),
            action,
            from: from.iter().map(|t| t.parse().unwrap()).collect(),
            service: service.iter().map(|t| t.parse().unwrap()).collect(),
        };
        let set = RuleSet {
            rules: vec![
                rule("black sheep", Action::Drop, &["10.0.0.66"], &[]),
                rule("lab", Action::Allow, &["10.0.0.0/24", "fd77::/32"], &["tcp:7174"]),
                rule("admin", Action::Allow, &["10.9.0.0/16"], &[]),
            ],
            default: Action::Reject,
        };
        let decide = |ip: &str, port| {
            let (action, at) = set.decide(gid(ip), Some(ServiceId::of_port(PortSpace::Tcp, port)));
            (action, set.name(at).to_owned())
        };
        assert_eq!(decide("10.0.0.66", 7174), (Action::Drop, "black sheep".to_owned()));
        assert_eq!(decide("10.0.0.67", 7174), (Action::Allow, "lab".to_owned()));
        assert_eq!(decide("10.0.0.67", 22), (Action::Reject, "default".to_owned()));
        assert_eq!(decide("fd77::8", 7174), (Action::Allow, "lab".to_owned()));
        assert_eq!(decide("10.9.1.1", 22), (Action::Allow, "admin".to_owned()));
        // A LAP names no service.
        assert_eq!(set.decide(gid("10.0.0.67"), None), (Action::Reject, None));
        assert_eq!(set.decide(gid("10.9.0.1"), None), (Action::Allow, Some(2)));
    }
}
