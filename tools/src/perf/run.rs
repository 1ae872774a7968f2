//! The loops that move messages: many under way, one there and back, and a few whose content is looked at.
//!
//! Owns how work requests are posted and what a completion stands for. Never prints.

use std::time::{Duration, Instant};

use uroce::types::Imm;
use uroce::verbs::{Operation as Verb, Payload, SendFlags, SendWr};

use super::args::{ATOMIC, Atomic, LATENCY_QUEUE, Operation, POST_LIST_MAX, Wait};
use super::content;
use super::side::{Heard, PATIENCE, Plan, Side};
use super::wire::Control;
use crate::exit::Failure;
use crate::node::Handle;
use crate::stats::Mark;

/// A completion every this many messages of a ping-pong: the answer says that a message arrived.
const BOUNCES_A_COMPLETION: u64 = (LATENCY_QUEUE / 2) as u64;
/// Messages a QP that [`Side::blast`] moves for each content that is checked.
pub(super) const CHECKED_MESSAGES: u64 = 4;

impl Plan {
    fn verb(&self, side: &Side, index: usize) -> Verb {
        let remote = side.peers[index];
        match (self.operation, self.atomic) {
            (Operation::Send, _) => Verb::Send,
            (Operation::Write, _) if self.announced => Verb::WriteImm(remote, Imm::new(0)),
            (Operation::Write, _) => Verb::Write(remote),
            (Operation::Read, _) => Verb::Read(remote),
            (Operation::Atomic, Atomic::FetchAndAdd) => Verb::FetchAdd { remote, add: 1 },
            (Operation::Atomic, Atomic::CmpAndSwap) => Verb::CompareSwap { remote, compare: 0, swap: 0 },
        }
    }

    /// Whether the peer finds out about a message by looking at memory.
    fn is_watched(&self) -> bool {
        self.operation == Operation::Write && !self.announced
    }
}

impl Side {
    /// Posts a message on QP `index` for each of `covers`; with `Some` it makes a completion that stands for so many.
    fn post(&mut self, v: &mut Handle, plan: &Plan, index: usize, covers: &[Option<u64>]) -> Result<(), Failure> {
        let len = if plan.operation == Operation::Atomic { ATOMIC as usize } else { plan.size };
        let sge = [self.buffer.sge(0, len)];
        let inline = !plan.operation.is_one_sided_fetch() && len <= plan.inline;
        let bytes = if inline { self.buffer.read(0, len)? } else { Vec::new() };
        let wr = SendWr {
            wr_id: (index as u64) << 32,
            operation: plan.verb(self, index),
            payload: if inline { Payload::Inline(&bytes) } else { Payload::Sges(&sge) },
            flags: SendFlags::default(),
            destination: None,
        };
        let with = |covers: Option<u64>| SendWr {
            wr_id: wr.wr_id | covers.unwrap_or(0),
            flags: SendFlags { signaled: covers.is_some(), ..wr.flags },
            ..wr
        };
        let qp = self.qps[index];
        if let [one] = covers {
            return Ok(v.post_send(qp, &[with(*one)])?);
        }
        let mut list = [wr; POST_LIST_MAX as usize];
        for (slot, covers) in list.iter_mut().zip(covers) {
            *slot = with(*covers);
        }
        Ok(v.post_send(qp, &list[..covers.len().min(POST_LIST_MAX as usize)])?)
    }

    /// Keeps all QPs full until every message has completed. Returns when how many had.
    pub(super) fn blast(&mut self, v: &mut Handle, plan: &Plan) -> Result<Vec<Mark>, Failure> {
        let begin = Instant::now();
        let mut flights = vec![Flight::default(); self.qps.len()];
        let mut marks = Vec::new();
        let mut done = 0;
        let mut last = Instant::now();
        let mut list = Vec::with_capacity(plan.list);
        loop {
            let over = plan.duration.is_some_and(|d| begin.elapsed() >= d);
            let mut idle = true;
            for (index, flight) in flights.iter_mut().enumerate() {
                loop {
                    list.clear();
                    while list.len() < plan.list && flight.may_post(plan, over) {
                        list.push(flight.next(plan));
                    }
                    if list.is_empty() {
                        break;
                    }
                    self.post(v, plan, index, &list)?;
                }
                idle &= flight.posted == flight.completed;
            }
            if idle {
                return Ok(marks);
            }
            match self.hear(v)? {
                Heard::Sent(index, covers) => {
                    flights[index].completed += covers;
                    done += covers;
                    last = Instant::now();
                    let mark = Mark { messages: done, at: begin.elapsed() };
                    // A run for a time has no peak, so its marks need not be kept.
                    if plan.duration.is_some() {
                        marks.clear();
                    }
                    marks.push(mark);
                }
                Heard::Control(control) => self.left = Some(control),
                Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                Heard::Nothing if last.elapsed() > PATIENCE => {
                    return Err(Failure::failed("nothing completes any more"));
                }
                Heard::Nothing | Heard::Message => {}
            }
        }
    }

