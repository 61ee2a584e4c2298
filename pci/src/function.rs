//! What every function can do, whatever it is: answer configuration cycles and BAR accesses, be reset, leave.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use bitflags::bitflags;

use crate::access::{Access, Reg};
use crate::address::Devfn;
use crate::bar::{BarIndex, Bars};
use crate::errors::{PcieError, Recorded};
use crate::mirror::Mirror;
use crate::seams::Workers;
use crate::sriov::EnabledFunctions;
use crate::state::{Reader, StateError, Writer};

/// Stable name of a function for the life of the machine: its index in the plan, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FunctionId(pub u32);

bitflags! {
    /// What a configuration write changed, in the function's own terms; it knows nothing of the bridges above it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Changes: u16 {
        /// A decode enable or a BAR's address.
        const DECODE = 1 << 0;
        /// Bus master enable.
        const BUS_MASTER = 1 << 1;
        /// A bridge's bus numbers.
        const BUS_RANGE = 1 << 2;
        /// A bridge's memory windows.
        const WINDOWS = 1 << 3;
        /// A bridge's secondary bus reset went from 0 to 1: everything below is reset.
        const RESET_BELOW = 1 << 4;
        /// The function was reset by its own register (function-level reset).
        const RESET = 1 << 5;
        /// A bridge starts or stops to let configuration cycles through: secondary bus reset, link disable or power
        /// state.
        const LINK = 1 << 6;
        /// The guest told something by a port's slot.
        const SLOT = 1 << 7;
        /// Which virtual functions there are, or where their BARs decode.
        const VIRTUAL_FUNCTIONS = 1 << 8;
        /// What [`PciFunction::is_live`] says.
        const LIVE = 1 << 9;
    }
}

/// Why registers go back to their reset values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetKind {
    /// The machine starts again: everything, sticky bits included.
    Cold,
    /// Hot reset or secondary bus reset (PCIe 6.0 6.6.1).
    Hot,
    /// Function-level reset (PCIe 6.0 6.6.2).
    Function,
}

/// Memory behind a BAR that the machine can map straight into the guest. It is mapped as long as the function lives, also after it
/// was taken out of the hierarchy: who maps it keeps the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pages {
    /// Address of the first byte in this process, page-aligned.
    pub host_address: u64,
}

/// A part of a BAR. The pieces of a BAR are in order, do not overlap and cover it; `len` is above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarPiece {
    /// Every access comes to [`PciFunction::bar_read`] and [`PciFunction::bar_write`].
    Trapped {
        /// From the BAR's start, bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Accesses go to memory without an exit. Offset and length are multiples of the page size.
    Direct {
        /// From the BAR's start, bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The memory.
        pages: Pages,
    },
}

impl BarPiece {
    /// Where it starts, from the BAR's start, bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        match self {
            Self::Trapped { offset, .. } | Self::Direct { offset, .. } => *offset,
        }
    }
}

/// A register whose writes do nothing but wake somebody, whatever their length and value. The machine may signal the event
/// in place of an access, by an ioeventfd; a read may signal it as well, since processors do not tell KVM the direction
/// (linux: arch/x86/kvm/vmx/vmx.c, `handle_ept_misconfig`).
#[derive(Clone)]
pub struct Doorbell {
    /// From the BAR's start, bytes.
    pub offset: u64,
    /// An eventfd. It may be signalled at any time, also while the BAR is unreachable.
    pub event: Arc<dyn AsFd + Send + Sync>,
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").field("offset", &self.offset).field("event", &self.event.as_fd()).finish()
    }
}

