//! What the tests of this workspace share.

pub mod pair;
pub mod verbs_program;
