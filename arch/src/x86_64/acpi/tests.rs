use pci::address::Devfn;

use super::*;
use crate::memory_map::{ECAM_BASE, GIB, MIB, MemoryMapRequest, SegmentBuses};
use crate::ports;
use crate::x86_64::layout;

const AT: u64 = layout::ACPI_TABLES.start;

fn map(ram: u64, segments: &[(u16, u8)]) -> MemoryMap {
    let segments = segments.iter().map(|&(segment, last_bus)| SegmentBuses { segment, last_bus });
    MemoryMap::new(&MemoryMapRequest {
        ram,
        hot_plug: 0,
        physical_address_bits: 46,
        reserved: Vec::new(),
        firmware_size: 0,
        segments: segments.collect(),
    })
    .unwrap()
}

fn bridge(uid: u32, segment: u16, buses: RangeInclusive<u8>) -> RootBridge {
    RootBridge {
        slots: Vec::new(),
        uid,
        segment,
        buses,
        mem32: vec![Range::sized(0x8000_0000 + u64::from(uid) * 0x1000_0000, 0x1000_0000)],
        mem64: vec![Range::sized(0x40_0000_0000 + u64::from(uid) * 0x10_0000_0000, 0x10_0000_0000)],
        io: None,
        proximity: None,
        prt: PrtEntry::of_device(1).into_iter().chain(PrtEntry::of_device(2)).collect(),
    }
}

fn node(proximity: u32, cpus: &[u32], memory: &[Range]) -> Node {
    Node { proximity, cpus: cpus.to_vec(), memory: memory.to_vec(), hot_plug: Vec::new(), distances: Vec::new() }
}

/// The tables of a machine, found as an operating system finds them: from the root pointer on.
struct Found {
    tables: Vec<Vec<u8>>,
}

impl Found {
    fn new(built: &AcpiTables, at: u64) -> Found {
        let table = |address: u64| {
            let offset = usize::try_from(address - at).unwrap();
            assert_eq!(offset % 16, 0);
            let len = usize::try_from(u32_at(&built.bytes, offset + 4)).unwrap();
            let bytes = built.bytes[offset..offset + len].to_vec();
            assert_eq!(sum(&bytes), 0, "checksum of {:?}", &bytes[..4]);
            assert_eq!(&bytes[10..24], b"BANYANBANYANVM");
            bytes
        };
        assert_eq!(&built.rsdp[..8], b"RSD PTR ");
        assert_eq!((sum(&built.rsdp[..20]), sum(&built.rsdp), built.rsdp.len()), (0, 0, 36));
        let xsdt = table(u64_at(&built.rsdp, 24));
        assert_eq!(&xsdt[..4], b"XSDT");
        let mut tables: Vec<Vec<u8>> = (36..xsdt.len()).step_by(8).map(|at| table(u64_at(&xsdt, at))).collect();
        let dsdt = tables.iter().find(|table| table.starts_with(b"FACP")).map(|fadt| u64_at(fadt, 140));
        tables.push(table(dsdt.unwrap()));
        Found { tables }
    }

    fn get(&self, signature: &[u8; 4]) -> Option<&[u8]> {
        self.tables.iter().find(|table| table.starts_with(signature)).map(Vec::as_slice)
    }
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn holds(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).filter(|window| *window == what).count()
}

/// Type and bytes of each structure from `at` on.
fn structures(table: &[u8], at: usize) -> Vec<(u8, &[u8])> {
    let mut rest = &table[at..];
    let mut found = Vec::new();
    while let [kind, len, ..] = *rest {
        let (structure, after) = rest.split_at(usize::from(len));
        found.push((kind, structure));
        rest = after;
    }
    found
}

fn cpus(count: u32) -> Vec<Cpu> {
    (0..count).map(|apic_id| Cpu { apic_id, present: true }).collect()
}

/// Inputs for these processors and this memory, with a serial line and nothing else.
fn plain<'a>(cpus: &'a [Cpu], map: &'a MemoryMap) -> AcpiInputs<'a> {
    AcpiInputs {
        cpus,
        map,
        hot_plug_cpus: false,
        memory_devices: 0,
        serial: true,
        panic_port: false,
        root_bridges: &[],
        nodes: &[],
    }
}

fn build(count: u32, map: &MemoryMap, root_bridges: &[RootBridge], nodes: &[Node]) -> Found {
    let cpus = cpus(count);
    let inputs = AcpiInputs { root_bridges, nodes, ..plain(&cpus, map) };
    Found::new(&tables(&inputs, AT), AT)
}

