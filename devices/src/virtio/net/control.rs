//! What a driver asks of the control queue (virtio 1.2 5.1.6.5): how many pairs of queues are in use, and which offloads it can
//! take.

use std::io;
use std::sync::{Arc, Mutex};

use pci::sync::lock;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
    VIRTIO_NET_ERR, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_OK,
};
use vm_memory::{Bytes, GuestMemoryMmap, VolatileSlice};

use super::tap::{Offloads, Tap};
use crate::virtio::buffers::{Buffers, split_last, take};
use crate::virtio::ring::{Chain, Served};

/// What a driver asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::virtio) enum Command {
    /// So many pairs of queues are in use.
    Pairs(usize),
    /// Feature bits of the offloads that it can take.
    Offloads(u64),
}

/// Answers one command, which `obey` carries out; `None` of it is a refusal.
pub(in crate::virtio) fn serve(chain: Chain<'_>, memory: &GuestMemoryMmap, obey: impl FnOnce(Command) -> Option<()>) -> Served {
    let Some(mut buffers) = Buffers::of(chain, memory) else { return Served::Malformed };
    let Some(status) = split_last(&mut buffers.writable) else { return Served::Malformed };
    let command = if buffers.whole { read(&mut buffers.readable) } else { None };
    let answer = if command.and_then(obey).is_some() { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
    match status.write_slice(&[answer.to_le_bytes()[0]], 0) {
        Ok(()) => Served::Used(1),
        Err(_) => Served::Malformed,
    }
}

fn read(command: &mut Vec<VolatileSlice<'_>>) -> Option<Command> {
    let [class, command_number] = take::<2>(command)?;
    match (u32::from(class), u32::from(command_number)) {
        (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) => {
            Some(Command::Pairs(usize::from(u16::from_le_bytes(take(command)?))))
        }
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET) => {
            Some(Command::Offloads(u64::from_le_bytes(take(command)?)))
        }
        _ => None,
    }
}

/// What the driver has set of a tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Setting {
    /// Pairs of queues in use.
    pub(super) pairs: usize,
    /// Feature bits of offloads.
    pub(super) offloads: u64,
}

/// The tap, as the driver has it set.
pub(super) struct Control {
    /// For whoever keeps it.
    pub(super) setting: Arc<Mutex<Option<Setting>>>,
    pub(super) taps: Vec<Arc<Tap>>,
    /// Pairs that the driver may use.
    pub(super) pairs: usize,
}

impl Control {
    fn note(&self, change: impl FnOnce(&mut Setting)) {
        if let Some(setting) = &mut *lock(&self.setting) {
            change(setting);
        }
    }

    /// Carries out a command, if it can be.
    pub(super) fn obey(&self, command: Command) -> Option<()> {
        match command {
            Command::Pairs(pairs) => {
                (1..=self.pairs).contains(&pairs).then_some(())?;
                self.set_pairs(pairs).ok()?;
                self.note(|setting| setting.pairs = pairs);
                Some(())
            }
            Command::Offloads(features) => {
                self.set_offloads(features);
                self.note(|setting| setting.offloads = features);
                Some(())
            }
        }
    }

    /// Lets the first `pairs` queues of the tap have packets, and no others.
    pub(super) fn set_pairs(&self, pairs: usize) -> io::Result<()> {
        if self.taps.len() == 1 {
            return Ok(());
        }
        self.taps.iter().enumerate().try_for_each(|(index, tap)| tap.set_attached(index < pairs))
    }

    /// Lets packets for the guest leave to it what `features` say. A tap that cannot does more than it must.
    pub(super) fn set_offloads(&self, features: u64) {
        let on = |bit: u32| features & 1 << bit != 0;
        let offloads = Offloads {
            checksum: on(VIRTIO_NET_F_GUEST_CSUM),
            tcp4: on(VIRTIO_NET_F_GUEST_TSO4),
            tcp6: on(VIRTIO_NET_F_GUEST_TSO6),
            ecn: on(VIRTIO_NET_F_GUEST_ECN),
            udp: on(VIRTIO_NET_F_GUEST_UFO),
        };
        if let Some(tap) = self.taps.first()
            && tap.set_offloads(offloads).is_err()
            && tap.set_offloads(Offloads { udp: false, ..offloads }).is_err()
        {
            let _ = tap.set_offloads(Offloads::default());
        }
    }
}
