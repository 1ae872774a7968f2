//! The real binary, as a shell sees it: output, exit codes, files.

mod common;

mod dump;
mod environment;
mod pingpong;
mod usage;
