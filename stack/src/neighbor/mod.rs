//! Neighbours on Ethernet: who has an address, and answering for our own.
//!
//! Owns the cache from IP address to MAC, the ARP requests and neighbour solicitations that fill it, and, for an
//! endpoint that owns its MAC and addresses, the answers to ARP, neighbour solicitation (RFC 826, RFC 4861, RFC 5227)
//! and ping. Sans-IO: frames go in through [`Neighbors::handle_frame`] and out through [`Neighbors::poll_frame`]; the
//! caller brings the time. Frames are untagged here, the device adds and removes VLAN tags. Never sees RoCEv2 packets
//! and never routes: the caller says which next hop it wants.

mod cache;
mod frame;
mod heard;

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::VecDeque;

use self::cache::{Action, Cache};
use self::heard::Heard;
use crate::time::{Duration, Instant};
use crate::types::MacAddr;

/// Addresses that the cache holds; the one used longest ago makes room.
pub const NEIGHBORS_MAX: usize = 1024;
/// Frames that wait for [`Neighbors::poll_frame`]; further ones are dropped (a solicitation is repeated, a peer asks again).
pub const FRAMES_MAX: usize = 64;
/// Time between two solicitations (RFC 4861 `RETRANS_TIMER`).
pub const RETRY: Duration = Duration::from_secs(1);
/// Solicitations before an address is unreachable (RFC 4861 `MAX_MULTICAST_SOLICIT`).
pub const SOLICITS_MAX: u8 = 3;
/// How long an answer is believed (RFC 4861 `REACHABLE_TIME`).
pub const REACHABLE: Duration = Duration::from_secs(30);
/// How long a silent address is left alone.
pub const UNREACHABLE: Duration = Duration::from_secs(3);
/// Answers to ARP and neighbour solicitation a second.
pub const ANSWERS_PER_SECOND: u32 = 200;
/// Answers to ping a second.
pub const ECHOES_PER_SECOND: u32 = 1000;

/// For whom [`Neighbors`] works.
#[derive(Clone, Debug)]
pub struct NeighborConfig {
    /// Our MAC.
    pub mac: MacAddr,
    /// Our addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether we answer for them (nobody else does). When the kernel owns the addresses, it answers.
    pub answers: bool,
    /// Bytes of the largest IP packet: bounds echo replies.
    pub mtu: usize,
}

/// Where frames to a next hop go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// To this MAC.
    Known(MacAddr),
    /// Asked; no answer yet.
    Pending,
    /// Asked [`SOLICITS_MAX`] times without an answer.
    Unreachable,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeighborCounters {
    /// ARP requests and neighbour solicitations sent.
    pub solicits: u64,
    /// Answers to them that we gave.
    pub answers: u64,
    /// Echo replies.
    pub echoes: u64,
    /// Answers and echo replies that the rate limit, or a full queue, held back.
    pub suppressed: u64,
    /// Frames in which another MAC claims one of our addresses.
    pub conflicts: u64,
    /// Resolutions that failed.
    pub failures: u64,
}

/// The resolver and responder of one MAC on one network.
#[derive(Debug)]
pub struct Neighbors {
    config: NeighborConfig,
    cache: Cache,
    out: VecDeque<Vec<u8>>,
    answer_limit: Bucket,
    echo_limit: Bucket,
    counters: NeighborCounters,
}

impl Neighbors {
    /// An empty cache.
    #[must_use]
    pub fn new(config: NeighborConfig) -> Self {
        Self {
            config,
            cache: Cache::default(),
            out: VecDeque::with_capacity(FRAMES_MAX),
            answer_limit: Bucket::new(ANSWERS_PER_SECOND),
            echo_limit: Bucket::new(ECHOES_PER_SECOND),
            counters: NeighborCounters::default(),
        }
    }

    /// Our MAC.
    #[must_use]
    pub const fn mac(&self) -> MacAddr {
        self.config.mac
    }

    /// Where frames to `hop` go; asks the network when that is not known. `source` is the address that asks, one of
    /// ours. Multicast and the limited broadcast are known by rule.
    pub fn resolve(&mut self, now: Instant, hop: IpAddr, source: IpAddr) -> Resolution {
        if let Some(mac) = by_rule(hop) {
            return Resolution::Known(mac);
        }
        let source = self.source_for(hop, source);
        let (resolution, action) = self.cache.resolve(now, hop, source);
        if let Some(action) = action {
            self.solicit(action);
        }
        resolution
    }

