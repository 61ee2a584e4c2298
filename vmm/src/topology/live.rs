//! Reads the hierarchy of a guest that runs from the API of its process. The other side may be another version: what it does
//! not tell, or tells in another form, is left out.

use std::path::Path;

use api::client::{Client, ClientError, Verb};
use pci::ids::{ClassCode, Ids};
use pci::link::Link;
use serde_json::Value;
use thiserror::Error;

use super::text;
use super::view::{Node, On, Root, View};

/// The hierarchy behind `socket` at this moment.
pub fn view(socket: &Path) -> Result<View, LiveError> {
    let reply = Client::connect(socket)?.call(Verb::Get, "vm.devices", None)?;
    from_listing(&reply.unwrap_or_default()).ok_or(LiveError::Silent)
}

/// `None` when the reply tells nothing of a hierarchy.
fn from_listing(listing: &Value) -> Option<View> {
    let mut view = View::default();
    let mut names: Vec<(String, On)> = Vec::new();
    for root in listing.get("root_complexes")?.as_array()? {
        let number = |key: &str| root[key].as_u64().unwrap_or(0);
        names.push((word(root, "name"), On::Root(view.roots.len())));
        let node = root["memory_node"].as_u64().and_then(|node| u32::try_from(node).ok());
        view.roots.push(Root { name: format!("pci{:04x}:{:02x}", number("segment"), number("bus")), numa_node: node });
    }
    // Parents come before children.
    for function in listing.get("functions")?.as_array()? {
        let on = word(function, "on");
        let Some((_, on)) = names.iter().find(|(name, _)| *name == on) else { continue };
        let on = *on;
        names.push((word(function, "name"), On::Node(view.nodes.len())));
        view.nodes.push(node(function, on, &view));
    }
    Some(view)
}

fn node(function: &Value, on: On, view: &View) -> Node {
    let ids = pair(&word(function, "ids"));
    let subsystem = pair(&word(function, "subsystem"));
    let class = u32::from_str_radix(&word(function, "class"), 16).unwrap_or(0) & 0xFF_FFFF;
    let rate = |key: &str| word(function, key).parse().ok();
    Node {
        at: plain(&word(function, "bdf")),
        name: Some(plain(&word(function, "name"))),
        host: function["host_bdf"].as_str().map(plain),
        on,
        kind: text::kind_of(&word(function, "kind")),
        ids: Ids {
            vendor: ids.0,
            device: ids.1,
            class: ClassCode::new(class),
            revision: 0,
            subsystem_vendor: subsystem.0,
            subsystem: subsystem.1,
        },
        link: rate("max_link").map(|max| Link { current: rate("link").unwrap_or(max), ..Link::at(max) }),
        numa_node: match on {
            On::Root(index) => view.roots.get(index).and_then(|root| root.numa_node),
            On::Node(index) => view.nodes.get(index).and_then(|node| node.numa_node),
        },
        clique: function["clique"].as_u64().and_then(|clique| u8::try_from(clique).ok()),
        driver: None,
    }
}

fn word(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

/// What the other side sends does not break a terminal or a picture.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).take(64).collect()
}

fn pair(text: &str) -> (u16, u16) {
    let half = |text: &str| u16::from_str_radix(text, 16).unwrap_or(0);
    text.split_once(':').map_or((0, 0), |(vendor, device)| (half(vendor), half(device)))
}

/// A guest whose hierarchy cannot be had.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The socket.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The process has another version.
    #[error("the process at the socket does not tell its hierarchy; it is another version of Banyan, or none")]
    Silent,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listing_becomes_a_tree() {
        let function = |name: &str, on: &str, bdf: &str, kind: &str| {
            json!({ "name": name, "on": on, "bdf": bdf, "kind": kind, "ids": "10de:20b8", "subsystem": "10de:1463",
                "class": "030200", "max_link": "16GT/s x16", "link": "8GT/s x16", "clique": 3 })
        };
        let listing = json!({
            "root_complexes": [{ "name": "rc0", "segment": 0, "bus": 0, "memory_node": 1 }],
            "functions": [
                function("rp", "rc0", "0000:00:01.0", "root-port"),
                function("gpu\u{1b}", "rp", "0000:01:00.0", "endpoint"),
                function("lost", "nobody", "0000:02:00.0", "endpoint"),
            ],
        });
        let view = from_listing(&listing).unwrap();
        assert_eq!(
            text::tree(&view),
            "\
-[0000:00]-  NUMA node 1
   \\-0000:00:01.0  rp  root port 10de:20b8, 8GT/s x16 of 16GT/s x16, clique 3
       \\-0000:01:00.0  gpu?  GPU 10de:20b8, 8GT/s x16 of 16GT/s x16, clique 3
"
        );
        assert_eq!(from_listing(&json!({ "devices": [] })), None);
    }
}
