//! The agent against another agent, against a peer that misbehaves, and against the captures of rdma_rxe.

#![allow(clippy::float_arithmetic)]

mod connect;
mod hostile;
mod loss;
mod pair;
mod replay;
mod sidr;
