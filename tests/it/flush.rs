//! FLUSH and ATOMIC WRITE between two endpoints: what crosses the wire, what survives loss, and what is refused.
//! Expected values come from IBTA annex A19 as Linux's rxe (6.2 and later) puts it on the wire.
#![allow(unsafe_code)] // A file is mapped, which no other process knows.

use std::io::{Read as _, Seek as _, SeekFrom};

use uroce::counters::DropReason;
use uroce::raw::Region;
use uroce::time::Duration;
use uroce::types::{Msn, PKey, Psn};
use uroce::verbs::{
    AccessFlags, FlushPlacement, FlushScope, Operation, Payload, Remote, SendFlags, SendWr, Verbs, VerbsError,
    WcOpcode, WcStatus, WorkCompletion,
};
use uroce::wire::{Aeth, Body, IpFields, Packet, Response, ResponseOp, Syndrome};
use uroce_tests::pair::{Fate, Options, Pair, Side};

const FLUSHABLE: AccessFlags = match AccessFlags::from_bits(0x10F) {
    Some(flags) => flags,
    None => panic!("local write, the rights of a peer, FLUSH for visibility"),
};

fn pair() -> Pair {
    Pair::new(&Options { access: FLUSHABLE, ..Options::default() })
}

fn statuses(done: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn flush(remote: Remote, length: u32) -> Operation {
    Operation::Flush { remote, length, placement: FlushPlacement::Global, scope: FlushScope::Range }
}

fn ack() -> Aeth {
    Aeth { syndrome: Syndrome::ACK, msn: Msn::from_wire(1) }
}

/// A response from B to A, made by hand.
fn forge(p: &mut Pair, psn: u32, op: ResponseOp, payload: &[u8]) {
    let body = Body::Response(Response { op, payload });
    let packet = Packet::new(p.a.qpn, PKey::DEFAULT, Psn::new(psn).unwrap(), body);
    let header = packet.header_len();
    let mut bytes = vec![0; uroce::wire::segment_len(header, payload.len())];
    packet.write_headers(payload.len(), &mut bytes).unwrap();
    bytes[header..header + payload.len()].copy_from_slice(payload);
    let flow = p.flow_from(Side::B);
    uroce::wire::seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, header + payload.len());
    p.deliver(Side::A, &bytes);
}