#[test]
fn all_tables_are_found_from_the_root_pointer() {
    let map = map(GIB, &[(0, 3)]);
    let nodes = [node(0, &[0, 1], &map.ram)];
    let found = build(2, &map, &[bridge(0, 0, 0..=3)], &nodes);
    for signature in [b"FACP", b"APIC", b"MCFG", b"SRAT", b"DSDT"] {
        assert!(found.get(signature).is_some(), "{signature:?}");
    }
}

#[test]
fn fadt_is_hardware_reduced_and_names_the_reset_and_sleep_registers() {
    let map = map(GIB, &[(0, 3)]);
    let found = build(1, &map, &[], &[]);
    let fadt = found.get(b"FACP").unwrap();
    assert_eq!((fadt.len(), fadt[8]), (276, 6));
    assert_eq!(u32_at(fadt, 112), 1 << 20 | 1 << 10 | 1 << 5 | 1 << 4 | 1);
    assert_eq!(fadt[109] & 1 << 3, 0, "MSI is supported");
    let gas = |port: u64| {
        let mut bytes = vec![1, 8, 0, 1];
        bytes.extend(port.to_le_bytes());
        bytes
    };
    assert_eq!(fadt[116..128], gas(0xCF9));
    assert_eq!(fadt[128], 6);
    assert_eq!(fadt[244..256], gas(0x600));
    assert_eq!(fadt[256..268], gas(0x601));
}

#[test]
fn madt_lists_every_processor_once_and_one_io_apic() {
    let map = map(GIB, &[(0, 3)]);
    for cpus in [1, 2, 255, 300] {
        let found = build(cpus, &map, &[], &[]);
        let madt = found.get(b"APIC").unwrap();
        assert_eq!((u32_at(madt, 36), u32_at(madt, 40)), (0xFEE0_0000, 0));
        let mut ids = Vec::new();
        let mut io_apics = 0;
        for (kind, structure) in structures(madt, 44) {
            match kind {
                0 => {
                    assert_eq!((structure[2], u32_at(structure, 4)), (structure[3], 1));
                    ids.push(u32::from(structure[3]));
                }
                9 => {
                    assert_eq!((u32_at(structure, 4), u32_at(structure, 8)), (u32_at(structure, 12), 1));
                    ids.push(u32_at(structure, 4));
                }
                1 => {
                    io_apics += 1;
                    assert_eq!((u32_at(structure, 4), u32_at(structure, 8)), (0xFEC0_0000, 0));
                }
                4 => assert_eq!(structure, [4, 6, 0xFF, 0, 0, 1]),
                other => panic!("structure {other}"),
            }
        }
        assert_eq!(ids, (0..cpus).collect::<Vec<_>>());
        assert_eq!(io_apics, 1);
    }
}

#[test]
fn srat_gives_each_processor_and_each_piece_of_ram_its_node() {
    let map = map(8 * GIB, &[(0, 3)]);
    let nodes = [
        node(0, &[0, 1], &[map.ram[0]]),
        Node { hot_plug: vec![Range::sized(16 * GIB, GIB)], ..node(1, &[2, 300], &[map.ram[1]]) },
        node(7, &[], &[]),
    ];
    let mut far = bridge(1, 0, 2..=3);
    far.proximity = Some(7);
    let found = build(4, &map, &[bridge(0, 0, 0..=1), far], &nodes);
    let srat = found.get(b"SRAT").unwrap();
    assert_eq!((u32_at(srat, 36), u64_at(srat, 40)), (1, 0));
    let mut cpus = Vec::new();
    let mut memory = Vec::new();
    let mut initiators = Vec::new();
    for (kind, bytes) in structures(srat, 48) {
        match kind {
            0 => cpus.push((u32::from(bytes[3]), u32::from(bytes[2]))),
            2 => cpus.push((u32_at(bytes, 8), u32_at(bytes, 4))),
            1 => memory.push((u32_at(bytes, 2), Range::sized(u64_at(bytes, 8), u64_at(bytes, 16)), u32_at(bytes, 28))),
            5 => initiators.push((u32_at(bytes, 4), bytes[10], bytes.len())),
            other => panic!("structure {other}"),
        }
    }
    assert_eq!(cpus, [(0, 0), (1, 0), (2, 1), (300, 1)]);
    let later = Range::sized(16 * GIB, GIB);
    assert_eq!(memory, [(0, map.ram[0], 1), (1, map.ram[1], 1), (1, later, 3)]);
    assert_eq!(initiators, [(7, 2, 32)], "a node without anything else lives by its root bridge");
}

