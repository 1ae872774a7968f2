//! `uroce ping`: both roles, and what goes wrong.

use crate::common::{Server, run};

fn serve(address: &str, more: &[&str]) -> Server {
    let mut args = vec!["ping", "-s", "-a", address, "-v"];
    args.extend(more);
    Server::bound_to_roce(&args, address)
}

fn ping(from: &str, to: &str, more: &[&str]) -> crate::common::Ran {
    let device = format!("udp:{from}");
    let mut args = vec!["ping", "-c", "--device", &device, "-a", to, "-V"];
    args.extend(more);
    run(&args)
}

#[test]
fn pings_look_like_rpings() {
    let server = serve("127.77.40.1", &[]);
    let client = ping("127.77.40.2", "127.77.40.1", &["-C", "3", "-v"]);
    let server = server.end();
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    // What rping printed beside the capture rping_v4.
    let log = std::fs::read_to_string(uroce_fixtures::by_name("rping_v4").unwrap().log_path()).unwrap();
    let logged = |prefix: &str| log.lines().filter(|l| l.starts_with(prefix)).collect::<Vec<_>>();
    assert_eq!(client.out.lines().collect::<Vec<_>>(), logged("ping data: "));
    assert_eq!(server.out.lines().collect::<Vec<_>>(), logged("server ping data: "));
    assert_eq!(server.err.trim_end(), logged("server DISCONNECT")[0]);
}

#[test]
fn large_pings_are_whole() {
    let server = serve("127.77.41.1", &["--json"]);
    let client = ping("127.77.41.2", "127.77.41.1", &["-C", "20", "-S", "65535", "--json"]);
    let server = server.end();
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    let document = client.json();
    assert_eq!((&document["count"], &document["validated"]), (&20.into(), &true.into()));
    assert_eq!(server.json()["pings"], 20);
}

#[test]
fn a_persistent_server_serves_one_after_the_other() {
    let server = serve("127.77.42.1", &["-P"]);
    for client in ["127.77.42.2", "127.77.42.3", "127.77.42.2"] {
        let ran = ping(client, "127.77.42.1", &["-C", "2"]);
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    drop(server);
}

#[test]
fn a_peer_that_never_answers_is_told_with_tries_and_time() {
    let ran = ping("127.77.43.2", "127.77.43.1", &["-C", "1"]);
    ran.fails(1, "no answer from 127.77.43.1:7174 after 8 tries in ");
    assert!(ran.err.contains("RDMA_CM_EVENT_UNREACHABLE, status -110"), "{ran:?}");
    // Nobody has the port, and the kernel says so.
    assert!(ran.err.contains("127.77.43.1 says that nobody has UDP port 4791 (ICMP port unreachable)"), "{ran:?}");
}

#[test]
fn a_service_that_is_not_there_is_refused() {
    let server = serve("127.77.44.1", &[]);
    let ran = ping("127.77.44.2", "127.77.44.1", &["-C", "1", "-p", "7175"]);
    ran.fails(1, "refused the connection: reason 8 (nobody listens on the service id); start the service there");
    drop(server);
}

#[test]
fn a_server_that_dies_ends_its_client() {
    let server = serve("127.77.45.1", &[]);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(400));
        drop(server);
    });
    let ran = ping("127.77.45.2", "127.77.45.1", &[]);
    killer.join().unwrap();
    // Either a request of the client was under way, or it waited for the server's.
    assert_eq!(ran.code, 1, "{ran:?}");
    let known = ["failed with status 12: no answer for PSN", "the server has acknowledged, and said nothing for 10 s"];
    assert!(known.iter().any(|text| ran.err.contains(text)), "{ran:?}");
}

#[test]
fn a_client_that_vanishes_does_not_stop_a_persistent_server() {
    let server = serve("127.77.46.1", &["-P", "--probe", "1"]);
    // The first client's later messages are lost, and it goes without a word: the server has nothing outstanding then.
    let first = ping("127.77.46.2", "127.77.46.1", &["--fault", "drop:send-only:5-9999:out"]);
    first.fails(1, "the SEND failed with status 12");
    let second = ping("127.77.46.3", "127.77.46.1", &["-C", "2"]);
    assert_eq!(second.code, 0, "{second:?}");
    drop(server);
}

#[test]
fn wrong_usage() {
    for args in [&["ping"][..], &["ping", "-c"], &["ping", "-s", "-c", "-a", "127.0.0.1"], &["ping", "-s", "-S", "25"]]
    {
        assert_eq!(run(args).code, 2, "{args:?}");
    }
}
