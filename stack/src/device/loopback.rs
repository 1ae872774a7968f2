//! An in-process switch: ports hand bursts to each other by destination address, across threads.
//!
//! Owns one ring for each ordered pair of ports and the frames that go round in it. A burst is written once, into a
//! frame of the sender; the frame moves to the receiver and comes back empty. Never loses a burst that has a receiver:
//! when all frames of a port are on their way it takes no more.

use core::net::IpAddr;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use super::intercept::known_ids;
use super::sys::poll::{EventFd, Watch, wait};
use super::{Device, DeviceCapabilities, DeviceError, DeviceLosses, RxSink, TxSource};
use crate::burst::{IcrcMode, IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::lock::Mutex;
use crate::raw::Piece;
use crate::ring::{Consumer, Producer, ring};
use crate::time::{Duration, Instant};
use crate::types::PathMtu;
use crate::wire::IpFields;

/// Frames of a port: bursts that may be under way from it at a time.
pub const FRAMES: usize = 64;
/// Segments of a burst, unless the port is told otherwise.
pub const SEGMENTS: usize = 16;
/// Bytes of a frame: the longest IPv4 packet.
const FRAME_LEN: usize = 65_535;
/// Room for the headers of a packet, when the number of segments is limited by the length of an IP packet.
const SEGMENT_OVERHEAD: usize = 64;
/// How long a wait without a descriptor lasts.
const BLIND_WAIT: Duration = Duration::from_millis(1);
/// Bytes of a burst that are asked for while the burst before it is handled: what comes behind them, whoever reads them
/// asks for itself.
const ASKED: usize = 2048;
/// Headers before the first segment (IPv6 and UDP).
const HEADERS: usize = 48;

/// How a port behaves.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Addresses that it receives for.
    pub addresses: Vec<IpAddr>,
    /// Largest path MTU.
    pub path_mtu: PathMtu,
    /// Segments a burst, 1 to 64; fewer where 65,535 bytes do not hold as many.
    pub segments_max: usize,
    /// What the endpoint does with the ICRC.
    pub icrc: IcrcMode,
    /// Bursts under way from this port, at least 1.
    pub frames: usize,
}

impl PortConfig {
    /// The usual port with these addresses: path MTU 4096, ICRC checked.
    #[must_use]
    pub fn new(addresses: &[IpAddr]) -> Self {
        Self {
            addresses: addresses.to_vec(),
            path_mtu: PathMtu::B4096,
            segments_max: SEGMENTS,
            icrc: IcrcMode::Check,
            frames: FRAMES,
        }
    }
}

/// Connects ports of one process. Clones name the same switch.
#[derive(Clone, Debug, Default)]
pub struct Switch(Arc<Mutex<Vec<Arc<Port>>>>);

impl Switch {
    /// A switch without ports.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A new port with the usual configuration.
    #[must_use]
    pub fn port(&self, addresses: &[IpAddr]) -> LoopbackDevice {
        self.port_with(PortConfig::new(addresses))
    }

    /// A new port. An address that another port has moves to the new one, as when a cable is moved.
    #[must_use]
    pub fn port_with(&self, config: PortConfig) -> LoopbackDevice {
        let mut ports = lock(&self.0);
        ports.retain(|p| !p.gone.load(Ordering::Acquire));
        let port = Arc::new(Port::new(&config));
        let mut device = LoopbackDevice::new(&config, Arc::clone(&port));
        for other in ports.iter().rev() {
            let (ours, theirs) = pair(&port, config.frames, other, other.frames);
            device.peers.push(ours);
            other.join(theirs);
        }
        let to_self = self_pair(&port, config.frames);
        device.peers.push(to_self);
        ports.push(port);
        device
    }
}

/// The owner of a port has never slept.
const AWAKE: u8 = 0;
/// It sleeps, or is about to, and nobody has rung.
const ASLEEP: u8 = 1;
/// Somebody rings: the alarm is set now or in a moment, and stays so until the owner clears it.
const RUNG: u8 = 2;

/// What the other ports know of a port.
#[derive(Debug)]
struct Port {
    addresses: Vec<IpAddr>,
    frames: usize,
    gone: AtomicBool,
    /// Peers that the port's device has not yet taken over.
    joining: Mutex<Vec<Peer>>,
    joins: AtomicUsize,
    /// One of [`AWAKE`], [`ASLEEP`] and [`RUNG`].
    sleep: AtomicU8,
    /// Whether it had no frame left when it went to sleep.
    starving: AtomicBool,
    /// What it sleeps on; made when it first does.
    alarm: OnceLock<EventFd>,
}

