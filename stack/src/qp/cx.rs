//! What a QP may touch besides itself.

use crate::counters::Counters;
use crate::cq::{self, CqTable, EventQueue};
use crate::mem::MrTable;
use crate::rng::Rng;
use crate::srq::SrqTable;
use crate::table::Slab;
use crate::time::Instant;
use crate::types::PKey;
use crate::verbs::kind;
use crate::verbs::{CqHandle, PdHandle, WcOpcode, WcStatus, WorkCompletion};
use crate::wire::Flow;

/// An address handle: the path of a datagram, its source port still open.
#[derive(Clone, Copy, Debug)]
pub struct Ah {
    /// Protection domain.
    pub pd: PdHandle,
    /// Addresses and marks.
    pub flow: Flow,
    /// A wanted source port; `None` takes the formula over the sending QPN.
    pub source_port: Option<u16>,
    /// Partition key; `None` takes that of the sending QP.
    pub pkey: Option<PKey>,
}

/// All address handles of an endpoint.
pub type AhTable = Slab<kind::Ah, Ah>;

/// The endpoint's resources, lent to a QP for one call.
pub struct Cx<'a> {
    /// The time.
    pub now: Instant,
    /// Memory regions.
    pub mrs: &'a mut MrTable,
    /// Completion queues.
    pub cqs: &'a mut CqTable,
    /// Shared receive queues.
    pub srqs: &'a mut SrqTable,
    /// Address handles.
    pub ahs: &'a AhTable,
    /// UDP source ports that the device can send from; empty: any.
    pub source_ports: &'a [u16],
    /// The P_Key table.
    pub pkeys: &'a [PKey],
    /// Random numbers, for source ports.
    pub rng: &'a mut Rng,
    /// Asynchronous events.
    pub events: &'a mut EventQueue,
    /// Counters of the QP.
    pub counters: &'a mut Counters,
    /// CQs that overran during the call: all their QPs must go to ERR.
    pub overruns: &'a mut Vec<CqHandle>,
    /// A completion of this QP was lost: it must go to ERR.
    pub lost: bool,
}

impl Cx<'_> {
    /// Puts a completion into its CQ; false when the CQ overran.
    pub fn complete(&mut self, cq: CqHandle, wc: WorkCompletion) -> bool {
        if wc.status != WcStatus::Success {
            self.count_error(&wc);
        }
        let Err(overrun) = cq::complete(self.cqs, cq, wc, self.events, self.counters) else { return true };
        if overrun.first {
            self.overruns.push(cq);
        }
        self.lost = true;
        false
    }

    fn count_error(&mut self, wc: &WorkCompletion) {
        let flushed = u64::from(wc.status == WcStatus::WorkRequestFlushed);
        if matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
            self.counters.resp_cqe_error += 1;
            self.counters.resp_cqe_flush_error += flushed;
        } else {
            self.counters.req_cqe_error += 1;
            self.counters.req_cqe_flush_error += flushed;
        }
    }
}
