//! What guests read of a virtio function without an exit.

use std::fs::File;
use std::sync::Arc;

use pci::access::{Access, Lanes, Reg};
use pci::emulated::Attachment;
use pci::errors::Recorded;
use pci::function::{Changes, PciFunction, Programming, ResetKind};
use pci::link::Link;
use pci::mirror::Mirror;
use pci::state::{Reader, Writer};
use pci::testing::FakeMirror;
use proptest::prelude::*;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::virtio::rng::{KERNEL, Rng};
use crate::virtio::testing::Driver;

type Source = Driver<Rng>;

const NONE: [u16; 0] = [];

fn source() -> (Source, Arc<FakeMirror>) {
    let mut driver = Driver::new(Rng::new("rng0", File::open(KERNEL).unwrap()).unwrap());
    let page = Arc::new(FakeMirror::default());
    assert!(driver.function.mirror(&(page.clone() as Arc<dyn Mirror>)));
    (driver, page)
}

/// Offset of the window's capability.
fn window(driver: &Source) -> u16 {
    let read = |at: u8| driver.function.registers_read(at);
    let window = pci::caps::walk(read).into_iter().find(|extent| read(extent.offset) & 0xFF00_00FF == 0x0500_0009);
    window.unwrap().offset.into()
}

/// Registers that read something else than is shown.
fn differences(driver: &mut Source, page: &FakeMirror) -> Vec<u16> {
    let differs = |reg: &Reg| page.read(*reg) != driver.function.config_read(*reg);
    Reg::all().filter(differs).map(Reg::offset).collect()
}

#[test]
fn the_window_is_live_from_its_first_use_to_a_reset() {
    let (mut driver, page) = source();
    let at = window(&driver);
    assert_eq!(driver.function.config_read(Reg::containing(at + 16)), u32::MAX, "it leads nowhere");
    assert_eq!(differences(&mut driver, &page), NONE);
    assert_eq!(driver.function.config_write(Access::dword(at + 12), 4), Changes::LIVE);
    assert!(driver.function.is_live());
    assert_eq!(differences(&mut driver, &page), [at + 12, at + 16], "length, and the first register of the BAR");
    assert_eq!(driver.function.config_write(Access::dword(at + 8), 4), Changes::empty(), "it stays so");
    assert_eq!(driver.function.config_write(Access::dword(at + 16), 0), Changes::empty());
    driver.function.config_write(Access::dword(at + 12), 0);
    assert_eq!(driver.function.config_write(Access::dword(at + 8), 0), Changes::LIVE);
    assert!(!driver.function.is_live());
    assert_eq!(differences(&mut driver, &page), NONE);
    for reset in [ResetKind::Hot, ResetKind::Cold] {
        driver.function.config_write(Access::dword(at + 4), 1);
        assert!(driver.function.is_live());
        driver.function.reset(reset);
        assert!(!driver.function.is_live());
        assert_eq!(differences(&mut driver, &page), NONE);
    }
}

#[test]
fn a_window_that_was_in_use_is_live_in_a_restored_machine() {
    let (mut driver, _) = source();
    let at = window(&driver);
    driver.function.config_write(Access::dword(at + 12), 2);
    driver.function.config_write(Access::dword(0x3C), 11);
    let mut writer = Writer::new();
    driver.function.save(&mut writer).unwrap();
    let (mut other, page) = source();
    other.function.restore(&mut Reader::new(&writer.into_bytes(), "rng0")).unwrap();
    assert!(other.function.is_live());
    other.function.config_write(Access::dword(at + 12), 0);
    assert!(!other.function.is_live());
    assert_eq!(differences(&mut other, &page), NONE);
    assert_eq!(page.read(Reg::containing(0x3C)) & 0xFF, 11);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// After any accesses, interrupts and resets, while the window is not in use.
    #[test]
    fn every_register_is_shown_at_every_moment(
        steps in prop::collection::vec((0u8..12, any::<u16>(), 1..9u8, any::<u32>()), 0..60),
    ) {
        let (mut driver, page) = source();
        let at = window(&driver);
        for (kind, offset, len, value) in steps {
            let [low, ..] = offset.to_le_bytes();
            match kind {
                0 => driver.function.signals().config_changed(),
                1 => driver.function.bar_write(0, 0x1000 + u64::from(low & 0x3F), &value.to_le_bytes()),
                2 => driver.function.bar_write(0, u64::from(low & 0x3F), &value.to_le_bytes()),
                3 if value < 1 << 28 => driver.function.reset(ResetKind::Hot),
                4 => driver.function.program(&Programming { bars: [Some(value.into()); 6], memory: true, ..Programming::default() }),
                // The window, used and given up.
                5 => {
                    driver.function.config_write(Access::dword(at + 4 + u16::from(low & 0xC)), value);
                    for register in 1..=3 {
                        driver.function.config_write(Access::dword(at + 4 * register), 0);
                    }
                }
                _ => {
                    let offset = if offset & 0x8000 == 0 { offset & 0xFF } else { offset };
                    let access = Access { reg: Reg::containing(offset), lanes: Lanes::new(low, len) };
                    driver.function.config_write(access, value);
                }
            }
            if !driver.function.is_live() {
                prop_assert_eq!(differences(&mut driver, &page), NONE);
            }
        }
        driver.function.detach();
        prop_assert!(Reg::all().all(|reg| page.read(reg) == u32::MAX));
    }
}

/// PCIe 6.0 7.5.3.2 and 7.5.3.6: the type of a device says what it hangs on, and an integrated endpoint has no link.
#[test]
fn the_device_type_is_that_of_its_place() {
    let shown = |on| {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let driver = Driver::on(on, Rng::new("rng0", File::open(KERNEL).unwrap()).unwrap(), memory);
        let read = |at: u8| driver.function.registers_read(at);
        let express = pci::caps::walk(read).into_iter().map(|extent| extent.offset).find(|at| read(*at) & 0xFF == 0x10)?;
        Some((read(express) >> 20 & 0xF, read(express + 0x0C) & 0x3FF))
    };
    let (integrated, endpoint) = (9, 0);
    assert_eq!(shown(Attachment::RootBus), Some((integrated, 0)));
    let (kind, link) = shown(Attachment::Link(Link::default())).unwrap();
    assert_eq!(kind, endpoint);
    assert_ne!(link, 0, "it has a speed and a width");
    assert_eq!(shown(Attachment::Conventional), None);
}

/// PCIe 6.0 7.8.4: what has error registers takes note of errors.
#[test]
fn below_a_port_errors_are_recorded_and_elsewhere_there_is_nowhere_to_record_them() {
    let recorded = |on| {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut driver = Driver::on(on, Rng::new("rng0", File::open(KERNEL).unwrap()).unwrap(), memory);
        driver.function.record_error("completion-timeout".parse().unwrap(), [0; 4])
    };
    assert_ne!(recorded(Attachment::Link(Link::default())), Recorded::Nothing);
    assert_eq!(recorded(Attachment::RootBus), Recorded::Nothing);
}
