//! What a BAR costs as the guest moves it, on a virtual machine of the kernel and a DMA domain that notes what it is told.

use std::io;
use std::sync::Mutex;

use devices::vfio::iommu::{DomainError, PeerError};
use devices::virtio::Memory;
use pci::bar::{BarKind, BarSpec};
use pci::emulated::EmulatedSpec;
use pci::function::Pages;
use pci::testing::FakeEndpoint;
use vm_memory::GuestMemoryMmap;

use super::*;
use crate::kvm::Vm;
use crate::memory::{self, Backing};

const A: u64 = 0x4_0000_0000;
const B: u64 = 0x5_0000_0000;
/// Trapped.
const HEAD: u64 = 0x1000;
const SIZE: u64 = 0x1_0000;
const FIRST: FunctionId = FunctionId(1);
const SECOND: FunctionId = FunctionId(2);

/// What the DMA domain was told.
#[derive(Default)]
struct Told {
    calls: Mutex<Vec<String>>,
    refuses: AtomicBool,
}

impl Told {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl PeerMaps for Told {
    unsafe fn map_bar(&self, owner: &str, bar: BarIndex, at: u64, _: &[BarPiece]) -> Result<(), PeerError> {
        self.calls.lock().unwrap().push(format!("map {owner} BAR {bar} at {at:#x}"));
        if !self.refuses.load(Ordering::Relaxed) {
            return Ok(());
        }
        let source = DomainError::Unmap { iova: at, size: SIZE, source: io::Error::from(io::ErrorKind::InvalidInput) };
        Err(PeerError { owner: owner.to_owned(), bar, peers: Vec::new(), source })
    }

    fn unmap_bar(&self, at: u64, _: &[BarPiece]) -> Result<(), DomainError> {
        self.calls.lock().unwrap().push(format!("unmap {at:#x}"));
        Ok(())
    }
}

/// A machine with two functions of the host, which have one BAR each.
struct Bench {
    mapper: Mapper,
    space: Arc<AddressSpace>,
    told: Arc<Told>,
    pages: Pages,
    _vm: Vm,
    _memory: GuestMemoryMmap,
}

impl Bench {
    fn new() -> Self {
        let vm = Vm::new().unwrap();
        let memory = memory::create(&[arch::memory_map::Range { start: 0, end: SIZE }], Backing::default()).unwrap();
        let pages = Pages { host_address: memory::regions(&memory)[0].host };
        let space = AddressSpace::new(Memory::new(memory.clone()));
        let mut mapper = Mapper::new(Slots::new(vm.fd(), vm.max_slots()), None, Arc::clone(&space));
        let told = Arc::new(Told::default());
        mapper.domain = Some(Arc::clone(&told) as _);
        let mut bench = Self { mapper, space, told, pages, _vm: vm, _memory: memory };
        bench.add(FIRST, "first", BarAccess::default(), true);
        bench.add(SECOND, "second", BarAccess::default(), true);
        bench
    }

    fn add(&mut self, id: FunctionId, name: &str, access: BarAccess, hardware: bool) {
        let direct = BarPiece::Direct { offset: HEAD, len: SIZE - HEAD, pages: self.pages };
        let bars = BTreeMap::from([(0, (SIZE, vec![BarPiece::Trapped { offset: 0, len: HEAD }, direct]))]);
        let function = FakeEndpoint::shared(&EmulatedSpec::default());
        let (bus_master, doorbells) = (Arc::default(), BTreeMap::new());
        let name = name.to_owned();
        self.mapper.add(id, Endpoint { name, function, bus_master, hardware, access, bars, doorbells });
    }

    fn map(&mut self, function: FunctionId, at: u64) {
        self.mapper.apply(&[Effect::Map { function, bar: 0, at }]);
    }

    fn hide(&mut self, function: FunctionId) {
        self.mapper.apply(&[Effect::Hide { function, bar: 0 }]);
    }

    /// Slots in use, and how often one was set or removed.
    fn slots(&mut self) -> (u32, u64) {
        let slots = self.mapper.slots();
        (slots.in_use(), slots.changes())
    }

    fn shown(&self, id: FunctionId) -> (Option<u64>, &'static str, &'static str) {
        let bars = self.mapper.bars(id);
        (bars[0].address, bars[0].guest, bars[0].dma)
    }

