//! A peer that sends whatever it likes, shaped like the messages of exchanges that are under way.

use uroce_cm::agent::{AcceptParams, CmEvent, ConnectParams, MadAddress, ServiceAnswer};
use uroce_cm::wire::{AprStatus, Mad, MadKind, RejReason, SidrStatus, TransactionId};
use uroce_cm::{Agent, CommId};

use crate::pair::{A, B, Pair, SERVICE, accept_params, at, connect_params, gid, ms, qpn};

/// One step: which kind of message, from whom, which bytes it is filled with, which known values are put into it; what the
/// consumer does after it; how long nothing happens then.
type Step = (u8, u8, [u8; 16], u8, u8, u16);

/// What the peer has heard of: ids and transactions of the agent's own messages.
#[derive(Default)]
struct Heard {
    /// Of each message: our communication or request id, the peer's, the transaction.
    exchanges: Vec<([u8; 4], [u8; 4], TransactionId)>,
    comms: Vec<CommId>,
    pending: Vec<CmEvent>,
}

impl Heard {
    fn listen(&mut self, agent: &mut Agent) {
        while let Some(mad) = agent.poll_mad() {
            let parsed = Mad::parse(&mad.bytes).unwrap();
            let id = |at: usize| mad.bytes[at..at + 4].try_into().unwrap();
            let theirs = if parsed.message.kind() == MadKind::Req { [0, 0, 0, 1] } else { id(28) };
            self.exchanges.push((id(24), theirs, parsed.header.transaction_id));
            if self.exchanges.len() > 16 {
                self.exchanges.remove(0);
            }
        }
        while let Some(event) = agent.poll_event() {
            match &event {
                CmEvent::ConnectRequest(r) => self.comms.push(r.comm),
                CmEvent::Reply(r) => self.comms.push(r.comm),
                _ => {}
            }
            self.pending.push(event);
        }
    }
}

fn pick<T: Copy>(from: &[T], n: u8) -> Option<T> {
    from.get(usize::from(n) % from.len().max(1)).copied()
}

fn shape(step: &Step, heard: &Heard) -> [u8; 256] {
    let (kind, _, fill, known, ..) = *step;
    let kind = pick(&MadKind::ALL, kind & 0x0f).unwrap();
    let mut mad = [0; 256];
    for (i, byte) in mad.iter_mut().enumerate() {
        *byte = fill[i % 16] & fill[(i / 16) % 16];
    }
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[16..18].copy_from_slice(&kind.attribute().to_be_bytes());
    // The peer's id is one of four; ours is one that it has heard; or all is as in one exchange, mostly the latest.
    if known & 2 != 0 {
        mad[24..28].copy_from_slice(&[0, 0, 0, 1 + (fill[1] & 3)]);
    }
    let latest = heard.exchanges.last().copied().filter(|_| known & 0x20 != 0);
    if let Some((ours, theirs, transaction)) = latest.or_else(|| pick(&heard.exchanges, fill[2])) {
        let at = if matches!(kind, MadKind::SidrRep) { 24 } else { 28 };
        if known & 0x10 != 0 && !matches!(kind, MadKind::Req | MadKind::SidrReq) {
            mad[24..28].copy_from_slice(&theirs);
        }
        if known & 0x14 != 0 {
            mad[at..at + 4].copy_from_slice(&ours);
        }
        if known & 0x11 != 0 {
            mad[8..16].copy_from_slice(&transaction.get().to_be_bytes());
        }
    }
    if known & 8 != 0 {
        match kind {
            MadKind::Req => good_req(&mut mad, fill),
            MadKind::SidrReq => {
                mad[28..30].copy_from_slice(&[0xff, 0xff]);
                mad[32..40].copy_from_slice(&SERVICE.get().to_be_bytes());
            }
            // The QPs that the agent connects with.
            MadKind::Dreq => mad[32..35].copy_from_slice(&[0, 0, 0x40 + (fill[3] & 7)]),
            MadKind::Lap => {
                mad[36..39].copy_from_slice(&[0, 0, 0x40 + (fill[3] & 7)]);
                mad[48..64].copy_from_slice(&gid(A).to_bytes());
                mad[64..80].copy_from_slice(&gid(B).to_bytes());
                mad[84] = 64;
            }
            MadKind::Apr => mad[33] = fill[3] & 3,
            MadKind::SidrRep => {
                mad[28] = fill[3] & 7;
                mad[32..35].copy_from_slice(&[0, 1, 0]);
                mad[36..44].copy_from_slice(&SERVICE.get().to_be_bytes());
            }
            MadKind::Rej => mad[34..36].copy_from_slice(&[0, fill[3] % 36]),
            MadKind::Rep => {
                mad[36..39].copy_from_slice(&[0, 1, fill[3] & 7]);
                mad[48..50].copy_from_slice(&[4, 4]);
            }
            _ => {}
        }
    }
    mad
}

