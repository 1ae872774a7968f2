//! Many connections at once, in either role.
//!
//! Owns which of them stands where, and what an event does to it. What is done with a QP is the program's.

use core::net::{IpAddr, SocketAddr};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use uroce::verbs::QpHandle;
use uroce_cm::id::{IdOptions, UdPeer};
use uroce_cm::wire::PortSpace;
use uroce_cm::{ConnParam, EventKind, IdEvent, IdHandle};

use crate::conn::Connections;
use crate::exit::Failure;
use crate::node::Handle;

/// Longest sleep between two looks at connection management.
const SLICE: Duration = Duration::from_millis(5);

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// An id.
    Created,
    /// Its source address is known.
    AddrResolved,
    /// Its path is known.
    RouteResolved,
    /// It was asked for, or accepted.
    Connecting,
    /// Data can flow.
    Established,
    /// One of the two ended it.
    Over,
}

/// Number of stages.
const STAGES: usize = Stage::Over as usize + 1;

/// A connection, or what will be one.
pub(super) struct Member {
    pub(super) id: IdHandle,
    pub(super) stage: Stage,
    /// Where datagrams go, once that is known.
    pub(super) ud: Option<UdPeer>,
}

/// The connections of one process.
pub(super) struct Crowd {
    pub(super) connections: Connections,
    /// By number.
    members: BTreeMap<usize, Member>,
    /// How many are at each stage.
    at: [usize; STAGES],
    next: usize,
    by_id: BTreeMap<IdHandle, usize>,
    /// Of a client.
    server: Option<SocketAddr>,
    patience: Duration,
    progress: Instant,
}

/// What an event says that the crowd cannot settle by itself.
pub(super) enum News {
    /// A peer wants a connection: accept it with [`Crowd::accept`], or refuse it.
    Request(IdHandle),
    /// This member is at another stage.
    Moved(usize),
}

impl Crowd {
    /// No member yet. `server` is whom a client connects to.
    pub(super) fn new(v: &mut Handle, server: Option<SocketAddr>, patience: Duration) -> Result<Self, Failure> {
        Ok(Self {
            connections: Connections::new(v)?,
            members: BTreeMap::new(),
            at: [0; STAGES],
            next: 0,
            by_id: BTreeMap::new(),
            server,
            patience,
            progress: Instant::now(),
        })
    }

    fn add(&mut self, id: IdHandle, stage: Stage) -> usize {
        let number = self.next;
        self.next += 1;
        self.by_id.insert(id, number);
        self.members.insert(number, Member { id, stage, ud: None });
        self.tally(stage, 1);
        number
    }

    fn tally(&mut self, stage: Stage, change: isize) {
        if let Some(count) = self.at.get_mut(stage as usize) {
            *count = count.saturating_add_signed(change);
        }
    }

    /// Puts a member at another stage; returns the one before.
    fn move_to(&mut self, number: usize, stage: Stage) -> Result<Stage, Failure> {
        let before = core::mem::replace(&mut self.member_mut(number)?.stage, stage);
        self.tally(before, -1);
        self.tally(stage, 1);
        Ok(before)
    }

