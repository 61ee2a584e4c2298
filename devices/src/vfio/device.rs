//! A function of the host as a [`PciFunction`]: brings together what the other files decide.

use std::error::Error;
use std::sync::Arc;

use log::Level;
use pci::access::{Access, Reg};
use pci::bar::{BarIndex, BarSpec, Bars, ROM};
use pci::caps::power;
use pci::function::{BarPiece, Changes, FunctionId, HardwareReset, PciFunction, Programming, ResetKind};
use pci::regs::{command, header, type0};
use pci::seams::{IntxEvents, MsiRoutes};

use super::backing::Backing;
use super::host::{CONFIG, HostDevice, IrqKind};
use super::intx::Intx;
use super::msi::Msi;
use super::msix::{Claim, Msix};
use super::neighbours::NotReset;
use super::opened::{HostFunction, VfioError};
use super::overlay::{Overlay, byte_runs, is_partial};
use super::patch::{self, Placement, VfioOptions};
use super::reset::{self, Outcome, ResetOnce};
use super::rom::Rom;
use super::signals::{Signal, Signals};
use super::vectors::{Lender, VectorError};
use crate::complaints::{Complaints, Listener, chain};

/// A function of the host in a machine.
pub struct VfioFunction<D: HostDevice> {
    // The interrupts and BARs go before the device that they came from.
    msix: Option<Msix>,
    msi: Option<Msi>,
    intx: Option<Intx>,
    backings: [Option<Backing>; 6],
    rom: Rom,
    host: HostFunction<D>,
    overlay: Overlay,
    bars: Bars,
    id: FunctionId,
    routes: Arc<dyn MsiRoutes>,
    complaints: Complaints,
    /// What the host says of it; they go with it.
    signals: Option<Arc<Signals>>,
    /// Hardware is under reset.
    resetting: Option<Arc<ResetOnce>>,
    detached: bool,
}

impl<D: HostDevice> VfioFunction<D> {
    /// Takes an open function into the machine as function `id`: maps its BARs and switches its decoding on, so that the
    /// mappings work. `intx` is the wire of its interrupt pin, if it has one. One that the kernel did not reset when it was opened,
    /// as it cannot do so without its bus, is under reset: see [`PciFunction::take_reset`].
    pub fn new(
        mut host: HostFunction<D>,
        options: &VfioOptions,
        routes: Arc<dyn MsiRoutes>,
        intx: Option<Box<dyn IntxEvents>>,
        id: FunctionId,
    ) -> Result<Self, VfioError> {
        let name = || host.name.clone();
        let overlay = patch::overlay(&host.facts, &host.snapshot, options);
        let overlay = overlay.map_err(|source| VfioError::Patch { name: name(), source })?;
        if options.placement == Placement::Conventional {
            // What is not seen resets nothing.
            host.facts.express = None;
        }
        let bars = Bars::new(&host.bars).and_then(|bars| host.rom.map_or(Ok(bars.clone()), |size| bars.with_rom(size)));
        let bars = bars.map_err(|source| VfioError::Bars { name: name(), source })?;
        let (msix_irqs, msi_irqs) = (host.device.irqs(IrqKind::Msix), host.device.irqs(IrqKind::Msi));
        let msix = host.facts.msix.map(|fact| Msix::new(fact, msix_irqs)).transpose();
        let msix = msix.map_err(|source| VfioError::Msix { name: name(), source })?;
        let msi = host.facts.msi.map(|fact| Msi::new(fact, msi_irqs.count)).transpose();
        let msi = msi.map_err(|source| VfioError::Msi { name: name(), source })?;
        let intx = intx.filter(|_| host.device.irqs(IrqKind::Intx).count != 0).map(Intx::new);
        let mut function = Self {
            msix,
            msi,
            intx,
            backings: [const { None }; 6],
            rom: Rom::default(),
            host,
            overlay,
            bars,
            id,
            routes,
            complaints: Complaints::default(),
            signals: None,
            resetting: None,
            detached: false,
        };
        function.quiet();
        function.map_bars();
        if function.host.device.can_reset() {
            function.follow_interrupts();
        } else {
            function.begin_hardware_reset();
        }
        Ok(function)
    }

    fn map_bars(&mut self) {
        let specs: Vec<(BarIndex, BarSpec)> = self.bars.specs().collect();
        for (bar, spec) in specs {
            let backing = Backing::new(&self.host, bar, spec);
            if let Some(slot) = self.backings.get_mut(usize::from(bar)) {
                *slot = Some(backing);
            }
        }
    }

