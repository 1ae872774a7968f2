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
fn the_book_has_every_command() {
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/tools.md");
    let book = std::fs::read_to_string(book).unwrap();
    let mut commands = Vec::new();
    for (path, help) in [(&[][..], &["--help"][..]), (&["cm"], &["cm", "--help"])] {
        let help = run(help).out;
        let list = help.split("\nCommands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
        // Further lines of a description are indented by more.
        let names = list.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
        let names = names.filter_map(|line| line.split(' ').next()).filter(|name| *name != "help");
        commands.extend(names.map(|name| [path, &[name][..]].concat().join(" ")));
    }
    assert!(commands.len() > 12, "{commands:?}");
    for command in commands {
        assert!(book.contains(&format!("`uroce {command}")), "docs/src/tools.md says nothing of `uroce {command}`");
    }
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
