//! FLUSH: how far the bytes that a peer wrote have come.
//!
//! Owns the checks of a FLUSH and what it does to the memory. Never decides what the peer is told.

use core::sync::atomic::{Ordering, fence};

use super::{MrTable, Span};
use crate::types::Rkey;
use crate::verbs::{AccessFlags, FlushScope, PdHandle, QpHandle};

/// Why a FLUSH was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushError {
    /// Key, right or range.
    Denied,
    /// The system could not store the bytes.
    NotStored,
}

/// What a FLUSH may touch: a range of a region.
pub struct FlushRange<'a> {
    span: Span<'a>,
    len: usize,
    persistent: bool,
}

impl MrTable {
    /// What a FLUSH that names `rkey` covers, on the QP `qp` of `pd`, with the rights in `need`. A FLUSH of the whole
    /// region covers what the key reaches, and no address is looked at.
    ///
    /// # Errors
    /// [`FlushError::Denied`].
    #[allow(clippy::too_many_arguments)] // They are the fields of the request.
    pub fn flush_range(
        &self,
        pd: PdHandle,
        qp: QpHandle,
        rkey: Rkey,
        addr: u64,
        len: u32,
        scope: FlushScope,
        need: AccessFlags,
    ) -> Result<FlushRange<'_>, FlushError> {
        let entry = self.granted(pd, qp, rkey, need).map_err(|_| FlushError::Denied)?;
        let (addr, len) = match scope {
            FlushScope::Range => (addr, u64::from(len)),
            FlushScope::Region => (entry.base, entry.len),
        };
        let span = entry.span(addr, len).ok_or(FlushError::Denied)?;
        let len = usize::try_from(len).map_err(|_| FlushError::Denied)?;
        Ok(FlushRange { span, len, persistent: need.contains(AccessFlags::FLUSH_PERSISTENT) })
    }
}

impl FlushRange<'_> {
    /// Does it: afterwards every thread sees the bytes, and with persistence the file below the region has them. That
    /// takes as long as the file's device takes.
    ///
    /// # Errors
    /// [`FlushError::NotStored`].
    pub fn flush(&self) -> Result<(), FlushError> {
        fence(Ordering::SeqCst);
        if self.persistent {
            self.span.region.persist(self.span.offset, self.len).map_err(|_| FlushError::NotStored)?;
        }
        Ok(())
    }
}
