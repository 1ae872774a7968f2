//! librdmacm's functions, opened at run time, and its objects as values that free themselves.
//!
//! Owns every `unsafe` of the connection manager. An event is copied and acknowledged at once, so that nothing waits for
//! the program. Decides nothing.
#![allow(unsafe_code)] // This file is where librdmacm is called.

use core::ffi::{CStr, c_int, c_void};
use core::mem::ManuallyDrop;
use core::net::SocketAddr;
use core::ptr::{self, NonNull};
use std::os::fd::RawFd;
use std::sync::Arc;

use uroce::hw::OpenError;
use uroce::hw::abi as ibv;
use uroce::time::Duration;

use super::abi;

/// The file of the library.
const SONAME: &str = "librdmacm.so.1";
/// Debian's packages with the library and the drivers below it.
const PACKAGES: &str = "librdmacm1 ibverbs-providers";

/// An error number of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) i32);

fn last() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// librdmacm says -1 and `errno`.
fn status(rc: c_int) -> Result<(), Errno> {
    if rc == 0 { Ok(()) } else { Err(last()) }
}

macro_rules! api {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions. The library stays open for ever: it has opened devices that cannot be unloaded.
        struct Api {
            $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            _library: ManuallyDrop<libloading::Library>,
        }

        impl Api {
            fn load(file: &str) -> Result<Self, OpenError> {
                let not_installed = |_| OpenError::NotInstalled { library: file.into(), packages: PACKAGES };
                // SAFETY: librdmacm's initialisers have no demands on the caller.
                let library = unsafe { libloading::Library::new(file) }.map_err(not_installed)?;
                Ok(Self {
                    // SAFETY: the symbol has this type in every version of librdmacm that has it, and the pointer is
                    // kept only beside the library, which is never closed.
                    $($name: *unsafe { library.get($symbol) }
                        .map_err(|_| OpenError::TooOld { library: file.into(), symbol: $symbol })?,)*
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

api! {
    create_event_channel: "rdma_create_event_channel" fn() -> *mut abi::EventChannel;
    destroy_event_channel: "rdma_destroy_event_channel" fn(*mut abi::EventChannel);
    get_cm_event: "rdma_get_cm_event" fn(*mut abi::EventChannel, *mut *mut abi::Event) -> c_int;
    ack_cm_event: "rdma_ack_cm_event" fn(*mut abi::Event) -> c_int;
    create_id: "rdma_create_id" fn(*mut abi::EventChannel, *mut *mut abi::Id, *mut c_void, c_int) -> c_int;
    destroy_id: "rdma_destroy_id" fn(*mut abi::Id) -> c_int;
    bind_addr: "rdma_bind_addr" fn(*mut abi::Id, *mut abi::Storage) -> c_int;
    listen: "rdma_listen" fn(*mut abi::Id, c_int) -> c_int;
    resolve_addr: "rdma_resolve_addr" fn(*mut abi::Id, *mut abi::Storage, *mut abi::Storage, c_int) -> c_int;
    resolve_route: "rdma_resolve_route" fn(*mut abi::Id, c_int) -> c_int;
    connect: "rdma_connect" fn(*mut abi::Id, *mut abi::ConnParam) -> c_int;
    accept: "rdma_accept" fn(*mut abi::Id, *mut abi::ConnParam) -> c_int;
    establish: "rdma_establish" fn(*mut abi::Id) -> c_int;
    reject: "rdma_reject" fn(*mut abi::Id, *const u8, u8) -> c_int;
    disconnect: "rdma_disconnect" fn(*mut abi::Id) -> c_int;
    init_qp_attr: "rdma_init_qp_attr" fn(*mut abi::Id, *mut ibv::QpAttr, *mut c_int) -> c_int;
    set_option: "rdma_set_option" fn(*mut abi::Id, c_int, c_int, *mut c_void, usize) -> c_int;
    notify: "rdma_notify" fn(*mut abi::Id, u32) -> c_int;
}

/// librdmacm, opened.
#[derive(Clone)]
pub struct CmLibrary(Arc<Api>);

impl core::fmt::Debug for CmLibrary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CmLibrary").finish_non_exhaustive()
    }
}

impl CmLibrary {
    /// Opens `librdmacm.so.1`, wherever the system has it.
    ///
    /// # Errors
    /// [`OpenError::NotInstalled`], [`OpenError::TooOld`].
    pub fn load() -> Result<Self, OpenError> {
        Self::load_from(SONAME)
    }

    /// Opens the library from another file, which must be librdmacm.
    ///
    /// # Errors
    /// [`OpenError::NotInstalled`], [`OpenError::TooOld`].
    pub fn load_from(file: &str) -> Result<Self, OpenError> {
        Ok(Self(Arc::new(Api::load(file)?)))
    }
}

/// Where events arrive.
pub(super) struct Channel {
    api: Arc<Api>,
    ptr: NonNull<abi::EventChannel>,
}

// SAFETY: librdmacm's objects may be used from any thread; the library locks what it must.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the channel is alive and every id of it, which would hold it, is gone.
        unsafe { (self.api.destroy_event_channel)(self.ptr.as_ptr()) };
    }
}

/// What the peer said.
#[derive(Clone, Copy, Debug)]
pub(super) enum Said {
    Connection(abi::ConnParam),
    Datagram(abi::UdParam),
}

/// Whom an event concerns.
pub(super) enum Who {
    /// An id of ours, by its cookie.
    Known(usize),
    /// A new one, of the listener with this cookie.
    New(Id, usize),
}

/// An event, copied. Pointers in `said` are stale; what they led to is in `private_data`.
pub(super) struct Event {
    pub(super) who: Who,
    pub(super) number: u32,
    pub(super) status: c_int,
    pub(super) said: Said,
    pub(super) private_data: Vec<u8>,
}

/// The number of CONNECT_REQUEST.
const CONNECT_REQUEST: u32 = 4;
/// The number of a UD QP type.
const QPT_UD: u32 = 4;

impl Channel {
    pub(super) fn new(library: &CmLibrary) -> Result<Arc<Self>, Errno> {
        let api = Arc::clone(&library.0);
        // SAFETY: no arguments.
        let ptr = NonNull::new(unsafe { (api.create_event_channel)() }).ok_or_else(last)?;
        let channel = Self { api, ptr };
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(channel.fd(), libc::F_GETFL) };
        // SAFETY: no pointers.
        if flags < 0 || unsafe { libc::fcntl(channel.fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
            return Err(last());
        }
        Ok(Arc::new(channel))
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: the channel is alive; the field does not change.
        unsafe { (&raw const (*self.ptr.as_ptr()).fd).read() }
    }

    /// Sleeps until an event is there, or `timeout`.
    pub(super) fn wait(&self, timeout: Duration) {
        let mut fd = libc::pollfd { fd: self.fd(), events: libc::POLLIN, revents: 0 };
        let millis = c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX);
        // SAFETY: one entry, valid for the call. A signal or an error ends the sleep early, which is allowed.
        unsafe { libc::poll(&raw mut fd, 1, millis) };
    }

    /// The next event, copied and acknowledged.
    pub(super) fn next_event(self: &Arc<Self>) -> Option<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: a live channel and a valid place.
        if unsafe { (self.api.get_cm_event)(self.ptr.as_ptr(), &raw mut event) } != 0 {
            return None;
        }
        // SAFETY: the library gave an event, which lives until it is acknowledged below.
        let copied = unsafe { self.copy(&*event) };
        // SAFETY: as above; acknowledged once.
        unsafe { (self.api.ack_cm_event)(event) };
        Some(copied)
    }

    /// # Safety
    /// `event` is one of the library's that was not acknowledged: its pointers lead to what they say.
    unsafe fn copy(self: &Arc<Self>, event: &abi::Event) -> Event {
        // SAFETY: by contract the id is alive; its type does not change.
        let is_ud = unsafe { (&raw const (*event.id).qp_type).read() } == QPT_UD;
        let said = if is_ud {
            // SAFETY: both arms are plain numbers; ids of datagrams have this one.
            Said::Datagram(unsafe { event.param.ud })
        } else {
            // SAFETY: both arms are plain numbers; ids of connections have this one.
            Said::Connection(unsafe { event.param.conn })
        };
        let (data, len) = match said {
            Said::Connection(c) => (c.private_data, c.private_data_len),
            Said::Datagram(u) => (u.private_data, u.private_data_len),
        };
        let private_data = if data.is_null() || len == 0 {
            Vec::new()
        } else {
            // SAFETY: by contract `len` bytes are there.
            unsafe { core::slice::from_raw_parts(data, len.into()) }.to_vec()
        };
        let cookie = |id: *mut abi::Id| {
            // SAFETY: by contract the id is alive; the field is ours.
            unsafe { (&raw const (*id).context).read() }.addr()
        };
        let who = match NonNull::new(event.id) {
            Some(ptr) if event.event == CONNECT_REQUEST => {
                Who::New(Id { channel: Arc::clone(self), ptr }, cookie(event.listen_id))
            }
            _ => Who::Known(cookie(event.id)),
        };
        Event { who, number: event.event, status: event.status, said, private_data }
    }
}

