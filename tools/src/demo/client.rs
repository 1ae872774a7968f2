//! The active process of the demo: runs every step, times it and checks what comes back.
//!
//! Owns the measurement. The peer checks what lands there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use uroce::host::Handle;
use uroce::types::Rkey;
use uroce::verbs::{
    AccessFlags, Operation, Payload, PdHandle, QpHandle, RecvWr, Remote, SendFlags, SendWr, Verbs, WcOpcode,
    WorkCompletion,
};

use super::pattern;
use super::peer::write_slot;
use super::script::{self, Control, DEPTH, KEYS, Op, READ_AREA, READ_STREAM, REPLY_MAX, Reply, STEPS, Step};
use crate::exit::Failure;
use crate::rdma::{self, Buffer, Poller};
use crate::stats::Latencies;

/// Bytes of the buffers of outstanding messages.
const LOCAL: usize = 4 << 20;
/// Work request of a control message; test messages have lower ones.
const CONTROL_WR: u64 = 1 << 62;
/// Work request of a receive for replies.
const REPLY_WR: u64 = 1 << 63;
/// How long a completion or a reply may take. A lossy path retries for seconds before it gives up.
const PATIENCE: Duration = Duration::from_secs(15);
/// Every this many compare-and-swaps one compares with a wrong value, and must not swap.
const FAILING_CAS: u64 = 8;

/// What one step found.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Messages in all.
    pub messages: u64,
    /// Messages a second with several outstanding.
    pub per_second: f64,
    /// Latency of one message at a time.
    pub latency: Latencies,
    /// Messages that one of the sides checked byte by byte.
    pub checked: u64,
    /// The first thing that was wrong.
    pub wrong: Option<String>,
}

struct Outstanding {
    number: u64,
    posted: Instant,
    /// What an atomic must find.
    original: u64,
}

/// The active side of one connection.
pub(super) struct Client {
    qp: QpHandle,
    poller: Poller,
    local: Buffer,
    replies: Buffer,
    remote: Remote,
    read_content: Vec<u8>,
    scratch: Vec<u8>,
    keys: Vec<Rkey>,
    /// Which messages the keys are for: those with this quotient by [`KEYS`].
    keys_round: Option<u64>,
    step: usize,
    next: u64,
    word: u64,
    outstanding: VecDeque<Outstanding>,
    checked: u64,
    wrong: Option<String>,
}

impl Client {
    /// Posts the receives for replies; the QP is at least in INIT. `remote` is set by [`Client::set_remote`].
    pub(super) fn new(v: &mut Handle, pd: PdHandle, qp: QpHandle, poller: Poller) -> Result<Self, Failure> {
        let local = Buffer::new(v, pd, LOCAL, AccessFlags::LOCAL_WRITE)?;
        let replies = Buffer::new(v, pd, REPLY_MAX, AccessFlags::LOCAL_WRITE)?;
        let mut read_content = vec![0; script::AREA];
        pattern::fill(READ_STREAM, 0, &mut read_content);
        let client = Self {
            qp,
            poller,
            local,
            replies,
            remote: Remote::default(),
            read_content,
            scratch: Vec::new(),
            keys: Vec::new(),
            keys_round: None,
            step: 0,
            next: 0,
            word: 0,
            outstanding: VecDeque::with_capacity(DEPTH),
            checked: 0,
            wrong: None,
        };
        client.post_reply_receive(v)?;
        Ok(client)
    }

    /// Where the peer's region is.
    pub(super) fn set_remote(&mut self, remote: Remote) {
        self.remote = remote;
    }

    fn post_reply_receive(&self, v: &mut Handle) -> Result<(), Failure> {
        let sge = [self.replies.sge(0, REPLY_MAX)];
        Ok(v.post_recv(self.qp, &[RecvWr { wr_id: REPLY_WR, sges: &sge }])?)
    }

