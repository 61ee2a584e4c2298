//! A made-up function of the host for tests: configuration bytes, BARs in a memory file, and a record of what was done.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use super::host::{Area, CONFIG, HostDevice, HostReset, IrqKind, Irqs, RegionIndex};
use super::neighbours::NotReset;
use super::signals::Signal;

/// The bytes of a configuration space.
#[derive(Clone)]
pub struct Registers {
    pub bytes: Vec<u8>,
}

impl Registers {
    pub fn blank(len: usize) -> Self {
        let mut registers = Self { bytes: vec![0; len] };
        registers.put(0x00, &[0xDE, 0x10, 0x30, 0x23]);
        registers.put(0x08, &[0xA1, 0x00, 0x02, 0x03]);
        registers.put(0x2C, &[0xDE, 0x10, 0xC1, 0x16]);
        registers
    }

    /// A GPU: power management, MSI, PCI Express with FLR, MSI-X at 0xC8; then AER, SR-IOV, ATS, resizable BARs.
    pub fn gpu() -> Self {
        let mut gpu = Self::blank(4096);
        gpu.dwords(0x10, &[0xF000_0000, 0x0000_000C, 0x20, 0xE000_000C, 0x20, 0]);
        gpu.put(0x3C, &[0x0B, 0x01]);
        gpu.put(0x06, &[0x10]);
        gpu.put(0x34, &[0x40]);
        gpu.dwords(0x40, &[0x0003_4801, 0x0000_0008]);
        gpu.dwords(0x48, &[0x0180_6005]);
        gpu.dwords(0x60, &[0x0002_C810, 0x1000_8002, 0x2910, 0x0045_8D03, 0x1103_0000]);
        gpu.dwords(0xC8, &[0x0005_0011, 0x00B9_0000, 0x00BA_0000]);
        gpu.dwords(0x100, &[0x1402_0001]);
        gpu.dwords(0x140, &[0x2001_0010, 0, 0x0010_0000]);
        gpu.dwords(0x200, &[0x3001_000F, 0x0000_0020]);
        gpu.dwords(0x300, &[0x0001_0015, 0x0007_FFF0, 0x0000_0C20]);
        gpu
    }

    /// A function without capabilities, with one 1 MiB BAR and 256 bytes of configuration space.
    pub fn conventional() -> Self {
        let mut registers = Self::blank(256);
        registers.put(0x3C, &[0x0B, 0x01]);
        registers
    }

