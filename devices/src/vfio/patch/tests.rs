use pci::caps::clique::decode;
use pci::ext_caps::walk_extended;

use super::*;
use crate::vfio::fake::Registers;

fn options() -> VfioOptions {
    VfioOptions { clique: None, clique_any_vendor: false, placement: Placement::BelowPort(Link::default()) }
}

fn with_clique(id: u8) -> VfioOptions {
    VfioOptions { clique: Some(Clique::new(id).unwrap()), ..options() }
}

/// What a guest reads of `registers` under the overlay.
fn guest(registers: &Registers, options: &VfioOptions) -> Result<impl Fn(u16) -> u32 + use<>, PatchError> {
    let config = Snapshot::new(&registers.bytes);
    let overlay = overlay(&Facts::of(&config), &config, options)?;
    Ok(move |offset: u16| overlay.read(pci::access::Reg::containing(offset), config.dword(offset)))
}

fn clique_at(registers: &Registers, id: u8) -> (Option<u8>, Vec<u8>) {
    let read = guest(registers, &with_clique(id)).unwrap();
    let list = pci::caps::walk(|offset| read(offset.into()));
    (decode(|offset| read(offset.into())), list.iter().map(|extent| extent.offset).collect())
}

#[test]
fn case_h3_the_clique_is_the_last_capability_and_covers_none() {
    // From Turing on MSI-X takes 0xC8.
    for id in [0, 15] {
        assert_eq!(clique_at(&Registers::gpu(), id), (Some(id), vec![0x40, 0x48, 0x60, 0xC8, 0xD4]));
    }
    // Before, 0xC8 is free.
    let mut older = Registers::gpu();
    older.dwords(0x60, &[0x0002_0010]);
    assert_eq!(clique_at(&older, 3), (Some(3), vec![0x40, 0x48, 0x60, 0xC8]));
    // MSI-X at 0xC8 and a genuine vendor capability at 0xD4.
    let mut full = Registers::gpu();
    full.dwords(0xC8, &[0x0005_D411, 0x00B9_0000, 0x00BA_0000]);
    full.dwords(0xD4, &[0x0014_0009]);
    assert_eq!(clique_at(&full, 7), (Some(7), vec![0x40, 0x48, 0x60, 0xC8, 0xD4, 0x9C]));
    // A capability that begins before 0xC8 and reaches into it.
    let mut reaching = Registers::gpu();
    reaching.dwords(0x60, &[0x0002_C010]);
    reaching.dwords(0xC0, &[0x0010_0009]);
    let (id, list) = clique_at(&reaching, 1);
    assert_eq!((id, list.last().copied()), (Some(1), Some(0xD4)));
}

#[test]
fn a_clique_starts_the_list_of_a_function_without_one() {
    let options = VfioOptions { clique_any_vendor: true, ..with_clique(2) };
    let read = guest(&Registers::conventional(), &options).unwrap();
    assert_eq!(decode(|offset| read(offset.into())), Some(2));
    assert_eq!(read(4) & status::CAPABILITIES, status::CAPABILITIES);
}

#[test]
fn a_clique_on_anything_but_an_nvidia_display_controller_needs_the_option() {
    let mut nic = Registers::gpu();
    nic.put(0x00, &[0xB3, 0x15]);
    nic.put(0x08, &[0, 0, 0, 2]);
    assert!(matches!(guest(&nic, &with_clique(0)), Err(PatchError::Clique { .. })));
    let any = VfioOptions { clique_any_vendor: true, ..with_clique(0) };
    assert_eq!(decode(|offset| guest(&nic, &any).unwrap()(offset.into())), Some(0));
}

#[test]
fn a_clique_without_room_is_refused() {
    let mut full = Registers::gpu();
    full.put(0x34, &[0x40]);
    // One capability of unknown length fills everything.
    full.dwords(0x40, &[0x0000_0007]);
    assert_eq!(guest(&full, &with_clique(0)).err(), Some(PatchError::NoRoom));
}

#[test]
fn sr_iov_and_resizable_bars_are_hidden_and_the_chain_holds() {
    let read = guest(&Registers::gpu(), &options()).unwrap();
    let found: Vec<(u16, u16)> = walk_extended(&read).iter().map(|entry| (entry.id, entry.offset)).collect();
    assert_eq!(found, [(extended::AER, 0x100), (0, 0x140), (id::ATS, 0x200), (0, 0x300)]);
}

