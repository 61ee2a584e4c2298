//! Writes the replies other than vm.info.

use serde_json::{Map, Value, json};

use super::disk::put;
use crate::info::{Counters, DeviceInfo, FunctionInfo, Injection, Listing, PortInfo, RootComplexInfo};

/// The reply to vmm.ping: version, process and what it can do.
#[must_use]
pub fn ping() -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({
        "build_version": format!("banyan v{version}"),
        "version": version,
        "pid": std::process::id(),
        "features": ["kvm"],
    })
}

/// The reply to the addition of a device to a machine that runs.
#[must_use]
pub fn added(device: &DeviceInfo) -> Value {
    json!({ "id": device.id, "bdf": device.bdf.to_string(), "pci_path": device.path })
}

/// The reply to vm.counters.
#[must_use]
pub fn counters(counters: &Counters) -> Value {
    json!(counters)
}

/// The reply to vm.inject-error.
#[must_use]
pub fn injection(injection: &Injection) -> Value {
    let mut map = Map::new();
    put(&mut map, "recorded_at", Some(injection.recorded_at.as_str()));
    put(&mut map, "reported_to", injection.reported_to.as_deref().ok());
    put(&mut map, "unreported", injection.reported_to.as_ref().err().map(String::as_str));
    map.into()
}

/// The reply to vm.devices.
#[must_use]
pub fn listing(listing: &Listing) -> Value {
    json!({
        "devices": listing.devices.iter().map(device).collect::<Vec<_>>(),
        "ports": listing.ports.iter().map(port).collect::<Vec<_>>(),
        "root_complexes": listing.root_complexes.iter().map(root_complex).collect::<Vec<_>>(),
        "functions": listing.functions.iter().map(function).collect::<Vec<_>>(),
    })
}

fn root_complex(root: &RootComplexInfo) -> Value {
    let mut map = Map::new();
    put(&mut map, "name", Some(root.name.as_str()));
    put(&mut map, "segment", Some(root.segment));
    put(&mut map, "bus", Some(root.bus));
    put(&mut map, "memory_node", root.memory_node);
    map.into()
}

fn function(function: &FunctionInfo) -> Value {
    let mut map = Map::new();
    put(&mut map, "name", Some(function.name.as_str()));
    put(&mut map, "on", Some(function.on.as_str()));
    put(&mut map, "bdf", Some(function.bdf.to_string()));
    put(&mut map, "kind", Some(function.kind.as_str()));
    put(&mut map, "ids", Some(function.ids.as_str()));
    put(&mut map, "subsystem", Some(function.subsystem.as_str()));
    put(&mut map, "class", Some(function.class.as_str()));
    put(&mut map, "max_link", function.max_link.as_deref());
    put(&mut map, "link", function.link.as_deref());
    put(&mut map, "clique", function.clique);
    put(&mut map, "host_bdf", function.host.as_deref());
    map.into()
}

fn device(device: &DeviceInfo) -> Value {
    let mut map = Map::new();
    put(&mut map, "id", Some(device.id.as_str()));
    put(&mut map, "kind", Some(device.kind.to_string()));
    put(&mut map, "bdf", Some(device.bdf.to_string()));
    put(&mut map, "pci_path", Some(device.path.as_str()));
    put(&mut map, "port", device.port.as_deref());
    put(&mut map, "host_bdf", device.host.as_deref());
    put(&mut map, "clique", device.clique);
    put(&mut map, "label", Some(device.label.as_str()));
    map.into()
}

fn port(port: &PortInfo) -> Value {
    let mut value = json!({
        "name": port.name,
        "kind": port.kind,
        "bdf": port.bdf.to_string(),
        "hot_plug": port.hot_plug,
        "devices": port.devices,
        "memory": port.memory,
        "prefetchable": port.prefetchable,
    });
    if let Some(map) = value.as_object_mut() {
        put(map, "access_control", port.access_control.clone());
    }
    value
}
