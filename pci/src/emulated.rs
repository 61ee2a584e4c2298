//! What every emulated endpoint has in common: header, BARs, interrupts, PCI Express capability, function-level reset. What
//! it does behind its BARs is its owner's business.

mod state;

use std::sync::Arc;

use thiserror::Error;

use crate::access::{Access, Lanes, Reg};
use crate::bar::{BarError, BarIndex, BarKind, BarSpec, Bars, ROM};
use crate::caps::clique::place as place_clique;
use crate::caps::express::{ExpressType, reg as express};
use crate::caps::{Clique, Express, MsiLayout, MsixLayout, MsixPlace, Vendor};
use crate::config::{BuildError, ConfigBuilder, ConfigSpace, Type0};
use crate::errors::{self, ErrorRegisters, PcieError, Recorded};
use crate::ext_caps::{Aer, AerKind, Ari, Serial, Sriov, ari};
use crate::function::{Changes, Programming, ResetKind};
use crate::ids::Ids;
use crate::interrupts::{Interrupts, Messages};
use crate::link::Link;
use crate::mirror::Mirror;
use crate::msi::{Msi, MsiVectorsError};
use crate::msix_table::{MsixTable, MsixVectorsError};
use crate::regs::{command, header, type0};
use crate::seams::{IntxLine, MsiPort};
use crate::sriov::{EnabledFunctions, SriovError, SriovSpec};

mod virtual_functions;

use virtual_functions::VirtualFunctions;

/// What an emulated endpoint shows. The default has a header without ids, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EmulatedSpec {
    /// Identity.
    pub ids: Ids,
    /// BARs.
    pub bars: [Option<BarSpec>; 6],
    /// Bytes of its expansion ROM.
    pub rom: Option<u64>,
    /// Virtual functions that it shows; below a port they can be enabled.
    pub sriov: Option<SriovSpec>,
    /// Whether its device has functions beyond 7, or virtual ones: alternative routing ids, below a port.
    pub ari: bool,
    /// What it hangs on.
    pub on: Attachment,
    /// How it interrupts.
    pub interrupt: InterruptSpec,
    /// Whether software can reset it by device control.
    pub flr: bool,
    /// NVIDIA peer-to-peer approval.
    pub clique: Option<Clique>,
    /// Vendor-specific capabilities, first in the list and in this order: the bytes behind the length byte.
    pub vendor_capabilities: Vec<Vec<u8>>,
    /// Device serial number.
    pub serial_number: Option<u64>,
}

/// What an endpoint hangs on, as its registers show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Attachment {
    /// A root or downstream port: an endpoint with this link.
    Link(Link),
    /// A root bus: a root-complex integrated endpoint with link registers zero.
    #[default]
    RootBus,
    /// As a virtual function, a root or downstream port: ids read FFFF, BARs 0, and BARs decode where the physical function has
    /// them (PCIe 6.0 9.3.4).
    Virtual(Link),
    /// A conventional bus below a PCIe-to-PCI bridge: no PCI Express capability, so no function-level reset by it, and no
    /// extended capabilities.
    Conventional,
}

impl From<Option<Link>> for Attachment {
    fn from(link: Option<Link>) -> Self {
        link.map_or(Self::RootBus, Self::Link)
    }
}

/// How a function interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InterruptSpec {
    /// Not at all.
    #[default]
    None,
    /// By a wire: pin 1 (INTA) to 4 (INTD).
    Intx(u8),
    /// By MSI.
    Msi {
        /// 1, 2, 4, 8, 16 or 32.
        vectors: u8,
        /// Whether each vector can be masked.
        maskable: bool,
    },
    /// By MSI-X.
    MsiX {
        /// 1 to 2048.
        vectors: u16,
        /// BAR of the table.
        table_bar: BarIndex,
        /// Its offset there, a multiple of 8.
        table_offset: u32,
        /// BAR of the pending bits.
        pba_bar: BarIndex,
        /// Their offset there, a multiple of 8.
        pba_offset: u32,
    },
}

impl InterruptSpec {
    /// The interrupt pin register.
    #[must_use]
    pub const fn pin(self) -> u8 {
        match self {
            Self::Intx(pin) => pin,
            _ => 0,
        }
    }
}

/// Table and pending bits with their lengths.
#[derive(Debug, Clone, Copy)]
struct MsixRegions {
    table: Region,
    pending: Region,
}

#[derive(Debug, Clone, Copy)]
struct Region {
    place: MsixPlace,
    len: u64,
}

impl Region {
    fn overlaps(self, bar: BarIndex, offset: u64, len: u64) -> bool {
        let start = u64::from(self.place.offset);
        self.place.bar == bar && offset < start + self.len && offset.checked_add(len).is_none_or(|end| start < end)
    }

