//! `uroce stat` and `uroce res`: what they say of endpoints that run.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use uroce::counters::{ABSENT, Counters};

use crate::common::{Server, free_port};
use crate::watched::{Embedded, Watched};

#[test]
fn counters_of_port_and_qp_under_all_names() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.77.60", &[]);
    let pid = client.pid().to_string();
    let rows = watched.rows(&["stat", "-j", "show", "link", "uroce0/1", "pid", &pid]);
    let port = &rows[0];
    assert_eq!((rows.len(), &port["ifname"], &port["port"]), (1, &"uroce0".into(), &1.into()));
    for row in Counters::TABLE.iter().filter(|row| !row.name.starts_with("drop_")) {
        assert_eq!(port[row.name], port[row.rxe.unwrap_or(row.name)], "{}", row.name);
        assert_eq!(port[row.name], port[row.mlx5.unwrap_or(row.name)], "{}", row.name);
        assert!(port[row.name].is_u64(), "{}", row.name);
    }
    assert!(ABSENT.iter().all(|absent| port.get(absent.name).is_none()));
    assert!(port["sent_pkts"].as_u64() > Some(12));
    assert_eq!(port["retransmitted_pkts"], 0);
    // The client's requests are SENDs; what it served were the server's READs and WRITEs.
    let qps = watched.rows(&["stat", "qp", "show", "type", "RC", "pid", &pid, "--json", "-d"]);
    let of = |key: &str| qps[0][key].as_u64().unwrap();
    assert_eq!(qps.len(), 1);
    assert!(of("rx_read_requests") > 1 && of("rx_write_requests") > 1, "{qps:?}");
    assert_eq!(of("drop_ghost_ack"), 0);
    // As text, one line a link.
    let text = watched.run(&["stat", "show", "pid", &pid]).out;
    assert!(text.starts_with("link uroce0/1 sent_pkts "), "{text}");
    assert_eq!(text.lines().count(), 1);
    drop((client, server));
}

