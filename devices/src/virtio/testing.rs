//! A driver for tests: finds and starts a device as a guest does, by configuration cycles, BAR accesses and guest memory.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pci::access::{Access, Lanes, Reg};
use pci::emulated::Attachment;
use pci::function::PciFunction;
use pci::testing::FakeMsi;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

use super::function::{Device, Seat, VirtioFunction};
use super::ring::Memory;

pub(super) const WRITE: u16 = 2;
pub(super) const RAM: usize = 16 << 20;
/// Memory that no ring uses, up to the end of RAM.
pub(super) const DATA: u64 = 8 << 20;
/// Entries of every queue, unless the device has fewer.
pub(super) const ENTRIES: u16 = 64;
/// Where the available and the used ring of a queue lie, from [`place`] on.
pub(super) const AVAILABLE: u64 = 0x1000;
pub(super) const USED: u64 = 0x2000;
/// Longest time for anything.
const LIMIT: Duration = Duration::from_secs(20);

/// Where queue `n` has its rings.
pub(super) const fn place(n: usize) -> u64 {
    0x1_0000 * (n as u64 + 1)
}

#[derive(Default, Clone, Copy)]
struct Lane {
    entries: u16,
    next: u16,
    offered: u16,
    used: u16,
}

/// A buffer that came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) head: u16,
    pub(super) len: u32,
}

/// What is told from now on of what `function` can no longer do.
pub(super) fn heard<D: Device>(function: &mut VirtioFunction<D>) -> Arc<Mutex<Vec<String>>> {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&heard);
    function.report_to(Arc::new(move |why| told.lock().unwrap().push(why.to_owned())));
    heard
}

/// The driver and its machine.
pub(super) struct Driver<D: Device> {
    pub(super) function: VirtioFunction<D>,
    pub(super) memory: Memory,
    msi: Arc<FakeMsi>,
    lanes: Vec<Lane>,
}

impl<D: Device> Driver<D> {
    /// A machine with `device`, which nobody has touched.
    pub(super) fn new(device: D) -> Self {
        Self::with_memory(device, GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap())
    }

    /// The same with other memory of [`RAM`] bytes from address 0.
    pub(super) fn with_memory(device: D, memory: GuestMemoryMmap) -> Self {
        Self::on(Attachment::RootBus, device, memory)
    }

    /// The same elsewhere.
    pub(super) fn on(on: Attachment, device: D, memory: GuestMemoryMmap) -> Self {
        let memory = Memory::new(memory);
        let msi = Arc::new(FakeMsi::default());
        let function = VirtioFunction::with_device(device, Seat { memory: memory.clone(), msi: msi.clone(), on }).unwrap();
        Self { function, memory, msi, lanes: Vec::new() }
    }

    /// A machine whose device is started with all features.
    pub(super) fn started(device: D) -> Self {
        let mut driver = Self::new(device);
        driver.set_up(u64::MAX);
        driver
    }

    /// The messages that signals of other processes' eventfds deliver.
    pub(super) fn events(&self) -> Vec<Option<u32>> {
        self.msi.events().iter().map(|event| event.map(|message| message.data)).collect()
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        self.function.bar_write(0, offset, data);
    }

