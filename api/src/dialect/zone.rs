//! Decides what `memory.zones` mean.
//!
//! A zone with a `file` is alone, and all of memory is in that file: Kata Containers makes its templates so. Zones without one are names
//! for parts of memory, which nodes of `numa` are made of; one that no node names is memory as any other. What a zone may say beyond its
//! size, Banyan's memory has as a whole, or a node has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::create::{WHAT, few};
use super::disk;
use super::json::{Notes, refused};
use crate::config::{MemoryConfig, MemoryZone, Size};
use crate::error::ApiError;

/// The name of a zone with a file, which is Kata's.
const NAME: &str = "mem0";

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct ZoneBody {
    id: String,
    size: u64,
    file: Option<PathBuf>,
    shared: Option<bool>,
    hugepages: Option<bool>,
    hugepage_size: Option<u64>,
    prefault: Option<bool>,
    host_numa_node: Option<u32>,
    hotplug_size: Option<u64>,
    hotplugged_size: Option<u64>,
    mergeable: Option<bool>,
    // As of all memory.
    #[serde(rename = "reserve")]
    _reserve: Option<bool>,
}

/// What zones say of memory as a whole.
#[derive(Default)]
pub(super) struct Zones {
    /// Their sum, if there are any.
    pub size: Option<u64>,
    pub shared: bool,
    pub hugepages: bool,
    pub hugepage_size: Option<u64>,
    pub prefault: bool,
    pub file: Option<PathBuf>,
    /// Those without a file.
    pub parts: Vec<MemoryZone>,
}

/// Reads the zones. `size` and `shared` are those of `memory`.
pub(super) fn read(bodies: Option<Vec<ZoneBody>>, size: u64, shared: Option<bool>, notes: &Notes) -> Result<Zones, ApiError> {
    let bodies = bodies.unwrap_or_default();
    few("memory.zones", bodies.len())?;
    if bodies.iter().any(|zone| zone.mergeable == Some(true)) {
        notes.ignored(WHAT, "memory.zones.mergeable");
    }
    let zones = match bodies.iter().position(|zone| zone.file.is_some()) {
        Some(index) if bodies.len() > 1 => {
            let why = "all of memory is in a file or none of it; leave `file` out, or give this zone alone";
            return Err(refuse(index, ".file", why));
        }
        Some(_) => bodies.into_iter().try_fold(Zones::default(), |_, zone| in_file(zone, shared, notes))?,
        None => parts(bodies)?,
    };
    // What was told of a machine may be given again.
    match zones.size {
        Some(sum) if ![0, sum].contains(&size) => {
            let why = format!("the zones have {}, and {} are given; write 0", Size(sum), Size(size));
            Err(refused(WHAT, "memory.size", &why))
        }
        _ => Ok(zones),
    }
}

fn in_file(zone: ZoneBody, shared: Option<bool>, notes: &Notes) -> Result<Zones, ApiError> {
    if zone.file.as_ref().is_some_and(|file| file.as_os_str().is_empty()) {
        return Err(refuse(0, ".file", "it names no file; give a path"));
    }
    let others = [
        (".hugepages", zone.hugepages == Some(true)),
        (".hugepage_size", zone.hugepage_size.is_some()),
        (".host_numa_node", zone.host_numa_node.is_some()),
        (".hotplug_size", zone.hotplug_size.is_some_and(|size| size > 0)),
        (".hotplugged_size", zone.hotplugged_size.is_some_and(|size| size > 0)),
    ];
    if let Some((key, _)) = others.into_iter().find(|(_, there)| *there) {
        let why = "memory in a file has the pages of the file and does not grow; leave it out, and give `memory.hotplug_size` for what \
                   may come";
        return Err(refuse(0, key, why));
    }
    let own = zone.shared.unwrap_or_default();
    if shared == Some(true) && !own {
        let why = "`memory.shared` says otherwise; what the guest writes is either in the file or it is not: write both alike";
        return Err(refuse(0, ".shared", why));
    }
    if zone.id != NAME {
        notes.ignored(WHAT, "memory.zones.id");
    }
    let prefault = zone.prefault.unwrap_or_default();
    Ok(Zones { size: Some(zone.size), shared: own, prefault, file: zone.file, ..Zones::default() })
}

