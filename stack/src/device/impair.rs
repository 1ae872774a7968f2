//! A device that loses, delays, doubles, reorders and damages packets by rate, from a seed.
//!
//! Owns the impairment model, a plain value that the simulator's links share. Never looks inside a packet.

use super::Device;
use super::intercept::{Direction, FLIPS_MAX, Intercepted, Judge, Verdict};
use crate::rng::Rng;
use crate::time::{Duration, Instant};
use crate::wire::Flow;

/// How a path treats packets. Rates are probabilities a packet, 0.0 to 1.0, and independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct ImpairModel {
    /// Lost.
    pub drop: f64,
    /// Delivered twice; the copy draws its own delay.
    pub duplicate: f64,
    /// Held back by `reorder_by` on top of its delay, so that later packets overtake it.
    pub reorder: f64,
    /// One to three bits flipped.
    pub corrupt: f64,
    /// Cut short anywhere.
    pub truncate: f64,
    /// Least delay of each packet.
    pub delay: Duration,
    /// Greatest addition to `delay`, uniform. Packets overtake each other when it exceeds their spacing.
    pub jitter: Duration,
    /// How long a reordered packet is held back.
    pub reorder_by: Duration,
}

impl ImpairModel {
    /// A perfect path without delay.
    pub const NONE: Self = Self {
        drop: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        corrupt: 0.0,
        truncate: 0.0,
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        reorder_by: Duration::ZERO,
    };

    /// A path that loses this share of the packets and does nothing else.
    #[must_use]
    pub const fn lossy(drop: f64) -> Self {
        Self { drop, ..Self::NONE }
    }

    /// A path that takes this long.
    #[must_use]
    pub const fn with_delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// What happens to a packet of `len` bytes (BTH to ICRC). Equal models, generators and lengths decide alike.
    #[must_use]
    pub fn decide(&self, rng: &mut Rng, len: usize) -> Verdict {
        let mut verdict = Verdict::PASS;
        if hit(rng, self.duplicate) {
            verdict.copy = Some(self.latency(rng));
        }
        verdict.deliver = if hit(rng, self.drop) { None } else { Some(self.latency(rng)) };
        let bits = u64::try_from(len).unwrap_or(u64::MAX).saturating_mul(8);
        if bits > 0 && hit(rng, self.corrupt) {
            let count = usize::try_from(rng.within(1..=FLIPS_MAX as u64)).unwrap_or(1);
            for flip in verdict.flips.iter_mut().take(count) {
                *flip = u32::try_from(rng.within(0..=bits - 1)).ok();
            }
            // The same bit twice is no damage: the model's corrupt packets are really corrupt.
            if count == 2 && verdict.flips[0] == verdict.flips[1] {
                verdict.flips[1] = None;
            }
        }
        if len > 0 && hit(rng, self.truncate) {
            verdict.keep = usize::try_from(rng.within(0..=bits / 8 - 1)).ok();
        }
        verdict
    }

    fn latency(&self, rng: &mut Rng) -> Duration {
        let jitter = match u64::try_from(self.jitter.as_nanos()) {
            Ok(0) | Err(_) => Duration::ZERO,
            Ok(most) => Duration::from_nanos(rng.within(0..=most)),
        };
        let held = if hit(rng, self.reorder) { self.reorder_by } else { Duration::ZERO };
        self.delay + jitter + held
    }
}

/// A draw that costs nothing when the rate is zero.
fn hit(rng: &mut Rng, rate: f64) -> bool {
    rate > 0.0 && rng.chance(rate)
}

/// The judge of [`Impaired`].
#[derive(Debug)]
pub struct Rates {
    rng: Rng,
    out: ImpairModel,
    into: ImpairModel,
    stats: ImpairStats,
}

/// What an impaired device did so far, both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImpairStats {
    /// Packets seen.
    pub packets: u64,
    /// Lost.
    pub dropped: u64,
    /// Doubled.
    pub duplicated: u64,
    /// Delivered late.
    pub delayed: u64,
    /// Delivered with flipped bits.
    pub corrupted: u64,
    /// Delivered short.
    pub truncated: u64,
}

impl ImpairStats {
    /// Counts one verdict.
    pub fn count(&mut self, verdict: &Verdict) {
        self.packets += 1;
        self.duplicated += u64::from(verdict.copy.is_some());
        let Some(delay) = verdict.deliver else {
            self.dropped += 1;
            return;
        };
        self.delayed += u64::from(delay > Duration::ZERO);
        self.corrupted += u64::from(verdict.flips.iter().any(Option::is_some));
        self.truncated += u64::from(verdict.keep.is_some());
    }
}

