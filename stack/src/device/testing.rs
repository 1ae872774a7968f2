//! What the tests of the devices share: packets, a plain inner device, ways to drive a device.

use core::net::{IpAddr, Ipv4Addr};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{Device, DeviceCapabilities, DeviceError, IcrcMode, RxSink, TxSource};
use crate::burst::{IdRule, Medium, RxBurst, RxIds, TxBurst, TxRoom};
use crate::time::{Duration, Instant};
use crate::types::PathMtu;
use crate::wire::{self, Flow, IpFields};

/// A loopback address that no other test, in this process or another, uses.
pub(crate) fn loopback_address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., a, b] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, a | 0x80, b, NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn flow(src: &str, dst: &str) -> Flow {
    let (src, dst) = (ip(src), ip(dst));
    Flow { src, dst, src_port: 0xC000, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None }
}

pub(super) fn at(micros: u64) -> Instant {
    Instant::from_nanos(micros * 1000)
}

/// Writes segments of `flow` into `room` as an endpoint would.
pub(super) fn fill(room: TxRoom<'_>, flow: Flow, segment: usize, segments: &[u8]) -> TxBurst {
    let id = room.ids.id(0);
    let mut outer_bytes = [0; 48];
    let len = wire::write_outer(&flow, id, segments.len(), &mut outer_bytes).unwrap();
    let header = if room.medium == Medium::Ip { &outer_bytes[..len] } else { &[] };
    let to = &mut room.buf[room.headroom..];
    to[..header.len()].copy_from_slice(header);
    to[header.len()..header.len() + segments.len()].copy_from_slice(segments);
    TxBurst { flow, len: header.len() + segments.len(), segment, segments: segments.len().div_ceil(segment) }
}

/// Sends each of `packets` as a burst of one segment; returns how many the device took.
pub(super) fn send(device: &mut dyn Device, now: Instant, flow: Flow, packets: &[&[u8]]) -> usize {
    let mut left = packets.iter();
    device.transmit(now, packets.len(), &mut |room| left.next().map(|p| fill(room, flow, p.len(), p))).unwrap()
}

/// A received packet: source, id, bytes.
pub(super) type Got = (IpAddr, Option<u16>, Vec<u8>);

/// Everything that waits, split into packets.
pub(super) fn receive(device: &mut dyn Device, now: Instant) -> Vec<Got> {
    let mut got = Vec::new();
    device
        .receive(now, usize::MAX, &mut |burst| {
            for (i, packet) in burst.bytes.chunks(burst.segment).enumerate() {
                let id = match burst.ids {
                    RxIds::Known(f) => Some(f.id + u16::try_from(i).unwrap()),
                    RxIds::Hidden => None,
                };
                got.push((burst.flow.src, id, packet.to_vec()));
            }
        })
        .unwrap();
    got
}

/// The bytes alone.
pub(super) fn bytes(got: Vec<Got>) -> Vec<Vec<u8>> {
    got.into_iter().map(|g| g.2).collect()
}

/// A device that receives what the test queued and keeps what was sent.
#[derive(Debug)]
pub(super) struct Bench {
    capabilities: DeviceCapabilities,
    pub(super) ids: IdRule,
    /// Bursts to receive: flow, segment, bytes, first id.
    pub(super) incoming: VecDeque<(Flow, usize, Vec<u8>, u16)>,
    /// Bursts sent, headers included.
    pub(super) sent: Vec<(TxBurst, Vec<u8>)>,
    /// Free slots.
    pub(super) slots: usize,
}

impl Bench {
    pub(super) fn new(medium: Medium) -> Self {
        let capabilities = DeviceCapabilities {
            medium,
            mtu: 1500,
            path_mtu: PathMtu::B1024,
            segments_max: 8,
            icrc: IcrcMode::Check,
            addresses: vec![ip("10.0.0.1")],
            mac: None,
            name: "bench".to_owned(),
        };
        let ids = if medium == Medium::Ip { IdRule::From(100) } else { IdRule::Index };
        Self { capabilities, ids, incoming: VecDeque::new(), sent: Vec::new(), slots: usize::MAX }
    }
}

impl Device for Bench {
    fn capabilities(&self) -> &DeviceCapabilities {
        &self.capabilities
    }

    fn receive(&mut self, now: Instant, budget: usize, sink: &mut RxSink<'_>) -> Result<usize, DeviceError> {
        let mut given = 0;
        while given < budget
            && let Some((flow, segment, bytes, id)) = self.incoming.pop_front()
        {
            let ids = RxIds::Known(IpFields { id, flags_fragment: 0x4000 });
            sink(RxBurst { flow, bytes: &bytes, segment, ids, at: now });
            given += 1;
        }
        Ok(given)
    }

    fn transmit(&mut self, _now: Instant, budget: usize, source: &mut TxSource<'_>) -> Result<usize, DeviceError> {
        let mut taken = 0;
        while taken < budget && self.slots > 0 {
            let mut buf = vec![0; 9000];
            let medium = self.capabilities.medium;
            let room = TxRoom { buf: &mut buf, headroom: 14, segments_max: 8, ids: self.ids, medium };
            let Some(burst) = source(room) else { break };
            self.sent.push((burst, buf[14..14 + burst.len].to_vec()));
            taken += 1;
            self.slots = self.slots.saturating_sub(1);
        }
        Ok(taken)
    }

    fn wait(&mut self, _timeout: Option<Duration>) -> Result<(), DeviceError> {
        Ok(())
    }
}