    /// A function with MSI alone.
    pub fn with_msi(vectors: u8, wide: bool, maskable: bool) -> Self {
        let mut registers = Self::conventional();
        registers.put(0x06, &[0x10]);
        registers.put(0x34, &[0x50]);
        let control = u32::from(vectors.ilog2().to_le_bytes()[0]) << 17 | u32::from(wide) << 23 | u32::from(maskable) << 24;
        registers.dwords(0x50, &[control | 0x05]);
        registers
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn dwords(&mut self, at: usize, dwords: &[u32]) {
        for (index, dword) in dwords.iter().enumerate() {
            self.put(at + 4 * index, &dword.to_le_bytes());
        }
    }
}

/// What was done to the function, and how it behaves.
pub struct State {
    pub config: Vec<u8>,
    /// Every write to configuration space.
    pub writes: Vec<(u64, Vec<u8>)>,
    /// Descriptors by kind and vector; -1 for a vector that is enabled and signals nobody.
    pub triggers: BTreeMap<(IrqKind, u16), RawFd>,
    /// How often a kind was enabled and disabled.
    pub switches: Vec<(IrqKind, bool)>,
    pub resample: Option<RawFd>,
    pub resets: u32,
    /// Without its bus.
    pub can_reset: bool,
    /// With all of its bus.
    pub with_bus: bool,
    pub reset_fails: bool,
    pub lost_by_reset: bool,
    /// Vectors that the host has left.
    pub host_vectors: usize,
    pub reads_fail: bool,
    pub reports_errors: bool,
    pub hears_nothing: bool,
    /// Where signals of the host go.
    pub heard: BTreeMap<Signal, OwnedFd>,
    /// Another holder of the function keeps it from being reset.
    pub held: bool,
}

#[derive(Clone)]
struct Region {
    size: u64,
    mappable: Vec<Area>,
}

/// The function; clones share its state.
#[derive(Clone)]
pub struct FakeDevice {
    state: Arc<Mutex<State>>,
    memory: Arc<OwnedFd>,
    regions: Vec<Region>,
    irqs: BTreeMap<IrqKind, Irqs>,
}

/// Where region `index` starts in the file.
fn start(index: RegionIndex) -> u64 {
    u64::from(index) << 40
}

impl FakeDevice {
    pub fn new(registers: Registers, sizes: [u64; 6]) -> Self {
        let memory = memfd_create("bars", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, start(7)).unwrap();
        let mut regions: Vec<Region> = sizes
            .into_iter()
            .map(|size| Region { size, mappable: if size == 0 { Vec::new() } else { vec![Area { offset: 0, len: size }] } })
            .collect();
        regions.push(Region { size: 0, mappable: Vec::new() });
        regions.push(Region { size: registers.bytes.len().try_into().unwrap(), mappable: Vec::new() });
        let state = State {
            config: registers.bytes,
            writes: Vec::new(),
            triggers: BTreeMap::new(),
            switches: Vec::new(),
            resample: None,
            resets: 0,
            can_reset: true,
            with_bus: false,
            reset_fails: false,
            lost_by_reset: false,
            host_vectors: usize::MAX,
            reads_fail: false,
            reports_errors: true,
            hears_nothing: false,
            heard: BTreeMap::new(),
            held: false,
        };
        Self { state: Arc::new(Mutex::new(state)), memory: Arc::new(memory), regions, irqs: BTreeMap::new() }
    }

    /// A GPU with BARs of 16 MiB, 4 GiB and 32 MiB, 6 MSI-X vectors that can be added one by one, MSI and INTx.
    pub fn gpu() -> Self {
        Self::new(Registers::gpu(), [16 << 20, 4 << 30, 0, 32 << 20, 0, 0])
            .with_irqs(IrqKind::Msix, 6, true)
            .with_irqs(IrqKind::Msi, 1, false)
            .with_irqs(IrqKind::Intx, 1, false)
    }

    pub fn with_irqs(mut self, kind: IrqKind, count: u16, growable: bool) -> Self {
        self.irqs.insert(kind, Irqs { count, growable });
        self
    }

    pub fn with_mappable(mut self, index: usize, areas: &[(u64, u64)]) -> Self {
        self.regions[index].mappable = areas.iter().map(|(offset, len)| Area { offset: *offset, len: *len }).collect();
        self
    }

    /// An expansion ROM that starts with `content`, the rest zero.
    pub fn with_rom(mut self, content: &[u8], size: u64) -> Self {
        pwrite(&*self.memory, content, start(6)).unwrap();
        self.regions[6].size = size;
        self
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Vectors of `kind` that the host has enabled.
    pub fn enabled(&self, kind: IrqKind) -> usize {
        self.state().triggers.keys().filter(|(of, _)| *of == kind).count()
    }

    /// Vectors of `kind` that signal somebody.
    pub fn attached(&self, kind: IrqKind) -> Vec<u16> {
        let state = self.state();
        state.triggers.iter().filter(|((of, _), fd)| *of == kind && **fd >= 0).map(|((_, vector), _)| *vector).collect()
    }

    pub fn resets(&self) -> u32 {
        self.state().resets
    }

    /// A byte of configuration space.
    pub fn byte(&self, offset: usize) -> u8 {
        self.state().config[offset]
    }

    pub fn command(&self) -> u16 {
        let state = self.state();
        u16::from_le_bytes([state.config[4], state.config[5]])
    }
}

impl HostDevice for FakeDevice {
    fn size(&self, index: RegionIndex) -> u64 {
        self.regions.get(usize::try_from(index).unwrap()).map_or(0, |region| region.size)
    }

