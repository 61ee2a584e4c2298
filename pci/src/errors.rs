//! Decides what an error leaves in a function's registers, whether it is reported, and how a root port collects reports (PCIe
//! 6.0 6.2.4 to 6.2.6 and 7.8.4). Knows nothing of the tree.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::access::Reg;
use crate::caps::express::reg as express;
use crate::config::ConfigSpace;
use crate::regs::{command, header, status, type1};

/// An error of a link or of a request, as its status bit names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PcieError {
    /// Correctable: bit errors on the link.
    Receiver,
    /// Correctable: a packet arrived damaged and was sent again.
    BadTlp,
    /// Correctable: likewise, a link packet.
    BadDllp,
    /// Correctable: a packet was sent again four times.
    ReplayRollover,
    /// Correctable: no acknowledgement came in time.
    ReplayTimeout,
    /// Correctable: an uncorrectable error that hurt nobody.
    AdvisoryNonFatal,
    /// Uncorrectable: the link protocol was broken.
    DataLinkProtocol,
    /// Uncorrectable: data was marked as bad.
    PoisonedTlp,
    /// Uncorrectable: credits were broken.
    FlowControl,
    /// Uncorrectable: an answer did not come.
    CompletionTimeout,
    /// Uncorrectable: a request was given up.
    CompleterAbort,
    /// Uncorrectable: an answer that nobody waits for.
    UnexpectedCompletion,
    /// Uncorrectable: more came than was allowed.
    ReceiverOverflow,
    /// Uncorrectable: a packet against the rules.
    MalformedTlp,
    /// Uncorrectable: nobody takes the request.
    UnsupportedRequest,
    /// Uncorrectable: a request against access control.
    AcsViolation,
    /// Uncorrectable: inside the port.
    Internal,
}

/// What a report says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// ERR_COR.
    Correctable,
    /// ERR_NONFATAL.
    NonFatal,
    /// ERR_FATAL.
    Fatal,
}

/// What a function made of an error of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// Nothing: it has no registers for this error.
    Nothing,
    /// Its registers show it; it is masked or reports are disabled.
    Silently,
    /// Its registers show it, and it sends a report.
    Reported(Severity),
}

/// Offsets in the AER capability.
pub(crate) mod reg {
    pub const UNCORRECTABLE_STATUS: u16 = 0x04;
    pub const UNCORRECTABLE_MASK: u16 = 0x08;
    pub const UNCORRECTABLE_SEVERITY: u16 = 0x0C;
    pub const CORRECTABLE_STATUS: u16 = 0x10;
    pub const CORRECTABLE_MASK: u16 = 0x14;
    pub const CONTROL: u16 = 0x18;
    pub const HEADER_LOG: u16 = 0x1C;
    pub const ROOT_COMMAND: u16 = 0x2C;
    pub const ROOT_STATUS: u16 = 0x30;
    pub const SOURCE: u16 = 0x34;
}

/// Device control: unsupported request reporting. Device status has unsupported request detected at the same place.
const UNSUPPORTED_REQUEST: u32 = 1 << 3;

/// Bits of root status; the first three enables of root command stand for correctable, non-fatal and fatal reports.
mod root {
    pub const CORRECTABLE: u32 = 1 << 0;
    pub const MORE_CORRECTABLE: u32 = 1 << 1;
    pub const UNCORRECTABLE: u32 = 1 << 2;
    pub const MORE_UNCORRECTABLE: u32 = 1 << 3;
    pub const FIRST_FATAL: u32 = 1 << 4;
    pub const NON_FATAL: u32 = 1 << 5;
    pub const FATAL: u32 = 1 << 6;
}

