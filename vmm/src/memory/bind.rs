//! Makes parts of RAM come from given nodes of the host.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use api::config::MemoryPolicy;
use vm_memory::GuestMemoryMmap;

use super::{MemoryError, regions};
use crate::numa::Binding;

/// Sets where pages come from. To be called before RAM is touched; pages that are there stay where they are.
///
/// With huge pages of `huge_page` bytes, which the kernel sets aside for all nodes together, the pool of each node must hold
/// what is bound to it: a guest would otherwise be killed when it touches its memory.
pub fn bind(memory: &GuestMemoryMmap, bindings: &[Binding], huge_page: Option<u64>) -> Result<(), MemoryError> {
    if let Some(page) = huge_page {
        check_pools(bindings, page)?;
    }
    for binding in bindings {
        for region in regions(memory) {
            let start = binding.range.start.max(region.at);
            let end = binding.range.end.min(region.at + region.len);
            if start < end {
                let failed = |source| MemoryError::Bind { at: start, len: end - start, node: binding.node, source };
                set_policy(region.host + (start - region.at), end - start, binding.node, binding.policy).map_err(failed)?;
            }
        }
    }
    Ok(())
}

fn check_pools(bindings: &[Binding], page: u64) -> Result<(), MemoryError> {
    let mut needed: BTreeMap<u32, u64> = BTreeMap::new();
    for binding in bindings.iter().filter(|binding| binding.policy == MemoryPolicy::Bind) {
        *needed.entry(binding.node).or_default() += binding.range.len() / page;
    }
    for (node, needed) in needed {
        let pool = PathBuf::from(format!("/sys/devices/system/node/node{node}/hugepages/hugepages-{}kB", page >> 10));
        let free = std::fs::read_to_string(pool.join("free_hugepages")).ok().and_then(|text| text.trim().parse().ok());
        let free = free.unwrap_or(0);
        if free < needed {
            return Err(MemoryError::Pool { page_mib: page >> 20, needed, free, pool: pool.join("nr_hugepages") });
        }
    }
    Ok(())
}

/// mbind(2): `len` bytes of this process at `host` come from `node`.
fn set_policy(host: u64, len: u64, node: u32, policy: MemoryPolicy) -> io::Result<()> {
    const WORD: u32 = u64::BITS;
    let mut mask = vec![0u64; usize::try_from(node / WORD + 1).unwrap_or(1)];
    if let Some(word) = mask.last_mut() {
        *word = 1 << (node % WORD);
    }
    let mode = match policy {
        MemoryPolicy::Bind => libc::MPOL_BIND,
        MemoryPolicy::Preferred => libc::MPOL_PREFERRED,
    };
    // The kernel takes one bit less than it is told.
    let bits = u64::from(node / WORD + 1) * u64::from(WORD) + 1;
    // SAFETY: whatever the range is, where its pages come from changes neither content nor what is mapped. The mask has the bits
    // that the call reads, which are one less than `bits`.
    let done = unsafe { libc::syscall(libc::SYS_mbind, host, len, mode, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use arch::memory_map::Range;

    use super::*;
    use crate::memory::{Backing, create};

    const RAM: Range = Range { start: 0, end: 8 << 20 };

    /// The policy of each mapping of this process that covers an address, as /proc tells it.
    fn policy_at(address: u64) -> String {
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let start = |line: &str| u64::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok();
        let line = maps.lines().rfind(|line| start(line).is_some_and(|start| start <= address));
        line.unwrap().split_ascii_whitespace().nth(1).unwrap().to_owned()
    }

    #[test]
    fn each_part_of_ram_has_the_policy_of_its_node() {
        if !std::path::Path::new("/proc/self/numa_maps").exists() {
            eprintln!("this kernel has no memory policies");
            return;
        }
        let memory = create(&[RAM], Backing::default()).unwrap();
        let half = |start, policy| Binding { range: Range::sized(start, 4 << 20), node: 0, policy };
        bind(&memory, &[half(0, MemoryPolicy::Bind), half(4 << 20, MemoryPolicy::Preferred)], None).unwrap();
        let host = regions(&memory)[0].host;
        assert_eq!(policy_at(host), "bind:0");
        assert!(policy_at(host + (4 << 20)).starts_with("prefer"), "{}", policy_at(host + (4 << 20)));
    }

    #[test]
    fn a_node_that_does_not_exist_is_named() {
        let memory = create(&[RAM], Backing::default()).unwrap();
        for node in [63, 64, 1000, 4_000_000] {
            let error = bind(&memory, &[Binding { range: RAM, node, policy: MemoryPolicy::Bind }], None).unwrap_err();
            assert!(error.to_string().contains(&format!("host node {node} ")), "{error}");
        }
    }

    #[test]
    fn a_pool_of_huge_pages_that_its_node_does_not_have_is_named() {
        let memory = create(&[RAM], Backing::default()).unwrap();
        let huge = Binding { range: Range::sized(0, 1 << 50), node: 0, policy: MemoryPolicy::Bind };
        let error = bind(&memory, &[huge], Some(2 << 20)).unwrap_err().to_string();
        assert!(error.starts_with("536870912 huge pages of 2 MiB are needed, ") && error.contains("/node0/"), "{error}");
    }
}
