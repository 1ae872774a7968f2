//! MADs over QP1.
//!
//! Owns the general services QP of a device: its buffers, its receives and the address handles of the peers. Alone in
//! this crate it knows how a MAD travels: as one datagram of 256 bytes, behind the sender's IP header (40 bytes) on
//! arrival (IBTA Vol 1 13.5.3; annex A17 of RoCEv2). Never looks into a MAD.

use std::collections::BTreeMap;

use uroce::raw::{Region, RegionError};
use uroce::time::Instant;
use uroce::types::{Gid, Psn, QKey, Qpn};
use uroce::verbs::{
    AccessFlags, AddressVector, AhHandle, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle,
    PostListError, QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, SendFlags, SendWr, Sge,
    UdDestination, Verbs, VerbsError, WcStatus, WorkCompletion,
};

use crate::agent::{Agent, MadAddress, OutgoingMad};
use crate::wire::MAD_LEN;

/// Bytes before a received datagram: an IPv6 header, or 20 bytes and an IPv4 header.
const GRH_LEN: usize = 40;
const RECV_LEN: usize = GRH_LEN + MAD_LEN;
/// Marks the completions of sends.
const SEND_ID: u64 = 1 << 32;
/// Completions of one call: connection management shall not hold up the data path.
const COMPLETIONS_PER_POLL: usize = 64;
const BATCH: usize = 16;

/// Sizes of QP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GsiConfig {
    /// Receives posted, 1 to 16384. MADs that find none are lost, and come again.
    pub receives: u32,
    /// Sends outstanding, 1 to 16384.
    pub sends: u32,
    /// Peers whose address handle is kept, at least 1.
    pub peers: usize,
}

impl Default for GsiConfig {
    fn default() -> Self {
        // What a device may hand over in one round: a MAD that finds no receive comes again after 250 ms at the soonest.
        Self { receives: 1024, sends: 256, peers: 256 }
    }
}

