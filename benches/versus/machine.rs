//! The machine and the versions of all programs, in words.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::lab::{Lab, MTU};

fn printed(program: &str, args: &[&str]) -> Option<String> {
    let ran = Command::new(program).args(args).output().ok()?;
    let text = [ran.stdout, ran.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    text.lines().map(str::trim).find(|l| !l.is_empty()).map(Into::into)
}

fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().into())
}

/// The table of the report.
pub(crate) fn describe(lab: &Lab) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut add = |name: &str, value: Option<String>| {
        out.insert(name.to_owned(), value.unwrap_or_else(|| "not known".into()));
    };
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = field(&cpu, "flags").unwrap_or_default();
    let has = |flag: &str| flags.split(' ').any(|f| f == flag);
    let model = field(&cpu, "model name");
    let cores = cpu.lines().filter(|l| l.starts_with("processor")).count();
    let virtualised = if has("hypervisor") { "virtualised" } else { "bare metal" };
    let interesting = ["avx2", "pclmulqdq", "vpclmulqdq", "avx512f"].into_iter().filter(|f| has(f));
    let interesting = interesting.collect::<Vec<_>>().join(", ");
    add("processor", model.map(|m| format!("{m}, {cores} processors, {virtualised} ({interesting})")));
    let governor = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    add("frequency governor", governor.ok().map(|g| g.trim().into()));
    add("kernel", fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|v| v.trim().into()));
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let pretty = system.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="));
    add("system", pretty.map(|p| p.trim_matches('"').into()));
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    add("load when it began", load.split(' ').next().map(Into::into));
    add("link", Some(format!("one veth pair, MTU {MTU}, each end in a network namespace")));
    add("date", printed("date", &["-u", "+%Y-%m-%d"]));
    add("uroce", printed(&lab.program("uroce"), &["--version"]));
    add("iperf3", printed("iperf3", &["--version"]));
    add("UCX", printed("ucx_info", &["-v"]).map(|v| v.trim_start_matches("# ").into()));
    let fabric = Command::new("fi_info").arg("--version").output().ok();
    let fabric = fabric.map(|r| String::from_utf8_lossy(&r.stdout).into_owned());
    add("libfabric", fabric.and_then(|t| field(&t, "libfabric")).map(|v| format!("libfabric {v}")));
    out
}
