use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use pci::access::{Access, Lanes, Reg};
use pci::emulated::Attachment;
use pci::function::{Changes, PciFunction, ResetKind};
use pci::testing::FakeMsi;
use proptest::prelude::*;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::*;
use crate::virtio::feature;
use crate::virtio::testing::{self, Driver, ENTRIES, WRITE, place, survives_hostile_rings};

const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

const DESCRIPTORS: u64 = place(0);
const AVAILABLE: u64 = DESCRIPTORS + testing::AVAILABLE;
const HEADER_AT: u64 = 0x10_0000;
const STATUS_AT: u64 = 0x10_1000;
const DATA_AT: u64 = 0x20_0000;
const NOT_ANSWERED: u8 = 0xEE;

/// These tests run with each of them.
fn engine() -> Engine {
    if module_path!().ends_with("uring") { Engine::Uring } else { Engine::Sync }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 249).try_into().unwrap()).collect()
}

/// A driver of a disk, and the disk's file.
struct Guest {
    driver: Driver<Block>,
    file: File,
}

impl Deref for Guest {
    type Target = Driver<Block>;

    fn deref(&self) -> &Driver<Block> {
        &self.driver
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut Driver<Block> {
        &mut self.driver
    }
}

impl Guest {
    fn new(readonly: bool) -> Self {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&pattern(64 << 10)).unwrap();
        let kept = file.try_clone().unwrap();
        let image = Arc::new(Image::new(file, Format::Raw, Opened { readonly, ..Opened::default() }).unwrap());
        let spec = BlockSpec {
            image,
            serial: "disk-7".into(),
            queues: 1,
            queue_size: 256,
            limit: LimitSpec::default(),
            engine: engine(),
        };
        Self { driver: Driver::new(Block::new("test", spec).unwrap()), file: kept }
    }

    fn ready() -> Self {
        let mut guest = Self::new(false);
        guest.set_up(u64::MAX);
        guest
    }

    fn command(&mut self, value: u32) {
        self.function.config_write(Access { reg: Reg::containing(4), lanes: Lanes::new(0, 2) }, value);
    }

    fn capability(&mut self, wanted: impl Fn([u8; 4]) -> bool) -> u16 {
        let mut at = self.function.config_read(Reg::containing(0x34)).to_le_bytes()[0];
        while at != 0 {
            let header = self.function.config_read(Reg::containing(at.into())).to_le_bytes();
            if wanted(header) {
                return at.into();
            }
            at = header[1];
        }
        panic!("no such capability");
    }

    /// Writes a chain of (address, length, flags) as a table of descriptors.
    fn table(&self, at: u64, parts: &[(u64, u32, u16)]) {
        let last = parts.len() - 1;
        for (n, (address, len, flags)) in (0_u16..).zip(parts) {
            let flags = flags | if usize::from(n) < last { NEXT } else { 0 };
            let descriptor = RawDescriptor::from(Descriptor::new(*address, *len, flags, n + 1));
            self.memory.memory().write_obj(descriptor, GuestAddress(at + 16 * u64::from(n))).unwrap();
        }
    }

    /// Sends a request with this header and these data parts, waits for it; its status and used length.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, u32) {
        self.put(HEADER_AT, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
        self.put(STATUS_AT, &[NOT_ANSWERED]);
        let parts: Vec<_> = [(HEADER_AT, 16, 0)].iter().chain(data).copied().chain([(STATUS_AT, 1, WRITE)]).collect();
        self.send(0, &parts);
        self.status_and_length()
    }

    fn status_and_length(&mut self) -> (u8, u32) {
        let len = self.answer(0).len;
        (self.bytes(STATUS_AT, 1)[0], len)
    }

    fn on_disk(&mut self, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.file.seek(SeekFrom::Start(at)).unwrap();
        self.file.read_exact(&mut data).unwrap();
        data
    }
}

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

#[test]
fn a_read_fills_scattered_memory_and_interrupts() {
    let mut guest = Guest::ready();
    let data = [(DATA_AT, 512, WRITE), (DATA_AT + 0x1000, 1024, WRITE)];
    assert_eq!(guest.request(IN, 3, &data), (OK, 1537));
    let got = [guest.bytes(DATA_AT, 512), guest.bytes(DATA_AT + 0x1000, 1024)].concat();
    assert!(got == pattern(64 << 10)[1536..3072]);
    guest.wait("an interrupt", |guest| guest.sent() == [0x41]);
}

