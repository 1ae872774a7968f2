//! Tests of the table: every check alone, keys over their life.

use super::*;
use crate::raw::copy;
use crate::verbs::{FastRegister, FlushScope, MemoryWindow, MwBind, MwType, Sge};

/// The handle of slot `n` of some table.
fn handle<T>(n: u32) -> Handle<T> {
    let mut slab: Slab<T, u8> = Slab::new(8);
    (0..=n).map(|_| slab.insert(0)).last().flatten().unwrap()
}

fn pd(n: u32) -> PdHandle {
    handle(n)
}

fn qp(n: u32) -> QpHandle {
    handle(n)
}

fn table() -> MrTable {
    MrTable::new(Rng::from_u64(1), IovaPolicy::Seeded)
}

fn sge(mr: &MemoryRegion, at: u64, length: u32) -> Sge {
    Sge { addr: mr.iova + at, length, lkey: mr.lkey }
}

#[test]
fn a_peer_reaches_only_what_the_key_the_pd_the_right_and_the_range_allow() {
    let mut t = table();
    let r = Region::alloc(100).unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let mr = t.register(pd(0), &r, access, Some(0x1000)).unwrap();
    let w = AccessFlags::REMOTE_WRITE;
    assert!(t.remote(pd(0), qp(0), mr.rkey, 0x1000, 100, w).is_ok());
    assert!(t.remote(pd(0), qp(0), mr.rkey, 0x1000 + 100, 0, w).is_ok());
    for (p, key, addr, len, need) in [
        (pd(1), mr.rkey, 0x1000, 1, w),
        (pd(0), Rkey::new(mr.rkey.get() ^ 1), 0x1000, 1, w),
        (pd(0), Rkey::new(mr.rkey.get() ^ 0x100), 0x1000, 1, w),
        (pd(0), mr.rkey, 0x1000, 1, AccessFlags::REMOTE_READ),
        (pd(0), mr.rkey, 0x1000, 101, w),
        (pd(0), mr.rkey, 0xFFF, 1, w),
        (pd(0), mr.rkey, 0x1000 + 101, 0, w),
        // CVE-2016-8636: sums that wrap.
        (pd(0), mr.rkey, u64::MAX, 1, w),
        (pd(0), mr.rkey, u64::MAX, u64::MAX, w),
        (pd(0), mr.rkey, 0x1000, u64::MAX - 0xFFF, w),
        (pd(0), mr.rkey, 0x1000, u64::from(u32::MAX), w),
    ] {
        assert!(t.remote(p, qp(0), key, addr, len, need).is_err(), "{key} {addr:#x} {len:#x}");
    }
    t.deregister(mr.handle).unwrap();
    assert!(t.remote(pd(0), qp(0), mr.rkey, 0x1000, 1, w).is_err());
    assert_eq!(t.deregister(mr.handle), Err(VerbsError::InvalidHandle));
}

#[test]
fn remote_change_needs_local_write_and_addresses_do_not_wrap() {
    let mut t = table();
    let r = Region::alloc(16).unwrap();
    assert_eq!(t.register(pd(0), &r, AccessFlags::REMOTE_WRITE, None), Err(VerbsError::InvalidAccess));
    assert_eq!(t.register(pd(0), &r, AccessFlags::REMOTE_ATOMIC, None), Err(VerbsError::InvalidAccess));
    assert_eq!(t.register(pd(0), &r, AccessFlags::NONE, Some(u64::MAX - 14)), Err(VerbsError::AddressWrap));
    assert!(t.register(pd(0), &r, AccessFlags::NONE, Some(u64::MAX - 16)).is_ok());
}