    /// One message at a time, each there and back. Calls `record` with each round trip.
    pub(super) fn bounce(
        &mut self,
        v: &mut Handle,
        plan: &Plan,
        mut record: impl FnMut(Duration),
    ) -> Result<(), Failure> {
        self.watch_awake(plan);
        let fetches = plan.operation.is_one_sided_fetch();
        let begin = Instant::now();
        let (mut number, mut under_way) = (0u64, 0u64);
        let mut start = begin;
        while plan.duration.map_or(number < plan.messages, |d| start - begin < d) {
            let turn = turn(number);
            if plan.is_watched() {
                self.buffer.write(plan.size - 1, &[turn])?;
            }
            number += 1;
            under_way += 1;
            let covers = (fetches || under_way >= BOUNCES_A_COMPLETION).then(|| core::mem::take(&mut under_way));
            let mut silence = Silence::new(self.wait);
            start = Instant::now();
            self.post(v, plan, 0, &[covers])?;
            let mut back = false;
            while !back {
                match self.hear(v)? {
                    Heard::Sent(..) => back = fetches,
                    Heard::Message => back = true,
                    Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                    Heard::Nothing if silence.is_too_long() => {
                        return Err(Failure::failed("the peer does not send back"));
                    }
                    Heard::Nothing | Heard::Control(_) => {}
                }
                back |= plan.is_watched() && self.landed(plan.size)? == turn;
            }
            record(start.elapsed());
        }
        Ok(())
    }

    /// A side that finds messages by looking at memory does not sleep.
    pub(super) fn watch_awake(&mut self, plan: &Plan) {
        if plan.is_watched() {
            self.wait = Wait::Spin;
        }
    }

    /// Sends everything back until a control message comes.
    pub(super) fn echo(&mut self, v: &mut Handle, plan: &Plan) -> Result<Control, Failure> {
        let (mut number, mut under_way) = (0, 0);
        let mut silence = Silence::new(self.wait);
        loop {
            let mut came = false;
            match self.hear(v)? {
                Heard::Control(control) => return Ok(control),
                Heard::Message => came = true,
                Heard::Over => return Err(Failure::failed("the client has disconnected")),
                Heard::Nothing if silence.is_too_long() => return Err(Failure::failed("the client fell silent")),
                Heard::Nothing | Heard::Sent(..) => {}
            }
            if plan.is_watched() && self.landed(plan.size)? == turn(number) {
                self.buffer.write(plan.size - 1, &[turn(number)])?;
                came = true;
            }
            if came {
                silence = Silence::new(self.wait);
                number += 1;
                under_way += 1;
                let covers = (under_way >= BOUNCES_A_COMPLETION).then(|| core::mem::take(&mut under_way));
                self.post(v, plan, 0, &[covers])?;
            }
        }
    }

    /// Lays out memory for the messages of `plan`: what this side sends holds the content, and what arrives overwrites
    /// zeroes, so that neither a WRITE that a ping-pong waits for nor the content is there before it came.
    pub(super) fn lay_out(&self, plan: &Plan) -> Result<(), Failure> {
        let (source, landing) = (0, self.landing);
        if plan.seed == 0 {
            return self.buffer.write(landing + plan.size - 1, &[0]);
        }
        // READs take from where WRITEs land, and put where WRITEs are taken from.
        let (full, empty) = if plan.operation == Operation::Read { (landing, source) } else { (source, landing) };
        content::fill(&self.buffer, full, plan.size, plan.seed)?;
        content::fill(&self.buffer, empty, plan.size, 0)
    }

    /// Where what arrived differs from the content of `plan`.
    pub(super) fn difference(&self, plan: &Plan) -> Result<Option<u64>, Failure> {
        if plan.seed == 0 {
            return Ok(None);
        }
        let place = if plan.operation == Operation::Read { 0 } else { self.landing };
        // The last byte of a WRITE that a ping-pong watches counts its turns.
        let counted = usize::from(plan.is_ping_pong && plan.is_watched());
        content::difference(&self.buffer, place, plan.size - counted, plan.seed)
    }
}

/// How long nothing has come. The clock is read when there is time for it: by one who spins, after many looks.
struct Silence {
    looks: u32,
    spins: bool,
    since: Option<Instant>,
}

impl Silence {
    /// Looks of one who spins before the clock is read.
    const LOOKS: u32 = 1024;

    /// It begins.
    fn new(wait: Wait) -> Self {
        Self { looks: 0, spins: wait == Wait::Spin, since: None }
    }

    /// One more look found nothing.
    fn is_too_long(&mut self) -> bool {
        self.looks = (self.looks + 1) % Self::LOOKS;
        if self.spins && self.looks > 0 {
            return false;
        }
        self.since.get_or_insert_with(Instant::now).elapsed() > PATIENCE
    }
}

/// A byte that differs from that of the message before, and from an unwritten 0.
fn turn(number: u64) -> u8 {
    u8::try_from(number % 255).unwrap_or(0) + 1
}

/// Messages of one QP.
#[derive(Clone, Default)]
struct Flight {
    posted: u64,
    completed: u64,
    unsignaled: u64,
}

impl Flight {
    fn may_post(&self, plan: &Plan, over: bool) -> bool {
        let room = self.posted - self.completed < u64::from(plan.depth);
        let wanted = match plan.duration {
            // The last messages need a completion of their own.
            Some(_) => !over || self.unsignaled > 0,
            None => self.posted < plan.messages,
        };
        room && wanted
    }

    /// Counts one more; `Some` when it shall complete, with how many it stands for.
    fn next(&mut self, plan: &Plan) -> Option<u64> {
        self.posted += 1;
        self.unsignaled += 1;
        let last = plan.duration.is_none() && self.posted == plan.messages;
        if last || self.unsignaled >= u64::from(plan.moderation) {
            return Some(core::mem::take(&mut self.unsignaled));
        }
        None
    }
}