fn parts(bodies: Vec<ZoneBody>) -> Result<Zones, ApiError> {
    let (mut all, mut ids) = (Zones::default(), BTreeSet::new());
    for (index, zone) in bodies.into_iter().enumerate() {
        for (key, size) in [(".hotplug_size", zone.hotplug_size), (".hotplugged_size", zone.hotplugged_size)] {
            if size.is_some_and(|size| size > 0) {
                return Err(refuse(
                    index,
                    key,
                    "zones do not grow; leave it out, and give `memory.hotplug_size` for what may come",
                ));
            }
        }
        if !ids.insert(zone.id.clone()) {
            let why = format!("there is a zone `{}` already; give it another id", zone.id.escape_debug());
            return Err(refuse(index, ".id", &why));
        }
        let (shared, hugepages) = (zone.shared.unwrap_or_default(), zone.hugepages.unwrap_or_default());
        let prefault = zone.prefault.unwrap_or_default();
        if index == 0 {
            (all.shared, all.hugepages, all.prefault) = (shared, hugepages, prefault);
            all.hugepage_size = zone.hugepage_size;
        }
        let alike = [
            (".shared", all.shared == shared),
            (".hugepages", all.hugepages == hugepages),
            (".hugepage_size", all.hugepage_size == zone.hugepage_size),
            (".prefault", all.prefault == prefault),
        ];
        if let Some((key, _)) = alike.into_iter().find(|(_, alike)| !alike) {
            let why = "the zones before it say otherwise, and a machine's memory is alike; give all the same";
            return Err(refuse(index, key, why));
        }
        let Some(sum) = all.size.unwrap_or_default().checked_add(zone.size) else {
            return Err(refuse(index, ".size", "together with the zones before it, it is more than 64 bits can count; lower it"));
        };
        all.size = Some(sum);
        all.parts.push(MemoryZone { id: zone.id, size: Size(zone.size), host_node: zone.host_numa_node });
    }
    Ok(all)
}

fn refuse(index: usize, key: &str, why: &str) -> ApiError {
    refused(WHAT, &format!("memory.zones[{index}]{key}"), why)
}

/// Refuses zones that only nodes can be made of, where no node in `numa` names any.
pub(super) fn without_nodes(memory: &MemoryConfig) -> Result<(), ApiError> {
    match memory.zones.as_slice() {
        [] | [MemoryZone { host_node: None, .. }] => Ok(()),
        [_] => {
            let why = "no node is made of this zone; leave it out, or name the zone in `memory_zones` of an object in `numa`";
            Err(refuse(0, ".host_numa_node", why))
        }
        _ => {
            let why = "no node is made of these; give `memory.size`, or name each in `memory_zones` of an object in `numa`";
            Err(refused(WHAT, "memory.zones", why))
        }
    }
}

/// Zones that nodes are being made of.
pub(super) struct Supply<'a> {
    all: &'a [MemoryZone],
    free: BTreeMap<&'a str, &'a MemoryZone>,
}

impl<'a> Supply<'a> {
    /// The zones of `memory`, all of them free.
    pub(super) fn new(memory: &'a MemoryConfig) -> Result<Self, ApiError> {
        if memory.zones.is_empty() {
            let why = "nodes in objects are made of zones without `file`; give such in `memory.zones` in place of `memory.size`, or \
                       write each node as a text such as `id=0,cpus=0-3,memory=2G,host-node=0`";
            return Err(refused(WHAT, "numa", why));
        }
        Ok(Self { all: &memory.zones, free: memory.zones.iter().map(|zone| (zone.id.as_str(), zone)).collect() })
    }

    /// Takes the zones `ids` for one node, whose `memory_zones` is `key`: bytes, and the host node that they come from.
    pub(super) fn take(&mut self, key: &str, ids: &[String]) -> Result<(Size, Option<u32>), ApiError> {
        let (mut size, mut host) = (0_u64, None);
        for id in ids {
            let no = |why: &str| Err(refused(WHAT, key, &format!("the zone `{}`: {why}", id.escape_debug())));
            let Some(zone) = self.free.remove(id.as_str()) else {
                let taken = self.all.iter().any(|zone| zone.id == *id);
                return no(if taken {
                    "a node has it already; name each zone once"
                } else {
                    "`memory.zones` does not have it; add it"
                });
            };
            if *host.get_or_insert(zone.host_node) != zone.host_node {
                return no(
                    "it has another `host_numa_node` than those before it, and a node's memory comes from one; make it a node of \
                           its own",
                );
            }
            // The sum of all is known to be possible.
            size = size.saturating_add(zone.size.bytes());
        }
        match host {
            Some(host) => Ok((Size(size), host)),
            None => Err(refused(WHAT, key, "the node has no zone; name those that it is made of")),
        }
    }

    /// Refuses zones that no node took.
    pub(super) fn used_up(&self) -> Result<(), ApiError> {
        match self.free.keys().next() {
            None => Ok(()),
            Some(id) => {
                let why = format!("the zone `{}` is in no node; add it to the `memory_zones` of one", id.escape_debug());
                Err(refused(WHAT, "memory.zones", &why))
            }
        }
    }
}

