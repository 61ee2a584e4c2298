use pci::access::Lanes;
use pci::function::FunctionId;
use pci::seams::MsiMessage;
use pci::testing::FakeRoutes;

use super::*;
use crate::vfio::fake::{FakeDevice, Registers};
use crate::vfio::host::HostDevice;

const AT: u16 = 0x50;
const KIND: IrqKind = IrqKind::Msi;

struct Bench {
    msi: Msi,
    wide: bool,
    device: FakeDevice,
    routes: FakeRoutes,
}

impl Bench {
    fn new(vectors: u8, wide: bool, maskable: bool) -> Self {
        let device = FakeDevice::new(Registers::with_msi(vectors, wide, maskable), [1 << 20, 0, 0, 0, 0, 0]);
        let device = device.with_irqs(KIND, vectors.into(), false);
        let fact = MsiFact { offset: 0x50, vectors, wide, maskable };
        let most = device.irqs(KIND).count;
        Self { msi: Msi::new(fact, most).unwrap(), wide, device, routes: FakeRoutes::default() }
    }

    fn write(&mut self, offset: u16, value: u32) -> Result<(), VectorError> {
        let access = Access { reg: pci::access::Reg::containing(offset), lanes: Lanes::ALL };
        assert!(self.msi.write(access, value), "{offset:#x}");
        let mut lender = Lender { id: FunctionId(3), device: &mut self.device, routes: &self.routes };
        self.msi.follow(&mut lender)
    }

    /// Registers behind the low half of the address.
    fn behind(&self, index: u16) -> u16 {
        AT + 4 * (index - u16::from(!self.wide))
    }

    fn enable(&mut self, granted: u8) {
        self.write(AT + 4, 0xFEE0_1000).unwrap();
        let data = self.behind(3);
        self.write(data, 0x4040).unwrap();
        self.write(AT, 1 << 16 | granted.ilog2() << 20).unwrap();
    }
}

#[test]
fn case_d1_each_granted_vector_reaches_the_guest() {
    for vectors in [1u8, 4, 32] {
        for wide in [false, true] {
            for maskable in [false, true] {
                let mut bench = Bench::new(vectors, wide, maskable);
                bench.enable(vectors);
                assert_eq!(bench.device.attached(KIND), (0..vectors.into()).collect::<Vec<u16>>());
                let sent: Vec<Option<MsiMessage>> = bench.routes.all().iter().map(|vector| vector.message).collect();
                let expected = (0..u32::from(vectors)).map(|n| Some(MsiMessage { address: 0xFEE0_1000, data: 0x4040 | n }));
                assert_eq!(sent, expected.collect::<Vec<_>>(), "{vectors} {wide} {maskable}");
                assert_eq!(bench.device.state().switches, [(KIND, true)], "one call enables all");
            }
        }
    }
}

#[test]
fn case_d1_the_capability_keeps_the_shape_of_the_hardware() {
    for (wide, maskable, control) in [(false, false, 0), (true, false, 1 << 23), (false, true, 1 << 24), (true, true, 3 << 23)] {
        let mut bench = Bench::new(4, wide, maskable);
        assert_eq!(bench.msi.read(AT, 0xFFFF_6005), Some(control | 2 << 17 | 0x6005));
        let len = 3 + u16::from(wide) + 2 * u16::from(maskable);
        for index in 0..8 {
            assert_eq!(bench.msi.read(AT + 4 * index, 0).is_some(), index < len, "{wide} {maskable} {index}");
        }
        assert_eq!(bench.msi.read(AT - 4, 0), None);
    }
}

#[test]
fn fewer_vectors_than_the_function_has_may_be_granted() {
    let mut bench = Bench::new(32, true, false);
    bench.enable(4);
    assert_eq!(bench.device.enabled(KIND), 4);
}

#[test]
fn a_masked_vector_keeps_its_event_and_shows_it() {
    for wide in [false, true] {
        let mut bench = Bench::new(4, wide, true);
        bench.enable(4);
        let (mask, pending) = (bench.behind(4), bench.behind(5));
        bench.write(mask, 0b0100).unwrap();
        let masked: Vec<bool> = bench.routes.all().iter().map(|vector| vector.masked).collect();
        assert_eq!(masked, [false, false, true, false]);
        bench.routes.set_pending(2, true);
        assert_eq!(bench.msi.read(pending, 0), Some(0b0100));
        bench.write(mask, 0).unwrap();
        assert_eq!((bench.routes.all().len(), bench.routes.all()[2].masked), (4, false));
    }
}

#[test]
fn a_new_message_is_programmed_and_disabling_gives_everything_back() {
    let mut bench = Bench::new(2, true, false);
    bench.enable(2);
    bench.write(AT + 12, 0x5050).unwrap();
    assert_eq!(bench.routes.all()[1].message.map(|message| message.data), Some(0x5051));
    bench.write(AT, 0).unwrap();
    assert_eq!((bench.routes.held(), bench.device.enabled(KIND)), (0, 0));
}

#[test]
fn a_host_without_enough_vectors_leaves_nothing_half_done() {
    let mut bench = Bench::new(32, true, false);
    bench.device.state().host_vectors = 16;
    assert!(bench.write(AT, 1 << 16 | 5 << 20).is_err());
    assert_eq!((bench.routes.held(), bench.device.enabled(KIND)), (0, 0));
}
