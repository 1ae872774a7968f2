//! Snapshots of a host that runs.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::{InspectError, Inspector, PATIENCE, SCHEMA, Section, Snapshot, find_in, read};
use crate::engine::testing::{Side, engine};
use crate::host::{Handle, Host};
use crate::raw::Region;
use crate::verbs::{AccessFlags, Operation, QpTransition, Verbs};

/// Two hosts, connected.
fn hosts() -> (Host, Host, Side, Side) {
    let (a, b) = (Host::new(engine()), Host::new(engine()));
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (sa, sb) = (Side::new(&mut va, 64), Side::new(&mut vb, 64));
    sa.connect(&mut va, &sb);
    sb.connect(&mut vb, &sa);
    (a, b, sa, sb)
}

/// Runs one WRITE from one to the other.
fn write(v: &mut Handle, peer: &mut Handle, side: &Side, to: &Side) {
    side.post(v, 1, Operation::Write(to.remote()));
    let begin = Instant::now();
    while side.completed(v).is_none() {
        peer.drive();
        assert!(begin.elapsed() < Duration::from_secs(5), "the data path stands");
    }
}

#[test]
fn a_snapshot_says_what_lives_and_what_was_counted() {
    let (a, b, sa, sb) = hosts();
    let (mut va, mut vb) = (a.handle(), b.handle());
    write(&mut va, &mut vb, &sa, &sb);
    let dir = tempfile::tempdir().unwrap();
    let place = vec![dir.path().join("sockets")];
    let section = Section::new("extra", || serde_json::json!(["more"]));
    let inspector = Inspector::spawn_in(place.clone(), a.handle(), vec![section]).unwrap();
    assert_eq!(find_in(&place), [inspector.path()]);
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(place[0].as_path()), mode(inspector.path())), (0o700, 0o600));

    let snapshot = read(inspector.path()).unwrap();
    assert_eq!((snapshot.schema, snapshot.pid), (SCHEMA, std::process::id()));
    assert_eq!(snapshot.device.objects, [1, 1, 1, 0, 1, 0]);
    assert_eq!((snapshot.cqs.len(), snapshot.mrs.len(), snapshot.srqs.len(), snapshot.pds.len()), (1, 1, 0, 1));
    let qp = &snapshot.qps[0];
    assert_eq!((qp.lqpn, qp.rqpn, qp.state.as_str()), (sa.qpn.get(), Some(sb.qpn.get()), "RTS"));
    assert_eq!((qp.sq_psn, qp.unacked_psn, qp.waiting.as_str()), (1, Some(1), "nothing"));
    assert!(qp.counters.contains(&("rdma_sends".to_owned(), 1)), "{qp:?}");
    assert!(snapshot.device.counters.contains(&("sent_pkts".to_owned(), 1)), "{:?}", snapshot.device);
    assert_eq!(snapshot.sections["extra"], serde_json::json!(["more"]));

    let path = inspector.path().to_owned();
    drop(inspector);
    assert!(!path.exists());
    assert!(matches!(read(&path), Err(InspectError::Gone)));
}

#[test]
fn what_waits_says_for_what() {
    let (a, _b, sa, sb) = hosts();
    let mut va = a.handle();
    sa.post(&mut va, 1, Operation::Write(sb.remote()));
    va.drive();
    std::thread::sleep(Duration::from_millis(5));
    let qp = Snapshot::take(&va, &[]).qps.remove(0);
    assert_eq!((qp.waiting.as_str(), qp.sends, qp.in_flight), ("ack", 1, 1));
    assert!(qp.waits_ns.unwrap() >= 5_000_000, "{qp:?}");
    assert!(qp.reason.unwrap().starts_with("no ACK of PSN 0 for "));
    // A QP that was reset begins anew.
    va.modify_qp(sa.qp, QpTransition::Reset.into()).unwrap();
    let qp = Snapshot::take(&va, &[]).qps.remove(0);
    assert_eq!((qp.waiting.as_str(), qp.waits_ns, qp.idle_ns), ("nothing", None, None));
}

#[test]
fn a_client_that_does_not_read_holds_up_neither_data_nor_others_for_long() {
    let (a, b, sa, sb) = hosts();
    let (mut va, mut vb) = (a.handle(), b.handle());
    let pd = va.alloc_pd().unwrap();
    let region = Region::alloc(64).unwrap();
    // More than a socket's buffer takes.
    for _ in 0..8_000 {
        va.register(pd, &region, AccessFlags::NONE, None).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let inspector = Inspector::spawn_in(vec![dir.path().join("s")], a.handle(), Vec::new()).unwrap();
    let mut rude: Vec<_> = (0..2).map(|_| UnixStream::connect(inspector.path()).unwrap()).collect();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(300) {
        write(&mut va, &mut vb, &sa, &sb);
    }
    // Behind two who do not read, it is our turn after their time.
    let mut patient = UnixStream::connect(inspector.path()).unwrap();
    patient.set_read_timeout(Some(3 * PATIENCE)).unwrap();
    let mut text = Vec::new();
    patient.read_to_end(&mut text).unwrap();
    let snapshot: Snapshot = serde_json::from_slice(&text).unwrap();
    assert_eq!(snapshot.mrs.len(), 8_001);
    assert!(begin.elapsed() >= PATIENCE, "they were hung up on too early to be a test");
    // They were sent a beginning only.
    let mut got = Vec::new();
    rude.remove(0).read_to_end(&mut got).unwrap();
    assert!(got.len() < text.len());
}

#[test]
fn a_stopped_process_that_many_asked_holds_nobody_up() {
    use socket2::{Domain, SockAddr, Socket, Type};
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let path = dir.path().join(format!("{}-uroce0.sock", std::process::id()));
    let address = SockAddr::unix(&path).unwrap();
    let stopped = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    stopped.bind(&address).unwrap();
    stopped.listen(1).unwrap();
    let mut asked = Vec::new();
    loop {
        let client = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        client.set_nonblocking(true).unwrap();
        if client.connect(&address).is_err() {
            break;
        }
        asked.push(client);
    }
    let (done, answer) = std::sync::mpsc::channel();
    let (place, socket) = (dir.path().to_owned(), path.clone());
    std::thread::spawn(move || {
        let found = find_in(&[place]);
        done.send((found, matches!(read(&socket), Err(InspectError::Silent)))).unwrap();
    });
    let (found, silent) = answer.recv_timeout(Duration::from_secs(10)).expect("it hangs");
    assert_eq!((found, silent), (vec![path], true));
}

#[test]
fn more_objects_than_are_listed_are_said_to_be_more() {
    let host = Host::new(engine());
    let mut v = host.handle();
    for _ in 0..super::OBJECTS_MAX + 100 {
        v.alloc_pd().unwrap();
    }
    let snapshot = Snapshot::take(&v, &[]);
    assert!(snapshot.truncated);
    assert_eq!(snapshot.device.objects[4], super::OBJECTS_MAX + 100);
    assert!(snapshot.pds.len() >= super::OBJECTS_MAX);
}
