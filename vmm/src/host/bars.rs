//! Reads what a host function's BARs ask for from the text of its sysfs attribute `resource`: one line for each of BARs 0 to
//! 5, the ROM and further resources, with first address, last address and flags.

use pci::bar::{BarKind, BarSpec, Bars};

// linux: include/linux/ioport.h
const IO: u64 = 0x100;
const MEMORY: u64 = 0x200;
const PREFETCH: u64 = 0x2000;
const MEMORY_64: u64 = 0x10_0000;

/// The BARs; `None` for empty registers, upper halves and sizes that no register can ask for. The error is a line that says no
/// range.
pub fn parse(resource: &str) -> Result<[Option<BarSpec>; 6], &str> {
    let mut bars = [None; 6];
    for (bar, line) in bars.iter_mut().zip(resource.lines()) {
        *bar = spec(line)?;
    }
    Ok(bars)
}

/// Bytes of the expansion ROM, on the line behind the BARs. A size that no guest could be shown counts as none.
pub fn rom(resource: &str) -> Result<Option<u64>, &str> {
    let Some(line) = resource.lines().nth(6) else { return Ok(None) };
    let size = spec(line)?.filter(|spec| spec.kind == BarKind::Memory32).map(|spec| spec.size);
    Ok(size.filter(|size| Bars::default().with_rom(*size).is_ok()))
}

fn spec(line: &str) -> Result<Option<BarSpec>, &str> {
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x").unwrap_or(word), 16).ok();
    let numbers: Option<Vec<u64>> = line.split_ascii_whitespace().map(number).collect();
    let Some([start, end, flags]) = numbers.as_deref() else { return Err(line) };
    let kind = match (flags & IO != 0, flags & MEMORY != 0, flags & MEMORY_64 != 0) {
        (true, ..) => BarKind::Io,
        (_, true, true) => BarKind::Memory64,
        (_, true, false) => BarKind::Memory32,
        _ => return Ok(None),
    };
    let size = end.checked_sub(*start).and_then(|last| last.checked_add(1)).ok_or(line)?;
    Ok(size.is_power_of_two().then_some(BarSpec { kind, prefetchable: flags & PREFETCH != 0, size }))
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
        let [first, second, third, fourth, ..] = parse(text).unwrap();
        assert_eq!(first, Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 << 20 }));
        assert_eq!(second, Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 512 << 20 }));
        assert_eq!((third, fourth), (None, Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 128 })));
    }

    #[test]
    fn the_rom_has_the_seventh_line() {
        let with = |line: &str| rom(&format!("{}{line}\n", "0x0 0x0 0x0\n".repeat(6))).unwrap();
        assert_eq!(with("0x00000000f2000000 0x00000000f207ffff 0x0000000000046200"), Some(512 << 10));
        assert_eq!(with("0x0000000000000000 0x0000000000000000 0x0000000000000000"), None);
        assert_eq!(with("0x0 0x3ff 0x200"), None);
        assert_eq!(rom("0x0 0xfff 0x200\n"), Ok(None));
    }

    #[test]
    fn lines_that_say_no_range_are_named() {
        for line in
            ["garbage", "0x10 0x0 0x200", "0x0 0xffffffffffffffff 0x200", "0x0 0xfff", "0x0 0xfff 0x200 0x0", "0x0 -1 0x200"]
        {
            assert_eq!(parse(&format!("0x0 0x0 0x0\n{line}\n")), Err(line));
            assert_eq!(rom(&format!("{}{line}\n", "0x0 0x0 0x0\n".repeat(6))), Err(line));
        }
        assert_eq!(parse("0x0 0x2 0x200"), Ok([None; 6]), "a size of enhanced allocation");
    }
}
