//! All that a machine is configured by, each with its default.

use std::path::PathBuf;

use super::balloon::BalloonConfig;
use super::boot::Payload;
use super::cdi::CdiMistakes;
use super::cpu::CpuConfig;
use super::device::DeviceConfig;
use super::disk::DiskConfig;
use super::folder::FsConfig;
use super::memory::MemoryConfig;
use super::net::NetConfig;
use super::numa::NumaConfig;
use super::output::OutputConfig;
use super::pcie::PcieConfig;
use super::rng::RngConfig;
use super::topology::TopologyConfig;
use super::vsock::VsockConfig;

/// Everything that a machine is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmConfig {
    /// Processors.
    pub cpus: CpuConfig,
    /// Memory.
    pub memory: MemoryConfig,
    /// Memory nodes.
    pub numa: NumaConfig,
    /// What runs first. `None` makes a machine that can be planned and shown, not started.
    pub payload: Option<Payload>,
    /// The serial port at 0x3F8.
    pub serial: OutputConfig,
    /// The debug console at port 0xE9; `None` leaves the port empty.
    pub debug_console: Option<OutputConfig>,
    /// The guest's kernel can say at port 0x505 that it panicked.
    pub panic_port: bool,
    /// A write of n to port 0xF4 ends the process with exit code `(n << 1) | 1`.
    pub debug_exit: bool,
    /// Shape of the hierarchy where `topology` does not say it.
    pub pcie: PcieConfig,
    /// Root complexes, ports and devices from a file. Its devices come before those of `devices`.
    pub topology: Option<TopologyConfig>,
    /// Devices given one by one, in this order.
    pub devices: Vec<DeviceConfig>,
    /// Directories with CDI files, the later ones winning. Empty stands for `/etc/cdi` and `/var/run/cdi`.
    pub cdi_dirs: Vec<PathBuf>,
    /// What mistakes in them cost.
    pub cdi_mistakes: CdiMistakes,
    /// virtio-blk disks, in this order.
    pub disks: Vec<DiskConfig>,
    /// Width of the guest's physical addresses in bits, at most; by default that of the host.
    pub max_physical_bits: Option<u8>,
    /// Network interfaces, in this order.
    pub nets: Vec<NetConfig>,
    /// Shared folders, in this order.
    pub filesystems: Vec<FsConfig>,
    /// Socket device.
    pub vsock: Option<VsockConfig>,
    /// Random numbers.
    pub rng: Option<RngConfig>,
    /// Memory that the guest gives back.
    pub balloon: Option<BalloonConfig>,
    /// virtio console; [`OutputConfig::Off`] leaves the device out.
    pub console: OutputConfig,
    /// A watchdog that resets a guest which does not answer.
    pub watchdog: bool,
}

impl Default for VmConfig {
    /// One processor, 512 MiB, serial port on standard input and output, nothing to run.
    fn default() -> Self {
        Self {
            cpus: CpuConfig::default(),
            memory: MemoryConfig::default(),
            numa: NumaConfig::default(),
            payload: None,
            serial: OutputConfig::Stdio,
            debug_console: None,
            panic_port: false,
            debug_exit: false,
            pcie: PcieConfig::default(),
            topology: None,
            devices: Vec::new(),
            cdi_dirs: Vec::new(),
            cdi_mistakes: CdiMistakes::Refuse,
            disks: Vec::new(),
            max_physical_bits: None,
            nets: Vec::new(),
            filesystems: Vec::new(),
            vsock: None,
            rng: None,
            balloon: None,
            console: OutputConfig::Off,
            watchdog: false,
        }
    }
}