impl PcieError {
    /// Its bit, and whether that is in the correctable registers.
    #[must_use]
    pub const fn bit(self) -> (u8, bool) {
        match self {
            Self::Receiver => (0, true),
            Self::BadTlp => (6, true),
            Self::BadDllp => (7, true),
            Self::ReplayRollover => (8, true),
            Self::ReplayTimeout => (12, true),
            Self::AdvisoryNonFatal => (13, true),
            Self::DataLinkProtocol => (4, false),
            Self::PoisonedTlp => (12, false),
            Self::FlowControl => (13, false),
            Self::CompletionTimeout => (14, false),
            Self::CompleterAbort => (15, false),
            Self::UnexpectedCompletion => (16, false),
            Self::ReceiverOverflow => (17, false),
            Self::MalformedTlp => (18, false),
            Self::UnsupportedRequest => (20, false),
            Self::AcsViolation => (21, false),
            Self::Internal => (22, false),
        }
    }
}

/// Every error with the name that users call it by.
const NAMES: [(PcieError, &str); 17] = [
    (PcieError::Receiver, "receiver"),
    (PcieError::BadTlp, "bad-tlp"),
    (PcieError::BadDllp, "bad-dllp"),
    (PcieError::ReplayRollover, "replay-rollover"),
    (PcieError::ReplayTimeout, "replay-timeout"),
    (PcieError::AdvisoryNonFatal, "advisory-non-fatal"),
    (PcieError::DataLinkProtocol, "data-link-protocol"),
    (PcieError::PoisonedTlp, "poisoned-tlp"),
    (PcieError::FlowControl, "flow-control"),
    (PcieError::CompletionTimeout, "completion-timeout"),
    (PcieError::CompleterAbort, "completer-abort"),
    (PcieError::UnexpectedCompletion, "unexpected-completion"),
    (PcieError::ReceiverOverflow, "receiver-overflow"),
    (PcieError::MalformedTlp, "malformed-tlp"),
    (PcieError::UnsupportedRequest, "unsupported-request"),
    (PcieError::AcsViolation, "acs-violation"),
    (PcieError::Internal, "internal"),
];

impl fmt::Display for PcieError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(error, _)| error == self).map_or("?", |(_, name)| name))
    }
}

impl FromStr for PcieError {
    type Err = NoError;

    fn from_str(name: &str) -> Result<Self, NoError> {
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(error, _)| *error).ok_or_else(|| NoError { name: name.chars().take(64).collect() })
    }
}

const fn at(base: u16, offset: u16) -> Reg {
    Reg::containing(base + offset)
}

/// Where a function has the registers that an error touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ErrorRegisters {
    /// The AER capability.
    pub aer: u16,
    /// The PCI Express capability.
    pub express: u8,
}

/// Records `error` of the function itself; `header` is the start of the packet that it is about.
pub(crate) fn record(space: &mut ConfigSpace, registers: ErrorRegisters, error: PcieError, header: [u32; 4]) -> Recorded {
    let Some((severity, masked)) = log(space, registers.aer, error, header) else { return Recorded::Nothing };
    let control = at(registers.express.into(), express::DEVICE_CONTROL.into());
    let bit = match severity {
        Severity::Correctable => 1,
        Severity::NonFatal => 2,
        Severity::Fatal => 4,
    };
    // A request that nobody takes has a status bit and an enable of its own beside those of its severity (PCIe 6.0 6.2.5).
    let bits = bit | if error == PcieError::UnsupportedRequest { UNSUPPORTED_REQUEST } else { 0 };
    space.set(control, bits << 16, bits << 16);
    let serr = space.read(at(0, header::COMMAND_STATUS)) & command::SERR != 0 && severity != Severity::Correctable;
    if masked || !serr && space.read(control) & bits != bits {
        return Recorded::Silently;
    }
    if serr {
        space.set(at(0, header::COMMAND_STATUS), status::SIGNALED_SYSTEM_ERROR, status::SIGNALED_SYSTEM_ERROR);
    }
    Recorded::Reported(severity)
}

/// A report of `severity` reaches a bridge from below. Whether it goes up: SERR is enabled in bridge control (PCIe 6.0 6.2.6).
pub(crate) fn forward(space: &mut ConfigSpace, severity: Severity) -> bool {
    let up = space.read(at(0, header::INTERRUPT)) & type1::SERR_FORWARDING != 0;
    if severity != Severity::Correctable {
        space.set(at(0, type1::IO_AND_STATUS), type1::RECEIVED_SYSTEM_ERROR, type1::RECEIVED_SYSTEM_ERROR);
        if up && space.read(at(0, header::COMMAND_STATUS)) & command::SERR != 0 {
            space.set(at(0, header::COMMAND_STATUS), status::SIGNALED_SYSTEM_ERROR, status::SIGNALED_SYSTEM_ERROR);
        }
    }
    up
}

