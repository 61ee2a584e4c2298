use proptest::prelude::*;

use super::*;
use crate::address::Devfn;
use crate::bar::PORTS;
use crate::caps::clique::decode;
use crate::caps::{id, walk};
use crate::ext_caps::walk_extended;
use crate::ids::ClassCode;
use crate::testing::{FakeIntx, FakeMirror, FakeMsi};

const MSIX: InterruptSpec =
    InterruptSpec::MsiX { vectors: 70, table_bar: 0, table_offset: 0x1000, pba_bar: 0, pba_offset: 0x1800 };

fn spec(interrupt: InterruptSpec) -> EmulatedSpec {
    let bar = |kind, prefetchable, size| Some(BarSpec { kind, prefetchable, size });
    EmulatedSpec {
        ids: Ids { vendor: 0x10DE, device: 0x20B8, class: ClassCode::new(0x03_0200), revision: 0xA1, ..Ids::default() },
        bars: [
            bar(BarKind::Memory32, false, 0x4000),
            bar(BarKind::Memory64, true, 128 << 30),
            None,
            bar(BarKind::Memory64, false, 32 << 20),
            None,
            bar(BarKind::Io, false, 32),
        ],
        on: Attachment::Link(Link::default()),
        interrupt,
        flr: true,
        clique: Some(Clique::new(5).unwrap()),
        serial_number: Some(0x0123_4567_89AB_CDEF),
        ..EmulatedSpec::default()
    }
}

struct Bench {
    endpoint: Emulated,
    sent: Arc<FakeMsi>,
    wire: FakeIntx,
}

fn bench(interrupt: InterruptSpec) -> Bench {
    bench_of(&spec(interrupt))
}

fn bench_of(spec: &EmulatedSpec) -> Bench {
    let (sent, wire) = (Arc::new(FakeMsi::default()), FakeIntx::default());
    let endpoint = Emulated::new(spec, sent.clone(), Some(Box::new(wire.clone()))).unwrap();
    Bench { endpoint, sent, wire }
}

fn refused(change: impl FnOnce(&mut EmulatedSpec)) -> EmulatedError {
    let mut spec = spec(MSIX);
    change(&mut spec);
    match Emulated::new(&spec, Arc::new(FakeMsi::default()), None) {
        Ok(_) => panic!("accepted: {spec:?}"),
        Err(error) => error,
    }
}

impl Bench {
    fn read(&self, offset: u16) -> u32 {
        self.endpoint.config_read(Reg::containing(offset))
    }

    fn write(&mut self, offset: u16, value: u32) -> Changes {
        self.endpoint.config_write(Access::dword(offset), value)
    }

    /// Offset of the capability `id`.
    fn find(&self, id: u8) -> Option<u16> {
        walk(|at| self.read(at.into())).iter().find(|c| c.id == id).map(|c| c.offset.into())
    }
}

#[test]
fn case_a2_the_guest_sees_the_flags_of_each_bar() {
    let mut bench = bench(InterruptSpec::None);
    let flags = [0x10, 0x14, 0x1C, 0x24].map(|at| bench.read(at) & 0xF);
    assert_eq!(flags, [0x0, 0xC, 0x4, 0x1]);
    for at in (0x10..0x28).step_by(4) {
        bench.write(at, 0xFFFF_FFFF);
    }
    let sizes = [0x10, 0x14, 0x18, 0x1C, 0x20, 0x24].map(|at| bench.read(at));
    assert_eq!(sizes, [0xFFFF_C000, 0x0000_000C, 0xFFFF_FFE0, 0xFE00_0004, 0xFFFF_FFFF, 0xFFFF_FFE1]);
}

#[test]
fn case_d1_msi_with_1_4_and_32_vectors_reaches_the_guest() {
    for vectors in [1u8, 4, 32] {
        for maskable in [false, true] {
            let mut bench = bench(InterruptSpec::Msi { vectors, maskable });
            assert_eq!(bench.find(id::MSIX), None);
            let at = bench.find(id::MSI).unwrap();
            bench.write(0x04, command::BUS_MASTER);
            bench.write(at + 4, 0xFEE0_0000);
            bench.write(at + 12, 0x40);
            bench.write(at, 0x0001_0000 | u32::from(vectors).trailing_zeros() << 20);
            for vector in 0..u16::from(vectors) {
                bench.endpoint.interrupts().raise(vector);
            }
            let data: Vec<u32> = bench.sent.take().iter().map(|message| message.data).collect();
            assert_eq!(data, (0x40..0x40 + u32::from(vectors)).collect::<Vec<_>>(), "{vectors} {maskable}");
        }
    }
}

