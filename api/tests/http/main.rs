//! The HTTP API as its clients see it: bytes on a unix socket, in front of a core that has no machine.

#[cfg(test)]
mod core;
#[cfg(test)]
mod framing;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod kata;
#[cfg(test)]
mod life;
#[cfg(test)]
mod wire;
