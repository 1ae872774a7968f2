//! Each message of each exchange lost, doubled, delayed and overtaken, one fault at a time and two: all of them.

use std::collections::BTreeSet;

use uroce_cm::wire::MadKind;

use super::{Fault, ms, scenarios};

/// Lost; doubled at once; overtaken by what follows; beyond a repeat; beyond everything; and copies that come while the
/// exchange goes on, after a repeat, after TIMEWAIT.
fn faults() -> [Fault; 8] {
    [
        Fault::Drop,
        Fault::Duplicate,
        Fault::Delay(ms(4)),
        Fault::Delay(ms(300)),
        Fault::Delay(ms(7000)),
        Fault::Echo(ms(3)),
        Fault::Echo(ms(400)),
        Fault::Echo(ms(9000)),
    ]
}

#[test]
fn every_scenario_ends_as_it_should_without_faults() {
    let mut seen = BTreeSet::new();
    for scenario in scenarios() {
        seen.extend(scenario.run(&[]).into_iter().map(|(_, kind)| kind));
    }
    let all: BTreeSet<MadKind> = MadKind::ALL.into_iter().collect();
    assert_eq!(seen, all, "every kind of message takes part");
}

#[test]
fn each_message_harmed_once_in_every_way() {
    let mut runs = 0;
    for scenario in scenarios() {
        for (side, kind, nth) in places(&scenario.run(&[])) {
            for fault in faults() {
                scenario.run(&[(side, kind, nth, fault)]);
                runs += 1;
            }
        }
    }
    assert!(runs > 500, "{runs}");
}

#[test]
fn any_two_messages_harmed() {
    // The second fault may hit what the first one brought about: repeats, MRAs, refusals.
    let mut runs = 0;
    for scenario in scenarios() {
        for (side, kind, nth) in places(&scenario.run(&[])) {
            for fault in faults() {
                let first = (side, kind, nth, fault);
                for (side, kind, nth) in places(&scenario.run(&[first])) {
                    for second in [Fault::Drop, Fault::Echo(ms(400)), Fault::Delay(ms(300))] {
                        if (side, kind, nth) != (first.0, first.1, first.2) {
                            scenario.run(&[first, (side, kind, nth, second)]);
                            runs += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(runs > 5000, "{runs}");
}

/// Each message that was sent: by whom, of which kind, the how manieth (the first four of a kind).
fn places(sent: &[(usize, MadKind)]) -> Vec<(usize, MadKind, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    let all = sent.iter().map(|(side, kind)| {
        let n = counts.entry((*side, *kind)).or_insert(0);
        *n += 1;
        (*side, *kind, *n)
    });
    all.filter(|(_, _, nth)| *nth <= 4).collect()
}