    fn mappable(&self, index: RegionIndex) -> Vec<Area> {
        self.regions.get(usize::try_from(index).unwrap()).map_or(Vec::new(), |region| region.mappable.clone())
    }

    fn read(&mut self, index: RegionIndex, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if self.state().reads_fail {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        if offset + u64::try_from(data.len()).unwrap() > self.size(index) {
            panic!("read of {} bytes at {offset:#x} past the end of region {index}", data.len());
        }
        if index == CONFIG {
            let at = usize::try_from(offset).unwrap();
            data.copy_from_slice(&self.state().config[at..at + data.len()]);
        } else {
            pread(&*self.memory, &mut *data, start(index) + offset)?;
        }
        Ok(())
    }

    fn write(&mut self, index: RegionIndex, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset + u64::try_from(data.len()).unwrap() > self.size(index) {
            panic!("write of {} bytes at {offset:#x} past the end of region {index}", data.len());
        }
        if index == CONFIG {
            let at = usize::try_from(offset).unwrap();
            let mut state = self.state();
            state.config[at..at + data.len()].copy_from_slice(data);
            state.writes.push((offset, data.to_vec()));
        } else {
            pwrite(&*self.memory, data, start(index) + offset)?;
        }
        Ok(())
    }

    fn file(&self, index: RegionIndex) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.memory.as_fd(), start(index)))
    }

    fn irqs(&self, kind: IrqKind) -> Irqs {
        self.irqs.get(&kind).copied().unwrap_or_default()
    }

    fn set_triggers(&mut self, kind: IrqKind, first: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
        let irqs = self.irqs(kind);
        let mut state = self.state();
        let end = first + u16::try_from(events.len()).unwrap();
        let other = state.triggers.keys().any(|(of, _)| *of != kind);
        let on = state.triggers.keys().any(|(of, _)| *of == kind);
        if other || end > irqs.count {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        if usize::from(end) > state.host_vectors {
            return Err(io::Error::from(io::ErrorKind::QuotaExceeded));
        }
        if !on {
            state.switches.push((kind, true));
            for vector in 0..end {
                state.triggers.insert((kind, vector), -1);
            }
        }
        for (vector, event) in (first..).zip(events) {
            let grown = state.triggers.insert((kind, vector), event.map_or(-1, |event| event.as_raw_fd())).is_none();
            if grown && !irqs.growable {
                return Err(io::Error::from(io::ErrorKind::InvalidInput));
            }
        }
        Ok(())
    }

    fn set_resample(&mut self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.state().resample = Some(event.as_raw_fd());
        Ok(())
    }

    fn disable(&mut self, kind: IrqKind) -> io::Result<()> {
        let mut state = self.state();
        state.switches.push((kind, false));
        state.triggers.retain(|(of, _), _| *of != kind);
        Ok(())
    }

    fn hear(&mut self, signal: Signal, event: BorrowedFd<'_>) -> io::Result<bool> {
        let mut state = self.state();
        if state.hears_nothing {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // As of a conventional function, which reports no errors.
        let has = signal != Signal::Error || state.reports_errors;
        if has {
            state.heard.insert(signal, event.try_clone_to_owned()?);
        }
        Ok(has)
    }

    fn can_reset(&self) -> bool {
        self.state().can_reset
    }

    fn begin_reset(&self) -> io::Result<Box<dyn HostReset>> {
        Ok(Box::new(self.clone()))
    }
}

impl HostReset for FakeDevice {
    fn run(&mut self) -> Result<(), NotReset> {
        let mut state = self.state();
        if !state.can_reset && !state.with_bus {
            return Err(NotReset::NoWay);
        }
        if state.held {
            return Err(NotReset::Held);
        }
        if state.reset_fails {
            return Err(NotReset::Failed { source: io::ErrorKind::TimedOut.into() });
        }
        state.resets += 1;
        if state.lost_by_reset {
            state.config.fill(0xFF);
        }
        Ok(())
    }
}
