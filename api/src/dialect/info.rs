//! Writes vm.info: state, configuration and devices.
//!
//! One client parses all of the configuration and fails at a missing key; the other reads a few values. A section that is
//! there has all its keys. A key without a value is left out: null is not taken for every type.

use serde_json::{Map, Value, json};

use super::{disk, net, nodes, zone};
use crate::config::{DeviceConfig, DeviceKind, HotPlugMethod, HugePageSize, OutputConfig, Payload, VmConfig};
use crate::info::{BarInfo, DeviceInfo, Phase, Progress, VmInfo};

/// What is said of the width of addresses where it was not asked for: the dialect's own default.
pub(super) const PHYSICAL_BITS: u8 = 46;

/// The reply to vm.info.
#[must_use]
pub fn vm_info(info: &VmInfo) -> Value {
    let mut reply = json!({
        "state": state(info.phase),
        "phase": info.phase.to_string(),
        "config": config(&info.config),
        "memory_actual_size": info.memory.saturating_sub(info.balloon.get()),
        "device_tree": info.devices.iter().map(|device| (device.id.clone(), device_node(device))).collect::<Map<_, _>>(),
    });
    if let Some(map) = reply.as_object_mut() {
        disk::put(map, "progress", info.progress.as_ref().map(progress));
    }
    reply
}

/// The dialect knows four states. A machine is `Running` once vm.boot is answered.
const fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Created | Phase::Starting => "Created",
        Phase::Running | Phase::Stopping => "Running",
        Phase::Paused => "Paused",
        Phase::Stopped => "Shutdown",
    }
}

/// How far a long step is.
#[must_use]
pub fn progress(progress: &Progress) -> Value {
    let Progress { step, done, total } = progress;
    json!({ "step": step.to_string(), "done": done, "total": total, "percent": progress.percent() })
}

fn device_node(device: &DeviceInfo) -> Value {
    let mut node = json!({
        "id": device.id,
        "resources": [],
        "children": [],
        "kind": device.kind.to_string(),
        "pci_bdf": device.bdf.to_string(),
        "pci_path": device.path,
        "bars": device.bars.iter().map(bar).collect::<Vec<_>>(),
    });
    if let Some(map) = node.as_object_mut() {
        disk::put(map, "host_bdf", device.host.as_deref());
        disk::put(map, "port", device.port.as_deref());
        disk::put(map, "clique", device.clique);
    }
    node
}

fn bar(bar: &BarInfo) -> Value {
    let mut value = json!({ "bar": bar.bar, "size": bar.size, "guest": bar.guest, "dma": bar.dma });
    if let Some(map) = value.as_object_mut() {
        disk::put(map, "address", bar.address.map(|address| format!("{address:#x}")));
    }
    value
}

/// The configuration, as in the body of vm.create.
pub(super) fn config(config: &VmConfig) -> Value {
    let mut map = Map::new();
    let mut put = |key: &str, value: Option<Value>| disk::put(&mut map, key, value);
    put("cpus", Some(cpus(config)));
    put("memory", Some(memory(config)));
    put("numa", nodes::numa_body(&config.numa));
    put("payload", config.payload.as_ref().map(payload));
    put("disks", Some(config.disks.iter().map(disk::write).collect()));
    put("net", Some(config.nets.iter().map(net::write).collect()));
    put("devices", Some(config.devices.iter().filter_map(device).collect()));
    put("fs", Some(config.filesystems.iter().map(fs_body).collect()));
    put("vsock", config.vsock.as_ref().map(vsock_body));
    put("rng", config.rng.as_ref().map(|rng| without_iommu(json!({ "src": rng.source.to_string_lossy(), "pci_segment": 0 }))));
    put("balloon", config.balloon.as_ref().map(balloon));
    put("serial", Some(output(&config.serial)));
    put("console", Some(output(&config.console)));
    put("debug_console", config.debug_console.as_ref().map(output));
    put("platform", Some(json!({ "num_pci_segments": 1, "tdx": false, "sev_snp": false })));
    put("iommu", Some(false.into()));
    put("landlock_enable", Some(false.into()));
    put("watchdog", Some(config.watchdog.into()));
    put("pvpanic", Some(config.panic_port.into()));
    put("banyan", Some(config.pcie.to_string().into()));
    map.into()
}

