//! `--policy` and `--audit`: who gets in, what is written down, and what is said about a file that is wrong.

use std::path::{Path, PathBuf};

use crate::common::{Server, run};

fn write(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("policy.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// A ping server under a policy, with an audit log beside it.
fn serve(address: &str, policy: &Path) -> Server {
    let audit = policy.with_file_name("audit.jsonl");
    let files = ["--policy", policy.to_str().unwrap(), "--audit", audit.to_str().unwrap()];
    Server::bound_to_roce(&[&["ping", "-s", "-P", "-a", address][..], &files].concat(), address)
}

fn ping(from: &str, to: &str) -> crate::common::Ran {
    let device = format!("udp:{from}");
    run(&["ping", "-c", "--device", &device, "-a", to, "-C", "1"])
}

/// The records of the audit log, each with (event, source, rule).
fn records(policy: &Path) -> Vec<(String, String, String)> {
    let text = std::fs::read_to_string(policy.with_file_name("audit.jsonl")).unwrap();
    let record = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(record["time"].as_f64().unwrap() > 1.7e9, "seconds since 1970: {line}");
        let word = |name: &str| record[name].as_str().unwrap_or("").to_owned();
        (word("event"), word("source_gid"), word("rule"))
    };
    text.lines().map(record).collect()
}

#[test]
fn the_first_rule_that_fits_decides_and_the_log_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let policy = write(
        dir.path(),
        "default = \"reject\"\n[[rule]]\nname = \"friends\"\naction = \"allow\"\nfrom = \"127.77.90.2\"\n\
         service = \"tcp:7174\"\n",
    );
    let server = serve("127.77.90.1", &policy);
    assert_eq!(ping("127.77.90.2", "127.77.90.1").code, 0);
    let refused = ping("127.77.90.3", "127.77.90.1");
    refused.fails(1, "refused the connection: reason 28");
    assert!(refused.err.contains("refused by policy"), "{refused:?}");
    drop(server);
    let records = records(&policy);
    let has = |event: &str, source: &str, rule: &str| {
        let wanted = (event.to_owned(), format!("::ffff:127.77.90.{source}"), rule.to_owned());
        assert!(records.contains(&wanted), "{wanted:?} in {records:?}");
    };
    has("admitted", "2", "friends");
    has("established", "2", "");
    has("disconnected", "2", "");
    has("rejected", "3", "default");
}

#[test]
fn a_policy_that_cannot_be_read_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    let policy = write(dir.path(), "[limits]\nsource_rate = \"many\"\n");
    let file = policy.to_str().unwrap();
    let ran = run(&["ping", "-s", "--policy", file]);
    ran.fails(2, "limits.source_rate: is a string; write a whole number from 1 to 10000000");
    assert!(ran.err.contains(file), "{ran:?}");
    run(&["ping", "-s", "--policy", "/does/not/exist"]).fails(2, "policy /does/not/exist cannot be read");
    run(&["ping", "-s", "--device", "udp:127.77.91.1", "--audit", "/does/not/exist"])
        .fails(4, "audit log /does/not/exist cannot be opened");
    run(&["devinfo", "--policy", file]).fails(2, "leave --policy and --audit out");
}
