//! Tells clients what happens to a machine, as it happens.
//!
//! The core tells; nobody waits. Each client that listens has room for [`ROOM`] events: one that reads too slowly misses the
//! oldest and is told how many.

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tokio::sync::broadcast::{self, error::RecvError};

use crate::info::{DeviceInfo, Progress, Step, VmInfo};

/// Events that a client may be behind.
pub const ROOM: usize = 256;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The machine is in another phase.
    Phase(String),
    /// A long step went on.
    Progress(Progress),
    /// The guest's processors begin with the kernel or firmware: memory is there, and the machine is made.
    KernelEntered,
    /// The machine is built anew around its memory, and why. [`Event::KernelEntered`] follows.
    Reset(String),
    /// A device is there.
    DeviceAdded(Box<DeviceInfo>),
    /// A device is there that was at another address when it was last told of.
    DeviceMoved(Box<DeviceInfo>),
    /// A device has left.
    DeviceRemoved(String),
    /// A device did not come, did not leave as it should, or cannot do what it did since the host's side of it failed.
    DeviceFailed {
        /// Its name, or that of its port; `memory` for memory that was promised.
        id: String,
        /// Why.
        why: String,
    },
    /// The host reported an error of a device's hardware. The guest goes on with the device, and was not told.
    DeviceError {
        /// Its name.
        id: String,
        /// Its address on the host.
        host_bdf: String,
        /// What is known of it.
        why: String,
    },
    /// The host wants a device back.
    DeviceRequested {
        /// Its name.
        id: String,
        /// Its address on the host.
        host_bdf: String,
        /// What follows.
        why: String,
    },
    /// The guest's kernel cannot go on and has said so, or its processor cannot.
    GuestPanic(String),
    /// The guest has ended.
    Ended(String),
}

impl Event {
    /// In one JSON object.
    #[must_use]
    pub fn json(&self) -> Value {
        match self {
            Self::Phase(phase) => json!({ "event": "phase", "phase": phase }),
            Self::Progress(progress) => {
                let mut value = crate::dialect::progress(progress);
                if let Some(map) = value.as_object_mut() {
                    map.insert("event".to_owned(), "progress".into());
                }
                value
            }
            Self::KernelEntered => json!({ "event": "kernel-entered" }),
            Self::Reset(why) => json!({ "event": "reset", "why": why }),
            Self::DeviceAdded(device) => with_address("device-added", device),
            Self::DeviceMoved(device) => with_address("device-moved", device),
            Self::DeviceRemoved(id) => json!({ "event": "device-removed", "id": id }),
            Self::DeviceFailed { id, why } => json!({ "event": "device-failed", "id": id, "why": why }),
            Self::DeviceError { id, host_bdf, why } => with_host("device-error", id, host_bdf, why),
            Self::DeviceRequested { id, host_bdf, why } => with_host("device-requested", id, host_bdf, why),
            Self::GuestPanic(why) => json!({ "event": "guest-panic", "why": why }),
            Self::Ended(why) => json!({ "event": "ended", "why": why }),
        }
    }
}

fn with_host(event: &str, id: &str, host_bdf: &str, why: &str) -> Value {
    json!({ "event": event, "id": id, "host_bdf": host_bdf, "why": why })
}

fn with_address(event: &str, device: &DeviceInfo) -> Value {
    let mut map = Map::new();
    map.insert("event".to_owned(), event.into());
    map.insert("id".to_owned(), device.id.clone().into());
    map.insert("kind".to_owned(), device.kind.to_string().into());
    map.insert("bdf".to_owned(), device.bdf.to_string().into());
    map.insert("pci_path".to_owned(), device.path.clone().into());
    map.into()
}

/// Where events are told and heard.
#[derive(Clone)]
pub struct Events(broadcast::Sender<Option<Arc<Event>>>);

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

impl Default for Events {
    fn default() -> Self {
        Self(broadcast::Sender::new(ROOM))
    }
}

impl Events {
    /// Tells all who listen. Never waits.
    pub fn tell(&self, event: Event) {
        let _ = self.0.send(Some(Arc::new(event)));
    }

    /// Nothing more will be told.
    pub fn close(&self) {
        let _ = self.0.send(None);
    }

    /// Hears what is told from now on.
    #[must_use]
    pub fn listen(&self) -> Listener {
        Listener { receiver: self.0.subscribe(), ended: false }
    }

