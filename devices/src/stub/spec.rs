//! What a stub should be, and where its trapped pages go. Makes nothing.
//!
//! A stub traps the page of control registers, if it has a copy engine, and the pages of its MSI-X table and pending bits,
//! if it has MSI-X. The control registers are the first page of BAR 0. The table goes to the first memory BAR with room, at
//! its start (behind the control registers in BAR 0), and the pending bits follow it directly. Every other page of a memory
//! BAR is plain memory that the guest reaches without an exit. BARs below the page size, and I/O BARs, are trapped whole.

use pci::bar::{BarError, BarIndex, BarSpec, Bars, Size};
use pci::caps::clique::{Clique, CliqueError};
use pci::emulated::Attachment;
use pci::ids::Ids;
use pci::sriov::{SriovError, SriovSpec};
use pci::topology::EndpointSpec;
use thiserror::Error;

use super::pages::PAGE;

/// An emulated endpoint for tests and demonstrations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StubSpec {
    /// Its ids.
    pub ids: Ids,
    /// Its BARs.
    pub bars: [Option<BarSpec>; 6],
    /// Bytes of its expansion ROM.
    pub rom: Option<u64>,
    /// Virtual functions that it shows; below a port they can be enabled.
    pub sriov: Option<SriovSpec>,
    /// Whether its device has functions beyond 7 or virtual ones.
    pub ari: bool,
    /// What it hangs on, as its registers show it.
    pub on: Attachment,
    /// Nobody says what its link is: below a port to which it comes it shows that of the port.
    pub follows: bool,
    /// How it interrupts.
    pub interrupt: StubInterrupt,
    /// NVIDIA's peer-to-peer approval.
    pub clique: Option<Clique>,
    /// Accept `clique` on any function, not only on NVIDIA display controllers.
    pub clique_any_vendor: bool,
    /// Whether it has function-level reset.
    pub flr: bool,
    /// Whether it has control registers and a copy engine, in BAR 0.
    pub dma: bool,
}

/// How a stub interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StubInterrupt {
    /// Not at all.
    #[default]
    None,
    /// By a wire: pin 1 (INTA) to 4 (INTD).
    Intx(u8),
    /// By MSI with 1, 2, 4, 8, 16 or 32 vectors.
    Msi {
        /// Vectors.
        vectors: u8,
        /// Whether it has mask and pending bits.
        maskable: bool,
    },
    /// By MSI-X with 1 to 2048 vectors.
    MsiX {
        /// Vectors.
        vectors: u16,
    },
}

/// Where the MSI-X structures are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiXPlace {
    /// In which BAR.
    pub bar: BarIndex,
    /// Of the table.
    pub table: u32,
    /// Of the pending bits.
    pub pending: u32,
    /// Bytes from the table to the end of the last trapped page.
    pub len: u32,
}

/// The trapped pages of a stub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StubLayout {
    /// Whether the first page of BAR 0 holds control registers.
    pub control: bool,
    /// MSI-X table and pending bits.
    pub msix: Option<MsiXPlace>,
}

impl StubSpec {
    /// What must be known to plan for it.
    #[must_use]
    pub fn planned(&self) -> EndpointSpec {
        EndpointSpec {
            ids: self.ids,
            bars: self.bars,
            interrupt_pin: self.interrupt_pin(),
            rom: self.rom,
            sriov: self.sriov.map(Box::new),
        }
    }

    /// The interrupt pin register: 0 none, 1 INTA to 4 INTD.
    #[must_use]
    pub const fn interrupt_pin(&self) -> u8 {
        match self.interrupt {
            StubInterrupt::Intx(pin) => pin,
            _ => 0,
        }
    }