    /// Its name in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.host.name
    }

    fn device_dword(&mut self, reg: Reg) -> u32 {
        let mut bytes = [0xFF; 4];
        if u64::from(reg.offset()) + 4 <= self.host.device.size(CONFIG)
            && let Err(error) = self.host.device.read(CONFIG, reg.offset().into(), &mut bytes)
        {
            self.complain("configuration read", &error);
            bytes = [0xFF; 4];
        }
        u32::from_le_bytes(bytes)
    }

    /// Sends the bits of a guest's write that are not kept here to the device.
    fn forward(&mut self, access: Access, value: u32) {
        let mask = self.overlay.forwarded(access);
        if mask == 0 || u64::from(access.reg.offset()) + 4 > self.host.device.size(CONFIG) {
            return;
        }
        let current = if is_partial(mask) { self.device_dword(access.reg) } else { 0 };
        for (offset, bytes) in byte_runs(mask, value, current) {
            let at = u64::from(access.reg.offset() + offset);
            if let Err(error) = self.host.device.write(CONFIG, at, &bytes) {
                self.complain("configuration write", &error);
            }
        }
    }

    /// Switches host interrupts to the one kind that the guest has enabled.
    fn follow_interrupts(&mut self) {
        let mut lender = Lender { id: self.id, device: &mut self.host.device, routes: self.routes.as_ref() };
        let mut results: Vec<Result<(), VectorError>> = Vec::new();
        let by_table = self.msix.as_ref().is_some_and(Msix::enabled);
        // MSI-X wins over MSI if a guest enables both, which it must not (PCIe 6.0 7.7.1.2).
        let by_message = !by_table && self.msi.as_ref().is_some_and(Msi::enabled);
        if let Some(intx) = self.intx.as_mut().filter(|_| by_table || by_message) {
            results.push(intx.set(false, &mut lender));
        }
        if let Some(msi) = self.msi.as_mut().filter(|_| !by_message) {
            results.push(msi.release(&mut lender));
        }
        if let Some(msix) = &mut self.msix {
            results.push(msix.follow(&mut lender));
        }
        if let Some(msi) = self.msi.as_mut().filter(|_| by_message) {
            results.push(msi.follow(&mut lender));
        }
        if let Some(intx) = self.intx.as_mut().filter(|_| !by_table && !by_message) {
            results.push(intx.set(true, &mut lender));
        }
        for error in results.into_iter().filter_map(Result::err) {
            self.complain("interrupts", &error);
        }
    }

    /// All messages off.
    fn silence_messages(&mut self) {
        let mut lender = Lender { id: self.id, device: &mut self.host.device, routes: self.routes.as_ref() };
        let msix = self.msix.as_mut().map(|msix| msix.reset(&mut lender));
        let msi = self.msi.as_mut().map(|msi| msi.reset(&mut lender));
        for error in [msix, msi].into_iter().flatten().filter_map(Result::err) {
            self.complain("interrupts", &error);
        }
    }

    /// INTx off.
    fn silence_wire(&mut self) {
        let mut lender = Lender { id: self.id, device: &mut self.host.device, routes: self.routes.as_ref() };
        if let Some(Err(error)) = self.intx.as_mut().map(|intx| intx.set(false, &mut lender)) {
            self.complain("interrupts", &error);
        }
    }

    /// Registers that are kept here go back to their reset values.
    fn begin_reset(&mut self, kind: ResetKind) {
        self.silence_messages();
        self.overlay.reset(kind);
        self.bars.reset();
        self.begin_hardware_reset();
    }

    /// Hardware sends nothing. Its reset is left to [`PciFunction::take_reset`], for as long as which nothing answers.
    fn begin_hardware_reset(&mut self) {
        if self.resetting.is_some() {
            // Nobody has reached it since that one began.
            return;
        }
        self.quiet();
        match self.host.device.begin_reset() {
            Ok(reset) => self.resetting = Some(Arc::new(ResetOnce::new(reset))),
            Err(source) => self.after_reset(Outcome::Not(NotReset::Failed { source })),
        }
    }

    /// Hardware decodes and sends nothing, as before; a guest can use it again unless it has left.
    fn after_reset(&mut self, outcome: Outcome) {
        self.tell(outcome);
        if !self.detached {
            self.quiet();
            self.follow_interrupts();
        }
    }

    fn end_hardware_reset(&mut self, reset: &ResetOnce) {
        if let Some(done) = reset.end() {
            let outcome = reset::outcome(&mut self.host.device, done);
            self.after_reset(outcome);
        }
    }

    /// Whether it answers nothing: it has left, or hardware is under reset.
    const fn is_silent(&self) -> bool {
        self.detached || self.resetting.is_some()
    }

    /// Who hears of what hardware can no longer do.
    pub fn report_to(&mut self, listener: Listener) {
        self.complaints.report_to(listener);
    }

    /// Has the host give `signals` until the function is closed. One that cannot be had is told of.
    pub fn hear(&mut self, signals: Arc<Signals>) {
        for signal in Signal::ALL {
            if let Err(error) = self.host.device.hear(signal, signals.event(signal)) {
                self.complain("errors and requests of the host are not heard of", &error);
            }
        }
        self.signals = Some(signals);
    }

    /// Hardware decodes, and sends nothing.
    fn quiet(&mut self) {
        if let Err(error) = reset::set_command(&mut self.host.device, 0) {
            self.complain("command register", &error);
        }
    }

    /// A guest can ask for resets at will, by the port above.
    fn tell(&mut self, outcome: Outcome) {
        let name = &self.host.name;
        match outcome {
            Outcome::Done => {}
            Outcome::Not(NotReset::Failed { source }) => {
                let text = format_args!("device {name}: the reset failed, it may be in any state");
                self.complaints.fail_error(Level::Error, text, &source);
            }
            Outcome::Not(why) => {
                self.complaints.add(Level::Warn, format_args!("device {name}: not reset, it keeps its state: {}", chain(&why)));
            }
            Outcome::Lost => self.complaints.fail(
                Level::Error,
                format_args!("device {name}: it does not answer after its reset; the host must be power-cycled"),
            ),
        }
    }

    fn complain(&mut self, what: &str, error: &dyn Error) {
        let name = &self.host.name;
        self.complaints.fail_error(Level::Warn, format_args!("device {name}: {what}"), error);
    }

    /// Decoding follows the command register and stops outside D0 (PCI Power Management 1.2, 5.4).
    fn update_decode(&mut self) -> Changes {
        let command = self.overlay.value(header::COMMAND_STATUS);
        let awake = self.power_state() == 0;
        let (memory, io) = (awake && command & command::MEMORY != 0, awake && command & command::IO != 0);
        let changed = (memory, io) != (self.bars.memory_enabled, self.bars.io_enabled);
        (self.bars.memory_enabled, self.bars.io_enabled) = (memory, io);
        if changed { Changes::DECODE } else { Changes::empty() }
    }

    fn power_state(&self) -> u32 {
        self.host.facts.power.map_or(0, |(offset, _)| self.overlay.value(power::control_of(offset)) & power::STATE)
    }

    /// A power state that the function does not have is not taken (PCI Power Management 1.2, 3.2.4).
    fn keep_power_state(&mut self, before: u32) {
        let Some((offset, [first, second])) = self.host.facts.power else { return };
        let missing = matches!((self.power_state(), first, second), (1, false, _) | (2, _, false));
        if missing {
            self.overlay.set(power::control_of(offset), power::STATE, before);
        }
    }
}