    /// Tells how a machine that was as `old` differs now. Progress is told by percent.
    pub(crate) fn tell_difference(&self, old: Option<&VmInfo>, new: Option<&VmInfo>) {
        if self.0.receiver_count() == 0 {
            return;
        }
        let phase = |info: Option<&VmInfo>| info.map_or_else(|| "absent".to_owned(), |info| info.phase.to_string());
        if phase(old) != phase(new) {
            self.tell(Event::Phase(phase(new)));
        }
        let step = |info: Option<&VmInfo>| info.and_then(|info| info.progress);
        if let (Some(before), Some(after)) = (step(old), step(new))
            && (before.step, after.step, before.total) == (Step::Prefault, Step::DmaMap, after.total)
            && before.percent() < 100
        {
            // Memory is mapped when all of it is populated.
            self.tell(Event::Progress(Progress { done: before.total, ..before }));
        }
        let percent =
            |info: Option<&VmInfo>| info.and_then(|info| info.progress).map(|progress| (progress.step, progress.percent()));
        if let (true, Some(progress)) = (percent(old) != percent(new), new.and_then(|info| info.progress)) {
            self.tell(Event::Progress(progress));
        }
        let devices = |info: Option<&VmInfo>| info.map_or_else(Vec::new, |info| info.devices.clone());
        let (before, after) = (devices(old), devices(new));
        let lacks = |list: &[DeviceInfo], id: &str| list.iter().all(|device| device.id != id);
        for device in before.iter().filter(|device| lacks(&after, &device.id)) {
            self.tell(Event::DeviceRemoved(device.id.clone()));
        }
        for device in after {
            match before.iter().find(|there| there.id == device.id) {
                None => self.tell(Event::DeviceAdded(Box::new(device))),
                Some(there) if (there.bdf, &there.path) != (device.bdf, &device.path) => {
                    self.tell(Event::DeviceMoved(Box::new(device)));
                }
                Some(_) => {}
            }
        }
    }
}

/// One who listens.
#[derive(Debug)]
pub struct Listener {
    receiver: broadcast::Receiver<Option<Arc<Event>>>,
    ended: bool,
}

impl Listener {
    /// What comes next, as a line of JSON; `None` when nothing more will come.
    pub async fn next(&mut self) -> Option<Value> {
        if self.ended {
            return None;
        }
        match self.receiver.recv().await {
            Ok(Some(event)) => Some(event.json()),
            Err(RecvError::Lagged(count)) => Some(json!({ "event": "lost", "count": count })),
            Ok(None) | Err(RecvError::Closed) => {
                self.ended = true;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::VmConfig;
    use crate::info::{DeviceClass, PciAddress, Phase};

    fn heard(listener: &mut Listener) -> Vec<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut lines = Vec::new();
            while let Some(line) = listener.next().await {
                lines.push(line.to_string());
            }
            lines
        })
    }

    #[test]
    fn what_differs_is_told_and_nothing_else() {
        let events = Events::default();
        let mut listener = events.listen();
        let info = |phase, done| VmInfo {
            config: VmConfig::default(),
            phase,
            progress: Some(Progress { step: Step::Prefault, done, total: 1000 }),
            memory: 0,
            balloon: crate::info::Gauge::default(),
            devices: Vec::new(),
        };
        let (one, two, three) = (info(Phase::Created, 10), info(Phase::Created, 19), info(Phase::Running, 20));
        events.tell_difference(None, Some(&one));
        events.tell_difference(Some(&one), Some(&two));
        events.tell_difference(Some(&two), Some(&three));
        events.tell_difference(Some(&three), None);
        events.close();
        let expected = [
            r#"{"event":"phase","phase":"created"}"#,
            r#"{"done":10,"event":"progress","percent":1,"step":"prefault","total":1000}"#,
            r#"{"event":"phase","phase":"running"}"#,
            r#"{"done":20,"event":"progress","percent":2,"step":"prefault","total":1000}"#,
            r#"{"event":"phase","phase":"absent"}"#,
        ];
        assert_eq!(heard(&mut listener), expected);
    }

    fn device(id: &str, number: u8) -> DeviceInfo {
        DeviceInfo {
            id: id.to_owned(),
            kind: DeviceClass::Rng,
            bdf: PciAddress { segment: 0, bus: 0, device: number, function: 0 },
            path: format!("{number:02x}"),
            port: None,
            host: None,
            clique: None,
            bars: Vec::new(),
            label: String::new(),
        }
    }