    /// Offset inside the region of an access that starts in it.
    fn inside(self, bar: BarIndex, offset: u64) -> Option<u64> {
        let at = offset.checked_sub(self.place.offset.into())?;
        (self.place.bar == bar && at < self.len).then_some(at)
    }
}

/// The configuration side of an emulated endpoint.
pub struct Emulated {
    space: ConfigSpace,
    bars: Bars,
    virtual_functions: Option<VirtualFunctions>,
    /// It is one of another function's virtual ones.
    is_virtual: bool,
    /// Offset of the ARI capability.
    ari: Option<u16>,
    interrupts: Arc<Interrupts>,
    msix: Option<MsixRegions>,
    /// Offset of the PCI Express capability.
    express: Option<u8>,
    /// Offset of the AER capability.
    aer: Option<u16>,
    flr: bool,
    detached: bool,
    mirror: Option<Arc<dyn Mirror>>,
}

impl Emulated {
    /// An endpoint in its reset state. Messages leave through `msi`, the level of its pin through `intx`.
    pub fn new(spec: &EmulatedSpec, msi: Arc<dyn MsiPort>, intx: Option<Box<dyn IntxLine>>) -> Result<Self, EmulatedError> {
        let bars = Bars::new(&spec.bars)?;
        let bars = spec.rom.map_or(Ok(bars.clone()), |size| bars.with_rom(size))?;
        let pin = spec.interrupt.pin();
        if pin > 4 {
            return Err(EmulatedError::Pin { pin });
        }
        let has = |memory| bars.specs().any(|(_, bar)| bar.is_memory() == memory);
        let (memory, io) = (has(true) || spec.rom.is_some(), has(false));
        let is_virtual = matches!(spec.on, Attachment::Virtual(_));
        let (ids, memory, io) = match is_virtual {
            true => (Ids { vendor: 0xFFFF, device: 0xFFFF, ..spec.ids }, false, false),
            false => (spec.ids, memory, io),
        };
        let type0 = Type0 { ids: &ids, interrupt_pin: pin, multifunction: false, memory, io };
        let mut builder = ConfigBuilder::type0(&type0);
        for body in &spec.vendor_capabilities {
            builder.capability(&Vendor(body.clone()))?;
        }
        let (kind, link) = match spec.on {
            Attachment::Link(link) | Attachment::Virtual(link) => (ExpressType::Endpoint, link),
            Attachment::RootBus | Attachment::Conventional => (ExpressType::RootComplexEndpoint, Link::default()),
        };
        let express = Express { kind, link, link_up: true, slot: None, port_number: 0, flr: spec.flr, atomic_completers: 0 };
        let express = if spec.on == Attachment::Conventional { None } else { Some(builder.capability(&express)?) };
        let (messages, msix) = message_interrupts(spec.interrupt, &bars, &mut builder)?;
        if let Some(clique) = &spec.clique {
            let at = place_clique(builder.extents()).ok_or(EmulatedError::CliqueRoom)?;
            builder.capability_at(at, clique)?;
        }
        let has_link = matches!(spec.on, Attachment::Link(_) | Attachment::Virtual(_));
        let aer = if has_link { Some(builder.extended(&Aer(AerKind::Endpoint))?) } else { None };
        let ari = if spec.ari && has_link { Some(builder.extended(&Ari)?) } else { None };
        let mut virtual_functions = None;
        if let Some(sriov) = spec.sriov.filter(|_| spec.on != Attachment::Conventional) {
            sriov.check()?;
            // Those of a root bus would need bus numbers that nothing leads to.
            let at = builder.extended(&Sriov { spec: sriov, can_enable: has_link })?;
            virtual_functions = Some(VirtualFunctions::new(sriov, at)?);
        }
        if let Some(number) = spec.serial_number.filter(|_| spec.on != Attachment::Conventional) {
            builder.extended(&Serial(number))?;
        }
        let interrupts = Interrupts::new(messages, msi, if pin == 0 { None } else { intx });
        Ok(Self {
            space: builder.build(),
            bars,
            virtual_functions,
            is_virtual,
            ari,
            interrupts,
            msix,
            express,
            aer,
            flr: spec.flr,
            detached: false,
            mirror: None,
        })
    }

    /// One dword of configuration space.
    #[must_use]
    pub fn config_read(&self, reg: Reg) -> u32 {
        if self.detached {
            return 0xFFFF_FFFF;
        }
        if let Some(value) = self.address_register(reg.offset()) {
            return value;
        }
        let value = self.space.read(reg);
        self.interrupts.overlay(reg).map_or(value, |(mask, own)| (value & !mask) | own)
    }

