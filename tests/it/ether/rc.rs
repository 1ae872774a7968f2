//! A reliable connection over each pair of devices that can meet on a wire: the ICRC covers outer headers that one side
//! writes and the other, or the kernel, may only guess.

use uroce::device::udp::UdpDevice;
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::types::{Gid, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, CqHandle, InitAttr, MemoryRegion, Operation, Payload, QpCapabilities, QpHandle, QpInit,
    QpTransition, QpType, RecvWr, Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs, WcOpcode, WcStatus,
    WorkCompletion,
};

use super::*;

/// Bytes of a message: some hundred packets.
const LEN: usize = 200_000;

pub(super) struct Side {
    pub(super) engine: Engine<Box<dyn Device>>,
    cq: CqHandle,
    qp: QpHandle,
    pub(super) qpn: Qpn,
    pub(super) mr: MemoryRegion,
    region: Region,
    /// Bytes of a message; the region has room for two.
    len: usize,
}

impl Side {
    pub(super) fn new(device: Box<dyn Device>) -> Self {
        Self::sized(device, LEN)
    }

    fn sized(device: Box<dyn Device>, len: usize) -> Self {
        let mut engine = Engine::open(device).unwrap();
        let verbs = engine.endpoint_mut();
        let pd = verbs.alloc_pd().unwrap();
        let cq = verbs.create_cq(64).unwrap();
        let caps = QpCapabilities::default();
        let (qp_type, srq) = (QpType::Rc, None);
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn: None };
        let qp = verbs.create_qp(init).unwrap();
        let region = Region::alloc(2 * len).unwrap();
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).unwrap();
        let qpn = verbs.query_qp(qp).unwrap().qpn;
        Self { engine, cq, qp, qpn, mr, region, len }
    }

    /// Connects to `peer` from the GID with this index.
    fn connect(&mut self, gid_index: u8, peer: Gid, dest_qpn: Qpn, path_mtu: PathMtu) {
        self.connect_along(AddressVector::new(peer, gid_index), dest_qpn, path_mtu);
    }

    /// Connects along `av`.
    pub(super) fn connect_along(&mut self, av: AddressVector, dest_qpn: Qpn, path_mtu: PathMtu) {
        let rtr = RtrAttr {
            av,
            path_mtu,
            dest_qpn,
            rq_psn: Psn::ZERO,
            max_dest_rd_atomic: 4,
            min_rnr_timer: RnrTimer::DEFAULT,
        };
        let verbs = self.engine.endpoint_mut();
        verbs.modify_qp(self.qp, QpTransition::Init(InitAttr::connected(AccessFlags::ALL)).into()).unwrap();
        verbs.modify_qp(self.qp, QpTransition::Rtr(rtr).into()).unwrap();
        verbs.modify_qp(self.qp, QpTransition::Rts(RtsAttr::usual(Psn::ZERO)).into()).unwrap();
    }

    pub(super) fn gid(&mut self, address: IpAddr) -> (u8, Gid) {
        let gids = self.engine.endpoint_mut().query_gids();
        let at = gids.iter().position(|g| g.gid.ip() == address).unwrap();
        (at as u8, gids[at].gid)
    }

    /// The first or second half of the region.
    pub(super) fn half(&self, second: bool) -> Sge {
        let (addr, length) = (self.mr.iova + u64::from(second) * self.len as u64, self.len as u32);
        Sge { addr, length, lkey: self.mr.lkey }
    }

    pub(super) fn post(&mut self, operation: Operation, second: bool) {
        let sges = [self.half(second)];
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        self.engine.endpoint_mut().post_send(self.qp, &[wr]).unwrap();
    }

    fn completed(&mut self) -> Option<WcOpcode> {
        let mut out = [WorkCompletion::blank(self.qp)];
        let n = self.engine.endpoint_mut().poll_cq(self.cq, &mut out).unwrap();
        assert!(n == 0 || out[0].status == WcStatus::Success, "{out:?}");
        (n == 1).then_some(out[0].opcode)
    }
}

/// Runs both until each has its completions.
pub(super) fn run(a: &mut Side, b: &mut Side, of_a: &[WcOpcode], of_b: &[WcOpcode]) {
    let end = now() + Duration::from_secs(20);
    let (mut got_a, mut got_b) = (Vec::new(), Vec::new());
    while (got_a.len() < of_a.len() || got_b.len() < of_b.len()) && now() < end {
        a.engine.poll().unwrap();
        b.engine.poll().unwrap();
        got_a.extend(a.completed());
        got_b.extend(b.completed());
    }
    let lost = (a.engine.device().lost(), b.engine.device().lost());
    assert_eq!((&got_a[..], &got_b[..]), (of_a, of_b), "{lost:?}");
}

