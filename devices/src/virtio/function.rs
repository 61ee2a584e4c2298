//! A virtio device as a PCI function: answers configuration cycles and BAR accesses, starts and stops the workers of its
//! queues. What a queue is for is the device's business.

mod state;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use log::Level;
use pci::access::{self, Access, Reg};
use pci::bar::{BarIndex, Bars};
use pci::emulated::{Attachment, Emulated, EmulatedError, EmulatedSpec};
use pci::errors::{PcieError, Recorded};
use pci::function::{BarPiece, Changes, Doorbell, PciFunction, Programming, ResetKind};
use pci::mirror::Mirror;
use pci::seams::{MsiPort, Workers};
use pci::state::{Reader, StateError, Writer};
use thiserror::Error;
use virtio_queue::{Queue, QueueT};
use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryMmap};

use super::common::{self, CommonRegs, Event, QueueRegs, status};
use super::feature;
use super::kind::Kind;
use super::layout::{self, Part};
use super::ring::{Mark, Memory, Ring};
use super::signals::Signals;
use super::window::{Touch, Window};
use super::worker::{Bell, Crew, Worker};
use crate::complaints::{Complaints, Listener};

/// How long a write that switches bus mastering off waits for workers.
const REST: Duration = Duration::from_secs(2);

/// What is particular to one kind of device.
///
/// All methods are called with the function's lock held: by vCPUs and, for resets, by whoever resets. They must not wait for
/// the guest or the host.
pub trait Device: Send {
    /// Which kind.
    fn kind(&self) -> Kind;
    /// Device feature bits, 0 to 23 and 50 upwards; the transport adds its own.
    fn features(&self) -> u64;
    /// Which of the transport's own features are offered: all, unless somebody else works on the rings.
    fn transport_features(&self) -> u64 {
        feature::TRANSPORT
    }
    /// Who hears of what the host's side of it can no longer do.
    fn report_to(&mut self, _listener: Listener) {}
    /// Most entries of each queue, powers of two; at most [`layout::MAX_QUEUES`] queues.
    fn queue_sizes(&self) -> &[u16];
    /// Device configuration as bytes. Its length does not change; after a change of content, say
    /// [`Signals::config_changed`].
    fn config(&self) -> Cow<'_, [u8]>;
    /// The driver writes `data` at `offset` of the configuration. Most devices have nothing to write.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// Starts serving the queues. The workers end when they are dropped: at the reset of the device, or with the function.
    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>>;
    /// Writes what a guest can have changed of it, apart from the transport's registers. Its workers are held.
    fn save(&self, _writer: &mut Writer) -> Result<(), StateError> {
        Ok(())
    }
    /// Takes what a device of the same kind saved. [`Device::start`] follows if the driver had started it.
    fn restore(&mut self, _reader: &mut Reader<'_>) -> Result<(), StateError> {
        Ok(())
    }
    /// The device was reset; its workers have ended. What belongs to the host, such as sockets, stays.
    fn reset(&mut self) {}
}

/// The driver is ready.
pub struct Start {
    /// Features that driver and device agreed on.
    pub features: u64,
    /// The queues that the driver set up, by ascending number.
    pub rings: Vec<Ring>,
    /// Guest memory.
    pub memory: Memory,
    /// To signal the driver.
    pub signals: Arc<Signals>,
    /// Who serves the queues.
    pub crew: Arc<Crew>,
}

/// Where a function is put.
pub struct Seat {
    /// Guest memory.
    pub memory: Memory,
    /// Takes its interrupts.
    pub msi: Arc<dyn MsiPort>,
    /// What it hangs on, which decides the device type that it shows (PCIe 6.0 7.5.3.2).
    pub on: Attachment,
}

impl Start {
    /// Takes out the queue with this number, if the driver set it up.
    pub fn ring(&mut self, index: usize) -> Option<Ring> {
        let at = self.rings.iter().position(|ring| ring.index() == index)?;
        Some(self.rings.remove(at))
    }
}

