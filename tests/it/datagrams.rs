//! UC and UD: what is lost stays lost, what arrives is whole.

use uroce::counters::DropReason;
use uroce::types::{Gid, Imm, PathMtu, QKey, Qpn};
use uroce::verbs::{
    AddressVector, Operation, Payload, PostError, QpState, QpTransition, QpType, SendFlags, SendWr, UdDestination,
    Verbs, WcData, WcOpcode, WcStatus,
};
use uroce_tests::pair::{Fate, Options, Pair, QKEY, Side};

fn uc() -> Pair {
    Pair::new(&Options { qp_type: QpType::Uc, mtu: PathMtu::B256, ..Options::default() })
}

#[test]
fn uc_send_and_write_arrive_without_an_answer() {
    let mut p = uc();
    p.a.region.write(0, &[5; 1000]).unwrap();
    p.b.recv(1, 0, 1000);
    p.b.recv(2, 0, 0);
    let there = p.b.remote(2000);
    p.a.send(1, Operation::Send, 0, 1000);
    p.a.send(2, Operation::Write(there), 0, 600);
    p.a.send(3, Operation::WriteImm(there, Imm::new(9)), 0, 600);
    p.settle();
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
    let got: Vec<_> = p.b.completions().iter().map(|c| (c.wr_id, c.byte_len, c.opcode, c.data)).collect();
    assert_eq!(
        got,
        [(1, 1000, WcOpcode::Recv, WcData::None), (2, 600, WcOpcode::RecvRdmaWithImm, WcData::Imm(Imm::new(9))),]
    );
    assert!(p.ladder().iter().all(|l| l.starts_with("A UC_")), "{:?}", p.ladder());
    assert_eq!(p.b.region.to_vec()[2000..2600], [5; 600]);
}

#[test]
fn uc_a_gap_drops_the_message_and_the_receive_is_used_again_from_its_start() {
    let mut p = uc();
    p.a.region.write(0, &[1; 1000]).unwrap();
    p.a.region.write(1000, &[2; 300]).unwrap();
    p.b.recv(7, 0, 1000);
    p.a.send(1, Operation::Send, 0, 1000);
    p.a.send(2, Operation::Send, 1000, 300);
    p.run(|_, packet| if packet.psn.get() == 102 { Fate::Drop } else { Fate::Deliver });
    let got = p.b.completions();
    assert_eq!(got.iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(7, 300)]);
    assert_eq!(p.b.region.to_vec()[..300], [2; 300]);
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::UcSequence), 1);
    assert_eq!(p.a.completions().len(), 2);
}

#[test]
fn uc_has_no_reads_atomics_or_invalidates() {
    let mut p = uc();
    let remote = p.b.remote(0);
    let sge = [p.a.sge(0, 8)];
    for operation in [
        Operation::Read(remote),
        Operation::FetchAdd { remote, add: 1 },
        Operation::CompareSwap { remote, compare: 0, swap: 0 },
        Operation::SendInvalidate(remote.rkey),
    ] {
        let payload = Payload::Sges(&sge);
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        let refused = p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap_err();
        assert_eq!((refused.index, refused.error), (0, PostError::WrongOperation));
    }
}

fn ud() -> Pair {
    Pair::new(&Options { qp_type: QpType::Ud, ..Options::default() })
}

fn datagram(p: &mut Pair, operation: Operation, bytes: &[u8], qpn: Qpn, qkey: QKey) {
    let av = AddressVector::new("10.0.0.2".parse::<std::net::IpAddr>().map(Gid::from).unwrap(), 0);
    let ah = p.a.endpoint.create_ah(p.a.pd, av).unwrap();
    let destination = Some(UdDestination { ah, qpn, qkey });
    let wr = SendWr { wr_id: 1, operation, payload: Payload::Inline(bytes), flags: SendFlags::SIGNALED, destination };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
}

