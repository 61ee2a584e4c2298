use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryMmap};

use super::super::testing::{DATA, Driver, RAM, WRITE, survives_hostile_rings};
use super::*;

const MIB: u64 = 1 << 20;
/// The region lies behind the rings, its last part has no memory.
const AT: u64 = 8 * MIB + 2 * MIB;
const BLOCK: u64 = 2 * MIB;
const REGION: Region = Region { at: AT, len: 16 * MIB, block: BLOCK };
/// What [`RAM`] has of it.
const USABLE: u64 = 6 * MIB;

fn control() -> Arc<MemControl> {
    let control = MemControl::new(3, false);
    control.place(REGION);
    control
}

fn started() -> (Driver<Mem>, Arc<MemControl>) {
    let control = control();
    let driver = Driver::started(Mem::new("mem0", Arc::clone(&control)));
    control.connect(driver.function.signals());
    (driver, control)
}

/// Sends a request; the type of the answer and the state.
fn ask(driver: &mut Driver<Mem>, kind: u16, at: u64, count: u16) -> (u16, u16) {
    let mut request = Vec::from(kind.to_le_bytes());
    request.extend([0; 6]);
    request.extend(at.to_le_bytes());
    request.extend(count.to_le_bytes());
    request.extend([0; 6]);
    driver.put(DATA, &request);
    driver.send(0, &[(DATA, 24, 0), (DATA + 64, 10, WRITE)]);
    assert_eq!(driver.answer(0).len, 10);
    let answer = driver.bytes(DATA + 64, 10);
    (u16::from_le_bytes([answer[0], answer[1]]), u16::from_le_bytes([answer[8], answer[9]]))
}

fn word(driver: &mut Driver<Mem>, offset: u64) -> u64 {
    u64::from_le_bytes(driver.config(offset))
}

const ACK: u16 = 0;
const NACK: u16 = 1;
const BUSY: u16 = 2;
const ERROR: u16 = 3;

#[test]
fn the_guest_is_told_where_the_region_is_and_how_much_it_is_to_have() {
    let (mut driver, control) = started();
    let numbers: Vec<u64> = (0..7).map(|n| word(&mut driver, 8 * n)).collect();
    assert_eq!(numbers, [BLOCK, 3, AT, REGION.len, 0, 0, 0]);
    let [generation] = driver.read(0x15);
    control.request(USABLE, 4 * MIB);
    driver.wait("an interrupt", |driver| driver.sent() == [0x40]);
    assert_ne!(driver.read(0x15), [generation]);
    assert_eq!([4, 5, 6].map(|n| word(&mut driver, 8 * n)), [USABLE, 0, 4 * MIB]);
    // The configuration is the host's.
    driver.write(0x430, &u64::MAX.to_le_bytes());
    assert_eq!(word(&mut driver, 48), 4 * MIB);
}

#[test]
fn blocks_are_plugged_up_to_what_is_wanted_and_lose_their_pages_when_they_go() {
    let (mut driver, control) = started();
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    control.on_change(Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    }));
    control.request(USABLE, 4 * MIB);
    assert_eq!(ask(&mut driver, request::PLUG, AT + BLOCK, 2), (ACK, 0));
    assert_eq!((word(&mut driver, 40), control.sizes().plugged), (4 * MIB, 4 * MIB));
    assert_eq!(ask(&mut driver, request::PLUG, AT, 1).0, NACK, "more than is wanted");
    for (at, count, state) in [(AT, 1, 1), (AT + BLOCK, 2, 0), (AT, 2, 2), (AT, 3, 2)] {
        assert_eq!(ask(&mut driver, request::STATE, at, count), (ACK, state), "{at:#x}");
    }
    driver.put(AT + BLOCK, &[0xAA; 4096]);
    driver.put(AT + 3 * BLOCK - 4096, &[0xAA; 4096]);
    control.request(0, 2 * MIB);
    assert_eq!(ask(&mut driver, request::UNPLUG, AT + 2 * BLOCK, 1).0, ACK);
    assert_eq!(driver.bytes(AT + 3 * BLOCK - 4096, 4096), [0; 4096], "its pages went");
    assert_eq!(driver.bytes(AT + BLOCK, 4096), [0xAA; 4096], "its neighbour's stay");
    assert_eq!((word(&mut driver, 32), word(&mut driver, 40)), (USABLE, 2 * MIB));
    assert_eq!(ask(&mut driver, request::UNPLUG_ALL, 0, 0).0, ACK);
    assert_eq!(ask(&mut driver, request::STATE, AT, 3), (ACK, 1));
    assert_eq!((driver.bytes(AT + BLOCK, 4096), control.sizes().plugged), (vec![0; 4096], 0));
    assert_eq!(told.load(Ordering::Relaxed), 3);
}

