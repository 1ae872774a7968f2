//! One side of a test: its QPs, memory and the loops that move messages.
//!
//! Owns posting and completion. Never prints.

use std::time::{Duration, Instant};

use uroce::verbs::{
    AccessFlags, CqHandle, Operation as Verb, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, RecvWr,
    Remote, SendFlags, SendWr, WcData, WcOpcode, WcStatus, WorkCompletion,
};

use super::args::{ATOMIC, Atomic, Operation};
use super::wire::{CONTROL_MAX, Control};
use crate::exit::Failure;
use crate::node::Handle;
use crate::rdma::{self, Buffer, Poller};
use crate::stats::Mark;
use crate::stop;

/// How long nothing may complete.
const PATIENCE: Duration = Duration::from_secs(20);
/// Work request of a control message.
const CONTROL_WR: u64 = u64::MAX;
/// Receives of a QP whose test needs none: for control messages.
const FEW_RECEIVES: u32 = 8;
/// Greatest sum of buffers: what a peer asks for is not taken unseen.
pub(super) const SIZE_MAX: u64 = 1 << 30;

/// How a test posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub operation: Operation,
    pub atomic: Atomic,
    pub size: usize,
    /// Messages a QP; with a duration, however many fit.
    pub messages: u64,
    pub duration: Option<Duration>,
    pub depth: u32,
    pub moderation: u32,
    pub inline: usize,
}

/// What a poll brought.
pub(super) enum Heard {
    Nothing,
    Control(Control),
    /// A test message was received.
    Message,
    /// Sends of this QP completed, so many.
    Sent(usize, u64),
    /// The peer has disconnected.
    Over,
}

/// One side.
pub(super) struct Side {
    pub qps: Vec<QpHandle>,
    pub peers: Vec<Remote>,
    poller: Poller,
    buffer: Buffer,
    control: Buffer,
    /// Where receives and the peer's WRITEs land.
    landing: usize,
    room: usize,
    /// A control message that came while messages were under way.
    left: Option<Control>,
}

impl Side {
    /// Makes `qps` QPs, not connected. Buffers hold messages of `size_max`.
    pub(super) fn new(
        v: &mut Handle,
        operation: Operation,
        qps: u8,
        depth: u32,
        rx_depth: u32,
        inline: u32,
        size_max: u64,
    ) -> Result<Self, Failure> {
        if size_max > SIZE_MAX {
            return Err(Failure::Usage(format!("messages of more than {SIZE_MAX} bytes are not measured")));
        }
        // Atomics need the landing place on a multiple of 8.
        let room = usize::try_from(size_max).unwrap_or(0).max(CONTROL_MAX).next_multiple_of(64);
        let pd = v.alloc_pd()?;
        let buffer = Buffer::new(v, pd, 2 * room, AccessFlags::ALL)?;
        let control = Buffer::new(v, pd, CONTROL_MAX, AccessFlags::LOCAL_WRITE)?;
        let receives = if operation == Operation::Send { rx_depth } else { FEW_RECEIVES };
        let count = usize::from(qps.max(1));
        let entries = (depth + 2 + receives) * u32::from(qps.max(1));
        let cq = v.create_cq(entries)?;
        let caps = QpCapabilities {
            max_send_wr: depth + 2,
            max_recv_wr: receives,
            max_inline: inline.max(64),
            ..QpCapabilities::default()
        };
        let made: Result<Vec<_>, _> = (0..count).map(|_| v.create_qp(init(pd, cq, caps))).collect();
        let qps = made?;
        let first = qps.first().copied().ok_or_else(|| Failure::failed("no QP"))?;
        let poller = Poller::new(cq, first);
        Ok(Self {
            qps,
            peers: vec![Remote::default(); count],
            poller,
            buffer,
            control,
            landing: room,
            room,
            left: None,
        })
    }

    /// Where the peer may WRITE, READ and count.
    pub(super) fn memory(&self) -> Remote {
        self.buffer.remote(self.landing)
    }

    /// Posts the receives of a QP that is in INIT.
    pub(super) fn post_receives(&self, v: &mut Handle, index: usize, receives: u32) -> Result<(), Failure> {
        for _ in 0..receives {
            self.post_receive(v, index)?;
        }
        Ok(())
    }