#[test]
fn gather_and_scatter_walk_the_elements_at_any_offset() {
    let mut t = table();
    let r = Region::alloc(64).unwrap();
    let mr = t.register(pd(0), &r, AccessFlags::LOCAL_WRITE, None).unwrap();
    let list = [sge(&mr, 0, 3), sge(&mr, 9, 0), sge(&mr, 10, 5), sge(&mr, 20, 4)];
    let data: Vec<u8> = (1..=12).collect();
    t.scatter(pd(0), &list, 0, &data).unwrap();
    assert_eq!(&r.to_vec()[..3], &data[..3]);
    assert_eq!(&r.to_vec()[10..15], &data[3..8]);
    assert_eq!(&r.to_vec()[20..24], &data[8..]);
    for from in 0..=12 {
        for to in from..=12 {
            let mut out = vec![0; to - from];
            t.gather(pd(0), &list, from as u64, &mut out).unwrap();
            assert_eq!(out, data[from..to]);
            out.fill(0);
            let crc = t.gather_crc(pd(0), &list, from as u64, &mut out, 7);
            assert_eq!((crc, &out[..]), (Ok(copy::crc(7, &data[from..to])), &data[from..to]));
        }
    }
    assert_eq!(t.gather(pd(0), &list, 5, &mut [0; 8]), Err(SgeError::TooShort));
    assert_eq!(t.gather_crc(pd(0), &list, 5, &mut [0; 8], 0), Err(SgeError::TooShort));
    assert_eq!(t.gather_crc(pd(1), &list, 0, &mut [0; 8], 0), Err(SgeError::Protection));
    assert_eq!(t.scatter(pd(1), &list, 0, &data), Err(SgeError::Protection));
}

/// rxe gave out faulty keys after 65,536 regions (1aefe5c177c1).
#[test]
fn keys_stay_unique_over_many_registrations() {
    let mut t = table();
    let r = Region::alloc(1).unwrap();
    let mut live = std::collections::VecDeque::new();
    for _ in 0..200_000 {
        let mr = t.register(pd(0), &r, AccessFlags::ALL, None).unwrap();
        assert!(t.remote(pd(0), qp(0), mr.rkey, mr.iova, 1, AccessFlags::REMOTE_READ).is_ok());
        live.push_back(mr);
        if live.len() > 300 {
            let old = live.pop_front().unwrap();
            t.deregister(old.handle).unwrap();
            assert!(t.remote(pd(0), qp(0), old.rkey, old.iova, 1, AccessFlags::REMOTE_READ).is_err());
        }
    }
    assert_eq!(t.len(), 300);
}

const RW: AccessFlags = AccessFlags::ALL;
const READ: AccessFlags = AccessFlags::REMOTE_READ;
const WRITE: AccessFlags = AccessFlags::REMOTE_WRITE;

/// A table with one region of 100 bytes at 0x1000 that windows may be bound to.
fn bindable() -> (MrTable, MemoryRegion) {
    let mut t = table();
    let access = RW | AccessFlags::MW_BIND;
    let mr = t.register(pd(0), &Region::alloc(100).unwrap(), access, Some(0x1000)).unwrap();
    (t, mr)
}

/// A bind of `mw` to 10 bytes at 0x1000 + 20, for reading, under the low key byte 0x77.
fn bind(mw: &MemoryWindow, mr: &MemoryRegion) -> MwBind {
    let rkey = Rkey::new(mw.rkey.get() & !0xFF | 0x77);
    MwBind { mw: mw.handle, rkey, mr: Some(mr.handle), addr: 0x1000 + 20, length: 10, access: READ }
}

#[test]
fn a_window_reaches_its_range_with_its_rights_and_no_more() {
    for mw_type in [MwType::One, MwType::Two] {
        let (mut t, mr) = bindable();
        let mw = t.alloc_window(pd(0), mw_type).unwrap();
        let b = bind(&mw, &mr);
        assert!(t.remote(pd(0), qp(0), mw.rkey, b.addr, 1, READ).is_err(), "not bound yet");
        t.bind(pd(0), qp(0), &b).unwrap();
        assert!(t.remote(pd(0), qp(0), b.rkey, b.addr, 10, READ).is_ok());
        let other_key = Rkey::new(b.rkey.get() ^ 1);
        for (p, q, key, addr, len, need, why) in [
            (pd(1), qp(0), b.rkey, b.addr, 1, READ, "protection domain"),
            (pd(0), qp(0), other_key, b.addr, 1, READ, "key"),
            (pd(0), qp(0), b.rkey, b.addr, 1, WRITE, "right"),
            (pd(0), qp(0), b.rkey, b.addr - 1, 1, READ, "before"),
            (pd(0), qp(0), b.rkey, b.addr, 11, READ, "behind"),
            (pd(0), qp(0), b.rkey, u64::MAX, 2, READ, "wraps"),
            (pd(0), qp(0), mw.rkey, b.addr, 1, READ, "the key before the bind"),
        ] {
            assert!(t.remote(p, q, key, addr, len, need).is_err(), "{mw_type:?}: {why}");
        }
        // Type 1 serves every QP of its domain, type 2 only the one it was bound on.
        let elsewhere = t.remote(pd(0), qp(1), b.rkey, b.addr, 1, READ).is_ok();
        assert_eq!(elsewhere, mw_type == MwType::One);
        // It is no local key.
        let sge = Sge { addr: b.addr, length: 1, lkey: Lkey::new(b.rkey.get()) };
        assert_eq!(t.gather(pd(0), &[sge], 0, &mut [0]), Err(SgeError::Protection));
    }
}

