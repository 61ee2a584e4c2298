//! Holds what the guest saw against what was planned, line by line.

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topic {
    /// A line of the tree as it is drawn, without names.
    Tree,
    /// Identity of a function.
    Function,
    /// Bus numbers and windows.
    Bridge,
    /// A base address register.
    Bar,
    /// Link registers.
    Link,
    /// Both capability lists of a function.
    Capabilities,
    /// Interrupts that a function offers.
    Offered,
    /// Peer-to-peer approval.
    Clique,
    /// A copy from device to device.
    Copy,
    /// An interrupt that arrived.
    Interrupt,
    /// Configuration access, first and last line.
    Machine,
}

impl Topic {
    /// All, in the order of the table.
    pub const ALL: [Self; 11] = [
        Self::Tree,
        Self::Function,
        Self::Bridge,
        Self::Bar,
        Self::Link,
        Self::Capabilities,
        Self::Offered,
        Self::Clique,
        Self::Copy,
        Self::Interrupt,
        Self::Machine,
    ];

    /// Its name in the table.
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Tree => "tree lines",
            Self::Function => "functions",
            Self::Bridge => "bridges",
            Self::Bar => "BARs",
            Self::Link => "links",
            Self::Capabilities => "capability lists",
            Self::Offered => "interrupts offered",
            Self::Clique => "cliques",
            Self::Copy => "DMA copies",
            Self::Interrupt => "interrupts received",
            Self::Machine => "other facts",
        }
    }

    fn of(line: &str) -> Self {
        match line.split(' ').next() {
            Some("function") => Self::Function,
            Some("bridge") => Self::Bridge,
            Some("bar") => Self::Bar,
            Some("link") => Self::Link,
            Some("capabilities") => Self::Capabilities,
            Some("interrupts") => Self::Offered,
            Some("clique") => Self::Clique,
            Some("dma") => Self::Copy,
            Some("interrupt") => Self::Interrupt,
            _ => Self::Machine,
        }
    }
}

/// One line, planned and seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<'a> {
    /// What it is about.
    pub topic: Topic,
    /// `None` for a line that nobody planned.
    pub planned: Option<&'a str>,
    /// `None` for a line that the guest did not print.
    pub seen: Option<&'a str>,
}

impl Pair<'_> {
    /// Whether both are the same.
    #[must_use]
    pub fn agrees(&self) -> bool {
        self.planned == self.seen
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// What is counted.
    pub topic: Topic,
    /// Lines planned.
    pub planned: usize,
    /// Lines seen.
    pub seen: usize,
    /// Lines that are not the same.
    pub differ: usize,
}

/// What one side says: the tree as it is drawn, and the report.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// The tree.
    pub tree: &'a str,
    /// The report.
    pub report: &'a str,
}

/// All lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison<'a> {
    /// Planned lines in their order, then those that nobody planned.
    pub pairs: Vec<Pair<'a>>,
    /// The first place where the reports have the same lines in another order: planned, seen.
    pub out_of_order: Option<(&'a str, &'a str)>,
}

impl<'a> Comparison<'a> {
    /// Compares.
    #[must_use]
    pub fn new(planned: Side<'a>, seen: Side<'a>) -> Self {
        let mut pairs = trees(planned.tree, seen.tree);
        pairs.extend(reports(planned.report, seen.report));
        let all_agree = pairs.iter().all(Pair::agrees);
        let mut both = planned.report.lines().zip(seen.report.lines());
        let out_of_order = both.find(|(planned, seen)| planned != seen).filter(|_| all_agree);
        Self { pairs, out_of_order }
    }

    /// Whether every line is the same on both sides, in the same order.
    #[must_use]
    pub fn agrees(&self) -> bool {
        self.out_of_order.is_none() && self.pairs.iter().all(Pair::agrees)
    }

    /// What the process ends with: 0 if all agrees, else 1.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.agrees())
    }

    /// The table.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let row = |topic| {
            let pairs = self.pairs.iter().filter(|pair| pair.topic == topic);
            let count = |is: fn(&Pair<'_>) -> bool| pairs.clone().filter(|pair| is(pair)).count();
            Row {
                topic,
                planned: count(|pair| pair.planned.is_some()),
                seen: count(|pair| pair.seen.is_some()),
                differ: count(|pair| !pair.agrees()),
            }
        };
        Topic::ALL.map(row).into()
    }
}

/// Trees have no names for their lines: the n-th is held against the n-th. Plan and guest draw alike where there is one root
/// bus.
fn trees<'a>(planned: &'a str, seen: &'a str) -> Vec<Pair<'a>> {
    let (mut planned, mut seen) = (planned.lines().map(drawing), seen.lines().map(drawing));
    let next = || match (planned.next(), seen.next()) {
        (None, None) => None,
        (planned, seen) => Some(Pair { topic: Topic::Tree, planned, seen }),
    };
    std::iter::from_fn(next).collect()
}