    /// Receives that each QP has.
    pub(super) fn receives(operation: Operation, rx_depth: u32) -> u32 {
        if operation == Operation::Send { rx_depth } else { FEW_RECEIVES }
    }

    fn post_receive(&self, v: &mut Handle, index: usize) -> Result<(), Failure> {
        let sge = [self.buffer.sge(self.landing, self.room)];
        let qp = self.qps[index];
        Ok(v.post_recv(qp, &[RecvWr { wr_id: index as u64, sges: &sge }])?)
    }

    /// Takes one completion if there is one.
    pub(super) fn hear(&mut self, v: &mut Handle) -> Result<Heard, Failure> {
        match self.poller.poll(v)? {
            Some(wc) => self.sort(v, &wc),
            None => stop::check().map(|()| Heard::Nothing),
        }
    }

    /// What came during a test and was left for now, or else the next completion within `patience`.
    pub(super) fn next(&mut self, v: &mut Handle, patience: Duration) -> Result<Heard, Failure> {
        match self.left.take() {
            Some(control) => Ok(Heard::Control(control)),
            None => self.wait(v, patience),
        }
    }

    fn wait(&mut self, v: &mut Handle, patience: Duration) -> Result<Heard, Failure> {
        match self.poller.wait(v, patience)? {
            Some(wc) => self.sort(v, &wc),
            None => Ok(Heard::Nothing),
        }
    }

