//! Help, version and wrong usage.

use crate::common::run;

#[test]
fn help_names_every_command_and_the_exit_codes() {
    let help = run(&["--help"]);
    assert_eq!(help.code, 0);
    for word in ["cm", "demo", "doctor", "dump", "devinfo", "perf", "ping", "pingpong", "--json", "Exit codes"] {
        assert!(help.out.contains(word), "{word}: {}", help.out);
    }
    assert_eq!(run(&["help", "dump"]).code, 0);
    assert!(run(&["--version"]).out.starts_with("uroce "));
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in [
        &["no-such-command"][..],
        &[],
        &["dump"],
        &["dump", "--no-such-flag", "x"],
        &["dump", "--qp", "0x1000000", "x"],
        &["dump", "--pcap", "y", "x"],
        &["dump", "--fault", "drop:ack", "x"],
    ] {
        let ran = run(args);
        assert_eq!(ran.code, 2, "{args:?}: {ran:?}");
        assert!(ran.out.is_empty(), "{ran:?}");
    }
}
