use pci::access::{Lanes, Reg};
use pci::caps::MsixPlace;
use pci::function::FunctionId;
use pci::seams::MsiMessage;
use pci::testing::FakeRoutes;

use super::*;
use crate::vfio::fake::{FakeDevice, Registers};
use crate::vfio::host::HostDevice;

const KIND: IrqKind = IrqKind::Msix;

struct Bench {
    msix: Msix,
    device: FakeDevice,
    routes: FakeRoutes,
}

impl Bench {
    fn new(vectors: u16, growable: bool) -> Self {
        let place = |offset| MsixPlace { bar: 0, offset };
        let fact = MsixFact { offset: 0x70, vectors, table: place(0x2000), pending: place(0x1_0000) };
        let device = FakeDevice::new(Registers::gpu(), [1 << 20, 0, 0, 0, 0, 0]).with_irqs(KIND, vectors, growable);
        let irqs = device.irqs(KIND);
        Self { msix: Msix::new(fact, irqs).unwrap(), device, routes: FakeRoutes::default() }
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Msix, &mut Lender<'_>) -> T) -> T {
        let mut lender = Lender { id: FunctionId(3), device: &mut self.device, routes: &self.routes };
        act(&mut self.msix, &mut lender)
    }

    fn control(&mut self, control: u16) {
        let access = Access { reg: Reg::containing(0x70), lanes: Lanes::new(2, 2) };
        self.msix.write_control(access, u32::from(control) << 16);
        self.with(|msix, lender| msix.follow(lender)).unwrap();
    }

    fn program(&mut self, vector: u16) {
        let mut entry = [0; 16];
        entry[0..8].copy_from_slice(&0xFEE0_0000u64.to_le_bytes());
        entry[8..12].copy_from_slice(&u32::from(vector).to_le_bytes());
        let at = u64::from(vector) * 16;
        self.with(|msix, lender| {
            msix.write_table(at, &entry[0..8], lender).unwrap();
            msix.write_table(at + 8, &entry[8..12], lender).unwrap();
        });
    }

    fn mask(&mut self, vector: u16, masked: bool) -> Result<(), VectorError> {
        self.with(|msix, lender| msix.write_table(u64::from(vector) * 16 + 12, &u32::from(masked).to_le_bytes(), lender))
    }
}

const ENABLE: u16 = MsixTable::ENABLE;
const FUNCTION_MASK: u16 = MsixTable::FUNCTION_MASK;

#[test]
fn case_d2_only_vectors_that_the_guest_opens_are_had() {
    for growable in [true, false] {
        let mut bench = Bench::new(2048, growable);
        bench.control(ENABLE);
        assert_eq!(bench.routes.held(), 0);
        for vector in 0..4 {
            bench.program(vector);
            bench.mask(vector, false).unwrap();
        }
        assert_eq!(bench.routes.held(), 4);
        assert_eq!(bench.device.attached(KIND), [0, 1, 2, 3]);
        assert_eq!(bench.device.enabled(KIND), 4, "growable {growable}");
        let messages: Vec<Option<MsiMessage>> = bench.routes.all().iter().map(|vector| vector.message).collect();
        let expected: Vec<Option<MsiMessage>> = (0..4).map(|data| Some(MsiMessage { address: 0xFEE0_0000, data })).collect();
        assert_eq!(messages, expected);
    }
}

#[test]
fn case_d2_masking_frees_and_makes_nothing() {
    let mut bench = Bench::new(64, true);
    bench.control(ENABLE);
    bench.program(1);
    bench.mask(1, false).unwrap();
    let switches = bench.device.state().switches.len();
    for masked in [true, false, true, false] {
        bench.mask(1, masked).unwrap();
        assert_eq!(bench.routes.all().last().map(|vector| (vector.masked, vector.dropped)), Some((masked, false)));
    }
    for (control, masked) in [(ENABLE | FUNCTION_MASK, true), (ENABLE, false)] {
        bench.control(control);
        assert_eq!(bench.routes.all()[0].masked, masked);
    }
    assert_eq!((bench.routes.all().len(), bench.device.state().switches.len()), (1, switches));
    assert_eq!(bench.device.attached(KIND), [1]);
}

#[test]
fn case_d2_disable_and_reset_give_everything_back() {
    let mut bench = Bench::new(64, true);
    for by_reset in [false, true] {
        bench.control(ENABLE);
        bench.mask(5, false).unwrap();
        assert_eq!((bench.routes.held(), bench.device.attached(KIND)), (1, vec![5]));
        if by_reset {
            bench.with(|msix, lender| msix.reset(lender)).unwrap();
            let mut mask = [0; 4];
            bench.msix.read_table(5 * 16 + 12, &mut mask);
            assert_eq!(mask, [1, 0, 0, 0]);
        } else {
            bench.control(0);
            bench.mask(5, true).unwrap();
        }
        assert_eq!((bench.routes.held(), bench.device.enabled(KIND)), (0, 0));
    }
}

