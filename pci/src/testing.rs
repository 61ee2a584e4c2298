//! In-memory stand-ins for the traits in [`crate::seams`] and for mirrors, which record what they are told, an endpoint that does
//! nothing, and trees of such endpoints.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use crate::access::{Access, Lanes, Reg};
use crate::address::Bdf;
use crate::bar::{BarIndex, Bars};
use crate::emulated::{Attachment, Emulated, EmulatedError, EmulatedSpec};
use crate::errors::{PcieError, Recorded};
use crate::function::{BarPiece, Changes, FunctionId, HardwareReset, PciFunction, Programming, ResetKind, Shared};
use crate::hierarchy::Hierarchy;
use crate::mirror::Mirror;
use crate::regs::header;
use crate::seams::{DmaError, DmaPort, IntxEvents, IntxLine, MsiError, MsiEvent, MsiMessage, MsiPort, MsiRoutes, MsiVector};
use crate::sriov::EnabledFunctions;
use crate::state::{Reader, StateError, Writer};
use crate::sync::lock;
use crate::topology::{EndpointSpec, Plan, PlannedFunction, PlannedKind};

/// Records the messages sent, and takes eventfds, whose signals it leaves in them.
#[derive(Debug, Default)]
pub struct FakeMsi {
    sent: Mutex<Vec<MsiMessage>>,
    events: Arc<Mutex<BTreeMap<usize, Option<MsiMessage>>>>,
}

impl FakeMsi {
    /// What was sent since the last call.
    pub fn take(&self) -> Vec<MsiMessage> {
        std::mem::take(&mut *lock(&self.sent))
    }

    /// What signals of each eventfd that it has would deliver, in the order in which it got them.
    #[must_use]
    pub fn events(&self) -> Vec<Option<MsiMessage>> {
        lock(&self.events).values().copied().collect()
    }
}

impl MsiPort for FakeMsi {
    fn send(&self, message: MsiMessage) {
        lock(&self.sent).push(message);
    }

    fn event(&self, _: Arc<dyn AsFd + Send + Sync>) -> Option<Box<dyn MsiEvent>> {
        let mut events = lock(&self.events);
        let key = events.last_key_value().map_or(0, |(last, _)| last + 1);
        events.insert(key, None);
        Some(Box::new(FakeMsiEvent { events: Arc::clone(&self.events), key }))
    }
}

struct FakeMsiEvent {
    events: Arc<Mutex<BTreeMap<usize, Option<MsiMessage>>>>,
    key: usize,
}

impl MsiEvent for FakeMsiEvent {
    fn deliver(&mut self, message: Option<MsiMessage>) -> bool {
        lock(&self.events).insert(self.key, message);
        true
    }
}

impl Drop for FakeMsiEvent {
    fn drop(&mut self) {
        lock(&self.events).remove(&self.key);
    }
}

/// A copy of configuration space in memory.
#[derive(Debug)]
pub struct FakeMirror(Mutex<Vec<u32>>);

impl Default for FakeMirror {
    fn default() -> Self {
        Self(Mutex::new(vec![0; 1024]))
    }
}

impl FakeMirror {
    /// What a guest reads.
    #[must_use]
    pub fn read(&self, reg: Reg) -> u32 {
        lock(&self.0).get(reg.index()).copied().unwrap_or(0)
    }
}

impl Mirror for FakeMirror {
    fn store(&self, reg: Reg, lanes: Lanes, value: u32) {
        if let Some(dword) = lock(&self.0).get_mut(reg.index()) {
            *dword = Access { reg, lanes }.merge(*dword, value);
        }
    }
}

/// Records the levels of a wire. Clones are the same wire.
#[derive(Debug, Default, Clone)]
pub struct FakeIntx(Arc<Mutex<Vec<bool>>>);

impl FakeIntx {
    /// Every level that was set, in order.
    #[must_use]
    pub fn levels(&self) -> Vec<bool> {
        lock(&self.0).clone()
    }

    /// The level on the wire.
    #[must_use]
    pub fn level(&self) -> bool {
        lock(&self.0).last().copied().unwrap_or(false)
    }
}

impl IntxLine for FakeIntx {
    fn set(&self, level: bool) {
        lock(&self.0).push(level);
    }
}

/// A descriptor that tells what was written to it, as an eventfd would.
#[derive(Debug)]
pub struct FakeEvent {
    given: UnixStream,
    kept: UnixStream,
}

