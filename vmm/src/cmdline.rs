//! Decides what a Linux kernel's command line takes from it, as far as the machine must know (linux:
//! Documentation/admin-guide/kernel-parameters.txt): whether it needs the ports 0xCF8 and 0xCFC, and what it will miss.

use api::config::{Cf8, Payload, VmConfig};

/// What a command line switches off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SwitchedOff {
    /// ACPI tables, and with them ECAM, processors beyond the first and the routes of wires.
    pub acpi: bool,
    /// ECAM.
    pub ecam: bool,
    /// I/O APICs.
    pub io_apic: bool,
    /// PCI altogether.
    pub pci: bool,
}

impl SwitchedOff {
    /// By the words of `cmdline`.
    #[must_use]
    pub fn by(cmdline: &str) -> Self {
        let mut off = Self::default();
        for word in cmdline.split_ascii_whitespace() {
            match word.split_once('=') {
                Some(("acpi", "off")) => off.acpi = true,
                Some(("pci", options)) => {
                    for option in options.split(',') {
                        off.pci |= option == "off";
                        off.ecam |= matches!(option, "nommconf" | "conf1");
                    }
                }
                None => {
                    off.acpi |= word == "noacpi";
                    off.io_apic |= word == "noapic";
                }
                Some(_) => {}
            }
        }
        off
    }

    /// Whether configuration space is reached by ports 0xCF8 and 0xCFC or not at all.
    #[must_use]
    pub const fn needs_ports(self) -> bool {
        self.acpi || self.ecam
    }
}

/// What the kernel of `config` will miss, and why.
#[must_use]
pub fn notes(config: &VmConfig) -> Vec<String> {
    let Some(Payload::Kernel(kernel)) = &config.payload else { return Vec::new() };
    let off = SwitchedOff::by(&kernel.cmdline);
    let ports = config.pcie.cf8 != Cf8::Off;
    let mut roots = config.topology.iter().flat_map(|topology| &topology.root_complexes);
    let segments = roots.any(|root| root.segment != 0);
    let note = [
        (off.pci, "has pci=off: it finds none of the machine's PCI devices, disks and network devices included"),
        (
            !off.pci && off.needs_ports() && !ports,
            "takes ECAM away and --pcie cf8=off the ports: it finds no PCI devices; leave one of the two out",
        ),
        (
            off.acpi,
            "has acpi=off: it finds one processor, 256 bytes of each function's configuration space and no interrupts by wire \
             (INTx) of PCI devices, and cannot power the machine off",
        ),
        (
            !off.pci && off.needs_ports() && ports && segments,
            "takes ECAM away: it finds no PCI devices in segments beside the first, which the ports do not reach",
        ),
        (off.io_apic && !off.acpi, "has noapic: interrupts by wire (INTx) of PCI devices do not arrive"),
    ];
    note.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| format!("the kernel's command line {text}")).collect()
}

#[cfg(test)]
mod tests {
    use api::config::{KernelConfig, TopologyConfig};

    use super::*;

    fn said(cmdline: &str, cf8: Cf8) -> String {
        let kernel = KernelConfig { path: "k".into(), initramfs: None, cmdline: cmdline.to_owned(), load_address: None };
        let mut config = VmConfig { payload: Some(Payload::Kernel(kernel)), ..VmConfig::default() };
        config.pcie.cf8 = cf8;
        notes(&config).join("\n")
    }

    #[test]
    fn case_f6_what_will_not_work_is_said() {
        for (cmdline, cf8, parts) in [
            ("console=ttyS0 acpi=off noapic", Cf8::Auto, &["acpi=off: it finds one processor"][..]),
            ("noapic", Cf8::Auto, &["noapic: interrupts by wire"]),
            ("pci=noaer,off", Cf8::Auto, &["pci=off: it finds none"]),
            ("pci=nommconf", Cf8::Off, &["leave one of the two out"]),
            ("acpi=off", Cf8::Off, &["leave one of the two out", "cannot power the machine off"]),
        ] {
            let said = said(cmdline, cf8);
            assert_eq!(said.lines().count(), parts.len(), "{cmdline}: {said}");
            assert!(parts.iter().all(|part| said.contains(part)), "{cmdline}: {said}");
        }
        for cmdline in ["", "console=ttyS0", "pci=noaer", "pci=nommconf", "acpi=force", "xacpi=off", "pci=offline"] {
            assert_eq!(said(cmdline, Cf8::Auto), "", "{cmdline}");
        }
    }

    #[test]
    fn case_f6_segments_that_the_ports_do_not_reach_are_said_to_be_missed() {
        let kernel =
            |cmdline: &str| KernelConfig { path: "k".into(), initramfs: None, cmdline: cmdline.to_owned(), load_address: None };
        for (segment, cmdline, expected) in [(1, "pci=nommconf", 1), (0, "pci=nommconf", 0), (1, "quiet", 0), (1, "pci=off", 1)] {
            let text = format!("[[root-complex]]\nname = 'rc0'\n[[root-complex]]\nname = 'rc1'\nsegment = {segment}\n");
            let topology = Some(TopologyConfig::parse("f", &text).unwrap());
            let config = VmConfig { payload: Some(Payload::Kernel(kernel(cmdline))), topology, ..VmConfig::default() };
            let said = notes(&config);
            assert_eq!(said.len(), expected, "{segment} {cmdline}: {said:?}");
            assert_eq!(said.iter().any(|note| note.contains("segments beside the first")), expected == 1 && cmdline != "pci=off");
        }
    }

    #[test]
    fn a_kernel_without_ecam_needs_the_ports() {
        for (cmdline, needs) in [
            ("acpi=off", true),
            ("noacpi", true),
            ("pci=conf1", true),
            ("pci=noaer,nommconf", true),
            ("noapic", false),
            ("pci=noacpi", false),
            ("", false),
        ] {
            assert_eq!(SwitchedOff::by(cmdline).needs_ports(), needs, "{cmdline}");
        }
    }
}