/// `memory.zones`, if memory is in a file or was given in zones.
pub(super) fn body(memory: &MemoryConfig) -> Option<Value> {
    let zone = |id: &str, size: Size, host: Option<u32>| {
        let mut zone =
            json!({ "id": id, "size": size.bytes(), "shared": memory.shared, "hugepages": memory.hugepages.is_some() });
        if let Some(map) = zone.as_object_mut() {
            map.insert("prefault".to_owned(), memory.prefault.into());
            map.insert("mergeable".to_owned(), false.into());
            disk::put(map, "file", memory.file.as_ref().map(|file| file.to_string_lossy()));
            disk::put(map, "host_numa_node", host);
            disk::put(map, "hugepage_size", memory.hugepages.map(|page| page.size().bytes()));
        }
        zone
    };
    if memory.file.is_some() {
        return Some(json!([zone(NAME, memory.size, None)]));
    }
    let parts = memory.zones.iter().map(|part| zone(&part.id, part.size, part.host_node));
    (!memory.zones.is_empty()).then(|| parts.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NumaConfig, VmConfig};
    use crate::dialect::{create, vm_info};
    use crate::info::{Gauge, Phase, VmInfo};

    fn created(memory: &Value) -> Result<VmConfig, String> {
        let body = json!({ "payload": { "kernel": "/k" }, "memory": memory });
        create(body.to_string().as_bytes(), &VmConfig::default(), &Notes::default()).map_err(|error| error.to_string())
    }

    fn told(config: VmConfig) -> Value {
        let (progress, balloon, devices) = (None, Gauge::default(), Vec::new());
        vm_info(&VmInfo { config, phase: Phase::Created, progress, memory: 0, balloon, devices })["config"]["memory"].clone()
    }

    #[test]
    fn the_zone_of_a_template_is_memory_in_a_file_and_is_told_as_it_was_given() {
        for (shared, text) in [(true, "512M,shared=on,file=/t/memory"), (false, "512M,file=/t/memory")] {
            let zone = json!({ "id": "mem0", "size": 512 << 20, "file": "/t/memory", "shared": shared });
            let config = created(&json!({ "size": 0, "shared": shared, "zones": [zone] })).unwrap();
            assert_eq!(config.memory, text.parse().unwrap());
            let told = told(config.clone());
            for key in ["id", "size", "file", "shared"] {
                assert_eq!(told["zones"][0][key], zone[key]);
            }
            assert_eq!(created(&told), Ok(config), "what was told can be given again");
        }
        let mut alone =
            json!({ "size": 0, "zones": [{ "id": "mem0", "size": 4096, "file": "/m", "shared": true, "prefault": true }] });
        // As a driver sends what it does not know.
        for key in ["hugepages", "hugepage_size", "host_numa_node", "hotplug_size", "hotplugged_size", "mergeable", "reserve"] {
            alone["zones"][0][key] = Value::Null;
        }
        let memory = created(&alone).unwrap().memory;
        assert!(memory.keeps() && memory.prefault);
    }

    #[test]
    fn one_zone_without_a_file_is_memory_as_any_other_and_goes_with_nodes_in_texts() {
        let zone = json!({ "id": "a", "size": 4096, "file": null, "hotplug_size": 0, "hugepages": false, "shared": true });
        let config = created(&json!({ "size": 0, "zones": [zone] })).unwrap();
        assert_eq!((config.memory.size, config.memory.shared, &config.numa), (Size(4096), true, &NumaConfig::Off));
        let told = told(config.clone());
        assert_eq!((&told["size"], &told["zones"][0]["id"]), (&json!(4096), &json!("a")));
        assert_eq!(created(&told), Ok(config), "what was told can be given again");
        for zones in [json!([zone]), json!([{ "id": "mem0", "size": 4096, "file": "/m" }])] {
            let body =
                json!({ "payload": { "kernel": "/k" }, "memory": { "size": 0, "zones": zones }, "numa": ["id=0,memory=4K"] });
            let config = create(body.to_string().as_bytes(), &VmConfig::default(), &Notes::default()).unwrap();
            assert_eq!(config.numa.texts(), ["id=0,memory=4K"]);
        }
    }

    #[test]
    fn what_a_zone_cannot_be_is_refused_by_its_key() {
        let with = |extra: Value| {
            let mut zone = json!({ "id": "mem0", "size": 4096, "file": "/m" });
            extra.as_object().unwrap().iter().for_each(|(key, value)| zone[key] = value.clone());
            json!({ "size": 0, "zones": [zone] })
        };
        let (mut huge, mut contrary, mut other) = (with(json!({})), with(json!({})), with(json!({})));
        (huge["hugepages"], contrary["shared"], other["size"]) = (true.into(), true.into(), 8192.into());
        let mut several = with(json!({ "file": null, "id": "a" }));
        several["zones"].as_array_mut().unwrap().push(other["zones"][0].clone());
        for (memory, part) in [
            (several, "`memory.zones[1].file`: all of memory is in a file or none of it"),
            (
                with(json!({ "file": null, "host_numa_node": 0 })),
                "`memory.zones[0].host_numa_node`: no node is made of this zone",
            ),
            (with(json!({ "file": null, "hotplug_size": 1 })), "`memory.zones[0].hotplug_size`: zones do not grow"),
            (with(json!({ "file": "" })), "`memory.zones[0].file`: it names no file"),
            (with(json!({ "hugepages": true })), "`memory.zones[0].hugepages`"),
            (with(json!({ "host_numa_node": 0 })), "`memory.zones[0].host_numa_node`"),
            (with(json!({ "hotplug_size": 1 })), "`memory.zones[0].hotplug_size`"),
            (huge, "`memory.hugepages`: memory in a file has the pages of the file"),
            (contrary, "`memory.zones[0].shared`: `memory.shared` says otherwise"),
            (other, "`memory.size`: the zones have 4K, and 8K are given; write 0"),
        ] {
            let error = created(&memory).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
