//! What can be told about a machine without asking the thread that runs it.
//!
//! The core puts a new [`VmInfo`] into [`Published`] whenever a fact changes. Readers get the last one at once: the lock is
//! held for the time of copying a pointer, by both sides.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::config::VmConfig;
use crate::door::Door;
use crate::events::Events;
use crate::sync::lock;

/// A machine as it is at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmInfo {
    /// What it consists of, with what was added and without what was removed since it was created. Devices have their `id`.
    pub config: VmConfig,
    /// Where in its life it is.
    pub phase: Phase,
    /// A long step under way.
    pub progress: Option<Progress>,
    /// Bytes of memory that the guest has.
    pub memory: u64,
    /// Bytes of them that are in its balloon.
    pub balloon: Gauge,
    /// Devices and where the guest finds them.
    pub devices: Vec<DeviceInfo>,
}

/// A number that follows the guest without anybody being told.
#[derive(Debug, Clone, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    /// What `number` is, whenever it is asked for.
    #[must_use]
    pub const fn of(number: Arc<AtomicU64>) -> Self {
        Self(number)
    }

    /// The number at this moment.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for Gauge {
    /// Whether both follow the same.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gauge {}

/// Where in its life a machine is. No machine is no phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Checked and planned; its processors do not exist.
    Created,
    /// vm.boot is at work.
    Starting,
    /// The guest runs, or is held until memory is prepared.
    Running,
    /// Its processors are held.
    Paused,
    /// vm.shutdown, a guest's power-off or the end of the process is at work.
    Stopping,
    /// Its processors have ended; it can be booted again or deleted.
    Stopped,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        })
    }
}

/// How far a long step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is done.
    pub step: Step,
    /// Bytes that are done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

impl Progress {
    /// How much is done, 0 to 100.
    #[must_use]
    pub fn percent(&self) -> u8 {
        let (done, total) = (u128::from(self.done.min(self.total)), u128::from(self.total));
        (done * 100).checked_div(total).and_then(|percent| u8::try_from(percent).ok()).unwrap_or(100)
    }
}

/// Steps that can take longer than a client waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Guest memory is populated.
    Prefault,
    /// Guest memory is mapped for devices of the host.
    DmaMap,
    /// The kernel is read.
    Load,
    /// Guest memory is written down.
    Snapshot,
    /// Guest memory is read from a snapshot.
    Restore,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefault => "prefault",
            Self::DmaMap => "dma-map",
            Self::Load => "load",
            Self::Snapshot => "snapshot",
            Self::Restore => "restore",
        })
    }
}

/// A function's address as the guest numbers it, or a host's: `0000:04:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Segment.
    pub segment: u16,
    /// Bus.
    pub bus: u8,
    /// Device, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.segment, self.bus, self.device, self.function)
    }
}

impl std::str::FromStr for PciAddress {
    type Err = PciAddressError;

    /// With or without the segment: `0000:04:00.0` or `04:00.0`.
    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        let hex = |text: &str, digits: usize| {
            let whole = text.len() == digits && text.bytes().all(|digit| digit.is_ascii_hexdigit());
            whole.then(|| u16::from_str_radix(text, 16).ok()).flatten()
        };
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (segment, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
            let byte = |text, digits, most| u8::try_from(hex(text, digits)?).ok().filter(|number| *number <= most);
            Some(Self {
                segment: hex(segment, 4)?,
                bus: byte(bus, 2, u8::MAX)?,
                device: byte(device, 2, 31)?,
                function: byte(function, 1, 7)?,
            })
        };
        parse().ok_or_else(|| PciAddressError { text: text.to_owned() })
    }
}

/// No address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no address of a PCI function; write it as 0000:04:00.0")]
pub struct PciAddressError {
    text: String,
}

/// A device and where the guest finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, unique in the machine.
    pub id: String,
    /// What it is.
    pub kind: DeviceClass,
    /// Where the guest finds it. Before the guest has numbered its bus: as planned.
    pub bdf: PciAddress,
    /// Device numbers from the root bus down, as `04/00/01/00`: the address that does not depend on bus numbers. A function
    /// other than 0 is written `00.1`.
    pub path: String,
    /// The port or root complex that it hangs on.
    pub port: Option<String>,
    /// The host's function that it is.
    pub host: Option<String>,
    /// Peer-to-peer clique.
    pub clique: Option<u8>,
    /// Its memory BARs.
    pub bars: Vec<BarInfo>,
    /// What there is to say beside that, in a few words, such as its ids or its image.
    pub label: String,
}

/// A memory BAR and who reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarInfo {
    /// Its number; 6 is the expansion ROM.
    pub bar: u8,
    /// First address, while the guest reaches it.
    pub address: Option<u64>,
    /// Bytes.
    pub size: u64,
    /// How the guest reaches it: `direct`, in parts at least; `exits`; `hidden`.
    pub guest: &'static str,
    /// Whether other host functions reach it by DMA: `mapped`; `off`, as configured; `failed`; `unmapped`, since it is hidden;
    /// `emulated`, which none of them reaches.
    pub dma: &'static str,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    /// A function of the host.
    Vfio,
    /// Emulated, for tests.
    Stub,
    /// virtio-blk.
    Disk,
    /// virtio-net.
    Net,
    /// virtio-fs.
    Fs,
    /// virtio-vsock.
    Vsock,
    /// virtio-rng.
    Rng,
    /// virtio-balloon.
    Balloon,
    /// virtio-mem.
    Memory,
    /// virtio-console.
    Console,
    /// A watchdog.
    Watchdog,
}

