//! RDMA hardware: the verbs over libibverbs, which is opened at run time.
//!
//! Owns the handles, the checks at the call and the wait. The device works by itself: nothing here sees a packet. `ffi`
//! calls the library, `abi` has its structures, `convert` its numbers. Never owns QP1: that is the kernel's, and
//! connections are made by librdmacm (crate `uroce-cm`, feature `hw`).
//!
//! ```no_run
//! use uroce::hw::{HwDevice, Library};
//! use uroce::verbs::Verbs as _;
//!
//! # fn main() -> Result<(), uroce::hw::OpenError> {
//! let device = HwDevice::open(&Library::load()?, "rxe0", 1)?;
//! println!("{:?}", device.query_gids());
//! # Ok(())
//! # }
//! ```

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the feature `hw` knows libibverbs' structures as 64-bit Linux lays them out");

pub mod abi;
mod convert;
mod error;
mod events;
mod ffi;
mod post;
mod verbs;

pub use convert::{address_from, qp_attr_from};
pub use error::OpenError;
pub use ffi::Library;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use self::error::Errno;
use crate::device::sys::interfaces;
use crate::table::{NumberMap, Slab};
use crate::time::{Duration, Instant};
use crate::types::{AckTimeout, PKey};
use crate::verbs::{
    AsyncEvent, CqHandle, DeviceAttr, QpCapabilities, QpHandle, QpState, QpType, SrqHandle, VerbsError, WaitVerbs,
    WorkCompletion, kind,
};

/// Entries of a GID table that are looked at: an address vector's index has 8 bits.
const GIDS_MAX: usize = 256;
/// Entries of all ports together.
const GIDS_ALL_PORTS: usize = 4 * GIDS_MAX;
/// Entries of the partition table that are read.
const PKEYS_MAX: u16 = 128;
/// Objects of a kind; the device has limits of its own below.
const OBJECTS_MAX: usize = 1 << 20;
/// Polls in vain before a wait sleeps: a peer that answers at once is met awake.
const POLLS_BEFORE_SLEEP: usize = 64;

/// The devices that libibverbs knows here, by name.
#[must_use]
pub fn device_names(library: &Library) -> Vec<String> {
    ffi::DeviceNames::of(&library.0).all()
}

struct CqEntry {
    cq: Arc<ffi::Cq>,
    cookie: usize,
    /// Completions that a wait has found.
    found: VecDeque<WorkCompletion>,
    /// The program asked for a notification.
    armed: bool,
}

struct SrqEntry {
    srq: Arc<ffi::Srq>,
    cookie: usize,
    max_sge: u32,
}

struct QpEntry {
    qp: ffi::Qp,
    cookie: usize,
    qp_type: QpType,
    caps: QpCapabilities,
    has_srq: bool,
    /// As the program left it: what the device does to it afterwards keeps no post from being queued.
    state: QpState,
    groups: Vec<abi::GidBytes>,
}

impl Drop for QpEntry {
    fn drop(&mut self) {
        // The kernel destroys no QP that is in a group.
        for group in core::mem::take(&mut self.groups) {
            let _ = self.qp.leave(group);
        }
    }
}

/// What an event of the library is about.
#[derive(Clone, Copy)]
enum Object {
    Cq(CqHandle),
    Srq(SrqHandle),
    Qp(QpHandle),
}

/// One port of an RDMA device, for one thread at a time.
///
/// It drives itself, so that no call needs to be made for packets to move. Everything made from it is destroyed with it.
pub struct HwDevice {
    context: Arc<ffi::Context>,
    channel: Arc<ffi::Channel>,
    port: u8,
    attr: DeviceAttr,
    origin: std::time::Instant,
    pds: Slab<kind::Pd, Arc<ffi::Pd>>,
    mrs: Slab<kind::Mr, ffi::Mr>,
    cqs: Slab<kind::Cq, CqEntry>,
    srqs: Slab<kind::Srq, SrqEntry>,
    qps: Slab<kind::Qp, QpEntry>,
    ahs: Slab<kind::Ah, ffi::Ah>,
    /// Objects by what the library was given to name them.
    by_cookie: BTreeMap<usize, Object>,
    next_cookie: usize,
    by_qpn: NumberMap<QpHandle>,
    events: VecDeque<AsyncEvent>,
    chain: ffi::Chain,
    gone: bool,
}