/// SEND, WRITE and READ of `LEN` bytes from `x` to `y`.
pub(super) fn exchange(a: Box<dyn Device>, b: Box<dyn Device>, x: IpAddr, y: IpAddr) {
    exchange_of(a, b, x, y, LEN, PathMtu::B2048);
}

/// The same with `len` bytes, on interfaces of path MTU `most`.
pub(super) fn exchange_of(a: Box<dyn Device>, b: Box<dyn Device>, x: IpAddr, y: IpAddr, len: usize, most: PathMtu) {
    let mtu = a.capabilities().path_mtu.min(b.capabilities().path_mtu);
    assert_eq!(mtu, most, "packets fill the interface");
    exchange_in(a, b, (x, y), len, mtu);
}

/// The same in packets of `mtu`.
pub(super) fn exchange_in(a: Box<dyn Device>, b: Box<dyn Device>, (x, y): (IpAddr, IpAddr), len: usize, mtu: PathMtu) {
    let (mut a, mut b) = (Side::sized(a, len), Side::sized(b, len));
    let ((ia, ga), (ib, gb)) = (a.gid(x), b.gid(y));
    let (qa, qb) = (a.qpn, b.qpn);
    a.connect(ia, gb, qb, mtu);
    b.connect(ib, ga, qa, mtu);
    let pattern: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    a.region.write(0, &pattern).unwrap();
    let sges = [b.half(false)];
    b.engine.endpoint_mut().post_recv(b.qp, &[RecvWr { wr_id: 7, sges: &sges }]).unwrap();
    a.post(Operation::Send, false);
    run(&mut a, &mut b, &[WcOpcode::Send], &[WcOpcode::Recv]);
    assert_eq!(b.region.to_vec()[..len], pattern);
    let remote = Remote { addr: b.half(true).addr, rkey: b.mr.rkey };
    a.post(Operation::Write(remote), false);
    run(&mut a, &mut b, &[WcOpcode::RdmaWrite], &[]);
    assert_eq!(b.region.to_vec()[len..], pattern);
    a.post(Operation::Read(remote), true);
    run(&mut a, &mut b, &[WcOpcode::RdmaRead], &[]);
    assert_eq!(a.region.to_vec()[len..], pattern);
    for side in [&mut a, &mut b] {
        assert_eq!(side.engine.device().lost(), Default::default());
        // No ICRC was wrong, nor anything else. (A loaded machine may make a retransmission timer fire.)
        let counters = side.engine.endpoint_mut().counters();
        assert_eq!(counters.dropped_in_all(), 0, "{counters:?}");
    }
}

#[test]
fn packet_to_packet_by_every_gid() {
    let lab = Lab::new();
    for i in 0..3 {
        let (a, b) = (lab.shared(&lab.a), lab.shared(&lab.b));
        let (x, y) = (a.capabilities().addresses[i], b.capabilities().addresses[i]);
        exchange(Box::new(a), Box::new(b), x, y);
    }
}

#[test]
fn own_address_to_shared_address() {
    let lab = Lab::new();
    for (x, y) in [("10.77.0.9", "10.77.0.2"), ("fd77::9", "fd77::2")] {
        let own = AfPacketConfig::own("v0", OWN_MAC, vec![address(x)]);
        let (a, b) = (lab.open(&lab.a, own).unwrap(), lab.shared(&lab.b));
        exchange(Box::new(a), Box::new(b), address(x), address(y));
    }
}

#[test]
fn packet_to_udp_socket_and_back() {
    let lab = Lab::new();
    for (x, y) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let (x, y) = (address(x), address(y));
        let udp = || inside(&lab.b, || UdpDevice::open(y).unwrap());
        exchange(Box::new(lab.shared(&lab.a)), Box::new(udp()), x, y);
        exchange(Box::new(udp()), Box::new(lab.shared(&lab.a)), y, x);
    }
}

#[test]
fn pnet_to_packet_and_back() {
    let lab = Lab::new();
    let (x, y) = (address("10.77.0.1"), address("10.77.0.2"));
    let pnet = || inside(&lab.a, || PnetDevice::open("v0")).unwrap();
    exchange(Box::new(pnet()), Box::new(lab.shared(&lab.b)), x, y);
    exchange(Box::new(lab.shared(&lab.b)), Box::new(pnet()), y, x);
}