#[test]
fn ud_puts_40_bytes_before_the_payload_and_names_the_sender() {
    let mut p = ud();
    p.b.recv(1, 0, 200);
    let qpn = p.b.qpn;
    datagram(&mut p, Operation::SendImm(Imm::new(77)), b"hello", qpn, QKEY);
    p.settle();
    let wc = p.b.completions()[0];
    assert_eq!((wc.status, wc.byte_len, wc.data), (WcStatus::Success, 45, WcData::Imm(Imm::new(77))));
    assert_eq!((wc.src_qp, wc.grh), (p.a.qpn, true));
    let got = p.b.region.to_vec();
    // 20 bytes of nothing, then the IPv4 header: version 4, protocol 17, 10.0.0.1 to 10.0.0.2.
    assert_eq!(got[..20], [0; 20]);
    assert_eq!((got[20], got[29]), (0x45, 17));
    assert_eq!(got[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert_eq!(got[40..45], *b"hello");
}

#[test]
fn ud_drops_what_does_not_fit_the_key_or_the_receive_and_keeps_the_receive() {
    let mut p = ud();
    let qpn = p.b.qpn;
    datagram(&mut p, Operation::Send, b"x", qpn, QKEY);
    p.settle();
    p.b.recv(1, 0, 44);
    datagram(&mut p, Operation::Send, b"x", qpn, QKey::new(1));
    datagram(&mut p, Operation::Send, b"fives", qpn, QKEY);
    datagram(&mut p, Operation::Send, b"four", qpn, QKEY);
    p.settle();
    assert_eq!(p.b.completions().iter().map(|c| c.byte_len).collect::<Vec<_>>(), [44]);
    let c = p.b.endpoint.counters();
    assert_eq!(c.dropped(DropReason::NoReceiveWqe), 1);
    assert_eq!(c.dropped(DropReason::QKeyMismatch), 1);
    assert_eq!(c.dropped(DropReason::ReceiveTooSmall), 1);
    assert_eq!(p.a.completions().len(), 4);
    assert!(p.take_sent(Side::B).is_empty());
}

#[test]
fn a_privileged_q_key_stands_for_the_qps_own() {
    let mut p = ud();
    p.b.recv(1, 0, 100);
    let qpn = p.b.qpn;
    datagram(&mut p, Operation::Send, b"x", qpn, QKey::new(0x8000_0000));
    p.settle();
    assert_eq!(p.b.completions().len(), 1);
}

#[test]
fn ud_messages_are_at_most_one_path_mtu() {
    let mut p = ud();
    let there = Gid::from(std::net::Ipv4Addr::new(10, 0, 0, 2));
    let ah = p.a.endpoint.create_ah(p.a.pd, AddressVector::new(there, 0));
    let sge = [p.a.sge(0, 4097)];
    let destination = Some(UdDestination { ah: ah.unwrap(), qpn: p.b.qpn, qkey: QKEY });
    let payload = Payload::Sges(&sge);
    let wr = SendWr { wr_id: 1, operation: Operation::Send, payload, flags: SendFlags::SIGNALED, destination };
    let refused = p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap_err();
    assert_eq!(refused.error, PostError::MessageTooLong { len: 4097, max: 4096 });
    let wr = SendWr { destination: None, ..wr };
    assert_eq!(p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap_err().error, PostError::Destination);
}

/// A failed send takes a UC QP to SQE, not to ERR; back in RTS it goes on, and the peer finds no gap it cannot cross.
#[test]
fn uc_goes_on_after_sqe() {
    let mut p = uc();
    p.b.recv(1, 0, 1000);
    p.b.recv(2, 0, 1000);
    p.a.region.write(0, &[7; 1000]).unwrap();
    p.a.send(1, Operation::Send, 0, 600);
    // Three packets that never go: the element is outside the region.
    p.a.send(2, Operation::Send, 1 << 16, 600);
    p.a.send(3, Operation::Send, 0, 600);
    p.settle();
    let done: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(done, [(1, WcStatus::Success), (2, WcStatus::LocalProtection), (3, WcStatus::WorkRequestFlushed)]);
    assert_eq!(p.a.endpoint.query_qp(p.a.qp).unwrap().state, QpState::Sqe);
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Resume.into()).unwrap();
    p.a.send(4, Operation::Send, 0, 600);
    p.settle();
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [4]);
    let got: Vec<_> = p.b.completions().iter().map(|c| (c.wr_id, c.byte_len)).collect();
    assert_eq!(got, [(1, 600), (2, 600)]);
    assert_eq!(p.ladder().last().unwrap(), "A UC_SEND_LAST 105");
}