#[test]
fn case_d2_a_hundred_functions_with_large_tables_use_what_their_guests_opened() {
    let routes = FakeRoutes::default();
    let mut benches: Vec<Bench> = (0..100).map(|_| Bench { routes: routes.clone(), ..Bench::new(2048, true) }).collect();
    for bench in &mut benches {
        bench.control(ENABLE);
        for vector in 0..4 {
            bench.mask(vector, false).unwrap();
        }
    }
    assert_eq!(routes.held(), 400);
}

#[test]
fn vectors_that_are_open_before_msi_x_is_enabled_are_had_at_once() {
    for growable in [true, false] {
        let mut bench = Bench::new(8, growable);
        for vector in [2, 6] {
            bench.program(vector);
            bench.mask(vector, false).unwrap();
        }
        assert_eq!(bench.routes.held(), 0);
        bench.control(ENABLE);
        assert_eq!((bench.routes.held(), bench.device.attached(KIND)), (2, vec![2, 6]));
    }
}

#[test]
fn the_device_is_in_msi_x_mode_as_soon_as_the_guest_says_so() {
    let mut bench = Bench::new(8, true);
    bench.control(ENABLE | FUNCTION_MASK);
    assert_eq!((bench.device.enabled(KIND), bench.device.attached(KIND)), (1, vec![]));
}

#[test]
fn a_set_that_cannot_grow_is_doubled() {
    let mut bench = Bench::new(100, false);
    bench.control(ENABLE);
    for vector in 0..33 {
        bench.mask(vector, false).unwrap();
    }
    assert_eq!(bench.device.enabled(KIND), 64);
    assert_eq!(bench.device.attached(KIND).len(), 33);
    let enables = bench.device.state().switches.iter().filter(|(_, on)| *on).count();
    assert_eq!(enables, 7, "1, 2, 4, 8, 16, 32, 64");
    bench.mask(99, false).unwrap();
    assert_eq!(bench.device.enabled(KIND), 100);
}

#[test]
fn a_vector_that_the_host_cannot_give_is_tried_again_at_the_next_unmask() {
    let mut bench = Bench::new(8, true);
    bench.control(ENABLE);
    bench.device.state().host_vectors = 2;
    assert!(bench.mask(4, false).is_err());
    assert_eq!((bench.routes.held(), bench.device.attached(KIND)), (0, vec![]));
    bench.device.state().host_vectors = 8;
    bench.mask(4, true).unwrap();
    bench.mask(4, false).unwrap();
    assert_eq!(bench.device.attached(KIND), [4]);
}

#[test]
fn without_a_route_the_others_still_work() {
    let mut bench = Bench { routes: FakeRoutes::with_limit(1), ..Bench::new(8, true) };
    bench.control(ENABLE);
    bench.mask(0, false).unwrap();
    assert!(matches!(bench.mask(1, false), Err(VectorError::Route { .. })));
    assert_eq!(bench.device.attached(KIND), [0]);
}

#[test]
fn events_that_wait_show_beside_the_device_s_own_pending_bits() {
    let mut bench = Bench::new(64, true);
    bench.control(ENABLE);
    bench.mask(9, false).unwrap();
    bench.mask(9, true).unwrap();
    bench.routes.set_pending(0, true);
    let mut bits = [0x01, 0x00, 0x80, 0, 0, 0, 0, 0];
    bench.msix.add_pending(0, &mut bits);
    assert_eq!(bits, [0x01, 0x02, 0x80, 0, 0, 0, 0, 0]);
    let mut half = [0; 4];
    bench.msix.add_pending(4, &mut half);
    assert_eq!(half, [0; 4]);
}

#[test]
fn accesses_are_claimed_by_the_byte() {
    let msix = Bench::new(4, true).msix;
    assert_eq!(msix.claim(0, 0x2000, 4), Claim::Table(0));
    assert_eq!(msix.claim(0, 0x203C, 4), Claim::Table(0x3C));
    assert_eq!(msix.claim(0, 0x2040, 4), Claim::None);
    assert_eq!(msix.claim(0, 0x1FFC, 8), Claim::Table(u64::MAX));
    assert_eq!(msix.claim(0, 0x1_0000, 8), Claim::Pending(0));
    assert_eq!(msix.claim(1, 0x2000, 4), Claim::None);
}
