//! One end of the tests.
//!
//! Owns the endpoint, its memory and the QP of the running test, the verbs calls that the steps are made of, and the order of
//! a test. Never says what a test is.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::impair::{ImpairModel, Impaired};
use uroce::engine::Engine;
use uroce::host::{Handle, Host};
use uroce::raw::Region;
use uroce::types::{AckTimeout, RetryCount, Rkey, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, FlushPlacement, FlushScope, InitAttr, MemoryRegion, MwBind, MwHandle, MwType,
    Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr,
    RtsAttr, SendFlags, SendWr, Sge, Verbs, VerbsError, WcData, WcStatus, WorkCompletion,
};

use crate::cases::{Test, one_receive};
use crate::rxe_flush::RxeFlush;
use crate::{
    COUNTER_AT, DEPTH, FROM_AT, Hello, LATE, OLD, OURS, Options, Outcome, PATIENCE, PIECE, PIECES, RECV_AT, REGION,
    RNR_CODE, THEIRS, WINDOW_AT, WINDOW_LEN, pattern, text,
};

/// One end: the endpoint, its memory, and the QP of the running test.
pub(crate) struct Bench {
    handle: Handle,
    /// Keeps the progress thread.
    _host: Host,
    options: Options,
    sock: TcpStream,
    pd: PdHandle,
    region: Region,
    mr: MemoryRegion,
    no_rights: MemoryRegion,
    live: Option<(CqHandle, QpHandle)>,
    peer: Option<Hello>,
    window: Option<MwHandle>,
    pub(crate) window_key: Rkey,
}

impl Bench {
    pub(crate) fn open(options: Options) -> Result<Self, String> {
        let device = AfPacket::open(AfPacketConfig::shared(options.interface.as_str())).map_err(text)?;
        let lossy = ImpairModel::lossy(options.loss);
        let device = RxeFlush { inner: Impaired::new(device, lossy, ImpairModel::NONE, 1), on: options.rxe_flush };
        let mut engine = Engine::open(device).map_err(text)?;
        // As `uroce --segments`.
        if let Some(segments) = std::env::var("UROCE_SEGMENTS").ok().and_then(|n| n.parse().ok()) {
            engine.endpoint_mut().set_segments_max(segments);
        }
        let mut host = Host::new(engine);
        host.spawn_progress().map_err(text)?;
        let mut handle = host.handle();
        let pd = handle.alloc_pd().map_err(text)?;
        let region = Region::alloc(REGION as usize).map_err(text)?;
        let rights = AccessFlags::ALL | AccessFlags::MW_BIND;
        let mr = handle
            .register(pd, &region, rights | AccessFlags::FLUSH_GLOBAL, None)
            .or_else(|_| handle.register(pd, &region, rights, None))
            .or_else(|_| handle.register(pd, &region, AccessFlags::ALL, None))
            .map_err(text)?;
        let no_rights = handle.register(pd, &region, AccessFlags::LOCAL_WRITE, None).map_err(text)?;
        let sock = options.meet().map_err(text)?;
        Ok(Self {
            handle,
            _host: host,
            options,
            sock,
            pd,
            region,
            mr,
            no_rights,
            live: None,
            peer: None,
            window: None,
            window_key: Rkey::new(0),
        })
    }

    pub(crate) fn peer(&self) -> Result<Hello, String> {
        self.peer.ok_or_else(|| "no peer".into())
    }

    pub(crate) fn remote(&self, offset: u32, key: impl Fn(Hello) -> Rkey) -> Remote {
        self.peer.map_or(Remote::default(), |p| Remote { addr: p.addr.wrapping_add(offset.into()), rkey: key(p) })
    }

    pub(crate) fn at(&self, offset: u32) -> Remote {
        self.remote(offset, |p| p.rkey)
    }

    pub(crate) fn keyed(&self, offset: u32, key: u32) -> Remote {
        self.remote(offset, |_| Rkey::new(key))
    }

    pub(crate) fn wrong_key(&self, offset: u32) -> Remote {
        self.remote(offset, |p| Rkey::new(p.rkey.get() ^ 0x5500))
    }

    pub(crate) fn no_rights(&self, offset: u32) -> Remote {
        self.remote(offset, |p| p.no_rights)
    }

    pub(crate) fn flush(&self, remote: Remote, length: u32, scope: FlushScope) -> Operation {
        Operation::Flush { remote, length, placement: FlushPlacement::Global, scope }
    }

    pub(crate) fn live(&self) -> Result<(CqHandle, QpHandle), String> {
        self.live.ok_or_else(|| "no QP".into())
    }

    pub(crate) fn sge(&self, at: u32, length: u32) -> Sge {
        Sge { addr: self.mr.iova + u64::from(at), length, lkey: self.mr.lkey }
    }

    pub(crate) fn pieces(&self, at: u32) -> Vec<Sge> {
        (0..PIECES).map(|i| self.sge(at + i * 2 * PIECE, PIECE)).collect()
    }

