//! `uroce pingpong`: both roles of each kind, and what goes wrong.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use crate::common::{Place, Ran, Server, free_port, run};
use crate::lab::Loopback;

/// Plays with 100 messages of 3000 bytes each way, both sides checking; the server tells in JSON.
fn play(kind: &str, net: &str, more: &[&str]) {
    let mut args = vec!["-c", "-n", "100", "-s", "3000"];
    args.extend(more);
    let mut server_args = vec!["--json"];
    server_args.extend(&args);
    let (client, server) = meet(kind, net, &args, &server_args);
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    // The client's lines are those of the ibv programs.
    let lines: Vec<&str> = client.out.lines().collect();
    assert!(lines[0].starts_with("  local address:  LID 0x0000, QPN 0x"), "{client:?}");
    let separator = if kind == "ud" { ": GID" } else { ", GID" };
    assert!(lines[0].ends_with(&format!("{separator} ::ffff:{net}.2")), "{client:?}");
    assert!(lines[1].starts_with("  remote address: LID 0x0000, QPN 0x"), "{client:?}");
    assert!(lines[1].ends_with(&format!(", GID ::ffff:{net}.1")), "{client:?}");
    assert!(lines[2].starts_with("600000 bytes in ") && lines[2].ends_with(" Mbit/sec"), "{client:?}");
    assert!(lines[3].starts_with("100 iters in ") && lines[3].ends_with(" usec/iter"), "{client:?}");
    assert_eq!(lines.len(), 4, "{client:?}");
    let document = server.json();
    assert_eq!((&document["role"], &document["checked"]), (&"server".into(), &true.into()));
    assert_eq!((&document["kind"], &document["size"], &document["iters"]), (&kind.into(), &3000.into(), &100.into()));
    assert_eq!(document["bytes"], 600_000);
    assert_eq!(document["remote"]["gid"], format!("::ffff:{net}.2"));
    // Both tell the same of each other.
    let number = |key: &str, prefix: &str| format!("{prefix} {:#08x}", document["remote"][key].as_u64().unwrap());
    assert!(lines[0].contains(&number("qpn", "QPN")) && lines[0].contains(&number("psn", "PSN")), "{client:?}");
}

/// Runs a server on NET.1 and a client on NET.2 to their ends.
fn meet(kind: &str, net: &str, client: &[&str], server: &[&str]) -> (Ran, Ran) {
    let port = free_port();
    let (a, b) = (format!("udp:{net}.1"), format!("udp:{net}.2"));
    let mut server_args = vec!["pingpong", kind, "-d", &a, "-p", &port];
    server_args.extend(server);
    let server = Server::listening_on_tcp(&server_args, &port);
    let mut client_args = vec!["pingpong", kind, "127.0.0.1", "-d", &b, "-p", &port];
    client_args.extend(client);
    (run(&client_args), server.end())
}

/// A client that was written by hand: it says `message` to a server that was started with `more`.
fn by_hand(kind: &str, net: &str, message: &[u8; 52], more: &[&str]) -> (TcpStream, Server) {
    let port = free_port();
    let device = format!("udp:{net}.1");
    let mut args = vec!["pingpong", kind, "-d", &device, "-p", &port];
    args.extend(more);
    let server = Server::listening_on_tcp(&args, &port);
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    stream.write_all(message).unwrap();
    (stream, server)
}

#[test]
fn rc() {
    play("rc", "127.77.1", &["-m", "512"]);
}

#[test]
fn uc() {
    play("uc", "127.77.2", &[]);
}

#[test]
fn ud() {
    play("ud", "127.77.3", &[]);
}

