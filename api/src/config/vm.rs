//! A whole machine.

use super::boot::Payload;
use super::cpu::CpuConfig;
use super::device::DeviceConfig;
use super::disk::DiskConfig;
use super::memory::MemoryConfig;
use super::output::OutputConfig;
use super::pcie::PcieConfig;
use super::topology::TopologyConfig;

/// Everything that a machine is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmConfig {
    /// Processors.
    pub cpus: CpuConfig,
    /// Memory.
    pub memory: MemoryConfig,
    /// What runs first. `None` makes a machine that can be planned and shown, not started.
    pub payload: Option<Payload>,
    /// The serial port at 0x3F8.
    pub serial: OutputConfig,
    /// The debug console at port 0xE9; `None` leaves the port empty.
    pub debug_console: Option<OutputConfig>,
    /// A write of n to port 0xF4 ends the process with exit code `(n << 1) | 1`.
    pub debug_exit: bool,
    /// Shape of the hierarchy where `topology` does not say it.
    pub pcie: PcieConfig,
    /// Root complexes, ports and devices from a file. Its devices come before those of `devices`.
    pub topology: Option<TopologyConfig>,
    /// Devices given one by one, in this order.
    pub devices: Vec<DeviceConfig>,
    /// virtio-blk disks, in this order.
    pub disks: Vec<DiskConfig>,
}

impl Default for VmConfig {
    /// One processor, 512 MiB, serial port on standard input and output, nothing to run.
    fn default() -> Self {
        Self {
            cpus: CpuConfig::default(),
            memory: MemoryConfig::default(),
            payload: None,
            serial: OutputConfig::Stdio,
            debug_console: None,
            debug_exit: false,
            pcie: PcieConfig::default(),
            topology: None,
            devices: Vec::new(),
            disks: Vec::new(),
        }
    }
}
