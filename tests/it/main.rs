//! Integration tests.

mod bad_packets;
mod conformance;
mod corner_cases;
mod counters;
mod datagrams;
mod duo;
mod ether;
mod flush;
mod goals;
mod guessing;
mod hostile;
mod known_bugs;
mod large;
mod migration;
mod overload;
mod paths;
mod rc;
mod replay;
mod sim_exchange;
mod sim_plan;
mod sim_random;
mod sim_world;
mod tidy;
mod verbs_table;
mod windows;
mod wire_fixtures;
