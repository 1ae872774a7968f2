//! `uroce cm`: both roles of each program, and what goes wrong.

use crate::common::{Place, Ran, Server, run};
use crate::lab::{Link, Loopback};

/// Runs `uroce cm PROGRAM` as a server with `--json` and as a client, to their ends.
fn meet(place: Place<'_>, program: &str, [a, b]: [&str; 2], server: &[&str], client: &[&str]) -> (Ran, Ran) {
    let server = Server::at(place, &[&["--json", "cm", program, "-b", a], server].concat()).has_roce(a);
    let client = place.run(&[&["--json", "cm", program, "-s", a, "-b", b], client].concat());
    (client, server.end())
}

fn both_well((client, server): &(Ran, Ran)) {
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
}

#[test]
fn connections_are_made_used_and_ended() {
    let both = ["-c", "5", "-C", "7", "-S", "3000"];
    let ends = ["127.77.60.1", "127.77.60.2"];
    let ran = meet(Place::HERE, "connect", ends, &both, &[&both[..], &["-V"]].concat());
    both_well(&ran);
    for (document, role) in [(ran.0.json(), "client"), (ran.1.json(), "server")] {
        assert_eq!((&document["command"], &document["role"]), (&"cm connect".into(), &role.into()));
        assert_eq!((&document["connections"], &document["messages"]), (&5.into(), &35.into()));
        assert_eq!((&document["size"], &document["checked"]), (&3000.into(), &true.into()));
    }
    assert_eq!(ran.0.json()["server"], "127.77.60.1:7471");
}

#[test]
fn connections_over_ipv6() {
    let lab = Loopback::new();
    both_well(&meet(lab.place(), "connect", Loopback::V6, &["-c", "3"], &["-c", "3", "-V"]));
    both_well(&meet(lab.place(), "time", Loopback::V6, &["-c", "10"], &["-c", "10"]));
}

#[test]
fn the_infiniband_port_space_is_another_one() {
    let ends = ["127.77.61.1", "127.77.61.2"];
    both_well(&meet(Place::HERE, "connect", ends, &["-P", "ib", "-p", "99"], &["-P", "ib", "-p", "99"]));
    let server = Server::bound_to_roce(&["cm", "connect", "-b", ends[0], "-P", "ib"], ends[0]);
    run(&["cm", "connect", "-s", ends[0], "-b", ends[1]]).fails(1, "reason 8");
    drop(server);
}

#[test]
fn connections_without_messages() {
    let ran =
        meet(Place::HERE, "connect", ["127.77.62.1", "127.77.62.2"], &["-C", "0", "-c", "2"], &["-S", "0", "-c", "2"]);
    both_well(&ran);
    assert_eq!(ran.0.json()["messages"], 0);
}

#[test]
fn lost_messages_of_connection_management_come_again() {
    let server = ["-c", "2", "--fault", "drop:rep:1", "--fault", "drop:dreq:1"];
    let client = ["-c", "2", "--fault", "drop:rtu:1", "--fault", "drop:drep:1", "--fault", "drop:req:1"];
    both_well(&meet(Place::HERE, "connect", ["127.77.63.1", "127.77.63.2"], &server, &client));
}

#[test]
fn a_server_that_takes_fewer_connections_refuses_the_rest() {
    let ends = ["127.77.64.1", "127.77.64.2"];
    let (client, server) = meet(Place::HERE, "connect", ends, &["-c", "1"], &["-c", "2"]);
    client.fails(1, "connection ");
    assert!(client.err.contains(" of 2: 127.77.64.1:7471 refused the connection"), "{client:?}");
    assert_eq!(server.code, 1, "its client went away: {server:?}");
}

#[test]
fn different_messages_are_told() {
    let ends = ["127.77.65.1", "127.77.65.2"];
    let (client, _) = meet(Place::HERE, "connect", ends, &["-S", "100"], &["-S", "200"]);
    client.fails(1, "the peer sends 100 bytes, not 200; give both sides the same -S");
    let ends = ["127.77.66.1", "127.77.66.2"];
    let (_, server) = meet(Place::HERE, "connect", ends, &["-C", "3", "--patience", "1"], &["-C", "2"]);
    assert_eq!(server.code, 1, "{server:?}");
}