#[test]
fn bytes_go_where_the_window_lies() {
    let (mut t, _) = bindable();
    let region = Region::alloc(100).unwrap();
    let mr = t.register(pd(0), &region, RW | AccessFlags::MW_BIND, Some(0x9000)).unwrap();
    let mw = t.alloc_window(pd(0), MwType::Two).unwrap();
    let access = WRITE | AccessFlags::ZERO_BASED;
    let b = MwBind { mr: Some(mr.handle), addr: 0x9000 + 20, access, ..bind(&mw, &mr) };
    t.bind(pd(0), qp(0), &b).unwrap();
    // Zero based: its first byte is at address 0.
    t.remote(pd(0), qp(0), b.rkey, 3, 2, WRITE).unwrap().write(b"ab").unwrap();
    assert_eq!(&region.to_vec()[23..25], b"ab");
    assert!(t.remote(pd(0), qp(0), b.rkey, 10, 1, WRITE).is_err());
    assert!(t.remote(pd(0), qp(0), b.rkey, 0x9000 + 20, 1, WRITE).is_err());
}

#[test]
fn each_condition_of_a_bind_is_checked_and_a_refused_one_changes_nothing() {
    let (mut t, mr) = bindable();
    let mut region = |access, pd, at| t.register(pd, &Region::alloc(100).unwrap(), access, at).unwrap();
    let bare = region(RW, pd(0), Some(0x1000));
    let read_only = region(READ | AccessFlags::MW_BIND, pd(0), Some(0x1000));
    let zero_based = region(RW | AccessFlags::MW_BIND | AccessFlags::ZERO_BASED, pd(0), None);
    let strange = region(RW | AccessFlags::MW_BIND, pd(1), Some(0x1000));
    let free = t.alloc_fast(pd(0), &Region::alloc(100).unwrap()).unwrap();
    let gone = t.register(pd(0), &Region::alloc(100).unwrap(), RW, None).unwrap();
    t.deregister(gone.handle).unwrap();
    for mw_type in [MwType::One, MwType::Two] {
        let mw = t.alloc_window(pd(0), mw_type).unwrap();
        let other = t.alloc_window(pd(1), mw_type).unwrap();
        let dead = t.alloc_window(pd(0), mw_type).unwrap();
        t.dealloc_window(dead.handle).unwrap();
        let good = bind(&mw, &mr);
        let on = |mr: &MemoryRegion| MwBind { mr: Some(mr.handle), ..good };
        let atomics = AccessFlags::REMOTE_ATOMIC;
        for (why, bad) in [
            ("no such window", MwBind { mw: dead.handle, ..good }),
            ("a region where a window is needed", MwBind { mw: mr.handle.retag(), ..good }),
            ("the window is of another domain", MwBind { mw: other.handle, ..good }),
            ("no region", MwBind { mr: None, ..good }),
            ("no such region", on(&gone)),
            ("a window where a region is needed", MwBind { mr: Some(mw.handle.retag()), ..good }),
            ("the region is of another domain", on(&strange)),
            ("a region without the right to bind", on(&bare)),
            ("a zero-based region", MwBind { addr: 20, ..on(&zero_based) }),
            ("a registration that is free", MwBind { addr: 20, ..on(&free) }),
            ("write without local write", MwBind { access: WRITE, ..on(&read_only) }),
            ("atomics without local write", MwBind { access: atomics, ..on(&read_only) }),
            ("FLUSH that the region does not allow", MwBind { access: AccessFlags::FLUSH_GLOBAL, ..good }),
            ("a right that windows do not have", MwBind { access: READ | AccessFlags::LOCAL_WRITE, ..good }),
            ("one byte before", MwBind { addr: 0x0FFF, ..good }),
            ("one byte behind", MwBind { addr: 0x1000, length: 101, ..good }),
            ("an end that wraps", MwBind { length: u64::MAX, ..good }),
        ] {
            assert_eq!(t.bind(pd(0), qp(0), &bad), Err(Refused), "{mw_type:?}: {why}");
        }
        assert_eq!(t.bind(pd(1), qp(0), &good), Err(Refused), "a QP of another domain");
        assert!(t.remote(pd(0), qp(0), good.rkey, good.addr, 1, READ).is_err());
        t.bind(pd(0), qp(0), &good).unwrap();
        t.dealloc_window(mw.handle).unwrap();
    }
    let (one, two) = (t.alloc_window(pd(0), MwType::One).unwrap(), t.alloc_window(pd(0), MwType::Two).unwrap());
    let zero_based = MwBind { access: READ | AccessFlags::ZERO_BASED, ..bind(&one, &mr) };
    assert_eq!(t.bind(pd(0), qp(0), &zero_based), Err(Refused), "type 1 is never zero based");
    let nothing = MwBind { length: 0, ..bind(&two, &mr) };
    assert_eq!(t.bind(pd(0), qp(0), &nothing), Err(Refused), "type 2 is unbound by invalidation alone");
    t.bind(pd(0), qp(0), &bind(&two, &mr)).unwrap();
    assert_eq!(t.bind(pd(0), qp(0), &bind(&two, &mr)), Err(Refused), "type 2 must be free");
}