    /// Writes the carried bytes of one dword. After [`Changes::RESET`] everything here is reset; the owner resets the rest.
    pub fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let mut changes = Changes::empty();
        if self.detached {
            return changes;
        }
        if self.is_virtual && is_address_register(access.reg.offset()) {
            return changes;
        }
        if let Some(register) = Bars::register_at(access.reg.offset()) {
            changes.set(Changes::DECODE, self.bars.write(register, access.lanes, value));
            self.show_bars();
            return changes;
        }
        if access.reg.offset() == type0::ROM {
            changes.set(Changes::DECODE, self.bars.write_rom(access.lanes, value));
            self.show_bars();
            return changes;
        }
        if let Some(functions) = &mut self.virtual_functions {
            if functions.is_fixed(&self.space, access) {
                return changes;
            }
            if let Some(moved) = functions.write(access, value) {
                changes.set(Changes::VIRTUAL_FUNCTIONS, moved);
                self.show_bars();
                return changes;
            }
        }
        let change = self.space.write(access, value);
        if let Some(functions) = &mut self.virtual_functions {
            changes.set(Changes::VIRTUAL_FUNCTIONS, functions.follow(&self.space, access.reg, change.flipped()));
        }
        if access.reg.offset() == header::COMMAND_STATUS {
            self.follow_command();
            changes.set(Changes::DECODE, change.flipped() & (command::MEMORY | command::IO) != 0);
            changes.set(Changes::BUS_MASTER, change.flipped() & command::BUS_MASTER != 0);
        }
        self.interrupts.config_written(access, value, change.new);
        let control = self.express.map(|at| u16::from(at) + u16::from(express::DEVICE_CONTROL));
        let starts_reset = access.lanes.touch(express::INITIATE_FLR) && value & express::INITIATE_FLR != 0;
        if self.flr && Some(access.reg.offset()) == control && starts_reset {
            self.reset(ResetKind::Function);
            changes |= Changes::RESET | Changes::DECODE | Changes::BUS_MASTER;
        }
        changes
    }

    /// Its BARs as the guest has programmed them.
    #[must_use]
    pub const fn bars(&self) -> &Bars {
        &self.bars
    }

    /// Programs BARs, decode enables, interrupt line and the multi-function bit, as firmware would.
    pub fn program(&mut self, programming: &Programming) {
        if self.is_virtual {
            (0..).zip(programming.bars).for_each(|(bar, address)| self.bars.set_address(bar, address.unwrap_or(0)));
            self.bars.memory_enabled = programming.memory;
            return;
        }
        let mut io = false;
        for (bar, address) in (0..).zip(programming.bars) {
            if let Some(address) = address {
                self.bars.set_address(bar, address);
                io |= self.bars.spec(bar).is_some_and(|spec| spec.kind == BarKind::Io);
            }
        }
        if let Some(at) = programming.rom {
            self.bars.set_address(ROM, at);
        }
        if let Some(functions) = &mut self.virtual_functions {
            functions.program(programming.vf_bars);
        }
        self.place(programming);
        self.space.set(Reg::containing(header::INTERRUPT), 0xFF, programming.interrupt_line.into());
        let enables = if programming.memory { command::MEMORY } else { 0 } | if io { command::IO } else { 0 };
        let access = Access { reg: Reg::containing(header::COMMAND_STATUS), lanes: Lanes::new(0, 1) };
        let kept = self.space.read(access.reg) & !(command::MEMORY | command::IO);
        self.space.write(access, kept | enables);
        self.follow_command();
        self.show_bars();
    }

    /// Shows which function of which device it is, where software looks for it. Resets leave that as it is.
    fn place(&mut self, programming: &Programming) {
        let several = if programming.multifunction { header::MULTI_FUNCTION } else { 0 };
        let mut shown = vec![(header::HEADER_TYPE, header::MULTI_FUNCTION, several)];
        if let Some(functions) = &self.virtual_functions {
            // A function that depends on no other names itself.
            shown.push((functions.dependency(), 0xFF << 16, u32::from(programming.number.byte()) << 16));
        }
        shown.extend(self.ari.map(|at| (at + ari::CAPABILITY, 0xFF00, u32::from(programming.next_function) << 8)));
        for (offset, mask, value) in shown {
            let reg = Reg::containing(offset);
            let mut def = self.space.definition(reg);
            def.reset = (def.reset & !mask) | value;
            self.space.define(reg, def);
        }
    }

    /// What an address register reads: a BAR, the ROM's, or a VF BAR.
    fn address_register(&self, offset: u16) -> Option<u32> {
        if self.is_virtual && is_address_register(offset) {
            return Some(0);
        }
        if offset == type0::ROM {
            return Some(self.bars.read_rom());
        }
        if let Some(register) = Bars::register_at(offset) {
            return Some(self.bars.read(register));
        }
        self.virtual_functions.as_ref()?.read(offset)
    }

    /// Offsets of all address registers.
    fn address_registers(&self) -> impl Iterator<Item = u16> + use<> {
        let virtual_functions = self.virtual_functions.as_ref().map(VirtualFunctions::first_bar);
        let first = std::iter::once(header::BAR0).chain(virtual_functions);
        first.flat_map(|first| (first..).step_by(4).take(6)).chain([type0::ROM])
    }

    /// Shows its configuration space in `mirror` from this point on: whatever [`Emulated::config_read`] gives.
    pub fn mirror(&mut self, mirror: Arc<dyn Mirror>) {
        self.mirror_beside(mirror, &[]);
    }

    /// As [`Emulated::mirror`], but for the registers in `others`, which the function itself keeps and stores in the mirror. They
    /// show ones from [`Emulated::detach`] on, too.
    pub fn mirror_beside(&mut self, mirror: Arc<dyn Mirror>, others: &[Reg]) {
        self.interrupts.mirror(Arc::clone(&mirror), self.command());
        let mut foreign = self.interrupts.owned();
        foreign.extend(others.iter().map(|reg| (*reg, Lanes::ALL)));
        foreign.extend(self.address_registers().map(|offset| (Reg::containing(offset), Lanes::ALL)));
        self.space.mirror(Arc::clone(&mirror), foreign);
        self.mirror = Some(mirror);
        self.show_bars();
    }

    fn show_bars(&self) {
        if let Some(mirror) = &self.mirror {
            for offset in self.address_registers() {
                mirror.store(Reg::containing(offset), Lanes::ALL, self.address_register(offset).unwrap_or(0));
            }
        }
    }

    /// Whether bus mastering is enabled in its command register.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        !self.detached && self.command() & command::BUS_MASTER != 0
    }

    /// Its interrupts, for the function itself and its workers.
    #[must_use]
    pub fn interrupts(&self) -> Arc<Interrupts> {
        self.interrupts.clone()
    }

    /// Reads MSI-X table or pending bits. All ones where there are none, for accesses that the specification does not
    /// define, and after [`Emulated::detach`].
    pub fn msix_read(&self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        let Some(msix) = self.msix.filter(|_| !self.detached) else { return };
        if let Some(at) = msix.table.inside(bar, offset) {
            self.interrupts.read_table(at, data);
        } else if let Some(at) = msix.pending.inside(bar, offset) {
            self.interrupts.read_pending(at, data);
        }
    }

    /// Writes the MSI-X table; a pending vector that this unmasks is sent. Pending bits keep nothing of a write.
    pub fn msix_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) {
        let Some(msix) = self.msix.filter(|_| !self.detached) else { return };
        if let Some(at) = msix.table.inside(bar, offset) {
            self.interrupts.write_table(at, data);
        }
    }

    /// Back to the reset state; sticky bits survive anything but a cold reset.
    pub fn reset(&mut self, kind: ResetKind) {
        self.space.reset(kind);
        // Where a virtual function decodes is the physical function's to say.
        if !self.is_virtual || kind == ResetKind::Cold {
            self.bars.reset();
        }
        if let Some(functions) = &mut self.virtual_functions {
            functions.reset();
        }
        self.show_bars();
        self.interrupts.reset();
    }

    /// Which of its virtual functions are enabled; `None` if it has none.
    #[must_use]
    pub fn virtual_functions(&self) -> Option<EnabledFunctions> {
        let functions = self.virtual_functions.as_ref()?;
        let enabled = functions.enabled(&self.space);
        Some(if self.detached { EnabledFunctions { count: 0, ..enabled } } else { enabled })
    }

    /// Records an error of the function, with the start of the packet that it is about.
    pub fn record_error(&mut self, error: PcieError, header: [u32; 4]) -> Recorded {
        match (self.aer, self.express) {
            (Some(aer), Some(express)) if !self.detached => {
                errors::record(&mut self.space, ErrorRegisters { aer, express }, error, header)
            }
            _ => Recorded::Nothing,
        }
    }

    /// Ends its life: interrupts are silent, nothing decodes, and every read gives all ones.
    pub fn detach(&mut self) {
        self.reset(ResetKind::Cold);
        self.interrupts.detach();
        self.space.blank_mirror();
        self.mirror = None;
        self.detached = true;
    }

    fn command(&self) -> u32 {
        self.space.read(Reg::containing(header::COMMAND_STATUS))
    }

    /// Lets the BARs decode as the command register says.
    fn follow_command(&mut self) {
        if self.is_virtual {
            return;
        }
        let enabled = self.command();
        self.bars.memory_enabled = enabled & command::MEMORY != 0;
        self.bars.io_enabled = enabled & command::IO != 0;
    }
}