/// An id.
pub(super) struct Id {
    channel: Arc<Channel>,
    ptr: NonNull<abi::Id>,
}

// SAFETY: librdmacm's objects may be used from any thread; the library locks what it must.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: the id is alive, and no event of it waits to be acknowledged.
        unsafe { (self.channel.api.destroy_id)(self.ptr.as_ptr()) };
    }
}

impl Id {
    /// A new id whose events bring `cookie`.
    pub(super) fn new(channel: &Arc<Channel>, space: u16, cookie: usize) -> Result<Self, Errno> {
        let (mut id, cookie) = (ptr::null_mut(), ptr::without_provenance_mut(cookie));
        let api = &channel.api;
        // SAFETY: a live channel and a valid place; the library passes the cookie on and never looks behind it.
        status(unsafe { (api.create_id)(channel.ptr.as_ptr(), &raw mut id, cookie, space.into()) })?;
        let ptr = NonNull::new(id).ok_or(Errno(libc::EIO))?;
        Ok(Self { channel: Arc::clone(channel), ptr })
    }

    fn api(&self) -> &Api {
        &self.channel.api
    }

    /// Lets the events of an id that the library made bring `cookie`.
    pub(super) fn set_cookie(&self, cookie: usize) {
        // SAFETY: the id is alive; the field is for the program, and no other thread has this id yet.
        unsafe { (&raw mut (*self.ptr.as_ptr()).context).write(ptr::without_provenance_mut(cookie)) };
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the id is alive; the library writes addresses only in calls and events, which this thread makes.
        unsafe { (&raw const (*self.ptr.as_ptr()).src_addr).read() }.addr()
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as for the local address.
        unsafe { (&raw const (*self.ptr.as_ptr()).dst_addr).read() }.addr()
    }

