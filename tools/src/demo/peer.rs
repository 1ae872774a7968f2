//! The passive process of the demo: receives, checks, and lends its memory.
//!
//! Owns the checks of everything that lands here. It trusts no number that the client sends beyond its range.

use std::time::Duration;

use uroce::host::Handle;
use uroce::types::{Imm, Rkey};
use uroce::verbs::{
    AccessFlags, FastRegister, MrHandle, Operation, Payload, PdHandle, QpHandle, RecvWr, SendFlags, SendWr, Verbs,
    WcData, WcOpcode, WcStatus, WorkCompletion,
};

use super::pattern;
use super::script::{self, CONTROL_LEN, Control, KEYS, Op, READ_AREA, REGION, Reply, SEND_MAX, STEPS, Step};
use crate::exit::Failure;
use crate::rdma::{self, Buffer, Poller};

/// Work request of a reply; receives have lower ones.
const REPLY: u64 = 1 << 32;
/// How long the client may be silent.
const PATIENCE: Duration = Duration::from_secs(20);

/// The passive side of one connection.
pub(super) struct Peer {
    qp: QpHandle,
    pd: PdHandle,
    poller: Poller,
    /// What the client reads, writes and counts on.
    pub region: Buffer,
    receives: Buffer,
    replies: Buffer,
    keys: Vec<(MrHandle, Rkey)>,
    step: usize,
    /// Test messages that arrived in this step.
    seen: u64,
    checked: u64,
    wrong: Option<String>,
}

impl Peer {
    /// Registers the memory and posts the receives of a QP that is at least in INIT.
    pub(super) fn new(v: &mut Handle, pd: PdHandle, qp: QpHandle, poller: Poller) -> Result<Self, Failure> {
        let region = Buffer::new(v, pd, REGION, AccessFlags::ALL)?;
        let mut content = vec![0; script::AREA];
        pattern::fill(script::READ_STREAM, 0, &mut content);
        region.write(READ_AREA, &content)?;
        let receives = Buffer::new(v, pd, script::RECEIVES * SEND_MAX, AccessFlags::LOCAL_WRITE)?;
        let replies = Buffer::new(v, pd, script::REPLY_MAX, AccessFlags::LOCAL_WRITE)?;
        let keys = Vec::new();
        let mut peer =
            Self { qp, pd, poller, region, receives, replies, keys, step: 0, seen: 0, checked: 0, wrong: None };
        for index in 0..script::RECEIVES {
            peer.post_receive(v, index)?;
        }
        Ok(peer)
    }

    fn post_receive(&mut self, v: &mut Handle, index: usize) -> Result<(), Failure> {
        let sge = [self.receives.sge(index * SEND_MAX, SEND_MAX)];
        Ok(v.post_recv(self.qp, &[RecvWr { wr_id: index as u64, sges: &sge }])?)
    }

    /// Serves until the client disconnects, which flushes the receives.
    pub(super) fn serve(
        &mut self,
        v: &mut Handle,
        mut on_idle: impl FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        const SLICE: Duration = Duration::from_millis(20);
        let mut silence = Duration::ZERO;
        loop {
            let Some(wc) = self.poller.wait(v, SLICE)? else {
                if on_idle(v)? {
                    return Ok(());
                }
                silence += SLICE;
                if silence >= PATIENCE {
                    return Err(Failure::failed("the client fell silent"));
                }
                continue;
            };
            silence = Duration::ZERO;
            if wc.status == WcStatus::WorkRequestFlushed {
                return Ok(());
            }
            let wc = rdma::succeeded(v, &wc, "the peer's work request")?;
            if wc.wr_id < REPLY {
                self.on_receive(v, &wc)?;
            }
        }
    }

    fn on_receive(&mut self, v: &mut Handle, wc: &WorkCompletion) -> Result<(), Failure> {
        let index = usize::try_from(wc.wr_id).unwrap_or(0);
        let len = usize::try_from(wc.byte_len).unwrap_or(0);
        if let (WcOpcode::Recv, WcData::Imm(imm), CONTROL_LEN) = (wc.opcode, wc.data, len)
            && let Some(control) = self.control(imm, index)?
        {
            // The receive is free before the answer invites the next message.
            self.post_receive(v, index)?;
            return self.on_control(v, control);
        }
        let verdict = self.check(wc, index, len)?;
        self.judge(verdict);
        self.seen += 1;
        self.post_receive(v, index)
    }

    fn control(&self, imm: Imm, index: usize) -> Result<Option<Control>, Failure> {
        let bytes = self.receives.read(index * SEND_MAX, CONTROL_LEN)?;
        let payload: [u8; CONTROL_LEN] = bytes.try_into().unwrap_or_default();
        Ok(Control::from_message(imm, payload))
    }