    /// What is known of `hop`, without asking; `None` when it is not in the cache.
    #[must_use]
    pub fn peek(&self, hop: IpAddr) -> Option<Resolution> {
        by_rule(hop).map(Resolution::Known).or_else(|| self.cache.peek(hop))
    }

    /// Enters what another authority (the kernel's neighbour table) knows, as if it had just been heard.
    pub fn insert(&mut self, now: Instant, hop: IpAddr, mac: MacAddr) {
        if usable(mac) && by_rule(hop).is_none() {
            self.cache.insert(now, hop, mac);
        }
    }

    /// Rises whenever an answer of [`Self::peek`] changed for the worse or to another MAC, or a pending one was decided.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.cache.generation()
    }

    /// Takes an untagged Ethernet frame that is not RoCEv2: learns from replies, answers what is for us, ignores the rest.
    pub fn handle_frame(&mut self, now: Instant, frame: &[u8]) {
        let Some((to, heard)) = heard::parse(frame) else { return };
        if to != self.config.mac && !to.is_multicast() {
            return;
        }
        match heard {
            Heard::Arp { request, mac, sender, target } => self.on_arp(now, request, mac, sender, target),
            Heard::Solicit { mac, src, target } => self.on_solicit(now, mac, src, target),
            Heard::Advert { target, mac, solicited, replaces } => {
                self.learn(now, target.into(), mac, solicited, replaces);
            }
            Heard::Echo4 { mac, src, dst, icmp } => {
                if self.answers_for(dst.into()) && self.may_echo(now, 20 + icmp.buffer_len()) {
                    self.push_echo(frame::echo4(self.config.mac, mac, dst, src, &icmp));
                }
            }
            Heard::Echo6 { mac, src, dst, icmp } => {
                if self.answers_for(dst.into()) && self.may_echo(now, 40 + icmp.buffer_len()) {
                    self.push_echo(frame::echo6(self.config.mac, mac, dst, src, &icmp));
                }
            }
        }
    }

    /// Tells the network which MAC our addresses have (gratuitous ARP, unsolicited advertisement): once, at the start.
    pub fn announce(&mut self) {
        let mac = self.config.mac;
        for at in 0..self.config.addresses.len() {
            let frame = match self.config.addresses.get(at) {
                Some(&IpAddr::V4(ip)) => frame::arp_announce(mac, ip),
                Some(&IpAddr::V6(ip)) => frame::advert_to_all(mac, ip),
                None => continue,
            };
            self.push(frame);
        }
    }

    /// The next frame to send.
    pub fn poll_frame(&mut self) -> Option<Vec<u8>> {
        self.out.pop_front()
    }

    /// Whether [`Self::poll_frame`] has one.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        !self.out.is_empty()
    }

    /// When [`Self::handle_timeout`] is due.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Instant> {
        self.cache.poll_timeout()
    }

    /// Repeats solicitations that are due and gives up on those that were repeated enough.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(action) = self.cache.handle_timeout(now) {
            match action {
                Action::GaveUp => self.counters.failures += 1,
                action => self.solicit(action),
            }
        }
    }

    /// Counters.
    #[must_use]
    pub const fn counters(&self) -> NeighborCounters {
        self.counters
    }

    fn on_arp(&mut self, now: Instant, request: bool, mac: MacAddr, sender: Ipv4Addr, target: Ipv4Addr) {
        if self.config.addresses.contains(&sender.into()) {
            if mac != self.config.mac {
                self.counters.conflicts += 1;
            }
            return;
        }
        if !sender.is_unspecified() {
            // Sender equal to target is an announcement: an answer to nobody, but the news may be that the MAC changed.
            self.learn(now, sender.into(), mac, !request && sender != target, true);
        }
        // A probe (RFC 5227) has no sender address: it asks whether ours is free, and the answer says no.
        if request && self.answers_for(target.into()) && self.may_answer(now) {
            self.push(frame::arp_reply(self.config.mac, target, mac, sender));
            self.counters.answers += 1;
        }
    }

    fn on_solicit(&mut self, now: Instant, mac: MacAddr, src: Ipv6Addr, target: Ipv6Addr) {
        if self.config.addresses.contains(&src.into()) {
            if mac != self.config.mac {
                self.counters.conflicts += 1;
            }
            return;
        }
        if !src.is_unspecified() {
            self.learn(now, src.into(), mac, false, true);
        }
        if !self.answers_for(target.into()) || !self.may_answer(now) {
            return;
        }
        // Duplicate address detection asks from the unspecified address: the answer goes to all nodes (RFC 4861 7.2.4).
        let frame = if src.is_unspecified() {
            frame::advert_to_all(self.config.mac, target)
        } else {
            frame::advert(self.config.mac, target, mac, src)
        };
        self.push(frame);
        self.counters.answers += 1;
    }

    fn learn(&mut self, now: Instant, ip: IpAddr, mac: MacAddr, solicited: bool, replaces: bool) {
        if !usable(mac) || by_rule(ip).is_some() {
            return;
        }
        if self.config.addresses.contains(&ip) {
            if mac != self.config.mac {
                self.counters.conflicts += 1;
            }
            return;
        }
        self.cache.learn(now, ip, mac, solicited, replaces);
    }

    fn solicit(&mut self, action: Action) {
        let mac = self.config.mac;
        let frame = match action {
            Action::Ask { hop: IpAddr::V4(hop), source: IpAddr::V4(source), to } => {
                frame::arp_request(mac, source, to, hop)
            }
            Action::Ask { hop: IpAddr::V6(hop), source: IpAddr::V6(source), to } => {
                frame::solicit(mac, source, to, hop)
            }
            // No address of the hop's family: it cannot be asked, and will be given up.
            Action::Ask { .. } | Action::GaveUp => return,
        };
        if self.push(frame) {
            self.counters.solicits += 1;
        }
    }

    /// The address that asks for `hop`: the sender's own if it may, else one of ours of the same family and scope.
    fn source_for(&self, hop: IpAddr, wanted: IpAddr) -> IpAddr {
        let ours = &self.config.addresses;
        if wanted.is_ipv4() == hop.is_ipv4() && ours.contains(&wanted) {
            return wanted;
        }
        let same_family = || ours.iter().copied().filter(|a| a.is_ipv4() == hop.is_ipv4());
        same_family()
            .find(|a| is_link_local(*a) == is_link_local(hop))
            .or_else(|| same_family().next())
            .unwrap_or(wanted)
    }

    fn answers_for(&self, ip: IpAddr) -> bool {
        self.config.answers && self.config.addresses.contains(&ip)
    }

    fn may_answer(&mut self, now: Instant) -> bool {
        let may = self.answer_limit.take(now) && self.out.len() < FRAMES_MAX;
        self.counters.suppressed += u64::from(!may);
        may
    }

    fn may_echo(&mut self, now: Instant, ip_len: usize) -> bool {
        let may = ip_len <= self.config.mtu && self.echo_limit.take(now) && self.out.len() < FRAMES_MAX;
        self.counters.suppressed += u64::from(!may);
        may
    }

    fn push_echo(&mut self, frame: Vec<u8>) {
        self.push(frame);
        self.counters.echoes += 1;
    }

    fn push(&mut self, frame: Vec<u8>) -> bool {
        let room = self.out.len() < FRAMES_MAX;
        if room {
            self.out.push_back(frame);
        }
        room
    }
}

