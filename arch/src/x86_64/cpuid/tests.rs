use super::*;
use crate::x86_64::processors::{PackageShape, Processors};

/// `KVMKVMKVM\0\0\0` as EBX, ECX, EDX.
const SIGNATURE: [u32; 3] = [0x4B4D_564B, 0x564B_4D56, 0x0000_004D];

/// Whether guests see KVM's signature.
fn has_kvm_signature(entries: &[kvm_cpuid_entry2]) -> bool {
    entries.iter().any(|entry| entry.function == LEAF_SIGNATURE && [entry.ebx, entry.ecx, entry.edx] == SIGNATURE)
}

fn leaf(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
}

fn vendor(name: &[u8; 12]) -> kvm_cpuid_entry2 {
    let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
    leaf(0, 0, [0x1F, word(0), word(8), word(4)])
}

/// What a KVM host reports, as far as the filter looks at it.
fn host(name: &[u8; 12]) -> Vec<kvm_cpuid_entry2> {
    vec![
        vendor(name),
        leaf(1, 0, [0x000A_0F11, 0x0580_0800, 0x7EDA_3203, 0x178B_FBFF]),
        leaf(4, 0, [0xFC1F_C121, 1, 2, 3]),
        leaf(4, 3, [0xFC1F_C163, 1, 2, 3]),
        leaf(4, 4, [0, 0, 0, 0]),
        leaf(7, 0, [1, 0xF1BF_27EB, 0x0040_5FCE, 0xBC0_0410]),
        leaf(0xB, 0, [1, 2, 0x100, 77]),
        leaf(0xB, 1, [7, 128, 0x201, 77]),
        leaf(0x1F, 0, [1, 2, 0x100, 77]),
        leaf(0x4000_0000, 0, [0x4000_0001, SIGNATURE[0], SIGNATURE[1], SIGNATURE[2]]),
        leaf(0x4000_0001, 0, [0x0100_7EFB, 0, 0, 0]),
        leaf(0x8000_0001, 0, [0x000A_0F11, 0x4000_0000, 0x75C2_37FF, 0x2FD3_FBFF]),
        leaf(0x8000_0008, 0, [0x0000_3030, 0x111, 0x0000_707F, 0]),
        leaf(0x8000_001D, 0, [0x0000_4121, 1, 2, 3]),
        leaf(0x8000_001D, 3, [0x0003_C163, 1, 2, 3]),
        leaf(0x8000_001E, 0, [77, 0x126, 0x700, 0]),
        leaf(0x8000_0026, 0, [1, 2, 0x100, 77]),
    ]
}

fn vcpu(apic_id: u32, count: u32) -> VcpuIdentity {
    let place = Processors::single(count).placements()[usize::try_from(apic_id).unwrap()];
    VcpuIdentity { place, physical_address_bits: None, tsc_deadline: true }
}

fn of_two_packages(number: usize, shape: PackageShape) -> VcpuIdentity {
    let room = u32::try_from(shape.room()).unwrap();
    let all = Processors::arrange(&[(0..room).collect(), (room..2 * room).collect()], shape).unwrap();
    VcpuIdentity { place: all.placements()[number], physical_address_bits: None, tsc_deadline: true }
}

