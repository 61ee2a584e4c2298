//! Counts what passed through a disk or an interface in one direction, for as long as the host's side of it is open.

use std::sync::atomic::{AtomicU64, Ordering};

/// Requests or packets, and their bytes. Lies in cache lines of its own: directions are counted by different threads.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Traffic {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Traffic {
    /// One more passed.
    pub(super) fn add(&self, bytes: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// How many passed.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}
