use super::*;
use proptest::prelude::*;

fn request(ram: u64, bits: u8) -> MemoryMapRequest {
    MemoryMapRequest {
        ram,
        hot_plug: 0,
        physical_address_bits: bits,
        reserved: Vec::new(),
        firmware_size: 0,
        segments: vec![SegmentBuses { segment: 0, last_bus: 255 }],
    }
}

fn range(start: u64, end: u64) -> Range {
    Range { start, end }
}

#[test]
fn small_ram_lies_in_one_piece_below_the_window() {
    let map = MemoryMap::new(&request(512 * MIB, 40)).unwrap();
    assert_eq!(map.ram, [range(0, 512 * MIB)]);
    assert_eq!(map.mmio32, range(0x8000_0000, 0xE000_0000));
    assert_eq!(map.mmio64, [range(4 * GIB, 1 << 40)]);
    assert_eq!(map.ecam[0].range, range(0xE000_0000, 0xF000_0000));
    assert_eq!(map.firmware, None);
}

#[test]
fn ram_beyond_2_gib_goes_on_at_4_gib() {
    let map = MemoryMap::new(&request(8 * GIB, 40)).unwrap();
    assert_eq!(map.ram, [range(0, 2 * GIB), range(4 * GIB, 10 * GIB)]);
    assert_eq!(map.ram_size(), 8 * GIB);
    assert_eq!(map.mmio64, [range(10 * GIB, 1 << 40)]);
}

#[test]
fn ram_is_split_around_the_hypertransport_hole() {
    let mut request = request(2048 * GIB, 46);
    request.reserved = vec![AMD_HYPERTRANSPORT];
    let map = MemoryMap::new(&request).unwrap();
    let below_hole = AMD_HYPERTRANSPORT.start - FOUR_GIB;
    let rest = 2046 * GIB - below_hole;
    assert_eq!(
        map.ram,
        [range(0, 2 * GIB), range(FOUR_GIB, AMD_HYPERTRANSPORT.start), Range::sized(AMD_HYPERTRANSPORT.end, rest)]
    );
}

#[test]
fn the_window_for_64_bit_bars_avoids_the_hypertransport_hole() {
    let mut request = request(2 * GIB, 46);
    request.reserved = vec![AMD_HYPERTRANSPORT];
    let map = MemoryMap::new(&request).unwrap();
    let (hole, end) = (AMD_HYPERTRANSPORT, 1 << 46);
    assert_eq!(map.mmio64, [range(4 * GIB, hole.start), range(hole.end, end)]);
}

#[test]
fn other_segments_have_their_ecam_above_ram() {
    let mut request = request(3 * GIB, 40);
    request.segments.push(SegmentBuses { segment: 2, last_bus: 15 });
    let map = MemoryMap::new(&request).unwrap();
    let second = &map.ecam[1];
    assert_eq!(second.range, Range::sized(5 * GIB, 16 * MIB));
    assert!(map.mmio64.iter().all(|window| window.start >= 6 * GIB));
}

#[test]
fn trimming_buses_shrinks_ecam_and_never_grows_it() {
    let mut map = MemoryMap::new(&request(512 * MIB, 40)).unwrap();
    map.trim_buses(0, 7);
    assert_eq!(map.ecam[0].range, Range::sized(ECAM_BASE, 8 * MIB));
    map.trim_buses(0, 100);
    map.trim_buses(9, 1);
    assert_eq!((map.ecam.len(), map.ecam[0].last_bus), (1, 7));
}

#[test]
fn firmware_ends_at_4_gib() {
    let mut request = request(512 * MIB, 40);
    request.firmware_size = 64 * KIB;
    let map = MemoryMap::new(&request).unwrap();
    assert_eq!(map.firmware, Some(range(0xFFFF_0000, FOUR_GIB)));
}

#[test]
fn unusable_ram_sizes_are_refused_with_the_limit() {
    let message = |ram, bits| MemoryMap::new(&request(ram, bits)).unwrap_err().to_string();
    for ram in [0, 1, 16 * MIB - 1] {
        assert!(message(ram, 40).contains("at least 16M"), "{ram}");
    }
    assert!(message(16 * MIB + 1, 40).contains("not a multiple of 4096"));
    assert!(message(16 * MIB + 1, 40).ends_with("16781312"));
    assert_eq!(message(64 * GIB, 36), "memory of 64G does not fit the guest's 36 physical address bits: give at most 62G");
    for (ram, bits, most) in [(u64::MAX, 52, "4194302G"), (3 * GIB, 32, "2G"), (63 * GIB, 36, "62G"), (1 << 62, 40, "1022G")] {
        assert!(message(ram, bits).ends_with(&format!("give at most {most}")), "{}", message(ram, bits));
    }
    for hot_plug in [64 * GIB, u64::MAX - 4095] {
        let text = MemoryMap::new(&MemoryMapRequest { hot_plug, ..request(GIB, 36) }).unwrap_err().to_string();
        assert!(text.ends_with("--memory hotplug at most 60G"), "{text}");
    }
    let text = MemoryMap::new(&MemoryMapRequest { hot_plug: u64::MAX, ..request(GIB, 36) }).unwrap_err().to_string();
    assert!(text.contains("not a multiple of 4096"), "{text}");
}