    /// One of each kind. A kind that is missing here does not compile.
    fn one_of_each() -> Vec<Event> {
        let (why, id, host_bdf) = (String::new, String::new, String::new);
        let device = || Box::new(device("a", 1));
        let next = |event: &Event| match event {
            Event::Phase(_) => Some(Event::Progress(Progress { done: 0, step: Step::Prefault, total: 1 })),
            Event::Progress(_) => Some(Event::KernelEntered),
            Event::KernelEntered => Some(Event::Reset(why())),
            Event::Reset(_) => Some(Event::DeviceAdded(device())),
            Event::DeviceAdded(_) => Some(Event::DeviceMoved(device())),
            Event::DeviceMoved(_) => Some(Event::DeviceRemoved(id())),
            Event::DeviceRemoved(_) => Some(Event::DeviceFailed { id: id(), why: why() }),
            Event::DeviceFailed { .. } => Some(Event::DeviceError { id: id(), host_bdf: host_bdf(), why: why() }),
            Event::DeviceError { .. } => Some(Event::DeviceRequested { id: id(), host_bdf: host_bdf(), why: why() }),
            Event::DeviceRequested { .. } => Some(Event::GuestPanic(why())),
            Event::GuestPanic(_) => Some(Event::Ended(why())),
            Event::Ended(_) => None,
        };
        std::iter::successors(Some(Event::Phase(why())), next).collect()
    }

    #[test]
    fn the_document_names_every_event_and_nothing_else() {
        let event = include_str!("../openapi.yaml").split_once("\n    Event:\n").unwrap().1;
        let names = event.split_once("enum: [").unwrap().1.split_once(']').unwrap().0;
        let mut described: Vec<_> = names.split(',').map(str::trim).collect();
        described.sort_unstable();
        let values: Vec<_> = one_of_each().iter().map(Event::json).collect();
        let mut told: Vec<_> = values.iter().map(|value| value["event"].as_str().unwrap()).chain(["lost"]).collect();
        told.sort_unstable();
        assert_eq!(described, told);
    }

    #[test]
    fn memory_that_is_mapped_was_populated_and_told_as_such() {
        let events = Events::default();
        let mut listener = events.listen();
        let info = |step, done| VmInfo {
            config: VmConfig::default(),
            phase: Phase::Created,
            progress: Some(Progress { step, done, total: 1000 }),
            memory: 0,
            balloon: crate::info::Gauge::default(),
            devices: Vec::new(),
        };
        let steps = [(Step::Prefault, 370), (Step::DmaMap, 0), (Step::DmaMap, 1000)].map(|(step, done)| info(step, done));
        steps.windows(2).for_each(|pair| events.tell_difference(pair.first(), pair.last()));
        events.close();
        let expected = [
            r#"{"done":1000,"event":"progress","percent":100,"step":"prefault","total":1000}"#,
            r#"{"done":0,"event":"progress","percent":0,"step":"dma-map","total":1000}"#,
            r#"{"done":1000,"event":"progress","percent":100,"step":"dma-map","total":1000}"#,
        ];
        assert_eq!(heard(&mut listener), expected);
    }

    #[test]
    fn what_the_host_says_of_a_device_names_it_on_both_sides() {
        let (id, host_bdf, why) = ("gpu".to_owned(), "0000:17:00.0".to_owned(), "x".to_owned());
        let error = Event::DeviceError { id: id.clone(), host_bdf: host_bdf.clone(), why: why.clone() };
        let expected = r#"{"event":"device-error","host_bdf":"0000:17:00.0","id":"gpu","why":"x"}"#;
        assert_eq!(error.json().to_string(), expected);
        let requested = Event::DeviceRequested { id, host_bdf, why };
        assert_eq!(requested.json().to_string(), expected.replace("error", "requested"));
    }

    #[test]
    fn a_device_that_another_one_moves_is_told_with_its_new_address() {
        let events = Events::default();
        let mut listener = events.listen();
        let info = |devices| {
            let (config, balloon) = (VmConfig::default(), crate::info::Gauge::default());
            VmInfo { config, phase: Phase::Created, progress: None, memory: 0, balloon, devices }
        };
        let (one, two) = (info(vec![device("rng", 1)]), info(vec![device("net", 1), device("rng", 2)]));
        events.tell_difference(Some(&one), Some(&two));
        events.tell_difference(Some(&two), Some(&two));
        events.close();
        let expected = [
            r#"{"bdf":"0000:00:01.0","event":"device-added","id":"net","kind":"rng","pci_path":"01"}"#,
            r#"{"bdf":"0000:00:02.0","event":"device-moved","id":"rng","kind":"rng","pci_path":"02"}"#,
        ];
        assert_eq!(heard(&mut listener), expected);
    }

    #[test]
    fn a_listener_that_is_too_slow_is_told_how_much_it_missed() {
        let events = Events::default();
        let mut listener = events.listen();
        for n in 0..ROOM + 9 {
            events.tell(Event::DeviceRemoved(n.to_string()));
        }
        events.close();
        let heard = heard(&mut listener);
        assert_eq!((heard.len(), heard[0].as_str()), (ROOM, r#"{"count":10,"event":"lost"}"#));
    }
}
