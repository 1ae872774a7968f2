//! Two simulated endpoints, each with two addresses and one QP: what the tests of paths stand on.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uroce::device::Verdict;
use uroce::endpoint::EndpointConfig;
use uroce::raw::Region;
use uroce::sim::{NodeId, RunEnd, World};
use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid, PathMtu, Psn, Qpn, RetryCount, RnrRetry, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AltPath, AsyncEvent, CqHandle, InitAttr, MemoryRegion, Operation, PathMigState,
    Payload, PdHandle, QpAttr, QpCapabilities, QpHandle, QpInit, QpOptions, QpState, QpTransition, QpType, RecvWr,
    Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, SrqInit, Verbs, WorkCompletion,
};
use uroce::wire::{Body, Flow, IpFields, Packet};
use uroce_tests::pair::blank_completion;

/// Bytes of each side's region.
pub(crate) const REGION: usize = 1 << 18;
/// First PSN of A, and of B.
pub(crate) const PSNS: [u32; 2] = [100, 5000];

/// How a [`Duo`] shall be.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) qp_type: QpType,
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr: u8,
    pub(crate) options: [QpOptions; 2],
    pub(crate) pkeys: [Vec<u16>; 2],
    pub(crate) pkey_index: [u16; 2],
    pub(crate) ipv6: bool,
    pub(crate) srq: bool,
    pub(crate) receives: u32,
    /// Changes the address vectors, A's first.
    pub(crate) av: fn(AddressVector) -> AddressVector,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            qp_type: QpType::Rc,
            timeout: 8,
            retry: 3,
            rnr_retry: 7,
            min_rnr: 5,
            options: [QpOptions::default(); 2],
            pkeys: [vec![0xFFFF], vec![0xFFFF]],
            pkey_index: [0, 0],
            ipv6: false,
            srq: false,
            receives: 64,
            av: |av| av,
        }
    }
}

/// One side.
pub(crate) struct End {
    pub(crate) node: NodeId,
    pub(crate) pd: PdHandle,
    pub(crate) cq: CqHandle,
    pub(crate) qp: QpHandle,
    pub(crate) qpn: Qpn,
    pub(crate) region: Region,
    pub(crate) mr: MemoryRegion,
    pub(crate) ips: [IpAddr; 2],
}

/// The two and their world.
pub(crate) struct Duo {
    pub(crate) world: World,
    pub(crate) ends: [End; 2],
    /// Whether the path between the first, and the second, addresses is cut.
    cut: [Arc<AtomicBool>; 2],
}

fn addresses(side: usize, ipv6: bool) -> [IpAddr; 2] {
    [0, 1].map(|net| {
        let text = if ipv6 { format!("fd0{net}::{}", side + 1) } else { format!("10.0.{net}.{}", side + 1) };
        text.parse().unwrap()
    })
}

fn end(world: &mut World, side: usize, setup: &Setup) -> End {
    let ips = addresses(side, setup.ipv6);
    let config = EndpointConfig {
        pkeys: setup.pkeys[side].iter().map(|k| uroce::types::PKey::new(*k)).collect(),
        qp_options: setup.options[side],
        ..EndpointConfig::new(ips.to_vec(), PathMtu::B4096)
    };
    let node = world.add_endpoint(config);
    let e = world.endpoint(node);
    let pd = e.alloc_pd().unwrap();
    let cq = e.create_cq(4096).unwrap();
    let srq = setup.srq.then(|| e.create_srq(SrqInit { pd, max_wr: setup.receives, max_sge: 1 }).unwrap());
    let caps = QpCapabilities { max_send_wr: 256, max_recv_wr: setup.receives, ..QpCapabilities::default() };
    let init = QpInit { pd, qp_type: setup.qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn: None };
    let qp = e.create_qp(init).unwrap();
    let qpn = e.query_qp(qp).unwrap().qpn;
    let region = Region::alloc(REGION).unwrap();
    let mr = e.register(pd, &region, AccessFlags::ALL, None).unwrap();
    End { node, pd, cq, qp, qpn, region, mr, ips }
}

impl Duo {
    pub(crate) fn new(setup: &Setup) -> Self {
        let mut world = World::new(7);
        let ends = [0, 1].map(|side| end(&mut world, side, setup));
        let cut = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let mut duo = Self { world, ends, cut };
        duo.connect(setup);
        duo.listen_to(|_, _| None);
        duo
    }

    fn connect(&mut self, setup: &Setup) {
        for side in 0..2 {
            let rtr = RtrAttr {
                av: (setup.av)(self.av(side, 0)),
                path_mtu: PathMtu::B1024,
                dest_qpn: self.ends[1 - side].qpn,
                rq_psn: Psn::from_wire(PSNS[1 - side]),
                max_dest_rd_atomic: 4,
                min_rnr_timer: RnrTimer::new(setup.min_rnr).unwrap(),
            };
            let rts = RtsAttr {
                sq_psn: Psn::from_wire(PSNS[side]),
                timeout: AckTimeout::new(setup.timeout).unwrap(),
                retry_count: RetryCount::new(setup.retry).unwrap(),
                rnr_retry: RnrRetry::new(setup.rnr_retry).unwrap(),
                max_rd_atomic: 4,
            };
            let init: QpAttr = InitAttr::connected(AccessFlags::ALL).into();
            let init = QpAttr { pkey_index: Some(setup.pkey_index[side]), ..init };
            let (rtr, rts): (QpAttr, QpAttr) = match setup.qp_type {
                QpType::Uc => (rtr.for_uc(), QpTransition::RtsPsn(rts.sq_psn).into()),
                _ => (rtr.into(), rts.into()),
            };
            for attr in [init, rtr, rts] {
                self.modify(side, attr);
            }
        }
    }

