//! Decides how an emulated function's interrupt reaches the guest: by MSI-X if that is enabled, else by MSI, else as a level
//! on its INTx wire. Shared by the function, which has the registers, and its workers, which raise.

mod state;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::access::{Access, Lanes, Reg};
use crate::mirror::Mirror;
use crate::msi::Msi;
use crate::msix_table::MsixTable;
use crate::regs::{command, header, status};
use crate::seams::{IntxLine, MsiEvent, MsiMessage, MsiPort};
use crate::sync::lock;

/// Interrupt state of one emulated function.
pub struct Interrupts {
    state: Mutex<State>,
    /// Offsets of the capabilities, for the registers that are kept here.
    msi_at: Option<(u8, u8)>,
    msix_at: Option<u8>,
}

struct State {
    msi: Option<Msi>,
    msix: Option<MsixTable>,
    sender: Sender,
    intx: Option<Box<dyn IntxLine>>,
    /// The function wants INTx asserted.
    asserted: bool,
    /// Level on the wire.
    level: bool,
    intx_disabled: bool,
    /// What others raise.
    events: BTreeMap<usize, Event>,
    /// Where the registers that are kept here are shown, with the other bits of the low status byte.
    mirror: Option<(Arc<dyn Mirror>, u32)>,
}

/// A vector that others raise through an eventfd.
struct Event {
    vector: u16,
    event: Box<dyn MsiEvent>,
    /// What a signal delivers at this moment.
    delivers: Option<MsiMessage>,
}

/// Sends messages while bus mastering is on.
struct Sender {
    port: Arc<dyn MsiPort>,
    on: bool,
}

impl Sender {
    fn send(&self, message: MsiMessage) {
        if self.on {
            self.port.send(message);
        }
    }
}

/// What a function has of message-signalled interrupts, and where their capabilities lie.
#[derive(Debug, Default)]
pub struct Messages {
    /// MSI and the offset of its capability.
    pub msi: Option<(Msi, u8)>,
    /// MSI-X and the offset of its capability.
    pub msix: Option<(MsixTable, u8)>,
}

impl Interrupts {
    /// Interrupts that leave through `port`, or as a level on `intx` if the function has a pin.
    #[must_use]
    pub fn new(messages: Messages, port: Arc<dyn MsiPort>, intx: Option<Box<dyn IntxLine>>) -> Arc<Self> {
        let msi_at = messages.msi.as_ref().map(|(msi, at)| (*at, msi.len()));
        let msix_at = messages.msix.as_ref().map(|(_, at)| *at);
        let state = State {
            msi: messages.msi.map(|(msi, _)| msi),
            msix: messages.msix.map(|(table, _)| table),
            sender: Sender { port, on: false },
            intx,
            asserted: false,
            level: false,
            intx_disabled: false,
            events: BTreeMap::new(),
            mirror: None,
        };
        Arc::new(Self { state: Mutex::new(state), msi_at, msix_at })
    }

    /// Raises interrupt `vector`. With MSI-X or MSI enabled it is a message: sent, or pending while it is masked, or lost
    /// while bus mastering is off. With neither enabled INTx is asserted until [`Interrupts::lower`], whatever the vector; a
    /// function without a wire then stays silent.
    pub fn raise(&self, vector: u16) {
        let mut state = self.state();
        let state = &mut *state;
        // Shown before the guest can hear of it.
        let message = match (&mut state.msix, &mut state.msi) {
            (Some(msix), _) if msix.enabled() => msix.raise(vector),
            (_, Some(msi)) if msi.enabled() => msi.raise(vector),
            _ => {
                state.asserted = state.intx.is_some();
                self.show(state);
                state.drive();
                return;
            }
        };
        self.show(state);
        if let Some(message) = message {
            state.sender.send(message);
        }
    }

    /// Deasserts INTx. Messages are edges and need nothing of the kind.
    pub fn lower(&self) {
        let mut state = self.state();
        state.asserted = false;
        self.show(&state);
        state.drive();
    }