    /// Runs one step: `alone` with one message at a time, then `together` with many.
    pub(super) fn run(
        &mut self,
        v: &mut Handle,
        step: usize,
        alone: Duration,
        together: Duration,
    ) -> Result<Measured, Failure> {
        (self.step, self.next, self.word, self.checked, self.wrong) = (step, 0, 0, 0, None);
        self.keys_round = None;
        let begin = Control::Begin { step: u8::try_from(step).unwrap_or(0) };
        self.ask(v, begin)?;
        let mut latency = Latencies::new()?;
        self.phase(v, 1, alone, Some(&mut latency))?;
        let before = self.next;
        let begin = Instant::now();
        self.phase(v, self.depth(), together, None)?;
        let took = begin.elapsed().as_secs_f64();
        #[allow(clippy::cast_precision_loss)] // A rate for people.
        let per_second = (self.next - before) as f64 / took;
        let Reply::Verdict { checked, wrong } = self.ask(v, Control::End { count: self.next })? else {
            return Err(Failure::failed("the peer answered the end of a step with something else"));
        };
        let wrong = self.wrong.take().or(wrong);
        Ok(Measured { messages: self.next, per_second, latency, checked: self.checked + checked, wrong })
    }

    fn step(&self) -> Step {
        STEPS[self.step]
    }

    fn depth(&self) -> usize {
        (LOCAL / self.step().size).clamp(1, DEPTH)
    }

