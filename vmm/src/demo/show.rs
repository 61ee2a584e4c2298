//! Words what the demonstration found.

use std::fmt::{self, Display, Formatter};

use super::compare::{Comparison, Pair, Row};

/// What runs, and what for.
pub const INTRODUCTION: &str = "\
An emulated host: two A100X cards, each with a GPU and network functions behind nested switches.
A built-in guest finds the hierarchy by itself, copies from device to device, takes the interrupts.
";

/// What the guest printed: its tree, then its copies.
pub struct Seen<'a>(pub &'a str);

impl<'a> Seen<'a> {
    /// The lines of the tree: roots start with a dash, the others with blanks.
    pub fn tree(&self) -> impl Iterator<Item = &'a str> {
        self.0.lines().filter(is_tree)
    }

    fn rest(&self) -> impl Iterator<Item = &'a str> {
        self.0.lines().filter(|line| !is_tree(line))
    }
}

fn is_tree(line: &&str) -> bool {
    line.starts_with(['-', ' '])
}

impl Display for Seen<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.tree().try_for_each(|line| writeln!(f, "{line}"))?;
        self.rest().enumerate().try_for_each(|(number, line)| {
            if number == 0 {
                writeln!(f)?;
            }
            writeln!(f, "{line}")
        })
    }
}

/// The table, the lines that differ and the verdict.
pub struct Findings<'a> {
    /// What was found.
    pub comparison: &'a Comparison<'a>,
    /// Print lines that agree as well.
    pub verbose: bool,
}

impl Display for Findings<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<22}{:>8}{:>8}{:>8}", "", "planned", "seen", "differ")?;
        for Row { topic, planned, seen, differ } in self.comparison.rows() {
            writeln!(f, "{:<22}{planned:>8}{seen:>8}{differ:>8}", topic.noun())?;
        }
        writeln!(f)?;
        let shown = self.comparison.pairs.iter().filter(|pair| self.verbose || !pair.agrees());
        let mut any = false;
        for pair in shown {
            any = true;
            line(f, pair)?;
        }
        if let Some((planned, seen)) = self.comparison.out_of_order {
            writeln!(f, "in another order, first\n  planned  {planned}\n  seen     {seen}")?;
            any = true;
        }
        if any {
            writeln!(f)?;
        }
        let differ = self.comparison.pairs.iter().filter(|pair| !pair.agrees()).count();
        match (self.comparison.agrees(), differ) {
            (true, _) => writeln!(f, "the guest sees what was planned"),
            (false, 0) => writeln!(f, "the guest does not see what was planned: the order differs"),
            (false, 1) => writeln!(f, "the guest does not see what was planned: 1 line differs"),
            (false, count) => writeln!(f, "the guest does not see what was planned: {count} lines differ"),
        }
    }
}

fn line(f: &mut Formatter<'_>, pair: &Pair<'_>) -> fmt::Result {
    match (pair.agrees(), pair.planned) {
        (true, Some(line)) => writeln!(f, "  agrees   {line}"),
        (_, planned) => {
            writeln!(f, "  planned  {}", planned.unwrap_or("(nothing)"))?;
            writeln!(f, "  seen     {}", pair.seen.unwrap_or("(nothing)"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compare::Side;
    use super::*;

    const PLANNED: Side<'_> =
        Side { tree: "-[0000:00]---04.0  gpu0 10de:20b8\n", report: "banyan-probe 1\nbar 04.0 0 size=10\n" };

    fn findings(report: &str, verbose: bool) -> String {
        let comparison = Comparison::new(PLANNED, Side { tree: "-[0000:00]---04.0  10de:20b8\n", report });
        Findings { comparison: &comparison, verbose }.to_string()
    }

    #[test]
    fn lines_that_agree_are_shown_on_request_alone() {
        let short = findings(PLANNED.report, false);
        assert!(!short.contains("size=10") && short.ends_with("\n\nthe guest sees what was planned\n"), "{short}");
        let long = findings(PLANNED.report, true);
        assert!(long.contains("  agrees   bar 04.0 0 size=10\n"), "{long}");
    }

    #[test]
    fn a_line_that_differs_is_shown_with_both_sides() {
        let text = findings("banyan-probe 1\nbar 04.0 0 size=20\n", false);
        assert!(text.contains("  planned  bar 04.0 0 size=10\n  seen     bar 04.0 0 size=20\n"), "{text}");
        assert!(text.contains("BARs                         1       1       1\n"), "{text}");
        assert!(text.ends_with("the guest does not see what was planned: 1 line differs\n"), "{text}");
        let text = findings("", false);
        assert!(text.contains("  seen     (nothing)\n") && text.ends_with("2 lines differ\n"), "{text}");
    }

    #[test]
    fn another_order_is_told() {
        let text = findings("bar 04.0 0 size=10\nbanyan-probe 1\n", false);
        assert!(text.contains("  planned  banyan-probe 1\n  seen     bar 04.0 0 size=10\n"), "{text}");
        assert!(text.ends_with("the guest does not see what was planned: the order differs\n"), "{text}");
    }

    #[test]
    fn the_tree_is_told_from_what_follows() {
        let seen = Seen("-[0000:00]-+-04.0  a\n           \\-05.0  b\n04.0 -> 05.0: ok\n");
        assert_eq!(seen.tree().count(), 2);
        assert_eq!(seen.to_string(), "-[0000:00]-+-04.0  a\n           \\-05.0  b\n\n04.0 -> 05.0: ok\n");
    }
}
