mod errors;
mod slots;

use proptest::prelude::*;

use super::*;
use crate::access::Lanes;
use crate::address::{Bdf, Devfn, Sbdf};
use crate::caps::{id, walk};
use crate::ext_caps::walk_extended;
use crate::function::FunctionId;
use crate::link::Link;
use crate::testing::FakeMsi;
use crate::topology::{HotPlug, Parent, PlannedKind, PortSpec, Window, Windows};

const KINDS: [PortKind; 4] = [PortKind::Root, PortKind::Upstream, PortKind::Downstream, PortKind::PciBridge];

const WINDOWS: Windows = Windows {
    memory: Some(Window { base: 0xE000_0000, limit: 0xE00F_FFFF }),
    prefetchable: Some(Window { base: 0x20_0000_0000, limit: 0x3F_FFFF_FFFF }),
};

fn build(kind: PortKind, ids: Option<Ids>) -> Port {
    build_with(kind, ids, None, true, &Arc::default())
}

fn build_with(kind: PortKind, ids: Option<Ids>, hotplug: Option<HotPlug>, occupied: bool, msi: &Arc<FakeMsi>) -> Port {
    let (planned, port) = planned(kind, ids, hotplug, occupied);
    Port::new(&planned, &port, msi.clone()).unwrap()
}

fn planned(kind: PortKind, ids: Option<Ids>, hotplug: Option<HotPlug>, occupied: bool) -> (PlannedFunction, PlannedPort) {
    let spec = PortSpec { kind, ids, link: Link::default(), atomic_completers: 3, hotplug };
    let buses = BusRange { secondary: 1, subordinate: 4 };
    let port = PlannedPort { spec, buses, windows: WINDOWS, slot: 0x103, occupied, reserved: None, intx: None };
    let planned = PlannedFunction {
        id: FunctionId(0),
        name: "port".into(),
        on: Parent::RootComplex(0),
        at: Sbdf::default(),
        multifunction: true,
        kind: PlannedKind::Port(port.clone()),
    };
    (planned, port)
}

fn read(port: &Port, offset: u16) -> u32 {
    port.config_read(Reg::containing(offset))
}

fn write(port: &mut Port, offset: u16, value: u32) -> Changes {
    port.config_write(Access::dword(offset), value)
}

/// Everything that a write can change in any port: offset, bits.
const KEPT: [(u16, u32); 30] = [
    (0x04, 0x0000_0546),
    (0x0C, 0x0000_00FF),
    (0x18, 0x00FF_FFFF),
    (0x20, 0xFFF0_FFF0),
    (0x24, 0xFFF0_FFF0),
    (0x28, 0xFFFF_FFFF),
    (0x2C, 0xFFFF_FFFF),
    (0x3C, 0x005F_00FF),
    // Device control, link control with the link-active bit that follows link disable, root control, control 2.
    (0x48, 0x0000_71EF),
    (0x50, 0x2000_00D3),
    (0x5C, 0x0000_000F),
    (0x68, 0x0000_00B0),
    (0x70, 0x0000_000F),
    // MSI.
    (0x80, 0x0071_0000),
    (0x84, 0xFFFF_FFFC),
    (0x88, 0xFFFF_FFFF),
    (0x8C, 0x0000_FFFF),
    (0x90, 0x0000_0001),
    // Power state and event enable.
    (0xAC, 0x0000_0103),
    // AER: masks, severities, root command.
    (0x108, 0x017F_F010),
    (0x10C, 0x017F_F010),
    (0x114, 0x0000_71C1),
    (0x12C, 0x0000_0007),
    // ACS.
    (0x154, 0x005F_0000),
    // What only the device sets: nothing to see here.
    (0x1C, 0),
    (0x30, 0),
    (0x34, 0),
    (0x60, 0),
    (0x104, 0),
    (0x130, 0),
];

fn kept(offset: u16) -> u32 {
    KEPT.iter().find(|(at, _)| *at == offset).map_or(0, |(_, bits)| *bits)
}

