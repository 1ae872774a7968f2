//! `--fault` and `--pcap`, on every command that opens a device.

use crate::common::{Server, run};

#[test]
fn what_a_rule_drops_is_sent_again_and_the_record_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wire.pcapng");
    let file = file.to_str().unwrap();
    let server = Server::bound_to_roce(&["ping", "-s", "-a", "127.77.60.1"], "127.77.60.1");
    let client = run(&[
        "ping",
        "-c",
        "--device",
        "udp:127.77.60.2",
        "-a",
        "127.77.60.1",
        "-V",
        "-C",
        "3",
        "--pcap",
        file,
        "--fault",
        "drop:req:1:out",
        "--fault",
        "drop:send-only:2:in",
    ]);
    let server = server.end();
    assert_eq!((client.code, server.code), (0, 0), "{client:?} {server:?}");
    let counts = run(&["dump", "--json", file]).json();
    let count = |name: &str| counts["opcodes"][name].as_u64().unwrap_or(0);
    // The first REQ was dropped before the wire; the second one connected.
    assert_eq!((count("CM_REQ"), count("CM_REP")), (1, 1), "{counts}");
    // Each ping is two SENDs each way; one of them was lost on its way in, behind the record, and came again.
    assert_eq!(count("RC_SEND_ONLY"), 13, "{counts}");
    let bytes = std::fs::read(file).unwrap();
    let has = |text: &str| bytes.windows(text.len()).any(|w| w == text.as_bytes());
    assert!(has("CM REQ") && has(" again"), "comments for people who open it in wireshark");
}

#[test]
fn a_record_without_payload_is_cut_and_not_malformed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wire.pcapng");
    let file = file.to_str().unwrap();
    let perf = ["perf", "send", "bw", "-d", "loop", "-n", "5", "-s", "4096", "--pcap", file, "--pcap-snap", "64"];
    assert_eq!(run(&perf).code, 0);
    let counts = run(&["dump", "--json", file]).json();
    assert!(counts["cut"].as_u64() >= Some(5), "five messages of 4096 bytes, and MADs: {counts}");
    assert_eq!((&counts["malformed"], &counts["icrc_wrong"]), (&0.into(), &0.into()), "{counts}");
    assert!(run(&["dump", "-q", file]).out.contains("packets not judged"));
}

#[test]
fn wrong_rules_and_files_are_told() {
    for (flag, value, named) in [
        ("--fault", "lose:ack", "`lose` is not an action"),
        ("--fault", "drop:nonsense", "`nonsense` names no packet"),
        ("--pcap-snap", "64", "--pcap <FILE>"),
    ] {
        let ran = run(&["ping", "-c", "-a", "127.77.61.1", flag, value]);
        assert!(ran.code == 2 && ran.err.contains(named), "{ran:?}");
    }
    let nowhere = ["ping", "-c", "-a", "127.77.61.1", "--device", "udp:127.77.61.2", "--pcap", "/nowhere/file"];
    run(&nowhere).fails(4, "cannot write /nowhere/file");
}
