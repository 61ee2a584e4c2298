//! Virtual processors: their initial state, their threads, and where their exits go.

mod counters;
mod internal;
mod setup;
mod state;
mod thread;

pub use counters::{Count, NAMES};
pub use setup::{Maker, SetupError, Vcpu};
pub(crate) use state::plain;
pub use state::{VcpuState, VcpuStateError};
pub use thread::{Ended, Runner, ThreadError, Threads, WaitingThreads};
