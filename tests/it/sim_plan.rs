//! What a random exchange is going to be: the bad links, the work requests, and the model that applies them to plain
//! byte vectors.

use std::ops::Range;

use uroce::device::impair::ImpairModel;
use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Imm, PathMtu, Psn, RetryCount, Rkey, RnrRetry, RnrTimer};
use uroce::verbs::{FlushScope, MAX_READ_BYTES, QpOptions, SendFlags, SourcePort, WcData, WcOpcode};

/// Inline bytes of a send.
pub(crate) const INLINE: u32 = 64;
/// Elements of a work request.
pub(crate) const SGES: u32 = 4;

/// What a seed decides before anything is posted.
pub(crate) struct Scenario {
    pub(crate) ipv6: bool,
    pub(crate) mtu: PathMtu,
    pub(crate) links: [ImpairModel; 2],
    pub(crate) segments: usize,
    /// Bits a second of each device.
    pub(crate) rates: [Option<u64>; 2],
    pub(crate) connections: usize,
    pub(crate) works: u64,
    pub(crate) longest: u64,
    pub(crate) timeout: AckTimeout,
    pub(crate) retries: RetryCount,
    pub(crate) rnr_timer: RnrTimer,
    pub(crate) rnr_retries: RnrRetry,
    /// Receives of a party after which it posts no more.
    pub(crate) starve_after: Option<usize>,
    /// Packets after which everything is lost.
    pub(crate) dead_after: Option<u64>,
    pub(crate) depth: u32,
    pub(crate) reads: u8,
    pub(crate) first_psn: [Psn; 2],
    pub(crate) source_port: SourcePort,
    /// Credits, an RNR timer that adapts, a bound on waiting READs, and one on bytes in flight, on some runs.
    pub(crate) options: QpOptions,
}

impl Scenario {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let links = [draw_link(rng), draw_link(rng)];
        let starved = rng.chance(0.03);
        let psn = |rng: &mut Rng| match rng.within(0..=3) {
            // Close enough to the wrap that most runs cross it.
            0 => Psn::from_wire(0xFF_FFFF - rng.next_u32() % 64),
            1 => Psn::from_wire(0x7F_FFFF - rng.next_u32() % 64),
            _ => Psn::from_wire(rng.next_u32()),
        };
        Self {
            ipv6: rng.chance(0.3),
            mtu: PathMtu::ALL[index(rng, 5)],
            links,
            segments: 1 + index(rng, 16),
            rates: [draw_rate(rng), draw_rate(rng)],
            connections: if rng.chance(0.2) { 2 } else { 1 },
            works: rng.within(1..=16),
            longest: if rng.chance(0.01) { 1 << 20 } else { 1 << 16 },
            timeout: AckTimeout::new(u8::try_from(rng.within(8..=14)).unwrap()).unwrap(),
            retries: RetryCount::new(if rng.chance(0.1) { u8::try_from(rng.within(0..=6)).unwrap() } else { 7 })
                .unwrap(),
            rnr_timer: RnrTimer::new(u8::try_from(rng.within(1..=14)).unwrap()).unwrap(),
            rnr_retries: if starved {
                RnrRetry::new(u8::try_from(rng.within(0..=3)).unwrap()).unwrap()
            } else {
                RnrRetry::FOREVER
            },
            starve_after: starved.then(|| index(rng, 4)),
            dead_after: rng.chance(0.03).then(|| rng.within(0..=200)),
            depth: u32::try_from(rng.within(4..=32)).unwrap(),
            reads: u8::try_from(rng.within(1..=16)).unwrap(),
            first_psn: [psn(rng), psn(rng)],
            source_port: if rng.chance(0.3) { SourcePort::Rotating } else { SourcePort::Formula },
            options: QpOptions {
                credits: rng.chance(0.4),
                rnr_timer_max: rng.chance(0.3).then(|| RnrTimer::new(16)).flatten(),
                max_read_bytes: if rng.chance(0.3) { rng.within(1..=20_000) } else { MAX_READ_BYTES },
                max_in_flight: rng.chance(0.4).then(|| rng.within(1..=100_000)),
                ..QpOptions::default()
            },
        }
    }

    /// The longest that a refused request is asked to wait.
    pub(crate) fn longest_rnr(&self) -> Duration {
        self.options.rnr_timer_max.unwrap_or(self.rnr_timer).duration().max(self.rnr_timer.duration())
    }

    /// Nothing is lost or late. A packet that is cut short is lost: its ICRC is.
    pub(crate) fn is_lossless(&self) -> bool {
        let kept = |l: &ImpairModel| l.drop == 0.0 && l.corrupt == 0.0 && l.truncate == 0.0;
        let in_time = |l: &ImpairModel| l.reorder == 0.0 && l.jitter.is_zero();
        self.rates == [None; 2] && self.links.iter().all(|l| kept(l) && in_time(l))
    }
}

