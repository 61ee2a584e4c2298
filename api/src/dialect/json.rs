//! Reads bodies leniently, says where they are wrong, and writes JSON that is ASCII.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use crate::error::{ApiError, ErrorKind};
use crate::json;
use crate::sync::lock;

/// Commas and colons in a body, outside of its texts, which are about as many as it has keys and values. Reading these takes the
/// thread that answers all clients, some tens of milliseconds for so many.
const MOST: usize = 1 << 16;

/// Keys that are remembered so that each is logged once.
const REMEMBERED: usize = 256;
/// Letters of a key that are remembered and logged: longer than any that is known.
const LETTERS: usize = 64;

/// What was accepted and had no effect, each logged once in the life of the process.
#[derive(Debug, Default)]
pub struct Notes(Mutex<BTreeSet<String>>);

impl Notes {
    /// Logs that `key` in the body of `what` has no effect.
    pub fn ignored(&self, what: &str, key: &str) {
        let (mut seen, key) = (lock(&self.0), short(key));
        if seen.len() < REMEMBERED && seen.insert(format!("{what} {key}")) {
            log::info!("{what}: key `{}` has no effect", key.escape_debug());
        }
    }

    /// Logs that `key` in the body of `what` asks for what the machine does not get.
    pub fn unmet(&self, what: &str, key: &str, why: &str) {
        let (mut seen, key) = (lock(&self.0), short(key));
        if seen.len() < REMEMBERED && seen.insert(format!("{what} {key}, a warning")) {
            log::warn!("{what}: key `{}` has no effect: {why}", key.escape_debug());
        }
    }

    #[cfg(test)]
    pub(super) fn seen(&self) -> Vec<String> {
        lock(&self.0).iter().cloned().collect()
    }
}

/// The beginning of a key, and that there is more if there is.
fn short(key: &str) -> Cow<'_, str> {
    match key.char_indices().nth(LETTERS) {
        None => key.into(),
        Some((at, _)) => format!("{}...", key.get(..at).unwrap_or_default()).into(),
    }
}

/// Reads the body of `what`.
pub(super) fn read<T: DeserializeOwned>(what: &str, body: &[u8], notes: &Notes) -> Result<T, ApiError> {
    let count = keys_and_values(body);
    if count > MOST {
        return Err(bad(what, &format!("{count} keys and values are more than a machine can have; give at most {MOST}")));
    }
    json::read(body, &mut |key| notes.ignored(what, key)).map_err(|error| bad(what, &error.to_string()))
}

/// Commas and colons outside of texts, up to where `body` is no JSON any more, which is as far as it is read.
fn keys_and_values(body: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' | b':' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

/// The body of `what` asks for what cannot be.
pub(super) fn bad(what: &str, problem: &str) -> ApiError {
    ApiError::new(ErrorKind::BadRequest, problem).within(format!("{what}: the body is not usable"))
}

/// A key that is refused.
pub(super) fn refused(what: &str, key: &str, why: &str) -> ApiError {
    bad(what, &format!("key `{key}`: {why}"))
}

/// JSON in which everything beyond ASCII is escaped.
pub(crate) fn ascii(value: &Value) -> Vec<u8> {
    let mut text = Vec::with_capacity(512);
    // Values have string keys and a vector takes every byte.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut text, Ascii));
    text
}

struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: io::Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.find(|letter: char| !letter.is_ascii()) {
            let (plain, from) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let mut letters = from.chars();
            for unit in letters.next().into_iter().flat_map(|letter| letter.encode_utf16(&mut [0; 2]).to_vec()) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = letters.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_beyond_ascii_is_escaped_in_keys_and_values() {
        assert_eq!(ascii(&json!({"\u{e9}": "a\u{1F600}\"\n"})), br#"{"\u00e9":"a\ud83d\ude00\"\n"}"#);
    }

    proptest! {
        #[test]
        fn any_text_is_written_in_ascii_and_reads_back(text in "\\PC*|[\\x00-\\x7f\u{80}-\u{10ffff}]*") {
            let value = json!({ text.clone(): [text] });
            let written = ascii(&value);
            prop_assert!(written.is_ascii());
            prop_assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), value);
        }
    }

    #[derive(Debug, serde::Deserialize)]
    struct Body {
        #[expect(dead_code, reason = "only its type matters")]
        id: Option<String>,
    }

    #[test]
    fn a_broken_body_is_answered_with_the_position() {
        for (body, part) in [
            ("{\"id\":\"a\"", "line 1 column 9"),
            ("{\n \"id\": 7}", "key `id`: invalid type: integer `7`, expected a text at line 2 column 8"),
            ("", "it is empty"),
            ("{} {}", "trailing characters at line 1 column 4"),
            ("{\"id\":\"a\",\"id\":\"b\"}", "duplicate field `id`"),
        ] {
            let error = read::<Body>("vm.test", body.as_bytes(), &Notes::default()).unwrap_err();
            assert_eq!(error.kind, ErrorKind::BadRequest);
            assert!(error.chain[0].starts_with("vm.test: ") && error.chain[1].contains(part), "{error}");
        }
        assert!(read::<Body>("vm.test", &[0xFF, b'"'], &Notes::default()).is_err());
        assert!(read::<Body>("vm.test", "[".repeat(100_000).as_bytes(), &Notes::default()).is_err());
    }

    #[test]
    fn a_key_of_megabytes_is_remembered_by_its_beginning() {
        let notes = Notes::default();
        let long = "\u{e9}".repeat(1 << 20);
        for last in ["a", "b"] {
            read::<Body>("vm.test", format!(r#"{{"{long}{last}":1}}"#).as_bytes(), &notes).unwrap();
            notes.unmet("vm.test", &format!("{long}{last}"), "why");
        }
        let begun = format!("vm.test {}...", "\u{e9}".repeat(LETTERS));
        assert_eq!(notes.seen(), [begun.clone(), format!("{begun}, a warning")]);
    }

    #[test]
    fn keys_and_values_are_counted_wherever_they_are_and_what_texts_contain_is_not() {
        let text = r#"\",:[]{}\\"#.repeat(MOST);
        for body in [format!(r#"{{"id":"{text}"}}"#), format!(r#"{{"{text}":1}}"#), format!(r#"{{"x":["{text}","{text}"]}}"#)] {
            read::<Body>("vm.test", body.as_bytes(), &Notes::default()).unwrap();
        }
        let many = format!("[{}0]", "0,".repeat(MOST));
        let pairs = format!("{{{}", r#""a":0,"#.repeat(MOST));
        for body in
            [format!(r#"{{"x":{many}}}"#), format!(r#"{{"{text}":"\\","x":{many}}}"#), pairs.clone(), format!("\\\"{pairs}")]
        {
            let error = read::<Body>("vm.test", body.as_bytes(), &Notes::default()).unwrap_err();
            let is_counted = error.chain[1].contains("keys and values are more");
            // What is no JSON from its first byte on is not read any further.
            assert!(is_counted || body.starts_with('\\'), "{error}");
        }
    }

    #[test]
    fn an_unknown_key_is_noted_once_and_null_is_absent() {
        let notes = Notes::default();
        for _ in 0..3 {
            read::<Body>("vm.test", br#"{"id":null,"x":{"y":1}}"#, &notes).unwrap();
        }
        assert_eq!(notes.seen(), ["vm.test x"]);
    }
}
