//! Where the structures of a virtio function are in its BAR, and the capabilities that say so (virtio 1.2 4.1.4).
//!
//! | BAR 0, offset | what |
//! |---|---|
//! | 0x000 | common configuration |
//! | 0x100 | ISR status |
//! | 0x200 | doorbells, 4 bytes for each queue |
//! | 0x400 | device configuration |
//! | 0x1000 | MSI-X table |
//! | 0x2000 | MSI-X pending bits |

use pci::bar::{BarKind, BarSpec};
use pci::emulated::InterruptSpec;

use super::common;

/// The BAR that holds everything.
pub const BAR: u8 = 0;
/// Its size.
const BAR_SIZE: u64 = 0x4000;
/// Most queues.
pub const MAX_QUEUES: u16 = 128;

const COMMON: u64 = 0;
const ISR: u64 = 0x100;
const NOTIFY: u64 = 0x200;
const DEVICE: u64 = 0x400;
const DEVICE_END: u64 = 0x1000;
const TABLE: u32 = 0x1000;
const PENDING: u32 = 0x2000;
/// Bytes between two doorbells.
const DOORBELL: u8 = 4;

/// Type bytes of the capabilities.
mod cfg_type {
    pub const COMMON: u8 = 1;
    pub const NOTIFY: u8 = 2;
    pub const ISR: u8 = 3;
    pub const DEVICE: u8 = 4;
    pub const PCI: u8 = 5;
}

/// What an access of the BAR reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Common configuration, at an offset.
    Common(u16),
    /// ISR status.
    Isr,
    /// Doorbell of a queue.
    Doorbell(usize),
    /// Device configuration, at an offset.
    Device(usize),
    /// MSI-X table or pending bits, if there are any at that place.
    MsiX,
    /// Nothing.
    Nothing,
}

/// BARs of every virtio function.
#[must_use]
pub const fn bars() -> [Option<BarSpec>; 6] {
    let spec = BarSpec { kind: BarKind::Memory32, prefetchable: false, size: BAR_SIZE };
    [Some(spec), None, None, None, None, None]
}

/// Interrupts of a function with `vectors` vectors.
#[must_use]
pub const fn interrupt(vectors: u16) -> InterruptSpec {
    InterruptSpec::MsiX { vectors, table_bar: BAR, table_offset: TABLE, pba_bar: BAR, pba_offset: PENDING }
}

/// What an access of `len` bytes at `offset` reaches. One that goes past the end of its structure is cut there by whoever
/// answers.
#[must_use]
pub fn part(offset: u64, len: usize) -> Part {
    let within = |start: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
    match offset {
        COMMON..ISR => u16::try_from(offset).map_or(Part::Nothing, Part::Common),
        ISR if len == 1 => Part::Isr,
        NOTIFY..DEVICE if offset.is_multiple_of(DOORBELL.into()) => Part::Doorbell(within(NOTIFY) / usize::from(DOORBELL)),
        DEVICE..DEVICE_END => Part::Device(within(DEVICE)),
        DEVICE_END..BAR_SIZE => Part::MsiX,
        _ => Part::Nothing,
    }
}

/// Where the doorbell of queue `queue` is, which is below [`MAX_QUEUES`].
#[must_use]
pub fn doorbell(queue: usize) -> u64 {
    NOTIFY + u64::from(DOORBELL) * u64::try_from(queue).unwrap_or(0)
}

/// Bodies (behind the length byte) of the vendor-specific capabilities of a device with `queues` queues and `config` bytes
/// of device configuration. The last one is the window for accesses through configuration space.
#[must_use]
pub fn capabilities(queues: u16, config: u32) -> Vec<Vec<u8>> {
    let doorbells = u32::from(queues) * u32::from(DOORBELL);
    let mut notify = body(cfg_type::NOTIFY, NOTIFY, doorbells);
    notify.extend(u32::from(DOORBELL).to_le_bytes());
    // What the data register reads while the others are as after a reset.
    let mut window = body(cfg_type::PCI, 0, 0);
    window.extend([0xFF; 4]);
    let mut bodies = vec![body(cfg_type::COMMON, COMMON, common::LEN.into()), notify, body(cfg_type::ISR, ISR, 1)];
    // Linux takes no structure of length 0 (linux: drivers/virtio/virtio_pci_modern_dev.c, `vp_modern_map_capability`).
    if config > 0 {
        bodies.push(body(cfg_type::DEVICE, DEVICE, config));
    }
    bodies.push(window);
    bodies
}

/// Whether the dword at a vendor-specific capability's start is that of the window.
#[must_use]
pub fn is_window(first: u32) -> bool {
    let [id, _, _, kind] = first.to_le_bytes();
    id == 0x09 && kind == cfg_type::PCI
}

fn body(kind: u8, offset: u64, len: u32) -> Vec<u8> {
    let offset = u32::try_from(offset).unwrap_or(0);
    // Type, BAR, id, two bytes of padding; offset; length.
    [&[kind, BAR, 0, 0, 0][..], &offset.to_le_bytes(), &len.to_le_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_find_their_structure() {
        let cases = [
            (0x00, 4, Part::Common(0)),
            (0x16, 2, Part::Common(0x16)),
            (0x100, 1, Part::Isr),
            (0x100, 4, Part::Nothing),
            (0x101, 1, Part::Nothing),
            (0x200, 2, Part::Doorbell(0)),
            (0x204, 4, Part::Doorbell(1)),
            (0x201, 1, Part::Nothing),
            (0x408, 4, Part::Device(8)),
            (0x1000, 4, Part::MsiX),
            (0x3FFC, 4, Part::MsiX),
            (0x4000, 1, Part::Nothing),
            (u64::MAX, 8, Part::Nothing),
        ];
        for (offset, len, expected) in cases {
            assert_eq!(part(offset, len), expected, "{offset:#x}");
        }
    }

    #[test]
    fn every_queue_has_the_doorbell_that_an_access_finds() {
        for queue in 0..usize::from(MAX_QUEUES) {
            assert_eq!(part(doorbell(queue), 2), Part::Doorbell(queue));
        }
    }

    #[test]
    fn capability_bodies_have_the_lengths_of_the_specification() {
        let lengths: Vec<usize> = capabilities(1, 64).iter().map(|body| body.len() + 3).collect();
        assert_eq!(lengths, [16, 20, 16, 16, 20]);
        assert_eq!(capabilities(1, 0).len(), 4, "a device without configuration does not show an empty one");
    }
}