impl FakeEvent {
    /// A new one, silent.
    pub fn new() -> std::io::Result<Self> {
        let (given, kept) = UnixStream::pair()?;
        kept.set_nonblocking(true)?;
        Ok(Self { given, kept })
    }

    /// Bytes written to the descriptor since the last call.
    #[must_use]
    pub fn written(&self) -> usize {
        let mut buffer = [0; 64];
        let mut total = 0;
        while let Ok(n @ 1..) = (&self.kept).read(&mut buffer) {
            total += n;
        }
        total
    }
}

impl AsFd for FakeEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.given.as_fd()
    }
}

/// State of one vector of [`FakeRoutes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FakeVectorState {
    /// The message, once programmed.
    pub message: Option<MsiMessage>,
    /// Whether it is masked.
    pub masked: bool,
    /// Whether an event is to wait behind the mask; tests set it with [`FakeRoutes::set_pending`].
    pub pending: bool,
    /// Whether its owner has dropped it.
    pub dropped: bool,
}

/// Hands out vectors up to a limit and remembers all of them. Clones are the same routes.
#[derive(Debug, Clone)]
pub struct FakeRoutes {
    limit: u32,
    vectors: Arc<Mutex<Vec<FakeVectorState>>>,
}

impl FakeRoutes {
    /// At most `limit` vectors at a time.
    #[must_use]
    pub fn with_limit(limit: u32) -> Self {
        Self { limit, vectors: Arc::default() }
    }

    /// Every vector that was ever handed out, in order.
    #[must_use]
    pub fn all(&self) -> Vec<FakeVectorState> {
        lock(&self.vectors).clone()
    }

    /// How many are held at this moment.
    #[must_use]
    pub fn held(&self) -> usize {
        lock(&self.vectors).iter().filter(|vector| !vector.dropped).count()
    }

    /// Makes vector `index` (in order of handing out) say that an event waits.
    pub fn set_pending(&self, index: usize, pending: bool) {
        if let Some(vector) = lock(&self.vectors).get_mut(index) {
            vector.pending = pending;
        }
    }
}

impl Default for FakeRoutes {
    fn default() -> Self {
        Self::with_limit(u32::MAX)
    }
}

impl MsiRoutes for FakeRoutes {
    fn vector(&self, who: FunctionId) -> Result<Box<dyn MsiVector>, MsiError> {
        let event = FakeEvent::new().map_err(|source| MsiError::Kernel { what: "make a socket pair", source })?;
        let mut vectors = lock(&self.vectors);
        let held = vectors.iter().filter(|vector| !vector.dropped).count();
        if u32::try_from(held).is_ok_and(|held| held >= self.limit) {
            return Err(MsiError::Exhausted { who, limit: self.limit });
        }
        let index = vectors.len();
        vectors.push(FakeVectorState::default());
        Ok(Box::new(FakeVector { vectors: self.vectors.clone(), index, event }))
    }
}

struct FakeVector {
    vectors: Arc<Mutex<Vec<FakeVectorState>>>,
    index: usize,
    event: FakeEvent,
}

impl FakeVector {
    fn with(&self, change: impl FnOnce(&mut FakeVectorState)) {
        if let Some(vector) = lock(&self.vectors).get_mut(self.index) {
            change(vector);
        }
    }
}

impl MsiVector for FakeVector {
    fn program(&mut self, message: MsiMessage) -> Result<(), MsiError> {
        self.with(|vector| vector.message = Some(message));
        Ok(())
    }

    fn mask(&mut self, masked: bool) -> Result<(), MsiError> {
        self.with(|vector| vector.masked = masked);
        Ok(())
    }

    fn pending(&self) -> bool {
        lock(&self.vectors).get(self.index).is_some_and(|vector| vector.pending)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for FakeVector {
    fn drop(&mut self) {
        self.with(|vector| vector.dropped = true);
    }
}

/// The two descriptors of a level-triggered interrupt.
#[derive(Debug)]
pub struct FakeIntxEvents {
    /// What hardware signals.
    pub trigger: FakeEvent,
    /// What the interrupt controller signals.
    pub resample: FakeEvent,
}

impl FakeIntxEvents {
    /// A new pair, silent.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { trigger: FakeEvent::new()?, resample: FakeEvent::new()? })
    }
}

impl IntxEvents for FakeIntxEvents {
    fn trigger(&self) -> BorrowedFd<'_> {
        self.trigger.as_fd()
    }

