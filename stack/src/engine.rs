//! The engine: one thread that moves frames between a device and an endpoint.
//!
//! Owns a device, an endpoint and a clock, and the order of a round: receive, timers, transmit. Reads the clock once a
//! round and hands the time down. Never decides what a packet means, and knows no other thread: `host` does.

mod hold;
mod polling;

use hold::AckHold;
pub(crate) use polling::{Idle, Patience};
pub use polling::{PollPolicy, SPIN_DEFAULT};

use crate::device::{Device, DeviceError};
use crate::endpoint::{Endpoint, EndpointConfig};
use crate::raw::copy::Kernel;
use crate::time::{Clock, Duration, Instant};
use crate::types::Gid;
use crate::verbs::QpOptions;

/// Bursts received in one round, before anything is sent: what waits is acknowledged in one go, yet a flood cannot keep
/// timers and transmission from their turn.
pub const RX_BUDGET: usize = 64;
/// Bursts sent in one round, before the next look at what arrived: acknowledgements of a long message are read while it
/// is still going out.
pub const TX_BUDGET: usize = 64;
/// Bytes after which a round receives no more: superframes keep timers and transmission waiting no longer than small
/// packets do. What passes it is still moved. What is sent has a limit in bytes already: the windows of its QPs.
pub const ROUND_BYTES: usize = 256 << 10;

/// Bytes of a burst that is taken to be one message, whose sender waits for a program's answer more than for an ACK.
const ALONE_BYTES: usize = 4200;

/// The system's monotonic clock, counted from when it was made.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    origin: std::time::Instant,
}

impl MonotonicClock {
    /// A clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: std::time::Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Instant {
        Instant::ZERO + self.origin.elapsed()
    }
}

/// A seed for an endpoint from the system's generator: QPNs, PSNs and keys cannot be guessed.
///
/// # Errors
/// The system has no generator.
pub fn system_seed() -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|e| {
        let unknown = || std::io::ErrorKind::Unsupported.into();
        e.raw_os_error().map_or_else(unknown, std::io::Error::from_raw_os_error)
    })?;
    Ok(seed)
}

/// What one round did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Round {
    /// When it began.
    pub(crate) at: Instant,
    received: usize,
    sent: usize,
    cut_short: bool,
}

impl Round {
    /// Bursts moved.
    pub(crate) const fn moved(self) -> usize {
        self.received + self.sent
    }

    /// Whether the round ended with more to do at once.
    pub(crate) const fn cut_short(self) -> bool {
        self.cut_short
    }
}

/// A device and an endpoint, driven by whoever calls.
pub struct Engine<D, C = MonotonicClock> {
    device: D,
    endpoint: Endpoint,
    clock: C,
    patience: Patience,
    /// Bursts that are expected to fill a round.
    rx_portion: usize,
    /// What the last round left to a later one.
    hold: AckHold,
}

/// The configuration of an endpoint that suits `device`.
#[must_use]
pub fn endpoint_config(device: &impl Device) -> EndpointConfig {
    let c = device.capabilities();
    EndpointConfig {
        icrc: c.icrc,
        mac: c.mac,
        source_ports: device.source_ports().to_vec(),
        qp_options: QpOptions {
            max_in_flight: device.receive_room().map(|bytes| bytes as u64),
            ..QpOptions::default()
        },
        ..EndpointConfig::new(c.addresses.clone(), c.path_mtu)
    }
}

impl<D: Device> Engine<D> {
    /// An engine with a new endpoint that suits `device`, seeded by the system, on the system's clock.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn open(device: D) -> std::io::Result<Self> {
        let endpoint = Endpoint::new(endpoint_config(&device), system_seed()?);
        Ok(Self::new(device, endpoint))
    }

    /// An engine on the system's clock. The first of a process measures which copy and CRC loops are the fastest here.
    #[must_use]
    pub fn new(device: D, endpoint: Endpoint) -> Self {
        let clock = MonotonicClock::new();
        Kernel::choose(|| clock.now().as_nanos());
        Self::with_clock(device, endpoint, clock)
    }
}

impl<D: Device, C: Clock> Engine<D, C> {
    /// An engine on `clock`.
    #[must_use]
    pub fn with_clock(device: D, endpoint: Endpoint, clock: C) -> Self {
        Self {
            device,
            endpoint,
            clock,
            patience: Patience::new(PollPolicy::default()),
            rx_portion: RX_BUDGET,
            hold: AckHold::new(),
        }
    }

