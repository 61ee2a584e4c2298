//! Sets rows of words as a table for a person.

use std::fmt::Write as _;

/// Titles and rows; columns as wide as their widest value, no blanks at the end of a line.
#[must_use]
pub fn table(titles: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut lines = vec![titles.iter().map(|&title| title.to_owned()).collect::<Vec<_>>()];
    // What the other side sends does not break the table or the terminal.
    lines.extend(rows.map(|row| row.iter().map(|word| word.replace(char::is_control, "?")).collect()));
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|word| word.chars().count()).max();
    let widths: Vec<_> = (0..titles.len()).map(|column| width(column).unwrap_or(0)).collect();
    lines.iter().fold(String::new(), |mut text, line| {
        let line = line.iter().zip(&widths).fold(String::new(), |mut text, (word, width)| {
            let _ = write!(text, "{word:<width$}  ");
            text
        });
        let _ = writeln!(text, "{}", line.trim_end());
        text
    })
}
