//! A pair in a situation, a packet fed to it, and what came of it.

use uroce::burst::{RxBurst, RxIds};
use uroce::counters::Counters;
use uroce::raw::Region;
use uroce::time::Duration;
use uroce::types::{Lkey, PathMtu, Rkey, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, FastRegister, InitAttr, MwBind, MwType, Operation, QpAttr, QpCapabilities, QpHandle,
    QpInfo, QpInit, QpState, QpTransition, QpType, RecvWr, RtrAttr, Sge, Verbs, WcStatus, WorkCompletion,
};
use uroce::wire::{Body, DONT_FRAGMENT, IpFields, Packet, ResponseOp};
use uroce_tests::pair::{Fate, Node, Options, Pair, Side};

use super::shot::{FILL, Key, Psn, Shot};
use super::{Case, Situation, Verdict, Waiting};

/// Bytes of each side's region.
pub(super) const REGION: usize = 8192;

/// A packet that the endpoint sent: opcode, PSN, syndrome where it has one.
type Sent = (u8, u32, Option<u8>);

/// What a peer may do, on the QP and the region.
const ALLOWED: AccessFlags = match AccessFlags::from_bits(0x11F) {
    Some(flags) => flags,
    None => panic!("local write, the four rights of old, windows and FLUSH for visibility"),
};

pub(super) struct World {
    pair: Pair,
    qp: QpType,
    situation: Situation,
    /// The first PSN of A.
    start: u32,
    /// Opcode and payload of the Last that the message in progress needs.
    open: Option<(u8, usize)>,
}

impl World {
    pub(super) fn new(qp: QpType, situation: Situation, start: u32) -> Self {
        let rd_atomic = match situation {
            Situation::NoDepth => 0,
            Situation::DepthUsed | Situation::Forgotten(_) => 1,
            _ => 16,
        };
        let options = Options {
            qp_type: qp,
            mtu: PathMtu::B256,
            psn_a: start,
            region: REGION,
            cq_depth: 64,
            rd_atomic,
            access: ALLOWED,
            ..Options::default()
        };
        let mut world = Self { pair: Pair::new(&options), qp, situation, start, open: None };
        world.prepare();
        world
    }

    fn prepare(&mut self) {
        let class = if self.qp == QpType::Uc { 0x20 } else { 0 };
        match self.situation {
            Situation::NoReceive | Situation::InWrite(_, true) => {}
            Situation::NakOut(true) => {}
            Situation::SmallReceive => self.pair.b.recv(1, 0, 300),
            Situation::BadReceive => self.post_bad_receive(),
            _ => self.post_receives(),
        }
        match self.situation {
            Situation::InSend => self.feed(Shot::new(class)),
            Situation::SmallReceive if self.qp != QpType::Ud => self.feed(Shot::new(class)),
            Situation::InWrite(length, _) => {
                self.feed(Shot { length: Some(length), ..Shot::new(class | 6) });
                self.open = Some((class | 8, (length - 256) as usize));
            }
            Situation::NakOut(false) => self.feed(Shot { psn: Psn::Awaited(5), ..Shot::new(0x0A) }),
            Situation::NakOut(true) => self.feed(Shot::new(0x04)),
            Situation::After(0x0C) => {
                self.feed(Shot::new(0x0A));
                self.feed(Shot::new(0x0C));
            }
            Situation::After(opcode) => self.feed(Shot::new(opcode)),
            Situation::AfterLongRead => {
                self.feed(Shot::new(0x0A));
                self.feed(Shot { length: Some(600), ..Shot::new(0x0C) });
            }
            Situation::Forgotten(opcode) => {
                self.feed(Shot::new(opcode));
                self.feed(Shot::new(0x0C));
            }
            Situation::DepthUsed => self.deliver(Side::B, &Shot::new(0x0C)),
            Situation::Rights(bits) => {
                let access = AccessFlags::from_bits(bits);
                let attr = QpAttr { access, ..QpAttr::to_state(QpState::Rts) };
                self.pair.b.endpoint.modify_qp(self.pair.b.qp, attr).expect("modify");
            }
            Situation::Wait(waiting) => self.wait(waiting),
            Situation::InState(state) => self.enter(state),
            Situation::Idle | Situation::NoReceive | Situation::SmallReceive | Situation::BadReceive => {}
            Situation::NoDepth => {}
        }
        if self.situation == Situation::InSend {
            self.open = Some((class | 2, 4));
        }
        self.pair.a.completions();
        self.pair.b.completions();
    }

