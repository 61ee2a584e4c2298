//! A hierarchy as text: the tree as `lspci -tv` draws it with links and NUMA nodes, and JSON.

use pci::topology::PortKind;
use serde_json::{Map, Value, json};

use super::view::{Node, On, View};
use crate::host::tree::HostKind;

/// The tree. Lines end with a line break.
#[must_use]
pub fn tree(view: &View) -> String {
    let mut lines = Vec::new();
    for (index, root) in view.roots.iter().enumerate() {
        let address = root.name.strip_prefix("pci").unwrap_or(&root.name);
        let node = root.numa_node.map_or(String::new(), |node| format!("  NUMA node {node}"));
        let nothing = if view.nodes.is_empty() { "  no devices" } else { "" };
        lines.push(format!("-[{address}]-{node}{nothing}"));
        lines.extend(branches(view, On::Root(index)).into_iter().map(|line| format!("   {line}")));
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn branches(view: &View, on: On) -> Vec<String> {
    let below: Vec<_> = view.below(on).collect();
    let mut lines = Vec::new();
    for (place, (index, node)) in below.iter().enumerate() {
        let (corner, under) = if place + 1 == below.len() { ("\\-", "  ") } else { ("+-", "| ") };
        lines.push(format!("{corner}{}", line(node)));
        lines.extend(branches(view, On::Node(*index)).into_iter().map(|line| format!("{under}  {line}")));
    }
    lines
}

fn line(node: &Node) -> String {
    let mut text = format!("{}  ", node.at);
    if let Some(name) = &node.name {
        text = format!("{text}{name}  ");
    }
    text = format!("{text}{} {:04x}:{:04x}", node.noun(), node.ids.vendor, node.ids.device);
    if let Some(link) = node.link {
        text = format!("{text}, {}", link.current);
        if link.max != link.current {
            text = format!("{text} of {}", link.max);
        }
    }
    if let Some(clique) = node.clique {
        text = format!("{text}, clique {clique}");
    }
    match &node.driver {
        Some(driver) if !node.is_port() => format!("{text}, {driver}"),
        _ => text,
    }
}

/// One object with root complexes that hold their functions, and so on downwards.
#[must_use]
pub fn json(view: &View) -> Value {
    let roots = view.roots.iter().enumerate().map(
        |(index, root)| json!({ "name": root.name, "numa-node": root.numa_node, "functions": functions(view, On::Root(index)) }),
    );
    json!({ "root-complexes": roots.collect::<Vec<_>>() })
}

fn functions(view: &View, on: On) -> Vec<Value> {
    let function = |(index, node): (usize, &Node)| {
        let mut fields = Map::new();
        let mut put = |key: &str, value: Value| fields.insert(key.to_owned(), value);
        put("address", json!(node.at));
        put("kind", json!(kind(node)));
        put("ids", json!(format!("{:04x}:{:04x}", node.ids.vendor, node.ids.device)));
        put("subsystem", json!(format!("{:04x}:{:04x}", node.ids.subsystem_vendor, node.ids.subsystem)));
        put("class", json!(node.ids.class.to_string()));
        if let Some(name) = &node.name {
            put("name", json!(name));
        }
        if let Some(host) = &node.host {
            put("host", json!(host));
        }
        if let Some(link) = node.link {
            put("link", json!({ "current": link.current.to_string(), "max": link.max.to_string() }));
        }
        if let Some(node) = node.numa_node {
            put("numa-node", json!(node));
        }
        if let Some(clique) = node.clique {
            put("clique", json!(clique));
        }
        if let Some(driver) = &node.driver {
            put("driver", json!(driver));
        }
        let below = functions(view, On::Node(index));
        if node.kind != HostKind::Endpoint {
            put("functions", json!(below));
        }
        Value::Object(fields)
    };
    view.below(on).map(function).collect()
}

const fn kind(node: &Node) -> &'static str {
    match node.kind {
        HostKind::Port(PortKind::Root) => "root-port",
        HostKind::Port(PortKind::Upstream) => "upstream-port",
        HostKind::Port(PortKind::Downstream) => "downstream-port",
        HostKind::Port(PortKind::PciBridge) => "pcie-pci-bridge",
        HostKind::OtherBridge => "other-bridge",
        HostKind::Endpoint => "endpoint",
    }
}

/// The inverse of [`kind`]; an endpoint for a word that is not known.
pub(super) fn kind_of(word: &str) -> HostKind {
    match word {
        "root-port" => HostKind::Port(PortKind::Root),
        "upstream-port" => HostKind::Port(PortKind::Upstream),
        "downstream-port" => HostKind::Port(PortKind::Downstream),
        "pcie-pci-bridge" => HostKind::Port(PortKind::PciBridge),
        "other-bridge" => HostKind::OtherBridge,
        _ => HostKind::Endpoint,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host_file, plan_of_gpu_and_nic};
    use super::*;

    #[test]
    fn a_root_complex_alone_is_drawn_with_words() {
        let mut view = View::of_host(&host_file("one-switch").tree);
        view.nodes.clear();
        assert_eq!(tree(&view), "-[0000:00]-  NUMA node 0  no devices\n");
    }

    #[test]
    fn a_host_is_drawn_with_links_and_nodes() {
        assert_eq!(
            tree(&View::of_host(&host_file("one-switch").tree)),
            "\
-[0000:00]-  NUMA node 0
   \\-0000:00:01.0  root port 8086:352a, 32GT/s x16
       \\-0000:01:00.0  switch 1000:c030, 32GT/s x16
           +-0000:02:00.0  port 1000:c030, 16GT/s x16 of 32GT/s x16
           |   \\-0000:03:00.0  GPU 10de:20b5, 16GT/s x16, nvidia
           +-0000:02:01.0  port 1000:c030, 16GT/s x16 of 32GT/s x16
           |   \\-0000:04:00.0  GPU 10de:20b5, 16GT/s x16, nvidia
           \\-0000:02:02.0  port 1000:c030, 32GT/s x16
               \\-0000:05:00.0  NIC 15b3:1021, 32GT/s x16, mlx5_core
"
        );
    }

    #[test]
    fn json_nests_as_the_hierarchy_does() {
        let view = plan_of_gpu_and_nic();
        let found = json(&view);
        let switch = &found["root-complexes"][0]["functions"][0]["functions"][0];
        assert_eq!((switch["kind"].as_str(), switch["ids"].as_str()), (Some("upstream-port"), Some("1000:c030")));
        let gpu = &switch["functions"][0]["functions"][0];
        assert_eq!((gpu["name"].as_str(), gpu["clique"].as_u64()), (Some("gpu0"), Some(0)));
        assert_eq!(gpu["functions"], Value::Null);
    }
}
