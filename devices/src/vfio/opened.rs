//! Opens a function of the host and reads what the planner must know of it.

use std::io;
use std::path::Path;

use pci::bar::{BarError, BarSpec, Bars, ROM};
use pci::ids::Ids;
use pci::msi::MsiVectorsError;
use pci::msix_table::MsixVectorsError;
use thiserror::Error;

use super::facts::{Facts, Snapshot};
use super::hardware::{Hardware, OpenError};
use super::host::{CONFIG, HostDevice};
use super::iommu::Domain;
use super::patch::PatchError;
use super::regions::bar_specs;

/// A function of the host that is open and not in a machine yet: tells what the planner must know.
pub struct HostFunction<D: HostDevice> {
    pub(super) name: String,
    pub(super) device: D,
    pub(super) snapshot: Snapshot,
    pub(super) facts: Facts,
    pub(super) bars: [Option<BarSpec>; 6],
    /// Bytes of its expansion ROM.
    pub(super) rom: Option<u64>,
}

impl HostFunction<Hardware> {
    /// Opens the function whose sysfs directory is `path` (it ends in the address). `name` is for messages.
    pub fn open(name: &str, path: &Path, domain: &Domain) -> Result<Self, VfioError> {
        let device = Hardware::open(name, path, domain).map_err(|source| VfioError::Open { source })?;
        Self::new(name, device)
    }
}

impl<D: HostDevice> HostFunction<D> {
    /// Reads what `device` is.
    pub fn new(name: &str, mut device: D) -> Result<Self, VfioError> {
        let name = name.to_owned();
        let size = device.size(CONFIG).min(0x1000);
        let mut bytes = vec![0xFF; usize::try_from(size).unwrap_or(0)];
        if let Err(source) = device.read(CONFIG, 0, &mut bytes) {
            return Err(VfioError::Config { name, source });
        }
        let snapshot = Snapshot::new(&bytes);
        let facts = Facts::of(&snapshot);
        if facts.ids.vendor == 0xFFFF || bytes.len() < 256 {
            return Err(VfioError::Dead { name });
        }
        if facts.header_type != 0 {
            return Err(VfioError::Bridge { name });
        }
        let mut sizes = [0; 6];
        for (size, index) in sizes.iter_mut().zip(0..) {
            *size = device.size(index);
        }
        let bars = bar_specs(facts.bar_registers, sizes);
        if let Err(source) = Bars::new(&bars) {
            return Err(VfioError::Bars { name, source });
        }
        // The kernel gives a region only for a ROM that it can read.
        let rom = Some(device.size(ROM.into())).filter(|size| Bars::default().with_rom(*size).is_ok());
        Ok(Self { name, device, snapshot, facts, bars, rom })
    }

    /// Its ids, as the guest will see them.
    #[must_use]
    pub const fn ids(&self) -> Ids {
        self.facts.ids
    }

    /// Its BARs.
    #[must_use]
    pub const fn bars(&self) -> [Option<BarSpec>; 6] {
        self.bars
    }

    /// Its interrupt pin register: 0 none, 1 INTA to 4 INTD.
    #[must_use]
    pub const fn interrupt_pin(&self) -> u8 {
        if self.facts.interrupt_pin <= 4 { self.facts.interrupt_pin } else { 0 }
    }
}

/// A function that cannot be passed through.
#[derive(Debug, Error)]
pub enum VfioError {
    /// It cannot be opened.
    #[error(transparent)]
    Open {
        /// Why.
        source: OpenError,
    },
    /// Its registers cannot be read.
    #[error("device {name}: its configuration space cannot be read")]
    Config {
        /// The device.
        name: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// It reads all ones.
    #[error("device {name}: it does not answer (its configuration space reads all ones); power-cycle the host")]
    Dead {
        /// The device.
        name: String,
    },
    /// It is no endpoint.
    #[error("device {name}: it is a bridge, and bridges are not passed through; give the devices below it")]
    Bridge {
        /// The device.
        name: String,
    },
    /// Its BARs are such as no guest could have.
    #[error("device {name}: its BARs cannot be shown to a guest")]
    Bars {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: BarError,
    },
    /// Its configuration space cannot be changed as asked for.
    #[error("device {name}: its configuration space cannot be changed as asked for")]
    Patch {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: PatchError,
    },
    /// Its MSI-X capability is broken.
    #[error("device {name}: its MSI-X capability cannot be shown to a guest")]
    Msix {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: MsixVectorsError,
    },
    /// Its MSI capability is broken.
    #[error("device {name}: its MSI capability cannot be shown to a guest")]
    Msi {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: MsiVectorsError,
    },
}
