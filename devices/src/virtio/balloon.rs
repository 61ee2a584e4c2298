//! Memory that the guest gives back (virtio 1.2 5.5): pages in the balloon, and free pages that the guest reports, go back to
//! the host until the guest touches them again.
//!
//! Memory that a device of the host may write must stay where it is: from the moment on when there is such a device, nothing
//! is given back.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use pci::state::{Reader, StateError, Writer};
use pci::sync::{lock, read, write};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::buffers::Buffers;
use super::function::{Device, Start};
use super::kind::Kind;
use super::pages;
use super::ring::{Chain, Ring, Served};
use super::signals::Signals;
use super::worker::{Stop, Worker};

/// Bytes of a page as the balloon counts them.
pub const PAGE: u64 = 4096;
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;
const QUEUE_SIZES: [u16; 3] = [128; 3];
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// Without statistics and hints the third queue is that of reports (virtio 1.2 5.5.2).
const REPORTING: usize = 2;
/// `actual` in the configuration.
const ACTUAL: usize = 4;

/// A balloon to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BalloonSpec {
    /// The guest may take pages back before it kills a process.
    pub deflate_on_oom: bool,
    /// The guest may tell which pages it does not use.
    pub free_page_reporting: bool,
}

/// The balloon's size, what the host wants and what the guest has reached, and whether it may hold anything.
#[derive(Default)]
pub struct BalloonControl {
    wanted: AtomicU32,
    /// Bytes.
    actual: Arc<AtomicU64>,
    /// Held while memory is given back: none is any more when [`BalloonControl::pin`] returns.
    pinned: RwLock<bool>,
    signals: Mutex<Option<Arc<Signals>>>,
}

impl BalloonControl {
    /// A balloon that shall have `bytes`, in whole pages.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        let control = Self::default();
        control.wanted.store(pages(bytes), Ordering::Release);
        Arc::new(control)
    }

    /// From here on devices of the host may write to any page: the guest is asked to take back what is in the balloon. Waits
    /// for memory that is being given back at this moment; afterwards none is, so that what is pinned next stays in its place.
    pub fn pin(&self) {
        *write(&self.pinned) = true;
        self.ask(0);
    }

    /// Whether devices of the host may write to any page.
    #[must_use]
    pub fn pinned(&self) -> bool {
        *read(&self.pinned)
    }

    /// Gives memory back by `give`, unless devices of the host may write to it. They may not before `give` has returned.
    fn unless_pinned(&self, give: impl FnOnce()) {
        let pinned = read(&self.pinned);
        if !*pinned {
            give();
        }
    }

    /// Asks the guest for a balloon of `bytes`, in whole pages.
    pub fn ask(&self, bytes: u64) {
        self.wanted.store(pages(bytes), Ordering::Release);
        if let Some(signals) = &*lock(&self.signals) {
            signals.config_changed();
        }
    }

    /// Bytes that the guest is asked for.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        u64::from(self.wanted.load(Ordering::Acquire)) * PAGE
    }

    /// Bytes in the balloon, as the guest says. Never more than the guest was ever asked for.
    #[must_use]
    pub fn actual(&self) -> u64 {
        self.actual.load(Ordering::Acquire)
    }

    /// Where [`BalloonControl::actual`] can be read at any time.
    #[must_use]
    pub fn gauge(&self) -> Arc<AtomicU64> {
        self.actual.clone()
    }

    /// The guest says that there are `pages` in the balloon: no more than are wanted, or than there were, for it only grows to
    /// what is wanted.
    fn reached(&self, pages: u32) {
        let (told, wanted) = (u64::from(pages) * PAGE, self.wanted());
        // The closure always gives a value.
        let _ = self.actual.fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| Some(told.min(before.max(wanted))));
    }

    /// Whom to tell of changes.
    pub fn connect(&self, signals: Arc<Signals>) {
        *lock(&self.signals) = Some(signals);
    }
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE).unwrap_or(u32::MAX)
}

