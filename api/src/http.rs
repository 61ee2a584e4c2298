//! The HTTP API on a unix socket, in the form that Cloud Hypervisor gave it and Kata Containers' drivers expect.
//!
//! | question | module |
//! |---|---|
//! | who may listen at a path, and what if a socket is there already? | [`socket`] |
//! | where does a request end, and may its head be read? | `framing` |
//! | how do descriptors and time limits come to a request? | `transport` |
//! | who closes descriptors that nobody took? | `passed` |
//! | which connections are there, and when do they end? | [`server`] |
//! | which request is for whom? | `routes` |
//! | what is done with it? | `handle` |
//! | what does a reply look like, to the byte? | `reply` |
//! | how does a reply go on as events happen? | `body` |
//!
//! One thread, `api`, serves all connections and never works on the machine: it hands commands to the core and answers
//! `vmm.ping` and `vm.info` from what was published last. Parsing and framing are hyper's, on a runtime of this thread alone.
//! Together they add 0.8 MB to an optimized executable; from exec to the first reply takes 1.5 ms, and the process then has
//! 2.7 MB resident. A process that does not call [`Server::start`] has no such thread and touches none of that code.
//!
//! The core's side, in this order: [`crate::channel::channel`]; [`Server::start`], once the signals that the process handles
//! are blocked; [`crate::info::Published::set`] and `update` before each reply that a client may follow with vm.info; at the
//! end, drop the inbox and the replies that are open, then [`Server::close`].

mod body;
mod framing;
mod handle;
mod passed;
mod reply;
mod routes;
pub mod server;
pub mod socket;
mod transport;

pub use handle::DOCUMENT;
pub use server::{Limits, ServeError, Server};
pub use socket::{ListenError, Listening};