#[test]
fn steps_are_timed() {
    let ran = meet(Place::HERE, "time", ["127.77.67.1", "127.77.67.2"], &["-c", "50"], &["-c", "50", "-r", "3"]);
    both_well(&ran);
    let document = ran.0.json();
    assert_eq!((&document["command"], &document["connections"]), (&"cm time".into(), &50.into()));
    assert!(document["connects_per_second"].as_f64().unwrap() > 0.0, "{document}");
    let steps = document["steps"].as_array().unwrap();
    let names: Vec<&str> = steps.iter().map(|s| s["step"].as_str().unwrap()).collect();
    let wanted = ["create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy"];
    assert_eq!(names, wanted);
    for step in steps {
        let figure = |key: &str| step[key].as_f64().unwrap();
        assert!(figure("min_us") <= figure("p50_us") && figure("p50_us") <= figure("p99_us"), "{step}");
        assert!(figure("p99_us") <= figure("max_ms") * 1001.0 + 1.0, "{step}");
    }
    assert_eq!(ran.1.json()["connections"], 50);
}

#[test]
fn the_table_has_the_columns_of_cmtime() {
    let server = Server::bound_to_roce(&["cm", "time", "-b", "127.77.68.1", "-c", "3"], "127.77.68.1");
    let client = run(&["cm", "time", "-s", "127.77.68.1", "-b", "127.77.68.2", "-c", "3"]);
    assert_eq!((client.code, server.end().code), (0, 0), "{client:?}");
    // Names and columns of what cmtime printed beside the capture cmtime_10.
    let log = std::fs::read_to_string(uroce_fixtures::by_name("cmtime_10").unwrap().log_path()).unwrap();
    let table: Vec<&str> = log.lines().skip_while(|l| !l.starts_with("step ")).collect();
    let ours: Vec<&str> = client.out.lines().collect();
    assert!(ours[0].starts_with(table[0].trim_end()), "{client:?}");
    for (ours, theirs) in ours.iter().zip(&table).skip(1) {
        assert_eq!(ours.split(':').next(), theirs.split(':').next());
        let columns = |line: &str| line.split(':').nth(1).unwrap().split_whitespace().take(4).count();
        assert_eq!((columns(ours), columns(theirs)), (4, 4));
    }
    assert!(client.out.trim_end().ends_with(" connects/s"), "{client:?}");
}

#[test]
fn services_are_resolved_and_answer() {
    let both = ["-c", "4", "-C", "6", "-S", "500"];
    let ran = meet(Place::HERE, "datagram", ["127.77.70.1", "127.77.70.2"], &[&both[..], &["-V"]].concat(), &both);
    both_well(&ran);
    for (document, role) in [(ran.0.json(), "client"), (ran.1.json(), "server")] {
        assert_eq!((&document["command"], &document["role"]), (&"cm datagram".into(), &role.into()));
        assert_eq!((&document["messages"], &document["checked"]), (&24.into(), &true.into()));
    }
    assert_eq!(ran.0.json()["server"], "127.77.70.1:7174");
}

#[test]
fn services_over_ipv6_and_in_the_infiniband_port_space() {
    let lab = Loopback::new();
    both_well(&meet(lab.place(), "datagram", Loopback::V6, &["-V", "-c", "2"], &["-c", "2"]));
    let ib = ["-P", "ib", "--port", "99"];
    both_well(&meet(Place::HERE, "datagram", ["127.77.71.1", "127.77.71.2"], &ib, &ib));
}