#[test]
fn case_d1_a_function_without_msi_and_msi_x_attaches() {
    let mut bench = bench(InterruptSpec::None);
    assert_eq!((bench.find(id::MSI), bench.find(id::MSIX), bench.read(0x3C)), (None, None, 0));
    bench.write(0x04, command::BUS_MASTER);
    bench.endpoint.interrupts().raise(0);
    assert_eq!((bench.sent.take(), bench.wire.levels(), bench.read(0x04) & 1 << 19), (vec![], vec![], 0));
}

#[test]
fn a_pin_raises_its_wire_and_the_interrupt_status() {
    let mut bench = bench(InterruptSpec::Intx(3));
    assert_eq!(bench.read(0x3C), 0x300);
    bench.endpoint.interrupts().raise(0);
    assert_eq!((bench.wire.level(), bench.read(0x04) >> 19 & 1), (true, 1));
    bench.write(0x04, command::INTX_DISABLE);
    assert_eq!((bench.wire.level(), bench.read(0x04) >> 19 & 1), (false, 1));
    bench.endpoint.reset(ResetKind::Hot);
    assert_eq!((bench.wire.level(), bench.read(0x04) >> 19 & 1), (false, 0));
}

#[test]
fn msi_x_works_through_the_bar() {
    let mut bench = bench(MSIX);
    let at = bench.find(id::MSIX).unwrap();
    assert_eq!([0, 4, 8].map(|n| bench.read(at + n)), [69 << 16 | 0xC800 | 0x11, 0x1000, 0x1800]);
    bench.write(0x04, command::BUS_MASTER);
    bench.write(at, 0x8000_0000);
    bench.endpoint.interrupts().raise(69);
    let mut pending = [0; 8];
    bench.endpoint.msix_read(0, 0x1808, &mut pending);
    assert_eq!(pending, [0x20, 0, 0, 0, 0, 0, 0, 0]);
    bench.endpoint.msix_write(0, 0x1000 + 69 * 16, &0xFEE0_1000u64.to_le_bytes());
    bench.endpoint.msix_write(0, 0x1000 + 69 * 16 + 8, &[0x44, 0, 0, 0, 0, 0, 0, 0]);
    let sent: Vec<(u64, u32)> = bench.sent.take().iter().map(|message| (message.address, message.data)).collect();
    assert_eq!(sent, [(0xFEE0_1000, 0x44)]);
}

#[test]
fn accesses_outside_the_msi_x_regions_read_ones() {
    let bench = bench(MSIX);
    let read = |bar, offset| {
        let mut data = [0; 8];
        bench.endpoint.msix_read(bar, offset, &mut data);
        data
    };
    for (bar, offset) in [(0, 0xFFC), (0, 0x1460), (0, 0x17F8), (0, 0x1810), (1, 0x1000), (0, u64::MAX)] {
        assert_eq!(read(bar, offset), [0xFF; 8], "{bar} {offset:#x}");
    }
    assert_eq!([read(0, 0x1008), read(0, 0x1458), read(0, 0x1808)], [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0], [0; 8]]);
}

#[test]
fn the_driver_reads_the_clique_of_an_emulated_gpu() {
    for interrupt in [InterruptSpec::None, MSIX, InterruptSpec::Msi { vectors: 32, maskable: true }] {
        let bench = bench(interrupt);
        assert_eq!(decode(|at| bench.read(at.into())), Some(5));
        let list = walk(|at| bench.read(at.into()));
        assert_eq!(list.last().map(|last| (last.id, last.offset)), Some((id::VENDOR, 0xC8)));
    }
}

