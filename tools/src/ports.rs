//! Who holds UDP port 4791.
//!
//! Owns the reading of the kernel's lists of sockets and of the processes' descriptors. Asks nobody.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use uroce::wire::Flow;

/// Processes that are looked through at most, and descriptors of each.
const PROCESSES_MAX: usize = 100_000;
const DESCRIPTORS_MAX: usize = 65_536;

/// A socket on port 4791.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) address: IpAddr,
    pub(crate) who: Who,
}

/// Whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// The kernel's own: rdma_rxe.
    Kernel,
    /// A process.
    Process {
        /// Its id.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// A process that this one may not look at.
    Hidden,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel => f.write_str("the kernel (rdma_rxe)"),
            Self::Process { pid, name } => write!(f, "process {pid} ({name})"),
            Self::Hidden => f.write_str("a process of another user"),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.address, self.who)
    }
}

/// All sockets on port 4791; `proc` is where the process file system is.
pub(crate) fn holders(proc: &Path) -> Vec<Holder> {
    let table = |name| std::fs::read_to_string(proc.join("net").join(name)).unwrap_or_default();
    let sockets: Vec<(IpAddr, u64)> = [table("udp"), table("udp6")].iter().flat_map(|t| sockets(t)).collect();
    sockets.into_iter().map(|(address, inode)| Holder { address, who: who(proc, inode) }).collect()
}

/// Who holds the port of `address`, if anybody does: a socket of that address, or one of all addresses.
pub(crate) fn holder(address: IpAddr) -> Option<Holder> {
    let held = holders(Path::new("/proc"));
    let any = |h: &&Holder| h.address.is_unspecified() && (h.address.is_ipv6() || address.is_ipv4());
    held.iter().find(|h| h.address == address).or_else(|| held.iter().find(any)).cloned()
}

/// Address and inode of each socket on the port.
fn sockets(table: &str) -> Vec<(IpAddr, u64)> {
    table.lines().skip(1).filter_map(socket).collect()
}

fn socket(line: &str) -> Option<(IpAddr, u64)> {
    let mut columns = line.split_whitespace();
    let (address, port) = columns.nth(1)?.split_once(':')?;
    if u16::from_str_radix(port, 16).ok()? != Flow::PORT {
        return None;
    }
    // Words of four bytes, as the machine stores them.
    let words: Option<Vec<[u8; 4]>> = (0..address.len() / 8)
        .map(|i| u32::from_str_radix(address.get(i * 8..i * 8 + 8)?, 16).ok().map(u32::to_ne_bytes))
        .collect();
    let bytes = words?.concat();
    let ip = match (<[u8; 4]>::try_from(&bytes[..]), <[u8; 16]>::try_from(&bytes[..])) {
        (Ok(v4), _) => Ipv4Addr::from(v4).into(),
        (_, Ok(v6)) => Ipv6Addr::from(v6).into(),
        _ => return None,
    };
    // Local address is column 1, the inode column 9.
    Some((ip, columns.nth(7)?.parse().ok()?))
}

fn who(proc: &Path, inode: u64) -> Who {
    if inode == 0 {
        return Who::Kernel;
    }
    let wanted = format!("socket:[{inode}]");
    let Ok(entries) = std::fs::read_dir(proc) else { return Who::Hidden };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.take(PROCESSES_MAX) {
        let dir = proc.join(pid.to_string());
        let Ok(descriptors) = std::fs::read_dir(dir.join("fd")) else { continue };
        let mut links = descriptors.flatten().take(DESCRIPTORS_MAX).filter_map(|d| std::fs::read_link(d.path()).ok());
        if links.any(|link| link.to_str() == Some(&wanted)) {
            let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
            return Who::Process { pid, name: name.trim_end().to_owned() };
        }
    }
    Who::Hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_of_sockets_are_read() {
        let v4 = u32::from_ne_bytes([127, 0, 0, 2]);
        let v6: String = Ipv6Addr::LOCALHOST
            .octets()
            .chunks_exact(4)
            .map(|w| format!("{:08X}", u32::from_ne_bytes(w.try_into().unwrap())))
            .collect();
        let rest = "0:0 07 00000000:00000000 00:00000000 00000000     0        0";
        let table = format!(
            "  sl  local_address rem_address\n 1: {v4:08X}:12B7 {rest} 4711 2 0 0\n 2: {v4:08X}:12B8 {rest} 4712 2 0 0\n \
             3: {v6}:12B7 {rest} 0 2 0 0\n nonsense\n"
        );
        let found = sockets(&table);
        assert_eq!(found, [("127.0.0.2".parse().unwrap(), 4711), ("::1".parse().unwrap(), 0)]);
    }

    #[test]
    fn a_socket_of_this_process_is_found() {
        let socket = std::net::UdpSocket::bind("127.77.91.1:4791").unwrap();
        let held = holders(Path::new("/proc"));
        let ours = held.iter().find(|h| h.address == socket.local_addr().unwrap().ip()).unwrap();
        let Who::Process { pid, name } = &ours.who else { panic!("{ours:?}") };
        assert_eq!(*pid, std::process::id());
        assert!(!name.is_empty());
        assert!(ours.to_string().contains("127.77.91.1 by process"));
    }
}
