//! R26: over random runs with loss, duplicates, damage, RNR and dead peers, every counter of every port and QP equals
//! what an independent reader of the packets computes.
//!
//! The reader knows the wire format and the rules of the transport, and none of the code under test. Of what is not on
//! the wire it is told when a receive was posted, when a program moved a QP to ERR, which completions were errors, and
//! when an endpoint was told the time. `UROCE_TRUTH_SEEDS` runs that many seeds (200 by default), `UROCE_TRUTH_SEED` one.

mod packet;
mod requester;
mod responder;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use uroce::counters::Counters;
use uroce::qp::MAX_READ_PSNS;
use uroce::sim::{NodeId, TapEvent};
use uroce::types::Qpn;
use uroce::wire::Flow;

use crate::sim_exchange::{Beside, Remains, run_watched};
use packet::{Bad, Head, is_intact, read};
use requester::{Failed, Limits, Requester};
use responder::Responder;

/// Seeds of a run, unless the environment says otherwise.
const SEEDS: u64 = 200;

/// What was counted, by name.
#[derive(Clone, Debug, Default)]
struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    fn add(&mut self, name: &'static str) {
        self.add_many(name, 1);
    }

    fn add_many(&mut self, name: &'static str, n: usize) {
        *self.0.entry(name).or_default() += n as u64;
    }

    /// Equal in every counter that there is.
    fn assert_is(&self, counters: &Counters, what: &str) {
        for (row, found) in counters.rows() {
            let computed = self.0.get(row.name).copied().unwrap_or(0);
            assert_eq!(found, computed, "{} of {what}: counted and computed", row.name);
        }
        let known: BTreeSet<_> = Counters::TABLE.iter().map(|row| row.name).collect();
        assert!(self.0.keys().all(|name| known.contains(name)), "{:?}", self.0.keys());
    }
}

/// An event of the trace.
enum Event {
    Sent(Vec<u8>),
    Arrived(Flow, u16, Vec<u8>),
    Timeout,
    Beside(Qpn, Beside),
}

/// An end of a connection as the reader sees it.
struct End {
    node: NodeId,
    qpn: u32,
    peer: u32,
    requester: Requester,
    responder: Responder,
    in_error: bool,
    tally: Tally,
}

impl End {
    fn follow(&mut self, outcome: Result<(), Failed>) {
        if outcome.is_err() {
            self.fail();
        }
    }

    fn fail(&mut self) {
        self.in_error = true;
        self.responder.silence();
    }
}

struct Reader {
    ends: Vec<End>,
    ports: BTreeMap<NodeId, Tally>,
    /// Packets as they were sent: what arrives as one of them is undamaged.
    sent: BTreeSet<Vec<u8>>,
}

impl Reader {
    fn new(remains: &Remains) -> Self {
        let s = &remains.scenario;
        // A READ request asks for half of what may be in flight, and for one packet at least.
        let half = |bytes: u64| u32::try_from(bytes / s.mtu.bytes() as u64 / 2).unwrap();
        let limits = Limits {
            mtu: u32::try_from(s.mtu.bytes()).unwrap(),
            timeout: u64::try_from(s.timeout.duration().unwrap().as_nanos()).unwrap(),
            retries: s.retries.get(),
            rnr_retries: s.rnr_retries.limit(),
            read_psns: s.options.max_in_flight.map_or(MAX_READ_PSNS, half).clamp(1, MAX_READ_PSNS),
        };
        let end = |(us, end): (usize, &crate::sim_exchange::End)| {
            let [ours, theirs] = [us % 2, 1 - us % 2].map(|side| s.first_psn[side].get());
            End {
                node: end.node,
                qpn: end.qpn.get(),
                peer: remains.ends[us ^ 1].qpn.get(),
                requester: Requester::new(limits, ours),
                responder: Responder::new(limits.mtu, s.reads.into(), s.options.max_read_bytes, theirs),
                in_error: false,
                tally: Tally::default(),
            }
        };
        let ends = remains.ends.iter().enumerate().map(end).collect();
        let ports = remains.ports.iter().map(|(node, _)| (*node, Tally::default())).collect();
        Self { ends, ports, sent: BTreeSet::new() }
    }

    fn take(&mut self, at: u64, node: NodeId, event: Event) {
        match event {
            Event::Sent(bytes) => self.sent(at, node, bytes),
            Event::Arrived(flow, id, bytes) => self.arrived(at, node, &flow, id, &bytes),
            Event::Timeout => {
                for end in self.ends.iter_mut().filter(|end| end.node == node && !end.in_error) {
                    let outcome = end.requester.timeout(at, &mut end.tally);
                    end.follow(outcome);
                }
            }
            Event::Beside(qpn, what) => {
                let ends = &mut self.ends;
                let end = ends.iter_mut().find(|e| (e.node, e.qpn) == (node, qpn.get())).expect("a QP of this run");
                match what {
                    Beside::ReceivePosted => end.responder.receive_posted(),
                    Beside::MovedToErr => end.fail(),
                    Beside::Failed { send, flushed } => {
                        end.tally.add(if send { "req_cqe_error" } else { "resp_cqe_error" });
                        if flushed {
                            end.tally.add(if send { "req_cqe_flush_error" } else { "resp_cqe_flush_error" });
                        }
                    }
                }
            }
        }
    }

