//! Integration tests.

mod corner_cases;
mod rc;
mod wire_fixtures;