/// A path of 1 to 50 us with each impairment absent, or at up to 10 %.
pub(crate) fn draw_link(rng: &mut Rng) -> ImpairModel {
    let rate = |rng: &mut Rng| {
        let permille = u32::try_from(rng.within(1..=100)).unwrap();
        if rng.chance(0.5) { f64::from(permille) / 1000.0 } else { 0.0 }
    };
    let micros = |rng: &mut Rng, most: u64| Duration::from_nanos(rng.within(1_000..=most * 1_000));
    ImpairModel {
        drop: rate(rng),
        duplicate: rate(rng),
        reorder: rate(rng),
        corrupt: rate(rng),
        truncate: rate(rng) / 10.0,
        delay: micros(rng, 50),
        jitter: if rng.chance(0.3) { micros(rng, 20) } else { Duration::ZERO },
        reorder_by: micros(rng, 200),
    }
}

/// Any rate, or 1 to 50 Gbit/s: answers then wait for their turn.
pub(crate) fn draw_rate(rng: &mut Rng) -> Option<u64> {
    rng.chance(0.5).then(|| rng.within(1..=50) * 1_000_000_000)
}

pub(crate) fn index(rng: &mut Rng, count: usize) -> usize {
    usize::try_from(rng.within(0..=count as u64 - 1)).unwrap()
}

/// What a work request does, in terms of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Send(WcData),
    Write,
    WriteImm(Imm),
    Read,
    CompareSwap {
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        add: u64,
    },
    AtomicWrite,
    Flush(FlushScope),
    /// Moves a window of our own.
    Bind,
    /// Registers a fast registration of our own, or invalidates it, in turn: the number is the turn. Done twice, or out
    /// of order, it would be refused.
    Toggle(u8),
}

impl Kind {
    /// It takes no bytes of the source or the landing.
    pub(crate) fn is_empty(self) -> bool {
        matches!(self, Self::Flush(_) | Self::Bind | Self::Toggle(_))
    }

    /// 8 aligned bytes.
    fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. } | Self::AtomicWrite)
    }

    /// What comes back lands with us.
    pub(crate) fn lands(self) -> bool {
        matches!(self, Self::Read | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    pub(crate) fn takes_receive(self) -> bool {
        matches!(self, Self::Send(_) | Self::WriteImm(_))
    }

    pub(crate) fn opcode(self) -> WcOpcode {
        match self {
            Self::Send(_) => WcOpcode::Send,
            Self::Write | Self::WriteImm(_) => WcOpcode::RdmaWrite,
            Self::Read => WcOpcode::RdmaRead,
            Self::CompareSwap { .. } => WcOpcode::CompareSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::AtomicWrite => WcOpcode::AtomicWrite,
            Self::Flush(_) => WcOpcode::Flush,
            Self::Bind => WcOpcode::BindMw,
            Self::Toggle(turn) if turn % 2 == 0 => WcOpcode::FastRegister,
            Self::Toggle(_) => WcOpcode::LocalInvalidate,
        }
    }
}

/// A planned work request: `len` bytes in `pieces` of the source (or the landing), at `place` of the peer's target.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) kind: Kind,
    pub(crate) pieces: Vec<Range<usize>>,
    pub(crate) len: usize,
    pub(crate) place: usize,
    pub(crate) flags: SendFlags,
    pub(crate) inline: bool,
}

