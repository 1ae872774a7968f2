//! The verbs: what a program says to a device.
//!
//! Owns the trait [`Verbs`] and its vocabulary: handles, work requests, completions, QP attributes and the table of QP
//! states. The software endpoint, its shared handle and a hardware back end implement the trait. Never holds state.

mod attr;
mod error;
mod event;
mod explain;
mod options;
mod state;
mod wc;
mod wr;

pub use attr::{
    AccessFlags, AddressVector, AhAttr, AltPath, DeviceAttr, GidEntry, GidType, InitAttr, MemoryRegion, MemoryWindow,
    MwType, PathMigState, PortAttr, QpAttr, QpCapabilities, QpInfo, QpInit, QpTransition, QpType, QueueSnapshot,
    RtrAttr, RtsAttr, SourcePort, SrqInfo, SrqInit,
};
pub use error::{ModifyError, PostError, PostListError, VerbsError};
pub use event::AsyncEvent;
pub use explain::{Advice, Explanation, Reason, RequestFacts};
pub use options::{MAX_READ_BYTES, QpOptions, SourceCheck, SourcePortCheck};
pub use state::{Attr, AttrSet, QpState, check_transition, transition_rule};
pub use wc::{ErrorDetail, FailureKind, WcData, WcOpcode, WcStatus, WorkCompletion};
pub use wr::{
    FastRegister, FlushPlacement, FlushScope, MwBind, Operation, Payload, RecvHead, RecvWr, Remote, SendFlags,
    SendHead, SendWr, Sge, UdDestination,
};

use crate::raw::Region;
use crate::table::Handle;
use crate::time::{Duration, Instant};
use crate::types::Qpn;

/// Tag types of the handles.
pub mod kind {
    /// Protection domains.
    pub enum Pd {}
    /// Memory regions.
    pub enum Mr {}
    /// Memory windows.
    pub enum Mw {}
    /// Completion queues.
    pub enum Cq {}
    /// Shared receive queues.
    pub enum Srq {}
    /// Queue pairs.
    pub enum Qp {}
    /// Address handles.
    pub enum Ah {}
}

/// Names a protection domain.
pub type PdHandle = Handle<kind::Pd>;
/// Names a memory region.
pub type MrHandle = Handle<kind::Mr>;
/// Names a memory window.
pub type MwHandle = Handle<kind::Mw>;
/// Names a completion queue.
pub type CqHandle = Handle<kind::Cq>;
/// Names a shared receive queue.
pub type SrqHandle = Handle<kind::Srq>;
/// Names a queue pair.
pub type QpHandle = Handle<kind::Qp>;
/// Names an address handle.
pub type AhHandle = Handle<kind::Ah>;

/// What a CQ shall announce once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The next completion of any kind.
    Any,
    /// The next solicited completion or error.
    Solicited,
}

