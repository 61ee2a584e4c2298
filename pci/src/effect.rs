//! What the machine must change after a configuration write or a change of the tree.

use crate::bar::BarIndex;
use crate::function::FunctionId;
use crate::slot::SlotEvent;
use crate::topology::Window;

/// One consequence. Effects of one write are applied in order, all of them, before the next write of any function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The BAR decodes and every bridge above forwards to it: it is reachable at `at`. Replaces an earlier place.
    Map {
        /// Whose.
        function: FunctionId,
        /// Which.
        bar: BarIndex,
        /// First guest-physical address, or from [`crate::bar::PORTS`] on first I/O port.
        at: u64,
    },
    /// The BAR is not reachable; it often returns to the same place.
    Hide {
        /// Whose.
        function: FunctionId,
        /// Which.
        bar: BarIndex,
    },
    /// The guest has moved the BAR to where it cannot be. Told once for an address, when the guest has gone on to something
    /// else.
    Refused {
        /// Whose.
        function: FunctionId,
        /// Which.
        bar: BarIndex,
        /// Where it was to go.
        at: u64,
        /// Where it stays reachable; `None` if nowhere.
        kept: Option<u64>,
        /// Whose BAR is in the way; `None` if the root complex forwards nothing to that place.
        taken: Option<(FunctionId, BarIndex)>,
    },
    /// The guest has opened a window of a bridge where the root complex has no addresses. Told once for a place, as
    /// [`Effect::Refused`].
    Stray {
        /// Which bridge.
        port: FunctionId,
        /// Whether it is the prefetchable window; else it is the memory window.
        prefetchable: bool,
        /// What the registers say.
        window: Window,
    },
    /// Where a function's mirror ([`crate::mirror`]) lies is (or is no more) where configuration reads reach it.
    Mirror {
        /// Whose.
        function: FunctionId,
        /// Do they.
        on: bool,
    },
    /// The function may (or may not) send memory requests: its own bus master enable and that of every bridge above.
    BusMaster {
        /// Whose.
        function: FunctionId,
        /// May it.
        on: bool,
    },
    /// The guest told something by a hot-plug port's slot.
    Slot {
        /// Which port.
        port: FunctionId,
        /// What.
        event: SlotEvent,
    },
}
