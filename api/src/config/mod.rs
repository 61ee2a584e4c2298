//! Banyan's own form of a machine's configuration: what it consists of, with defaults filled in and unknown keys refused.
//!
//! Every part reads its command-line form with `FromStr` and prints the same form with `Display`. The two are inverse: what
//! is printed reads back as the same value.

mod balloon;
mod boot;
mod cdi;
mod cpu;
mod cpu_list;
mod device;
mod disk;
pub mod flags;
mod growth;
mod log;
mod memory;
mod numa;
mod output;
mod pcie;
mod policy;
mod rng;
mod size;
mod stub;
pub mod topology;
mod virtio;
mod vm;
mod vsock;

pub use balloon::BalloonConfig;
pub use boot::{KernelConfig, Payload};
pub use cdi::{CdiName, CdiNameError};
pub use cpu::{CpuConfig, CpuError};
pub use cpu_list::{CpuList, CpuListError};
pub use device::{Attach, CliqueId, DeviceConfig, DeviceError, DeviceKind, VfioConfig};
pub use disk::{DiskConfig, DiskError, DiskIo, ImageFormat};
pub use growth::{CpuTopology, GrowthConfig};
pub use log::{LogConfig, LogLevel};
pub use memory::{HugePageSize, MemoryConfig, MemoryError};
pub use numa::{Distance, MemoryPolicy, NumaConfig, NumaFlag, NumaFlagError, NumaNode, NumaPlacement};
pub use output::OutputConfig;
pub use pcie::{Cf8, ColdPlugPort, GpuOrder, HotPlugPorts, PcieConfig, Removal, TopologyPolicy};
pub use policy::{DevicePolicy, HotPlugPlace, Policy, PolicyError, ResetPolicy};
pub use rng::RngConfig;
pub use size::{Size, SizeError};
pub use stub::{BarConfig, BarKind, ClassCode, IdPair, InterruptConfig, IntxPin, StubConfig, StubError};
pub use topology::{PortConfig, PortKind, RootComplexConfig, TopologyConfig, TopologyFileError};
pub use virtio::{FsConfig, MacAddress, MacError, NetConfig, RateLimit, TokenBucket};
pub use vm::VmConfig;
pub use vsock::{VsockConfig, VsockError};
