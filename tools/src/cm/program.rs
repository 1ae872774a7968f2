//! What the programs with data have in common: the turn of a crowd and of a completion queue.
//!
//! Owns the loop. What an event or a completion means is the program's.

use std::time::Duration;

use uroce::types::Imm;
use uroce::verbs::{
    AccessFlags, CqHandle, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpType, RecvWr, SendFlags,
    SendWr, UdDestination, WorkCompletion,
};

use super::crowd::{Crowd, News, Stage};
use crate::exit::Failure;
use crate::node::Handle;
use crate::rdma::{Buffer, Poller};

/// Longest sleep between two looks at everything that can happen.
const SLICE: Duration = Duration::from_millis(5);
/// Marks the completions of sends.
const SEND_WR: u64 = 1 << 32;
/// Bytes of all receives and sends together.
const MEMORY_MAX: u64 = 1 << 30;

/// What a program has that makes connections and sends on them.
pub(super) struct Hall {
    pub(super) crowd: Crowd,
    pub(super) pd: PdHandle,
    cq: CqHandle,
    poller: Option<Poller>,
    /// Completions so far.
    pub(super) sent: u64,
    pub(super) received: u64,
    shape: Shape,
}

/// How much is sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) qp_type: QpType,
    pub(super) connections: u32,
    /// Each way on each connection.
    pub(super) messages: u32,
    pub(super) size: u32,
}

impl Shape {
    /// Each way on all connections.
    pub(super) fn total(&self) -> u64 {
        u64::from(self.connections) * u64::from(self.messages)
    }

    pub(super) fn size(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// Bytes before a message in its receive buffer.
    pub(super) const fn headroom(&self) -> usize {
        if self.qp_type.is_datagram() { 40 } else { 0 }
    }

    fn slots(&self) -> usize {
        usize::try_from(self.messages).unwrap_or(usize::MAX)
    }

    /// Whether the process can hold so much.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let slot = u64::from(self.size) + self.headroom() as u64;
        let memory = u64::from(self.connections) * (u64::from(self.messages) + 1) * slot;
        if memory <= MEMORY_MAX {
            return Ok(());
        }
        let most = MEMORY_MAX >> 20;
        Err(Failure::Usage(format!("{memory} bytes of receives are more than {most} MiB; try a smaller -c, -C or -S")))
    }
}

/// A QP with its receives.
pub(super) struct Lane {
    pub(super) qp: QpHandle,
    /// A slot for each receive, and behind them what is sent.
    buffer: Buffer,
    shape: Shape,
}

impl Hall {
    pub(super) fn new(v: &mut Handle, crowd: Crowd, shape: Shape) -> Result<Self, Failure> {
        let depth = u32::try_from(shape.total().saturating_mul(2)).unwrap_or(u32::MAX).max(1);
        let pd = v.alloc_pd()?;
        let cq = v.create_cq(depth).map_err(|e| Failure::Usage(format!("-c times -C is too much: {e}")))?;
        Ok(Self { crowd, pd, cq, poller: None, sent: 0, received: 0, shape })
    }

    /// Makes a QP; [`Lane::receive`] follows once it is attached.
    pub(super) fn lane(&mut self, v: &mut Handle) -> Result<Lane, Failure> {
        let (shape, pd, cq) = (self.shape, self.pd, self.cq);
        let wr = shape.messages.max(1);
        let caps = QpCapabilities { max_send_wr: wr, max_recv_wr: wr, ..QpCapabilities::default() };
        let qp_type = shape.qp_type;
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = v.create_qp(init)?;
        let bytes = shape.slots().saturating_mul(shape.headroom() + shape.size()) + shape.size();
        let buffer = Buffer::new(v, pd, bytes.max(1), AccessFlags::LOCAL_WRITE)?;
        self.poller.get_or_insert_with(|| Poller::new(cq, qp));
        Ok(Lane { qp, buffer, shape })
    }
}

impl Lane {
    fn slot(&self, index: usize) -> usize {
        index.saturating_mul(self.shape.headroom() + self.shape.size())
    }

