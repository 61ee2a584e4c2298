//! What the host has: its hierarchy around the wanted devices ([`tree`]) with the ways that traffic takes ([`fabric`]), read
//! from sysfs ([`scan`], [`memory_nodes`]), judged before anything is opened ([`check`]), kept in files ([`recorded`]), and the
//! limits of this process ([`limits`]).

pub mod bars;
pub mod check;
pub mod fabric;
pub mod limits;
pub mod look;
pub mod memory_nodes;
pub mod recorded;
pub mod registers;
pub mod scan;
pub mod tree;

pub use look::{HostError, SYSFS, address, look, look_beside, look_in, wanted};

#[cfg(test)]
pub(crate) mod fake;

#[cfg(test)]
mod tests;