    /// Lets others raise `vector` by signals of an eventfd, which are messages while MSI-X is enabled, the vector is open and
    /// bus mastering is on. At other times, and if false is returned always, they stay in the eventfd: who holds it looks at
    /// it and calls [`Interrupts::raise`]. `key` names the eventfd, in place of an earlier one.
    pub fn add_event(&self, key: usize, vector: u16, event: Arc<dyn AsFd + Send + Sync>) -> bool {
        let mut state = self.state();
        state.events.remove(&key);
        let Some(event) = state.sender.port.event(event) else { return false };
        state.events.insert(key, Event { vector, event, delivers: None });
        state.follow_events();
        true
    }

    /// Signals of the eventfd `key` raise another vector.
    pub fn move_event(&self, key: usize, vector: u16) {
        let mut state = self.state();
        if let Some(event) = state.events.get_mut(&key) {
            event.vector = vector;
            state.follow_events();
        }
    }

    /// Signals of the eventfd `key` deliver nothing any more.
    pub fn remove_event(&self, key: usize) {
        let removed = self.state().events.remove(&key);
        drop(removed);
    }

    /// The bits of dword `reg` that are kept here, and their value: MSI registers, MSI-X message control, interrupt status.
    #[must_use]
    pub fn overlay(&self, reg: Reg) -> Option<(u32, u32)> {
        match self.place(reg)? {
            Place::Command => Some((status::INTERRUPT, if self.state().asserted { status::INTERRUPT } else { 0 })),
            Place::Msi(index) => {
                let mask = if index == Msi::CONTROL { 0xFFFF_0000 } else { 0xFFFF_FFFF };
                self.state().msi.as_ref().map(|msi| (mask, msi.read(index)))
            }
            Place::Msix => self.state().msix.as_ref().map(|msix| (0xFFFF_0000, u32::from(msix.control()) << 16)),
        }
    }

    /// The bits of an MSI register that guests can write; 0 for other dwords.
    #[must_use]
    pub fn msi_writable(&self, reg: Reg) -> u32 {
        let Some(Place::Msi(index)) = self.place(reg) else { return 0 };
        self.state().msi.as_ref().map_or(0, |msi| msi.writable(index))
    }

    /// Takes note of a configuration write of `value`, after which the function's own registers hold `stored` in that dword.
    pub fn config_written(&self, access: Access, value: u32, stored: u32) {
        let Some(place) = self.place(access.reg) else { return };
        let mut state = self.state();
        let state = &mut *state;
        match (place, &mut state.msi, &mut state.msix) {
            (Place::Command, ..) => {
                state.sender.on = stored & command::BUS_MASTER != 0;
                state.intx_disabled = stored & command::INTX_DISABLE != 0;
            }
            (Place::Msi(index), Some(msi), _) => {
                msi.write(index, access.lanes, value);
                msi.deliver(&mut |_, message| state.sender.send(message));
            }
            (Place::Msix, _, Some(msix)) => {
                let [_, _, low, high] = access.merge(u32::from(msix.control()) << 16, value).to_le_bytes();
                msix.set_control(u16::from_le_bytes([low, high]));
                msix.deliver_all(&mut |_, message| state.sender.send(message));
            }
            _ => {}
        }
        self.show(state);
        state.drive();
        state.follow_events();
    }

    /// Bytes of configuration space that are kept here: the low status byte, MSI registers, MSI-X message control.
    #[must_use]
    pub fn owned(&self) -> Vec<(Reg, Lanes)> {
        let command = (Reg::containing(header::COMMAND_STATUS), Lanes::new(2, 1));
        let msi = self.msi_at.into_iter().flat_map(|(at, len)| {
            let control = |offset: u8| if offset == 0 { Lanes::new(2, 2) } else { Lanes::ALL };
            (0..len).step_by(4).map(move |offset| (Reg::containing(u16::from(at) + u16::from(offset)), control(offset)))
        });
        let msix = self.msix_at.map(|at| (Reg::containing(at.into()), Lanes::new(2, 2)));
        std::iter::once(command).chain(msi).chain(msix).collect()
    }

    /// Shows the bytes that are kept here in `mirror` from this point on. `stored` is what the function's own registers hold
    /// in the command and status dword.
    pub fn mirror(&self, mirror: Arc<dyn Mirror>, stored: u32) {
        let mut state = self.state();
        state.mirror = Some((mirror, stored));
        self.show(&state);
    }

