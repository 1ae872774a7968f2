//! `uroce pingpong`: both roles of each kind, and what goes wrong.

use std::net::TcpListener;

use crate::common::{Server, run};

/// A TCP port that is free now.
fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn play(kind: &str, net: &str, more: &[&str]) {
    let port = free_port();
    let (a, b) = (format!("udp:{net}.1"), format!("udp:{net}.2"));
    let mut server_args = vec!["--json", "pingpong", kind, "-d", &a, "-p", &port, "-c"];
    server_args.extend(more);
    let server = Server::listening_on_tcp(&server_args, &port);
    let mut client_args = vec!["pingpong", kind, "127.0.0.1", "-d", &b, "-p", &port, "-c"];
    client_args.extend(more);
    let client = run(&client_args);
    let server = server.end();
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    // The client's lines are those of the ibv programs.
    let lines: Vec<&str> = client.out.lines().collect();
    assert!(lines[0].starts_with("  local address:  LID 0x0000, QPN 0x"), "{client:?}");
    assert!(lines[1].starts_with("  remote address: LID 0x0000, QPN 0x"), "{client:?}");
    assert!(lines[1].ends_with(&format!("GID ::ffff:{net}.1")), "{client:?}");
    assert!(lines[2].starts_with("600000 bytes in ") && lines[2].ends_with(" Mbit/sec"), "{client:?}");
    assert!(lines[3].starts_with("100 iters in ") && lines[3].ends_with(" usec/iter"), "{client:?}");
    let document = server.json();
    assert_eq!((&document["role"], &document["checked"]), (&"server".into(), &true.into()));
    assert_eq!(document["bytes"], 600_000);
    assert_eq!(document["remote"]["gid"], format!("::ffff:{net}.2"));
}

#[test]
fn rc() {
    play("rc", "127.77.1", &["-n", "100", "-s", "3000", "-m", "512"]);
}

#[test]
fn uc() {
    play("uc", "127.77.2", &["-n", "100", "-s", "3000"]);
}

#[test]
fn ud() {
    play("ud", "127.77.3", &["-n", "100", "-s", "3000"]);
}

#[test]
fn few_receives_do_not_stop_the_game() {
    play("rc", "127.77.4", &["-n", "100", "-s", "3000", "-r", "1"]);
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
    rc(&["-g", "3"]).fails(2, "index 3 is not there");
    run(&["pingpong", "rc", "-d", "loop"]).fails(2, "between two processes");
    assert_eq!(run(&["pingpong", "xrc"]).code, 2);
}

#[test]
fn a_peer_that_says_nonsense_is_told() {
    use std::io::Write as _;
    let port = free_port();
    let server = Server::listening_on_tcp(&["pingpong", "rc", "-d", "udp:127.77.8.1", "-p", &port], &port);
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    stream.write_all(&[b'x'; 52]).unwrap();
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
