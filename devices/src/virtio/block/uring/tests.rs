use std::sync::Arc;

use pci::access::{Access, Lanes, Reg};
use pci::function::PciFunction;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use super::super::{Block, BlockSpec, Chosen, Engine, Format, Image, Opened};
use super::*;
use crate::virtio::limit::LimitSpec;
use crate::virtio::testing::{AVAILABLE, DATA, Driver, USED, WRITE, place};
use crate::virtio::worker::Bell;

const ENTRIES: u16 = 256;
const HEADERS: u64 = 0x10_0000;
const STATUSES: u64 = 0x18_0000;
const IMAGE: usize = 8 << 20;
const IN: u32 = 0;
const GET_ID: u32 = 8;

/// A disk whose queue nobody serves but the test.
struct Bench {
    driver: Driver<Block>,
    ring: Ring,
    stop: Stop,
}

impl Bench {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        let byte = |at: usize| (at / 512).to_le_bytes()[0] | 1;
        std::os::unix::fs::FileExt::write_all_at(&file, &(0..IMAGE).map(byte).collect::<Vec<_>>(), 0).unwrap();
        let spec = BlockSpec {
            image: Arc::new(Image::new(file, Format::Raw, Opened::default()).unwrap()),
            serial: "disk-7".into(),
            queues: 1,
            queue_size: ENTRIES,
            limit: LimitSpec::default(),
            engine: Engine::Uring,
        };
        let mut driver = Driver::new(Block::new("test", spec).unwrap());
        driver.function.config_write(Access { reg: Reg::containing(4), lanes: Lanes::new(0, 2) }, 6);
        let mut queue = Queue::new(ENTRIES).unwrap();
        let at = place(0);
        queue.try_set_desc_table_address(GuestAddress(at)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(at + AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(at + USED)).unwrap();
        queue.set_ready(true);
        let (bell, signals) = (Arc::new(Bell::new().unwrap()), driver.function.signals());
        let ring = Ring::new(0, queue, bell, driver.memory.clone(), signals, Arc::default());
        Self { driver, ring, stop: Stop::never() }
    }

    /// Makes `count` requests of a kind available, each for `len` bytes into the memory from [`DATA`] on. They share three
    /// descriptors of an indirect table, so that there can be as many as the queue has entries.
    fn offer(&self, kind: u32, len: u32, count: u16) {
        self.driver.put(HEADERS, &[&kind.to_le_bytes()[..], &[0; 12]].concat());
        let memory = self.driver.memory.memory();
        let table = HEADERS + 0x1000;
        let parts = [(HEADERS, 16, 1), (DATA, len, 1 | WRITE), (STATUSES, 1, WRITE)];
        for (n, (address, len, flags)) in (0_u16..).zip(parts) {
            let descriptor = RawDescriptor::from(Descriptor::new(address, len, flags, n + 1));
            memory.write_obj(descriptor, GuestAddress(table + 16 * u64::from(n))).unwrap();
        }
        for n in 0..count {
            let indirect = RawDescriptor::from(Descriptor::new(table, 48, 4, 0));
            memory.write_obj(indirect, GuestAddress(place(0) + 16 * u64::from(n))).unwrap();
            self.driver.put(place(0) + AVAILABLE + 4 + 2 * u64::from(n), &n.to_le_bytes());
        }
        self.driver.put(place(0) + AVAILABLE + 2, &count.to_le_bytes());
    }

    fn disk(&self) -> Arc<Disk> {
        self.driver.function.device().disk.clone()
    }
}

fn lane<'a>(disk: &'a Disk, stop: &'a Stop) -> Lane<'a> {
    let limit = Limit::new(LimitSpec::default(), Instant::now());
    Lane { disk, file: disk.image.raw().unwrap(), durable: false, limit, stop }
}

/// What is taken off the queue before the first answer: how many requests the kernel gets, their bytes, and answers.
fn first_portion(bench: &mut Bench) -> (usize, u64, usize) {
    let (disk, snapshot, mut uring) = (bench.disk(), bench.ring.memory(), open().unwrap());
    let mut lane = lane(&disk, &bench.stop);
    let mut flights = Flights::new(&mut uring, lane.file.as_fd());
    let mut done = Vec::new();
    assert_eq!(lane.take(&mut bench.ring, &snapshot, &mut flights, &mut done), Ok(None));
    (flights.under_way, flights.bytes, done.len())
}

/// Serves the queue until it is empty; how many answers there are.
fn all_answers(bench: &mut Bench) -> u16 {
    let disk = bench.disk();
    let ended = lane(&disk, &bench.stop).round(&mut bench.ring, &mut open().unwrap());
    assert!(matches!(ended, Ok(After::Wait(None))));
    bench.driver.came_back(0)
}

#[test]
fn requests_that_need_no_kernel_are_taken_in_portions_and_all_of_them_are_answered() {
    let mut bench = Bench::new();
    bench.offer(GET_ID, 20, ENTRIES);
    assert_eq!(first_portion(&mut bench), (0, 0, UNDER_WAY));
    let mut bench = Bench::new();
    bench.offer(GET_ID, 20, ENTRIES);
    assert_eq!(all_answers(&mut bench), ENTRIES);
}

#[test]
fn the_bytes_under_way_have_a_bound_that_slow_media_can_be_waited_for() {
    let mut bench = Bench::new();
    bench.offer(IN, 8 << 20, 20);
    assert_eq!(first_portion(&mut bench), (4, MOST_BYTES, 0));
    let mut bench = Bench::new();
    bench.offer(IN, 8 << 20, 20);
    assert_eq!(all_answers(&mut bench), 20);
}

#[test]
fn what_the_kernel_cannot_do_without_waiting_is_done_by_calls_that_wait() {
    let bench = Bench::new();
    let (disk, snapshot) = (bench.disk(), bench.driver.memory.memory());
    let lane = lane(&disk, &bench.stop);
    let memory = vec![snapshot.get_slice(GuestAddress(DATA), 1024).unwrap()];
    let mut read = Step::Transfer { direction: Direction::Read, left: Left::new(memory), offset: 512, vectors: Vec::new() };
    assert_eq!(read.take(-libc::EAGAIN, &lane), Ok(true));
    assert_eq!(bench.driver.bytes(DATA, 1024), [[1; 512], [3; 512]].concat());
    assert_eq!(Step::Flush.take(-libc::EAGAIN, &lane), Ok(true));
    assert_eq!(Step::Discard { offset: 0, len: 512 }.take(-libc::EAGAIN, &lane), Ok(true));
}

#[test]
fn a_disk_that_is_to_be_served_by_io_uring_is_not_served_in_another_way() {
    let none = || Err(io::Error::from_raw_os_error(libc::EMFILE));
    for (engine, served) in [(Engine::Uring, false), (Engine::Auto, true)] {
        let mut bench = Bench::new();
        let disk = bench.disk();
        let spec = BlockSpec {
            image: disk.image.clone(),
            serial: String::new(),
            queues: 1,
            queue_size: ENTRIES,
            limit: LimitSpec::default(),
            engine,
        };
        let mut block = Block::new("test", spec).unwrap();
        block.engine = Arc::new(Chosen { open: none, ..Chosen::new("test".into(), engine) });
        bench.driver = Driver::started(block);
        assert_eq!(bench.driver.gave_up(), !served, "{engine:?}");
    }
}