    /// One round: receives what waits, runs timers that are due, sends what is ready, each within its budget. Returns
    /// how many bursts moved; 0 says that there was nothing to do.
    ///
    /// # Errors
    /// [`DeviceError`]: the device is broken.
    pub fn poll(&mut self) -> Result<usize, DeviceError> {
        self.round().map(Round::moved)
    }

    pub(crate) fn round(&mut self) -> Result<Round, DeviceError> {
        let now = self.clock.now();
        let (received, _, cut_short) = self.take_in(now)?;
        let (sent, more) = self.transmit(now)?;
        Ok(Round { at: now, received, sent, cut_short: cut_short || more })
    }

    /// A round for a program that may sleep, or compute: one that has answered promptly so far is served as one that spins.
    pub(crate) fn round_for_program(&mut self) -> Result<Round, DeviceError> {
        if self.hold.is_prompt() || self.hold.owes() {
            return self.round_for_spinner();
        }
        let now = self.clock.now();
        self.hold.is_due(now);
        let (received, cut_short, is_alone) = self.take_in_watching(now)?;
        let (sent, more) = self.transmit(now)?;
        if is_alone {
            self.hold.asked(now);
        }
        Ok(Round { at: now, received, sent, cut_short: cut_short || more })
    }

    /// A round for a program that is told what came and comes back at once: a message alone is acknowledged by the next
    /// round, or later if the program answers it meanwhile: see `hold`. One that answers is heard sooner by the time that sending
    /// the ACK takes.
    pub(crate) fn round_for_spinner(&mut self) -> Result<Round, DeviceError> {
        let now = self.clock.now();
        let (before, mut more) = if self.hold.is_due(now) { self.transmit(now)? } else { (0, false) };
        let requests = self.endpoint.requests_heard();
        let (received, cut_short, is_alone) = self.take_in_watching(now)?;
        let mut sent = before;
        if is_alone {
            self.hold.told(now);
        } else if self.endpoint.requests_heard() != requests || !self.hold.owes() {
            let (behind, again) = self.transmit(now)?;
            (sent, more) = (sent + behind, again);
        } else if received > 0 {
            // What the peer acknowledged may let more go; what is held is held on.
            let behind = self.transmit_posted(now, TX_BUDGET)?;
            (sent, more) = (sent + behind, behind >= TX_BUDGET);
        }
        Ok(Round { at: now, received, sent, cut_short: cut_short || more })
    }

    /// As [`Self::take_in`]; returns how many bursts came, whether the budget ended it, and whether it was a message alone.
    fn take_in_watching(&mut self, now: Instant) -> Result<(usize, bool, bool), DeviceError> {
        let requests = self.endpoint.requests_heard();
        let (received, bytes, cut_short) = self.take_in(now)?;
        let requests = self.endpoint.requests_heard().wrapping_sub(requests);
        let is_alone = bytes <= ALONE_BYTES && requests > 0 && (requests == 1 || received == 1);
        Ok((received, cut_short, is_alone))
    }

    /// Whether the last round left something to a later one.
    pub(crate) const fn owes(&self) -> bool {
        self.hold.owes()
    }

    /// Whether it is certain that a round would do nothing before [`Self::poll_timeout`].
    pub(crate) fn is_idle(&mut self) -> bool {
        // An ACK that is held is the last thing that its QP has to send.
        let endpoint = if self.hold.owes() { self.endpoint.has_no_news() } else { self.endpoint.is_idle() };
        endpoint && self.device.is_idle()
    }

    /// Sends what the last round left.
    pub(crate) fn settle(&mut self) -> Result<Round, DeviceError> {
        let now = self.clock.now();
        let (sent, cut_short) = self.transmit(now)?;
        Ok(Round { at: now, received: 0, sent, cut_short })
    }

    /// Receives, and runs timers that are due; returns bursts, bytes, and whether the budget ended it.
    fn take_in(&mut self, now: Instant) -> Result<(usize, usize, bool), DeviceError> {
        while let Err((group, _)) = self.apply_memberships() {
            self.endpoint.membership_failed(group);
        }
        let taken = self.receive(now)?;
        let endpoint = &mut self.endpoint;
        if endpoint.poll_timeout().is_some_and(|due| due <= now) {
            endpoint.handle_timeout(now);
        }
        Ok(taken)
    }

