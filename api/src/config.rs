//! Banyan's own form of a machine's configuration: what it consists of, with defaults filled in and unknown keys refused.
//!
//! Every part reads its command-line form with `FromStr` and prints the same form with `Display`. The two are inverse: what
//! is printed reads back as the same value.

mod balloon;
mod bar_choice;
mod boot;
mod cdi;
mod cpu;
mod cpu_list;
mod device;
mod disk;
pub mod flags;
mod folder;
mod log;
mod memory;
mod net;
mod numa;
mod output;
mod pcie;
mod policy;
mod rate_limit;
mod rng;
mod size;
mod stub;
pub mod topology;
mod vm;
mod vsock;

pub use balloon::BalloonConfig;
pub use bar_choice::{BarChoice, BarChoiceError};
pub use boot::{KernelConfig, Payload};
pub use cdi::{CdiMistakes, CdiName, CdiNameError};
pub use cpu::{CpuConfig, CpuError, CpuTopology};
pub use cpu_list::{CpuList, CpuListError};
pub use device::{Attach, CliqueId, DeviceConfig, DeviceError, DeviceKind, VfioConfig};
pub use disk::{DiskConfig, DiskError, DiskIo, DiskSource, ImageFormat, IoEngine};
pub use folder::{FsConfig, FsError};
pub use log::{LogConfig, LogLevel};
pub use memory::{HotPlugMethod, HugePageSize, MemoryConfig, MemoryError, MemoryZone};
pub use net::{MacAddress, MacError, NetConfig, NetError, NetSource};
pub use numa::{Distance, MemoryPolicy, NumaConfig, NumaFlag, NumaFlagError, NumaNode, NumaPlacement};
pub use output::OutputConfig;
pub use pcie::{
    Cf8, CliquePolicy, ColdPlugPort, GpuOrder, HostPorts, HotPlugPorts, NvlinkError, NvlinkMode, PcieConfig, PortsOn, Removal,
    TopologyPolicy, VirtioPlace,
};
pub use policy::{DevicePolicy, HostNodes, HotPlugPlace, Policy, PolicyError, ResetPolicy};
pub use rate_limit::{RateLimit, TokenBucket};
pub use rng::RngConfig;
pub use size::{Size, SizeError};
pub use stub::{
    BarConfig, BarKind, ClassCode, HexId, IdPair, InterruptConfig, IntxPin, StubConfig, StubError, VirtualFunctionsConfig,
};
pub use topology::{PortConfig, PortKind, RootComplexConfig, TopologyConfig, TopologyFileError};
pub use vm::VmConfig;
pub use vsock::{VsockConfig, VsockError};
