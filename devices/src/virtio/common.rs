//! The common configuration registers of virtio's PCI transport: what each keeps, and what a write sets off (virtio 1.2
//! 4.1.4.3). Touches no queue and no thread.

use pci::access::{Access, Reg};
use pci::state::{Reader, StateError, Writer};

use super::feature;

/// Bytes of the structure.
pub const LEN: u16 = 0x38;
/// A vector register that leads nowhere.
pub const NO_VECTOR: u16 = 0xFFFF;

/// Bits of the device status register (virtio 1.2 2.1).
pub mod status {
    /// The guest has a driver for it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// The driver's features are accepted.
    pub const FEATURES_OK: u8 = 8;
    /// The device gave up and wants a reset.
    pub const NEEDS_RESET: u8 = 0x40;
}

/// What a register write sets off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The driver is ready: queues run.
    Start,
    /// Everything back to the beginning.
    Reset,
    /// A vector register changed.
    Vectors,
}

/// Registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueRegs {
    /// Most entries.
    pub max_size: u16,
    /// Entries that the driver wants.
    pub size: u16,
    /// Vector for used buffers.
    pub vector: u16,
    /// Whether the driver has set it up.
    pub enabled: bool,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the driver area (available ring).
    pub driver: u64,
    /// Guest address of the device area (used ring).
    pub device: u64,
}

impl QueueRegs {
    const fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, vector: NO_VECTOR, enabled: false, descriptors: 0, driver: 0, device: 0 }
    }
}

/// The registers.
#[derive(Debug, Clone)]
pub struct CommonRegs {
    offered: u64,
    vectors: u16,
    device_select: u32,
    driver_select: u32,
    /// Features that the driver wrote, accepted or not.
    pub features: u64,
    /// Vector for configuration changes and errors.
    pub vector: u16,
    /// Device status.
    pub status: u8,
    /// Changes with the device configuration, so that a driver sees that what it read belongs together.
    pub generation: u8,
    selected: u16,
    /// Queues, by number.
    pub queues: Vec<QueueRegs>,
}

impl CommonRegs {
    /// Registers of a device with `offered` features, queues of at most `sizes` entries and `vectors` MSI-X vectors.
    #[must_use]
    pub fn new(offered: u64, sizes: &[u16], vectors: u16) -> Self {
        Self {
            offered,
            vectors,
            device_select: 0,
            driver_select: 0,
            features: 0,
            vector: NO_VECTOR,
            status: 0,
            generation: 0,
            selected: 0,
            queues: sizes.iter().copied().map(QueueRegs::new).collect(),
        }
    }

