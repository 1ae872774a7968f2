//! `uroce perf`: each operation and direction, limits, formats.

use crate::common::{Ran, Server, run};

/// Runs both sides; `net` is this test's own part of the loopback network.
fn measure(net: &str, test: [&str; 2], more: &[&str]) -> (Ran, Ran) {
    let (a, b) = (format!("{net}.1"), format!("{net}.2"));
    let (server_device, client_device) = (format!("udp:{a}"), format!("udp:{b}"));
    let server = Server::bound_to_roce(&["perf", test[0], test[1], "-d", &server_device], &a);
    let mut args = vec!["perf", test[0], test[1], &a, "-d", &client_device];
    args.extend(more);
    let client = run(&args);
    (client, server.end())
}

/// The numbers of the row under the head of the table.
fn row(ran: &Ran) -> Vec<f64> {
    let mut lines = ran.out.lines().skip_while(|l| !l.starts_with(" #bytes"));
    let line = lines.nth(1).unwrap_or_else(|| panic!("{ran:?}"));
    line.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

#[test]
fn bandwidth_of_every_operation() {
    for (operation, net, size) in [
        ("send", "127.77.50", 4096.0),
        ("write", "127.77.51", 4096.0),
        ("read", "127.77.52", 4096.0),
        ("atomic", "127.77.53", 8.0),
    ] {
        let more: &[&str] =
            if operation == "atomic" { &["-n", "300"] } else { &["-n", "300", "-s", "4096", "-q", "2"] };
        let (client, server) = measure(net, [operation, "bw"], more);
        assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
        let numbers = row(&client);
        let messages = if operation == "atomic" { 300.0 } else { 600.0 };
        assert_eq!(numbers[..2], [size, messages], "{client:?}");
        // Peak is at least the average, which is the rate times the size.
        assert!(numbers[2] >= numbers[3] && numbers[3] >= 0.0 && numbers[4] > 0.0, "{client:?}");
        assert!((numbers[3] - numbers[4] * 1e6 * size / 1_048_576.0).abs() < 0.02, "{client:?}");
        assert_eq!(row(&server), numbers, "the server shows what the client measured");
    }
}

#[test]
fn latency_of_every_operation() {
    for (operation, net) in
        [("send", "127.77.54"), ("write", "127.77.55"), ("read", "127.77.56"), ("atomic", "127.77.57")]
    {
        let (client, server) = measure(net, [operation, "lat"], &["-n", "300"]);
        assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
        let numbers = row(&client);
        let [_, count, min, max, typical, average, _, p99, p999] = numbers[..] else { panic!("{client:?}") };
        assert!((count - 300.0).abs() < 0.5, "{client:?}");
        assert!(0.0 < min && min <= typical && min <= average && typical <= p99 && p99 <= p999 && p999 <= max);
    }
}

#[test]
fn both_ways_all_sizes_and_by_time() {
    let (client, server) = measure("127.77.58", ["send", "bw"], &["-n", "300", "-s", "4096", "-b"]);
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    assert_eq!(row(&client)[1].to_bits(), 600f64.to_bits(), "both sides' messages: {client:?}");
    let (client, _) = measure("127.77.59", ["write", "bw"], &["-n", "5", "-a", "--json"]);
    assert_eq!(client.code, 0, "{client:?}");
    let sizes: Vec<u64> =
        client.json()["results"].as_array().unwrap().iter().map(|r| r["MsgSize"].as_u64().unwrap()).collect();
    assert_eq!(sizes, (1..=23).map(|e| 1 << e).collect::<Vec<u64>>());
    let (client, _) = measure("127.77.60", ["read", "bw"], &["-D", "1", "-s", "64", "--output", "message_rate"]);
    assert_eq!(client.code, 0, "{client:?}");
    assert!(client.out.trim().parse::<f64>().unwrap() > 0.0, "one bare number: {client:?}");
}

#[test]
fn content_is_checked_however_both_sides_wait() {
    for (operation, net) in [("send", "127.77.65"), ("write", "127.77.66"), ("read", "127.77.67")] {
        for (direction, wait) in [("bw", "spin"), ("bw", "block"), ("lat", "adaptive"), ("lat", "block")] {
            let more = ["-n", "100", "--sizes", "1,8,5000", "--verify", "--wait", wait, "-l", "16", "--json"];
            let (client, server) = measure(net, [operation, direction], &more);
            assert_eq!((client.code, server.code), (0, 0), "{operation} {direction}: {client:?} {server:?}");
            let document = client.json();
            assert_eq!(document["test_info"]["verified"], true);
            assert_eq!(document["test_info"]["wait"], wait);
            let sizes: Vec<u64> =
                document["results"].as_array().unwrap().iter().map(|r| r["MsgSize"].as_u64().unwrap()).collect();
            assert_eq!(sizes, [1, 8, 5000]);
        }
    }
}

#[test]
fn a_part_of_a_second_is_a_duration() {
    for direction in ["bw", "lat"] {
        let ran = run(&[
            "perf", "write", direction, "-d", "loop", "-D", "0.05", "--verify", "-s", "64", "--cpu", "0,0", "--json",
        ]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.json()["results"][0]["n_iterations"].as_u64().unwrap() > 0, "{ran:?}");
    }
}

/// An answer may come before the ACK of what it answers: a send queue of one message and the exchange of the sides is never
/// full all the same.
#[test]
fn a_queue_of_one_message_has_room_for_the_exchange_of_the_sides() {
    let sizes = ["8"; 60].join(",");
    let (a, b) = ("udp:127.77.89.1", "udp:127.77.89.2");
    let server = Server::bound_to_roce(&["perf", "send", "bw", "-d", a, "--wait", "spin"], "127.77.89.1");
    let list = ["-t", "1", "-n", "5", "--wait", "spin", "--verify", "--sizes", &sizes];
    let client = run(&[&["perf", "send", "bw", "127.77.89.1", "-d", b], &list[..]].concat());
    assert_eq!(client.code, 0, "{client:?}");
    assert_eq!(server.end().code, 0);
}

#[test]
fn a_missed_limit_is_exit_code_3() {
    let (client, server) = measure("127.77.61", ["write", "bw"], &["-n", "50", "-w", "1000000"]);
    client.fails(3, "is below the limit of 1000000 MiB/sec");
    assert_eq!(server.code, 0, "{server:?}");
    let (client, _) = measure("127.77.62", ["write", "bw"], &["-n", "50", "-y", "0.000001", "-w", "0.001"]);
    assert_eq!(client.code, 0, "{client:?}");
}

#[test]
fn the_json_file_of_perftest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    let more = ["-n", "50", "--out_json", "--out_json_file", file.to_str().unwrap()];
    let (client, _) = measure("127.77.63", ["send", "bw"], &more);
    assert_eq!(client.code, 0, "{client:?}");
    let document: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(document["test_info"]["test"], "Send BW Test");
    assert_eq!(document["results"][0]["n_iterations"], 50);
}

