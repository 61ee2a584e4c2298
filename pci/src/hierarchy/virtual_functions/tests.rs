//! Virtual functions that a guest enables, moves and disables.

use std::sync::Arc;

use super::*;
use crate::address::Bdf;
use crate::emulated::{Attachment, EmulatedSpec};
use crate::ids::{ClassCode, Ids};
use crate::link::Link;
use crate::regs::header;
use crate::sriov::SriovSpec;
use crate::state::{Reader, Writer};
use crate::testing::{dword, tree};
use crate::topology::tests::{endpoint, endpoint_of, mem32, mem64, roomy, root_port, topology, vfs, with_vfs};
use crate::topology::{Plan, PlannedKind};

const MIB: u64 = 1 << 20;

fn sriov(total_vfs: u16, first_offset: u16, stride: u16) -> SriovSpec {
    vfs(total_vfs, first_offset, stride, &[mem64(MIB), mem32(4096)])
}

struct Rig {
    tree: Hierarchy,
    plan: Plan,
    effects: Vec<Effect>,
    at: Bdf,
    /// Offset of the capability.
    capability: u16,
}

impl Rig {
    fn new(spec: SriovSpec) -> Self {
        let physical = with_vfs(endpoint("pf", "rp", &[mem32(MIB)]), Some(spec));
        let nodes = vec![root_port("rp", "rc0"), physical, root_port("rp1", "rc0")];
        let plan = topology(nodes).plan(&roomy()).unwrap();
        let tree = tree(&plan, &Arc::default(), |_, spec| EmulatedSpec {
            ids: Ids { vendor: 0x1234, device: 1, class: ClassCode::new(0x02_0000), ..Ids::default() },
            bars: spec.bars,
            sriov: spec.sriov.as_deref().copied(),
            ari: true,
            on: Attachment::Link(Link::default()),
            flr: true,
            ..EmulatedSpec::default()
        });
        let mut rig = Self { tree, at: plan.by_name("pf").unwrap().at.bdf, plan, effects: Vec::new(), capability: 0 };
        rig.tree.start(&mut rig.effects);
        rig.forward_routing_ids(true);
        rig.effects.clear();
        let mut offset = 0x100;
        while rig.read(rig.at, offset) & 0xFFFF != 0x10 {
            offset = u16::try_from(rig.read(rig.at, offset) >> 20).unwrap();
            assert_ne!(offset, 0, "no SR-IOV");
        }
        rig.capability = offset;
        rig
    }

    fn read(&mut self, at: Bdf, offset: u16) -> u32 {
        dword(&mut self.tree, at, offset)
    }

    fn write(&mut self, at: Bdf, offset: u16, data: &[u8]) {
        self.tree.write(0, at, offset, data, &mut self.effects);
    }

    /// ARI forwarding of the port above.
    fn forward_routing_ids(&mut self, on: bool) {
        let port = self.plan.by_name("rp").unwrap().at.bdf;
        self.write(port, 0x68, &[u8::from(on) << 5]);
    }

    /// Writes the number, then the control register.
    fn enable(&mut self, number: u16, control: u16) {
        let (at, capability) = (self.at, self.capability);
        self.write(at, capability + 0x10, &number.to_le_bytes());
        self.control(control);
    }

    fn control(&mut self, control: u16) {
        let (at, capability) = (self.at, self.capability);
        self.write(at, capability + 0x08, &control.to_le_bytes());
    }

    /// A routing id relative to the physical function's bus.
    fn place(&self, routing_id: u16) -> Bdf {
        let [further, devfn] = routing_id.to_be_bytes();
        Bdf::new(self.at.bus() + further, Devfn::from_byte(devfn))
    }

    fn places(&self) -> Vec<(u8, u64)> {
        let pf = self.plan.by_name("pf").unwrap().id;
        self.tree.reachable().filter(|(id, ..)| *id != pf).map(|(_, bar, at, _)| (bar, at)).collect()
    }

