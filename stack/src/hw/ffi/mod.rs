//! The library's functions, opened at run time, and its objects as values that free themselves.
//!
//! Owns every `unsafe` of the hardware back end. Each object keeps alive what it is made of, so that nothing is destroyed
//! before what uses it. Decides nothing: no check, no conversion.
#![allow(unsafe_code)] // This folder is where libibverbs is called.

mod object;
mod queue;

pub(super) use object::{Ah, Channel, Context, Cq, DeviceNames, Mr, Pd, Qp, QpParts, Srq};
pub(super) use queue::Chain;

use core::ffi::{c_char, c_int, c_uint};
use core::mem::ManuallyDrop;
use std::sync::Arc;

use super::abi;
use super::error::{Errno, OpenError};

/// The file of the library.
const SONAME: &str = "libibverbs.so.1";
/// Debian's packages with the library and the drivers that it opens.
const PACKAGES: &str = "libibverbs1 ibverbs-providers";

/// What a call with a status of 0 or an error number, or of -1 and `errno`, returned.
fn status(rc: c_int) -> Result<(), Errno> {
    match rc {
        0 => Ok(()),
        -1 => Err(last()),
        n => Err(Errno(n.saturating_abs())),
    }
}

/// `errno`.
fn last() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Makes reads from a descriptor of the library end when there is nothing.
pub(super) fn set_nonblocking(fd: c_int) -> Result<(), Errno> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: no pointers.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(last());
    }
    Ok(())
}

macro_rules! api {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions. The library stays open for ever: it has opened drivers that cannot be unloaded.
        pub(super) struct Api {
            $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            _library: ManuallyDrop<libloading::Library>,
        }

        impl Api {
            fn load(file: &str) -> Result<Self, OpenError> {
                let not_installed = |_| OpenError::NotInstalled { library: file.into(), packages: PACKAGES };
                // SAFETY: libibverbs' initialisers have no demands on the caller.
                let library = unsafe { libloading::Library::new(file) }.map_err(not_installed)?;
                Ok(Self {
                    // SAFETY: the symbol has this type in every version of libibverbs that has it, and the pointer is
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
    get_device_list: "ibv_get_device_list" fn(*mut c_int) -> *mut *mut abi::Device;
    free_device_list: "ibv_free_device_list" fn(*mut *mut abi::Device);
    get_device_name: "ibv_get_device_name" fn(*mut abi::Device) -> *const c_char;
    open_device: "ibv_open_device" fn(*mut abi::Device) -> *mut abi::Context;
    close_device: "ibv_close_device" fn(*mut abi::Context) -> c_int;
    query_device: "ibv_query_device" fn(*mut abi::Context, *mut abi::DeviceAttr) -> c_int;
    query_port: "ibv_query_port" fn(*mut abi::Context, u8, *mut abi::PortAttr) -> c_int;
    query_gid_table: "_ibv_query_gid_table" fn(*mut abi::Context, *mut abi::GidEntry, usize, u32, usize) -> isize;
    query_pkey: "ibv_query_pkey" fn(*mut abi::Context, u8, c_int, *mut u16) -> c_int;
    get_async_event: "ibv_get_async_event" fn(*mut abi::Context, *mut abi::AsyncEvent) -> c_int;
    ack_async_event: "ibv_ack_async_event" fn(*mut abi::AsyncEvent);
    alloc_pd: "ibv_alloc_pd" fn(*mut abi::Context) -> *mut abi::Pd;
    dealloc_pd: "ibv_dealloc_pd" fn(*mut abi::Pd) -> c_int;
    reg_mr: "ibv_reg_mr" fn(*mut abi::Pd, *mut abi::Opaque, usize, c_int) -> *mut abi::Mr;
    reg_mr_iova: "ibv_reg_mr_iova" fn(*mut abi::Pd, *mut abi::Opaque, usize, u64, c_int) -> *mut abi::Mr;
    dereg_mr: "ibv_dereg_mr" fn(*mut abi::Mr) -> c_int;
    create_comp_channel: "ibv_create_comp_channel" fn(*mut abi::Context) -> *mut abi::CompChannel;
    destroy_comp_channel: "ibv_destroy_comp_channel" fn(*mut abi::CompChannel) -> c_int;
    create_cq: "ibv_create_cq"
        fn(*mut abi::Context, c_int, *mut abi::Opaque, *mut abi::CompChannel, c_int) -> *mut abi::Cq;
    destroy_cq: "ibv_destroy_cq" fn(*mut abi::Cq) -> c_int;
    get_cq_event: "ibv_get_cq_event" fn(*mut abi::CompChannel, *mut *mut abi::Cq, *mut *mut abi::Opaque) -> c_int;
    ack_cq_events: "ibv_ack_cq_events" fn(*mut abi::Cq, c_uint);
    create_srq: "ibv_create_srq" fn(*mut abi::Pd, *mut abi::SrqInitAttr) -> *mut abi::Srq;
    modify_srq: "ibv_modify_srq" fn(*mut abi::Srq, *mut abi::SrqAttr, c_int) -> c_int;
    query_srq: "ibv_query_srq" fn(*mut abi::Srq, *mut abi::SrqAttr) -> c_int;
    destroy_srq: "ibv_destroy_srq" fn(*mut abi::Srq) -> c_int;
    create_qp: "ibv_create_qp" fn(*mut abi::Pd, *mut abi::QpInitAttr) -> *mut abi::Qp;
    modify_qp: "ibv_modify_qp" fn(*mut abi::Qp, *mut abi::QpAttr, c_int) -> c_int;
    query_qp: "ibv_query_qp" fn(*mut abi::Qp, *mut abi::QpAttr, c_int, *mut abi::QpInitAttr) -> c_int;
    destroy_qp: "ibv_destroy_qp" fn(*mut abi::Qp) -> c_int;
    attach_mcast: "ibv_attach_mcast" fn(*mut abi::Qp, *const abi::GidBytes, u16) -> c_int;
    detach_mcast: "ibv_detach_mcast" fn(*mut abi::Qp, *const abi::GidBytes, u16) -> c_int;
    create_ah: "ibv_create_ah" fn(*mut abi::Pd, *mut abi::AhAttr) -> *mut abi::Ah;
    destroy_ah: "ibv_destroy_ah" fn(*mut abi::Ah) -> c_int;
}

/// libibverbs, opened.
#[derive(Clone)]
pub struct Library(pub(super) Arc<Api>);

impl core::fmt::Debug for Library {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// Opens `libibverbs.so.1`, wherever the system has it.
    ///
    /// # Errors
    /// [`OpenError::NotInstalled`], [`OpenError::TooOld`].
    pub fn load() -> Result<Self, OpenError> {
        Self::load_from(SONAME)
    }

    /// Opens the library from another file, which must be libibverbs.
    ///
    /// # Errors
    /// [`OpenError::NotInstalled`], [`OpenError::TooOld`].
    pub fn load_from(file: &str) -> Result<Self, OpenError> {
        Ok(Self(Arc::new(Api::load(file)?)))
    }
}
