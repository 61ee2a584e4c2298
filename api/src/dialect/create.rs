//! Reads vm.create: a whole machine.

use std::num::NonZeroU16;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::device::DeviceBody;
use super::disk::DiskBody;
use super::json::{Notes, bad, read, refused};
use super::net::NetBody;
use super::nodes::{self, NodeBody};
use super::small::{FsBody, VsockBody, missing, no_iommu, no_place};
use super::zone::{self, ZoneBody};
use crate::config::flags::FlagError;
use crate::config::{
    BalloonConfig, CpuConfig, CpuTopology, HotPlugMethod, HugePageSize, KernelConfig, MemoryConfig, MemoryError, OutputConfig,
    Payload, RngConfig, Size, VmConfig,
};
use crate::error::ApiError;

pub(super) const WHAT: &str = "vm.create";

/// Entries of a list, far more than any hierarchy has room for.
const MOST: usize = 4096;

/// The port of the debug console; the dialect lets a client choose it, Banyan does not.
const DEBUG_CONSOLE_PORT: u64 = 0xE9;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Body {
    payload: Option<PayloadBody>,
    cpus: Option<CpusBody>,
    memory: Option<MemoryBody>,
    disks: Option<Vec<DiskBody>>,
    net: Option<Vec<NetBody>>,
    fs: Option<Vec<FsBody>>,
    devices: Option<Vec<DeviceBody>>,
    vsock: Option<VsockBody>,
    rng: Option<RngBody>,
    balloon: Option<BalloonBody>,
    serial: Option<ConsoleBody>,
    console: Option<ConsoleBody>,
    debug_console: Option<ConsoleBody>,
    platform: Option<PlatformBody>,
    iommu: Option<bool>,
    watchdog: Option<bool>,
    pvpanic: Option<bool>,
    landlock_enable: Option<bool>,
    banyan: Option<String>,
    pmem: Option<Vec<Value>>,
    user_devices: Option<Vec<Value>>,
    vdpa: Option<Vec<Value>>,
    generic_vhost_user: Option<Vec<Value>>,
    rate_limit_groups: Option<Vec<Value>>,
    numa: Option<Vec<NodeBody>>,
    tpm: Option<Value>,
    rtc: Option<Value>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct PayloadBody {
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
    cmdline: Option<String>,
    firmware: Option<PathBuf>,
    igvm: Option<PathBuf>,
    mrconfigid: Option<String>,
    host_data: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct CpusBody {
    boot_vcpus: u32,
    max_vcpus: Option<u32>,
    topology: Option<TopologyBody>,
    max_phys_bits: Option<u8>,
    kvm_hyperv: Option<bool>,
    nested: Option<bool>,
    features: Option<Map<String, Value>>,
    affinity: Option<Vec<Value>>,
    core_scheduling: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct TopologyBody {
    threads_per_core: NonZeroU16,
    cores_per_die: NonZeroU16,
    dies_per_package: NonZeroU16,
    packages: NonZeroU16,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct MemoryBody {
    size: u64,
    shared: Option<bool>,
    hugepages: Option<bool>,
    hugepage_size: Option<u64>,
    prefault: Option<bool>,
    hotplug_size: Option<u64>,
    hotplugged_size: Option<u64>,
    hotplug_method: Option<String>,
    zones: Option<Vec<ZoneBody>>,
    mergeable: Option<bool>,
    // The host's own policy decides.
    #[serde(rename = "thp")]
    _thp: Option<bool>,
    #[serde(rename = "reserve")]
    _reserve: Option<bool>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct RngBody {
    src: Option<PathBuf>,
    iommu: Option<bool>,
    pci_device_id: Option<u8>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct BalloonBody {
    size: u64,
    deflate_on_oom: Option<bool>,
    free_page_reporting: Option<bool>,
    iommu: Option<bool>,
    statistics: Option<bool>,
    pci_device_id: Option<u8>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct ConsoleBody {
    mode: Mode,
    file: Option<PathBuf>,
    iobase: Option<u64>,
    iommu: Option<bool>,
    socket: Option<PathBuf>,
    pci_device_id: Option<u8>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Mode {
    Off,
    Null,
    Tty,
    File,
    Pty,
    Socket,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct PlatformBody {
    tdx: Option<bool>,
    sev_snp: Option<bool>,
    iommu_segments: Option<Vec<u16>>,
    serial_number: Option<String>,
    uuid: Option<String>,
    oem_strings: Option<Vec<String>>,
    // All is on segment 0.
    #[serde(rename = "num_pci_segments")]
    _num_pci_segments: Option<u16>,
    #[serde(rename = "iommu_address_width")]
    _iommu_address_width: Option<u8>,
}

/// The body of vm.create. What it cannot say, and what its text for the hierarchy does not, is taken from `base`.
pub fn create(body: &[u8], base: &VmConfig, notes: &Notes) -> Result<VmConfig, ApiError> {
    let body: Body = read(WHAT, body, notes)?;
    body.refuse_unsupported(notes)?;
    let mut config = base.clone();
    config.payload = Some(payload(body.payload)?);
    if let Some(cpus) = body.cpus {
        cpus.put(&mut config, notes)?;
    }
    match body.memory {
        Some(memory) => memory.put(&mut config, notes)?,
        None => config.memory = MemoryConfig::default(),
    }
    config.disks = list("disks", body.disks, |disk: DiskBody| disk.config(WHAT))?;
    config.nets = list("net", body.net, |net: NetBody| net.config(WHAT))?;
    config.devices = list("devices", body.devices, |device: DeviceBody| device.config(WHAT))?;
    config.filesystems = list("fs", body.fs, |folder: FsBody| folder.config(WHAT))?;
    config.vsock = body.vsock.map(|vsock| vsock.config(WHAT)).transpose()?;
    if let Some(rng) = body.rng {
        no_iommu(WHAT, "rng.iommu", rng.iommu)?;
        no_place(WHAT, "rng.pci_device_id", rng.pci_device_id)?;
        config.rng = Some(RngConfig { source: rng.src.unwrap_or_else(|| "/dev/urandom".into()) });
    }
    if let Some(balloon) = &body.balloon {
        no_iommu(WHAT, "balloon.iommu", balloon.iommu)?;
        no_place(WHAT, "balloon.pci_device_id", balloon.pci_device_id)?;
        if balloon.statistics == Some(true) {
            notes.unmet(
                WHAT,
                "balloon.statistics",
                "the guest is not asked for any; vm.info tells how much memory it has given back",
            );
        }
    }
    config.balloon = body.balloon.map(|balloon| BalloonConfig {
        size: Size(balloon.size),
        deflate_on_oom: balloon.deflate_on_oom.unwrap_or_default(),
        free_page_reporting: balloon.free_page_reporting.unwrap_or_default(),
    });
    config.serial = output("serial", body.serial)?;
    config.console = output("console", body.console)?;
    if let Some(console) = body.debug_console {
        match console.iobase {
            None | Some(DEBUG_CONSOLE_PORT) => {}
            Some(port) => return Err(refused(WHAT, "debug_console.iobase", &format!("port {port:#x} is not possible; 0xe9 is"))),
        }
        let on = console.mode != Mode::Off;
        config.debug_console = on.then(|| output("debug_console", Some(console))).transpose()?;
    }
    config.watchdog = body.watchdog.unwrap_or_default();
    config.panic_port = body.pvpanic.unwrap_or_default();
    if let Some(numa) = nodes::read(body.numa.unwrap_or_default(), &config.memory)? {
        config.numa = numa;
    }
    if let Some(pcie) = body.banyan {
        config.pcie = base.pcie.with(&pcie).map_err(|error: FlagError| bad(WHAT, &error.to_string()))?;
    }
    Ok(config)
}

fn list<B, C>(key: &str, bodies: Option<Vec<B>>, config: impl Fn(B) -> Result<C, ApiError>) -> Result<Vec<C>, ApiError> {
    let bodies = bodies.unwrap_or_default();
    few(key, bodies.len())?;
    bodies.into_iter().map(config).collect()
}

/// A list with more than [`MOST`] entries is refused before anything is made of it: everything may have to do with everything.
pub(super) fn few(key: &str, count: usize) -> Result<(), ApiError> {
    if count > MOST {
        return Err(refused(WHAT, key, &format!("{count} entries are more than a machine can have; give at most {MOST}")));
    }
    Ok(())
}

impl Body {
    fn refuse_unsupported(&self, notes: &Notes) -> Result<(), ApiError> {
        no_iommu(WHAT, "iommu", self.iommu)?;
        let lists = [
            ("pmem", &self.pmem),
            ("user_devices", &self.user_devices),
            ("vdpa", &self.vdpa),
            ("generic_vhost_user", &self.generic_vhost_user),
            ("rate_limit_groups", &self.rate_limit_groups),
        ];
        for (key, list) in lists {
            if list.as_ref().is_some_and(|list| !list.is_empty()) {
                return Err(refused(WHAT, key, "it is not supported"));
            }
        }
        for (key, device) in [("tpm", &self.tpm), ("rtc", &self.rtc)] {
            if device.is_some() {
                return Err(refused(WHAT, key, "it is not supported"));
            }
        }
        if self.landlock_enable == Some(true) {
            notes.unmet(WHAT, "landlock_enable", "Banyan does not confine itself by Landlock");
        }
        let Some(platform) = &self.platform else { return Ok(()) };
        for (key, on) in [("platform.tdx", platform.tdx), ("platform.sev_snp", platform.sev_snp)] {
            if on == Some(true) {
                return Err(refused(WHAT, key, "confidential guests are not supported"));
            }
        }
        if platform.iommu_segments.as_ref().is_some_and(|segments| !segments.is_empty()) {
            no_iommu(WHAT, "platform.iommu_segments", Some(true))?;
        }
        let strings = [
            ("platform.serial_number", platform.serial_number.is_some()),
            ("platform.uuid", platform.uuid.is_some()),
            ("platform.oem_strings", platform.oem_strings.as_ref().is_some_and(|strings| !strings.is_empty())),
        ];
        for (key, _) in strings.into_iter().filter(|(_, there)| *there) {
            notes.ignored(WHAT, key);
        }
        Ok(())
    }
}

fn payload(body: Option<PayloadBody>) -> Result<Payload, ApiError> {
    let body = body.ok_or_else(|| missing(WHAT, "payload"))?;
    for (key, there) in [
        ("payload.mrconfigid", body.mrconfigid.is_some()),
        ("payload.host_data", body.host_data.is_some()),
        ("payload.igvm", body.igvm.is_some()),
    ] {
        if there {
            return Err(refused(WHAT, key, "confidential guests are not supported"));
        }
    }
    if body.kernel.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return Err(refused(WHAT, "payload.kernel", "it names no file; give a path"));
    }
    match (body.kernel, body.firmware) {
        (Some(_), Some(_)) => Err(refused(WHAT, "payload.firmware", "a kernel is given as well; leave out one of the two")),
        (None, None) => Err(bad(WHAT, "neither `payload.kernel` nor `payload.firmware` is given")),
        (None, Some(firmware)) => Ok(Payload::Firmware(firmware)),
        (Some(path), None) => Ok(Payload::Kernel(KernelConfig {
            path,
            initramfs: body.initramfs,
            cmdline: body.cmdline.unwrap_or_default(),
            load_address: None,
        })),
    }
}

impl CpusBody {
    fn put(self, config: &mut VmConfig, notes: &Notes) -> Result<(), ApiError> {
        let (boot, most) = (self.boot_vcpus, self.max_vcpus.unwrap_or(self.boot_vcpus));
        let count = |key, count| match u8::try_from(count) {
            Ok(count @ 1..) => Ok(count),
            _ => Err(refused(WHAT, key, &format!("{count} processors are not possible; 1 to 255 are"))),
        };
        let boot = count("cpus.boot_vcpus", boot)?;
        let max = count("cpus.max_vcpus", most)?;
        if max < boot {
            return Err(refused(WHAT, "cpus.max_vcpus", &format!("{max} is less than the {boot} processors at the start")));
        }
        let topology = self.topology.map(|topology| CpuTopology {
            threads_per_core: topology.threads_per_core,
            cores_per_die: topology.cores_per_die,
            dies_per_package: topology.dies_per_package,
            packages: topology.packages,
        });
        if let Some(room) = topology.map(|topology| topology.processors()).filter(|room| *room < u64::from(max)) {
            let why = format!("threads, cores, dies and packages make {room} processors, but {max} are asked for");
            return Err(refused(WHAT, "cpus.topology", &why));
        }
        if self.kvm_hyperv == Some(true) {
            return Err(refused(WHAT, "cpus.kvm_hyperv", "it is not supported"));
        }
        if self.max_phys_bits.is_some_and(|bits| !(36..=52).contains(&bits)) {
            return Err(refused(WHAT, "cpus.max_phys_bits", "physical addresses have 36 to 52 bits"));
        }
        if self.nested == Some(false) {
            notes.unmet(WHAT, "cpus.nested", "processors show what the host's have, virtualization too");
        }
        if self.affinity.is_some_and(|affinity| !affinity.is_empty()) {
            notes.unmet(WHAT, "cpus.affinity", "processors run where the host likes, or where `numa` with `host-node` says");
        }
        if self.core_scheduling.is_some_and(|mode| mode != "Off") {
            notes.unmet(WHAT, "cpus.core_scheduling", "the host decides what shares a core");
        }
        for (feature, wanted) in self.features.into_iter().flatten() {
            if !matches!(wanted, Value::Null | Value::Bool(false)) {
                notes.unmet(WHAT, &format!("cpus.features.{feature}"), "processors get no feature by its name");
            }
        }
        config.cpus = CpuConfig { count: boot, max: (max > boot).then_some(max), topology, ..CpuConfig::default() };
        config.max_physical_bits = self.max_phys_bits;
        Ok(())
    }
}

impl MemoryBody {
    fn put(self, config: &mut VmConfig, notes: &Notes) -> Result<(), ApiError> {
        let zones = zone::read(self.zones, self.size, self.shared, notes)?;
        if self.hotplugged_size.is_some_and(|size| size > 0) {
            let why =
                "no memory has come before the start; add it to `memory.size`, or give `memory.hotplug_size` and call vm.resize";
            return Err(refused(WHAT, "memory.hotplugged_size", why));
        }
        if self.mergeable == Some(true) {
            notes.ignored(WHAT, "memory.mergeable");
        }
        let method = match self.hotplug_method.as_deref() {
            None | Some("Acpi") => HotPlugMethod::Acpi,
            Some("VirtioMem") => HotPlugMethod::VirtioMem,
            Some(method) => {
                let why = format!("`{}` is not supported; use `Acpi` or `VirtioMem`", method.escape_debug());
                return Err(refused(WHAT, "memory.hotplug_method", &why));
            }
        };
        let size = Size(zones.size.unwrap_or(self.size));
        let refuse = |error: MemoryError| bad(WHAT, &error.to_string());
        if let (Some(page), Some(other)) = (self.hugepage_size, zones.hugepage_size)
            && page != other
        {
            let why = format!("the zones have {}, and memory is alike; leave it out", Size(other));
            return Err(refused(WHAT, "memory.hugepage_size", &why));
        }
        let large = self.hugepages.unwrap_or_default() || zones.hugepages;
        let hugepages = match (large, self.hugepage_size.or(zones.hugepage_size).map(Size)) {
            (false, _) => None,
            (true, None) => Some(config.memory.hugepages.unwrap_or(HugePageSize::TwoMib)),
            (true, Some(page)) if page == HugePageSize::TwoMib.size() => Some(HugePageSize::TwoMib),
            (true, Some(page)) if page == HugePageSize::OneGib.size() => Some(HugePageSize::OneGib),
            (true, Some(size)) => return Err(refuse(MemoryError::HugePageSize { size })),
        };
        if hugepages.is_some() && zones.file.is_some() {
            return Err(refused(WHAT, "memory.hugepages", &MemoryError::FileWithHugePages.to_string()));
        }
        if let Some(page) = hugepages.map(HugePageSize::size)
            && !size.bytes().is_multiple_of(page.bytes())
        {
            return Err(refuse(MemoryError::NotWholePages { size, page }));
        }
        let growth = self.hotplug_size.unwrap_or_default();
        if size.bytes().checked_add(growth).is_none() {
            return Err(refused(WHAT, "memory.hotplug_size", "together with `memory.size` it is more than 64 bits can count"));
        }
        let prefault = self.prefault.unwrap_or_default() || zones.prefault;
        config.memory = MemoryConfig {
            size,
            growth: Size(growth),
            method,
            shared: self.shared.unwrap_or_default() || zones.shared,
            file: zones.file,
            zones: zones.parts,
            hugepages,
            prefault,
            prefault_threads: config.memory.prefault_threads.filter(|_| prefault),
        };
        Ok(())
    }
}

fn output(key: &str, body: Option<ConsoleBody>) -> Result<OutputConfig, ApiError> {
    let Some(body) = body else { return Ok(OutputConfig::Off) };
    no_iommu(WHAT, &format!("{key}.iommu"), body.iommu)?;
    no_place(WHAT, &format!("{key}.pci_device_id"), body.pci_device_id)?;
    match (body.mode, body.file) {
        (Mode::Off | Mode::Null, _) => Ok(OutputConfig::Off),
        (Mode::Tty, _) => Ok(OutputConfig::Stdio),
        (Mode::File, Some(file)) => Ok(OutputConfig::File(file)),
        (Mode::File, None) => Err(missing(WHAT, &format!("{key}.file"))),
        (Mode::Pty, _) => Ok(OutputConfig::Pty(None)),
        (Mode::Socket, _) => body.socket.map(OutputConfig::Socket).ok_or_else(|| missing(WHAT, &format!("{key}.socket"))),
    }
}