impl core::fmt::Debug for HwDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("HwDevice").field("name", &self.attr.name).field("port", &self.port).finish_non_exhaustive()
    }
}

impl HwDevice {
    /// Opens port `port` (1 is the first) of the device with this name.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(library: &Library, name: &str, port: u8) -> Result<Self, OpenError> {
        let list = ffi::DeviceNames::of(&library.0);
        let present = list.all();
        let Some(index) = present.iter().position(|n| n == name) else {
            return Err(OpenError::NoDevice { name: name.into(), present });
        };
        let system = |call| move |Errno(errno): Errno| OpenError::System { call, name: name.into(), errno };
        let context = Arc::new(list.open(index).map_err(system("ibv_open_device"))?);
        let device = context.query_device().map_err(system("ibv_query_device"))?;
        if port == 0 || port > device.phys_port_cnt {
            return Err(OpenError::NoPort { name: name.into(), port, ports: device.phys_port_cnt });
        }
        let port_attr = context.query_port(port).map_err(system("ibv_query_port"))?;
        if port_attr.link_layer != abi::LINK_LAYER_ETHERNET {
            return Err(OpenError::NotEthernet { name: name.into(), port });
        }
        let channel = ffi::Channel::new(&context).map_err(system("ibv_create_comp_channel"))?;
        for fd in [channel.fd(), context.async_fd()] {
            ffi::set_nonblocking(fd).map_err(system("fcntl"))?;
        }
        let pkeys = (0..port_attr.pkey_tbl_len.min(PKEYS_MAX)).map_while(|i| context.query_pkey(port, i).ok());
        let pkeys = pkeys.map(PKey::new).collect();
        Ok(Self::new(context, Arc::new(channel), port, attributes(name, &device, &port_attr, pkeys)))
    }

    fn new(context: Arc<ffi::Context>, channel: Arc<ffi::Channel>, port: u8, attr: DeviceAttr) -> Self {
        Self {
            context,
            channel,
            port,
            attr,
            origin: std::time::Instant::now(),
            pds: Slab::new(OBJECTS_MAX),
            mrs: Slab::new(OBJECTS_MAX),
            cqs: Slab::new(OBJECTS_MAX),
            srqs: Slab::new(OBJECTS_MAX),
            qps: Slab::new(OBJECTS_MAX),
            ahs: Slab::new(OBJECTS_MAX),
            by_cookie: BTreeMap::new(),
            // 0 stands for events of no object.
            next_cookie: 1,
            // QPNs come from the device, not from a peer: the key need not be secret.
            by_qpn: NumberMap::new(0),
            events: VecDeque::new(),
            chain: ffi::Chain::default(),
            gone: false,
        }
    }

    /// The network interface of the port, where the system tells.
    #[must_use]
    pub fn interface(&self) -> Option<String> {
        self.find_interface().map(|i| i.name)
    }

    fn find_interface(&self) -> Option<interfaces::Interface> {
        let gids = self.context.query_gids(GIDS_ALL_PORTS).ok()?;
        let index = gids.iter().find(|g| g.port_num == u32::from(self.port) && g.ndev_ifindex != 0)?.ndev_ifindex;
        interfaces::list().ok()?.into_iter().find(|i| i.index == index)
    }

    fn cookie(&mut self) -> usize {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        cookie
    }
}