#[test]
fn a_write_reaches_the_image_and_a_flush_is_answered() {
    let mut guest = Guest::ready();
    guest.put(DATA_AT, &[0xA5; 1024]);
    assert_eq!(guest.request(OUT, 5, &[(DATA_AT, 1024, 0)]), (OK, 1));
    assert_eq!(guest.request(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(guest.on_disk(5 * 512, 1024), [0xA5; 1024]);
    assert!(guest.on_disk(7 * 512, 512) == pattern(64 << 10)[7 * 512..8 * 512], "nothing past the data");
}

#[test]
fn reads_and_writes_that_were_carried_out_are_counted() {
    let mut guest = Guest::ready();
    for sector in [0, 7, 1 << 40] {
        guest.request(IN, sector, &[(DATA_AT, 512, WRITE), (DATA_AT + 0x1000, 1024, WRITE)]);
    }
    guest.request(OUT, 1, &[(DATA_AT, 4096, 0)]);
    guest.request(FLUSH, 0, &[]);
    guest.request(GET_ID, 0, &[(DATA_AT, 20, WRITE)]);
    let image = &guest.function.device().disk.image;
    assert_eq!((image.read().count(), image.read().bytes()), (2, 3072), "the third read is not of this disk");
    assert_eq!((image.written().count(), image.written().bytes()), (1, 4096));
}

#[test]
fn one_doorbell_serves_all_that_waits() {
    let mut guest = Guest::ready();
    guest.put(HEADER_AT, &[0; 16]);
    guest.table(DESCRIPTORS, &[(HEADER_AT, 16, 0), (DATA_AT, 512, WRITE), (STATUS_AT, 1, WRITE)]);
    guest.put(AVAILABLE + 2, &ENTRIES.to_le_bytes());
    guest.write(0x200, &[0, 0]);
    guest.wait("all answers", |guest| guest.came_back(0) == ENTRIES);
}

/// Reads of 64 KiB each into the memory from [`DATA_AT`] on, all of them under way at once, and the memory.
fn many_reads(guest: &mut Guest) -> (u64, usize) {
    guest.file.set_len(8 << 20).unwrap();
    guest.put(HEADER_AT, &[0; 16]);
    let (count, size) = (u64::from(ENTRIES) / 3, 64 << 10);
    for n in 0..count {
        guest.offer(0, &[(HEADER_AT, 16, 0), (DATA_AT + n * size, 64 << 10, WRITE), (STATUS_AT, 1, WRITE)]);
    }
    guest.ring(0);
    (count, usize::try_from(count * size).unwrap())
}

#[test]
fn after_a_reset_nothing_reaches_guest_memory_whatever_was_under_way() {
    let mut guest = Guest::ready();
    for _ in 0..20 {
        let (_, len) = many_reads(&mut guest);
        guest.write(0x14, &[0]);
        guest.put(DATA_AT, &vec![0xCC; len]);
        guest.put(STATUS_AT, &[NOT_ANSWERED]);
        let before = guest.came_back(0);
        std::thread::sleep(Duration::from_millis(2));
        assert!(guest.bytes(DATA_AT, len).iter().all(|byte| *byte == 0xCC));
        assert_eq!((guest.bytes(STATUS_AT, 1), guest.came_back(0)), (vec![NOT_ANSWERED], before));
        guest.set_up(u64::MAX);
    }
    assert_eq!(guest.request(IN, 3, &[(DATA_AT, 512, WRITE)]), (OK, 513));
}

#[test]
fn while_a_disk_is_held_nothing_reaches_guest_memory_and_afterwards_all_comes() {
    let mut guest = Guest::ready();
    let workers = guest.function.workers().unwrap();
    for round in 1..=20 {
        let (count, len) = many_reads(&mut guest);
        workers.hold();
        let (memory, came) = (guest.bytes(DATA_AT, len), guest.came_back(0));
        std::thread::sleep(Duration::from_millis(2));
        assert!(guest.bytes(DATA_AT, len) == memory && guest.came_back(0) == came);
        workers.release();
        for _ in 0..count {
            assert_eq!(guest.answer(0).len, (64 << 10) + 1, "{round}");
        }
    }
}

#[test]
fn once_bus_mastering_is_off_nothing_reaches_guest_memory_and_afterwards_all_comes() {
    let mut guest = Guest::ready();
    for round in 1..=20 {
        let (count, len) = many_reads(&mut guest);
        guest.command(2);
        let (memory, came) = (guest.bytes(DATA_AT, len), guest.came_back(0));
        guest.put(DATA_AT, &vec![0xCC; len]);
        std::thread::sleep(Duration::from_millis(2));
        assert!(guest.bytes(DATA_AT, len).iter().all(|byte| *byte == 0xCC) && guest.came_back(0) == came);
        guest.put(DATA_AT, &memory);
        guest.command(6);
        for _ in 0..count {
            assert_eq!(guest.answer(0).len, (64 << 10) + 1, "{round}");
        }
    }
}

#[test]
fn what_is_written_is_there_after_the_answer_to_a_flush() {
    let mut guest = Guest::ready();
    for n in 0..20_u8 {
        guest.put(HEADER_AT, &[&OUT.to_le_bytes()[..], &[0; 4], &u64::from(n).to_le_bytes()].concat());
        guest.put(HEADER_AT + 16, &[&FLUSH.to_le_bytes()[..], &[0; 12]].concat());
        guest.put(DATA_AT, &[n; 512]);
        guest.offer(0, &[(HEADER_AT, 16, 0), (DATA_AT, 512, 0), (STATUS_AT, 1, WRITE)]);
        guest.send(0, &[(HEADER_AT + 16, 16, 0), (STATUS_AT + 1, 1, WRITE)]);
        assert_eq!((guest.answer(0).len, guest.answer(0).len), (1, 1));
        assert_eq!(guest.bytes(STATUS_AT, 2), [OK; 2]);
        assert_eq!(guest.on_disk(u64::from(n) * 512, 512), [n; 512]);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error_of_the_request_and_told_and_what_the_guest_asks_in_vain_is_not() {
    let mut guest = Guest::ready();
    let heard = testing::heard(&mut guest.function);
    assert_eq!(guest.request(IN, u64::MAX, &[(DATA_AT, 1024, WRITE)]).0, IOERR);
    assert_eq!(*heard.lock().unwrap(), [""; 0]);
    guest.file.set_len(1024).unwrap();
    assert_eq!(guest.request(IN, 1, &[(DATA_AT, 1024, WRITE)]).0, IOERR);
    assert_eq!(guest.request(IN, 1, &[(DATA_AT, 512, WRITE)]).0, OK);
    let heard = heard.lock().unwrap();
    assert!(heard.len() == 1 && heard[0].starts_with("test: its image failed a request: "), "{heard:?}");
}

#[test]
fn indices_wrap() {
    let mut guest = Guest::ready();
    guest.put(HEADER_AT, &[0; 16]);
    guest.table(DESCRIPTORS, &[(HEADER_AT, 16, 0), (DATA_AT, 512, WRITE), (STATUS_AT, 1, WRITE)]);
    for round in 1..=0x1_0000 / u32::from(ENTRIES) + 1 {
        let [a, b, ..] = (round * u32::from(ENTRIES)).to_le_bytes();
        guest.put(AVAILABLE + 2, &[a, b]);
        guest.write(0x200, &[0, 0]);
        guest.wait("all answers", |guest| guest.came_back(0) == u16::from_le_bytes([a, b]));
    }
}

#[test]
fn the_disk_tells_its_serial_and_size() {
    let mut guest = Guest::ready();
    assert_eq!(guest.request(GET_ID, 0, &[(DATA_AT, 20, WRITE)]), (OK, 21));
    assert_eq!(guest.bytes(DATA_AT, 8), b"disk-7\0\0");
    assert_eq!(guest.read(0x400), 128_u64.to_le_bytes());
    assert_eq!((guest.read(0x40C), guest.read(0x414)), (254_u32.to_le_bytes(), 512_u32.to_le_bytes()));
    assert_eq!(guest.read(0x400 + 60), [0xFF; 4]);
}

#[test]
fn requests_that_cannot_be_have_an_error_status() {
    let mut guest = Guest::ready();
    let sector = [(DATA_AT, 512, WRITE)];
    let out = [(DATA_AT, 512, 0)];
    type Case<'a> = (u32, u64, &'a [(u64, u32, u16)], u8);
    let cases: [Case<'_>; 11] = [
        (IN, 128, &sector, IOERR),
        (IN, u64::MAX, &sector, IOERR),
        (OUT, 128, &out, IOERR),
        (IN, 127, &[(DATA_AT, 1024, WRITE)], IOERR),
        (IN, 0, &[(DATA_AT, 511, WRITE)], IOERR),
        (IN, 0, &[(0xFFFF_0000, 512, WRITE)], IOERR),
        (OUT, 0, &[(u64::MAX, 512, 0)], IOERR),
        (GET_ID, 0, &[(DATA_AT, 19, WRITE)], IOERR),
        (12, 0, &out, UNSUPP),
        (99, 0, &[], UNSUPP),
        (IN, 127, &sector, OK),
    ];
    for (kind, sector, data, expected) in cases {
        assert_eq!(guest.request(kind, sector, data).0, expected, "{kind} {sector} {data:?}");
    }
}

#[test]
fn a_read_only_disk_refuses_writes_and_says_so() {
    let mut guest = Guest::new(true);
    guest.set_up(u64::MAX);
    guest.write(0x00, &[0; 4]);
    assert_ne!(u32::from_le_bytes(guest.read(0x04)) & 1 << 5, 0);
    assert_eq!(guest.request(OUT, 0, &[(DATA_AT, 512, 0)]).0, IOERR);
    assert!(guest.on_disk(0, 512) == pattern(512));
}

#[test]
fn a_header_in_pieces_and_indirect_descriptors_are_served() {
    let mut guest = Guest::ready();
    guest.put(HEADER_AT, &[0; 8]);
    guest.put(HEADER_AT + 8, &2_u64.to_le_bytes());
    let parts = [(HEADER_AT, 5, 0), (HEADER_AT + 5, 0, 0), (HEADER_AT + 5, 11, 0), (DATA_AT, 512, WRITE), (STATUS_AT, 1, WRITE)];
    guest.send(0, &parts);
    assert_eq!(guest.status_and_length(), (OK, 513));
    let table = 0x30_0000;
    guest.table(table, &parts);
    guest.put(DATA_AT, &[0; 512]);
    guest.send(0, &[(table, 80, INDIRECT)]);
    assert_eq!(guest.status_and_length(), (OK, 513));
    assert!(guest.bytes(DATA_AT, 512) == pattern(2048)[1024..1536]);
}

#[test]
fn chains_without_a_place_for_the_answer_need_a_reset() {
    let broken: [&[(u64, u32, u16)]; 6] = [
        &[(HEADER_AT, 16, 0)],
        &[(HEADER_AT, 16, 0), (STATUS_AT, 0, WRITE)],
        &[(HEADER_AT, 16, 0), (0xFFFF_0000, 1, WRITE)],
        &[(STATUS_AT, 1, WRITE), (HEADER_AT, 16, 0)],
        &[(0x30_0000, 17, INDIRECT)],
        &[(0xFFFF_0000, 32, INDIRECT)],
    ];
    for parts in broken {
        let mut guest = Guest::ready();
        guest.send(0, parts);
        guest.wait("giving up", |guest| guest.status() & 0x40 != 0);
        guest.wait("an interrupt", |guest| guest.sent() == [0x40]);
        assert_eq!(guest.came_back(0), 0);
        guest.write(0x14, &[0]);
        assert_eq!(guest.status(), 0);
    }
}

#[test]
fn a_looping_chain_and_impossible_indices_need_a_reset() {
    let looping = |guest: &mut Guest| {
        let descriptor = RawDescriptor::from(Descriptor::new(DATA_AT, 16, NEXT, 0));
        guest.memory.memory().write_obj(descriptor, GuestAddress(DESCRIPTORS)).unwrap();
        guest.make_available(0, 0);
        guest.ring(0);
    };
    let head = |guest: &mut Guest| {
        guest.make_available(0, ENTRIES);
        guest.ring(0);
    };
    let index = |guest: &mut Guest| {
        guest.put(AVAILABLE + 2, &(ENTRIES + 1).to_le_bytes());
        guest.write(0x200, &[0; 4]);
    };
    let cases: [fn(&mut Guest); 3] = [looping, head, index];
    for case in cases {
        let mut guest = Guest::ready();
        case(&mut guest);
        guest.wait("giving up", |guest| guest.status() & 0x40 != 0);
    }
}

#[test]
fn rings_outside_memory_need_a_reset() {
    for (register, address) in [(0x20, 0xFFFF_0000_u64), (0x28, u64::MAX - 1), (0x30, 16 << 20), (0x20, 8), (0x30, 0x1002)] {
        let mut guest = Guest::new(false);
        guest.command(6);
        guest.write(0x08, &[1, 0, 0, 0]);
        guest.write(0x0C, &[1, 0, 0, 0]);
        guest.write(0x14, &[0x0B]);
        for ring in [0x20, 0x28, 0x30] {
            guest.write(ring, &0x1000_u64.to_le_bytes());
        }
        guest.write(register, &address.to_le_bytes());
        guest.write(0x1C, &[1, 0]);
        guest.write(0x14, &[0x0F]);
        assert_eq!(guest.status(), 0x4F, "{register:#x} {address:#x}");
    }
}

#[test]
fn every_kind_of_reset_ends_the_worker_and_the_disk_works_again() {
    let by_status = |guest: &mut Guest| guest.write(0x14, &[0]);
    let by_machine = |guest: &mut Guest| guest.function.reset(ResetKind::Cold);
    let by_function = |guest: &mut Guest| {
        let express = guest.capability(|header| header[0] == 0x10);
        assert!(guest.function.config_write(Access::dword(express + 8), 1 << 15).contains(Changes::RESET));
    };
    let cases: [fn(&mut Guest); 3] = [by_status, by_machine, by_function];
    let mut guest = Guest::ready();
    for case in cases {
        assert_eq!(guest.request(IN, 0, &[(DATA_AT, 512, WRITE)]).0, OK);
        case(&mut guest);
        assert_eq!(Arc::strong_count(&guest.function.device().disk), 1, "the worker has ended");
        assert_eq!((guest.status(), guest.read(0x1C)), (0, [0, 0]));
        guest.sent();
        guest.set_up(u64::MAX);
    }
}

#[test]
fn nothing_is_served_while_bus_mastering_is_off() {
    let mut guest = Guest::ready();
    guest.command(2);
    guest.send(0, &[(HEADER_AT, 16, 0), (STATUS_AT, 1, WRITE)]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.came_back(0), 0);
    guest.command(6);
    guest.status_and_length();
}

#[test]
fn a_driver_without_event_index_or_flush_is_served() {
    let mut guest = Guest::new(false);
    guest.set_up(feature::VERSION_1);
    for _ in 0..40 {
        assert_eq!(guest.request(OUT, 0, &[(DATA_AT, 512, 0)]).0, OK);
    }
}

#[test]
fn firmware_reaches_registers_through_configuration_space() {
    let mut guest = Guest::new(false);
    let window = guest.capability(|header| header[0] == 9 && header[3] == 5);
    guest.function.config_write(Access::dword(window + 8), 0x400);
    guest.function.config_write(Access::dword(window + 12), 4);
    assert_eq!(guest.function.config_read(Reg::containing(window + 16)), 128);
    guest.function.config_write(Access::dword(window + 8), 0x14);
    guest.function.config_write(Access::dword(window + 12), 1);
    guest.function.config_write(Access::dword(window + 16), 3);
    assert_eq!(guest.status(), 3);
}

#[test]
fn a_detached_disk_reads_all_ones_and_has_no_worker() {
    let mut guest = Guest::ready();
    guest.function.detach();
    assert_eq!((guest.read(0x400), guest.function.config_read(Reg::containing(0))), ([0xFF; 8], 0xFFFF_FFFF));
    assert_eq!(Arc::strong_count(&guest.function.device().disk), 1);
}

#[test]
fn impossible_disks_are_refused_by_name() {
    let make = |serial: &str, queues, queue_size| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1023).unwrap();
        let image = Arc::new(Image::new(file, Format::Raw, Opened::default()).unwrap());
        let spec = BlockSpec { image, serial: serial.into(), queues, queue_size, limit: LimitSpec::default(), engine: engine() };
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap());
        BlockFunction::new("root", spec, Seat { memory, msi: Arc::new(FakeMsi::default()), on: Attachment::RootBus })
            .err()
            .map(|error| error.to_string())
    };
    assert!(make("123456789012345678901", 1, 256).unwrap().contains("21 bytes"));
    assert_eq!(make("12345678901234567890", 1, 256), None);
    for (queues, size) in [(0, 256), (65, 256), (1, 2), (1, 100)] {
        assert!(make("", queues, size).unwrap().starts_with("disk root cannot have"), "{queues} {size}");
    }
}