#[test]
fn registers_keep_exactly_the_bits_of_the_contract() {
    for kind in KINDS {
        for (offset, bits) in KEPT {
            let mut port = build(kind, None);
            let before = read(&port, offset);
            write(&mut port, offset, 0xFFFF_FFFF);
            let ones = read(&port, offset);
            write(&mut port, offset, 0);
            let took = ones & !read(&port, offset);
            assert_eq!((before ^ ones) & !bits, 0, "{kind:?} {offset:#x}");
            if kind == PortKind::Root {
                // A root port has no AtomicOp egress blocking; the link-active bit falls and rises the other way round.
                let missing = match offset {
                    0x50 => 0x2000_0000,
                    0x68 => 0x80,
                    _ => 0,
                };
                assert_eq!(took, bits & !missing, "{offset:#x}");
            }
        }
    }
}

#[test]
fn each_kind_shows_its_capabilities_at_fixed_places() {
    for (kind, standard, extended) in [
        (
            PortKind::Root,
            vec![(id::EXPRESS, EXPRESS), (id::MSI, MSI), (id::SUBSYSTEM, SUBSYSTEM), (id::POWER, POWER)],
            vec![AER, ACS, SERIAL],
        ),
        (PortKind::Upstream, vec![(id::EXPRESS, EXPRESS), (id::SUBSYSTEM, SUBSYSTEM), (id::POWER, POWER)], vec![AER, SERIAL]),
        (
            PortKind::Downstream,
            vec![(id::EXPRESS, EXPRESS), (id::MSI, MSI), (id::SUBSYSTEM, SUBSYSTEM), (id::POWER, POWER)],
            vec![AER, ACS, SERIAL],
        ),
        (PortKind::PciBridge, vec![(id::EXPRESS, EXPRESS), (id::SUBSYSTEM, SUBSYSTEM), (id::POWER, POWER)], vec![]),
    ] {
        let port = build(kind, None);
        let found: Vec<(u8, u8)> = walk(|at| read(&port, at.into())).iter().map(|c| (c.id, c.offset)).collect();
        assert_eq!(found, standard, "{kind:?}");
        let found: Vec<u16> = walk_extended(|at| read(&port, at)).iter().map(|c| c.offset).collect();
        assert_eq!(found, extended, "{kind:?}");
    }
}

#[test]
fn all_ports_of_a_switch_have_one_serial_number() {
    let number = |kind, at: Bdf, secondary: u8| {
        let (mut planned, mut port) = planned(kind, None, None, true);
        (planned.at.bdf, port.buses.secondary) = (at, secondary);
        let port = Port::new(&planned, &port, Arc::<FakeMsi>::default()).unwrap();
        (read(&port, 0x168), read(&port, 0x164))
    };
    let at = |bus, device| Bdf::new(bus, Devfn::new(device, 0));
    let upstream = number(PortKind::Upstream, at(2, 0), 3);
    assert_eq!(upstream, (0x0242_4E59, 0x0300));
    assert_eq!([number(PortKind::Downstream, at(3, 0), 4), number(PortKind::Downstream, at(3, 9), 5)], [upstream; 2]);
    assert_eq!(number(PortKind::Root, at(0, 2), 1), (0x0242_4E59, 0x10));
    assert_ne!(number(PortKind::Upstream, at(4, 0), 5), upstream);
}

#[test]
fn access_control_is_what_software_has_enabled() {
    for kind in KINDS {
        let mut port = build(kind, None);
        assert_eq!(port.access_control(), kind.has_link_below().then_some(0));
        write(&mut port, ACS + 4, 0xFFFF_0000);
        assert_eq!(port.access_control(), kind.has_link_below().then_some(0x5F), "no egress control");
        write(&mut port, ACS + 4, 0x0005_0000);
        assert_eq!(port.access_control(), kind.has_link_below().then_some(5));
        port.reset(ResetKind::Hot);
        assert_eq!(port.access_control(), kind.has_link_below().then_some(0));
    }
}

