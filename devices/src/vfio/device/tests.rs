use std::os::fd::{AsFd, AsRawFd};

use pci::access::{self, Lanes};
use pci::bar::BarKind;
use pci::caps::Clique;
use pci::link::Link;
use pci::seams::MsiMessage;
use pci::testing::{FakeIntxEvents, FakeRoutes};
use proptest::prelude::*;

use super::*;
use crate::vfio::Placement;
use crate::vfio::fake::{FakeDevice, Registers};

fn options() -> VfioOptions {
    VfioOptions { clique: None, clique_any_vendor: false, placement: Placement::BelowPort(Link::default()) }
}

struct Bench {
    function: VfioFunction<FakeDevice>,
    device: FakeDevice,
    routes: FakeRoutes,
}

fn bench_with(device: FakeDevice, options: &VfioOptions) -> Bench {
    let routes = FakeRoutes::default();
    let host = HostFunction::new("gpu0", device.clone()).unwrap();
    let intx = Box::new(FakeIntxEvents::new().unwrap());
    let function = VfioFunction::new(host, options, Arc::new(routes.clone()), Some(intx), FunctionId(1)).unwrap();
    Bench { function, device, routes }
}

fn bench(device: FakeDevice) -> Bench {
    bench_with(device, &options())
}

impl Bench {
    fn read(&mut self, offset: u16) -> u32 {
        self.function.config_read(Reg::containing(offset))
    }

    fn write(&mut self, offset: u16, value: u32) -> Changes {
        self.function.config_write(Access::dword(offset), value)
    }

    fn write_half(&mut self, offset: u16, value: u16) -> Changes {
        let lanes = Lanes::new((offset & 3).to_le_bytes()[0], 2);
        self.function.config_write(Access { reg: Reg::containing(offset), lanes }, u32::from(value) << (8 * (offset & 3)))
    }

    /// As the machine does after a write that asked for a reset.
    fn finish_reset(&mut self) {
        if let Some(work) = self.function.take_reset() {
            work.run();
            self.function.end_reset(&work);
        }
    }

    fn layout(&self, bar: BarIndex) -> Vec<(bool, u64, u64)> {
        let piece = |piece: BarPiece| match piece {
            BarPiece::Direct { offset, len, .. } => (true, offset, len),
            BarPiece::Trapped { offset, len } => (false, offset, len),
        };
        self.function.bar_layout(bar).into_iter().map(piece).collect()
    }
}

const TABLE: u64 = 0xB9_0000;
const PENDING: u64 = 0xBA_0000;

#[test]
fn the_planner_learns_ids_bars_and_pin() {
    let host = HostFunction::new("gpu0", FakeDevice::gpu()).unwrap();
    assert_eq!((host.ids().vendor, host.ids().device, host.interrupt_pin()), (0x10DE, 0x2330, 1));
    let bar = |kind, prefetchable, size| Some(BarSpec { kind, prefetchable, size });
    let wide = |size| bar(BarKind::Memory64, true, size);
    assert_eq!(host.bars(), [bar(BarKind::Memory32, false, 16 << 20), wide(4 << 30), None, wide(32 << 20), None, None]);
}

#[test]
fn a_device_that_does_not_answer_and_a_bridge_are_refused() {
    let mut registers = Registers::gpu();
    registers.bytes.fill(0xFF);
    let error = HostFunction::new("gpu0", FakeDevice::new(registers, [0; 6])).err();
    assert!(matches!(error, Some(VfioError::Dead { .. })));
    let mut registers = Registers::gpu();
    registers.put(0x0E, &[0x81]);
    let error = HostFunction::new("gpu0", FakeDevice::new(registers, [0; 6])).err();
    assert!(matches!(error, Some(VfioError::Bridge { .. })));
    let device = FakeDevice::gpu();
    device.state().reads_fail = true;
    assert!(matches!(HostFunction::new("gpu0", device).err(), Some(VfioError::Config { .. })));
}