    fn post_receives(&mut self) {
        for wr_id in 0..2 {
            self.pair.b.recv(wr_id, 0, 6000);
        }
    }

    fn post_bad_receive(&mut self) {
        let b = &mut self.pair.b;
        let sges = [Sge { addr: b.mr.iova, length: 4096, lkey: Lkey::new(b.mr.lkey.get() ^ 0x100) }];
        b.endpoint.post_recv(b.qp, &[RecvWr { wr_id: 0, sges: &sges }]).expect("post_recv");
    }

    fn wait(&mut self, waiting: Waiting) {
        let there = self.pair.b.remote(0);
        let a = &mut self.pair.a;
        match waiting {
            Waiting::Write => a.send(1, Operation::Write(there), 0, 8),
            Waiting::Read => a.send(1, Operation::Read(there), 0, 600),
            Waiting::Atomic => a.send(1, Operation::FetchAdd { remote: there, add: 1 }, 0, 8),
            Waiting::ReadWrite => {
                a.send(1, Operation::Read(there), 0, 8);
                a.send(2, Operation::Write(there), 0, 8);
            }
        }
        // The responder executes them; its answers are lost, and the packet under test comes instead.
        for request in self.pair.take_sent(Side::A) {
            self.pair.deliver(Side::B, &request);
        }
        self.pair.take_sent(Side::B);
    }

    fn enter(&mut self, state: QpState) {
        let (peer, qp) = (self.pair.a.qpn, self.pair.b.qp);
        let rtr = RtrAttr {
            av: AddressVector::new("10.0.0.1".parse::<std::net::IpAddr>().unwrap().into(), 0),
            path_mtu: PathMtu::B256,
            dest_qpn: peer,
            rq_psn: uroce::types::Psn::from_wire(self.start),
            max_dest_rd_atomic: 16,
            min_rnr_timer: RnrTimer::DEFAULT,
        };
        let steps: &[QpTransition] = match state {
            QpState::Err => &[QpTransition::Err],
            QpState::Reset => &[QpTransition::Reset],
            QpState::Init => &[QpTransition::Reset, QpTransition::Init(InitAttr::connected(ALLOWED))],
            _ => &[QpTransition::Reset, QpTransition::Init(InitAttr::connected(ALLOWED)), QpTransition::Rtr(rtr)],
        };
        for step in steps {
            self.pair.b.endpoint.modify_qp(qp, (*step).into()).expect("modify");
        }
    }

    fn info(&mut self, side: Side) -> QpInfo {
        let node = self.pair.node(side);
        node.endpoint.query_qp(node.qp).expect("query")
    }

    fn psn(&mut self, side: Side, psn: Psn) -> u32 {
        let queues = self.info(side).queues;
        let (origin, offset) = match (psn, side) {
            (Psn::First(offset), _) => (self.start, offset),
            (Psn::Awaited(offset), Side::A) => (queues.unacked_psn.get(), offset),
            (Psn::Awaited(offset), Side::B) => (queues.rq_psn.get(), offset),
        };
        origin.wrapping_add_signed(offset) & 0xFF_FFFF
    }

