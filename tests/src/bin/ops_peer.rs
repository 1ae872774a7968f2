//! uroce's side of `tests/rxe-vm/src/ops.c`: one operation, or one mistake, a QP, against a real rxe.
//!
//! Owns the verbs calls of each test in both roles and what must come of them; what each test is for, and the exchange
//! over TCP, are those of the C program. Prints `TEST ok` or `TEST FAIL why`, one line a test.
//!
//! `ops_peer server|client INTERFACE [-p PORT] [-a ADDR] [-g GID] [-M MTU] [--loss RATE] [--rxe-flush] TEST…`
//!
//! `--rxe-flush` gives FLUSH packets the ICRC that rxe computes, and takes it. rxe's table of opcodes names no payload
//! offset for FLUSH, so that after the bytes that belong in it the CRC runs over BTH, FETH and RETH once more.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program whose result is what it prints")]

use core::fmt::Display;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use uroce::burst::{Medium, RxBurst, TxBurst, TxRoom};
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::impair::{ImpairModel, Impaired};
use uroce::device::{Device, DeviceCapabilities, DeviceError, RxSink, TxSource};
use uroce::engine::Engine;
use uroce::host::{Handle, Host};
use uroce::raw::Region;
use uroce::types::{AckTimeout, Gid, Imm, PathMtu, Psn, Qpn, RetryCount, Rkey, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, FlushPlacement, FlushScope, InitAttr, MemoryRegion, MwBind, MwHandle, MwType,
    Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, Remote, RtrAttr,
    RtsAttr, SendFlags, SendWr, Sge, Verbs, VerbsError, WcData, WcStatus, WorkCompletion,
};

/// Bytes of registered memory, and where things lie in them: as in `ops.c`.
const REGION: u32 = 1 << 17;
const RECV_AT: u32 = 0;
const FROM_AT: u32 = 16_384;
const TO_AT: u32 = 32_768;
const RESULT_AT: u32 = 60_000;
const WINDOW_AT: u32 = 61_440;
const WINDOW_LEN: u64 = 4096;
const COUNTER_AT: u32 = 65_536;
const ROUNDS_AT: u32 = 69_632;
/// Bytes of a message of several packets.
const BIG: u32 = 5000;
const PIECES: u32 = 32;
const PIECE: u32 = 97;
const ROUNDS: u32 = 64;
const ROUND_LEN: u32 = 600;
const ATOMICS: u64 = 100;
/// READs and atomics outstanding.
const DEPTH: u8 = 4;
const LATE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(20);
const OURS: u8 = 1;
const THEIRS: u8 = 3;
const IMM: Imm = Imm::new(0xDEAD_BEEF);
const OLD: u64 = 0x1122_3344_5566_7788;
const NEW: u64 = 0xAABB_CCDD_EEFF_0011;
/// First PSN of the test that goes round.
const WRAP: Psn = Psn::from_wire(0xFF_FFE0);
const USUAL: Psn = Psn::from_wire(0x100);
/// 5.12 ms.
const RNR_CODE: u8 = 18;
const TCP_PORT: u16 = 18_516;

/// Why a test failed.
type Outcome = Result<(), String>;

fn text(e: impl Display) -> String {
    e.to_string()
}

fn pattern(at: u32, seed: u8) -> u8 {
    (at.wrapping_mul(7) as u8).wrapping_add(seed)
}

/// What the other side's QP and memory are called.
#[derive(Clone, Copy, Debug)]
struct Hello {
    addr: u64,
    gid: Gid,
    qpn: Qpn,
    psn: Psn,
    rkey: Rkey,
    no_rights: Rkey,
    window: Rkey,
}

impl Hello {
    const LEN: usize = 48;

    fn to_bytes(self) -> Vec<u8> {
        let mut out = self.addr.to_be_bytes().to_vec();
        out.extend(self.gid.to_bytes());
        let words = [self.qpn.get(), self.psn.get(), self.rkey.get(), self.no_rights.get(), self.window.get(), 0];
        out.extend(words.iter().flat_map(|w| w.to_be_bytes()));
        out
    }

