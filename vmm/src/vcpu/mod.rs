//! Virtual processors: their initial state, their threads, and where their exits go.

mod counters;
mod setup;
mod thread;

pub use counters::{Count, Counters, NAMES};
pub use setup::{Maker, SetupError, Vcpu};
pub use thread::{Ended, Named, Runner, ThreadError, Threads};
