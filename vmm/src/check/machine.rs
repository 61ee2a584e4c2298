//! Judges what the host has beside devices: kernel, limits, huge pages, address space. Pure.

use std::collections::BTreeSet;

use api::config::{MemoryConfig, Size};
use arch::memory_map::Range;
use pci::bar::BarKind;
use pci::topology::PlannedKind;
use rustix::io::Errno;

use super::report::{Finding, Severity};
use super::silence::Silence;
use super::surroundings::Surroundings;
use crate::host::check::{Wanted, check_memlock};
use crate::host::tree::HostTree;
use crate::plan::MachinePlan;

/// A BAR for which small pages make a difference.
const LARGE: u64 = 1 << 30;

/// What is to be said of the host.
#[must_use]
pub fn findings(tree: &HostTree, wanted: &[Wanted], memory: Option<&MemoryConfig>, host: &Surroundings) -> Vec<Finding> {
    let mut findings = kernel(host, bars(tree, wanted).iter().any(|(_, size)| *size >= LARGE));
    findings.push(memlock(host, memory));
    findings.push(huge_pages(host, memory));
    findings.extend(host.closed.iter().map(|(path, errno)| {
        let remedy = match *errno {
            Errno::NOENT if path.ends_with("kvm") => "modprobe kvm_intel, or kvm_amd with a processor of AMD",
            Errno::NOENT if path.ends_with("vfio/vfio") => "modprobe vfio-pci",
            Errno::NOENT => "bind the devices of this IOMMU group to vfio-pci",
            _ => "run as a user who may open it, or change its owner",
        };
        Finding::new(Severity::Problem, "access", path.display(), format_args!("cannot be opened: {errno}")).remedy(Some(remedy))
    }));
    findings
}

/// The IOMMU, if groups tell that there is one; devices without a group are told of one by one.
#[must_use]
pub fn iommu(tree: &HostTree) -> Option<Finding> {
    let groups: BTreeSet<u32> = tree.functions.values().filter_map(|node| node.group).collect();
    (!groups.is_empty()).then(|| Finding::new(Severity::Ok, "iommu", "host", format_args!("on; {} groups", groups.len())))
}

/// What the devices need of the address space, and whether a plan found room for it that the IOMMU can translate.
#[must_use]
pub fn space(tree: &HostTree, wanted: &[Wanted], address_bits: u8, plan: Result<Tops, &str>) -> Vec<Finding> {
    let sum = |wide: bool| {
        let of_kind = |(kind, _): &&(BarKind, u64)| match kind {
            BarKind::Memory64 => wide,
            BarKind::Memory32 => !wide,
            BarKind::Io => false,
        };
        Size(bars(tree, wanted).iter().filter(of_kind).fold(0, |sum: u64, (_, size)| sum.saturating_add(*size)))
    };
    let text = format!("{} of 32-bit and {} of 64-bit BARs, {address_bits} address bits", sum(false), sum(true));
    let finding = |severity, text: String| Finding::new(severity, "space", "host", text);
    let Tops { ram, bars } = match plan {
        Ok(tops) => tops,
        Err(why) => return vec![finding(Severity::Problem, format!("{text}: {why}"))],
    };
    let said = if Silence::of(tree).of_bars {
        finding(
            Severity::Note,
            format!("BARs are not in the file, and whether they fit was not judged; {address_bits} address bits"),
        )
    } else {
        finding(Severity::Ok, format!("{text}: they fit"))
    };
    let mut findings = vec![said];
    let devices = wanted.iter().filter_map(|device| tree.get(device.at));
    if let Some(bits) = devices.filter_map(|node| node.fabric.iommu_bits).min() {
        let beyond = |address: u64| address.checked_shr(bits.into()).unwrap_or(0) != 0;
        let iommu = format!("the IOMMU translates {bits}-bit addresses");
        if beyond(ram) {
            findings.push(finding(Severity::Problem, format!("{iommu}, and memory of the guest reaches {ram:#x}: give it less")));
        } else if beyond(bars) {
            findings.push(finding(
                Severity::Warning,
                format!("{iommu}, and BARs reach {bars:#x}: devices cannot reach those of their peers"),
            ));
        } else {
            findings.push(finding(Severity::Ok, iommu));
        }
    }
    findings
}

/// Last addresses of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tops {
    /// Of memory.
    pub ram: u64,
    /// Of BARs.
    pub bars: u64,
}

