//! Reads what a host function's BARs ask for from the text of its sysfs attribute `resource`: one line for each of BARs 0 to
//! 5, the ROM and further resources, with first address, last address and flags.

use pci::bar::{BarKind, BarSpec, Bars};

// linux: include/linux/ioport.h
const IO: u64 = 0x100;
const MEMORY: u64 = 0x200;
const PREFETCH: u64 = 0x2000;
const MEMORY_64: u64 = 0x10_0000;

/// The BARs; `None` for empty registers and upper halves. A line that cannot be read counts as empty.
#[must_use]
pub fn parse(resource: &str) -> [Option<BarSpec>; 6] {
    let mut bars = [None; 6];
    for (bar, line) in bars.iter_mut().zip(resource.lines()) {
        *bar = spec(line);
    }
    bars
}

/// Bytes of the expansion ROM, on the line behind the BARs. A size that no guest could be shown counts as none.
#[must_use]
pub fn rom(resource: &str) -> Option<u64> {
    let size = spec(resource.lines().nth(6)?).filter(|spec| spec.kind == BarKind::Memory32)?.size;
    Bars::default().with_rom(size).is_ok().then_some(size)
}

fn spec(line: &str) -> Option<BarSpec> {
    let mut numbers = line.split_ascii_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let kind = match (flags & IO != 0, flags & MEMORY != 0, flags & MEMORY_64 != 0) {
        (true, ..) => BarKind::Io,
        (_, true, true) => BarKind::Memory64,
        (_, true, false) => BarKind::Memory32,
        _ => return None,
    };
    let size = end.checked_sub(start)?.checked_add(1)?;
    size.is_power_of_two().then_some(BarSpec { kind, prefetchable: flags & PREFETCH != 0, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_kinds_and_flags_come_from_the_resource_file() {
        let text = "0x00000000f1000000 0x00000000f1ffffff 0x0000000000040200\n\
                    0x0000383800000000 0x000038381fffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000000000001000 0x000000000000107f 0x0000000000040101\n";
        let [first, second, third, fourth, ..] = parse(text);
        assert_eq!(first, Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 << 20 }));
        assert_eq!(second, Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 512 << 20 }));
        assert_eq!((third, fourth), (None, Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 128 })));
    }

    #[test]
    fn the_rom_has_the_seventh_line() {
        let with = |line: &str| rom(&format!("{}{line}\n", "0x0 0x0 0x0\n".repeat(6)));
        assert_eq!(with("0x00000000f2000000 0x00000000f207ffff 0x0000000000046200"), Some(512 << 10));
        assert_eq!(with("0x0000000000000000 0x0000000000000000 0x0000000000000000"), None);
        assert_eq!(with("0x0 0x3ff 0x200"), None);
        assert_eq!(rom("0x0 0xfff 0x200\n"), None);
    }

    #[test]
    fn lines_that_make_no_sense_are_empty_registers() {
        assert_eq!(parse("garbage\n0x10 0x0 0x200\n0x0 0xffffffffffffffff 0x200\n0x0 0x2 0x200"), [None; 6]);
    }
}