    fn vf_bar(&self, bar: usize) -> u64 {
        endpoint_of(&self.plan, "pf").vf_bars[bar].unwrap()
    }
}

#[test]
fn virtual_functions_appear_at_their_routing_ids_and_vanish_with_the_enable_bit() {
    let mut rig = Rig::new(sriov(4, 8, 2));
    assert_eq!(rig.read(rig.place(8), 0), u32::MAX);
    rig.enable(3, 1);
    let appeared: Vec<String> = rig.tree.take_appeared().into_iter().map(|appeared| appeared.name.0).collect();
    assert_eq!(appeared, ["pf-vf0", "pf-vf1", "pf-vf2"]);
    for routing_id in [8, 10, 12] {
        let at = rig.place(routing_id);
        assert_eq!(rig.read(at, 0), u32::MAX, "the ids are the physical function's to tell");
        assert_eq!(rig.read(at, 8) >> 8, 0x02_0000, "but it is there");
        for register in [header::BAR0, 0x18, 0x30] {
            rig.write(at, register, &[0xFF; 4]);
            assert_eq!(rig.read(at, register), 0, "no BAR of its own");
        }
        rig.write(at, 4, &[6, 0]);
        assert_eq!(rig.read(at, 4) & 7, 4, "bus mastering, and no memory space of its own");
        rig.forward_routing_ids(false);
        assert_eq!(rig.read(at, 4), u32::MAX, "device 1 of a link");
        rig.forward_routing_ids(true);
    }
    for routing_id in [9, 11, 14] {
        assert_eq!(rig.read(rig.place(routing_id), 8), u32::MAX);
    }
    rig.write(rig.at, rig.capability + 0x10, &[4, 0]);
    assert_eq!(rig.read(rig.at, rig.capability + 0x10) & 0xFFFF, 3, "fixed while they are enabled");
    assert_eq!(rig.tree.endpoints().count(), 1, "they are the guest's own business");
    rig.control(0);
    assert_eq!(rig.tree.take_vanished().len(), 3);
    assert_eq!(rig.read(rig.place(8), 8), u32::MAX);
    rig.enable(5, 1);
    assert!(rig.tree.take_appeared().is_empty(), "there are no five");
}

#[test]
fn their_bars_follow_those_of_the_physical_function() {
    let mut rig = Rig::new(sriov(4, 1, 1));
    rig.enable(2, 1);
    assert_eq!(rig.places(), [], "their memory space is off");
    rig.control(1 | 1 << 3);
    let (low, high) = (rig.vf_bar(2), rig.vf_bar(0));
    assert_eq!(rig.places(), [(2, low), (2, low + 4096), (0, high), (0, high + MIB)]);
    // The guest moves one VF BAR: all follow.
    let moved = u32::try_from(low + 8192).unwrap();
    rig.write(rig.at, rig.capability + 0x24 + 8, &moved.to_le_bytes());
    assert_eq!(rig.places(), [(2, low + 8192), (2, low + 12288), (0, high), (0, high + MIB)]);
    rig.control(1);
    assert_eq!(rig.places(), []);
    rig.control(1 | 1 << 3);
    assert_eq!(rig.places().len(), 4);
    rig.control(1 << 3);
    assert_eq!(rig.places(), []);
}

#[test]
fn virtual_functions_behind_the_end_of_a_bus_are_on_the_next_one() {
    let mut rig = Rig::new(sriov(40, 250, 1));
    rig.enable(40, 1);
    assert_eq!(rig.place(256).bus(), rig.at.bus() + 1);
    for routing_id in [250, 255, 256, 289] {
        assert_eq!(rig.read(rig.place(routing_id), 8) >> 8, 0x02_0000, "{routing_id}");
    }
    assert_eq!(rig.read(rig.place(290), 8), u32::MAX);
    // A guest that takes that bus away takes them with it.
    let port = rig.plan.by_name("rp").unwrap().at.bdf;
    let secondary = rig.at.bus();
    rig.write(port, 0x1A, &[secondary]);
    assert_eq!((rig.read(rig.place(256), 8), rig.read(rig.place(255), 8) >> 8), (u32::MAX, 0x02_0000));
}

