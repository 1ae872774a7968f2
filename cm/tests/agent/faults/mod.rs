//! What a link can do to connection management, and that both sides end alike and hold nothing afterwards.

mod random;
mod single;

use uroce::time::Duration;
use uroce_cm::agent::DisconnectCause;
use uroce_cm::comm::CommState;
use uroce_cm::wire::MadKind;
use uroce_cm::{Agent, CmEvent, CommId};

use crate::pair::{A, B, Consumer, Deed, Fault, Pair, exact, ms};

/// Long enough for every repeat, every consumer's time and every TIMEWAIT to be over.
const REST: Duration = Duration::from_secs(600);

/// What the two do, and what comes of it when the link is good.
#[derive(Clone, Copy)]
struct Scenario {
    name: &'static str,
    consumers: [Consumer; 2],
    begin: fn(&mut Pair),
    end: End,
}

/// What must have come about in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A connection that stays.
    Connected,
    /// A connection that both sides know to be over.
    Parted,
    /// Both sides know that there is none, the asking side the reason.
    Refused,
    /// The asking side has an answer about a datagram service.
    Resolved,
}

const fn thinks(ms: u64) -> Consumer {
    Consumer { think: Duration::from_millis(ms), refuses: false, then: &[] }
}

const fn then(then: &'static [(u64, Deed)]) -> Consumer {
    Consumer { think: Duration::ZERO, refuses: false, then }
}

const PLAIN: Consumer = then(&[]);
const REFUSES: Consumer = Consumer { think: Duration::ZERO, refuses: true, then: &[] };
const PARTS: Consumer = then(&[(20, Deed::Disconnect)]);

fn connect(pair: &mut Pair) {
    pair.listen(B);
    pair.connect(A);
}

fn scenario(name: &'static str, a: Consumer, b: Consumer, begin: fn(&mut Pair), end: End) -> Scenario {
    Scenario { name, consumers: [a, b], begin, end }
}

/// Every message, each sent in time and late, by both sides where both can.
fn scenarios() -> Vec<Scenario> {
    let meet: fn(&mut Pair) = |pair| {
        pair.meet(A);
        pair.meet(B);
    };
    let resolve: fn(&mut Pair) = |pair| {
        pair.listen(B);
        pair.resolve(A);
    };
    let offers = then(&[(20, Deed::OfferPath)]);
    let refuses_paths = Consumer { refuses: false, ..thinks(700) };
    vec![
        scenario("connect", PLAIN, PLAIN, connect, End::Connected),
        scenario("connect, client disconnects", PARTS, PLAIN, connect, End::Parted),
        scenario("connect, server disconnects", PLAIN, PARTS, connect, End::Parted),
        scenario("connect, both disconnect", PARTS, PARTS, connect, End::Parted),
        scenario("disconnect at once", then(&[(0, Deed::Disconnect)]), PLAIN, connect, End::Parted),
        scenario("slow server", thinks(0), thinks(700), connect, End::Connected),
        scenario("slow client", thinks(1500), thinks(0), connect, End::Connected),
        scenario(
            "both slow, then over",
            Consumer { then: PARTS.then, ..thinks(900) },
            thinks(900),
            connect,
            End::Parted,
        ),
        scenario("server refuses", PLAIN, REFUSES, connect, End::Refused),
        scenario("client refuses", REFUSES, PLAIN, connect, End::Refused),
        scenario("nobody listens", PLAIN, PLAIN, |pair| _ = pair.connect(A), End::Refused),
        scenario("path offered", offers, PLAIN, connect, End::Connected),
        scenario("path offered to a slow server", offers, refuses_paths, connect, End::Connected),
        scenario(
            "path offered, then over",
            then(&[(20, Deed::OfferPath), (6000, Deed::Disconnect)]),
            PLAIN,
            connect,
            End::Parted,
        ),
        scenario(
            "path offered while parting",
            then(&[(20, Deed::OfferPath)]),
            then(&[(20, Deed::Disconnect)]),
            connect,
            End::Parted,
        ),
        scenario("equals meet", PLAIN, PLAIN, meet, End::Connected),
        scenario("equals meet and part", PARTS, PLAIN, meet, End::Parted),
        scenario("service resolved", PLAIN, PLAIN, resolve, End::Resolved),
        scenario("service of a slow server", PLAIN, thinks(700), resolve, End::Resolved),
        scenario("service refused", PLAIN, REFUSES, resolve, End::Resolved),
        scenario("service unknown", PLAIN, PLAIN, |pair| _ = pair.resolve(A), End::Resolved),
    ]
}

impl Scenario {
    /// Runs it with these faults, to the end of all repeats; checks what came of it, and that nothing is left once both
    /// consumers have let go. Returns what each side sent.
    fn run(&self, faults: &[(usize, MadKind, usize, Fault)]) -> Vec<(usize, MadKind)> {
        let what = || format!("{} with {faults:?}", self.name);
        let mut pair = Pair::with(1, exact(), exact());
        pair.consumers = self.consumers;
        for (side, kind, nth, fault) in faults {
            pair.fault(*side, *kind, *nth, *fault);
        }
        (self.begin)(&mut pair);
        pair.run_for(REST);
        self.check_end(&pair, &what);
        let sent = sent_in_order(&pair);
        assert_alike(&pair, &what);
        let_go(&mut pair);
        assert_nothing_left(&mut pair, &what);
        sent
    }