/// Two queues, and so few requests in a time that some wait.
fn slow() -> Block {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let image = Arc::new(Image::new(file, Format::Raw, Opened::default()).unwrap());
    let slow = crate::virtio::limit::BucketSpec { size: 2, burst: 0, refill: Duration::from_millis(10) };
    let limit = LimitSpec { bytes: None, requests: Some(slow) };
    Block::new("test", BlockSpec { image, serial: String::new(), queues: 2, queue_size: 64, limit, engine: engine() }).unwrap()
}

#[test]
fn every_queue_serves_and_a_limit_loses_nothing() {
    let mut driver = Driver::started(slow());
    assert_eq!(driver.config(34), [2, 0]);
    let data = testing::DATA;
    driver.put(data, &[0; 16]);
    for _ in 0..10 {
        for queue in 0..2 {
            driver.send(queue, &[(data, 16, 0), (data + 0x1000, 512, WRITE), (data + 0x2000, 1, WRITE)]);
        }
    }
    for _ in 0..10 {
        assert_eq!((driver.answer(0).len, driver.answer(1).len), (513, 513));
    }
}

#[test]
fn hostile_rings_do_no_harm_to_any_queue() {
    survives_hostile_rings(slow);
}

const DISCARD: u32 = 11;
const ZEROES: u32 = 13;

