//! An emulated endpoint that shows any ids and BARs, interrupts in any way and copies between guest addresses, so that a
//! hierarchy can be shown and tested on any machine.
//!
//! | question | module |
//! |---|---|
//! | what can a stub be, and which of its pages are trapped? | [`spec`] |
//! | what do its control registers do? | [`regs`] |
//! | who copies? | [`dma`] |
//! | where does the memory of its BARs come from? | [`pages`] |
//! | what is in its expansion ROM? | [`rom`] |

pub mod dma;
pub mod pages;
pub mod regs;
pub mod rom;
pub mod spec;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};

use log::Level;
use pci::access::{Access, Reg};
use pci::bar::{BarIndex, Bars, ROM};
use pci::emulated::{Attachment, Emulated, EmulatedError, EmulatedSpec, InterruptSpec};
use pci::errors::{PcieError, Recorded};
use pci::function::{BarPiece, Changes, Pages, PciFunction, Programming, ResetKind, Shared};
use pci::ids::Ids;
use pci::mirror::Mirror;
use pci::seams::{DmaPort, IntxLine, MsiPort, Workers};
use pci::sriov::EnabledFunctions;
use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use thiserror::Error;

use crate::complaints::Complaints;

use dma::Engine;
use pages::{BarMemory, PAGE, PagesError};
use regs::{ControlRegs, Request};
pub use spec::{SpecError, StubInterrupt, StubLayout, StubSpec};

/// A stub function.
pub struct StubFunction {
    registers: Emulated,
    layout: StubLayout,
    memory: BarMemory,
    /// Shared with the copy engine's thread. Locked after the function, before its interrupts.
    control: Arc<Mutex<ControlRegs>>,
    engine: Engine,
    ids: Ids,
    /// What it makes its virtual functions of.
    virtual_functions: Option<Template>,
    is_virtual: bool,
    complaints: Complaints,
    detached: bool,
}

/// What the virtual functions of a stub are made of.
struct Template {
    name: String,
    spec: StubSpec,
    msi: Arc<dyn MsiPort>,
    dma: Arc<dyn DmaPort>,
}

/// What an access of a BAR reaches.
enum Target {
    Control(u16),
    MsiX,
    Memory,
    Rom(u64),
    Nothing,
}

impl StubFunction {
    /// Makes the function `name` (for its thread and messages): `msi` and `intx` take its interrupts, `dma` its copies.
    /// The memory of its BARs is reserved, not used.
    pub fn new(
        name: &str,
        spec: &StubSpec,
        msi: Arc<dyn MsiPort>,
        intx: Option<Box<dyn IntxLine>>,
        dma: Arc<dyn DmaPort>,
    ) -> Result<Self, StubError> {
        let error = |source: StubErrorKind| StubError { name: name.to_owned(), source };
        let layout = spec.layout().map_err(|source| error(source.into()))?;
        let template = |spec| Template { name: name.to_owned(), spec, msi: Arc::clone(&msi), dma: Arc::clone(&dma) };
        let virtual_functions = spec.virtual_function().map(template);
        let is_virtual = matches!(spec.on, Attachment::Virtual(_));
        let registers = Emulated::new(&emulated(spec, &layout), msi, intx).map_err(|source| error(source.into()))?;
        let memory = BarMemory::new(registers.bars()).map_err(|source| error(source.into()))?;
        let control = Arc::new(Mutex::new(ControlRegs::default()));
        let engine = Engine::new(name, control.clone(), dma, registers.interrupts());
        Ok(Self {
            registers,
            layout,
            memory,
            control,
            engine,
            ids: spec.ids,
            virtual_functions,
            is_virtual,
            complaints: Complaints::default(),
            detached: false,
        })
    }

    fn target(&self, bar: BarIndex, offset: u64, len: usize) -> Target {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let (Some(end), false) = (offset.checked_add(len), self.detached) else { return Target::Nothing };
        if bar == ROM {
            return self.bars().spec(ROM).map_or(Target::Nothing, |spec| Target::Rom(spec.size));
        }
        let mut areas = trapped(&self.layout, bar);
        match areas.find(|area| offset < area.end && area.start < end) {
            None => Target::Memory,
            // Part of the access would go elsewhere.
            Some(area) if offset < area.start || end > area.end => Target::Nothing,
            Some(Area { control: false, .. }) => Target::MsiX,
            Some(_) => u16::try_from(offset).map_or(Target::Nothing, Target::Control),
        }
    }

    /// Control state as after a reset; a copy that runs is cut off and interrupts no more.
    fn reset_control(&self) {
        lock(&self.control).reset();
        self.registers.interrupts().lower();
    }
}

impl PciFunction for StubFunction {
    fn config_read(&mut self, reg: Reg) -> u32 {
        self.registers.config_read(reg)
    }

    fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let changes = self.registers.config_write(access, value);
        if changes.contains(Changes::RESET) {
            self.reset_control();
        }
        changes
    }

    fn bars(&self) -> &Bars {
        self.registers.bars()
    }

    fn mirror(&mut self, mirror: &Arc<dyn Mirror>) -> bool {
        self.registers.mirror(Arc::clone(mirror));
        true
    }

    fn program(&mut self, programming: &Programming) {
        self.registers.program(programming);
    }

    fn bar_layout(&self, bar: BarIndex) -> Vec<BarPiece> {
        let Some(spec) = self.bars().spec(bar) else { return Vec::new() };
        // Virtual functions come and go by a register write, which memory slots would make slow.
        if bar == ROM || !spec.is_memory() || spec.size < PAGE || self.is_virtual {
            return vec![BarPiece::Trapped { offset: 0, len: spec.size }];
        }
        let mut pieces = Vec::new();
        let mut at = 0;
        let end = Area { start: spec.size, end: spec.size, control: false };
        for area in trapped(&self.layout, bar).chain([end]) {
            if at < area.start {
                let pages = Pages { host_address: self.memory.host_address(bar, at) };
                pieces.push(BarPiece::Direct { offset: at, len: area.start - at, pages });
            }
            if area.start < area.end {
                pieces.push(BarPiece::Trapped { offset: area.start, len: area.end - area.start });
            }
            at = area.end;
        }
        pieces
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        match self.target(bar, offset, data.len()) {
            Target::Control(offset) => lock(&self.control).read(offset, data),
            Target::MsiX => self.registers.msix_read(bar, offset, data),
            Target::Memory => self.memory.read(bar, offset, data),
            Target::Rom(size) => rom::read(&self.ids, size, offset, data),
            Target::Nothing => data.fill(0xFF),
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) {
        match self.target(bar, offset, data.len()) {
            Target::Control(offset) => {
                let requests = lock(&self.control).write(offset, data, self.registers.bus_master());
                for request in requests {
                    match request {
                        Request::Doorbell(vector) => {
                            if let Ok(vector) = u16::try_from(vector) {
                                self.registers.interrupts().raise(vector);
                            }
                        }
                        Request::Copy(copy) => self.engine.start(copy),
                    }
                }
            }
            Target::MsiX => self.registers.msix_write(bar, offset, data),
            Target::Memory => self.memory.write(bar, offset, data),
            Target::Rom(_) | Target::Nothing => {}
        }
    }

    fn reset(&mut self, kind: ResetKind) {
        self.registers.reset(kind);
        self.reset_control();
        if kind == ResetKind::Cold {
            self.memory.clear();
        }
    }

    fn bus_master(&self) -> bool {
        self.registers.bus_master()
    }

    fn virtual_functions(&self) -> Option<EnabledFunctions> {
        self.registers.virtual_functions()
    }

    fn make_virtual(&mut self, index: u16) -> Option<Shared> {
        let Template { name, spec, msi, dma } = self.virtual_functions.as_ref()?;
        let name = format!("{name}-vf{index}");
        match Self::new(&name, spec, Arc::clone(msi), None, Arc::clone(dma)) {
            Ok(function) => Some(Arc::new(Mutex::new(function))),
            Err(error) => {
                let text = format_args!("virtual function {index} cannot be made");
                self.complaints.add_error(Level::Warn, text, &error);
                None
            }
        }
    }

    fn record_error(&mut self, error: PcieError, header: [u32; 4]) -> Recorded {
        self.registers.record_error(error, header)
    }

    fn save(&mut self, writer: &mut Writer) -> Result<(), StateError> {
        self.registers.save(writer);
        lock(&self.control).save(writer);
        self.memory.save(writer)
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.registers.restore(reader)?;
        lock(&self.control).restore(reader)?;
        self.memory.restore(reader)
    }

    fn workers(&self) -> Option<Arc<dyn Workers>> {
        Some(self.engine.busy())
    }

    fn detach(&mut self) {
        self.registers.detach();
        self.reset_control();
        self.detached = true;
    }
}

impl Drop for StubFunction {
    fn drop(&mut self) {
        // The copy engine's thread ends by itself; it may be inside a copy, so nobody waits for it.
        self.reset_control();
    }
}

/// A run of trapped pages: control registers or MSI-X.
#[derive(Debug, Clone, Copy)]
struct Area {
    start: u64,
    end: u64,
    control: bool,
}

/// The trapped areas of `bar`, ascending.
fn trapped(layout: &StubLayout, bar: BarIndex) -> impl Iterator<Item = Area> + use<> {
    let control = (layout.control && bar == 0).then_some(Area { start: 0, end: PAGE, control: true });
    let msix = layout.msix.filter(|place| place.bar == bar);
    let msix = msix.map(|m| Area { start: m.table.into(), end: u64::from(m.table) + u64::from(m.len), control: false });
    control.into_iter().chain(msix)
}

fn emulated(spec: &StubSpec, layout: &StubLayout) -> EmulatedSpec {
    let interrupt = match (spec.interrupt, layout.msix) {
        (StubInterrupt::Intx(pin), _) => InterruptSpec::Intx(pin),
        (StubInterrupt::Msi { vectors, maskable }, _) => InterruptSpec::Msi { vectors, maskable },
        (StubInterrupt::MsiX { vectors }, Some(place)) => InterruptSpec::MsiX {
            vectors,
            table_bar: place.bar,
            table_offset: place.table,
            pba_bar: place.bar,
            pba_offset: place.pending,
        },
        _ => InterruptSpec::None,
    };
    EmulatedSpec {
        ids: spec.ids,
        bars: spec.bars,
        rom: spec.rom,
        sriov: spec.sriov,
        ari: spec.ari,
        on: spec.on,
        interrupt,
        flr: spec.flr,
        clique: spec.clique,
        vendor_capabilities: Vec::new(),
        serial_number: None,
    }
}

/// A stub that cannot be made.
#[derive(Debug, Error)]
#[error("cannot make stub {name}")]
pub struct StubError {
    name: String,
    source: StubErrorKind,
}

/// Why a stub cannot be made.
#[derive(Debug, Error)]
pub enum StubErrorKind {
    /// It is asked for in an impossible way.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Its registers have no room.
    #[error(transparent)]
    Registers(#[from] EmulatedError),
    /// Its memory cannot be had.
    #[error(transparent)]
    Pages(#[from] PagesError),
}