impl fmt::Display for DeviceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vfio => "vfio",
            Self::Stub => "stub",
            Self::Disk => "disk",
            Self::Net => "net",
            Self::Fs => "fs",
            Self::Vsock => "vsock",
            Self::Rng => "rng",
            Self::Balloon => "balloon",
            Self::Memory => "mem",
            Self::Console => "console",
            Self::Watchdog => "watchdog",
        })
    }
}

/// A port that devices can hang on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// Its name.
    pub name: String,
    /// `root-port`, `downstream-port`, ...
    pub kind: String,
    /// Its own address in the guest.
    pub bdf: PciAddress,
    /// Devices can come and go while the guest runs.
    pub hot_plug: bool,
    /// Names of what hangs on it.
    pub devices: Vec<String>,
    /// Bytes of its window below 4 GiB.
    pub memory: u64,
    /// Bytes of its prefetchable window.
    pub prefetchable: u64,
    /// What the guest has enabled of access control, as lspci calls it; `None` for ports without it.
    pub access_control: Option<Vec<String>>,
}

/// Devices and ports of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// Devices, in the order of their addresses.
    pub devices: Vec<DeviceInfo>,
    /// Ports, in the order of their addresses.
    pub ports: Vec<PortInfo>,
    /// Root complexes.
    pub root_complexes: Vec<RootComplexInfo>,
    /// All functions as the guest sees them, parents before children.
    pub functions: Vec<FunctionInfo>,
}

/// A root complex of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootComplexInfo {
    /// Its name.
    pub name: String,
    /// Segment.
    pub segment: u16,
    /// Its root bus.
    pub bus: u8,
    /// The guest's memory node that it is near to.
    pub memory_node: Option<u32>,
}

/// What the registers of a function show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its name.
    pub name: String,
    /// Name of the port or root complex that it hangs on.
    pub on: String,
    /// Its address in the guest.
    pub bdf: PciAddress,
    /// `root-port`, `upstream-port`, `downstream-port`, `pcie-pci-bridge` or `endpoint`.
    pub kind: String,
    /// Vendor and device, `10de:2330`.
    pub ids: String,
    /// Subsystem vendor and subsystem; zeros when it has none.
    pub subsystem: String,
    /// Class, subclass and interface, `030200`.
    pub class: String,
    /// The most that its link can do, `32GT/s x16`.
    pub max_link: Option<String>,
    /// What its link does.
    pub link: Option<String>,
    /// Peer-to-peer clique.
    pub clique: Option<u8>,
    /// The host's function that it is.
    pub host: Option<String>,
}

/// What became of an error that was let happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// The device or port whose registers show it.
    pub recorded_at: String,
    /// The root port that was told, or why none was.
    pub reported_to: Result<String, String>,
}

/// Numbers that only grow, by device (or part of the machine) and name.
pub type Counters = BTreeMap<String, BTreeMap<String, u64>>;

/// The last state that the core made known. Copies show the same.
#[derive(Debug, Clone, Default)]
pub struct Published {
    last: Arc<Mutex<Option<Arc<VmInfo>>>>,
    events: Events,
    door: Door,
}

impl Published {
    /// No machine yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The last state; `None` when there is no machine.
    #[must_use]
    pub fn get(&self) -> Option<Arc<VmInfo>> {
        lock(&self.last).clone()
    }

    /// Makes a state known, or that there is no machine.
    pub fn set(&self, info: Option<VmInfo>) {
        let info = info.map(Arc::new);
        // Freed after the lock is.
        let old = std::mem::replace(&mut *lock(&self.last), info.clone());
        self.events.tell_difference(old.as_deref(), info.as_deref());
    }

    /// What new clients of the server that shows this come through.
    #[must_use]
    pub const fn door(&self) -> &Door {
        &self.door
    }

    /// Makes known how far a long step is, if that is news.
    pub fn set_progress(&self, progress: Option<Progress>) {
        if self.get().is_some_and(|info| info.progress != progress) {
            self.update(|info| info.progress = progress);
        }
    }

    /// Where what happens is told, beside what follows from the states themselves.
    #[must_use]
    pub const fn events(&self) -> &Events {
        &self.events
    }

    /// Changes the state, if there is a machine. For the core alone: of two that update at once one is lost.
    pub fn update(&self, change: impl FnOnce(&mut VmInfo)) {
        if let Some(info) = self.get() {
            let mut info = VmInfo::clone(&info);
            change(&mut info);
            self.set(Some(info));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_seen_by_every_copy_and_leaves_earlier_readers_alone() {
        let published = Published::new();
        published.update(|_| panic!("there is nothing to change"));
        assert_eq!(published.get(), None);
        let info = VmInfo {
            config: VmConfig::default(),
            phase: Phase::Created,
            progress: None,
            memory: 1,
            balloon: Gauge::default(),
            devices: Vec::new(),
        };
        published.set(Some(info));
        let (copy, before) = (published.clone(), published.get().unwrap());
        published.update(|info| info.phase = Phase::Running);
        assert_eq!((before.phase, copy.get().unwrap().phase), (Phase::Created, Phase::Running));
        published.set(None);
        assert_eq!(copy.get(), None);
    }

    #[test]
    fn addresses_are_written_as_linux_writes_them() {
        let address = PciAddress { segment: 0, bus: 4, device: 31, function: 7 };
        assert_eq!(address.to_string(), "0000:04:1f.7");
        assert_eq!(("0000:04:1f.7".parse(), "04:1f.7".parse()), (Ok(address), Ok(address)));
        for text in ["", "04:1f", "04:20.0", "4:1f.7", "04:1f.8", "0000:0004:1f.7", "x:04:1f.7", "04:1f.7 ", "vfio0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