#[test]
fn slit_has_the_distances_of_all_nodes_row_by_row_if_all_are_known() {
    let map = map(GIB, &[(0, 3)]);
    let far = |proximity, distances: &[u8]| Node { distances: distances.to_vec(), ..node(proximity, &[proximity], &[]) };
    let found = build(2, &map, &[], &[far(0, &[10, 21]), far(1, &[31, 10])]);
    let slit = found.get(b"SLIT").unwrap();
    assert_eq!((slit.len(), u64_at(slit, 36), &slit[44..]), (48, 2, &[10, 21, 31, 10][..]));
    assert!(build(2, &map, &[], &[far(0, &[10, 21]), far(1, &[])]).get(b"SLIT").is_none());
}

#[test]
fn processors_that_may_come_later_are_online_capable() {
    let map = map(GIB, &[(0, 3)]);
    let cpus = [(0, true), (4, false), (255, false)].map(|(apic_id, present)| Cpu { apic_id, present });
    let found = Found::new(&tables(&plain(&cpus, &map), AT), AT);
    let madt = found.get(b"APIC").unwrap();
    let listed: Vec<&[u8]> = structures(madt, 44).into_iter().map(|(_, bytes)| bytes).take(3).collect();
    assert_eq!(listed[0], [0, 8, 0, 0, 1, 0, 0, 0]);
    assert_eq!(listed[1], [0, 8, 1, 4, 2, 0, 0, 0]);
    assert_eq!(listed[2], [9, 16, 0, 0, 255, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0]);
}

#[test]
fn case_f7_a_motherboard_resource_covers_exactly_the_ecam_of_every_segment() {
    let map = map(3 * GIB, &[(0, 5), (1, 255), (3, 0)]);
    let found = build(1, &map, &[bridge(0, 0, 0..=5)], &[]);
    let mcfg = found.get(b"MCFG").unwrap();
    let listed: Vec<Range> = mcfg[44..]
        .chunks(16)
        .map(|entry| {
            assert_eq!(entry[10], 0, "ECAM begins with bus 0");
            Range::sized(u64_at(entry, 0), (u64::from(entry[11]) + 1) * MIB)
        })
        .collect();
    assert_eq!(listed[0], Range::sized(ECAM_BASE, 6 * MIB));
    assert_eq!(listed, map.ecam.iter().map(|ecam| ecam.range).collect::<Vec<_>>());

    // The body of the PNP0C02 device: fixed 32-bit descriptors (0x86) and 64-bit address descriptors (0x8A).
    let dsdt = found.get(b"DSDT").unwrap();
    let device = dsdt.windows(4).position(|window| window == b"ECAM").unwrap();
    let end = dsdt.windows(4).position(|window| window == b"POSC").unwrap();
    let device = &dsdt[device..end];
    assert_eq!(holds(device, &[0x0C, 0x41, 0xD0, 0x0C, 0x02]), 1, "PNP0C02");
    let mut reserved = Vec::new();
    for at in 0..device.len() - 3 {
        match device[at..at + 3] {
            [0x86, 9, 0] => {
                let (start, len) = (u32_at(device, at + 4), u32_at(device, at + 8));
                reserved.push(Range::sized(start.into(), len.into()));
            }
            [0x8A, 43, 0] => {
                let (first, last) = (u64_at(device, at + 14), u64_at(device, at + 22));
                assert_eq!(u64_at(device, at + 38), last - first + 1);
                reserved.push(Range { start: first, end: last + 1 });
            }
            _ => {}
        }
    }
    assert_eq!(reserved, listed);
}

#[test]
fn the_soft_off_state_is_what_the_sleep_register_takes() {
    let map = map(GIB, &[]);
    let found = build(1, &map, &[], &[]);
    assert_eq!(holds(found.get(b"DSDT").unwrap(), b"_S5_\x12\x07\x04\x0A\x05\0\0\0"), 1);
    assert!(found.get(b"MCFG").is_none(), "no segment, no MCFG");
    assert!(found.get(b"SRAT").is_none(), "no node, no SRAT");
}

