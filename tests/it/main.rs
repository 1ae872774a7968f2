//! Integration tests.

mod corner_cases;
mod ether;
mod rc;
mod wire_fixtures;
