//! Shows replies to a person. A value that is missing, or of another type than expected, is shown as `-`: the other side may
//! be another version.

use std::fmt::Write as _;

use api::config::Size;
use serde_json::Value;

use crate::print::one_line;
use crate::table::table;

/// The reply to a call of `name`, with a newline at its end.
pub(super) fn reply(name: &str, reply: &Value) -> String {
    match name {
        "vmm.ping" => format!("Banyan {}, process {}\n", word(&reply["version"]), word(&reply["pid"])),
        "vm.info" => info(reply),
        "vm.devices" => listing(reply),
        "vm.counters" => counters(reply),
        "vm.inject-error" => injection(reply),
        _ if reply.get("bdf").is_some() => {
            let path = word(&reply["pci_path"]);
            format!("{} is at {} (path {path})\n", word(&reply["id"]), word(&reply["bdf"]))
        }
        _ => format!("{reply:#}\n"),
    }
}

fn injection(reply: &Value) -> String {
    let at = word(&reply["recorded_at"]);
    match reply["unreported"].as_str() {
        Some(why) => format!("{at} shows the error; no root port hears of it: {why}\n"),
        None => format!("{at} shows the error; {} heard of it\n", word(&reply["reported_to"])),
    }
}

/// An event in one line.
pub(super) fn event(event: &Value) -> String {
    let mut line = word(&event["event"]);
    for key in ["phase", "step", "id", "kind", "bdf", "pci_path", "host_bdf", "why", "count"] {
        if let Some(value) = event.get(key) {
            let _ = write!(line, " {}", word(value));
        }
    }
    if event.get("percent").is_some() {
        let (done, total) = (size(&event["done"]), size(&event["total"]));
        let _ = write!(line, " {} % ({done} of {total})", word(&event["percent"]));
    }
    one_line(&line).into_owned() + "\n"
}

/// A value in one word.
fn word(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(on) => if *on { "yes" } else { "no" }.to_owned(),
        Value::Array(values) if !values.is_empty() => values.iter().map(word).collect::<Vec<_>>().join(","),
        _ => "-".to_owned(),
    }
}

fn size(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), |bytes| Size(bytes).to_string())
}

fn info(info: &Value) -> String {
    let config = &info["config"];
    let (cpus, memory) = (&config["cpus"], &config["memory"]);
    let mut rows = vec![("state", word(info.get("phase").unwrap_or(&info["state"])))];
    if let Some(progress) = info.get("progress") {
        let (done, total) = (size(&progress["done"]), size(&progress["total"]));
        rows.push(("progress", format!("{} {} % ({done} of {total})", word(&progress["step"]), word(&progress["percent"]))));
    }
    rows.push(("processors", up_to(word(&cpus["boot_vcpus"]), word(&cpus["max_vcpus"]))));
    let (has, wanted) = (size(&info["memory_actual_size"]), size(&memory["size"]));
    let wanted = if has == wanted { String::new() } else { format!(", on its way to {wanted}") };
    let growth = memory["hotplug_size"].as_u64().filter(|bytes| *bytes > 0);
    let growth = growth.map(|bytes| format!("; {} may come to what it started with", Size(bytes))).unwrap_or_default();
    rows.push(("memory", format!("{has}{wanted}{growth}")));
    for (title, key) in [("kernel", "kernel"), ("initramfs", "initramfs"), ("cmdline", "cmdline"), ("firmware", "firmware")] {
        if let Some(value) = config["payload"].get(key) {
            rows.push((title, word(value)));
        }
    }
    rows.push(("hierarchy", word(&config["banyan"])));
    let devices = info["device_tree"].as_object().map(|devices| devices.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
    rows.push(("devices", if devices.is_empty() { "-".to_owned() } else { devices.join(", ") }));
    rows.iter().fold(String::new(), |mut text, (title, value)| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{title:<11} {value}");
        text
    })
}

fn up_to(now: String, most: String) -> String {
    if now == most { now } else { format!("{now}, up to {most}") }
}

fn listing(listing: &Value) -> String {
    let empty = Vec::new();
    let rows = |key: &str| listing[key].as_array().unwrap_or(&empty).clone();
    let devices = rows("devices").into_iter().map(|device| {
        ["id", "kind", "bdf", "pci_path", "port", "host_bdf", "clique", "label"].map(|key| word(&device[key])).to_vec()
    });
    let devices = table(&["DEVICE", "KIND", "ADDRESS", "PATH", "PORT", "HOST", "CLIQUE", "WHAT"], devices);
    let takes_devices = rows("ports").iter().any(|port| port["hot_plug"].as_bool() == Some(true));
    let rule = if takes_devices { RULE } else { "" };
    let ports = rows("ports").into_iter().map(|port| {
        let mut row = ["name", "kind", "bdf", "hot_plug"].map(|key| word(&port[key])).to_vec();
        row.extend(["memory", "prefetchable"].map(|key| size(&port[key])));
        row.push(word(&port["devices"]));
        row.push(access_control(&port["access_control"]));
        row
    });
    let ports = table(&["PORT", "KIND", "ADDRESS", "HOT-PLUG", "MEMORY", "PREFETCHABLE", "DEVICES", "ACS"], ports);
    format!("{devices}\n{ports}{rule}")
}

/// Which port a device takes.
const RULE: &str = "
A device that comes to a port and names none (on=) takes the nearest free one with room,
of equally near ones that which keeps least, of those the first.
";

/// What a port's access control does: `-` where the port has none.
fn access_control(enabled: &Value) -> String {
    if enabled.as_array().is_some_and(Vec::is_empty) { "off".to_owned() } else { word(enabled) }
}

fn counters(counters: &Value) -> String {
    let empty = serde_json::Map::new();
    let parts = counters.as_object().unwrap_or(&empty);
    let rows = parts.iter().flat_map(|(part, counts)| {
        let counts = counts.as_object().cloned().unwrap_or_default();
        counts.into_iter().map(|(name, count)| vec![part.clone(), name, word(&count)]).collect::<Vec<_>>()
    });
    table(&["PART", "COUNTER", "COUNT"], rows)
}
