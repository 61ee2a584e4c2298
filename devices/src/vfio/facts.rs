//! Finds out from a function's configuration space what it is and which capabilities it has, once, when it is opened. Pure.

use pci::access::Reg;
use pci::caps::{Extent, MsixPlace, id, walk};
use pci::ext_caps::{ExtendedExtent, walk_extended};
use pci::ids::{ClassCode, Ids};
use pci::regs::{header, type0};

use super::host::Area;

/// The dwords of a configuration space as they were when the function was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot(Vec<u32>);

impl Snapshot {
    /// From the bytes of the configuration region; what is missing of 4 KiB reads 0.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let dword = |chunk: &[u8]| chunk.try_into().map_or(0, u32::from_le_bytes);
        Self(bytes.chunks(4).map(dword).collect())
    }

    /// The dword that holds byte `offset`.
    #[must_use]
    pub fn dword(&self, offset: u16) -> u32 {
        self.0.get(Reg::containing(offset).index()).copied().unwrap_or(0)
    }
}

/// An MSI capability of hardware (PCIe 6.0 7.7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiFact {
    /// Where.
    pub offset: u8,
    /// 1, 2, 4, 8, 16 or 32.
    pub vectors: u8,
    /// Whether it has an upper address register.
    pub wide: bool,
    /// Whether each vector can be masked.
    pub maskable: bool,
}

/// An MSI-X capability of hardware (PCIe 6.0 7.7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixFact {
    /// Where.
    pub offset: u8,
    /// 1 to 2048.
    pub vectors: u16,
    /// The vector table.
    pub table: MsixPlace,
    /// The pending bits.
    pub pending: MsixPlace,
}

impl MsixFact {
    /// The table's bytes in its BAR.
    #[must_use]
    pub fn table_area(&self) -> Area {
        Area { offset: self.table.offset.into(), len: u64::from(self.vectors) * 16 }
    }

    /// The pending bits' bytes in their BAR.
    #[must_use]
    pub fn pending_area(&self) -> Area {
        Area { offset: self.pending.offset.into(), len: u64::from(self.vectors).div_ceil(64) * 8 }
    }

    /// The spans of BAR `bar` that must be trapped.
    #[must_use]
    pub fn areas(&self, bar: u8) -> Vec<Area> {
        let mut areas = Vec::new();
        if self.table.bar == bar {
            areas.push(self.table_area());
        }
        if self.pending.bar == bar {
            areas.push(self.pending_area());
        }
        areas
    }
}

/// A PCI Express capability of hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpressFact {
    /// Where.
    pub offset: u8,
    /// Device/port type: 0 endpoint, 1 legacy endpoint, 9 root complex integrated endpoint.
    pub kind: u8,
    /// Whether the link registers exist (any but integrated endpoints of version 1).
    pub version: u8,
    /// Whether software can reset the function by device control.
    pub flr: bool,
}

/// What a function is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its ids.
    pub ids: Ids,
    /// Header type without the multi-function bit; 0 for an endpoint.
    pub header_type: u8,
    /// Interrupt pin register.
    pub interrupt_pin: u8,
    /// The base address registers.
    pub bar_registers: [u32; 6],
    /// All standard capabilities in list order.
    pub capabilities: Vec<Extent>,
    /// All extended capabilities in list order; none for a conventional function.
    pub extended: Vec<ExtendedExtent>,
    /// MSI.
    pub msi: Option<MsiFact>,
    /// MSI-X.
    pub msix: Option<MsixFact>,
    /// PCI Express.
    pub express: Option<ExpressFact>,
    /// Power management: where, and whether D1 and D2 exist.
    pub power: Option<(u8, [bool; 2])>,
    /// Offset of an advanced features capability whose function-level reset works.
    pub advanced_reset: Option<u8>,
}