/// What is particular to a balloon.
pub struct Balloon {
    thread_name: String,
    features: u64,
    control: Arc<BalloonControl>,
    config: [u8; 8],
}

impl Balloon {
    /// The device `name`. Whoever wants another size says so to `control`.
    #[must_use]
    pub fn new(name: &str, spec: BalloonSpec, control: Arc<BalloonControl>) -> Self {
        let deflate = if spec.deflate_on_oom { F_DEFLATE_ON_OOM } else { 0 };
        let report = if spec.free_page_reporting && !control.pinned() { F_REPORTING } else { 0 };
        Self { thread_name: name.to_owned(), features: deflate | report, control, config: [0; 8] }
    }
}

impl Device for Balloon {
    fn kind(&self) -> Kind {
        Kind::Balloon
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        if self.features & F_REPORTING == 0 { QUEUE_SIZES.get(..REPORTING).unwrap_or_default() } else { &QUEUE_SIZES }
    }

    fn config(&self) -> Cow<'_, [u8]> {
        // `num_pages`, then `actual`.
        let wanted = self.control.wanted.load(Ordering::Acquire).to_le_bytes();
        let mut config = self.config;
        config.iter_mut().zip(wanted).for_each(|(to, from)| *to = from);
        Cow::Owned(config.to_vec())
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(place) = self.config.get_mut(at).filter(|_| at >= ACTUAL) {
                *place = *byte;
            }
        }
        let [_, _, _, _, actual @ ..] = self.config;
        self.control.reached(u32::from_le_bytes(actual));
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let crew = start.crew;
        let worker = |ring: Ring| {
            let (index, bell) = (ring.index(), ring.bell().clone());
            let name = format!("bal{index}-{}", self.thread_name);
            let control = self.control.clone();
            Worker::start(name, &crew, vec![bell], move |stop| {
                ring.run(stop, |chain, memory| match index {
                    INFLATE => inflate(chain, memory, &control, stop),
                    DEFLATE => Served::Used(0),
                    _ => report(chain, memory, &control, stop),
                });
            })
        };
        start.rings.into_iter().map(worker).collect()
    }

    fn save(&self, writer: &mut Writer) -> Result<(), StateError> {
        writer.u32(self.control.wanted.load(Ordering::Acquire));
        writer.u32(pages(self.control.actual()));
        Ok(())
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.control.wanted.store(reader.u32()?, Ordering::Release);
        let actual = reader.u32()?;
        self.control.reached(actual);
        self.config.iter_mut().skip(ACTUAL).zip(actual.to_le_bytes()).for_each(|(to, from)| *to = from);
        Ok(())
    }

    fn reset(&mut self) {
        self.config = [0; 8];
        self.control.reached(0);
    }
}

/// Takes the pages whose numbers the chain lists. The guest keeps away from them even if they stay where they are.
fn inflate(chain: Chain<'_>, memory: &GuestMemoryMmap, control: &BalloonControl, stop: &Stop) -> Served {
    let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.writable.is_empty());
    let Some(Buffers { readable, .. }) = buffers else { return Served::Malformed };
    let mut run = Run::default();
    let mut number = [0; 4];
    for slice in &readable {
        // A number that is cut by the end of its part is none; Linux has all in one.
        for at in (0..slice.len() / 4 * 4).step_by(4) {
            if stop.stopped() {
                return Served::Stopped;
            }
            if slice.read_slice(&mut number, at).is_err() {
                return Served::Malformed;
            }
            run.add(u64::from(u32::from_le_bytes(number)), memory, control);
        }
    }
    run.release(memory, control);
    Served::Used(0)
}

/// Neighbouring pages that go back in one step; Linux gives them from the top down or from the bottom up.
#[derive(Default)]
struct Run {
    first: u64,
    count: u64,
}

