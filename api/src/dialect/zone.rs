//! Reads and writes `memory.zones`: one zone, whose memory is in a file. Kata Containers makes its templates so.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::create::WHAT;
use super::disk;
use super::json::{Notes, refused};
use crate::config::MemoryConfig;
use crate::error::ApiError;

/// Its name where nobody gave it one, which is Kata's.
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

/// A zone.
pub(super) struct Zone {
    pub size: u64,
    pub file: PathBuf,
    pub shared: bool,
    pub prefault: bool,
}

/// Reads the zone, if there is one. `size` and `shared` are those of `memory`.
pub(super) fn read(
    bodies: Option<Vec<ZoneBody>>,
    size: u64,
    shared: Option<bool>,
    notes: &Notes,
) -> Result<Option<Zone>, ApiError> {
    let refuse = |key: &str, why: &str| Err(refused(WHAT, &format!("memory.zones{key}"), why));
    let mut bodies = bodies.unwrap_or_default();
    let Some(zone) = bodies.pop() else { return Ok(None) };
    if !bodies.is_empty() {
        return refuse(
            "",
            "several zones are not supported; give one with `file`, or `memory.size`, and `numa` for memory nodes",
        );
    }
    let Some(file) = zone.file else {
        return refuse("[0]", "a zone without `file` is not supported; give `memory.size`, and `numa` for memory nodes");
    };
    if file.as_os_str().is_empty() {
        return refuse("[0].file", "it names no file; give a path");
    }
    let others = [
        ("hugepages", zone.hugepages == Some(true)),
        ("hugepage_size", zone.hugepage_size.is_some()),
        ("host_numa_node", zone.host_numa_node.is_some()),
        ("hotplug_size", zone.hotplug_size.is_some_and(|size| size > 0)),
        ("hotplugged_size", zone.hotplugged_size.is_some_and(|size| size > 0)),
    ];
    if let Some((key, _)) = others.into_iter().find(|(_, there)| *there) {
        let why = "memory in a file has the pages of the file and does not grow; leave it out, and give `memory.hotplug_size` for what \
                   may come";
        return refuse(&format!("[0].{key}"), why);
    }
    let own = zone.shared.unwrap_or_default();
    if shared == Some(true) && !own {
        let why = "`memory.shared` says otherwise; what the guest writes is either in the file or it is not: write both alike";
        return refuse("[0].shared", why);
    }
    // What was told of a machine may be given again.
    if ![0, zone.size].contains(&size) {
        let why = format!("the zone has {} bytes, and `memory.size` is {size}; write 0 there", zone.size);
        return refuse("[0].size", &why);
    }
    if zone.mergeable == Some(true) {
        notes.ignored(WHAT, "memory.zones.mergeable");
    }
    if zone.id != NAME {
        notes.ignored(WHAT, "memory.zones.id");
    }
    Ok(Some(Zone { size: zone.size, file, shared: own, prefault: zone.prefault.unwrap_or_default() }))
}

/// `memory.zones`, if memory is in a file.
pub(super) fn body(memory: &MemoryConfig) -> Option<Value> {
    let file = memory.file.as_ref()?;
    let mut zone = json!({ "id": NAME, "size": memory.size.bytes(), "shared": memory.shared, "hugepages": false });
    if let Some(map) = zone.as_object_mut() {
        map.insert("prefault".to_owned(), memory.prefault.into());
        map.insert("mergeable".to_owned(), false.into());
        disk::put(map, "file", Some(file.to_string_lossy()));
    }
    Some(json!([zone]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::VmConfig;
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
    fn what_a_zone_cannot_be_is_refused_by_its_key() {
        let with = |extra: Value| {
            let mut zone = json!({ "id": "mem0", "size": 4096, "file": "/m" });
            extra.as_object().unwrap().iter().for_each(|(key, value)| zone[key] = value.clone());
            json!({ "size": 0, "zones": [zone] })
        };
        let mut both = with(json!({}));
        let second = both["zones"][0].clone();
        both["zones"].as_array_mut().unwrap().push(second);
        let (mut huge, mut contrary, mut other) = (with(json!({})), with(json!({})), with(json!({})));
        (huge["hugepages"], contrary["shared"], other["size"]) = (true.into(), true.into(), 8192.into());
        for (memory, part) in [
            (both, "`memory.zones`: several zones"),
            (with(json!({ "file": null })), "`memory.zones[0]`: a zone without `file`"),
            (with(json!({ "file": "" })), "`memory.zones[0].file`: it names no file"),
            (with(json!({ "hugepages": true })), "`memory.zones[0].hugepages`"),
            (with(json!({ "host_numa_node": 0 })), "`memory.zones[0].host_numa_node`"),
            (with(json!({ "hotplug_size": 1 })), "`memory.zones[0].hotplug_size`"),
            (huge, "`memory.hugepages`: memory in a file has the pages of the file"),
            (contrary, "`memory.zones[0].shared`: `memory.shared` says otherwise"),
            (other, "`memory.zones[0].size`: the zone has 4096 bytes, and `memory.size` is 8192"),
        ] {
            let error = created(&memory).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
