//! A hierarchy as a picture: where each box stands (SVG), or what a drawing program must know (DOT). The same view gives
//! the same text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use pci::topology::PortKind;

use super::view::{Node, On, View};
use crate::host::tree::HostKind;

const BOX: usize = 150;
const HIGH: usize = 34;
const ROW: usize = 50;
/// Room for a link's text.
const LINK: usize = 92;
/// Inside a switch there is no link.
const INSIDE: usize = 30;
const EDGE: usize = 24;
/// Above and below a group of root complexes.
const TITLE: usize = 30;

/// Fills of cliques 0, 1, ...: light enough for black text.
const CLIQUES: [&str; 8] = ["#bfe3c0", "#ffd9a8", "#c9d7f8", "#f6c6d8", "#e3d3f4", "#f4efa9", "#bfe8e6", "#dcd5cb"];
const DEVICE: &str = "#eeeeee";

/// What a picture shows: all devices below ports; neither what is integrated into a root complex nor ports with nothing
/// below.
#[must_use]
pub fn pruned(view: &View) -> View {
    let mut keep = vec![false; view.nodes.len()];
    for node in view.nodes.iter().filter(|node| node.kind == HostKind::Endpoint) {
        let mut on = node.on;
        for _ in 0..=view.nodes.len() {
            let On::Node(index) = on else { break };
            if let Some(slot) = keep.get_mut(index) {
                *slot = true;
            }
            let Some(above) = view.nodes.get(index) else { break };
            on = above.on;
        }
    }
    for (slot, node) in keep.iter_mut().zip(&view.nodes) {
        *slot |= node.kind == HostKind::Endpoint && (matches!(node.on, On::Node(_)) || node.name.is_some());
    }
    let kept = |on: On| match on {
        On::Root(_) => on,
        On::Node(index) => On::Node(keep.iter().take(index).filter(|kept| **kept).count()),
    };
    let nodes = view.nodes.iter().zip(&keep).filter(|(_, kept)| **kept);
    let nodes: Vec<Node> = nodes.map(|(node, _)| Node { on: kept(node.on), ..node.clone() }).collect();
    // Root complexes with nothing to show go, too.
    let used = |index: usize| nodes.iter().any(|node| node.on == On::Root(index));
    let number = |index: usize| (0..index).filter(|other| used(*other)).count();
    let roots = view.roots.iter().enumerate().filter(|(index, _)| used(*index)).map(|(_, root)| root.clone()).collect();
    let on = |on: On| if let On::Root(index) = on { On::Root(number(index)) } else { on };
    View { roots, nodes: nodes.iter().map(|node| Node { on: on(node.on), ..node.clone() }).collect() }
}

#[derive(Clone, Copy, Default)]
struct Spot {
    x: usize,
    y: usize,
}

struct Layout<'a> {
    view: &'a View,
    spots: BTreeMap<usize, Spot>,
    width: usize,
    next_row: usize,
}

impl Layout<'_> {
    /// Places what is on `on`, from column `x` on; returns the height at which the parent stands.
    fn place(&mut self, on: On, x: usize) -> usize {
        let below: Vec<usize> = self.view.below(on).map(|(index, _)| index).collect();
        let mut heights = Vec::new();
        for index in below {
            let gap = if self.is_switch(index) { INSIDE } else { LINK };
            let y = self.place(On::Node(index), x + BOX + gap);
            self.spots.insert(index, Spot { x, y });
            self.width = self.width.max(x + BOX);
            heights.push(y);
        }
        match (heights.first(), heights.last()) {
            (Some(first), Some(last)) => usize::midpoint(*first, *last),
            _ => {
                self.next_row += ROW;
                self.next_row - ROW
            }
        }
    }

    fn is_switch(&self, index: usize) -> bool {
        self.view.nodes.get(index).is_some_and(|node| node.kind == HostKind::Port(PortKind::Upstream))
    }

    fn spot(&self, index: usize) -> Spot {
        self.spots.get(&index).copied().unwrap_or_default()
    }
}

