//! Reads and prints the command-line form of configuration: `key=value,key=value`.
//!
//! Rules: keys are written with `-` or `_`, as you like; each key once; no key without a value. One key may be left out in
//! front, where a flag names it (`--memory 2G` is `--memory size=2G`). A value in double quotes may hold commas, and `""`
//! inside it is one quote. `[a,b]` is a list. Switches are `on` or `off`.

use std::fmt;

use serde::de::value::{SeqDeserializer, StrDeserializer};
use serde::de::{self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Visitor};
use serde::forward_to_deserialize_any;
use thiserror::Error;

/// How a flag is written: its name and the key that its first value has if none is given.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    /// With the dashes: `--memory`.
    pub name: &'static str,
    /// `size`.
    pub first: &'static str,
}

impl Flag {
    /// Reads `text` as a `T`. `T`'s own rules apply after those of the form.
    pub fn parse<T: DeserializeOwned>(self, text: &str) -> Result<T, FlagError> {
        self.read(split(text, self.first))
    }

    /// As [`Flag::parse`]. What `text` does not say is as in `base`, which is of the same form.
    pub fn parse_over<T: DeserializeOwned>(self, text: &str, base: &str) -> Result<T, FlagError> {
        self.read(split(text, self.first).and_then(|said| {
            let mut items = split(base, self.first)?;
            items.retain(|(key, _)| said.iter().all(|(other, _)| other != key));
            items.extend(said);
            Ok(items)
        }))
    }

    fn read<T: DeserializeOwned>(self, items: Result<Vec<Pair>, FlagProblem>) -> Result<T, FlagError> {
        items
            .and_then(|items| T::deserialize(Items { items: items.into_iter(), value: None }))
            .map_err(|problem| FlagError { flag: self.name, problem })
    }
}

/// Prints pairs, with a comma between two of them.
pub(crate) struct Pairs<'a, 'f> {
    out: &'a mut fmt::Formatter<'f>,
    started: bool,
}

impl<'a, 'f> Pairs<'a, 'f> {
    pub(crate) fn new(out: &'a mut fmt::Formatter<'f>) -> Self {
        Self { out, started: false }
    }

    /// `key=value`.
    pub(crate) fn pair(&mut self, key: &str, value: &dyn fmt::Display) -> fmt::Result {
        let comma = if self.started { "," } else { "" };
        self.started = true;
        let value = value.to_string();
        if value.is_empty() || value.starts_with(['"', '[']) || value.contains(',') {
            write!(self.out, "{comma}{key}=\"{}\"", value.replace('"', "\"\""))
        } else {
            write!(self.out, "{comma}{key}={value}")
        }
    }

    /// `key=[a,b]`.
    pub(crate) fn list(&mut self, key: &str, elements: &[String]) -> fmt::Result {
        let comma = if self.started { "," } else { "" };
        self.started = true;
        write!(self.out, "{comma}{key}=[{}]", elements.join(","))
    }

    /// `key=value`, if there is one.
    pub(crate) fn optional(&mut self, key: &str, value: Option<&dyn fmt::Display>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.pair(key, value))
    }

    /// `key=on` or `key=off`, if it is not the default.
    pub(crate) fn switch(&mut self, key: &str, value: bool, default: bool) -> fmt::Result {
        if value == default { Ok(()) } else { self.pair(key, &if value { "on" } else { "off" }) }
    }
}

/// The words of an enum that is one choice of several, for its `Display`: the same that serde reads.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal $(| $alias:literal)*),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
        pub enum $name { $($(#[$variant_meta])* #[serde(rename = $word $(, alias = $alias)*)] $variant),+ }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),+ })
            }
        }
    };
}
pub(crate) use choice;

#[derive(Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    List(Vec<String>),
}

type Pair = (String, Value);

fn split(text: &str, first: &str) -> Result<Vec<Pair>, FlagProblem> {
    if text.is_empty() {
        return Err(FlagProblem::Empty { first: first.to_owned() });
    }
    let mut items: Vec<Pair> = Vec::new();
    let mut rest = Some(text);
    while let Some(item) = rest {
        if item.is_empty() || item.starts_with(',') {
            return Err(FlagProblem::StrayComma);
        }
        let (key, from) = match item.find(['=', ',', '"', '[']) {
            Some(at) if item[at..].starts_with('=') => (item[..at].replace('_', "-"), &item[at + 1..]),
            _ if items.is_empty() => (first.to_owned(), item),
            _ => return Err(FlagProblem::NoValue { key: item.split(',').next().unwrap_or_default().to_owned() }),
        };
        if key.is_empty() {
            return Err(FlagProblem::NoKey { item: item.to_owned() });
        }
        let (value, after) = value(&key, from)?;
        if items.iter().any(|(earlier, _)| *earlier == key) {
            return Err(FlagProblem::Duplicate { key });
        }
        items.push((key, value));
        rest = after;
    }
    Ok(items)
}