    /// Keeps `depth` messages outstanding for `time`, then waits for the last.
    fn phase(
        &mut self,
        v: &mut Handle,
        depth: usize,
        time: Duration,
        mut latency: Option<&mut Latencies>,
    ) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            let over = begin.elapsed() >= time && self.next > 0;
            while !over && self.outstanding.len() < depth {
                if self.needs_keys() {
                    if self.outstanding.is_empty() {
                        self.fetch_keys(v)?;
                    } else {
                        break;
                    }
                }
                self.post(v)?;
            }
            if self.outstanding.is_empty() {
                return Ok(());
            }
            let wc = self.completion(v)?;
            self.complete(&wc, latency.as_deref_mut())?;
        }
    }

    /// Each key can be invalidated once: after so many messages the peer makes new ones.
    fn needs_keys(&self) -> bool {
        self.step().op == Op::SendInvalidate && self.keys_round != Some(self.next / KEYS as u64)
    }

    fn fetch_keys(&mut self, v: &mut Handle) -> Result<(), Failure> {
        match self.ask(v, Control::Keys)? {
            Reply::Keys(keys) if keys.len() == KEYS => {
                self.keys = keys;
                self.keys_round = Some(self.next / KEYS as u64);
                Ok(())
            }
            _ => Err(Failure::failed("the peer gave no keys")),
        }
    }

    fn post(&mut self, v: &mut Handle) -> Result<(), Failure> {
        let Step { op, size } = self.step();
        let number = self.next;
        let slot = usize::try_from(number).unwrap_or(0) % self.depth();
        let offset = slot * size;
        if !matches!(op, Op::Read | Op::CompareSwap | Op::FetchAdd) {
            self.scratch.resize(size, 0);
            pattern::fill(u32::try_from(self.step).unwrap_or(0), number, &mut self.scratch);
            self.local.write(offset, &self.scratch)?;
        }
        let original = self.word;
        let sge = [self.local.sge(offset, size)];
        let wr = SendWr {
            wr_id: number,
            operation: self.operation(number, size),
            payload: Payload::Sges(&sge),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        let posted = Instant::now();
        v.post_send(self.qp, &[wr])?;
        self.outstanding.push_back(Outstanding { number, posted, original });
        self.next += 1;
        Ok(())
    }

    /// The operation of message `number`. Keeps account of the word that atomics change.
    fn operation(&mut self, number: u64, size: usize) -> Operation {
        let at = |offset: usize| Remote { addr: self.remote.addr.wrapping_add(offset as u64), rkey: self.remote.rkey };
        match self.step().op {
            Op::Send => Operation::Send,
            Op::SendImm => Operation::SendImm(script::test_imm(number)),
            Op::SendInvalidate => {
                let turn = usize::try_from(number % KEYS as u64).unwrap_or(0);
                Operation::SendInvalidate(self.keys.get(turn).copied().unwrap_or_default())
            }
            Op::Write => Operation::Write(at(write_slot(number, size))),
            Op::WriteImm => Operation::WriteImm(at(write_slot(number, size)), script::test_imm(number)),
            Op::Read => Operation::Read(at(READ_AREA + read_slot(number, size))),
            Op::FetchAdd => {
                let add = number.wrapping_mul(2) + 1;
                let remote = at(script::ATOMIC_WORD);
                self.word = self.word.wrapping_add(add);
                Operation::FetchAdd { remote, add }
            }
            Op::CompareSwap => {
                let remote = at(script::ATOMIC_WORD);
                let swap = number.wrapping_add(1) << 8;
                if number % FAILING_CAS == FAILING_CAS - 1 {
                    return Operation::CompareSwap { remote, compare: self.word ^ 1, swap };
                }
                let compare = core::mem::replace(&mut self.word, swap);
                Operation::CompareSwap { remote, compare, swap }
            }
        }
    }

    /// The next completion of a test or control message.
    fn completion(&mut self, v: &mut Handle) -> Result<WorkCompletion, Failure> {
        let what = self.step().op.name();
        let wc = self
            .poller
            .wait(v, PATIENCE)?
            .ok_or_else(|| Failure::Failed(format!("{what}: no completion within {} s", PATIENCE.as_secs())))?;
        rdma::succeeded(v, &wc, what)
    }

    fn complete(&mut self, wc: &WorkCompletion, latency: Option<&mut Latencies>) -> Result<(), Failure> {
        let Some(done) = self.outstanding.pop_front() else { return Ok(()) };
        if let Some(latency) = latency {
            latency.record(done.posted.elapsed());
        }
        let verdict = if wc.wr_id == done.number {
            self.check(&done)?
        } else {
            Some(format!("message {} completed instead of {}", wc.wr_id, done.number))
        };
        if let Some(what) = verdict {
            self.wrong.get_or_insert(what);
        }
        Ok(())
    }

    /// What is wrong with what came back, or `None`.
    fn check(&mut self, done: &Outstanding) -> Result<Option<String>, Failure> {
        let Step { op, size } = self.step();
        let number = done.number;
        let offset = usize::try_from(number).unwrap_or(0) % self.depth() * size;
        match op {
            Op::Read => {
                self.checked += 1;
                let bytes = self.local.read(offset, size)?;
                let from = read_slot(number, size);
                let wanted = self.read_content.get(from..from + size).unwrap_or_default();
                let wrong = bytes.iter().zip(wanted).position(|(have, want)| have != want);
                Ok(wrong.map(|at| format!("byte {at} of READ {number}")))
            }
            Op::CompareSwap | Op::FetchAdd => {
                self.checked += 1;
                let bytes: [u8; 8] = self.local.read(offset, 8)?.try_into().unwrap_or_default();
                let found = u64::from_ne_bytes(bytes);
                let wrong = found != done.original;
                Ok(wrong.then(|| format!("atomic {number} found {found:#x} instead of {:#x}", done.original)))
            }
            _ => Ok(None),
        }
    }

    /// Sends a control message and waits for its reply. Nothing else is outstanding.
    fn ask(&mut self, v: &mut Handle, control: Control) -> Result<Reply, Failure> {
        let (imm, payload) = control.to_message();
        let wr = SendWr {
            wr_id: CONTROL_WR,
            operation: Operation::SendImm(imm),
            payload: Payload::Inline(&payload),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        v.post_send(self.qp, &[wr])?;
        let (mut sent, mut reply) = (false, None);
        while !sent || reply.is_none() {
            let wc = self.completion(v)?;
            if wc.opcode == WcOpcode::Recv {
                let len = usize::try_from(wc.byte_len).unwrap_or(0).min(REPLY_MAX);
                reply = Some(self.replies.read(0, len)?);
                self.post_reply_receive(v)?;
            } else {
                sent = true;
            }
        }
        let reply = reply.unwrap_or_default();
        Reply::from_bytes(&reply).ok_or_else(|| Failure::failed("the peer's reply cannot be read"))
    }
}

/// Where READ `number` of `size` bytes begins, from the beginning of the read area.
fn read_slot(number: u64, size: usize) -> usize {
    usize::try_from(number).unwrap_or(0) % (script::AREA / size) * size
}