    /// Everything back to the beginning.
    pub fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.max_size).collect();
        *self = Self { generation: self.generation, ..Self::new(self.offered, &sizes, self.vectors) };
    }

    /// One dword of the structure; 0 past its end and for queues that do not exist.
    #[must_use]
    pub fn read(&self, reg: Reg) -> u32 {
        let queue = self.queues.get(usize::from(self.selected));
        let address = |of: fn(&QueueRegs) -> u64| queue.map_or(0, of);
        match reg.offset() {
            0x00 => self.device_select,
            0x04 => half(self.offered, self.device_select),
            0x08 => self.driver_select,
            0x0C => half(self.features, self.driver_select),
            0x10 => pair(self.vector, u16::try_from(self.queues.len()).unwrap_or(u16::MAX)),
            0x14 => pair(u16::from_le_bytes([self.status, self.generation]), self.selected),
            0x18 => pair(queue.map_or(0, |q| q.size), queue.map_or(NO_VECTOR, |q| q.vector)),
            // The doorbell of each queue is numbered as the queue.
            0x1C => pair(queue.map_or(0, |q| q.enabled.into()), queue.map_or(0, |_| self.selected)),
            0x20 => half(address(|q| q.descriptors), 0),
            0x24 => half(address(|q| q.descriptors), 1),
            0x28 => half(address(|q| q.driver), 0),
            0x2C => half(address(|q| q.driver), 1),
            0x30 => half(address(|q| q.device), 0),
            0x34 => half(address(|q| q.device), 1),
            _ => 0,
        }
    }

    /// Writes the carried bytes of one dword.
    pub fn write(&mut self, access: Access, value: u32) -> Option<Event> {
        let new = access.merge(self.read(access.reg), value);
        let [low, high] = words(new);
        let vectors = self.vectors;
        let known = |vector: u16| if vector < vectors { vector } else { NO_VECTOR };
        match access.reg.offset() {
            0x00 => self.device_select = new,
            0x08 => self.driver_select = new,
            0x0C if self.status & status::FEATURES_OK == 0 => set_half(&mut self.features, self.driver_select, new),
            0x10 if access.lanes.touch(0xFFFF) => {
                self.vector = known(low);
                return Some(Event::Vectors);
            }
            0x14 => {
                self.selected = high;
                if access.lanes.touch(0xFF) {
                    return self.write_status(new.to_le_bytes()[0]);
                }
            }
            _ => return self.write_queue(access, new, known),
        }
        None
    }

    fn write_queue(&mut self, access: Access, new: u32, known: impl Fn(u16) -> u16) -> Option<Event> {
        let queue = self.queues.get_mut(usize::from(self.selected))?;
        let [low, high] = words(new);
        match access.reg.offset() {
            0x18 => {
                if !queue.enabled && low.is_power_of_two() && low <= queue.max_size {
                    queue.size = low;
                }
                if access.lanes.touch(0xFFFF_0000) {
                    queue.vector = known(high);
                    return Some(Event::Vectors);
                }
            }
            0x1C => queue.enabled |= low == 1 && access.lanes.touch(0xFFFF),
            // A queue that is enabled keeps its place.
            _ if queue.enabled => {}
            0x20 => set_half(&mut queue.descriptors, 0, new),
            0x24 => set_half(&mut queue.descriptors, 1, new),
            0x28 => set_half(&mut queue.driver, 0, new),
            0x2C => set_half(&mut queue.driver, 1, new),
            0x30 => set_half(&mut queue.device, 0, new),
            0x34 => set_half(&mut queue.device, 1, new),
            _ => {}
        }
        None
    }

    fn write_status(&mut self, new: u8) -> Option<Event> {
        if new == 0 {
            return Some(Event::Reset);
        }
        let old = self.status;
        // The driver can only add bits; the device's own bit is not its to write.
        self.status |= new & !(status::NEEDS_RESET | status::FEATURES_OK | status::DRIVER_OK);
        if new & status::FEATURES_OK != 0 && self.accepts() {
            self.status |= status::FEATURES_OK;
        }
        if new & status::DRIVER_OK != 0 && self.status & status::FEATURES_OK != 0 {
            self.status |= status::DRIVER_OK;
        }
        (self.status & !old & status::DRIVER_OK != 0).then_some(Event::Start)
    }

    /// Whether the driver may have the features that it wrote.
    const fn accepts(&self) -> bool {
        self.features & !self.offered == 0 && self.features & feature::VERSION_1 != 0
    }
}

impl CommonRegs {
    /// Writes all that a driver can have written.
    pub fn save(&self, writer: &mut Writer) {
        writer.u32(self.device_select);
        writer.u32(self.driver_select);
        writer.u64(self.features);
        writer.u16(self.vector);
        writer.u8(self.status);
        writer.u16(self.selected);
        writer.count(self.queues.len());
        for queue in &self.queues {
            writer.u16(queue.size);
            writer.u16(queue.vector);
            writer.bool(queue.enabled);
            [queue.descriptors, queue.driver, queue.device].into_iter().for_each(|at| writer.u64(at));
        }
    }