#[test]
fn requests_that_make_no_sense_change_nothing() {
    let (mut driver, control) = started();
    control.request(USABLE, USABLE);
    assert_eq!(ask(&mut driver, request::PLUG, AT, 1).0, ACK);
    for (kind, at, count) in [
        (request::PLUG, AT, 1),                   // it is plugged
        (request::PLUG, AT, 2),                   // one of them is
        (request::PLUG, AT + BLOCK, 0),           // none
        (request::PLUG, AT + MIB, 1),             // cut
        (request::PLUG, AT - BLOCK, 1),           // before the region
        (request::PLUG, AT + USABLE, 1),          // behind what can be used
        (request::PLUG, AT + BLOCK, u16::MAX),    // past the end
        (request::PLUG, u64::MAX - BLOCK + 1, 2), // past the end of everything
        (request::UNPLUG, AT, 2),                 // one of them is not plugged
        (request::UNPLUG, AT + BLOCK, 1),
        (request::STATE, AT + USABLE, 1),
        (request::STATE, 0, 1),
        (4, AT, 1),
        (u16::MAX, AT, 1),
    ] {
        assert_eq!(ask(&mut driver, kind, at, count), (ERROR, 0), "{kind} {at:#x} {count}");
    }
    assert_eq!(control.sizes().plugged, BLOCK);
    // A request without room for the answer, or cut.
    for parts in [&[(DATA, 24, 0), (DATA + 64, 8, WRITE)][..], &[(DATA, 23, 0), (DATA + 64, 10, WRITE)]] {
        let (mut driver, control) = started();
        control.request(USABLE, USABLE);
        driver.send(0, parts);
        driver.wait("the device to give up", Driver::gave_up);
    }
}

#[test]
fn a_reset_of_the_device_keeps_blocks_and_one_of_the_machine_takes_them() {
    let (mut driver, control) = started();
    control.request(USABLE, 4 * MIB);
    assert_eq!(ask(&mut driver, request::PLUG, AT, 2).0, ACK);
    driver.put(AT, &[0xAA; 16]);
    driver.write(0x14, &[0]);
    driver.set_up(u64::MAX);
    assert_eq!(ask(&mut driver, request::STATE, AT, 2), (ACK, 0));
    assert_eq!(driver.bytes(AT, 16), [0xAA; 16]);
    control.restart(&driver.memory.memory());
    assert_eq!((driver.bytes(AT, 16), control.sizes()), (vec![0; 16], Sizes { usable: USABLE, plugged: 0, requested: 4 * MIB }));
    assert_eq!(ask(&mut driver, request::PLUG, AT, 2).0, ACK);
    control.place(REGION);
    assert_eq!(control.sizes(), Sizes::default());
}

/// A host whose devices reach so many blocks at most.
#[derive(Default)]
struct Host {
    most: usize,
    maps: Mutex<BTreeSet<(u64, u64)>>,
}

impl Reach for Host {
    fn map(&self, at: u64, len: u64, _host_address: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut maps = self.maps.lock().unwrap();
        if maps.len() == self.most {
            return Err("too many".into());
        }
        assert!(maps.insert((at, len)), "mapped twice");
        Ok(())
    }

    fn unmap(&self, at: u64, len: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if self.maps.lock().unwrap().remove(&(at, len)) { Ok(()) } else { Err("not mapped so".into()) }
    }
}

