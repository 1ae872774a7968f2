//! RDMA hardware that is not there: one clear line, and exit code 4.

use crate::common::{Ran, run, uroce};

/// Commands that take an `hw:` device.
const COMMANDS: [&[&str]; 9] = [
    &["devinfo", "-d", "hw:no-such-rnic"],
    &["pingpong", "rc", "-d", "hw:no-such-rnic"],
    &["ping", "-s", "--device", "hw:no-such-rnic"],
    &["perf", "write", "bw", "-d", "hw:no-such-rnic"],
    &["cm", "connect", "--device", "hw:no-such-rnic"],
    &["cm", "connect", "--device", "hw:no-such-rnic", "-s", "127.90.21.1"],
    &["cm", "datagram", "--device", "hw:no-such-rnic"],
    &["cm", "multicast", "-m", "239.7.90.21", "--device", "hw:no-such-rnic"],
    &["cm", "time", "--device", "hw:no-such-rnic"],
];

#[test]
fn no_library() {
    for command in COMMANDS {
        let output = uroce(command).env("UROCE_LIBIBVERBS", "libibverbs-of-nowhere.so.1").output().unwrap();
        let line = "libibverbs-of-nowhere.so.1 is not installed; apt-get install libibverbs1 ibverbs-providers";
        Ran::of(&output).fails(4, line);
    }
}

#[test]
fn no_such_device() {
    for command in COMMANDS {
        let ran = run(command);
        // Where libibverbs is not installed that is what is told.
        let line = if ran.err.contains("is not installed") {
            "libibverbs.so.1 is not installed; apt-get install libibverbs1 ibverbs-providers"
        } else {
            "there is no RDMA device no-such-rnic; "
        };
        ran.fails(4, line);
    }
}

#[test]
fn a_library_of_another_kind() {
    let output = uroce(COMMANDS[0]).env("UROCE_LIBIBVERBS", "libc.so.6").output().unwrap();
    Ran::of(&output).fails(4, "libc.so.6 has no function ibv_get_device_list; rdma-core 33 or later is needed");
}

#[test]
fn what_hardware_cannot_do_for_us_is_wrong_usage() {
    run(&["--fault", "drop:ack:1", "devinfo", "-d", "hw:no-such-rnic"]).fails(2, "leave --fault and --pcap out");
    assert_eq!(run(&["devinfo", "-d", "hw:"]).code, 2);
    assert_eq!(run(&["devinfo", "-d", "hw:rxe0/0"]).code, 2);
}