/// The value at the start of `text`, and what follows the comma after it.
fn value<'a>(key: &str, text: &'a str) -> Result<(Value, Option<&'a str>), FlagProblem> {
    if let Some(mut rest) = text.strip_prefix('[') {
        let mut list = Vec::new();
        loop {
            if let Some(after) = rest.strip_prefix(']') {
                return Ok((Value::List(list), after_comma(key, after)?));
            }
            let (element, after) = word(key, rest, &[',', ']'])?;
            list.push(element);
            rest = after.strip_prefix(',').unwrap_or(after);
            if rest.is_empty() {
                return Err(FlagProblem::Open { key: key.to_owned(), end: ']' });
            }
        }
    }
    let (word, after) = word(key, text, &[','])?;
    if word.is_empty() && !text.starts_with('"') {
        return Err(FlagProblem::NoValue { key: key.to_owned() });
    }
    Ok((Value::Text(word), after_comma(key, after)?))
}

/// A quoted text, or everything up to one of `ends`.
fn word<'a>(key: &str, text: &'a str, ends: &[char]) -> Result<(String, &'a str), FlagProblem> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find(ends).unwrap_or(text.len());
        return Ok((text[..end].to_owned(), &text[end..]));
    };
    let mut word = String::new();
    loop {
        let Some((part, after)) = rest.split_once('"') else {
            return Err(FlagProblem::Open { key: key.to_owned(), end: '"' });
        };
        word.push_str(part);
        let Some(more) = after.strip_prefix('"') else { return Ok((word, after)) };
        word.push('"');
        rest = more;
    }
}

fn after_comma<'a>(key: &str, text: &'a str) -> Result<Option<&'a str>, FlagProblem> {
    match text.strip_prefix(',') {
        Some(rest) => Ok(Some(rest)),
        None if text.is_empty() => Ok(None),
        None => Err(FlagProblem::Trailing { key: key.to_owned(), text: text.to_owned() }),
    }
}

struct Items {
    items: std::vec::IntoIter<Pair>,
    value: Option<Pair>,
}