    /// Takes what a device with as many queues saved. Features that are not offered here, and were accepted there, are an error.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let vectors = self.vectors;
        let known = |vector: u16| if vector < vectors { vector } else { NO_VECTOR };
        (self.device_select, self.driver_select) = (reader.u32()?, reader.u32()?);
        self.features = reader.u64()?;
        self.vector = known(reader.u16()?);
        self.status = reader.u8()?;
        if self.status & status::FEATURES_OK != 0 && !self.accepts() {
            return Err(reader.wrong("a set of features that the device has here", self.features));
        }
        if self.status & (status::FEATURES_OK | status::DRIVER_OK) == status::DRIVER_OK {
            return Err(reader.wrong("a status that a driver can bring about", self.status));
        }
        self.selected = reader.u16()?;
        reader.same_count("queues", self.queues.len())?;
        for queue in &mut self.queues {
            queue.size = reader.u16()?;
            if !queue.size.is_power_of_two() || queue.size > queue.max_size {
                return Err(reader.wrong("a size that the queue can have", queue.size));
            }
            queue.vector = known(reader.u16()?);
            queue.enabled = reader.bool()?;
            (queue.descriptors, queue.driver, queue.device) = (reader.u64()?, reader.u64()?, reader.u64()?);
        }
        Ok(())
    }
}

/// The 32 bits of `value` that a select register picks; 0 past the second half.
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, new: u32) {
    match select {
        0 => *value = *value & !0xFFFF_FFFF | u64::from(new),
        1 => *value = *value & 0xFFFF_FFFF | u64::from(new) << 32,
        _ => {}
    }
}

