//! Reads and writes memory nodes: the dialect's objects, which are made of zones of memory, or Banyan's texts.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::create::{WHAT, few};
use super::json::{bad, refused};
use super::zone::{self, Supply};
use crate::config::flags::FlagError;
use crate::config::{CpuList, Distance, MemoryConfig, MemoryPolicy, NumaConfig, NumaFlag, NumaNode, NumaPlacement};
use crate::error::ApiError;

/// What `numa` is made of.
pub(super) enum NodeBody {
    /// As for `--numa`.
    Text(String),
    /// As the dialect has it.
    Object(NodeObject),
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct NodeObject {
    guest_numa_id: u32,
    cpus: Option<Vec<u32>>,
    distances: Option<Vec<DistanceBody>>,
    memory_zones: Option<Vec<String>>,
    pci_segments: Option<Vec<u16>>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct DistanceBody {
    destination: u32,
    distance: u64,
}

impl<'de> Deserialize<'de> for NodeBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = NodeBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text such as `id=0,cpus=0-3,memory=2G,host-node=0`, or an object with `guest_numa_id`")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<NodeBody, E> {
                Ok(NodeBody::Text(text.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<NodeBody, A::Error> {
                NodeObject::deserialize(MapAccessDeserializer::new(map)).map(NodeBody::Object)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// The nodes that `numa` says, of the zones of `memory`; `None` if it says none.
pub(super) fn read(bodies: Vec<NodeBody>, memory: &MemoryConfig) -> Result<Option<NumaConfig>, ApiError> {
    few("numa", bodies.len())?;
    let (mut flags, mut objects) = (Vec::new(), Vec::new());
    for (index, body) in bodies.into_iter().enumerate() {
        match body {
            NodeBody::Text(text) => flags.push(text.parse().map_err(|error: FlagError| bad(WHAT, &error.to_string()))?),
            NodeBody::Object(object) => objects.push((index, object)),
        }
    }
    match (flags.is_empty(), objects.is_empty()) {
        (false, false) => return Err(refused(WHAT, "numa", "texts and objects do not go together; write all nodes alike")),
        (true, false) => {
            let mut zones = Supply::new(memory)?;
            flags = objects.into_iter().map(|(index, object)| node(index, object, &mut zones)).collect::<Result<_, _>>()?;
            zones.used_up()?;
        }
        (_, true) => zone::without_nodes(memory)?,
    }
    if flags.is_empty() {
        return Ok(None);
    }
    NumaConfig::new(flags).map(Some).map_err(|error| bad(WHAT, &format!("numa: {error}")))
}

fn node(index: usize, object: NodeObject, supply: &mut Supply<'_>) -> Result<NumaFlag, ApiError> {
    let key = |key: &str| format!("numa[{index}].{key}");
    let refuse = |name: &str, why: &str| Err(refused(WHAT, &key(name), why));
    if object.pci_segments.is_some_and(|segments| !segments.is_empty()) {
        let why = "there is one segment; devices of the host are near to the node that stands for theirs. Leave it out";
        return refuse("pci_segments", why);
    }
    let mut distances: Vec<Distance> = Vec::new();
    for DistanceBody { destination, distance } in object.distances.unwrap_or_default() {
        if destination == object.guest_numa_id || distances.iter().any(|other| other.to == destination) {
            let why = format!("node {destination} is this one, or was named before; leave it out");
            return refuse("distances", &why);
        }
        match u8::try_from(distance) {
            Ok(value @ 11..=254) => distances.push(Distance { to: destination, value }),
            _ => return refuse("distances", &format!("{distance} is no distance; give one from 11 to 254")),
        }
    }
    let zones = object.memory_zones.unwrap_or_default();
    let (memory, host) = supply.take(&key("memory_zones"), &zones)?;
    // The dialect's own way: memory from there alone, processors as the host likes.
    let placement = NumaPlacement { policy: MemoryPolicy::Bind, pin: false };
    Ok(NumaFlag::Node(NumaNode {
        id: object.guest_numa_id,
        cpus: object.cpus.unwrap_or_default().into_iter().collect::<CpuList>(),
        memory,
        host: host.map(|node| (node, placement)),
        distances,
        zones: Some(zones),
    }))
}

/// `numa`, in the form in which it was given.
pub(super) fn numa_body(numa: &NumaConfig) -> Option<Value> {
    let of_zones = |node: &NumaNode| node.zones.is_some();
    match numa {
        NumaConfig::Off => None,
        NumaConfig::Nodes(nodes) if nodes.iter().any(of_zones) => Some(nodes.iter().map(node_body).collect()),
        NumaConfig::Host(_) | NumaConfig::Nodes(_) => Some(numa.texts().into()),
    }
}

fn node_body(node: &NumaNode) -> Value {
    let distance = |far: &Distance| json!({ "destination": far.to, "distance": far.value });
    json!({
        "guest_numa_id": node.id,
        "cpus": node.cpus.iter().collect::<Vec<_>>(),
        "distances": node.distances.iter().map(distance).collect::<Vec<_>>(),
        "memory_zones": node.zones.as_deref().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Size, VmConfig};
    use crate::dialect::json::Notes;
    use crate::dialect::{create, vm_info};
    use crate::info::{Gauge, Phase, VmInfo};

    fn created(memory: &Value, numa: &Value) -> Result<VmConfig, String> {
        let body = json!({ "payload": { "kernel": "/k" }, "memory": memory, "numa": numa });
        create(body.to_string().as_bytes(), &VmConfig::default(), &Notes::default()).map_err(|error| error.to_string())
    }

    fn told(config: VmConfig) -> Value {
        let (progress, balloon, devices) = (None, Gauge::default(), Vec::new());
        vm_info(&VmInfo { config, phase: Phase::Created, progress, memory: 0, balloon, devices })["config"].clone()
    }

    #[test]
    fn objects_are_nodes_of_zones_that_add_up_and_are_told_as_they_were_given() {
        let zone = |id: &str, size: u64, host: u32| {
            json!({ "id": id, "size": size, "shared": true, "hugepages": false, "prefault": true, "mergeable": false,
                    "host_numa_node": host })
        };
        let zones = json!([zone("a", 1 << 20, 1), zone("b", 2 << 20, 0), zone("c", 4 << 20, 1)]);
        let numa = json!([
            { "guest_numa_id": 0, "cpus": [0, 1, 4], "distances": [{"destination": 1, "distance": 21}], "memory_zones": ["a", "c"] },
            { "guest_numa_id": 1, "cpus": [2, 3], "distances": [], "memory_zones": ["b"] },
        ]);
        let config = created(&json!({ "size": 0, "zones": zones }), &numa).unwrap();
        let texts =
            ["id=0,cpus=\"0-1,4\",memory=5M,host-node=1,pin=off,distance=[1:21]", "id=1,cpus=2-3,memory=2M,host-node=0,pin=off"];
        assert_eq!(config.numa.texts(), texts);
        let memory = &config.memory;
        assert_eq!((memory.size, memory.shared, memory.prefault, memory.hugepages), (Size(7 << 20), true, true, None));
        let told = told(config.clone());
        assert_eq!((&told["numa"], &told["memory"]["zones"], &told["memory"]["size"]), (&numa, &zones, &json!(7 << 20)));
        assert_eq!(created(&told["memory"], &told["numa"]), Ok(config), "what was told can be given again");
    }

    #[test]
    fn what_nodes_and_zones_cannot_be_is_refused_by_its_key() {
        let zone = |extra: Value| {
            let mut zone = json!({ "id": "a", "size": 4096 });
            extra.as_object().unwrap().iter().for_each(|(key, value)| zone[key] = value.clone());
            zone
        };
        let (plain, other) = (zone(json!({})), |extra: Value| json!([zone(json!({})), zone(extra)]));
        let node = |extra: Value| {
            let mut node = json!({ "guest_numa_id": 0, "memory_zones": ["a"] });
            extra.as_object().unwrap().iter().for_each(|(key, value)| node[key] = value.clone());
            json!([node])
        };
        let good = node(json!({}));
        for (zones, numa, part) in [
            (json!([zone(json!({"file": "/f"}))]), &good, "`numa`: nodes in objects are made of zones without `file`"),
            (other(json!({"id": "b", "file": "/f"})), &good, "`memory.zones[1].file`"),
            (json!([zone(json!({"hotplug_size": 1}))]), &good, "`memory.zones[0].hotplug_size`: zones do not grow"),
            (json!([zone(json!({"hotplugged_size": 1}))]), &good, "`memory.zones[0].hotplugged_size`"),
            (other(json!({})), &good, "`memory.zones[1].id`: there is a zone `a` already"),
            (other(json!({"id": "b", "shared": true})), &good, "`memory.zones[1].shared`: the zones before it say otherwise"),
            (other(json!({"id": "b", "hugepages": true})), &good, "`memory.zones[1].hugepages`"),
            (other(json!({"id": "b", "hugepage_size": 2097152})), &good, "`memory.zones[1].hugepage_size`"),
            (other(json!({"id": "b", "prefault": true})), &good, "`memory.zones[1].prefault`"),
            (other(json!({"id": "b", "size": u64::MAX})), &good, "`memory.zones[1].size`: together"),
            (other(json!({"id": "b"})), &good, "`memory.zones`: the zone `b` is in no node"),
            (json!(vec![plain.clone(); 4097]), &good, "`memory.zones`: 4097 entries"),
            (
                other(json!({"id": "b", "host_numa_node": 1})),
                &node(json!({"memory_zones": ["a", "b"]})),
                "`numa[0].memory_zones`: the zone `b`: it has another `host_numa_node`",
            ),
            (json!([plain]), &node(json!({"memory_zones": ["a", "a"]})), "the zone `a`: a node has it already"),
            (json!([plain]), &node(json!({"memory_zones": ["x"]})), "the zone `x`: `memory.zones` does not have it"),
            (json!([plain]), &node(json!({"pci_segments": [0]})), "`numa[0].pci_segments`: there is one segment"),
            (
                json!([plain]),
                &node(json!({"distances": [{"destination": 0, "distance": 20}]})),
                "`numa[0].distances`: node 0 is this",
            ),
            (json!([plain]), &node(json!({"distances": [{"destination": 1, "distance": 10}]})), "10 is no distance"),
            (json!([plain]), &node(json!({"distances": [{"destination": 1, "distance": 255}]})), "255 is no distance"),
            (json!([plain]), &node(json!({"cpus": [-1]})), "`numa[0].cpus[0]`"),
            (json!([plain]), &json!([good[0], good[0]]), "the zone `a`: a node has it already"),
            (
                other(json!({"id": "b"})),
                &json!([good[0], { "guest_numa_id": 0, "memory_zones": ["b"] }]),
                "memory node 0 is given twice",
            ),
            (json!([plain]), &json!([good[0], { "guest_numa_id": 1 }]), "`numa[1].memory_zones`: the node has no zone"),
            (json!([plain]), &json!([good[0], "id=1"]), "texts and objects do not go together"),
            (other(json!({"id": "b"})), &json!(["id=0"]), "`memory.zones`: no node is made of these"),
            (other(json!({"id": "b"})), &json!([]), "`memory.zones`: no node is made of these"),
            (
                json!([zone(json!({"host_numa_node": 0}))]),
                &json!([]),
                "`memory.zones[0].host_numa_node`: no node is made of this",
            ),
            (json!([]), &good, "`numa`: nodes in objects are made of zones"),
        ] {
            let error = created(&json!({ "size": 0, "zones": zones }), numa).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
        let huge = zone(json!({"hugepages": true, "hugepage_size": 2 << 20}));
        let error = created(&json!({ "size": 0, "hugepage_size": 1 << 30, "zones": [huge] }), &good).unwrap_err();
        assert!(error.contains("`memory.hugepage_size`: the zones have 2M"), "{error}");
        let error = created(&json!({ "size": 1, "zones": [plain] }), &good).unwrap_err();
        assert!(error.contains("`memory.size`: the zones have 4K, and 1 are given; write 0"), "{error}");
    }
}