/// The fields that a REQ needs to be let in.
fn good_req(mad: &mut [u8; 256], fill: [u8; 16]) {
    let body = &mut mad[24..];
    body[8..16].copy_from_slice(&SERVICE.get().to_be_bytes());
    // A GUID below ours, or above.
    body[16..24].fill(if fill[4] & 1 == 0 { 0 } else { 0xff });
    body[32..35].copy_from_slice(&[0, 1, fill[3] & 7]);
    body[43] &= !6;
    body[48..50].copy_from_slice(&[0xff, 0xff]);
    body[50] = 0x30;
    body[56..72].copy_from_slice(&gid(A).to_bytes());
    body[72..88].copy_from_slice(&gid(B).to_bytes());
    body[93] = 64;
    if fill[5] & 1 == 0 {
        body[96..140].fill(0);
    }
}

/// What the consumer does with what it was told, or by itself.
fn act(pair: &mut Pair, heard: &mut Heard, action: u8) {
    let now = pair.now;
    let agent = &mut pair.agents[B];
    let local_qpn = qpn(0x40 + u32::from(action >> 5));
    // Whatever it does may be too late, or not fit: then it is refused, and nothing changes.
    match action & 15 {
        0..=6 => {
            let Some(event) = heard.pending.pop() else { return };
            let refuse = action & 0x10 != 0;
            let _ = match event {
                CmEvent::ConnectRequest(r) if refuse => agent.reject(r.comm, RejReason::ConsumerDefined, b"", b""),
                CmEvent::ConnectRequest(r) => {
                    agent.accept(now, r.comm, &AcceptParams { local_qpn, ..accept_params() }).map(|_| ())
                }
                CmEvent::Reply(r) if refuse => agent.reject(r.comm, RejReason::NoQp, b"", b""),
                CmEvent::Reply(r) => agent.confirm(r.comm, b""),
                CmEvent::DisconnectRequested { comm, .. } => agent.disconnect(now, comm, b""),
                CmEvent::PathOffered(o) => agent.answer_alternate(o.comm, AprStatus::Success, b"", b""),
                CmEvent::ServiceRequest(r) => {
                    agent.answer_service(now, r.sidr, &ServiceAnswer::refusal(SidrStatus::Success))
                }
                _ => Ok(()),
            };
        }
        7 | 8 => {
            let params = ConnectParams { local_qpn, peer_to_peer: action & 0x10 != 0, ..connect_params(B) };
            if let Ok(comm) = agent.connect(now, &params) {
                heard.comms.push(comm);
            }
        }
        9 => {
            let to = MadAddress { local: gid(B), remote: gid(A) };
            let params = uroce_cm::agent::ResolveParams { to, service_id: SERVICE, private_data: b"" };
            let _ = agent.resolve_service(now, &params);
        }
        10 => {
            let path = uroce_cm::comm::Path { flow_label: 5, ..uroce_cm::comm::Path::new(gid(B), gid(A)) };
            if let Some(comm) = pick(&heard.comms, action >> 4) {
                let _ = agent.offer_alternate(now, comm, &path, b"");
            }
        }
        11 | 12 => {
            if let Some(comm) = pick(&heard.comms, action >> 4) {
                let _ = agent.disconnect(now, comm, b"");
            }
        }
        13 => {
            if let Some(comm) = pick(&heard.comms, action >> 4) {
                agent.abandon(now, comm);
            }
        }
        14 => {
            if let Some(comm) = pick(&heard.comms, action >> 4) {
                let _ = agent.migrated(comm);
            }
        }
        _ => {}
    }
}

#[test]
fn fuzz_every_message_in_every_state() {
    bolero::check!().with_type::<Vec<Step>>().for_each(|script| {
        let mut pair = Pair::new();
        pair.listen(B);
        let mut heard = Heard::default();
        for step in script.iter().take(64) {
            let mad = shape(step, &heard);
            let remote = if step.1 & 7 == 0 { gid(9) } else { gid(A) };
            pair.agents[B].handle_mad(pair.now, MadAddress { local: gid(B), remote }, &mad);
            heard.listen(&mut pair.agents[B]);
            act(&mut pair, &mut heard, step.4);
            pair.now = pair.now + ms(u64::from(step.5 % 1024));
            pair.agents[B].handle_timeout(pair.now);
            heard.listen(&mut pair.agents[B]);
        }
        // The consumer lets go, the peer falls silent: nothing is left.
        let now = pair.now;
        let agent = &mut pair.agents[B];
        for comm in &heard.comms {
            agent.abandon(now, *comm);
        }
        while let Some(due) = agent.poll_timeout().filter(|due| *due <= at(100_000_000)) {
            agent.handle_timeout(due);
            heard.pending.clear();
            heard.listen(agent);
        }
        let left = (agent.communications(), agent.half_open(), agent.in_timewait(), agent.service_exchanges());
        assert_eq!((left, agent.poll_timeout()), ((0, 0, 0, 0), None));
    });
}