/// Whether a dword is a BAR or the ROM's address.
fn is_address_register(offset: u16) -> bool {
    offset == type0::ROM || Bars::register_at(offset).is_some()
}

/// Adds the capabilities of message interrupts. Returns their state, and where a table of vectors is in `bars`.
fn message_interrupts(
    interrupt: InterruptSpec,
    bars: &Bars,
    builder: &mut ConfigBuilder,
) -> Result<(Messages, Option<MsixRegions>), EmulatedError> {
    let mut messages = Messages::default();
    let mut msix = None;
    match interrupt {
        InterruptSpec::None | InterruptSpec::Intx(_) => {}
        InterruptSpec::Msi { vectors, maskable } => {
            let state = Msi::new(vectors, maskable)?;
            let at = builder.capability(&MsiLayout::from(&state))?;
            messages.msi = Some((state, at));
        }
        InterruptSpec::MsiX { vectors, table_bar, table_offset, pba_bar, pba_offset } => {
            let state = MsixTable::new(vectors)?;
            let regions = MsixRegions {
                table: Region { place: MsixPlace { bar: table_bar, offset: table_offset }, len: state.table_len() },
                pending: Region { place: MsixPlace { bar: pba_bar, offset: pba_offset }, len: state.pending_len() },
            };
            check_regions(&regions, bars)?;
            let layout = MsixLayout { table: regions.table.place, pending: regions.pending.place };
            messages.msix = Some((state, builder.capability(&layout)?));
            msix = Some(regions);
        }
    }
    Ok((messages, msix))
}

