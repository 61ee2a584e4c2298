//! Runs the built executable and looks at what comes out: the harness of the tests in `tests/`.
//!
//! | question | module |
//! |---|---|
//! | which executable is tested? | [`executable`] |
//! | what did it print, and how did it end? | [`process`] |
//! | what does a user at a terminal see? | [`terminal`] |
//! | what does a client of the API socket get? | [`server`] |
//! | what is told to who listens? | [`listener`] |
//! | what did a bare-metal guest find? | [`guest`] |
//! | does a guest go on with all its devices in order? | [`busy`] |
//! | is a machine that was written down the same in another process? | [`saved`] |
//! | what does a process that serves a device see? | [`vhost_user`] |
//!
//! Nothing here links with Banyan. Tests that need KVM carry `#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]`: where
//! there is none they are counted as ignored.
#![forbid(unsafe_code)]

pub mod busy;
pub mod executable;
pub mod guest;
pub mod listener;
pub mod process;
pub mod saved;
pub mod server;
pub mod terminal;
pub mod vhost_user;

pub use guest::Guest;
pub use listener::Listener;
pub use process::{Capabilities, Outcome, Session, banyan, in_shell, with_other_mounts};
pub use terminal::Terminal;