#[test]
fn vendor_capabilities_come_first_and_in_order() {
    let mut spec = spec(MSIX);
    spec.vendor_capabilities = vec![vec![1; 13], vec![2; 17], vec![3; 1]];
    spec.on = Attachment::RootBus;
    let endpoint = Emulated::new(&spec, Arc::new(FakeMsi::default()), None).unwrap();
    let read = |at: u8| endpoint.config_read(Reg::containing(at.into()));
    let ids: Vec<u8> = walk(read).iter().map(|c| c.id).collect();
    assert_eq!(ids, [id::VENDOR, id::VENDOR, id::VENDOR, id::EXPRESS, id::MSIX, id::VENDOR]);
    assert_eq!(read(0x40), 0x0110_5009);
    assert_eq!(read(0x54), 0x0202_0202);
}

#[test]
fn an_endpoint_on_a_root_bus_has_no_link_and_no_error_reporting() {
    let mut spec = spec(MSIX);
    spec.on = Attachment::RootBus;
    let endpoint = Emulated::new(&spec, Arc::new(FakeMsi::default()), None).unwrap();
    let read = |at: u16| endpoint.config_read(Reg::containing(at));
    assert_eq!((read(0x40) >> 20 & 0xF, read(0x4C), read(0x6C)), (9, 0, 0));
    let extended: Vec<(u16, u16)> = walk_extended(read).iter().map(|c| (c.id, c.offset)).collect();
    assert_eq!(extended, [(3, 0x100)]);
}

#[test]
fn a_conventional_function_has_no_pcie_capability() {
    let mut spec = spec(MSIX);
    spec.on = Attachment::Conventional;
    let mut endpoint = Emulated::new(&spec, Arc::new(FakeMsi::default()), None).unwrap();
    let ids: Vec<u8> = walk(|at| endpoint.config_read(Reg::containing(at.into()))).iter().map(|c| c.id).collect();
    assert_eq!(ids, [id::MSIX, id::VENDOR]);
    assert_eq!(walk_extended(|at| endpoint.config_read(Reg::containing(at))), []);
    for offset in (0x40..0x100).step_by(4) {
        let changes = endpoint.config_write(Access::dword(offset), express::INITIATE_FLR);
        assert_eq!(changes, Changes::empty(), "{offset:#x} resets nothing");
    }
}

#[test]
fn programming_is_what_the_guest_reads() {
    let mut bench = bench(InterruptSpec::Intx(1));
    bench.endpoint.program(&Programming {
        bars: [Some(0xE000_0000), Some(0x20_0000_0000), None, None, None, Some(0xC000)],
        memory: true,
        interrupt_line: 17,
        multifunction: true,
        ..Programming::default()
    });
    assert_eq!([0x10, 0x14, 0x18, 0x24].map(|at| bench.read(at)), [0xE000_0000, 0xC, 0x20, 0xC001]);
    assert_eq!((bench.read(0x04) & 7, bench.read(0x0C) >> 16, bench.read(0x3C)), (3, 0x80, 0x111));
    let bars = bench.endpoint.bars();
    let decoded: Vec<(u8, u64)> = bars.decoding().filter_map(|d| Some((d.bar, d.at?))).collect();
    assert_eq!((decoded, bars.io_enabled), (vec![(0, 0xE000_0000), (1, 0x20_0000_0000), (5, PORTS | 0xC000)], true));
    bench.endpoint.reset(ResetKind::Function);
    assert_eq!((bench.read(0x0C) >> 16, bench.read(0x3C), bench.read(0x04) & 7), (0x80, 0x111, 0));
}

/// With a ROM, virtual functions and alternative routing ids.
fn physical_function(interrupt: InterruptSpec) -> EmulatedSpec {
    let bar = |size| Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size });
    let bars = [bar(256 << 20), None, None, None, bar(4096), None];
    let sriov = SriovSpec { total_vfs: 16, first_offset: 8, stride: 2, vf_device: 0x101A, bars };
    EmulatedSpec { rom: Some(64 << 10), sriov: Some(sriov), ari: true, serial_number: None, ..spec(interrupt) }
}

