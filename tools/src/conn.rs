//! Connections by address: what every command needs of the connection manager.
//!
//! Owns the sequences of calls and events, and their failures in words. Never touches data.

use core::net::{IpAddr, SocketAddr};
use core::ops::{Deref, DerefMut};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use uroce::engine::system_seed;
use uroce::rng::Rng;
use uroce::verbs::QpHandle;
use uroce_cm::id::{IdError, IdOptions, PeerParam};
use uroce_cm::wire::PortSpace;
use uroce_cm::{Cm, CmConfig, ConnParam, EventKind, IdEvent, IdHandle, RdmaCm, RetryPolicy};

use crate::exit::Failure;
use crate::guard;
use crate::node::Handle;
use crate::observe::CmBoard;
use crate::stop;
use crate::why;

/// Longest sleep between two looks at the connection manager's timers and events.
const SLICE: Duration = Duration::from_millis(20);
/// How long a step that depends on the peer may take; the connection manager itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(120);
/// A person waits: gives up after about 12 s.
const RETRY: RetryPolicy = RetryPolicy {
    initial: Duration::from_millis(250),
    factor_percent: 200,
    cap: Duration::from_secs(2),
    retries: 7,
    jitter_percent: 10,
};
/// How long a repeated DREQ is still answered after the end.
const LINGER: Duration = Duration::from_millis(200);
/// How long a process that failed goes on to tell its peers.
const FAREWELL: Duration = Duration::from_millis(50);
/// How long one that a signal ends waits for their answers.
const FAREWELL_STOPPED: Duration = Duration::from_secs(1);

impl From<IdError> for Failure {
    fn from(error: IdError) -> Self {
        match error {
            IdError::AddressNotAvailable(_) | IdError::AddressInUse(_) => Self::Environment(error.to_string()),
            other => Self::failed(other),
        }
    }
}

/// Who makes the connections.
enum Front {
    /// We do, over QP1.
    Software(Box<Cm>),
    /// The kernel, for its hardware.
    #[cfg(feature = "hw")]
    Hardware(Box<uroce_cm::hw::HwCm>),
}

impl Front {
    fn of(v: &mut Handle, retry: RetryPolicy) -> Result<Self, Failure> {
        #[cfg(feature = "hw")]
        if v.is_hardware() {
            guard::refuse_on_hardware()?;
            return Ok(Self::Hardware(Box::new(crate::hardware::connection_manager()?)));
        }
        let mut rng = Rng::from_seed(system_seed()?);
        let policy = guard::policy(&mut rng, v.now())?;
        let mut config = CmConfig::default();
        config.agent.retry = retry;
        let mut cm = Cm::new(v, config, rng).map_err(Failure::failed)?;
        if let Some(policy) = policy {
            cm.set_policy(policy);
        }
        Ok(Self::Software(Box::new(cm)))
    }
}

impl Front {
    /// Ends all connections. The kernel ends its own when this process does.
    fn shutdown(&mut self, v: &mut Handle) {
        match self {
            Self::Software(cm) => cm.shutdown(v.now(), v),
            #[cfg(feature = "hw")]
            Self::Hardware(_) => {}
        }
    }

    /// Whether all peers know.
    fn is_drained(&self) -> bool {
        match self {
            Self::Software(cm) => cm.is_drained(),
            #[cfg(feature = "hw")]
            Self::Hardware(_) => true,
        }
    }
}

impl Deref for Front {
    type Target = dyn RdmaCm;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Software(cm) => &**cm,
            #[cfg(feature = "hw")]
            Self::Hardware(cm) => &**cm,
        }
    }
}

impl DerefMut for Front {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Software(cm) => &mut **cm,
            #[cfg(feature = "hw")]
            Self::Hardware(cm) => &mut **cm,
        }
    }
}

/// The connection manager of an endpoint.
pub(crate) struct Connections {
    cm: Front,
    waiting: VecDeque<IdEvent>,
    /// Where others look at the ids.
    board: CmBoard,
}

impl Connections {
    /// Takes QP1 of the endpoint, or asks the kernel, whose it is on hardware.
    pub(crate) fn new(v: &mut Handle) -> Result<Self, Failure> {
        Self::with_retry(v, RETRY)
    }

    /// The same, with another idea of when a peer does not answer.
    pub(crate) fn with_retry(v: &mut Handle, retry: RetryPolicy) -> Result<Self, Failure> {
        stop::install()?;
        Ok(Self { cm: Front::of(v, retry)?, waiting: VecDeque::new(), board: CmBoard::new(v) })
    }

    /// Tells others of the ids only now and then: for commands that make and end thousands a second.
    pub(crate) const fn list_rarely(&mut self) {
        self.board.list_rarely();
    }

