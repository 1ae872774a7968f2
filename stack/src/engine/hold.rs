//! How long the ACK of a message waits for the program that was told of it.
//!
//! Owns the decision alone: it is told what happened and when, and says what to do next. Never reads a clock and never sends:
//! `engine` does.
//!
//! A message that arrives alone is acknowledged by the next round, so that a program that spins, or has answered promptly so
//! far, hears of it sooner. Where the program answers at once, the answer goes ahead, and the ACK waits for the peer's next message, whose ACK says as much: an
//! ACK of its own takes longer, on both sides, than everything else about a small message. A peer that waits for it before
//! it goes on is found out, as its next message does not come: the ACK goes out then, and rides with the answers from then on.

use crate::time::{Duration, Instant};

/// How long an ACK waits for the peer's next message, counted from the answer: a few of the round trips that make it worth while.
const NEXT_WITHIN: Duration = Duration::from_micros(20);
/// How long it has waited at most when an answer goes ahead of it: the next one takes it along.
const LONGEST: Duration = Duration::from_micros(100);
/// Answers that ACKs ride with after one has waited in vain, before the next tries; doubled each time that it is in vain again.
const RIDES: u32 = 64;
/// A program that posts so soon after it was told of a message answers it, and does nothing else first.
const PROMPT: Duration = Duration::from_micros(20);
/// So many prompt answers in a row make a program that may sleep one that is told first.
const PROMPT_ENOUGH: u32 = 8;
/// How often it is doubled.
const DOUBLINGS: u32 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing waits.
    Paid,
    /// The program was told of a message. `since`: an earlier ACK waits since then.
    Told { since: Option<Instant> },
    /// The answer went ahead.
    Held { since: Instant, until: Instant },
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct AckHold {
    state: State,
    /// Waits in vain, in a row.
    vain: u32,
    /// Answers that the ACK rides with before one waits again.
    rides: u32,
    /// When the program was told of a message alone, if nothing has happened since.
    asked: Option<Instant>,
    /// Prompt answers in a row, at most as many as are enough.
    prompt: u32,
}

impl AckHold {
    pub(super) const fn new() -> Self {
        Self { state: State::Paid, vain: 0, rides: 0, asked: None, prompt: 0 }
    }

    /// Whether something waits to be sent.
    pub(super) const fn owes(&self) -> bool {
        !matches!(self.state, State::Paid)
    }

    /// When what waits is to be sent; a time that has passed: by the next round.
    pub(super) const fn due(&self) -> Option<Instant> {
        match self.state {
            State::Paid => None,
            State::Told { .. } => Some(Instant::ZERO),
            State::Held { until, .. } => Some(until),
        }
    }

    /// Whether the program answers what it is told of at once, as far as is known.
    pub(super) const fn is_prompt(&self) -> bool {
        self.prompt >= PROMPT_ENOUGH
    }

