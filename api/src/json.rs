//! Says where in a JSON text a value is that cannot be used, what was expected there and what came.

use std::fmt;

use serde::de::DeserializeOwned;
use thiserror::Error;

/// Reads a text. Each key that the type does not know and does not refuse is passed to `ignored`.
pub fn read<T: DeserializeOwned>(text: &[u8], ignored: &mut dyn FnMut(&str)) -> Result<T, JsonError> {
    if text.is_empty() {
        return Err(JsonError { key: None, problem: "it is empty".to_owned() });
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let mut track = serde_path_to_error::Track::new();
    let mut note = |path: serde_ignored::Path<'_>| ignored(&path.to_string().replace(".?", ""));
    let tracked = serde_path_to_error::Deserializer::new(&mut reader, &mut track);
    let value = T::deserialize(serde_ignored::Deserializer::new(tracked, &mut note));
    match value {
        Ok(value) => reader.end().map(|()| value).map_err(|error| JsonError { key: None, problem: plain(&error.to_string()) }),
        Err(error) => {
            let key = Some(track.path().to_string()).filter(|path| path != "." && !path.is_empty());
            Err(JsonError { key: key.map(|key| key.escape_debug().to_string()), problem: plain(&error.to_string()) })
        }
    }
}

/// What a range of Rust is called by those who write JSON.
const RANGES: [(&str, &str); 11] = [
    ("u8", "a whole number from 0 to 255"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", "a whole number from 0 to 18446744073709551615"),
    ("usize", "a whole number from 0 on"),
    ("a nonzero u16", "a whole number from 1 to 65535"),
    ("a boolean", "true or false"),
    ("a string", "a text"),
    ("path string", "a path as a text"),
    ("a sequence", "a list"),
    ("a map", "an object"),
];

/// The reader's words with names of types as ranges. The words are those of serde, whatever the format.
pub(crate) fn plain(problem: &str) -> String {
    let Some((came, rest)) = problem.rsplit_once(", expected ") else { return problem.to_owned() };
    let (expected, place) = rest.split_once(" at line ").map_or((rest, None), |(expected, place)| (expected, Some(place)));
    let expected = RANGES.iter().find(|(name, _)| *name == expected).map_or(expected, |(_, words)| words);
    let place = place.map(|place| format!(" at line {place}")).unwrap_or_default();
    format!("{came}, expected {expected}{place}")
}

/// A text that does not hold what it should.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub struct JsonError {
    /// The key, from the outermost object on; `None` for the text as a whole.
    pub key: Option<String>,
    /// What is wrong, with line and column.
    pub problem: String,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = &self.key {
            write!(f, "key `{key}`: ")?;
        }
        f.write_str(&self.problem)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(expecting = "an object")]
    #[expect(dead_code, reason = "only the types matter")]
    struct Outer {
        list: Option<Vec<Inner>>,
        on: Option<bool>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(expecting = "an object")]
    #[expect(dead_code, reason = "only the types matter")]
    struct Inner {
        path: Option<std::path::PathBuf>,
        size: Option<u16>,
        bits: u8,
    }

    #[test]
    fn a_value_of_another_type_is_named_by_its_key_with_what_was_expected_and_what_came() {
        for (text, expected) in [
            (
                r#"{"list":[{"bits":1},{"bits":300}]}"#,
                "key `list[1].bits`: invalid value: integer `300`, expected a whole number from 0 to 255",
            ),
            (r#"{"list":[{"bits":1,"path":7}]}"#, "key `list[0].path`: invalid type: integer `7`, expected a path as a text"),
            (
                r#"{"list":[{"bits":1,"size":-1}]}"#,
                "key `list[0].size`: invalid value: integer `-1`, expected a whole number from 0 to 65535",
            ),
            (r#"{"list":{}}"#, "key `list`: invalid type: map, expected a list"),
            (r#"{"list":["a"]}"#, "key `list[0]`: invalid type: string \"a\", expected an object"),
            (r#"{"on":"yes"}"#, "key `on`: invalid type: string \"yes\", expected true or false"),
            (r#"{"list":[{}]}"#, "key `list[0]`: missing field `bits`"),
            ("7", "invalid type: integer `7`, expected an object"),
            ("", "it is empty"),
            ("{} {}", "trailing characters"),
        ] {
            let error = read::<Outer>(text.as_bytes(), &mut |_| {}).unwrap_err().to_string();
            let (said, place) = error.split_once(" at line 1 column ").unwrap_or((&error, "0"));
            assert_eq!(said, expected, "{text}");
            assert!(place.parse::<usize>().is_ok_and(|column| column <= text.len()), "{error}");
        }
    }

    #[test]
    fn what_is_not_known_is_passed_on_by_its_path() {
        let mut seen = Vec::new();
        read::<Outer>(br#"{"a":1,"list":[{"bits":1,"b":{"c":1}}]}"#, &mut |key| seen.push(key.to_owned())).unwrap();
        assert_eq!(seen, ["a", "list.0.b"]);
    }
}