    fn from_bytes(b: &[u8; Self::LEN]) -> Self {
        let word = |i: usize| u32::from_be_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let gid: [u8; 16] = core::array::from_fn(|i| b[8 + i]);
        Self {
            addr: u64::from(word(0)) << 32 | u64::from(word(4)),
            gid: Gid::from_bytes(gid),
            qpn: Qpn::from_wire(word(24)),
            psn: Psn::from_wire(word(28)),
            rkey: Rkey::new(word(32)),
            no_rights: Rkey::new(word(36)),
            window: Rkey::new(word(40)),
        }
    }
}

/// What is set up otherwise than usual.
#[derive(Clone, Copy, Debug)]
struct Test {
    name: &'static str,
    prepare: fn(&mut Bench) -> Outcome,
    request: fn(&mut Bench) -> Outcome,
    check: fn(&mut Bench) -> Outcome,
    psn: Psn,
    rnr_retry: u8,
    retry: u8,
    timeout: u8,
    /// The responder posts its receive late; it never listens.
    late: bool,
    deaf: bool,
}

type Step = fn(&mut Bench) -> Outcome;

const fn test(name: &'static str, prepare: Step, request: Step, check: Step) -> Test {
    let (rnr_retry, retry, timeout) = (7, 7, 17);
    Test { name, prepare, request, check, psn: USUAL, rnr_retry, retry, timeout, late: false, deaf: false }
}

const TESTS: &[Test] = &[
    test("send", one_receive, |b| b.does(Operation::Send, FROM_AT, BIG), |b| b.got_send(BIG, WcData::None)),
    test("send-imm", one_receive, |b| b.does(Operation::SendImm(IMM), FROM_AT, 100), |b| b.got_send(100, imm())),
    test("send-0", one_receive, |b| b.does(Operation::Send, FROM_AT, 0), |b| b.got_send(0, WcData::None)),
    test("send-sge32", pieces_receive, |b| b.does_in_pieces(Operation::Send, FROM_AT), got_pieces),
    test("send-inv", one_receive_and_window, send_inv, got_inv),
    test("write", nothing, |b| b.does(Operation::Write(b.at(TO_AT)), FROM_AT, BIG), got_write),
    test("write-imm", one_receive, |b| b.does(Operation::WriteImm(b.at(TO_AT), IMM), FROM_AT, 33), got_write_imm),
    test("write-0", nothing, |b| b.does(Operation::Write(b.keyed(TO_AT, 0x1234)), FROM_AT, 0), untouched),
    test("read", nothing, read_big, untouched),
    test("read-0", nothing, |b| b.does(Operation::Read(b.keyed(FROM_AT, 0x1234)), TO_AT, 0), untouched),
    test("read-sge32", nothing, read_pieces, untouched),
    test("cmp-swap", nothing, compare_swap, |b| b.word_is("the word", COUNTER_AT, NEW)),
    test("fetch-add", nothing, fetch_add, |b| b.word_is("the counter", COUNTER_AT, OLD + 3 * ATOMICS)),
    test("bad-key-write", nothing, |b| b.refused(Operation::Write(b.wrong_key(TO_AT))), untouched),
    test("bad-key-read", nothing, |b| b.refused(Operation::Read(b.wrong_key(FROM_AT))), untouched),
    test("bad-key-atomic", nothing, |b| b.refused(add(b.wrong_key(COUNTER_AT))), untouched),
    test("bad-range-write", nothing, |b| b.refused(Operation::Write(b.at(REGION - 32))), untouched),
    test("bad-range-read", nothing, |b| b.refused(Operation::Read(b.at(REGION - 32))), untouched),
    test("bad-range-atomic", nothing, |b| b.refused(add(b.at(REGION))), untouched),
    test("bad-range-wrap", nothing, range_wraps, untouched),
    test("no-right-write", nothing, |b| b.refused(Operation::Write(b.no_rights(TO_AT))), untouched),
    test("no-right-read", nothing, |b| b.refused(Operation::Read(b.no_rights(FROM_AT))), untouched),
    test("no-right-atomic", nothing, |b| b.refused(add(b.no_rights(COUNTER_AT))), untouched),
    test("too-long", |b| b.post_recv(RECV_AT, 16, false), too_long, got_too_long),
    Test { late: true, ..test("rnr", nothing, |b| b.does(Operation::Send, FROM_AT, BIG), got_late) },
    Test { rnr_retry: 2, ..test("rnr-exhausted", nothing, |b| b.sends_in_vain(WcStatus::RnrRetryExceeded), untouched) },
    Test {
        retry: 2,
        timeout: 12,
        deaf: true,
        ..test("retry-exhausted", nothing, |b| b.sends_in_vain(WcStatus::RetryExceeded), untouched)
    },
    Test { timeout: 14, ..test("rounds", round_receives, rounds, got_rounds) },
    Test { psn: WRAP, ..test("psn-wrap", round_receives, rounds, got_rounds) },
    test("flush", nothing, flush_range, got_write),
    test("flush-region", nothing, |b| b.does(b.flush(b.at(0), 0, FlushScope::Region), 0, 0), nothing),
    test("bad-key-flush", nothing, flush_bad_key, nothing),
    test("atomic-write", nothing, |b| b.does(Operation::AtomicWrite(b.at(COUNTER_AT)), FROM_AT, 8), got_atomic_write),
    test("bad-key-atomic-write", nothing, atomic_write_bad_key, nothing),
];