/// One PCI function, emulated or passed through.
///
/// All methods are called with the function's own lock held and must not wait for a guest, another function or the
/// hierarchy.
pub trait PciFunction: Send {
    /// One dword of configuration space.
    fn config_read(&mut self, reg: Reg) -> u32;
    /// Writes the carried bytes of one dword; returns what must be looked at again.
    fn config_write(&mut self, access: Access, value: u32) -> Changes;
    /// Its BARs as the guest has programmed them.
    fn bars(&self) -> &Bars;
    /// Programs a BAR before the guest starts and switches its decoding (memory and I/O enable) and bus mastering.
    fn program(&mut self, programming: &Programming);
    /// How BAR `bar` is made of trapped and direct pieces. Fixed for the life of the function.
    fn bar_layout(&self, bar: BarIndex) -> Vec<BarPiece>;
    /// Doorbells in trapped pieces of BAR `bar`. Fixed for the life of the function.
    fn doorbells(&self, _bar: BarIndex) -> Vec<Doorbell> {
        Vec::new()
    }
    /// Reads `data.len()` bytes (1 to 8) at `offset` of BAR `bar`. All ones where there is nothing.
    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]);
    /// Writes `data` (1 to 8 bytes) at `offset` of BAR `bar`. Dropped where there is nothing.
    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]);
    /// Back to the reset state. BARs are 0 and decode is off afterwards.
    fn reset(&mut self, kind: ResetKind);
    /// What is left to do after a reset, by whatever register: hardware takes its time, for which nobody shall wait but who asked
    /// for it. To be run with no lock held, and followed by [`PciFunction::end_reset`]; the function answers nothing meanwhile.
    /// Resets that meet may share one. By default nothing is left.
    fn take_reset(&mut self) -> Option<Arc<dyn HardwareReset>> {
        None
    }
    /// `_reset`, which [`PciFunction::take_reset`] gave, was run. Somebody else may have said so before, and a later reset may
    /// have begun since, which this does not end.
    fn end_reset(&mut self, _reset: &Arc<dyn HardwareReset>) {}
    /// Whether bus mastering is enabled in its command register.
    fn bus_master(&self) -> bool;
    /// Shows its configuration space in `mirror` from this point on, until it is detached, if it can: every change of every
    /// register is stored in the step that makes it. Returns whether it does; by default it does not, and reads exit.
    fn mirror(&mut self, _mirror: &Arc<dyn Mirror>) -> bool {
        false
    }
    /// Whether configuration space has a register at this moment whose reads give what changes without a write, or do something:
    /// no mirror is in place meanwhile, and reads come here. [`Changes::LIVE`] tells of a change by a write; after resets and
    /// [`PciFunction::restore`] it is asked again.
    fn is_live(&self) -> bool {
        false
    }
    /// Records an error of its own in its registers, with the start of the packet that it is about. By default it has none for
    /// errors, and the port above keeps them.
    fn record_error(&mut self, _error: PcieError, _header: [u32; 4]) -> Recorded {
        Recorded::Nothing
    }
    /// What it has at work beside the vCPUs. By default nothing that a pause of the machine would have to hold.
    fn workers(&self) -> Option<Arc<dyn Workers>> {
        None
    }
    /// Writes all that a guest can have changed of it. Its workers are held. By default its state is somewhere else.
    fn save(&mut self, _writer: &mut Writer) -> Result<(), StateError> {
        Err(StateError::NotKept { why: "it is a device of the host" })
    }
    /// Takes what a function of the same kind saved; this one is as it was made and programmed. Workers start, held if
    /// [`PciFunction::workers`] are. After an error the function is of no use.
    fn restore(&mut self, _reader: &mut Reader<'_>) -> Result<(), StateError> {
        Err(StateError::NotKept { why: "it is a device of the host" })
    }
    /// Which of its virtual functions are enabled; by default it has none.
    fn virtual_functions(&self) -> Option<EnabledFunctions> {
        None
    }
    /// Makes its virtual function `index`, from 0 on, in the reset state; by default there is none. Its BARs decode where it is
    /// programmed to, whatever its own registers say.
    fn make_virtual(&mut self, _index: u16) -> Option<Shared> {
        None
    }
    /// Ends its life in the machine: afterwards every read gives all ones, since late callers may still hold it, and it sends
    /// nothing. What hardware is to do in the end is left to [`PciFunction::take_reset`].
    fn detach(&mut self);
}

/// What the plan programs into an endpoint before the first guest instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Programming {
    /// Address of each BAR; `None` leaves it at 0.
    pub bars: [Option<u64>; 6],
    /// Address of the expansion ROM, which stays disabled.
    pub rom: Option<u64>,
    /// Address of each VF BAR.
    pub vf_bars: [Option<u64>; 6],
    /// Its own number: device and function, as configuration cycles carry them.
    pub number: Devfn,
    /// With alternative routing ids, the function after it of the same device; 0 for the last one.
    pub next_function: u8,
    /// Memory space enable.
    pub memory: bool,
    /// Interrupt line register: the GSI of its pin, 0xFF when there is none.
    pub interrupt_line: u8,
    /// Whether the device at this number has further functions (header type bit 7, function 0 only).
    pub multifunction: bool,
}

/// The reset of hardware, which takes as long as it likes.
pub trait HardwareReset: Send + Sync {
    /// Carries it out, unless somebody did. Returns when it is done.
    fn run(&self);
}

/// A function held by the hierarchy and by the bus that forwards BAR accesses.
pub type Shared = Arc<Mutex<dyn PciFunction>>;