/// A device as a program sees it.
///
/// Object-safe. Handles are `Copy` and carry a generation: a destroyed object's handle gives
/// [`VerbsError::InvalidHandle`], never another object. No call blocks and none takes the time: work happens when the
/// driver runs.
pub trait Verbs {
    /// Limits and identity.
    fn query_device(&self) -> DeviceAttr;
    /// The port (there is one).
    fn query_port(&self) -> PortAttr;
    /// The GID table; the position is the index that address vectors name.
    fn query_gids(&self) -> Vec<GidEntry>;

    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`VerbsError::LimitReached`].
    fn alloc_pd(&mut self) -> Result<PdHandle, VerbsError>;
    /// Destroys a protection domain that nothing uses.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`].
    fn dealloc_pd(&mut self, pd: PdHandle) -> Result<(), VerbsError>;

    /// Registers `region`. `iova` is the wire address of its first byte; `None` takes the device's default (the host
    /// address, or a seeded one in the simulator).
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::InvalidAccess`] (remote write or
    /// atomic needs local write), [`VerbsError::AddressWrap`], [`VerbsError::NotPersistent`].
    fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError>;
    /// Ends a registration: no packet touches the region afterwards.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::Busy`] while memory windows are bound to it.
    fn deregister(&mut self, mr: MrHandle) -> Result<(), VerbsError>;
    /// Makes a registration of `region` that nobody can use yet: [`Operation::FastRegister`] gives it rights, addresses
    /// and the low 8 bits of its key, as often as [`Operation::LocalInvalidate`] or a peer's SEND with invalidate has
    /// taken them away. [`Self::deregister`] ends it.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::Unsupported`].
    fn alloc_fast_mr(&mut self, pd: PdHandle, region: &Region) -> Result<MemoryRegion, VerbsError> {
        let _ = (pd, region);
        Err(VerbsError::Unsupported("fast registration"))
    }

    /// Makes a memory window, bound to nothing.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::Unsupported`].
    fn alloc_mw(&mut self, pd: PdHandle, mw_type: MwType) -> Result<MemoryWindow, VerbsError> {
        let _ = (pd, mw_type);
        Err(VerbsError::Unsupported("a memory window"))
    }
    /// Destroys a memory window, bound or not: no packet goes through it afterwards.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Unsupported`].
    fn dealloc_mw(&mut self, mw: MwHandle) -> Result<(), VerbsError> {
        let _ = mw;
        Err(VerbsError::Unsupported("a memory window"))
    }
    /// Posts a bind of a type 1 window to the send queue of `qp`, under a fresh key, which it returns: the window has it
    /// once the bind is done. The work request completes as [`WcOpcode::BindMw`]. Windows of type 2 are bound by
    /// [`Operation::BindMw`].
    ///
    /// # Errors
    /// [`PostError`].
    fn bind_mw(
        &mut self,
        qp: QpHandle,
        wr_id: u64,
        bind: MwBind,
        flags: SendFlags,
    ) -> Result<crate::types::Rkey, PostError> {
        let _ = (qp, wr_id, bind, flags);
        Err(PostError::Unsupported("a memory window"))
    }

    /// Makes a CQ of at least `depth` entries.
    ///
    /// # Errors
    /// [`VerbsError::LimitReached`], [`VerbsError::InvalidCapability`].
    fn create_cq(&mut self, depth: u32) -> Result<CqHandle, VerbsError>;
    /// Destroys a CQ that no QP uses.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`].
    fn destroy_cq(&mut self, cq: CqHandle) -> Result<(), VerbsError>;
    /// Takes up to `out.len()` completions; returns how many. They stand at the beginning of `out`.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::DeviceGone`] when the CQ is empty and nothing will come any more.
    fn poll_cq(&mut self, cq: CqHandle, out: &mut [WorkCompletion]) -> Result<usize, VerbsError>;
    /// Asks for one [`AsyncEvent::CqNotify`] at the next completion.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn req_notify(&mut self, cq: CqHandle, what: Notify) -> Result<(), VerbsError>;

    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::InvalidCapability`].
    fn create_srq(&mut self, init: SrqInit) -> Result<SrqHandle, VerbsError>;
    /// Arms the limit event: raised once when fewer than `limit` receives are left. 0 disarms.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidCapability`].
    fn arm_srq(&mut self, srq: SrqHandle, limit: u32) -> Result<(), VerbsError>;
    /// Sizes and fill of an SRQ.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_srq(&self, srq: SrqHandle) -> Result<SrqInfo, VerbsError>;
    /// Destroys an SRQ that no QP uses.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`].
    fn destroy_srq(&mut self, srq: SrqHandle) -> Result<(), VerbsError>;

    /// Makes a QP in RESET.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::InvalidCapability`].
    fn create_qp(&mut self, init: QpInit) -> Result<QpHandle, VerbsError>;
    /// Moves a QP along the state table, or changes attributes within a state.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Modify`] naming the attribute that is missing, not allowed or wrong.
    fn modify_qp(&mut self, qp: QpHandle, attr: QpAttr) -> Result<(), VerbsError>;
    /// Moves many QPs, each with a result of its own, in order: one that is refused keeps no other from its turn. A device
    /// that threads share takes its lock once.
    fn modify_many(&mut self, list: &[(QpHandle, QpAttr)]) -> Vec<Result<(), VerbsError>> {
        list.iter().map(|(qp, attr)| self.modify_qp(*qp, *attr)).collect()
    }
    /// State, attributes and progress of a QP.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_qp(&self, qp: QpHandle) -> Result<QpInfo, VerbsError>;
    /// Sets the options of a QP, in any state.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::Unsupported`] from a device that knows none (the default).
    fn set_qp_options(&mut self, qp: QpHandle, options: QpOptions) -> Result<(), VerbsError> {
        let _ = (qp, options);
        Err(VerbsError::Unsupported("options of a QP"))
    }
    /// The options of a QP.
    ///
    /// # Errors
    /// As [`Verbs::set_qp_options`].
    fn qp_options(&self, qp: QpHandle) -> Result<QpOptions, VerbsError> {
        let _ = qp;
        Err(VerbsError::Unsupported("options of a QP"))
    }
    /// Destroys a QP. Work requests outstanding complete no more.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), VerbsError>;
    /// The QP with this number.
    fn find_qp(&self, qpn: Qpn) -> Option<QpHandle>;
    /// Attaches a UD QP to the multicast group of `gid`.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::NotMulticast`], [`VerbsError::LimitReached`].
    fn attach_multicast(&mut self, qp: QpHandle, gid: crate::types::Gid) -> Result<(), VerbsError>;
    /// Detaches it again.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::NotMulticast`].
    fn detach_multicast(&mut self, qp: QpHandle, gid: crate::types::Gid) -> Result<(), VerbsError>;

    /// Queues send work requests in order. The first bad one ends the call; those before it are queued.
    ///
    /// # Errors
    /// [`PostListError`]: the index of the first one not queued, and why.
    fn post_send(&mut self, qp: QpHandle, list: &[SendWr<'_>]) -> Result<(), PostListError>;
    /// Queues receive work requests in order.
    ///
    /// # Errors
    /// [`PostListError`].
    fn post_recv(&mut self, qp: QpHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError>;
    /// Queues receive work requests on an SRQ in order.
    ///
    /// # Errors
    /// [`PostListError`].
    fn post_srq_recv(&mut self, srq: SrqHandle, list: &[RecvWr<'_>]) -> Result<(), PostListError>;

    /// Makes an address handle for datagrams.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::LimitReached`], [`VerbsError::InvalidGidIndex`].
    fn create_ah(&mut self, pd: PdHandle, attr: AhAttr) -> Result<AhHandle, VerbsError>;
    /// Destroys an address handle.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_ah(&mut self, ah: AhHandle) -> Result<(), VerbsError>;

    /// The oldest asynchronous event not yet taken.
    fn poll_event(&mut self) -> Option<AsyncEvent>;
}

/// Verbs of which a program can also wait for the outcome.
///
/// Apart from [`Verbs`] because it blocks and knows the time: a state machine that holds verbs may do neither. What
/// happens meanwhile differs: a software endpoint is driven by whoever waits, hardware works by itself.
pub trait WaitVerbs: Verbs {
    /// The time on the device's clock.
    fn now(&self) -> Instant;

    /// Waits until `cq` holds a completion (`true`) or `timeout` passes (`None`: for ever).
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::DeviceGone`]; [`VerbsError::Unsupported`] when the process has no
    /// descriptor left to sleep on.
    fn wait_cq(&mut self, cq: CqHandle, timeout: Option<Duration>) -> Result<bool, VerbsError>;
}
