//! What became of each stream of packets: retransmissions, NAKs, gaps.
//!
//! Owns one record for each (sender, receiver, destination QP). It sees packets in the order of the capture and judges
//! by sequence numbers alone, as a person with the same capture would. Never prints.

use core::net::IpAddr;
use std::collections::{BTreeMap, HashSet, VecDeque};

use serde::Serialize;
use uroce::types::{Psn, PsnClass, Qpn};
use uroce::wire::{Body, Packet, Request, RequestOp, Response, ResponseOp, Syndrome};

/// Streams that are told apart; packets of further ones are counted together.
const FLOWS_MAX: usize = 4096;
/// PSNs of a stream that are remembered, to tell a retransmission from a packet that was overtaken.
const RECENT_MAX: usize = 8192;
/// PSNs of one READ that are remembered.
const READ_PSNS_MAX: u32 = 1024;
/// The largest path MTU, taken until packets show the real one.
const PMTU_UNKNOWN: u32 = 4096;

/// Names a stream of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct FlowKey {
    /// Sender.
    pub src: IpAddr,
    /// Receiver.
    pub dst: IpAddr,
    /// Destination QP.
    pub qp: u32,
}

/// How a packet stands to those before it in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remark {
    /// Request with a PSN that was seen before.
    Retransmission,
    /// Request with a PSN behind the newest that was not seen before.
    Late,
    /// Request with a PSN beyond the next one: this many are missing.
    Gap(u32),
}

/// Counts of one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct FlowCounts {
    /// Packets of any kind.
    pub packets: u64,
    /// Bytes, BTH to ICRC.
    pub bytes: u64,
    /// Request packets.
    pub requests: u64,
    /// Request packets that had been seen before.
    pub retransmissions: u64,
    /// Request packets that came after a later one.
    pub late: u64,
    /// Times that a request jumped over PSNs.
    pub gaps: u64,
    /// Positive acknowledgements.
    pub acks: u64,
    /// NAKs for a PSN sequence error.
    pub nak_sequence: u64,
    /// NAKs of the other kinds, all of them fatal.
    pub nak_fatal: u64,
    /// RNR NAKs.
    pub rnr: u64,
    /// Congestion notifications.
    pub cnps: u64,
    /// Packets with the congestion mark.
    pub marked: u64,
    /// Packets with a wrong ICRC; they count nowhere else but in `packets` and `bytes`.
    pub icrc_wrong: u64,
}

impl FlowCounts {
    /// Whether anything happened that a flawless network and peer would not show.
    pub(super) const fn is_troubled(&self) -> bool {
        self.retransmissions + self.late + self.gaps + self.nak_sequence + self.nak_fatal + self.rnr + self.icrc_wrong
            > 0
    }
}

#[derive(Default)]
struct FlowState {
    counts: FlowCounts,
    /// PSN that the next new request should have, and whether that is sure: after a READ of unknown path MTU it is not.
    next: Option<(Psn, bool)>,
    recent: RecentPsns,
    pmtu: Option<u32>,
}

/// All streams of a capture.
#[derive(Default)]
pub(super) struct Flows {
    flows: BTreeMap<FlowKey, FlowState>,
    overflow: u64,
}

impl Flows {
    /// Counts a packet and says how it stands to those before it.
    pub(super) fn on_packet(&mut self, key: FlowKey, len: usize, marked: bool, packet: &Packet<'_>) -> Option<Remark> {
        self.flow(key, len)?;
        // READ data run the other way, so both directions of an address pair show the path MTU.
        if let Some(pmtu) = shown_pmtu(&packet.body) {
            self.learn_pmtu(key, pmtu);
        }
        let flow = self.flows.get_mut(&key)?;
        flow.counts.marked += u64::from(marked);
        match &packet.body {
            Body::Request(request) => flow.on_request(packet.psn, request),
            Body::Response(response) => {
                flow.counts.on_response(response);
                None
            }
            Body::Cnp => {
                flow.counts.cnps += 1;
                None
            }
            Body::Datagram(_) => None,
        }
    }

    /// Counts a packet whose ICRC is wrong.
    pub(super) fn on_wrong_icrc(&mut self, key: FlowKey, len: usize) {
        if let Some(flow) = self.flow(key, len) {
            flow.counts.icrc_wrong += 1;
        }
    }

