//! `uroce doctor`: this machine, and peers with one fault each.

use serde_json::Value;

use crate::common::{Place, Ran, Server, run};
use crate::lab::{Link, Path};

/// Levels by check, of a run with `--json`.
fn level<'a>(document: &'a Value, check: &str) -> &'a str {
    let checks = document["checks"].as_array().unwrap();
    let found = checks.iter().find(|c| c["check"] == check);
    found.unwrap_or_else(|| panic!("no check `{check}`: {document:#}"))["level"].as_str().unwrap()
}

fn doctor(place: Place<'_>, peer: &str) -> (Ran, Value) {
    let ran = place.run(&["--json", "doctor", peer]);
    let document = ran.json();
    let worst = document["verdict"].as_str().unwrap();
    let code = match worst {
        "ok" | "warn" => 0,
        "fail" => 1,
        _ => 4,
    };
    assert_eq!(ran.code, code, "{ran:?}");
    for check in document["checks"].as_array().unwrap() {
        assert!(check["found"].as_str().unwrap().len() > 2, "{check}");
        // Whatever is not well says what to do.
        assert!(check["level"] == "ok" || check["fix"].as_str().unwrap().len() > 8, "{check}");
    }
    (ran, document)
}

fn serve(place: Place<'_>, address: &str) -> Server {
    Server::at(place, &["ping", "-s", "-P", "-a", address]).has_roce(address)
}

#[test]
fn this_machine() {
    let ran = run(&["doctor"]);
    let document = run(&["--json", "doctor"]).json();
    for check in ["capabilities", "MTU", "port 4791", "rp_filter", "huge pages", "clock", "memlock", "RDMA devices"] {
        level(&document, check);
        // One line a check.
        assert!(ran.out.lines().any(|l| l.get(6..).is_some_and(|l| l.starts_with(check))), "{check}: {ran:?}");
    }
    assert!(ran.out.lines().all(|l| ["ok ", "warn ", "fail "].iter().any(|s| l.starts_with(s))), "{ran:?}");
}

#[test]
fn a_peer_that_is_well_and_one_without_the_service() {
    let link = Link::new();
    for address in ["10.77.0.2", "fd77::2"] {
        let server = serve(link.b.place(), address);
        let (_, document) = doctor(link.a.place(), &format!("[{address}]:7174"));
        for check in ["route", "neighbour", "port 4791", "path MTU", "GID type", "service"] {
            assert_eq!(level(&document, check), "ok", "{document:#}");
        }
        // It was only asked: the server serves on.
        let (ran, document) = doctor(link.a.place(), &format!("[{address}]:99"));
        assert_eq!((ran.code, level(&document, "service")), (1, "fail"), "{document:#}");
        ran.fails(1, "failed: service");
        let text = link.a.place().run(&["doctor", &format!("[{address}]:99")]).out;
        assert!(text.contains("nobody listens on port 99 there (reason 8); start the service there"), "{text}");
        drop(server);
    }
}

#[test]
fn nobody_has_the_port() {
    let link = Link::new();
    let (ran, document) = doctor(link.a.place(), "10.77.0.2");
    ran.fails(1, "failed: port 4791, peer");
    assert_eq!(level(&document, "neighbour"), "ok");
    let text = document.to_string();
    assert!(text.contains("nobody has UDP port 4791 (ICMP port unreachable)"), "{text}");
}

#[test]
fn nobody_has_the_address() {
    let link = Link::new();
    let (ran, document) = doctor(link.a.place(), "10.77.0.99");
    ran.fails(1, "failed: neighbour, peer");
    assert!(document.to_string().contains("nobody on v0 answers for 10.77.0.99"), "{document:#}");
    let ran = link.a.place().run(&["ping", "-c", "-a", "10.77.0.99", "-C", "1"]);
    ran.fails(1, "nobody answers at 10.77.0.99 (host unreachable: no ARP or neighbour answer)");
}

#[test]
fn no_route() {
    let link = Link::new();
    let (ran, document) = doctor(link.a.place(), "203.0.113.9");
    ran.fails(1, "failed: route");
    assert_eq!(document["checks"].as_array().unwrap().len(), 1, "{document:#}");
}

#[test]
fn a_black_hole_on_the_way() {
    let link = Link::new();
    link.b.forwards();
    link.b.ip("route add blackhole 10.99.0.9/32");
    link.a.ip("route add 10.99.0.0/24 via 10.77.0.2");
    let (ran, document) = doctor(link.a.place(), "10.99.0.9");
    ran.fails(1, "failed: peer");
    assert_eq!((level(&document, "neighbour"), level(&document, "port 4791")), ("ok", "ok"), "{document:#}");
    assert_eq!(level(&document, "path MTU"), "warn", "no ping comes back: {document:#}");
    assert!(document.to_string().contains("a firewall on the way drops UDP 4791"), "{document:#}");
    let ran = link.a.place().run(&["ping", "-c", "-a", "10.99.0.9", "-C", "1"]);
    ran.fails(1, "UDP port 4791 of 10.99.0.9 is silent, with no ICMP error");
}

#[test]
fn a_path_mtu_that_does_not_fit() {
    let path = Path::new(700);
    let server = serve(path.c.place(), "10.78.0.3");
    let (ran, document) = doctor(path.link.a.place(), "10.78.0.3:7174");
    ran.fails(1, "failed: path MTU");
    // Messages of connection management are short: they arrive, and hide the fault from everybody else.
    assert_eq!(level(&document, "service"), "ok", "{document:#}");
    let text = document.to_string();
    assert!(text.contains("1024 does not fit the path, 512 does"), "{text}");
    drop(server);
}

#[test]
fn an_endpoint_that_cannot_be_opened_here() {
    let link = Link::new();
    let holder = serve(link.a.place(), "10.77.0.1");
    let (ran, document) = doctor(link.a.place(), "10.77.0.2");
    ran.fails(4, "this machine lacks: own endpoint");
    let text = document.to_string();
    assert!(text.contains("is in use by another process") && text.contains("it is process "), "{text}");
    assert!(text.contains("ask from another address with --device"), "{text}");
    drop(holder);
}

#[test]
fn wrong_usage() {
    for args in [&["doctor", "1.2.3.4:x"][..], &["doctor", "--device", "udp:127.0.0.1"], &["doctor", "[::1"]] {
        assert_eq!(run(args).code, 2, "{args:?}");
    }
    run(&["doctor", "127.0.0.1", "-d", "loop"]).fails(2, "a peer is asked from");
}