fn check_regions(msix: &MsixRegions, bars: &Bars) -> Result<(), EmulatedError> {
    for (what, region) in [("table", msix.table), ("pending bit array", msix.pending)] {
        let MsixPlace { bar, offset } = region.place;
        let size = bars.spec(bar).filter(|spec| spec.is_memory()).map_or(0, |spec| spec.size);
        if !offset.is_multiple_of(8) || u64::from(offset) + region.len > size {
            return Err(EmulatedError::MsixPlace { what, bar, offset, len: region.len, size });
        }
    }
    if msix.table.overlaps(msix.pending.place.bar, msix.pending.place.offset.into(), msix.pending.len) {
        return Err(EmulatedError::MsixOverlap { table: msix.table.place.offset, pending: msix.pending.place.offset });
    }
    Ok(())
}

/// An endpoint that cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum EmulatedError {
    /// Its BARs.
    #[error("these BARs cannot be in one function")]
    Bars(#[from] BarError),
    /// Its virtual functions.
    #[error("its virtual functions are impossible")]
    Sriov(#[from] SriovError),
    /// Its capabilities.
    #[error("its capabilities do not fit in configuration space")]
    Capabilities(#[from] BuildError),
    /// The pin.
    #[error("interrupt pin {pin} does not exist: take 1 (INTA) to 4 (INTD)")]
    Pin {
        /// Asked for.
        pin: u8,
    },
    /// Number of MSI vectors.
    #[error("its MSI capability is impossible")]
    Msi(#[from] MsiVectorsError),
    /// Number of MSI-X vectors.
    #[error("its MSI-X capability is impossible")]
    Msix(#[from] MsixVectorsError),
    /// A region outside its BAR.
    #[error(
        "the MSI-X {what} needs {len} bytes at offset {offset:#x} of BAR {bar}, a multiple of 8, but that memory BAR has {size:#x} \
         bytes"
    )]
    MsixPlace {
        /// Table or pending bits.
        what: &'static str,
        /// Which BAR.
        bar: BarIndex,
        /// Offset.
        offset: u32,
        /// Bytes needed.
        len: u64,
        /// Size of the BAR, 0 if there is no such memory BAR.
        size: u64,
    },
    /// Table and pending bits on the same bytes.
    #[error("the MSI-X table at {table:#x} and the pending bit array at {pending:#x} overlap")]
    MsixOverlap {
        /// Offset of the table.
        table: u32,
        /// Offset of the pending bits.
        pending: u32,
    },
    /// No room for the clique.
    #[error("no 8 free bytes in configuration space for the clique capability: leave out another capability")]
    CliqueRoom,
}

#[cfg(test)]
mod tests;
