//! Devices that the guest sees: emulated endpoints, virtio, the few legacy ports, and functions of the host.
//!
//! | question | module |
//! |---|---|
//! | what answers at the fixed I/O ports (serial line, power, debug)? | [`legacy`] |
//! | what does an emulated endpoint for tests and demonstrations do? | [`stub`] |
//! | how does a function of the host become one of the guest? | [`vfio`] |
//! | what of failures that guests cause is logged? | [`complaints`] |
//! | how does ACPI learn of processors and memory that come and go? | [`acpi`] |
//! | how does a guest drive a paravirtual device, and what serves its disk? | [`virtio`] |
//! | what happens to a guest that stands still? | [`watchdog`] |
//! | how are threads held while the machine is paused? | [`gate`] |
//! | how is an eventfd made and borrowed? | [`eventfd`] |
//! | which pages of memory must be written down? | [`pagemap`] |
//! | how does memory of this process get its pages? | [`populate`] |
//!
//! Devices know neither KVM nor the configuration that asked for them. They reach interrupts and memory through the
//! seams of [`pci::seams`].

pub mod acpi;
pub mod complaints;
pub mod eventfd;
pub mod gate;
pub mod legacy;
pub mod pagemap;
pub mod populate;
pub mod stub;
pub mod vfio;
pub mod virtio;
pub mod watchdog;
