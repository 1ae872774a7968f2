//! The game of ibv_srq_pingpong: a ball on each of several RC QPs, all of which receive from one SRQ.
//!
//! Owns the QPs, the SRQ and the count of messages over all QPs. The exchange and the checks are those of the other
//! kinds.

use std::time::{Duration, Instant};

use uroce::types::Gid;
use uroce::verbs::{
    AccessFlags, InitAttr, Operation, Payload, PdHandle, QpCapabilities, QpHandle, QpInit, QpTransition, QpType,
    RecvWr, SendFlags, SendWr, SrqHandle, SrqInit, WcOpcode,
};

use super::exchange::Dest;
use super::{Ends, PingpongArgs, Role, check, has_size, meet, next_completion, report, silence, transitions};
use crate::exit::Failure;
use crate::node::Handle;
use crate::rdma::{self, Buffer, Poller};
use crate::report::Output;

/// Most QPs. The exchange always has this many messages.
pub(super) const QPS_MAX: u16 = 256;
/// QPs of a game that names no number.
const QPS_DEFAULT: u16 = 16;

/// Plays in either role.
pub(super) fn run(
    args: &PingpongArgs,
    v: &mut Handle,
    gid: Gid,
    role: Role<'_>,
    out: &mut Output,
) -> Result<(), Failure> {
    let (qps, depth) = (args.num_qp.unwrap_or(QPS_DEFAULT), args.rx_depth);
    if u32::from(qps) > depth {
        return Err(Failure::Usage(format!(
            "{qps} QPs need a receive each, and -r {depth} makes fewer; try a larger -r or a smaller -q"
        )));
    }
    let mut tables = Tables::lay(v, args, qps)?;
    let mine = tables.dests(v, gid)?;
    for dest in &mine {
        out.line(format_args!("  local address:  {dest}"))?;
    }
    out.flush()?;
    let mut told = mine.clone();
    told.resize(QPS_MAX.into(), Dest::NONE);
    let mut theirs = meet(args, role, &told, |theirs| tables.connect(v, args, &mine, theirs))?;
    theirs.truncate(mine.len());
    for dest in &theirs {
        out.line(format_args!("  remote address: {dest}"))?;
    }
    let elapsed = tables.play(v, args)?;
    tables.poller.linger(v, args.linger())?;
    let verdict = if args.chk { check::verify(&tables.buffer.read(0, tables.size)?, check::FILL_SRQ) } else { Ok(()) };
    report(args, out, &Ends { local: mine, remote: theirs }, elapsed, args.chk && verdict.is_ok())?;
    verdict
}

/// A QP and what it waits for before it throws again.
struct Table {
    qp: QpHandle,
    awaits_send: bool,
    awaits_receive: bool,
}

struct Tables {
    qps: u32,
    size: usize,
    /// Where the message that is sent stands: a server returns what it received.
    outgoing: usize,
    srq: SrqHandle,
    tables: Vec<Table>,
    poller: Poller,
    buffer: Buffer,
}

impl Tables {
    fn lay(v: &mut Handle, args: &PingpongArgs, qps: u16) -> Result<Self, Failure> {
        let size = args.size();
        let (outgoing, len) = if args.is_client() { (size, size.saturating_mul(2)) } else { (0, size) };
        let pd = v.alloc_pd()?;
        let buffer = Buffer::new(v, pd, len, AccessFlags::LOCAL_WRITE)?;
        buffer.write(0, &check::unwritten(size))?;
        if args.is_client() {
            buffer.write(outgoing, &check::message(size, check::FILL_SRQ, args.chk))?;
        }
        let srq = v.create_srq(SrqInit { pd, max_wr: args.rx_depth, max_sge: 1 })?;
        let (tables, poller) = make_qps(v, args.rx_depth, qps, pd, srq)?;
        let laid = Self { qps: qps.into(), size, outgoing, srq, tables, poller, buffer };
        laid.post_receives(v, args.rx_depth)?;
        Ok(laid)
    }

    fn dests(&self, v: &Handle, gid: Gid) -> Result<Vec<Dest>, Failure> {
        let dest = |t: &Table| Ok(Dest { lid: 0, qpn: v.query_qp(t.qp)?.qpn, psn: rdma::random_psn(), gid });
        self.tables.iter().map(dest).collect()
    }

