//! Builds the ACPI tables: what the guest's operating system learns about processors, memory nodes, PCI root bridges and
//! power.
//!
//! The machine is hardware-reduced (ACPI 6.5 4.1): no fixed event hardware, no SCI, no FACS.

use core::ops::RangeInclusive;

use acpi_tables::aml::Interrupt;
use acpi_tables::{Aml, AmlSink, mcfg::MCFG, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};
use pci::intx::IntxRoute;

use crate::memory_map::{MemoryMap, Range};
use crate::x86_64::layout;

mod dsdt;
mod events;
mod fadt;
mod madt;
mod pci_root;
mod slit;
mod slots;
mod srat;

pub use slots::{BusSlot, SlotBus};

const OEM_ID: [u8; 6] = *b"BANYAN";
const OEM_TABLE_ID: [u8; 8] = *b"BANYANVM";
const OEM_REVISION: u32 = 1;
/// Tables begin at multiples of this.
const ALIGNMENT: usize = 16;

/// What the tables describe.
#[derive(Clone, Copy, Debug)]
pub struct AcpiInputs<'a> {
    /// Processors; their place in the list is their UID.
    pub cpus: &'a [Cpu],
    /// Addresses; its ECAM list makes MCFG and the reservation of ECAM.
    pub map: &'a MemoryMap,
    /// Whether processors come and go: each is a device then.
    pub hot_plug_cpus: bool,
    /// How many times memory may come, [`crate::ports::MEMORY_DEVICES`] at most.
    pub memory_devices: u16,
    /// Whether the serial line at COM1 exists.
    pub serial: bool,
    /// Whether a kernel can say at [`crate::ports::PANIC`] that it panicked.
    pub panic_port: bool,
    /// PCI root bridges.
    pub root_bridges: &'a [RootBridge],
    /// Memory nodes. Without any there is no SRAT, and root bridges should have no proximity.
    pub nodes: &'a [Node],
}

/// One PCI host bridge, as the operating system sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootBridge {
    /// `_UID`, unique among root bridges.
    pub uid: u32,
    /// `_SEG`.
    pub segment: u16,
    /// Bus numbers below it; the first is its own, `_BBN`.
    pub buses: RangeInclusive<u8>,
    /// Windows for BARs below 4 GiB.
    pub mem32: Vec<Range>,
    /// Windows for BARs above 4 GiB.
    pub mem64: Vec<Range>,
    /// Window for I/O BARs, if devices on the root bus have any.
    pub io: Option<Range>,
    /// Memory node it is near to, `_PXM`. The node must be among [`AcpiInputs::nodes`].
    pub proximity: Option<u32>,
    /// Buses at or below it whose devices come and go by ACPI.
    pub slots: Vec<SlotBus>,
    /// INTx of the devices on the root bus; those behind bridges arrive here swizzled ([`pci::intx::swizzle`]).
    pub prt: Vec<PrtEntry>,
}

/// One row of `_PRT`: what a pin of a device on the root bus drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrtEntry {
    /// Device number on the root bus, 0 to 31.
    pub device: u8,
    /// Pin, 0 for INTA to 3 for INTD.
    pub pin: u8,
    /// Global system interrupt, as [`pci::intx::gsi`] has it.
    pub gsi: u32,
}

impl PrtEntry {
    /// The four rows of one device.
    #[must_use]
    pub fn of_device(device: u8) -> [PrtEntry; 4] {
        [0, 1, 2, 3].map(|pin| {
            // Which root complex it is makes no difference: all share the inputs.
            let gsi = pci::intx::gsi(IntxRoute { root_complex: 0, device, pin });
            PrtEntry { device, pin, gsi }
        })
    }
}

/// One processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its APIC id.
    pub apic_id: u32,
    /// Whether it is there from the start; otherwise it may come later.
    pub present: bool,
}

/// One memory node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// Its number: the proximity domain that processors, memory and root bridges share.
    pub proximity: u32,
    /// APIC ids of its processors, those that may come later among them.
    pub cpus: Vec<u32>,
    /// RAM of the node.
    pub memory: Vec<Range>,
    /// Where RAM of the node may come later.
    pub hot_plug: Vec<Range>,
    /// How far each node is, in the order of the nodes; empty if that is not known. Known for all, there is a SLIT.
    pub distances: Vec<u8>,
}