    /// Address and key of what a packet names.
    fn place(&mut self, key: Key) -> (u64, u32) {
        let b = &mut self.pair.b;
        let (iova, rkey) = (b.mr.iova, b.mr.rkey.get());
        let register = |b: &mut uroce_tests::pair::Node, pd, access| {
            b.endpoint.register(pd, &b.region, access, None).expect("register")
        };
        match key {
            Key::Good => (iova, rkey),
            Key::Flipped(bit) => (iova, rkey ^ 1 << bit),
            Key::Raw(raw) => (iova, raw),
            Key::Rights(bits) => {
                let pd = b.pd;
                let mr = register(b, pd, AccessFlags::from_bits(bits).expect("rights"));
                (mr.iova, mr.rkey.get())
            }
            Key::OtherPd => {
                let pd = b.endpoint.alloc_pd().expect("pd");
                let mr = register(b, pd, AccessFlags::ALL);
                (mr.iova, mr.rkey.get())
            }
            Key::Gone => {
                let pd = b.pd;
                let mr = register(b, pd, AccessFlags::ALL);
                b.endpoint.deregister(mr.handle).expect("deregister");
                (mr.iova, mr.rkey.get())
            }
            Key::Invalidated => {
                let (iova, key) = fast_registration(b);
                let (pd, qp, rkey) = (b.pd, b.qp, Rkey::new(key));
                b.endpoint.memory_mut().invalidate(pd, qp, rkey).expect("a key that can be invalidated");
                (iova, key)
            }
            Key::Fast => fast_registration(b),
            Key::Window(bits) => {
                let qp = b.qp;
                (iova, window(b, qp, AccessFlags::from_bits(bits).expect("rights")))
            }
            Key::OtherQp => {
                let (qp_type, caps) = (QpType::Rc, QpCapabilities::default());
                let (pd, cq) = (b.pd, b.cq);
                let init =
                    QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None };
                let other = b.endpoint.create_qp(init).expect("create_qp");
                (iova, window(b, other, AccessFlags::ALL.intersection(REMOTE)))
            }
            Key::Unbound => {
                let mw = b.endpoint.alloc_mw(b.pd, MwType::Two).expect("alloc_mw");
                (iova, mw.rkey.get())
            }
        }
    }

    fn deliver(&mut self, to: Side, shot: &Shot) {
        let (base, key) = self.place(shot.key);
        self.deliver_at(to, shot, shot.addr.unwrap_or(base.wrapping_add_signed(shot.at)), key);
    }

    fn deliver_at(&mut self, to: Side, shot: &Shot, addr: u64, key: u32) {
        let psn = self.psn(to, shot.psn);
        let qpn = self.pair.node(to).qpn.get();
        let mut flow = self.pair.flow_from(to.other());
        flow.src = shot.src.unwrap_or(flow.src);
        flow.dst = shot.dst.unwrap_or(flow.dst);
        let bytes = shot.sealed(&flow, shot.unsealed(qpn, psn, addr, key));
        let (now, ids) = (self.pair.now, RxIds::Known(IpFields { id: 0, flags_fragment: DONT_FRAGMENT }));
        let burst = RxBurst { flow, bytes: &bytes, segment: bytes.len().max(1), ids, at: now };
        self.pair.node(to).endpoint.handle_burst(now, burst);
    }

    fn feed(&mut self, shot: Shot) {
        self.deliver(Side::B, &shot);
        self.pair.take_sent(Side::B);
    }

    fn sent(&mut self, side: Side) -> Vec<Sent> {
        let describe = |bytes: &Vec<u8>| {
            let packet = Packet::parse(bytes).expect("we send only what parses");
            let syndrome = match &packet.body {
                Body::Response(r) => match r.op {
                    ResponseOp::Acknowledge(aeth) => Some(aeth.syndrome.to_wire()),
                    _ => None,
                },
                _ => None,
            };
            (packet.opcode(), packet.psn.get(), syndrome)
        };
        self.pair.take_sent(side).iter().map(describe).collect()
    }

    fn counters(&mut self, side: Side) -> Counters {
        self.pair.node(side).endpoint.counters().clone()
    }

    /// Feeds the packet and holds the outcome against the verdict.
    pub(super) fn judge(&mut self, case: &Case) -> Result<(), String> {
        let to = case.to;
        let (base, key) = self.place(case.shot.key);
        let addr = case.shot.addr.unwrap_or(base.wrapping_add_signed(case.shot.at));
        let (psn, expected) = (self.psn(to, case.shot.psn), self.psn(to, Psn::Awaited(0)));
        // Other bytes than any packet carries, so that each write shows.
        self.pair.node(to).region.write(0, &[0xC5; REGION]).expect("the region");
        let (memory, state) = (self.pair.node(to).region.to_vec(), self.info(to).state);
        let before = self.counters(to);
        self.deliver_at(to, &case.shot, addr, key);
        let outcome = Outcome {
            sent: self.sent(to),
            done: self.pair.node(to).completions(),
            dropped: self.counters(to).dropped_in_all() - before.dropped_in_all(),
            written: self.pair.node(to).region.to_vec() != memory,
            state: (state, self.info(to).state),
        };
        if let Verdict::Drop(reason) = case.verdict
            && self.counters(to).dropped(reason) != before.dropped(reason) + 1
        {
            return Err(format!("{outcome:?}"));
        }
        // A repeat is answered and never executed.
        let kept = matches!(case.shot.psn, Psn::First(_))
            || matches!(case.shot.psn, Psn::Awaited(back) if back < 0) && case.qp == QpType::Rc;
        if !outcome.fits(case.verdict, psn, expected) || (kept && to == Side::B && outcome.written) {
            return Err(format!("{outcome:?}, written to: {}", outcome.written));
        }
        let ends = matches!(case.verdict, Verdict::Nak(..) | Verdict::AckThenErr | Verdict::Fails(_));
        if ends || matches!(case.situation, Situation::InState(_)) {
            return Ok(());
        }
        self.note_begun(case);
        self.still_works(to).map_err(|what| format!("then {what}"))
    }

    /// What the packet itself left unfinished.
    fn note_begun(&mut self, case: &Case) {
        match (case.qp, case.verdict) {
            (QpType::Rc, Verdict::Answer(0x11, 0)) if case.situation == Situation::Idle => match case.shot.opcode {
                0x00 => self.open = Some((0x02, 4)),
                0x06 => self.open = Some((0x08, 256)),
                _ => {}
            },
            _ => {}
        }
    }

    fn still_works(&mut self, to: Side) -> Result<(), String> {
        if to == Side::A {
            return self.requester_works();
        }
        if let (QpType::Rc, Some((opcode, payload))) = (self.qp, self.open) {
            self.feed(Shot::payload(opcode, payload));
        }
        match self.qp {
            QpType::Ud => return self.datagram_lands(),
            QpType::Uc if matches!(self.situation, Situation::Rights(_)) => {
                self.feed(Shot::new(0x24));
                return if self.pair.b.completions().iter().any(|c| c.status == WcStatus::Success) {
                    Ok(())
                } else {
                    Err("a good SEND does not land".into())
                };
            }
            _ => {}
        }
        let b = &mut self.pair.b;
        let mr = b.endpoint.register(b.pd, &b.region, AccessFlags::ALL, None).map_err(|e| e.to_string())?;
        b.region.write(4096, &[0; 4]).map_err(|e| format!("{e:?}"))?;
        let good = if self.qp == QpType::Uc { 0x2A } else { 0x0A };
        let psn = self.psn(Side::B, Psn::Awaited(0));
        self.deliver_at(Side::B, &Shot::new(good), mr.iova + 4096, mr.rkey.get());
        let sent = self.sent(Side::B);
        let want: &[Sent] = if self.qp == QpType::Uc { &[] } else { &[(0x11, psn, Some(0x1F))] };
        let landed = self.pair.b.region.to_vec()[4096..4100] == [FILL; 4];
        if sent == want && landed { Ok(()) } else { Err(format!("a good WRITE draws {sent:?}, landed: {landed}")) }
    }

    fn datagram_lands(&mut self) -> Result<(), String> {
        self.pair.b.completions();
        self.pair.b.recv(9, 0, 300);
        self.feed(Shot::new(0x64));
        let done = self.pair.b.completions();
        if done.iter().any(|c| c.status == WcStatus::Success) { Ok(()) } else { Err(format!("{done:?}")) }
    }

    /// What waits is done in the end, and so is a WRITE behind it.
    fn requester_works(&mut self) -> Result<(), String> {
        let there = self.pair.b.remote(4096);
        self.pair.a.send(3, Operation::Write(there), 4096, 8);
        self.pair.run_for(Duration::from_secs(30), |_, _| Fate::Deliver);
        let done: Vec<_> = self.pair.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
        let fine = done.iter().all(|(_, status)| *status == WcStatus::Success);
        if fine && done.last().is_some_and(|d| d.0 == 3) { Ok(()) } else { Err(format!("{done:?}")) }
    }
}