#[test]
fn a_window_of_type_1_moves_by_binding_and_ends_with_length_0() {
    let (mut t, mr) = bindable();
    let mw = t.alloc_window(pd(0), MwType::One).unwrap();
    let first = t.next_window_key(mw.handle).unwrap();
    let second = t.next_window_key(mw.handle).unwrap();
    assert_ne!(first, second, "two binds may be queued at once");
    assert_eq!(first.get() >> 8, mw.rkey.get() >> 8);
    t.bind(pd(0), qp(0), &MwBind { rkey: first, ..bind(&mw, &mr) }).unwrap();
    t.bind(pd(0), qp(1), &MwBind { rkey: second, addr: 0x1000, ..bind(&mw, &mr) }).unwrap();
    assert!(t.remote(pd(0), qp(0), first, 0x1000 + 20, 1, READ).is_err());
    assert!(t.remote(pd(0), qp(0), second, 0x1000, 10, READ).is_ok());
    assert_eq!(t.invalidate(pd(0), qp(1), second), Err(AccessDenied), "invalidation is for type 2");
    assert_eq!(t.deregister(mr.handle), Err(VerbsError::Busy));
    let third = t.next_window_key(mw.handle).unwrap();
    t.bind(pd(0), qp(0), &MwBind { rkey: third, mr: None, length: 0, ..bind(&mw, &mr) }).unwrap();
    assert!(t.remote(pd(0), qp(0), second, 0x1000, 1, READ).is_err());
    assert!(t.remote(pd(0), qp(0), third, 0x1000, 0, READ).is_err());
    t.deregister(mr.handle).unwrap();
    let two = t.alloc_window(pd(0), MwType::Two).unwrap();
    assert_eq!(t.next_window_key(two.handle), Err(crate::verbs::PostError::WindowType));
}