#[test]
fn every_reset_of_the_physical_function_ends_them_and_their_own_does_not() {
    let mut rig = Rig::new(sriov(2, 1, 1));
    let flr = |rig: &mut Rig, at: Bdf| {
        let express = (0x40..0x100).step_by(4).find(|offset| rig.read(at, *offset) & 0xFF == 0x10).unwrap();
        rig.write(at, express + 8, &[0, 0x80]);
    };
    rig.enable(2, 1 | 1 << 3);
    let there = rig.places();
    assert_eq!(there.len(), 4);
    let first = rig.place(1);
    flr(&mut rig, first);
    assert_eq!(rig.places(), there, "its BARs are not its own");
    let physical = rig.at;
    flr(&mut rig, physical);
    assert_eq!((rig.places(), rig.tree.take_vanished().len()), (vec![], 2));
    let port = rig.plan.by_name("rp").unwrap().at.bdf;
    for end in 0..2 {
        let (memory, vf_memory) = (rig.plan.by_name("pf").unwrap().clone(), rig.vf_bar(2));
        let PlannedKind::Endpoint(endpoint) = &memory.kind else { panic!("a port") };
        assert!(endpoint.bars[0].is_some());
        rig.write(physical, rig.capability + 0x24 + 8, &u32::try_from(vf_memory).unwrap().to_le_bytes());
        rig.enable(2, 1 | 1 << 3);
        assert_eq!(rig.places().len(), 2);
        match end {
            0 => {
                rig.write(port, 0x3E, &[0x40, 0]);
                rig.write(port, 0x3E, &[0, 0]);
            }
            _ => rig.tree.reset(&mut rig.effects),
        }
        assert_eq!((rig.places(), rig.tree.take_vanished().len()), (vec![], 2));
        assert_eq!(rig.read(first, 8), u32::MAX);
    }
}

#[test]
fn what_is_written_down_has_the_virtual_functions_that_are_enabled() {
    let mut before = Rig::new(sriov(4, 8, 2));
    before.enable(3, 1 | 1 << 3);
    let first = before.place(8);
    before.write(first, 4, &[4, 0]);
    let mut writer = Writer::new();
    before.tree.save(&mut writer).unwrap();
    let bytes = writer.into_bytes();
    let mut after = Rig::new(sriov(4, 8, 2));
    let mut reader = Reader::new(&bytes, "tree");
    after.tree.restore(&mut reader, &mut after.effects).unwrap();
    assert_eq!(after.tree.take_appeared().len(), 3);
    assert_eq!((after.places().len(), after.places()), (6, before.places()));
    assert_eq!(after.read(first, 4) & 7, 4);
    // A tree whose physical function has fewer cannot take it.
    let mut other = Rig::new(sriov(2, 8, 2));
    assert!(other.tree.restore(&mut Reader::new(&bytes, "tree"), &mut other.effects).is_err());
}

#[test]
fn a_place_where_the_bar_cannot_have_been_is_not_taken_back() {
    let mut before = Rig::new(sriov(4, 8, 2));
    before.enable(3, 1 | 1 << 3);
    let mut writer = Writer::new();
    before.tree.save(&mut writer).unwrap();
    let bytes = writer.into_bytes();
    let restored = |bytes: &[u8]| {
        let mut rig = Rig::new(sriov(4, 8, 2));
        rig.tree.restore(&mut Reader::new(bytes, "tree"), &mut rig.effects)
    };
    assert_eq!(restored(&bytes), Ok(()));
    // The last is a place: number of the register, eight bytes of address, whether it is reachable.
    for (from_end, value, part) in [(10, 5, "of this function"), (10, 9, "of this function"), (9, 1, "can have")] {
        let mut other = bytes.clone();
        let at = other.len() - from_end;
        other[at] = value;
        let error = restored(&other).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