fn pair(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

fn words(value: u32) -> [u16; 2] {
    let [a, b, c, d] = value.to_le_bytes();
    [u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pci::access;

    fn regs() -> CommonRegs {
        CommonRegs::new(feature::VERSION_1 | 1 << 9, &[256], 2)
    }

    fn write(regs: &mut CommonRegs, offset: u16, data: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        access::write(offset, LEN, data, |access, value| events.extend(regs.write(access, value)));
        events
    }

    fn read<const N: usize>(regs: &CommonRegs, offset: u16) -> [u8; N] {
        let mut data = [0; N];
        access::read(offset, LEN, &mut data, |reg| regs.read(reg));
        data
    }

    fn accept(regs: &mut CommonRegs) {
        write(regs, 0x08, &1_u32.to_le_bytes());
        write(regs, 0x0C, &1_u32.to_le_bytes());
    }

    #[test]
    fn features_are_offered_in_two_halves() {
        let mut regs = regs();
        assert_eq!(read(&regs, 0x04), (1_u32 << 9).to_le_bytes());
        write(&mut regs, 0x00, &1_u32.to_le_bytes());
        assert_eq!(read(&regs, 0x04), 1_u32.to_le_bytes());
        write(&mut regs, 0x00, &7_u32.to_le_bytes());
        assert_eq!(read(&regs, 0x04), [0; 4]);
    }

    #[test]
    fn features_are_refused_without_version_1_or_beyond_the_offer() {
        let cases = [(0, 0, false), (0, 1, true), (1 << 9, 1, true), (1 << 8, 1, false), (0, 3, false)];
        for (low, high, accepted) in cases {
            let mut regs = regs();
            write(&mut regs, 0x0C, &u32::to_le_bytes(low));
            write(&mut regs, 0x08, &1_u32.to_le_bytes());
            write(&mut regs, 0x0C, &u32::to_le_bytes(high));
            write(&mut regs, 0x14, &[0x0B]);
            assert_eq!(read(&regs, 0x14), [if accepted { 0x0B } else { 0x03 }], "{low:#x} {high:#x}");
        }
    }

    #[test]
    fn the_driver_starts_only_with_accepted_features() {
        let mut regs = regs();
        assert_eq!(write(&mut regs, 0x14, &[0x07]), []);
        accept(&mut regs);
        write(&mut regs, 0x14, &[0x0B]);
        assert_eq!(write(&mut regs, 0x14, &[0x0F]), [Event::Start]);
        assert_eq!(write(&mut regs, 0x14, &[0x0F]), [], "once");
        assert_eq!(write(&mut regs, 0x14, &[0]), [Event::Reset]);
    }

    #[test]
    fn writing_the_selector_alone_leaves_the_status() {
        let mut regs = regs();
        accept(&mut regs);
        write(&mut regs, 0x14, &[0x0B]);
        assert_eq!(write(&mut regs, 0x16, &[3, 0]), []);
        assert_eq!(read(&regs, 0x14), [0x0B, 0, 3, 0]);
    }

    #[test]
    fn a_queue_is_set_up_and_then_keeps_its_place() {
        let mut regs = regs();
        write(&mut regs, 0x18, &128_u16.to_le_bytes());
        write(&mut regs, 0x1A, &1_u16.to_le_bytes());
        write(&mut regs, 0x20, &0x1_0000_1000_u64.to_le_bytes());
        write(&mut regs, 0x28, &0x2000_u32.to_le_bytes());
        write(&mut regs, 0x30, &0x3000_u64.to_le_bytes());
        write(&mut regs, 0x1C, &[1, 0]);
        write(&mut regs, 0x20, &[0xFF; 8]);
        write(&mut regs, 0x18, &64_u16.to_le_bytes());
        let expected = QueueRegs {
            max_size: 256,
            size: 128,
            vector: 1,
            enabled: true,
            descriptors: 0x1_0000_1000,
            driver: 0x2000,
            device: 0x3000,
        };
        assert_eq!(regs.queues, [expected]);
        regs.reset();
        assert_eq!(regs.queues, [QueueRegs::new(256)]);
    }

    #[test]
    fn impossible_sizes_and_vectors_are_not_taken() {
        let mut regs = regs();
        for size in [0_u16, 3, 512, 0xFFFF] {
            write(&mut regs, 0x18, &size.to_le_bytes());
            assert_eq!(read(&regs, 0x18), 256_u16.to_le_bytes());
        }
        write(&mut regs, 0x1A, &2_u16.to_le_bytes());
        write(&mut regs, 0x10, &5_u16.to_le_bytes());
        assert_eq!((read(&regs, 0x1A), read(&regs, 0x10)), ([0xFF; 2], [0xFF; 2]));
        assert_eq!(write(&mut regs, 0x10, &[1, 0]), [Event::Vectors]);
        assert_eq!(read(&regs, 0x10), [1, 0]);
    }

    #[test]
    fn queues_that_do_not_exist_have_size_0() {
        let mut regs = regs();
        write(&mut regs, 0x16, &[1, 0]);
        write(&mut regs, 0x1C, &[1, 0]);
        assert_eq!((read(&regs, 0x18), read(&regs, 0x1C)), ([0, 0], [0, 0]));
    }

    #[test]
    fn a_state_is_taken_if_a_driver_can_have_brought_it_about() {
        let taken = |features, status| {
            let mut from = regs();
            (from.features, from.status) = (features, status);
            let mut writer = Writer::new();
            from.save(&mut writer);
            let bytes = writer.into_bytes();
            let mut to = regs();
            let taken = to.restore(&mut Reader::new(&bytes, "common"));
            taken.map(|()| (to.features, to.status))
        };
        let good = feature::VERSION_1 | 1 << 9;
        for (features, status) in [(0, 0), (1 << 8, 0x03), (good, 0x0B), (good, 0x0F), (good, 0x4F), (good, 0x8F)] {
            assert_eq!(taken(features, status), Ok((features, status)));
        }
        for (features, status) in [(good, 0x07), (good, 0x04), (1 << 9, 0x0F), (good | 1 << 8, 0x0B)] {
            assert!(taken(features, status).is_err(), "{features:#x} {status:#x}");
        }
    }
}
