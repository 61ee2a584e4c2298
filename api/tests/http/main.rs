//! The HTTP API as its clients see it: bytes on a unix socket, in front of a core that has no machine.

mod core;
mod hostile;
mod kata;
mod life;
mod wire;
