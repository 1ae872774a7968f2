//! The agent against another agent, against a peer that misbehaves, and against the captures of rdma_rxe.

#![allow(clippy::float_arithmetic)]

mod connect;
mod faults;
mod fuzz;
mod hostile;
mod lap;
mod loss;
mod pair;
mod peer;
mod refusal;
mod replay;
mod sidr;
