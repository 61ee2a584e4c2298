//! A copy of a function's configuration space that guests read without an exit.
//!
//! Whoever owns a register stores it here in the same step in which it changes, before any interrupt that tells of the
//! change. A byte has one owner: the register store, the BARs, or the interrupts; so no two of them need a common lock.
//! Registers that a function keeps beside these are named when its mirror begins ([`crate::emulated::Emulated::mirror_beside`]).

use std::sync::Arc;

use crate::access::{CONVENTIONAL_SPACE, Lanes, Reg};

/// The copy: 4 KiB, all of them 0 before the first store.
pub trait Mirror: Send + Sync {
    /// Puts the carried bytes of `value` into dword `reg`. Readers see each byte as it was before or as it is.
    fn store(&self, reg: Reg, lanes: Lanes, value: u32);
}

/// A mirror of a function on a conventional bus, which carries less of its configuration space: ones behind that.
pub(crate) struct Conventional(Arc<dyn Mirror>);

impl Conventional {
    /// Puts the ones into `mirror`.
    pub(crate) fn begin(mirror: Arc<dyn Mirror>) -> Arc<dyn Mirror> {
        let beyond = Reg::all().filter(|reg| reg.offset() >= CONVENTIONAL_SPACE);
        beyond.for_each(|reg| mirror.store(reg, Lanes::ALL, u32::MAX));
        Arc::new(Self(mirror))
    }
}

impl Mirror for Conventional {
    fn store(&self, reg: Reg, lanes: Lanes, value: u32) {
        if reg.offset() < CONVENTIONAL_SPACE {
            self.0.store(reg, lanes, value);
        }
    }
}