    fn resample(&self) -> BorrowedFd<'_> {
        self.resample.as_fd()
    }
}

/// Guest memory from address `base` on, and a bus master enable.
#[derive(Debug)]
pub struct FakeDma {
    base: u64,
    memory: Mutex<Vec<u8>>,
    bus_master: Mutex<bool>,
}

impl FakeDma {
    /// `len` zero bytes at `base`, bus mastering on.
    #[must_use]
    pub fn new(base: u64, len: usize) -> Self {
        Self { base, memory: Mutex::new(vec![0; len]), bus_master: Mutex::new(true) }
    }

    /// Switches bus mastering.
    pub fn set_bus_master(&self, on: bool) {
        *lock(&self.bus_master) = on;
    }

    fn with<T>(&self, at: u64, len: usize, act: impl FnOnce(&mut [u8]) -> T) -> Result<T, DmaError> {
        if !*lock(&self.bus_master) {
            return Err(DmaError::BusMasterOff);
        }
        let unreachable = DmaError::Unreachable { at, len: u64::try_from(len).unwrap_or(u64::MAX) };
        let start = at.checked_sub(self.base).and_then(|start| usize::try_from(start).ok()).ok_or(unreachable)?;
        let end = start.checked_add(len).ok_or(unreachable)?;
        lock(&self.memory).get_mut(start..end).map(act).ok_or(unreachable)
    }
}

impl DmaPort for FakeDma {
    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), DmaError> {
        self.with(at, data.len(), |memory| data.copy_from_slice(memory))
    }

    fn write(&self, at: u64, data: &[u8]) -> Result<(), DmaError> {
        self.with(at, data.len(), |memory| memory.copy_from_slice(data))
    }
}

/// An emulated endpoint with nothing behind its BARs.
pub struct FakeEndpoint(pub Emulated, Option<EmulatedSpec>, Hardware);

/// What resets leave to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hardware {
    None,
    Idle,
    UnderReset,
}

impl FakeEndpoint {
    /// With this in its cache line size register it has live registers, as it says.
    pub const LIVE: u8 = 0x5A;

    /// One that sends its messages nowhere.
    pub fn new(spec: &EmulatedSpec) -> Result<Self, EmulatedError> {
        let functions = spec.sriov.zip(match spec.on {
            Attachment::Link(link) => Some(Attachment::Virtual(link)),
            _ => None,
        });
        let functions = functions.map(|(sriov, on)| EmulatedSpec {
            ids: spec.ids,
            bars: sriov.bars,
            ari: spec.ari,
            on,
            flr: spec.flr,
            serial_number: spec.serial_number,
            ..EmulatedSpec::default()
        });
        Ok(Self(Emulated::new(spec, Arc::new(FakeMsi::default()), None)?, functions, Hardware::None))
    }

    /// One whose resets are hardware's to finish.
    #[must_use]
    pub fn with_hardware(self) -> Self {
        Self(self.0, self.1, Hardware::Idle)
    }

    fn began(&mut self) {
        if self.2 == Hardware::Idle {
            self.2 = Hardware::UnderReset;
        }
    }

    /// The same, as a tree takes it.
    ///
    /// # Panics
    ///
    /// If there can be no such endpoint.
    #[must_use]
    pub fn shared(spec: &EmulatedSpec) -> Shared {
        let endpoint = Self::new(spec).unwrap_or_else(|error| panic!("no endpoint can be {spec:?}: {error}"));
        Arc::new(Mutex::new(endpoint))
    }
}

impl PciFunction for FakeEndpoint {
    fn config_read(&mut self, reg: Reg) -> u32 {
        if self.2 == Hardware::UnderReset { u32::MAX } else { self.0.config_read(reg) }
    }

    fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let was_live = self.is_live();
        let mut changes = self.0.config_write(access, value);
        if changes.contains(Changes::RESET) {
            self.began();
        }
        changes.set(Changes::LIVE, self.is_live() != was_live);
        changes
    }

    fn bars(&self) -> &Bars {
        self.0.bars()
    }

    fn program(&mut self, programming: &Programming) {
        self.0.program(programming);
    }

    fn bar_layout(&self, _: BarIndex) -> Vec<BarPiece> {
        Vec::new()
    }

    fn bar_read(&mut self, _: BarIndex, _: u64, data: &mut [u8]) {
        data.fill(0xFF);
    }

    fn bar_write(&mut self, _: BarIndex, _: u64, _: &[u8]) {}

    fn reset(&mut self, kind: ResetKind) {
        self.0.reset(kind);
        self.began();
    }

    fn take_reset(&mut self) -> Option<Arc<dyn HardwareReset>> {
        (self.2 == Hardware::UnderReset).then(|| Arc::new(Quick) as Arc<dyn HardwareReset>)
    }

    fn end_reset(&mut self, _: &Arc<dyn HardwareReset>) {
        if self.2 == Hardware::UnderReset {
            self.2 = Hardware::Idle;
        }
    }

    fn bus_master(&self) -> bool {
        self.0.bus_master()
    }

    fn virtual_functions(&self) -> Option<EnabledFunctions> {
        self.0.virtual_functions()
    }

    fn make_virtual(&mut self, _: u16) -> Option<Shared> {
        let function = Self::new(self.1.as_ref()?).ok()?;
        Some(Arc::new(Mutex::new(function)))
    }

    fn mirror(&mut self, mirror: &Arc<dyn Mirror>) -> bool {
        let can = self.2 == Hardware::None;
        if can {
            self.0.mirror(Arc::clone(mirror));
        }
        can
    }

    /// While its cache line size register says so.
    fn is_live(&self) -> bool {
        self.0.config_read(Reg::containing(header::HEADER_TYPE)) & 0xFF == Self::LIVE.into()
    }

    fn record_error(&mut self, error: PcieError, header: [u32; 4]) -> Recorded {
        self.0.record_error(error, header)
    }

    fn save(&mut self, writer: &mut Writer) -> Result<(), StateError> {
        self.0.save(writer);
        Ok(())
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.0.restore(reader)
    }

    fn detach(&mut self) {
        self.0.detach();
        self.began();
    }
}

/// How many random cases a test tries: what `PROPTEST_CASES` says, else `usual`.
#[must_use]
pub fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual)
}

/// Hardware that takes no time.
struct Quick;

impl HardwareReset for Quick {
    fn run(&self) {}
}

/// The tree of `plan`, whose ports send to `msi` and whose endpoints are what `spec` says.
///
/// # Panics
///
/// If it cannot be built.
pub fn tree(plan: &Plan, msi: &Arc<FakeMsi>, spec: impl Fn(&PlannedFunction, &EndpointSpec) -> EmulatedSpec) -> Hierarchy {
    let msi: Arc<dyn MsiPort> = msi.clone();
    let make = |planned: &PlannedFunction| -> Result<Shared, EmulatedError> {
        let PlannedKind::Endpoint(endpoint) = &planned.kind else { panic!("{} is a port, which trees make", planned.name) };
        Ok(FakeEndpoint::shared(&spec(planned, &endpoint.spec)))
    };
    Hierarchy::build(plan, &msi, make).unwrap_or_else(|error| panic!("a plan that cannot be built: {error}"))
}

/// The four bytes at `offset` of the function at `at` in segment 0.
pub fn dword(tree: &mut Hierarchy, at: Bdf, offset: u16) -> u32 {
    let mut data = [0; 4];
    tree.read(0, at, offset, &mut data);
    u32::from_le_bytes(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ends_where_it_ends() {
        let dma = FakeDma::new(0x1000, 16);
        dma.write(0x1008, &[7; 8]).unwrap();
        let mut data = [0; 4];
        dma.read(0x100C, &mut data).unwrap();
        assert_eq!(data, [7; 4]);
        for (at, len) in [(0x1009, 8), (0xFFF, 1), (u64::MAX, 1)] {
            assert_eq!(dma.write(at, &vec![0; len]), Err(DmaError::Unreachable { at, len: len.try_into().unwrap() }));
        }
        dma.set_bus_master(false);
        assert_eq!(dma.read(0x1000, &mut data), Err(DmaError::BusMasterOff));
    }

    #[test]
    fn vectors_are_counted_and_given_back() {
        let routes = FakeRoutes::with_limit(1);
        let mut vector = routes.vector(FunctionId(1)).unwrap();
        vector.program(MsiMessage { address: 1, data: 2 }).unwrap();
        assert!(routes.vector(FunctionId(2)).is_err());
        drop(vector);
        assert_eq!((routes.held(), routes.all().len()), (0, 1));
    }
}