/// The solicited-node group of an address (RFC 4291 2.7.1): who owns the address listens there.
#[must_use]
pub fn solicited_node(ip: Ipv6Addr) -> Ipv6Addr {
    let o = ip.octets();
    Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, o[13], o[14], o[15]])
}

fn by_rule(ip: IpAddr) -> Option<MacAddr> {
    match ip {
        IpAddr::V4(v4) if v4.is_broadcast() => Some(MacAddr::BROADCAST),
        _ => MacAddr::for_multicast(ip),
    }
}

fn usable(mac: MacAddr) -> bool {
    !mac.is_multicast() && mac != MacAddr::default()
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// A token bucket of one second.
#[derive(Debug)]
struct Bucket {
    per_second: u32,
    tokens: u32,
    filled: Instant,
}

impl Bucket {
    const fn new(per_second: u32) -> Self {
        Self { per_second, tokens: per_second, filled: Instant::ZERO }
    }

    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_since(self.filled).as_nanos();
        let earned = passed.saturating_mul(u128::from(self.per_second)) / 1_000_000_000;
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            self.tokens = self.tokens.saturating_add(earned).min(self.per_second);
            self.filled = now;
        }
        let may = self.tokens > 0;
        self.tokens -= u32::from(may);
        may
    }
}

#[cfg(test)]
mod tests;
