//! Decides whether a value is as an OpenAPI 3.0 document says, and nothing beside that: every object is closed.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

/// A description of an API.
pub struct Document(Value);

impl Document {
    /// Reads YAML, as far as such a document uses it.
    pub fn read(text: &str) -> Self {
        let mut events = Parser::new_from_str(text).map(|event| event.unwrap_or_else(|error| panic!("the document: {error}")).0);
        loop {
            match events.next() {
                Some(Event::DocumentStart(_)) => break,
                Some(_) => {}
                None => panic!("no document"),
            }
        }
        let first = events.next();
        Self(node(first, &mut events))
    }

    /// Panics unless the reply to `what`, such as `GET vm.info`, with this status is described.
    #[track_caller]
    pub fn check_reply(&self, what: &str, status: u16, reply: &Value) {
        let problems = self.problems(what, status, reply);
        assert!(problems.is_empty(), "{what} {status}: {problems:#?}\n{reply:#}");
    }

    /// Panics unless `value` is as the schema `name` says.
    #[track_caller]
    pub fn check(&self, what: &str, name: &str, value: &Value) {
        let mut problems = Vec::new();
        self.compare(&self.0["components"]["schemas"][name], value, "", &mut problems);
        assert!(problems.is_empty(), "{what}: {problems:#?}\n{value:#}");
    }

    /// What of a reply is not as described; `null` is no body.
    pub fn problems(&self, what: &str, status: u16, reply: &Value) -> Vec<String> {
        let (verb, name) = what.split_once(' ').unwrap_or_else(|| panic!("no verb: {what}"));
        let operation = &self.0["paths"][format!("/{name}")][verb.to_lowercase()];
        if operation.is_null() {
            return vec![format!("{what} is not described")];
        }
        let response = self.follow(&operation["responses"][status.to_string()]);
        if response.is_null() {
            return vec![format!("{status} is not described")];
        }
        let schema = &response["content"]["application/json"]["schema"];
        match (schema.is_null(), reply.is_null()) {
            (true, true) => Vec::new(),
            (true, false) => vec!["no body is described".to_owned()],
            (false, true) => vec!["there is no body".to_owned()],
            (false, false) => {
                let mut problems = Vec::new();
                self.compare(schema, reply, "", &mut problems);
                problems
            }
        }
    }

    /// What a reference refers to.
    fn follow<'d>(&'d self, mut schema: &'d Value) -> &'d Value {
        while let Some(reference) = schema["$ref"].as_str() {
            let pointer = reference.strip_prefix('#').unwrap_or_else(|| panic!("{reference}: another document"));
            schema = self.0.pointer(pointer).unwrap_or_else(|| panic!("{reference} is not there"));
        }
        schema
    }

    fn compare(&self, schema: &Value, value: &Value, at: &str, problems: &mut Vec<String>) {
        let schema = self.follow(schema);
        if let Some(choices) = schema["oneOf"].as_array() {
            let fits = choices.iter().filter(|choice| {
                let mut found = Vec::new();
                self.compare(choice, value, at, &mut found);
                found.is_empty()
            });
            if fits.count() != 1 {
                problems.push(format!("{at}: {value} is not exactly one of the choices"));
            }
            return;
        }
        let kind = schema["type"].as_str().unwrap_or_else(|| panic!("{at}: a schema without a type: {schema}"));
        let is = match kind {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64() || value.is_i64(),
            other => panic!("{at}: type {other}"),
        };
        if !is {
            return problems.push(format!("{at}: {value} is no {kind}"));
        }
        if schema["enum"].as_array().is_some_and(|known| !known.contains(value)) {
            problems.push(format!("{at}: {value} is none of {}", schema["enum"]));
        }
        if let Some(number) = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from)) {
            let bound = |key: &str| schema[key].as_i64().map(i128::from);
            if let Some(least) = bound("minimum").filter(|least| number < *least) {
                problems.push(format!("{at}: {number} is below {least}"));
            }
            if let Some(most) = bound("maximum").filter(|most| number > *most) {
                problems.push(format!("{at}: {number} is above {most}"));
            }
        }
        if let Some(entries) = value.as_array() {
            if schema["maxItems"].as_u64().is_some_and(|most| entries.len() as u64 > most) {
                problems.push(format!("{at} has {} entries", entries.len()));
            }
            for (n, entry) in entries.iter().enumerate() {
                self.compare(&schema["items"], entry, &format!("{at}/{n}"), problems);
            }
        }
        if let Some(map) = value.as_object() {
            self.compare_keys(schema, map, at, problems);
        }
    }

    fn compare_keys(&self, schema: &Value, map: &Map<String, Value>, at: &str, problems: &mut Vec<String>) {
        for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !map.contains_key(key) {
                problems.push(format!("{at}: {key} is missing"));
            }
        }
        for (key, value) in map {
            let at = format!("{at}/{key}");
            match (&schema["properties"][key], &schema["additionalProperties"]) {
                (Value::Null, Value::Null) => problems.push(format!("{at} is not described: {value}")),
                (Value::Null, others) => self.compare(others, value, &at, problems),
                (property, _) => self.compare(property, value, &at, problems),
            }
        }
    }
}

fn node<'t>(event: Option<Event<'t>>, events: &mut impl Iterator<Item = Event<'t>>) -> Value {
    match event {
        Some(Event::Scalar(text, ScalarStyle::Plain, ..)) => plain(&text),
        Some(Event::Scalar(text, ..)) => Value::String(text.into_owned()),
        Some(Event::SequenceStart(..)) => {
            let mut list = Vec::new();
            loop {
                match events.next() {
                    Some(Event::SequenceEnd) => return Value::Array(list),
                    entry => list.push(node(entry, events)),
                }
            }
        }
        Some(Event::MappingStart(..)) => {
            let mut map = Map::new();
            loop {
                match events.next() {
                    Some(Event::MappingEnd) => return Value::Object(map),
                    Some(Event::Scalar(key, ..)) => {
                        let value = events.next();
                        let key = key.into_owned();
                        let value = node(value, events);
                        assert!(map.insert(key.clone(), value).is_none(), "{key} is there twice");
                    }
                    other => panic!("a key that is no text: {other:?}"),
                }
            }
        }
        other => panic!("{other:?} in the document"),
    }
}

/// A plain scalar, as YAML 1.2's core schema has it.
fn plain(text: &str) -> Value {
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        "null" | "~" | "" => Value::Null,
        _ => text.parse::<i64>().map_or_else(|_| Value::String(text.to_owned()), |number| Value::Number(Number::from(number))),
    }
}
