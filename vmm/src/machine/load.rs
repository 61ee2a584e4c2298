//! Puts what runs first into a machine's memory: a kernel or firmware, and the tables that it finds.

use api::config::{HotPlugMethod, KernelConfig, Payload, VmConfig};
use arch::memory_map::Range;
use arch::x86_64::acpi::{self, Cpu, PrtEntry};
use arch::x86_64::regs::Entry;
use arch::x86_64::{layout, reset_vector, smbios};
use vm_memory::GuestMemoryMmap;

use super::{Design, MachineError};
use crate::boot::{self, BootError, BootInputs, Firmware, Kernel};
use crate::kvm::Slots;
use crate::memory::{self, Backing};
use crate::numa;
use crate::resize::Extent;

/// Looks at what shall run, so that a mistake is told before anything is made.
pub fn check_payload(config: &VmConfig) -> Result<(), MachineError> {
    let payload = config.payload.as_ref().ok_or(MachineError::NothingToRun)?;
    Image::open(payload)?;
    match payload {
        Payload::Kernel(KernelConfig { initramfs: Some(path), .. }) => Ok(boot::check_initramfs(path)?),
        _ => Ok(()),
    }
}

/// What runs first.
pub(super) enum Image {
    Kernel(Box<Kernel>),
    Firmware(Firmware),
}

impl Image {
    /// Opens the file.
    fn open(payload: &Payload) -> Result<Self, MachineError> {
        Ok(match payload {
            Payload::Kernel(kernel) => Self::Kernel(Box::new(Kernel::open(&kernel.path, kernel.load_address)?)),
            Payload::Firmware(path) => Self::Firmware(Firmware::read(path)?),
        })
    }

    /// Opens what a machine of this design has to load; `None` if it goes on with a kernel, which is in RAM.
    pub(super) fn to_load(design: &Design<'_>) -> Result<Option<Self>, MachineError> {
        match design.config.payload.as_ref().ok_or(MachineError::NothingToRun)? {
            Payload::Kernel(_) if design.state.is_some() => Ok(None),
            payload => Self::open(payload).map(Some),
        }
    }

    /// Maps firmware where the plan has it, and shadows it unless firmware that runs may have put its own there. A kernel has no
    /// memory of its own.
    pub(super) fn map(
        &self,
        slots: &mut Slots,
        ram: &GuestMemoryMmap,
        design: &Design<'_>,
    ) -> Result<Option<GuestMemoryMmap>, MachineError> {
        let (Self::Firmware(image), Some(range)) = (self, design.plan.map.firmware) else { return Ok(None) };
        if design.state.is_none() {
            shadow_firmware(ram, image)?;
        }
        map_firmware(slots, image, range).map(Some)
    }
}

/// Maps the image read-only below 4 GiB.
fn map_firmware(slots: &mut Slots, image: &Firmware, range: Range) -> Result<GuestMemoryMmap, MachineError> {
    let rom = memory::create(&[range], Backing::default())?;
    boot::put(&rom, range.start, &image.bytes)?;
    for region in memory::regions(&rom) {
        // SAFETY: `rom` is kept by the machine until its vCPUs have ended.
        unsafe { slots.add_read_only(region.at, region.len, region.host) }?;
    }
    Ok(rom)
}

/// Copies the end of the image below 1 MiB, where real-mode firmware runs. It is RAM.
fn shadow_firmware(ram: &GuestMemoryMmap, image: &Firmware) -> Result<(), BootError> {
    let real_mode = layout::SMBIOS.end - layout::SMBIOS.start;
    let end = image.bytes.len().saturating_sub(usize::try_from(real_mode).unwrap_or(0));
    let end = image.bytes.get(end..).unwrap_or_default();
    boot::put(ram, layout::SMBIOS.end - end.len() as u64, end)
}

/// Puts what runs first, and the tables that it finds, into RAM; says how a kernel is entered.
pub(super) fn load(
    ram: &GuestMemoryMmap,
    used: bool,
    payload: Image,
    design: &Design<'_>,
    extent: &Extent,
) -> Result<Option<Entry>, MachineError> {
    let (config, plan) = (design.config, design.plan);
    let placements = (0u8..=u8::MAX).zip(design.spec.processors.placements());
    let cpus: Vec<Cpu> = placements
        .map(|(number, placement)| Cpu { apic_id: placement.apic_id, present: extent.cpus.contains(&number) })
        .collect();
    let mut root_bridges = plan.root_bridges();
    for planned in plan.slot_buses(&config.pcie) {
        let Some(bridge) = root_bridges.get_mut(planned.root_complex) else { continue };
        if planned.bus.way.is_empty() {
            let known: Vec<u8> = bridge.prt.iter().map(|entry| entry.device).collect();
            let new = planned.bus.slots.iter().filter(|slot| !known.contains(&slot.number));
            bridge.prt.extend(new.flat_map(|slot| PrtEntry::of_device(slot.number)));
        }
        bridge.slots.push(planned.bus);
    }
    let tables = acpi::memory(&acpi::AcpiInputs {
        cpus: &cpus,
        hot_plug_cpus: config.cpus.max.is_some(),
        memory_devices: if config.memory.growth.bytes() > 0 && config.memory.method == HotPlugMethod::Acpi {
            arch::ports::MEMORY_DEVICES
        } else {
            0
        },
        map: &plan.map,
        serial: true,
        panic_port: config.panic_port,
        root_bridges: &root_bridges,
        nodes: &numa::acpi_nodes(design.spec.numa.as_ref(), &design.spec.processors, plan),
    })?;
    for (at, bytes) in tables {
        boot::put(ram, at, &bytes)?;
    }
    match payload {
        Image::Firmware(_) => Ok(None),
        Image::Kernel(mut kernel) => {
            let smbios = smbios::SmbiosInputs { version: env!("CARGO_PKG_VERSION"), serial: None, uuid: None };
            boot::put(ram, layout::SMBIOS.start, &smbios::tables(layout::SMBIOS.start, &smbios))?;
            boot::put(ram, reset_vector::AT, &reset_vector::code())?;
            let Some(Payload::Kernel(from)) = &config.payload else { return Err(MachineError::NothingToRun) };
            let inputs = BootInputs { map: &plan.map, initramfs: from.initramfs.as_deref(), cmdline: &from.cmdline, used };
            Ok(Some(boot::load_kernel(ram, &mut kernel, &inputs)?))
        }
    }
}