    fn connect(&self, v: &mut Handle, args: &PingpongArgs, mine: &[Dest], theirs: &[Dest]) -> Result<(), Failure> {
        let named = theirs.iter().filter(|dest| dest.qpn != Dest::NONE.qpn).count();
        if named != mine.len() {
            let own = mine.len();
            return Err(Failure::Failed(format!("the peer has {named} QPs, not {own}; give both sides the same -q")));
        }
        for ((table, mine), theirs) in self.tables.iter().zip(mine).zip(theirs) {
            let (rtr, rts) = transitions(args, *mine, *theirs)?;
            v.modify_qp(table.qp, QpTransition::Rtr(rtr).into())?;
            v.modify_qp(table.qp, QpTransition::Rts(rts).into())?;
        }
        Ok(())
    }

    fn post_receives(&self, v: &mut Handle, count: u32) -> Result<(), Failure> {
        let sge = [self.buffer.sge(0, self.size)];
        for wr_id in 0..u64::from(count) {
            v.post_srq_recv(self.srq, &[RecvWr { wr_id, sges: &sge }])?;
        }
        Ok(())
    }

    fn throw(&mut self, v: &mut Handle, index: usize) -> Result<(), Failure> {
        let sge = [self.buffer.sge(self.outgoing, self.size)];
        let wr = SendWr {
            wr_id: 0,
            operation: Operation::Send,
            payload: Payload::Sges(&sge),
            flags: SendFlags::SIGNALED,
            destination: None,
        };
        let Some(table) = self.tables.get_mut(index) else { return Ok(()) };
        (table.awaits_send, table.awaits_receive) = (true, true);
        Ok(v.post_send(table.qp, &[wr])?)
    }

    /// Plays until as many messages as wanted went each way, on whichever QPs.
    fn play(&mut self, v: &mut Handle, args: &PingpongArgs) -> Result<Duration, Failure> {
        let begin = Instant::now();
        let (mut sent, mut received, mut posted) = (0, 0, args.rx_depth);
        if args.is_client() {
            for index in 0..self.tables.len() {
                self.throw(v, index)?;
            }
        }
        while sent < args.iters || received < args.iters {
            let Some(wc) = next_completion(v, &mut self.poller, args)? else { return Err(silence(args, received)) };
            let Some(index) = self.tables.iter().position(|t| t.qp == wc.qp) else { continue };
            let Some(table) = self.tables.get_mut(index) else { continue };
            if wc.opcode == WcOpcode::Recv {
                has_size(&wc, 0, self.size)?;
                table.awaits_receive = false;
                received += 1;
                posted -= 1;
            } else {
                table.awaits_send = false;
                sent += 1;
            }
            let free = !table.awaits_send && !table.awaits_receive;
            // There is always a receive for the ball of each QP.
            if posted <= self.qps {
                self.post_receives(v, args.rx_depth - posted)?;
                posted = args.rx_depth;
            }
            if free && sent < args.iters {
                self.throw(v, index)?;
            }
        }
        Ok(begin.elapsed())
    }
}

fn make_qps(
    v: &mut Handle,
    rx_depth: u32,
    qps: u16,
    pd: PdHandle,
    srq: SrqHandle,
) -> Result<(Vec<Table>, Poller), Failure> {
    let cq = v.create_cq(rx_depth + u32::from(qps))?;
    let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 0, ..QpCapabilities::default() };
    let (qp_type, srq) = (QpType::Rc, Some(srq));
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn: None };
    let mut tables = Vec::new();
    for _ in 0..qps {
        let qp = v.create_qp(init)?;
        v.modify_qp(qp, QpTransition::Init(InitAttr::connected(AccessFlags::NONE)).into())?;
        // A server waits for the client's throw.
        tables.push(Table { qp, awaits_send: false, awaits_receive: true });
    }
    let first = tables.first().map(|t| t.qp).ok_or_else(|| Failure::Usage("-q 0 makes no QP".into()))?;
    Ok((tables, Poller::new(cq, first)))
}
