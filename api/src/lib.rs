//! What a user can ask for, how it is written down, and how it reaches the machine.
//!
//! | question | module |
//! |---|---|
//! | what does a virtual machine consist of? | [`config`] |
//! | how is a part of it written on the command line? | [`config::flags`] |
//! | how is a hierarchy written in a file? | [`config::topology`] |
//! | what can be asked of a machine, and what does it answer? | [`command`], [`error`] |
//! | how does a request reach the thread that runs the machine? | [`channel`] |
//! | what is known about a machine without asking it? | [`info`] |
//! | how is it told what happens? | [`events`] |
//! | who serves HTTP requests, and what do their bodies mean? | [`http`], [`dialect`] |
//! | where in a JSON text is what cannot be used? | [`json`] |
//! | how does a program call them? | [`client`] |
//!
//! Configuration is plain data. Whether a request makes sense for this host and this hierarchy is decided where the
//! knowledge is: in the planner, the memory map and the devices.
#![forbid(unsafe_code)]

pub mod channel;
pub mod client;
pub mod command;
pub mod config;
pub mod dialect;
pub mod door;
pub mod error;
pub mod events;
pub mod http;
pub mod info;
pub mod json;
mod sync;
