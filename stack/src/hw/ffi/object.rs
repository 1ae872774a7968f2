//! The library's objects. Dropping one destroys it; each holds what must outlive it.

use core::ffi::{CStr, c_int};
use core::ptr::{self, NonNull};
use std::os::fd::RawFd;
use std::sync::Arc;

use super::{Api, last, status};
use crate::hw::abi;
use crate::hw::error::Errno;
use crate::raw::Region;

/// The devices of this machine, while they are looked at.
pub(in crate::hw) struct DeviceNames {
    api: Arc<Api>,
    list: Option<NonNull<*mut abi::Device>>,
    len: usize,
}

impl DeviceNames {
    /// Asks the library. A system without RDMA has none.
    pub(in crate::hw) fn of(api: &Arc<Api>) -> Self {
        let mut len: c_int = 0;
        // SAFETY: `len` is a valid place for the count.
        let list = NonNull::new(unsafe { (api.get_device_list)(&raw mut len) });
        let len = if list.is_some() { usize::try_from(len).unwrap_or(0) } else { 0 };
        Self { api: Arc::clone(api), list, len }
    }

    fn device(&self, index: usize) -> Option<*mut abi::Device> {
        let list = self.list.filter(|_| index < self.len)?;
        // SAFETY: the library gave an array of `len` pointers, which lives until it is freed with `self`.
        Some(unsafe { list.as_ptr().add(index).read() })
    }

    /// Their names, in the library's order.
    pub(in crate::hw) fn all(&self) -> Vec<String> {
        let name = |device: *mut abi::Device| {
            // SAFETY: the device is one of the list, which lives as long as `self`; its name is a C string in it.
            unsafe { CStr::from_ptr((self.api.get_device_name)(device)) }.to_string_lossy().into_owned()
        };
        (0..self.len).filter_map(|i| self.device(i)).map(name).collect()
    }

    /// Opens device `index` of [`DeviceNames::all`].
    pub(in crate::hw) fn open(&self, index: usize) -> Result<Context, Errno> {
        let device = self.device(index).ok_or(Errno(libc::ENODEV))?;
        // SAFETY: the device is one of the list, which lives as long as `self`.
        let ptr = NonNull::new(unsafe { (self.api.open_device)(device) }).ok_or_else(last)?;
        Ok(Context { api: Arc::clone(&self.api), ptr })
    }
}

impl Drop for DeviceNames {
    fn drop(&mut self) {
        if let Some(list) = self.list {
            // SAFETY: the list came from the library and is freed once. Devices that were opened stay.
            unsafe { (self.api.free_device_list)(list.as_ptr()) }
        }
    }
}

/// An open device.
pub(in crate::hw) struct Context {
    api: Arc<Api>,
    ptr: NonNull<abi::Context>,
}

// SAFETY: libibverbs' objects may be used from any thread; the library locks what it must.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is open and everything made from it, which would hold it, is gone.
        unsafe { (self.api.close_device)(self.ptr.as_ptr()) };
    }
}

impl Context {
    pub(in crate::hw) fn query_device(&self) -> Result<abi::DeviceAttr, Errno> {
        let mut out = abi::DeviceAttr::default();
        // SAFETY: an open context and a place of the structure's size.
        status(unsafe { (self.api.query_device)(self.ptr.as_ptr(), &raw mut out) })?;
        Ok(out)
    }

    pub(in crate::hw) fn query_port(&self, port: u8) -> Result<abi::PortAttr, Errno> {
        let mut out = abi::PortAttr::default();
        // SAFETY: an open context; the library writes no more than the structure has.
        status(unsafe { (self.api.query_port)(self.ptr.as_ptr(), port, &raw mut out) })?;
        Ok(out)
    }

    /// The entries of all ports that are in use, at most `room`.
    pub(in crate::hw) fn query_gids(&self, room: usize) -> Result<Vec<abi::GidEntry>, Errno> {
        let mut out = vec![abi::GidEntry::default(); room];
        let size = size_of::<abi::GidEntry>();
        // SAFETY: an open context, and an array of `room` entries of the size that is named.
        let n = unsafe { (self.api.query_gid_table)(self.ptr.as_ptr(), out.as_mut_ptr(), room, 0, size) };
        let n = usize::try_from(n).map_err(|_| Errno(i32::try_from(n.unsigned_abs()).unwrap_or(libc::EIO)))?;
        out.truncate(n);
        Ok(out)
    }