impl Port {
    fn new(config: &PortConfig) -> Self {
        Self {
            addresses: config.addresses.clone(),
            frames: config.frames.max(1),
            gone: AtomicBool::new(false),
            joining: Mutex::default(),
            joins: AtomicUsize::new(0),
            sleep: AtomicU8::new(AWAKE),
            starving: AtomicBool::new(false),
            alarm: OnceLock::new(),
        }
    }

    fn join(&self, peer: Peer) {
        lock(&self.joining).push(peer);
        self.joins.fetch_add(1, Ordering::Release);
    }

    /// Wakes the owner if it sleeps. Called after a frame was pushed.
    fn wake(&self) {
        // Pairs with the fence in `arm`: either we see it asleep, or the owner sees the frame.
        fence(Ordering::SeqCst);
        if self.sleep.load(Ordering::Relaxed) == ASLEEP
            && let Some(alarm) = self.alarm.get()
            && self.begin_to_ring()
        {
            alarm.set();
        }
    }

    /// Of those who would wake the owner one does: were there two, the owner could wake, and lie down again, between what
    /// the second does, who would then say of a sleeper that it has been woken.
    fn begin_to_ring(&self) -> bool {
        self.sleep.compare_exchange(ASLEEP, RUNG, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The owner is about to sleep. One for whom an alarm is on its way stays as it is: it wakes soon.
    fn lie_down(&self) {
        let may_sleep = match self.sleep.load(Ordering::Acquire) {
            AWAKE => true,
            RUNG => self.alarm.get().is_some_and(EventFd::clear),
            // Whoever rings may change it now; nobody else does in the other two.
            _ => false,
        };
        if may_sleep {
            self.sleep.store(ASLEEP, Ordering::Relaxed);
        }
    }

    /// What the owner sleeps on; `None` when the process has no descriptor left.
    fn alarm(&self) -> Option<&EventFd> {
        if self.alarm.get().is_none() {
            // Another caller may be first.
            let _ = self.alarm.set(EventFd::new().ok()?);
        }
        self.alarm.get()
    }

    /// Wakes the owner if it sleeps for want of frames. Called after one was given back.
    fn feed(&self) {
        fence(Ordering::SeqCst);
        if self.starving.load(Ordering::Relaxed) {
            self.wake();
        }
    }
}

/// A burst under way.
#[derive(Debug)]
struct Frame {
    bytes: Piece,
    burst: TxBurst,
}

/// Our side of the two rings that join two ports.
#[derive(Debug)]
struct Peer {
    port: Arc<Port>,
    to: Producer<Frame>,
    from: Consumer<Frame>,
    /// Frames of ours that come back empty.
    returned: Consumer<Piece>,
    /// Frames of theirs that we give back.
    give_back: Producer<Piece>,
    /// Frames of ours that they have.
    lent: usize,
}

/// The two sides that join ports `a` and `b`. Each ring holds all frames of its sender, so a push never finds it full.
fn pair(a: &Arc<Port>, a_frames: usize, b: &Arc<Port>, b_frames: usize) -> (Peer, Peer) {
    let (a_to, b_from) = ring(a_frames.max(1));
    let (b_to, a_from) = ring(b_frames.max(1));
    let (b_back, a_returned) = ring(a_frames.max(1));
    let (a_back, b_returned) = ring(b_frames.max(1));
    let at_a = Peer { port: Arc::clone(b), to: a_to, from: a_from, returned: a_returned, give_back: a_back, lent: 0 };
    let at_b = Peer { port: Arc::clone(a), to: b_to, from: b_from, returned: b_returned, give_back: b_back, lent: 0 };
    (at_a, at_b)
}

/// The pair that leads from a port to itself.
fn self_pair(port: &Arc<Port>, frames: usize) -> Peer {
    let (to, from) = ring(frames.max(1));
    let (give_back, returned) = ring(frames.max(1));
    Peer { port: Arc::clone(port), to, from, returned, give_back, lent: 0 }
}

/// A port of a [`Switch`].
#[derive(Debug)]
pub struct LoopbackDevice {
    capabilities: DeviceCapabilities,
    port: Arc<Port>,
    peers: Vec<Peer>,
    joins_seen: usize,
    /// Empty frames. The one that came back longest ago is filled next: the caches of who read it have given most of it away
    /// by then, and a store to a line that another processor holds waits for it.
    free: VecDeque<Piece>,
    next_id: u16,
    /// The peer that is asked first, so that none starves.
    turn: usize,
    lost: DeviceLosses,
}

impl LoopbackDevice {
    fn new(config: &PortConfig, port: Arc<Port>) -> Self {
        let fits = (FRAME_LEN - HEADERS) / (config.path_mtu.bytes() + SEGMENT_OVERHEAD);
        let name = config.addresses.first().map_or_else(|| "loop".to_owned(), |a| format!("loop:{a}"));
        let capabilities = DeviceCapabilities {
            medium: Medium::Ip,
            mtu: config.path_mtu.bytes() + PathMtu::HEADER_ALLOWANCE,
            path_mtu: config.path_mtu,
            segments_max: config.segments_max.clamp(1, fits.max(1)),
            icrc: config.icrc,
            addresses: config.addresses.clone(),
            mac: None,
            name,
        };
        let free = Piece::many(port.frames, FRAME_LEN).into();
        let peers = Vec::new();
        Self { capabilities, port, peers, joins_seen: 0, free, next_id: 0, turn: 0, lost: DeviceLosses::default() }
    }

    /// Takes over ports that joined the switch, and forgets those that left. No lock unless something changed.
    fn update_peers(&mut self) {
        let joins = self.port.joins.load(Ordering::Acquire);
        if joins != self.joins_seen {
            self.joins_seen = joins;
            let mut joining = lock(&self.port.joining);
            // The newest port with an address has it.
            self.peers.splice(0..0, joining.drain(..).rev());
        }
    }

    /// Gathers the frames that came back.
    fn reclaim(&mut self) {
        let free = &mut self.free;
        self.peers.retain_mut(|peer| {
            while let Ok(bytes) = peer.returned.pop() {
                peer.lent -= 1;
                free.push_back(bytes);
            }
            let gone = peer.to.is_abandoned() && peer.from.is_empty();
            if gone {
                // What the port had when it went is made anew.
                free.extend(Piece::many(peer.lent, FRAME_LEN));
            }
            !gone
        });
    }

    /// Sends the filled frame where it belongs.
    fn forward(&mut self, bytes: Piece, burst: TxBurst) {
        let dst = burst.flow.dst;
        if is_multicast(dst) {
            self.flood(bytes, burst);
            return;
        }
        let Some(peer) = self.peers.iter_mut().find(|p| p.port.addresses.contains(&dst)) else {
            self.lost.transmit += 1;
            self.free.push_back(bytes);
            return;
        };
        if let Err(bytes) = peer.send(Frame { bytes, burst }) {
            self.lost.transmit += 1;
            self.free.push_back(bytes);
        }
    }

    /// A copy to each other port; one that no frame is left for is lost, as multicast may be.
    fn flood(&mut self, bytes: Piece, burst: TxBurst) {
        let Self { peers, free, lost, port, .. } = self;
        let sent = bytes.get(..burst.len).unwrap_or(&[]);
        for peer in peers.iter_mut().filter(|p| !Arc::ptr_eq(&p.port, port)) {
            let Some(mut copy) = free.pop_front() else {
                lost.transmit += 1;
                continue;
            };
            if let Some(to) = copy.get_mut(..sent.len()) {
                to.copy_from_slice(sent);
            }
            if let Err(back) = peer.send(Frame { bytes: copy, burst }) {
                lost.transmit += 1;
                free.push_back(back);
            }
        }
        free.push_back(bytes);
    }

    fn has_work(&mut self) -> bool {
        self.update_peers();
        let starving = self.free.is_empty();
        self.peers.iter().any(|p| !p.from.is_empty() || (starving && !p.returned.is_empty()))
    }
}

impl Peer {
    /// Hands the frame over, or back when the port is gone.
    fn send(&mut self, frame: Frame) -> Result<(), Piece> {
        if self.to.is_abandoned() {
            return Err(frame.bytes);
        }
        match self.to.push(frame) {
            Ok(()) => {
                self.lent += 1;
                self.port.wake();
                Ok(())
            }
            Err(rtrb::PushError::Full(frame)) => Err(frame.bytes),
        }
    }

    /// Takes one burst, if one waits.
    fn take(&mut self, at: Instant, lost: &mut DeviceLosses, sink: &mut RxSink<'_>) -> bool {
        let Ok(frame) = self.from.pop() else { return false };
        if let Ok(next) = self.from.peek() {
            next.bytes.ask_for(ASKED.min(next.burst.len));
        }
        match received(&frame, at) {
            Some(burst) => sink(burst),
            None => lost.receive += 1,
        }
        // The ring holds every frame of the sender: it cannot be full.
        let _ = self.give_back.push(frame.bytes);
        self.port.feed();
        true
    }
}

/// The burst inside a frame, headers taken off.
fn received(frame: &Frame, at: Instant) -> Option<RxBurst<'_>> {
    let TxBurst { flow, len, segment, .. } = frame.burst;
    let (header, bytes) = frame.bytes.get(..len)?.split_at_checked(flow.header_len())?;
    // IPv6 has no identification, and then nobody looks at it.
    let fields = known_ids(&flow, header).unwrap_or(IpFields { id: 0, flags_fragment: 0 });
    Some(RxBurst { flow, bytes, segment, ids: RxIds::Known(fields), at })
}

impl Device for LoopbackDevice {
    fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        self.update_peers();
        let count = self.peers.len();
        let (mut given, mut idle) = (0, 0);
        while given < budget && idle < count {
            self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
            let Some(peer) = self.peers.get_mut(self.turn) else { break };
            if peer.take(now, &mut self.lost, sink) {
                given += 1;
                idle = 0;
            } else {
                idle += 1;
            }
        }
        Ok(given)
    }