/// The picture as SVG, from the root complexes at the left to the devices at the right.
#[must_use]
pub fn svg(view: &View) -> String {
    let view = &pruned(view);
    let mut layout = Layout { view, spots: BTreeMap::new(), width: EDGE + BOX, next_row: EDGE };
    let (mut back, mut lines, mut front) = (String::new(), String::new(), String::new());
    let mut groups: Vec<Option<u32>> = view.roots.iter().map(|root| root.numa_node).collect();
    groups.sort_unstable();
    groups.dedup();
    let mut boxes = Vec::new();
    for node in groups {
        let top = layout.next_row;
        layout.next_row += TITLE;
        for (index, root) in view.roots.iter().enumerate().filter(|(_, root)| root.numa_node == node) {
            let y = layout.place(On::Root(index), EDGE + 16 + BOX + INSIDE);
            let at = Spot { x: EDGE + 16, y };
            rectangle(&mut front, at, "#f7e3b5", "root complex", &root.name);
            for (below, _) in view.below(On::Root(index)) {
                edge(&mut lines, at, layout.spot(below), "");
            }
        }
        boxes.push((top, layout.next_row, node.map_or("no NUMA node".to_owned(), |node| format!("NUMA node {node}"))));
        layout.next_row += EDGE;
    }
    for (top, bottom, title) in boxes {
        let (width, height) = (layout.width + 16 - EDGE, bottom - top);
        let _ = writeln!(
            back,
            r##"<rect x="{EDGE}" y="{top}" width="{width}" height="{height}" rx="8" fill="#fafafa" stroke="#bbbbbb"/>"##
        );
        let _ = writeln!(back, r#"<text x="{}" y="{}" font-weight="bold">{title}</text>"#, EDGE + 12, top + 20);
    }
    for (index, node) in view.nodes.iter().enumerate() {
        let at = layout.spot(index);
        let below: Vec<usize> = view.below(On::Node(index)).map(|(below, _)| below).collect();
        if layout.is_switch(index) {
            switch(&mut back, at, &below.iter().map(|below| layout.spot(*below)).collect::<Vec<_>>());
        }
        for below in below {
            let link = if has_link_below(node) { node.link } else { None };
            edge(&mut lines, at, layout.spot(below), &link.map_or(String::new(), |link| link.current.to_string()));
        }
        let (first, second) = label(node);
        rectangle(&mut front, at, fill(node), &first, &second);
    }
    let width = layout.width + 16 + EDGE;
    let mut height = layout.next_row;
    let legend = legend(view, &mut height);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{back}{lines}{front}{legend}</svg>\n"
    )
}

const fn has_link_below(node: &Node) -> bool {
    matches!(node.kind, HostKind::Port(kind) if kind.has_link_below())
}

fn label(node: &Node) -> (String, String) {
    let ids = format!("{:04x}:{:04x}", node.ids.vendor, node.ids.device);
    match (&node.name, node.is_port()) {
        (_, true) => (format!("{} {}", node.noun(), short(&node.at)), ids),
        (Some(name), false) => (name.clone(), format!("{} {ids} {}", node.noun(), short(&node.at))),
        (None, false) => (format!("{} {}", node.noun(), short(&node.at)), ids),
    }
}

/// Segment 0 goes without saying.
fn short(at: &str) -> &str {
    at.strip_prefix("0000:").unwrap_or(at)
}

fn fill(node: &Node) -> &'static str {
    match node.clique {
        Some(clique) => CLIQUES.get(usize::from(clique) % CLIQUES.len()).copied().unwrap_or(DEVICE),
        None if node.is_port() => "#dbe9f6",
        None => DEVICE,
    }
}

