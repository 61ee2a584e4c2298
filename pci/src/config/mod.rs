//! What a register keeps of a write: configuration space as a table of masks.

mod space;

pub use space::{Change, ConfigSpace, RegDef};
