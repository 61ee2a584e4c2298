//! Decides what CPUID says on each processor: the host's features, and the machine's own topology and addresses.
//!
//! Sources: Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; linux: Documentation/virt/kvm/x86/cpuid.rst.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::processors::Placement;

/// Physical address width where a processor does not say (AMD APM volume 3, E.4.7).
const ADDRESS_BITS_DEFAULT: u8 = 36;
/// The leaf with KVM's signature.
const LEAF_SIGNATURE: u32 = 0x4000_0000;

/// Which processor it is, and of what machine.
#[derive(Clone, Copy, Debug)]
pub struct VcpuIdentity {
    /// Its place among all processors.
    pub place: Placement,
    /// The guest's physical address width in bits, `None` for the host's.
    pub physical_address_bits: Option<u8>,
    /// Whether the local APIC timer has TSC deadline mode (`KVM_CAP_TSC_DEADLINE_TIMER`). `KVM_GET_SUPPORTED_CPUID`
    /// does not report it.
    pub tsc_deadline: bool,
}

/// The leaves of one processor, from what `KVM_GET_SUPPORTED_CPUID` returned. KVM's own leaves stay as they are: without its
/// signature NVIDIA's driver takes the machine for bare metal and ignores the peer-to-peer capability.
#[must_use]
pub fn filter(host: &[kvm_cpuid_entry2], vcpu: &VcpuIdentity) -> Vec<kvm_cpuid_entry2> {
    let topology = Topology(vcpu.place);
    let amd = is_amd(host);
    let mut leaves = Vec::with_capacity(host.len() + 4);
    for entry in host {
        match entry.function {
            // Topology in levels is made anew below.
            0xB | 0x1F => {}
            // AMD's topology in levels would describe the host; guests fall back on leaf 0x8000_001E.
            0x8000_0026 => {}
            _ => leaves.push(adjusted(*entry, vcpu, topology, amd)),
        }
    }
    for function in [0xB, 0x1F] {
        if host.iter().any(|entry| entry.function == function) {
            leaves.extend(topology.levels(function));
        }
    }
    leaves
}

/// Width of guest-physical addresses the host's KVM supports, in bits.
///
/// The guest width in bits 23:16 is what two-dimensional paging reaches, where that is less than what the processor
/// says (linux: `arch/x86/kvm/cpuid.c`).
#[must_use]
pub fn physical_address_bits(host: &[kvm_cpuid_entry2]) -> u8 {
    let Some(entry) = host.iter().find(|entry| entry.function == 0x8000_0008) else {
        return ADDRESS_BITS_DEFAULT;
    };
    let [physical, _, guest, _] = entry.eax.to_le_bytes();
    if guest == 0 { physical } else { physical.min(guest) }
}

/// `host` without what tells that the hypervisor is KVM, and without KVM's own features, which no guest then looks for.
#[must_use]
pub fn without_kvm_signature(host: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    const LAST: u32 = 0x4000_00FF;
    host.iter().filter(|entry| !(LEAF_SIGNATURE..=LAST).contains(&entry.function)).copied().collect()
}

fn adjusted(mut entry: kvm_cpuid_entry2, vcpu: &VcpuIdentity, topology: Topology, amd: bool) -> kvm_cpuid_entry2 {
    let Topology(place) = topology;
    let several = u32::from(place.in_package > 1);
    match entry.function {
        0x1 => {
            entry.ebx = set_field(entry.ebx, 24, 8, place.apic_id);
            entry.ebx = set_field(entry.ebx, 16, 8, place.in_package.min(255));
            entry.ecx = set_field(entry.ecx, 31, 1, 1); // a hypervisor is present
            entry.ecx = set_field(entry.ecx, 24, 1, u32::from(vcpu.tsc_deadline));
            entry.ecx = set_field(entry.ecx, 21, 1, 1); // x2APIC, which KVM emulates on any host
            entry.edx = set_field(entry.edx, 28, 1, several); // the count above is valid
        }
        0x4 if cache_level(&entry) > 0 => {
            entry.eax = set_field(entry.eax, 14, 12, topology.sharers(&entry) - 1);
            entry.eax = set_field(entry.eax, 26, 6, ((1 << (place.package_shift - place.core_shift)) - 1).min(63));
        }
        0x8000_0001 if amd => entry.ecx = set_field(entry.ecx, 1, 1, several),
        0x8000_0008 => {
            if let Some(bits) = vcpu.physical_address_bits {
                entry.eax = set_field(entry.eax, 0, 8, u32::from(bits));
            }
            if amd {
                entry.ecx = set_field(entry.ecx, 0, 8, (place.in_package - 1).min(255));
                entry.ecx = set_field(entry.ecx, 12, 4, place.package_shift);
            }
        }
        0x8000_001D if cache_level(&entry) > 0 => {
            entry.eax = set_field(entry.eax, 14, 12, topology.sharers(&entry) - 1);
        }
        0x8000_001E => {
            entry.eax = place.apic_id;
            let core = place.apic_id >> place.core_shift & 0xFF;
            entry.ebx = set_field(core, 8, 8, (1 << place.core_shift) - 1); // threads of a core, less one
            entry.ecx = place.package & 0xFF; // node, one in each package
        }
        _ => {}
    }
    entry
}

/// A processor's place, as leaves show it.
#[derive(Clone, Copy)]
struct Topology(Placement);

impl Topology {
    /// How many APIC ids share a cache: those of a core, from level 3 on those of a die.
    fn sharers(self, cache: &kvm_cpuid_entry2) -> u32 {
        1 << if cache_level(cache) >= 3 { self.0.die_shift } else { self.0.core_shift }
    }

    /// Leaf 0xB or 0x1F: threads of a core, cores of the package or, in leaf 0x1F, of a die, dies of the package, end.
    fn levels(self, function: u32) -> Vec<kvm_cpuid_entry2> {
        const THREADS: u32 = 1;
        const CORES: u32 = 2;
        const DIES: u32 = 5;
        let Self(place) = self;
        let mut levels = vec![(THREADS, place.core_shift, place.in_core)];
        if function == 0x1F && place.die_shift != place.package_shift {
            levels.push((CORES, place.die_shift, place.in_die));
            levels.push((DIES, place.package_shift, place.in_package));
        } else {
            levels.push((CORES, place.package_shift, place.in_package));
        }
        levels.push((0, 0, 0));
        let level = |(index, (kind, shift, processors)): (u32, (u32, u32, u32))| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: kind << 8 | index,
            edx: place.apic_id,
            ..Default::default()
        };
        (0u32..).zip(levels).map(level).collect()
    }
}

/// The level of the cache an entry of leaf 4 or 0x8000_001D describes, 0 if it describes none.
fn cache_level(entry: &kvm_cpuid_entry2) -> u32 {
    if entry.eax & 0x1F == 0 { 0 } else { entry.eax >> 5 & 7 }
}

fn is_amd(host: &[kvm_cpuid_entry2]) -> bool {
    host.iter().filter(|entry| entry.function == 0).any(|entry| {
        let name = [entry.ebx, entry.edx, entry.ecx].map(u32::to_le_bytes).concat();
        name == b"AuthenticAMD" || name == b"HygonGenuine"
    })
}

/// `value` in `width` bits from bit `at` of `register`; bits of `value` that do not fit are dropped.
fn set_field(register: u32, at: u32, width: u32, value: u32) -> u32 {
    let mask = ((1 << width) - 1) << at;
    register & !mask | value << at & mask
}

#[cfg(test)]
mod tests;
