//! Messages of 2 GiB, the longest there are.

use uroce::raw::Region;
use uroce::types::PathMtu;
use uroce::verbs::{AccessFlags, Operation, Payload, Remote, SendFlags, SendWr, Sge, Verbs, WcStatus};
use uroce_tests::pair::{Options, Pair};

const LEN: u32 = 1 << 31;
/// Where content is looked at: a few bytes in every stretch of this size, and the ends.
const STRIDE: usize = 1 << 20;

fn mark(region: &Region, salt: u64) {
    for at in (0..region.len() - 8).step_by(STRIDE).chain([region.len() - 8]) {
        region.write(at, &(at as u64 ^ salt).to_le_bytes()).unwrap();
    }
}

fn assert_marked(region: &Region, salt: u64) {
    for at in (0..region.len() - 8).step_by(STRIDE).chain([region.len() - 8]) {
        let mut bytes = [0; 8];
        region.read(at, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), at as u64 ^ salt, "at {at:#x}");
    }
}

/// At a path MTU of 256 such a message has 2^23 packets: half the circle of PSNs, where modular order ends.
#[test]
fn two_gibibytes_written_at_256_and_read_at_4096() {
    for (mtu, read) in [(PathMtu::B256, false), (PathMtu::B4096, true)] {
        let mut p = Pair::new(&Options { mtu, psn_a: 0x40_0001, ..Options::default() });
        let (here, there) =
            (Region::map_anonymous(LEN as usize).unwrap(), Region::map_anonymous(LEN as usize).unwrap());
        mark(if read { &there } else { &here }, 0x55);
        let (pd_a, pd_b) = (p.a.pd, p.b.pd);
        let local = p.a.endpoint.register(pd_a, &here, AccessFlags::ALL, None).unwrap();
        let remote = p.b.endpoint.register(pd_b, &there, AccessFlags::ALL, None).unwrap();
        let sges = [Sge { addr: local.iova, length: LEN, lkey: local.lkey }];
        let at = Remote { addr: remote.iova, rkey: remote.rkey };
        let operation = if read { Operation::Read(at) } else { Operation::Write(at) };
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
        p.stream();
        let done = p.a.completions();
        assert_eq!((done.len(), done[0].status), (1, WcStatus::Success));
        assert_marked(if read { &here } else { &there }, 0x55);
        assert_eq!(p.a.endpoint.counters().retransmitted_pkts, 0);
        // One byte more is refused at the call.
        let sges = [sges[0], Sge { length: 1, ..sges[0] }];
        let wr = SendWr { payload: Payload::Sges(&sges), ..wr };
        assert!(p.a.endpoint.post_send(p.a.qp, &[wr]).is_err());
    }
}
