//! Takes configuration accesses of vCPUs to the hierarchy and carries out what follows from writes.
//!
//! One lock orders writes with their effects: otherwise two vCPUs could apply moves of one BAR in the wrong order.

use std::sync::{Arc, Mutex, MutexGuard};

use arch::memory_map::Ecam;
use arch::ports;
use devices::legacy::ResetControl;
use pci::address::Sbdf;
use pci::cf8::AddressLatch;
use pci::ecam;
use pci::effect::Effect;
use pci::hierarchy::{Appeared, Hierarchy, finish_resets};
use pci::sync::lock;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

use crate::effects::{Endpoint, Mapper};

/// The hierarchy with the means to change the machine.
pub struct PciBus {
    tree: Mutex<Tree>,
    windows: Vec<Ecam>,
    latch: Option<AddressLatch>,
}

/// The hierarchy and what follows from its changes.
pub struct Tree {
    /// Who answers where.
    pub hierarchy: Hierarchy,
    /// What is mapped.
    pub mapper: Mapper,
    /// What is to be carried out; empty between changes.
    pub effects: Vec<Effect>,
}

impl PciBus {
    /// Answers in `windows`, and at the ports 0xCF8 and 0xCFC if it `answers_ports`. Everything that the programmed state lets through
    /// is mapped when this returns.
    #[must_use]
    pub fn new(mut hierarchy: Hierarchy, mut mapper: Mapper, windows: Vec<Ecam>, answers_ports: bool) -> Self {
        let mut effects = Vec::new();
        hierarchy.start(&mut effects);
        mapper.apply(&effects);
        effects.clear();
        Self { tree: Mutex::new(Tree { hierarchy, mapper, effects }), windows, latch: answers_ports.then(AddressLatch::default) }
    }

    /// Whether the ports 0xCF8 and 0xCFC are answered.
    #[must_use]
    pub const fn answers_ports(&self) -> bool {
        self.latch.is_some()
    }

    /// Whether `port` is part of the configuration mechanism and answered. 0xCF9 is a reset register.
    #[must_use]
    pub fn is_config_port(&self, port: u16) -> bool {
        self.latch.is_some() && (ports::CONFIG_ADDRESS..ports::CONFIG_DATA + 4).contains(&port) && port != ports::RESET
    }

    /// The segment and offset of an access that lies wholly in an ECAM window.
    #[must_use]
    pub fn ecam(&self, at: u64, len: usize) -> Option<(u16, u64)> {
        let window = self.windows.iter().find(|window| window.range.contains(at))?;
        let end = at.checked_add(u64::try_from(len).ok()?)?;
        (end <= window.range.end).then(|| (window.segment, at - window.range.start))
    }

    /// Where the configuration space of `at` lies in guest-physical memory.
    #[must_use]
    pub fn ecam_address(&self, at: Sbdf) -> Option<u64> {
        let window = self.windows.iter().find(|window| window.segment == at.segment)?;
        let address = window.range.start + (u64::from(at.bdf.requester_id()) << 12);
        window.range.contains(address).then_some(address)
    }

    /// Reads 1 to 8 bytes.
    pub fn read_ecam(&self, segment: u16, offset: u64, data: &mut [u8]) {
        match ecam::decode(offset) {
            Some((bdf, register)) => self.lock().hierarchy.read(segment, bdf, register, data),
            None => data.fill(0xFF),
        }
    }

    /// Writes 1 to 8 bytes; everything that follows has happened when this returns.
    pub fn write_ecam(&self, segment: u16, offset: u64, data: &[u8]) {
        if let Some((bdf, register)) = ecam::decode(offset) {
            self.write(|hierarchy, effects| hierarchy.write(segment, bdf, register, data, effects));
        }
    }

    /// The address latch, if the ports are answered.
    #[must_use]
    pub const fn latch(&self) -> Option<&AddressLatch> {
        self.latch.as_ref()
    }

