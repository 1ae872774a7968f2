//! The structures that cross into librdmacm, as 64-bit Linux lays them out.
//!
//! Owns our own definitions, made from the sizes and offsets of the public ABI. A test compares them with the system's
//! headers where these are installed. Never calls anything.

use core::ffi::{c_int, c_void};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use uroce::hw::abi::{AhAttr, Context};

/// `AF_INET` and `AF_INET6`.
const INET: u16 = 2;
const INET6: u16 = 10;

/// `struct sockaddr_storage`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Storage([u8; 128]);

impl Storage {
    /// An address as the system calls take it.
    pub(super) fn new(addr: SocketAddr) -> Self {
        let mut bytes = [0; 128];
        let mut put = |at: usize, field: &[u8]| {
            for (to, from) in bytes.iter_mut().skip(at).zip(field) {
                *to = *from;
            }
        };
        put(2, &addr.port().to_be_bytes());
        match addr {
            SocketAddr::V4(v4) => {
                put(0, &INET.to_ne_bytes());
                put(4, &v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                put(0, &INET6.to_ne_bytes());
                put(4, &v6.flowinfo().to_be_bytes());
                put(8, &v6.ip().octets());
                put(24, &v6.scope_id().to_ne_bytes());
            }
        }
        Self(bytes)
    }

    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        for (to, from) in out.iter_mut().zip(self.0.iter().skip(at)) {
            *to = *from;
        }
        out
    }

    /// The address, if it is one of IP.
    pub(super) fn addr(&self) -> Option<SocketAddr> {
        let port = u16::from_be_bytes(self.field(2));
        match u16::from_ne_bytes(self.field(0)) {
            INET => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(self.field::<4>(4))), port)),
            INET6 => {
                let (flow, scope) = (u32::from_be_bytes(self.field(4)), u32::from_ne_bytes(self.field(24)));
                Some(SocketAddrV6::new(Ipv6Addr::from(self.field::<16>(8)), port, flow, scope).into())
            }
            _ => None,
        }
    }
}

/// `struct rdma_event_channel`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct EventChannel {
    pub(super) fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Id {
    pub(super) verbs: *mut Context,
    pub(super) channel: *mut EventChannel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut c_void,
    pub(super) src_addr: Storage,
    pub(super) dst_addr: Storage,
    ib_addr: [u64; 5],
    pub(super) path_rec: *mut c_void,
    num_paths: c_int,
    pub(super) ps: u64,
    pub(super) event: *mut c_void,
    queues: [*mut c_void; 6],
    pub(super) qp_type: u32,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnParam {
    pub(super) private_data: *const u8,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// `struct rdma_ud_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct UdParam {
    pub(super) private_data: *const u8,
    pub(super) private_data_len: u8,
    pub(super) ah_attr: AhAttr,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
}

/// What an event says of the peer: of datagram services the one, else the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Param {
    pub(super) conn: ConnParam,
    pub(super) ud: UdParam,
}

/// `struct rdma_cm_event`.
#[repr(C)]
pub(super) struct Event {
    pub(super) id: *mut Id,
    pub(super) listen_id: *mut Id,
    pub(super) event: u32,
    pub(super) status: c_int,
    pub(super) param: Param,
}

/// Level and names of options of an id.
pub(super) const OPTION_ID: c_int = 0;
/// Type of service, 8 bits.
pub(super) const OPTION_TOS: c_int = 0;
/// Local ACK timeout, 8 bits.
pub(super) const OPTION_ACK_TIMEOUT: c_int = 3;

#[cfg(test)]
mod tests;