    fn check_end(&self, pair: &Pair, what: &dyn Fn() -> String) {
        let told = [pair.told(A), pair.told(B)];
        let has = |side: usize, event: &str| told[side].contains(&event);
        let live = [A, B].map(|side| pair.agents[side].communications());
        match self.end {
            End::Connected => {
                assert_eq!(live, [1, 1], "{}: {told:?}", what());
                let states = [A, B].map(|side| states(&pair.agents[side], pair, side));
                assert_eq!(states, [vec![CommState::Established], vec![CommState::Established]], "{}", what());
            }
            End::Parted => {
                assert_eq!(live, [0, 0], "{}: {told:?}", what());
                for side in [A, B] {
                    assert!(has(side, "Disconnected") && has(side, "TimewaitExit"), "{}: {told:?}", what());
                    for (_, event) in &pair.events[side] {
                        if let CmEvent::Disconnected { cause, .. } = event {
                            // A late copy of a REP may hear first that the other side has forgotten it.
                            let known = matches!(cause, DisconnectCause::Agreed | DisconnectCause::Rejected(_));
                            assert!(known, "{}: {cause:?}", what());
                        }
                    }
                }
            }
            End::Refused => {
                assert_eq!(live, [0, 0], "{}: {told:?}", what());
                // It is the one that is told, unless it is the one that refused.
                assert!(has(A, "Rejected") || self.consumers[A].refuses, "{}: {told:?}", what());
                assert!(!has(A, "Established") && !has(B, "Established"), "{}: {told:?}", what());
            }
            End::Resolved => {
                assert_eq!(told[A], ["ServiceReply"], "{}", what());
            }
        }
    }
}

fn sent_in_order(pair: &Pair) -> Vec<(usize, MadKind)> {
    [A, B].iter().flat_map(|side| pair.sent[*side].iter().map(move |(_, m)| (*side, m.message.kind()))).collect()
}

/// States of the communications that a side's consumer has.
fn states(agent: &Agent, pair: &Pair, side: usize) -> Vec<CommState> {
    pair.terms[side].iter().filter_map(|(comm, _)| agent.state(*comm)).collect()
}

/// What is left is established, and each connection is there on both sides with the same terms.
fn assert_alike(pair: &Pair, what: &dyn Fn() -> String) {
    let live = [A, B].map(|side| {
        let alive = pair.terms[side].iter().filter(|(comm, _)| pair.agents[side].state(*comm).is_some());
        alive.map(|(comm, terms)| (*comm, *terms)).collect::<Vec<_>>()
    });
    for side in [A, B] {
        assert_eq!(live[side].len(), pair.agents[side].communications(), "{}: half open for ever", what());
        for (comm, terms) in &live[side] {
            assert_eq!(pair.agents[side].state(*comm), Some(CommState::Established), "{}", what());
            let other = live[1 - side].iter().find(|(_, t)| t.local_qpn == terms.remote_qpn).map(|o| o.1);
            let other = other.unwrap_or_else(|| {
                panic!("{}: one side alone is connected: {:?}", what(), [pair.ladder(A), pair.ladder(B)])
            });
            assert_eq!((other.remote_qpn, other.sq_psn, other.rq_psn), (terms.local_qpn, terms.rq_psn, terms.sq_psn));
            assert_eq!(
                (other.max_rd_atomic, other.max_dest_rd_atomic),
                (terms.max_dest_rd_atomic, terms.max_rd_atomic)
            );
        }
        assert_eq!((pair.agents[side].half_open(), pair.agents[side].in_timewait()), (0, 0), "{}", what());
        assert_eq!(pair.agents[side].service_exchanges(), 0, "{}", what());
        assert_eq!(pair.agents[side].poll_timeout(), None, "{}: at rest", what());
    }
}

/// Both consumers drop what they have.
fn let_go(pair: &mut Pair) {
    for side in [A, B] {
        let comms: Vec<CommId> = pair.terms[side].iter().map(|(comm, _)| *comm).collect();
        for comm in comms {
            pair.agents[side].abandon(pair.now, comm);
        }
    }
    pair.run_for(REST);
}

fn assert_nothing_left(pair: &mut Pair, what: &dyn Fn() -> String) {
    for side in [A, B] {
        let agent = &mut pair.agents[side];
        let left = (agent.communications(), agent.half_open(), agent.in_timewait(), agent.service_exchanges());
        assert_eq!(left, (0, 0, 0, 0), "{}", what());
        assert_eq!((agent.poll_mad(), agent.poll_event(), agent.poll_timeout()), (None, None, None), "{}", what());
    }
}
