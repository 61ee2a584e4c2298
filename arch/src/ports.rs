//! Names the machine's fixed I/O ports, and the values that mean something there.
//!
//! Knows nothing about the devices behind them.

/// First port of the 16550 serial line COM1; it has eight.
pub const SERIAL: u16 = 0x3F8;
/// Number of ports of the serial line.
pub const SERIAL_LEN: u16 = 8;
/// Interrupt of the serial line: ISA 4, which is also its GSI.
pub const SERIAL_GSI: u32 = 4;

/// ACPI sleep control register of hardware-reduced machines, one byte (ACPI 6.5 4.8.3.7).
pub const SLEEP_CONTROL: u16 = 0x600;
/// ACPI sleep status register, one byte; bit 7 is the wake status.
pub const SLEEP_STATUS: u16 = 0x601;
/// Sleep type of `\_S5`, soft off.
pub const SLEEP_TYPE_S5: u8 = 5;

/// Registers of devices that come and go on buses without slot registers: three dwords with a bit for each device number of a bus
/// where devices come, or for places of devices that may only leave, of several buses. Which came and which are to leave (both
/// read and cleared by reading), and which the guest has let go of (written).
pub const BUS_SLOTS: u16 = 0x640;
/// Number of ports of one bus's registers; those of the next bus follow.
pub const BUS_SLOTS_LEN: u16 = 12;
/// How many such registers there are at most; they end below [`CPU_STATE`].
pub const SLOT_BUSES: u8 = 16;
/// Interrupt that tells of them, edge-triggered: ISA 11, which is also its GSI.
pub const BUS_SLOTS_GSI: u32 = 11;
/// Slot number that users see of device number 0 on the first of these buses; each bus has 32. Ports have smaller ones.
pub const FIRST_BUS_SLOT: u32 = 1 << 16;

/// Reset control register, one byte. It is the FADT's reset register.
pub const RESET: u16 = 0xCF9;
/// The byte that resets the machine when written to [`RESET`]: reset CPU with system reset.
pub const RESET_VALUE: u8 = 0x06;

/// Command port of the keyboard controller.
pub const I8042_COMMAND: u16 = 0x64;

/// Debug-exit port: a write of `v` ends the machine with exit code `v << 1 | 1`.
pub const DEBUG_EXIT: u16 = 0xF4;
/// Where a guest's kernel says that it panicked, one byte (qemu: docs/specs/pvpanic.rst).
pub const PANIC: u16 = 0x505;
/// Debug console: each byte written is one character.
pub const DEBUG_CONSOLE: u16 = 0xE9;

/// PCI configuration address port, a dword (PCI 3.0 3.2.2.3.2).
pub const CONFIG_ADDRESS: u16 = 0xCF8;
/// PCI configuration data ports, four bytes from here.
pub const CONFIG_DATA: u16 = 0xCFC;

/// Interrupt of the generic event device, edge-triggered: what else came up is read at [`HOT_PLUG_EVENTS`].
pub const EVENT_GSI: u32 = 9;
/// Three dwords. The first is the event register: reading takes the pending bits, [`event`] names them. The others are the next
/// processor that came or is to go and the next memory device that came: reading takes one, [`NOTHING_NEXT`] when there is none.
/// The number stands in bits 15:0, the code for `Notify` in bits 31:16.
pub const HOT_PLUG_EVENTS: u16 = 0x620;
/// Bytes of these three registers.
pub const HOT_PLUG_EVENTS_LEN: u16 = 12;
/// What the registers for the next one read when there is none.
pub const NOTHING_NEXT: u32 = u32::MAX;

/// State of processor N at this port plus N, one byte: bit 0 says that it is there; writing [`CPU_EJECT`] takes it away.
pub const CPU_STATE: u16 = 0x700;
/// Processors with a state.
pub const CPU_STATES: u16 = 255;
/// What takes a processor away, if it was asked to go.
pub const CPU_EJECT: u8 = 1 << 3;

/// Memory device N has [`MEMORY_DEVICE_LEN`] ports from here plus N times that: base (8 bytes), length (8), memory node
/// (4), state (4, bit 0: it is there).
pub const MEMORY_DEVICE: u16 = 0x800;
/// Ports of a memory device.
pub const MEMORY_DEVICE_LEN: u16 = 24;
/// Memory devices at most; they end below [`RESET`] and [`CONFIG_ADDRESS`].
pub const MEMORY_DEVICES: u16 = 48;

/// Bits of [`HOT_PLUG_EVENTS`].
pub mod event {
    /// A processor came or is to go.
    pub const CPU: u32 = 1 << 0;
    /// Memory came.
    pub const MEMORY: u32 = 1 << 1;
    /// The power button was pressed.
    pub const POWER_BUTTON: u32 = 1 << 2;
}
