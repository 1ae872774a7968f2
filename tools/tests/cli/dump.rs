//! `uroce dump` over the captures.

use std::collections::BTreeMap;
use std::fs;

use uroce_fixtures::Fixture;

use crate::common::{Ran, run, uroce};

fn dump(fixture: &Fixture, more: &[&str]) -> Ran {
    let path = fixture.path();
    let mut args = vec!["dump", path.to_str().unwrap()];
    args.extend(more);
    run(&args)
}

#[test]
fn counts_agree_with_the_index_of_every_capture() {
    assert_eq!(uroce_fixtures::all().len(), 59);
    for fixture in uroce_fixtures::all() {
        let ran = dump(fixture, &["--json"]);
        assert_eq!(ran.code, 0, "{}: {ran:?}", fixture.name);
        let document = ran.json();
        let counts: BTreeMap<String, u64> = serde_json::from_value(document["opcodes"].clone()).unwrap();
        assert_eq!(counts, fixture.opcode_counts, "{}", fixture.name);
        assert_eq!(document["packets"], fixture.packets, "{}", fixture.name);
        for nothing in ["icrc_wrong", "malformed", "other"] {
            assert_eq!(document[nothing], 0, "{}: {nothing}", fixture.name);
        }
    }
}

#[test]
fn a_line_tells_the_packet_and_never_the_payload() {
    let fixture = uroce_fixtures::by_name("rping_v4").unwrap();
    let ran = dump(fixture, &[]);
    assert_eq!(ran.code, 0);
    let line = |name: &str| ran.out.lines().find(|l| l.contains(name)).unwrap_or_else(|| panic!("{name}: {}", ran.out));
    let req = line("CM_REQ");
    assert!(req.contains("10.77.0.1 > 10.77.0.2") && req.contains("PSN 0x7be5b2"), "{req}");
    assert!(line("RC_READ_REQUEST").contains("dma_len 64"), "{}", ran.out);
    assert!(!ran.out.contains("rdma-ping"), "the payload is the user's");
    let shown = dump(fixture, &["--payload"]);
    assert!(shown.out.contains("rdma-ping-0: ABC"), "{}", shown.out);
}

#[test]
fn verbose_shows_every_field() {
    let fixture = uroce_fixtures::by_name("cm_rej_user").unwrap();
    let ran = dump(fixture, &["-v"]);
    for field in [
        "udp_src_port           55410",
        "cm_reason              28",
        "qkey                   0x80010000",
        "icrc                   right",
    ] {
        assert!(ran.out.contains(field), "{field}: {}", ran.out);
    }
    let json = dump(fixture, &["-v", "--json"]);
    let first: serde_json::Value = serde_json::from_str(json.out.lines().next().unwrap()).unwrap();
    assert_eq!(first["packet"]["name"], "CM_REQ");
    assert_eq!(first["packet"]["fields"]["dest_qp"], "0x000001");
}

#[test]
fn a_stream_tells_what_went_wrong() {
    let stream = |name: &str, src: &str| {
        let document = dump(uroce_fixtures::by_name(name).unwrap(), &["--json"]).json();
        let streams = document["streams"].as_array().unwrap().clone();
        streams.into_iter().find(|s| s["src"] == src && s["qp"] != 1).unwrap()
    };
    // The index: 45 NAKs for a PSN sequence error and 64 ACKs.
    let answers = stream("loss_data", "10.77.0.2");
    assert_eq!((&answers["nak_sequence"], &answers["acks"]), (&45.into(), &64.into()));
    let requests = stream("loss_data", "10.77.0.1");
    assert!(requests["retransmissions"].as_u64() > Some(0) && requests["gaps"] == 0, "{requests}");
    // Six RNR NAKs, each followed by the same SEND.
    assert_eq!(stream("rnr_then_ok", "10.77.0.2")["rnr"], 6);
    assert_eq!(stream("rnr_then_ok", "10.77.0.1")["retransmissions"], 6);
    // netem put packets out of order before the capture.
    assert!(stream("netem_dup_reorder", "10.77.0.1")["late"].as_u64() > Some(0));
    // A capture without trouble.
    assert_eq!(stream("rc_pingpong_mtu1024", "10.77.0.1")["troubled"], false);
}

#[test]
fn filters_and_counts() {
    let fixture = uroce_fixtures::by_name("rping_v4").unwrap();
    let document = dump(fixture, &["--json", "--qp", "1"]).json();
    assert_eq!(document["packets"], 5, "REQ, REP, RTU, DREQ, DREP");
    let three = dump(fixture, &["-c", "3"]);
    assert!(three.out.contains("3 frames"), "{}", three.out);
    let quiet = dump(fixture, &["-q"]);
    assert!(quiet.out.starts_with("41 frames: 41 RoCEv2 packets (0 with a wrong ICRC)"), "{}", quiet.out);
}

#[test]
fn what_is_written_reads_back_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = uroce_fixtures::by_name("loss_read_resp").unwrap();
    let copy = dir.path().join("copy.pcapng");
    let ran = dump(fixture, &["-q", "--write", copy.to_str().unwrap()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let again = run(&["dump", copy.to_str().unwrap(), "--json"]).json();
    let counts: BTreeMap<String, u64> = serde_json::from_value(again["opcodes"].clone()).unwrap();
    assert_eq!(counts, fixture.opcode_counts);
    let bytes = fs::read(&copy).unwrap();
    let comment = b"RC_READ_REQUEST; retransmission";
    assert!(bytes.windows(comment.len()).any(|w| w == comment), "the comment stands at the packet");
    // Times keep their microseconds.
    let lines = |path: &str| run(&["dump", path]).out.lines().take(5).map(|l| l[..20].to_owned()).collect::<Vec<_>>();
    assert_eq!(lines(copy.to_str().unwrap()), lines(fixture.path().to_str().unwrap()));
}

#[test]
fn a_wrong_icrc_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = uroce_fixtures::by_name("ud_pingpong").unwrap();
    let mut bytes = fs::read(fixture.path()).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let bad = dir.path().join("bad.pcap");
    fs::write(&bad, &bytes).unwrap();
    let ran = run(&["dump", bad.to_str().unwrap()]);
    assert_eq!(ran.code, 0);
    assert_eq!(ran.out.matches("[ICRC wrong]").count(), 1, "{}", ran.out);
    assert!(ran.out.contains("10 RoCEv2 packets (1 with a wrong ICRC)"), "{}", ran.out);
}

#[test]
fn damaged_and_missing_files_are_told_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let capture = fs::read(uroce_fixtures::by_name("rping_v4").unwrap().path()).unwrap();
    let cut = run(&["dump", &file("cut.pcap", &capture[..capture.len() - 5])]);
    cut.fails(1, "is damaged after frame 40");
    assert!(cut.out.contains("40 frames"), "what could be read is still told: {}", cut.out);
    run(&["dump", &file("text.pcap", b"hello, world, this is no capture")]).fails(1, "is no pcap or pcapng file");
    run(&["dump", &file("empty.pcap", b"")]).fails(1, "is no pcap or pcapng file");
    run(&["dump", dir.path().join("none.pcap").to_str().unwrap()]).fails(4, "cannot read");
    run(&["dump", "nosuchif0"]).fails(4, "neither a file nor an interface");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let path = uroce_fixtures::by_name("loss_data").unwrap().path();
    let mut child =
        uroce(&["dump", "-v", path.to_str().unwrap()]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
