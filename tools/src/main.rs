//! The `uroce` command.
fn main() {}
