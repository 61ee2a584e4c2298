//! Decides how text reaches a terminal: whatever hosts, files, guests and other processes put into names, none of it steers the
//! terminal, and a reader that has seen enough is no error.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Writes `text` to `out`. A reader such as head(1) may leave early.
pub fn print(out: &mut dyn Write, text: &str) -> io::Result<()> {
    match out.write_all(printable(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// The same text with whatever a terminal would obey as `\u001b`, but ends of lines. What was JSON still is, and means the same.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |letter| letter != '\n' && obeyed(letter))
}

/// As [`printable`], in one line.
#[must_use]
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, obeyed)
}

/// Control characters, and those that change the direction or the line of what follows (Unicode 16.0, 23.2).
fn obeyed(letter: char) -> bool {
    letter.is_control() || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, wanted: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&wanted) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if wanted(letter) {
            // Writing to a string does not fail; all of these are in the first plane.
            let _ = write!(plain, "\\u{:04x}", u32::from(letter));
        } else {
            plain.push(letter);
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown_and_the_rest_is_left() {
        assert_eq!(printable("a\u{1b}[2Jb\r\n\u{9b}1m\u{202e}\u{7f} é漢"), "a\\u001b[2Jb\\u000d\n\\u009b1m\\u202e\\u007f é漢");
        assert_eq!(one_line("a\nb\t"), "a\\u000ab\\u0009");
        assert!(matches!(printable("plain\ntext"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_stays_what_it_was() {
        let value = serde_json::json!({ "a\u{9b}\u{1b}": ["\u{202e}x\u{7f}\n"] });
        let shown = printable(&format!("{value:#}\n")).into_owned();
        assert!(!shown.chars().any(|letter| letter != '\n' && obeyed(letter)), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }

    #[test]
    fn a_reader_that_left_is_no_error_and_another_failure_is() {
        struct Failing(io::ErrorKind);
        impl Write for Failing {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(print(&mut Failing(io::ErrorKind::BrokenPipe), "x").is_ok());
        assert_eq!(print(&mut Failing(io::ErrorKind::StorageFull), "x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
