//! Interrupts that Banyan itself raises: messages, edges and shared level-triggered wires.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use devices::complaints::Complaints;
use devices::eventfd;
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use log::Level;
use pci::access::halves;
use pci::function::FunctionId;
use pci::seams::{IntxEvents, IntxLine, MsiError, MsiEvent, MsiMessage, MsiPort, MsiVector};
use pci::sync::lock;
use vmm_sys_util::eventfd::EventFd;

use super::gsi::GsiTable;

/// Sends messages by KVM_SIGNAL_MSI: no route, no eventfd.
pub struct SignalMsi(pub Arc<VmFd>);

impl MsiPort for SignalMsi {
    fn send(&self, message: MsiMessage) {
        let (address_lo, address_hi) = halves(message.address);
        let msi = kvm_msi { address_lo, address_hi, data: message.data, ..Default::default() };
        // A message that no local APIC takes is the guest's own doing; on hardware it is lost as well.
        let _ = self.0.signal_msi(msi);
    }
}

/// As [`SignalMsi`], for a function whose interrupts other processes raise as well: KVM delivers what they signal, by a route
/// and an irqfd for each of them.
pub struct RoutedMsi {
    sender: SignalMsi,
    routes: GsiTable,
    id: FunctionId,
    name: Arc<str>,
    complaints: Arc<Mutex<Complaints>>,
}

impl RoutedMsi {
    /// For the function `id`, which is called `name` in messages.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, routes: GsiTable, id: FunctionId, name: &str) -> Self {
        Self { sender: SignalMsi(vm), routes, id, name: name.into(), complaints: Arc::default() }
    }
}

impl MsiPort for RoutedMsi {
    fn send(&self, message: MsiMessage) {
        self.sender.send(message);
    }

    fn event(&self, event: Arc<dyn AsFd + Send + Sync>) -> Option<Box<dyn MsiEvent>> {
        let vector = self.routes.vector_of(self.id, event);
        let vector = vector.inspect_err(|error| complain(&self.complaints, &self.name, error)).ok()?;
        Some(Box::new(Routed { vector, name: Arc::clone(&self.name), complaints: Arc::clone(&self.complaints) }))
    }
}

struct Routed {
    vector: Box<dyn MsiVector>,
    name: Arc<str>,
    complaints: Arc<Mutex<Complaints>>,
}

impl MsiEvent for Routed {
    fn deliver(&mut self, message: Option<MsiMessage>) -> bool {
        let done = match message {
            Some(message) => self.vector.program(message).and_then(|()| self.vector.mask(false)),
            None => self.vector.mask(true),
        };
        if let Err(error) = &done {
            complain(&self.complaints, &self.name, error);
            // Else it would deliver what it did before.
            let _ = self.vector.mask(true);
        }
        done.is_ok()
    }
}

fn complain(complaints: &Mutex<Complaints>, name: &str, error: &MsiError) {
    let text = format_args!("{name}: an interrupt of its server passes through this process");
    lock(complaints).add_error(Level::Warn, text, error);
}

/// An edge-triggered pin, such as the serial port's.
pub struct EdgeLine {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl EdgeLine {
    /// Pin `gsi` of the I/O APIC.
    #[must_use]
    pub const fn new(vm: Arc<VmFd>, gsi: u32) -> Self {
        Self { vm, gsi }
    }

    /// One edge.
    pub fn pulse(&self) -> io::Result<()> {
        self.vm.set_irq_line(self.gsi, true)?;
        self.vm.set_irq_line(self.gsi, false)?;
        Ok(())
    }

    /// What a device calls for an edge. `whose` is the device, for the log.
    pub fn sink(self, whose: &'static str) -> Box<dyn Fn() + Send + Sync> {
        Box::new(move || {
            if let Err(error) = self.pulse() {
                log::error!("cannot raise {whose}'s interrupt: {error}");
            }
        })
    }
}

/// A level-triggered GSI with several functions on it: high while any of them asserts.
pub struct SharedIntx {
    vm: Arc<VmFd>,
    gsi: u32,
    /// How many emulated functions assert it. Held while KVM is told, so that it hears of levels in order.
    asserting: Mutex<u32>,
    /// Ends of hardware functions. Never locked with `asserting`.
    events: Mutex<Vec<Weak<Events>>>,
}

impl SharedIntx {
    /// The wire to `gsi`.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, gsi: u32) -> Arc<Self> {
        Arc::new(Self { vm, gsi, asserting: Mutex::new(0), events: Mutex::default() })
    }

    /// One function's end of the wire.
    #[must_use]
    pub fn line(self: &Arc<Self>) -> Box<dyn IntxLine> {
        Box::new(Line { wire: Arc::clone(self), level: AtomicBool::new(false) })
    }

    /// A hardware function's end: KVM raises the wire at the trigger and tells by the resample event when the guest is
    /// done with it. Takes effect with [`SharedIntx::attach`].
    pub fn events(self: &Arc<Self>) -> io::Result<Box<dyn IntxEvents>> {
        let (trigger, resample) = (eventfd::new()?, eventfd::new()?);
        let events = Arc::new(Events { wire: Arc::clone(self), trigger, resample, attached: AtomicBool::new(false) });
        lock(&self.events).push(Arc::downgrade(&events));
        Ok(Box::new(EventsHandle(events)))
    }

    /// Connects the hardware ends. The interrupt controller must exist.
    pub fn attach(&self) -> io::Result<()> {
        for events in lock(&self.events).iter().filter_map(Weak::upgrade) {
            if !events.attached.load(Ordering::Relaxed) {
                self.vm.register_irqfd_with_resample(&events.trigger, &events.resample, self.gsi)?;
                events.attached.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

struct Line {
    wire: Arc<SharedIntx>,
    level: AtomicBool,
}

impl IntxLine for Line {
    fn set(&self, level: bool) {
        let mut asserting = lock(&self.wire.asserting);
        if self.level.swap(level, Ordering::Relaxed) == level {
            return;
        }
        *asserting = if level { *asserting + 1 } else { *asserting - 1 };
        let edge = *asserting == u32::from(level);
        if edge && let Err(error) = self.wire.vm.set_irq_line(self.wire.gsi, level) {
            log::error!("cannot set interrupt line {}: {error}", self.wire.gsi);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.set(false);
    }
}

struct Events {
    wire: Arc<SharedIntx>,
    trigger: EventFd,
    resample: EventFd,
    attached: AtomicBool,
}

struct EventsHandle(Arc<Events>);

impl IntxEvents for EventsHandle {
    fn trigger(&self) -> BorrowedFd<'_> {
        eventfd::borrow(&self.0.trigger)
    }

    fn resample(&self) -> BorrowedFd<'_> {
        eventfd::borrow(&self.0.resample)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if self.attached.load(Ordering::Relaxed)
            && let Err(error) = self.wire.vm.unregister_irqfd(&self.trigger, self.wire.gsi)
        {
            log::error!("cannot detach interrupt line {}: {error}", self.wire.gsi);
        }
    }
}
