//! The front: connections by IP address and port, as programs know them from rdma_cm.
//!
//! Owns ids, their addresses and what they are attached to. The trait [`RdmaCm`] is what programs are written against;
//! [`Cm`] implements it in software over an [`Agent`](crate::Agent) and QP1. On hardware QP1 belongs to the kernel, and
//! the trait is implemented over librdmacm.

mod address;
mod software;
mod translate;
mod types;

use core::net::SocketAddr;

use uroce::time::Instant;
use uroce::verbs::{AsyncEvent, QpHandle, Verbs};

pub use software::{Cm, CmConfig};
pub use types::{
    Attempt, ConnParam, EventKind, IdError, IdEvent, IdHandle, IdOptions, PeerParam, ReadyQp, STATUS_INVALID,
    STATUS_NO_DEVICE, STATUS_TIMED_OUT, kind,
};

use crate::wire::PortSpace;

/// Connection management by address. No call blocks: what follows from a call comes as an event.
///
/// A client: `create_id`, `resolve_addr` (ADDR_RESOLVED), `resolve_route` (ROUTE_RESOLVED), `attach_qp`, `connect`
/// (ESTABLISHED). A server: `create_id`, `bind_addr`, `listen`; on CONNECT_REQUEST `attach_qp` to the new id and `accept`
/// (ESTABLISHED). With an attached QP the front moves it to RTS, and to ERR when the connection ends. Without one the
/// caller names a QPN and moves the QP itself: at once after `accept`, or on CONNECT_RESPONSE and before `establish`.
pub trait RdmaCm {
    /// Makes an id.
    ///
    /// # Errors
    /// [`IdError::LimitReached`].
    fn create_id(&mut self, space: PortSpace) -> Result<IdHandle, IdError>;

    /// Destroys an id in any state. A connection is disconnected. An attached QP is the caller's to destroy.
    ///
    /// # Errors
    /// [`IdError::InvalidHandle`].
    fn destroy_id(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError>;

    /// Sets options. They hold for connections made after.
    ///
    /// # Errors
    /// [`IdError::InvalidHandle`].
    fn set_options(&mut self, id: IdHandle, options: IdOptions) -> Result<(), IdError>;

    /// Binds to an address of the device, or to all with `0.0.0.0` or `[::]`. Port 0 takes a free one.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::AddressNotAvailable`].
    fn bind_addr(&mut self, verbs: &mut dyn Verbs, id: IdHandle, addr: SocketAddr) -> Result<(), IdError>;

    /// Listens on the bound address. At most `backlog` requests wait.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::AddressInUse`].
    fn listen(&mut self, id: IdHandle, backlog: usize) -> Result<(), IdError>;

    /// Finds the source address for a destination. ADDR_RESOLVED or ADDR_ERROR follows.
    ///
    /// # Errors
    /// [`IdError::WrongState`].
    fn resolve_addr(
        &mut self,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<(), IdError>;

    /// Fixes the path. ROUTE_RESOLVED follows.
    ///
    /// # Errors
    /// [`IdError::WrongState`].
    fn resolve_route(&mut self, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError>;

    /// Attaches a QP in RESET, and moves it to INIT so that receives can be posted.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::Verbs`].
    fn attach_qp(&mut self, verbs: &mut dyn Verbs, id: IdHandle, qp: QpHandle) -> Result<(), IdError>;

    /// Asks for the connection.
    ///
    /// # Errors
    /// [`IdError`].
    fn connect(
        &mut self,
        now: Instant,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<(), IdError>;

    /// Accepts a CONNECT_REQUEST. Returns what the QP needs (an attached one has it already).
    ///
    /// # Errors
    /// [`IdError`].
    fn accept(
        &mut self,
        now: Instant,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<ReadyQp, IdError>;

    /// What the QP needs, once the peer's answer or request was accepted.
    fn ready(&self, id: IdHandle) -> Option<ReadyQp>;

    /// After CONNECT_RESPONSE, with the QP in RTS: tells the peer. The connection is established then.
    ///
    /// # Errors
    /// [`IdError::WrongState`].
    fn establish(&mut self, id: IdHandle) -> Result<(), IdError>;

    /// Refuses a CONNECT_REQUEST or CONNECT_RESPONSE with reason 28 and at most 148 bytes.
    ///
    /// # Errors
    /// [`IdError`].
    fn reject(&mut self, id: IdHandle, private_data: &[u8]) -> Result<(), IdError>;

    /// Disconnects, or agrees to the peer's disconnect.
    ///
    /// # Errors
    /// [`IdError`].
    fn disconnect(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError>;

    /// Tells of an asynchronous event that the program took from its device: data before the RTU establishes a
    /// connection, a changed GID table is read again. Others are ignored.
    fn on_async_event(&mut self, verbs: &mut dyn Verbs, event: &AsyncEvent);

    /// The next event.
    fn poll_event(&mut self) -> Option<IdEvent>;

    /// Works: call it whenever the device did, and at [`RdmaCm::poll_timeout`]. Returns whether there was anything.
    ///
    /// # Errors
    /// [`IdError::Gsi`].
    fn poll(&mut self, now: Instant, verbs: &mut dyn Verbs) -> Result<bool, IdError>;

    /// When [`RdmaCm::poll`] wants to be called though nothing arrives.
    fn poll_timeout(&self) -> Option<Instant>;

    /// The address that an id is bound to.
    fn local_addr(&self, id: IdHandle) -> Option<SocketAddr>;

    /// The address of the peer.
    fn peer_addr(&self, id: IdHandle) -> Option<SocketAddr>;
}