const fn imm() -> WcData {
    WcData::Imm(IMM)
}

fn add(remote: Remote) -> Operation {
    Operation::FetchAdd { remote, add: 1 }
}

// ---- the requester's steps

fn send_inv(b: &mut Bench) -> Outcome {
    let window = Remote { addr: b.at(WINDOW_AT).addr, rkey: b.peer()?.window };
    b.does(Operation::Write(window), FROM_AT, 64)?;
    b.does(Operation::SendInvalidate(window.rkey), FROM_AT, 20)?;
    b.refused(Operation::Write(window))
}

fn read_big(b: &mut Bench) -> Outcome {
    b.does(Operation::Read(b.at(FROM_AT)), TO_AT, BIG)?;
    b.holds("READ", TO_AT, BIG, FROM_AT, THEIRS)
}

fn read_pieces(b: &mut Bench) -> Outcome {
    b.does_in_pieces(Operation::Read(b.at(FROM_AT)), TO_AT)?;
    (0..PIECES).try_for_each(|i| b.holds("READ", TO_AT + i * 2 * PIECE, PIECE, FROM_AT + i * PIECE, THEIRS))
}

fn compare_swap(b: &mut Bench) -> Outcome {
    let remote = b.at(COUNTER_AT);
    b.does(Operation::CompareSwap { remote, compare: OLD, swap: NEW }, RESULT_AT, 8)?;
    b.word_is("what was there", RESULT_AT, OLD)?;
    b.does(Operation::CompareSwap { remote, compare: OLD, swap: 5 }, RESULT_AT, 8)?;
    b.word_is("what was there then", RESULT_AT, NEW)
}

fn fetch_add(b: &mut Bench) -> Outcome {
    let operation = Operation::FetchAdd { remote: b.at(COUNTER_AT), add: 3 };
    let mut posted = 0;
    for done in 0..ATOMICS {
        while posted < ATOMICS && posted - done < 2 * u64::from(DEPTH) {
            b.post(operation, RESULT_AT, 8)?;
            posted += 1;
        }
        b.completes("FETCH_ADD", WcStatus::Success)?;
    }
    b.word_is("what was there", RESULT_AT, OLD + 3 * (ATOMICS - 1))
}

fn range_wraps(b: &mut Bench) -> Outcome {
    b.refused(Operation::Write(Remote { addr: 0_u64.wrapping_sub(32), ..b.at(0) }))
}

fn too_long(b: &mut Bench) -> Outcome {
    b.post(Operation::Send, FROM_AT, 64)?;
    let wc = b.next_completion()?;
    // IBTA: an invalid request. rxe as responder says operational error.
    match wc.status {
        WcStatus::RemoteInvalidRequest | WcStatus::RemoteOperation => Ok(()),
        status => Err(format!("SEND completed with {status:?}")),
    }
}

fn rounds(b: &mut Bench) -> Outcome {
    let mut posted = 0;
    for done in 0..4 * ROUNDS {
        while posted < ROUNDS && 4 * posted < done + 4 * u32::from(DEPTH) {
            b.post(Operation::Send, ROUNDS_AT + posted * ROUND_LEN, ROUND_LEN)?;
            b.post(Operation::Write(b.at(TO_AT)), FROM_AT, BIG)?;
            b.post(Operation::Read(b.at(FROM_AT)), TO_AT, BIG)?;
            b.post(add(b.at(COUNTER_AT)), RESULT_AT, 8)?;
            posted += 1;
        }
        b.completes("a request", WcStatus::Success)?;
    }
    b.holds("READ", TO_AT, BIG, FROM_AT, THEIRS)?;
    b.word_is("what was there", RESULT_AT, OLD + u64::from(ROUNDS) - 1)
}

