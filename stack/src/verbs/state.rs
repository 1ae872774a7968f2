//! The QP state table: which transitions exist, and which attributes each must and may carry
//! (IBTA Vol 1 10.3 and 11.2.5.2).

use super::attr::{QpAttr, QpType};
use super::error::ModifyError;

/// State of a QP, with the numbers of the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum QpState {
    /// Made, or reset.
    Reset = 0,
    /// May post receives.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue draining or drained.
    Sqd = 4,
    /// Send queue in error (UC and UD).
    Sqe = 5,
    /// Error: everything is flushed.
    Err = 6,
}

impl QpState {
    /// All, in numeric order.
    pub const ALL: [Self; 7] = [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];

    /// Whether packets for the QP are looked at.
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }
}

/// An attribute of a modify; the value is its bit number in `ibv_qp_attr_mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // Named as in IBTA Vol 1 11.2.5.3.
pub enum Attr {
    CurState = 1,
    SqdAsyncNotify = 2,
    AccessFlags = 3,
    PKeyIndex = 4,
    Port = 5,
    QKey = 6,
    Av = 7,
    PathMtu = 8,
    Timeout = 9,
    RetryCount = 10,
    RnrRetry = 11,
    RqPsn = 12,
    MaxRdAtomic = 13,
    AltPath = 14,
    MinRnrTimer = 15,
    SqPsn = 16,
    MaxDestRdAtomic = 17,
    PathMigState = 18,
    DestQpn = 20,
}

impl Attr {
    /// All, by bit.
    pub const ALL: [Self; 19] = [
        Self::CurState,
        Self::SqdAsyncNotify,
        Self::AccessFlags,
        Self::PKeyIndex,
        Self::Port,
        Self::QKey,
        Self::Av,
        Self::PathMtu,
        Self::Timeout,
        Self::RetryCount,
        Self::RnrRetry,
        Self::RqPsn,
        Self::MaxRdAtomic,
        Self::AltPath,
        Self::MinRnrTimer,
        Self::SqPsn,
        Self::MaxDestRdAtomic,
        Self::PathMigState,
        Self::DestQpn,
    ];
}

/// A set of attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AttrSet(u32);

impl AttrSet {
    /// No attribute.
    pub const EMPTY: Self = Self(0);

    /// The set of these.
    #[must_use]
    pub const fn of(attrs: &[Attr]) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < attrs.len() {
            bits |= 1 << attrs[i] as u8;
            i += 1;
        }
        Self(bits)
    }

    /// This set and `attr`.
    #[must_use]
    pub const fn with(self, attr: Attr) -> Self {
        Self(self.0 | 1 << attr as u8)
    }

    /// Whether `attr` is in it.
    #[must_use]
    pub const fn has(self, attr: Attr) -> bool {
        self.0 & (1 << attr as u8) != 0
    }

    /// The union.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The first attribute of this set that `other` lacks.
    #[must_use]
    pub fn first_missing_in(self, other: Self) -> Option<Attr> {
        let missing = Self(self.0 & !other.0);
        // The rule, which a modify of a program that works keeps to, costs no search.
        if missing == Self::EMPTY { None } else { Attr::ALL.into_iter().find(|a| missing.has(*a)) }
    }

    /// The bits of `ibv_qp_attr_mask`.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// What a transition must and may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// All of these.
    pub required: AttrSet,
    /// Any of these.
    pub optional: AttrSet,
}

/// The set of these, made when the program is compiled.
macro_rules! set {
    ($($attr:ident),*) => {
        const { AttrSet::of(&[$(Attr::$attr),*]) }
    };
}

/// The rule of the edge `from` to `to` for QPs of type `qp_type`, or `None` when there is no such edge. SQE is entered
/// by the engine only, so no edge leads to it.
#[must_use]
pub fn transition_rule(qp_type: QpType, from: QpState, to: QpState) -> Option<Rule> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let (required, optional): Sets = match (from, to) {
        // RESET to ERR is not an edge of the table; everything else may fail or be reset at any time.
        (Reset, Err) | (_, Sqe) => return None,
        (_, Reset | Err) => (set![], set![]),
        (Reset, Init) => reset_to_init(qp_type),
        (Init, Init) => init_to_init(qp_type),
        (Init, Rtr) => init_to_rtr(qp_type),
        (Rtr, Rts) => rtr_to_rts(qp_type),
        (Rts, Rts) => rts_to_rts(qp_type),
        (Rts, Sqd) => (set![], set![SqdAsyncNotify]),
        (Sqd, Sqd) => sqd_to_sqd(qp_type),
        (Sqd, Rts) => sqd_to_rts(qp_type),
        (Sqe, Rts) => match qp_type {
            QpType::Rc => return None,
            QpType::Uc => (set![], set![CurState, AccessFlags]),
            QpType::Ud | QpType::Gsi => (set![], set![CurState, QKey]),
        },
        _ => return None,
    };
    Some(Rule { required, optional })
}

/// Checks which attributes a modify of a QP in `from` carries against the table; values are the device's to check.
/// Returns the state that it leads to.
///
/// # Errors
/// [`ModifyError`], naming the attribute that is missing or not allowed.
pub fn check_transition(qp_type: QpType, from: QpState, attr: &QpAttr) -> Result<QpState, ModifyError> {
    let to = attr.state.unwrap_or(from);
    let rule = transition_rule(qp_type, from, to).ok_or(ModifyError::NoTransition { from, to })?;
    let present = attr.present();
    if let Some(attr) = rule.required.first_missing_in(present) {
        return Err(ModifyError::Missing { attr, from, to });
    }
    if let Some(attr) = present.first_missing_in(rule.required.and(rule.optional)) {
        return Err(ModifyError::NotAllowed { attr, from, to });
    }
    if let Some(named) = attr.cur_state
        && (named != from || !matches!(named, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe))
    {
        return Err(ModifyError::WrongCurrentState { named, actual: from });
    }
    Ok(to)
}