/// The tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiTables {
    /// The root pointer, to be written where [`layout::RSDP`] says.
    pub rsdp: Vec<u8>,
    /// All other tables, to be written at the address they were built for.
    pub bytes: Vec<u8>,
}

/// The tables where a direct boot has them: bytes and the address they go to.
///
/// # Errors
/// If they do not fit [`layout::ACPI_TABLES`], which 255 processors with 64 root bridges do not fill by half.
pub fn memory(inputs: &AcpiInputs<'_>) -> Result<[(u64, Vec<u8>); 2], AcpiError> {
    let built = tables(inputs, layout::ACPI_TABLES.start);
    let (len, room) = (built.bytes.len(), layout::ACPI_TABLES.len());
    if len as u64 > room {
        return Err(AcpiError::TooLarge { len, room, root_bridges: inputs.root_bridges.len() });
    }
    Ok([(layout::ACPI_TABLES.start, built.bytes), (layout::RSDP, built.rsdp)])
}

/// Builds the tables for the address `at`, a multiple of 16. Whether they fit there is the caller's to check.
#[must_use]
pub fn tables(inputs: &AcpiInputs<'_>, at: u64) -> AcpiTables {
    let mut blob = Blob { at, bytes: Vec::with_capacity(8 << 10) };
    let dsdt = blob.push(&dsdt::dsdt(inputs));
    let mut listed = vec![blob.push(&fadt::fadt(dsdt)), blob.push(&madt::madt(inputs.cpus))];
    if !inputs.map.ecam.is_empty() {
        listed.push(blob.push(&mcfg(inputs.map)));
    }
    if !inputs.nodes.is_empty() {
        listed.push(blob.push(&srat::srat(inputs.nodes, inputs.root_bridges)));
    }
    if let Some(slit) = slit::slit(inputs.nodes) {
        listed.push(blob.push(&slit));
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in listed {
        xsdt.add_entry(table);
    }
    let xsdt = blob.push(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    AcpiTables { rsdp, bytes: blob.bytes }
}

/// Tables one after the other, at a known address.
struct Blob {
    at: u64,
    bytes: Vec<u8>,
}

impl Blob {
    /// Appends a table and returns its address.
    fn push(&mut self, table: &dyn Aml) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        let address = self.at + self.bytes.len() as u64;
        table.to_aml_bytes(&mut self.bytes);
        address
    }
}

/// A name of four characters: a letter and three hexadecimal digits.
fn numbered(letter: char, number: usize) -> String {
    format!("{letter}{:03X}", number & 0xFFF)
}

/// Bytes of AML.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

/// A table with Banyan's identity and `body` after its header.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Sdt {
    const HEADER: u32 = 36;
    let mut sdt = Sdt::new(signature, HEADER, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    sdt.append_slice(body);
    sdt
}

/// An interrupt that one device raises by edges: active high, consumed, not shared (ACPI 6.5 6.4.3.6).
fn edge(gsi: u32) -> Interrupt {
    let (consumer, edge_triggered, active_low, shared) = (true, true, false, false);
    Interrupt::new(consumer, edge_triggered, active_low, shared, gsi)
}

/// MCFG (PCI Firmware 3.3 4.1.2): the ECAM of each segment.
fn mcfg(map: &MemoryMap) -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for ecam in &map.ecam {
        mcfg.add_ecam(ecam.range.start, ecam.segment, 0, ecam.last_bus);
    }
    mcfg
}

/// Why the tables cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcpiError {
    /// They are larger than their place.
    #[error(
        "the ACPI tables take {len} bytes with {root_bridges} PCI root complexes, there is room for {room}: use fewer root complexes"
    )]
    TooLarge {
        /// Bytes of the tables.
        len: usize,
        /// Bytes there are.
        room: u64,
        /// Root bridges described.
        root_bridges: usize,
    },
}

#[cfg(test)]
mod tests;
