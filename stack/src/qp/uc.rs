//! The UC receiver: messages may be lost, never torn.
//!
//! Owns the expected PSN and the message in progress. Never answers. Source: IBTA Vol 1 9.8, paraphrased.

use super::Ident;
use super::assembly::{Assembly, Refusal};
use super::cx::Cx;
use super::responder::RequestBits;
use crate::counters::DropReason;
use crate::types::Psn;
use crate::verbs::{FailureKind, WcStatus};
use crate::wire::{NakCode, Request};

/// The receive side of a UC QP.
#[derive(Debug)]
pub(crate) struct UcReceiver {
    pub(crate) assembly: Assembly,
    expected: Psn,
}

impl UcReceiver {
    pub(crate) fn new(assembly: Assembly) -> Self {
        Self { assembly, expected: Psn::ZERO }
    }

    pub(crate) fn start(&mut self, expected: Psn) {
        self.expected = expected;
    }

    pub(crate) fn reset(&mut self) {
        self.assembly.abandon();
        self.assembly.rq.discard();
        self.expected = Psn::ZERO;
    }

    pub(crate) fn expected(&self) -> Psn {
        self.expected
    }

    /// Takes one packet. The error says that the message is dropped, and why.
    pub(crate) fn on_request(
        &mut self,
        bits: RequestBits,
        request: &Request<'_>,
        id: &Ident,
        cx: &mut Cx<'_>,
    ) -> Result<(), DropReason> {
        let begins = request.op.place().begins();
        if bits.psn != self.expected {
            // A gap ends the message in progress; the next First or Only sets the PSN anew.
            self.assembly.abandon();
            if !begins {
                return Err(DropReason::UcSequence);
            }
        } else if begins {
            // A message that never saw its end.
            self.assembly.abandon();
        }
        self.expected = bits.psn.next();
        self.take(bits, request, id, cx).map_err(|refusal| {
            self.assembly.abandon();
            if matches!(refusal, Refusal::Nak { local: Some(WcStatus::LocalProtection), .. }) {
                // No message can land there, so it must not stand in the way of the next receive.
                self.assembly.rq.fail_held(WcStatus::LocalProtection, FailureKind::LocalElement, id, cx);
            }
            reason(refusal)
        })
    }

    fn take(&mut self, bits: RequestBits, request: &Request<'_>, id: &Ident, cx: &mut Cx<'_>) -> Result<(), Refusal> {
        self.assembly.check_sequence(&request.op).map_err(|_| Refusal::Drop(DropReason::UcSequence))?;
        self.assembly.check_operation(&request.op)?;
        self.assembly.check_receive(&request.op, cx)?;
        self.assembly.check_length(request, id.mtu_bytes())?;
        self.assembly.check_write_access(&request.op, id, cx)?;
        let done = self.assembly.execute(request, bits.solicited, id, cx)?;
        if done.message_done {
            cx.counters.rdma_recvs += 1;
        }
        Ok(())
    }
}

fn reason(refusal: Refusal) -> DropReason {
    match refusal {
        Refusal::Drop(reason) => reason,
        Refusal::Rnr => DropReason::NoReceiveWqe,
        Refusal::Nak { local: Some(WcStatus::LocalLength), .. } => DropReason::ReceiveTooSmall,
        Refusal::Nak { code: NakCode::PsnSequenceError, .. } => DropReason::UcSequence,
        Refusal::Nak { .. } | Refusal::Duplicate => DropReason::Refused,
    }
}