/// What a packet led to.
#[derive(Debug)]
struct Outcome {
    sent: Vec<Sent>,
    done: Vec<WorkCompletion>,
    dropped: u64,
    written: bool,
    state: (QpState, QpState),
}

impl Outcome {
    fn fits(&self, verdict: Verdict, psn: u32, expected: u32) -> bool {
        let quiet = self.sent.is_empty() && self.done.is_empty() && !self.written;
        let lives = self.state.0 == self.state.1;
        let dies = self.state.1 == QpState::Err;
        let none_dropped = self.dropped == 0;
        match verdict {
            Verdict::Drop(_) => self.dropped == 1 && quiet && lives,
            // Answers to READs that were executed before may stand in front of it.
            Verdict::Nak(syndrome, status) => {
                let answered = self.sent.iter().rev().skip(1).all(|s| s.0 == 0x10);
                self.sent.last() == Some(&(0x11, expected, Some(syndrome)))
                    && answered
                    && dies
                    && !self.written
                    && none_dropped
                    && ended(&self.done, status)
            }
            Verdict::SequenceNak => {
                self.sent == [(0x11, expected, Some(0x60))] && lives && none_dropped && !self.written
            }
            Verdict::Rnr => {
                let is_rnr = |s: &Sent| s.0 == 0x11 && s.1 == expected && s.2.is_some_and(|v| v >> 5 == 1);
                self.sent.len() == 1 && self.sent.iter().all(is_rnr) && lives && none_dropped && !self.written
            }
            Verdict::Answer(opcode, offset) => {
                let at = psn.wrapping_add_signed(offset) & 0xFF_FFFF;
                let first = self.sent.first().is_some_and(|s| s.0 == opcode && s.1 == at);
                let positive = self.sent.iter().all(|s| s.2.is_none_or(|v| v >> 5 == 0));
                first && positive && lives && none_dropped
            }
            Verdict::AckThenErr => {
                self.sent == [(0x11, psn, Some(0x1F))] && dies && ended(&self.done, WcStatus::RemoteInvalidRequest)
            }
            Verdict::Fails(status) => self.sent.is_empty() && dies && none_dropped && ended(&self.done, status),
            Verdict::Completes => self.done.len() == 1 && ended(&self.done, WcStatus::Success) && lives && none_dropped,
            Verdict::Silent => self.sent.is_empty() && self.done.is_empty() && lives && none_dropped,
            Verdict::Resends(opcode) => {
                self.sent.first().is_some_and(|s| s.0 == opcode) && self.done.is_empty() && lives && none_dropped
            }
            Verdict::Lands => self.sent.is_empty() && lives && none_dropped && self.written,
        }
    }
}