    /// A round begins: whether it sends what waits.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        if self.asked.take().is_some() {
            self.prompt = 0;
        }
        if let State::Held { until, .. } = self.state
            && until <= now
        {
            self.rides = RIDES << self.vain;
            self.vain = (self.vain + 1).min(DOUBLINGS);
        }
        self.due().is_some_and(|due| due <= now)
    }

    /// A message alone came, and was acknowledged.
    pub(super) const fn asked(&mut self, now: Instant) {
        self.asked = Some(now);
    }

    /// A message alone came, whose ACK waits.
    pub(super) fn told(&mut self, now: Instant) {
        self.asked = Some(now);
        let since = match self.state {
            State::Paid => None,
            State::Told { since } => since,
            State::Held { since, .. } => {
                self.vain = 0;
                Some(since)
            }
        };
        self.state = State::Told { since };
    }

    /// The program posts. Whether that goes ahead of the ACK of what it was told of.
    pub(super) fn answered(&mut self, now: Instant) -> bool {
        if let Some(asked) = self.asked.take() {
            self.prompt = if now <= asked + PROMPT { (self.prompt + 1).min(PROMPT_ENOUGH) } else { 0 };
        }
        let State::Told { since } = self.state else { return false };
        let since = since.unwrap_or(now);
        if self.rides > 0 || since + LONGEST <= now {
            self.rides = self.rides.saturating_sub(1);
            return false;
        }
        self.state = State::Held { since, until: now + NEXT_WITHIN };
        true
    }

    /// Everything was sent.
    pub(super) const fn paid(&mut self) {
        self.state = State::Paid;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    /// A message at `micros`, and its answer; whether that went ahead.
    fn exchange(hold: &mut AckHold, micros: u64) -> bool {
        if hold.is_due(at(micros)) {
            hold.paid();
        }
        hold.told(at(micros));
        let ahead = hold.answered(at(micros));
        if !ahead {
            hold.paid();
        }
        ahead
    }

    #[test]
    fn a_message_without_an_answer_is_acknowledged_by_the_next_round() {
        let mut hold = AckHold::new();
        assert!(!hold.owes() && !hold.is_due(at(1)));
        hold.told(at(1));
        assert!(hold.owes() && hold.is_due(at(1)));
        hold.paid();
        assert!(!hold.owes());
        assert!(!hold.answered(at(2)), "a post that answers nothing");
    }

    #[test]
    fn an_ack_waits_for_the_next_message_and_no_longer_than_the_longest() {
        let mut hold = AckHold::new();
        // Round trips of 5 us: one of the ACKs in 100 us rides with an answer.
        let ahead: Vec<bool> = (0..63).map(|n| exchange(&mut hold, 5 * n)).collect();
        for (n, ahead) in ahead.iter().enumerate() {
            assert_eq!(*ahead, n % 21 != 20, "message {n}");
        }
    }

    #[test]
    fn a_second_post_takes_the_ack_along() {
        let mut hold = AckHold::new();
        assert!(exchange(&mut hold, 0));
        assert!(!hold.answered(at(1)));
    }

    #[test]
    fn a_peer_that_waits_for_its_acks_waits_seldom() {
        let mut hold = AckHold::new();
        let mut now = 0;
        let mut held = Vec::new();
        for n in 0..1000 {
            now += 5;
            if exchange(&mut hold, now) {
                held.push(n);
                // The peer's next message comes after the ACK.
                assert!(!hold.is_due(at(now + 19)) && hold.is_due(at(now + 20)));
                hold.paid();
                now += 20;
            }
        }
        assert_eq!(held, [0, 65, 194, 451, 964]);
        // A peer that goes on without is trusted again.
        for _ in 0..2000 {
            now += 5;
            exchange(&mut hold, now);
        }
        let ahead = (0..210).filter(|n| exchange(&mut hold, now + 5 * (n + 1))).count();
        assert_eq!(ahead, 200);
    }

    #[test]
    fn a_program_that_answers_at_once_is_found_out_and_one_that_has_more_to_do_too() {
        let answers_after = |hold: &mut AckHold, now: &mut u64, micros: u64| {
            *now += 100;
            hold.is_due(at(*now));
            hold.asked(at(*now));
            hold.answered(at(*now + micros));
        };
        let (mut hold, mut now) = (AckHold::new(), 0);
        for n in 0..20 {
            assert_eq!(hold.is_prompt(), n >= PROMPT_ENOUGH);
            answers_after(&mut hold, &mut now, 20);
        }
        // Late once.
        answers_after(&mut hold, &mut now, 21);
        assert!(!hold.is_prompt());
        (0..PROMPT_ENOUGH).for_each(|_| answers_after(&mut hold, &mut now, 1));
        assert!(hold.is_prompt());
        // Not at all: another round comes first.
        hold.asked(at(now + 100));
        hold.is_due(at(now + 101));
        assert!(!hold.is_prompt());
        // Posts that answer nothing count for nothing.
        (0..20).for_each(|n| assert!(!hold.answered(at(now + 200 + n))));
        assert!(!hold.is_prompt());
    }
}