    pub(crate) fn post_recv(&mut self, at: u32, length: u32, split: bool) -> Outcome {
        let sges = if split { self.pieces(at) } else { vec![self.sge(at, length)] };
        let (_, qp) = self.live()?;
        self.handle.post_recv(qp, &[RecvWr { wr_id: 0, sges: &sges }]).map_err(text)
    }

    pub(crate) fn post_list(&mut self, operation: Operation, sges: &[Sge]) -> Outcome {
        let (_, qp) = self.live()?;
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 0, operation, payload: Payload::Sges(sges), flags, destination: None };
        self.handle.post_send(qp, &[wr]).map_err(text)
    }

    pub(crate) fn post(&mut self, operation: Operation, at: u32, length: u32) -> Outcome {
        let sge = [self.sge(at, length)];
        self.post_list(operation, if length == 0 { &[] } else { &sge })
    }

    pub(crate) fn next_completion(&mut self) -> Result<WorkCompletion, String> {
        let (cq, qp) = self.live()?;
        let blank = WorkCompletion::blank(qp);
        let mut one = [blank];
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if self.handle.poll_cq(cq, &mut one).map_err(text)? == 1 {
                return Ok(one[0]);
            }
            self.handle.wait_cq(cq, Some(Duration::from_millis(100))).map_err(text)?;
        }
        Err("no completion".into())
    }

    pub(crate) fn completes(&mut self, what: &str, status: WcStatus) -> Outcome {
        let wc = self.next_completion()?;
        if wc.status == status { Ok(()) } else { Err(format!("{what} completed with {:?}", wc.status)) }
    }

    pub(crate) fn does(&mut self, operation: Operation, at: u32, length: u32) -> Outcome {
        self.post(operation, at, length)?;
        self.completes("the request", WcStatus::Success)
    }

    pub(crate) fn does_in_pieces(&mut self, operation: Operation, at: u32) -> Outcome {
        let pieces = self.pieces(at);
        self.post_list(operation, &pieces)?;
        self.completes("the request", WcStatus::Success)
    }

    pub(crate) fn refused(&mut self, operation: Operation) -> Outcome {
        let length = if operation.is_atomic() { 8 } else { 64 };
        self.post(operation, FROM_AT, length)?;
        self.completes("the request", WcStatus::RemoteAccess)
    }

    pub(crate) fn sends_in_vain(&mut self, status: WcStatus) -> Outcome {
        self.post(Operation::Send, FROM_AT, 64)?;
        self.completes("SEND", status)
    }

    pub(crate) fn received(&mut self, length: u32, data: WcData) -> Outcome {
        let wc = self.next_completion()?;
        if (wc.status, wc.byte_len, wc.data) == (WcStatus::Success, length, data) {
            return Ok(());
        }
        Err(format!("the receive: {:?}, {} bytes, {:?}", wc.status, wc.byte_len, wc.data))
    }

    pub(crate) fn got_send(&mut self, length: u32, data: WcData) -> Outcome {
        self.received(length, data)?;
        self.holds("SEND", RECV_AT, length, FROM_AT, OURS)
    }

    pub(crate) fn bytes(&self, at: u32, length: u32) -> Result<Vec<u8>, String> {
        let mut out = vec![0; length as usize];
        self.region.read(at as usize, &mut out).map_err(text)?;
        Ok(out)
    }

    pub(crate) fn holds(&self, what: &str, at: u32, length: u32, from: u32, seed: u8) -> Outcome {
        let got = self.bytes(at, length)?;
        match (0..length).zip(&got).find(|(i, byte)| **byte != pattern(from + i, seed)) {
            Some((i, _)) => Err(format!("{what}: byte {i} is wrong")),
            None => Ok(()),
        }
    }

    pub(crate) fn word_is(&self, what: &str, at: u32, value: u64) -> Outcome {
        let got: [u8; 8] = self.bytes(at, 8)?.try_into().map_err(|_| "8 bytes")?;
        let got = u64::from_ne_bytes(got);
        if got == value { Ok(()) } else { Err(format!("{what} is {got:x}")) }
    }

    /// The window through which the peer writes and which it takes away.
    pub(crate) fn make_window(&mut self) -> Outcome {
        let window = self.handle.alloc_mw(self.pd, MwType::Two).map_err(text)?;
        self.window = Some(window.handle);
        // The low 8 bits of the key are ours to choose.
        self.window_key = Rkey::new(window.rkey.get() & !0xFF | window.rkey.get().wrapping_add(1) & 0xFF);
        Ok(())
    }

    pub(crate) fn bind_window(&mut self) -> Outcome {
        let Some(mw) = self.window else { return Ok(()) };
        let bind = MwBind {
            mw,
            rkey: self.window_key,
            mr: Some(self.mr.handle),
            addr: self.mr.iova + u64::from(WINDOW_AT),
            length: WINDOW_LEN,
            access: AccessFlags::REMOTE_WRITE,
        };
        self.post_list(Operation::BindMw(bind), &[])?;
        self.completes("the bind", WcStatus::Success)
    }

    // ---- a test's QP

    pub(crate) fn make_qp(&mut self) -> Result<(), VerbsError> {
        let cq = self.handle.create_cq(256)?;
        let caps = QpCapabilities { max_send_sge: PIECES, max_recv_sge: PIECES, ..QpCapabilities::default() };
        let (pd, qp_type) = (self.pd, QpType::Rc);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = self.handle.create_qp(init)?;
        self.live = Some((cq, qp));
        let rights = AccessFlags::ALL;
        let flushing = QpTransition::Init(InitAttr::connected(rights | AccessFlags::FLUSH_GLOBAL));
        self.handle
            .modify_qp(qp, flushing.into())
            .or_else(|_| self.handle.modify_qp(qp, QpTransition::Init(InitAttr::connected(rights)).into()))
    }

    pub(crate) fn meet(&mut self, test: &Test) -> Result<(), String> {
        let (_, qp) = self.live()?;
        let gids = self.handle.query_gids();
        let gid = gids.get(usize::from(self.options.gid)).ok_or("no such GID")?.gid;
        let ours = Hello {
            addr: self.mr.iova,
            gid,
            qpn: self.handle.query_qp(qp).map_err(text)?.qpn,
            psn: test.psn,
            rkey: self.mr.rkey,
            no_rights: self.no_rights.rkey,
            window: self.window_key,
        };
        self.sock.write_all(&ours.to_bytes()).map_err(text)?;
        let mut theirs = [0; Hello::LEN];
        self.sock.read_exact(&mut theirs).map_err(text)?;
        self.peer = Some(Hello::from_bytes(&theirs));
        Ok(())
    }

    pub(crate) fn connect_qp(&mut self, test: &Test) -> Outcome {
        let ((_, qp), peer) = (self.live()?, self.peer()?);
        let rtr = RtrAttr {
            av: AddressVector::new(peer.gid, self.options.gid),
            path_mtu: self.options.mtu,
            dest_qpn: peer.qpn,
            rq_psn: peer.psn,
            max_dest_rd_atomic: DEPTH,
            min_rnr_timer: RnrTimer::from_wire(RNR_CODE),
        };
        let rts = RtsAttr {
            sq_psn: test.psn,
            timeout: AckTimeout::new(test.timeout).unwrap_or(AckTimeout::DEFAULT),
            retry_count: RetryCount::new(test.retry).unwrap_or(RetryCount::MAX),
            rnr_retry: RnrRetry::new(test.rnr_retry).unwrap_or(RnrRetry::FOREVER),
            max_rd_atomic: DEPTH,
        };
        self.handle.modify_qp(qp, QpTransition::Rtr(rtr).into()).map_err(text)?;
        self.handle.modify_qp(qp, QpTransition::Rts(rts).into()).map_err(text)
    }

    pub(crate) fn in_step(&mut self) -> Result<(), String> {
        self.sock.write_all(&[0]).and_then(|()| self.sock.read_exact(&mut [0])).map_err(text)
    }

    /// The steps on the requester's or the responder's side; those over TCP are always taken, so that both stay in step.
    pub(crate) fn run(&mut self, test: &Test) -> Result<Outcome, String> {
        let client = self.options.client.is_some();
        let fill: Vec<u8> = (0..REGION).map(|at| pattern(at, if client { OURS } else { THEIRS })).collect();
        self.region.write(0, &fill).map_err(text)?;
        self.region.write(COUNTER_AT as usize, &OLD.to_ne_bytes()).map_err(text)?;
        (self.window, self.window_key) = (None, Rkey::new(0));
        self.make_qp().map_err(text)?;
        let mut outcome = if client { Ok(()) } else { (test.prepare)(self) };
        self.meet(test)?;
        if client || !test.deaf {
            outcome = outcome.and_then(|()| self.connect_qp(test));
        }
        outcome = outcome.and_then(|()| self.bind_window());
        self.in_step()?;
        if client {
            outcome = outcome.and_then(|()| (test.request)(self));
        } else if test.late {
            std::thread::sleep(LATE);
            outcome = outcome.and_then(|()| one_receive(self));
        }
        self.in_step()?;
        if !client {
            outcome = outcome.and_then(|()| (test.check)(self));
        }
        self.in_step()?;
        self.clear_away().map_err(text)?;
        Ok(outcome)
    }

    pub(crate) fn clear_away(&mut self) -> Result<(), VerbsError> {
        if let Some((cq, qp)) = self.live.take() {
            self.handle.destroy_qp(qp)?;
            self.handle.destroy_cq(cq)?;
        }
        self.window.take().map_or(Ok(()), |mw| self.handle.dealloc_mw(mw))
    }
}
