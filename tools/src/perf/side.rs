//! One side of a test: its QPs and memory, and what it hears.
//!
//! Owns receives, completions and control messages; `run` has the loops that move messages. Never prints.

use std::time::{Duration, Instant};

use uroce::verbs::{
    AccessFlags, CqHandle, Operation as Verb, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, RecvWr,
    Remote, SendFlags, SendWr, WcData, WcOpcode, WcStatus, WorkCompletion,
};

use super::args::{Atomic, Operation, Wait};
use super::wire::{CONTROL_MAX, Control};
use crate::exit::Failure;
use crate::node::Handle;
use crate::rdma::{self, Buffer, Poller};
use crate::stop;

/// Longest sleep between two looks at the connections and at signals.
pub(super) const SLICE: Duration = Duration::from_millis(50);
/// How long nothing may complete.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// Work request of a control message.
const CONTROL_WR: u64 = u64::MAX;
/// Control messages that may be under way, beside those of the test.
const CONTROLS: u32 = 2;
/// Receives of a QP whose test needs none: for control messages.
const FEW_RECEIVES: u32 = 8;
/// Greatest sum of buffers: what a peer asks for is not taken unseen.
pub(super) const SIZE_MAX: u64 = 1 << 30;

/// How a test posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub operation: Operation,
    /// One message at a time, there and back.
    pub is_ping_pong: bool,
    /// A WRITE carries immediate data, so that it makes a completion at the peer.
    pub announced: bool,
    pub atomic: Atomic,
    pub size: usize,
    /// Messages a QP; with a duration, however many fit.
    pub messages: u64,
    pub duration: Option<Duration>,
    pub depth: u32,
    pub moderation: u32,
    pub inline: usize,
    /// Work requests posted in one call.
    pub list: usize,
    /// Of the content; 0 where none is checked.
    pub seed: u64,
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
    pub(super) buffer: Buffer,
    control: Buffer,
    /// Where receives and the peer's WRITEs land.
    pub(super) landing: usize,
    room: usize,
    pub(super) wait: Wait,
    /// Receives of each QP, and how many of them are to be posted again.
    receives: u32,
    owed: Vec<u32>,
    /// A control message that came while messages were under way.
    pub(super) left: Option<Control>,
    /// Control messages sent and not acknowledged.
    unacknowledged: u32,
}

/// What a side is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    pub operation: Operation,
    pub qps: u8,
    /// Work requests of a send queue.
    pub queue: u32,
    pub rx_depth: u32,
    pub inline: u32,
    /// Bytes of the largest message.
    pub size_max: u64,
    pub wait: Wait,
}