#[test]
fn case_a9_virtual_functions_are_told_and_their_bars_sized_and_programmed_like_any() {
    let mut bench = bench_of(&physical_function(MSIX));
    let list = walk_extended(|at| bench.read(at));
    let found: Vec<(u16, u16)> = list.iter().map(|extent| (extent.id, extent.offset)).collect();
    let [(1, 0x100), (0x0E, ari), (0x10, at)] = found[..] else { panic!("{found:x?}") };
    let vf_bars = [Some(0x20_0000_0000), None, None, None, Some(0x30_0000_0000), None];
    let number = Devfn::from_byte(3);
    bench.endpoint.program(&Programming { vf_bars, number, next_function: 9, ..Programming::default() });
    assert_eq!(
        [0x0C, 0x10, 0x14, 0x18, 0x1C, 0x20].map(|offset| bench.read(at + offset)),
        [0x0010_0010, 0x0003_0000, 0x0002_0008, 0x101A_0000, 0x553, 1,]
    );
    assert_eq!(bench.read(ari + 4), 0x0900);
    assert_eq!([0x24, 0x28, 0x2C, 0x34, 0x38].map(|offset| bench.read(at + offset)), [0xC, 0x20, 0, 0xC, 0x30]);
    for offset in [0x24, 0x28, 0x34] {
        bench.endpoint.config_write(Access::dword(at + offset), u32::MAX);
    }
    assert_eq!([0x24, 0x28, 0x34].map(|offset| bench.read(at + offset)), [0xF000_000C, u32::MAX, 0xFFFF_F00C]);
    // How many there should be is kept, until they are enabled.
    let count = |bench: &Bench| bench.endpoint.virtual_functions().unwrap().count;
    bench.endpoint.config_write(Access::dword(at + 0x10), 0xFFFF_0010);
    assert_eq!((count(&bench), bench.read(at + 0x10)), (0, 0x0003_0010));
    let changes = bench.endpoint.config_write(Access::dword(at + 8), u32::MAX);
    assert_eq!((changes, bench.read(at + 8), count(&bench)), (Changes::VIRTUAL_FUNCTIONS, 1 | 1 << 3 | 1 << 4, 16));
    bench.endpoint.config_write(Access::dword(at + 0x10), 4);
    assert_eq!((bench.read(at + 0x10), count(&bench)), (0x0003_0010, 16));
    bench.endpoint.reset(ResetKind::Function);
    assert_eq!(count(&bench), 0);
    assert_eq!((bench.read(at + 0x10), bench.read(at + 0x24), bench.read(ari + 4)), (0x0003_0000, 0xC, 0x0900));
}

#[test]
fn a_rom_is_programmed_off_and_decodes_when_it_is_switched_on() {
    let mut bench = bench_of(&physical_function(MSIX));
    bench.endpoint.program(&Programming { rom: Some(0xE002_0000), memory: true, ..Programming::default() });
    assert_eq!(bench.read(0x30), 0xE002_0000);
    let reached =
        |bench: &Bench| bench.endpoint.bars().decoding().find(|decoding| decoding.bar == ROM).and_then(|decoding| decoding.at);
    assert_eq!(reached(&bench), None);
    assert_eq!(bench.endpoint.config_write(Access::dword(0x30), 0xE002_0001), Changes::DECODE);
    assert_eq!(reached(&bench), Some(0xE002_0000));
    bench.endpoint.config_write(Access::dword(0x04), 0);
    assert_eq!(reached(&bench), None);
    assert_eq!(bench_of(&spec(MSIX)).read(0x30), 0);
}

#[test]
fn on_other_buses_nobody_sees_alternative_routing_ids_and_on_a_conventional_one_no_virtual_functions() {
    for (on, expected) in [(Attachment::RootBus, vec![0x10]), (Attachment::Conventional, vec![])] {
        let bench = bench_of(&EmulatedSpec { on, clique: None, ..physical_function(MSIX) });
        let ids: Vec<u16> = walk_extended(|at| bench.read(at)).iter().map(|extent| extent.id).collect();
        assert_eq!(ids, expected, "{on:?}");
    }
}