    /// The device that the id is bound to, and its port.
    pub(super) fn device(&self) -> Option<String> {
        // SAFETY: the id is alive; a context in it stays open as long as the library does.
        let device = unsafe { (&raw const (*self.ptr.as_ptr()).verbs).read().as_ref() }?.device;
        // SAFETY: a device lives as long as its context.
        let name = unsafe { (&raw const (*device).name).read() };
        CStr::from_bytes_until_nul(&name).ok().map(|n| n.to_string_lossy().into_owned())
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        let mut addr = abi::Storage::new(addr);
        // SAFETY: a live id and a valid address.
        status(unsafe { (self.api().bind_addr)(self.ptr.as_ptr(), &raw mut addr) })
    }

    pub(super) fn listen(&self, backlog: usize) -> Result<(), Errno> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: a live id.
        status(unsafe { (self.api().listen)(self.ptr.as_ptr(), backlog) })
    }

    pub(super) fn resolve_addr(&self, from: Option<SocketAddr>, to: SocketAddr, millis: c_int) -> Result<(), Errno> {
        let (mut from, mut to) = (from.map(abi::Storage::new), abi::Storage::new(to));
        let from = from.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: a live id and addresses that outlive the call; the source may be null.
        status(unsafe { (self.api().resolve_addr)(self.ptr.as_ptr(), from, &raw mut to, millis) })
    }

    pub(super) fn resolve_route(&self, millis: c_int) -> Result<(), Errno> {
        // SAFETY: a live id.
        status(unsafe { (self.api().resolve_route)(self.ptr.as_ptr(), millis) })
    }

    /// `param` without private data, which are given apart.
    pub(super) fn connect(&self, param: abi::ConnParam, private_data: &[u8]) -> Result<(), Errno> {
        let mut param = with_data(param, private_data);
        // SAFETY: a live id and a structure whose bytes outlive the call.
        status(unsafe { (self.api().connect)(self.ptr.as_ptr(), &raw mut param) })
    }

    /// `param` without private data, which are given apart.
    pub(super) fn accept(&self, param: abi::ConnParam, private_data: &[u8]) -> Result<(), Errno> {
        let mut param = with_data(param, private_data);
        // SAFETY: a live id and a structure whose bytes outlive the call.
        status(unsafe { (self.api().accept)(self.ptr.as_ptr(), &raw mut param) })
    }

    pub(super) fn establish(&self) -> Result<(), Errno> {
        // SAFETY: a live id.
        status(unsafe { (self.api().establish)(self.ptr.as_ptr()) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let len = u8::try_from(private_data.len()).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: a live id and `len` bytes.
        status(unsafe { (self.api().reject)(self.ptr.as_ptr(), private_data.as_ptr(), len) })
    }

    pub(super) fn disconnect(&self) -> Result<(), Errno> {
        // SAFETY: a live id.
        status(unsafe { (self.api().disconnect)(self.ptr.as_ptr()) })
    }

    /// What a QP needs to go to `state`, and the mask of it.
    pub(super) fn qp_attr(&self, state: u32) -> Result<(ibv::QpAttr, u32), Errno> {
        let mut attr = ibv::QpAttr { qp_state: state, ..ibv::QpAttr::default() };
        let mut mask = 0;
        // SAFETY: a live id and valid places.
        status(unsafe { (self.api().init_qp_attr)(self.ptr.as_ptr(), &raw mut attr, &raw mut mask) })?;
        Ok((attr, u32::try_from(mask).unwrap_or(0)))
    }

    pub(super) fn set_option(&self, name: c_int, mut value: u8) -> Result<(), Errno> {
        let at = (&raw mut value).cast();
        // SAFETY: a live id and one valid byte.
        status(unsafe { (self.api().set_option)(self.ptr.as_ptr(), abi::OPTION_ID, name, at, 1) })
    }

    /// Tells of an asynchronous event of the id's QP.
    pub(super) fn notify(&self, event: u32) -> Result<(), Errno> {
        // SAFETY: a live id.
        status(unsafe { (self.api().notify)(self.ptr.as_ptr(), event) })
    }
}

fn with_data(param: abi::ConnParam, private_data: &[u8]) -> abi::ConnParam {
    // Callers have checked the length against the message's room.
    let private_data_len = u8::try_from(private_data.len()).unwrap_or(0);
    abi::ConnParam { private_data: private_data.as_ptr(), private_data_len, ..param }
}
