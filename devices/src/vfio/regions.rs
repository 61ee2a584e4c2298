//! Decides what BARs a guest sees: the host's kind and flags, in the size that the region has. Pure.

use pci::bar::{BarKind, BarSpec};

/// The BARs behind `registers` (0x10 to 0x24, as read) with regions of `sizes` bytes. A region of size 0 is no BAR. BARs
/// have powers of two for sizes; a region of another size is shown in the next one.
#[must_use]
pub fn bar_specs(registers: [u32; 6], sizes: [u64; 6]) -> [Option<BarSpec>; 6] {
    let mut specs = [None; 6];
    let mut upper = false;
    for ((spec, register), size) in specs.iter_mut().zip(registers).zip(sizes) {
        if upper {
            upper = false;
            continue;
        }
        let kind = match register & 7 {
            flags if flags & 1 != 0 => BarKind::Io,
            4 => BarKind::Memory64,
            _ => BarKind::Memory32,
        };
        upper = kind == BarKind::Memory64;
        if size == 0 {
            continue;
        }
        let least = if kind == BarKind::Io { 4 } else { 16 };
        let prefetchable = kind != BarKind::Io && register & 8 != 0;
        // A size past the largest power of two stays as it is and fails the check of the BARs.
        let size = size.max(least).checked_next_power_of_two().unwrap_or(size);
        *spec = Some(BarSpec { kind, prefetchable, size });
    }
    specs
}

#[cfg(test)]
mod tests {
    use pci::access::Lanes;
    use pci::bar::Bars;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn spec(kind: BarKind, prefetchable: bool, size: u64) -> Option<BarSpec> {
        Some(BarSpec { kind, prefetchable, size })
    }

    #[test]
    fn a_gpu_s_bars_keep_their_kind_flags_and_size() {
        let specs = bar_specs(
            [0xF000_0000, 0x0000_000C, 0x20, 0xE000_000C, 0x20, 0x0000_E001],
            [16 << 20, 128 * GIB, 0, 32 << 20, 0, 128],
        );
        let expected = [
            spec(BarKind::Memory32, false, 16 << 20),
            spec(BarKind::Memory64, true, 128 * GIB),
            None,
            spec(BarKind::Memory64, true, 32 << 20),
            None,
            spec(BarKind::Io, false, 128),
        ];
        assert_eq!(specs, expected);
    }

    #[test]
    fn case_c13_a_virtual_function_with_an_odd_layout() {
        let specs = bar_specs([0, 0, 0x0000_0004, 0x38, 0x0000_0004, 0x38], [0, 0, 0x4000, 0, 0x4000, 0]);
        let wide = spec(BarKind::Memory64, false, 0x4000);
        assert_eq!(specs, [None, None, wide, None, wide, None]);
        let mut bars = Bars::new(&specs).unwrap();
        for register in 0..6 {
            bars.write(register, Lanes::ALL, 0xFFFF_FFFF);
        }
        let read: Vec<u32> = (0..6).map(|register| bars.read(register)).collect();
        assert_eq!(read, [0, 0, 0xFFFF_C004, 0xFFFF_FFFF, 0xFFFF_C004, 0xFFFF_FFFF]);
    }

    #[test]
    fn case_c13_a_region_of_size_0_is_no_bar_whatever_its_flags() {
        assert_eq!(bar_specs([4, 0, 1, 8, 0, 0], [0; 6]), [None; 6]);
        assert_eq!(bar_specs([4, 0, 0, 0, 0, 0], [0, 64, 0, 0, 0, 0])[1], None);
    }

    #[test]
    fn a_size_that_is_no_power_of_two_is_rounded_up() {
        let specs = bar_specs([0, 0, 0x0C, 0, 0, 0], [0, 0, 0x2F_00F0_0000, 0, 0, 0]);
        assert_eq!(specs[2], spec(BarKind::Memory64, true, 256 * GIB));
    }
}