#[test]
fn ram_that_just_fits_the_address_width_leaves_no_64_bit_window() {
    let map = MemoryMap::new(&request(62 * GIB, 36)).unwrap();
    assert_eq!(map.mmio64, []);
    assert!(MemoryMap::new(&request(2 * GIB, 32)).is_ok());
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    let mut bad = request(512 * MIB, 40);
    bad.reserved = vec![range(MIB, 2 * MIB)];
    assert!(matches!(MemoryMap::new(&bad), Err(MemoryMapError::ReservedInRam { .. })));
    bad.reserved = vec![range(LOW_RAM_END, FOUR_GIB)];
    assert!(matches!(MemoryMap::new(&bad), Err(MemoryMapError::NoWindow { .. })));
    let mut bad = request(512 * MIB, 40);
    bad.firmware_size = 17 * MIB;
    assert!(matches!(MemoryMap::new(&bad), Err(MemoryMapError::FirmwareSize { .. })));
    let mut bad = request(62 * GIB, 36);
    bad.segments.push(SegmentBuses { segment: 1, last_bus: 0 });
    assert!(matches!(MemoryMap::new(&bad), Err(MemoryMapError::EcamDoesNotFit { needed: 37, .. })));
    bad.segments = vec![SegmentBuses { segment: 1, last_bus: 0 }; 2];
    assert!(matches!(MemoryMap::new(&bad), Err(MemoryMapError::SegmentTwice { segment: 1 })));
    assert!(matches!(MemoryMap::new(&request(GIB, 64)), Err(MemoryMapError::AddressBits { bits: 64 })));
}

#[test]
fn the_map_prints_as_one_table_in_order_of_address() {
    let mut request = request(3 * GIB, 40);
    request.firmware_size = 64 * KIB;
    let printed = MemoryMap::new(&request).unwrap().to_string();
    let expected = "\
0x000000000000-0x00007fffffff      2 GiB  RAM
0x000080000000-0x0000dfffffff   1536 MiB  32-bit BARs
0x0000e0000000-0x0000efffffff    256 MiB  ECAM segment 0000 buses 00-ff
0x0000fec00000-0x0000fec00fff      4 KiB  I/O APIC
0x0000fee00000-0x0000feefffff      1 MiB  local APIC, MSI
0x0000ffff0000-0x0000ffffffff     64 KiB  firmware
0x000100000000-0x00013fffffff      1 GiB  RAM
0x000140000000-0x00ffffffffff   1019 GiB  64-bit BARs
";
    assert_eq!(printed, expected);
}

proptest! {
    #[test]
    fn whatever_is_asked_for_nothing_overlaps_and_no_ram_is_lost(
        pages in 0u64..1 << 31,
        bits in 30u8..54,
        holes in prop::collection::vec((0u64..1 << 40, 0u64..1 << 36), 0..4),
        firmware in 0u64..20 * MIB,
        segments in prop::collection::vec((0u16..4, any::<u8>()), 0..4),
    ) {
        let request = MemoryMapRequest {
            ram: pages * PAGE,
            hot_plug: 0,
            physical_address_bits: bits,
            reserved: holes.iter().map(|&(start, len)| Range::sized(FOUR_GIB + start, len)).collect(),
            firmware_size: firmware & !0xFFF,
            segments: segments.iter().map(|&(segment, last_bus)| SegmentBuses { segment, last_bus }).collect(),
        };
        let Ok(map) = MemoryMap::new(&request) else { return Ok(()) };
        prop_assert_eq!(map.ram_size(), request.ram);
        let mut all: Vec<Range> = map.ram.clone();
        all.push(map.mmio32);
        all.extend(&map.mmio64);
        all.extend(map.ecam.iter().map(|ecam| ecam.range));
        prop_assert!(all.iter().all(|range| request.reserved.iter().all(|hole| !range.overlaps(hole))));
        all.extend([IO_APIC, LOCAL_APIC, Range::sized(KVM_IDENTITY_MAP, 4 * PAGE)]);
        all.extend(map.firmware);
        all.sort();
        for pair in all.windows(2) {
            prop_assert!(pair[0].end <= pair[1].start, "{} meets {}", pair[0], pair[1]);
        }
        prop_assert!(all.iter().all(|range| range.end <= FOUR_GIB || range.end <= 1 << bits));
    }
}
