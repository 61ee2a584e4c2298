use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[test]
fn capabilities_that_end_behind_the_bytes_are_not_there() {
    let mut config = vec![0; 0x60];
    config[6] = 0x10;
    config[0x34] = 0x50;
    config[0x50] = 0x10;
    assert!(Registers(&config).express().is_none());
    config.resize(256, 0);
    assert!(Registers(&config).express().is_some());
    assert_eq!(Registers(&config).fabric().config_bytes, 256);
    assert_eq!(Registers(&[]).fabric(), Fabric::default());
}

#[test]
fn virtual_functions_that_are_off_do_not_count() {
    let mut config = vec![0; 4096];
    config[0x100..0x104].copy_from_slice(&(0x10u32 | 1 << 16).to_le_bytes());
    config[0x10E..0x112].copy_from_slice(&[16, 0, 8, 0]);
    assert_eq!(Registers(&config).fabric().sriov, Some(Sriov { total: 16, enabled: 0 }));
    config[0x108] = 1;
    assert_eq!(Registers(&config).fabric().sriov, Some(Sriov { total: 16, enabled: 8 }));
}

proptest! {
    #[test]
    fn whatever_the_bytes_they_are_read_to_an_end(config in vec(any::<u8>(), 0..4200)) {
        let registers = Registers(&config);
        let fabric = registers.fabric();
        prop_assert!(fabric.config_bytes <= 4096);
        prop_assert!(registers.interrupt_pin() <= 4);
        prop_assert!(registers.express().is_none_or(|express| express.port_type() < 16));
    }

    #[test]
    fn lists_of_any_links_end(links in vec((0u16..0x400, any::<u8>()), 0..200), first in any::<u8>()) {
        let mut config = vec![0xFF; 4096];
        config[0x34] = first;
        for (place, next) in links {
            let at = usize::from(place) * 4;
            config[at] = 1;
            config[at + 1] = next;
            config[at + 2..at + 4].copy_from_slice(&(u16::from(next) << 4 | 1).to_le_bytes());
        }
        prop_assert!(Registers(&config).fabric().config_bytes == 4096);
    }
}