    /// The connection manager itself, for commands with sequences of their own.
    pub(crate) fn front(&mut self) -> &mut dyn RdmaCm {
        &mut *self.cm
    }

    /// Listens on `addr`.
    pub(crate) fn listen(&mut self, v: &mut Handle, addr: SocketAddr, backlog: usize) -> Result<IdHandle, Failure> {
        self.listen_in(v, PortSpace::Tcp, addr, backlog)
    }

    /// Listens on `addr` of a port space.
    pub(crate) fn listen_in(
        &mut self,
        v: &mut Handle,
        space: PortSpace,
        addr: SocketAddr,
        backlog: usize,
    ) -> Result<IdHandle, Failure> {
        let id = self.cm.create_id(space)?;
        self.cm.bind_addr(v, id, addr)?;
        self.cm.listen(id, backlog)?;
        Ok(id)
    }

    /// The next connection request, for however long it takes.
    pub(crate) fn next_request(&mut self, v: &mut Handle) -> Result<IdEvent, Failure> {
        loop {
            let event = self.event(v, None)?;
            if let Some(event) = event.filter(|e| e.kind == EventKind::ConnectRequest) {
                return Ok(event);
            }
        }
    }

    /// Finds the way to `peer` and attaches `qp`, which is in INIT afterwards: receives can be posted.
    pub(crate) fn prepare(
        &mut self,
        v: &mut Handle,
        source: Option<IpAddr>,
        peer: SocketAddr,
        options: IdOptions,
        qp: QpHandle,
    ) -> Result<IdHandle, Failure> {
        let id = self.cm.create_id(PortSpace::Tcp)?;
        self.cm.set_options(id, options)?;
        self.cm.resolve_addr(v, id, source.map(|ip| SocketAddr::new(ip, 0)), peer)?;
        self.expect(v, id, peer, EventKind::AddrResolved)?;
        self.cm.resolve_route(v, id)?;
        self.expect(v, id, peer, EventKind::RouteResolved)?;
        self.cm.attach_qp(v, id, qp)?;
        Ok(id)
    }

    /// Asks for the connection, and waits for it. Returns what the peer said.
    pub(crate) fn connect(
        &mut self,
        v: &mut Handle,
        id: IdHandle,
        peer: SocketAddr,
        param: &ConnParam<'_>,
    ) -> Result<PeerParam, Failure> {
        self.cm.connect(v.now(), v, id, param)?;
        Ok(self.expect(v, id, peer, EventKind::Established)?.param)
    }

    /// Attaches `qp` to a request, with which receives can be posted. [`Connections::accept`] follows.
    pub(crate) fn attach(&mut self, v: &mut Handle, id: IdHandle, qp: QpHandle) -> Result<(), Failure> {
        Ok(self.cm.attach_qp(v, id, qp)?)
    }

    /// Accepts a request, and waits until the peer knows.
    pub(crate) fn accept(&mut self, v: &mut Handle, id: IdHandle, param: &ConnParam<'_>) -> Result<(), Failure> {
        self.cm.accept(v.now(), v, id, param)?;
        let peer = self.peer(id);
        self.expect(v, id, peer, EventKind::Established)?;
        Ok(())
    }

    /// Refuses a request with a text.
    pub(crate) fn reject(&mut self, v: &mut Handle, id: IdHandle, why: &str) -> Result<(), Failure> {
        self.cm.reject(v.now(), id, why.as_bytes())?;
        self.pump(v)
    }

    /// The peer's address.
    pub(crate) fn peer(&self, id: IdHandle) -> SocketAddr {
        self.cm.peer_addr(id).unwrap_or_else(|| SocketAddr::new(IpAddr::from([0, 0, 0, 0]), 0))
    }

    /// Our entry of the GID table that an id is on.
    pub(crate) fn gid_index(&self, v: &Handle, id: IdHandle) -> u8 {
        let own = self.cm.local_addr(id).map(|a| a.ip());
        let entries = (0u8..=u8::MAX).zip(v.query_gids());
        entries.into_iter().find(|(_, entry)| Some(entry.gid.ip()) == own).map_or(0, |(index, _)| index)
    }

    /// Whether the peer has ended the connection. Also keeps the connection manager's timers running, so call it
    /// whenever there is nothing else to do.
    pub(crate) fn is_over(&mut self, v: &mut Handle, id: IdHandle) -> Result<bool, Failure> {
        self.pump(v)?;
        let mut over = false;
        let mut others = VecDeque::new();
        while let Some(event) = self.next_event() {
            if event.id == id {
                over |= matches!(event.kind, EventKind::Disconnected | EventKind::DeviceRemoval);
            } else {
                others.push_back(event);
            }
        }
        self.waiting = others;
        Ok(over)
    }