#[test]
fn bars_are_direct_but_for_the_pages_of_the_msi_x_table() {
    let bench = bench(FakeDevice::gpu());
    assert_eq!(
        bench.layout(0),
        [
            (true, 0, TABLE),
            (false, TABLE, 0x1000),
            (true, TABLE + 0x1000, 0xF000),
            (false, PENDING, 0x1000),
            (true, PENDING + 0x1000, (16 << 20) - PENDING - 0x1000),
        ]
    );
    assert_eq!(bench.layout(1), [(true, 0, 4 << 30)]);
    assert_eq!(bench.layout(2), []);
}

#[test]
fn areas_that_the_host_leaves_out_are_trapped() {
    let bench = bench(FakeDevice::gpu().with_mappable(3, &[(0, 1 << 20), (8 << 20, 24 << 20)]).with_mappable(1, &[]));
    assert_eq!(bench.layout(3), [(true, 0, 1 << 20), (false, 1 << 20, 7 << 20), (true, 8 << 20, 24 << 20)]);
    assert_eq!(bench.layout(1), [(false, 0, 4 << 30)]);
}

#[test]
fn direct_pieces_are_the_device_s_memory() {
    let mut bench = bench(FakeDevice::gpu());
    let Some(BarPiece::Direct { pages, .. }) = bench.function.bar_layout(3).first().copied() else { panic!("not direct") };
    assert_eq!(pages.host_address % (32 << 20), 0, "aligned for huge pages");
    bench.function.bar_write(3, 0x10, &[1, 2, 3, 4]);
    let pointer = std::ptr::with_exposed_provenance::<u32>(usize::try_from(pages.host_address).unwrap() + 0x10);
    // SAFETY: the piece is mapped as long as the function lives, and nothing writes to it now.
    assert_eq!(unsafe { pointer.read_volatile() }, 0x0403_0201);
}

#[test]
fn a_bar_smaller_than_a_page_and_an_io_bar_are_trapped() {
    let mut registers = Registers::conventional();
    registers.dwords(0x10, &[0xFEBF_1000, 0xE000_000C, 0, 0x0000_C001]);
    let mut bench = bench(FakeDevice::new(registers, [256, 1 << 20, 0, 64, 0, 0]));
    assert_eq!(bench.layout(0), [(false, 0, 256)]);
    assert_eq!(bench.layout(1), [(true, 0, 1 << 20)]);
    assert_eq!(bench.layout(3), [(false, 0, 64)]);
    for bar in [0, 3] {
        bench.function.bar_write(bar, 8, &[0xAB]);
        let mut data = [0; 2];
        bench.function.bar_read(bar, 7, &mut data);
        assert_eq!(data, [0, 0xAB]);
        let mut past = [0; 4];
        bench.function.bar_read(bar, 254, &mut past);
        assert_eq!(past, [0xFF; 4]);
    }
}

#[test]
fn case_c13_a_virtual_function_with_an_odd_layout_is_shown_as_it_is() {
    let mut registers = Registers::conventional();
    registers.dwords(0x10, &[0, 0, 4, 0, 4, 0]);
    let mut bench = bench(FakeDevice::new(registers, [0, 0, 0x4000, 0, 0x4000, 0]));
    for offset in (0x10..0x28).step_by(4).chain([0x30]) {
        bench.write(offset, 0xFFFF_FFFF);
    }
    let read: Vec<u32> = (0x10..0x28).step_by(4).chain([0x30]).map(|offset| bench.read(offset)).collect();
    assert_eq!(read, [0, 0, 0xFFFF_C004, 0xFFFF_FFFF, 0xFFFF_C004, 0xFFFF_FFFF, 0]);
    assert_eq!(bench.device.state().writes.len(), 1, "the command register at the start, nothing of the guest's");
}

#[test]
fn hardware_decodes_from_the_start_and_whatever_the_guest_writes() {
    let mut bench = bench(FakeDevice::gpu());
    assert_eq!(bench.device.command(), 0x0003);
    bench.function.program(&Programming {
        memory: true,
        bars: [Some(0xC000_0000), None, None, None, None, None],
        ..Programming::default()
    });
    assert!(bench.function.bars().memory_enabled);
    assert_eq!(bench.write_half(4, 0x0404), Changes::DECODE | Changes::BUS_MASTER);
    assert_eq!((bench.read(4) & 0xFFFF, bench.device.command()), (0x0404, 0x0407));
    assert!(bench.function.bus_master() && !bench.function.bars().memory_enabled);
    assert_eq!(bench.write_half(4, 0x0002), Changes::DECODE | Changes::BUS_MASTER);
    assert_eq!((bench.read(4) & 0xFFFF, bench.device.command()), (0x0002, 0x0003));
    assert_eq!(bench.write_half(4, 0x0002), Changes::empty());
}