/// What the library says of a device, in our terms.
fn attributes(name: &str, d: &abi::DeviceAttr, p: &abi::PortAttr, pkeys: Vec<PKey>) -> DeviceAttr {
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    DeviceAttr {
        name: name.into(),
        node_guid: u64::from_be(d.node_guid),
        max_qp: count(d.max_qp),
        max_qp_wr: count(d.max_qp_wr),
        max_sge: count(d.max_sge),
        max_cq: count(d.max_cq),
        max_cqe: count(d.max_cqe),
        max_mr: count(d.max_mr),
        // None can be made through this back end.
        max_mw: 0,
        max_pd: count(d.max_pd),
        max_srq: count(d.max_srq),
        max_ah: count(d.max_ah),
        max_rd_atomic: u8::try_from(d.max_qp_rd_atom.min(d.max_qp_init_rd_atom).clamp(0, 255)).unwrap_or(0),
        max_msg_size: p.max_msg_sz,
        // The verbs have no such attribute: a QP tells when it is made.
        max_inline: 0,
        pkeys,
        ack_delay: AckTimeout::new(d.local_ca_ack_delay).unwrap_or(AckTimeout::NEVER),
    }
}

impl WaitVerbs for HwDevice {
    fn now(&self) -> Instant {
        Instant::ZERO + self.origin.elapsed()
    }

    /// Polls for a while, then sleeps until the device announces a completion.
    fn wait_cq(&mut self, cq: CqHandle, timeout: Option<Duration>) -> Result<bool, VerbsError> {
        let deadline = timeout.map(|t| self.now() + t);
        let mut polls = 0;
        loop {
            if self.look(cq)? {
                return Ok(true);
            }
            if self.gone {
                return Err(VerbsError::DeviceGone);
            }
            let left = deadline.map(|d| d.saturating_since(self.now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            if polls < POLLS_BEFORE_SLEEP {
                polls += 1;
                std::thread::yield_now();
                continue;
            }
            polls = 0;
            let entry = self.cqs.get(cq).ok_or(VerbsError::InvalidHandle)?;
            entry.cq.req_notify(false).map_err(|e| e.of("ibv_req_notify_cq"))?;
            // What came before it was armed is announced by nobody.
            if self.look(cq)? {
                return Ok(true);
            }
            self.sleep(left)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_another_is_named() {
        let said = |file| Library::load_from(file).unwrap_err().to_string();
        let absent = said("libibverbs-of-nowhere.so.1");
        assert!(absent.starts_with("libibverbs-of-nowhere.so.1 is not installed; apt-get install "), "{absent}");
        let other = said("libc.so.6");
        assert!(other.starts_with("libc.so.6 has no function ibv_get_device_list; "), "{other}");
    }

    #[test]
    fn a_device_that_is_not_there_is_told_from_those_that_are() {
        // Where libibverbs is not installed there is nothing to ask.
        let Ok(library) = Library::load() else { return };
        let present = device_names(&library);
        let error = HwDevice::open(&library, "no-such-rnic", 1).unwrap_err();
        assert_eq!(error, OpenError::NoDevice { name: "no-such-rnic".into(), present });
    }

    #[test]
    fn attributes_are_read_with_their_limits() {
        let d = abi::DeviceAttr {
            node_guid: u64::from_ne_bytes([2, 0x77, 0, 0xff, 0xfe, 0, 0, 1]),
            max_qp: 1_048_560,
            max_cqe: 32_767,
            max_qp_rd_atom: 128,
            max_qp_init_rd_atom: 64,
            max_sge: -1,
            local_ca_ack_delay: 15,
            ..abi::DeviceAttr::default()
        };
        let p = abi::PortAttr { max_msg_sz: 0x0080_0000, ..abi::PortAttr::default() };
        let a = attributes("rxe0", &d, &p, vec![PKey::DEFAULT]);
        assert_eq!((a.name.as_str(), a.node_guid), ("rxe0", 0x0277_00ff_fe00_0001));
        assert_eq!((a.max_qp, a.max_cqe, a.max_sge, a.max_rd_atomic), (1_048_560, 32_767, 0, 64));
        assert_eq!((a.max_msg_size, a.ack_delay.code(), a.pkeys.len()), (0x0080_0000, 15, 1));
    }
}
