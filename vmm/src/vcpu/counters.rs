//! How often vCPUs left the guest, and why. Each vCPU has counters of its own, so counting costs no shared cache line.

use std::sync::atomic::{AtomicU64, Ordering};

/// A reason to leave the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Read of a port, configuration ports left out.
    PortRead,
    /// Write of a port, configuration ports left out.
    PortWrite,
    /// Read of configuration space, by ECAM or by ports.
    ConfigRead,
    /// Write of configuration space, by ECAM or by ports (the address latch included).
    ConfigWrite,
    /// Read of a BAR or of memory where nothing is.
    MemoryRead,
    /// Write of a BAR or of memory where nothing is.
    MemoryWrite,
}

/// All reasons with the name that a table shows.
pub const NAMES: [(Count, &str); 6] = [
    (Count::PortRead, "port reads"),
    (Count::PortWrite, "port writes"),
    (Count::ConfigRead, "configuration reads"),
    (Count::ConfigWrite, "configuration writes"),
    (Count::MemoryRead, "memory reads"),
    (Count::MemoryWrite, "memory writes"),
];

/// One vCPU's counters.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Counters([AtomicU64; NAMES.len()]);

impl Counters {
    /// One more.
    pub fn count(&self, reason: Count) {
        if let Some(counter) = self.0.get(reason as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many so far.
    #[must_use]
    pub fn get(&self, reason: Count) -> u64 {
        self.0.get(reason as usize).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}