#[test]
fn the_plan_s_values_are_what_the_guest_finds() {
    let mut bench = bench(FakeDevice::gpu());
    bench.function.program(&Programming {
        bars: [Some(0xC000_0000), Some(0x40_0000_0000), None, Some(0x41_0000_0000), None, None],
        memory: true,
        interrupt_line: 19,
        multifunction: true,
        ..Programming::default()
    });
    let bars: Vec<u32> = (0x10..0x28).step_by(4).map(|offset| bench.read(offset)).collect();
    assert_eq!(bars, [0xC000_0000, 0x0000_000C, 0x40, 0x0000_000C, 0x41, 0]);
    assert_eq!((bench.read(0x3C), bench.read(0x0C), bench.read(4) & 7), (0x0000_0113, 0x0080_0000, 2));
}

#[test]
fn case_c12_an_expansion_rom_is_placed_switched_on_and_read_from_the_device_once() {
    let mut bench = bench(FakeDevice::gpu().with_rom(&[0x55, 0xAA, 0x40, 0xEB], 128 << 10));
    bench.function.program(&Programming { rom: Some(0xC010_0000), memory: true, ..Programming::default() });
    assert_eq!(bench.read(0x30), 0xC010_0000);
    bench.write(0x30, 0xFFFF_F800);
    assert_eq!(bench.read(0x30), 0xFFFE_0000);
    assert_eq!(bench.write(0x30, 0xC010_0001), Changes::DECODE);
    assert!(bench.function.bars().decoding().any(|decoding| (decoding.bar, decoding.at) == (ROM, Some(0xC010_0000))));
    assert_eq!(bench.layout(ROM), [(false, 0, 128 << 10)]);
    let mut read = |offset: u64| {
        let mut data = [0; 4];
        bench.function.bar_read(ROM, offset, &mut data);
        data
    };
    assert_eq!(
        (read(0), read((128 << 10) - 4), read((128 << 10) - 2), read(u64::MAX)),
        ([0x55, 0xAA, 0x40, 0xEB], [0; 4], [0xFF; 4], [0xFF; 4])
    );
    bench.function.bar_write(ROM, 0, &[1]);
    // The device is asked no more.
    bench.device.state().reads_fail = true;
    let mut data = [0; 2];
    bench.function.bar_read(ROM, 0, &mut data);
    assert_eq!(data, [0x55, 0xAA]);
    assert!(bench.device.state().writes.iter().all(|write| !format!("{write:?}").contains("30")));
}

#[test]
fn a_rom_that_cannot_be_read_is_all_ones() {
    let mut bench = bench(FakeDevice::gpu().with_rom(&[0x55], 128 << 10));
    bench.device.state().reads_fail = true;
    let mut data = [0; 2];
    bench.function.bar_read(ROM, 0, &mut data);
    assert_eq!(data, [0xFF, 0xFF]);
}

#[test]
fn outside_d0_nothing_decodes_and_hardware_stays_awake() {
    let mut bench = bench(FakeDevice::gpu());
    bench.function.program(&Programming { memory: true, ..Programming::default() });
    assert_eq!(bench.write_half(0x44, 3), Changes::DECODE);
    assert!(!bench.function.bars().memory_enabled);
    assert_eq!((bench.read(0x44) & 3, bench.device.byte(0x44) & 3), (3, 0));
    assert_eq!(bench.write_half(0x44, 0), Changes::DECODE);
    assert!(bench.function.bars().memory_enabled);
    bench.write_half(0x44, 1);
    assert_eq!(bench.read(0x44) & 3, 0, "it has no D1");
}

