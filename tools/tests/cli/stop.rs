//! SIGINT and SIGTERM: peers are told, and the exit code says whether there was more to do.

use std::time::{Duration, Instant};

use crate::common::Server;
use crate::watched::Watched;

/// Less than a peer that is not told would take to notice.
const AT_ONCE: Duration = Duration::from_secs(3);

const BEFORE_ITS_END: &str = "ended by SIGTERM before it was done";

#[test]
fn a_server_that_is_ended_tells_its_client() {
    let watched = Watched::new();
    let (near, device) = ("127.90.10.1", "udp:127.90.10.2");
    let server = Server::of(watched.command(&["ping", "-s", "-P", "-a", near, "--json"])).has_roce(near);
    let client = Server::of(watched.command(&["ping", "-c", "--device", device, "-a", near, "-C", "100000000"]));
    watched.until(server.pid(), "rdma_sends", 13);
    let begin = Instant::now();
    server.signal("TERM");
    let server = server.end();
    // It serves until it is ended: that is its job.
    assert_eq!((server.code, &server.json()["clients"]), (0, &1.into()), "{server:?}");
    client.end().fails(1, "disconnected during");
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn a_client_that_pings_for_ever_ends_well_and_tells_its_server() {
    let watched = Watched::new();
    let (near, device) = ("127.90.11.1", "udp:127.90.11.2");
    let server = Server::of(watched.command(&["ping", "-s", "-a", near])).has_roce(near);
    let client = Server::of(watched.command(&["--json", "ping", "-c", "--device", device, "-a", near]));
    watched.until(server.pid(), "rdma_sends", 13);
    let begin = Instant::now();
    client.signal("INT");
    let client = client.end();
    assert_eq!(client.code, 0, "{client:?}");
    assert!(client.json()["count"].as_u64() > Some(2), "{client:?}");
    // It hears of it between two pings or, more likely, during one.
    let server = server.end();
    assert!(server.err.contains("server DISCONNECT EVENT...") || server.err.contains("disconnected"), "{server:?}");
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn a_job_that_is_cut_off_has_failed() {
    let watched = Watched::new();
    let server =
        Server::of(watched.command(&["cm", "connect", "-b", "127.90.12.1", "-c", "2"])).has_roce("127.90.12.1");
    let client = Server::of(watched.command(&["cm", "connect", "-s", "127.90.12.1", "-b", "127.90.12.2"]));
    // REQ and RTU of one of the two connections that it waits for.
    watched.until(server.pid(), "rcvd_pkts", 2);
    let begin = Instant::now();
    server.signal("TERM");
    server.end().fails(1, BEFORE_ITS_END);
    client.end().fails(1, "the peer disconnected after 0 of 10 messages");
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn a_server_without_a_client_just_ends() {
    for (args, address) in [
        (&["ping", "-s", "-a", "127.90.13.1"][..], "127.90.13.1"),
        (&["perf", "send", "bw", "-d", "udp:127.90.13.2"], "127.90.13.2"),
        (&["cm", "datagram", "-b", "127.90.13.3"], "127.90.13.3"),
        (&["cm", "time", "-b", "127.90.13.4"], "127.90.13.4"),
        (&["cm", "multicast", "-m", "239.7.90.13", "-b", "127.90.13.5"], "127.90.13.5"),
    ] {
        let watched = Watched::new();
        let server = Server::of(watched.command(args)).has_roce(address);
        // Its connection manager is there, and with it its answer to signals.
        watched.until_it_listens(server.pid());
        server.signal("TERM");
        server.end().fails(1, BEFORE_ITS_END);
    }
    let forever = ["--json", "cm", "time", "-b", "127.90.13.6", "--forever"];
    let watched = Watched::new();
    let server = Server::of(watched.command(&forever)).has_roce("127.90.13.6");
    watched.until_it_listens(server.pid());
    server.signal("INT");
    let server = server.end();
    assert_eq!((server.code, &server.json()["connections"]), (0, &0.into()), "{server:?}");
}

#[test]
fn both_ends_of_a_measurement_part() {
    for (net, ended, left) in [("127.90.14", 0, 1), ("127.90.15", 1, 0)] {
        let watched = Watched::new();
        let [near, far] = [1, 2].map(|host| format!("{net}.{host}"));
        let server =
            Server::of(watched.command(&["perf", "write", "bw", "-d", &format!("udp:{near}")])).has_roce(&near);
        let device = format!("udp:{far}");
        let client = Server::of(watched.command(&["perf", "write", "bw", "-d", &device, "-D", "60", &near]));
        watched.until(client.pid(), "sent_pkts", 100);
        let begin = Instant::now();
        let ends = [server, client];
        ends[ended].signal("TERM");
        let mut ends = ends.map(Server::end).into_iter();
        let ends = [ends.next().unwrap(), ends.next().unwrap()];
        ends[ended].fails(1, BEFORE_ITS_END);
        // A client without its server has measured nothing; a server's job is what its client wants.
        assert_eq!(ends[left].code, i32::try_from(left).unwrap(), "{ends:?}");
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.90.16", &[]);
    // It answers nothing any more, so its server's goodbye is in vain.
    client.signal("STOP");
    server.signal("TERM");
    let begin = Instant::now();
    std::thread::sleep(Duration::from_millis(200));
    server.signal("TERM");
    let server = server.end();
    assert_eq!((server.code, server.out.as_str(), server.err.as_str()), (128 + 15, "", ""), "{server:?}");
    assert!(begin.elapsed() < Duration::from_millis(900), "{:?}", begin.elapsed());
}

#[test]
fn a_goodbye_that_nobody_answers_takes_a_second() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.90.17", &[]);
    client.signal("STOP");
    let begin = Instant::now();
    server.signal("TERM");
    server.end().fails(1, BEFORE_ITS_END);
    let took = begin.elapsed();
    assert!((Duration::from_millis(900)..AT_ONCE).contains(&took), "{took:?}");
}