#[test]
fn the_serial_line_is_listed_only_if_it_exists() {
    let map = map(GIB, &[]);
    let one = cpus(1);
    let mut inputs = plain(&one, &map);
    let com1 = b"\x47\x01\xF8\x03\xF8\x03\x01\x08\x89\x06\x00\x03\x01\x04\x00\x00\x00\x79\x00";
    assert_eq!(holds(&tables(&inputs, AT).bytes, com1), 1);
    inputs.serial = false;
    assert_eq!(holds(&tables(&inputs, AT).bytes, b"COM1"), 0);
}

#[test]
fn each_root_bridge_names_its_segment_buses_node_and_windows() {
    let map = map(GIB, &[(0, 0x3F), (2, 0x1F)]);
    let mut second = bridge(1, 2, 0x20..=0x3F);
    second.proximity = Some(3);
    second.io = Some(Range { start: 0x1000, end: 0x1_0000 });
    let found = build(1, &map, &[bridge(0, 0, 0..=0x1F), second], &[]);
    let dsdt = found.get(b"DSDT").unwrap();
    let start = dsdt.windows(4).position(|window| window == b"P001").unwrap();
    let device = &dsdt[start..];
    assert_eq!(holds(dsdt, b"P000\x08_HID\x0C\x41\xD0\x0A\x08\x08_CID\x0C\x41\xD0\x0A\x03"), 1);
    for named in [&b"_SEG\x0A\x02"[..], b"_BBN\x0A\x20", b"_PXM\x0A\x03", b"_UID\x01"] {
        assert_eq!(holds(device, named), 1, "{named:?}");
    }
    assert_eq!(holds(&dsdt[..start], b"_PXM"), 0);
    let buses = [0x88, 13, 0, 2, 0xC, 0, 0, 0, 0x20, 0, 0x3F, 0, 0, 0, 0x20, 0];
    assert_eq!(holds(device, &buses), 1);
    let io = [0x87, 23, 0, 1, 0xC, 3, 0, 0, 0, 0, 0, 0x10, 0, 0, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0xF0, 0, 0];
    assert_eq!(holds(dsdt, &io), 1);
    let mut low = vec![0x87, 23, 0, 0, 0xC, 1];
    for field in [0, 0x9000_0000u32, 0x9FFF_FFFF, 0, 0x1000_0000] {
        low.extend(field.to_le_bytes());
    }
    assert_eq!(holds(device, &low), 1);
    let mut high = vec![0x8A, 43, 0, 0, 0xC, 1];
    for field in [0, 0x50_0000_0000u64, 0x5F_FFFF_FFFF, 0, 0x10_0000_0000] {
        high.extend(field.to_le_bytes());
    }
    assert_eq!(holds(device, &high), 1);
}

#[test]
fn equal_interrupt_tables_exist_once() {
    let map = map(GIB, &[(0, 255)]);
    let bridges: Vec<RootBridge> = (0..3).map(|uid| bridge(uid, 0, 0..=1)).collect();
    let mut other = bridge(3, 0, 0..=1);
    other.prt = PrtEntry::of_device(9).to_vec();
    let mut none = bridge(4, 0, 0..=1);
    none.prt.clear();
    let found = build(1, &map, &[bridges, vec![other, none]].concat(), &[]);
    let dsdt = found.get(b"DSDT").unwrap();
    assert_eq!((holds(dsdt, b"\x08I000"), holds(dsdt, b"\x08I001")), (1, 1));
    assert_eq!((holds(dsdt, b"\\/\x02I000"), holds(dsdt, b"\\._SB_I000"), holds(dsdt, b"\\._SB_I001")), (0, 3, 1));
    assert_eq!(holds(dsdt, b"_PRT"), 4);
    // INTB of device 2: GSI 16 + (2 + 1) % 8.
    assert_eq!(holds(dsdt, &[0x12, 0x0B, 4, 0x0C, 0xFF, 0xFF, 2, 0, 1, 0, 0x0A, 19]), 1);
}

#[test]
fn osc_grants_native_hot_plug_pme_aer_and_the_capability_and_refuses_shpc() {
    assert_eq!(pci_root::OSC_GRANTED & 0b1_1101, 0b1_1101);
    assert_eq!(pci_root::OSC_GRANTED & 0b10, 0);
    let map = map(GIB, &[(0, 0)]);
    let found = build(1, &map, &[bridge(0, 0, 0..=0)], &[]);
    let dsdt = found.get(b"DSDT").unwrap();
    let uuid = [0x5B, 0x4D, 0xDB, 0x33, 0xF7, 0x1F, 0x1C, 0x40, 0x96, 0x57, 0x74, 0x41, 0xC0, 0x3D, 0xD7, 0x66];
    assert_eq!(holds(dsdt, &uuid), 1);
    assert_eq!(holds(dsdt, b"_DSM"), 0);
}