impl<'de> Deserializer<'de> for Items {
    type Error = FlagProblem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
        visitor.visit_map(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Items {
    type Error = FlagProblem;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, FlagProblem> {
        self.value = self.items.next();
        match &self.value {
            Some((key, _)) => seed.deserialize(StrDeserializer::new(key)).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, FlagProblem> {
        // serde asks for a value only after its key.
        let (key, value) = self.value.take().ok_or_else(|| FlagProblem::Rule { what: "a value without a key".to_owned() })?;
        seed.deserialize(value).map_err(|problem| problem.under(key))
    }
}

macro_rules! whole_numbers {
    ($($method:ident $visit:ident $type:ident),+) => { $(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
            let text = self.text("one whole number")?;
            let number = match text.strip_prefix("0x") {
                Some(digits) => $type::from_str_radix(digits, 16),
                None => text.parse(),
            };
            let range = ($type::MIN, $type::MAX);
            visitor.$visit(number.map_err(|_| de::Error::custom(
                format_args!("`{text}` is no whole number from {} to {}", range.0, range.1)))?)
        }
    )+ };
}

impl Value {
    fn text(self, wanted: &str) -> Result<String, FlagProblem> {
        match self {
            Self::Text(text) => Ok(text),
            Self::List(_) => Err(de::Error::custom(format_args!("a list was given where {wanted} is wanted"))),
        }
    }
}

impl<'de> Deserializer<'de> for Value {
    type Error = FlagProblem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
        visitor.visit_string(self.text("one value")?)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
        match self.text("on or off")?.as_str() {
            "on" | "true" => visitor.visit_bool(true),
            "off" | "false" => visitor.visit_bool(false),
            other => Err(de::Error::custom(format_args!("`{other}` is neither on nor off"))),
        }
    }

    whole_numbers! {
        deserialize_u8 visit_u8 u8, deserialize_u16 visit_u16 u16, deserialize_u32 visit_u32 u32, deserialize_u64 visit_u64 u64
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, FlagProblem> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FlagProblem> {
        let list = match self {
            Self::List(list) => list,
            Self::Text(text) => vec![text],
        };
        visitor.visit_seq(SeqDeserializer::new(list.into_iter().map(Value::Text)))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FlagProblem> {
        let text = self.text("one word")?;
        let word: StrDeserializer<'_, FlagProblem> = text.as_str().into_deserializer();
        word.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        tuple tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, FlagProblem> for Value {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The one of `known` that is closest to `word`, if it is close enough to be what was meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let limit = 1 + word.chars().count() / 4;
    known.iter().map(|key| (distance(word, key), *key)).filter(|(far, _)| *far <= limit).min().map(|(_, key)| key)
}

/// Letters to insert, drop or replace to get from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (taken, letter) in from.chars().enumerate() {
        let mut next = vec![taken + 1];
        for (other, pair) in to.iter().zip(row.windows(2)) {
            let [replace, drop] = [pair.first(), pair.last()].map(|cost| cost.copied().unwrap_or_default());
            let insert = next.last().copied().unwrap_or_default();
            next.push((replace + usize::from(*other != letter)).min(drop + 1).min(insert + 1));
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

fn advice(word: &str, known: &[&str]) -> String {
    let list = known.join(", ");
    match nearest(word, known) {
        Some(near) => format!("did you mean `{near}`? Known: {list}"),
        None => format!("known: {list}"),
    }
}

impl FlagProblem {
    /// The same problem, with the key in whose value it was found.
    fn under(self, key: String) -> Self {
        match self {
            Self::Rule { what } => Self::Value { key, what },
            Self::UnknownWord { word, advice } => Self::Value { key, what: format!("`{word}` is not known; {advice}") },
            other => other,
        }
    }
}

impl de::Error for FlagProblem {
    fn custom<T: fmt::Display>(what: T) -> Self {
        Self::Rule { what: what.to_string() }
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::UnknownKey { key: key.to_owned(), advice: advice(key, known) }
    }

    fn unknown_variant(word: &str, known: &'static [&'static str]) -> Self {
        Self::UnknownWord { word: word.to_owned(), advice: advice(word, known) }
    }

    fn missing_field(key: &'static str) -> Self {
        Self::Required { key: key.to_owned() }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::Duplicate { key: key.to_owned() }
    }
}

/// A flag's text that cannot be read.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("{flag}: {problem}")]
pub struct FlagError {
    /// The flag, with its dashes.
    pub flag: &'static str,
    /// What is wrong with its text.
    pub problem: FlagProblem,
}

/// What is wrong with a flag's text.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum FlagProblem {
    /// Nothing was given.
    #[error("nothing is given; write key=value pairs with commas between them, such as `{first}=...`")]
    Empty {
        /// A key to start with.
        first: String,
    },
    /// A key that does not exist.
    #[error("key `{key}` is unknown; {advice}")]
    UnknownKey {
        /// The key.
        key: String,
        /// The keys there are, and the one that was meant, perhaps.
        advice: String,
    },
    /// A word that is none of a key's choices.
    #[error("`{word}` is unknown; {advice}")]
    UnknownWord {
        /// The word.
        word: String,
        /// The words there are.
        advice: String,
    },
    /// The same key twice, also by another spelling.
    #[error("key `{key}` is given twice; keep one of them")]
    Duplicate {
        /// The key.
        key: String,
    },
    /// Nothing between two commas, or before or after one.
    #[error("a comma has nothing before or after it; remove it")]
    StrayComma,
    /// A key alone.
    #[error("`{key}` has no value; write `key=value`")]
    NoValue {
        /// The key.
        key: String,
    },
    /// A value alone.
    #[error("no key in front of `{item}`; write `key=value`")]
    NoKey {
        /// From there on.
        item: String,
    },
    /// A quote or bracket that is not closed.
    #[error("the value of `{key}` has no closing `{end}`; add it")]
    Open {
        /// The key.
        key: String,
        /// What is missing.
        end: char,
    },
    /// Text after the closing quote or bracket.
    #[error("`{text}` follows the end of the value of `{key}`; put a comma between them")]
    Trailing {
        /// The key.
        key: String,
        /// What follows.
        text: String,
    },
    /// A value that its key cannot have.
    #[error("key `{key}`: {what}")]
    Value {
        /// The key.
        key: String,
        /// Why.
        what: String,
    },
    /// A key that must be there.
    #[error("key `{key}` is missing; add `{key}=...`")]
    Required {
        /// The key.
        key: String,
    },
    /// Keys that do not go together.
    #[error("{what}")]
    Rule {
        /// Why, and what to do.
        what: String,
    },
}

#[cfg(test)]
mod tests;
