//! Integration tests.

mod corner_cases;
mod ether;
mod rc;
mod sim_exchange;
mod sim_random;
mod sim_world;
mod tidy;
mod wire_fixtures;