impl<D: HostDevice> PciFunction for VfioFunction<D> {
    fn config_read(&mut self, reg: Reg) -> u32 {
        if self.is_silent() {
            return u32::MAX;
        }
        let offset = reg.offset();
        if let Some(register) = Bars::register_at(offset) {
            return self.bars.read(register);
        }
        if offset == type0::ROM {
            return self.bars.read_rom();
        }
        let device = self.device_dword(reg);
        let value = self.overlay.read(reg, device);
        if let Some(msix) = self.msix.as_ref().filter(|msix| offset == u16::from(msix.offset())) {
            return msix.first_dword(value);
        }
        self.msi.as_mut().and_then(|msi| msi.read(offset, value)).unwrap_or(value)
    }

    fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let offset = access.reg.offset();
        if self.is_silent() {
            return Changes::empty();
        }
        if offset == type0::ROM {
            let changed = self.bars.write_rom(access.lanes, value);
            return if changed { Changes::DECODE } else { Changes::empty() };
        }
        if let Some(register) = Bars::register_at(offset) {
            let changed = self.bars.write(register, access.lanes, value);
            return if changed { Changes::DECODE } else { Changes::empty() };
        }
        let power = self.power_state();
        if reset::is_asked_for(&self.host.facts, access, value) {
            self.begin_reset(ResetKind::Function);
            return Changes::RESET | Changes::DECODE | Changes::BUS_MASTER;
        }
        let change = self.overlay.write(access, value);
        self.forward(access, value);
        let to_msix = self.msix.as_mut().filter(|msix| msix.is_control(access)).map(|msix| msix.write_control(access, value));
        let to_msi = self.msi.as_mut().is_some_and(|msi| msi.write(access, value));
        if to_msix.is_some() || to_msi {
            self.follow_interrupts();
        }
        if change.flipped() == 0 {
            return Changes::empty();
        }
        self.keep_power_state(power);
        let mut changes = self.update_decode();
        if offset == header::COMMAND_STATUS && change.flipped() & command::BUS_MASTER != 0 {
            changes |= Changes::BUS_MASTER;
        }
        changes
    }

    fn bars(&self) -> &Bars {
        &self.bars
    }

    fn program(&mut self, programming: &Programming) {
        for (bar, at) in (0..).zip(programming.bars) {
            if let Some(at) = at {
                self.bars.set_address(bar, at);
            }
        }
        if let Some(at) = programming.rom {
            self.bars.set_address(ROM, at);
        }
        let io = self.bars.specs().any(|(bar, spec)| !spec.is_memory() && self.bars.address(bar).is_some_and(|at| at != 0));
        let memory = if programming.memory { command::MEMORY } else { 0 };
        let enables = memory | if io { command::IO } else { 0 };
        self.overlay.set(header::COMMAND_STATUS, command::MEMORY | command::IO, enables);
        self.overlay.set(header::INTERRUPT, 0xFF, programming.interrupt_line.into());
        let multifunction = if programming.multifunction { header::MULTI_FUNCTION } else { 0 };
        // Resets leave that as it is.
        self.overlay.replace(header::HEADER_TYPE, header::MULTI_FUNCTION, multifunction);
        self.update_decode();
    }

    fn bar_layout(&self, bar: BarIndex) -> Vec<BarPiece> {
        if bar == ROM {
            return self.bars.spec(ROM).map(|spec| BarPiece::Trapped { offset: 0, len: spec.size }).into_iter().collect();
        }
        let backing = self.backings.get(usize::from(bar)).and_then(Option::as_ref);
        backing.map(|backing| backing.pieces.clone()).unwrap_or_default()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self.is_silent() || self.bars.spec(bar).is_none() {
            return;
        }
        if bar == ROM {
            if let Err(error) = self.rom.read(&mut self.host.device, offset, data) {
                self.complain("expansion ROM", &error);
            }
            return;
        }
        let claim = self.msix.as_ref().map_or(Claim::None, |msix| msix.claim(bar, offset, len));
        if let (Claim::Table(at), Some(msix)) = (claim, &self.msix) {
            msix.read_table(at, data);
            return;
        }
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.host.device.size(bar.into()));
        if !inside {
            return;
        }
        if let Err(error) = self.host.device.read(bar.into(), offset, data) {
            data.fill(0xFF);
            self.complain("BAR read", &error);
        }
        if let (Claim::Pending(at), Some(msix)) = (claim, &self.msix) {
            msix.add_pending(at, data);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self.is_silent() || bar == ROM || self.bars.spec(bar).is_none() {
            return;
        }
        match (self.msix.as_ref().map_or(Claim::None, |msix| msix.claim(bar, offset, len)), &mut self.msix) {
            (Claim::Table(at), Some(msix)) => {
                let mut lender = Lender { id: self.id, device: &mut self.host.device, routes: self.routes.as_ref() };
                if let Err(error) = msix.write_table(at, data, &mut lender) {
                    self.complain("interrupts", &error);
                }
                return;
            }
            // Read-only (PCIe 6.0 7.7.2.10).
            (Claim::Pending(_), _) => return,
            _ => {}
        }
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.host.device.size(bar.into()));
        if inside && let Err(error) = self.host.device.write(bar.into(), offset, data) {
            self.complain("BAR write", &error);
        }
    }

    fn reset(&mut self, kind: ResetKind) {
        if !self.detached {
            self.begin_reset(kind);
        }
    }

    fn take_reset(&mut self) -> Option<Arc<dyn HardwareReset>> {
        self.resetting.clone().map(|reset| reset as Arc<dyn HardwareReset>)
    }

    fn end_reset(&mut self, reset: &Arc<dyn HardwareReset>) {
        let is_it = |begun: &mut Arc<ResetOnce>| std::ptr::addr_eq(Arc::as_ptr(begun), Arc::as_ptr(reset));
        if let Some(ended) = self.resetting.take_if(is_it) {
            self.end_hardware_reset(&ended);
        }
    }

    fn bus_master(&self) -> bool {
        !self.detached && self.overlay.value(header::COMMAND_STATUS) & command::BUS_MASTER != 0
    }

    fn detach(&mut self) {
        if self.detached {
            return;
        }
        self.detached = true;
        self.silence_messages();
        self.silence_wire();
        self.bars.reset();
        self.begin_hardware_reset();
    }
}

impl<D: HostDevice> Drop for VfioFunction<D> {
    /// For a function that no machine took, or whose machine left its reset undone.
    fn drop(&mut self) {
        self.detach();
        if let Some(reset) = self.resetting.take() {
            reset.run();
            self.end_hardware_reset(&reset);
        }
    }
}

#[cfg(test)]
mod tests;