/// What an edge requires and allows.
type Sets = (AttrSet, AttrSet);

fn reset_to_init(t: QpType) -> Sets {
    match t {
        QpType::Rc | QpType::Uc => (set![PKeyIndex, Port, AccessFlags], set![]),
        QpType::Ud => (set![PKeyIndex, Port, QKey], set![]),
        // The verbs give QP1 no port; one given all the same is harmless, as it has only one.
        QpType::Gsi => (set![PKeyIndex, QKey], set![Port]),
    }
}

fn init_to_init(t: QpType) -> Sets {
    match t {
        QpType::Rc | QpType::Uc => (set![], set![PKeyIndex, Port, AccessFlags]),
        QpType::Ud => (set![], set![PKeyIndex, Port, QKey]),
        QpType::Gsi => (set![], set![PKeyIndex, QKey]),
    }
}

fn init_to_rtr(t: QpType) -> Sets {
    match t {
        QpType::Rc => {
            (set![Av, PathMtu, DestQpn, RqPsn, MaxDestRdAtomic, MinRnrTimer], set![AltPath, AccessFlags, PKeyIndex])
        }
        QpType::Uc => (set![Av, PathMtu, DestQpn, RqPsn], set![AltPath, AccessFlags, PKeyIndex]),
        QpType::Ud | QpType::Gsi => (set![], set![PKeyIndex, QKey]),
    }
}

fn rtr_to_rts(t: QpType) -> Sets {
    match t {
        QpType::Rc => (
            set![Timeout, RetryCount, RnrRetry, SqPsn, MaxRdAtomic],
            set![CurState, AltPath, AccessFlags, MinRnrTimer, PathMigState],
        ),
        QpType::Uc => (set![SqPsn], set![CurState, AltPath, AccessFlags, PathMigState]),
        QpType::Ud | QpType::Gsi => (set![SqPsn], set![CurState, QKey]),
    }
}

fn rts_to_rts(t: QpType) -> Sets {
    match t {
        QpType::Rc | QpType::Uc => (set![], set![CurState, AccessFlags, AltPath, PathMigState, MinRnrTimer]),
        QpType::Ud | QpType::Gsi => (set![], set![CurState, QKey]),
    }
}

fn sqd_to_sqd(t: QpType) -> Sets {
    match t {
        QpType::Rc => (
            set![],
            set![
                Port,
                Av,
                Timeout,
                RetryCount,
                RnrRetry,
                MaxRdAtomic,
                MaxDestRdAtomic,
                AltPath,
                AccessFlags,
                PKeyIndex,
                MinRnrTimer,
                PathMigState
            ],
        ),
        QpType::Uc => (set![], set![Av, AltPath, AccessFlags, PKeyIndex, PathMigState]),
        QpType::Ud | QpType::Gsi => (set![], set![PKeyIndex, QKey]),
    }
}

fn sqd_to_rts(t: QpType) -> Sets {
    match t {
        QpType::Rc => (set![], set![CurState, AltPath, AccessFlags, MinRnrTimer, PathMigState]),
        QpType::Uc => (set![], set![CurState, AltPath, AccessFlags, PathMigState]),
        QpType::Ud | QpType::Gsi => (set![], set![CurState, QKey]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_way_into_sqe_and_none_from_reset_to_err() {
        for t in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::Gsi] {
            for from in QpState::ALL {
                assert_eq!(transition_rule(t, from, QpState::Sqe), None);
                assert!(transition_rule(t, from, QpState::Reset).is_some());
                assert_eq!(transition_rule(t, from, QpState::Err).is_some(), from != QpState::Reset);
            }
        }
        assert_eq!(transition_rule(QpType::Rc, QpState::Sqe, QpState::Rts), None);
        assert!(transition_rule(QpType::Ud, QpState::Sqe, QpState::Rts).is_some());
    }

    #[test]
    fn the_edges_that_exist() {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        let edges =
            [(Reset, Init), (Init, Init), (Init, Rtr), (Rtr, Rts), (Rts, Rts), (Rts, Sqd), (Sqd, Sqd), (Sqd, Rts)];
        for t in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::Gsi] {
            for from in QpState::ALL {
                for to in [Init, Rtr, Rts, Sqd] {
                    let there = edges.contains(&(from, to)) || ((from, to) == (Sqe, Rts) && t != QpType::Rc);
                    assert_eq!(transition_rule(t, from, to).is_some(), there, "{t:?} {from:?} {to:?}");
                }
            }
            assert!(transition_rule(t, Err, Err).is_some());
        }
    }

    #[test]
    fn masks_have_the_bits_of_the_verbs() {
        // ibv_qp_attr_mask: PKEY_INDEX | PORT | ACCESS_FLAGS.
        let r = transition_rule(QpType::Rc, QpState::Reset, QpState::Init).unwrap();
        assert_eq!(r.required.bits(), 1 << 4 | 1 << 5 | 1 << 3);
        // AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER.
        let r = transition_rule(QpType::Rc, QpState::Init, QpState::Rtr).unwrap();
        assert_eq!(r.required.bits(), 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15);
        // TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC.
        let r = transition_rule(QpType::Rc, QpState::Rtr, QpState::Rts).unwrap();
        assert_eq!(r.required.bits(), 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13);
    }
}