    /// Looks at the tree, or changes it; effects that `change` leaves are carried out before this returns.
    pub fn change<T>(&self, change: impl FnOnce(&mut Tree) -> T) -> T {
        let mut tree = self.lock();
        let result = change(&mut tree);
        finish(tree);
        result
    }

    /// Ends all access to endpoints and by emulated ones, then the life of every endpoint, then its DMA maps. No vCPU runs
    /// any more.
    pub fn detach(&self) {
        let mut tree = self.lock();
        tree.mapper.close();
        tree.hierarchy.detach();
        let unfinished = tree.hierarchy.take_unfinished_resets();
        drop(tree);
        finish_resets(&unfinished);
        self.lock().mapper.release_dma();
    }

    fn read_port(&self, offset: u16, data: &mut [u8]) {
        data.fill(0xFF);
        match (&self.latch, offset, data) {
            (Some(latch), 0, data) if data.len() == 4 => data.copy_from_slice(&latch.read().to_le_bytes()),
            (Some(latch), 4..8, data) => {
                let lane = u8::try_from(offset - 4).unwrap_or(0);
                // An access that straddles the window's end is answered by nobody.
                if let (Some((bdf, register)), true) = (latch.target(lane), data.len() + usize::from(lane) <= 4) {
                    self.lock().hierarchy.read_conventional(bdf, register, data);
                }
            }
            _ => {}
        }
    }

    fn write_port(&self, offset: u16, data: &[u8]) {
        match (&self.latch, offset) {
            (Some(latch), 0) => {
                if let Ok(bytes) = data.try_into() {
                    latch.write(u32::from_le_bytes(bytes));
                }
            }
            (Some(latch), 4..8) => {
                let lane = u8::try_from(offset - 4).unwrap_or(0);
                if let (Some((bdf, register)), true) = (latch.target(lane), data.len() + usize::from(lane) <= 4) {
                    self.write(|hierarchy, effects| hierarchy.write_conventional(bdf, register, data, effects));
                }
            }
            _ => {}
        }
    }

    fn write(&self, write: impl FnOnce(&mut Hierarchy, &mut Vec<Effect>)) {
        let mut tree = self.lock();
        let Tree { hierarchy, effects, .. } = &mut *tree;
        write(hierarchy, effects);
        finish(tree);
    }

    fn lock(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }
}

impl Drop for PciBus {
    /// For machines that fail before they run.
    fn drop(&mut self) {
        self.detach();
    }
}

/// Carries out what follows from a change, and then, when others can go on, what takes hardware's time.
fn finish(mut tree: MutexGuard<'_, Tree>) {
    tree.apply();
    let unfinished = tree.hierarchy.take_unfinished_resets();
    drop(tree);
    finish_resets(&unfinished);
}

impl Tree {
    fn apply(&mut self) {
        for Appeared { id, name, function } in self.hierarchy.take_appeared() {
            self.mapper.add(id, Endpoint::made_by_registers(name.0, function));
        }
        self.mapper.apply(&self.effects);
        self.effects.clear();
        self.hierarchy.take_vanished().into_iter().for_each(|id| self.mapper.remove(id));
    }
}

/// The eight ports from 0xCF8. The second one is the reset register.
pub struct ConfigPorts {
    /// Where configuration accesses go.
    pub pci: Arc<PciBus>,
    /// What a byte access to 0xCF9 means.
    pub reset: Arc<ResetControl>,
}

impl DevicePio for ConfigPorts {
    fn pio_read(&self, base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        if offset == 1 && data.len() == 1 {
            self.reset.pio_read(base, 0, data);
        } else {
            self.pci.read_port(offset, data);
        }
    }

    fn pio_write(&self, base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if offset == 1 && data.len() == 1 {
            self.reset.pio_write(base, 0, data);
        } else {
            self.pci.write_port(offset, data);
        }
    }
}