fn rectangle(out: &mut String, at: Spot, fill: &str, first: &str, second: &str) {
    let Spot { x, y } = at;
    let _ = writeln!(out, r##"<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="4" fill="{fill}" stroke="#555555"/>"##);
    let middle = x + BOX / 2;
    let fit = |text: &str, most: usize| match text.char_indices().nth(most) {
        Some((end, _)) => escaped(text.get(..end).unwrap_or(text)) + "…",
        None => escaped(text),
    };
    let _ = writeln!(out, r#"<text x="{middle}" y="{}" text-anchor="middle">{}</text>"#, y + 15, fit(first, 23));
    let (line, text) = (y + 28, fit(second, 30));
    let _ = writeln!(out, r##"<text x="{middle}" y="{line}" text-anchor="middle" font-size="9" fill="#444444">{text}</text>"##);
}

/// From the right side of one box over a corner to the left side of another; the text stands over the last part.
fn edge(out: &mut String, from: Spot, to: Spot, text: &str) {
    let (x, y) = (from.x + BOX, from.y + HIGH / 2);
    let (corner, end) = (x + 12, to.y + HIGH / 2);
    let _ = writeln!(out, r##"<path d="M{x} {y}H{corner}V{end}H{}" fill="none" stroke="#555555"/>"##, to.x);
    if !text.is_empty() {
        let (middle, above) = (usize::midpoint(corner, to.x - 6), end - 4);
        let _ = writeln!(out, r#"<text x="{middle}" y="{above}" text-anchor="middle" font-size="10">{}</text>"#, escaped(text));
    }
}

/// A frame around an upstream port and its downstream ports.
fn switch(out: &mut String, at: Spot, ports: &[Spot]) {
    let all = || std::iter::once(&at).chain(ports);
    let top = all().map(|spot| spot.y).min().unwrap_or(at.y).saturating_sub(5);
    let bottom = all().map(|spot| spot.y + HIGH).max().unwrap_or(at.y) + 5;
    let right = all().map(|spot| spot.x + BOX).max().unwrap_or(at.x) + 5;
    let (x, width, height) = (at.x.saturating_sub(5), right + 5 - at.x, bottom - top);
    let _ = writeln!(
        out,
        r##"<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="6" fill="#eef4fb" stroke="#7aa5d2" stroke-dasharray="4 2"/>"##
    );
}

fn legend(view: &View, height: &mut usize) -> String {
    let mut cliques: Vec<u8> = view.nodes.iter().filter_map(|node| node.clique).collect();
    cliques.sort_unstable();
    cliques.dedup();
    let mut text = String::new();
    for (clique, x) in cliques.iter().zip((EDGE..).step_by(90)) {
        let fill = CLIQUES.get(usize::from(*clique) % CLIQUES.len()).copied().unwrap_or(DEVICE);
        let y = *height;
        let _ = writeln!(text, r##"<rect x="{x}" y="{y}" width="14" height="14" fill="{fill}" stroke="#555555"/>"##);
        let _ = writeln!(text, r#"<text x="{}" y="{}">clique {clique}</text>"#, x + 20, y + 12);
    }
    if !cliques.is_empty() {
        *height += 14 + EDGE;
    }
    text
}

/// For XML text.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The picture for Graphviz.
#[must_use]
pub fn dot(view: &View) -> String {
    let view = &pruned(view);
    let mut text = "digraph topology {\n  rankdir=LR;\n  node [shape=box, style=filled, fontname=\"Helvetica\"];\n".to_owned();
    text.push_str("  edge [dir=none, fontname=\"Helvetica\", fontsize=10];\n");
    for (index, root) in view.roots.iter().enumerate() {
        let node = root.numa_node.map_or(String::new(), |node| format!("\\nNUMA node {node}"));
        let _ = writeln!(text, "  r{index} [label=\"root complex {}{node}\", fillcolor=\"#f7e3b5\"];", root.name);
    }
    for (index, node) in view.nodes.iter().enumerate() {
        let (first, second) = label(node);
        let clique = node.clique.map_or(String::new(), |clique| format!("\\nclique {clique}"));
        let _ = writeln!(text, "  n{index} [label=\"{first}\\n{second}{clique}\", fillcolor=\"{}\"];", fill(node));
    }
    for (index, node) in view.nodes.iter().enumerate() {
        let (from, link) = match node.on {
            On::Root(root) => (format!("r{root}"), None),
            On::Node(above) => {
                let port = view.nodes.get(above).filter(|port| has_link_below(port));
                (format!("n{above}"), port.and_then(|port| port.link))
            }
        };
        let link = link.map_or(String::new(), |link| format!(" [label=\"{}\"]", link.current));
        let _ = writeln!(text, "  {from} -> n{index}{link};");
    }
    text + "}\n"
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host_file, plan_of_gpu_and_nic};
    use super::*;

    #[test]
    fn the_picture_of_a_small_plan_is_this_one() {
        assert_eq!(svg(&plan_of_gpu_and_nic()), include_str!("plan.svg"));
    }

    #[test]
    fn graphviz_gets_links_and_cliques() {
        let text = dot(&plan_of_gpu_and_nic());
        assert!(text.contains("r0 -> n0;") && text.contains("n0 -> n1 [label=\"32GT/s x16\"];"), "{text}");
        assert!(text.contains("n1 -> n2;") && text.contains("clique 0"), "{text}");
    }

    #[test]
    fn no_two_boxes_of_a_host_overlap() {
        for file in ["one-switch", "nested-switches", "two-root-complexes", "two-nodes"] {
            let text = svg(&View::of_host(&host_file(file).tree));
            let boxes: Vec<(usize, usize)> = text
                .lines()
                .filter(|line| line.contains(&format!("width=\"{BOX}\" height=\"{HIGH}\"")))
                .map(|line| {
                    let number = |key: &str| line.split_once(key).unwrap().1.split('"').next().unwrap().parse().unwrap();
                    (number(" x=\""), number(" y=\""))
                })
                .collect();
            assert!(boxes.len() > 4, "{file}");
            for (index, a) in boxes.iter().enumerate() {
                for b in boxes.iter().skip(index + 1) {
                    assert!(a.0.abs_diff(b.0) >= BOX || a.1.abs_diff(b.1) >= HIGH, "{file}: {a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn empty_ports_are_not_in_the_picture() {
        let view = View::of_host(&host_file("two-nodes").tree);
        assert!(view.nodes.iter().any(|node| node.at == "0000:00:1f.0"));
        assert!(!svg(&view).contains("00:1f.0"));
        assert!(!svg(&view).contains("00:03.0"));
    }
}
