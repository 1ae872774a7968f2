//! A model of keys: what the program and its peers did, in a list, and what each key means by that.
//!
//! Owns its own reading of the rules (IBTA Vol 1 10.6), written without a look at the table, and random lives of
//! regions, registrations and windows that are held against it. Never shares code with the table.

use super::*;
use crate::verbs::{FastRegister, MemoryWindow, MwBind, MwHandle, MwType};

const PDS: u64 = 2;
const QPS: u64 = 2;
/// Bytes of each region.
const LEN: u64 = 64;

fn handle<T>(n: u64) -> Handle<T> {
    let mut slab: Slab<T, u8> = Slab::new(8);
    (0..=n).map(|_| slab.insert(0)).last().flatten().unwrap()
}

struct MrModel {
    handle: MrHandle,
    memory: u64,
    pd: u64,
    key: u32,
    base: u64,
    start: u64,
    len: u64,
    access: u32,
    fast: bool,
    valid: bool,
    alive: bool,
}

struct Bound {
    mr: usize,
    qp: u64,
    addr: u64,
    len: u64,
    access: u32,
}

struct MwModel {
    handle: MwHandle,
    two: bool,
    pd: u64,
    key: u32,
    bound: Option<Bound>,
    alive: bool,
}

#[derive(Default)]
struct Model {
    mrs: Vec<MrModel>,
    mws: Vec<MwModel>,
    /// Every key that ever was.
    keys: Vec<u32>,
}

const WRITES: u32 = 2 | 8;
const BINDS: u32 = 16;
const ZERO: u32 = 32;
const GLOBAL: u32 = 256;

impl Model {
    fn windows_on(&self, mr: usize) -> usize {
        self.mws.iter().filter(|w| w.alive && w.bound.as_ref().is_some_and(|b| b.mr == mr)).count()
    }

    /// The memory and offset that a peer reaches, if it does.
    fn reach(&self, pd: u64, qp: u64, key: u32, addr: u64, len: u64, need: u32) -> Option<(u64, u64)> {
        let within = |base: u64, size: u64| {
            let at = u128::from(addr).checked_sub(u128::from(base))?;
            (at + u128::from(len) <= u128::from(size)).then_some(at as u64)
        };
        if let Some(m) = self.mrs.iter().find(|m| m.alive && m.key == key) {
            let may = m.valid && m.pd == pd && m.access & need == need;
            return within(m.base, m.len).filter(|_| may).map(|at| (m.memory, m.start + at));
        }
        let w = self.mws.iter().find(|w| w.alive && w.key == key)?;
        let b = w.bound.as_ref()?;
        let m = &self.mrs[b.mr];
        let may = w.pd == pd && (!w.two || b.qp == qp) && b.access & need == need;
        let base = if b.access & ZERO != 0 { 0 } else { b.addr };
        within(base, b.len).filter(|_| may).map(|at| (m.memory, m.start + (b.addr - m.base) + at))
    }

    fn may_bind(&self, w: &MwModel, pd: u64, b: &Bound, has_mr: bool) -> bool {
        let allowed = 2 | 4 | 8 | GLOBAL | 512 | if w.two { ZERO } else { 0 };
        if !w.alive || w.pd != pd || b.access & !allowed != 0 {
            return false;
        }
        if b.len == 0 {
            return !w.two;
        }
        let m = &self.mrs[b.mr];
        has_mr
            && m.alive
            && m.valid
            && m.pd == pd
            && m.access & ZERO == 0
            && m.access & BINDS != 0
            && (b.access & WRITES == 0 || m.access & 1 != 0)
            && b.access & GLOBAL & !m.access == 0
            && b.access & 512 & !m.access == 0
            && b.addr >= m.base
            && b.addr + b.len <= m.base + m.len
            && (!w.two || w.bound.is_none())
    }

    fn may_invalidate(&self, pd: u64, qp: u64, key: u32) -> bool {
        if let Some(i) = self.mrs.iter().position(|m| m.alive && m.key == key) {
            let m = &self.mrs[i];
            return m.valid && m.fast && m.pd == pd && self.windows_on(i) == 0;
        }
        let Some(w) = self.mws.iter().find(|w| w.alive && w.key == key) else { return false };
        w.two && w.pd == pd && w.bound.as_ref().is_some_and(|b| b.qp == qp)
    }
}

struct Life {
    rng: Rng,
    table: MrTable,
    memories: Vec<Region>,
    model: Model,
    /// How often a step was allowed, and refused.
    verdicts: [u64; 2],
}