#[test]
fn replaced_bytes_read_the_same_at_every_offset() {
    let clique = Some(Clique::new(5).unwrap());
    let mut bench = bench_with(FakeDevice::gpu(), &VfioOptions { clique, ..options() });
    let whole: Vec<u8> = (0..0x1000).step_by(4).flat_map(|offset| bench.read(offset).to_le_bytes()).collect();
    assert_eq!(whole[0xD4..0xDC], [0x09, 0x00, 0x08, 0x50, 0x32, 0x50, 5 << 3, 0]);
    assert_eq!(whole[0xC9], 0xD4);
    for offset in [0x03, 0x0D, 0x33, 0x3B, 0xC7, 0xC9, 0xD3, 0xD5, 0xD9, 0x13F, 0x141] {
        for len in [1, 2, 4, 8] {
            let mut data = vec![0; len];
            let function = &mut bench.function;
            access::read(u16::try_from(offset).unwrap(), 0x1000, &mut data, |reg| function.config_read(reg));
            assert_eq!(data, whole[offset..offset + len], "{offset:#x} {len}");
        }
    }
}

#[test]
fn other_registers_are_read_and_written_through() {
    let mut bench = bench(FakeDevice::gpu());
    bench.device.state().config[0x104] = 0x40;
    assert_eq!(bench.read(0x104), 0x40);
    bench.write_half(0x68, 0x5936);
    assert_eq!(bench.device.state().config[0x68..0x6A], [0x36, 0x59]);
    bench.write(0x3C, 0xFFFF_FF0A);
    assert_eq!(bench.read(0x3C) & 0xFF, 0x0A);
    assert_ne!(bench.device.state().config[0x3C], 0x0A);
}

#[test]
fn a_conventional_function_has_nothing_past_256_bytes() {
    let mut bench = bench(FakeDevice::new(Registers::conventional(), [1 << 20, 0, 0, 0, 0, 0]));
    assert_eq!(bench.read(0x100), 0xFFFF_FFFF);
    bench.write(0x100, 0);
    assert_eq!(bench.read(0xFC), 0);
}

#[test]
fn msi_x_takes_over_from_intx_and_gives_back() {
    let mut bench = bench(FakeDevice::gpu());
    assert_eq!(bench.device.attached(IrqKind::Intx), [0]);
    assert!(bench.device.state().resample.is_some());
    bench.write_half(0xCA, 0x8000);
    assert_eq!(bench.device.enabled(IrqKind::Intx), 0);
    bench.function.bar_write(0, TABLE + 16, &0xFEE0_0000u64.to_le_bytes());
    bench.function.bar_write(0, TABLE + 24, &0x31u64.to_le_bytes());
    assert_eq!(bench.device.attached(IrqKind::Msix), [1]);
    assert_eq!(bench.routes.all()[0].message, Some(MsiMessage { address: 0xFEE0_0000, data: 0x31 }));
    assert_eq!(bench.read(0xC8), 0x8005_0011);
    let mut entry = [0; 8];
    bench.function.bar_read(0, TABLE + 24, &mut entry);
    assert_eq!(entry, 0x31u64.to_le_bytes());
    bench.write_half(0xCA, 0);
    assert_eq!((bench.routes.held(), bench.device.attached(IrqKind::Intx)), (0, vec![0]));
    assert_eq!(bench.device.state().config[0xCA..0xCC], [0x05, 0x00], "message control is not written through");
}

#[test]
fn the_guest_may_switch_from_one_kind_to_the_other() {
    let mut bench = bench(FakeDevice::gpu());
    bench.write_half(0x4A, 1);
    assert_eq!((bench.device.attached(IrqKind::Msi), bench.device.enabled(IrqKind::Intx)), (vec![0], 0));
    bench.write_half(0xCA, 0x8000);
    assert_eq!((bench.device.enabled(IrqKind::Msi), bench.device.enabled(IrqKind::Msix)), (0, 1));
    bench.write_half(0xCA, 0);
    assert_eq!((bench.device.attached(IrqKind::Msi), bench.device.enabled(IrqKind::Msix)), (vec![0], 0));
}