    /// What its virtual functions are: memory behind the VF BARs, and MSI-X and control registers like its own, as far as these
    /// have room there. Copies need bus mastering of both functions. `None` if it has none that can be enabled.
    #[must_use]
    pub fn virtual_function(&self) -> Option<Self> {
        let (sriov, Attachment::Link(link)) = (self.sriov?, self.on) else { return None };
        let plain = Self {
            ids: self.ids,
            bars: sriov.bars,
            rom: None,
            sriov: None,
            ari: self.ari,
            on: Attachment::Virtual(link),
            follows: false,
            interrupt: StubInterrupt::None,
            clique: None,
            clique_any_vendor: false,
            flr: true,
            dma: false,
        };
        let messages = Some(self.interrupt).filter(|interrupt| matches!(interrupt, StubInterrupt::MsiX { .. }));
        let wishes = [(messages, self.dma), (messages, false), (None, self.dma)];
        let mut wished =
            wishes.map(|(messages, dma)| Self { interrupt: messages.unwrap_or_default(), dma, ..plain.clone() }).into_iter();
        Some(wished.find(|wished| wished.layout().is_ok()).unwrap_or(plain))
    }

    /// Checks everything and places the trapped pages.
    pub fn layout(&self) -> Result<StubLayout, SpecError> {
        let bars = Bars::new(&self.bars)?;
        self.rom.map_or(Ok(()), |size| bars.with_rom(size).map(drop))?;
        self.sriov.map_or(Ok(()), |sriov| sriov.check())?;
        if self.clique.is_some() {
            pci::caps::clique::check(&self.ids, self.clique_any_vendor)?;
        }
        if self.dma && self.memory(0).is_none_or(|size| size < PAGE) {
            return Err(SpecError::NoControl);
        }
        let msix = match self.interrupt {
            StubInterrupt::Intx(pin) if !(1..=4).contains(&pin) => return Err(SpecError::Pin { pin }),
            StubInterrupt::Msi { vectors, .. } if !vectors.is_power_of_two() || vectors > 32 => {
                return Err(SpecError::Msi { vectors });
            }
            StubInterrupt::MsiX { vectors } if !(1..=2048).contains(&vectors) => return Err(SpecError::MsiX { vectors }),
            StubInterrupt::MsiX { vectors } => Some(self.place(vectors)?),
            _ => None,
        };
        Ok(StubLayout { control: self.dma, msix })
    }

    fn memory(&self, bar: BarIndex) -> Option<u64> {
        let spec = self.bars.get(usize::from(bar)).copied().flatten()?;
        spec.is_memory().then_some(spec.size)
    }

    fn place(&self, vectors: u16) -> Result<MsiXPlace, SpecError> {
        const CONTROL: u32 = 4096;
        let table_len = u32::from(vectors) * 16;
        let pending_len = u32::from(vectors).div_ceil(64) * 8;
        let len = (table_len + pending_len).next_multiple_of(4096);
        (0..6)
            .find_map(|bar| {
                let table = if bar == 0 && self.dma { CONTROL } else { 0 };
                let room = self.memory(bar)? >= u64::from(table + len);
                room.then_some(MsiXPlace { bar, table, pending: table + table_len, len })
            })
            .ok_or_else(|| {
                let largest = (0..6).filter_map(|bar| self.memory(bar)).max().unwrap_or(0);
                SpecError::NoRoom { vectors, need: Size(len.into()), largest: Size(largest), control: self.dma }
            })
    }
}

/// A stub that cannot be.
#[derive(Debug, Error)]
pub enum SpecError {
    /// Its BARs are impossible.
    #[error(transparent)]
    Bar(#[from] BarError),
    /// Its virtual functions are impossible.
    #[error(transparent)]
    Sriov(#[from] SriovError),
    /// Its clique is impossible.
    #[error(transparent)]
    Clique(#[from] CliqueError),
    /// A copy engine without registers.
    #[error("a stub with `dma` needs a memory BAR 0 of at least 4K for its control registers")]
    NoControl,
    /// No such pin.
    #[error("interrupt pin {pin} does not exist: take 1 (INTA) to 4 (INTD)")]
    Pin {
        /// Asked for.
        pin: u8,
    },
    /// No such number of vectors.
    #[error("{vectors} MSI vectors are not possible: take 1, 2, 4, 8, 16 or 32")]
    Msi {
        /// Asked for.
        vectors: u8,
    },
    /// No such number of vectors.
    #[error("{vectors} MSI-X vectors are not possible: take 1 to 2048")]
    MsiX {
        /// Asked for.
        vectors: u16,
    },
    /// No BAR is large enough.
    #[error(
        "the MSI-X table of {vectors} vectors needs {need} in one memory BAR{}, but the largest has {largest}; enlarge a BAR or take \
         fewer vectors",
        if *.control { " (behind 4K of control registers in BAR 0)" } else { "" }
    )]
    NoRoom {
        /// Asked for.
        vectors: u16,
        /// Bytes of table and pending bits, in whole pages.
        need: Size,
        /// Bytes of the largest memory BAR.
        largest: Size,
        /// Whether BAR 0 starts with control registers.
        control: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use pci::bar::BarKind;

    fn stub(bars: &[(usize, u64)], dma: bool, interrupt: StubInterrupt) -> StubSpec {
        let mut all = [None; 6];
        for (bar, size) in bars {
            all[*bar] = Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: *size });
        }
        StubSpec {
            ids: Ids::default(),
            bars: all,
            rom: None,
            sriov: None,
            ari: false,
            on: Attachment::RootBus,
            follows: false,
            interrupt,
            clique: None,
            clique_any_vendor: false,
            flr: true,
            dma,
        }
    }