fn flush_range(b: &mut Bench) -> Outcome {
    b.does(Operation::Write(b.at(TO_AT)), FROM_AT, BIG)?;
    b.does(b.flush(b.at(TO_AT), BIG, FlushScope::Range), 0, 0)
}

fn flush_bad_key(b: &mut Bench) -> Outcome {
    b.post(b.flush(b.wrong_key(TO_AT), BIG, FlushScope::Range), 0, 0)?;
    b.completes("FLUSH", WcStatus::RemoteAccess)
}

fn atomic_write_bad_key(b: &mut Bench) -> Outcome {
    b.post(Operation::AtomicWrite(b.wrong_key(COUNTER_AT)), FROM_AT, 8)?;
    b.completes("ATOMIC_WRITE", WcStatus::RemoteAccess)
}

// ---- the responder's steps: before the QPs meet, and when the requester is done

fn nothing(_: &mut Bench) -> Outcome {
    Ok(())
}

fn one_receive(b: &mut Bench) -> Outcome {
    b.post_recv(RECV_AT, 8192, false)
}

fn one_receive_and_window(b: &mut Bench) -> Outcome {
    b.make_window()?;
    one_receive(b)
}

fn pieces_receive(b: &mut Bench) -> Outcome {
    b.post_recv(RECV_AT, 0, true)
}

fn round_receives(b: &mut Bench) -> Outcome {
    (0..ROUNDS).try_for_each(|i| b.post_recv(ROUNDS_AT + i * ROUND_LEN, ROUND_LEN, false))
}

fn got_late(b: &mut Bench) -> Outcome {
    b.got_send(BIG, WcData::None)
}

fn got_pieces(b: &mut Bench) -> Outcome {
    b.received(PIECES * PIECE, WcData::None)?;
    (0..PIECES).try_for_each(|i| {
        let at = i * 2 * PIECE;
        b.holds("SEND", RECV_AT + at, PIECE, FROM_AT + at, OURS)
    })
}

fn got_inv(b: &mut Bench) -> Outcome {
    let key = b.window_key;
    b.received(20, WcData::Invalidated(key))?;
    b.holds("WRITE", WINDOW_AT, 64, FROM_AT, OURS)
}

fn got_write(b: &mut Bench) -> Outcome {
    b.holds("WRITE", TO_AT, BIG, FROM_AT, OURS)
}

fn got_write_imm(b: &mut Bench) -> Outcome {
    b.received(33, imm())?;
    b.holds("WRITE", TO_AT, 33, FROM_AT, OURS)
}

fn untouched(b: &mut Bench) -> Outcome {
    b.holds("memory", 0, COUNTER_AT, 0, THEIRS)?;
    b.word_is("the counter", COUNTER_AT, OLD)
}

fn got_too_long(b: &mut Bench) -> Outcome {
    let wc = b.next_completion()?;
    if wc.status == WcStatus::Success { Err("the receive succeeded".into()) } else { Ok(()) }
}

fn got_rounds(b: &mut Bench) -> Outcome {
    for _ in 0..ROUNDS {
        b.received(ROUND_LEN, WcData::None)?;
    }
    b.holds("SENDs", ROUNDS_AT, ROUNDS * ROUND_LEN, ROUNDS_AT, OURS)?;
    got_write(b)?;
    b.word_is("the counter", COUNTER_AT, OLD + u64::from(ROUNDS))
}

fn got_atomic_write(b: &mut Bench) -> Outcome {
    b.holds("ATOMIC_WRITE", COUNTER_AT, 8, FROM_AT, OURS)
}

// ---- what the steps are made of

/// One end: the endpoint, its memory, and the QP of the running test.
struct Bench {
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
    window_key: Rkey,
}

