//! A watchdog that stock kernels have a driver for: the Intel 6300ESB's (linux: drivers/watchdog/i6300esb.c).
//!
//! Software that stops to reload its timers is reset: the first timer runs out, then the second, then the machine starts
//! again. While the guest is held (vm.pause) the timers stand still. A thread of the device counts the time, from the moment
//! on when the guest switches the watchdog on.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pci::access::{Access, Lanes, Reg};
use pci::bar::{BarIndex, BarKind, BarSpec, Bars};
use pci::emulated::{Attachment, Emulated, EmulatedError, EmulatedSpec};
use pci::function::{BarPiece, Changes, PciFunction, Programming, ResetKind};
use pci::ids::{ClassCode, Ids};
use pci::mirror::Mirror;
use pci::seams::{MsiPort, Workers};
use pci::state::{Reader, StateError, Writer};
use pci::sync::{lock, wait, wait_at_most};

use crate::legacy::Notify;

/// Ids of the function.
pub const IDS: Ids =
    Ids { vendor: 0x8086, device: 0x25AB, class: ClassCode::new(0x08_8000), revision: 0, subsystem_vendor: 0, subsystem: 0 };

/// Its BARs: 16 bytes of registers.
#[must_use]
pub const fn bars() -> [Option<BarSpec>; 6] {
    let spec = BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 };
    [Some(spec), None, None, None, None, None]
}

/// Configuration space: how it counts and what follows (16 bits), and the lock register (8 bits).
const CONFIG: u16 = 0x60;
const LOCK: u16 = 0x68;
/// Of the lock register.
const LOCKED: u8 = 1;
const ENABLED: u8 = 2;
const FREE_RUNNING: u8 = 4;
/// Of the configuration register.
const FAST: u16 = 1 << 2;
const NO_REBOOT: u16 = 1 << 5;
const CONFIG_BITS: u16 = 0x27;

/// The BAR's registers.
const TIMER1: u64 = 0;
const TIMER2: u64 = 4;
const RELOAD: u64 = 12;
/// The timers have 20 bits.
const TIMER_BITS: u32 = 0xF_FFFF;
/// Of the reload register.
const DO_RELOAD: u16 = 1 << 8;
const TIMED_OUT: u16 = 1 << 9;
/// These two, written to the reload register, allow one write of a timer or of the reload register.
const UNLOCK: [u8; 2] = [0x80, 0x86];

/// Clock of the timers, per second: the PCI clock, divided by 2^15 or by 2^5.
const SLOW_HZ: u64 = 33_000_000 >> 15;
const FAST_HZ: u64 = 33_000_000 >> 5;

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    expired: Notify,
}

struct State {
    timers: [u32; 2],
    config: u16,
    lock: u8,
    /// How many bytes of [`UNLOCK`] have come.
    unlocked: usize,
    timed_out: bool,
    /// When both timers will have run out.
    deadline: Option<Instant>,
    /// What was left when the guest was held.
    held: Option<Option<Duration>>,
    ended: bool,
}

impl State {
    const fn new() -> Self {
        Self {
            timers: [TIMER_BITS; 2],
            config: 0,
            lock: 0,
            unlocked: 0,
            timed_out: false,
            deadline: None,
            held: None,
            ended: false,
        }
    }

    /// Both timers from the start.
    fn reload(&mut self, now: Instant) {
        let ticks: u64 = self.timers.iter().map(|timer| u64::from(*timer) + 1).sum();
        let hz = if self.config & FAST == 0 { SLOW_HZ } else { FAST_HZ };
        let period = Duration::from_micros(ticks.saturating_mul(1_000_000) / hz);
        let runs = self.lock & ENABLED != 0;
        match &mut self.held {
            Some(left) => *left = runs.then_some(period),
            None => self.deadline = runs.then(|| now + period),
        }
    }

    fn write_lock(&mut self, value: u8, now: Instant) {
        if self.lock & LOCKED != 0 {
            return;
        }
        let started = value & ENABLED != 0 && self.lock & ENABLED == 0;
        self.lock = value & (LOCKED | ENABLED | FREE_RUNNING);
        if started || self.lock & ENABLED == 0 {
            self.reload(now);
        }
    }

    /// A write to the BAR, of 1, 2 or 4 bytes.
    fn write(&mut self, offset: u64, value: u32, now: Instant) {
        let [low, high, ..] = value.to_le_bytes();
        let unlocked = self.unlocked == UNLOCK.len();
        if offset == RELOAD && !unlocked {
            self.unlocked = if UNLOCK.get(self.unlocked) == Some(&low) { self.unlocked + 1 } else { 0 };
            return;
        }
        if !unlocked {
            return;
        }
        self.unlocked = 0;
        match offset {
            TIMER1 => self.set_timer(0, value),
            TIMER2 => self.set_timer(1, value),
            RELOAD => {
                let command = u16::from_le_bytes([low, high]);
                if command & TIMED_OUT != 0 {
                    self.timed_out = false;
                }
                if command & DO_RELOAD != 0 {
                    self.reload(now);
                }
            }
            _ => {}
        }
    }

