//! Reads a YAML or JSON text (JSON is YAML) into a tree that knows its lines. Bounded: no aliases, so nothing grows, and no
//! deep nesting.

use saphyr_parser::{Event, Input, Parser, Span, StrInput};

/// Deepest nesting; a CDI file has six levels.
const DEEPEST: usize = 16;

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Line, from 1.
    pub line: usize,
    /// What it is.
    pub value: Value,
}

/// What a value is. Numbers and switches are the text that they are written as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A scalar.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping in the order of the text: key, its line, value.
    Map(Vec<(String, usize, Node)>),
}

/// Why a text is not read, and the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Line, from 1.
    pub line: usize,
    /// Why.
    pub why: String,
}

/// The only document of `text`.
///
/// Public examples have typographic quotes, some of them where only a plain quote ends a string. A text that is wrong as it
/// stands is read with plain ones in their place.
pub fn read(text: &str) -> Result<Node, Refusal> {
    document(text).or_else(|refusal| {
        let plain = text.replace(['\u{201C}', '\u{201D}'], "\"");
        if plain == text { Err(refusal) } else { document(&plain).map_err(|_| refusal) }
    })
}

fn document(text: &str) -> Result<Node, Refusal> {
    let mut reader = Reader { parser: Parser::new_from_str(text) };
    let mut root = None;
    loop {
        let (event, line) = reader.next()?;
        match event {
            Event::StreamEnd => return root.ok_or_else(|| refuse(1, "the file is empty")),
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            Event::DocumentStart(_) if root.is_some() => return Err(refuse(line, "a second document begins; make it a file")),
            Event::DocumentStart(_) => {
                let (event, line) = reader.next()?;
                root = Some(reader.node(event, line, 0)?);
            }
            _ => return Err(refuse(line, "something stands outside of the document")),
        }
    }
}

struct Reader<'a, T: Input> {
    parser: Parser<'a, T>,
}

impl<'a> Reader<'a, StrInput<'a>> {
    fn next(&mut self) -> Result<(Event<'a>, usize), Refusal> {
        match self.parser.next_event() {
            Some(Ok((event, Span { start, .. }))) => Ok((event, start.line())),
            Some(Err(error)) => Err(refuse(error.marker().line(), error.info())),
            None => Err(refuse(1, "the text ends too early")),
        }
    }

    fn node(&mut self, event: Event<'a>, line: usize, depth: usize) -> Result<Node, Refusal> {
        if depth > DEEPEST {
            return Err(refuse(line, "values are nested too deeply"));
        }
        let value = match event {
            Event::Scalar(text, ..) => Value::Text(text.into_owned()),
            Event::SequenceStart(..) => self.list(depth)?,
            Event::MappingStart(..) => self.map(depth)?,
            Event::Alias(_) => return Err(refuse(line, "aliases are not read; write the value again")),
            _ => return Err(refuse(line, "a value is missing")),
        };
        Ok(Node { line, value })
    }

    fn list(&mut self, depth: usize) -> Result<Value, Refusal> {
        let mut items = Vec::new();
        loop {
            let (event, line) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(Value::List(items));
            }
            items.push(self.node(event, line, depth + 1)?);
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, Refusal> {
        let mut entries: Vec<(String, usize, Node)> = Vec::new();
        loop {
            let (event, line) = self.next()?;
            let key = match event {
                Event::MappingEnd => return Ok(Value::Map(entries)),
                Event::Scalar(key, ..) => key.into_owned(),
                _ => return Err(refuse(line, "a key is no text")),
            };
            if entries.iter().any(|(earlier, ..)| *earlier == key) {
                return Err(refuse(line, &format!("key `{key}` is given twice")));
            }
            let (event, at) = self.next()?;
            entries.push((key, line, self.node(event, at, depth + 1)?));
        }
    }
}

fn refuse(line: usize, why: &str) -> Refusal {
    Refusal { line: line.max(1), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_with_tabs_is_read_as_the_same_tree_as_yaml() {
        let json = read("{\n\t\"a\": [\n\t\t\"x\",\n\t\t{\"b\": 1, \"url\": \"a\\/b\"}\n\t]\n}\n").unwrap();
        let yaml = read("a:\n- \"x\"\n- b: 1\n  url: a/b\n").unwrap();
        let texts = |node: &Node| format!("{node:?}").replace(|char: char| char.is_ascii_digit(), "");
        assert_eq!(texts(&json), texts(&yaml));
    }

    #[test]
    fn what_could_grow_or_overflow_is_refused() {
        for (text, why) in [
            ("", "the file is empty"),
            ("a: &x [1]\nb: *x\n", "aliases are not read"),
            // The scanner has a limit of its own, which it reaches first when it looks ahead.
            (&"[".repeat(20), "nested too deeply"),
            (&"[".repeat(1 << 20), "recursion limit"),
            (&"{a: ".repeat(20), "nested too deeply"),
            (&"{a: ".repeat(1 << 18), "recursion limit"),
            (&"- ".repeat(1 << 19), "nested too deeply"),
            ("a: 1\n---\nb: 2\n", "a second document"),
            ("a: 1\na: 2\n", "key `a` is given twice"),
            ("? [a]\n: 1\n", "a key is no text"),
        ] {
            let refusal = read(text).unwrap_err();
            assert!(refusal.why.contains(why), "{:.20}: {refusal:?}", text);
        }
    }

    #[test]
    fn mistakes_have_a_line() {
        assert_eq!(read("a: 1\nb: [1\nc: 2\n").unwrap_err().line, 3);
        assert_eq!(read("a: 1\nb: 2\na: 3\n").unwrap_err().line, 3);
    }
}