    fn transmit(&mut self, _now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        self.update_peers();
        self.reclaim();
        let mut taken = 0;
        while taken < budget
            && let Some(mut bytes) = self.free.pop_front()
        {
            let room = TxRoom {
                buf: &mut bytes,
                headroom: 0,
                segments_max: self.capabilities.segments_max,
                ids: IdRule::From(self.next_id),
                medium: Medium::Ip,
            };
            let Some(burst) = source(room) else {
                self.free.push_front(bytes);
                break;
            };
            #[allow(clippy::cast_possible_truncation)] // Ids are modular.
            let used = burst.segments as u16;
            self.next_id = self.next_id.wrapping_add(used);
            taken += 1;
            self.forward(bytes, burst);
        }
        Ok(taken)
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.port.alarm().map(EventFd::as_raw_fd)
    }

    fn arm(&mut self) -> bool {
        self.port.starving.store(self.free.is_empty(), Ordering::Relaxed);
        self.port.lie_down();
        fence(Ordering::SeqCst);
        self.has_work()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        let Some(alarm) = self.descriptor() else {
            // A wait may end early, and the caller looks again.
            std::thread::sleep(timeout.map_or(BLIND_WAIT, |t| t.min(BLIND_WAIT)));
            return Ok(());
        };
        if self.arm() {
            return Ok(());
        }
        wait(&[Watch::Readable(alarm)], timeout)
            .map(|_| ())
            .map_err(|source| DeviceError::Io { action: "waiting", source })
    }

