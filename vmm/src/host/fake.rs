//! A made-up host for tests: a directory tree with the shape of sysfs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use pci::address::HostBdf;
use tempfile::TempDir;

/// PCI Express device types (PCIe 6.0 7.5.3.2).
pub const ENDPOINT: u8 = 0;
pub const ROOT_PORT: u8 = 4;
pub const UPSTREAM: u8 = 5;
pub const DOWNSTREAM: u8 = 6;

/// A made-up sysfs; the directory goes with it.
pub struct FakeHost {
    root: TempDir,
}

/// One made-up function. Defaults: an endpoint at 16 GT/s x16 that runs at 8 GT/s x8, bound to vfio-pci.
#[derive(Clone)]
pub struct FakeFunction<'a> {
    pub vendor: u16,
    pub device: u16,
    pub class: u32,
    pub express: Option<u8>,
    pub bridge: bool,
    pub group: Option<u32>,
    pub driver: Option<&'a str>,
    pub config_len: usize,
    pub numa_node: i32,
    /// ACS capability and control.
    pub acs: Option<(u16, u16)>,
    /// Whether ATS is on.
    pub ats: Option<bool>,
    /// Total and enabled virtual functions.
    pub sriov: Option<(u16, u16)>,
    /// Lines of `resource`.
    pub resource: &'a str,
}

impl Default for FakeFunction<'_> {
    fn default() -> Self {
        Self {
            vendor: 0x10DE,
            device: 0x2330,
            class: 0x03_0200,
            express: Some(ENDPOINT),
            bridge: false,
            group: Some(1),
            driver: Some("vfio-pci"),
            config_len: 4096,
            numa_node: 0,
            acs: None,
            ats: None,
            sriov: None,
            resource: "",
        }
    }
}

impl FakeFunction<'_> {
    /// A PCI Express port of type `express`.
    pub fn port(express: u8) -> Self {
        Self {
            vendor: 0x1000,
            device: 0xC030,
            class: 0x06_0400,
            express: Some(express),
            bridge: true,
            driver: Some("pcieport"),
            ..Self::default()
        }
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; self.config_len];
        let mut put = |at: usize, bytes: &[u8]| {
            for (slot, byte) in config.iter_mut().skip(at).zip(bytes) {
                *slot = *byte;
            }
        };
        put(0x00, &self.vendor.to_le_bytes());
        put(0x02, &self.device.to_le_bytes());
        put(0x0E, &[u8::from(self.bridge)]);
        if let Some(express) = self.express {
            put(0x06, &[0x10]);
            put(0x34, &[0x40]);
            // Power management first, then PCI Express.
            put(0x40, &[0x01, 0x60, 0x03, 0x00]);
            put(0x60, &[0x10, 0x00, 0x02 | express << 4, 0x00]);
            // 512 bytes of 1024 supported, 4096-byte reads; 16 GT/s x16 at 8 GT/s x8; 32- and 64-bit AtomicOp completion.
            put(0x64, &3u32.to_le_bytes());
            put(0x68, &(2u32 << 5 | 5 << 12).to_le_bytes());
            put(0x6C, &(4u32 | 16 << 4).to_le_bytes());
            put(0x70, &((3u32 | 8 << 4) << 16).to_le_bytes());
            put(0x84, &(3u32 << 7 | 1 << 6).to_le_bytes());
            put(0x88, &0x40u16.to_le_bytes());
            self.extended(&mut put);
        }
        config
    }

    /// Extended capabilities, each at its place and with the next place in its header.
    fn extended(&self, put: &mut impl FnMut(usize, &[u8])) {
        let acs = self.acs.map(|(capability, control)| (0x0Du16, vec![capability, control]));
        let ats = self.ats.map(|on| (0x0F, vec![0x20, if on { 0x8000 } else { 0 }]));
        let sriov = self.sriov.map(|(total, enabled)| (0x10, vec![0, 0, u16::from(enabled > 0), 0, total, total, enabled]));
        let present: Vec<_> = [acs, ats, sriov].into_iter().flatten().collect();
        for (index, (id, words)) in present.iter().enumerate() {
            let at = 0x100 + 0x40 * index;
            let next = if index + 1 < present.len() { at + 0x40 } else { 0 };
            put(at, &(u32::from(*id) | 1 << 16 | u32::try_from(next).unwrap() << 20).to_le_bytes());
            words.iter().enumerate().for_each(|(word, value)| put(at + 4 + 2 * word, &value.to_le_bytes()));
        }
    }
}

impl FakeHost {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("bus/pci/devices")).unwrap();
        Self { root }
    }

    pub fn sysfs(&self) -> &Path {
        self.root.path()
    }

    /// Adds the last function of `path`, for example `pci0000:00/0000:00:01.0/0000:01:00.0`.
    pub fn add(&self, path: &str, function: &FakeFunction) -> HostBdf {
        let directory = self.root.path().join("devices").join(path);
        fs::create_dir_all(&directory).unwrap();
        let (_, name) = path.rsplit_once('/').unwrap();
        let put = |attribute: &str, text: String| fs::write(directory.join(attribute), text + "\n").unwrap();
        put("vendor", format!("{:#06x}", function.vendor));
        put("device", format!("{:#06x}", function.device));
        put("class", format!("{:#08x}", function.class));
        put("revision", "0xa1".into());
        put("subsystem_vendor", "0x10de".into());
        put("subsystem_device", "0x16c1".into());
        put("numa_node", function.numa_node.to_string());
        put("resource", function.resource.to_owned());
        if let Some((total, enabled)) = function.sriov {
            put("sriov_totalvfs", total.to_string());
            put("sriov_numvfs", enabled.to_string());
        }
        put("max_link_speed", "16.0 GT/s PCIe".into());
        put("max_link_width", "16".into());
        put("current_link_speed", "8.0 GT/s PCIe".into());
        put("current_link_width", "8".into());
        fs::write(directory.join("config"), function.config()).unwrap();
        symlink(&directory, self.link(name)).unwrap();
        if let Some(driver) = function.driver {
            let target = self.root.path().join("bus/pci/drivers").join(driver);
            fs::create_dir_all(&target).unwrap();
            symlink(target, directory.join("driver")).unwrap();
        }
        if let Some(group) = function.group {
            let target = self.root.path().join(format!("kernel/iommu_groups/{group}"));
            fs::create_dir_all(target.join("devices")).unwrap();
            symlink(&directory, target.join("devices").join(name)).unwrap();
            symlink(target, directory.join("iommu_group")).unwrap();
        }
        name.parse().unwrap()
    }

    /// Makes `function` a virtual function of `physical`.
    pub fn make_virtual(&self, function: HostBdf, physical: HostBdf) {
        symlink(self.link(&physical.to_string()), self.link(&function.to_string()).join("physfn")).unwrap();
    }

    /// Adds a NUMA node with one processor of the same number and 1 GiB.
    pub fn add_node(&self, node: u32, distances: &str) {
        let directory = self.root.path().join(format!("devices/system/node/node{node}"));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("cpulist"), format!("{node}\n")).unwrap();
        fs::write(directory.join("distance"), format!("{distances}\n")).unwrap();
        fs::write(directory.join("meminfo"), format!("Node {node} MemTotal: {} kB\n", 1 << 20)).unwrap();
    }

    /// The link in `bus/pci/devices`.
    pub fn link(&self, name: &str) -> PathBuf {
        self.root.path().join("bus/pci/devices").join(name)
    }
}