#[test]
fn writes_tell_what_they_changed() {
    let mut bench = bench(MSIX);
    for (offset, value, expected) in [
        (0x04, command::MEMORY, Changes::DECODE),
        (0x04, command::MEMORY | command::BUS_MASTER, Changes::BUS_MASTER),
        (0x04, command::IO, Changes::DECODE | Changes::BUS_MASTER),
        (0x04, command::IO | command::SERR, Changes::empty()),
        (0x10, 0xE000_0000, Changes::DECODE),
        (0x10, 0xE000_0000, Changes::empty()),
        (0x48, 0x0000_7FFF, Changes::empty()),
        (0x48, 0x0000_8000, Changes::RESET | Changes::DECODE | Changes::BUS_MASTER),
    ] {
        assert_eq!(bench.write(offset, value), expected, "{offset:#x} = {value:#x}");
    }
}

#[test]
fn a_function_level_reset_clears_everything_but_identity() {
    let mut bench = bench(MSIX);
    let fresh: Vec<u32> = (0..0x200).step_by(4).map(|at| bench.read(at)).collect();
    for (at, value) in [(0x04, 0x406), (0x10, 0xE000_0000), (0x14, 0), (0x18, 0x20), (0x7C, 0x8000_0000)] {
        bench.write(at, value);
    }
    bench.write(0x48, 0x0000_F91F);
    let after: Vec<u32> = (0..0x200).step_by(4).map(|at| bench.read(at)).collect();
    assert_eq!(after, fresh);
    assert!(!bench.endpoint.bus_master());
}

#[test]
fn without_flr_the_reset_bit_does_nothing() {
    let mut spec = spec(MSIX);
    spec.flr = false;
    let mut endpoint = Emulated::new(&spec, Arc::new(FakeMsi::default()), None).unwrap();
    assert_eq!(endpoint.config_read(Reg::containing(0x44)) >> 28 & 1, 0);
    assert_eq!(endpoint.config_write(Access::dword(0x48), 0x8000), Changes::empty());
}

#[test]
fn a_detached_function_gives_all_ones_and_is_silent() {
    let mut bench = bench(MSIX);
    bench.write(0x04, command::BUS_MASTER | command::MEMORY);
    bench.write(0x10, 0xE000_0000);
    bench.endpoint.detach();
    bench.endpoint.interrupts().raise(0);
    let mut data = [0; 4];
    bench.endpoint.msix_read(0, 0x1000, &mut data);
    assert_eq!((bench.read(0), bench.read(0x10), data), (0xFFFF_FFFF, 0xFFFF_FFFF, [0xFF; 4]));
    assert_eq!((bench.write(0x04, 7), bench.endpoint.bus_master()), (Changes::empty(), false));
    assert_eq!((bench.endpoint.bars().decoding().count(), bench.sent.take()), (0, vec![]));
}

#[test]
fn a_worker_that_outlives_its_function_cannot_assert_the_wire() {
    let mut bench = bench(InterruptSpec::Intx(1));
    let worker = bench.endpoint.interrupts();
    worker.raise(0);
    bench.endpoint.detach();
    worker.raise(0);
    assert_eq!(bench.wire.levels(), [true, false]);
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let msix = |table_bar, table_offset, pba_offset| InterruptSpec::MsiX {
        vectors: 70,
        table_bar,
        table_offset,
        pba_bar: 0,
        pba_offset,
    };
    let place = |offset, size| EmulatedError::MsixPlace { what: "table", bar: 0, offset, len: 1120, size };
    assert_eq!(refused(|spec| spec.interrupt = msix(0, 0x3C00, 0)), place(0x3C00, 0x4000));
    assert_eq!(refused(|spec| spec.interrupt = msix(0, 0x1004, 0)), place(0x1004, 0x4000));
    let absent = EmulatedError::MsixPlace { what: "table", bar: 2, offset: 0, len: 1120, size: 0 };
    assert_eq!(refused(|spec| spec.interrupt = msix(2, 0, 0)), absent);
    let overlap = EmulatedError::MsixOverlap { table: 0x1000, pending: 0x1458 };
    assert_eq!(refused(|spec| spec.interrupt = msix(0, 0x1000, 0x1458)), overlap);
    assert_eq!(refused(|spec| spec.interrupt = InterruptSpec::Intx(5)), EmulatedError::Pin { pin: 5 });
    assert!(matches!(refused(|spec| spec.interrupt = InterruptSpec::Msi { vectors: 3, maskable: true }), EmulatedError::Msi(_)));
    assert!(matches!(refused(|spec| spec.vendor_capabilities = vec![vec![0; 70_000]]), EmulatedError::Capabilities(_)));
    let full = |spec: &mut EmulatedSpec| spec.vendor_capabilities = vec![vec![0; 0x71]];
    assert_eq!(refused(full), EmulatedError::CliqueRoom);
}

