//! Bursts taken apart where they hold the inside of a message: run by run.
//!
//! Owns how packets that differ in nothing but the PSN are told, and that each one's ICRC is found right before a byte of it
//! is placed. What they mean is the QP's business, which is asked once for all of them. Whatever a run does not take is
//! handled packet by packet, as if there were no runs: so nothing is counted here but what was placed.

use super::{Endpoint, is_nobody};
use crate::burst::{IcrcMode, RxBurst, RxIds};
use crate::wire::{Body, DONT_FRAGMENT, IpFields, Packet, RunHeader, RunReader, is_inside};

impl Endpoint {
    /// Handles the segments of `burst` from the segment `from` on, of which there are runs.
    #[inline(never)]
    pub(super) fn handle_with_runs(&mut self, burst: &RxBurst<'_>, from: usize) {
        let mut index = from;
        while let Some(rest) = burst.bytes.get(index * burst.segment..).filter(|rest| !rest.is_empty()) {
            let placed = if is_inside(rest) { self.place(burst, index, rest) } else { 0 };
            if placed == 0 {
                self.handle_segment(burst, index, rest.get(..burst.segment).unwrap_or(rest));
            }
            index += placed.max(1);
        }
    }

    /// Places the run that the segments of `rest` begin with, the first of which is the segment `index` of `burst`. Returns
    /// how many segments it has; 0: there is none.
    fn place(&mut self, burst: &RxBurst<'_>, index: usize, rest: &[u8]) -> usize {
        // One alone saves nothing.
        if rest.len() < 2 * burst.segment {
            return 0;
        }
        let flow = &burst.flow;
        let Ok(step) = u16::try_from(index) else { return 0 };
        let is_plain = !burst.congestion_experienced() && !is_nobody(flow.src) && !flow.dst.is_multicast();
        if !is_plain || self.config.icrc == IcrcMode::Count {
            return 0;
        }
        let Some(first) = rest.get(..burst.segment) else { return 0 };
        let (Some(header), Ok(packet)) = (RunHeader::of(first), Packet::parse(first)) else { return 0 };
        let Some(handle) = self.by_qpn.get(packet.dest_qp.get()).copied() else { return 0 };
        let Some(slot) = self.qps.get(handle) else { return 0 };
        let Some(landing) = slot.qp.landing(&packet, flow, &self.mrs) else { return 0 };
        let IpFields { id, flags_fragment } = match burst.ids {
            RxIds::Known(first) => first,
            RxIds::Hidden => IpFields { id: 0, flags_fragment: DONT_FRAGMENT },
        };
        let start = self.icrcs.get(flow, flags_fragment, burst.segment);
        let checks = self.config.icrc == IcrcMode::Check;
        let mut reader = RunReader::new(header, start, packet.psn, id.wrapping_add(step), checks);
        let (mut placed, mut at) = (0u16, 0);
        for segment in rest.chunks_exact(burst.segment).take(landing.packets) {
            let Some(payload) = reader.take(segment) else { break };
            if landing.place.write(at, payload).is_none() {
                break;
            }
            (placed, at) = (placed + 1, at + payload.len());
        }
        if placed == 0 {
            return 0;
        }
        let (packets, bytes) = (u64::from(placed), u64::from(placed) * burst.segment as u64);
        self.counters.rcvd_pkts += packets;
        self.counters.rcvd_bytes += bytes;
        if matches!(packet.body, Body::Request(_)) {
            self.requests = self.requests.wrapping_add(packets);
        }
        self.with_qp(handle, |qp, cx| {
            cx.counters.rcvd_pkts += packets;
            cx.counters.rcvd_bytes += bytes;
            qp.landed(&packet, placed.into(), cx);
        });
        self.wake(handle);
        placed.into()
    }
}