    /// Tells the device of multicast groups that QPs were attached to or detached from. Every round does it first.
    ///
    /// # Errors
    /// A group that could not be joined, and why. Call again: others may wait.
    pub fn apply_memberships(&mut self) -> Result<(), (Gid, DeviceError)> {
        while let Some(change) = self.endpoint.poll_membership() {
            let applied = self.device.set_membership(change.group.ip(), change.member);
            applied.map_err(|error| (change.group, error))?;
        }
        Ok(())
    }

    /// Sends what is ready, within the budget, and does nothing else: what arrived meanwhile is for the next round. What is
    /// posted first after a message that [`Self::round_for_spinner`] told of may go ahead of the message's ACK.
    pub(crate) fn push(&mut self) -> Result<Round, DeviceError> {
        let now = self.clock.now();
        if !self.hold.answered(now) {
            return self.settle();
        }
        // The first burst is out before anybody asks whether there is a second.
        let mut sent = self.transmit_posted(now, 1)?;
        if sent > 0 {
            sent += self.transmit_posted(now, TX_BUDGET)?;
        }
        Ok(Round { at: now, received: 0, sent, cut_short: sent >= TX_BUDGET })
    }

    /// As [`Self::transmit`], but for ACKs behind requests.
    fn transmit_posted(&mut self, now: Instant, budget: usize) -> Result<usize, DeviceError> {
        let endpoint = &mut self.endpoint;
        let sent = self.device.transmit(now, budget, &mut |room| endpoint.poll_posted(now, room))?;
        if !self.endpoint.wants_transmit() {
            self.hold.paid();
        }
        Ok(sent)
    }

    /// Receives what waits, within the budget; returns how many bursts and bytes, and whether the budget ended it.
    fn receive(&mut self, now: Instant) -> Result<(usize, usize, bool), DeviceError> {
        let (mut received, mut bytes) = (0, 0);
        loop {
            // As many as are expected to fill the round; when they turn out shorter, more.
            let (want, endpoint) = (self.rx_portion.min(RX_BUDGET - received), &mut self.endpoint);
            let got = self.device.receive(now, want, &mut |burst| {
                bytes += burst.bytes.len();
                endpoint.handle_burst(now, burst);
            })?;
            received += got;
            if let Some(each) = bytes.checked_div(received) {
                self.rx_portion = (ROUND_BYTES / each.max(1)).clamp(1, RX_BUDGET);
            }
            let is_full = received >= RX_BUDGET || bytes >= ROUND_BYTES;
            if is_full || got < want {
                return Ok((received, bytes, is_full));
            }
        }
    }

    /// Sends what is ready, within the budget; returns how many bursts, and whether the budget ended it.
    fn transmit(&mut self, now: Instant) -> Result<(usize, bool), DeviceError> {
        self.hold.paid();
        let endpoint = &mut self.endpoint;
        let sent = self.device.transmit(now, TX_BUDGET, &mut |room| endpoint.poll_transmit(now, room))?;
        Ok((sent, sent >= TX_BUDGET))
    }

    /// What [`Engine::run_until`] and [`Engine::run_until_some`] do while nothing is due.
    pub fn set_poll_policy(&mut self, policy: PollPolicy) {
        self.patience = Patience::new(policy);
    }

