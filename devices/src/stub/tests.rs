use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use pci::access::Lanes;
use pci::bar::{BarKind, BarSpec};
use pci::caps::clique::{self, Clique};
use pci::emulated::Attachment;
use pci::ids::{ClassCode, Ids};
use pci::link::Link;
use pci::seams::DmaError;
use pci::sriov::SriovSpec;
use pci::testing::{FakeDma, FakeIntx, FakeMsi};
use proptest::prelude::*;

use super::*;

const RAM: u64 = 0x10_0000;

fn bar(size: u64) -> Option<BarSpec> {
    Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size })
}

fn gpu() -> StubSpec {
    StubSpec {
        ids: Ids { vendor: 0x10DE, device: 0x20B8, class: ClassCode::new(0x03_0200), ..Ids::default() },
        bars: [
            bar(16 << 20),
            Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 128 << 30 }),
            None,
            bar(256),
            Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 128 }),
            bar(8192),
        ],
        rom: None,
        sriov: None,
        ari: false,
        on: Attachment::Link(Link::default()),
        follows: false,
        interrupt: StubInterrupt::MsiX { vectors: 8 },
        clique: Clique::new(5).ok(),
        clique_any_vendor: false,
        flr: true,
        dma: true,
    }
}

struct Bench {
    stub: StubFunction,
    msi: Arc<FakeMsi>,
    wire: FakeIntx,
}

fn bench(spec: &StubSpec, dma: Arc<dyn DmaPort>) -> Bench {
    let (msi, wire) = (Arc::new(FakeMsi::default()), FakeIntx::default());
    let stub = StubFunction::new("gpu0", spec, msi.clone(), Some(Box::new(wire.clone())), dma).unwrap();
    Bench { stub, msi, wire }
}

fn plain() -> Bench {
    bench(&gpu(), Arc::new(FakeDma::new(RAM, 1 << 20)))
}

