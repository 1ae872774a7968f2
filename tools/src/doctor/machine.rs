//! The machine: what an endpoint here would find.
//!
//! Owns the checks that send nothing.

use core::net::IpAddr;
use std::path::{Path, PathBuf};

use uroce::device::netlink::{InterfaceFacts, Netlink, Offloads, XdpAttachment};
use uroce::types::PathMtu;

use super::{Check, Level, Report};
use crate::exit::Failure;
use crate::ports::{self, Who};

/// `cap_net_admin` and `cap_net_raw`.
const CAPABILITIES: [(u32, &str); 2] = [(12, "cap_net_admin"), (13, "cap_net_raw")];
/// MTU that carries a path MTU of 4096 with all headers.
const MTU_FOR_4096: usize = 4200;
/// Locked memory that hardware needs for a few regions.
const MEMLOCK_MIN: u64 = 64 << 20;
/// Receive buffer that a UDP device wants.
const RMEM_MIN: u64 = 1 << 20;

/// Where the kernel's file systems are.
pub(super) struct Roots {
    proc: PathBuf,
    sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into() }
    }
}

impl Roots {
    fn text(path: &Path) -> Option<String> {
        std::fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
    }

    fn proc(&self, path: &str) -> Option<String> {
        Self::text(&self.proc.join(path))
    }

    fn sys(&self, path: &str) -> Option<String> {
        Self::text(&self.sys.join(path))
    }

