//! What the host has: its hierarchy around the wanted devices ([`tree`]), read from sysfs ([`scan`]), judged before
//! anything is opened ([`check`]), and the limits of this process ([`limits`]).

pub mod check;
pub mod limits;
pub mod scan;
pub mod tree;

#[cfg(test)]
pub(crate) mod fake;

#[cfg(test)]
mod tests;