#[test]
fn devices_of_the_host_reach_what_is_plugged_and_nothing_else() {
    let (mut driver, control) = started();
    control.request(USABLE, USABLE);
    assert_eq!(ask(&mut driver, request::PLUG, AT, 1).0, ACK);
    let host = Arc::new(Host { most: 2, ..Host::default() });
    let maps = |host: &Host| host.maps.lock().unwrap().iter().map(|(at, len)| (at - AT, *len)).collect::<Vec<_>>();
    control.reach(host.clone(), &driver.memory.memory(), &|_| true).unwrap();
    assert_eq!(maps(&host), [(0, BLOCK)]);
    assert_eq!(ask(&mut driver, request::PLUG, AT + BLOCK, 2).0, BUSY, "one more than the host takes");
    assert_eq!((maps(&host), control.sizes().plugged), (vec![(0, BLOCK)], BLOCK));
    assert_eq!(ask(&mut driver, request::PLUG, AT + 2 * BLOCK, 1).0, ACK);
    assert_eq!(maps(&host), [(0, BLOCK), (2 * BLOCK, BLOCK)]);
    assert_eq!(ask(&mut driver, request::UNPLUG, AT, 1).0, ACK);
    assert_eq!(maps(&host), [(2 * BLOCK, BLOCK)]);
    assert_eq!(ask(&mut driver, request::UNPLUG_ALL, 0, 0).0, ACK);
    assert_eq!(maps(&host), []);
    // Devices that cannot reach all of it reach none.
    assert_eq!(ask(&mut driver, request::PLUG, AT, 1).0, ACK);
    let full = Arc::new(Host::default());
    assert!(matches!(control.reach(full, &driver.memory.memory(), &|_| true), Err(MemError::Map { at: AT, .. })));
    // While they are let to what is there, which may take minutes, the guest's requests do not wait.
    let memory = driver.memory.memory().clone();
    let meanwhile = |_| {
        let answers = [
            control.plug(AT + BLOCK, 1, &memory, &|| None),
            control.unplug(AT, 1, &memory),
            control.unplug_all(&memory),
            control.state(AT, 1).unwrap_err(),
        ];
        assert_eq!(answers, [Outcome::Busy; 4]);
        true
    };
    let slow = Arc::new(Host { most: 9, ..Host::default() });
    control.reach(slow.clone(), &memory, &meanwhile).unwrap();
    control.unreach();
    // One that has to stand still answers before it has taken all of them.
    assert_eq!(control.plug(AT + BLOCK, 2, &memory, &|| Some(Outcome::Busy)), Outcome::Busy);
    assert_eq!((maps(&slow), control.sizes().plugged), (vec![], BLOCK));
    let stopped = Arc::new(Host { most: 9, ..Host::default() });
    assert!(matches!(control.reach(stopped.clone(), &driver.memory.memory(), &|_| false), Err(MemError::Stopped)));
    assert_eq!(maps(&stopped), []);
}

#[test]
fn a_file_that_others_map_loses_the_pages_too() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(RAM as u64).unwrap();
    let ranges = [(GuestAddress(0), RAM, Some(vm_memory::FileOffset::new(file.try_clone().unwrap(), 0)))];
    let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
    let control = control();
    let mut driver = Driver::with_memory(Mem::new("mem0", Arc::clone(&control)), memory);
    driver.set_up(u64::MAX);
    control.request(USABLE, USABLE);
    assert_eq!(ask(&mut driver, request::PLUG, AT, 1).0, ACK);
    driver.put(AT, &[0xAA; 4096]);
    assert_eq!(ask(&mut driver, request::UNPLUG, AT, 1).0, ACK);
    let mut seen = [1; 16];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, AT).unwrap();
    assert_eq!(seen, [0; 16]);
}

#[test]
fn blocks_grow_with_the_region_so_that_each_can_be_mapped_by_itself() {
    for (len, page, block) in
        [(1 << 30, 4096, 2 << 20), (64 << 30, 4096, 2 << 20), (65 << 30, 4096, 4 << 20), (1 << 40, 4096, 32 << 20)]
    {
        assert_eq!(Region::block(len, page, 1), block, "{len}");
        // All regions together have no more blocks than one.
        assert_eq!(Region::block(len / 4, page, 4), block, "four of {}", len / 4);
    }
    assert_eq!(Region::block(1 << 30, 1 << 30, 2), 1 << 30);
    assert!(Region::block(u64::MAX, 4096, u64::MAX).is_power_of_two());
}

#[test]
fn hostile_rings_neither_panic_nor_hang() {
    survives_hostile_rings(|| {
        let control = control();
        control.request(USABLE, USABLE);
        Mem::new("mem0", control)
    });
}