/// A virtio device on the PCI transport.
pub struct VirtioFunction<D: Device> {
    registers: Emulated,
    common: CommonRegs,
    window: Window,
    signals: Arc<Signals>,
    memory: Memory,
    /// The doorbell of each queue.
    bells: Vec<Arc<Bell>>,
    /// Where each queue stands.
    marks: Vec<Arc<Mark>>,
    crew: Arc<Crew>,
    /// Empty while no queue is served.
    workers: Vec<Worker>,
    device: D,
    complaints: Complaints,
    detached: bool,
}

impl<D: Device> VirtioFunction<D> {
    /// The function for `device`.
    pub fn with_device(device: D, seat: Seat) -> Result<Self, VirtioError> {
        let Seat { memory, msi, on } = seat;
        let sizes = device.queue_sizes();
        let queues = u16::try_from(sizes.len()).ok().filter(|queues| *queues <= layout::MAX_QUEUES);
        let queues = queues.ok_or(VirtioError::Queues { queues: sizes.len() })?;
        let vectors = queues + 1;
        let config = u32::try_from(device.config().len()).unwrap_or(u32::MAX);
        let spec = EmulatedSpec {
            ids: device.kind().ids(),
            bars: layout::bars(),
            on,
            interrupt: layout::interrupt(vectors),
            flr: true,
            vendor_capabilities: layout::capabilities(queues, config),
            ..EmulatedSpec::default()
        };
        let registers = Emulated::new(&spec, msi, None)?;
        let bells = sizes.iter().map(|_| Bell::new().map(Arc::new)).collect::<Result<Vec<_>, _>>().map_err(VirtioError::Bell)?;
        let read = |at: u8| registers.config_read(Reg::containing(at.into()));
        let window = pci::caps::walk(read).into_iter().find_map(|extent| {
            let at = extent.offset;
            layout::is_window(read(at)).then_some(Window::new(at))
        });
        let Some(window) = window else { unreachable!("the layout has a window capability") };
        let crew = Arc::new(Crew::default());
        crew.rest(Duration::ZERO);
        Ok(Self {
            common: CommonRegs::new(device.features() | device.transport_features(), sizes, vectors),
            window,
            signals: Arc::new(Signals::new(registers.interrupts(), sizes.len())),
            memory,
            marks: bells.iter().map(|_| Arc::default()).collect(),
            bells,
            crew,
            workers: Vec::new(),
            registers,
            device,
            complaints: Complaints::default(),
            detached: false,
        })
    }

    /// What is particular to it.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Who hears of what it can no longer do.
    pub fn report_to(&mut self, listener: Listener) {
        self.complaints.report_to(Arc::clone(&listener));
        self.device.report_to(listener);
    }

    /// A dword of configuration space without the window's registers.
    #[cfg(test)]
    pub(super) fn registers_read(&self, at: u8) -> u32 {
        self.registers.config_read(Reg::containing(at.into()))
    }

    /// To tell the driver something while no queue is served, such as a change of configuration.
    #[must_use]
    pub fn signals(&self) -> Arc<Signals> {
        self.signals.clone()
    }