/// Everything that a write can change in this endpoint: offset, bits.
fn kept(offset: u16) -> u32 {
    match offset {
        0x04 => 0x0000_0547,
        0x0C => 0xFF,
        0x10 => 0xFFFF_C000,
        0x18 => 0xFFFF_FFE0,
        0x1C => 0xFE00_0000,
        0x20 => 0xFFFF_FFFF,
        0x24 => 0xFFFF_FFE0,
        0x3C => 0xFF,
        0x48 => 0x0000_79FF,
        0x50 => 0x0000_00CB,
        0x68 => 0x0000_0010,
        0x70 => 0xF,
        0x7C => 0xC000_0000,
        0x108 | 0x10C => 0x005F_F010,
        0x114 => 0x71C1,
        _ => 0,
    }
}

proptest! {
    #[test]
    fn no_sequence_of_accesses_changes_a_read_only_bit(
        accesses in prop::collection::vec((any::<u16>(), 0..4u8, 1..9u8, any::<u64>(), any::<u32>(), any::<bool>()), 0..200),
    ) {
        let mut bench = bench(MSIX);
        let before: Vec<u32> = (0..0x1000).step_by(4).map(|at| bench.read(at)).collect();
        for (offset, first, len, value, word, config) in accesses {
            let small = if offset & 0x8000 == 0 { offset & 0xFF } else { offset };
            let data = &value.to_le_bytes()[..usize::from(len)];
            if config {
                let access = Access { reg: Reg::containing(small), lanes: Lanes::new(first, len) };
                bench.endpoint.config_write(access, word);
            } else {
                bench.endpoint.msix_write(0, 0x1000 + u64::from(offset & 0xFFF), data);
                bench.endpoint.msix_read(first, offset.into(), &mut [0; 8][..usize::from(len)]);
            }
            bench.endpoint.interrupts().raise(offset & 0x7F);
        }
        for (at, before) in (0..0x1000u16).step_by(4).zip(before) {
            prop_assert_eq!((bench.read(at) ^ before) & !kept(at), 0, "{:#x}", at);
        }
    }
}

const MSI: InterruptSpec = InterruptSpec::Msi { vectors: 4, maskable: true };

proptest! {
    /// What guests read without an exit is what a configuration read gives, after any accesses, interrupts and resets.
    #[test]
    fn the_mirror_shows_every_register_at_every_moment(
        interrupt in prop_oneof![Just(MSIX), Just(MSI), Just(InterruptSpec::Intx(2)), Just(InterruptSpec::None)],
        steps in prop::collection::vec((0u8..12, any::<u16>(), 1..9u8, any::<u32>()), 0..100),
    ) {
        let mut bench = bench_of(&physical_function(interrupt));
        let mirror = Arc::new(FakeMirror::default());
        bench.endpoint.mirror(mirror.clone());
        for (kind, offset, len, value) in steps {
            let offset = if offset & 0x8000 == 0 { offset & 0xFF } else { offset };
            match kind {
                0 => bench.endpoint.interrupts().raise(offset & 3),
                1 => bench.endpoint.interrupts().lower(),
                2 => bench.endpoint.msix_write(0, 0x1000 + u64::from(offset & 0xFF8), &value.to_le_bytes()),
                3 if value < 1 << 28 => bench.endpoint.reset(ResetKind::Hot),
                4 => bench.endpoint.program(&Programming { bars: [Some(value.into()); 6], memory: true, ..Programming::default() }),
                _ => {
                    let access = Access { reg: Reg::containing(offset), lanes: Lanes::new(offset.to_le_bytes()[0], len) };
                    bench.endpoint.config_write(access, value);
                }
            }
            for reg in Reg::all() {
                prop_assert_eq!(mirror.read(reg), bench.endpoint.config_read(reg), "{:#x}", reg.offset());
            }
        }
        bench.endpoint.detach();
        prop_assert!(Reg::all().all(|reg| mirror.read(reg) == u32::MAX));
    }
}
