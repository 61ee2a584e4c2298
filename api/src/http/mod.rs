//! The HTTP API on a unix socket, in the form that Cloud Hypervisor gave it and Kata Containers' drivers expect.
//!
//! | question | module |
//! |---|---|
//! | who may listen at a path, and what if a socket is there already? | [`socket`] |
//! | how do descriptors and time limits come to a request? | `transport` |
//! | which connections are there, and when do they end? | [`server`] |
//! | which request is for whom? | `routes` |
//! | what is done with it? | `handle` |
//! | what does a reply look like, to the byte? | `reply` |
//!
//! One thread, `api`, serves all connections and never works on the machine: it hands commands to the core and answers
//! `vmm.ping` and `vm.info` from what was published last. Parsing and framing are hyper's. Its runtime is started by
//! [`Server::start`]; a process that has no API pays nothing for it but the size of the executable.

mod handle;
mod reply;
mod routes;
pub mod server;
pub mod socket;
mod transport;

pub use server::{Limits, ServeError, Server};
pub use socket::{ListenError, Listening};
