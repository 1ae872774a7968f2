//! One rping conversation on a connected QP.
//!
//! Owns the exchange: the client advertises its source, the server READs it and says go on; the client advertises its
//! sink, the server WRITEs there and says go on. Each step is told by a SEND of 16 bytes.

use std::time::Duration;

use uroce::verbs::{
    AccessFlags, Operation, Payload, PdHandle, QpHandle, RecvWr, Remote, SendFlags, SendWr, WcOpcode, WcStatus,
};

use super::data::{self, INFO_LEN, Info, SIZE_MAX};
use crate::exit::Failure;
use crate::node::Handle;
use crate::rdma::{self, Buffer, Poller};

/// Receives posted: the peer never has more than one SEND under way.
const RECEIVES: usize = 2;
/// How long one wait lasts before the caller is asked whether the connection still stands.
const SLICE: Duration = Duration::from_millis(50);

/// How long a client waits for a server that has acknowledged everything and says nothing: nothing is outstanding then
/// that could fail.
const SILENCE: Duration = Duration::from_secs(10);

/// The work request that asks an idle client whether it lives; those of the conversation have other numbers.
const PROBE_WR: u64 = u64::MAX - 1;

/// What a wait for the peer's SEND ended with.
enum Heard {
    Info(Info),
    Over,
}

/// One side.
pub(super) struct Session {
    qp: QpHandle,
    poller: Poller,
    /// The 16 bytes that go out, then those that come in.
    infos: Buffer,
    /// The client's source and the server's only buffer.
    near: Buffer,
    /// The client's sink.
    sink: Buffer,
    size: usize,
    /// A server waits for its client for ever.
    patient: bool,
    /// After so much silence a server asks whether its client lives.
    probe_after: Option<Duration>,
    heard: Option<Info>,
}

impl Session {
    /// Registers memory and posts the receives of a QP that is at least in INIT.
    pub(super) fn new(v: &mut Handle, pd: PdHandle, qp: QpHandle, poller: Poller, size: u32) -> Result<Self, Failure> {
        let room = usize::try_from(SIZE_MAX).unwrap_or(0) + 1;
        let remote = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let session = Self {
            qp,
            poller,
            infos: Buffer::new(v, pd, (1 + RECEIVES) * INFO_LEN, AccessFlags::LOCAL_WRITE)?,
            near: Buffer::new(v, pd, room, remote)?,
            sink: Buffer::new(v, pd, room, remote)?,
            size: usize::try_from(size).unwrap_or(0),
            patient: false,
            probe_after: None,
            heard: None,
        };
        for slot in 0..RECEIVES {
            session.post_receive(v, slot as u64)?;
        }
        Ok(session)
    }

    fn post_receive(&self, v: &mut Handle, slot: u64) -> Result<(), Failure> {
        let at = (1 + usize::try_from(slot).unwrap_or(0)) * INFO_LEN;
        let sge = [self.infos.sge(at, INFO_LEN)];
        Ok(v.post_recv(self.qp, &[RecvWr { wr_id: slot, sges: &sge }])?)
    }

