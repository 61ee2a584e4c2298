//! How far a machine can grow while it runs, and how its processors are arranged.

use std::num::NonZeroU16;

use super::size::Size;

/// What is set aside for processors and memory that come later. Nothing by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GrowthConfig {
    /// Processors at most, at least as many as at the start; `None` means that none come later.
    pub max_cpus: Option<u8>,
    /// Bytes of memory that may come beside those of the start. Address space only, nothing is committed.
    pub memory: Size,
}

/// Threads, cores, dies and packages. Their product is the largest number of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTopology {
    /// Threads in a core.
    pub threads_per_core: NonZeroU16,
    /// Cores in a die.
    pub cores_per_die: NonZeroU16,
    /// Dies in a package.
    pub dies_per_package: NonZeroU16,
    /// Packages.
    pub packages: NonZeroU16,
}

impl CpuTopology {
    /// Processors that it has room for.
    #[must_use]
    pub fn processors(&self) -> u64 {
        [self.threads_per_core, self.cores_per_die, self.dies_per_package, self.packages]
            .into_iter()
            .fold(1, |product, factor| product * u64::from(factor.get()))
    }
}