#[test]
fn both_take_one_psn_and_are_answered_with_read_data_of_no_length() {
    let mut p = pair();
    let there = p.b.remote(64);
    p.a.region.write(0, b"\x01\x02\x03\x04\x05\x06\x07\x08").unwrap();
    p.a.send(1, Operation::Write(there), 0, 8);
    p.a.send_local(2, flush(there, 8));
    p.a.send(3, Operation::AtomicWrite(p.b.remote(128)), 0, 8);
    p.a.send(4, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(
        p.ladder(),
        [
            "A RC_WRITE_ONLY 100",
            "A RC_FLUSH 101",
            "A RC_ATOMIC_WRITE 102",
            "A RC_WRITE_ONLY 103",
            "B ACK 100",
            "B RC_READ_RESP_ONLY 101",
            "B RC_READ_RESP_ONLY 102",
            "B ACK 103",
        ]
    );
    let sizes: Vec<_> = p.log.iter().map(|(_, bytes)| bytes.len()).collect();
    // FLUSH: BTH 12, FETH 4, RETH 16, ICRC 4. ATOMIC WRITE: BTH, RETH, 8 bytes, ICRC. Answers: BTH, AETH, ICRC.
    assert_eq!(sizes[1..3], [36, 40]);
    assert_eq!(sizes[5..7], [20, 20]);
    assert_eq!(p.log[1].1[12..16], [0, 0, 0, 1], "placement global, selectivity range");
    let done = p.a.completions();
    assert_eq!(statuses(&done), (1..=4).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    assert_eq!((done[1].opcode, done[2].opcode), (WcOpcode::Flush, WcOpcode::AtomicWrite));
    // Bytes in the order of memory, not a number.
    assert_eq!(&p.b.region.to_vec()[128..136], b"\x01\x02\x03\x04\x05\x06\x07\x08");
    let counters = p.b.endpoint.counters();
    assert_eq!((counters.rx_atomic_requests, counters.rdma_recvs, counters.dropped_in_all()), (1, 4, 0));
}

#[test]
fn an_atomic_write_takes_its_bytes_inline_or_from_elements() {
    let mut p = pair();
    let there = p.b.remote(8);
    let mut post = |wr_id, payload: Payload<'_>| {
        let (operation, flags) = (Operation::AtomicWrite(there), SendFlags::SIGNALED);
        let wr = SendWr { wr_id, operation, payload, flags, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
        p.settle();
        p.b.region.to_vec()[8..16].to_vec()
    };
    assert_eq!(post(1, Payload::Inline(b"ABCDEFGH")), b"ABCDEFGH");
    p.a.region.write(0, b"12345678").unwrap();
    let halves = [p.a.sge(4, 4), p.a.sge(0, 4)];
    let (operation, payload) = (Operation::AtomicWrite(there), Payload::Sges(&halves));
    let wr = SendWr { wr_id: 2, operation, payload, flags: SendFlags::SIGNALED, destination: None };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    p.settle();
    assert_eq!(&p.b.region.to_vec()[8..16], b"56781234");
}

/// The answer is lost, the request comes again: answered from memory, and the place, which the program has changed
/// since, is not written a second time.
#[test]
fn a_repeated_atomic_write_is_answered_and_not_done_again() {
    let mut p = pair();
    let there = p.b.remote(0);
    p.a.region.write(0, b"the peer").unwrap();
    p.a.send(1, Operation::AtomicWrite(there), 0, 8);
    let mut lost = false;
    let fate = |side, _: &Packet<'_>| {
        if side == Side::B && !core::mem::replace(&mut lost, true) { Fate::Drop } else { Fate::Deliver }
    };
    p.run(fate);
    assert_eq!(&p.b.region.to_vec()[..8], b"the peer");
    p.b.region.write(0, b"the host").unwrap();
    p.run_for(Duration::from_secs(1), |_, _| Fate::Deliver);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(&p.b.region.to_vec()[..8], b"the host");
    assert_eq!(p.b.endpoint.counters().duplicate_request, 1);
}

/// An ACK for what is behind an ATOMIC WRITE or FLUSH says that its answer was lost; one at its own PSN says nothing.
/// Neither completes it.
#[test]
fn a_plain_ack_never_completes_either() {
    for atomic in [true, false] {
        let mut p = pair();
        let there = p.b.remote(0);
        if atomic {
            p.a.send(1, Operation::AtomicWrite(there), 0, 8);
        } else {
            p.a.send_local(1, flush(there, 8));
        }
        p.a.send(2, Operation::Write(there), 0, 8);
        p.take_sent(Side::A);
        forge(&mut p, 100, ResponseOp::Acknowledge(ack()), &[]);
        assert_eq!(p.a.endpoint.counters().dropped(DropReason::UnexpectedResponse), 1);
        forge(&mut p, 101, ResponseOp::Acknowledge(ack()), &[]);
        assert_eq!(p.a.endpoint.counters().implied_nak_seq_err, 1);
        assert_eq!(p.a.completions(), []);
        p.settle();
        assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    }
}

#[test]
fn an_answer_of_another_kind_or_with_data_is_a_bad_response() {
    for (op, payload) in [
        (ResponseOp::AtomicAcknowledge(ack(), 7), &[][..]),
        (ResponseOp::ReadOnly(ack()), &[0; 8][..]),
        (ResponseOp::ReadFirst(ack()), &[0; 1024][..]),
        (ResponseOp::ReadMiddle, &[][..]),
    ] {
        for atomic in [true, false] {
            let mut p = pair();
            let there = p.b.remote(0);
            if atomic {
                p.a.send(1, Operation::AtomicWrite(there), 0, 8);
            } else {
                p.a.send_local(1, flush(there, 8));
            }
            p.take_sent(Side::A);
            forge(&mut p, 100, op, payload);
            assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::BadResponse)], "{op:?}");
        }
    }
}

/// Both count against `max_rd_atomic`, and a fenced work request waits for them.
#[test]
fn both_count_as_reads_do_at_the_requester() {
    let mut p = Pair::new(&Options { access: FLUSHABLE, rd_atomic: 1, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::AtomicWrite(there), 0, 8);
    p.a.send_local(2, flush(there, 8));
    assert_eq!(p.take_sent(Side::A).len(), 1);
    let (operation, payload) = (Operation::Write(there), Payload::Sges(&[]));
    let flags = SendFlags { fence: true, ..SendFlags::SIGNALED };
    p.a.endpoint.post_send(p.a.qp, &[SendWr { wr_id: 3, operation, payload, flags, destination: None }]).unwrap();
    forge(&mut p, 100, ResponseOp::ReadOnly(ack()), &[]);
    assert_eq!(p.take_sent(Side::A).len(), 1, "the FLUSH alone: the WRITE behind it is fenced");
    forge(&mut p, 101, ResponseOp::ReadOnly(ack()), &[]);
    assert_eq!(p.take_sent(Side::A).len(), 1);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

/// A peer that does not count its FLUSHes, as rxe does not, sends more at once than are answered: those too many are
/// dropped before they are done, and come again.
#[test]
fn more_flushes_than_are_answered_at_once_come_again() {
    let mut p = Pair::new(&Options { access: FLUSHABLE, rd_atomic: 100, ..Options::default() });
    let there = p.b.remote(0);
    for i in 0..100 {
        p.a.send_local(i, flush(there, 8));
    }
    let all = p.take_sent(Side::A);
    assert_eq!(all.len(), 100);
    for request in &all {
        p.deliver(Side::B, request);
    }
    let answered = p.take_sent(Side::B).len();
    assert_eq!(answered, uroce::qp::MAX_FLUSHES + 1, "the answers, and a NAK for what was dropped");
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::Refused), 1);
    p.run_for(Duration::from_secs(5), |_, _| Fate::Deliver);
    let want: Vec<_> = (0..100).map(|i| (i, WcStatus::Success)).collect();
    assert_eq!(statuses(&p.a.completions()), want);
}