#[test]
fn host_ids_are_shown_with_the_class_of_a_bridge() {
    let ids = Ids { vendor: 0x1000, device: 0xC030, subsystem_vendor: 0x1000, subsystem: 0x1001, ..Ids::default() };
    let port = build(PortKind::Upstream, Some(ids));
    assert_eq!([0x00, 0x08, 0xA4].map(|at| read(&port, at)), [0xC030_1000, 0x0604_0000, 0x1001_1000]);
    let port = build(PortKind::Upstream, Some(Ids { subsystem_vendor: 0, subsystem: 0, ..ids }));
    assert_eq!(walk(|at| read(&port, at.into())).len(), 2, "no subsystem ids, no capability");
    assert_eq!(read(&build(PortKind::Root, None), 0x0C) >> 16, 0x81);
}

#[test]
fn case_a13_a_programmed_port_forwards_what_the_plan_says() {
    let mut port = build(PortKind::Root, None);
    assert_eq!((port.buses(), port.forwards(0xE000_0000, 4), port.bus_master()), (None, false, false));
    port.program();
    assert_eq!(port.buses(), Some(BusRange { secondary: 1, subordinate: 4 }));
    assert!(port.forwards(0xE000_0000, 0x10_0000) && port.forwards(0x3F_FFFF_F000, 0x1000) && port.bus_master());
    assert_eq!([0x18, 0x20, 0x24].map(|at| read(&port, at)), [0x0004_0100, 0xE000_E000, 0xFFF1_0001]);
    port.reset(ResetKind::Cold);
    assert_eq!((port.buses(), port.forwards(0xE000_0000, 4), port.bus_master()), (None, false, false));
}

#[test]
fn writes_tell_what_they_changed() {
    let mut port = build(PortKind::Downstream, None);
    for (offset, value, expected) in [
        (0x04, command::MEMORY, Changes::DECODE | Changes::WINDOWS),
        (0x04, command::MEMORY | command::BUS_MASTER, Changes::BUS_MASTER),
        (0x04, command::MEMORY | command::BUS_MASTER | command::SERR, Changes::empty()),
        (0x18, 0x0000_0001, Changes::empty()),
        (0x18, 0x0003_0201, Changes::BUS_RANGE),
        (0x18, 0x0003_0201, Changes::empty()),
        (0x20, 0xE000_E000, Changes::WINDOWS),
        (0x24, 0x0010_0000, Changes::WINDOWS),
        (0x28, 0x20, Changes::WINDOWS),
        (0x2C, 0x20, Changes::WINDOWS),
        (0x3C, 0x0040_0000, Changes::RESET_BELOW | Changes::LINK),
        (0x3C, 0x0040_0000, Changes::empty()),
        (0x3C, 0x0000_0000, Changes::LINK),
        (0x3C, 0x001F_00FF, Changes::empty()),
        (0x50, 0x0000_0010, Changes::RESET_BELOW | Changes::LINK),
        (0x50, 0x0000_0000, Changes::LINK),
        (0x1C, 0xFFFF_FFFF, Changes::empty()),
    ] {
        assert_eq!(write(&mut port, offset, value), expected, "{offset:#x} = {value:#x}");
    }
}

#[test]
fn a_port_in_d3hot_lets_nothing_through_and_keeps_its_registers() {
    for kind in KINDS {
        let mut port = build(kind, None);
        port.program();
        assert_eq!((read(&port, 0xA8) >> 16, read(&port, 0xAC)), (0xC803, 8));
        let registers = |port: &Port| [0x04, 0x18, 0x20, 0x24].map(|at| read(port, at));
        let before = registers(&port);
        let all = Changes::WINDOWS | Changes::BUS_MASTER | Changes::LINK;
        assert_eq!(write(&mut port, 0xAC, 3), all);
        assert_eq!((port.forwards(0xE000_0000, 4), port.bus_master(), port.in_reset()), (false, false, true));
        assert_eq!(write(&mut port, 0xAC, 0), all);
        assert_eq!((port.forwards(0xE000_0000, 4), port.bus_master(), port.in_reset()), (true, true, false));
        assert_eq!(registers(&port), before);
        for absent in [1, 2] {
            assert_eq!((write(&mut port, 0xAC, absent), read(&port, 0xAC)), (Changes::empty(), 8), "there is no D{absent}");
        }
    }
}