impl Bench {
    fn open(options: Options) -> Result<Self, String> {
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

    fn peer(&self) -> Result<Hello, String> {
        self.peer.ok_or_else(|| "no peer".into())
    }

    fn remote(&self, offset: u32, key: impl Fn(Hello) -> Rkey) -> Remote {
        self.peer.map_or(Remote::default(), |p| Remote { addr: p.addr.wrapping_add(offset.into()), rkey: key(p) })
    }

    fn at(&self, offset: u32) -> Remote {
        self.remote(offset, |p| p.rkey)
    }

    fn keyed(&self, offset: u32, key: u32) -> Remote {
        self.remote(offset, |_| Rkey::new(key))
    }

    fn wrong_key(&self, offset: u32) -> Remote {
        self.remote(offset, |p| Rkey::new(p.rkey.get() ^ 0x5500))
    }

    fn no_rights(&self, offset: u32) -> Remote {
        self.remote(offset, |p| p.no_rights)
    }

    fn flush(&self, remote: Remote, length: u32, scope: FlushScope) -> Operation {
        Operation::Flush { remote, length, placement: FlushPlacement::Global, scope }
    }

    fn live(&self) -> Result<(CqHandle, QpHandle), String> {
        self.live.ok_or_else(|| "no QP".into())
    }

    fn sge(&self, at: u32, length: u32) -> Sge {
        Sge { addr: self.mr.iova + u64::from(at), length, lkey: self.mr.lkey }
    }

    fn pieces(&self, at: u32) -> Vec<Sge> {
        (0..PIECES).map(|i| self.sge(at + i * 2 * PIECE, PIECE)).collect()
    }

    fn post_recv(&mut self, at: u32, length: u32, split: bool) -> Outcome {
        let sges = if split { self.pieces(at) } else { vec![self.sge(at, length)] };
        let (_, qp) = self.live()?;
        self.handle.post_recv(qp, &[RecvWr { wr_id: 0, sges: &sges }]).map_err(text)
    }

    fn post_list(&mut self, operation: Operation, sges: &[Sge]) -> Outcome {
        let (_, qp) = self.live()?;
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 0, operation, payload: Payload::Sges(sges), flags, destination: None };
        self.handle.post_send(qp, &[wr]).map_err(text)
    }

    fn post(&mut self, operation: Operation, at: u32, length: u32) -> Outcome {
        let sge = [self.sge(at, length)];
        self.post_list(operation, if length == 0 { &[] } else { &sge })
    }

