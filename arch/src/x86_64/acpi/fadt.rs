//! Builds FADT: how to reset and power off, and which legacy hardware there is not (ACPI 6.5 5.2.9).

use acpi_tables::fadt::{FADT, FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};

use crate::ports;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// No VGA (ACPI 6.5 table 5.11). Bit 3, "MSI not supported", stays clear.
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;
/// No real-time clock: Linux does not probe for one.
const BOOT_ARCH_NO_RTC: u16 = 1 << 5;

/// The table, given the address of DSDT.
pub(super) fn fadt(dsdt: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        // Set means: no such button in fixed hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = (BOOT_ARCH_NO_VGA | BOOT_ARCH_NO_RTC).into();
    fadt.reset_reg = port(ports::RESET);
    fadt.reset_value = ports::RESET_VALUE;
    fadt.sleep_control_reg = port(ports::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(ports::SLEEP_STATUS);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"Banyan\0\0").into();
    fadt.finalize()
}

fn port(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into())
}
