//! What a register keeps of a write: configuration space as a table of masks.

mod builder;
mod space;
mod type0;
mod type1;

pub use builder::{BuildError, ConfigBuilder};
pub use space::{Change, ConfigSpace, RegDef};
pub use type0::Type0;
pub use type1::Type1;