/// Plays srq with `qps` QPs a side between two addresses of one place; returns what both said.
fn play_srq(place: Place<'_>, [a, b]: [&str; 2], host: &str, more: &[&str]) -> (Ran, Ran) {
    let port = free_port();
    let (a, b) = (format!("udp:{a}"), format!("udp:{b}"));
    let both = [&["-p", &port, "-c", "-n", "100", "-s", "3000"], more].concat();
    let server = Server::at(place, &[&["--json", "pingpong", "srq", "-d", &a], &both[..]].concat());
    let server = server.listens_on_tcp(&port);
    let client = place.run(&[&["pingpong", "srq", host, "-d", &b], &both[..]].concat());
    (client, server.end())
}

#[test]
fn srq_plays_on_many_qps_with_one_queue_of_receives() {
    // Fewer receives than messages, more QPs than one, and as few receives as QPs.
    for (net, qps, depth) in [("127.77.17", "4", "50"), ("127.77.18", "16", "16"), ("127.77.19", "1", "1")] {
        let ends = [format!("{net}.1"), format!("{net}.2")];
        let (client, server) =
            play_srq(Place::HERE, [&ends[0], &ends[1]], "127.0.0.1", &["-q", qps, "-r", depth, "-m", "512"]);
        assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
        let count: usize = qps.parse().unwrap();
        let starts = |prefix: &str| client.out.lines().filter(|l| l.starts_with(prefix)).count();
        let lines = (starts("  local address:  LID 0x0000, QPN 0x"), starts("  remote address: LID 0x0000, QPN 0x"));
        assert_eq!(lines, (count, count), "{client:?}");
        assert!(client.out.contains("\n600000 bytes in ") && client.out.contains("\n100 iters in "), "{client:?}");
        let document = server.json();
        assert_eq!((&document["kind"], &document["checked"]), (&"srq".into(), &true.into()));
        let remote = document["remote"].as_array().unwrap();
        assert_eq!(remote.len(), count);
        for end in remote {
            let shown = format!("QPN {:#08x}, PSN {:#08x}", end["qpn"].as_u64().unwrap(), end["psn"].as_u64().unwrap());
            assert!(client.out.contains(&shown), "{shown}: {client:?}");
        }
    }
}

#[test]
fn srq_over_ipv6() {
    let lab = Loopback::new();
    let (client, server) = play_srq(lab.place(), Loopback::V6, Loopback::V6[0], &["-q", "3", "-e"]);
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    assert_eq!(server.json()["remote"][2]["gid"], Loopback::V6[1]);
}

#[test]
fn srq_with_different_numbers_of_qps() {
    let port = free_port();
    let server = Server::listening_on_tcp(&["pingpong", "srq", "-d", "udp:127.77.23.1", "-p", &port, "-q", "4"], &port);
    let client = run(&["pingpong", "srq", "127.0.0.1", "-d", "udp:127.77.23.2", "-p", &port, "-q", "3"]);
    server.end().fails(1, "the peer has 3 QPs, not 4; give both sides the same -q");
    assert_eq!(client.code, 1, "{client:?}");
    run(&["pingpong", "srq", "-d", "udp:127.77.23.1", "-r", "15"]).fails(2, "16 QPs need a receive each");
    run(&["pingpong", "rc", "-d", "udp:127.77.23.1", "-q", "2"]).fails(2, "leave -q out");
}

#[test]
fn few_receives_do_not_stop_the_game() {
    play("rc", "127.77.4", &["-r", "1"]);
}

#[test]
fn a_side_that_sleeps_is_woken() {
    for (kind, net) in [("rc", "127.77.9"), ("uc", "127.77.10"), ("ud", "127.77.11")] {
        play(kind, net, &["-e"]);
    }
}

#[test]
fn the_check_fails_on_bytes_that_were_not_marked() {
    let (client, server) = meet("rc", "127.77.12", &["-n", "5"], &["-n", "5", "-c"]);
    assert_eq!(client.code, 0, "{client:?}");
    server.fails(1, "invalid data in page 0: byte 0 is 0x7b (was the client started with -c?)");
    assert!(server.out.contains("\n5 iters in "), "the game itself went well: {server:?}");
}

