//! Functions of the host, passed through by VFIO.
//!
//! | question | module |
//! |---|---|
//! | what must the host be able to do for a function? | [`host`], by the kernel in [`hardware`] |
//! | which parts of a function's file can be mapped? | [`region_info`], read with [`info`] |
//! | which IOMMU groups does the machine have open? | [`groups`] |
//! | what is the function, and which capabilities does it have? | [`opened`], [`facts`] |
//! | which BARs does the guest see? | [`regions`] |
//! | which parts of a BAR go straight into the guest? | [`bar_map`], [`backing`], [`mapping`] |
//! | which configuration bits does the guest see instead of the device's? | [`patch`], [`overlay`] |
//! | how do its interrupts reach the guest? | [`msix`], [`msi`], [`intx`], [`vectors`] |
//! | how is it reset, and when with its bus? | [`reset`], [`neighbours`] |
//! | which memory can it reach? | [`iommu`], [`iova_ranges`] |
//! | how does all that make a [`pci::function::PciFunction`]? | [`device`] |
//!
//! Legacy containers and groups only.

pub mod backing;
pub mod bar_map;
pub mod device;
pub mod facts;
pub mod groups;
pub mod hardware;
pub mod host;
pub mod info;
pub mod intx;
mod ioctl;
pub mod iommu;
pub mod iova_ranges;
pub mod mapping;
pub mod msi;
pub mod msix;
pub mod neighbours;
pub mod opened;
pub mod overlay;
pub mod patch;
pub mod region_info;
pub mod regions;
pub mod reset;
mod rom;
pub mod signals;
pub mod vectors;

#[cfg(test)]
mod fake;

pub use device::VfioFunction;
pub use hardware::Hardware;
pub use iommu::{Domain, GroupWatcher};
pub use opened::{HostFunction, VfioError};
pub use patch::{Placement, VfioOptions};
pub use signals::{Signal, Signals};