#[test]
fn case_d1_a_function_without_msi_and_msi_x_works_by_its_wire_or_not_at_all() {
    let device = FakeDevice::new(Registers::conventional(), [1 << 20, 0, 0, 0, 0, 0]);
    let with_wire = bench(device.clone().with_irqs(IrqKind::Intx, 1, false));
    assert_eq!(with_wire.device.attached(IrqKind::Intx), [0]);
    drop(with_wire);
    let without = bench(device);
    assert_eq!((without.device.enabled(IrqKind::Intx), without.routes.held()), (0, 0));
}

#[test]
fn case_d1_msi_without_msi_x_works() {
    for vectors in [1u8, 4, 32] {
        let device = FakeDevice::new(Registers::with_msi(vectors, true, true), [1 << 20, 0, 0, 0, 0, 0]);
        let mut bench = bench(device.with_irqs(IrqKind::Msi, vectors.into(), false));
        bench.write(0x54, 0xFEE0_0000);
        bench.write(0x5C, 0x40);
        bench.write_half(0x52, 1 | u16::try_from(vectors.ilog2()).unwrap() << 4);
        assert_eq!(bench.device.attached(IrqKind::Msi).len(), usize::from(vectors));
        assert_eq!(
            bench.routes.all().last().and_then(|vector| vector.message).map(|m| m.data),
            Some(0x40 | u32::from(vectors - 1))
        );
    }
}

#[test]
fn function_level_reset_puts_everything_back() {
    let mut bench = bench(FakeDevice::gpu());
    bench.function.program(&Programming {
        memory: true,
        bars: [Some(0xC000_0000), None, None, None, None, None],
        multifunction: true,
        ..Programming::default()
    });
    bench.write_half(4, 0x0006);
    bench.write_half(0xCA, 0x8000);
    bench.function.bar_write(0, TABLE + 12, &[0; 4]);
    assert_eq!(bench.routes.held(), 1);
    let changes = bench.write_half(0x68, 0xA910);
    assert_eq!(changes, Changes::RESET | Changes::DECODE | Changes::BUS_MASTER);
    bench.finish_reset();
    assert_eq!(bench.device.resets(), 1);
    assert_eq!((bench.routes.held(), bench.device.attached(IrqKind::Intx)), (0, vec![0]));
    assert_eq!((bench.read(0x10), bench.read(4) & 7, bench.read(0xC8) >> 16), (0, 0, 5));
    assert_eq!(bench.device.command(), 0x0003);
    assert_eq!(bench.read(0x0C) >> 23 & 1, 1, "its other functions are still there");
}

#[test]
fn a_reset_of_the_machine_resets_the_hardware() {
    let mut bench = bench(FakeDevice::gpu());
    bench.write_half(4, 0x0006);
    bench.function.reset(ResetKind::Cold);
    bench.finish_reset();
    assert_eq!((bench.device.resets(), bench.read(4) & 7, bench.device.command()), (1, 0, 3));
    assert!(!bench.function.bus_master());
}

#[test]
fn nothing_answers_while_the_hardware_is_under_reset() {
    let mut bench = bench(FakeDevice::gpu());
    bench.write_half(4, 0x0006);
    bench.function.reset(ResetKind::Hot);
    let first = bench.function.take_reset().unwrap();
    assert_eq!((bench.read(0), bench.write_half(4, 0x0006)), (u32::MAX, Changes::empty()));
    let mut data = [0; 4];
    bench.function.bar_read(0, 0, &mut data);
    bench.function.bar_write(0, TABLE + 12, &[0; 4]);
    assert_eq!((data, bench.routes.held()), ([0xFF; 4], 0));
    // Another processor asks for one as well.
    bench.function.reset(ResetKind::Hot);
    let second = bench.function.take_reset().unwrap();
    first.run();
    second.run();
    bench.function.end_reset(&first);
    assert_eq!((bench.device.resets(), bench.read(0), bench.read(4) & 7), (1, 0x2330_10DE, 0));
    bench.function.end_reset(&second);
    assert!(bench.function.take_reset().is_none());
    assert_eq!((bench.device.command(), bench.device.attached(IrqKind::Intx)), (3, vec![0]));
}