/// Records `error` in the AER capability at `aer`. Returns what a report would say, and whether the error is masked; `None`
/// where the capability has no such error.
fn log(space: &mut ConfigSpace, aer: u16, error: PcieError, header: [u32; 4]) -> Option<(Severity, bool)> {
    let (index, correctable) = error.bit();
    let bit = 1u32 << index;
    let status = at(aer, if correctable { reg::CORRECTABLE_STATUS } else { reg::UNCORRECTABLE_STATUS });
    if space.definition(status).clear_on_one & bit == 0 {
        return None;
    }
    let change = space.set(status, bit, bit);
    if correctable {
        return Some((Severity::Correctable, space.read(at(aer, reg::CORRECTABLE_MASK)) & bit != 0));
    }
    let mask = space.read(at(aer, reg::UNCORRECTABLE_MASK));
    let fatal = space.read(at(aer, reg::UNCORRECTABLE_SEVERITY)) & bit != 0;
    let masked = mask & bit != 0;
    // The log keeps the first error until software has cleared it.
    if !masked && change.old & !mask == 0 {
        space.set(at(aer, reg::CONTROL), 0x1F, index.into());
        for (offset, dword) in (reg::HEADER_LOG..).step_by(4).zip(header) {
            space.set(at(aer, offset), u32::MAX, dword);
        }
    }
    Some((if fatal { Severity::Fatal } else { Severity::NonFatal }, masked))
}

/// A root port takes a report from `source`, a requester id.
pub(crate) fn collect(space: &mut ConfigSpace, aer: u16, severity: Severity, source: u16) {
    let status = space.read(at(aer, reg::ROOT_STATUS));
    let (own, seen, more) = match severity {
        Severity::Correctable => (0, root::CORRECTABLE, root::MORE_CORRECTABLE),
        Severity::NonFatal => (root::NON_FATAL, root::UNCORRECTABLE, root::MORE_UNCORRECTABLE),
        Severity::Fatal => (root::FATAL, root::UNCORRECTABLE, root::MORE_UNCORRECTABLE),
    };
    let first = status & seen == 0;
    let fatal = if first && severity == Severity::Fatal { root::FIRST_FATAL } else { 0 };
    let bits = own | seen | fatal | if first { 0 } else { more };
    space.set(at(aer, reg::ROOT_STATUS), bits, bits);
    if first {
        let shift = if severity == Severity::Correctable { 0 } else { 16 };
        space.set(at(aer, reg::SOURCE), 0xFFFF << shift, u32::from(source) << shift);
    }
}

/// Whether a root port has a report of a kind that its root command lets interrupt.
pub(crate) fn interrupts(space: &ConfigSpace, aer: u16) -> bool {
    let (status, enabled) = (space.read(at(aer, reg::ROOT_STATUS)), space.read(at(aer, reg::ROOT_COMMAND)));
    [root::CORRECTABLE, root::NON_FATAL, root::FATAL]
        .into_iter()
        .enumerate()
        .any(|(index, received)| status & received != 0 && enabled & 1 << index != 0)
}

/// A name that is no error's.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("`{name}` is no PCIe error; there are {}", NAMES.map(|(_, name)| name).join(", "))]
pub struct NoError {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_one_name_and_its_own_bit() {
        let mut bits: Vec<_> = NAMES.iter().map(|(error, _)| error.bit()).collect();
        bits.sort_unstable();
        bits.dedup();
        assert_eq!(bits.len(), NAMES.len());
        for (error, name) in NAMES {
            assert_eq!((name.parse(), error.to_string().as_str()), (Ok(error), name));
        }
        let refused = "fire".parse::<PcieError>().unwrap_err().to_string();
        assert!(refused.contains("`fire`") && refused.contains("completion-timeout"), "{refused}");
    }
}