    /// A connection, unless it is forgotten.
    pub(super) fn get(&self, number: usize) -> Option<&Member> {
        self.members.get(&number)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// A client's next id; returns its number.
    pub(super) fn create(&mut self, space: PortSpace, options: IdOptions) -> Result<usize, Failure> {
        let front = self.connections.front();
        let id = front.create_id(space)?;
        front.set_options(id, options)?;
        Ok(self.add(id, Stage::Created))
    }

    /// Asks for the address of the server.
    pub(super) fn resolve_addr(
        &mut self,
        v: &mut Handle,
        number: usize,
        source: Option<SocketAddr>,
    ) -> Result<(), Failure> {
        let (id, server) = (self.member(number)?.id, self.server()?);
        Ok(self.connections.front().resolve_addr(v, id, source, server)?)
    }

    /// Asks for the path to the server.
    pub(super) fn resolve_route(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let id = self.member(number)?.id;
        Ok(self.connections.front().resolve_route(v, id)?)
    }

    /// Attaches a QP, which is in INIT afterwards.
    pub(super) fn attach(&mut self, v: &mut Handle, id: IdHandle, qp: QpHandle) -> Result<(), Failure> {
        self.connections.attach(v, id, qp)
    }

    /// Asks for the connection.
    pub(super) fn connect(&mut self, v: &mut Handle, number: usize, param: &ConnParam<'_>) -> Result<(), Failure> {
        self.move_to(number, Stage::Connecting)?;
        self.goes_on();
        let id = self.member(number)?.id;
        Ok(self.connections.front().connect(v.now(), v, id, param)?)
    }

    /// Accepts a request to which a QP is attached; returns its number.
    pub(super) fn accept(&mut self, v: &mut Handle, id: IdHandle, param: &ConnParam<'_>) -> Result<usize, Failure> {
        self.connections.front().accept(v.now(), v, id, param)?;
        Ok(self.add(id, Stage::Connecting))
    }

    /// Accepts a request for a datagram service: with that the server is done.
    pub(super) fn accept_service(
        &mut self,
        v: &mut Handle,
        id: IdHandle,
        param: &ConnParam<'_>,
    ) -> Result<usize, Failure> {
        let number = self.accept(v, id, param)?;
        self.move_to(number, Stage::Established)?;
        Ok(number)
    }

    /// Joins a group with an id that is bound or whose address is resolved.
    pub(super) fn join(
        &mut self,
        v: &mut Handle,
        number: usize,
        group: IpAddr,
        send_only: bool,
    ) -> Result<(), Failure> {
        let id = self.member(number)?.id;
        Ok(self.connections.front().join_multicast(v, id, group, send_only)?)
    }

    /// Ends a connection, or agrees to its end.
    pub(super) fn disconnect(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let id = self.member(number)?.id;
        Ok(self.connections.front().disconnect(v.now(), v, id)?)
    }

    /// Destroys the id of a connection that is over. Its number is not given again.
    pub(super) fn forget(&mut self, v: &mut Handle, number: usize) -> Result<(), Failure> {
        let Member { id, stage, .. } = *self.member(number)?;
        self.members.remove(&number);
        self.by_id.remove(&id);
        self.tally(stage, -1);
        self.connections.forget(v, id)
    }

    /// How many are at `stage` or beyond.
    pub(super) fn count(&self, stage: Stage) -> usize {
        self.at.iter().skip(stage as usize).sum()
    }

    /// Something went on: the patience begins again.
    pub(super) fn goes_on(&mut self) {
        self.progress = Instant::now();
    }

    /// Whether nothing has gone on for too long; `waiting` says for what.
    pub(super) fn check_patience(&self, waiting: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.progress.elapsed() < self.patience {
            return Ok(());
        }
        Err(Failure::Failed(format!("nothing happened for {} s: {}", self.patience.as_secs(), waiting())))
    }

    /// Sleeps until a message of connection management comes, or a moment passes.
    pub(super) fn rest(&mut self, v: &mut Handle) -> Result<(), Failure> {
        self.connections.rest(v, SLICE)
    }

    /// The next thing that happened, if anything did. A connection that fails is the failure of all.
    pub(super) fn news(&mut self, v: &mut Handle) -> Result<Option<News>, Failure> {
        while let Some(event) = self.connections.event(v, Some(Duration::ZERO))? {
            if event.kind == EventKind::ConnectRequest {
                return Ok(Some(News::Request(event.id)));
            }
            if let Some(number) = self.by_id.get(&event.id).copied()
                && self.on_event(v, number, &event)?
            {
                self.goes_on();
                return Ok(Some(News::Moved(number)));
            }
        }
        Ok(None)
    }

    fn on_event(&mut self, v: &mut Handle, number: usize, event: &IdEvent) -> Result<bool, Failure> {
        let stage = match event.kind {
            EventKind::AddrResolved => Stage::AddrResolved,
            EventKind::RouteResolved => Stage::RouteResolved,
            EventKind::Established | EventKind::MulticastJoin => Stage::Established,
            EventKind::Disconnected => Stage::Over,
            EventKind::TimewaitExit | EventKind::AddrChange => return Ok(false),
            _ => return Err(self.explained(number, event)),
        };
        let before = self.move_to(number, stage)?;
        self.member_mut(number)?.ud = event.ud;
        if stage == Stage::Over {
            // The peer's wish is agreed to. If it was ours, there is nothing to do, and the refusal says so.
            let _ = self.disconnect(v, number);
            if before < Stage::Established {
                return Err(self.explained(number, event));
            }
        }
        Ok(before != stage)
    }

    /// The failure of one of many names it.
    fn explained(&self, number: usize, event: &IdEvent) -> Failure {
        let peer = self.server.unwrap_or_else(|| self.connections.peer(event.id));
        let failure = self.connections.explain(peer, event);
        if self.members.len() < 2 {
            return failure;
        }
        Failure::Failed(format!("connection {} of {}: {failure}", number + 1, self.members.len()))
    }

    fn member(&self, number: usize) -> Result<&Member, Failure> {
        self.members.get(&number).ok_or_else(|| Failure::Failed(format!("there is no connection {number}")))
    }

    fn member_mut(&mut self, number: usize) -> Result<&mut Member, Failure> {
        self.members.get_mut(&number).ok_or_else(|| Failure::Failed(format!("there is no connection {number}")))
    }

    fn server(&self) -> Result<SocketAddr, Failure> {
        self.server.ok_or_else(|| Failure::failed("a server connects to nobody"))
    }
}