impl Bench {
    fn read(&mut self, bar: u8, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.stub.bar_read(bar, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&mut self, bar: u8, offset: u64, value: u32) {
        self.stub.bar_write(bar, offset, &value.to_le_bytes());
    }

    fn command(&mut self, value: u32) {
        self.stub.config_write(Access { reg: Reg::containing(4), lanes: Lanes::new(0, 2) }, value);
    }

    fn capability(&mut self, id: u8) -> u16 {
        let mut at = self.stub.config_read(Reg::containing(0x34)) & 0xFC;
        loop {
            let header = self.stub.config_read(Reg::containing(at.try_into().unwrap())).to_le_bytes();
            if header[0] == id {
                return at.try_into().unwrap();
            }
            at = header[1].into();
            assert_ne!(at, 0, "no capability {id:#x}");
        }
    }

    /// Vector n sends data 0x30 + n.
    fn enable_msix(&mut self) {
        for n in 0..8 {
            self.write(0, 0x1000 + 16 * n, 0xFEE0_0000);
            self.write(0, 0x1008 + 16 * n, 0x30 + u32::try_from(n).unwrap());
            self.write(0, 0x100C + 16 * n, 0);
        }
        let at = self.capability(0x11);
        self.stub.config_write(Access::dword(at), 0x8000_0000);
    }

    fn sent(&self) -> Vec<u32> {
        self.msi.take().iter().map(|message| message.data).collect()
    }

    fn start_copy(&mut self, from: u64, to: u64, bytes: u32, vector: u32) {
        self.stub.bar_write(0, 0x20, &from.to_le_bytes());
        self.stub.bar_write(0, 0x28, &to.to_le_bytes());
        self.write(0, 0x30, bytes);
        self.write(0, 0x34, vector);
        self.write(0, 0x38, 1);
    }

    fn wait_until(&mut self, what: &str, reached: impl Fn(&mut Self) -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !reached(self) {
            assert!(Instant::now() < limit, "{what} takes too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn only_control_and_msix_pages_and_small_bars_are_trapped() {
    let stub = plain().stub;
    let shape = |bar| -> Vec<(bool, u64, u64)> {
        let piece = |piece: &BarPiece| match *piece {
            BarPiece::Trapped { offset, len } => (true, offset, len),
            BarPiece::Direct { offset, len, .. } => (false, offset, len),
        };
        stub.bar_layout(bar).iter().map(piece).collect()
    };
    assert_eq!(shape(0), [(true, 0, 0x1000), (true, 0x1000, 0x1000), (false, 0x2000, (16 << 20) - 0x2000)]);
    assert_eq!(shape(1), [(false, 0, 128 << 30)]);
    assert_eq!(shape(2), []);
    assert_eq!(shape(3), [(true, 0, 256)]);
    assert_eq!(shape(4), [(true, 0, 128)]);
    assert_eq!(shape(5), [(false, 0, 8192)]);
}

#[test]
fn direct_pieces_are_the_memory_that_trapped_accesses_reach() {
    let mut bench = plain();
    let BarPiece::Direct { offset, pages, .. } = bench.stub.bar_layout(0)[2] else { panic!() };
    bench.write(0, offset + 8, 0x5EED);
    assert_eq!(pages.host_address, bench.stub.memory.host_address(0, offset));
    assert_eq!(bench.read(0, offset + 8), 0x5EED);
}

#[test]
fn small_and_io_bars_keep_what_is_written() {
    let mut bench = plain();
    for bar in [3, 4] {
        bench.write(bar, 0x7C, 0xABCD);
        assert_eq!(bench.read(bar, 0x7C), 0xABCD);
        assert_eq!(bench.read(bar, 0x100), 0xFFFF_FFFF);
    }
}

#[test]
fn an_access_that_straddles_areas_reaches_nothing() {
    let mut bench = plain();
    for at in [0xFFE, 0x1FFE] {
        bench.write(0, at, 0x1234_5678);
        assert_eq!(bench.read(0, at), 0xFFFF_FFFF);
    }
    assert_eq!(bench.read(0, 0x2000), 0);
}

#[test]
fn the_clique_is_found_by_the_driver_s_reader() {
    let bench = plain();
    let stub = Mutex::new(bench.stub);
    let read = |at: u8| stub.lock().unwrap().config_read(Reg::containing(at.into()));
    assert_eq!(clique::decode(read), Some(5));
}

#[test]
fn a_doorbell_raises_its_msix_vector() {
    let mut bench = plain();
    bench.command(6);
    bench.enable_msix();
    for vector in [0, 7, 8, 0x1_0000] {
        bench.write(0, 0x0C, vector);
    }
    assert_eq!((bench.sent(), bench.read(0, 0x14)), (vec![0x30, 0x37], 4));
}

#[test]
fn a_masked_vector_waits_in_the_pending_bits() {
    let mut bench = plain();
    bench.command(6);
    bench.enable_msix();
    bench.write(0, 0x103C, 1);
    bench.write(0, 0x0C, 3);
    assert_eq!((bench.sent(), bench.read(0, 0x1080)), (vec![], 1 << 3));
    bench.write(0, 0x103C, 0);
    assert_eq!((bench.sent(), bench.read(0, 0x1080)), (vec![0x33], 0));
}

#[test]
fn case_d1_stubs_interrupt_by_msi_or_wire_as_well() {
    for (vectors, maskable) in [(1, false), (4, true), (32, true)] {
        let mut bench =
            bench(&StubSpec { interrupt: StubInterrupt::Msi { vectors, maskable }, ..gpu() }, Arc::new(FakeDma::new(RAM, 4096)));
        bench.command(6);
        let at = bench.capability(5);
        bench.stub.config_write(Access::dword(at + 12), 0x40);
        bench.stub.config_write(Access::dword(at), 1 << 16 | u32::from(vectors).trailing_zeros() << 20);
        bench.write(0, 0x0C, u32::from(vectors) - 1);
        assert_eq!(bench.sent(), [0x40 + u32::from(vectors) - 1]);
    }
    let mut bench = bench(&StubSpec { interrupt: StubInterrupt::Intx(1), ..gpu() }, Arc::new(FakeDma::new(RAM, 4096)));
    bench.write(0, 0x0C, 0);
    assert!(bench.wire.level());
    bench.stub.reset(ResetKind::Function);
    assert!(!bench.wire.level());
}

#[test]
fn a_copy_moves_memory_and_raises_its_vector() {
    let dma = Arc::new(FakeDma::new(RAM, 1 << 20));
    dma.set_bus_master(true);
    let data: Vec<u8> = (0..200_000).map(|n: u32| (n % 251).try_into().unwrap()).collect();
    dma.write(RAM, &data).unwrap();
    let mut bench = bench(&gpu(), dma.clone());
    bench.command(6);
    bench.enable_msix();
    bench.start_copy(RAM, RAM + 0x8_0000, 200_000, 2);
    bench.wait_until("the copy", |bench| bench.read(0, 0x38) & 1 == 0);
    let mut copied = vec![0; data.len()];
    dma.read(RAM + 0x8_0000, &mut copied).unwrap();
    assert!(copied == data);
    assert_eq!((bench.read(0, 0x38), bench.read(0, 0x10), bench.sent()), (2, 1, vec![0x32]));
}

#[test]
fn a_copy_from_nowhere_fails_and_still_interrupts() {
    let dma = Arc::new(FakeDma::new(RAM, 4096));
    dma.set_bus_master(true);
    let mut bench = bench(&gpu(), dma);
    bench.command(6);
    bench.enable_msix();
    for (from, to) in [(0x40, RAM), (RAM, 0xFFFF_FFFF_0000_0000), (u64::MAX, RAM), (RAM, u64::MAX - 1)] {
        bench.start_copy(from, to, 16, 1);
        bench.wait_until("the failure", |bench| bench.read(0, 0x38) & 1 == 0);
        assert_eq!((bench.read(0, 0x38), bench.read(0, 0x10), bench.sent()), (4, 0, vec![0x31]), "{from:#x} {to:#x}");
    }
}

#[test]
fn a_copy_without_bus_mastering_starts_no_thread() {
    let mut bench = plain();
    bench.command(2);
    bench.start_copy(RAM, RAM + 0x1000, 16, 0);
    assert_eq!(bench.read(0, 0x38), 4);
    assert!(!bench.stub.engine.running());
}

/// Lets a test hold a copy in the middle.
struct Gate {
    arrived: Sender<()>,
    go: Mutex<Receiver<()>>,
}

impl DmaPort for Gate {
    fn read(&self, _at: u64, _data: &mut [u8]) -> Result<(), DmaError> {
        self.arrived.send(()).unwrap();
        self.go.lock().unwrap().recv().unwrap();
        Ok(())
    }

    fn write(&self, _at: u64, _data: &[u8]) -> Result<(), DmaError> {
        Ok(())
    }
}

#[test]
fn a_function_level_reset_cuts_off_a_copy_and_keeps_memory() {
    let (arrived, seen) = channel();
    let (release, go) = channel();
    let mut bench = bench(&gpu(), Arc::new(Gate { arrived, go: Mutex::new(go) }));
    bench.command(6);
    bench.enable_msix();
    bench.write(0, 0x5000, 0x1111);
    bench.start_copy(0, 0, 1 << 20, 2);
    seen.recv().unwrap();
    let express = bench.capability(0x10);
    let changes = bench.stub.config_write(Access::dword(express + 8), 1 << 15);
    assert!(changes.contains(Changes::RESET));
    assert_eq!(bench.read(0, 0x38), 0);
    release.send(()).unwrap();
    // A second copy is answered only after the first has ended, so that it shows what the first left.
    bench.command(6);
    bench.enable_msix();
    bench.start_copy(0, 0, 16, 5);
    seen.recv().unwrap();
    release.send(()).unwrap();
    bench.wait_until("the second copy", |bench| bench.read(0, 0x38) & 1 == 0);
    assert_eq!((bench.read(0, 0x10), bench.sent(), bench.read(0, 0x5000)), (1, vec![0x35], 0x1111));
}

#[test]
fn a_cold_reset_zeroes_memory() {
    let mut bench = plain();
    bench.write(1, 64 << 30, 0x2222);
    bench.write(0, 0x08, 7);
    bench.stub.reset(ResetKind::Hot);
    assert_eq!((bench.read(1, 64 << 30), bench.read(0, 0x08)), (0x2222, 0));
    bench.stub.reset(ResetKind::Cold);
    assert_eq!(bench.read(1, 64 << 30), 0);
}

#[test]
fn a_detached_stub_reads_all_ones() {
    let mut bench = plain();
    bench.stub.detach();
    bench.write(0, 0x08, 7);
    let reads = [bench.read(0, 0), bench.read(0, 0x1000), bench.read(1, 0), bench.stub.config_read(Reg::containing(0))];
    assert_eq!(reads, [0xFFFF_FFFF; 4]);
}

#[test]
fn errors_name_the_stub_and_the_cause() {
    let spec = StubSpec { bars: [bar(4096), None, None, None, None, None], ..gpu() };
    let dma = Arc::new(FakeDma::new(RAM, 4096));
    let error = StubFunction::new("nic3", &spec, Arc::new(FakeMsi::default()), None, dma).err().unwrap();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(error.to_string().contains("nic3") && cause.contains("4K"), "{error}: {cause}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_access_panics(accesses in proptest::collection::vec(
        (any::<bool>(), 0..8u8, prop_oneof![0..0x2100u64, any::<u64>(), Just((128 << 30) - 3)], any::<[u8; 8]>(), 0..=8usize), 0..300,
    )) {
        let mut bench = plain();
        bench.command(6);
        for (write, bar, offset, mut data, len) in accesses {
            let offset = if bar == 7 { offset & 0xFFF } else { offset };
            match (bar, write) {
                (7, true) => {
                    bench.stub.config_write(Access::dword(offset.try_into().unwrap()), u32::from_le_bytes([data[0], data[1], data[2], data[3]]));
                }
                (7, false) => {
                    bench.stub.config_read(Reg::containing(offset.try_into().unwrap()));
                }
                (_, true) => bench.stub.bar_write(bar, offset, &data[..len]),
                (_, false) => bench.stub.bar_read(bar, offset, &mut data[..len]),
            }
        }
    }
}

#[test]
fn virtual_functions_have_memory_of_their_own_behind_trapped_bars_and_messages_where_there_is_room() {
    let link = Attachment::Link(Link::default());
    let vf_bar = |size| Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size });
    let sriov = |bars| SriovSpec { total_vfs: 2, first_offset: 1, stride: 1, vf_device: 7, bars };
    let large = sriov([vf_bar(1 << 20), None, None, None, None, None]);
    let physical = StubSpec { sriov: Some(large), ari: true, on: link, interrupt: StubInterrupt::MsiX { vectors: 4 }, ..gpu() };
    let mut bench = bench(&physical, Arc::new(FakeDma::new(RAM, 1 << 20)));
    assert_eq!(bench.stub.virtual_functions().unwrap().count, 0);
    let made: Vec<_> = (0..2).map(|index| bench.stub.make_virtual(index).unwrap()).collect();
    for (function, value) in made.iter().zip([[1u8; 4], [2; 4]]) {
        let mut function = function.lock().unwrap();
        assert!(matches!(function.bar_layout(0)[..], [BarPiece::Trapped { offset: 0, len: 0x10_0000 }]));
        function.bar_write(0, 0x8_0000, &value);
        assert_eq!(function.config_read(Reg::containing(0)), u32::MAX);
        assert!(function.make_virtual(0).is_none() && function.virtual_functions().is_none());
    }
    for (function, value) in made.iter().zip([[1u8; 4], [2; 4]]) {
        let mut read = [0; 4];
        function.lock().unwrap().bar_read(0, 0x8_0000, &mut read);
        assert_eq!(read, value);
    }
    let small = StubSpec { sriov: Some(sriov([vf_bar(4096), None, None, None, None, None])), ..physical.clone() };
    assert_eq!(physical.virtual_function().unwrap().interrupt, physical.interrupt);
    assert_eq!(small.virtual_function().unwrap().interrupt, StubInterrupt::MsiX { vectors: 4 }, "a page is enough for four");
    let many = StubSpec { interrupt: StubInterrupt::MsiX { vectors: 2048 }, ..small.clone() };
    assert_eq!(many.virtual_function().unwrap().interrupt, StubInterrupt::None);
    for (physical, messages, control) in [(&physical, true, true), (&small, true, false), (&many, false, true)] {
        let made = StubSpec { dma: true, ..physical.clone() }.virtual_function().unwrap();
        assert_eq!((made.interrupt != StubInterrupt::None, made.dma), (messages, control), "{:?}", physical.sriov);
    }
    assert_eq!(StubSpec { on: Attachment::RootBus, ..physical }.virtual_function(), None);
}