#[test]
fn a_large_machine_fits_the_place_of_the_tables_and_a_huge_one_is_refused() {
    let map = map(64 * GIB, &[(0, 255), (1, 255), (2, 255), (3, 255)]);
    let bridges: Vec<RootBridge> = (0..1000)
        .map(|uid| {
            let mut bridge = bridge(uid, 0, 0..=3);
            bridge.mem32 = vec![Range { start: 0x8000_0000, end: 0x9000_0000 }];
            bridge.proximity = Some(0);
            bridge.prt = (0..32).flat_map(PrtEntry::of_device).collect();
            bridge
        })
        .collect();
    let nodes = [node(0, &(0..255).collect::<Vec<_>>(), &map.ram)];
    let cpus = cpus(255);
    let inputs = |count| AcpiInputs { root_bridges: &bridges[..count], nodes: &nodes, ..plain(&cpus, &map) };
    let [(at, bytes), (rsdp_at, rsdp)] = memory(&inputs(64)).unwrap();
    assert_eq!((at, rsdp_at), (layout::ACPI_TABLES.start, layout::RSDP));
    assert!((bytes.len() as u64) < layout::ACPI_TABLES.len() / 2, "{} bytes", bytes.len());
    assert!(Found::new(&AcpiTables { rsdp, bytes }, at).get(b"SRAT").is_some());
    assert!(matches!(memory(&inputs(1000)), Err(AcpiError::TooLarge { room: 0x2_0000, root_bridges: 1000, .. })));
}

#[test]
fn the_event_device_handles_what_the_machine_has() {
    let map = map(GIB, &[]);
    let cpus: Vec<Cpu> = (0..3).map(|apic_id| Cpu { apic_id: apic_id * 2, present: apic_id == 0 }).collect();
    let nodes = [node(0, &[0, 2], &map.ram), node(1, &[4], &[])];
    let all = AcpiInputs { hot_plug_cpus: true, memory_devices: 2, nodes: &nodes, ..plain(&cpus, &map) };
    let few = AcpiInputs { hot_plug_cpus: false, memory_devices: 0, ..all };
    let dsdt = |inputs: &AcpiInputs<'_>| Found::new(&tables(inputs, AT), AT).get(b"DSDT").unwrap().to_vec();
    let (with, without) = (dsdt(&all), dsdt(&few));
    // _EVT takes the register, then tests a bit for each kind of event: Store(EVNT, Local0), If(And(Local0, bit)).
    let test = |bit: u8| [vec![0x7B, 0x60], if bit == 1 { vec![1] } else { vec![0x0A, bit] }, vec![0]].concat();
    for (bit, there) in [(1, 0), (2, 0), (4, 1)] {
        assert_eq!((holds(&with, &test(bit)), holds(&without, &test(bit))), (1, there), "bit {bit}");
    }
    for table in [&with, &without] {
        assert_eq!(holds(table, b"_HID\x0DACPI0013\0"), 1);
        // Interrupt 9 as a consumer, edge-triggered, active high.
        assert_eq!(holds(table, &[0x89, 6, 0, 3, 1, 9, 0, 0, 0]), 1);
        assert_eq!(holds(table, &[0x0C, 0x41, 0xD0, 0x0C, 0x0C]), 1, "PNP0C0C");
    }
    assert_eq!((holds(&with, b"ACPI0007"), holds(&without, b"ACPI0007")), (3, 0));
    // A processor that may come is enabled in its own entry, with its id and node; the first cannot go.
    assert_eq!(holds(&with, &[0x0A, 8, 0, 8, 2, 4, 1, 0, 0, 0]), 1);
    assert_eq!(holds(&with, b"_PXM\x01"), 1);
    assert_eq!(holds(&with, b"_EJ0"), 2);
    assert_eq!((holds(&with, &[0x0C, 0x41, 0xD0, 0x0C, 0x80]), holds(&without, b"MCRS")), (2, 0), "PNP0C80");
}

