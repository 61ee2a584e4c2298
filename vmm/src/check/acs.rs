//! Decides whether a port's access control is set as NVIDIA asks for it between GPUs and NICs of a virtual machine: `SrcValid+
//! TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+`. Pure.

use std::fmt;

use pci::address::HostBdf;
use thiserror::Error;

use crate::host::fabric::Acs;
use crate::host::tree::HostNode;

/// The value that is asked for.
pub const RECOMMENDED: u16 =
    Acs::SOURCE_VALIDATION | Acs::REQUEST_REDIRECT | Acs::COMPLETION_REDIRECT | Acs::UPSTREAM_FORWARDING | Acs::DIRECT_TRANSLATED;

/// The bits, as lspci names them.
const NAMES: [(u16, &str); 7] = [
    (Acs::SOURCE_VALIDATION, "SrcValid"),
    (Acs::TRANSLATION_BLOCKING, "TransBlk"),
    (Acs::REQUEST_REDIRECT, "ReqRedir"),
    (Acs::COMPLETION_REDIRECT, "CmpltRedir"),
    (Acs::UPSTREAM_FORWARDING, "UpstreamFwd"),
    (Acs::EGRESS_CONTROL, "EgressCtrl"),
    (Acs::DIRECT_TRANSLATED, "DirectTrans"),
];

/// Names of bits, with a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits(pub u16, pub char);

impl Bits {
    /// The names.
    pub fn names(self) -> impl Iterator<Item = String> {
        NAMES.into_iter().filter(move |(bit, _)| self.0 & bit != 0).map(move |(_, name)| format!("{name}{}", self.1))
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().collect::<Vec<_>>().join(" "))
    }
}

/// A port whose access control is not as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcsFault {
    /// The port.
    pub at: HostBdf,
    /// Its registers.
    pub acs: Acs,
}

impl AcsFault {
    /// Bits that should be on and are off, though the port has them.
    #[must_use]
    pub const fn off(self) -> Bits {
        Bits(RECOMMENDED & self.acs.capability & !self.acs.control, '-')
    }

    /// Bits that should be off.
    #[must_use]
    pub const fn on(self) -> Bits {
        Bits(self.acs.control & !RECOMMENDED, '+')
    }

    /// Bits that should be on and that the port lacks.
    #[must_use]
    pub const fn absent(self) -> Bits {
        Bits(RECOMMENDED & !self.acs.capability, '-')
    }

    /// The command that sets it right, if something can be set.
    #[must_use]
    pub fn command(self) -> Option<String> {
        let value = RECOMMENDED & self.acs.capability;
        (self.acs.control != value).then(|| format!("setpci -s {} ECAP_ACS+6.w={value:04x}", self.at))
    }
}

impl fmt::Display for AcsFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ACS control is {:#04x}", self.acs.control)?;
        let told = [(self.off(), "off"), (self.on(), "on"), (self.absent(), "not there")];
        let mut wrong = told.iter().filter(|(bits, _)| bits.0 != 0).map(|(bits, what)| format!("{bits} ({what})"));
        if let Some(first) = wrong.next() {
            write!(f, ", {}", std::iter::once(first).chain(wrong).collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

/// Why the access control of a port is not as asked for.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum AcsError {
    /// Other bits.
    #[error("{0}; asked for is {RECOMMENDED:#04x}")]
    Fault(AcsFault),
    /// No capability.
    #[error("it has no access control (ACS), so that what is below it cannot be told apart and requests are not redirected")]
    Absent,
    /// No registers.
    #[error("its access control could not be read, which root can")]
    NotReadable,
}

/// Judges a port.
pub fn judge(port: &HostNode) -> Result<(), AcsError> {
    match port.fabric.acs {
        Some(Acs { control: RECOMMENDED, .. }) => Ok(()),
        Some(acs) => Err(AcsError::Fault(AcsFault { at: port.at, acs })),
        None if port.fabric.is_whole() => Err(AcsError::Absent),
        None => Err(AcsError::NotReadable),
    }
}