impl Work {
    /// The bytes of the peer's target that it changes.
    pub(crate) fn changes(&self) -> Range<usize> {
        match self.kind {
            Kind::Send(_) | Kind::Read | Kind::Flush(_) | Kind::Bind | Kind::Toggle(_) => 0..0,
            _ => self.place..self.place + self.len,
        }
    }

    pub(crate) fn apply(&self, source: &[u8], target: &mut [u8], landing: &mut [u8]) {
        let place = self.place..self.place + self.len;
        match self.kind {
            Kind::Send(_) | Kind::Flush(_) | Kind::Bind | Kind::Toggle(_) => {}
            Kind::Write | Kind::WriteImm(_) | Kind::AtomicWrite => {
                target[place].copy_from_slice(&gather(source, &self.pieces));
            }
            Kind::Read => scatter(landing, &self.pieces, &target[place]),
            Kind::CompareSwap { compare, swap } => {
                let old = word(&target[place.clone()]);
                scatter(landing, &self.pieces, &old.to_ne_bytes());
                if old == compare {
                    target[place].copy_from_slice(&swap.to_ne_bytes());
                }
            }
            Kind::FetchAdd { add } => {
                let old = word(&target[place.clone()]);
                scatter(landing, &self.pieces, &old.to_ne_bytes());
                target[place].copy_from_slice(&old.wrapping_add(add).to_ne_bytes());
            }
        }
    }
}

pub(crate) fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

pub(crate) fn gather(from: &[u8], pieces: &[Range<usize>]) -> Vec<u8> {
    pieces.iter().flat_map(|piece| from[piece.clone()].iter().copied()).collect()
}

pub(crate) fn scatter(to: &mut [u8], pieces: &[Range<usize>], mut bytes: &[u8]) {
    for piece in pieces {
        let (now, rest) = bytes.split_at(piece.len().min(bytes.len()));
        to[piece.start..piece.start + now.len()].copy_from_slice(now);
        bytes = rest;
    }
}

/// A planned receive, and which work request of the peer it is for.
pub(crate) struct Receive {
    pub(crate) pieces: Vec<Range<usize>>,
    pub(crate) work: usize,
}

/// What one party will ask of its peer, and the memory that both need for it.
pub(crate) struct Plan {
    pub(crate) works: Vec<Work>,
    pub(crate) source_len: usize,
    pub(crate) target_len: usize,
    pub(crate) landing_len: usize,
    /// Of the peer.
    pub(crate) inbox_len: usize,
    /// Of the peer.
    pub(crate) receives: Vec<Receive>,
}

/// Cuts `range` into one to four pieces, some perhaps empty.
pub(crate) fn cut(rng: &mut Rng, range: Range<usize>) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = (0..index(rng, 4)).map(|_| range.start + index(rng, range.len() + 1)).collect();
    cuts.sort_unstable();
    let starts = core::iter::once(range.start).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain(core::iter::once(range.end));
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

/// A length from 0 to `longest`, uniform in its logarithm.
pub(crate) fn draw_len(rng: &mut Rng, longest: u64) -> usize {
    if rng.chance(0.05) {
        return 0;
    }
    let bits = longest.ilog2();
    let top = rng.within(0..=u64::from(bits));
    let low = 1u64 << top;
    usize::try_from(rng.within(low..=(2 * low - 1)).min(longest)).unwrap()
}

