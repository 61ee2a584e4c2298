//! Decides what a bridge forwards: which buses, which memory. Reads Type 1 registers (PCIe 6.0 7.5.1.3) and makes them from
//! planned windows; keeps no state.

use crate::access::{Reg, halves};
use crate::address::BusRange;
use crate::config::ConfigSpace;
use crate::regs::{command, header, type1};
use crate::topology::{Window, Windows};

const fn at(offset: u16) -> Reg {
    Reg::containing(offset)
}

/// The buses below, as the registers have them; `None` while the secondary bus is 0 or above the subordinate one: the bridge
/// forwards no configuration cycle.
#[must_use]
pub fn buses(space: &ConfigSpace) -> Option<BusRange> {
    let [_, secondary, subordinate, _] = space.read(at(type1::BUS_NUMBERS)).to_le_bytes();
    (secondary != 0 && secondary <= subordinate).then_some(BusRange { secondary, subordinate })
}

/// The open memory windows, as the registers have them, whether or not memory space is enabled.
#[must_use]
pub fn windows(space: &ConfigSpace) -> Windows {
    let (memory_base, memory_limit) = base_and_limit(space.read(at(type1::MEMORY)));
    let (base, limit) = base_and_limit(space.read(at(type1::PREFETCHABLE)));
    let base_upper = u64::from(space.read(at(type1::PREFETCHABLE_BASE_UPPER))) << 32;
    let limit_upper = u64::from(space.read(at(type1::PREFETCHABLE_LIMIT_UPPER))) << 32;
    Windows { memory: open(memory_base, memory_limit), prefetchable: open(base_upper | base, limit_upper | limit) }
}

/// Whether a memory request for `len` bytes from `address` goes down: memory space is enabled and one window holds all of it.
#[must_use]
pub fn forwards(space: &ConfigSpace, address: u64, len: u64) -> bool {
    let windows = windows(space);
    space.read(at(header::COMMAND_STATUS)) & command::MEMORY != 0
        && [windows.memory, windows.prefetchable].into_iter().flatten().any(|window| window.contains(address, len))
}

/// Programs the windows; what is not on 1 MiB boundaries is widened to them, and a memory window is cut to 32 bits.
pub fn set_windows(space: &mut ConfigSpace, windows: &Windows) {
    let (base, limit) = windows.memory.map_or(CLOSED, |window| (window.base, window.limit));
    space.set(at(type1::MEMORY), 0xFFF0_FFF0, pair(base, limit));
    let (base, limit) = windows.prefetchable.map_or(CLOSED, |window| (window.base, window.limit));
    space.set(at(type1::PREFETCHABLE), 0xFFF0_FFF0, pair(base, limit));
    space.set(at(type1::PREFETCHABLE_BASE_UPPER), 0xFFFF_FFFF, halves(base).1);
    space.set(at(type1::PREFETCHABLE_LIMIT_UPPER), 0xFFFF_FFFF, halves(limit).1);
}

/// Base above limit.
const CLOSED: (u64, u64) = (0xFFF0_0000, 0);

/// Base and limit of a dword with address bits 31:20 in bits 15:4 of each half; the limit's low bits are ones.
fn base_and_limit(dword: u32) -> (u64, u64) {
    let base = (dword & 0xFFF0) << 16;
    let limit = dword & 0xFFF0_0000 | 0xF_FFFF;
    (base.into(), limit.into())
}

fn pair(base: u64, limit: u64) -> u32 {
    (halves(base).0 & 0xFFF0_0000) >> 16 | halves(limit).0 & 0xFFF0_0000
}

fn open(base: u64, limit: u64) -> Option<Window> {
    (base <= limit).then_some(Window { base, limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::config::{ConfigBuilder, Type1};
    use crate::ids::Ids;

    fn bridge() -> ConfigSpace {
        ConfigBuilder::type1(&Type1 { ids: &Ids::default(), interrupt_pin: 0, multifunction: false }).build()
    }

    const BOTH: Windows = Windows {
        memory: Some(Window { base: 0xE000_0000, limit: 0xE1FF_FFFF }),
        prefetchable: Some(Window { base: 0x20_0000_0000, limit: 0x3F_FFFF_FFFF }),
    };

    #[test]
    fn nothing_is_forwarded_after_reset() {
        let mut space = bridge();
        space.write(Access::dword(header::COMMAND_STATUS), 0xFFFF);
        assert_eq!((buses(&space), windows(&space)), (None, Windows::default()));
        assert!(!forwards(&space, 0, 1));
    }

    #[test]
    fn programmed_windows_read_back() {
        for windows_in in [
            BOTH,
            Windows::default(),
            Windows { memory: None, ..BOTH },
            Windows { prefetchable: None, ..BOTH },
            Windows { prefetchable: Some(Window { base: 0xC000_0000, limit: 0xC00F_FFFF }), memory: None },
        ] {
            let mut space = bridge();
            set_windows(&mut space, &windows_in);
            assert_eq!(windows(&space), windows_in);
        }
    }

    #[test]
    fn a_request_must_lie_in_one_window_with_memory_space_enabled() {
        let mut space = bridge();
        set_windows(&mut space, &BOTH);
        assert!(!forwards(&space, 0xE000_0000, 4));
        space.write(Access::dword(header::COMMAND_STATUS), command::MEMORY);
        for (address, len, expected) in [
            (0xE000_0000, 0x200_0000, true),
            (0xE000_0000, 0x200_0001, false),
            (0xDFFF_FFFF, 2, false),
            (0x20_0000_0000, 0x20_0000_0000, true),
            (0x3F_FFFF_FFFF, 2, false),
            (u64::MAX, 2, false),
            (0xE000_0000, 0, false),
        ] {
            assert_eq!(forwards(&space, address, len), expected, "{address:#x} {len:#x}");
        }
    }

    #[test]
    fn bus_numbers_forward_only_when_they_form_a_range() {
        let mut space = bridge();
        for (numbers, expected) in [
            (0x0003_0201, Some(BusRange { secondary: 2, subordinate: 3 })),
            (0x0002_0201, Some(BusRange { secondary: 2, subordinate: 2 })),
            (0x0001_0200, None),
            (0x00FF_0000, None),
        ] {
            space.write(Access::dword(type1::BUS_NUMBERS), numbers);
            assert_eq!(buses(&space), expected, "{numbers:#x}");
        }
    }

    #[test]
    fn there_is_no_io_window() {
        let mut space = bridge();
        space.write(Access::dword(type1::IO_AND_STATUS), 0x0000_E0F0);
        space.write(Access::dword(0x30), 0xFFFF_FFFF);
        assert_eq!((space.read(at(type1::IO_AND_STATUS)), space.read(at(0x30))), (0, 0));
    }
}
