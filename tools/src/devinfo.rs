//! `uroce devinfo`: what ibv_devinfo says, of a uroce device.
//!
//! Owns the flags and the layout. Opens the device, sends nothing.

use core::net::IpAddr;

use clap::Args;
use pnet::datalink;
use serde::Serialize;
use uroce::types::PathMtu;
use uroce::verbs::{DeviceAttr, GidEntry, GidType, PortAttr, Verbs};

use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::hardware::{self, HwArg};
use crate::node;
use crate::pages;
use crate::report::Output;

/// Flags of `uroce devinfo`, with the letters of ibv_devinfo.
#[derive(Args, Debug)]
pub(crate) struct DevinfoArgs {
    /// Only this device: udp:ADDR, packet:IFNAME[,mac=MAC,ip=ADDR][,vlan=ID], tap:IFNAME,ip=ADDR, pnet:IFNAME or hw:NAME
    /// [default: a udp: device for each address]
    #[arg(short, long)]
    device: Option<DeviceArg>,
    /// Port of the device; there is one
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=1))]
    ib_port: u8,
    /// Only the names of the devices that could be opened here
    #[arg(short, long)]
    list: bool,
    /// All attributes and the GID table
    #[arg(short, long)]
    verbose: bool,
}

/// Runs the command.
pub(crate) fn run(args: &DevinfoArgs, out: &mut Output) -> Result<(), Failure> {
    let devices = args.device.clone().map_or_else(candidates, |device| vec![device]);
    if args.list {
        return list(&devices, out);
    }
    let mut infos = Vec::new();
    for device in &devices {
        match Info::read(device) {
            Ok(info) => infos.push(info),
            // Of many devices, one that is in use hides the others only when it was asked for.
            Err(failure) if args.device.is_none() => out.line(format_args!("hca_id:\t{device}\n\t{failure}\n"))?,
            Err(failure) => return Err(failure),
        }
    }
    for info in &infos {
        out.line(text(info, args.verbose))?;
    }
    out.document("devinfo", &Document { devices: infos.iter().map(Json::of).collect() })
}

/// A `udp:` device for each address of each interface that is up, and the RDMA devices.
fn candidates() -> Vec<DeviceArg> {
    let up = datalink::interfaces().into_iter().filter(pnet::datalink::NetworkInterface::is_up);
    let hardware = hardware::names().into_iter().map(|name| DeviceArg::Hw(HwArg { name, port: 1 }));
    up.flat_map(|i| i.ips).map(|net| DeviceArg::Udp(net.ip())).chain(hardware).collect()
}

fn list(devices: &[DeviceArg], out: &mut Output) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct List {
        devices: Vec<String>,
    }
    let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
    out.line(format_args!("{} HCA{} found:", names.len(), if names.len() == 1 { "" } else { "s" }))?;
    for name in &names {
        out.line(format_args!("\t{name}"))?;
    }
    out.line("")?;
    out.document("devinfo", &List { devices: names })
}

/// What a device tells.
struct Info {
    device: DeviceArg,
    attr: DeviceAttr,
    port: PortAttr,
    gids: Vec<GidEntry>,
    netdev: Option<String>,
}

impl Info {
    fn read(device: &DeviceArg) -> Result<Self, Failure> {
        if let DeviceArg::Hw(arg) = device {
            let opened = hardware::open(arg)?;
            return Ok(Self::of(device, &opened, hardware::interface(&opened)));
        }
        let engine = node::idle_engine(device)?;
        let netdev = match device {
            DeviceArg::Packet(packet) => Some(packet.interface.clone()),
            DeviceArg::Xdp(xdp) => Some(xdp.place.interface.clone()),
            DeviceArg::Tap(tap) => Some(tap.interface.clone()),
            DeviceArg::Pnet(name) => Some(name.clone()),
            DeviceArg::Udp(address) => interface_of(*address),
            DeviceArg::Hw(_) | DeviceArg::Loop => None,
        };
        Ok(Self::of(device, engine.endpoint(), netdev))
    }

