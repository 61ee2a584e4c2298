//! Offsets and bits of the registers that code elsewhere names. No behaviour.

/// Configuration header, common part (PCIe 6.0 7.5.1.1).
pub mod header {
    /// Vendor id, device id.
    pub const IDS: u16 = 0x00;
    /// Command in the low half, status in the high half.
    pub const COMMAND_STATUS: u16 = 0x04;
    /// Revision and class code.
    pub const CLASS: u16 = 0x08;
    /// Cache line size, latency timer, header type, BIST.
    pub const HEADER_TYPE: u16 = 0x0C;
    /// First base address register.
    pub const BAR0: u16 = 0x10;
    /// Pointer to the first capability.
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt line and pin; bridge control in the high half of a bridge's.
    pub const INTERRUPT: u16 = 0x3C;
    /// Header type bit 7, in its dword: the device has more functions.
    pub const MULTI_FUNCTION: u32 = 1 << 23;
    /// Header type field, in its dword: bridge.
    pub const TYPE_1: u32 = 1 << 16;
    /// First byte past the header: where capabilities may start.
    pub const END: u8 = 0x40;
}

/// Type 0 header (PCIe 6.0 7.5.1.2).
pub mod type0 {
    /// Subsystem vendor id and subsystem id.
    pub const SUBSYSTEM: u16 = 0x2C;
    /// Last base address register.
    pub const BAR5: u16 = 0x24;
    /// Last byte of the base address registers.
    pub const BAR_END: u16 = 0x27;
    /// Expansion ROM base address.
    pub const ROM: u16 = 0x30;
}

/// Type 1 header (PCIe 6.0 7.5.1.3).
pub mod type1 {
    /// Primary, secondary, subordinate bus number, secondary latency timer.
    pub const BUS_NUMBERS: u16 = 0x18;
    /// I/O base and limit, secondary status.
    pub const IO_AND_STATUS: u16 = 0x1C;
    /// Memory base and limit.
    pub const MEMORY: u16 = 0x20;
    /// Prefetchable base and limit.
    pub const PREFETCHABLE: u16 = 0x24;
    /// Upper half of the prefetchable base.
    pub const PREFETCHABLE_BASE_UPPER: u16 = 0x28;
    /// Upper half of the prefetchable limit.
    pub const PREFETCHABLE_LIMIT_UPPER: u16 = 0x2C;
    /// Last byte of the memory windows.
    pub const WINDOWS_END: u16 = 0x2F;
    /// Secondary status, received system error, in the dword at [`IO_AND_STATUS`].
    pub const RECEIVED_SYSTEM_ERROR: u32 = 1 << 30;
    /// Bridge control, secondary bus reset, in the dword at [`super::header::INTERRUPT`].
    pub const SECONDARY_BUS_RESET: u32 = 1 << 22;
    /// Bridge control, SERR enable: error reports from below go up; same dword.
    pub const SERR_FORWARDING: u32 = 1 << 17;
    /// Bridge control bits that are kept: parity, SERR, ISA, VGA, VGA 16-bit, secondary bus reset; same dword.
    pub const BRIDGE_CONTROL: u32 = 0x005F_0000;
}

/// Command register (PCIe 6.0 7.5.1.1.3).
pub mod command {
    /// I/O space enable.
    pub const IO: u32 = 1 << 0;
    /// Memory space enable.
    pub const MEMORY: u32 = 1 << 1;
    /// Bus master enable.
    pub const BUS_MASTER: u32 = 1 << 2;
    /// Parity error response.
    pub const PARITY: u32 = 1 << 6;
    /// SERR# enable.
    pub const SERR: u32 = 1 << 8;
    /// Interrupt disable: INTx stays deasserted.
    pub const INTX_DISABLE: u32 = 1 << 10;
}

/// Status register (PCIe 6.0 7.5.1.1.4), as bits of the dword that it shares with the command register.
pub mod status {
    /// Interrupt status: an INTx is pending inside the function.
    pub const INTERRUPT: u32 = 1 << 19;
    /// There is a capability list.
    pub const CAPABILITIES: u32 = 1 << 20;
    /// Signaled system error: a report of an uncorrectable error went out.
    pub const SIGNALED_SYSTEM_ERROR: u32 = 1 << 30;
    /// Error bits, cleared by writing 1: parity, signalled and received aborts, SERR.
    pub const ERRORS: u32 = 0xF900_0000;
}