#[test]
fn services_that_are_not_there_or_full() {
    let ends = ["127.77.72.1", "127.77.72.2"];
    let server = Server::bound_to_roce(&["cm", "datagram", "-b", ends[0]], ends[0]);
    run(&["cm", "datagram", "-s", ends[0], "-b", ends[1], "--port", "7175"]).fails(1, "127.77.72.1:7175");
    drop(server);
    let (client, _) = meet(Place::HERE, "datagram", ["127.77.73.1", "127.77.73.2"], &["-c", "1"], &["-c", "2"]);
    client.fails(1, "of 2: 127.77.73.1:7174");
    run(&["cm", "datagram", "-b", "127.77.73.3", "-S", "4097"]).fails(2, "not a datagram of 4097");
}

#[test]
fn a_lost_datagram_is_told() {
    let ends = ["127.77.74.1", "127.77.74.2"];
    let client = ["-C", "3", "--patience", "1", "--fault", "drop:ud:2:out"];
    let (client, server) = meet(Place::HERE, "datagram", ends, &["-C", "3", "--patience", "1"], &client);
    server.fails(1, "nothing happened for 1 s: waiting for datagrams of the client");
    client.fails(1, "waiting for answers of the server");
}

#[test]
fn a_group_hears_its_senders() {
    let link = Link::new();
    for group in ["239.7.7.7", "ff0e::7:7"] {
        // One beside the kernel, and one with addresses of its own on the same interface.
        let devices = ["packet:v0", "packet:v0,mac=02:77:00:00:00:09,ip=10.77.0.9,ip=fd77::9"];
        let receivers = devices.map(|device| {
            let receive = ["--json", "cm", "multicast", "-m", group, "--device", device, "-V", "-C", "5", "-S", "300"];
            Server::at(link.b.place(), &receive)
        });
        let send = ["--json", "cm", "multicast", "-s", "-m", group, "--device", "packet:v0", "-C", "5", "-S", "300"];
        let sender = link.a.place().run(&[&send[..], &["--settle", "2"]].concat());
        assert_eq!((sender.code, &sender.json()["role"]), (0, &"sender".into()), "{sender:?}");
        for receiver in receivers {
            let receiver = receiver.end();
            assert_eq!(receiver.code, 0, "{receiver:?}");
            let document = receiver.json();
            assert_eq!((&document["messages"], &document["checked"]), (&5.into(), &true.into()));
            assert_eq!(document["group"], group);
        }
    }
    run(&["cm", "multicast", "-m", "10.0.0.1", "-b", "127.77.74.3"]).fails_with_usage("is no multicast address");
}

#[test]
fn a_group_is_heard_over_udp_sockets() {
    let receivers = ["127.90.20.1", "127.90.20.2"].map(|ip| {
        Server::at(Place::HERE, &["--json", "cm", "multicast", "-m", "239.7.90.20", "-b", ip, "-V", "-C", "5"])
            .has_roce(ip)
    });
    let send =
        ["cm", "multicast", "-s", "-m", "239.7.90.20", "--device", "udp:127.90.20.3", "-C", "5", "--settle", "1"];
    let sender = run(&send);
    assert_eq!(sender.code, 0, "{sender:?}");
    for receiver in receivers {
        let receiver = receiver.end();
        assert_eq!(receiver.code, 0, "{receiver:?}");
        assert_eq!(receiver.json()["messages"], 5);
    }
    // A group of the other family is not one of this device.
    run(&["cm", "multicast", "-m", "ff0e::7:7", "-b", "127.90.20.4"]).fails(1, "the device has no IPv6 address for it");
}

#[test]
fn nobody_there() {
    run(&["cm", "time", "-s", "127.77.69.1", "-b", "127.77.69.2", "-c", "1"])
        .fails(1, "no answer from 127.77.69.1:7471 after 8 tries");
}

#[test]
fn wrong_usage() {
    for args in [&["cm"][..], &["cm", "connect", "-c", "0"], &["cm", "connect", "-V"], &["cm", "time", "-r", "8"]] {
        assert_eq!(run(args).code, 2, "{args:?}");
    }
    run(&["cm", "connect", "-b", "127.77.69.3", "-c", "1000", "-C", "1000", "-S", "10000"]).fails(2, "try a smaller");
    run(&["cm", "time", "--device", "loop"]).fails(2, "between two processes");
}