    fn sort(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<Heard, Failure> {
        if wc.status == WcStatus::WorkRequestFlushed {
            return Ok(Heard::Over);
        }
        let wc = rdma::succeeded(v, wc, "a message of the test")?;
        if wc.opcode != WcOpcode::Recv {
            if wc.wr_id == CONTROL_WR {
                return Ok(Heard::Nothing);
            }
            let index = usize::try_from(wc.wr_id >> 32).unwrap_or(0);
            return Ok(Heard::Sent(index, wc.wr_id & 0xffff_ffff));
        }
        let index = usize::try_from(wc.wr_id).unwrap_or(0);
        let heard = match wc.data {
            WcData::Imm(imm) => {
                let len = usize::try_from(wc.byte_len).unwrap_or(0).min(CONTROL_MAX);
                let bytes = self.buffer.read(self.landing, len)?;
                Control::from_message(imm, &bytes).map_or(Heard::Nothing, Heard::Control)
            }
            _ => Heard::Message,
        };
        self.post_receive(v, index)?;
        Ok(heard)
    }

    /// Sends a control message.
    pub(super) fn tell(&mut self, v: &mut Handle, control: &Control) -> Result<(), Failure> {
        let (imm, bytes) = control.to_message();
        self.control.write(0, &bytes)?;
        let sge = [self.control.sge(0, bytes.len())];
        let wr = SendWr {
            wr_id: CONTROL_WR,
            operation: Verb::SendImm(imm),
            payload: Payload::Sges(&sge),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        Ok(v.post_send(self.qps[0], &[wr])?)
    }

    /// Waits until the peer says go on.
    pub(super) fn expect_ready(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            match self.next(v, PATIENCE)? {
                Heard::Control(Control::Ready) => return Ok(()),
                Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                _ if begin.elapsed() > PATIENCE => return Err(Failure::failed("the peer fell silent")),
                _ => {}
            }
        }
    }

    /// Makes the last byte of a message of `size` bytes one that no WRITE of a latency test writes.
    pub(super) fn clear(&mut self, size: usize) -> Result<(), Failure> {
        self.buffer.write(self.landing + size - 1, &[0])
    }

    /// Posts one message on QP `index`; with `covers` messages it makes a completion that stands for so many.
    pub(super) fn post(
        &mut self,
        v: &mut Handle,
        plan: &Plan,
        index: usize,
        covers: Option<u64>,
    ) -> Result<(), Failure> {
        let remote = self.peers[index];
        let operation = match (plan.operation, plan.atomic) {
            (Operation::Send, _) => Verb::Send,
            (Operation::Write, _) => Verb::Write(remote),
            (Operation::Read, _) => Verb::Read(remote),
            (Operation::Atomic, Atomic::FetchAndAdd) => Verb::FetchAdd { remote, add: 1 },
            (Operation::Atomic, Atomic::CmpAndSwap) => Verb::CompareSwap { remote, compare: 0, swap: 0 },
        };
        let len = if plan.operation == Operation::Atomic { ATOMIC as usize } else { plan.size };
        let sge = [self.buffer.sge(0, len)];
        let inline = !plan.operation.is_one_sided_fetch() && len <= plan.inline;
        let bytes = if inline { self.buffer.read(0, len)? } else { Vec::new() };
        let wr = SendWr {
            wr_id: (index as u64) << 32 | covers.unwrap_or(0),
            operation,
            payload: if inline { Payload::Inline(&bytes) } else { Payload::Sges(&sge) },
            flags: SendFlags { signaled: covers.is_some(), ..SendFlags::default() },
            destination: None,
        };
        Ok(v.post_send(self.qps[index], &[wr])?)
    }

    /// Keeps all QPs full until every message has completed. Returns when how many had.
    pub(super) fn blast(&mut self, v: &mut Handle, plan: &Plan) -> Result<Vec<Mark>, Failure> {
        let begin = Instant::now();
        let count = self.qps.len();
        let mut flights = vec![Flight::default(); count];
        let mut marks = Vec::new();
        let mut done = 0;
        let mut last = Instant::now();
        loop {
            let over = plan.duration.is_some_and(|d| begin.elapsed() >= d);
            let mut idle = true;
            for (index, flight) in flights.iter_mut().enumerate() {
                while flight.may_post(plan, over) {
                    let covers = flight.next(plan);
                    self.post(v, plan, index, covers)?;
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
        let begin = Instant::now();
        let mut number = 0u64;
        while plan.duration.map_or(number < plan.messages, |d| begin.elapsed() < d) {
            let turn = turn(number);
            if plan.operation == Operation::Write {
                self.buffer.write(plan.size - 1, &[turn])?;
            }
            let start = Instant::now();
            self.post(v, plan, 0, Some(1))?;
            let (mut sent, mut back) = (false, plan.operation.is_one_sided_fetch());
            while !sent || !back {
                match self.hear(v)? {
                    Heard::Sent(..) => sent = true,
                    Heard::Message => back = true,
                    Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                    Heard::Nothing if start.elapsed() > PATIENCE => {
                        return Err(Failure::failed("the peer does not send back"));
                    }
                    Heard::Nothing | Heard::Control(_) => {}
                }
                back |= plan.operation == Operation::Write && self.landed(plan.size)? == turn;
            }
            record(start.elapsed());
            number += 1;
        }
        Ok(())
    }

    /// Sends everything back until a control message comes.
    pub(super) fn echo(&mut self, v: &mut Handle, plan: &Plan) -> Result<Control, Failure> {
        let mut number = 0;
        let mut last = Instant::now();
        loop {
            match self.hear(v)? {
                Heard::Control(control) => return Ok(control),
                Heard::Message => self.post(v, plan, 0, Some(1))?,
                Heard::Over => return Err(Failure::failed("the client has disconnected")),
                Heard::Nothing if last.elapsed() > PATIENCE => return Err(Failure::failed("the client fell silent")),
                Heard::Nothing => {}
                Heard::Sent(..) => last = Instant::now(),
            }
            if plan.operation == Operation::Write && self.landed(plan.size)? == turn(number) {
                self.buffer.write(plan.size - 1, &[turn(number)])?;
                self.post(v, plan, 0, Some(1))?;
                number += 1;
                last = Instant::now();
            }
        }
    }

    /// The last byte that the peer's WRITE of `size` bytes changes.
    fn landed(&self, size: usize) -> Result<u8, Failure> {
        Ok(self.buffer.read(self.landing + size - 1, 1)?.first().copied().unwrap_or(0))
    }
}

/// A byte that differs from that of the message before, and from an unwritten 0.
fn turn(number: u64) -> u8 {
    u8::try_from(number % 255).unwrap_or(0) + 1
}

fn init(pd: PdHandle, cq: CqHandle, caps: QpCapabilities) -> QpInit {
    QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None }
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