    fn on_control(&mut self, v: &mut Handle, control: Control) -> Result<(), Failure> {
        let reply = match control {
            Control::Begin { step } => {
                self.step = usize::from(step).min(STEPS.len() - 1);
                (self.seen, self.checked, self.wrong) = (0, 0, None);
                self.region.write(script::ATOMIC_WORD, &[0; 8])?;
                Reply::Ready
            }
            Control::Keys => Reply::Keys(self.fresh_keys(v)?),
            Control::End { count } => {
                self.end(count)?;
                Reply::Verdict { checked: self.checked, wrong: self.wrong.take() }
            }
        };
        let bytes = reply.to_bytes();
        self.replies.write(0, &bytes)?;
        let sge = [self.replies.sge(0, bytes.len())];
        let wr = SendWr {
            wr_id: REPLY,
            operation: Operation::Send,
            payload: Payload::Sges(&sge),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        Ok(v.post_send(self.qp, &[wr])?)
    }

    /// Fresh regions, whose keys the client will take away one by one.
    fn fresh_keys(&mut self, v: &mut Handle) -> Result<Vec<Rkey>, Failure> {
        for (mr, _) in self.keys.drain(..) {
            v.deregister(mr)?;
        }
        for _ in 0..KEYS {
            // Only what was registered by a work request can be invalidated.
            let region = uroce::raw::Region::alloc(64)?;
            let mr = v.alloc_fast_mr(self.pd, &region)?;
            let (length, access) = (mr.len, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE);
            let fast = FastRegister { mr: mr.handle, key: mr.rkey, offset: 0, length, iova: 0, access };
            let (operation, payload) = (Operation::FastRegister(fast), Payload::Sges(&[]));
            let wr = SendWr { wr_id: REPLY, operation, payload, flags: SendFlags::default(), destination: None };
            v.post_send(self.qp, &[wr])?;
            self.keys.push((mr.handle, mr.rkey));
        }
        Ok(self.keys.iter().map(|(_, key)| *key).collect())
    }

    fn step(&self) -> Step {
        STEPS[self.step]
    }

    /// What is wrong with a test message, or `None`.
    fn check(&mut self, wc: &WorkCompletion, index: usize, len: usize) -> Result<Option<String>, Failure> {
        let Step { op, size } = self.step();
        let stream = u32::try_from(self.step).unwrap_or(0);
        let number = self.seen;
        let expected_imm = WcData::Imm(script::test_imm(number));
        let data_right = match op {
            Op::Send => wc.data == WcData::None,
            Op::SendImm | Op::WriteImm => wc.data == expected_imm,
            Op::SendInvalidate => {
                let key = usize::try_from(number).unwrap_or(0) % KEYS;
                self.keys.get(key).is_some_and(|(_, rkey)| wc.data == WcData::Invalidated(*rkey))
            }
            _ => return Ok(Some(format!("a receive completed during {}", op.name()))),
        };
        if !data_right {
            return Ok(Some(format!("message {number} came with {:?}", wc.data)));
        }
        if len != size {
            return Ok(Some(format!("message {number} has {len} bytes")));
        }
        let bytes = if op == Op::WriteImm {
            self.region.read(write_slot(number, size), size)?
        } else {
            self.receives.read(index * SEND_MAX, size)?
        };
        Ok(pattern::first_wrong(stream, number, &bytes).map(|at| format!("byte {at} of message {number}")))
    }

    fn judge(&mut self, verdict: Option<String>) {
        match verdict {
            None => self.checked += 1,
            Some(what) => {
                self.wrong.get_or_insert(what);
            }
        }
    }

    /// Checks at the end of a step: all messages came, and the newest WRITE to each place stands there.
    fn end(&mut self, count: u64) -> Result<(), Failure> {
        let Step { op, size } = self.step();
        if op.takes_receive() && self.seen != count {
            self.wrong.get_or_insert(format!("{} of {count} messages came", self.seen));
        }
        if op == Op::Write {
            let stream = u32::try_from(self.step).unwrap_or(0);
            let places = script::slots(size) as u64;
            for number in count.saturating_sub(places)..count {
                let bytes = self.region.read(write_slot(number, size), size)?;
                let wrong = pattern::first_wrong(stream, number, &bytes);
                self.judge(wrong.map(|at| format!("byte {at} of message {number}")));
            }
        }
        Ok(())
    }
}

/// Where WRITE `number` of `size` bytes lands, from the beginning of the region.
pub(super) fn write_slot(number: u64, size: usize) -> usize {
    let slot = usize::try_from(number).unwrap_or(0) % script::slots(size);
    script::WRITE_AREA + slot * size
}