/// QP1 could not be set up, or is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GsiError {
    /// A verb was refused.
    #[error("QP1: {0}")]
    Verbs(#[from] VerbsError),
    /// A receive could not be posted while setting up.
    #[error("QP1: {0}")]
    Post(#[from] PostListError),
    /// No memory for the buffers.
    #[error("QP1: {0}")]
    Memory(#[from] RegionError),
}

/// What QP1 counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GsiCounters {
    /// Datagrams that are no MAD from an IP address.
    pub bad_datagrams: u64,
    /// MADs for which the device has no source address, or no address handle could be made.
    pub no_route: u64,
    /// Work requests that were refused or failed.
    pub failed: u64,
}

struct Peer {
    ah: AhHandle,
    in_flight: u32,
    used: u64,
}

/// QP1 of a device.
pub struct Gsi {
    config: GsiConfig,
    pd: PdHandle,
    cq: CqHandle,
    qp: QpHandle,
    region: Region,
    mr: MemoryRegion,
    gids: Vec<Gid>,
    /// Send buffers that nothing uses.
    free: Vec<u32>,
    /// Where each send buffer in use goes to, and with which address handle.
    sending: Vec<Option<(MadAddress, AhHandle)>>,
    peers: BTreeMap<MadAddress, Peer>,
    /// Handles of a GID table that has changed, with the sends that still use them: at most as many as there are buffers.
    retired: BTreeMap<AhHandle, u32>,
    /// Counts uses of address handles: the oldest goes first.
    uses: u64,
    counters: GsiCounters,
}

impl Gsi {
    /// Makes QP1, with all its receives posted.
    ///
    /// # Errors
    /// [`GsiError`]; another agent may have the device's QP1.
    pub fn new(verbs: &mut dyn Verbs, config: GsiConfig) -> Result<Self, GsiError> {
        let (receives, sends) = (config.receives.clamp(1, 16_384), config.sends.clamp(1, 16_384));
        let config = GsiConfig { receives, sends, peers: config.peers.max(1) };
        let region = Region::alloc(receives as usize * RECV_LEN + sends as usize * MAD_LEN)?;
        let pd = verbs.alloc_pd()?;
        let mr = verbs.register(pd, &region, AccessFlags::LOCAL_WRITE, None)?;
        let cq = verbs.create_cq(receives + sends)?;
        let caps = QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInit {
            pd,
            qp_type: QpType::Gsi,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            caps,
            signal_all: true,
            qpn: Some(Qpn::GSI),
        };
        let qp = match verbs.create_qp(init) {
            Ok(qp) => qp,
            Err(error) => {
                // Whose QP1 it is stays so: nothing else may be left behind by asking. None of these is in use.
                let _ = verbs.destroy_cq(cq);
                let _ = verbs.deregister(mr.handle);
                let _ = verbs.dealloc_pd(pd);
                return Err(error.into());
            }
        };
        for step in
            [QpTransition::Init(InitAttr::datagram(QKey::GSI)), QpTransition::RtrUd, QpTransition::RtsPsn(Psn::ZERO)]
        {
            verbs.modify_qp(qp, step.into())?;
        }
        let mut gsi = Self {
            config,
            pd,
            cq,
            qp,
            region,
            mr,
            gids: Vec::new(),
            free: (0..sends).rev().collect(),
            sending: vec![None; sends as usize],
            peers: BTreeMap::new(),
            retired: BTreeMap::new(),
            uses: 0,
            counters: GsiCounters::default(),
        };
        gsi.refresh_gids(verbs);
        for slot in 0..receives {
            gsi.post_receive(verbs, slot)?;
        }
        Ok(gsi)
    }

    /// Whether nothing that was handed to QP1 is still on its way out.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free.len() >= self.sending.len()
    }

    /// What it counted.
    #[must_use]
    pub const fn counters(&self) -> &GsiCounters {
        &self.counters
    }

    /// The CQ of QP1, to be armed by who sleeps.
    #[must_use]
    pub const fn cq(&self) -> CqHandle {
        self.cq
    }

    /// Reads the GID table again, after it changed. Address handles whose entry moved or went are made anew.
    pub fn refresh_gids(&mut self, verbs: &mut dyn Verbs) {
        let gids = verbs.query_gids().into_iter().map(|entry| entry.gid).collect();
        self.set_gids(verbs, gids);
    }

    fn set_gids(&mut self, verbs: &mut dyn Verbs, gids: Vec<Gid>) {
        let old = core::mem::replace(&mut self.gids, gids);
        let place = |gids: &[Gid], gid: Gid| gids.iter().position(|g| *g == gid);
        let moved: Vec<MadAddress> =
            self.peers.keys().filter(|to| place(&old, to.local) != place(&self.gids, to.local)).copied().collect();
        for to in moved {
            let Some(peer) = self.peers.remove(&to) else { continue };
            if peer.in_flight == 0 {
                // Nothing uses it.
                let _ = verbs.destroy_ah(peer.ah);
            } else {
                self.retired.insert(peer.ah, peer.in_flight);
            }
        }
    }

    /// Index of a GID of ours.
    #[must_use]
    pub fn gid_index(&self, gid: Gid) -> Option<u8> {
        self.gids.iter().position(|g| *g == gid).and_then(|i| u8::try_from(i).ok())
    }

    /// Carries MADs both ways between QP1 and the agent, at most 64 completions in one call. Returns whether anything
    /// was done.
    ///
    /// # Errors
    /// [`GsiError`]: QP1 is gone.
    pub fn poll(&mut self, now: Instant, verbs: &mut dyn Verbs, agent: &mut Agent) -> Result<bool, GsiError> {
        let mut busy = false;
        let mut batch = [WorkCompletion::blank(self.qp); BATCH];
        for _ in 0..COMPLETIONS_PER_POLL / BATCH {
            let count = verbs.poll_cq(self.cq, &mut batch)?;
            for completion in batch.iter().take(count) {
                self.on_completion(now, verbs, agent, completion);
            }
            busy |= count > 0;
            if count < BATCH {
                break;
            }
        }
        Ok(self.send_all(verbs, agent) || busy)
    }

    /// Hands waiting MADs to QP1 as long as it has room. Returns whether there were any.
    pub fn send_all(&mut self, verbs: &mut dyn Verbs, agent: &mut Agent) -> bool {
        let mut busy = false;
        while agent.has_mad()
            && let Some(slot) = self.free.pop()
        {
            let sent = agent.poll_mad().is_some_and(|mad| self.send(verbs, slot, &mad));
            if !sent {
                self.free.push(slot);
            }
            busy = true;
        }
        busy
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// [`GsiError::Verbs`].
    pub fn destroy(self, verbs: &mut dyn Verbs) -> Result<(), GsiError> {
        verbs.destroy_qp(self.qp)?;
        for ah in self.peers.into_values().map(|peer| peer.ah).chain(self.retired.into_keys()) {
            verbs.destroy_ah(ah)?;
        }
        verbs.destroy_cq(self.cq)?;
        verbs.deregister(self.mr.handle)?;
        Ok(verbs.dealloc_pd(self.pd)?)
    }

    fn on_completion(&mut self, now: Instant, verbs: &mut dyn Verbs, agent: &mut Agent, completion: &WorkCompletion) {
        let ok = completion.status == WcStatus::Success;
        if !ok {
            self.counters.failed += 1;
        }
        let Ok(slot) = u32::try_from(completion.wr_id & !SEND_ID) else { return };
        if completion.wr_id & SEND_ID != 0 {
            self.on_sent(verbs, slot, ok);
            return;
        }
        if ok {
            match self.received(slot, completion) {
                Some((from, mad)) => agent.handle_mad(now, from, &mad),
                None => self.counters.bad_datagrams += 1,
            }
        }
        // A QP in ERR flushes its receives: they stay out then.
        if completion.status != WcStatus::WorkRequestFlushed && self.post_receive(verbs, slot).is_err() {
            self.counters.failed += 1;
        }
    }

    /// A send is over. One that failed left QP1 in SQE, where nothing is sent any more, and its address handle may be why.
    fn on_sent(&mut self, verbs: &mut dyn Verbs, slot: u32, ok: bool) {
        self.free.push(slot);
        if !ok {
            // Refused when a failure before this one was answered already, or QP1 is in ERR.
            let _ = verbs.modify_qp(self.qp, QpTransition::Resume.into());
        }
        let Some((to, ah)) = self.sending.get_mut(slot as usize).and_then(Option::take) else { return };
        if let Some(left) = self.retired.get_mut(&ah) {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.retired.remove(&ah);
                let _ = verbs.destroy_ah(ah);
            }
            return;
        }
        let Some(peer) = self.peers.get_mut(&to) else { return };
        peer.in_flight = peer.in_flight.saturating_sub(1);
        if !ok
            && peer.in_flight == 0
            && let Some(peer) = self.peers.remove(&to)
        {
            // Made anew for the next MAD.
            let _ = verbs.destroy_ah(peer.ah);
        }
    }

    /// The MAD in a receive buffer, and between whom it travelled.
    fn received(&self, slot: u32, completion: &WorkCompletion) -> Option<(MadAddress, [u8; MAD_LEN])> {
        if completion.byte_len as usize != RECV_LEN || completion.src_qp != Qpn::GSI {
            return None;
        }
        let at = self.receive_offset(slot);
        let (mut grh, mut mad) = ([0; GRH_LEN], [0; MAD_LEN]);
        self.region.read(at, &mut grh).ok()?;
        self.region.read(at + GRH_LEN, &mut mad).ok()?;
        let from = address_of(&grh)?;
        self.gid_index(from.local).map(|_| (from, mad))
    }

    fn receive_offset(&self, slot: u32) -> usize {
        slot.min(self.config.receives) as usize * RECV_LEN
    }

    fn send_offset(&self, slot: u32) -> usize {
        self.config.receives as usize * RECV_LEN + slot as usize * MAD_LEN
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        // Both are bounded by the region, which is far below 4 GiB.
        let length = u32::try_from(length).unwrap_or(0);
        Sge { addr: self.mr.iova.wrapping_add(offset as u64), length, lkey: self.mr.lkey }
    }

    fn post_receive(&self, verbs: &mut dyn Verbs, slot: u32) -> Result<(), PostListError> {
        let sge = self.sge(self.receive_offset(slot), RECV_LEN);
        verbs.post_recv(self.qp, &[RecvWr { wr_id: slot.into(), sges: &[sge] }])
    }

    fn send(&mut self, verbs: &mut dyn Verbs, slot: u32, mad: &OutgoingMad) -> bool {
        let Some(ah) = self.address_handle(verbs, mad.to) else {
            self.counters.no_route += 1;
            return false;
        };
        let at = self.send_offset(slot);
        let sges = [self.sge(at, MAD_LEN)];
        let wr = SendWr {
            wr_id: SEND_ID | u64::from(slot),
            operation: Operation::Send,
            payload: Payload::Sges(&sges),
            flags: SendFlags::SIGNALED,
            destination: Some(UdDestination { ah, qpn: Qpn::GSI, qkey: QKey::GSI }),
        };
        if self.region.write(at, &mad.bytes).is_err() || verbs.post_send(self.qp, &[wr]).is_err() {
            self.counters.failed += 1;
            return false;
        }
        if let Some(peer) = self.peers.get_mut(&mad.to) {
            peer.in_flight += 1;
        }
        if let Some(place) = self.sending.get_mut(slot as usize) {
            *place = Some((mad.to, ah));
        }
        true
    }

    fn address_handle(&mut self, verbs: &mut dyn Verbs, to: MadAddress) -> Option<AhHandle> {
        self.uses += 1;
        if let Some(peer) = self.peers.get_mut(&to) {
            peer.used = self.uses;
            return Some(peer.ah);
        }
        if self.peers.len() >= self.config.peers {
            let idle = self.peers.iter().filter(|(_, p)| p.in_flight == 0);
            let oldest = idle.min_by_key(|(_, p)| p.used).map(|(to, _)| *to)?;
            let peer = self.peers.remove(&oldest)?;
            verbs.destroy_ah(peer.ah).ok()?;
        }
        let ah = verbs.create_ah(self.pd, AddressVector::new(to.remote, self.gid_index(to.local)?)).ok()?;
        self.peers.insert(to, Peer { ah, in_flight: 0, used: self.uses });
        Some(ah)
    }
}

