//! What this machine offers beside its PCI functions: kernel, memory, device nodes. Read, never changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::io::Errno;

use crate::host::limits::{Memlock, memlock};

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surroundings {
    /// The kernel's release, as `uname -r` prints it.
    pub kernel: String,
    /// The limit on locked memory of whoever runs this.
    pub memlock: Memlock,
    /// Pools of huge pages, by bytes in a page.
    pub huge_pages: BTreeMap<u64, Pool>,
    /// Device nodes that cannot be opened for reading and writing, with the reason.
    pub closed: Vec<(PathBuf, Errno)>,
}

/// Huge pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pool {
    /// Pages.
    pub total: u64,
    /// Pages that nobody uses.
    pub free: u64,
}

impl Surroundings {
    /// Of this machine, for the use of IOMMU groups `groups`.
    #[must_use]
    pub fn read(sysfs: &Path, dev: &Path, groups: &[u32]) -> Self {
        let mut nodes = vec![dev.join("kvm"), dev.join("vfio/vfio")];
        nodes.extend(groups.iter().map(|group| dev.join(format!("vfio/{group}"))));
        let closed = |path: PathBuf| Some((access(&path, Access::READ_OK | Access::WRITE_OK).err()?, path));
        Self {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            memlock: memlock(),
            huge_pages: huge_pages(sysfs),
            closed: nodes.into_iter().filter_map(closed).map(|(errno, path)| (path, errno)).collect(),
        }
    }

    /// Version and patch level of the kernel; `None` when its release begins with no numbers.
    #[must_use]
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.kernel.split(|char: char| !char.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

fn huge_pages(sysfs: &Path) -> BTreeMap<u64, Pool> {
    let Ok(entries) = fs::read_dir(sysfs.join("kernel/mm/hugepages")) else { return BTreeMap::new() };
    let pool = |path: PathBuf| {
        let kib: u64 = path.file_name()?.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count = |name: &str| fs::read_to_string(path.join(name)).ok()?.trim().parse().ok();
        Some((kib.checked_mul(1024)?, Pool { total: count("nr_hugepages")?, free: count("free_hugepages")? }))
    };
    entries.flatten().filter_map(|entry| pool(entry.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_and_closed_nodes_are_found() {
        let root = tempfile::tempdir().unwrap();
        for (size, total, free) in [("2048", "512", "500"), ("1048576", "8", "0"), ("x", "1", "1")] {
            let pool = root.path().join(format!("kernel/mm/hugepages/hugepages-{size}kB"));
            fs::create_dir_all(&pool).unwrap();
            fs::write(pool.join("nr_hugepages"), format!("{total}\n")).unwrap();
            fs::write(pool.join("free_hugepages"), format!("{free}\n")).unwrap();
        }
        fs::create_dir_all(root.path().join("vfio")).unwrap();
        fs::write(root.path().join("kvm"), "").unwrap();
        fs::write(root.path().join("vfio/7"), "").unwrap();
        let found = Surroundings::read(root.path(), root.path(), &[7, 8]);
        assert_eq!(found.huge_pages.get(&(2 << 20)), Some(&Pool { total: 512, free: 500 }));
        assert_eq!(found.huge_pages.len(), 2);
        let closed = ["vfio/vfio", "vfio/8"].map(|name| (root.path().join(name), Errno::NOENT));
        assert_eq!(found.closed, closed);
        assert!(found.version().is_some(), "{}", found.kernel);
    }
}