/// A line of a tree without what stands behind an endpoint's number, since plan and guest have different names for it.
fn drawing(line: &str) -> &str {
    match line.rsplit_once("  ") {
        Some((drawn, _)) if drawn.ends_with(|last: char| last.is_ascii_hexdigit()) => drawn,
        _ => line,
    }
}

/// Lines of a report are about the same when the words before the first value are the same.
fn reports<'a>(planned: &'a str, seen: &'a str) -> Vec<Pair<'a>> {
    let mut left: Vec<&str> = seen.lines().collect();
    let mut pairs = Vec::new();
    for line in planned.lines() {
        // The lines are mostly in the same order, so this looks at few of them.
        let found = left.iter().position(|seen| subject(seen) == subject(line));
        pairs.push(Pair { topic: Topic::of(line), planned: Some(line), seen: found.map(|at| left.remove(at)) });
    }
    pairs.extend(left.iter().map(|line| Pair { topic: Topic::of(line), planned: None, seen: Some(line) }));
    pairs
}

fn subject(line: &str) -> &str {
    let value = line.find('=').unwrap_or(line.len());
    line.get(..value).and_then(|front| front.rsplit_once(' ')).map_or(line, |(subject, _)| subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "-[0000:00]-+-04.0-[01]----00.0  gpu0 10de:20b8, clique 0\n           \\-05.0-[02]--\n";
    const REPORT: &str =
        "banyan-probe 1\nfunction 01:00.0 id=10de:20b8\nbar 01:00.0 0 size=1000\nbar 01:00.0 1 size=2000\nend functions=1\n";

    fn with(report: &str) -> Comparison<'_> {
        let tree = "-[0000:00]-+-04.0-[01]----00.0  10de:20b8 clique 0 16GT/s x16\n           \\-05.0-[02]--\n";
        Comparison::new(Side { tree: TREE, report: REPORT }, Side { tree, report })
    }

    fn differing<'a>(comparison: &Comparison<'a>) -> Vec<(Option<&'a str>, Option<&'a str>)> {
        comparison.pairs.iter().filter(|pair| !pair.agrees()).map(|pair| (pair.planned, pair.seen)).collect()
    }

    #[test]
    fn the_same_lines_agree_whatever_names_the_tree_has() {
        assert!(with(REPORT).agrees());
        assert!(with(REPORT).rows().iter().all(|row| row.planned == row.seen && row.differ == 0));
    }

    #[test]
    fn a_changed_value_stands_beside_the_planned_one() {
        let report = REPORT.replace("1 size=2000", "1 size=4000");
        let comparison = with(&report);
        assert!(!comparison.agrees());
        assert_eq!(differing(&comparison), [(Some("bar 01:00.0 1 size=2000"), Some("bar 01:00.0 1 size=4000"))]);
        let bars = comparison.rows().into_iter().find(|row| row.topic == Topic::Bar);
        assert_eq!(bars, Some(Row { topic: Topic::Bar, planned: 2, seen: 2, differ: 1 }));
    }

    #[test]
    fn missing_unplanned_and_repeated_lines_differ() {
        let missing = REPORT.replace("bar 01:00.0 0 size=1000\n", "");
        assert_eq!(differing(&with(&missing)), [(Some("bar 01:00.0 0 size=1000"), None)]);
        for unplanned in ["clique 01:00.0 id=3", "bar 01:00.0 0 size=1000", "garbage"] {
            let more = format!("{REPORT}{unplanned}\n");
            assert_eq!(differing(&with(&more)), [(None, Some(unplanned))]);
        }
        assert_eq!(differing(&with("")).len(), REPORT.lines().count());
    }

    #[test]
    fn another_order_does_not_agree() {
        let mut lines: Vec<&str> = REPORT.lines().collect();
        lines.swap(2, 3);
        let report = lines.join("\n");
        let comparison = with(&report);
        assert!(!comparison.agrees() && differing(&comparison).is_empty());
        assert_eq!(comparison.out_of_order, Some(("bar 01:00.0 0 size=1000", "bar 01:00.0 1 size=2000")));
    }

    #[test]
    fn another_shape_of_the_tree_does_not_agree() {
        let tree = TREE.replace("05.0-[02]", "06.0-[02]");
        let comparison = Comparison::new(Side { tree: TREE, report: REPORT }, Side { tree: &tree, report: REPORT });
        assert_eq!(differing(&comparison), [(Some("           \\-05.0-[02]--"), Some("           \\-06.0-[02]--"))]);
        let comparison = Comparison::new(Side { tree: TREE, report: REPORT }, Side { tree: "", report: REPORT });
        assert_eq!(differing(&comparison).len(), 2);
    }
}
