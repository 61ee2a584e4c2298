//! Advanced error reporting (PCIe 6.0 7.8.4): error status, masks, severities, header log; root registers on root ports.

use super::{ExtendedCapability, id};
use crate::config::RegDef;

/// Who reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AerKind {
    /// An endpoint.
    Endpoint,
    /// A switch port.
    SwitchPort,
    /// A root port: collects the errors from below.
    RootPort,
}

/// The capability. Status, masks and severities survive resets other than a cold one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aer(pub AerKind);

impl ExtendedCapability for Aer {
    fn id(&self) -> u16 {
        id::AER
    }

    fn version(&self) -> u8 {
        2
    }

    fn layout(&self) -> Vec<RegDef> {
        /// Data link protocol, poisoned, flow control, completion timeout, completer abort, unexpected completion, receiver
        /// overflow, malformed, ECRC, unsupported request, uncorrectable internal.
        const COMMON: u32 = 0x005F_F010;
        /// ACS violation, AtomicOp egress blocked.
        const PORT: u32 = 0x0120_0000;
        /// Fatal by default: link protocol, flow control, overflow, malformed, internal.
        const FATAL: u32 = 0x0046_2010;
        /// Receiver error, bad TLP and DLLP, replay rollover and timeout, advisory non-fatal, internal.
        const CORRECTABLE: u32 = 0x0000_71C1;
        const ADVISORY: u32 = 0x2000;
        let uncorrectable = if self.0 == AerKind::Endpoint { COMMON } else { COMMON | PORT };
        let status = |bits| RegDef { reset: 0, writable: 0, clear_on_one: bits, sticky: bits };
        let kept = |reset, bits| RegDef { reset, writable: bits, clear_on_one: 0, sticky: bits };
        let log = RegDef { sticky: 0xFFFF_FFFF, ..RegDef::default() };
        let none = RegDef::default();
        let [root_command, root_status, source] = match self.0 {
            AerKind::RootPort => [RegDef::writable(0, 7), status(0x7F), log],
            AerKind::SwitchPort | AerKind::Endpoint => [none; 3],
        };
        vec![
            none,
            status(uncorrectable),
            // Internal errors are masked by default (PCIe 6.0 7.8.4.3).
            kept(1 << 22, uncorrectable),
            kept(FATAL, uncorrectable),
            status(CORRECTABLE),
            kept(ADVISORY | 1 << 14, CORRECTABLE),
            // Capabilities and control: no ECRC, one header in the log. The first error pointer belongs to it.
            RegDef { sticky: 0x1F, ..RegDef::default() },
            log,
            log,
            log,
            log,
            root_command,
            root_status,
            source,
            // Room of the prefix log, which every port with end-to-end prefixes would have.
            none,
            none,
            none,
            none,
        ]
    }
}
