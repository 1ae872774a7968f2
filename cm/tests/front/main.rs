//! The front over real endpoints: QP1, attached QPs, and data.

#![allow(clippy::float_arithmetic)]

mod datagram;
mod lossy;
mod matcher;
mod net;
mod paths;
mod random;
mod sequence;
mod spaces;