/// The addresses in the 40 bytes before a datagram: an IPv6 header, or an IPv4 header in the last 20.
fn address_of(grh: &[u8; GRH_LEN]) -> Option<MadAddress> {
    let (_, addresses) = grh.split_last_chunk::<32>()?;
    let (_, v4) = grh.split_last_chunk::<20>()?;
    if grh.first()? >> 4 == 6 {
        let (source, destination) = addresses.split_first_chunk::<16>()?;
        let destination = <[u8; 16]>::try_from(destination).ok()?;
        return Some(MadAddress { local: Gid::from_bytes(destination), remote: Gid::from_bytes(*source) });
    }
    if v4.first()? >> 4 == 4 {
        let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *v4;
        let gid = |octets: [u8; 4]| Gid::from(core::net::Ipv4Addr::from(octets));
        return Some(MadAddress { local: gid([d0, d1, d2, d3]), remote: gid([s0, s1, s2, s3]) });
    }
    None
}

#[cfg(test)]
mod tests {
    use uroce::device::loopback::Switch;
    use uroce::engine::Engine;
    use uroce::rng::Rng;
    use uroce::types::{RetryCount, RnrRetry};

    use super::*;
    use crate::agent::{Config, ConnectParams};
    use crate::wire::{ServiceId, TransportService};