    /// Entry `index` of the partition table.
    pub(in crate::hw) fn query_pkey(&self, port: u8, index: u16) -> Result<u16, Errno> {
        let mut big_endian = 0;
        // SAFETY: an open context and a valid place.
        status(unsafe { (self.api.query_pkey)(self.ptr.as_ptr(), port, index.into(), &raw mut big_endian) })?;
        Ok(u16::from_be(big_endian))
    }

    /// The descriptor on which asynchronous events arrive.
    pub(in crate::hw) fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open; the field does not change.
        unsafe { (&raw const (*self.ptr.as_ptr()).async_fd).read() }
    }

    /// The next asynchronous event, acknowledged: its type, and what its object was made with (0: the port or device).
    /// The descriptor must not block.
    pub(in crate::hw) fn next_event(&self) -> Option<(u32, usize)> {
        let mut event = abi::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: an open context and a valid place.
        if unsafe { (self.api.get_async_event)(self.ptr.as_ptr(), &raw mut event) } != 0 {
            return None;
        }
        let element = event.element;
        // SAFETY: the type says of which kind the element is; an object lives at least until its event is acknowledged.
        let cookie = unsafe {
            match abi::subject(event.event_type) {
                abi::Subject::Cq => (&raw const (*element.cast::<abi::Cq>()).cq_context).read(),
                abi::Subject::Srq => (&raw const (*element.cast::<abi::Srq>()).srq_context).read(),
                abi::Subject::Qp => (&raw const (*element.cast::<abi::Qp>()).qp_context).read(),
                abi::Subject::Device => ptr::null_mut(),
            }
        };
        // SAFETY: the event came from the library and is acknowledged once.
        unsafe { (self.api.ack_async_event)(&raw mut event) };
        Some((event.event_type, cookie.addr()))
    }
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident($target:ty) { $($field:ident: $type:ty),* } $destroy:ident) => {
        $(#[$doc])*
        pub(in crate::hw) struct $name {
            pub(super) ptr: NonNull<$target>,
            $($field: $type),*
        }

        // SAFETY: libibverbs' objects may be used from any thread; the library locks what it must.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the object is alive, what it is made of is held by it, and what uses it would hold it.
                unsafe { (self.context().api.$destroy)(self.ptr.as_ptr()) };
            }
        }
    };
}

object!(
    /// A protection domain.
    Pd(abi::Pd) { context: Arc<Context> } dealloc_pd
);
object!(
    /// A registration, with the region that it keeps from being freed.
    Mr(abi::Mr) { pd: Arc<Pd>, _region: Region } dereg_mr
);
object!(
    /// A channel of completion events.
    Channel(abi::CompChannel) { context: Arc<Context> } destroy_comp_channel
);
object!(
    /// A completion queue.
    Cq(abi::Cq) { channel: Arc<Channel> } destroy_cq
);
object!(
    /// A shared receive queue.
    Srq(abi::Srq) { pd: Arc<Pd> } destroy_srq
);
object!(
    /// A queue pair. It leaves its multicast groups by hand before it is dropped.
    Qp(abi::Qp) { pd: Arc<Pd>, _cqs: [Arc<Cq>; 2], _srq: Option<Arc<Srq>> } destroy_qp
);
object!(
    /// An address handle.
    Ah(abi::Ah) { pd: Arc<Pd> } destroy_ah
);

impl Pd {
    pub(in crate::hw) fn new(context: &Arc<Context>) -> Result<Self, Errno> {
        // SAFETY: an open context.
        let ptr = NonNull::new(unsafe { (context.api.alloc_pd)(context.ptr.as_ptr()) }).ok_or_else(last)?;
        Ok(Self { ptr, context: Arc::clone(context) })
    }

    fn context(&self) -> &Context {
        &self.context
    }
}

impl Mr {
    /// Registers all of `region`; `iova` only where it is not the host's address.
    pub(in crate::hw) fn new(pd: &Arc<Pd>, region: &Region, access: c_int, iova: Option<u64>) -> Result<Self, Errno> {
        let start = ptr::with_exposed_provenance_mut(usize::try_from(region.host_address()).unwrap_or(0));
        let (api, domain, len) = (&pd.context().api, pd.ptr.as_ptr(), region.len());
        let made = match iova {
            // SAFETY: a live protection domain. The region's bytes stay where they are as long as any clone of it
            // lives, and one is kept in the registration; no Rust reference to them is ever formed.
            None => unsafe { (api.reg_mr)(domain, start, len, access) },
            // SAFETY: as above; the address is only what the wire shows.
            Some(iova) => unsafe { (api.reg_mr_iova)(domain, start, len, iova, access) },
        };
        let ptr = NonNull::new(made).ok_or_else(last)?;
        Ok(Self { ptr, pd: Arc::clone(pd), _region: region.clone() })
    }