impl Tops {
    /// Those of a machine.
    #[must_use]
    pub fn of(plan: &MachinePlan) -> Self {
        let ram = plan.map.ram.iter().map(Range::last).max().unwrap_or(0);
        let endpoints = plan.pci.functions.iter().filter_map(|function| match &function.kind {
            PlannedKind::Endpoint(endpoint) => Some(endpoint),
            PlannedKind::Port(_) => None,
        });
        let ends = endpoints.flat_map(|endpoint| {
            let placed = endpoint.bars.iter().zip(&endpoint.spec.bars);
            placed.filter_map(|(at, bar)| Some((*at)?.saturating_add((*bar)?.size - 1)))
        });
        Self { ram, bars: ends.max().unwrap_or(0) }
    }
}

fn bars(tree: &HostTree, wanted: &[Wanted]) -> Vec<(BarKind, u64)> {
    let nodes = wanted.iter().filter_map(|device| tree.get(device.at));
    nodes.flat_map(|node| node.bars.iter().flatten().map(|bar| (bar.kind, bar.size))).collect()
}

fn kernel(host: &Surroundings, large: bool) -> Vec<Finding> {
    let Some(version) = host.version() else {
        return vec![Finding::new(Severity::Note, "kernel", &host.kernel, "its version is not known")];
    };
    let matters = if large { Severity::Warning } else { Severity::Note };
    let (severity, text) = if version < (6, 12) {
        (matters, "before 6.12 BARs are mapped in 4 KiB pages, which takes minutes for large ones")
    } else if version < (6, 15) {
        (matters, "BARs are mapped in huge pages for processors; from 6.15 on for DMA too, in place of about a second for 32 GiB")
    } else {
        (Severity::Ok, "BARs are mapped in huge pages, for processors and for DMA")
    };
    let (iommufd, with) = if version < (6, 19) {
        (Severity::Note, "iommufd maps no BARs of peers before 6.19 (dma-buf); VFIO containers, which Banyan uses, do")
    } else {
        (Severity::Ok, "iommufd can map BARs of peers (dma-buf)")
    };
    vec![Finding::new(severity, "kernel", &host.kernel, text), Finding::new(iommufd, "kernel", &host.kernel, with)]
}

fn memlock(host: &Surroundings, memory: Option<&MemoryConfig>) -> Finding {
    let limits = host.memlock;
    let finding = |severity, text: String| Finding::new(severity, "memlock", "host", text);
    if let Some(memory) = memory
        && let Err(error) = check_memlock(limits.limit, memory.size.bytes(), limits.capable)
    {
        return finding(Severity::Problem, error.to_string());
    }
    match limits.limit {
        _ if limits.capable => finding(Severity::Ok, "locked memory has no limit (CAP_IPC_LOCK)".to_owned()),
        None => finding(Severity::Ok, "locked memory has no limit".to_owned()),
        Some(limit) if memory.is_some() => finding(Severity::Ok, format!("{} may be locked", Size(limit))),
        Some(limit) => finding(Severity::Note, format!("{} may be locked, which is the most memory of a guest", Size(limit)))
            .remedy(Some("raise it with ulimit -l, or LimitMEMLOCK= in a systemd unit")),
    }
}

