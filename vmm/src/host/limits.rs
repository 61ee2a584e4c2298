//! How much memory this process may lock.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// CAP_IPC_LOCK (linux: include/uapi/linux/capability.h).
const IPC_LOCK: u32 = 14;

/// The limit on locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// RLIMIT_MEMLOCK in bytes; `None` when there is no limit.
    pub limit: Option<u64>,
    /// Whether CAP_IPC_LOCK lifts it.
    pub capable: bool,
}

/// Reads the limit of this process.
#[must_use]
pub fn memlock() -> Memlock {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    Memlock { limit: getrlimit(Resource::Memlock).current, capable: has_capability(&status, IPC_LOCK) }
}

fn has_capability(status: &str, capability: u32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_some_and(|set| set >> capability & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set_counts() {
        assert!(has_capability("Name:\tx\nCapPrm:\t0\nCapEff:\t000001ffffffffff\n", IPC_LOCK));
        assert!(!has_capability("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000003fff\n", IPC_LOCK));
        assert!(!has_capability("", IPC_LOCK));
    }
}
