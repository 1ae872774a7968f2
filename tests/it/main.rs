//! Integration tests.

mod rc;