    /// When a round is due though nothing arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        [self.endpoint.poll_timeout(), self.device.poll_timeout(), self.hold.due()].into_iter().flatten().min()
    }

    /// Sleeps until the device has something, a timer is due or `max` passes (`None`: for ever). Call it only after
    /// [`Engine::poll`] returned 0.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn wait(&mut self, max: Option<Duration>) -> Result<(), DeviceError> {
        let timer = self.poll_timeout().map(|due| due.saturating_since(self.clock.now()));
        let timeout = [timer, max].into_iter().flatten().min();
        if timeout == Some(Duration::ZERO) {
            return Ok(());
        }
        self.device.wait(timeout)
    }

    /// Runs until `deadline`; while nothing is due it does what its [`PollPolicy`] says.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn run_until(&mut self, deadline: Instant) -> Result<(), DeviceError> {
        self.run_until_some(deadline, |_| None::<()>).map(|_| ())
    }

    /// Runs until `ready`, asked after every round, has an answer, or `deadline` passes (`None`).
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn run_until_some<T>(
        &mut self,
        deadline: Instant,
        mut ready: impl FnMut(&mut Endpoint) -> Option<T>,
    ) -> Result<Option<T>, DeviceError> {
        let mut now = self.clock.now();
        self.patience.begin(now);
        loop {
            let moved = self.poll()?;
            if let Some(answer) = ready(&mut self.endpoint) {
                return Ok(Some(answer));
            }
            now = self.clock.now();
            let left = deadline.saturating_since(now);
            if left.is_zero() {
                return Ok(None);
            }
            if moved > 0 {
                self.patience.progress(now);
                continue;
            }
            match self.patience.idle(now, self.poll_timeout()) {
                Idle::Spin => core::hint::spin_loop(),
                Idle::Yield => {
                    std::thread::yield_now();
                    self.patience.yielded(now, self.clock.now());
                }
                Idle::Sleep if self.is_settled()? => self.wait(Some(left))?,
                Idle::Sleep => self.patience.progress(now),
            }
        }
    }

    /// A round that finds out whether nothing is due: what was posted since the last is sent by it, and a timer that it runs
    /// may complete something though nothing moves.
    fn is_settled(&mut self) -> Result<bool, DeviceError> {
        let due = self.endpoint.poll_timeout();
        Ok(self.poll()? == 0 && self.endpoint.poll_timeout() == due)
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// The clock.
    #[must_use]
    pub const fn clock(&self) -> &C {
        &self.clock
    }

    /// The endpoint.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The endpoint, for verbs. What is posted is sent by the next [`Engine::poll`].
    pub const fn endpoint_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// The device, e.g. to change the rules of a fault injector.
    pub const fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Takes the engine apart.
    #[must_use]
    pub fn into_parts(self) -> (D, Endpoint, C) {
        (self.device, self.endpoint, self.clock)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! One side of a connection, for the tests of the drivers.

    use super::*;
    use crate::device::testing::loopback_address;
    use crate::device::udp::UdpDevice;
    use crate::raw::Region;
    use crate::types::{Gid, PathMtu, Psn, Qpn, RnrTimer};
    use crate::verbs::{
        AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle, QpCapabilities,
        QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs,
        WcStatus, WorkCompletion,
    };

    pub(crate) fn engine() -> Engine<UdpDevice> {
        Engine::open(UdpDevice::open(loopback_address()).unwrap()).unwrap()
    }

    #[derive(Clone)]
    pub(crate) struct Side {
        pub(crate) gid: Gid,
        pub(crate) pd: PdHandle,
        pub(crate) cq: CqHandle,
        pub(crate) qp: QpHandle,
        pub(crate) qpn: Qpn,
        pub(crate) mr: MemoryRegion,
        pub(crate) region: Region,
    }

    impl Side {
        pub(crate) fn new(verbs: &mut dyn Verbs, len: usize) -> Self {
            let pd = verbs.alloc_pd().unwrap();
            let cq = verbs.create_cq(256).unwrap();
            let caps = QpCapabilities::default();
            let init = QpInit {
                pd,
                qp_type: QpType::Rc,
                send_cq: cq,
                recv_cq: cq,
                srq: None,
                caps,
                signal_all: false,
                qpn: None,
            };
            let qp = verbs.create_qp(init).unwrap();
            let region = Region::alloc(len).unwrap();
            let mr = verbs.register(pd, &region, AccessFlags::ALL | AccessFlags::MW_BIND, None).unwrap();
            let qpn = verbs.query_qp(qp).unwrap().qpn;
            Self { gid: verbs.query_gids()[0].gid, pd, cq, qp, qpn, mr, region }
        }

        pub(crate) fn connect(&self, verbs: &mut dyn Verbs, peer: &Self) {
            let rtr = RtrAttr {
                av: AddressVector::new(peer.gid, 0),
                path_mtu: PathMtu::B1024,
                dest_qpn: peer.qpn,
                rq_psn: Psn::ZERO,
                max_dest_rd_atomic: 4,
                min_rnr_timer: RnrTimer::DEFAULT,
            };
            verbs.modify_qp(self.qp, QpTransition::Init(InitAttr::connected(AccessFlags::ALL)).into()).unwrap();
            verbs.modify_qp(self.qp, QpTransition::Rtr(rtr).into()).unwrap();
            verbs.modify_qp(self.qp, QpTransition::Rts(RtsAttr::usual(Psn::ZERO)).into()).unwrap();
        }

        pub(crate) fn sge(&self) -> [Sge; 1] {
            let length = u32::try_from(self.mr.len).unwrap();
            [Sge { addr: self.mr.iova, length, lkey: self.mr.lkey }]
        }

        pub(crate) fn remote(&self) -> Remote {
            Remote { addr: self.mr.iova, rkey: self.mr.rkey }
        }

        pub(crate) fn post_recv(&self, verbs: &mut dyn Verbs, wr_id: u64) {
            verbs.post_recv(self.qp, &[RecvWr { wr_id, sges: &self.sge() }]).unwrap();
        }

        pub(crate) fn post(&self, verbs: &mut dyn Verbs, wr_id: u64, operation: Operation) {
            let sges = self.sge();
            let flags = SendFlags::SIGNALED;
            let wr = SendWr { wr_id, operation, payload: Payload::Sges(&sges), flags, destination: None };
            verbs.post_send(self.qp, &[wr]).unwrap();
        }

        /// The next completion, which must be a success; `None` when there is none.
        pub(crate) fn completed(&self, verbs: &mut dyn Verbs) -> Option<WorkCompletion> {
            let mut out = [blank(self.qp)];
            let n = verbs.poll_cq(self.cq, &mut out).unwrap();
            assert!(n == 0 || out[0].status == WcStatus::Success, "{out:?}");
            (n == 1).then_some(out[0])
        }
    }

    /// Room for a completion.
    pub(crate) fn blank(qp: QpHandle) -> WorkCompletion {
        WorkCompletion::blank(qp)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{Side, engine};
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::sync::Arc;

    use crate::device::loopback::{LoopbackDevice, Switch};
    use crate::device::udp::UdpOptions;
    use crate::device::udp::testing::open_ipv6;
    use crate::device::{DeviceCapabilities, DeviceLosses, RxSink, TxSource};
    use crate::verbs::{Operation, Verbs as _, WcOpcode, WcStatus};

    const LEN: usize = 300_000;
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_send_and_a_write_cross_two_sockets_in_one_thread() {
        let (mut a, mut b) = (engine(), engine());
        let (left, right) = (Side::new(a.endpoint_mut(), LEN), Side::new(b.endpoint_mut(), LEN));
        left.connect(a.endpoint_mut(), &right);
        right.connect(b.endpoint_mut(), &left);
        let pattern: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
        left.region.write(0, &pattern).unwrap();
        right.post_recv(b.endpoint_mut(), 7);
        left.post(a.endpoint_mut(), 1, Operation::Send);
        let (mut sent, mut received) = (None, None);
        let deadline = a.now() + PATIENCE;
        while (sent.is_none() || received.is_none()) && a.now() < deadline {
            a.poll().unwrap();
            b.poll().unwrap();
            sent = sent.or_else(|| left.completed(a.endpoint_mut()));
            received = received.or_else(|| right.completed(b.endpoint_mut()));
        }
        assert_eq!(sent.map(|wc| (wc.wr_id, wc.opcode)), Some((1, WcOpcode::Send)));
        assert_eq!(received.map(|wc| (wc.wr_id, wc.byte_len as usize)), Some((7, LEN)));
        assert_eq!(right.region.to_vec(), pattern);

        // The other way, by one-sided WRITE; each engine in a thread of its own that sleeps while nothing is due.
        let answer: Vec<u8> = pattern.iter().map(|b| b ^ 0xFF).collect();
        right.region.write(0, &answer).unwrap();
        right.post(b.endpoint_mut(), 2, Operation::Write(left.remote()));
        std::thread::scope(|scope| {
            let passive = scope.spawn(|| {
                let end = a.now() + PATIENCE;
                let last = |_: &mut Endpoint| {
                    let mut byte = [0];
                    left.region.read(LEN - 1, &mut byte).unwrap();
                    (byte[0] == answer[LEN - 1]).then_some(())
                };
                let arrived = a.run_until_some(end, last).unwrap();
                // The last acknowledgement may still be on its way.
                a.run_until(a.now() + Duration::from_millis(20)).unwrap();
                arrived
            });
            let end = b.now() + PATIENCE;
            let wc = b.run_until_some(end, |endpoint| right.completed(endpoint)).unwrap().unwrap();
            assert_eq!((wc.wr_id, wc.opcode), (2, WcOpcode::RdmaWrite));
            assert_eq!(passive.join().unwrap(), Some(()));
        });
        assert_eq!(left.region.to_vec(), answer);
    }

    #[test]
    fn two_qps_of_one_engine_talk_over_ipv6_from_announced_source_ports() {
        let device = open_ipv6(UdpOptions { source_ports: 3, ..UdpOptions::default() });
        let ports = device.source_ports().to_vec();
        let mut a = Engine::open(device).unwrap();
        let (left, right) = (Side::new(a.endpoint_mut(), 5000), Side::new(a.endpoint_mut(), 5000));
        left.connect(a.endpoint_mut(), &right);
        right.connect(a.endpoint_mut(), &left);
        left.region.write(0, &[0xA5; 5000]).unwrap();
        left.post(a.endpoint_mut(), 3, Operation::Write(right.remote()));
        let wc = a.run_until_some(a.now() + PATIENCE, |endpoint| left.completed(endpoint)).unwrap();
        assert_eq!(wc.map(|wc| wc.wr_id), Some(3));
        assert_eq!(right.region.to_vec(), [0xA5; 5000]);
        // Every packet left from a port that was there before.
        assert_eq!(a.device().lost(), DeviceLosses::default());
        assert_eq!(a.device().source_ports(), ports);
        assert_eq!(a.endpoint().counters().retransmitted_pkts, 0);
    }

    #[test]
    fn running_until_a_deadline_takes_that_long_and_no_processor() {
        let mut a = engine();
        let begin = a.now();
        a.run_until(begin + Duration::from_millis(30)).unwrap();
        assert!(a.now() - begin >= Duration::from_millis(30));
        assert_eq!(a.poll().unwrap(), 0);
        assert_eq!(a.run_until_some(a.now(), |_| None::<()>).unwrap(), None);
        assert_eq!(a.run_until_some(a.now(), |_| Some(5)).unwrap(), Some(5));
    }

    /// A clock that goes on by a microsecond each time it is read.
    struct Steps(Arc<AtomicU64>);

    impl Clock for Steps {
        fn now(&self) -> Instant {
            Instant::from_nanos(self.0.fetch_add(1_000, Ordering::Relaxed))
        }
    }

    /// A device on that clock whose waits end two microseconds early.
    struct Naps(LoopbackDevice, Arc<AtomicU64>);

    impl Device for Naps {
        fn capabilities(&self) -> &DeviceCapabilities {
            self.0.capabilities()
        }

        fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
            self.0.receive(now, budget, sink)
        }

        fn transmit(&mut self, now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
            self.0.transmit(now, budget, source)
        }

        fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
            let nanos = u64::try_from(timeout.expect("nobody sleeps for ever").as_nanos()).unwrap();
            self.1.fetch_add(nanos.saturating_sub(2_000), Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn what_a_timer_brings_about_in_the_last_round_before_a_sleep_is_not_slept_over() {
        let switch = Switch::new();
        let port = |last: u8| switch.port(&[[10, 0, 0, last].into()]);
        let (time, mut b) = (Arc::new(AtomicU64::new(0)), Engine::open(port(2)).unwrap());
        let device = Naps(port(1), Arc::clone(&time));
        let endpoint = Endpoint::new(endpoint_config(&device), [1; 32]);
        let mut a = Engine::with_clock(device, endpoint, Steps(time));
        a.set_poll_policy(PollPolicy::Block);
        let (left, right) = (Side::new(a.endpoint_mut(), 64), Side::new(b.endpoint_mut(), 64));
        left.connect(a.endpoint_mut(), &right);
        // Nobody drives the peer: the last of the retries is over some time, and the send fails.
        left.post(a.endpoint_mut(), 1, Operation::Send);
        let end = a.now() + Duration::from_secs(1000);
        let failed = a.run_until_some(end, |endpoint| {
            let mut out = [testing::blank(left.qp)];
            (endpoint.poll_cq(left.cq, &mut out).unwrap() == 1).then_some(out[0].status)
        });
        assert_eq!(failed.unwrap(), Some(WcStatus::RetryExceeded));
        assert!(a.now() + Duration::from_secs(100) < end, "slept until the deadline");
    }

    #[test]
    fn an_answer_goes_ahead_and_one_ack_stands_for_several_messages() {
        let switch = Switch::new();
        let port = |last: u8| switch.port(&[[10, 0, 0, last].into()]);
        let (time, mut a) = (Arc::new(AtomicU64::new(0)), Engine::open(port(1)).unwrap());
        let device = port(2);
        let endpoint = Endpoint::new(endpoint_config(&device), [1; 32]);
        let mut b = Engine::with_clock(device, endpoint, Steps(Arc::clone(&time)));
        let (left, right) = (Side::new(a.endpoint_mut(), 64), Side::new(b.endpoint_mut(), 64));
        left.connect(a.endpoint_mut(), &right);
        right.connect(b.endpoint_mut(), &left);
        for n in 1..=3 {
            right.post_recv(b.endpoint_mut(), n);
            left.post(a.endpoint_mut(), n, Operation::Send);
            a.poll().unwrap();
            b.round_for_spinner().unwrap();
            assert_eq!(right.completed(b.endpoint_mut()).map(|wc| wc.wr_id), Some(n), "told before it is acknowledged");
            right.post(b.endpoint_mut(), n, Operation::Write(left.remote()));
            b.push().unwrap();
            a.poll().unwrap();
            // The answer alone was sent, and is acknowledged.
            assert_eq!(b.endpoint().counters().sent_pkts, n);
            b.round_for_spinner().unwrap();
            assert_eq!(right.completed(b.endpoint_mut()).map(|wc| wc.opcode), Some(WcOpcode::RdmaWrite));
            assert_eq!(left.completed(a.endpoint_mut()), None);
        }
        // The peer's next message does not come.
        let due = b.poll_timeout().unwrap();
        b.round_for_spinner().unwrap();
        assert_eq!(b.endpoint().counters().sent_pkts, 3);
        time.store(due.as_nanos(), Ordering::Relaxed);
        b.round_for_spinner().unwrap();
        assert_eq!(b.endpoint().counters().sent_pkts, 4);
        a.poll().unwrap();
        let done: Vec<_> = core::iter::from_fn(|| left.completed(a.endpoint_mut())).map(|wc| wc.wr_id).collect();
        assert_eq!(done, [1, 2, 3]);
        assert!(!b.owes());
    }

    #[test]
    fn a_program_that_has_answered_at_once_so_far_is_told_first() {
        let switch = Switch::new();
        let port = |last: u8| switch.port(&[[10, 0, 0, last].into()]);
        let mut a = Engine::open(port(1)).unwrap();
        let device = port(2);
        let endpoint = Endpoint::new(endpoint_config(&device), [1; 32]);
        let time = Arc::new(AtomicU64::new(0));
        let mut b = Engine::with_clock(device, endpoint, Steps(Arc::clone(&time)));
        let (left, right) = (Side::new(a.endpoint_mut(), 64), Side::new(b.endpoint_mut(), 64));
        left.connect(a.endpoint_mut(), &right);
        right.connect(b.endpoint_mut(), &left);
        // Says whether the message was acknowledged before its answer.
        let mut exchange = |n: u64, answers_after: u64| {
            right.post_recv(b.endpoint_mut(), n);
            left.post(a.endpoint_mut(), n, Operation::Send);
            a.poll().unwrap();
            b.round_for_program().unwrap();
            a.poll().unwrap();
            let at_once = left.completed(a.endpoint_mut()).is_some();
            time.fetch_add(answers_after * 1_000, Ordering::Relaxed);
            right.post(b.endpoint_mut(), n, Operation::Write(left.remote()));
            b.push().unwrap();
            a.poll().unwrap();
            // Its ACK, and a while in which nothing comes.
            time.fetch_add(1_000_000, Ordering::Relaxed);
            b.round_for_program().unwrap();
            a.poll().unwrap();
            while left.completed(a.endpoint_mut()).is_some() {}
            while right.completed(b.endpoint_mut()).is_some() {}
            at_once
        };
        let acknowledged: Vec<bool> = (0..10).map(|n| exchange(n, 1)).collect();
        assert_eq!(acknowledged, [true, true, true, true, true, true, true, true, false, false]);
        // One answer takes longer.
        assert!(!exchange(10, 100));
        assert!(exchange(11, 1));
    }

    #[test]
    fn system_seeds_differ() {
        assert_ne!(system_seed().unwrap(), system_seed().unwrap());
    }
}