#[test]
fn the_wrong_test_is_refused_with_the_reason() {
    let server = Server::bound_to_roce(&["perf", "send", "bw", "-d", "udp:127.77.64.1"], "127.77.64.1");
    let ran = run(&["perf", "read", "bw", "127.77.64.1", "-d", "udp:127.77.64.2"]);
    ran.fails(1, "the server runs another test");
    let ran = run(&["ping", "-c", "-a", "127.77.64.1", "-p", "18515", "--device", "udp:127.77.64.2", "-C", "1"]);
    ran.fails(1, "this is a uroce perf server");
    drop(server);
}

#[test]
fn wrong_usage() {
    let perf = |more: &[&str]| {
        let mut args = vec!["perf"];
        args.extend(more);
        run(&args)
    };
    assert_eq!(perf(&["send"]).code, 2);
    assert_eq!(perf(&["send", "bw", "-n", "4"]).code, 2, "at least 5, as perftest");
    assert_eq!(perf(&["send", "bw", "-c", "XRC"]).code, 2);
    perf(&["send", "lat", "-b"]).fails(2, "-b is for bw");
    perf(&["write", "bw", "--cpu", "0,1"]).fails(2, "two are for both ends of -d loop");
    perf(&["write", "bw", "--cpu", "100000"]).fails(4, "100000");
    perf(&["write", "bw", "-b", "--verify"]).fails(2, "--verify is for send, write and read in one direction");
    perf(&["atomic", "bw", "--sizes", "8"]).fails(2, "leave --sizes out");
    assert_eq!(perf(&["write", "bw", "-D", "0"]).code, 2, "nothing can be measured in no time");
    perf(&["atomic", "bw", "-s", "16"]).fails(2, "an atomic has 8 bytes");
    perf(&["send", "bw", "-d", "loop", "127.0.0.2"]).fails(2, "leave HOST out");
    perf(&["send", "lat", "-d", "loop", "-w", "1"]).fails(2, "are for bw");
}

#[test]
fn connections_come_and_go() {
    let server = Server::bound_to_roce(&["perf", "cm", "-d", "udp:127.77.66.1"], "127.77.66.1");
    let client = ["perf", "cm", "127.77.66.1", "-d", "udp:127.77.66.2", "-n", "300", "-q", "8", "--message", "--json"];
    let ran = run(&client);
    let found = ran.json();
    assert_eq!((&found["connections"], &found["failed"]), (&300.into(), &0.into()), "{ran:?}");
    assert!(found["latency_us"]["p50"].as_f64() <= found["latency_us"]["max"].as_f64(), "{ran:?}");
    let served = server.end();
    assert!(served.out.contains("301 connections came and went"), "the last one says that it is: {served:?}");
    // In this process, some of the messages lost.
    let ran = run(&["perf", "cm", "-d", "loop", "-n", "200", "-q", "16", "--json", "--fault", "drop:any:every=50"]);
    assert_eq!((&ran.json()["connections"], ran.code), (&200.into(), 0), "{ran:?}");
    run(&["perf", "cm", "-d", "loop", "127.0.0.2"]).fails(2, "leave HOST out");
}

#[test]
fn both_ends_in_this_process() {
    for operation in ["send", "write", "read", "atomic"] {
        for direction in ["bw", "lat"] {
            let ran = run(&["perf", operation, direction, "-d", "loop", "-n", "200"]);
            assert_eq!(ran.code, 0, "{operation} {direction}: {ran:?}");
            assert!((row(&ran)[1] - 200.0).abs() < 0.5, "{ran:?}");
        }
    }
    let ran = run(&["perf", "write", "bw", "-d", "loop", "-n", "50", "--json"]);
    assert_eq!(ran.json()["test_info"]["Device"], "loop");
}