    /// From `side` to its peer between the addresses of network `net`.
    pub(crate) fn av(&self, side: usize, net: u8) -> AddressVector {
        AddressVector::new(Gid::from(self.ends[1 - side].ips[usize::from(net)]), net)
    }

    pub(crate) fn modify(&mut self, side: usize, attr: QpAttr) {
        let End { node, qp, .. } = self.ends[side];
        self.world.endpoint(node).modify_qp(qp, attr).unwrap();
    }

    /// Loads the path between the second addresses, and asks for REARM.
    pub(crate) fn rearm(&mut self, side: usize) {
        let alt = AltPath::new(self.av(side, 1), AckTimeout::new(9).unwrap());
        self.modify(side, Self::rearm_attr(alt));
    }

    pub(crate) fn rearm_attr(alt: AltPath) -> QpAttr {
        QpAttr { alt_path: Some(alt), path_mig_state: Some(PathMigState::Rearm), ..QpAttr::to_state(QpState::Rts) }
    }

    pub(crate) fn attr(&mut self, side: usize) -> QpAttr {
        let End { node, qp, .. } = self.ends[side];
        self.world.endpoint(node).query_qp(qp).unwrap().attr
    }

    pub(crate) fn state(&mut self, side: usize) -> QpState {
        self.attr(side).state.unwrap()
    }

    pub(crate) fn mig(&mut self, side: usize) -> PathMigState {
        self.attr(side).path_mig_state.unwrap()
    }

    /// The address that `side` sends to.
    pub(crate) fn peer_of(&mut self, side: usize) -> IpAddr {
        self.attr(side).av.unwrap().dgid.ip()
    }

    /// Cuts the path between the addresses of a network, or mends it.
    pub(crate) fn cut(&self, net: usize, cut: bool) {
        self.cut[net].store(cut, Ordering::Relaxed);
    }

    /// Shows every packet to `judge` before it is decided whether its path is cut.
    pub(crate) fn listen_to(
        &mut self,
        mut judge: impl FnMut(&uroce::sim::PassingPacket<'_>, &Packet<'_>) -> Option<Verdict> + Send + 'static,
    ) {
        let cut = self.cut.clone();
        let second: Vec<IpAddr> = self.ends.iter().map(|e| e.ips[1]).collect();
        self.world.set_hook(Box::new(move |passing| {
            let packet = Packet::parse(passing.bytes).expect("we send only what parses");
            let verdict = judge(passing, &packet);
            let net = usize::from(second.contains(&passing.flow.dst));
            verdict.or(cut[net].load(Ordering::Relaxed).then_some(Verdict::DROP))
        }));
    }

    fn sge(&self, side: usize, offset: usize, len: usize) -> [Sge; 1] {
        let mr = self.ends[side].mr;
        [Sge { addr: mr.iova + offset as u64, length: u32::try_from(len).unwrap(), lkey: mr.lkey }]
    }

    /// Memory of `side` as its peer names it.
    pub(crate) fn remote(&self, side: usize, offset: usize) -> Remote {
        let mr = self.ends[side].mr;
        Remote { addr: mr.iova + offset as u64, rkey: mr.rkey }
    }

    pub(crate) fn post(&mut self, side: usize, operation: Operation, offset: usize, len: usize) {
        let sges = self.sge(side, offset, len);
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        let End { node, qp, .. } = self.ends[side];
        self.world.endpoint(node).post_send(qp, &[wr]).unwrap();
    }

    pub(crate) fn recv(&mut self, side: usize, offset: usize, len: usize) {
        let sges = self.sge(side, offset, len);
        let End { node, qp, .. } = self.ends[side];
        self.world.endpoint(node).post_recv(qp, &[RecvWr { wr_id: 2, sges: &sges }]).unwrap();
    }

    /// Runs until nothing happens any more.
    pub(crate) fn settle(&mut self) {
        assert_eq!(self.world.run_until_idle(Duration::from_secs(600)), RunEnd::Idle);
    }

    pub(crate) fn completions(&mut self, side: usize) -> Vec<WorkCompletion> {
        let End { node, cq, qp, .. } = self.ends[side];
        let mut all = Vec::new();
        loop {
            let mut out = [blank_completion(qp); 16];
            let n = self.world.endpoint(node).poll_cq(cq, &mut out).unwrap();
            all.extend_from_slice(&out[..n]);
            if n == 0 {
                return all;
            }
        }
    }

    pub(crate) fn events(&mut self, side: usize) -> Vec<AsyncEvent> {
        let node = self.ends[side].node;
        core::iter::from_fn(|| self.world.endpoint(node).poll_event()).collect()
    }

    pub(crate) fn count(&mut self, side: usize, name: &str) -> u64 {
        let node = self.ends[side].node;
        self.world.endpoint(node).counters().named(name).unwrap()
    }
}

/// `packet` as bytes with a right ICRC for `flow`.
pub(crate) fn sealed(packet: &Packet<'_>, flow: &Flow, ip: IpFields) -> Vec<u8> {
    let payload = payload_of(packet);
    let mut bytes = vec![0; uroce::wire::segment_len(packet.header_len(), payload.len())];
    packet.write_headers(payload.len(), &mut bytes).unwrap();
    let end = packet.header_len() + payload.len();
    bytes[packet.header_len()..end].copy_from_slice(payload);
    uroce::wire::seal(flow, ip, &mut bytes, end);
    bytes
}

fn payload_of<'a>(packet: &Packet<'a>) -> &'a [u8] {
    match packet.body {
        Body::Request(request) => request.payload,
        Body::Response(response) => response.payload,
        Body::Datagram(datagram) => datagram.payload,
        Body::Cnp => &[],
    }
}
