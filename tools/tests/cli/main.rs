//! The real binary, as a shell sees it: output, exit codes, files.

mod common;

mod cm;
mod demo;
mod doctor;
mod dump;
mod environment;
mod guard;
#[cfg(feature = "hw")]
mod hardware;
mod health;
mod lab;
mod perf;
mod ping;
mod pingpong;
mod stat;
mod stop;
mod usage;
mod watched;
mod wrap;
