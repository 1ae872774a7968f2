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
        Attr::ALL.into_iter().find(|a| self.has(*a) && !other.has(*a))
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

/// The rule of the edge `from` to `to` for QPs of type `qp_type`, or `None` when there is no such edge. SQE is entered
/// by the engine only, so no edge leads to it.
#[must_use]
pub fn transition_rule(qp_type: QpType, from: QpState, to: QpState) -> Option<Rule> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let (required, optional): (&[Attr], &[Attr]) = match (from, to) {
        // RESET to ERR is not an edge of the table; everything else may fail or be reset at any time.
        (Reset, Err) | (_, Sqe) => return None,
        (_, Reset | Err) => (&[], &[]),
        (Reset, Init) => reset_to_init(qp_type),
        (Init, Init) => init_to_init(qp_type),
        (Init, Rtr) => init_to_rtr(qp_type),
        (Rtr, Rts) => rtr_to_rts(qp_type),
        (Rts, Rts) => rts_to_rts(qp_type),
        (Rts, Sqd) => (&[], &[Attr::SqdAsyncNotify]),
        (Sqd, Sqd) => sqd_to_sqd(qp_type),
        (Sqd, Rts) => sqd_to_rts(qp_type),
        (Sqe, Rts) => match qp_type {
            QpType::Rc => return None,
            QpType::Uc => (&[], &[Attr::CurState, Attr::AccessFlags]),
            QpType::Ud | QpType::Gsi => (&[], &[Attr::CurState, Attr::QKey]),
        },
        _ => return None,
    };
    Some(Rule { required: AttrSet::of(required), optional: AttrSet::of(optional) })
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

type Lists = (&'static [Attr], &'static [Attr]);

fn reset_to_init(t: QpType) -> Lists {
    match t {
        QpType::Rc | QpType::Uc => (&[Attr::PKeyIndex, Attr::Port, Attr::AccessFlags], &[]),
        QpType::Ud => (&[Attr::PKeyIndex, Attr::Port, Attr::QKey], &[]),
        // The verbs give QP1 no port; one given all the same is harmless, as it has only one.
        QpType::Gsi => (&[Attr::PKeyIndex, Attr::QKey], &[Attr::Port]),
    }
}

fn init_to_init(t: QpType) -> Lists {
    match t {
        QpType::Rc | QpType::Uc => (&[], &[Attr::PKeyIndex, Attr::Port, Attr::AccessFlags]),
        QpType::Ud => (&[], &[Attr::PKeyIndex, Attr::Port, Attr::QKey]),
        QpType::Gsi => (&[], &[Attr::PKeyIndex, Attr::QKey]),
    }
}

fn init_to_rtr(t: QpType) -> Lists {
    match t {
        QpType::Rc => (
            &[Attr::Av, Attr::PathMtu, Attr::DestQpn, Attr::RqPsn, Attr::MaxDestRdAtomic, Attr::MinRnrTimer],
            &[Attr::AltPath, Attr::AccessFlags, Attr::PKeyIndex],
        ),
        QpType::Uc => (
            &[Attr::Av, Attr::PathMtu, Attr::DestQpn, Attr::RqPsn],
            &[Attr::AltPath, Attr::AccessFlags, Attr::PKeyIndex],
        ),
        QpType::Ud | QpType::Gsi => (&[], &[Attr::PKeyIndex, Attr::QKey]),
    }
}

fn rtr_to_rts(t: QpType) -> Lists {
    match t {
        QpType::Rc => (
            &[Attr::Timeout, Attr::RetryCount, Attr::RnrRetry, Attr::SqPsn, Attr::MaxRdAtomic],
            &[Attr::CurState, Attr::AltPath, Attr::AccessFlags, Attr::MinRnrTimer, Attr::PathMigState],
        ),
        QpType::Uc => (&[Attr::SqPsn], &[Attr::CurState, Attr::AltPath, Attr::AccessFlags, Attr::PathMigState]),
        QpType::Ud | QpType::Gsi => (&[Attr::SqPsn], &[Attr::CurState, Attr::QKey]),
    }
}

fn rts_to_rts(t: QpType) -> Lists {
    match t {
        QpType::Rc | QpType::Uc => {
            (&[], &[Attr::CurState, Attr::AccessFlags, Attr::AltPath, Attr::PathMigState, Attr::MinRnrTimer])
        }
        QpType::Ud | QpType::Gsi => (&[], &[Attr::CurState, Attr::QKey]),
    }
}

fn sqd_to_sqd(t: QpType) -> Lists {
    match t {
        QpType::Rc => (
            &[],
            &[
                Attr::Port,
                Attr::Av,
                Attr::Timeout,
                Attr::RetryCount,
                Attr::RnrRetry,
                Attr::MaxRdAtomic,
                Attr::MaxDestRdAtomic,
                Attr::AltPath,
                Attr::AccessFlags,
                Attr::PKeyIndex,
                Attr::MinRnrTimer,
                Attr::PathMigState,
            ],
        ),
        QpType::Uc => (&[], &[Attr::Av, Attr::AltPath, Attr::AccessFlags, Attr::PKeyIndex, Attr::PathMigState]),
        QpType::Ud | QpType::Gsi => (&[], &[Attr::PKeyIndex, Attr::QKey]),
    }
}

fn sqd_to_rts(t: QpType) -> Lists {
    match t {
        QpType::Rc => (&[], &[Attr::CurState, Attr::AltPath, Attr::AccessFlags, Attr::MinRnrTimer, Attr::PathMigState]),
        QpType::Uc => (&[], &[Attr::CurState, Attr::AltPath, Attr::AccessFlags, Attr::PathMigState]),
        QpType::Ud | QpType::Gsi => (&[], &[Attr::CurState, Attr::QKey]),
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