impl Plan {
    /// The receives that the peer must post, and the bytes they need.
    pub(crate) fn inbox(&mut self) -> (Vec<Receive>, usize) {
        (core::mem::take(&mut self.receives), self.inbox_len)
    }

    /// Plans the work of one party. Keys to invalidate are filled in when they exist.
    pub(crate) fn draw(rng: &mut Rng, scenario: &Scenario) -> Self {
        let longest = usize::try_from(scenario.longest).unwrap();
        let (source_len, target_len) = (longest + 64, longest + 4096);
        let (mut landing_len, mut inbox_len) = (0, 0);
        let (mut works, mut receives) = (Vec::new(), Vec::new());
        // READs whose source a later work request must not change before they are done.
        let mut open_reads: Vec<Range<usize>> = Vec::new();
        let mut turn = 0;
        for number in 0..scenario.works {
            let mut kind = draw_kind(rng);
            if let Kind::Toggle(number) = &mut kind {
                *number = turn;
                turn += 1;
            }
            let len = match kind {
                _ if kind.is_empty() => 0,
                _ if kind.is_atomic() => 8,
                _ => draw_len(rng, scenario.longest),
            };
            let place = if kind.is_atomic() { 8 * index(rng, 16) } else { index(rng, target_len - len + 1) };
            let pieces = if kind.is_empty() {
                Vec::new()
            } else if kind.lands() {
                landing_len += len + index(rng, 8);
                cut_for(rng, kind.is_atomic(), landing_len - len..landing_len)
            } else {
                let start = index(rng, source_len - len + 1);
                cut(rng, start..start + len)
            };
            let inline = len <= INLINE as usize && !kind.is_empty() && !kind.lands() && rng.chance(0.3);
            let mut work = Work { kind, pieces, len, place, flags: SendFlags::default(), inline };
            let changed = work.changes();
            let conflict = open_reads.iter().any(|r| r.start < changed.end && changed.start < r.end);
            work.flags = SendFlags {
                signaled: rng.chance(0.7) || number % 3 == 2 || number + 1 == scenario.works,
                solicited: rng.chance(0.2),
                fence: conflict || rng.chance(0.05),
            };
            if work.flags.fence {
                open_reads.clear();
            }
            if matches!(kind, Kind::Read) {
                open_reads.push(place..place + len);
            }
            if kind.takes_receive() {
                // A WRITE with immediate leaves its receive untouched, however small.
                let room = if matches!(kind, Kind::Send(_)) { len + index(rng, 64) } else { index(rng, 64) };
                inbox_len += room;
                receives.push(Receive { pieces: cut(rng, inbox_len - room..inbox_len), work: works.len() });
            }
            works.push(work);
        }
        Self { works, source_len, target_len, landing_len, inbox_len, receives }
    }
}

/// Atomics take one element of 8 bytes.
pub(crate) fn cut_for(rng: &mut Rng, atomic: bool, range: Range<usize>) -> Vec<Range<usize>> {
    if atomic { core::iter::once(range).collect() } else { cut(rng, range) }
}

pub(crate) fn draw_kind(rng: &mut Rng) -> Kind {
    let imm = Imm::new(rng.next_u32());
    match rng.within(0..=12) {
        0 => Kind::Send(WcData::None),
        1 => Kind::Send(WcData::Imm(imm)),
        2 => Kind::Send(WcData::Invalidated(Rkey::new(0))),
        3 => Kind::Write,
        4 => Kind::WriteImm(imm),
        5 | 6 => Kind::Read,
        7 => Kind::CompareSwap { compare: 0, swap: rng.next_u64() },
        8 => Kind::AtomicWrite,
        9 => Kind::Flush(if rng.chance(0.5) { FlushScope::Range } else { FlushScope::Region }),
        10 => Kind::Bind,
        11 => Kind::Toggle(0),
        _ => Kind::FetchAdd { add: rng.next_u64() },
    }
}
