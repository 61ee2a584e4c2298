//! Names the machine's fixed I/O ports, and the values that mean something there.
//!
//! Knows nothing about the devices behind them.

use core::ops::RangeInclusive;

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
/// The byte a guest writes to [`SLEEP_CONTROL`] to power off: sleep type in bits 4:2, enable in bit 5.
pub const SLEEP_S5: u8 = 1 << 5 | SLEEP_TYPE_S5 << 2;

/// Reset control register, one byte. It is the FADT's reset register.
pub const RESET: u16 = 0xCF9;
/// The byte that resets the machine when written to [`RESET`]: reset CPU with system reset.
pub const RESET_VALUE: u8 = 0x06;

/// Command port of the keyboard controller.
pub const I8042_COMMAND: u16 = 0x64;
/// The keyboard controller's command that pulses the reset line.
pub const I8042_RESET: u8 = 0xFE;

/// Debug-exit port: a write of `v` ends the machine with exit code `v << 1 | 1`.
pub const DEBUG_EXIT: u16 = 0xF4;
/// Debug console: each byte written is one character.
pub const DEBUG_CONSOLE: u16 = 0xE9;

/// PCI configuration address port, a dword (PCI 3.0 3.2.2.3.2).
pub const CONFIG_ADDRESS: u16 = 0xCF8;
/// PCI configuration data ports, four bytes from here.
pub const CONFIG_DATA: u16 = 0xCFC;

/// Ports that BARs may decode, clear of every fixed port above.
pub const PCI_IO: RangeInclusive<u16> = 0x1000..=0xFFFF;
