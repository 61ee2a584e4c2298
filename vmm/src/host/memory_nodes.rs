//! Reads the host's memory nodes: processors, memory and distances (linux: Documentation/admin-guide/mm/numaperf.rst,
//! drivers/base/node.c).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::tree::HostMemoryNode;
use crate::files;

/// The nodes below `sysfs`, by number; none where the kernel was built without them. What a node does not tell is empty.
#[must_use]
pub fn scan(sysfs: &Path) -> BTreeMap<u32, HostMemoryNode> {
    let folder = sysfs.join("devices/system/node");
    let Ok(entries) = fs::read_dir(&folder) else { return BTreeMap::new() };
    let number = |name: &str| name.strip_prefix("node")?.parse::<u32>().ok();
    let mut ids: Vec<u32> = entries.flatten().filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    ids.sort_unstable();
    let read = |id: u32, name: &str| files::text(&folder.join(format!("node{id}/{name}")), files::ATTRIBUTE).unwrap_or_default();
    let node = |id: u32| HostMemoryNode {
        cpus: read(id, "cpulist").parse().unwrap_or_default(),
        memory: total(&read(id, "meminfo")).unwrap_or(0),
        // One column for each node that is online; these are the nodes that have a folder.
        distances: ids.iter().copied().zip(read(id, "distance").split_ascii_whitespace().map_while(|n| n.parse().ok())).collect(),
    };
    ids.iter().map(|id| (*id, node(*id))).collect()
}

/// Bytes that stand behind `MemTotal` in lines such as `Node 0 MemTotal:       24737044 kB`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().nth_back(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_memory_and_distances_of_each_node_are_read() {
        let sysfs = tempfile::tempdir().unwrap();
        let put = |node: &str, files: [(&str, &str); 3]| {
            let folder = sysfs.path().join("devices/system/node").join(node);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in files {
                fs::write(folder.join(name), text).unwrap();
            }
        };
        put(
            "node0",
            [("cpulist", "0-3\n"), ("distance", "10 21\n"), ("meminfo", "Node 0 MemTotal:   2048 kB\nNode 0 MemFree: 1 kB\n")],
        );
        // A node that appeared later has a gap before it; one that is broken is there without what it does not tell.
        put("node2", [("cpulist", "many"), ("distance", "21 ten"), ("meminfo", "")]);
        put("power", [("cpulist", ""), ("distance", ""), ("meminfo", "")]);
        let nodes = scan(sysfs.path());
        assert_eq!(nodes.keys().copied().collect::<Vec<_>>(), [0, 2]);
        assert_eq!((nodes[&0].cpus.to_string(), nodes[&0].memory), ("0-3".to_owned(), 2 << 20));
        assert_eq!(nodes[&0].distances, BTreeMap::from([(0, 10), (2, 21)]));
        assert_eq!((nodes[&2].cpus.is_empty(), nodes[&2].memory), (true, 0));
        assert_eq!(nodes[&2].distances, BTreeMap::from([(0, 21)]));
        assert_eq!(scan(Path::new("/nowhere")), BTreeMap::new());
    }
}
