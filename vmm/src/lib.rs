//! (being written)
pub mod host;
pub mod replicate;