    #[test]
    fn a_send_that_fails_does_not_silence_qp1() {
        let ip = |n| core::net::IpAddr::from([10, 0, 0, n]);
        let mut engine = Engine::open(Switch::new().port(&[ip(1)])).unwrap();
        let mut gsi = Gsi::new(engine.endpoint_mut(), GsiConfig::default()).unwrap();
        let mut agent = Agent::new(Config::default(), Rng::from_u64(1));
        let path = crate::comm::Path::new(ip(1).into(), ip(2).into());
        let params = ConnectParams {
            path,
            service_id: ServiceId::new(1),
            transport: TransportService::Rc,
            local_qpn: Qpn::from_wire(0x20),
            starting_psn: None,
            srq: false,
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: RetryCount::MAX,
            rnr_retry: RnrRetry::FOREVER,
            flow_control: true,
            alternate: None,
            peer_to_peer: false,
            private_data: b"",
        };
        let now = engine.now();
        agent.connect(now, &params).unwrap();
        gsi.send_all(engine.endpoint_mut(), &mut agent);
        // The address handle goes while the datagram waits: the send fails, and QP1 goes to SQE.
        let (_, peer) = gsi.peers.first_key_value().unwrap();
        engine.endpoint_mut().destroy_ah(peer.ah).unwrap();
        engine.poll().unwrap();
        gsi.poll(now, engine.endpoint_mut(), &mut agent).unwrap();
        assert_eq!((gsi.counters.failed, gsi.free.len()), (1, 256));
        // The next goes out.
        agent.connect(now, &ConnectParams { local_qpn: Qpn::from_wire(0x21), ..params }).unwrap();
        gsi.send_all(engine.endpoint_mut(), &mut agent);
        engine.poll().unwrap();
        gsi.poll(now, engine.endpoint_mut(), &mut agent).unwrap();
        assert_eq!((gsi.counters.failed, gsi.free.len()), (1, 256));
    }

