//! The front: connections by IP address and port, as programs know them from rdma_cm.
//!
//! Owns ids, their addresses and what they are attached to. The trait [`RdmaCm`] is what programs are written against;
//! [`Cm`] implements it in software over an [`Agent`](crate::Agent) and QP1. On hardware QP1 belongs to the kernel, and
//! the trait is implemented over librdmacm.

mod address;
mod alternate;
mod datagram;
mod list;
mod software;
mod translate;
mod types;

use core::net::{IpAddr, SocketAddr};

use uroce::time::Instant;
use uroce::verbs::{AsyncEvent, QpHandle, Verbs};

pub use list::IdInfo;
pub use software::{Cm, CmConfig};
pub use types::{
    Attempt, ConnParam, EventKind, IdError, IdEvent, IdHandle, IdOptions, PeerParam, ReadyQp, STATUS_INVALID,
    STATUS_NO_DEVICE, STATUS_TIMED_OUT, UdPeer, kind,
};

use crate::wire::PortSpace;

/// Connection management by address. No call blocks: what follows from a call comes as an event.
///
/// A client: `create_id`, `resolve_addr` (ADDR_RESOLVED), `resolve_route` (ROUTE_RESOLVED), `attach_qp`, `connect`
/// (ESTABLISHED). A server: `create_id`, `bind_addr`, `listen`; on CONNECT_REQUEST `attach_qp` to the new id and `accept`
/// (ESTABLISHED). With an attached QP the front moves it to RTS, and to ERR when the connection ends. Without one the
/// caller names a QPN and moves the QP itself: at once after `accept`, or on CONNECT_RESPONSE and before `establish`.
///
/// Datagram services (port space UDP, or IB with a UD QP) make the same calls. `attach_qp` brings a UD QP to RTS at once.
/// ESTABLISHED comes to the client alone, with the peer's QPN, its Q_Key and the address vector in `IdEvent::ud`; the server
/// is done with `accept`. There is nothing to disconnect. A group is joined with a bound or resolved id.
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

    /// Attaches a QP in RESET, and moves it to INIT so that receives can be posted. A UD QP is in RTS afterwards, with
    /// Q_Key 0x01234567.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::Verbs`]; [`IdError::Cm`] with `QpBusy` when an earlier connection of a QP with this
    /// number is in TIMEWAIT: take another QP.
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

    /// Accepts a CONNECT_REQUEST. Returns what the QP needs (an attached one has it already); of a datagram service nothing.
    ///
    /// # Errors
    /// [`IdError`].
    fn accept(
        &mut self,
        now: Instant,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<Option<ReadyQp>, IdError>;

    /// What the QP needs, once the peer's answer or request was accepted.
    fn ready(&self, id: IdHandle) -> Option<ReadyQp>;

    /// After CONNECT_RESPONSE, with the QP in RTS: tells the peer. The connection is established then.
    ///
    /// # Errors
    /// [`IdError::WrongState`].
    fn establish(&mut self, id: IdHandle) -> Result<(), IdError>;

    /// Refuses a CONNECT_REQUEST or CONNECT_RESPONSE with reason 28 and at most 148 bytes (of a datagram service 136).
    ///
    /// # Errors
    /// [`IdError`].
    fn reject(&mut self, now: Instant, id: IdHandle, private_data: &[u8]) -> Result<(), IdError>;

    /// Disconnects, or agrees to the peer's disconnect.
    ///
    /// # Errors
    /// [`IdError`].
    fn disconnect(&mut self, now: Instant, verbs: &mut dyn Verbs, id: IdHandle) -> Result<(), IdError>;

    /// Joins the multicast group of this address with a bound or resolved id of port space UDP or IB. An attached QP
    /// receives from then on, unless `send_only`. MULTICAST_JOIN follows, with what a send needs in `IdEvent::ud`, or
    /// MULTICAST_ERROR. `destroy_id` leaves all groups.
    ///
    /// # Errors
    /// [`IdError::WrongState`], [`IdError::NotMulticast`].
    fn join_multicast(
        &mut self,
        verbs: &mut dyn Verbs,
        id: IdHandle,
        group: IpAddr,
        send_only: bool,
    ) -> Result<(), IdError>;

    /// Leaves a group.
    ///
    /// # Errors
    /// [`IdError::NotMulticast`]: the id has not joined it.
    fn leave_multicast(&mut self, verbs: &mut dyn Verbs, id: IdHandle, group: IpAddr) -> Result<(), IdError>;

    /// Tells of an asynchronous event that the program took from its device: data before the RTU establishes a
    /// connection, a changed GID table is read again, a migrated QP takes its connection along. Others are ignored.
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

    /// The address of the peer. Of a request in software it is the one that the peer names in its private data, as in
    /// rdma_cm; rules of a policy judge by where the request came from.
    fn peer_addr(&self, id: IdHandle) -> Option<SocketAddr>;
}