    fn lost(&self) -> DeviceLosses {
        self.lost
    }
}

impl Drop for LoopbackDevice {
    fn drop(&mut self) {
        self.port.gone.store(true, Ordering::Release);
        // Frames that wait here belong to others.
        for peer in &mut self.peers {
            while let Ok(frame) = peer.from.pop() {
                let _ = peer.give_back.push(frame.bytes);
            }
        }
    }
}

fn is_multicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_multicast(),
        IpAddr::V6(a) => a.is_multicast(),
    }
}

/// A poisoned lock guards nothing that a panic could have left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{at, bytes, fill, flow, ip, receive, send};
    use super::*;

    const A: &str = "10.0.0.1";
    const B: &str = "10.0.0.2";
    const C: &str = "fd00::3";

    fn three() -> (LoopbackDevice, LoopbackDevice, LoopbackDevice) {
        let switch = Switch::new();
        (switch.port(&[ip(A)]), switch.port(&[ip(B)]), switch.port(&[ip(C), ip("10.0.0.3")]))
    }

    #[test]
    fn a_burst_goes_to_its_destination_alone() {
        let (mut a, mut b, mut c) = three();
        assert_eq!(send(&mut a, at(0), flow(A, B), &[b"one", b"two!"]), 2);
        assert_eq!(send(&mut b, at(0), flow(B, "10.0.0.3"), &[b"three"]), 1);
        let got = receive(&mut b, at(1));
        assert_eq!(got, [(ip(A), Some(0), b"one".to_vec()), (ip(A), Some(1), b"two!".to_vec())]);
        assert_eq!(bytes(receive(&mut c, at(1))), [b"three"]);
        assert!(receive(&mut a, at(1)).is_empty());
        assert_eq!((a.lost(), b.lost()), Default::default());
    }

    #[test]
    fn a_superframe_stays_together_and_its_ids_count_on() {
        let (mut a, mut b, _c) = three();
        let mut once = true;
        let taken = a
            .transmit(at(0), 9, &mut |room| {
                assert_eq!(room.segments_max, 15, "65,535 bytes hold no more of 4096 and headers");
                core::mem::take(&mut once).then(|| fill(room, flow(A, B), 4, b"aaaabbbbcc"))
            })
            .unwrap();
        assert_eq!(taken, 1);
        assert_eq!(send(&mut a, at(0), flow(A, B), &[b"next"]), 1);
        let mut bursts = Vec::new();
        b.receive(at(0), 9, &mut |burst| bursts.push((burst.segment, burst.bytes.to_vec(), burst.ids))).unwrap();
        let known = |id| RxIds::Known(IpFields { id, flags_fragment: 0x4000 });
        assert_eq!(bursts, [(4, b"aaaabbbbcc".to_vec(), known(0)), (4, b"next".to_vec(), known(3))]);
    }

    #[test]
    fn ipv6_and_loop_to_oneself() {
        let (mut a, _b, mut c) = three();
        send(&mut c, at(0), flow(C, C), &[b"self"]);
        assert_eq!(receive(&mut c, at(0)), [(ip(C), Some(0), b"self".to_vec())]);
        assert!(receive(&mut a, at(0)).is_empty());
    }

    #[test]
    fn multicast_reaches_all_others() {
        let (mut a, mut b, mut c) = three();
        send(&mut a, at(0), flow(A, "239.1.1.1"), &[b"all"]);
        assert_eq!(bytes(receive(&mut b, at(0))), [b"all"]);
        assert_eq!(bytes(receive(&mut c, at(0))), [b"all"]);
        assert!(receive(&mut a, at(0)).is_empty());
    }

    #[test]
    fn nobody_there_is_a_loss() {
        let (mut a, b, _c) = three();
        assert_eq!(send(&mut a, at(0), flow(A, "10.9.9.9"), &[b"x"]), 1);
        assert_eq!(a.lost().transmit, 1);
        drop(b);
        assert_eq!(send(&mut a, at(0), flow(A, B), &[b"x"]), 1);
        assert_eq!(a.lost().transmit, 2);
    }

    #[test]
    fn full_means_wait_not_loss() {
        let switch = Switch::new();
        let mut a = switch.port_with(PortConfig { frames: 3, ..PortConfig::new(&[ip(A)]) });
        let mut b = switch.port(&[ip(B)]);
        let packets: [&[u8]; 5] = [b"1", b"2", b"3", b"4", b"5"];
        assert_eq!(send(&mut a, at(0), flow(A, B), &packets), 3);
        assert_eq!(send(&mut a, at(0), flow(A, B), &packets[3..]), 0);
        assert_eq!(bytes(receive(&mut b, at(0))), [b"1", b"2", b"3"]);
        assert_eq!(send(&mut a, at(0), flow(A, B), &packets[3..]), 2);
        assert_eq!(bytes(receive(&mut b, at(0))), [b"4", b"5"]);
        assert_eq!(a.lost(), DeviceLosses::default());
    }

    #[test]
    fn frames_of_a_port_that_left_come_back() {
        let switch = Switch::new();
        let mut a = switch.port_with(PortConfig { frames: 2, ..PortConfig::new(&[ip(A)]) });
        for round in 0..3 {
            // A new port takes the address over each time, and leaves with both frames.
            let mut b = switch.port(&[ip(B)]);
            assert_eq!(send(&mut a, at(0), flow(A, B), &[b"1", b"2", b"3"]), 2, "round {round}");
            let one = b.receive(at(0), 1, &mut |burst| assert_eq!(burst.bytes, b"1")).unwrap();
            assert_eq!(one, 1);
        }
    }

    #[test]
    fn the_newest_port_has_the_address() {
        let switch = Switch::new();
        let mut a = switch.port(&[ip(A)]);
        let mut old = switch.port(&[ip(B)]);
        let mut new = switch.port(&[ip(B)]);
        send(&mut a, at(0), flow(A, B), &[b"x"]);
        assert!(receive(&mut old, at(0)).is_empty());
        assert_eq!(bytes(receive(&mut new, at(0))), [b"x"]);
    }

    #[test]
    fn two_threads_move_everything_in_order() {
        const COUNT: u32 = 20_000;
        let switch = Switch::new();
        let mut a = switch.port_with(PortConfig { frames: 4, ..PortConfig::new(&[ip(A)]) });
        let mut b = switch.port(&[ip(B)]);
        let sender = std::thread::spawn(move || {
            let mut next = 0u32;
            while next < COUNT {
                let taken = a
                    .transmit(at(0), 16, &mut |room| {
                        let burst = (next < COUNT).then(|| fill(room, flow(A, B), 4, &next.to_be_bytes()));
                        next += u32::from(burst.is_some());
                        burst
                    })
                    .unwrap();
                if taken == 0 {
                    a.wait(None).unwrap();
                }
            }
            a
        });
        let mut expected = 0u32;
        while expected < COUNT {
            let given = b
                .receive(at(0), 64, &mut |burst| {
                    assert_eq!(burst.bytes, expected.to_be_bytes());
                    expected += 1;
                })
                .unwrap();
            if given == 0 {
                b.wait(None).unwrap();
            }
        }
        assert_eq!(sender.join().unwrap().lost(), DeviceLosses::default());
    }

    #[test]
    fn the_descriptor_tells_of_a_burst_once_the_port_is_armed() {
        let (mut a, mut b, _c) = three();
        let fd = b.descriptor().unwrap();
        let readable = || wait(&[Watch::Readable(fd)], Some(Duration::ZERO)).unwrap() == 1;
        // Not asked for, so it costs the sender nothing.
        send(&mut a, at(0), flow(A, B), &[b"1"]);
        assert!(!readable());
        assert!(b.arm(), "one waits already");
        assert_eq!(bytes(receive(&mut b, at(0))), [b"1"]);
        assert!(!b.arm());
        assert!(!readable());
        send(&mut a, at(0), flow(A, B), &[b"2", b"3"]);
        assert!(readable());
        assert!(b.arm(), "and it is quiet again");
        assert!(!readable());
        assert_eq!(bytes(receive(&mut b, at(0))), [b"2", b"3"]);
    }

    #[test]
    fn two_who_wake_a_port_at_once_leave_it_one_that_can_be_woken() {
        let (mut a, mut b, _c) = three();
        let fd = b.descriptor().unwrap();
        let readable = || wait(&[Watch::Readable(fd)], Some(Duration::ZERO)).unwrap() == 1;
        assert!(!b.arm());
        // Another port is about to ring, and takes its time.
        assert!(b.port.begin_to_ring());
        send(&mut a, at(0), flow(A, B), &[b"1"]);
        assert!(!readable(), "that is left to the first");
        assert_eq!(bytes(receive(&mut b, at(0))), [b"1"]);
        assert!(!b.arm());
        b.port.alarm().unwrap().set();
        assert!(readable());
        assert!(!b.arm());
        assert!(!readable());
        send(&mut a, at(0), flow(A, B), &[b"2"]);
        assert!(readable(), "and whoever comes next rings");
    }

    #[test]
    fn the_descriptor_of_a_port_without_frames_tells_when_one_comes_back() {
        let switch = Switch::new();
        let mut a = switch.port_with(PortConfig { frames: 1, ..PortConfig::new(&[ip(A)]) });
        let mut b = switch.port(&[ip(B)]);
        let fd = a.descriptor().unwrap();
        assert_eq!(send(&mut a, at(0), flow(A, B), &[b"1", b"2"]), 1);
        assert!(!a.arm());
        assert_eq!(bytes(receive(&mut b, at(0))), [b"1"]);
        assert_eq!(wait(&[Watch::Readable(fd)], Some(Duration::ZERO)).unwrap(), 1);
    }

    #[test]
    fn wait_ends_with_its_timeout() {
        let (mut a, _b, _c) = three();
        let begin = std::time::Instant::now();
        a.wait(Some(Duration::from_millis(5))).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(5));
    }
}