    /// Ends the connection and waits until the peer knows.
    pub(crate) fn disconnect(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        self.cm.disconnect(v.now(), v, id)?;
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE && !self.is_over(v, id)? {
            self.rest(v, SLICE)?;
        }
        Ok(())
    }

    /// Agrees to the peer's disconnect, and answers it again should the answer get lost.
    pub(crate) fn part(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        // The peer's wish may be agreed to already.
        let _ = self.cm.disconnect(v.now(), v, id);
        self.linger(v, LINGER)
    }

    /// Keeps answering peers that missed an answer, for a while.
    pub(crate) fn linger(&mut self, v: &mut Handle, time: Duration) -> Result<(), Failure> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            self.pump(v)?;
            self.rest(v, SLICE)?;
        }
        Ok(())
    }

    /// Forgets an id that is over.
    pub(crate) fn forget(&mut self, v: &mut Handle, id: IdHandle) -> Result<(), Failure> {
        Ok(self.cm.destroy_id(v.now(), v, id)?)
    }

    /// The end of a command whose work ended with `done`: peers of one that failed, or that a signal ends, learn that it
    /// goes. What cannot be told is not: the process ends anyway.
    pub(crate) fn farewell(&mut self, v: &mut Handle, done: &Result<(), Failure>) {
        let patience = match (stop::check(), done) {
            (Err(_), _) => FAREWELL_STOPPED,
            (Ok(()), Err(_)) => FAREWELL,
            (Ok(()), Ok(())) => return,
        };
        self.cm.shutdown(v);
        let begin = Instant::now();
        while begin.elapsed() < patience && !self.cm.is_drained() {
            if self.turn(v).and_then(|()| self.rest(v, SLICE)).is_err() {
                return;
            }
        }
    }

    fn pump(&mut self, v: &mut Handle) -> Result<(), Failure> {
        stop::check()?;
        self.turn(v)
    }

    fn turn(&mut self, v: &mut Handle) -> Result<(), Failure> {
        while let Some(event) = v.poll_event() {
            self.cm.on_async_event(v, &event);
        }
        while self.cm.poll(v.now(), v)? {}
        // Of the kernel's connections it tells by itself: `rdma resource show cm_id`.
        match &self.cm {
            Front::Software(cm) => self.board.publish(cm, v),
            #[cfg(feature = "hw")]
            Front::Hardware(_) => {}
        }
        Ok(())
    }

    fn next_event(&mut self) -> Option<IdEvent> {
        self.waiting.pop_front().or_else(|| self.cm.poll_event())
    }

    /// Sleeps until QP1 has something, the connection manager's timer is due or `max` passes.
    pub(crate) fn rest(&mut self, v: &mut Handle, max: Duration) -> Result<(), Failure> {
        let due = self.cm.poll_timeout().map(|at| at.saturating_since(v.now()));
        let time = due.map_or(max, |due| due.min(max));
        match &self.cm {
            Front::Software(cm) => v.wait_cq(cm.gsi().cq(), Some(time)).map(|_| ())?,
            #[cfg(feature = "hw")]
            Front::Hardware(cm) => cm.wait(time),
        }
        Ok(())
    }

    /// The next event; `None` after `patience`.
    pub(crate) fn event(&mut self, v: &mut Handle, patience: Option<Duration>) -> Result<Option<IdEvent>, Failure> {
        let begin = Instant::now();
        loop {
            self.pump(v)?;
            if let Some(event) = self.next_event() {
                return Ok(Some(event));
            }
            if patience.is_some_and(|p| begin.elapsed() >= p) {
                return Ok(None);
            }
            self.rest(v, SLICE)?;
        }
    }

    /// Why a connection to `peer` did not come about.
    pub(crate) fn explain(&self, peer: SocketAddr, event: &IdEvent) -> Failure {
        let from = self.cm.local_addr(event.id).map(|a| a.ip());
        Failure::Failed(why::connection(from, peer, event))
    }

    /// Waits for an event of one kind; any other of this id is its failure.
    fn expect(&mut self, v: &mut Handle, id: IdHandle, peer: SocketAddr, kind: EventKind) -> Result<IdEvent, Failure> {
        loop {
            let Some(event) = self.event(v, Some(PATIENCE))? else {
                return Err(Failure::Failed(format!("{peer}: no {} within {} s", kind.name(), PATIENCE.as_secs())));
            };
            if event.id != id {
                continue;
            }
            return if event.kind == kind { Ok(event) } else { Err(self.explain(peer, &event)) };
        }
    }
}
