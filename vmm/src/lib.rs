//! (being written)
pub mod cli;
pub mod host;
pub mod replicate;