    pub(super) fn read<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.function.bar_read(0, offset, &mut data);
        data
    }

    /// Device configuration at `offset`.
    pub(super) fn config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        self.read(0x400 + offset)
    }

    pub(super) fn status(&mut self) -> u8 {
        let [status] = self.read(0x14);
        status
    }

    /// Starts the device with as many of the offered features as `wanted`. Vector n sends 0x40 + n: 0 for the configuration,
    /// 1 + n for queue n.
    pub(super) fn set_up(&mut self, wanted: u64) {
        self.function.config_write(Access { reg: Reg::containing(4), lanes: Lanes::new(0, 2) }, 6);
        let [low, high] = self.read(0x12);
        let queues = u16::from_le_bytes([low, high]);
        for n in 0..=u64::from(queues) {
            self.write(0x1008 + 16 * n, &(0x40 + u32::try_from(n).unwrap()).to_le_bytes());
            self.write(0x100C + 16 * n, &[0; 4]);
        }
        let read = |at: u8| self.function.registers_read(at);
        let msix = pci::caps::walk(read).into_iter().find(|extent| read(extent.offset) & 0xFF == 0x11).unwrap().offset;
        self.function.config_write(Access::dword(msix.into()), 0x8000_0000);
        self.write(0x14, &[1]);
        self.write(0x14, &[3]);
        for half in 0..2_u32 {
            self.write(0x00, &half.to_le_bytes());
            let offered = u64::from(u32::from_le_bytes(self.read(0x04)));
            let taken = u32::try_from(offered & (wanted >> (32 * half))).unwrap();
            self.write(0x08, &half.to_le_bytes());
            self.write(0x0C, &taken.to_le_bytes());
        }
        self.write(0x14, &[0x0B]);
        assert_eq!(self.status(), 0x0B);
        self.write(0x10, &[0, 0]);
        self.lanes = (0..queues).map(|n| self.set_up_queue(n)).collect();
        self.write(0x14, &[0x0F]);
    }

    fn set_up_queue(&mut self, n: u16) -> Lane {
        self.write(0x16, &n.to_le_bytes());
        let entries = ENTRIES.min(u16::from_le_bytes(self.read(0x18)));
        let at = place(n.into());
        self.put(at, &[0; 0x3000]);
        self.write(0x18, &entries.to_le_bytes());
        self.write(0x1A, &(n + 1).to_le_bytes());
        self.write(0x20, &at.to_le_bytes());
        self.write(0x28, &(at + AVAILABLE).to_le_bytes());
        self.write(0x30, &(at + USED).to_le_bytes());
        self.write(0x1C, &[1, 0]);
        Lane { entries, ..Lane::default() }
    }

    pub(super) fn put(&self, at: u64, data: &[u8]) {
        self.memory.memory().write_slice(data, GuestAddress(at)).unwrap();
    }

    pub(super) fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.memory().read_slice(&mut data, GuestAddress(at)).unwrap();
        data
    }

    fn half_word(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.bytes(at, 2).try_into().unwrap())
    }

    /// Writes descriptors (address, length, flags) that follow each other from number `first` of queue `queue`.
    pub(super) fn describe(&self, queue: usize, first: u16, parts: &[(u64, u32, u16)]) {
        let entries = self.lanes[queue].entries;
        for (n, (address, len, flags)) in (0_u16..).zip(parts) {
            let last = usize::from(n) + 1 == parts.len();
            let (here, next) = ((first + n) % entries, (first + n + 1) % entries);
            let descriptor = RawDescriptor::from(Descriptor::new(*address, *len, flags | u16::from(!last), next));
            self.memory.memory().write_obj(descriptor, GuestAddress(place(queue) + 16 * u64::from(here))).unwrap();
        }
    }

    /// Makes a chain available without ringing; its head.
    pub(super) fn offer(&mut self, queue: usize, parts: &[(u64, u32, u16)]) -> u16 {
        let head = self.lanes[queue].next;
        self.describe(queue, head, parts);
        let lane = &mut self.lanes[queue];
        lane.next = (lane.next + u16::try_from(parts.len()).unwrap()) % lane.entries;
        self.make_available(queue, head);
        head
    }

    fn try_offer(&mut self, queue: usize, parts: &[(u64, u32, u16)]) {
        self.offer(queue, parts);
    }

    pub(super) fn make_available(&mut self, queue: usize, head: u16) {
        let lane = &mut self.lanes[queue];
        let slot = lane.offered % lane.entries;
        lane.offered = lane.offered.wrapping_add(1);
        let index = lane.offered;
        let at = place(queue) + AVAILABLE;
        self.put(at + 4 + 2 * u64::from(slot), &head.to_le_bytes());
        self.put(at + 2, &index.to_le_bytes());
    }

    pub(super) fn ring(&mut self, queue: usize) {
        let number = u16::try_from(queue).unwrap();
        self.write(0x200 + 4 * queue as u64, &number.to_le_bytes());
    }

    /// Makes a chain available and rings.
    pub(super) fn send(&mut self, queue: usize, parts: &[(u64, u32, u16)]) -> u16 {
        let head = self.offer(queue, parts);
        self.ring(queue);
        head
    }

    /// How many buffers of a queue came back so far, modulo 65536.
    pub(super) fn came_back(&self, queue: usize) -> u16 {
        self.half_word(place(queue) + USED + 2)
    }

    /// The next buffer that came back, if one did.
    pub(super) fn poll(&mut self, queue: usize) -> Option<Used> {
        let at = place(queue) + USED;
        let index = self.came_back(queue);
        let lane = &mut self.lanes[queue];
        if index == lane.used {
            return None;
        }
        let slot = lane.used % lane.entries;
        lane.used = lane.used.wrapping_add(1);
        let element = self.bytes(at + 4 + 8 * u64::from(slot), 8);
        let [a, b, _, _, len @ ..]: [u8; 8] = element.try_into().unwrap();
        Some(Used { head: u16::from_le_bytes([a, b]), len: u32::from_le_bytes(len) })
    }

    /// Waits for the next buffer that comes back.
    pub(super) fn answer(&mut self, queue: usize) -> Used {
        let mut used = None;
        self.wait("an answer", |driver| {
            used = driver.poll(queue);
            used.is_some()
        });
        used.unwrap()
    }

    pub(super) fn wait(&mut self, what: &str, mut reached: impl FnMut(&mut Self) -> bool) {
        let limit = Instant::now() + LIMIT;
        while !reached(self) {
            assert!(Instant::now() < limit, "{what} takes too long");
            std::thread::yield_now();
        }
    }

    /// Data of the interrupts since the last call.
    pub(super) fn sent(&self) -> Vec<u32> {
        self.msi.take().iter().map(|message| message.data).collect()
    }

    /// Whether the device asks for a reset.
    pub(super) fn gave_up(&mut self) -> bool {
        self.status() & 0x40 != 0
    }
}