fn huge_pages(host: &Surroundings, memory: Option<&MemoryConfig>) -> Finding {
    let finding = |severity, text: String| Finding::new(severity, "hugepage", "host", text);
    let told = |(size, pool): (&u64, &super::surroundings::Pool)| {
        format!("{} of {} pages of {} free", pool.free, pool.total, Size(*size))
    };
    if let Some((memory, page)) = memory.and_then(|memory| Some((memory, memory.hugepages?.size().bytes()))) {
        let needed = memory.size.bytes().div_ceil(page);
        let pool = host.huge_pages.get(&page).copied().unwrap_or_default();
        let text = format!("{needed} pages of {} are needed, {} are free", Size(page), pool.free);
        if pool.free >= needed {
            return finding(Severity::Ok, text);
        }
        let more = pool.total.saturating_add(needed - pool.free);
        let remedy = format!("echo {more} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", page / 1024);
        return finding(Severity::Problem, text).remedy(Some(remedy));
    }
    let pools: Vec<String> = host.huge_pages.iter().filter(|(_, pool)| pool.total > 0).map(told).collect();
    if pools.is_empty() {
        return finding(Severity::Note, "none are reserved; with --memory hugepages=1G large guests start faster".to_owned());
    }
    finding(Severity::Ok, pools.join(", "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::check::surroundings::Pool;
    use crate::host::fake::{FakeFunction, FakeHost};
    use crate::host::limits::Memlock;
    use crate::host::scan::scan_all;

    fn surroundings(kernel: &str) -> Surroundings {
        let huge_pages = BTreeMap::from([(2 << 20, Pool::default()), (1 << 30, Pool { total: 64, free: 60 })]);
        let memlock = Memlock { limit: Some(8 << 20), capable: false };
        Surroundings { kernel: kernel.into(), memlock, huge_pages, closed: vec![("/dev/kvm".into(), Errno::ACCESS)] }
    }

    fn found(host: &Surroundings, memory: Option<&str>, topic: &str) -> Vec<(Severity, String)> {
        let memory: Option<MemoryConfig> = memory.map(|memory| memory.parse().unwrap());
        let findings = findings(&HostTree::default(), &[], memory.as_ref(), host);
        let told = |finding: Finding| (finding.severity, format!("{} {}", finding.text, finding.remedy.unwrap_or_default()));
        findings.into_iter().filter(|finding| finding.topic == topic).map(told).collect()
    }

    #[test]
    fn kernels_are_told_by_what_they_can_do() {
        for (release, first, second) in [
            ("6.8.0-45-generic", "before 6.12", "before 6.19"),
            ("6.12.1", "from 6.15 on", "before 6.19"),
            ("6.17.0-rc1", "for processors and for DMA", "before 6.19"),
            ("7.0.0", "for processors and for DMA", "can map BARs of peers"),
        ] {
            let found = found(&surroundings(release), None, "kernel");
            let texts: Vec<&String> = found.iter().map(|(_, text)| text).collect();
            assert!(texts[0].contains(first) && texts[1].contains(second), "{release}: {texts:?}");
        }
        assert_eq!(kernel(&surroundings("6.8.0"), true)[0].severity, Severity::Warning);
        assert_eq!(kernel(&surroundings("6.8.0"), false)[0].severity, Severity::Note);
        assert_eq!(kernel(&surroundings("custom"), false)[0].severity, Severity::Note);
    }

    #[test]
    fn a_node_that_is_missing_is_made_by_its_own_module() {
        for (path, remedy) in [
            ("/dev/kvm", "modprobe kvm_intel, or kvm_amd with a processor of AMD"),
            ("/dev/vfio/vfio", "modprobe vfio-pci"),
            ("/dev/vfio/7", "bind the devices of this IOMMU group to vfio-pci"),
        ] {
            let host = Surroundings { closed: vec![(path.into(), Errno::NOENT)], ..surroundings("6.12.1") };
            let found = found(&host, None, "access");
            assert!(found[0].1.ends_with(&format!(" {remedy}")), "{path}: {found:?}");
        }
    }

    #[test]
    fn what_the_iommu_cannot_translate_is_named() {
        let host = FakeHost::new();
        let at = host.add("pci0000:00/0000:00:01.0", &FakeFunction::default());
        let mut tree = scan_all(host.sysfs()).unwrap();
        tree.functions.get_mut(&at).unwrap().fabric.iommu_bits = Some(39);
        let wanted = [Wanted { name: "gpu".into(), at }];
        let told = |ram, bars| {
            let findings = space(&tree, &wanted, 46, Ok(Tops { ram, bars }));
            findings.last().map(|finding| (finding.severity, finding.text.clone())).unwrap()
        };
        let top = (1 << 39) - 1;
        assert_eq!(told(top, top), (Severity::Ok, "the IOMMU translates 39-bit addresses".to_owned()));
        assert_eq!(told(top, top + 1).0, Severity::Warning);
        assert!(told(top + 1, top).1.contains("memory of the guest reaches 0x8000000000"));
        assert_eq!(space(&tree, &wanted, 46, Err("no room")).len(), 1);
    }

    #[test]
    fn limits_and_pools_are_judged_by_the_memory_of_the_guest() {
        let host = surroundings("6.12.1");
        for (memory, topic, severity, part) in [
            (None, "memlock", Severity::Note, "8M may be locked"),
            (Some("1G"), "memlock", Severity::Problem, "1073741824 bytes"),
            (Some("4M"), "memlock", Severity::Ok, "8M may be locked"),
            (None, "hugepage", Severity::Ok, "60 of 64 pages of 1G free"),
            (Some("32G,hugepages=1G"), "hugepage", Severity::Ok, "32 pages of 1G are needed, 60 are free"),
            (Some("62G,hugepages=1G"), "hugepage", Severity::Problem, "echo 66 > /sys/kernel/mm/hugepages/hugepages-1048576kB/"),
            (Some("1G,hugepages=2M"), "hugepage", Severity::Problem, "512 pages of 2M are needed, 0 are free"),
            (None, "access", Severity::Problem, "may open it"),
        ] {
            let found = found(&host, memory, topic);
            assert!(found[0].0 == severity && found[0].1.contains(part), "{memory:?} {topic}: {found:?}");
        }
    }
}