    fn show(&self, state: &State) {
        let Some((mirror, stored)) = &state.mirror else { return };
        for (reg, lanes) in self.owned() {
            let value = match self.place(reg) {
                Some(Place::Command) if state.asserted => stored | status::INTERRUPT,
                Some(Place::Command) => stored & !status::INTERRUPT,
                Some(Place::Msi(index)) => state.msi.as_ref().map_or(0, |msi| msi.read(index)),
                Some(Place::Msix) => state.msix.as_ref().map_or(0, |msix| u32::from(msix.control()) << 16),
                None => continue,
            };
            mirror.store(reg, lanes, value);
        }
    }

    /// Reads the MSI-X table at byte `offset`; all ones without one.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if let Some(msix) = &self.state().msix {
            msix.read_table(offset, data);
        }
    }

    /// Writes the MSI-X table at byte `offset`; a vector that this unmasks and that is pending is sent.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        let state = &mut *state;
        if let Some(msix) = &mut state.msix
            && let Some(vector) = msix.write_table(offset, data)
            && let Some(message) = msix.deliver(vector)
        {
            state.sender.send(message);
        }
        state.follow_events();
    }

    /// Reads the MSI-X pending bits at byte `offset`; all ones without them.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if let Some(msix) = &self.state().msix {
            msix.read_pending(offset, data);
        }
    }

    /// Back to the reset state: INTx low, messages disabled, nothing pending, bus mastering off.
    pub fn reset(&self) {
        let mut state = self.state();
        state.asserted = false;
        state.intx_disabled = false;
        state.sender.on = false;
        if let Some(msi) = &mut state.msi {
            msi.reset();
        }
        if let Some(msix) = &mut state.msix {
            msix.reset();
        }
        self.show(&state);
        state.drive();
        state.follow_events();
    }

    /// Gives the function a wire, in place of an earlier one, which is lowered.
    pub fn connect(&self, line: Box<dyn IntxLine>) {
        let mut state = self.state();
        if let Some(earlier) = state.intx.replace(line)
            && state.level
        {
            earlier.set(false);
        }
        state.level = false;
        state.drive();
    }

    /// The function leaves: as [`Interrupts::reset`], and nothing that a worker raises afterwards reaches anybody.
    pub fn detach(&self) {
        self.reset();
        let mut state = self.state();
        state.intx = None;
        state.mirror = None;
        state.events.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn place(&self, reg: Reg) -> Option<Place> {
        let offset = reg.offset();
        if offset == header::COMMAND_STATUS {
            return Some(Place::Command);
        }
        let offset = u8::try_from(offset).ok()?;
        match (self.msi_at, self.msix_at) {
            (Some((at, len)), _) if offset >= at && offset - at < len => Some(Place::Msi((offset - at) / 4)),
            (_, Some(at)) if offset == at => Some(Place::Msix),
            _ => None,
        }
    }
}

/// A dword with registers that are kept here.
enum Place {
    Command,
    Msi(u8),
    Msix,
}

impl State {
    /// Puts the wire to the level that it should have. A function with messages enabled does not use its wire.
    fn drive(&mut self) {
        let by_message = self.msi.as_ref().is_some_and(Msi::enabled) || self.msix.as_ref().is_some_and(MsixTable::enabled);
        let level = self.asserted && !self.intx_disabled && !by_message;
        if level != self.level
            && let Some(line) = &self.intx
        {
            line.set(level);
        }
        self.level = level;
    }