#[test]
fn an_entry_at_the_head_of_the_chain_is_hidden_too() {
    let mut registers = Registers::gpu();
    registers.dwords(0x100, &[0x1401_000E]);
    let read = guest(&registers, &options()).unwrap();
    assert_eq!(read(0x100), 0x1401_0000);
    assert_eq!(walk_extended(&read).len(), 4);
}

#[test]
fn hidden_registers_and_the_ats_control_take_no_writes() {
    let config = Snapshot::new(&Registers::gpu().bytes);
    let overlay = overlay(&Facts::of(&config), &config, &options()).unwrap();
    let forwarded = |offset| overlay.forwarded(pci::access::Access::dword(offset));
    for offset in [0x140, 0x148, 0x17C, 0x300, 0x308, 0x10, 0x24, 0x30, 0x48, 0x58, 0xC8] {
        assert_eq!(forwarded(offset), 0, "{offset:#x}");
    }
    assert_eq!(forwarded(0x204), 0x0000_FFFF);
    assert_eq!(forwarded(0x180), u32::MAX);
    assert_eq!(forwarded(0x104), u32::MAX);
    assert_eq!(forwarded(0x68), u32::MAX, "device control");
    assert_eq!(forwarded(4), !3);
}

#[test]
fn case_h5_below_a_port_an_endpoint_stays_one_and_an_integrated_one_becomes_one() {
    let type_of = |read: &dyn Fn(u16) -> u32| read(0x60) >> 20 & 0xF;
    let gpu = Registers::gpu();
    let read = guest(&gpu, &options()).unwrap();
    assert_eq!((type_of(&read), read(0x6C), read(0x70)), (0, 0x0045_8D03, 0x1103_0000));

    let mut integrated = gpu.clone();
    integrated.dwords(0x60, &[0x0092_C810, 0x1000_8002, 0x2910, 0, 0]);
    let read = guest(&integrated, &options()).unwrap();
    assert_eq!((type_of(&read), read(0x6C), read(0x70)), (0, 0x105, 0x0105_0000));
    assert_eq!(read(0x8C) & 0xFE, 0x3E);

    // Version 1 of an integrated endpoint ends before the link registers.
    integrated.dwords(0x60, &[0x0091_C810]);
    let read = guest(&integrated, &options()).unwrap();
    assert_eq!((type_of(&read), read(0x6C)), (9, 0));
}

#[test]
fn on_a_root_bus_an_endpoint_is_integrated_and_has_no_link() {
    let read = guest(&Registers::gpu(), &VfioOptions { placement: Placement::RootBus, ..options() }).unwrap();
    assert_eq!((read(0x60) >> 20 & 0xF, read(0x6C), read(0x70), read(0x8C), read(0x90)), (9, 0, 0, 0, 0));
}

#[test]
fn on_a_conventional_bus_nothing_of_pci_express_is_seen_and_the_rest_of_the_list_stays() {
    let registers = Registers::gpu();
    let list = |placement| {
        let read = guest(&registers, &VfioOptions { placement, ..options() }).unwrap();
        let found = pci::caps::walk(|offset| read(offset.into()));
        (found.iter().map(|extent| (extent.id, extent.offset)).collect::<Vec<_>>(), read)
    };
    let (below_port, _) = list(Placement::BelowPort(Link::default()));
    let (conventional, read) = list(Placement::Conventional);
    let hidden = |(id, offset): &(u8, u8)| (if *id == 0x10 { 0 } else { *id }, *offset);
    assert_eq!(conventional, below_port.iter().map(hidden).collect::<Vec<_>>());
    let express = below_port.iter().find(|(id, _)| *id == 0x10).map(|(_, offset)| u16::from(*offset)).unwrap();
    assert!((express + 4..express + 0x3C).step_by(4).all(|offset| read(offset) == 0));
}

#[test]
fn a_function_whose_power_state_resets_nothing_says_so_whatever_the_hardware_would_do() {
    for soft_reset in [0x0000_0008, 0x0000_0000, 0x0000_2100] {
        let mut registers = Registers::gpu();
        registers.dwords(0x40, &[0x0003_4801, soft_reset]);
        let read = guest(&registers, &options()).unwrap();
        assert_eq!(
            (read(0x44) & 8, read(0x44) & !8),
            (8, soft_reset & !8),
            "guests do not take it for a way to reset the function"
        );
    }
}