    /// Local and remote key.
    pub(in crate::hw) fn keys(&self) -> (u32, u32) {
        let mr = self.ptr.as_ptr();
        // SAFETY: the registration is alive, and its keys do not change.
        unsafe { ((&raw const (*mr).lkey).read(), (&raw const (*mr).rkey).read()) }
    }

    fn context(&self) -> &Context {
        self.pd.context()
    }
}

impl Channel {
    pub(in crate::hw) fn new(context: &Arc<Context>) -> Result<Self, Errno> {
        // SAFETY: an open context.
        let ptr = NonNull::new(unsafe { (context.api.create_comp_channel)(context.ptr.as_ptr()) }).ok_or_else(last)?;
        Ok(Self { ptr, context: Arc::clone(context) })
    }

    pub(in crate::hw) fn fd(&self) -> RawFd {
        // SAFETY: the channel is alive; the field does not change.
        unsafe { (&raw const (*self.ptr.as_ptr()).fd).read() }
    }

    /// The next event, acknowledged: what its CQ was made with. The descriptor must not block.
    pub(in crate::hw) fn next_event(&self) -> Option<usize> {
        let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
        let api = &self.context.api;
        // SAFETY: a live channel and valid places.
        if unsafe { (api.get_cq_event)(self.ptr.as_ptr(), &raw mut cq, &raw mut cookie) } != 0 {
            return None;
        }
        // SAFETY: a CQ lives until its events are acknowledged, and this one is acknowledged once.
        unsafe { (api.ack_cq_events)(cq, 1) };
        Some(cookie.addr())
    }

    fn context(&self) -> &Context {
        &self.context
    }
}

impl Cq {
    /// A queue of at least `depth` entries whose events bring `cookie`.
    pub(in crate::hw) fn new(channel: &Arc<Channel>, depth: c_int, cookie: usize) -> Result<Self, Errno> {
        let (context, cookie) = (channel.context(), ptr::without_provenance_mut(cookie));
        // SAFETY: an open context and a channel of it; the library passes the cookie on and never looks behind it.
        let made = unsafe { (context.api.create_cq)(context.ptr.as_ptr(), depth, cookie, channel.ptr.as_ptr(), 0) };
        Ok(Self { ptr: NonNull::new(made).ok_or_else(last)?, channel: Arc::clone(channel) })
    }

    fn context(&self) -> &Context {
        self.channel.context()
    }

    pub(super) fn table(&self) -> &[*const abi::Opaque; abi::OPS] {
        self.context().table()
    }
}

impl Srq {
    /// A queue as `attr` says, whose events bring `cookie`.
    pub(in crate::hw) fn new(pd: &Arc<Pd>, attr: abi::SrqAttr, cookie: usize) -> Result<Self, Errno> {
        let mut init = abi::SrqInitAttr { srq_context: ptr::without_provenance_mut(cookie), attr };
        // SAFETY: a live protection domain and a valid structure.
        let made = unsafe { (pd.context().api.create_srq)(pd.ptr.as_ptr(), &raw mut init) };
        Ok(Self { ptr: NonNull::new(made).ok_or_else(last)?, pd: Arc::clone(pd) })
    }

    pub(in crate::hw) fn set_limit(&self, srq_limit: u32) -> Result<(), Errno> {
        let mut attr = abi::SrqAttr { srq_limit, ..abi::SrqAttr::default() };
        // SAFETY: a live queue and a valid structure.
        status(unsafe { (self.context().api.modify_srq)(self.ptr.as_ptr(), &raw mut attr, abi::SRQ_LIMIT) })
    }

    pub(in crate::hw) fn query(&self) -> Result<abi::SrqAttr, Errno> {
        let mut attr = abi::SrqAttr::default();
        // SAFETY: a live queue and a valid place.
        status(unsafe { (self.context().api.query_srq)(self.ptr.as_ptr(), &raw mut attr) })?;
        Ok(attr)
    }

    fn context(&self) -> &Context {
        self.pd.context()
    }

    pub(super) fn table(&self) -> &[*const abi::Opaque; abi::OPS] {
        self.context().table()
    }
}