impl Life {
    fn pick(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| self.rng.within(0..=count as u64 - 1) as usize)
    }

    fn access(&mut self) -> AccessFlags {
        let bits = self.rng.next_u32() & (0x3F | GLOBAL);
        // Most of the time rights that can be.
        let bits = if bits & WRITES != 0 && self.rng.chance(0.8) { bits | 1 } else { bits };
        let bits = if self.rng.chance(0.7) { bits & !ZERO | BINDS } else { bits };
        AccessFlags::from_bits(bits).unwrap()
    }

    fn judge(&mut self, what: &str, table: bool, model: bool) -> bool {
        assert_eq!(table, model, "{what}");
        self.verdicts[usize::from(!model)] += 1;
        model
    }

    fn register(&mut self) {
        let (pd, access) = (self.rng.within(0..=PDS - 1), self.access());
        let memory = self.rng.within(0..=self.memories.len() as u64 - 1);
        let region = self.memories[memory as usize].clone();
        let fast = self.rng.chance(0.4);
        let made = if fast {
            self.table.alloc_fast(handle(pd), &region)
        } else {
            self.table.register(handle(pd), &region, access, Some(0x1000))
        };
        let allowed = fast || access.bits() & WRITES == 0 || access.bits() & 1 != 0;
        if !self.judge("register", made.is_ok(), allowed) {
            return;
        }
        let mr = made.unwrap();
        let base = if access.bits() & ZERO != 0 { 0 } else { 0x1000 };
        let (handle, key, access) = (mr.handle, mr.rkey.get(), access.bits());
        self.model.keys.push(key);
        let new =
            MrModel { handle, memory, pd, key, base, start: 0, len: LEN, access, fast, valid: !fast, alive: true };
        self.model.mrs.push(new);
    }

    fn fast_register(&mut self) {
        let (pd, access) = (self.rng.within(0..=PDS - 1), self.access());
        let Some(i) = self.pick(self.model.mrs.len()) else { return };
        let (offset, length) = (self.rng.within(0..=LEN / 2), self.rng.within(0..=LEN * 3 / 4));
        let m = &self.model.mrs[i];
        let key = Rkey::new(self.rng.next_u32());
        let wr = FastRegister { mr: m.handle, key, offset, length, iova: 0x2000, access };
        let rights = access.bits() & WRITES == 0 || access.bits() & 1 != 0;
        let allowed = m.alive && m.fast && !m.valid && m.pd == pd && rights && offset + length <= LEN;
        let done = self.table.fast_register(handle(pd), &wr).is_ok();
        if self.judge("fast registration", done, allowed) {
            let m = &mut self.model.mrs[i];
            (m.start, m.len, m.access, m.valid) = (offset, length, access.bits(), true);
            m.base = if m.access & ZERO != 0 { 0 } else { 0x2000 };
            m.key = m.key & !0xFF | key.get() & 0xFF;
            self.model.keys.push(m.key);
        }
    }

    fn deregister(&mut self) {
        let Some(i) = self.pick(self.model.mrs.len()) else { return };
        let m = &self.model.mrs[i];
        let allowed = m.alive && self.model.windows_on(i) == 0;
        let done = self.table.deregister(m.handle).is_ok();
        if self.judge("deregistration", done, allowed) {
            self.model.mrs[i].alive = false;
        }
    }

    fn alloc_window(&mut self) {
        let (pd, two) = (self.rng.within(0..=PDS - 1), self.rng.chance(0.6));
        let mw_type = if two { MwType::Two } else { MwType::One };
        let MemoryWindow { handle, rkey, .. } = self.table.alloc_window(super::model::handle(pd), mw_type).unwrap();
        self.model.keys.push(rkey.get());
        self.model.mws.push(MwModel { handle, two, pd, key: rkey.get(), bound: None, alive: true });
    }

    fn dealloc_window(&mut self) {
        let Some(i) = self.pick(self.model.mws.len()) else { return };
        let w = &mut self.model.mws[i];
        let (done, allowed) = (self.table.dealloc_window(w.handle).is_ok(), w.alive);
        if self.judge("deallocation", done, allowed) {
            let w = &mut self.model.mws[i];
            (w.alive, w.bound) = (false, None);
        }
    }

    fn bind(&mut self) {
        let (pd, qp) = (self.rng.within(0..=PDS - 1), self.rng.within(0..=QPS - 1));
        let (Some(w), Some(mr)) = (self.pick(self.model.mws.len()), self.pick(self.model.mrs.len())) else { return };
        let mut bits = self.rng.next_u32() & (2 | 4 | 8 | GLOBAL);
        if self.rng.chance(0.1) {
            bits |= 1 << self.rng.within(0..=5);
        }
        let len = if self.rng.chance(0.1) { 0 } else { self.rng.within(1..=LEN / 2) };
        let addr = self.model.mrs[mr].base.wrapping_add(self.rng.within(0..=LEN)).saturating_sub(8);
        let b = Bound { mr, qp, addr, len, access: bits };
        let has_mr = self.rng.chance(0.95);
        let rkey = Rkey::new(self.rng.next_u32());
        let wr = MwBind {
            mw: self.model.mws[w].handle,
            rkey,
            mr: has_mr.then_some(self.model.mrs[mr].handle),
            addr,
            length: len,
            access: AccessFlags::from_bits(bits).unwrap(),
        };
        let allowed = self.model.may_bind(&self.model.mws[w], pd, &b, has_mr);
        let done = self.table.bind(handle(pd), handle(qp), &wr).is_ok();
        if self.judge("bind", done, allowed) {
            let w = &mut self.model.mws[w];
            w.key = w.key & !0xFF | rkey.get() & 0xFF;
            w.bound = (len > 0).then_some(b);
            self.model.keys.push(w.key);
        }
    }

    fn invalidate(&mut self) {
        let (pd, qp) = (self.rng.within(0..=PDS - 1), self.rng.within(0..=QPS - 1));
        let Some(k) = self.pick(self.model.keys.len()) else { return };
        let key = self.model.keys[k];
        let allowed = self.model.may_invalidate(pd, qp, key);
        let done = self.table.invalidate(handle(pd), handle(qp), Rkey::new(key)).is_ok();
        if self.judge("invalidation", done, allowed) {
            for m in self.model.mrs.iter_mut().filter(|m| m.alive && m.key == key) {
                m.valid = false;
            }
            for w in self.model.mws.iter_mut().filter(|w| w.alive && w.key == key) {
                w.bound = None;
            }
        }
    }

    fn end_qp(&mut self) {
        let qp = self.rng.within(0..=QPS - 1);
        self.table.release_qp(handle(qp));
        for w in self.model.mws.iter_mut().filter(|w| w.two) {
            w.bound = w.bound.take().filter(|b| b.qp != qp);
        }
    }

    fn reach(&mut self) {
        let (pd, qp) = (self.rng.within(0..=PDS - 1), self.rng.within(0..=QPS - 1));
        let Some(k) = self.pick(self.model.keys.len()) else { return };
        let key = self.model.keys[k] ^ if self.rng.chance(0.05) { 1 << self.rng.within(0..=31) } else { 0 };
        let base = [0, 0x1000, 0x2000][self.rng.within(0..=2) as usize];
        let addr = match self.rng.within(0..=19) {
            0 => u64::MAX - self.rng.within(0..=9),
            _ => (base + self.rng.within(0..=LEN + 8)).saturating_sub(4),
        };
        let len = if self.rng.chance(0.02) { self.rng.next_u64() } else { self.rng.within(0..=24) };
        let need = [2, 4, 8, GLOBAL, 2][self.rng.within(0..=4) as usize];
        let expected = self.model.reach(pd, qp, key, addr, len, need);
        let need = AccessFlags::from_bits(need).unwrap();
        let found = self.table.remote(handle(pd), handle(qp), Rkey::new(key), addr, len, need).ok();
        let found = found.map(|span| {
            let memory = self.memories.iter().position(|m| m.host_address() == span.region.host_address());
            (memory.unwrap() as u64, span.offset as u64)
        });
        assert_eq!(found, expected, "key {key:#x} at {addr:#x} + {len:#x} for {need:?} on QP {qp} of {pd}");
        self.verdicts[usize::from(expected.is_none())] += 1;
    }
}

#[test]
fn keys_mean_what_the_model_says_through_random_lives() {
    for seed in 0..40 {
        let memories = (0..4).map(|_| Region::alloc(LEN as usize).unwrap()).collect();
        let table = MrTable::new(Rng::from_u64(seed), IovaPolicy::Seeded);
        let rng = Rng::from_u64(seed ^ 0xABCD);
        let mut life = Life { rng, table, memories, model: Model::default(), verdicts: [0; 2] };
        for _ in 0..3000 {
            match life.rng.within(0..=39) {
                0 => life.register(),
                1..=3 => life.fast_register(),
                4 => life.deregister(),
                5 => life.alloc_window(),
                6 => life.dealloc_window(),
                7..=14 => life.bind(),
                15..=17 => life.invalidate(),
                18 => life.end_qp(),
                _ => life.reach(),
            }
        }
        let [allowed, refused] = life.verdicts;
        assert!(allowed > 100 && refused > 100, "seed {seed}: {allowed} allowed, {refused} refused");
        let alive =
            (life.model.mrs.iter().filter(|m| m.alive).count(), life.model.mws.iter().filter(|w| w.alive).count());
        assert_eq!((life.table.len(), life.table.windows()), alive);
    }
}