    fn of(device: &DeviceArg, v: &dyn Verbs, netdev: Option<String>) -> Self {
        Self { device: device.clone(), attr: v.query_device(), port: v.query_port(), gids: v.query_gids(), netdev }
    }
}

/// The interface that carries `address`; 127.0.0.2 belongs to the one with 127.0.0.0/8.
fn interface_of(address: IpAddr) -> Option<String> {
    let all = datalink::interfaces();
    let with = |exact: bool| {
        let has = |i: &&datalink::NetworkInterface| {
            i.ips.iter().any(|net| if exact { net.ip() == address } else { net.contains(address) })
        };
        all.iter().find(has).map(|i| i.name.clone())
    };
    with(true).or_else(|| with(false))
}

/// A GUID in groups of 16 bits.
fn guid(guid: u64) -> String {
    let groups: Vec<String> = [48, 32, 16, 0].iter().map(|shift| format!("{:04x}", guid >> shift & 0xffff)).collect();
    groups.join(":")
}

fn mtu(mtu: PathMtu) -> String {
    format!("{} ({})", mtu.bytes(), mtu.code())
}

const fn gid_type(entry: &GidEntry) -> &'static str {
    match entry.gid_type {
        GidType::RoceV2 => "RoCE v2",
        GidType::RoceV1 => "IB/RoCE v1",
    }
}