/// What a QP is made of.
pub(in crate::hw) struct QpParts {
    pub(in crate::hw) pd: Arc<Pd>,
    pub(in crate::hw) send_cq: Arc<Cq>,
    pub(in crate::hw) recv_cq: Arc<Cq>,
    pub(in crate::hw) srq: Option<Arc<Srq>>,
}

impl Qp {
    /// A QP in RESET whose events bring `cookie`, and the sizes that it got.
    pub(in crate::hw) fn new(
        parts: QpParts,
        qp_type: u32,
        cap: abi::QpCap,
        signal_all: bool,
        cookie: usize,
    ) -> Result<(Self, abi::QpCap), Errno> {
        let QpParts { pd, send_cq, recv_cq, srq } = parts;
        let mut init = abi::QpInitAttr {
            qp_context: ptr::without_provenance_mut(cookie),
            send_cq: send_cq.ptr.as_ptr(),
            recv_cq: recv_cq.ptr.as_ptr(),
            srq: srq.as_ref().map_or(ptr::null_mut(), |s| s.ptr.as_ptr()),
            cap,
            qp_type,
            sq_sig_all: signal_all.into(),
        };
        // SAFETY: a live protection domain; the structure names live queues, which the QP holds from now on.
        let made = unsafe { (pd.context().api.create_qp)(pd.ptr.as_ptr(), &raw mut init) };
        let ptr = NonNull::new(made).ok_or_else(last)?;
        Ok((Self { ptr, pd, _cqs: [send_cq, recv_cq], _srq: srq }, init.cap))
    }

    pub(in crate::hw) fn number(&self) -> u32 {
        // SAFETY: the QP is alive; its number does not change.
        unsafe { (&raw const (*self.ptr.as_ptr()).qp_num).read() }
    }

    pub(in crate::hw) fn modify(&self, mut attr: abi::QpAttr, mask: u32) -> Result<(), Errno> {
        let mask = c_int::try_from(mask).unwrap_or(0);
        // SAFETY: a live QP and a valid structure.
        status(unsafe { (self.context().api.modify_qp)(self.ptr.as_ptr(), &raw mut attr, mask) })
    }

    pub(in crate::hw) fn query(&self, mask: u32) -> Result<abi::QpAttr, Errno> {
        let mut attr = abi::QpAttr::default();
        let mut init = abi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            srq: ptr::null_mut(),
            cap: abi::QpCap::default(),
            qp_type: 0,
            sq_sig_all: 0,
        };
        let (api, mask) = (&self.context().api, c_int::try_from(mask).unwrap_or(0));
        // SAFETY: a live QP and valid places.
        status(unsafe { (api.query_qp)(self.ptr.as_ptr(), &raw mut attr, mask, &raw mut init) })?;
        Ok(attr)
    }

    pub(in crate::hw) fn join(&self, group: abi::GidBytes) -> Result<(), Errno> {
        // SAFETY: a live QP and a valid GID.
        status(unsafe { (self.context().api.attach_mcast)(self.ptr.as_ptr(), &raw const group, 0) })
    }

    pub(in crate::hw) fn leave(&self, group: abi::GidBytes) -> Result<(), Errno> {
        // SAFETY: a live QP and a valid GID.
        status(unsafe { (self.context().api.detach_mcast)(self.ptr.as_ptr(), &raw const group, 0) })
    }

    fn context(&self) -> &Context {
        self.pd.context()
    }

    pub(super) fn table(&self) -> &[*const abi::Opaque; abi::OPS] {
        self.context().table()
    }
}

impl Ah {
    pub(in crate::hw) fn new(pd: &Arc<Pd>, mut attr: abi::AhAttr) -> Result<Self, Errno> {
        // SAFETY: a live protection domain and a valid structure.
        let made = unsafe { (pd.context().api.create_ah)(pd.ptr.as_ptr(), &raw mut attr) };
        Ok(Self { ptr: NonNull::new(made).ok_or_else(last)?, pd: Arc::clone(pd) })
    }

    /// Its address, for a work request.
    pub(in crate::hw) fn address(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    fn context(&self) -> &Context {
        self.pd.context()
    }
}

impl Context {
    /// The calls of the fast path.
    fn table(&self) -> &[*const abi::Opaque; abi::OPS] {
        // SAFETY: the context is open, and its table is written only while it is being opened.
        unsafe { &(*self.ptr.as_ptr()).ops }
    }
}
