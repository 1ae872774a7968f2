//! Lists of all ids, for people and tools that look on.

use core::net::SocketAddr;

use uroce::verbs::QpHandle;

use super::Cm;
use super::software::{Id, Stage};
use crate::comm::CommState;
use crate::wire::PortSpace;

/// An id at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdInfo {
    /// Number: the slot of its handle.
    pub number: u32,
    /// Port space.
    pub space: PortSpace,
    /// Where it stands, in the names of Linux's rdma_cm: `IDLE`, `ADDR_BOUND`, `ADDR_RESOLVED`, `ROUTE_RESOLVED`,
    /// `LISTEN`, `CONNECT` or `DISCONNECT`.
    pub state: &'static str,
    /// A connection, or datagram service, is asked for and not made yet.
    pub pending: bool,
    /// Our address.
    pub local: Option<SocketAddr>,
    /// The peer's.
    pub peer: Option<SocketAddr>,
    /// QP that is attached.
    pub qp: Option<QpHandle>,
}

impl Cm {
    /// Ids that live.
    #[must_use]
    pub fn id_count(&self) -> usize {
        self.ids.len()
    }

    /// All ids, by number.
    pub fn list(&self) -> impl Iterator<Item = IdInfo> {
        self.ids.iter().map(|(handle, id)| {
            let (state, pending) = self.standing(id);
            let Id { space, local, peer, qp, .. } = *id;
            IdInfo { number: handle.slot(), space, state, pending, local, peer, qp }
        })
    }

    fn standing(&self, id: &Id) -> (&'static str, bool) {
        match id.stage {
            Stage::Idle if id.local.is_some() => ("ADDR_BOUND", false),
            Stage::Idle => ("IDLE", false),
            Stage::AddrResolved => ("ADDR_RESOLVED", false),
            Stage::RouteResolved => ("ROUTE_RESOLVED", false),
            Stage::Listening(_) => ("LISTEN", false),
            Stage::Sidr(_) => ("CONNECT", true),
            Stage::Datagram => ("CONNECT", false),
            Stage::Comm(comm) => match self.agent.state(comm) {
                Some(CommState::Established) => ("CONNECT", false),
                Some(CommState::DreqSent | CommState::DreqRcvd | CommState::TimeWait) | None => ("DISCONNECT", false),
                Some(_) => ("CONNECT", true),
            },
            Stage::Over => ("DISCONNECT", false),
        }
    }
}