#[test]
fn everything_that_may_come_fits_the_place_of_the_tables() {
    let map = map(GIB, &[(0, 255)]);
    let bridges: Vec<RootBridge> = (0..16).map(|uid| bridge(uid, 0, 0..=3)).collect();
    let cpus: Vec<Cpu> = (0..255).map(|apic_id| Cpu { apic_id, present: false }).collect();
    let nodes = [node(0, &(0..255).collect::<Vec<_>>(), &map.ram)];
    let inputs =
        AcpiInputs { hot_plug_cpus: true, memory_devices: u16::MAX, root_bridges: &bridges, nodes: &nodes, ..plain(&cpus, &map) };
    let [(_, bytes), _] = memory(&inputs).unwrap();
    assert!((bytes.len() as u64) < layout::ACPI_TABLES.len() * 3 / 4, "{} bytes", bytes.len());
}

#[test]
fn devices_of_conventional_buses_stand_below_the_bridges_that_lead_there() {
    let map = map(GIB, &[(0, 255)]);
    let (port, other, bridge_at) = (Devfn::new(1, 0), Devfn::new(1, 1), Devfn::new(0, 0));
    let mut bridge = bridge(0, 0, 0..=9);
    bridge.slots = vec![
        SlotBus { index: 0, way: vec![], slots: vec![BusSlot::of_own(5)] },
        SlotBus { index: 1, way: vec![port, bridge_at], slots: vec![BusSlot::of_own(0), BusSlot { number: 31, bit: 30 }] },
        SlotBus { index: 2, way: vec![other, bridge_at], slots: vec![BusSlot::of_own(0)] },
        SlotBus { index: 2, way: vec![Devfn::new(2, 0)], slots: vec![BusSlot { number: 0, bit: 1 }] },
    ];
    let found = build(1, &map, &[bridge], &[]);
    let dsdt = found.get(b"DSDT").unwrap();
    // Each register is named in its field and used once; each bridge is there once.
    for (name, times) in [(b"U000", 2), (b"U002", 2), (b"L001", 2), (b"E001", 3), (b"E002", 3), (b"U003", 0)] {
        assert_eq!(holds(dsdt, name), times, "{}", String::from_utf8_lossy(name));
    }
    let device = |name: &[u8; 4]| {
        let mut places = dsdt.windows(4).enumerate().filter(|(_, four)| four == name);
        let at = places.find(|(at, _)| dsdt[at - 4..*at].windows(2).any(|two| two == [0x5B, 0x82])).unwrap().0;
        assert!(dsdt[at + 4..].starts_with(b"\x08_ADR"), "{}", String::from_utf8_lossy(name));
        dsdt[at + 9..at + 14].to_vec()
    };
    assert_eq!(device(b"D008"), [0x0C, 0, 0, 1, 0], "device 1 function 0");
    assert_eq!(device(b"D009"), [0x0C, 1, 0, 1, 0], "device 1 function 1");
    assert_eq!(device(b"S01F"), [0x0C, 0, 0, 31, 0]);
    assert_eq!(holds(dsdt, b"\\\x2F\x05_SB_P000D008D000S01F"), 2, "told of coming and of leaving");
    assert_eq!(holds(dsdt, b"\\\x2F\x03_SB_P000S005"), 2);
    assert_eq!(holds(dsdt, b"\\\x2F\x04_SB_P000D010S000"), 2, "the last two share registers, which are read once");
    assert_eq!(holds(dsdt, b"_EJ0"), 5);
    // Three buses of twelve ports from 0x640 on.
    assert_eq!(holds(dsdt, &[b"BSLT\x01\x0B".as_slice(), &[0x40, 6, 0x0A, 36]].concat()), 1);
    assert_eq!(ports::BUS_SLOTS + u16::from(ports::SLOT_BUSES) * ports::BUS_SLOTS_LEN, ports::CPU_STATE);
}

#[test]
fn slots_of_as_many_buses_as_there_can_be_fit_the_place_of_the_tables() {
    let map = map(GIB, &[(0, 255)]);
    let mut bridge = bridge(0, 0, 0..=255);
    bridge.prt = (0..32).flat_map(PrtEntry::of_device).collect();
    bridge.slots = (0..ports::SLOT_BUSES)
        .map(|index| SlotBus {
            index,
            way: vec![Devfn::new(index, 0), Devfn::ZERO],
            slots: (0..32).map(BusSlot::of_own).collect(),
        })
        .collect();
    let cpus = cpus(8);
    let bridges = [bridge];
    let inputs = AcpiInputs { root_bridges: &bridges, ..plain(&cpus, &map) };
    let [(_, bytes), _] = memory(&inputs).unwrap();
    assert!((bytes.len() as u64) < layout::ACPI_TABLES.len() * 3 / 4, "{} bytes", bytes.len());
}