/// ibv_devinfo's lines, names padded with tabs to the same column.
fn text(info: &Info, verbose: bool) -> String {
    let mut lines = vec![format!("hca_id:\t{}", info.attr.name)];
    let mut device = |name: &str, value: String| lines.push(field(1, 4, name, &value));
    let a = &info.attr;
    device("transport:", "InfiniBand (0)".into());
    device("fw_ver:", env!("CARGO_PKG_VERSION").into());
    device("node_guid:", guid(a.node_guid));
    device("sys_image_guid:", guid(a.node_guid));
    device("vendor_id:", "0x0000".into());
    device("vendor_part_id:", "0".into());
    device("hw_ver:", "0x0".into());
    device("phys_port_cnt:", "1".into());
    if verbose {
        device("device:", info.device.to_string());
        device("max_qp:", a.max_qp.to_string());
        device("max_qp_wr:", a.max_qp_wr.to_string());
        device("max_sge:", a.max_sge.to_string());
        device("max_cq:", a.max_cq.to_string());
        device("max_cqe:", a.max_cqe.to_string());
        device("max_mr:", a.max_mr.to_string());
        device("max_mw:", a.max_mw.to_string());
        device("max_pd:", a.max_pd.to_string());
        device("max_qp_rd_atom:", a.max_rd_atomic.to_string());
        device("max_qp_init_rd_atom:", a.max_rd_atomic.to_string());
        device("atomic_cap:", "ATOMIC_HCA (1)".into());
        device("max_ah:", a.max_ah.to_string());
        device("max_srq:", a.max_srq.to_string());
        device("max_inline:", a.max_inline.to_string());
        device("max_pkeys:", a.pkeys.len().to_string());
        device("local_ca_ack_delay:", a.ack_delay.code().to_string());
        if let Some(came) = pages::text() {
            device("huge_pages:", came);
        }
    }
    lines.push("\t\tport:\t1".into());
    let mut port = |name: &str, value: String| lines.push(field(3, 3, name, &value));
    let p = &info.port;
    port("state:", if p.active { "PORT_ACTIVE (4)" } else { "PORT_DOWN (1)" }.into());
    port("max_mtu:", mtu(p.max_mtu));
    port("active_mtu:", mtu(p.active_mtu));
    port("sm_lid:", "0".into());
    port("port_lid:", "0".into());
    port("port_lmc:", "0x00".into());
    port("link_layer:", "Ethernet".into());
    if verbose {
        port("max_msg_sz:", format!("{:#x}", a.max_msg_size));
        port("gid_tbl_len:", info.gids.len().to_string());
        port("pkey_tbl_len:", a.pkeys.len().to_string());
        if let Some(mac) = p.mac {
            port("mac:", mac.to_string());
        }
        let netdev = info.netdev.as_deref().unwrap_or("-");
        // Hardware's tables have empty entries.
        for (index, entry) in info.gids.iter().enumerate().filter(|(_, entry)| !entry.gid.is_unspecified()) {
            port(&format!("GID[{index:3}]:"), format!("{}, {}, {netdev}", entry.gid, gid_type(entry)));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

/// `name` after `indent` tabs, then as many tabs as reach `column` more tab stops, then `value`.
fn field(indent: usize, column: usize, name: &str, value: &str) -> String {
    let tabs = column.saturating_sub(name.len() / 8).max(1);
    format!("{}{name}{}{value}", "\t".repeat(indent), "\t".repeat(tabs))
}

#[derive(Serialize)]
struct Document<'a> {
    devices: Vec<Json<'a>>,
}

#[derive(Serialize)]
struct Json<'a> {
    hca_id: &'a str,
    device: String,
    node_guid: String,
    state: &'static str,
    max_mtu: usize,
    active_mtu: usize,
    mac: Option<String>,
    netdev: Option<&'a str>,
    max_qp: u32,
    max_qp_wr: u32,
    max_sge: u32,
    max_cq: u32,
    max_cqe: u32,
    max_mr: u32,
    max_mw: u32,
    max_pd: u32,
    max_srq: u32,
    max_ah: u32,
    max_rd_atomic: u8,
    max_msg_size: u32,
    max_inline: u32,
    gids: Vec<JsonGid>,
}

#[derive(Serialize)]
struct JsonGid {
    index: usize,
    gid: String,
    #[serde(rename = "type")]
    gid_type: &'static str,
}

impl<'a> Json<'a> {
    fn of(info: &'a Info) -> Self {
        let (a, p) = (&info.attr, &info.port);
        let gids = info.gids.iter().enumerate().filter(|(_, entry)| !entry.gid.is_unspecified());
        Self {
            hca_id: &a.name,
            device: info.device.to_string(),
            node_guid: guid(a.node_guid),
            state: if p.active { "ACTIVE" } else { "DOWN" },
            max_mtu: p.max_mtu.bytes(),
            active_mtu: p.active_mtu.bytes(),
            mac: p.mac.map(|m| m.to_string()),
            netdev: info.netdev.as_deref(),
            max_qp: a.max_qp,
            max_qp_wr: a.max_qp_wr,
            max_sge: a.max_sge,
            max_cq: a.max_cq,
            max_cqe: a.max_cqe,
            max_mr: a.max_mr,
            max_mw: a.max_mw,
            max_pd: a.max_pd,
            max_srq: a.max_srq,
            max_ah: a.max_ah,
            max_rd_atomic: a.max_rd_atomic,
            max_msg_size: a.max_msg_size,
            max_inline: a.max_inline,
            gids: gids.map(|(index, e)| JsonGid { index, gid: e.gid.to_string(), gid_type: gid_type(e) }).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_in_ibv_devinfos_columns() {
        assert_eq!(field(1, 4, "transport:", "InfiniBand (0)"), "\ttransport:\t\t\tInfiniBand (0)");
        assert_eq!(field(1, 4, "fw_ver:", "0.0.0"), "\tfw_ver:\t\t\t\t0.0.0");
        assert_eq!(field(1, 4, "vendor_part_id:", "0"), "\tvendor_part_id:\t\t\t0");
        assert_eq!(field(3, 3, "state:", "PORT_ACTIVE (4)"), "\t\t\tstate:\t\t\tPORT_ACTIVE (4)");
        assert_eq!(field(3, 3, "active_mtu:", "1024 (3)"), "\t\t\tactive_mtu:\t\t1024 (3)");
    }

    #[test]
    fn a_guid_has_four_groups() {
        assert_eq!(guid(0x0277_00ff_fe00_0002), "0277:00ff:fe00:0002");
    }

    #[test]
    fn a_loopback_address_belongs_to_the_loopback_interface() {
        let lo = interface_of(IpAddr::from([127, 0, 0, 1]));
        assert_eq!(interface_of(IpAddr::from([127, 9, 9, 9])), lo);
    }
}