    /// Client: ping `number`. Returns what came back.
    pub(super) fn ping(
        &mut self,
        v: &mut Handle,
        number: u32,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<Vec<u8>, Failure> {
        let text = data::text(number, self.size);
        self.near.write(0, &text)?;
        let len = u32::try_from(self.size).unwrap_or(0);
        for at in [self.near.remote(0), self.sink.remote(0)] {
            self.tell(v, Info { at, len }, over)?;
            if let Heard::Over = self.hear(v, over)? {
                return Err(Failure::Failed(format!("the server disconnected during ping {number}")));
            }
        }
        self.sink.read(0, self.size)
    }

    /// The bytes of ping `number` as they must come back.
    pub(super) fn wanted(&self, number: u32) -> Vec<u8> {
        data::text(number, self.size)
    }

    /// Server: a client that is silent for so long is asked whether it lives, again and again; one that does not even
    /// acknowledge ends the session with an error.
    pub(super) fn probe_after(&mut self, silence: Option<Duration>) {
        self.probe_after = silence;
    }

    /// A WRITE of nothing: the peer's device acknowledges it, whatever its program does.
    fn probe(&self, v: &mut Handle) -> Result<(), Failure> {
        let wr = SendWr {
            wr_id: PROBE_WR,
            operation: Operation::Write(Remote::default()),
            payload: Payload::Sges(&[]),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        Ok(v.post_send(self.qp, &[wr])?)
    }

    /// Server: answers one ping; `None` when the client has disconnected instead.
    pub(super) fn pong(
        &mut self,
        v: &mut Handle,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<Option<Vec<u8>>, Failure> {
        self.patient = true;
        let Heard::Info(source) = self.hear(v, over)? else { return Ok(None) };
        let len = usize::try_from(source.len).unwrap_or(usize::MAX);
        if source.len > SIZE_MAX {
            return Err(Failure::Failed(format!("the client offers {len} bytes; at most {SIZE_MAX} are taken")));
        }
        self.transfer(v, Operation::Read(source.at), len, "the READ of the ping", over)?;
        let text = self.near.read(0, len)?;
        // What the go-ahead carries does not matter.
        self.tell(v, Info { at: Remote::default(), len: 0 }, over)?;
        let Heard::Info(sink) = self.hear(v, over)? else { return Ok(None) };
        // rping writes the text and its NUL, which is all of it but for sizes beyond the text's.
        let used = text.iter().position(|b| *b == 0).map_or(len, |nul| nul + 1);
        self.transfer(v, Operation::Write(sink.at), used, "the WRITE of the ping", over)?;
        self.tell(v, Info { at: Remote::default(), len: 0 }, over)?;
        Ok(Some(text))
    }

    /// Destroys everything but the connection's id.
    pub(super) fn close(self, v: &mut Handle, pd: PdHandle) -> Result<(), Failure> {
        v.destroy_qp(self.qp)?;
        for buffer in [self.infos, self.near, self.sink] {
            buffer.free(v)?;
        }
        v.destroy_cq(self.poller.cq())?;
        Ok(v.dealloc_pd(pd)?)
    }

    /// Sends an advertisement and waits until it is acknowledged.
    fn tell(
        &mut self,
        v: &mut Handle,
        info: Info,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        self.infos.write(0, &info.to_bytes())?;
        let sge = [self.infos.sge(0, INFO_LEN)];
        self.perform(v, Operation::Send, &sge, "the SEND", over)
    }

    fn transfer(
        &mut self,
        v: &mut Handle,
        operation: Operation,
        len: usize,
        what: &str,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let sge = [self.near.sge(0, len)];
        self.perform(v, operation, &sge, what, over)
    }

    fn perform(
        &mut self,
        v: &mut Handle,
        operation: Operation,
        sges: &[uroce::verbs::Sge],
        what: &str,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let wr = SendWr {
            wr_id: u64::MAX,
            operation,
            payload: Payload::Sges(sges),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        v.post_send(self.qp, &[wr])?;
        loop {
            match self.next(v, what, over)? {
                Some(false) => return Ok(()),
                // The answer may come before the acknowledgement of what it answers.
                Some(true) => {}
                None => return Err(Failure::Failed(format!("the peer disconnected during {what}"))),
            }
        }
    }

    fn hear(
        &mut self,
        v: &mut Handle,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<Heard, Failure> {
        loop {
            if let Some(info) = self.heard.take() {
                return Ok(Heard::Info(info));
            }
            if self.next(v, "a receive", over)?.is_none() {
                return Ok(Heard::Over);
            }
        }
    }

    /// Takes one completion: `true` for a receive, `false` for a send; `None` when the connection is over.
    fn next(
        &mut self,
        v: &mut Handle,
        what: &str,
        over: &mut dyn FnMut(&mut Handle) -> Result<bool, Failure>,
    ) -> Result<Option<bool>, Failure> {
        let (mut silence, mut probing) = (Duration::ZERO, false);
        loop {
            let Some(wc) = self.poller.wait(v, SLICE)? else {
                if over(v)? {
                    return Ok(None);
                }
                silence += SLICE;
                if silence >= SILENCE && !self.patient {
                    let seconds = SILENCE.as_secs();
                    return Err(Failure::Failed(format!(
                        "the server has acknowledged, and said nothing for {seconds} s"
                    )));
                }
                if self.patient && !probing && self.probe_after.is_some_and(|after| silence >= after) {
                    self.probe(v)?;
                    probing = true;
                }
                continue;
            };
            if wc.status == WcStatus::WorkRequestFlushed {
                return Ok(None);
            }
            if wc.wr_id == PROBE_WR {
                rdma::succeeded(v, &wc, "the client is gone: a WRITE of nothing")?;
                (silence, probing) = (Duration::ZERO, false);
                continue;
            }
            let wc = rdma::succeeded(v, &wc, what)?;
            if wc.opcode != WcOpcode::Recv {
                return Ok(Some(false));
            }
            let at = (1 + usize::try_from(wc.wr_id).unwrap_or(0)) * INFO_LEN;
            if wc.byte_len as usize != INFO_LEN {
                return Err(Failure::Failed(format!("the peer sent {} bytes; is it an rping?", wc.byte_len)));
            }
            let bytes: [u8; INFO_LEN] = self.infos.read(at, INFO_LEN)?.try_into().unwrap_or_default();
            self.post_receive(v, wc.wr_id)?;
            self.heard = Some(Info::from_bytes(bytes));
            return Ok(Some(true));
        }
    }
}
