//! Counters of an endpoint, under the names that Linux's rxe gives them.
//!
//! Owns plain integers: one writer, no atomics. Names that users of mlx5 hardware know are aliases in [`Counters::list`].
//! Never decides anything.

/// Why a received packet went no further. Each reason has a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DropReason {
    /// The packet could not be parsed: short, bad version, unknown opcode, bad pad, wrong length for its opcode.
    Malformed,
    /// The invariant CRC is wrong.
    IcrcError,
    /// The outer header is not what RoCEv2 allows: fragment, options, wrong length.
    OuterHeader,
    /// No QP has this number.
    UnknownQp,
    /// The QP is not in a state that receives.
    QpState,
    /// The opcode's class does not fit the QP's type.
    WrongTransport,
    /// The partition keys do not match.
    PKeyMismatch,
    /// The queue key does not match.
    QKeyMismatch,
    /// Source or destination address are not those of the connection.
    AddressMismatch,
    /// A PSN ahead of the expected one, after the NAK for the gap was sent.
    AheadOfSequence,
    /// A repeated request that is no longer remembered.
    ForgottenDuplicate,
    /// A response outside the window of unacknowledged PSNs ("ghost ACK").
    GhostAck,
    /// A response that answers nothing that is outstanding.
    UnexpectedResponse,
    /// A datagram found no receive WQE.
    NoReceiveWqe,
    /// A datagram or UC message does not fit its receive WQE.
    ReceiveTooSmall,
    /// A UC packet out of order: the rest of its message is dropped.
    UcSequence,
    /// Refused by a filter or limit.
    Filtered,
    /// A known operation that this endpoint does not serve (XRC, FLUSH, ATOMIC WRITE, RD).
    Unsupported,
    /// A request that the responder refuses without an answer (UC access and length errors, datagrams longer than any
    /// path MTU).
    Refused,
}

impl DropReason {
    /// All reasons, in counter order.
    pub const ALL: [Self; 19] = [
        Self::Malformed,
        Self::IcrcError,
        Self::OuterHeader,
        Self::UnknownQp,
        Self::QpState,
        Self::WrongTransport,
        Self::PKeyMismatch,
        Self::QKeyMismatch,
        Self::AddressMismatch,
        Self::AheadOfSequence,
        Self::ForgottenDuplicate,
        Self::GhostAck,
        Self::UnexpectedResponse,
        Self::NoReceiveWqe,
        Self::ReceiveTooSmall,
        Self::UcSequence,
        Self::Filtered,
        Self::Unsupported,
        Self::Refused,
    ];

    /// The counter's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "drop_malformed",
            Self::IcrcError => "drop_icrc_error",
            Self::OuterHeader => "drop_outer_header",
            Self::UnknownQp => "drop_unknown_qp",
            Self::QpState => "drop_qp_state",
            Self::WrongTransport => "drop_wrong_transport",
            Self::PKeyMismatch => "drop_pkey_mismatch",
            Self::QKeyMismatch => "drop_qkey_mismatch",
            Self::AddressMismatch => "drop_address_mismatch",
            Self::AheadOfSequence => "drop_ahead_of_sequence",
            Self::ForgottenDuplicate => "drop_forgotten_duplicate",
            Self::GhostAck => "drop_ghost_ack",
            Self::UnexpectedResponse => "drop_unexpected_response",
            Self::NoReceiveWqe => "drop_no_receive_wqe",
            Self::ReceiveTooSmall => "drop_receive_too_small",
            Self::UcSequence => "drop_uc_sequence",
            Self::Filtered => "drop_filtered",
            Self::Unsupported => "drop_unsupported",
            Self::Refused => "drop_refused",
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident $(= $alias:literal)?),+ $(,)?) => {
        /// Everything that is counted, per endpoint and (as far as it applies) per QP.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)+
            drops: [u64; DropReason::ALL.len()],
        }

        impl Counters {
            /// Every counter as (name, mlx5 alias, value); drop reasons follow.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, Option<&'static str>, u64)> {
                let mut all = vec![$((stringify!($name), counters!(@alias $($alias)?), self.$name)),+];
                all.extend(DropReason::ALL.iter().map(|r| (r.name(), None, self.dropped(*r))));
                all
            }

            /// Adds every counter of `other`.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)+
                for (a, b) in self.drops.iter_mut().zip(other.drops) {
                    *a += b;
                }
            }
        }
    };
    (@alias) => { None };
    (@alias $alias:literal) => { Some($alias) };
}

counters! {
    /// Packets sent.
    sent_pkts,
    /// Packets received that were well formed and had a right ICRC.
    rcvd_pkts,
    /// Bytes sent, BTH to ICRC.
    sent_bytes,
    /// Bytes received, BTH to ICRC.
    rcvd_bytes,
    /// Requests that the responder had executed before.
    duplicate_request = "duplicate_request",
    /// Requests ahead of the expected PSN (mlx5: out_of_sequence).
    out_of_seq_request = "out_of_sequence",
    /// RNR NAKs received.
    rcvd_rnr_err = "rnr_nak_retry_err",
    /// RNR NAKs sent (mlx5 counts the want of a receive WQE).
    send_rnr_err = "out_of_buffer",
    /// NAK sequence errors received.
    rcvd_seq_err = "packet_seq_err",
    /// NAK sequence errors sent.
    sent_seq_err,
    /// ACKs put off to be coalesced.
    ack_deferred,
    /// Work requests that ran out of transport retries.
    retry_exceeded_err,
    /// Work requests that ran out of RNR retries.
    retry_rnr_exceeded_err,
    /// Times the completer went back to an earlier PSN.
    completer_retry_err,
    /// ACK timeouts.
    local_ack_timeout_err = "local_ack_timeout_err",
    /// ACKs that skipped an outstanding READ or atomic.
    implied_nak_seq_err = "implied_nak_seq_err",
    /// Packets sent again.
    retransmitted_pkts,
    /// Packets that the device would not take.
    send_err,
    /// Request messages sent for the first time.
    rdma_sends,
    /// Request messages received complete.
    rdma_recvs,
    /// WRITE messages executed.
    rx_write_requests = "rx_write_requests",
    /// READ messages executed.
    rx_read_requests = "rx_read_requests",
    /// Atomics executed.
    rx_atomic_requests = "rx_atomic_requests",
    /// NAKs for an access violation sent.
    sent_access_err = "req_remote_access_errors",
    /// NAKs for an invalid request sent.
    sent_invalid_err = "req_remote_invalid_request",
    /// NAKs for an operational error sent.
    sent_operational_err,
    /// Completions that found their CQ full.
    cq_overruns,
    /// Packets that arrived with the congestion mark.
    np_ecn_marked_roce_packets = "np_ecn_marked_roce_packets",
    /// CNPs received.
    rp_cnp_handled = "rp_cnp_handled",
}

impl Counters {
    /// Counts a dropped packet.
    #[inline]
    pub fn count_drop(&mut self, reason: DropReason) {
        if let Some(n) = self.drops.get_mut(reason as usize) {
            *n += 1;
        }
    }

    /// Packets dropped for `reason`.
    #[must_use]
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as usize).copied().unwrap_or(0)
    }

    /// Packets dropped for any reason.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        self.drops.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_counts_in_its_own_place() {
        let mut c = Counters::default();
        for (i, r) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(r as usize, i);
            c.count_drop(r);
            assert_eq!(c.dropped(r), 1);
        }
        assert_eq!(c.dropped_in_all(), DropReason::ALL.len() as u64);
        let mut names: Vec<_> = c.list().iter().map(|e| e.0).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), c.list().len());
    }
}
