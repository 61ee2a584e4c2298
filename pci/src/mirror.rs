//! A copy of a function's configuration space that guests read without an exit.
//!
//! Whoever owns a register stores it here in the same step in which it changes, before any interrupt that tells of the
//! change. A byte has one owner: the register store, the BARs, or the interrupts; so no two of them need a common lock.

use crate::access::{Lanes, Reg};

/// The copy: 4 KiB, all of them 0 before the first store.
pub trait Mirror: Send + Sync {
    /// Puts the carried bytes of `value` into dword `reg`. Readers see each byte as it was before or as it is.
    fn store(&self, reg: Reg, lanes: Lanes, value: u32);
}
