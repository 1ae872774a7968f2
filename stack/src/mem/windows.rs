//! Memory windows: keys that are put on a part of a region, and taken away, without a system's help.
//!
//! Owns allocation, binding and unbinding of windows of type 1 and 2B (IBTA Vol 1 10.6.7.2, paraphrased). Never looks
//! at a packet: a bound window stands in the table as a region does.

use super::{Entry, KeyHandle, Kind, MAX_MWS, MrTable, Refused, VALID};
use crate::types::Rkey;
use crate::verbs::{
    AccessFlags, MemoryWindow, MrHandle, MwBind, MwHandle, MwType, PdHandle, PostError, QpHandle, VerbsError,
};

/// What only a window has.
pub(super) struct Window {
    mw_type: MwType,
    /// The region below, while it is bound.
    mr: Option<KeyHandle>,
    /// Type 1: the low 8 bits that the next bind gives.
    next_key: u8,
}

/// Rights that a window can give; type 2 can be zero based as well.
const RIGHTS: u32 = AccessFlags::REMOTE_READ.bits()
    | AccessFlags::REMOTE_WRITE.bits()
    | AccessFlags::REMOTE_ATOMIC.bits()
    | AccessFlags::FLUSH_GLOBAL.bits()
    | AccessFlags::FLUSH_PERSISTENT.bits();

/// Where a window comes to lie.
struct Placement {
    mr: KeyHandle,
    /// In the region's memory.
    start: u64,
}

impl MrTable {
    /// Makes a window that is bound to nothing, under a fresh key.
    ///
    /// # Errors
    /// [`VerbsError::LimitReached`].
    pub fn alloc_window(&mut self, pd: PdHandle, mw_type: MwType) -> Result<MemoryWindow, VerbsError> {
        let full = VerbsError::LimitReached { what: "memory windows", limit: MAX_MWS };
        if self.windows >= MAX_MWS {
            return Err(full);
        }
        let key = self.fresh_key();
        let window = Window { mw_type, mr: None, next_key: key.to_le_bytes()[0].wrapping_add(1) };
        let kind = Kind::Window(window);
        let entry = Entry { region: None, base: 0, start: 0, len: 0, rights: 0, pd, key, qp: None, kind };
        let handle = self.slab.insert(entry).ok_or(full)?;
        self.by_tag.insert(key >> 8, handle);
        self.windows += 1;
        Ok(MemoryWindow { handle: handle.retag(), rkey: Rkey::new(key), mw_type })
    }

    /// Windows allocated.
    #[must_use]
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Destroys a window, bound or not.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn dealloc_window(&mut self, mw: MwHandle) -> Result<(), VerbsError> {
        let handle = mw.retag();
        self.window(handle).ok_or(VerbsError::InvalidHandle)?;
        self.unbind(handle);
        if let Some(entry) = self.slab.remove(handle) {
            self.by_tag.remove(entry.key >> 8);
        }
        self.windows -= 1;
        Ok(())
    }

    /// Gives a window another key, for replays of captured exchanges.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`] when the tag is taken.
    pub fn set_window_key(&mut self, mw: MwHandle, key: u32) -> Result<(), VerbsError> {
        self.rename(mw.retag(), key)
    }

    /// The key that the next bind of a window of type 1 gives it: the tag stays, the low 8 bits go round.
    ///
    /// # Errors
    /// [`PostError::InvalidHandle`], [`PostError::WindowType`].
    pub fn next_window_key(&mut self, mw: MwHandle) -> Result<Rkey, PostError> {
        let entry = self.slab.get_mut(mw.retag()).ok_or(PostError::InvalidHandle)?;
        let Kind::Window(window) = &mut entry.kind else { return Err(PostError::InvalidHandle) };
        if window.mw_type != MwType::One {
            return Err(PostError::WindowType);
        }
        let key = with_low(entry.key, window.next_key);
        window.next_key = window.next_key.wrapping_add(1);
        Ok(Rkey::new(key))
    }

    fn window(&self, handle: KeyHandle) -> Option<(&Entry, &Window)> {
        let entry = self.slab.get(handle)?;
        match &entry.kind {
            Kind::Window(window) => Some((entry, window)),
            Kind::Region { .. } => None,
        }
    }