    /// Posts a receive for each message.
    pub(super) fn receive(&self, v: &mut Handle) -> Result<(), Failure> {
        let len = self.shape.headroom() + self.shape.size();
        for index in 0..self.shape.slots() {
            let sge = [self.buffer.sge(self.slot(index), len)];
            v.post_recv(self.qp, &[RecvWr { wr_id: index as u64, sges: &sge }])?;
        }
        Ok(())
    }

    /// What came with a completion of a receive, if it has the size that was agreed on.
    pub(super) fn came(&self, wc: &WorkCompletion) -> Result<Vec<u8>, Failure> {
        let (size, headroom) = (self.shape.size(), self.shape.headroom());
        let came = usize::try_from(wc.byte_len).unwrap_or(usize::MAX).saturating_sub(headroom);
        if came != size {
            return Err(Failure::Failed(format!(
                "the peer sends {came} bytes, not {size}; give both sides the same -S"
            )));
        }
        self.buffer.read(self.slot(usize::try_from(wc.wr_id).unwrap_or(0)) + headroom, size)
    }

    /// Sends as many copies of `message` as wanted, with immediate data where they are datagrams.
    pub(super) fn send(
        &self,
        v: &mut Handle,
        message: &[u8],
        destination: Option<(UdDestination, Imm)>,
    ) -> Result<(), Failure> {
        let at = self.slot(self.shape.slots());
        self.buffer.write(at, message)?;
        let sge = [self.buffer.sge(at, self.shape.size())];
        for wr_id in 0..u64::from(self.shape.messages) {
            let wr = SendWr {
                wr_id: SEND_WR + wr_id,
                operation: destination.map_or(Operation::Send, |(_, imm)| Operation::SendImm(imm)),
                payload: Payload::Sges(&sge),
                flags: SendFlags::SIGNALED,
                destination: destination.map(|(to, _)| to),
            };
            v.post_send(self.qp, &[wr])?;
        }
        Ok(())
    }
}

/// Whether a completion is one of [`Lane::send`].
pub(super) const fn is_send(wc: &WorkCompletion) -> bool {
    wc.wr_id >= SEND_WR
}

/// A program over a hall.
pub(super) trait Program {
    /// What it runs in.
    fn hall(&mut self) -> &mut Hall;

    /// A peer wants something, or a connection has moved.
    fn on_news(&mut self, v: &mut Handle, news: News) -> Result<(), Failure>;

    /// A completion, good or bad.
    fn on_completion(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<(), Failure>;

    /// Does what is there to be done, and sleeps a moment if that is nothing.
    fn turn(&mut self, v: &mut Handle, waiting: &str) -> Result<(), Failure> {
        let mut busy = false;
        while let Some(news) = self.hall().crowd.news(v)? {
            busy = true;
            self.on_news(v, news)?;
        }
        while let Some(wc) = self.hall().poller.as_mut().map(|p| p.poll(v)).transpose()?.flatten() {
            busy = true;
            self.on_completion(v, &wc)?;
        }
        let Hall { crowd, cq, sent, received, shape, .. } = self.hall();
        if busy {
            crowd.goes_on();
            return Ok(());
        }
        let there = crowd.count(Stage::Established);
        crowd.check_patience(|| {
            let (all, total) = (shape.connections, shape.total());
            format!(
                "waiting for {waiting} ({there} of {all} connections, {sent} sends and {received} receives of {total})"
            )
        })?;
        // Data are waited for once connections stand; connection management is looked at in every turn.
        if there > 0 { v.wait_cq(*cq, Some(SLICE)).map(drop).map_err(Failure::from) } else { crowd.rest(v) }
    }

    /// Turns until `now` says that as many as `wanted` are there.
    fn until(&mut self, v: &mut Handle, what: &str, wanted: u64, now: fn(&Hall) -> u64) -> Result<(), Failure> {
        while now(self.hall()) < wanted {
            self.turn(v, what)?;
        }
        Ok(())
    }
}