impl Side {
    /// Makes the QPs, not connected.
    pub(super) fn new(v: &mut Handle, needs: &Needs) -> Result<Self, Failure> {
        let Needs { operation, qps, queue, inline, size_max, wait, .. } = *needs;
        if size_max > SIZE_MAX {
            return Err(Failure::Usage(format!("messages of more than {SIZE_MAX} bytes are not measured")));
        }
        // Atomics need the landing place on a multiple of 8.
        let room = usize::try_from(size_max).unwrap_or(0).max(CONTROL_MAX).next_multiple_of(64);
        let pd = v.alloc_pd()?;
        let buffer = Buffer::new(v, pd, 2 * room, AccessFlags::ALL)?;
        let control = Buffer::new(v, pd, CONTROL_MAX, AccessFlags::LOCAL_WRITE)?;
        let receives = if operation == Operation::Send { needs.rx_depth } else { FEW_RECEIVES };
        let count = usize::from(qps.max(1));
        let entries = (queue + CONTROLS + receives) * u32::from(qps.max(1));
        let cq = v.create_cq(entries)?;
        let caps = QpCapabilities {
            max_send_wr: queue + CONTROLS,
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
            wait,
            receives,
            owed: vec![0; count],
            left: None,
            unacknowledged: 0,
        })
    }

    /// Where the peer may WRITE, READ and count.
    pub(super) fn memory(&self) -> Remote {
        self.buffer.remote(self.landing)
    }

    /// Posts the receives of a QP that is in INIT.
    pub(super) fn post_receives(&self, v: &mut Handle, index: usize) -> Result<(), Failure> {
        self.post_so_many(v, index, self.receives)
    }

    fn post_so_many(&self, v: &mut Handle, index: usize, mut receives: u32) -> Result<(), Failure> {
        const LIST: usize = 16;
        let sge = [self.buffer.sge(self.landing, self.room)];
        let list = [RecvWr { wr_id: index as u64, sges: &sge }; LIST];
        while receives > 0 {
            let n = receives.min(LIST as u32);
            v.post_recv(self.qps[index], &list[..n as usize])?;
            receives -= n;
        }
        Ok(())
    }

    /// Posts again what was consumed, `at_least` receives at a time.
    fn repay(&mut self, v: &mut Handle, index: usize, at_least: u32) -> Result<(), Failure> {
        if self.owed[index] >= at_least {
            let owed = core::mem::take(&mut self.owed[index]);
            self.post_so_many(v, index, owed)?;
        }
        Ok(())
    }

    /// Takes one completion if there is one. When there is none it posts receives again, which can wait until then, and
    /// a side that may sleep does.
    pub(super) fn hear(&mut self, v: &mut Handle) -> Result<Heard, Failure> {
        if let Some(wc) = self.poller.poll(v)? {
            return self.sort(v, &wc);
        }
        stop::check()?;
        for index in 0..self.owed.len() {
            self.repay(v, index, 1)?;
        }
        if self.wait != Wait::Spin {
            v.wait_cq(self.poller.cq(), Some(SLICE))?;
        }
        Ok(Heard::Nothing)
    }

    /// What came during a test and was left for now, or else what comes next.
    pub(super) fn next(&mut self, v: &mut Handle) -> Result<Heard, Failure> {
        match self.left.take() {
            Some(control) => Ok(Heard::Control(control)),
            None => self.hear(v),
        }
    }

    fn sort(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<Heard, Failure> {
        if wc.status == WcStatus::WorkRequestFlushed {
            return Ok(Heard::Over);
        }
        let wc = rdma::succeeded(v, wc, "a message of the test")?;
        if !matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
            if wc.wr_id == CONTROL_WR {
                self.unacknowledged -= 1;
                return Ok(Heard::Nothing);
            }
            let index = usize::try_from(wc.wr_id >> 32).unwrap_or(0);
            return Ok(Heard::Sent(index, wc.wr_id & 0xffff_ffff));
        }
        let index = usize::try_from(wc.wr_id).unwrap_or(0);
        let heard = match wc.data {
            WcData::Imm(imm) if wc.opcode == WcOpcode::Recv => {
                let len = usize::try_from(wc.byte_len).unwrap_or(0).min(CONTROL_MAX);
                let bytes = self.buffer.read(self.landing, len)?;
                Control::from_message(imm, &bytes).map_or(Heard::Nothing, Heard::Control)
            }
            _ => Heard::Message,
        };
        self.owed[index] += 1;
        // Enough of them are left to answer the peer first.
        self.repay(v, index, (self.receives / 4).clamp(1, 32))?;
        Ok(heard)
    }

    /// Sends a control message. The peer's answer to the last one may be here before its ACK is: two are kept room for beside
    /// the messages of the test.
    pub(super) fn tell(&mut self, v: &mut Handle, control: &Control) -> Result<(), Failure> {
        let begin = Instant::now();
        while self.unacknowledged >= CONTROLS {
            match self.hear(v)? {
                Heard::Control(control) => self.left = Some(control),
                Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                _ if begin.elapsed() > PATIENCE => return Err(Failure::failed("the peer fell silent")),
                _ => {}
            }
        }
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
        v.post_send(self.qps[0], &[wr])?;
        self.unacknowledged += 1;
        Ok(())
    }

    /// Waits until the peer says go on.
    pub(super) fn expect_ready(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            match self.next(v)? {
                Heard::Control(Control::Ready) => return Ok(()),
                Heard::Control(Control::Differs(at)) => return Err(differs(at)),
                Heard::Over => return Err(Failure::failed("the peer has disconnected")),
                _ if begin.elapsed() > PATIENCE => return Err(Failure::failed("the peer fell silent")),
                _ => {}
            }
        }
    }

    /// The last byte that the peer's WRITE of `size` bytes changes.
    pub(super) fn landed(&self, size: usize) -> Result<u8, Failure> {
        self.buffer.byte(self.landing + size - 1)
    }
}

/// The end of a test whose messages arrived with another content.
pub(super) fn differs(at: u64) -> Failure {
    Failure::Failed(format!("what arrived is not what was sent: byte {at} of a message differs"))
}

fn init(pd: PdHandle, cq: CqHandle, caps: QpCapabilities) -> QpInit {
    QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn: None }
}