    #[test]
    fn both_kinds_of_header() {
        let mut grh = [0; 40];
        grh[20] = 0x45;
        grh[32..40].copy_from_slice(&[10, 77, 0, 1, 10, 77, 0, 2]);
        let from = address_of(&grh).unwrap();
        assert_eq!(
            (from.remote.to_string(), from.local.to_string()),
            ("::ffff:10.77.0.1".into(), "::ffff:10.77.0.2".into())
        );
        let mut grh = [0; 40];
        grh[0] = 0x60;
        (grh[8], grh[23], grh[24], grh[39]) = (0xfd, 1, 0xfd, 2);
        let from = address_of(&grh).unwrap();
        assert_eq!((from.remote.to_string(), from.local.to_string()), ("fd00::1".into(), "fd00::2".into()));
        assert_eq!(address_of(&[0; 40]), None);
    }

    #[test]
    fn address_handles_follow_the_gid_table() {
        let ip = |n| core::net::IpAddr::from([10, 0, 0, n]);
        let mut engine = Engine::open(Switch::new().port(&[ip(1), ip(2)])).unwrap();
        let mut gsi = Gsi::new(engine.endpoint_mut(), GsiConfig::default()).unwrap();
        let handles = |engine: &mut Engine<_>| engine.endpoint_mut().object_counts()[5];
        let to = |local: u8| MadAddress { local: ip(local).into(), remote: ip(9).into() };
        let mad = |local| OutgoingMad { to: to(local), bytes: [0; MAD_LEN] };
        for (slot, local) in [(0, 1), (1, 2)] {
            assert!(gsi.send(engine.endpoint_mut(), slot, &mad(local)));
            gsi.free.retain(|s| *s != slot);
        }
        assert_eq!((handles(&mut engine), gsi.is_idle()), (2, false));
        // The same table changes nothing. With the two entries swapped both handles are out of date, but in use.
        gsi.refresh_gids(engine.endpoint_mut());
        assert_eq!((gsi.peers.len(), gsi.retired.len()), (2, 0));
        let swapped = vec![ip(2).into(), ip(1).into()];
        gsi.set_gids(engine.endpoint_mut(), swapped.clone());
        assert_eq!((gsi.peers.len(), gsi.retired.len(), handles(&mut engine)), (0, 2, 2));
        assert!(gsi.send(engine.endpoint_mut(), 2, &mad(1)));
        gsi.free.retain(|s| *s != 2);
        assert_eq!((gsi.peers.len(), handles(&mut engine)), (1, 3));
        // As the sends complete, the old ones go.
        for slot in 0..3 {
            gsi.on_sent(engine.endpoint_mut(), slot, true);
        }
        assert_eq!((gsi.retired.len(), handles(&mut engine), gsi.is_idle()), (0, 1, true));
        // An address that is gone takes its handle along, and nothing is sent from it.
        gsi.set_gids(engine.endpoint_mut(), vec![ip(2).into()]);
        assert_eq!((gsi.peers.len(), handles(&mut engine)), (0, 0));
        assert!(!gsi.send(engine.endpoint_mut(), 0, &mad(1)));
        assert_eq!(gsi.counters().no_route, 1);
    }
}