    #[test]
    fn the_msix_table_goes_to_the_first_bar_with_room() {
        type Case = (&'static [(usize, u64)], bool, u16, Option<(u8, u32, u32, u32)>);
        let cases: [Case; 8] = [
            (&[(0, 16 << 20)], true, 8, Some((0, 0x1000, 0x1080, 0x1000))),
            (&[(0, 16 << 20)], false, 8, Some((0, 0, 0x80, 0x1000))),
            (&[(0, 4096), (1, 8192)], true, 8, Some((1, 0, 0x80, 0x1000))),
            (&[(0, 256), (3, 4096)], false, 64, Some((3, 0, 0x400, 0x1000))),
            // 2048 vectors take 32K and 256 bytes: nine pages.
            (&[(0, 32 << 10)], false, 2048, None),
            (&[(0, 64 << 10)], false, 2048, Some((0, 0, 0x8000, 0x9000))),
            (&[(0, 4096)], true, 1, None),
            (&[], false, 1, None),
        ];
        for (bars, dma, vectors, expected) in cases {
            let layout = stub(bars, dma, StubInterrupt::MsiX { vectors }).layout();
            let place = layout.ok().and_then(|layout| layout.msix).map(|m| (m.bar, m.table, m.pending, m.len));
            assert_eq!(place, expected, "{bars:?} {vectors}");
        }
    }

    #[test]
    fn a_table_without_room_is_refused_with_the_sizes() {
        let error = stub(&[(0, 4096), (1, 16384)], true, StubInterrupt::MsiX { vectors: 2048 }).layout().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("2048") && text.contains("36K") && text.contains("16K"), "{text}");
    }

    #[test]
    fn control_registers_need_bar_0() {
        for bars in [&[][..], &[(0, 2048)], &[(1, 1 << 20)]] {
            assert!(matches!(stub(bars, true, StubInterrupt::None).layout(), Err(SpecError::NoControl)), "{bars:?}");
        }
        assert!(stub(&[(0, 4096)], true, StubInterrupt::None).layout().unwrap().control);
    }

    #[test]
    fn impossible_interrupts_are_refused() {
        let bars = &[(0, 1 << 20)];
        for pin in [0, 5] {
            assert!(matches!(stub(bars, false, StubInterrupt::Intx(pin)).layout(), Err(SpecError::Pin { .. })));
        }
        for vectors in [0, 3, 33, 64] {
            let interrupt = StubInterrupt::Msi { vectors, maskable: true };
            assert!(matches!(stub(bars, false, interrupt).layout(), Err(SpecError::Msi { .. })));
        }
        for vectors in [0, 2049] {
            assert!(matches!(stub(bars, false, StubInterrupt::MsiX { vectors }).layout(), Err(SpecError::MsiX { .. })));
        }
    }

    #[test]
    fn a_clique_is_for_gpus_unless_any_vendor_is_said() {
        let mut spec = stub(&[], false, StubInterrupt::None);
        spec.clique = Clique::new(3).ok();
        assert!(matches!(spec.layout(), Err(SpecError::Clique(_))));
        spec.clique_any_vendor = true;
        assert!(spec.layout().is_ok());
    }
}
