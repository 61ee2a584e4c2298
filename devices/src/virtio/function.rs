//! A virtio device as a PCI function: answers configuration cycles and BAR accesses, starts and stops the workers of its
//! queues. What a queue is for is the device's business.

use std::io;
use std::sync::Arc;

use log::Level;
use pci::access::{self, Access, Reg};
use pci::bar::{BarIndex, Bars};
use pci::emulated::{Attachment, Emulated, EmulatedError, EmulatedSpec};
use pci::function::{BarPiece, Changes, PciFunction, Programming, ResetKind};
use pci::ids::Ids;
use pci::seams::MsiPort;
use thiserror::Error;
use virtio_queue::{Queue, QueueT};
use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryAtomic, GuestMemoryMmap};

use super::common::{self, CommonRegs, Event, QueueRegs, status};
use super::feature;
use super::layout::{self, Part};
use super::signals::Signals;
use super::window::{Touch, Window};
use super::worker::Worker;
use crate::complaints::Complaints;

/// What is particular to one kind of device.
pub trait Device: Send {
    /// Ids of the function.
    fn ids(&self) -> Ids;
    /// Device feature bits, 0 to 23 and 50 upwards; the transport adds its own.
    fn features(&self) -> u64;
    /// Most entries of each queue, powers of two; at most [`layout::MAX_QUEUES`] queues.
    fn queue_sizes(&self) -> &[u16];
    /// Device configuration as bytes. It does not change.
    fn config(&self) -> &[u8];
    /// Starts the worker of one queue, which the driver has set up.
    fn start(&mut self, queue: QueueStart) -> io::Result<Worker>;
}

/// A queue that is to be served.
pub struct QueueStart {
    /// Its number.
    pub index: usize,
    /// Its rings, which are in guest memory.
    pub queue: Queue,
    /// Features that driver and device agreed on.
    pub features: u64,
    /// Guest memory.
    pub memory: GuestMemoryAtomic<GuestMemoryMmap>,
    /// To signal the driver.
    pub signals: Arc<Signals>,
}

/// A virtio device on the PCI transport.
pub struct VirtioFunction<D: Device> {
    registers: Emulated,
    common: CommonRegs,
    window: Window,
    signals: Arc<Signals>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    /// Of queue n; `None` while it is not served.
    workers: Vec<Option<Worker>>,
    device: D,
    complaints: Complaints,
    detached: bool,
}

impl<D: Device> VirtioFunction<D> {
    /// The function for `device`, on a root bus. `msi` takes its interrupts.
    pub fn with_device(
        device: D,
        memory: GuestMemoryAtomic<GuestMemoryMmap>,
        msi: Arc<dyn MsiPort>,
    ) -> Result<Self, VirtioError> {
        let sizes = device.queue_sizes();
        let queues = u16::try_from(sizes.len()).ok().filter(|queues| *queues <= layout::MAX_QUEUES);
        let queues = queues.ok_or(VirtioError::Queues { queues: sizes.len() })?;
        let vectors = queues + 1;
        let config = u32::try_from(device.config().len()).unwrap_or(u32::MAX);
        let spec = EmulatedSpec {
            ids: device.ids(),
            bars: layout::bars(),
            on: Attachment::RootBus,
            interrupt: layout::interrupt(vectors),
            flr: true,
            clique: None,
            vendor_capabilities: layout::capabilities(queues, config),
            serial_number: None,
        };
        let registers = Emulated::new(&spec, msi, None)?;
        let read = |at: u8| registers.config_read(Reg::containing(at.into()));
        let window = pci::caps::walk(read).into_iter().find_map(|extent| {
            let at = extent.offset;
            layout::is_window(read(at)).then_some(Window::new(at))
        });
        let Some(window) = window else { unreachable!("the layout has a window capability") };
        Ok(Self {
            common: CommonRegs::new(device.features() | feature::TRANSPORT, sizes, vectors),
            window,
            signals: Arc::new(Signals::new(registers.interrupts(), sizes.len())),
            memory,
            workers: sizes.iter().map(|_| None).collect(),
            registers,
            device,
            complaints: Complaints::default(),
            detached: false,
        })
    }

    /// What is particular to it.
    #[cfg(test)]
    pub(super) fn device(&self) -> &D {
        &self.device
    }

    fn bar_access_read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        match layout::part(offset, data.len()) {
            Part::Common(offset) => {
                if self.signals.needs_reset() {
                    self.common.status |= status::NEEDS_RESET;
                }
                access::read(offset, common::LEN, data, |reg| self.common.read(reg));
            }
            Part::Isr => data.fill(self.signals.take_isr()),
            Part::Device(offset) => {
                let bytes = self.device.config().get(offset..).unwrap_or_default();
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
                if let Some(Some(worker)) = self.workers.get(queue) {
                    worker.ring();
                }
            }
            Part::MsiX => self.registers.msix_write(layout::BAR, offset, data),
            // Drivers only read these.
            Part::Isr | Part::Device(_) | Part::Nothing => {}
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Start => self.start(),
            Event::Reset => self.reset_device(),
            Event::Vectors => self.publish_vectors(),
        }
    }

    /// Starts a worker for each queue that the driver has set up. A queue that cannot be served makes the device give up.
    fn start(&mut self) {
        let features = self.common.features;
        for (index, regs) in self.common.queues.iter().enumerate() {
            if !regs.enabled {
                continue;
            }
            let started = queue(regs, features, &self.memory.memory()).map(|queue| {
                let (memory, signals) = (self.memory.clone(), self.signals.clone());
                self.device.start(QueueStart { index, queue, features, memory, signals })
            });
            match started {
                Some(Ok(worker)) => {
                    if let Some(place) = self.workers.get_mut(index) {
                        *place = Some(worker);
                    }
                }
                Some(Err(error)) => {
                    let text = format_args!("cannot serve a virtio queue, so the device gives up");
                    self.complaints.add_error(Level::Warn, text, &error);
                    self.signals.give_up();
                }
                None => self.signals.give_up(),
            }
        }
    }

    /// As after a write of 0 to the device status: no worker touches guest memory any more.
    fn reset_device(&mut self) {
        self.workers.fill_with(|| None);
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

    /// Workers leave guest memory alone while bus mastering is off, and look at their rings when it comes on.
    fn follow_bus_master(&self) {
        let on = self.registers.bus_master();
        let was = self.signals.bus_master();
        self.signals.set_bus_master(on);
        if on && !was {
            self.workers.iter().flatten().for_each(Worker::ring);
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
        match self.window.write(access, value).filter(|_| !self.detached) {
            Some(Touch::Data(target)) => {
                self.bar_access_write(target.offset, value.to_le_bytes().get(..target.len).unwrap_or_default());
                return Changes::empty();
            }
            Some(_) => return Changes::empty(),
            None => {}
        }
        let changes = self.registers.config_write(access, value);
        if changes.contains(Changes::RESET) {
            self.reset_all();
        }
        self.follow_bus_master();
        changes
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
    /// Its registers have no room.
    #[error("the registers of a virtio function are not possible")]
    Registers(#[from] EmulatedError),
}