impl Run {
    fn add(&mut self, page: u64, memory: &GuestMemoryMmap, control: &BalloonControl) {
        if self.count > 0 && page == self.first + self.count {
            self.count += 1;
        } else if self.count > 0 && page + 1 == self.first {
            self.first = page;
            self.count += 1;
        } else {
            self.release(memory, control);
            *self = Self { first: page, count: 1 };
        }
    }

    fn release(&mut self, memory: &GuestMemoryMmap, control: &BalloonControl) {
        let (at, len) = (GuestAddress(self.first * PAGE), self.count * PAGE);
        self.count = 0;
        control.unless_pinned(|| give_back(memory, at, len));
    }
}

/// Takes the pages that the chain itself consists of. They are read as zeros afterwards, if at all.
fn report(chain: Chain<'_>, memory: &GuestMemoryMmap, control: &BalloonControl, stop: &Stop) -> Served {
    let parts: Vec<_> = chain.map(|part| (part.addr(), part.len(), part.is_write_only())).collect();
    for (at, len, writable) in parts {
        if stop.stopped() {
            return Served::Stopped;
        }
        let len = u64::from(len);
        if writable && at.0.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) {
            control.unless_pinned(|| give_back(memory, at, len));
        }
    }
    Served::Used(0)
}

/// Frees the host's memory. What cannot be freed, such as a part of a huge page, stays.
fn give_back(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) {
    if let Err(error) = pages::give_back(memory, at, len) {
        log::debug!("cannot give memory back: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{DATA, Driver, RAM, WRITE, survives_hostile_rings};

    const ALL: BalloonSpec = BalloonSpec { deflate_on_oom: true, free_page_reporting: true };
    const PAGES: u64 = DATA + (1 << 20);

    fn started(spec: BalloonSpec, bytes: u64) -> (Driver<Balloon>, Arc<BalloonControl>) {
        let size = BalloonControl::new(bytes);
        let driver = Driver::started(Balloon::new("balloon0", spec, size.clone()));
        size.connect(driver.function.signals());
        (driver, size)
    }

    fn inflate(driver: &mut Driver<Balloon>, numbers: &[u32]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        driver.put(DATA, &bytes);
        driver.send(INFLATE, &[(DATA, u32::try_from(bytes.len()).unwrap(), 0)]);
        driver.answer(INFLATE);
    }

    fn page(n: u64) -> u32 {
        u32::try_from(PAGES / PAGE + n).unwrap()
    }

    #[test]
    fn the_guest_is_told_the_size_that_is_wanted_and_tells_what_it_reached() {
        let (mut driver, size) = started(ALL, 8 << 20);
        assert_eq!(driver.config(0), 2048_u32.to_le_bytes());
        let [generation] = driver.read(0x15);
        size.ask(4 << 20);
        driver.wait("an interrupt", |driver| driver.sent() == [0x40]);
        assert_eq!(driver.config(0), 1024_u32.to_le_bytes());
        assert_ne!(driver.read(0x15), [generation]);
        driver.write(0x404, &1000_u32.to_le_bytes());
        driver.write(0x400, &[0xFF; 4]);
        assert_eq!((size.actual(), size.wanted()), (1000 * PAGE, 4 << 20));
        assert_eq!(driver.config(4), 1000_u32.to_le_bytes());
        driver.write(0x14, &[0]);
        assert_eq!((size.actual(), size.wanted()), (0, 4 << 20));
    }

    #[test]
    fn a_guest_cannot_tell_of_more_than_it_was_asked_for() {
        let (mut driver, size) = started(ALL, 8 << 20);
        let tell = |driver: &mut Driver<Balloon>, pages: u32| {
            driver.write(0x404, &pages.to_le_bytes());
            size.actual() / PAGE
        };
        assert_eq!(tell(&mut driver, u32::MAX), 2048);
        size.ask(4 << 20);
        let told = [2000, 2048, 1500, u32::MAX, 1024].map(|pages| tell(&mut driver, pages));
        assert_eq!(told, [2000, 2000, 1500, 1500, 1024], "it shrinks, and says so as it does");
        assert_eq!(tell(&mut driver, u32::MAX), 1024);
        driver.write(0x14, &[0]);
        size.ask(0);
        assert_eq!(tell(&mut driver, u32::MAX), 0);
    }

    #[test]
    fn pages_in_the_balloon_go_back_to_the_host_and_their_neighbours_stay() {
        let (mut driver, _) = started(ALL, 1 << 20);
        driver.put(PAGES, &[0xAA; 8 * 4096]);
        inflate(&mut driver, &[page(1), page(2), page(3), page(6), page(5), u32::MAX, 0xFFFF]);
        let left: Vec<bool> = (0..8).map(|n| driver.bytes(PAGES + n * PAGE, 4096) == [0xAA; 4096]).collect();
        assert_eq!(left, [true, false, false, false, true, false, false, true]);
        driver.put(PAGES + PAGE, &[0xBB; 4096]);
        driver.send(DEFLATE, &[(DATA, 4, 0)]);
        driver.answer(DEFLATE);
        assert_eq!(driver.bytes(PAGES + PAGE, 4096), [0xBB; 4096], "a page that is taken back keeps what is written");
    }

    #[test]
    fn reported_pages_go_back_and_parts_of_pages_stay() {
        let (mut driver, _) = started(ALL, 0);
        driver.put(PAGES, &[0xAA; 8 * 4096]);
        driver.send(REPORTING, &[(PAGES, 8192, WRITE), (PAGES + 3 * PAGE, 4096, WRITE), (PAGES + 5 * PAGE + 8, 4096, WRITE)]);
        driver.answer(REPORTING);
        let left: Vec<bool> = (0..8).map(|n| driver.bytes(PAGES + n * PAGE, 4096) == [0xAA; 4096]).collect();
        assert_eq!(left, [false, false, true, false, true, true, true, true]);
    }

    #[test]
    fn memory_that_devices_of_the_host_reach_stays() {
        let (mut driver, control) = started(ALL, 1 << 20);
        control.pin();
        assert_eq!(driver.config(0), [0; 4]);
        driver.put(PAGES, &[0xAA; 4096]);
        inflate(&mut driver, &[page(0)]);
        driver.send(REPORTING, &[(PAGES, 4096, WRITE)]);
        driver.answer(REPORTING);
        assert_eq!(driver.bytes(PAGES, 4096), [0xAA; 4096]);
        let mut later = Driver::new(Balloon::new("balloon0", ALL, control));
        assert_eq!(later.read(0x12), [2, 0], "no queue for reports");
    }

    #[test]
    fn memory_that_is_being_given_back_is_waited_for_before_devices_of_the_host_come() {
        let control = BalloonControl::new(0);
        let (giving, pinned) = (std::sync::Barrier::new(2), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                control.unless_pinned(|| {
                    giving.wait();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    assert!(!pinned.load(Ordering::Acquire), "pinned while memory was given back");
                });
            });
            giving.wait();
            control.pin();
            pinned.store(true, Ordering::Release);
        });
        control.unless_pinned(|| panic!("memory that is pinned was given back"));
    }

    #[test]
    fn a_chain_of_page_numbers_without_end_does_not_hold_up_a_reset() {
        let (mut driver, _) = started(ALL, 0);
        let part = (0, u32::try_from(RAM).unwrap(), 0);
        driver.send(INFLATE, &[part; 60]);
        std::thread::sleep(std::time::Duration::from_millis(5));
        let start = std::time::Instant::now();
        driver.write(0x14, &[0]);
        assert!(start.elapsed() < std::time::Duration::from_secs(5));
    }

    #[test]
    fn hostile_rings_neither_panic_nor_hang() {
        survives_hostile_rings(|| Balloon::new("balloon0", ALL, BalloonControl::new(0)));
    }
}