    /// Whether the function answers for the start of a BAR at `at`.
    fn answers(&self, at: u64) -> bool {
        self.space.read(at, &mut [0; 4]);
        let reads = |(_, _, counts): (&str, BarIndex, MapCounts)| counts.reads;
        let before: u64 = self.mapper.counts().map(reads).sum();
        self.space.read(at, &mut [0; 4]);
        self.mapper.counts().map(reads).sum::<u64>() > before
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_bar_that_comes_back_to_its_place_costs_nothing() {
    let mut bench = Bench::new();
    bench.map(FIRST, A);
    assert_eq!((bench.slots(), bench.told.take()), ((1, 1), vec![format!("map first BAR 0 at {A:#x}")]));
    assert!(bench.answers(A));
    for _ in 0..3 {
        bench.hide(FIRST);
        assert!(!bench.answers(A), "nobody answers for a hidden BAR");
        assert_eq!(bench.shown(FIRST), (None, "hidden", "unmapped"));
        bench.map(FIRST, A);
        assert!(bench.answers(A));
    }
    assert_eq!((bench.slots(), bench.told.take()), ((1, 1), Vec::new()));
    assert_eq!(bench.shown(FIRST), (Some(A), "direct", "mapped"));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn all_that_changes_what_is_shown_of_a_bar_is_told() {
    let mut bench = Bench::new();
    let events = Arc::new(SlotEvents::new().unwrap());
    bench.mapper.set_slot_events(Arc::clone(&events));
    let mut told = |what: &str, on: FunctionId, act: &dyn Fn(&mut Bench)| {
        let before = bench.shown(on);
        act(&mut bench);
        assert_eq!(events.look_at().is_some(), bench.shown(on) != before, "{what}");
        events.look();
        bench.shown(on).0
    };
    assert_eq!(told("it comes", FIRST, &|bench| bench.map(FIRST, A)), Some(A));
    assert_eq!(told("it is written again", FIRST, &|bench| bench.map(FIRST, A)), Some(A));
    assert_eq!(told("it is hidden", FIRST, &|bench| bench.hide(FIRST)), None);
    assert_eq!(told("it is hidden again", FIRST, &|bench| bench.hide(FIRST)), None);
    assert_eq!(told("it comes back to its place", FIRST, &|bench| bench.map(FIRST, A)), Some(A));
    assert_eq!(told("it moves", FIRST, &|bench| bench.map(FIRST, B)), Some(B));
    assert_eq!(told("it is hidden before another comes", FIRST, &|bench| bench.hide(FIRST)), None);
    assert_eq!(told("another takes its place", SECOND, &|bench| bench.map(SECOND, B)), Some(B));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn dma_maps_and_slots_follow_a_bar_that_moves() {
    let mut bench = Bench::new();
    bench.map(FIRST, A);
    bench.map(FIRST, B);
    let moved = [format!("map first BAR 0 at {A:#x}"), format!("unmap {A:#x}"), format!("map first BAR 0 at {B:#x}")];
    assert_eq!((bench.slots(), bench.told.take()), ((1, 3), moved.to_vec()));
    assert!(bench.answers(B) && !bench.answers(A));
    // Hidden before, as guests do that size it.
    bench.hide(FIRST);
    bench.map(FIRST, A);
    assert_eq!(bench.told.take(), [format!("unmap {B:#x}"), format!("map first BAR 0 at {A:#x}")]);
    assert_eq!((bench.slots().0, bench.shown(FIRST)), (1, (Some(A), "direct", "mapped")));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_hidden_bar_makes_room_for_one_that_takes_its_place() {
    let mut bench = Bench::new();
    bench.map(FIRST, A);
    bench.hide(FIRST);
    bench.told.take();
    // The last page of the other one lies on the first of this one.
    let overlapping = A - SIZE + 0x1000;
    bench.map(SECOND, overlapping);
    assert_eq!(bench.told.take(), [format!("unmap {A:#x}"), format!("map second BAR 0 at {overlapping:#x}")]);
    assert_eq!(bench.slots().0, 1);
    bench.hide(SECOND);
    // Beside it there is nothing to make room for.
    bench.map(FIRST, overlapping + SIZE);
    assert_eq!(bench.told.take(), [format!("map first BAR 0 at {:#x}", overlapping + SIZE)]);
    assert_eq!(bench.slots().0, 2);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_for_the_guest_and_for_peers_are_separate() {
    let (all, none) = (BarChoice::ALL, BarChoice::NONE);
    for (direct, p2p, hardware, slots, maps, shown) in [
        (all, none, true, 1, 0, ("direct", "off")),
        (none, all, true, 0, 1, ("exits", "mapped")),
        (all, all, false, 1, 0, ("direct", "emulated")),
    ] {
        let mut bench = Bench::new();
        bench.add(FIRST, "first", BarAccess { direct, p2p }, hardware);
        bench.map(FIRST, A);
        assert_eq!((bench.slots().0, bench.told.take().len()), (slots, maps), "{shown:?}");
        assert_eq!(bench.shown(FIRST), (Some(A), shown.0, shown.1));
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_dma_map_that_is_refused_is_told_and_not_taken_back() {
    let mut bench = Bench::new();
    bench.told.refuses.store(true, Ordering::Relaxed);
    bench.map(FIRST, A);
    assert_eq!(bench.shown(FIRST), (Some(A), "direct", "failed"));
    bench.told.refuses.store(false, Ordering::Relaxed);
    bench.told.take();
    bench.map(FIRST, B);
    assert_eq!(bench.told.take(), [format!("map first BAR 0 at {B:#x}")]);
    assert_eq!(bench.shown(FIRST), (Some(B), "direct", "mapped"));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_function_that_leaves_takes_everything_along_once() {
    let mut bench = Bench::new();
    bench.map(FIRST, A);
    bench.map(SECOND, B);
    bench.hide(SECOND);
    bench.told.take();
    bench.mapper.remove(FIRST);
    bench.mapper.remove(SECOND);
    assert_eq!(bench.told.take(), [format!("unmap {A:#x}"), format!("unmap {B:#x}")]);
    assert_eq!((bench.slots().0, bench.mapper.counts().count()), (0, 0));
    let mut bench = Bench::new();
    bench.map(FIRST, A);
    bench.told.take();
    bench.mapper.release_dma();
    bench.mapper.release_dma();
    bench.mapper.remove(FIRST);
    assert_eq!(bench.told.take(), [format!("unmap {A:#x}")]);
}

#[test]
fn ports_are_told_by_their_numbers_and_memory_by_its_address_wherever_a_guest_moves_it() {
    let bar = |kind, size| Some(BarSpec { kind, prefetchable: false, size });
    let bars = [bar(BarKind::Memory64, SIZE), None, bar(BarKind::Io, 256), None, None, None];
    let function = FakeEndpoint::shared(&EmulatedSpec { bars, ..EmulatedSpec::default() });
    let endpoint = Endpoint::made_by_registers("dev".to_owned(), function);
    let at = PORTS | 0xC000;
    assert_eq!((endpoint.place(0, at).as_str(), endpoint.place(2, at).as_str()), ("0x800000000000c000", "port 0xc000"));
    assert_eq!(endpoint.place(ROM, A), "0x400000000");
}