    /// Has eventfds deliver what their vectors would send at this moment.
    fn follow_events(&mut self) {
        for event in self.events.values_mut() {
            let msix = self.msix.as_ref().filter(|msix| self.sender.on && msix.open(event.vector));
            let message = msix.and_then(|msix| msix.entry(event.vector)).map(|(message, _)| message);
            if message != event.delivers {
                // What could not be done is tried again at the next change.
                event.delivers = if event.event.deliver(message) { message } else { None };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Lanes;
    use crate::testing::{FakeEvent, FakeIntx, FakeMsi};

    const MSI_AT: u8 = 0x50;
    const MSIX_AT: u8 = 0x70;

    struct Bench {
        interrupts: Arc<Interrupts>,
        sent: Arc<FakeMsi>,
        wire: FakeIntx,
    }

    fn bench(msi: Option<Msi>, msix: Option<MsixTable>) -> Bench {
        let (sent, wire) = (Arc::new(FakeMsi::default()), FakeIntx::default());
        let messages = Messages { msi: msi.map(|msi| (msi, MSI_AT)), msix: msix.map(|table| (table, MSIX_AT)) };
        let interrupts = Interrupts::new(messages, sent.clone(), Some(Box::new(wire.clone())));
        let bench = Bench { interrupts, sent, wire };
        bench.command(command::BUS_MASTER);
        bench
    }

    impl Bench {
        fn command(&self, value: u32) {
            self.interrupts.config_written(Access::dword(header::COMMAND_STATUS), value, value);
        }

        fn write(&self, at: u8, value: u32) {
            self.interrupts.config_written(Access::dword(at.into()), value, 0);
        }

        fn data(&self) -> Vec<u32> {
            self.sent.take().iter().map(|message| message.data).collect()
        }
    }

    #[test]
    fn case_d1_a_function_with_msi_alone_reaches_the_guest_with_every_vector() {
        for (vectors, maskable) in [(1, false), (1, true), (4, false), (4, true), (32, false), (32, true)] {
            let bench = bench(Some(Msi::new(vectors, maskable).unwrap()), None);
            bench.write(MSI_AT + 12, 0x40);
            bench.write(MSI_AT, 1 << 16 | u32::from(vectors).trailing_zeros() << 20);
            for vector in 0..u16::from(vectors) {
                bench.interrupts.raise(vector);
            }
            let expected: Vec<u32> = (0x40..0x40 + u32::from(vectors)).collect();
            assert_eq!((bench.data(), bench.wire.levels()), (expected, vec![]), "{vectors} {maskable}");
        }
    }

    #[test]
    fn case_d1_a_function_with_neither_uses_its_wire_or_nothing() {
        let bench = bench(None, None);
        bench.interrupts.raise(7);
        bench.interrupts.raise(7);
        bench.interrupts.lower();
        assert_eq!((bench.data(), bench.wire.levels()), (vec![], vec![true, false]));
        let deaf = Interrupts::new(Messages::default(), Arc::new(FakeMsi::default()), None);
        deaf.raise(0);
        assert_eq!(deaf.overlay(Reg::containing(4)), Some((status::INTERRUPT, 0)));
    }

    #[test]
    fn interrupt_disable_lowers_the_wire_and_keeps_the_status() {
        let bench = bench(None, None);
        bench.interrupts.raise(0);
        bench.command(command::INTX_DISABLE);
        let shown = bench.interrupts.overlay(Reg::containing(header::COMMAND_STATUS));
        assert_eq!(shown, Some((status::INTERRUPT, status::INTERRUPT)));
        bench.command(0);
        bench.interrupts.lower();
        assert_eq!(bench.wire.levels(), [true, false, true, false]);
    }

    #[test]
    fn enabling_messages_takes_the_function_off_its_wire() {
        let bench = bench(Some(Msi::new(1, false).unwrap()), Some(MsixTable::new(2).unwrap()));
        bench.interrupts.raise(0);
        bench.write(MSI_AT, 1 << 16);
        assert_eq!(bench.wire.levels(), [true, false]);
    }

    #[test]
    fn msi_x_comes_before_msi_and_a_masked_vector_waits() {
        let bench = bench(Some(Msi::new(1, false).unwrap()), Some(MsixTable::new(2).unwrap()));
        bench.write(MSI_AT + 12, 0x99);
        bench.write(MSI_AT, 1 << 16);
        bench.interrupts.raise(0);
        bench.interrupts.write_table(24, &5u32.to_le_bytes());
        bench.write(MSIX_AT, u32::from(MsixTable::ENABLE) << 16);
        bench.interrupts.raise(1);
        assert_eq!(bench.data(), [0x99]);
        bench.interrupts.write_table(28, &[0; 4]);
        assert_eq!(bench.data(), [5]);
    }

    #[test]
    fn messages_are_lost_while_bus_mastering_is_off() {
        let bench = bench(Some(Msi::new(1, true).unwrap()), None);
        bench.write(MSI_AT, 1 << 16);
        bench.command(0);
        bench.interrupts.raise(0);
        bench.command(command::BUS_MASTER);
        assert_eq!(bench.data(), []);
    }

    #[test]
    fn a_byte_write_to_message_control_changes_no_other_byte() {
        let bench = bench(None, Some(MsixTable::new(300).unwrap()));
        let high = Access { reg: Reg::containing(MSIX_AT.into()), lanes: Lanes::new(3, 1) };
        bench.interrupts.config_written(high, 0xC000_0000, 0);
        assert_eq!(bench.interrupts.overlay(high.reg), Some((0xFFFF_0000, 0xC000_0000 | 299 << 16)));
        let low = Access { reg: high.reg, lanes: Lanes::new(0, 2) };
        bench.interrupts.config_written(low, 0, 0);
        assert_eq!(bench.interrupts.overlay(high.reg), Some((0xFFFF_0000, 0xC000_0000 | 299 << 16)));
    }

    #[test]
    fn an_eventfd_delivers_what_its_open_vector_sends() {
        let bench = bench(None, Some(MsixTable::new(3).unwrap()));
        let entry = |vector: u64, data: u32, masked: u32| {
            bench.interrupts.write_table(16 * vector + 8, &data.to_le_bytes());
            bench.interrupts.write_table(16 * vector + 12, &masked.to_le_bytes());
        };
        let delivered = || bench.sent.events().iter().map(|event| event.map(|message| message.data)).collect::<Vec<_>>();
        let control = |bits: u16| bench.write(MSIX_AT, u32::from(bits) << 16);
        assert!(bench.interrupts.add_event(7, 1, Arc::new(FakeEvent::new().unwrap())));
        entry(1, 5, 0);
        assert_eq!(delivered(), [None], "MSI-X is off");
        control(MsixTable::ENABLE);
        assert_eq!(delivered(), [Some(5)]);
        entry(1, 6, 0);
        assert_eq!(delivered(), [Some(6)]);
        entry(1, 6, 1);
        assert_eq!(delivered(), [None], "masked");
        bench.interrupts.raise(1);
        assert_eq!((bench.data(), bench.sent.events()), (vec![], vec![None]), "what its holder raises is pending");
        entry(1, 6, 0);
        assert_eq!((bench.data(), delivered()), (vec![6], vec![Some(6)]));
        control(MsixTable::ENABLE | MsixTable::FUNCTION_MASK);
        assert_eq!(delivered(), [None]);
        control(MsixTable::ENABLE);
        bench.command(0);
        assert_eq!(delivered(), [None], "no bus mastering");
        bench.command(command::BUS_MASTER);
        bench.interrupts.move_event(7, 2);
        assert_eq!(delivered(), [None], "another vector, which is masked");
        entry(2, 9, 0);
        bench.interrupts.move_event(7, 0xFFFF);
        assert_eq!(delivered(), [None], "no vector");
        bench.interrupts.move_event(7, 2);
        assert_eq!(delivered(), [Some(9)]);
        bench.interrupts.reset();
        assert_eq!(delivered(), [None]);
        bench.interrupts.remove_event(7);
        assert_eq!(delivered(), []);
    }

    #[test]
    fn eventfds_that_nobody_takes_are_left_to_their_holder() {
        struct Plain;
        impl MsiPort for Plain {
            fn send(&self, _: MsiMessage) {}
        }
        let interrupts = Interrupts::new(Messages::default(), Arc::new(Plain), None);
        assert!(!interrupts.add_event(0, 0, Arc::new(FakeEvent::new().unwrap())));
    }

    #[test]
    fn a_detached_function_raises_nothing() {
        let bench = bench(None, None);
        bench.interrupts.raise(0);
        bench.interrupts.detach();
        bench.interrupts.raise(0);
        assert_eq!(bench.wire.levels(), [true, false]);
    }
}