#[test]
fn a_window_of_type_2_lives_until_its_key_is_invalidated_on_its_qp() {
    let (mut t, mr) = bindable();
    let mw = t.alloc_window(pd(0), MwType::Two).unwrap();
    let b = bind(&mw, &mr);
    t.bind(pd(0), qp(0), &b).unwrap();
    assert_eq!(t.deregister(mr.handle), Err(VerbsError::Busy));
    assert_eq!(t.invalidate(pd(0), qp(1), b.rkey), Err(AccessDenied), "another QP");
    assert_eq!(t.invalidate(pd(1), qp(0), b.rkey), Err(AccessDenied), "another domain");
    assert_eq!(t.invalidate(pd(0), qp(0), mw.rkey), Err(AccessDenied), "the key before the bind");
    t.invalidate(pd(0), qp(0), b.rkey).unwrap();
    assert!(t.remote(pd(0), qp(0), b.rkey, b.addr, 1, READ).is_err());
    assert_eq!(t.invalidate(pd(0), qp(0), b.rkey), Err(AccessDenied), "once is enough");
    t.deregister(mr.handle).unwrap();
}

#[test]
fn windows_end_with_their_qp_and_when_they_are_deallocated() {
    let (mut t, mr) = bindable();
    let windows: Vec<_> = (0..3).map(|_| t.alloc_window(pd(0), MwType::Two).unwrap()).collect();
    for (mw, q) in windows.iter().zip([qp(0), qp(1), qp(0)]) {
        t.bind(pd(0), q, &bind(mw, &mr)).unwrap();
    }
    t.release_qp(qp(0));
    let alive =
        |t: &MrTable, i: usize, q| t.remote(pd(0), q, bind(&windows[i], &mr).rkey, 0x1000 + 20, 1, READ).is_ok();
    assert!(!alive(&t, 0, qp(0)) && alive(&t, 1, qp(1)) && !alive(&t, 2, qp(0)));
    t.dealloc_window(windows[1].handle).unwrap();
    assert!(!alive(&t, 1, qp(1)));
    assert_eq!(t.dealloc_window(windows[1].handle), Err(VerbsError::InvalidHandle));
    assert_eq!(t.dealloc_window(mr.handle.retag()), Err(VerbsError::InvalidHandle));
    assert_eq!(t.deregister(windows[0].handle.retag()), Err(VerbsError::InvalidHandle));
    t.deregister(mr.handle).unwrap();
    assert!(t.uses_pd(pd(0)), "two windows are left");
    assert_eq!((t.len(), t.windows()), (0, 2));
}

#[test]
fn a_fast_registration_comes_and_goes_with_its_key() {
    let mut t = table();
    let region = Region::alloc(100).unwrap();
    let mr = t.alloc_fast(pd(0), &region).unwrap();
    let sge = |key: Rkey| [Sge { addr: 0x5000, length: 4, lkey: Lkey::new(key.get()) }];
    assert!(t.gather(pd(0), &sge(mr.rkey), 0, &mut [0; 4]).is_err(), "free");
    assert_eq!(t.invalidate(pd(0), qp(0), mr.rkey), Err(AccessDenied), "free");
    let key = Rkey::new(mr.rkey.get() & !0xFF | 1);
    let wr = FastRegister { mr: mr.handle, key, offset: 10, length: 50, iova: 0x5000, access: RW };
    for (why, bad) in [
        ("beyond the memory", FastRegister { offset: 60, ..wr }),
        ("a range that wraps", FastRegister { offset: u64::MAX, ..wr }),
        ("addresses that wrap", FastRegister { iova: u64::MAX - 48, ..wr }),
        ("write without local write", FastRegister { access: WRITE, ..wr }),
        ("persistence of memory that has none", FastRegister { access: AccessFlags::FLUSH_PERSISTENT, ..wr }),
    ] {
        assert_eq!(t.fast_register(pd(0), &bad), Err(Refused), "{why}");
    }
    assert_eq!(t.fast_register(pd(1), &wr), Err(Refused), "another domain");
    t.fast_register(pd(0), &wr).unwrap();
    assert_eq!(t.fast_register(pd(0), &wr), Err(Refused), "not free");
    t.remote(pd(0), qp(0), key, 0x5000, 2, WRITE).unwrap().write(b"xy").unwrap();
    assert_eq!(&region.to_vec()[10..12], b"xy");
    t.gather(pd(0), &sge(key), 0, &mut [0; 4]).unwrap();
    assert!(t.remote(pd(0), qp(0), key, 0x5000 + 50, 1, WRITE).is_err());
    // Any QP of the domain may take it away.
    t.invalidate(pd(0), qp(3), key).unwrap();
    assert!(t.remote(pd(0), qp(0), key, 0x5000, 1, WRITE).is_err());
    assert!(t.gather(pd(0), &sge(key), 0, &mut [0; 4]).is_err());
    let again = FastRegister { key: Rkey::new(2), access: RW | AccessFlags::ZERO_BASED, ..wr };
    t.fast_register(pd(0), &again).unwrap();
    let key = Rkey::new(mr.rkey.get() & !0xFF | 2);
    assert!(t.remote(pd(0), qp(0), key, 49, 1, WRITE).is_ok());
    t.deregister(mr.handle).unwrap();
}