/// Sends rings of every broken kind to each queue of the devices that `make` makes, and arbitrary bytes in place of rings.
/// Nothing may panic or hang; afterwards the device can be reset and started again.
pub(super) fn survives_hostile_rings<D: Device>(make: impl Fn() -> D) {
    let queues = make().queue_sizes().len();
    type Break<D> = fn(&mut Driver<D>, usize);
    let breaks: [Break<D>; 10] = [
        // Buffers that may not be touched: bus mastering is off.
        |driver, queue| {
            driver.offer(queue, &[(DATA, 64, WRITE)]);
            driver.function.config_write(Access { reg: Reg::containing(4), lanes: Lanes::new(0, 2) }, 2);
        },
        // A chain that is a loop.
        |driver, queue| {
            let descriptor = RawDescriptor::from(Descriptor::new(DATA, 16, 1, 0));
            driver.memory.memory().write_obj(descriptor, GuestAddress(place(queue))).unwrap();
            driver.make_available(queue, 0);
        },
        // A head that does not exist.
        |driver, queue| driver.make_available(queue, 0xFFFF),
        // More buffers than there are entries.
        |driver, queue| driver.put(place(queue) + AVAILABLE + 2, &0x8000_u16.to_le_bytes()),
        // Outside of RAM, or past its end.
        |driver, queue| driver.try_offer(queue, &[(u64::MAX - 4, 64, 0), (0xFFFF_0000, 64, WRITE)]),
        |driver, queue| driver.try_offer(queue, &[(RAM as u64 - 8, 64, 0), (RAM as u64 - 8, u32::MAX, WRITE)]),
        // Lengths that no device can mean.
        |driver, queue| driver.try_offer(queue, &[(DATA, u32::MAX, 0)]),
        |driver, queue| driver.try_offer(queue, &[(0, u32::MAX, WRITE), (DATA, 0, WRITE)]),
        // Writable before readable.
        |driver, queue| driver.try_offer(queue, &[(DATA, 8, WRITE), (DATA, 8, 0)]),
        // A table of descriptors that is cut off, in itself.
        |driver, queue| driver.try_offer(queue, &[(place(queue), 17, 4)]),
    ];
    for queue in 0..queues {
        for what in breaks {
            let mut driver = Driver::started(make());
            what(&mut driver, queue);
            for queue in 0..queues {
                driver.ring(queue);
            }
            std::thread::sleep(Duration::from_millis(2));
            driver.write(0x14, &[0]);
            assert_eq!(driver.status(), 0);
            driver.set_up(u64::MAX);
        }
    }
    let mut seed = 0x2545_F491_4F6C_DD1D_u64;
    for _ in 0..32 {
        let mut driver = Driver::started(make());
        for queue in 0..queues {
            let mut noise = [0; 0x3000];
            for byte in &mut noise {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                // Small numbers are more often meant.
                *byte = if seed & 0x300 == 0 { seed.to_le_bytes()[0] } else { seed.to_le_bytes()[0] & 3 };
            }
            driver.put(place(queue), &noise);
            driver.put(place(queue) + AVAILABLE + 2, &[seed.to_le_bytes()[3] % 65, 0]);
            driver.ring(queue);
        }
        std::thread::sleep(Duration::from_millis(1));
        driver.write(0x14, &[0]);
        assert_eq!(driver.status(), 0);
    }
}