#[test]
fn who_shared_a_reset_does_not_end_the_one_after_it() {
    let mut bench = bench(FakeDevice::gpu());
    bench.function.reset(ResetKind::Function);
    let first = bench.function.take_reset().unwrap();
    bench.function.reset(ResetKind::Hot);
    let second = bench.function.take_reset().unwrap();
    first.run();
    bench.function.end_reset(&first);
    bench.function.reset(ResetKind::Function);
    let third = bench.function.take_reset().unwrap();
    second.run();
    bench.function.end_reset(&second);
    assert_eq!((bench.device.resets(), bench.read(0)), (1, u32::MAX), "the third has not run");
    third.run();
    bench.function.end_reset(&third);
    assert_eq!((bench.device.resets(), bench.read(0)), (2, 0x2330_10DE));
    assert_eq!((bench.device.command(), bench.device.attached(IrqKind::Intx)), (3, vec![0]));
}

#[test]
fn a_function_that_leaves_is_quiet_at_once_and_leaves_its_reset_to_who_can_wait() {
    let mut bench = bench(FakeDevice::gpu());
    bench.write_half(4, 0x0006);
    bench.function.detach();
    assert_eq!((bench.read(0), bench.device.command(), bench.device.resets()), (u32::MAX, 3, 0));
    bench.finish_reset();
    assert_eq!((bench.read(0), bench.device.resets()), (u32::MAX, 1));
    assert!(bench.device.attached(IrqKind::Intx).is_empty(), "it gets no interrupts back");
    assert!(bench.function.take_reset().is_none());
}

#[test]
fn a_function_that_leaves_under_reset_is_reset_once() {
    let mut bench = bench(FakeDevice::gpu());
    bench.function.reset(ResetKind::Hot);
    let work = bench.function.take_reset().unwrap();
    bench.function.detach();
    bench.finish_reset();
    work.run();
    bench.function.end_reset(&work);
    assert_eq!((bench.device.resets(), bench.read(0)), (1, u32::MAX));
    assert!(bench.device.attached(IrqKind::Intx).is_empty());
}

#[test]
fn case_c11_the_hardware_is_reset_once_at_the_end_and_nothing_answers_afterwards() {
    let mut bench = bench(FakeDevice::gpu());
    bench.write_half(4, 0x0006);
    bench.function.detach();
    assert_eq!((bench.read(0), bench.device.command()), (0xFFFF_FFFF, 3));
    let mut data = [0; 4];
    bench.function.bar_read(0, 0, &mut data);
    assert_eq!(data, [0xFF; 4]);
    bench.function.bar_write(0, TABLE, &[0; 4]);
    bench.write(0, 0);
    let device = bench.device.clone();
    drop(bench);
    assert_eq!((device.resets(), device.state().triggers.len()), (1, 0));
}

#[test]
fn a_device_that_fails_reads_all_ones() {
    let mut bench = bench(FakeDevice::gpu());
    bench.device.state().reads_fail = true;
    assert_eq!(bench.read(0x104), 0xFFFF_FFFF);
    let mut data = [0; 4];
    bench.function.bar_read(0, 0, &mut data);
    assert_eq!(data, [0xFF; 4]);
}

#[test]
fn a_wrong_clique_is_refused_with_the_device_s_name() {
    let mut registers = Registers::gpu();
    registers.put(0, &[0xB3, 0x15]);
    let host = HostFunction::new("nic0", FakeDevice::new(registers, [0; 6])).unwrap();
    let clique = Some(Clique::new(1).unwrap());
    let error =
        VfioFunction::new(host, &VfioOptions { clique, ..options() }, Arc::new(FakeRoutes::default()), None, FunctionId(0)).err();
    assert!(error.unwrap().to_string().contains("nic0"));
}

#[test]
fn events_are_the_ones_that_the_routes_gave() {
    let events = FakeIntxEvents::new().unwrap();
    let (trigger, resample) = (events.trigger.as_fd().as_raw_fd(), events.resample.as_fd().as_raw_fd());
    let device = FakeDevice::gpu();
    let host = HostFunction::new("gpu0", device.clone()).unwrap();
    let _function =
        VfioFunction::new(host, &options(), Arc::new(FakeRoutes::default()), Some(Box::new(events)), FunctionId(0)).unwrap();
    assert_eq!(device.state().triggers.get(&(IrqKind::Intx, 0)), Some(&trigger));
    assert_eq!(device.state().resample, Some(resample));
}

