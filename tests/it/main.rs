//! Integration tests.

mod corner_cases;
mod rc;