#[test]
fn different_sizes_are_told() {
    let (_, server) = meet("uc", "127.77.13", &["-s", "99", "--patience", "1"], &["-s", "100"]);
    server.fails(1, "the peer sends 99 bytes, not 100; give both sides the same -s");
}

#[test]
fn a_peer_that_falls_silent_ends_the_game() {
    let there = b"0000:000036:5b53cb:00000000000000000000ffff7f4d0e02\0";
    let (mut stream, server) = by_hand("uc", "127.77.14", there, &["--patience", "1"]);
    let mut answer = [0; 52];
    stream.read_exact(&mut answer).unwrap();
    let text = std::str::from_utf8(&answer).unwrap();
    assert!(text.starts_with("0000:") && text.ends_with(":00000000000000000000ffff7f4d0e01\0"), "{text:?}");
    stream.write_all(b"done\0").unwrap();
    server.end().fails(1, "nothing came for 1 s, after 0 of 1000 messages; one was lost, or the peer has stopped");
}

#[test]
fn a_gid_that_cannot_be_reached_is_told() {
    let none = b"0000:000036:5b53cb:00000000000000000000000000000000\0";
    let (_stream, server) = by_hand("rc", "127.77.15", none, &[]);
    server.end().fails(1, "the peer gave no GID, which RoCE cannot do without; start it with -g");
    let v6 = b"0000:000036:5b53cb:fd770000000000000000000000000002\0";
    let (_stream, server) = by_hand("ud", "127.77.16", v6, &[]);
    server.end().fails(1, "choose two of a kind with -g");
}

#[test]
fn no_server() {
    let port = free_port();
    run(&["pingpong", "rc", "127.0.0.1", "-d", "udp:127.77.5.1", "-p", &port]).fails(1, "start it there first");
}

#[test]
fn a_busy_tcp_port() {
    let holder = TcpListener::bind("[::]:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    run(&["pingpong", "rc", "-d", "udp:127.77.6.1", "-p", &port]).fails(4, "is in use by another process");
}

#[test]
fn wrong_usage() {
    let rc = |more: &[&str]| {
        let mut args = vec!["pingpong", "rc", "-d", "udp:127.77.7.1", "-p", "1"];
        args.extend(more);
        run(&args)
    };
    assert_eq!(rc(&["-m", "1500"]).code, 2);
    assert_eq!(rc(&["-n", "0"]).code, 2);
    assert_eq!(rc(&["--timeout", "32"]).code, 2);
    assert_eq!(rc(&["-s", "2147483649"]).code, 2);
    rc(&["-g", "3"]).fails(2, "index 3 is not there");
    run(&["pingpong", "ud", "-d", "udp:127.77.7.1", "-s", "4097"]).fails(2, "not a datagram of 4097");
    run(&["pingpong", "rc", "-d", "loop"]).fails(2, "between two processes");
    assert_eq!(run(&["pingpong", "xrc"]).code, 2);
}

#[test]
fn a_peer_that_says_nonsense_is_told() {
    let (_stream, server) = by_hand("rc", "127.77.8", &[b'x'; 52], &[]);
    server.end().fails(1, "is it a pingpong?");
}

#[test]
fn a_peer_that_never_answers_is_told_with_status_tries_and_time() {
    use std::io::{Read as _, Write as _};
    // A server that names an endpoint that is not there.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut message = [0; 52];
        stream.read_exact(&mut message).unwrap();
        stream.write_all(b"0000:000011:000001:00000000000000000000ffff7f4d0a01\0").unwrap();
        stream.read_exact(&mut [0; 5]).unwrap();
    });
    let ran = run(&["pingpong", "rc", "127.0.0.1", "-d", "udp:127.77.10.2", "-p", &port]);
    server.join().unwrap();
    ran.fails(1, "the SEND failed with status 12: no answer for PSN");
    // The first try and retry_cnt 7.
    assert!(ran.err.contains("after 8 tries in "), "{ran:?}");
}
