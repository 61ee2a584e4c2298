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

#[cfg(any(test, feature = "testing"))]
pub use fake::FakeMirror;

#[cfg(any(test, feature = "testing"))]
mod fake {
    use std::sync::{Mutex, PoisonError};

    use super::Mirror;
    use crate::access::{Access, Lanes, Reg};

    /// A copy in memory.
    #[derive(Debug)]
    pub struct FakeMirror(Mutex<Vec<u32>>);

    impl Default for FakeMirror {
        fn default() -> Self {
            Self(Mutex::new(vec![0; 1024]))
        }
    }

    impl FakeMirror {
        /// What a guest reads.
        #[must_use]
        pub fn read(&self, reg: Reg) -> u32 {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get(reg.index()).copied().unwrap_or(0)
        }
    }

    impl Mirror for FakeMirror {
        fn store(&self, reg: Reg, lanes: Lanes, value: u32) {
            if let Some(dword) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(reg.index()) {
                *dword = Access { reg, lanes }.merge(*dword, value);
            }
        }
    }
}