    /// Executes a bind that was posted on `qp` of `pd`.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn bind(&mut self, pd: PdHandle, qp: QpHandle, bind: &MwBind) -> Result<(), Refused> {
        let handle: KeyHandle = bind.mw.retag();
        let mw_type = self.check_window(handle, pd, bind)?;
        let placement = match bind.mr {
            Some(mr) if bind.length > 0 => Some(self.check_region(mr, pd, bind)?),
            None if bind.length > 0 => return Err(Refused),
            _ => None,
        };
        self.unbind(handle);
        let region = placement.as_ref().and_then(|p| self.slab.get_mut(p.mr)).and_then(|below| {
            if let Kind::Region { windows, .. } = &mut below.kind {
                *windows += 1;
            }
            below.region.clone()
        });
        let Some(entry) = self.slab.get_mut(handle) else { return Err(Refused) };
        let Kind::Window(window) = &mut entry.kind else { return Err(Refused) };
        entry.key = with_low(entry.key, bind.rkey.get().to_le_bytes()[0]);
        if let Some(Placement { mr, start }) = placement {
            let zero_based = bind.access.contains(AccessFlags::ZERO_BASED);
            window.mr = Some(mr);
            (entry.region, entry.start, entry.len) = (region, start, bind.length);
            entry.base = if zero_based { 0 } else { bind.addr };
            entry.rights = VALID | (bind.access.bits() & RIGHTS);
            if mw_type == MwType::Two {
                entry.qp = Some(qp);
                self.bound_to_qps += 1;
            }
        }
        Ok(())
    }

    /// What the window itself says to a bind.
    fn check_window(&self, handle: KeyHandle, pd: PdHandle, bind: &MwBind) -> Result<MwType, Refused> {
        let (entry, window) = self.window(handle).ok_or(Refused)?;
        let zero_based = AccessFlags::ZERO_BASED.bits();
        let (may, fits) = match window.mw_type {
            // Rebinding replaces the binding, length 0 ends it. Only type 2 can be zero based.
            MwType::One => (RIGHTS, true),
            // Only a free one, and never as a way to unbind: that is what invalidation is for.
            MwType::Two => (RIGHTS | zero_based, window.mr.is_none() && bind.length > 0),
        };
        let fits = fits && entry.pd == pd && bind.access.bits() & !may == 0;
        if fits { Ok(window.mw_type) } else { Err(Refused) }
    }

    /// What the region below says to a bind. The order is state, domain, base, right to bind, rights that need rights
    /// of the region, range.
    fn check_region(&self, mr: MrHandle, pd: PdHandle, bind: &MwBind) -> Result<Placement, Refused> {
        let handle: KeyHandle = mr.retag();
        let entry = self.slab.get(handle).ok_or(Refused)?;
        let mut need = VALID | AccessFlags::MW_BIND.bits();
        let changes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if bind.access.intersection(changes) != AccessFlags::NONE {
            need |= AccessFlags::LOCAL_WRITE.bits();
        }
        // What can be flushed, and how far, the registration has found out.
        need |= bind.access.bits() & (AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT).bits();
        let zero_based = entry.rights & AccessFlags::ZERO_BASED.bits() != 0;
        let is_region = matches!(entry.kind, Kind::Region { .. });
        if !is_region || entry.pd != pd || zero_based || entry.rights & need != need {
            return Err(Refused);
        }
        let offset = bind.addr.checked_sub(entry.base).ok_or(Refused)?;
        let end = offset.checked_add(bind.length).ok_or(Refused)?;
        if end > entry.len {
            return Err(Refused);
        }
        Ok(Placement { mr: handle, start: entry.start + offset })
    }

    /// Takes a window off its region, if it is on one. The key stays, and serves nobody.
    pub(super) fn unbind(&mut self, handle: KeyHandle) {
        let Some(entry) = self.slab.get_mut(handle) else { return };
        let Kind::Window(window) = &mut entry.kind else { return };
        let below = window.mr.take();
        (entry.region, entry.base, entry.start, entry.len, entry.rights) = (None, 0, 0, 0, 0);
        if entry.qp.take().is_some() {
            self.bound_to_qps -= 1;
        }
        if let Some(below) = below.and_then(|mr| self.slab.get_mut(mr))
            && let Kind::Region { windows, .. } = &mut below.kind
        {
            *windows -= 1;
        }
    }

    /// Unbinds the windows of a QP that is destroyed, or reset for another peer.
    pub fn release_qp(&mut self, qp: QpHandle) {
        if self.bound_to_qps == 0 {
            return;
        }
        let bound: Vec<KeyHandle> = self.slab.iter().filter(|(_, e)| e.qp == Some(qp)).map(|(h, _)| h).collect();
        for handle in bound {
            self.unbind(handle);
        }
    }
}

/// `key` with other low 8 bits.
pub(super) const fn with_low(key: u32, low: u8) -> u32 {
    key & !0xFF | low as u32
}
