//! The table of counters: name, aliases, trigger and proof of each, and the structure made of it.
//!
//! One macro makes both, so that no counter exists without its row.

use super::{AbsentCounter, CounterRow, Scope};

macro_rules! count {
    ($($anything:tt)*) => { 0 $(+ { let _ = stringify!($anything); 1 })* };
}

macro_rules! counters {
    (
        counters { $($name:ident: $scope:ident, $rxe:expr, $mlx5:expr, $when:literal, $test:literal;)+ }
        drops { $($reason:ident: $scope_d:ident, $drop_name:literal, $mlx5_d:expr, $when_d:literal, $test_d:literal;)+ }
    ) => {
        /// Everything that is counted: of a port, or of a QP as far as it applies. 8 bytes a counter.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $(#[doc = $when] pub $name: u64,)+
            pub(super) drops: [u64; DropReason::ALL.len()],
        }

        /// Why a received packet went no further. Each reason has a counter of its own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $(#[doc = $when_d] $reason,)+
        }

        impl DropReason {
            /// All reasons, in counter order.
            pub const ALL: [Self; count!($($reason)+)] = [$(Self::$reason),+];

            /// The counter's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $drop_name,)+
                }
            }
        }

        impl Counters {
            /// What every counter is, in the order of [`Counters::values`].
            pub const TABLE: &'static [CounterRow] = &[
                $(CounterRow {
                    name: stringify!($name),
                    rxe: $rxe,
                    mlx5: $mlx5,
                    scope: Scope::$scope,
                    trigger: $when,
                    test: $test,
                },)+
                $(CounterRow {
                    name: $drop_name,
                    rxe: None,
                    mlx5: $mlx5_d,
                    scope: Scope::$scope_d,
                    trigger: $when_d,
                    test: $test_d,
                },)+
            ];

            /// Every value, in the order of [`Counters::TABLE`].
            pub fn values(&self) -> impl Iterator<Item = u64> {
                [$(self.$name),+].into_iter().chain(self.drops)
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
}