fn segment(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn zeros_are_written_where_the_segment_says() {
    let mut guest = Guest::ready();
    guest.put(DATA_AT, &segment(2, 3, 1));
    assert_eq!(guest.request(ZEROES, 0, &[(DATA_AT, 16, 0)]), (OK, 1));
    assert!(guest.on_disk(1024, 1536) == [0; 1536]);
    assert!(guest.on_disk(0, 1024) == pattern(1024));
    assert!(guest.on_disk(2560, 512) == pattern(64 << 10)[2560..3072]);
    guest.put(DATA_AT, &segment(0, 8, 0));
    assert_eq!(guest.request(DISCARD, 0, &[(DATA_AT, 16, 0)]), (OK, 1));
}

#[test]
fn segments_that_make_no_sense_change_nothing() {
    let mut guest = Guest::ready();
    let cases = [
        (ZEROES, segment(127, 2, 0), IOERR),
        (ZEROES, segment(u64::MAX, 2, 0), IOERR),
        (ZEROES, segment(0, u32::MAX, 0), IOERR),
        (ZEROES, segment(0, 1, 2), UNSUPP),
        (DISCARD, segment(0, 1, 1), UNSUPP),
        (DISCARD, segment(128, 1, 0), IOERR),
        (DISCARD, vec![0; 15], IOERR),
        (DISCARD, [segment(0, 1, 0), segment(1, 1, 0)].concat(), IOERR),
    ];
    for (kind, bytes, expected) in cases {
        guest.put(DATA_AT, &bytes);
        let len = u32::try_from(bytes.len()).unwrap();
        assert_eq!(guest.request(kind, 0, &[(DATA_AT, len, 0)]), (expected, 1), "{kind} {bytes:?}");
    }
    assert!(guest.on_disk(0, 64 << 10) == pattern(64 << 10));
    let mut readonly = Guest::new(true);
    readonly.set_up(u64::MAX);
    readonly.put(DATA_AT, &segment(0, 1, 0));
    assert_eq!(readonly.request(ZEROES, 0, &[(DATA_AT, 16, 0)]), (IOERR, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_access_and_no_ring_panics_or_hangs(
        seed in any::<bool>(),
        ring in proptest::collection::vec(any::<u8>(), 0..700),
        accesses in proptest::collection::vec(
            (0..3u8, prop_oneof![0..0x40u64, 0..0x4100u64, any::<u64>()], any::<[u8; 8]>(), 0..=8usize), 0..200,
        ),
    ) {
        let mut guest = Guest::new(false);
        if seed {
            guest.set_up(u64::MAX);
            for part in [DESCRIPTORS, AVAILABLE] {
                guest.put(part, &ring);
            }
            guest.put(AVAILABLE + 2, &[1 + ring.len().to_le_bytes()[0] % 16, 0]);
            guest.write(0x200, &[0; 2]);
        }
        for (kind, offset, mut data, len) in accesses {
            let reg = (offset & 0xFFF).try_into().unwrap();
            match kind {
                0 => guest.function.bar_write(0, offset, &data[..len]),
                1 => guest.function.bar_read(0, offset, &mut data[..len]),
                _ => {
                    guest.function.config_read(Reg::containing(reg));
                    guest.function.config_write(Access::dword(reg), u32::from_le_bytes([data[0], data[1], data[2], data[3]]));
                }
            }
        }
        guest.function.reset(ResetKind::Hot);
        prop_assert_eq!(Arc::strong_count(&guest.function.device().disk), 1);
    }
}