    fn list(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.sys.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// Makes all checks.
pub(super) fn look(roots: &Roots, report: &mut Report<'_>) -> Result<(), Failure> {
    let interfaces = InterfaceFacts::all()?;
    let usable: Vec<&InterfaceFacts> = interfaces.iter().filter(|i| i.up && !i.addresses.is_empty()).collect();
    report.add(capabilities(roots))?;
    if usable.is_empty() {
        let fix = "`ip link set lo up` at the least, or `ip addr add` an address";
        report.add(Check::of(Level::Lack, "interfaces", "no interface is up and has an address", fix))?;
    }
    for interface in &usable {
        report.add(mtu(interface))?;
    }
    report.add(port(roots, &usable))?;
    for interface in usable.iter().filter(|i| i.mac.is_some()) {
        let name = &interface.name;
        report.add(offloads(name, Offloads::of(name), &features(name)))?;
        if let Ok(attachment) = Netlink::open().and_then(|mut netlink| netlink.xdp(interface.index)) {
            report.add(xdp(&interface.name, attachment))?;
        }
    }
    report.add(rp_filter(roots, &usable))?;
    for check in [hugepages(roots), clock(roots), memlock(roots), socket_buffers(roots), rdma_devices(roots)] {
        report.add(check)?;
    }
    Ok(())
}

fn capabilities(roots: &Roots) -> Check {
    let status = roots.proc("self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let held = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok()).unwrap_or(0);
    let missing: Vec<&str> =
        CAPABILITIES.iter().filter(|(bit, _)| held >> bit & 1 == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Check::ok("capabilities", "cap_net_admin and cap_net_raw are there: every device can be opened");
    }
    Check::of(
        Level::Warn,
        "capabilities",
        format!("{} missing: udp: devices work, packet: and pnet: need cap_net_raw", missing.join(" and ")),
        "run as root, or `setcap cap_net_raw,cap_net_admin+ep` the program",
    )
}

fn mtu(interface: &InterfaceFacts) -> Check {
    let InterfaceFacts { name, mtu, .. } = interface;
    match PathMtu::for_interface(*mtu) {
        None => Check::of(
            Level::Warn,
            "MTU",
            format!("{name} has an MTU of {mtu}, less than the smallest RoCEv2 packet needs"),
            format!("`ip link set {name} mtu 1500`"),
        ),
        Some(path) if path < PathMtu::B1024 => Check::of(
            Level::Warn,
            "MTU",
            format!(
                "{name} has an MTU of {mtu}, which carries a path MTU of {}; peers usually ask for 1024",
                path.bytes()
            ),
            format!("`ip link set {name} mtu 1500`, or connect with a path MTU of {}", path.bytes()),
        ),
        Some(path) => {
            let more = if *mtu < MTU_FOR_4096 { format!(" ({MTU_FOR_4096} would carry 4096)") } else { String::new() };
            Check::ok("MTU", format!("{name} has an MTU of {mtu}, which carries a path MTU of {}{more}", path.bytes()))
        }
    }
}

fn port(roots: &Roots, usable: &[&InterfaceFacts]) -> Check {
    let held = ports::holders(&roots.proc);
    if held.is_empty() {
        return Check::ok("port 4791", "free on all addresses");
    }
    let list = held.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let addresses: Vec<IpAddr> = usable.iter().flat_map(|i| i.addresses.iter().map(|a| a.0)).collect();
    let takes = |ip: IpAddr| {
        held.iter().any(|h| h.address == ip || h.address.is_unspecified() && (h.address.is_ipv6() || ip.is_ipv4()))
    };
    let kernel = held.iter().any(|h| h.who == Who::Kernel);
    if addresses.iter().all(|ip| takes(*ip)) {
        let fix = if kernel {
            "remove the rxe link (`rdma link delete`), run in a network namespace, or use a packet: device with an address of \
             its own"
        } else {
            "end that process, or give it one address; a packet: device with an address of its own needs no port"
        };
        return Check::of(Level::Lack, "port 4791", format!("held on every address: {list}"), fix);
    }
    Check::of(Level::Warn, "port 4791", format!("held on {list}"), "give each process an address of its own")
}

/// `features` is what `ethtool -k` prints, where that program is there.
fn offloads(name: &str, offloads: Offloads, features: &str) -> Check {
    let shown = |on: Option<bool>| match on {
        Some(true) => "on",
        Some(false) => "off",
        None => "unknown",
    };
    let found = format!("{name}: GRO {}, transmit checksums {}", shown(offloads.gro), shown(offloads.tx_checksum));
    let is_on = |feature: &&str| {
        features.lines().any(|l| l.trim().strip_prefix(*feature).is_some_and(|l| l.starts_with(": on")))
    };
    // Datagrams that were joined to be passed on are cut apart again with other IPv4 identifications, which the ICRC covers.
    if let Some(feature) = ["rx-udp-gro-forwarding", "rx-gro-list"].into_iter().find(is_on) {
        return Check::of(
            Level::Warn,
            "offloads",
            format!("{found}, {feature} on: RoCEv2 that this machine passes on to others may arrive with a wrong ICRC"),
            format!("`ethtool -K {name} {feature} off` if it routes or bridges RoCEv2"),
        );
    }
    // Between two ends of a veth pair nobody fills the checksum in; RoCEv2 does not look at it.
    if offloads.tx_checksum == Some(true) {
        return Check::ok(
            "offloads",
            format!("{found} (captures here show unfinished UDP checksums, which RoCEv2 ignores)"),
        );
    }
    Check::ok("offloads", found)
}

/// What `ethtool -k` says of an interface, if it is there.
fn features(name: &str) -> String {
    let output = std::process::Command::new("ethtool").args(["-k", name]).output();
    output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
}

fn xdp(name: &str, attachment: XdpAttachment) -> Check {
    let mode = match attachment {
        XdpAttachment::None => return Check::ok("XDP", format!("{name}: no program")),
        XdpAttachment::Driver => "driver",
        XdpAttachment::Generic => "generic",
        XdpAttachment::Other => "hardware or mixed",
    };
    Check::of(
        Level::Warn,
        "XDP",
        format!("{name}: a program in {mode} mode sees every packet first, and may take or drop RoCEv2"),
        format!("look what it is with `ip -d link show {name}`; `ip link set {name} xdp off` removes it"),
    )
}

fn rp_filter(roots: &Roots, usable: &[&InterfaceFacts]) -> Check {
    let value = |name: &str| -> u32 {
        let text = roots.proc(&format!("sys/net/ipv4/conf/{name}/rp_filter"));
        text.and_then(|t| t.parse().ok()).unwrap_or(0)
    };
    let real: Vec<&str> = usable.iter().filter(|i| i.mac.is_some()).map(|i| i.name.as_str()).collect();
    let all = value("all");
    let strict: Vec<&str> = real.iter().copied().filter(|name| all.max(value(name)) == 1).collect();
    if strict.is_empty() || real.len() < 2 {
        return Check::ok("rp_filter", "no packet is dropped for the way it came");
    }
    let names = strict.join(", ");
    Check::of(
        Level::Warn,
        "rp_filter",
        format!(
            "strict on {names}: with several interfaces, packets that come by another than the answer's are dropped"
        ),
        "`sysctl net.ipv4.conf.all.rp_filter=2` if peers are reached by more than one",
    )
}

fn hugepages(roots: &Roots) -> Check {
    let sizes = roots.list("kernel/mm/hugepages");
    let reserved: Vec<String> = sizes
        .iter()
        .filter_map(|dir| {
            let count = roots.sys(&format!("kernel/mm/hugepages/{dir}/nr_hugepages"))?;
            let free = roots.sys(&format!("kernel/mm/hugepages/{dir}/free_hugepages")).unwrap_or_default();
            let size = dir.strip_prefix("hugepages-")?;
            (count != "0").then(|| format!("{free} of {count} of {size} free"))
        })
        .collect();
    if reserved.is_empty() {
        let found =
            "none reserved: regions on huge pages fall back to normal ones (`sysctl vm.nr_hugepages=64` reserves some)";
        return Check::ok("huge pages", found);
    }
    Check::ok("huge pages", reserved.join(", "))
}

fn clock(roots: &Roots) -> Check {
    let path = "devices/system/clocksource/clocksource0";
    let Some(source) = roots.sys(&format!("{path}/current_clocksource")) else {
        return Check::ok("clock", "the kernel does not say which clock it has");
    };
    if !matches!(source.as_str(), "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") {
        return Check::ok("clock", source);
    }
    let others = roots.sys(&format!("{path}/available_clocksource")).unwrap_or_default();
    Check::of(
        Level::Warn,
        "clock",
        format!("{source} is slow to read: timers and latencies suffer"),
        format!("choose another of `{others}` in /sys/{path}/current_clocksource"),
    )
}

fn memlock(roots: &Roots) -> Check {
    let limits = roots.proc("self/limits").unwrap_or_default();
    let soft =
        limits.lines().find_map(|l| l.strip_prefix("Max locked memory")).and_then(|l| l.split_whitespace().next());
    match soft.map(str::parse::<u64>) {
        Some(Ok(bytes)) if bytes < MEMLOCK_MIN => Check::of(
            Level::Warn,
            "memlock",
            format!("{} KiB may be locked: endpoints in software need none, hw: devices register more", bytes >> 10),
            "`ulimit -l unlimited`, or memlock in /etc/security/limits.conf",
        ),
        Some(Ok(bytes)) => Check::ok("memlock", format!("{} MiB may be locked", bytes >> 20)),
        Some(Err(_)) => Check::ok("memlock", "unlimited"),
        None => Check::ok("memlock", "the kernel does not say how much may be locked"),
    }
}

fn socket_buffers(roots: &Roots) -> Check {
    let max = roots.proc("sys/net/core/rmem_max").and_then(|t| t.parse::<u64>().ok());
    match max {
        Some(bytes) if bytes < RMEM_MIN => Check::of(
            Level::Warn,
            "socket buffer",
            format!("net.core.rmem_max is {} KiB: without cap_net_admin a udp: device loses bursts", bytes >> 10),
            format!("`sysctl net.core.rmem_max={}`", RMEM_MIN * 4),
        ),
        Some(bytes) => Check::ok("socket buffer", format!("net.core.rmem_max is {} KiB", bytes >> 10)),
        None => Check::ok("socket buffer", "not to be seen in this network namespace"),
    }
}

fn rdma_devices(roots: &Roots) -> Check {
    let names = roots.list("class/infiniband");
    if names.is_empty() {
        return Check::ok("RDMA devices", "none: hw: has nothing to open, everything else works without");
    }
    Check::ok("RDMA devices", format!("{}: `--device hw:NAME` uses one", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine in a directory.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with(self, path: &str, text: &str) -> Self {
            let at = self.0.path().join(path);
            std::fs::create_dir_all(at.parent().unwrap()).unwrap();
            std::fs::write(at, text).unwrap();
            self
        }

        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().join("proc"), sys: self.0.path().join("sys") }
        }
    }

    fn interface(name: &str, mtu: usize, ip: &str) -> InterfaceFacts {
        let addresses = vec![(ip.parse().unwrap(), 24)];
        let mac = Some(uroce::types::MacAddr([2, 0, 0, 0, 0, 1]));
        InterfaceFacts { name: name.into(), index: 1, up: true, mtu, mac, addresses }
    }

    #[test]
    fn capabilities_are_named() {
        let with = |bits: &str| capabilities(&Fake::new().with("proc/self/status", bits).roots());
        assert_eq!(with("Name:\tx\nCapEff:\t000001ffffffffff\n").level, Level::Ok);
        let check = with("CapEff:\t0000000000001000\n");
        assert_eq!(check.level, Level::Warn);
        assert!(check.found.starts_with("cap_net_raw missing"), "{check:?}");
    }

    #[test]
    fn mtus_are_those_of_roce() {
        let level = |mtu| mtu_of(mtu).level;
        fn mtu_of(value: usize) -> Check {
            mtu(&interface("eth0", value, "10.0.0.1"))
        }
        assert_eq!(
            [level(200), level(600), level(1500), level(4200)],
            [Level::Warn, Level::Warn, Level::Ok, Level::Ok]
        );
        assert!(mtu_of(600).found.contains("a path MTU of 512"));
        assert!(mtu_of(1500).found.contains("a path MTU of 1024 (4200 would carry 4096)"));
    }

    #[test]
    fn a_port_that_the_kernel_holds_everywhere_is_what_the_machine_lacks() {
        let line = " 1: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 0 2 0 0";
        let fake = Fake::new().with("proc/net/udp", &format!("head\n{line}\n"));
        let eth = interface("eth0", 1500, "10.0.0.1");
        let check = port(&fake.roots(), &[&eth]);
        assert_eq!(check.level, Level::Lack);
        assert!(check.found.contains("0.0.0.0 by the kernel (rdma_rxe)"), "{check:?}");
        assert!(check.fix.unwrap().contains("rdma link delete"));
        assert_eq!(port(&Fake::new().roots(), &[&eth]).level, Level::Ok);
    }

    #[test]
    fn slow_clocks_strict_filters_and_small_limits_are_warned_of() {
        let fake = Fake::new()
            .with("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
            .with("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet\n")
            .with("proc/self/limits", "Max locked memory         8388608              8388608              bytes\n")
            .with("proc/sys/net/ipv4/conf/all/rp_filter", "0\n")
            .with("proc/sys/net/ipv4/conf/eth0/rp_filter", "1\n")
            .with("proc/sys/net/core/rmem_max", "212992\n")
            .with("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8\n")
            .with("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "5\n");
        let roots = fake.roots();
        let (a, b) = (interface("eth0", 1500, "10.0.0.1"), interface("eth1", 1500, "10.0.1.1"));
        assert_eq!(clock(&roots).level, Level::Warn);
        assert_eq!(memlock(&roots).level, Level::Warn);
        assert_eq!(socket_buffers(&roots).level, Level::Warn);
        assert_eq!(rp_filter(&roots, &[&a]).level, Level::Ok, "one interface has one way");
        let check = rp_filter(&roots, &[&a, &b]);
        assert!(check.level == Level::Warn && check.found.starts_with("strict on eth0:"), "{check:?}");
        assert_eq!(hugepages(&roots).found, "5 of 8 of 2048kB free");
    }

    #[test]
    fn joined_datagrams_that_are_passed_on_are_warned_of() {
        let known = Offloads { gro: Some(true), tx_checksum: Some(false) };
        let check = |features: &str| offloads("eth0", known, features);
        assert_eq!(check("Features for eth0:\nrx-udp-gro-forwarding: off\n").level, Level::Ok);
        let warned = check("Features for eth0:\n\trx-udp-gro-forwarding: on\n");
        assert_eq!(warned.level, Level::Warn);
        assert!(warned.fix.unwrap().contains("ethtool -K eth0 rx-udp-gro-forwarding off"));
        assert_eq!(offloads("eth0", known, "").found, "eth0: GRO on, transmit checksums off");
    }

    #[test]
    fn an_xdp_program_is_warned_of() {
        assert_eq!(xdp("eth0", XdpAttachment::None).level, Level::Ok);
        assert!(xdp("eth0", XdpAttachment::Generic).found.contains("generic mode"));
    }
}