    fn set_timer(&mut self, which: usize, value: u32) {
        if let Some(timer) = self.timers.get_mut(which) {
            *timer = value & TIMER_BITS;
        }
    }

    fn read(&self, offset: u64) -> u32 {
        match offset {
            TIMER1 => self.timers[0],
            TIMER2 => self.timers[1],
            RELOAD if self.timed_out => TIMED_OUT.into(),
            _ => 0,
        }
    }
}

/// The timers stand still while the guest is held, and go on with the time that was left.
impl Workers for Shared {
    fn hold(&self) {
        let mut state = self.lock();
        if state.held.is_none() {
            let left = state.deadline.take().map(|at| at.saturating_duration_since(Instant::now()));
            state.held = Some(left);
        }
        self.changed.notify_all();
    }

    fn release(&self) {
        let mut state = self.lock();
        if let Some(left) = state.held.take() {
            state.deadline = left.map(|left| Instant::now() + left);
        }
        self.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn change(&self, change: impl FnOnce(&mut State, Instant)) {
        change(&mut self.lock(), Instant::now());
        self.changed.notify_all();
    }

    fn count(&self) {
        let mut state = self.lock();
        while !state.ended {
            let now = Instant::now();
            state = match state.deadline.map(|at| at.saturating_duration_since(now)) {
                Some(Duration::ZERO) => {
                    state.deadline = None;
                    state.timed_out = true;
                    if state.config & NO_REBOOT == 0 {
                        drop(state);
                        (self.expired)();
                        state = self.lock();
                    }
                    state
                }
                Some(left) => wait_at_most(&self.changed, state, left),
                None => wait(&self.changed, state),
            };
        }
    }
}

/// The watchdog as a PCI function.
pub struct WatchdogFunction {
    registers: Emulated,
    shared: Arc<Shared>,
    /// From the first start of the timers on.
    thread: Option<JoinHandle<()>>,
    mirror: Option<Arc<dyn Mirror>>,
    detached: bool,
}

impl WatchdogFunction {
    /// A watchdog that calls `expired`, on a thread of its own, when the guest has let its timers run out.
    pub fn new(msi: Arc<dyn MsiPort>, expired: Notify) -> Result<Self, EmulatedError> {
        let spec = EmulatedSpec { ids: IDS, bars: bars(), on: Attachment::Conventional, ..EmulatedSpec::default() };
        let shared = Arc::new(Shared { state: Mutex::new(State::new()), changed: Condvar::new(), expired });
        Ok(Self { registers: Emulated::new(&spec, msi, None)?, shared, thread: None, mirror: None, detached: false })
    }

    /// Stores what guests read of the registers that are kept here.
    fn show(&self) {
        if let Some(mirror) = &self.mirror {
            let state = self.shared.lock();
            mirror.store(Reg::containing(CONFIG), Lanes::ALL, state.config.into());
            mirror.store(Reg::containing(LOCK), Lanes::ALL, state.lock.into());
        }
    }

    fn start_counting(&mut self) {
        if self.thread.is_some() || self.shared.lock().lock & ENABLED == 0 {
            return;
        }
        let shared = self.shared.clone();
        match std::thread::Builder::new().name("watchdog".into()).spawn(move || shared.count()) {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => log::error!("the watchdog does not watch, its thread cannot be started: {error}"),
        }
    }

    fn stop_counting(&mut self) {
        self.shared.change(|state, _| state.ended = true);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            log::error!("the thread of the watchdog panicked");
        }
    }
}

impl Drop for WatchdogFunction {
    fn drop(&mut self) {
        self.stop_counting();
    }
}

impl PciFunction for WatchdogFunction {
    fn config_read(&mut self, reg: Reg) -> u32 {
        let state = self.shared.lock();
        match reg.offset() {
            CONFIG if !self.detached => state.config.into(),
            LOCK if !self.detached => state.lock.into(),
            _ => self.registers.config_read(reg),
        }
    }

    fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let [low, high, ..] = value.to_le_bytes();
        match access.reg.offset() {
            CONFIG if access.lanes.touch(0xFFFF) && !self.detached => {
                self.shared.change(|state, _| {
                    if state.lock & LOCKED == 0 {
                        state.config = u16::from_le_bytes([low, high]) & CONFIG_BITS;
                    }
                });
                self.show();
                Changes::empty()
            }
            LOCK if access.lanes.touch(0xFF) && !self.detached => {
                self.shared.change(|state, now| state.write_lock(low, now));
                self.show();
                self.start_counting();
                Changes::empty()
            }
            _ => self.registers.config_write(access, value),
        }
    }

    fn mirror(&mut self, mirror: &Arc<dyn Mirror>) -> bool {
        self.registers.mirror_beside(Arc::clone(mirror), &[Reg::containing(CONFIG), Reg::containing(LOCK)]);
        self.mirror = Some(Arc::clone(mirror));
        self.show();
        true
    }

    fn bars(&self) -> &Bars {
        self.registers.bars()
    }

    fn program(&mut self, programming: &Programming) {
        self.registers.program(programming);
    }

    fn bar_layout(&self, bar: BarIndex) -> Vec<BarPiece> {
        let spec = self.bars().spec(bar);
        spec.map(|spec| BarPiece::Trapped { offset: 0, len: spec.size }).into_iter().collect()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if !self.detached && bar == 0 && matches!(data.len(), 1 | 2 | 4) {
            let value = self.shared.lock().read(offset).to_le_bytes();
            data.iter_mut().zip(value).for_each(|(to, from)| *to = from);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) {
        if !self.detached && bar == 0 && matches!(data.len(), 1 | 2 | 4) {
            let mut bytes = [0; 4];
            bytes.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
            self.shared.change(|state, now| state.write(offset, u32::from_le_bytes(bytes), now));
        }
    }

    fn reset(&mut self, kind: ResetKind) {
        self.registers.reset(kind);
        self.shared.change(|state, _| *state = State { held: state.held.map(|_| None), ended: state.ended, ..State::new() });
        self.show();
    }

    fn bus_master(&self) -> bool {
        self.registers.bus_master()
    }

    fn save(&mut self, writer: &mut Writer) -> Result<(), StateError> {
        self.registers.save(writer);
        let state = self.shared.lock();
        state.timers.into_iter().for_each(|timer| writer.u32(timer));
        writer.u16(state.config);
        writer.u8(state.lock);
        writer.count(state.unlocked);
        writer.bool(state.timed_out);
        let left = state.held.flatten();
        writer.bool(left.is_some());
        writer.u64(left.map_or(0, |left| u64::try_from(left.as_micros()).unwrap_or(u64::MAX)));
        Ok(())
    }

    /// The timers stand still until they are released.
    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.registers.restore(reader)?;
        let timers = [reader.u32()? & TIMER_BITS, reader.u32()? & TIMER_BITS];
        let (config, lock) = (reader.u16()? & CONFIG_BITS, reader.u8()? & (LOCKED | ENABLED | FREE_RUNNING));
        let unlocked = usize::try_from(reader.u32()?).unwrap_or(usize::MAX).min(UNLOCK.len());
        let timed_out = reader.bool()?;
        let (runs, left) = (reader.bool()?, reader.u64()?);
        let held = Some(runs.then(|| Duration::from_micros(left)));
        self.shared.change(|state, _| {
            *state = State { timers, config, lock, unlocked, timed_out, deadline: None, held, ended: state.ended };
        });
        self.show();
        self.start_counting();
        Ok(())
    }

    fn workers(&self) -> Option<Arc<dyn Workers>> {
        Some(self.shared.clone())
    }

    fn detach(&mut self) {
        self.mirror = None;
        self.registers.detach();
        self.detached = true;
        self.stop_counting();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use pci::testing::{FakeMirror, FakeMsi};

    use super::*;

    fn watchdog() -> (WatchdogFunction, Receiver<()>) {
        let (sender, receiver) = channel();
        let sender = Mutex::new(sender);
        let expired = Box::new(move || sender.lock().unwrap().send(()).unwrap());
        (WatchdogFunction::new(Arc::new(FakeMsi::default()), expired).unwrap(), receiver)
    }

    fn byte(offset: u16, value: u8) -> (Access, u32) {
        (Access { reg: Reg::containing(offset), lanes: Lanes::new(0, 1) }, value.into())
    }

    fn unlock(device: &mut WatchdogFunction) {
        device.bar_write(0, RELOAD, &[0x80, 0]);
        device.bar_write(0, RELOAD, &[0x86, 0]);
    }

    fn reload(device: &mut WatchdogFunction) {
        unlock(device);
        device.bar_write(0, RELOAD, &DO_RELOAD.to_le_bytes());
    }

    /// As the driver does it, for two timers of `ticks` each.
    fn start(device: &mut WatchdogFunction, ticks: u32) {
        for timer in [TIMER1, TIMER2] {
            unlock(device);
            device.bar_write(0, timer, &ticks.to_le_bytes());
        }
        reload(device);
        let (access, value) = byte(LOCK, ENABLED);
        device.config_write(access, value);
    }

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn a_guest_that_lets_the_timers_run_out_is_reset_once() {
        let (mut device, expired) = watchdog();
        let begin = Instant::now();
        start(&mut device, 30);
        expired.recv_timeout(LONG).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(60), "{:?}", begin.elapsed());
        assert!(expired.recv_timeout(SHORT).is_err());
        let mut status = [0; 2];
        device.bar_read(0, RELOAD, &mut status);
        assert_eq!(u16::from_le_bytes(status) & TIMED_OUT, TIMED_OUT);
    }

    #[test]
    fn a_guest_that_reloads_in_time_runs_on() {
        let (mut device, expired) = watchdog();
        start(&mut device, 500);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(10));
            reload(&mut device);
        }
        assert!(expired.try_recv().is_err());
        let (access, value) = byte(LOCK, 0);
        device.config_write(access, value);
        assert!(expired.recv_timeout(SHORT).is_err(), "switched off");
    }

    #[test]
    fn registers_are_written_only_behind_the_two_bytes() {
        let (mut device, _) = watchdog();
        let timer = |device: &mut WatchdogFunction| {
            let mut value = [0; 4];
            device.bar_read(0, TIMER1, &mut value);
            u32::from_le_bytes(value)
        };
        device.bar_write(0, TIMER1, &[1, 0, 0, 0]);
        device.bar_write(0, RELOAD, &[0x86, 0]);
        device.bar_write(0, RELOAD, &[0x80, 0]);
        device.bar_write(0, TIMER1, &[1, 0, 0, 0]);
        assert_eq!(timer(&mut device), TIMER_BITS);
        unlock(&mut device);
        device.bar_write(0, TIMER1, &[0xFF; 4]);
        unlock(&mut device);
        device.bar_write(0, TIMER1, &[7, 0, 0, 0]);
        device.bar_write(0, TIMER1, &[9, 0, 0, 0]);
        assert_eq!(timer(&mut device), 7);
    }

    #[test]
    fn what_guests_read_without_an_exit_is_what_a_configuration_read_gives() {
        let (mut device, _expired) = watchdog();
        let page = Arc::new(FakeMirror::default());
        assert!(device.mirror(&(page.clone() as Arc<dyn Mirror>)));
        let same = |device: &mut WatchdogFunction| {
            for reg in Reg::all() {
                assert_eq!(page.read(reg), device.config_read(reg), "{:#x}", reg.offset());
            }
        };
        same(&mut device);
        for (offset, value) in [(CONFIG, 0xFFFF), (LOCK, ENABLED.into()), (LOCK, LOCKED.into()), (CONFIG, 0), (4, 7), (0x3C, 9)] {
            device.config_write(Access::dword(offset), value);
            same(&mut device);
        }
        assert_eq!((page.read(Reg::containing(CONFIG)), page.read(Reg::containing(LOCK))), (CONFIG_BITS.into(), LOCKED.into()));
        device.reset(ResetKind::Hot);
        same(&mut device);
        device.detach();
        same(&mut device);
        assert!(Reg::all().all(|reg| page.read(reg) == u32::MAX));
    }

    #[test]
    fn a_locked_watchdog_stays_on() {
        let (mut device, expired) = watchdog();
        start(&mut device, 100);
        for value in [ENABLED | LOCKED, 0, LOCKED] {
            let (access, value) = byte(LOCK, value);
            device.config_write(access, value);
        }
        assert_eq!(device.config_read(Reg::containing(LOCK)), u32::from(ENABLED | LOCKED));
        expired.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn the_timers_stand_still_while_the_guest_is_held() {
        let (mut device, expired) = watchdog();
        let control = device.workers().unwrap();
        start(&mut device, 20);
        control.hold();
        control.hold();
        assert!(expired.recv_timeout(Duration::from_millis(150)).is_err());
        control.release();
        expired.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn a_reset_or_the_end_of_the_device_ends_it() {
        let (mut device, expired) = watchdog();
        start(&mut device, 50);
        device.reset(ResetKind::Cold);
        assert!(expired.recv_timeout(Duration::from_millis(150)).is_err());
        start(&mut device, 50);
        device.detach();
        assert!(expired.recv_timeout(Duration::from_millis(150)).is_err());
        assert_eq!(device.config_read(Reg::containing(LOCK)), 0xFFFF_FFFF);
    }

    #[test]
    fn it_says_so_and_does_nothing_if_no_reset_is_wanted() {
        let (mut device, expired) = watchdog();
        device.config_write(Access { reg: Reg::containing(CONFIG), lanes: Lanes::new(0, 2) }, NO_REBOOT.into());
        start(&mut device, 5);
        assert!(expired.recv_timeout(SHORT).is_err());
        let mut status = [0; 2];
        device.bar_read(0, RELOAD, &mut status);
        assert_eq!(u16::from_le_bytes(status), TIMED_OUT);
    }
}
