//! What a user can ask for, and how it is written down.
//!
//! | question | module |
//! |---|---|
//! | what does a virtual machine consist of? | [`config`] |
//! | how is a part of it written on the command line? | [`config::flags`] |
//! | how is a hierarchy written in a file? | [`config::topology`] |
//!
//! Everything here is plain data. Whether a request makes sense for this host and this hierarchy is decided where the
//! knowledge is: in the planner, the memory map and the devices.
#![forbid(unsafe_code)]

pub mod config;