    fn next_completion(&mut self) -> Result<WorkCompletion, String> {
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

    fn completes(&mut self, what: &str, status: WcStatus) -> Outcome {
        let wc = self.next_completion()?;
        if wc.status == status { Ok(()) } else { Err(format!("{what} completed with {:?}", wc.status)) }
    }

    fn does(&mut self, operation: Operation, at: u32, length: u32) -> Outcome {
        self.post(operation, at, length)?;
        self.completes("the request", WcStatus::Success)
    }

    fn does_in_pieces(&mut self, operation: Operation, at: u32) -> Outcome {
        let pieces = self.pieces(at);
        self.post_list(operation, &pieces)?;
        self.completes("the request", WcStatus::Success)
    }

    fn refused(&mut self, operation: Operation) -> Outcome {
        let length = if operation.is_atomic() { 8 } else { 64 };
        self.post(operation, FROM_AT, length)?;
        self.completes("the request", WcStatus::RemoteAccess)
    }

    fn sends_in_vain(&mut self, status: WcStatus) -> Outcome {
        self.post(Operation::Send, FROM_AT, 64)?;
        self.completes("SEND", status)
    }

    fn received(&mut self, length: u32, data: WcData) -> Outcome {
        let wc = self.next_completion()?;
        if (wc.status, wc.byte_len, wc.data) == (WcStatus::Success, length, data) {
            return Ok(());
        }
        Err(format!("the receive: {:?}, {} bytes, {:?}", wc.status, wc.byte_len, wc.data))
    }

    fn got_send(&mut self, length: u32, data: WcData) -> Outcome {
        self.received(length, data)?;
        self.holds("SEND", RECV_AT, length, FROM_AT, OURS)
    }

    fn bytes(&self, at: u32, length: u32) -> Result<Vec<u8>, String> {
        let mut out = vec![0; length as usize];
        self.region.read(at as usize, &mut out).map_err(text)?;
        Ok(out)
    }

    fn holds(&self, what: &str, at: u32, length: u32, from: u32, seed: u8) -> Outcome {
        let got = self.bytes(at, length)?;
        match (0..length).zip(&got).find(|(i, byte)| **byte != pattern(from + i, seed)) {
            Some((i, _)) => Err(format!("{what}: byte {i} is wrong")),
            None => Ok(()),
        }
    }

    fn word_is(&self, what: &str, at: u32, value: u64) -> Outcome {
        let got: [u8; 8] = self.bytes(at, 8)?.try_into().map_err(|_| "8 bytes")?;
        let got = u64::from_ne_bytes(got);
        if got == value { Ok(()) } else { Err(format!("{what} is {got:x}")) }
    }

    /// The window through which the peer writes and which it takes away.
    fn make_window(&mut self) -> Outcome {
        let window = self.handle.alloc_mw(self.pd, MwType::Two).map_err(text)?;
        self.window = Some(window.handle);
        // The low 8 bits of the key are ours to choose.
        self.window_key = Rkey::new(window.rkey.get() & !0xFF | window.rkey.get().wrapping_add(1) & 0xFF);
        Ok(())
    }

    fn bind_window(&mut self) -> Outcome {
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

    fn make_qp(&mut self) -> Result<(), VerbsError> {
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

    fn meet(&mut self, test: &Test) -> Result<(), String> {
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

    fn connect_qp(&mut self, test: &Test) -> Outcome {
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

    fn in_step(&mut self) -> Result<(), String> {
        self.sock.write_all(&[0]).and_then(|()| self.sock.read_exact(&mut [0])).map_err(text)
    }

    /// The steps on the requester's or the responder's side; those over TCP are always taken, so that both stay in step.
    fn run(&mut self, test: &Test) -> Result<Outcome, String> {
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

    fn clear_away(&mut self) -> Result<(), VerbsError> {
        if let Some((cq, qp)) = self.live.take() {
            self.handle.destroy_qp(qp)?;
            self.handle.destroy_cq(cq)?;
        }
        self.window.take().map_or(Ok(()), |mw| self.handle.dealloc_mw(mw))
    }
}

// ---- rxe's ICRC of a FLUSH

/// BTH, FETH and RETH; the ICRC stands behind them.
const FLUSH_LEN: usize = 32;
const FLUSH_OPCODE: u8 = 0x1C;
const ICRC_LEN: usize = 4;
/// The CRC-32 of Ethernet, reflected.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// `icrc` carried on over `bytes`.
fn carried_on(icrc: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!icrc, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// The value that carried on over `bytes` is `icrc`.
fn carried_back(icrc: u32, bytes: &[u8]) -> u32 {
    // The bit that went out at the right is the top bit of what the polynomial made of it.
    let step = |crc: u32| if crc >> 31 == 1 { (crc ^ POLYNOMIAL) << 1 | 1 } else { crc << 1 };
    !bytes.iter().rev().fold(!icrc, |crc, byte| (0..8).fold(crc, |crc, _| step(crc)) ^ u32::from(*byte))
}

/// Replaces the ICRC of `packet`, if it is a FLUSH.
fn with_icrc(packet: &mut [u8], change: fn(u32, &[u8]) -> u32) {
    if packet.len() != FLUSH_LEN + ICRC_LEN || packet[0] != FLUSH_OPCODE {
        return;
    }
    let (headers, icrc) = packet.split_at_mut(FLUSH_LEN);
    let value = u32::from_le_bytes([icrc[0], icrc[1], icrc[2], icrc[3]]);
    icrc.copy_from_slice(&change(value, headers).to_le_bytes());
}

/// A device between an endpoint and an rxe.
struct RxeFlush<D> {
    inner: D,
    on: bool,
}

impl<D: Device> Device for RxeFlush<D> {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.inner.capabilities()
    }

    fn receive(
        &mut self,
        now: uroce::time::Instant,
        budget: usize,
        sink: &mut RxSink<'_>,
    ) -> Result<usize, DeviceError> {
        let on = self.on;
        self.inner.receive(now, budget, &mut |burst: RxBurst<'_>| {
            if !on {
                return sink(burst);
            }
            let mut bytes = burst.bytes.to_vec();
            with_icrc(&mut bytes, carried_back);
            sink(RxBurst { bytes: &bytes, ..burst });
        })
    }

    fn transmit(
        &mut self,
        now: uroce::time::Instant,
        budget: usize,
        source: &mut TxSource<'_>,
    ) -> Result<usize, DeviceError> {
        let on = self.on;
        self.inner.transmit(now, budget, &mut |room: TxRoom<'_>| {
            let TxRoom { buf, headroom, .. } = room;
            let burst: TxBurst = source(TxRoom { buf: &mut *buf, ..room })?;
            let outer = if room.medium == Medium::Ip { burst.flow.header_len() } else { 0 };
            if on && burst.segments == 1 {
                with_icrc(&mut buf[headroom + outer..headroom + burst.len], carried_on);
            }
            Some(burst)
        })
    }

    fn poll_timeout(&self) -> Option<uroce::time::Instant> {
        self.inner.poll_timeout()
    }

    fn descriptor(&self) -> Option<std::os::fd::RawFd> {
        self.inner.descriptor()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        self.inner.wait(timeout)
    }
}

// ---- the command line

struct Options {
    /// The server's address; `None`: this is the server.
    client: Option<String>,
    interface: String,
    port: u16,
    gid: u8,
    mtu: PathMtu,
    loss: f64,
    rxe_flush: bool,
    tests: Vec<&'static Test>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let role = args.next().ok_or("server or client?")?;
        let interface = args.next().ok_or("which interface?")?;
        let (client, tests, mtu) = (None, Vec::new(), PathMtu::B1024);
        let mut options = Self { client, interface, port: TCP_PORT, gid: 0, mtu, loss: 0.0, rxe_flush: false, tests };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} what?"));
            match arg.as_str() {
                "-a" => options.client = Some(value()?),
                "-p" => options.port = value()?.parse().map_err(text)?,
                "-g" => options.gid = value()?.parse().map_err(text)?,
                "-M" => {
                    let bytes = value()?.parse().map_err(text)?;
                    options.mtu = PathMtu::from_bytes(bytes).ok_or("no such path MTU")?;
                }
                "--rxe-flush" => options.rxe_flush = true,
                "--loss" => options.loss = value()?.parse().map_err(text)?,
                name => options.tests.push(TESTS.iter().find(|t| t.name == name).ok_or(format!("no test {name}"))?),
            }
        }
        if (role == "client") != options.client.is_some() {
            return Err("a client has -a ADDR, a server has not".into());
        }
        Ok(options)
    }

    fn meet(&self) -> std::io::Result<TcpStream> {
        let sock = match &self.client {
            Some(server) => TcpStream::connect((server.as_str(), self.port))?,
            None => TcpListener::bind(("0.0.0.0", self.port))?.accept()?.0,
        };
        sock.set_nodelay(true)?;
        sock.set_read_timeout(Some(2 * PATIENCE))?;
        Ok(sock)
    }
}

fn run() -> Result<bool, String> {
    let options = Options::parse(std::env::args().skip(1))?;
    let tests = options.tests.clone();
    let mut bench = Bench::open(options)?;
    let mut all_ok = true;
    for test in tests {
        match bench.run(test)? {
            Ok(()) => println!("{} ok", test.name),
            Err(why) => {
                println!("{} FAIL {why}", test.name);
                all_ok = false;
            }
        }
    }
    Ok(all_ok)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("ops_peer: {why}");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_icrc_is_carried_back_to_where_it_came_from() {
        let bytes: Vec<u8> = (0..32).collect();
        assert_eq!(carried_back(carried_on(0x1234_5678, &bytes), &bytes), 0x1234_5678);
        // From nothing it is the CRC-32 that everybody knows.
        assert_eq!(carried_on(0, b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn the_peer_is_read_as_it_is_written() {
        let hello = Hello {
            addr: 0x7FA4_EF30_7000,
            gid: Gid::from_bytes([9; 16]),
            qpn: Qpn::from_wire(0x11),
            psn: WRAP,
            rkey: Rkey::new(0x244),
            no_rights: Rkey::new(2),
            window: Rkey::new(3),
        };
        let bytes: [u8; Hello::LEN] = hello.to_bytes().try_into().unwrap();
        assert_eq!(Hello::from_bytes(&bytes).to_bytes(), bytes);
    }
}