fn find(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> &kvm_cpuid_entry2 {
    let mut found = leaves.iter().filter(|leaf| (leaf.function, leaf.index) == (function, index));
    let first = found.next().unwrap_or_else(|| panic!("leaf {function:#x} index {index}"));
    assert!(found.next().is_none(), "leaf {function:#x} index {index} is there twice");
    first
}

fn registers(leaf: &kvm_cpuid_entry2) -> [u32; 4] {
    [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]
}

#[test]
fn every_leaf_that_names_an_apic_id_names_the_processors_own() {
    for (apic_id, count) in [(0, 1), (3, 4), (254, 255)] {
        let leaves = filter(&host(b"AuthenticAMD"), &vcpu(apic_id, count));
        assert_eq!(find(&leaves, 1, 0).ebx >> 24, apic_id);
        assert_eq!(find(&leaves, 0x8000_001E, 0).eax, apic_id);
        for function in [0xB, 0x1F] {
            for index in 0..3 {
                let level = find(&leaves, function, index);
                assert_eq!((level.edx, level.flags), (apic_id, KVM_CPUID_FLAG_SIGNIFCANT_INDEX));
            }
        }
    }
}

#[test]
fn topology_is_one_socket_of_single_threaded_cores() {
    for (count, shift) in [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (128, 7), (129, 8), (255, 8)] {
        let leaves = filter(&host(b"GenuineIntel"), &vcpu(0, count));
        assert_eq!(registers(find(&leaves, 0xB, 0)), [0, 1, 0x100, 0], "threads of {count}");
        assert_eq!(registers(find(&leaves, 0xB, 1)), [shift, count, 0x201, 0], "cores of {count}");
        assert_eq!(registers(find(&leaves, 0xB, 2)), [0, 0, 2, 0], "end of {count}");
        assert_eq!(find(&leaves, 1, 0).ebx >> 16 & 0xFF, count);
        assert_eq!(find(&leaves, 1, 0).edx >> 28 & 1, u32::from(count > 1));
    }
}

#[test]
fn leaves_that_the_host_lacks_stay_absent() {
    let few = [vendor(b"GenuineIntel"), leaf(1, 0, [0; 4])];
    let leaves = filter(&few, &vcpu(0, 2));
    assert_eq!(leaves.iter().map(|leaf| leaf.function).collect::<Vec<_>>(), [0, 1]);
    let all = filter(&host(b"AuthenticAMD"), &vcpu(0, 2));
    assert!(all.iter().all(|leaf| leaf.function != 0x8000_0026), "it would describe the host");
}

#[test]
fn caches_of_level_3_are_shared_by_all_and_others_by_none() {
    let leaves = filter(&host(b"GenuineIntel"), &vcpu(0, 6));
    let sharers = |function, index| (find(&leaves, function, index).eax >> 14 & 0xFFF) + 1;
    assert_eq!((sharers(4, 0), sharers(4, 3)), (1, 8));
    assert_eq!((sharers(0x8000_001D, 0), sharers(0x8000_001D, 3)), (1, 8));
    assert_eq!(find(&leaves, 4, 3).eax >> 26, 7, "cores of the package");
    assert_eq!(find(&leaves, 4, 3).eax & 0x3FFF, 0x163, "the rest is the host's");
    assert_eq!(registers(find(&leaves, 4, 4)), [0; 4]);
    let many = filter(&host(b"GenuineIntel"), &vcpu(0, 255));
    assert_eq!(find(&many, 4, 3).eax >> 26, 63, "the field holds no more");
}

#[test]
fn amd_counts_cores_in_its_own_leaves_and_intel_does_not() {
    let amd = filter(&host(b"AuthenticAMD"), &vcpu(1, 6));
    assert_eq!(find(&amd, 0x8000_0008, 0).ecx, 0x3005);
    assert_eq!(find(&amd, 0x8000_0001, 0).ecx >> 1 & 1, 1);
    assert_eq!(registers(find(&amd, 0x8000_001E, 0)), [1, 1, 0, 0]);
    let one = filter(&host(b"AuthenticAMD"), &vcpu(0, 1));
    assert_eq!(find(&one, 0x8000_0001, 0).ecx >> 1 & 1, 0);
    let intel = filter(&host(b"GenuineIntel"), &vcpu(1, 6));
    assert_eq!(find(&intel, 0x8000_0008, 0).ecx, 0x707F);
}

#[test]
fn a_hypervisor_x2apic_and_the_deadline_timer_are_shown() {
    let mut bare = host(b"AuthenticAMD");
    bare[1].ecx = 0;
    let ecx = |tsc_deadline| find(&filter(&bare, &VcpuIdentity { tsc_deadline, ..vcpu(0, 1) }), 1, 0).ecx;
    assert_eq!(ecx(true), 1 << 31 | 1 << 24 | 1 << 21);
    assert_eq!(ecx(false), 1 << 31 | 1 << 21);
}

#[test]
fn the_kvm_signature_and_features_stay() {
    let host = host(b"AuthenticAMD");
    let leaves = filter(&host, &vcpu(5, 6));
    for function in [0, 7, 0x4000_0000, 0x4000_0001] {
        assert_eq!(find(&leaves, function, 0), find(&host, function, 0));
    }
    assert!(has_kvm_signature(&leaves));
    let hidden: Vec<_> = leaves.into_iter().filter(|leaf| leaf.function >> 28 != 4).collect();
    assert!(!has_kvm_signature(&hidden));
}

#[test]
fn the_address_width_is_the_hosts_unless_given() {
    let host = host(b"GenuineIntel");
    assert_eq!(physical_address_bits(&host), 48);
    assert_eq!(find(&filter(&host, &vcpu(0, 1)), 0x8000_0008, 0).eax, 0x3030);
    let narrow = VcpuIdentity { physical_address_bits: Some(40), ..vcpu(0, 1) };
    assert_eq!(find(&filter(&host, &narrow), 0x8000_0008, 0).eax, 0x3028);
    assert_eq!(physical_address_bits(&[leaf(0x8000_0008, 0, [0x002F_3934, 0, 0, 0])]), 47);
    assert_eq!(physical_address_bits(&[]), 36);
}

#[test]
fn each_of_two_packages_has_processors_and_a_cache_of_its_own() {
    let leaves = filter(&host(b"GenuineIntel"), &of_two_packages(4, PackageShape::of_cores(3)));
    assert_eq!(registers(find(&leaves, 0xB, 1)), [2, 3, 0x201, 5]);
    assert_eq!((find(&leaves, 4, 3).eax >> 14 & 0xFFF, find(&leaves, 1, 0).ebx >> 16), (3, 0x0503));
    let amd = filter(&host(b"AuthenticAMD"), &of_two_packages(4, PackageShape::of_cores(3)));
    assert_eq!(registers(find(&amd, 0x8000_001E, 0)), [5, 5, 1, 0], "a node in each package");
    assert_eq!(find(&amd, 0x8000_0008, 0).ecx, 0x2002);
}

#[test]
fn threads_share_a_core_and_dies_show_where_leaves_have_them() {
    let leaves = filter(&host(b"GenuineIntel"), &of_two_packages(9, PackageShape { threads: 2, cores: 2, dies: 2 }));
    assert_eq!(registers(find(&leaves, 0xB, 0)), [1, 2, 0x100, 9]);
    assert_eq!(registers(find(&leaves, 0xB, 1)), [3, 8, 0x201, 9]);
    assert_eq!(registers(find(&leaves, 0x1F, 1)), [2, 4, 0x201, 9]);
    assert_eq!(registers(find(&leaves, 0x1F, 2)), [3, 8, 0x502, 9]);
    assert_eq!(registers(find(&leaves, 0x1F, 3)), [0, 0, 3, 9]);
    let sharers = |index| (find(&leaves, 4, index).eax >> 14 & 0xFFF) + 1;
    assert_eq!((sharers(0), sharers(3)), (2, 4));
    assert_eq!(find(&leaves, 4, 3).eax >> 26, 3, "core ids of the package");
    assert_eq!(find(&leaves, 0x8000_001E, 0).ebx, 0x104);
}

#[test]
fn case_h4_the_signature_of_kvm_is_shown_unless_it_is_hidden() {
    let host = [leaf(0, 0, [1, 0, 0, 0]), leaf(0x4000_0000, 0, [0x4000_0001, SIGNATURE[0], SIGNATURE[1], SIGNATURE[2]])];
    assert!(has_kvm_signature(&filter(&host, &vcpu(0, 1))));
    let hidden = without_kvm_signature(&host);
    assert!(!has_kvm_signature(&filter(&hidden, &vcpu(0, 1))) && hidden.len() == 1);
}
