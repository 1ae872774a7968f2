//! uroce's side of `tests/rxe-vm/src/ops.c`: one operation, or one mistake, a QP, against a real rxe.
//!
//! Owns the command line and the exchange of names; `cases` holds the tests, `bench` what their steps are made of. What each
//! test is for, and the exchange over TCP, are those of the C program. Prints `TEST ok` or `TEST FAIL why`, one line a test.
//!
//! `ops_peer server|client INTERFACE [-p PORT] [-a ADDR] [-g GID] [-M MTU] [--loss RATE] [--rxe-flush] TEST…`
//!
//! `--rxe-flush` gives FLUSH packets the ICRC that rxe computes, and takes it. rxe's table of opcodes names no payload
//! offset for FLUSH, so that after the bytes that belong in it the CRC runs over BTH, FETH and RETH once more.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program whose result is what it prints")]

use core::fmt::Display;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use uroce::types::{Gid, Imm, PathMtu, Psn, Qpn, Rkey};

mod bench;
mod cases;
mod rxe_flush;

use self::bench::Bench;
use self::cases::{TESTS, Test};

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
