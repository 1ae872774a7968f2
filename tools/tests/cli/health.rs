//! `uroce health`: what is well, what is not, and the exit code.

use std::time::{Duration, Instant};

use uroce::verbs::Verbs as _;

use crate::watched::{Embedded, Watched};

#[test]
fn endpoints_that_work_are_healthy() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.77.66", &[]);
    let ran = watched.run(&["health"]);
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "healthy: 2 endpoints\n", ""));
    let pid = client.pid().to_string();
    let ran = watched.run(&["health", "--json", "--pid", &pid, "--interval", "0.05"]);
    let document = ran.json();
    assert_eq!((ran.code, &document["healthy"], &document["endpoints"]), (0, &true.into(), &1.into()));
    assert_eq!(document["reasons"], serde_json::json!([]));
    drop((client, server));
}

#[test]
fn none_is_a_matter_of_the_environment() {
    Watched::new().run(&["health"]).fails(4, "no endpoint of this user runs");
}

#[test]
fn a_stuck_qp_is_told_with_the_reason() {
    let watched = Watched::new();
    let embedded = Embedded::towards_nobody(&watched, "127.77.67.1", "127.77.67.2", 0);
    std::thread::sleep(Duration::from_millis(120));
    // As a program that waits for its completion does.
    embedded.verbs().drive();
    let ran = watched.run(&["health", "--stuck-after", "0.1"]);
    assert_eq!((ran.code, ran.err.trim_end()), (1, "uroce: unhealthy: 1 reason"), "{ran:?}");
    let (pid, lqpn) = (std::process::id(), embedded.lqpn());
    let wanted = format!("uroce0 pid {pid}: qp {lqpn} is stuck: no ACK of PSN 0 for ");
    assert!(ran.out.starts_with(&wanted), "{ran:?}");
    assert_eq!(ran.out.lines().count(), 1);
    // The same is fine where it may be.
    for args in [&["health", "--stuck-after", "60"][..], &["health", "--stuck-after", "0.1", "--max-stuck", "1"]] {
        embedded.verbs().drive();
        assert_eq!(watched.run(args).code, 0, "{args:?}");
    }
    // And an engine that nobody drives is not.
    std::thread::sleep(Duration::from_millis(60));
    let ran = watched.run(&["health", "--stuck-after", "0.05", "--max-stuck", "1", "--json"]);
    let document = ran.json();
    assert_eq!((ran.code, &document["reasons"][0]["check"]), (1, &"driven".into()), "{ran:?}");
}

#[test]
fn a_qp_that_failed_is_told_with_its_error() {
    let watched = Watched::new();
    // 4 us a try, eight tries.
    let embedded = Embedded::towards_nobody(&watched, "127.77.68.1", "127.77.68.2", 1);
    let begin = Instant::now();
    while watched.run(&["health"]).code == 0 {
        embedded.verbs().drive();
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
    let document = watched.run(&["health", "--json"]).json();
    let reason = &document["reasons"][0];
    assert_eq!((&reason["check"], &reason["lqpn"]), (&"failed".into(), &embedded.lqpn().into()));
    assert!(
        reason["text"].as_str().unwrap().contains("is in ERR: no answer for PSN 0x000000 after 8 tries"),
        "{reason}"
    );
    assert!(embedded.verbs().query_port().active);
}

#[test]
fn too_many_repeats_are_told() {
    let watched = Watched::new();
    let (server, client) = watched.pings("127.77.69", &["--fault", "drop:send:every=5:out"]);
    let pid = client.pid().to_string();
    let begin = Instant::now();
    let ran = loop {
        let ran = watched.run(&["health", "--max-retry", "0.5%", "--pid", &pid]);
        if ran.code != 0 {
            break ran;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{ran:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(ran.out.contains(" packets were sent again, 0.5 % may be"), "{ran:?}");
    assert_eq!(ran.code, 1);
    drop((client, server));
}

#[test]
fn wrong_usage() {
    for args in [&["health", "--stuck-after", "soon"][..], &["health", "--max-retry", "101"], &["health", "qp"]] {
        assert_eq!(crate::common::run(args).code, 2, "{args:?}");
    }
}