// A row: name: whose, rxe's name, mlx5's name, trigger, test.
#[rustfmt::skip] // One row is two lines.
counters! {
counters {
    sent_pkts: Both, Some("sent_pkts"), None,
        "A packet was handed to the device, repeats and answers included.", "counters::ticks::sends_and_acks";
    rcvd_pkts: Both, Some("rcvd_pkts"), None,
        "A packet arrived that was well formed and had a right ICRC, dropped later or not.", "counters::ticks::sends_and_acks";
    sent_bytes: Both, None, None,
        "As `sent_pkts`, in bytes from BTH to ICRC.", "counters::ticks::sends_and_acks";
    rcvd_bytes: Both, None, None,
        "As `rcvd_pkts`, in bytes from BTH to ICRC.", "counters::ticks::sends_and_acks";
    duplicate_request: Qp, Some("duplicate_request"), Some("duplicate_request"),
        "A request packet arrived whose PSN is before the expected one.", "counters::ticks::a_lost_ack_makes_a_duplicate";
    out_of_seq_request: Qp, Some("out_of_seq_request"), Some("out_of_sequence"),
        "A request packet arrived whose PSN is beyond the expected one.", "counters::ticks::a_lost_packet_makes_one_nak";
    rcvd_rnr_err: Qp, Some("rcvd_rnr_err"), Some("rnr_nak_retry_err"),
        "An RNR NAK arrived for a packet that was not acknowledged yet.", "counters::ticks::no_receive_makes_an_rnr_nak";
    send_rnr_err: Qp, Some("send_rnr_err"), None,
        "A request was refused with an RNR NAK.", "counters::ticks::no_receive_makes_an_rnr_nak";
    out_of_buffer: Qp, None, Some("out_of_buffer"),
        "A packet found no receive WQE: RC refuses it with an RNR NAK, UC and UD drop it.", "counters::ticks::no_receive_makes_an_rnr_nak";
    rcvd_seq_err: Qp, Some("rcvd_seq_err"), Some("packet_seq_err"),
        "A NAK for a sequence error arrived for a packet that was not acknowledged yet.", "counters::ticks::a_lost_packet_makes_one_nak";
    sent_seq_err: Qp, None, None,
        "A request was refused with a NAK for a sequence error: once a gap.", "counters::ticks::a_lost_packet_makes_one_nak";
    ack_deferred: Qp, Some("ack_deferred"), None,
        "An ACK that waited was replaced by the next one, which covers it.", "counters::ticks::two_messages_in_one_go_share_an_ack";
    retry_exceeded_err: Qp, Some("retry_exceeded_err"), Some("req_transport_retries_exceeded"),
        "A work request failed because its transport retries were used up.", "counters::ticks::silence_uses_up_the_retries";
    retry_rnr_exceeded_err: Qp, Some("retry_rnr_exceeded_err"), Some("req_rnr_retries_exceeded"),
        "A work request failed because its RNR retries were used up.", "counters::ticks::rnr_retries_are_used_up";
    completer_retry_err: Qp, Some("completer_retry_err"), None,
        "The requester went back to its oldest unacknowledged PSN: a timeout, a NAK for a sequence error, an implied NAK. An RNR NAK does not count.", "counters::ticks::a_lost_packet_makes_one_nak";
    local_ack_timeout_err: Qp, None, Some("local_ack_timeout_err"),
        "The ACK timer ran out.", "counters::ticks::silence_uses_up_the_retries";
    implied_nak_seq_err: Qp, None, Some("implied_nak_seq_err"),
        "An answer showed that the response to an earlier READ or atomic was lost.", "counters::ticks::a_lost_read_response_is_an_implied_nak";
    retransmitted_pkts: Qp, None, None,
        "A request packet was sent whose first PSN had been sent before.", "counters::ticks::a_lost_packet_makes_one_nak";
    send_err: Qp, Some("send_err"), None,
        "A packet did not fit into what the device offers.", "counters::ticks::a_packet_that_does_not_fit_the_device";
    rdma_sends: Qp, Some("rdma_sends"), None,
        "The first packet of a work request was sent for the first time.", "counters::ticks::sends_and_acks";
    rdma_recvs: Qp, Some("rdma_recvs"), None,
        "A message was received and executed to its end, of any operation; a READ by each of its requests.", "counters::ticks::sends_and_acks";
    rx_write_requests: Qp, None, Some("rx_write_requests"),
        "A WRITE was executed to its end.", "counters::ticks::each_operation_counts_as_its_own";
    rx_read_requests: Qp, None, Some("rx_read_requests"),
        "A READ request was accepted. A long READ comes as several requests.", "counters::ticks::each_operation_counts_as_its_own";
    rx_atomic_requests: Qp, None, Some("rx_atomic_requests"),
        "An atomic or an ATOMIC WRITE was executed.", "counters::ticks::each_operation_counts_as_its_own";
    rx_flush_requests: Qp, None, None,
        "A FLUSH was executed.", "counters::ticks::each_operation_counts_as_its_own";
    sent_access_err: Qp, None, Some("resp_remote_access_errors"),
        "A request was refused with a NAK for a remote access error.", "counters::ticks::a_wrong_key_is_an_access_error_on_both_sides";
    sent_invalid_err: Qp, None, None,
        "A request was refused with a NAK for an invalid request.", "counters::ticks::a_message_too_long_for_its_receive";
    sent_operational_err: Qp, None, None,
        "A request was refused with a NAK for a remote operational error.", "counters::ticks::a_receive_without_memory_is_an_operational_error";
    resp_local_length_error: Qp, None, Some("resp_local_length_error"),
        "A SEND was refused because it is longer than its receive WQE.", "counters::ticks::a_message_too_long_for_its_receive";
    req_remote_access_errors: Qp, None, Some("req_remote_access_errors"),
        "A work request failed by a NAK for a remote access error.", "counters::ticks::a_wrong_key_is_an_access_error_on_both_sides";
    req_remote_invalid_request: Qp, None, Some("req_remote_invalid_request"),
        "A work request failed by a NAK for an invalid request.", "counters::ticks::a_message_too_long_for_its_receive";
    req_remote_operational_err: Qp, None, None,
        "A work request failed by a NAK for a remote operational error.", "counters::ticks::a_receive_without_memory_is_an_operational_error";
    req_cqe_error: Qp, None, Some("req_cqe_error"),
        "A send completed with an error, flushed ones included.", "counters::ticks::silence_uses_up_the_retries";
    req_cqe_flush_error: Qp, None, Some("req_cqe_flush_error"),
        "A send was flushed.", "counters::ticks::silence_uses_up_the_retries";
    resp_cqe_error: Qp, None, Some("resp_cqe_error"),
        "A receive completed with an error, flushed ones included.", "counters::ticks::a_message_too_long_for_its_receive";
    resp_cqe_flush_error: Qp, None, Some("resp_cqe_flush_error"),
        "A receive was flushed.", "counters::ticks::a_message_too_long_for_its_receive";
    cq_overruns: Qp, None, None,
        "A completion found its CQ full.", "counters::ticks::a_full_cq_is_counted";
    np_ecn_marked_roce_packets: Both, None, Some("np_ecn_marked_roce_packets"),
        "A packet that `rcvd_pkts` counts carried the congestion mark.", "counters::ticks::marks_and_notifications";
    np_cnp_sent: Qp, None, Some("np_cnp_sent"),
        "A congestion notification was sent, on a QP whose `QpOptions::cnp_interval` asks for them.", "counters::ticks::marks_are_told_to_the_sender";
    rp_cnp_ignored: Qp, None, Some("rp_cnp_ignored"),
        "A congestion notification arrived for the QP; nothing slows down.", "counters::ticks::marks_and_notifications";
    link_downed: Port, Some("link_downed"), None,
        "The driver said that the device failed.", "counters::ticks::a_device_that_fails_takes_the_link_down";
    probe_alarms: Port, None, None,
        "A source tried so many numbers or keys within ten seconds that it guesses: once in that time.", "counters::ticks::numbers_that_are_guessed";
}
drops {
    Malformed: Port, "drop_malformed", None,
        "The packet could not be parsed: short, bad version, unknown opcode, bad pad, wrong length for its opcode.", "counters::ticks::packets_for_nobody";
    IcrcError: Port, "drop_icrc_error", Some("rx_icrc_encapsulated"),
        "The invariant CRC is wrong.", "counters::ticks::packets_for_nobody";
    SourceAddress: Port, "drop_source_address", None,
        "The source address is nobody's: multicast, broadcast or unspecified.", "counters::ticks::packets_for_nobody";
    UnknownQp: Port, "drop_unknown_qp", None,
        "No QP has this number, or none is attached to the multicast group.", "counters::ticks::packets_for_nobody";
    QpState: Qp, "drop_qp_state", None,
        "The QP is not in a state that receives.", "counters::ticks::packets_that_a_qp_does_not_take";
    WrongTransport: Qp, "drop_wrong_transport", None,
        "The opcode's class does not fit the QP's type.", "counters::ticks::packets_that_a_qp_does_not_take";
    PKeyMismatch: Qp, "drop_pkey_mismatch", None,
        "The partition keys do not match.", "counters::ticks::packets_that_a_qp_does_not_take";
    QKeyMismatch: Qp, "drop_qkey_mismatch", None,
        "The queue key does not match.", "counters::ticks::datagrams_that_are_dropped";
    AddressMismatch: Qp, "drop_address_mismatch", None,
        "Source or destination address are not those of the connection.", "counters::ticks::packets_that_a_qp_does_not_take";
    SourcePortMismatch: Qp, "drop_source_port_mismatch", None,
        "The UDP source port is not the one that the QP is pinned to.", "counters::ticks::packets_along_a_wrong_path";
    MigrationRefused: Qp, "drop_migration_refused", None,
        "A packet asked an armed QP to migrate, along the path that it is on.", "counters::ticks::packets_along_a_wrong_path";
    AheadOfSequence: Qp, "drop_ahead_of_sequence", None,
        "A PSN ahead of the expected one, after the NAK for the gap was sent.", "counters::ticks::behind_a_gap_packets_fall_in_silence";
    ForgottenDuplicate: Qp, "drop_forgotten_duplicate", None,
        "A repeated request that is no longer remembered, or a repeated READ beyond the bound on waiting READs.", "counters::ticks::a_repeat_that_is_not_remembered";
    GhostAck: Qp, "drop_ghost_ack", None,
        "A response outside the window of unacknowledged PSNs (\"ghost ACK\").", "counters::ticks::answers_that_answer_nothing";
    UnexpectedResponse: Qp, "drop_unexpected_response", None,
        "A response that answers nothing that is outstanding.", "counters::ticks::answers_that_answer_nothing";
    NoReceiveWqe: Qp, "drop_no_receive_wqe", None,
        "A datagram or UC message found no receive WQE.", "counters::ticks::datagrams_that_are_dropped";
    ReceiveTooSmall: Qp, "drop_receive_too_small", None,
        "A datagram or UC message does not fit its receive WQE.", "counters::ticks::datagrams_that_are_dropped";
    UcSequence: Qp, "drop_uc_sequence", None,
        "A UC packet out of order: the rest of its message is dropped.", "counters::ticks::datagrams_that_are_dropped";
    Unsupported: Port, "drop_unsupported", None,
        "A known operation that this endpoint does not serve (XRC, RD).", "counters::ticks::packets_for_nobody";
    Refused: Qp, "drop_refused", None,
        "A request that the responder refuses without an answer (UC access and length errors, datagrams longer than any path MTU, a FLUSH too many at once).", "counters::ticks::datagrams_that_are_dropped";
}
}

/// Names of mlx5 that are not counted here.
pub const ABSENT: &[AbsentCounter] = &[
    AbsentCounter {
        name: "rp_cnp_handled",
        why: "No rate is lowered by a notification: `rp_cnp_ignored` counts them.",
    },
    AbsentCounter {
        name: "roce_adp_retrans",
        why: "Timeouts are those of the QP; there is no adaptive retransmission.",
    },
    AbsentCounter { name: "roce_adp_retrans_to", why: "As `roce_adp_retrans`." },
    AbsentCounter { name: "roce_slow_restart", why: "There is no slow restart." },
    AbsentCounter { name: "rx_dct_connect", why: "There is no dynamically connected transport." },
    AbsentCounter { name: "lifespan", why: "Counters are not cached: every read is of this moment." },
];
