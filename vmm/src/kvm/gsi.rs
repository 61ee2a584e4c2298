//! Interrupt routes: which GSI delivers what. Hands out vectors that VFIO and other processes fire through eventfds.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;
use pci::access::halves;
use pci::function::FunctionId;
use pci::seams::{MsiError, MsiMessage, MsiRoutes, MsiVector};
use pci::sync::lock;
use rustix::event::{EventfdFlags, eventfd};

use super::as_event;

/// Pins of the I/O APIC: GSIs 0 to 23.
const IOAPIC_PINS: u32 = 24;
/// What KVM_CAP_IRQ_ROUTING allows on every kernel (linux: include/linux/kvm_host.h, KVM_MAX_IRQ_ROUTES), legacy ones off.
const VECTORS: u32 = 4096 - 64;

/// The VM's routing table. KVM replaces it as a whole; one lock orders the replacements.
#[derive(Clone)]
pub struct GsiTable(Arc<Table>);

struct Table {
    vm: Arc<VmFd>,
    routes: Mutex<Routes>,
}

#[derive(Default)]
struct Routes {
    messages: BTreeMap<u32, Option<MsiMessage>>,
    commits: u64,
}

impl GsiTable {
    /// The table that KVM makes with its interrupt controller: pins only.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self(Arc::new(Table { vm, routes: Mutex::default() }))
    }

    /// Vectors that are handed out.
    #[must_use]
    pub fn vectors_in_use(&self) -> usize {
        self.0.lock().messages.len()
    }

    /// A vector for `who` that is fired through `event`.
    pub fn vector_of(&self, who: FunctionId, event: Arc<dyn AsFd + Send + Sync>) -> Result<Box<dyn MsiVector>, MsiError> {
        let mut routes = self.0.lock();
        let free = (IOAPIC_PINS..IOAPIC_PINS + VECTORS).find(|gsi| !routes.messages.contains_key(gsi));
        let gsi = free.ok_or(MsiError::Exhausted { who, limit: VECTORS })?;
        routes.messages.insert(gsi, None);
        Ok(Box::new(Vector { table: Arc::clone(&self.0), gsi, event, attached: false }))
    }

    /// How many times the table was given to KVM.
    #[must_use]
    pub fn commits(&self) -> u64 {
        self.0.lock().commits
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Routes> {
        lock(&self.routes)
    }

    /// Sets one route and gives the whole table to KVM.
    fn program(&self, gsi: u32, message: MsiMessage) -> Result<(), MsiError> {
        let mut routes = self.lock();
        let old = routes.messages.insert(gsi, Some(message));
        if old == Some(Some(message)) {
            return Ok(());
        }
        routes.commits += 1;
        let committed = self.commit(&routes);
        if let (Err(_), Some(old)) = (&committed, old) {
            // The kernel has the old table still.
            routes.messages.insert(gsi, old);
        }
        committed
    }

    fn commit(&self, routes: &Routes) -> Result<(), MsiError> {
        let mut entries = pins();
        entries.extend(routes.messages.iter().filter_map(|(gsi, message)| Some(msi(*gsi, (*message)?))));
        let kernel = |source| MsiError::Kernel { what: "set the interrupt routes", source };
        let table = KvmIrqRouting::from_entries(&entries).map_err(|error| kernel(io::Error::other(format!("{error:?}"))))?;
        self.vm.set_gsi_routing(&table).map_err(|error| kernel(error.into()))
    }
}

impl MsiRoutes for GsiTable {
    fn vector(&self, who: FunctionId) -> Result<Box<dyn MsiVector>, MsiError> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| MsiError::Kernel { what: "create an eventfd for an interrupt", source: error.into() })?;
        self.vector_of(who, Arc::new(event))
    }
}

struct Vector {
    table: Arc<Table>,
    gsi: u32,
    event: Arc<dyn AsFd + Send + Sync>,
    attached: bool,
}

impl MsiVector for Vector {
    fn program(&mut self, message: MsiMessage) -> Result<(), MsiError> {
        self.table.program(self.gsi, message)
    }

    fn mask(&mut self, masked: bool) -> Result<(), MsiError> {
        if masked == self.attached {
            let (vm, event) = (&self.table.vm, as_event(self.event.as_fd()));
            let done = if masked { vm.unregister_irqfd(&event, self.gsi) } else { vm.register_irqfd(&event, self.gsi) };
            done.map_err(|error| MsiError::Kernel { what: "attach an interrupt to its eventfd", source: error.into() })?;
            self.attached = !masked;
        }
        Ok(())
    }

    fn pending(&self) -> bool {
        let mut poll = [rustix::event::PollFd::from_borrowed_fd(self.event.as_fd(), rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        !self.attached && rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        if let Err(error) = self.mask(true) {
            log::error!("cannot give back interrupt route {}: {error}", self.gsi);
        }
        // The stale entry leaves the kernel's table at the next commit; nothing can fire it any more.
        self.table.lock().messages.remove(&self.gsi);
    }
}

/// Routes of the pins as KVM_CREATE_IRQCHIP makes them: 0 to 15 to both PICs and the I/O APIC, 16 to 23 to the latter.
fn pins() -> Vec<kvm_irq_routing_entry> {
    let mut entries = Vec::new();
    for gsi in 0..IOAPIC_PINS {
        if gsi < 16 {
            let chip = if gsi < 8 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
            entries.push(pin(gsi, chip, gsi % 8));
        }
        entries.push(pin(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    }
    entries
}

fn pin(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 { irqchip: kvm_irq_routing_irqchip { irqchip, pin } },
        ..Default::default()
    }
}

fn msi(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let (low, high) = halves(message.address);
    let msi = kvm_irq_routing_msi { address_lo: low, address_hi: high, data: message.data, ..Default::default() };
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 { msi },
        ..Default::default()
    }
}