#[test]
fn what_lives_in_an_endpoint() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.77.61", &[]);
    let (of_server, of_client) = (server.pid().to_string(), client.pid().to_string());
    let qp = |pid: &str| watched.rows(&["res", "-j", "show", "qp", "type", "RC", "pid", pid])[0].clone();
    let (near, far) = (qp(&of_server), qp(&of_client));
    assert_eq!((&near["lqpn"], &near["rqpn"]), (&far["rqpn"], &far["lqpn"]));
    for (key, value) in [("state", "RTS"), ("path-mig-state", "MIGRATED"), ("comm", "uroce"), ("ifname", "uroce0")] {
        assert_eq!(near[key], value);
    }
    let lqpn = near["lqpn"].to_string();
    assert_eq!(watched.rows(&["res", "-j", "show", "qp", "lqpn", &lqpn]).len(), 1);
    let range = format!("{lqpn}-{lqpn}");
    assert_eq!(watched.rows(&["res", "-j", "show", "qp", "lqpn", &range, "state", "rts"]).len(), 1);
    assert_eq!(watched.rows(&["res", "-j", "show", "qp", "link", "mlx5_0/1"]).len(), 0);

    let ids = watched.rows(&["res", "-j", "show", "cm_id", "pid", &of_server]);
    let states: Vec<_> = ids.iter().map(|id| id["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["LISTEN", "CONNECT"]);
    assert_eq!((&ids[1]["lqpn"], &ids[1]["src-addr"]), (&near["lqpn"], &"127.77.61.1:7174".into()));
    assert!(ids[1]["dst-addr"].as_str().unwrap().starts_with("127.77.61.2:"));

    let count = |kind: &str| watched.rows(&["res", "-j", "show", kind, "pid", &of_server]).len() as u64;
    let sums = watched.rows(&["res", "--json"]);
    let sum = sums.iter().find(|row| row["pid"] == server.pid()).unwrap();
    for kind in ["qp", "cq", "mr", "pd", "srq", "cm_id", "ctx"] {
        assert_eq!(sum[kind], count(kind), "{kind}");
    }
    let text = watched.run(&["res"]).out;
    assert!(text.starts_with("0: uroce0: pd 2 cq 2 qp 2 cm_id "), "{text}");
    // Keys are told only to those who ask.
    assert!(!watched.run(&["res", "show", "mr"]).out.contains("rkey"));
    assert!(watched.run(&["res", "-d", "show", "mr"]).out.contains("rkey 0x"));
    drop((client, server));
}

#[test]
fn a_qp_says_what_it_waits_for() {
    let watched = Watched::new();
    let embedded = Embedded::towards_nobody(&watched, "127.77.62.1", "127.77.62.2", 0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let lqpn = embedded.lqpn().to_string();
    let rows = watched.rows(&["res", "-j", "-d", "show", "qp", "lqpn", &lqpn]);
    let qp = &rows[0];
    assert_eq!((&qp["waiting"], &qp["sends"], &qp["in-flight"]), (&"ack".into(), &1.into(), &1.into()));
    assert!(qp["oldest-unacked-us"].as_u64() >= Some(20_000), "{qp}");
    assert!(qp["reason"].as_str().unwrap().starts_with("no ACK of PSN 0 for "), "{qp}");
    assert_eq!((&qp["unacked-psn"], &qp["sq-psn"], &qp["peer"]), (&0.into(), &1.into(), &"127.77.62.2".into()));
    let text = watched.run(&["res", "-d", "show", "qp"]).out;
    assert!(text.contains("\n    peer 127.77.62.2 path-mtu 1024 ") && text.contains(" reason \"no ACK of "), "{text}");
}

#[test]
fn prometheus_reads_the_text() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.77.63", &[]);
    let text = watched.run(&["stat", "prometheus"]).out;
    let lines: Vec<_> = text.lines().collect();
    assert!(lines.contains(&"# TYPE uroce_retransmitted_pkts counter"), "{text}");
    let pid = client.pid();
    let labels = format!("ifname=\"uroce0\",port=\"1\",pid=\"{pid}\",comm=\"uroce\"");
    assert!(lines.contains(&format!("uroce_retransmitted_pkts_total{{{labels}}} 0").as_str()), "{text}");
    assert!(lines.contains(&format!("uroce_qps{{{labels},state=\"RTS\"}} 2").as_str()), "{text}");
    assert!(lines.contains(&format!("uroce_cm_req_sent_total{{{labels}}} 1").as_str()), "{text}");
    assert_eq!(lines.last(), Some(&"# EOF"));

    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let exporter = Server::of(watched.command(&["stat", "prometheus", "--listen", &address])).listens_on_tcp(&port);
    let ask = |request: &[u8]| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"), "{answer}");
    assert!(ask(b"PUT / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    drop((exporter, client, server));
}

#[test]
fn an_endpoint_that_hides_is_not_seen() {
    let watched = Watched::new();
    let server = Server::of(watched.command(&["ping", "-s", "-a", "127.77.64.1", "--no-inspect"]));
    let server = server.has_roce("127.77.64.1");
    for args in [&["stat", "-j"][..], &["res", "-j"], &["res", "-j", "show", "qp"]] {
        assert_eq!(watched.rows(args).len(), 0);
    }
    let ran = watched.run(&["stat", "show"]);
    assert_eq!((ran.code, ran.out.as_str(), ran.err.trim_end()), (0, "", "no endpoint of this user runs"));
    drop(server);
}

#[test]
fn an_endpoint_that_ends_takes_its_socket_along_and_one_that_is_killed_is_cleaned_up() {
    let watched = Watched::new();
    let embedded = Embedded::towards_nobody(&watched, "127.77.65.1", "127.77.65.2", 0);
    let sockets = || std::fs::read_dir(watched.sockets()).unwrap().count();
    assert_eq!(sockets(), 1);
    drop(embedded);
    assert_eq!(sockets(), 0);
    let server = Server::of(watched.command(&["ping", "-s", "-a", "127.77.65.1"])).has_roce("127.77.65.1");
    while sockets() == 0 {
        std::thread::yield_now();
    }
    // Killed without a chance to clean up.
    drop(server);
    assert_eq!(sockets(), 1);
    assert_eq!(watched.rows(&["res", "-j"]).len(), 0);
    assert_eq!(sockets(), 0);
}

#[test]
fn wrong_usage() {
    let watched = Watched::new();
    for (args, text) in [
        (&["res", "show", "qp", "lqpn"][..], "`lqpn` stands alone"),
        (&["res", "show", "qp", "colour", "red"], "`colour` is no key here"),
        (&["res", "lqpn", "5"], "a filter needs a kind"),
        (&["res", "show", "qp", "link", "uroce0/2"], "there is no port 2"),
        (&["stat", "show", "--listen", "127.0.0.1:1"], "--listen goes with"),
    ] {
        let ran = watched.run(args);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(text), "{ran:?}");
    }
}
