//! What an endpoint is made of.

use core::net::IpAddr;

use crate::burst::IcrcMode;
use crate::mem::IovaPolicy;
use crate::types::{MacAddr, PKey, PathMtu};
use crate::verbs::QpOptions;

/// Configuration of an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Device name, e.g. `uroce0`.
    pub name: String,
    /// Addresses; each becomes an entry of the GID table, in order.
    pub addresses: Vec<IpAddr>,
    /// Largest path MTU that the device carries.
    pub path_mtu: PathMtu,
    /// ICRC policy on receive.
    pub icrc: IcrcMode,
    /// Default wire addresses of regions.
    pub iova: IovaPolicy,
    /// Link address, for people.
    pub mac: Option<MacAddr>,
    /// QPs at most.
    pub max_qp: usize,
    /// The P_Key table: what `pkey_index` names, 1 to [`super::MAX_PKEYS`] entries. What is beyond is not taken; without
    /// any, the table is the default partition, as usual. An entry whose low 15 bits are 0 names no partition.
    pub pkeys: Vec<PKey>,
    /// Options of the QPs that are made.
    pub qp_options: QpOptions,
    /// UDP source ports that the device can send from; empty: any.
    pub source_ports: Vec<u16>,
    /// Packets that one transmit burst may have, at least 1: fewer than the device allows. 1 turns superframes off.
    pub segments_max: usize,
}

impl EndpointConfig {
    /// An endpoint on these addresses, everything else usual.
    #[must_use]
    pub fn new(addresses: Vec<IpAddr>, path_mtu: PathMtu) -> Self {
        Self {
            name: "uroce0".to_owned(),
            addresses,
            path_mtu,
            icrc: IcrcMode::Check,
            iova: IovaPolicy::Host,
            mac: None,
            max_qp: 65_536,
            pkeys: vec![PKey::DEFAULT],
            qp_options: QpOptions::default(),
            source_ports: Vec::new(),
            segments_max: usize::MAX,
        }
    }
}