#[test]
fn a_fast_registration_with_windows_cannot_be_invalidated() {
    let mut t = table();
    let mr = t.alloc_fast(pd(0), &Region::alloc(100).unwrap()).unwrap();
    let access = RW | AccessFlags::MW_BIND;
    let wr = FastRegister { mr: mr.handle, key: mr.rkey, offset: 0, length: 100, iova: 0x1000, access };
    t.fast_register(pd(0), &wr).unwrap();
    let mw = t.alloc_window(pd(0), MwType::Two).unwrap();
    t.bind(pd(0), qp(0), &bind(&mw, &mr)).unwrap();
    assert_eq!(t.invalidate(pd(0), qp(0), mr.rkey), Err(AccessDenied));
    t.invalidate(pd(0), qp(0), bind(&mw, &mr).rkey).unwrap();
    t.invalidate(pd(0), qp(0), mr.rkey).unwrap();
}

#[test]
fn an_ordinary_registration_cannot_be_invalidated() {
    let (mut t, mr) = bindable();
    assert_eq!(t.invalidate(pd(0), qp(0), mr.rkey), Err(AccessDenied));
    assert!(t.remote(pd(0), qp(0), mr.rkey, mr.iova, 1, READ).is_ok());
}

#[test]
fn a_zero_based_region_begins_at_address_0_for_both_sides() {
    let mut t = table();
    let region = Region::alloc(16).unwrap();
    let mr = t.register(pd(0), &region, RW | AccessFlags::ZERO_BASED, Some(0x7777)).unwrap();
    assert_eq!(mr.iova, 0);
    t.remote(pd(0), qp(0), mr.rkey, 15, 1, WRITE).unwrap().write(b"z").unwrap();
    assert!(t.remote(pd(0), qp(0), mr.rkey, 16, 1, WRITE).is_err());
    let mut out = [0];
    t.gather(pd(0), &[sge(&mr, 15, 1)], 0, &mut out).unwrap();
    assert_eq!(&out, b"z");
}

#[test]
fn flush_needs_its_right_and_its_range() {
    let mut t = table();
    let (global, persistent) = (AccessFlags::FLUSH_GLOBAL, AccessFlags::FLUSH_PERSISTENT);
    let heap = Region::alloc(100).unwrap();
    assert_eq!(t.register(pd(0), &heap, persistent, None), Err(VerbsError::NotPersistent));
    let mr = t.register(pd(0), &heap, RW | global, Some(0x1000)).unwrap();
    let denied = |t: &MrTable, key, addr, len, scope, need| {
        matches!(t.flush_range(pd(0), qp(0), key, addr, len, scope, need), Err(FlushError::Denied))
    };
    t.flush_range(pd(0), qp(0), mr.rkey, 0x1000, 100, FlushScope::Range, global).unwrap().flush().unwrap();
    assert!(denied(&t, mr.rkey, 0x1000, 101, FlushScope::Range, global));
    assert!(denied(&t, mr.rkey, 0x1000, 100, FlushScope::Range, persistent));
    assert!(denied(&t, mr.rkey, 0x1000, 100, FlushScope::Range, global | persistent));
    // The whole region: address and length say nothing, the key all.
    t.flush_range(pd(0), qp(0), mr.rkey, 7, u32::MAX, FlushScope::Region, global).unwrap().flush().unwrap();
    assert!(denied(&t, Rkey::new(mr.rkey.get() ^ 1), 0x1000, 1, FlushScope::Region, global));
    // No zero-length exception: a FLUSH always names a key.
    assert!(denied(&t, Rkey::new(5), 0x1000, 0, FlushScope::Range, global));
}
