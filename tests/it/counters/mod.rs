//! Counters tell the truth: each ticks exactly when its row says, the page says what the table says, and over random runs
//! every counter equals what an independent reader of the packets computes.

mod page;
mod reasons;
mod ticks;
mod truth;