proptest! {
    #[test]
    fn no_access_of_a_guest_does_harm(
        accesses in prop::collection::vec((0u16..0x1000, 0u8..4, 1u8..5, any::<u32>(), 0u8..6, any::<u64>(), 1usize..9), 1..40),
    ) {
        let mut bench = bench(FakeDevice::gpu());
        for (offset, first, lanes, value, bar, at, len) in accesses {
            bench.function.config_write(Access { reg: Reg::containing(offset), lanes: Lanes::new(first, lanes) }, value);
            bench.function.config_read(Reg::containing(offset));
            bench.finish_reset();
            for at in [at, at % (16 << 20), TABLE + at % 128, PENDING + at % 16] {
                let mut data = vec![0; len];
                bench.function.bar_read(bar, at, &mut data);
                bench.function.bar_write(bar, at, &data);
            }
            prop_assert_eq!(bench.device.command() & 3, 3, "hardware decodes");
            prop_assert!(bench.routes.held() <= 7);
        }
    }
}

#[test]
fn a_guest_that_resets_a_broken_device_forever_does_not_fill_the_log() {
    for (can_reset, lost) in [(false, false), (true, true), (true, false)] {
        let mut bench = bench(FakeDevice::gpu());
        {
            let mut state = bench.device.state();
            (state.can_reset, state.lost_by_reset, state.reset_fails) = (can_reset, lost, !lost);
        }
        for _ in 0..100 {
            bench.function.reset(ResetKind::Hot);
            bench.finish_reset();
        }
        assert_eq!(bench.function.complaints.made(), Complaints::MOST);
    }
}

#[test]
fn case_c11_a_function_that_is_reset_with_its_bus_only_answers_when_that_was_done_or_could_not_be() {
    for with_bus in [true, false] {
        let device = FakeDevice::gpu();
        {
            let mut state = device.state();
            (state.can_reset, state.with_bus) = (false, with_bus);
        }
        let mut bench = bench(device);
        assert_eq!((bench.read(0), bench.device.resets()), (u32::MAX, 0), "it is in whatever state somebody left it in");
        bench.finish_reset();
        assert_eq!((bench.read(0), bench.device.resets()), (0x2330_10DE, u32::from(with_bus)));
        assert_eq!(bench.function.complaints.made() == 0, with_bus);
        assert_eq!(bench.device.command() & 7, 3, "it decodes and sends nothing");
        assert_eq!(bench.device.attached(IrqKind::Intx), [0]);
        bench.function.reset(ResetKind::Hot);
        bench.finish_reset();
        assert_eq!(bench.device.resets(), 2 * u32::from(with_bus));
    }
}

#[test]
fn the_host_says_what_it_wants_for_as_long_as_the_function_is_open() {
    let mut bench = bench(FakeDevice::gpu());
    let signals = Arc::new(Signals::new().unwrap());
    bench.function.hear(Arc::clone(&signals));
    for signal in Signal::ALL {
        let event = bench.device.state().heard[&signal].try_clone().unwrap();
        rustix::io::write(&event, &1_u64.to_ne_bytes()).unwrap();
        assert_eq!(signals.take(signal), 1, "{signal:?}");
    }
    bench.function.detach();
    assert_eq!(Arc::strong_count(&signals), 2, "it may be asked for while it leaves");
    drop(bench);
    assert_eq!(Arc::strong_count(&signals), 1);
}

#[test]
fn a_function_of_which_the_host_says_nothing_works_and_a_refusal_is_told() {
    for (refuses, complaints) in [(false, 0), (true, 2)] {
        let mut bench = bench(FakeDevice::gpu());
        {
            let mut state = bench.device.state();
            (state.reports_errors, state.hears_nothing) = (false, refuses);
        }
        bench.function.hear(Arc::new(Signals::new().unwrap()));
        assert_eq!(bench.function.complaints.made(), complaints);
        assert_eq!(bench.read(0), u32::from_le_bytes(bench.device.state().config[..4].try_into().unwrap()));
    }
}
