//! RC, packet by packet: what goes over the wire, and what both programs see.

use uroce::types::{Imm, Rkey};
use uroce::verbs::{AccessFlags, MwBind, MwType, Operation, Remote, Verbs, WcData, WcOpcode, WcStatus};
use uroce_tests::pair::{Options, Pair};

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| u8::try_from((i * 7 + 3) % 251).unwrap()).collect()
}

#[test]
fn every_operation_moves_its_bytes_and_completes_once() {
    let mut p = Pair::new(&Options::default());
    let data = pattern(3000);
    p.a.region.write(0, &data).unwrap();
    p.b.region.write(20_000, &pattern(2500)).unwrap();
    p.b.region.write(30_000, &7u64.to_ne_bytes()).unwrap();
    for (wr_id, at) in [(1, 0), (2, 4000), (3, 8000)] {
        p.b.recv(wr_id, at, 3000);
    }
    let there = p.b.remote(12_000);
    let (read_at, atomic_at) = (p.b.remote(20_000), p.b.remote(30_000));
    p.a.send(10, Operation::Send, 0, 3000);
    p.a.send(11, Operation::SendImm(Imm::new(0xABCD)), 0, 10);
    p.a.send(12, Operation::Write(there), 0, 3000);
    p.a.send(13, Operation::WriteImm(there, Imm::new(5)), 0, 3000);
    p.a.send(14, Operation::Read(read_at), 40_000, 2500);
    p.a.send(15, Operation::FetchAdd { remote: atomic_at, add: 5 }, 50_000, 8);
    p.a.send(16, Operation::CompareSwap { remote: atomic_at, compare: 12, swap: 99 }, 50_008, 8);
    p.settle();

    let done = p.a.completions();
    assert_eq!(done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [10, 11, 12, 13, 14, 15, 16]);
    assert!(done.iter().all(|c| c.status == WcStatus::Success), "{done:?}");
    let received = p.b.completions();
    assert_eq!(
        received.iter().map(|c| (c.wr_id, c.byte_len, c.opcode, c.data)).collect::<Vec<_>>(),
        [
            (1, 3000, WcOpcode::Recv, WcData::None),
            (2, 10, WcOpcode::Recv, WcData::Imm(Imm::new(0xABCD))),
            (3, 3000, WcOpcode::RecvRdmaWithImm, WcData::Imm(Imm::new(5))),
        ]
    );
    let (a, b) = (p.a.region.to_vec(), p.b.region.to_vec());
    assert_eq!(b[..3000], data[..]);
    assert_eq!(b[4000..4010], data[..10]);
    assert_eq!(b[12_000..15_000], data[..]);
    assert_eq!(a[40_000..42_500], pattern(2500)[..]);
    assert_eq!(a[50_000..50_008], 7u64.to_ne_bytes());
    assert_eq!(a[50_008..50_016], 12u64.to_ne_bytes());
    assert_eq!(b[30_000..30_008], 99u64.to_ne_bytes());
    assert_eq!(p.a.endpoint.counters().retransmitted_pkts, 0);
}

#[test]
fn send_with_invalidate_takes_the_key_away() {
    let mut p = Pair::new(&Options { access: AccessFlags::ALL | AccessFlags::MW_BIND, ..Options::default() });
    let window = p.b.endpoint.alloc_mw(p.b.pd, MwType::Two).unwrap();
    let (rkey, access) = (Rkey::new(window.rkey.get() ^ 1), AccessFlags::REMOTE_WRITE);
    let bind = MwBind { mw: window.handle, rkey, mr: Some(p.b.mr.handle), addr: p.b.mr.iova, length: 8, access };
    p.b.send_local(9, Operation::BindMw(bind));
    p.settle();
    let done = p.b.completions()[0];
    assert_eq!((done.wr_id, done.opcode, done.status), (9, WcOpcode::BindMw, WcStatus::Success));
    let there = Remote { addr: p.b.mr.iova, rkey };
    p.a.send(0, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(p.a.completions()[0].status, WcStatus::Success);
    p.b.recv(1, 0, 100);
    p.b.recv(2, 0, 100);
    p.a.send(1, Operation::SendInvalidate(rkey), 0, 8);
    p.settle();
    assert_eq!(p.b.completions()[0].data, WcData::Invalidated(rkey));
    p.a.completions();
    p.a.send(2, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(p.a.completions()[0].status, WcStatus::RemoteAccess);
}