    fn bar_access_read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        match layout::part(offset, data.len()) {
            Part::Common(offset) => {
                if self.signals.needs_reset() {
                    self.common.status |= status::NEEDS_RESET;
                }
                self.common.generation = self.signals.generation();
                access::read(offset, common::LEN, data, |reg| self.common.read(reg));
            }
            Part::Isr => data.fill(self.signals.take_isr()),
            Part::Device(offset) => {
                let config = self.device.config();
                let bytes = config.get(offset..).unwrap_or_default();
                data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            }
            Part::MsiX => self.registers.msix_read(layout::BAR, offset, data),
            Part::Doorbell(_) | Part::Nothing => {}
        }
    }

    fn bar_access_write(&mut self, offset: u64, data: &[u8]) {
        match layout::part(offset, data.len()) {
            Part::Common(offset) => {
                let mut events = Vec::new();
                access::write(offset, common::LEN, data, |access, value| events.extend(self.common.write(access, value)));
                for event in events {
                    self.apply(event);
                }
            }
            Part::Doorbell(queue) => {
                if let Some(bell) = self.bells.get(queue) {
                    bell.ring();
                }
            }
            Part::MsiX => self.registers.msix_write(layout::BAR, offset, data),
            Part::Device(offset) => {
                let room = self.device.config().len().saturating_sub(offset);
                if let Some(data) = data.get(..data.len().min(room)).filter(|data| !data.is_empty()) {
                    self.device.write_config(offset, data);
                }
            }
            Part::Isr | Part::Nothing => {}
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Start => self.start(),
            Event::Reset => self.reset_device(),
            Event::Vectors => self.publish_vectors(),
        }
    }

    /// Starts the device on the queues that the driver has set up. One that cannot be served makes the device give up.
    fn start(&mut self) {
        let features = self.common.features;
        let memory = self.memory.memory();
        let numbered = self.common.queues.iter().zip(&self.bells).zip(&self.marks).enumerate();
        let rings: Option<Vec<Ring>> = numbered
            .filter(|(_, ((regs, _), _))| regs.enabled)
            .map(|(index, ((regs, bell), mark))| {
                let queue = queue(regs, features, &memory)?;
                Some(Ring::new(index, queue, bell.clone(), self.memory.clone(), self.signals.clone(), mark.clone()))
            })
            .collect();
        let Some(rings) = rings else { return self.signals.give_up() };
        // What waits since before the start is looked at.
        rings.iter().for_each(|ring| ring.bell().ring());
        let (memory, signals, crew) = (self.memory.clone(), self.signals.clone(), self.crew.clone());
        let start = Start { features, rings, memory, signals, crew };
        match self.device.start(start) {
            Ok(workers) => self.workers = workers,
            Err(error) => {
                let text = format_args!("cannot serve a virtio queue, so the device gives up");
                self.complaints.fail_error(Level::Warn, text, &error);
                self.signals.give_up();
            }
        }
    }

    /// As after a write of 0 to the device status: no worker touches guest memory any more.
    fn reset_device(&mut self) {
        self.workers.clear();
        self.marks.iter().for_each(|mark| mark.set(0, 0));
        self.device.reset();
        self.common.reset();
        self.signals.reset();
        self.publish_vectors();
    }

    fn reset_all(&mut self) {
        self.reset_device();
        self.window = self.window.reset();
        self.follow_bus_master();
    }

    fn publish_vectors(&self) {
        self.signals.set_vectors(self.common.vector, self.common.queues.iter().map(|queue| queue.vector));
    }

    /// Workers leave guest memory alone while bus mastering is off, and look at their rings when it comes on. What they had begun
    /// is done when this returns, or a line tells of it: no guest waits longer than [`REST`] for its host's disks.
    fn follow_bus_master(&mut self) {
        let on = self.registers.bus_master();
        let was = self.signals.bus_master();
        self.signals.set_bus_master(on);
        if on && !was {
            self.crew.work();
            self.bells.iter().for_each(|bell| bell.ring());
        } else if was && !on && !self.crew.rest(REST) {
            let text = format_args!("a virtio device still moves bytes {REST:?} after its bus mastering was switched off");
            self.complaints.add(Level::Warn, text);
        }
    }
}

impl<D: Device> PciFunction for VirtioFunction<D> {
    fn config_read(&mut self, reg: Reg) -> u32 {
        match self.window.read(reg).filter(|_| !self.detached) {
            None => self.registers.config_read(reg),
            Some(Touch::Register(value)) => value,
            Some(Touch::Nowhere) => 0xFFFF_FFFF,
            Some(Touch::Data(target)) => {
                let mut data = [0; 4];
                self.bar_access_read(target.offset, data.get_mut(..target.len).unwrap_or_default());
                u32::from_le_bytes(data)
            }
        }
    }

    fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let was_live = self.is_live();
        let mut changes = Changes::empty();
        match self.window.write(access, value).filter(|_| !self.detached) {
            Some(Touch::Data(target)) => {
                self.bar_access_write(target.offset, value.to_le_bytes().get(..target.len).unwrap_or_default());
            }
            Some(_) => {}
            None => {
                changes = self.registers.config_write(access, value);
                if changes.contains(Changes::RESET) {
                    self.reset_all();
                }
                self.follow_bus_master();
            }
        }
        changes.set(Changes::LIVE, self.is_live() != was_live);
        changes
    }

    fn mirror(&mut self, mirror: &Arc<dyn Mirror>) -> bool {
        self.registers.mirror(Arc::clone(mirror));
        true
    }

    /// The window's registers are shown as after a reset, which they rarely leave.
    fn is_live(&self) -> bool {
        self.window.is_used()
    }

    fn bars(&self) -> &Bars {
        self.registers.bars()
    }

    fn program(&mut self, programming: &Programming) {
        self.registers.program(programming);
        self.follow_bus_master();
    }

    fn bar_layout(&self, bar: BarIndex) -> Vec<BarPiece> {
        let spec = self.bars().spec(bar);
        spec.map(|spec| BarPiece::Trapped { offset: 0, len: spec.size }).into_iter().collect()
    }

    fn doorbells(&self, bar: BarIndex) -> Vec<Doorbell> {
        if bar != layout::BAR {
            return Vec::new();
        }
        let bells = self.bells.iter().enumerate();
        bells.map(|(queue, bell)| Doorbell { offset: layout::doorbell(queue), event: bell.clone() }).collect()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        if self.detached || bar != layout::BAR {
            data.fill(0xFF);
        } else {
            self.bar_access_read(offset, data);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) {
        if !self.detached && bar == layout::BAR {
            self.bar_access_write(offset, data);
        }
    }

    fn reset(&mut self, kind: ResetKind) {
        self.registers.reset(kind);
        self.reset_all();
    }

    fn bus_master(&self) -> bool {
        self.registers.bus_master()
    }

    fn record_error(&mut self, error: PcieError, header: [u32; 4]) -> Recorded {
        self.registers.record_error(error, header)
    }

    fn workers(&self) -> Option<Arc<dyn Workers>> {
        Some(self.crew.clone())
    }

    fn save(&mut self, writer: &mut Writer) -> Result<(), StateError> {
        self.save_all(writer)
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.restore_all(reader)
    }

    fn detach(&mut self) {
        self.registers.detach();
        self.reset_all();
        self.detached = true;
    }
}

/// The queue that `regs` describe; `None` if its rings are not aligned or not in guest memory.
fn queue(regs: &QueueRegs, features: u64, memory: &GuestMemoryMmap) -> Option<Queue> {
    let entries = usize::from(regs.size);
    // Lengths and access of the three parts (virtio 1.2 2.7), each with room for the event index.
    let parts = [
        (regs.descriptors, 16 * entries, Permissions::Read),
        (regs.driver, 6 + 2 * entries, Permissions::Read),
        (regs.device, 6 + 8 * entries, Permissions::Write),
    ];
    let inside = |(at, len, access)| GuestMemory::check_range(memory, GuestAddress(at), len, access);
    if !parts.into_iter().all(inside) {
        return None;
    }
    let mut queue = Queue::new(regs.max_size).ok()?;
    queue.try_set_size(regs.size).ok()?;
    queue.try_set_desc_table_address(GuestAddress(regs.descriptors)).ok()?;
    queue.try_set_avail_ring_address(GuestAddress(regs.driver)).ok()?;
    queue.try_set_used_ring_address(GuestAddress(regs.device)).ok()?;
    queue.set_event_idx(features & feature::EVENT_IDX != 0);
    queue.set_ready(true);
    Some(queue)
}

/// A virtio function that cannot be made.
#[derive(Debug, Error)]
pub enum VirtioError {
    /// Too many queues.
    #[error("a virtio device with {queues} queues is not possible: at most {max}", max = layout::MAX_QUEUES)]
    Queues {
        /// Asked for.
        queues: usize,
    },
    /// No eventfd.
    #[error("cannot make the doorbell of a virtio queue: the limit of open files is reached (ulimit -n)")]
    Bell(#[source] io::Error),
    /// Its registers have no room.
    #[error("the registers of a virtio function are not possible")]
    Registers(#[from] EmulatedError),
}
