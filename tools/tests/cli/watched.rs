//! Endpoints to look at, in a directory of sockets that no other test sees.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use uroce::device::udp::UdpDevice;
use uroce::engine::Engine;
use uroce::host::{Handle, Host};
use uroce::inspect::Inspector;
use uroce::raw::Region;
use uroce::types::{AckTimeout, Gid, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, InitAttr, Operation, Payload, QpCapabilities, QpHandle, QpInit, QpTransition, QpType,
    Remote, RtrAttr, RtsAttr, SendFlags, SendWr, Sge, Verbs,
};

use crate::common::{Ran, Server, uroce};

/// A directory of sockets, and `uroce` that uses it.
pub(crate) struct Watched {
    dir: tempfile::TempDir,
}

impl Watched {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// Where the sockets lie.
    pub(crate) fn sockets(&self) -> PathBuf {
        self.dir.path().join("sockets")
    }

    /// `uroce` that uses this directory, not yet started.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = uroce(args);
        command.env("UROCE_INSPECT_DIR", self.sockets());
        command
    }

    /// Runs `uroce` to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::of(&self.command(args).output().unwrap())
    }

    /// Runs it for its rows, in the JSON of rdma.
    #[track_caller]
    pub(crate) fn rows(&self, args: &[&str]) -> Vec<Value> {
        let ran = self.run(args);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
        assert_eq!(ran.out.lines().count(), 1, "one line, as rdma -j: {ran:?}");
        serde_json::from_str(&ran.out).unwrap()
    }

    /// A server and a client that ping and ping, from the third ping on. `more` goes to the client.
    pub(crate) fn pings(&self, net: &str, more: &[&str]) -> (Server, Server) {
        let (near, far, device) = (format!("{net}.1"), format!("{net}.2"), format!("udp:{net}.2"));
        let server = Server::of(self.command(&["ping", "-s", "-a", &near])).has_roce(&near);
        let mut args = vec!["ping", "-c", "--device", &device, "-a", &near, "-C", "100000000"];
        args.extend(more);
        let client = Server::of(self.command(&args)).has_roce(&far);
        self.until(server.pid(), "rdma_sends", 13);
        (server, client)
    }

    /// Waits until a counter of a process has come to `value`.
    #[track_caller]
    pub(crate) fn until(&self, pid: u32, counter: &str, value: u64) {
        let begin = Instant::now();
        while self.counter(pid, counter) < Some(value) {
            assert!(begin.elapsed() < Duration::from_secs(20), "{counter} does not come to {value}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until a process has an id of its connection manager.
    #[track_caller]
    pub(crate) fn until_it_listens(&self, pid: u32) {
        let begin = Instant::now();
        while self.rows_or_none(&["res", "-j", "show", "cm_id", "pid", &pid.to_string()]).is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(20), "no id");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// As [`Watched::rows`], also before anybody can be looked at.
    fn rows_or_none(&self, args: &[&str]) -> Vec<Value> {
        serde_json::from_str(&self.run(args).out).unwrap()
    }

    fn counter(&self, pid: u32, counter: &str) -> Option<u64> {
        let rows = self.rows_or_none(&["stat", "-j", "show", "pid", &pid.to_string()]);
        rows.first()?[counter].as_u64()
    }
}

/// An endpoint of this test's own process, which embeds the stack and lets others look.
pub(crate) struct Embedded {
    _inspector: Inspector,
    host: Host,
    qp: QpHandle,
}

impl Embedded {
    /// One on `address` with an RC QP towards `peer`, where nobody is, and a timeout of `timeout` (0: for ever).
    pub(crate) fn towards_nobody(watched: &Watched, address: &str, peer: &str, timeout: u8) -> Self {
        let host = Host::new(Engine::open(UdpDevice::open(address.parse().unwrap()).unwrap()).unwrap());
        let mut v = host.handle();
        let pd = v.alloc_pd().unwrap();
        let cq = v.create_cq(16).unwrap();
        let caps = QpCapabilities::default();
        let qp_type = QpType::Rc;
        let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: true, qpn: None };
        let qp = v.create_qp(init).unwrap();
        let peer: std::net::IpAddr = peer.parse().unwrap();
        let rtr = RtrAttr {
            av: AddressVector::new(Gid::from(peer), 0),
            path_mtu: PathMtu::B1024,
            dest_qpn: Qpn::from_wire(0x1234),
            rq_psn: Psn::ZERO,
            max_dest_rd_atomic: 1,
            min_rnr_timer: RnrTimer::DEFAULT,
        };
        let rts = RtsAttr { timeout: AckTimeout::new(timeout).unwrap(), ..RtsAttr::usual(Psn::ZERO) };
        for step in
            [QpTransition::Init(InitAttr::connected(AccessFlags::ALL)), QpTransition::Rtr(rtr), QpTransition::Rts(rts)]
        {
            v.modify_qp(qp, step.into()).unwrap();
        }
        let region = Region::alloc(64).unwrap();
        let mr = v.register(pd, &region, AccessFlags::ALL, None).unwrap();
        let inspector = Inspector::spawn_in(vec![watched.sockets()], host.handle(), Vec::new()).unwrap();
        let this = Self { _inspector: inspector, host, qp };
        let sges = [Sge { addr: mr.iova, length: 8, lkey: mr.lkey }];
        let operation = Operation::Write(Remote { addr: mr.iova, rkey: mr.rkey });
        let (payload, flags) = (Payload::Sges(&sges), SendFlags::SIGNALED);
        v.post_send(qp, &[SendWr { wr_id: 1, operation, payload, flags, destination: None }]).unwrap();
        v.drive();
        this
    }

    /// Its verbs.
    pub(crate) fn verbs(&self) -> Handle {
        self.host.handle()
    }

    /// The number of its QP.
    pub(crate) fn lqpn(&self) -> u32 {
        self.verbs().query_qp(self.qp).unwrap().qpn.get()
    }
}