    /// Every stream with its counts, in order of addresses and QP.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&FlowKey, &FlowCounts)> {
        self.flows.iter().map(|(key, flow)| (key, &flow.counts))
    }

    /// Packets of streams beyond the limit.
    pub(super) const fn overflow(&self) -> u64 {
        self.overflow
    }

    fn flow(&mut self, key: FlowKey, len: usize) -> Option<&mut FlowState> {
        if !self.flows.contains_key(&key) && self.flows.len() >= FLOWS_MAX {
            self.overflow += 1;
            return None;
        }
        let flow = self.flows.entry(key).or_default();
        flow.counts.packets += 1;
        flow.counts.bytes += u64::try_from(len).unwrap_or(0);
        Some(flow)
    }

    fn learn_pmtu(&mut self, key: FlowKey, pmtu: u32) {
        let ends = FlowKey { qp: 0, ..key }..=FlowKey { qp: Qpn::MULTICAST.get(), ..key };
        let back = FlowKey { src: key.dst, dst: key.src, qp: 0 }..=FlowKey {
            src: key.dst,
            dst: key.src,
            qp: Qpn::MULTICAST.get(),
        };
        for range in [ends, back] {
            for (_, flow) in self.flows.range_mut(range) {
                flow.pmtu.get_or_insert(pmtu);
            }
        }
    }
}

/// The path MTU, if this packet shows it: First and Middle packets are exactly as long.
fn shown_pmtu(body: &Body<'_>) -> Option<u32> {
    use uroce::wire::Place;
    let payload = match body {
        Body::Request(r) if matches!(r.op.place(), Place::First | Place::Middle) => r.payload,
        Body::Response(r) if matches!(r.op, ResponseOp::ReadFirst(_) | ResponseOp::ReadMiddle) => r.payload,
        _ => return None,
    };
    u32::try_from(payload.len()).ok().filter(|len| *len > 0)
}

impl FlowState {
    fn on_request(&mut self, psn: Psn, request: &Request<'_>) -> Option<Remark> {
        self.counts.requests += 1;
        let remark = self.judge(psn);
        match remark {
            Some(Remark::Retransmission) => self.counts.retransmissions += 1,
            Some(Remark::Late) => self.counts.late += 1,
            Some(Remark::Gap(_)) => self.counts.gaps += 1,
            None => {}
        }
        let (width, sure) = match request.op {
            RequestOp::Read(reth) => {
                let pmtu = self.pmtu.unwrap_or(PMTU_UNKNOWN);
                (reth.length.div_ceil(pmtu).max(1), self.pmtu.is_some() || reth.length <= 256)
            }
            _ => (1, true),
        };
        // A READ may be asked for again from its middle, so all PSNs of its answer count as sent.
        for sent in 0..width.min(READ_PSNS_MAX) {
            self.recent.insert(psn.plus(sent));
        }
        let after = psn.plus(width);
        if self.next.is_none_or(|(next, _)| after.distance_from(next) > 0) {
            self.next = Some((after, sure));
        }
        remark
    }

    fn judge(&self, psn: Psn) -> Option<Remark> {
        let (next, sure) = self.next?;
        match psn.classify(next) {
            PsnClass::Expected => None,
            PsnClass::Ahead if sure => Some(Remark::Gap(psn.distance_from(next).unsigned_abs())),
            PsnClass::Ahead => None,
            PsnClass::Duplicate if self.recent.contains(psn) => Some(Remark::Retransmission),
            PsnClass::Duplicate => Some(Remark::Late),
        }
    }
}

impl FlowCounts {
    fn on_response(&mut self, response: &Response<'_>) {
        let syndrome = match response.op {
            ResponseOp::Acknowledge(aeth) => aeth.syndrome,
            _ => return,
        };
        match syndrome {
            Syndrome::Ack { .. } => self.acks += 1,
            Syndrome::RnrNak(_) => self.rnr += 1,
            Syndrome::Nak(uroce::wire::NakCode::PsnSequenceError) => self.nak_sequence += 1,
            Syndrome::Nak(_) | Syndrome::Reserved(_) => self.nak_fatal += 1,
        }
    }
}

/// The newest PSNs of a stream.
#[derive(Default)]
struct RecentPsns {
    set: HashSet<Psn>,
    order: VecDeque<Psn>,
}