/// What windows can give.
const REMOTE: AccessFlags = match AccessFlags::from_bits(0x10E) {
    Some(flags) => flags,
    None => panic!("the rights of a peer"),
};

/// Address and key of a fast registration that is in force.
fn fast_registration(b: &mut Node) -> (u64, u32) {
    let region = Region::alloc(REGION).expect("memory");
    let mr = b.endpoint.alloc_fast_mr(b.pd, &region).expect("alloc_fast_mr");
    let (key, length, access) = (mr.rkey, REGION as u64, AccessFlags::ALL);
    let wr = FastRegister { mr: mr.handle, key, offset: 0, length, iova: 0x10_0000, access };
    b.endpoint.memory_mut().fast_register(b.pd, &wr).expect("fast_register");
    (wr.iova, key.get())
}

/// The key of a window over the whole region, bound on `qp`.
fn window(b: &mut Node, qp: QpHandle, access: AccessFlags) -> u32 {
    let mw = b.endpoint.alloc_mw(b.pd, MwType::Two).expect("alloc_mw");
    let (rkey, mr, addr, length) = (mw.rkey, Some(b.mr.handle), b.mr.iova, REGION as u64);
    let bind = MwBind { mw: mw.handle, rkey, mr, addr, length, access };
    b.endpoint.memory_mut().bind(b.pd, qp, &bind).expect("bind");
    rkey.get()
}

/// The first work request ended with `status`, and every other one was flushed.
fn ended(done: &[WorkCompletion], status: WcStatus) -> bool {
    let flushed = WcStatus::WorkRequestFlushed;
    match done.split_first() {
        Some((first, rest)) => first.status == status && rest.iter().all(|c| c.status == flushed),
        None => status == flushed,
    }
}
