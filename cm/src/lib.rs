//! The InfiniBand connection manager: how two queue pairs find each other, agree and part.
//!
//! Owns the messages of connection management and the state of every communication. Never touches a frame or a QP's
//! inside: it speaks to a device through [`uroce::verbs::Verbs`] alone.
//!
//! | module | what it owns |
//! |---|---|
//! | [`wire`] | the eleven messages, byte for byte |
//! | [`comm`] | the states of one communication, and the table of what each message does |
//! | [`agent`] | all communications of an adapter, sans-IO: MADs and commands in, MADs and events out |
//! | [`gsi`] | MADs over QP1 |
//! | [`id`] | the front that programs use: addresses and ports, the calls and events of rdma_cm |
//! | `hw` | the same front over librdmacm, for RDMA hardware (feature `hw`) |
//! | [`policy`] | who may connect, how often, and what is written down |
//! | [`pool`], [`reconnect`], [`drain`] | connections kept warm, when to try again, an orderly end |
//! | [`matcher`] | which packet carries which message, for fault rules |
//!
//! A program that connects to itself; with two programs each has one half of the `match`:
//!
//! ```
//! # use std::{error::Error, net::SocketAddr};
//! # use uroce::verbs::{QpCapabilities, QpHandle, QpInit, QpType, Verbs, VerbsError};
//! # fn rc_qp(verbs: &mut dyn Verbs) -> Result<QpHandle, VerbsError> {
//! #     let (pd, cq) = (verbs.alloc_pd()?, verbs.create_cq(16)?);
//! #     let caps = QpCapabilities::default();
//! #     let (qp_type, srq, qpn) = (QpType::Rc, None, None);
//! #     verbs.create_qp(QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn })
//! # }
//! use uroce::{device::loopback::Switch, engine::{Engine, system_seed}, rng::Rng};
//! use uroce_cm::{Cm, CmConfig, ConnParam, EventKind, RdmaCm, wire::PortSpace};
//!
//! # fn main() -> Result<(), Box<dyn Error>> {
//! let address: SocketAddr = "10.0.0.1:7174".parse()?;
//! let mut engine = Engine::open(Switch::new().port(&[address.ip()]))?;
//! let mut cm = Cm::new(engine.endpoint_mut(), CmConfig::default(), Rng::from_seed(system_seed()?))?;
//! let server = cm.create_id(PortSpace::Tcp)?;
//! cm.bind_addr(engine.endpoint_mut(), server, address)?;
//! cm.listen(server, 16)?;
//! let client = cm.create_id(PortSpace::Tcp)?;
//! cm.resolve_addr(engine.endpoint_mut(), client, None, address)?;
//! let mut established = 0;
//! while established < 2 {
//!     engine.poll()?;
//!     let (now, verbs) = (engine.now(), engine.endpoint_mut());
//!     cm.poll(now, verbs)?;
//!     while let Some(event) = cm.poll_event() {
//!         match event.kind {
//!             EventKind::AddrResolved => cm.resolve_route(verbs, event.id)?,
//!             EventKind::RouteResolved => {
//!                 let qp = rc_qp(verbs)?;
//!                 cm.attach_qp(verbs, event.id, qp)?; // now in INIT: post receives here
//!                 cm.connect(now, verbs, event.id, &ConnParam::default())?;
//!             }
//!             EventKind::ConnectRequest => {
//!                 let qp = rc_qp(verbs)?;
//!                 cm.attach_qp(verbs, event.id, qp)?;
//!                 cm.accept(now, verbs, event.id, &ConnParam { private_data: b"hi", ..ConnParam::default() })?;
//!             }
//!             EventKind::Established => established += 1, // the QP is in RTS
//!             other => return Err(format!("{}: status {}", other.name(), event.status).into()),
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```

pub mod agent;
pub mod comm;
pub mod drain;
pub mod gsi;
#[cfg(feature = "hw")]
pub mod hw;
pub mod id;
pub mod matcher;
pub mod policy;
pub mod pool;
pub mod reconnect;
mod retry;
pub mod wire;

pub use agent::{Agent, CmEvent, Config};
pub use comm::{CommId, ListenerId};
pub use drain::{Drain, DrainEnd, drain_and_disconnect};
pub use id::{Cm, CmConfig, ConnParam, EventKind, IdEvent, IdHandle, RdmaCm, ReadyQp, UdPeer};
pub use policy::{Policy, PolicyConfig};
pub use pool::{ConnectionPool, PoolConfig, PoolDriver};
pub use reconnect::{Backoff, ReconnectPolicy};
pub use retry::RetryPolicy;