#[test]
fn a_pcie_to_pci_bridge_shows_the_link_above_it() {
    let port = build(PortKind::PciBridge, None);
    assert_eq!((read(&port, 0x40) >> 20 & 0xF, read(&port, 0x50) & LINK_STATUS), (7, 5 << 16 | 16 << 20));
    assert_eq!((read(&port, 0x00), read(&port, 0x64), read(&port, 0x3C) >> 8 & 0xFF), (0x10BF_1B36, 0, 0));
}

#[test]
fn nothing_below_answers_during_a_bus_reset_or_without_a_link() {
    let mut port = build(PortKind::Downstream, None);
    write(&mut port, 0x3C, 0x0040_0000);
    assert!(port.in_reset());
    write(&mut port, 0x3C, 0);
    assert!(!port.in_reset());
    write(&mut port, 0x50, express::LINK_DISABLE);
    assert_eq!((port.in_reset(), read(&port, 0x50) & express::LINK_ACTIVE), (true, 0));
    write(&mut port, 0x50, 0);
    assert_eq!((port.in_reset(), read(&port, 0x50) & express::LINK_ACTIVE), (false, express::LINK_ACTIVE));
}

proptest! {
    #[test]
    fn no_sequence_of_writes_changes_a_read_only_bit(
        kind in 0..KINDS.len(),
        writes in prop::collection::vec((any::<u16>(), 0..4u8, 1..5u8, any::<u32>()), 0..200),
    ) {
        let mut port = build(KINDS[kind], None);
        port.program();
        let before: Vec<u32> = (0..0x1000).step_by(4).map(|at| read(&port, at)).collect();
        for (offset, first, len, value) in writes {
            // Half of the writes go to the header and the standard capabilities.
            let offset = if offset & 0x8000 == 0 { offset & 0xFF } else { offset };
            let access = Access { reg: Reg::containing(offset), lanes: Lanes::new(first, len) };
            port.config_write(access, value);
            let _ = port.forwards(value.into(), len.into());
            prop_assert!(port.buses().is_none_or(|buses| buses.secondary <= buses.subordinate && buses.secondary != 0));
        }
        for (at, before) in (0..0x1000u16).step_by(4).zip(before) {
            prop_assert_eq!((read(&port, at) ^ before) & !kept(at), 0, "{:#x}", at);
        }
    }
}

/// As Linux does while it finds a port and brings it up.
#[test]
fn writes_are_counted_by_what_they_come_to() {
    let hotplug = Some(HotPlug::default());
    let mut port = build_with(PortKind::Root, None, hotplug, false, &Arc::default());
    let word = |offset: u16| Access { reg: Reg::containing(offset), lanes: Lanes::new(offset.to_le_bytes()[0] & 2, 2) };
    let mut counts = |access: Access, value: u32| {
        port.config_write(access, value);
        let WriteCounts { hard_wired, nothing_to_clear, same_value, changed } = port.writes();
        [hard_wired, nothing_to_clear, same_value, changed]
    };
    // Base address 0, expansion ROM, I/O window.
    assert_eq!(counts(Access::dword(0x10), u32::MAX), [1, 0, 0, 0]);
    assert_eq!(counts(Access::dword(0x38), u32::MAX), [2, 0, 0, 0]);
    assert_eq!(counts(word(0x1C), 0xE0F0), [3, 0, 0, 0]);
    // Secondary status, slot status, uncorrectable errors.
    assert_eq!(counts(word(0x1E), 0xFFFF_0000), [3, 1, 0, 0]);
    assert_eq!(counts(word(0x5A), 0x011F_0000), [3, 2, 0, 0]);
    assert_eq!(counts(Access::dword(0x104), 0), [3, 3, 0, 0]);
    // Bus numbers, slot control and the MSI address, twice each.
    for (access, value) in [(Access::dword(0x18), 0x0003_0201), (word(0x58), 0x1028), (Access::dword(0x84), 0xFEE0_0000)] {
        let [.., same, changed] = counts(access, value);
        assert_eq!(counts(access, value), [3, 3, same + 1, changed]);
    }
    assert_eq!(counts(Access::dword(0x18), 0x0003_0201), [3, 3, 4, 3]);
}