fn cpus(config: &VmConfig) -> Value {
    let mut cpus = json!({
        "boot_vcpus": config.cpus.count,
        "max_vcpus": config.cpus.max.unwrap_or(config.cpus.count),
        "max_phys_bits": config.max_physical_bits.unwrap_or(PHYSICAL_BITS),
        "kvm_hyperv": false,
        "nested": true,
        "features": { "amx": false },
    });
    let topology = config.cpus.topology.map(|topology| {
        json!({
            "threads_per_core": topology.threads_per_core,
            "cores_per_die": topology.cores_per_die,
            "dies_per_package": topology.dies_per_package,
            "packages": topology.packages,
        })
    });
    if let Some(map) = cpus.as_object_mut() {
        disk::put(map, "topology", topology);
    }
    cpus
}

fn memory(config: &VmConfig) -> Value {
    let memory = &config.memory;
    let mut value = json!({
        "size": memory.size.bytes(),
        "shared": memory.shared,
        "hugepages": memory.hugepages.is_some(),
        "prefault": memory.prefault,
        "mergeable": false,
        "hotplug_method": match memory.method {
            HotPlugMethod::Acpi => "Acpi",
            HotPlugMethod::VirtioMem => "VirtioMem",
        },
        // Zero, too: a client takes a missing key for "cannot grow" and says nothing.
        "hotplug_size": config.memory.growth.bytes(),
    });
    if let Some(map) = value.as_object_mut() {
        disk::put(map, "hugepage_size", memory.hugepages.map(HugePageSize::size).map(|size| size.bytes()));
        disk::put(map, "zones", zone::body(memory));
    }
    value
}

fn payload(payload: &Payload) -> Value {
    match payload {
        Payload::Firmware(path) => json!({ "firmware": path.to_string_lossy() }),
        Payload::Kernel(kernel) => {
            let mut value = json!({ "kernel": kernel.path.to_string_lossy(), "cmdline": kernel.cmdline });
            if let Some(map) = value.as_object_mut() {
                disk::put(map, "initramfs", kernel.initramfs.as_ref().map(|path| path.to_string_lossy()));
            }
            value
        }
    }
}

/// A function of the host; the dialect's list has no others.
fn device(device: &DeviceConfig) -> Option<Value> {
    let DeviceKind::Vfio(vfio) = &device.kind else { return None };
    let mut value = without_iommu(json!({ "path": vfio.path.to_string_lossy(), "pci_segment": 0 }));
    if let Some(map) = value.as_object_mut() {
        disk::put(map, "id", device.id.as_deref());
        disk::put(map, "x_nv_gpudirect_clique", device.clique.map(|clique| clique.get()));
        disk::put(map, "banyan", Some(device.to_string()));
    }
    Some(value)
}

/// A shared folder in vm.info and in the body of vm.add-fs.
#[must_use]
pub fn fs_body(fs: &crate::config::FsConfig) -> Value {
    let mut value = json!({
        "tag": fs.tag,
        "socket": fs.socket.to_string_lossy(),
        "num_queues": fs.queues,
        "queue_size": fs.queue_size,
        "pci_segment": 0,
    });
    if let Some(map) = value.as_object_mut() {
        disk::put(map, "id", fs.id.as_deref());
    }
    value
}

/// The socket device in vm.info and in the body of vm.add-vsock.
#[must_use]
pub fn vsock_body(vsock: &crate::config::VsockConfig) -> Value {
    let mut value = without_iommu(json!({ "cid": vsock.cid, "socket": vsock.socket.to_string_lossy(), "pci_segment": 0 }));
    if let Some(map) = value.as_object_mut() {
        disk::put(map, "id", vsock.id.as_deref());
    }
    value
}

fn balloon(balloon: &crate::config::BalloonConfig) -> Value {
    json!({
        "size": balloon.size.bytes(),
        "deflate_on_oom": balloon.deflate_on_oom,
        "free_page_reporting": balloon.free_page_reporting,
    })
}

fn output(output: &OutputConfig) -> Value {
    without_iommu(match output {
        OutputConfig::Off => json!({ "mode": "Off" }),
        OutputConfig::Stdio => json!({ "mode": "Tty" }),
        OutputConfig::File(path) => json!({ "mode": "File", "file": path.to_string_lossy() }),
        OutputConfig::Pty(None) => json!({ "mode": "Pty" }),
        OutputConfig::Pty(Some(path)) => json!({ "mode": "Pty", "file": path.to_string_lossy() }),
        OutputConfig::Socket(path) => json!({ "mode": "Socket", "socket": path.to_string_lossy() }),
    })
}

/// A device as the dialect has it, which says that no IOMMU of the guest is before it.
fn without_iommu(mut device: Value) -> Value {
    if let Some(map) = device.as_object_mut() {
        disk::put(map, "iommu", Some(false));
    }
    device
}