impl Facts {
    /// Reads them out of `config`.
    #[must_use]
    pub fn of(config: &Snapshot) -> Self {
        let byte = |offset: u16| config.dword(offset).to_le_bytes()[usize::from(offset & 3)];
        let halves = |offset: u16| {
            let [a, b, c, d] = config.dword(offset).to_le_bytes();
            (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
        };
        let ((vendor, device), (subsystem_vendor, subsystem)) = (halves(header::IDS), halves(type0::SUBSYSTEM));
        let class = config.dword(header::CLASS);
        let capabilities = walk(|offset| config.dword(offset.into()));
        let find = |wanted: u8| capabilities.iter().find(|capability| capability.id == wanted).map(|found| found.offset);
        let at = |offset: u8, index: u16| config.dword(u16::from(offset) + 4 * index);
        let mut bar_registers = [0; 6];
        for (register, offset) in bar_registers.iter_mut().zip((header::BAR0..).step_by(4)) {
            *register = config.dword(offset);
        }
        let power = find(id::POWER).map(|offset| {
            let control = at(offset, 0);
            (offset, [control & 1 << 25 != 0, control & 1 << 26 != 0])
        });
        Self {
            ids: Ids {
                vendor,
                device,
                class: ClassCode::new(class >> 8),
                revision: class.to_le_bytes()[0],
                subsystem_vendor,
                subsystem,
            },
            header_type: byte(0x0E) & 0x7F,
            interrupt_pin: byte(0x3D),
            bar_registers,
            msi: find(id::MSI).map(|offset| msi(offset, at(offset, 0))),
            msix: find(id::MSIX).map(|offset| msix(offset, at(offset, 0), at(offset, 1), at(offset, 2))),
            express: find(id::EXPRESS).map(|offset| express(offset, at(offset, 0), at(offset, 1))),
            power,
            // Transactions-pending and FLR both have to be there (Advanced Capabilities for Conventional PCI, 1.0).
            advanced_reset: find(id::ADVANCED_FEATURES).filter(|offset| at(*offset, 0) >> 24 & 3 == 3),
            extended: walk_extended(|offset| config.dword(offset)),
            capabilities,
        }
    }
}

fn msi(offset: u8, control: u32) -> MsiFact {
    let log = (control >> 17 & 7).min(5);
    MsiFact { offset, vectors: 1 << log, wide: control & 1 << 23 != 0, maskable: control & 1 << 24 != 0 }
}

fn msix(offset: u8, control: u32, table: u32, pending: u32) -> MsixFact {
    let [_, _, low, high] = control.to_le_bytes();
    let place = |register: u32| MsixPlace { bar: register.to_le_bytes()[0] & 7, offset: register & !7 };
    MsixFact { offset, vectors: (u16::from_le_bytes([low, high]) & 0x7FF) + 1, table: place(table), pending: place(pending) }
}

fn express(offset: u8, flags: u32, capabilities: u32) -> ExpressFact {
    let [_, _, low, _] = flags.to_le_bytes();
    ExpressFact { offset, kind: low >> 4, version: low & 0xF, flr: capabilities & 1 << 28 != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::fake::Registers;

    #[test]
    fn a_gpu_is_described_by_its_registers() {
        let facts = Facts::of(&Snapshot::new(&Registers::gpu().bytes));
        assert_eq!((facts.ids.vendor, facts.ids.device, facts.ids.class.value()), (0x10DE, 0x2330, 0x03_0200));
        assert_eq!((facts.ids.revision, facts.ids.subsystem_vendor, facts.ids.subsystem), (0xA1, 0x10DE, 0x16C1));
        assert_eq!((facts.header_type, facts.interrupt_pin), (0, 1));
        let msix = facts.msix.unwrap();
        assert_eq!((msix.offset, msix.vectors, msix.table.bar, msix.table.offset), (0xC8, 6, 0, 0xB9_0000));
        assert_eq!(msix.areas(0).len(), 2);
        assert_eq!(msix.areas(1), []);
        assert_eq!(facts.msi, Some(MsiFact { offset: 0x48, vectors: 1, wide: true, maskable: true }));
        assert_eq!(facts.express.map(|express| (express.kind, express.flr)), Some((0, true)));
        assert_eq!(facts.extended.len(), 4);
    }

    #[test]
    fn a_conventional_function_has_no_extended_capabilities() {
        let facts = Facts::of(&Snapshot::new(&Registers::conventional().bytes));
        assert_eq!((facts.extended.len(), facts.express, facts.msix), (0, None, None));
    }

    #[test]
    fn random_bytes_do_no_harm() {
        for byte in [0x00, 0x11, 0x7F, 0xFF] {
            let facts = Facts::of(&Snapshot::new(&vec![byte; 4096]));
            assert!(facts.msix.is_none_or(|msix| msix.vectors <= 2048));
        }
        let facts = Facts::of(&Snapshot::new(&[]));
        assert_eq!(facts.capabilities, []);
    }
}
