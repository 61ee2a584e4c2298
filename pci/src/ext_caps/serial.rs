//! The device serial number (PCIe 6.0 7.9.3).

use super::{ExtendedCapability, id};
use crate::config::RegDef;

/// An EUI-64 serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Serial(pub u64);

impl ExtendedCapability for Serial {
    fn id(&self) -> u16 {
        id::SERIAL
    }

    fn version(&self) -> u8 {
        1
    }

    fn layout(&self) -> Vec<RegDef> {
        let [a, b, c, d, e, f, g, h] = self.0.to_le_bytes();
        let halves = [[a, b, c, d], [e, f, g, h]].map(|half| RegDef::read_only(u32::from_le_bytes(half)));
        let [low, high] = halves;
        vec![RegDef::default(), low, high]
    }
}