impl RecentPsns {
    fn insert(&mut self, psn: Psn) {
        if !self.set.insert(psn) {
            return;
        }
        self.order.push_back(psn);
        if self.order.len() > RECENT_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }

    fn contains(&self, psn: Psn) -> bool {
        self.set.contains(&psn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uroce::types::{PKey, Rkey};
    use uroce::wire::{Aeth, NakCode, Place, Reth, SendTail, Service};

    fn key() -> FlowKey {
        FlowKey { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), qp: 17 }
    }

    fn packet(psn: u32, body: Body<'_>) -> Packet<'_> {
        Packet {
            dest_qp: Qpn::from_wire(17),
            pkey: PKey::DEFAULT,
            psn: Psn::from_wire(psn),
            solicited: false,
            mig_req: true,
            ack_req: true,
            fecn: false,
            becn: false,
            reserved: (0, 0),
            body,
        }
    }

    fn request(op: RequestOp, payload: &[u8]) -> Body<'_> {
        Body::Request(Request { service: Service::Rc, op, payload })
    }

    fn send(flows: &mut Flows, psn: u32) -> Option<Remark> {
        let body = request(RequestOp::Send(Place::Only, SendTail::None), b"x");
        flows.on_packet(key(), 20, false, &packet(psn, body))
    }

    #[test]
    fn repeats_late_packets_and_gaps_are_told_apart_across_the_wrap() {
        let mut flows = Flows::default();
        assert_eq!(send(&mut flows, 0xff_fffe), None);
        assert_eq!(send(&mut flows, 0xff_ffff), None);
        assert_eq!(send(&mut flows, 1), Some(Remark::Gap(1)));
        assert_eq!(send(&mut flows, 0), Some(Remark::Late));
        assert_eq!(send(&mut flows, 0xff_ffff), Some(Remark::Retransmission));
        assert_eq!(send(&mut flows, 2), None);
        let (_, counts) = flows.counts().next().unwrap();
        assert_eq!((counts.requests, counts.retransmissions, counts.late, counts.gaps), (6, 1, 1, 1));
    }

    #[test]
    fn a_read_takes_the_psns_of_its_answer() {
        let mut flows = Flows::default();
        // A First packet shows that the path MTU is 1024.
        let first = request(RequestOp::Send(Place::First, SendTail::None), &[0; 1024]);
        let read = |length| request(RequestOp::Read(Reth { addr: 0, rkey: Rkey::new(1), length }), &[]);
        send(&mut flows, 1);
        assert_eq!(flows.on_packet(key(), 20, false, &packet(2, first)), None);
        assert_eq!(flows.on_packet(key(), 20, false, &packet(3, read(3000))), None);
        assert_eq!(send(&mut flows, 6), None, "PSNs 3 to 5 are the READ's");
        assert_eq!(send(&mut flows, 8), Some(Remark::Gap(1)));
    }

    #[test]
    fn naks_are_counted_by_kind() {
        let mut flows = Flows::default();
        for byte in [0x1f, 0x60, 0x62, 0x2c] {
            let aeth = Aeth { syndrome: Syndrome::from_wire(byte), msn: uroce::types::Msn::from_wire(1) };
            let body = Body::Response(Response { op: ResponseOp::Acknowledge(aeth), payload: &[] });
            flows.on_packet(key(), 20, false, &packet(9, body));
        }
        assert_eq!(Syndrome::from_wire(0x62), Syndrome::Nak(NakCode::RemoteAccessError));
        let (_, counts) = flows.counts().next().unwrap();
        assert_eq!((counts.acks, counts.nak_sequence, counts.nak_fatal, counts.rnr), (1, 1, 1, 1));
        assert!(counts.is_troubled());
    }

    #[test]
    fn a_flood_of_qps_does_not_grow_memory() {
        let mut flows = Flows::default();
        for qp in 0..u32::try_from(FLOWS_MAX).unwrap() + 10 {
            let body = request(RequestOp::Send(Place::Only, SendTail::None), b"x");
            flows.on_packet(FlowKey { qp, ..key() }, 20, false, &packet(1, body));
        }
        assert_eq!(flows.counts().count(), FLOWS_MAX);
        assert_eq!(flows.overflow(), 10);
    }
}