    fn sent(&mut self, at: u64, node: NodeId, bytes: Vec<u8>) {
        let head = read(&bytes).expect("what an endpoint sends is a packet");
        let port = self.ports.get_mut(&node).expect("a node of this run");
        let end = self.ends.iter_mut().find(|e| (e.node, e.peer) == (node, head.qpn)).expect("a connection");
        for tally in [port, &mut end.tally] {
            tally.add("sent_pkts");
            tally.add_many("sent_bytes", bytes.len());
        }
        if head.kind.is_request() {
            end.requester.sent(at, &head, &mut end.tally);
        } else {
            end.responder.sent(&head);
        }
        self.sent.insert(bytes);
    }

    fn arrived(&mut self, at: u64, node: NodeId, flow: &Flow, id: u16, bytes: &[u8]) {
        let port = self.ports.get_mut(&node).expect("a node of this run");
        let head: Head = match read(bytes) {
            Err(Bad::Malformed) => return port.add("drop_malformed"),
            Err(Bad::Unsupported) => return port.add("drop_unsupported"),
            Ok(_) if !self.sent.contains(bytes) && !is_intact(flow, id, bytes) => return port.add("drop_icrc_error"),
            Ok(head) => head,
        };
        let end = self.ends.iter_mut().find(|e| (e.node, e.qpn) == (node, head.qpn)).expect("a connection");
        for tally in [port, &mut end.tally] {
            tally.add("rcvd_pkts");
            tally.add_many("rcvd_bytes", bytes.len());
        }
        if end.in_error {
            end.tally.add("drop_qp_state");
        } else if head.kind.is_request() {
            end.responder.arrived(&head, &mut end.tally);
        } else {
            let outcome = end.requester.answered(at, &head, &mut end.tally);
            end.follow(outcome);
        }
    }

    fn check(self, remains: &Remains) {
        let Self { ends, mut ports, .. } = self;
        for (end, found) in ends.iter().zip(&remains.ends) {
            end.tally.assert_is(&found.counters, &format!("QP {}", found.qpn.get()));
            let port = ports.get_mut(&end.node).expect("a node of this run");
            for (name, n) in &end.tally.0 {
                if !["sent_pkts", "sent_bytes", "rcvd_pkts", "rcvd_bytes"].contains(name) {
                    *port.0.entry(name).or_default() += n;
                }
            }
        }
        for (node, found) in &remains.ports {
            ports[node].assert_is(found, &format!("port {node:?}"));
        }
    }
}

/// Runs a seed, reads its trace, and compares. Returns the counters of both ports together.
fn check(seed: u64) -> Counters {
    let log: Arc<Mutex<Vec<(u64, NodeId, Event)>>> = Arc::default();
    let (of_wire, beside) = (Arc::clone(&log), Arc::clone(&log));
    let remains = run_watched(
        seed,
        Box::new(move |at, node, event| {
            let event = match event {
                TapEvent::Sent { bytes, .. } => Event::Sent(bytes.to_vec()),
                TapEvent::Arrived { flow, id, bytes } => Event::Arrived(*flow, id, bytes.to_vec()),
                TapEvent::Timeout => Event::Timeout,
            };
            of_wire.lock().unwrap().push((at.as_nanos(), node, event));
        }),
        Box::new(move |node, qpn, what| beside.lock().unwrap().push((0, node, Event::Beside(qpn, what)))),
    );
    let mut reader = Reader::new(&remains);
    for (at, node, event) in log.lock().unwrap().drain(..) {
        reader.take(at, node, event);
    }
    reader.check(&remains);
    let mut sum = Counters::default();
    remains.ports.iter().for_each(|(_, port)| sum.add(port));
    sum
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
#[allow(clippy::print_stdout)] // The seed of a failure must be known to repeat it.
fn every_counter_equals_what_the_packets_say() {
    if let Some(seed) = number("UROCE_TRUTH_SEED") {
        check(seed);
        return;
    }
    let mut sum = Counters::default();
    for seed in 0..number("UROCE_TRUTH_SEEDS").unwrap_or(SEEDS) {
        println!("UROCE_TRUTH_SEED={seed}");
        sum.add(&check(seed));
    }
    // The runs met what they are there for.
    for name in [
        "duplicate_request",
        "out_of_seq_request",
        "rcvd_rnr_err",
        "send_rnr_err",
        "out_of_buffer",
        "rcvd_seq_err",
        "sent_seq_err",
        "ack_deferred",
        "retry_exceeded_err",
        "retry_rnr_exceeded_err",
        "completer_retry_err",
        "local_ack_timeout_err",
        "implied_nak_seq_err",
        "retransmitted_pkts",
        "rx_write_requests",
        "rx_read_requests",
        "rx_atomic_requests",
        "req_cqe_flush_error",
        "resp_cqe_flush_error",
        "drop_malformed",
        "drop_icrc_error",
        "drop_qp_state",
        "drop_ahead_of_sequence",
        "drop_ghost_ack",
    ] {
        assert!(sum.named(name) > Some(0), "no run made `{name}` tick");
    }
}
