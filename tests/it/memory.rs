//! Where registered bytes may lie: in a file, in the program's own variables, and in more memory than it may lock.
#![allow(unsafe_code)] // Memory that a program shares with a peer is reached through pointers.

use core::ptr::NonNull;
use std::fs::OpenOptions;
use std::process::Command;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use uroce::raw::Region;
use uroce::verbs::{AccessFlags, FlushPlacement, FlushScope, MemoryRegion, Operation, Remote, Verbs, WcStatus};
use uroce_tests::pair::{Options, Pair};

const MIB: usize = 1 << 20;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + seed) % 255 + 1) as u8).collect()
}

/// A pair whose A has `len` bytes of `content` to send.
fn pair_with(content: &[u8], access: AccessFlags) -> Pair {
    let p = Pair::new(&Options { access, region: content.len(), ..Options::default() });
    p.a.region.write(0, content).unwrap();
    p
}

/// Carries `operation` of A with all of its region, and says how it ended.
fn carry(p: &mut Pair, operation: Operation) -> WcStatus {
    match operation {
        Operation::Flush { .. } => p.a.send_local(1, operation),
        _ => p.a.send(1, operation, 0, p.a.region.len() as u32),
    }
    p.stream();
    p.a.completions()[0].status
}

const fn all_of(mr: &MemoryRegion) -> Remote {
    Remote { addr: mr.iova, rkey: mr.rkey }
}

#[test]
fn what_a_peer_wrote_and_flushed_is_in_the_file_when_all_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    // The region begins with the file and ends before it does, in the middle of a page.
    let len = MIB + 1000;
    file.set_len(2 * MIB as u64).unwrap();
    let content = pattern(len, 7);
    let flushable = AccessFlags::from_bits(0x30F).unwrap();
    let mut p = pair_with(&content, AccessFlags::from_bits(0x10F).unwrap());
    let attr = uroce::verbs::QpAttr {
        access: Some(flushable),
        state: Some(uroce::verbs::QpState::Rts),
        ..uroce::verbs::QpAttr::default()
    };
    p.b.endpoint.modify_qp(p.b.qp, attr).unwrap();
    // SAFETY: nobody else knows the file, and it is not made shorter.
    let region = unsafe { Region::map_file(&file, len) }.unwrap();
    drop(file);
    assert!(region.is_persistent());
    let mr = p.b.endpoint.register(p.b.pd, &region, flushable, None).unwrap();
    let remote = all_of(&mr);
    assert_eq!(carry(&mut p, Operation::Write(remote)), WcStatus::Success);
    let (length, placement, scope) = (len as u32, FlushPlacement::Persistent, FlushScope::Range);
    assert_eq!(carry(&mut p, Operation::Flush { remote, length, placement, scope }), WcStatus::Success);
    drop((p, region));
    let stored = std::fs::read(&path).unwrap();
    assert!(stored[..len] == content, "the file has what was written");
    assert!(stored[len..].iter().all(|b| *b == 0), "and nothing behind the region");
}

/// A peer WRITEs to `len` bytes of the caller's from `start` on, while this thread looks at the last of them; then it READs.
fn shared_with_a_peer(start: NonNull<u8>, len: usize, seed: usize) {
    let content = pattern(len, seed);
    let mut p = pair_with(&content, AccessFlags::ALL);
    // SAFETY: the caller's buffer outlives this call, at whose end the region is dropped, and it is reached through this
    // pointer alone meanwhile.
    let region = unsafe { Region::from_raw(start, len) };
    let mr = p.b.endpoint.register(p.b.pd, &region, AccessFlags::ALL, None).unwrap();
    let remote = all_of(&mr);
    let mut p = std::thread::scope(|s| {
        let driver = s.spawn(move || {
            assert_eq!(carry(&mut p, Operation::Write(remote)), WcStatus::Success);
            p
        });
        let end = Instant::now() + Duration::from_secs(60);
        // SAFETY: inside the buffer; the peer writes it, if at all, as a whole.
        while unsafe { start.add(len - 1).read_volatile() } == 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        fence(Ordering::Acquire);
        let seen: Vec<u8> = (0..len)
            // SAFETY: inside the buffer.
            .map(|i| unsafe { start.add(i).read_volatile() })
            .collect();
        assert!(seen == content, "once the last byte is there, all are");
        driver.join().unwrap()
    });
    // What the program writes is what the peer reads.
    let answer = pattern(len, seed + 1);
    for (i, byte) in answer.iter().enumerate() {
        // SAFETY: inside the buffer.
        unsafe { start.add(i).write_volatile(*byte) };
    }
    assert_eq!(carry(&mut p, Operation::Read(remote)), WcStatus::Success);
    assert!(p.a.region.to_vec() == answer);
    p.b.endpoint.deregister(mr.handle).unwrap();
}

#[test]
fn a_vec_a_box_and_a_variable_are_written_by_a_peer_while_the_program_looks() {
    let mut vec = vec![0u8; MIB + 3];
    let mut boxed = Box::new([0u8; 5000]);
    let mut variable = [0u8; 777];
    for (seed, bytes) in [&mut vec[..], &mut boxed[..], &mut variable[..]].into_iter().enumerate() {
        let (start, len) = (NonNull::new(bytes.as_mut_ptr()).unwrap(), bytes.len());
        shared_with_a_peer(start, len, seed);
    }
    // The buffers are the program's again.
    assert_eq!(vec, pattern(MIB + 3, 1));
    assert_eq!(&boxed[..], pattern(5000, 2));
    assert_eq!(&variable[..], pattern(777, 3));
}

/// Set in the child that may lock no memory.
const CHILD: &str = "UROCE_TEST_MAY_LOCK_NOTHING";

#[test]
fn memory_that_may_not_be_locked_is_registered() {
    if std::env::var_os(CHILD).is_some() {
        return register_64_mib();
    }
    // Root is above the limit, so the child is not quite root.
    let script =
        r#"ulimit -l 0 && if [ "$(id -u)" = 0 ]; then exec setpriv --bounding-set -ipc_lock "$@"; else exec "$@"; fi"#;
    let name = "memory::memory_that_may_not_be_locked_is_registered";
    let child = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{told}{}", String::from_utf8_lossy(&child.stderr));
    assert!(told.contains("registered 67108864 bytes"), "{told}");
}

fn register_64_mib() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let limit = limits.lines().find(|l| l.starts_with("Max locked memory")).unwrap();
    assert_eq!(limit.split_whitespace().collect::<Vec<_>>()[3..], ["0", "0", "bytes"]);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap();
    // CAP_IPC_LOCK is the 14th.
    assert_eq!(u64::from_str_radix(capabilities.trim(), 16).unwrap() >> 14 & 1, 0);
    let content = pattern(2 * MIB, 3);
    let mut p = pair_with(&content, AccessFlags::ALL);
    let region = Region::alloc(64 * MIB).unwrap();
    let mr = p.b.endpoint.register(p.b.pd, &region, AccessFlags::ALL, None).unwrap();
    for step in [0, 31, 62] {
        let remote = Remote { addr: mr.iova + step * MIB as u64, rkey: mr.rkey };
        assert_eq!(carry(&mut p, Operation::Write(remote)), WcStatus::Success);
        let mut there = vec![0; content.len()];
        region.read(step as usize * MIB, &mut there).unwrap();
        assert!(there == content);
    }
    #[allow(clippy::print_stdout)] // The parent looks for it.
    {
        println!("registered {} bytes", region.len());
    }
}