/// The rights are those of the QP and of the key; ATOMIC WRITE needs the right to WRITE.
#[test]
fn what_is_not_allowed_is_refused() {
    let outcome = |qp: u32, key: u32, make: fn(Remote) -> Operation| {
        let rights = |bits| AccessFlags::from_bits(bits).unwrap();
        let mut p = Pair::new(&Options { access: rights(qp), ..Options::default() });
        let region = Region::alloc(64).unwrap();
        let mr = p.b.endpoint.register(p.b.pd, &region, rights(key), None).unwrap();
        let operation = make(Remote { addr: mr.iova, rkey: mr.rkey });
        match operation {
            Operation::Flush { .. } => p.a.send_local(1, operation),
            _ => p.a.send(1, operation, 0, 8),
        }
        p.settle();
        p.a.completions()[0].status
    };
    let global: fn(Remote) -> Operation = |r| flush(r, 8);
    assert_eq!(outcome(0x101, 0x101, global), WcStatus::Success);
    assert_eq!(outcome(0x00F, 0x101, global), WcStatus::RemoteInvalidRequest);
    assert_eq!(outcome(0x101, 0x00F, global), WcStatus::RemoteAccess);
    let atomic: fn(Remote) -> Operation = Operation::AtomicWrite;
    assert_eq!(outcome(0x003, 0x003, atomic), WcStatus::Success);
    assert_eq!(outcome(0x00D, 0x003, atomic), WcStatus::RemoteInvalidRequest);
    assert_eq!(outcome(0x003, 0x00D, atomic), WcStatus::RemoteAccess);
}

/// Aligned on the wire and yet not in this process: nothing can put 8 bytes there at once.
#[test]
fn an_atomic_write_to_a_region_at_an_odd_wire_address_is_an_operational_error() {
    let mut p = pair();
    let region = Region::alloc(64).unwrap();
    let mr = p.b.endpoint.register(p.b.pd, &region, AccessFlags::ALL, Some(0x1004)).unwrap();
    p.a.send(1, Operation::AtomicWrite(Remote { addr: 0x1008, rkey: mr.rkey }), 0, 8);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(region.to_vec(), vec![0; 64]);
}

#[test]
fn a_flush_to_persistence_stores_the_file_and_needs_one() {
    let persistent = AccessFlags::from_bits(0x30F).unwrap();
    let mut p = Pair::new(&Options { access: FLUSHABLE, ..Options::default() });
    let heap = Region::alloc(64).unwrap();
    assert_eq!(p.b.endpoint.register(p.b.pd, &heap, persistent, None), Err(VerbsError::NotPersistent));
    let attr = uroce::verbs::QpAttr { access: Some(persistent), ..uroce::verbs::QpAttr::default() };
    let attr = uroce::verbs::QpAttr { state: Some(uroce::verbs::QpState::Rts), ..attr };
    p.b.endpoint.modify_qp(p.b.qp, attr).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(10_000).unwrap();
    // SAFETY: nobody else knows the file.
    let region = unsafe { Region::map_file(&file, 10_000) }.unwrap();
    let mr = p.b.endpoint.register(p.b.pd, &region, persistent, None).unwrap();
    let there = Remote { addr: mr.iova + 5000, rkey: mr.rkey };
    p.a.region.write(0, b"stored").unwrap();
    p.a.send(1, Operation::Write(there), 0, 6);
    for (wr_id, placement, scope) in
        [(2, FlushPlacement::Persistent, FlushScope::Range), (3, FlushPlacement::Both, FlushScope::Region)]
    {
        p.a.send_local(wr_id, Operation::Flush { remote: there, length: 6, placement, scope });
    }
    p.settle();
    let want = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)];
    assert_eq!(statuses(&p.a.completions()), want);
    let mut text = [0; 6];
    file.seek(SeekFrom::Start(5000)).unwrap();
    file.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"stored");
}