impl Judge for Rates {
    fn judge(&mut self, _now: Instant, direction: Direction, _flow: &Flow, packet: &[u8]) -> Verdict {
        let model = match direction {
            Direction::Out => self.out,
            Direction::In => self.into,
        };
        let verdict = model.decide(&mut self.rng, packet.len());
        self.stats.count(&verdict);
        verdict
    }
}

/// A device behind bad paths: one model outward, one inward.
pub type Impaired<D> = Intercepted<D, Rates>;

impl<D: Device> Impaired<D> {
    /// `inner` with `out` on packets it sends and `into` on packets it receives.
    pub fn new(inner: D, out: ImpairModel, into: ImpairModel, seed: u64) -> Self {
        let judge = Rates { rng: Rng::from_u64(seed), out, into, stats: ImpairStats::default() };
        Self::around(inner, judge, "impair")
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> ImpairStats {
        self.judge.stats
    }

    /// Replaces the models from now on.
    pub fn set_models(&mut self, out: ImpairModel, into: ImpairModel) {
        self.judge.out = out;
        self.judge.into = into;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, at, bytes, flow, receive, send};
    use super::*;
    use crate::burst::Medium;
    use crate::device::HELD_MAX;

    const A: &str = "10.0.0.1";
    const B: &str = "10.0.0.2";

    /// The packet of each burst sent, without outer header.
    fn sent(device: &Impaired<Bench>) -> Vec<Vec<u8>> {
        device.inner().sent.iter().map(|(b, bytes)| bytes[b.len - b.segment..].to_vec()).collect()
    }

    fn out(model: ImpairModel, medium: Medium) -> Impaired<Bench> {
        Impaired::new(Bench::new(medium), model, ImpairModel::NONE, 7)
    }

    #[test]
    fn no_impairment_is_no_change() {
        let mut d = out(ImpairModel::NONE, Medium::Ip);
        assert_eq!(d.capabilities().segments_max, 1);
        assert_eq!(send(&mut d, at(0), flow(A, B), &[b"one", b"two"]), 2);
        assert_eq!(sent(&d), [b"one", b"two"]);
        assert_eq!(d.stats(), ImpairStats { packets: 2, ..ImpairStats::default() });
        assert_eq!(d.poll_timeout(), None);
    }

    #[test]
    fn everything_is_lost_and_still_taken() {
        let mut d = out(ImpairModel::lossy(1.0), Medium::Udp);
        assert_eq!(send(&mut d, at(0), flow(A, B), &[b"one", b"two"]), 2);
        assert!(sent(&d).is_empty());
        assert_eq!(d.stats().dropped, 2);
    }

    #[test]
    fn delayed_packets_leave_when_due_with_their_own_id() {
        let model = ImpairModel::NONE.with_delay(Duration::from_micros(50));
        let mut d = out(model, Medium::Ip);
        send(&mut d, at(0), flow(A, B), &[b"one"]);
        assert!(sent(&d).is_empty());
        assert_eq!((d.held(), d.poll_timeout()), (1, Some(at(50))));
        assert_eq!(send(&mut d, at(49), flow(A, B), &[]), 0);
        assert!(sent(&d).is_empty());
        // The device counts its ids on meanwhile; the ICRC of the packet covers the old one.
        d.judge.out = ImpairModel::NONE;
        assert_eq!(send(&mut d, at(50), flow(A, B), &[b"two"]), 1);
        assert_eq!(sent(&d), [b"one", b"two"]);
        assert_eq!(d.inner().sent[0].1[4..6], 100u16.to_be_bytes());
        assert_eq!(d.held(), 0);
    }

    #[test]
    fn a_duplicate_follows() {
        let mut d = out(ImpairModel { duplicate: 1.0, ..ImpairModel::NONE }, Medium::Udp);
        assert_eq!(send(&mut d, at(0), flow(A, B), &[b"one", b"two"]), 2);
        let mut all = sent(&d);
        all.sort();
        assert_eq!(all, [b"one", b"one", b"two", b"two"]);
    }

    #[test]
    fn a_reordered_packet_is_overtaken() {
        let model = ImpairModel { reorder: 1.0, reorder_by: Duration::from_micros(10), ..ImpairModel::NONE };
        let mut d = out(model, Medium::Udp);
        send(&mut d, at(0), flow(A, B), &[b"late"]);
        d.set_models(ImpairModel::NONE, ImpairModel::NONE);
        send(&mut d, at(1), flow(A, B), &[b"soon"]);
        send(&mut d, at(10), flow(A, B), &[]);
        assert_eq!(sent(&d), [b"soon", b"late"]);
    }

    #[test]
    fn corrupt_means_different() {
        let mut d = out(ImpairModel { corrupt: 1.0, ..ImpairModel::NONE }, Medium::Ip);
        let packet = [0x5a; 64];
        for _ in 0..200 {
            send(&mut d, at(0), flow(A, B), &[&packet]);
        }
        for got in sent(&d) {
            let flipped: u32 = got.iter().map(|b| (b ^ 0x5a).count_ones()).sum();
            assert!((1..=3).contains(&flipped), "{flipped} bits");
        }
    }

    #[test]
    fn truncated_packets_have_true_outer_lengths() {
        let mut d = out(ImpairModel { truncate: 1.0, ..ImpairModel::NONE }, Medium::Ip);
        send(&mut d, at(0), flow(A, B), &[&[1; 100]]);
        let (burst, bytes) = &d.inner().sent[0];
        assert!(burst.segment < 100);
        assert_eq!(bytes.len(), 28 + burst.segment);
        assert_eq!(usize::from(u16::from_be_bytes([bytes[2], bytes[3]])), bytes.len());
        assert_eq!(usize::from(u16::from_be_bytes([bytes[24], bytes[25]])), bytes.len() - 20);
        assert_eq!(bytes[4..6], 100u16.to_be_bytes());
    }

    #[test]
    fn received_superframes_are_treated_packet_by_packet() {
        let mut d = Impaired::new(Bench::new(Medium::Udp), ImpairModel::NONE, ImpairModel::lossy(0.3), 3);
        let all: Vec<u8> = (0..32u8).flat_map(|i| [i; 4]).collect();
        let mut bench = d.into_inner();
        bench.incoming.push_back((flow(B, A), 4, all, 1000));
        d = Impaired::new(bench, ImpairModel::NONE, ImpairModel::lossy(0.3), 3);
        let got = receive(&mut d, at(0));
        assert_eq!(got.len() as u64 + d.stats().dropped, 32);
        assert!((1..32).contains(&got.len()));
        for (_, id, packet) in got {
            assert_eq!(id, Some(1000 + u16::from(packet[0])), "each packet keeps the id its ICRC covers");
        }
    }

    #[test]
    fn received_packets_wait_too() {
        let late = ImpairModel::NONE.with_delay(Duration::from_micros(5));
        let mut bench = Bench::new(Medium::Udp);
        bench.incoming.push_back((flow(B, A), 2, b"aabb".to_vec(), 9));
        let mut d = Impaired::new(bench, ImpairModel::NONE, late, 3);
        assert!(receive(&mut d, at(0)).is_empty());
        assert_eq!(d.poll_timeout(), Some(at(5)));
        assert_eq!(bytes(receive(&mut d, at(5))), [b"aa", b"bb"]);
    }

    #[test]
    fn a_full_device_and_a_full_queue_hold() {
        let mut bench = Bench::new(Medium::Udp);
        bench.slots = 0;
        let mut d = Impaired::new(bench, ImpairModel::NONE, ImpairModel::NONE, 3);
        assert_eq!(send(&mut d, at(0), flow(A, B), &[b"x"]), 0, "no slot, so nothing is taken");

        let mut d = out(ImpairModel::NONE.with_delay(Duration::from_secs(1)), Medium::Udp);
        for _ in 0..=HELD_MAX {
            send(&mut d, at(0), flow(A, B), &[b"x"]);
        }
        assert_eq!((d.held(), d.lost().transmit), (HELD_MAX, 1));
    }

    #[test]
    fn the_same_seed_decides_alike() {
        let model = ImpairModel {
            drop: 0.1,
            duplicate: 0.1,
            reorder: 0.1,
            corrupt: 0.1,
            truncate: 0.1,
            delay: Duration::from_micros(3),
            jitter: Duration::from_micros(9),
            reorder_by: Duration::from_micros(30),
        };
        let (mut a, mut b) = (Rng::from_u64(5), Rng::from_u64(5));
        let mut stats = ImpairStats::default();
        for len in 0..2000 {
            let verdict = model.decide(&mut a, len);
            assert_eq!(verdict, model.decide(&mut b, len));
            stats.count(&verdict);
        }
        // 2000 draws at 10 %: 200 +- 5 sigma of 13.4.
        for count in [stats.dropped, stats.duplicated] {
            assert!((133..=267).contains(&count), "{stats:?}");
        }
    }
}
